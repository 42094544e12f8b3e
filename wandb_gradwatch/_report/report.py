"""A W&B report about the gradients of one run, or of a project's runs side by side, and a saved workspace view.

Previews show both as a page on this machine before anything is sent, with panels drawn from a run's file.
"""

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .._analysis.formatting import visible_text
from .._judgement.incident import LEVELS
from .._page.history import RunHistory, natural_order
from .._page.packing import Blob, pool, pool_extremes, pool_width
from .._page.page import WORDS, page_in, render_content, write_html
from .._page.payload import MAX_POINTS, build_payload
from .._page.read import read_run
from ..snapshot import keys
from .template import (
    MAX_NAMES,
    LinePanel,
    markdown_words,
    no_project,
    require_workspaces,
    sections_of,
    speaking_to_wandb,
)

logger: Final = logging.getLogger("wandb_gradwatch")

DESCRIPTION: Final = "What the gradients of every layer did, and what to do about it. Written by wandb_gradwatch."
_MAX_INCIDENTS: Final = 20

# A chart preset cannot be changed under its name, so a changed chart needs a new name.
CHART_NAME: Final = "gradwatch-flow-1"
# The layers x steps chart in Vega-Lite; W&B fills in `${field:...}` and `${string:...}`. Layers are in the order of the
# table, which is the model's. Zero has no logarithm, so its cells stay empty, as do those of missing values.
FLOW_SPEC: Final = Path(__file__).with_name("flow.json")
# The chart's fields, and the flight recorder's columns that fill them.
FLOW_FIELDS: Final = {"step": "step", "layer": "name", "norm": "grad_norm"}
VIEW_NAME: Final = "Gradients"
# The part of the view's URL that is derived from its name, to find the view again. W&B's ids have this format.
_VIEW_ID: Final = f"gw{hashlib.sha256(VIEW_NAME.encode()).hexdigest()[:9]}"


def create_report(entity: str, project: str, run: str | None = None, *, history: RunHistory | None = None) -> str:
    """Create a report, or update the one with the same title that was changed last, and return its URL.

    Args:
        run: the id of one run; None shows the project's runs side by side.
        history: the run as it is on this machine: its verdict and incidents are copied into the report, because W&B
            reports cannot show alerts, and only what it has data for gets a section.

    Raises:
        ImportError: wandb-workspaces is not installed.
        ValueError: there is no such project.
        RuntimeError: W&B refused; a wandb.Error if the login is the reason.
    """
    require_workspaces()
    with speaking_to_wandb() as api:
        try:
            found = [report for report in api.reports(f"{entity}/{project}") if report.display_name == _title(run)]
        except ValueError as error:
            raise no_project(entity, project) from error
        report = build_report(entity, project, run, history=history, flow_chart=ensure_flow_chart(api, entity))
        if found:
            report.id = str(max(found, key=lambda report: str(report.updated_at)).id)
        return str(report.save().url)


