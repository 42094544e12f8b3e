"""What the page draws was measured: each value stands at the steps that it is about, and nothing between them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from offline import records
from windows import window

import wandb_gradwatch
from wandb_gradwatch._page import packing
from wandb_gradwatch._page.columns import columns_of, recorded_values, spread
from wandb_gradwatch._page.history import OwnSeries, RecordedTable, RunHistory, Samples
from wandb_gradwatch._page.page import write_page
from wandb_gradwatch._page.payload import build_payload
from wandb_gradwatch._page.read import RunReader, read_finished_run
from wandb_gradwatch.sinks._history_row import HistoryRow
from wandb_gradwatch.snapshot import Snapshot, keys

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NAN = float("nan")
EVERYTHING = (*keys.DETAILS, keys.PRECISION)


def read(*windows: Snapshot) -> RunHistory:
    """The history of a run with these windows, as it is read from its file."""
    reader = RunReader(Path("run-x.wandb"))
    reader.finished = True
    for snapshot in windows:
        (part,) = HistoryRow.of(snapshot).parts()
        reader.take_row({key: value for key, value in part.items() if not isinstance(value, wandb.Histogram)})
    return reader.history()


def calm(*steps: int) -> Snapshot:
    return replace(window(*[{"a": [3, 4]} for _ in steps]), steps=np.array(steps))


def test_steps_are_measured_where_a_row_lists_them() -> None:
    history = read(calm(1, 2, 3, 10), calm(64, 132))
    assert [ends.tolist() for ends in history.measured] == [[1, 10, 64, 132], [3, 10, 64, 132]]
    assert (history.num_measured, history.num_steps) == (6, 132)


def test_a_long_row_lists_few_of_its_samples_and_was_measured_whole() -> None:
    history = read(calm(*range(1, 2001)), calm(3000))
    assert len(history.samples.steps) < 1000
    assert [ends.tolist() for ends in history.measured] == [[1, 3000], [2000, 3000]]
    assert history.num_measured == 2001


def test_a_row_that_lists_nothing_stands_for_its_last_step() -> None:
    history = RunHistory(Path("x"), "x", np.array([10, 20]), {"gradwatch/grad_norm_max": np.array([1.0, 2.0])})
    assert [part.tolist() for part in history.samples] == [[10, 20], [1, 2], [0, 0]]
    assert [ends.tolist() for ends in history.measured] == [[10, 20], [10, 20]]


@pytest.mark.parametrize(
    "listed",
    [
        *(None, 7, "x", {"a": 1}, [7], [[]], [[1]], [[1, 2, 3, 4]], [["1", 2]], [[None, 2]]),
        *([[NAN, 1]], [[1, 2, -1]], [[1, 2, NAN]], [[2**60, 1]], [[10**400, 1]]),
    ],
)
def test_a_list_that_is_not_ours_is_left_out(listed: object) -> None:
    samples = packing.SampleColumns()
    samples.add(listed)
    assert len(samples.arrays().steps) == 0


def test_too_many_samples_keep_the_conspicuous_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MAX_SAMPLES", 100)
    samples = packing.SampleColumns()
    for step in range(1000):
        samples.add([[step, 9.0 if step == 501 else 1.0, 5 if step == 702 else 0]])
    found = samples.arrays()
    assert len(found.steps) <= 100
    assert found.steps[found.norms == 9].tolist() == [501]
    assert found.steps[found.num_bad == 5].tolist() == [702]


def test_the_recorders_steps_divide_a_window_and_the_rest_keeps_only_what_they_do_not_explain() -> None:
    # The window of steps 101 to 150; the recorder holds 123 and 124. Layer "a" was largest in one of them, "b" was not.
    history = RunHistory(Path("x"), "x", np.array([100, 150]), {keys.FIRST_SAMPLE: np.array([51.0, 101.0])})
    columns = columns_of(history, 1, [123, 124])
    assert columns.first.tolist() == [51, 101, 123, 124, 125]
    assert columns.last.tolist() == [100, 122, 123, 124, 150]
    assert columns.is_whole.tolist() == [True, False, False, False, False]
    rows, recorded = np.array([2.0, 50.0]), np.array([50.0, 7.0])
    of_a = spread(keys.LAYER_GRAD_NORM_MAX, rows, columns, 1, recorded)
    of_b = spread(keys.LAYER_GRAD_NORM_MAX, rows, columns, 1, recorded / 10)
    np.testing.assert_array_equal(of_a, [2, NAN, 50, 7, NAN])
    np.testing.assert_array_equal(of_b, [2, 50, 5, 0.7, 50])
    # A value of the last sample stands at step 150 only, or where the recorder has it.
    np.testing.assert_array_equal(spread(keys.LAYER_GRAD_NORM, rows, columns, 1, recorded), [2, NAN, 50, 7, 50])
    np.testing.assert_array_equal(spread(keys.LAYER_DEAD_RATIO, rows, columns, 1, None), [2, NAN, NAN, NAN, 50])


def test_recorded_steps_outside_all_windows_have_columns_of_their_own() -> None:
    history = RunHistory(Path("x"), "x", np.array([10, 30]), {})
    columns = columns_of(history, 1, [5, 10, 20, 40])
    assert columns.first.tolist() == columns.last.tolist() == [5, 10, 20, 30, 40]
    assert columns.row_of.tolist() == [-1, 0, -1, 1, -1]


@pytest.mark.parametrize(
    "rows", [[7], [[1]], [[[1], "a", 3.0]], [[10**30, "a", 3.0]], [[1, ["a"], 3.0]], [["1", "a", 3.0]], [None]]
)
def test_a_row_of_a_table_that_is_not_ours_is_left_out(rows: list[Any]) -> None:
    table = RecordedTable(["step", "name", "grad_norm"], rows)
    history = RunHistory(Path("x"), "x", np.array([10]), {"grad_norm/a": np.ones(1)}, flight_recorder=table)
    assert history.recorded_steps == []
    assert recorded_values(table, []) == {}
    assert [ends.tolist() for ends in history.measured] == [[10], [10]]


@pytest.mark.parametrize("first", [NAN, float("inf"), -float("inf"), 30.0, -1e300])
def test_a_first_sample_that_cannot_be_is_not_believed(first: float) -> None:
    values = {keys.FIRST_SAMPLE: np.array([first]), keys.NUM_SAMPLES: np.array([-first])}
    history = RunHistory(Path("x"), "x", np.array([20]), values | {"grad_norm/a": np.ones(1)})
    assert [ends.tolist() for ends in history.measured] == [[20], [20]]
    assert build_payload(history)[0]["grids"][0]["columns"] == [[20], [20], [True]]


def test_the_sentence_counts_the_steps_that_were_measured() -> None:
    history = read(calm(1, 2, 3), calm(100))
    assert history.verdict.sentence == "no alert in 4 of 100 steps measured"
    # The user's own loss goes on to step 400, of which the gradients know nothing.
    loss = OwnSeries(np.arange(1.0, 401), np.ones(400))
    assert replace(history, own={"loss": loss}).verdict.sentence == "no alert in 4 of 400 steps measured"
    crashed = replace(history, exit_code=1).verdict.sentence
    assert crashed == "no alert in 4 of 100 steps measured; the process ended with exit code 1"


def test_a_count_of_the_window_is_that_of_the_samples_that_have_any() -> None:
    samples = read(window({"a": [1.0]}, {"a": [NAN, 1.0]}, {"a": [1.0]}))
    assert samples.samples.num_bad.tolist() == [0, 1, 0]


def test_the_page_gets_the_steps_between_which_it_draws_nothing() -> None:
    content, blob = build_payload(read(calm(1, 2, 3), calm(100)))
    measured = content["measured"]
    data = bytes(blob._data)
    steps = np.frombuffer(data, "<f8", measured["count"], measured["steps"])
    ends = [np.frombuffer(data, "<f8", measured["numIntervals"], measured[key]) for key in ("firsts", "lasts")]
    assert steps.tolist() == [1, 2, 3, 100]
    assert [part.tolist() for part in ends] == [[1, 100], [3, 100]]
    assert content["grids"][0]["columns"] == [[1, 100], [3, 100], [True, True]]


def test_samples_of_a_page_are_thinned_to_the_conspicuous_ones() -> None:
    samples = Samples(np.arange(100), np.where(np.arange(100) == 37, NAN, 1.0), np.zeros(100, dtype=np.int64))
    found = packing.thinned_samples(samples, 10)
    assert len(found.steps) == 7  # blocks of 16 steps; 13 blocks of 8 would be too many
    assert np.isnan(found.norms[found.steps == 37]).all()


def trained(directory: Path, sample_every: int) -> RunHistory:
    """A training of 100 steps with a bad batch at step 60, of which every `sample_every`-th step is measured."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    run = wandb.init(mode="offline", dir=str(directory), settings=wandb.Settings(silent=True, console="off"))
    wandb_gradwatch.watch(
        model, sample_every=sample_every, log_every=20, histogram_every=20, rules=[], details=EVERYTHING
    )
    for step in range(1, 101):
        loss = (model(torch.randn(8, 4)) * (50 if step == 60 else 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss.item()})
    run.finish()
    records(run)
    return read_finished_run(run.dir + "/..")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


