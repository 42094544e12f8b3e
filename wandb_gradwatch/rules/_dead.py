"""Rule for units without a gradient."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from .._analysis.formatting import listing
from .._analysis.layers import dead_units, feed_nothing, is_held_up, leading, modules_of, num_units, without_inputs
from .._analysis.memory import ALIKE, Streaks
from .._measure.columns import BoolArray, Column, FloatArray
from ..snapshot import Snapshot
from ..snapshot._overview import Overview
from ._base import SHARE, Alert, Bounds, PerKindRule

# S samples, P watched parameters, L modules

_CHANCE: Final = 1e-3  # probability that a layer lacks a gradient this long by chance, below which it is dead
_AT_ONCE: Final = 0.25  # share of a layer's units; more do not die within one sample of a healthy training
_MIN_UNITS: Final = 8  # smaller layers have all units off in two samples now and then
_ARRIVED: Final = 1e-6  # share of the largest norm so far; below it the data is fitted, and layers may have no gradient
_MANY: Final = 0.9  # share of a layer's units that neither chance nor training switches off one by one


@dataclass(kw_only=True)
class DeadGradient(PerKindRule):
    """Raises the alert "Dead gradient" if the same units of a layer get no gradient in sample after sample.

    The count of one sample means nothing: at a batch size of 1 half of all ReLU units are off in every sample, but
    never the same half. The dead units are the same ones if their count varies less than it would by chance. Half of a
    layer means nothing either: far from the input, where all samples look alike, each unit of an untrained layer is on
    or off for all samples, half of them off, and training switches off more, one by one, while the others learn. So a
    layer counts as dead if nine tenths of its units are dead, or if half of them are and have died at once.

    A whole layer without any gradient raises the alert at the second sample, from about the 30th of a run on, if it
    never lacked one before and the layer after it has inputs of 0. Layers that lack a gradient now and then, as experts
    do, and layers that the loss does not use take longer, by Laplace's rule of succession. A layer whose input has
    become 0 raises the alert, too.

    Args:
        max_ratio: largest share of a layer's units that may die at once. Limits of 5 % or 20 %, as often recommended,
            are too low: of an untrained `Linear(1, 32)` before a ReLU a quarter fires for no input in [-1, 1].
        patience: number of samples in a row. LoRA's A and layers before a zero-initialised one are dead at first.
    """

    max_ratio: float = 0.5
    patience: int = 10
    # The dead ratios of the last samples, [P] each
    _recent: deque[FloatArray] = field(default_factory=deque, init=False, repr=False)
    _steps: deque[int] = field(default_factory=deque, init=False, repr=False)  # the steps of these samples
    _largest: float = field(default=0.0, init=False)
    _names: tuple[str, ...] = field(default=(), init=False, repr=False)
    _dead: Streaks = field(default_factory=Streaks, init=False, repr=False)  # modules without any gradient
    _empty: Streaks = field(default_factory=Streaks, init=False, repr=False)  # modules whose input is 0
    _pauses: set[str] = field(default_factory=set, init=False, repr=False)  # modules without gradients in some samples
    _told: set[str] = field(default_factory=set, init=False, repr=False)  # modules that were dead in the last sample
    _least: float = field(default=0.0, init=False, repr=False)

    title: ClassVar[str] = "Dead gradient"
    judges_updates: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {"max_ratio": SHARE, "patience": (1.0, 1e9)}

    def __post_init__(self) -> None:
        super().__post_init__()
        # The smallest limit for any size of a layer: it falls with the size, except where `_MANY` sets it.
        self._least = float(self._by_chance(np.append(np.arange(1.0, 1.0 / (1.0 - _MANY) + 1), np.inf)).min())

    def prepared(self, snapshot: Snapshot, samples: Sequence[Overview]) -> Iterable[tuple[Overview, Any]]:
        names, modules = snapshot.names, modules_of(snapshot.names).names
        if names is not self._names and names != self._names:
            places = [self._names.index(name) if name in self._names else -1 for name in names]
            self._recent = deque(np.append(shares, np.nan)[places] for shares in self._recent)
        self._names = names
        counted = []
        for sample in samples:
            self._largest = max(self._largest, sample.norm)
            if sample.norm > 0 and sample.norm >= _ARRIVED * self._largest:  # NoGradient reports norms of 0
                counted.append(sample)
        dead_NP = snapshot.dead_ratio
        dead_NP = dead_NP if len(counted) == len(snapshot) else dead_NP[[sample.place for sample in counted]]
        for sample, dead_P, are_few in zip(counted, dead_NP, self._are_few(names, dead_NP), strict=True):
            self._recent.append(dead_P)
            self._steps.append(sample.step)
            if len(self._recent) > self.patience:
                self._recent.popleft()
                self._steps.popleft()
            if not self._told and (are_few or self._are_all_below(sample.rows)):  # the usual case; nothing is missing
                self._dead.end(modules, 1)
                self._empty.end(modules, 1)
            else:
                yield sample, dead_P

    def check_sample(self, snapshot: Snapshot, sample: Overview, dead_P: FloatArray, /) -> Iterable[Alert]:
        names, modules = snapshot.names, modules_of(snapshot.names).names
        recent_NL = dead_units(names, np.stack(self._recent))
        present_L, empty_now_L = ~np.isnan(recent_NL[-1]), without_inputs(names, dead_P)
        self._pauses |= {modules[place] for place in np.flatnonzero(~present_L)}
        dead_L = self._have_died(snapshot, sample.place, recent_NL[-1], empty_now_L)
        dead_L |= self._are_the_same(snapshot, sample.place, recent_NL)
        if self._told:  # a batch that reaches some units for once does not end a fault that was found
            dead_L |= np.isin(modules, list(self._told)) & (np.median(recent_NL[-ALIKE:], axis=0) >= self._least)
        dead_L &= ~empty_now_L  # a unit without inputs is not dead, although most of its gradient is 0
        self._told = {modules[place] for place in np.flatnonzero(dead_L)}
        empty = self._empty.see(modules, empty_now_L, present_L)
        if self._told:
            yield self._alert(snapshot.names, sample.step, recent_NL[-1], np.flatnonzero(dead_L)[::-1].tolist())
        elif empty is not None:
            row_L, before_L, chance_L = empty
            empty_L = empty_now_L & (chance_L < _CHANCE) & (row_L >= 2) & (before_L >= self.patience)
            if empty_L.any():
                first = int(np.flatnonzero(empty_L)[0])
                yield self._empty_alert(sample.step, modules, first, int(row_L[first]), present_L)

    def _are_few(self, names: tuple[str, ...], dead_NP: FloatArray) -> list[bool]:
        """Whether no layer can be reported: each has fewer dead units than chance allows, and no new ones.

        `dead_NP` are those of the next samples. False if a gradient is missing.
        """
        largest = np.maximum.reduce(dead_NP, axis=1, initial=0.0).tolist()
        if all([share < self.max_ratio for share in largest]) or self.patience < 3:
            return [share < self.max_ratio for share in largest]
        seen, apart = [*self._recent, *dead_NP], int(self.patience) - 1
        earlier = [seen[i - apart if i >= apart else i] for i in range(len(self._recent), len(seen))]
        earlier_NL, share_NL = dead_units(names, np.array(earlier)), dead_units(names, dead_NP)
        most, risen = (np.maximum.reduce(found, axis=1).tolist() for found in (share_NL, share_NL - earlier_NL))
        return [
            of_all < self.max_ratio or (of_all < 1.0 and share < self._least and rise <= _AT_ONCE)
            for of_all, share, rise in zip(largest, most, risen, strict=True)
        ]

    def _are_all_below(self, rows_PC: FloatArray) -> bool:
        """Whether no count of dead elements reaches the limit; a gradient without finite elements has no share."""
        return bool(np.max(rows_PC[:, Column.NUM_DEAD]) < self.max_ratio * np.min(rows_PC[:, Column.NUM_ELEMENTS]))

    def _have_died(self, snapshot: Snapshot, sample: int, share_L: FloatArray, empty_L: BoolArray) -> BoolArray:
        """Return which layers have lacked any gradient for longer than chance explains: [L]."""
        present_L, all_dead_L = ~np.isnan(share_L), np.equal(share_L, 1.0)
        seen = self._dead.see(modules_of(snapshot.names).names, all_dead_L, present_L)
        row_L, before_L, chance_L = seen or (np.zeros_like(share_L),) * 3
        suddenly_L: BoolArray = all_dead_L & (row_L >= 2)
        if suddenly_L.any():
            never_L = suddenly_L & (before_L == 0)
            # Dead units give the next layer inputs of 0. A loss that ignores an output in some samples (a clipped value
            # loss, free bits, a satisfied hinge loss) makes the same zeros, but gives no layer inputs of 0.
            chance_L = np.where(feed_nothing(all_dead_L, empty_L, present_L), chance_L, chance_L ** (1 / ALIKE))
            suddenly_L &= (chance_L < _CHANCE) | _from_the_start(snapshot, sample, never_L)
            suddenly_L &= ~(never_L & (_are_no_layers(snapshot, sample) | is_held_up(snapshot, sample)))
        return suddenly_L

    def _are_the_same(self, snapshot: Snapshot, sample: int, recent: FloatArray) -> BoolArray:
        """Return which layers had too many dead units in all last samples, the same ones as their count is constant."""
        has_many_L: BoolArray = recent[-1] >= self.max_ratio
        if len(recent) < self.patience or not np.count_nonzero(has_many_L):
            return np.zeros_like(has_many_L)
        size_L = num_units(snapshot, sample)
        by_chance_L = self._by_chance(size_L)
        risen_L = recent[-1] - (recent[0] if len(recent) > 2 else 0.0) > _AT_ONCE
        if not np.count_nonzero(has_many_L & ((recent[-1] >= by_chance_L) | risen_L)):
            return np.zeros_like(has_many_L)  # half of a narrow layer is often off
        waiting_L = (recent == 1.0).all(axis=0) & is_held_up(snapshot, sample)
        newest, earlier = recent[-2:], recent[:-2]
        have_died_L = _alike(newest, size_L) & (newest.min(axis=0) >= self.max_ratio)
        # The rise must exceed the earlier range: with steps between samples, units that die one by one rise far too.
        largest_L, least_L = np.max(earlier, axis=0, initial=0.0), np.min(earlier, axis=0, initial=1.0)
        have_died_L &= newest.min(axis=0) - largest_L > np.maximum(_AT_ONCE, largest_L - least_L)
        # Ten samples in a row do not show how far the shares rise until a sample 100 steps later.
        steps = list(self._steps)
        have_died_L &= len(earlier) == 0 or steps[-2] - steps[-3] <= max(steps[-3] - steps[0], 1)
        have_died_L &= newest.max(axis=0) < 1.0  # `_have_died` finds whole layers
        have_died_L[-1] = False  # after the last layer comes the loss: its units may be outputs out of use
        if self._pauses:  # an expert that gets no token now and then gets a single one in other samples
            have_died_L &= ~np.isin(modules_of(snapshot.names).names, list(self._pauses))
        same = have_died_L | (_alike(recent, size_L) & (recent.min(axis=0) >= by_chance_L))
        is_told_L: BoolArray = same & ~waiting_L & ~_are_no_layers(snapshot, sample)
        return is_told_L

    def _by_chance(self, size_L: FloatArray) -> FloatArray:
        """Return the share of dead units below which layers of these sizes may have them by chance: [L]."""
        # Four standard deviations above the mean of this many coin tosses; in a layer of a few units all must be dead.
        coins_L = np.minimum(self.max_ratio + 4 * np.sqrt(self.max_ratio * (1 - self.max_ratio) / size_L), 1.0 - 1e-9)
        return np.maximum(coins_L, np.minimum(_MANY, 1.0 - 1.0 / size_L))

    def _alert(self, names: tuple[str, ...], step: int, share_L: FloatArray, dead: list[int]) -> Alert:
        modules = modules_of(names)
        first = {int(place): name for name, place in zip(names[::-1], modules.of_parameter[::-1], strict=True)}
        fact = (
            f"the same units of {len(dead)} of {len(modules.names)} layers, more than {100 * self.max_ratio:.0f} % of "
            f"each, have no gradient in sample after sample; of these layers {first[dead[0]]} is nearest to the output."
        )
        layers = listing(dead, lambda index: f"{first[index]} {100 * share_L[index]:.0f} %")
        cause = (
            "not clear: either dead units (ReLUs that never fire, or a layer whose output is multiplied by 0 or not "
            "used), or a softmax or a gate after them that is saturated; their outputs tell them apart"
        )
        remedy = (
            "check what follows the layer nearest to the output (masks, dropout, its use), its bias and its "
            "initialisation; lower the learning rate, use LeakyReLU or GELU"
        )
        # For a first layer without a bias, inputs of 0 look like an output that is multiplied by 0.
        front = np.flatnonzero(~np.isnan(share_L))[:2].tolist()
        is_off = share_L[front[0]] == 1.0 or front[0] in dead
        if is_off and front[-1] not in dead and not modules.has_bias[front[0]]:
            cause = (
                "not clear: either dead units in the first layer, which has no bias, or the data has changed: the "
                "layers after the first one get their gradients; a look at the batch tells them apart"
            )
        return self._finding(step, fact, cause, remedy, layers=layers)

    def _empty_alert(self, step: int, modules: tuple[str, ...], place: int, num: int, present_L: BoolArray) -> Alert:
        fact = (
            f"for {num} samples the weights of {modules[place]} have had no gradient while its bias has one: "
            "every input of this layer is 0."
        )
        cause = "dead units in the layer before it, or an output of it that is multiplied by 0"
        remedy = "check what feeds this layer: masks, dropout, the layer's bias; lower the learning rate"
        if place == int(np.argmax(present_L)):
            cause = (
                "not clear: either the data has changed, or a mask or dropout multiplies it by 0: this layer is the "
                "first, and its inputs are all 0; a look at the batch tells them apart"
            )
            remedy = "check the data, its loading and its normalisation, and masks and dropout on the inputs"
        return self._finding(step, fact, cause, remedy)


def _from_the_start(snapshot: Snapshot, sample: int, dead_L: BoolArray) -> BoolArray:
    """Return `dead_L` if these are all layers from the input up to one and no zero weight explains it; else none.

    Gradients do not pass a weight that is 0 at first, and a few units may be off by chance.
    """
    num = leading(dead_L)
    is_waiting = np.isnan(snapshot.param_norm[sample]).any() or is_held_up(snapshot, sample)
    is_by_chance = not num or num_units(snapshot, sample)[num - 1] < _MIN_UNITS
    return np.zeros_like(dead_L) if is_by_chance or is_waiting or dead_L[num:].any() else dead_L


def _are_no_layers(snapshot: Snapshot, sample: int) -> BoolArray:
    """Whether modules are a few numbers without a weight, as limits of activations that none reaches yet: [L]."""
    are_weights = ["weight" in name for name in snapshot.names]
    no_weights_L: BoolArray = np.bincount(modules_of(snapshot.names).of_parameter, are_weights) == 0
    return no_weights_L & (num_units(snapshot, sample) < _MIN_UNITS)


def _alike(share_NL: FloatArray, size_L: FloatArray) -> BoolArray:
    """Whether the shares vary less from sample to sample than those of independent units would: [L]."""
    mean_L = share_NL.mean(axis=0)
    with np.errstate(invalid="ignore"):
        alike: BoolArray = np.ptp(share_NL, axis=0) <= np.sqrt(mean_L * (1 - mean_L) / size_L)
    return alike
