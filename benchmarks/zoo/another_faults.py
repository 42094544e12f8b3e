"""Faults of each kind in one training that is opened and in another one that is locked, with what is known of them.

Written before any of them was run under `watch`; that each does harm was looked up in the losses alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from . import changes as do
from .another_models import Gated, Heads
from .faults import Fault
from .loop import Loop

GPT, VIT, RES, LSTM, AE = "small GPT, rotary", "class token on patches", "bottlenecks", "LSTM that sorts", "autoencoder of images"  # fmt: skip
VAE, GAN, PPO, CLIP, GCN = (
    "VAE of bits",
    "GAN of images, hinge",
    "PPO, a mass on a line",
    "two towers",
    "graph convolutions",
)
NERF, LORA, MOE = "rays through a field", "updates of low rank", "gated experts for pieces"
TIED, NEXT, DENSE, GRU, UNET = "small GPT, tied", "depthwise convolutions", "dense blocks", "GRU that mirrors", "U-Net against noise"  # fmt: skip
FLOW, WGAN, DQN, VIEWS, GAT = (
    "coupled layers",
    "Wasserstein GAN",
    "DQN, a mass on a line",
    "two views of an image",
    "graph attention",
)
TABLE, STUDENT, SWITCH = "a table of names, two tasks", "a student and a teacher", "one expert per word"


def deepened(depth: int, act: type[nn.Module], gain: float | None = None) -> do.Change:
    """A layer becomes many, before the optimizer has seen it."""

    def change(loop: Loop, layer: str) -> None:
        old = loop.model.get_submodule(layer)
        layers: list[nn.Module] = [nn.Linear(old.in_features, 24), act()]
        for _ in range(depth):
            layers += [nn.Linear(24, 24), act()]
            if gain is not None:
                nn.init.normal_(layers[-2].weight, std=gain / math.sqrt(24))  # type: ignore[arg-type]
        parent, _, name = layer.rpartition(".")
        setattr(loop.model.get_submodule(parent), name, nn.Sequential(*layers, nn.Linear(24, old.out_features)))
        loop.optimizers[0].param_groups[0]["params"] = list(loop.model.parameters())

    return change


def _relu_recurrences(loop: Loop, layer: str) -> None:
    """Encoder and decoder without gates, of gain 3, and nothing is clipped."""
    for name in ("encoder", "decoder"):
        memory = nn.RNN(16, 32, nonlinearity="relu", batch_first=True)
        nn.init.orthogonal_(memory.weight_hh_l0, gain=3.0)
        setattr(loop.model, name, memory)
    loop.optimizers[0].param_groups[0]["params"] = list(loop.model.parameters())
    loop.clip = None


@torch.no_grad()
def _closed_gates(loop: Loop, layer: str) -> None:
    """What is remembered is forgotten at once: the second gate of an LSTM, and of a GRU."""
    memory = loop.model.get_submodule(layer)
    memory.bias_hh_l0[32:64] = -20.0


def _last_feature(factor: float) -> do.Transform:
    return lambda x: torch.cat([x[..., :-1], factor * x[..., -1:]], dim=-1)


def _shuffled(y: Tensor) -> Tensor:
    return y[torch.randperm(len(y))]


def _logarithm(out: Tensor) -> Tensor:
    return out + 1e-3 * torch.log(out * (out > 0))


def _root(out: Tensor) -> Tensor:
    """Finite in the forward; the root's derivative at 0 is not."""
    return out + 0.01 * (out * (out > 0)).sqrt()


def _selected_root(out: Tensor) -> Tensor:
    """A root where there is one; torch.where does not keep the other half out of the backward."""
    return out + 0.01 * torch.where(out > 0, out.sqrt(), 0.0)


def _forgetful(loop: Loop, layer: str) -> None:
    """From step 60 the average of squares begins anew with each step."""
    loop.before.append(lambda loop, step: do.forgotten_squares(loop, layer) if step >= 60 else None)


def _head_only(loop: Loop, layer: str) -> None:
    old = loop.optimizers[0]
    head = [module for module in loop.model.modules() if isinstance(module, nn.Linear)][-1]
    loop.optimizers = [type(old)(head.parameters(), lr=old.defaults["lr"], momentum=0.9)]


def _clipped_scaled(loop: Loop, layer: str) -> None:
    loop.scaler = torch.amp.GradScaler("cpu")
    loop.received.append(do.clip_scaled)


def _generator_rate(loop: Loop, layer: str) -> None:
    loop.optimizers[1].param_groups[0]["lr"] *= 300


def _constant_normed(loop: Loop, layer: str) -> None:
    """Blank images at step 90, and nothing keeps the deviation from 0."""
    for module in loop.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-30
    do.inputs(torch.zeros_like, 90, 91)(loop, layer)


