"""All trainings of the zoo by name, and those of them on which thresholds may be chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .another_faults import faults
from .another_trainings import half
from .blind_faults import BLIND_FAULTS
from .blind_trainings import BLIND
from .faults import FAULTS, Fault
from .fifth_faults import fifth_faults
from .fifth_trainings import fifth
from .fourth_faults import fourth_faults
from .fourth_trainings import fourth
from .fresh_faults import FRESH_FAULTS
from .fresh_trainings import FRESH
from .healthy_others import OTHERS
from .healthy_recipes import RECIPES
from .healthy_supervised import SUPERVISED
from .loop import Loop
from .sealed import SEALED_FAULTS
from .sealed_trainings import SEALED
from .sixth_faults import sixth_faults
from .sixth_trainings import sixth
from .third_faults import third_faults
from .third_trainings import third
from .unseen import UNSEEN, UNSEEN_FAULTS

# Each first one of a pair, and every second one of the third, fourth, fifth and sixth sets, is opened after its first run, to
# learn from. Of the others, and of all blind and sealed ones, only totals are ever shown.
SEALED_FAMILIES: Final = frozenset({"sealed trainings", "sealed faults"})  # run once, when the rules are finished
LOCKED: Final = frozenset(
    {
        "locked trainings",
        "locked faults",
        "locked blind trainings",
        "locked blind faults",
        "third locked trainings",
        "third locked faults",
        "fourth locked trainings",
        "fourth locked faults",
        "fifth locked trainings",
        "fifth locked faults",
        "sixth locked trainings",
        "sixth locked faults",
        *SEALED_FAMILIES,
    }
)
_ANOTHER: Final = {"another trainings": half(0), "locked trainings": half(1)}
_ANOTHER_FAULTS: Final = [*faults("another faults", 0), *faults("locked faults", 1)]
_THIRD: Final = {"third trainings": third(0), "third locked trainings": third(1)}
_FOURTH: Final = {"fourth trainings": fourth(0), "fourth locked trainings": fourth(1)}
_FIFTH: Final = {"fifth trainings": fifth(0), "fifth locked trainings": fifth(1)}
_FIFTH_FAULTS: Final = [*fifth_faults("fifth faults", 0), *fifth_faults("fifth locked faults", 1)]
_SIXTH: Final = {"sixth trainings": sixth(0), "sixth locked trainings": sixth(1)}
_SIXTH_FAULTS: Final = [*sixth_faults("sixth faults", 0), *sixth_faults("sixth locked faults", 1)]
_FOURTH_FAULTS: Final = [*fourth_faults("fourth faults", 0), *fourth_faults("fourth locked faults", 1)]
_THIRD_FAULTS: Final = [*third_faults("third faults", 0), *third_faults("third locked faults", 1)]

HEALTHY: Final = (
    SUPERVISED
    | OTHERS
    | RECIPES
    | UNSEEN
    | {"fresh trainings": FRESH}
    | _ANOTHER
    | {"locked blind trainings": BLIND}
    | _THIRD
    | _FOURTH
    | _FIFTH
    | _SIXTH
    | {"sealed trainings": SEALED}
)
_BUILDERS: Final = {name: make for table in HEALTHY.values() for name, make in table.items()}

# Families that nobody looks at while choosing a threshold: at least a third of them, of every kind.
KEPT_OUT_HEALTHY: Final = frozenset(
    {
        "vision",
        "structured",
        "adversarial",
        "contrastive",
        "precision",
        "curricula",
        *UNSEEN,
        "locked trainings",
        "locked blind trainings",
        "third locked trainings",
        "fourth locked trainings",
        "fifth locked trainings",
        "sixth locked trainings",
        "sealed trainings",
    }
)
KEPT_OUT_FAULTS: Final = frozenset(
    {
        "depth",
        "labels",
        "numerics of the loss",
        "schedules",
        "attention",
        "batch norm",
        "unseen faults",
        "locked faults",
        "locked blind faults",
        "third locked faults",
        "fourth locked faults",
        "fifth locked faults",
        "sixth locked faults",
        "sealed faults",
    }
)
TUNING_SEEDS: Final = (0,)
SCORING_SEEDS: Final = (1,)


@dataclass(frozen=True)
class Case:
    """One training: a healthy one, or a healthy one with a fault."""

    name: str
    family: str
    base: str
    fault: Fault | None = None
    layer: str = ""

    @property
    def first_bad(self) -> int | None:
        return None if self.fault is None else self.fault.first_bad

    @property
    def kept_out(self) -> bool:
        return self.family in (KEPT_OUT_HEALTHY if self.fault is None else KEPT_OUT_FAULTS)


def build(case: Case) -> Loop:
    """Build the training."""
    loop = _BUILDERS[case.base]()
    if case.fault is not None:
        case.fault.change(loop, case.layer)
    return loop


CASES: Final = {
    case.name: case
    for case in [
        *(Case(name, family, name) for family, table in HEALTHY.items() for name in table),
        *(
            Case(f"{fault.name} | {base}", fault.family, base, fault, layer)
            for fault in [
                *FAULTS,
                *UNSEEN_FAULTS,
                *FRESH_FAULTS,
                *_ANOTHER_FAULTS,
                *BLIND_FAULTS,
                *_THIRD_FAULTS,
                *_FOURTH_FAULTS,
                *_FIFTH_FAULTS,
                *_SIXTH_FAULTS,
                *SEALED_FAULTS,
            ]
            for base, layer in fault.on.items()
        ),
    ]
}


def chosen(half: str) -> list[tuple[Case, int]]:
    """Return the (case, seed) of a half.

    "tune" has none of the families that are kept out; "score" has all families but the sealed ones, "all" those as well.
    """
    if half == "tune":
        return [(case, seed) for case in CASES.values() if not case.kept_out for seed in TUNING_SEEDS]
    cases = [case for case in CASES.values() if half == "all" or case.family not in SEALED_FAMILIES]
    return [(case, seed) for case in cases for seed in SCORING_SEEDS]
