"""Representations: pairs, views, teachers and prototypes."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch, Loop, supervised
from . import data
from .dense import mlp
from .optimizers import follow, follower
from .schedules import cosine


class Views(nn.Module):
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


def byol() -> Loop:
    """BYOL: a slowly following copy is the target."""
    model = nn.ModuleDict({"encoder": mlp(12, 32, 16), "predictor": mlp(16, 16, 16)})

    def loss(model: nn.Module, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            aim = target(b)
        return 2 - 2 * functional.cosine_similarity(model["predictor"](model["encoder"](a)), aim).mean()

    loop = supervised(model, data.pairs(), loss, lr=2e-3)
    target = follower(loop, model["encoder"], 0.02)
    return loop


def siamese(model: nn.Module, a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    """Pairs of the same thing are drawn together, others pushed apart up to a margin."""
    left, right = model(a), model(torch.where(torch.arange(len(b))[:, None] % 2 == 0, b, b.roll(1, 0)))
    distance = (left - right).square().sum(dim=1).add(1e-6).sqrt()
    same = torch.arange(len(b)) % 2 == 0
    return torch.where(same, distance**2, torch.relu(1.0 - distance) ** 2).mean()


def queued() -> Loop:
    """MoCo: keys of a copy that follows slowly, and a queue of old ones as what to tell apart from."""
    model = mlp(12, 32, 16)
    queue = [functional.normalize(torch.randn(128, 16))]

    def loss(model: nn.Module, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        query, key = functional.normalize(model(a)), functional.normalize(slow(b))
        logits = torch.cat([(query * key).sum(dim=1, keepdim=True), query @ queue[0].mT], dim=1) / 0.1
        queue[0] = torch.cat([queue[0], key])[len(key) :]
        return functional.cross_entropy(logits, torch.zeros(len(a), dtype=torch.long))

    loop = supervised(model, data.pairs(), loss, lr=2e-3)
    slow = follower(loop, model, 0.05)
    return loop


class Described(nn.Module):
    """Numbers and words in the same space; the temperature is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.words, self.written = mlp(20, 48, 16), nn.EmbeddingBag(80, 24), nn.Linear(24, 16)
        self.heat = nn.Parameter(torch.tensor(2.0))

    def forward(self, seen: Tensor, written: Tensor) -> Tensor:
        a, b = functional.normalize(self.seen(seen)), functional.normalize(self.written(self.words(written)))
        return a @ b.mT * self.heat.exp()


@data.given(lambda: (torch.randn(100, 20), torch.randint(0, 80, (100, 8))))
def described(things: Tensor, words: Tensor, size: int = 48) -> Batch:
    chosen = torch.randperm(100)[:size]
    return things[chosen] + 0.3 * torch.randn(size, 20), words[chosen][:, torch.randperm(8)[:5]]


def matched_words(model: nn.Module, seen: Tensor, written: Tensor) -> Tensor:
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


@data.anew
def episodes() -> Batch:
    """Five classes that were drawn anew: five samples of each to learn from, and five to ask for."""
    return (2 * torch.randn(5, 1, 12) + torch.randn(5, 10, 12),)


def prototypes(model: nn.Module, x: Tensor) -> Tensor:
    known, asked = model(x).split(5, dim=1)
    distance = (asked.flatten(0, 1)[:, None] - known.mean(dim=1)).square().sum(dim=2)
    return functional.cross_entropy(-distance, torch.arange(5).repeat_interleave(5))


