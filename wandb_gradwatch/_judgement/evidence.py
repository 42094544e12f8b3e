"""What is known at the moment of a finding: facts of its sample, of those just before, and of the beginning."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Final

import numpy as np

from .._measure.columns import BoolArray, Column, FloatArray
from ..snapshot import keys
from ..snapshot._arrays import derived
from .facts import X3, X5, X10, X30, Facts, where

# P watched parameters, L modules

NEAR: Final = 12  # samples before a finding in which its cause is looked for
_DECIDING: Final = 0.005  # change of the parameters' log norm per step below which an update explains nothing


class Evidence:
    """The facts about one finding.

    Args:
        facts: of the sample in which it was found.
        kind: of the symptom.
        says: what was seen.
        places: the parameters or modules concerned.
        of: what the places are of.
    """

    def __init__(self, facts: Facts, kind: str, places: list[int], of: str) -> None:
        self.f, self.kind, self.places, self.of = facts, kind, places, of
        self.run, self.structure, self.past = facts.run, facts.structure, facts.past
        self.step = facts.step
        self.is_start = facts.step <= 2
        self.is_early = facts.step < 40

    def _near(self, name: str, now: float, num: int = NEAR) -> list[float]:
        return [value for value in [*self.past.scalars[name][1 - num :], now] if value == value]

    # The learning rate

    @derived
    def rate_rise(self) -> float:
        """Largest log factor between the learning rates of two samples in a row, of the newest ones."""
        rates = [rate for rate in self._near("rate", self.f.rate) if rate > 0]
        return max((math.log(b) - math.log(a) for a, b in pairwise(rates)), default=math.nan)

    # Where the gradient norm left its usual level

    @derived
    def _usual(self) -> list[float]:
        return [*self.past.scalars["usual"], self.f.usual]

    @derived
    def onset(self) -> int | None:
        """The newest of the last samples whose norm left the usual level at once, counted back (0: this one)."""
        usual = self._usual
        for back in range(min(NEAR, len(usual) - 3)):
            at = len(usual) - 1 - back
            if usual[at] > X5 and not usual[at - 1] > X3:
                return back
        return None

    @derived
    def jump(self) -> float:
        """Log factor by which the norm left the usual level."""
        return math.nan if self.onset is None else self._usual[len(self._usual) - 1 - self.onset]

    @derived
    def stayed(self) -> int:
        """Samples since then."""
        return self.onset or 0

    @derived
    def onset_step(self) -> int:
        steps = [*self.past.scalars["step"], float(self.step)]
        return int(steps[len(steps) - 1 - (self.onset or 0)])

    @derived
    def moved_before(self) -> float:
        """Change of the parameters' log norm per step by the updates right before the onset."""
        moved = [*self.past.scalars["moved"], self.f.moved]
        at = len(moved) - 1 - (self.onset or 0)
        return max([value for value in moved[max(at - 1, 0) : at + 1] if value == value], default=math.nan)

    @derived
    def moved_usually(self) -> float:
        moved = [*self.past.scalars["moved"], self.f.moved]
        at = len(moved) - 1 - (self.onset or 0)
        return max([value for value in moved[max(at - 17, 0) : max(at - 1, 0)] if value == value], default=math.nan)

    @derived
    def moved_twice(self) -> float:
        """Second largest change of the parameters' log norm per step among the newest samples."""
        values = sorted(self._near("moved", self.f.moved))
        return values[-2] if len(values) > 1 else math.nan

    @derived
    def changed(self) -> float:
        """Largest median relative change of the weights per step among the newest samples, by witnesses."""
        return max(self._near("change", self.f.change), default=math.nan)

    @derived
    def moves_far(self) -> bool:
        """Whether updates in a row were too large for any training."""
        unseen = self.f.gap > 1 and self.f.moved > 0.05 and self.f.moved * self.f.gap > 0.5
        return self.moved_twice > 0.08 or self._second_change > 0.3 or unseen

    @derived
    def _second_change(self) -> float:
        values = sorted(self._near("change", self.f.change, 5))
        return values[-2] if len(values) > 1 else math.nan

    @derived
    def updates_are_small(self) -> bool:
        """Whether no update of the newest samples can explain anything."""
        known = self.moved_twice == self.moved_twice
        return known and self.moved_twice < _DECIDING and not self.rate_rise > X3 and not self.changed > 0.02

    @derived
    def update_came_first(self) -> bool:
        """Whether an update larger than usual preceded the jump of the norm."""
        if not self.moved_before > _DECIDING:
            return False
        return self.moved_before > 0.1 or self.moved_before > 3 * self.moved_usually

    @derived
    def gradient_came_first(self) -> bool:
        return self.onset is not None and not self.update_came_first and not self.rate_rise > 1.0

    @derived
    def had_grown(self) -> bool:
        """Whether the norm, or the updates, were far above usual before this sample."""
        usual = [value for value in self.past.scalars["usual"][-3:] if value == value]
        moved = [value for value in self.past.scalars["moved"][-3:] if value == value]
        return max(usual, default=0.0) > X10 or max(moved, default=0.0) > 0.1 or self._climbed

    @derived
    def _climbed(self) -> bool:
        norms = [value for value in self.past.scalars["raised"][-8:] if value == value]
        return len(norms) >= 4 and norms[-1] - norms[0] > X10 and norms == sorted(norms)

    @derived
    def alike(self) -> bool:
        """Whether all parameters have grown by one factor."""
        change_P = (self.f.w_P - self.f.w_before_P)[self.f.sizes_P >= 16]
        change_P = change_P[np.isfinite(change_P)]
        return bool(change_P.size > 2 and np.ptp(change_P) < 0.1 * abs(change_P.min()) and change_P.min() > 0.01)

    @derived
    def one_moved(self) -> float:
        """Change of the log norm of the parameter that changed most by the update before the onset, beyond the typical
        one."""
        back = self.onset or 0
        rows = self.past.rows
        names = self.structure.names
        now_P = self.f.rows_PC[:, Column.PARAM_SUM_SQ] if not back else rows.back(Column.PARAM_SUM_SQ, names, back)
        before_P = rows.back(Column.PARAM_SUM_SQ, names, back + 1)
        change_P = 0.5 * np.abs(np.log(now_P / before_P))
        change_P = change_P[np.isfinite(change_P)]
        return float(change_P.max() - np.median(change_P)) if change_P.size > 1 else 0.0

    # The loss

    @derived
    def loss_begin(self) -> float:
        """Magnitude of the first loss."""
        return abs(self.past.first.get("loss", self.f.loss))

    @derived
    def loss_factor(self) -> float:
        """The loss / the largest before, as a power of ten."""
        before = [abs(value) for value in self.past.scalars["loss"] if value == value]
        largest = max(before, default=0.0)
        if not (largest > 0 and abs(self.f.loss) > 0):
            return math.nan
        return math.log10(abs(self.f.loss)) - math.log10(largest)

    @derived
    def loss_is_good(self) -> bool:
        return self.f.loss == self.f.loss and not self.f.bad_loss

    @derived
    def _bad_rank(self) -> float:
        """The rank from which NaN or Inf comes; NaN if that is unknown."""
        return self.f.metric(keys.FIRST_NONFINITE_RANK)

    @derived
    def is_of_another_rank(self) -> bool:
        return self._bad_rank == self._bad_rank and self._bad_rank != self.structure.info.rank

    @derived
    def may_be_of_another_rank(self) -> bool:
        """Whether what this rank has seen, all finite, does not explain NaN or Inf from the last layer back."""
        is_unknown = self._bad_rank != self._bad_rank and self.structure.info.num_ranks > 1
        return is_unknown and self.loss_is_good and not self.outputs_are_bad and not self.clean_after

    @derived
    def outputs_are_good(self) -> bool:
        return self.f.fact("output_num_nonfinite") == 0

    @derived
    def outputs_are_bad(self) -> bool:
        return self.f.fact("output_num_nonfinite") > 0

    @derived
    def inputs_are_good(self) -> bool:
        return self.f.fact("input_num_nonfinite") == 0

    @derived
    def inputs_are_bad(self) -> bool:
        return self.f.fact("input_num_nonfinite") > 0

    @derived
    def _usual_inputs(self) -> float:
        before = [value for value in self.past.scalars["inputs"] if value > 0]
        return float(np.median(before)) if len(before) >= 3 else math.nan

    @derived
    def inputs_jump(self) -> float:
        """Log of the most unusual inputs of the newest samples / the usual ones before."""
        newest = [value for value in self._near("inputs", self.f.inputs, (self.onset or 0) + 1) if value > 0]
        jumps = [math.log(value) - math.log(self._usual_inputs) for value in newest if self._usual_inputs > 0]
        return max(jumps, key=abs, default=math.nan)

    @derived
    def inputs_stay(self) -> bool:
        """Whether several of the newest inputs are far from usual, this sample's among them."""
        newest = [value for value in self._near("inputs", self.f.inputs, 3) if value > 0]
        far = [abs(math.log(value) - math.log(self._usual_inputs)) > X3 for value in newest if self._usual_inputs > 0]
        return sum(far) + self.run.num_skipped >= 2 and bool(far and far[-1])

    # Where in the model

    @derived
    def bad_modules(self) -> list[int]:
        """The modules with NaN or Inf."""
        bad_P, module_P = self.f.bad_P & self.f.present_P, self.structure.module_P
        return sorted({int(module_P[place]) for place in where(bad_P)})

    @derived
    def bad_at(self) -> str:
        """The module nearest the output with NaN or Inf: the backward reached it first."""
        return self.structure.modules.names[self.bad_modules[-1]] if self.bad_modules else ""

    @derived
    def clean_after(self) -> bool:
        present = {int(self.structure.module_P[place]) for place in where(self.f.present_P)}
        return bool(self.bad_modules) and max(present, default=-1) > self.bad_modules[-1]

    @derived
    def bad_is_first(self) -> bool:
        return self.bad_modules == [0]

    @derived
    def bias_is_clean(self) -> bool:
        """Whether, in the bad module nearest the output, the weights are bad and the bias is not."""
        if not self.bad_modules:
            return False
        own_P = (self.structure.module_P == self.bad_modules[-1]) & self.structure.is_bias_P & self.f.present_P
        return bool(own_P.any()) and not bool(self.f.bad_P[own_P].any())

    @derived
    def is_broken(self) -> bool:
        """Whether parameters were not finite before this sample's update."""
        return self.f.is_broken

    @derived
    def broken_where_zero(self) -> bool:
        """Whether parameters are not finite exactly where the gradient before was 0: 0 / 0 in the optimizer."""
        broken_P = self.f.rows_PC[:, Column.PARAM_NUM_NONFINITE]
        zeros_P = self.past.rows.back(Column.NUM_ZERO, self.structure.names)
        return self.f.is_broken and bool((broken_P == zeros_P)[self.f.broken_P].all())

    @derived
    def nan_share(self) -> float:
        """Share of the parameters with NaN, not only Inf."""
        nan_P = self.f.snapshot.num_nan[self.f.place] > 0
        return float((nan_P & self.f.present_P).sum()) / max(int(self.f.present_P.sum()), 1)

    @derived
    def has_inf_only(self) -> bool:
        return self.nan_share == 0

    @derived
    def rises_L(self) -> FloatArray:
        return self.f.rise_L

    @derived
    def _edge(self) -> tuple[str, str, float] | None:
        """The module from which back norms are far above usual, the next one, which is usual, and the log factor."""
        known = where(np.isfinite(self.rises_L))
        high = [place for place in known if self.rises_L[place] > X30]
        after = [place for place in known if high and place > high[-1]]
        if not after or len(high) < 0.8 * sum(place < after[0] for place in known):
            return None
        factor = float(min(self.rises_L[place] for place in high) - max(self.rises_L[place] for place in after))
        names = self.structure.modules.names
        usual = max(float(self.rises_L[place]) for place in after) < X3
        return (names[high[-1]], names[after[0]], factor) if factor > X10 and usual else None

    @derived
    def edge_at(self) -> str:
        return self._edge[0] if self._edge is not None else ""

    @derived
    def edge_after(self) -> str:
        return self._edge[1] if self._edge is not None else ""

    @derived
    def is_behind_norm(self) -> bool:
        """Whether the usual part begins with a normalisation."""
        return self._edge is not None and "Norm" in self.structure.info.classes.get(self._edge[1], "")

    @derived
    def only_branch(self) -> str:
        """The branch of the model whose norms alone are far above usual; "" without one."""
        branches = np.array(self.structure.branch_L)
        known_L = np.isfinite(self.rises_L)
        for branch in dict.fromkeys(self.structure.branch_L):
            own_L = known_L & (branches == branch)
            others_L = known_L & (branches != branch)
            if own_L.any() and others_L.any() and self.rises_L[own_L].min() - self.rises_L[others_L].max() > X10:
                return str(branch)
        return ""

    @derived
    def only_parameters(self) -> list[str]:
        """The few parameters whose gradients alone are far above usual; [] if there are others, or many."""
        rise_P = self.f.rise_P[self.f.is_weight_P]
        known_P = rise_P[np.isfinite(rise_P)]
        high = where((self.f.rise_P > X30) & self.f.is_weight_P)
        others = known_P[known_P <= X30]
        if not high or len(high) > max(len(known_P) // 4, 1) or not others.size or np.max(others) > X5:
            return []
        return [self.structure.names[place] for place in high]

    def share_of(self, chosen_P: BoolArray) -> float:
        """Share of the squared norm in these parameters."""
        squares_P = np.nan_to_num(self.f.rows_PC[:, Column.GRAD_SUM_SQ], posinf=0.0)
        total = float(squares_P.sum())
        return float(squares_P[chosen_P].sum()) / total if total > 0 else 0.0

    @derived
    def recurrent_share(self) -> float:
        return self.share_of(self.structure.is_recurrent_P)

    @derived
    def attention_share(self) -> float:
        return self.share_of(self.structure.is_attention_P) if self.structure.is_attention_P.any() else 0.0

    @derived
    def router_share(self) -> float:
        return self.share_of(self.structure.is_router_P) if self.structure.is_router_P.any() else 0.0

    @derived
    def scatter_before_norm(self) -> float:
        """Median log change from sample to sample before the last batch norm, less the largest after it."""
        norms = [place for place, name in enumerate(self.structure.class_L) if "BatchNorm" in name]
        rows = self.f.g_before(64)
        if not norms or not norms[-1] or len(rows) < 8:
            return math.nan
        changes = np.abs(np.diff(rows, axis=0))
        scatter_L = np.array(
            [np.median(column[np.isfinite(column)]) if np.isfinite(column).any() else 0.0 for column in changes.T]
        )
        return float(np.median(scatter_L[: norms[-1]]) - scatter_L[norms[-1] :].max())

    # Dead, empty and missing parts

    @derived
    def modules(self) -> list[int]:
        """The modules concerned."""
        if self.of == "modules":
            return self.places
        return sorted({int(self.structure.module_P[place]) for place in self.places})

    @derived
    def names(self) -> list[str]:
        """The names of what is concerned."""
        named = self.structure.modules.names if self.of == "modules" else self.structure.names
        return [named[place] for place in self.places]

    @derived
    def dead_from_start(self) -> bool:
        """Whether the modules concerned were dead from the first sample on."""
        if not self.past.num_seen or not self.modules:
            return self.past.num_seen == 0
        return bool((self.past.first_dead.of(self.structure.modules.names)[self.modules] >= 0.9).all())

    @derived
    def died_slowly(self) -> bool:
        """Whether units died one after the other."""
        rows = self.f.dead_before(64)[:, self.modules]
        if len(rows) < 3:
            return False
        steps = np.diff(np.concatenate([rows, self.f.dead_L[None, self.modules]]), axis=0)
        largest = float(np.nanmax(steps, initial=0.0))
        return 0 < largest <= 0.25

    @derived
    def is_last_dead(self) -> bool:
        return bool(self.modules) and self.modules[-1] == len(self.structure.modules.names) - 1

    @derived
    def is_first_empty(self) -> bool:
        """Whether the first layer is the one whose inputs are 0."""
        return bool(self.f.is_empty_L[:1].any())

    @derived
    def feeds_nothing(self) -> bool:
        """Whether the layer after the last one concerned has inputs of 0."""
        after = self.modules[-1] + 1 if self.modules else 0
        return 0 < after < len(self.f.is_empty_L) and bool(self.f.is_empty_L[after])

    @derived
    def feeds_relu(self) -> bool:
        return bool(self.modules) and self.structure.feeds_relu(self.modules[-1])

    @derived
    def learns_in_front(self) -> bool:
        """Whether a layer in front of those concerned has a gradient, which then passes through them."""
        if not self.modules or not self.modules[0]:
            return False
        front_L = self.f.dead_L[: self.modules[0]]
        return bool((np.nan_to_num(front_L, nan=1.0) < 0.5).any())

    @derived
    def are_experts(self) -> bool:
        return bool(self.names) and all(re.search("expert|router", name, re.IGNORECASE) for name in self.names)

    @derived
    def is_tiny_batch(self) -> bool:
        return self.f.fact("batch_size") / max(self.f.fact("num_forwards"), 1.0) <= 4

    @derived
    def rate_is_zero_there(self) -> bool:
        """Whether the learning rate of the parameters concerned is 0."""
        rates_P = self.f.rates_P[self.places] if self.of == "parameters" else self.f.rates_P
        return bool(rates_P.size) and bool((rates_P == 0).all())
