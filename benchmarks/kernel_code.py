"""Read the resources that the kernels need from the machine code that Triton generates: no GPU is needed.

python -m benchmarks.kernel_code [--json FILE]   # compiles for sm_80 to sm_120, and counts a sample's host work
python -m benchmarks.gpu_day --page              # shows the results in docs/gpu.md, beside those of an earlier commit
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton

from benchmarks.fake_driver import FakeDriver, installed
from benchmarks.kernel_code_table import RESULTS, render
from benchmarks.machine import describe_machine
from benchmarks.shapes import MODELS
from wandb_gradwatch._measure import cuda as kernels
from wandb_gradwatch._measure import cuda_launch

CAPABILITIES = (80, 90, 100, 120)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

CPU = torch.device("cpu")
_NAMES = {0: "float32", 1: "bfloat16", 2: "float16", 3: "float64"}
_SAID = ("SQUARES", "DEAD", "SCALED", "HISTOGRAM")

_INTEGER_UNIT = re.compile(
    r"(FMNMX|V?I(MN)?MNMX|IADD|VIADD|LOP|PLOP|SHF|SEL|FSEL|FSETP|FSET|ISETP|PRMT|LEA|IABS|MOV\b|SGXT|BMSK|R2P|P2R|NOP)"
)


class Taken(NamedTuple):
    """The resources of a variant of a kernel.

    Args:
        registers: registers per thread.
        stack: bytes per thread that did not fit into registers.
        shared: bytes of shared memory per program.
        instructions: instructions per element, in the loop that reads it.
        integer: those of `instructions` that only half of a core's units can execute.
        atomics: those of `instructions` that count in shared memory.
    """

    registers: int
    stack: int
    shared: int
    instructions: float
    integer: float
    atomics: float


def compile_all(capability: int, **options: Any) -> list[Any]:
    """Return the kernels that warm_up() compiles for such a GPU, in order."""
    made: list[Any] = []
    with (
        mock.patch.object(cuda_launch, "_compiled", set()),
        mock.patch.object(kernels, "build_launcher", made.append),
        installed(FakeDriver(capability)),
    ):
        for dead_threshold in options.pop("dead_thresholds", (0.0,)):
            cuda_launch.warm_up(CPU, dead_threshold=dead_threshold, histogram=True, **options)
    return made


def variant(compiled: Any) -> str:
    """Return a kernel's name with the constants that distinguish its variants."""
    names = compiled.src.fn.arg_names
    constants = {
        names[key[0]] if isinstance(key, tuple) else names[key] if isinstance(key, int) else key: value
        for key, value in compiled.src.constants.items()
    }
    said = [_NAMES[constants["DTYPE"]]] if "DTYPE" in constants else []
    said += [] if constants.get("ALIGNED", True) else ["unaligned"]
    said += [name.lower() for name in _SAID if constants.get(name)]
    return " ".join([compiled.src.fn.__name__, *said])


