"""Faults as people make them, written down before any of them was run under `watch`: every second one is locked.

An open fault sits in an open training, a locked one in a locked one. That each does harm was looked up in the trainings
alone: the loss ends at least a tenth worse, or is NaN, or a parameter is not trained, or the loss jumps.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import changes as do
from . import fifth_losses as losses
from .another_faults import deepened
from .faults import Fault
from .fifth_models import acting
from .fifth_trainings import fifth
from .loop import Loop
from .third_trainings import follow

GATED, PLANNER = "gated feed-forwards, root mean square norms", "returns, states and actions in a row"
CHAIN, FORESEER = "labels in a chain", "the future of a signal, among others"
PROCESS, CLOUDS = "a process through a deep kernel", "clouds matched by transport"
FRAMES, HIGHWAY = "the next frame", "ten highway layers"
CLICKS, BAGS = "clicks, factors of pairs", "bags of which one piece counts, float16"
CONDITION, SERIES = "images under a condition, float16", "weight-normalised convolutions over time"
TASKS, POLICY = "two tasks, weighed by their doubt", "a policy of means and deviations"


def _compounded(factor: float) -> do.Change:
    """Each step multiplies the rate that the step before left, not the first rate."""

    def change(loop: Loop, layer: str) -> None:
        loop.schedule = None

        def multiply(loop: Loop, step: int) -> None:
            for group in (group for optimizer in loop.optimizers for group in optimizer.param_groups):
                group["lr"] *= factor

        loop.before.append(multiply)

    return change


def _swapped(optimizer: object, **options: float) -> do.Change:
    return do.optimizer(lambda parameters: optimizer(parameters, **options))  # type: ignore[operator]


def _average_put_back(rate: float, every: int) -> do.Change:
    """A moving average of the weights is copied into the model every few steps."""

    def change(loop: Loop, layer: str) -> None:
        average = copy.deepcopy(loop.model)

        def put(loop: Loop, step: int) -> None:
            follow(average, loop.model, rate)
            if step % every == 0:
                follow(loop.model, average, 1.0)

        loop.after.append(put)

    return change


def _weights_held(limit: float) -> do.Change:
    """All weights are clamped after each step, as a Wasserstein critic's."""

    @torch.no_grad()
    def clamp(loop: Loop, step: int) -> None:
        for parameter in loop.model.parameters():
            parameter.clamp_(-limit, limit)

    return lambda loop, layer: loop.after.append(clamp)


def _norms_held(limit: float) -> do.Change:
    """Each matrix is scaled back to a largest norm after each step."""

    @torch.no_grad()
    def hold(loop: Loop, step: int) -> None:
        for parameter in loop.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(min(1.0, limit / float(parameter.norm())))

    return lambda loop, layer: loop.after.append(hold)


def _born_again(every: int) -> do.Change:
    """The initialisation runs at the start of each epoch."""

    @torch.no_grad()
    def again(loop: Loop, step: int) -> None:
        if step > 1 and step % every == 1:
            for module in loop.model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()

    return lambda loop, layer: loop.before.append(again)


def _gradients_times(factor: float, at: int = 1, of: str = "") -> do.Change:
    """The gradients themselves are multiplied, before the step."""

    @torch.no_grad()
    def multiply(loop: Loop, step: int) -> None:
        for name, parameter in loop.model.named_parameters():
            if step >= at and parameter.grad is not None and name.startswith(of):
                parameter.grad.mul_(factor)

    return lambda loop, layer: loop.received.append(multiply)


def _noised(size: float) -> do.Change:
    """Noise for privacy is added to the gradients, and not divided by the batch."""

    @torch.no_grad()
    def add(loop: Loop, step: int) -> None:
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(size * torch.randn_like(parameter))

    return lambda loop, layer: loop.received.append(add)


def _in_bfloat16(loop: Loop, layer: str) -> None:
    loop.model.bfloat16()
    batch = loop.batch
    loop.batch = lambda step: tuple(part.bfloat16() if part.is_floating_point() else part for part in batch(step))


