"""The Triton kernels against the reference: on a GPU where there is one, otherwise in Triton's interpreter."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest
import torch
from statistics_oracle import assert_row, expected_histogram, expected_row

from wandb_gradwatch.statistics import measure as door
from wandb_gradwatch.statistics import reference
from wandb_gradwatch.statistics.columns import IDENTITY_C, Column
from wandb_gradwatch.statistics.table import AddressTable

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
interpret = os.environ.get("TRITON_INTERPRET")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = (
        "1"  # read when Triton is imported, when a kernel is defined, and when it is called
    )
pytest.importorskip("triton", reason="Triton is not installed")
from wandb_gradwatch.statistics import cuda_launch  # noqa: E402

if interpret is None:
    os.environ.pop("TRITON_INTERPRET", None)  # for the sake of other tests and the processes that they start

BLOCK, CHUNK = 64, 128  # small ones, so that the interpreter sees every way through a kernel in seconds
SIZES = [0, 1, BLOCK - 1, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# float32 squares add up CHUNK / BLOCK deep in a lane, each addition right to 2**-24, and are rounded once themselves
TOLERANCE = (CHUNK / BLOCK + 1) * 2.0**-24


pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)  # numpy, interpreted


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(cuda_launch, "BLOCK", BLOCK)
    monkeypatch.setattr(cuda_launch, "CHUNK", CHUNK)
    monkeypatch.setattr(cuda_launch, "FOLD_BLOCK", 2)  # less than the chunks of the largest tensor


def gradients_of(size: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    normal = torch.randn(size, generator=torch.Generator().manual_seed(size))
    mixed = normal.clone()
    mixed[::7], mixed[1::7], mixed[2::9], mixed[3::5], mixed[4::5] = math.nan, math.inf, -math.inf, -0.0, 1e-40
    exact = normal.clone()  # zeros of both signs, and the threshold of the tests below with and without their scale
    exact[::6], exact[1::6], exact[2::6], exact[3::6], exact[4::6] = -0.0, 0.0, 0.25, -0.25, 0.25 * 65536
    one_nan, one_infinity = normal.clone(), normal.clone()
    one_nan[-1:], one_infinity[:1] = math.nan, -math.inf
    kinds = [normal, normal.relu(), -normal.abs(), normal * 1e-12, normal * 1e-41, normal * 1e25, normal * 0]
    for values in [*kinds, torch.full((size,), math.nan), mixed, exact, one_nan, one_infinity]:
        yield values.to(dtype).to(DEVICE)


def assert_equals_reference(
    gradients: list[torch.Tensor],
    *,
    dead_threshold: float = 0.0,
    inverse_scale: torch.Tensor | None = None,
    histogram: bool = True,
) -> None:
    parameters = gradients[::-1]
    kwargs = {"dead_threshold": dead_threshold, "inverse_scale": inverse_scale, "histogram": histogram}
    expected_rows, expected_histograms = reference.measure(gradients, parameters, **kwargs)
    rows, histograms = cuda_launch.measure(gradients, parameters, **kwargs)
    for row, expected_row_of in zip(rows.cpu().numpy(), expected_rows.cpu().numpy(), strict=True):
        assert_row(row, expected_row_of, TOLERANCE)
    assert (histograms is None) == (expected_histograms is None)
    if histograms is not None and expected_histograms is not None:
        np.testing.assert_array_equal(histograms.cpu(), expected_histograms.cpu())
    sums = cuda_launch.sum_sq(gradients, inverse_scale=inverse_scale)
    np.testing.assert_allclose(sums.cpu(), expected_rows[:, Column.GRAD_SUM_SQ].cpu(), rtol=TOLERANCE, atol=0)


def test_a_worked_example() -> None:
    gradients = [torch.tensor([3.0, -4.0, 0.0, math.nan], device=DEVICE), torch.empty(0, device=DEVICE)]
    rows, histogram = cuda_launch.measure(gradients, None, dead_threshold=0.0, inverse_scale=None, histogram=True)
    assert_row(rows[0].cpu().numpy(), expected_row([3.0, -4.0, 0.0, math.nan]), 0.0)
    np.testing.assert_array_equal(rows[1, : Column.RECEIVED_SUM_SQ].cpu(), IDENTITY_C[: Column.RECEIVED_SUM_SQ])
    assert histogram is not None
    np.testing.assert_array_equal(histogram[0].cpu(), expected_histogram([3.0, -4.0, 0.0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_and_value_equals_the_reference(dtype: torch.dtype, size: int) -> None:
    assert_equals_reference(list(gradients_of(size, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 2.0**-16, 1 / 3])
def test_thresholds_and_scales_equal_the_reference(dtype: torch.dtype, scale: float | None) -> None:
    inverse_scale = None if scale is None else torch.tensor(scale, device=DEVICE)
    gradients = list(gradients_of(CHUNK + 1, dtype))
    assert_equals_reference(gradients, dead_threshold=0.25, inverse_scale=inverse_scale)
    assert_equals_reference(gradients[:2], inverse_scale=inverse_scale, histogram=False)


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
    assert_equals_reference([torch.cat([both, -both]).to(DEVICE), torch.cat([both, -both]).double().to(DEVICE)])


def test_measuring_twice_gives_the_same_bits() -> None:
    gradients = [g for size in (BLOCK, 3 * CHUNK + 3) for g in gradients_of(size, torch.float32)]
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": False}
    first, second = (cuda_launch.measure(gradients, gradients, **kwargs)[0].view(torch.int64) for _ in range(2))
    assert torch.equal(first, second)


def test_a_tensor_at_address_0_is_missing_not_zero() -> None:
    gradients = [torch.ones(CHUNK + 1, device=DEVICE), torch.ones(3, device=DEVICE)]
    plan = cuda_launch.prepare(gradients, "gradients")
    plan.table.write([0, 0, 0, gradients[1].data_ptr()])
    rows, _ = cuda_launch.launch(plan, None, dead=False, inverse_scale=None, histogram=False)
    assert math.isnan(rows[0, Column.NUM_ELEMENTS])
    assert rows[1, Column.NUM_ELEMENTS] == 3
    assert rows[1, Column.GRAD_SUM] == 3


def test_rows_follow_gradients_that_moved() -> None:
    kwargs = {"dead_threshold": 0.0, "inverse_scale": None, "histogram": False}
    kept = [torch.full((5,), value, device=DEVICE) for value in (1.0, 2.0)]
    sums = [cuda_launch.measure([g], None, **kwargs)[0][0, Column.GRAD_SUM].item() for g in kept]
    assert sums == [5.0, 10.0]


def test_warming_up_runs_every_kernel_without_a_model() -> None:
    cuda_launch.warm_up(
        DEVICE, [torch.float32, torch.bfloat16, torch.float32], dead_threshold=0.0, scaled=True, histogram=True
    )


# ---- the table of addresses


def test_a_table_is_uploaded_only_when_an_address_changed() -> None:
    table = AddressTable(2, torch.device("cpu"))
    assert table.write([1, 2])
    assert not table.write([1, 2])
    assert table.write([1, 3])
    assert table.device_table.tolist() == [1, 3]


def test_a_slot_in_flight_is_never_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeSlot:
        made: ClassVar[list[FakeSlot]] = []

        def __init__(self, size: int) -> None:
            self.in_flight = False
            self.made.append(self)

        def is_free(self) -> bool:
            return not self.in_flight

        def upload(self, values: torch.Tensor, table: torch.Tensor) -> None:
            assert not self.in_flight, "the device has not read this yet"
            self.in_flight = True
            table.copy_(values)

    monkeypatch.setattr("wandb_gradwatch.statistics.table.Slot", FakeSlot)
    table = AddressTable(1, torch.device("cpu"))
    for address in range(3):  # a host that runs ahead of the device
        table._upload(torch.tensor([address]))
    assert len(FakeSlot.made) == 3
    FakeSlot.made[0].in_flight = False
    table._upload(torch.tensor([3]))
    assert len(FakeSlot.made) == 3
    table._upload(torch.tensor([4]))
    assert len(FakeSlot.made) == 4


# ---- the door


def test_the_cuda_backend_refuses_other_devices_by_name() -> None:
    message = "backend='cuda' needs CUDA gradients, but 'head.weight' is on cpu; use backend='auto'"
    with pytest.raises(RuntimeError, match=message):
        door.resolve_backend("cuda", torch.device("cpu"), "head.weight")


def test_auto_uses_triton_where_it_is_installed_and_the_cuda_backend_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = torch.device("cuda:0")
    assert door.resolve_backend("auto", cuda, "w") == "cuda"
    monkeypatch.setattr(door, "_triton_is_installed", lambda: False)
    assert door.resolve_backend("auto", cuda, "w") == "torch"
    with pytest.raises(RuntimeError, match="backend='cuda' needs Triton, which is not installed; pip install triton"):
        door.resolve_backend("cuda", cuda, "w")


def test_auto_goes_on_without_triton_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ValueError("no such architecture")

    monkeypatch.setattr(cuda_launch, "measure", broken)
    monkeypatch.setattr(door, "_triton_failed", [])
    monkeypatch.setattr(door, "_best_backend", lambda device: "torch" if door._triton_failed else "cuda")
    for _ in range(2):
        assert door.measure([torch.ones(3)], None).rows[0, Column.GRAD_SUM] == 3
    messages = [str(w.message) for w in recwarn if w.category is RuntimeWarning]
    assert len(messages) == 1
    assert "no such architecture" in messages[0]
    assert "backend='torch' from now on" in messages[0]
