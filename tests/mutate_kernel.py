"""Plant faults in the measuring backends and check that a test catches each: `python tests/mutate_kernel.py [FILE ...]`.

Not collected by pytest: this script runs the tests once per fault, in a copy of the package.
"""

# ruff: noqa: E501
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parent.parent


class Fault(NamedTuple):
    """Replace the text `right`, which must occur exactly `occurrences` times in `file`, by `wrong`."""

    name: str
    file: str
    right: str
    wrong: str
    occurrences: int = 1


KERNEL, LAUNCH, PLAN = "cuda.py", "cuda_launch.py", "cuda_plan.py"
CPU, PIECES, GENERIC = "cpu.py", "cpu_pieces.py", "generic.py"

# fmt: off
FAULTS = (  # one line each, however long
    Fault("the last element of an end is not read", KERNEL, "mask = begin + lanes < count", "mask = begin + lanes < count - 1"),
    Fault("one element past the end is read", KERNEL, "mask = begin + lanes < count", "mask = begin + lanes <= count"),
    Fault("a whole chunk is read without its last round", KERNEL, "range(0, count * ITEMSIZE, LANES * 64)", "range(0, count * ITEMSIZE - LANES * 64, LANES * 64)"),
    Fault("chunks start one element late", PLAN, "number * longest[tensor])", "number * longest[tensor] + 1)"),
    Fault("the end of a tensor is left out", PLAN, "num_chunks_of = num_whole + (whole < sizes)", "num_chunks_of = num_whole + 0 * (whole < sizes)"),
    Fault("an end is taken for a whole chunk", PLAN, "(careful[tensor] | is_end)", "careful[tensor]"),
    Fault("the fold drops the last partial", KERNEL, "mask = index < count\n", "mask = index < count - 1\n"),
    Fault("the minimum of the last partials only", KERNEL, "lowest = tl.minimum(lowest, tl.load(here", "lowest = (tl.load(here"),
    Fault("NaN enters the careful sums", KERNEL, "clean = tl.where(finite, values, 0.0)", "clean = tl.where(magnitude == _INFINITY, 0.0, values)"),
    Fault("Inf is taken for NaN", KERNEL, "(magnitude > _INFINITY)", "(magnitude >= _INFINITY)"),
    Fault("overflow is not read again", KERNEL, '(chunk_sq < float("inf"))', "(chunk_sq == chunk_sq)"),
    Fault("underflow is not read again", KERNEL, "tl.constexpr(2.0**-98)", "tl.constexpr(-1.0)"),
    Fault("parameters that overflow are not read again", KERNEL, "0 if SQUARES else _LARGEST", "_LARGEST"),
    Fault("NaN is taken for zeros", KERNEL, "| (bits == _LARGEST)", "| (num_zero == count)"),
    Fault("a refused chunk is not read again", KERNEL, "== _REFUSED", "== 7.0"),
    Fault("zero is the smallest non-zero magnitude", KERNEL, "= _or_largest(a), _or_largest(b)", "= _or_largest(a), _doubled(b)"),
    Fault("negative zero is no zero", KERNEL, "return (_doubled(tile) == 0).to(tl.int32)", "return ((_doubled(tile) == 0) & (tile != tile)).to(tl.int32)"),
    Fault("the dead threshold is exclusive", KERNEL, "& _MAGNITUDE) <= dead", "& _MAGNITUDE) < dead"),
    Fault("the careful dead threshold is exclusive", KERNEL, "(true_magnitude <= dead)", "(true_magnitude < dead)"),
    Fault("the ordinary dead threshold is exclusive", LAUNCH, "max(2 * of_float32 + 1, 0)", "max(2 * of_float32, 0)"),
    Fault("the dead threshold is that of the other width", KERNEL, "            dead = tl.load(table)\n", "            dead = tl.load(table + 1)\n"),
    Fault("the sum of squares is scaled once", KERNEL, "tl.sum(total_sq, axis=0) * scale * scale", "tl.sum(total_sq, axis=0) * scale", 2),
    Fault("bins are those of the unscaled gradient", KERNEL, "_cells_of_float64(true), _is_finite_and_not_zero(true)", "_cells_of_float64(values), _is_finite_and_not_zero(values)"),
    Fault("bins begin one too high", KERNEL, "tl.maximum(code - 158", "tl.maximum(code - 157"),
    Fault("subnormal values share the next bin", KERNEL, "tl.minimum(code >> 1, 1)", "tl.minimum(code, 1)"),
    Fault("subnormal values of float64 share the next bin", KERNEL, "tl.where(code < 2, 0, tl.minimum(code, 509))", "tl.where(code < 0, 0, tl.minimum(code, 509))"),
    Fault("the sign of a bin is lost", KERNEL, "tl.where(bits < 0, code + 512, code)", "code"),
    Fault("the sign of every bin is lost", KERNEL, "tl.where(cells < 512, _ZERO_BIN", "tl.where(cells < 1024, _ZERO_BIN"),
    Fault("zeros are counted in the lowest bin", KERNEL, "tl.where(counted != 0, cells.to(tl.int32), _NO_CELL)", "cells.to(tl.int32)"),
    Fault("zeros of a chunk are forgotten", KERNEL, "tl.atomic_add(row + _ZERO_BIN, zeros", "tl.atomic_add(row + _ZERO_BIN, 0 * zeros"),
    Fault("a tile is left out", KERNEL, "+ (tl.sum(c, axis=AXIS) + tl.sum(d, axis=AXIS))", "+ tl.sum(c, axis=AXIS)"),
    Fault("a tile is read twice", KERNEL, "address + 2 * TILE", "address + 1 * TILE"),
    Fault("loads of lanes overlap", KERNEL, "tl.arange(0, LANES)[:, None] * VECTOR", "tl.arange(0, LANES)[:, None]"),
    Fault("loads of unaligned lanes overlap", KERNEL, "tl.arange(0, VECTOR)[:, None] * LANES", "tl.arange(0, VECTOR)[:, None]"),
    Fault("the other half of a pair is the first again", KERNEL, "(tile & 0xFFFF0000)", "(tile << 16)"),
    Fault("bfloat16 is read as float16", KERNEL, "(halves.to(tl.uint32) << 16)", "(halves.to(tl.uint32) << 13)"),
    Fault("a list is read with its first dtype", LAUNCH, '"DTYPE": group.code', '"DTYPE": plan.groups[0].code'),
    Fault("a parameter's address 0 is no missing one", KERNEL, 'true_sq = tl.where(missing, float("nan")', "true_sq = tl.where(missing, 0.0"),
    Fault("threads share a table's moment", LAUNCH, "_one_at_a_time: Final = threading.Lock()", "_one_at_a_time: Final = nullcontext()"),
    Fault("unaligned gradients are not warmed up", LAUNCH, "(True, False) if in_buckets else (True,)", "(True,)"),
    Fault("launchers are not warmed up", LAUNCH, "kernels.build_launcher(kernel.warmup(*arguments, grid=(num_programs,), **constants))", "kernel.warmup(*arguments, grid=(num_programs,), **constants)"),
    Fault("an unchanged table is trusted too long", PLAN, "if values == self.last:", "if self.last:"),
    Fault("witnesses are the first elements", KERNEL, "lanes * tl.maximum(size // num_witnesses, 1)", "lanes"),
    Fault("pinned memory in flight is reused", PLAN, "if self._uploads and self._uploads[0][1].query():", "if self._uploads:"),
    Fault("strides are ignored", "elements.py", "tensor.reshape(-1).contiguous()", "tensor.reshape(-1)"),
    Fault("CPU: the innermost negative is lost", PIECES, "nearest_G = np.minimum.reduceat(signed", "nearest_G = np.maximum.reduceat(signed"),
    Fault("CPU: large squares stay in float32", PIECES, "_SMALL_SQ < total_sq < np.inf", "_SMALL_SQ < total_sq"),
    Fault("CPU: zeros count as subnormal", PIECES, "histogram_GB[:, ZERO_BIN + 1] -= num_positive_G", "pass"),
    Fault("CPU: pieces end one early", CPU, "accumulate(sizes[tensor] for tensor in tensors)", "accumulate(sizes[tensor] - 1 for tensor in tensors)"),
    Fault("torch: filling counts as NaN", GENERIC, "rows_NC[:, Column.NUM_NAN] -= tiling.num_filling", "pass"),
    Fault("torch: the fold loses a line", GENERIC, "np.where(within < np.repeat(counts, groups)", "np.where(within + 1 < np.repeat(counts, groups)"),
)
# fmt: on


