"""Guards, which do not apply unhealthy steps: `watch(..., guard="skip")`, a function, or a SkipGuard with limits."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._analysis.baseline import limit_of
from .._analysis.memory import PerKind, Remembers
from .._arguments import check, check_flags, check_function, is_number, is_whole
from ..snapshot import Snapshot

# P watched parameters

StepJudge = Callable[[Snapshot], bool]


class _Past(Remembers):
    """Log total norms of the steps in which the same parameters had a gradient, newest last."""

    def __init__(self) -> None:
        self.healthy: list[float] = []  # define the usual level
        self.all: list[float] = []
        self.num_alarmed = 0  # consecutive steps above the limit, up to now


@dataclass(kw_only=True)
class NormLimits(Remembers):
    """Computes a limit for the gradient norm from past norms. Norms above the limit are not learned from."""

    threshold: float | None = 1e8  # an absolute limit, whatever came before; None: off
    # The limit in standard deviations of the log norm above its mean; None: off. With few steps it is the equally
    # unlikely quantile of Student's distribution.
    stds: float | None = 3.5
    min_factor: float = 20.0  # the limit is at least this multiple of the usual norm, however small the deviation is
    # The limit is also at least this multiple of the second largest of the last 16 healthy norms: if few elements of a
    # batch decide the loss, the norms have heavy tails that no standard deviation describes. None: off.
    record_factor: float | None = 3.0
    warmup: int = 5  # healthy steps before the standard deviation is used
    warmup_factor: float = 1000.0  # until then the limit is this multiple of the largest norm so far
    window: int = 64  # healthy steps that define the usual norm; also computed over the last quarter, to follow trends
    adapt_after: int = 20  # after this many consecutive steps above the limit, their norm is the usual one
    _pasts: PerKind[_Past] = field(default_factory=lambda: PerKind(_Past), init=False, repr=False)

    def limit(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_]) -> float:
        """Return the current limit for the total norm, where `present_P` of the named parameters have a gradient."""
        past = self._pasts.of(names, present_P)
        limit = math.inf if self.threshold is None else self.threshold
        if self.stds is None or not past.healthy:
            return limit
        if len(past.healthy) < self.warmup:
            return min(limit, self.warmup_factor * math.exp(max(past.healthy)))
        of = partial(limit_of, stds=self.stds, min_factor=self.min_factor, record_factor=self.record_factor)
        return min(limit, of(past.healthy), of(past.healthy[-max(self.window // 4, self.warmup) :]))

    def learn(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_], norm: float, *, alarmed: bool) -> None:
        """Remember a total norm above 0; `alarmed`: it was above the limit."""
        past = self._pasts.of(names, present_P)
        log_norm = math.log(norm) if norm < math.inf else 1e3
        past.all = [*past.all[-(self.window - 1) :], log_norm]
        past.num_alarmed = past.num_alarmed + 1 if alarmed else 0
        if not alarmed:
            past.healthy = [*past.healthy[-(self.window - 1) :], log_norm]
        elif past.num_alarmed >= self.adapt_after:
            past.healthy, past.num_alarmed = past.all[-self.adapt_after :], 0


def judge_of_norms(
    *, threshold: float | None, factor: float | None, stds: float | None, window: int, default_factor: float
) -> NormLimits:
    """Build limits from the user's values only; without any value, the default limits with `default_factor`."""
    for name, value in (("threshold", threshold), ("stds", stds)):  # at 0 every norm, or every second one, exceeds it
        check(value is None or (is_number(value) and value > 0), name, value, "a number above 0, or None")
    check(factor is None or (is_number(factor) and factor >= 1), "factor", factor, "a number, at least 1, or None")
    check(is_whole(window) and window >= 2, "window", window, "a whole number of steps, at least 2")
    usual: dict[str, Any] = {"window": window, "warmup": min(NormLimits.warmup, window)}
    if threshold is None and factor is None and stds is None:
        return NormLimits(min_factor=default_factor, **usual)
    if factor is not None and stds is None:
        stds = 0.0  # the limit is the factor times the mean itself
    usual |= {"record_factor": None, "warmup_factor": math.inf}
    return NormLimits(threshold=threshold, min_factor=1.0 if factor is None else factor, stds=stds, **usual)


class TooManySkippedStepsError(RuntimeError):
    """The guard has skipped so many steps in a row that the model no longer learns."""


