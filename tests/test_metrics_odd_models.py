"""Metrics of unusual models: odd outputs, replaced modules, forwards that raise, compiled blocks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from metric_probes import SelfAttention, seen, train, values, watch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wandb_gradwatch.metrics import (
    Activations,
    Attention,
    Metric,
    MonitorMixin,
    NoiseScale,
    OptimizerState,
    Ranks,
    Reference,
    Router,
    Updates,
)

SGD = torch.optim.SGD
COUNT = Metric("count", torch.ones_like, on="activation", aggregate="sum")


def everything(model):
    return [
        Activations(),
        Attention(),
        Updates(),
        Reference(model, activations="."),
        *(Metric("own", lambda t: t.abs().max(), on=on) for on in ("activation", "parameter", "gradient", "update")),
    ]


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    cache: Any = None


class Makes(nn.Module):
    """Returns an unusual output from one module during an ordinary training."""

    def __init__(self, make) -> None:
        super().__init__()
        self.odd, self.gain = Odd(make), nn.Parameter(torch.ones(2))

    def forward(self, x):
        self.odd(x)
        return x * self.gain


class Odd(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


class Ragged(nn.Module):
    """An output of an unknown class, which raises if an attribute is read."""

    def __iter__(self):
        raise AssertionError("looked into")


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda x: None, []),
        (lambda x: "text", []),
        (lambda x: Ragged(), []),
        (lambda x: (part for part in [x]), []),
        (lambda x: x > 0, []),
        (lambda x: torch.arange(3), []),
        (lambda x: x[:0], []),
        (lambda x: x.bfloat16(), ["odd"]),
        (lambda x: x.half(), ["odd"]),
        (lambda x: x.double(), ["odd"]),
        (lambda x: x.sum(), ["odd"]),
        (lambda x: x.expand(3, 2), ["odd"]),
        (lambda x: torch.complex(x, x), ["odd"]),
        (lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged), ["odd"]),
        (lambda x: Output(x), ["odd.output_logits"]),
        (lambda x: {"a": (x, [2 * x, {"b": None}]), 3: x}, ["odd.output_3", "odd.output_a_0", "odd.output_a_1_0"]),
        (lambda x: (None, (), {}, x), ["odd.output_3"]),
    ],
)
def test_an_unusual_output_causes_no_error_and_its_tensors_are_measured(make, names, said):
    model = Makes(make)
    found = seen(model, everything(model), [torch.tensor([3.0, 4.0])] * 2, optimizer=SGD([model.gain], lr=0.0))
    odd = {key.split("/")[1] for key in found if key.startswith("activation/odd")}
    assert sorted(odd) == names
    assert all(np.isfinite(found[f"activation/{name}/norm"]).all() for name in names)
    assert all(f"activation/{name}/own" in found for name in names)
    assert found["update/gain/norm"].tolist() == [0, 0]
    assert said() == []


def test_a_module_that_is_called_twice_counts_twice_under_its_first_name():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.alias = self.first

        def forward(self, x):
            return self.alias(self.first(x))

    model = Twice()
    found = seen(model, [COUNT, Activations(statistics=["norm", "num_nonfinite"])], [torch.ones(3, 2)])
    assert found["activation/first/count"].tolist() == [12]  # 3 x 2 elements, twice
    assert not any("alias" in key for key in found)


class Fails(nn.Module):
    """Raises in its second forward, after the forward of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(2, 2), 0

    def forward(self, x):
        y = self.inner(x)
        self.calls += 1
        if self.calls == 2:
            raise torch.OutOfMemoryError("the batch is too large")
        return y


@pytest.mark.parametrize("retry", [True, False])
def test_a_forward_that_raises_adds_nothing(retry):
    model = Fails()
    metrics = [COUNT, Activations(), Reference(model, activations="inner")]
    # A user's aggregate keeps all values, so the values of the failed forward must be dropped too.
    metrics.append(Metric("number", torch.ones_like, on="activation", aggregate=lambda values: values.sum()))
    watcher, sink = watch(model, metrics)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):  # micro-batches; the first attempt at the second one fails
            try:
                model(torch.ones(1, 2)).sum().backward()
            except torch.OutOfMemoryError:
                if retry:
                    model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    found = values(watcher, sink)
    expected = [4, 4] if retry else [2, 4]
    assert found["activation/inner/count"].tolist() == expected
    assert found["activation/inner/number"].tolist() == expected
    assert sink.snapshots[0].metric_histograms["activation/inner/histogram"].counts.sum() == expected[0]


