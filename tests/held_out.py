"""Real small trainings of other architectures, widths, optimizers and losses than those that thresholds were chosen on.

A pattern that is wrong about one of them is to be mended, not the training.
"""

from __future__ import annotations

import torch
from grad_samples import Training
from torch import nn
from torch.nn import functional
from trainings import CORPUS


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def _two_moons(seed: int, *, batch: int = 48):
    """Which of two half circles a point lies on."""
    generator = _generator(seed)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        labels = torch.randint(0, 2, (batch,), generator=generator)
        angle = torch.pi * torch.rand(batch, generator=generator)
        points = torch.stack([angle.cos() + labels, torch.where(labels == 1, -angle.sin() + 0.4, angle.sin())], dim=1)
        points = points + 0.1 * torch.randn(batch, 2, generator=generator)
        return functional.binary_cross_entropy_with_logits(model(points)[:, 0], labels.float())

    return loss


def _corners(seed: int, *, batch: int = 24, size: int = 10, noise: float = 2.0):
    """In which of four corners a noisy image is brighter."""
    generator = _generator(seed)

    def data() -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(0, 4, (batch,), generator=generator)
        images = noise * torch.randn(batch, 1, size, size, generator=generator)
        half = size // 2
        for index, label in enumerate(labels.tolist()):
            row, column = (label // 2) * half, (label % 2) * half
            images[index, :, row : row + half, column : column + half] += 1.0
        return images, labels

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        images, labels = data()
        return functional.cross_entropy(model(images), labels)

    return loss, data


def _sums(seed: int, *, batch: int = 20, length: int = 24):
    """The running sum of a sequence, at its end."""
    generator = _generator(seed)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(batch, length, 1, generator=generator)
        return functional.smooth_l1_loss(model(x), x.sum(dim=1) / length**0.5)

    return loss


def _words(seed: int, *, batch: int = 24, context: int = 3):
    """The next word of the corpus from the three before it."""
    generator = _generator(seed)
    words = CORPUS.lower().replace(".", "").replace(",", "").replace(":", "").replace(";", "").split()
    known = sorted(set(words))
    text = torch.tensor([known.index(word) for word in words])

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        starts = torch.randint(0, len(text) - context, (batch,), generator=generator)
        windows = torch.stack([text[start : start + context + 1] for start in starts])
        return functional.cross_entropy(model(windows[:, :-1]), windows[:, -1], label_smoothing=0.1)

    return loss, len(known)


def _plain_conv(*, width: int = 12, depth: int = 3, bias: bool = True) -> nn.Sequential:
    """Convolutions without normalisation."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Conv2d(width if index else 1, width, 3, padding=1, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 4))


class Residual(nn.Module):
    """x + f(norm(x)), with GELU and dropout."""

    def __init__(self, dim: int, *, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class PatchTransformer(nn.Module):
    """Images as a sequence of patches, post-norm blocks, mean pooling."""

    def __init__(self, *, dim: int = 24, patch: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros(4, dim))
        self.block = nn.TransformerEncoderLayer(dim, 3, 2 * dim, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.patches(images).flatten(2).mT + self.places).mean(dim=1))


class SumModel(nn.Module):
    """A recurrence and a head on its last state."""

    def __init__(self, kind: type[nn.Module], *, dim: int = 20, **options: object) -> None:
        super().__init__()
        self.memory = kind(1, dim, batch_first=True, **options)
        self.out = nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.memory(x)[0][:, -1])


class WordModel(nn.Module):
    """Bengio's: embeddings side by side, one hidden layer; the output is tied to the embedding."""

    def __init__(self, vocabulary: int, *, dim: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, dim)
        self.hidden = nn.Linear(3 * dim, dim)
        self.words.weight.data.mul_(0.3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.hidden(self.words(words).flatten(1))) @ self.words.weight.T


def _clip(limit: float):
    return lambda model, step: nn.utils.clip_grad_norm_(model.parameters(), limit) and None


# ---- healthy


def residual_moons(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 24), *(Residual(24) for _ in range(4)), nn.LayerNorm(24), nn.Linear(24, 1))
    return Training(model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1), _two_moons(seed))


def plain_conv(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = _plain_conv()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    return Training(model, optimizer, _corners(seed)[0])


def autoencoder(seed: int = 0) -> Training:
    """Strided and transposed convolutions with group norm, RMSprop."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 4, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU(),
        nn.Conv2d(8, 4, 3, padding=1), nn.SiLU(),
        nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1),
    )  # fmt: skip
    _, data = _corners(seed)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        images, _ = data()
        return functional.l1_loss(model(images), images)

    return Training(model, torch.optim.RMSprop(model.parameters(), lr=2e-3), loss)


def patches(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = PatchTransformer()
    return Training(model, torch.optim.Adam(model.parameters(), lr=2e-3), _corners(seed, noise=0.7)[0])


def gru_sums(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = SumModel(nn.GRU)
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-2), _sums(seed))


def tied_words(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    loss, vocabulary = _words(seed)
    model = WordModel(vocabulary)
    return Training(model, torch.optim.Adagrad(model.parameters(), lr=0.1), loss)


def deep_relu(seed: int = 0) -> Training:
    """Ten layers, well initialised for ReLU, SGD with weight decay."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for index in range(10):
        layer = nn.Linear(32 if index else 2, 32)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.03, weight_decay=1e-3), _two_moons(seed))


