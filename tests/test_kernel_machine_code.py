"""The kernels as Triton compiles them for a GPU: what they take of it, and what they compute when they are executed.

No GPU is needed: benchmarks/fake_driver.py says which one there is, and ptx_emulator.py executes the PTX. Slow, and
therefore left out of `make test`; `make test-all` runs it under today's Triton, .ci/run what it computes under the
oldest one.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from statistics_oracle import assert_row

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

from ptx_emulator import Launch, Memory, PtxError  # noqa: E402

from benchmarks import kernel_code  # noqa: E402
from benchmarks.fake_driver import FakeDriver, installed  # noqa: E402
from benchmarks.kernel_code import compile_all, variant  # noqa: E402
from wandb_gradwatch._measure import cuda as kernels  # noqa: E402
from wandb_gradwatch._measure import cuda_launch, generic, reference  # noqa: E402
from wandb_gradwatch._measure import measure as door  # noqa: E402
from wandb_gradwatch._measure.columns import Column  # noqa: E402

CPU = torch.device("cpu")
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
CHUNK = 8192  # shorter than in production, as the emulator takes its time; the kernels are the same
# As in kernel_suite.py: a tree of 16 float32 squares in each round, 4 deep, and the rounds one after the other.
TOLERANCE = (1 + 4 + CHUNK / (16 * cuda_launch.LANES)) * 2.0**-24


# The most registers of a thread, and instructions per element (None: not asked). A core of a GPU has 65536 registers,
# a program 128 threads: with 64 registers 8 programs run at once, with 72 seven, with 128 four. A core of an H100
# executes 128 instructions per cycle and gets 18.6 bytes from memory meanwhile (4.3 TB/s, 132 cores, 1.755 GHz): that
# leaves 27 instructions for an element of 32 bits and 14 for one of 16.
BUDGETS: dict[str, tuple[int, float | None]] = {
    "measure_chunks float32": (40, 14),
    "measure_chunks bfloat16": (64, 14),
    "measure_chunks float32 histogram": (56, 15),
    "measure_chunks bfloat16 histogram": (64, 16),
    "measure_chunks float32 squares": (40, 3),
    "measure_chunks bfloat16 squares": (40, 3),
    "measure_carefully": (128, None),
    "measure_carefully histogram": (128, None),
    "fold": (128, None),
    "take_witnesses": (64, None),
}
# Everything else: what a scale, a threshold or an address in a bucket asks for.
MOST_REGISTERS, MOST_STACK = 168, 16


def what_is_taken(made: list[Any]) -> dict[str, kernel_code.Taken]:
    if not (kernel_code.TOOLS / "cuobjdump").exists():
        pytest.skip("this Triton has no cuobjdump")
    return {variant(compiled): kernel_code.taken_by(compiled) for compiled in made}


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_what_a_training_needs_first_is_within_its_budget(capability: int) -> None:
    taken = what_is_taken(compile_all(capability, dtypes=[torch.float32, torch.bfloat16], in_buckets=False))
    assert set(BUDGETS) <= set(taken)
    for name, (max_registers, max_instructions) in BUDGETS.items():
        assert taken[name].registers <= max_registers, name
        assert taken[name].stack <= (MOST_STACK if max_instructions is None else 0), name
        assert max_instructions is None or 1 < taken[name].instructions <= max_instructions, name


def test_no_variant_takes_much_more_and_each_has_its_cells_once() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
    made = compile_all(90, dtypes=dtypes, dead_thresholds=(0.0, 0.1))
    for name, taken in what_is_taken(made).items():
        assert taken.registers <= MOST_REGISTERS, name
        assert taken.stack <= MOST_STACK, name
    for compiled in made:
        assert compiled.asm["ptx"].count("gradwatch_cells[") == ("histogram" in variant(compiled)), variant(compiled)


def test_few_variants_are_compiled_and_those_of_the_first_sample_first() -> None:
    made = compile_all(90, dtypes=[torch.bfloat16], in_buckets=False)
    first = ["measure_chunks bfloat16 histogram", "measure_chunks bfloat16 squares"]
    first += ["measure_carefully histogram", "fold", "take_witnesses"]
    then = ["measure_chunks bfloat16", "measure_carefully", "measure_chunks bfloat16 scaled histogram"]
    assert [variant(compiled) for compiled in made] == first + then


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


@pytest.mark.parametrize("emulated", [80, 90], indirect=True)
def test_the_machine_code_takes_the_same_witnesses_as_torch(emulated: list[str], memory: Memory) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    gradients = [torch.randn(size).to(dtype) for size in (0, 1, 63, 1000) for dtype in dtypes]
    parameters = gradients[::-1]
    for tensor in gradients:
        memory.add(tensor)
    expected = generic.take_witnesses(gradients, parameters, 50)
    assert torch.equal(cuda_launch.take_witnesses(gradients, parameters, 50), expected)
    assert len(emulated) == 1


needs_blackwell = pytest.mark.skipif(VERSION < (3, 3), reason="this Triton does not know Blackwell, and aborts")


@pytest.mark.parametrize(
    "emulated", [80, pytest.param(100, marks=needs_blackwell), pytest.param(120, marks=needs_blackwell)], indirect=True
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_does_that_for_other_gpus(emulated: list[str], memory: Memory, dtype: torch.dtype) -> None:
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": True}
    assert_emulated(memory, gradients_of(dtype), parameters=True, **kwargs)


def test_checks_for_overflowing_integers_find_nothing(
    emulated: list[str], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRITON_DEBUG=1 makes a device assertion of each integer addition: one that fails ends the training."""
    for kernel in (kernels.measure_chunks, kernels.measure_carefully, kernels.fold):
        monkeypatch.setattr(kernel, "debug", True, raising=False)
    monkeypatch.setenv("TRITON_DEBUG", "1")  # what Triton 3.2 looks at instead
    kwargs = {"dead_threshold": 0.25, "inverse_scale": None, "histogram": True}
    assert_emulated(memory, gradients_of(torch.float32), parameters=True, **kwargs)
    if VERSION >= (3, 2):  # the first with these checks
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
    made = compile_all(86, dtypes=[torch.float64], in_buckets=False)
    assert [variant(compiled) for compiled in made] == [
        "measure_carefully histogram",
        "fold",
        "take_witnesses",
        "measure_carefully",
    ]
    assert os.environ["TRITON_CACHE_DIR"] == nowhere


