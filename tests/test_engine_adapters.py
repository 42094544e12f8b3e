"""Engines with gradients in memory of their own: what is measured under a small one with DeepSpeed's protocol."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import fake_deepspeed
import pytest
import ranks
import torch
from fake_deepspeed import DeepSpeedEngine
from gradients import Chosen, of, samples, watch

import wandb_gradwatch
from wandb_gradwatch import MemorySink
from wandb_gradwatch.metrics import Activations


@pytest.fixture(autouse=True)
def deepspeed_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deepspeed.install(monkeypatch)


def train(engine: DeepSpeedEngine, steps: int = 3, micro_batches: int = 1) -> None:
    """Give parameter `a` the gradient (3, 4) and `b` the gradient 12, whose norm together is 13."""
    for _ in range(steps * micro_batches):
        engine.backward(engine.module.loss(a=[3, 4], b=[12]))
        engine.step()


def of_engine(**options: Any) -> DeepSpeedEngine:
    return DeepSpeedEngine(Chosen(a=2, b=1), **options)


@pytest.mark.parametrize("given", ["engine", "its module", "several"])
@pytest.mark.parametrize("stage", [0, 1])
def test_the_gradient_is_the_one_before_clipping_and_the_received_one_that_after_it(stage, given):
    engine = of_engine(limit=6.5, stage=stage)
    model = {"engine": engine, "its module": engine.module, "several": [engine, Chosen(c=1)]}[given]
    watcher, sink = watch(model)
    train(engine)
    snapshot = samples(watcher, sink)
    prefix = "model0." if given == "several" else ""
    assert snapshot.steps.tolist() == [1, 2, 3]
    assert of(snapshot, f"{prefix}a", "grad_norm").tolist() == [5] * 3
    assert of(snapshot, f"{prefix}b", "grad_norm").tolist() == [12] * 3
    assert of(snapshot, f"{prefix}b", "grad_norm_clipped") == pytest.approx([6] * 3, rel=1e-6)  # 12 * 6.5 / 13
    assert snapshot.clip_ratio == 1


@pytest.mark.parametrize("stage", [0, 1])
def test_micro_batches_are_one_sample_with_the_mean_loss(stage):
    engine = of_engine(micro_batches=4, stage=stage)
    watcher, sink = watch(engine)
    before = engine.module.loss(a=[3, 4], b=[12]).item()
    train(engine, micro_batches=4)
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3]
    assert snapshot.total_grad_norm == pytest.approx([13] * 3)
    # 0.1 * 13 ** 2 less after each update
    losses = [before, before - 16.9, before - 33.8]
    assert snapshot.metrics["gradwatch/loss"] == pytest.approx(losses, rel=1e-5)


def test_a_loss_that_is_divided_already_is_summed():
    engine = of_engine(micro_batches=2)
    watcher, sink = watch(engine)
    for _ in range(2):
        engine.backward(engine.module.loss(a=[1, 1]) / 2 + engine.module.b.sum() * 0, scale_wrt_gas=False)
        engine.step()
    assert samples(watcher, sink).metrics["gradwatch/loss"].tolist() == [2]


def test_gradients_are_divided_by_the_loss_scale_and_a_step_that_overflows_is_skipped():
    engine = of_engine(scale=1024.0)
    watcher, sink = watch(engine)
    train(engine, steps=1)
    engine.backward(engine.module.loss(a=[torch.inf, 4], b=[12]))
    engine.step()
    train(engine, steps=1)
    snapshot = samples(watcher, sink)
    assert snapshot.total_grad_norm[[0, 2]].tolist() == [13, 13]
    assert snapshot.total_grad_norm_clipped[[0, 2]].tolist() == [13, 13]
    assert snapshot.loss_scale.tolist() == [1024] * 3
    assert snapshot.skipped.tolist() == [False, True, False]


def test_nan_without_a_loss_scale_is_an_alert_although_the_engine_does_not_apply_the_step():
    engine, sink = of_engine(), MemorySink()
    watcher = wandb_gradwatch.watch(engine, sinks=[sink], sample_every=1, log_every=1)
    train(engine)
    engine.backward(engine.module.loss(a=[torch.nan, 4], b=[12]))
    engine.step()
    watcher.remove()
    assert [(alert.title, alert.step) for alert in sink.alerts] == [("NaN gradient", 4)]


@pytest.mark.parametrize("options", [{}, {"sample_every": 7}, {"sample_every": None, "log_every": 50}])
@pytest.mark.parametrize("stage", [0, 1])
def test_training_is_bitwise_the_same_and_the_engine_gets_its_functions_back(stage, options):
    parameters = []
    for watched in (True, False):
        engine = of_engine(limit=1.0, stage=stage)
        own = set(vars(engine))
        watcher = watch(engine, **options)[0] if watched else None
        train(engine, steps=20)
        if watcher is not None:
            assert set(vars(engine)) - own == {"_take_model_step", "backward"}
            watcher.remove()
        assert set(vars(engine)) == own
        parameters.append([parameter.detach().clone() for parameter in engine.module.parameters()])
    assert all(map(torch.equal, *parameters))


def test_nothing_is_read_at_steps_that_are_not_sampled():
    engine = of_engine()
    watcher, sink = watch(engine, sample_every=10, log_every=10)
    train(engine, steps=40)
    assert engine.module.a._hp_mapping.num_reads == 4
    assert samples(watcher, sink).steps.tolist() == [10, 20, 30, 40]


def test_a_parameter_that_no_backward_reached_has_the_gradient_of_zeros_that_the_update_uses():
    engine = DeepSpeedEngine(Chosen(a=2, unused=1))
    engine.module.unused.grad = torch.zeros(1)
    watcher, sink = watch(engine)
    engine.backward(engine.module.loss(a=[3, 4]))
    engine.step()
    assert of(samples(watcher, sink), "unused", "grad_norm").tolist() == [0]


@pytest.mark.parametrize("where", ["before the update", "after it"])
def test_what_the_engine_raises_reaches_the_training_and_the_next_step_is_measured(where, monkeypatch):
    engine = of_engine()
    watcher, sink = watch(engine)
    own_step, calls = engine.optimizer.step, []

    def step() -> None:
        calls.append(len(calls))
        if len(calls) == 2 and where == "before the update":
            engine.optimizer.averaged_gradients[0] = None
            raise RuntimeError("out of memory")
        own_step()
        if len(calls) == 2:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.optimizer, "step", step)
    train(engine, steps=1)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(engine, steps=1)
    train(engine, steps=2)
    assert calls == [0, 1, 2, 3]
    assert samples(watcher, sink).total_grad_norm.tolist() == [13] * 4


def test_an_exception_of_ours_is_reported_once_and_every_step_is_made(monkeypatch, caplog):
    engine = of_engine()
    watcher, _ = watch(engine)
    monkeypatch.setattr(type(engine.module.a._hp_mapping), "get_lp_grad_fragment", lambda *_: 1 / 0)
    begin = engine.module.a.detach().clone()
    with caplog.at_level(logging.ERROR, logger="wandb_gradwatch"):
        train(engine)
    assert [record.getMessage() for record in caplog.records] == [
        "wandb_gradwatch has failed and stopped watching; training goes on. Please report this traceback."
    ]
    assert engine.module.a.tolist() == pytest.approx((begin - torch.tensor([0.9, 1.2])).tolist())  # 3 steps of 0.1
    watcher.remove()
    assert "_take_model_step" not in vars(engine)


def test_a_second_watch_replaces_the_first(caplog):
    engine = of_engine()
    _, first = watch(engine)
    train(engine)
    watcher, second = watch(engine.module)
    assert "the new watch() replaces the earlier one" in caplog.text
    train(engine)
    watcher.remove()
    assert first.merged().steps.tolist() == second.merged().steps.tolist() == [1, 2, 3]
    assert "_take_model_step" not in vars(engine)


def test_unwatch_finds_the_engine_by_its_module():
    engine = of_engine()
    watch(engine)
    wandb_gradwatch.unwatch(engine.module)
    assert "_take_model_step" not in vars(engine)


def test_the_engine_is_freed_although_it_is_watched():
    engine = of_engine()
    watcher, sink = watch(engine)
    train(engine)
    reference = weakref.ref(engine)
    del engine
    gc.collect()
    assert reference() is None
    assert sink.merged().steps.tolist() == [1, 2, 3]
    watcher.remove()


def test_two_engines_make_two_models():
    generator, critic = of_engine(), of_engine(limit=6.5)
    watcher, sink = watch({"generator": generator, "critic": critic})
    for _ in range(3):
        train(critic, steps=1)
        train(generator, steps=1)
    snapshot = samples(watcher, sink)
    assert snapshot.steps.tolist() == [1, 2, 3, 4, 5, 6]
    clipped = of(snapshot, "critic.b", "grad_norm_clipped")
    assert clipped[~torch.isnan(torch.from_numpy(clipped.copy())).numpy()] == pytest.approx([6] * 3, rel=1e-6)


def test_metrics_of_modules_are_those_of_the_model_inside():
    engine = DeepSpeedEngine(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    watcher, sink = watch(engine, metrics=[Activations()])
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    keys = samples(watcher, sink).metrics
    assert any(key.startswith("gradwatch/activation") or "/1/" in key for key in keys), sorted(keys)


@pytest.mark.parametrize(
    ("option", "value"),
    [("guard", "skip"), ("on_nonfinite", "trace"), ("loss_scale", 2.0), ("scaler", torch.amp.GradScaler("cpu"))],
)
def test_options_that_the_engine_decides_are_refused(option, value):
    engine = of_engine()
    with pytest.raises(ValueError, match=f"{option}=.* cannot be used, because DeepSpeed itself .*leave it out"):
        watch(engine, **{option: value})
    assert "_take_model_step" not in vars(engine)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"has_moe_layers": True}, "has layers of experts"),
        ({"enable_backward_allreduce": False}, "averages gradients inside its optimizer"),
        ({"zenflow": True}, "uses ZenFlow"),
        ({"optimizer": None}, "has no optimizer"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_to_do(change, why):
    engine = of_engine()
    for name, value in change.items():
        setattr(engine, name, value)
    for model in (engine, engine.module, [Chosen(c=1), engine]):
        with pytest.raises(ValueError, match=f"DeepSpeed engine {why} cannot be watched: .*get_global_grad_norm"):
            watch(model)


@pytest.mark.parametrize("attribute", ["cpu_offload", "offload_optimizer"])
def test_offloaded_gradients_are_refused(attribute):
    engine = of_engine()
    setattr(engine.optimizer, attribute, True)
    with pytest.raises(ValueError, match="offloads its optimizer cannot be watched: leave offload_optimizer"):
        watch(engine)


@pytest.mark.distributed
@pytest.mark.parametrize("limit", [0.0, 9.0])
def test_uneven_and_empty_parts_of_two_ranks_are_merged(limit):
    [found_by_rank] = ranks.run("fake_deepspeed", [("measured", {"limit": limit})], 2)
    norms = [2 * 3**0.5, 4 * 4**0.5, 2.0]  # of 3 elements of 2, 4 of 4 and 1 of 2: together the square root of 80
    for found in found_by_rank:
        assert found["parameters, True"] == found["parameters, False"]
        assert found["steps"] == [1, 2, 3]
        assert found["elements"] == [3, 4, 1]
        for step, of_step in enumerate(found["norms"], start=1):
            assert of_step == pytest.approx([norm * step for norm in norms])
        totals = [80**0.5 * step for step in (1, 2, 3)]  # 8.9, 17.9, 26.8
        assert found["received"] == pytest.approx([min(total, limit or total) for total in totals], rel=1e-6)
        assert found["parameter norms"][0] == pytest.approx([3**0.5, 2.0, 1.0])  # all elements begin with 1


def test_ignites_grad_watch_refuses_an_engine():
    pytest.importorskip("ignite")
    from wandb_gradwatch.integrations.ignite import GradWatch

    with pytest.raises(ValueError, match="cannot see the norms of DeepSpeed, which trains the model"):
        GradWatch(of_engine())
