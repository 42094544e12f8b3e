"""The state that rules keep between samples: numbers by parameter name, and state for each kind of sample."""

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np

from .._measure.columns import BoolArray, FloatArray

# P watched parameters

MAX_KINDS: Final = 8
# Samples in a row that count as one where neighbours are alike: what a router sends nothing to, or a clamped loss does
# not ask for, is so in the next samples as well.

# Kinds of plain values, one of which a loaded value must not replace by another.
_SAME_KIND: Final = ((bool, int, float), (str,), (list, tuple, set, deque), (dict,))

Kept = TypeVar("Kept", bound="Remembers")


class Remembers:
    """Saves an object's state as plain Python values; for a dataclass, all fields that are not arguments."""

    def state_dict(self) -> dict[str, Any]:
        self._work_out()
        return {name: _plain(getattr(self, name)) for name in self._remembered()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise ValueError(f"the state of {type(self).__name__} cannot be {state!r:.50}")
        loaded = {name: _restored(getattr(self, name), state[name]) for name in self._remembered()}
        vars(self).update(loaded)

    def _work_out(self) -> None:
        """Add what waits to the rest of the state, if the object postpones work."""

    def _remembered(self) -> list[str]:
        return [field.name for field in fields(self) if not field.init] if is_dataclass(self) else list(vars(self))


def _plain(value: Any) -> Any:
    """Convert a value to types that JSON supports."""
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
    """Convert the result of `_plain` back to the type of `now`; lists inside of lists become arrays."""
    if hasattr(now, "load_state_dict"):
        now.load_state_dict(value)
        return now
    if any(isinstance(now, kinds) and not isinstance(value, kinds) for kinds in _SAME_KIND):
        raise ValueError(f"{now!r:.50} cannot be replaced by {value!r:.50}")
    if isinstance(now, list | tuple | set | deque):
        items = [np.array(item, dtype=np.float64) if isinstance(item, list) else item for item in value]
        return deque(items, now.maxlen) if isinstance(now, deque) else type(now)(items)
    return copy.deepcopy(value)


class PerName:
    """One number per parameter name, stored as an array in the order of the last snapshot's names.

    A new name has the number `default`.
    """

    def __init__(self, default: float = 0.0) -> None:
        self.default = default
        self.names: tuple[str, ...] = ()
        self.values_P: FloatArray = np.zeros(0)
        self._elsewhere: dict[str, float] = {}  # numbers of names that only earlier snapshots had

    def of(self, names: tuple[str, ...]) -> FloatArray:
        """The numbers of these names, which the caller may change in place: [P]."""
        if names is not self.names:  # usually the same tuple; comparing 150 names would take longer than using them
            if names != self.names:
                self._elsewhere = known = self._all()
                self.values_P = np.array([known.pop(name, self.default) for name in names], dtype=np.float64)
            self.names = names
        return self.values_P

    def _all(self) -> dict[str, float]:
        return self._elsewhere | dict(zip(self.names, self.values_P.tolist(), strict=True))

    def state_dict(self) -> dict[str, float]:
        return {name: value for name, value in self._all().items() if value != self.default and value == value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self._elsewhere = {_checked_name(name): float(value) for name, value in state.items()}
        self.names, self.values_P = (), np.zeros(0)


class Streaks(Remembers):
    """For each name, the number of consecutive samples with a condition, and its probability by chance.

    Laplace's rule of succession: after 2 of 48 samples with the condition, the next has it with probability 3 / 50.
    """

    def __init__(self) -> None:
        self.seen, self.before, self.row = PerName(), PerName(), PerName()
        self._names: tuple[str, ...] = ()
        self._is_so = False  # whether any name had the condition in the last sample
        self._num_quiet = 0  # samples of all names without the condition that are not yet added to `seen`

    def see(
        self, names: tuple[str, ...], is_so_P: BoolArray, present_P: BoolArray
    ) -> tuple[FloatArray, FloatArray, FloatArray] | None:
        """Add a sample: `is_so_P` is the condition, for the names that are present in the sample.

        Returns:
            [P] each: the length of the streak, the number of samples before it, and the probability of the streak
            given those samples. None if no name has the condition.
        """
        if np.count_nonzero(present_P) == len(names) and not np.count_nonzero(is_so_P):  # faster than all() and any()
            self.end(names, 1)
            return None
        seen_P, so_P, row_P = self._settled(names)
        ended_P = present_P & ~is_so_P
        so_P[ended_P] += row_P[ended_P]
        row_P[ended_P], row_P[is_so_P] = 0, row_P[is_so_P] + 1
        seen_P[present_P] += 1
        before_P = seen_P - row_P
        self._is_so = True
        return row_P, before_P, ((so_P + 1) / (before_P + 2)) ** row_P

    def last(self, names: tuple[str, ...], is_so_P: BoolArray, num: int, present_P: BoolArray) -> BoolArray:
        """Add a sample, and return which names have had the condition in at least `num` consecutive samples: [P]."""
        seen = self.see(names, is_so_P, present_P)
        return is_so_P if seen is None else is_so_P & (seen[0] >= num)

    def end(self, names: tuple[str, ...], num_samples: int) -> None:
        """Add samples in which no name had the condition, with the same effect as `see`."""
        if self._is_so or names is not self._names:
            _, so_P, row_P = self._settled(names)
            so_P += row_P
            row_P[:] = 0
            self._is_so = False
        self._num_quiet += num_samples

    def _settled(self, names: tuple[str, ...]) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The number of samples, those with the condition before the streak, and the streak's length: [P] each."""
        if self._num_quiet:
            self.seen.of(self._names)[:] += self._num_quiet
            self._num_quiet = 0
        self._names = names
        return self.seen.of(names), self.before.of(names), self.row.of(names)

    def _work_out(self) -> None:
        self._settled(self._names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._names, self._is_so, self._num_quiet = (), True, 0

    def _remembered(self) -> list[str]:
        return ["seen", "before", "row"]


class PerKind(Generic[Kept]):
    """Separate state, made by `make`, for each kind of sample; kinds differ by the parameters that have a gradient.

    Comparing the norms of a GAN's two updates would make every second sample a spike. Samples are of one kind if they
    share at least half of their parameters, so an expert without tokens does not make a new kind.
    """

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make = make
        self._kept: list[tuple[frozenset[str], Kept]] = []  # for each kind, the names of its first sample
        self._names: tuple[str, ...] = ()
        self._of_mask: dict[bytes, Kept] = {}

    def of(self, names: tuple[str, ...], present_P: BoolArray | None) -> Kept:
        """The state for samples in which these names are present; None: all names."""
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
        loaded = [(frozenset(map(_checked_name, members)), self._make()) for members, _ in state]
        for (_, kept), (_, of_kind) in zip(loaded, state, strict=True):
            kept.load_state_dict(of_kind)
        self._names, self._of_mask, self._kept = (), {}, loaded


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r:.50} is not the name of a parameter")
    return name
