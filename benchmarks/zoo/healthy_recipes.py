"""Healthy trainings that differ in their recipe: optimizer, schedule, precision, what is trained, and on what data."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from .healthy_supervised import SGD, AdamW, Table, momentum
from .loop import Batch, Loop, supervised
from .models import LoRA, Recurrent, Transformer, classify, conv, mlp, next_token, regress, resnet


def quasi_newton() -> Loop:
    """L-BFGS with a line search on the whole data; it converges, and then nothing moves."""
    x = torch.randn(128, 6)
    y = torch.tanh(x @ torch.randn(6, 1))
    model = mlp(6, 12, 1, act=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=8, line_search_fn="strong_wolfe")

    def update(loop: Loop, step: int) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = regress(model, *loop.batch(step))
            loss.backward()
            return loss

        return optimizer.step(closure)

    return Loop(model, lambda _: (x, y), regress, [optimizer], steps=100, update=update)


def sharpness_aware() -> Loop:
    """SAM: the gradient at a perturbed point makes the step."""
    model = mlp(12, 32, 32, 4)
    optimizer = momentum(model.parameters(), 0.05)

    def update(loop: Loop, step: int) -> Tensor:
        batch = loop.batch(step)
        optimizer.zero_grad()
        classify(model, *batch).backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss = classify(model, *batch)
        loss.backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        return loss

    return Loop(model, data.blobs(), classify, [optimizer], update=update)


class ByParameter(torch.optim.Optimizer):
    """Parameters are updated one by one, by `update`."""

    def __init__(self, parameters: object, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, self.state[parameter], group["lr"])


class Orthogonal(ByParameter):
    """Muon: the momentum of a matrix, made orthogonal by Newton's and Schulz's iteration."""

    def update(self, parameter: Tensor, state: dict[str, Tensor], lr: float) -> None:
        average = state.setdefault("average", torch.zeros_like(parameter))
        x = average.mul_(0.9).add_(parameter.grad) / (average.norm() + 1e-7)
        for _ in range(5):
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        parameter.sub_(lr * x)


class Signs(ByParameter):
    """Lion: the sign of an average."""

    def update(self, parameter: Tensor, state: dict[str, Tensor], lr: float) -> None:
        average = state.setdefault("average", torch.zeros_like(parameter))
        parameter.sub_(lr * torch.sign(0.9 * average + 0.1 * parameter.grad))
        average.lerp_(parameter.grad, 0.01)


def two_optimizers() -> Loop:
    """Muon for the matrices of the blocks, AdamW for the rest, one after the other."""
    model = Transformer()
    matrices = [p for name, p in model.named_parameters() if "blocks" in name and p.dim() == 2]
    others = [p for name, p in model.named_parameters() if not ("blocks" in name and p.dim() == 2)]
    return Loop(model, data.sentences(), next_token, [Orthogonal(matrices), AdamW(others, lr=3e-3)], steps=120)


def catapult() -> Loop:
    """Full batches at the edge of stability: the loss rises, then falls for good."""
    x = torch.randn(64, 8)
    y = torch.sign(x[:, :1]) * 0.5
    return supervised(mlp(8, 48, 1, act=nn.Tanh), lambda _: (x, y), regress, optimizer=SGD, lr=0.35, steps=300)


def sparse() -> Loop:
    """Gradients of an embedding that name the rows they touch."""
    model = nn.Sequential(nn.Embedding(200, 16, sparse=True), nn.Flatten(), nn.Linear(64, 200))
    batch = data.sentences(16, vocabulary=24, length=4)
    dense, rows = (
        torch.optim.Adam(model[2].parameters(), lr=3e-3),
        torch.optim.SparseAdam(model[0].parameters(), lr=1e-2),
    )
    return Loop(
        model,
        lambda step: tuple(part[:, : 4 if k == 0 else None] for k, part in enumerate(batch(step))),
        _last,
        [dense, rows],
    )


def _last(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens), targets[:, -1])


def restarts(step: int) -> float:
    """Three cosines of 100 steps."""
    return 0.5 + 0.5 * math.cos(math.pi * ((step - 1) % 100) / 100)


def one_cycle(step: int) -> float:
    return 0.04 + 0.96 * (step / 80 if step < 80 else max(0.0, (200 - step) / 120))


def spiking() -> Loop:
    """Now and then a hard batch; its loss is ten times the usual one, and the next one is as before."""
    batch, hard = data.curve(), data.curve(noise=lambda n: 3.0 * torch.randn(n))

    def chosen(step: int) -> Batch:
        return hard(step) if step % 23 == 0 else batch(step)

    return supervised(mlp(8, 32, 32, 1), chosen, regress, lr=2e-3, clip=2.0, steps=300)


def scaled_by_hand() -> Loop:
    """A loss scale of 1024 that the loop multiplies and divides by itself, and says so."""
    loop = supervised(mlp(12, 32, 32, 4), data.blobs(), classify, lr=2e-3, options={"loss_scale": 1024.0})

    def update(loop: Loop, step: int) -> Tensor:
        loop.zero_grad()
        loss = classify(loop.model, *loop.batch(step))
        (1024 * loss).backward()
        for parameter in loop.model.parameters():
            parameter.grad.div_(1024)
        loop.apply(step)
        return loss

    loop.update = update
    return loop


def half(
    *, start: float = 2.0**16, growth: int = 2000, lr: float = 2e-3, scale: float = 1.0, **options: object
) -> Loop:
    """float16 by autocast and a gradient scaler; a start that is too high skips the first steps."""
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=growth)
    return supervised(
        mlp(12, 32, 32, 4), data.blobs(), lambda model, x, y: scale * functional.cross_entropy(model(x).float(), y),
        lr=lr, scaler=scaler, autocast=torch.float16, **options,
    )  # fmt: skip


def all_in(dtype: torch.dtype) -> Loop:
    """Parameters and data in one type."""
    batch = data.curve()
    return supervised(
        mlp(8, 32, 32, 1).to(dtype), lambda step: tuple(t.to(dtype) for t in batch(step)), regress, lr=2e-3, clip=1.0
    )


def pretrained(model: nn.Module, batch: data.Batches, steps: int = 100) -> nn.Module:
    """A model that has learnt something."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        classify(model, *batch(step)).backward()
        optimizer.step()
    return model


