"""The format of alert texts: the fact, the worst layers, the probable cause and the remedy, in this order."""

import unicodedata
from collections.abc import Callable, Collection
from itertools import islice
from typing import Final, TypeVar

# P watched parameters

Item = TypeVar("Item")

MAX_LAYERS: Final = 5


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
