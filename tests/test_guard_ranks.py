"""Ranks decide alike: a poison that only one of them sees is withheld on all, and nothing else is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import ranks
from guard_rank_programs import OPTIMIZERS
from rank_programs import expected

pytestmark = pytest.mark.distributed

STEPS = 24
POISON = {15: 1e5, 19: math.nan}
KINDS = [
    *(("fsdp2", name) for name in OPTIMIZERS),
    ("hsdp", "sgd"),
    ("tensor parallel", "sgd"),
    ("ddp", "adamw fused"),
]


@pytest.fixture(scope="module")
def results():
    calls = []
    for kind, optimizer in KINDS:
        common = {"kind": kind, "optimizer": optimizer, "steps": STEPS}
        calls += [("guarded", {**common, "poison": POISON, "guard": guard}) for guard in (True, False)]
    calls += [("one_bad_rank", {}), ("refused", {})]
    return ranks.run("guard_rank_programs", calls, 2)


@pytest.mark.parametrize("case", range(len(KINDS)), ids=map(str, KINDS))
def test_a_poison_on_one_rank_is_withheld_on_all(results, case):
    guarded, without = results[2 * case : 2 * case + 2]
    for rank in range(2):
        assert guarded[rank]["num_skipped"] == 2
        for with_guard, left_out in zip(guarded[rank]["parameters"], without[rank]["parameters"], strict=True):
            np.testing.assert_array_equal(with_guard, left_out)


@pytest.mark.parametrize("case", range(len(KINDS)), ids=map(str, KINDS))
def test_the_norm_that_is_judged_is_that_of_the_whole_model(results, case):
    """The same on both ranks, bit for bit; and FSDP2's first is known: no optimizer has stepped before it."""
    first, second = (result["norms"] for result in results[2 * case])
    assert first == second
    if KINDS[case][0] in ("fsdp2", "hsdp"):
        whole = expected(2, 1)["grad_norm"]
        assert first[0] == pytest.approx(math.sqrt((whole[0] ** 2).sum()), rel=1e-6)


def test_a_rank_with_broken_gradients_is_named_first(results):
    assert results[-2][0][0].startswith("one bad rank (rank 1 was the first with NaN or Inf in all of 3 bad samples)")


def test_what_ranks_could_not_agree_on_is_refused(results):
    for rank in range(2):
        fsdp1, function = results[-1][rank]
        assert "does not work with FullyShardedDataParallel" in fsdp1
        assert "was given a function" in function
