"""Ignite: right metrics in time for every handler, and a bad batch that is never applied."""

from __future__ import annotations

import gc
import logging
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import Recomputed, batches, loss_of, small_model
from offline import history
from processes import inherited
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from wandb_gradwatch.integrations.spikes import SpikeRule
from wandb_gradwatch.sinks import MemorySink

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
pytest.importorskip("ignite")

from ignite.engine import Engine, Events, create_supervised_trainer  # noqa: E402

from wandb_gradwatch.integrations.ignite import GradWatch  # noqa: E402

FLOAT32 = 1e-5  # float32 gradients against float64 ones
BAD = 12  # the batch that is 1000 times too large, counted from 0
NUM_BATCHES = 20

Step = Callable[[Engine, torch.Tensor], float]


def approx(values: Any) -> Any:
    return pytest.approx(values, rel=FLOAT32, abs=1e-7)


def with_a_bad_batch(factor: float = 1000.0) -> torch.Tensor:
    data = batches(NUM_BATCHES)
    data[BAD] *= factor
    return data


def usual_step(model: nn.Module, optimizer: torch.optim.Optimizer, expected: Recomputed | None = None) -> Step:
    """As most train steps are written: nothing of ours in it, and no gradients left at its end."""

    def step(engine: Engine, x: torch.Tensor) -> float:
        if expected is not None:
            expected.look([x])
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def collect(engine: Engine, key: str = "grad_norm") -> list[float]:
    """The metric at the end of every iteration, by a handler that came before ours."""
    seen: list[float] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append(e.state.metrics[key]))
    return seen


# ---- numbers


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

    @trainer.on(Events.ITERATION_STARTED)
    def look(engine: Engine) -> None:
        first = engine.state.iteration - 1
        if first % accumulate == 0:
            expected.look(data[first : first + accumulate])

    trainer.run([(x, x.sum(dim=1, keepdim=True)) for x in data])
    samples = memory.merged()
    assert samples is not None
    assert samples.total_grad_norm.tolist() == approx(expected.norms)


@pytest.mark.filterwarnings("ignore:.*GradScaler.*")
def test_supervised_amp_is_seen_as_the_optimizer_gets_it() -> None:
    """Autocast rounds the forward: autograd's own gradient is compared, which this trainer keeps."""
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
    """The scaler is the train step's own; Ignite does not know of it. Given to us, or found."""
    model = small_model()
    expected = Recomputed(model)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=65536.0)

    def step(engine: Engine, x: torch.Tensor) -> None:
        expected.look([x])
        scaler.scale(loss_of(model, x)).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    engine = Engine(step)
    norms = collect(engine)
    GradWatch(model, scaler=scaler if given else None).attach(engine)
    engine.run(batches(6))
    assert norms == approx(expected.norms)


def test_training_is_untouched_where_nothing_is_wrong() -> None:
    def trained(watched: bool) -> list[torch.Tensor]:
        model = small_model()
        engine = Engine(usual_step(model, torch.optim.Adam(model.parameters(), lr=0.01)))
        if watched:
            GradWatch(model).attach(engine)
        engine.run(batches(8))
        return weights(model)

    for with_us, without in zip(trained(True), trained(False), strict=True):
        assert torch.equal(with_us, without)


# ---- the bad batch


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd-momentum-decay": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.5),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


