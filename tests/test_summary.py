"""The summary of a history: worst layers first, missing values marked as missing, and names printed safely."""

from __future__ import annotations

import dataclasses
import io
import math
import sys

import numpy as np
import pytest
import torch
from windows import window

from wandb_gradwatch import MemorySink, watch
from wandb_gradwatch._judgement.incident import Incident
from wandb_gradwatch._judgement.verdict import verdict_of
from wandb_gradwatch._summary import TRACE_WIDTH, LayerSummary, sparkline, summarise
from wandb_gradwatch.snapshot import Snapshot

NAN, INF = math.nan, math.inf


def names_of(history: Snapshot) -> list[str]:
    return [layer.name for layer in summarise(history).worst]


def test_a_layers_numbers_are_those_of_its_norms() -> None:
    # Norms 5, 50 and 5: the median is 5, the peak 10 times that, at step 2. The newest is 5, the parameter's norm 1.
    (layer,) = summarise(window({"a": [3.0, 4.0]}, {"a": [30.0, 40.0]}, {"a": [5.0, 0.0]})).worst
    assert layer == LayerSummary("a", 5.0, 10.0, 2, 5.0, 0.5, 0, (5.0, 50.0, 5.0))


def test_the_worst_stand_first_non_finite_then_silent_then_peaks_then_what_the_gradient_consists_of() -> None:
    calm = {
        "rounding": [1e-9, 1e-9],  # like a key bias: a negligible share of the total norm
        "half": [0.0, 1e-3],
        "calm": [1e-3, 1e-3],
        "peak": [1e-3, 1e-3],
        "silent": None,
        "early": [1e-3, 1e-3],
        "late": [1e-3, 1e-3],
    }
    history = window(
        calm, calm, {**calm, "peak": [1.0, 1.0]}, calm, {**calm, "early": [NAN, 1.0]}, {**calm, "late": [INF, 1.0]}
    )
    assert names_of(history) == ["early", "late", "silent", "peak", "calm", "half", "rounding"]


def test_of_layers_that_broke_in_one_sample_the_one_nearest_the_output_stands_first() -> None:
    assert names_of(window({"in": [1.0], "mid": [NAN], "out": [NAN]})) == ["out", "mid", "in"]


def test_a_sample_that_amp_skipped_makes_no_layer_the_worst_but_is_counted() -> None:
    history = window({"a": [NAN], "b": [1.0]}, {"a": [1.0], "b": [4.0]}, {"a": [1.0], "b": [1.0]})
    skipped = dataclasses.replace(history, skipped=np.array([True, False, False]))
    assert names_of(history) == ["a", "b"]
    assert names_of(skipped) == ["b", "a"]  # its peak is 4 times its median
    assert summarise(skipped).worst[1].num_nonfinite == 1


def test_a_frozen_layer_is_not_silent() -> None:
    history = window({"frozen": None, "b": [1.0]})
    assert names_of(history) == ["frozen", "b"]
    assert names_of(dataclasses.replace(history, trainable=np.array([False, True]))) == ["b", "frozen"]


def test_missing_values_are_dashes_and_blanks_and_never_zero() -> None:
    summary = summarise(window({"a": None, "b": [1.0]}, {"a": None, "b": [1.0]}))
    (line,) = [line for line in summary.text().splitlines() if line.startswith("  a ")]
    assert line.split() == ["a", "-", "-", "-", "-", "-"]
    assert "0" not in line
    assert "overhead" not in summary.text()


def test_before_the_first_sample_it_says_so() -> None:
    for history in (None, window()):
        assert "no sample has arrived yet" in str(summarise(history))
        assert "no sample has arrived yet" in summarise(history)._repr_html_()


def test_one_sample_is_enough() -> None:
    text = summarise(window({"a": [3.0, 4.0], "b": [12.0]}, first_step=7)).text()
    assert text.splitlines()[0] == "Gradients of 2 parameters, step 7"
    assert "total norm  13, peak 1x the median at step 7" in text


