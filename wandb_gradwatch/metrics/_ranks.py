"""Ranks: compares the ranks of one training. NoiseScale: the noise of a micro-batch's or a rank's gradient."""

import hashlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from .._arguments import check, is_number, is_whole
from .._capture.parameter_registry import NameFilter
from .._capture.probes import Found, WatchedTensor
from .._measure.columns import FloatArray, IntArray
from .._measure.elements import bits_of, onto, wide_dtype
from .._measure.probe_values import ArrivedSums, ProbeSums
from .._runtime.sharding import world_size
from ..snapshot import keys
from ..snapshot._shapes import GroupBy, group_function
from ._module_probe import Layout, OwnGradientProbe, ReadByProbe
from ._rows import reals, square_of
from ._rules import SlowRank

# R ranks, F fields of each; N parts of a step's batch: micro-batches, or ranks; W samples of an estimate

_FIELDS: Final = ("is_there", "square", "loss", "seconds", "checksum", "layout", "own_sum", "averaged_sum")
_UNSEEN: Final = -1.0  # instead of a square: this rank has no gradient of its own
_MAX_RANK_KEYS: Final = 64  # with more ranks only the lowest, the median and the highest are logged
_ROUNDING: Final = 1e-3  # largest error of the averaged gradient's sum, as a share of the gradients' norm
_MODULUS: Final = 2**48  # of checksums: exact in float64, and a flip of any of 32 bits changes the result


