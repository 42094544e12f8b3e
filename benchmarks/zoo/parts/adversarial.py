"""Trainings of two models against one another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Loop, descend
from . import data
from .convolutional import Autoencoder, colours
from .dense import OwnBackward, mlp
from .generative import half_circles
from .losses import own_loss, regress


def gan(*, kind: str = "standard", lr: float = 1e-3, batch: int = 32) -> Loop:
    """Generator and discriminator in turn."""
    act = lambda: nn.LeakyReLU(0.2)  # noqa: E731
    model = nn.ModuleDict({"generator": mlp(8, 32, 32, 2), "critic": mlp(2, 32, 32, 1, act=act)})
    if kind == "hinge":
        for layer in model["critic"]:
            if isinstance(layer, nn.Linear):
                nn.utils.parametrizations.spectral_norm(layer)
    generator, critic = (
        torch.optim.Adam(model[part].parameters(), lr=lr, betas=(0.5, 0.9)) for part in ("generator", "critic")
    )

    def update(loop: Loop, step: int) -> Tensor:
        real = loop.batch(step)[0]
        for _ in range(3 if kind == "penalty" else 1):
            fake = model["generator"](torch.randn(len(real), 8)).detach()
            good, bad = model["critic"](real), model["critic"](fake)
            if kind == "penalty":
                between = torch.lerp(real, fake, torch.rand(len(real), 1)).requires_grad_()
                slope = torch.autograd.grad(model["critic"](between).sum(), between, create_graph=True)[0]
                loss = bad.mean() - good.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            elif kind == "hinge":
                loss = torch.relu(1 - good).mean() + torch.relu(1 + bad).mean()
            elif kind == "squares":
                loss = (good - 1).square().mean() + bad.square().mean()
            else:
                loss = functional.softplus(-good).mean() + functional.softplus(bad).mean()
            descend(critic, loss)
        score = model["critic"](model["generator"](torch.randn(len(real), 8)))
        if kind == "standard":
            return descend(generator, functional.softplus(-score).mean())
        return descend(generator, (score - 1).square().mean() if kind == "squares" else -score.mean())

    return Loop(model, data.points(batch), own_loss, [generator, critic], update=update, watched=dict(model.items()))


class DomainAdversarial(nn.Module):
    """Features that say the class and not the domain."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = mlp(12, 32, 16), nn.Linear(16, 4), mlp(16, 16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        domain = torch.randint(0, 2, (len(x),)).float()
        h = self.features(x + domain[:, None])
        return functional.cross_entropy(self.label(h), y) + functional.binary_cross_entropy_with_logits(
            self.domain(OwnBackward.apply(h, torch.clone, lambda grad: -0.3 * grad))[:, 0], domain
        )


def pair(
    generator: nn.Module,
    judge: nn.Module,
    batch: data.Batches,
    noise: int,
    judged: Callable[..., Tensor],
    optimizers: list[torch.optim.Optimizer],
    times: int,
) -> Loop:
    """The judge's step, `times` times, then the generator's."""
    model = nn.ModuleDict({"generator": generator, "judge": judge})

    def update(loop: Loop, step: int) -> Tensor:
        for _ in range(times):
            real = loop.batch(step)[0]
            made = model["generator"](torch.randn(len(real), noise)).detach()
            loss = descend(optimizers[0], judged(judge, real, made))
        descend(optimizers[1], -judge(model["generator"](torch.randn(len(real), noise))).mean())
        return loss

    return Loop(model, batch, own_loss, optimizers, update=update, watched=dict(model.items()), steps=120)


def hinged_images() -> Loop:
    generator, judge = (
        Autoencoder().decoder,
        nn.Sequential(Autoencoder().encoder, nn.LeakyReLU(0.2), nn.Linear(12, 1)),
    )
    for module in list(judge.modules()):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.utils.parametrizations.spectral_norm(module)
    rates = ((judge, 5e-4), (generator, 5e-3))
    optimizers = [torch.optim.Adam(part.parameters(), lr=lr, betas=(0.5, 0.9)) for part, lr in rates]

    def judged(judge: nn.Module, real: Tensor, made: Tensor) -> Tensor:
        return torch.relu(1 - judge(real)).mean() + torch.relu(1 + judge(made)).mean()

    return pair(generator, judge, colours(16, noise=0.3, classes=2), 12, judged, optimizers, 1)


def penalised() -> Loop:
    """Wasserstein's distance; the judge's slope is held near 1."""
    batch = data.points(64)
    generator, judge = mlp(4, 32, 32, 2), mlp(2, 32, 32, 1, act=nn.SiLU)
    optimizers = [torch.optim.RMSprop(part.parameters(), lr=1e-3) for part in (judge, generator)]

    def judged(judge: nn.Module, real: Tensor, made: Tensor) -> Tensor:
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * made).requires_grad_()
        slope = torch.autograd.grad(judge(between).sum(), between, create_graph=True)[0]
        return (
            judge(made).mean()
            - judge(real).mean()
            + 5 * (slope.square().sum(dim=1).add(1e-8).sqrt() - 1).square().mean()
        )

    return pair(generator, judge, lambda step: (batch(step)[0] + 2,), 4, judged, optimizers, 2)


