"""Faults as people make them, written down before any of them was run under `watch`. All of them are locked.

That each does harm was looked up in the losses alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import changes as do
from .another_faults import deepened, logits
from .blind_trainings import Binary
from .faults import ADAM, Fault
from .loop import Loop

SQUEEZE, WORDS, SETS, SERIES = "channels squeezed and excited", "keywords in sound", "sets through inducing points", "forecast of a series"  # fmt: skip
SHOTS, PROCESS, RATINGS, TAGS = "prototypes of few samples", "neural process", "ratings, two factors and biases", "ten rare tags"  # fmt: skip
EXPERT, MATCHING, BITS, SIGNS = "an expert's hand imitated", "flow matching", "weights of one bit", "signs of the average"  # fmt: skip
HELD, LAYERS, LAST, ODE = "a second task, the first one held", "each layer half as fast", "transformer, norm last", "neural ODE"  # fmt: skip


@torch.no_grad()
def _unit_normal(loop: Loop, layer: str) -> None:
    for parameter in loop.model.parameters():
        if parameter.dim() > 1:
            parameter.normal_()


def _distances(out: Tensor) -> Tensor:
    """A little of the mean distance between the samples, each sample and itself included."""
    apart = (out[:, :, None] - out[:, None]).square().sum(dim=3).sqrt()
    return out + 1e-3 * apart.mean()


def _by_its_own_deviation(x: Tensor) -> Tensor:
    """Standardised before the model; the first of the series is constant."""
    x = x.index_fill(0, torch.tensor([0]), 1.0)
    return (x - x.mean(dim=1, keepdim=True)) / x.std(dim=1, keepdim=True)


def _by_hand(loop: Loop, layer: str) -> None:
    """A cross-entropy with a logarithm of its own, which meets inputs 1,000 times too large at step 80."""
    loop.loss = lambda model, x, y: functional.nll_loss(torch.log(model(x).softmax(dim=1)), y)
    do.inputs(lambda x: 1000 * x, 80, 81)(loop, layer)


def _no_way_through(loop: Loop, layer: str) -> None:
    for module in loop.model.modules():
        if isinstance(module, Binary):
            module.through = False


def _best_again(loop: Loop, layer: str) -> None:
    """The best weights so far are those of the start, and are loaded after each step."""
    start = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.after.append(lambda loop, step: loop.model.load_state_dict(start) and None)


def _one_class(loop: Loop, layer: str) -> None:
    """Nobody shuffled: ten batches of one class, then ten of the next."""
    batch = loop.batch

    def sorted_(step: int) -> tuple[Tensor, ...]:
        x, y = (torch.cat(parts) for parts in zip(*(batch(step) for _ in range(8)), strict=True))
        chosen = (y == step // 10 % 5).nonzero()[:24, 0]
        return x[chosen], y[chosen]

    loop.batch = sorted_


def _restored(loop: Loop, layer: str) -> None:
    """Training goes on from a file in which a matrix was stored as a much smaller type: one weight is Inf."""
    with torch.no_grad():
        loop.model.get_submodule(layer).weight[0, 0] = math.inf


# (name, training, layer, change, first bad step, cause, also, decidable)
_FAULTS: list[tuple[str, str, str, do.Change, int, str, tuple[str, ...], bool]] = [
    ("a learning rate of 2 instead of 2e-3", SERIES, "", do.learning_rate(1000), 1, "learning rate", (), True),
    ("the learning rate of plain descent given to its signs, 300x", SIGNS, "", do.learning_rate(300), 1, "learning rate", (), True),
    ("a learning rate in millionths, taken twice", RATINGS, "", do.learning_rate(1e-6), 1, "zero learning rate", ("no step",), True),
    ("the rate rises by warm restarts without an upper end, 200x at step 60", SETS, "", do.learning_rate(lambda step: 200 * 0.9 ** (step - 60), 60), 60, "learning rate", ("schedule",), True),
    ("norm last, no warm-up, 10x", LAST, "", do.chain(do.fields(schedule=None), do.learning_rate(10)), 1, "learning rate", (), True),
    ("the epochs' schedule steps with each batch", EXPERT, "", do.learning_rate(lambda step: 0.5**step), 10, "zero learning rate", ("schedule",), True),
    ("a warm-up in whole numbers: step // 1000", MATCHING, "", do.learning_rate(lambda step: step // 1000), 1, "zero learning rate", ("schedule",), True),
    ("momentum of 0.999", RATINGS, "", do.groups(momentum=0.999), 1, "learning rate", ("optimizer",), True),
    ("weight decay of 1", SQUEEZE, "", do.groups(weight_decay=1.0), 1, "decay", (), True),
    ("clipped to a norm of 1e-5", RATINGS, "", do.fields(clip=1e-5), 1, "clipping", ("zero learning rate",), True),
    ("learning rate 1000x after step 100", ODE, "", do.learning_rate(1000, 100), 100, "learning rate", (), True),
    ("summed over the batch instead of averaged", RATINGS, "", do.loss(lambda value: 256 * value), 1, "data scale", ("learning rate", "reduction"), True),
    ("a loss scale of 1e4 that is never taken out", SQUEEZE, "", do.loss(lambda value: 1e4 * value), 1, "data scale", ("learning rate", "reduction"), True),
    ("the penalty for forgetting has the wrong sign, and a large weight", HELD, "", do.inputs(lambda weight: -100 * weight, which=2), 1, "sign", ("learning rate", "data change"), True),
    ("the likelihood itself is minimised", PROCESS, "", do.loss(torch.neg), 1, "sign", (), True),
    ("a logarithm by hand and an outlier at step 80", ADAM, "", _by_hand, 80, "invalid operation", ("bad batch", "loss or inputs"), True),
    ("averaged twice: over 1e7 elements", EXPERT, "", do.loss(lambda value: value / 1e7), 1, "reduction", ("underflow", "zero learning rate"), True),
    ("integers of 16 bits in one batch, 32,768x, at step 60", TAGS, "", do.inputs(lambda x: 32768 * x, 60, 61), 60, "bad batch", ("data scale",), True),
    ("a gap (NaN) in one series at step 80", SERIES, "", do.inputs(do.first_sample(math.nan), 80, 81), 80, "bad batch", ("loss or inputs",), True),
    ("a rating that is missing (NaN) at step 40", RATINGS, "", do.inputs(do.first_sample(math.nan), 40, 41, which=2), 40, "bad batch", ("loss or inputs",), True),
    ("a constant series by its own deviation from step 50", SERIES, "", do.inputs(_by_its_own_deviation, 50), 50, "loss or inputs", ("bad batch", "invalid operation"), True),
    ("columns as they come: around 1,000", TAGS, "", do.inputs(lambda x: 1000 + 300 * x), 1, "data scale", (), True),
    ("another table of classes from step 70", SQUEEZE, "", do.inputs(lambda y: (y + 2) % 5, 70, which=1), 70, "data change", (), False),
    ("sorted by class", SQUEEZE, "", _one_class, 1, "data change", ("bad batch",), False),
    ("distances in millimetres from step 70", SETS, "", do.inputs(lambda y: 1000 * y, 70, which=1), 70, "data change", ("data scale",), True),
    ("standard normal weights", SHOTS, "", _unit_normal, 1, "initialisation", ("depth", "saturation"), True),
    ("recurrent weights 10x", WORDS, "memory", do.scaled(10.0), 1, "recurrence", ("initialisation", "saturation"), True),
    ("twenty sigmoid layers", TAGS, "0", deepened(20, nn.Sigmoid), 1, "saturation", ("depth",), True),
    ("biases of -10 in the encoder", PROCESS, "encoder.2", do.biased(-10.0), 1, "dead units", ("initialisation",), True),
    ("every matrix 0", SHOTS, "", do.filled(0.0), 1, "symmetry", ("initialisation",), True),
    ("logits of attention not divided but multiplied, 1000x", SERIES, "", logits(lambda out: 1000 * out), 1, "attention", ("saturation", "initialisation"), True),
    ("a set in which everything is masked at step 70", SETS, "", logits(do.first_sample(-math.inf), 70), 70, "attention", ("invalid operation", "loss or inputs", "bad batch"), True),
    ("the root of a sample's distance to itself", SHOTS, "4", do.output(_distances), 1, "invalid operation", ("loss or inputs",), True),
    ("cast to float16, Adam and all", EXPERT, "", do.halved, 1, "optimizer", ("overflow", "underflow"), True),
    ("one weight of the file is Inf at step 50", TAGS, "2", do.at_step(_restored, 50), 50, "bad parameter", (), True),
    ("gradients are never reset", PROCESS, "", do.fields(zeroes=False), 2, "zero_grad", (), True),
    ("features under no_grad", LAYERS, "features", do.output(Tensor.detach), 1, "unused", (), True),
    ("the head is replaced after the optimizer was built", LAYERS, "head", do.replaced_layer, 1, "unowned", ("stale optimizer",), True),
    ("eval() is never left after step 40", SQUEEZE, "", do.at_step(lambda loop, layer: loop.model.eval() and None, 40), 40, "batch norm", (), False),
    ("signs without a way through", BITS, "", _no_way_through, 1, "unused", ("dead units", "backward"), True),
    ("step before backward", EXPERT, "", do.step_first, 1, "zeroed", ("no step", "unused"), True),
    ("the best weights are loaded after each step", MATCHING, "", _best_again, 1, "undone", ("no step",), True),
]  # fmt: skip
BLIND_FAULTS: list[Fault] = [
    Fault("locked blind faults", name, {base: layer}, change, first_bad, cause, also, decidable)
    for name, base, layer, change, first_bad, cause, also, decidable in _FAULTS
]
