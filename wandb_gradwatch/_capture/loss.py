"""Collects the loss of a sample. The loss stays on its device and is logged with its sample."""

from numbers import Real

import torch
from torch import Tensor

from .._boundary import CallbackError
from .._measure.elements import onto, wide_dtype
from .._runtime.sharding import local_part
from ..snapshot import keys

Number = float | Tensor  # a number on the host, or a 0-dim tensor on a device
_Total = tuple[Number, int]  # a sum, and how many of its summands are whole losses


class SampleLoss:
    """The loss of the open sample: the mean of the added values; without any, the sum of the backwards' roots.

    An added value is pending until a backward ends or an optimizer steps, because the previous sample may still be
    open.
    """

    def __init__(self) -> None:
        self._pending: _Total | None = None  # of the added values
        self._sample: _Total | None = None
        self._seen: _Total | None = None  # of the tensors that the sample's backwards were called on
        self._divisor: Tensor | None = None  # of all of these together; None: each was divided by its scale

    def see(self, root: Tensor, scale: Tensor | None, *, of_all: bool) -> None:
        """Add the tensor of one element that a backward of the open sample was called on, divided by its scale.

        A loss in host memory with a scale on a device is ignored: the host would have to wait for the scale.
        `of_all`: the scale is that of all backwards of the sample, as a number of tokens that is still counted.
        """
        one = _value_of(root)
        if scale is not None:
            if not isinstance(one, Tensor) and scale.device.type != "cpu":
                return
            if of_all:
                self._divisor = scale.to(wide_dtype(scale.device), copy=True)  # the user may change it in place
            else:
                one = _divided(one, scale)
        self._seen = _together(self._seen, (one, 0))

    def add(self, value: Tensor, *, is_share: bool) -> None:
        """Add a value of one element. Shares (`is_share`) add up to the loss of the step."""
        self._pending = _together(self._pending, (_value_of(value), int(not is_share)))

    def rescale(self, factor: Tensor) -> None:
        """Multiply what the backwards have shown: their tensors were divided by the wrong scale."""
        if self._seen is not None:
            seen, _ = self._seen
            self._seen = seen * (onto(factor, seen.device) if isinstance(seen, Tensor) else _value_of(factor)), 0

    def settle(self) -> None:
        """Move the pending values to the open sample."""
        if self._pending is not None:
            self._sample, self._pending = _together(self._sample, self._pending), None

    def so_far(self) -> dict[str, Number]:
        """Return the loss of the sample by key, without pending values; {} if there is none."""
        seen = self._seen
        if seen is not None and self._divisor is not None:
            seen = _divided(seen[0], self._divisor), 0
        found = self._sample or seen
        return {} if found is None else {keys.LOSS: found[0] / found[1] if found[1] > 1 else found[0]}

    def take(self) -> dict[str, Number]:
        """Return the loss of the closed sample as `so_far` does, and forget it, but not pending values."""
        loss = self.so_far()
        self._sample = self._seen = self._divisor = None
        return loss


def _value_of(tensor: Tensor) -> Number:
    """Return the current value of the one element, because the caller may modify the tensor in place later.

    On a device a copy. In host memory numpy reads it, without the functions of torch that can wait for a device.
    """
    one = local_part(tensor).detach()
    if not one.is_cpu:
        return one.reshape(()).to(wide_dtype(one.device), copy=True)
    return float((one.double() if one.dtype.itemsize < 4 else one).numpy().item())  # numpy has no bfloat16


def _divided(one: Number, scale: Tensor) -> Number:
    """Divide as tensors, because Python's own division raises at 0."""
    return one / onto(scale, one.device) if isinstance(one, Tensor) else _value_of(one / scale.double())


def _together(one: _Total | None, other: _Total) -> _Total:
    if one is None:
        return other
    (own, num), (more, num_more) = one, other
    if isinstance(own, Tensor) and isinstance(more, Tensor):
        more = onto(more, own.device)
    return own + more, num + num_more


def checked_loss(value: object) -> Tensor:
    """Return the value as a tensor of one element.

    Raises:
        CallbackError: it is none; the cause is the TypeError or ValueError for the user.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    if not isinstance(value, Tensor):
        raise CallbackError from TypeError(
            f"watcher.loss() was given a {type(value).__name__}, but must get a tensor of one element, or a number"
        )
    if value.numel() != 1 or value.is_complex():
        raise CallbackError from ValueError(
            f"watcher.loss() takes a tensor of one real element, but got shape {[*value.shape]} of {value.dtype}; "
            "pass the tensor that backward() is called on"
        )
    return value
