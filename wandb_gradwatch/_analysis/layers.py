"""Statistics of modules from those of their parameters: norms, their trend over the depth, dead units, initial gains,
the scale of inputs."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .._measure.columns import BoolArray, FloatArray
from ..snapshot import Snapshot
from ..snapshot._shapes import group_function

# S samples, P watched parameters, L modules in model order (the first is nearest the input), X samples without zeros, N
# chains of layers

# A bias's gradient below this share of the weight's is rounding: a later normalisation cancels the bias.
_ROUNDING = 1e-5
_MIN_LAYERS = 4
_OF_SEVERAL = re.compile(r"^model\d+\.")
_ONE_STEP = 2 / 3  # largest share of the range of a trend's log norms between two neighbours
MIN_WEIGHTS = 64  # fewer elements are a scale or a temperature, which may be clamped, and no layer's weights


@dataclass(frozen=True)
class ModuleKinds:
    """The module of each parameter."""

    names: tuple[str, ...]  # [L] in the order in which they first appear
    of_parameter: npt.NDArray[np.intp]  # [P] the index of each parameter's module
    is_bias: BoolArray  # [P]
    has_bias: BoolArray  # [L]
    has_weight: BoolArray  # [L] True if the module has a parameter other than a bias
    order: npt.NDArray[np.intp] | slice  # [P] sorts the parameters by module; a full slice, without a copy, if they are
    starts: npt.NDArray[np.intp]  # [L] the first index of each module in that order


@lru_cache(maxsize=16)
def modules_of(names: tuple[str, ...]) -> ModuleKinds:
    """The modules of these parameters, cached by the tuple of names."""
    module_of = group_function("module")
    places: dict[str, int] = {}
    of_P = np.array([places.setdefault(module_of(name), len(places)) for name in names], dtype=np.intp)
    is_bias_P = np.array(["bias" in name.rpartition(".")[2] for name in names], dtype=bool)
    has_bias_L, has_weight_L = (np.isin(np.arange(len(places)), of_P[chosen_P]) for chosen_P in (is_bias_P, ~is_bias_P))
    order_P = np.argsort(of_P, kind="stable")
    starts_L = np.searchsorted(of_P[order_P], np.arange(len(places)))
    order = slice(None) if (np.diff(order_P) == 1).all() else order_P
    return ModuleKinds(tuple(places), of_P, is_bias_P, has_bias_L, has_weight_L, order, starts_L)


def dead_units(names: tuple[str, ...], dead_SP: FloatArray) -> FloatArray:
    """Each module's share of dead units, from each parameter's share of dead elements: [S, L]; NaN where missing.

    The weights and the bias of a dead unit are all dead, so the smallest share among a module's parameters counts.
    Other zeros are healthy: columns for inputs that are always 0, a bias that a batch norm cancels, an embedding's rows
    for unused tokens. A module without a bias could be an embedding, and counts only if it is completely dead; one with
    only a bias (its weight may be parametrized) does not count.
    """
    modules = modules_of(names)
    least_SL = np.fmin.reduceat(dead_SP[:, modules.order], modules.starts, axis=1)
    share_SL = np.where(modules.has_bias | np.isnan(least_SL), least_SL, least_SL == 1.0)
    return np.where(modules.has_weight, share_SL, np.fmin(share_SL, 0.0))


def without_inputs(names: tuple[str, ...], dead_P: FloatArray) -> BoolArray:
    """Modules whose weights have no gradient but whose bias has one, so that all their inputs are 0: [L]."""
    modules = modules_of(names)
    dead_P, is_bias_P = dead_P[modules.order], modules.is_bias[modules.order]
    weights_L = np.fmin.reduceat(np.where(is_bias_P, np.nan, dead_P), modules.starts)
    biases_L = np.fmin.reduceat(np.where(is_bias_P, dead_P, np.nan), modules.starts)
    empty_L: BoolArray = (weights_L == 1.0) & (biases_L < 1.0)
    return empty_L


def feed_nothing(dead_L: BoolArray, empty_L: BoolArray, present_L: BoolArray) -> BoolArray:
    """Return which of the dead layers are followed, in model order, by a layer whose inputs are all 0: [L]."""
    found_L, feeds_nothing = np.zeros_like(dead_L), False
    for place in np.flatnonzero(present_L)[::-1].tolist():
        feeds_nothing = bool(empty_L[place]) or (feeds_nothing and bool(dead_L[place]))
        found_L[place] = feeds_nothing and bool(dead_L[place])
    return found_L


def num_units(snapshot: Snapshot, sample: int) -> FloatArray:
    """Return each module's number of units, the size of its smallest parameter, as a bias has one per unit: [L]."""
    modules = modules_of(snapshot.names)
    size_P = np.where(snapshot.present[sample], snapshot.num_elements[sample], np.inf)
    return np.minimum.reduceat(size_P[modules.order], modules.starts)


