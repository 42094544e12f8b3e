"""Models of sequences: recurrences, scans and convolutions over time, with their data and losses."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch, Loop
from . import data
from .dense import Residual, mlp
from .transformers import Attention


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


class Tagger(nn.Module):
    """Convolutions over time, then one attention layer."""

    def __init__(self, inputs: int, classes: int, dim: int = 24) -> None:
        super().__init__()
        self.conv, self.attention, self.head = (
            nn.Conv1d(inputs, dim, 3, padding=1),
            Attention(dim, causal=False),
            nn.Linear(dim, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = functional.gelu(self.conv(x.mT).mT)
        return self.head((h + self.attention(h)).mean(dim=1))


class Labeller(nn.Module):
    """A label for each token of sentences that are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.memory, self.head = (
            nn.Embedding(30, 12, padding_idx=0),
            nn.LSTM(12, 16, batch_first=True, bidirectional=True),
            nn.Linear(32, 3),
        )

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


class EchoTranslator(nn.Module):
    """An encoder's last state begins a decoder, which is given the right words so far."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(13, 16)
        self.encoder, self.decoder = nn.GRU(16, 32, batch_first=True), nn.GRU(16, 32, batch_first=True)
        self.head = nn.Linear(32, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        state = self.encoder(self.tokens(source))[1]
        begun = functional.pad(target, (1, 0), value=12)[:, :-1]
        return self.head(self.decoder(self.tokens(begun), state)[0])


@data.anew
def mirrored_words() -> Batch:
    source = torch.randint(0, 12, (24, 5))
    return source, source.flip(1)


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
        self.keys, self.query, self.score = (
            nn.Linear(2 * dim, dim),
            nn.Linear(2 * dim, dim),
            nn.Linear(dim, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        states = self.memory(x)[0]
        return self.score(torch.tanh(self.keys(states) + self.query(states[:, -1:])))[..., 0]


def largest(_: int) -> Batch:
    x = torch.randn(32, 8, 1)
    return x, x[..., 0].argmax(dim=1)


class Carried(nn.Module):
    """An LSTM whose last state begins the next batch."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.tokens, self.memory, self.head = (
            nn.Embedding(24, 16),
            nn.LSTM(16, dim, batch_first=True),
            nn.Linear(dim, 24),
        )
        self.state: tuple[Tensor, ...] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        states, last = self.memory(self.tokens(tokens), self.state)
        self.state = tuple(part.detach() for part in last)
        return self.head(states)


def streams(size: int = 8, length: int = 16) -> data.Batches:
    """Text that goes on from batch to batch."""
    x, y = data.sentences(size, length=length * 240)(0)
    return lambda step: (x[:, (at := length * ((step - 1) % 240)) : at + length], y[:, at : at + length])


