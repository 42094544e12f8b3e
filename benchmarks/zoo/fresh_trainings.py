"""Healthy trainings of kinds that no other file of the zoo has: written before any of them was run under `watch`."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from . import data
from .fresh_models import (
    Carried,
    Equilibrium,
    Hyper,
    Mixer,
    Operator,
    Pointer,
    Points,
    Remembering,
    Scanned,
    Spiking,
    UNet,
    clouds,
    for_tasks,
    in_tasks,
    largest,
    segment,
    shifted,
    streams,
)
from .healthy_others import ActorCritic, own_loss
from .healthy_recipes import ByParameter
from .healthy_supervised import AdamW, Branches, cosine, momentum
from .loop import Batch, Loop, descend, supervised
from .models import Residual, Transformer, classify, conv, mlp, next_token, regress


class TrustRatio(ByParameter):
    """LAMB: Adam's update, made as long as the parameter."""

    def update(self, parameter: Tensor, state: dict[str, Tensor], lr: float) -> None:
        first = state.setdefault("first", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
        second = state.setdefault("second", torch.zeros_like(parameter)).lerp_(parameter.grad**2, 0.01)
        update = first / (second.sqrt() + 1e-6) + 0.01 * parameter
        sizes = parameter.norm(), update.norm()
        trust = (sizes[0] / sizes[1]).clamp(max=10.0) if min(sizes) > 0 else torch.ones(())
        parameter.sub_(lr * trust * update)


def whole() -> Loop:
    """Rprop on all of the data at once."""
    x = torch.randn(256, 8)
    y = torch.sin(x @ torch.randn(8, 1) / 2)
    return supervised(mlp(8, 24, 1, act=nn.Tanh), lambda _: (x, y), regress, optimizer=torch.optim.Rprop, lr=1e-3)


def averaged() -> Loop:
    """Every 40 steps the average of the weights is put in for an evaluation, and taken out again."""
    model = conv()
    mean, batch = copy.deepcopy(model), data.images(noise=1.5)

    @torch.no_grad()
    def evaluate(loop: Loop, step: int) -> None:
        for slow, fast in zip(mean.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.05)
        if step % 40 == 0:
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(mean.state_dict())
            model(batch(step)[0])
            model.load_state_dict(own)

    return supervised(model, batch, classify, optimizer=momentum, lr=0.02, after=[evaluate])


class Skipped(Residual):
    """x + f(x), or, three times in ten, x alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x if torch.rand(()) < 0.3 else super().forward(x)


def stochastic_depth() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), *(Skipped(mlp(24, 24, 24)) for _ in range(5)), nn.Linear(24, 4))


def pruned() -> Loop:
    """Half of the weights, the smallest, are taken out at step 120, and it trains on."""

    def cut(loop: Loop, step: int) -> None:
        if step == 120:
            for index in (0, 2):
                prune.l1_unstructured(loop.model[index], "weight", 0.5)  # type: ignore[index]

    return supervised(mlp(12, 48, 48, 4), data.blobs(), classify, lr=3e-3, before=[cut])


class Rounded(nn.Linear):
    """Weights of 15 levels; the gradient passes straight through the rounding."""

    def forward(self, x: Tensor) -> Tensor:
        unit = self.weight.detach().abs().amax() / 7
        levels = (self.weight / unit).round() * unit
        return functional.linear(x, self.weight + (levels - self.weight).detach(), self.bias)


class Recomputed(Transformer):
    """Activations of the blocks are computed again in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x))


def grokking() -> Loop:
    """Sums modulo 23, a third of them known, with the decay of 1 that makes it generalise."""
    a, b = torch.meshgrid(torch.arange(23), torch.arange(23), indexing="ij")
    known = torch.randperm(23 * 23)[:180]
    x, y = torch.stack([a.flatten(), b.flatten()], dim=1)[known], ((a + b) % 23).flatten()[known]
    model = nn.Sequential(nn.Embedding(23, 24), nn.Flatten(), mlp(48, 96, 23))
    make = lambda parameters, lr: AdamW(parameters, lr=lr, weight_decay=1.0, betas=(0.9, 0.98))  # noqa: E731
    return supervised(model, lambda _: (x, y), classify, optimizer=make, lr=1e-3, steps=400)


