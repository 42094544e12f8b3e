"""Trainings under every engine of benchmarks/engines.py, compared with one process."""

from __future__ import annotations

import functools
import importlib.util

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
# Averages by hand, before which each rank's own gradient is measured if nothing clips; and what needs a GPU.
LEFT_OUT = ("gradients averaged by hand", "context parallel")
# Each rank has gradients of its own, which a message says: those of rank 0 are compared with one process.
OWN = ("experts", "PostLocalSGD", "local SGD")
# What is not installed with the other tools for development: .ci/run installs it apart, and runs these alone.
APART = {"DeepSpeed": "deepspeed", "Megatron-core": "megatron"}
OF_ENGINES = tuple(name for name in REGIMES if name.startswith(tuple(APART)))
SLOW = tuple(name for name in REGIMES if name not in QUICK and not name.startswith((*APART, *LEFT_OUT)))


@functools.cache
def measured(some: tuple[str, ...], world: int) -> dict[str, list[dict]]:
    names = [name for name in some if REGIMES[name][1] == world]
    results = ranks.run("benchmarks.engines", [("measured", {"name": name}) for name in names], world)
    return dict(zip(names, results, strict=True))


def check(every_rank: list[dict]) -> None:
    for found in every_rank:
        assert found["outcome"] == "measured"
        tolerance = TOLERANCE[found["precision"]]
        assert max(found["norm"], found["per layer"], found["after clipping"]) < tolerance
        assert found["elements"]
        assert found["histogram"] <= max(tolerance, 1e-3)
        assert found["clip_ratio"] == 1
        assert found["steps"] == [1, 2, 3, 4]
        assert found["untouched"]


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_what_is_measured_is_what_one_process_with_all_batches_has(name):
    every_rank = measured(QUICK if name in QUICK else (name,), REGIMES[name][1])[name]
    if name.startswith(OWN):
        check(every_rank[:1])
        return
    check(every_rank)
    for found in every_rank:
        assert found["said"] == []
        assert found["rank of NaN"] == (
            "FSDP2" not in name
        )  # which averages: the rank that holds it need not have made it
        assert found["layer of NaN"]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ENGINES)
def test_under_engines_with_memory_of_their_own_too(name):
    module = APART[name.partition(",")[0]]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed; .ci/run installs it apart")
    every_rank = measured((name,), REGIMES[name][1])[name]  # in processes of its own: engines keep global state
    check(every_rank)
    assert not any(found["said"] for found in every_rank)
    assert all(found["layer of NaN"] or found["skipped"] for found in every_rank)