class Speaker(nn.Module):
    """An encoder's state begins a decoder, which is given the right words so far."""

    def __init__(self, kind: type[nn.Module], words: int = 10, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(words + 1, 16), nn.Linear(dim, words)
        self.encoder, self.decoder, self.words = kind(16, dim, batch_first=True), kind(16, dim, batch_first=True), words

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        begun = functional.pad(target, (1, 0), value=self.words)[:, :-1]
        return self.head(self.decoder(self.tokens(begun), self.encoder(self.tokens(source))[1])[0])


@data.anew
def spoken(aim: str, size: int) -> Batch:
    """Words, and the same words sorted or mirrored."""
    source = torch.randint(0, 10, (size, 6))
    return source, source.sort(dim=1).values if aim == "sorted" else 9 - source.flip(1)


class Keywords(nn.Module):
    """A waveform in frames, a recurrence over them, a word."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.memory = nn.Conv1d(1, 16, 8, stride=4), nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.memory(torch.relu(self.frames(x)).mT)[0][:, -1])


@data.anew
def pitches(size: int = 24) -> Batch:
    """Tones of four pitches with noise: [N, 1, 64]."""
    labels, phase = torch.randint(0, 4, (size,)), 2 * torch.pi * torch.rand(size, 1)
    tone = torch.sin(torch.arange(64) * (0.2 + 0.25 * labels[:, None]) + phase)
    return (tone + 0.5 * torch.randn(size, 64))[:, None], labels


class CarriedDeep(nn.Module):
    """A language model whose state goes on from batch to batch, cut from the graph in between."""

    def __init__(self, words: int = 24, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.memory = nn.Embedding(words, dim), nn.LSTM(dim, dim, 2, batch_first=True)
        self.head = nn.Linear(dim, words)
        nn.init.uniform_(self.tokens.weight, -0.1, 0.1)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, state = self.memory(self.tokens(tokens), self.state)
        self.state = (state[0].detach(), state[1].detach())
        return self.head(hidden)


class Sampled(nn.Module):
    """Encoder and decoder with attention; ever more of what the decoder reads is what it said itself."""

    def __init__(self, words: int = 10, dim: int = 32) -> None:
        super().__init__()
        self.tokens, self.logits = nn.Embedding(words + 1, dim), nn.Identity()
        self.encoder, self.decoder = nn.GRU(dim, dim, batch_first=True), nn.GRUCell(2 * dim, dim)
        self.head, self.own, self.words = nn.Linear(2 * dim, words), 0.0, words

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keys, state = self.encoder(self.tokens(source))
        state, word, said = state[0], torch.full((len(source),), self.words), []
        for place in range(target.shape[1]):
            share = self.logits((keys @ state[:, :, None])[:, :, 0]).softmax(dim=1)
            context = (share[:, :, None] * keys).sum(dim=1)
            state = self.decoder(torch.cat([self.tokens(word), context], dim=1), state)
            said.append(self.head(torch.cat([state, context], dim=1)))
            word = torch.where(torch.rand(len(source)) < self.own, said[-1].argmax(dim=1), target[:, place])
        return torch.stack(said, dim=1)


@data.anew
def reversed_words(size: int = 32) -> Batch:
    source = torch.randint(0, 10, (size, 6))
    return source, source.flip(1)


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


def hears_itself(loop: Loop, step: int) -> None:
    """Ever more of what the decoder reads is what it said itself."""
    loop.model.own = min(0.5, step / 200)


class Copier(nn.Module):
    """An encoder says a sequence, and a decoder repeats it from its last state."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 12)
        self.encoder, self.decoder = nn.GRU(12, dim, batch_first=True), nn.GRU(12, dim, batch_first=True)
        self.head = nn.Linear(dim, 7)

    def forward(self, words: Tensor) -> Tensor:
        state = self.encoder(self.tokens(words))[1]
        shifted = torch.cat([torch.full_like(words[:, :1], 6), words[:, :-1]], dim=1)
        return self.head(self.decoder(self.tokens(shifted), state)[0])


@data.anew
def words_to_repeat() -> Batch:
    words = torch.randint(0, 6, (32, 6))
    return words, words


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
        self.tokens, self.window, self.scores = (
            nn.Embedding(20, dim),
            nn.Conv1d(dim, dim, 3, padding=1),
            nn.Linear(dim, labels),
        )
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


class Foreseer(nn.Module):
    """Says which of the batch's signals goes on like this one: three steps ahead."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv1d(1, dim, 4, stride=2), nn.ReLU(), nn.Conv1d(dim, dim, 3, stride=2))
        self.memory, self.ahead = (
            nn.GRU(dim, dim, batch_first=True),
            nn.ModuleList(nn.Linear(dim, dim) for _ in range(3)),
        )
        self.heat = 1.0

    def forward(self, x: Tensor) -> Tensor:
        seen = self.encoder(x).mT
        state = self.memory(seen[:, :-3])[0][:, -1]
        aim = torch.arange(len(x))
        said = [layer(state) @ seen[:, index - 3].T / self.heat for index, layer in enumerate(self.ahead)]
        return sum(functional.cross_entropy(logits, aim) for logits in said) / 3


@data.anew
def tones(size: int = 16) -> Batch:
    time = torch.arange(32) / 32
    rate, phase = 1 + 7 * torch.rand(size, 1, 1), torch.rand(size, 1, 1)
    return (torch.sin(2 * torch.pi * (rate * time + phase)) + 0.1 * torch.randn(size, 1, 32),)


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


def translated(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    """Teacher forcing: each word of the target is told the one before it."""
    before = functional.pad(target[:, :-1], (1, 0))
    return functional.cross_entropy(model(source, before).flatten(0, 1), target.flatten())


class LookingBack(nn.Module):
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


def backwards(size: int = 24, *, words: int = 16, length: int = 8) -> data.Batches:
    """Words, and their translation backwards."""
    dictionary = torch.randperm(words)

    def batch(_: int) -> Batch:
        source = torch.randint(0, words, (size, length))
        return source, dictionary[source.flip(1)]

    return batch


class Words(nn.Module):
    """A two-layer LSTM between dropouts, as the example in torch's repository."""

    def __init__(self, words: int = 24, dim: int = 32) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(words, dim), nn.LSTM(dim, dim, 2, batch_first=True, dropout=0.1)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(dim, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.drop(self.memory(self.drop(self.words(words)))[0]))


class Writer(nn.Module):
    """An LSTM of two layers whose state goes on from batch to batch."""

    def __init__(self, words: int = 24, dim: int = 32) -> None:
        super().__init__()
        self.words, self.memory = nn.Embedding(words, dim), nn.LSTM(dim, dim, 2, batch_first=True, dropout=0.1)
        self.head, self.state = nn.Linear(dim, words), None

    def forward(self, tokens: Tensor) -> Tensor:
        states, state = self.memory(self.words(tokens), self.state)
        self.state = tuple(one.detach() for one in state)
        return self.head(states)


class BackwardTranslator(nn.Module):
    """A recurrence reads, another writes and looks back; `heard` is what it reads."""

    def __init__(self, words: int = 14, dim: int = 24) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, dim), nn.Embedding(words, dim)
        self.reader, self.writer = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.heard, self.head = nn.Linear(dim, dim), nn.Linear(2 * dim, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states = self.heard(self.reader(self.source(source))[0])
        written = self.writer(self.target(functional.pad(target[:, :-1], (1, 0))))[0]
        logits = (written @ states.mT / 24**0.5).masked_fill(source[:, None] == 0, float("-inf"))
        return self.head(torch.cat([written, logits.softmax(-1) @ states], dim=-1))


def padded_reversals(size: int = 24, *, words: int = 14, length: int = 6) -> data.Batches:
    """Sentences of 3 to 6 words, 0 after them, and the same words backwards in another language."""
    dictionary = 1 + torch.randperm(words - 1)

    def batch(_: int) -> Batch:
        source = torch.randint(1, words, (size, length))
        source = source * (torch.arange(length) < torch.randint(3, length + 1, (size, 1)))
        return source, torch.where(source > 0, dictionary[(source - 1).clamp(min=0)], 0).flip(1)

    return batch


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
