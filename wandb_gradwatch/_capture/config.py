"""What the capture is told by watch(), once."""

from __future__ import annotations

from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from .._guard.guard import SkipGuard
from .cadence import Budget, Cadence
from .measurer import MeasureOptions
from .probes import Probe


@dataclass(frozen=True)
class CaptureConfig:
    """Which steps are measured, what is measured in them, and what cannot be found out from the training itself.

    Args:
        cadence: which steps are measured and flushed.
        measured: what is measured of each gradient.
        budget: says which steps are measured where the cadence leaves that open.
        optimizer: the optimizer that owns every parameter that no other one owns (it holds master weights).
        scaler: the gradient scaler to assume until one is seen.
        start_step: the number of the last step before the first one.
        probes: what else measures at sampled steps.
        guard: decides which steps are not applied; None: all are.
    """

    cadence: Cadence
    measured: MeasureOptions
    budget: Budget
    optimizer: Optimizer | None = None
    scaler: GradScaler | None = None
    start_step: int = 0
    probes: tuple[Probe, ...] = ()
    guard: SkipGuard | None = None
