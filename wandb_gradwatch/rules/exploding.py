"""Exploding gradients: beyond any reason, beyond what was usual, or growing step by step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ..snapshot import Snapshot
from .base import Alert
from .baseline import limit_of, steady_growth
from .memory import Kinds, PerName
from .words import number, sentence, worst_first

# S samples, P watched parameters

_USUAL_WEIGHT = 0.1  # of the newest healthy sample in a parameter's usual log norm


@dataclass
class _Past:
    """The total log norms of one kind of sample, newest last."""

    healthy: list[float] = field(default_factory=list)  # that raised no alarm: what is usual is learned from these
    all: list[float] = field(default_factory=list)
    num_alarmed: int = 0  # in a row, up to now


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
        if not 2 <= self.warmup <= self.window:
            raise ValueError(f"warmup={self.warmup!r} must be between 2 and window={self.window!r}")
        if self.min_factor < 1:
            raise ValueError(f"min_factor={self.min_factor!r} must be at least 1")

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        judged_S = (np.nansum(snapshot.num_nonfinite, axis=1) == 0) & ~snapshot.skipped & (snapshot.total_grad_norm > 0)
        for sample in np.flatnonzero(judged_S):
            fact = self._judge(snapshot, int(sample))
            if fact is not None:
                yield self._alert(snapshot, int(sample), fact)

    def _judge(self, snapshot: Snapshot, sample: int) -> str | None:
        """What is wrong with the total norm, in words, or None; the past learns from it either way."""
        present_P = ~np.isnan(snapshot.num_elements[sample])
        past = self._pasts.setdefault(self._kinds.of(snapshot.names, present_P), _Past())
        norm = float(snapshot.total_grad_norm[sample])
        log_norm = math.log(norm) if norm < math.inf else 1e3
        past.all = [*past.all[-(self.window - 1) :], log_norm]
        fact = self._too_large(norm) or self._unusual(norm, past) or self._growing(norm, past)
        if fact is None:
            past.num_alarmed = 0
            past.healthy = [*past.healthy[-(self.window - 1) :], log_norm]
            self._learn_layers(snapshot, sample)
            return None
        past.num_alarmed += 1
        if past.num_alarmed >= self.adapt_after:
            past.healthy, past.num_alarmed = past.all[-self.adapt_after :], 0
        return fact

    def _too_large(self, norm: float) -> str | None:
        if self.threshold is None or norm <= self.threshold:
            return None
        return f"the gradient norm is {number(norm)}, above the threshold {number(self.threshold)}"

    def _unusual(self, norm: float, past: _Past) -> str | None:
        if self.stds is None or not past.healthy:
            return None
        if len(past.healthy) < self.warmup:
            return self._unusual_in_warmup(norm, math.exp(max(past.healthy)))
        recent = past.healthy[-max(self.window // 4, self.warmup) :]
        views = (past.healthy, recent) if len(recent) < len(past.healthy) else (recent,)
        for view in views:
            if math.log(norm) <= min(view) + math.log(self.min_factor):  # nearly always, and no deviation changes it
                continue
            limit = limit_of(view, stds=self.stds, min_factor=self.min_factor)
            if norm > limit.value:
                return (
                    f"the gradient norm is {number(norm)}, {number(norm / limit.usual)} times the usual "
                    f"{number(limit.usual)} of {limit.num_samples} healthy samples "
                    f"(threshold {number(limit.value)}: mean + {number(self.stds)} standard deviations of the log "
                    f"norm, at least {number(self.min_factor)} times)"
                )
        return None

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

    def _learn_layers(self, snapshot: Snapshot, sample: int) -> None:
        usual_P, norm_P = self._usual.of(snapshot.names), snapshot.grad_norm[sample]
        seen = norm_P > 0
        log_P = np.log(norm_P[seen])
        known_P = np.where(np.isnan(usual_P[seen]), log_P, usual_P[seen])
        usual_P[seen] = known_P + _USUAL_WEIGHT * (log_P - known_P)

    def _alert(self, snapshot: Snapshot, sample: int, fact: str) -> Alert:
        norm_P, usual_P = snapshot.grad_norm[sample], np.exp(self._usual.of(snapshot.names))
        worst = worst_first(norm_P, np.flatnonzero(norm_P > 0))
        layers = [
            f"{snapshot.names[p]} {number(norm_P[p])}"
            + (f" (usually {number(usual_P[p])})" if np.isfinite(usual_P[p]) else "")
            for p in worst
        ]
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
