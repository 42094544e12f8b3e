"""The W&B report, or the workspace, as a page on this machine, before anything is sent: its panels are drawn from a
run's file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._page.history import RunHistory, natural_order
from .._page.packing import Blob, pool, pool_width
from .._page.page import render_content, write_html
from .._page.payload import MAX_POINTS, build_payload
from .report import CHART_NAME, build_report
from .workspace import build_workspace

MAX_LINES: Final = 24  # of one panel


def write_preview(
    entity: str, project: str, run: str | None, *, history: RunHistory | None, output: Path | None
) -> Path:
    """Write the preview of the report that `create_report` would save, without W&B, and return its path."""
    alerts = () if history is None else history.alerts
    report = build_report(entity, project, run, alerts=alerts, flow_chart=f"{entity}/{CHART_NAME}")
    # W&B makes the table of contents of the headings.
    blocks = [_block(one) for one in report.blocks if type(one).__name__ != "TableOfContents"]
    page = _preview("report", report.title, blocks, history)
    return write_html(page, output or Path(f"gradwatch-report-{run or project}.html"))


def write_workspace_preview(entity: str, project: str, *, history: RunHistory | None, output: Path | None) -> Path:
    """The same of the workspace view that `save_workspace` would save."""
    workspace = build_workspace(entity, project)
    sections = [
        {"kind": "Section", "text": one.name, "isOpen": one.is_open, "panels": one.panels} for one in workspace.sections
    ]
    page = _preview("workspace view", workspace.name, sections, history)
    return write_html(page, output or Path(f"gradwatch-workspace-{project}.html"))


def _preview(what: str, title: str, blocks: list[dict[str, Any]], history: RunHistory | None) -> str:
    """As HTML: blocks of a kind with a text, or with panels of wandb-workspaces. No history: panels name their keys."""
    drawn = history or RunHistory(Path(), "no run", np.empty(0, dtype=np.int64), {})
    content, blob = build_payload(drawn)
    for block in blocks:
        block["panels"] = [_panel(panel, drawn, blob) for panel in block.get("panels", ())]
    told = {"what": what, "title": title, "isDrawn": history is not None, "blocks": blocks}
    return render_content(f"{title} · preview", content | {"preview": told}, blob)


def _block(block: Any) -> dict[str, Any]:
    kind = type(block).__name__
    return {"kind": kind, "panels": block.panels} if kind == "PanelGrid" else {"kind": kind, "text": str(block.text)}


def _panel(panel: Any, history: RunHistory, blob: Blob) -> dict[str, Any]:
    if type(panel).__name__ == "MarkdownPanel":
        return {"text": panel.markdown}
    if type(panel).__name__ != "LinePlot":
        shown = getattr(panel, "table_name", None) or (getattr(panel, "chart_strings", None) or {}).get("title")
        return {"title": str(shown), "keys": "", "lines": []}
    keys, pattern = [str(getattr(one, "name", one)) for one in panel.y or []], panel.metric_regex
    found = sorted((key for key in history.values if pattern and re.search(pattern, key)), key=natural_order)
    drawn = [key for key in (*keys, *found) if key in history.values]
    width = pool_width(len(history.steps), MAX_POINTS)
    return {
        "title": panel.title,
        "keys": pattern or ", ".join(keys),
        "log": bool(panel.log_y),
        "limits": list(panel.range_y or (None, None)),
        "left": max(0, len(drawn) - MAX_LINES),
        "lines": [
            {"label": key, "offset": blob.add_floats(pool(history.values[key][:, None], width, key)[:, 0])}
            for key in drawn[:MAX_LINES]
        ],
    }
