"""NoiseScale on Gaussian gradients whose noise scale is known, against an independent computation."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from gradients import Chosen
from metric_probes import values, watch

from wandb_gradwatch.metrics import NoiseScale


def measured(gradients: Any, **options: Any) -> dict[str, Any]:
    """Return the metrics of a training with these gradients of micro-batches: {name: [S, N, E]}."""
    num_steps, num_micros, _ = next(iter(gradients.values())).shape
    model = Chosen(**{name: of.shape[2] for name, of in gradients.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watcher, sink = watch(model, [NoiseScale(**options)])
    for step in range(num_steps):
        optimizer.zero_grad()
        for micro in range(num_micros):
            model.loss(**{name: (of[step, micro] / num_micros).tolist() for name, of in gradients.items()}).backward()
        optimizer.step()
    return values(watcher, sink)


def test_gaussian_gradients_of_noise_scale_100() -> None:
    """|G|^2 = 1 over 4000 elements, and a variance of 100 / 4000 of each: tr S = 100.

    Of one sample's |G|^2 the deviation is sqrt(2 / (N (N - 1) E)) * tr S = 0.65 for N = 4, of the mean of 32 0.11.
    """
    noise = np.random.default_rng(0).standard_normal((32, 4, 4000)) * math.sqrt(100 / 4000)
    found = measured({"a": noise + math.sqrt(1 / 4000)})
    low, scale, high = (found[f"noise_scale/total/noise_scale{end}"][-1] for end in ("_low", "", "_high"))
    assert scale == pytest.approx(100, rel=0.35)
    assert low < 100 < high
    assert low < scale < high
    # In a product of two micro-batches the noise is 0 on average: a cosine of 1 / (1 + 100).
    assert np.mean(found["noise_scale/total/cosine"]) == pytest.approx(1 / 101, abs=0.005)
    assert np.isnan(found["noise_scale/total/noise_scale_low"][:3]).all(), "no interval from so few samples"


def test_the_numbers_are_those_of_the_definition_for_every_group_and_in_examples() -> None:
    rng = np.random.default_rng(1)
    gradients = {"a": rng.standard_normal((5, 3, 7)) + 2, "b": rng.standard_normal((5, 3, 4)) + 1}
    found = measured(gradients, group_by="parameter", batch_size=16)
    for group, members in {"a": ["a"], "b": ["b"], "total": ["a", "b"]}.items():
        micros = np.concatenate([gradients[name] for name in members], axis=2)
        small, big = (micros**2).sum(2).mean(1), (micros.mean(1) ** 2).sum(1)
        signal, noise = (3 * big - small) / 2, (small - big) / (1 - 1 / 3)
        expected = [16 * noise[: end + 1].mean() / signal[: end + 1].mean() for end in range(5)]
        np.testing.assert_allclose(found[f"noise_scale/{group}/noise_scale"], expected, rtol=1e-5)
        products = [np.mean([of[i] @ of[j] for i in range(3) for j in range(3) if i != j]) for of in micros]
        np.testing.assert_allclose(found[f"noise_scale/{group}/cosine"], products / small, rtol=1e-4)


def test_a_loss_scale_that_changes_weighs_no_sample_more_than_another() -> None:
    gradients = np.random.default_rng(3).standard_normal((6, 2, 5)) + 2
    expected = measured({"a": gradients})["noise_scale/total/noise_scale"]
    model = Chosen(a=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    watcher, sink = watch(model, [NoiseScale()], scaler=scaler)
    for step, micros in enumerate(gradients / 2):
        optimizer.zero_grad()
        for micro in micros.tolist():
            scaler.scale(model.loss(a=micro)).backward()
        scaler.step(optimizer)
        scaler.update(65536.0 / 64 if step == 2 else None)
    np.testing.assert_allclose(values(watcher, sink)["noise_scale/total/noise_scale"], expected, rtol=1e-5)


def test_a_gradient_that_is_all_noise_has_no_interval() -> None:
    found = measured({"a": np.random.default_rng(2).standard_normal((8, 2, 50))})
    assert "noise_scale/total/cosine" in found
    assert "noise_scale/total/noise_scale_high" not in found


def test_steps_with_a_single_backward_are_left_out_with_one_message(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="wandb_gradwatch"):
        found = measured({"a": np.ones((3, 1, 2))})
    assert found == {}
    assert caplog.text.count("needs steps of several micro-batches") == 1


def test_a_resumed_training_continues_the_window_of_the_estimate() -> None:
    gradients = np.random.default_rng(3).standard_normal((6, 2, 9)) + 1
    model = Chosen(a=9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train(first: int, end: int, state: Any = None) -> tuple[Any, Any]:
        watcher, sink = watch(model, [NoiseScale()])
        if state is not None:
            watcher.load_state_dict(state)
        for step in range(first, end):
            optimizer.zero_grad()
            for micro in gradients[step]:
                model.loss(a=(micro / 2).tolist()).backward()
            optimizer.step()
        state = watcher.state_dict()
        return state | {"metrics": json.loads(json.dumps(state["metrics"]))}, values(watcher, sink)

    _, uninterrupted = train(0, 6)
    state, _ = train(0, 4)
    _, resumed = train(4, 6, state)
    _, forgetful = train(4, 6, state | {"metrics": {}})
    for end in ("", "_low", "_high"):
        key = f"noise_scale/total/noise_scale{end}"
        np.testing.assert_array_equal(resumed[key], uninterrupted[key][4:])
    assert forgetful["noise_scale/total/noise_scale"][0] != resumed["noise_scale/total/noise_scale"][0]
