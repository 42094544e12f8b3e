"""Faults as people make them, written down before any of them was run under `watch`: every second one is locked.

An open fault sits in an open training, a locked one in a locked one.
"""

from __future__ import annotations

import copy
import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import changes as do
from .another_faults import deepened
from .faults import Fault
from .fourth_trainings import contrast
from .loop import Loop
from .third_trainings import follow

FIRST, MODULAR = "which word comes first, norm last, warm-up", "added modulo 11, norm first"
HOUSES, SELU = "houses, batch norm, Huber", "self-normalising, NAdam"
WAVES, FINER = "waves, ever wider, float16", "finer pictures, absolute differences"
COPY, MARKED = "a sequence said again", "two marked numbers, a recurrence of the identity"
TAGS, LIKE = "tags, the rare ones weigh 3", "likenesses of a class"
ADVANTAGE, DUEL = "imitated by advantage", "value and advantages apart"
SPARSE, BITS = "few of many features", "bits one by one, float16"
WIDE, TOPICS = "names and numbers, two optimizers", "topics by windows, two batches"


def _first_optimizer(factor: float) -> do.Change:
    def change(loop: Loop, layer: str) -> None:
        for group in loop.optimizers[0].param_groups:
            group["lr"] *= factor

    return change


def _second_optimizer(loop: Loop, layer: str) -> None:
    """An Adam that was left behind steps the same parameters, at a rate of 0.3."""
    loop.optimizers.append(torch.optim.Adam(loop.model.parameters(), lr=0.3))


def _only(layer_kept: str) -> do.Change:
    """The optimizer is given one layer's parameters alone."""

    def change(loop: Loop, layer: str) -> None:
        loop.optimizers[0].param_groups[0]["params"] = list(loop.model.get_submodule(layer_kept).parameters())

    return change


def _average_put_back(loop: Loop, layer: str) -> None:
    average = copy.deepcopy(loop.model)

    def put(loop: Loop, step: int) -> None:
        follow(average, loop.model, 1e-3)
        follow(loop.model, average, 1.0)

    loop.after.append(put)


def _restored(at: int) -> do.Change:
    """The best weights are loaded after each step from this one on."""

    def change(loop: Loop, layer: str) -> None:
        best: list[nn.Module] = []

        def restore(loop: Loop, step: int) -> None:
            if step == at - 1:
                best.append(copy.deepcopy(loop.model))
            elif step >= at:
                follow(loop.model, best[0], 1.0)

        loop.after.append(restore)

    return change


def _again(std: float) -> do.Change:
    """The matrices of a layer are drawn anew."""

    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        for name, parameter in loop.model.named_parameters():
            if parameter.dim() > 1 and name.startswith(layer):
                parameter.normal_(std=std)

    return change


@torch.no_grad()
def _transposed(loop: Loop, layer: str) -> None:
    weight = loop.model.get_submodule(layer).weight
    weight.copy_(30 * weight.T.clone())


def _poisoned(value: float) -> do.Change:
    def change(loop: Loop, layer: str) -> None:
        with torch.no_grad():
            loop.model.get_submodule(layer).weight.view(-1)[0] = value

    return change


def _column(factor: float) -> do.Transform:
    def changed(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 1] = factor * x[:, 1]
        return x

    return changed


def _first(value: float) -> do.Transform:
    def changed(x: Tensor) -> Tensor:
        x = x.clone()
        x.view(len(x), -1)[0, 0] = value
        return x

    return changed