# Pixels of a canvas, between two steps, that are neither empty nor of the colour of grid and hatching. `left` and
# `right` are what lies beside the plot, in pixels; the plot shows the steps 1 to 100, each with a width of 1.
DRAWN_BETWEEN = """(canvas, [left, right, from, to]) => {
  const [start, width] = [left, canvas.clientWidth - left - right];
  const [x0, x1] = [from, to].map((step) => Math.round(start + ((step - 0.5) / 100) * width));
  const plain = document.createElement("canvas").getContext("2d");
  const allowed = ["--grid", "--hatch", "--card"].map((name) => {
    plain.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    plain.fillRect(0, 0, 1, 1);
    return plain.getImageData(0, 0, 1, 1).data;
  });
  const { data } = canvas.getContext("2d").getImageData(x0, 19, x1 - x0, canvas.height - 48);
  const isAllowed = (at) => allowed.some((one) => [0, 1, 2].every((part) => Math.abs(one[part] - data[at + part]) < 8));
  let drawn = 0;
  for (let at = 0; at < data.length; at += 4) drawn += data[at + 3] > 200 && !isAllowed(at);
  return drawn;
}"""
# By card: what lies beside the plot. Names of at most 8 letters take 68 pixels.
PICTURES = {
    "run": (250, 22),
    "norm": (62, 22),
    "layers": (68, 22),
    "layers .chart": (62, 22),
    "spread": (62, 22),
    "quantiles": (62, 22),
    "histogram": (62, 22),
}


