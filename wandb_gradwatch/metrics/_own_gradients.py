"""The gradients that a rank computes itself, before those of the other ranks are averaged into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .._capture.probes import WatchedTensor
from .._measure.elements import onto, wide_dtype
from ._reduction import widened


def square_of(tensor: Tensor) -> Tensor:
    """The squared norm, without an overflow of the squares."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=wide_dtype(tensor.device))
    return norm.square()


def unscaled(squares: Tensor, inverse_scale: Tensor | None) -> Tensor:
    """The squares of gradients without the loss scale that they still have; its inverse, or None."""
    return squares if inverse_scale is None else squares * onto(inverse_scale, squares.device).square()


class OwnGradients:
    """Squared norms of what this rank alone adds to the gradients of a step that is averaged inside the backward.

    A hook on a parameter runs before DistributedDataParallel reduces its bucket. What it sees has what earlier
    backwards of the step have left in it, already averaged unless they ran under no_sync(): that is subtracted, for
    which steps of several backwards are copied. The first such step is left out, as nothing was copied there yet.

    Memory: one number for each parameter; two copies of the gradients where steps have several backwards.
    """

    def __init__(self) -> None:
        self._copies = False  # whether a step of several backwards was seen
        self._num_backwards = 0
        self._begun = False  # a gradient has arrived since the last backward's end
        self._squares: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}  # of the backwards so far
        self._left: dict[str, Tensor] = {}  # by the last backward

    def start(self) -> None:
        """A step begins."""
        self._copies = self._copies or self._num_backwards > 1
        self._num_backwards, self._begun = 0, False
        self._squares, self._own, self._left = {}, {}, {}

    def arrived(self, name: str, gradient: Tensor) -> None:
        """Inside a backward: a gradient is accumulated, and not averaged yet."""
        self._begun = True
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        own = widened(gradient)
        if self._copies:
            if name in self._left:
                own = own - self._left[name]
            own = self._own[name] = self._own[name] + own if name in self._own else own.clone()
        self._squares[name] = square_of(own)

    def ended(self, tensors: Sequence[WatchedTensor]) -> None:
        """A backward has ended, and these are what it has left."""
        if not self._begun:
            return
        self._begun, self._num_backwards = False, self._num_backwards + 1
        if self._copies:
            left = {tensor.name: tensor.gradient for tensor in tensors if tensor.name in self._own}
            self._left = {name: widened(one).clone() for name, one in left.items() if one is not None}

    def squares(self) -> Mapping[str, Tensor]:
        """By parameter: the squared norm of the step's own gradient so far; empty where it is not known."""
        return {} if self._num_backwards > 1 and not self._copies else self._squares
