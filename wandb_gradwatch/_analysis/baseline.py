"""The usual range of a norm, by robust mean and standard deviation of log norms; and steady growth over time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from .._measure.columns import FloatArray

# N past samples

_MIN_STD: Final = 0.01  # of a log norm, so that a change of a constant norm by 1 % is not an explosion
_OUTLIER_STDS: Final = 5.0
_MIN_FOR_TRIMMING: Final = 8
_RECENT: Final = 16
_MAX_EXPONENT: Final = 700.0  # e to a larger power overflows a float64
_QUICK, _SLOW_FACTOR = 40, 5.0
# Each length is at most about 30 % larger than the one before, so a rise is found soon after it has become long enough.
_GROWTH_LENGTHS: Final = (5, 6, 7, 8, 10, 12, 15, 18, 22, 27, 33, 40, 50, 64)


def student_factor(stds: float, num_samples: int) -> float:
    """The number of estimated standard deviations that is as unlikely, after `num_samples`, as `stds` exact ones.

    Student's t-quantile of the same tail (Wallace's approximation, accurate to about 5 % from 4 degrees of freedom on),
    times sqrt(1 + 1/n) because the mean is also estimated: student_factor(3, 5) = 7.5 (exactly 7.3).
    """
    dof = num_samples - 1
    z = stds * (8 * dof + 3) / (8 * dof + 1)
    return math.sqrt(dof * math.expm1(min(z * z / dof, _MAX_EXPONENT))) * math.sqrt(1 + 1 / num_samples)


def median_and_scatter(values_N: FloatArray) -> tuple[float, float]:
    """The median, and the standard deviation of a normal distribution with this median absolute deviation."""
    median = float(np.median(values_N))
    return median, 1.4826 * float(np.median(np.abs(values_N - median)))


def limit_of(log_norms_N: Sequence[float], *, stds: float, min_factor: float, record_factor: float | None) -> float:
    """Return the largest norm that is still usual after at least 2 norms, of which these are the logarithms.

    Past samples far from the median are excluded: the first step of a training is often 100 times larger than all
    later steps, and would hide the next explosion.

    Args:
        stds: number of standard deviations above the mean at the limit, if both were known exactly.
        min_factor, record_factor: the limit is at least this multiple of the usual norm, and of the second largest of
            the last 16 norms, excluded or not (None: off).
    """
    past = np.asarray(log_norms_N, dtype=np.float64)
    record = float(np.sort(past[-_RECENT:])[-2])  # the second largest, because the largest may be a transient
    if len(past) >= _MIN_FOR_TRIMMING:
        median, scatter = median_and_scatter(past)
        kept = past[np.abs(past - median) <= _OUTLIER_STDS * max(scatter, _MIN_STD)]
        past = kept if len(kept) >= _MIN_FOR_TRIMMING else past
    mean, std = float(past.mean()), max(float(past.std(ddof=1)), _MIN_STD)
    limit = mean + max(student_factor(stds, len(past)) * std, math.log(min_factor))
    return bounded_exp(limit if record_factor is None else max(limit, record + math.log(record_factor)))


@dataclass(frozen=True)
class Growth:
    """A steady rise: `factor` over the last `num_samples` samples."""

    factor: float
    num_samples: int


def evenly_apart(steps: Sequence[int]) -> list[int]:
    """The indices of samples at least half as far apart as the last two samples; the last sample is included."""
    if len(steps) < 2:
        return list(range(len(steps)))
    kept, least = [len(steps) - 1], (steps[-1] - steps[-2]) / 2
    for place in reversed(range(len(steps) - 1)):
        if steps[kept[-1]] - steps[place] >= least:
            kept.append(place)
    return kept[::-1]


def steady_growth(log_norms_N: Sequence[float], steps_N: Sequence[int], *, factor: float) -> Growth | None:
    """The shortest steady rise up to the last sample, by at least `factor` above all earlier norms; None without one.

    A rise is steady if a straight line through the last log norms rises by that factor with a t-value of at least 8
    (more for few samples). Scatter, a single spike and a jump to a new level are not steady. A rise over more than 40
    steps must be 5 times as large, because norms also grow slowly when the loss leaves a plateau. The rise must exceed
    the norms before it: a return to an earlier level is not growth.
    """
    if len(log_norms_N) < _GROWTH_LENGTHS[0] or log_norms_N[-1] - min(log_norms_N) < math.log(factor):
        return None
    past: FloatArray = np.asarray(log_norms_N, dtype=np.float64)
    for length in _GROWTH_LENGTHS:
        if length > len(past):
            return None
        y = past[-length:]
        x = np.arange(length) - (length - 1) / 2
        slope = float(x @ y / (x @ x))
        rise = slope * (length - 1)
        scatter = math.sqrt(float(np.sum((y - y.mean() - slope * x) ** 2)) / (length - 2) / float(x @ x))
        needed = student_factor(4.0, length - 1)  # degrees of freedom: length - 2
        steady = slope > max(needed, 8.0) * scatter and float(np.max(np.diff(y))) < rise / 2  # otherwise a jump
        num_steps = (steps_N[-1] - steps_N[-length]) * length / (length - 1)
        needed_factor = factor if num_steps <= _QUICK else factor * _SLOW_FACTOR
        largest_before = float(past[:-length].max(initial=-math.inf))
        if steady and min(rise, y[-1] - largest_before) >= math.log(needed_factor):
            return Growth(factor=bounded_exp(rise), num_samples=length)
    return None


def bounded_exp(value: float) -> float:
    """e to this power; infinity if a float64 cannot hold it."""
    return math.exp(value) if value < _MAX_EXPONENT else math.inf