@pytest.mark.parametrize("bad", [1000.0, math.inf, math.nan], ids=["spike", "inf", "nan"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_bad_batch_is_not_applied_without_any_user_code(kind: str, bad: float) -> None:
    """Bitwise the training without that batch: decay, momentum and the optimizer's count do not move either."""

    def trained(data: torch.Tensor, *, watched: bool) -> list[torch.Tensor]:
        model = small_model()
        engine = Engine(usual_step(model, OPTIMIZERS[kind](model.parameters())))
        if watched:
            GradWatch(model).attach(engine)
        engine.run(data)
        return weights(model)

    without = torch.cat([batches(NUM_BATCHES)[:BAD], batches(NUM_BATCHES)[BAD + 1 :]])
    for left_out, never_there in zip(
        trained(with_a_bad_batch(bad), watched=True), trained(without, watched=False), strict=True
    ):
        assert torch.equal(left_out, never_there)


@pytest.mark.parametrize("watch_options", [{}, {"include": "weight"}], ids=["whole", "weights-only"])
def test_the_bad_batch_moves_nothing_that_the_optimizer_holds(watch_options: dict[str, Any]) -> None:
    """Another module in the same optimizer, and what is not watched, stay too. The row says that it was left out."""

    def trained(data: torch.Tensor, memory: MemorySink | None) -> list[torch.Tensor]:
        model, before = small_model(), nn.Linear(4, 4)
        with torch.no_grad():
            before.weight.fill_(0.5), before.bias.zero_()
        optimizer = torch.optim.SGD([*model.parameters(), *before.parameters()], lr=0.01, momentum=0.9)

        def step(engine: Engine, x: torch.Tensor) -> None:
            loss_of(model, before(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

        engine = Engine(step)
        if memory is not None:
            GradWatch(model, sinks=[memory], **watch_options).attach(engine)
        engine.run(data)
        return weights(model) + weights(before)

    memory = MemorySink()
    without = torch.cat([batches(NUM_BATCHES)[:BAD], batches(NUM_BATCHES)[BAD + 1 :]])
    for left_out, never_there in zip(trained(with_a_bad_batch(), memory), trained(without, None), strict=True):
        assert torch.equal(left_out, never_there)
    samples = memory.merged()
    assert samples is not None
    assert samples.metrics["gradwatch/num_guarded_steps"].tolist() == [
        float(index == BAD) for index in range(NUM_BATCHES)
    ]


@pytest.mark.parametrize("unscale", [False, True])
def test_the_bad_batch_is_not_applied_under_loss_scaling(unscale: bool) -> None:
    def trained(data: torch.Tensor, *, watched: bool) -> list[torch.Tensor]:
        model = small_model()
        optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")

        def step(engine: Engine, x: torch.Tensor) -> None:
            scaler.scale(loss_of(model, x)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        engine = Engine(step)
        if watched:
            GradWatch(model).attach(engine)
        engine.run(data)
        return weights(model)

    without = torch.cat([batches(NUM_BATCHES)[:BAD], batches(NUM_BATCHES)[BAD + 1 :]])
    for left_out, never_there in zip(
        trained(with_a_bad_batch(), watched=True), trained(without, watched=False), strict=True
    ):
        assert torch.equal(left_out, never_there)


def test_with_skip_off_the_bad_batch_is_applied_and_flagged() -> None:
    model = small_model()
    engine = Engine(usual_step(model, torch.optim.SGD(model.parameters(), lr=1e-12)))
    flags: list[bool] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: flags.append(e.state.unhealthy_spike))
    before = weights(model)
    after: list[list[torch.Tensor]] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=BAD + 1), lambda e: after.append(weights(model)))
    GradWatch(model, skip=False, max_norm=1e4).attach(engine)
    engine.run(with_a_bad_batch(1e8))
    assert flags == [index == BAD for index in range(NUM_BATCHES)]
    assert any(not torch.equal(a, b) for a, b in zip(before, after[0], strict=True))


def test_a_train_step_can_decide_by_itself() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    skipped: list[int] = []

    def step(engine: Engine, x: torch.Tensor) -> None:
        loss_of(model, x).backward()
        if engine.state.unhealthy_spike:
            skipped.append(engine.state.iteration - 1)
            optimizer.zero_grad()
            return
        optimizer.step()
        optimizer.zero_grad()

    engine = Engine(step)
    norms = collect(engine)
    GradWatch(model, skip=False).attach(engine)
    assert engine.state.unhealthy_spike is False
    engine.run(with_a_bad_batch())
    assert skipped == [BAD]
    assert norms[BAD] > 100 * max(norms[:BAD])  # its norm is shown, though there was no step


def test_the_callback_comes_before_the_update_and_may_raise() -> None:
    model = small_model()
    engine = Engine(usual_step(model, torch.optim.SGD(model.parameters(), lr=0.01)))
    called: list[tuple[int, float]] = []

    def note(engine: Engine) -> None:
        called.append((engine.state.iteration - 1, engine.state.metrics["grad_norm"]))
        raise RuntimeError("stop at the first spike")

    GradWatch(model, on_spike=note).attach(engine)
    with pytest.raises(RuntimeError, match="stop at the first spike"):
        engine.run(with_a_bad_batch())
    assert [index for index, _ in called] == [BAD]


@pytest.mark.parametrize(
    "arguments", [{"max_norm": 1.0, "stds": None}, {"rule": lambda norm: norm > 1.0}], ids=["static", "own"]
)
def test_a_fixed_limit_or_a_function_is_the_rule(arguments: dict[str, Any]) -> None:
    """With a learning rate of 0 the norms are known beforehand: those above 1 are flagged, and no others."""
    model = small_model()
    expected = Recomputed(model)
    engine, flags = Engine(usual_step(model, torch.optim.SGD(model.parameters(), lr=0.0), expected)), []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: flags.append(e.state.unhealthy_spike))
    data = batches(8)
    data[::2] *= 0.01
    GradWatch(model, **arguments).attach(engine)
    engine.run(data)
    assert flags == [norm > 1.0 for norm in expected.norms]
    assert {True, False} == set(flags)


def test_own_rule_and_its_errors() -> None:
    model = small_model()
    norms: list[float] = []

    def own(norm: float) -> bool:
        norms.append(norm)
        if len(norms) == 3:
            raise ValueError("in the user's rule")
        return False

    engine = Engine(usual_step(model, torch.optim.SGD(model.parameters(), lr=0.01)))
    GradWatch(model, rule=own).attach(engine)
    with pytest.raises(ValueError, match="in the user's rule"):
        engine.run(batches(8))
    assert len(norms) == 3


def test_a_later_scheduler_and_the_metrics_of_ignite_go_on() -> None:
    from ignite.metrics import RunningAverage

    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine = Engine(usual_step(model, optimizer))
    RunningAverage(output_transform=lambda loss: loss).attach(engine, "loss")
    GradWatch(model).attach(engine)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: scheduler.step())
    engine.run(with_a_bad_batch())
    assert math.isfinite(engine.state.metrics["loss"])
    assert scheduler.last_epoch == NUM_BATCHES


