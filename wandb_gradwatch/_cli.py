"""The command line: wandb-gradwatch demo | view | report | workspace | doctor.

Exit status: 0 all is well, 1 a problem was found or met (said in one line), 2 the command line itself is wrong,
130 Ctrl-C. What a command needs is imported when it runs, so that `--help` is quick and no extra is missed early.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from . import __version__
from ._terminal import Terminal

PROGRAM: Final = "wandb-gradwatch"
DEBUG_VARIABLE: Final = "WANDB_GRADWATCH_DEBUG"

_COUNT_SUFFIX: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
        return status
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `wandb-gradwatch doctor | head`: whoever reads has read enough
        # Python flushes stdout once more at its end, into the same closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if arguments.debug or not _is_for_the_user(error):
            raise
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1


def _is_for_the_user(error: Exception) -> bool:
    """Whether the message alone tells what to do: a bad input, a missing file or extra, W&B's own refusal."""
    wandb = sys.modules.get("wandb")
    kinds: tuple[type[Exception], ...] = (ValueError, RuntimeError, OSError, ImportError)
    return isinstance(error, kinds if wandb is None else (*kinds, wandb.Error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="See what the gradients of every layer do, in Weights & Biases.",
        epilog="exit status: 0 all is well, 1 a problem (said in one line), 2 wrong usage, 130 stopped by Ctrl-C",
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.add_argument(
        "--debug",
        action="store_true",
        default=bool(os.environ.get(DEBUG_VARIABLE)),
        help=f"show the traceback of an error (also: {DEBUG_VARIABLE}=1)",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_view(commands)
    _add_report(commands)
    _add_workspace(commands)
    _add_doctor(commands)
    return parser


_Commands = argparse._SubParsersAction  # argparse gives this type no public name


def _add(
    commands: _Commands[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    *examples: str,
) -> argparse.ArgumentParser:
    """A command with its help text; every one of them shows examples."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {PROGRAM} {name} {example}".rstrip() for example in examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")


# ---- demo


def _add_demo(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands, "demo", _demo, "train a small GPT, break it, and see the alert", "", "--steps 200 --output elsewhere"
    )
    parser.add_argument("--output", type=Path, default=Path("demo-run"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--steps", type=int, metavar="N", help="how long to train; the accident is in the middle")
    parser.add_argument("--online", action="store_true", help="log to your W&B account instead of a local file")


def _demo(arguments: argparse.Namespace) -> int:
    from ._demo import DEFAULT_STEPS, run_demo

    steps = DEFAULT_STEPS if arguments.steps is None else arguments.steps
    return run_demo(arguments.output, steps=steps, online=arguments.online, terminal=Terminal())


# ---- view


def _add_view(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "view",
        _view,
        "write one self-contained HTML page about a run on this machine, finished or still going on",
        "wandb/latest-run --open",
        "wandb/offline-run-20250101_120000-abcd1234 --output page.html",
        "wandb/latest-run --watch",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a run's directory, its .wandb file, or wandb/")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: gradwatch-RUN.html here; or a directory")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    parser.add_argument(
        "--watch", action="store_true", help="write and reload it while the run goes on; Ctrl-C ends it"
    )
    _add_json(parser)


def _view(arguments: argparse.Namespace) -> int:
    from ._page.view import run_view

    return run_view(
        arguments.path,
        arguments.output,
        opens=arguments.open,
        watches=arguments.watch,
        as_json=arguments.json,
        terminal=Terminal(),
    )


# ---- report, workspace


def _add_report(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "report",
        _report,
        "create a W&B report about the gradients of a project or of one run; creating it again updates it",
        "my-team/my-project",
        "my-team/my-project/abcd1234",
    )
    parser.add_argument("target", metavar="ENTITY/PROJECT[/RUN]", type=_target, help="or the page's address")
    _add_json(parser)


def _report(arguments: argparse.Namespace) -> int:
    from ._report.report import create_report

    entity, project, run = arguments.target
    return _say_url(create_report(entity, project, run), arguments.json)


def _add_workspace(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "workspace",
        _workspace,
        "save a W&B workspace view with the gradients' panels; saving again updates it",
        "my-team/my-project",
    )
    parser.add_argument("target", metavar="ENTITY/PROJECT", type=_project, help="or the page's address")
    _add_json(parser)


def _workspace(arguments: argparse.Namespace) -> int:
    from ._report.workspace import save_workspace

    entity, project = arguments.target
    return _say_url(save_workspace(entity, project), arguments.json)


def _say_url(url: str, as_json: bool) -> int:
    terminal = Terminal()
    if as_json:
        terminal.json({"url": url})
    else:
        terminal.print(url)
    return 0


def _target(text: str) -> tuple[str, str, str | None]:
    """ENTITY/PROJECT, ENTITY/PROJECT/RUN or the address of either's page."""
    path = unquote(urlsplit(text).path) if "://" in text else text
    parts = [part for part in path.strip("/").split("/") if part]
    if len(parts) > 2 and parts[2] in ("runs", "workspace", "table", "overview"):
        parts = parts[:2] + (parts[3:4] if parts[2] == "runs" else [])
    if len(parts) not in (2, 3):
        raise argparse.ArgumentTypeError(f"{text!r} is not ENTITY/PROJECT or ENTITY/PROJECT/RUN")
    return parts[0], parts[1], parts[2] if len(parts) == 3 else None


def _project(text: str) -> tuple[str, str]:
    entity, project, run = _target(text)
    if run is not None:
        raise argparse.ArgumentTypeError(f"a workspace belongs to a project, not to a run: {entity}/{project}")
    return entity, project


# ---- doctor


def _add_doctor(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "doctor",
        _doctor,
        "check this environment, measure what watching costs here, and say what to change",
        "",
        "--parameters 125M",
        "--no-measure --json",
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--parameters",
        type=_count,
        default=_count("10M"),
        metavar="N",
        help="size of the model to measure with, such as 500k, 10M (the default) or 1.3B",
    )
    size.add_argument("--no-measure", action="store_true", help="only look, do not train")
    _add_json(parser)


def _doctor(arguments: argparse.Namespace) -> int:
    from ._doctor import run_doctor

    num_parameters = None if arguments.no_measure else arguments.parameters
    return run_doctor(num_parameters, as_json=arguments.json, terminal=Terminal())


def _count(text: str) -> int:
    """A number of parameters as people write it: 500k, 10M, 1.3B."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower().replace(",", "").replace("_", ""))
    count = round(float(match[1]) * _COUNT_SUFFIX[match[2]]) if match else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of parameters such as 500k, 10M or 1.3B")
    return count


if __name__ == "__main__":
    sys.exit(main())
