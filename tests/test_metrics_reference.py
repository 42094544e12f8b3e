"""Reference: distances to a frozen reference model, which is not trained and does not change the training."""

from __future__ import annotations

import copy
import gc
import math

import pytest
import torch
from gradients import Chosen, step
from metric_probes import train, values, watch
from torch import nn

from wandb_gradwatch.metrics import Reference

SGD = torch.optim.SGD


def test_parameters_are_compared_before_the_update():
    model = Chosen(a=2)
    watcher, sink = watch(model, [Reference(model)])
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimizer, a=[3, 4])
    found = values(watcher, sink)
    # Each step moves a, of norm sqrt(2) at first, by 0.1 * 5.
    assert found["parameter/a/difference"].tolist() == pytest.approx([0, 0.5, 1.0], abs=1e-6)
    assert found["parameter/a/relative_difference"].tolist() == pytest.approx(
        [0, 0.5 / math.sqrt(2), 1 / math.sqrt(2)], abs=1e-6
    )


def test_activations_are_compared_on_the_same_batch_and_over_micro_batches():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    frozen = copy.deepcopy(model)
    watcher, sink = watch(model, [Reference(model, activations="^[02]$", functions={"cosine": cosine})])
    optimizer = SGD(model.parameters(), lr=0.5)
    batches = torch.randn(3, 6, 3)
    expected = []
    for batch in batches:
        with torch.no_grad():
            difference = model[0](batch).double() - frozen[0](batch).double()
            expected.append(difference.norm().item())
        optimizer.zero_grad()
        for part in batch.split([2, 4]):
            model(part).square().sum().backward()
        optimizer.step()
    found = values(watcher, sink)
    assert found["activation/0/difference"].tolist() == pytest.approx(expected, rel=1e-5)
    assert expected[0] == 0 < expected[1]
    assert found["activation/0/cosine"][0] == pytest.approx(1.0, rel=1e-6)
    assert found["activation/2/relative_difference"][1] > 0
    assert "activation/1/difference" not in found
    assert found["parameter/0.weight/cosine"][0] == pytest.approx(1.0, rel=1e-6)


def test_of_two_models_with_equal_shapes_the_one_that_was_copied_is_compared():
    torch.manual_seed(0)
    twins = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
    watcher, sink = watch(twins, [Reference(twins["b"])])
    sum(model(torch.ones(1, 2)).sum() for model in twins.values()).backward()
    SGD([parameter for model in twins.values() for parameter in model.parameters()], lr=0.1).step()
    found = {key: of.tolist() for key, of in values(watcher, sink).items() if key.endswith("/difference")}
    assert found == {"parameter/b.weight/difference": [0], "parameter/b.bias/difference": [0]}


def cosine(tensor, reference):
    return torch.cosine_similarity(tensor.flatten(), reference.flatten(), dim=0)


def test_a_given_reference_is_used_as_it_is():
    model, other = Chosen(a=2), Chosen(a=2)
    with torch.no_grad():
        other.a.copy_(torch.tensor([4.0, 5.0]))
    watcher, sink = watch(model, [Reference(model, other)])
    model.loss(a=[1, 1]).backward()
    SGD(model.parameters(), lr=0.1).step()
    assert values(watcher, sink)["parameter/a/difference"].tolist() == [5]  # (1, 1) and (4, 5)
    assert other.a.requires_grad
    assert other.a.grad is None


def test_dropout_is_the_same_in_both_and_training_is_untouched():
    def run(watched):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        model.eval()  # the copy follows each change of the model's mode
        metrics = [Reference(model, activations="1")] if watched else []
        model.train()
        watcher, sink = watch(model, metrics)
        train(model, torch.randn(3, 6, 4), optimizer=SGD(model.parameters(), lr=0.1))
        return model.state_dict(), values(watcher, sink)

    state, found = run(True)
    plain, _ = run(False)
    assert all(torch.equal(state[key], plain[key]) for key in plain)
    # Before the first update both models are equal, and so are their dropouts.
    assert found["activation/1/difference"][0] == 0
    assert found["activation/1/difference"][1] > 0


def test_the_reference_runs_in_sampled_steps_only():
    model = nn.Sequential(nn.Linear(2, 2))
    frozen, calls = copy.deepcopy(model), []
    frozen.register_forward_hook(lambda *_: calls.append(1))
    watcher, _ = watch(model, [Reference(model, frozen, activations="0")], sample_every=3)
    train(model, torch.randn(7, 1, 2))
    model.eval()(torch.randn(1, 2))
    watcher.remove()
    assert len(calls) == 2  # steps 3 and 6
    assert len(frozen[0]._forward_hooks) == 0


def test_an_output_of_the_reference_is_freed_when_the_models_own_output_arrives():
    class Looks(nn.Module):
        """Counts the tensors of its output's shape, while the forward goes on and after it."""

        def __init__(self):
            super().__init__()
            self.wide, self.narrow, self.found = nn.Linear(3, 50), nn.Linear(50, 1), []

        def forward(self, x):
            y = self.wide(x)
            self.found.append(tensors_like(y))
            return self.narrow(y)

    def tensors_like(tensor):
        gc.collect()
        return sum(type(thing) is torch.Tensor and thing.shape == tensor.shape for thing in gc.get_objects())

    model, frozen = Looks(), Looks()
    gc.freeze()  # the collector skips the objects that exist already
    try:
        watcher, _ = watch(model, [Reference(model, frozen, activations="wide")])
        train(model, torch.randn(3, 7, 3))
        # The reference's output has been freed when the model's next module runs.
        assert model.found == [1, 1, 1]
        assert tensors_like(torch.empty(7, 50)) == 1  # the tensor in this line itself
        watcher.remove()
    finally:
        gc.unfreeze()


def test_a_function_that_fails_is_dropped_alone(said):
    model = Chosen(a=2)
    functions = {"bad": lambda t, r: t @ torch.ones(7), "good": lambda t, r: (t - r).abs().max()}
    watcher, sink = watch(model, [Reference(model, functions=functions)])
    optimizer = SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        step(model, optimizer, a=[1, 3])
    found = values(watcher, sink)
    assert found["parameter/a/good"].tolist() == [0, 3]
    assert "parameter/a/bad" not in found
    assert len([text for text in said() if "the function 'bad' failed on parameter/a" in text]) == 1


def test_models_that_cannot_be_compared_are_rejected():
    model = Chosen(a=2)
    with pytest.raises(ValueError, match="must have the model's parameters, but 'a' differs"):
        Reference(model, Chosen(a=3))
    with pytest.raises(TypeError, match=r"reference must be a torch\.nn\.Module, but is str"):
        Reference(model, "init")
    with pytest.raises(ValueError, match="the model that it was made of is not watched here"):
        watch(Chosen(b=2), [Reference(model)])
