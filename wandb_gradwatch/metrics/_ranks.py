"""Ranks: what each rank has of its own, its gradient, loss, time and replica of the parameters, side by side.

And the probe below it, of the gradients that a rank computes itself, before those of the others are averaged into them.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found, WatchedTensor
from .._measure.elements import onto, wide_dtype
from .._measure.probe_values import ArrivedSums, ProbeSums
from .._runtime.sharding import rank, world_size
from ..snapshot import keys
from ._module_probe import ParameterProbe, ReadByProbe, dense
from ._rows import square_of, widened
from ._rules import RanksDisagree, SlowRank

# R ranks, F fields of each

_FIELDS: Final = ("is_there", "square", "loss", "seconds", "checksum", "layout")
_UNSEEN: Final = -1.0  # in place of a square: there is no gradient of the rank's own
_MAX_RANK_KEYS: Final = 64  # with more ranks only the lowest, the median and the highest are told
_MODULUS: Final = 2**48  # of checksums: exact in float64, and no flipped bit of 32 is lost


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
        self._forget()

    def _forget(self) -> None:
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
        self._forget()
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


class Ranks(OwnGradientProbe):
    """Compares the ranks of one training: logged as `ranks/rank_<n>/...`, `ranks/lowest/...`, `.../median/...` and
    `.../highest/...`, with the rank as `ranks/highest/<number>_rank`.

    - `local_norm`: the norm of the rank's own gradient, before DistributedDataParallel averages it, accumulated over
      micro-batches, without the loss scale. Not of sharded parameters, whose ranks never have a gradient of their own.
    - `loss`: the rank's own.
    - `seconds`: from the end of the update before to the last gradient of the rank's own backward, on the host, without
      what the backward then waits for other ranks. What a forward waits for, such as buffers that are broadcast, is in
      it. With sharded parameters every layer waits, and there is none.
    - `apart`: 1 where the rank's replica of the parameters differs from that of most ranks, by a checksum of their bits
      before the update, and `ranks/all/apart`, how many do. Of HSDP, whose shards lie on several ranks each, those that
      hold the same shards are compared; the shards of FSDP alone have no replica, and there is nothing to compare.

    With more than 64 ranks single ones are told only where they are apart. A gradient that is not finite on some ranks
    only names the first of these in the alert. The numbers travel with the merge over ranks at a flush, for which every
    rank must call watch() with the same arguments; rules see the samples then, and not before. In a single process
    there is nothing to compare, and nothing is logged.

    Args:
        match: of which parameters: a regular expression (searched), several, or a function of the name; None: all.
        checksum_every: every n-th sampled step has a checksum; 0: none, for replicas that are meant to differ.

    Memory: two copies of the gradients during a sampled step, where steps have several backwards; else a few numbers.
    Cost: at a sampled step one pass over each gradient inside the backward, and two more where steps have several
        backwards; one pass over the parameters for a checksum. At a flush 48 bytes a rank and sample.

    Raises:
        ValueError: match matches nothing (by watch()); checksum_every is negative.
    """

    logs, brings = frozenset({(keys.RANKS, keys.APART)}), (RanksDisagree, SlowRank)

    def __init__(self, match: NameFilter | None = None, *, checksum_every: int = 10) -> None:
        super().__init__(match)
        if isinstance(checksum_every, bool) or not isinstance(checksum_every, int) or checksum_every < 0:
            raise ValueError(f"Ranks(checksum_every={checksum_every!r}) must be a number of sampled steps, 0 for never")
        self._checksum_every = checksum_every
        self._num_due = 0
        self._clock = time.perf_counter
        self._began = self._clock()

    def _forget(self) -> None:
        super()._forget()
        self._has_updated, self._waited, self._seconds = False, 0.0, math.nan
        self._loss: Tensor | None = None
        self._checksums: list[Tensor] = []
        self._layout: list[object] = []  # of what has a checksum

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        if not self._has_updated:  # otherwise the step before was a sample, and its update's end is known
            self._began = self._clock()
        super().start(next_step_is_due and self.needs_ranks, histogram_is_due)
        self._is_checked = self._is_due and self._checksum_every > 0 and self._num_due % self._checksum_every == 0
        self._num_due += self._is_due

    def gradient_arrived(self, name: str, gradient: Tensor) -> None:
        super().gradient_arrived(name, gradient)
        if self._is_due and self._matches(name) and self._shards.is_whole(name):
            self._seconds = self._clock() - self._began - self._waited

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        super().gradients_ready(tensors)
        if self._is_due:
            self._waited = self._clock() - self._began - self._seconds

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_checked:
            return
        self._shards.look()
        for tensor in tensors:
            layout = self._shards.layouts.get(tensor.name)
            has_replicas = layout.num_replicas > 1 if layout else self._shards.is_whole(tensor.name)
            if has_replicas and self._matches(tensor.name) and tensor.parameter.numel():
                self._checksums.append(_bits(tensor.parameter))
                self._layout.append((tensor.name, tuple(tensor.parameter.shape), str(tensor.parameter.dtype), layout))

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        self._has_updated, self._began = True, self._clock()

    def loss_known(self, loss: Tensor) -> None:
        self._loss = loss

    def take(self) -> Mapping[str, Found]:
        if not self._is_due:
            return {}
        squares = list(self.own_squares().values())
        known = (one.device for one in (*squares, self._loss, *self._checksums) if one is not None)
        device = next(known, torch.device("cpu"))

        def number(value: float | Tensor | None) -> Tensor:
            if isinstance(value, Tensor):
                return onto(value, device).to(wide_dtype(device)).reshape(())
            return torch.full((), math.nan if value is None else value, dtype=wide_dtype(device), device=device)

        square = torch.stack([onto(one, device) for one in squares]).sum() if squares else _UNSEEN
        checksum, layout = None, math.nan
        if self._checksums:
            checksum = torch.stack([onto(one, device) for one in self._checksums]).sum() % _MODULUS
            digest = hashlib.sha256(repr(sorted(map(repr, self._layout))).encode()).digest()
            layout = float(int.from_bytes(digest[:6], "big"))
        fields_F = torch.stack(list(map(number, (1.0, square, self._loss, self._seconds, checksum, layout))))
        all_RF = torch.zeros(world_size(), len(_FIELDS), dtype=fields_F.dtype, device=device)
        all_RF[rank()] = fields_F
        return {keys.RANKS: ProbeSums(all_RF.flatten(), ReadByProbe(all_RF.numel()))}

    def derive(self, sums: Mapping[str, ArrivedSums]) -> Mapping[str, float]:
        one = sums.get(keys.RANKS)
        if one is None:
            return {}
        all_RF = np.array(one.sums).reshape(-1, len(_FIELDS))
        there = {place: dict(zip(_FIELDS, of, strict=True)) for place, of in enumerate(all_RF.tolist()) if of[0] == 1}
        if len(there) < 2:  # the others' have not been merged
            return {}
        square = {place: of["square"] for place, of in there.items() if of["square"] != _UNSEEN}
        found = _apart(there) | _compared("local_norm", {r: math.sqrt(sq) for r, sq in square.items() if sq >= 0})
        for name in ("loss", keys.SECONDS):
            found |= _compared(name, {place: of[name] for place, of in there.items()})
        not_finite = [place for place, sq in square.items() if not math.isfinite(sq)]
        if 0 < len(not_finite) < len(square):
            found[keys.FIRST_NONFINITE_RANK] = float(not_finite[0])
        return found


def _bits(parameter: Tensor) -> Tensor:
    """The sum of a tensor's bits, as integers of 32 of them: the same for the same bits, whatever the order."""
    kind = {1: torch.int8, 2: torch.int16}.get(parameter.element_size(), torch.int32)
    return parameter.reshape(-1).view(kind).sum(dtype=torch.int64)


