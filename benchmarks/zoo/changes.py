"""The changes that faults make to a training before it runs. Each function returns a function of (loop, layer)."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .loop import Batch, Hook, Loop

Change = Callable[[Loop, str], None]
Transform = Callable[[Tensor], Tensor]


def learning_rate(factor: Callable[[int], float] | float, at: int = 1, until: int = 10**9) -> Change:
    """Multiply the learning rate by a factor, or a function of the step, within some steps."""

    def change(loop: Loop, layer: str) -> None:
        before = loop.schedule or (lambda step: 1.0)
        by = factor if callable(factor) else lambda step: factor
        loop.schedule = lambda step: before(step) * (by(step) if at <= step < until else 1.0)

    return change


def scaled(factor: float, *, bias: float | None = None, every: bool = False) -> Change:
    """Multiply the weights of a layer, or of all layers, by a factor, and set their biases to a value."""

    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        for name, parameter in loop.model.named_parameters():
            if every or name.startswith(layer + "."):
                if parameter.dim() > 1:
                    parameter.mul_(factor)
                elif bias is not None and "bias" in name:
                    parameter.fill_(bias)

    return change


def filled(value: float) -> Change:
    """Set all trainable matrices to a constant."""

    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        for parameter in loop.model.parameters():
            if parameter.requires_grad and parameter.dim() > 1:
                parameter.fill_(value)

    return change


def at_step(hook: Callable[[Loop, str], None], at: int) -> Change:
    """Call a function once, before a step."""

    def change(loop: Loop, layer: str) -> None:
        loop.before.append(lambda loop, step: hook(loop, layer) if step == at else None)

    return change


def inputs(
    transform: Callable[[Tensor], Tensor], at: int = 1, until: int = 10**9, *, which: int = 0, every: int = 1
) -> Change:
    """Transform one of the batch's tensors within some steps, at every n-th of them."""

    def change(loop: Loop, layer: str) -> None:
        batch = loop.batch

        def changed(step: int) -> Batch:
            tensors = list(batch(step))
            if at <= step < until and (step - at) % every == 0:
                tensors[which] = transform(tensors[which])
            return tuple(tensors)

        loop.batch = changed

    return change


def output(transform: Callable[[Tensor], Tensor], at: int = 1, until: int = 10**9) -> Change:
    """Transform a layer's output within some steps."""

    def change(loop: Loop, layer: str) -> None:
        now = [0]
        loop.before.append(lambda loop, step: now.__setitem__(0, step))

        def hook(module: nn.Module, args: object, out: Tensor) -> Tensor | None:
            return transform(out) if at <= now[0] < until else None

        loop.model.get_submodule(layer).register_forward_hook(hook)

    return change


def loss(transform: Callable[[Tensor], Tensor], at: int = 1, until: int = 10**9) -> Change:
    """Transform the loss within some steps."""

    def change(loop: Loop, layer: str) -> None:
        now, before = [0], loop.loss
        loop.before.append(lambda loop, step: now.__setitem__(0, step))
        loop.loss = lambda model, *batch: (
            transform(before(model, *batch)) if at <= now[0] < until else before(model, *batch)
        )

    return change


