"""watch(): invalid arguments, messages, the rows in a real W&B run, and what it must leave unchanged."""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import math
import pickle
import re
import weakref

import pytest
import torch
import wandb
from gradients import Chosen, only, step, watch
from offline import history
from torch import nn

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch.metrics import Updates

SGD = torch.optim.SGD


@pytest.mark.parametrize(
    ("others", "named", "words"),
    [
        (
            (nn.MSELoss(),),
            {"log": "all"},
            "too many positional arguments. .* criterion, idx and log_graph do not exist",
        ),
        ((), {"log_freq": 100}, "unexpected keyword argument 'log_freq'. .* is log_every= here"),
        ((nn.Linear(1, 1),), {}, "It takes one model, or a list or dict of models"),
    ],
)
def test_arguments_of_wandb_watch_are_answered_with_ours(others, named, words):
    with pytest.raises(TypeError, match=words):
        wandb_gradwatch.watch(nn.Linear(1, 1), *others, **named, sinks=[])


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("model", {}, TypeError, "needs a torch.nn.Module, or a list or dict of them, but got str"),
        ([nn.Linear(1, 1), 3], {}, TypeError, "needs a torch.nn.Module, or a list or dict of them, but got int"),
        ([], {}, ValueError, "empty collection of models"),
        (nn.Linear(1, 1).requires_grad_(False), {}, ValueError, "the model has none with requires_grad=True"),
        (
            nn.Linear(1, 1),
            {"include": "conv"},
            ValueError,
            "no trainable parameter matching include='conv'; the first names are ['weight', 'bias']",
        ),
        (nn.Linear(1, 1), {"exclude": "."}, ValueError, "left after exclude='.'; the first names are"),
        (nn.Linear(1, 1), {"include": "("}, ValueError, "include='(' is not a regular expression"),
        (nn.Linear(1, 1), {"log_every": 0}, ValueError, "log_every=0 must be a whole number of optimizer steps"),
        (
            nn.Linear(1, 1),
            {"sample_every": -1},
            ValueError,
            "sample_every=-1 must be a whole number of optimizer steps",
        ),
        (nn.Linear(1, 1), {"sample_every": 1.5}, ValueError, "sample_every=1.5 must be a whole number"),
        (nn.Linear(1, 1), {"histogram_every": -5}, ValueError, "histogram_every=-5 must be a whole number"),
        (nn.Linear(1, 1), {"backend": "gpu"}, ValueError, "backend='gpu' is unknown"),
        (nn.Linear(1, 1), {"backend": "cuda"}, RuntimeError, "backend='cuda' needs CUDA gradients, but 'weight'"),
        (nn.Linear(1, 1), {"dead_threshold": -1}, ValueError, "dead_threshold=-1 must be a number, at least 0"),
        (nn.Linear(1, 1), {"dead_threshold": math.nan}, ValueError, "dead_threshold=nan must be"),
        (nn.Linear(1, 1), {"group_by": "layer"}, ValueError, "group_by='layer' must be"),
        (nn.Linear(1, 1), {"start_step": -1}, ValueError, "start_step=-1 must be a whole number of steps, at least 0"),
        (nn.Linear(1, 1), {"max_overhead": 1}, ValueError, "max_overhead=1 must be above 0 and below 1, for instance"),
        (nn.Linear(1, 1), {"start_step": "7"}, ValueError, "start_step='7' must be"),
        (nn.Linear(1, 1), {"start_step": None}, ValueError, "start_step=None must be"),
        (nn.Linear(1, 1), {"rules": [3]}, TypeError, "3"),
        (nn.Linear(1, 1), {"rules": len}, TypeError, "rules=<built-in function len> must be a list of rules"),
        (nn.Linear(1, 1), {"optimizer": ["adam"]}, TypeError, "optimizer=['adam'] must be one torch.optim.Optimizer"),
        (nn.Linear(1, 1), {"scaler": True}, TypeError, "scaler=True must be a torch.amp.GradScaler; for a scale of"),
        (nn.Linear(1, 1), {"scaler": 1024}, TypeError, "your own pass loss_scale="),
        (nn.Linear(1, 1), {"loss_scale": 0.0}, ValueError, "loss_scale=0.0 must be above 0"),
        (nn.Linear(1, 1), {"loss_scale": lambda: 8}, TypeError, "must accept the step, but: too many positional"),
        (nn.Linear(1, 1), {"start_step": 10**30}, ValueError, "a whole number of steps"),
        (nn.Linear(1, 1), {"run": "mine"}, TypeError, "run='mine' must be what wandb.init() returns"),
        (nn.Linear(1, 1), {"run": wandb}, TypeError, "must be what wandb.init() returns"),
        (nn.Linear(1, 1), {"sinks": "console"}, TypeError, "sinks='console' must be a list of sinks"),
        (nn.Linear(1, 1), {"sinks": [print]}, TypeError, "must be a list of sinks, derived from wandb_gradwatch.Sink"),
        (nn.Linear(1, 1), {"on_alert": 5}, TypeError, "on_alert=5 must be a function, or several"),
        (nn.Linear(1, 1), {"on_alert": [5]}, TypeError, "5 is not a function"),
        (nn.Linear(1, 1), {"metrics": [3]}, TypeError, "metrics holds 3, which is not a metric"),
        (nn.Linear(1, 1), {"metrics": 3}, TypeError, "metrics=3 must be a list of metrics"),
        (nn.Linear(1, 1), {"guard": wandb_gradwatch.SkipGuard}, ValueError, "or a SkipGuard"),
        (nn.Linear(1, 1), {"include": 5}, ValueError, "include=5 must be a regular expression"),
        (nn.Linear(1, 1), {"start_step": True}, ValueError, "start_step=True must be"),
        (nn.Linear(1, 1), {"group_by": lambda name: 3}, TypeError, "must return a name, but returned 3 for 'weight'"),
        (
            {"a": nn.ModuleDict({"b": nn.Linear(1, 1)}), "a.b": nn.Linear(1, 1)},
            {},
            ValueError,
            "two parameters would both be called 'a.b.weight'",
        ),
    ],
)
def test_bad_arguments_raise_at_once_and_say_what_to_do(model, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        watch(model, **options)


def test_no_metrics_may_be_said_as_none_like_all_else():
    watch(Chosen(a=1), metrics=None)[0].remove()


def test_unwatch_takes_what_watch_takes_and_refuses_what_is_no_model():
    models = {"a": Chosen(a=1), "b": Chosen(a=1)}
    watchers = [watch(model)[0] for model in models.values()]
    with pytest.raises(TypeError, match=re.escape("unwatch() needs a torch.nn.Module, or a list or dict of them")):
        wandb_gradwatch.unwatch(watchers[0])
    wandb_gradwatch.unwatch([Chosen(a=1)])
    assert all(model.a._backward_hooks for model in models.values())
    wandb_gradwatch.unwatch(models)
    assert not any(model.a._backward_hooks for model in models.values())


def test_a_run_and_a_sink_for_the_same_run_would_log_each_row_twice(offline_run):
    with pytest.raises(ValueError, match="logged twice: pass one"):
        wandb_gradwatch.watch(nn.Linear(1, 1), run=offline_run, sinks=[wandb_gradwatch.WandbSink(offline_run)])


def test_without_a_run_it_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"found no W&B run: call wandb.init\(\) first, pass run=, or pass sinks="):
        wandb_gradwatch.watch(nn.Linear(1, 1))


