"""Spectrum against numpy's singular values in float64."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from metric_probes import seen, train, values, watch
from metric_rank_programs import spectrum as spectrum_of
from torch import nn

from wandb_gradwatch.metrics import Spectrum
from wandb_gradwatch.metrics._module_probe import Layout
from wandb_gradwatch.metrics._parameters import _SharedVector


def spectrum(matrix: Any) -> tuple[float, float]:
    singular = np.linalg.svd(np.asarray(matrix, dtype=np.float64).reshape(len(matrix), -1), compute_uv=False)
    return singular[0], (singular**2).sum() / singular[0] ** 2


def test_parameters_gradients_and_updates_agree_with_numpy() -> None:
    """Matrices that change little from step to step: the iteration continues, and is accurate to a tenth of a percent
    once it has had some samples. The gradient is the same matrix in every step."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 2, bias=False)
    with torch.no_grad():
        model.weight[0] *= 4  # makes the largest singular value much larger than the others
    gradient = torch.randn(8, 3, 2, 2) * torch.logspace(0, 1, 8)[:, None, None, None]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5)
    watcher, sink = watch(model, [Spectrum(of=("parameter", "gradient", "update"))])
    expected: dict[str, list[Any]] = {"parameter": [], "gradient": [], "update": []}
    for _ in range(12):
        optimizer.zero_grad()
        (model.weight * gradient).sum().backward()
        before = model.weight.detach().clone()
        optimizer.step()
        expected["parameter"].append(spectrum(before))
        expected["gradient"].append(spectrum(gradient))
        expected["update"].append(spectrum(model.weight.detach() - before))
    found = values(watcher, sink)
    for subject, pairs in expected.items():
        sigma, rank = np.array(pairs).T
        np.testing.assert_allclose(found[f"{subject}/weight/largest_singular_value"], sigma, rtol=2e-3)
        np.testing.assert_allclose(found[f"{subject}/weight/stable_rank"], rank, rtol=4e-3)
        assert found[f"{subject}/weight/stable_rank"].min() >= 1


def test_in_a_loop_without_an_optimizer_parameters_are_measured_too() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(3 * torch.eye(4))
    watcher, sink = watch(model, [Spectrum()])
    for _ in range(2):
        model.weight.grad = None
        model(torch.zeros(1, 4)).sum().backward()
        model.weight.data.mul_(2)
    # 3 in the first sample, and doubled by the loop's own update in the second.
    assert values(watcher, sink)["parameter/weight/largest_singular_value"].tolist() == pytest.approx([3, 6])


def test_a_model_that_changes_its_dtype_in_mid_training_keeps_its_spectrum() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.eye_(model.weight)
    watcher, sink = watch(model, [Spectrum(of=("parameter",))])
    train(model, [torch.zeros(1, 2)] * 2)  # gradients of 0 change nothing
    train(model.double(), [torch.zeros(1, 2, dtype=torch.float64)] * 2)
    assert values(watcher, sink)["parameter/weight/largest_singular_value"].tolist() == pytest.approx([1.0] * 4)


def test_known_matrices() -> None:
    # A multiple of the identity: all singular values 3, stable rank 4. Ones: 4 = sqrt(4 * 4), rank 1. Zeros: no rank.
    for matrix, sigma, rank in ((3 * torch.eye(4), 3, 4), (torch.ones(4, 4), 4, 1), (torch.zeros(4, 4), 0, np.nan)):
        model = nn.Linear(4, 4, bias=False)
        model.weight = nn.Parameter(matrix.clone())
        found = seen(model, [Spectrum()], [torch.zeros(1, 4)])
        assert found["parameter/weight/largest_singular_value"][0] == pytest.approx(sigma, rel=1e-6)
        assert found.get("parameter/weight/stable_rank", [np.nan])[0] == pytest.approx(rank, rel=1e-6, nan_ok=True)


