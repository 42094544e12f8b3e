"""Models of tables, ratings, facts, ranks and survival, with their data and losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch, Loop
from . import data
from .dense import mlp


class Recommender(nn.Module):
    """A user, an item, and whether they like each other."""

    def __init__(self, users: int = 300, items: int = 200, dim: int = 12) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim, sparse=True), nn.Embedding(items, dim, sparse=True)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(dim=1)


@data.given(lambda: (torch.randn(300, 3), torch.randn(200, 3)))
def offers(tastes: Tensor, kinds: Tensor) -> Batch:
    """A user, what it likes, and another thing; a few things are in every second pair."""
    users = torch.randint(0, 300, (64,))
    offered = (200 * torch.rand(64, 2) ** 3).long()
    better = ((tastes[users][:, None] * kinds[offered]).sum(dim=2)).argmax(dim=1)
    rows = torch.arange(64)
    return users, offered[rows, better], offered[rows, 1 - better]


def ranked(model: nn.Module, users: Tensor, liked: Tensor, other: Tensor) -> Tensor:
    """Bayesian personalised ranking."""
    return functional.softplus(model(users, other) - model(users, liked)).mean()


def table() -> data.Batches:
    """Ages, incomes, years and flags as they come; the model's first layer is a batch norm."""
    x = torch.randn(2048, 6)
    y = torch.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]
    return data.drawn(x * torch.tensor([15.0, 3e4, 4.0, 0.4, 1e3, 1.0]) + torch.tensor([40.0, 5e4, 2005, 0.5, 0, 0]), y)


