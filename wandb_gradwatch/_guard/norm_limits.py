"""Which norm is too large to be used: known before the update, unlike whether a spike will pass by itself."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .._analysis.baseline import limit_of
from .._analysis.memory import Kinds

# P watched parameters


@dataclass
class _Past:
    """The total log norms of one kind of step, newest last."""

    healthy: list[float] = field(default_factory=list)  # what is usual is learned from these
    all: list[float] = field(default_factory=list)
    num_alarmed: int = 0  # in a row, up to now


@dataclass(kw_only=True)
class NormLimits:
    """A limit, from the norms so far, above which a norm is too large. What was too large is not learned from."""

    threshold: float | None = 1e8  # too large whatever came before; None switches this measure off
    # Standard deviations of the log norm above its mean that are too many; None switches this measure off. For few
    # steps as many as are equally unlikely by Student's distribution.
    stds: float | None = 3.5
    min_factor: float = 20.0  # a norm below this multiple of the usual one is not too large, however quiet the run was
    # Nor is one below this multiple of the second largest of the last 16 healthy ones: losses that few elements of a
    # batch decide have norms with tails that no deviation describes. None: it does not matter.
    record_factor: float | None = 3.0
    warmup: int = 5  # healthy steps before a deviation is known
    warmup_factor: float = 1000.0  # until then, a norm above this multiple of the largest so far is too large
    window: int = 64  # healthy steps that count as usual; their last quarter is a second view, which follows a trend
    adapt_after: int = 20  # so many in a row that were too large are the usual level
    _kinds: Kinds = field(default_factory=Kinds, init=False, repr=False)
    _pasts: dict[int, _Past] = field(default_factory=dict, init=False, repr=False)

    def limit(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_]) -> float:
        """The largest total norm of the gradients of these parameters that is not too large now."""
        past = self._past(names, present_P)
        limit = math.inf if self.threshold is None else self.threshold
        if self.stds is None or not past.healthy:
            return limit
        if len(past.healthy) < self.warmup:
            return min(limit, self.warmup_factor * math.exp(max(past.healthy)))
        recent = past.healthy[-max(self.window // 4, self.warmup) :]
        for view in (past.healthy, recent):
            found = limit_of(view, stds=self.stds, min_factor=self.min_factor, record_factor=self.record_factor)
            limit = min(limit, found.value)
        return limit

    def learn(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_], norm: float, *, alarmed: bool) -> None:
        """Remember a total norm above 0 that was judged by `limit`."""
        past = self._past(names, present_P)
        log_norm = math.log(norm) if norm < math.inf else 1e3
        past.all = [*past.all[-(self.window - 1) :], log_norm]
        past.num_alarmed = past.num_alarmed + 1 if alarmed else 0
        if not alarmed:
            past.healthy = [*past.healthy[-(self.window - 1) :], log_norm]
        elif past.num_alarmed >= self.adapt_after:
            past.healthy, past.num_alarmed = past.all[-self.adapt_after :], 0

    def _past(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_]) -> _Past:
        return self._pasts.setdefault(self._kinds.of(names, present_P), _Past())

    def state_dict(self) -> dict[str, Any]:
        return {
            "kinds": self._kinds.state_dict(),
            "pasts": [{"kind": kind, **asdict(past)} for kind, past in self._pasts.items()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kinds.load_state_dict(state["kinds"])
        self._pasts = {
            int(past["kind"]): _Past(list(past["healthy"]), list(past["all"]), int(past["num_alarmed"]))
            for past in state["pasts"]
        }
