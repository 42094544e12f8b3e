"""The compiled CPU backend: correct results, threads, compilation in the background, and fallbacks."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradients import Chosen, samples, step, watch
from processes import script
from statistics_oracle import assert_row

from wandb_gradwatch._measure import cpu, cpu_compiled, thread_pool
from wandb_gradwatch._measure.columns import AS_LEFT, NUM_COLUMNS, Column
from wandb_gradwatch._measure.compilation import Compilation
from wandb_gradwatch._measure.measure import compile_for_cpu, measure, measure_received, resolve_backend
from wandb_gradwatch._measure.thread_pool import for_each

CPU = torch.device("cpu")
LOOPS_MODULE = "wandb_gradwatch._measure.cpu_loops"
# Each of n additions in float64 rounds by at most 2**-53 of the sum so far.
ROUNDING = 2.0**-53

needs_numba = pytest.mark.skipif(not cpu_compiled.is_installed(), reason="numba is not installed")


def ready(measure: Callable[..., None]) -> Compilation[Any]:
    """Return a compilation that has finished, with this function as the loop that measures."""
    loops = cpu_compiled.Loops(measure, lambda *_: pytest.fail("no witnesses are taken"))
    compilation: Compilation[Any] = Compilation(lambda: loops)
    compilation.wait()
    return compilation


@pytest.fixture
def replace_loops(monkeypatch: pytest.MonkeyPatch) -> Callable[[Compilation[Any]], None]:
    """Return `replace_loops(compilation)`, which sets the backend's compilation during the test."""
    monkeypatch.setattr(cpu_compiled, "is_installed", lambda: True)
    return lambda compilation: monkeypatch.setattr(cpu_compiled, "LOOPS", compilation)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event for compilations to wait for; it is set when the test ends, if not earlier."""
    event = threading.Event()
    yield event
    event.set()


def assert_equals_reference(tensors: list[torch.Tensor]) -> None:
    """Compare counts, histograms and extremes exactly, and sums to float64 rounding."""
    kwargs: Any = {"dead_threshold": 0.25, "histogram": True}
    expected = measure(tensors, tensors, **kwargs, backend="reference")
    measured = measure(tensors, tensors, **kwargs, backend="compiled")
    for tensor, row, expected_of in zip(tensors, measured.rows, expected.rows, strict=True):
        assert_row(row.numpy(), expected_of.numpy(), max(tensor.numel(), 8) * ROUNDING)
    assert torch.equal(measured.histogram, expected.histogram)  # type: ignore[arg-type]
    squares = measure_received(tensors, backend="compiled")
    np.testing.assert_allclose(squares, expected.rows[:, AS_LEFT], rtol=1e-12)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_kind_of_block_equals_the_reference_to_the_rounding_of_float64(dtype: torch.dtype) -> None:
    from wandb_gradwatch._measure.cpu_loops import BLOCK, SMALL

    normal = torch.randn(3 * BLOCK + 5, generator=torch.Generator().manual_seed(0))
    tensors = []
    for size in (1, 2, 31, SMALL - 1, SMALL, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5):
        values = normal[:size]
        spoilt = values.clone()
        spoilt[::3], spoilt[1::50], spoilt[2::70], spoilt[::7] = torch.nan, torch.inf, -torch.inf, -0.0
        one_nan_block = values.clone()
        one_nan_block[:BLOCK] = torch.nan
        last_only = torch.full_like(values, torch.nan)
        last_only[-1] = -3.0
        ends_in_zeros = values.clone()
        ends_in_zeros[BLOCK:] = 0.0
        signs = [values, values.abs(), -values.abs(), values.relu(), -values.relu()]
        scales = [values * 1e-12, values * 1e-41, values * 1e-7, values * 1e4, values * 1e25, values.abs() * 1e-41]
        constants = [torch.full_like(values, c) for c in (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0, -2.0)]
        both_zeros = torch.where(values > 0, 0.0, -0.0)
        for made in [*signs, *scales, *constants, both_zeros, spoilt, one_nan_block, last_only, ends_in_zeros]:
            tensors.append(made.to(dtype))
    assert_equals_reference(tensors)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_sixteen_bits_is_read_right(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    assert_equals_reference([every, *every.split(4096)])


@needs_numba
@pytest.mark.parametrize(
    "values",
    [
        torch.full((2**18,), 2.0),  # counted in pairs: twice the maximum of a 16-bit counter
        torch.linspace(-126, 100, 2**14).exp2(),  # blocks below, in and above the first block's range of bins
        torch.linspace(0, 226, 2**14).remainder(64).neg().exp2(),  # blocks with more bins than any range
    ],
)
def test_pairs_of_codes_are_counted_where_counters_and_window_do_not_suffice(values: torch.Tensor) -> None:
    assert_equals_reference([values, -values, torch.where(torch.arange(values.numel()) % 3 == 0, values, -0.0)])


def base() -> torch.Tensor:
    return torch.linspace(-2, 2, 24)


@needs_numba
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "make",
    [
        lambda: base()[::2],
        lambda: base()[5:],  # not aligned to vectors
        lambda: torch.frombuffer(bytearray(base().numpy().tobytes()) + b"...", dtype=torch.float32, count=24),
        lambda: torch.frombuffer(bytearray(b"." + base().numpy().tobytes()), dtype=torch.float32, count=24, offset=1),
        lambda: base().view(6, 4).t(),
        lambda: base().view(6, 4)[:, 1:3],
        lambda: base()[:3].expand(4, 3),
        lambda: base().view(2, 3, 2, 2).to(memory_format=torch.channels_last),
        lambda: torch.empty(0),
        lambda: torch.empty(0, 3, dtype=torch.float64),
        lambda: torch.tensor(-0.5, dtype=torch.float16),
        lambda: torch.nn.Parameter(base()),
        lambda: torch.complex(base(), base()),
        lambda: torch.complex(base(), base()).conj().imag,  # a negative view: the memory has the opposite sign
        lambda: torch.arange(24) - 12,
        lambda: base().to(torch.float8_e4m3fn),
        lambda: base().view(6, 4).relu().to_sparse(),
        lambda: base().view(6, 4).relu().to_sparse_csr(),
    ],
)
def test_whatever_the_layout_the_elements_are_measured(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    if tensor.is_sparse:
        tensor = tensor.coalesce()
    assert_equals_reference([tensor, base(), tensor])


@needs_numba
def test_a_tensor_without_memory_is_an_error_and_no_crash() -> None:
    freed = torch.ones(10)
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="a tensor with elements has no memory: its storage was freed"):
        measure([base(), freed], None, backend="compiled")


@needs_numba
def test_a_tensor_that_is_no_memory_is_not_read_from_memory() -> None:
    class Doubled(torch.Tensor):  # its values are not those in its memory
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            plain = [a.as_subclass(torch.Tensor) if isinstance(a, Doubled) else a for a in args]
            if func is torch.Tensor.reshape:
                return 2 * plain[0].reshape(*plain[1:])
            return super().__torch_function__(func, types, args, kwargs)

    row = measure([base().view(6, 4).as_subclass(Doubled)], None, backend="compiled").rows[0]
    assert row[Column.GRAD_MAX] == 4.0


@needs_numba
def test_a_negative_dead_threshold_is_met_by_nothing() -> None:
    assert measure([torch.zeros(3)], None, dead_threshold=-1.0, backend="compiled").rows[0, Column.NUM_DEAD] == 0


@needs_numba
def test_the_loops_write_each_column_where_the_schema_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba's cache does not notice a change of the schema, so no place of a column may be compiled into the loops."""
    gradients = [torch.tensor([3.0, -4.0, 0.0, torch.nan, torch.inf])]
    expected = measure(gradients, gradients, backend="compiled").rows
    limits = cpu_compiled._limits
    *others, places = limits(0.0, 0)
    turned = np.array([tuple(NUM_COLUMNS - 1 - place for place in places[0])], dtype=places.dtype)
    monkeypatch.setattr(cpu_compiled, "_limits", lambda *_: (*others, turned))
    monkeypatch.setattr(cpu, "of_gradients", lambda rows, *_: torch.from_numpy(rows))
    measured = cpu_compiled._measure(cpu_compiled.LOOPS.wait(), gradients, gradients, 0.0, None, False)
    np.testing.assert_array_equal(measured, expected.flip(1))


