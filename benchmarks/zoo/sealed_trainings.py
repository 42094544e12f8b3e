"""The sealed healthy trainings: what people train, each in its usual recipe. Written without knowledge of any rule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import sealed_models as of
from .data import drawn, sentences
from .healthy_supervised import SGD, AdamW, cosine, momentum
from .loop import Batch, Loop, descend, supervised
from .models import LoRA, Recurrent, classify, mlp, next_token, regress

Adam = torch.optim.Adam


def language(**options: object) -> Loop:
    """The usual recipe of a language model."""
    adam = lambda parameters, lr: AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)  # noqa: E731
    known = {"optimizer": adam, "lr": 4e-3, "schedule": cosine(300, 30), "clip": 1.0, "steps": 300}
    return supervised(of.Decoder(), of.phrases(), next_token, **known | options)  # type: ignore[arg-type]


def steps_down(*at: int, by: float = 0.1) -> Callable[[int], float]:
    """A learning rate that falls at some steps."""
    return lambda step: by ** sum(step > one for one in at)


def one_cycle(steps: int, first: float = 0.04) -> Callable[[int], float]:
    """Up within 30 % of the steps, then down to nothing."""
    up = 0.3 * steps
    return lambda step: (
        first + (1 - first) * 0.5 * (1 - math.cos(math.pi * step / up))
        if step < up
        else 0.5 + 0.5 * math.cos(math.pi * min(1.0, (step - up) / (steps - up)))
    )


def restarted(*lengths: int) -> Callable[[int], float]:
    """Half a cosine per cycle, from the full rate each time."""

    def factor(step: int) -> float:
        for length in lengths:
            if step <= length:
                return 0.5 + 0.5 * math.cos(math.pi * (step - 1) / length)
            step -= length
        return 0.0

    return factor


def averaged(loop: Loop, module: nn.Module, decay: float) -> nn.Module:
    """Return a copy of a module that follows it as a moving average."""
    average = copy.deepcopy(module).requires_grad_(False)

    @torch.no_grad()
    def follow(loop: Loop, step: int) -> None:
        for slow, fast in zip(average.parameters(), module.parameters(), strict=True):
            slow.lerp_(fast, 1 - decay)

    loop.after.append(follow)
    return average


def diffusion() -> Loop:
    loop = supervised(of.Denoiser(), of.moons(128), of.denoised, lr=2e-3, steps=300)
    averaged(loop, loop.model, 0.99)
    return loop


class Adversaries(nn.Module):
    """A generator and a discriminator of points; `saturating`: the generator minimises log(1 - D); `bound`: of a clamped critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(4, 48, 48, 2)
        self.discriminator = mlp(2, 48, 48, 1, act=lambda: nn.LeakyReLU(0.2))
        self.saturating, self.zeroes_discriminator, self.bound = False, True, 0.15


def adversarial() -> Loop:
    model, bce = Adversaries(), functional.binary_cross_entropy_with_logits
    optimizers = [Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.999)) for part in (model.discriminator, model.generator)]  # fmt: skip

    def update(loop: Loop, step: int) -> Tensor:
        (real,) = loop.batch(step)
        fake = model.generator(torch.randn(len(real), 4))
        true, false = model.discriminator(real), model.discriminator(fake.detach())
        loss = bce(true, torch.ones_like(true)) + bce(false, torch.zeros_like(false))
        if model.zeroes_discriminator:
            descend(loop.optimizers[0], loss)
        else:
            loss.backward()
            loop.optimizers[0].step()
        said = model.discriminator(fake)
        other = -bce(said, torch.zeros_like(said)) if model.saturating else bce(said, torch.ones_like(said))
        descend(loop.optimizers[1], other)
        return loss

    return Loop(model, of.moons(), lambda *_: torch.zeros(()), optimizers, steps=300, update=update)


def wasserstein() -> Loop:
    """A critic whose weights are clamped after each of its three steps."""
    model = Adversaries()
    optimizers = [torch.optim.RMSprop(part.parameters(), lr=1e-3) for part in (model.discriminator, model.generator)]

    def update(loop: Loop, step: int) -> Tensor:
        for _ in range(3):
            (real,) = loop.batch(step)
            fake = model.generator(torch.randn(len(real), 4)).detach()
            loss = descend(optimizers[0], model.discriminator(fake).mean() - model.discriminator(real).mean())
            with torch.no_grad():
                for parameter in model.discriminator.parameters():
                    parameter.clamp_(-model.bound, model.bound)
        descend(optimizers[1], -model.discriminator(model.generator(torch.randn(64, 4))).mean())
        return loss

    return Loop(model, of.moons(), lambda *_: torch.zeros(()), optimizers, steps=150, update=update)


