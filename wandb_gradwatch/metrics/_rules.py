"""Rules for the numbers that probes measure. They are pure functions from snapshots to alerts."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Final

import numpy as np

from .._analysis.formatting import MAX_LAYERS, number
from .._measure.columns import FloatArray
from ..rules import Alert
from ..rules._base import FROM_0, FROM_1, Bounds, Level, ShippedRule, values_of
from ..snapshot import Snapshot, keys

# S samples in the window

POOLED: Final = "all_layers"  # in place of a router's name: the numbers over all routers


@dataclass(kw_only=True)
class _MetricRule(ShippedRule, ABC):
    """Checks each name of a metric separately at every sample, and reports all findings of a step in one alert.

    Samples that loss scaling skipped are ignored: an overflow there is part of the search for the scale. Texts may use
    the rule's limits, `first` (the first name), `told` (its finding) and `num` (of names); `item` is for one `name`.
    """

    title: ClassVar[str]
    metric: ClassVar[tuple[str, str]]  # the family and the metric's name in it
    fact: ClassVar[str]
    item: ClassVar[str]
    level: ClassVar[Level] = "WARN"
    _past: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # by name

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        series = self._series(snapshot)
        for sample, step in enumerate(snapshot.steps.tolist()):
            if snapshot.skipped[sample]:
                continue
            values = ((name, float(values_S[sample])) for name, values_S in series.items())
            judged = {name: self._judge(name, value, step) for name, value in values if value == value}
            if found := {name: told for name, told in judged.items() if told is not None}:
                yield self._alert(step, found)

    def _series(self, snapshot: Snapshot) -> Mapping[str, FloatArray]:
        """Return the values to check by name: [S]."""
        return _by_name(snapshot, *self.metric)

    @abstractmethod
    def _judge(self, name: str, value: float, step: int) -> Any:
        """Return the finding for this name at this step; None if the value is healthy."""

    def _alert(self, step: int, found: Mapping[str, Any]) -> Alert:
        first = next(iter(found))
        limits = {name: _said(getattr(self, name)) for name in self.bounds}
        said = {"num": len(found), "first": first, "told": _said(found[first])} | limits
        fact, cause, remedy = self._fact(found, said), self.cause.format(**said), self.remedy.format(**said)
        names = [self.item.format(name=name, told=_said(found[name])) for name in islice(found, MAX_LAYERS)]
        return self._finding(step, fact, layers=names, level=self.level, cause=cause, remedy=remedy)

    def _fact(self, found: Mapping[str, Any], said: Mapping[str, Any]) -> str:
        return self.fact.format(**said)


def _by_name(snapshot: Snapshot, family: str, metric: str) -> dict[str, FloatArray]:
    """Return a metric's values by name: [S]."""
    split = ((keys.split_metric(key), values_S) for key, values_S in snapshot.metrics.items())
    return {parts[1]: values_S for parts, values_S in split if parts and parts[::2] == (family, metric)}


def _said(told: Any) -> Any:
    if isinstance(told, tuple):
        return tuple(map(_said, told))
    return number(told) if isinstance(told, float) else told


@dataclass(kw_only=True)
class NonFiniteActivation(_MetricRule):
    """The alert "Non-finite activation": a module output has NaN or Inf elements. Names the first in the forward."""

    title = "Non-finite activation"
    cause_name = "invalid_operation"
    advice = "Look at this module's inputs"
    fact = (
        "the output of {first} was the first of the forward that is not finite, with {told} elements; of all "
        "outputs of modules {num} are not finite (threshold: 0)."
    )
    item = "{name} ({told} non-finite)"
    cause = "an input, a parameter or an operation of {first}: an overflow, 0/0, or the log or root of 0"
    remedy = (
        "look at the inputs and parameters of {first} at this step, add an epsilon to logs, roots and "
        "divisions, or use bfloat16 in place of float16"
    )
    level = "ERROR"

    def _series(self, snapshot: Snapshot) -> Mapping[str, FloatArray]:
        named = ((keys.nonfinite_output(key), counts_S) for key, counts_S in snapshot.metrics.items())
        return {name: counts_S for name, counts_S in named if name is not None}

    def _judge(self, name: str, value: float, step: int) -> int | None:
        return int(value) if value > 0 else None


