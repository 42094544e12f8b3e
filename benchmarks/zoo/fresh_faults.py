"""Faults of kinds that no other file of the zoo has, with what is known of them: written before any of them was run.

The first run showed seven truths of the opened half to be wrong; they were mended once, against the same training
without the fault: what trains as well is none (three were taken out), and a NaN in the loss is no overflow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import changes as do
from . import data
from .faults import Fault
from .loop import Batch, Loop
from .models import Experts, Recurrent, next_token

PLAIN, REG, CONV, NORM, TASKS = (
    "MLP, SGD with momentum",
    "MLP, squared error",
    "convolutions",
    "convolutions, batch norm",
    "several tasks",
)
SCAN, UNET, MIXER, POINTS, POINTER = ("selective scan", "U-Net", "mixer", "cloud of points", "pointer to the largest")
HYPER, MEMORY, WAVES, FIXED, SPIKES, MIXTURE = (
    "hypernetwork",
    "memory of the segment before",
    "operator in frequencies",
    "equilibrium",
    "spiking neurons",
    "mixture of densities",
)
LAMB, TWICE, TABLE, RETURNS, QUEUE, CARRIED = (
    "LAMB",
    "activations computed twice",
    "a table as it comes, batch norm first",
    "actor-critic, rewards in tens",
    "queue of keys",
    "a state that is carried over",
)


def _no(*bases: str) -> dict[str, str]:
    return dict.fromkeys(bases, "")


def _drawn(std: float) -> do.Change:
    """All matrices are drawn anew."""

    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        for parameter in loop.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=std)

    return change


def _stack(depth: int, gain: float, act: type[nn.Module], width: int = 24) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(12, width), act()]
        for _ in range(depth):
            layers += [nn.Linear(width, width), act()]
            nn.init.normal_(layers[-2].weight, std=gain / width**0.5)  # type: ignore[arg-type]
        return nn.Sequential(*layers, nn.Linear(width, 4))

    return make


def _plain_convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for index in range(24):
        layers += [nn.Conv2d(8 if index else 1, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))


def _long_relu_rnn() -> nn.Module:
    model = Recurrent(nn.RNN, 1, 1, nonlinearity="relu")
    with torch.no_grad():
        model.memory.weight_hh_l0.copy_(1.15 * torch.eye(24))
    return model


def _long_sums(loop: Loop, layer: str) -> None:
    loop.batch = data.sums(length=120)
    loop.clip = None


def _growing(loop: Loop, layer: str) -> None:
    loop.model.get_submodule(layer).growth = 5.0


def _column(value: float, column: int = 0) -> Callable[[Tensor], Tensor]:
    """One feature of all samples."""
    return lambda x: x.index_fill(1, torch.tensor([column]), value)


def _one_sample(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([factor * x[:1], x[1:]])


def _empty(loop: Loop, layer: str) -> None:
    """A batch without samples at step 60."""
    batch = loop.batch
    loop.batch = lambda step: tuple(part[:0] for part in batch(step)) if step == 60 else batch(step)


def _own_angle(out: Tensor) -> Tensor:
    """Adds nearly 0: the angle between a vector and itself, whose derivative is that of an arc cosine at 1."""
    cosine = torch.ones_like(out[:, :1]) + 0 * out[:, :1]
    return out + torch.acos(cosine)


def _to_a_power(out: Tensor) -> Tensor:
    """The root of what a mask set to 0; where torch.relu did, its backward would select, and no NaN would come of it."""
    return out + 0.01 * (out * (out > 0)) ** 0.5


def _own_distance(out: Tensor) -> Tensor:
    """Distances in the batch by hand, each sample's to itself included."""
    flat = out.flatten(1)
    return out + 1e-6 * (flat[:, None] - flat[None]).square().sum(dim=2).sqrt().mean()


def _spread_of_one(out: Tensor) -> Tensor:
    """Divides by the deviation of a single sample."""
    return out / (1 + 0 * out[:1].std(dim=0))


def _exponential(out: Tensor) -> Tensor:
    return torch.exp(out.abs() * 1e3)


def _by_number(value: Tensor) -> Tensor:
    """A loss that forgot what it was made of."""
    return torch.tensor(float(value.detach()), requires_grad=True)


def _zeroed_every(n: int) -> do.Change:
    """zero_grad() once per n steps."""

    def change(loop: Loop, layer: str) -> None:
        def before(loop: Loop, step: int) -> None:
            loop.zeroes = step % n == 1

        loop.before.append(before)

    return change


def _biases_only(loop: Loop, layer: str) -> None:
    """The optimizer is given what a filter of names let through."""
    old = loop.optimizers[0]
    chosen = [parameter for name, parameter in loop.model.named_parameters() if "bias" in name]
    loop.optimizers = [type(old)(chosen, lr=old.defaults["lr"])]