@dataclass
class SkipGuard(Remembers):
    """Skips unhealthy steps: decides before each optimizer step whether the gradients are applied.

    Every step is checked, including those between samples, by its gradients as the backward left them: unscaled, before
    clipping. NaN and Inf are always unhealthy, a norm above the limits given here; the default is a factor of 20 and
    3.5 standard deviations, less sensitive than the alerts, because a good batch that is skipped is lost. Inside the
    backward, where the total norm is not known, only NaN and Inf are skipped. Steps replayed by a CUDA graph are not
    guarded.

    A skipped step leaves the optimizer's state and all its parameters, watched or not, bit for bit unchanged, and also
    skips later optimizers of the same backward. It is counted (`gradwatch/num_guarded_steps`), and a message names the
    first one.

    The decision costs one read from the device per step, for which the host waits, as a gradient scaler does. Ranks
    that hold shards decide together, by a small all-reduce per step: call `watch()` on all of them. A step between
    samples costs as much as a sample without histogram and parameter norms, plus a dozen operations on scalars.

    Args:
        is_bad: replaces the limits: a function that gets a snapshot of the step and returns True to skip the step. The
            snapshot's `metrics` have `gradwatch/learning_rate` and the step's `gradwatch/loss`. The loss is absent for
            a step inside the backward, and with several ranks: each has its own, and could decide otherwise.
        max_in_a_row: the largest number of consecutive skipped steps.
        then: what follows beyond that: "raise" a TooManySkippedStepsError from optimizer.step(), or "continue" and
            apply the step.
        threshold: norms above this are unhealthy.
        factor: norms above this multiple of the usual norm are unhealthy, from the sixth healthy step on.
        stds: log norms more than this many standard deviations above the mean are unhealthy; if `factor` is given too,
            a norm must exceed both.
        window: the number of healthy steps that define the usual norm.
        replay: run a step that was skipped for NaN or Inf once more, to name the operation that made them; at most once
            per episode and three times per run. Keeps the inputs of one step.

    Raises:
        ValueError: a limit is invalid.
        TypeError: `is_bad` is not a function, or `replay` not a bool.
    """

    is_bad: StepJudge | None = None
    max_in_a_row: int = 20
    then: Literal["raise", "continue"] = "raise"
    threshold: float | None = None
    factor: float | None = None
    stds: float | None = None
    window: int = NormLimits.window
    replay: bool = True
    num_skipped: int = field(default=0, init=False)
    num_in_a_row: int = field(default=0, init=False)  # consecutive unhealthy steps, up to now
    norms: NormLimits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_function("SkipGuard()", "is_bad", self.is_bad, "a function from a snapshot to True (skip the step)")
        is_limit = is_whole(self.max_in_a_row) and self.max_in_a_row >= 1
        check(is_limit, "max_in_a_row", self.max_in_a_row, "a whole number of steps, at least 1")
        check(self.then in ("raise", "continue"), "then", self.then, '"raise" or "continue"')
        check_flags("SkipGuard()", replay=self.replay)
        if self.is_bad is not None and (self.threshold, self.factor, self.stds) != (None, None, None):
            raise ValueError("SkipGuard() was given is_bad= and limits of the norm; pass is_bad=, or the limits")
        self.norms = judge_of_norms(
            threshold=self.threshold, factor=self.factor, stds=self.stds, window=self.window, default_factor=20.0
        )

    def withholds(self, step: int, *, bad: bool) -> bool:
        """Return whether a step is skipped; raise a TooManySkippedStepsError after too many unhealthy ones in a row."""
        num_in_a_row = self.num_in_a_row + bad
        if num_in_a_row <= self.max_in_a_row:
            return bad
        if self.then == "raise":
            raise TooManySkippedStepsError(
                f"guard: {num_in_a_row} unhealthy steps in a row, up to step {step} "
                f"(max_in_a_row={self.max_in_a_row}); the model no longer learns. Load an earlier checkpoint, "
                'lower the learning rate, or use SkipGuard(then="continue").'
            )
        return False

    def count(self, *, bad: bool, skipped: bool) -> None:
        """Count a finished step."""
        self.num_in_a_row = self.num_in_a_row + 1 if bad else 0
        self.num_skipped += skipped


GuardArgument = Literal["skip"] | StepJudge | SkipGuard | None


def resolve_guard(guard: GuardArgument) -> SkipGuard | None:
    """Convert the argument `guard=` to a SkipGuard; raise a ValueError for an invalid one."""
    if guard is None or isinstance(guard, SkipGuard):
        return guard
    if guard == "skip":
        return SkipGuard()
    if callable(guard) and not isinstance(guard, type):  # a class returns an instance, which would always be true
        return SkipGuard(is_bad=guard)
    raise ValueError(f'guard={guard!r} must be "skip", a function from a snapshot to True (skip), or a SkipGuard')