@dataclass(kw_only=True)
class OutgrownUpdate(_MetricRule):
    """The alert "Update outgrows": a gradient is far larger than the optimizer's second moment assumes.

    The update divides by the size of past gradients. A gradient that returns after a quiet time therefore moves its
    parameter too far, and the loss may spike 1 to 8 steps later (Wortsman et al. 2023, arXiv 2304.13013, with a mark of
    2.3). The ratio must also be far above its own level in this run, because noisy gradients always exceed 1 somewhat.

    Args:
        threshold: the stale ratio above which to alert: the rms of g / sqrt(v), with v from before the step.
        factor: the ratio must also exceed this multiple of the parameter's largest ratio of the last 32 samples,
            because the ratio of a scalar parameter varies like the magnitude of a single Gaussian.
        patience: the number of samples of a parameter before it is checked.
    """

    threshold: float = 2.3
    factor: float = 3.0
    patience: int = 10

    title = "Update outgrows"
    cause_name = "optimizer_settings"
    advice = "Lower beta2, or clip"
    metric = (keys.OPTIMIZER_STATE, keys.STALE)
    bounds: ClassVar[Bounds] = {"threshold": FROM_0, "factor": FROM_1, "patience": (1.0, 32.0)}
    fact = (
        "in {num} of the parameters the gradient is more than {threshold} times as large as the optimizer's second "
        "moment says, so that their update is that much too large."
    )
    item = "{name} ({told} times)"
    cause = "gradients that come back after a quiet time, with a second moment that has decayed meanwhile"
    remedy = (
        "lower beta2 (0.95), clip the gradients or the update (StableAdamW), or lower the learning rate; the "
        "loss may spike within the next 8 steps"
    )

    def _judge(self, name: str, value: float, step: int) -> float | None:
        past = self._past.get(name, [])
        if value == np.inf:
            return None
        self._past[name] = [*past, value][-32:]
        is_known = len(past) >= self.patience
        return value if is_known and value > max(self.threshold, self.factor * max(past)) else None

    def _alert(self, step: int, found: Mapping[str, float]) -> Alert:
        return super()._alert(step, dict(sorted(found.items(), key=lambda one: -one[1])))  # largest first


class _LargestOfHeads(_MetricRule):
    """Checks the largest value over the heads of each attention module."""

    def _series(self, snapshot: Snapshot) -> Mapping[str, FloatArray]:
        heads: dict[str, list[FloatArray]] = {}
        for name, values_S in super()._series(snapshot).items():
            heads.setdefault(name.split("/")[0], []).append(values_S)
        return {module: np.fmax.reduce(of_module) for module, of_module in heads.items()}


@dataclass(kw_only=True)
class EntropyCollapse(_LargestOfHeads):
    """The alert "Attention entropy collapse": every head of an attention attends to one position only.

    One such head is healthy (it may copy the previous token). All heads of a layer, for several samples in a row and
    after a sample with more entropy, indicate logits that grow without bound.

    Args:
        threshold: a head attends to one position if entropy / largest possible entropy is below this.
        patience: the number of samples in a row.
    """

    threshold: float = 0.02
    patience: int = 5

    title = "Attention entropy collapse"
    cause_name = "attention_logits"
    advice = "Normalise queries and keys"
    metric = (keys.ATTENTION, "entropy_ratio")
    bounds: ClassVar[Bounds] = {"threshold": (0.0, 1.0), "patience": FROM_1}
    fact = (
        "in {num} of the attention modules no head has had more than {threshold} of the possible entropy for "
        "{patience} samples: each position attends to one position only."
    )
    item = "{name} (at most {told})"
    cause = "query and key weights that grow, at too high a learning rate or without warm-up"
    remedy = "normalise queries and keys, lower the learning rate or warm up for longer, decay their weights"

    def _judge(self, name: str, value: float, step: int) -> float | None:
        if value >= self.threshold:
            self._past[name] = 0
        elif name in self._past:  # the entropy was above the threshold before
            self._past[name] += 1
        return value if self._past.get(name, 0) >= self.patience else None


@dataclass(kw_only=True)
class DeadExperts(_MetricRule):
    """The alert "Dead experts": an expert of a mixture gets no token for many samples in a row.

    It needs the loads of single experts, which `Router` logs for up to 2,000 experts over all layers.

    Args:
        patience: the number of samples in a row.
    """

    patience: int = 10

    title = "Dead experts"
    cause_name = "routing"
    advice = "Add a balancing loss or noise"
    metric = (keys.ROUTER, keys.LOAD_RATIO)
    bounds: ClassVar[Bounds] = {"patience": FROM_1}
    fact = "{num} of the routers sent no token to some experts for {patience} samples."
    item = "{name} ({told})"
    cause = "a router that sends ever more tokens to the experts that are already trained best"
    remedy = "raise the weight of the load-balancing loss, add noise to the router's logits, or lower its learning rate"

    def _series(self, snapshot: Snapshot) -> Mapping[str, FloatArray]:
        return {name: load_S for name, load_S in super()._series(snapshot).items() if not name.startswith(POOLED)}

    def _judge(self, name: str, value: float, step: int) -> bool | None:
        self._past[name] = 0 if value else self._past.get(name, 0) + 1
        return self._past[name] >= self.patience or None

    def _alert(self, step: int, found: Mapping[str, Any]) -> Alert:
        of_router = Counter(name.rpartition("/")[0] for name in found)
        return super()._alert(step, {name: f"{num} expert{'s' * (num > 1)}" for name, num in of_router.items()})


