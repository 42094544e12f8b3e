"""The guard skips unhealthy updates; the flight recorder, notes and saved state of a watcher."""

from __future__ import annotations

import functools
import math
import re
import sys

import numpy as np
import pytest
import torch
from gradients import Chosen, of, step, watch
from processes import script
from torch import nn

import wandb_gradwatch
from wandb_gradwatch import SkipGuard, load_recording
from wandb_gradwatch._capture import open_sample
from wandb_gradwatch._guard.guard import TooManySkippedStepsError
from wandb_gradwatch.sinks._base import summary_line
from wandb_gradwatch.sinks._history_row import HistoryRow

OPTIMIZERS = {
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
}


NUM_BATCHES = 60
POISONED = frozenset({30, 41, 52})  # two explosions and a NaN


def batches(poisoned=()):
    for number in range(NUM_BATCHES):
        batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        if number in poisoned:
            batch[3, 2] = math.nan if number % 2 else 1e6
        yield number, batch


def final_state(make, numbers, *, poisoned=(), guard=None, accumulate=1, scaled=False, closure=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=10**6, enabled=scaled)
    watcher = watch(model, guard=guard, **options)[0] if guard else None
    for number, batch in batches(poisoned):
        if number not in numbers:
            continue

        def evaluate(batch=batch):
            optimizer.zero_grad()
            for part in batch.chunk(accumulate):
                loss = (model(part) + part.sum(dim=1, keepdim=True)).square().mean()
                scaler.scale(loss).backward()
            return loss

        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            scaler.step(optimizer)
            scaler.update()
    if watcher is not None:
        watcher.remove()
    return model.state_dict(), optimizer.state_dict()["state"]


@functools.cache
def clean_state(make, *, poisoned=POISONED, **loop):
    """Return the final parameters of an unwatched training without the poisoned batches."""
    return final_state(make, set(range(NUM_BATCHES)) - poisoned, **loop)


def guarded_state(make, *, poisoned=POISONED, **options):
    return final_state(make, range(NUM_BATCHES), poisoned=poisoned, guard="skip", **options)


def test_explosions_under_a_loss_scale_are_skipped_too():
    make, options = OPTIMIZERS["adam"], {"poisoned": frozenset({30, 52}), "scaled": True}
    torch.testing.assert_close(guarded_state(make, **options), clean_state(make, **options), rtol=0, atol=0)


def test_without_the_guard_the_poison_shows():
    state, _ = final_state(OPTIMIZERS["adam"], range(NUM_BATCHES), poisoned={41})
    assert any(value.isnan().any() for value in state.values())


def test_a_guard_of_ones_own(watched, caplog):
    model, optimizer, sink = watched(dict(a=1), guard=lambda snapshot: snapshot.total_grad_norm[-1] > 5)
    for gradient in (1, 10, 2):
        step(model, optimizer, a=[gradient])
    assert model.a.item() == 1 - 1 - 2
    assert sink.merged().metrics["gradwatch/num_guarded_steps"].tolist() == [0, 1, 0]
    assert of(sink.merged(), "a", "grad_norm").tolist() == [1, 10, 2]
    (told,) = [each for each in caplog.messages if "the guard skipped" in each]
    assert told == "wandb_gradwatch: the guard skipped step 2, whose gradients its function calls unhealthy"


@pytest.mark.parametrize("sample_every", [1, 7])
@pytest.mark.parametrize("says_so", [False, True])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_a_guard_of_ones_own_sees_the_loss_and_the_learning_rate_of_every_step(sample_every, says_so, scale):
    model = nn.Linear(1, 1, bias=False)
    seen = []

    def is_bad(snapshot):
        keys = ("loss", "learning_rate", "num_nonfinite_loss")
        loss, *others = (snapshot.metrics[f"gradwatch/{key}"][0] for key in keys)
        seen.append((snapshot.steps[0], loss, *others, snapshot.loss_scale[0]))
        return not loss < 5

    watcher, _ = watch(model, guard=is_bad, sample_every=sample_every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6, enabled=scale != 1)
    for loss in (1.0, 6.0, math.inf, 2.0):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        value = (
            model(torch.zeros(1, 1)).sum() + loss
        )  # a gradient of 0, so that no step is unhealthy for another reason
        if says_so:
            watcher.loss(3 * value)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(model.weight, before)
    factor = 3 if says_so else 1
    losses = [
        factor * 1.0,
        factor * 6.0,
        math.nan,
        factor * 2.0,
    ]  # a loss that is not finite is missing, and is counted
    no_scale = math.nan if scale == 1 else scale
    expected = [(step, loss, 0.5, float(step == 3), no_scale) for step, loss in enumerate(losses, start=1)]
    np.testing.assert_array_equal(seen, expected)