class Columns(nn.Module):
    """Columns of names and columns of numbers; two tasks."""

    def __init__(self) -> None:
        super().__init__()
        self.names = nn.ModuleList(nn.Embedding(words, 6) for words in (12, 40, 200))
        self.trunk = mlp(18 + 4, 48, 48, act=nn.ReLU)
        self.kind, self.amount = nn.Linear(48, 3), nn.Linear(48, 1)

    def forward(self, names: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        known = torch.cat([table(names[:, index]) for index, table in enumerate(self.names)] + [numbers], dim=1)
        hidden = torch.relu(self.trunk(known))
        return self.kind(hidden), self.amount(hidden)


def rows(size: int = 128) -> data.Batches:
    """Three columns of names, four of numbers; a class and an amount."""
    names = torch.stack([(words * torch.rand(3000) ** 2).long() for words in (12, 40, 200)], dim=1)
    numbers, effects = torch.randn(3000, 4), torch.randn(3, 200)
    effect = torch.stack([effects[index][names[:, index]] for index in range(3)], dim=1)
    kind = (effect + numbers[:, :3]).argmax(dim=1)
    amount = effect.sum(dim=1, keepdim=True) * numbers[:, 3:].sigmoid() + 0.1 * torch.randn(3000, 1)
    return data.drawn(names, numbers, kind, amount, size=size)


def both_tasks(model: nn.Module, names: Tensor, numbers: Tensor, kind: Tensor, amount: Tensor) -> Tensor:
    kinds, amounts = model(names, numbers)
    return functional.cross_entropy(kinds, kind) + functional.mse_loss(amounts, amount)


class Ratings(nn.Module):
    """Ratings by the product of two vectors, and how a user and an item are rated in general."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(120, 8), nn.Embedding(80, 8)
        self.user_bias, self.item_bias = nn.Embedding(120, 1), nn.Embedding(80, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        rated = (self.users(users) * self.items(items)).sum(dim=1, keepdim=True)
        return rated + self.user_bias(users) + self.item_bias(items)


def rated(size: int = 256) -> data.Batches:
    users, items = torch.randint(0, 120, (4000,)), torch.randint(0, 80, (4000,))
    taste = (torch.randn(120, 3)[users] * torch.randn(80, 3)[items]).sum(dim=1, keepdim=True)
    return data.drawn(users, items, taste + 0.3 * torch.randn(4000, 1), size=size)


def rare_tags(size: int = 64) -> data.Batches:
    """Which of ten tags a sample has; each tag is rare."""
    x, w = torch.randn(3000, 12), torch.randn(12, 10)
    return data.drawn(x, (x @ w > 5.0).float(), size=size)


class Neighbours(nn.Module):
    """Words are near those that they stand beside, and far from words drawn at random."""

    def __init__(self, words: int = 60, dim: int = 12) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(words, dim), nn.Embedding(words, dim)
        nn.init.uniform_(self.inner.weight, -0.5, 0.5)
        nn.init.zeros_(self.outer.weight)

    def forward(self, word: Tensor, near: Tensor, far: Tensor) -> Tensor:
        centre = self.inner(word)
        close = (centre * self.outer(near)).sum(dim=1)
        apart = (self.outer(far) @ centre[:, :, None])[:, :, 0]
        return -(functional.logsigmoid(close) + functional.logsigmoid(-apart).sum(dim=1)).mean()


@data.anew
def company(size: int = 64) -> Batch:
    """Words of six subjects: [N], [N] and [N, 5]."""
    word = torch.randint(0, 60, (size,))
    near = word // 10 * 10 + torch.randint(0, 10, (size,))
    return word, near, torch.randint(0, 60, (size, 5))


class Facts(nn.Module):
    """TransE: a relation is the way from its head to its tail, which a wrong tail is to miss by a margin."""

    def __init__(self, entities: int = 60, relations: int = 4, dim: int = 16) -> None:
        super().__init__()
        self.entities, self.relations = nn.Embedding(entities, dim), nn.Embedding(relations, dim)

    def forward(self, head: Tensor, relation: Tensor, tail: Tensor, wrong: Tensor) -> Tensor:
        way = self.entities(head) + self.relations(relation)
        return functional.relu(0.5 + self.missed(way, tail) - self.missed(way, wrong)).mean()

    def missed(self, way: Tensor, tail: Tensor) -> Tensor:
        return (way - self.entities(tail)).norm(dim=1)


def facts(size: int = 64) -> data.Batches:
    places = functional.normalize(torch.randn(60, 3), dim=1)
    ways = 0.7 * torch.randn(4, 1, 3)
    tails = torch.cdist(places[None] + ways, places.expand(4, -1, -1)).argmin(dim=2)

    def batch(_: int) -> Batch:
        head, relation = torch.randint(0, 60, (size,)), torch.randint(0, 4, (size,))
        return head, relation, tails[relation, head], torch.randint(0, 60, (size,))

    return batch


@data.given(lambda: torch.randn(8))
def patients(risk: Tensor, size: int = 64) -> Batch:
    """What is known of them, when it ended, and whether it was an event."""
    x = torch.randn(size, 8)
    ended = -torch.log(torch.rand(size)) * torch.exp(-x @ risk / 2)
    limit = 3 * torch.rand(size)
    return x, torch.minimum(ended, limit), (ended < limit).float()


def cox(model: nn.Module, x: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """The partial likelihood: the risk of those who had an event among all who were still there."""
    score = model(x)[:, 0][time.argsort(descending=True)]
    event = event[time.argsort(descending=True)]
    return -((score - score.logcumsumexp(dim=0)) * event).sum() / event.sum().clamp(min=1)


@data.given(lambda: torch.randn(8) / 8**0.5)
def queries(taste: Tensor, size: int = 16) -> Batch:
    """Ten documents each, with grades from 0 to 3."""
    x = torch.randn(size, 10, 8)
    return x, (x @ taste + 0.3 * torch.randn(size, 10)).clamp(0, 3).round()


def lambdas(model: nn.Module, x: Tensor, grade: Tensor) -> Tensor:
    """Pairs in the wrong order, by what their exchange would gain."""
    score = model(x)[:, :, 0]
    rank = 1 + (score[:, :, None] < score[:, None]).sum(dim=2)
    gain, discount = 2**grade - 1, 1 / torch.log2(1 + rank.float())
    ideal = (gain.sort(dim=1, descending=True).values / torch.log2(torch.arange(2.0, 12.0))).sum(dim=1)
    delta = ((gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])).abs()
    apart = functional.softplus(score[:, None] - score[:, :, None]) * (grade[:, :, None] > grade[:, None])
    return (delta * apart).sum(dim=(1, 2)).div(ideal.clamp(min=1)).mean()


def claims(size: int = 64) -> data.Batches:
    """Amounts that scatter as much as they are large."""
    x = torch.randn(3000, 8)
    mean = torch.exp(x @ torch.randn(8) / 4)
    return data.drawn(x, torch.distributions.Gamma(2.0, 2.0 / mean).sample(), size=size)


def gamma(model: nn.Module, x: Tensor, amount: Tensor) -> Tensor:
    score = model(x)[:, 0]
    return (amount * torch.exp(-score) + score).mean()


def grades(size: int = 64) -> data.Batches:
    """Grades from 0 to 4."""
    x = torch.randn(3000, 8)
    score = x @ torch.randn(8) / 2 + 0.3 * torch.randn(3000)
    return data.drawn(x, torch.bucketize(score, torch.tensor([-1.5, -0.5, 0.5, 1.5])), size=size)


class Ordinal(nn.Module):
    """One score, and four ascending limits that it may pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(8, 32, 32, 1)
        self.first = nn.Parameter(torch.tensor(-1.0))
        self.gaps = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        limits = torch.cat([self.first[None], self.first + functional.softplus(self.gaps).cumsum(dim=0)])
        return self.net(x) - limits


def passed(model: nn.Module, x: Tensor, grade: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x), (grade[:, None] > torch.arange(4)).float())


