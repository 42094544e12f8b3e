"""Replicas that must agree: what ranks apply and hold is compared by default; nothing is said if they are to differ."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ranks
import torch.distributed as dist

from wandb_gradwatch._judgement.causes import CAUSES
from wandb_gradwatch._pipeline.replicas import Collectives, apart, compare

# kind, ranks -> cause, rank, level, first step, and the last step at which it may have been found
FAULTS: dict[tuple[str, int], tuple[str, int | None, str, int, int]] = {
    ("DDP bypassed", 2): ("not_averaged", None, "ERROR", 1, 11),
    ("scaled after DDP", 2): ("rank_gradient", None, "ERROR", 4, 25),
    ("scaled after DDP", 3): ("rank_gradient", 1, "ERROR", 4, 25),
    ("scaled after an average by hand", 2): ("rank_gradient", None, "ERROR", 4, 25),
    ("scaled after an average by hand", 3): ("rank_gradient", 1, "ERROR", 4, 25),
    ("overwritten", 2): ("replica_changed", None, "ERROR", 5, 25),
    ("overwritten", 3): ("replica_changed", 1, "ERROR", 5, 25),
    ("loaded on one rank", 2): ("replicas_began_apart", None, "ERROR", 1, 11),
    ("loaded on one rank", 3): ("replicas_began_apart", 1, "ERROR", 1, 11),
    ("seeds, averaged by hand", 2): ("replicas_began_apart", None, "ERROR", 1, 11),
    ("nothing averages", 2): ("not_averaged", None, "WARN", 1, 200),
    ("nothing averages", 3): ("not_averaged", None, "WARN", 1, 200),
}
ON_PURPOSE = [
    "DDP",
    "averaged by hand",
    "DDP, clipped",
    "experts beside DDP",
    "experts beside an average by hand",
    "experts and clipping",
    "seeds",
    "rates",
    "local SGD",
    "DiLoCo",
    "averager of torch",
    "averager of torch, with DDP",
]


@functools.cache
def on_ranks(world: int) -> dict[str, list[Any]]:
    kinds = [kind for kind, of in FAULTS if of == world] + ON_PURPOSE * (world == 2)
    found = ranks.run("replica_programs", [("trained", {"kind": kind}) for kind in kinds], world)
    return dict(zip(kinds, found, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "world"), list(FAULTS), ids=str)
def test_a_fault_of_replicas_is_told_with_its_cause_and_rank(kind: str, world: int) -> None:
    cause, rank, level, first_step, latest = FAULTS[kind, world]
    [incident] = on_ranks(world)[kind][0]
    assert (incident["kind"], incident["cause"], incident["rival"]) == ("ranks_disagree", cause, "")
    assert (incident["rank"], incident["level"], incident["first_step"]) == (rank, level, first_step)
    assert incident["found_step"] <= latest
    assert incident["cause_text"] == CAUSES[cause].text_of(rank)
    assert (str(rank) in incident["cause_text"]) == (rank is not None and cause != "replicas_began_apart")


@pytest.mark.distributed
def test_the_layers_are_named_of_which_gradients_differ() -> None:
    [incident] = on_ranks(3)["scaled after an average by hand"][0]
    assert [layer["name"] for layer in incident["layers"]] == ["1.weight", "1.bias"]


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ON_PURPOSE)
def test_ranks_that_differ_on_purpose_are_left_alone(kind: str) -> None:
    assert on_ranks(2)[kind] == [[], []]


def header(step: int, rate: float = 0.1, logs: float = 0.0) -> list[float]:
    return [float(step), rate, logs]


def sums(left: list[float], received: list[float], parameters: list[float]) -> list[list[float]]:
    return [left, received, parameters]


def test_ranks_are_singled_out_only_beside_most_others() -> None:
    assert apart(np.array([[1.0], [1.0], [2.0]])).ranks == (2,)
    assert apart(np.array([[1.0], [2.0]])).ranks == ()
    assert apart(np.array([[1.0], [1.0], [2.0], [2.0]])).ranks == ()
    assert apart(np.array([[1.0, 1.0], [1.0, 3.0], [1.0, 1.0], [2.0, 1.0], [1.0, 1.0]])).ranks == (1, 3)
    assert apart(np.array([[1.0, 1.0], [1.0, 2.0]])).groups.tolist() == [False, True]


def test_rounding_and_what_is_not_known_are_no_difference() -> None:
    found = apart(np.array([[1.0, np.nan, 0.0], [1.0 + 1e-9, 2.0, 0.0], [1.0, 3.0, 0.0]]))
    assert not found.groups.any()
    assert found.ranks == ()


def test_steps_are_counted_and_the_first_sample_is_remembered() -> None:
    same, other = sums([1.0], [1.0], [4.0]), sums([2.0], [2.0], [4.0])
    apart_ = sums([1.0], [1.0], [5.0])
    first = compare(np.array([header(1), header(1)]), np.array([same, apart_]), None, is_first=True)
    assert (first.begun, first.begun_averaged, first.num_different) == (1.0, 1.0, 0)
    second = compare(np.array([header(2), header(2)]), np.array([same, other]), first, is_first=False)
    third = compare(np.array([header(5), header(5)]), np.array([same, other]), second, is_first=False)
    assert (third.begun, third.num_different, third.different_since, third.step) == (1.0, 2, 2, 5)
    fourth = compare(np.array([header(6), header(6)]), np.array([same, same]), third, is_first=False)
    assert (fourth.num_different, fourth.num_compared, fourth.begun) == (2, 4, 1.0)


def test_rates_and_runs_of_their_own_are_seen() -> None:
    same = sums([1.0], [1.0], [4.0])
    found = compare(np.array([header(1, 0.1, 1), header(1, 0.2, 1)]), np.array([same, same]), None, is_first=True)
    assert found.have_own_rates
    assert found.have_own_runs
    later = compare(np.array([header(2, 0.1, 1), header(2, 0.1, 0)]), np.array([same, same]), found, is_first=False)
    assert later.have_own_rates
    assert not later.have_own_runs


def test_a_backend_that_does_not_count_its_collectives_rules_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def _get_sequence_number_for_group(self) -> int:
            raise RuntimeError("Backend mpi does not support sequence numbers")

    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map={Group(): None}))
    collectives = Collectives()
    collectives.see(1)
    assert collectives.are_uneven
