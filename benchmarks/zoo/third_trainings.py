"""Healthy trainings in pairs, written while nobody looked at a rule: the first of each is opened, the second locked."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import data
from . import third_models as made
from . import third_tables as tables
from .healthy_others import own_loss
from .healthy_supervised import AdamW, cosine, momentum
from .loop import Batch, Loop, descend, supervised
from .models import Transformer, classify, mlp, next_token

Adam = torch.optim.Adam


@torch.no_grad()
def follow(copied: nn.Module, model: nn.Module, share: float) -> None:
    """A copy moves by this share towards the model."""
    for mine, theirs in zip(copied.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, share)


def small_gpt() -> Loop:
    """Decay on matrices alone, four batches per step, warm-up and cosine, all clipped to 1."""
    model = Transformer(depth=3)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = AdamW(groups, lr=4e-3, betas=(0.9, 0.95))
    return Loop(model, data.sentences(4), next_token, [optimizer], schedule=cosine(120, 15), clip=1.0, accumulate=4, steps=120)  # fmt: skip


def sampled() -> Loop:
    loop = supervised(made.Sampled(), made.reversed_words(), said, lr=5e-3, clip=1.0, steps=150)
    loop.before.append(lambda loop, step: setattr(loop.model, "own", min(0.5, step / 200)))
    return loop


def said(model: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(model(source, target).flatten(0, 1), target.flatten())


def placed() -> Loop:
    """What is placed has length 1 before each step, as its authors have it."""
    loop = supervised(made.Facts(), made.facts(), own_loss, optimizer=torch.optim.SGD, lr=0.5, steps=200)

    @torch.no_grad()
    def normalise(loop: Loop, step: int) -> None:
        loop.model.entities.weight.copy_(functional.normalize(loop.model.entities.weight, dim=1))

    loop.before.append(normalise)
    return loop


def unit_rows() -> Loop:
    """Rows of weights are put back to length 1 after each step."""
    model = nn.Sequential(mlp(12, 48, 48, 4), made.Scale(4))
    loop = supervised(model, data.blobs(), classify, optimizer=momentum, lr=0.05, steps=150)

    @torch.no_grad()
    def normalise(loop: Loop, step: int) -> None:
        for module in loop.model.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(functional.normalize(module.weight, dim=1))

    normalise(loop, 0)
    loop.after.append(normalise)
    return loop


def gates_of_nothing() -> Loop:
    model = nn.Sequential(nn.Linear(12, 32), *(made.Rezero(32) for _ in range(12)), nn.Linear(32, 4))
    return supervised(model, data.blobs(), classify, optimizer=momentum, lr=0.02, steps=150)


def controlled() -> Loop:
    """A trained classifier is frozen; a copy of it is told by a hint by how much all classes are moved."""
    model, batch = mlp(12, 48, 48, 4), data.blobs()
    first = supervised(model, batch, classify, lr=3e-3)
    for step in range(1, 81):
        first.advance(step)
    model.zero_grad()

    def hinted(step: int) -> Batch:
        x, y = batch(step)
        by = torch.randint(0, 2, (len(y),))
        return x, functional.one_hot(by, 4).float(), (y + by) % 4

    loss = lambda model, x, hint, y: functional.cross_entropy(model(x, hint), y)  # noqa: E731
    return supervised(made.Controlled(model), hinted, loss, optimizer=AdamW, lr=5e-3, steps=200)


def leveled() -> Loop:
    """All levels of noise; an average of the weights follows, to draw with."""
    loop = supervised(mlp(3, 64, 64, 2, act=nn.SiLU), data.points(128), made.preconditioned, lr=3e-3, schedule=cosine(180, 10), steps=180)  # fmt: skip
    average = copy.deepcopy(loop.model)
    loop.after.append(lambda loop, step: follow(average, loop.model, 0.02))
    return loop


def rivals() -> Loop:
    """Which is more real, this one or that one? The judge learns four times as fast, and its slope is penalised."""
    model = nn.ModuleDict({"generator": mlp(4, 48, 48, 2), "judge": mlp(2, 48, 48, 1, act=lambda: nn.LeakyReLU(0.2))})
    made_by, judged_by = (Adam(model[n].parameters(), lr=r, betas=(0.0, 0.9)) for n, r in (("generator", 5e-4), ("judge", 2e-3)))  # fmt: skip

    def update(loop: Loop, step: int) -> Tensor:
        (real,) = loop.batch(step)
        fake = model["generator"](torch.randn(len(real), 4)).detach()
        real = real.requires_grad_(True)
        value = model["judge"](real)
        slope = torch.autograd.grad(value.sum(), real, create_graph=True)[0]
        descend(judged_by, loop.loss(value - model["judge"](fake)) + 0.1 * slope.square().sum(dim=1).mean())
        fake = model["judge"](model["generator"](torch.randn(len(real), 4)))
        return descend(made_by, loop.loss(fake - model["judge"](real).detach()))

    loss = lambda margin: functional.softplus(-margin).mean()  # noqa: E731
    return Loop(model, data.points(64), loss, [judged_by, made_by], update=update, steps=200)


def there_and_back() -> Loop:
    """Two generators between two clouds, two judges, and the way back."""
    model = nn.ModuleDict(
        {name: mlp(2, 32, 32, 2 if "ward" in name else 1) for name in ("forward_", "backward_", "here", "there")}
    )
    moved = Adam([*model["forward_"].parameters(), *model["backward_"].parameters()], lr=1e-3, betas=(0.5, 0.9))
    judged = Adam([*model["here"].parameters(), *model["there"].parameters()], lr=1e-3, betas=(0.5, 0.9))

    def update(loop: Loop, step: int) -> Tensor:
        a, b = loop.batch(step)
        if loop.zeroes:
            moved.zero_grad()
        new_b, new_a = model["forward_"](a), model["backward_"](b)
        back = (model["backward_"](new_b) - a).abs().mean() + (model["forward_"](new_a) - b).abs().mean()
        fooled = (model["there"](new_b) - 1).square().mean() + (model["here"](new_a) - 1).square().mean()
        (loss := fooled + 2 * back).backward()
        moved.step()
        pairs = ((model["here"], a, new_a.detach()), (model["there"], b, new_b.detach()))
        descend(judged, sum((one(real) - 1).square().mean() + one(fake).square().mean() for one, real, fake in pairs))
        return loss

    first, second = data.points(64, modes=4), data.points(64, modes=3)
    return Loop(model, lambda step: (*first(step), *second(step)), own_loss, [moved, judged], update=update)


def moved(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Where an action of two leads on a line, and what it brings there."""
    after = (state + 0.5 * (2 * action[:, None] - 1) * torch.tensor([1.0, 0.0, 0.0, 0.0])).clamp(-2, 2)
    return after, (after[:, 0] > 1).float()