def taken_by(compiled: Any) -> Taken:
    """Read a compiled kernel's resources from its machine code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cubin"
        path.write_bytes(compiled.asm["cubin"])
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _run_tool("cuobjdump", "--dump-resource-usage", str(path)))
        loop = _loop_that_reads(_run_tool("cuobjdump", "-sass", str(path)))
    assert usage is not None
    num_elements = _num_bytes(loop) / (4 if "float32" in variant(compiled) else 2) or 1
    counts = (
        len(loop),
        sum(_INTEGER_UNIT.match(name) is not None for name in loop),
        sum(name.startswith("ATOMS") for name in loop),
    )
    shared = compiled.metadata.shared + 4 * sum(
        int(size) for size in re.findall(r"gradwatch_cells\[(\d+)\]", compiled.asm["ptx"])
    )
    return Taken(int(usage.group(1)), int(usage.group(2)), shared, *(count / num_elements for count in counts))


def _run_tool(tool: str, *arguments: str) -> str:
    return subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True).stdout


def _loop_that_reads(sass: str) -> list[str]:
    """Return the instructions in one round of the loop that reads most."""
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)
    code = [(int(address, 16), text) for address, text in found]
    jumps = [(int(target.group(1), 16), at) for at, text in code if (target := re.search(r"BRA.* (0x[0-9a-f]+)", text))]
    plain = [(at, re.sub(r"^@!?U?P\w+ ", "", text).split()[0]) for at, text in code]
    loops = [[name for at, name in plain if first <= at <= last] for first, last in jumps if first < last]
    return max(loops, key=lambda loop: (_num_bytes(loop), -len(loop)), default=[])  # none: there is no loop


def _num_bytes(loop: list[str]) -> int:
    """Return the bytes that a thread reads in one round of this loop."""
    widths = {"128": 16, "64": 8, "U16": 2, "U8": 1}
    return sum(widths.get(name.split(".")[-1], 4) for name in loop if name.startswith("LDG"))


def passes_of_atomics(values: np.ndarray[Any, np.dtype[np.float32]]) -> float:
    """Return the mean number of passes of a warp's atomics over shared memory: the accesses to its busiest bank.

    Args:
        values: of warps, [W, 32].
    """
    lanes = np.arange(32)
    cells = values.view(np.uint32) >> 22
    places = np.where(values == 0, 2048 + lanes, 2 * cells + lanes % 2)
    asked = (places[:, :, None] % 32 == np.arange(32)).sum(axis=1)
    return float(asked.max(axis=1).mean())


def passes() -> dict[str, float]:
    """Return the passes for two kinds of gradients."""
    normal = np.random.default_rng(0).standard_normal((4000, 32)).astype(np.float32)
    mostly_zero = np.where(np.random.default_rng(1).random(normal.shape) < 0.9, np.float32(0), normal)
    return {"normal": passes_of_atomics(normal), "nine of ten 0": passes_of_atomics(mostly_zero)}


def host_work() -> dict[str, float]:
    """Measure the host's cost of a sample of GPT-2 small with its parameters, with a driver that launches nothing.

    Returns:
        launches; calls of Python functions; ms: time of the fastest sample, because each does the same work.
    """
    launches: list[int] = []
    gradients = [torch.zeros(shape, dtype=torch.bfloat16) for shape in MODELS["GPT-2 small"]()]
    parameters = [torch.nn.Parameter(gradient) for gradient in gradients]

    def measure() -> None:
        cuda_launch.measure(gradients, parameters, dead_threshold=0.0, inverse_scale=None, histogram=False)

    with torch.no_grad(), installed(FakeDriver(90, lambda ptx, num_programs, arguments: launches.append(num_programs))):
        measure()  # compiles the kernels and lays out the tables
        launches.clear()
        calls = count_calls(measure)
        num_launches = len(launches)
        seconds = []
        for _ in range(300):
            began = time.perf_counter()
            measure()
            seconds.append(time.perf_counter() - began)
    return {"launches": num_launches, "calls": calls, "ms": min(seconds) * 1e3}


def count_calls(function: Any) -> int:
    """Count calls of Python functions inside the context."""
    calls: list[str] = []
    sys.setprofile(lambda _, event, __: calls.append(event) if event == "call" else None)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


def measure_all() -> dict[str, Any]:
    """Return the resources of all variants for float32 and bfloat16 by compute capability, and the host's work."""
    variants = {}
    for capability in CAPABILITIES:
        made = compile_all(capability, dtypes=[torch.float32, torch.bfloat16], in_buckets=False)
        variants[str(capability)] = {variant(compiled): taken_by(compiled)._asdict() for compiled in made}
    return {"machine": describe_machine(CPU), "variants": variants, "host": host_work(), "passes": passes()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--before", action="store_true", help="this commit's is what later ones are compared with")
    options = parser.parse_args(arguments)
    results = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else {}
    results["before" if options.before else "now"] = measure_all()
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(render(results))


if __name__ == "__main__":
    main()
