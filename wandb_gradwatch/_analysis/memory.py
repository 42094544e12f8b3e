"""What rules remember between samples: numbers by parameter name, and the kinds of samples of a training loop."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from .._measure.columns import FloatArray

# P watched parameters

MAX_KINDS: Final = 8
# Samples in a row that count as one where neighbours are alike: what a router sends nothing to, or a clamped loss does
# not ask for, is so in the next samples as well.
ALIKE: Final = 5

Kept = TypeVar("Kept", bound="Remembers")


class Remembers:
    """Saves what an object remembers, as plain Python values: of a dataclass all fields but its arguments."""

    def state_dict(self) -> dict[str, Any]:
        return {name: _plain(getattr(self, name)) for name in self._remembered()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded = {name: _restored(getattr(self, name), state[name]) for name in self._remembered()}
        vars(self).update(loaded)

    def _remembered(self) -> list[str]:
        return [field.name for field in fields(self) if not field.init] if is_dataclass(self) else list(vars(self))


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if hasattr(value, "state_dict"):
        return value.state_dict()
    if isinstance(value, set):
        return sorted(value)
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _restored(now: Any, value: Any) -> Any:
    """What `_plain` has made of a value of the same type as that of now; a list within a list was an array."""
    if hasattr(now, "load_state_dict"):
        now.load_state_dict(value)
        return now
    if isinstance(now, list | tuple | deque):
        items = [np.array(item, dtype=np.float64) if isinstance(item, list) else item for item in value]
        return deque(items, now.maxlen) if isinstance(now, deque) else type(now)(items)
    if isinstance(now, dict):
        return copy.deepcopy(dict(value))
    return type(now)(value)


class PerName:
    """One number per parameter name, as an array that follows the names of the snapshot at hand.

    Args:
        default: the number of a name that was never seen.
    """

    def __init__(self, default: float = 0.0) -> None:
        self.default = default
        self.names: tuple[str, ...] = ()
        self._values_P: FloatArray = np.zeros(0)
        self._elsewhere: dict[str, float] = {}  # names of earlier snapshots that this one lacks

    def of(self, names: tuple[str, ...]) -> FloatArray:
        """The numbers of these names, to be changed in place: [P]."""
        if names is not self.names:  # nearly always the same tuple: 150 names take longer to compare than to use
            if names != self.names:
                known = self._elsewhere | dict(zip(self.names, self._values_P.tolist(), strict=True))
                self._values_P = np.array([known.pop(name, self.default) for name in names], dtype=np.float64)
                self._elsewhere = known
            self.names = names
        return self._values_P

    def replace(self, names: tuple[str, ...], values_P: FloatArray) -> FloatArray:
        """The numbers of these names, and others in their place, which nobody changes: [P]."""
        earlier_P, self._values_P = self.of(names), values_P
        return earlier_P

    def state_dict(self) -> dict[str, float]:
        values = self._elsewhere | dict(zip(self.names, self._values_P.tolist(), strict=True))
        return {name: value for name, value in values.items() if value != self.default and value == value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.names, self._values_P = (), np.zeros(0)
        self._elsewhere = {str(name): float(value) for name, value in state.items()}


class Streaks:
    """By name, for how many samples in a row something is so, and how likely that is by chance.

    Laplace's rule of succession: what was so in 2 of 48 samples before is so in the next one with a chance of 3 / 50.
    """

    def __init__(self) -> None:
        self._seen, self._before, self._row = PerName(), PerName(), PerName()
        self._names: tuple[str, ...] = ()
        self._is_so = False  # for any of these names, in the last sample
        self._num_quiet = 0  # samples of all these names, so for none of them, that are still to be added to _seen

    def see(
        self, names: tuple[str, ...], is_so_P: npt.NDArray[np.bool_], present_P: npt.NDArray[np.bool_] | None = None
    ) -> tuple[FloatArray, FloatArray, FloatArray] | None:
        """Note one more sample of what is present in it.

        Returns:
            [P] each: samples in a row up to now, samples before these, and the chance of these by those; None where it
            is so for none.
        """
        is_all = present_P is None or np.count_nonzero(present_P) == len(names)  # faster than all() and any()
        if is_all and not np.count_nonzero(is_so_P):
            self.end(names, 1)
            return None
        seen_P, so_P, row_P = self._settled(names)
        present_P = np.ones(len(names), dtype=bool) if present_P is None else present_P
        ended_P = present_P & ~is_so_P
        so_P[ended_P] += row_P[ended_P]
        row_P[ended_P], row_P[is_so_P] = 0, row_P[is_so_P] + 1
        seen_P[present_P] += 1
        before_P = seen_P - row_P
        self._is_so = True
        return row_P, before_P, ((so_P + 1) / (before_P + 2)) ** row_P

    def last(
        self, names: tuple[str, ...], is_so_P: npt.NDArray[np.bool_], num: int, present_P: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.bool_]:
        """Note one more sample of what is present in it; for which it has been so in so many samples in a row: [P]."""
        seen = self.see(names, is_so_P, present_P)
        return is_so_P if seen is None else is_so_P & (seen[0] >= num)

    def end(self, names: tuple[str, ...], num_samples: int) -> None:
        """Note samples in which it was so for none of the names, the same as `see` would."""
        if self._is_so or names is not self._names:
            _, so_P, row_P = self._settled(names)
            so_P += row_P
            row_P[:] = 0
            self._is_so = False
        self._num_quiet += num_samples

    def _settled(self, names: tuple[str, ...]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """What was seen, what was so before the row, and the row: [P] each."""
        if self._num_quiet:
            self._seen.of(self._names)[:] += self._num_quiet
            self._num_quiet = 0
        self._names = names
        return self._seen.of(names), self._before.of(names), self._row.of(names)

    def state_dict(self) -> dict[str, dict[str, float]]:
        self._settled(self._names)
        return {"seen": self._seen.state_dict(), "before": self._before.state_dict(), "row": self._row.state_dict()}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        for name, kept in (("seen", self._seen), ("before", self._before), ("row", self._row)):
            kept.load_state_dict(state[name])
        self._names, self._is_so, self._num_quiet = (), True, 0


class PerKind(Generic[Kept]):
    """What is remembered of each kind of sample, told apart by which parameters it holds.

    A GAN's two backward-step pairs, or training before and after most of a model is unfrozen, have norms of different
    parameters: comparing them would call every second sample a spike, or hide the spikes of the smaller one. Samples
    are of one kind when they share at least half of their parameters, so an expert that a batch does not use, or one
    more unfrozen layer, changes nothing.

    Args:
        make: what is remembered at first.
    """

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make = make
        self._kept: list[tuple[frozenset[str], Kept]] = []  # by kind: the names of its first sample
        self._names: tuple[str, ...] = ()
        self._of_mask: dict[bytes, Kept] = {}

    def of(self, names: tuple[str, ...], present_P: npt.NDArray[np.bool_] | None) -> Kept:
        """What is remembered of samples that hold these of the names; None: all of them."""
        mask = b"" if present_P is None else present_P.tobytes()
        if (names is not self._names and names != self._names) or len(self._of_mask) > 4096:
            self._names, self._of_mask = names, {}
        if mask not in self._of_mask:
            held = names if present_P is None else [names[i] for i in np.flatnonzero(present_P)]
            self._of_mask[mask] = self._closest(frozenset(held))
        return self._of_mask[mask]

    def _closest(self, sample: frozenset[str]) -> Kept:
        shares = [len(sample & members) / max(len(sample | members), 1) for members, _ in self._kept]
        best = int(np.argmax(shares)) if shares else -1
        if best < 0 or (shares[best] < 0.5 and len(self._kept) < MAX_KINDS):
            self._kept.append((sample, self._make()))
            best = -1
        return self._kept[best][1]

    def state_dict(self) -> list[Any]:
        return [[sorted(members), kept.state_dict()] for members, kept in self._kept]

    def load_state_dict(self, state: Sequence[Any]) -> None:
        self._names, self._of_mask, self._kept = (), {}, []
        for members, of_kind in state:
            self._kept.append((frozenset(members), self._make()))
            self._kept[-1][1].load_state_dict(of_kind)