ATOMS = torch.linspace(0, 10, 21)


def atoms() -> Loop:
    """Q-learning of a whole distribution, by the cross-entropy to what the target network says; copied every 25 steps."""
    model = nn.Sequential(mlp(4, 48, 48, 42), nn.Unflatten(1, (2, 21)))
    target, optimizer = copy.deepcopy(model), Adam(model.parameters(), lr=2e-3)

    def update(loop: Loop, step: int) -> Tensor:
        (state,) = loop.batch(step)
        action = torch.randint(0, 2, (len(state),))
        after, reward = moved(state, action)
        with torch.no_grad():
            likely = target(after).softmax(dim=2)
            likely = likely[torch.arange(len(state)), (likely @ ATOMS).argmax(dim=1)]
            place = (reward[:, None] + 0.9 * ATOMS).clamp(0, 10) / 0.5
            low = place.floor().clamp(max=19).long()
            aim = torch.zeros_like(likely).scatter_add(1, low, likely * (1 + low - place))
            aim = aim.scatter_add(1, low + 1, likely * (place - low))
        said = model(state)[torch.arange(len(state)), action].log_softmax(dim=1)
        loss = descend(optimizer, loop.loss(-(aim * said).sum(dim=1).mean()), clip=10.0)
        if step % 25 == 0:
            follow(target, model, 1.0)
        return loss

    return Loop(model, lambda _: (torch.randn(32, 4),), lambda loss: loss, [optimizer], steps=250, update=update)


