"""The refined coordinate check: its terms against a direct float64 computation, and the growth in the paper."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from wandb_gradwatch.metrics import coordinate_check


def mlp(width):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(),
                         nn.Linear(width, 3))  # fmt: skip


def sgd(model, width):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(16, 6, generator=generator), torch.randint(0, 3, (16,), generator=generator)) for _ in range(count)
    ]


def rms(tensor):
    return tensor.square().mean().sqrt().item()


def test_the_terms_are_those_of_a_direct_computation_in_float64():
    data = batches(3)
    found = coordinate_check(mlp, sgd, widths=[8, 16], batches=data, loss=loss, check_steps=[1, 3])
    assert found.layers == ("0", "2", "3", "5")
    assert found.steps.tolist() == [1, 3]
    for index, width in enumerate(found.widths.astype(int)):
        torch.manual_seed(0)
        model = mlp(width)
        start, optimizer = copy.deepcopy(model), sgd(model, width)
        for batch in data:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        x_t = {"0": data[-1][0]}
        x_0 = {"0": data[-1][0]}
        with torch.no_grad():
            for inputs, m in ((x_t, model), (x_0, start)):
                hidden = m[1](m[0](inputs["0"]))
                inputs["2"], inputs["3"] = hidden, m[2](hidden)
                inputs["5"] = m[4](m[3](inputs["3"]))
            for name in ("0", "3", "5"):
                w_t, w_0 = (m[int(name)].weight.double() for m in (model, start))
                a, b = x_t[name].double(), x_0[name].double()
                place = found.layers.index(name)
                assert found.weight_change[index, 1, place] == pytest.approx(rms(a @ (w_t - w_0).T), rel=1e-9)
                assert found.input_change[index, 1, place] == pytest.approx(rms((a - b) @ w_0.T), rel=1e-9, abs=1e-12)
                bias = model[int(name)].bias.double()
                assert found.output[index, 1, place] == pytest.approx(rms(a @ w_t.T + bias), rel=1e-9)
            # A norm layer is linear in its weight only: the term is (w_t - w_0) times the normalised input.
            normal = (x.double() for x in (x_t["2"], x_0["2"]))
            normal_t, normal_0 = (
                (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() for x in normal
            )
            w_t, w_0 = model[2].weight.double(), start[2].weight.double()
            assert found.weight_change[index, 1, 1] == pytest.approx(rms((w_t - w_0) * normal_t), rel=1e-7)
            assert found.input_change[index, 1, 1] == pytest.approx(rms(w_0 * (normal_t - normal_0)), rel=1e-7)


def test_a_tiny_learning_rate_loses_no_digits():
    def tiny(model, width):
        return torch.optim.SGD(model.double().parameters(), lr=1e-9)

    def small(model, width):
        return torch.optim.SGD(model.double().parameters(), lr=1e-4)

    def double_loss(model, batch):
        return loss(model, (batch[0].double(), batch[1]))

    data = batches(1)
    one, other = (
        coordinate_check(mlp, make, widths=[8, 16], batches=data, loss=double_loss, match="^3$")
        for make in (tiny, small)
    )
    # One step of SGD is linear in its learning rate.
    np.testing.assert_allclose(one.weight_change * 1e5, other.weight_change, rtol=1e-5)


def adam(scaled):
    def make(model, width):
        hidden = [m.weight for m in model if isinstance(m, nn.Linear)][1:]
        rest = [p for p in model.parameters() if all(p is not h for h in hidden)]
        lr = 1e-3
        return torch.optim.Adam(
            [{"params": hidden, "lr": lr * 64 / width if scaled else lr}, {"params": rest, "lr": lr}]
        )

    return make


def test_what_layers_learn_grows_under_standard_scaling_and_not_under_mup():
    def relu_mlp(width):
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))

    widths, data = [64, 128, 256, 512], batches(1) * 3
    standard, mup = (
        coordinate_check(relu_mlp, adam(scaled), widths=widths, batches=data, loss=loss) for scaled in (False, True)
    )
    # An Adam update has entries of the size of the learning rate, aligned with the input: a sum over `width` of them
    # grows like the width in the hidden and the last layer, unless the learning rate falls like it.
    assert standard.layers == ("0", "2", "4")
    assert (standard.growth()[1:] > 0.7).all()
    assert (np.abs(mup.growth()) < 0.2).all()
    assert abs(standard.growth()[0]) < 0.2, "the first layer's input does not grow with the width"
    assert np.isnan(standard.growth("input_change")[0]), "the data itself does not change"
    assert (np.abs(mup.growth("output")[:2]) < 0.2).all()


def test_an_embedding_is_a_layer_too():
    class Words(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.table, self.head = nn.Embedding(10, width), nn.Linear(width, 3)

        def forward(self, words):
            return self.head(self.table(words).mean(1))

    words = torch.arange(10).reshape(2, 5)
    found = coordinate_check(
        Words, sgd, widths=[4, 8], batches=[(words, torch.tensor([0, 1]))], loss=loss, match="table"
    )
    assert (found.weight_change > 0).all()
    assert (found.input_change == 0).all()


def test_the_callers_random_numbers_and_training_modes_are_unchanged():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    coordinate_check(mlp, sgd, widths=[4, 8], batches=batches(1), loss=loss)
    assert torch.equal(torch.rand(3), expected)


def test_invalid_arguments_are_rejected():
    with pytest.raises(ValueError, match="must be at least two widths to compare"):
        coordinate_check(mlp, sgd, widths=[8], batches=batches(1), loss=loss)
    with pytest.raises(ValueError, match="there are 1 batches; pass a batch per update"):
        coordinate_check(mlp, sgd, widths=[8, 16], batches=batches(1), loss=loss, check_steps=[2])
    with pytest.raises(ValueError, match=r"match='nope' matches no layer; the first names are '0', '2', '3'"):
        coordinate_check(mlp, sgd, widths=[8, 16], batches=batches(1), loss=loss, match="nope")
    found = coordinate_check(mlp, sgd, widths=[4, 8], batches=batches(1), loss=loss)
    with pytest.raises(ValueError, match="quantity='x' must be"):
        found.growth("x")
