"""The format of alert texts: the fact, the worst layers, the probable cause and the remedy, in this order."""

import unicodedata
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from .._measure.columns import FloatArray, IntArray

# P watched parameters

Item = TypeVar("Item")

MAX_LAYERS: Final = 5
CAUSE_PREFIX: Final = "Probable cause: "
FOUND_PREFIX: Final = "found by running the step again. "  # a description of the first bad operation follows


# Unicode categories: controls, formats such as those that change the direction, half characters, private use, and
# separators of lines and paragraphs.
_INVISIBLE: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def visible_text(text: str, *, keep: str = "\n\t") -> str:
    """Make characters visible that hide, change the text's direction or control a terminal: U+202E becomes ‹U+202E›.

    Everything from a file or a model that reaches a terminal or a page passes through this function. Characters in
    `keep` stay.
    """
    if text.isascii() and text.isprintable():
        return text
    hides = {char for char in set(text) - set(keep) if unicodedata.category(char) in _INVISIBLE}
    return "".join(f"‹U+{ord(char):04X}›" if char in hides else char for char in text)


def number(value: float) -> str:
    """Format a value with three significant digits: 0.0123, 113000, 1.91e11, 5.51e-7; integers such as 4096 stay."""
    text = f"{value:.3g}"
    if 1e3 <= abs(float(text)) < 1e6:
        return f"{value if float(value).is_integer() else float(text):.0f}"  # loss scales must be exact
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else text


def listing(items: Collection[Item], describe: Callable[[Item], str] = str, *, separator: str = ", ") -> str:
    """List at most five items, then "and N more". Only these are formatted, because a rule may alert at every step."""
    shown = separator.join(map(describe, islice(items, MAX_LAYERS)))
    return f"{shown}{separator}and {len(items) - MAX_LAYERS} more" if len(items) > MAX_LAYERS else shown


def sentence(fact: str, layers: str, cause: str, remedy: str, more: Collection[str] = ()) -> str:
    """The text of an alert, in lines: the fact, the worst layers if any, further lines, the cause with its remedy."""
    worst, advice = [f"Worst layers: {layers}."] if layers else [], f". Remedy: {remedy}." if remedy else ""
    return "\n".join([fact, *worst, *more, f"{CAUSE_PREFIX}{cause}{advice}"])


def clip_advice(*, clips: bool) -> str:
    """Advice on clipping, to follow "and", for a training that clips already or not."""
    return "clip at a lower norm" if clips else "clip with clip_grad_norm_"


def worst_first(values_P: FloatArray, chosen: npt.ArrayLike) -> list[int]:
    """The chosen indices sorted by descending value; missing values come last."""
    chosen_N = np.asarray(chosen, dtype=np.intp)
    values_N = values_P[chosen_N]
    order: list[int] = chosen_N[np.argsort(np.where(np.isfinite(values_N), -values_N, np.inf), kind="stable")].tolist()
    return order


def when(steps_S: IntArray, sample: int) -> str:
    """Return when something changed that this sample is the first to show.

    Steps that were not measured are named, because it may have changed in any of them.

    Example:
        >>> when(np.array([1, 2, 5]), 1), when(np.array([1, 2, 5]), 2)
        ('at step 2', 'between steps 2 and 5')
    """
    step, before = int(steps_S[sample]), int(steps_S[max(sample - 1, 0)])
    return f"at step {step}" if step - before <= 1 else f"between steps {before} and {step}"
