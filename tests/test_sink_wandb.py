"""The W&B sink against the real SDK and wandb-core: offline files and a server on the loopback interface."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gradients
import numpy as np
import pytest
import torch
import wandb
from fake_run import fake_snapshots
from offline import history, records
from windows import window

import wandb_gradwatch
from wandb_gradwatch.rules import Alert
from wandb_gradwatch.sinks import Sink
from wandb_gradwatch.sinks._history_row import MAX_ROW_BYTES
from wandb_gradwatch.sinks._wandb_run import MAX_SERIES, WandbSink, coarse_grouping

NAN = float("nan")
ALERT = Alert("NaN gradient", "layer b holds 1 NaN at step 7", step=7, level="ERROR")


def ours(row: dict[str, Any]) -> bool:
    return "gradwatch/step" in row


def test_it_is_a_sink(offline_run: Any) -> None:
    assert isinstance(WandbSink(offline_run), Sink)


def test_a_window_arrives_in_the_users_row_of_the_same_step(start_run: Any, loopback: Any) -> None:
    run = start_run(server=loopback)
    sink = WandbSink(run)
    sink.write(window({"a.weight": [3, 4], "b.weight": [12]}, histogram=True))
    run.log({"loss": 0.5})
    run.finish()
    (row,) = loopback.runs[run.id].history
    assert (row["_step"], row["loss"], row["gradwatch/step"]) == (0, 0.5, 1)
    assert (row["gradwatch/grad_norm"], row["grad_norm/a/weight"], row["grad_norm/b/weight"]) == (13, 5, 12)
    assert row["gradients/a/weight"]["_type"] == "histogram"
    assert sum(row["gradients/a/weight"]["values"]) == 2
    assert len(row["gradients/a/weight"]["bins"]) == len(row["gradients/a/weight"]["values"]) + 1
    assert not [key for key in row if "." in key]


def test_no_key_is_ever_nan(start_run: Any, loopback: Any) -> None:
    run = start_run(server=loopback)
    sink = WandbSink(run)
    sink.write(window({"a": [NAN, NAN], "frozen": None}, {"a": None, "frozen": None}, histogram=True))
    sink.close()
    run.finish()
    (row,) = loopback.runs[run.id].history
    assert row["num_nonfinite/a"] == row["gradwatch/num_nan"] == 2
    assert not [key for key, value in row.items() if value != value]
    assert not [key for key in row if "frozen" in key]


@pytest.mark.parametrize("framework", ["none", "before", "after"])
def test_every_key_has_the_step_as_its_x_axis_and_the_summary_has_two_numbers_of_ours(
    start_run: Any, loopback: Any, framework: str
) -> None:
    """W&B chooses at random between two patterns: with a framework's `*`, half of all keys would have other options."""
    run = start_run(server=loopback)

    def define(when: str) -> None:
        if framework == when:  # as the Trainer of transformers does
            run.define_metric("train/global_step")
            run.define_metric("*", step_metric="train/global_step", step_sync=True)

    define("before")
    sink = WandbSink(run)
    define("after")
    metrics = {"head/rank": np.array([2.0]), "activation/0/std": np.array([1.0])}
    names = {f"blocks.{number}.weight": [1.0, 2.0] for number in range(20)}
    for number in range(2):
        sink.write(window(names, histogram=True, metrics=metrics, first_step=number))
        run.log({"grad_norm/of_the_user": 1.0, "train/global_step": number})
    run.finish()
    recorded = loopback.runs[run.id]
    names_in_order = [metric.get("1") or metric.get("2") for metric in recorded.metrics]
    definitions = dict(zip(names_in_order, recorded.metrics, strict=True))
    of_framework = set() if framework == "none" else {"*", "train/global_step"}
    assert len(definitions) == len(names_in_order)
    assert {name for name in definitions if "*" in name} <= of_framework
    ours = {key for row in recorded.history for key in row if not key.startswith("_")}
    ours -= {"grad_norm/of_the_user", "train/global_step"}
    assert {"gradients/blocks/19/weight", "grad_norm/blocks/19/weight", "head/rank", "activation/0/std"} <= ours
    step = names_in_order.index("gradwatch/step") + 1
    # `5` is the position of the step metric, `7` = [6] the option that keeps a metric out of the summary.
    assert {definitions[key]["5"] for key in ours - {"gradwatch/step"}} == {step}
    # At the end of a run W&B prints the first ten keys in alphabetical order: the user's own keys are among them.
    kept = {"gradwatch/step", "gradwatch/grad_norm", "gradwatch/grad_norm_max", "head/rank"}
    in_summary = {key for key in recorded.summary if not key.startswith("_")}
    assert in_summary == kept | {"grad_norm/of_the_user", "train/global_step"}


