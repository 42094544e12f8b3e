"""The loss, as it is handed over: it stays on its device, and is logged with the sample that it belongs to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._measure.elements import onto, wide_dtype
from .._runtime.sharding import local_part
from ..snapshot import keys

Number = float | Tensor  # one that the host has, or that a device has: 0-dim


class SampleLoss:
    """The mean of the values that were handed over for the open sample; without any, the sum of the backwards' roots.

    A value is pending until a backward has ended or an optimizer steps: the sample before may still be open when it is
    handed over. Of the values only their sum is kept, and how many of them are whole losses.
    """

    def __init__(self) -> None:
        self._pending: tuple[Number, int] | None = None
        self._sample: tuple[Number, int] | None = None
        self._seen: Number | None = None  # the sum of what the sample's backwards were called on
        self._assumed: Tensor | None = None  # what that was divided by, where it is not known who steps

    def see(self, root: Tensor, scale: Tensor | None, is_assumed: bool) -> None:
        """A backward of the open sample was called on this tensor of one element, a loss multiplied with the scale.

        That is assumed of the scaler that was used last, until the first step shows whose it is. A loss in host memory
        whose scale is on a device stays unknown: the host would have to wait for the scale.
        """
        one = _value_of(root)
        if scale is not None:
            if not isinstance(one, Tensor) and scale.device.type != "cpu":
                return
            one = _divided(one, scale)
            self._assumed = scale.clone() if is_assumed else None
        self._seen = one if self._seen is None else _sum(self._seen, one)

    def add(self, value: Tensor, *, is_share: bool) -> None:
        """Take a value of one element; shares add up to the loss of the step."""
        self._pending = _together(self._pending, (_value_of(value), 0 if is_share else 1))

    def no_scaler_steps(self, scale_by_hand: Callable[[torch.device], Tensor | None]) -> None:
        """What was assumed of one is undone; the scale that the user has named counts, if there is one."""
        if self._assumed is not None and self._seen is not None:
            seen, assumed = self._seen, self._assumed
            self._seen = seen * (onto(assumed, seen.device) if isinstance(seen, Tensor) else _value_of(assumed))
            if (scale := scale_by_hand(self._assumed.device)) is not None:
                self._seen = _divided(self._seen, scale)
        self._assumed = None

    def settle(self) -> None:
        """What is pending belongs to the open sample."""
        if self._pending is not None:
            self._sample, self._pending = _together(self._sample, self._pending), None

    def take(self) -> dict[str, Number]:
        """The loss of the sample; forgets it."""
        found, seen = self._sample, self._seen
        self.forget()
        loss = seen if found is None else found[0] / max(found[1], 1)
        return {} if loss is None else {keys.LOSS: loss}

    def forget(self) -> None:
        """The sample has closed; what is pending is of the next one."""
        self._sample = self._seen = self._assumed = None


def _value_of(tensor: Tensor) -> Number:
    """The one element now, as the caller may go on with the tensor in place.

    On a device a copy; in host memory it is read where it lies, without any of torch's ways to wait for a value.
    """
    one = local_part(tensor).detach()
    if not one.is_cpu:
        return one.reshape(()).to(wide_dtype(one.device), copy=True)
    return float((one.double() if one.dtype.itemsize < 4 else one).numpy().item())  # numpy has no bfloat16


def _divided(one: Number, scale: Tensor) -> Number:
    """A tensor's division, where Python's own would raise at 0."""
    return one / onto(scale, one.device) if isinstance(one, Tensor) else _value_of(one / scale.double())


def _sum(one: Number, other: Number) -> Number:
    return one + (onto(other, one.device) if isinstance(one, Tensor) and isinstance(other, Tensor) else other)


def _together(one: tuple[Number, int] | None, other: tuple[Number, int]) -> tuple[Number, int]:
    return other if one is None else (_sum(one[0], other[0]), one[1] + other[1])


def checked_loss(value: object) -> Tensor:
    """The value as a tensor of one element.

    Raises:
        TypeError: it is neither a tensor nor a number.
        ValueError: it has not exactly one real element.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return torch.tensor(float(value), dtype=torch.float64, device="cpu")
    if not isinstance(value, Tensor):
        raise TypeError(f"watcher.loss({value!r}) must be a tensor of one element, or a number")
    if value.numel() != 1 or value.is_complex():
        raise ValueError(
            f"watcher.loss() takes a tensor of one real element, but got shape {[*value.shape]} of {value.dtype}; "
            "pass what backward() is called on"
        )
    return value
