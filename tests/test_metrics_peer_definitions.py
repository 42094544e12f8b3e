"""The numbers of Composer's OptimizerMonitor and Levanter's watch, by their definitions, in a float64 of our own.

Composer 0.32 (`composer/callbacks/optimizer_monitor.py`, and DecoupledAdamW in `optim/decoupled_weight_decay.py`) looks
after the update, Levanter 1.2 (`levanter/callbacks/watch.py`, `analysis/tree_stats.py` and `tracker/histogram.py`)
inside the step. One wants an older torch and the other JAX, so that their definitions are computed here, of the same
training; docs/compared.md says how their own code compares.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from metric_probes import watch
from torch import nn

from wandb_gradwatch.metrics import OptimizerState, Updates

LR, EPS, BETAS, STEPS = 1e-2, 1e-6, (0.9, 0.99), 5
Series = dict[str, np.ndarray]  # by their key: [S]


def batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, 9, 4, generator=torch.Generator().manual_seed(1)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@functools.cache
def theirs(decay: float) -> Series:
    """Run AdamW in float64, and return the numbers that Composer and Levanter log at every step, under their keys."""
    model = build().double()
    found: dict[str, list[float]] = {}
    m = {name: np.zeros(p.shape) for name, p in model.named_parameters()}
    v = copy.deepcopy(m)

    def log(key: str, value: Any) -> None:
        found.setdefault(key, []).append(float(value))

    for step, batch in enumerate(batches(), 1):
        model.zero_grad()
        model(batch.double()).square().mean().backward()
        norms = []
        for name, p in model.named_parameters():
            g, before = p.grad.numpy(), p.detach().numpy().copy()
            m[name] = BETAS[0] * m[name] + (1 - BETAS[0]) * g
            v[name] = BETAS[1] * v[name] + (1 - BETAS[1]) * g**2
            direction = m[name] / (1 - BETAS[0] ** step) / (np.sqrt(v[name] / (1 - BETAS[1] ** step)) + EPS)
            after = before - LR * direction - LR * decay * before
            with torch.no_grad():
                p.copy_(torch.from_numpy(after))
            norms.append(np.linalg.norm(g))
            log(f"l2_norm/grad/{name}", norms[-1])
            log(f"l2_norm/moment/{name}", np.linalg.norm(m[name]))
            log(f"l2_norm/param/{name}", np.linalg.norm(after))
            log(
                f"l2_norm/update/{name}", np.linalg.norm(LR * direction - LR * decay * after)
            )  # with their sign of the weight decay
            log(f"grad/norm/{name}", norms[-1])
            log(f"params/norm/{name}", np.linalg.norm(before))
            log(f"updates/norm/{name}", np.linalg.norm(after - before))
            log(f"opt_state/mu/norm/{name}", np.linalg.norm(m[name]))
            log(f"opt_state/nu/norm/{name}", np.linalg.norm(v[name]))
            for statistic, value in (("min", g.min()), ("max", g.max()), ("sum", g.sum()), ("num", g.size)):
                log(f"grad/hist/{name}.{statistic}", value)
            log(f"grad/hist/{name}.sum_squares", np.sum(g**2))
        for key in ("l2_norm/grad/global", "grad/norm/total"):
            log(key, np.sqrt(np.sum(np.square(norms))))
    return {key: np.array(series) for key, series in found.items()}


@functools.cache
def ours(decay: float) -> Series:
    """Watch the same training, and return our number for each of their keys."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=decay)
    watcher, sink = watch(model, [Updates(), OptimizerState()])
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    watcher.remove()
    merged = sink.merged()
    assert merged is not None
    found: Series = {"l2_norm/grad/global": merged.total_grad_norm, "grad/norm/total": merged.total_grad_norm}
    for place, name in enumerate(merged.names):
        state = {key: merged.metrics[f"optimizer_state/{name}/{key}"] for key in ("exp_avg_norm", "exp_avg_sq_norm")}
        found |= {
            f"l2_norm/grad/{name}": merged.grad_norm_clipped[:, place],
            f"l2_norm/moment/{name}": state["exp_avg_norm"],
            f"l2_norm/param/{name}": np.append(
                merged.param_norm[1:, place], np.nan
            ),  # their number is taken after the update
            f"l2_norm/update/{name}": merged.metrics[f"update/{name}/norm"],
            f"grad/norm/{name}": merged.grad_norm[:, place],
            f"params/norm/{name}": merged.param_norm[:, place],
            f"updates/norm/{name}": merged.metrics[f"update/{name}/norm"],
            f"opt_state/mu/norm/{name}": state["exp_avg_norm"],
            f"opt_state/nu/norm/{name}": state["exp_avg_sq_norm"],
            f"grad/hist/{name}.min": merged.grad_min[:, place],
            f"grad/hist/{name}.max": merged.grad_max[:, place],
            f"grad/hist/{name}.sum": merged.grad_mean[:, place] * merged.num_elements[:, place],
            f"grad/hist/{name}.num": merged.num_elements[:, place],
            f"grad/hist/{name}.sum_squares": merged.grad_norm[:, place] ** 2,
        }
    return found


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_every_number_of_composer_and_levanter_is_there_and_the_same(decay: float) -> None:
    expected, found = theirs(decay), ours(decay)
    assert set(found) == set(expected)
    for key, series in expected.items():
        if decay and key.startswith("l2_norm/update/"):
            continue
        there = ~np.isnan(found[key])
        assert there.sum() >= STEPS - 1
        np.testing.assert_allclose(found[key][there], series[there], rtol=5e-4, atol=1e-7, err_msg=key)


def test_composers_update_with_weight_decay_is_another_than_what_the_parameter_moved() -> None:
    """Composer subtracts the decay from the step, although both move the parameter alike. Ours is the movement."""
    key = "l2_norm/update/0.weight"
    moved = theirs(0.1)["updates/norm/0.weight"]
    np.testing.assert_allclose(ours(0.1)[key], moved, rtol=5e-4)
    assert (np.abs(theirs(0.1)[key] / moved - 1) > 1e-3).all()
