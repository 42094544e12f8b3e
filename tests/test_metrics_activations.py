"""Activations and log_tensor(): measured once per sampled training step, without side effects on the model."""

from __future__ import annotations

import copy
import functools
import io
import math
import pickle
from collections import namedtuple

import metric_probes
import numpy as np
import pytest
import torch
from gradients import only
from metric_probes import Passes, seen, train, values, watch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wandb_gradwatch import metrics
from wandb_gradwatch.metrics import (
    Activations,
    Attention,
    Metric,
    MonitorMixin,
    NonFiniteActivation,
    Reference,
    Updates,
    log_tensor,
)
from wandb_gradwatch.metrics._rows import STATISTICS

SGD = torch.optim.SGD
COUNT = Metric("count", torch.ones_like, on="activation", aggregate="sum")


def test_every_statistic_of_known_values():
    everything = Activations("inner", statistics=[*STATISTICS], dead_threshold=0.5)
    found = seen(Passes(), [everything], [torch.tensor([3.0, -4.0, 0.0, 0.5, math.nan, math.inf, -math.inf, 0.0])])
    # Finite: 3, -4, 0, 0.5, 0. Sum -0.5, squares 9 + 16 + 0.25 = 25.25.
    expected = {
        "norm": math.sqrt(25.25),
        "rms": math.sqrt(5.05),
        "mean": -0.1,
        "std": math.sqrt(5.05 - 0.01),
        "min": -4,
        "max": 3,
        "abs_max": 4,
        "dead_ratio": 3 / 8,  # two zeros and 0.5
        "zero_ratio": 2 / 8,
        "num_nonfinite": 3,
    }
    for name, value in expected.items():
        assert found[f"activation/inner/{name}"][0] == pytest.approx(value), name


def test_what_has_no_finite_element_has_no_norm_and_no_share_of_zeros():
    model = Passes()
    statistics = ("norm", "dead_ratio", "zero_ratio", "num_nonfinite")
    batches = [torch.tensor([math.nan, math.inf]), torch.tensor([0.0, math.nan])]
    found = seen(model, [Activations("inner", statistics=statistics)], batches, loss=torch.sum)
    # Where one of two elements is finite and 0, the norm is 0 and the share of zeros 1 / 2, as for gradients.
    np.testing.assert_array_equal(found["activation/inner/norm"], [math.nan, 0.0])
    np.testing.assert_array_equal(found["activation/inner/zero_ratio"], [math.nan, 0.5])
    np.testing.assert_array_equal(found["activation/inner/dead_ratio"], [math.nan, 0.5])
    np.testing.assert_array_equal(found["activation/inner/num_nonfinite"], [2, 1])


def test_micro_batches_merge_into_the_row_of_the_whole_batch():
    torch.manual_seed(0)
    model, whole = Passes(), torch.randn(7, 5)
    watcher, sink = watch(model, [Activations("inner", statistics=list(STATISTICS))])
    for part in whole.split(3):
        model(part).sum().backward()
    SGD(model.parameters(), lr=0.1).step()
    merged = values(watcher, sink)
    at_once = seen(Passes(), [Activations("inner", statistics=list(STATISTICS))], [whole])
    for key, value in at_once.items():
        assert merged[key][0] == pytest.approx(value[0], rel=1e-9), key


