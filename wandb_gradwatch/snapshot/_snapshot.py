"""Snapshot: the samples of one window on the host, and every statistic that is derived from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .._measure.change import MULTIPLIED, is_limit
from .._measure.columns import (
    CLIP_TOLERANCE,
    NONFINITE_COLUMNS,
    NUM_BINS,
    NUM_COLUMNS,
    ZERO_BIN,
    Column,
    FloatArray,
    IntArray,
    histogram_edges,
    magnitude_edges,
    merge_rows,
)
from .._measure.probe_values import MetricHistogram
from . import keys
from ._arrays import derived, divided_where, finite_or_missing, fold_signs, frozen, quantile_of, ratio, too_small
from ._as_row import row_of
from ._overview import Overview, overview_of
from ._shapes import GroupBy, group_function, group_names, merge_snapshots, select_samples

# S samples in the window, P watched parameters (or groups), C columns, B histogram bins, M magnitude bins


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The samples of one window: gradients after unscaling, accumulation and reduction over ranks, before clipping.

    A missing value is NaN, never 0: no gradient arrived for that parameter in that sample. Statistics have the shape
    [S, P] unless stated otherwise: S samples, and P watched parameters or groups.

    Args:
        steps: [S] step of each sample.
        names: [P] names of parameters, with dots as in `named_parameters()`, or names of groups.
        rows: [S, P, C] the mergeable rows: one value per sample, name and column.
        histogram: [P, B] histograms of the gradients of the samples in `histogram_steps`; None if none was taken.
        histogram_steps: the steps whose gradients the histogram counts.
        loss_scale: [S] loss scale of each sample; NaN if there is none.
        skipped: [S] True where AMP skipped the update.
        trainable: [P] False for parameters that are frozen, or are in no optimizer and not reached by a backward.
        metrics: further values by key, each [S]; the window's last value is logged under the key, with / for each dot.
            Keys that begin with `keys.FACT` are facts about the sample (`keys.SAMPLE_FACTS`), and are not logged.
        overhead_ratio: the share of the time since watch() that watching took; NaN if not measured.
        metric_histograms: further histograms over the whole window by key, such as those of activations.
        per_parameter: facts about each parameter by name, each [S, P]: `keys.PARAMETER_FACTS`, such as the learning
            rate of the group that holds it; NaN is missing. Groups of parameters have none.
    """

    steps: IntArray
    names: tuple[str, ...]
    rows: FloatArray
    histogram: IntArray | None = None
    histogram_steps: tuple[int, ...] = ()
    loss_scale: FloatArray = field(default=None)  # type: ignore[arg-type]  # filled in __post_init__
    skipped: npt.NDArray[np.bool_] = field(default=None)  # type: ignore[arg-type]  # filled in __post_init__
    trainable: npt.NDArray[np.bool_] = field(default=None)  # type: ignore[arg-type]  # filled in __post_init__
    metrics: Mapping[str, FloatArray] = field(default_factory=dict)
    overhead_ratio: float = float("nan")
    metric_histograms: Mapping[str, MetricHistogram] = field(default_factory=dict)
    per_parameter: Mapping[str, FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_samples, num_names = len(self.steps), len(self.names)
        if self.rows.shape != (num_samples, num_names, NUM_COLUMNS):
            raise ValueError(
                f"rows must be [S, P, C] = {(num_samples, num_names, NUM_COLUMNS)}, but are {self.rows.shape}"
            )
        if self.histogram is not None and self.histogram.shape != (num_names, NUM_BINS):
            raise ValueError(f"histogram must be [P, B] = {(num_names, NUM_BINS)}, but is {self.histogram.shape}")
        for name, values_SP in self.per_parameter.items():
            if values_SP.shape != (num_samples, num_names):
                raise ValueError(
                    f"per_parameter[{name!r}] must be [S, P] = {(num_samples, num_names)}, but is {values_SP.shape}"
                )
        arrays = vars(self)
        if self.loss_scale is None:
            arrays["loss_scale"] = np.full(num_samples, np.nan)
        if self.skipped is None:
            arrays["skipped"] = np.zeros(num_samples, dtype=bool)
        if self.trainable is None:
            arrays["trainable"] = np.ones(num_names, dtype=bool)
        for name in ("steps", "rows", "histogram", "loss_scale", "skipped", "trainable"):
            if arrays[name] is not None:
                arrays[name] = frozen(arrays[name])

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        span = f"steps {self.steps[0]}..{self.steps[-1]}" if len(self) else "no samples"
        return f"Snapshot({span}, {len(self.names)} names, histogram={'no' if self.histogram is None else 'yes'})"

    def as_row(self, step: int | None = None) -> dict[str, float]:
        """Return the numbers of one sample under the keys of a W&B row, for any other tracker.

        Values that are missing have no key. Numbers of `watch(metrics=...)` are those of the sample, if it has them.

        Args:
            step: of the sample; None: the newest one.

        Raises:
            ValueError: there is no sample of this step.

        Examples:
            >>> from wandb_gradwatch.snapshot import Snapshot
            >>> from wandb_gradwatch._measure.columns import NUM_COLUMNS, Column
            >>> rows = np.zeros((1, 1, NUM_COLUMNS))
            >>> rows[0, 0, [Column.NUM_ELEMENTS, Column.GRAD_SUM_SQ]] = 2, 25
            >>> Snapshot(np.array([7]), ("head.weight",), rows).as_row()["grad_norm/head/weight"]
            5.0
        """
        return row_of(self, step)

    def column(self, column: Column) -> FloatArray:
        """One raw column: [S, P]."""
        return self.rows[..., column]

    @derived
    def column_sums(self) -> FloatArray:
        """Sums over the present names: [S, C]; meaningful only for columns that merge by addition."""
        with np.errstate(over="ignore", invalid="ignore"):
            sums_SC: FloatArray = np.add.reduce(self.rows, axis=1)
            if any([num != num for num in sums_SC[:, Column.NUM_ELEMENTS].tolist()]):  # NaN: some names are absent
                return merge_rows(self.rows, axis=1)
            return sums_SC

    @derived
    def present(self) -> npt.NDArray[np.bool_]:
        """Where a gradient arrived: [S, P]."""
        present: npt.NDArray[np.bool_] = ~np.isnan(self.num_elements)
        return present

    # One name in one sample, before clipping unless stated otherwise: [S, P] each.

    @derived
    def num_elements(self) -> FloatArray:
        """Number of elements, finite or not."""
        return self.column(Column.NUM_ELEMENTS)

    @derived
    def num_nan(self) -> FloatArray:
        """Number of NaN elements; where `arose_after_backward` is True, in the gradient that the optimizer received."""
        return self._counts(Column.NUM_NAN, Column.RECEIVED_NUM_NAN)

    @derived
    def num_inf(self) -> FloatArray:
        """Number of infinite elements of either sign, in the same gradient as `num_nan`."""
        return self._counts(Column.NUM_INF, Column.RECEIVED_NUM_INF)

    def _counts(self, left: Column, received: Column) -> FloatArray:
        if not self.arose_after_backward.any():  # the usual case
            return self.column(left)
        return np.where(self.arose_after_backward[:, None], self.column(received), self.column(left))

    @derived
    def num_nonfinite(self) -> FloatArray:
        """Number of NaN and infinite elements."""
        return self.num_nan + self.num_inf

    @derived
    def num_finite(self) -> FloatArray:
        """Number of finite elements: the denominator of means and standard deviations."""
        return self.num_elements - self.column(Column.NUM_NAN) - self.column(Column.NUM_INF)

    @derived
    def grad_norm(self) -> FloatArray:
        """L2 norm of the finite elements; infinite above 1.3e154, which only float64 gradients reach.

        Missing where no element is finite, and where the norm is not 0 but below 1e-146: its square is inaccurate.
        """
        return self._norm(Column.GRAD_SUM_SQ)

    def _norm(self, column: Column) -> FloatArray:
        norm = np.sqrt(self.column(column))
        return norm if self._has_no_norm is None else np.where(self._has_no_norm, np.nan, norm)

    @derived
    def _has_no_norm(self) -> npt.NDArray[np.bool_] | None:
        """Where the sum of squares is near 0 although the gradient is not 0, so the norm is unknown: [S, P]."""
        tiny_SP = too_small(self.column(Column.GRAD_SUM_SQ))
        if tiny_SP is None:
            return None
        nothing_is_finite_SP = (self.num_finite == 0) & (self.num_elements > 0)
        has_none_SP: npt.NDArray[np.bool_] = nothing_is_finite_SP | (tiny_SP & (self.grad_abs_max > 0))
        return has_none_SP

    @derived
    def grad_norm_clipped(self) -> FloatArray:
        """L2 norm of the gradient that the optimizer received."""
        return self._norm(Column.RECEIVED_SUM_SQ)

    @derived
    def grad_mean(self) -> FloatArray:
        """Mean of the finite elements."""
        return ratio(self.column(Column.GRAD_SUM), self.num_finite)

    @derived
    def grad_std(self) -> FloatArray:
        """Population standard deviation of the finite elements."""
        mean_sq = ratio(self.column(Column.GRAD_SUM_SQ), self.num_finite)
        with np.errstate(over="ignore", invalid="ignore"):  # if the squares overflow, the deviation is unknown
            # Rounding can make the variance of a constant gradient slightly negative.
            std = np.sqrt(np.maximum(mean_sq - self.grad_mean**2, 0.0))
        return std if self._has_no_norm is None else np.where(self._has_no_norm, np.nan, std)

    @derived
    def grad_min(self) -> FloatArray:
        """Smallest finite element."""
        return finite_or_missing(self.column(Column.GRAD_MIN))

    @derived
    def grad_max(self) -> FloatArray:
        """Largest finite element."""
        return finite_or_missing(self.column(Column.GRAD_MAX))

    @derived
    def grad_abs_max(self) -> FloatArray:
        """Largest magnitude of a finite element."""
        return np.maximum(np.abs(self.grad_min), np.abs(self.grad_max))

    @derived
    def grad_abs_min_nonzero(self) -> FloatArray:
        """Smallest magnitude of a non-zero finite element; NaN if there is none."""
        return finite_or_missing(self.column(Column.GRAD_ABS_MIN_NONZERO))

    @derived
    def dead_ratio(self) -> FloatArray:
        """Share of the elements with |g| <= the dead threshold; NaN if no element is finite."""
        return self._share(Column.NUM_DEAD)

    @derived
    def zero_ratio(self) -> FloatArray:
        """Share of the elements that are exactly 0; NaN if no element is finite."""
        return self._share(Column.NUM_ZERO)

    def _share(self, column: Column) -> FloatArray:
        return divided_where(self.num_finite != 0, self.column(column), self.num_elements)

    @derived
    def param_norm(self) -> FloatArray:
        """L2 norm of the parameter's finite elements, before the update; NaN if no element is finite."""
        broken = self.column(Column.PARAM_NUM_NONFINITE)
        return np.where((broken > 0) & (broken == self.num_elements), np.nan, np.sqrt(self.column(Column.PARAM_SUM_SQ)))

    @derived
    def grad_param_ratio(self) -> FloatArray:
        """grad_norm / param_norm; NaN for a parameter that is all zero (a fresh bias, LoRA's B)."""
        return ratio(self.grad_norm, self.param_norm)

    # The whole model: [S] each.

    @derived
    def total(self) -> Snapshot:
        """All names merged into one, named "total"."""
        return self.by_group(lambda _: "total") if self.names else self

    @derived
    def total_grad_norm(self) -> FloatArray:
        """L2 norm over all watched parameters: [S]."""
        return self._total_norm(Column.GRAD_SUM_SQ)

    @derived
    def total_grad_norm_clipped(self) -> FloatArray:
        """L2 norm over all gradients that the optimizers received: [S]."""
        return self._total_norm(Column.RECEIVED_SUM_SQ)

    def _total_norm(self, column: Column) -> FloatArray:
        if not self.names:
            return np.full(len(self), np.nan)
        if too_small(self.column_sums[:, Column.GRAD_SUM_SQ]) is not None:
            return self.total._norm(column)[:, 0]
        return np.sqrt(self.column_sums[:, column])

    @derived
    def clipped(self) -> FloatArray:
        """1 where the gradient was clipped, 0 where it was not, NaN where that is unknown: [S].

        Clipping multiplies each parameter's gradient by a factor of at most 1, or limits each element. If all gradients
        were multiplied by the same factor, this can also be a change of unit, such as an average over tokens. It counts
        as clipping if torch's functions did it, or if the resulting norm has at most two significant digits.
        """
        before, after = self.column(Column.GRAD_SUM_SQ), self.column(Column.RECEIVED_SUM_SQ)
        smaller = np.logical_or.reduce(after < before * (1 - CLIP_TOLERANCE) ** 2, axis=1)
        unknown = np.isnan(self.total_grad_norm + self.total_grad_norm_clipped) | self.arose_after_backward
        clipped = smaller.astype(np.float64)
        if (said := self.metrics.get(keys.CLIPPED)) is not None:
            clipped = np.where(np.isnan(said) & ~self.changed, clipped, said)
            for sample in np.flatnonzero(clipped == MULTIPLIED):
                clipped[sample] = 1.0 if is_limit(float(self.total_grad_norm_clipped[sample])) else np.nan
        return np.where(unknown, np.nan, clipped)

    @derived
    def changed(self) -> npt.NDArray[np.bool_]:
        """True where gradients changed after the backward other than by clipping: [S]."""
        return self._is_above_0(keys.CHANGED)

    @derived
    def clip_ratio(self) -> float:
        """Share of the window's samples whose gradient was clipped, a float; NaN if unknown for all samples."""
        known = self.clipped[~np.isnan(self.clipped)]
        return float(known.mean()) if known.size else float("nan")

    @derived
    def arose_after_backward(self) -> npt.NDArray[np.bool_]:
        """True where all gradients were finite after the backward, but an optimizer received NaN or Inf: [S]."""
        if not self.has_nonfinite.any():
            return self.has_nonfinite
        return self.has_nonfinite & ~self._any_above_0(Column.NUM_NAN, Column.NUM_INF)

    @derived
    def has_nonfinite(self) -> npt.NDArray[np.bool_]:
        """True where a gradient contained NaN or Inf after the backward, or when an optimizer received it: [S]."""
        if not np.count_nonzero(self.column_sums.take(NONFINITE_COLUMNS, axis=1)):  # NaN (unknown) counts as non-zero
            return np.zeros(len(self), dtype=bool)
        received_S = self._any_above_0(Column.RECEIVED_NUM_NAN, Column.RECEIVED_NUM_INF)
        return received_S | self._any_above_0(Column.NUM_NAN, Column.NUM_INF)

    def _any_above_0(self, first: Column, last: Column) -> npt.NDArray[np.bool_]:
        any_S: npt.NDArray[np.bool_] = np.logical_or.reduce(self.rows[..., first : last + 1] > 0, axis=(1, 2))
        return any_S

    @derived
    def guarded(self) -> npt.NDArray[np.bool_]:
        """True where the guard withheld the update: [S]."""
        return self._is_above_0(keys.GUARDED)

    def _is_above_0(self, key: str) -> npt.NDArray[np.bool_]:
        values_S = self.metrics.get(key)
        return np.zeros(len(self), dtype=bool) if values_S is None else values_S > 0

    @derived
    def left_out(self) -> npt.NDArray[np.bool_]:
        """True where the training loop discarded non-finite gradients and made no optimizer step: [S]."""
        return self._is_above_0(keys.LEFT_OUT)

    @derived
    def inferred(self) -> npt.NDArray[np.bool_]:
        """True where no step was seen, only a reset of the gradients: an update by hand, or a trial point: [S]."""
        return self._is_above_0(keys.INFERRED)

    @derived
    def num_guarded_steps(self) -> float:
        """Number of steps that the guard withheld, including steps between samples; NaN without a guard."""
        counts = self.metrics.get(keys.NUM_GUARDED_STEPS)
        return float("nan") if counts is None else float(np.nansum(counts))

    @derived
    def overview(self) -> tuple[Overview, ...]:
        """Each sample in plain Python numbers, for a fast first check by the rules."""
        return overview_of(self)

    @property
    def edges(self) -> FloatArray:
        """Edges of the histogram's bins: [B + 1], from -inf to +inf; both edges of the bin of zeros are 0."""
        return histogram_edges()

    @derived
    def magnitude_histogram(self) -> IntArray | None:
        """The histogram of |g| without zeros: [P, M]."""
        return None if self.histogram is None else fold_signs(self.histogram)

    def quantile(self, q: npt.ArrayLike) -> FloatArray:
        """The q-quantile of the signed gradient, accurate to one histogram bin: [P], or [Q, P] for a sequence.

        NaN without a histogram.

        Raises:
            ValueError: q is not between 0 and 1.
        """
        return self._quantile(q, self.grad_min, self.grad_max)

    def abs_quantile(self, q: npt.ArrayLike) -> FloatArray:
        """The q-quantile of |g|, zeros included; shapes and errors as for `quantile`."""
        return self._quantile(q, self.grad_abs_min_nonzero, self.grad_abs_max, of_magnitudes=True)

    def _quantile(
        self, q: npt.ArrayLike, low_SP: FloatArray, high_SP: FloatArray, *, of_magnitudes: bool = False
    ) -> FloatArray:
        if not all([0 <= each <= 1 for each in np.ravel(q).tolist()]):
            raise ValueError(f"q={q!r} must be between 0 and 1")
        if self.histogram is None:
            return np.full((*np.shape(q), len(self.names)), np.nan)
        # Without the samples of the histogram, the extremes that bound the open bins are unknown.
        known_S = self.is_counted
        low_P = np.fmin.reduce(low_SP[known_S], axis=0) if known_S.any() else np.full(len(self.names), -np.inf)
        high_P = np.fmax.reduce(high_SP[known_S], axis=0) if known_S.any() else np.full(len(self.names), np.inf)
        counts_PB, edges = self.histogram, self.edges
        if of_magnitudes:
            zeros_P1 = self.histogram[:, ZERO_BIN, None]
            counts_PB = np.concatenate([zeros_P1, self.magnitude_histogram], axis=1)
            edges = np.concatenate([[0.0], magnitude_edges()])
            low_P = np.where(zeros_P1[:, 0] > 0, 0.0, low_P)
        return quantile_of(counts_PB, edges, q, low_P, high_P)

    @derived
    def is_counted(self) -> npt.NDArray[np.bool_]:
        """True for the samples that the histogram counts: [S]."""
        counted = set(self.histogram_steps)
        return np.array([step in counted for step in self.steps.tolist()], dtype=bool)

    def by_group(self, group_by: GroupBy) -> Snapshot:
        """Merge parameters into groups, in the order in which the groups first appear.

        Args:
            group_by: "parameter" (no grouping), "module" (the name up to the last dot), or a function from a
                parameter's name to its group's name.

        Raises:
            ValueError: group_by is none of these.
        """
        return self if group_by == "parameter" else group_names(self, group_function(group_by))

    def sample(self, index: int) -> Snapshot:
        """One sample as a snapshot without histograms; negative indices count from the end."""
        return select_samples(self, [range(len(self))[index]])

    def merge(self, *others: Snapshot) -> Snapshot:
        """Concatenate snapshots in the order given, for example the windows of an epoch.

        If a snapshot lacks a name, that name is missing (NaN) in the snapshot's samples.
        """
        return merge_snapshots((self, *others))
