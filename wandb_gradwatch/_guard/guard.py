"""An unhealthy step is not applied: `watch(..., guard="skip")`, a function, or a SkipGuard with its own limits.

A guard learns from the steps that it has judged at once where the host has decided, and 8 steps later where the device
has. Always 8, and not "when they have arrived": a limit that depends on the machine's timing would decide differently
in every run, and on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from .._analysis.baseline import limit_of
from .._analysis.memory import PerKind, Remembers
from .._runtime.error_boundary import CallbackError
from ..snapshot import Snapshot

# P watched parameters

StepJudge = Callable[[Snapshot], bool]
Present = tuple[tuple[str, ...], npt.NDArray[np.bool_]]  # the names of all parameters [P], and which of them [P]


class _Past(Remembers):
    """The total log norms of one kind of step, newest last."""

    def __init__(self) -> None:
        self.healthy: list[float] = []  # what is usual is learned from these
        self.all: list[float] = []
        self.num_alarmed = 0  # in a row, up to now


@dataclass(kw_only=True)
class NormLimits(Remembers):
    """A limit, from the norms so far, above which a norm is too large. What was too large is not learned from."""

    threshold: float | None = 1e8  # too large whatever came before; None switches this measure off
    # Standard deviations of the log norm above its mean that are too many; None switches this measure off. For few
    # steps as many as are equally unlikely by Student's distribution.
    stds: float | None = 3.5
    min_factor: float = 20.0  # a norm below this multiple of the usual one is not too large, however quiet the run was
    # Nor is one below this multiple of the second largest of the last 16 healthy ones: losses that few elements of a
    # batch decide have norms with tails that no deviation describes. None: it does not matter.
    record_factor: float | None = 3.0
    warmup: int = 5  # healthy steps before a deviation is known
    warmup_factor: float = 1000.0  # until then, a norm above this multiple of the largest so far is too large
    window: int = 64  # healthy steps that count as usual; their last quarter is a second view, which follows a trend
    adapt_after: int = 20  # so many in a row that were too large are the usual level
    _pasts: PerKind[_Past] = field(default_factory=lambda: PerKind(_Past), init=False, repr=False)

    def limit(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_]) -> float:
        """The largest total norm of the gradients of these parameters that is not too large now."""
        past = self._pasts.of(names, present_P)
        limit = math.inf if self.threshold is None else self.threshold
        if self.stds is None or not past.healthy:
            return limit
        if len(past.healthy) < self.warmup:
            return min(limit, self.warmup_factor * math.exp(max(past.healthy)))
        recent = past.healthy[-max(self.window // 4, self.warmup) :]
        for view in (past.healthy, recent):
            found = limit_of(view, stds=self.stds, min_factor=self.min_factor, record_factor=self.record_factor)
            limit = min(limit, found.value)
        return limit

    def learn(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_], norm: float, *, alarmed: bool) -> None:
        """Remember a total norm above 0 that was judged by `limit`."""
        past = self._pasts.of(names, present_P)
        log_norm = math.log(norm) if norm < math.inf else 1e3
        past.all = [*past.all[-(self.window - 1) :], log_norm]
        past.num_alarmed = past.num_alarmed + 1 if alarmed else 0
        if not alarmed:
            past.healthy = [*past.healthy[-(self.window - 1) :], log_norm]
        elif past.num_alarmed >= self.adapt_after:
            past.healthy, past.num_alarmed = past.all[-self.adapt_after :], 0


DEFAULT_WINDOW: Final = NormLimits.window


def judge_of_norms(
    *, threshold: float | None, factor: float | None, stds: float | None, window: int, default_factor: float
) -> NormLimits:
    """What holds these limits, and no others; without any, its own, at `default_factor`."""
    for name, value, least in (("threshold", threshold, 0), ("factor", factor, 1), ("stds", stds, 0)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= least):
            raise ValueError(f"{name}={value!r} must be a number, at least {least}, or None")
    if isinstance(window, bool) or not isinstance(window, int) or window < 2:
        raise ValueError(f"window={window!r} must be a number of steps, at least 2")
    usual: dict[str, Any] = {"window": window, "warmup": min(NormLimits.warmup, window)}
    if threshold is None and factor is None and stds is None:
        return NormLimits(min_factor=default_factor, **usual)
    if factor is not None and stds is None:
        stds = 0.0  # the mean itself, and the factor above it
    usual |= {"record_factor": None, "warmup_factor": math.inf}
    return NormLimits(threshold=threshold, min_factor=1.0 if factor is None else factor, stds=stds, **usual)


class TooManySkippedStepsError(RuntimeError):
    """The guard has skipped so many steps in a row that going on is pointless."""


@dataclass
class SkipGuard(Remembers):
    """Decides, before an optimizer steps, whether its gradients are used.

    Every step is judged, those between two samples too, by its gradients as the backward left them: unscaled, before
    clipping. Where several optimizers step after one backward, the first that is withheld withholds those after it. A
    skipped step leaves the optimizer's parameters, also those that are not watched, and its state bit for bit as they
    were.

    Torch's fused optimizers (`fused=True`: Adam, AdamW, SGD, Adagrad) are told on the device, and the host never waits;
    it hears of it 8 steps later, and so learns, counts and raises later. Their first step, which creates their state,
    every step of another optimizer, and a function of your own cost one read from the device a step. On ranks that
    hold shards all decide alike, by one small all-reduce a step: call `watch()` on all of them.

    A step between two samples costs what a sample costs without its histogram and its parameters' norms, and a dozen
    operations on numbers; nothing of it is logged but how many steps were withheld (`gradwatch/num_guarded_steps`).

    Of an optimizer that steps inside the backward, only what is not finite is withheld: there is no norm of the whole.
    A step that a CUDA graph replays is not seen, and not guarded.

    Gradients that are not finite are always unhealthy. A norm is, by the limits given here and by no others; where none
    is given, by a factor of 20 and 3.5 standard deviations. An alert that was not needed costs a glance; a good batch
    that was dropped is lost, so the guard waits for more than the alerts do.

    Args:
        is_bad: judges a snapshot of one sample, of the gradients that are about to be used, instead of all limits.
        max_in_a_row: so many skipped steps in a row are too many.
        then: "raise" a TooManySkippedStepsError from optimizer.step(), or "continue" and apply the step.
        threshold: a larger norm is unhealthy, whatever came before.
        factor: a norm above this multiple of the usual one is unhealthy, from the sixth healthy step on.
        stds: so is a log norm more than this many standard deviations above the mean; with `factor`, a norm has to be
            beyond both.
        window: healthy steps that count as usual.
        replay: run a step that is left out for NaN or Inf once more, to name the operation that made them; at most
            once per episode and three times a run. Keeps the inputs of one step. Not where the device decides.

    Raises:
        ValueError: a limit that makes no sense.
    """

    is_bad: StepJudge | None = None
    max_in_a_row: int = 20
    then: Literal["raise", "continue"] = "raise"
    threshold: float | None = None
    factor: float | None = None
    stds: float | None = None
    window: int = DEFAULT_WINDOW
    replay: bool = True
    num_skipped: int = field(default=0, init=False)
    num_in_a_row: int = field(default=0, init=False)  # unhealthy steps, up to now
    norms: NormLimits = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_in_a_row < 1:
            raise ValueError(f"max_in_a_row={self.max_in_a_row!r} must be at least 1")
        if self.then not in ("raise", "continue"):
            raise ValueError(f'then={self.then!r} must be "raise" or "continue"')
        if self.is_bad is not None and (self.threshold, self.factor, self.stds) != (None, None, None):
            raise ValueError("SkipGuard() was given is_bad= and limits of the norm; pass is_bad=, or the limits")
        self.norms = judge_of_norms(
            threshold=self.threshold, factor=self.factor, stds=self.stds, window=self.window, default_factor=20.0
        )

    @property
    def lets_through(self) -> bool:
        """Whether so many steps in a row were unhealthy that the next is applied whatever it is."""
        return self.then == "continue" and self.num_in_a_row >= self.max_in_a_row

    def withholds(self, step: int, *, bad: bool) -> bool:
        """Whether a step is withheld, now that it is known to be unhealthy or not.

        Raises:
            TooManySkippedStepsError: there were too many in a row.
        """
        if bad and self.then == "raise" and self.num_in_a_row >= self.max_in_a_row:
            raise self._too_many(step, self.num_in_a_row + 1)
        return bad and not self.lets_through

    def count(self, step: int, *, bad: bool, skipped: bool, was_asked: bool) -> None:
        """A step is over: whether it was unhealthy, and was not applied.

        Raises:
            TooManySkippedStepsError: there were too many in a row, and `withholds` was not asked first, where the
                device has decided.
        """
        self.num_in_a_row = self.num_in_a_row + 1 if bad else 0
        self.num_skipped += skipped
        if skipped and not was_asked and self.then == "raise" and self.num_in_a_row > self.max_in_a_row:
            raise self._too_many(step, self.num_in_a_row)

    def _too_many(self, step: int, num_in_a_row: int) -> TooManySkippedStepsError:
        return TooManySkippedStepsError(
            f"guard: {num_in_a_row} unhealthy steps in a row, up to step {step} "
            f"(max_in_a_row={self.max_in_a_row}); the model no longer learns. Load an earlier checkpoint, "
            'lower the learning rate, or use SkipGuard(then="continue").'
        )


GuardArgument = Literal["skip"] | StepJudge | SkipGuard | None


def resolve_guard(guard: GuardArgument) -> SkipGuard | None:
    """What the user gave as `guard=` as a SkipGuard; a ValueError for anything else."""
    if guard is None or isinstance(guard, SkipGuard):
        return guard
    if guard == "skip":
        return SkipGuard()
    if callable(guard) and not isinstance(guard, type):  # the class itself would call every step bad
        return SkipGuard(is_bad=guard)
    raise ValueError(f'guard={guard!r} must be "skip", a function from a snapshot to True (skip), or a SkipGuard')


@contextmanager
def raised_to_the_user() -> Iterator[None]:
    """What the guard raises is meant for the training loop."""
    try:
        yield
    except Exception as error:
        raise CallbackError from error