def quantiles() -> Loop:
    """Quantiles of what comes; what surprised most is seen more often, and weighs less."""
    model = nn.Sequential(mlp(4, 48, 48, 22), nn.Unflatten(1, (2, 11)))
    target, optimizer = copy.deepcopy(model), Adam(model.parameters(), lr=2e-3)
    states, surprise, levels = torch.randn(512, 4), torch.ones(512), (torch.arange(11) + 0.5) / 11

    def update(loop: Loop, step: int) -> Tensor:
        share = (surprise + 0.01) / (surprise + 0.01).sum()
        which = torch.multinomial(share, 32)
        weight = (share[which] * 512) ** -0.5
        state, action = states[which], torch.randint(0, 2, (32,))
        after, reward = moved(state, action)
        with torch.no_grad():
            said = target(after)
            aim = reward[:, None] + 0.9 * said[torch.arange(32), said.mean(dim=2).argmax(dim=1)]
        missed = aim[:, None] - model(state)[torch.arange(32), action][:, :, None]
        huber = functional.smooth_l1_loss(missed, torch.zeros_like(missed), reduction="none")
        each = ((levels[:, None] - (missed.detach() < 0).float()).abs() * huber).sum(dim=1).mean(dim=1)
        surprise[which] = each.detach()
        loss = descend(optimizer, (weight / weight.max() * each).mean())
        follow(target, model, 0.02)
        return loss

    return Loop(model, lambda _: (), own_loss, [optimizer], steps=250, update=update)


def tempered() -> Loop:
    """Soft actor-critic with three actions; the temperature finds itself."""
    model = nn.ModuleDict({"actor": mlp(6, 32, 3), "critics": nn.ModuleList(mlp(6, 32, 3) for _ in range(2))})
    heat = nn.Parameter(torch.zeros(()))
    target = copy.deepcopy(model["critics"])
    acting, judging, heating = Adam(model["actor"].parameters(), lr=1e-3), Adam(model["critics"].parameters(), lr=2e-3), Adam([heat], lr=1e-2)  # fmt: skip
    push = torch.randn(3, 6)

    def update(loop: Loop, step: int) -> Tensor:
        state, discount = loop.batch(step)
        action = torch.randint(0, 3, (len(state),))
        after = 0.7 * state + push[action] / 3
        reward = after[:, 0] - after[:, 1].abs()
        with torch.no_grad():
            likely = model["actor"](after).log_softmax(dim=1)
            best = torch.stack([one(after) for one in target]).amin(dim=0)
            aim = reward + discount * (likely.exp() * (best - heat.exp() * likely)).sum(dim=1)
        chosen = [one(state).gather(1, action[:, None])[:, 0] for one in model["critics"]]
        loss = descend(judging, sum((one - aim).square().mean() for one in chosen))
        likely = loop.loss(model["actor"](state))
        value = torch.stack([one(state).detach() for one in model["critics"]]).amin(dim=0)
        descend(acting, (likely.exp() * (heat.detach().exp() * likely - value)).sum(dim=1).mean())
        entropy = -(likely.exp() * likely).sum(dim=1).mean().detach()
        descend(heating, heat.exp() * (entropy - 0.6))
        follow(target, model["critics"], 0.02)
        return loss

    loss = lambda logits: logits.log_softmax(dim=1)  # noqa: E731
    return Loop(model, lambda _: (torch.randn(32, 6), torch.tensor(0.9)), loss, [judging, acting], update=update)


