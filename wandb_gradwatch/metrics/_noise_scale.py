"""NoiseScale: how large the noise of a micro-batch's gradient is beside the gradient itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found, WatchedTensor
from .._measure.columns import FloatArray
from .._measure.elements import wide_dtype
from .._measure.probe_values import ArrivedSums, ProbeSums
from .._runtime.sharding import world_size
from ..snapshot import keys
from ..snapshot._shapes import GroupBy, group_function
from ._module_probe import ReadByProbe
from ._ranks import OwnGradientProbe
from ._rows import square_of, widened

# N parts of a step's batch: micro-batches, or ranks; W samples that an estimate is made of

TOTAL: Final = "total"  # the name of all groups together
_WINDOW: Final = 32
_LEAST: Final = 4  # samples for an interval
_STDS: Final = 1.96  # a normal distribution is within it in 95 % of the cases


class NoiseScale(OwnGradientProbe):
    """The gradient noise scale tr(S) / |G|^2 and the cosine between parts of a batch: micro-batches, or ranks.

    Logs `noise_scale/<group>/noise_scale` with its 95 % interval, `noise_scale_low` and `noise_scale_high`, and
    `.../cosine`, for each group of parameters and for "total". G is the true gradient, S the covariance of the gradient
    of one example (of one part, where `batch_size` is not given). A batch of the noise scale's size has as much
    noise as gradient. It is an observation and no advice: the batch that trains best is often another
    (arXiv 2411.00999, 2505.23971).

    Of the N parts of a step let small be the mean of their gradients' squared norms, and big the squared norm
    of their mean. Then |G|^2 is estimated by (N big - small) / (N - 1), and tr(S) of a part by
    (small - big) / (1 - 1/N) (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1). Both are unbiased and noisy, and
    are averaged over the last 32 samples before they are divided; the interval is Fieller's. Where the gradient cannot
    be told from 0 the interval is missing.

    In one process, and under FSDP2, the parts are the micro-batches of gradient accumulation; under FSDP2 a micro-batch
    is that of all ranks together, and the squares of shards are merged over the ranks when the window is flushed. A
    step of one backward has nothing to compare and is left out, which is said.

    Where ranks replicate the parameters the parts are the ranks, each with all its micro-batches: their gradients are
    seen inside the backward before DistributedDataParallel averages them, and the squares travel with the merge over
    ranks at a flush, for which every rank must call watch() with the same arguments; rules see the samples then, and
    not before. Gradients that the training averages after the backward itself are left out, which is said; so are
    replicated parameters beside sharded ones.

    Each part must weigh the same.

    Args:
        match: of which parameters: a regular expression (searched), several, or a function of the name; None: all.
        group_by: "module", "parameter", or a function from a parameter's name to that of its group.
        batch_size: the examples of a part, in whose number the noise scale is then told.

    Memory: a copy of the matching gradients from one micro-batch of a sampled step to the next. Cost: one pass over
    these for each micro-batch of a sampled step; the same with ranks.

    Raises:
        ValueError: match matches nothing (by watch()); batch_size is not positive.
    """

    logs = frozenset({(keys.NOISE_SCALE, "noise_scale")})

    def __init__(
        self, match: NameFilter | None = None, *, group_by: GroupBy = "module", batch_size: int | None = None
    ) -> None:
        super().__init__(match)
        self._group_of = group_function(group_by)
        if batch_size is not None and (isinstance(batch_size, bool) or not batch_size > 0):
            raise ValueError(
                f"NoiseScale(batch_size={batch_size!r}) must be the number of examples of a micro-batch, or of a rank"
            )
        self._batch_size = 1 if batch_size is None else batch_size
        self._windows: dict[str, deque[tuple[float, float]]] = {}  # on the host, by group: tr(S) and |G|^2

    def _forget(self) -> None:
        super()._forget()
        self._num_backwards = 0
        self._last: dict[str, Tensor] = {}  # the gradients that the last backward has left
        self._squares: dict[str, Tensor] = {}  # [2] by parameter: of all increments, and of their sum
        self._averaged: dict[str, Tensor] = {}  # by parameter that ranks replicate: the square of its gradient

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        if not self._is_due:
            return
        self._shards.look()
        super().gradients_ready(tensors)
        self._num_backwards += 1
        for tensor in tensors:
            gradient = tensor.gradient
            if gradient is None or gradient.layout is not torch.strided or not self._matches(tensor.name):
                continue
            if world_size() > 1 and self._shards.is_whole(tensor.name):
                self._averaged[tensor.name] = square_of(gradient)
                continue
            last, wide = self._last.get(tensor.name), wide_dtype(gradient.device)
            new = widened(gradient) if last is None else widened(gradient) - widened(last)
            of_new = new.square().sum(dtype=wide)
            of_all = of_new if last is None else self._squares[tensor.name][0] + of_new
            self._squares[tensor.name] = torch.stack([of_all, widened(gradient).square().sum(dtype=wide)])
            self._last[tensor.name] = gradient.clone()

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        self._last = {}  # no micro-batch follows

    def take(self) -> Mapping[str, Found]:
        num, squares, averaged = self._num_backwards, self._squares, self._averaged
        if averaged and not squares:
            return self._of_ranks(averaged)
        if averaged:
            self.say_once(
                "leaves out parameters that every rank has, beside sharded ones (%r among them).", next(iter(averaged))
            )
        if num == 1 and squares:
            self.say_once("needs steps of several micro-batches; one of a single backward has nothing to compare.")
        if num < 2:
            return {}
        meaning = ReadByProbe(2, of_every_rank=False, num_parts=num)  # squares of increments, and of their sum
        return {
            f"{keys.NOISE_SCALE}/{name}": ProbeSums(self.without_scale(name, of), meaning, name)
            for name, of in squares.items()
        }

    def _of_ranks(self, averaged: Mapping[str, Tensor]) -> Mapping[str, Found]:
        own, meaning = self.own_squares(), ReadByProbe(3, num_parts=world_size())
        if not own:  # of the first step of several backwards
            return {}
        found: dict[str, Found] = {}
        for name, square in averaged.items():  # the same on each rank: their sums are N times as large
            of_own = own.get(name, torch.zeros_like(square))
            sums = [of_own, self.without_scale(name, square), torch.ones_like(square)]
            found[f"{keys.NOISE_SCALE}/{name}"] = ProbeSums(torch.stack(sums), meaning, name)
        return found

    def derive(self, sums: Mapping[str, ArrivedSums]) -> Mapping[str, float]:
        of_groups: dict[str, FloatArray] = {}
        num, of_ranks = 0, False
        for one in sums.values():
            if isinstance(one.meaning, ReadByProbe) and one.parameter is not None and self._matches(one.parameter):
                num, parts = one.meaning.num_parts, np.asarray(one.sums[:2])
                if of_ranks := one.meaning.of_every_rank:
                    if one.sums[2] != num:  # not merged, or not a parameter of every rank
                        continue
                    parts = parts / (num**2, num)
                for group in (self._group_of(one.parameter), TOTAL):
                    of_groups[group] = of_groups.get(group, 0) + parts
        increments, whole = of_groups.get(TOTAL, (math.nan, math.nan))
        if of_ranks and math.isclose(whole, num * increments, rel_tol=1e-12):
            self.say_once("compares ranks within the backward; they are all alike, or averaged after it.")
            return {}
        found: dict[str, float] = {}
        for group, (of_increments, big) in of_groups.items():
            small = num * float(of_increments)  # a micro-batch's gradient is N of its increments to their mean
            window = self._windows.setdefault(group, deque(maxlen=_WINDOW))
            if math.isfinite(small) and math.isfinite(big):
                window.append(((small - big) * num / (num - 1), (num * big - small) / (num - 1)))
            found |= {f"{keys.NOISE_SCALE}/{group}/{name}": value for name, value in self._scale(window).items()}
            cosine = (big - of_increments) / of_increments / (num - 1) if of_increments > 0 else math.nan
            found[f"{keys.NOISE_SCALE}/{group}/cosine"] = float(cosine)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"windows": {group: [list(one) for one in window] for group, window in self._windows.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        windows = state["windows"].items()
        self._windows = {group: deque(((float(n), float(s)) for n, s in of), maxlen=_WINDOW) for group, of in windows}

    def _scale(self, window: Sequence[tuple[float, float]]) -> dict[str, float]:
        if not window:
            return {}
        noise_W, signal_W = np.array(window).T
        noise, signal = float(noise_W.mean()), float(signal_W.mean())
        found = {"noise_scale": self._batch_size * noise / signal if signal > 0 else math.nan}
        if len(window) < _LEAST:
            return found
        # The ratios r for which the mean of noise - r * signal may be 0: between the roots of a r^2 - 2 b r + c.
        noise_sq, both, both, signal_sq = (_STDS**2 * np.cov(noise_W, signal_W) / len(window)).ravel().tolist()
        a, b, c = signal**2 - signal_sq, noise * signal - both, noise**2 - noise_sq
        if a > 0 and signal > 0 and b * b >= a * c:
            root = math.sqrt(b * b - a * c)
            found["noise_scale_low"] = self._batch_size * max((b - root) / a, 0.0)
            found["noise_scale_high"] = self._batch_size * (b + root) / a
        return found
