"""How far each update has moved the parameters, as far as their norms show it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._measure.columns import Column, FloatArray
from ..snapshot import Snapshot

# S samples, P watched parameters


class Movement:
    """The parameters as the last sample has found them, before its update; the next one shows what the update did."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._step = 0
        self._sum_sq_P: FloatArray = np.zeros(0)

    def of(self, snapshot: Snapshot, sample: int) -> float:
        """|relative change| of the parameters' norm per step since the sample before: of those that both samples hold.

        NaN where nothing can be compared, infinite where a parameter is not finite any more.
        """
        sum_sq_P = snapshot.column(Column.PARAM_SUM_SQ)[sample]
        step, before_P = int(snapshot.steps[sample]), self._sum_sq_P
        known = snapshot.names == self._names and step > self._step
        num_steps = step - self._step
        self._names, self._step, self._sum_sq_P = snapshot.names, step, sum_sq_P
        if not known:
            return float("nan")
        if np.any(snapshot.column(Column.PARAM_NUM_NONFINITE)[sample] > 0):
            return float("inf")
        both_P = ~np.isnan(sum_sq_P) & ~np.isnan(before_P)
        before, after = float(before_P[both_P].sum()), float(sum_sq_P[both_P].sum())
        if not before > 0 or not after > 0:
            return float("nan")
        return float(abs(np.expm1(0.5 * np.log(after / before) / num_steps)))

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "names": list(self._names), "sum_sq": self._sum_sq_P.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._names = int(state["step"]), tuple(state["names"])
        self._sum_sq_P = np.array(state["sum_sq"], dtype=np.float64)
