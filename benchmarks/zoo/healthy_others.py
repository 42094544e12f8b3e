"""Healthy trainings with several models, several losses, or a recipe of their own: family -> name -> how to build it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .healthy_supervised import AdamW, Table, cosine
from .loop import Batch, Loop, descend, supervised
from .models import Transformer, mlp


def _adam(model: nn.Module | Iterable[nn.Parameter], lr: float, **options: object) -> torch.optim.Optimizer:
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    return torch.optim.Adam(parameters, lr=lr, **options)


class VAE(nn.Module):
    """Encoder, a normal code, decoder; with `codes` a vector-quantised code, its gradient passed straight through."""

    def __init__(self, dim: int = 16, latent: int = 4, *, codes: int = 0, beta: float = 0.1) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(dim, 32, latent if codes else 2 * latent), mlp(latent, 32, dim)
        self.codes = nn.Embedding(codes, latent) if codes else None
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        h = self.encoder(x)
        if self.codes is not None:
            code = self.codes(torch.cdist(h, self.codes.weight).argmin(dim=1))
            rest = functional.mse_loss(code, h.detach()) + 0.25 * functional.mse_loss(h, code.detach())
            return functional.mse_loss(self.decoder(h + (code - h).detach()), x) + rest
        mean, log_var = h.chunk(2, dim=1)
        kl = 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(dim=1).mean()
        return (
            functional.mse_loss(self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), x) + self.beta * kl
        )


class Coupling(nn.Module):
    """A normalising flow of affine couplings; forward returns the negative log likelihood."""

    def __init__(self, dim: int = 4, depth: int = 4) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(dim // 2, 24, dim) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(len(x))
        for net in self.nets:
            kept, moved = x.chunk(2, dim=1)
            scale, shift = net(kept).chunk(2, dim=1)
            scale = torch.tanh(scale)
            x, log_det = torch.cat([moved * scale.exp() + shift, kept], dim=1), log_det + scale.sum(dim=1)
        return (0.5 * x.square().sum(dim=1) - log_det).mean()


class Diffusion(nn.Module):
    """Predicts the noise that was added; forward returns the loss."""

    def __init__(self, dim: int = 2) -> None:
        super().__init__()
        self.net = mlp(dim + 2, 64, 64, dim, act=nn.SiLU)

    def forward(self, x: Tensor) -> Tensor:
        t, noise = torch.rand(len(x), 1), torch.randn_like(x)
        angle = 0.5 * torch.pi * t
        seen = torch.cat([angle.cos() * x + angle.sin() * noise, angle.cos(), angle.sin()], dim=1)
        return functional.mse_loss(self.net(seen), noise)


def own_loss(model: nn.Module, *batch: Tensor) -> Tensor:
    """Models whose forward is the loss."""
    return model(*batch)


def rebuild(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return functional.mse_loss(model(x + 0.3 * torch.randn_like(x)), x)


def warmed_beta() -> Loop:
    """The weight of the KL term rises from 0."""
    model = VAE(12)
    loop = supervised(model, data.blobs(), lambda model, x, _: model(x), lr=3e-3)
    loop.before.append(lambda loop, step: setattr(model, "beta", 0.3 * min(step / 100, 1.0)))
    return loop


def gan(*, kind: str = "standard", lr: float = 1e-3, batch: int = 32) -> Loop:
    """Generator and discriminator in turn."""
    act = lambda: nn.LeakyReLU(0.2)  # noqa: E731
    model = nn.ModuleDict({"generator": mlp(8, 32, 32, 2), "critic": mlp(2, 32, 32, 1, act=act)})
    if kind == "hinge":
        for layer in model["critic"]:
            if isinstance(layer, nn.Linear):
                nn.utils.parametrizations.spectral_norm(layer)
    generator, critic = (_adam(model[part], lr, betas=(0.5, 0.9)) for part in ("generator", "critic"))

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


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -0.3 * grad


class DomainAdversarial(nn.Module):
    """Features that say the class and not the domain."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = mlp(12, 32, 16), nn.Linear(16, 4), mlp(16, 16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        domain = torch.randint(0, 2, (len(x),)).float()
        h = self.features(x + domain[:, None])
        return functional.cross_entropy(self.label(h), y) + functional.binary_cross_entropy_with_logits(
            self.domain(_Reversed.apply(h))[:, 0], domain
        )


def _turns(size: int) -> data.Batches:
    """States, of which the sign of a fixed projection says the right one of three actions."""
    w = torch.randn(6, 3)

    def batch(_: int) -> Batch:
        state = torch.randn(size, 6)
        return state, (state @ w).argmax(dim=1)

    return batch


