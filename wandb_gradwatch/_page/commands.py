"""The commands about runs on this machine: `view` (the page), `diff` (where two runs differ) and `verdict`."""

import sys
import time
import webbrowser
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, Final

from .._analysis.formatting import listing, number, visible_text
from .._judgement.incident import LEVELS
from .._judgement.verdict import Verdict
from .._output import Styled, alert_title, as_json, pairs, paragraph, say, styled
from . import page, read
from .compare import MAX_RUNS, Comparison, compare, differing_settings, sentence
from .history import RunHistory
from .payload import own_role
from .serve import PageServer

POLL_SECONDS: Final = 3.0  # between two reads of the file; at least four times as long as a read takes
MAX_VERDICT_BYTES: Final = 2_600  # of the incidents in JSON: with the rest of the verdict about 1,000 tokens
MAX_IN_NAME: Final = 3  # runs whose ids are in the name of their page
MAX_IN_FULL: Final = 3  # incidents of which `verdict` prints the message
MAX_NAMED: Final = 8  # incidents of which `verdict` prints at least a line
LAST_LOOK_SECONDS: Final = 15.0  # after the run's end, for open pages to fetch the last rows


def run_view(paths: Sequence[Path], output: Path | None, *, opens: bool, watches: bool, json: bool) -> None:
    """Run the command `view`; with `json`, standard output gets one JSON object and nothing else."""
    progress = _say_progress if sys.stderr.isatty() else None
    if watches:
        histories = [_watch(paths[0], progress, opens=opens, err=json)]
    else:
        histories = list(_read_all(paths, progress, err=json))
    target = output or Path()
    if target.is_dir():
        names = [history.run_id for history in histories]
        target = page.page_in(target, *(names if len(names) <= MAX_IN_NAME else (names[0], f"{len(names)}-runs")))
    page.write_page(histories[0], target, others=histories[1:])
    for note in (note for history in histories for note in _notes(history)):
        paragraph(note, indent=0, err=json)
    if json:
        of_runs = [_facts(history) for history in histories]
        as_json({"page": str(target.resolve()), **(of_runs[0] if len(of_runs) == 1 else {"runs": of_runs})})
    else:
        _say_contents(histories, target)
    if opens and not watches:
        _open(target.resolve().as_uri(), err=json)


def _read_all(paths: Sequence[Path], progress: Callable[[int], None] | None, *, err: bool) -> Iterator[RunHistory]:
    """Read the runs of all paths, of a folder at most the MAX_RUNS newest; what is no run in a folder is left out."""
    for path in paths:
        files = read.find_run_files(path)
        if len(files) > MAX_RUNS:
            paragraph(f"{path} holds {len(files)} runs: the {MAX_RUNS} newest are shown.", indent=0, err=err)
        for file in files[:MAX_RUNS]:
            try:
                yield read.read_run(file, progress=progress)
            except ValueError as error:
                if len(files) == 1:
                    raise
                paragraph(f"left out: {error}", indent=0, err=err)


def _watch(path: Path, progress: Callable[[int], None] | None, *, opens: bool, err: bool) -> RunHistory:
    """Serve the page until Ctrl-C, or until the run has finished and open pages have its end; return what was read."""
    reader = read.reader_of(read.find_run_file(path))
    reader.read_on(progress=progress)
    server = PageServer(reader.history())
    pause = POLL_SECONDS
    try:
        say(f"{server.address}  follows the run on this machine alone; Ctrl-C ends it", err=err)
        if opens:
            _open(server.address, err=err)
        while not reader.finished:
            time.sleep(pause)
            started = time.monotonic()
            if reader.read_on():
                server.update(history := reader.history())
                say(f"{time.strftime('%H:%M:%S')}  {_many(history.steps, 'row')}, {history.verdict}", err=err)
            pause = max(POLL_SECONDS, 4 * (time.monotonic() - started))
        deadline = time.monotonic() + LAST_LOOK_SECONDS
        while 0 <= server.fetched < server.version and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 10)
    except KeyboardInterrupt:
        say(err=err)
    finally:
        server.close()
    return server.history


def _open(address: str, *, err: bool) -> None:
    if not webbrowser.open(address):
        say(f"no browser could be started; open {address} in a browser", err=err)


def _say_progress(rows: int) -> None:
    # The number of remaining rows is unknown, so print a count instead of a bar. The next output overwrites it.
    say(Styled(f"\r  {rows} rows read\r"), nl=False, err=True)


def _notes(history: RunHistory) -> Iterator[str]:
    yield from history.notes
    if not len(history.steps) and history.num_rows:
        yield "The run has rows, but none of wandb_gradwatch: call watch(model) after wandb.init()."
    elif not len(history.steps) and history.path.suffix == ".jsonl":
        yield "The file has no rows yet: the first one is written when the training has made log_every steps, or ends."
    elif not len(history.steps):
        yield (
            "The run has no rows yet. Rows of gradients are queued until the script calls run.log(), or the run ends; "
            "a process that is killed loses them. If the script never calls run.log(), use "
            "watch(model, sinks=[WandbSink(commit=True)])."
        )


