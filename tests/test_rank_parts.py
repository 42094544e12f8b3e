"""Parameters that only some ranks have, such as experts: all are counted, and no guard decides for one rank alone."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import ranks
from rank_programs import expected

pytestmark = pytest.mark.distributed

CALLS = [
    ("experts", {}),
    ("experts", {"bad": True}),
    ("unlike_before_ddp", {"steps": 3}),
    ("guarded_parts", {}),
    ("guarded_stages", {"stage_first": False}),
    ("guarded_stages", {"stage_first": True}),
]
REFUSAL = "guard= does not work where ranks train different parameters"


@functools.cache
def results():
    return dict(zip(map(repr, CALLS), ranks.run("part_programs", CALLS, 2), strict=True))


def results_of(function, **arguments):
    return results()[repr((function, arguments))]


def test_experts_of_one_name_and_shape_are_all_in_the_norm():
    for found in results_of("experts"):
        assert found["names"] == [
            *("trunk.weight", "trunk.bias", "expert.weight", "expert.bias"),
            *("rank1.expert.weight", "rank1.expert.bias"),
        ]
        np.testing.assert_allclose(found["total"], found["totals"], rtol=1e-5)
        assert found["num_elements"].sum(axis=1).tolist() == [60] * 4  # three layers of 16 + 4
        assert sum("each rank's are counted, as those of experts" in text for text in found["said"]) == 1


def test_the_rank_of_an_expert_with_nan_is_named_at_its_own_step():
    found = results_of("experts", bad=True)[0]
    [text] = [text for text in found["alerts"] if "NaN in the gradient of 1 of 6 parameters" in text]
    assert text.startswith("Step 3:")
    assert "on rank 1" in text
    assert found["first_bad_rank"][2] == 1


def test_replicas_that_differ_until_ddp_copies_them_are_counted_once():
    for found in results_of("unlike_before_ddp", steps=3):
        np.testing.assert_allclose(found["grad_norm"], expected(2, 3)["grad_norm"], rtol=2e-5)
        assert found["said"] == []


def test_no_rank_skips_a_step_of_its_own_part_alone():
    """Unguarded, rank 0 makes two steps from 1 by 1, and rank 1 the step with NaN."""
    first, second = results_of("guarded_parts")
    assert first["value"] == -1.0
    assert np.isnan(second["value"])
    for found in (first, second):
        assert sum("training goes on, unguarded: " + REFUSAL in text for text in found["said"]) == 1


@pytest.mark.parametrize("stage_first", [False, True])
def test_a_guard_of_pipeline_stages_is_refused_on_every_rank(stage_first):
    for found in results_of("guarded_stages", stage_first=stage_first):
        assert sum(REFUSAL in text for text in found["said"]) == 1
