"""Models of graphs, clouds of points and bags, with their data and losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch, Loop, supervised
from . import data
from .dense import mlp


class Ring(nn.Module):
    """Two rounds of messages on a ring, then the mean."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Linear(1, dim)
        self.rounds = nn.ModuleList(nn.Linear(2 * dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.embed(x))
        for message in self.rounds:
            h = torch.relu(message(torch.cat([h, h.roll(1, dims=1) + h.roll(-1, dims=1)], dim=2)))
        return self.head(h.mean(dim=1))


class Citations(nn.Module):
    """Nodes of a random graph, classified from their own and their neighbours' words; few nodes are labelled."""

    def __init__(self, nodes: int = 80, dim: int = 16) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(20, dim), nn.Linear(2 * dim, 4)
        self.register_buffer("sources", torch.randint(0, nodes, (4 * nodes,)))
        self.register_buffer("targets", torch.randint(0, nodes, (4 * nodes,)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        received = torch.zeros_like(h).index_add(0, self.targets, h[self.sources]) / 4
        return self.outer(torch.cat([h, received], dim=1))


def citations() -> Loop:
    model, labels = Citations(), torch.randint(0, 4, (80,))
    words = torch.bernoulli(0.05 + 0.4 * (torch.arange(20) % 4 == labels[:, None]).float())
    known = torch.randperm(80)[:20]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model(functional.dropout(x, 0.2))[known], y[known])

    return supervised(model, lambda _: (words, labels), loss, lr=1e-2)


class Points(nn.Module):
    """A cloud of points in any order; the largest of each feature is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = mlp(3, 32, 32), mlp(32, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).amax(dim=1))


@data.anew
def shapes() -> Batch:
    """Clouds of four shapes."""
    shapes = torch.tensor([[1.0, 1.0, 1.0], [2.0, 0.5, 0.5], [0.5, 2.0, 0.5], [0.5, 0.5, 2.0]])
    labels = torch.randint(0, 4, (32,))
    return torch.randn(32, 16, 3) * shapes[labels][:, None], labels


class Convolved(nn.Module):
    """Graph convolutions by a normalised adjacency matrix, then the mean of all nodes."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(6, dim), nn.Linear(dim, dim), mlp(dim, 16, 3)

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        edges = edges / edges.sum(dim=2, keepdim=True)
        return self.head(torch.relu(edges @ self.outer(torch.relu(edges @ self.inner(x)))).mean(dim=1))


class Attended(nn.Module):
    """Graph attention: neighbours are weighted by a score of the two ends."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(6, dim), nn.Linear(dim, dim), mlp(dim, 16, 3)
        self.ends = nn.ModuleList(nn.Linear(dim, 2) for _ in range(2))

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        for layer, ends in zip((self.inner, self.outer), self.ends, strict=True):
            x = layer(x)
            source, target = ends(x).split(1, dim=2)
            score = functional.leaky_relu(source.mT + target, 0.2).masked_fill(edges == 0, float("-inf"))
            x = functional.elu(score.softmax(dim=2) @ x)
        return self.head(x.mean(dim=1))


@data.anew
def random_graphs(size: int) -> Batch:
    """Random graphs of ten nodes; the class says which kind of node the neighbours of the first kind mostly are."""
    edges = (torch.rand(size, 10, 10) < 0.25).float()
    edges = (edges + edges.mT + torch.eye(10)).clamp(max=1)
    kinds, labels = torch.randint(0, 3, (size, 10)), torch.randint(0, 3, (size,))
    kinds = torch.where(torch.rand(size, 10) < 0.3, labels[:, None], kinds)
    return edges, torch.cat([functional.one_hot(kinds, 3).float(), 0.5 * torch.randn(size, 10, 3)], dim=2), labels


@data.anew
def scattered(size: int = 32) -> Batch:
    """Sets of points, and how far they lie apart on average."""
    x = torch.randn(size, 12, 2) * (0.3 + 1.5 * torch.rand(size, 1, 1))
    return x, torch.cdist(x, x).mean(dim=(1, 2))[:, None]


class Pooled(nn.Module):
    """A bag is the mean of its pieces, by weights that are learned."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.body, self.score, self.head = mlp(6, dim, dim), nn.Linear(dim, 1), nn.Linear(dim, 1)
        self.axis = 1

    def forward(self, bags: Tensor) -> Tensor:
        piece = torch.tanh(self.body(bags))
        return self.head((self.score(piece).softmax(dim=self.axis) * piece).sum(dim=1))[:, 0]


@data.given(lambda: 2.5 * functional.normalize(torch.randn(6), dim=0))
def bags(sign: Tensor, size: int = 32) -> Batch:
    """Eight pieces each; a bag counts if one of them bears the sign."""
    pieces, counts = torch.randn(size, 8, 6), torch.rand(size) < 0.5
    pieces[torch.arange(size), torch.randint(0, 8, (size,))] += sign * counts[:, None]
    return pieces, counts.float()


class DroppingGraph(nn.Module):
    """Two graph convolutions with dropout, on the neighbours' mean."""

    def __init__(self, inputs: int = 20, dim: int = 16, classes: int = 4, dropout: float = 0.5) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(inputs, dim), nn.Linear(dim, classes), nn.Dropout(dropout)

    def forward(self, x: Tensor, links: Tensor) -> Tensor:
        mean = links / links.sum(1, keepdim=True)
        return mean @ self.second(self.dropout(torch.relu(mean @ self.first(self.dropout(x)))))


def communities(n: int = 120) -> data.Batches:
    """The whole graph every step: features, links, labels. Every fifth node's label is known."""
    labels = torch.randint(0, 4, (n,))
    likely = torch.where(labels[:, None] == labels, 0.12, 0.01)
    links = (torch.rand(n, n) < likely).float()
    links = ((links + links.T) > 0).float().fill_diagonal_(1.0)
    x = torch.randn(4, 20)[labels] + torch.randn(n, 20)
    return lambda step: (x, links, labels)


def known_nodes(model: nn.Module, x: Tensor, links: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(x, links)[::5], labels[::5])


class Cloud(nn.Module):
    """Points, each by itself, then the largest value of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.rest = nn.Sequential(mlp(3, 32, 48), nn.ReLU()), mlp(48, 32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.points(x).max(1).values)


@data.anew
def solids(size: int = 16) -> Batch:
    """24 points of a ball, its surface, a cube or a plane: [N, 24, 3], and which."""
    labels, x = torch.randint(0, 4, (size,)), torch.randn(size, 24, 3)
    ball = functional.normalize(x, dim=2)
    kinds = torch.stack([0.6 * x, 1.2 * ball, 2 * torch.rand(size, 24, 3) - 1, x * torch.tensor([1, 1, 0.05])])
    return kinds[labels, torch.arange(size)], labels
