"""Faults as people make them, written down before any of them was run under `watch`: those of the locked trainings are locked.

That each does harm was looked up in the trainings alone: the loss ends at least a tenth worse, or is NaN, or a parameter
is not trained, or the loss jumps.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import changes as do
from .faults import Fault
from .fifth_faults import _all_biases as filled
from .fifth_faults import _average_put_back as average_put_back
from .fifth_faults import _gradients_times as gradients_times
from .fifth_faults import _noised as noised
from .loop import Loop, descend
from .sixth_trainings import TRAININGS, apart, balanced, sixth, translated

OPINIONS, FIGURES, TRANSLATED, CURVES, VALUES, HIDDEN, DISCS, TRIPLETS, EXPERTS, HINGE, MEANS, WORDS = TRAININGS


def _rebuilt(optimizer: object, **options: object) -> do.Change:
    return do.optimizer(lambda parameters: optimizer(parameters, **options))  # type: ignore[operator]


def _only(*layers: str) -> do.Change:
    """The optimizer is given some of the layers."""

    def change(loop: Loop, layer: str) -> None:
        group = loop.optimizers[0].param_groups[0]
        group["params"] = [p for name, p in loop.model.named_parameters() if name.startswith(layers)]

    return change


def _without(*layers: str) -> do.Change:
    """The optimizer is given all layers but some."""

    def change(loop: Loop, layer: str) -> None:
        group = loop.optimizers[0].param_groups[0]
        group["params"] = [p for name, p in loop.model.named_parameters() if not name.startswith(layers)]

    return change


def _norms(value: float) -> do.Change:
    """Fill the scales of all normalisations."""

    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        for module in loop.model.modules():
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
                module.weight.fill_(value)

    return change


def _attribute(name: str, factor: float) -> do.Change:
    return lambda loop, layer: setattr(loop.model, name, factor * getattr(loop.model, name))


def _copied(loop: Loop, layer: str) -> None:
    """The training goes on with a copy of the model, the optimizer with the first one."""
    loop.model = copy.deepcopy(loop.model)


def _once_in(every: int) -> do.Change:
    """zero_grad() is called at the beginning of an epoch only."""
    return do.chain(
        do.fields(zeroes=False),
        lambda loop, layer: loop.before.append(lambda loop, step: loop.zero_grad() if step % every == 1 else None),
    )


def _second_optimizer(lr: float) -> do.Change:
    """An optimizer of an earlier cell of the notebook is stepped too."""
    return lambda loop, layer: loop.optimizers.append(torch.optim.SGD(loop.model.parameters(), lr=lr, momentum=0.9))


def _put_back(loop: Loop, layer: str) -> None:
    """The copy for the targets is loaded into the model that learns, and not the other way round."""
    loop.after.append(lambda loop, step: loop.model.load_state_dict(loop.model.held[0].state_dict()) and None)
    loop.after.reverse()


def _by_the_critic(loop: Loop, layer: str) -> None:
    """The generator's optimizer is built of the critic's parameters: a line that was copied."""
    loop.optimizers[1] = torch.optim.Adam(loop.model["judges"].parameters(), lr=1e-3)


def _critic_not_reset(loop: Loop, layer: str) -> None:
    """The critic's gradients of the generator's step are never reset."""

    def update(loop: Loop, step: int) -> Tensor:
        (real,) = loop.batch(step)
        fake, judge = loop.model["draws"](torch.randn(len(real), 4)), loop.model["judges"]
        told = functional.relu(1 - judge(real)).mean() + functional.relu(1 + judge(fake.detach())).mean()
        told.backward()
        loop.optimizers[0].step()
        descend(loop.optimizers[1], -judge(fake).mean())
        return told.detach()

    loop.update = update


def _by_logarithms(slope: float) -> do.Change:
    """The game of logarithms, by hand, of a sigmoid that is steep."""

    def update(loop: Loop, step: int) -> Tensor:
        (real,) = loop.batch(step)
        fake, judge = (
            loop.model["draws"](torch.randn(len(real), 4)),
            lambda x: torch.sigmoid(slope * loop.model["judges"](x)),
        )
        told = -(torch.log(judge(real)) + torch.log(1 - judge(fake.detach()))).mean()
        descend(loop.optimizers[0], told)
        descend(loop.optimizers[1], -torch.log(judge(fake)).mean())
        return told.detach()

    return do.fields(update=update)


def _rate_of(index: int, factor: float) -> do.Change:
    def change(loop: Loop, layer: str) -> None:
        loop.optimizers[index].param_groups[0]["lr"] *= factor

    return change


def _unscaled_loss(loop: Loop, step: int) -> Tensor:
    """The loss is not scaled, the scaler divides the gradients all the same."""
    loop.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loop.loss(loop.model, *loop.batch(step))
    loop.scaler.scale(torch.zeros(()))
    loss.backward()
    loop.scaler.step(loop.optimizers[0])
    loop.scaler.update()
    return loss


def _anchor_is_same(model: nn.Module, anchor: Tensor, same: Tensor, labels: Tensor) -> Tensor:
    """Some pairs are a sample and itself: a distance of exactly 0."""
    return apart(model, anchor, torch.where(labels[:, None] == 0, anchor, same), labels)


def _padded(text: Tensor) -> Tensor:
    """One text of the batch is empty."""
    return text.index_fill(0, torch.tensor([5]), 0)


def _padded_source(at: int) -> do.Change:
    """From a step on a source of the batch has no word that may be looked at."""

    def change(loop: Loop, layer: str) -> None:
        now = [0]
        loop.before.append(lambda loop, step: now.__setitem__(0, step))

        def loss(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
            if now[0] < at:
                return translated(model, source, target)
            forward = torch.Tensor.masked_fill
            hidden = torch.zeros(len(source), 1, source.shape[1], dtype=torch.bool).index_fill(
                0, torch.tensor([2]), True
            )
            torch.Tensor.masked_fill = lambda logits, mask, value: forward(logits, hidden, value)
            try:
                return translated(model, source, target)
            finally:
                torch.Tensor.masked_fill = forward

        loop.loss = loss

    return change


def _poor(loop: Loop, layer: str) -> None:
    """A router's first expert begins far ahead."""
    with torch.no_grad():
        loop.model.inner.bias.fill_(1.0)
        loop.model.experts.router.weight[0] += 3.0


