"""The command `view`: the page of a run on this machine, once or for as long as the run goes on."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Callable, Sequence, Sized
from pathlib import Path

import click

from .._output import as_json, paragraph
from . import page, read, serve
from .history import RunHistory


def run_view(paths: Sequence[Path], output: Path | None, *, opens: bool, watches: bool, json: bool) -> None:
    """Do what `wandb-gradwatch view` was asked for; with `json` only one JSON object goes to standard output."""
    progress = _say_progress if sys.stderr.isatty() else None
    if watches:
        histories = [_watch(paths[0], progress, opens=opens, err=json)]
    else:
        histories = [read.read_run(path, progress=progress) for path in paths]
    written = _write(histories, output)
    for history in histories:
        _say_notes(history, err=json)
    if json:
        of_runs = [_facts(history) for history in histories]
        as_json({"page": str(written.resolve()), **(of_runs[0] if len(of_runs) == 1 else {"runs": of_runs})})
    else:
        _say_contents(histories, written)
    if opens and not watches:
        _open(written.resolve().as_uri(), err=json)


def _watch(path: Path, progress: Callable[[int], None] | None, *, opens: bool, err: bool) -> RunHistory:
    """Serve the run's page until the run has finished, or Ctrl-C; what was read until then."""
    reader = read.RunReader(read.find_run_file(path))
    reader.read_on(progress=progress)
    server = serve.PageServer(reader.history())
    try:
        click.echo(f"{server.address}  follows the run on this machine alone; Ctrl-C ends it", err=err)
        if opens:
            _open(server.address, err=err)
        return serve.follow(reader, server, lambda history: _say_change(history, err=err))
    except KeyboardInterrupt:
        click.echo("", err=err)
        return server.history
    finally:
        server.close()


def _say_change(history: RunHistory, *, err: bool) -> None:
    said = f"{_many(history.steps, 'row')}, {_many(history.alerts, 'alert')}"
    click.echo(f"{time.strftime('%H:%M:%S')}  {said}", err=err)


def _open(address: str, *, err: bool) -> None:
    if not webbrowser.open(address):
        click.echo(f"no browser could be started; open {address} yourself", err=err)


def _write(histories: Sequence[RunHistory], output: Path | None) -> Path:
    target = output or Path()
    if target.is_dir():
        target /= f"gradwatch-{'-'.join(history.run_id for history in histories)}.html"
    page.write_page(histories[0], target, others=histories[1:])
    return target


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
