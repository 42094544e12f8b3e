"""All trainings of the zoo by name, and those of them on which thresholds may be chosen. They are data: `sets/*.json`.

A set says what it is for, when it was written, and what of it nobody may tune on. Of locked trainings and faults, and
of all sealed ones, only totals are ever shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .loop import Loop
from .mutations import Mutation, mutate
from .specification import training

SETS: Final = [
    json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(__file__).parent.glob("sets/*.json"))
]

_ROWS: Final = {row["name"]: row for one in SETS for row in one["trainings"]}
TUNING_SEEDS: Final = (0,)
SCORING_SEEDS: Final = (1,)


@dataclass(frozen=True)
class Fault:
    """A fault in healthy trainings.

    Args:
        name: a short description.
        mutations: what makes the fault.
        first_bad: the first step of the loop that is wrong.
        causes: the right causes, identifiers of `causes.KNOWN_CAUSES`; the first one is the best.
        decidable: whether gradients, parameters and loss can tell it from a healthy training: labels that are shifted
            by mistake look like other classes on purpose, and what trains as well as without the fault is none.
    """

    name: str
    mutations: list[Mutation]
    first_bad: int
    causes: tuple[str, ...]
    decidable: bool = True


@dataclass(frozen=True)
class Case:
    """One training: a healthy one, or a healthy one with a fault.

    Args:
        family: the kind of training or fault, or which part of a set it belongs to.
        base: the name of the healthy training.
        layer: where the fault sits; "" if in no layer, or in no one of them.
        locked: of which only totals are shown; sealed: which is run once, when the judgement is finished.
        kept_out: on which no threshold is chosen.
    """

    name: str
    family: str
    base: str
    fault: Fault | None = None
    layer: str = ""
    locked: bool = False
    sealed: bool = False
    kept_out: bool = False

    @property
    def first_bad(self) -> int | None:
        return None if self.fault is None else self.fault.first_bad


def build(case: Case) -> Loop:
    """Build the training."""
    loop = training(_ROWS[case.base])
    if case.fault is not None:
        mutate(loop, case.layer, case.fault.mutations)
    return loop


def _cases() -> Iterator[Case]:
    for one in SETS:
        for row in one["trainings"]:
            yield Case(row["name"], base=row["name"], **_place(one, row, "trainings"))
        yield from (case for row in one["faults"] for case in _faulty(one, row))


def _faulty(one: dict[str, Any], row: dict[str, Any]) -> Iterator[Case]:
    fault = Fault(row["name"], row["do"], row["step"], tuple(row["cause"]), row.get("decidable", True))
    for base, layer in row["in"].items():
        yield Case(f"{fault.name} | {base}", base=base, fault=fault, layer=layer, **_place(one, row, "faults"))


def _place(one: dict[str, Any], row: dict[str, Any], kind: str) -> dict[str, Any]:
    """The family of a row, which is its own or its part of the set, and who may see it."""
    locked, parts = row.get("locked", False), {other.get("locked", False) for other in one["faults"]}
    part = f", {'locked' if locked else 'open'}" if len(parts) > 1 else ""
    family = row.get("family", f"{one['set']}{part} {kind}")
    kept_out = one["kept_out"] if isinstance(one["kept_out"], bool) else family in one["kept_out"][kind]
    return {"family": family, "locked": locked, "sealed": one.get("sealed", False), "kept_out": locked or kept_out}


CASES: Final = {case.name: case for case in _cases()}
LOCKED: Final = frozenset(case.family for case in CASES.values() if case.locked)
SEALED_FAMILIES: Final = frozenset(case.family for case in CASES.values() if case.sealed)


def chosen(half: str) -> list[tuple[Case, int]]:
    """Return the (case, seed) of a half.

    "tune" has none of the families that are kept out; "score" has all but the sealed ones, "all" those as well.
    """
    if half == "tune":
        return [(case, seed) for case in CASES.values() if not case.kept_out for seed in TUNING_SEEDS]
    cases = [case for case in CASES.values() if half == "all" or not case.sealed]
    return [(case, seed) for case in cases for seed in SCORING_SEEDS]