class Bootstrap(nn.Module):
    """BYOL's online network: encoder, projection and prediction."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = mlp(16, 48, 24, norm=nn.BatchNorm1d), mlp(24, 24, 24, norm=nn.BatchNorm1d)


def bootstrapped() -> Loop:
    """Two noisy views of the same thing; the target is a moving average of the encoder."""
    things = torch.randn(12, 16)

    def batch(_: int) -> Batch:
        x = 1.5 * things[torch.randint(0, 12, (48,))] + 0.5 * torch.randn(48, 16)
        return x + 0.4 * torch.randn(48, 16), x + 0.4 * torch.randn(48, 16)

    def loss(model: nn.Module, first: Tensor, second: Tensor) -> Tensor:
        total = torch.zeros(())
        for x, other in ((first, second), (second, first)):
            with torch.no_grad():
                aim = target(other)
            total = total + 2 - 2 * functional.cosine_similarity(model.predictor(model.encoder(x)), aim).mean()
        return total

    loop = supervised(Bootstrap(), batch, loss, optimizer=AdamW, lr=2e-3, steps=300)
    target = averaged(loop, loop.model.encoder, 0.97)
    return loop


def fitted(model: nn.Module, batch: Callable[[int], Batch], loss: Callable[..., Tensor], steps: int, lr: float = 3e-3) -> nn.Module:  # fmt: skip
    """Train a model before the training that is watched."""
    optimizer = Adam(model.parameters(), lr=lr)
    for step in range(1, steps + 1):
        descend(optimizer, loss(model, *batch(step)))
    return model


def distilled() -> Loop:
    """A small network learns from a large one, which knows the pictures."""
    batch = of.pictures(noise=1.0)
    teacher = fitted(of.separable(), batch, classify, 120, 1e-2).eval().requires_grad_(False)

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        said = model(x)
        aim = (model.teacher[0](x) / 4).softmax(1)
        soft = functional.kl_div((said / 4).log_softmax(1), aim, reduction="batchmean")
        return 16 * soft + 0.1 * functional.cross_entropy(said, labels)

    model = of.plain_convolutions()
    model.teacher = [teacher]  # in a list: not a submodule
    return supervised(model, batch, loss, lr=3e-3, steps=250)


class Grid:
    """A field of 5 x 5 with the aim in a corner: double Q-learning from random steps."""

    def __init__(self, model: nn.Module) -> None:
        self.held, self.discount, self.ends, self.every = copy.deepcopy(model), 0.9, True, 25

    def batch(self, _: int) -> Batch:
        place, action = torch.randint(0, 5, (64, 2)), torch.randint(0, 4, (64,))
        move = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])[action]
        after = (place + move).clamp(0, 4)
        return self.seen(place), action, (after.sum(1) == 8).float(), self.seen(after)

    @staticmethod
    def seen(place: Tensor) -> Tensor:
        return functional.one_hot(place, 5).flatten(1).float()

    def loss(self, model: nn.Module, state: Tensor, action: Tensor, reward: Tensor, after: Tensor) -> Tensor:
        with torch.no_grad():
            best = model(after).argmax(1, keepdim=True)
            aim = reward + self.discount * (1 - reward * self.ends) * self.held(after).gather(1, best)[:, 0]
        return functional.smooth_l1_loss(model(state).gather(1, action[:, None])[:, 0], aim)

    def follow(self, loop: Loop, step: int) -> None:
        if step % self.every == 0:
            self.held.load_state_dict(loop.model.state_dict())


def q_learning() -> Loop:
    model = mlp(10, 48, 48, 4)
    grid = Grid(model)
    model.grid = grid
    return supervised(model, grid.batch, grid.loss, lr=2e-3, clip=10.0, steps=400, after=[grid.follow])


class Agent(nn.Module):
    """A policy and a value of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = mlp(2, 32, 32, 4, act=nn.Tanh), mlp(2, 32, 32, 1, act=nn.Tanh)


