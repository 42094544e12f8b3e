"""Healthy trainings in pairs, written while nobody looked at a rule: the first of each is opened, the second locked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import data
from .fifth_models import (
    Chain,
    Conditioned,
    Factors,
    Foreseer,
    Frames,
    Gated,
    Highway,
    Planner,
    Policy,
    Pooled,
    Process,
    TwoTasks,
    acting,
    aims,
    amounts_and_kinds,
    bags,
    chained,
    clicked,
    clicks,
    condition_loss,
    conditions,
    doubted,
    imitated,
    moving,
    next_frame,
    noise_and_points,
    plans,
    surface,
    tones,
    transport,
    two_series,
    weight_normed,
)
from .healthy_supervised import AdamW, cosine, huber, momentum
from .loop import Loop, supervised
from .models import classify, mlp, next_token

Adam = torch.optim.Adam


def _whole(model: nn.Module, *batch: Tensor) -> Tensor:
    """The model returns its loss."""
    return model(*batch)


PAIRS: dict[str, Callable[[], Loop]] = {
    "gated feed-forwards, root mean square norms": lambda: supervised(Gated(), data.sentences(), next_token, optimizer=AdamW, lr=3e-3, schedule=cosine(150, 15), clip=1.0, steps=150),
    "returns, states and actions in a row": lambda: supervised(Planner(), plans(), imitated, optimizer=AdamW, lr=2e-3, schedule=lambda step: min(1.0, step / 20), clip=1.0, steps=150),
    "labels in a chain": lambda: supervised(Chain(), chained(), _whole, lr=5e-3, steps=150),
    "the future of a signal, among others": lambda: supervised(Foreseer(), tones(), _whole, lr=2e-3, clip=5.0, steps=150),
    "a process through a deep kernel": lambda: supervised(Process(), surface(), _whole, lr=1e-2, steps=120),
    "clouds matched by transport": lambda: supervised(mlp(4, 32, 32, 2), noise_and_points(), transport, lr=2e-3, steps=150),
    "the next frame": lambda: supervised(Frames(), moving(), next_frame, lr=5e-3, steps=120),
    "ten highway layers": lambda: supervised(nn.Sequential(nn.Linear(12, 24), *(Highway(24) for _ in range(10)), nn.Linear(24, 4)), data.blobs(noise=1.5), classify, optimizer=momentum, lr=0.02, steps=150),
    "clicks, factors of pairs": lambda: supervised(Factors(), clicks(), clicked, optimizer=torch.optim.Adagrad, lr=0.1, steps=200),
    "bags of which one piece counts, float16": lambda: supervised(Pooled(), bags(), clicked, lr=3e-3, scaler=torch.amp.GradScaler("cpu"), autocast=torch.float16, steps=200),
    "images under a condition, float16": lambda: supervised(Conditioned(), conditions(), condition_loss, optimizer=momentum, lr=0.05, schedule=cosine(180, 10), scaler=torch.amp.GradScaler("cpu"), autocast=torch.float16, steps=150),
    "weight-normalised convolutions over time": lambda: supervised(weight_normed(), two_series(), huber, optimizer=AdamW, lr=3e-3, accumulate=2, steps=150),
    "two tasks, weighed by their doubt": lambda: supervised(TwoTasks(), amounts_and_kinds(), doubted, lr=3e-3, steps=200),
    "a policy of means and deviations": lambda: supervised(Policy(), aims(), acting, lr=3e-3, clip=1.0, steps=250),
}  # fmt: skip


def fifth(which: int) -> dict[str, Callable[[], Loop]]:
    """0: those that are opened, 1: the locked ones."""
    return dict(list(PAIRS.items())[which::2])
