"""The W&B report and workspace: a real run logs every key that they use, and saving twice equals saving once."""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wandb
from click.testing import CliRunner
from fake_run import write_fake_run
from loopback import ENTITY, PROJECT, LoopbackServer

from wandb_gradwatch._cli import main
from wandb_gradwatch._judgement.incident import Incident
from wandb_gradwatch._page.history import RunHistory
from wandb_gradwatch._page.page import WORDS
from wandb_gradwatch._page.read import read_run
from wandb_gradwatch._report.report import (
    CHART_NAME,
    FLOW_FIELDS,
    FLOW_SPEC,
    build_report,
    build_workspace,
    create_report,
    run_on_disk,
    save_workspace,
    write_preview,
)
from wandb_gradwatch._report.template import A_LOSS, OF_EVERY_RUN, SECTIONS, WANDB_STEP, LinePanel, sections_of
from wandb_gradwatch.snapshot import keys

reports = pytest.importorskip("wandb_workspaces.reports.v2", reason="the extra 'report' is not installed")
workspaces = pytest.importorskip("wandb_workspaces.workspaces")
internal = pytest.importorskip("wandb_workspaces.reports.v2.internal")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> RunHistory:
    return read_run(write_fake_run(tmp_path_factory.mktemp("run"), num_flushes=30))


PANELS = [panel for panels in SECTIONS.values() for panel in panels]
TITLES = [WORDS[key].title for key in SECTIONS]


def panel_patterns(panels: list[LinePanel] = PANELS) -> set[str]:
    return {panel.pattern for panel in panels if panel.pattern is not None and panel.pattern != A_LOSS}


def unlogged(panels: list[LinePanel], history: RunHistory) -> set[str]:
    """Return keys that are not logged, and patterns that match nothing."""
    patterns = {one for one in panel_patterns(panels) if not any(re.search(one, key) for key in history.values)}
    return {key for panel in panels for key in panel.metrics}.difference(history.values) | patterns


def test_a_real_run_logs_every_key_that_the_template_names(history: RunHistory) -> None:
    assert unlogged(PANELS, history) == set()
    assert keys.STEP in history.values


def test_the_panel_of_losses_finds_the_users_keys_and_none_of_a_layer(history: RunHistory) -> None:
    losses = (
        "loss Loss train/loss val_loss train/loss_step loss/train losses/kl eval/rmse_loss train.loss gradwatch/loss"
    )
    others = "grad_norm/loss_head/weight gradients/model/loss/weight activation/loss/std accuracy closs/a/b"
    assert [key for key in losses.split() if not re.search(A_LOSS, key)] == []
    assert [key for key in others.split() if re.search(A_LOSS, key)] == []
    assert [key for key in (*history.values, *history.own) if re.search(A_LOSS, key)] == ["loss"]
    (panel,) = SECTIONS["loss"]
    assert (panel.pattern, panel.x) == (A_LOSS, WANDB_STEP)  # the user's rows have no step of ours


def test_a_key_that_nobody_logs_would_be_noticed(history: RunHistory) -> None:
    wrong = [LinePanel("x", ("gradwatch/gradient_norm",)), LinePanel("y", pattern="^norms/.+")]
    assert unlogged(wrong, history) == {"gradwatch/gradient_norm", "^norms/.+"}


def test_a_pattern_finds_its_own_metric_of_every_name_and_no_other_metric(history: RunHistory) -> None:
    of_layers = {pattern for pattern in panel_patterns() if not pattern.endswith("$")}
    for pattern in of_layers:
        metric = pattern.removeprefix("^").partition("/")[0]
        found = {key for key in history.values if re.search(pattern, key)}
        assert found == {f"{metric}/{name}" for name in history.names}
    assert {pattern.removeprefix("^").partition("/")[0] for pattern in of_layers} == set(keys.LAYER_FAMILIES)


