"""What a watched training asks of other ranks: no collective, and of the store as much on many ranks as on two."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import ranks

STEPS = 12
KINDS = ("ddp", "stages")


@functools.cache
def results(world: int) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    cases = [(kind, is_watched) for kind in KINDS for is_watched in (True, False)]
    calls = [("trained", {"kind": kind, "is_watched": is_watched, "steps": STEPS}) for kind, is_watched in cases]
    return dict(zip(cases, ranks.run("traffic_programs", calls, world), strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_a_watched_training_dispatches_the_same_collectives(kind: str) -> None:
    for watched, unwatched in zip(results(2)[kind, True], results(2)[kind, False], strict=True):
        assert watched["collectives"] == unwatched["collectives"]
    assert (results(2)[kind, True][0]["collectives"] > 0) == (kind == "ddp")


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_the_training_asks_the_store_no_more_often_on_more_ranks(kind: str) -> None:
    for world in (2, 4):
        for result in results(world)[kind, True]:
            first, *later = result["requests"]
            assert first <= 16
            assert max(later) <= 12  # a plan is exchanged, or the merge begins, at a flush
            assert sum(later) <= 6 * STEPS
    assert all(not any(result["requests"]) for result in results(2)[kind, False])


@pytest.mark.distributed
def test_between_flushes_replicas_ask_nothing_of_the_store() -> None:
    for result in results(4)["ddp", True]:
        _, *later = result["requests"]
        assert later.count(0) >= STEPS // 2 - 1, "every second step ends a window"
