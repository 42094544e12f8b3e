"""Healthy trainings in pairs, written before any of them was run under `watch`: one is opened, the other one locked."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from . import another_models as made
from . import data
from .healthy_others import own_loss
from .healthy_supervised import AdamW, cosine, momentum
from .loop import Batch, Loop, descend, supervised
from .models import LoRA, classify, mlp, next_token, regress


def rotary(depth: int = 3, dim: int = 32) -> made.Language:
    layers = [made.Layer(dim, made.SwiGLU(dim), norm=nn.RMSNorm, causal=True, rotary=True) for _ in range(depth)]
    return made.Language(layers, dim, tied=False)


def tied(dim: int = 32) -> made.Language:
    def inner() -> nn.Module:
        return nn.Sequential(mlp(dim, 4 * dim, dim, act=nn.GELU), nn.Dropout(0.1))

    return made.Language([made.Layer(dim, inner(), causal=True) for _ in range(2)], dim, tied=True)


def balanced(loss: Callable[..., Tensor], weight: float = 0.02) -> Callable[..., Tensor]:
    """With what keeps the experts evenly loaded."""

    def both(model: nn.Module, *batch: Tensor) -> Tensor:
        own = loss(model, *batch)
        return own + weight * sum(module.balance for module in model.modules() if isinstance(module, made.Gated))

    return both


def switched(dim: int = 32) -> Loop:
    layers = [made.Layer(dim, made.Gated(dim, top=1), causal=True) for _ in range(2)]
    return supervised(made.Language(layers, dim, tied=True), data.sentences(8), balanced(next_token), optimizer=AdamW, lr=4e-3, schedule=cosine(160), clip=1.0, steps=160)  # fmt: skip


def adapted() -> Loop:
    """A language model learns one language, then another one through updates of low rank."""
    model = rotary(2)
    first = supervised(model, data.sentences(), next_token, optimizer=AdamW, lr=5e-3)
    for step in range(1, 61):
        first.advance(step)
    model.zero_grad()
    model.requires_grad_(False)
    for layer in model.layers:
        for owner, name in ((layer.attention, "q"), (layer.attention, "v"), (layer.inner, "up"), (layer.inner, "down")):
            setattr(owner, name, LoRA(getattr(owner, name), rank=4))
    return supervised(
        model, data.sentences(4), next_token, optimizer=AdamW, lr=4e-3, schedule=cosine(150, 10), steps=150
    )


def spoken(aim: Callable[[Tensor], Tensor], size: int) -> data.Batches:
    def batch(_: int) -> Batch:
        source = torch.randint(0, 10, (size, 6))
        return source, aim(source)

    return batch


def said(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten())


def copied(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    return functional.mse_loss(model(x), x)


def denoised(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    level, noise = torch.rand(len(x)), torch.randn_like(x)
    angle = (level * torch.pi / 2)[:, None, None, None]
    return functional.mse_loss(model(angle.cos() * x + angle.sin() * noise, level), noise)


def bits(size: int = 256) -> data.Batches:
    """Six patterns of 24 bits, a tenth of them flipped."""
    patterns = torch.rand(6, 24) < 0.5
    return lambda _: ((patterns[torch.randint(0, 6, (size,))] ^ (torch.rand(size, 24) < 0.1)).float(),)


def bounded(model: nn.Module, x: Tensor) -> Tensor:
    """The evidence's lower bound."""
    mean, log_var = model["encoder"](x).chunk(2, dim=1)
    out = model["decoder"](mean + torch.randn_like(mean) * (0.5 * log_var).exp())
    own = functional.binary_cross_entropy_with_logits(out, x, reduction="sum") / len(x)
    return own + 0.5 * (mean**2 + log_var.exp() - 1 - log_var).sum(dim=1).mean()


def moons(size: int = 256) -> data.Batches:
    def batch(_: int) -> Batch:
        angle, side = torch.pi * torch.rand(size), torch.randint(0, 2, (size,)) * 2.0 - 1
        x = torch.stack([side * angle.cos() + 0.5 * side, side * angle.sin() - 0.25 * side], dim=1)
        return (x + 0.1 * torch.randn(size, 2),)

    return batch