def rivals() -> Loop:
    """Which is more real, this one or that one? The judge learns four times as fast, and its slope is penalised."""
    model = nn.ModuleDict({"generator": mlp(4, 48, 48, 2), "judge": mlp(2, 48, 48, 1, act=lambda: nn.LeakyReLU(0.2))})
    made_by, judged_by = (
        torch.optim.Adam(model[n].parameters(), lr=r, betas=(0.0, 0.9))
        for n, r in (("generator", 5e-4), ("judge", 2e-3))
    )

    def update(loop: Loop, step: int) -> Tensor:
        (real,) = loop.batch(step)
        fake = model["generator"](torch.randn(len(real), 4)).detach()
        real = real.requires_grad_(True)
        value = model["judge"](real)
        slope = torch.autograd.grad(value.sum(), real, create_graph=True)[0]
        descend(judged_by, loop.loss(value - model["judge"](fake)) + 0.1 * slope.square().sum(dim=1).mean())
        fake = model["judge"](model["generator"](torch.randn(len(real), 4)))
        return descend(made_by, loop.loss(fake - model["judge"](real).detach()))

    loss = lambda margin: functional.softplus(-margin).mean()  # noqa: E731
    return Loop(model, data.points(64), loss, [judged_by, made_by], update=update, steps=200)


def there_and_back() -> Loop:
    """Two generators between two clouds, two judges, and the way back."""
    model = nn.ModuleDict(
        {name: mlp(2, 32, 32, 2 if "ward" in name else 1) for name in ("forward_", "backward_", "here", "there")}
    )
    moved = torch.optim.Adam(
        [*model["forward_"].parameters(), *model["backward_"].parameters()], lr=1e-3, betas=(0.5, 0.9)
    )
    judged = torch.optim.Adam([*model["here"].parameters(), *model["there"].parameters()], lr=1e-3, betas=(0.5, 0.9))

    def update(loop: Loop, step: int) -> Tensor:
        a, b = loop.batch(step)
        if loop.zeroes:
            moved.zero_grad()
        new_b, new_a = model["forward_"](a), model["backward_"](b)
        back = (model["backward_"](new_b) - a).abs().mean() + (model["forward_"](new_a) - b).abs().mean()
        fooled = (model["there"](new_b) - 1).square().mean() + (model["here"](new_a) - 1).square().mean()
        (loss := fooled + 2 * back).backward()
        moved.step()
        pairs = ((model["here"], a, new_a.detach()), (model["there"], b, new_b.detach()))
        descend(judged, sum((one(real) - 1).square().mean() + one(fake).square().mean() for one, real, fake in pairs))
        return loss

    first, second = data.points(64, modes=4), data.points(64, modes=3)
    return Loop(model, lambda step: (*first(step), *second(step)), own_loss, [moved, judged], update=update)


def hinge_game(loop: Loop, step: int, *, resets: bool = True) -> Tensor:
    """Points drawn by a generator, against a critic with a hinge, which may forget to reset its gradients."""
    (real,) = loop.batch(step)
    fake, judge = loop.model["draws"](torch.randn(len(real), 4)), loop.model["judges"]
    told = functional.relu(1 - judge(real)).mean() + functional.relu(1 + judge(fake.detach())).mean()
    if resets:
        loop.optimizers[0].zero_grad()
    told.backward()
    loop.optimizers[0].step()
    descend(loop.optimizers[1], -judge(fake).mean())
    return told.detach()


def hinged_points() -> Loop:
    model = nn.ModuleDict({"draws": mlp(4, 32, 32, 2), "judges": mlp(2, 32, 32, 1, act=lambda: nn.LeakyReLU(0.2))})
    optimizers = [torch.optim.Adam(model[name].parameters(), lr=1e-3, betas=(0.5, 0.9)) for name in ("judges", "draws")]
    return Loop(model, data.points(size=48), regress, optimizers, update=hinge_game)


class Adversaries(nn.Module):
    """A generator and a discriminator of points.

    `saturating`: the generator minimises log(1 - D); `bound`: of a clamped critic.
    """

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(4, 48, 48, 2)
        self.discriminator = mlp(2, 48, 48, 1, act=lambda: nn.LeakyReLU(0.2))
        self.saturating, self.zeroes_discriminator, self.bound = False, True, 0.15


def adversarial() -> Loop:
    model, bce = Adversaries(), functional.binary_cross_entropy_with_logits
    optimizers = [
        torch.optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999))
        for part in (model.discriminator, model.generator)
    ]

    def update(loop: Loop, step: int) -> Tensor:
        (real,) = loop.batch(step)
        fake = model.generator(torch.randn(len(real), 4))
        true, false = model.discriminator(real), model.discriminator(fake.detach())
        loss = bce(true, torch.ones_like(true)) + bce(false, torch.zeros_like(false))
        if model.zeroes_discriminator:
            descend(loop.optimizers[0], loss)
        else:
            loss.backward()
            loop.optimizers[0].step()
        said = model.discriminator(fake)
        other = -bce(said, torch.zeros_like(said)) if model.saturating else bce(said, torch.ones_like(said))
        descend(loop.optimizers[1], other)
        return loss

    return Loop(model, half_circles(), lambda *_: torch.zeros(()), optimizers, steps=300, update=update)


def wasserstein() -> Loop:
    """A critic whose weights are clamped after each of its three steps."""
    model = Adversaries()
    optimizers = [torch.optim.RMSprop(part.parameters(), lr=1e-3) for part in (model.discriminator, model.generator)]

    def update(loop: Loop, step: int) -> Tensor:
        for _ in range(3):
            (real,) = loop.batch(step)
            fake = model.generator(torch.randn(len(real), 4)).detach()
            loss = descend(optimizers[0], model.discriminator(fake).mean() - model.discriminator(real).mean())
            with torch.no_grad():
                for parameter in model.discriminator.parameters():
                    parameter.clamp_(-model.bound, model.bound)
        descend(optimizers[1], -model.discriminator(model.generator(torch.randn(64, 4))).mean())
        return loss

    return Loop(model, half_circles(), lambda *_: torch.zeros(()), optimizers, steps=150, update=update)