@torch.no_grad()
def _assigned(loop: Loop, layer: str) -> None:
    """A checkpoint is loaded with assign=True: the model has other tensors from then on."""
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict(state, assign=True)


def _overwritten(at: int) -> do.Change:
    """The same checkpoint is loaded after every step."""

    def change(loop: Loop, layer: str) -> None:
        kept: list[dict[str, Tensor]] = []

        def after(loop: Loop, step: int) -> None:
            if step == at - 1:
                kept.append(copy.deepcopy(loop.model.state_dict()))
            if step >= at:
                loop.model.load_state_dict(kept[0])

        loop.after.append(after)

    return change


def _own_decay(value: float) -> do.Change:
    """One layer's decay."""

    def change(loop: Loop, layer: str) -> None:
        do.own_rate(1.0)(loop, layer)
        loop.optimizers[0].param_groups[-1]["weight_decay"] = value

    return change


def _no_gain(loop: Loop, layer: str) -> None:
    """The gain of a batch norm begins at 0."""
    with torch.no_grad():
        loop.model.get_submodule(layer).weight.zero_()


def _unbalanced(loop: Loop, layer: str) -> None:
    """What should balance the experts unbalances them."""

    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        experts = [module for module in model.modules() if isinstance(module, Experts)]
        return next_token(model, *batch) - 1.0 * sum(expert.balance for expert in experts)

    loop.loss = loss


def _blank(loop: Loop, layer: str) -> None:
    """From step 90 the loader returns the same sample 32 times."""
    batch = loop.batch
    kept: list[Batch] = []

    def same(step: int) -> Batch:
        kept.append(batch(step)) if not kept else None
        return tuple(part[:1].expand_as(part) for part in kept[0]) if step >= 90 else batch(step)

    loop.batch = same