@pytest.mark.browser
@pytest.mark.parametrize("every", [20, 1])
def test_nothing_is_drawn_between_measured_steps(browser: Any, tmp_path: Path, every: int) -> None:
    """With every step measured, the same pixels are drawn: the check can fail."""
    history = trained(tmp_path, every)
    history = replace(history, own={"accuracy": history.own["loss"]})  # a loss would be drawn at every step, rightly
    page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
    page.goto(write_page(history, tmp_path / "page.html").as_uri())
    page.locator("html[data-state=drawn]").wait_for(state="attached")
    page.evaluate("document.querySelector('#more').open = true")

    def drawn(card: str, start: int, end: int) -> int:
        canvas = page.locator(f"#{card} canvas").first
        canvas.scroll_into_view_if_needed()
        page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
        )
        return int(canvas.evaluate(DRAWN_BETWEEN, [*PICTURES[card], start, end]))

    gaps = [(1, 18), (23, 38), (43, 58), (63, 78), (83, 98)]
    between = {card: sum(drawn(card, *gap) for gap in gaps) for card in PICTURES}
    at_steps = {card: sum(drawn(card, step - 1, step + 2) for step in range(20, 100, 20)) for card in PICTURES}
    page.context.close()
    assert all(at_steps.values()), at_steps  # what was measured is drawn
    if every == 20:
        assert not any(between.values()), between
    else:  # lines of the norm, and the layers; of other values the rows keep that of every 20th step
        assert between["norm"] > 100
        assert between["layers .chart"] > 100
        assert between["run"] > 1000
        assert between["layers"] > 1000
        assert not between["spread"], between