@needs_numba
def test_threads_that_measure_at_once_do_not_disturb_each_other() -> None:
    lists = [[torch.randn(5000), torch.zeros(300), torch.full((70,), torch.nan).half()] for _ in range(8)]

    def rows(gradients: list[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        measured = measure(gradients, gradients, histogram=True, backend="compiled")
        assert measured.histogram is not None
        return measured.rows.view(torch.int64).tolist(), measured.histogram.tolist()

    alone = [rows(gradients) for gradients in lists]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(20):
            assert list(pool.map(rows, lists)) == alone


@pytest.fixture
def num_threads() -> Iterator[Callable[[int], None]]:
    """Return `num_threads(n)`, which sets torch's number of threads during the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def shares_from_one(monkeypatch: pytest.MonkeyPatch) -> int:
    """Share even small work between threads, in pieces of this many elements, which no block size divides."""
    monkeypatch.setattr(cpu_compiled, "_SHARED_FROM", 1)
    monkeypatch.setattr(cpu_compiled, "_PIECE", 2500)
    monkeypatch.setattr(cpu, "_SHARED_FROM", 1)
    monkeypatch.setattr(cpu, "PIECE", 2500)
    return 2500


@needs_numba
def test_what_is_cut_into_pieces_equals_the_reference(shares_from_one: int) -> None:
    piece, generator = shares_from_one, torch.Generator().manual_seed(0)
    tensors = []
    for size in (0, 1, piece - 1, piece, piece + 1, 5 * piece + 7):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            values = torch.randn(size, generator=generator)
            spoilt = values.clone()
            spoilt[:piece] = torch.nan  # a piece without finite elements
            spoilt[-1:] = torch.inf
            tensors += [values.to(dtype), spoilt.to(dtype), values.relu().to(dtype)]
    assert_equals_reference(tensors)


@needs_numba
def test_a_parameter_is_cut_where_its_gradient_is_and_counted_once_where_they_differ_in_size(
    shares_from_one: int,
) -> None:
    small, large = torch.full((5,), 2.0), torch.full((3 * shares_from_one + 1,), 2.0)
    for gradient, parameter in ((small, large), (large, small), (large, large), (torch.empty(0), large)):
        row = measure([gradient], [parameter.double()], backend="compiled").rows[0]
        assert row[Column.GRAD_SUM_SQ] == 4 * gradient.numel()
        assert row[Column.PARAM_SUM_SQ] == 4 * parameter.numel()


@pytest.mark.parametrize("backend", ["cpu", pytest.param("compiled", marks=needs_numba)])
def test_every_bit_is_the_same_with_any_number_of_threads(
    shares_from_one: int, num_threads: Callable[[int], None], backend: str
) -> None:
    tensors = [torch.randn(size) for size in (100_003, 17, 50_000)]

    def bits() -> list[Any]:
        measured = measure(tensors, tensors, histogram=True, backend=backend)
        assert measured.histogram is not None
        return [
            measured.rows.view(torch.int64).tolist(),
            measured.histogram.tolist(),
            measure_received(tensors, backend=backend).tolist(),
        ]

    num_threads(1)
    alone = bits()
    num_threads(4)
    assert all(bits() == alone for _ in range(50))


def test_an_interrupted_caller_waits_for_what_its_helpers_have_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end, done = threading.Event(), threading.Event(), threading.Event()

    def waits(helpers: list[Future[None]]) -> None:
        may_end.set()
        wait(helpers)

    monkeypatch.setattr("wandb_gradwatch._measure.thread_pool.wait", waits)

    def read(piece: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(60)
            raise KeyboardInterrupt
        begun.set()
        assert may_end.wait(60)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        for_each(range(2), read, 2)
    assert done.is_set()


@needs_numba
def test_an_interrupt_before_anything_was_taken_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, shares_from_one: int, num_threads: Callable[[int], None]
) -> None:
    num_threads(1)  # no other thread takes pieces

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu_compiled, "LOOPS", ready(interrupted))
    with pytest.raises(KeyboardInterrupt):
        measure([torch.ones(10)], None, backend="compiled")


def test_helpers_take_part_and_every_piece_is_read_once_and_before_it_returns() -> None:
    helped, done = threading.Event(), []

    def read(piece: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            helped.set()
        assert helped.wait(60)  # the caller waits in its first piece until a helper has begun
        done.append(piece)

    for_each(range(100), read, 3)
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("place", ["caller", "helper"])
def test_what_a_reader_raises_is_raised_in_the_caller_whoever_met_it(place: str) -> None:
    helped = threading.Event()

    def read(piece: int) -> None:
        is_helper = threading.current_thread() is not threading.main_thread()
        if is_helper is (place == "helper"):
            helped.set()
            raise ZeroDivisionError(place)
        assert helped.wait(60)

    with pytest.raises(ZeroDivisionError, match=place):
        for_each(range(100), read, 2)


def test_without_a_thread_to_be_had_the_caller_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_more)
    thread_pool._executor.cache_clear()
    done = []
    for_each([0], lambda _: done.append(threading.current_thread()), 4)
    assert done == [threading.main_thread()]


def test_helpers_are_no_more_than_were_asked_for_and_wait_for_more_work() -> None:
    thread_pool._executor.cache_clear()
    meet, took_part = threading.Barrier(3), set()

    def read(piece: int) -> None:
        took_part.add(threading.current_thread())
        meet.wait(60)  # the caller and two helpers take one piece each

    for _ in range(4):
        for_each(range(3), read, 3)
    assert len(took_part) == 3


def test_training_does_not_wait_for_the_loops_and_nothing_changes_when_they_come(
    replace_loops: Callable[[Compilation[Any]], None], gate: threading.Event
) -> None:
    def make() -> Any:
        gate.wait()
        return cpu_compiled._compile() if cpu_compiled.is_installed.__wrapped__() else None

    compilation: Compilation[Any] = Compilation(make)
    replace_loops(compilation)
    model = Chosen(a=2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model)
    gradient = torch.linspace(-1, 1, 2000)
    step(model, optimizer, a=gradient)
    assert compilation.made is None
    assert resolve_backend("auto", CPU, "a") == "cpu"
    gate.set()
    compilation._thread.join()  # type: ignore[union-attr]
    step(model, optimizer, a=gradient)
    snapshot = samples(watcher, sink)
    assert snapshot.grad_norm[0] == pytest.approx(snapshot.grad_norm[1], rel=1e-7)
    counted = [Column.NUM_ELEMENTS, Column.NUM_ZERO, Column.NUM_DEAD, Column.GRAD_MIN, Column.GRAD_MAX]
    assert snapshot.rows[0][:, counted].tolist() == snapshot.rows[1][:, counted].tolist()


def test_watch_returns_with_the_loops_where_they_were_asked_for_by_name(
    replace_loops: Callable[[Compilation[Any]], None],
) -> None:
    compilation = Compilation(lambda: "loops")
    replace_loops(compilation)
    watcher, _ = watch(Chosen(a=2), backend="compiled")
    assert compilation.made == "loops"
    watcher.remove()


def test_watching_with_torch_and_numpy_by_name_compiles_nothing(
    replace_loops: Callable[[Compilation[Any]], None],
) -> None:
    compilation: Compilation[Any] = Compilation(lambda: pytest.fail("nobody asked"))
    replace_loops(compilation)
    watch(Chosen(a=2), backend="cpu")[0].remove()
    assert compilation._thread is None


@needs_numba
def test_auto_takes_the_loops_from_when_they_are_there() -> None:
    cpu_compiled.LOOPS.wait()
    assert resolve_backend("auto", CPU, "a") == "compiled"


def test_the_loops_are_compiled_once(gate: threading.Event) -> None:
    made = []
    compilation = Compilation(lambda: made.append(gate.wait()) or "made")
    for _ in range(3):
        compilation.start()
    gate.set()
    assert compilation.wait() == "made"
    assert len(made) == 1


FORK_WHILE_COMPILING = """
import os, threading
from wandb_gradwatch._measure.compilation import Compilation
gate = threading.Event()
compilation = Compilation(lambda: gate.wait() and "made")
compilation.start()
os.register_at_fork(before=gate.set)  # runs before the compilation's own, which was registered earlier
child = os.fork()
if child == 0:
    os._exit(0 if compilation.made == "made" and compilation.wait() == "made" else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""

FORK_AFTER_USE = """
import os, torch
from wandb_gradwatch._measure.measure import measure
torch.set_num_threads(2)
gradients = [torch.randn(3_000_000), torch.randn(10)]  # enough to be shared by threads
expected = measure(gradients, gradients, histogram=True, backend="compiled").rows
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(measure(gradients, gradients, histogram=True, backend="compiled").rows, expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("program", [FORK_WHILE_COMPILING, pytest.param(FORK_AFTER_USE, marks=needs_numba)])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not fork")
def test_a_forked_child_can_measure(program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program)
    ended = script(tmp_path / "program.py", folder=tmp_path)
    assert ended.returncode == 0, ended.stderr


@needs_numba
def test_loops_are_compiled_where_nothing_can_be_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    from numba.core import caching

    from wandb_gradwatch._measure import cpu_loops

    asked = []

    def fewer(*, cache: bool) -> tuple[str, str]:
        asked.append(cache)
        import numba

        numba.njit(numba.int64(numba.int64), cache=cache)(lambda x: x)  # raises what numba raises
        return "measure", "take_witnesses"

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])  # as if no folder were writable
    monkeypatch.setattr(cpu_loops, "compile_loops", fewer)
    monkeypatch.setattr(cpu_compiled, "_check", lambda loops: None)
    assert cpu_compiled._compile() == ("measure", "take_witnesses")
    assert asked == [True, False]


def test_without_numba_auto_is_torch_and_numpy_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(cpu_compiled.importlib.util, "find_spec", lambda name: None)
    cpu_compiled.is_installed.cache_clear()
    try:
        compilation: Compilation[Any] = Compilation(lambda: pytest.fail("there is no numba"))
        monkeypatch.setattr(cpu_compiled, "LOOPS", compilation)
        compile_for_cpu("auto")
        assert compilation._thread is None
        assert resolve_backend("auto", CPU, "a") == "cpu"
        message = "backend='compiled' needs numba, which is not installed; pip install 'wandb-gradwatch\\[fast\\]'"
        with pytest.raises(RuntimeError, match=message):
            watch(Chosen(a=2), backend="compiled")
        assert said() == []
    finally:
        cpu_compiled.is_installed.cache_clear()


def test_a_numba_that_is_broken_is_said_once_and_torch_and_numpy_measure(
    replace_loops: Callable[[Compilation[Any]], None], monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    monkeypatch.delitem(sys.modules, LOOPS_MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)  # its import fails
    monkeypatch.setattr(cpu_compiled, "_BEFORE_ANOTHER_TRY", 0.0)
    compilation = Compilation(cpu_compiled._compile)
    replace_loops(compilation)
    for _ in range(2):
        watch(Chosen(a=2))[0].remove()
        compilation._thread.join()  # type: ignore[union-attr]
    (message,) = [text for text in said() if "numba" in text]
    assert "numba is installed, but the compiled CPU backend could not be made (ModuleNotFoundError" in message
    assert resolve_backend("auto", CPU, "a") == "cpu"
    assert measure([torch.ones(4)], None).rows[0, Column.GRAD_SUM] == 4
    with pytest.raises(RuntimeError, match="could not be made: ModuleNotFoundError"):
        watch(Chosen(a=2), backend="compiled")


@needs_numba
def test_a_compilation_that_another_thread_disturbs_is_tried_once_more(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    from wandb_gradwatch._measure import cpu_loops

    failures = [AttributeError("replaced for a moment")] * 2  # with the cache on disk, and without it

    def disturbed(*, cache: bool) -> tuple[str, str]:
        if failures:
            raise failures.pop()
        return "measure", "take_witnesses"

    monkeypatch.setattr(cpu_loops, "compile_loops", disturbed)
    monkeypatch.setattr(cpu_compiled, "_check", lambda loops: None)
    monkeypatch.setattr(cpu_compiled, "_BEFORE_ANOTHER_TRY", 0.0)
    assert cpu_compiled._compile() == ("measure", "take_witnesses")
    assert said() == []


def test_loops_that_fail_are_replaced_by_torch_and_numpy_with_one_warning(
    replace_loops: Callable[[Compilation[Any]], None],
) -> None:
    def fail(*args: Any) -> None:
        raise SystemError("no loops today")

    replace_loops(ready(fail))
    assert resolve_backend("auto", CPU, "a") == "compiled"
    with pytest.raises(SystemError, match="no loops today"):
        measure([torch.ones(4)], None, backend="compiled")
    with pytest.warns(RuntimeWarning, match="the numba kernels failed \\(SystemError.*backend='cpu' from now on"):
        assert measure([torch.ones(4)], None).rows[0, Column.GRAD_SUM] == 4
    assert resolve_backend("auto", CPU, "a") == "cpu"
    assert measure_received([torch.ones(4)]).tolist() == [[4.0, 0.0, 0.0]]  # no warning


@needs_numba
def test_loops_that_measure_wrongly_are_not_used() -> None:
    loops = cpu_compiled.LOOPS.wait()
    cpu_compiled._check(loops)
    wrong = {"measure": lambda *args: args[-2].fill(1.0), "take_witnesses": lambda *args: args[2].fill(1.0)}
    for name, loop in wrong.items():
        with pytest.raises(RuntimeError, match="the compiled loops do not measure what torch does"):
            cpu_compiled._check(loops._replace(**{name: loop}))


def test_a_backend_for_the_cpu_says_so_elsewhere() -> None:
    message = "backend='compiled' needs CPU gradients, but 'head.weight' is on cuda:0; use backend='auto'"
    with pytest.raises(RuntimeError, match=message):
        resolve_backend("compiled", torch.device("cuda:0"), "head.weight")


def test_a_helper_that_wakes_late_keeps_nothing_of_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    piece, read, late = np.zeros(1), [], []
    helper = SimpleNamespace(submit=lambda work: (late.append(work), Future())[1])  # it has not woken up yet
    monkeypatch.setattr(thread_pool, "_executor", lambda pid: helper)
    kept = weakref.ref(piece)
    for_each([piece], lambda one: read.append(one.size), num_threads=2)
    del piece
    assert kept() is None
    late[0]()  # the helper wakes up
    assert read == [1]
