"""A W&B report about the gradients of one run, or of all runs of a project side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from .._diagnosis import CAUSES
from .._page.formatting import WORDS
from .._page.history import RecordedAlert, RunHistory
from .._page.read import read_run
from ..snapshot import keys
from .flow import FLOW_FIELDS, ensure_flow_chart
from .template import SECTIONS, TemplateSection, markdown_words, require_workspaces, speaking_to_wandb

DESCRIPTION: Final = "What the gradients of every layer did, and what to do about it. Written by wandb_gradwatch."
_MAX_TITLE: Final = 128
_MAX_ALERTS: Final = 50


def create_report(
    entity: str,
    project: str,
    run: str | None = None,
    *,
    title: str | None = None,
    url: str | None = None,
    alerts: Sequence[RecordedAlert] = (),
    flow_chart: bool = True,
) -> str:
    """Create a report, or bring the one of the same title up to date, and return its address.

    Args:
        entity: the user or team that owns the project.
        project: an existing project.
        run: the id of one run; None shows the project's runs side by side.
        title: "Gradients" with the run's id by default. A report of this title in the project is updated.
        url: update this report instead of looking for one by its title.
        alerts: written into the report, each with its step and diagnosis: `read_run(path).alerts`. W&B keeps alerts out
            of reports.
        flow_chart: draw layers x steps from the flight recorder's table. This saves one private chart preset,
            "gradwatch-flow", with the entity.

    Raises:
        ImportError: wandb-workspaces is not installed.
        ValueError: there is no such project, or `url` is no report's address.
        RuntimeError: W&B refused; wandb.Error where it is the login.
    """
    reports, _ = require_workspaces()
    title = title or _usual_title(run)
    if len(title) > _MAX_TITLE:
        raise ValueError(f"title={title!r} has {len(title)} characters; W&B allows {_MAX_TITLE}")
    with speaking_to_wandb():
        existing = _report_id(reports, url) if url is not None else _find_report(entity, project, title)
        chart = ensure_flow_chart(entity) if flow_chart else None
        report = build_report(entity, project, run, title=title, alerts=alerts, flow_chart=chart)
        if existing is not None:
            report.id = existing
        return str(report.save().url)


def build_report(
    entity: str,
    project: str,
    run: str | None = None,
    *,
    title: str | None = None,
    alerts: Sequence[RecordedAlert] = (),
    flow_chart: str | None = None,
) -> Any:
    """The report as an object of wandb-workspaces, not saved. No network.

    Args:
        flow_chart: the id of the chart preset that draws layers x steps; None leaves it out.
    """
    reports, _ = require_workspaces()
    blocks = [*_introduction(reports), *_alerts(reports, alerts)]
    for section in SECTIONS:
        blocks += [reports.H2(section.words.title), _grid(reports, section, _runset(reports, run))]
        blocks.append(reports.MarkdownBlock(markdown_words(section.words)))
    blocks += _recorder(reports, _runset(reports, run), flow_chart)
    blocks += [
        reports.H2(WORDS["histogram"].title),
        reports.MarkdownBlock(
            "On a run's own page, under `gradients`: one heatmap per layer.\n\n" + markdown_words(WORDS["histogram"])
        ),
    ]
    return reports.Report(
        entity=entity,
        project=project,
        title=title or _usual_title(run),
        description=DESCRIPTION,
        blocks=blocks,
        width="fluid",
    )


def run_on_disk(run: str | None, path: Path | None) -> RunHistory | None:
    """The history of a run whose files are on this machine, with its alerts.

    Args:
        run: the run's id, which is looked for below wandb/ in the working directory.
        path: where it is instead, as `read_run` takes it.

    Returns:
        The history; None where there is no `path`, and no run of this id.
    """
    found = [path] if path is not None else sorted(Path("wandb").glob(f"*run-*-{run}/run-{run}.wandb")) if run else []
    return read_run(found[-1]) if found else None


def _usual_title(run: str | None) -> str:
    return "Gradients" if run is None else f"Gradients of run {run}"


def _introduction(reports: Any) -> Iterator[Any]:
    yield reports.MarkdownBlock(
        "The horizontal axis is `gradwatch/step`: optimizer steps. Norms are of the finite elements, unscaled and "
        "before clipping unless a title says otherwise. A gap is a value that is missing, not zero."
    )
    yield reports.TableOfContents()


def _alerts(reports: Any, alerts: Sequence[RecordedAlert]) -> Iterator[Any]:
    yield reports.H2("Alerts")
    for alert in alerts[:_MAX_ALERTS]:
        step = "" if alert.step is None else f" · step {alert.step}"
        # Names in an alert come from a model: plain text, not markdown.
        yield reports.H3(f"{alert.level}: {alert.title}{step}")
        yield reports.P(alert.text)
    if len(alerts) > _MAX_ALERTS:
        yield reports.P(f"and {len(alerts) - _MAX_ALERTS} more.")
    lines = ["An alert's own text names the step, the layers, the values, the probable cause and the remedy.", ""]
    lines += [f"- **{title}**: {', '.join(causes)}" for title, causes in causes_by_title().items()]
    yield reports.MarkdownBlock("\n".join(lines))


def causes_by_title() -> dict[str, list[str]]:
    """Every alert's title with the causes that it can have."""
    by_title: dict[str, list[str]] = {}
    for cause, titles in CAUSES.items():
        for title in titles:
            by_title.setdefault(title, []).append(cause)
    return by_title


def _runset(reports: Any, run: str | None) -> Any:
    # Without a project of its own a run set shows the report's; naming it would take a request each.
    if run is None:
        return reports.Runset(name="All runs")
    from wandb_workspaces import expr

    return reports.Runset(name=run, filters=expr.And(expr.Metric("ID") == run))


def _grid(reports: Any, section: TemplateSection, runset: Any) -> Any:
    width = 24 // min(len(section.panels), 3)
    return reports.PanelGrid(runsets=[runset], panels=[panel.build(reports, width=width) for panel in section.panels])


def _recorder(reports: Any, runset: Any, flow_chart: str | None) -> Iterator[Any]:
    panels = []
    if flow_chart is not None:
        chart = reports.CustomChart(
            query={"summaryTable": {"tableKey": keys.FLIGHT_RECORDER}},
            chart_name=flow_chart,
            chart_fields=dict(FLOW_FIELDS),
            chart_strings={"title": "Gradient flow: layers by steps"},
            layout=reports.Layout(w=24, h=12),
        )
        panels.append(chart)
    panels.append(reports.WeavePanelSummaryTable(table_name=keys.FLIGHT_RECORDER, layout=reports.Layout(w=24, h=10)))
    yield reports.H2(WORDS["recorder"].title)
    yield reports.PanelGrid(runsets=[runset], panels=panels)
    yield reports.MarkdownBlock(markdown_words(WORDS["recorder"]))


def _find_report(entity: str, project: str, title: str) -> str | None:
    """The id of the project's report of this title; of several, the one changed last."""
    import wandb

    api = wandb.Api()
    try:
        found = [report for report in api.reports(f"{entity}/{project}") if report.display_name == title]
    except ValueError as error:
        raise ValueError(
            f"there is no project {entity}/{project}, or you have no access to it; a run that logs to it creates it"
        ) from error
    newest = max(found, key=lambda report: str(report.updated_at), default=None)
    return None if newest is None else str(newest.id)


def _report_id(reports: Any, url: str) -> str:
    if "/reports/" not in urlsplit(url).path or "--" not in url:
        raise ValueError(f"url={url!r} is not a report's address: it has /reports/ and ends in --ID")
    return str(reports.Report.from_url(url).id)