@pytest.mark.parametrize(
    ("lacks", "said"), [("a compiler", "install gcc"), ("Python.h", "Python's headers, as in python3-dev")]
)
def test_without_a_compiler_or_the_headers_of_python_torch_measures_and_it_is_said(
    lacks: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton.backends.nvidia.driver import CudaUtils
    from triton.runtime import build

    class Built:  # what loads kernels, which Triton builds when it is first asked for
        def __getattr__(self, name: str) -> Any:
            return getattr(CudaUtils(), name)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # where nothing is built yet
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    for cached in (value for value in vars(build).values() if hasattr(value, "cache_clear")):
        cached.cache_clear()
    if lacks == "a compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
    monkeypatch.setattr(door, "_triton_failed", [])
    monkeypatch.setattr(door, "_best_backend", lambda device: "torch" if door._triton_failed else "cuda")
    fake = FakeDriver(89 if lacks == "a compiler" else 87)  # no other test has these GPUs
    fake.utils = Built()
    with installed(fake), pytest.warns(RuntimeWarning, match=f"the Triton kernels failed .*{said}"):
        measurement = door.measure([torch.ones(3)], None)
    assert measurement.rows[0, Column.GRAD_SUM] == 3


COMPILE_AS_A_RANK = """
import sys
import torch
from triton.compiler import ASTSource
from benchmarks.fake_driver import FakeDriver, installed
from wandb_gradwatch._measure import cuda_launch

compiled, make_ir = [], ASTSource.make_ir

def counted(source, *args, **kwargs):
    compiled.append(source.fn.__name__)
    return make_ir(source, *args, **kwargs)

ASTSource.make_ir = counted  # of what lies in the cache on disk nothing is made
print("ready", flush=True)
sys.stdin.readline()
with installed(FakeDriver(90)):
    cuda_launch.warm_up(torch.device("cpu"), [torch.float64], dead_threshold=0.0, histogram=True, in_buckets=False)
print(len(compiled), len(cuda_launch._compiled))
"""


def test_of_two_ranks_one_compiles_a_variant_and_the_other_finds_it(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])
    command = [sys.executable, "-c", COMPILE_AS_A_RANK]
    ranks = [subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) for _ in range(2)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    counts = [[int(word) for word in rank.communicate(timeout=600)[0].split()] for rank in ranks]
    # The careful kernel with a histogram and without one, the fold, and the witnesses.
    assert [has for _, has in counts] == [4, 4]
    assert sum(made for made, _ in counts) == 4


def test_a_sample_is_four_launches_and_no_more_calls_for_more_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[int] = []

    def calls_of(num_tensors: int) -> int:
        gradients = [torch.zeros(5000, dtype=torch.bfloat16) for _ in range(num_tensors)]
        parameters = [torch.nn.Parameter(gradient.clone()) for gradient in gradients]
        kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": False}
        cuda_launch.measure(gradients, parameters, **kwargs)  # compiled, and laid out
        launches.clear()
        with torch.no_grad():
            return kernel_code.count_calls(lambda: cuda_launch.measure(gradients, parameters, **kwargs))

    with installed(FakeDriver(90, lambda ptx, num_programs, arguments: launches.append(num_programs))):
        few, many = calls_of(10), calls_of(200)
    assert len(launches) == 4
    assert many == few
    assert many < 300  # most of them Triton's own: 40 for each launch