def test_a_model_that_calls_itself_is_one_forward():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.leaf = nn.Linear(2, 2)

        def forward(self, x):
            if len(x) == 1:
                return self.leaf(x)
            return torch.cat([self(x[:1]), self(x[1:])])

    model = Tree()
    watcher, sink = watch(model, [COUNT])
    train(model, [torch.ones(4, 2)] * 2)
    assert values(watcher, sink)["activation/leaf/count"].tolist() == [8, 8]  # four leaves of two elements


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_whole_model_that_is_checkpointed_counts_once(use_reentrant):
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    watcher, sink = watch(model, [COUNT])
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        x = torch.ones(3, 2, requires_grad=True)
        checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
        optimizer.step()
    assert values(watcher, sink)["activation/0/count"].tolist() == [6, 6]


def test_a_module_that_moves_gets_its_new_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watcher, sink = watch(model, [COUNT])
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, [torch.ones(1, 2)], optimizer=optimizer)
    del model[0]  # the second module is now called 0
    train(model, [torch.ones(1, 2)] * 2, optimizer=optimizer)
    found = values(watcher, sink)
    # A sample that has begun keeps its names.
    assert [not math.isnan(value) for value in found["activation/1/count"]] == [True, True, False]
    assert [not math.isnan(value) for value in found["activation/0/count"]] == [True, False, True]


def test_a_module_that_is_removed_keeps_no_hook():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    watcher, _ = watch(model, [Activations()])
    taken = model[0]
    model[0] = nn.Tanh()
    train(model, [torch.ones(1, 2)])
    assert not taken._forward_hooks
    watcher.remove()


def test_outputs_of_compiled_blocks_are_measured_without_a_graph_break():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)), nn.Linear(4, 1))
    for block in model[:2]:
        block.compile(backend=backend, fullgraph=True)
    found = seen(model, [Activations(), COUNT], [torch.ones(3, 4)] * 3)
    assert {"2", "root"} <= {key.split("/")[1] for key in found}
    assert found["activation/2/count"].tolist() == [3, 3, 3]
    assert len(graphs) <= 2, "a graph break or a recompilation"


def test_an_evaluation_between_micro_batches_is_not_counted():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    watcher, sink = watch(model, [COUNT])
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            model.eval()
            model(torch.ones(50, 2))  # without torch.no_grad(), as some evaluations run
            model.train()
        optimizer.step()
    assert values(watcher, sink)["activation/0/count"].tolist() == [4, 4]