def noisy_weights() -> Loop:
    """Langevin's dynamics: noise in the weights after each step."""

    @torch.no_grad()
    def shake(loop: Loop, step: int) -> None:
        for parameter in loop.model.parameters():
            parameter.add_(2e-3 * torch.randn_like(parameter))

    return supervised(mlp(12, 32, 32, 4), data.blobs(), classify, optimizer=momentum, lr=0.02, after=[shake])


def mixture(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Three normal densities, their shares, means and widths."""
    share, mean, width = model(x).chunk(3, dim=1)
    width = width.clamp(min=-4.0)
    log_p = share.log_softmax(dim=1) - 0.5 * ((y - mean) * torch.exp(-width)) ** 2 - width
    return -log_p.logsumexp(dim=1).mean()


def annealed() -> Loop:
    """An autoencoder whose codes are drawn, ever more sharply."""
    model, heat = nn.ModuleDict({"encoder": mlp(12, 32, 16), "decoder": mlp(16, 32, 12)}), [2.0]

    def loss(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        code = functional.gumbel_softmax(model["encoder"](x), tau=heat[0])
        return functional.mse_loss(model["decoder"](code), x)

    cool = lambda loop, step: heat.__setitem__(0, max(0.3, 2.0 * 0.99**step))  # noqa: E731
    return supervised(model, data.blobs(), loss, lr=3e-3, before=[cool])


def table() -> data.Batches:
    """Ages, incomes, years and flags as they come; the model's first layer is a batch norm."""
    x = torch.randn(2048, 6)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return data.drawn(x * torch.tensor([15.0, 3e4, 4.0, 0.4, 1e3, 1.0]) + torch.tensor([40.0, 5e4, 2005, 0.5, 0, 0]), y)


def epochs(size: int = 32) -> data.Batches:
    """Ten batches of an epoch are full, the eleventh is one sample."""
    x, y = data.blobs(321)(0)
    order = [torch.randperm(321)]

    def batch(step: int) -> Batch:
        at = (step - 1) % 11
        if at == 0:
            order[0] = torch.randperm(321)
        chosen = order[0][size * at : size * (at + 1)]
        return x[chosen], y[chosen]

    return batch


def in_turn() -> Loop:
    """A class at odd steps, a number ten times as large at even ones; each has its own head."""
    classes, numbers, model = data.blobs(dim=12), data.curve(dim=12), Branches(mlp(12, 32, 32), [nn.Linear(32, 4), nn.Linear(32, 1)])  # fmt: skip

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        hidden = model.trunk(x)
        if y.dim() == 1:
            return functional.cross_entropy(model.heads[0](hidden), y)
        return functional.mse_loss(model.heads[1](hidden), 10 * y)

    return supervised(model, lambda step: (classes if step % 2 else numbers)(step), loss, lr=3e-3, steps=300)


def boxes() -> Loop:
    """Is something in the image, and where; in many batches nothing is, and the second head gets only zeros."""
    model = conv(classes=3)

    def batch(_: int) -> Batch:
        there, at = torch.rand(4) < 0.15, torch.randint(0, 7, (4, 2))
        x = 0.3 * torch.randn(4, 1, 8, 8)
        for index in there.nonzero()[:, 0].tolist():
            row, column = at[index].tolist()
            x[index, 0, row : row + 2, column : column + 2] += 2.0
        return x, torch.cat([there[:, None].float(), at / 7], dim=1)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out, there = model(x), y[:, 0]
        where = functional.smooth_l1_loss(out[:, 1:], y[:, 1:], reduction="none").sum(dim=1)
        found = functional.binary_cross_entropy_with_logits(out[:, 0], there)
        return found + (there * where).sum() / there.sum().clamp(min=1)

    return supervised(model, batch, loss, lr=2e-3, steps=300)


def delayed() -> Loop:
    """TD3: two critics at every step, the actor at every second one, targets that follow."""
    model = nn.ModuleDict({"actor": mlp(6, 32, 2), "critics": nn.ModuleList(mlp(8, 32, 1) for _ in range(2))})
    actor, critics = (torch.optim.Adam(model[part].parameters(), lr=2e-3) for part in ("actor", "critics"))
    target = copy.deepcopy(model).requires_grad_(False)

    def update(loop: Loop, step: int) -> Tensor:
        state = loop.batch(step)[0]
        action = (torch.tanh(model["actor"](state)) + 0.2 * torch.randn(len(state), 2)).clamp(-1, 1).detach()
        reward = -(action - torch.tanh(state[:, :2])).square().sum(dim=1)
        later = state + 0.1 * torch.randn_like(state)
        seen = torch.cat([later, torch.tanh(target["actor"](later))], dim=1)
        aim = reward + 0.9 * torch.stack([one(seen)[:, 0] for one in target["critics"]]).amin(dim=0)
        pair = torch.cat([state, action], dim=1)
        loss = descend(critics, sum((one(pair)[:, 0] - aim).square().mean() for one in model["critics"]))
        if step % 2 == 0:
            acted = torch.cat([state, torch.tanh(model["actor"](state))], dim=1)
            descend(actor, -model["critics"][0](acted).mean())
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.02)
        return loss

    batch = lambda _: (torch.randn(32, 6),)  # noqa: E731
    return Loop(model, batch, own_loss, [critics, actor], update=update, watched=dict(model.items()), steps=300)


