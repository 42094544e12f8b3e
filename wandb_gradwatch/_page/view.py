"""The command `view`: the page of a run on this machine, once or for as long as the run goes on."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Sized
from pathlib import Path
from typing import Final

from .._terminal import Terminal
from . import page, read
from .history import RunHistory

WATCH_SECONDS: Final = 5.0  # between two looks at a run that is still going on
RELOAD_SECONDS: Final = 10  # until an open page of such a run reloads itself


def run_view(path: Path, output: Path | None, *, opens: bool, watches: bool, as_json: bool, terminal: Terminal) -> int:
    """Write the page, say what it shows, and return the exit status.

    Args:
        path: a run's directory, its .wandb file, or wandb/.
        output: the page, or a directory for it; None: here.
        opens: show it in the browser.
        watches: write it again until the run has finished.
        as_json: print one JSON object; everything else goes to stderr.
        terminal: where to write.
    """
    messages = Terminal(sys.stderr) if as_json else terminal
    history, written = _write(path, output, messages, reload=watches)
    _say_notes(history, messages)
    if as_json:
        terminal.json(_facts(history, written))
    else:
        _say_contents(history, written, terminal)
    if opens and not webbrowser.open(written.resolve().as_uri()):
        messages.print(f"no browser could be started; open {written.resolve().as_uri()} yourself")
    while watches and not history.finished:
        time.sleep(WATCH_SECONDS)
        history, written = _write(path, written, messages, reload=True)
        said = f"{_many(history.steps, 'row')}, {_many(history.alerts, 'alert')}"
        messages.print(f"{time.strftime('%H:%M:%S')}  {said}")
    return 0


def _write(path: Path, output: Path | None, terminal: Terminal, *, reload: bool) -> tuple[RunHistory, Path]:
    # Nobody knows how many rows are still to come: a count, not a bar.
    history = read.read_run(path, progress=lambda rows: terminal.transient(f"  {rows} rows read"))
    terminal.transient("")
    target = output or Path()
    if target.is_dir():
        target /= f"gradwatch-{history.run_id}.html"
    page.write_page(history, target, refresh_seconds=RELOAD_SECONDS if reload and not history.finished else None)
    return history, target


def _say_notes(history: RunHistory, terminal: Terminal) -> None:
    for note in history.notes:
        terminal.paragraph(note, indent=0)
    if history.num_rows and not len(history.steps):
        terminal.paragraph("The run has rows, but none of wandb_gradwatch: call watch(model) after wandb.init().", 0)


def _say_contents(history: RunHistory, written: Path, terminal: Terminal) -> None:
    found = f"{_many(history.steps, 'row')}, {_many(history.names, 'name')}, "
    terminal.print(
        f"{written}  {terminal.style(found, 'dim')}"
        + terminal.style(_many(history.alerts, "alert"), "yellow" if history.alerts else "dim")
    )


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
