"""The kernels as Triton compiles them for a GPU: what they take of it, and what they compute when they are executed.

No GPU is needed: fake_driver.py says which one there is, and ptx_emulator.py executes the PTX. Slow, and therefore left
out of `make test`; `make test-all` runs it under today's Triton, .ci/run what it computes under the oldest one.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from statistics_oracle import assert_row

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

from fake_driver import FakeDriver, installed  # noqa: E402
from ptx_emulator import Launch, Memory, PtxError  # noqa: E402

from wandb_gradwatch._measure import cuda as kernels  # noqa: E402
from wandb_gradwatch._measure import cuda_launch, reference  # noqa: E402

CPU = torch.device("cpu")
NAMES = {0: "float32", 1: "bfloat16", 2: "float16", 3: "float64"}
CHUNK = 8192  # shorter than in production, as the emulator takes its time; the kernels are the same
# As in kernel_suite.py: a tree of 16 float32 squares in each round, 4 deep, and the rounds one after the other.
TOLERANCE = (1 + 4 + CHUNK / (16 * cuda_launch.LANES)) * 2.0**-24
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


# ---- what they take


def compile_all(capability: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """What warming up compiles for such a GPU."""
    made: list[Any] = []
    monkeypatch.setattr(cuda_launch, "_compiled", set())
    monkeypatch.setattr(kernels, "build_launcher", made.append)
    with installed(FakeDriver(capability)):
        for dead_threshold in options.pop("dead_thresholds", (0.0,)):
            cuda_launch.warm_up(CPU, dead_threshold=dead_threshold, histogram=True, **options)
    return made


def variant(compiled: Any) -> str:
    """A kernel's name with the constants that tell its variants apart."""
    names = compiled.src.fn.arg_names
    constants = {
        names[key[0]] if isinstance(key, tuple) else names[key] if isinstance(key, int) else key: value
        for key, value in compiled.src.constants.items()
    }
    said = [NAMES[constants["DTYPE"]]] if "DTYPE" in constants else []
    said += [] if constants.get("ALIGNED", True) else ["unaligned"]
    said += [name.lower() for name in ("DEAD", "SCALED", "HISTOGRAM") if constants.get(name)]
    return " ".join([compiled.src.fn.__name__, *said])


def run_tool(tool: str, *arguments: str) -> str:
    if not (TOOLS / tool).exists():
        pytest.skip(f"this Triton has no {tool}")
    return subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True).stdout