class Ranks(OwnGradientProbe):
    """Compares the ranks of one training. Logs `ranks/rank_<n>/...`, `ranks/lowest/...`, `.../median/...` and
    `.../highest/...`, and the extreme ranks as `ranks/lowest/<number>_rank` and `ranks/highest/<number>_rank`.

    - `local_norm`: the norm of the rank's own gradient before DistributedDataParallel averages it, accumulated over
      micro-batches, without the loss scale. Not for sharded parameters, of which no rank has its own gradient.
    - `loss`: the rank's own loss.
    - `seconds`: host time from the end of the previous update to the last gradient of the rank's own backward. It
      excludes the backward's wait for other ranks, but includes waits in the forward, such as for broadcast buffers.
      Missing with sharded parameters, for which every layer waits.
    - `apart`: 1 if the rank's parameters differ from those of most ranks, by a checksum of their bits before the
      update; `ranks/all/apart` is the number of such ranks. Ranks of HSDP that hold the same shards are compared; the
      shards of FSDP alone have no replicas.
    - `ranks/all/average_error`: the difference of the sum over the averaged gradient and of the mean of the ranks' own
      sums, as a share of the gradients' norm: 0 but for rounding. If it is what one rank has contributed, that rank is
      `ranks/all/lost_rank`.

    With more than 64 ranks, single ranks are logged only if they are apart. If the gradient is not finite on some ranks
    only, the alert names the first of them. Every rank must call watch() with the same arguments: the numbers travel
    with the merge over ranks at a flush, when the rules check them. A single process logs nothing.

    Args:
        match: choose parameters by name: a regular expression (searched), several, or a function. None: all.
        checksum_every: compare checksums at every n-th sampled step; 0: never, for replicas that differ on purpose.

    Memory, and cost at a sampled step: two passes over each gradient inside the backward, and one after it; if steps
    have several backwards, two more passes and two copies of the gradients. A checksum takes one pass over the
    parameters. A flush sends 64 bytes per rank and sample.

    Raises:
        ValueError: checksum_every is negative; watch() raises it if match matches nothing.
    """

    logs, brings = frozenset({(keys.RANKS, keys.APART)}), (SlowRank,)
    may_be_several = False  # the keys are those of the ranks, whatever match= chooses

    def __init__(self, match: NameFilter | None = None, *, checksum_every: int = 10) -> None:
        super().__init__(match)
        is_cadence = is_whole(checksum_every) and checksum_every >= 0
        what = "a number of sampled steps, 0 for never"
        check(is_cadence, "Ranks(): checksum_every", checksum_every, what)
        self._checksum_every = checksum_every
        self._num_due = 0
        self._clock = time.perf_counter
        self._updated_at: float | None = None  # the end of an update in the open sample

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._began = self._clock() if self._updated_at is None else self._updated_at
        self._updated_at, self._waited, self._seconds = None, 0.0, math.nan
        self._loss: Tensor | None = None
        self._checksums: list[Tensor] = []
        self._own_sums: dict[str, Tensor] = {}
        self._averaged_sums: dict[str, Tensor] = {}
        self._layout: list[object] = []  # describes the parameters in the checksum
        self._is_checked = self._checksum_every > 0 and self._num_due % self._checksum_every == 0
        self._num_due += next_step_is_due

    def gradient_arrived(self, name: str, gradient: Tensor) -> None:
        super().gradient_arrived(name, gradient)
        if self._match.chooses(name):
            self._seconds = self._clock() - self._began - self._waited

    def own_known(self, name: str, own: Tensor) -> None:
        self._own_sums[name] = _sum_of(own)

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        super().gradients_ready(tensors)
        for tensor in tensors:
            if tensor.name in self._own_sums and tensor.gradient is not None:
                self._averaged_sums[tensor.name] = _sum_of(tensor.gradient)
        self._waited = self._clock() - self._began - self._seconds

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        if not (self._is_checked and self.needs_ranks):
            return
        for tensor in tensors:
            layout = Layout.of(tensor)
            has_replicas = layout.num_replicas > 1 if layout else tensor.is_whole
            if has_replicas and self._match.chooses(tensor.name) and tensor.parameter.numel():
                self._checksums.append(bits_of(tensor.parameter))
                self._layout.append((tensor.name, tuple(tensor.parameter.shape), str(tensor.parameter.dtype), layout))

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        self._updated_at = self._clock()

    def loss_known(self, loss: Tensor) -> None:
        self._loss = loss

    def take(self) -> Mapping[str, Found]:
        if not self.needs_ranks:
            return {}
        squares = list(self.own_squares().values())
        known = (one.device for one in (*squares, *self._checksums, self._loss) if one is not None)
        device = next(known, torch.device("cpu"))
        square: Tensor | float = torch.stack([onto(one, device) for one in squares]).sum() if squares else _UNSEEN
        checksum: Tensor | float = math.nan
        layout, loss = math.nan, math.nan if self._loss is None else onto(self._loss, device)
        if self._checksums:
            checksum = torch.stack([onto(one, device) for one in self._checksums]).sum() % _MODULUS
            digest = hashlib.sha256(repr(sorted(map(repr, self._layout))).encode()).digest()
            layout = float(int.from_bytes(digest[:6], "big"))
        own_F = torch.zeros(len(_FIELDS), dtype=wide_dtype(device), device=device)
        own_sum, averaged_sum = self._total(self._own_sums, device), self._total(self._averaged_sums, device)
        if not squares or self._own_sums.keys() != self._averaged_sums.keys():
            own_sum = averaged_sum = math.nan
        fields = (1.0, square, loss, self._seconds, checksum, layout, own_sum, averaged_sum)
        for place, value in enumerate(fields):
            own_F[place] = value
        return {keys.RANKS: ProbeSums(own_F, ReadByProbe(len(_FIELDS), side_by_side=True))}

    def _total(self, sums: Mapping[str, Tensor], device: torch.device) -> Tensor | float:
        """The sum over parameters, without the loss scale."""
        if not sums:
            return math.nan
        return torch.stack([onto(self.without_scale(name, one, power=1), device) for name, one in sums.items()]).sum()

    def derive(self, sums: Mapping[str, ArrivedSums]) -> Mapping[str, float]:
        of_ranks = np.reshape(sums[keys.RANKS].sums if keys.RANKS in sums else (), (-1, len(_FIELDS)))
        ranks_R = np.flatnonzero(of_ranks[:, _FIELDS.index("is_there")] == 1)
        if len(ranks_R) < 2:  # the windows of the other ranks have not been merged
            return {}
        of = {name: of_ranks[ranks_R, place] for place, name in enumerate(_FIELDS)}
        own_R = of["square"] != _UNSEEN
        squares_R = of["square"][own_R]
        norms_R = np.sqrt(np.where(squares_R >= 0, squares_R, np.nan))
        found = _apart(ranks_R, of["checksum"], of["layout"]) | _compared("local_norm", ranks_R[own_R], norms_R)
        for name in ("loss", keys.SECONDS):
            found |= _compared(name, ranks_R, of[name])
        not_finite = ranks_R[own_R][~np.isfinite(squares_R)]
        if 0 < len(not_finite) < len(squares_R):
            found[keys.FIRST_NONFINITE_RANK] = float(not_finite[0])
        return found | _averaged(ranks_R, of["own_sum"], of["averaged_sum"], norms_R)


