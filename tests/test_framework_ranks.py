"""Hugging Face Trainer and Accelerate on two ranks: statistics of the whole batch, and equal decisions on both."""

from __future__ import annotations

import functools
import math
import tempfile
from typing import Any

import numpy as np
import pytest
import ranks
from rank_frameworks import BAD, CLIP, STEPS

pytestmark = pytest.mark.distributed
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

RESUMED_AT = 5


@functools.cache
def results() -> dict[str, list[Any]]:
    """One start of the ranks for all trainings: starting them takes most of the time."""
    with tempfile.TemporaryDirectory() as folder:
        calls: list[ranks.Call] = [
            ("hugging_face", {"folder": folder}),
            ("hugging_face", {"folder": folder, "resume": RESUMED_AT}),
            ("accelerate", {}),
        ]
        through, resumed, accelerate = ranks.run("rank_frameworks", calls, world=2)
    return {"hugging_face": through, "resumed": resumed, "accelerate": accelerate}


def true_norms(of_ranks: list[Any]) -> list[float]:
    """DDP averages: the gradient of a step is the mean of the ranks' own, as float64 computes each."""
    looks = zip(*(of_rank["gradients"] for of_rank in of_ranks), strict=True)
    return [
        math.sqrt(sum(float((np.mean(gradients, axis=0) ** 2).sum()) for gradients in zip(*look, strict=True)))
        for look in looks
    ]


@pytest.mark.parametrize("framework", ["hugging_face", "accelerate"])
def test_two_ranks_see_the_averaged_gradient(framework: str) -> None:
    first, second = results()[framework]
    norms = true_norms([first, second])
    assert first["steps"] == list(range(1, STEPS + 1))
    assert first["norms"] == pytest.approx(norms, rel=1e-5)
    assert second["steps"] == first["steps"]  # sinks= was given on both ranks
    assert second["norms"] == first["norms"]
    received = [min(norm, CLIP) for norm in norms]
    assert first["received"] == pytest.approx(received, rel=1e-4)


@pytest.mark.parametrize("framework", ["hugging_face", "accelerate"])
def test_a_batch_that_is_bad_on_one_rank_is_left_out_on_both(framework: str) -> None:
    first, second = results()[framework]
    norms = true_norms([first, second])
    assert norms[BAD] > 100 * max(norms[:BAD])
    assert first["skipped"] == [float(step == BAD) for step in range(STEPS)]
    for ours, theirs in zip(first["weights"], second["weights"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_trainers_log_has_the_numbers_on_both_ranks_and_one_alert() -> None:
    first, second = results()["hugging_face"]
    assert first["logged"] == second["logged"]
    assert [step for step, _ in first["logged"]] == list(range(1, STEPS + 1))
    assert [norm for _, norm in first["logged"]] == pytest.approx(true_norms([first, second]), rel=1e-5)
    assert first["alerts"] == ["Exploding gradient"]


def test_a_resumed_trainer_decides_alike_on_both_ranks() -> None:
    """Every rank reads what rank 0 has saved: without what was usual, the bad step would not be left out."""
    through, (first, second) = results()["hugging_face"], results()["resumed"]
    assert first["steps"] == list(range(RESUMED_AT + 1, STEPS + 1))
    assert first["logged"] == through[0]["logged"]
    for ours, theirs, whole in zip(first["weights"], second["weights"], through[0]["weights"], strict=True):
        np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(ours, whole)
