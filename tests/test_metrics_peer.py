"""Compared with torch-module-monitor in the same run: equal statistics, and cases that that package gets wrong."""

from __future__ import annotations

import copy
import gc
import math
import pickle

import numpy as np
import pytest
import torch
from gradients import Chosen
from metric_probes import mean_square, train, values, watch
from torch import nn
from torch.nn import functional

import wandb_gradwatch
from wandb_gradwatch import ConsoleSink
from wandb_gradwatch.metrics import Activations, Attention, Metric, MonitorMixin, Reference, Updates, coordinate_check

peer = pytest.importorskip("torch_module_monitor")
peer_attention = pytest.importorskip("torch_module_monitor.attention").monitor_scaled_dot_product_attention
PeerCheck = pytest.importorskip("torch_module_monitor.refined_coordinate_check").RefinedCoordinateCheck

SGD = torch.optim.SGD
DIM, HEADS = 16, 2


class SelfAttention(MonitorMixin, nn.Module):
    """Logs its attention to both monitors."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout, self.peer = nn.Linear(DIM, 3 * DIM), dropout, None

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        self.log_attention(q, k, v, is_causal=True)
        if self.peer is not None:
            peer_attention(self.peer, "attention", q, k, v, is_causal=True, dropout_p=self.dropout)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, DIM), nn.LayerNorm(DIM)
        self.attention, self.head = SelfAttention(), nn.Linear(DIM, 11)

    def forward(self, tokens):
        x = self.tokens(tokens)
        return self.head(x + self.attention(self.norm(x)))


FUNCTIONS = {
    "l2norm": lambda t: torch.linalg.vector_norm(t, dim=-1),
    "mean": torch.mean,
    "largest": lambda t: t.abs().max(),
}
SCALARS = {"norm": lambda t: torch.linalg.vector_norm(t), "mean": torch.mean, "largest": lambda t: t.abs().max()}


def peer_monitor(model, every=1):
    monitor = peer.ModuleMonitor(monitor_step_fn=lambda step: step % every == 0)
    monitor.set_module(model)
    return monitor


def difference(tensor, reference):
    return torch.linalg.vector_norm(tensor - reference)


def test_the_same_numbers_on_a_small_transformer_in_one_run():
    torch.manual_seed(0)
    model = Transformer()
    frozen = copy.deepcopy(model)
    metrics = [
        Activations(statistics=["norm"]),
        Attention(statistics=["norm", "mean"]),
        Reference(model, activations="."),
        *(Metric(f"peer_{n}", fn, on="activation") for n, fn in FUNCTIONS.items()),
        *(Metric(f"peer_{n}", fn, on=on) for on in ("parameter", "gradient") for n, fn in SCALARS.items()),
    ]
    watcher, sink = watch(model, metrics)
    monitor = peer_monitor(model)
    model.attention.peer = monitor
    monitor.set_reference_module(frozen)
    for name, fn in FUNCTIONS.items():
        monitor.add_activation_metric(name, fn)
    monitor.add_activation_metric("whole", SCALARS["norm"])
    for name, fn in SCALARS.items():
        monitor.add_parameter_metric(name, fn)
        monitor.add_gradient_metric(name, fn)
    monitor.add_parameter_difference_metric("difference", difference)
    monitor.add_activation_difference_metric("difference", difference)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 11, (4, 6, 7))
    for step, batch in enumerate(tokens, start=1):
        monitor.begin_step(step)
        with torch.no_grad():
            frozen(batch)
        optimizer.zero_grad()
        functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten()).backward()
        monitor.monitor_gradients()
        monitor.monitor_parameters()
        monitor.end_step()
        optimizer.step()
    ours, theirs = values(watcher, sink), monitor.get_all_metrics()
    compared = set()
    for step, peer_values in theirs.items():
        for key, value in peer_values.items():
            own = translated(key)
            np.testing.assert_allclose(ours[own][step - 1], value, rtol=2e-5, atol=1e-6, err_msg=key)
            compared.add(key.split("/")[0])
    assert compared == {
        "activation", "parameter", "gradient", "attention_entropy", "parameter_difference", "activation_difference",
    }  # fmt: skip


def translated(key: str) -> str:
    """Convert a key of torch-module-monitor to ours."""
    family, name, *rest = key.split("/")
    metric, name = rest[-1] if rest else "", name.replace("[root module]", "root")
    if family == "attention_entropy":  # attention_entropy/attention.head_0
        return f"attention/{name.replace('.', '/')}/entropy"
    if family.endswith("_difference"):
        return f"{family.removesuffix('_difference')}/{name}/difference"
    if ".head_" in name:  # activation/attention.head_0.query/norm, whose l2norm is per position
        module, head, tensor = name.split(".")
        if metric == "whole":
            return f"attention/{module}/{head}/{tensor}_norm"
        return f"activation/{module}.{tensor}/{head}/peer_{metric}"
    return f"{family}/{name}/norm" if metric == "whole" else f"{family}/{name}/peer_{metric}"


def linear_stack(width):
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))


def test_the_same_refined_coordinate_check():
    def sgd(model, width):
        return SGD(model.parameters(), lr=0.1)

    torch.manual_seed(3)
    batches = [torch.randn(9, 5) for _ in range(3)]
    ours = coordinate_check(
        linear_stack, sgd, widths=[8, 32], batches=batches, loss=lambda model, x: mean_square(model(x))
    )
    for index, width in enumerate((8, 32)):
        torch.manual_seed(0)
        model = linear_stack(width)
        frozen = copy.deepcopy(model)
        train(model, batches, optimizer=sgd(model, width))
        monitor = peer_monitor(model)
        monitor.set_reference_module(frozen)
        check = PeerCheck(monitor)
        monitor.begin_step(3)
        with torch.no_grad():
            frozen(batches[-1])
            model(batches[-1])
        check.refined_coordinate_check()
        logged = monitor.storage.log_dict[3]  # the norm of each position, before averaging
        for place, layer in enumerate(ours.layers):
            features = model[int(layer)].out_features
            for quantity, words in (("weight_change", "(W_t-W_0)x_t"), ("input_change", "W_0(x_t-x_0)")):
                norms = torch.cat(logged[f"RCC {words}/{layer}.weight/l2norm"]).double()
                size = (norms.square().mean() / features).sqrt().item()
                assert getattr(ours, quantity)[index, -1, place] == pytest.approx(size, rel=2e-4, abs=1e-7)


def test_a_pattern_without_a_match_breaks_its_training_and_is_rejected_by_our_watch():
    model = nn.Linear(2, 2)
    monitor = peer_monitor(model)
    monitor.add_gradient_metric("x", torch.mean, "nope")
    monitor.begin_step(0)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(UnboundLocalError, match="result"):
        monitor.monitor_gradients()
    with pytest.raises(ValueError, match="match='nope' matches no parameter"):
        watch(nn.Linear(2, 2), [Metric("x", torch.mean, on="gradient", match="nope")])


def test_its_model_cannot_be_pickled_and_ours_can():
    model = nn.Linear(2, 2)
    peer_monitor(model)
    with pytest.raises((AttributeError, pickle.PicklingError), match="hook"):
        pickle.dumps(model)
    model = nn.Linear(2, 2)
    watcher, _ = watch(model, [Activations()])
    assert pickle.loads(pickle.dumps(model))(torch.ones(1, 2)).shape == (1, 2)
    watcher.remove()


def test_its_memory_grows_with_the_steps_and_ours_does_not():
    model = nn.Linear(2, 2)
    monitor = peer_monitor(model)
    monitor.add_activation_metric("x", torch.mean)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(20):
        monitor.begin_step(step)
        train(model, [torch.ones(1, 2)], optimizer=optimizer)
        monitor.end_step()
    assert len(monitor.get_all_metrics()) == 20

    model = nn.Linear(2, 2)
    metrics = [
        Activations(),
        Attention(),
        Updates(),
        Reference(model, activations="root"),
        *(Metric("x", torch.mean, on=on, aggregate=torch.mean) for on in ("activation", "parameter", "gradient")),
    ]
    watcher = wandb_gradwatch.watch(
        model, metrics=metrics, sinks=[ConsoleSink()], rules=[], sample_every=1, log_every=5
    )
    optimizer = SGD(model.parameters(), lr=0.1)
    alive = []
    for steps in (320, 80, 80):  # the flight recorder keeps the last 256; rows for 16 samples are allocated at once
        train(model, [torch.ones(1, 2)] * steps, optimizer=optimizer)
        gc.collect()
        alive.append(sum(type(thing) in (torch.Tensor, nn.Parameter) for thing in gc.get_objects()))
    watcher.remove()
    assert alive[0] == alive[1] == alive[2], "a window is handed over and forgotten"


def test_its_entropy_is_that_of_dropped_out_weights_and_ours_that_of_the_softmax():
    torch.manual_seed(0)
    model = nn.Sequential(SelfAttention(dropout=0.5))
    with torch.no_grad():
        model[0].qkv.weight[: 2 * DIM].zero_()  # equal logits: uniform weights over all positions up to the query's
        model[0].qkv.bias[: 2 * DIM].zero_()
    monitor = peer_monitor(model)
    model[0].peer = monitor
    watcher, sink = watch(model, [Attention()])
    monitor.begin_step(1)
    train(model, [torch.randn(64, 8, DIM)])
    monitor.end_step()
    expected = sum(math.log(n) for n in range(1, 9)) / 8
    assert values(watcher, sink)["attention/0/head_0/entropy"][0] == pytest.approx(expected, rel=1e-5)
    theirs = monitor.get_step_metrics()["attention_entropy/attention.head_0"]
    assert abs(theirs - expected) > 0.2


def test_its_gradients_carry_the_loss_scale_and_ours_do_not():
    model = Chosen(a=2)
    monitor = peer_monitor(model)
    monitor.add_gradient_metric("norm", torch.linalg.vector_norm)
    watcher, sink = watch(model, [Metric("norm", torch.linalg.vector_norm, on="gradient")])
    monitor.begin_step(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model.loss(a=[3, 4])).backward()
    monitor.monitor_gradients()
    monitor.end_step()
    scaler.step(SGD(model.parameters(), lr=0.0))
    assert values(watcher, sink)["gradient/a/norm"].tolist() == [5]
    assert monitor.get_step_metrics()["gradient/a/norm"] == 40


def test_its_squares_overflow_in_half_precision_and_ours_do_not():
    model = Chosen(dtype=torch.float16, a=300)
    monitor = peer_monitor(model)
    monitor.add_gradient_metric("sum_sq", lambda g: g.square().sum())
    watcher, sink = watch(model, [Metric("sum_sq", lambda g: g.square().sum(), on="gradient")])
    monitor.begin_step(1)
    model.loss(a=[100] * 300).backward()
    monitor.monitor_gradients()
    monitor.end_step()
    SGD(model.parameters(), lr=0.0).step()
    assert values(watcher, sink)["gradient/a/sum_sq"].tolist() == [3e6]  # beyond float16's largest number, 65504
    assert monitor.get_step_metrics()["gradient/a/sum_sq"] == math.inf