def _one_topic_at_a_time(loop: Loop, layer: str) -> None:
    """Sorted by label: 15 steps of one topic, then 15 of the next."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        topic = torch.full((32,), (step - 1) // 15 % 5)
        own = 10 * topic[:, None] + torch.randint(0, 10, (32, 14))
        return torch.where(torch.rand(32, 14) < 0.3, own, torch.randint(0, 50, (32, 14))), topic

    loop.batch = batch


def _stuck_scale(loop: Loop, layer: str) -> None:
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=0.99)


def _unit_eps(loop: Loop, layer: str) -> None:
    for module in loop.model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eps = 1e-30


def _hot(model_scale: float) -> do.Change:
    def change(loop: Loop, layer: str) -> None:
        for module in loop.model.modules():
            if hasattr(module, "scale"):
                module.scale = model_scale

    return change


def _log_sigmoid(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share = torch.sigmoid(60 * model(x))
    return -(y * share.log() + (1 - y) * (1 - share).log()).mean()


def _no_sigmoid(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    said = model(x)
    return -(y * said.log() + (1 - y) * (1 - said).log()).mean()


def _softmax_in_half(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    share = (8 * model(x).half()).exp()
    return -(share / share.sum(dim=1, keepdim=True)).float().clamp(min=1e-6).log()[torch.arange(len(y)), y].mean()


def _apart_by_root(model: nn.Module, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
    place = functional.normalize(model(a), dim=1)
    far = (place[:, None] - place).square().sum(dim=2).sqrt()
    return contrast(model, a, b, label) - 0.01 * far.mean()


def _of_length_one(model: nn.Module, x: Tensor) -> Tensor:
    x = x / x.square().sum(dim=1, keepdim=True).sqrt()
    return (model["speaker"](model["coder"](x)) - x).square().mean()


def _mean_of_tens(model: nn.Module, tokens: Tensor, aim: Tensor) -> Tensor:
    each = functional.cross_entropy(model(tokens), aim, reduction="none")
    return each.mean() + 0.1 * (each * (aim == 10)).sum() / (aim == 10).sum()


@torch.no_grad()
def _tripled(loop: Loop, layer: str) -> None:
    loop.model.memory.weight_hh_l0.mul_(3.0)


# (name, training, layer, change, first bad step, cause, also)
_FAULTS: list[tuple[str, str, str, do.Change, int, str, tuple[str, ...]]] = [
    ("a rate of 0.2 for AdamW, no warm-up", FIRST, "", do.chain(do.fields(schedule=None), do.learning_rate(100)), 1, "learning rate", ()),
    ("NAdam at 100x", SELU, "", do.learning_rate(100), 1, "learning rate", ()),
    ("no warm-up, 15x", FIRST, "", do.chain(do.fields(schedule=None), do.learning_rate(15)), 1, "learning rate", ()),
    ("warm-up that ends at 200x", MODULAR, "", do.learning_rate(lambda step: min(200.0, 1 + 4 * step)), 5, "learning rate", ("schedule",)),
    ("a restart at 100x at step 100", WAVES, "", do.learning_rate(lambda step: 100 * 0.98 ** (step - 100), 100), 100, "learning rate", ("schedule",)),
    ("a restart at 300x at step 80", FINER, "", do.learning_rate(lambda step: 300 * 0.98 ** (step - 80), 80), 80, "learning rate", ("schedule",)),
    ("the embeddings' rate 1000x", WIDE, "names", _first_optimizer(1000.0), 1, "learning rate", ()),
    ("the head's group at 1000x", TOPICS, "head", do.own_rate(1000.0), 1, "learning rate", ()),
    ("halved at each batch, not each epoch", COPY, "", do.learning_rate(lambda step: 0.5**step), 12, "zero learning rate", ("schedule",)),
    ("gamma 1.1 instead of 0.9", BITS, "", do.learning_rate(lambda step: 1.1**step), 40, "learning rate", ("schedule",)),
    ("the body's group at a rate of 0", HOUSES, "0", do.own_rate(0.0), 1, "zero learning rate", ("unowned", "unused", "no step")),
    ("warm-up by integers: 0 for 1000 steps", LIKE, "", do.learning_rate(lambda step: step // 1000), 1, "zero learning rate", ("no step", "schedule")),
    ("warm-up without an end", TAGS, "", do.learning_rate(lambda step: 2.0 * step), 20, "learning rate", ("schedule",)),
    ("1e-8 for 1e-3", DUEL, "", do.learning_rate(1e-5), 1, "zero learning rate", ("no step",)),
    ("momentum of 0.999", HOUSES, "", do.groups(momentum=0.999), 1, "learning rate", ("optimizer",)),
    ("beta2 of 0.5, and the rate of 0.1", MARKED, "", do.chain(do.groups(betas=(0.9, 0.5)), do.learning_rate(50)), 1, "learning rate", ("optimizer", "recurrence")),
    ("eps of 1e4 for 1e-8", SPARSE, "", do.groups(eps=1e4), 1, "optimizer", ("zero learning rate", "no step")),
    ("eps of 1e3", BITS, "", do.groups(eps=1e3), 1, "optimizer", ("zero learning rate", "no step")),
    ("decoupled decay of 100", FIRST, "", do.groups(weight_decay=100.0), 1, "decay", ()),
    ("decay of 10 in the gradient", SELU, "", do.groups(weight_decay=10.0), 1, "decay", ()),
    ("clipped to 1e-6", HOUSES, "", do.fields(clip=1e-6), 1, "clipping", ("zero learning rate",)),
    ("each value clipped to 1e-7", FINER, "", do.received(do.clip_values), 1, "clipping", ("zero learning rate",)),
    ("clipped before unscale_()", WAVES, "", do.received(do.clip_scaled), 1, "unscale", ("clipping",)),
    ("a scale of 2**60 that hardly falls", BITS, "", _stuck_scale, 1, "loss scale", ("overflow", "no step")),
    ("zero_grad() after the backward", ADVANTAGE, "", do.received(do.zero_gradients), 1, "zeroed", ()),
    ("zero_grad(set_to_none=False) after the backward", TOPICS, "", do.received(lambda loop, step: [o.zero_grad(set_to_none=False) for o in loop.optimizers] and None), 1, "zeroed", ()),
    ("zero_grad() is missing", TAGS, "", do.fields(zeroes=False), 2, "zero_grad", ()),
    ("zero_grad() is missing from step 50", MARKED, "", do.at_step(lambda loop, layer: setattr(loop, "zeroes", False), 50), 50, "zero_grad", ()),
    ("summed over the batch, SGD", HOUSES, "", do.loss(lambda value: 64 * value), 1, "data scale", ("learning rate", "reduction")),
    ("summed over pixels, SGD", FINER, "", do.loss(lambda value: 8 * 144 * value), 1, "data scale", ("learning rate", "reduction")),
    ("a second optimizer steps as well", HOUSES, "", _second_optimizer, 1, "optimizer", ("learning rate", "undone")),
    ("a resume loses Adam's squares at step 100", LIKE, "", do.at_step(do.forgotten_squares, 100), 100, "optimizer", ("learning rate",)),
    ("the average is put back", FIRST, "", _average_put_back, 1, "undone", ("no step", "zero learning rate")),
    ("the best weights are loaded after each step from 60 on", DUEL, "", _restored(60), 60, "undone", ("no step",)),
    ("a layer drawn anew at step 80", COPY, "decoder", do.at_step(_again(3.0), 80), 80, "bad parameter", ("initialisation", "undone", "data change", "recurrence", "saturation")),
    ("a layer transposed, 30x, at step 70", MODULAR, "blocks.1.attention.out", do.at_step(_transposed, 70), 70, "bad parameter", ("initialisation", "undone", "data change")),
    ("weights of deviation 1", TAGS, "", _again(1.0), 1, "initialisation", ("saturation", "depth")),
    ("weights of deviation 1e-4", SELU, "", _again(1e-4), 1, "initialisation", ("depth",)),
    ("all weights and biases are 0", SPARSE, "", do.chain(do.filled(0.0), do.scaled(0.0, bias=0.0, every=True)), 1, "symmetry", ("initialisation", "dead units")),
    ("every weight is 0.1", LIKE, "", do.filled(0.1), 1, "symmetry", ("initialisation",)),
    ("an embedding of deviation 100", WIDE, "names", do.scaled(100.0), 1, "initialisation", ("data scale",)),
    ("a recurrence of 3 times the identity", MARKED, "memory", _tripled, 1, "recurrence", ("initialisation",)),
    ("twenty tanh layers of gain 0.3", TAGS, "2", deepened(20, nn.Tanh, 0.3), 1, "depth", ("initialisation",)),
    ("twenty-five ReLU layers of gain 0.5", LIKE, "2", deepened(25, nn.ReLU, 0.5), 1, "depth", ("initialisation", "dead units")),
    ("inputs 10,000x", TAGS, "", do.inputs(lambda x: 1e4 * x), 1, "data scale", ("initialisation",)),
    ("one column in millions", SELU, "", do.inputs(_column(1e6)), 1, "data scale", ()),
    ("one input is NaN at step 70", TAGS, "", do.inputs(_first(math.nan), 70, 71), 70, "bad batch", ("loss or inputs",)),
    ("one target is Inf at step 60", FINER, "", do.inputs(_first(math.inf), 60, 61, which=1), 60, "bad batch", ("loss or inputs",)),
    ("one batch 10,000x at step 90", SPARSE, "", do.inputs(lambda x: 1e4 * x, 90, 91), 90, "bad batch", ()),
    ("one batch in other units, 1000x, at step 80", FINER, "", do.inputs(lambda x: 1e3 * x, 80, 81), 80, "bad batch", ()),
    ("silence from step 60 on", WAVES, "", do.inputs(torch.zeros_like, 60), 60, "data change", ("bad batch", "dead units")),
    ("bytes from step 60 on", FINER, "", do.inputs(lambda x: 255 * x, 60), 60, "data change", ("data scale",)),
    ("labels shuffled from step 110 on", FIRST, "", do.inputs(lambda y: y[torch.randperm(len(y))], 110, which=2), 110, "data change", ()),
    ("sorted by label, 15 steps each", TOPICS, "", _one_topic_at_a_time, 1, "data change", ("bad batch",)),
    ("rewards 1000x from step 80 on", ADVANTAGE, "", do.inputs(lambda r: 1e3 * r, 80, which=2), 80, "data change", ("data scale",)),
    ("a reward of -1e6 for a fall from step 70 on", DUEL, "", do.inputs(_first(-1e6), 70, which=3), 70, "data change", ("data scale", "bad batch")),
    ("log(sigmoid) by hand, a slope of 60", TAGS, "", do.fields(loss=_log_sigmoid), 1, "invalid operation", ("loss or inputs", "overflow")),
    ("the root of a distance to itself", LIKE, "", do.fields(loss=_apart_by_root), 1, "invalid operation", ("loss or inputs",)),
    ("divided by its length, and a row of 0 at step 60", SPARSE, "", do.chain(do.fields(loss=_of_length_one), do.inputs(lambda x: x + 1e-3), do.inputs(do.first_sample(0.0), 60, 61)), 60, "loss or inputs", ("invalid operation", "bad batch")),
    ("a mean over tens, of which there is none at step 70", MODULAR, "", do.chain(do.fields(loss=_mean_of_tens), do.inputs(lambda aim: aim.clamp(max=9), 70, 71, which=1)), 70, "loss or inputs", ("invalid operation", "bad batch")),
    ("the wrong sign", COPY, "", do.loss(torch.neg), 1, "sign", ()),
    ("likenesses are pushed apart", LIKE, "", do.loss(torch.neg), 1, "sign", ()),
    ("softmax by hand in half precision, 8x", WAVES, "", do.fields(loss=_softmax_in_half), 1, "overflow", ("invalid operation", "loss or inputs", "loss scale")),
    ("exp(300 times the loss)", FINER, "", do.loss(lambda value: (300 * value).exp()), 1, "overflow", ("loss or inputs", "invalid operation", "data scale", "learning rate")),
    ("the sigmoid is forgotten", TAGS, "", do.fields(loss=_no_sigmoid), 1, "invalid operation", ("loss or inputs",)),
    ("a temperature of 0.00001", LIKE, "", do.fields(loss=lambda *of: contrast(*of, heat=1e-5)), 1, "data scale", ("initialisation", "saturation", "learning rate", "reduction")),
    ("divided by all there is, 1e9", HOUSES, "", do.loss(lambda value: value / 1e9), 1, "reduction", ("underflow", "zero learning rate")),
    ("divided by 1e12", TOPICS, "", do.loss(lambda value: value / 1e12), 1, "reduction", ("underflow", "zero learning rate")),
    ("a sentence of padding alone at step 50", FIRST, "", do.inputs(lambda n: n.index_fill(0, torch.tensor([0]), 0), 50, 51, which=1), 50, "attention", ("invalid operation", "loss or inputs", "bad batch")),
    ("attention without its root, 200x", MODULAR, "", _hot(200.0), 1, "attention", ("saturation", "initialisation")),
    ("biases of -30 before a ReLU", TAGS, "2", do.biased(-30.0), 1, "dead units", ("initialisation",)),
    ("one step at 3000x kills the ReLU", FINER, "", do.learning_rate(3000.0, 60, 61), 60, "learning rate", ("dead units", "schedule")),
    ("tanh of weights 200x", ADVANTAGE, "body", do.scaled(200.0), 1, "saturation", ("initialisation",)),
    ("tanh of weights 300x", DUEL, "trunk", do.scaled(300.0), 1, "saturation", ("initialisation",)),
    ("the embedding is detached", WIDE, "names", do.output(Tensor.detach), 1, "unused", ()),
    ("the words' .data", TOPICS, "tokens", do.output(lambda out: out.data), 1, "unused", ()),
    ("a hard threshold has no gradient", SPARSE, "coder", do.output(lambda out: (out > 0).float()), 1, "unused", ()),
    ("rounded: a gradient of 0", LIKE, "2", do.output(torch.round), 1, "unused", ("dead units", "saturation")),
    ("the head is replaced after the optimizer was built", COPY, "head", do.replaced_layer, 1, "unowned", ("stale optimizer",)),
    ("the optimizer holds the head alone", MODULAR, "blocks", _only("head"), 1, "unowned", ()),
    ("dropout of 1", HOUSES, "2", do.output(lambda out: 0 * out), 1, "dead units", ("unused",)),
    ("dropout of 1 in the middle", LIKE, "2", do.output(lambda out: 0 * out), 1, "dead units", ("unused",)),
    ("the same row 64 times at step 70, no eps", HOUSES, "", do.chain(_unit_eps, do.inputs(lambda x: x[:1].expand_as(x), 70, 71)), 70, "batch norm", ("bad batch", "invalid operation", "loss or inputs")),
    ("a hook that multiplies by 10,000 from step 60 on", MODULAR, "blocks.0", do.backward(lambda grad: 1e4 * grad, 60), 60, "backward", ("invalid operation", "depth")),
    ("a backward that sums, 2000x, from step 50 on", HOUSES, "3", do.backward(lambda grad: 2000 * grad, 50), 50, "backward", ("invalid operation", "depth")),
    ("eps of 0, and words that never come", TOPICS, "tokens", do.groups(eps=0.0), 1, "optimizer", ()),
    ("eps of 0, and words that never come", FIRST, "tokens", do.groups(eps=0.0), 1, "optimizer", ()),
    ("float16 without a scaler, the loss / 10,000", BITS, "", do.chain(do.fields(scaler=None), do.loss(lambda value: value / 1e4)), 1, "underflow", ("reduction",)),
    ("float16 without a scaler, the loss / 100,000", WAVES, "", do.chain(do.fields(scaler=None), do.loss(lambda value: value / 1e5)), 1, "underflow", ("reduction",)),
    ("activations beyond float16", BITS, "", do.inputs(lambda x: 1e5 * x), 1, "overflow", ("data scale", "loss scale", "loss or inputs")),
    ("step() is never called", COPY, "", do.fields(applies=False), 1, "no step", ()),
    ("the optimizer holds the model from before a copy", FINER, "", do.another_model, 1, "stale optimizer", ("unowned", "no step")),
    ("loss.detach().requires_grad_()", ADVANTAGE, "", do.loss(lambda value: value.detach().requires_grad_()), 1, "unused", ()),
    ("zero_grad(), step(), backward()", LIKE, "", do.step_first, 1, "zeroed", ("no step",)),
    ("one weight is NaN at step 60", WAVES, "stem", do.at_step(_poisoned(math.nan), 60), 60, "bad parameter", ()),
    ("a file's layer 1000x at step 60", TOPICS, "windows", do.at_step(do.scaled(1e3), 60), 60, "bad parameter", ("initialisation", "data change")),
]  # fmt: skip


# Looked up in the trainings alone, without a watcher: these end as well as without the fault.
_HARMLESS: Final = frozenset({"the embeddings' rate 1000x", "momentum of 0.999", "one target is Inf at step 60"})


def fourth_faults(family: str, which: int) -> list[Fault]:
    """0: the open ones, 1: the locked ones; every second one of the table."""
    return [
        Fault(family, name, {base: layer}, change, first_bad, cause, also, name not in _HARMLESS)
        for name, base, layer, change, first_bad, cause, also in _FAULTS[which::2]
    ]