def _sorted(size: int) -> do.Change:
    """The file is sorted by label: batches of one label, in turn."""

    def change(loop: Loop, layer: str) -> None:
        batch = loop.batch

        def one(step: int) -> tuple[Tensor, ...]:
            several = [batch(step) for _ in range(6)]
            x, y = (torch.cat(parts) for parts in zip(*several, strict=True))
            order = (y != step // size % (int(y.max()) + 1)).int().argsort(stable=True)
            return x[order][: len(several[0][0])], y[order][: len(several[0][0])]

        loop.batch = one

    return change


def _no_aims(at: int) -> do.Change:
    return do.inputs(lambda aims: torch.full_like(aims, -100), at, at + 1, which=1)


def _ended_by_nan(loop: Loop, layer: str) -> None:
    """From step 60 on an ended walk has no next state: NaN, times 0."""
    batch = loop.batch

    def changed(step: int) -> tuple[Tensor, ...]:
        state, action, reward, after, ended = batch(step)
        return state, action, reward, after.masked_fill((ended[:, None] > 0) & (step >= 60), math.nan), ended

    loop.batch = changed


def _minus_uncertainty(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mean, spread = model(x).chunk(2, dim=1)
    variance = functional.softplus(spread) + 1e-4
    return (variance.log() / 2 - (y - mean).square() / (2 * variance)).mean()


def _no_floor(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The variance is a ReLU's output without anything added: 0 for some samples."""
    mean, spread = model(x).chunk(2, dim=1)
    variance = functional.relu(spread)
    return (variance.log() / 2 + (y - mean).square() / (2 * variance)).mean()


def _root_of_zero(loop: Loop, layer: str) -> None:
    def deviation(spread: Tensor) -> Tensor:
        return (torch.relu(spread) * spread).sqrt()

    loop.model.deviation = deviation


def _grow(loop: Loop, layer: str) -> None:
    """Encoder's head begins at 40: deviations of exp(20)."""
    with torch.no_grad():
        loop.model.encoder[-1].bias[4:] = 40.0


def _empty_state(loop: Loop, layer: str) -> None:
    loop.optimizers[0].state.clear()


def _born_again(loop: Loop, layer: str) -> None:
    for module in loop.model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


@torch.no_grad()
def _other_words(loop: Loop, layer: str) -> None:
    loop.model.words.weight.normal_(std=16.0)


def _every(hook: object, every: int, first: int) -> do.Change:
    return lambda loop, layer: loop.before.append(
        lambda loop, step: hook(loop, layer) if step >= first and (step - first) % every == 0 else None
    )  # type: ignore[operator]


_FAULTS: list[tuple[str, str, str, do.Change, int, str, tuple[str, ...]]] = [
    ("an empty text: a mean over nothing at step 40", OPINIONS, "", do.inputs(_padded, 40, 41), 40, "invalid operation", ("loss or inputs", "bad batch")),
    ("a rate of 3, for 3e-3", OPINIONS, "", do.learning_rate(1000.0), 1, "learning rate", ()),
    ("the words' vectors begin at 0, and the first layer too", OPINIONS, "words", do.chain(filled(0.0, "words.weight"), filled(0.0, "rest.0.weight")), 1, "symmetry", ("initialisation", "dead units")),
    ("a decay of 3 inside Adam", OPINIONS, "", do.groups(weight_decay=3.0), 1, "decay", ()),
    ("a file sorted by label, 40 batches of each", OPINIONS, "", _sorted(40), 1, "data change", ("bad batch",)),
    ("a moving average of 0.001 is put back every 25 steps", OPINIONS, "", average_put_back(0.001, 25), 25, "undone", ()),
    ("the vectors are not given to the optimizer", OPINIONS, "words", _without("words"), 1, "unowned", ()),
    ("dropout of 0.98 behind the words", OPINIONS, "rest.1", do.output(lambda out: functional.dropout(out, 0.98)), 1, "dead units", ("unused", "bad batch", "data scale")),
    ("the rate is halved after each batch, not each epoch", FIGURES, "", do.learning_rate(lambda step: 0.5 ** (step - 1)), 4, "zero learning rate", ("schedule",)),
    ("a decay of 4 on all, the norms too", FIGURES, "", do.groups(weight_decay=4.0), 1, "decay", ()),
    ("the sum over the batch and 40 views, not the mean", FIGURES, "", do.loss(lambda value: 640 * value), 1, "data scale", ("learning rate", "reduction")),
    ("the training goes on with a copy, step 60", FIGURES, "", do.at_step(_copied, 60), 60, "stale optimizer", ("unused", "unowned", "no step")),
    ("one pixel's byte order, 1e9, at step 55", FIGURES, "", do.inputs(do.first_sample(1e9), 55, 56), 55, "bad batch", ()),
    ("a ReLU behind the labels' logits, and biases of -6", FIGURES, "8", do.chain(do.biased(-6.0), do.output(torch.relu)), 1, "dead units", ("initialisation", "unused")),
    ("scales of all norms begin at 0", FIGURES, "", _norms(0.0), 1, "initialisation", ("symmetry", "dead units", "batch norm")),
    ("a momentum of 0.9999", FIGURES, "", do.groups(momentum=0.9999), 1, "learning rate", ("optimizer",)),
    ("the first block's gradients are reversed", FIGURES, "3", do.backward(torch.neg), 1, "backward", ("sign",)),
    ("a norm of 1e-4 is all that is left, SGD", TRANSLATED, "", do.chain(_rebuilt(torch.optim.SGD, lr=0.3), do.fields(clip=1e-4)), 1, "clipping", ("zero learning rate",)),
    ("zero_grad() once an epoch of 50", TRANSLATED, "", _once_in(50), 2, "zero_grad", ()),
    ("logits of attention 3,000 times too large", TRANSLATED, "", _attribute("heat", 3000.0), 1, "attention", ("saturation", "initialisation")),
    ("one source is padding alone from step 50 on", TRANSLATED, "", _padded_source(50), 50, "attention", ("invalid operation", "loss or inputs", "bad batch")),
    ("the writer's weights 9x", TRANSLATED, "writer", lambda loop, layer: [p.data.mul_(9.0) for p in loop.model.writer.parameters()] and None, 1, "recurrence", ("initialisation", "saturation")),
    ("what was read is detached", TRANSLATED, "reader", lambda loop, layer: do.output(Tensor.detach)(loop, "read"), 1, "unused", ()),
    ("4e-9, for 4e-3", TRANSLATED, "", do.learning_rate(1e-6), 1, "zero learning rate", ()),
    ("no warm-up, a rate of 0.3", TRANSLATED, "", do.learning_rate(75.0), 1, "learning rate", ()),
    ("the divergence is summed over the data set, 20,000x", CURVES, "", _attribute("weight", 1e6), 1, "data scale", ("learning rate", "reduction", "initialisation")),
    ("variances begin at exp(40)", CURVES, "encoder", _grow, 1, "initialisation", ("overflow", "data scale")),
    ("the divergence has the wrong sign", CURVES, "", _attribute("weight", -1.0), 1, "sign", ()),
    ("the root of a variance of exactly 0", CURVES, "", _root_of_zero, 1, "invalid operation", ("loss or inputs",)),
    ("the optimizer has the decoder alone", CURVES, "encoder", _only("decoder"), 1, "unowned", ()),
    ("a schedule returns the rate for a factor, 2e-3", CURVES, "", do.learning_rate(2e-3), 1, "zero learning rate", ("schedule",)),
    ("gradients are reversed from step 120 on", CURVES, "", gradients_times(-1.0, 120), 120, "sign", ("backward",)),
    ("a row of Inf at step 77", CURVES, "", do.inputs(do.first_sample(math.inf), 77, 78), 77, "bad batch", ("loss or inputs",)),
    ("rewards in cents of cents, 100,000x", VALUES, "", do.inputs(lambda reward: 1e5 * reward, which=2), 1, "data scale", ("learning rate",)),
    ("states that ended are NaN, times 0", VALUES, "", _ended_by_nan, 60, "loss or inputs", ("invalid operation", "bad batch", "data change")),
    ("an optimizer of a cell before steps as well, rate 3", VALUES, "", _second_optimizer(3.0), 1, "learning rate", ()),
    ("born again every 50 steps", VALUES, "", _every(_born_again, 50, 51), 51, "undone", ("bad parameter", "initialisation")),
    ("the targets' copy is put into the learner", VALUES, "", _put_back, 1, "undone", ()),
    ("RMSprop without a floor: eps of 1e5", VALUES, "", do.groups(eps=1e5), 1, "zero learning rate", ("optimizer",)),
    ("the last layer's weights 200x", VALUES, "4", do.scaled(200.0), 1, "initialisation", ()),
    ("the first layer in float16 units: inputs of 3,000", VALUES, "", do.inputs(lambda state: 3000 * state), 1, "data scale", ("initialisation", "saturation")),
    ("nothing is hidden at step 50: a mean of nothing", HIDDEN, "", _no_aims(50), 50, "loss or inputs", ("invalid operation", "bad batch")),
    ("warm-up counted in epochs: never up", HIDDEN, "", do.learning_rate(1e-3), 1, "zero learning rate", ("schedule",)),
    ("the line down goes below 0 from step 70 on", HIDDEN, "", do.fields(schedule=lambda step: min(step / 15, (70 - step) / 60)), 71, "schedule", ("learning rate",)),
    ("scales of the norms begin at 60", HIDDEN, "", _norms(60.0), 1, "initialisation", ("saturation", "attention")),
    ("a decay of 15", HIDDEN, "", do.groups(weight_decay=15.0), 1, "decay", ()),
    ("resumed at step 80 with the rate of another run, 100x", HIDDEN, "", do.learning_rate(100.0, 80), 80, "learning rate", ("schedule",)),
    ("resumed at step 70, the words' vectors by another vocabulary, 80x", HIDDEN, "words", do.at_step(_other_words, 70), 70, "bad parameter", ("initialisation", "data change")),
    ("Adam's eps of 10", HIDDEN, "", do.groups(eps=10.0), 1, "optimizer", ("zero learning rate",)),
    ("the scaler divides a loss that it did not multiply", DISCS, "", do.chain(_rebuilt(torch.optim.SGD, lr=0.3), do.fields(update=_unscaled_loss)), 1, "unscale", ("loss scale", "underflow", "zero learning rate", "reduction")),
    ("a positive weighs 3e6", DISCS, "", do.fields(loss=lambda model, x, disc: functional.binary_cross_entropy_with_logits(model(x), disc, pos_weight=torch.tensor(3e6))), 1, "data scale", ("overflow", "loss scale", "reduction", "learning rate")),
    ("masks of 255 and not of 1", DISCS, "", do.inputs(lambda disc: 255 * disc, which=1), 1, "data scale", ("sign", "loss or inputs")),
    ("probabilities by hand in float16: log(p + 1e-8)", DISCS, "", do.fields(loss=lambda model, x, disc: -(disc * torch.log((40 * model(x)).half().sigmoid() + 1e-8) + (1 - disc) * torch.log(1 - (40 * model(x)).half().sigmoid() + 1e-8)).mean()), 1, "invalid operation", ("underflow", "loss or inputs", "overflow")),
    ("what is found first is detached", DISCS, "first", do.output(Tensor.detach), 1, "unused", ()),
    ("a sample is its own pair: the root of 0", TRIPLETS, "", do.fields(loss=_anchor_is_same), 1, "invalid operation", ("loss or inputs",)),
    ("the last layer begins at 1e-9", TRIPLETS, "4", do.scaled(1e-9, bias=0.0), 1, "initialisation", ("symmetry", "invalid operation")),
    ("300x from step 70 on", TRIPLETS, "", do.learning_rate(300.0, 70), 70, "learning rate", ()),
    ("the trunk is kept as numbers", TRIPLETS, "0", lambda loop, layer: do.output(Tensor.detach)(loop, "3"), 1, "unused", ()),
    ("a ReLU with biases of -30 in the middle", TRIPLETS, "2", do.biased(-30.0), 1, "dead units", ("initialisation", "invalid operation")),
    ("step() sits in a branch that is never taken", TRIPLETS, "", do.fields(applies=False), 1, "no step", ()),
    ("weights of unit deviation, all layers", TRIPLETS, "", lambda loop, layer: [p.data.normal_() for p in loop.model.parameters() if p.dim() > 1] and None, 1, "initialisation", ("depth", "saturation")),
    ("experts are pressed to be unequal: the wrong sign", EXPERTS, "experts", do.fields(loss=lambda model, x, y: balanced(model, x, y, -3.0)), 1, "routing", ("unused", "dead units", "sign")),
    ("one expert begins far ahead", EXPERTS, "experts", _poor, 1, "routing", ("unused", "dead units", "initialisation")),
    ("the third expert was added after the optimizer", EXPERTS, "experts.experts.2", _without("experts.experts.2"), 1, "unowned", ()),
    ("one target is Inf at step 33", EXPERTS, "", do.inputs(do.first_sample(math.inf), 33, 34, which=1), 33, "bad batch", ("loss or inputs",)),
    ("targets of 20,000", EXPERTS, "", do.inputs(lambda y: 2e4 * y, which=1), 1, "data scale", ("learning rate",)),
    ("the router's gradients are reversed", EXPERTS, "experts.router", do.backward(torch.neg), 1, "backward", ("sign",)),
    ("gradients of an epoch before, zero_grad() after 60 only", EXPERTS, "", do.chain(do.fields(zeroes=False), lambda loop, layer: loop.before.append(lambda loop, step: loop.zero_grad() if step <= 60 else None)), 61, "zero_grad", ()),
    ("the critic's gradients are never reset", HINGE, "judges", _critic_not_reset, 2, "zero_grad", ()),
    ("the critic's rate 300x", HINGE, "judges", _rate_of(0, 300.0), 1, "learning rate", ()),
    ("the generator's optimizer has the critic", HINGE, "draws", _by_the_critic, 1, "unowned", ()),
    ("logarithms of a steep sigmoid", HINGE, "", _by_logarithms(400.0), 1, "invalid operation", ("loss or inputs", "overflow", "saturation")),
    ("the generator's last layer 500x", HINGE, "draws.4", do.scaled(500.0), 1, "initialisation", ("data scale",)),
    ("the generator's second layer is rounded", HINGE, "draws.2", do.output(torch.round), 1, "unused", ("dead units", "saturation")),
    ("points in metres for kilometres, 1,000x, from step 90 on", HINGE, "", do.inputs(lambda x: 1000 * x, 90), 90, "data change", ("data scale",)),
    ("the wrong sign before the error", MEANS, "", do.fields(loss=_minus_uncertainty), 1, "sign", ("invalid operation", "loss or inputs")),
    ("nothing keeps the variance from 0", MEANS, "", do.fields(loss=_no_floor), 1, "invalid operation", ("loss or inputs",)),
    ("a column divided by a deviation of 0", MEANS, "", do.inputs(lambda x: x / x.new_tensor([1, 1, 0, 1, 1]) * x.new_tensor([1, 1, 0, 1, 1])), 1, "loss or inputs", ("bad batch", "invalid operation")),
    ("what is missing is said as -999,999", MEANS, "", do.inputs(lambda x: x.masked_fill(torch.rand_like(x) < 0.05, -999999.0)), 1, "data scale", ("bad batch",)),
    ("warm restarts to 400x at step 90", MEANS, "", do.learning_rate(lambda step: 400 * 0.97 ** (step - 90), 90), 90, "learning rate", ("schedule",)),
    ("noise of 3 for privacy", MEANS, "", noised(3.0), 1, "data scale", ("bad batch", "learning rate")),
    ("amounts of which all are the same from step 110 on", MEANS, "", do.inputs(lambda y: 0 * y + 500.0, 110, which=1), 110, "data change", ("data scale",)),
    ("the likelihood summed over 50,000, SGD", MEANS, "", do.chain(_rebuilt(torch.optim.SGD, lr=1e-3), do.loss(lambda value: 50000 * value)), 1, "data scale", ("learning rate", "reduction")),
    ("a rate of 500, and no clipping", WORDS, "", do.chain(do.fields(clip=None), do.learning_rate(100.0)), 1, "learning rate", ("recurrence",)),
    ("the rate is quartered every 4 steps", WORDS, "", do.learning_rate(lambda step: 0.25 ** (step // 4)), 12, "zero learning rate", ("schedule",)),
    ("the head 100x", WORDS, "head", do.scaled(100.0), 1, "initialisation", ()),
    ("an average of 0.002 is put back every 20 steps", WORDS, "", average_put_back(0.002, 20), 20, "undone", ()),
    ("all words are unknown from step 60 on", WORDS, "", do.inputs(torch.zeros_like, 60), 60, "data change", ("bad batch", "dead units", "unused")),
    ("gradients are reversed from step 70 on", WORDS, "", gradients_times(-1.0, 70), 70, "sign", ("backward",)),
    ("the loss divided by tokens times batches, 1e9", WORDS, "", do.loss(lambda value: value / 1e9), 1, "reduction", ("underflow", "zero learning rate")),
    ("memory's states are detached", WORDS, "memory", lambda loop, layer: do.output(Tensor.detach)(loop, "drop"), 1, "unused", ()),
]  # fmt: skip


_UNDECIDABLE = frozenset({"noise of 3 for privacy"})  # a healthy training of noisy data looks the same


def sixth_faults(family: str, which: int) -> list[Fault]:
    """0: the open ones, 1: the locked ones: those of the trainings of that half."""
    half = sixth(which)
    return [
        Fault(family, name, {base: layer}, change, first_bad, cause, also, name not in _UNDECIDABLE)
        for name, base, layer, change, first_bad, cause, also in _FAULTS
        if base in half
    ]