def _say_contents(histories: Sequence[RunHistory], written: Path) -> None:
    for history in histories:
        found = styled(f"{_many(history.steps, 'row')}, {_many(history.names, 'name')}, ", dim=True)
        say(str(written) if len(histories) == 1 else history.run_id, "  ", found, _coloured(history.verdict))
    if len(histories) > 1:
        say(str(written))


def _facts(history: RunHistory) -> dict[str, object]:
    return {
        "run": history.run_id,
        "finished": history.finished,
        "rows": len(history.steps),
        "names": history.names,
        "verdict": history.verdict.to_dict(),
        "notes": list(history.notes),
    }


def _coloured(verdict: Verdict, *, bold: bool = False) -> Styled:
    return styled(verdict.sentence, fg={"warn": "yellow", "error": "red"}.get(verdict.status), bold=bold)


def run_verdict(path: Path, *, json: bool) -> int:
    """Print what is known of a run on one screen, or as one JSON object of about 1,000 tokens at most.

    Returns:
        The exit status: 0 no alert above INFO, 1 a WARN, 2 an ERROR, 3 nothing was measured, or the run cannot be read.
    """
    try:
        files = read.find_run_files(path)
        history = read.read_run(files[0])
    except (ValueError, OSError) as error:
        verdict = Verdict("unknown", visible_text(str(error)), num_steps=0, num_measured=0)
        say(f"Error: {error}", err=True)
    else:
        verdict = history.verdict
        if len(files) > 1:
            paragraph(f"{path} holds {len(files)} runs: this is the newest, {history.run_id}.", indent=0, err=True)
        for note in _notes(history):
            paragraph(note, indent=0, err=True)
        if not json:
            _say_verdict(verdict)
    if json:
        as_json(verdict.to_dict(max_bytes=MAX_VERDICT_BYTES))
    return verdict.exit_status


def _say_verdict(verdict: Verdict) -> None:
    say(_coloured(verdict, bold=True), ".")
    by_level = sorted(verdict.incidents, key=lambda one: -LEVELS.index(one.level))
    for incident in by_level[:MAX_IN_FULL]:
        say()
        say("  ", alert_title(incident.title, incident.level))
        paragraph(incident.message, indent=4)
    for incident in by_level[MAX_IN_FULL:MAX_NAMED]:
        say()
        say("  ", alert_title(incident.title, incident.level))
        paragraph(incident.headline, indent=4)
    if more := by_level[MAX_NAMED:]:
        say()
        say(f"  and {len(more)} more")


def _many(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def run_diff(first: Path, second: Path, *, json: bool) -> int:
    """Print where two runs differ; return the exit status: 0 alike, 1 different, 2 they cannot be compared."""
    try:
        runs = (read.read_run(first), read.read_run(second))
        found = compare(*runs)
    except ValueError as error:
        say(f"Error: {error}", err=True)
        return 2
    settings, parting = differing_settings(runs[0].config, runs[1].config), found.parting
    if json:
        of_runs = zip(runs, found.verdicts, strict=True)
        as_json(
            {
                "alike": found.alike,
                "sentence": sentence(found),
                "runs": [{"run": run.run_id, "name": run.name, "verdict": told.to_dict()} for run, told in of_runs],
                "step": None if parting is None else parting.step,
                "layer": None if parting is None else parting.name,
                "layers_that_part": 0 if parting is None else parting.num_layers,
                "equal_until": found.equal_until,
                "only_in_a": found.only[0],
                "only_in_b": found.only[1],
                "settings": settings,
            }
        )
    else:
        say(styled(sentence(found) + ".", bold=True))
        pairs([*_differences(found, runs), ("settings", listing(list(settings.items()), _changed) or "the same")])
    return int(not found.alike)


def _differences(found: Comparison, runs: tuple[RunHistory, RunHistory]) -> Iterator[tuple[str, str]]:
    """Yield the labels and texts that `diff` prints below its sentence."""
    last = int(found.steps[-1])
    for letter, run, verdict in zip("AB", runs, found.verdicts, strict=True):
        yield letter, f"{run.name or run.run_id}: {verdict}"
    windows = f"{_many(found.names, 'layer')}, {_many(found.steps, 'window')}"
    yield "compared", f"{windows}, steps {found.steps[0]} to {last}"
    if found.parting is not None:
        yield "layers that part", f"{found.parting.num_layers} of {len(found.names)}"
        if found.equal_until is not None:
            yield "equal", f"to six digits up to step {found.equal_until}"
    yield from ((f"only in {letter}", listing(names)) for letter, names in zip("AB", found.only, strict=True) if names)
    losses = [key for key in runs[0].own if key in runs[1].own and own_role(key) == "loss"]
    for key in losses[:2]:
        in_a, in_b = (run.own[key].values[run.own[key].steps <= last] for run in runs)
        if len(in_a) and len(in_b):
            yield key, f"{number(in_a[-1])} in A, {number(in_b[-1])} in B at step {last}"


def _changed(setting: tuple[str, list[Any]]) -> str:
    key, values = setting
    return f"{key} " + " → ".join("(not set)" if value is None else str(value) for value in values)
