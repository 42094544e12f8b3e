"""Ignite: spikes are found before their update, which every rank skips."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import Recomputed, batches, loss_of, small_model
from ignite_programs import (
    BAD,
    NUM_BATCHES,
    Engine,
    Events,
    approx,
    collect,
    scaled_step,
    trained,
    usual_step,
    weights,
    with_a_bad_batch,
)
from processes import launch
from torch import nn

from wandb_gradwatch.integrations.ignite import GradWatch
from wandb_gradwatch.sinks import MemorySink

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

WITHOUT = torch.cat([batches(NUM_BATCHES)[:BAD], batches(NUM_BATCHES)[BAD + 1 :]])


def assert_equal(left_out: list[torch.Tensor], never_there: list[torch.Tensor]) -> None:
    torch.testing.assert_close(left_out, never_there, rtol=0, atol=0)


def scaled(model: nn.Module, *, unscale: bool) -> Any:
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu")
    return scaled_step(model, optimizer, scaler, unscale=unscale)


def usual(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: usual_step(model, optimizer(model.parameters(), lr=0.01, **options))


STEPS: dict[str, Callable[[nn.Module], Any]] = {
    "sgd-momentum-decay": usual(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "adamw": usual(torch.optim.AdamW, weight_decay=0.5),
    "adamw-fused": usual(torch.optim.AdamW, fused=True),
    "rmsprop": usual(torch.optim.RMSprop, momentum=0.5),
    "scaled": partial(scaled, unscale=False),
    "scaled-clipped": partial(scaled, unscale=True),
}


@pytest.mark.parametrize("bad", [1000.0, math.inf, math.nan], ids=["spike", "inf", "nan"])
@pytest.mark.parametrize("kind", STEPS)
def test_the_bad_batch_is_not_applied_without_any_user_code(kind: str, bad: float) -> None:
    """Bitwise equal to the training without the bad batch, including decay, momentum and the optimizer's step count."""
    assert_equal(trained(STEPS[kind], with_a_bad_batch(bad), {"skip": True}), trained(STEPS[kind], WITHOUT))


@pytest.mark.parametrize("bad", [1.0, 1000.0, math.nan])
@pytest.mark.parametrize("kind", ["sgd-momentum-decay", "adamw"])
def test_by_default_the_training_is_the_same_bit_for_bit_through_nan_and_spikes(kind: str, bad: float) -> None:
    watched, plain = (trained(STEPS[kind], with_a_bad_batch(bad), options) for options in ({}, None))
    torch.testing.assert_close(watched, plain, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("watch_options", [{}, {"include": "weight"}], ids=["whole", "weights-only"])
def test_the_bad_batch_moves_nothing_that_the_optimizer_holds(watch_options: dict[str, Any]) -> None:
    """Unwatched parameters of the same optimizer do not change either. The row reports the skipped step."""

    def both_trained(data: torch.Tensor, memory: MemorySink | None) -> list[torch.Tensor]:
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
            GradWatch(model, skip=True, sinks=[memory], **watch_options).attach(engine)
        engine.run(data)
        return weights(model) + weights(before)

    memory = MemorySink()
    assert_equal(both_trained(with_a_bad_batch(), memory), both_trained(WITHOUT, None))
    samples = memory.merged()
    assert samples.metrics["gradwatch/num_guarded_steps"].tolist() == [
        float(index == BAD) for index in range(NUM_BATCHES)
    ]


def test_by_default_the_bad_batch_is_applied_and_flagged() -> None:
    model = small_model()
    engine = Engine(usual_step(model, torch.optim.SGD(model.parameters(), lr=1e-12)))
    flags = collect(engine, "unhealthy_spike")
    before = weights(model)
    after: list[list[torch.Tensor]] = []
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=BAD + 1), lambda e: after.append(weights(model)))
    GradWatch(model, max_norm=1e4).attach(engine)
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
    GradWatch(model).attach(engine)
    assert engine.state.unhealthy_spike is False
    engine.run(with_a_bad_batch())
    assert skipped == [BAD]
    assert norms[BAD] > 100 * max(norms[:BAD])  # the skipped step's norm is available


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


@pytest.mark.parametrize("arguments", [{"max_norm": 1.0}, {"rule": lambda norm: norm > 1.0}], ids=["static", "own"])
def test_a_fixed_limit_or_a_function_is_the_rule(arguments: dict[str, Any]) -> None:
    """With a learning rate of 0 the norms are known in advance: exactly those above 1 are flagged."""
    model = small_model()
    expected = Recomputed(model)
    engine = Engine(usual_step(model, torch.optim.SGD(model.parameters(), lr=0.0), expected))
    flags = collect(engine, "unhealthy_spike")
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
    GradWatch(model, skip=True).attach(engine)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: scheduler.step())
    engine.run(with_a_bad_batch())
    assert math.isfinite(engine.state.metrics["loss"])
    assert scheduler.last_epoch == NUM_BATCHES


