"""What kernel.py has measured, as a table, as a sentence for the README, and beside what was asked of the kernels."""

from __future__ import annotations

from typing import Any

from benchmarks.kernel_step import AddedTime

_MOST_OF_THE_LIMIT = 1.4
OURS = ("columns", "+ parameters", "+ histogram", "all", "sum_sq")  # the candidates of kernel.py that are ours
BEGIN, END = "<!-- kernel:begin -->", "<!-- kernel:end -->"


def render(report: dict[str, Any]) -> str:
    """The table: every list, what of ours and of others' takes how long, and the real step."""
    lines = [*_lists(report), "", *_limits(report)] if report["results"] else []
    if report["added_time"] is not None:
        added = AddedTime(**report["added_time"])
        lines += [
            "",
            f"{_of_a_step(added)} The noise is {added.noise:.3f} ms. The monitor says {added.said:.3f} ms per sample; "
            f"its kernels take {added.gpu:.3f} ms, with a histogram every step {added.gpu_everything:.3f} ms.",
        ]
    if failed := failures_of(report):
        lines += ["", *(f"Failed: {what}: {why.removesuffix('.')}." for what, why in failed.items())]
    return "\n".join(lines)


def _lists(report: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(name for result in report["results"] for name in result["candidates"]))
    lines = [
        f"{report['machine']['device']}: GPU ms (share of a copy's bandwidth) / host ms.",
        "",
        "| list | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for result in report["results"]:
        cells = [_cell(result["candidates"].get(name)) for name in names]
        lines.append(f"| {result['model']}, {result['dtype']} | " + " | ".join(cells) + " |")
    return lines


def _limits(report: dict[str, Any]) -> list[str]:
    """What must be read, how long a copy at its bandwidth takes for that, and how long the kernels take."""
    lines = [
        "The limit is the time in which a copy moves the bytes that must be read.",
        "",
        "| list | measured | million bytes | limit, ms | ours, ms | times the limit |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for result in report["results"]:
        for name in OURS:
            figure = result["candidates"].get(name)
            cells = ["not done"] * 4
            if figure is not None:
                limit = figure["gpu_ms"] * figure["of_copy"]
                cells = [f"{figure['gb_per_s'] * figure['gpu_ms']:.1f}", f"{limit:.3f}", f"{figure['gpu_ms']:.3f}"]
                cells.append(f"{figure['gpu_ms'] / limit:.2f}")
            lines.append(f"| {result['model']}, {result['dtype']} | {name} | " + " | ".join(cells) + " |")
    return lines


def sentence(report: dict[str, Any]) -> str:
    """Return the README's sentence about a real step; empty if none was measured."""
    if report["added_time"] is None:
        return ""
    step = _of_a_step(AddedTime(**report["added_time"]))
    return f"On an {report['machine']['device']}: {step} More [on a GPU](docs/gpu.md)."


def _of_a_step(added: AddedTime) -> str:
    steps = "every step" if added.default_every == 1 else f"one in {added.default_every:.3g} steps"
    waits = f"the host waits {added.num_waits} times more often" if added.num_waits else "the host never waits"
    return (
        f"a training step of GPT-2 small (bfloat16 autocast, 8 x 1024 tokens) takes {added.plain:.1f} ms. Watching it "
        f"adds {added.added:.2f} ms ({added.added_ratio:.1%}), and {waits}; the default measures {steps}."
    )


def _cell(figure: dict[str, float] | None) -> str:
    if figure is None:
        return "failed"
    return f"{figure['gpu_ms']:.3f} ({figure['of_copy']:.0%}) / {figure['host_ms']:.2f}"


def failures_of(report: dict[str, Any]) -> dict[str, str]:
    """What went wrong, by where."""
    failed = {
        f"{result['model']}, {result['dtype']}, {what}": why
        for result in report["results"]
        for what, why in result["failures"].items()
    }
    return failed | report["failures"]


def targets(report: dict[str, Any]) -> list[str]:
    """What was asked of the kernels, and what they reach; only where it was measured."""
    figures = {(result["model"], result["dtype"]): result["candidates"] for result in report["results"]}
    billion, small = figures.get(("GPT 1.2B", "bfloat16"), {}), figures.get(("GPT-2 small", "bfloat16"), {})
    added = None if report["added_time"] is None else AddedTime(**report["added_time"])
    asked = [
        ("1.2B bf16, columns, share of a copy", billion.get("columns", {}).get("of_copy"), 0.70, True),
        ("1.2B bf16, + histogram, share of a copy", billion.get("+ histogram", {}).get("of_copy"), 0.35, True),
        ("GPT-2 small bf16, all, GPU ms", small.get("all", {}).get("gpu_ms"), 0.5, False),
        ("GPT-2 small bf16, all, host ms", small.get("all", {}).get("host_ms"), 0.3, False),
        *(
            (f"{model} {dtype}, all, times the limit", share and 1 / share, _MOST_OF_THE_LIMIT, False)
            for (model, dtype), candidates in figures.items()
            for share in (candidates.get("all", {}).get("of_copy"),)
        ),
        ("a training step, share added", added and added.added_ratio, 0.01, False),
        ("a training step, waits of the host more", added and added.num_waits, 0, False),
    ]
    return [
        f"{'met   ' if (seen >= limit if at_least else seen <= limit) else 'MISSED'}  {what}: {seen:.4g}, "
        f"asked {'at least' if at_least else 'at most'} {limit:g}"
        for what, seen, limit, at_least in asked
        if seen is not None
    ]