def likely(model: nn.Module, x: Tensor) -> Tensor:
    z, stretched = model(x)
    return (0.5 * z.square().sum(dim=1) - stretched).mean()


def _pair(generator: nn.Module, judge: nn.Module, batch: data.Batches, noise: int, judged: Callable[..., Tensor], optimizers: list[torch.optim.Optimizer], times: int) -> Loop:  # fmt: skip
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


def hinged() -> Loop:
    generator, judge = (
        made.Autoencoder().decoder,
        nn.Sequential(made.Autoencoder().encoder, nn.LeakyReLU(0.2), nn.Linear(12, 1)),
    )
    for module in list(judge.modules()):
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.utils.parametrizations.spectral_norm(module)
    rates = ((judge, 5e-4), (generator, 5e-3))
    optimizers = [torch.optim.Adam(part.parameters(), lr=lr, betas=(0.5, 0.9)) for part, lr in rates]

    def judged(judge: nn.Module, real: Tensor, made: Tensor) -> Tensor:
        return torch.relu(1 - judge(real)).mean() + torch.relu(1 + judge(made)).mean()

    return _pair(generator, judge, made.colours(16, noise=0.3, classes=2), 12, judged, optimizers, 1)


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

    return _pair(generator, judge, lambda step: (batch(step)[0] + 2,), 4, judged, optimizers, 2)