def test_a_refused_watch_leaves_nothing_behind():
    model = Chosen(a=1)
    with pytest.raises(ValueError, match="log_every"):
        watch(model, log_every=0)
    assert not model.a._backward_hooks
    first, sink = watch(model)
    for options in ({"guard": "no"}, {"scaler": -3}, {"optimizer": 3}, {"rules": 3}, {"metrics": [3]}, {"sinks": [3]}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            watch(model, **options)
    step(model, SGD(model.parameters(), lr=0.1), a=[2])
    first.remove()
    assert sink.merged().total_grad_norm.tolist() == [2]


def test_the_one_line_in_a_real_run(start_run):
    run = start_run(mode="offline")
    model = Chosen(a=2, b=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher = wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=2)
    for number in range(1, 5):
        step(model, optimizer, a=[3, 4], b=[12 * number])
        run.log({"loss": number})
    watcher.remove()
    run.finish()
    rows = [row for row in history(run) if "gradwatch/step" in row]
    assert [row["gradwatch/step"] for row in rows] == [2, 4]
    assert [row["gradwatch/grad_norm"] for row in rows] == pytest.approx([math.hypot(5, 24), math.hypot(5, 48)])
    assert [row["gradwatch/grad_norm_max"] for row in rows] == [row["gradwatch/grad_norm"] for row in rows]
    assert [row["grad_norm/a"] for row in rows] == [5, 5]
    assert [row["grad_norm_max/b"] for row in rows] == [24, 48]
    assert rows[0]["grad_param_ratio/a"] == pytest.approx(5 / math.sqrt(2))
    assert rows[0]["param_norm/a"] == pytest.approx(math.sqrt(2))  # two ones
    assert rows[0]["gradwatch/param_norm"] == pytest.approx(math.sqrt(3))
    assert [row["loss"] for row in history(run) if "loss" in row] == [1, 2, 3, 4]


def test_a_run_that_ends_while_watched_gets_its_last_window_and_the_next_run_nothing_of_it(start_run):
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    first = start_run(mode="offline")
    wandb_gradwatch.watch(model, run=first, sample_every=1, log_every=2)
    for number in range(1, 4):
        step(model, optimizer, a=[number])
        first.log({"loss": number})
    first.finish()
    second = start_run(mode="offline")
    wandb_gradwatch.watch(model, run=second, sample_every=1, log_every=2)
    for number in range(4, 6):
        step(model, optimizer, a=[number])
        second.log({"loss": number})
    wandb_gradwatch.unwatch()
    second.finish()

    def norms(run):
        return [row["gradwatch/grad_norm"] for row in history(run) if "gradwatch/grad_norm" in row]

    assert norms(first) == [2, 3]
    assert norms(second) == [5]


@pytest.mark.parametrize(
    "place", ["measurer.measure", "clipping.Clipping._among", "optimizer_registry.OptimizerRegistry.has_masters"]
)
def test_an_exception_inside_the_monitor_is_reported_once_and_training_goes_on(place, monkeypatch, caplog):
    model, other = Chosen(a=1), Chosen(a=1)
    other.loss(a=[1]).backward()
    optimizer = SGD(model.parameters(), lr=0.5)
    watcher, sink = watch(model, log_every=10)
    step(model, optimizer, a=[1])

    def broken(*_, **__):
        raise ZeroDivisionError("inside the monitor")

    monkeypatch.setattr(f"wandb_gradwatch._capture.{place}", broken)
    for _ in range(3):
        step(model, optimizer, a=[1])
        torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # looks up whether the parameters are watched
    assert model.a.item() == 1 - 4 * 0.5
    assert [record.levelno for record in caplog.records if "stopped watching" in record.message] == [logging.ERROR]
    assert "ZeroDivisionError: inside the monitor" in caplog.text
    assert set(sink.merged().total_grad_norm.tolist()) == {1}  # the samples from before are kept
    assert sink.closed
    watcher.remove()


def test_a_sink_that_raises_is_dropped_and_the_others_go_on(caplog):
    class Broken(wandb_gradwatch.MemorySink):
        def write(self, snapshot):
            raise OSError("disk full")

    model = Chosen(a=1)
    good = wandb_gradwatch.MemorySink()
    watcher, _ = watch(model, sinks=[Broken(), good])
    for _ in range(3):
        step(model, SGD(model.parameters(), lr=0.0), a=[1])
    watcher.remove()
    assert caplog.text.count("Broken failed and is dropped") == 1
    assert len(good.merged()) == 3


@pytest.mark.parametrize("kept", [0, -1, "all"])
def test_a_memory_that_keeps_nothing_is_refused(kept):
    with pytest.raises(ValueError, match=re.escape(f"MemorySink(max_snapshots={kept!r}) must be at least 1, or None")):
        wandb_gradwatch.MemorySink(kept)


def test_nan_at_50_and_a_spike_at_110_are_both_alerted_and_no_good_step_is():
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=1e-3)
    watcher, sink = watch(model, rules=None, log_every=50)
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0)).mul(0.2).exp()
    for number in range(1, 201):
        value = {50: math.nan, 110: 1000 * noise[110].item()}.get(number, noise[number - 1].item())
        step(model, optimizer, a=[value])
    watcher.remove()
    told = dict.fromkeys((alert.title, alert.step) for alert in sink.alerts)  # the spike is sent twice: NaN parameters
    assert list(told) == [("NaN gradient", 50), ("Exploding gradient", 110)]