@dataclass(kw_only=True)
class GrowingLogits(_LargestOfHeads):
    """The alert "Attention logits grow": the largest logit of an attention grows towards a limit.

    From a tenth of the limit on, a straight line through the logarithm of the module's largest logit over the last 32
    samples is extrapolated. The alert is raised at the limit, or if the line crosses it within 4 times their span.

    Args:
        limit: the limit of a logit. Softmax over logits that differ by 100 selects a single position, and half
            precision has no fractional digits left there.
        patience: the number of samples before the first extrapolation.
    """

    limit: float = 100.0
    patience: int = 16

    title = "Attention logits grow"
    cause_name = "attention_logits"
    advice = "Normalise queries and keys"
    metric = (keys.ATTENTION, keys.LOGIT_MAX)
    bounds: ClassVar[Bounds] = {"limit": FROM_1, "patience": (8.0, 32.0)}
    item = "{name} {told[0]} (step {told[1]})"
    cause = "query and key weights that grow, at too high a learning rate"
    remedy = "normalise queries and keys, add a z-loss, lower the learning rate of these weights or decay them"

    def _judge(self, name: str, value: float, step: int) -> tuple[float, int] | None:
        if not 0 < value < np.inf:
            return None
        past = self._past[name] = [*self._past.get(name, []), [step, value]][-32:]
        crossed = self._crossed_at(past)
        return None if crossed is None else (value, crossed)

    def _crossed_at(self, past: list[list[float]]) -> int | None:
        """Return the step at which the limit is or will be crossed; None if no crossing is expected."""
        step, largest = past[-1]
        if largest >= self.limit:
            return int(step)
        if len(past) < self.patience or largest < self.limit / 10:
            return None
        steps, logits = np.array(past, dtype=np.float64).T
        stretch = step - steps[0]
        (slope, fitted), covariance = np.polyfit(steps - step, np.log(logits), 1, cov=True)
        # Growth by at least half a doubling over the samples, with a t-value that noise alone does not reach.
        if slope <= 8 * np.sqrt(covariance[0, 0]) or slope * stretch < np.log(1.4):
            return None
        crossed = step + (np.log(self.limit) - fitted) / slope
        return round(crossed) if crossed <= step + 4 * stretch else None

    def _fact(self, found: Mapping[str, tuple[float, int]], said: Mapping[str, Any]) -> str:
        first = min(found, key=lambda name: found[name][1])
        (largest, crossed), limit = found[first], said["limit"]
        fact = f"the largest attention logit of {first} is {number(largest)}"
        if largest >= self.limit:
            return f"{fact}, above the limit of {limit}."
        return f"{fact}; at its growth over the last samples it crosses {limit} at about step {crossed}."


@dataclass(kw_only=True)
class SlowRank(ShippedRule):
    """The alert "Slow rank": the same rank needs the longest for its own work in every sample. Names the rank.

    Args:
        factor: the rank's time must exceed this multiple of the median of the ranks.
        least: the rank's time must exceed the median by this many seconds as well.
        patience: the number of samples in a row.
    """

    factor: float = 1.5
    least: float = 0.01
    patience: int = 8
    _last: float = field(default=-1.0, init=False, repr=False)  # the slowest rank of the last sample
    _in_a_row: int = field(default=0, init=False, repr=False)

    title = "Slow rank"
    cause_name = "bad_rank"
    advice = "Compare its data loader and host"
    cause = "data that this rank loads more slowly, other work on its host, or a host or device that is slower"
    remedy = "compare what its data loader and its host do with those of another rank"
    bounds: ClassVar[Bounds] = {"factor": FROM_1, "least": FROM_0, "patience": FROM_1}

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        names = (f"highest/{keys.SECONDS}_rank", f"highest/{keys.SECONDS}", f"median/{keys.SECONDS}")
        columns = (values_of(snapshot, f"{keys.RANKS}/{name}") for name in names)
        for step, rank, slowest, median in zip(snapshot.steps.tolist(), *columns, strict=True):
            if rank != rank:
                continue
            is_late = slowest > max(self.factor * median, median + self.least)
            self._in_a_row = (self._in_a_row + 1 if rank == self._last else 1) if is_late else 0
            self._last = rank
            if self._in_a_row >= self.patience:
                fact = (
                    f"rank {int(rank)} has needed more than {number(self.factor)} times as long as the "
                    f"median rank for {self.patience} samples, now {number(slowest)} s and not {number(median)} s, and "
                    "the others wait for it."
                )
                yield self._finding(step, fact)
