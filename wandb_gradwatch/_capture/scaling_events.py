"""Scalers and clipping: measures what has changed before they change gradients in place."""

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from .._runtime.error_boundary import contained
from .._runtime.listeners import Listener, StepCounter
from .backward_events import BackwardEvents
from .open_sample import OpenSample
from .parts import CaptureParts
from .step_events import StepEvents


class ScalingEvents(Listener):
    """Follows the gradient scalers, and torch's functions that clip."""

    def __init__(self, parts: CaptureParts, sample: OpenSample, backwards: BackwardEvents, steps: StepEvents) -> None:
        self._parts, self._sample, self._backwards, self._steps = parts, sample, backwards, steps
        self._boundary = parts.boundary

    @property
    def counter(self) -> StepCounter | None:
        """The rest, while nothing is measured."""
        return self._steps.counter

    def follows(self, optimizer: Optimizer) -> bool:
        return self._steps.follows(optimizer)

    def step_skipped(self, optimizer: Optimizer) -> None:
        self._steps.step_skipped(optimizer)

    @contained
    def before_unscale(self, optimizer: Optimizer) -> None:
        self._backwards.gradients_are_used()
        if self._parts.is_measured:
            self._sample.received.before_unscale(optimizer)

    @contained
    def after_unscale(self, optimizer: Optimizer) -> None:
        if self._parts.is_measured:
            self._sample.received.after_unscale(optimizer)

    @contained
    def before_clipping(self, parameters: Sequence[Tensor]) -> None:
        self._backwards.gradients_are_used()
        self._sample.clipping.before(parameters)

    @contained
    def after_clipping(self, parameters: Sequence[Tensor]) -> None:
        self._sample.clipping.after(parameters)
