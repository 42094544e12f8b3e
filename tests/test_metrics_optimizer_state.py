"""OptimizerState against an independent float64 computation and closed forms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gradients import Chosen, step
from metric_probes import values, watch
from torch import nn

from wandb_gradwatch.metrics import OptimizerState, OutgrownUpdate

KEY = "optimizer_state/a"


def of_adam(gradients: np.ndarray, *, eps: float, betas: tuple[float, float] = (0.9, 0.999)) -> dict[str, list[float]]:
    """Compute the numbers of the docstring in float64, for the gradients of all steps: [S, E]."""
    m, v, found = np.zeros(gradients.shape[1]), np.zeros(gradients.shape[1]), []
    for t, g in enumerate(gradients, 1):
        known = v / (1 - betas[1] ** (t - 1)) if t > 1 else np.full_like(v, np.nan)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        found.append({
            "exp_avg_norm": np.linalg.norm(m),
            "exp_avg_sq_norm": np.linalg.norm(v),
            "update_rms": np.sqrt(np.mean((m_hat / (np.sqrt(v_hat) + eps)) ** 2)),
            "coherence": np.sum(m_hat**2) / np.sum(v_hat),
            "stale_ratio": np.sqrt(np.mean(g**2 / np.maximum(known, eps**2))),
            "grad_eps_ratio": np.sqrt(np.mean(g**2)) / eps,
        })  # fmt: skip
    return {name: [float(one[name]) for one in found] for name in found[0]}


def measured(make: Any, gradients: np.ndarray, *, scale: float | None = None) -> tuple[dict[str, Any], nn.Module]:
    """Return the metrics of a training with these gradients: [S, E]."""
    model = Chosen(a=gradients.shape[1])
    optimizer = make(model.parameters())
    scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    watcher, sink = watch(model, [OptimizerState()], scaler=scaler)
    for gradient in gradients:
        optimizer.zero_grad()
        loss = model.loss(a=gradient.tolist())
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return values(watcher, sink), model


GRADIENTS = np.random.default_rng(0).standard_normal((6, 40)) * np.logspace(-3, 1, 40)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("options", "scale"), [({"foreach": False}, None), ({"foreach": True}, 1024.0), ({"fused": True}, 1024.0)]
)
def test_adams_numbers_are_those_of_a_computation_in_float64(kind: Any, options: Any, scale: float | None) -> None:
    found, _ = measured(lambda p: kind(p, lr=1e-3, eps=1e-4, **options), GRADIENTS, scale=scale)
    expected = of_adam(GRADIENTS, eps=1e-4)
    assert {key.removeprefix(f"{KEY}/") for key in found} == set(expected)
    for name, series in expected.items():
        np.testing.assert_allclose(found[f"{KEY}/{name}"], series, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgds_numbers_are_those_of_its_momentum(nesterov: bool) -> None:
    found, _ = measured(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=nesterov), GRADIENTS)
    buffer, buffers, updates = 0.0, [], []
    for gradient in GRADIENTS:
        buffer = 0.5 * buffer + gradient
        buffers.append(np.linalg.norm(buffer))
        update = gradient + 0.5 * buffer if nesterov else buffer
        updates.append(np.sqrt(np.mean(update**2)))
    np.testing.assert_allclose(found[f"{KEY}/momentum_buffer_norm"], buffers, rtol=1e-5)
    np.testing.assert_allclose(found[f"{KEY}/update_rms"], updates, rtol=1e-5)
    assert np.isnan(found[f"{KEY}/stale_ratio"]).all()
    assert np.isnan(found[f"{KEY}/coherence"]).all()


def test_other_optimizers_have_the_norms_of_their_state() -> None:
    found, _ = measured(lambda p: torch.optim.Adagrad(p, lr=0.1), GRADIENTS)
    np.testing.assert_allclose(
        found[f"{KEY}/sum_norm"], np.linalg.norm(np.cumsum(GRADIENTS**2, axis=0), axis=1), rtol=1e-5
    )
    assert {key for key in found if not np.isnan(found[key]).all()} == {f"{KEY}/sum_norm", f"{KEY}/grad_eps_ratio"}
    assert set(measured(lambda p: torch.optim.SGD(p, lr=0.1), GRADIENTS)[0]) == {
        f"{KEY}/{name}" for name in ("update_rms", "stale_ratio", "coherence", "grad_eps_ratio")
    }


def at_steady_state(moment: float, second: float, gradients: list[list[float]], sample_every: Any = 1) -> Any:
    """Continue from moments after so many steps that their bias correction is 1."""
    model = Chosen(a=len(gradients[0]))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    state = {"step": torch.tensor(1e6), "exp_avg": torch.full_like(model.a, moment)}
    optimizer.state[model.a] = {**state, "exp_avg_sq": torch.full_like(model.a, second)}
    watcher, sink = watch(model, [OptimizerState()], sample_every=sample_every)
    for gradient in gradients:
        step(model, optimizer, a=gradient)
    return values(watcher, sink)


def test_white_noise_moves_by_0_229_of_the_learning_rate() -> None:
    """m is a sum of 0.1 * 0.9^k g_k: its variance is 0.01 / (1 - 0.81) = 1/19 of g's, and sqrt(1/19) = 0.2294."""
    noise = np.random.default_rng(1).standard_normal((60, 4000)).tolist()
    found = at_steady_state(0.0, 1.0, noise, sample_every=60)
    assert found[f"{KEY}/update_rms"][-1] == pytest.approx(math.sqrt(0.1 / 1.9), rel=0.04)
    assert found[f"{KEY}/coherence"][-1] == pytest.approx(0.1 / 1.9, rel=0.08)


