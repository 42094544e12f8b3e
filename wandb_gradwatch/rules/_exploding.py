"""Exploding gradients: beyond any reason, beyond what was usual, or growing step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from .._analysis.baseline import Limit, limit_of, steady_growth
from .._analysis.formatting import listing, number, sentence, worst_first
from .._analysis.memory import Kinds, PerName
from ..snapshot import Snapshot
from ._base import Alert, check_limits

# S samples, P watched parameters

_USUAL_WEIGHT = 0.1  # of the newest healthy sample in a parameter's usual log norm


@dataclass
class _Past:
    """The total log norms of one kind of sample, newest last."""

    healthy: list[float] = field(default_factory=list)  # that raised no alarm: what is usual is learned from these
    all: list[float] = field(default_factory=list)
    num_alarmed: int = 0  # in a row, up to now

    def see(self, log_norm: float, *, window: int) -> None:
        """The newest norm, before it is judged."""
        self.all = [*self.all[-(window - 1) :], log_norm]

    def learn(self, *, alarmed: bool, window: int, adapt_after: int) -> None:
        """It has been judged."""
        if not alarmed:
            self.num_alarmed = 0
            self.healthy = [*self.healthy[-(window - 1) :], self.all[-1]]
            return
        self.num_alarmed += 1
        if self.num_alarmed >= adapt_after:
            self.healthy, self.num_alarmed = self.all[-adapt_after:], 0


@dataclass(kw_only=True)
class ExplodingGradient:
    """The total gradient norm is too large, by one of three measures: "Exploding gradient".

    Judged by the norm before clipping. A sample with NaN or Inf, one that AMP skipped and one without gradients is
    not judged and not learned from; neither is one that raised an alarm, so a spike hides no second one.

    Args:
        threshold: too large whatever came before; None switches this measure off. A fixed "critical" norm of 100, as is
            often read, calls every loss healthy or sick by its reduction: a loss summed over 500,000 tokens has healthy
            norms above 1e6. The default is beyond any of these; what is unusual for this run the other measures see.
        stds: standard deviations of the log norm above its mean that are too many; None switches this measure off. For
            few samples as many as are equally unlikely by Student's distribution.
        min_factor: a norm below this multiple of the usual one is no explosion, however quiet the run was.
        record_factor: nor is one below this multiple of the second largest of the last 16 healthy ones: losses that few
            elements of a batch decide have norms with tails that no deviation describes. None: it does not matter.
        warmup: healthy samples before the second measure knows a deviation.
        warmup_factor: until then, a norm above this multiple of the largest so far is too large: 100 times too high a
            learning rate shows at the second step.
        window: healthy samples that count as usual; their last quarter is a second view, which follows a trend.
        growth: too much as a steady rise over 5 to 64 samples; None switches this measure off.
        adapt_after: alarms in a row after which the new level is taken for the usual one.
    """

    threshold: float | None = 1e8
    stds: float | None = 3.5
    min_factor: float = 5.0
    record_factor: float | None = 3.0
    warmup: int = 5
    warmup_factor: float = 1000.0
    window: int = 64
    growth: float | None = 20.0
    adapt_after: int = 20
    _kinds: Kinds = field(default_factory=Kinds, init=False, repr=False)
    _pasts: dict[int, _Past] = field(default_factory=dict, init=False, repr=False)
    _usual: PerName = field(default_factory=lambda: PerName(math.nan), init=False, repr=False)

    title: ClassVar[str] = "Exploding gradient"

    def __post_init__(self) -> None:
        from_1 = (1.0, math.inf)
        check_limits(self, "threshold", "stds", threshold=(0.0, math.inf), stds=(0.0, math.inf))
        check_limits(self, min_factor=from_1, warmup_factor=from_1, window=from_1, warmup=from_1, adapt_after=from_1)
        check_limits(self, "record_factor", "growth", record_factor=from_1, growth=from_1)
        if not 2 <= self.warmup <= self.window:
            raise ValueError(f"warmup={self.warmup!r} must be between 2 and window={self.window!r}")

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        judged_S = (np.nansum(snapshot.num_nonfinite, axis=1) == 0) & ~snapshot.skipped & (snapshot.total_grad_norm > 0)
        healthy: list[int] = []  # whose layers are not learnt yet
        for sample in np.flatnonzero(judged_S).tolist():
            fact = self._judge(snapshot, sample)
            if fact is None:
                healthy.append(sample)
            else:
                self._learn_layers(snapshot, healthy)
                healthy = []
                yield self._alert(snapshot, sample, fact)
        self._learn_layers(snapshot, healthy)

    def limit(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_]) -> float:
        """The largest total norm of the gradients of these parameters that is no explosion now, growth apart.

        What `check` calls an explosion by its first two measures is above it, and nothing else.
        """
        past = self._past(names, present_P)
        limit = math.inf if self.threshold is None else self.threshold
        if self.stds is None or not past.healthy:
            return limit
        if len(past.healthy) < self.warmup:
            return min(limit, self.warmup_factor * math.exp(max(past.healthy)))
        views = self._views(past)
        return min(limit, *(self._limit_of(view, self.stds).value for view in views))

    def learn(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_], norm: float, *, alarmed: bool) -> None:
        """Remember a total norm above 0 that someone else has judged, by `limit`."""
        past = self._past(names, present_P)
        past.see(_log(norm), window=self.window)
        past.learn(alarmed=alarmed, window=self.window, adapt_after=self.adapt_after)

    def _judge(self, snapshot: Snapshot, sample: int) -> str | None:
        """What is wrong with the total norm, in words, or None; the past learns from it either way."""
        past = self._past(snapshot.names, ~np.isnan(snapshot.num_elements[sample]))
        norm = float(snapshot.total_grad_norm[sample])
        past.see(_log(norm), window=self.window)
        fact = self._too_large(norm) or self._unusual(norm, past) or self._growing(norm, past)
        past.learn(alarmed=fact is not None, window=self.window, adapt_after=self.adapt_after)
        return fact

    def _past(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_]) -> _Past:
        return self._pasts.setdefault(self._kinds.of(names, present_P), _Past())

    def _views(self, past: _Past) -> tuple[list[float], ...]:
        """What counts as usual: all of the past, and its last part."""
        recent = past.healthy[-max(self.window // 4, self.warmup) :]
        return (past.healthy, recent) if len(recent) < len(past.healthy) else (recent,)

    def _too_large(self, norm: float) -> str | None:
        if self.threshold is None or norm <= self.threshold:
            return None
        return f"the gradient norm is {number(norm)}, above the threshold {number(self.threshold)}"

    def _unusual(self, norm: float, past: _Past) -> str | None:
        if self.stds is None or not past.healthy:
            return None
        if len(past.healthy) < self.warmup:
            return self._unusual_in_warmup(norm, math.exp(max(past.healthy)))
        for view in self._views(past):
            if math.log(norm) <= min(view) + math.log(self.min_factor):  # nearly always, and no deviation changes it
                continue
            limit = self._limit_of(view, self.stds)
            if norm > limit.value:
                record = (
                    ""
                    if self.record_factor is None
                    else f" and {number(self.record_factor)} times the second largest of the last 16"
                )
                return (
                    f"the gradient norm is {number(norm)}, {number(norm / limit.usual)} times the usual "
                    f"{number(limit.usual)} of {limit.num_samples} healthy samples "
                    f"(threshold {number(limit.value)}: mean + {number(self.stds)} standard deviations of the log "
                    f"norm, at least {number(self.min_factor)} times{record})"
                )
        return None

    def _limit_of(self, view: list[float], stds: float) -> Limit:
        return limit_of(view, stds=stds, min_factor=self.min_factor, record_factor=self.record_factor)

    def _unusual_in_warmup(self, norm: float, largest: float) -> str | None:
        if norm <= self.warmup_factor * largest:
            return None
        return (
            f"the gradient norm is {number(norm)}, {number(norm / largest)} times the largest norm so far "
            f"(threshold {number(self.warmup_factor)} times, in the first {self.warmup} healthy samples)"
        )

    def _growing(self, norm: float, past: _Past) -> str | None:
        rise = None if self.growth is None else steady_growth(past.all, factor=self.growth)
        if rise is None or self.growth is None:
            return None
        return (
            f"the gradient norm is {number(norm)} and has grown {number(rise.factor)} times over the last "
            f"{rise.num_samples} samples, step by step (threshold {number(self.growth)} times)"
        )

    def _learn_layers(self, snapshot: Snapshot, samples: list[int]) -> None:
        """Follow each layer's log norm with a moving average."""
        usual_P, norm_SP = self._usual.of(snapshot.names), snapshot.grad_norm[samples]
        seen_SP = norm_SP > 0
        log_SP = np.log(norm_SP, where=seen_SP, out=np.zeros_like(norm_SP))
        for log_P, seen_P in zip(log_SP, seen_SP, strict=True):
            known_P = np.where(np.isnan(usual_P), log_P, usual_P)
            np.copyto(usual_P, known_P + _USUAL_WEIGHT * (log_P - known_P), where=seen_P)

    def _alert(self, snapshot: Snapshot, sample: int, fact: str) -> Alert:
        norm_P, usual_P = snapshot.grad_norm[sample], np.exp(self._usual.of(snapshot.names))
        worst = worst_first(norm_P, np.flatnonzero(norm_P > 0))
        layers = listing(
            worst,
            lambda p: (
                f"{snapshot.names[p]} {number(norm_P[p])}"
                + (f" (usually {number(usual_P[p])})" if np.isfinite(usual_P[p]) else "")
            ),
        )
        step = int(snapshot.steps[sample])
        cause = "too high a learning rate, a bad batch, or growth through depth or recurrence without clipping"
        remedy = (
            "clip with clip_grad_norm_, lower the learning rate or lengthen its warm-up, look at the batch of this step"
        )
        return Alert(self.title, sentence(f"Step {step}: {fact}.", layers, cause, remedy), step, "ERROR")

    def state_dict(self) -> dict[str, Any]:
        return {
            "kinds": self._kinds.state_dict(),
            "pasts": [
                {"kind": kind, "healthy": past.healthy, "all": past.all, "num_alarmed": past.num_alarmed}
                for kind, past in self._pasts.items()
            ],
            "usual": self._usual.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kinds.load_state_dict(state["kinds"])
        self._usual.load_state_dict(state["usual"])
        self._pasts = {
            int(past["kind"]): _Past(list(past["healthy"]), list(past["all"]), int(past["num_alarmed"]))
            for past in state["pasts"]
        }


def _log(norm: float) -> float:
    return math.log(norm) if norm < math.inf else 1e3
