"""Twelve healthy trainings, written while nobody looked at a rule; a coin that was tossed before any run locked half."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .healthy_supervised import AdamW, momentum
from .loop import Batch, Loop, descend, supervised
from .models import Experts, Residual, classify, mlp, regress

Adam, SGD = torch.optim.Adam, torch.optim.SGD


class Opinions(nn.Module):
    """The mean of the words' vectors, and two layers. Word 0 fills up short texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rest = nn.Embedding(120, 16, padding_idx=0), mlp(16, 32, 2)

    def forward(self, text: Tensor) -> Tensor:
        present = (text > 0).float()[..., None]
        return self.rest((self.words(text) * present).sum(1) / present.sum(1))


def opinions(size: int = 32) -> data.Batches:
    """Texts of 4 to 12 words, each of which speaks for one of two opinions."""
    worth = torch.randn(120)

    def batch(_: int) -> Batch:
        text = torch.randint(1, 120, (size, 12))
        text = text * (torch.arange(12) < torch.randint(4, 13, (size, 1)))
        return text, ((worth[text] * (text > 0)).sum(1) > 0).long()

    return batch


class Translator(nn.Module):
    """A recurrence reads, another one writes, and looks back by dot products of `heat`."""

    def __init__(self, words: int = 16, dim: int = 24) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, dim), nn.Embedding(words, dim)
        self.reader, self.writer = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.read, self.mixed, self.head = nn.Identity(), nn.Linear(2 * dim, dim), nn.Linear(dim, words)
        self.heat = dim**-0.5

    def forward(self, source: Tensor, before: Tensor) -> Tensor:
        states = self.read(self.reader(self.source(source))[0])
        written = self.writer(self.target(before), states[:, -1][None].contiguous())[0]
        logits = (self.heat * written @ states.mT).masked_fill(source[:, None] < 0, float("-inf"))
        return self.head(torch.tanh(self.mixed(torch.cat([written, logits.softmax(-1) @ states], -1))))


def translated(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Teacher forcing: each word of the target is told the one before it."""
    before = functional.pad(target[:, :-1], (1, 0))
    return functional.cross_entropy(model(source, before).flatten(0, 1), target.flatten())


def backwards(size: int = 24, *, words: int = 16, length: int = 8) -> data.Batches:
    """Words, and their translation backwards."""
    dictionary = torch.randperm(words)

    def batch(_: int) -> Batch:
        source = torch.randint(0, words, (size, length))
        return source, dictionary[source.flip(1)]

    return batch


class Variational(nn.Module):
    """Curves through four numbers; the encoder says their means and the logarithms of their variances."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(20, 48, 8), mlp(4, 48, 20)
        self.weight = 0.02  # of the divergence

    def deviation(self, spread: Tensor) -> Tensor:
        return (spread / 2).exp()

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encoder(x).chunk(2, dim=-1)
        said = self.decoder(mean + self.deviation(spread) * torch.randn_like(mean))
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(-1).mean()
        return functional.mse_loss(said, x) + self.weight * divergence


def waves(size: int = 32) -> data.Batches:
    """Sines of any phase, height and pitch: [N, 20]."""

    def batch(_: int) -> Batch:
        time, one = torch.linspace(0, 3, 20), torch.rand(3, size, 1)
        return ((0.5 + one[0]) * torch.sin((1 + 2 * one[1]) * time + 6.28 * one[2]),)

    return batch


def q_learning() -> Loop:
    """A walk on a line: state, action, reward, next state, whether it ends; the targets' network follows every 20 steps."""
    model = mlp(2, 32, 32, 3)
    held = copy.deepcopy(model)
    model.held = [held]  # in a list: not a submodule

    def batch(_: int) -> Batch:
        state, action = 2 * torch.rand(48, 2) - 1, torch.randint(0, 3, (48,))
        speed = 0.9 * state[:, 1] + 0.3 * (action - 1)
        after = torch.stack([state[:, 0] + 0.3 * speed, speed], 1)
        return state, action, 1 - after[:, 0].abs(), after, (after[:, 0].abs() > 1).float()

    def loss(model: nn.Module, state: Tensor, action: Tensor, reward: Tensor, after: Tensor, ended: Tensor) -> Tensor:
        with torch.no_grad():
            aim = reward + 0.9 * (1 - ended) * held(after).max(1).values
        return functional.mse_loss(model(state)[torch.arange(len(action)), action], aim)

    loop = supervised(model, batch, loss, optimizer=torch.optim.RMSprop, lr=1e-3, steps=200)
    loop.after.append(
        lambda loop, step: held.load_state_dict(loop.model.state_dict()) and None if step % 20 == 0 else None
    )
    return loop


class Masked(nn.Module):
    """Encoder blocks of torch's own, norm first; the words' vectors say the words too."""

    def __init__(self, words: int = 20, dim: int = 24) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, dim), nn.Parameter(0.02 * torch.randn(12, dim))
        nn.init.normal_(self.words.weight, std=0.2)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 3, 48, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def masked(size: int = 24, share: float = 0.2) -> data.Batches:
    """Ramps of words, some of which are replaced by word 0; the aim is -100 where nothing was replaced."""

    def batch(_: int) -> Batch:
        words = 1 + (torch.randint(0, 19, (size, 1)) + torch.arange(12) * torch.randint(1, 4, (size, 1))) % 19
        hidden = torch.rand(size, 12) < share
        return words.masked_fill(hidden, 0), words.masked_fill(~hidden, -100)

    return batch