def low_rank(*, rank: int = 2, warmup: int = 0) -> Loop:
    model = pretrained(mlp(12, 48, 48, 4), data.blobs())
    for index in (0, 2):
        model[index] = LoRA(model[index], rank)
    model[4].requires_grad_(False)
    schedule = (lambda step: min((step - 1) / warmup, 1.0)) if warmup else None
    return supervised(model, data.blobs(), classify, optimizer=AdamW, lr=5e-3, schedule=schedule)


def new_head(*, frozen: bool = True) -> Loop:
    """A replaced head that the optimizer knows, on a backbone that is frozen, or trained slowly."""
    model = pretrained(conv(), data.images(), 60)
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
    model = pretrained(mlp(12, 32, 32, 4), data.blobs())
    loop = Loop(model, data.blobs(), classify, [torch.optim.Adam(model.parameters(), lr=1e-3)])

    def thaw(loop: Loop, step: int) -> None:
        for place, index in enumerate((4, 2, 0)):
            model[index].requires_grad_(step > 60 * place)

    loop.before.append(thaw)
    return loop


def distilled() -> Loop:
    """The student follows a teacher's logits."""
    batch = data.blobs()
    teacher = pretrained(mlp(12, 64, 64, 4), batch).requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        aim = (teacher(x) / 2).softmax(dim=1)
        return 4 * functional.kl_div((model(x) / 2).log_softmax(dim=1), aim, reduction="batchmean")

    return supervised(mlp(12, 16, 4), batch, loss, lr=3e-3)


def biases_only() -> Loop:
    model = pretrained(mlp(12, 32, 32, 4), data.blobs())
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


def after(first: data.Batches, second: data.Batches, at: int) -> data.Batches:
    """Other data from a step on, on purpose."""
    return lambda step: first(step) if step < at else second(step)