Pair = namedtuple("Pair", ["first", "second"])


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda x: (x, 2 * x), ["output_0", "output_1"]),
        (lambda x: [x, None, 2 * x], ["output_0", "output_2"]),
        (lambda x: {"logits": x, "ids": torch.ones(2, dtype=torch.long), "more": (2 * x,)},
         ["output_logits", "output_more_0"]),
        (lambda x: Pair(x, 2 * x), ["output_first", "output_second"]),
    ],
)  # fmt: skip
def test_outputs_in_containers(make, names):
    class Makes(nn.Module):
        def forward(self, x):
            return make(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.many, self.last = Makes(), nn.Linear(2, 1)

        def forward(self, x):
            self.many(x)
            return self.last(x)

    found = seen(Model(), [Activations("many")], [torch.tensor([[3.0, 4.0]])])
    assert {key.split("/")[1] for key in found} == {f"many.{name}" for name in names}
    assert [found[f"activation/many.{name}/norm"][0] for name in names] == [5, 10]


def test_evaluations_and_forwards_without_gradients_do_not_count():
    model = Passes()
    watcher, sink = watch(model, [Activations("inner")])
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model.eval()
        model(torch.full((4,), 100.0))
        with torch.no_grad():
            model(torch.full((4,), 100.0))
        model.train()
        with torch.no_grad():
            model(torch.full((4,), 100.0))
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    found = values(watcher, sink)
    assert found["activation/inner/norm"].tolist() == [2, 2]


def test_evaluations_are_merged_into_the_next_sample_on_request():
    model = Passes()
    probes = [Activations("inner", evaluation=True), Activations("inner", statistics=["max"])]
    watcher, sink = watch(model, probes, sample_every=3, log_every=3, histogram_every=3)
    optimizer = SGD(model.parameters(), lr=0.0)
    for step in range(1, 7):
        optimizer.zero_grad()
        model(torch.full((4,), float(step))).sum().backward()
        optimizer.step()
        if step != 4:  # the sample of step 6 merges the evaluations after steps 3 and 5
            model.eval()
            with torch.no_grad():
                model(torch.full((2,), 10.0 * step))
            model(torch.full((2,), 1.0))
            model.train()
    merged = sink.merged()
    watcher.remove()
    found = {key: of.tolist() for key, of in merged.metrics.items() if key.startswith("activation")}
    assert found["activation/inner/max"] == [3, 6]
    assert found["activation/inner.eval/max"] == [20, 50]
    # Squares of the evaluations after steps 1 and 2, and after steps 3 and 5, each with four ones.
    assert found["activation/inner.eval/norm"] == pytest.approx(
        [math.sqrt(2 * 10**2 + 2 * 20**2 + 4), math.sqrt(2 * 30**2 + 2 * 50**2 + 4)]
    )
    assert sink.snapshots[-1].metric_histograms["activation/inner.eval/histogram"].counts.sum() == 8


def test_only_sampled_steps_are_measured():
    model, calls = Passes(), []
    counting = Metric("n", lambda a: calls.append(1) or a.sum(), on="activation", match="inner")
    found = seen(model, [counting, Activations("inner")], torch.arange(1.0, 7.0), sample_every=3)
    assert found["activation/inner/max"].tolist() == [3, 6]
    assert len(calls) == 2


def test_a_closure_that_is_evaluated_often_counts_once():
    model = nn.Linear(2, 1)
    watcher, sink = watch(model, [Metric("sum", torch.ones_like, on="activation", aggregate="sum")])
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(3, 2)) - 1).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert values(watcher, sink)["activation/root/sum"].tolist() == [3, 3]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_counts_once_and_keeps_the_order_of_the_forward(use_reentrant):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(2, 2)
            # The repetition stops at the last tensor that the backward needs: only the first of two layers runs again.
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))

        def forward(self, x):
            x = self.before(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    count = Metric("count", torch.ones_like, on="activation", aggregate="sum")
    found = seen(Model(), [Activations(), count], torch.ones(2, 5, 2))
    blocks = [f"blocks.{block}{layer}" for block in range(2) for layer in (".0", ".1", "")]
    names = ["before", *blocks, "root"]
    for name in names:
        assert found[f"activation/{name}/count"].tolist() == [10, 10], name  # 5 x 2 elements, once
    assert [key.split("/")[1] for key in found if key.endswith("/norm")] == names


@pytest.mark.parametrize("duplicate", ["deepcopy", "pickle", "save"])
def test_a_copied_model_works_and_is_not_monitored(duplicate):
    model = nn.Sequential(nn.Linear(2, 2), nn.MultiheadAttention(2, 1))[:1]
    watcher, sink = watch(model, [Activations(), Attention(), Updates(), Reference(model, activations="."), COUNT])
    if duplicate == "deepcopy":
        copied = copy.deepcopy(model)
    elif duplicate == "pickle":
        copied = pickle.loads(pickle.dumps(model))
        assert b"gradwatch" not in pickle.dumps(model), "a saved model must load without this package"
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    x = torch.ones(1, 2)
    assert torch.equal(copied(x), model(x))
    (copied(x * 100).sum()).backward()
    train(model, [x])
    found = values(watcher, sink)
    # The comparison above ran the model's forward too. The forward of the copy, with 100 * x, is not measured.
    assert found["activation/root/max"][0] < 10
    assert found["activation/root/count"].tolist() == [4]


def test_removing_leaves_no_hook():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    frozen = copy.deepcopy(model)
    modules = [*model.modules(), *frozen.modules()]
    metrics = [Activations(), COUNT, Attention(), Reference(model, frozen, activations=".")]
    watcher, _ = watch(model, metrics)
    train(model, [torch.ones(1, 2)])
    assert all(module._forward_hooks for module in modules)
    assert model._forward_pre_hooks
    watcher.remove()
    left = [name for module in modules for name in vars(module) if "_hooks" in name and getattr(module, name)]
    assert left == []


def test_a_module_that_is_added_later_is_seen():
    model = nn.Sequential(nn.Linear(2, 2))
    watcher, sink = watch(model, [Activations()])
    optimizer = SGD(model.parameters(), lr=0.1)
    train(model, [torch.ones(1, 2)], optimizer=optimizer)
    model.append(nn.Tanh())
    train(model, [torch.ones(1, 2)] * 2, optimizer=optimizer)
    found = values(watcher, sink)["activation/1/norm"]
    assert math.isnan(found[0])
    assert not math.isnan(found[2])


def test_several_models_have_their_prefixes():
    models = {"D": nn.Linear(2, 1), "G": nn.Sequential(nn.Linear(2, 2))}
    watcher, sink = watch(models, [Activations()])
    optimizer = SGD([*models["D"].parameters(), *models["G"].parameters()], lr=0.1)
    models["D"](models["G"](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert {key.split("/")[1] for key in values(watcher, sink)} == {"G.0", "G", "D"}


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_compiled_model_keeps_its_graph_and_a_warning_says_that_its_modules_are_not_measured(compiled_first, said):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    if compiled_first:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        compiled(torch.ones(1, 4))
    watcher, sink = watch(model, [Activations("0")])
    if not compiled_first:
        compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        compiled(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    found = values(watcher, sink)
    assert len(graphs) == 1, "a graph break or a recompilation"
    assert not any(key.startswith("activation/0") for key in found)
    assert len([text for text in said() if "Modules inside a compiled model are not measured" in text]) == 1


def test_several_updates_of_a_critic_between_those_of_a_generator_raise_no_warning(said):
    gan = {"critic": nn.Linear(2, 1), "generator": nn.Linear(2, 2)}
    watcher, sink = watch(gan, [Activations("generator")])
    optimizers = {name: SGD(model.parameters(), lr=0.1) for name, model in gan.items()}
    for step in range(12):
        name = "generator" if step % 6 == 5 else "critic"
        with torch.set_grad_enabled(name == "generator"):
            fake = gan["generator"](torch.ones(1, 2))
        gan["critic"](fake).sum().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
    assert np.isfinite(values(watcher, sink)["activation/generator/norm"]).sum() == 2
    assert said() == []


def test_an_output_under_vmap_is_left_alone(said):
    model = nn.Sequential(nn.Linear(2, 2))
    watcher, sink = watch(model, [Activations(), Metric("x", torch.sum, on="activation")])
    torch.vmap(model)(torch.ones(3, 2)).sum().backward()
    SGD(model.parameters(), lr=0.1).step()
    assert values(watcher, sink) == {}
    assert said() == []


@pytest.mark.parametrize("of", [("output",), ("output", "grad")])  # gradients of outputs are not of the forward
def test_the_first_module_that_is_not_finite_is_named(of):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            # The order of the definitions differs from the order of the forward.
            self.last, self.middle, self.first = nn.Linear(2, 1), nn.Tanh(), nn.Linear(2, 2)
            self.broken = False

        def forward(self, x):
            return self.last(self.middle(self.first(x) * (math.nan if self.broken else 1.0)))

    model, alerts, metrics = Model(), [], [Activations(of=of)]
    watcher, _ = watch(model, metrics, rules=[NonFiniteActivation(), only("nan_gradient")], on_alert=alerts.append)
    for step in range(3):
        model.broken = step == 2
        train(model, [torch.ones(1, 2)])
    watcher.remove()
    assert [(alert.incident.kind, alert.step) for alert in alerts] == [
        ("nan_gradient", 3),
        ("non_finite_activation", 3),
    ]
    assert "The output of middle was the first of the forward that is not finite, with 2 elements" in alerts[1].text
    assert "middle (2 non-finite), last (1 non-finite), root (1 non-finite)" in alerts[1].text


def test_a_gradient_that_is_not_finite_is_no_output_that_is_not_finite():
    model, alerts = nn.Sequential(nn.Linear(2, 2)), []
    metrics = [Activations(of=("output", "grad"))]
    watcher, sink = watch(model, metrics, rules=[NonFiniteActivation(), only("nan_gradient")], on_alert=alerts.append)
    train(model, [torch.ones(1, 2)], loss=lambda output: output.sum() * math.nan)
    assert values(watcher, sink)["activation/0.grad/num_nonfinite"].tolist() == [2]
    [alert] = alerts
    assert alert.incident.kind == "nan_gradient"


class Gated(MonitorMixin, nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        gate = self.linear(x).sigmoid()
        self.log_tensor("gate", gate.detach().clone())
        self.log_tensor("heads", torch.arange(4.0).reshape(2, 2), dims={0: "head"})
        return x * gate


def test_tensors_that_modules_log_are_measured_under_their_names():
    model = nn.Sequential(Gated(), nn.Linear(4, 1))
    metrics = [Activations(r"\.gate$|heads"), Metric("top", lambda a: a.max(), on="activation", match=r"heads")]
    found = seen(model, metrics, [torch.zeros(3, 4)], optimizer=SGD(model.parameters(), lr=0.0))
    bias = model[0].linear.bias.detach()
    expected = bias.sigmoid().repeat(3).norm().item()
    assert found["activation/0.gate/norm"][0] == pytest.approx(expected, rel=1e-6)
    assert found["activation/0.heads/head_0/max"][0] == 1
    assert found["activation/0.heads/head_1/min"][0] == 2
    assert found["activation/0.heads/head_1/top"][0] == 3
    assert not any(key.startswith("activation/0/") for key in found)


def test_logging_a_tensor_does_nothing_unless_a_sampled_step_is_watched():
    class Counts:
        def __getattr__(self, name):
            raise AssertionError(f"the tensor's {name} was asked for")

    module = nn.Linear(2, 2)
    log_tensor(module, "x", Counts())  # The module is not watched.
    watcher, _ = watch(module, [Activations()], sample_every=2)
    log_tensor(module, "x", Counts())  # The step is not sampled.
    log_tensor(nn.Linear(2, 2), "x", Counts())  # Another model is watched.
    watcher.remove()
    log_tensor(module, "x", Counts())


def test_a_failure_in_a_forward_ends_the_probe_and_not_the_training(said):
    model = nn.Sequential(Gated())
    probe = Activations()
    watcher, sink = watch(model, [probe, Metric("n", torch.sum, on="activation", match="^0$")])
    probe._forward_done = None  # the hook raises, because None cannot be called
    probe._add = None
    train(model, [torch.ones(1, 4)] * 3)
    found = values(watcher, sink)
    assert len(found["activation/0/n"]) == 3
    assert len([text for text in said() if "Activations() failed and is dropped" in text]) == 1


class HandsOver(nn.Module):
    """A module without MonitorMixin that logs a tensor and an attention through the functions."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        hidden = self.linear(x)
        metrics.log_tensor(self, "gate", hidden)
        metrics.log_attention(self, hidden[None], hidden[None])
        return hidden


@pytest.mark.parametrize(
    ("metric", "key"),
    [
        (metrics.Activations("gate", statistics=["norm"]), "activation/root/gate/norm"),
        (metrics.Metric("size", torch.norm, on="activation", match="gate"), "activation/root/gate/size"),
        (metrics.Metric("size", torch.norm, on="activation", match="query"), "activation/root/query/head_0/size"),
    ],
)
def test_a_tensor_that_a_module_logs_can_be_matched_by_its_own_name(metric, key):
    model = HandsOver()
    watcher, sink = watch(model, [metric])
    train(model, [torch.ones(1, 2)])
    watcher.remove()
    own = {name for name in sink.merged().metrics if not name.startswith("gradwatch/")}
    assert {name.replace(".", "/") for name in own} == {key}


noted_as = log_tensor


def note(module, value):
    noted_as(module, "gate", value)


class Notes:
    def take(self, module, value):
        note(module, value)


class Logs(nn.Module):
    """A module whose forward does not name `log_tensor`, but calls a function that does."""

    def __init__(self, log):
        super().__init__()
        self.linear, self.log = nn.Linear(2, 2), log

    def forward(self, x):
        self.log(self, self.linear(x))
        return x + self.linear(x)


class LogsByAlias(Logs):
    def forward(self, x):
        noted_as(self, "gate", self.linear(x))
        return super().forward(x)


class LogsInAnInnerFunction(Logs):
    def forward(self, x):
        def inner():
            metrics.log_tensor(self, "gate", self.linear(x))

        inner()
        return super().forward(x)


def decorated(function):
    @functools.wraps(function)
    def wrapper(module, value):
        function(module, value)

    return wrapper


def closure_over(log):
    return lambda module, value: log(module, "gate", value)


def nothing(module, value):
    pass


def with_a_hook():
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda module, args, output: note(module, output))
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: LogsByAlias(nothing),
        lambda: LogsInAnInnerFunction(nothing),
        lambda: Logs(note),
        lambda: Logs(metric_probes.note_gate),
        lambda: Logs(lambda module, value: metric_probes.note_gate(module, value)),
        lambda: Logs(closure_over(noted_as)),
        lambda: Logs(decorated(note)),
        lambda: Logs(functools.partial(note)),
        lambda: Logs(Notes().take),
        with_a_hook,
    ],
    ids=[
        "alias",
        "inner",
        "helper",
        "file",
        "attribute of a module",
        "closure",
        "decorator",
        "partial",
        "method",
        "hook",
    ],
)
def test_a_tensor_that_a_module_logs_by_whatever_way_can_be_matched(make):
    model = make()
    found = seen(model, [Activations("gate", statistics=["max"])], [torch.ones(1, 2)])
    assert list(found) == ["activation/root.gate/max"]


@pytest.mark.parametrize("metric", [Activations("gaet"), Metric("x", torch.norm, on="activation", match="gaet")])
def test_a_wrong_name_is_refused_if_the_code_of_no_module_logs_tensors(metric):
    # The class is defined beside functions that log tensors, but its instance refers to none of them.
    with pytest.raises(ValueError, match="match='gaet' matches no module; the first names are 'root', 'linear'"):
        watch(Logs(nothing), [metric])


def test_a_class_without_an_instance_is_refused_although_the_module_logs_tensors():
    # A tensor has no class that match= could mean.
    with pytest.raises(ValueError, match="matches no module"):
        watch(Logs(note), [Activations(nn.LSTM)])


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.relu = nn.ReLU()

    def forward(self, x, *, gate):
        return self.relu(self.linear(x)) * gate


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = TwoInputs()

    def forward(self, x):
        return self.inner(x, gate=torch.full((2,), 3.0))


@pytest.mark.parametrize("scale", [None, 256.0])
def test_inputs_and_gradients_of_outputs_are_autograds_own_over_micro_batches(scale):
    torch.manual_seed(0)
    model = Wrapped()
    batches = [torch.randn(4, 3), torch.randn(6, 3)]
    grads = []
    for batch in batches:  # the expected gradients: computed by autograd in float64
        double = copy.deepcopy(model).double().inner
        hidden = double.linear(batch.double())
        out = torch.relu(hidden) * 3
        grads.append(torch.autograd.grad(out.square().mean(), [hidden, out]))
    probe = Activations("^inner", of=("input", "grad"), statistics=["norm"])
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    watcher, sink = watch(model, [probe], scaler=scaler)
    optimizer = SGD(model.parameters(), lr=0.1)
    for batch in batches:
        loss = model(batch).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    found = values(watcher, sink)
    both = [torch.cat([of[place].flatten() for of in grads]).norm().item() for place in (0, 1)]
    inputs = torch.cat([batch.flatten() for batch in batches]).norm().item()
    assert {key: of[0] for key, of in found.items() if "relu" not in key} == pytest.approx(
        {
            "activation/inner.linear.input/norm": inputs,
            "activation/inner.linear.grad/norm": both[0],
            "activation/inner.input/norm": inputs,
            "activation/inner.input_gate/norm": math.sqrt(4 * 9),  # two micro-batches of two threes
            "activation/inner.grad/norm": both[1],
        },
        rel=1e-5,
    )


def test_another_models_gradient_scaler_divides_nothing_here():
    """The scaler that was used last belongs to another model; its owner is known only after the first step."""
    scaled, model = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    scaler, first = torch.amp.GradScaler("cpu", init_scale=1024.0), SGD(scaled.parameters(), lr=0.0)
    other, _ = watch(scaled, [])
    watcher, sink = watch(model, [Activations("^0", of=("grad",), statistics=["norm"])])
    optimizer = SGD(model.parameters(), lr=0.0)
    for _ in range(3):
        scaler.scale(scaled(torch.ones(1, 2)).sum()).backward()
        scaler.step(first)
        scaler.update()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    other.remove()
    # The gradient of a sum of two outputs is 1 for each: their norm is sqrt(2).
    assert values(watcher, sink)["activation/0.grad/norm"][1:] == pytest.approx([math.sqrt(2)] * 2)


def test_modules_are_chosen_by_class_including_modules_that_are_added_later():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    watcher, sink = watch(model, [Activations(nn.Linear, statistics=["norm"])])
    assert repr(Activations(nn.Linear)) == "Activations(Linear)"
    train(model, [torch.ones(1, 2)])
    model[1] = nn.Sequential(nn.Linear(2, 2))
    train(model, [torch.ones(1, 2)])
    train(model, [torch.ones(1, 2)])
    assert {key.split("/")[1] for key in values(watcher, sink)} == {"0", "2", "1.0"}