def hidden_words(model: nn.Module, words: Tensor, aims: Tensor) -> Tensor:
    return functional.cross_entropy(model(words).flatten(0, 1), aims.flatten())


class UNet(nn.Module):
    """One level down and up again; what is found before the way down is beside what comes up."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, dim, 3, padding=1), nn.GroupNorm(2, dim), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(dim, 2 * dim, 3, stride=2, padding=1), nn.GroupNorm(2, 2 * dim), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * dim, dim, 2, stride=2)
        self.last = nn.Sequential(nn.Conv2d(2 * dim, dim, 3, padding=1), nn.SiLU(), nn.Conv2d(dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        return self.last(torch.cat([found, self.up(self.down(found))], 1))


def discs(size: int = 12) -> data.Batches:
    """Noisy images of a disc, and the disc."""

    def batch(_: int) -> Batch:
        place = torch.stack(torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij"))
        centre, radius = 2 + 8 * torch.rand(size, 2, 1, 1), 1.5 + 2 * torch.rand(size, 1, 1)
        disc = ((place - centre).square().sum(1) < radius**2).float()[:, None]
        return 1.5 * disc + 0.7 * torch.randn_like(disc), disc

    return batch


def drawn_over(model: nn.Module, x: Tensor, disc: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x), disc)


def apart(model: nn.Module, anchor: Tensor, same: Tensor, labels: Tensor) -> Tensor:
    """Triplets of unit vectors: another sample of the batch is the stranger."""
    a, b = functional.normalize(model(anchor)), functional.normalize(model(same))
    distance = lambda x, y: (x - y).square().sum(1).sqrt()  # noqa: E731
    other = (labels != labels.roll(1)).float()
    return (other * functional.relu(distance(a, b) - distance(a, b.roll(1, 0)) + 1.0)).mean()


class Mixture(nn.Module):
    """A residual mixture between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.experts, self.head = nn.Linear(8, 16), Experts(16, experts=4, top=2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.gelu(self.inner(x))
        return self.head(x + self.experts(x))


def balanced(model: Mixture, x: Tensor, y: Tensor, weight: float = 0.02) -> Tensor:
    return regress(model, x, y) + weight * model.experts.balance


def hinged() -> Loop:
    """Points drawn by a generator, against a critic with a hinge."""
    model = nn.ModuleDict({"draws": mlp(4, 32, 32, 2), "judges": mlp(2, 32, 32, 1, act=lambda: nn.LeakyReLU(0.2))})
    optimizers = [Adam(model[name].parameters(), lr=1e-3, betas=(0.5, 0.9)) for name in ("judges", "draws")]

    def update(loop: Loop, step: int) -> Tensor:
        (real,) = loop.batch(step)
        fake = loop.model["draws"](torch.randn(len(real), 4))
        judge = loop.model["judges"]
        told = functional.relu(1 - judge(real)).mean() + functional.relu(1 + judge(fake.detach())).mean()
        descend(loop.optimizers[0], told)
        descend(loop.optimizers[1], -judge(fake).mean())
        return told.detach()

    return Loop(model, data.points(size=48), regress, optimizers, update=update)


def doubtful(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The likelihood of a normal distribution whose mean and variance the model says."""
    mean, spread = model(x).chunk(2, dim=1)
    return functional.gaussian_nll_loss(mean, y, functional.softplus(spread) + 1e-4)


def wide_and_narrow(size: int = 48) -> data.Batches:
    """A small curve whose noise depends on the place: a likelihood that soon is above 1."""

    def batch(_: int) -> Batch:
        x = torch.randn(size, 5)
        return x, 0.2 * torch.sin(2 * x[:, :1]) + 0.03 * (1 + x[:, 1:2].abs()) * torch.randn(size, 1)

    return batch


class Words(nn.Module):
    """A two-layer LSTM between dropouts, as the example in torch's repository."""

    def __init__(self, words: int = 24, dim: int = 32) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(words, dim), nn.LSTM(dim, dim, 2, batch_first=True, dropout=0.1)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(dim, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.drop(self.memory(self.drop(self.words(words)))[0]))


def next_word(model: nn.Module, words: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(words).flatten(0, 1), targets.flatten())


def small_resnet() -> nn.Module:
    def block() -> nn.Module:
        return Residual(nn.Sequential(nn.Conv2d(12, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()))

    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), block(), nn.MaxPool2d(2), block(),
                         nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 6))  # fmt: skip


