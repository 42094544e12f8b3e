"""Facts for the judgement: of the model's inputs and outputs, of the optimizer's groups, and by witnesses."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from gradients import Chosen, samples, step, watch
from torch import Tensor, nn

from wandb_gradwatch import load_recording, unwatch
from wandb_gradwatch._measure import cpu_compiled
from wandb_gradwatch._measure.columns import NUM_COLUMNS
from wandb_gradwatch._measure.compilation import Compilation
from wandb_gradwatch.sinks._history_row import HistoryRow
from wandb_gradwatch.snapshot import Snapshot, keys

NAN, INF = float("nan"), float("inf")
FLOAT32, BFLOAT16 = (torch.finfo(dtype).max for dtype in (torch.float32, torch.bfloat16))


class Doubler(nn.Module):
    """Returns twice its input [batch, 2], by a parameter of twos."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def sgd(model: nn.Module, rate: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def trained(model: nn.Module, groups: Sequence[Sequence[Any]], *, call: Any = None, **options: Any) -> Snapshot:
    """Train one step for each group of micro-batches, without changing the model."""
    (watcher, sink), optimizer = watch(model, **options), sgd(model)
    for micro_batches in groups:
        optimizer.zero_grad()
        for batch in micro_batches:
            (model if call is None else call)(batch).sum().backward()
        optimizer.step()
    return samples(watcher, sink)


def fact(snapshot: Snapshot, name: str) -> list[float]:
    """One fact of every sample."""
    values: list[float] = snapshot.metrics[keys.FACT + name].tolist()
    return values


def of(snapshot: Snapshot, fact_name: str, name: str) -> Any:
    """One fact of one parameter in every sample: [S]."""
    return snapshot.per_parameter[fact_name][:, snapshot.names.index(name)]


def is_fact(key: str) -> bool:
    return key.startswith(keys.FACT)


# The snapshot.


def of_names(names: str, **facts: list[list[float]]) -> Snapshot:
    """A snapshot with these one-letter names, and facts of every sample and name."""
    num_samples = len(next(iter(facts.values())))
    rows = np.ones((num_samples, len(names), NUM_COLUMNS))
    per_parameter = {name: np.array(values) for name, values in facts.items()}
    return Snapshot(np.arange(num_samples), tuple(names), rows, per_parameter=per_parameter)


def test_facts_of_parameters_follow_their_names_through_merge_and_select() -> None:
    merged = of_names("a", rate=[[1.0]]).merge(of_names("ab", rate=[[2.0, 3.0], [4.0, 5.0]], other=[[6.0, 7.0]] * 2))
    np.testing.assert_array_equal(merged.per_parameter["rate"], [[1.0, NAN], [2.0, 3.0], [4.0, 5.0]])
    np.testing.assert_array_equal(merged.per_parameter["other"], [[NAN, NAN], [6.0, 7.0], [6.0, 7.0]])
    np.testing.assert_array_equal(merged.sample(-1).per_parameter["rate"], [[4.0, 5.0]])


def test_groups_of_parameters_have_no_facts_of_parameters() -> None:
    assert of_names("ab", rate=[[1.0, 2.0]]).by_group(lambda _: "all").per_parameter == {}


def test_facts_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"per_parameter\['rate'\] must be \[S, P\] = \(1, 2\), but is \(1, 1\)"):
        of_names("ab", rate=[[1.0]])


# Inputs and outputs.


def test_facts_of_inputs_and_outputs_are_those_of_the_forward() -> None:
    found = trained(Doubler(), [[torch.tensor([[3.0, 0.0], [0.0, 4.0]])]])
    assert {key.removeprefix(keys.FACT) for key in found.metrics if is_fact(key)} == set(keys.SAMPLE_FACTS)
    expected = {"num_forwards": 1, "batch_size": 2, "output_width": 2}
    expected |= {"input_rms": 2.5, "output_rms": 5.0}  # sqrt((9 + 16) / 4), and twice that
    expected |= {"input_zero_ratio": 0.5, "output_zero_ratio": 0.5, "input_num_nonfinite": 0, "output_num_nonfinite": 0}
    expected |= {"input_largest": FLOAT32, "output_largest": FLOAT32, "loss_largest": FLOAT32}
    assert {name: fact(found, name) for name in expected} == {name: [value] for name, value in expected.items()}
    # The features are (6, 0) and (0, 8), with deviations 3 and 4: sqrt((9 + 16) / 2) / 5 is the root of a half.
    assert fact(found, "output_spread") == [pytest.approx(0.5**0.5, rel=1e-6)]
    assert np.isnan(fact(found, "input_repeated")[0])


