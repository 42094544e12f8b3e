"""Models of sequences: recurrences, scans and convolutions over time, with their data and losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch
from . import data
from .dense import Residual, mlp


class Recurrent(nn.Module):
    """A recurrence and a head on its last state, or on all."""

    def __init__(
        self, kind: type[nn.Module], inputs: int, outputs: int, *, dim: int = 24, every: bool = False, **options: object
    ) -> None:
        super().__init__()
        self.memory = kind(inputs, dim, batch_first=True, **options)
        self.head = nn.Linear(dim * (2 if options.get("bidirectional") else 1), outputs)
        self.every = every

    def forward(self, x: Tensor) -> Tensor:
        states = self.memory(x)[0]
        return self.head(states if self.every else states[:, -1])


def relu_recurrent(gain: float, orthogonal: bool = True) -> nn.Module:
    """A recurrence without gates, whose matrix is a multiple of an orthogonal one, or of the identity."""
    model = Recurrent(nn.RNN, 1, 1, nonlinearity="relu")
    with torch.no_grad():
        if orthogonal:
            nn.init.orthogonal_(model.memory.weight_hh_l0)
            model.memory.weight_hh_l0.mul_(gain)
        else:
            model.memory.weight_hh_l0.copy_(gain * torch.eye(24))
    return model


def every_token(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """A running sum is predicted at each position."""
    return functional.mse_loss(model(x), x.cumsum(dim=1) / x.shape[1] ** 0.5)


def connectionist(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    """CTC: which tokens were sounded, not when. Class 0 is the blank."""
    labels = x.argmax(dim=2)[:, ::3] + 1
    log_p = functional.log_softmax(model(x), dim=2).transpose(0, 1)
    lengths = torch.full((len(x),), x.shape[1]), torch.full((len(x),), labels.shape[1])
    return functional.ctc_loss(log_p, labels, *lengths, zero_infinity=True)


class Labeller(nn.Module):
    """A label for each token of sentences that are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(30, 12, padding_idx=0)
        self.memory = nn.LSTM(12, 16, batch_first=True, bidirectional=True)
        self.head = nn.Linear(32, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.tokens(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.memory(packed)[0], batch_first=True)[0])


@data.anew
def packed_sentences() -> Batch:
    lengths = torch.randint(2, 11, (12,))
    lengths[0] = 10
    tokens = torch.randint(1, 30, (12, 10)) * (torch.arange(10) < lengths[:, None])
    labels = (tokens % 3 + functional.pad(tokens, (1, 0))[:, :-1]) % 3
    return tokens, lengths, labels.masked_fill(tokens == 0, -100)


class Scan(nn.Module):
    """A state that each token lets fade and adds to; `growth` multiplies what is kept of it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.value, self.side, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.growth = 1.0

    def forward(self, x: Tensor) -> Tensor:
        kept, value = torch.sigmoid(self.gate(x)), self.value(x)
        state, states = torch.zeros_like(value[:, 0]), []
        for t in range(x.shape[1]):
            state = self.growth * kept[:, t] * state + (1 - kept[:, t]) * value[:, t]
            states.append(state)
        return self.out(torch.stack(states, dim=1) * functional.silu(self.side(x)))


class Scanned(nn.Module):
    """A language model without attention."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = nn.Embedding(24, dim), nn.LayerNorm(dim), nn.Linear(dim, 24)
        self.blocks = nn.Sequential(*(Residual(nn.Sequential(nn.LayerNorm(dim), Scan(dim))) for _ in range(2)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens))))


