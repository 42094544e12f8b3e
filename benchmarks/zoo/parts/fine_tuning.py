"""Trainings that go on from a trained model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch, Loop, descend, supervised
from . import data
from .convolutional import conv, pictures, plain_convolutions, separable
from .dense import LoRA, mlp
from .language import Decoder, phrases, rotary
from .losses import classify
from .schedules import cosine
from .transformers import Transformer


def trained(
    model: nn.Module,
    batch: data.Batches,
    loss: Callable[..., Tensor] = classify,
    *,
    steps: int = 100,
    lr: float = 3e-3,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
) -> nn.Module:
    """Train a model before the training that is watched, and return it."""
    own = optimizer(model.parameters(), lr=lr)
    for step in range(1, steps + 1):
        descend(own, loss(model, *batch(step)))
    return model


def low_rank(*, rank: int = 2, warmup: int = 0) -> Loop:
    model = trained(mlp(12, 48, 48, 4), data.blobs())
    for index in (0, 2):
        model[index] = LoRA(model[index], rank)
    model[4].requires_grad_(False)
    schedule = (lambda step: min((step - 1) / warmup, 1.0)) if warmup else None
    return supervised(model, data.blobs(), classify, optimizer=torch.optim.AdamW, lr=5e-3, schedule=schedule)


def new_head(*, frozen: bool = True) -> Loop:
    """A replaced head that the optimizer knows, on a backbone that is frozen, or trained slowly."""
    model = trained(conv(), data.images(), steps=60)
    model[-1] = nn.Linear(32, 6)
    loop = supervised(model, data.images(classes=6), classify, lr=3e-3)
    if frozen:
        model[:-1].requires_grad_(False)
        loop.optimizers = [torch.optim.Adam(model[-1].parameters(), lr=3e-3)]
    else:
        parts = [{"params": model[:-1].parameters(), "lr": 1e-4}, {"params": model[-1].parameters(), "lr": 3e-3}]
        loop.optimizers = [torch.optim.Adam(parts)]
    return loop


def thawing() -> Loop:
    """One more layer is trained every 60 steps, from the last one back."""
    model = trained(mlp(12, 32, 32, 4), data.blobs())
    loop = Loop(model, data.blobs(), classify, [torch.optim.Adam(model.parameters(), lr=1e-3)])

    def thaw(loop: Loop, step: int) -> None:
        for place, index in enumerate((4, 2, 0)):
            model[index].requires_grad_(step > 60 * place)

    loop.before.append(thaw)
    return loop


def distilled() -> Loop:
    """The student follows a teacher's logits."""
    batch = data.blobs()
    teacher = trained(mlp(12, 64, 64, 4), batch).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        aim = (teacher(x) / 2).softmax(dim=1)
        return 4 * functional.kl_div((model(x) / 2).log_softmax(dim=1), aim, reduction="batchmean")

    return supervised(mlp(12, 16, 4), batch, loss, lr=3e-3)


def biases_only() -> Loop:
    model = trained(mlp(12, 32, 32, 4), data.blobs())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)
    return supervised(model, data.blobs(), classify, lr=1e-2)


def prompted() -> Loop:
    """A frozen language model; only some embeddings in front of the text are trained."""
    model = Transformer(length=20)
    base = copy.deepcopy(model.tokens)
    model.requires_grad_(False)
    model.prompt = nn.Parameter(0.1 * torch.randn(4, 24))

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.cat([model.prompt.expand(len(tokens), -1, -1), base(tokens).detach()], dim=1)
        x = x + model.places(torch.arange(x.shape[1]))
        for block in model.blocks:
            x = block(x)
        return functional.cross_entropy(model.head(model.norm(x))[:, 4:].flatten(0, 1), targets.flatten())

    return supervised(model, data.sentences(4), loss, lr=1e-2, steps=150)


def distilled_by_muon() -> Loop:
    """A small student follows the softened answers of a teacher; Muon for its matrices, AdamW for its biases."""
    batch, teacher, model = data.blobs(64, classes=8, noise=2.0), mlp(12, 96, 96, 8), mlp(12, 32, 32, 32, 8)
    trained(teacher, batch, lr=5e-3)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (teacher(x) / 3).softmax(dim=1)
        out = model(x)
        return functional.cross_entropy(out / 3, soft) + 0.3 * functional.cross_entropy(out, y)

    matrices, biases = ([p for p in model.parameters() if p.dim() == dims] for dims in (2, 1))
    return Loop(
        model,
        batch,
        loss,
        [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(biases, lr=3e-3)],
        schedule=cosine(200, 1),
    )


