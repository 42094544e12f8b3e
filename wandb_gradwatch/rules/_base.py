"""Alerts and the rules that raise them: snapshot in, alerts out. Pure; nothing here needs torch or a W&B run."""

from __future__ import annotations

import math
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from numbers import Real
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from .._analysis.formatting import sentence, visible_text
from .._analysis.memory import PerKind, Remembers
from .._judgement.incident import Incident
from .._judgement.incident import Level as Level
from ..snapshot import Snapshot, keys
from ..snapshot._overview import Overview

FIRST_STEPS: Final = 2  # steps at which the initial weights and the inputs are checked
MIN_ELEMENTS: Final = 256  # in all parameters together: smaller models may begin anywhere, and pass through 0
MAX_TITLE: Final = 63  # W&B documents a limit of 64 characters and does not check it


@dataclass(frozen=True)
class Alert:
    """A message about something wrong with the training.

    Args:
        title: one per kind of fault, never one per layer, as services throttle by title. At most 63 characters.
        text: the exact step, the worst layers, the values and the threshold, the probable cause and the remedy.
        step: the step of the sample that raised the alert.
        level: "INFO", "WARN" or "ERROR".
        incident: what the alert tells of, as data; None for an alert of a user's rule.
    """

    title: str
    text: str
    step: int
    level: Level = "WARN"
    incident: Incident | None = None

    def __post_init__(self) -> None:
        if not 0 < len(self.title) <= MAX_TITLE:
            raise ValueError(
                f"an alert's title must have 1 to {MAX_TITLE} characters, but {self.title!r} has {len(self.title)}"
            )
        if self.level not in ("INFO", "WARN", "ERROR"):
            raise ValueError(f'level={self.level!r} must be "INFO", "WARN" or "ERROR"')

    def __str__(self) -> str:
        """Return level, step, title and text, as `on_alert=print` prints them."""
        return visible_text(f"{self.level} at step {self.step}: {self.title}\n{textwrap.indent(self.text, '    ')}")


@dataclass(frozen=True)
class Finding(Alert):
    """An alert of a shipped rule with the parts of its text, so that a diagnosis can replace the cause or add lines."""

    fact: str = ""
    layers: str = ""
    cause: str = ""
    remedy: str = ""
    kind: str = ""  # of the fault, if the title covers several kinds
    more: tuple[str, ...] = ()  # lines of the text between the layers and the cause
    seen: int = 0  # the step of the newest sample that belongs to the alert, if it is later than `step`
    found_in: int = 0  # the step of the sample in which the rule found it, if it is later than `step`

    def but(self, **parts: Any) -> Finding:
        """Return this finding with other parts of its text."""
        changed = replace(self, **parts)
        text = sentence(changed.fact, changed.layers, changed.cause, changed.remedy, changed.more)
        return replace(changed, text=text)


def finding(title: str, fact: str, layers: str, cause: str, remedy: str, step: int, level: Level = "WARN") -> Finding:
    """Return a finding whose text consists of these parts."""
    text = sentence(fact, layers, cause, remedy)
    return Finding(title, text, step, level, fact=fact, layers=layers, cause=cause, remedy=remedy)


def is_ordinary(snapshot: Snapshot) -> bool:
    """Whether rules with `is_for_rare_samples` cannot find anything in these samples, so that they are not called.

    Rare samples are the first two steps and samples with NaN or Inf, with a wiring fault that the capture has found, or
    with a learning rate below 0.
    """
    is_rare = any([sample.has_nonfinite or sample.step <= FIRST_STEPS for sample in snapshot.overview])
    if is_rare or any([key.startswith(keys.WIRING) for key in snapshot.metrics]):
        return False
    bad, rates = values_of(snapshot, keys.NUM_NONFINITE_LOSS), values_of(snapshot, keys.LEARNING_RATE)
    return not any([num > 0 for num in bad] + [rate < 0 for rate in rates])


def values_of(snapshot: Snapshot, key: str) -> list[float]:
    """Return a metric's value in each sample, NaN where it was not measured: S values."""
    values_S = snapshot.metrics.get(key)
    return [math.nan] * len(snapshot) if values_S is None else values_S.tolist()


Bounds = Mapping[str, tuple[float, float]]
FROM_0: Final = (0.0, math.inf)
FROM_1: Final = (1.0, math.inf)
SHARE: Final = (0.0, 1.0)


class ShippedRule(Remembers):
    """Base of the shipped rules: it checks their limits when they are created, and saves and loads their state.

    A limit out of bounds would raise an alert always or never, or an exception in the middle of a training.
    """

    title: ClassVar[str]
    bounds: ClassVar[Bounds] = {}  # the smallest and the largest value of each limit
    may_be_none: ClassVar[frozenset[str]] = frozenset()  # the names of limits that None switches off
    is_for_rare_samples: ClassVar[bool] = False
    # Whether it judges what updates do over several samples. It does not get samples whose update is only inferred: in
    # a line search they are trial points.
    judges_updates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name, (least, largest) in self.bounds.items():
            value, none = getattr(self, name), ", or None" if name in self.may_be_none else ""
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (is_number and least <= float(value) <= largest) and not (none and value is None):
                span = f"at least {least:g}" if largest == math.inf else f"between {least:g} and {largest:g}"
                raise ValueError(f"{type(self).__name__}({name}={value!r}): {name} must be a number, {span}{none}")

    def _finding(
        self, step: int, fact: str, cause: str, remedy: str, *, layers: str = "", level: Level = "WARN", title: str = ""
    ) -> Finding:
        """Return an alert at a step, which its text names first."""
        return finding(title or self.title, f"Step {step}: {fact}", layers, cause, remedy, step, level)


