"""Parameters as layers: a module's norm and its share of dead units, for every sample and therefore without a loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot
from ..snapshot._shapes import group_function

# S samples, P watched parameters, L modules in model order, the first nearest the input

# Of the weight's gradient: what is left of a bias's that a normalisation, wherever it stands, takes away.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class ModuleKinds:
    """Which module each parameter belongs to.

    Args:
        names: [L] in the order in which they first appear.
        of_parameter: [P] the module's place of each parameter.
        is_bias: [P] True for a bias.
        has_bias, has_weight: [L] True where one of the module's parameters is a bias, or where one is none.
        order: [P] parameters sorted by their module; a slice of all where they are already, which copies nothing.
        starts: [L] where each module begins in that order.
    """

    names: tuple[str, ...]
    of_parameter: npt.NDArray[np.intp]
    is_bias: npt.NDArray[np.bool_]
    has_bias: npt.NDArray[np.bool_]
    has_weight: npt.NDArray[np.bool_]
    order: npt.NDArray[np.intp] | slice
    starts: npt.NDArray[np.intp]


@lru_cache(maxsize=16)
def modules_of(names: tuple[str, ...]) -> ModuleKinds:
    """The modules of these parameters; worked out once per set of names, not once per sample."""
    module_of = group_function("module")
    places: dict[str, int] = {}
    of_P = np.array([places.setdefault(module_of(name), len(places)) for name in names], dtype=np.intp)
    has_bias_L = np.zeros(len(places), dtype=bool)
    is_bias_P = np.array(["bias" in name.rpartition(".")[2] for name in names], dtype=bool)
    has_weight_L = np.zeros(len(places), dtype=bool)
    has_bias_L[of_P[is_bias_P]], has_weight_L[of_P[~is_bias_P]] = True, True
    order_P = np.argsort(of_P, kind="stable")
    starts_L = np.searchsorted(of_P[order_P], np.arange(len(places)))
    is_sorted = bool((np.diff(order_P) == 1).all())
    order = slice(None) if is_sorted else order_P
    return ModuleKinds(tuple(places), of_P, is_bias_P, has_bias_L, has_weight_L, order, starts_L)


def are_half_precision(rows_PC: FloatArray) -> npt.NDArray[np.bool_]:
    """Which parameters are float16 or bfloat16: [P]. Neither type has the last 13 bits of a float32.

    A gradient has its parameter's type, and its extremes are elements of it.
    """
    extremes_PE = rows_PC[:, [Column.GRAD_MIN, Column.GRAD_MAX, Column.GRAD_ABS_MIN_NONZERO]]
    with np.errstate(over="ignore"):
        narrow_PE = extremes_PE.astype(np.float32)
    are_half_PE = (narrow_PE == extremes_PE) & (narrow_PE.view(np.uint32) & 0x1FFF == 0)
    are_half_P: npt.NDArray[np.bool_] = are_half_PE.all(axis=1)
    return are_half_P


def module_norms(snapshot: Snapshot) -> FloatArray:
    """Each module's gradient norm: [S, L], NaN where no gradient arrived."""
    modules = modules_of(snapshot.names)
    sum_sq_SP = snapshot.column(Column.GRAD_SUM_SQ)[:, modules.order]
    missing_SP = np.isnan(snapshot.grad_norm)[:, modules.order]
    sum_sq_SL = np.add.reduceat(np.where(missing_SP, 0.0, sum_sq_SP), modules.starts, axis=1)
    missing_SL = np.logical_and.reduceat(missing_SP, modules.starts, axis=1)
    return np.where(missing_SL, np.nan, np.sqrt(sum_sq_SL))


def dead_units(names: tuple[str, ...], dead_SP: FloatArray) -> FloatArray:
    """Each module's share of dead units: [S, L], NaN where missing.

    A dead unit's weights and bias are dead alike, so the least dead of a module's parameters bounds its share. Other
    zeros are innocent: rows of an embedding that no token uses, columns of inputs that are always 0, a bias that a
    batch norm cancels. A module without a bias could be an embedding, and counts only if all of it is dead; one of
    nothing but a bias (its weight may be in a parametrization) says nothing: terms of a loss may cancel there.

    Args:
        dead_SP: each parameter's share of dead elements.
    """
    modules = modules_of(names)
    least_SL = np.fmin.reduceat(dead_SP[:, modules.order], modules.starts, axis=1)
    share_SL = np.where(modules.has_bias | np.isnan(least_SL), least_SL, least_SL == 1.0)
    return np.where(modules.has_weight, share_SL, np.fmin(share_SL, 0.0))