class Walks:
    """Proximal policy optimisation: sixteen points walk to the origin, and every walk serves eight steps of training."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.sign, self.old_shift = model, 1.0, 0.0
        self.place = 2 * torch.rand(16, 2) - 1

    @torch.no_grad()
    def collect(self, loop: Loop, step: int) -> None:
        if step % 8 != 1:
            return
        rows, moves = [], 0.2 * torch.tensor([[0.0, 1], [0, -1], [1, 0], [-1, 0]])
        for _ in range(17):
            log_p = self.model.policy(self.place).log_softmax(1)
            action = torch.multinomial(log_p.exp(), 1)
            after = self.place + moves[action[:, 0]] + 0.02 * torch.randn(16, 2)
            reward = 1 - after.norm(dim=1)
            ended = (reward < -1) | (torch.rand(16) < 0.05)
            rows.append((self.place, action, log_p.gather(1, action)[:, 0], reward, self.model.value(self.place)[:, 0], ended))  # fmt: skip
            self.place = torch.where(ended[:, None], 2 * torch.rand(16, 2) - 1, after)
        state, action, log_p, reward, value, ended = (torch.stack(column) for column in zip(*rows, strict=True))
        advantage, last = torch.zeros(16, 16), torch.zeros(16)
        for t in reversed(range(16)):
            alive = 1 - ended[t].float()
            last = advantage[t] = reward[t] + 0.95 * alive * value[t + 1] - value[t] + 0.95 * 0.9 * alive * last
        self.rows = [x[:16].flatten(0, 1) for x in (state, action, log_p)] + [advantage.flatten(), (advantage + value[:16]).flatten()]  # fmt: skip

    def batch(self, _: int) -> Batch:
        chosen = torch.randint(0, 256, (64,))
        return tuple(x[chosen] for x in self.rows)

    def loss(self, model: nn.Module, state: Tensor, action: Tensor, old: Tensor, advantage: Tensor, aim: Tensor) -> Tensor:  # fmt: skip
        log_p = model.policy(state).log_softmax(1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (log_p.gather(1, action)[:, 0] - old + self.old_shift).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(log_p.exp() * log_p).sum(1).mean()
        return -self.sign * gain + 0.5 * functional.mse_loss(model.value(state)[:, 0], aim) - 0.01 * entropy


def proximal() -> Loop:
    model = Agent()
    model.walks = walks = Walks(model)
    return supervised(model, walks.batch, walks.loss, lr=1e-3, clip=0.5, steps=400, before=[walks.collect])


def bandit() -> Loop:
    """REINFORCE with a moving baseline: which of five arms pays depends on what is seen."""
    w, baseline = torch.randn(6, 5), [0.0]

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        log_p = model(x).log_softmax(1)
        action = torch.multinomial(log_p.detach().exp(), 1)
        reward = (x @ w).gather(1, action)[:, 0] + torch.randn(len(x))
        value = -(log_p.gather(1, action)[:, 0] * (reward - baseline[0])).mean()
        baseline[0] += 0.05 * (float(reward.mean()) - baseline[0])
        return value

    return supervised(mlp(6, 32, 5), lambda _: (torch.randn(16, 6),), loss, optimizer=SGD, lr=0.02, steps=400)


class ActorCritic(nn.Module):
    """A Gaussian policy of one action, two critics and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critics = mlp(3, 32, 2), nn.ModuleList(mlp(4, 32, 32, 1) for _ in range(2))
        self.log_heat = nn.Parameter(torch.tensor(-1.0))

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(state).chunk(2, dim=1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-4, 1).exp())
        action = normal.rsample()
        log_p = normal.log_prob(action) - torch.log(1 - action.tanh() ** 2 + 1e-6)
        return action.tanh(), log_p


