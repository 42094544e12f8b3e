"""Mutations of the model itself: its layers, and what the optimizer holds of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..loop import Loop
from ..specification import called, named


def attribute(
    loop: Loop, layer: str, name: str, value: Any = None, times: float | None = None, function: str = "", of: str = ""
) -> None:
    """Set an attribute of the layer's modules that have it, or ("." is the model) of the one that is named alone."""
    for module in _holders(loop, layer, name, of):
        if times is not None:
            value = times * getattr(module, name)
        setattr(module, name, named(function) if function else value)


def _holders(loop: Loop, layer: str, name: str, of: str) -> Iterator[Any]:
    if of:
        return iter([loop.model if of == "." else getattr(loop.model, of)])
    return (module for module in loop.model.get_submodule(layer).modules() if hasattr(module, name))


def head_replaced(loop: Loop, layer: str) -> None:
    """Replace a layer by a new one that no optimizer holds."""
    old = loop.model.get_submodule(layer)
    loop.model.set_submodule(layer, nn.Linear(old.in_features, old.out_features, old.bias is not None))


def copied(loop: Loop, layer: str) -> None:
    """The training goes on with a copy of the model; the optimizer keeps the tensors of the first one."""
    loop.model = copy.deepcopy(loop.model)


def assigned(loop: Loop, layer: str) -> None:
    """A checkpoint is loaded with assign=True: the model has other tensors from then on."""
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict(state, assign=True)


def appended(loop: Loop, layer: str, module: Sequence[Any]) -> None:
    """Put a module behind a layer."""
    added = called(module)
    loop.model.set_submodule(layer, nn.Sequential(loop.model.get_submodule(layer), added))
    if parameters := list(added.parameters()):
        loop.optimizers[0].add_param_group({"params": parameters})


def deepened(loop: Loop, layer: str, depth: int, act: str, gain: float | None = None) -> None:
    """A layer becomes many, before the optimizer has seen it."""
    old = loop.model.get_submodule(layer)
    layers: list[nn.Module] = [nn.Linear(old.in_features, 24), getattr(nn, act)()]
    for _ in range(depth):
        layers += [nn.Linear(24, 24), getattr(nn, act)()]
        if gain is not None:
            nn.init.normal_(layers[-2].weight, std=gain / math.sqrt(24))
    loop.model.set_submodule(layer, nn.Sequential(*layers, nn.Linear(24, old.out_features)))
    loop.optimizers[0].param_groups[0]["params"] = list(loop.model.parameters())


def rebuilt(loop: Loop, layer: str, model: Sequence[Any]) -> None:
    """Replace the model, with a new optimizer of the same kind."""
    old = loop.optimizers[0]
    loop.model = called(model)
    known = {key: value for key, value in old.defaults.items() if key in ("lr", "momentum", "nesterov", "weight_decay")}
    loop.optimizers = [type(old)(loop.model.parameters(), **known)]


def relu_recurrence(loop: Loop, layer: str, sizes: tuple[int, int], gain: float, orthogonal: bool = True) -> None:
    """A recurrence without gates and of a gain, and nothing is clipped."""
    memory = nn.RNN(*sizes, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        if orthogonal:
            nn.init.orthogonal_(memory.weight_hh_l0, gain=gain)
        else:
            memory.weight_hh_l0.copy_(gain * torch.eye(sizes[1]))
    loop.model.set_submodule(layer, memory)
    loop.optimizers[0].param_groups[0]["params"] = list(loop.model.parameters())
    loop.clip = None


def mask_inverted(loop: Loop, layer: str) -> None:
    """Each word sees the later ones alone, and the last one nothing."""

    def forward(self: Any, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(length, length).tril().bool()
        logits = (q @ k.mT / (dim // 2) ** 0.5).masked_fill(hidden, float("-inf"))
        return self.out((logits.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, dim))

    for module in loop.model.modules():
        if hasattr(module, "qkv"):
            module.forward = forward.__get__(module)


def teacher_emptied(loop: Loop, layer: str) -> None:
    """The head of the teacher was not loaded."""
    with torch.no_grad():
        for parameter in loop.model.teacher[0][-1].parameters():
            parameter.zero_()
