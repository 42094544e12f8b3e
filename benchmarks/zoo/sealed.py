"""The sealed faults, written without knowledge of any rule: each has one cause, in a training that is healthy without it.

That each does what it says was looked up in losses, gradients and weights alone. `decidable` says whether an expert could
tell from gradients, parameters, updates, rates, the loss, and the statistics of what goes into and out of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import changes as do
from . import sealed_models as of
from .changes import Change
from .faults import Fault
from .loop import Batch, Hook, Loop
from .models import mlp
from .sealed_trainings import SEALED

FAMILY: Final = "sealed faults"
SGD, Adam = torch.optim.SGD, torch.optim.Adam

LM, LION, VIT = (
    "language model, RMSNorm, rotary, tied",
    "language model, bfloat16, Lion",
    "ViT with a class token, dropout",
)
RESNET, DEPTHWISE = "bottlenecks, last gamma 0, steps down", "depthwise convolutions, label smoothing"
RESTARTS, UNET, DIFFUSION = "plain convolutions, warm restarts", "U-Net, Dice, small discs", "diffusion of points"
VAE, FLOW, GAN, CRITIC = "VAE, divergence grows", "flow, loss negative from the start", "GAN of points", "Wasserstein GAN, clamped critic"  # fmt: skip
CLIP, BYOL, DISTILLED = "CLIP of numbers and words", "BYOL, views of things", "distillation of pictures"
GRID, PPO, BANDIT, ACTOR = "double Q-learning in a grid", "PPO of walks", "REINFORCE, five arms", "soft actor and two critics"  # fmt: skip
GRAPH, CLICKS, PRICES = "graph convolutions, whole graph", "clicks, wide and deep", "prices of categories, one cycle"
TASTES, LSTM, GRU = "ranking of tastes, Adagrad", "LSTM with its state, SGD, clipped", "GRU, sequences grow longer"
RNN, DILATED, TRANSLATION = "tanh RNN, tones", "dilated convolutions, weight norm", "translation, attention over a GRU"
SWITCH, LORA, UNFROZEN = "switch of eight experts", "LoRA of a language model", "head first, backbone from step 120"
HALF, EIGHT, LBFGS = "float16, scaler, ViT", "eight batches per step, SGD", "L-BFGS, logistic regression"
CLOUD, SAM, FRAUD, PAIRS = "Adafactor, points", "SAM, points", "fraud in one of fifty", "likenesses, margin"
PHYSICS, FIELD, TAILS = "physics, second derivatives", "one picture as a field", "heavy tails, clipped by value"
PROTOTYPES, SURVIVAL, TASKS = "prototypes of new classes", "survival", "two tasks, learned uncertainty"
MEMORY, REZERO, HARD, VQ = "memorised, 600 steps", "ReZero, ten layers", "hard batches, Huber", "vector-quantised autoencoder"  # fmt: skip


def _fault(
    name: str, base: str, change: Change, first_bad: int, cause: str, *also: str, layer: str = "", visible: bool = True
) -> Fault:
    return Fault(FAMILY, name, {base: layer}, change, first_bad, cause, also, visible)


def _rate_of_group(index: int, rate: float) -> Change:
    """One parameter group gets a rate of its own."""

    def change(loop: Loop, layer: str) -> None:
        loop.optimizers[0].param_groups[index]["lr"] = rate

    return change


def _given(chosen: Callable[[str], bool]) -> Change:
    """The optimizer is given only the parameters whose name is chosen."""

    def change(loop: Loop, layer: str) -> None:
        group = loop.optimizers[0].param_groups[0]
        group["params"] = [p for name, p in loop.model.named_parameters() if chosen(name) and p.requires_grad]

    return change


def _built(make: Callable[..., torch.optim.Optimizer]) -> Change:
    """Another optimizer, of what is trained."""
    return do.optimizer(lambda parameters: make([p for p in parameters if p.requires_grad]))  # type: ignore[attr-defined]


def _frozen(loop: Loop, layer: str) -> None:
    loop.model.get_submodule(layer).requires_grad_(False)


def _gradients(transform: Callable[[Tensor], Tensor], at: int = 1) -> Change:
    """Transform every gradient between backward and step."""

    def hook(loop: Loop, step: int) -> None:
        for parameter in loop.model.parameters():
            if step >= at and parameter.grad is not None:
                parameter.grad = transform(parameter.grad)

    return do.received(hook)


def _always_of_norm(norm: float) -> Hook:
    """Clipping by hand, without min(1, .): small gradients are made larger."""

    def hook(loop: Loop, step: int) -> None:
        grads = [p.grad for p in loop.model.parameters() if p.grad is not None]
        total = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_(norm / total)

    return hook


def _set(holder: str, **values: object) -> Change:
    """Set attributes of one of the model's attributes; of the model itself if the name is empty."""

    def change(loop: Loop, layer: str) -> None:
        held = getattr(loop.model, holder) if holder else loop.model
        for name, value in values.items():
            setattr(held, name, value)

    return change


