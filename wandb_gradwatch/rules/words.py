"""How alerts are worded: the fact, the worst layers, the probable cause and the remedy, in this order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from ..statistics.columns import FloatArray

# P watched parameters

MAX_LAYERS: Final = 5
CAUSE_PREFIX: Final = "Probable cause: "  # what follows it may be replaced by a diagnosis of the evidence


def number(value: float) -> str:
    """A value as a person reads it, three significant digits: 0.0123, 113000, 1.91e11, 5.51e-7."""
    text = f"{value:.3g}"
    if 1e3 <= abs(float(text)) < 1e6:
        return f"{float(text):.0f}"
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else text


def listing(items: Sequence[str]) -> str:
    """At most five of the items, then "and N more"."""
    shown = ", ".join(items[:MAX_LAYERS])
    return f"{shown}, and {len(items) - MAX_LAYERS} more" if len(items) > MAX_LAYERS else shown


def sentence(fact: str, layers: Sequence[str], cause: str, remedy: str) -> str:
    """The text of an alert, one line each: the fact, the worst layers, the cause with its remedy."""
    lines = [fact]
    if layers:
        lines.append(f"Worst layers: {listing(layers)}.")
    lines.append(f"{CAUSE_PREFIX}{cause}. Remedy: {remedy}.")
    return "\n".join(lines)


def worst_first(values_P: FloatArray, chosen_P: Iterable[int]) -> list[int]:
    """The chosen indices by falling value; a missing value comes last."""
    return sorted(chosen_P, key=lambda index: -values_P[index] if np.isfinite(values_P[index]) else np.inf)
