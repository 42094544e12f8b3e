"""The command `view`: the page of a run on this machine, once or for as long as the run goes on."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Sized
from pathlib import Path
from typing import Final

import click

from .._output import as_json, paragraph
from . import page, read
from .history import RunHistory

WATCH_SECONDS: Final = 5.0  # between two looks at a run that is still going on
RELOAD_SECONDS: Final = 10  # until an open page of such a run reloads itself


def run_view(path: Path, output: Path | None, *, opens: bool, watches: bool, json: bool) -> None:
    """Write the page, and say what it shows.

    Args:
        path: a run's directory, its .wandb file, or wandb/.
        output: the page, or a directory for it; None: here.
        opens: show it in the browser.
        watches: write it again until the run has finished.
        json: print one JSON object; everything else goes to standard error.
    """
    history, written = _write(path, output, reload=watches)
    _say_notes(history, err=json)
    if json:
        as_json(_facts(history, written))
    else:
        _say_contents(history, written)
    if opens and not webbrowser.open(written.resolve().as_uri()):
        click.echo(f"no browser could be started; open {written.resolve().as_uri()} yourself", err=json)
    while watches and not history.finished:
        time.sleep(WATCH_SECONDS)
        history, written = _write(path, written, reload=True)
        said = f"{_many(history.steps, 'row')}, {_many(history.alerts, 'alert')}"
        click.echo(f"{time.strftime('%H:%M:%S')}  {said}", err=json)


def _write(path: Path, output: Path | None, *, reload: bool) -> tuple[RunHistory, Path]:
    history = read.read_run(path, progress=_say_progress if sys.stderr.isatty() else None)
    target = output or Path()
    if target.is_dir():
        target /= f"gradwatch-{history.run_id}.html"
    page.write_page(history, target, refresh_seconds=RELOAD_SECONDS if reload and not history.finished else None)
    return history, target


def _say_progress(rows: int) -> None:
    # Nobody knows how many rows are still to come: a count, not a bar. The next line that is printed replaces it.
    click.echo(f"\r  {rows} rows read\r", nl=False, err=True)


def _say_notes(history: RunHistory, *, err: bool) -> None:
    for note in history.notes:
        paragraph(note, indent=0, err=err)
    if history.num_rows and not len(history.steps):
        text = "The run has rows, but none of wandb_gradwatch: call watch(model) after wandb.init()."
        paragraph(text, indent=0, err=err)


def _say_contents(history: RunHistory, written: Path) -> None:
    found = click.style(f"{_many(history.steps, 'row')}, {_many(history.names, 'name')}, ", dim=True)
    alerts = click.style(_many(history.alerts, "alert"), fg="yellow" if history.alerts else None)
    click.echo(f"{written}  {found}{alerts}")


def _facts(history: RunHistory, written: Path) -> dict[str, object]:
    return {
        "page": str(written.resolve()),
        "run": history.run_id,
        "finished": history.finished,
        "rows": len(history.steps),
        "names": history.names,
        "alerts": [vars(alert) for alert in history.alerts],
        "notes": list(history.notes),
    }


def _many(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