def without_inputs(names: tuple[str, ...], dead_P: FloatArray) -> npt.NDArray[np.bool_]:
    """Modules whose weights have no gradient while their bias has one: all that reaches them is 0. [L]."""
    modules = modules_of(names)
    dead_P, is_bias_P = dead_P[modules.order], modules.is_bias[modules.order]
    weights_L = np.fmin.reduceat(np.where(is_bias_P, np.nan, dead_P), modules.starts)
    biases_L = np.fmin.reduceat(np.where(is_bias_P, dead_P, np.nan), modules.starts)
    empty_L: npt.NDArray[np.bool_] = (weights_L == 1.0) & (biases_L < 1.0)
    return empty_L


@lru_cache(maxsize=16)
def weights_beside_biases(names: tuple[str, ...]) -> tuple[tuple[int, int], ...]:
    """The places of each weight and of the bias of its layer, where it has one."""
    places, found = {name: place for place, name in enumerate(names)}, []
    for name, weight in places.items():
        module, dot, parameter = name.rpartition(".")
        bias = places.get(module + dot + parameter.replace("weight", "bias"), weight)
        if bias != weight:
            found.append((weight, bias))
    return tuple(found)


def initial_gains(snapshot: Snapshot, sample: int) -> list[tuple[str, float]]:
    """Each layer's RMS weight times sqrt(fan-in) in a sample, by the weight's name: about 1 keeps a signal's size.

    The fan-in is the number of a weight's elements over that of its bias, so layers without a bias are left out, and so
    are normalisation layers, whose weight and bias are equally many.
    """
    size_P, sum_sq_P = snapshot.num_elements[sample], snapshot.column(Column.PARAM_SUM_SQ)[sample]
    return [
        (snapshot.names[weight], float(np.sqrt(sum_sq_P[weight] / size_P[bias])))  # sqrt(sum / size * (size / bias's))
        for weight, bias in weights_beside_biases(snapshot.names)
        if size_P[weight] > size_P[bias] and sum_sq_P[weight] >= 0
    ]


def cancelled_biases(names: tuple[str, ...], missing_P: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Biases without a gradient in layers that have one: [P].

    These layers are neither frozen nor detached: a loss of the output's derivative, or of differences of outputs, does
    not depend on the last bias.
    """
    modules = modules_of(names)
    has_one_L = np.isin(np.arange(len(modules.names)), modules.of_parameter[~missing_P])
    is_cancelled_P: npt.NDArray[np.bool_] = missing_P & modules.is_bias & has_one_L[modules.of_parameter]
    return is_cancelled_P


def input_scale(snapshot: Snapshot, sample: int) -> tuple[str, float] | None:
    """About the root mean square of what the first layer receives, and the layer's name; None where that is not known.

    A weight's gradient is that of the bias times the input, summed over the batch: their norms' ratio over
    sqrt(fan-in) is the input's size, exact where all inputs are alike, and of its order where they are not. A
    normalisation after the layer leaves nothing of the bias's gradient but rounding.
    """
    size_P, norm_P = snapshot.num_elements[sample], snapshot.grad_norm[sample]
    modules = modules_of(snapshot.names)
    for weight, bias in weights_beside_biases(snapshot.names):
        if not size_P[weight] > size_P[bias]:
            continue
        after = np.flatnonzero(modules.of_parameter == modules.of_parameter[bias] + 1)
        is_normalised = len(after) == 2 and size_P[after[0]] == size_P[after[1]] == size_P[bias]
        if is_normalised or not norm_P[bias] > _ROUNDING * norm_P[weight]:
            return None
        scale = norm_P[weight] / norm_P[bias] / np.sqrt(size_P[weight] / size_P[bias])
        return snapshot.names[weight], float(scale)
    return None