def soft_actor_critic() -> Loop:
    """One step of a pendulum from anywhere; three optimizers; the critics' targets follow slowly."""
    model = ActorCritic()
    optimizers = [Adam(part, lr=2e-3) for part in (model.critics.parameters(), model.actor.parameters(), [model.log_heat])]  # fmt: skip

    def batch(_: int) -> Batch:
        angle, speed = 6.28 * torch.rand(64, 1), torch.randn(64, 1)
        action = 2 * torch.rand(64, 1) - 1
        faster = 0.9 * speed + 0.5 * angle.sin() + action
        after = angle + 0.2 * faster
        see = lambda angle, speed: torch.cat([angle.cos(), angle.sin(), speed], dim=1)  # noqa: E731
        return see(angle, speed), action, angle.cos() - 0.1 * speed**2, see(after, faster)

    def update(loop: Loop, step: int) -> Tensor:
        state, action, reward, after = loop.batch(step)
        with torch.no_grad():
            later, log_p = model.act(after)
            value = torch.minimum(*(critic(torch.cat([after, later], 1)) for critic in targets))
            aim = reward + 0.9 * (value - model.log_heat.exp() * log_p)
        critic_loss = sum(functional.mse_loss(critic(torch.cat([state, action], 1)), aim) for critic in model.critics)
        descend(loop.optimizers[0], critic_loss)
        now, log_p = model.act(state)
        best = torch.minimum(*(critic(torch.cat([state, now], 1)) for critic in model.critics))
        descend(loop.optimizers[1], (model.log_heat.exp().detach() * log_p - best).mean())
        descend(loop.optimizers[2], -(model.log_heat.exp() * (log_p.detach() - 1.0)).mean())
        return critic_loss

    loop = Loop(model, batch, lambda *_: torch.zeros(()), optimizers, steps=250, update=update)
    targets = averaged(loop, model.critics, 0.98)
    return loop


def low_rank() -> Loop:
    """A language model that learned one way to speak is adapted to another; only matrices of rank 4 are trained."""
    model = fitted(of.Decoder(), of.phrases(), next_token, 100, 5e-3).requires_grad_(False)
    for attention in model.attentions:
        attention.qkv, attention.out = LoRA(attention.qkv, 4), LoRA(attention.out, 4)
    mapping, batch = torch.randperm(24), of.phrases()
    return supervised(model, lambda step: tuple(mapping[part] for part in batch(step)), next_token, optimizer=AdamW, lr=1e-2, schedule=cosine(250, 20), steps=250)  # fmt: skip


def unfrozen() -> Loop:
    """A backbone that knows other pictures: first the new head alone, from step 120 all, the backbone at a tenth."""
    known = of.pictures()
    model = fitted(of.plain_convolutions(), lambda step: known(step), classify, 80)
    model[-1] = nn.Linear(72, 5)
    body = [parameter for layer in model[:-1] for parameter in layer.parameters()]
    for parameter in body:
        parameter.requires_grad_(False)
    swapped = torch.tensor([3, 0, 4, 1, 2])
    batch = of.pictures(noise=1.0)

    def turned(step: int) -> Batch:
        x, labels = batch(step)
        return x.flip(3), swapped[labels]

    def unfreeze(loop: Loop, step: int) -> None:
        for parameter in body:
            parameter.requires_grad_(step >= 120)

    optimizer = AdamW([{"params": model[-1].parameters(), "lr": 3e-3}, {"params": body, "lr": 3e-4}])
    return Loop(model, turned, classify, [optimizer], steps=260, before=[unfreeze])