def test_elements_that_are_not_finite_are_counted_and_left_out_of_the_rms() -> None:
    found = trained(Doubler(), [[torch.tensor([[3.0, NAN], [INF, 4.0]])]])
    assert fact(found, "input_num_nonfinite") == fact(found, "output_num_nonfinite") == [2]
    assert fact(found, "input_rms") == [12.5**0.5]  # sqrt((9 + 16) / 2)


def test_equal_rows_of_an_output_have_no_spread() -> None:
    found = trained(Doubler(), [[torch.tensor([[0.1, 0.7]]).expand(7, 2)], [torch.ones(1, 2)]])
    assert fact(found, "output_spread")[0] == 0
    assert np.isnan(fact(found, "output_spread")[1])  # one row cannot differ from others


def test_inputs_are_repeated_if_bits_and_places_are_those_of_the_forward_before() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 1.0]])  # the same numbers in another order
    found = trained(Doubler(), [[a], [a.clone()], [b], [b], [a]])
    np.testing.assert_array_equal(fact(found, "input_repeated"), [NAN, 1, 0, 1, 0])


def test_one_hot_inputs_with_equal_sums_are_not_repeated() -> None:
    batches = [nn.functional.one_hot(torch.tensor(one), 2).float() for one in ([0, 1], [1, 0], [0, 1], [0, 1])]
    found = trained(Doubler(), [[batch] for batch in batches])
    np.testing.assert_array_equal(fact(found, "input_repeated"), [NAN, 0, 0, 1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_sizes_are_those_of_elements_of_any_dtype_and_stride(dtype: torch.dtype) -> None:
    batch = torch.tensor([[3.0, 0.0, 9.0], [0.0, 4.0, 9.0]]).to(dtype)[:, :2]
    model = Doubler()
    model.factor = nn.Parameter(model.factor.detach().to(dtype))
    found = trained(model, [[batch]] * 2, call=lambda x: model(x).abs())
    assert fact(found, "input_rms") == [2.5, 2.5]
    assert fact(found, "output_zero_ratio") == [0.5, 0.5]
    assert fact(found, "output_spread") == [pytest.approx(0.5**0.5, rel=1e-6)] * 2
    np.testing.assert_array_equal(fact(found, "input_repeated"), [NAN, 1])


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_numbers_whose_squares_float32_does_not_have_have_a_size(size: float) -> None:
    found = trained(Doubler(), [[torch.full((2, 2), size)]])
    assert fact(found, "input_rms") == [pytest.approx(size)]
    assert fact(found, "output_rms") == [pytest.approx(2 * size)]
    assert fact(found, "input_num_nonfinite") == [0]


def test_integer_inputs_have_no_size_but_can_be_repeated() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten())
    found = trained(model, [[torch.tensor([[1, 2], [3, 4]])], [torch.tensor([[1, 2], [3, 4]])]])
    assert fact(found, "batch_size") == [2, 2]
    assert fact(found, "output_width") == [6, 6]
    assert fact(found, "input_repeated")[1] == 1
    assert np.isnan(fact(found, "input_rms")).all()
    assert keys.FACT + "input_largest" not in found.metrics


def test_a_loss_before_the_logits_is_not_taken_for_them() -> None:
    class WithLoss(Doubler):
        def forward(self, x: Tensor) -> Any:
            return {"loss": super().forward(x).mean(), "logits": super().forward(x)}

    found = trained(model := WithLoss(), [[torch.ones(4, 2)]], call=lambda x: model(x)["loss"])
    assert fact(found, "output_width") == [2]
    assert fact(found, "output_rms") == [2.0]


def test_facts_of_micro_batches_are_those_of_all_their_elements() -> None:
    found = trained(
        Doubler(), [[torch.tensor([[3.0, 0.0], [0.0, 4.0]]), torch.tensor([[1.0, 0.0]])], [torch.ones(1, 2)]]
    )
    assert fact(found, "num_forwards") == [2, 1]
    assert fact(found, "batch_size") == [3, 1]
    assert fact(found, "input_rms") == [pytest.approx((26 / 6) ** 0.5), 1]
    assert fact(found, "input_zero_ratio") == [0.5, 0]


def test_evaluations_are_no_forwards_of_the_sample() -> None:
    (watcher, sink), optimizer = watch(model := Doubler()), sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.full((5, 2), 9.0))
        model.eval()(torch.full((5, 2), 9.0))
        model.train()
    found = samples(watcher, sink)
    assert fact(found, "num_forwards") == [1, 1]
    assert fact(found, "input_rms") == [1, 1]


