"""Values of states and actions that learn from themselves."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..loop import Batch, Loop, descend, supervised
from .dense import mlp
from .losses import own_loss
from .optimizers import follow, follower
from .reinforcement import begun, pushed, turns


def chain_of_states(*, every: int = 50, soft: float = 0.0, double: bool = False) -> Loop:
    """DQN on a chain of states, with a copy of the network as target: copied now and then, or followed softly."""
    model = mlp(4, 32, 32, 2)
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=2e-3)

    def update(loop: Loop, step: int) -> Tensor:
        (state,) = loop.batch(step)
        action = torch.randint(0, 2, (len(state),))
        after, reward = moved(state, action)
        with torch.no_grad():
            best = (model if double else target)(after).argmax(dim=1, keepdim=True)
            aim = 3.0 * reward + 0.95 * target(after).gather(1, best)[:, 0]
        value = model(state).gather(1, action[:, None])[:, 0]
        loss = descend(optimizer, functional.smooth_l1_loss(value, aim))
        follow(target, model, soft if soft else float(step % every == 0))
        return loss

    return Loop(model, lambda _: (torch.randn(32, 4),), own_loss, [optimizer], steps=300, update=update)


def continuous(*, twins: int = 1, entropy: float = 0.0) -> Loop:
    """DDPG, and with two critics and an entropy bonus SAC: a critic's step, then an actor's."""
    model = nn.ModuleDict({"actor": mlp(6, 32, 4), "critic": nn.ModuleList(mlp(8, 32, 1) for _ in range(twins))})
    actor, critic = (
        torch.optim.Adam(model[part].parameters(), lr=lr) for part, lr in (("actor", 1e-3), ("critic", 3e-3))
    )

    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = model["actor"](state).chunk(2, dim=1)
        log_std = log_std.clamp(-3, 1)
        return torch.tanh(mean + 0.3 * log_std.exp() * torch.randn_like(mean)), log_std.sum(dim=1)

    def update(loop: Loop, step: int) -> Tensor:
        state = loop.batch(step)[0]
        action = act(state)[0].detach()
        reward = -(action - torch.tanh(state[:, :2])).square().sum(dim=1) + 0.1 * torch.randn(len(state))
        seen = torch.cat([state, action], dim=1)
        descend(critic, sum((one(seen)[:, 0] - reward).square().mean() for one in model["critic"]))
        action, spread = act(state)
        seen = torch.cat([state, action], dim=1)
        value = torch.stack([one(seen)[:, 0] for one in model["critic"]]).amin(dim=0)
        return descend(actor, -(value + entropy * spread).mean())

    return Loop(model, turns(32), own_loss, [critic, actor], update=update, watched=dict(model.items()))


def delayed() -> Loop:
    """TD3: two critics at every step, the actor at every second one, targets that follow."""
    model = nn.ModuleDict({"actor": mlp(6, 32, 2), "critics": nn.ModuleList(mlp(8, 32, 1) for _ in range(2))})
    actor, critics = (torch.optim.Adam(model[part].parameters(), lr=2e-3) for part in ("actor", "critics"))
    target = copy.deepcopy(model).requires_grad_(False)

    def update(loop: Loop, step: int) -> Tensor:
        state = loop.batch(step)[0]
        action = (torch.tanh(model["actor"](state)) + 0.2 * torch.randn(len(state), 2)).clamp(-1, 1).detach()
        reward = -(action - torch.tanh(state[:, :2])).square().sum(dim=1)
        later = state + 0.1 * torch.randn_like(state)
        seen = torch.cat([later, torch.tanh(target["actor"](later))], dim=1)
        aim = reward + 0.9 * torch.stack([one(seen)[:, 0] for one in target["critics"]]).amin(dim=0)
        pair = torch.cat([state, action], dim=1)
        loss = descend(critics, sum((one(pair)[:, 0] - aim).square().mean() for one in model["critics"]))
        if step % 2 == 0:
            acted = torch.cat([state, torch.tanh(model["actor"](state))], dim=1)
            descend(actor, -model["critics"][0](acted).mean())
            follow(target, model, 0.02)
        return loss

    batch = lambda _: (torch.randn(32, 6),)  # noqa: E731
    return Loop(model, batch, own_loss, [critics, actor], update=update, watched=dict(model.items()), steps=300)


def deep_q() -> Loop:
    """DQN: a buffer, a target that is replaced every 25 steps, ever less chance in the actions."""
    model = mlp(3, 48, 48, 3)
    target, state, buffer = copy.deepcopy(model).requires_grad_(False), [begun(16)], []

    @torch.no_grad()
    def batch(step: int) -> Batch:
        if step % 12 == 1:
            state[0] = begun(16)
        chance = torch.rand(16) < max(0.1, 1 - step / 100)
        action = torch.where(chance, torch.randint(0, 3, (16,)), model(state[0]).argmax(dim=1))
        later, reward = pushed(state[0], action)
        buffer.append((state[0], action, later, reward))
        state[0] = later
        chosen = [buffer[index] for index in torch.randint(0, len(buffer), (4,)).tolist()]
        return tuple(torch.cat(part) for part in zip(*chosen, strict=True))

    def loss(model: nn.Module, state: Tensor, action: Tensor, later: Tensor, reward: Tensor) -> Tensor:
        aim = reward + 0.9 * target(later).amax(dim=1)
        return functional.smooth_l1_loss(model(state).gather(1, action[:, None])[:, 0], aim)

    def follow(loop: Loop, step: int) -> None:
        if step % 25 == 0:
            target.load_state_dict(model.state_dict())

    return supervised(model, batch, loss, lr=2e-3, steps=240, after=[follow])


def moved(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """Where an action of two leads on a line, and what it brings there."""
    after = (state + 0.5 * (2 * action[:, None] - 1) * torch.tensor([1.0, 0.0, 0.0, 0.0])).clamp(-2, 2)
    return after, (after[:, 0] > 1).float()


ATOMS = torch.linspace(0, 10, 21)


def atoms() -> Loop:
    """Q-learning of a whole distribution, by the cross-entropy to the target network's; copied every 25 steps."""
    model = nn.Sequential(mlp(4, 48, 48, 42), nn.Unflatten(1, (2, 21)))
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=2e-3)

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


