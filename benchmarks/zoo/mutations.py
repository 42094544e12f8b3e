"""The catalogue of mutations: what a fault does to a training before it runs. Sets name them, with their parameters.

Each is a function of the training and of the layer of the fault, which a parameter `layer` replaces. `by` is the
specification of a transform; `at` and `until` are the first step and the one after the last.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from .loop import Batch, Hook, Loop
from .parts import wrong
from .specification import called, formula, named
from .transforms import Transform, transform

NEVER: Final = 10**9
Spec = str | Sequence[Any]
Mutation = tuple[str, dict[str, Any]]


def mutate(loop: Loop, layer: str, mutations: Sequence[Mutation]) -> None:
    """Apply mutations to a training, one after the other."""
    for kind, options in mutations:
        MUTATIONS[kind](loop, **{"layer": layer} | options)


def at(loop: Loop, layer: str, step: int, do: Sequence[Mutation]) -> None:
    """Apply mutations before a step instead of before the training."""
    loop.before.append(lambda loop, now: mutate(loop, layer, do) if now == step else None)


# ---- the loop, its schedule and its optimizers ----


def fields(loop: Loop, layer: str, **values: Any) -> None:
    """Set fields of the training; a schedule is a formula, a scaler its options."""
    for name, value in values.items():
        if name == "schedule" and value is not None:
            value = formula(value)
        if name == "scaler" and value is not None:
            value = torch.amp.GradScaler("cpu", **value)
        setattr(loop, name, value)


def rate(loop: Loop, layer: str, by: float | str, at: int = 1, until: int = NEVER) -> None:
    """Multiply the learning rate by a factor, or by a formula of the step."""
    before, factor = loop.schedule or (lambda step: 1.0), formula(by)
    loop.schedule = lambda step: before(step) * (factor(step) if at <= step < until else 1.0)


def rate_compounded(loop: Loop, layer: str, by: float) -> None:
    """Each step multiplies the rate that the step before left, not the first rate."""
    loop.schedule = None

    def multiply(loop: Loop, step: int) -> None:
        for group in (group for optimizer in loop.optimizers for group in optimizer.param_groups):
            group["lr"] *= by

    loop.before.append(multiply)


def rate_of_layer(loop: Loop, layer: str, by: float, **options: float) -> None:
    """A layer becomes a parameter group of its own."""
    optimizer, own = loop.optimizers[0], set(loop.model.get_submodule(layer).parameters())
    group = optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if parameter not in own]
    optimizer.add_param_group({"params": list(own), "lr": by * group["lr"], **options})


def rate_of_group(loop: Loop, layer: str, by: float, optimizer: int = 0, group: int = 0) -> None:
    loop.optimizers[optimizer].param_groups[group]["lr"] *= by


def groups(loop: Loop, layer: str, **values: Any) -> None:
    """Set options of all parameter groups."""
    for group in (group for optimizer in loop.optimizers for group in optimizer.param_groups):
        group |= values


def optimizer(
    loop: Loop, layer: str, kind: str, index: int | None = None, added: bool = False, of: str = "", **options: Any
) -> None:
    """Replace all optimizers, or one, or add one: of the trained parameters of a module."""
    parameters = [parameter for parameter in loop.model.get_submodule(of).parameters() if parameter.requires_grad]
    made = getattr(torch.optim, kind)(parameters, **options)
    if added:
        loop.optimizers.append(made)
    elif index is None:
        loop.optimizers = [made]
    else:
        loop.optimizers[index] = made


def given(loop: Loop, layer: str, only: str = "", without: str = "") -> None:
    """The optimizer is given some of the parameters: those whose name has a part, or has it not."""
    chosen = []
    for name, parameter in loop.model.named_parameters():
        is_left_out = without and without in f".{name}."
        if parameter.requires_grad and only in f".{name}." and not is_left_out:
            chosen.append(parameter)
    loop.optimizers[0].param_groups[0]["params"] = chosen


def state(loop: Loop, layer: str, name: str, by: Spec, num: int | None = None) -> None:
    """Transform one of the optimizer's averages, of all or of the first parameters."""
    for one in list(loop.optimizers[0].state.values())[:num]:
        one[name] = transform(by)(one[name])