def branch_of(name: str) -> str:
    """A module's name up to its first number. Modules of one branch are assumed to follow each other.

    The numbers of several watched models, `model0.`, `model1.`, tell branches apart.
    """
    own = _OF_SEVERAL.sub("", name)
    return name.removesuffix(own) + re.split(r"\d", own, maxsplit=1)[0]


@lru_cache(maxsize=16)
def _chains_of(names_L: tuple[str, ...]) -> tuple[list[npt.NDArray[np.intp]], FloatArray]:
    """The indices of the modules of each branch with at least four modules, N arrays; and the weights with which the
    logarithms of the modules' sums of squares add up to each chain's log factor: [L, N].

    `actor.0, actor.2, ...` and `critic.0, critic.2, ...` are two branches, whose layers are not connected.
    """
    branches: dict[str, list[int]] = {}
    for place, name in enumerate(names_L):
        branches.setdefault(branch_of(name), []).append(place)
    chains = [np.array(places, dtype=np.intp) for places in branches.values() if len(places) >= _MIN_LAYERS]
    weights_LN = np.zeros((len(names_L), len(chains)))
    for weights_L, chain in zip(weights_LN.T, chains, strict=True):
        centred = _centred(len(chain))
        weights_L[chain] = 0.5 * (len(chain) - 1) * centred / (centred @ centred)
    return chains, weights_LN


@dataclass(frozen=True)
class DepthTrend:
    """The trend of log norms over the depth, from the layer nearest the input to the last layer."""

    first: str  # the name of the first layer
    last: str
    # The last layer's norm divided by the first layer's, on the fitted line: above 1 if the gradient decreases towards
    # the input, below 1 if it grows.
    factor: float
    order: float  # Spearman's rank correlation of norm and depth: 1 if every layer's norm is above the one before


def trend_of(names_L: tuple[str, ...], norms_L: FloatArray) -> DepthTrend | None:
    """The steepest trend of these layers' norms along a chain; zero and missing norms are left out.

    A chain that owes most of its trend to a single step is none: there one network ends, and another begins.
    """
    are_seen_L, found = np.isfinite(norms_L) & (norms_L > 0), []
    for chain in _chains_of(names_L)[0]:
        seen = chain[are_seen_L[chain]]
        if len(seen) >= _MIN_LAYERS:
            centred, log_norms = _centred(len(seen)), np.log(norms_L[seen])
            slope = float(centred @ log_norms / (centred @ centred))
            ranks = np.argsort(np.argsort(log_norms)) + centred[0]
            order = float(centred @ ranks / (centred @ centred))
            factor = float(np.exp(np.clip(slope * (len(seen) - 1), -700, 700)))
            if np.max(np.sign(slope) * np.diff(log_norms)) <= _ONE_STEP * np.ptp(log_norms):
                found.append(DepthTrend(names_L[seen[0]], names_L[seen[-1]], factor, order))
    return max(found, key=lambda trend: abs(math.log(trend.factor)), default=None)


def _centred(num: int) -> FloatArray:
    """The numbers from 0 on, minus their mean: [num]."""
    return np.arange(num, dtype=np.float64) - (num - 1) / 2