def half_precision() -> Loop:
    """float16 by autocast, with a scaler and clipping; a transformer of pictures."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=50)
    return supervised(of.VisionTransformer(), of.pictures(), classify, optimizer=AdamW, lr=2e-3, clip=1.0, scaler=scaler, autocast=torch.float16, steps=150)  # fmt: skip


def stateful() -> Loop:
    """The classic recipe of word models: SGD, clipping at 0.25, the rate is quartered twice."""
    tokens = sentences(1, length=3200)(1)[0].view(16, -1)

    def batch(step: int) -> Batch:
        start = 16 * (step % (tokens.shape[1] // 16 - 1))
        return tokens[:, start : start + 16], tokens[:, start + 1 : start + 17]

    return supervised(of.Writer(), batch, next_token, optimizer=SGD, lr=10.0, clip=0.25, schedule=steps_down(180, 240, by=0.25), steps=300)  # fmt: skip


def quasi_newton() -> Loop:
    """Logistic regression with decay on all data; it converges soon."""
    x = torch.randn(200, 10)
    y = ((x @ torch.randn(10)) + torch.randn(200) > 0).float()
    model = nn.Linear(10, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(model(x)[:, 0], y) + 1e-3 * model.weight.square().sum()

    def update(loop: Loop, step: int) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loop.loss(model, *loop.batch(step))
            value.backward()
            return value

        return torch.as_tensor(optimizer.step(closure))

    return Loop(model, lambda _: (x, y), loss, [optimizer], steps=100, update=update)


def lengthening(size: int = 24) -> Callable[[int], Batch]:
    """Two marked numbers are to be added; the sequences are twice as long every 120 steps."""

    def batch(step: int) -> Batch:
        length = 4 * 2 ** min(3, (step - 1) // 120)
        x, marks = torch.rand(size, length), torch.zeros(size, length)
        marks.scatter_(1, torch.rand(size, length).topk(2).indices, 1.0)
        return torch.stack([x, marks], dim=2), (x * marks).sum(1, keepdim=True)

    return batch


def rare(size: int = 64, share: float = 0.02) -> Callable[[int], Batch]:
    """A fraud in fifty payments."""
    w = torch.randn(12)

    def batch(_: int) -> Batch:
        y = (torch.rand(size) < share).float()
        return torch.randn(size, 12) + y[:, None] * w, y

    return batch


def weighted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(x)[:, 0], y, pos_weight=torch.tensor(20.0))


def margin(model: nn.Module, first: Tensor, second: Tensor, same: Tensor) -> Tensor:
    """Pairs are drawn together, or apart as far as the margin."""
    distance = (model(first) - model(second)).square().sum(1).add(1e-8).sqrt()
    return torch.where(same, distance**2, functional.relu(1 - distance) ** 2).mean()


def likenesses(size: int = 32) -> Callable[[int], Batch]:
    people = torch.randn(20, 16)

    def batch(_: int) -> Batch:
        who = torch.randint(0, 20, (2, size))
        same = torch.rand(size) < 0.5
        who[1] = torch.where(same, who[0], who[1])
        views = people[who] + 0.3 * torch.randn(2, size, 16)
        return views[0], views[1], who[0] == who[1]

    return batch


def physics(model: nn.Module, t: Tensor) -> Tensor:
    """The pendulum's equation, and its beginning."""
    t = t.requires_grad_()
    u = model(t)
    first = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
    second = torch.autograd.grad(first.sum(), t, create_graph=True)[0]
    start = torch.zeros(1, 1, requires_grad=True)
    at_start = model(start)
    speed = torch.autograd.grad(at_start.sum(), start, create_graph=True)[0]
    return (second + 0.2 * first + 4 * u).square().mean() + 10 * ((at_start - 1).square() + speed.square()).mean()


def field() -> Loop:
    """One picture, as a function of places: all pixels every step."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij")
    places = torch.stack([x, y], dim=2).view(-1, 2)
    waves = 3 * places @ torch.randn(2, 24)
    colours = torch.stack([(5 * x).sin() * y, (x * y * 6).cos(), (x**2 + y**2 < 0.5).float()], dim=2).view(-1, 3)
    features = torch.cat([waves.sin(), waves.cos()], dim=1)
    return supervised(mlp(48, 64, 64, 3), lambda _: (features, colours), regress, lr=3e-3, steps=300)


def returns(size: int = 32) -> Callable[[int], Batch]:
    """Series of which one value in fifty is ten times as large; the next value is to be told."""

    def batch(_: int) -> Batch:
        x = torch.randn(size, 17).cumsum(1) / 4
        x = torch.where(torch.rand(size, 17) < 0.02, 10 * x, x)
        return x[:, :16], x[:, 16:]

    return batch


def episodes(model: nn.Module, support: Tensor, query: Tensor) -> Tensor:
    """Prototypes of five new classes from three examples each."""
    centres = model(support).mean(1)
    distance = torch.cdist(model(query).flatten(0, 1), centres).square()
    return functional.cross_entropy(-distance, torch.arange(5).repeat_interleave(query.shape[1]))


def new_classes(_: int) -> Batch:
    x = torch.randn(5, 1, 16) + torch.cat([0.5 * torch.randn(5, 8, 12), 3 * torch.randn(5, 8, 4)], dim=2)
    return x[:, :3], x[:, 3:]


def survival(model: nn.Module, x: Tensor, time: Tensor, seen: Tensor) -> Tensor:
    """Cox' partial likelihood."""
    order = time.argsort(descending=True)
    risk = model(x)[order, 0]
    return -((risk - risk.logcumsumexp(0)) * seen[order]).sum() / seen.sum().clamp(min=1)


def patients(size: int = 48) -> Callable[[int], Batch]:
    w = torch.randn(8)

    def batch(_: int) -> Batch:
        x = torch.randn(size, 8)
        time = -torch.rand(size).log() / (x @ w).exp()
        return x, time, (torch.rand(size) < 0.6).float()

    return batch