def is_caught(fault: Fault, healthy: Path) -> bool:
    """Run the tests on a copy of the healthy tree with this fault; return whether a test fails."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "tree"
        shutil.copytree(healthy, copy)
        path = copy / "wandb_gradwatch" / "_measure" / fault.file
        text = path.read_text()
        if text.count(fault.right) != fault.occurrences:
            raise SystemExit(f"{fault.name}: {fault.right!r} occurs {text.count(fault.right)} times in {fault.file}")
        path.write_text(text.replace(fault.right, fault.wrong))
        tests = ["tests/kernel_suite.py"]
        if fault.file not in (KERNEL, LAUNCH, PLAN):
            tests = ["tests/test_statistics_backends.py", "tests/test_statistics_cuda.py"]
        # Workers import the copy, because its directory precedes installed packages.
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        if not torch.cuda.is_available():
            environment["TRITON_INTERPRET"] = "1"
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        result = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
        if result.returncode not in (0, 1):
            raise SystemExit(f"{fault.name}: the tests did not run\n{result.stdout.decode()}{result.stderr.decode()}")
        return result.returncode == 1


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        healthy = Path(directory)  # copied once, because the tree may be edited meanwhile
        for name in ("wandb_gradwatch", "tests"):
            shutil.copytree(ROOT / name, healthy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", healthy)
        sys.exit(run(healthy, sys.argv[1:]))


def run(healthy: Path, files: list[str]) -> int:
    """Plant the faults of these files, by default of all, print which are caught, and return 0 if all are."""
    if is_caught(Fault("nothing", PLAN, "NUM_PARTIALS: Final", "NUM_PARTIALS: Final"), healthy):
        print("the tests fail without a fault")
        return 1
    chosen = [fault for fault in FAULTS if not files or fault.file in files]
    num_missed = 0
    for fault in chosen:
        caught = is_caught(fault, healthy)
        num_missed += not caught
        print(f"{'caught' if caught else 'MISSED'}  {fault.file}: {fault.name}", flush=True)
    print(f"{len(chosen) - num_missed} of {len(chosen)} faults caught")
    return 1 if num_missed else 0


if __name__ == "__main__":
    main()
