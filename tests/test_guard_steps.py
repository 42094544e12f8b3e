"""Every step is guarded: on the device where the optimizer honours found_inf, and between two samples too."""

from __future__ import annotations

import contextlib

import pytest
import torch
from gradients import watch
from test_guard import OPTIMIZERS, batches, final_state
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from wandb_gradwatch import SkipGuard

FUSED = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adam amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True, fused=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, fused=True),
    "sgd momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, dampening=0.1, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, fused=True),
}
POISONED = {
    0,
    50,
    151,
    222,
}  # a NaN would be odd: explosions, and the NaN of 151; the first one before any state exists


class HostReads(TorchDispatchMode):
    """Counts what makes the host wait for a device: a tensor's value in Python, or a copy to the CPU."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.reads = []
        for name in ("item", "tolist", "cpu", "__bool__", "__float__", "__int__"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(name, getattr(torch.Tensor, name)))

    def _counted(self, name, original):
        def method(tensor, *args):
            self.reads.append(name)
            return original(tensor, *args)

        return method

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal):
            self.reads.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def host_reads(monkeypatch):
    return HostReads(monkeypatch)


def small_training(make, guard, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make(model.parameters())
    watcher, sink = watch(model, guard=guard, **{"log_every": 100, **options})

    def one_step(batch):
        optimizer.zero_grad()
        (model(batch) + batch.sum(dim=1, keepdim=True)).square().mean().backward()
        optimizer.step()

    return watcher, sink, one_step


def reads_of(host_reads, make, guard, *, sample_every=1):
    """What the host reads in 40 steps, of which the fifth is the last that creates anything."""
    watcher, _, one_step = small_training(make, guard, sample_every=sample_every)
    with contextlib.ExitStack() as stack:
        for number, batch in batches({25}):
            if number == 5:
                stack.enter_context(host_reads)
                host_reads.reads.clear()
            if number == 45:
                break
            one_step(batch)
    reads = list(host_reads.reads)
    watcher.remove()
    return reads


@pytest.mark.parametrize("sample_every", [1, 10])
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_a_fused_optimizer_is_guarded_without_a_host_read(host_reads, make, sample_every):
    assert reads_of(host_reads, make, SkipGuard(), sample_every=sample_every) == []


def test_another_optimizer_is_guarded_with_one_read_a_step(host_reads):
    make = OPTIMIZERS["sgd momentum"]
    assert reads_of(host_reads, make, SkipGuard()) == ["tolist"] * 40


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("loop", [{}, {"accumulate": 4}, {"closure": True}, {"scaled": True}], ids=str)
def test_poison_leaves_no_trace_with_a_fused_optimizer(make, loop):
    clean = final_state(make, set(range(300)) - {151, 50, 222}, **loop)
    guarded = final_state(make, range(300), poisoned={50, 151, 222}, guard="skip", **loop)
    torch.testing.assert_close(guarded, clean, rtol=0, atol=0)


@pytest.mark.parametrize("make", [OPTIMIZERS["adam"], OPTIMIZERS["sgd momentum"], *FUSED.values()])
@pytest.mark.parametrize("loop", [{}, {"accumulate": 4}, {"closure": True}, {"scaled": True}], ids=str)
def test_poison_between_two_samples_leaves_no_trace(make, loop):
    poisoned = {55, 151, 222}  # steps 56, 152 and 223: none of them is sampled
    guarded = final_state(make, range(300), poisoned=poisoned, guard="skip", sample_every=10, **loop)
    clean = final_state(make, set(range(300)) - poisoned, **loop)
    torch.testing.assert_close(guarded, clean, rtol=0, atol=0)