def squares_forgotten(loop: Loop, layer: str, since: int) -> None:
    """From a step on the average of squares begins anew with each step."""
    loop.before.append(lambda loop, step: state(loop, layer, "exp_avg_sq", "zeros") if step >= since else None)


def squares_in_half(loop: Loop, layer: str) -> None:
    """Adam's squares are stored in float16, in which most of them are 0."""
    loop.optimizers[0].kept = torch.float16


# ---- the order of the calls ----


def zero_grad_at(loop: Loop, layer: str, every: int = 1, until: int = NEVER) -> None:
    """zero_grad() is called once in some steps, or up to a step only."""

    def before(loop: Loop, step: int) -> None:
        loop.zeroes = (every == 1 or step % every == 1) and step <= until

    loop.before.append(before)


def zeroed(loop: Loop, layer: str, set_to_none: bool = True) -> None:
    """zero_grad() is called between backward() and step()."""
    loop.received.append(lambda loop, step: [o.zero_grad(set_to_none=set_to_none) for o in loop.optimizers] and None)


def step_first(loop: Loop, layer: str) -> None:
    """Call zero_grad(), step(), backward() in this order: the optimizer never has a gradient."""

    def update(loop: Loop, step: int) -> Tensor:
        loop.zero_grad()
        loop.apply(step)
        loss = loop.loss(loop.model, *loop.batch(step))
        loss.backward()
        return loss

    loop.update = update


def no_backward(loop: Loop, layer: str, since: int) -> None:
    """From a step on neither zero_grad() nor backward() is reached: the last gradient is applied again and again."""

    def update(loop: Loop, step: int) -> Tensor:
        if step < since:
            return loop.plain_update(step)
        with torch.no_grad():
            loss = loop.loss(loop.model, *loop.batch(step))
        loop.apply(step)
        return loss

    loop.update = update


def gradients_late(loop: Loop, layer: str, steps: int) -> None:
    waiting: list[list[Tensor | None]] = []

    def hook(loop: Loop, step: int) -> None:
        waiting.append([parameter.grad for parameter in loop.model.parameters()])
        if len(waiting) > steps:
            for parameter, grad in zip(loop.model.parameters(), waiting.pop(0), strict=True):
                parameter.grad = grad
        else:
            loop.zero_grad()

    loop.received.append(hook)


def never_unscaled(loop: Loop, layer: str) -> None:
    """The scaler scales the loss, and then the optimizer itself makes the step."""
    scaler = torch.amp.GradScaler("cpu")

    def update(loop: Loop, step: int) -> Tensor:
        loop.zero_grad()
        loss = loop.loss(loop.model, *loop.batch(step))
        scaler.scale(loss).backward()
        loop.optimizers[0].step()
        return loss

    loop.update = update


def never_scaled(loop: Loop, layer: str) -> None:
    """The loss is not scaled, the scaler divides the gradients all the same."""

    def update(loop: Loop, step: int) -> Tensor:
        scaler = loop.scaler
        assert scaler is not None
        loop.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loop.loss(loop.model, *loop.batch(step))
        scaler.scale(torch.zeros(()))
        loss.backward()
        scaler.step(loop.optimizers[0])
        scaler.update()
        return loss

    loop.update = update


# ---- gradients between backward() and step() ----


def gradients(loop: Loop, layer: str, by: Spec, at: int = 1) -> None:
    """Transform every gradient between backward() and step()."""
    change = transform(by)

    def hook(loop: Loop, step: int) -> None:
        for parameter in loop.model.parameters():
            if step >= at and parameter.grad is not None:
                parameter.grad = change(parameter.grad)

    loop.received.append(hook)


def clipped(loop: Loop, layer: str, norm: float, when: str = "received") -> None:
    """Clip by the norm where it is wrong: before unscale_(), or after the step."""
    hooks: list[Hook] = getattr(loop, when)
    hooks.append(lambda loop, step: nn.utils.clip_grad_norm_(loop.model.parameters(), norm) and None)


def clipped_by_values(loop: Loop, layer: str, limit: float) -> None:
    loop.received.append(lambda loop, step: nn.utils.clip_grad_value_(loop.model.parameters(), limit))


