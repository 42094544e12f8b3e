"""Output of the commands beyond click: wrapped text, two columns, and JSON."""

import json
import shutil
import textwrap
from collections.abc import Sequence
from typing import Final

import click

LEVEL_COLOUR: Final = {"ERROR": "red", "WARN": "yellow", "INFO": "cyan"}
_MAX_WIDTH: Final = 100  # longer lines are hard to read, even in a wide window


def paragraph(text: str, indent: int = 2, *, err: bool = False) -> None:
    """Print wrapped text. Line breaks in the text are kept; paths and URLs are never broken."""
    width = max(min(shutil.get_terminal_size().columns, _MAX_WIDTH) - indent, 20)
    for line in text.splitlines():
        for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]:
            click.echo(" " * indent + part, err=err)


def pairs(labelled: Sequence[tuple[str, str]]) -> None:
    """Print two columns: dimmed labels and their values."""
    width = max(len(label) for label, _ in labelled)
    for label, value in labelled:
        click.echo(f"  {click.style(label.ljust(width), dim=True)}  {value}")


def title(text: str) -> None:
    """Print a heading after an empty line."""
    click.echo("\n" + click.style(text, bold=True))


def alert_title(text: str, level: str) -> str:
    """Return an alert's title in the colour of its level."""
    return click.style(f"▲ {text}", bold=True, fg=LEVEL_COLOUR.get(level, "yellow"))


def as_json(value: object) -> None:
    """Print one JSON document for scripts; NaN and infinity become null."""
    strict = json.loads(json.dumps(value), parse_constant=lambda _: None)
    click.echo(json.dumps(strict, indent=2, allow_nan=False))
