"""The command line: wandb-gradwatch demo | view | verdict | diff | report | workspace | doctor.

Exit status: 0 success, 1 a problem was found or occurred (reported in one line), 2 wrong usage, 130 Ctrl-C; `diff` and
`verdict` have their own. Each command imports what it needs when it runs, so that `--help` is quick and an extra is
only needed by the commands that use it.
"""

import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, NoReturn
from urllib.parse import unquote, urlsplit

import click

from . import __version__
from ._analysis.formatting import visible_text
from ._judgement.verdict import EXIT_STATUS
from ._output import as_json, say

PROGRAM: Final = "wandb-gradwatch"
DEBUG_VARIABLE: Final = "WANDB_GRADWATCH_DEBUG"

_PATH: Final = click.Path(path_type=Path)
_COUNT_SUFFIX: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


class _Commands(click.Group):
    """Reports errors whose message says what to do in one line; all others keep their traceback."""

    def invoke(self, context: click.Context) -> NoReturn:
        try:
            context.exit(super().invoke(context) or 0)  # a command returns its exit status, or None
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except KeyboardInterrupt:
            say(err=True)
            say("Stopped.", err=True)
            context.exit(130)
        except Exception as error:
            # The messages for bad input, a missing file or extra, and of errors of W&B say what to do.
            of_wandb: type[Exception] = getattr(sys.modules.get("wandb"), "Error", ValueError)
            is_for_the_user = isinstance(error, (ValueError, RuntimeError, OSError, ImportError, of_wandb))
            if context.params["debug"] or not is_for_the_user:
                raise
            raise click.ClickException(visible_text(str(error))) from error


def _examples(command: str, *examples: str) -> str:
    """Return the end of a command's help; click keeps the line breaks of a paragraph that begins with \\b."""
    return "\b\nExamples:\n" + "\n".join(f"  {PROGRAM} {command} {example}".rstrip() for example in examples)


def _target(context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, str, str | None]:
    """Parse ENTITY/PROJECT, ENTITY/PROJECT/RUN, or the URL of either page."""
    is_url = "://" in text
    parts = [part for part in (unquote(urlsplit(text).path) if is_url else text).split("/") if part]
    if is_url or parts[2:3] == ["runs"]:  # other pages of a project, such as /sweeps, name no run
        parts = parts[:2] + (parts[3:4] if parts[2:3] == ["runs"] else [])
    if len(parts) not in (2, 3):
        raise click.BadParameter(f"{text!r} is not ENTITY/PROJECT or ENTITY/PROJECT/RUN")
    return parts[0], parts[1], parts[2] if len(parts) == 3 else None


def _count(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Parse a number of parameters with a suffix: 500k, 10M, 1.3B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower().replace(",", "").replace("_", ""))
    count = round(float(match[1]) * _COUNT_SUFFIX[match[2]]) if match else 0
    if count < 1:
        raise click.BadParameter(f"{text!r} is not a number of parameters such as 500k, 10M or 1.3B")
    return count


_json = click.option("--json", "json", is_flag=True, help="Print one JSON object, for scripts.")


@click.group(cls=_Commands, epilog="Exit status: 0 success, 1 a problem, 2 wrong usage, 130 stopped by Ctrl-C.")
@click.version_option(__version__, prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, envvar=DEBUG_VARIABLE, help=f"Show tracebacks (also: {DEBUG_VARIABLE}=1).")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Monitor the gradients of every layer in Weights & Biases."""
    if os.environ.get("NO_COLOR"):
        context.color = False


@main.command(epilog=_examples("demo", "", "--steps 200 --output elsewhere"))
@click.option("--output", type=_PATH, default="demo-run", show_default=True, metavar="DIR")
@click.option("--steps", type=int, metavar="N", help="Training steps; the accident happens in the middle.")
@click.option("--online", is_flag=True, help="Log to your W&B account instead of a local file.")
def demo(output: Path, steps: int | None, online: bool) -> int:
    """Train a small GPT, break it on purpose, and show the alert."""
    from ._demo import DEFAULT_STEPS, run_demo

    return run_demo(output, steps=DEFAULT_STEPS if steps is None else steps, online=online)


@main.command(
    epilog=_examples(
        "view",
        "wandb/latest-run --open",
        "wandb/offline-run-20250101_120000-abcd1234 --output page.html",
        "wandb/latest-run --watch",
        "wandb/offline-run-20250101_120000-abcd1234 wandb/latest-run",
        "wandb/",
    )
)
@click.argument("path", type=_PATH)
@click.argument("others", type=_PATH, nargs=-1, metavar="[PATH]...")
@click.option(
    "--output", type=_PATH, metavar="FILE", help="File or directory to write to.  [default: gradwatch-RUN.html here]"
)
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--watch", "watches", is_flag=True, help="Serve the page on this machine and follow the run until Ctrl-C."
)
@_json
def view(path: Path, others: tuple[Path, ...], output: Path | None, opens: bool, watches: bool, json: bool) -> None:
    """Write a self-contained HTML page about runs on this machine, finished or still running.

    PATH is a run's directory, its .wandb file, a JSONLSink's file, or a folder of runs such as wandb/. Of 2 to 100 runs
    the page is a table, the worst first, and shows two of them side by side.
    """
    from ._page.commands import run_view

    if watches and others:
        raise click.UsageError("--watch follows one run; give one PATH")
    run_view([path, *others], output, opens=opens, watches=watches, json=json)


class _NoVerdict(click.ClickException):
    exit_code = EXIT_STATUS["unknown"]


class _VerdictCommand(click.Command):
    """Wrong usage and failures have status 3, because 1 and 2 say something of the run."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            raise _NoVerdict(error.format_message()) from error

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if context.find_root().params["debug"]:
                raise
            raise _NoVerdict(visible_text(f"{type(error).__name__}: {error}")) from error