def quantiles_of_returns() -> Loop:
    """Quantiles of what comes; what surprised most is seen more often, and weighs less."""
    model = nn.Sequential(mlp(4, 48, 48, 22), nn.Unflatten(1, (2, 11)))
    target, optimizer = copy.deepcopy(model), torch.optim.Adam(model.parameters(), lr=2e-3)
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
    acting, judging, heating = (
        torch.optim.Adam(model["actor"].parameters(), lr=1e-3),
        torch.optim.Adam(model["critics"].parameters(), lr=2e-3),
        torch.optim.Adam([heat], lr=1e-2),
    )
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


class Dueling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp(5, 48, 48, act=nn.Tanh)
        self.value, self.better = nn.Linear(48, 1), nn.Linear(48, 3)

    def forward(self, state: Tensor) -> Tensor:
        h = self.trunk(state).tanh()
        better = self.better(h)
        return self.value(h) + better - better.mean(dim=1, keepdim=True)


def dueling() -> Loop:
    """Double Q-learning, value and advantages apart; the target follows softly."""
    model = Dueling()
    target, push = copy.deepcopy(model), torch.randn(3, 5) / 2

    def batch(_: int) -> Batch:
        state, action = torch.randn(32, 5), torch.randint(0, 3, (32,))
        after = 0.6 * state + push[action]
        return state, action, after, 1.0 - after[:, 0].abs()

    def loss(model: nn.Module, state: Tensor, action: Tensor, after: Tensor, reward: Tensor) -> Tensor:
        with torch.no_grad():
            aim = reward + 0.8 * target(after).gather(1, model(after).argmax(dim=1, keepdim=True))[:, 0]
        return (model(state).gather(1, action[:, None])[:, 0] - aim).square().mean()

    loop = supervised(model, batch, loss, lr=2e-3, clip=10.0, steps=250)
    loop.after.append(lambda loop, step: follow(target, loop.model, 0.02))
    return loop


def walk_on_a_line() -> Loop:
    """A walk on a line: state, action, reward, next state, its end; the targets' network follows every 20 steps."""
    model = mlp(2, 32, 32, 3)
    held = copy.deepcopy(model)
    model.held = [held]  # in a list: not a submodule

    def batch(_: int) -> Batch:
        state, action = 2 * torch.rand(48, 2) - 1, torch.randint(0, 3, (48,))
        speed = 0.9 * state[:, 1] + 0.3 * (action - 1)
        after = torch.stack([state[:, 0] + 0.3 * speed, speed], 1)
        return state, action, 1 - after[:, 0].abs(), after, (after[:, 0].abs() > 1).float()

    def loss(model: nn.Module, state: Tensor, action: Tensor, reward: Tensor, after: Tensor, ended: Tensor) -> Tensor:
        with torch.no_grad():
            aim = reward + 0.9 * (1 - ended) * held(after).max(1).values
        return functional.mse_loss(model(state)[torch.arange(len(action)), action], aim)

    loop = supervised(model, batch, loss, optimizer=torch.optim.RMSprop, lr=1e-3, steps=200)
    loop.after.append(
        lambda loop, step: held.load_state_dict(loop.model.state_dict()) and None if step % 20 == 0 else None
    )
    return loop


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


def grid_learning() -> Loop:
    model = mlp(10, 48, 48, 4)
    grid = Grid(model)
    model.grid = grid
    return supervised(model, grid.batch, grid.loss, lr=2e-3, clip=10.0, steps=400, after=[grid.follow])


class SoftActorCritic(nn.Module):
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
    model = SoftActorCritic()
    optimizers = [
        torch.optim.Adam(part, lr=2e-3)
        for part in (model.critics.parameters(), model.actor.parameters(), [model.log_heat])
    ]

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
    targets = follower(loop, model.critics, 1 - 0.98)
    return loop