def test_with_several_ranks_a_guard_of_ones_own_sees_no_loss(monkeypatch):
    # Each rank has its own loss; one rank would skip a step that another applies.
    monkeypatch.setattr(open_sample, "world_size", lambda: 2)
    seen = []
    watch(model := Chosen(a=1), guard=lambda snapshot: seen.append(set(snapshot.metrics)))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), a=[1])
    (known,) = seen
    assert "gradwatch/learning_rate" in known
    assert not {key for key in known if "loss" in key}


def trained(gradients, optimizer=torch.optim.SGD, **options):
    """Train with these gradients and the default rules; return the sink and the watcher's summary."""
    model = Chosen(a=1)
    watcher, sink = watch(model, rules=None, **options)
    made = optimizer(model.parameters(), lr=1e-3)
    for gradient in gradients:
        step(model, made, a=[gradient])
    watcher.remove()
    return sink, watcher.summary()


# Enough healthy steps for judgement and guard to learn the usual norms.
CALM = [1.0, 1.1, 0.9, 1.05, 0.95] * 4
FUSED = functools.partial(torch.optim.SGD, fused=True)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, FUSED], ids=["sgd", "fused"])
@pytest.mark.parametrize(("bad", "kind"), [(math.nan, "nan_gradient"), (1e5, "exploding_gradient")])
def test_an_alert_of_a_withheld_step_says_so_and_advises_no_guard(optimizer, bad, kind):
    sink, _ = trained([*CALM, bad, *CALM], optimizer, guard="skip")
    (alert,) = sink.alerts
    assert (alert.incident.kind, alert.step) == (kind, 21)
    assert "the guard left this update out" in alert.text
    assert "guard=" not in alert.text
    assert math.isnan(bad) or alert.incident.cause == "bad_batch"


def test_an_alert_of_the_first_step_says_so_too():
    sink, _ = trained([math.nan], guard="skip")  # without earlier samples
    (alert,) = sink.alerts
    assert "the guard left this update out" in alert.text


def test_an_alert_of_a_bad_batch_without_a_guard_advises_one():
    (alert,) = trained([*CALM, 150.0, *CALM])[0].alerts
    assert alert.incident.cause == "bad_batch"
    assert "skip such steps with guard='skip'" in alert.incident.remedy
    assert "left this update out" not in alert.text


def test_only_the_withheld_step_itself_is_called_withheld():
    # Even steps are sampled. Step 23 is skipped between two samples and counted in the sample of 24, which is applied.
    guard = SkipGuard(threshold=1e6)
    sink, _ = trained([*CALM, 1, 1, math.nan, 500.0, *CALM], guard=guard, sample_every=2, log_every=2)
    (alert,) = sink.alerts
    assert alert.step == 24
    assert "left this update out" not in alert.text
    counts = {int(s.steps[-1]): s.num_guarded_steps for s in sink.snapshots}
    assert {number: count for number, count in counts.items() if count} == {24: 1}
    assert not any(s.guarded.any() for s in sink.snapshots)


def test_withheld_steps_are_in_the_summary_and_on_the_console_where_there_were_any():
    sink, summary = trained([*CALM, math.nan, math.nan], guard="skip")
    assert summary.num_guarded == 2
    assert "guard       2 steps not applied" in summary.text()
    assert "withheld 1" in summary_line(sink.snapshots[-1])
    sink, summary = trained(CALM, guard="skip")
    assert "guard" not in summary.text()
    assert "withheld" not in summary_line(sink.snapshots[-1])


def test_the_rows_count_withheld_steps_and_hold_no_other_key_of_the_guard():
    sink, _ = trained([1.0, math.nan], guard="skip", log_every=2)
    scalars = HistoryRow.of(sink.snapshots[-1]).scalars()
    assert {key: value for key, value in scalars.items() if "guard" in key} == {"gradwatch/num_guarded_steps": 1}


def test_too_many_skipped_steps_end_the_training_with_a_clear_error(watched):
    model, optimizer, _ = watched(dict(a=1), guard=SkipGuard(max_in_a_row=3))
    for _ in range(3):
        step(model, optimizer, a=[math.nan])
    with pytest.raises(TooManySkippedStepsError, match=r"4 unhealthy steps in a row, up to step 4 \(max_in_a_row=3\)"):
        step(model, optimizer, a=[math.nan])


def test_or_go_on_as_chosen(watched):
    model, optimizer, _ = watched(dict(a=1), guard=SkipGuard(max_in_a_row=1, then="continue"))
    for _ in range(2):
        step(model, optimizer, a=[math.nan])
    assert model.a.isnan()