def memorised() -> Loop:
    """64 samples in a network that is far too large: long after all is learned, it goes on."""
    x, y = torch.randn(64, 10), torch.randint(0, 3, (64,))
    return supervised(mlp(10, 96, 96, 3), drawn(x, y), classify, lr=3e-3, steps=600)


def hard_at_times(size: int = 32) -> Callable[[int], Batch]:
    """Every 70th batch is of hard samples, far from the others."""
    w = torch.randn(10, 2)

    def batch(step: int) -> Batch:
        x = (5.0 if step % 70 == 0 else 1.0) * torch.randn(size, 10)
        return x, (x @ w[:, :1]).abs() - (x @ w[:, 1:]) + 0.1 * torch.randn(size, 1)

    return batch


def huber(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.smooth_l1_loss(model(x), y)


def at_the_edge() -> Loop:
    """Gradient descent on all data with a rate at the edge of what is stable: the loss falls, not in each step."""
    x = torch.randn(100, 6)
    y = (x[:, :1] * x[:, 1:2]).tanh() + 0.5 * x[:, 2:3]
    return supervised(mlp(6, 48, 48, 1, act=nn.Tanh), lambda _: (x, y), regress, optimizer=SGD, lr=0.35, steps=400)


def deep_from_zero() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 24), *(of.ReZero(24) for _ in range(10)), nn.Linear(24, 1))


def sharpness_aware() -> Loop:
    """SAM: the gradient beside the weights moves the weights."""
    loop = supervised(of.Cloud(), of.clouds(), classify, optimizer=momentum, lr=0.02, steps=200)

    def update(loop: Loop, step: int) -> Tensor:
        batch, weights = loop.batch(step), list(loop.model.parameters())
        loss = loop.loss(loop.model, *batch)
        grads = torch.autograd.grad(loss, weights)
        norm = torch.stack([grad.norm() for grad in grads]).norm() + 1e-12
        with torch.no_grad():
            for weight, grad in zip(weights, grads, strict=True):
                weight.add_(0.05 * grad / norm)
        loop.zero_grad()
        loop.loss(loop.model, *batch).backward()
        with torch.no_grad():
            for weight, grad in zip(weights, grads, strict=True):
                weight.sub_(0.05 * grad / norm)
        loop.optimizers[0].step()
        return loss

    loop.update = update
    return loop


def decayed(parameters: object, lr: float) -> SGD:
    return SGD(parameters, lr=lr, momentum=0.9, weight_decay=5e-4)


