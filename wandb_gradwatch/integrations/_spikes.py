"""Is this gradient norm a spike? Judged before the update, learned from once it is made. Pure: numbers in, bool out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from .._analysis.baseline import limit_of

# A few kinds of updates take turns (a GAN's two); a model whose every update is of a new kind must not fill the memory.
_MAX_KINDS: Final = 16


class SpikeRule:
    """A norm is a spike if it is not finite, above a limit, or beyond what is usual for its kind of update.

    Spikes are not learned from, so that one hides no second one.

    Args:
        max_norm: too large whatever came before; None switches this measure off.
        stds: standard deviations of the log norm above its mean that are too many; None switches this measure off. For
            few samples as many as are equally unlikely by Student's distribution.
        own: a function from a norm to whether it is a spike, instead of the two.
        min_factor: a norm below this multiple of the usual one is no spike, however quiet the run was.
        warmup: healthy updates before `stds` counts.
        window: healthy updates that count as usual.
        adapt_after: spikes in a row after which their level is taken for the usual one; else a training whose norms
            have settled higher would never step again.
    """

    def __init__(
        self,
        *,
        max_norm: float | None = None,
        stds: float | None = 3.5,
        own: Callable[[float], bool] | None = None,
        min_factor: float = 5.0,
        warmup: int = 5,
        window: int = 64,
        adapt_after: int = 20,
    ) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm={max_norm!r} must be a positive number or None")
        if stds is not None and not stds > 0:
            raise ValueError(f"stds={stds!r} must be a positive number or None")
        self._max_norm, self._stds, self._own, self._min_factor = max_norm, stds, own, min_factor
        self._warmup, self._window, self._adapt_after = warmup, window, adapt_after
        self._usual: dict[str, list[float]] = {}  # log norms of healthy updates by kind, newest last
        self._spikes: dict[str, list[float]] = {}  # log norms of the spikes in a row up to now

    def is_spike(self, norm: float, kind: str = "") -> bool:
        """Judge a norm; NaN and infinity are spikes. Changes nothing."""
        if not norm < math.inf:
            return True
        if self._own is not None:
            return bool(self._own(norm))
        if self._max_norm is not None and norm > self._max_norm:
            return True
        usual = self._usual.get(kind, [])
        if self._stds is None or len(usual) < self._warmup:
            return False
        return norm > limit_of(usual, stds=self._stds, min_factor=self._min_factor).value

    def learn(self, norm: float, *, spike: bool, kind: str = "") -> None:
        """An update was made, or left out because of this norm."""
        if not 0 < norm < math.inf:
            return
        if kind not in self._usual and len(self._usual) >= _MAX_KINDS:
            oldest = next(iter(self._usual))
            del self._usual[oldest], self._spikes[oldest]
        usual, spikes = self._usual.setdefault(kind, []), self._spikes.setdefault(kind, [])
        if not spike:
            spikes.clear()
            usual.append(math.log(norm))
        else:
            spikes.append(math.log(norm))
            if len(spikes) >= self._adapt_after:
                usual[:] = spikes
                spikes.clear()
        del usual[: -self._window]

    def state_dict(self) -> dict[str, Any]:
        """What is usual, in plain values."""
        return {
            "usual": {kind: list(norms) for kind, norms in self._usual.items()},
            "spikes": {kind: list(norms) for kind, norms in self._spikes.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where it was saved."""
        self._usual = {kind: list(norms) for kind, norms in state["usual"].items()}
        self._spikes = {kind: list(norms) for kind, norms in state["spikes"].items()}