def test_k_aligned_steps_make_an_update_of_1_minus_0_9_to_the_k() -> None:
    """From m = 0 and v = 1 gradients of 1 leave m = 1 - 0.9^k and v = 1; coherence is the square of their ratio."""
    found = at_steady_state(0.0, 1.0, [[1.0] * 3] * 20)
    aligned = 1 - 0.9 ** np.arange(1, 21)
    np.testing.assert_allclose(found[f"{KEY}/update_rms"], aligned, rtol=1e-5)
    np.testing.assert_allclose(found[f"{KEY}/coherence"], aligned**2, rtol=1e-5)
    np.testing.assert_allclose(found[f"{KEY}/stale_ratio"], 1.0, rtol=1e-5)


def test_after_2000_zero_gradients_the_stale_ratio_of_the_next_is_2_72() -> None:
    """v decays to 0.999^2000, so that a gradient of 1 is 0.999^-1000 = 2.7196 times sqrt(v)."""
    only_loud = at_steady_state(0.0, 1.0, [[0.0]] * 2000 + [[1.0]], sample_every=lambda step: int(step > 2000))
    assert only_loud[f"{KEY}/stale_ratio"].tolist() == pytest.approx([0.999**-1000], rel=1e-3)


def test_the_first_gradient_of_an_element_is_not_out_of_date() -> None:
    """A rare token's row of an embedding: the ratio is sqrt(mean(1, 0)); division by eps would give 7e7."""
    found, _ = measured(lambda p: torch.optim.Adam(p, lr=0.0), np.array([[1.0, 0.0], [1.0, 1.0]]))
    assert found[f"{KEY}/stale_ratio"][1] == pytest.approx(math.sqrt(0.5))


def trained(gradients: np.ndarray) -> Any:
    model = Chosen(a=gradients.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    watcher, sink = watch(model, [OptimizerState()])
    for gradient in gradients:
        step(model, optimizer, a=gradient.tolist())
    watcher.remove()
    return sink


def test_a_gradient_that_comes_back_raises_an_alert_at_its_own_step_and_noise_raises_none() -> None:
    # v is at 1 with 120 loud steps, and 1e-4 of that is left of a hundred quiet gradients: 1 / sqrt(0.50) = 1.4 at
    # beta2 = 0.999; at the 5 times as large gradient of step 221 the ratio is 7.
    noise = np.random.default_rng(2).standard_normal((230, 30))
    assert not trained(noise).alerts
    assert not trained(
        noise[:, :1]
    ).alerts  # a scalar parameter: 2 % of Gaussian noise is above 2.3 standard deviations
    noise[120:220] *= 0.01
    noise[220] *= 5
    [alert] = trained(noise).alerts
    assert (alert.title, alert.step) == ("Update outgrows", 221)
    assert "In 1 of the parameters the gradient is more than 2.3 times" in alert.text
    assert "a (" in alert.text


def test_the_rule_continues_from_its_saved_state() -> None:
    rule, other = OutgrownUpdate(), OutgrownUpdate()
    noise = np.random.default_rng(2).standard_normal((20, 4))
    list(rule.check(trained(noise).merged()))
    other.load_state_dict(rule.state_dict())
    assert other.state_dict() == rule.state_dict()
    assert len(other.state_dict()["_past"]["a"]) == 19  # the first step has no ratio