def normalised_moons(seed: int = 0) -> Training:
    """Batch norm with ordinary batches, LeakyReLU, momentum."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(2, 40), nn.BatchNorm1d(40), nn.LeakyReLU(),
        nn.Linear(40, 40), nn.BatchNorm1d(40), nn.LeakyReLU(), nn.Linear(40, 1),
    )  # fmt: skip
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), _two_moons(seed))


# ---- faulty


def hot_conv(seed: int = 0) -> Training:
    """Plain convolutions with 50 times the rate that suits them."""
    torch.manual_seed(seed)
    model = _plain_conv()
    return Training(model, torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9), _corners(seed)[0])


def hot_rmsprop(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
    return Training(model, torch.optim.RMSprop(model.parameters(), lr=0.3), _two_moons(seed))


def hot_patches(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = PatchTransformer()
    return Training(model, torch.optim.AdamW(model.parameters(), lr=0.5), _corners(seed)[0])


def huge_conv_weights(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = _plain_conv(width=16)
    for module in model:
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.normal_(module.weight, std=1.5)
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-4), _corners(seed)[0])


def tiny_gelu_weights(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
    for parameter in model.parameters():
        parameter.data.mul_(1e-3)
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.01), _two_moons(seed))


def exploding_conv_depth(seed: int = 0) -> Training:
    """Twelve convolutions, each of which triples the signal, and a rate too small to matter."""
    torch.manual_seed(seed)
    model = _plain_conv(depth=12)
    for module in model:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
            module.weight.data.mul_(3.0)
            nn.init.zeros_(module.bias)
    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-14), _corners(seed)[0])


class CellModel(nn.Module):
    """A recurrence written out with a cell."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.cell, self.out = nn.RNNCell(1, dim, nonlinearity="relu"), nn.Linear(dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(len(x), self.cell.hidden_size)
        for place in range(x.shape[1]):
            state = self.cell(x[:, place], state)
        return self.out(state)


def unclipped_cell(seed: int = 0) -> Training:
    """Sums of 40 numbers, a recurrence with a gain above 1, momentum, nobody clips."""
    torch.manual_seed(seed)
    model = CellModel()
    with torch.no_grad():
        model.cell.weight_hh.copy_(1.5 * nn.init.orthogonal_(torch.empty(24, 24)))
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), _sums(seed, length=40))


def hard_sigmoids(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for index in range(6):
        layers += [nn.Linear(2 if index == 0 else 40, 40), nn.Hardsigmoid()]
    model = nn.Sequential(*layers, nn.Linear(40, 1))
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-4), _two_moons(seed))


def sigmoid_conv(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for index in range(6):
        layers += [nn.Conv2d(8 if index else 1, 8, 3, padding=1), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), _corners(seed)[0])


def batch_norm_of_three(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.BatchNorm1d(64), nn.LeakyReLU(),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.LeakyReLU(),
        nn.Linear(64, 64), nn.BatchNorm1d(64), nn.LeakyReLU(), nn.Linear(64, 1),
    )  # fmt: skip
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.01), _two_moons(seed, batch=2))


def half_patches(seed: int = 0) -> Training:
    """Convolutions and attention whose gradients are kept in float16, of a loss divided by the number of pixels."""
    torch.manual_seed(seed)
    model = PatchTransformer()
    classify, _ = _corners(seed)

    def through_half(model: nn.Module, step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.half().float()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return Training(model, optimizer, lambda model, step: 1e-5 * classify(model, step), through_half)


def dead_conv(seed: int = 0) -> Training:
    torch.manual_seed(seed)
    model = _plain_conv(width=10)
    nn.init.constant_(model[2].bias, -6.0)
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.02), _corners(seed)[0])


def detached_trunk(seed: int = 0) -> Training:
    """A detach() between the convolutions and the head."""
    torch.manual_seed(seed)

    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.head = _plain_conv()[:-1], nn.Linear(48, 4)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(self.trunk(images).detach())

    model = Detached()
    return Training(model, torch.optim.Adam(model.parameters(), lr=1e-2), _corners(seed)[0])


def zeroed_gru(seed: int = 0) -> Training:
    training = gru_sums(seed)
    training.change_gradients = lambda model, step: training.optimizer.zero_grad(set_to_none=False)
    return training


def bad_words(seed: int = 0, *, at: int = 52) -> Training:
    """One batch weighs 300 times as much."""
    training = tied_words(seed)
    clean = training.loss
    training.loss = lambda model, step: clean(model, step) * (300.0 if step == at else 1.0)
    return training


def bad_image(seed: int = 0, *, at: int = 47) -> Training:
    """One image has a NaN."""
    training = plain_conv(seed)
    _, data = _corners(seed)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        images, labels = data()
        if step == at:
            images[3, 0, 2, 2] = float("nan")
        return functional.cross_entropy(model(images), labels)

    training.loss = loss
    return training


def entropy_of_nothing(seed: int = 0, *, at: int = 30) -> Training:
    """x log x at 0 in one batch: the forward is finite, the way back is infinity times 0."""
    torch.manual_seed(seed)

    class Entropies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above, self.vanishes = nn.Linear(2, 24), nn.Linear(24, 1), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shares = self.below(x).sigmoid()
            return self.above(torch.special.entr(0 * shares if self.vanishes else shares))

    model, moons = Entropies(), _two_moons(seed)

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        model.vanishes = step == at
        return moons(model, step)

    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-2), loss)
