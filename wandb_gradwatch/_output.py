"""Output of the commands: text in colours, wrapped text, two columns, and JSON.

No other module calls click.echo or click.style. Texts come from files and models, so all of them are cleaned here.
"""

import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, Final

import click

from ._analysis.formatting import visible_text

LEVEL_COLOUR: Final = {"ERROR": "red", "WARN": "yellow", "INFO": "cyan"}
_MAX_WIDTH: Final = 100  # longer lines are hard to read, even in a wide window


class Styled(str):
    """Text with codes for the terminal, which say() leaves as they are."""


def styled(text: str, **style: Any) -> Styled:
    """Return cleaned text in a style of click."""
    return Styled(click.style(visible_text(text, keep=""), **style))


def say(*parts: str, err: bool = False, nl: bool = True) -> None:
    """Print the parts on one line. Everything in them that controls a terminal is made visible, except in a Styled."""
    clean = (part if isinstance(part, Styled) else visible_text(part, keep="") for part in parts)
    click.echo("".join(clean), err=err, nl=nl)


def paragraph(text: str, indent: int = 2, *, err: bool = False) -> None:
    """Print wrapped text. Line breaks in the text are kept; paths and URLs are never broken."""
    width = max(min(shutil.get_terminal_size().columns, _MAX_WIDTH) - indent, 20)
    for line in text.splitlines():
        for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]:
            say(" " * indent, part, err=err)


def pairs(labelled: Sequence[tuple[str, str]]) -> None:
    """Print two columns: dimmed labels and their values."""
    width = max(len(label) for label, _ in labelled)
    for label, value in labelled:
        say("  ", styled(label.ljust(width), dim=True), "  ", value)


def title(text: str) -> None:
    """Print a heading after an empty line."""
    say()
    say(styled(text, bold=True))


def alert_title(text: str, level: str) -> Styled:
    """Return an alert's title in the colour of its level."""
    return styled(f"▲ {text}", bold=True, fg=LEVEL_COLOUR.get(level, "yellow"))


def as_json(value: object) -> None:
    """Print one JSON document for scripts, which escapes all but ASCII; NaN and infinity become null."""
    strict = json.loads(json.dumps(value), parse_constant=lambda _: None)
    click.echo(json.dumps(strict, indent=2, allow_nan=False))