def test_gradients_zeroed_before_the_step_are_said_once_and_at_the_end_with_their_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
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
    said = [r.message for r in caplog.records if "already None or zero when the optimizer stepped" in r.message]
    assert ["5 times in all" in message for message in said] == [False, True]


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
    # Trainable parameters are searched at the start of an iteration, so the first watched iteration is the next one.
    assert seen[:4] == [None] * 4
    assert seen[4:] == approx(expected.norms[4:])


def flags_of(norms: list[float], **limits: Any) -> list[bool]:
    """Return which of these gradient norms are flagged, with a model of one element."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(engine: Engine, norm: float) -> None:
        (model.weight * norm).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    engine = Engine(step)
    flags = collect(engine, "unhealthy_spike")
    GradWatch(model, sinks=[MemorySink()], rules=[], **limits).attach(engine)
    engine.run(norms)
    return flags


# Log norms of +-0.1 have a sample deviation of 0.103 for 16 samples; 3 deviations with 15 degrees of freedom are 3.6 of
# them, a factor of 1.45; 1.05 times the usual norm is within one deviation.
QUIET = [math.exp(0.1 * (-1) ** index) for index in range(16)]


@pytest.mark.parametrize(
    ("limits", "flagged"),
    [
        ({}, [False, False, True]),  # 5 times the usual norm
        ({"stds": 3.0}, [False, True, True]),  # only the limit of deviations
        ({"factor": 1.5}, [False, True, True]),  # only the limit of the factor
        ({"factor": 4.0}, [False, False, True]),
        ({"stds": 3.0, "factor": 4.0}, [False, False, True]),  # both
        ({"max_norm": 3.0}, [False, False, True]),
        ({"max_norm": 1000.0}, [False, False, False]),  # no other limits besides the given one
    ],
    ids=str,
)
def test_the_limits_are_the_callers_and_no_others(limits: dict[str, float], flagged: list[bool]) -> None:
    flags = flags_of([*QUIET, 1.05, 2.0, 100.0], **limits)
    assert flags == [False] * len(QUIET) + flagged


@pytest.mark.parametrize(("window", "flagged"), [(8, True), (64, False)])
def test_the_window_is_what_counts_as_usual(window: int, flagged: bool) -> None:
    """24 norms of e and 1/e in turn, then 8 quiet ones: 2 is unusual compared with the quiet ones only."""
    loud = [math.exp((-1) ** index) for index in range(24)]
    assert flags_of([*loud, *QUIET[:8], 2.0], stds=3.0, window=window)[-1] == flagged


def test_neither_nan_nor_spikes_are_learned_from() -> None:
    nan, spike = math.nan, 100.0
    assert flags_of([*QUIET, nan, spike, spike, 1.1]) == [False] * len(QUIET) + [True, True, True, False]


def test_a_level_that_stays_becomes_the_usual_one() -> None:
    """Otherwise a training whose norms stay at a higher level would never step again."""
    assert flags_of([*QUIET, *[100.0] * 25]) == [False] * len(QUIET) + [True] * 20 + [False] * 5


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_norm": 0}, "max_norm=0 must be a positive number"),
        ({"max_norm": "5"}, "max_norm='5' must be a positive number"),
        ({"stds": -1.0}, "stds=-1.0 must be a number above 0"),
        ({"stds": 0}, "stds=0 must be a number above 0"),  # every second norm would be a spike
        ({"factor": 0.5}, "factor=0.5 must be a number, at least 1"),
        ({"window": 1}, "window=1 must be a whole number of steps, at least 2"),
        ({"rule": math.isnan, "stds": 3.0}, "pass either rule= or the limits"),
    ],
    ids=str,
)
def test_limits_that_make_no_sense(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradWatch(small_model(), **limits)


WORKER = """
import json, os, sys
from datetime import timedelta
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from ignite.engine import Engine, Events
from frameworks import batches, small_model
from ignite_programs import BAD, collect, usual_step, weights
from wandb_gradwatch.integrations.ignite import GradWatch

distributed.init_process_group("gloo", timeout=timedelta(seconds=300))
rank = distributed.get_rank()
torch.set_num_threads(1)
data = batches(40)[rank::2].clone()
if rank == 1:
    data[BAD] *= 1000.0  # bad on one rank only
model = DistributedDataParallel(small_model())
engine = Engine(usual_step(model, torch.optim.AdamW(model.parameters(), lr=0.01)))
norms, flags = collect(engine), []
engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: flags.append(e.state.unhealthy_spike))
GradWatch(model, skip=True).attach(engine)
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
    (first, second), _ = launch(WORKER, tmp_path)
    assert first == second
    assert first["flags"] == [index == BAD for index in range(NUM_BATCHES)]
    # The first step's norm in float64: DDP averages the two ranks' gradients.
    expected = Recomputed(small_model())
    expected.look(batches(40)[:2])
    assert first["norms"][0] == approx(expected.norms[0])