def test_a_forward_between_samples_is_not_looked_at() -> None:
    found = trained(Doubler(), [[torch.full((1, 2), float(k))] for k in range(1, 7)], sample_every=3, log_every=3)
    assert found.steps.tolist() == [3, 6]
    assert fact(found, "input_rms") == [3, 6]


def test_forwards_of_several_models_are_those_of_one_sample() -> None:
    model = nn.ModuleList([Doubler(), Doubler()])
    found = trained(model, [[torch.ones(2, 2)]], call=lambda x: model[1](model[0](x)))
    assert not any(map(is_fact, found.metrics.keys() - {keys.FACT + "loss_largest"}))  # the list itself has no forward

    (watcher, sink), optimizer = watch([*model]), sgd(model)
    model[1](model[0](torch.ones(2, 2))).sum().backward()
    optimizer.step()
    found = samples(watcher, sink)
    assert fact(found, "num_forwards") == [2]
    assert fact(found, "input_rms") == [2.5**0.5]  # of ones and of twos
    assert fact(found, "output_rms") == [10**0.5]


def test_dtypes_under_autocast_are_those_of_the_output_and_of_the_loss() -> None:
    (watcher, sink), optimizer = watch(model := nn.Linear(2, 3)), sgd(model)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.ones(4, 2))
        loss = output.float().square().mean()
    loss.backward()
    optimizer.step()
    found = samples(watcher, sink)
    assert fact(found, "input_largest") == [FLOAT32]
    assert fact(found, "output_largest") == [BFLOAT16]
    assert fact(found, "loss_largest") == [FLOAT32]
    assert fact(found, "output_rms") == [pytest.approx(output.double().square().mean().sqrt().item())]


def test_a_large_tensor_is_read_at_strides() -> None:
    found = trained(Doubler(), [[torch.full((2**20, 2), 3.0)]])
    assert fact(found, "input_rms") == [3]
    assert fact(found, "batch_size") == [2**20]
    assert fact(found, "output_width") == [2]


def test_a_functional_call_is_no_forward_of_the_model() -> None:
    (watcher, sink), optimizer = watch(model := Doubler()), sgd(model)
    others = {"factor": torch.full((2,), 7.0)}
    torch.func.functional_call(model, others, torch.ones(1, 2))
    torch.func.grad(lambda p: torch.func.functional_call(model, p, torch.ones(1, 2)).sum())(
        dict(model.named_parameters())
    )
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert fact(samples(watcher, sink), "num_forwards") == [1]


def test_facts_are_not_logged() -> None:
    found = trained(Doubler(), [[torch.ones(2, 2)]])
    assert not any(map(is_fact, HistoryRow.of(found).scalars()))


# The model, the training and the compiler are left alone.


def test_copies_and_files_of_a_watched_model_are_not_watched() -> None:
    (watcher, sink), optimizer = watch(model := Doubler()), sgd(model)
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        copied(torch.full((5, 2), 9.0)).sum().backward()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert fact(samples(watcher, sink), "num_forwards") == [1]


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_traced_model_is_not_looked_at_and_a_script_says_what_to_do() -> None:
    (watcher, sink), optimizer = watch(model := nn.Linear(2, 1)), sgd(model)
    torch.jit.trace(model, torch.full((5, 2), 9.0))
    with pytest.raises(AttributeError, match=r"call unwatch\(model\) before"):
        torch.jit.script(model)
    torch.export.export(model, (torch.full((5, 2), 9.0),))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert fact(samples(watcher, sink), "num_forwards") == [1]


def test_unwatch_leaves_no_hook_on_the_model() -> None:
    plain, model = Doubler(), Doubler()
    watch(model)
    assert model._forward_hooks
    unwatch(model)
    tables = {key: value for key, value in vars(model).items() if "hooks" in key}
    assert tables == {key: value for key, value in vars(plain).items() if "hooks" in key}