def remembered() -> Loop:
    """A second task; weights that mattered to the first one are held by its Fisher information."""
    model, old, new = mlp(12, 48, 48, 4), data.blobs(), data.blobs()
    trained(model, old, steps=80)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    squares = [torch.zeros_like(parameter) for parameter in start]
    for step in range(20):
        model.zero_grad()
        classify(model, *old(step)).backward()
        for square, parameter in zip(squares, model.parameters(), strict=True):
            square += parameter.grad.square() / 20
    model.zero_grad()

    def loss(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        moved = zip(squares, start, model.parameters(), strict=True)
        held = sum((square * (now - before).square()).sum() for square, before, now in moved)
        return classify(model, x, y) + weight * held

    return supervised(model, lambda step: (*new(step), torch.tensor(30.0)), loss, lr=3e-3, steps=150)


def layerwise() -> Loop:
    """Fine-tuning: each layer learns half as fast as the one above it."""
    model = nn.ModuleDict({"features": mlp(12, 48, 48, 48), "head": nn.Linear(48, 6)})
    classes = lambda model, x, y: functional.cross_entropy(model["head"](torch.relu(model["features"](x))), y)  # noqa: E731
    trained(model, data.blobs(classes=6), classes, steps=80).zero_grad()
    model["head"] = nn.Linear(48, 6)
    layers = [*(layer for layer in model["features"] if isinstance(layer, nn.Linear)), model["head"]]
    rates = [{"params": list(layer.parameters()), "lr": 4e-3 * 0.5 ** (3 - i)} for i, layer in enumerate(layers)]
    return Loop(model, data.blobs(classes=6), classes, [torch.optim.AdamW(rates)], schedule=cosine(140, 15), steps=140)


class Controlled(nn.Module):
    """A frozen network, and a copy that reads a hint and speaks through layers that are 0 at first."""

    def __init__(self, frozen: nn.Sequential) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.copy = copy.deepcopy(frozen).requires_grad_(True)
        self.hint = nn.Linear(4, 12)
        self.zeros = nn.ModuleList(nn.Linear(48, 48) for _ in range(2))
        for layer in (self.hint, *self.zeros):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, hint: Tensor) -> Tensor:
        own, helped = x, x + self.hint(hint)
        for index, zero in enumerate(self.zeros):
            own = self.frozen[2 * index + 1](self.frozen[2 * index](own))
            helped = self.copy[2 * index + 1](self.copy[2 * index](helped))
            own = own + zero(helped)
        return self.frozen[4](own)


def controlled() -> Loop:
    """A trained classifier is frozen; a copy of it is told by a hint by how much all classes are moved."""
    model, batch = mlp(12, 48, 48, 4), data.blobs()
    trained(model, batch, steps=80).zero_grad()

    def hinted(step: int) -> Batch:
        x, y = batch(step)
        by = torch.randint(0, 2, (len(y),))
        return x, functional.one_hot(by, 4).float(), (y + by) % 4

    return supervised(Controlled(model), hinted, classify, optimizer=torch.optim.AdamW, lr=5e-3, steps=200)


def distilled_pictures() -> Loop:
    """A small network learns from a large one, which knows the pictures."""
    batch = pictures(noise=1.0)
    teacher = trained(separable(), batch, steps=120, lr=1e-2).eval().requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        said = model(x)
        aim = (model.teacher[0](x) / 4).softmax(1)
        soft = functional.kl_div((said / 4).log_softmax(1), aim, reduction="batchmean")
        return 16 * soft + 0.1 * functional.cross_entropy(said, labels)

    model = plain_convolutions()
    model.teacher = [teacher]  # in a list: not a submodule
    return supervised(model, batch, loss, lr=3e-3, steps=250)


def adapted_decoder() -> Loop:
    """A language model that learned one way to speak is adapted to another; only matrices of rank 4 are trained."""
    model = trained(Decoder(), phrases(), lr=5e-3).requires_grad_(False)
    for attention in model.attentions:
        attention.qkv, attention.out = LoRA(attention.qkv, 4), LoRA(attention.out, 4)
    mapping, batch = torch.randperm(24), phrases()
    return supervised(
        model,
        lambda step: tuple(mapping[part] for part in batch(step)),
        classify,
        optimizer=torch.optim.AdamW,
        lr=1e-2,
        schedule=cosine(250, 20),
        steps=250,
    )


def unfrozen() -> Loop:
    """A backbone that knows other pictures: first the new head alone, from step 120 all, the backbone at a tenth."""
    model = trained(plain_convolutions(), pictures(), steps=80)
    model[-1] = nn.Linear(72, 5)
    body = [parameter for layer in model[:-1] for parameter in layer.parameters()]
    for parameter in body:
        parameter.requires_grad_(False)
    swapped = torch.tensor([3, 0, 4, 1, 2])
    batch = pictures(noise=1.0)

    def turned(step: int) -> Batch:
        x, labels = batch(step)
        return x.flip(3), swapped[labels]

    def unfreeze(loop: Loop, step: int) -> None:
        for parameter in body:
            parameter.requires_grad_(step >= 120)

    optimizer = torch.optim.AdamW([{"params": model[-1].parameters(), "lr": 3e-3}, {"params": body, "lr": 3e-4}])
    return Loop(model, turned, classify, [optimizer], steps=260, before=[unfreeze])


def adapted() -> Loop:
    """A language model learns one language, then another one through updates of low rank."""
    adam = torch.optim.AdamW
    model = trained(rotary(2), data.sentences(), steps=60, lr=5e-3, optimizer=adam).requires_grad_(False)
    model.zero_grad()
    for layer in model.layers:
        for owner, name in ((layer.attention, "q"), (layer.attention, "v"), (layer.inner, "up"), (layer.inner, "down")):
            setattr(owner, name, LoRA(getattr(owner, name), rank=4))
    return supervised(model, data.sentences(4), classify, optimizer=adam, lr=4e-3, schedule=cosine(150, 10), steps=150)