def norm_always(loop: Loop, layer: str, norm: float) -> None:
    """Clipping by hand, without min(1, .): small gradients are made larger."""

    def hook(loop: Loop, step: int) -> None:
        grads = [p.grad for p in loop.model.parameters() if p.grad is not None]
        total = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(norm / total)

    loop.received.append(hook)


# ---- data ----


def batch(
    loop: Loop, layer: str, by: Spec, part: int | str = 0, at: int = 1, until: int = NEVER, every: int = 1
) -> None:
    """Transform one of the batch's tensors, or "all", within some steps, at every n-th of them."""
    before, change = loop.batch, transform(by)

    def changed(step: int) -> Batch:
        tensors = list(before(step))
        if at <= step < until and (step - at) % every == 0:
            for index in range(len(tensors)) if part == "all" else [int(part)]:
                tensors[index] = change(tensors[index])
        return tuple(tensors)

    loop.batch = changed


def first_batch_again(loop: Loop, layer: str) -> None:
    """next(iter(loader)) in the loop, with a fixed order: the first batch every time."""
    first = loop.batch(1)
    loop.batch = lambda step: first


def first_sample_again(loop: Loop, layer: str, since: int) -> None:
    """From a step on the loader returns the first batch's first sample, as often as a batch is large."""
    before: Callable[[int], Batch] = loop.batch
    kept: list[Batch] = []

    def same(step: int) -> Batch:
        if not kept:
            kept.append(before(step))
        return tuple(part[:1].expand_as(part) for part in kept[0]) if step >= since else before(step)

    loop.batch = same


