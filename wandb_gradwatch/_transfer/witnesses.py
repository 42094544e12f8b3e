"""Witnesses: a few elements of every gradient and parameter, kept on the device from one measured sample to the next.

They tell in which direction a gradient turned and how far a parameter moved, without a copy of either.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .._measure import cpu_compiled, generic
from .._measure.columns import FloatArray, IntArray
from .._measure.elements import MAX_WITNESSES, all_readable, elements_of
from .._measure.measure import take_witnesses

# P watched parameters, N of them written at once, K witnesses of each

_MIN_WITNESSES: Final = 16
_MAX_ELEMENTS: Final = 2**18  # of all parameters, 4 MB with their gradients: the more parameters, the fewer of each


class Compared(NamedTuple):
    """Sums over the witnesses of two samples, and the number of witnesses."""

    # [6, P] on the device: of the gradient times the one before, the squares of both, of the parameter's difference and
    # of the parameter before; and the number of the parameter's witnesses whose bits have changed
    sums: Tensor
    num: FloatArray  # [P]; NaN where one of the samples has none


def facts_of(sums_6P: FloatArray, num_P: FloatArray) -> FloatArray:
    """Return grad_cosine, weight_change and weight_moved from arrived sums: [P, 3]; NaN is missing.

    Examples:
        >>> sums = np.array([[3.0], [9.0], [4.0], [1.0], [4.0], [2.0]])
        >>> facts_of(sums, np.array([8.0])).tolist()
        [[0.5, 0.5, 0.25]]
    """
    facts: FloatArray = np.empty((len(num_P), 3))
    with np.errstate(all="ignore"):  # 0 / 0 where a gradient or a parameter is 0, and they may be infinite: missing
        roots = np.sqrt(sums_6P[1:5])
        cosine = sums_6P[0] / (roots[0] * roots[1])
        np.minimum(np.maximum(cosine, -1.0), 1.0, out=facts[:, 0])
        np.divide(roots[2], roots[3], out=facts[:, 1])
        np.divide(sums_6P[5], num_P, out=facts[:, 2])
        if not math.isfinite(np.add.reduce(facts, axis=None)):
            facts[~np.isfinite(facts + num_P[:, None])] = np.nan
    return facts


class Witnesses(ABC):
    """The witnesses of the open sample and of those before, on one device.

    A parameter without a gradient in a sample keeps the witnesses of its last sample with one.
    """

    def __init__(self, num_names: int) -> None:
        # The sizes [P] of the parameters tell whose witnesses there are; 0: there are none.
        self._sizes: IntArray = np.zeros(num_names, dtype=np.int64)
        self._sizes_before = self._sizes.copy()
        self._num_before: FloatArray = np.zeros(num_names)  # of witnesses
        self._is_empty = True  # the open sample has no witnesses

    @property
    def _most(self) -> int:
        """The number of witnesses of each parameter, K, if it has so many elements."""
        return _num_witnesses(len(self._sizes))

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """The tensors on the device."""

    def grow(self, num_names: int) -> None:
        """Make room for new names. If fewer witnesses of each parameter are taken from now on, all are forgotten."""
        missing = num_names - len(self._sizes)
        if _num_witnesses(num_names) == self._most:
            self._pad(missing)
            of_sizes = self._sizes, self._sizes_before
            self._sizes, self._sizes_before = (np.pad(one, (0, missing)) for one in of_sizes)
        else:
            self._forget()
            self._sizes, self._sizes_before = (np.zeros(num_names, dtype=np.int64) for _ in range(2))
        self._num_before = np.minimum(self._sizes_before, self._most).astype(np.float64)

    @torch.no_grad()  # the user's mark_step() calls this
    def write(self, slots: Sequence[int], gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Take the witnesses of these gradients and parameters [N], ascending: the newest of the open sample."""
        sizes, self._is_empty = self._take(slots, gradients, parameters), False
        if len(slots) == len(self._sizes):
            self._sizes = sizes
        else:
            self._sizes[list(slots)] = sizes

    def drop(self, slots: Sequence[int]) -> None:
        """Forget the open sample's witnesses of these parameters."""
        self._sizes[list(slots)] = 0

    def forget_sample(self) -> None:
        """Forget the open sample's witnesses."""
        if not self._is_empty:
            self._sizes, self._is_empty = np.zeros(len(self._sizes), dtype=np.int64), True

    def compare(self) -> Compared | None:
        """Compare the open sample with those before, which it becomes one of; None if there is nothing to compare."""
        if self._is_empty:
            return None
        sizes, before = self._sizes, self._sizes_before
        num_known, num_same = np.count_nonzero(sizes), np.count_nonzero(sizes == before)
        if not num_known:
            return None
        has_all = num_known == len(sizes)
        if has_all and num_same == num_known:  # the usual case
            compared = Compared(self._sums(), self._num_before)
        elif before.any():
            is_same_P = (sizes == before) & (sizes > 0)
            compared = Compared(self._sums(), np.where(is_same_P, np.minimum(sizes, self._most), np.nan))
        else:
            compared = None
        self._keep(None if has_all else tuple(np.flatnonzero(sizes).tolist()))
        if num_same < len(sizes):
            self._sizes_before = np.where(sizes > 0, sizes, before)
            self._num_before = np.minimum(self._sizes_before, self._most).astype(np.float64)
        self.forget_sample()
        return compared

    @abstractmethod
    def _take(self, slots: Sequence[int], gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> IntArray:
        """Take witnesses, and return the sizes of the parameters: [N]."""

    @abstractmethod
    def _sums(self) -> Tensor:
        """Return the sums of `Compared`."""

    @abstractmethod
    def _keep(self, slots: tuple[int, ...] | None) -> None:
        """Keep the open sample's witnesses of these parameters, or of all, as those of the sample before."""

    @abstractmethod
    def _pad(self, missing: int) -> None:
        """Make room for so many more names."""

    @abstractmethod
    def _forget(self) -> None:
        """Forget the witnesses of all samples."""


class HostWitnesses(Witnesses):
    """Witnesses on the CPU, which are compared as soon as they are taken, in one pass.

    Cost: one call of a compiled loop (`cpu_loops.py`); without one, a view of each tensor and some ten calls of numpy.
    """

    def __init__(self, num_names: int) -> None:
        super().__init__(num_names)
        self._kept: list[FloatArray] = []  # of the open sample and of those before: [2, P, K] each
        self._compared: FloatArray | None = None  # the sums of the open sample: [6, P]

    def tensors(self) -> Iterator[Tensor]:
        return iter(())  # no stream has to wait for any

    def forget_sample(self) -> None:
        super().forget_sample()
        self._compared = None

    def _take(self, slots: Sequence[int], gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> IntArray:
        num_names, tensors = len(self._sizes), [*gradients, *parameters]
        if not self._kept:
            self._kept = [np.zeros((2, num_names, self._most)) for _ in range(2)]
        if self._compared is None:  # in new memory, because a transfer still uses the old
            self._compared = np.empty((6, num_names))
        if not all_readable(tensors, "cpu"):
            tensors = list(map(_elements, tensors))
        now, before = self._kept
        slots_N: IntArray = np.arange(num_names) if len(slots) == num_names else np.array(slots, dtype=np.int64)
        if (loops := cpu_compiled.LOOPS.made) is not None:
            return cpu_compiled.take_witnesses(loops, tensors, slots_N, now, before, self._compared)
        num = len(slots)
        now[:, slots_N] = generic.take_witnesses(tensors[:num], tensors[num:], self._most).numpy()
        self._compared[:, slots_N] = _sums_on_host(now[:, slots_N], before[:, slots_N])
        return np.array(list(map(Tensor.numel, parameters)), dtype=np.int64)

    def _sums(self) -> Tensor:
        assert self._compared is not None  # something was taken
        return torch.from_numpy(self._compared)

    def _keep(self, slots: tuple[int, ...] | None) -> None:
        if slots is None:
            self._kept.reverse()
        else:
            now, before = self._kept
            before[:, slots] = now[:, slots]

    def _pad(self, missing: int) -> None:
        self._kept = [np.pad(one, ((0, 0), (0, missing), (0, 0))) for one in self._kept]
        if self._compared is not None:
            self._compared = np.pad(self._compared, ((0, 0), (0, missing)))

    def _forget(self) -> None:
        self._kept, self._compared = [], None


class DeviceWitnesses(Witnesses):
    """Witnesses on another device than the CPU, which are compared when the sample is complete: launches cost most.

    Cost: one launch to take them with Triton, otherwise a view of each tensor; and some ten launches to compare them.

    Args:
        index_of: returns ascending slots as an index on the device.
    """

    def __init__(self, num_names: int, index_of: Callable[[tuple[int, ...]], Tensor | slice]) -> None:
        super().__init__(num_names)
        self._index_of = index_of
        self._now: Tensor | None = None  # of gradients and of parameters: [2, P, K]
        self._before: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        return (one for one in (self._now, self._before) if one is not None)

    def _take(self, slots: Sequence[int], gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> IntArray:
        num, tensors = len(slots), [*gradients, *parameters]
        sizes: IntArray = np.array(list(map(Tensor.numel, parameters)), dtype=np.int64)
        if not all_readable(tensors, "cuda"):
            tensors = list(map(_elements, tensors))
        self._put(slots, take_witnesses(tensors[:num], tensors[num:], self._most))
        return sizes

    def _put(self, slots: Sequence[int], taken: Tensor) -> None:
        """Write witnesses [2, N, K] of these ascending slots."""
        if len(slots) == len(self._sizes):
            self._now = taken
            return
        if self._now is None:
            self._now = taken.new_zeros(2, len(self._sizes), taken.shape[2])
        self._now[:, self._index_of(tuple(slots))] = taken

    def _sums(self) -> Tensor:
        now, before = self._now, self._before
        assert now is not None
        assert before is not None
        bits = torch.int64 if now.dtype is torch.float64 else torch.int32
        squares_before = before.square()
        terms = (
            *(now[0] * before[0], now[0].square(), squares_before[0]),
            *(
                (now[1] - before[1]).square(),
                squares_before[1],
                (now[1].view(bits) != before[1].view(bits)).to(now.dtype),
            ),
        )
        return torch.stack(terms).sum(dim=2)

    def _keep(self, slots: tuple[int, ...] | None) -> None:
        if slots is None or self._before is None:
            self._before, self._now = self._now, None
        elif self._now is not None:
            index = self._index_of(slots)
            self._before[:, index] = self._now[:, index]

    def _pad(self, missing: int) -> None:
        self._now, self._before = (
            None if one is None else pad(one, (0, 0, 0, missing)) for one in (self._now, self._before)
        )

    def _forget(self) -> None:
        self._now = self._before = None


def _elements(tensor: Tensor) -> Tensor:
    """Return a tensor's elements, contiguous; none of a sparse one, because to coalesce it the host would wait."""
    if tensor.layout is torch.strided:
        return elements_of(tensor)[0]
    return torch.zeros(0, dtype=torch.float32, device=tensor.device)


def _num_witnesses(num_names: int) -> int:
    return max(min(_MAX_ELEMENTS // max(num_names, 1), MAX_WITNESSES), _MIN_WITNESSES)


def _sums_on_host(now: FloatArray, before: FloatArray) -> FloatArray:
    """Return the sums of `Compared` of some parameters: [6, N]."""
    sums: FloatArray = np.empty((6, now.shape[1]))
    with np.errstate(all="ignore"):  # of infinite parameters the difference is missing
        difference = now[1] - before[1]
    np.einsum("pk,pk->p", now[0], before[0], out=sums[0])
    np.einsum("pk,pk->p", now[0], now[0], out=sums[1])
    np.einsum("apk,apk->ap", before, before, out=sums[2:5:2])
    np.einsum("pk,pk->p", difference, difference, out=sums[3])
    sums[5] = np.count_nonzero(now[1].view(np.int64) != before[1].view(np.int64), axis=1)
    return sums
