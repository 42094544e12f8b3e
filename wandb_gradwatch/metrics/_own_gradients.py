"""The gradients that a rank computes itself, before those of the other ranks are averaged into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._capture.parameter_registry import NameFilter
from .._capture.probes import WatchedTensor
from .._measure.elements import onto, wide_dtype
from .._runtime.sharding import world_size
from ._module_probe import ParameterProbe, dense
from ._rows import widened


def square_of(tensor: Tensor) -> Tensor:
    """The squared norm, without an overflow of the squares."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor.device))
    return norm.square()


class OwnGradientProbe(ParameterProbe):
    """A probe that compares what the ranks have computed themselves; its numbers travel with the merge over ranks.

    Of a step that is averaged inside the backward it knows the squared norms of what this rank alone adds. A hook on a
    parameter runs before DistributedDataParallel reduces its bucket. What it sees has what earlier backwards of the
    step have left in it, already averaged unless they ran under no_sync(): that is subtracted, for which steps of
    several backwards are copied. The first such step is left out, as nothing was copied there yet.

    Memory: one number for each parameter; two copies of the gradients where steps have several backwards.
    """

    def __init__(self, match: NameFilter | None = None) -> None:
        super().__init__(match)
        self._copies = False  # whether a step of several backwards was seen
        self._num_averaged = 0  # backwards of the step that were averaged inside
        self._begun = False  # a gradient has arrived since the last backward's end
        self._squares_of_own: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}  # of the backwards so far
        self._left: dict[str, Tensor] = {}  # by the last backward
        self._inverse_scales: dict[str, Tensor | None] = {}  # of the gradients that the sample is of

    @property
    def needs_ranks(self) -> bool:
        return world_size() > 1

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._copies = self._copies or self._num_averaged > 1
        self._num_averaged, self._begun = 0, False
        self._squares_of_own, self._own, self._left, self._inverse_scales = {}, {}, {}, {}
        if next_step_is_due:
            self._shards.look()

    def gradient_arrived(self, name: str, gradient: Tensor) -> None:
        if not (self._is_due and self._matches(name) and self._shards.is_whole(name)):
            return
        self._begun = True
        own = widened(dense(gradient))
        if self._copies:
            if name in self._left:
                own = own - self._left[name]
            own = self._own[name] = self._own[name] + own if name in self._own else own.clone()
        self._squares_of_own[name] = square_of(own)

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_due:
            return
        self._inverse_scales |= {tensor.name: tensor.inverse_scale for tensor in tensors}
        if not self._begun:
            return
        self._begun, self._num_averaged = False, self._num_averaged + 1
        if self._copies:
            left = {tensor.name: tensor.gradient for tensor in tensors if tensor.name in self._own}
            self._left = {name: widened(one).clone() for name, one in left.items() if one is not None}

    def own_squares(self) -> dict[str, Tensor]:
        """By parameter: the squared norm of the rank's own gradient, without the loss scale; empty if not known."""
        if self._num_averaged > 1 and not self._copies:
            return {}
        return {name: self.without_scale(name, square) for name, square in self._squares_of_own.items()}

    def without_scale(self, name: str, squares: Tensor) -> Tensor:
        """The squares of a parameter's gradients without the loss scale that they still have."""
        inverse = self._inverse_scales.get(name)
        return squares if inverse is None else squares * onto(inverse, squares.device).square()