def resources(compiled: Any, path: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack: what did not fit into registers."""
    path.write_bytes(compiled.asm["cubin"])
    usage = re.search(r"REG:(\d+) STACK:(\d+)", run_tool("cuobjdump", "--dump-resource-usage", str(path)))
    assert usage is not None
    return int(usage.group(1)), int(usage.group(2))


def instructions_of_loop(compiled: Any, path: Path) -> list[str]:
    """What the machine executes in each round of the loop that reads most, from the machine code."""
    path.write_bytes(compiled.asm["cubin"])
    found = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", run_tool("cuobjdump", "-sass", str(path)))
    code = [(int(address, 16), text) for address, text in found]
    jumps = [(int(target.group(1), 16), at) for at, text in code if (target := re.search(r"BRA.* (0x[0-9a-f]+)", text))]
    plain = [(at, re.sub(r"^@!?U?P\w+ ", "", text).split()[0].split(".")[0]) for at, text in code]
    loops = [[name for at, name in plain if first <= at <= last] for first, last in jumps if first < last]
    return max(loops, key=lambda loop: (loop.count("LDG"), -len(loop)))


# The most registers of a thread, and instructions per element (None: not asked). A core of a GPU has 65536 registers,
# a program 128 threads: with 64 registers 8 programs run at once, with 72 seven, with 128 four. A core of an H100
# executes 128 instructions per cycle and gets 18.6 bytes from memory meanwhile (4.3 TB/s, 132 cores, 1.755 GHz): that
# leaves 27 instructions for an element of 32 bits and 14 for one of 16.
BUDGETS: dict[str, tuple[int, float | None]] = {
    "measure_chunks float32": (40, 14),
    "measure_chunks bfloat16": (80, 14),
    "measure_chunks float32 histogram": (56, 18),
    "measure_chunks bfloat16 histogram": (80, 17),
    "square_chunks float32": (40, 5),
    "square_chunks bfloat16": (40, 5),
    "measure_carefully": (128, None),
    "measure_carefully histogram": (128, None),
    "fold": (128, None),
}
# Everything else: what a scale, a threshold or an address in a bucket asks for.
MOST_REGISTERS, MOST_STACK = 168, 16


def what_is_taken(made: list[Any], path: Path) -> dict[str, tuple[int, int, float]]:
    """Of each variant: registers, bytes of stack, instructions per element of the loop that reads it."""
    taken = {}
    for compiled in {variant(compiled): compiled for compiled in made}.values():
        name = variant(compiled)
        loop = Counter(instructions_of_loop(compiled, path))
        of_a_load = 4 if "float32" in name else 8  # elements; of a load of 16 bytes
        taken[name] = (*resources(compiled, path), loop.total() / max(loop["LDG"] * of_a_load, 1))
    return taken


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_what_a_training_needs_first_is_within_its_budget(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dtypes = [torch.float32, torch.bfloat16]
    taken = what_is_taken(compile_all(capability, monkeypatch, dtypes=dtypes, in_buckets=False), tmp_path / "cubin")
    assert set(BUDGETS) <= set(taken)
    for name, (max_registers, max_instructions) in BUDGETS.items():
        registers, stack, per_element = taken[name]
        assert registers <= max_registers, name
        assert stack <= (MOST_STACK if max_instructions is None else 0), name
        assert max_instructions is None or 1 < per_element <= max_instructions, name


def test_no_variant_takes_much_more_and_each_has_its_cells_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    made = compile_all(90, monkeypatch, dtypes=dtypes, dead_thresholds=(0.0, 0.1))
    for name, (registers, stack, _) in what_is_taken(made, tmp_path / "cubin").items():
        assert registers <= MOST_REGISTERS, name
        assert stack <= MOST_STACK, name
    for compiled in made:
        assert compiled.asm["ptx"].count("gradwatch_cells[") == ("histogram" in variant(compiled)), variant(compiled)


def test_few_variants_are_compiled_and_those_of_the_first_sample_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = compile_all(90, monkeypatch, dtypes=[torch.bfloat16], in_buckets=False)
    first = ["measure_chunks bfloat16 histogram", "square_chunks bfloat16", "measure_carefully histogram", "fold"]
    then = ["measure_chunks bfloat16", "measure_carefully", "measure_chunks bfloat16 scaled histogram"]
    assert [variant(compiled) for compiled in made] == first + then


# ---- what they compute


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def emulated(request: pytest.FixtureRequest, memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Launches are executed, for the capability that the test is given; their PTX is collected."""
    launched: list[str] = []

    def launch(ptx: str, num_programs: int, arguments: tuple[Any, ...]) -> None:
        launched.append(ptx)
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                memory.add(argument)
        numbers = [a.data_ptr() if isinstance(a, torch.Tensor) else int(a) for a in arguments]
        Launch(ptx, num_programs, numbers, memory).run()

    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs).fill_(-12345.0)

    monkeypatch.setattr(cuda_launch, "CHUNK", CHUNK)
    monkeypatch.setattr(torch, "empty", poisoned)  # what is read before it is written does not look like a number
    with installed(FakeDriver(getattr(request, "param", 90), launch)):
        yield launched


def gradients_of(dtype: torch.dtype, offset: int = 0) -> list[torch.Tensor]:
    """Values of every kind and number; they begin `offset` elements behind an aligned place."""
    size, generator = 2 * CHUNK + 301, torch.Generator().manual_seed(0)
    normal = torch.randn(size + 8, generator=generator)
    mixed, exact, one_nan = normal.clone(), normal.clone(), normal.clone()
    mixed[::7], mixed[1::7], mixed[2::9], mixed[3::5], mixed[4::5] = math.nan, math.inf, -math.inf, -0.0, 1e-40
    exact[::6], exact[1::6], exact[2::6], exact[3::6], exact[4::6] = -0.0, 0.0, 0.25, -0.25, 0.25 * 65536
    one_nan[5] = math.nan
    kinds = [(normal, size), (exact, CHUNK), (normal.relu(), CHUNK), (mixed, CHUNK + 5), (one_nan, CHUNK)]
    kinds += [(normal * 1e-41, CHUNK), (normal * 1e25, 777), (normal * 0, CHUNK), (normal, 0)]
    if dtype is torch.float64:
        kinds = [(normal, 3000), (mixed, 2049), (exact, 5)]
    return [values.to(dtype)[offset : offset + length] for values, length in kinds]