SEALED: dict[str, Callable[[], Loop]] = {
    "language model, RMSNorm, rotary, tied": language,
    "language model, bfloat16, Lion": lambda: language(autocast=torch.bfloat16, optimizer=of.Lion, lr=2e-3, steps=200),
    "ViT with a class token, dropout": lambda: supervised(of.VisionTransformer(), of.pictures(), classify, optimizer=AdamW, lr=2e-3, schedule=cosine(200), steps=200),
    "bottlenecks, last gamma 0, steps down": lambda: supervised(of.bottlenecks(), of.pictures(32), classify, optimizer=decayed, lr=0.05, schedule=steps_down(120, 170), steps=220),
    "depthwise convolutions, label smoothing": lambda: supervised(of.separable(), of.pictures(noise=1.0), _smoothed, optimizer=AdamW, lr=3e-3, steps=200),
    "plain convolutions, warm restarts": lambda: supervised(of.plain_convolutions(), of.pictures(), classify, optimizer=momentum, lr=0.02, schedule=restarted(60, 120, 120), steps=300),
    "U-Net, Dice, small discs": lambda: supervised(of.UNet(), of.lesions(), of.dice, lr=3e-3, steps=200),
    "diffusion of points": diffusion,
    "VAE, divergence grows": lambda: supervised(of.Variational(), of.spectra(), lambda model, *batch: model(*batch), lr=2e-3, steps=300),
    "flow, loss negative from the start": lambda: supervised(of.Couplings(), of.moons(scale=0.05), lambda model, x: model(x), lr=3e-3, steps=300),
    "vector-quantised autoencoder": lambda: supervised(of.Codebook(), of.spectra(), lambda model, *batch: model(*batch), lr=3e-3, steps=300),
    "GAN of points": adversarial,
    "Wasserstein GAN, clamped critic": wasserstein,
    "CLIP of numbers and words": lambda: supervised(of.Towers(), of.captions(), of.matched, optimizer=AdamW, lr=3e-3, steps=300),
    "BYOL, views of things": bootstrapped,
    "distillation of pictures": distilled,
    "double Q-learning in a grid": q_learning,
    "PPO of walks": proximal,
    "REINFORCE, five arms": bandit,
    "soft actor and two critics": soft_actor_critic,
    "graph convolutions, whole graph": lambda: supervised(of.Graph(), of.citations(), of.known_nodes, optimizer=lambda p, lr: Adam(p, lr=lr, weight_decay=5e-4), lr=0.01, steps=200),
    "clicks, wide and deep": lambda: supervised(of.Clicks(), of.visits(), of.clicked, lr=3e-3, steps=300),
    "prices of categories, one cycle": lambda: supervised(of.Clicks(0.1), of.visits(rate=0.0), of.priced, optimizer=AdamW, lr=1e-2, schedule=one_cycle(300), steps=300),
    "ranking of tastes, Adagrad": lambda: supervised(of.Tastes(), of.choices(), of.preferred, optimizer=torch.optim.Adagrad, lr=0.1, steps=300),
    "LSTM with its state, SGD, clipped": stateful,
    "GRU, sequences grow longer": lambda: supervised(Recurrent(nn.GRU, 2, 1), lengthening(), regress, lr=5e-3, clip=1.0, steps=480),
    "tanh RNN, tones": lambda: supervised(nn.Sequential(nn.Embedding(16, 12), Recurrent(nn.RNN, 12, 16, dim=32, every=True)), of.sounds(), next_token, lr=2e-3, clip=1.0, steps=250),
    "dilated convolutions, weight norm": lambda: supervised(of.Heard(), of.sounds(), next_token, lr=3e-3, steps=200),
    "translation, attention over a GRU": lambda: supervised(of.Translator(), of.reversed_words(), of.translated, lr=5e-3, clip=1.0, steps=300),
    "switch of eight experts": lambda: supervised(of.Switch(), of.pieces(), of.balanced, lr=5e-3, steps=400),
    "LoRA of a language model": low_rank,
    "head first, backbone from step 120": unfrozen,
    "float16, scaler, ViT": half_precision,
    "eight batches per step, SGD": lambda: supervised(of.plain_convolutions(), of.pictures(4), classify, optimizer=momentum, lr=0.02, accumulate=8, steps=120),
    "L-BFGS, logistic regression": quasi_newton,
    "Adafactor, points": lambda: supervised(of.Cloud(), of.clouds(), classify, optimizer=lambda p, lr: torch.optim.Adafactor(p, lr=lr), lr=0.02, steps=200),
    "SAM, points": sharpness_aware,
    "fraud in one of fifty": lambda: supervised(mlp(12, 32, 32, 1), rare(), weighted, lr=2e-3, steps=300),
    "likenesses, margin": lambda: supervised(mlp(16, 48, 8), likenesses(), margin, lr=3e-3, steps=300),
    "physics, second derivatives": lambda: supervised(mlp(1, 32, 32, 1, act=nn.Tanh), lambda _: (3 * torch.rand(64, 1),), physics, lr=3e-3, steps=300),
    "one picture as a field": field,
    "heavy tails, clipped by value": lambda: supervised(mlp(16, 32, 1), returns(), regress, lr=2e-3, received=[_by_value], steps=300),
    "prototypes of new classes": lambda: supervised(mlp(16, 48, 16), new_classes, episodes, lr=2e-3, steps=200),
    "hard batches, Huber": lambda: supervised(mlp(10, 48, 48, 1), hard_at_times(), huber, optimizer=AdamW, lr=2e-3, clip=1.0, steps=350),
    "all data, edge of stability": at_the_edge,
    "survival": lambda: supervised(mlp(8, 24, 1), patients(), survival, optimizer=SGD, lr=0.05, steps=250),
    "two tasks, learned uncertainty": lambda: supervised(of.Tasks(), of.two_tasks(), of.uncertain, lr=4e-3, steps=400),
    "memorised, 600 steps": memorised,
    "ReZero, ten layers": lambda: supervised(deep_from_zero(), of.pieces(32), regress, lr=3e-3, steps=250),
}  # fmt: skip


def _smoothed(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), labels, label_smoothing=0.1)


def _by_value(loop: Loop, step: int) -> None:
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.5)