TRAININGS: dict[str, Callable[[], Loop]] = {
    "opinions, mean of words": lambda: supervised(Opinions(), opinions(), classify, lr=3e-3, steps=200),
    "figures, Nesterov, steps down": lambda: supervised(small_resnet(), data.images(classes=6, noise=2.5), classify, optimizer=lambda p, lr: SGD(p, lr=lr, momentum=0.9, nesterov=True, weight_decay=5e-4), lr=0.03, schedule=lambda step: 0.3 ** (step // 60), steps=180),
    "translated backwards, two batches": lambda: supervised(Translator(), backwards(), translated, optimizer=AdamW, lr=4e-3, clip=1.0, accumulate=2, steps=150),
    "curves through four numbers": lambda: supervised(Variational(), waves(), lambda model, x: model(x), lr=2e-3, steps=250),
    "values of a walk": q_learning,
    "hidden words, warm-up and a line down": lambda: supervised(Masked(), masked(), hidden_words, optimizer=AdamW, lr=4e-3, schedule=lambda step: min(step / 15, (170 - step) / 155), clip=1.0, steps=160),
    "discs, float16": lambda: supervised(UNet(), discs(), drawn_over, lr=3e-3, scaler=torch.amp.GradScaler("cpu"), autocast=torch.float16, steps=120),
    "triplets of unit vectors": lambda: supervised(mlp(12, 48, 48, 8), data.pairs(size=32, classes=30), apart, optimizer=momentum, lr=0.05, steps=200),
    "two of four experts": lambda: supervised(Mixture(), data.curve(48), balanced, lr=3e-3, clip=5.0, steps=200),
    "a generator and a hinge": hinged,
    "means and variances": lambda: supervised(mlp(5, 32, 32, 2, act=nn.SiLU), wide_and_narrow(), doubtful, lr=2e-3, steps=250),
    "words, SGD, clipped to 0.25": lambda: supervised(Words(), data.sentences(size=12), next_word, optimizer=SGD, lr=5.0, clip=0.25, schedule=lambda step: 0.5 ** (step // 80), steps=160),
}  # fmt: skip


def sixth(which: int) -> dict[str, Callable[[], Loop]]:
    """0: those that are opened, 1: the locked ones."""
    names = list(TRAININGS)
    random.Random(23112026).shuffle(names)
    return {name: TRAININGS[name] for name in names[which::2]}