def _equal_recurrence(gain: float) -> Change:
    """A ReLU recurrence whose matrix is a multiple of the identity."""

    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        memory = nn.RNN(2, 24, batch_first=True, nonlinearity="relu")
        memory.weight_hh_l0.copy_(gain * torch.eye(24))
        loop.model.memory = memory
        loop.optimizers, loop.clip = [Adam(loop.model.parameters(), lr=5e-3)], None

    return change


def _recurrent_matrix(factor: float) -> Change:
    @torch.no_grad()
    def change(loop: Loop, layer: str) -> None:
        loop.model.get_submodule(layer).weight_hh_l0.mul_(factor)

    return change


def _one_batch(loop: Loop, layer: str) -> None:
    """next(iter(loader)) in the loop, with a fixed order: the first batch every time."""
    first = loop.batch(1)
    loop.batch = lambda step: first


def _other_weights(make: Callable[[], Loop]) -> Callable[[Loop, str], None]:
    """A checkpoint of another run is loaded."""
    return lambda loop, layer: loop.model.load_state_dict(make().model.state_dict()) and None


def _element(name: str, value: float) -> Callable[[Loop, str], None]:
    """One element of a parameter is overwritten."""

    @torch.no_grad()
    def hook(loop: Loop, layer: str) -> None:
        loop.model.get_parameter(name).view(-1)[0] = value

    return hook


def _averages(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Loop, str], None]:
    """One of the optimizer's averages is replaced."""

    def hook(loop: Loop, layer: str) -> None:
        for state in loop.optimizers[0].state.values():
            state[name] = value(state[name])

    return hook


def _average_kept(decay: float) -> Change:
    """The moving average is written back over the weights after each step."""

    def change(loop: Loop, layer: str) -> None:
        average = copy.deepcopy(loop.model)

        @torch.no_grad()
        def hook(loop: Loop, step: int) -> None:
            for slow, fast in zip(average.parameters(), loop.model.parameters(), strict=True):
                slow.lerp_(fast, 1 - decay)
                fast.copy_(slow)

        loop.after.append(hook)

    return change


def _first_weights(every: int) -> Change:
    """A validation puts the first checkpoint back."""

    def change(loop: Loop, layer: str) -> None:
        kept = copy.deepcopy(loop.model.state_dict())
        loop.after.append(lambda loop, step: loop.model.load_state_dict(kept) and None if step % every == 0 else None)

    return change


def _no_backward(at: int) -> Change:
    """From a step on neither zero_grad() nor backward() is reached: the last gradient is applied again and again."""

    def change(loop: Loop, layer: str) -> None:
        def update(loop: Loop, step: int) -> Tensor:
            if step < at:
                return loop._plain_update(step)
            with torch.no_grad():
                loss = loop.loss(loop.model, *loop.batch(step))
            loop.apply(step)
            return loss

        loop.update = update

    return change


def _late_gradients(steps: int) -> Hook:
    """Gradients arrive some steps late."""
    waiting: list[list[Tensor]] = []

    def hook(loop: Loop, step: int) -> None:
        if step == 1:
            waiting.clear()
        waiting.append([parameter.grad for parameter in loop.model.parameters()])
        if len(waiting) > steps:
            for parameter, grad in zip(loop.model.parameters(), waiting.pop(0), strict=True):
                parameter.grad = grad
        else:
            loop.zero_grad()

    return hook