class ActorCritic(nn.Module):
    """Two branches on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Sequential(nn.Linear(6, 32), nn.Tanh()), mlp(32, 16, 3, act=nn.Tanh), mlp(32, 16, 1, act=nn.Tanh)  # fmt: skip

    def forward(self, state: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        h = self.trunk(state)
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h)[:, 0]


def advantage(model: nn.Module, state: Tensor, right: Tensor) -> Tensor:
    """A2C of one step."""
    policy, value = model(state)
    action = policy.sample()
    gain = (action == right).float() + 0.3 * torch.randn(len(state)) - value
    return (-(policy.log_prob(action) * gain.detach()) + 0.5 * gain**2).mean() - 0.01 * policy.entropy().mean()


def reinforce(model: nn.Module, state: Tensor, right: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=model(state))
    action = policy.sample()
    return -(policy.log_prob(action) * ((action == right).float() - 0.4)).mean()


def grouped(model: nn.Module, state: Tensor, right: Tensor) -> Tensor:
    """Rewards of eight answers to each question, standardised within it: no gradient where all are equal."""
    policy = torch.distributions.Categorical(logits=model(state))
    action = policy.sample((8,))
    reward = (action == right).float()
    gain = (reward - reward.mean(dim=0)) / (reward.std(dim=0) + 1e-4)
    return -(policy.log_prob(action) * gain).mean()


def proximal(*, tight: bool = False) -> Loop:
    """PPO: four passes over each rollout, the ratio clipped, the norm too."""
    model = ActorCritic()
    optimizer = _adam(model, 3e-3)

    def update(loop: Loop, step: int) -> Tensor:
        state, right = loop.batch(step)
        with torch.no_grad():
            policy, value = model(state)
            action = policy.sample()
            old, reward = policy.log_prob(action), (action == right).float()
            gain = reward - value
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(4):
            policy, value = model(state)
            ratio = (policy.log_prob(action) - old).exp()
            loss = (
                -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                + 0.5 * (value - reward).square().mean()
            )
            descend(optimizer, loss - 0.01 * policy.entropy().mean(), 0.02 if tight else 0.5)
        return loss.detach()

    return Loop(model, _turns(32), own_loss, [optimizer], steps=80, update=update)


def q_learning(*, every: int = 50, soft: float = 0.0, double: bool = False) -> Loop:
    """DQN on a chain of states, with a copy of the network as target: copied now and then, or followed softly."""
    model = mlp(4, 32, 32, 2)
    target, optimizer = copy.deepcopy(model), _adam(model, 2e-3)

    def update(loop: Loop, step: int) -> Tensor:
        state = loop.batch(step)[0]
        action = torch.randint(0, 2, (len(state),))
        moved = (state + 0.5 * (2 * action[:, None] - 1) * torch.tensor([1.0, 0.0, 0.0, 0.0])).clamp(-2, 2)
        with torch.no_grad():
            best = (model if double else target)(moved).argmax(dim=1, keepdim=True)
            aim = 3.0 * (moved[:, 0] > 1).float() + 0.95 * target(moved).gather(1, best)[:, 0]
        value = model(state).gather(1, action[:, None])[:, 0]
        loss = descend(optimizer, functional.smooth_l1_loss(value, aim))
        with torch.no_grad():
            for mine, theirs in zip(target.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, soft if soft else float(step % every == 0))
        return loss

    return Loop(model, lambda _: (torch.randn(32, 4),), own_loss, [optimizer], steps=300, update=update)


def continuous(*, twins: int = 1, entropy: float = 0.0) -> Loop:
    """DDPG, and with two critics and an entropy bonus SAC: a critic's step, then an actor's."""
    model = nn.ModuleDict({"actor": mlp(6, 32, 4), "critic": nn.ModuleList(mlp(8, 32, 1) for _ in range(twins))})
    actor, critic = _adam(model["actor"], 1e-3), _adam(model["critic"], 3e-3)

    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = model["actor"](state).chunk(2, dim=1)
        log_std = log_std.clamp(-3, 1)
        return torch.tanh(mean + 0.3 * log_std.exp() * torch.randn_like(mean)), log_std.sum(dim=1)

    def update(loop: Loop, step: int) -> Tensor:
        state = loop.batch(step)[0]
        action = act(state)[0].detach()
        reward = -(action - torch.tanh(state[:, :2])).square().sum(dim=1) + 0.1 * torch.randn(len(state))
        seen = torch.cat([state, action], dim=1)
        descend(critic, sum((one(seen)[:, 0] - reward).square().mean() for one in model["critic"]))
        action, spread = act(state)
        seen = torch.cat([state, action], dim=1)
        value = torch.stack([one(seen)[:, 0] for one in model["critic"]]).amin(dim=0)
        return descend(actor, -(value + entropy * spread).mean())

    return Loop(model, _turns(32), own_loss, [critic, actor], update=update, watched=dict(model.items()))


class Towers(nn.Module):
    """Two encoders and a learned temperature; one encoder for both where `shared`."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.left = mlp(12, 32, 16)
        self.right = self.left if shared else mlp(12, 32, 16)
        self.scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        a, b = functional.normalize(self.left(a)), functional.normalize(self.right(b))
        logits = self.scale.exp().clamp(max=100) * a @ b.mT
        own = torch.arange(len(a))
        return 0.5 * (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.mT, own))


