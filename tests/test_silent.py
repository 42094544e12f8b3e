"""The silent faults of benchmarks/silent.py: eight of nine are told soon, with the right cause; repaired, none is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import ranks

from benchmarks.silent import FAULTS, SOON

MISSED = {"stackoverflow-67180955"}  # the same batch four times is not long enough to be told from a healthy training


@functools.cache
def results(world: int) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """What rank 0 is told of each fault, and of its repaired twin."""
    cases = [(name, is_faulty) for name, fault in FAULTS.items() for is_faulty in (True, False) if fault.world == world]
    calls = [("told", {"name": name, "is_faulty": is_faulty}) for name, is_faulty in cases]
    return dict(zip(cases, [found[0] for found in ranks.run("benchmarks.silent", calls, world)], strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(FAULTS.keys() - MISSED))
def test_a_silent_fault_is_told_soon_with_its_cause(name: str) -> None:
    fault = FAULTS[name]
    incident, *_ = results(fault.world)[name, True]
    assert incident["cause"] in fault.causes
    assert fault.first_step <= incident["found_step"] <= fault.first_step + SOON


@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_nothing_is_told_of_a_repaired_training(name: str) -> None:
    assert results(FAULTS[name].world)[name, False] == []


def test_eight_of_nine_are_found() -> None:
    assert len(FAULTS) - len(MISSED) == 8