def build_report(
    entity: str,
    project: str,
    run: str | None = None,
    *,
    history: RunHistory | None = None,
    flow_chart: str | None = None,
) -> Any:
    """Build the report as an unsaved object of wandb-workspaces; `flow_chart` is a preset's id. Uses no network."""
    reports, _ = require_workspaces()
    blocks = [] if history is None else list(_verdict(reports, history))
    for key, panels in sections_of(history).items():
        built = [panel.build(reports, width=24 // min(len(panels), 3)) for panel in panels]
        blocks += _section(reports, run, key, built)
    if history is None or history.flight_recorder is not None:
        blocks += _section(reports, run, "recorder", _recorder_panels(reports, flow_chart))
    blocks.append(reports.MarkdownBlock(_READING))
    return reports.Report(
        entity=entity, project=project, title=_title(run), description=DESCRIPTION, blocks=blocks, width="fluid"
    )


def run_on_disk(run: str | None, path: Path | None) -> RunHistory | None:
    """Return the history of the run at `path`, or of the run with this id below wandb/; None if there is neither."""
    found = [path] if path is not None else sorted(Path("wandb").glob(f"*run-*-{run}/run-{run}.wandb")) if run else []
    return read_run(found[-1]) if found else None


def _title(run: str | None) -> str:
    return "Gradients" if run is None else f"Gradients of run {run}"


_READING: Final = (
    "The horizontal axis is `gradwatch/step`, optimizer steps; for losses it is W&B's step. Norms are those of "
    "the finite elements, unscaled and before clipping unless a title says otherwise. A gap means that the value "
    "is missing, not that it is zero. Histograms are on the run's own page, under `gradients`. What each alert "
    "means, with its causes: `docs/alerts.md` in the repository of wandb_gradwatch."
)


def _section(reports: Any, run: str | None, key: str, panels: list[Any]) -> list[Any]:
    grid = reports.PanelGrid(runsets=[_runset(reports, run)], panels=panels)
    return [reports.H2(WORDS[key].title), grid, reports.MarkdownBlock(markdown_words(WORDS[key]))]


def _verdict(reports: Any, history: RunHistory) -> Iterator[Any]:
    """The verdict, then the incidents, the worst first."""
    # Names in an incident come from a model, so all these texts are plain, not markdown.
    yield reports.H2(f"Verdict: {history.verdict.status}")
    yield reports.P(f"{visible_text(history.verdict.sentence)}.")
    by_level = sorted(history.incidents, key=lambda one: -LEVELS.index(one.level))
    for incident in by_level[:_MAX_INCIDENTS]:
        yield reports.H3(f"{incident.level}: {incident.title} · step {incident.first_step}")
        yield reports.P(visible_text(incident.text))
    if len(by_level) > _MAX_INCIDENTS:
        yield reports.P(f"and {len(by_level) - _MAX_INCIDENTS} more.")


def _runset(reports: Any, run: str | None) -> Any:
    # A run set without a project uses the report's project; naming it would cost a request each.
    if run is None:
        return reports.Runset(name="All runs")
    from wandb_workspaces import expr

    return reports.Runset(name=run, filters=expr.And(expr.Metric("ID") == run))


def _recorder_panels(reports: Any, flow_chart: str | None) -> list[Any]:
    table = reports.WeavePanelSummaryTable(table_name=keys.FLIGHT_RECORDER, layout=reports.Layout(w=24, h=10))
    if flow_chart is None:
        return [table]
    chart = reports.CustomChart(
        query={"summaryTable": {"tableKey": keys.FLIGHT_RECORDER}},
        chart_name=flow_chart,
        chart_fields=FLOW_FIELDS,
        chart_strings={"title": "Gradient flow: layers by steps"},
        layout=reports.Layout(w=24, h=12),
    )
    return [chart, table]


def ensure_flow_chart(api: Any, entity: str) -> str | None:
    """Save the chart as a private preset of the entity and return its id; None, with a warning, if W&B refuses."""
    import wandb

    if not hasattr(api, "create_custom_chart"):
        logger.warning("the report has no layers x steps chart: that needs a newer wandb than %s", wandb.__version__)
        return None
    try:
        preset = api.create_custom_chart(
            entity=entity,
            name=CHART_NAME,
            display_name="Gradient flow (gradwatch)",
            spec_type="vega2",
            access="private",
            spec=FLOW_SPEC.read_text(encoding="utf-8"),
        )
        return str(preset)
    except Exception as error:  # one of several exceptions of wandb: the report is saved without this panel
        if "exist" in str(error).lower() or "duplicate" in str(error).lower():
            return f"{entity}/{CHART_NAME}"
        logger.warning("the report has no layers x steps chart, because W&B refused to save it: %s", error)
        return None


def save_workspace(entity: str, project: str, *, history: RunHistory | None = None) -> str:
    """Save the view, or update the one with its name, and return its URL; raises like create_report."""
    _, workspaces = require_workspaces()
    workspace = build_workspace(entity, project, history=history)
    from wandb_workspaces.workspaces.internal import View

    with speaking_to_wandb():
        workspace._internal_name = f"nw-{_VIEW_ID}-v"
        try:
            existing = workspaces.Workspace._from_model(View.from_name(entity, project, workspace._internal_name))
            for identity in ("_internal_name", "_internal_id", "_internal_runset_id"):
                setattr(workspace, identity, getattr(existing, identity))
        except ValueError as error:
            if "not found in project" not in str(error):  # otherwise the project exists, but the view does not
                raise no_project(entity, project) from error
        return str(workspace.save().url)


def build_workspace(entity: str, project: str, *, history: RunHistory | None = None) -> Any:
    """Build the view as an unsaved object of wandb-workspaces: the sections for which a run has data.

    W&B shows verdict and incidents, of each run, in the first section: they are in the run's summary. Uses no network.
    """
    reports, workspaces = require_workspaces()
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=VIEW_NAME,
        sections=[
            _verdict_section(reports, workspaces),
            *(
                _view_section(reports, workspaces, key, panels, is_open=index < 3)
                for index, (key, panels) in enumerate(sections_of(history).items())
            ),
        ],
        settings=workspaces.WorkspaceSettings(
            x_axis=keys.STEP,
            # Otherwise W&B makes one section per layer.
            group_by_prefix="first",
            point_visualization_method="bucketing",
            max_runs=10,
        ),
        auto_generate_panels=False,
    )


def _verdict_section(reports: Any, workspaces: Any) -> Any:
    """The worst alert of each row, and where the verdict and the incidents of each run are."""
    level = LinePanel("Worst alert: 1 INFO, 2 WARN, 3 ERROR", (keys.ALERT_LEVEL,), range_y=(0.0, 3.0)).build(reports)
    where = (
        "`gradwatch/verdict` and `gradwatch/incidents` in a run's summary say what happened, at which step, and why."
    )
    return workspaces.Section(
        name="Verdict and incidents",
        panels=[level, reports.MarkdownPanel(markdown=f"{where}\n\n{_READING}")],
        is_open=True,
        layout_settings=workspaces.SectionLayoutSettings(columns=2, rows=1),
        panel_settings=workspaces.SectionPanelSettings(x_axis=keys.STEP),
    )


def _view_section(reports: Any, workspaces: Any, key: str, panels: Sequence[LinePanel], *, is_open: bool) -> Any:
    built = [*(panel.build(reports) for panel in panels), reports.MarkdownPanel(markdown=markdown_words(WORDS[key]))]
    return workspaces.Section(
        name=WORDS[key].title,
        panels=built,
        is_open=is_open,
        layout_settings=workspaces.SectionLayoutSettings(columns=min(len(built), 4), rows=1),
        panel_settings=workspaces.SectionPanelSettings(x_axis=panels[0].x),
    )


def write_preview(
    entity: str, project: str, run: str | None, *, history: RunHistory | None, output: Path | None
) -> Path:
    """Write the preview of the report that `create_report` would save, without W&B, and return its path."""
    report = build_report(entity, project, run, history=history, flow_chart=f"{entity}/{CHART_NAME}")
    blocks = [_block(one) for one in report.blocks]
    page = _preview("report", report.title, blocks, history)
    return write_html(page, output or page_in(Path(), "report", run or project))


def write_workspace_preview(entity: str, project: str, *, history: RunHistory | None, output: Path | None) -> Path:
    """Write the preview of the view that `save_workspace` would save, without W&B, and return its path."""
    workspace = build_workspace(entity, project, history=history)
    sections = [
        {"kind": "Section", "text": one.name, "isOpen": one.is_open, "panels": one.panels} for one in workspace.sections
    ]
    page = _preview("workspace view", workspace.name, sections, history)
    return write_html(page, output or page_in(Path(), "workspace", project))


def _preview(what: str, title: str, blocks: list[dict[str, Any]], history: RunHistory | None) -> str:
    """Render blocks (a kind, and a text or panels) as HTML; without a history, panels only name their keys."""
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
    if type(panel).__name__ == "CustomChart":
        return {"title": panel.chart_strings["title"], "keys": "", "lines": []}
    if type(panel).__name__ == "WeavePanelSummaryTable":
        return {"title": panel.table_name, "keys": "", "lines": []}
    all_keys = history.values.keys() | history.own.keys()
    named, pattern = [str(getattr(one, "name", one)) for one in panel.y or []], panel.metric_regex
    found = sorted((key for key in all_keys if pattern and re.search(pattern, key)), key=natural_order)
    drawn = [key for key in (*named, *found) if key in all_keys]
    return {
        "title": panel.title,
        "keys": pattern or ", ".join(named),
        "log": bool(panel.log_y),
        "limits": list(panel.range_y or (None, None)),
        "left": max(0, len(drawn) - MAX_NAMES),
        "isOwn": any(key in history.own for key in drawn),
        "lines": [_line(key, history, blob) for key in drawn[:MAX_NAMES]],
    }


def _line(key: str, history: RunHistory, blob: Blob) -> dict[str, Any]:
    """A line of a panel: at the steps of our rows, or of the user's."""
    if key not in history.own:
        values = pool(history.values[key], pool_width(len(history.steps), MAX_POINTS), key)
        return {"label": key, "count": len(values), "steps": None, "values": blob.add_floats(values)}
    steps, values = pool_extremes(history.own[key].steps, history.own[key].values, MAX_POINTS)
    return {"label": key, "count": len(values), "steps": blob.add_steps(steps), "values": blob.add_floats(values)}