def logits(transform: do.Transform, at: int = 1) -> do.Change:
    """The logits of every attention."""

    def change(loop: Loop, layer: str) -> None:
        for name, module in loop.model.named_modules():
            if isinstance(module, Heads):
                do.output(transform, at)(loop, name + ".logits")

    return change


def _unbalanced(loop: Loop, layer: str) -> None:
    """What should balance the experts has the wrong sign, and weight."""
    before = loop.loss
    loop.loss = lambda model, *batch: (
        before(model, *batch) - 1.0 * sum(module.balance for module in model.modules() if isinstance(module, Gated))
    )


# (name, the opened training and the layer in it, the locked one and its layer, change, first bad step, cause, also, decidable)
ANOTHER_FAULTS: list[tuple[str, tuple[str, str], tuple[str, str], do.Change, int, str, tuple[str, ...], bool]] = [
    ("learning rate 200x from the first step", (GPT, ""), (SWITCH, ""), do.learning_rate(200), 1, "learning rate", (), True),
    ("learning rate 100x from the first step, no schedule", (NERF, ""), (FLOW, ""), do.learning_rate(100), 1, "learning rate", (), True),
    ("learning rate 30x, warm-up left out", (VIT, ""), (TIED, ""), do.chain(do.fields(schedule=None), do.learning_rate(30)), 1, "learning rate", (), True),
    ("learning rate raised 100x at step 90", (LSTM, ""), (TABLE, ""), do.learning_rate(100, 90), 90, "learning rate", (), True),
    ("three updates of 500x at step 70", (RES, ""), (VIEWS, ""), do.learning_rate(500, 70, 73), 70, "learning rate", ("dead units",), True),
    ("learning rate 1,000,000x too small", (GCN, ""), (GAT, ""), do.learning_rate(1e-6), 1, "zero learning rate", ("no step",), True),
    ("learning rate grows by a tenth per step from step 60", (AE, ""), (UNET, ""), do.learning_rate(lambda step: 1.1 ** (step - 60), 60), 80, "learning rate", ("schedule",), True),
    ("the last layer's learning rate 1000x", (LSTM, "head"), (UNET, "out"), do.own_rate(1000), 1, "learning rate", (), True),
    ("the generator's learning rate 300x", (GAN, "generator"), (WGAN, "generator"), _generator_rate, 1, "learning rate", (), True),
    ("all matrices 20x", (NERF, ""), (GAT, ""), do.scaled(20.0, every=True), 1, "initialisation", ("depth", "saturation"), True),
    ("all matrices 0.0001x, biases 0", (AE, ""), (GAT, ""), do.scaled(1e-4, every=True, bias=0.0), 1, "initialisation", ("depth",), True),
    ("all matrices filled with 0.05", (AE, ""), (STUDENT, ""), do.filled(0.05), 1, "symmetry", ("initialisation",), True),
    ("the trained matrices begin at 0", (LORA, ""), (TABLE, ""), do.filled(0.0), 1, "symmetry", ("initialisation", "unused", "dead units"), True),
    ("the head's weights 300x", (VIT, "head"), (NEXT, "head"), do.scaled(300.0), 1, "initialisation", ("saturation",), True),
    ("a hidden layer begins at 0", (GCN, "outer"), (STUDENT, "2"), do.scaled(0.0, bias=0.0), 1, "initialisation", ("symmetry", "dead units", "unused"), True),
    ("fifty plain ReLU layers", (GCN, "head.0"), (GAT, "head.0"), deepened(50, nn.ReLU), 1, "depth", ("initialisation", "dead units", "saturation"), True),
    ("25 linear layers of gain 2.5", (NERF, "net.0"), (TABLE, "trunk.0"), deepened(25, nn.Identity, 2.5), 1, "depth", ("initialisation",), True),
    ("30 tanh layers of gain 0.3", (MOE, "0"), (GAT, "head.2"), deepened(30, nn.Tanh, 0.3), 1, "depth", ("initialisation", "saturation"), True),
    ("recurrent weights 12x", (LSTM, "encoder"), (GRU, "encoder"), do.scaled(12.0), 1, "recurrence", ("initialisation", "saturation"), True),
    ("ReLU recurrences of gain 3", (LSTM, ""), (GRU, ""), _relu_recurrences, 1, "recurrence", ("initialisation", "learning rate"), True),
    ("gates that forget at once", (LSTM, "encoder"), (GRU, "encoder"), _closed_gates, 1, "recurrence", ("initialisation", "saturation"), False),
    ("biases of -30 before a ReLU", (AE, "encoder.0"), (STUDENT, "0"), do.biased(-30.0), 1, "dead units", ("initialisation",), True),
    ("two updates of 2000x at step 50", (NERF, ""), (TABLE, ""), do.learning_rate(2000, 50, 52), 50, "learning rate", ("dead units",), True),
    ("one batch 10,000x at step 100", (AE, ""), (UNET, ""), do.inputs(lambda x: 1e4 * x, 100, 101), 100, "bad batch", (), True),
    ("features around 500, never normalised", (GCN, ""), (GAT, ""), do.inputs(lambda x: 500 + 200 * x, which=1), 1, "data scale", (), True),
    ("one feature in other units, 1,000,000x", (GCN, ""), (TABLE, ""), do.inputs(_last_feature(1e6), which=1), 1, "data scale", (), True),
    ("blank inputs from step 60", (RES, ""), (NEXT, ""), do.inputs(torch.zeros_like, 60), 60, "data change", ("bad batch",), True),
    ("NaN in one sample at step 70", (CLIP, ""), (VIEWS, ""), do.inputs(do.first_sample(math.nan), 70, 71), 70, "bad batch", ("loss or inputs",), True),
    ("NaN in one sample of every batch from step 60", (AE, ""), (FLOW, ""), do.inputs(do.first_sample(math.nan), 60), 60, "loss or inputs", ("bad batch",), True),
    ("labels shuffled from step 80", (VIT, ""), (DENSE, ""), do.inputs(_shuffled, 80, which=-1), 80, "data change", (), True),
    ("targets of 0 to 255 instead of 0 to 1", (NERF, ""), (TABLE, ""), do.inputs(lambda y: 255 * y, which=-1), 1, "data scale", (), True),
    ("one target of 100,000 at step 110", (NERF, ""), (TABLE, ""), do.inputs(do.first_sample(1e5), 110, 111, which=-1), 110, "bad batch", (), True),
    ("rewards 300x from step 121", (PPO, ""), (DQN, ""), do.inputs(lambda y: 300 * y, 121, which=-1), 121, "data change", ("data scale",), True),
    ("logarithm of 0 in a layer from step 60", (VAE, "encoder.0"), (TABLE, "trunk.0"), do.output(_logarithm, 60), 60, "invalid operation", ("loss or inputs",), True),
    ("root at 0 in a layer from step 40", (GCN, "outer"), (GAT, "outer"), do.output(_root, 40), 40, "invalid operation", ("loss or inputs",), True),
    ("a mean without weights at step 90", (MOE, "1"), (FLOW, "layers.2"), do.output(do.no_weights, 90, 91), 90, "invalid operation", ("loss or inputs", "bad batch"), True),
    ("an exponential beyond float32 from step 70", (VAE, "encoder"), (UNET, "middle"), do.output(lambda out: torch.exp(1e3 * out.abs()), 70), 70, "overflow", ("invalid operation", "loss or inputs"), True),
    ("logarithm of 0 in the loss from step 75", (CLIP, ""), (VIEWS, ""), do.loss(lambda value: value - 1e-3 * torch.log(0 * value), 75), 75, "invalid operation", ("loss or inputs",), True),
    ("0/0 in the loss at step 95", (PPO, ""), (DQN, ""), do.loss(do.no_weights, 95, 96), 95, "loss or inputs", ("invalid operation", "bad batch"), True),
    ("norm at 0 from the first step", (AE, "encoder.0"), (DENSE, "stem"), do.output(do.norm_of_zeros), 1, "invalid operation", ("loss or inputs",), True),
    ("a root under torch.where from step 50", (RES, "0"), (TABLE, "trunk.0"), do.output(_selected_root, 50), 50, "invalid operation", ("loss or inputs",), True),
    ("a backward that returns 10,000x from step 80", (CLIP, "seen"), (VIEWS, "5"), do.backward(lambda grad: 1e4 * grad, 80), 80, "backward", ("invalid operation", "depth"), True),
    ("loss 10,000x", (CLIP, ""), (VIEWS, ""), do.loss(lambda value: 1e4 * value), 1, "data scale", ("reduction", "learning rate"), True),
    ("loss / 1e9", (RES, ""), (DENSE, ""), do.loss(lambda value: value / 1e9), 1, "reduction", ("zero learning rate", "underflow"), True),
    ("eps = 0 and gradients of 0", (LORA, ""), (TABLE, "names.2"), do.groups(eps=0.0), 1, "optimizer", (), True),
    ("parameters in float16", (GCN, ""), (GAT, ""), do.halved, 1, "optimizer", ("overflow", "underflow"), True),
    ("the average of squares is lost at each step from step 60", (LSTM, ""), (UNET, ""), _forgetful, 60, "optimizer", ("learning rate",), True),
    ("gradients switched off at step 40", (AE, "encoder"), (VIEWS, "0"), do.at_step(lambda loop, layer: loop.model.get_submodule(layer).requires_grad_(False), 40), 40, "unused", (), False),
    ("detached", (VAE, "encoder"), (TABLE, "trunk"), do.output(torch.Tensor.detach), 1, "unused", (), True),
    ("detached from step 15", (AE, "encoder"), (STUDENT, "2"), do.output(torch.Tensor.detach, 15), 15, "unused", (), True),
    ("the generator's images detached", (GAN, "generator"), (WGAN, "generator"), do.output(torch.Tensor.detach), 1, "unused", (), True),
    ("the optimizer has a copy's parameters", (GCN, ""), (GAT, ""), do.another_model, 1, "stale optimizer", ("unowned", "no step"), True),
    ("the optimizer has only the head", (RES, ""), (DENSE, ""), _head_only, 1, "unowned", (), True),
    ("no zero_grad()", (CLIP, ""), (VIEWS, ""), do.fields(zeroes=False), 2, "zero_grad", (), True),
    ("step before backward", (VAE, ""), (FLOW, ""), do.step_first, 1, "zeroed", ("no step", "unused"), True),
    ("zero_grad() between backward and step", (NERF, ""), (UNET, ""), do.received(do.zero_gradients), 1, "zeroed", (), True),
    ("the head is replaced at step 50", (VIT, "head"), (NEXT, "head"), do.at_step(do.replaced_layer, 50), 50, "unowned", ("stale optimizer",), True),
    ("no step()", (PPO, ""), (DQN, ""), do.fields(applies=False), 1, "no step", (), True),
    ("the loss is maximised from step 60", (LSTM, ""), (GRU, ""), do.loss(torch.neg, 60), 60, "sign", ("data change",), True),
    ("restart at 200x at step 80", (LORA, ""), (SWITCH, ""), do.learning_rate(lambda step: 200 * 0.95 ** (step - 80), 80), 80, "learning rate", ("schedule",), True),
    ("the schedule ends at 0 at step 30", (VIT, ""), (TIED, ""), do.learning_rate(lambda step: max(0.0, 1 - step / 30)), 30, "zero learning rate", ("schedule",), True),
    ("a schedule below 0", (AE, ""), (NEXT, ""), do.learning_rate(-1.0), 1, "schedule", ("sign", "learning rate"), True),
    ("clipped to a norm of 1e-7", (RES, ""), (DENSE, ""), do.fields(clip=1e-7), 1, "clipping", ("zero learning rate",), True),
    ("each value clipped to 1e-7", (CLIP, ""), (VIEWS, ""), do.received(do.clip_values), 1, "clipping", ("zero learning rate",), True),
    ("clipped before unscale_()", (RES, ""), (DENSE, ""), _clipped_scaled, 1, "unscale", ("clipping",), True),
    ("decay of 30 on everything", (GPT, ""), (TIED, ""), do.groups(weight_decay=30.0), 1, "decay", (), True),
    ("squares of the parameters in the loss, weight 3", (NERF, ""), (FLOW, ""), do.penalised(3.0), 1, "decay", (), True),
    ("batches of two", (RES, ""), (DENSE, ""), do.chain(do.inputs(lambda x: x[:2]), do.inputs(lambda y: y[:2], which=1)), 1, "batch norm", (), False),
    ("eps = 1e-30 and a blank batch at step 90", (RES, ""), (DENSE, ""), _constant_normed, 90, "batch norm", ("invalid operation", "bad batch", "loss or inputs"), True),
    ("all logits of attention 1000x", (VIT, ""), (SWITCH, ""), logits(lambda out: 1000 * out), 1, "attention", ("saturation", "initialisation"), True),
    ("all logits of attention 1000x from step 40", (VIT, ""), (SWITCH, ""), logits(lambda out: 1000 * out, 40), 40, "attention", ("saturation", "data change"), True),
    ("a sample that may attend to nothing at step 90", (GPT, ""), (TIED, ""), logits(do.first_sample(-math.inf), 90), 90, "attention", ("invalid operation", "loss or inputs"), True),
    ("one expert gets everything", (MOE, "1.gate"), (SWITCH, "layers.0.inner.gate"), do.output(lambda out: out + 50.0 * (torch.arange(out.shape[-1]) == 0)), 1, "routing", ("dead units", "unused"), True),
    ("the balance of experts has the wrong sign", (MOE, "1.gate"), (SWITCH, "layers.0.inner.gate"), _unbalanced, 1, "routing", ("dead units", "unused"), True),
]  # fmt: skip


def faults(family: str, which: int) -> list[Fault]:
    """0: in the trainings that are opened, 1: in the locked ones."""
    return [
        Fault(family, name, dict([on[which]]), change, first_bad, cause, also, decidable)
        for name, *on, change, first_bad, cause, also, decidable in ANOTHER_FAULTS
    ]
