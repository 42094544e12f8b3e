"""Mutations of weights, at once or after each step."""

from __future__ import annotations

import copy

import torch

from ..loop import Loop
from ..transforms import transform
from ._common import Spec


@torch.no_grad()
def weights(loop: Loop, layer: str, by: Spec, of: str = "matrices") -> None:
    """Transform the trained matrices of a layer or of all; `of`: "biases", "all" parameters, or those of a name."""
    change = transform(by)
    for name, parameter in loop.model.named_parameters():
        chosen = {"matrices": parameter.dim() > 1, "biases": parameter.dim() < 2 and "bias" in name, "all": True}
        in_layer = not layer or name.startswith(f"{layer}.")
        if in_layer and parameter.requires_grad and chosen.get(of, name.endswith(of)):
            parameter.copy_(change(parameter))


def first_weight(loop: Loop, layer: str, value: float | str) -> None:
    """Overwrite one element of a layer, as a bad file or a bad memory does."""
    with torch.no_grad():
        next(loop.model.get_submodule(layer).parameters()).view(-1)[0] = float(value)


def norms(loop: Loop, layer: str, value: float) -> None:
    """Fill the scales of all normalisations."""
    with torch.no_grad():
        for module in loop.model.modules():
            if "Norm" in type(module).__name__:
                module.weight.fill_(value)


def frozen(loop: Loop, layer: str) -> None:
    loop.model.get_submodule(layer).requires_grad_(False)


def evaluated(loop: Loop, layer: str) -> None:
    """eval() is called, and never left."""
    loop.model.eval()


def precision(loop: Loop, layer: str, dtype: str) -> None:
    """Cast the parameters and the data; Adam's default eps is 0 in float16."""
    kind, before = getattr(torch, dtype), loop.batch
    loop.model.to(kind)
    loop.batch = lambda step: tuple(part.to(kind) if part.is_floating_point() else part for part in before(step))


def written_back(loop: Loop, layer: str, since: int = 1, every: int = 1) -> None:
    """The weights that the step before `since` has left are loaded after some of the steps from then on."""
    kept = [] if since > 1 else [copy.deepcopy(loop.model.state_dict())]

    def load(loop: Loop, step: int) -> None:
        if step == since - 1:
            kept.append(copy.deepcopy(loop.model.state_dict()))
        elif step >= since and step % every == 0:
            loop.model.load_state_dict(kept[0])

    loop.after.append(load)


def average_written_back(loop: Loop, layer: str, share: float, every: int = 1) -> None:
    """A moving average of the weights is copied into the model every few steps."""
    average = copy.deepcopy(loop.model)

    @torch.no_grad()
    def put(loop: Loop, step: int) -> None:
        for slow, fast in zip(average.parameters(), loop.model.parameters(), strict=True):
            slow.lerp_(fast, share)
            if step % every == 0:
                fast.copy_(slow)

    loop.after.append(put)


def targets_written_back(loop: Loop, layer: str) -> None:
    """The copy for the targets is loaded into the model that learns, and not the other way round."""
    loop.after.insert(0, lambda loop, step: loop.model.load_state_dict(loop.model.held[0].state_dict()) and None)


def checkpoint_of(loop: Loop, layer: str, training: str) -> None:
    """A checkpoint of another run is loaded."""
    from ..cases import CASES, build  # cases need this catalogue

    loop.model.load_state_dict(build(CASES[training]).model.state_dict())


def held(loop: Loop, layer: str, within: float | None = None, norm: float | None = None) -> None:
    """After each step all weights are clamped, or each matrix is scaled back to a largest norm."""

    @torch.no_grad()
    def hold(loop: Loop, step: int) -> None:
        for parameter in loop.model.parameters():
            if within is not None:
                parameter.clamp_(-within, within)
            if norm is not None and parameter.dim() > 1:
                parameter.mul_(min(1.0, norm / float(parameter.norm())))

    loop.after.append(hold)


def born_again(loop: Loop, layer: str, every: int) -> None:
    """The initialisation runs at the start of each epoch."""

    def again(loop: Loop, step: int) -> None:
        for module in loop.model.modules() if step > 1 and step % every == 1 else ():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()

    loop.before.append(again)