def penalised(weight: float) -> Change:
    """Add the squares of all parameters to the loss."""

    def change(loop: Loop, layer: str) -> None:
        before = loop.loss
        loop.loss = lambda model, *batch: (
            before(model, *batch) + weight * sum(parameter.square().sum() for parameter in model.parameters())
        )

    return change


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(context: object, x: Tensor, transform: Callable[[Tensor], Tensor]) -> Tensor:
        context.transform = transform  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(context: object, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return context.transform(grad), None  # type: ignore[attr-defined]


def backward(transform: Callable[[Tensor], Tensor], at: int = 1, until: int = 10**9) -> Change:
    """Transform the gradient of a layer's output within some steps."""
    return output(lambda out: _Backward.apply(out, transform), at, until)


def received(hook: Hook) -> Change:
    """Call a function between backward and step."""
    return lambda loop, layer: loop.received.append(hook)


def fields(**values: object) -> Change:
    """Set fields of the loop."""

    def change(loop: Loop, layer: str) -> None:
        for name, value in values.items():
            setattr(loop, name, value)

    return change


def groups(**values: object) -> Change:
    """Set options of the optimizers' parameter groups."""

    def change(loop: Loop, layer: str) -> None:
        for group in (group for optimizer in loop.optimizers for group in optimizer.param_groups):
            group |= values

    return change


def optimizer(make: Callable[[object], torch.optim.Optimizer]) -> Change:
    """Replace the optimizer."""

    def change(loop: Loop, layer: str) -> None:
        loop.optimizers = [make(loop.model.parameters())]

    return change


def own_rate(factor: float) -> Change:
    """Multiply one layer's learning rate by a factor."""

    def change(loop: Loop, layer: str) -> None:
        optimizer = loop.optimizers[0]
        own = set(loop.model.get_submodule(layer).parameters())
        group = optimizer.param_groups[0]
        group["params"] = [parameter for parameter in group["params"] if parameter not in own]
        optimizer.add_param_group({"params": list(own), "lr": factor * group["lr"]})

    return change


def rebuilt(make: Callable[[], nn.Module]) -> Change:
    """Replace the model, with a new optimizer of the same kind."""

    def change(loop: Loop, layer: str) -> None:
        old = loop.optimizers[0]
        loop.model = make()
        known = {
            key: value for key, value in old.defaults.items() if key in ("lr", "momentum", "nesterov", "weight_decay")
        }
        loop.optimizers = [type(old)(loop.model.parameters(), **known)]

    return change


def chain(*changes: Change) -> Change:
    """Apply several changes, one after the other."""

    def change(loop: Loop, layer: str) -> None:
        for one in changes:
            one(loop, layer)

    return change


def forgotten_squares(loop: Loop, layer: str) -> None:
    """Reset one of Adam's two averages, like a resume that lost it."""
    for state in loop.optimizers[0].state.values():
        state["exp_avg_sq"].zero_()


def replaced_layer(loop: Loop, layer: str) -> None:
    """Replace a layer by a new one that no optimizer holds."""
    parent, _, name = layer.rpartition(".")
    old = loop.model.get_submodule(layer)
    setattr(loop.model.get_submodule(parent), name, nn.Linear(old.in_features, old.out_features, old.bias is not None))


def another_model(loop: Loop, layer: str) -> None:
    """The optimizer keeps the tensors of the first model."""
    loop.model = copy.deepcopy(loop.model)


def zero_gradients(loop: Loop, step: int) -> None:
    loop.zero_grad()


def clip_scaled(loop: Loop, step: int) -> None:
    """Clip gradients before they are unscaled."""
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0)


def step_first(loop: Loop, layer: str) -> None:
    """Call zero_grad(), step(), backward() in this order: the optimizer never has a gradient."""

    def update(loop: Loop, step: int) -> Tensor:
        loop.zero_grad()
        loop.apply(step)
        loss = loop.loss(loop.model, *loop.batch(step))
        loss.backward()
        return loss

    loop.update = update


def biased(value: float) -> Change:
    """Set a layer's biases."""

    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        loop.model.get_submodule(layer).bias.fill_(value)

    return change


def clip_values(loop: Loop, step: int) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 1e-7)


def first_sample(value: float) -> Transform:
    """Set all elements of the first sample to a value."""
    return lambda x: x.index_fill(0, torch.tensor([0]), value)


def no_weights(x: Tensor) -> Tensor:
    """Add a weighted mean whose weights are all 0."""
    weights = torch.zeros(4)
    return x + (x.mean() * weights).sum() / weights.sum()


def norm_of_zeros(out: Tensor) -> Tensor:
    """Add the norm of a vector of zeros, which is 0, to the output: its derivative is 0/0."""
    return out + (out - out.detach()).square().sum().sqrt()


def halved(loop: Loop, layer: str) -> None:
    """Convert the parameters to float16, in which Adam's default eps is 0."""
    loop.model.half()
    batch = loop.batch
    loop.batch = lambda step: tuple(part.half() if part.is_floating_point() else part for part in batch(step))
