"""Faults, each defined before it was run: a change of some healthy trainings, its first bad step and its cause.

Steps are those of the training's loop. The layer is "" if the fault is not in one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import changes as do
from .changes import Change
from .loop import Loop
from .models import Recurrent, mlp


@dataclass(frozen=True)
class Fault:
    """A fault in healthy trainings.

    Args:
        family: the kind of fault; name: a short description.
        on: healthy training -> the layer of the fault.
        change: the change that makes the fault.
        first_bad: the first step that is wrong.
        cause: the cause, an identifier of `causes.KNOWN_CAUSES` or a word of the older sets; also: other names of it.
        decidable: whether gradients, parameters and loss can tell it from a healthy training: labels that are shifted
            by mistake look like other classes on purpose, and what trains as well as without the fault is none.
    """

    family: str
    name: str
    on: dict[str, str]
    change: Change
    first_bad: int
    cause: str
    also: tuple[str, ...] = ()
    decidable: bool = True


MLP, ADAM, REG, LINEAR = (
    "MLP, SGD with momentum",
    "MLP, Adam, fits to zero loss",
    "MLP, squared error",
    "linear, fits exactly",
)
DEEP, PLAIN, TANH = "deep MLP, layer norm", "residual MLP without normalisation", "MLP, tanh, label smoothing"
CONV, NORM, RESNET, VIT = "convolutions", "convolutions, batch norm", "residual network", "patches"
TEXT, TIED, BAGS = "transformer, warm-up and cosine", "transformer, tied embedding", "embedding bag of rare words, SGD"
LSTM, GRU, RNN, MOE, MOE2 = (
    "LSTM, characters",
    "GRU, sums",
    "tanh RNN, clipped",
    "experts, one per token",
    "experts, two per token",
)
AMP, TASKS = "float16, scaler", "several tasks"


def _no(*bases: str) -> dict[str, str]:
    return dict.fromkeys(bases, "")


def _standardised(out: Tensor) -> Tensor:
    """Divides by the deviation of a batch that is constant."""
    constant = out * 0 + 1
    return out + (constant - constant.mean(0)) / constant.std(0)


def _log_of_zero(value: Tensor) -> Tensor:
    return value - 1e-3 * torch.log(torch.relu(-value.abs()))


def _poison_parameter(loop: Loop, layer: str) -> None:
    with torch.no_grad():
        next(loop.model.get_submodule(layer).parameters()).view(-1)[0] = float("nan")


def _poison_state(loop: Loop, layer: str) -> None:
    for state in loop.optimizers[0].state.values():
        for value in state.values():
            if torch.is_tensor(value) and value.dim():
                value.fill_(float("nan"))
                return


def _half_off(loop: Loop, layer: str) -> None:
    with torch.no_grad():
        bias = loop.model.get_submodule(layer).bias
        bias[: len(bias) // 2] = -1000.0


def _evaluated(loop: Loop, layer: str) -> None:
    loop.model.eval()


def _unit_batch_norm(loop: Loop, layer: str) -> None:
    for module in loop.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-30


def _gained(gain: float, *layers: nn.Module) -> nn.Module:
    """Matrices of a typical singular value."""
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=gain / module.in_features**0.5)
    return model


def _stack(depth: int, gain: float, act: type[nn.Module], inputs: int = 12, outputs: int = 4) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(inputs, 24), act()]
    for _ in range(depth):
        layers += [nn.Linear(24, 24), act()]
    return _gained(gain, *layers, nn.Linear(24, outputs))


def _relu_rnn(gain: float) -> nn.Module:
    model = Recurrent(nn.RNN, 1, 1, nonlinearity="relu")
    with torch.no_grad():
        nn.init.orthogonal_(model.memory.weight_hh_l0)
        model.memory.weight_hh_l0.mul_(gain)
    return model


class _Amplified(nn.Module):
    """x + 4 f(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(24, 24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return x + 4 * self.inner(x)


_HIDDEN = {MLP: "2", CONV: "2"}
_MIDDLE = {MLP: "2", REG: "2", CONV: "2", TEXT: "blocks.0.mlp.0"}

FAULTS: list[Fault] = [
    Fault("learning rate", "1000x from the first step", _no(MLP, CONV, TEXT), do.learning_rate(1000), 1, "learning rate"),
    Fault("learning rate", "100x from step 120", _no(TASKS, REG, LSTM), do.learning_rate(100, 120), 120, "learning rate"),
    Fault("learning rate", "300x from step 80", _no(MLP, VIT, DEEP), do.learning_rate(300, 80), 80, "learning rate"),
    Fault("learning rate", "doubles every 8 steps from step 60", _no(MLP, CONV), do.learning_rate(lambda step: 2 ** ((step - 60) // 8), 60), 60, "learning rate"),
    Fault("learning rate", "above the limit of stability", _no(LINEAR), do.learning_rate(12), 1, "learning rate"),
    Fault("learning rate", "one update of 3000x at step 100", _no(MLP, REG, TIED), do.learning_rate(3000, 100, 101), 100, "learning rate"),
    Fault("learning rate", "one layer's 1000x", {REG: "2", TEXT: "blocks.0.mlp.0"}, do.own_rate(1000), 1, "learning rate"),
    Fault("initialisation", "all weights 10x", _no(MLP, CONV, REG), do.scaled(10, every=True), 1, "initialisation", ("depth",)),
    Fault("initialisation", "all weights 0.01x", _no(MLP, CONV, TANH), do.scaled(0.01, every=True, bias=0.0), 1, "initialisation", ("depth",)),
    Fault("initialisation", "one layer 100x", {MLP: "2", REG: "2", CONV: "2"}, do.scaled(100), 1, "initialisation"),
    Fault("initialisation", "head 300x", {DEEP: "24", TEXT: "head", GRU: "head"}, do.scaled(300), 1, "initialisation"),
    Fault("initialisation", "all weights equal", _no(MLP, REG), do.filled(0.05), 1, "symmetry", ("initialisation",)),
    Fault("initialisation", "all weights 0", _no(ADAM, CONV), do.filled(0.0), 1, "symmetry", ("initialisation",)),
    Fault("initialisation", "embedding of size 1000", {BAGS: "tokens", LSTM: "0"}, do.scaled(1000), 1, "initialisation"),
    Fault("depth", "30 ReLU layers of gain 2.5", _no(MLP, ADAM), do.rebuilt(lambda: _stack(30, 2.5, nn.ReLU)), 1, "depth", ("initialisation",)),
    Fault("depth", "24 sigmoid layers", _no(MLP, ADAM), do.rebuilt(lambda: _stack(24, 1.0, nn.Sigmoid)), 1, "saturation", ("depth",)),
    Fault("depth", "30 tanh layers of gain 0.4", _no(MLP, ADAM), do.rebuilt(lambda: _stack(30, 0.4, nn.Tanh)), 1, "depth", ("initialisation", "saturation")),
    Fault("depth", "20 linear layers of gain 3", _no(MLP, TANH), do.rebuilt(lambda: _stack(20, 3.0, nn.Identity)), 1, "depth", ("initialisation",)),
    Fault("depth", "16 residual blocks, x + 4 f(x)", _no(MLP, ADAM), do.rebuilt(lambda: nn.Sequential(nn.Linear(12, 24), *(_Amplified() for _ in range(16)), nn.Linear(24, 4))), 1, "depth", ("initialisation",)),
    Fault("depth", "40 narrow ReLU layers, as torch initialises them", _no(ADAM), do.rebuilt(lambda: mlp(12, *[16] * 40, 4)), 1, "depth", ("initialisation", "dead units", "saturation")),
    Fault("recurrence", "ReLU RNN of gain 2, no clipping", {RNN: "memory"}, do.chain(do.rebuilt(lambda: _relu_rnn(2.0)), do.fields(clip=None)), 1, "recurrence", ("initialisation",)),
    Fault("recurrence", "ReLU RNN of gain 1.2, no clipping, fast", {RNN: "memory"}, do.chain(do.rebuilt(lambda: _relu_rnn(1.2)), do.fields(clip=None), do.learning_rate(10)), 1, "recurrence", ("learning rate",)),
    Fault("recurrence", "hidden weights 20x", {GRU: "memory", LSTM: "1.memory"}, do.scaled(20), 1, "recurrence", ("initialisation", "saturation")),
    Fault("recurrence", "clipping lost at step 100, learning rate 30x", {RNN: "memory"}, do.chain(do.at_step(lambda loop, layer: setattr(loop, "clip", None), 100), do.learning_rate(30, 100)), 100, "recurrence", ("learning rate",)),
    Fault("recurrence", "hidden weights 0.01x: nothing through time", {RNN: "memory"}, do.scaled(0.01), 1, "recurrence", ("initialisation",), decidable=False),
    Fault("dead units", "biases of -20 in a hidden layer", _HIDDEN, do.scaled(1.0, bias=-20.0), 1, "dead units", ("initialisation",)),
    Fault("dead units", "killed by one update at step 100", _no(REG, CONV), do.learning_rate(2000, 100, 101), 100, "learning rate", ("dead units",)),
    Fault("dead units", "a layer's output multiplied by 0 from step 100", _MIDDLE, do.output(lambda out: 0 * out, 100), 100, "dead units", ("unused",)),
    Fault("dead units", "dropout of everything from step 80", {MLP: "0", CONV: "0"}, do.output(lambda out: nn.functional.dropout(out, 1.0), 80), 80, "dead units", ("unused",)),
    Fault("dead units", "half of a layer never fires", {TASKS: "trunk.0", REG: "2"}, do.at_step(_half_off, 60), 60, "dead units"),
    Fault("dead units", "biases pushed to -50 at step 120", {MLP: "0", REG: "2"}, do.at_step(do.scaled(1.0, bias=-50.0), 120), 120, "dead units"),
    Fault("data", "one batch of noise, 1000x, at step 150", _no(REG, CONV, PLAIN), do.inputs(lambda x: 1000 * torch.randn_like(x), 150, 151), 150, "bad batch"),
    Fault("data", "one input NaN at step 150", _no(MLP, VIT, GRU), do.inputs(do.first_sample(float("nan")), 150, 151), 150, "bad batch", ("loss or inputs",)),
    Fault("data", "one input Inf at step 90", _no(REG, CONV), do.inputs(do.first_sample(float("inf")), 90, 91), 90, "bad batch", ("loss or inputs",)),
    Fault("data", "inputs not normalised, 255x", _no(MLP, REG, TASKS), do.inputs(lambda x: 255 * x + 300), 1, "data scale"),
    Fault("data", "inputs 300x from step 150", _no(TASKS, REG), do.inputs(lambda x: 300 * x, 150), 150, "data change", ("data scale",)),
    Fault("data", "every 25th batch 300x from step 60", _no(MLP, REG), do.inputs(lambda x: 300 * x, 60, every=25), 60, "bad batch"),
    Fault("data", "targets in other units, 1000x, from step 100", _no(REG, GRU), do.inputs(lambda y: 1000 * y, 100, which=1), 100, "data change", ("data scale",)),
    Fault("data", "targets of a million from the start", _no(REG, LINEAR), do.inputs(lambda y: 1e6 * y, which=1), 1, "data scale"),
    Fault("data", "all inputs 0 from step 120", _no(REG, CONV), do.inputs(torch.zeros_like, 120), 120, "data change", ("dead units",)),
    Fault("labels", "shuffled from step 120", _no(ADAM, VIT), do.inputs(lambda y: y[torch.randperm(len(y))], 120, which=1), 120, "data change"),
    Fault("labels", "shifted by one class from step 150", _no(MLP, RESNET), do.inputs(lambda y: (y + 1) % 4, 150, which=1), 150, "data change", decidable=False),
    Fault("labels", "one target of 100,000 at step 150", _no(REG, GRU), do.inputs(do.first_sample(1e5), 150, 151, which=1), 150, "bad batch"),
    Fault("labels", "one target NaN at step 100", _no(REG, TASKS), do.inputs(do.first_sample(float("nan")), 100, 101, which=1), 100, "bad batch", ("loss or inputs",)),
    Fault("labels", "random from the start", _no(MLP), do.inputs(lambda y: torch.randint_like(y, 4), which=1), 1, "data change", decidable=False),
    Fault("numerics of the forward", "norm of a zero vector from step 100", {REG: "2", CONV: "2", TEXT: "blocks.1.mlp.2"}, do.output(do.norm_of_zeros, 100), 100, "invalid operation"),
    Fault("numerics of the forward", "division by a deviation of 0 at step 80", {MLP: "0", REG: "2"}, do.output(_standardised, 80), 80, "invalid operation", ("loss or inputs",)),
    Fault("numerics of the forward", "exponential of 100 at step 120", {REG: "2", VIT: "head"}, do.output(lambda out: out + torch.exp(out.abs() * 0 + 100), 120), 120, "overflow", ("invalid operation", "loss or inputs")),
    Fault("numerics of the forward", "a parameter turns NaN at step 90", {MLP: "2", GRU: "head", TEXT: "blocks.0.mlp.2"}, do.at_step(_poison_parameter, 90), 90, "bad parameter", ("optimizer",)),
    Fault("numerics of the forward", "activations 1e6 in float16", {AMP: "2"}, do.output(lambda out: 1e6 * out, 60), 60, "overflow", ("loss scale",)),
    Fault("numerics of the loss", "logarithm of 0 from step 100", _no(MLP, VIT), do.loss(_log_of_zero, 100), 100, "invalid operation", ("loss or inputs",)),
    Fault("numerics of the loss", "mean over no tokens at step 120", _no(TEXT, LSTM), do.loss(do.no_weights, 120, 121), 120, "loss or inputs", ("invalid operation", "bad batch")),
    Fault("numerics of the loss", "times 1e39 at step 60", _no(REG, GRU), do.loss(lambda value: value * 1e30 * 1e9, 60, 61), 60, "overflow", ("loss or inputs", "bad batch")),
    Fault("numerics of the loss", "divided by 1e12", _no(MLP, REG), do.loss(lambda value: value / 1e12), 1, "reduction", ("underflow",)),
    Fault("numerics of the loss", "times 100,000 from step 100", _no(MLP, RESNET), do.loss(lambda value: 1e5 * value, 100), 100, "data scale", ("data change",)),
    Fault("numerics of the loss", "root of an error of 0 at step 100", _no(REG, LINEAR), do.loss(lambda value: (value - value.detach()).sqrt() + value, 100), 100, "invalid operation", ("loss or inputs",)),
    Fault("numerics of the backward", "a backward of its own returns NaN from step 100", {REG: "2", CONV: "2"}, do.backward(lambda grad: grad * float("nan"), 100), 100, "invalid operation"),
    Fault("numerics of the backward", "a backward of its own returns 10,000x from step 150", {MLP: "2", REG: "2"}, do.backward(lambda grad: 1e4 * grad, 150), 150, "backward", ("invalid operation", "depth")),
    Fault("numerics of the backward", "a backward of its own returns 0 from step 100", {MLP: "2", CONV: "2"}, do.backward(torch.zeros_like, 100), 100, "unused", ("dead units",)),
    Fault("numerics of the backward", "float16 without a scaler, loss / 100,000", _no(AMP), do.chain(do.fields(scaler=None), do.loss(lambda value: value / 1e5)), 1, "underflow", ("reduction",)),
    Fault("numerics of the backward", "one value of 1e30 at step 120", {REG: "2"}, do.backward(lambda grad: grad.index_fill(0, torch.tensor([0]), 1e30), 120, 121), 120, "bad batch", ("overflow", "invalid operation", "backward")),
    Fault("numerics of the optimizer", "Adam with eps = 0 and a gradient of 0", _no(ADAM, CONV), do.chain(do.groups(eps=0.0), do.inputs(lambda x: x * (torch.arange(x.shape[1]) > 0).view(1, -1, *[1] * (x.dim() - 2)))), 1, "optimizer"),
    Fault("numerics of the optimizer", "float16 parameters, Adam's eps is 0 there", _no(ADAM, REG), do.chain(do.halved, do.optimizer(lambda p: torch.optim.Adam(p, lr=1e-3))), 1, "optimizer", ("overflow", "underflow")),
    Fault("numerics of the optimizer", "an average turns NaN at step 100", _no(ADAM, GRU), do.at_step(_poison_state, 100), 100, "optimizer", ("bad parameter",)),
    Fault("numerics of the optimizer", "the average of squares is lost at step 150", _no(REG, GRU), do.at_step(do.forgotten_squares, 150), 150, "optimizer", ("learning rate",)),
    Fault("wiring", "head replaced after the optimizer was built", {MLP: "4", TEXT: "head", RESNET: "5"}, do.replaced_layer, 1, "unowned"),
    Fault("wiring", "the optimizer has another model's parameters", _no(MLP, CONV, GRU), do.another_model, 1, "stale optimizer", ("unowned", "no step")),
    Fault("wiring", "zero_grad() forgotten", _no(MLP, CONV, REG, TEXT), do.fields(zeroes=False), 2, "zero_grad"),
    Fault("wiring", "step() forgotten", _no(MLP, GRU), do.fields(applies=False), 1, "no step"),
    Fault("wiring", "learning rate of 0", _no(REG, CONV), do.learning_rate(0.0), 1, "zero learning rate", ("no step", "schedule")),
    Fault("wiring", "gradients zeroed before the step", _no(MLP, LSTM), do.received(do.zero_gradients), 1, "zeroed"),
    Fault("wiring", "a layer's output detached", {MLP: "2", CONV: "2", DEEP: "6"}, do.output(torch.Tensor.detach), 1, "unused"),
    Fault("wiring", "a layer's output detached from step 100", {REG: "0", MLP: "2"}, do.output(torch.Tensor.detach, 100), 100, "unused"),
    Fault("wiring", "encoder frozen by mistake", {MLP: "0"}, lambda loop, layer: loop.model.get_submodule(layer).requires_grad_(False), 1, "unused", decidable=False),
    Fault("schedules", "falls to nothing within 30 steps", _no(REG, CONV), do.learning_rate(lambda step: 0.3**step), 15, "zero learning rate", ("schedule", "no step")),
    Fault("schedules", "restarts at 200x at step 120", _no(MLP, REG), do.learning_rate(lambda step: 200 * 0.95 ** (step - 120), 120), 120, "learning rate", ("schedule",)),
    Fault("schedules", "falls below 0 at step 100", _no(MLP, LINEAR), do.learning_rate(lambda step: 1 - step / 100), 101, "schedule", ("learning rate",)),
    Fault("schedules", "one cycle with a peak of 300x at step 100", _no(MLP, RESNET), do.learning_rate(lambda step: 300 ** max(0.0, 1 - abs(step - 100) / 60)), 40, "learning rate", ("schedule",)),
    Fault("clipping", "to a norm of 1e-5", _no(MLP, RESNET, BAGS), do.fields(clip=1e-5), 1, "clipping", ("zero learning rate",)),
    Fault("clipping", "before unscale_(), SGD", _no(AMP), do.chain(do.optimizer(lambda p: torch.optim.SGD(p, lr=0.05)), do.received(do.clip_scaled)), 1, "unscale", ("clipping",)),
    Fault("clipping", "to a norm of 0", _no(REG, LSTM), do.fields(clip=0.0), 1, "clipping", ("zeroed", "no step", "zero learning rate")),
    Fault("clipping", "lost at step 100, learning rate 50x", _no(RNN, LSTM), do.chain(do.at_step(lambda loop, layer: setattr(loop, "clip", None), 100), do.learning_rate(50, 100)), 100, "learning rate", ("recurrence",)),
    Fault("decay", "of 30, decoupled", _no(TEXT, VIT), do.groups(weight_decay=30.0), 1, "decay"),
    Fault("decay", "of 1, SGD", _no(LINEAR, BAGS), do.groups(weight_decay=1.0), 1, "decay"),
    Fault("decay", "squares of the parameters, weight 100", _no(REG, ADAM), do.penalised(100.0), 1, "decay"),
    Fault("batch norm", "batches of 2", _no(RESNET, NORM), do.chain(do.inputs(lambda x: x[:2]), do.inputs(lambda y: y[:2], which=1)), 1, "batch norm", decidable=False),
    Fault("batch norm", "eps = 1e-30 and constant images from step 100", _no(RESNET, NORM), do.chain(_unit_batch_norm, do.inputs(torch.zeros_like, 100)), 100, "batch norm", ("invalid operation", "loss or inputs")),
    Fault("batch norm", "statistics of the first step, 1000x inputs", _no(RESNET), do.chain(_evaluated, do.inputs(lambda x: 1000 * x)), 1, "data scale", ("batch norm",)),
    Fault("batch norm", "weights multiplied by 0", {RESNET: "1.inner.1", NORM: "1"}, do.output(lambda out: 0 * out, 60), 60, "dead units", ("unused", "batch norm")),
    Fault("attention", "logits 100x", {TEXT: "blocks.0.attention", VIT: "blocks.0.attention"}, lambda loop, layer: setattr(loop.model.get_submodule(layer), "scale", 100.0), 1, "attention", ("saturation",), decidable=False),
    Fault("attention", "queries and keys 100x at step 100", {TEXT: "blocks.0.attention.qkv", TIED: "blocks.1.attention.qkv"}, do.at_step(do.scaled(100.0), 100), 100, "attention", ("bad parameter", "learning rate", "saturation")),
    Fault("attention", "a row that may attend to nothing at step 80", {TEXT: "blocks.1.attention", VIT: "blocks.0.attention"}, do.output(lambda out: out + torch.full_like(out, float("-inf")).softmax(-1), 80), 80, "attention", ("invalid operation", "loss or inputs")),
    Fault("attention", "no attention reaches the output from step 60", {TEXT: "blocks.0.attention.out", VIT: "blocks.1.attention.out"}, do.output(lambda out: 0 * out, 60), 60, "dead units", ("unused", "attention")),
    Fault("routing", "the router's weights 1000x", {MOE: "blocks.0.mlp.router", MOE2: "blocks.0.mlp.router"}, do.scaled(1000.0), 1, "routing", ("initialisation", "saturation")),
    Fault("routing", "one expert gets everything from step 60", {MOE: "blocks.0.mlp.router", MOE2: "blocks.0.mlp.router"}, do.output(lambda out: out + 100.0 * (torch.arange(out.shape[-1]) == 0), 60), 60, "routing", ("unused", "dead units")),
    Fault("routing", "logits NaN at step 100", {MOE: "blocks.0.mlp.router"}, do.output(lambda out: out * float("nan"), 100), 100, "invalid operation", ("loss or inputs", "routing")),
    Fault("routing", "an expert detached", {MOE: "blocks.0.mlp.experts.1"}, do.output(torch.Tensor.detach), 1, "unused", ("routing",)),
]  # fmt: skip
