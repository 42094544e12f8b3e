"""Trends of gradient norms over the depth of the model, from the layer nearest the input to the last layer."""

import math
import re
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot
from ..snapshot._arrays import LEAST_SUM_SQ
from .layers import module_norms, modules_of

# S samples, L layers in model order (the first is nearest the input), X samples without zeros, N chains of layers

_MIN_LAYERS = 4
_ROUNDING = 1e-9  # relative tolerance, because sums in different orders round differently


def branch_of(name: str) -> str:
    """A module's name up to its first number. Modules of one branch are assumed to follow each other."""
    return re.split(r"\d", name, maxsplit=1)[0]


@lru_cache(maxsize=16)
def chains_of(names_L: tuple[str, ...]) -> tuple[npt.NDArray[np.intp], ...]:
    """The indices of the modules of each branch with at least four modules.

    `actor.0, actor.2, ...` and `critic.0, critic.2, ...` are two branches, as are two models: a trend over both would
    compare layers that are not connected.
    """
    chains: dict[str, list[int]] = {}
    for place, name in enumerate(names_L):
        chains.setdefault(branch_of(name), []).append(place)
    return tuple(np.array(places, dtype=np.intp) for places in chains.values() if len(places) >= _MIN_LAYERS)


@dataclass(frozen=True)
class DepthTrend:
    """The trend of log norms over the depth."""

    first: str  # the name of the first layer
    last: str
    # The last layer's norm divided by the first layer's, on the fitted line: above 1 if the gradient decreases towards
    # the input, below 1 if it grows.
    factor: float
    order: float  # Spearman's rank correlation of norm and depth: 1 if every layer's norm is above the one before


def depth_trends(snapshot: Snapshot, *, above: float) -> list[DepthTrend | None]:
    """The trend of the modules' gradient norms in each sample; None where its factor is not above a limit.

    Parameters are merged into modules first, because bias and weight of a layer differ for reasons other than depth.
    """
    trends: list[DepthTrend | None] = [None] * len(snapshot)
    modules = modules_of(snapshot.names)
    # Samples in which all gradients are there, and above 0
    whole = [sample.place for sample in snapshot.overview if sample.least_sum_sq > LEAST_SUM_SQ]
    squares_SL = np.add.reduceat(snapshot.column(Column.GRAD_SUM_SQ)[:, modules.order], modules.starts, axis=1)
    log_factors_XN = np.log(squares_SL[whole]) @ _log_factor_weights(modules.names)
    largest = np.maximum.reduce(log_factors_XN, axis=1, initial=-math.inf).tolist()
    limit = math.log(above) - _ROUNDING
    are_flat = {place for place, log_factor in zip(whole, largest, strict=True) if log_factor < limit}
    for sample in set(range(len(snapshot))) - are_flat:
        trend = trend_of(modules.names, module_norms(snapshot)[sample])
        if trend is not None and trend.factor > above:
            trends[sample] = trend
    return trends


@lru_cache(maxsize=16)
def _log_factor_weights(names_L: tuple[str, ...]) -> FloatArray:
    """Weights with which the logarithms of the modules' sums of squares add up to each chain's log factor: [L, N]."""
    chains = chains_of(names_L)
    weights_LN = np.zeros((len(names_L), len(chains)))
    for weights_L, chain in zip(weights_LN.T, chains, strict=True):
        centred = np.arange(len(chain)) - (len(chain) - 1) / 2
        weights_L[chain] = 0.5 * (len(chain) - 1) * centred / (centred @ centred)
    return weights_LN


def trend_of(names_L: tuple[str, ...], norms_L: FloatArray) -> DepthTrend | None:
    """The steepest trend of these layers' norms along a chain; zero and missing norms are left out."""
    found = [_trend(tuple(names_L[place] for place in chain), norms_L[chain]) for chain in chains_of(names_L)]
    return max((trend for trend in found if trend), key=lambda trend: abs(math.log(trend.factor)), default=None)


def _trend(names_L: tuple[str, ...], norms_L: FloatArray) -> DepthTrend | None:
    seen = np.flatnonzero(np.isfinite(norms_L) & (norms_L > 0))
    if len(seen) < _MIN_LAYERS:
        return None
    log_norms, depth = np.log(norms_L[seen]), np.arange(len(seen), dtype=np.float64)
    centred = depth - depth.mean()
    slope = float(centred @ log_norms / (centred @ centred))
    ranks = np.argsort(np.argsort(log_norms)).astype(np.float64)
    return DepthTrend(
        first=names_L[seen[0]],
        last=names_L[seen[-1]],
        factor=float(np.exp(np.clip(slope * (len(seen) - 1), -700, 700))),
        order=float(centred @ (ranks - ranks.mean()) / (centred @ centred)),
    )