def test_gradients_zeroed_before_the_step_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(engine: Engine, x: torch.Tensor) -> None:
        loss_of(model, x).backward()
        optimizer.zero_grad()
        optimizer.step()

    engine = Engine(step)
    GradWatch(model).attach(engine)
    with caplog.at_level(logging.WARNING, logger="wandb_gradwatch"):
        engine.run(batches(5))
    assert [r.message for r in caplog.records if "already None when the optimizer stepped" in r.message] != []
    assert sum("already None" in record.message for record in caplog.records) == 1


def test_a_frozen_model_is_said_once_and_watched_when_it_thaws(caplog: pytest.LogCaptureFixture) -> None:
    model = small_model().requires_grad_(False)
    expected = Recomputed(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(engine: Engine, x: torch.Tensor) -> None:
        if engine.state.iteration == 4:
            model.requires_grad_(True)
        expected.look([x])
        loss = loss_of(model, x)
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    engine, seen = Engine(step), []
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: seen.append(e.state.metrics.get("grad_norm")))
    with caplog.at_level(logging.WARNING, logger="wandb_gradwatch"):
        GradWatch(model).attach(engine)
        engine.run(batches(6))
    assert [record.message for record in caplog.records] == [
        "wandb_gradwatch: the model has no trainable parameter; watching begins when it has one."
    ]
    # It is looked for when an iteration begins: the first one that is watched is the next.
    assert seen[:4] == [None] * 4
    assert seen[4:] == approx(expected.norms[4:])


# ---- beginnings and ends


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
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert list(_global_optimizer_pre_hooks) == hooks_before


