"""Policies that learn from rewards."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional

from ..loop import Batch, Loop, descend, supervised
from . import data
from .dense import mlp
from .losses import own_loss


@data.given(lambda: torch.randn(6, 3))
def turns(w: Tensor, size: int) -> Batch:
    """States, of which the sign of a fixed projection says the right one of three actions."""
    state = torch.randn(size, 6)
    return state, (state @ w).argmax(dim=1)


class ActorCritic(nn.Module):
    """Two branches on one trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.actor = mlp(32, 16, 3, act=nn.Tanh)
        self.critic = mlp(32, 16, 1, act=nn.Tanh)

    def forward(self, state: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        h = self.trunk(state)
        return torch.distributions.Categorical(logits=self.actor(h)), self.critic(h)[:, 0]


def advantage(model: nn.Module, state: Tensor, right: Tensor) -> Tensor:
    """A2C of one step."""
    policy, value = model(state)
    action = policy.sample()
    gain = (action == right).float() + 0.3 * torch.randn(len(state)) - value
    return (-(policy.log_prob(action) * gain.detach()) + 0.5 * gain**2).mean() - 0.01 * policy.entropy().mean()


def reinforce(model: nn.Module, state: Tensor, right: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=model(state))
    action = policy.sample()
    return -(policy.log_prob(action) * ((action == right).float() - 0.4)).mean()


def grouped(model: nn.Module, state: Tensor, right: Tensor) -> Tensor:
    """Rewards of eight answers to each question, standardised within it: no gradient where all are equal."""
    policy = torch.distributions.Categorical(logits=model(state))
    action = policy.sample((8,))
    reward = (action == right).float()
    gain = (reward - reward.mean(dim=0)) / (reward.std(dim=0) + 1e-4)
    return -(policy.log_prob(action) * gain).mean()


def ppo_four_passes(*, tight: bool = False) -> Loop:
    """PPO: four passes over each rollout, the ratio clipped, the norm too."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def update(loop: Loop, step: int) -> Tensor:
        state, right = loop.batch(step)
        with torch.no_grad():
            policy, value = model(state)
            action = policy.sample()
            old, reward = policy.log_prob(action), (action == right).float()
            gain = reward - value
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        for _ in range(4):
            policy, value = model(state)
            ratio = (policy.log_prob(action) - old).exp()
            loss = (
                -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                + 0.5 * (value - reward).square().mean()
            )
            descend(optimizer, loss - 0.01 * policy.entropy().mean(), 0.02 if tight else 0.5)
        return loss.detach()

    return Loop(model, turns(32), own_loss, [optimizer], steps=80, update=update)


def large_returns(model: nn.Module, state: Tensor, right: Tensor, size: Tensor) -> Tensor:
    """A2C whose rewards are in tens."""
    policy, value = model(state)
    action = policy.sample()
    gain = size * (action == right).float() - value
    return (-(policy.log_prob(action) * gain.detach()) + 0.5 * gain**2).mean() - 0.01 * policy.entropy().mean()


def judged(size: int = 16) -> data.Batches:
    """As `turns`, and what a right action is worth."""
    states = turns(size)
    return lambda step: (*states(step), torch.tensor(20.0))


def answered(model: nn.Module, asked: Tensor, right: Tensor) -> Tensor:
    """As `grouped`; the probability is multiplied before it is divided."""
    policy = torch.distributions.Categorical(logits=model(asked))
    answers = policy.sample((8,))
    reward = (answers == right).float()
    return -(policy.log_prob(answers) * (reward - reward.mean(dim=0)) / (reward.std(dim=0) + 1e-4)).mean()


@data.given(lambda: torch.randint(0, 40, (4,)))
def questions(aim: Tensor) -> Batch:
    """Four questions, to each of which one answer of forty is right."""
    asked = torch.randint(0, 4, (1,))
    return functional.one_hot(asked, 4).float(), aim[asked]


def pushed(state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    """A mass on a line, [N, (place, speed, goal)], is pushed left, not, or right; near the goal is good."""
    place, speed, goal = state.unbind(dim=1)
    speed = 0.9 * speed + 0.2 * (action - 1)
    place = (place + 0.3 * speed).clamp(-2, 2)
    return torch.stack([place, speed, goal], dim=1), 1 - (place - goal).abs()


def begun(size: int) -> Tensor:
    return torch.cat([torch.rand(size, 1) * 2 - 1, torch.zeros(size, 1), torch.rand(size, 1) * 2 - 1], dim=1)


def ppo_on_a_line() -> Loop:
    """PPO: each rollout is gone over four times."""
    model = nn.ModuleDict({"policy": mlp(3, 32, 32, 3, act=nn.Tanh), "value": mlp(3, 32, 32, 1, act=nn.Tanh)})
    kept: list[Batch] = []

    @torch.no_grad()
    def batch(step: int) -> Batch:
        if step % 4 == 1:
            state, rows, rewards = begun(16), [], []
            for _ in range(12):
                policy = Categorical(logits=model["policy"](state))
                action = policy.sample()
                rows.append((state, action, policy.log_prob(action)))
                state, reward = pushed(state, action)
                rewards.append(reward)
            gains, later = [], model["value"](state)[:, 0]
            for reward in reversed(rewards):
                later = reward + 0.9 * later
                gains.insert(0, later)
            kept[:] = [tuple(torch.cat(part) for part in (*zip(*rows, strict=True), gains))]
        return kept[0]

    def loss(model: nn.Module, state: Tensor, action: Tensor, before: Tensor, gain: Tensor) -> Tensor:
        policy, value = Categorical(logits=model["policy"](state)), model["value"](state)[:, 0]
        edge = gain - value.detach()
        edge = (edge - edge.mean()) / (edge.std() + 1e-8)
        ratio = (policy.log_prob(action) - before).exp()
        surrogate = torch.minimum(ratio * edge, ratio.clamp(0.8, 1.2) * edge).mean()
        return 0.5 * (value - gain).square().mean() - surrogate - 0.01 * policy.entropy().mean()

    return supervised(model, batch, loss, lr=3e-3, clip=0.5, steps=240)


@data.given(lambda: torch.randn(6, 2))
def imitations(aim: Tensor) -> Batch:
    """States, actions around the right ones, and how good they were."""
    state = torch.randn(64, 6)
    action = state @ aim / 3 + torch.randn(64, 2)
    return state, action, -(action - state @ aim / 3).square().sum(dim=1)


def weighted_by_advantage(model: nn.Module, state: Tensor, action: Tensor, reward: Tensor) -> Tensor:
    body = model["body"](state)
    value = model["critic"](body)[:, 0]
    weight = (reward - value).detach().clamp(max=2).exp()
    said = (action - model["actor"](body)).square().sum(dim=1)
    return (weight * said).mean() + (value - reward).square().mean()


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.value = mlp(5, 32, 32, act=nn.Tanh), nn.Linear(32, 2), nn.Linear(32, 1)
        self.log_std = nn.Parameter(torch.full((2,), -0.5))


def acting(model: nn.Module, state: Tensor, aim: Tensor, heat: float = 0.003) -> Tensor:
    """One action per state, its reward against a baseline, and a little entropy."""
    h = torch.tanh(model.body(state))
    chosen = torch.distributions.Normal(model.mean(h), model.log_std.exp())
    action = chosen.sample()
    reward = -(action - aim).square().sum(dim=1)
    value = model.value(h)[:, 0]
    gain = reward - value.detach()
    return (
        -(gain * chosen.log_prob(action).sum(dim=1)).mean()
        + (value - reward).square().mean() / 2
        - heat * chosen.entropy().mean()
    )


@data.given(lambda: torch.randn(5, 2) / 2)
def aims(way: Tensor, size: int = 96) -> Batch:
    state = torch.randn(size, 5)
    return state, torch.tanh(state @ way)


class Agent(nn.Module):
    """A policy and a value of two numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = mlp(2, 32, 32, 4, act=nn.Tanh), mlp(2, 32, 32, 1, act=nn.Tanh)


class Walks:
    """Proximal policy optimisation: sixteen points walk to the origin; a walk serves eight steps."""

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
            rows.append(
                (self.place, action, log_p.gather(1, action)[:, 0], reward, self.model.value(self.place)[:, 0], ended)
            )
            self.place = torch.where(ended[:, None], 2 * torch.rand(16, 2) - 1, after)
        state, action, log_p, reward, value, ended = (torch.stack(column) for column in zip(*rows, strict=True))
        advantage, last = torch.zeros(16, 16), torch.zeros(16)
        for t in reversed(range(16)):
            alive = 1 - ended[t].float()
            last = advantage[t] = reward[t] + 0.95 * alive * value[t + 1] - value[t] + 0.95 * 0.9 * alive * last
        self.rows = [x[:16].flatten(0, 1) for x in (state, action, log_p)] + [
            advantage.flatten(),
            (advantage + value[:16]).flatten(),
        ]

    def batch(self, _: int) -> Batch:
        chosen = torch.randint(0, 256, (64,))
        return tuple(x[chosen] for x in self.rows)

    def loss(
        self, model: nn.Module, state: Tensor, action: Tensor, old: Tensor, advantage: Tensor, aim: Tensor
    ) -> Tensor:
        log_p = model.policy(state).log_softmax(1)
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (log_p.gather(1, action)[:, 0] - old + self.old_shift).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(log_p.exp() * log_p).sum(1).mean()
        return -self.sign * gain + 0.5 * functional.mse_loss(model.value(state)[:, 0], aim) - 0.01 * entropy


def ppo_of_walks() -> Loop:
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

    return supervised(
        mlp(6, 32, 5), lambda _: (torch.randn(16, 6),), loss, optimizer=torch.optim.SGD, lr=0.02, steps=400
    )