def _sum_of(gradient: Tensor) -> Tensor:
    """The sum over the elements, or over their real and imaginary parts."""
    return reals(gradient).sum(dtype=wide_dtype(gradient.device))


def _averaged(ranks_R: IntArray, own_R: FloatArray, averaged_R: FloatArray, norms_R: FloatArray) -> dict[str, float]:
    """Compare the sum over the averaged gradient with the mean of the ranks' own sums, to which it is equal.

    The error is a share of the gradients' norm. If it is what one rank has contributed, that rank is `lost_rank`.
    """
    unit = float(np.sqrt(np.mean(norms_R**2))) if len(norms_R) == len(ranks_R) else math.nan
    averaged = float(np.median(averaged_R))
    is_averaged = float(np.ptp(averaged_R)) <= _ROUNDING * unit  # False if any of them is not known
    if not is_averaged or not np.isfinite(own_R).all():
        return {}
    error = abs(averaged - float(own_R.mean())) / unit
    found = {f"{keys.RANKS}/all/{keys.AVERAGE_ERROR}": error}
    without_R = np.abs(averaged - (own_R.sum() - own_R) / len(own_R)) / unit
    if error > _ROUNDING and without_R.min() < min(_ROUNDING, error / 10):
        found[f"{keys.RANKS}/all/{keys.LOST_RANK}"] = float(ranks_R[without_R.argmin()])
    return found


