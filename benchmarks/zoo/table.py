"""The result as JSON, and the page that shows it: docs/zoo.md."""

from __future__ import annotations

import datetime
import json
import math
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.table import with_table
from wandb_gradwatch._judgement.symptoms import SYMPTOMS

from .cases import CASES, LOCKED, SEALED_FAMILIES
from .pictures import PICTURES, file_name
from .score import Score, add_up

ROOT: Final = Path(__file__).parent.parent.parent
RESULTS, PAGE = ROOT / "benchmarks/results/zoo.json", ROOT / "docs/zoo.md"
ALERTS: Final = ROOT / "docs/alerts.md"
README: Final = ROOT / "README.md"
ZOO_BEGIN, ZOO_END = "<!-- zoo:begin -->", "<!-- zoo:end -->"
BEGIN, END = "<!-- by python -m benchmarks.zoo: begin -->", "<!-- by python -m benchmarks.zoo: end -->"

Others = Sequence[tuple[Score, Mapping[str, tuple[int, int | None]]]]

_INTRODUCTION = """# How often the alerts are right

Made by `python -m benchmarks.zoo`: {num_healthy} healthy trainings and {num_faulty} faulty ones ({num_faults} faults,
each in one or several healthy trainings), all small: 80 to 400 steps. They are data, `benchmarks/zoo/sets/`: each set
says what it is for, when it was written, and what of it nobody may tune on; each fault its first step, its layer, its
cause and the mutations that make it.

Thresholds may be chosen on one seed of some families only. The figures here come from another seed. Families that are
not used for choosing thresholds are shown separately: {kept_out}.

- **alarm**: an alert of level WARN or ERROR. **False alarm**: an alarm in a healthy training, or before the fault.
- **seen**: an alarm was raised after the fault began. **delay**: number of steps from the first bad step to the alert.
- **cause right**: the first alarm's incident names a right cause, alone or with a rival; as a share of all faulty runs,
  including those without an alarm. **no cause right**: it names one cause or two, and none of them is right.
- **messages**: alarms. **worth an ERROR**: the training failed, or its loss ended non-finite, or no lower than before
  the fault, or it falls for ever. Their steps saved: those after the first ERROR, as a share of those after the first
  bad step; an ERROR before the fault saves none.
- Every step is measured. In columns that say so, the default cadence decides, on a clock on which it measures the first
  ten steps, then about every n-th, and in between steps that look unusual; there, a delay of less than n steps counts
  as none.
- Faults that gradients, parameters and loss cannot distinguish from a healthy training are run, but not counted.
"""


# The columns of a result, and the families of each.
_PARTS: Final[dict[str, Callable[[Score], bool]]] = {
    "all": lambda score: True,
    "tuned families, other seeds": lambda score: not CASES[score.case].kept_out,
    "families kept out": lambda score: CASES[score.case].kept_out,
    "locked families": lambda score: score.family in LOCKED - SEALED_FAMILIES,
    "sealed families": lambda score: score.family in SEALED_FAMILIES,
}


def result_of(scores: Sequence[Score], others: Others, name: str, every: int) -> dict[str, Any]:
    """Return a column of the page for each part of the trainings of which some were run."""
    parts = {part: [one for one in scores if belongs(one)] for part, belongs in _PARTS.items()}
    return {
        "name": name,
        "every": every,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **{part: add_up(some) for part, some in parts.items() if some},
        "families": {family: add_up([one for one in scores if one.family == family]) for family in _families(scores)},
        "titles": _titles(scores),
        "others": {name: _other(others, name) for name in others[0][1]} if others else {},
    }


