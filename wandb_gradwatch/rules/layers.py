"""Parameters as layers: a module's norm and its share of dead units, for every sample and therefore without a loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..snapshot import Snapshot, group_function
from ..statistics.columns import Column, FloatArray

# S samples, P watched parameters, L modules in model order, the first nearest the input


@dataclass(frozen=True)
class Modules:
    """Which module each parameter belongs to.

    Args:
        names: [L] in the order in which they first appear.
        of_parameter: [P] the module's place of each parameter.
        has_bias: [L] True where one of the module's parameters is a bias.
    """

    names: tuple[str, ...]
    of_parameter: npt.NDArray[np.intp]
    has_bias: npt.NDArray[np.bool_]


@lru_cache(maxsize=16)
def modules_of(names: tuple[str, ...]) -> Modules:
    """The modules of these parameters; worked out once per set of names, not once per sample."""
    module_of = group_function("module")
    places: dict[str, int] = {}
    of_P = np.array([places.setdefault(module_of(name), len(places)) for name in names], dtype=np.intp)
    has_bias_L = np.zeros(len(places), dtype=bool)
    has_bias_L[[place for name, place in zip(names, of_P, strict=True) if "bias" in name.rpartition(".")[2]]] = True
    return Modules(tuple(places), of_P, has_bias_L)


def module_norms(snapshot: Snapshot, sample: int) -> tuple[tuple[str, ...], FloatArray]:
    """Each module's gradient norm at one sample: names [L] and norms [L], NaN where no gradient arrived."""
    modules = modules_of(snapshot.names)
    sum_sq_P = snapshot.column(Column.GRAD_SUM_SQ)[sample]
    present_P = ~np.isnan(sum_sq_P)
    num_L = len(modules.names)
    sum_sq_L = np.bincount(modules.of_parameter[present_P], weights=sum_sq_P[present_P], minlength=num_L)
    arrived_L = np.bincount(modules.of_parameter[present_P], minlength=num_L) > 0
    return modules.names, np.where(arrived_L, np.sqrt(sum_sq_L), np.nan)


def dead_units(snapshot: Snapshot, sample: int) -> tuple[tuple[str, ...], FloatArray]:
    """Each module's share of dead units at one sample: names [L] and shares [L], NaN where missing.

    A dead unit's weights and bias are dead alike, so the least dead of a module's parameters bounds its share. Other
    zeros are innocent: rows of an embedding that no token uses, columns of inputs that are always 0, a bias that a
    batch norm cancels. A module without a bias could be an embedding, and counts only if all of it is dead.
    """
    modules = modules_of(snapshot.names)
    dead_P = snapshot.dead_ratio[sample]
    least_L = np.full(len(modules.names), np.inf)
    present_P = ~np.isnan(dead_P)
    np.minimum.at(least_L, modules.of_parameter[present_P], dead_P[present_P])
    whole_L = np.where(modules.has_bias, least_L, (least_L == 1.0).astype(np.float64))
    return modules.names, np.where(np.isinf(least_L), np.nan, whole_L)
