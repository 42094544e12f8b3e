"""Ignite: metrics are correct and available to every handler, and the update of a bad batch is skipped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from frameworks import Recomputed, batches, small_model
from ignite_programs import Engine, Events, approx, collect, create_supervised_trainer, scaled_step, usual_step
from offline import history
from torch.optim.optimizer import _global_optimizer_pre_hooks

from wandb_gradwatch.integrations.ignite import GradWatch
from wandb_gradwatch.sinks import MemorySink

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


def test_metrics_agree_with_float64_in_the_usual_train_step() -> None:
    model = small_model()
    expected = Recomputed(model)
    engine = Engine(usual_step(model, torch.optim.SGD(model.parameters(), lr=0.01), expected))
    norms, means, stds = collect(engine), collect(engine, "grad_mean"), collect(engine, "grad_std")
    layers = collect(engine, "grad_norm/2/weight")
    GradWatch(model, per_layer=True).attach(engine)
    engine.run(batches(8), max_epochs=2)
    assert norms == approx(expected.norms)
    assert means == approx(expected.means)
    assert stds == approx(expected.stds)
    assert layers == approx(expected.layer_norms(2))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_supervised_trainers_too(accumulate: int) -> None:
    model = small_model()
    expected = Recomputed(model)
    data = batches(8)
    trainer = create_supervised_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda y, target: (y - target).square().mean(),
        gradient_accumulation_steps=accumulate,
    )
    memory = MemorySink()
    GradWatch(model, sinks=[memory]).attach(trainer)
    losses: list[float] = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: losses.append(engine.state.output))

    @trainer.on(Events.ITERATION_STARTED)
    def look(engine: Engine) -> None:
        first = engine.state.iteration - 1
        if first % accumulate == 0:
            expected.look(data[first : first + accumulate])

    trainer.run([(x, x.sum(dim=1, keepdim=True)) for x in data])
    samples = memory.merged()
    assert samples.total_grad_norm.tolist() == approx(expected.norms)
    # The train step does not call loss(): Ignite returns each batch's loss, and calls backward() on its share.
    groups = [losses[first : first + accumulate] for first in range(0, len(losses), accumulate)]
    assert samples.metrics["gradwatch/loss"].tolist() == approx([sum(group) / accumulate for group in groups])


@pytest.mark.filterwarnings("ignore:.*GradScaler.*")
def test_supervised_amp_is_seen_as_the_optimizer_gets_it() -> None:
    """Autocast rounds the forward, so the norms are compared with those of autograd's own gradients."""
    model = small_model()
    trainer = create_supervised_trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda y, target: (y.float() - target).square().mean(),
        device="cpu",
        amp_mode="amp",
        scaler=True,
    )
    norms, left = collect(trainer), []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda _: left.append(float(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm())),
    )
    GradWatch(model).attach(trainer)
    trainer.run([(x, x.sum(dim=1, keepdim=True)) for x in batches(6)])
    assert norms == approx(left)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("unscale", [False, True])
def test_a_scaled_gradient_is_shown_unscaled(unscale: bool, given: bool) -> None:
    """The train step has its own scaler, of which Ignite is not aware; it is passed to GradWatch or found."""
    model = small_model()
    expected = Recomputed(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=65536.0)

    engine = Engine(scaled_step(model, optimizer, scaler, expected, unscale=unscale))
    norms = collect(engine)
    GradWatch(model, scaler=scaler if given else None).attach(engine)
    engine.run(batches(6))
    assert norms == approx(expected.norms)


def test_an_exception_leaves_the_engine_and_nothing_is_kept() -> None:
    def broken_run() -> tuple[Any, Any]:
        model = small_model()
        usual = usual_step(model, torch.optim.SGD(model.parameters(), lr=0.01))

        def step(engine: Engine, x: torch.Tensor) -> float:
            if engine.state.iteration == 3:
                raise RuntimeError("broken batch")
            return usual(engine, x)

        engine = Engine(step)
        grad_watch = GradWatch(model).attach(engine)
        with pytest.raises(RuntimeError, match="broken batch"):
            engine.run(batches(5))
        return weakref.ref(model), weakref.ref(grad_watch)

    references = broken_run()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_run_that_ends_or_is_terminated_leaves_no_hook() -> None:
    model = small_model()
    hooks_before = list(_global_optimizer_pre_hooks)
    engine = Engine(usual_step(model, torch.optim.SGD(model.parameters(), lr=0.01)))
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda e: e.terminate())
    grad_watch = GradWatch(model).attach(engine)
    engine.run(batches(5))
    assert grad_watch.watcher is None
    assert all(not parameter._backward_hooks for parameter in model.parameters())
    assert list(_global_optimizer_pre_hooks) == hooks_before