class Pointer(nn.Module):
    """Which of the places in a sequence is asked for."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.memory = nn.LSTM(1, dim, batch_first=True, bidirectional=True)
        self.keys = nn.Linear(2 * dim, dim)
        self.query = nn.Linear(2 * dim, dim)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        states = self.memory(x)[0]
        return self.score(torch.tanh(self.keys(states) + self.query(states[:, -1:])))[..., 0]


def largest(_: int) -> Batch:
    x = torch.randn(32, 8, 1)
    return x, x[..., 0].argmax(dim=1)


class Carried(nn.Module):
    """A language model by an LSTM whose last state begins the next batch; `embedding`: the name of its first layer."""

    def __init__(
        self,
        inputs: int = 16,
        dim: int = 24,
        layers: int = 1,
        *,
        dropout: float = 0.0,
        bound: float | None = None,
        embedding: str = "tokens",
    ) -> None:
        super().__init__()
        self.add_module(embedding, nn.Embedding(24, inputs))
        self.memory = nn.LSTM(inputs, dim, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(dim, 24)
        self.embedding, self.state = embedding, None
        if bound is not None:
            nn.init.uniform_(self.get_submodule(embedding).weight, -bound, bound)

    def forward(self, tokens: Tensor) -> Tensor:
        states, last = self.memory(self.get_submodule(self.embedding)(tokens), self.state)
        self.state = tuple(part.detach() for part in last)
        return self.head(states)


def streams(size: int = 8, length: int = 16) -> data.Batches:
    """Text that goes on from batch to batch."""
    x, y = data.sentences(size, length=length * 240)(0)
    return lambda step: (x[:, (at := length * ((step - 1) % 240)) : at + length], y[:, at : at + length])


class World(nn.Module):
    """Remembers what it has seen of a pendulum, and says what comes next and what it is worth."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.encoder, self.memory = mlp(3, dim, dim), nn.GRU(dim, dim, batch_first=True)
        self.next, self.worth = mlp(dim, dim, 3), mlp(dim, dim, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        states = self.memory(self.encoder(seen))[0]
        return self.next(states), self.worth(states)


def pendulums(size: int = 24, length: int = 12) -> data.Batches:
    def batch(_: int) -> Batch:
        angle, speed, rows = 3 * torch.rand(size) - 1.5, torch.randn(size), []
        for _ in range(length + 1):
            rows.append(torch.stack([angle.sin(), angle.cos(), speed], dim=1))
            speed = speed - 0.3 * angle.sin()
            angle = angle + 0.3 * speed
        seen = torch.stack(rows, dim=1)
        return seen, -(1 - seen[:, 1:, 1:2]) - 0.1 * seen[:, 1:, 2:].square()

    return batch


def foretold(model: nn.Module, seen: Tensor, worth: Tensor) -> Tensor:
    after, value = model(seen[:, :-1])
    return functional.mse_loss(after, seen[:, 1:]) + functional.mse_loss(value, worth)


class Counter(nn.Module):
    """A ReLU recurrence that begins as the identity: it counts."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.memory, self.head = nn.RNN(2, dim, nonlinearity="relu", batch_first=True), nn.Linear(dim, 1)
        nn.init.eye_(self.memory.weight_hh_l0)
        nn.init.normal_(self.memory.weight_ih_l0, std=0.1)
        for bias in (self.memory.bias_ih_l0, self.memory.bias_hh_l0):
            nn.init.zeros_(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(x)[0][:, -1])


@data.anew
def marked_sums(size: int = 32, length: int = 14) -> Batch:
    """Numbers, and marks at two of them, whose sum is asked for."""
    x, marks, rows = torch.rand(size, length), torch.zeros(size, length), torch.arange(size)
    one, other = torch.randint(0, length // 2, (size,)), torch.randint(length // 2, length, (size,))
    marks[rows, one] = marks[rows, other] = 1.0
    return torch.stack([x, marks], dim=2), (x * marks).sum(dim=1, keepdim=True)


class Windows(nn.Module):
    """Words through windows of three, the largest over time."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.windows, self.head = nn.Embedding(60, 16), nn.Conv1d(16, 32, 3), nn.Linear(32, 5)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.relu(self.windows(self.tokens(words).mT)).amax(dim=2))


@data.anew
def topics(size: int = 32) -> Batch:
    """Words 0 to 49, of which each topic prefers ten."""
    topic = torch.randint(0, 5, (size,))
    own = 10 * topic[:, None] + torch.randint(0, 10, (size, 14))
    return torch.where(torch.rand(size, 14) < 0.3, own, torch.randint(0, 50, (size, 14))), topic


class Chain(nn.Module):
    """Scores of each word's label, and of each label after another: minus the log likelihood of a chain."""

    def __init__(self, dim: int = 24, labels: int = 5) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, dim)
        self.window = nn.Conv1d(dim, dim, 3, padding=1)
        self.scores = nn.Linear(dim, labels)
        self.steps = nn.Parameter(torch.zeros(labels, labels))

    def emissions(self, words: Tensor) -> Tensor:
        return self.scores(torch.relu(self.window(self.tokens(words).mT)).mT)

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        scores = self.emissions(words)
        right = scores.gather(2, labels[:, :, None]).sum(dim=(1, 2)) + self.steps[labels[:, :-1], labels[:, 1:]].sum(1)
        ways = scores[:, 0]
        for place in range(1, scores.shape[1]):
            ways = (ways[:, :, None] + self.steps).logsumexp(dim=1) + scores[:, place]
        return (ways.logsumexp(dim=1) - right).mean()


@data.anew
def chained(size: int = 16) -> Batch:
    """Words 0 to 19 of five kinds; a label stays or goes on by one."""
    labels = ((torch.rand(size, 10) < 0.4).long().cumsum(dim=1) + torch.randint(0, 5, (size, 1))) % 5
    words = torch.where(torch.rand(size, 10) < 0.7, 4 * labels, 0) + torch.randint(0, 4, (size, 10))
    return words, labels


class Opinions(nn.Module):
    """The mean of the words' vectors, and two layers. Word 0 fills up short texts."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rest = nn.Embedding(120, 16, padding_idx=0), mlp(16, 32, 2)

    def forward(self, text: Tensor) -> Tensor:
        present = (text > 0).float()[..., None]
        return self.rest((self.words(text) * present).sum(1) / present.sum(1))


@data.given(lambda: torch.randn(120))
def opinions(worth: Tensor, size: int = 32) -> Batch:
    """Texts of 4 to 12 words, each of which speaks for one of two opinions."""
    text = torch.randint(1, 120, (size, 12))
    text = text * (torch.arange(12) < torch.randint(4, 13, (size, 1)))
    return text, ((worth[text] * (text > 0)).sum(1) > 0).long()


class Words(nn.Module):
    """A two-layer LSTM between dropouts, as the example in torch's repository."""

    def __init__(self, words: int = 24, dim: int = 32) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(words, dim), nn.LSTM(dim, dim, 2, batch_first=True, dropout=0.1)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(dim, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.drop(self.memory(self.drop(self.words(words)))[0]))


def continued() -> data.Batches:
    """A long text in sixteen streams that go on from batch to batch."""
    tokens = data.sentences(1, length=3200)(1)[0].view(16, -1)

    def batch(step: int) -> Batch:
        start = 16 * (step % (tokens.shape[1] // 16 - 1))
        return tokens[:, start : start + 16], tokens[:, start + 1 : start + 17]

    return batch


def lengthening(size: int = 24) -> data.Batches:
    """Two marked numbers are to be added; the sequences are twice as long every 120 steps."""

    def batch(step: int) -> Batch:
        length = 4 * 2 ** min(3, (step - 1) // 120)
        x, marks = torch.rand(size, length), torch.zeros(size, length)
        marks.scatter_(1, torch.rand(size, length).topk(2).indices, 1.0)
        return torch.stack([x, marks], dim=2), (x * marks).sum(1, keepdim=True)

    return batch