@pytest.mark.parametrize(
    ("limits", "last", "skipped"),
    [
        ({}, 18.0, False),  # below 20 times the usual norm of 1
        ({}, 25.0, True),
        ({"factor": 4.0}, 4.5, True),
        ({"factor": 4.0}, 3.5, False),
        ({"stds": 4.0}, 1.5, True),  # the deviation of constant norms is taken as 1 %, the minimum
        ({"stds": 4.0, "factor": 4.0}, 1.5, False),
        ({"threshold": 1.2}, 1.3, True),
        ({"threshold": 1e6}, 1e5, False),  # no other limits besides the given one
    ],
    ids=str,
)
def test_the_limits_of_a_guard_are_the_callers_and_no_others(limits, last, skipped):
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = SkipGuard(**limits)
    watcher, _ = watch(model, guard=guard)
    for _ in range(16):
        step(model, optimizer, a=[1.0])
    step(model, optimizer, a=[last])
    watcher.remove()
    assert guard.num_skipped == skipped


@pytest.mark.parametrize(("guard", "message"), [("drop", "guard='drop' must be"), (3, "guard=3 must be")])
def test_a_guard_that_makes_no_sense(guard, message):
    with pytest.raises(ValueError, match=message):
        watch(Chosen(a=1), guard=guard)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_in_a_row": 0}, "max_in_a_row=0 must be a whole number of steps, at least 1"),
        ({"max_in_a_row": "3"}, "max_in_a_row='3' must be a whole number of steps"),
        ({"then": "stop"}, "then='stop' must be"),
        ({"threshold": "10"}, "threshold='10' must be a number above 0"),
        ({"threshold": 0}, "threshold=0 must be a number above 0"),  # every step would be skipped
        ({"stds": 0}, "stds=0 must be a number above 0"),  # every second step would be skipped
        ({"stds": math.nan}, "stds=nan must be a number above 0"),
        ({"factor": 0.5}, "factor=0.5 must be a number, at least 1"),
        ({"window": 2.5}, "window=2.5 must be a whole number of steps, at least 2"),
        ({"is_bad": len, "factor": 2.0}, "pass is_bad=, or the limits"),
        ({"is_bad": bool}, r"SkipGuard\(\): is_bad=<class 'bool'> must be a function from a snapshot to True"),
        ({"is_bad": 5}, r"SkipGuard\(\): is_bad=5 must be a function"),
        ({"replay": "no"}, r"SkipGuard\(\): replay='no' must be True or False"),
    ],
)
def test_limits_that_make_no_sense(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        SkipGuard(**options)


def test_what_on_alert_raises_reaches_the_training_loop():
    def stop(alert):
        raise KeyError(alert.title)

    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, _ = watch(model, rules=None, on_alert=stop)
    with pytest.raises(KeyError, match="NaN gradient"):
        step(model, optimizer, a=[math.nan])
    step(model, optimizer, a=[1])
    assert watcher.step == 2
    watcher.remove()


def test_the_recorder_on_demand_with_notes(tmp_path):
    model = Chosen(a=1, b=1)
    watcher, _ = watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for number in range(3):
        watcher.note(batch=number * 10)
        step(model, optimizer, a=[number], b=[1])
    [path] = watcher.record(tmp_path / "flight.npz")
    recording = load_recording(path)
    assert of(recording.snapshot, "a", "grad_norm").tolist() == [0, 1, 2]
    assert recording.notes == {1: {"batch": 0}, 2: {"batch": 10}, 3: {"batch": 20}}
    watcher.remove()


DIES_AFTER_A_NAN = """
import torch, wandb, wandb_gradwatch
wandb.init(project="demo", mode="offline")
model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
wandb_gradwatch.watch(model, sample_every=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(5):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 2)).sum()
    if number == 3:
        loss = loss + model[1].weight.sum() * float("nan")
    loss.backward()
    optimizer.step()
    if not all(p.isfinite().all() for p in model.parameters()):
        raise RuntimeError("the loss is not finite")
"""


def test_a_script_killed_by_an_exception_after_a_nan_leaves_the_evidence(tmp_path):
    (tmp_path / "script.py").write_text(DIES_AFTER_A_NAN)
    ended = script(tmp_path / "script.py", folder=tmp_path)
    assert "the loss is not finite" in ended.stderr
    [path] = tmp_path.glob("wandb/offline-run-*/files/gradwatch-flight-recorder.npz")
    recording = load_recording(path)
    assert recording.snapshot.names[int(recording.snapshot.num_nonfinite[3].nonzero()[0][-1])] == "1.weight"
    assert recording.alerts[0].title == "NaN gradient"


def make_watched(**options):
    torch.manual_seed(0)
    model = Chosen(a=2, b=1)
    return model, torch.optim.SGD(model.parameters(), lr=0.0), *watch(model, **options)


def test_resuming_in_the_middle_of_a_window_loses_nothing(tmp_path):
    options = {"log_every": 10, "histogram_every": 1, "rules": None}

    def train(model, optimizer, numbers):
        for number in numbers:
            step(model, optimizer, a=[number, 1], b=[0.5])

    model, optimizer, watcher, sink = make_watched(**options)
    train(model, optimizer, range(1, 21))
    watcher.remove()
    whole = sink.merged()

    first_model, optimizer, watcher, first_sink = make_watched(**options)
    train(first_model, optimizer, range(1, 8))
    torch.save(watcher.state_dict(), tmp_path / "state.pt")
    assert not first_sink.snapshots
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    model, optimizer, watcher, second_sink = make_watched(**options)
    watcher.load_state_dict(state)
    assert watcher.step == 7
    train(model, optimizer, range(8, 21))
    watcher.remove()
    resumed = second_sink.merged()
    np.testing.assert_array_equal(resumed.steps, whole.steps)
    np.testing.assert_array_equal(resumed.grad_norm, whole.grad_norm)
    np.testing.assert_array_equal(resumed.histogram, whole.histogram)
    assert [len(snapshot) for snapshot in second_sink.snapshots] == [10, 10]


def test_rules_remember_over_a_resume():
    def norms(numbers):
        return [1 + 0.01 * (number % 3) for number in numbers]

    model, optimizer, watcher, _ = make_watched(rules=None)
    for value in norms(range(30)):
        step(model, optimizer, a=[value, 0])
    state = watcher.state_dict()
    model, optimizer, watcher, sink = make_watched(rules=None)
    watcher.load_state_dict(state)
    step(model, optimizer, a=[500, 0])  # a watcher without the saved state would still be in its warm-up
    watcher.remove()
    assert [alert.title for alert in sink.alerts] == ["Exploding gradient"]


def test_the_verdict_on_a_healthy_training_has_no_incident():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    watcher, _ = watch(model, rules=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _, batch in batches():
        optimizer.zero_grad()
        (model(batch) - batch.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()
    assert watcher.verdict().status == "ok"
    assert watcher.verdict().incidents == ()
    watcher.remove()


def test_a_callback_that_raises_loses_no_row_and_no_other_callback(watched):
    heard = []

    def stop(alert):
        raise KeyError(alert.title)

    model, optimizer, sink = watched(dict(a=2), lr=0.0, rules=None, log_every=2, on_alert=[stop, heard.append])
    for number in range(1, 9):
        try:
            step(model, optimizer, a=[math.nan, math.inf] if number == 4 else [1, 1])
        except KeyError:
            assert number == 4
    assert [snapshot.steps.tolist() for snapshot in sink.snapshots] == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert [alert.incident.kind for alert in sink.alerts] == ["nan_gradient"]
    assert heard == list(sink.alerts)


def test_a_callback_that_removes_the_watcher_loses_nothing():
    watchers = []
    model = Chosen(a=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, rules=None, log_every=10, on_alert=lambda _: watchers[0].remove())
    watchers.append(watcher)
    for number in range(1, 9):
        step(model, optimizer, a=[math.nan if number == 4 else 1])
    assert sink.merged().steps.tolist() == [1, 2, 3, 4]
    assert sink.closed
    assert not model.a._backward_hooks


def test_replicas_judge_by_the_same_loops(monkeypatch):
    """If one rank compiles its loops earlier, its sums differ in the last bits, and its verdict at a limit may too."""
    model = Chosen(a=1)
    for ranks, expected in ((1, "auto"), (2, "cpu")):
        monkeypatch.setattr(sys.modules["wandb_gradwatch._watch"], "world_size", lambda ranks=ranks: ranks)
        watcher, _ = watch(model, guard="skip")
        backend = watcher._sampler._sample._measurer._config.backend
        watcher.remove()
        assert backend == expected


def test_a_step_that_is_skipped_between_two_samples_is_told_of(caplog):
    """Only its number reached a row: a user who had asked for nothing but the guard never learnt of it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    watcher = wandb_gradwatch.watch(model, sinks=[], guard="skip", sample_every=1000)
    for number in range(1, 41):
        optimizer.zero_grad()
        factor = {35: 1e6, 37: torch.nan}.get(number, 1.0)
        (model(torch.ones(8, 4)).square().mean() * factor).backward()
        optimizer.step()
    watcher.remove()
    first, total = [each for each in caplog.messages if "the guard skipped step" in each]
    assert re.search(r"^wandb_gradwatch: the guard skipped step 35, whose gradients have a norm of \d", first)
    assert total.startswith("wandb_gradwatch: 2 times in all measured steps: the guard skipped step 35,")
