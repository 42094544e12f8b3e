"""Statistics with known answers, on every backend."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from statistics_oracle import BACKENDS, FAST_BACKENDS

from wandb_gradwatch._measure.columns import Column
from wandb_gradwatch._measure.measure import measure, measure_received
from wandb_gradwatch.snapshot import Snapshot

INF, NAN = math.inf, math.nan


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def snapshot_of(
    backend: str, *gradients: torch.Tensor, parameters: list[torch.Tensor] | None = None, **kwargs: float
) -> Snapshot:
    """Return a snapshot with one sample of these gradients, named "0", "1", ..."""
    measured = measure(gradients, parameters, histogram=True, backend=backend, **kwargs)
    assert measured.histogram is not None
    return Snapshot(
        steps=np.array([1]),
        names=tuple(map(str, range(len(gradients)))),
        rows=measured.rows.numpy()[None],
        histogram=measured.histogram.numpy(),
        histogram_steps=(1,),
    )


def test_norms_of_layers_and_of_the_whole(backend: str) -> None:
    snapshot = snapshot_of(backend, torch.tensor([3.0, 4.0]), torch.tensor([12.0]))
    assert snapshot.grad_norm.tolist() == [[5.0, 12.0]]
    assert snapshot.total_grad_norm.tolist() == [13.0]


def test_mean_and_population_deviation_of_signed_gradients(backend: str) -> None:
    total = snapshot_of(backend, torch.tensor([3.0, -4.0]), torch.tensor([0.0])).total
    # mean -1/3; mean of squares 25/3; variance 25/3 - 1/9 = 74/9
    assert total.grad_mean.item() == pytest.approx(-1 / 3)
    assert total.grad_std.item() == pytest.approx(math.sqrt(74 / 9))


def test_one_nan_is_counted_and_its_layers_finite_norm_is_still_known(backend: str) -> None:
    snapshot = snapshot_of(backend, torch.tensor([3.0, 4.0]), torch.tensor([1.0, NAN, 2.0]))
    assert snapshot.num_nan.tolist() == [[0, 1]]
    assert snapshot.num_inf.tolist() == [[0, 0]]
    np.testing.assert_allclose(snapshot.grad_norm, [[5.0, math.sqrt(5)]])
    assert snapshot.grad_mean.tolist() == [[3.5, 1.5]]


def test_a_layer_that_is_all_nan_has_no_extremes_and_no_mean(backend: str) -> None:
    snapshot = snapshot_of(backend, torch.full((5,), NAN), torch.tensor([3.0, 4.0]))
    assert snapshot.num_nan.tolist() == [[5, 0]]
    assert snapshot.grad_norm[0, 1] == 5.0
    for values in (
        snapshot.grad_norm,
        snapshot.grad_mean,
        snapshot.grad_std,
        snapshot.grad_min,
        snapshot.grad_max,
        snapshot.quantile(0.5),
    ):
        assert np.isnan(values.flat[0])
    assert snapshot.total_grad_norm.tolist() == [5.0]


@pytest.mark.parametrize("infinity", [INF, -INF])
def test_one_infinity_of_either_sign_is_counted_apart_and_harms_nothing(backend: str, infinity: float) -> None:
    snapshot = snapshot_of(backend, torch.tensor([3.0, infinity, -4.0]))
    assert snapshot.num_inf.tolist() == [[1]]
    assert snapshot.num_nan.tolist() == [[0]]
    assert snapshot.grad_norm.tolist() == [[5.0]]
    assert (snapshot.grad_min.item(), snapshot.grad_max.item(), snapshot.grad_abs_max.item()) == (-4.0, 3.0, 4.0)


def test_fp16_squares_do_not_overflow(backend: str) -> None:
    gradient = torch.full((100,), 300.0, dtype=torch.float16)
    assert snapshot_of(backend, gradient).grad_norm.item() == pytest.approx(3000, rel=1e-7)
    assert measure_received([gradient], backend=backend)[0, 0].sqrt().item() == pytest.approx(3000, rel=1e-7)


def test_the_norm_of_a_bfloat16_gradient_has_more_than_three_digits(backend: str) -> None:
    # 4096 elements of which half are 1 and half 1.0078125, which bfloat16 holds exactly
    gradient = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16).repeat(2048)
    expected = math.sqrt(2048 * (1 + 1.0078125**2))
    assert snapshot_of(backend, gradient).grad_norm.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4, 100_000])  # a small tensor and one that is read in chunks
def test_huge_and_tiny_magnitudes_neither_overflow_nor_vanish(backend: str, dtype: torch.dtype, size: int) -> None:
    for magnitude in (1e20, 1e-25):
        gradient = torch.full((size,), magnitude, dtype=dtype)
        stash = float(gradient[0])  # bfloat16 holds 1e20 to 8 bits
        snapshot = snapshot_of(backend, gradient)
        assert snapshot.grad_norm.item() == pytest.approx(stash * math.sqrt(size), rel=1e-7)
        assert snapshot.num_inf.item() == 0
        assert snapshot.zero_ratio.item() == 0
        assert measure_received([gradient], backend=backend)[0, 0].item() == pytest.approx(size * stash**2, rel=1e-7)


@pytest.mark.parametrize("fast", FAST_BACKENDS)
@pytest.mark.parametrize("num_elements", [20_000_000, pytest.param(100_000_000, marks=pytest.mark.slow)])
def test_more_elements_than_float32_can_count_are_counted_exactly(fast: str, num_elements: int) -> None:
    num_zeros = 2**24 + 1  # one more than float32 can count
    gradient = torch.full((num_elements,), 0.1)
    gradient[:num_zeros] = 0
    stash = float(np.float32(0.1))
    snapshot = snapshot_of(fast, gradient)
    assert snapshot.num_elements.item() == num_elements
    assert snapshot.column(Column.NUM_ZERO).item() == num_zeros
    assert snapshot.grad_norm.item() == pytest.approx(stash * math.sqrt(num_elements - num_zeros), rel=1e-6)
    assert snapshot.grad_mean.item() == pytest.approx(stash * (1 - num_zeros / num_elements), rel=1e-6)
    assert snapshot.histogram is not None
    assert snapshot.histogram.sum() == num_elements
    assert snapshot.histogram[0, 128] == num_zeros


def test_a_constant_gradient_deviates_from_its_mean_by_rounding_only(backend: str) -> None:
    gradient = torch.full((1_000_000,), 0.1)
    # float32 squares in segments: the mean of squares is right to 1e-6, its root to 1e-3 of the mean
    assert snapshot_of(backend, gradient).grad_std.item() <= 1e-3 * 0.1


def test_a_sparse_gradient_sums_its_duplicates_and_counts_what_it_does_not_store(backend: str) -> None:
    # Rows 1, 1, 2 of 10 x 4, all ones: row 1 holds four 2, row 2 four 1: norm sqrt(4 * 4 + 4) = sqrt(20)
    gradient = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 2]]), torch.ones(3, 4), (10, 4), check_invariants=True, is_coalesced=False
    )
    snapshot = snapshot_of(backend, gradient, parameters=[torch.ones(10, 4)])
    assert snapshot.grad_norm.item() == pytest.approx(math.sqrt(20))
    assert snapshot.zero_ratio.item() == 0.8
    assert snapshot.dead_ratio.item() == 0.8
    assert snapshot.num_elements.item() == 40
    assert (snapshot.grad_min.item(), snapshot.grad_max.item(), snapshot.grad_abs_min_nonzero.item()) == (0, 2, 1)
    assert snapshot.param_norm.item() == pytest.approx(math.sqrt(40))
    assert snapshot.histogram is not None
    assert snapshot.histogram[0, 128] == 32
    assert snapshot.histogram.sum() == 40


def test_a_sparse_gradient_without_entries_is_all_zero_not_missing(backend: str) -> None:
    gradient = torch.sparse_coo_tensor(
        torch.zeros((1, 0), dtype=torch.int64), torch.zeros(0, 4), (10, 4), check_invariants=True
    )
    snapshot = snapshot_of(backend, gradient)
    assert snapshot.grad_norm.item() == 0
    assert snapshot.zero_ratio.item() == 1
    assert (snapshot.grad_min.item(), snapshot.grad_max.item()) == (0, 0)


def test_an_empty_parameter_beside_others_is_no_error_and_no_nan(backend: str) -> None:
    snapshot = snapshot_of(backend, torch.empty(0), torch.tensor([3.0, 4.0]), torch.empty(0, 3))
    assert snapshot.total_grad_norm.tolist() == [5.0]
    assert snapshot.grad_norm.tolist() == [[0.0, 5.0, 0.0]]
    assert snapshot.total.grad_mean.tolist() == [[3.5]]


def test_all_gradients_of_1e_minus_7_are_alive(backend: str) -> None:
    snapshot = snapshot_of(backend, torch.full((1000,), 1e-7))
    assert snapshot.dead_ratio.item() == 0
    assert snapshot.zero_ratio.item() == 0


def test_the_dead_threshold_is_inclusive_and_compares_exactly(backend: str) -> None:
    exact = torch.tensor([0.25, -0.25, 0.2500001, 0.0, -0.0, NAN, -INF])
    assert snapshot_of(backend, exact, dead_threshold=0.25).column(Column.NUM_DEAD).item() == 4
    # float32's 0.1 is 0.100000001490116..., more than 0.1: alive
    assert snapshot_of(backend, torch.tensor([0.1]), dead_threshold=0.1).column(Column.NUM_DEAD).item() == 0


def test_a_complex_element_counts_once_by_its_magnitude(backend: str) -> None:
    gradient = torch.tensor([3 + 4j, 0j, complex(NAN, 1), complex(NAN, INF), complex(-INF, 1)])
    for dtype in (torch.complex64, torch.complex128):
        snapshot = snapshot_of(backend, gradient.to(dtype), parameters=[gradient.to(dtype)])
        assert snapshot.grad_norm.item() == 5
        assert snapshot.num_elements.item() == 5
        assert (snapshot.num_nan.item(), snapshot.num_inf.item(), snapshot.column(Column.NUM_ZERO).item()) == (2, 1, 1)
        assert snapshot.param_norm.item() == 5
        assert snapshot.column(Column.PARAM_NUM_NONFINITE).item() == 3
    assert snapshot_of(backend, torch.tensor([3 + 4j]).conj()).grad_norm.item() == 5


@pytest.mark.parametrize("size", [2, 40])  # 16 elements, and more than fit one batch of small tensors
def test_any_memory_layout_is_read_exactly(backend: str, size: int) -> None:
    # 0, 1, ..., n-1: sum n (n - 1) / 2 and sum of squares (n - 1) n (2n - 1) / 6, both exact in float64
    dense = torch.arange(size**2 * 16, dtype=torch.float32).reshape(size, 4, 4, size)
    n = dense.numel()
    layouts = [
        dense.to(memory_format=torch.channels_last),
        dense.permute(3, 1, 0, 2),
        torch.stack([dense, -dense])[0],
        torch.stack([dense, dense + 1], dim=-1)[..., 0],  # every other element
        torch._neg_view(-dense),
    ]
    snapshot = snapshot_of(backend, *layouts)
    for row in snapshot.rows[0]:
        assert row[Column.GRAD_SUM] == pytest.approx(n * (n - 1) / 2, rel=1e-6)
        assert row[Column.GRAD_SUM_SQ] == pytest.approx((n - 1) * n * (2 * n - 1) / 6, rel=4e-6)
        assert (row[Column.GRAD_MIN], row[Column.GRAD_MAX]) == (0, n - 1)
        assert row[Column.NUM_ELEMENTS] == n


def test_expanded_and_zero_dimensional_gradients(backend: str) -> None:
    snapshot = snapshot_of(backend, torch.tensor(2.0), torch.tensor([1.0, 2.0]).expand(5, 2), torch.tensor(3.0)[None])
    assert snapshot.grad_norm.tolist() == [[2.0, 5.0, 3.0]]
    assert snapshot.num_elements.tolist() == [[1, 10, 1]]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_gradients_are_read_like_the_floats_they_are(backend: str, dtype: torch.dtype) -> None:
    snapshot = snapshot_of(backend, torch.tensor([3.0, -4.0, 0.0, NAN]).to(dtype))
    assert snapshot.grad_norm.item() == 5
    assert snapshot.num_nan.item() == 1
    assert snapshot.zero_ratio.item() == 0.25


def test_a_parameter_may_have_another_dtype_than_its_gradient(backend: str) -> None:
    parameters = [torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([NAN, INF, 2.0], dtype=torch.bfloat16)]
    gradients = [torch.tensor([1.0, 0.0], dtype=torch.float16), torch.ones(3)]
    snapshot = snapshot_of(backend, *gradients, parameters=parameters)
    assert snapshot.param_norm.tolist() == [[5.0, 2.0]]
    assert snapshot.column(Column.PARAM_NUM_NONFINITE).tolist() == [[0, 2]]


def test_a_zero_initialised_parameter_has_no_ratio(backend: str) -> None:
    snapshot = snapshot_of(
        backend, torch.tensor([1.0]), torch.tensor([1.0]), parameters=[torch.zeros(1), torch.ones(1)]
    )
    assert np.isnan(snapshot.grad_param_ratio[0, 0])
    assert snapshot.grad_param_ratio[0, 1] == 1


def test_a_quantile_finds_one_outlier_in_a_hundred_thousand(backend: str) -> None:
    gradient = torch.full((100_001,), 1e-3)
    gradient[70_000] = 1e3
    snapshot = snapshot_of(backend, gradient)
    # 1e-3 lies in the bin [2**-10, 1.5 * 2**-10), whose lower edge the smallest element raises to 1e-3
    for q in (0.5, 0.99):
        assert 1e-3 * (1 - 1e-6) <= snapshot.quantile(q).item() < 1.5 * 2**-10
    assert 768 <= snapshot.quantile(0.999995).item() <= 1000  # rank 100001: the outlier, in the bin [768, 1024)
    assert np.count_nonzero(snapshot.histogram) == 2