def _by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy without the logits: 0 * log 0 where the model is certain."""
    p = model(x)[:, 0].sigmoid()
    return -(20 * y * p.log() + (1 - y) * (1 - p).log()).mean()


def _bare_distance(model: nn.Module, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
    distance = (model(first) - model(second)).square().sum(1).sqrt()
    return torch.where(same, distance**2, functional.relu(1 - distance) ** 2).mean()


def _apart(model: nn.Module, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
    """Others are pushed apart without a margin."""
    distance = (model(first) - model(second)).square().sum(1)
    return torch.where(same, distance, -distance).mean()


def _twins(at: int) -> Change:
    """The same picture twice, as a pair of one person."""

    def change(loop: Loop, layer: str) -> None:
        before = loop.batch

        def batch(step: int) -> Batch:
            first, second, same = before(step)
            if step == at:
                second, same = second.clone(), same.clone()
                second[0], same[0] = first[0], False
            return first, second, same

        loop.batch = batch

    return change


def _other_words(at: int) -> Change:
    """The tokenizer numbers the words in another order."""

    def change(loop: Loop, layer: str) -> None:
        before, order = loop.batch, torch.randperm(24)
        loop.batch = lambda step: tuple(order[part] for part in before(step)) if step >= at else before(step)

    return change


def _probabilities(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """cross_entropy of what softmax returned."""
    return functional.cross_entropy(model(x).softmax(1), labels)


def _unshifted(model: nn.Module, tokens: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def _small_loss_in_half(loop: Loop, layer: str) -> None:
    do.loss(lambda value: value / 1e6)(loop, layer)
    loop.scaler = None


def _fixed_scale(scale: float) -> Change:
    """Scale and unscale by hand, never looking for infinities."""

    def change(loop: Loop, layer: str) -> None:
        loop.scaler = None
        do.loss(lambda value: scale * value.float())(loop, layer)
        loop.received.append(lambda loop, step: [p.grad.div_(scale) for p in loop.model.parameters()] and None)

    return change


@torch.no_grad()
def _far_away(loop: Loop, layer: str) -> None:
    """A generator that begins far away, a discriminator that learns fast, and log(1 - D) to be minimised."""
    loop.model.generator[-1].bias.fill_(30.0)
    loop.model.saturating = True
    loop.optimizers[0].param_groups[0]["lr"] *= 10


@torch.no_grad()
def _ignorant_teacher(loop: Loop, layer: str) -> None:
    loop.model.teacher[0][-1].weight.zero_()
    loop.model.teacher[0][-1].bias.zero_()


@torch.no_grad()
def _both_zero(loop: Loop, layer: str) -> None:
    for name, parameter in loop.model.named_parameters():
        if name.endswith(".a"):
            parameter.zero_()


def _dropped(share: float) -> Change:
    def change(loop: Loop, layer: str) -> None:
        for module in loop.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = share

    return change


def _no_source(source: Tensor) -> Tensor:
    return source * (torch.arange(len(source)) > 0)[:, None]


def _isolated(links: Tensor) -> Tensor:
    return links * (torch.arange(len(links)) != 7)[:, None]


@torch.no_grad()
def _favourite(loop: Loop, layer: str) -> None:
    loop.model.router.bias[0] = 60.0


def _cents(aim: Tensor) -> Tensor:
    return 1e4 * aim


SEALED_FAULTS: Final = [
    # Learning rates and schedules
    _fault("rate of 0.4 for 0.004", LM, do.learning_rate(100), 1, "learning_rate_too_high"),
    _fault("Lion with the rate of SGD", LION, do.learning_rate(100), 1, "learning_rate_too_high"),
    _fault("decay per epoch is applied per step", UNET, do.learning_rate(lambda step: 0.7**step), 15, "schedule", "learning_rate_zero", "learning_rate_too_low"),
    _fault("gamma of 10 for 0.1 at step 121", RESNET, do.learning_rate(lambda step: 1e2 if step <= 170 else 1e4, 121), 121, "schedule", "learning_rate_too_high"),
    _fault("rate of 3e-6", PHYSICS, do.learning_rate(1e-3), 1, "learning_rate_too_low"),
    _fault("rate of 5e-5, L-BFGS", LBFGS, do.learning_rate(1e-4), 1, "learning_rate_too_low"),
    _fault("warm-up by whole numbers stays 0", CLIP, do.learning_rate(0.0), 1, "learning_rate_zero", "schedule", "learning_rate_too_low", "no_step"),
    _fault("linear decay goes on below 0 at step 121", DEPTHWISE, do.learning_rate(lambda step: 1 - step / 120), 121, "learning_rate_negative", "schedule", "wrong_sign"),
    _fault("the new head's rate is 3.0", UNFROZEN, _rate_of_group(0, 3.0), 1, "learning_rate_too_high", layer="6"),
    _fault("the second cycle restarts at 80x", RESTARTS, do.learning_rate(80, 61), 61, "schedule", "learning_rate_too_high"),
    _fault("rate of 0.5, Q-learning", GRID, do.learning_rate(250), 1, "learning_rate_too_high", "bootstrapping"),
    _fault("one step of 1,000x at step 40", CLICKS, do.learning_rate(1000, 40, 41), 40, "learning_rate_too_high", "dead_units", "schedule"),
    _fault("rate of 20, survival", SURVIVAL, do.learning_rate(400), 1, "learning_rate_too_high"),
    _fault("rate 100x from step 150, soft actor", ACTOR, do.learning_rate(100, 150), 150, "learning_rate_too_high", "schedule"),
    # Signs
    _fault("minus forgotten, REINFORCE", BANDIT, do.loss(torch.neg), 1, "wrong_sign", "unbounded_loss", visible=False),
    _fault("the likelihood is minimised", FLOW, do.loss(torch.neg), 1, "wrong_sign", "unbounded_loss"),
    _fault("maximize=True", PROTOTYPES, do.groups(maximize=True), 1, "wrong_sign", "optimizer_settings", "unbounded_loss"),
    _fault("advantages of the wrong sign, PPO", PPO, _set("walks", sign=-1.0), 1, "wrong_sign", visible=False),
    _fault("the penalty is subtracted", TRANSLATION, do.penalised(-0.02), 1, "wrong_sign", "unbounded_loss"),
    # Wiring
    _fault("zero_grad() forgotten", FIELD, do.fields(zeroes=False), 2, "zero_grad_missing"),
    _fault("zero_grad() forgotten for the discriminator", GAN, _set("", zeroes_discriminator=False), 2, "zero_grad_missing", layer="discriminator"),
    _fault("step() forgotten", VQ, do.fields(applies=False), 1, "no_step"),
    _fault("zero_grad() after backward()", GRAPH, do.received(do.zero_gradients), 1, "gradients_zeroed", "no_step"),
    _fault("zero_grad(), step(), backward()", TASTES, do.step_first, 1, "gradients_zeroed", "no_step"),
    _fault("the optimizer holds the model before a copy", MEMORY, do.another_model, 1, "stale_optimizer", "not_in_optimizer", "no_step"),
    _fault("head replaced after the optimizer was built", VIT, do.replaced_layer, 1, "not_in_optimizer", "stale_optimizer", layer="head"),
    _fault("the optimizer holds the decoder alone", VAE, _given(lambda name: name.startswith("decoder")), 1, "not_in_optimizer", layer="encoder"),
    _fault("one of two heads in no optimizer", TASKS, _given(lambda name: not name.startswith("kind")), 1, "not_in_optimizer", layer="kind"),
    _fault("LoRA's B in no optimizer", LORA, _given(lambda name: name.endswith(".a")), 1, "not_in_optimizer", layer="attentions.0.qkv"),
    _fault("LoRA's A and B begin at 0", LORA, _both_zero, 1, "constant_initialisation", "poor_initialisation", layer="attentions.0.qkv"),
    _fault("a block frozen at step 60", RESNET, do.at_step(_frozen, 60), 60, "frozen_layers", "unused_layers", layer="5"),
    _fault("states through numpy: the encoder has no gradient", TRANSLATION, do.output(torch.Tensor.detach), 1, "unused_layers", "frozen_layers", layer="heard"),
    _fault("one task's loss is dropped at step 150", TASKS, do.output(torch.Tensor.detach, 150), 150, "unused_layers", "frozen_layers", layer="kind"),
    _fault("the deep path is replaced by zeros", UNET, do.output(torch.zeros_like), 1, "unused_layers", "frozen_layers", layer="deep"),
    _fault("backward() is skipped from step 120", PRICES, _no_backward(120), 120, "stale_gradients", "zero_grad_missing"),
    _fault("gradients arrive 25 steps late", PHYSICS, do.received(_late_gradients(25)), 1, "stale_gradients", visible=False),
    # Units, depth, recurrence, initialisation
    _fault("biases of -10", CLOUD, do.scaled(1.0, bias=-10.0), 1, "dead_units", "poor_initialisation", layer="points.0.0"),
    _fault("sigmoids of ages and incomes", SURVIVAL, do.chain(do.rebuilt(lambda: mlp(8, 24, 1, act=nn.Sigmoid)), do.inputs(lambda x: 300 * x + 500)), 1, "data_scale", "saturation"),
    _fault("recurrent matrix 20x", RNN, _recurrent_matrix(20.0), 1, "saturation", "poor_initialisation", "recurrence", layer="1.memory"),
    _fault("twelve layers of sigmoids", MEMORY, do.rebuilt(lambda: mlp(10, *[48] * 12, 3, act=nn.Sigmoid)), 1, "depth", "saturation", "poor_initialisation"),
    _fault("twenty plain convolutions", RESTARTS, do.rebuilt(lambda: of.plain_convolutions(20)), 1, "depth", "poor_initialisation"),
    _fault("ReLU recurrence of twice the identity", GRU, _equal_recurrence(2.0), 1, "recurrence", "poor_initialisation", layer="memory"),
    _fault("tied embedding of deviation 3", LM, do.scaled(30.0), 1, "poor_initialisation", layer="words"),
    _fault("all matrices 0", TAILS, do.filled(0.0), 1, "constant_initialisation", "poor_initialisation"),
    _fault("all matrices 0.05", DEPTHWISE, do.filled(0.05), 1, "constant_initialisation", "poor_initialisation"),
    _fault("weights 1,000 times too small", EIGHT, do.scaled(1e-3, every=True), 1, "poor_initialisation", "depth"),
    _fault("weights 12 times too large", PROTOTYPES, do.scaled(12.0, every=True), 1, "poor_initialisation"),
    # Data
    _fault("pixels of 0 to 255", EIGHT, do.inputs(lambda x: 60 * x + 128), 1, "data_scale"),
    _fault("prices in cents, not standardised", PRICES, do.inputs(lambda y: 1e5 * y + 3e5, which=2), 1, "data_scale"),
    _fault("rewards of 10,000", PPO, do.inputs(_cents, which=4), 1, "data_scale"),
    _fault("black pictures from step 90", VIT, do.inputs(torch.zeros_like, 90), 90, "inputs_zero", "data_changed"),
    _fault("the first batch every time", UNET, _one_batch, 2, "inputs_repeated"),
    _fault("a missing value at step 130", CLICKS, do.inputs(do.first_sample(float("nan")), 130, 131, which=1), 130, "nonfinite_inputs", "bad_batch"),
    _fault("log 0 among the inputs at step 77", TAILS, do.inputs(do.first_sample(float("-inf")), 77, 78), 77, "nonfinite_inputs", "bad_batch"),
    _fault("a corrupt point of 1e5 at step 150", DIFFUSION, do.inputs(do.first_sample(1e5), 150, 151), 150, "bad_batch", "data_scale"),
    _fault("labels of another list of classes from step 110", RESNET, do.inputs(lambda y: (y + 1) % 5, 110, which=1), 110, "data_changed", "loss_or_labels"),
    _fault("normalisation lost at step 200", TASKS, do.inputs(lambda x: 20 * x + 50, 200), 200, "data_changed", "data_scale"),
    _fault("another tokenizer from step 200", LM, _other_words(200), 200, "data_changed", "loss_or_labels"),
    _fault("random labels", SAM, do.inputs(lambda y: torch.randint_like(y, 4), which=1), 1, "no_signal", "loss_or_labels", visible=False),
    _fault("the target is the input", LM, do.fields(loss=_unshifted), 1, "loss_or_labels", visible=False),
    # Losses
    _fault("softmax before cross_entropy", CLOUD, do.fields(loss=_probabilities), 1, "loss_or_labels", "saturation", visible=False),
    _fault("neither mean nor division by eight batches", EIGHT, do.loss(lambda value: 32 * value), 1, "loss_reduction", "learning_rate_too_high"),
    _fault("divided by the number of batches", SURVIVAL, do.loss(lambda value: value / 1000), 1, "loss_reduction", "learning_rate_too_low"),
    _fault("cross-entropy by hand meets a large payment at step 100", FRAUD, do.chain(do.fields(loss=_by_hand), do.inputs(do.first_sample(1000.0), 100, 101)), 100, "invalid_operation", "bad_batch", "loss_or_labels"),
    _fault("mean over no node at step 140", GRAPH, do.loss(do.no_weights, 140, 141), 140, "invalid_operation", "loss_or_labels"),
    _fault("root of a distance of 0 at step 110", PAIRS, do.chain(do.fields(loss=_bare_distance), _twins(110)), 110, "invalid_operation", "bad_batch"),
    _fault("a node without neighbours from step 80", GRAPH, do.inputs(_isolated, 80, which=1), 80, "invalid_operation", "bad_batch", "data_changed"),
    _fault("a ratio of exp(95) at step 161", PPO, do.at_step(lambda loop, layer: setattr(loop.model.walks, "old_shift", 95.0), 161), 161, "overflow", "invalid_operation", "loss_or_labels"),
    _fault("log variances 400x at step 180", VAE, do.output(lambda out: 400 * out, 180), 180, "overflow", "invalid_operation", "backward_scaled", layer="encoder"),
    _fault("others pushed apart without a margin", PAIRS, do.fields(loss=_apart), 1, "unbounded_loss", "wrong_sign"),
    _fault("a critic without bounds", CRITIC, _set("", bound=1e9), 1, "unbounded_loss"),
    # Precision
    _fault("clipped before unscale_(), SGD", HALF, do.chain(_built(lambda p: SGD(p, lr=0.05, momentum=0.9)), do.fields(clip=None), do.received(do.clip_scaled)), 1, "unscale_missing", "clipping_too_tight"),
    _fault("a fixed loss scale of 2**30", HALF, _fixed_scale(2.0**30), 1, "loss_scale", "overflow"),
    _fault("float16 without a scaler, a small loss", HALF, _small_loss_in_half, 1, "underflow", "loss_reduction"),
    _fault("activations of 1e6 in float16 from step 60", HALF, do.output(lambda out: 1e6 * out, 60), 60, "overflow", "data_scale", layer="patches"),
    _fault("float16 parameters and Adam's eps", MEMORY, do.chain(do.halved, _built(lambda p: Adam(p, lr=3e-3))), 1, "optimizer_settings", "underflow", "overflow"),
    # Optimizers
    _fault("clipped to 1e-5", LSTM, do.fields(clip=1e-5), 1, "clipping_too_tight", "learning_rate_too_low"),
    _fault("clipped to values of 1e-12", TAILS, do.received(lambda loop, step: nn.utils.clip_grad_value_(loop.model.parameters(), 1e-12)), 1, "clipping_too_tight"),
    _fault("eps of 0 and words that do not occur", CLICKS, do.groups(eps=0.0), 1, "optimizer_settings", "invalid_operation"),
    _fault("eps of 1", CLIP, do.groups(eps=1.0), 1, "optimizer_settings", "learning_rate_too_low"),
    _fault("second beta of 0", DILATED, do.groups(betas=(0.9, 0.0)), 1, "optimizer_settings", "learning_rate_too_high"),
    _fault("momentum of 1.02", SAM, do.groups(momentum=1.02, nesterov=False), 1, "optimizer_settings"),
    _fault("decoupled decay of 100", BYOL, do.groups(weight_decay=100.0), 1, "weight_decay"),
    _fault("decay of 0.5 for 0.0005", RESTARTS, do.groups(weight_decay=0.5), 1, "weight_decay"),
    _fault("averages of squares lost at step 120", DILATED, do.at_step(_averages("exp_avg_sq", torch.zeros_like), 120), 120, "memory_of_optimizer", "learning_rate_too_high"),
    _fault("averages of another run at step 150", DIFFUSION, do.at_step(_averages("exp_avg", torch.randn_like), 150), 150, "memory_of_optimizer", "learning_rate_too_high"),
    # Layers of a kind
    _fault("batches of two", RESNET, do.chain(do.inputs(lambda x: x[:2]), do.inputs(lambda y: y[:2], which=1)), 1, "small_batch_norm", visible=False),
    _fault("dropout of 0.99", VIT, _dropped(0.99), 1, "dropout"),
    _fault("an empty sentence at step 120", TRANSLATION, do.inputs(_no_source, 120, 121), 120, "attention_logits", "invalid_operation", "bad_batch"),
    _fault("multiplied by the root of the dimension, twice", LM, lambda loop, layer: setattr(loop.model.get_submodule(layer), "heat", 64.0), 1, "attention_logits", "saturation", layer="attentions.0", visible=False),
    _fault("balance of the wrong sign", SWITCH, _set("", weight=-1.0), 1, "routing", "wrong_sign", layer="router"),
    _fault("five of eight experts out of reach", SWITCH, _set("", used=3), 1, "routing", "unused_layers", layer="router"),
    _fault("one expert is preferred from step 100", SWITCH, do.at_step(_favourite, 100), 100, "routing", "broken_weights", layer="router"),
    # Code around backward
    _fault("a forgotten hook: 3,000x from step 150", LM, do.backward(lambda grad: 3000 * grad, 150), 150, "backward_scaled", "code_after_backward", layer="attentions.1"),
    _fault("a backward of its own returns 0 from step 90", DILATED, do.backward(torch.zeros_like, 90), 90, "backward_zeroed", "unused_layers", "code_after_backward", layer="layers.3"),
    _fault("summed over 64 ranks, not averaged", RESTARTS, _gradients(lambda grad: 64 * grad), 1, "backward_scaled", "code_after_backward", "loss_reduction", "learning_rate_too_high"),
    _fault("clipping by hand lifts small gradients", SURVIVAL, do.received(_always_of_norm(40.0)), 1, "code_after_backward", "backward_scaled", "learning_rate_too_high"),
    _fault("gradients replaced by noise from step 100", REZERO, _gradients(torch.randn_like, 100), 100, "code_after_backward"),
    # Weights that are written
    _fault("the average is written back", DIFFUSION, _average_kept(0.999), 1, "updates_undone"),
    _fault("the first checkpoint every third step", DEPTHWISE, _first_weights(3), 3, "updates_undone"),
    _fault("another run's checkpoint at step 160", PRICES, do.at_step(_other_weights(SEALED[PRICES]), 160), 160, "broken_weights", "updates_undone"),
    _fault("a weight turns NaN at step 90", LM, do.at_step(_element("gated.0.down.weight", float("nan")), 90), 90, "broken_weights", layer="gated.0.down"),
    _fault("a bit flips: a weight of 1e6 at step 140", HARD, do.at_step(_element("2.weight", 1e6), 140), 140, "broken_weights", layer="2"),
    # Opponents, teachers, values
    _fault("values without an end", GRID, _set("grid", discount=1.05, ends=False, every=2), 1, "bootstrapping", "unbounded_loss"),
    _fault("a discriminator that is certain, log(1 - D)", GAN, _far_away, 1, "vanished_teacher", "saturation", layer="generator"),
    _fault("a teacher whose head was not loaded", DISTILLED, _ignorant_teacher, 1, "vanished_teacher", "no_signal", visible=False),
]  # fmt: skip