def triplet(model: nn.Module, a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    """Most triplets are satisfied later: most samples have no gradient."""
    return functional.triplet_margin_loss(model(a), model(b), model(b.roll(1, 0)), margin=0.5)


def angular(model: nn.Module, a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    """A margin on the angle, as in face recognition."""
    cosine_ = functional.normalize(model[0](a)) @ functional.normalize(model[1].weight).mT
    margin = functional.one_hot(labels, 6) * 0.2
    return functional.cross_entropy(16 * (cosine_ - margin), labels)


def bootstrap() -> Loop:
    """BYOL: a slowly following copy is the target."""
    model = nn.ModuleDict({"encoder": mlp(12, 32, 16), "predictor": mlp(16, 16, 16)})
    target = copy.deepcopy(model["encoder"])

    def loss(model: nn.Module, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            aim = target(b)
        return 2 - 2 * functional.cosine_similarity(model["predictor"](model["encoder"](a)), aim).mean()

    @torch.no_grad()
    def follow(loop: Loop, step: int) -> None:
        for mine, theirs in zip(target.parameters(), model["encoder"].parameters(), strict=True):
            mine.lerp_(theirs, 0.02)

    return supervised(model, data.pairs(), loss, lr=2e-3, after=[follow])


def preference() -> Loop:
    """DPO: the difference to a frozen copy, on pairs of sentences."""
    model = Transformer(depth=1)
    reference = copy.deepcopy(model).requires_grad_(False)

    def log_p(model: nn.Module, tokens: Tensor) -> Tensor:
        return -functional.cross_entropy(model(tokens[:, :-1]).mT, tokens[:, 1:], reduction="none").sum(dim=1)

    def loss(model: nn.Module, better: Tensor, _: Tensor) -> Tensor:
        worse = torch.randint_like(better, 24)
        margin = log_p(model, better) - log_p(reference, better) - log_p(model, worse) + log_p(reference, worse)
        return -functional.logsigmoid(0.1 * margin).mean()

    return supervised(model, data.sentences(), loss, lr=1e-3, steps=150)


OTHERS: Table = {
    "generative": {
        "denoising autoencoder": lambda: supervised(mlp(12, 32, 4, 32, 12), data.blobs(), rebuild, lr=3e-3),
        "VAE": lambda: supervised(VAE(12), data.blobs(), lambda model, x, _: model(x), lr=3e-3),
        "VAE, its KL term warmed up": warmed_beta,
        "vector quantisation": lambda: supervised(VAE(12, codes=16), data.blobs(), lambda model, x, _: model(x), lr=3e-3),
        "normalising flow": lambda: supervised(Coupling(), data.points(dim=4), own_loss, lr=2e-3, clip=5.0),
        "diffusion": lambda: supervised(Diffusion(), data.points(64), own_loss, lr=2e-3, steps=300),
    },
    "adversarial": {
        "GAN": gan,
        "WGAN with gradient penalty": lambda: gan(kind="penalty"),
        "hinge GAN, spectral norm": lambda: gan(kind="hinge"),
        "least-squares GAN": lambda: gan(kind="squares", lr=5e-4),
        "gradient reversal": lambda: supervised(DomainAdversarial(), data.blobs(), own_loss, lr=3e-3),
    },
    "reinforcement": {
        "REINFORCE": lambda: supervised(mlp(6, 32, 3), _turns(16), reinforce, lr=5e-3, steps=300),
        "actor-critic, one trunk": lambda: supervised(ActorCritic(), _turns(16), advantage, lr=3e-3, clip=0.5, steps=300),
        "actor-critic, RMSprop, not clipped": lambda: supervised(ActorCritic(), _turns(5), advantage, optimizer=torch.optim.RMSprop, lr=2e-3, steps=300),
        "DQN, targets copied every 50 steps": q_learning,
        "double DQN, targets copied every 30 steps": lambda: q_learning(every=30, double=True),
        "DQN, targets that follow softly": lambda: q_learning(soft=0.02),
        "PPO": proximal,
        "PPO, every step clipped": lambda: proximal(tight=True),
        "GRPO": lambda: supervised(mlp(6, 32, 3), _turns(8), grouped, lr=5e-3, clip=1.0, steps=300),
        "DDPG": continuous,
        "SAC": lambda: continuous(twins=2, entropy=0.05),
    },
    "contrastive": {
        "two views": lambda: supervised(Towers(shared=True), data.pairs(), own_loss, lr=2e-3),
        "two towers, learned temperature": lambda: supervised(Towers(), data.pairs(24), own_loss, optimizer=AdamW, lr=2e-3, schedule=cosine(200)),
        "triplets": lambda: supervised(mlp(12, 32, 8), data.pairs(), triplet, lr=2e-3, steps=300),
        "angular margin": lambda: supervised(nn.Sequential(mlp(12, 32, 8), nn.Linear(8, 6, bias=False)), data.pairs(), angular, lr=3e-3),
        "BYOL": bootstrap,
        "DPO": preference,
    },
}  # fmt: skip
