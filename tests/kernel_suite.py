"""Compare the Triton kernels with the reference, on a GPU if there is one, otherwise in Triton's interpreter.

test_statistics_cuda.py runs this file in a separate process, with TRITON_INTERPRET=1 if there is no GPU: Triton reads
that variable when it is first imported, and other tests may have imported Triton before.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from statistics_oracle import assert_row, expected_histogram, expected_row

from wandb_gradwatch._measure import cuda as kernels
from wandb_gradwatch._measure import cuda_launch, cuda_plan, generic, reference
from wandb_gradwatch._measure.columns import AS_LEFT, IDENTITY_C, Column

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")  # with its index, as tensors have it

# The real sizes on a GPU; small sizes in the interpreter, so that all branches of the kernels run within seconds.
SIZES_OF = ("LANES", "CHUNK", "CAREFUL_LANES", "FOLD_BLOCK")
LANES, CHUNK, CAREFUL, FOLD_BLOCK = (
    [getattr(cuda_launch, name) for name in SIZES_OF]
    if DEVICE.type == "cuda"
    else (2, 128, 32, 2)  # FOLD_BLOCK is less than the number of chunks of the largest tensor
)
ROUND = 16 * LANES  # float32 elements per round of an ordinary kernel's program; twice as many for 16-bit types
SIZES = [0, 1, CAREFUL - 1, CAREFUL + 1, ROUND, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Float32 squares are rounded once. A lane adds 16 of them per round as a tree of depth 4, then adds the rounds in
# sequence. Each operation has a relative error of at most 2**-24.
TOLERANCE = (1 + 4 + CHUNK / ROUND) * 2.0**-24

KERNELS = (kernels.measure_chunks, kernels.measure_carefully, kernels.fold, kernels.take_witnesses)

pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|All-NaN slice) encountered:RuntimeWarning"
)  # from numpy, in the interpreter


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(SIZES_OF, (LANES, CHUNK, CAREFUL, FOLD_BLOCK), strict=True):
        monkeypatch.setattr(cuda_launch, name, value)


def gradients_of(size: int, dtype: torch.dtype, few: bool = False) -> Iterator[torch.Tensor]:
    """Yield values of every kind; `few`: fewer kinds, because the interpreter needs milliseconds per chunk."""
    normal = torch.randn(size, generator=torch.Generator().manual_seed(size))
    mixed = normal.clone()
    mixed[::7], mixed[1::7], mixed[2::9], mixed[3::5], mixed[4::5] = math.nan, math.inf, -math.inf, -0.0, 1e-40
    exact = normal.clone()  # zeros of both signs, and the dead threshold of tests below, unscaled and scaled
    exact[::6], exact[1::6], exact[2::6], exact[3::6], exact[4::6] = -0.0, 0.0, 0.25, -0.25, 0.25 * 65536
    one_nan, one_infinity = normal.clone(), normal.clone()
    one_nan[-1:], one_infinity[:1] = math.nan, -math.inf
    kinds = [normal, normal.relu(), -normal.abs(), normal * 1e-12, normal * 1e-41, normal * 1e25, normal * 0]
    kinds += [torch.full((size,), math.nan), mixed, exact, one_nan, one_infinity]
    for values in [normal, normal * 1e-41, mixed, exact] if few else kinds:
        yield values.to(dtype).to(DEVICE)


def assert_equals_reference(
    gradients: list[torch.Tensor],
    *,
    dead_threshold: float = 0.0,
    inverse_scale: torch.Tensor | None = None,
    histogram: bool = True,
    squares: bool = False,
) -> None:
    parameters = gradients[::-1] if squares else None
    kwargs = {"dead_threshold": dead_threshold, "inverse_scale": inverse_scale, "histogram": histogram}
    expected_rows, expected_histograms = reference.measure(gradients, parameters, **kwargs)
    rows, histograms = cuda_launch.measure(gradients, parameters, **kwargs)
    for row, expected_row_of in zip(rows.cpu().numpy(), expected_rows.cpu().numpy(), strict=True):
        assert_row(row, expected_row_of, TOLERANCE)
    assert (histograms is None) == (expected_histograms is None)
    if histograms is not None and expected_histograms is not None:
        np.testing.assert_array_equal(histograms.cpu(), expected_histograms.cpu())
    if not squares:
        return
    sums = cuda_launch.measure_received(gradients, inverse_scale=inverse_scale)
    np.testing.assert_allclose(sums.cpu(), expected_rows[:, AS_LEFT].cpu(), rtol=TOLERANCE, atol=0)


def test_a_worked_example() -> None:
    gradients = [torch.tensor([3.0, -4.0, 0.0, math.nan], device=DEVICE), torch.empty(0, device=DEVICE)]
    rows, histogram = cuda_launch.measure(gradients, None, dead_threshold=0.0, inverse_scale=None, histogram=True)
    assert_row(rows[0].cpu().numpy(), expected_row([3.0, -4.0, 0.0, math.nan]), 0.0)
    np.testing.assert_array_equal(rows[1, : Column.RECEIVED_SUM_SQ].cpu(), IDENTITY_C[: Column.RECEIVED_SUM_SQ])
    assert histogram is not None
    np.testing.assert_array_equal(histogram[0].cpu(), expected_histogram([3.0, -4.0, 0.0]))


@pytest.mark.parametrize("size", SIZES)
def test_every_size_and_value_equals_the_reference(size: int) -> None:
    assert_equals_reference(list(gradients_of(size, torch.float32)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_equals_the_reference(dtype: torch.dtype) -> None:
    assert_equals_reference([g for size in (1, CHUNK, CHUNK + 1) for g in gradients_of(size, dtype, few=True)])


def test_parameters_and_sums_of_squares_equal_the_reference() -> None:
    every_kind = list(gradients_of(CHUNK, torch.float32))
    every_dtype = [g for dtype in DTYPES for g in gradients_of(CHUNK + 1, dtype, few=True)]
    assert_equals_reference(every_kind + every_dtype, histogram=False, squares=True)
    scale = torch.tensor(0.25, device=DEVICE)
    assert_equals_reference(every_kind[:2], inverse_scale=scale, histogram=False, squares=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 2.0**-16, 1 / 3])
def test_thresholds_and_scales_equal_the_reference(dtype: torch.dtype, scale: float | None) -> None:
    inverse_scale = None if scale is None else torch.tensor(scale, device=DEVICE)
    gradients = list(gradients_of(CHUNK + 1, dtype, few=True))
    assert_equals_reference(gradients, dead_threshold=0.25, inverse_scale=inverse_scale)
    assert_equals_reference(gradients[:1], inverse_scale=inverse_scale, histogram=False)


def test_a_mixed_list_is_read_with_each_tensors_own_dtype() -> None:
    gradients = [g for size in (3, CHUNK + 1) for dtype in DTYPES for g in list(gradients_of(size, dtype))[:2]]
    assert_equals_reference(gradients[::3] + gradients[1::3] + gradients[2::3], dead_threshold=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_misaligned_and_strided_tensors_are_read_where_they_lie(dtype: torch.dtype) -> None:
    base = next(gradients_of(2 * CHUNK + 8, dtype))
    gradients = [base[1:], base[3 : CHUNK + 3], base[::4], base[: 2 * CHUNK].view(8, -1).T, base[:2].expand(9, 2)]
    assert_equals_reference(gradients)


def test_complex_sparse_and_float8_gradients_take_the_same_way() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 2]]), torch.ones(3, 4), (10, 4), check_invariants=True, is_coalesced=False
    ).to(DEVICE)
    others = [torch.tensor([3 + 4j]), torch.tensor([3.0, -4.0]).to(torch.float8_e4m3fn), torch.tensor(2.0)]
    assert_equals_reference([sparse, *(t.to(DEVICE) for t in others)])


def test_every_histogram_edge_falls_on_its_own_side() -> None:
    edges = torch.tensor([0.0, 2.0**-149, 2.0**-126, 2.0**-47, 1.5 * 2.0**-47, 1.0, 1.5, 2.0**15, 1.5 * 2.0**15, 1e30])
    both = torch.cat([edges, torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(1e38))])
    signed = torch.cat([both, -both])
    whole = torch.cat([signed[signed.abs() < 1e15], torch.ones(CHUNK)])[:CHUNK]  # whose squares are finite in float32
    assert_equals_reference([t.to(DEVICE) for t in (signed, signed.double(), whole)])
    assert_equals_reference([whole.to(DEVICE)], inverse_scale=torch.tensor(2.0**-3, device=DEVICE))


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_a_broken_scale_loses_no_element_of_the_histogram(scale: float) -> None:
    gradients = list(gradients_of(CHUNK + 1, torch.float32, few=True))
    broken = torch.tensor(scale, device=DEVICE)
    kwargs = {"dead_threshold": 0.0, "inverse_scale": broken, "histogram": True}
    _, histogram = cuda_launch.measure(gradients, None, **kwargs)
    _, expected = reference.measure(gradients, None, **kwargs)
    assert histogram is not None
    assert expected is not None
    np.testing.assert_array_equal(histogram.cpu(), expected.cpu())


def test_measuring_twice_gives_the_same_bits() -> None:
    gradients = [g for size in (CAREFUL, 3 * CHUNK + 3) for g in gradients_of(size, torch.float32, few=True)]
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": False}
    first, second = (cuda_launch.measure(gradients, gradients, **kwargs)[0].view(torch.int64) for _ in range(2))
    assert torch.equal(first, second)


def test_a_tensor_at_address_0_is_missing_not_zero() -> None:
    gradients = [torch.ones(CHUNK + 1, device=DEVICE), torch.ones(3, device=DEVICE)]
    plan = cuda_launch.prepare(gradients, gradients)
    plan.table.write([1, 0, *[0, gradients[1].data_ptr()] * 2])
    rows, _ = cuda_launch.launch(plan, dead=False, inverse_scale=None, histogram=False)
    assert math.isnan(rows[0, Column.NUM_ELEMENTS])
    assert math.isnan(rows[0, Column.PARAM_SUM_SQ])
    assert rows[1, Column.PARAM_SUM_SQ] == 3
    assert rows[1, Column.NUM_ELEMENTS] == 3
    assert rows[1, Column.GRAD_SUM] == 3


def test_witnesses_are_those_of_plain_torch() -> None:
    dtypes = itertools.cycle(DTYPES)
    sizes = (0, 1, 15, 16, 17, 63, 64, 65, 1000)
    gradients = [torch.randn(size + 1).to(DEVICE, next(dtypes))[size % 2 :][:size] for size in sizes]
    parameters = [torch.randn(size).to(DEVICE, next(dtypes)) for size in sizes]
    for most in (16, 50, 64):
        taken = cuda_launch.take_witnesses(gradients, parameters, most)
        expected = generic.take_witnesses(gradients, parameters, most)
        assert torch.equal(taken, expected)
        # Elements 0, s, 2 s, ... for the stride s = 1000 // most, and then zeros for the first sizes.
        last = gradients[-1].double()[:: 1000 // most][:most]
        assert torch.equal(taken[0, -1], last)
        assert taken[0, 0].count_nonzero() == 0


def test_taking_witnesses_leaves_the_dead_threshold_where_it_is() -> None:
    gradients = [torch.full((5,), 0.25, device=DEVICE)]
    kwargs = {"dead_threshold": 0.25, "inverse_scale": None, "histogram": False}
    cuda_launch.measure(gradients, gradients, **kwargs)
    plan = cuda_launch.prepare(gradients, gradients, 0.25)
    before = plan.table.device_table.tolist()
    cuda_launch.take_witnesses(gradients, gradients, 16)
    assert plan.table.device_table.tolist() == before


def test_offsets_and_counts_are_right_beyond_32_bits() -> None:
    # Only the last chunks of a tensor of 2**33 + 2 * CHUNK elements exist; the table has the address of its first one.
    begin, here = 2**33, torch.arange(1.0, 2 * CHUNK + 1, device=DEVICE)
    plan = cuda_launch.prepare([here])
    plan.table.write([1, 0, here.data_ptr() - begin * here.element_size()])
    bytes_before = begin * here.element_size() * (torch.arange(4, device=DEVICE) == 1).unsqueeze(1)
    elements_before = begin * (torch.arange(4, device=DEVICE) == 0).unsqueeze(1)
    plan = replace(plan, chunks=plan.chunks + bytes_before, tensors=plan.tensors + elements_before)
    rows, histogram = cuda_launch.launch(plan, dead=False, inverse_scale=None, histogram=True)
    assert rows[0, Column.NUM_ELEMENTS] == begin + 2 * CHUNK
    assert rows[0, Column.GRAD_MAX] == 2 * CHUNK
    np.testing.assert_allclose(rows[0, Column.GRAD_SUM].item(), here.double().sum().item(), rtol=TOLERANCE)
    assert histogram is not None
    assert histogram.sum() == 2 * CHUNK

    partials = torch.full((cuda_plan.NUM_PARTIALS, 2), 2.0**31 + 1, dtype=torch.float64, device=DEVICE)
    rows.zero_()
    arguments = (plan.table.device_table, plan.tensors, partials, plan.one, plan.one, rows, 1, 1, 2)
    cuda_launch._queue(None, kernels.fold, 1, *arguments, NUM_COLUMNS=rows.shape[1], BLOCK=FOLD_BLOCK)
    assert rows[0, Column.NUM_ZERO] == 2 * (2**31 + 1)


def test_rows_follow_gradients_that_moved() -> None:
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": False}
    kept = [torch.full((5,), value, device=DEVICE) for value in (1.0, 2.0)]
    sums = [cuda_launch.measure([g], None, **kwargs)[0][0, Column.GRAD_SUM].item() for g in kept]
    assert sums == [5.0, 10.0]


def test_tensors_that_come_one_by_one_are_laid_out_once() -> None:
    """For optimizers that step inside the backward, plans are made at the first step only."""
    one_by_one = [torch.ones(size, device=DEVICE) for size in range(1, 61)]
    for tensor in one_by_one:
        cuda_launch.prepare([tensor], [tensor])
    made = cuda_plan.plan_for_few.cache_info().misses
    for tensor in one_by_one:
        cuda_launch.prepare([tensor], [tensor])
    assert cuda_plan.plan_for_few.cache_info().misses == made


def test_a_constant_of_a_kernel_is_annotated_with_the_class_not_with_its_name() -> None:
    """Older Triton's interpreter takes a constant annotated with a string for a device argument, and fails."""
    for kernel in KERNELS:
        annotations = inspect.signature(kernel.fn).parameters
        constants = [p.annotation for name, p in annotations.items() if name.isupper()]
        assert constants
        assert all(annotation is kernels.tl.constexpr for annotation in constants)