class Hands(MonitorMixin, nn.Module):
    """Logs a boolean tensor, an empty tensor and an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        self.log_tensor("mask", x > 0)
        self.log_tensor("nothing", x[:0])
        self.log_tensor("good", x)
        return self.linear(x)


def test_logged_tensors_are_filtered_as_outputs_are(said):
    model = Hands()
    found = seen(model, [Activations(), Metric("own", lambda t: t.max(), on="activation")], [torch.tensor([3.0, 4.0])])
    assert {key.split("/")[1] for key in found} == {"root", "root.good", "linear"}
    assert found["activation/root.good/norm"].tolist() == [5]
    assert said() == []


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no vmap of this attention
@pytest.mark.parametrize(
    ("module", "metric", "odd"),
    [
        (SelfAttention(), Attention(), lambda attention: attention(torch.ones(0, 5, 8))),
        (SelfAttention(), Attention(), lambda attention: attention(torch.ones(2, 0, 8))),
        (SelfAttention(), Attention(), lambda attention: torch.vmap(attention)(torch.ones(2, 1, 5, 8))),
        (nn.MultiheadAttention(8, 2), Attention(), lambda attention: attention(*[torch.ones(5, 0, 8)] * 3)[0]),
        (nn.Linear(8, 4), Router("root"), lambda router: router(torch.ones(0, 8))),
        (nn.Linear(8, 4), Router("root"), lambda router: torch.vmap(router)(torch.ones(2, 5, 8))),
    ],
)
def test_a_call_without_elements_or_under_vmap_adds_nothing_and_drops_no_probe(module, metric, odd, said):
    watcher, sink = watch(module, [metric])
    usual = [torch.ones(2, 5, 8)] * (3 if isinstance(module, nn.MultiheadAttention) else 1)
    for before in (lambda _: torch.zeros(()), odd):
        output = module(*usual)
        ((output[0] if isinstance(output, tuple) else output).sum() + before(module).sum()).backward()
        SGD(module.parameters(), lr=0.0).step()
        module.zero_grad()
    found = values(watcher, sink)
    assert found
    assert all(value[0] == value[1] for value in found.values()), "the odd call changed a number"
    assert said() == []


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (lambda m: [Activations(), Metric("norm", torch.sum, on="activation")], "activation/<name>/norm"),
        (lambda m: [Metric("ratio", torch.sum, on="update"), Updates()], "update/<name>/ratio"),
        (lambda m: [Reference(m), Metric("difference", torch.sum)], "parameter/<name>/difference"),
        (lambda m: [Reference(m), Reference(m)], "parameter/<name>/difference"),
        # Whatever their match= chooses, both would log under "total", or under the same ranks.
        (lambda _: [NoiseScale("weight"), NoiseScale("bias")], "noise_scale/<name>/noise_scale"),
        (lambda _: [Ranks("weight"), Ranks("bias")], "ranks/<name>/apart"),
        (lambda m: [Reference(m, functions={"own": torch.dot}), Metric("own", torch.sum)], "parameter/<name>/own"),
    ],
)
def test_two_probes_that_would_log_under_one_key_are_rejected(metrics, words):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"{words}.*give one of them another name"):
        watch(model, metrics(model))


def test_two_probes_may_measure_the_same_statistics_of_different_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    watcher, sink = watch(model, [Activations("0"), Activations("1", dead_threshold=0.1), Updates("weight")])
    train(model, [torch.ones(1, 2)])
    assert {"activation/0/norm", "activation/1/norm"} <= set(values(watcher, sink))


def test_a_complex_parameter_has_the_numbers_of_its_real_and_imaginary_parts():
    """Adam treats complex parameters in the same way."""

    def numbers(dtype):
        start = torch.tensor([[1.0, 2], [3, 4]], dtype=torch.float64)
        model = nn.ParameterDict({"w": torch.view_as_complex(start) if dtype.is_complex else start})
        optimizer = torch.optim.Adam(model.parameters())
        watcher, sink = watch(model, [NoiseScale(), OptimizerState()])
        parts = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for step in parts:
            optimizer.zero_grad()
            for part in step:
                real = torch.view_as_real(model["w"]) if dtype.is_complex else model["w"]
                (real * part).sum().backward()
            optimizer.step()
        return {key: series for key, series in values(watcher, sink).items() if "loss" not in key}

    expected, found = numbers(torch.float64), numbers(torch.complex128)
    assert found.keys() == expected.keys()
    assert {"noise_scale/total/cosine", "optimizer_state/w/exp_avg_norm"} <= found.keys()
    for key, series in expected.items():
        np.testing.assert_allclose(found[key], series, err_msg=key)


def test_a_module_that_refuses_hooks_is_left_out_alone_which_is_said_once(said):
    model = nn.Sequential(nn.Linear(2, 3), torch.jit.script(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2))
    found = seen(model, [Activations()], [torch.randn(4, 2) for _ in range(3)])
    assert {key.split("/")[1] for key in found} == {"0", "2", "3", "root"}
    assert all(np.isfinite(found[f"activation/{name}/norm"]).all() for name in ("0", "2", "3", "root"))
    [text] = said()
    assert "Activations() leaves out 1, which refuse hooks" in text


@pytest.mark.parametrize("options", [{"guard": "skip"}, {"on_nonfinite": "trace"}], ids=str)
def test_a_model_that_refuses_hooks_is_watched_but_no_step_is_run_again(options, said):
    model = torch.jit.script(nn.Linear(2, 1))
    watcher, sink = watch(model, [], **options)
    train(model, [torch.ones(1, 2), torch.full((1, 2), math.inf), torch.ones(1, 2)])
    watcher.remove()
    assert len(sink.merged()) == 3
    [text] = [text for text in said() if "refuses hooks" in text]
    assert "a bad step is not run again" in text