FRESH_FAULTS: list[Fault] = [
    Fault("fresh faults", "learning rate 30x and no warm-up", _no(TWICE), do.chain(do.fields(schedule=None), do.learning_rate(30)), 1, "learning rate", (), True),
    Fault("fresh faults", "learning rate 100x from the start", _no(UNET, HYPER), do.learning_rate(100), 1, "learning rate", (), True),
    Fault("fresh faults", "learning rate 10,000,000x too small", _no(MIXER, POINTS), do.learning_rate(1e-7), 1, "zero learning rate", ("no step",), True),
    Fault("fresh faults", "learning rate 1,000x too small", _no(UNET), do.learning_rate(1e-3), 1, "zero learning rate", (), False),
    Fault("fresh faults", "the head's learning rate 300x", {SCAN: "head"}, do.own_rate(300), 1, "learning rate", (), True),
    Fault("fresh faults", "the embedding's learning rate 1000x", {CARRIED: "tokens", MEMORY: "tokens"}, do.own_rate(1000), 1, "learning rate", (), True),
    Fault("fresh faults", "learning rate 100x for 15 steps", _no(MIXER, POINTER), do.learning_rate(100, 100, 115), 100, "learning rate", (), True),
    Fault("fresh faults", "learning rate 1.06x per step from step 60", _no(POINTS, QUEUE), do.learning_rate(lambda step: 1.06 ** (step - 60), 60), 90, "learning rate", ("schedule",), True),
    Fault("fresh faults", "LAMB's learning rate 50x", _no(LAMB), do.learning_rate(50), 1, "learning rate", (), True),
    Fault("fresh faults", "learning rate 500x from step 100, recurrence", _no(CARRIED), do.learning_rate(500, 100), 100, "learning rate", ("recurrence",), True),
    Fault("fresh faults", "all matrices drawn with a deviation of 1", _no(UNET, POINTS), _drawn(1.0), 1, "initialisation", ("depth",), True),
    Fault("fresh faults", "all matrices drawn with a deviation of 1e-4", _no(POINTS, CONV), _drawn(1e-4), 1, "initialisation", ("depth",), True),
    Fault("fresh faults", "a hidden layer of zeros", {PLAIN: "2", REG: "2"}, do.scaled(0.0, bias=0.0), 1, "initialisation", ("symmetry", "dead units", "unused"), True),
    Fault("fresh faults", "gates that begin closed", {SCAN: "blocks.0.inner.1.gate", SPIKES: "inner"}, do.biased(-40.0), 1, "initialisation", ("saturation", "dead units"), True),
    Fault("fresh faults", "40 tanh layers of gain 2", _no(PLAIN), do.rebuilt(_stack(40, 2.0, nn.Tanh)), 1, "depth", ("initialisation", "saturation"), True),
    Fault("fresh faults", "24 plain convolutions", _no(CONV), do.rebuilt(_plain_convolutions), 1, "depth", ("initialisation", "dead units"), True),
    Fault("fresh faults", "40 GELU layers of gain 1", _no(PLAIN), do.rebuilt(_stack(40, 1.0, nn.GELU)), 1, "depth", ("initialisation", "saturation", "dead units"), True),
    Fault("fresh faults", "a squashed layer's input 1000x from step 70", {"MLP, tanh, label smoothing": "2", FIXED: "inputs"}, do.output(lambda out: 1000 * out, 70), 70, "saturation", ("data change", "initialisation"), True),
    Fault("fresh faults", "a state that grows 2.5x with each token", {SCAN: "blocks.1.inner.1"}, _growing, 1, "recurrence", ("initialisation", "depth"), True),
    Fault("fresh faults", "120 steps of a ReLU RNN of gain 1.15", {"tanh RNN, clipped": "memory"}, do.chain(do.rebuilt(_long_relu_rnn), _long_sums), 1, "recurrence", ("initialisation", "learning rate"), True),
    Fault("fresh faults", "biases of -40 in the first layer", {UNET: "first", POINTS: "each.0"}, do.biased(-40.0), 1, "dead units", ("initialisation",), True),
    Fault("fresh faults", "a ReLU after the head, far below 0, from step 60", {HYPER: "writer.2", MIXTURE: "4"}, do.output(lambda out: torch.relu(out - 1e3), 60), 60, "dead units", ("unused",), True),
    Fault("fresh faults", "time stamps as a feature", _no(PLAIN, REG), do.inputs(_column(1.7e9)), 1, "data scale", (), True),
    Fault("fresh faults", "images in bytes from step 80", _no(UNET, MIXER), do.inputs(lambda x: 127 + 60 * x, 80), 80, "data change", ("data scale",), True),
    Fault("fresh faults", "one sample of 32 -10,000x at step 77", _no(POINTS, PLAIN), do.inputs(_one_sample(-1e4), 77, 78), 77, "bad batch", (), True),
    Fault("fresh faults", "a column of NaN", _no(REG, POINTS), do.inputs(_column(float("nan"))), 1, "loss or inputs", ("bad batch",), True),
    Fault("fresh faults", "a feature that is Inf in every tenth batch", _no(TABLE, TASKS), do.inputs(_column(float("inf")), 70, every=10), 70, "bad batch", ("loss or inputs",), True),
    Fault("fresh faults", "a batch without samples", _no(PLAIN, POINTS), _empty, 60, "loss or inputs", ("bad batch", "invalid operation"), True),
    Fault("fresh faults", "targets with 300 added from step 110", _no(REG, MIXTURE), do.inputs(lambda y: y + 300, 110, which=1), 110, "data change", ("data scale",), True),
    Fault("fresh faults", "rewards 1000x from step 120", _no(RETURNS), do.inputs(lambda size: 1000 * size, 120, which=2), 120, "data change", ("data scale",), True),
    Fault("fresh faults", "the same sample 32 times from step 90", _no(CONV), _blank, 90, "data change", (), False),
    Fault("fresh faults", "arc cosine of 1 from step 60", {REG: "2", POINTS: "all.0"}, do.output(_own_angle, 60), 60, "invalid operation", ("loss or inputs",), True),
    Fault("fresh faults", "a power of 0.5 of what a mask set to 0, from step 50", {CONV: "2", HYPER: "writer.0"}, do.output(_to_a_power, 50), 50, "invalid operation", ("loss or inputs",), True),
    Fault("fresh faults", "distances within the batch, by hand", {QUEUE: "2", MIXER: "head"}, do.output(_own_distance), 1, "invalid operation", ("loss or inputs",), True),
    Fault("fresh faults", "the deviation of one sample at step 95", {MIXTURE: "2", SPIKES: "inner"}, do.output(_spread_of_one, 95), 95, "invalid operation", ("loss or inputs", "bad batch"), True),
    Fault("fresh faults", "an exponential overflows from step 70", {REG: "2", UNET: "out"}, do.output(_exponential, 70), 70, "overflow", ("invalid operation", "loss or inputs"), True),
    Fault("fresh faults", "NaN in the loss at each step under a scaler", _no("float16, scaler"), do.loss(lambda value: value * float("nan"), 60), 60, "loss or inputs", ("invalid operation",), True),
    Fault("fresh faults", "bfloat16 parameters and a learning rate that is rounded away", _no("bfloat16 parameters"), do.learning_rate(1e-4), 1, "zero learning rate", ("underflow", "optimizer", "no step"), True),
    Fault("fresh faults", "loss times 1e-22", _no(MIXER, POINTS), do.loss(lambda value: value * 1e-22), 1, "reduction", ("underflow",), True),
    Fault("fresh faults", "loss times 1e-22, SGD", _no(PLAIN), do.loss(lambda value: value * 1e-22), 1, "reduction", ("underflow", "zero learning rate"), True),
    Fault("fresh faults", "a backward that returns 3000x from step 120", {UNET: "down", POINTS: "each.2"}, do.backward(lambda grad: 3e3 * grad, 120), 120, "backward", ("invalid operation", "depth"), True),
    Fault("fresh faults", "the loss is maximised", _no(REG, PLAIN), do.loss(torch.neg), 1, "sign", (), True),
    Fault("fresh faults", "the loss is maximised from step 80", _no(UNET, POINTER), do.loss(torch.neg, 80), 80, "sign", ("data change",), True),
    Fault("fresh faults", "the loss is made of a number", _no(PLAIN, SCAN), do.loss(_by_number), 1, "unused", (), True),
    Fault("fresh faults", "the loss is made of a number from step 80", _no(UNET, REG), do.loss(_by_number, 80), 80, "unused", (), True),
    Fault("fresh faults", "step before backward", _no(MIXER, PLAIN), do.step_first, 1, "zeroed", ("no step", "unused"), True),
    Fault("fresh faults", "zero_grad() once per 50 steps", _no(UNET, HYPER), _zeroed_every(50), 2, "zero_grad", (), True),
    Fault("fresh faults", "the optimizer has only the biases", _no(CONV, POINTS), _biases_only, 1, "unowned", (), True),
    Fault("fresh faults", "a checkpoint loaded with assign=True", _no(MIXER, HYPER), _assigned, 1, "stale optimizer", ("unowned", "no step"), True),
    Fault("fresh faults", "a checkpoint loaded with assign=True at step 90", _no(UNET, REG), do.at_step(_assigned, 90), 90, "stale optimizer", ("unowned", "no step"), True),
    Fault("fresh faults", "the same checkpoint is loaded after each step", _no(CONV, REG), _overwritten(60), 60, "undone", ("no step", "zero learning rate"), True),
    Fault("fresh faults", "an encoder without gradients", {POINTS: "each", HYPER: "writer.0"}, do.output(torch.Tensor.detach), 1, "unused", (), True),
    Fault("fresh faults", "a generator's samples detached", {"GAN": "generator"}, do.output(torch.Tensor.detach), 1, "unused", (), True),
    Fault("fresh faults", "an encoder without gradients from step 80", {UNET: "down", POINTER: "memory"}, do.at_step(lambda loop, layer: loop.model.get_submodule(layer).requires_grad_(False), 80), 80, "unused", (), False),
    Fault("fresh faults", "Adam's averages swapped", _no(UNET, MIXER), do.groups(betas=(0.999, 0.9)), 1, "optimizer", ("learning rate",), False),
    Fault("fresh faults", "momentum of 1.05", _no(PLAIN, NORM), do.groups(momentum=1.05, nesterov=False), 1, "optimizer", ("learning rate",), True),
    Fault("fresh faults", "decay below 0", _no(PLAIN), do.groups(weight_decay=-8.0), 1, "decay", (), True),
    Fault("fresh faults", "the embedding's decay of 60", {LAMB: "tokens", MEMORY: "tokens"}, do.chain(do.optimizer(lambda p: torch.optim.AdamW(p, lr=3e-3)), _own_decay(60.0)), 1, "decay", (), True),
    Fault("fresh faults", "each value clipped to 1e-7", _no(PLAIN), do.received(do.clip_values), 1, "clipping", ("zero learning rate",), True),
    Fault("fresh faults", "clipped to a norm of 1e-6 from step 70", _no(PLAIN, NORM), do.at_step(lambda loop, layer: setattr(loop, "clip", 1e-6), 70), 70, "clipping", ("zero learning rate",), True),
    Fault("fresh faults", "a gain of 0 in a batch norm", {NORM: "4"}, _no_gain, 1, "initialisation", ("dead units", "batch norm", "unused", "symmetry"), True),
    Fault("fresh faults", "a temperature of 1e-4", {POINTER: "score", QUEUE: "2"}, do.output(lambda out: 1e4 * out), 1, "saturation", ("initialisation", "data scale", "attention"), True),
    Fault("fresh faults", "keys 1000x from step 80", {TWICE: "blocks.1.attention.qkv"}, do.output(lambda out: 1000 * out, 80), 80, "attention", ("saturation", "data change"), True),
    Fault("fresh faults", "experts unbalanced by their balance", {"experts, one per token": "blocks.0.mlp.router"}, _unbalanced, 1, "routing", ("dead units", "unused"), True),
    Fault("fresh faults", "the router's logits 10,000x from step 80", {"experts, two per token": "blocks.0.mlp.router"}, do.output(lambda out: 1e4 * out, 80), 80, "routing", ("saturation",), True),
]  # fmt: skip