def test_nan_is_reported_with_its_own_step_not_the_flush_step():
    model = Chosen(a=1, b=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, rules=None, log_every=100)
    for number in range(1, 8):
        step(model, optimizer, a=[1], b=[math.nan if number == 5 else 1])
    assert [alert.step for alert in sink.alerts] == [5]
    assert "Step 5" in sink.alerts[0].text
    assert [layer.name for layer in sink.alerts[0].incident.layers] == ["b"]
    watcher.remove()


def test_the_signature_is_the_contract():
    contract = {
        "log": "gradients", "run": None, "include": None, "exclude": None, "sample_every": None, "log_every": None,
        "histogram_every": None, "max_overhead": 0.01, "group_by": None, "details": (), "metrics": (), "rules": None,
        "sinks": None,
        "on_alert": None, "guard": None, "on_nonfinite": None,
        "dead_threshold": 0.0, "optimizer": None, "scaler": None, "loss_scale": None,
        "start_step": 0, "backend": "auto",
    }  # fmt: skip
    model, *others = inspect.signature(wandb_gradwatch.watch).parameters.values()
    assert (model.name, model.default) == ("model", inspect.Parameter.empty)
    assert {parameter.name: parameter.default for parameter in others} == contract
    assert {parameter.kind for parameter in others} == {inspect.Parameter.KEYWORD_ONLY}