def taught_by_itself() -> Loop:
    """A teacher that follows the student, whose words are centred and sharpened."""
    model = nn.Sequential(mlp(12, 32, 16), nn.Linear(16, 24))
    teacher, centre = copy.deepcopy(model).requires_grad_(False), torch.zeros(24)

    def loss(model: nn.Module, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            aims = [teacher(view) for view in (a, b)]
            centre.lerp_(torch.cat(aims).mean(dim=0), 0.1)
        return -sum(
            (((aim - centre) / 0.04).softmax(dim=1) * (model(view) / 0.1).log_softmax(dim=1)).sum(dim=1).mean()
            for aim, view in zip(aims, (b, a), strict=True)
        )

    loop = supervised(model, data.pairs(48), loss, optimizer=AdamW, lr=2e-3, schedule=cosine(200, 20), steps=200)
    loop.before.append(
        lambda loop, step: loop.optimizers[0].param_groups[0].update(weight_decay=0.04 + 0.36 * step / 200)
    )
    loop.after.append(lambda loop, step: follow(teacher, loop.model, 0.01))
    return loop


def decorrelated(model: nn.Module, a: Tensor, b: Tensor, _: Tensor) -> Tensor:
    """Barlow twins: two views say the same feature by feature, and no feature says another one."""
    one, other = model(a), model(b)
    one, other = ((part - part.mean(dim=0)) / part.std(dim=0) for part in (one, other))
    both = one.T @ other / len(a)
    return (both.diagonal() - 1).square().sum() + 0.02 * (both.square().sum() - both.diagonal().square().sum())


class ScheduleFree(torch.optim.Optimizer):
    """Gradients at a point between the fast iterate and the average of all of them; Adam's squares."""

    kept = torch.float32  # the type in which the squares are stored

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {"step": 0, "fast": parameter.clone(), "mean": parameter.clone(), "squares": torch.zeros_like(parameter)}  # fmt: skip
                state["step"] += 1
                state["squares"] = state["squares"].lerp(parameter.grad.square(), 0.01).to(self.kept).float()
                size = (state["squares"] / (1 - 0.99 ** state["step"])).sqrt() + 1e-8
                state["fast"].sub_(parameter.grad / size, alpha=group["lr"] * min(1.0, state["step"] / 20))
                state["mean"].lerp_(state["fast"], 1 / state["step"])
                parameter.copy_(torch.lerp(state["fast"], state["mean"], 0.9))


class Prodigy(torch.optim.Optimizer):
    """Adam, times an estimate of how far the solution is: it begins far too small, and grows."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, first: float = 1e-5) -> None:
        super().__init__(params, {"lr": lr, "d": first, "r": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            d, total, keep = group["d"], 0.0, math.sqrt(0.99)
            group["r"] *= keep
            for parameter in (one for one in group["params"] if one.grad is not None):
                state = self.state[parameter]
                if not state:
                    state |= {"first": parameter.clone(), **{name: torch.zeros_like(parameter) for name in "msv"}}
                grad = parameter.grad
                group["r"] += (1 - keep) * d**2 * float((grad * (state["first"] - parameter)).sum())
                state["s"].mul_(keep).add_(grad, alpha=(1 - keep) * d**2)
                state["m"].mul_(0.9).add_(grad, alpha=0.1 * d)
                state["v"].mul_(0.99).add_(grad.square(), alpha=0.01 * d**2)
                total += float(state["s"].abs().sum())
                parameter.sub_(state["m"] / (state["v"].sqrt() + d * 1e-8), alpha=group["lr"] * d)
            group["d"] = max(d, group["r"] / total) if total else d


PAIRS: dict[str, Callable[[], Loop]] = {
    "decay on matrices, four batches per step": small_gpt,
    "a decoder that hears itself ever more often": sampled,
    "LSTM at a rate of 20, clipped to 0.25": lambda: supervised(made.Carried(), data.sentences(16), next_token, optimizer=torch.optim.SGD, lr=20.0, clip=0.25, steps=200),
    "words by their company": lambda: supervised(made.Neighbours(), made.company(), own_loss, optimizer=torch.optim.SGD, lr=2.0, schedule=lambda step: 1 - step / 310, steps=300),
    "facts as ways, lengths put back to 1": placed,
    "masks of all levels": lambda: supervised(made.Unmasked(), made.ladders(), made.unmasked, optimizer=AdamW, lr=6e-3, schedule=cosine(200), steps=200),
    "centres and sizes, most pixels empty": lambda: supervised(made.Centres(), made.things(), made.found, lr=4e-3, steps=150),
    "few pixels of a spot, dice": lambda: supervised(nn.Sequential(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Conv2d(12, 1, 1)), made.spots(), made.dice, optimizer=momentum, lr=0.05, steps=120),
    "blocks behind gates that begin at 0": gates_of_nothing,
    "a copy that speaks through layers of 0": controlled,
    "energies and walks downhill": lambda: supervised(mlp(2, 64, 64, 1, act=nn.SiLU), data.points(64), made.walked, lr=2e-3, clip=1.0, steps=150),
    "Boltzmann machine": lambda: supervised(made.Bits(), made.patterns(), own_loss, optimizer=torch.optim.SGD, lr=0.1, steps=300),
    "every level of noise, preconditioned": leveled,
    "rows of length 1": unit_rows,
    "relativistic GAN, slopes penalised": rivals,
    "two clouds, there and back": there_and_back,
    "Q-learning with 21 atoms": atoms,
    "Q-learning with quantiles and priorities": quantiles,
    "a world of pendulums": lambda: supervised(tables.World(), tables.pendulums(), tables.foretold, lr=4e-3, clip=1.0, steps=150),
    "soft actor-critic, three actions, its own temperature": tempered,
    "a student that teaches itself": taught_by_itself,
    "two views, features decorrelated": lambda: supervised(nn.Sequential(mlp(12, 48, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 16)), data.pairs(64), decorrelated, optimizer=AdamW, lr=2e-3, steps=200),
    "an equation and its ends": lambda: supervised(mlp(1, 32, 32, 1, act=nn.Tanh), lambda _: (2 * torch.rand(64, 1), torch.tensor([[0.0], [2.0]])), tables.equation, lr=3e-3, steps=300),
    "energies of molecules and their forces": lambda: supervised(tables.Molecule(), tables.molecules(), tables.pulled, lr=3e-3, schedule=cosine(200, 10), steps=200),
    "survival, proportional hazards": lambda: supervised(mlp(8, 24, 1), tables.patients(), tables.cox, optimizer=AdamW, lr=2e-3, steps=200),
    "amounts claimed, gamma": lambda: supervised(mlp(8, 32, 32, 1, act=nn.Tanh), tables.claims(), tables.gamma, lr=2e-3, steps=200),
    "documents in order, lambdas": lambda: supervised(mlp(8, 32, 32, 1), tables.queries(), tables.lambdas, lr=2e-3, steps=200),
    "grades by cumulative logits": lambda: supervised(tables.Ordinal(), tables.grades(), tables.passed, optimizer=momentum, lr=0.05, steps=200),
    "free of schedules": lambda: supervised(mlp(8, 48, 48, 1), data.curve(), lambda model, x, y: functional.mse_loss(model(x), y), optimizer=ScheduleFree, lr=3e-3),
    "a rate that finds itself": lambda: supervised(mlp(12, 48, 48, 4), data.blobs(), classify, optimizer=Prodigy, lr=1.0),
}  # fmt: skip


def third(which: int) -> dict[str, Callable[[], Loop]]:
    """0: those that are opened, 1: the locked ones."""
    return dict(list(PAIRS.items())[which::2])