def test_warming_up_runs_every_kernel_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(kernels.fold, "warmup"):  # only the interpreter of Triton before 3.6 has no warmup

        def warmup(kernel: Any, *arguments: Any, **constants: Any) -> None:
            kernel.run(*arguments, warmup=True, **constants)

        monkeypatch.setattr(type(kernels.fold), "warmup", warmup, raising=False)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.complex64, torch.float8_e4m3fn, torch.uint8]
    cuda_launch.warm_up(DEVICE, dtypes, dead_threshold=0.0, histogram=True)
    compiled = set(cuda_launch._compiled)
    size = 2 * ROUND + 1  # whole rounds and a remainder
    natives = [torch.ones(size, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    others = [torch.ones(size, device=DEVICE).to(dtype) for dtype in (torch.complex64, torch.float8_e4m3fn)]
    for gradients in (natives, others, [native[1:] for native in natives]):  # the last are misaligned, as in a bucket
        for scale in (None, torch.ones((), device=DEVICE)):
            kwargs = {"dead_threshold": 0.0, "inverse_scale": scale}
            cuda_launch.measure(gradients, gradients, histogram=True, **kwargs)
            cuda_launch.measure(gradients, None, histogram=False, **kwargs)
            cuda_launch.measure_received(gradients, inverse_scale=scale)
            cuda_launch.take_witnesses(natives, natives, 16)
    assert cuda_launch._compiled == compiled


def test_warming_up_builds_what_launches_each_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled(NamedTuple):
        src: str
        metadata: str

    built: list[tuple[str, str]] = []
    driver = SimpleNamespace(
        launcher_cls=lambda src, metadata: built.append((src, metadata)),
        get_current_target=lambda: SimpleNamespace(backend="cuda"),
    )
    monkeypatch.setattr(type(kernels.triton.runtime.driver), "active", driver)
    for kernel in KERNELS:
        compiled = Compiled(kernel.fn.__name__, "metadata")
        monkeypatch.setattr(kernel, "warmup", lambda *_, compiled=compiled, **__: compiled, raising=False)
    monkeypatch.setattr(cuda_launch, "_compiled", set())
    monkeypatch.setattr(cuda_launch, "_on", lambda device: contextlib.nullcontext())
    cuda_launch.warm_up(DEVICE, [torch.float32], dead_threshold=0.0, histogram=True)
    assert set(built) == {(kernel.fn.__name__, "metadata") for kernel in KERNELS}


def test_warming_up_ends_when_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_launch, "_compiled", set())
    cuda_launch.warm_up(DEVICE, DTYPES, dead_threshold=0.0, histogram=True, goes_on=lambda: False)
    assert cuda_launch._compiled == set()


def test_lists_that_differ_from_the_one_before_in_one_tensor_are_measured_as_they_are() -> None:
    numbers = torch.arange(1.0, 31.0, device=DEVICE)
    others = {
        "as before": numbers[:24].clone(),
        "of other values": numbers[:24] * 2,
        "smaller": numbers[:20].clone(),
        "of another shape": numbers[:24].clone().reshape(4, 6),
        "of another dtype": numbers[:24].to(torch.bfloat16),
        "transposed": numbers[:24].clone().reshape(4, 6).t(),
        "every other element": numbers[:24:2],
        "unaligned": numbers[1:25],
        "negated": torch._neg_view(numbers[:24].clone()),
        "a parameter": torch.nn.Parameter(numbers[:24].clone()),
        "sparse": numbers[:24].clone().to_sparse(),
        "in an unknown dtype": numbers[:24].to(torch.float8_e5m2),
    }
    same = [torch.ones(5, device=DEVICE), torch.full((70,), 2.0, device=DEVICE)]
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": False}
    for other in [one for what in others for one in (others["as before"], others[what])]:
        gradients = [*same, other]
        rows, _ = cuda_launch.measure(gradients, gradients, **kwargs)
        expected, _ = reference.measure(gradients, gradients, **kwargs)
        torch.testing.assert_close(rows, expected, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("num_tensors", [1, 3])
def test_a_thread_does_not_read_the_gradients_of_another(monkeypatch: pytest.MonkeyPatch, num_tensors: int) -> None:
    """Two models of the same shapes that train in different threads share one table of addresses."""
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": False}
    mine, theirs = torch.full((5,), 1.0, device=DEVICE), torch.full((5,), 2.0, device=DEVICE)
    prepare, they_have_prepared = cuda_launch._prepare_any, threading.Event()
    cuda_launch.measure([mine] * num_tensors, None, **kwargs)  # from now on longer lists are recognised
    other = threading.Thread(target=lambda: cuda_launch.measure([theirs] * num_tensors, None, **kwargs))

    def interrupted(elements: list[torch.Tensor], *arguments: Any) -> Any:
        prepared = prepare(elements, *arguments)
        if elements[0] is mine:
            other.start()
            they_have_prepared.wait(0.2)  # times out: the other thread must wait for this launch
        else:
            they_have_prepared.set()
        return prepared

    monkeypatch.setattr(cuda_launch, "_prepare_any", interrupted)
    rows, _ = cuda_launch.measure([mine] * num_tensors, None, **kwargs)
    other.join()
    assert rows[0, Column.GRAD_SUM].item() == 5.0
