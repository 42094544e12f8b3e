"""The command `view`: the page of a run on this machine, once or for as long as the run goes on."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Sequence, Sized
from pathlib import Path
from typing import Final

import click

from .._output import as_json, paragraph
from . import page, read
from .history import RunHistory

WATCH_SECONDS: Final = 5.0  # between two looks at a run that is still going on
RELOAD_SECONDS: Final = 10  # until an open page of such a run reloads itself


def run_view(paths: Sequence[Path], output: Path | None, *, opens: bool, watches: bool, json: bool) -> None:
    """Write the page, and say what it shows.

    Args:
        paths: of each run its directory, its .wandb file, or wandb/; the first is shown beside each of the others.
        output: the page, or a directory for it; None: here.
        opens: show it in the browser.
        watches: write it again until the run, the only one, has finished.
        json: print one JSON object; everything else goes to standard error.
    """
    histories, written = _write(paths, output, reload=watches)
    for history in histories:
        _say_notes(history, err=json)
    if json:
        of_runs = [_facts(history) for history in histories]
        as_json({"page": str(written.resolve()), **(of_runs[0] if len(of_runs) == 1 else {"runs": of_runs})})
    else:
        _say_contents(histories, written)
    if opens and not webbrowser.open(written.resolve().as_uri()):
        click.echo(f"no browser could be started; open {written.resolve().as_uri()} yourself", err=json)
    while watches and not histories[0].finished:
        time.sleep(WATCH_SECONDS)
        histories, written = _write(paths, written, reload=True)
        said = f"{_many(histories[0].steps, 'row')}, {_many(histories[0].alerts, 'alert')}"
        click.echo(f"{time.strftime('%H:%M:%S')}  {said}", err=json)


def _write(paths: Sequence[Path], output: Path | None, *, reload: bool) -> tuple[list[RunHistory], Path]:
    progress = _say_progress if sys.stderr.isatty() else None
    histories = [read.read_run(path, progress=progress) for path in paths]
    target = output or Path()
    if target.is_dir():
        target /= f"gradwatch-{'-'.join(history.run_id for history in histories)}.html"
    refresh_seconds = RELOAD_SECONDS if reload and not histories[0].finished else None
    page.write_page(histories[0], target, others=histories[1:], refresh_seconds=refresh_seconds)
    return histories, target


def _say_progress(rows: int) -> None:
    # Nobody knows how many rows are still to come: a count, not a bar. The next line that is printed replaces it.
    click.echo(f"\r  {rows} rows read\r", nl=False, err=True)


def _say_notes(history: RunHistory, *, err: bool) -> None:
    for note in history.notes:
        paragraph(note, indent=0, err=err)
    if history.num_rows and not len(history.steps):
        text = "The run has rows, but none of wandb_gradwatch: call watch(model) after wandb.init()."
        paragraph(text, indent=0, err=err)


def _say_contents(histories: Sequence[RunHistory], written: Path) -> None:
    for history in histories:
        found = click.style(f"{_many(history.steps, 'row')}, {_many(history.names, 'name')}, ", dim=True)
        alerts = click.style(_many(history.alerts, "alert"), fg="yellow" if history.alerts else None)
        click.echo(f"{written if len(histories) == 1 else history.run_id}  {found}{alerts}")
    if len(histories) > 1:
        click.echo(str(written))


def _facts(history: RunHistory) -> dict[str, object]:
    return {
        "run": history.run_id,
        "finished": history.finished,
        "rows": len(history.steps),
        "names": history.names,
        "alerts": [vars(alert) for alert in history.alerts],
        "notes": list(history.notes),
    }


def _many(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"