def sorted_by_label(loop: Loop, layer: str, steps: int, classes: int, batches: int, size: int) -> None:
    """Nobody shuffled: some steps of one class, then of the next; of a few batches the samples of it come first."""
    before = loop.batch

    def ordered(step: int) -> Batch:
        x, y = (torch.cat(parts) for parts in zip(*(before(step) for _ in range(batches)), strict=True))
        order = (y != step // steps % classes).int().argsort(stable=True)[:size]
        return x[order], y[order]

    loop.batch = ordered


def one_topic_at_a_time(loop: Loop, layer: str, steps: int) -> None:
    """Texts sorted by their topic."""

    def ordered(step: int) -> Batch:
        topic = torch.full((32,), (step - 1) // steps % 5)
        own = 10 * topic[:, None] + torch.randint(0, 10, (32, 14))
        return torch.where(torch.rand(32, 14) < 0.3, own, torch.randint(0, 50, (32, 14))), topic

    loop.batch = ordered


def other_tokenizer(loop: Loop, layer: str, since: int, words: int) -> None:
    """The words are numbered in another order."""
    before, order = loop.batch, torch.randperm(words)
    loop.batch = lambda step: tuple(order[part] for part in before(step)) if step >= since else before(step)


def twins(loop: Loop, layer: str, step: int) -> None:
    """The same picture twice, as a pair of two persons."""
    before = loop.batch

    def changed(now: int) -> Batch:
        first, second, same = before(now)
        if now == step:
            second, same = second.clone(), same.clone()
            second[0], same[0] = first[0], False
        return first, second, same

    loop.batch = changed


def ended_by_nan(loop: Loop, layer: str, since: int) -> None:
    """An ended walk has no next state: NaN, which the loss multiplies by 0."""
    before = loop.batch

    def changed(step: int) -> Batch:
        *known, after, ended = before(step)
        return *known, after.masked_fill((ended[:, None] > 0) & (step >= since), math.nan), ended

    loop.batch = changed


def dataset(loop: Loop, layer: str, make: Sequence[Any]) -> None:
    """Train on another data set."""
    loop.batch = called(make)


# ---- forward, loss and backward ----


def output(loop: Loop, layer: str, by: Spec, at: int = 1, until: int = NEVER, of: str | None = None) -> None:
    """Transform the output of the layer, or of all modules of a name, within some steps."""
    _transform_outputs(loop, layer, transform(by), at, until, of)


def backward(loop: Loop, layer: str, by: Spec, at: int = 1, until: int = NEVER) -> None:
    """Transform the gradient of the layer's output within some steps."""
    change = transform(by)
    _transform_outputs(loop, layer, lambda out: _Backward.apply(out, change), at, until, None)


def _transform_outputs(loop: Loop, layer: str, change: Transform, at: int, until: int, of: str | None) -> None:
    now = _clock(loop)

    def hook(module: nn.Module, args: object, out: Tensor) -> Tensor | None:
        return change(out) if at <= now[0] < until else None

    names = [layer] if of is None else [name for name, _ in loop.model.named_modules() if name.endswith(of)]
    for name in names:
        loop.model.get_submodule(name).register_forward_hook(hook)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, change: Transform) -> Tensor:
        context.change = change
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return context.change(grad), None


def _clock(loop: Loop) -> list[int]:
    """The number of the step that is made, as the only element."""
    now = [0]
    loop.before.append(lambda loop, step: now.__setitem__(0, step))
    return now


def loss(loop: Loop, layer: str, by: Spec, at: int = 1, until: int = NEVER) -> None:
    """Transform the loss within some steps."""
    now, before, change = _clock(loop), loop.loss, transform(by)

    def changed(model: nn.Module, *batch: Tensor) -> Tensor:
        value = before(model, *batch)
        return change(value) if at <= now[0] < until else value

    loop.loss = changed


def loss_replaced(loop: Loop, layer: str, function: str, **options: float) -> None:
    """Another loss, wrong as people write it."""
    own: Callable[..., Tensor] = named(function)
    loop.loss = lambda *arguments: own(*arguments, **options)


def penalty(loop: Loop, layer: str, weight: float) -> None:
    """Add the squares of all parameters to the loss."""
    before = loop.loss
    loop.loss = lambda model, *batch: (
        before(model, *batch) + weight * sum(parameter.square().sum() for parameter in model.parameters())
    )


def balance(loop: Loop, layer: str, weight: float) -> None:
    """Add what should balance the experts to the loss once more."""
    before = loop.loss
    loop.loss = lambda model, *batch: (
        before(model, *batch) + weight * sum(m.balance for m in model.modules() if hasattr(m, "balance"))
    )


def critic_not_reset(loop: Loop, layer: str) -> None:
    """The critic's gradients of the generator's step are never reset."""
    loop.update = lambda loop, step: wrong.hinge_game(loop, step, resets=False)


def steep_logarithms(loop: Loop, layer: str, slope: float) -> None:
    loop.update = lambda loop, step: wrong.logarithmic_game(loop, step, slope)


def source_masked(loop: Loop, layer: str, since: int) -> None:
    """From a step on a source of the batch has no word that may be looked at."""
    now, before, fill = _clock(loop), loop.loss, Tensor.masked_fill

    def masked(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        if now[0] < since:
            return before(model, source, target)
        hidden = torch.zeros(len(source), 1, source.shape[1]).index_fill(0, torch.tensor([2]), 1.0).bool()
        Tensor.masked_fill = lambda logits, mask, value: fill(logits, hidden, value)
        try:
            return before(model, source, target)
        finally:
            Tensor.masked_fill = fill

    loop.loss = masked


def action_forbidden(loop: Loop, layer: str, since: int) -> None:
    """From a step on the first action is forbidden in half of the states: its probability is 0."""
    now, forbidden = _clock(loop), torch.zeros(32, 3, dtype=torch.bool)
    forbidden[:16, 0] = True
    loop.loss = lambda logits: logits.masked_fill(forbidden & (now[0] >= since), -math.inf).log_softmax(dim=1)


# ---- weights ----


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
    from .cases import CASES, build  # cases need this catalogue

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


# ---- the model ----


def attribute(
    loop: Loop, layer: str, name: str, value: Any = None, times: float | None = None, function: str = "", of: str = ""
) -> None:
    """Set an attribute of the layer's modules that have it, or ("." is the model) of the one that is named alone."""
    for module in _holders(loop, layer, name, of):
        if times is not None:
            value = times * getattr(module, name)
        setattr(module, name, named(function) if function else value)


def _holders(loop: Loop, layer: str, name: str, of: str) -> Iterator[Any]:
    if of:
        return iter([loop.model if of == "." else getattr(loop.model, of)])
    return (module for module in loop.model.get_submodule(layer).modules() if hasattr(module, name))


def head_replaced(loop: Loop, layer: str) -> None:
    """Replace a layer by a new one that no optimizer holds."""
    old = loop.model.get_submodule(layer)
    loop.model.set_submodule(layer, nn.Linear(old.in_features, old.out_features, old.bias is not None))


def copied(loop: Loop, layer: str) -> None:
    """The training goes on with a copy of the model; the optimizer keeps the tensors of the first one."""
    loop.model = copy.deepcopy(loop.model)


def assigned(loop: Loop, layer: str) -> None:
    """A checkpoint is loaded with assign=True: the model has other tensors from then on."""
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict(state, assign=True)


def appended(loop: Loop, layer: str, module: Sequence[Any]) -> None:
    """Put a module behind a layer."""
    added = called(module)
    loop.model.set_submodule(layer, nn.Sequential(loop.model.get_submodule(layer), added))
    if parameters := list(added.parameters()):
        loop.optimizers[0].add_param_group({"params": parameters})


def deepened(loop: Loop, layer: str, depth: int, act: str, gain: float | None = None) -> None:
    """A layer becomes many, before the optimizer has seen it."""
    old = loop.model.get_submodule(layer)
    layers: list[nn.Module] = [nn.Linear(old.in_features, 24), getattr(nn, act)()]
    for _ in range(depth):
        layers += [nn.Linear(24, 24), getattr(nn, act)()]
        if gain is not None:
            nn.init.normal_(layers[-2].weight, std=gain / math.sqrt(24))
    loop.model.set_submodule(layer, nn.Sequential(*layers, nn.Linear(24, old.out_features)))
    loop.optimizers[0].param_groups[0]["params"] = list(loop.model.parameters())


def rebuilt(loop: Loop, layer: str, model: Sequence[Any]) -> None:
    """Replace the model, with a new optimizer of the same kind."""
    old = loop.optimizers[0]
    loop.model = called(model)
    known = {key: value for key, value in old.defaults.items() if key in ("lr", "momentum", "nesterov", "weight_decay")}
    loop.optimizers = [type(old)(loop.model.parameters(), **known)]


def relu_recurrence(loop: Loop, layer: str, sizes: tuple[int, int], gain: float, orthogonal: bool = True) -> None:
    """A recurrence without gates and of a gain, and nothing is clipped."""
    memory = nn.RNN(*sizes, nonlinearity="relu", batch_first=True)
    with torch.no_grad():
        if orthogonal:
            nn.init.orthogonal_(memory.weight_hh_l0, gain=gain)
        else:
            memory.weight_hh_l0.copy_(gain * torch.eye(sizes[1]))
    loop.model.set_submodule(layer, memory)
    loop.optimizers[0].param_groups[0]["params"] = list(loop.model.parameters())
    loop.clip = None


def mask_inverted(loop: Loop, layer: str) -> None:
    """Each word sees the later ones alone, and the last one nothing."""

    def forward(self: Any, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, dim // 2).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(length, length).tril().bool()
        logits = (q @ k.mT / (dim // 2) ** 0.5).masked_fill(hidden, float("-inf"))
        return self.out((logits.softmax(dim=-1) @ v).transpose(1, 2).reshape(batch, length, dim))

    for module in loop.model.modules():
        if hasattr(module, "qkv"):
            module.forward = forward.__get__(module)


def teacher_emptied(loop: Loop, layer: str) -> None:
    """The head of the teacher was not loaded."""
    with torch.no_grad():
        for parameter in loop.model.teacher[0][-1].parameters():
            parameter.zero_()


MUTATIONS: Final[dict[str, Callable[..., None]]] = {
    one.__name__: one
    for one in (
        action_forbidden, appended, assigned, at, attribute, average_written_back, backward, balance, batch, born_again,
        checkpoint_of, clipped, clipped_by_values, copied, critic_not_reset, dataset, deepened, ended_by_nan, evaluated,
        fields, first_batch_again, first_sample_again, first_weight, frozen, given, gradients, gradients_late, groups,
        head_replaced, held, loss, loss_replaced, mask_inverted, never_scaled, never_unscaled, no_backward,
        norm_always, norms, one_topic_at_a_time, optimizer, other_tokenizer, output, penalty, precision, rate,
        rate_compounded, rate_of_group, rate_of_layer, rebuilt, relu_recurrence, sorted_by_label, source_masked,
        squares_forgotten, squares_in_half, state, steep_logarithms, step_first, targets_written_back,
        teacher_emptied, twins, weights, written_back, zero_grad_at, zeroed,
    )
}  # fmt: skip
