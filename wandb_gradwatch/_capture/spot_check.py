"""Checks one small gradient at steps that are not sampled: a fault that suddenly shows in it is sampled there.

Non-finite elements and a multiplied loss reach every layer before the place where they arise. A small gradient near the
input therefore shows most sudden faults of the whole model. Only gradients on the CPU are checked, because the host
would have to wait for any other device.
"""

import math
import time
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._runtime.autograd import Entry

_LARGEST: Final = 4096  # number of elements; the check of a larger gradient costs more than an unsampled step may
_RISES, _FALLS = 4.0, 1e-3  # multiples of the usual norm: in 237 of 262 healthy trainings at most one check is beyond
_DECAY: Final = 0.98  # of the usual norm, the largest one so far, at each check
_LEARNS: Final = 8  # number of checks that find only what is not finite
_WITH_LOSSES: Final = 3.0  # its time and the time that the training then loses, as its data left the caches / its time
_ROUNDING: Final = 1e-3  # share of the largest root mean square; a later normalisation cancels a smaller gradient


class SpotCheck:
    """Compares the norm of one gradient with its earlier norms.

    The parameter is found by its place in the optimizer, because a reference to it would prevent `model.to()`.
    """

    def __init__(self, group: int, place: int) -> None:
        self._group, self._place = group, place
        self._usual = 0.0
        self._num_checks = 0
        self._told = 0  # since the last usual norm: 1: an unusual one, 2: one that is not finite
        self.every = 1  # number of steps between checks
        self.is_covered = False  # whether the budget covers a sample; if not, only what is not finite is found
        self.at_clipping = False  # whether torch's functions clip: the check comes before them, not before the step
        self.seconds = 3e-5  # that a check costs on average
        self.seconds_of_last = 0.0  # that the last check has cost

    def finds(self, optimizer: Optimizer) -> bool:
        """Whether the step that the optimizer is about to make should be sampled: its gradient has become unusual."""
        began = time.perf_counter()
        parameters = optimizer.param_groups[self._group]["params"] if self._group < len(optimizer.param_groups) else ()
        gradient = parameters[self._place].grad if self._place < len(parameters) else None
        if gradient is not None and not _is_readable(gradient):
            return False  # the parameter was moved, or replaced in the optimizer
        norm = 0.0 if gradient is None else _norm(gradient)
        is_finite, usual = math.isfinite(norm), self._usual
        is_usual = is_finite and (self._num_checks < _LEARNS or _FALLS * usual <= norm <= _RISES * usual)
        level = 0 if is_usual else int(self.is_covered) if is_finite else 2
        finds = level > self._told
        self._told = 0 if is_usual else max(level, self._told)
        if is_finite and (is_usual or self._told):  # otherwise the norm stays unusual until a sample is covered
            # What was told is usual from now on: the level of an explosion must not hide the next one.
            self._usual = norm if self._told else max(norm, _DECAY * usual)
            self._num_checks += 1
        self.seconds_of_last = _WITH_LOSSES * (time.perf_counter() - began)
        self.seconds += 0.1 * (self.seconds_of_last - self.seconds)
        return finds


def spot_check_of(optimizer: Optimizer, entries: Sequence[Entry]) -> SpotCheck | None:
    """Return the check of the first suitable gradient of these parameters in the model's order; None without one."""
    rms: dict[int, float] = {}
    for _, parameter in sorted(entries, key=itemgetter(0)):  # an optimizer's groups may have another order
        gradient = parameter.grad
        if gradient is not None and _is_readable(gradient):
            rms[id(parameter)] = _norm(gradient) / math.sqrt(gradient.numel())
    largest = max(rms.values(), default=0.0)
    chosen = next((key for key, value in rms.items() if value > _ROUNDING * largest), None)
    groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
    return next((SpotCheck(at, ids.index(chosen)) for at, ids in enumerate(groups) if chosen in ids), None)


def _is_readable(gradient: Tensor) -> bool:
    """Whether the norm can be read quickly, without waiting for a device, and without overflow in half precision."""
    is_dense = gradient.is_cpu and gradient.layout == torch.strided
    return is_dense and gradient.dtype in (torch.float32, torch.float64) and 1 < gradient.numel() <= _LARGEST


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient.detach()))
