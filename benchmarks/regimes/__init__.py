"""The small model that is trained under every engine, and what a regime is: a function that puts it under one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

STEPS, BAD_STEP, CLIP, LEARNING_RATE = 4, 3, 0.1, 0.1
TOKENS, BATCH = 8, 16  # the vocabulary, and the tokens of a rank at a step
BAD_RANK = 1  # of which a gradient becomes NaN
# By the narrowest numbers in which a training computes: the relative error that counts as none
TOLERANCE = {"float64": 1e-6, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}


def whole(*, tied: bool = False) -> nn.Sequential:
    """Return the whole model, the same on every rank; all its sizes are even."""
    torch.manual_seed(0)
    layers = {"embedding": nn.Embedding(TOKENS, 4), "norm": nn.LayerNorm(4), "up": nn.Linear(4, 6), "act": nn.Tanh()}
    layers |= {"down": nn.Linear(6, 4), "head": nn.Linear(4, TOKENS, bias=False)}
    if tied:
        layers["head"].weight = layers["embedding"].weight
    return nn.Sequential(OrderedDict(layers)).double()


def part(*names: str) -> nn.Sequential:
    """Return these layers of the model, under their names."""
    return nn.Sequential(OrderedDict((name, layer) for name, layer in whole().named_children() if name in names))


def batch(step: int, ranks: Iterable[int]) -> Tensor:
    """Return the tokens of these ranks at a step."""
    generators = [torch.Generator().manual_seed(100 * step + rank) for rank in ranks]
    return torch.cat([torch.randint(0, TOKENS, (BATCH,), generator=generator) for generator in generators])


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting the square of each token."""
    return nn.functional.cross_entropy(logits, tokens**2 % TOKENS)


def gradients_of(models: list[nn.Module]) -> list[Tensor]:
    return [parameter.grad.clone() for model in models for parameter in model.parameters()]


@dataclass
class Truth:
    """What one process finds in float64: the gradients of every step, before and after clipping."""

    names: list[str]
    left: list[list[Tensor]]
    received: list[list[Tensor]]

    @staticmethod
    def norms(gradients: list[list[Tensor]]) -> Any:
        """Return the norms: [S, P]."""
        return np.array([[one.norm().item() for one in some] for some in gradients])


def one_process(world: int, *, tied: bool = False, clip: float = CLIP, make: Any = None) -> Truth:
    """Train in one process on the batches of all ranks."""
    model = whole(tied=tied)
    truth = Truth([name for name, _ in model.named_parameters()], [], [])
    optimizer = (make or (lambda some: torch.optim.SGD(some, lr=LEARNING_RATE)))(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        tokens = batch(step, range(world))
        loss_of(model(tokens), tokens).backward()
        truth.left.append(gradients_of([model]))
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        truth.received.append(gradients_of([model]))
        optimizer.step()
    return truth


@dataclass
class Training:
    """A model under an engine. `backward(step)` makes the gradients that the optimizer would use without clipping."""

    model: nn.Module | list[nn.Module]
    backward: Callable[[int], None]
    clip: Callable[[], object] | None = None  # None: by the norm over all ranks
    make_optimizer: Callable[[list[nn.Parameter]], Any] | None = None  # None: SGD
    after_step: Callable[[int], None] | None = None
    update: Callable[[], object] | None = None  # of an engine that has its own step, in which it clips
    tied: bool = False
    are_replicas: bool = False  # each rank has all parameters, and only `Ranks()` sees the rank's own gradient
    are_stages: bool = False  # each rank has parameters of its own
    truth: Callable[..., Truth] = one_process  # of the number of ranks, and the limit `clip` of the norm
    precision: str = "float64"
    bad: int = 0  # the number of the parameter of which a gradient becomes NaN
    rename: Callable[[str], str] = str  # a parameter's name in this engine to its name in one process

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        models = self.model if isinstance(self.model, list) else [self.model]
        return [named for model in models for named in model.named_parameters()]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._named()]

    @property
    def name_of_bad(self) -> str:
        """The name of the parameter of which a gradient becomes NaN, with the module's, without those of wrappers."""
        return ".".join(self._named()[self.bad][0].split(".")[-2:])

    def clip_all(self) -> None:
        """Clip the norm over all ranks, as a training of this kind does."""
        if self.clip is not None:
            self.clip()
            return
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        squares = torch.stack([_full(gradient).square().sum() for gradient in gradients]).sum()
        if self.are_stages:
            dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(self.parameters, CLIP, squares.sqrt(), foreach=False)


def _full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


Regime = Callable[[int, int], Training]
REGIMES: dict[str, tuple[Regime, int]] = {}  # by name: the function of rank and world, and the number of ranks


def regime(name: str, num_ranks: int = 2) -> Callable[[Regime], Regime]:
    """Add a function of rank and world to the regimes."""

    def add(function: Regime) -> Regime:
        REGIMES[name] = function, num_ranks
        return function

    return add


def averaging(model: nn.Module, rank: int, **options: Any) -> Training:
    """Return the training of an engine that averages over ranks, each with its own batch."""
    return Training(model, lambda step: loss_of(model(batch(step, [rank])), batch(step, [rank])).backward(), **options)


def together(model: nn.Module, world: int, **options: Any) -> Training:
    """Return the training of an engine in which all ranks have the same batch."""

    def backward(step: int) -> None:
        tokens = batch(step, range(world))
        loss_of(model(tokens), tokens).backward()

    return Training(model, backward, **options)