def test_a_gradient_of_zeros_does_not_end_the_iteration() -> None:
    model = nn.Linear(4, 4, bias=False)
    watcher, sink = watch(model, [Spectrum(of=["gradient"])])
    train(model, [torch.eye(4), torch.zeros(4, 4), torch.eye(4)], loss=lambda output: output.sum())
    # The gradient of sum(W x) over the rows of the identity is all ones: a singular value of 4, and rank 1.
    np.testing.assert_allclose(values(watcher, sink)["gradient/weight/largest_singular_value"], [4, 0, 4], rtol=1e-5)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_a_gradient_of_any_size_has_its_spectrum(size: float) -> None:
    model = nn.Linear(3, 2, bias=False)
    found = seen(
        model,
        [Spectrum(of=["gradient"])],
        [torch.tensor([[1.0, 2.0, 2.0]])] * 2,
        loss=lambda output: size * output.sum(),
    )
    np.testing.assert_allclose(found["gradient/weight/largest_singular_value"], [size * 3 * 2**0.5] * 2, rtol=1e-5)
    np.testing.assert_allclose(found["gradient/weight/stable_rank"], [1, 1], rtol=1e-5)


def test_training_keeps_its_random_numbers_and_vectors_have_no_spectrum() -> None:
    model = nn.Linear(3, 2)
    torch.manual_seed(1)
    expected = torch.randn(3)
    watcher, sink = watch(model, [Spectrum()])
    torch.manual_seed(1)
    train(model, [torch.ones(1, 3)])
    assert torch.equal(torch.randn(3), expected)
    assert set(values(watcher, sink)) == {"parameter/weight/largest_singular_value", "parameter/weight/stable_rank"}


SHARDED = [("spectrum", {"mesh": [4]}), ("spectrum", {"mesh": [2, 2]}), ("spectrum", {"mesh": [2, 2], "cut": 1})]
FSDP1 = ("spectrum", {"fsdp1": True})


@functools.cache
def on_four_ranks() -> dict[str, list[Any]]:
    calls = [*SHARDED, FSDP1]
    return dict(zip(map(repr, calls), ranks.run("metric_rank_programs", calls, 4), strict=True))


@functools.cache
def on_one_process() -> dict[str, Any]:
    found: dict[str, Any] = spectrum_of(0, 1)["metrics"]
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("call", SHARDED, ids=str)
def test_the_spectrum_of_shards_is_that_of_the_whole_matrix(call: Any) -> None:
    alone = on_one_process()
    assert len(alone) == 2 * 2 * 3
    for result in on_four_ranks()[repr(call)]:
        assert not result["said"]
        assert set(result["metrics"]) == set(alone)
        for key, expected in alone.items():
            found = result["metrics"][key]
            assert np.isnan(found[:8]).all()  # each iteration needs the merged product of the previous flush
            # Here each flush is one iteration; one process begins with twenty. Both have converged in the last samples.
            np.testing.assert_allclose(found[-4:], expected[-4:], rtol=5e-3, err_msg=key)


@pytest.mark.distributed
def test_flat_shards_have_no_spectrum_and_a_message_says_so() -> None:
    for result in on_four_ranks()[repr(FSDP1)]:
        assert not result["metrics"]
        assert [text for text in result["said"] if "spectra are left out for them" in text]


def test_ranks_that_have_used_different_vectors_are_left_out() -> None:
    shared = _SharedVector(torch.ones(1, 2), Layout(((0, 2, 0),), num_ranks=2))
    shared._version = 9
    # The sums over all ranks are |A v|^2 = 4 and |A|_F^2 = 12: a singular value of 2 and a stable rank of 3.
    assert shared.advance([2, 18, 162, 4, 12]) == (2, 3)
    assert shared.advance([2, 17, 145, 4, 12]) is None  # versions 8 and 9
    assert shared.advance([1, 9, 81, 4, 12]) is None  # the sums of one rank only
    assert shared.advance([2, 18, 162, 4, 12, 3.0, 4.0]) == (2, 3)
    assert shared._vector_N.tolist() == pytest.approx([0.6, 0.8])
    assert shared._version == 10
    assert shared.advance([2, 18, 162, 4, 12, 1.0, 0.0]) == (2, 3)  # a product of the previous vector
    assert shared._version == 10
    assert shared.advance([2, 20, 200, 4, 12, np.nan, 0.0]) == (2, 3)
    assert shared._version == 10