@dataclass(kw_only=True)
class PerKindRule(ShippedRule, ABC):
    """Base of rules that compare a sample with earlier ones of mostly the same parameters, as of a GAN's critic only.

    Each kind of samples has a rule with the same limits and a state of its own.
    """

    metric: ClassVar[str] = ""  # the key of the metric that `check_sample` gets
    _kinds: PerKind[PerKindRule] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._kinds = PerKind(lambda: replace(self))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        for kind, samples in self._kinds.of_samples(snapshot, snapshot.overview):
            for sample, value in kind.prepared(snapshot, samples):
                yield from kind.check_sample(snapshot, sample, value)

    def prepared(self, snapshot: Snapshot, samples: Sequence[Overview]) -> Iterable[tuple[Overview, Any]]:
        """Yield the samples to check, each with what `check_sample` needs to know: its metric, NaN if not measured.

        Each sample is checked before the next one is asked for. Samples in which nothing can be found may be left out.
        """
        values = values_of(snapshot, self.metric)
        return [(sample, values[sample.place]) for sample in samples]

    @abstractmethod
    def check_sample(self, snapshot: Snapshot, sample: Overview, value: Any, /) -> Iterable[Alert]:
        """Check the next sample of this kind."""


@runtime_checkable
class Rule(Protocol):
    """Interface of a rule: checks new samples and returns the alerts, each with the step of its sample.

    `check` gets every sample once, in order, one or several at a time. It may return an alert for every sample of an
    episode: the monitor sends one alert per episode.
    """

    def check(self, snapshot: Snapshot) -> Iterable[Alert]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


RuleFunction = Callable[[Snapshot], str | Alert | None]


@dataclass(eq=False, repr=False)
class FunctionRule(Remembers):
    """A rule that calls a function with every sample.

    Args:
        judge: called with a snapshot of one sample. Returns a text or an Alert if something is wrong, otherwise None.
        title: the title of the alerts made from a text.
        level: the level of the alerts made from a text.
    """

    judge: RuleFunction
    _: KW_ONLY
    title: str
    level: Level = "WARN"

    def __post_init__(self) -> None:
        Alert(self.title, "", 0, self.level)  # an invalid title or level raises here, not during training

    def __call__(self, snapshot: Snapshot) -> str | Alert | None:
        return self.judge(snapshot)

    def __repr__(self) -> str:
        return f"FunctionRule({getattr(self.judge, '__name__', self.judge)}, title={self.title!r})"

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        for index in range(len(snapshot)):
            # A single sample keeps its histogram; the histogram of several samples cannot be split.
            sample = snapshot if len(snapshot) == 1 else snapshot.sample(index)
            answer = self.judge(sample)
            if isinstance(answer, Alert):
                yield answer
            elif isinstance(answer, str):
                yield Alert(self.title, answer, int(sample.steps[0]), self.level)
            elif answer is not None:
                raise TypeError(f"the rule {self!r} must return a str, an Alert or None, but returned {answer!r}")


def rule(*, title: str, level: Level = "WARN") -> Callable[[RuleFunction], FunctionRule]:
    """Return a decorator that makes a rule of a function from a snapshot of one sample to a text, an Alert or None.

    Example:
        >>> import torch, wandb_gradwatch
        >>> @rule(title="Weight too large", level="WARN")
        ... def weight_too_large(snapshot):
        ...     norm = snapshot.grad_norm[0, snapshot.names.index("weight")]
        ...     return f"weight {norm:.3g} at step {snapshot.steps[0]}" if norm > 4 else None
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> memory = wandb_gradwatch.MemorySink()
        >>> with wandb_gradwatch.watch(model, sinks=[memory], rules=[weight_too_large]):
        ...     model(torch.tensor([[3.0, 4.0]])).sum().backward()
        ...     optimizer.step()
        >>> [alert.text for alert in memory.alerts]
        ['weight 5 at step 1']
    """
    return lambda judge: FunctionRule(judge, title=title, level=level)


def as_rule(candidate: object) -> Rule:
    """Return a rule unchanged, and a function as a rule that has the function's name as its title.

    Raises:
        TypeError: candidate is neither a rule nor a function.
    """
    if isinstance(candidate, type):
        raise TypeError(
            f"a rule must be an instance, but {candidate.__name__} is a class; write {candidate.__name__}()"
        )
    if isinstance(candidate, Rule):
        return candidate
    if callable(candidate):
        name = getattr(candidate, "__name__", type(candidate).__name__).strip("_<>")
        return FunctionRule(candidate, title=name.replace("_", " ").capitalize()[:MAX_TITLE])
    raise TypeError(f"a rule must have check() or be a function from a snapshot to text, but {candidate!r} is neither")
