"""What the command line says and how: colours where they can be seen, a progress line, wrapped text. Plain Python."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TextIO

BLOCKS: Final = "▁▂▃▄▅▆▇█"  # for a line in one line of text
_STYLES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_LEVEL_STYLE: Final = {"ERROR": "red", "WARN": "yellow", "INFO": "cyan"}
_MAX_WIDTH: Final = 100  # longer lines are hard to read, however wide the window
_BAR_WIDTH: Final = 30
_REDRAW_SECONDS: Final = 0.05


@dataclass
class Terminal:
    """Where a command writes. What the stream can show is decided once, here.

    Args:
        stream: the text stream.
        colour: write ANSI styles; None: where the stream is a terminal and NO_COLOR is not set.
        live: redraw the progress line in place; None: where the stream is a terminal.
    """

    stream: TextIO = field(default_factory=lambda: sys.stdout)
    colour: bool | None = None
    live: bool | None = None

    def __post_init__(self) -> None:
        is_terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        if self.live is None:
            self.live = is_terminal
        if self.colour is None:
            self.colour = is_terminal and not os.environ.get("NO_COLOR")
        self.width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        self.marks = _marks(encoding)
        self.ascii_only = not can_write(BLOCKS, encoding)

    def style(self, text: str, *styles: str) -> str:
        """The text in these styles: bold, dim, red, green, yellow, cyan."""
        if not self.colour or not styles:
            return text
        return f"\x1b[{';'.join(_STYLES[style] for style in styles)}m{text}\x1b[0m"

    def print(self, text: str = "") -> None:
        """One line. Characters that the stream cannot write are replaced, never an error."""
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        print(text.encode(encoding, "replace").decode(encoding), file=self.stream, flush=True)

    def json(self, value: object) -> None:
        """One JSON document for a program; what JSON has no number for (NaN, infinity) becomes null."""
        self.print(json.dumps(_without_non_finite(value), indent=2, ensure_ascii=True, allow_nan=False))

    def title(self, text: str) -> None:
        """A heading, with an empty line before it."""
        self.print()
        self.print(self.style(text, "bold"))

    def paragraph(self, text: str, indent: int = 2) -> None:
        """Wrapped text; its own line breaks are kept. A path or a URL is never broken."""
        for line in text.splitlines():
            wrapped = textwrap.wrap(line, max(self.width - indent, 20), break_long_words=False, break_on_hyphens=False)
            for part in wrapped or [""]:
                self.print(" " * indent + part)

    def pairs(self, pairs: Sequence[tuple[str, str]], indent: int = 2) -> None:
        """Two columns: dim labels, and their values."""
        label_width = max((len(label) for label, _ in pairs), default=0)
        for label, value in pairs:
            self.print(" " * indent + self.style(label.ljust(label_width), "dim") + "  " + value)

    def transient(self, text: str) -> None:
        """Replace the current line, where that is possible; an empty text erases it."""
        if self.live:
            self.stream.write(f"\r\x1b[2K{text}")
            self.stream.flush()

    def alert(self, title: str, level: str) -> str:
        """An alert's title, in the colour of its level."""
        return self.style(f"{self.marks.warning} {title}", "bold", _LEVEL_STYLE.get(level, "yellow"))


def _without_non_finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_non_finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(item) for item in value]
    return value


@dataclass(frozen=True)
class Marks:
    """The few signs that are not ASCII, or what stands for them."""

    full: str = "━"
    rest: str = "─"
    warning: str = "▲"
    good: str = "✓"
    bad: str = "✗"
    times: str = "×"
    dash: str = "–"


def _marks(encoding: str) -> Marks:
    """The signs where the encoding has them all, ASCII otherwise."""
    marks = Marks()
    if can_write("".join(vars(marks).values()), encoding):
        return marks
    return Marks(full="#", rest="-", warning="!", good="+", bad="x", times="x", dash="-")


def can_write(text: str, encoding: str) -> bool:
    """Whether an encoding has all characters of a text."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class Progress:
    """A bar in place on a terminal; elsewhere a line at every quarter.

    Args:
        terminal: where to draw.
        total: how many steps there are.
    """

    def __init__(self, terminal: Terminal, total: int) -> None:
        self._terminal = terminal
        self._total = max(total, 1)
        self._started = time.monotonic()
        self._drawn_at = float("-inf")
        self._quarter = 0
        self._done = 0
        self._note = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._terminal.transient("")

    def update(self, done: int, note: str = "") -> None:
        """Show that `done` of the steps are done."""
        self._done, self._note = done, note
        if self._terminal.live:
            now = time.monotonic()
            if now - self._drawn_at >= _REDRAW_SECONDS or done >= self._total:
                self._drawn_at = now
                self._draw()
        elif (quarter := done * 4 // self._total) > self._quarter:
            self._quarter = quarter
            self._terminal.print("  " + self._text())

    def say(self, text: str) -> None:
        """A line that stays, above the bar."""
        self._terminal.transient("")
        self._terminal.print(text)
        if self._terminal.live:
            self._draw()

    def _text(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self._done:>{len(str(self._total))}}/{self._total}  {seconds:3.0f} s  {self._note}"

    def _draw(self) -> None:
        full = _BAR_WIDTH * min(self._done, self._total) // self._total
        marks = self._terminal.marks
        bar = self._terminal.style(marks.full * full, "green")
        bar += self._terminal.style(marks.rest * (_BAR_WIDTH - full), "dim")
        text = self._text()[: max(self._terminal.width - _BAR_WIDTH - 5, 0)]  # a wrapped line could not be erased
        self._terminal.transient(f"  {bar}  {text}")