def test_a_pattern_of_a_family_finds_one_metric_of_its_own(history: RunHistory) -> None:
    of_families = {pattern for pattern in panel_patterns() if pattern.endswith("$")}
    families = {pattern.removeprefix("^").partition("/")[0] for pattern in of_families}
    assert families == set(keys.METRIC_FAMILIES) - {keys.GRADIENT}, "what gradients have more is the user's own"
    for pattern in of_families:
        family = pattern.removeprefix("^").partition("/")[0]
        metrics = {key.rpartition("/")[2] for key in history.values if re.search(pattern, key)}
        assert metrics in ({"query_abs_max", "key_abs_max"}, {pattern.rpartition("/")[2].removesuffix("$")})
        assert all(key.startswith(family) for key in history.values if re.search(pattern, key))


def test_the_flow_chart_draws_columns_that_the_flight_recorder_has(history: RunHistory) -> None:
    assert set(FLOW_FIELDS.values()) <= set(history.flight_recorder.columns)
    assert set(re.findall(r"\$\{field:(\w+)\}", FLOW_SPEC.read_text())) == set(FLOW_FIELDS)


def test_every_section_says_what_healthy_looks_like_and_what_to_do() -> None:
    assert set(SECTIONS) < set(WORDS)
    assert all(words.healthy.endswith(".") and words.otherwise.endswith(".") for words in WORDS.values())
    assert len({words.title for words in WORDS.values()}) == len(WORDS)


def line_plots(blocks: list[Any]) -> list[Any]:
    grids = [block for block in blocks if isinstance(block, reports.PanelGrid)]
    return [panel for grid in grids for panel in grid.panels if isinstance(panel, reports.LinePlot)]


def keys_of(plot: Any) -> list[str]:
    """Return the names of the metrics of a plot, which are strings before saving and objects after loading."""
    return [str(getattr(metric, "name", metric)) for metric in plot.y]


def axes(plots: list[Any]) -> set[str]:
    return {str(getattr(plot.x, "name", plot.x)) for plot in plots}


