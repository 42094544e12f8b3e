"""Trainings under every engine of benchmarks/engines.py that needs no other package, compared with one process."""

from __future__ import annotations

import functools

import pytest
import ranks

from benchmarks.engines import REGIMES, TOLERANCE

pytestmark = pytest.mark.distributed

QUICK = (
    "FSDP1",
    "tensor parallel: embedding, columns, rows",
    "tensor parallel, embedding and head tied",
    "tensor and sequence parallel",
    "pipeline, ScheduleGPipe",
    "pipeline, ScheduleZBVZeroBubble",
)
# Refused, as in test_refused_engines.py; and the pipeline of FSDP2 modules, whose hooks run outside of a backward.
LEFT_OUT = ("DeepSpeed", "Megatron", "pipeline of FSDP2")
SLOW = tuple(name for name in REGIMES if name not in QUICK and not name.startswith(LEFT_OUT))


@functools.cache
def measured(some: tuple[str, ...], world: int) -> dict[str, list[dict]]:
    names = [name for name in some if REGIMES[name][1] == world]
    results = ranks.run("benchmarks.engines", [("measured", {"name": name}) for name in names], world)
    return dict(zip(names, results, strict=True))


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_what_is_measured_is_what_one_process_with_all_batches_has(name):
    for found in measured(QUICK if name in QUICK else SLOW, REGIMES[name][1])[name]:
        assert found["outcome"] == "measured"
        assert found["said"] == []
        assert found["norm"] < TOLERANCE
        assert found["received"] < TOLERANCE
        assert found["elements"]
        assert found["clip_ratio"] == 1
        assert found["steps"] == [1, 2, 3, 4]
        assert found["untouched"]
        assert found["rank_of_nan"]