def test_a_key_is_defined_once_although_sinks_and_rows_share_it(
    start_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(mode="offline")
    defined: list[str] = []
    define_metric = run.define_metric

    def noting(name: str, **options: Any) -> Any:
        defined.append(name)
        return define_metric(name, **options)

    monkeypatch.setattr(run, "define_metric", noting)
    for number in range(3):
        for sink in (WandbSink(run), WandbSink(run, namespace="model1")):
            sink.write(window({"a": [1.0]}, first_step=number, histogram=True))
            run.log({"loss": number})
    run.finish()
    assert len(defined) == len(set(defined))
    logged = {key for row in history(run) for key in row if not key.startswith("_")} - {"loss"}
    assert {key.partition(".")[0] for key in logged} == {name.partition(".")[0] for name in defined}


def test_layers_beyond_the_number_that_wandb_defines_quickly_have_a_pattern(
    start_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wandb_gradwatch.sinks._definitions.MAX_DEFINITIONS", 40)
    run = start_run(mode="offline")
    defined: list[str] = []
    monkeypatch.setattr(run, "define_metric", lambda name, **_: defined.append(name))
    sink = WandbSink(run)
    sink.write(window({f"layers.{number}": [1.0] for number in range(30)}))
    run.log({"loss": 0})
    run.finish()
    assert len(defined) < 60
    assert any(name.endswith("/*") for name in defined)
    assert "gradwatch/*" not in defined
    assert "gradwatch/grad_norm" in defined


def test_a_name_that_wandb_refuses_to_define_is_logged_all_the_same(offline_run: Any, said: Any) -> None:
    sink = WandbSink(offline_run)
    sink.write(window({"a*b": [3.0]}))
    offline_run.log({"loss": 0})
    offline_run.finish()
    (row,) = history(offline_run)
    assert (row["grad_norm/a*b"], row["loss"]) == (3.0, 0)
    assert said() == []


def test_a_users_row_with_a_name_of_our_families_gets_no_step_of_ours(offline_run: Any) -> None:
    sink = WandbSink(offline_run)
    sink.write(window({"a": [1.0]}))
    offline_run.log({"loss": 0})
    offline_run.log({"grad_norm/of_the_user": 1.0})
    offline_run.finish()
    assert set(history(offline_run)[1]) == {"_step", "_runtime", "_timestamp", "grad_norm/of_the_user"}


def test_forty_windows_of_a_gpt_arrive_once_and_in_order(offline_run: Any) -> None:
    sink = WandbSink(offline_run)
    for number, snapshot in enumerate(fake_snapshots()):
        sink.write(snapshot)
        offline_run.log({"loss": number}, step=10 * number)
    offline_run.finish()
    rows = history(offline_run)
    assert [row["gradwatch/step"] for row in rows] == list(range(10, 401, 10))
    assert [row["loss"] for row in rows] == list(range(40))
    skipped = [row["gradwatch/step"] for row in rows if row["gradwatch/num_skipped_steps"]]
    assert skipped == [270]  # the window that ends at 270 holds step 265


def test_histograms_can_be_off(offline_run: Any) -> None:
    sink = WandbSink(offline_run, histograms=False, details=("precision",))
    sink.write(window({"a": [1.0]}, histogram=True))
    offline_run.finish()
    (row,) = history(offline_run)
    assert not [key for key in row if key.startswith("gradients")]
    assert "gradwatch/grad_abs_p50" in row


def test_groups(offline_run: Any) -> None:
    sink = WandbSink(offline_run, group_by="module")
    sink.write(window({"head.weight": [3.0], "head.bias": [4.0]}))
    offline_run.finish()
    (row,) = history(offline_run)
    assert [key for key in row if key.startswith("grad_norm/")] == ["grad_norm/head"]
    assert row["grad_norm/head"] == 5


def test_many_names_become_modules_and_it_is_said_once(offline_run: Any, said: Any) -> None:
    gradients = {f"layer.{index}.{kind}": [1.0] for index in range(200) for kind in ("weight", "bias")}
    sink = WandbSink(offline_run)
    for _ in range(2):
        sink.write(window(gradients))
        offline_run.log({})
    offline_run.finish()
    assert [len([key for key in row if key.startswith("grad_norm/")]) for row in history(offline_run)] == [200, 200]
    (message,) = said()
    assert message == (
        "wandb_gradwatch: of 400 parameters W&B would show no more than 256 well: they are logged as 200 groups "
        '(one per module). To choose, pass group_by="parameter" for all, or group_by= a function from parameter name '
        "to group name."
    )


@pytest.mark.parametrize(
    ("names", "some_groups"),
    [
        # 500 equal blocks and a head: nearly all blocks are grouped in pairs, and the head has its own series.
        ([f"blocks.{i}.fc" for i in range(500)] + ["head"], ["blocks.1-2.fc", "blocks.498-499.fc", "head"]),
        # Experts are grouped with neighbours of the same layer, separately from attention and MLP.
        ([f"layer.{i}.expert.{j}" for i in range(4) for j in range(100)], ["layer.3.expert.98-99"]),
        ([f"{i}.{kind}" for i in range(600) for kind in ("attn", "mlp")], ["595-599.attn", "595-599.mlp"]),
        ([str(i) for i in range(512)], ["0-1", "509-511"]),
        ([f"conv{i}" for i in range(257)], ["conv0", "conv255-256"]),
        # Names without numbers: neighbours in the model's order are grouped.
        ([f"{a}{b}" for a in "abcdefghijklmnopq" for b in "abcdefghijklmnopq"], ["aa", "qp-qq"]),
    ],
)  # fmt: skip
def test_neighbours_of_one_kind_share_a_series_only_as_far_as_they_must(
    names: list[str], some_groups: list[str]
) -> None:
    group_of, _ = coarse_grouping(tuple(f"{name}.weight" for name in names))
    groups = list(dict.fromkeys(group_of(f"{name}.weight") for name in names))
    assert 200 <= len(groups) < MAX_SERIES
    assert set(some_groups) <= set(groups)
    assert group_of("new.weight") == "later"


@pytest.mark.parametrize(
    ("names", "some_groups"),
    [
        # A ParameterList is a single module, so grouping by module is not enough.
        ([f"tensors.{i}" for i in range(510)], ["tensors.0-1", "tensors.508-509"]),
        ([f"m.{a}{b}" for a in "abcdefghijklmnopq" for b in "abcdefghijklmnopq"], ["m.aa", "m.qp-m.qq"]),
        ([*(f"blocks.{i}.w" for i in range(10)), *(f"tensors.{i}" for i in range(500))], ["tensors.498-499"]),
    ],
)  # fmt: skip
def test_parameters_of_few_modules_are_joined_themselves(names: list[str], some_groups: list[str]) -> None:
    group_of, _ = coarse_grouping(tuple(names))
    groups = list(dict.fromkeys(map(group_of, names)))
    assert 200 <= len(groups) < MAX_SERIES
    assert set(some_groups) <= set(groups)


def test_a_depth_that_divides_the_model_well_is_better_than_neighbours() -> None:
    parts = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.up", "mlp.down"]
    names = tuple(f"layers.{layer}.{part}.weight" for layer in range(64) for part in parts)  # 384 modules
    group_of, words = coarse_grouping(names)
    assert len(set(map(group_of, names))) == 128  # of each layer the attention and the MLP
    assert words == "by the first 3 parts of the name"


def test_what_appears_later_has_a_series_of_its_own(offline_run: Any, said: Any) -> None:
    gradients = {f"{index}.weight": [3.0 if index % 2 == 0 else 4.0] for index in range(510)}
    sink = WandbSink(offline_run)
    sink.write(window(gradients))
    offline_run.log({})
    sink.write(window(gradients | {"late.weight": [7.0]}, first_step=2))
    offline_run.finish()
    first, second = history(offline_run)
    norms = {key: value for key, value in first.items() if key.startswith("grad_norm/")}
    assert len(norms) == 255
    assert set(norms.values()) == {5.0}  # two each: 3 and 4
    assert second["grad_norm/later"] == 7
    (message,) = said()
    assert "they are logged as 255 groups (up to 2 neighbours of one kind each)" in message


def test_names_that_become_one_in_wandb_are_said(offline_run: Any, said: Any) -> None:
    sink = WandbSink(offline_run)
    for step in (1, 2):
        sink.write(window({"a/b.weight": [3.0], "a.b.weight": [4.0], "head.weight": [1.0]}, first_step=step))
        offline_run.log({})
    offline_run.finish()
    (message,) = said()
    assert "'a/b.weight' and 'a.b.weight' share one series, which shows only the last of them" in message


def test_a_choice_of_the_user_stays(offline_run: Any, said: Any) -> None:
    sink = WandbSink(offline_run, group_by="parameter")
    sink.write(window({f"p{index}": [1.0] for index in range(MAX_SERIES + 1)}))
    offline_run.finish()
    (row,) = history(offline_run)
    assert len([key for key in row if key.startswith("grad_norm/")]) == MAX_SERIES + 1
    assert said() == []


def test_a_row_above_a_megabyte_is_spread_histograms_last(
    start_run: Any, loopback: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wandb_gradwatch.sinks._definitions.MAX_DEFINITIONS", 0)  # W&B takes seconds for thousands
    run = start_run(server=loopback)
    sink = WandbSink(run, group_by="parameter")
    gradients = {f"layer.{index}": [0.1 * index, -0.3] for index in range(700)}
    sink.write(window(gradients, histogram=True))
    run.finish()
    rows = loopback.runs[run.id].history
    assert len(rows) == 2
    sizes = [len(line) for request in loopback.requests for line in _history_lines(request)]
    assert max(sizes) < MAX_ROW_BYTES
    assert [row["gradwatch/step"] for row in rows] == [1, 1]
    assert len([key for key in rows[0] if key.startswith("grad_norm/")]) == 700
    assert sum(key.startswith("gradients/") for row in rows for key in row) == 700


def _history_lines(request: Any) -> list[str]:
    if request.operation != "file_stream":
        return []
    return request.body.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])


def test_an_alert_arrives_with_title_text_and_level(start_run: Any, loopback: Any) -> None:
    run = start_run(server=loopback)
    WandbSink(run).alert(ALERT)
    run.finish()
    (alert,) = loopback.runs[run.id].alerts
    assert (alert["title"], alert["text"], alert["severity"]) == (ALERT.title, ALERT.text, "ERROR")
    assert alert["waitDuration"] == 1  # ms: for 0 W&B would use a minute, and drop the alert of a level that rises


def test_an_offline_alert_waits_in_the_file_for_wandb_sync(offline_run: Any) -> None:
    WandbSink(offline_run).alert(ALERT)
    offline_run.finish()
    (alert,) = [record["alert"] for record in records(offline_run) if record["type"] == "alert"]
    assert (alert["title"], alert["level"]) == ("NaN gradient", "ERROR")


def test_a_disabled_run_is_left_alone(start_run: Any) -> None:
    run = start_run(mode="disabled")
    sink = WandbSink(run)
    sink.before_run_ends(lambda: None)
    sink.write(window({"a": [1.0]}))
    sink.alert(ALERT)
    sink.close()
    run.log({"loss": 1})


def test_a_shared_run_gets_every_row_at_once(start_run: Any, loopback: Any) -> None:
    run = start_run(server=loopback, mode="shared")
    sink = WandbSink(run)
    for step in range(3):
        sink.write(window({"a": [1.0]}, first_step=step))
        run.log({"loss": step})
    run.finish()
    rows = [row for recorded in loopback.runs.values() for row in recorded.history]
    assert [row["gradwatch/step"] for row in rows if ours(row)] == [0, 1, 2]
    assert [row["loss"] for row in rows if not ours(row)] == [0, 1, 2]


def test_a_resumed_run_goes_on_after_its_last_step(start_run: Any, loopback: Any) -> None:
    loopback.resume("resumed", last_step=41)
    run = start_run(server=loopback, id="resumed", resume="must")
    sink = WandbSink(run)
    for step in range(3):
        sink.write(window({"a": [1.0]}, first_step=step))
        run.log({"loss": step}, step=42 + 10 * step)
    run.finish()
    rows = loopback.runs["resumed"].history
    assert [row["_step"] for row in rows if "loss" in row] == [42, 52, 62]
    assert [row["gradwatch/step"] for row in rows if ours(row)] == [0, 1, 2]


@pytest.mark.parametrize("namespace", ["", "model1"])
def test_two_watchers_share_one_run_and_the_users_rows(offline_run: Any, namespace: str) -> None:
    """With a namespace the rows of the second watcher join those of the first; equal keys need different rows."""
    first, second = WandbSink(offline_run), WandbSink(offline_run, namespace=namespace)
    for step in range(4):
        first.write(window({"a": [1.0]}, first_step=step))
        second.write(window({"b": [2.0]}, first_step=step))
        offline_run.log({"loss": step})
    offline_run.finish()
    rows = history(offline_run)
    assert [row["_step"] for row in rows if "loss" in row] == [0, 1, 2, 3]
    for name in ("a", "b"):
        assert [row["gradwatch/step"] for row in rows if f"grad_norm/{name}" in row] == [0, 1, 2, 3]
    together = [row for row in rows if "grad_norm/a" in row and "grad_norm/b" in row]
    if namespace:
        assert rows == together  # no row is delayed to the end of the run
        norms = [(row["gradwatch/grad_norm"], row["gradwatch/model1/grad_norm"]) for row in rows]
        assert norms == [(1.0, 2.0)] * 4
    else:
        assert not together


@pytest.mark.parametrize(("start_step", "num_told"), [(0, 1), (20, 0)], ids=["from step 1 on", "continued"])
def test_trainings_of_one_run_that_repeat_its_steps_are_told_once(
    start_step: int, num_told: int, offline_run: Any, said: Any
) -> None:
    for fold in range(3):
        model = gradients.Chosen(a=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"sample_every": 1, "log_every": 10, "start_step": fold * start_step}
        with wandb_gradwatch.watch(model, run=offline_run, **options):
            for _ in range(20):
                gradients.step(model, optimizer, a=[1.0])
    told = [text for text in said() if "gradients up to step 20 of another training, and this one begins at" in text]
    assert len(told) == num_told
    assert len([text for text in said() if "of another training" in text]) == num_told


def test_watch_unwatch_watch(offline_run: Any) -> None:
    for step in range(3):
        sink = WandbSink(offline_run)
        sink.write(window({"a": [1.0]}, first_step=step))
        sink.close()
    offline_run.log({"loss": 0})
    offline_run.finish()
    rows = history(offline_run)
    assert [row["gradwatch/step"] for row in rows if ours(row)] == [0, 1, 2]
    assert [row["_step"] for row in rows if "loss" in row] == [0]


def test_a_full_disk_costs_a_table_but_no_row(offline_run: Any, said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    sink = WandbSink(offline_run)
    with monkeypatch.context() as patch:
        patch.setattr(wandb.Table, "bind_to_run", full_disk)
        for step in range(4):
            sink.write(window({"a": [1.0]}, first_step=step))
            if step == 1:
                sink.log_table(["step", "name"], [[step, "a"]])
            offline_run.log({"loss": step})
    sink.write(window({"a": [1.0]}, first_step=4))
    offline_run.finish()
    rows = history(offline_run)
    assert [row["gradwatch/step"] for row in rows if "gradwatch/grad_norm" in row] == list(range(5))
    assert [row["loss"] for row in rows if "loss" in row] == list(range(4))
    (message,) = said()
    assert "a part of a row could not be logged to W&B and is left out" in message


@pytest.mark.parametrize("broken", ["alert", "config", "summary"])
def test_what_wandb_refuses_beside_rows_ends_no_rows(
    offline_run: Any, said: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not now")

    target = offline_run if broken == "alert" else getattr(offline_run, broken)
    monkeypatch.setattr(type(target), "alert" if broken == "alert" else "update", refuse)
    sink = WandbSink(offline_run)
    for step in range(6):
        sink.write(window({"a": [1.0]}, first_step=step))
        sink.alert(ALERT)
    offline_run.finish()
    assert [row["gradwatch/step"] for row in history(offline_run)] == list(range(6))
    (message,) = said()
    assert "could not be sent to W&B; rows and the training go on" in message


def test_a_run_that_ends_while_watched_ends_the_logging_and_it_is_said_once(start_run: Any, said: Any) -> None:
    first = start_run()
    sink = WandbSink(first)
    sink.write(window({"a": [1.0]}, first_step=0))
    first.finish()
    second = start_run()
    for step in range(1, 3):
        sink.write(window({"a": [1.0]}, first_step=step))
        sink.alert(ALERT)
    second_sink = WandbSink(second)
    second_sink.write(window({"a": [1.0]}, first_step=9))
    second.finish()
    (message,) = said()
    assert message.startswith(f"wandb_gradwatch: W&B run '{first.id}' has ended: gradients are no longer logged to it.")
    assert message.endswith("Call watch() again in the next run.")
    assert [row["gradwatch/step"] for row in history(first)] == [0]
    assert [row["gradwatch/step"] for row in history(second)] == [9]


def test_a_last_flush_when_the_run_ends(offline_run: Any) -> None:
    sink = WandbSink(offline_run)
    sink.before_run_ends(lambda: sink.write(window({"a": [1.0]}, first_step=5)))
    offline_run.finish()
    assert [row["gradwatch/step"] for row in history(offline_run)] == [5]


def test_the_newest_table_of_a_sink_is_logged_when_an_online_run_ends(
    offline_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(offline_run), "offline", False)  # the file of an offline run is easier to read
    sink = WandbSink(offline_run)
    for step in (1, 2):
        sink.log_table(["step", "name"], [[step, "a"]])
    offline_run.finish()
    (row,) = history(offline_run)
    assert (row["gradwatch/step"], row["gradwatch/flight_recorder.nrows"]) == (2, 1)


def test_a_closed_sink_lets_go_of_what_it_was_given(offline_run: Any) -> None:
    sink = WandbSink(offline_run)
    sink.before_run_ends(lambda: pytest.fail("called"))
    sink.write(window({"a": [1.0]}, first_step=0))
    sink.close()
    sink.close()
    sink.write(window({"a": [1.0]}, first_step=1))
    offline_run.finish()
    assert [row["gradwatch/step"] for row in history(offline_run)] == [0]


def test_commit_makes_rows_of_our_own_at_once(start_run: Any, loopback: Any) -> None:
    run = start_run(server=loopback)
    sink = WandbSink(run, commit=True)
    for step in range(3):
        sink.write(window({"a": [1.0]}, first_step=step))
    assert run.step == 3
    run.finish()
    assert [row["gradwatch/step"] for row in loopback.runs[run.id].history] == [0, 1, 2]


def test_more_metrics_than_wandb_shows_well_are_said_once(offline_run: Any, said: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("wandb_gradwatch.sinks._wandb_run.MAX_METRICS", 2)
    sink = WandbSink(offline_run)
    few = {f"activation/{index}/norm": np.array([1.0]) for index in range(2)}
    sink.write(window({"a": [1.0]}, metrics=few))
    assert said() == []
    for _ in range(2):
        sink.write(window({"a": [1.0]}, metrics=few | {"activation/2/norm": np.array([1.0])}))
    (text,) = said()
    assert "There are 3 metrics, but W&B shows at most 2 well" in text
    assert "match=" in text


def test_a_script_that_never_logs_keeps_its_summary_fresh_and_is_told_once(offline_run: Any, said: Any) -> None:
    sink = WandbSink(offline_run)
    for step in range(20):
        sink.write(window({"a": [float(step)]}, first_step=step))
    assert offline_run.summary["gradwatch/grad_norm"] == 19
    offline_run.finish()
    assert [row["gradwatch/step"] for row in history(offline_run)] == list(range(20))
    (message,) = said()
    assert message == (
        "wandb_gradwatch: 8 rows of gradients are queued because the script has not called run.log() yet. "
        "They are logged when the script calls run.log(), or when the run ends; a process that is killed (SIGTERM, "
        "os._exit) loses them. If the script never calls run.log(), use watch(..., sinks=[WandbSink(commit=True)])."
    )


def test_a_script_that_logs_every_row_pays_for_no_summary_although_a_table_of_an_alert_is_in_the_queue(
    offline_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = WandbSink(offline_run)
    updates: list[object] = []
    monkeypatch.setattr(type(offline_run.summary), "update", lambda _, values: updates.append(values))
    sink.log_table(["step", "name"], [[0, "a"]])  # from now on one row of ours more than the script's own is queued
    for step in range(5):
        sink.write(window({"a": [1.0]}, first_step=step))
        offline_run.log({"loss": 1.0})
    assert updates == []


@pytest.mark.parametrize("trouble", ["500", "drop"])
def test_a_server_in_trouble_loses_nothing(start_run: Any, loopback: Any, trouble: Any) -> None:
    run = start_run(server=loopback)
    sink = WandbSink(run)
    loopback.fault("file_stream", trouble, times=1)
    loopback.fault("NotifyScriptableRunAlert", trouble, times=1)
    for step in range(5):
        sink.write(window({"a": [1.0]}, first_step=step))
        sink.alert(ALERT)
        run.log({"loss": step})
    run.finish()
    recorded = loopback.runs[run.id]
    assert [row["gradwatch/step"] for row in recorded.history] == [row["loss"] for row in recorded.history]
    assert len(recorded.history) == len(recorded.alerts) == 5


def test_a_server_that_hangs_does_not_hold_training_up(start_run: Any, loopback: Any) -> None:
    # No call waits for an answer, otherwise the test would not end.
    run = start_run(server=loopback)
    sink = WandbSink(run)
    loopback.fault("*", "hang")
    for step in range(50):
        sink.write(window({"a": [1.0]}, first_step=step))
        sink.alert(ALERT)
        run.log({"loss": step}, step=7 * step)
    loopback.heal()
    run.finish()
    recorded = loopback.runs[run.id]
    assert [row["gradwatch/step"] for row in recorded.history] == [row["loss"] for row in recorded.history]
    assert (len(recorded.history), len(recorded.alerts)) == (50, 50)


def test_without_a_server_the_local_file_keeps_every_row_and_alert(start_run: Any, loopback: Any) -> None:
    run = start_run(server=loopback, settings={"finish_timeout": 1.0})
    sink = WandbSink(run)
    loopback.fault("file_stream", "500")
    for step in range(5):
        sink.write(window({"a": [1.0]}, first_step=step))
        sink.alert(ALERT)
        run.log({"loss": step})
    run.finish()
    kept = [record for record in records(run, idle_timeout="1s") if record["type"] in ("history", "alert")]
    rows = [record["history"]["item"] for record in kept if record["type"] == "history"]
    assert [(row["gradwatch/step"], row["loss"]) for row in rows] == [(step, step) for step in range(5)]
    assert len(kept) == 10
    assert not loopback.runs[run.id].rows


def test_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"WandbSink\(\) found no W&B run; call wandb\.init\(\) first or pass run="):
        WandbSink()


def test_an_ended_run(offline_run: Any) -> None:
    offline_run.finish()
    with pytest.raises(RuntimeError, match=r"has ended; call wandb\.init\(\) again and pass the new run"):
        WandbSink(offline_run)


def test_an_unknown_grouping(offline_run: Any) -> None:
    with pytest.raises(TypeError, match=r"WandbSink\(run='mine'\) must be what wandb.init\(\) returns"):
        WandbSink("mine")
    with pytest.raises(ValueError, match="group_by='layer' must be"):
        WandbSink(offline_run, group_by="layer")


def test_the_sinks_import_neither_wandb_nor_requests() -> None:
    # In a bare package, as its top level is another matter.
    script = (
        "import sys, types; package = sys.modules['wandb_gradwatch'] = types.ModuleType('wandb_gradwatch')\n"
        f"package.__path__ = {list(wandb_gradwatch.__path__)!r}\n"
        "import wandb_gradwatch.sinks, wandb_gradwatch.sinks._wandb_run, wandb_gradwatch.sinks._webhook\n"
        "assert not {'wandb', 'requests', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_details_reach_the_run_the_received_norm_after_clipping(offline_run: Any) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    watcher = wandb_gradwatch.watch(
        model, run=offline_run, details=["abs_max", "received"], sample_every=1, log_every=1
    )
    model(torch.tensor([[3.0, 4.0]])).sum().backward()  # a gradient of 3 and 4: norm 5
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    watcher.remove()
    offline_run.finish()
    [row] = history(offline_run)
    assert (row["grad_norm/weight"], row["grad_abs_max/weight"]) == (5, 4)
    assert row["grad_norm_clipped/weight"] == pytest.approx(1, rel=1e-5)


def test_a_detail_of_no_layer_is_said(offline_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    details = {"mean": "wieght$", "std": "weight$"}
    model = torch.nn.Linear(2, 1)
    with wandb_gradwatch.watch(model, run=offline_run, details=details):
        model(torch.ones(1, 2)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert "'mean' is logged for no layer, because 'wieght$' matches no name; the first names are" in caplog.text
    assert "'std' is logged" not in caplog.text


@pytest.mark.parametrize(
    "details", ["mean", ("norm",), [None], 3, None, {"norm": "x"}, {"mean": "("}, {"mean": None}, {"precision": "head"}]
)
def test_what_details_may_be_is_said_at_once(details: Any, offline_run: Any) -> None:
    with pytest.raises(ValueError, match=r"must be a sequence, or a dict|\['mean'\]=.* is not a reg|must be the empty"):
        wandb_gradwatch.watch(torch.nn.Linear(1, 1), run=offline_run, details=details)


def test_ranks_other_than_0_need_no_run_and_log_only_where_they_are_given_one(
    start_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(reinit="finish_previous")  # only such a run becomes wandb.run
    monkeypatch.setattr("wandb_gradwatch._watch.rank", lambda: 1)
    for scale, options in ((1.0, {}), (2.0, {"run": run})):
        model = gradients.Chosen(a=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with wandb_gradwatch.watch(model, sample_every=1, log_every=1, **options):
            gradients.step(model, optimizer, a=[3.0 * scale, 4.0 * scale])
    run.finish()
    assert [row["gradwatch/grad_norm"] for row in history(run)] == [10.0]  # of {6, 8}; not 5, of {3, 4}
