"""A sample whose parameters are on several devices arrives as one, whichever of them saw a gradient change."""

from __future__ import annotations

import numpy as np
import torch

from wandb_gradwatch._measure.columns import NUM_COLUMNS, Column
from wandb_gradwatch._transfer.device_buffer import RECEIVED
from wandb_gradwatch._transfer.transfers import Sample, SampleTransfer, Transfer
from wandb_gradwatch.snapshot import keys


def rows_of(slot: int, norm: float, *, received: float | None = None) -> torch.Tensor:
    """What a device with one of three parameters sends: [L, P + 1, C], with L = 3 if the gradient has changed."""
    rows = torch.full((1 if received is None else 3, 4, NUM_COLUMNS), torch.nan, dtype=torch.float64)
    # One element: its sum, its square, the extremes and the smallest magnitude are those of the norm.
    for measurement, value in ((0, norm), (RECEIVED, received)):
        if value is not None:
            row = rows[measurement, slot]
            row[:] = 0
            row[Column.NUM_ELEMENTS] = 1
            row[Column.GRAD_SUM_SQ] = row[Column.RECEIVED_SUM_SQ] = value**2
            for column in (Column.GRAD_SUM, Column.GRAD_MIN, Column.GRAD_MAX, Column.GRAD_ABS_MIN_NONZERO):
                row[column] = value
    return rows


def arrived(*devices: torch.Tensor, by_torch: bool = True) -> tuple[np.ndarray, dict[str, float]]:
    sample = Sample(1, skipped=False, updated=((0, 1, 2),), by_torch=by_torch, eps=1e-7)
    unpacked = SampleTransfer(sample, 3, [Transfer(rows) for rows in devices]).unpack()
    return unpacked.rows, dict(unpacked.metrics)


def test_each_parameter_has_the_row_of_the_device_that_holds_it() -> None:
    rows, metrics = arrived(rows_of(0, 3.0), rows_of(2, 4.0))
    assert rows.shape == (3, NUM_COLUMNS)
    assert rows[[0, 2], Column.GRAD_SUM_SQ].tolist() == [9.0, 16.0]
    assert np.isnan(rows[1]).all()
    assert keys.CLIPPED not in metrics


def test_a_change_that_one_device_saw_is_a_change_of_the_sample() -> None:
    for devices in ((rows_of(0, 3.0), rows_of(2, 4.0, received=2.0)), (rows_of(2, 4.0, received=2.0), rows_of(0, 3.0))):
        rows, metrics = arrived(*devices)
        assert rows[[0, 2], Column.GRAD_SUM_SQ].tolist() == [9.0, 16.0]
        # 4 became 2 and 3 stayed 3: no common factor, but each has shrunk as clipping does.
        assert (metrics[keys.CLIPPED], metrics[keys.CHANGED]) == (1.0, 0.0)


def test_a_sample_of_no_device_has_missing_rows() -> None:
    rows, _ = arrived()
    assert rows.shape == (3, NUM_COLUMNS)
    assert np.isnan(rows).all()
