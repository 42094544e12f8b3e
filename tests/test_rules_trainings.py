"""The default rules on real trainings: silent on healthy ones, loud on broken ones."""

from __future__ import annotations

import pytest
import torch
import trainings
from grad_samples import Training
from torch.optim.lr_scheduler import LambdaLR

from wandb_gradwatch._pipeline.alert_manager import AlertManager
from wandb_gradwatch.rules import default_rules
from wandb_gradwatch.snapshot import Snapshot

pytestmark = pytest.mark.slow


def alerts_of(samples: Snapshot) -> list[tuple[str, int]]:
    return [(alert.title, alert.step) for alert in AlertManager(default_rules()).process(samples)]


@pytest.mark.parametrize(
    ("healthy", "num_steps"),
    [
        (trainings.mlp, 300),
        (trainings.summed_loss, 300),
        (trainings.toy_curve, 300),
        (trainings.conv_net, 200),
        (trainings.char_transformer, 150),
        (trainings.lora, 200),
        (trainings.lstm, 150),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_healthy_training_raises_nothing(healthy, num_steps):
    training: Training = healthy(seed=0)
    samples = training.run(num_steps)
    assert sum(training.losses[-10:]) < 0.6 * sum(training.losses[:10])  # it did learn, or it would prove nothing
    assert alerts_of(samples) == []


def test_a_warm_up_of_the_learning_rate_from_0_raises_nothing():
    for build in (trainings.char_transformer, trainings.lora):
        training = build(seed=0)
        warm_up = LambdaLR(training.optimizer, lambda step: min(step / 30, 1.0))  # the first step has a rate of 0
        assert alerts_of(training.run(100, scheduler=warm_up)) == []


def test_false_alarms_on_many_real_trainings_stay_below_the_bound():
    runs = [trainings.mlp(seed).run(200) for seed in range(10)] + [trainings.lora(seed).run(200) for seed in range(5)]
    early = sum(step <= 20 for run in runs for _, step in alerts_of(run))
    late = sum(step > 20 for run in runs for _, step in alerts_of(run))
    assert early / len(runs) <= 0.1
    assert 1000 * late / (180 * len(runs)) <= 1.35


def test_a_tenfold_spike_in_a_real_training_is_found_at_its_step():
    training = trainings.char_transformer(seed=0)

    def tenfold(model: torch.nn.Module, step: int) -> None:
        if step == 40:
            for parameter in model.parameters():
                parameter.grad *= 10

    training.change_gradients = tenfold
    assert ("Exploding gradient", 40) in alerts_of(training.run(41))


@pytest.mark.parametrize(
    ("faulty", "title", "by_step"),
    [
        (trainings.wild_mlp, "Exploding gradient", 2),
        (trainings.wild_sgd, "Exploding gradient", 4),
        (trainings.wild_sgd, "NaN gradient", 6),
        (trainings.unclipped_rnn, "Exploding gradient", 60),
        (trainings.growing_depth, "Exploding gradient", 1),
        (trainings.poisoned_batch, "Exploding gradient", 60),
        (trainings.invalid_operation, "NaN gradient", 40),
        (trainings.sigmoid_stack, "Vanishing gradient", 10),
        (trainings.dead_relus, "Dead gradient", 10),
        (trainings.zeroed_before_step, "No gradient", 10),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_broken_training_is_alarmed_by_its_step(faulty, title, by_step):
    first = {title: step for title, step in reversed(alerts_of(faulty(seed=0).run(max(by_step, 12))))}
    assert first.get(title, 10**9) <= by_step


def test_a_layer_frozen_on_purpose_raises_nothing():
    assert alerts_of(trainings.frozen_layer(seed=0).run(150)) == []