def test_a_checkpoint_carries_the_step_and_what_is_usual() -> None:
    """A spike right after a resume is one against the steps before it."""
    model, memory = small_model(), MemorySink()
    step = usual_step(model, torch.optim.SGD(model.parameters(), lr=0.01))
    first = Engine(step)
    saved = GradWatch(model).attach(first)
    first.run(batches(10))
    state = saved.state_dict()

    second = Engine(step)
    flags: list[bool] = []
    second.add_event_handler(Events.ITERATION_COMPLETED, lambda e: flags.append(e.state.unhealthy_spike))
    resumed = GradWatch(model, sinks=[memory])
    resumed.load_state_dict(state)
    resumed.attach(second)
    second.run(batches(2) * torch.tensor([1000.0, 1.0])[:, None, None])
    assert flags == [True, False]
    samples = memory.merged()
    assert samples is not None
    assert samples.steps.tolist() == [11, 12]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"max_norm": 0}, ValueError, r"max_norm=0 must be a positive number or None"),
        ({"stds": -1}, ValueError, r"stds=-1 must be a positive number or None"),
        ({"threshold": 1}, TypeError, r"GradWatch got an unexpected argument 'threshold'"),
        ({"guard": "skip"}, TypeError, r"GradWatch got an unexpected argument 'guard'"),
    ],
)
def test_wrong_arguments_raise_at_once(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        GradWatch(small_model(), **arguments)


# ---- the rule by itself


def test_a_rule_forgets_neither_nan_nor_earlier_spikes() -> None:
    rule = SpikeRule()
    for _ in range(10):
        rule.learn(1.0, spike=False)
    assert rule.is_spike(math.nan)
    rule.learn(math.nan, spike=True)
    for spike in (100.0, 100.0):  # the second one is as unusual as the first: spikes are not learned from
        assert rule.is_spike(spike)
        rule.learn(spike, spike=True)
    assert not rule.is_spike(1.5)


def test_a_level_that_stays_becomes_the_usual_one() -> None:
    """Else a training whose norms settled higher would never step again."""
    rule = SpikeRule(adapt_after=20)
    for _ in range(10):
        rule.learn(1.0, spike=False)
    judged = []
    for _ in range(25):
        judged.append(rule.is_spike(100.0))
        rule.learn(100.0, spike=judged[-1])
    assert judged == [True] * 20 + [False] * 5


def test_memory_is_bounded() -> None:
    rule = SpikeRule(window=64)
    for index in range(1000):
        rule.learn(1.0 + index % 7, spike=False, kind=str(index % 50))
    state = rule.state_dict()
    assert len(state["usual"]) <= 16
    assert max(map(len, state["usual"].values())) <= 64


# ---- W&B


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


# ---- two ranks

WORKER = """
import json, os, sys
from datetime import timedelta
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from ignite.engine import Engine, Events
from test_ignite import batches, collect, loss_of, small_model, usual_step, weights, BAD
from wandb_gradwatch.integrations.ignite import GradWatch

distributed.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = distributed.get_rank()
torch.set_num_threads(1)
data = batches(40)[rank::2].clone()
if rank == 1:
    data[BAD] *= 1000.0  # bad on one rank only
model = DistributedDataParallel(small_model())
engine = Engine(usual_step(model, torch.optim.AdamW(model.parameters(), lr=0.01)))
norms, flags = collect(engine), []
engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: flags.append(e.state.unhealthy_spike))
GradWatch(model).attach(engine)
engine.run(data)
json.dump(
    {"norms": norms, "flags": flags, "weights": [w.tolist() for w in weights(model)]},
    open(os.path.join(sys.argv[1], f"{rank}.json"), "w"),
)
distributed.destroy_process_group()
"""


@pytest.mark.distributed
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_two_ranks_judge_the_averaged_gradient_and_leave_out_the_same_batch(tmp_path: Path) -> None:
    import json

    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    here = Path(__file__).parent
    environment = {**inherited(), "PYTHONPATH": f"{here.parent}{os.pathsep}{here}", "OMP_NUM_THREADS": "1"}
    launched = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", worker, tmp_path],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert launched.returncode == 0, launched.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["flags"] == [index == BAD for index in range(NUM_BATCHES)]
    # Of the first step, by float64: DDP averages the two ranks' gradients. No sqrt(2) in it.
    expected = Recomputed(small_model())
    expected.look(batches(40)[:2])
    assert first["norms"][0] == approx(expected.norms[0])