def longer(step: int) -> Batch:
    """Sequences that grow."""
    return data.sums(length=4 + 4 * (step // 60))(step)


def noisier() -> data.Batches:
    """Images with more noise every 50 steps."""
    batch = data.images(noise=0.2)

    def changed(step: int) -> Batch:
        x, y = batch(step)
        return x + 0.4 * (step // 50) * torch.randn_like(x), y

    return changed


def larger(batch: data.Batches) -> data.Batches:
    """An eighth of the batch, and twice as much every 60 steps."""
    return lambda step: tuple(part[: len(part) >> max(3 - step // 60, 0)] for part in batch(step))


def second_loss() -> Loop:
    """An auxiliary loss is added from step 120 on."""
    now = [0]

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        extra = 0.5 * functional.cross_entropy(out.roll(1, dims=1), y) if now[0] > 120 else 0.0
        return functional.cross_entropy(out, y) + extra

    return supervised(
        mlp(12, 32, 32, 4), data.blobs(), loss, lr=2e-3, before=[lambda loop, step: now.__setitem__(0, step)]
    )


RECIPES: Table = {
    "optimizers": {
        "L-BFGS": quasi_newton,
        "SAM": sharpness_aware,
        "Muon and AdamW": two_optimizers,
        "Adagrad": lambda: supervised(mlp(12, 32, 32, 4), data.blobs(), classify, optimizer=torch.optim.Adagrad, lr=0.03),
        "RMSprop": lambda: supervised(conv(), data.images(), classify, optimizer=torch.optim.RMSprop, lr=2e-3),
        "Lion": lambda: supervised(mlp(8, 32, 32, 1), data.curve(), regress, optimizer=Signs, lr=1e-3),
        "Adam, four batches per step": lambda: supervised(conv(), data.images(4), classify, lr=3e-3, accumulate=4),
        "sparse embedding, SparseAdam": sparse,
        "edge of stability": catapult,
    },
    "schedules": {
        "warm restarts": lambda: supervised(resnet(4), data.images(), classify, optimizer=momentum, lr=0.05, schedule=restarts, steps=300),
        "one cycle": lambda: supervised(mlp(12, 32, 32, 4), data.blobs(), classify, optimizer=momentum, lr=0.1, schedule=one_cycle),
        "warm-up of 100 steps from 0": lambda: supervised(mlp(8, 32, 32, 1), data.curve(), regress, lr=3e-3, schedule=lambda step: min((step - 1) / 100, 1.0)),
        "10x down every 80 steps": lambda: supervised(conv(), data.images(), classify, optimizer=momentum, lr=0.05, schedule=lambda step: 0.1 ** (step // 80), steps=240),
        "linear to 0": lambda: supervised(mlp(12, 32, 32, 4), data.blobs(), classify, lr=5e-3, schedule=lambda step: 1 - step / 200),
        "hard batches now and then": spiking,
    },
    "precision": {
        "float16, scaler": half,
        "float16, a scale that starts far too high": lambda: half(start=2.0**30),
        "float16, a scale that grows every 20 steps": lambda: half(growth=20, steps=300),
        "float16, scaler and clipping": lambda: half(clip=1.0),
        "bfloat16 by autocast": lambda: supervised(mlp(12, 32, 32, 4), data.blobs(), lambda model, x, y: functional.cross_entropy(model(x).float(), y), lr=2e-3, autocast=torch.bfloat16),
        "bfloat16 parameters": lambda: all_in(torch.bfloat16),
        "float64": lambda: all_in(torch.float64),
        "a loss scale by hand": scaled_by_hand,
    },
    "fine-tuning": {
        "LoRA": low_rank,
        "LoRA, warm-up from 0": lambda: low_rank(rank=4, warmup=40),
        "new head, frozen backbone": new_head,
        "new head, backbone slower": lambda: new_head(frozen=False),
        "unfreezing layer by layer": thawing,
        "distillation": distilled,
        "biases only": biases_only,
        "prompt": prompted,
    },
    "curricula": {
        "longer sequences": lambda: supervised(Recurrent(nn.GRU, 1, 1), longer, regress, lr=5e-3, steps=240),
        "other classes from step 120": lambda: supervised(mlp(12, 32, 32, 4), after(data.blobs(), data.blobs(), 120), classify, lr=2e-3),
        "more noise every 50 steps": lambda: supervised(conv(), noisier(), classify, lr=3e-3),
        "another domain from step 150": lambda: supervised(Transformer(), after(data.sentences(), data.sentences(), 150), next_token, optimizer=AdamW, lr=2e-3, schedule=lambda step: min(step / 20, 1.0), clip=1.0),
        "a second loss from step 120": second_loss,
        "larger batches every 60 steps": lambda: supervised(mlp(8, 32, 32, 1), larger(data.curve(64)), regress, lr=2e-3, steps=240),
    },
}  # fmt: skip