def test_the_report_survives_its_own_format() -> None:
    report = build_report("someone", "loopback", flow_chart=f"someone/{CHART_NAME}")
    spec = internal.Spec.model_validate_json(report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    loaded = reports.Report._from_model(report._to_model().model_copy(update={"spec": spec}))
    assert list(map(keys_of, line_plots(loaded.blocks))) == list(map(keys_of, line_plots(report.blocks)))
    assert axes(line_plots(loaded.blocks)) == {keys.STEP, WANDB_STEP}
    titles = {WORDS[key].title for key in OF_EVERY_RUN}
    assert titles < {block.text for block in loaded.blocks if isinstance(block, reports.H2)}


def test_a_report_about_one_run_shows_that_run_and_the_other_all_of_them() -> None:
    one = build_report("someone", "loopback", "abcd1234")._to_model().spec.model_dump_json(by_alias=True)
    every = build_report("someone", "loopback")._to_model().spec.model_dump_json(by_alias=True)
    assert '{"section":"run","name":"name"},"op":"=","value":"abcd1234"' in one
    assert '"value":"abcd1234"' not in every


def test_the_verdict_comes_first_then_the_incidents_the_worst_first(history: RunHistory) -> None:
    told = Incident("nan_gradient", "NaN gradient", "ERROR", 265, 265, 265, "**blocks.2** <b>is NaN</b>")
    remark = Incident("mine", "My rule", "INFO", 7, 7, 7, "a remark")
    blocks = build_report("a", "b", history=replace(history, incidents=(remark, *(told,) * 30))).blocks
    assert blocks[0] == reports.H2("Verdict: error")
    assert blocks[1].text.startswith("broke at step 265: NaN gradient")
    assert blocks[2:4] == [reports.H3("ERROR: NaN gradient · step 265"), reports.P(told.text)]  # W&B shows it literally
    assert reports.P("and 11 more.") in blocks
    assert blocks.index(reports.P("and 11 more.")) < min(
        place for place, block in enumerate(blocks) if isinstance(block, reports.PanelGrid)
    )


def test_only_what_a_run_has_data_for_gets_a_section_with_at_most_five_names(history: RunHistory) -> None:
    assert list(sections_of(None)) == list(OF_EVERY_RUN)
    whole = sections_of(history)
    assert set(whole) == set(SECTIONS)  # the fake run has every key
    assert max(len(panel.metrics) for panels in whole.values() for panel in panels) == 5
    assert all(panel.pattern is None for panels in whole.values() for panel in panels)
    assert [panel.metrics for panel in whole["loss"]] == [("loss",)]
    lines = whole["lines"][1]
    assert lines.title.endswith(f": the 5 of {len(history.names)} that changed most")
    bare = {key: values for key, values in history.values.items() if key.startswith("gradwatch/grad_norm")}
    assert set(sections_of(replace(history, values=bare, own={}))) == {"norm"}
    zeros = {key: values * 0 for key, values in history.values.items()}
    assert sections_of(replace(history, values=zeros, own={})) == {}
    ours = {keys.LOSS: np.ones(len(history.steps))}
    assert [panel.metrics for panel in sections_of(replace(history, values=ours, own={}))["loss"]] == [(keys.LOSS,)]


def test_the_workspace_has_the_same_panels_and_words() -> None:
    workspace = build_workspace("someone", "loopback")
    verdict, *sections = workspace.sections
    assert (verdict.name, verdict.panels[0].y) == ("Verdict and incidents", [keys.ALERT_LEVEL])
    assert [section.name for section in sections] == [WORDS[key].title for key in OF_EVERY_RUN]
    for built, key in zip(sections, OF_EVERY_RUN, strict=True):
        drawn = [(panel.y, panel.metric_regex) for panel in built.panels[:-1]]
        assert drawn == [(list(panel.metrics), panel.pattern) for panel in SECTIONS[key]]
        assert WORDS[key].otherwise in built.panels[-1].markdown


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(ImportError, match=r"pip install 'wandb-gradwatch\[report\]'"):
        build_report("someone", "loopback")
    with pytest.raises(ImportError, match=r"pip install 'wandb-gradwatch\[report\]'"):
        save_workspace("someone", "loopback")


def previewed(page: Path) -> Any:
    found = re.search(r'id="content">(.*?)</script>', page.read_text(encoding="utf-8"))
    return json.loads(found[1])["preview"]  # type: ignore[index]


def test_a_preview_has_every_block_of_the_report_and_the_lines_of_its_panels(
    history: RunHistory, tmp_path: Path
) -> None:
    written = write_preview("someone", "loopback", "abcd1234", history=history, output=tmp_path / "report.html")
    told = previewed(written)
    texts = [block["text"] for block in told["blocks"] if block["kind"] == "H2"]
    assert texts == ["Verdict: error", *TITLES, WORDS["recorder"].title]
    paragraphs = [block["text"] for block in told["blocks"] if block["kind"] == "P"]
    assert paragraphs == [f"{history.verdict.sentence}.", *(one.text for one in history.incidents[::-1])]
    panels = [panel for block in told["blocks"] if block["kind"] == "PanelGrid" for panel in block["panels"]]
    drawn = {panel["title"]: [line["label"] for line in panel["lines"]] for panel in panels}
    assert drawn["Norm before clipping, and received"] == [keys.GRAD_NORM, keys.GRAD_NORM_CLIPPED]
    assert len(drawn[f"Gradient norm of every layer: the 5 of {len(history.names)} that changed most"]) == 5
    assert drawn["Your loss"] == ["loss"]


def test_a_preview_of_the_workspace_has_its_sections_and_the_lines_of_their_panels(
    history: RunHistory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["workspace", "someone/loopback", "--dry-run", "--from", str(history.path)])
    assert result.exit_code == 0, result.output
    written = tmp_path / "gradwatch-workspace-loopback.html"
    assert result.stdout == written.as_uri() + "\n"
    told = previewed(written)
    assert [block["text"] for block in told["blocks"]] == ["Verdict and incidents", *TITLES]
    assert [block["isOpen"] for block in told["blocks"]][:5] == [True, True, True, True, False]
    for block, key in zip(told["blocks"][1:], SECTIONS, strict=True):
        *panels, words = block["panels"]
        assert WORDS[key].otherwise in words["text"]
        assert all(panel["lines"] for panel in panels), key
    assert "wandb.ai" not in written.read_text(encoding="utf-8")


def test_a_run_is_found_below_wandb_and_its_alerts_are_in_the_preview(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_fake_run(tmp_path, num_flushes=30).name.rpartition("-")[2]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["report", f"someone/loopback/{run}", "--dry-run"])
    assert result.exit_code == 0, result.output
    page = (tmp_path / f"gradwatch-report-{run}.html").read_text(encoding="utf-8")
    assert result.stdout == (tmp_path / f"gradwatch-report-{run}.html").as_uri() + "\n"
    assert "ERROR: NaN gradient \\u00b7 step 265" in page
    assert run_on_disk("another", None) is None


class Views:
    """The reports and saved views of a simulated server."""

    def __init__(self, server: LoopbackServer) -> None:
        self.views: dict[str, dict[str, Any]] = {}
        self.charts: list[dict[str, Any]] = []
        unread = {"entityName": ENTITY, "createdAt": "2025-01-01T00:00:00Z", "isBenchmark": False, "user": None}
        server.graphql |= {
            "ProjectViews": lambda sent: self._list(sent["project"], "runs"),
            "View": lambda sent: self._list(sent["name"], sent["viewType"], sent["viewName"]),
            "SpecificReport": lambda sent: {"view": self.views[sent["reportId"]]},
            "upsertView": self._upsert,
            "UpsertView2": self._upsert,
            "CreateCustomChart": self._create_chart,
            "GetProjects": {
                "models": {
                    "edges": [{"node": {"id": "project", "name": PROJECT, **unread}, "cursor": "1"}],
                    "pageInfo": {"endCursor": "1", "hasNextPage": False},
                }
            },
        }

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [view for view in self.views.values() if view["type"] == kind]

    def _list(self, project: str, kind: str, name: str | None = None) -> dict[str, Any]:
        if project != PROJECT:
            return {"project": None}
        found = [view for view in self.of_type(kind) if name in (None, view["name"])]
        edges = [{"node": view, "cursor": view["id"]} for view in found]
        return {"project": {"allViews": {"edges": edges, "pageInfo": {"endCursor": None, "hasNextPage": False}}}}

    def _upsert(self, sent: dict[str, Any]) -> dict[str, Any]:
        view_id = sent.get("id") or base64.b64encode(f"View:{len(self.views) + 1}".encode()).decode()
        inserted = view_id not in self.views
        self.views[view_id] = {
            **{key: sent[key] for key in ("name", "displayName", "description", "type", "spec")},
            "id": view_id,
            "project": {"id": "project", "name": sent["projectName"], "entityName": sent["entityName"]},
            "user": {"username": ENTITY, "photoUrl": None, "email": None},
            "createdAt": "2025-01-01T00:00:00Z",
            "updatedAt": f"2025-01-01T00:00:{len(self.views):02}Z",
        }
        return {"upsertView": {"view": self.views[view_id], "inserted": inserted}}

    def _create_chart(self, sent: dict[str, Any]) -> dict[str, Any]:
        self.charts.append(sent)
        return {"createCustomChart": {"chart": {"id": f"{sent['entity']}/{sent['chartName']}"}}}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    with LoopbackServer() as server:
        wandb.teardown()  # forgets the servers and keys of this process
        for name, value in {**server.environment(), "HOME": str(tmp_path), "WANDB_SILENT": "true"}.items():
            monkeypatch.setenv(name, value)
        yield server
        wandb.teardown()


def test_a_saved_report_loads_back_with_all_its_panels(server: LoopbackServer) -> None:
    Views(server)
    url = create_report(ENTITY, PROJECT, "abcd1234")
    assert f"/{ENTITY}/{PROJECT}/reports/Gradients-of-run-abcd1234--" in url
    loaded = reports.Report.from_url(url)
    plots = line_plots(loaded.blocks)
    assert [(plot.title, keys_of(plot), plot.metric_regex, plot.log_y) for plot in plots] == [
        (panel.title, list(panel.metrics), panel.pattern, panel.log_y)
        for key in OF_EVERY_RUN
        for panel in SECTIONS[key]
    ]
    assert [plot.title for plot in plots if axes([plot]) != {keys.STEP}] == ["Every loss of the run"]
    charts = [p for b in loaded.blocks if isinstance(b, reports.PanelGrid) for p in b.panels]
    assert f"{ENTITY}/{CHART_NAME}" in [getattr(panel, "chart_name", None) for panel in charts]


def test_saving_a_report_twice_updates_it(server: LoopbackServer) -> None:
    views = Views(server)
    first = create_report(ENTITY, PROJECT)
    incident = Incident("nan_gradient", "NaN gradient", "ERROR", 7, 7, 7, "now")
    known = RunHistory(Path("run-x.wandb"), "x", np.array([10]), {}, incidents=(incident,))
    assert create_report(ENTITY, PROJECT, history=known) == first
    assert len(views.of_type("runs")) == 1
    assert "NaN gradient · step 7" in views.of_type("runs")[0]["spec"]
    # Another run has another report.
    other = create_report(ENTITY, PROJECT, "abcd1234")
    assert other != first
    assert len(views.of_type("runs")) == 2
    assert sorted(view["displayName"] for view in views.of_type("runs")) == ["Gradients", "Gradients of run abcd1234"]


def test_a_refused_chart_costs_its_panel_and_not_the_report(
    server: LoopbackServer, caplog: pytest.LogCaptureFixture
) -> None:
    views = Views(server)
    del server.graphql["CreateCustomChart"]
    create_report(ENTITY, PROJECT)
    assert "no layers x steps chart" in caplog.text
    assert CHART_NAME not in views.of_type("runs")[0]["spec"]


def test_a_saved_workspace_loads_back_and_saving_it_twice_updates_it(server: LoopbackServer) -> None:
    views = Views(server)
    url = save_workspace(ENTITY, PROJECT)
    loaded = workspaces.Workspace.from_url(url)
    assert [section.name for section in loaded.sections][1:] == [WORDS[key].title for key in OF_EVERY_RUN]
    assert loaded.settings.x_axis == keys.STEP
    assert loaded.auto_generate_panels is False
    assert [p.metric_regex for p in loaded.sections[2].panels[:-1]] == [p.pattern for p in SECTIONS["norm"]]
    assert save_workspace(ENTITY, PROJECT) == url
    assert [view["displayName"] for view in views.of_type("project-view")] == ["Gradients"]


def test_a_project_that_is_not_there_is_never_made_by_a_typing_error(server: LoopbackServer) -> None:
    views = Views(server)
    for save in (create_report, save_workspace):
        with pytest.raises(ValueError, match="there is no project someone/typo, or you have no access to it"):
            save(ENTITY, "typo")
    assert views.views == {}


def test_a_server_that_refuses_is_quoted(server: LoopbackServer) -> None:
    Views(server)
    for operation, save in (("upsertView", create_report), ("UpsertView2", save_workspace)):
        del server.graphql[operation]
        with pytest.raises(RuntimeError, match=f"W&B did not answer as expected.*does not know '{operation}'"):
            save(ENTITY, PROJECT)


def test_without_a_login_wandb_itself_says_so(server: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY")
    for save in (create_report, save_workspace):
        with pytest.raises(wandb.Error, match="wandb login"):
            save(ENTITY, PROJECT)