def test_the_public_names_are_the_contract():
    names = {
        "watch", "unwatch", "Watcher", "Snapshot", "Alert", "Rule", "rule", "default_rules", "SkipGuard", "Sink",
        "WandbSink", "ConsoleSink", "WebhookSink", "MemorySink", "load_recording",
    }  # fmt: skip
    assert names <= set(wandb_gradwatch.__all__)
    assert all(hasattr(wandb_gradwatch, name) for name in wandb_gradwatch.__all__)
    asked = {"remove", "flush", "latest", "step", "mark_step", "wait", "note", "record", "summary", "verdict"}
    asked |= {"state_dict", "load_state_dict", "parameter_names", "__enter__", "__exit__"}
    assert asked <= set(dir(wandb_gradwatch.Watcher))


def test_the_arguments_are_left_as_they_are():
    given = {
        "rules": [*wandb_gradwatch.default_rules(), lambda snapshot: None], "sinks": [wandb_gradwatch.MemorySink()],
        "metrics": [Updates()], "include": ["a"], "on_alert": [print],
    }  # fmt: skip
    before = {name: list(values) for name, values in given.items()}
    rules = [dict(vars(rule)) for rule in given["rules"][:-1]]
    watch(Chosen(a=1), **given)[0].remove()
    assert given == before  # the same objects in the same order
    assert [vars(rule) for rule in given["rules"][:-1]] == rules


def test_group_by_module_in_a_run(start_run):
    run = start_run(mode="offline")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    watcher = wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=1, group_by="module")
    model(torch.ones(1, 2)).sum().backward()
    SGD(model.parameters(), lr=0.1).step()
    watcher.remove()
    run.finish()
    [row] = [row for row in history(run) if "gradwatch/step" in row]
    assert {key for key in row if key.startswith("grad_norm/")} == {"grad_norm/0", "grad_norm/1"}


def test_parameters_that_are_asked_for_stay_parameters_however_many_they_are(start_run, caplog):
    run = start_run(mode="offline")
    model = Chosen(**{f"p{index}": 1 for index in range(260)})
    watcher = wandb_gradwatch.watch(
        model, run=run, sample_every=1, log_every=1, group_by="parameter", histogram_every=0
    )
    step(model, SGD(model.parameters(), lr=0.1), **{f"p{index}": [1] for index in range(260)})
    watcher.remove()
    run.finish()
    [row] = [row for row in history(run) if "gradwatch/step" in row]
    assert sum(key.startswith("grad_norm/") for key in row) == 260
    assert "series" not in caplog.text


