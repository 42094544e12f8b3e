"""Metrics never read a value from the device, because on a GPU the host would wait."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from metric_probes import SelfAttention, mean_square, watch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from wandb_gradwatch._capture.probes import WatchedTensor
from wandb_gradwatch._measure.measure import measure, measure_received
from wandb_gradwatch.metrics import (
    Activations,
    Attention,
    Metric,
    NoiseScale,
    OptimizerState,
    Ranks,
    Reference,
    Router,
    Spectrum,
    Updates,
)
from wandb_gradwatch.metrics._forward_hooks import ModuleIndex
from wandb_gradwatch.metrics._rows import HISTOGRAM, STATISTICS


class Questions(TorchDispatchMode):
    """Records the operations that make the host wait: reading a number, or a shape that depends on data."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operations += 1
        name = func.overloadpacket.__name__
        if name in self.WAITS:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.multi = (
            SelfAttention(torch.ones(5, 5, dtype=torch.bool)),
            nn.MultiheadAttention(8, 2, batch_first=True),
        )
        self.gate = nn.Identity()

    def forward(self, x):
        x = self.gate(self.own(x))
        return self.multi(x, x, x, attn_mask=torch.zeros(5, 5), need_weights=False)[0]


def questions(metrics_of, monkeypatch):
    """Return the operations that make the host wait during the steps of a watched training, without its flushes."""
    # Use the backend for any device: the CPU's own backend may read numbers, which costs nothing there.
    monkeypatch.setattr("wandb_gradwatch.metrics._rows.measure", partial(measure, backend="torch"))
    for user in ("_outputs", "_parameters"):
        sum_sq = f"wandb_gradwatch.metrics.{user}.sum_sq"
        monkeypatch.setattr(sum_sq, lambda tensors: measure_received(tensors, backend="torch")[:, 0])
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.1, fused=True
    )  # the other implementations read the number of the step
    watcher, _ = watch(model, metrics_of(model), log_every=1000, backend="torch", rules=[])
    asked = Questions()
    with asked:
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                mean_square(model(torch.randn(2, 5, 8))).backward()
            optimizer.step()
    assert not watcher._removed, "it failed, and asked nothing"
    watcher.remove()
    return asked


def everything(model):
    return [
        Activations(statistics=[*STATISTICS, HISTOGRAM], of=("input", "output", "grad")),
        Attention(),
        Updates(),
        OptimizerState(),
        NoiseScale(),
        Spectrum(of=("parameter", "gradient", "update")),
        Router("gate", top_k=2),
        Reference(model, activations="own"),
        *(
            Metric(f"{on}_{aggregate}", torch.abs, on=on, aggregate=aggregate, dims={0: "row"})
            for on in ("parameter", "gradient", "activation", "update")
            for aggregate in ("mean", "min", "max")
        ),
        Metric("middle", torch.abs, on="activation", aggregate=torch.median),
    ]


def test_no_probe_makes_the_host_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with_all, without = questions(everything, monkeypatch), questions(lambda model: [], monkeypatch)
    assert with_all.num_operations > 3 * without.num_operations, "the probes did nothing"
    assert with_all.asked == without.asked == []


@pytest.mark.parametrize("make", [Ranks, NoiseScale])
def test_comparing_ranks_does_not_make_the_host_wait(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in ("_ranks", "_module_probe"):
        monkeypatch.setattr(f"wandb_gradwatch.metrics.{user}.world_size", lambda: 2)
    model, probe, asked, found = nn.Linear(2, 2), make(), Questions(), {}
    probe.bind(ModuleIndex([("", model)]))
    scale = torch.tensor(0.5)
    tensors = [WatchedTensor(n, p.detach(), torch.ones_like(p), scale) for n, p in model.named_parameters()]
    with torch.no_grad(), asked:
        for _ in range(3):
            probe.start(True, False)
            for _ in range(2):
                for tensor in tensors:
                    probe.gradient_arrived(tensor.name, tensor.gradient)
                probe.gradients_ready(tensors)
            probe.before_update(tensors)
            probe.after_update(tensors)
            probe.loss_known(scale)
            found = probe.take()
    assert found
    assert asked.num_operations > 20
    assert asked.asked == []


def test_the_recorder_notices_an_operation_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    asking = [Metric("x", lambda w: w * float(w.sum()))]
    assert "_local_scalar_dense" in questions(lambda model: asking, monkeypatch).asked
