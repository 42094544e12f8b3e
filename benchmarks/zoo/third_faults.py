"""Faults as people make them, written down before any of them was run under `watch`: every second one is locked.

That each does harm was looked up in the trainings alone. An open fault sits in an open training, a locked one in a locked one.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from . import changes as do
from . import third_tables as tables
from .another_faults import deepened
from .faults import Fault
from .loop import Loop
from .third_models import Rezero, dice, found
from .third_trainings import follow

# The opened trainings, and the locked ones.
GPT, LSTM, FACTS, CENTRES, GATES = "decay on matrices, four batches per step", "LSTM at a rate of 20, clipped to 0.25", "facts as ways, lengths put back to 1", "centres and sizes, most pixels empty", "blocks behind gates that begin at 0"  # fmt: skip
LEVELS, RIVALS, ATOMS, WORLD, TEACHER = "every level of noise, preconditioned", "relativistic GAN, slopes penalised", "Q-learning with 21 atoms", "a world of pendulums", "a student that teaches itself"  # fmt: skip
EQUATION, SURVIVAL, RANK, FREE = "an equation and its ends", "survival, proportional hazards", "documents in order, lambdas", "free of schedules"  # fmt: skip
HEARS, COMPANY, MASKS, DICE, CONTROL = "a decoder that hears itself ever more often", "words by their company", "masks of all levels", "few pixels of a spot, dice", "a copy that speaks through layers of 0"  # fmt: skip
BOLTZMANN, UNIT, CYCLE, QUANTILES, TEMPER = "Boltzmann machine", "rows of length 1", "two clouds, there and back", "Q-learning with quantiles and priorities", "soft actor-critic, three actions, its own temperature"  # fmt: skip
TWINS, FORCES, CLAIMS, GRADES, PRODIGY = "two views, features decorrelated", "energies of molecules and their forces", "amounts claimed, gamma", "grades by cumulative logits", "a rate that finds itself"  # fmt: skip


def _rate_of(which: int, factor: float, at: int = 1) -> do.Change:
    """One of several optimizers' rate."""

    def change(loop: Loop, layer: str) -> None:
        for group in loop.optimizers[which].param_groups:
            group["lr"] *= factor

    return do.at_step(change, at)


def _half_squares(loop: Loop, layer: str) -> None:
    """Adam's squares are stored in float16, in which most of them are 0."""
    loop.optimizers[0].kept = torch.float16  # type: ignore[attr-defined]


def _clipped_late(loop: Loop, layer: str) -> None:
    loop.clip = None
    loop.after.append(lambda loop, step: nn.utils.clip_grad_norm_(loop.model.parameters(), 0.25) and None)


def _clipped_scaled(loop: Loop, layer: str) -> None:
    loop.scaler = torch.amp.GradScaler("cpu")
    loop.received.append(do.clip_scaled)


def _never_unscaled(loop: Loop, layer: str) -> None:
    """The scaler scales the loss, and then the optimizer itself makes the step."""
    scaler = torch.amp.GradScaler("cpu")

    def update(loop: Loop, step: int) -> Tensor:
        loop.zero_grad()
        loss = loop.loss(loop.model, *loop.batch(step))
        scaler.scale(loss).backward()
        loop.optimizers[0].step()
        return loss

    loop.update = update


def _shares_in_half(model: nn.Module, x: Tensor, centres: Tensor, sizes: Tensor) -> Tensor:
    """Each pixel's share of what is empty, by exp and sum in half precision."""
    empty = (-10 * model(x)[0]).half().exp()
    share = empty / empty.sum(dim=(1, 2), keepdim=True)
    return found(model, x, centres, sizes) + 0.01 * (share * centres).sum(dim=(1, 2)).mean()


def _in_bfloat16(loop: Loop, layer: str) -> None:
    loop.model.bfloat16()
    batch = loop.batch
    loop.batch = lambda step: tuple(part.bfloat16() if part.is_floating_point() else part for part in batch(step))


def _hazards_by_hand(model: nn.Module, x: Tensor, time: Tensor, event: Tensor) -> Tensor:
    order = time.argsort(descending=True)
    score, event = model(x)[order, 0], event[order]
    return -((score - score.exp().cumsum(dim=0).log()) * event).sum() / event.sum().clamp(min=1)