def _put(values: dict[str, float]) -> do.Change:
    """Parameters begin at other values."""

    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        for name, parameter in loop.model.named_parameters():
            if name in values:
                parameter.fill_(values[name])

    return change


def _all_biases(value: float, word: str = "gate.bias") -> do.Change:
    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        for name, parameter in loop.model.named_parameters():
            if name.endswith(word):
                parameter.fill_(value)

    return change


def _attribute(name: str, value: object) -> do.Change:
    """An attribute of all modules that have it."""

    def change(loop: Loop, layer: str) -> None:
        for module in loop.model.modules():
            if hasattr(module, name):
                setattr(module, name, value)

    return change


def _inverted_mask(loop: Loop, layer: str) -> None:
    """Each word sees the later ones alone, and the last one nothing."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(length, length).tril().bool()
        logits = (q @ k.mT / (dim // 2) ** 0.5).masked_fill(hidden, float("-inf"))
        return self.out((logits.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, dim))

    for module in loop.model.modules():
        if hasattr(module, "qkv"):
            module.forward = forward.__get__(module)  # type: ignore[attr-defined]


def _after(layer: str, module: nn.Module) -> do.Change:
    """A module is put behind a layer."""

    def change(loop: Loop, _: str) -> None:
        parent, _, name = layer.rpartition(".")
        setattr(loop.model.get_submodule(parent), name, nn.Sequential(loop.model.get_submodule(layer), module))
        loop.optimizers[0].add_param_group({"params": list(module.parameters())}) if list(module.parameters()) else None

    return change


def _at(layer: str, change: do.Change) -> do.Change:
    """A change of this layer, whose name is another one afterwards."""
    return lambda loop, _: change(loop, layer)


def _poisoned(loop: Loop, layer: str) -> None:
    with torch.no_grad():
        loop.model.get_submodule(layer).weight.view(-1)[0] = math.nan


def _evaluated(loop: Loop, layer: str) -> None:
    """eval() is never left: batch norm uses averages that never move."""
    loop.model.eval()


def _forbidden(loop: Loop, layer: str) -> None:
    """Labels 0 and 1 may follow no label: minus infinity in the whole of two columns."""
    with torch.no_grad():
        loop.model.steps[:, :2] = -math.inf


def _by_its_deviation(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std() * 1.0


def _whitened(x: Tensor) -> Tensor:
    """By the eigenvectors of a matrix whose eigenvalues are all the same."""
    same = torch.eye(4) + 0 * x.mean()
    return x + torch.linalg.eigh(same).eigenvectors.sum() * 0.01


def _same(loss: object, *then: do.Change) -> do.Change:
    return do.chain(do.fields(loss=loss), *then)


def _column(factor: float) -> do.Transform:
    def changed(x: Tensor) -> Tensor:
        x = x.clone()
        x[..., 0] = factor * x[..., 0]
        return x

    return changed


# (name, training, layer, change, first bad step, cause, also)
_FAULTS: list[tuple[str, str, str, do.Change, int, str, tuple[str, ...]]] = [
    ("1e3 for 1e-3", CHAIN, "", do.learning_rate(2e5), 1, "learning rate", ()),
    ("a rate of 3, from a sweep's end", PLANNER, "", do.learning_rate(1500), 1, "learning rate", ()),
    ("the rate for signs given to Adam, 100x, no warm-up", GATED, "", do.chain(do.fields(schedule=None), do.learning_rate(100)), 1, "learning rate", ()),
    ("the rate of Adagrad given to Adam, 100x", SERIES, "", do.learning_rate(100), 1, "learning rate", ()),
    ("the rate falls from 2000x, as 1 / step", TASKS, "", do.learning_rate(lambda step: 2000 / step), 1, "learning rate", ("schedule",)),
    ("the root of the step without its warm-up, from 300x", HIGHWAY, "", do.learning_rate(lambda step: 300 / step**0.5), 1, "learning rate", ("schedule",)),
    ("a search for the rate goes on and on, 1.15x per step", CHAIN, "", do.learning_rate(lambda step: 1.15**step), 30, "learning rate", ("schedule",)),
    ("the rate multiplied anew each step, 1.08x", FORESEER, "", _compounded(1.08), 30, "learning rate", ("schedule",)),
    ("the factor multiplies the last rate, not the first, 0.7x", GATED, "", _compounded(0.7), 12, "zero learning rate", ("schedule",)),
    ("gamma of an epoch at each batch, 0.6", CLOUDS, "", do.learning_rate(lambda step: 0.6**step), 12, "zero learning rate", ("schedule",)),
    ("a rate of 1e-8 for Adagrad", CLICKS, "", do.learning_rate(1e-7), 1, "zero learning rate", ("no step",)),
    ("the rate divided by the number of all samples, 1e-9", BAGS, "", do.learning_rate(3e-7), 1, "zero learning rate", ("no step",)),
    ("plain descent by Adam's rate, 1e-6", FRAMES, "", _swapped(torch.optim.SGD, lr=1e-6), 1, "zero learning rate", ("optimizer",)),
    ("plain descent at a rate of 30", FORESEER, "", do.chain(_swapped(torch.optim.SGD, lr=30.0), do.fields(clip=None)), 1, "learning rate", ()),
    ("the linear rule, 64x, for a batch that stayed", CONDITION, "", do.learning_rate(64), 1, "learning rate", ()),
    ("a rate per sample given per batch, 96x", POLICY, "", do.learning_rate(96), 1, "learning rate", ()),
    ("a resume at the rate of 500x at step 70", TASKS, "", do.learning_rate(500, 70), 70, "learning rate", ("schedule",)),
    ("a new cycle, 200x, at step 80", SERIES, "", do.learning_rate(lambda step: 200 * 0.97 ** (step - 80), 80), 80, "learning rate", ("schedule",)),
    ("maximize=True", CHAIN, "", do.groups(maximize=True), 1, "sign", ()),
    ("maximize=True, from the policy's script", FORESEER, "", do.groups(maximize=True), 1, "sign", ()),
    ("an accumulator that begins at 1e12", CLICKS, "", _swapped(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=1e12), 1, "optimizer", ("zero learning rate", "no step")),
    ("eps of 1e5 for 1e-5", POLICY, "", do.groups(eps=1e5), 1, "optimizer", ("zero learning rate", "no step")),
    ("betas of 0.99 and 0.3, rate 30x", TASKS, "", do.chain(do.groups(betas=(0.99, 0.3)), do.learning_rate(30)), 1, "learning rate", ("optimizer",)),
    ("momentum of 0.999, and the same rate", HIGHWAY, "", do.groups(momentum=0.999), 1, "learning rate", ("optimizer",)),
    ("decay of 20 on everything, norms too", GATED, "", do.groups(weight_decay=20.0), 1, "decay", ()),
    ("decay of 60, decoupled", PLANNER, "", do.groups(weight_decay=60.0), 1, "decay", ()),
    ("decay of 5 in the gradient", CONDITION, "", do.groups(weight_decay=5.0), 1, "decay", ()),
    ("a decay of 2 in the gradient of momentum", HIGHWAY, "", do.groups(weight_decay=2.0), 1, "decay", ()),
    ("the weights' average put back, each tenth step", FRAMES, "", _average_put_back(0.01, 10), 10, "undone", ("zero learning rate", "no step")),
    ("the target's weights put back at each step", FORESEER, "", _average_put_back(0.002, 1), 1, "undone", ("zero learning rate", "no step")),
    ("weights held within 0.01, a critic's", FRAMES, "", _weights_held(0.01), 1, "undone", ("decay", "initialisation")),
    ("norms held to 0.05", CLOUDS, "", _norms_held(0.05), 1, "undone", ("decay", "initialisation")),
    ("drawn anew at each epoch of 25 steps", TASKS, "", _born_again(25), 26, "undone", ("bad parameter", "initialisation", "data change")),
    ("initialised anew at each epoch of 30 steps", PLANNER, "", _born_again(30), 31, "undone", ("bad parameter", "initialisation", "data change")),
    ("clipped to 1e-4 by values, plain momentum", CONDITION, "", do.received(lambda loop, step: nn.utils.clip_grad_value_(loop.model.parameters(), 1e-4) and None), 1, "clipping", ("unscale", "zero learning rate")),
    ("clipped to 1e-5 by the norm, plain momentum", HIGHWAY, "", do.fields(clip=1e-5), 1, "clipping", ("zero learning rate",)),
    ("gradients divided by the scale a second time", CONDITION, "", _gradients_times(2.0**-16), 1, "reduction", ("unscale", "underflow", "zero learning rate", "backward", "clipping")),
    ("the ranks' gradients summed, 512x", CONDITION, "", _gradients_times(512.0), 1, "data scale", ("learning rate", "reduction", "backward")),
    ("the ranks' gradients summed, 1000x, from step 50 on", HIGHWAY, "", _gradients_times(1000.0, 50), 50, "data scale", ("learning rate", "reduction", "backward", "data change")),
    ("noise of 10 on each gradient, for privacy", CHAIN, "", _noised(10.0), 1, "backward", ("data scale", "bad batch", "learning rate", "optimizer")),
    ("noise of 3 on each gradient, for privacy", HIGHWAY, "", _noised(3.0), 1, "backward", ("data scale", "bad batch", "learning rate", "optimizer")),
    ("a reversal of the gradient is left in", TASKS, "trunk", do.backward(torch.neg), 1, "sign", ("backward",)),
    ("a reversal of the gradient is left in, before the memory", FORESEER, "encoder", do.backward(torch.neg), 1, "sign", ("backward",)),
    ("a straight-through estimate that divides by 0 at step 60", CLOUDS, "2", do.backward(lambda grad: grad / (0 * grad), 60, 61), 60, "backward", ("invalid operation",)),
    ("zero_grad() is left out", POLICY, "", do.fields(zeroes=False), 2, "zero_grad", ()),
    ("zero_grad() right before step()", FRAMES, "", do.received(do.zero_gradients), 1, "zeroed", ()),
    ("model.zero_grad(set_to_none=False) right before step()", PLANNER, "", do.received(lambda loop, step: loop.model.zero_grad(set_to_none=False)), 1, "zeroed", ()),
    ("step() is commented out", CLICKS, "", do.fields(applies=False), 1, "no step", ()),
    ("the optimizer is built from a copy for the average", CLOUDS, "", do.another_model, 1, "stale optimizer", ("unowned", "no step")),
    ("the head is replaced for new labels after the optimizer was built", GATED, "head", do.replaced_layer, 1, "unowned", ("stale optimizer",)),
    ("the scores are replaced after the optimizer was built", BAGS, "head", do.replaced_layer, 1, "unowned", ("stale optimizer",)),
    ("the words' vectors as an array", CHAIN, "tokens", do.output(Tensor.detach), 1, "unused", ()),
    ("the states are remembered without a graph", PLANNER, "states", do.output(Tensor.detach), 1, "unused", ()),
    ("the trunk under no_grad from step 40 on", TASKS, "trunk", do.output(Tensor.detach, 40), 40, "unused", ()),
    ("the encoder's features are kept as data from step 50 on", FORESEER, "encoder", do.output(Tensor.detach, 50), 50, "unused", ()),
    ("decisions by argmax", FRAMES, "cell", do.output(lambda out: out.sign()), 1, "unused", ()),
    ("rounded to whole numbers", CLOUDS, "2", do.output(torch.round), 1, "unused", ("dead units", "saturation")),
    ("all weights 20x", CLOUDS, "", do.scaled(20.0, every=True), 1, "initialisation", ("saturation", "depth")),
    ("places of deviation 30", GATED, "places", do.scaled(300.0), 1, "initialisation", ("data scale",)),
    ("the first layer 100x", SERIES, "", _put({"0.parametrizations.weight.original0": 100.0}), 1, "initialisation", ("data scale",)),
    ("vectors of factors all the same", CLICKS, "vectors", do.scaled(0.0), 1, "symmetry", ("initialisation", "dead units")),
    ("the noise begins at exp(-40)", PROCESS, "", _put({"log_noise": -14.0}), 1, "initialisation", ("invalid operation", "loss or inputs", "data scale")),
    ("the policy's deviation begins at exp(-6)", POLICY, "", _put({"log_std": -6.0}), 1, "initialisation", ("invalid operation", "loss or inputs", "data scale")),
    ("lengths of exp(12)", PROCESS, "", _put({"log_length": 12.0}), 1, "initialisation", ("data scale", "underflow", "reduction")),
    ("gates that begin shut, -40", HIGHWAY, "1", _all_biases(-40.0), 1, "saturation", ("initialisation", "dead units")),
    ("branches 12x", GATED, "", _attribute("branch", 12.0), 1, "depth", ("initialisation", "data scale")),
    ("twenty-five linear layers of gain 3", CLOUDS, "", _at("2", deepened(25, nn.Identity, 3.0)), 1, "depth", ("initialisation",)),
    ("thirty sigmoid layers before the trunk's end", TASKS, "", _at("trunk.3", deepened(30, nn.Sigmoid, 1.0)), 1, "depth", ("initialisation", "saturation")),
    ("a norm over a single number, after the head", PROCESS, "", _after("features.2", nn.GroupNorm(24, 24)), 1, "unused", ("dead units", "batch norm", "saturation")),
    ("a norm of one group per channel, without space", HIGHWAY, "", _after("5", nn.GroupNorm(24, 24)), 1, "unused", ("dead units", "batch norm", "saturation")),
    ("a norm over a single number behind the head", TASKS, "", _after("amount", nn.LayerNorm(1)), 1, "unused", ("dead units", "batch norm", "saturation")),
    ("a norm over the one number that is said", CLOUDS, "", _after("4", nn.GroupNorm(2, 2)), 1, "unused", ("dead units", "batch norm", "saturation")),
    ("a threshold of 10 that no feature reaches", PROCESS, "", _after("features.4", nn.Threshold(10.0, 0.0)), 1, "dead units", ("unused",)),
    ("a ReLU behind the head, -20", BAGS, "head", do.chain(do.biased(-20.0), do.output(torch.relu)), 1, "dead units", ("unused", "initialisation")),
    ("eval() from the first step, raw inputs of 1,000", TASKS, "", do.chain(_evaluated, do.inputs(lambda x: 1000 * x)), 1, "batch norm", ("data scale", "initialisation")),
    ("nll_loss is given logits", GATED, "", do.fields(loss=losses.logits_as_logs), 1, "sign", ("loss or inputs",)),
    ("a temperature of 1e-5 instead of 1", FORESEER, "", _attribute("heat", 1e-5), 1, "data scale", ("initialisation", "saturation", "learning rate", "reduction")),
    ("logarithms of shares, times 0.001", CONDITION, "", do.fields(loss=losses.shares_as_logs), 1, "reduction", ("data scale", "underflow")),
    ("a temperature of 1e10", FORESEER, "", _attribute("heat", 1e10), 1, "reduction", ("data scale", "underflow", "saturation")),
    ("the loss divided by all tokens there are, 1e11", GATED, "", do.loss(lambda value: value / 1e11), 1, "reduction", ("underflow", "zero learning rate")),
    ("the loss divided by the corpus, 1e10", SERIES, "", do.loss(lambda value: value / 1e10), 1, "reduction", ("underflow", "zero learning rate")),
    ("the batch's sum for its mean, momentum", CONDITION, "", do.loss(lambda value: 24 * value), 1, "data scale", ("learning rate", "reduction")),
    ("summed over batch and places, 2000x", HIGHWAY, "", do.loss(lambda value: 2000 * value), 1, "data scale", ("learning rate", "reduction")),
    ("nothing keeps the learned weights from 0", TASKS, "doubt", do.fields(loss=losses.without_doubt), 1, "reduction", ("loss or inputs", "sign", "underflow")),
    ("the entropy's weight of 300, for 0.003", POLICY, "log_std", do.fields(loss=lambda model, state, aim: acting(model, state, aim, 300.0)), 1, "data scale", ("learning rate", "sign")),
    ("a likelihood of the wrong sign", PROCESS, "", do.loss(torch.neg), 1, "sign", ("invalid operation", "loss or inputs")),
    ("rewards are minimised: the wrong sign", CLOUDS, "", do.loss(torch.neg), 1, "sign", ()),
    ("the mask is inverted: the last word sees nothing", GATED, "", _inverted_mask, 1, "attention", ("invalid operation", "loss or inputs")),
    ("Sinkhorn by exp, a blur of 0.001", CLOUDS, "", do.fields(loss=losses.by_exp), 1, "invalid operation", ("loss or inputs", "overflow", "underflow")),
    ("forbidden steps are minus infinity", CHAIN, "steps", _forbidden, 1, "bad parameter", ("invalid operation", "loss or inputs")),
    ("the root of an error of exactly 0", SERIES, "", do.fields(loss=losses.root_of_errors), 1, "invalid operation", ("loss or inputs",)),
    ("missing frames, NaN times 0, from step 60 on", FRAMES, "", _same(losses.missing_by_product, do.inputs(lambda x: x.index_fill(1, torch.tensor([3]), math.nan), 60)), 60, "loss or inputs", ("invalid operation", "bad batch", "data change")),
    ("p log p of labels", BAGS, "", do.fields(loss=losses.entropy_by_hand), 1, "invalid operation", ("loss or inputs",)),
    ("sigmoid, then log, a slope of 20", CLICKS, "", do.chain(do.fields(loss=losses.sigmoid_and_log), do.scaled(40.0, every=True)), 1, "invalid operation", ("loss or inputs", "overflow", "initialisation")),
    ("eigenvectors of equal eigenvalues from step 50 on", TASKS, "trunk", do.output(_whitened, 50), 50, "invalid operation", ("loss or inputs", "backward")),
    ("standardised by a deviation of 0 at step 60", SERIES, "", do.inputs(lambda x: _by_its_deviation(torch.ones_like(x)), 60, 61), 60, "bad batch", ("loss or inputs", "invalid operation")),
    ("a file's row of NaN at step 50", TASKS, "", do.inputs(lambda x: x.index_fill(0, torch.tensor([3]), math.nan), 50, 51), 50, "bad batch", ("loss or inputs",)),
    ("one return is Inf at step 70", PLANNER, "", do.inputs(do.first_sample(math.inf), 70, 71), 70, "bad batch", ("loss or inputs",)),
    ("images divided by 255 twice", CONDITION, "", do.inputs(lambda x: x / 65025), 1, "data scale", ("reduction", "underflow")),
    ("signals in microvolts, 1e-6", FORESEER, "", do.inputs(lambda x: 1e-6 * x), 1, "data scale", ("reduction", "underflow")),
    ("never normalised, 3,000", PROCESS, "", do.inputs(lambda x: 3000 * x), 1, "data scale", ("initialisation", "saturation")),
    ("a column in other units, 100,000x", TASKS, "", do.inputs(_column(1e5)), 1, "data scale", ()),
    ("amounts in cents, 100,000", TASKS, "", do.inputs(lambda y: 1e5 * y, which=1), 1, "data scale", ("learning rate",)),
    ("aims in other units, 10,000x, from step 90 on", POLICY, "", do.inputs(lambda y: 1e4 * y, 90, which=1), 90, "data change", ("data scale",)),
    ("one batch of frames in bytes, 255x, times 100, at step 70", FRAMES, "", do.inputs(lambda x: 2.55e4 * x, 70, 71), 70, "bad batch", ()),
    ("a sensor's jump, 10,000x, in one batch at step 60", SERIES, "", do.inputs(lambda x: 1e4 * x, 60, 61), 60, "bad batch", ()),
    ("one amount of 1e6 at step 90", TASKS, "", do.inputs(do.first_sample(1e6), 90, 91, which=1), 90, "bad batch", ()),
    ("the light goes out at step 60", CONDITION, "", do.inputs(torch.zeros_like, 60), 60, "data change", ("bad batch", "dead units")),
    ("the microphone is off from step 50 on", FORESEER, "", do.inputs(torch.zeros_like, 50), 50, "data change", ("bad batch", "dead units")),
    ("the mask is given as the words", CHAIN, "tokens", do.inputs(torch.ones_like), 1, "data change", ("dead units", "unused", "loss or inputs", "data scale")),
    ("a scale by hand that is never taken out, 65,536", FRAMES, "", do.chain(_swapped(torch.optim.SGD, lr=0.5, momentum=0.9), do.loss(lambda value: 65536 * value)), 1, "data scale", ("learning rate", "reduction", "loss scale")),
    ("float16 without a scaler, the loss / 100,000", BAGS, "", do.chain(do.fields(scaler=None), do.loss(lambda value: value / 1e5)), 1, "underflow", ("reduction",)),
    ("bfloat16 weights and a rate of 1e-6", FRAMES, "", do.chain(_in_bfloat16, do.learning_rate(2e-4)), 1, "zero learning rate", ("underflow", "no step", "optimizer")),
    ("bfloat16 weights, and a rate that it rounds away", CLOUDS, "", do.chain(_in_bfloat16, do.learning_rate(5e-4)), 1, "zero learning rate", ("underflow", "no step", "optimizer")),
    ("an image of 1e6 in float16", CONDITION, "", do.inputs(lambda x: 1e6 * x), 1, "overflow", ("data scale", "loss scale", "loss or inputs")),
    ("pieces of 1e6 in float16", BAGS, "", do.inputs(lambda x: 1e6 * x), 1, "overflow", ("data scale", "loss scale", "loss or inputs")),
    ("one weight is NaN at step 60", CHAIN, "window", do.at_step(_poisoned, 60), 60, "bad parameter", ()),
    ("a layer loaded in other units, 500x, at step 70", HIGHWAY, "4.inner", do.at_step(do.scaled(500.0), 70), 70, "bad parameter", ("initialisation", "data change")),
    ("batches of one number per channel", TASKS, "", do.inputs(lambda x: x[:1].expand_as(x)), 1, "batch norm", ("unused", "dead units", "data change")),
    ("dropout of 0.99, for keeping 0.99", HIGHWAY, "10", do.output(lambda out: functional.dropout(out, 0.99)), 1, "dead units", ("unused", "bad batch", "data scale")),
    ("dropout of 0.98, for keeping 0.98", TASKS, "trunk", do.output(lambda out: functional.dropout(out, 0.98)), 1, "dead units", ("unused", "bad batch", "data scale")),
    ("recurrent gates 40x", FORESEER, "memory", do.scaled(40.0), 1, "saturation", ("initialisation", "recurrence")),
    ("amounts minus their mean times themselves: [N, N]", TASKS, "amount", do.fields(loss=losses.of_each_other), 1, "loss or inputs", ()),
    ("attention over the batch", BAGS, "", _attribute("axis", 0), 1, "attention", ()),
]  # fmt: skip


# Nothing in gradients, parameters and loss tells these from noisy data: they are run, and not counted.
_UNDECIDABLE = frozenset({"amounts minus their mean times themselves: [N, N]", "attention over the batch"})


def fifth_faults(family: str, which: int) -> list[Fault]:
    """0: the open ones, 1: the locked ones: those of the trainings of that half."""
    half = fifth(which)
    return [
        Fault(family, name, {base: layer}, change, first_bad, cause, also, name not in _UNDECIDABLE)
        for name, base, layer, change, first_bad, cause, also in _FAULTS
        if base in half
    ]
