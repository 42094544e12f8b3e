"""Healthy trainings of many kinds raise no WARN and no ERROR, whether every step is measured or every seventh."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import trainings
from judging import NUM_CLASSES, NUM_FEATURES, Loop, Watchable, blobs, classifier, judged, mlp, with_inputs, with_rate
from torch import Tensor, nn
from torch.nn import functional

HEALTHY: dict[str, tuple[Callable[[], Any], int]] = {}
Make = Callable[[], Any]


def healthy(num_steps: int = 200) -> Callable[[Make], Make]:
    def register(make: Make) -> Make:
        HEALTHY[make.__name__] = make, num_steps
        return make

    return register


@healthy(300)
def plain_descent() -> Loop:
    return classifier()


@healthy()
def momentum_and_weight_decay() -> Loop:
    return classifier(lr=0.02, momentum=0.9, weight_decay=1e-3)


@healthy()
def adam() -> Loop:
    return classifier(lr=1e-3, optimizer=torch.optim.Adam)


@healthy()
def warm_up_from_0_and_cosine_to_0() -> Loop:
    def rate(step: int) -> float:
        return 3e-3 * min((step - 1) / 20, 1.0) * 0.5 * (1 + math.cos(math.pi * step / 200))

    return with_rate(classifier(optimizer=torch.optim.AdamW), rate)


@healthy()
def clipped_to_1() -> Loop:
    loop = classifier(lr=0.1)
    loop.after_backward.append(lambda step: nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0))
    return loop


@healthy()
def dropout() -> Loop:
    model = nn.Sequential(
        nn.Linear(NUM_FEATURES, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(64, NUM_CLASSES),
    )  # fmt: skip
    return classifier(model)


@healthy()
def frozen_backbone() -> Loop:
    model = mlp()
    model[0].requires_grad_(False)
    loop = classifier(model, lr=0.02)
    loop.optimizer = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], lr=0.02)
    return loop


@healthy()
def loss_scaler_that_settles() -> Loop:
    loop = classifier()
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    return loop


@healthy()
def layer_norm_and_tanh() -> Loop:
    model = nn.Sequential(
        nn.Linear(NUM_FEATURES, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 32), nn.LayerNorm(32), nn.Tanh(),
        nn.Linear(32, NUM_CLASSES),
    )  # fmt: skip
    return classifier(model)


@healthy()
def autoencoder() -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(NUM_FEATURES, 16),
        nn.GELU(),
        nn.Linear(16, 4),
        nn.Linear(4, 16),
        nn.GELU(),
        nn.Linear(16, NUM_FEATURES),
    )
    loop = Loop(
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        lambda model, x, y: functional.mse_loss(model(x), x),
        blobs(),
    )
    return loop


@healthy()
def batches_of_varying_size() -> Loop:
    loop = classifier()
    plain = loop.batch

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = plain(step)
        return x[: 8 + step % 25], y[: 8 + step % 25]

    loop.batch = batch
    return loop


@healthy()
def inputs_that_are_mostly_0() -> Loop:
    return with_inputs(classifier(lr=0.1), lambda x, step: x * (torch.rand_like(x) < 0.2))


class Gan:
    """A generator and a critic, which step in turns."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
        critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
        self.model = nn.ModuleDict({"generator": generator, "critic": critic})
        self.optimizers = [torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (generator, critic)]

    def run(self, num_steps: int) -> None:
        generator, critic = self.model["generator"], self.model["critic"]
        for step in range(num_steps):
            noise, is_generators = torch.randn(32, 4), step % 2 == 0
            self.model.zero_grad()
            critic.requires_grad_(not is_generators)
            fake = critic(generator(noise) if is_generators else generator(noise).detach())
            if is_generators:
                loss = functional.softplus(-fake).mean()
            else:
                loss = (
                    functional.softplus(-critic(torch.randn(32, 2) * 0.5 + 1)).mean() + functional.softplus(fake).mean()
                )
            loss.backward()
            self.optimizers[not is_generators].step()


healthy(300)(Gan)


@healthy(300)
def summed_loss() -> Any:
    return Watchable(trainings.summed_loss())


@healthy(300)
def toy_curve() -> Any:
    return Watchable(trainings.toy_curve())


@healthy()
def conv_net() -> Any:
    return Watchable(trainings.conv_net())


@healthy(120)
def char_transformer() -> Any:
    return Watchable(trainings.char_transformer())


@healthy()
def lora() -> Any:
    return Watchable(trainings.lora())


@healthy(120)
def lstm() -> Any:
    return Watchable(trainings.lstm())


@healthy()
def layer_frozen_on_purpose() -> Any:
    return Watchable(trainings.frozen_layer())


@pytest.mark.parametrize("every", [1, 7])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_training_is_silent(name: str, every: int) -> None:
    make, num_steps = HEALTHY[name]
    training = make()
    found = judged(training, num_steps, every=every)
    assert found.told == [], [alert.text for alert in found.alerts]
    assert found.verdict.status == "ok"
    if not isinstance(training, Gan):  # it learns, so its silence means something
        losses = training.losses
        assert sum(losses[-20:]) < 0.85 * sum(losses[:20])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
@pytest.mark.parametrize("make", [classifier, trainings.mlp, trainings.lora])
def test_a_healthy_training_is_silent_with_any_seed(make: Callable[..., Any], seed: int) -> None:
    training = make(seed=seed)
    found = judged(training if isinstance(training, Loop) else Watchable(training), 200)
    assert found.told == [], [alert.text for alert in found.alerts]


def test_two_kinds_of_samples_in_turn_do_not_disturb_each_other() -> None:
    """A GAN whose generator's gradients are a ten-thousandth of the critic's; then the generator's alone explode."""
    torch.manual_seed(0)

    def of(small: Callable[[int], float]) -> Any:
        gan = Gan()

        class Turns:
            model = gan.model

            @staticmethod
            def run(num_steps: int) -> None:
                for step in range(1, num_steps + 1):
                    net = gan.model["generator" if step % 2 else "critic"]
                    gan.model.zero_grad()
                    size = small(step) if step % 2 else 1.0
                    sum((size * (1 + 0.1 * math.sin(step)) * p).sum() for p in net.parameters()).backward()
                    gan.optimizers[(step + 1) % 2].step()

        return Turns()

    assert judged(of(lambda step: 1e-4), 120).told == []
    told = [alert.incident for alert in judged(of(lambda step: 1e-4 if step < 81 else 1.0), 120).alerts]
    assert [(one.kind, one.first_step) for one in told if one is not None][:1] == [("exploding_gradient", 81)]
