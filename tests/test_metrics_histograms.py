"""Histograms of activations: the same bins and steps as for gradients, and one histogram per module."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from metric_probes import Passes, train, watch
from offline import records
from torch import nn

from wandb_gradwatch import WandbSink
from wandb_gradwatch._measure.columns import NUM_BINS, bins_of
from wandb_gradwatch._measure.probe_values import MetricHistogram
from wandb_gradwatch.metrics import Activations
from wandb_gradwatch.metrics._rows import RowTally
from wandb_gradwatch.sinks._history_row import NUM_LOGGED_BINS, HistoryRow, Rebinner

SGD = torch.optim.SGD
KEY = "activation/inner/histogram"


def pictured(*batches: Any, **options: Any) -> list[Any]:
    """Return the histogram of each flushed window; None for a window without one."""
    model = Passes()
    watcher, sink = watch(model, [Activations("inner")], **options)
    train(model, [torch.as_tensor(batch, dtype=torch.float32) for batch in batches], optimizer=SGD([model.gain], lr=0))
    watcher.remove()
    return [snapshot.metric_histograms.get(KEY) for snapshot in sink.snapshots]


def counts(*values: float) -> list[int]:
    return np.bincount(bins_of(np.array(values)), minlength=NUM_BINS).tolist()


def test_a_histogram_counts_finite_elements_in_the_fixed_bins_and_has_their_extremes():
    [histogram] = pictured([3.0, -4.0, 0.0, 0.5, math.nan, math.inf, -math.inf, 0.0])
    assert histogram.counts.tolist() == counts(3.0, -4.0, 0.0, 0.5, 0.0)
    assert (histogram.low, histogram.high) == (-4, 3)


def test_micro_batches_are_counted_together():
    model = Passes()
    watcher, sink = watch(model, [Activations("inner")])
    for part in ([1.0, -2.0], [4.0]):
        model(torch.tensor(part)).sum().backward()
    SGD([model.gain], lr=0).step()
    watcher.remove()
    histogram = sink.merged().metric_histograms[KEY]
    assert histogram.counts.tolist() == counts(1.0, -2.0, 4.0)
    assert (histogram.low, histogram.high) == (-2, 4)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[4.0], None]),  # the first row has the histogram of its last sample
        ({"histogram_every": 2}, [[2.0, 4.0], [6.0]]),
        ({"histogram_every": 0}, [None, None]),
    ],
)
def test_histograms_are_taken_at_the_steps_that_have_histograms_of_gradients(options, expected):
    batches = [[float(step)] for step in range(1, 8)]
    found = pictured(*batches, log_every=4, **options)
    assert [None if h is None else h.counts.tolist() for h in found] == [
        None if values is None else counts(*values) for values in expected
    ]


def test_at_most_one_histogram_of_each_module_is_kept_until_the_flush():
    model = Passes()
    watcher, sink = watch(model, [Activations("inner")], log_every=100, histogram_every=1)
    train(model, [torch.ones(3)] * 20, optimizer=SGD([model.gain], lr=0))
    waiting = [len(sample.histograms) for sample in watcher._pipeline.window]
    watcher.remove()
    assert waiting == [0] * 19 + [1]
    assert sink.merged().metric_histograms[KEY].counts.sum() == 60


def test_merged_windows_have_the_sum_of_their_histograms():
    model = Passes()
    watcher, sink = watch(model, [Activations("inner")], histogram_every=1)
    train(model, [torch.tensor([1.0]), torch.tensor([8.0, -8.0])], optimizer=SGD([model.gain], lr=0))
    watcher.remove()
    merged = sink.merged().metric_histograms[KEY]
    assert merged.counts.tolist() == counts(1.0, 8.0, -8.0)
    assert (merged.low, merged.high) == (-8, 8)
    assert sink.merged().sample(-1).metric_histograms == {}
    first, second = map(HistoryRow.of, sink.snapshots)
    assert first.merge(second).histograms[KEY].counts.tolist() == merged.counts.tolist()


def test_a_sample_with_one_forward_measured_without_a_histogram_has_no_histogram():
    rows = RowTally(["norm", "histogram"])
    rows.measure({"a": torch.tensor([3.0])})  # the previous sample was still open, and had no histogram
    rows.settle()
    rows.measure({"a": torch.tensor([4.0]), "b": torch.tensor([1.0])}, histogram=True)
    rows.settle()
    found = {(name, statistic): value for name, statistic, value in rows.read(histogram=True)}
    assert found["a", "norm"].item() == 5
    assert set(found) == {("a", "norm"), ("b", "norm"), ("b", "histogram")}


def test_histograms_survive_a_checkpoint_of_the_watcher():
    def watched(state=None):
        model = Passes()
        watcher, sink = watch(model, [Activations("inner")], log_every=100, histogram_every=1)
        if state is not None:
            watcher.load_state_dict(state)
        train(model, [torch.ones(2)], optimizer=SGD([model.gain], lr=0))
        saved = watcher.state_dict()
        watcher.remove()
        return saved, sink

    saved, _ = watched()
    saved["samples"][0]["histograms"] = {key: value.clone() for key, value in saved["samples"][0]["histograms"].items()}
    _, sink = watched(saved)
    assert sink.merged().metric_histograms[KEY].counts.tolist() == counts(1.0, 1.0, 1.0, 1.0)


def test_the_wandb_histogram_has_the_bins_of_gradient_histograms():
    drawn = Rebinner().draw({KEY: MetricHistogram(np.array(counts(0.5, -0.75, 0.1, 0.0)), -0.75, 0.5)})
    picture_counts, edges = drawn[KEY]
    assert sum(picture_counts) == 4
    assert edges[-1] == 1 + 0.5 / 32  # within [-1, 1], the outermost bins end half a bin beyond
    assert Rebinner().draw({KEY: MetricHistogram(np.zeros(NUM_BINS, dtype=int), np.inf, -np.inf)}) == {}


def test_in_the_run_a_histogram_has_even_edges_and_is_not_in_the_summary(start_run, loopback):
    run = start_run(server=loopback)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    watcher, _ = watch(model, [Activations(r"^1$")], run=run, sinks=[], rules=[], histogram_every=1)
    for _ in range(2):
        train(model, [torch.randn(5, 4)])
        run.log({"loss": 1.0})
    watcher.remove()
    run.finish()
    recorded, key = loopback.runs[run.id], "activation/1/histogram"
    found = [row[key] for row in recorded.history if key in row]
    assert [histogram["_type"] for histogram in found] == ["histogram", "histogram"]
    widths = np.diff(found[0]["bins"])
    assert len(widths) == NUM_LOGGED_BINS
    np.testing.assert_allclose(widths, widths[0], rtol=1e-9)
    assert sum(found[0]["values"]) == 20
    assert not [name for name in recorded.summary if name.startswith("activation/")]
    names = [metric.get("1") or metric.get("2") for metric in recorded.metrics]
    # `5`: the step metric; `7` = [6] keeps it out of the summary.
    assert recorded.metrics[names.index(key)]["5"] == names.index("gradwatch/step") + 1
    assert recorded.metrics[names.index(key)]["7"] == [6]


def test_a_sink_without_histograms_draws_none(offline_run):
    model = Passes()
    sink = WandbSink(offline_run, histograms=False)
    watcher, _ = watch(model, [Activations("inner")], sinks=[sink])
    train(model, [torch.ones(2)])
    watcher.remove()
    offline_run.finish()
    rows = [record["history"]["item"] for record in records(offline_run) if record["type"] == "history"]
    assert any("activation/inner/norm" in row for row in rows)
    assert not any("histogram" in key for row in rows for key in row)


def test_histograms_do_not_depend_on_the_default_device():
    model = Passes()
    watcher, sink = watch(model, [Activations("inner", statistics=["norm", "histogram"])])
    torch.set_default_device("meta")
    try:
        x = torch.ones(3, device="cpu")
        model(x).sum().backward()
        SGD([model.gain], lr=0).step()
    finally:
        torch.set_default_device(None)
    watcher.remove()
    assert sink.merged().metric_histograms[KEY].counts.sum() == 3
    assert sink.merged().metrics["activation/inner/norm"][0] == pytest.approx(3**0.5)