@main.command(cls=_VerdictCommand, epilog=_examples("verdict", "wandb/latest-run", "wandb/latest-run --json"))
@click.argument("run", type=_PATH)
@_json
def verdict(run: Path, json: bool) -> int:
    """Report what is known of a run on this machine, finished or still running.

    RUN is a run's directory, its .wandb file, or wandb/.

    Exit status: 0 no alert above INFO, 1 a WARN, 2 an ERROR, 3 nothing was measured or the run cannot be read.
    """
    from ._page.commands import run_verdict

    return run_verdict(run, json=json)


@main.command(epilog=_examples("diff", "wandb/offline-run-20250101_120000-abcd1234 wandb/latest-run"))
@click.argument("first", type=_PATH, metavar="RUN_A")
@click.argument("second", type=_PATH, metavar="RUN_B")
@_json
def diff(first: Path, second: Path, json: bool) -> int:
    """Report where two runs differ by more than their own variation.

    Exit status: 0 no difference, 1 a difference, 2 the runs cannot be compared.
    """
    from ._page.commands import run_diff

    return run_diff(first, second, json=json)


def _previewed(command: Callable[..., str]) -> Any:
    """Add the options of a command that can write a preview, and print the URL that the command returns."""

    source = "The run's files on this machine: what it has data for is shown.  [default: wandb/*-RUN here]"

    @click.option("--from", "path", type=_PATH, metavar="PATH", help=source)
    @click.option("--dry-run", "previews", is_flag=True, help="Write a preview page; send nothing.")
    @click.option("--output", type=_PATH, metavar="FILE", help="File for the preview.")
    @_json
    @wraps(command)
    def print_url(*, previews: bool, output: Path | None, json: bool, **options: Any) -> None:
        if output is not None and not previews:
            raise click.UsageError(
                "--output is where --dry-run writes the preview; add --dry-run, or leave out --output"
            )
        url = command(previews=previews, output=output, **options)
        if json:
            as_json({"url": url})
        else:
            say(url)

    return print_url


@main.command(epilog=_examples("report", "my-team/my-project", "my-team/my-project/abcd1234 --dry-run"))
@click.argument("target", metavar="ENTITY/PROJECT[/RUN]", callback=_target)
@_previewed
def report(target: tuple[str, str, str | None], path: Path | None, previews: bool, output: Path | None) -> str:
    """Create a W&B report about the gradients of a project or of one run. Running it again updates the report.

    W&B reports cannot show alerts, so the incidents are copied from the run's files on this machine.
    """
    from ._report.report import create_report, run_on_disk, write_preview

    history = run_on_disk(target[2], path)
    if previews:
        return write_preview(*target, history=history, output=output).as_uri()
    return create_report(*target, history=history)


@main.command(
    epilog=_examples("workspace", "my-team/my-project", "my-team/my-project --dry-run --from wandb/latest-run")
)
@click.argument("target", metavar="ENTITY/PROJECT", callback=_target)
@_previewed
def workspace(target: tuple[str, str, str | None], path: Path | None, previews: bool, output: Path | None) -> str:
    """Save a W&B workspace view with the panels of the gradients. Running it again updates the view."""
    from ._report.report import run_on_disk, save_workspace, write_workspace_preview

    entity, project, run = target
    if run is not None:
        raise click.BadParameter(f"a workspace belongs to a project, not to a run: {entity}/{project}")
    history = run_on_disk(None, path)
    if previews:
        return write_workspace_preview(entity, project, history=history, output=output).as_uri()
    return save_workspace(entity, project, history=history)


@main.command(epilog=_examples("doctor", "", "--parameters 125M", "--no-measure --json"))
@click.option(
    "--parameters",
    callback=_count,
    default="10M",
    show_default=True,
    metavar="N",
    help="Size of the model to measure with, such as 500k or 1.3B.",
)
@click.option("--no-measure", is_flag=True, help="Check the environment only; do not train.")
@_json
def doctor(parameters: int, no_measure: bool, json: bool) -> int:
    """Check this environment, measure the overhead of watch() here, and recommend changes."""
    from ._doctor import run_doctor

    return run_doctor(None if no_measure else parameters, json=json)