def large_returns(model: nn.Module, state: Tensor, right: Tensor, size: Tensor) -> Tensor:
    """A2C whose rewards are in tens."""
    policy, value = model(state)
    action = policy.sample()
    gain = size * (action == right).float() - value
    return (-(policy.log_prob(action) * gain.detach()) + 0.5 * gain**2).mean() - 0.01 * policy.entropy().mean()


def judged(size: int = 16) -> data.Batches:
    w = torch.randn(6, 3)

    def batch(_: int) -> Batch:
        state = torch.randn(size, 6)
        return state, (state @ w).argmax(dim=1), torch.tensor(20.0)

    return batch


def rarely_right() -> Loop:
    """One answer of forty is right: most steps have no reward, and no gradient, until it is found."""
    model, aim = mlp(4, 32, 40), torch.randint(0, 40, (4,))

    def batch(_: int) -> Batch:
        asked = torch.randint(0, 4, (1,))
        return functional.one_hot(asked, 4).float(), aim[asked]

    def loss(model: nn.Module, asked: Tensor, right: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=model(asked))
        answers = policy.sample((8,))
        reward = (answers == right).float()
        return -(policy.log_prob(answers) * (reward - reward.mean(dim=0)) / (reward.std(dim=0) + 1e-4)).mean()

    return supervised(model, batch, loss, lr=3e-3, clip=1.0, steps=400)


def queued() -> Loop:
    """MoCo: keys of a copy that follows slowly, and a queue of old ones as what to tell apart from."""
    model = mlp(12, 32, 16)
    slow, queue = copy.deepcopy(model).requires_grad_(False), [functional.normalize(torch.randn(128, 16))]

    def loss(model: nn.Module, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        query, key = functional.normalize(model(a)), functional.normalize(slow(b))
        logits = torch.cat([(query * key).sum(dim=1, keepdim=True), query @ queue[0].mT], dim=1) / 0.1
        queue[0] = torch.cat([queue[0], key])[len(key) :]
        return functional.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))

    @torch.no_grad()
    def follow(loop: Loop, step: int) -> None:
        for mine, theirs in zip(slow.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.05)

    return supervised(model, data.pairs(), loss, lr=2e-3, after=[follow])