@torch.no_grad()
def lengths_put_back(loop: Loop, step: int) -> None:
    """What is placed has length 1 before each step, as its authors have it."""
    loop.model.entities.weight.copy_(functional.normalize(loop.model.entities.weight, dim=1))


def labels_of_many(size: int = 64, n: int = 2048) -> data.Batches:
    x = torch.randn(n, 10)
    return data.drawn(x, (x @ torch.randn(10, 8) / 2 > 1.0).float(), size=size)


class Wide(nn.Module):
    """Columns of names and of numbers: embeddings by a plain rate, the rest by Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.deep, self.head = nn.Embedding(40, 8), mlp(8 + 6, 32, 32), nn.Linear(32, 1)

    def forward(self, name: Tensor, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.deep(torch.cat([self.names(name), x], dim=1))))


def wide() -> Loop:
    model = Wide()
    worth, push = torch.randn(40), torch.randn(6) / 2

    def batch(_: int) -> Batch:
        name, x = torch.randint(0, 40, (64,)), torch.randn(64, 6)
        return name, x, (worth[name] + x @ push)[:, None] + 0.1 * torch.randn(64, 1)

    rest = [p for name, p in model.named_parameters() if not name.startswith("names")]
    optimizers = [torch.optim.SGD(model.names.parameters(), lr=0.5), torch.optim.Adam(rest, lr=2e-3)]
    return Loop(model, batch, lambda model, name, x, y: functional.mse_loss(model(name, x), y), optimizers, steps=200)


def houses(size: int = 64, n: int = 2048) -> data.Batches:
    x = torch.randn(n, 9)
    return data.drawn(
        x, (x @ torch.randn(9, 1) / 3 + torch.relu(x @ torch.randn(9, 1)) / 3) + 0.1 * torch.randn(n, 1), size=size
    )


class Factors(nn.Module):
    """A machine of factors: each field's bias, and the products of each pair's vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors, self.biases, self.offset = nn.Embedding(60, 8), nn.Embedding(60, 1), nn.Parameter(torch.zeros(()))
        nn.init.normal_(self.vectors.weight, std=0.1)
        nn.init.zeros_(self.biases.weight)

    def forward(self, fields: Tensor) -> Tensor:
        vectors = self.vectors(fields)
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        return self.offset + self.biases(fields).sum(dim=(1, 2)) + pairs