def test_watched_twice_unwatched_and_watched_again_every_row_once(start_run):
    run = start_run(mode="offline")
    model = Chosen(a=1)
    optimizer = SGD(model.parameters(), lr=0.0)
    number = 0
    for _ in range(3):
        watcher = wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=1, start_step=number)
        for _ in range(2):
            number += 1
            step(model, optimizer, a=[number])
            run.log({"loss": number})
        watcher.remove()
    run.finish()
    rows = [row for row in history(run) if "gradwatch/step" in row]
    assert [row["gradwatch/grad_norm"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["gradwatch/step"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ends", ["remove", "_script_ends"])
def test_a_removed_watcher_that_the_script_holds_is_not_called_when_the_interpreter_clears_the_model(ends):
    """It was, after torch had been cleared: "Exception ignored in" was the last line of every such script."""
    model = nn.Linear(2, 2)
    watcher, _ = watch(model)

    def is_called() -> bool:
        callbacks = [reference.__callback__ for reference in weakref.getweakrefs(model)]
        return any(getattr(callback, "__self__", None) is watcher for callback in callbacks)

    assert is_called()  # while it watches
    getattr(watcher, ends)()
    assert not is_called()


def test_the_state_is_small_and_plain_when_nothing_is_pending():
    model = Chosen(a=1)
    watcher, _ = watch(model)
    state = watcher.state_dict()
    assert state["samples"] == []
    assert state["sampler"]["step"] == 0
    watcher.remove()


@pytest.mark.parametrize("second", ["a", "b"])  # with the first one's name, or another
def test_no_row_waits_for_the_runs_end_because_of_another_watcher(start_run, second):
    """The rows of both models join the user's row of their step, and each model has its own total norm."""
    run = start_run(mode="offline")
    models = [Chosen(a=1), Chosen(**{second: 1})]
    optimizers = [SGD(model.parameters(), lr=0.0) for model in models]
    watchers = [wandb_gradwatch.watch(model, run=run, log_every=1, sample_every=1, rules=[]) for model in models]
    for number in range(4):
        step(models[0], optimizers[0], a=[3])
        step(models[1], optimizers[1], **{second: [4]})
        run.log({"loss": number})
    for watcher in watchers:
        watcher.remove()
    run.finish()
    rows = history(run)
    layers = ["grad_norm/a", "grad_norm/b" if second == "b" else "grad_norm/model1/a"]
    keys = ["_step", "loss", "gradwatch/step", "gradwatch/grad_norm", "gradwatch/model1/grad_norm", *layers]
    assert [[row.get(key) for key in keys] for row in rows] == [[n, n, n + 1, 3, 4, 3, 4] for n in range(4)]


def test_two_models_with_equal_names_in_one_run_stay_apart(start_run):
    run = start_run(mode="offline")
    models = [Chosen(a=1), Chosen(a=1)]
    optimizers = [SGD(model.parameters(), lr=0.0) for model in models]
    watchers = [wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=1, include="^a$") for model in models]
    assert [watcher.parameter_names for watcher in watchers] == [("a",), ("model1.a",)]
    for model, optimizer, gradient in zip(models, optimizers, (3, 4), strict=True):
        step(model, optimizer, a=[gradient])
    for watcher in watchers:
        watcher.remove()
    run.finish()
    values = {key: value for row in history(run) for key, value in row.items()}
    assert (values["gradwatch/grad_norm"], values["gradwatch/model1/grad_norm"]) == (3, 4)
    assert (values["grad_norm/a"], values["grad_norm/model1/a"]) == (3, 4)


@pytest.fixture
def no_collector():
    """Only the code under test frees reference cycles, and looks only at objects that the test makes."""
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("keeps", ["nothing", "best", "previous", "all"])
@pytest.mark.parametrize("in_cycle", [False, True])
@pytest.mark.parametrize("collects", [False, True])
def test_the_names_of_folds_do_not_depend_on_the_garbage_collector(start_run, no_collector, keeps, in_cycle, collects):
    """Five folds in one run: one name if no model outlives its fold, otherwise five."""
    run = start_run(mode="disabled")
    kept, seen = [], []
    for fold in range(5):
        model = Chosen(a=1)
        if in_cycle:  # as a LightningModule and its trainer
            model.trainer = [model]
        if collects and fold % 2:
            gc.collect()
        watcher = wandb_gradwatch.watch(model, run=run, sample_every=1, log_every=1, rules=[])
        seen.append((*watcher.namespaces_in(run), *watcher.parameter_names))
        step(model, SGD(model.parameters(), lr=0.0), a=[3])
        if keeps == "all":
            kept.append(model)
        elif keeps == "previous" or (keeps == "best" and fold in (0, 2)):
            kept = [model]
    wandb_gradwatch.unwatch()
    own = [("", "a"), *((f"model{fold}", f"model{fold}.a") for fold in range(1, 5))]
    assert seen == ([("", "a")] * 5 if keeps == "nothing" else own)


def test_a_model_that_is_watched_anew_keeps_its_name(start_run, no_collector):
    run = start_run(mode="disabled")
    models = [Chosen(a=1), Chosen(a=1)]
    for model in [*models, *models, *reversed(models)]:
        watcher = wandb_gradwatch.watch(model, run=run)
        assert watcher.namespaces_in(run) == ({""} if model is models[0] else {"model1"})
    wandb_gradwatch.unwatch()
    for model in reversed(models):  # all are gone: the numbers begin again
        watcher = wandb_gradwatch.watch(model, run=run)
        assert watcher.namespaces_in(run) == ({""} if model is models[1] else {"model1"})
    wandb_gradwatch.unwatch()


def test_default_rules_handed_over_know_what_is_frozen_too():
    """The README recommends `rules=[*default_rules(), mine]`: it must find everything that rules=None finds."""
    model = Chosen(used=1, unused=1, frozen=1)
    model.frozen.requires_grad_(False)
    alerts = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rules = [*wandb_gradwatch.default_rules(), lambda snapshot: None]
    with watch(model, rules=rules, on_alert=alerts.append)[0]:
        for _ in range(101):
            optimizer.zero_grad()
            model.loss(used=[1]).backward()
            optimizer.step()
    (alert,) = alerts
    assert (alert.incident.kind, alert.step) == ("no_gradient", 100)
    assert [layer.name for layer in alert.incident.layers] == ["unused"]


@pytest.mark.parametrize("held", [False, True])
def test_a_network_that_is_only_copied_into_needs_no_gradient_unless_an_optimizer_holds_it(held):
    """Target networks (DQN, SAC, TD3) have requires_grad, but are updated by copying and get no gradients."""
    models = {"online": Chosen(a=1), "target": Chosen(a=1)}
    optimizer = SGD([*models["online"].parameters(), *(models["target"].parameters() if held else ())], lr=0.1)
    alerts = []
    with watch(models, rules=[only("no_gradient")], on_alert=alerts.append)[0]:
        for _ in range(120):
            step(models["online"], optimizer, a=[1])
            models["target"].load_state_dict(models["online"].state_dict())
    told = [(alert.step, [layer.name for layer in alert.incident.layers]) for alert in alerts]
    assert told == ([(100, ["target.a"])] if held else [])


@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_unfrozen_or_frozen_on_the_way_needs_no_gradient_while_it_is_frozen(frozen):
    """Unfreeze layer b later, and freeze layer c: no alert. If c is detached instead of frozen, its gradient is missed.

    After 45 samples with a gradient, five without one are no chance.
    """
    model = Chosen(a=1, b=1, c=1)
    optimizer = SGD(model.parameters(), lr=0.1)
    alerts = []
    with watch(model, rules=[only("no_gradient")], on_alert=alerts.append)[0]:
        for number in range(1, 71):
            model.b.requires_grad_(number > 20)
            model.c.requires_grad_(number <= 45 or not frozen)
            used = {"a": [1]} | ({"b": [1]} if number > 20 else {}) | ({"c": [1]} if number <= 45 else {})
            optimizer.zero_grad()
            model.loss(**used).backward()
            optimizer.step()
    told = [(alert.step, [layer.name for layer in alert.incident.layers]) for alert in alerts]
    assert told == ([] if frozen else [(50, ["c"])])


def test_a_layer_that_no_optimizer_holds_is_told_of_once_though_its_gradient_stops():
    model = Chosen(a=1, forgotten=1)
    optimizer = SGD([model.a], lr=0.1)
    alerts = []
    rules = [only("not_in_optimizer", "no_gradient")]
    with watch(model, rules=rules, on_alert=alerts.append)[0]:
        for number in range(10):
            optimizer.zero_grad()
            model.loss(a=[1], **({"forgotten": [1]} if number == 0 else {})).backward()
            optimizer.step()
    assert [(alert.title, alert.step) for alert in alerts] == [("Not in any optimizer", 2)]


def test_a_copy_of_a_model_that_holds_its_watcher_holds_none():
    model = nn.Linear(1, 1)
    model.watcher = wandb_gradwatch.watch(model, sinks=[MemorySink()])
    assert copy.deepcopy(model).watcher is None
    assert pickle.loads(pickle.dumps(model.watcher)) is None
