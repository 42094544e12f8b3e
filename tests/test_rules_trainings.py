"""The default rules on real trainings: no alerts for healthy trainings, alerts for faulty ones."""

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
    assert sum(training.losses[-10:]) < 0.6 * sum(training.losses[:10])  # it learns, so its silence means something
    assert alerts_of(samples) == []


def warmed_up(training: Training) -> Snapshot:
    """Run the training with a learning rate that rises from 0 for 30 steps."""
    return training.run(100, scheduler=LambdaLR(training.optimizer, lambda step: min(step / 30, 1.0)))


def test_false_alarms_on_many_real_trainings_are_as_rare_as_is_promised():
    runs = [trainings.mlp(seed).run(200) for seed in range(10)] + [trainings.lora(seed).run(200) for seed in range(5)]
    runs += [warmed_up(trainings.lora(seed)) for seed in range(10)] + [warmed_up(trainings.char_transformer(0))]
    # At most 0.05 false alarms per healthy run: 1 in 26 runs.
    assert sum(len(alerts_of(run)) for run in runs) <= 1


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