@data.given(lambda: (torch.randn(60, 3) / 1.5, torch.randn(60) / 2))
def clicks(taste: Tensor, base: Tensor, size: int = 64) -> Batch:
    """Four fields of 15 values each."""
    fields = torch.randint(0, 15, (size, 4)) + 15 * torch.arange(4)
    vectors = taste[fields]
    logit = base[fields].sum(dim=1) + (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
    return fields, (torch.rand(size) < torch.sigmoid(2 * logit)).float()


def clicked(model: nn.Module, fields: Tensor, click: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(fields).float(), click)


class Clicks(nn.Module):
    """Wide and deep: embeddings of three categories, and five numbers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Embedding(n, 1) for n in (200, 50, 8))
        self.deep = nn.ModuleList(nn.Embedding(n, 8) for n in (200, 50, 8))
        self.rest = nn.Sequential(
            nn.Linear(29, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)
        )

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        wide = sum(table(column) for table, column in zip(self.wide, categories.T, strict=True))
        deep = [table(column) for table, column in zip(self.deep, categories.T, strict=True)]
        return (wide + self.rest(torch.cat([*deep, numbers], dim=1)))[:, 0]


def visits(size: int = 64, *, rate: float = -2.5) -> data.Batches:
    """Categories of which some are frequent, numbers, and what they say together: a rate's log odds with noise."""
    often = [1 / torch.arange(1, n + 1) for n in (200, 50, 8)]
    worth, slopes = [torch.randn(n) for n in (200, 50, 8)], torch.randn(5) / 2

    def batch(_: int) -> Batch:
        categories = torch.stack([torch.multinomial(often_one, size, replacement=True) for often_one in often], dim=1)
        numbers = torch.randn(size, 5)
        odds = rate + sum(one[column] for one, column in zip(worth, categories.T, strict=True)) + numbers @ slopes
        return categories, numbers, odds

    return batch


def clicked_or_not(model: nn.Module, categories: Tensor, numbers: Tensor, odds: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(categories, numbers), (odds > 0).float())


class Tastes(nn.Module):
    """Users and things as vectors, and the things' popularity."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.things, self.popularity = nn.Embedding(100, 12), nn.Embedding(150, 12), nn.Embedding(150, 1)
        for table in (self.users, self.things, self.popularity):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, thing: Tensor) -> Tensor:
        return (self.users(user) * self.things(thing)).sum(1) + self.popularity(thing)[:, 0]


@data.given(lambda: (torch.randn(100, 4), torch.randn(150, 4), 1 / torch.arange(1, 151).sqrt()))
def choices(users: Tensor, things: Tensor, taken: Tensor, size: int = 64) -> Batch:
    """Users, the thing that each took, and another one."""
    user, pair = torch.randint(0, 100, (size,)), torch.multinomial(taken, 2 * size, replacement=True).view(2, size)
    better = (users[user] * (things[pair[0]] - things[pair[1]])).sum(1) > 0
    return user, torch.where(better, pair[0], pair[1]), torch.where(better, pair[1], pair[0])


def preferred(model: nn.Module, user: Tensor, taken: Tensor, other: Tensor) -> Tensor:
    """Bayesian personalised ranking."""
    return -functional.logsigmoid(model(user, taken) - model(user, other)).mean()


@data.given(lambda: torch.randn(12))
def rare(w: Tensor, size: int = 64, share: float = 0.02) -> Batch:
    """A fraud in fifty payments."""
    y = (torch.rand(size) < share).float()
    return torch.randn(size, 12) + y[:, None] * w, y


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x)[:, 0], y, pos_weight=torch.tensor(20.0))


def survival(model: nn.Module, x: Tensor, time: Tensor, seen: Tensor) -> Tensor:
    """Cox' partial likelihood."""
    order = time.argsort(descending=True)
    risk = model(x)[order, 0]
    return -((risk - risk.logcumsumexp(0)) * seen[order]).sum() / seen.sum().clamp(min=1)


@data.given(lambda: torch.randn(8))
def survivors(w: Tensor, size: int = 48) -> Batch:
    x = torch.randn(size, 8)
    time = -torch.rand(size).log() / (x @ w).exp()
    return x, time, (torch.rand(size) < 0.6).float()
