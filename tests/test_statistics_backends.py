"""Every backend against plain Python and the reference, for all dtypes, layouts, sizes and values; merging is exact."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from statistics_oracle import BACKENDS, FAST_BACKENDS, assert_row, expected_histogram, expected_row, floats_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from wandb_gradwatch._measure import cpu, cpu_compiled, generic
from wandb_gradwatch._measure.columns import AS_LEFT, SCALE_POWER, Column, merge_rows
from wandb_gradwatch._measure.cpu import SMALL
from wandb_gradwatch._measure.cpu_pieces import PIECE, SEGMENT
from wandb_gradwatch._measure.elements import Measurement, elements_of
from wandb_gradwatch._measure.generic import LINE
from wandb_gradwatch._measure.measure import measure, measure_received, resolve_backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# Up to SEGMENT = 512 float32 squares are summed in float32, in at least 8 lanes: each addition has a relative error
# of at most 2**-24, and 512 / 8 * 2**-24 = 4e-6.
TOLERANCE = 4e-6

SPECIAL = [
    *[0.0, -0.0, math.nan, math.inf, -math.inf, 1.0, -1.0, 300.0, 1e20, -1e20, 1e-25, 3e38, -3e38],
    *[2.0**-149, -(2.0**-149), 2.0**-126, 2.0**-127, 2.0**-24, 2.0**-14, 2.0**-47, 1.5 * 2.0**-47, 2.0**16, 1e-10],
]
values = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
value_lists = st.lists(values, max_size=40)


def tensor_of(numbers: list[float], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64).to(dtype)


def rows_of(measurement: Measurement) -> np.ndarray:
    return measurement.rows.numpy()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@given(lists=st.lists(value_lists, min_size=1, max_size=4), threshold=st.sampled_from([0.0, 1e-10, 0.1, 2.0**-149]))
def test_rows_and_histograms_are_those_of_plain_python(
    dtype: torch.dtype, lists: list[list[float]], threshold: float
) -> None:
    gradients = [tensor_of(numbers, dtype) for numbers in lists]
    for backend in BACKENDS:
        measured = measure(gradients, None, dead_threshold=threshold, histogram=True, backend=backend)
        assert measured.histogram is not None
        for row, histogram, gradient in zip(rows_of(measured), measured.histogram, gradients, strict=True):
            numbers = floats_of(gradient)
            assert_row(row, expected_row(numbers, threshold), TOLERANCE)
            np.testing.assert_array_equal(histogram, expected_histogram(numbers))


@pytest.mark.parametrize("dtype", DTYPES)
@given(first=value_lists, second=value_lists, threshold=st.sampled_from([0.0, 0.1]))
def test_merged_rows_are_the_row_of_the_whole(
    dtype: torch.dtype, first: list[float], second: list[float], threshold: float
) -> None:
    a, b = tensor_of(first, dtype), tensor_of(second, dtype)
    for backend in BACKENDS:
        whole = measure(
            [torch.cat([a, b])], [torch.cat([a, b])], dead_threshold=threshold, histogram=True, backend=backend
        )
        parts = measure([a, b], [a, b], dead_threshold=threshold, histogram=True, backend=backend)
        assert_row(merge_rows(rows_of(parts), axis=0), rows_of(whole)[0], TOLERANCE)
        assert whole.histogram is not None
        assert parts.histogram is not None
        np.testing.assert_array_equal(parts.histogram.sum(0), whole.histogram[0])


def gradients_of(size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    normal = torch.randn(size, generator=torch.Generator().manual_seed(size))
    yield normal.to(dtype)
    yield normal.relu().to(dtype)  # one sign and zeros
    yield -normal.abs().to(dtype)
    yield (normal * 1e-12).to(dtype)
    yield (normal * 1e-41).to(dtype)  # subnormal
    yield (normal * 1e25).to(dtype)
    yield torch.zeros(size, dtype=dtype)
    yield torch.full((size,), math.nan, dtype=dtype)
    mixed = normal.clone()
    mixed[::7], mixed[1::7], mixed[2::9], mixed[3::5], mixed[4::5] = math.nan, math.inf, -math.inf, -0.0, 1e-40
    yield mixed.to(dtype)


SIZES = (0, 1, SEGMENT - 1, SEGMENT + 1, LINE - 1, LINE, LINE + 1, SMALL - 1, SMALL, SMALL + 1, PIECE, PIECE + 1)


CASES: list[tuple[tuple[int, ...], list[torch.dtype], float, float | None]] = [
    *[(SIZES, [dtype], threshold, None) for dtype in DTYPES for threshold in (0.0, 0.25)],
    ((0, 3, 2000, SMALL + 5), DTYPES, 1e-3, None),
    *[((3, SMALL + 5), DTYPES, 1e-6, scale) for scale in (2.0**-16, 1.0, 8.0, 1 / 3, 2.0**-30)],
]


@functools.lru_cache(maxsize=1)  # shared by all backends, because it is slower than they are
def referred(case: int) -> tuple[list[torch.Tensor], dict[str, Any], Measurement]:
    sizes, dtypes, threshold, scale = CASES[case]
    gradients = [g for size in sizes for dtype in dtypes for g in gradients_of(size, dtype)]
    inverse_scale = None if scale is None else torch.tensor(scale)
    kwargs = {"dead_threshold": threshold, "inverse_scale": inverse_scale, "histogram": True}
    return gradients, kwargs, measure(gradients, gradients[::-1], **kwargs, backend="reference")


@pytest.mark.parametrize("name", FAST_BACKENDS)  # the first of these varies fastest: the reference measures once
@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_size_dtype_threshold_and_scale_equals_the_reference(case: int, name: str) -> None:
    gradients, kwargs, expected = referred(case)
    parameters, inverse_scale = gradients[::-1], kwargs["inverse_scale"]
    measured = measure(gradients, parameters, **kwargs, backend=name)
    for row, expected_of in zip(rows_of(measured), rows_of(expected), strict=True):
        assert_row(row, expected_of, TOLERANCE)
    assert measured.histogram is not None
    assert expected.histogram is not None
    np.testing.assert_array_equal(measured.histogram, expected.histogram)
    np.testing.assert_allclose(
        measure_received(gradients, inverse_scale=inverse_scale, backend=name),
        expected.rows[:, AS_LEFT],
        rtol=TOLERANCE,
        atol=0,
    )


def test_a_scaled_gradient_is_measured_in_true_units(backend: str) -> None:
    # 65536 * {3, -4, 0}: unscaled sum -1, squares 25; |-4| <= 4 is dead only if unscaled.
    scaled = torch.tensor([3.0, -4.0, 0.0]) * 65536
    measured = measure(
        [scaled], [scaled], dead_threshold=3.5, inverse_scale=torch.tensor(1 / 65536), histogram=True, backend=backend
    )
    expected = expected_row([3.0, -4.0, 0.0], 3.5)
    expected[Column.PARAM_SUM_SQ], expected[Column.PARAM_NUM_NONFINITE] = 25 * 65536.0**2, 0  # never scaled
    assert_row(rows_of(measured)[0], expected, 1e-7)
    assert measured.histogram is not None
    np.testing.assert_array_equal(measured.histogram[0], expected_histogram([3.0, -4.0, 0.0]))
    assert measure_received([scaled], inverse_scale=torch.tensor(1 / 65536), backend=backend).tolist() == [
        [25.0, 0.0, 0.0]
    ]


def test_scaling_a_row_is_what_scale_power_says(backend: str) -> None:
    gradient = torch.tensor([3.0, -4.0, 0.0, math.nan])
    plain = rows_of(measure([gradient], None, backend=backend))[0]
    scaled = rows_of(measure([gradient], None, inverse_scale=torch.tensor(0.25), backend=backend))[0]
    for column in Column:
        if column < Column.RECEIVED_SUM_SQ:
            assert scaled[column] == plain[column] * 0.25 ** SCALE_POWER.get(column, 0), column.name


@pytest.mark.parametrize("name", [name for name in FAST_BACKENDS if name != "torch"])
def test_subnormals_are_seen_in_a_process_that_flushes_them(name: str) -> None:
    numbers = [2.0**-149, -(2.0**-130), 0.0, -0.0, 1.0]
    gradients = [torch.tensor(numbers), torch.tensor(numbers * SMALL), torch.tensor([2.0**-140, 2.0**-135])]
    bfloats = torch.tensor([2.0**-130, -(2.0**-133), 0.0], dtype=torch.bfloat16)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        measured = measure([*gradients, bfloats], None, histogram=True, backend=name)
    finally:
        torch.set_flush_denormal(False)
    rows = rows_of(measured)
    assert rows[:, Column.NUM_ZERO].tolist() == [2, 2 * SMALL, 0, 1]
    assert rows[:, Column.GRAD_ABS_MIN_NONZERO].tolist() == [2.0**-149, 2.0**-149, 2.0**-140, 2.0**-133]
    assert rows[:, Column.GRAD_MIN].tolist() == [-(2.0**-130), -(2.0**-130), 2.0**-140, -(2.0**-133)]
    assert rows[:, Column.GRAD_MAX].tolist() == [1.0, 1.0, 2.0**-135, 2.0**-130]
    assert measured.histogram is not None
    assert measured.histogram[:, 127:130].tolist() == [[1, 2, 1], [SMALL, 2 * SMALL, SMALL], [0, 0, 2], [1, 1, 1]]


def test_gradients_and_modes_are_left_as_they_were(backend: str) -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    gradient = (parameter * torch.tensor([3.0, 4.0])).detach().requires_grad_()
    before = gradient.detach().clone()
    with torch.enable_grad():
        measured = measure([gradient], [parameter], histogram=True, backend=backend)
        assert torch.is_grad_enabled()
    assert not measured.rows.requires_grad
    assert torch.equal(gradient.detach(), before)
    assert gradient.grad is None
    assert parameter.grad is None


def test_default_dtype_device_autocast_and_determinism_settings_change_nothing(backend: str) -> None:
    gradients = [torch.tensor([3.0, -4.0]), torch.full((SMALL + 1,), 300.0, dtype=torch.float16)]
    expected = measure(gradients, gradients, histogram=True, backend=backend)
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("meta"):
            measured = measure(gradients, gradients, histogram=True, backend=backend)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    assert torch.equal(measured.rows, expected.rows)
    assert measured.histogram is not None
    assert expected.histogram is not None
    assert torch.equal(measured.histogram, expected.histogram)


def test_measuring_twice_gives_the_same_bits(backend: str) -> None:
    gradients = [g for size in (5, SMALL + 3, PIECE + 7) for g in gradients_of(size, torch.float32)]
    first, second = (measure(gradients, gradients, backend=backend).rows.view(torch.int64) for _ in range(2))
    assert torch.equal(first, second)


def test_the_row_of_a_gradient_does_not_depend_on_the_others(backend: str) -> None:
    gradients = [g for size in (5, 700, SMALL - 1, SMALL + 3) for g in gradients_of(size, torch.float32)]
    together = measure(gradients, gradients, backend=backend).rows
    alone = torch.cat([measure([g], [g], backend=backend).rows for g in gradients])
    assert torch.equal(alone.view(torch.int64), together.view(torch.int64))
    received = torch.cat([measure_received([g], backend=backend) for g in gradients])
    assert torch.equal(received, measure_received(gradients, backend=backend))


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base[::2],
        lambda base: base.view(6, 4)[:, 0],
        lambda base: base.view(3, 2, 4).permute(2, 0, 1),
        lambda base: torch.stack([base.view(4, 6), base.view(4, 6)], dim=-1)[..., 0],
        lambda base: base[:3].expand(4, 3),
    ],
)
def test_elements_are_contiguous_and_complete_whatever_the_strides(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = make(torch.arange(24.0))
    elements, num_implicit_zeros = elements_of(tensor)
    assert elements.is_contiguous()
    assert elements.ndim == 1
    assert sorted(elements.tolist()) == sorted(tensor.flatten().tolist())
    assert num_implicit_zeros == 0


class Wrapper(torch.Tensor):
    """A tensor without its own memory, like a float8 weight of FSDP2: operations read the tensor that it wraps."""

    @staticmethod
    def __new__(cls, wrapped: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, wrapped.shape, dtype=wrapped.dtype)  # type: ignore[attr-defined]
        made.wrapped = wrapped
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: object) -> Wrapper:
        return cls(inner["wrapped"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain_args, plain_kwargs = tree_map_only(Wrapper, lambda t: t.wrapped, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        return cls(result) if func is torch.ops.aten.detach.default else result


def test_a_tensor_without_memory_of_its_own_is_measured_by_what_it_wraps(backend: str) -> None:
    gradient, parameter = (Wrapper(torch.tensor([3.0, -4.0, 0.0], dtype=torch.bfloat16)) for _ in range(2))
    measured = measure([gradient], [torch.nn.Parameter(parameter)], histogram=True, backend=backend)
    expected = expected_row([3.0, -4.0, 0.0])
    expected[Column.PARAM_SUM_SQ], expected[Column.PARAM_NUM_NONFINITE] = 25, 0
    assert_row(rows_of(measured)[0], expected, 0.0)
    assert measured.histogram is not None
    assert measured.histogram[0].tolist() == expected_histogram([3.0, -4.0, 0.0]).tolist()
    assert measure_received([gradient], backend=backend).tolist() == [[25, 0, 0]]


class Launches(TorchDispatchMode):
    """Count operations, except views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = ("view", "slice", "select", "unsqueeze", "transpose", "permute", "detach", "empty", "t.", "expand")
        self.count += not func.name().removeprefix("aten::").startswith((*views, "_unsafe_view", "unbind", "alias"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("options", "most"), [({}, 21), ({"parameters": True}, 30), ({"histogram": True}, 33)])
def test_a_page_of_plain_torch_is_few_launches(
    options: dict[str, bool], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The additional operations for one more page of tensors, including the copy that assembles the page."""
    monkeypatch.setattr(generic, "PAGE_LINES", 4)

    def launches(num_pages: int) -> int:
        gradients = [torch.ones(2 * LINE) for _ in range(2 * num_pages)]
        parameters = gradients if options.get("parameters") else None
        for _ in range(2):  # the first call makes index tables
            with torch.no_grad(), Launches() as counted:
                measure(gradients, parameters, histogram=options.get("histogram", False), backend="torch")
        return counted.count

    assert launches(3) - launches(2) <= most


@pytest.mark.parametrize("backend", ["cpu", "compiled"])
def test_threads_in_which_autograd_is_on_measure_parameters_that_require_a_gradient(backend, monkeypatch) -> None:
    """Whether autograd is on is known to each thread alone: it is off in ours, and on in new ones."""
    read_by: list[threading.Thread] = []

    def all_in_threads(pieces: Sequence[Any], read: Callable[[Any], object], _: int) -> None:
        with ThreadPoolExecutor(1) as executor:
            list(executor.map(lambda piece: (read_by.append(threading.current_thread()), read(piece)), pieces))

    for module in (cpu, cpu_compiled):
        monkeypatch.setattr(module, "for_each", all_in_threads)
    parameters = [torch.nn.Parameter(torch.full((1 << 18,), 2.0, dtype=dtype)) for dtype in DTYPES for _ in range(3)]
    with torch.no_grad():
        rows = measure([torch.ones_like(p) for p in parameters], parameters, backend=backend).rows
    assert read_by
    assert threading.current_thread() not in read_by
    assert rows[:, Column.GRAD_SUM_SQ].tolist() == [2.0**18] * 12
    assert rows[:, Column.PARAM_SUM_SQ].tolist() == [4 * 2.0**18] * 12


def test_without_parameters_their_columns_are_missing_not_zero(backend: str) -> None:
    row = rows_of(measure([torch.ones(2)], None, backend=backend))[0]
    assert np.isnan(row[[Column.PARAM_SUM_SQ, Column.PARAM_NUM_NONFINITE]]).all()
    assert measure([torch.ones(2)], None, backend=backend).histogram is None


def test_an_unknown_backend_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match='backend=\'gpu\' is unknown; choose "auto" or one of "cpu", '):
        resolve_backend("gpu", torch.device("cpu"), "head.weight")


def test_a_backend_for_another_device_says_so() -> None:
    message = "backend='cpu' needs CPU gradients, but 'head.weight' is on cuda:0; use backend='auto'"
    with pytest.raises(RuntimeError, match=message):
        resolve_backend("cpu", torch.device("cuda:0"), "head.weight")
