"""Rules that are made from the user's functions."""

from collections.abc import Callable, Iterable
from typing import Any

from ..snapshot import Snapshot
from ._base import Alert, Level, Rule

RuleFunction = Callable[[Snapshot], str | Alert | None]


class FunctionRule:
    """A rule that calls a function with every sample.

    Args:
        judge: called with a snapshot of one sample. Returns a text or an Alert if something is wrong, otherwise None.
        title: the title of the alerts made from a text.
        level: the level of the alerts made from a text.
    """

    def __init__(self, judge: RuleFunction, *, title: str, level: Level = "WARN") -> None:
        Alert(title, "", 0, level)  # an invalid title or level raises here, not during training
        self.judge, self.title, self.level = judge, title, level

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

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass  # a plain function has no state that could be loaded


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
        return FunctionRule(candidate, title=name.replace("_", " ").capitalize()[:63])
    raise TypeError(f"a rule must have check() or be a function from a snapshot to text, but {candidate!r} is neither")
