"""Turns samples into facts, in order, and remembers of each what later ones are compared with."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from .._analysis.memory import PerKind
from .._measure.columns import Column
from ..snapshot import Snapshot, keys
from ..snapshot._overview import Overview
from .facts import Facts, Run
from .past import Past
from .structure import ModelInfo, Structure

# P watched parameters, L modules

_ROUNDING: Final = 1e-3  # largest error of an average over ranks, as a share of the gradients' norm
_CHECKSUM: Final = (keys.RANKS, keys.APART)  # family and metric


class Observer:
    """Sees the samples of a training.

    Args:
        info: what the capture knows of the model.
        every: samples fewer steps apart than this are left out. A trend that is too slow to show from sample to sample
            shows from every twentieth to the next: so measuring more never finds less.
    """

    def __init__(self, info: ModelInfo, every: int = 1) -> None:
        self._info, self._every = info, every
        self.run = Run()
        self._kinds: PerKind[Past] = PerKind(Past)
        self._structure: Structure | None = None
        self._next_step = 0
        self._last: Facts | None = None  # of the newest sample, which is not remembered yet

    def see(self, snapshot: Snapshot, sample: Overview) -> Facts | None:
        """Return the sample's facts, which are valid until the next call; None if it is left out."""
        self._remember_last()
        if (
            self._next_step - self._every <= sample.step < self._next_step
        ):  # an earlier step: the training was rolled back
            return None
        self._next_step = sample.step + self._every if self._every > 1 else 0
        structure = self._structure
        if structure is None or structure.names != snapshot.names:
            structure = self._structure = Structure(snapshot.names, self._info)
        mask = None if sample.is_complete else snapshot.present[sample.place]
        if mask is not None and not mask.any():
            mask = None
        past = self._kinds.of(snapshot.names, mask)
        run = self.run
        run.num_samples += 1
        facts = Facts(snapshot, sample, structure, past, run)
        self._count(facts)
        self._last = facts
        return facts

    def _remember_last(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            self._remember(last)

    def _count(self, facts: Facts) -> None:
        """Count streaks, this sample included, and note what belongs to the beginning."""
        run, names = self.run, facts.structure.names
        if run.num_samples == 1:
            run.first_step = facts.step
            run.of_first = facts.of_weights if facts.step <= 2 else math.nan
            run.depth_first, run.gain_first = facts.depth, facts.gain
            gains_P = facts.gain_P[facts.gain_P > 0]
            run.least_gain = float(gains_P.min()) if gains_P.size else math.nan
        if run.inputs_first != run.inputs_first:
            run.inputs_first = facts.inputs
        if run.outputs_first != run.outputs_first:
            run.outputs_first = facts.fact("output_rms")
        if facts.loss == facts.loss:
            run.num_losses += 1
            run.loss_least_before, run.loss_least = run.loss_least, min(run.loss_least, facts.loss)
            if run.num_losses <= 5:
                run.loss_first = max(run.loss_first if run.loss_first == run.loss_first else 0.0, abs(facts.loss))
            if run.num_losses <= 16:
                run.loss_top = max(run.loss_top, facts.loss)
        self._count_gradients(facts)
        self._count_checksums(facts)
        run.had.of(names)[facts.present_P] = 1.0
        missing_P = facts.missing_P
        trainable_P = facts.present_P | missing_P
        facts.missing = run.missing.see(names, missing_P, trainable_P)
        if not facts.sample.skipped and facts.num_before and facts.sample.norm > 0:
            facts.still = run.still.see(names, facts.same_P & facts.present_P, facts.present_P)
        modules, past = facts.structure.modules.names, facts.past
        if not facts.is_any_dead:  # the usual case
            past.dead.end(modules, 1)
            past.cut.end(modules, 1)
            return
        dead_L = facts.dead_L
        seen_L = ~np.isnan(dead_L)
        facts.dead = past.dead.see(modules, seen_L & (dead_L >= 0.9), seen_L)
        facts.cut = past.cut.see(modules, facts.feeds_nothing_L & seen_L, seen_L)

    def _count_gradients(self, facts: Facts) -> None:
        run = self.run
        run.num_skipped = run.num_skipped + 1 if facts.skipped else 0
        run.num_updates += not (facts.skipped or facts.sample.guarded)
        was_zero = run.num_zero
        run.num_zero = run.num_zero + 1 if facts.all_zero else 0
        run.num_pauses += was_zero > 0 and run.num_zero == 0
        run.num_empty = run.num_empty + 1 if facts.is_empty else 0
        repeated = facts.fact("input_repeated")
        run.num_varied += repeated == 0
        run.num_repeated = run.num_repeated + 1 if repeated == 1 else 0
        if run.num_samples > 1 and facts.num_before:
            before_P = facts.past.rows.back(Column.NUM_ELEMENTS, facts.structure.names)
            if facts.sample.norm > 0 and np.count_nonzero(facts.present_P & np.isnan(before_P)):
                run.came_step = facts.step

    def _count_checksums(self, facts: Facts) -> None:
        """Remember what the checksums of this sample say of the ranks, until there are others."""
        split = {key: keys.split_metric(key) for key in facts.snapshot.metrics}
        known = {parts[1]: facts.metric(key) for key, parts in split.items() if parts and parts[::2] == _CHECKSUM}
        run = self.run
        error = facts.ranks(keys.AVERAGE_ERROR)
        run.num_exact += error <= _ROUNDING
        run.num_inexact += error > _ROUNDING
        if not any(value == value for value in known.values()):
            return
        was_apart, run.apart_ranks = (
            run.apart_ranks,
            sorted(int(name.removeprefix("rank_")) for name, value in known.items() if value == 1 and name != "all"),
        )
        run.apart_step = run.apart_step if was_apart else facts.step

    def _remember(self, facts: Facts) -> None:
        """Add the sample to the past of its kind. Trial points and samples without an update do not belong to it."""
        past, names = facts.past, facts.structure.names
        is_trial = bool(facts.snapshot.inferred[facts.place])
        self.run.has_stepped = bool(self.run.has_stepped or not is_trial)  # a saved state may have had another number
        if facts.skipped or facts.is_empty or (is_trial and self.run.has_stepped):
            return
        past.add(facts.scalars())
        past.rows.add(names, facts.rows_PC)
        if past.num_seen == 1:
            past.first_dead.of(facts.structure.modules.names)[:] = facts.dead_L
        known_P, own_P = past.known_sq.of(names), facts.rows_PC[:, Column.PARAM_SUM_SQ]
        np.copyto(known_P, own_P, where=own_P == own_P)

    def state_dict(self) -> dict[str, Any]:
        self._remember_last()
        return {"run": self.run.state_dict(), "kinds": self._kinds.state_dict(), "next_step": self._next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run.load_state_dict(state["run"])
        self._kinds.load_state_dict(state["kinds"])
        self._next_step = int(state["next_step"])