def test_a_checkpoint_carries_the_step_and_what_is_usual() -> None:
    """A spike right after a resume is compared with the steps before the checkpoint."""
    model, memory = small_model(), MemorySink()
    step = usual_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    first = Engine(step)
    saved = GradWatch(model).attach(first)
    first.run(batches(10))
    state = saved.state_dict()

    second = Engine(step)
    flags = collect(second, "unhealthy_spike")
    resumed = GradWatch(model, skip=True, sinks=[memory])
    resumed.load_state_dict(state)
    resumed.attach(second)
    second.run(batches(2) * torch.tensor([1000.0, 1.0])[:, None, None])
    assert flags == [True, False]
    samples = memory.merged()
    assert samples.steps.tolist() == [11, 12]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_norm": 0}, ValueError, r"max_norm=0 must be a positive number or None"),
        ({"stds": -1}, ValueError, r"stds=-1 must be a number above 0, or None"),
        ({"rule": 5}, TypeError, r"GradWatch\(\): rule=5 must be a function from a norm"),
        ({"on_spike": "stop"}, TypeError, r"GradWatch\(\): on_spike='stop' must be a function of the engine"),
        ({"skip": "no"}, TypeError, r"GradWatch\(\): skip='no' must be True or False"),
        ({"per_layer": 1}, TypeError, r"GradWatch\(\): per_layer=1 must be True or False"),
        ({"prefix": None}, TypeError, r"GradWatch\(\): prefix=None must be a string"),
        ({"model": None}, TypeError, r"GradWatch\(\) needs a torch.nn.Module, or a list or dict of them, but got None"),
        ({"model": [3]}, TypeError, r"GradWatch\(\) needs a torch.nn.Module, or a list or dict of them, but got int"),
        ({"run": "mine"}, TypeError, r"run='mine' must be what wandb.init\(\) returns"),
        ({"threshold": 1}, TypeError, r"GradWatch got an unexpected argument 'threshold'"),
        ({"guard": "skip", "skip": True}, TypeError, r"GradWatch got an unexpected argument 'guard'"),
        ({"sample_every": 5}, TypeError, r"GradWatch got an unexpected argument 'sample_every'"),
    ],
)
def test_wrong_arguments_raise_at_once(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GradWatch(**{"model": small_model(), **arguments})


def test_attaching_to_what_is_no_engine_is_refused() -> None:
    with pytest.raises(TypeError, match=r"attach\(\): engine=\[\] must be the ignite.engine.Engine of the training"):
        GradWatch(small_model()).attach([])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_ignites_wandb_logger_keeps_its_rows_and_we_ours(start_run: Callable[..., Any]) -> None:
    from ignite.handlers.wandb_logger import OutputHandler, WandBLogger

    run = start_run(reinit="finish_previous")
    model = small_model()
    expected = Recomputed(model)
    engine = Engine(usual_step(model, torch.optim.SGD(model.parameters(), lr=0.01), expected))
    wandb_logger = WandBLogger(id=run.id, reinit="return_previous")
    assert wandb_logger.run is run
    wandb_logger.attach(
        engine,
        OutputHandler("training", metric_names="all", output_transform=lambda loss: {"loss": loss}),
        Events.ITERATION_COMPLETED,
    )
    GradWatch(model, log_every=2).attach(engine)
    engine.run(batches(6))
    wandb_logger.close()
    rows = history(run)
    theirs = [row for row in rows if "training/loss" in row]
    assert [row["_step"] for row in theirs] == [1, 2, 3, 4, 5, 6]
    assert [row["training/grad_norm"] for row in theirs] == approx(expected.norms)
    ours = [row for row in rows if "gradwatch/step" in row]
    assert [row["gradwatch/step"] for row in ours] == [2, 4, 6]
    assert [row["gradwatch/grad_norm"] for row in ours] == approx(expected.norms[1::2])