def test_training_is_bitwise_the_same_with_all_facts() -> None:
    def train(*, watched: bool) -> Any:
        torch.manual_seed(0)
        parts = nn.Linear(4, 300), nn.BatchNorm1d(300), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(300, 2)
        model = nn.Sequential(*parts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        watcher = watch(model)[0] if watched else None
        for number in range(6):
            optimizer.zero_grad()
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=number % 2 > 0):
                    loss = model(torch.randn(8, 4)).float().square().mean()
                loss.backward()
            optimizer.step()
        if watcher is not None:
            watcher.remove()
        return [*model.state_dict().values(), torch.get_rng_state()]

    assert all(map(torch.equal, train(watched=False), train(watched=True)))


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def compile_root(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def compile_in_place(model: nn.Module) -> Any:
    model.compile(backend="aot_eager")
    return model


def compile_step(model: nn.Module) -> Any:
    return torch.compile(lambda x: model(x), backend="aot_eager")


@pytest.mark.parametrize("compiled", [compile_root, compile_in_place, compile_step])
def test_a_model_with_hooks_of_others_is_compiled_once(compiled: Callable[[nn.Module], Any]) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = Compiled()
    model.register_forward_hook(lambda *_: None)
    trained(model, [[torch.ones(5, 2)]] * 4, call=compiled(model))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("is_late", [False, True], ids=["watched first", "compiled first"])
@pytest.mark.parametrize("compiled", [compile_root, compile_in_place, compile_step])
def test_nothing_is_compiled_otherwise_because_of_the_hook(compiled: Callable[[nn.Module], Any], is_late: bool) -> None:
    def counts(*, watched: bool) -> Any:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = Compiled()
        optimizer, call = sgd(model, 0.1), compiled(model)
        watcher = None
        for number in range(6):
            if watched and number == 2 * is_late:
                watcher = watch(model)[0]
            if watcher is not None and number == 4:
                watcher.remove()
            optimizer.zero_grad()
            call(torch.ones(5, 2)).sum().backward()
            optimizer.step()
        counters = torch._dynamo.utils.counters
        return {key: dict(counters[key]) for key in ("frames", "stats", "graph_break", "aot_autograd")}

    expected = counts(watched=False)
    assert expected["frames"]["ok"] == 1
    assert counts(watched=True) == expected


def test_a_compiled_model_that_is_watched_itself_has_facts() -> None:
    torch._dynamo.reset()
    model = compile_root(Compiled())
    found = trained(model, [[torch.ones(5, 2)], [torch.ones(5, 2)]])
    assert fact(found, "batch_size") == [5, 5]
    assert fact(found, "input_repeated")[1] == 1


# The optimizer's groups.


def test_facts_of_groups_are_those_of_the_group_that_holds_the_parameter() -> None:
    model = Chosen(a=1, b=1, c=1, d=1)
    adam = torch.optim.AdamW([{"params": [model.a], "lr": 0.5}, {"params": [model.b], "eps": 1e-3}], weight_decay=0.1)
    momentum = torch.optim.SGD([model.c], lr=torch.tensor(0.25), momentum=0.9)
    watcher, sink = watch(model)
    for number in range(2):
        model.loss(a=[1], b=[1], c=[1]).backward()
        adam.step()
        momentum.step()
        adam.param_groups[0]["lr"] = 0.125 * (number + 1)
    found = samples(watcher, sink)
    rates = found.per_parameter["learning_rate"]
    np.testing.assert_allclose(rates, [[0.5, 1e-3, 0.25, NAN], [0.125, 1e-3, 0.25, NAN]], rtol=1e-7)
    np.testing.assert_array_equal(found.per_parameter["weight_decay"], [[0.1, 0.1, 0, NAN]] * 2)
    np.testing.assert_array_equal(found.per_parameter["epsilon"], [[1e-8, 1e-3, NAN, NAN]] * 2)
    np.testing.assert_array_equal(found.per_parameter["momentum"], [[0.9, 0.9, 0.9, NAN]] * 2)
    np.testing.assert_array_equal(found.per_parameter["trainable"], [[1, 1, 1, 0]] * 2)


def test_a_parameter_is_trainable_from_the_sample_in_which_it_is_unfrozen() -> None:
    model = Chosen(a=2, b=2)
    model.b.requires_grad_(False)
    (watcher, sink), optimizer = watch(model), sgd(model, 0.1)
    for number in range(4):
        model.b.requires_grad_(number > 1)
        step(model, optimizer, **({"a": [1, 2], "b": [3, 4]} if number > 1 else {"a": [1, 2]}))
    found = samples(watcher, sink)
    np.testing.assert_array_equal(of(found, "trainable", "b"), [0, 0, 1, 1])
    np.testing.assert_allclose(of(found, "grad_cosine", "b"), [NAN, NAN, NAN, 1])
    np.testing.assert_allclose(of(found, "grad_cosine", "a"), [NAN, 1, 1, 1])


# Witnesses.


@pytest.fixture(params=["compiled", "numpy"])
def witness_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the witnesses by the compiled loop, or without numba."""
    if request.param == "numpy":
        monkeypatch.setattr(cpu_compiled, "is_installed", lambda: False)
        monkeypatch.setattr(cpu_compiled, "LOOPS", Compilation(lambda: pytest.fail("there is no numba")))
    elif cpu_compiled.is_installed():
        cpu_compiled.LOOPS.wait()
    else:
        pytest.skip("numba is not installed")


@pytest.mark.usefixtures("witness_loop")
def test_witnesses_tell_the_turn_of_the_gradient_and_the_way_of_the_parameter() -> None:
    (watcher, sink), optimizer = watch(model := Chosen(a=2, b=2)), sgd(model, 0.1)
    step(model, optimizer, a=[3.0, 4.0], b=[1.0, 0.0])
    step(model, optimizer, a=[4.0, 3.0], b=[-2.0, 0.0])
    step(model, optimizer, a=[0.0, 0.0], b=[0.0, 1.0])
    found = samples(watcher, sink)
    np.testing.assert_allclose(of(found, "grad_cosine", "a"), [NAN, 24 / 25, NAN])  # the last gradient is 0
    np.testing.assert_allclose(of(found, "grad_cosine", "b"), [NAN, -1, 0])
    # From ones to (0.7, 0.6), a difference of 0.5; then by 0.1 * (4, 3), which is 0.5 too.
    np.testing.assert_allclose(of(found, "weight_change", "a"), [NAN, 0.5 / 2**0.5, 0.5 / 0.85**0.5], rtol=1e-6)
    np.testing.assert_array_equal(of(found, "weight_moved", "a"), [NAN, 1, 1])
    np.testing.assert_array_equal(of(found, "weight_moved", "b"), [NAN, 0.5, 0.5])  # one of two elements


@pytest.mark.usefixtures("witness_loop")
def test_at_most_64_elements_at_a_stride_are_witnesses() -> None:
    (watcher, sink), optimizer = watch(model := Chosen(a=128)), sgd(model, 0.1)
    odd = torch.arange(128) % 2
    for gradient in (odd, odd, 1 - odd, 1 - odd):
        step(model, optimizer, a=gradient)
    found = samples(watcher, sink)
    np.testing.assert_array_equal(of(found, "weight_moved", "a"), [NAN, 0, 0, 1])  # every second element is a witness
    np.testing.assert_array_equal(of(found, "grad_cosine", "a"), [NAN, NAN, NAN, 1])


def test_a_zero_parameter_has_no_relative_change() -> None:
    model = Chosen(a=2)
    nn.init.zeros_(model.a)
    (watcher, sink), optimizer = watch(model), sgd(model, 0.1)
    for _ in range(3):
        step(model, optimizer, a=[1.0, 1.0])
    found = samples(watcher, sink)
    np.testing.assert_allclose(of(found, "weight_change", "a"), [NAN, NAN, 1])  # from -0.1 to -0.2


@pytest.mark.usefixtures("witness_loop")
def test_a_gradient_is_compared_with_the_last_one_of_its_parameter() -> None:
    (watcher, sink), optimizer = watch(model := Chosen(a=2, b=2, c=2)), sgd(model, 0.1)
    step(model, optimizer, a=[1.0, 0.0], b=[1.0, 0.0], c=[1.0, 0.0])
    step(model, optimizer, b=[0.0, 1.0])
    step(model, optimizer, a=[3.0, 4.0], c=[1.0, 0.0])
    found = samples(watcher, sink)
    np.testing.assert_allclose(found.per_parameter["grad_cosine"], [[NAN] * 3, [NAN, 0, NAN], [0.6, NAN, 1]])


@pytest.mark.usefixtures("witness_loop")
def test_parameters_of_several_dtypes_layouts_and_sizes_are_compared() -> None:
    model = nn.ModuleDict({"a": Chosen(x=2), "b": Chosen(torch.bfloat16, x=3), "c": Chosen(torch.float64, x=300)})
    model["e"] = Chosen(torch.float16, x=5)
    model["d"] = nn.Conv2d(2, 2, 3, bias=False).to(memory_format=torch.channels_last)
    (watcher, sink), optimizer = watch(model), sgd(model, 0.5)
    for sign in (1.0, -1.0):
        optimizer.zero_grad()
        loss = model["a"].loss(x=[3.0, 4.0]).double() + model["b"].loss(x=[1.0, 1.0, 1.0]).double()
        loss = loss + model["c"].loss(x=torch.ones(300)) + model["e"].loss(x=torch.ones(5)).double()
        loss = loss + model["d"](torch.ones(1, 2, 3, 3)).sum().double()
        (sign * loss).backward()
        optimizer.step()
    found = samples(watcher, sink)
    np.testing.assert_allclose(found.per_parameter["grad_cosine"], [[NAN] * 5, [-1] * 5], rtol=1e-6)
    np.testing.assert_array_equal(found.per_parameter["weight_moved"][1], [1, 1, 1, 1, 1])


@pytest.mark.usefixtures("witness_loop")
def test_a_sparse_gradient_has_no_direction_but_its_parameter_moves() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    found = trained(model, [[torch.tensor([[0]])], [torch.tensor([[0]])]])
    assert np.isnan(of(found, "grad_cosine", "weight")).all()
    np.testing.assert_array_equal(of(found, "weight_moved", "weight"), [NAN, 0])


@pytest.mark.usefixtures("witness_loop")
@pytest.mark.filterwarnings("error")
def test_gradients_and_parameters_that_are_not_finite_have_no_direction_and_no_change() -> None:
    (watcher, sink), optimizer = watch(model := Chosen(a=2)), sgd(model, 0.1)
    for gradient in ([1.0, 0.0], [INF, 0.0], [1.0, NAN], [1.0, 0.0]):
        step(model, optimizer, a=gradient)
    found = samples(watcher, sink)
    assert np.isnan(of(found, "grad_cosine", "a")).all()
    np.testing.assert_allclose(of(found, "weight_change", "a"), [NAN, 0.1 / 2**0.5, NAN, NAN], rtol=1e-6)
    np.testing.assert_array_equal(of(found, "weight_moved", "a"), [NAN, 0.5, 0.5, 0.5])  # each time the other one stays


def test_a_loss_scale_and_clipping_do_not_turn_a_gradient() -> None:
    (watcher, sink), optimizer = watch(model := Chosen(a=2)), sgd(model, 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1)
    for gradient in ([3.0, 4.0], [4.0, 3.0]):
        optimizer.zero_grad()
        scaler.scale(model.loss(a=gradient)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    np.testing.assert_allclose(of(samples(watcher, sink), "grad_cosine", "a"), [NAN, 24 / 25])


# What is kept.


def test_a_recording_keeps_the_facts(tmp_path: Path) -> None:
    (watcher, sink), optimizer = watch(model := Chosen(a=2)), sgd(model, 0.1)
    for gradient in ([3.0, 4.0], [4.0, 3.0]):
        step(model, optimizer, a=gradient)
    [path] = watcher.record(tmp_path / "facts.npz")
    found, recorded = samples(watcher, sink), load_recording(path).snapshot
    assert recorded is not None
    assert set(recorded.per_parameter) == set(keys.PARAMETER_FACTS)
    for name, values in found.per_parameter.items():
        np.testing.assert_array_equal(recorded.per_parameter[name], values)
    assert np.isfinite(of(recorded, "grad_cosine", "a")[1])


def test_a_loaded_state_keeps_the_facts_of_its_samples_but_not_those_of_parameters() -> None:
    states = []
    for state in (None, "saved"):
        (watcher, sink), optimizer = watch(model := Doubler(), log_every=100), sgd(model)
        if state is not None:
            watcher.load_state_dict(states[0])
        model(torch.full((1, 2), 3.0 if state is None else 4.0)).sum().backward()
        optimizer.step()
        states.append(watcher.state_dict())
        found = samples(watcher, sink)
    assert fact(found, "input_rms") == [3, 4]
    np.testing.assert_array_equal(of(found, "learning_rate", "factor"), [NAN, 0])
