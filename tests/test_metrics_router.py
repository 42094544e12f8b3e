"""Router: loads, dead experts and entropies, against numbers counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from metric_probes import train, values, watch
from torch import nn

from wandb_gradwatch.metrics import Router
from wandb_gradwatch.metrics._transformer_layers import POOLED


class Mixture(nn.Module):
    """Routers that return given logits; the loss depends on another parameter."""

    def __init__(self, num_layers: int = 1) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Identity() for _ in range(num_layers))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, logits: list[Any]) -> Any:
        for gate, of_layer in zip(self.gates, logits, strict=True):
            gate(of_layer)
        return self.weight.sum()


def routed(steps: Any, *, num_layers: int = 1, **options: Any) -> Any:
    """Train with steps that are lists of micro-batches; each micro-batch is a list of the layers' logits [T, E]."""
    model = Mixture(num_layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watcher, sink = watch(model, [Router("gates", **options)])
    for micros in steps:
        optimizer.zero_grad()
        for logits in micros:
            model([torch.as_tensor(of, dtype=torch.float32) for of in logits]).backward()
        optimizer.step()
    return values(watcher, sink), sink


def test_the_numbers_of_a_layer_are_those_of_a_count_by_hand_over_micro_batches() -> None:
    rng = np.random.default_rng(0)
    micros = [rng.standard_normal((5, 7, 4)) * 2, rng.standard_normal((3, 7, 4)) * 2]  # [batch, position, E]
    found, _ = routed([[[micro] for micro in micros]], top_k=2)
    logits = np.concatenate([micro.reshape(-1, 4) for micro in micros])
    counts = np.bincount(np.argsort(-logits, axis=1)[:, :2].ravel(), minlength=4)
    share = counts / counts.sum()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = {
        "load_max_ratio": 4 * share.max(),
        "load_min_ratio": 4 * share.min(),
        "dead_experts": 0,
        "entropy_ratio": -(p * np.log(p)).sum(1).mean() / np.log(4),
        "load_entropy_ratio": -(share * np.log(share)).sum() / np.log(4),
        **{f"expert_{expert}/load_ratio": 4 * share[expert] for expert in range(4)},
    }
    assert {key.removeprefix("router/gates.0/"): of[0] for key, of in found.items()} == pytest.approx(expected)


def test_routers_are_chosen_by_class_too() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    watcher, sink = watch(model, [Router(nn.Linear)])
    train(model, [torch.randn(5, 3)])
    assert {key.split("/")[1] for key in values(watcher, sink)} == {"0"}


def test_layers_with_equal_numbers_of_experts_are_pooled() -> None:
    to_0, to_1 = [[9.0, 0.0, 0.0]] * 6, [[0.0, 9.0, 0.0]] * 3
    found, _ = routed([[[to_0, to_1]]], num_layers=2)
    assert [found[f"router/{POOLED}/expert_{expert}/load_ratio"][0] for expert in range(3)] == [
        2,
        1,
        0,
    ]  # 6 and 3 of 9 tokens
    assert found[f"router/{POOLED}/dead_experts"][0] == 1
    assert found["router/gates.0/dead_experts"][0] == found["router/gates.1/dead_experts"][0] == 2


def test_each_of_several_routers_pools_its_own_layers() -> None:
    model = Mixture(4)
    watcher, sink = watch(model, [Router(r"gates\.[01]"), Router(r"gates\.[23]", top_k=2)])
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    model([logits] * 4).backward()
    watcher.mark_step()
    found = values(watcher, sink)
    # All tokens go to one of three experts: 3 times its equal share; to two of three: 1.5 times.
    assert found[f"router/{POOLED}/load_max_ratio"][0] == 3
    assert found[f"router/{POOLED}_2/load_max_ratio"][0] == 1.5


def test_with_too_many_experts_single_experts_are_logged_only_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb_gradwatch.metrics._transformer_layers.MAX_EXPERT_KEYS", 5)
    found, _ = routed([[[[[1.0, 0, 0]], [[1.0, 0, 0]]]]], num_layers=2)
    assert {key.split("/")[1] for key in found if "expert_" in key.split("/")[2]} == {POOLED}


def test_a_dead_expert_raises_an_alert_after_ten_samples_and_a_healthy_router_raises_none() -> None:
    rng = np.random.default_rng(1)
    busy = rng.standard_normal((30, 64, 4))
    assert not routed([[[of]] for of in busy])[1].alerts
    busy[12:, :, 3] = -9
    [alert] = routed([[[of]] for of in busy])[1].alerts
    assert (alert.title, alert.step) == ("Dead experts", 22)
    assert "gates.0 (1 expert)." in alert.text


def test_experts_that_take_turns_at_getting_no_token_are_alive() -> None:
    """Small batches leave some expert without a token in every sample, but never the same one."""
    resting = np.tile(np.eye(4)[:, None, :] * -9.0, (6, 8, 1)) + np.eye(4)[np.arange(8) % 4]
    found, sink = routed([[[of]] for of in resting.tolist()])
    assert found["router/gates.0/dead_experts"].tolist() == [1] * 24
    assert not sink.alerts


def test_the_numbers_over_all_layers_are_not_counted_as_another_router() -> None:
    one_expert = [[[[9.0, 0.0, 0.0]]] * 2]  # both layers send all tokens to the first of three experts
    [alert] = routed([one_expert] * 12, num_layers=2)[1].alerts
    assert "2 of the routers sent no token" in alert.text
    assert [layer.name for layer in alert.incident.layers] == ["gates.0 (2 experts)", "gates.1 (2 experts)"]


def test_a_module_that_returns_no_logits_is_named(caplog: pytest.LogCaptureFixture) -> None:
    found, _ = routed([[[[[1.0]]]]])
    assert found == {}
    assert "is not logits [..., experts]" in caplog.text
