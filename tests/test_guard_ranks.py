"""Ranks decide alike: an update that is bad on one rank is skipped on all ranks, and no other is."""

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
KINDS = [*(("fsdp2", name) for name in OPTIMIZERS), ("hsdp", "sgd"), ("tensor parallel", "sgd"), ("ddp", "adamw fused")]


# Where one rank's monitor fails: before or after its vote on a step.
PLACES = {
    "after the backward": "_sampler._sample.fresh.measure_present",
    "before the vote": "_parts.guard._sums",
    "after the vote": "_parts.guard._guard.withholds",
    "after the step": "_parts.clock.step_ended",
}


@pytest.fixture(scope="module")
def results():
    calls = []
    for kind, optimizer in KINDS:
        common = {"kind": kind, "optimizer": optimizer, "steps": STEPS}
        calls += [("guarded", {**common, "poison": POISON, "guard": guard}) for guard in (True, False)]
    calls += [("one_bad_rank", {}), ("refused", {})]
    calls += [
        ("failing", {"kind": "fsdp2", "optimizer": optimizer, "where": where})
        for optimizer in OPTIMIZERS
        for where in (None, *PLACES.values())
    ]
    calls += [("over_budget", {})]
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
    """The norms are bitwise equal on both ranks. FSDP2's first norm is that of the initial parameters, in float64."""
    first, second = (result["norms"] for result in results[2 * case])
    assert first == second
    if KINDS[case][0] in ("fsdp2", "hsdp"):
        whole = expected(2, 1)["grad_norm"]
        assert first[0] == pytest.approx(math.sqrt((whole[0] ** 2).sum()), rel=1e-6)


def test_three_bad_steps_are_one_incident_and_no_rank_is_blamed_for_an_average(results):
    assert results[2 * len(KINDS)][0] == [None]


@pytest.mark.parametrize("optimizer", range(len(OPTIMIZERS)), ids=OPTIMIZERS)
@pytest.mark.parametrize("place", range(len(PLACES)), ids=PLACES)
def test_a_rank_whose_monitor_fails_ends_the_guard_on_all_and_nobody_waits(results, optimizer, place):
    of_optimizer = results[2 * len(KINDS) + 2 + optimizer * (1 + len(PLACES)) :]
    unguarded, failed = of_optimizer[0], of_optimizer[1 + place]
    for rank in range(2):  # the bad update after the failure is applied on both ranks
        for with_guard, without in zip(failed[rank]["parameters"], unguarded[rank]["parameters"], strict=True):
            np.testing.assert_array_equal(with_guard, without)
    assert any("has failed and stopped watching; training goes on, unguarded" in text for text in failed[1]["said"])
    assert [text for text in failed[0]["said"] if "the monitor of another rank has failed" in text] != []
    assert not any("stopped watching" in text for text in failed[0]["said"])


def test_with_a_budget_ranks_that_hold_shards_sample_the_same_steps(results):
    # The first ten steps, and step 20, before rank 0's plan arrives: a millionth does not earn a sample by step 24.
    for rank in range(2):
        assert results[-1][rank]["steps"][:10] == list(range(1, 11))
        assert results[-1][rank]["steps"] == results[-1][0]["steps"]
        assert results[-1][rank]["steps"][10:] == [20]
        assert not any("no longer merged" in text for text in results[-1][rank]["said"])


def test_what_ranks_could_not_agree_on_is_refused(results):
    for rank in range(2):
        fsdp1, function = results[2 * len(KINDS) + 1][rank]
        assert "does not work with FullyShardedDataParallel" in fsdp1
        assert "was given a function" in function


@pytest.fixture(scope="module")
def replays():
    """Return both ranks' results by kind of parallelism, with and without a guard."""
    calls = [(kind, guard) for kind in ("ddp", "fsdp2") for guard in ("skip", None)]
    found = ranks.run("guard_rank_programs", [("replayed", {"kind": kind, "guard": guard}) for kind, guard in calls], 2)
    return dict(zip(calls, found, strict=True))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_training_with_a_step_run_again_is_one_that_has_left_it_out_by_hand(replays, kind):
    for guarded, by_hand in zip(replays[kind, "skip"], replays[kind, None], strict=True):
        for with_guard, without in zip(guarded["parameters"], by_hand["parameters"], strict=True):
            np.testing.assert_array_equal(with_guard, without)


def test_what_one_rank_has_found_in_its_part_of_the_batch_is_told_on_rank_0(replays):
    first, second = replays["ddp", "skip"]
    assert [(title, step) for title, step, _ in first["alerts"]] == [("NaN gradient", 3), ("First bad operation", 3)]
    assert [(title, step) for title, step, _ in second["alerts"]] == [("NaN gradient", 3)]
    told, own = first["notes"][3]["first_bad_operation"], second["notes"][3]["first_bad_operation"]
    assert own.startswith("aten.log in 2, guard_rank_programs.py:")
    assert own.splitlines()[0].rstrip(".") in second["alerts"][0][2]
    assert told == f"{own}\nOn rank 1, in its part of the batch."
    assert own.splitlines()[0] in first["alerts"][1][2]


def test_ranks_with_shards_run_no_step_again_and_say_so_once(replays):
    for of_rank in replays["fsdp2", "skip"]:
        assert [text for text in of_rank["said"] if "not run again" in text] == [
            "wandb_gradwatch: a bad step is not run again: the forward of this model waits for other ranks"
        ]
        assert of_rank["notes"].get(3, {}).get("first_bad_operation") is None