def test_of_a_thousand_layers_only_the_worst_are_shown() -> None:
    calm: dict[str, list[float] | None] = {f"blocks.{index}.weight": [1.0] for index in range(1000)}
    history = window(calm, calm, {**calm, "blocks.617.weight": [64.0]})
    summary = summarise(history)
    assert (summary.worst[0].name, len(summary.worst), summary.num_more) == ("blocks.617.weight", 8, 992)
    assert summary.text().splitlines()[-1] == "  and 992 more"
    assert "and 992 more" in summary._repr_html_()
    # The title, the norm, the incidents, an empty line, the headings, eight layers, and the number of the others.
    assert len(summary.text().splitlines()) == 14


def test_a_long_history_is_pooled_and_its_spike_stays() -> None:
    samples = [{"a": [1.0]} for _ in range(256)]
    samples[100] = {"a": [1000.0]}
    (layer,) = summarise(window(*samples)).worst
    assert len(layer.trace) == TRACE_WIDTH
    assert sorted(layer.trace) == [1.0] * (TRACE_WIDTH - 1) + [1000.0]


def test_incidents_and_overhead_are_named() -> None:
    incidents = [Incident("kind", f"Title {step}", "WARN", step, step, step, "a fact") for step in range(1, 8)]
    incidents[3] = dataclasses.replace(incidents[3], cause_text="one bad batch")
    verdict = verdict_of(incidents, num_steps=9, num_measured=9)
    text = summarise(window({"a": [1.0]}), verdict=verdict, overhead_ratio=0.0123).text()
    assert "2 earlier, Title 3 (step 3), one bad batch (step 4)" in text
    assert "overhead    1.2 % of the time" in text
    assert "incidents   none" in summarise(window({"a": [1.0]})).text()


@pytest.mark.parametrize(
    ("trace", "blocks"),
    [
        ([1, 2, 4, 8], "▁▃▆█"),  # three octaves over eight blocks: 0, 7/3, 14/3 and 7
        ([1, 1.1, 1], "▁▁▁"),  # less than three octaves do not fill the height
        ([1, NAN, 0, INF], "▁ 0×"),
        ([], ""),
        ([NAN, 0], " 0"),
    ],
)
def test_a_trace_is_logarithmic_and_says_missing_zero_and_non_finite(trace, blocks) -> None:
    assert sparkline(trace) == blocks


def test_what_a_terminal_cannot_show_is_a_question_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = summarise(window({"größe." + "x" * 60: [NAN]}, {"größe." + "x" * 60: [1.0]}))
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    assert str(summary).encode("ascii").decode().splitlines()[-1].endswith("  ??")  # NaN, then the only norm
    wide = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", wide)
    assert "×" in str(summary)


def test_names_are_neither_html_nor_terminal_codes() -> None:
    told = verdict_of([Incident("kind", "<i>", "WARN", 1, 1, 1, "a fact")], num_steps=1, num_measured=1)
    summary = summarise(window({'<script>alert("x")</script>': [1.0], "a\x1b[31m": [1.0]}), verdict=told)
    shown = summary._repr_html_()
    assert "<script" not in shown
    assert "<i>" not in shown + told._repr_html_()
    assert "&lt;i&gt;" in told._repr_html_()
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;" in shown
    assert "\x1b" not in shown + summary.text()


def test_a_watcher_sums_up_its_own_training() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, sinks=[MemorySink()], sample_every=1, log_every=5) as watcher:
        assert watcher.summary().steps is None
        for _ in range(20):
            loss = model(torch.ones(2, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        summary = watcher.summary()
    assert summary.steps == (1, 20)
    assert summary.num_names == 4
    assert {layer.name for layer in summary.worst} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert 0 <= summary.overhead_ratio <= 1


def test_a_nan_in_a_training_is_in_its_summary() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with watch(model, sinks=[MemorySink()], sample_every=1) as watcher:
        for step in range(1, 4):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * (math.nan if step == 3 else 1.0)).backward()
            optimizer.step()
        summary = watcher.summary()
    assert [incident.title for incident in summary.verdict.incidents] == ["NaN gradient"]
    assert summary.verdict.status == "error"
    assert summary.worst[0].name == "bias"
    assert summary.total.trace[-1] == INF
