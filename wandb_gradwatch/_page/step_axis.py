"""Places rows without an optimizer step on the axis of optimizer steps."""

import math

import numpy as np

from .._measure.columns import FloatArray

# N rows without an optimizer step, K rows with both steps


def steps_between(own_N: FloatArray, placed_K: FloatArray, sampled_K: FloatArray) -> FloatArray:
    """Convert W&B steps of rows without an optimizer step to optimizer steps: [N], using the K rows that have both.

    If a single integer rate fits all K rows (each is logged after its sample, and before the next one is taken), it is
    used. Otherwise steps are interpolated between rows, and extrapolated at both ends. With K = 1 one optimizer step
    per W&B step is assumed, from 0 on if possible.

    Examples:
        The user logs a row at every step, counted from 0, and samples 10 and 18 were logged at W&B steps 9 and 19.
        W&B step 150 is then optimizer step 151.

        >>> steps_between(np.array([0.0, 14, 150]), np.array([9.0, 19]), np.array([10.0, 18])).tolist()
        [1.0, 15.0, 151.0]
    """
    placed_K, first = np.unique(placed_K, return_index=True)
    sampled_K = np.maximum.accumulate(sampled_K[first])
    if len(placed_K) < 2:
        return own_N + max([1.0, *(sampled_K - placed_K)]) if len(placed_K) else own_N
    rate_K = np.diff(sampled_K) / np.diff(placed_K)
    if rate_K.all() and (found := _whole_rate(placed_K, sampled_K)) is not None:
        rate, least, most = found
        return np.asarray(rate * own_N + min(max(rate, least), most))  # W&B counts from 0
    left_N = np.clip(np.searchsorted(placed_K, own_N, side="right") - 1, 0, len(placed_K) - 2)
    return np.asarray(sampled_K[left_N] + rate_K[left_N] * (own_N - placed_K[left_N]))


def _whole_rate(placed_K: FloatArray, sampled_K: FloatArray) -> tuple[float, float, float] | None:
    """Return an integer rate that fits all K rows, and the limits of its offset; None if there is none.

    The mean rate is preferred, then the smallest one. A rate fits if sampled_i - rate * placed_i is at most
    sampled_(j + 1) - rate * placed_j for all i and j. What a rate misses shows the next one that can fit, so that few
    rates are tried, however large the steps are.
    """
    mean = float(np.ptp(sampled_K) / np.ptp(placed_K))
    rate, is_mean = (mean, True) if mean % 1 == 0 else (1.0, False)
    while rate <= math.ceil(mean):
        lower_K, upper_K = sampled_K - rate * placed_K, sampled_K[1:] - rate * placed_K[:-1]
        i, j = int(np.argmax(lower_K)), int(np.argmin(upper_K))
        if lower_K[i] <= upper_K[j]:
            return rate, float(lower_K[i]), float(upper_K[j])
        if is_mean:
            rate, is_mean = 1.0, False
        elif placed_K[i] <= placed_K[j]:
            return None  # only a smaller rate would fit, and all of those have been excluded
        else:
            fits = (sampled_K[i] - sampled_K[j + 1]) / (placed_K[i] - placed_K[j])
            rate = max(rate + 1, math.ceil(fits))
    return None
