"""The shipped judgement as an entry of `rules=`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .._judgement.symptoms import SYMPTOMS


@dataclass(frozen=True)
class Judgement:
    """The symptoms that the package looks for in every sample. In `rules=` it stands beside your own rules.

    Args:
        without: kinds of incidents that are not to be reported, such as "dead_gradient". docs/alerts.md lists them.

    Raises:
        ValueError: one of them does not exist.

    Examples:
        >>> from wandb_gradwatch.rules import Judgement
        >>> Judgement(without=["initial_weights"]).without
        ('initial_weights',)
    """

    without: Collection[str] = ()

    def __post_init__(self) -> None:
        chosen = (self.without,) if isinstance(self.without, str) else tuple(self.without)
        known = {symptom.kind for symptom in SYMPTOMS}
        if unknown := sorted(set(chosen) - known):
            raise ValueError(f"Judgement(without={chosen!r}): there is no {unknown[0]!r}; there are {sorted(known)}")
        object.__setattr__(self, "without", chosen)