def pushed(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """A mass on a line, [N, (place, speed, goal)], is pushed left, not, or right; near the goal is good."""
    place, speed, goal = state.unbind(dim=1)
    speed = 0.9 * speed + 0.2 * (action - 1)
    place = (place + 0.3 * speed).clamp(-2, 2)
    return torch.stack([place, speed, goal], dim=1), 1 - (place - goal).abs()


def begun(size: int) -> Tensor:
    return torch.cat([torch.rand(size, 1) * 2 - 1, torch.zeros(size, 1), torch.rand(size, 1) * 2 - 1], dim=1)


def proximal() -> Loop:
    """PPO: each rollout is gone over four times."""
    model = nn.ModuleDict({"policy": mlp(3, 32, 32, 3, act=nn.Tanh), "value": mlp(3, 32, 32, 1, act=nn.Tanh)})
    kept: list[Batch] = []

    @torch.no_grad()
    def batch(step: int) -> Batch:
        if step % 4 == 1:
            state, rows, rewards = begun(16), [], []
            for _ in range(12):
                policy = Categorical(logits=model["policy"](state))
                action = policy.sample()
                rows.append((state, action, policy.log_prob(action)))
                state, reward = pushed(state, action)
                rewards.append(reward)
            gains, later = [], model["value"](state)[:, 0]
            for reward in reversed(rewards):
                later = reward + 0.9 * later
                gains.insert(0, later)
            kept[:] = [tuple(torch.cat(part) for part in (*zip(*rows, strict=True), gains))]
        return kept[0]

    def loss(model: nn.Module, state: Tensor, action: Tensor, before: Tensor, gain: Tensor) -> Tensor:
        policy, value = Categorical(logits=model["policy"](state)), model["value"](state)[:, 0]
        edge = gain - value.detach()
        edge = (edge - edge.mean()) / (edge.std() + 1e-8)
        ratio = (policy.log_prob(action) - before).exp()
        surrogate = torch.minimum(ratio * edge, ratio.clamp(0.8, 1.2) * edge).mean()
        return 0.5 * (value - gain).square().mean() - surrogate - 0.01 * policy.entropy().mean()

    return supervised(model, batch, loss, lr=3e-3, clip=0.5, steps=240)


def deep_q() -> Loop:
    """DQN: a buffer, a target that is replaced every 25 steps, ever less chance in the actions."""
    model = mlp(3, 48, 48, 3)
    target, state, buffer = copy.deepcopy(model).requires_grad_(False), [begun(16)], []

    @torch.no_grad()
    def batch(step: int) -> Batch:
        if step % 12 == 1:
            state[0] = begun(16)
        chance = torch.rand(16) < max(0.1, 1 - step / 100)
        action = torch.where(chance, torch.randint(0, 3, (16,)), model(state[0]).argmax(dim=1))
        later, reward = pushed(state[0], action)
        buffer.append((state[0], action, later, reward))
        state[0] = later
        chosen = [buffer[index] for index in torch.randint(0, len(buffer), (4,)).tolist()]
        return tuple(torch.cat(part) for part in zip(*chosen, strict=True))

    def loss(model: nn.Module, state: Tensor, action: Tensor, later: Tensor, reward: Tensor) -> Tensor:
        aim = reward + 0.9 * target(later).amax(dim=1)
        return functional.smooth_l1_loss(model(state).gather(1, action[:, None])[:, 0], aim)

    def follow(loop: Loop, step: int) -> None:
        if step % 25 == 0:
            target.load_state_dict(model.state_dict())

    return supervised(model, batch, loss, lr=2e-3, steps=240, after=[follow])


class Towers(nn.Module):
    """Numbers and words in the same space; the temperature is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.words, self.written = mlp(20, 48, 16), nn.EmbeddingBag(80, 24), nn.Linear(24, 16)
        self.heat = nn.Parameter(torch.tensor(2.0))

    def forward(self, seen: Tensor, written: Tensor) -> Tensor:
        a, b = functional.normalize(self.seen(seen)), functional.normalize(self.written(self.words(written)))
        return a @ b.mT * self.heat.exp()


def described(size: int = 48) -> data.Batches:
    things, words = torch.randn(100, 20), torch.randint(0, 80, (100, 8))

    def batch(_: int) -> Batch:
        chosen = torch.randperm(100)[:size]
        return things[chosen] + 0.3 * torch.randn(size, 20), words[chosen][:, torch.randperm(8)[:5]]

    return batch


def matched(model: nn.Module, seen: Tensor, written: Tensor) -> Tensor:
    logits, own = model(seen, written), torch.arange(len(seen))
    return (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.mT, own)) / 2


def viewed(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """SimCLR: two views of an image are found among those of all others."""
    views = [(x + 0.3 * torch.randn_like(x)) * (0.8 + 0.4 * torch.rand(len(x), 3, 1, 1)) for _ in range(2)]
    z = functional.normalize(model(torch.cat(views)))
    logits = (z @ z.mT / 0.2).masked_fill(torch.eye(len(z)).bool(), float("-inf"))
    return functional.cross_entropy(logits, torch.arange(len(z)).roll(len(x)))


def projected() -> nn.Module:
    convolved = [
        nn.Conv2d(3, 12, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1),
        nn.ReLU(),
    ]
    return nn.Sequential(*convolved, nn.Flatten(), nn.Linear(216, 32), nn.ReLU(), nn.Linear(32, 16))


def labelled(model: nn.Module, edges: Tensor, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(edges, x), labels)


def both_tasks(model: nn.Module, names: Tensor, numbers: Tensor, kind: Tensor, amount: Tensor) -> Tensor:
    kinds, amounts = model(names, numbers)
    return functional.cross_entropy(kinds, kind) + functional.mse_loss(amounts, amount)


def distilled() -> Loop:
    """A small student follows the softened answers of a teacher; Muon for its matrices, AdamW for its biases."""
    batch, teacher, model = data.blobs(64, classes=8, noise=2.0), mlp(12, 96, 96, 8), mlp(12, 32, 32, 32, 8)
    first = supervised(teacher, batch, classify, lr=5e-3)
    for step in range(1, 101):
        first.advance(step)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (teacher(x) / 3).softmax(dim=1)
        out = model(x)
        return functional.cross_entropy(out / 3, soft) + 0.3 * functional.cross_entropy(out, y)

    matrices, biases = ([p for p in model.parameters() if p.dim() == dims] for dims in (2, 1))
    return Loop(
        model, batch, loss, [torch.optim.Muon(matrices, lr=0.02), AdamW(biases, lr=3e-3)], schedule=cosine(200, 1)
    )


# Opened, locked, opened, ...
PAIRS: dict[str, Callable[[], Loop]] = {
    "small GPT, rotary": lambda: supervised(rotary(), data.sentences(8), next_token, optimizer=AdamW, lr=4e-3, schedule=cosine(160), clip=1.0, steps=160),
    "small GPT, tied": lambda: supervised(tied(), data.sentences(16), next_token, optimizer=AdamW, lr=6e-3, schedule=cosine(160), clip=1.0, steps=160),
    "class token on patches": lambda: supervised(made.ClassToken(), made.colours(32), classify, optimizer=AdamW, lr=2e-3, schedule=cosine(120), steps=120),
    "depthwise convolutions": lambda: supervised(made.Depthwise(), made.colours(32), classify, optimizer=AdamW, lr=3e-3, schedule=cosine(120), steps=120),
    "bottlenecks": lambda: supervised(made.bottlenecks(), made.colours(48, noise=1.5), classify, optimizer=momentum, lr=0.05, schedule=cosine(150, 1), steps=150),
    "dense blocks": lambda: supervised(made.Dense(), made.colours(48, noise=1.5), classify, optimizer=momentum, lr=0.05, steps=150),
    "LSTM that sorts": lambda: supervised(made.Speaker(nn.LSTM), spoken(lambda x: x.sort(dim=1).values, 32), said, lr=1e-2, clip=1.0, steps=180),
    "GRU that mirrors": lambda: supervised(made.Speaker(nn.GRU), spoken(lambda x: 9 - x.flip(1), 32), said, optimizer=torch.optim.NAdam, lr=1e-2, clip=1.0, steps=180),
    "autoencoder of images": lambda: supervised(made.Autoencoder(), made.colours(16, noise=0.3), copied, lr=3e-3, steps=160),
    "U-Net against noise": lambda: supervised(made.Denoiser(), made.colours(8, noise=0.3), denoised, lr=2e-3, steps=160),
    "VAE of bits": lambda: supervised(nn.ModuleDict({"encoder": mlp(24, 48, 12), "decoder": mlp(6, 48, 24)}), bits(), bounded, lr=4e-3),
    "coupled layers": lambda: supervised(made.Coupled(), moons(), likely, lr=2e-3, clip=5.0),
    "GAN of images, hinge": hinged,
    "Wasserstein GAN": penalised,
    "PPO, a mass on a line": proximal,
    "DQN, a mass on a line": deep_q,
    "two towers": lambda: supervised(Towers(), described(), matched, optimizer=momentum, lr=0.03, schedule=cosine(240, 10), steps=240),
    "two views of an image": lambda: supervised(projected(), made.colours(32, noise=0.8), viewed, optimizer=momentum, lr=0.05, steps=150),
    "graph convolutions": lambda: supervised(made.Convolved(), made.graphs(32), labelled, lr=1e-2),
    "graph attention": lambda: supervised(made.Attended(), made.graphs(16), labelled, lr=3e-3),
    "rays through a field": lambda: supervised(made.Field(), made.rays(), regress, lr=4e-3),
    "a table of names, two tasks": lambda: supervised(made.Columns(), made.rows(), both_tasks, optimizer=torch.optim.RMSprop, lr=2e-3),
    "updates of low rank": adapted,
    "a student and a teacher": distilled,
    "gated experts for pieces": lambda: supervised(nn.Sequential(nn.Linear(8, 24), made.Gated(24, top=2), nn.Linear(24, 1)), made.pieces(), balanced(regress), lr=5e-3),
    "one expert per word": switched,
}  # fmt: skip


def half(which: int) -> dict[str, Callable[[], Loop]]:
    """0: those that are opened, 1: the locked ones."""
    return dict(list(PAIRS.items())[which::2])