def taught_by_itself() -> Loop:
    """A teacher that follows the student, whose words are centred and sharpened."""
    model = nn.Sequential(mlp(12, 32, 16), nn.Linear(16, 24))
    teacher, centre = copy.deepcopy(model).requires_grad_(False), torch.zeros(24)

    def loss(model: nn.Module, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            aims = [teacher(view) for view in (a, b)]
            centre.lerp_(torch.cat(aims).mean(dim=0), 0.1)
        return -sum(
            (((aim - centre) / 0.04).softmax(dim=1) * (model(view) / 0.1).log_softmax(dim=1)).sum(dim=1).mean()
            for aim, view in zip(aims, (b, a), strict=True)
        )

    loop = supervised(
        model, data.pairs(48), loss, optimizer=torch.optim.AdamW, lr=2e-3, schedule=cosine(200, 20), steps=200
    )
    loop.before.append(
        lambda loop, step: loop.optimizers[0].param_groups[0].update(weight_decay=0.04 + 0.36 * step / 200)
    )
    loop.after.append(lambda loop, step: follow(teacher, loop.model, 0.01))
    return loop


def decorrelated(model: nn.Module, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    """Barlow twins: two views say the same feature by feature, and no feature says another one."""
    one, other = model(a), model(b)
    one, other = ((part - part.mean(dim=0)) / part.std(dim=0) for part in (one, other))
    both = one.T @ other / len(a)
    return (both.diagonal() - 1).square().sum() + 0.02 * (both.square().sum() - both.diagonal().square().sum())


def contrast(model: nn.Module, a: Tensor, b: Tensor, label: Tensor, heat: float = 0.2) -> Tensor:
    """Supervised: all of a class are near one another."""
    place, label = functional.normalize(model(torch.cat([a, b])), dim=1), torch.cat([label, label])
    same = ((label[:, None] == label) & ~torch.eye(len(label)).bool()).float()
    logits = (place @ place.T / heat).masked_fill(torch.eye(len(label)).bool(), -1e9)
    return -((logits.log_softmax(dim=1) * same).sum(dim=1) / same.sum(dim=1).clamp(min=1)).mean()


def apart(model: nn.Module, anchor: Tensor, same: Tensor, labels: Tensor) -> Tensor:
    """Triplets of unit vectors: another sample of the batch is the stranger."""
    a, b = functional.normalize(model(anchor)), functional.normalize(model(same))
    distance = lambda x, y: (x - y).square().sum(1).sqrt()  # noqa: E731
    other = (labels != labels.roll(1)).float()
    return (other * functional.relu(distance(a, b) - distance(a, b.roll(1, 0)) + 1.0)).mean()


class Captioned(nn.Module):
    """Images and captions into one space, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.words = mlp(16, 48, 16, act=nn.GELU), nn.EmbeddingBag(40, 24)
        self.text, self.heat = nn.Linear(24, 16), nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image: Tensor, caption: Tensor) -> Tensor:
        image, text = (
            functional.normalize(self.image(image), dim=1),
            functional.normalize(self.text(self.words(caption)), dim=1),
        )
        return self.heat.clamp(max=4.6).exp() * image @ text.T


def matched(model: nn.Module, image: Tensor, caption: Tensor) -> Tensor:
    logits, own = model(image, caption), torch.arange(len(image))
    return 0.5 * (functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own))


@data.given(lambda: torch.randn(40, 16))
def captions(looks: Tensor, size: int = 24) -> Batch:
    """What is to be seen, as 16 numbers, and five words about it."""
    words = torch.randint(0, 40, (size, 5))
    return looks[words].mean(1) + 0.2 * torch.randn(size, 16), words


class Bootstrap(nn.Module):
    """BYOL's online network: encoder, projection and prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = mlp(16, 48, 24, norm=nn.BatchNorm1d), mlp(24, 24, 24, norm=nn.BatchNorm1d)


def bootstrapped() -> Loop:
    """Two noisy views of the same thing; the target is a moving average of the encoder."""
    things = torch.randn(12, 16)

    def batch(_: int) -> Batch:
        x = 1.5 * things[torch.randint(0, 12, (48,))] + 0.5 * torch.randn(48, 16)
        return x + 0.4 * torch.randn(48, 16), x + 0.4 * torch.randn(48, 16)

    def loss(model: nn.Module, first: Tensor, second: Tensor) -> Tensor:
        total = torch.zeros(())
        for x, other in ((first, second), (second, first)):
            with torch.no_grad():
                aim = target(other)
            total = total + 2 - 2 * functional.cosine_similarity(model.predictor(model.encoder(x)), aim).mean()
        return total

    loop = supervised(Bootstrap(), batch, loss, optimizer=torch.optim.AdamW, lr=2e-3, steps=300)
    target = follower(loop, loop.model.encoder, 1 - 0.97)
    return loop


def margin(model: nn.Module, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
    """Pairs are drawn together, or apart as far as the margin."""
    distance = (model(first) - model(second)).square().sum(1).add(1e-8).sqrt()
    return torch.where(same, distance**2, functional.relu(1 - distance) ** 2).mean()


@data.given(lambda: torch.randn(20, 16))
def likenesses(people: Tensor, size: int = 32) -> Batch:
    who = torch.randint(0, 20, (2, size))
    same = torch.rand(size) < 0.5
    who[1] = torch.where(same, who[0], who[1])
    views = people[who] + 0.3 * torch.randn(2, size, 16)
    return views[0], views[1], who[0] == who[1]


def three_examples(model: nn.Module, support: Tensor, query: Tensor) -> Tensor:
    """Prototypes of five new classes from three examples each."""
    centres = model(support).mean(1)
    distance = torch.cdist(model(query).flatten(0, 1), centres).square()
    return functional.cross_entropy(-distance, torch.arange(5).repeat_interleave(query.shape[1]))


def new_classes(_: int) -> Batch:
    x = torch.randn(5, 1, 16) + torch.cat([0.5 * torch.randn(5, 8, 12), 3 * torch.randn(5, 8, 4)], dim=2)
    return x[:, :3], x[:, 3:]