def _commit() -> str:
    """The last one that changed the package."""
    command = ["git", "log", "-1", "--format=%h", "--", "wandb_gradwatch"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _families(scores: Sequence[Score]) -> list[str]:
    """Those of which some were run, in the order in which they are defined."""
    ran = {one.family for one in scores}
    return [family for family in dict.fromkeys(case.family for case in CASES.values()) if family in ran]


def _titles(scores: Sequence[Score]) -> dict[str, dict[str, int]]:
    """By title: how often it was the first alarm of a fault, and how often a false one."""
    titles: dict[str, dict[str, int]] = {}
    for one in scores:
        for false in one.false:
            titles.setdefault(false.rpartition(" at step ")[0], {"right": 0, "false": 0})["false"] += 1
        if one.seen:
            titles.setdefault(one.title, {"right": 0, "false": 0})["right"] += 1
    return dict(sorted(titles.items()))


def _other(others: Others, name: str) -> dict[str, float]:
    healthy = [seen[name] for score, seen in others if score.healthy]
    faulty = [seen[name] for score, seen in others if not score.healthy and score.decidable]
    delays = [delay for _, delay in faulty if delay is not None]
    return {
        "false alarms per healthy run": sum(false for false, _ in healthy) / max(len(healthy), 1),
        "healthy runs with a WARN or ERROR": sum(bool(false) for false, _ in healthy) / max(len(healthy), 1),
        "seen": len(delays) / max(len(faulty), 1),
        "delay, median": median(delays) if delays else math.nan,
    }


def keep(result: dict[str, Any]) -> None:
    """Put a result in the file, in place of an older one of its name."""
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    results = [one for one in results if one["name"] != result["name"]] + [result]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_pages()


def write_pages() -> None:
    """Both pages anew, from the results that are kept."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(page_of(results), encoding="utf-8")
    ALERTS.write_text(with_titles(ALERTS.read_text(encoding="utf-8"), newest(results)), encoding="utf-8")
    README.write_text(with_worst(README.read_text(encoding="utf-8"), results), encoding="utf-8")


def with_worst(readme: str, results: Sequence[dict[str, Any]]) -> str:
    """The README with the worst score on trainings that nobody had seen while the judgement was made."""
    of_sealed = [(one["sealed families"], one["every"]) for one in results if "sealed families" in one]
    worst, every = min(of_sealed, key=lambda one: one[0]["cause right"])
    shares = {name: f"{100 * worst[name]:.0f} %" for name in ("seen", "cause right", "of which with a rival")}
    cadence = "if every step is measured" if every == 1 else f"if about one step in {every} is measured"
    text = (
        f"On {worst['faulty runs']:.0f} faulty trainings that its author had not seen, {cadence}, the judgement tells "
        f"{shares['seen']} of the faults and the right cause of {shares['cause right']} (in "
        f"{shares['of which with a rival']} as one of two); in {100 * worst['no cause right']:.0f} % no cause that it "
        f"names is right. {100 * worst['healthy runs with a WARN or ERROR']:.0f} % of {worst['healthy runs']:.0f} "
        "healthy ones are disturbed."
    )
    return with_table(readme, text, begin=ZOO_BEGIN, end=ZOO_END)


def newest(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The newest of those that measured every step."""
    return next(result for result in reversed(results) if result.get("every", 1) == 1)


def with_titles(page: str, result: dict[str, Any]) -> str:
    """docs/alerts.md with how often each title was right and wrong in this result, between its two marks."""
    before, _, rest = page.partition(BEGIN)
    *_, after = rest.partition(END)
    return "\n".join([before + BEGIN, *_titles_with_pictures(result), END + after])


def _titles_with_pictures(result: dict[str, Any]) -> list[str]:
    healthy, faulty = (result["all"][runs] for runs in ("healthy runs", "faulty runs"))
    lines = [
        f"Of {faulty} faulty trainings and {healthy} healthy ones, {result['commit']}, {result['date']}; more in "
        "[How often the alerts are right](zoo.md).",
        "",
        "| title | first alert of a fault | false | a training in which it is right |",
        "|---|--:|--:|---|",
    ]
    for title in alert_titles():
        row = result["titles"].get(title, {"right": 0, "false": 0})
        picture = f"![{title}](pictures/{file_name(title)})" if title in PICTURES else ""
        lines.append(f"| {title} | {row['right']} | {row['false']} | {picture} |")
    return lines


def alert_titles() -> list[str]:
    """Those of the judgement, and of what the capture tells by itself."""
    titles = dict.fromkeys(symptom.title for symptom in SYMPTOMS)
    return [*titles, "Optimizer without the model", "Optimizer settings"]


def page_of(results: Sequence[dict[str, Any]]) -> str:
    """The whole page."""
    result = newest(results)
    ran = [case for case in CASES.values() if case.family in result["families"]]  # families are added before they run
    faulty = [case for case in ran if case.fault is not None]
    kept_out = "; ".join(
        ", ".join(sorted({case.family for case in ran if case.kept_out and (case.fault is None) is healthy}))
        for healthy in (True, False)
    )
    lines = [
        _INTRODUCTION.format(
            num_healthy=len(ran) - len(faulty),
            num_faulty=len(faulty),
            num_faults=len({case.fault.name + case.family for case in faulty if case.fault is not None}),
            kept_out=kept_out,
        ),
        *_columns(results),
        *_beside_others(result),
        *_by_family(result),
        *_by_title(result),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _columns(results: Sequence[dict[str, Any]]) -> list[str]:
    heads = [
        (f"{result['name']} ({result['commit']}, {result['date']}): {part}", result[part])
        for result in results
        for part in _PARTS
        if part in result
    ]
    lines = ["## In short", "", "| | " + " | ".join(head for head, _ in heads) + " |", "|---|" + "--:|" * len(heads)]
    for figure in heads[-1][1]:
        lines.append(f"| {figure} | " + " | ".join(_number(figure, column.get(figure)) for _, column in heads) + " |")
    return [*lines, ""]


def _beside_others(result: dict[str, Any]) -> list[str]:
    figures = ("false alarms per healthy run", "healthy runs with a WARN or ERROR", "seen", "delay, median")
    rows = {f"**wandb_gradwatch, {result['name']}**": result["all"]} | result["others"]
    lines = ["## Beside others, on the same trainings", "", "| | " + " | ".join(figures) + " |", "|---|" + "--:|" * 4]
    lines += [f"| {name} | " + " | ".join(_number(f, row.get(f)) for f in figures) + " |" for name, row in rows.items()]
    return [*lines, ""]


def _by_family(result: dict[str, Any]) -> list[str]:
    lines = ["## By family", "", "| healthy | runs | with a WARN or ERROR | with an ERROR |", "|---|--:|--:|--:|"]
    for family, row in result["families"].items():
        if row["healthy runs"]:
            figures = (
                "healthy runs",
                "healthy runs with a WARN or ERROR",
                "healthy runs with an ERROR, which stops them",
            )
            lines.append(f"| {family} | " + " | ".join(_number(f, row.get(f)) for f in figures) + " |")
    lines += ["", "| faulty | runs | seen | cause right | no cause right |", "|---|--:|--:|--:|--:|"]
    for family, row in result["families"].items():
        if row["faulty runs"]:
            figures = ("faulty runs", "seen", "cause right", "no cause right")
            lines.append(f"| {family} | " + " | ".join(_number(f, row.get(f)) for f in figures) + " |")
    return [*lines, ""]


def _by_title(result: dict[str, Any]) -> list[str]:
    lines = ["## By title", "", "| title | first alarm of a fault | false alarms |", "|---|--:|--:|"]
    return [*lines, *(f"| {title} | {row['right']} | {row['false']} |" for title, row in result["titles"].items())]


def _number(figure: str, value: float | None) -> str:
    """Write a figure; one that a result of an older scoring does not have is a dash."""
    if value is None or math.isnan(value):
        return "–"
    if (
        figure in ("healthy runs", "faulty runs", "faulty runs worth an ERROR")
        or "median" in figure
        or "largest" in figure
    ):
        return f"{value:g}"
    return f"{value:.2f}" if " per " in figure else f"{100 * value:.0f} %"