def _deviance(model: nn.Module, x: Tensor, amount: Tensor) -> Tensor:
    share = amount / model(x)[:, 0].exp()
    return (share - share.log()).mean()


def _lambdas_by_gain(model: nn.Module, x: Tensor, grade: Tensor) -> Tensor:
    """As the healthy one, and on top each query's mean score by its ideal gain, which may be 0."""
    ideal = (2**grade - 1).sum(dim=1)
    score = (model(x)[:, :, 0] * (2**grade - 1)).sum(dim=1) / ideal
    return tables.lambdas(model, x, grade) - 0.01 * torch.tanh(score).mean()


def _spot_brightness(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """What the spot's pixels are on average, weighted by the mask."""
    return dice(model, x, mask) - 0.01 * torch.tanh((model(x) * mask).sum() / mask.sum())


def _itself(model: nn.Module, head: Tensor, relation: Tensor, tail: Tensor, wrong: Tensor) -> Tensor:
    """Wrong tails are to be far from the right ones; some of them are the right ones."""
    apart = (model.entities(tail) - model.entities(wrong)).square().sum(dim=1).sqrt()
    return model(head, relation, tail, wrong) - 0.01 * apart.mean()


def _round_coordinates(model: nn.Module, x: Tensor, edge: Tensor) -> Tensor:
    """The equation around a centre: u'' + u' / x."""
    x = x.requires_grad_(True)
    slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    curved = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
    return (curved + slope / x + torch.sin(3 * x)).square().mean() + 10 * model(edge).square().mean()


def _loss(loss: object, *then: do.Change) -> do.Change:
    return do.chain(do.fields(loss=loss), *then)


def _weighted_ends(model: nn.Module, x: Tensor, edge: Tensor) -> Tensor:
    return tables.equation(model, x, edge, weight=1e6)


def _without_graph(model: nn.Module, x: Tensor, edge: Tensor) -> Tensor:
    return tables.equation(model, x, edge, through=False)


def _forbidden(loop: Loop, layer: str) -> None:
    """From step 70 on the first action is forbidden in half of the states: its probability is 0."""
    now = [0]
    loop.before.append(lambda loop, step: now.__setitem__(0, step))
    forbidden = torch.zeros(32, 3, dtype=torch.bool)
    forbidden[:16, 0] = True
    loop.loss = lambda logits: logits.masked_fill(forbidden & (now[0] >= 70), -math.inf).log_softmax(dim=1)


def _each_to_itself(atoms: Tensor) -> Tensor:
    first, second = torch.combinations(torch.arange(4)).T
    return (atoms[:, :, None] - atoms[:, None]).square().sum(dim=3).sqrt()[:, first, second]


def _twelfth_power(atoms: Tensor) -> Tensor:
    """In nanometres, and in half precision."""
    return ((tables.apart(atoms) / 10).half() ** -12).float()


def _model(**values: object) -> do.Change:
    """Attributes of the model."""

    def change(loop: Loop, layer: str) -> None:
        for name, value in values.items():
            setattr(loop.model, name, value)

    return change


def _change_at_rest(out: Tensor) -> Tensor:
    """The root of the mean square of a change that is 0: by hand, its slope is 0/0."""
    rest = out[:, :1].expand_as(out)
    return out + 1e-3 * (rest[:, 1:] - rest[:, :-1]).square().mean(dim=1, keepdim=True).sqrt()


def _nothing_allowed(out: Tensor) -> Tensor:
    """A mask of -Inf is added to the first sample's logits."""
    mask = torch.zeros(len(out), 1)
    mask[0] = -math.inf
    return out + mask


def _padded_source(loop: Loop, layer: str) -> None:
    do.output(do.first_sample(-math.inf), 50, 51)(loop, "logits")


def _uniform(low: float, high: float) -> do.Change:
    def change(loop: Loop, layer: str) -> None:
        with torch.no_grad():
            for name, parameter in loop.model.named_parameters():
                if parameter.dim() > 1 and name.startswith(layer):
                    parameter.uniform_(low, high)

    return change


@torch.no_grad()
def _wide_gates(loop: Loop, layer: str) -> None:
    for module in loop.model.modules():
        if isinstance(module, Rezero):
            module.gate.fill_(10.0)


def _hot_attention(loop: Loop, layer: str) -> None:
    """Multiplied with the root of the width, and once more by a scale that was meant for cosines."""
    for module in loop.model.modules():
        if hasattr(module, "scale"):
            module.scale = 300.0


def _element(value: float) -> do.Change:
    """One element of a layer's matrix, as a file holds it."""

    def change(loop: Loop, layer: str) -> None:
        with torch.no_grad():
            loop.model.get_submodule(layer).weight[0, 0] = value

    return change


def _average_put_back(loop: Loop, layer: str) -> None:
    average = copy.deepcopy(loop.model)

    def put(loop: Loop, step: int) -> None:
        follow(average, loop.model, 1e-4)
        follow(loop.model, average, 1.0)

    loop.after.append(put)


def _start_put_back(loop: Loop, layer: str) -> None:
    """The rows that are put back are those of a copy that was made once."""
    start = copy.deepcopy(loop.model)
    loop.after.append(lambda loop, step: follow(loop.model, start, 1.0))


def _still_teacher(loop: Loop, layer: str) -> None:
    loop.after.clear()


def _column(value: float, rows: int | None = None) -> do.Transform:
    def changed(x: Tensor) -> Tensor:
        x = x.clone()
        x[:rows, 0] = value
        return x

    return changed


def _one_place(atoms: Tensor) -> Tensor:
    """Of the first molecule, two atoms."""
    atoms = atoms.clone()
    atoms[0, 1] = atoms[0, 0] + 1e-3
    return atoms


def _shuffled(y: Tensor) -> Tensor:
    return y[torch.randperm(len(y))]


# (name, training, layer, change, first bad step, cause, also, decidable)
_FAULTS: list[tuple[str, str, str, do.Change, int, str, tuple[str, ...], bool]] = [
    ("the small run's rate 30x, no warm-up", GPT, "", do.chain(do.fields(schedule=None), do.learning_rate(30)), 1, "learning rate", (), True),
    ("a rate of 0.3, from plain descent, for Adam", MASKS, "", do.chain(do.fields(schedule=None), do.learning_rate(50)), 1, "learning rate", (), True),
    ("Adam, and the rate of 20 is kept", LSTM, "", do.optimizer(lambda p: torch.optim.Adam(p, lr=20.0)), 1, "learning rate", (), True),  # type: ignore[arg-type]
    ("the rate in proportion to tokens, not sentences, 200x", GRADES, "", do.learning_rate(200), 1, "learning rate", (), True),
    ("the decay of an epoch at each batch", ATOMS, "", do.learning_rate(lambda step: 0.7**step), 20, "zero learning rate", ("schedule",), True),
    ("a rate of 1e-9 instead of 1e-3", CLAIMS, "", do.learning_rate(1e-6), 1, "zero learning rate", ("no step",), True),
    ("one cycle up to 300x", GATES, "", do.learning_rate(lambda step: 300 ** max(0.0, 1 - abs(step - 60) / 40)), 30, "learning rate", ("schedule",), True),
    ("a warm restart at 400x at step 90", CONTROL, "", do.learning_rate(lambda step: 400 * 0.97 ** (step - 90), 90), 90, "learning rate", ("schedule",), True),
    ("a linear decay that goes on below 0", RANK, "", do.learning_rate(lambda step: 1 - step / 70), 71, "schedule", ("learning rate", "sign"), True),
    ("the schedule's end in epochs: 0 from step 50", HEARS, "", do.learning_rate(lambda step: max(0.0, 1 - step / 50)), 50, "zero learning rate", ("schedule", "no step"), True),
    ("the judge's rate 300x", RIVALS, "judge", _rate_of(0, 300.0), 1, "learning rate", (), True),
    ("the critics' rate 1000x from step 80", TEMPER, "critics", _rate_of(0, 1000.0, 80), 80, "learning rate", (), True),
    ("a tenth whenever the accuracy does not fall: each 15 steps", WORLD, "", do.learning_rate(lambda step: 0.1 ** (step // 15)), 60, "zero learning rate", ("schedule",), True),
    ("the estimate of the distance begins at 1,000", PRODIGY, "", do.groups(d=1000.0), 1, "learning rate", ("optimizer",), True),
    ("squares stored in float16", FREE, "", _half_squares, 1, "optimizer", ("underflow", "overflow", "learning rate"), True),
    ("eps of 1e8 instead of 1e-8", TEMPER, "", do.groups(eps=1e8), 1, "optimizer", ("zero learning rate", "no step"), True),
    ("momentum of 0.999", GATES, "", do.groups(momentum=0.999), 1, "learning rate", ("optimizer",), True),
    ("momentum of 9 instead of 0.9", GRADES, "", do.groups(momentum=9.0), 1, "optimizer", ("learning rate",), True),
    ("decay of 50 on everything", SURVIVAL, "", do.groups(weight_decay=50.0), 1, "decay", (), True),
    ("decay of -20", TWINS, "", do.groups(weight_decay=-20.0), 1, "decay", (), True),
    ("squares of all parameters in the loss, weight 5", WORLD, "", do.penalised(5.0), 1, "decay", (), True),
    ("decay of 3 in plain descent", DICE, "", do.groups(weight_decay=3.0), 1, "decay", (), True),
    ("clipped after the step", LSTM, "", _clipped_late, 1, "learning rate", ("recurrence", "clipping"), True),
    ("clipped to 1e-6 instead of 1", UNIT, "", do.fields(clip=1e-6), 1, "clipping", ("zero learning rate",), True),
    ("clipped before unscale_()", GATES, "", _clipped_scaled, 1, "unscale", ("clipping",), True),
    ("the scaler scales, the optimizer itself makes the step", DICE, "", _never_unscaled, 1, "loss scale", ("unscale", "learning rate", "data scale"), True),
    ("a softmax by hand in float16 overflows", CENTRES, "", do.fields(loss=_shares_in_half, scaler=torch.amp.GradScaler("cpu")), 1, "overflow", ("invalid operation", "loss or inputs", "loss scale"), True),
    ("the twelfth power of nanometres in float16", FORCES, "", _model(far=_twelfth_power), 1, "overflow", ("invalid operation", "loss or inputs"), True),
    ("model.half() and Adam", EQUATION, "", do.halved, 1, "optimizer", ("overflow", "underflow"), True),
    ("bfloat16, and a rate that it rounds away", CLAIMS, "", do.chain(_in_bfloat16, do.learning_rate(1e-3)), 1, "zero learning rate", ("no step", "underflow", "optimizer"), True),
    ("the ends weigh 1,000,000", EQUATION, "", _loss(_weighted_ends), 1, "data scale", ("learning rate", "reduction"), False),
    ("summed over the batch, plain descent", COMPANY, "", do.loss(lambda value: 64 * value), 1, "data scale", ("learning rate", "reduction"), True),
    ("exp and log by hand, and other units at step 90", SURVIVAL, "", _loss(_hazards_by_hand, do.inputs(lambda x: 1000 * x, 90, 91)), 90, "overflow", ("invalid operation", "loss or inputs", "bad batch"), True),
    ("the logarithm of an amount of 0 at step 60", CLAIMS, "", _loss(_deviance, do.inputs(do.first_sample(0.0), 60, 61, which=1)), 60, "invalid operation", ("loss or inputs", "bad batch"), True),
    ("a query without a relevant document at step 70: 0/0", RANK, "", _loss(_lambdas_by_gain, do.inputs(lambda grade: grade.clamp(min=1), 1, 70, which=1), do.inputs(do.first_sample(0.0), 70, 71, which=1)), 70, "loss or inputs", ("invalid operation", "bad batch"), True),
    ("a mean over a spot that is not there, at step 50", DICE, "", _loss(_spot_brightness, do.inputs(torch.zeros_like, 50, 51, which=1)), 50, "loss or inputs", ("invalid operation", "bad batch"), True),
    ("the root of a tail's distance to itself", FACTS, "entities", _loss(_itself), 1, "invalid operation", ("loss or inputs",), True),
    ("features that never fire are divided by their deviation", TWINS, "3", do.output(lambda out: torch.relu(out - 5)), 1, "invalid operation", ("loss or inputs", "dead units"), True),
    ("log(sigmoid) by hand, a temperature of 0.001", RIVALS, "", _loss(lambda margin: -torch.log(torch.sigmoid(margin / 0.001)).mean()), 1, "invalid operation", ("loss or inputs", "overflow"), True),
    ("p log p of an action that is forbidden from step 70", TEMPER, "actor", _forbidden, 70, "invalid operation", ("loss or inputs",), True),
    ("a point at the centre at step 60: 1/x", EQUATION, "", _loss(_round_coordinates, do.inputs(lambda x: x.clamp(min=0.1)), do.inputs(do.first_sample(0.0), 60, 61)), 60, "loss or inputs", ("invalid operation", "bad batch"), True),
    ("log(1 + exp(x)) by hand, and bytes from step 80", BOLTZMANN, "", do.chain(_model(softplus=lambda x: torch.log(1 + x.exp())), do.inputs(lambda x: 255 * x, 80)), 80, "overflow", ("invalid operation", "loss or inputs", "data change", "data scale"), True),
    ("averaged three times: / 1e10", LEVELS, "", do.loss(lambda value: value / 1e10), 1, "reduction", ("underflow", "zero learning rate"), True),
    ("divided by the tokens of the whole corpus", MASKS, "", do.loss(lambda value: value / 1e9), 1, "reduction", ("underflow", "zero learning rate"), True),
    ("the likelihood is minimised", SURVIVAL, "", do.loss(torch.neg), 1, "sign", (), True),
    ("the likelihood is minimised from step 60", CLAIMS, "", do.loss(torch.neg, 60), 60, "sign", ("data change",), True),
    ("a state in which nothing is allowed at step 60", ATOMS, "0.4", do.output(_nothing_allowed, 60, 61), 60, "invalid operation", ("loss or inputs", "bad batch", "attention"), True),
    ("a source of padding alone at step 50", HEARS, "", _padded_source, 50, "attention", ("invalid operation", "loss or inputs", "bad batch"), True),
    ("the root of a change of what rests from step 40", WORLD, "encoder", do.output(_change_at_rest, 40), 40, "invalid operation", ("loss or inputs",), True),
    ("distances by hand, each atom to itself", FORCES, "", _model(far=_each_to_itself), 1, "invalid operation", ("loss or inputs",), True),
    ("a backward that sums instead of averaging, 768x, from step 50", GATES, "6", do.backward(lambda grad: 768 * grad, 50), 50, "backward", ("invalid operation", "depth"), True),
    ("a reversal of gradients, 10,000x, from step 60", CONTROL, "copy.2", do.backward(lambda grad: -1e4 * grad, 60), 60, "backward", ("sign", "invalid operation"), True),
    ("all logits of attention 300x", GPT, "", _hot_attention, 1, "attention", ("saturation", "initialisation"), True),
    ("queries merged twice, 300x, at step 60", MASKS, "layers.0.attention.q", do.at_step(do.scaled(300.0), 60), 60, "attention", ("bad parameter", "saturation", "initialisation"), True),
    ("one weight of the file is Inf at step 60", GPT, "blocks.1.mlp.0", do.at_step(_element(math.inf), 60), 60, "bad parameter", (), True),
    ("one weight of two files' average is NaN at step 60", MASKS, "layers.0.inner.2", do.at_step(_element(math.nan), 60), 60, "bad parameter", (), True),
    ("zero_grad() after the last of four batches", GPT, "", do.received(do.zero_gradients), 1, "zeroed", (), True),
    ("the generators' gradients are never reset", CYCLE, "", do.fields(zeroes=False), 2, "zero_grad", (), True),
    ("the generator's samples are detached for both", RIVALS, "generator", do.output(Tensor.detach), 1, "unused", (), True),
    ("the views' .data", TWINS, "0", do.output(Tensor.detach), 1, "unused", (), True),
    ("the student's head is replaced after the optimizer was built", TEACHER, "1", do.replaced_layer, 1, "unowned", ("stale optimizer",), True),
    ("the optimizer holds the model from before a copy", MASKS, "", do.another_model, 1, "stale optimizer", ("unowned", "no step"), True),
    ("the average is put back into the model", LEVELS, "", _average_put_back, 1, "undone", ("no step",), True),
    ("the rows of the first step are put back", UNIT, "", _start_put_back, 1, "undone", ("no step",), True),
    ("the encoder is frozen from step 50", WORLD, "encoder", do.at_step(lambda loop, layer: loop.model.get_submodule(layer).requires_grad_(False) and None, 50), 50, "unused", (), False),
    ("eval() is never left after step 40", DICE, "", do.at_step(lambda loop, layer: loop.model.eval() and None, 40), 40, "batch norm", (), False),
    ("the slope without a graph", EQUATION, "", _loss(_without_graph), 1, "unused", (), False),
    ("a discount of 9 instead of 0.9", TEMPER, "critics", do.inputs(lambda discount: 10 * discount, which=1), 1, "data scale", ("data change", "learning rate"), True),
    ("biases of -25 before a ReLU", ATOMS, "0.0", do.biased(-25.0), 1, "dead units", ("initialisation",), True),
    ("an embedding of size 50", HEARS, "tokens", do.scaled(50.0), 1, "initialisation", ("saturation", "recurrence", "data scale"), True),
    ("recurrent weights between -5 and 5", LSTM, "memory", _uniform(-5.0, 5.0), 1, "recurrence", ("initialisation", "saturation"), True),
    ("thirty ReLU layers of gain 0.5", GRADES, "net.2", deepened(30, nn.ReLU, 0.5), 1, "depth", ("initialisation", "dead units"), True),
    ("twenty ReLU layers of gain 4", RANK, "2", deepened(20, nn.ReLU, 4.0), 1, "depth", ("initialisation",), True),
    ("every weight is 1", QUANTILES, "", do.filled(1.0), 1, "symmetry", ("initialisation",), True),
    ("weights between 0 and 1", EQUATION, "", _uniform(0.0, 1.0), 1, "initialisation", ("saturation", "depth"), True),
    ("weights of all layers 30x", CLAIMS, "", do.scaled(30.0, every=True), 1, "initialisation", ("saturation", "depth"), True),
    ("the gates begin at 10", GATES, "", _wide_gates, 1, "depth", ("initialisation",), True),
    ("the copy begins at 0 as well", CONTROL, "copy", do.scaled(0.0, bias=0.0), 1, "symmetry", ("initialisation", "unused", "dead units"), True),
    ("seconds since 1970 as a column", SURVIVAL, "", do.inputs(_column(1.7e9)), 1, "data scale", (), True),
    ("two atoms in one place at step 60", FORCES, "", do.inputs(_one_place, 60, 61), 60, "bad batch", ("overflow", "invalid operation", "loss or inputs", "data scale"), True),
    ("an age that is missing (NaN) at step 70", SURVIVAL, "", do.inputs(do.first_sample(math.nan), 70, 71), 70, "bad batch", ("loss or inputs",), True),
    ("amounts in cents from step 80", CLAIMS, "", do.inputs(lambda amount: 100 * amount, 80, which=1), 80, "data change", ("data scale",), True),
    ("rewards 1000x from step 80", WORLD, "", do.inputs(lambda worth: 1000 * worth, 80, which=1), 80, "data change", ("data scale",), True),
    ("-99,999 for what is missing", GRADES, "", do.inputs(_column(-99999.0, 6)), 1, "data scale", ("bad batch",), True),
    ("pictures in bytes from step 60", CENTRES, "", do.inputs(lambda x: 255 * x, 60), 60, "data change", ("data scale",), True),
    ("one batch of another sensor, 5,000x, at step 100", GRADES, "", do.inputs(lambda x: 5000 * x, 100, 101), 100, "bad batch", (), True),
    ("dark pictures from step 70", CENTRES, "", do.inputs(torch.zeros_like, 70), 70, "data change", ("bad batch", "dead units"), True),
    ("labels shuffled from step 90", CONTROL, "", do.inputs(_shuffled, 90, which=2), 90, "data change", (), True),
]  # fmt: skip


def third_faults(family: str, which: int) -> list[Fault]:
    """0: the open ones, 1: the locked ones; every second one of the table."""
    return [
        Fault(family, name, {base: layer}, change, first_bad, cause, also, decidable)
        for name, base, layer, change, first_bad, cause, also, decidable in _FAULTS[which::2]
    ]