def wrong_labels() -> data.Batches:
    """Two labels in five are wrong."""
    x, y = data.blobs(1024)(0)
    return data.drawn(x, torch.where(torch.rand(1024) < 0.4, torch.randint(0, 4, (1024,)), y))


FRESH: dict[str, Callable[[], Loop]] = {
    "selective scan": lambda: supervised(Scanned(), data.sentences(), next_token, optimizer=AdamW, lr=3e-3, schedule=cosine(200), clip=1.0),
    "U-Net": lambda: supervised(UNet(), data.images(), segment, lr=3e-3),
    "mixer": lambda: supervised(Mixer(), data.images(side=16), classify, optimizer=AdamW, lr=2e-3, schedule=cosine(200)),
    "cloud of points": lambda: supervised(Points(), clouds(), classify, lr=3e-3),
    "pointer to the largest": lambda: supervised(Pointer(), largest, classify, lr=5e-3, clip=2.0),
    "hypernetwork": lambda: supervised(Hyper(), in_tasks, for_tasks, lr=3e-3, steps=300),
    "memory of the segment before": lambda: supervised(Remembering(), streams(), next_token, lr=3e-3),
    "operator in frequencies": lambda: supervised(Operator(), shifted, regress, lr=3e-3),
    "equilibrium": lambda: supervised(Equilibrium(), data.blobs(), classify, lr=3e-3),
    "spiking neurons": lambda: supervised(Spiking(), data.blobs(), classify, lr=3e-3),
    "mixture of densities": lambda: supervised(mlp(8, 32, 32, 9), data.curve(), mixture, lr=3e-3),
    "drawn codes, ever sharper": annealed,
    "LAMB": lambda: supervised(Transformer(), data.sentences(), next_token, optimizer=TrustRatio, lr=1e-2, schedule=cosine(200)),
    "Adafactor": lambda: supervised(Transformer(), data.sentences(), next_token, optimizer=torch.optim.Adafactor, lr=1e-2),
    "Rprop, all data at once": whole,
    "averaged weights are put in and out": averaged,
    "blocks left out at random": lambda: supervised(stochastic_depth(), data.blobs(), classify, lr=2e-3),
    "pruned by half at step 120": pruned,
    "weights of four bits": lambda: supervised(nn.Sequential(Rounded(12, 48), nn.ReLU(), Rounded(48, 48), nn.ReLU(), Rounded(48, 4)), data.blobs(), classify, lr=2e-3),
    "activations computed twice": lambda: supervised(Recomputed(depth=3), data.sentences(), next_token, optimizer=AdamW, lr=3e-3, schedule=cosine(200), clip=1.0),
    "decay of 1 that makes it generalise": grokking,
    "a state that is carried over": lambda: supervised(Carried(), streams(), next_token, lr=5e-3, clip=1.0),
    "a table as it comes, batch norm first": lambda: supervised(nn.Sequential(nn.BatchNorm1d(6), mlp(6, 32, 32, 1)), table(), regress, lr=3e-3),
    "one sample at the end of an epoch": lambda: supervised(mlp(12, 32, 32, 4), epochs(), classify, optimizer=momentum, lr=0.02, steps=330),
    "two tasks in turn": in_turn,
    "boxes, many batches without one": boxes,
    "TD3, the actor every second step": delayed,
    "actor-critic, rewards in tens": lambda: supervised(ActorCritic(), judged(), large_returns, optimizer=torch.optim.RMSprop, lr=1e-3, clip=0.5, steps=300),
    "rewards that are rare at first": rarely_right,
    "queue of keys": queued,
    "two labels in five are wrong": lambda: supervised(mlp(12, 32, 32, 4), wrong_labels(), classify, lr=3e-3),
    "noise in the weights": noisy_weights,
}  # fmt: skip