def assert_emulated(memory: Memory, gradients: list[torch.Tensor], parameters: bool, **kwargs: Any) -> None:
    for gradient in gradients:
        memory.add(gradient)
    others = gradients[::-1] if parameters else None
    rows, histograms = cuda_launch.measure(gradients, others, **kwargs)
    expected_rows, expected_histograms = reference.measure(gradients, others, **kwargs)
    for row, expected in zip(rows.numpy(), expected_rows.numpy(), strict=True):
        assert_row(row, expected, TOLERANCE)
    if histograms is not None and expected_histograms is not None:
        np.testing.assert_array_equal(histograms, expected_histograms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("offset", "dead_threshold", "scale", "histogram"),
    [
        (0, 0.0, None, False),
        (0, 0.0, None, True),
        (0, 0.25, 2.0**-3, True),
        (0, 0.25, 1 / 3, False),
        (1, 0.25, None, True),
    ],
)
def test_the_machine_code_computes_what_the_reference_does(
    emulated: list[str],
    memory: Memory,
    dtype: torch.dtype,
    offset: int,
    dead_threshold: float,
    scale: float | None,
    histogram: bool,
) -> None:
    inverse_scale = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    kwargs = {"dead_threshold": dead_threshold, "inverse_scale": inverse_scale, "histogram": histogram}
    assert_emulated(memory, gradients_of(dtype, offset), parameters=scale is None, **kwargs)
    assert len(emulated) <= 4


@pytest.mark.parametrize("emulated", [80, 100, 120], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_does_that_for_other_gpus(emulated: list[str], memory: Memory, dtype: torch.dtype) -> None:
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": True}
    assert_emulated(memory, gradients_of(dtype), parameters=True, **kwargs)


def test_checks_for_overflowing_integers_find_nothing(
    emulated: list[str], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRITON_DEBUG=1 makes a device assertion of each integer addition: one that fails ends the training."""
    for kernel in (kernels.measure_chunks, kernels.square_chunks, kernels.measure_carefully, kernels.fold):
        monkeypatch.setattr(kernel, "debug", True)
    kwargs = {"dead_threshold": 0.25, "inverse_scale": None, "histogram": True}
    assert_emulated(memory, gradients_of(torch.float32), parameters=True, **kwargs)
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 2):  # the first with these checks
        assert any("assertfail" in ptx for ptx in emulated)


def test_memory_that_no_launch_was_given_is_out_of_bounds(emulated: list[str]) -> None:
    with pytest.raises(PtxError, match="out of bounds"):
        cuda_launch.measure(gradients_of(torch.float32), None, dead_threshold=0.0, inverse_scale=None, histogram=False)


def test_a_barrier_that_is_not_there_is_missed(
    emulated: list[str], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = Launch.__init__

    def without_barriers(self: Launch, ptx: str, *args: Any) -> None:
        execute(self, re.sub(r"bar\.sync\s+0;", "", ptx), *args)

    monkeypatch.setattr(Launch, "__init__", without_barriers)
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": True}
    with pytest.raises(PtxError, match="without a barrier"):
        assert_emulated(memory, gradients_of(torch.float32), parameters=False, **kwargs)


# ---- where compiling is not easy


def test_a_warning_of_tritons_is_no_failure_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class OldFashioned(FakeDriver):
        def get_current_target(self) -> Any:
            warnings.warn("this will go away", DeprecationWarning, stacklevel=2)
            return super().get_current_target()

    monkeypatch.setattr(cuda_launch, "_compiled", set())
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": False}
    fake = OldFashioned(
        75, lambda ptx, num_programs, arguments: launched.append(num_programs)
    )  # no other test has this GPU
    with installed(fake), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning, match="this will go away"):
            fake.get_current_target()
        cuda_launch.measure([torch.ones(3)], None, **kwargs)
    assert launched == [1, 1]


def test_a_folder_that_cannot_be_written_to_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nowhere = str(tmp_path / "file" / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", nowhere)
    made = compile_all(86, monkeypatch, dtypes=[torch.float64], in_buckets=False)
    assert [variant(compiled) for compiled in made] == ["measure_carefully histogram", "fold", "measure_carefully"]
    assert os.environ["TRITON_CACHE_DIR"] == nowhere


# ---- what a sample costs the host


def test_a_sample_is_four_launches_and_no_more_calls_for_more_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []
    calls: Counter[int] = Counter()

    def calls_of(num_tensors: int) -> int:
        gradients = [torch.zeros(5000, dtype=torch.bfloat16) for _ in range(num_tensors)]
        parameters = [torch.nn.Parameter(gradient.clone()) for gradient in gradients]
        kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": False}
        cuda_launch.measure(gradients, parameters, **kwargs)  # compiled, and laid out
        launches.clear()
        sys.setprofile(lambda _, event, __: calls.update([num_tensors]) if event == "call" else None)
        try:
            with torch.no_grad():
                cuda_launch.measure(gradients, parameters, **kwargs)
        finally:
            sys.setprofile(None)
        return calls[num_tensors]

    with installed(FakeDriver(90, lambda ptx, num_programs, arguments: launches.append(num_programs))):
        few, many = calls_of(10), calls_of(200)
    assert len(launches) == 4
    assert many == few
    assert many < 500  # nearly all of them Triton's own: 80 for each launch
