"""Each way to train, on one process, under DDP and FSDP2: norms equal those of one process in float64."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import ranks
from matrix_programs import CLIP, KINDS, MICROS, RATE, SPREADS, case
from rank_programs import LEARNING_RATE, expected

STEPS = 3


@functools.cache
def on_two_ranks():
    calls = [("case", {"spread": spread, "kind": kind, "steps": STEPS}) for spread in SPREADS[1:] for kind in KINDS]
    results = ranks.run("matrix_programs", calls, 2)
    return {(call[1]["spread"], call[1]["kind"]): result[0] for call, result in zip(calls, results, strict=True)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "spread", [pytest.param(spread, marks=[] if spread == "single" else pytest.mark.distributed) for spread in SPREADS]
)
def test_matrix(spread, kind):
    if spread == "single":
        world, result = 1, case(0, 1, spread=spread, kind=kind, steps=STEPS)
    else:
        world, result = 2, on_two_ranks()[spread, kind]
    rate = RATE.get(kind, LEARNING_RATE)
    truth = expected(world, STEPS, micros=MICROS.get(kind, 1), clip=CLIP.get(kind), learning_rate=rate)
    assert result["steps"] == [1, 2, 3]
    assert result["names"] == ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    np.testing.assert_allclose(result["grad_norm"], truth["grad_norm"], rtol=5e-5)
    np.testing.assert_allclose(result["grad_norm_clipped"], truth["grad_norm_clipped"], rtol=5e-5)
    total = np.sqrt((truth["grad_norm"] ** 2).sum(axis=1))
    np.testing.assert_allclose(result["total"], total, rtol=5e-5)
    assert result["clip_ratio"] == (1 if kind in CLIP else 0)
