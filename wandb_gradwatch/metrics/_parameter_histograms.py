"""Histograms of the parameters as an update has left them: watch(log="parameters") and watch(log="all")."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._capture.probes import WatchedTensor
from .._measure.columns import Column
from .._measure.measure import measure
from .._measure.probe_values import ProbeHistogram
from ..snapshot import keys
from ._module_probe import ParameterProbe

# N parameters on one device, B histogram bins


class ParameterHistograms(ParameterProbe):
    """Count each parameter that an optimizer has just updated in the fixed bins of gradients.

    Of a sharded parameter each rank counts its shard; the counts add up when the window is merged over the ranks.

    Args:
        backend: as given to watch().

    Cost: at the steps that have a histogram one batched pass over the parameters.
    """

    def __init__(self, backend: str) -> None:
        super().__init__()
        self._backend = backend

    def __repr__(self) -> str:
        return "the histograms of parameters"

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(histogram_is_due, histogram_is_due)

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_due:
            return
        by_device: dict[torch.device, list[WatchedTensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.parameter.device, []).append(tensor)
        for group in by_device.values():
            measured = measure([one.parameter for one in group], None, histogram=True, backend=self._backend)
            assert measured.histogram is not None
            low_N1, high_N1 = (measured.rows[:, column, None] for column in (Column.GRAD_MIN, Column.GRAD_MAX))
            packed = torch.cat([measured.histogram.to(measured.rows.dtype), low_N1, high_N1], dim=1)
            self._found |= {
                f"{keys.PARAMETER_HISTOGRAMS}/{one.name}": ProbeHistogram(row)
                for one, row in zip(group, packed, strict=True)
            }