def _compared(name: str, of_ranks: Mapping[int, float]) -> dict[str, float]:
    """The extremes and the median of what is finite, and the rank of each extreme."""
    finite = {place: value for place, value in of_ranks.items() if math.isfinite(value)}
    if len(finite) < 2:
        return {}
    found = {f"{keys.RANKS}/median/{name}": statistics.median_low(finite.values())}
    by_value = sorted(finite, key=finite.__getitem__)
    for what, place in (("lowest", by_value[0]), ("highest", by_value[-1])):
        found |= {f"{keys.RANKS}/{what}/{name}": finite[place], f"{keys.RANKS}/{what}/{name}_rank": float(place)}
    if len(of_ranks) <= _MAX_RANK_KEYS:
        found |= {f"{keys.RANKS}/rank_{place}/{name}": value for place, value in finite.items()}
    return found


def _apart(there: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Which ranks have another checksum than most that hold parameters of the same names and shapes."""
    groups: dict[float, dict[int, float]] = {}
    for place, of in there.items():
        if math.isfinite(of["checksum"]):
            groups.setdefault(of["layout"], {})[place] = of["checksum"]
    apart: dict[int, float] = {}
    for group in groups.values():
        (most, votes), *others = Counter(group.values()).most_common(2)
        no_majority = bool(others) and others[0][1] == votes
        apart |= {place: float(no_majority or checksum != most) for place, checksum in group.items()}
    if not apart:
        return {}
    shown = {place: is_apart for place, is_apart in apart.items() if is_apart or len(there) <= _MAX_RANK_KEYS}
    found = {f"{keys.RANKS}/rank_{place}/{keys.APART}": is_apart for place, is_apart in shown.items()}
    return found | {f"{keys.RANKS}/all/{keys.APART}": sum(apart.values())}