def _compared(name: str, ranks_R: IntArray, values_R: FloatArray) -> dict[str, float]:
    """Return the extremes and the median of the finite values, and the rank of each extreme."""
    num = len(values_R)
    ranks_R, values_R = ranks_R[np.isfinite(values_R)], values_R[np.isfinite(values_R)]
    if len(values_R) < 2:
        return {}
    order = np.argsort(values_R, kind="stable")
    found = {f"{keys.RANKS}/median/{name}": float(values_R[order[(len(order) - 1) // 2]])}  # the lower of two
    for what, place in (("lowest", order[0]), ("highest", order[-1])):
        rank_of = {f"{keys.RANKS}/{what}/{name}_rank": float(ranks_R[place])}
        found |= {f"{keys.RANKS}/{what}/{name}": float(values_R[place])} | rank_of
    if num <= _MAX_RANK_KEYS:
        found |= {
            f"{keys.RANKS}/rank_{place}/{name}": value
            for place, value in zip(ranks_R.tolist(), values_R.tolist(), strict=True)
        }
    return found


def _apart(ranks_R: IntArray, checksums_R: FloatArray, layouts_R: FloatArray) -> dict[str, float]:
    """Compare checksums among ranks whose parameters have the same names and shapes; 1 for ranks in a minority."""
    known_R = np.isfinite(checksums_R)
    if not known_R.any():
        return {}
    apart_R = np.zeros(len(ranks_R), dtype=bool)
    for layout in np.unique(layouts_R[known_R]):
        own_R = known_R & (layouts_R == layout)
        values, votes = np.unique(checksums_R[own_R], return_counts=True)
        has_majority = np.count_nonzero(votes == votes.max()) == 1
        apart_R |= own_R & ~(has_majority & (checksums_R == values[votes.argmax()]))
    shown_R = known_R & (apart_R | (len(ranks_R) <= _MAX_RANK_KEYS))
    found = {
        f"{keys.RANKS}/rank_{place}/{keys.APART}": float(is_apart)
        for place, is_apart in zip(ranks_R[shown_R].tolist(), apart_R[shown_R].tolist(), strict=True)
    }
    return found | {f"{keys.RANKS}/all/{keys.APART}": float(np.count_nonzero(apart_R))}


TOTAL: Final = "total"  # the name of all groups together
_WINDOW: Final = 32
_LEAST: Final = 4  # samples needed for an interval
_STDS: Final = 1.96  # 95 % of a normal distribution lie within this many standard deviations


class NoiseScale(OwnGradientProbe):
    """The gradient noise scale tr(S) / |G|^2 and the cosine between parts of a batch: micro-batches, or ranks.

    Logs `noise_scale/<group>/noise_scale` with its 95 % interval, `noise_scale_low` and `noise_scale_high`, and
    `.../cosine`, for each group of parameters and for "total". G is the true gradient, S the covariance of the gradient
    of one example (of one part, without `batch_size`). A batch as large as the noise scale has as much noise as
    gradient; the batch size that trains best often differs (arXiv 2411.00999, 2505.23971).

    For the N parts of a step, which must have equal weights, let small be the mean of their gradients' squared norms,
    and big the squared norm of their mean. Then |G|^2 is estimated by (N big - small) / (N - 1), and tr(S) of a part by
    (small - big) / (1 - 1/N) (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1). Both estimates are unbiased and
    noisy; they are averaged over the last 32 samples before the division. The interval is Fieller's; it is missing if
    the gradient cannot be distinguished from 0.

    In one process and under FSDP2 the parts are the micro-batches of gradient accumulation; under FSDP2 those of all
    ranks together, whose squares are merged at a flush. A step with a single backward is left out.

    If ranks replicate the parameters, the parts are the ranks, each with all its micro-batches; their gradients are
    read inside the backward, before DistributedDataParallel averages them. Every rank must call watch() with the same
    arguments: the squares travel with the merge over ranks at a flush, when the rules check them. Gradients that the
    training averages itself after the backward, and replicated parameters beside sharded ones, are left out. A message
    says once what is left out.

    Args:
        match: choose parameters by name: a regular expression (searched), several, or a function. None: all.
        group_by: "module", "parameter", or a function from a parameter's name to a group's name.
        batch_size: the number of examples in a part; the noise scale is then logged as a number of examples.

    Memory: a copy of the matching gradients from one micro-batch of a sampled step to the next. Cost: one pass over
    these gradients for each micro-batch of a sampled step; the same with ranks.

    Raises:
        ValueError: batch_size is not positive; watch() raises it if match matches nothing.
    """

    logs = frozenset({(keys.NOISE_SCALE, "noise_scale")})
    may_be_several = False  # both would log under "total"

    def __init__(
        self, match: NameFilter | None = None, *, group_by: GroupBy = "module", batch_size: int | None = None
    ) -> None:
        super().__init__(match)
        self._group_of = group_function(group_by)
        is_count = batch_size is None or (is_number(batch_size) and 0 < batch_size < math.inf)
        what = "the number of examples of a micro-batch, or of a rank; or None"
        check(is_count, "NoiseScale(): batch_size", batch_size, what)
        self._batch_size = 1 if batch_size is None else batch_size
        self._windows: dict[str, deque[tuple[float, float]]] = {}  # by group: estimates of tr(S) and |G|^2

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        super().start(next_step_is_due, histogram_is_due)
        self._num_backwards = 0
        self._last: dict[str, Tensor] = {}  # the gradients after the last backward
        self._squares: dict[str, Tensor] = {}  # [2] by parameter: squares of the increments, summed; of their sum
        self._averaged: dict[str, Tensor] = {}  # by replicated parameter: the square of its averaged gradient

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        super().gradients_ready(tensors)
        self._num_backwards += 1
        for tensor in tensors:
            gradient = tensor.gradient
            if gradient is None or gradient.layout is not torch.strided or not self._match.chooses(tensor.name):
                continue
            if world_size() > 1 and tensor.is_whole:
                self._averaged[tensor.name] = square_of(gradient)
                continue
            last, wide = self._last.get(tensor.name), wide_dtype(gradient.device)
            now = reals(gradient)
            of_new = (now if last is None else now - reals(last)).square().sum(dtype=wide)
            of_all = of_new if last is None else self._squares[tensor.name][0] + of_new
            self._squares[tensor.name] = torch.stack([of_all, now.square().sum(dtype=wide)])
            self._last[tensor.name] = gradient.clone()

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        self._last = {}  # this was the last micro-batch

    def take(self) -> Mapping[str, Found]:
        num, squares, averaged = self._num_backwards, self._squares, self._averaged
        if averaged and not squares:
            return self._of_ranks(averaged)
        if averaged:
            self.say_once(
                "leaves out parameters that are replicated, beside sharded ones (%r among them).", next(iter(averaged))
            )
        if num == 1 and squares:
            self.say_once("needs steps of several micro-batches; a step with a single backward is left out.")
        if num < 2:
            return {}
        meaning = ReadByProbe(2, of_every_rank=False, num_parts=num)  # squares of the increments; of their sum
        return {
            f"{keys.NOISE_SCALE}/{name}": ProbeSums(self.without_scale(name, of), meaning, name)
            for name, of in squares.items()
        }

    def _of_ranks(self, averaged: Mapping[str, Tensor]) -> Mapping[str, Found]:
        own, meaning = self.own_squares(), ReadByProbe(3, num_parts=world_size())
        if not own:  # the first step with several backwards, which has no copies
            return {}
        found: dict[str, Found] = {}
        for name, square in averaged.items():  # equal on all ranks, so that the merged sums are N times as large
            of_own = own.get(name, torch.zeros_like(square))
            sums = [of_own, self.without_scale(name, square), torch.ones_like(square)]
            found[f"{keys.NOISE_SCALE}/{name}"] = ProbeSums(torch.stack(sums), meaning, name)
        return found

    def derive(self, sums: Mapping[str, ArrivedSums]) -> Mapping[str, float]:
        of_groups: dict[str, FloatArray] = {}
        num, of_ranks = 0, False
        for one in sums.values():
            if isinstance(one.meaning, ReadByProbe) and one.parameter is not None:
                num, parts = one.meaning.num_parts, np.asarray(one.sums[:2])
                if of_ranks := one.meaning.of_every_rank:
                    if one.sums[2] != num:  # not merged, or not on every rank
                        continue
                    parts = parts / (num**2, num)
                for group in (self._group_of(one.parameter), TOTAL):
                    of_groups[group] = of_groups.get(group, 0) + parts
        increments, whole = of_groups.get(TOTAL, (math.nan, math.nan))
        if of_ranks and math.isclose(whole, num * increments, rel_tol=1e-12):
            self.say_once("compares gradients inside the backward; on all ranks they are equal, or averaged later.")
            return {}
        found: dict[str, float] = {}
        for group, (of_increments, big) in of_groups.items():
            small = num * float(of_increments)  # a micro-batch's gradient is N times its share of the mean
            window = self._windows.setdefault(group, deque(maxlen=_WINDOW))
            if math.isfinite(small) and math.isfinite(big):
                window.append(((small - big) * num / (num - 1), (num * big - small) / (num - 1)))
            cosine = (big - of_increments) / of_increments / (num - 1) if of_increments > 0 else math.nan
            numbers = self._scale(window) | {"cosine": float(cosine)}
            found |= {f"{keys.NOISE_SCALE}/{group}/{name}": value for name, value in numbers.items()}
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
        # Fieller: the mean of noise - r * signal may be 0 for ratios r between the roots of a r^2 - 2 b r + c.
        noise_sq, both, both, signal_sq = (_STDS**2 * np.cov(noise_W, signal_W) / len(window)).ravel().tolist()
        a, b, c = signal**2 - signal_sq, noise * signal - both, noise**2 - noise_sq
        if a > 0 and signal > 0 and b * b >= a * c:
            root = math.sqrt(b * b - a * c)
            found["noise_scale_low"] = self._batch_size * max((b - root) / a, 0.0)
            found["noise_scale_high"] = self._batch_size * (b + root) / a
        return found
