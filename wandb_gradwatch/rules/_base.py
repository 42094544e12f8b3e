"""Alerts and the rules that raise them: snapshot in, alerts out. Pure; nothing here needs torch or a W&B run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

from .._analysis.formatting import visible_text
from .._analysis.memory import Remembers
from .._judgement.incident import Incident, Layer, kind_of
from .._judgement.incident import Level as Level
from ..snapshot import Snapshot

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


def values_of(snapshot: Snapshot, key: str) -> list[float]:
    """Return a metric's value in each sample, NaN where it was not measured: S values."""
    values_S = snapshot.metrics.get(key)
    return [math.nan] * len(snapshot) if values_S is None else values_S.tolist()


Bounds = Mapping[str, tuple[float, float]]
FROM_0: Final = (0.0, math.inf)
FROM_1: Final = (1.0, math.inf)


class ShippedRule(Remembers):
    """Base of the rules of metrics: it checks their limits when they are created, and saves and loads their state.

    A limit out of bounds would raise an alert always or never, or an exception in the middle of a training.
    """

    title: ClassVar[str]
    cause_name: ClassVar[str]  # the identifier of its cause
    cause: ClassVar[str]
    advice: ClassVar[str]  # what to do, in a few words
    remedy: ClassVar[str]
    bounds: ClassVar[Bounds] = {}  # the smallest and the largest value of each limit

    def __post_init__(self) -> None:
        for name, (least, largest) in self.bounds.items():
            value = getattr(self, name)
            is_number = isinstance(value, Real) and not isinstance(value, bool)
            if not (is_number and least <= float(value) <= largest):
                span = f"at least {least:g}" if largest == math.inf else f"between {least:g} and {largest:g}"
                raise ValueError(f"{type(self).__name__}({name}={value!r}): {name} must be a number, {span}")

    def _finding(
        self,
        step: int,
        fact: str,
        *,
        layers: Sequence[str] = (),
        level: Level = "WARN",
        cause: str = "",
        remedy: str = "",
    ) -> Alert:
        """Return an alert at a step, with its incident."""
        incident = Incident(
            kind_of(self.title), self.title, level, step, step, step, fact,
            cause=self.cause_name, cause_text=cause or self.cause, advice=self.advice, remedy=remedy or self.remedy,
            layers=tuple(map(Layer, layers)),
        )  # fmt: skip
        return Alert(self.title, incident.message, step, level, incident)


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

    Examples:
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
