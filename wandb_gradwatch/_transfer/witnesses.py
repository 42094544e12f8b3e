"""Witnesses: a few elements of every gradient and parameter, kept on the device from one measured sample to the next.

They tell in which direction a gradient turned and how far a parameter moved, without a copy of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from .._measure.columns import FloatArray
from .._measure.elements import all_readable, elements_of, wide_dtype

# P watched parameters, N of them written at once, K witnesses of each

MAX_WITNESSES: Final = 256  # of one parameter
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

    Example:
        >>> sums = np.array([[3.0], [9.0], [4.0], [1.0], [4.0], [2.0]])
        >>> facts_of(sums, np.array([8.0])).tolist()
        [[0.5, 0.5, 0.25]]
    """
    product, square, square_before, difference, weight, moved = sums_6P
    with np.errstate(all="ignore"):  # 0 / 0 where a gradient or a parameter is 0, and they may be infinite: missing
        cosine = np.clip(product / (np.sqrt(square) * np.sqrt(square_before)), -1.0, 1.0)
        facts = np.stack([cosine, np.sqrt(difference / weight), moved / num_P], axis=1)
    return np.where(np.isfinite(facts) & (num_P > 0)[:, None], facts, np.nan)


class Witnesses:
    """The witnesses of the open sample and of those before, on one device.

    A parameter without a gradient in a sample keeps the witnesses of its last sample with one.

    Args:
        index_of: returns ascending slots as an index on the device.
    """

    def __init__(self, num_names: int, index_of: Callable[[tuple[int, ...]], Tensor | slice]) -> None:
        self._index_of = index_of
        # [2, P, K]: of gradients and of parameters. The sizes [P] of the parameters tell whose they are; 0: of none.
        self._now: Tensor | None = None
        self._before: Tensor | None = None
        self._sizes = self._sizes_before = np.zeros(num_names, dtype=np.int64)
        self._paddings: dict[tuple[int, torch.dtype], Tensor] = {}

    def tensors(self) -> Iterator[Tensor]:
        """The tensors on the device."""
        return (one for one in (self._now, self._before, *self._paddings.values()) if one is not None)

    def grow(self, num_names: int) -> None:
        """Make room for new names. If fewer witnesses of each parameter are taken from now on, all are forgotten."""
        missing = num_names - len(self._sizes)
        if _num_witnesses(num_names) == _num_witnesses(len(self._sizes)):
            self._now, self._before = (
                None if one is None else pad(one, (0, 0, 0, missing)) for one in (self._now, self._before)
            )
            self._sizes, self._sizes_before = (np.pad(one, (0, missing)) for one in (self._sizes, self._sizes_before))
        else:
            self._now = self._before = None
            self._sizes = self._sizes_before = np.zeros(num_names, dtype=np.int64)

    @torch.no_grad()  # the user's mark_step() calls this
    def write(self, slots: Sequence[int], gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Take the witnesses of these gradients and parameters [N], ascending: the newest of the open sample.

        Cost: a view of each tensor, and one copy of all tensors of a dtype.
        """
        num, tensors = len(slots), [*gradients, *parameters]
        dtypes = [tensor.dtype for tensor in tensors]
        if dtypes.count(dtypes[0]) == 2 * num:  # the usual case
            self._put(slots, self._taken(tensors).view(2, num, -1))
        else:
            by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
            for place, kind in enumerate(zip(dtypes[:num], dtypes[num:], strict=True)):
                by_dtype.setdefault(kind, []).append(place)
            for places in by_dtype.values():
                some = [self._taken([of_kind[place] for place in places]) for of_kind in (gradients, parameters)]
                self._put([slots[place] for place in places], torch.stack(some))
        sizes = self._sizes.copy()
        sizes[list(slots)] = list(map(Tensor.numel, parameters))
        self._sizes = sizes

    def _put(self, slots: Sequence[int], taken: Tensor) -> None:
        """Write witnesses [2, N, K] of these ascending slots."""
        if len(slots) == len(self._sizes):
            self._now = taken
            return
        if self._now is None:
            self._now = taken.new_zeros(2, len(self._sizes), taken.shape[2])
        self._now[:, self._index_of(tuple(slots))] = taken

    def _taken(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy elements at a fixed stride of each tensor, followed by zeros if it has fewer: [N, K]."""
        most = _num_witnesses(len(self._sizes))
        if not all_readable(tensors, tensors[0].device.type if tensors[0].is_cuda else "cpu"):
            tensors = [_elements(tensor) for tensor in tensors]
        pieces = []
        for tensor, size in zip(tensors, map(Tensor.numel, tensors), strict=True):
            if size >= most:
                pieces.append(tensor.as_strided((most,), (size // most,)))
            else:
                pieces += (tensor.view(-1), self._padding(most - size, tensor))
        flat = torch.cat(pieces)
        return flat.to(wide_dtype(flat.device)).view(len(tensors), most)

    def _padding(self, size: int, like: Tensor) -> Tensor:
        kind = size, like.dtype
        if kind not in self._paddings:
            self._paddings[kind] = torch.zeros(size, dtype=like.dtype, device=like.device)
        return self._paddings[kind]

    def drop(self, slots: Sequence[int]) -> None:
        """Forget the open sample's witnesses of these parameters."""
        sizes = self._sizes.copy()
        sizes[list(slots)] = 0
        self._sizes = sizes

    def forget_sample(self) -> None:
        """Forget the open sample's witnesses."""
        self._sizes = np.zeros_like(self._sizes)

    def compare(self) -> Compared | None:
        """Compare the open sample with those before, which it becomes one of; None if there is nothing to compare."""
        now, before = self._now, self._before
        is_known_P = self._sizes > 0
        if now is None or not is_known_P.any():
            return None
        compared = None
        if before is not None:
            num_P = np.minimum(self._sizes, now.shape[2])
            is_same_P = is_known_P & (self._sizes == self._sizes_before)
            compared = Compared(_sums(now, before), np.where(is_same_P, num_P, np.nan))
        if before is None or is_known_P.all():
            self._before, self._now = now, None
        else:
            index = self._index_of(tuple(np.flatnonzero(is_known_P).tolist()))
            before[:, index] = now[:, index]
        self._sizes_before = np.where(is_known_P, self._sizes, self._sizes_before)
        self.forget_sample()
        return compared


def _elements(tensor: Tensor) -> Tensor:
    """Return a tensor's elements, contiguous; none of a sparse one, because to coalesce it the host would wait."""
    if tensor.layout is torch.strided:
        return elements_of(tensor)[0]
    return torch.zeros(0, dtype=tensor.dtype, device=tensor.device)


def _num_witnesses(num_names: int) -> int:
    return max(min(_MAX_ELEMENTS // max(num_names, 1), MAX_WITNESSES), _MIN_WITNESSES)


def _sums(now: Tensor, before: Tensor) -> Tensor:
    """Return the sums of `Compared`: [6, P]."""
    bits = torch.int64 if now.dtype is torch.float64 else torch.int32
    squares_before = before.square()
    terms = (
        *(now[0] * before[0], now[0].square(), squares_before[0]),
        *((now[1] - before[1]).square(), squares_before[1], (now[1].view(bits) != before[1].view(bits)).to(now.dtype)),
    )
    return torch.stack(terms).sum(dim=2)
