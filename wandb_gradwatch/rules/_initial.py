"""Rules for the first samples: the initial weights, and the scale of the inputs."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from .._analysis.formatting import listing, number
from .._analysis.layers import MIN_WEIGHTS, initial_gains, input_scale, weights_beside_biases
from .._measure.columns import Column
from ..snapshot import Snapshot
from ..snapshot._overview import Overview
from ..snapshot._shapes import select_samples
from ._base import FIRST_STEPS, FROM_0, MIN_ELEMENTS, Alert, Bounds, PerKindRule, ShippedRule

# S samples, P watched parameters

_NORMALISATION: Final = re.compile(r"norm|ln|bn", re.IGNORECASE)
_EXACT: Final = 1e-12  # relative error of a float64 sum of equal numbers
_MIN_UNITS: Final = 4  # this many equal gradients are not equal by chance
_EQUAL: Final = "a constant initialisation: equal weights"


@dataclass(kw_only=True)
class PoorInitialisation(PerKindRule):
    """Raises the alert "Initial weights" if the first weights do not preserve a signal's size, or make units equal.

    A model that was trained before is not judged: half of its parameters are frozen, or the weights of a normalisation
    are not 1, and its biases not 0.

    Args:
        max_gain: largest RMS of a layer's weight times sqrt(fan-in). Healthy: up to 1.7; faults: from 2.8.
        min_gain: smallest median of this gain over the layers. Faults: 0.006.
        max_rms: largest RMS of a weight whose fan-in is unknown. Healthy: up to 1.03. Parameters of other names, as
            frequencies or poles, may have any size.
        max_recurrent_gain: largest gain of a recurrent weight, which multiplies a state repeatedly. Orthogonal: 1.
        max_bias: largest root mean square (RMS) of a bias, except the last one. Healthy: up to 4.8 (the step
            sizes of Mamba); faults: from 10.
    """

    max_gain: float = 2.5
    min_gain: float = 0.03
    max_rms: float = 10.0
    max_recurrent_gain: float = 1.5
    max_bias: float = 7.0
    _is_over: bool = field(default=False, init=False)

    title: ClassVar[str] = "Initial weights"
    is_for_rare_samples: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = dict.fromkeys(
        ("max_gain", "min_gain", "max_rms", "max_recurrent_gain", "max_bias"), FROM_0
    )

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        early = np.flatnonzero(snapshot.steps <= FIRST_STEPS)
        return super().check(select_samples(snapshot, early)) if early.size else ()

    def check_sample(self, snapshot: Snapshot, sample: Overview, value: float, /) -> Iterable[Alert]:
        # Norms of too few elements mean nothing.
        if self._is_over or not sample.norm > 0 or sample.sums[Column.NUM_ELEMENTS] < MIN_ELEMENTS:
            return
        self._is_over = True
        found = None if _was_trained(snapshot, sample.place) else self._look_at(snapshot, sample.place)
        if found is not None:
            fact, cause = found
            remedy = (
                "initialise weights with kaiming_normal_ or xavier_uniform_ and the activation's gain, biases near 0"
            )
            yield self._finding(sample.step, fact, cause, remedy)

    def _look_at(self, snapshot: Snapshot, sample: int) -> tuple[str, str] | None:
        """Return what is wrong with the initial weights, and the cause; None if nothing is."""
        all_gains = initial_gains(snapshot, sample)
        gains = {name: gain for name, gain in all_gains.items() if gain > 0}
        size_P = snapshot.num_elements[sample]
        rms_P = snapshot.param_norm[sample] / np.sqrt(size_P)
        limits = {name: self.max_recurrent_gain if "weight_hh" in name else self.max_gain for name in gains}
        large = [f"{name} {number(gain)}x" for name, gain in gains.items() if gain > limits[name]]
        large += [f"{name} {number(rms)}" for name, rms, size in zip(snapshot.names, rms_P, size_P, strict=True)
                  if rms > self.max_rms and name not in gains and size >= MIN_WEIGHTS and "weight" in name]  # fmt: skip
        # With a bias far from 0, a unit or a gate is on or off for any input. The last bias may be the targets' mean.
        far = np.flatnonzero(rms_P[:-1] > self.max_bias).tolist()
        shifted = [f"{snapshot.names[p]} {number(rms_P[p])}" for p in far
                   if "bias" in snapshot.names[p] and size_P[p] >= _MIN_UNITS]  # fmt: skip
        constant = _constant(snapshot, sample, all_gains)
        # Weights of 0 in blocks that begin as the identity have a gradient; in a network of zeros most have none.
        without_gradient = {snapshot.names[p] for p in np.flatnonzero(snapshot.grad_norm[sample] == 0)}
        if len(all_gains) > 1 and not gains and not without_gradient.isdisjoint(all_gains):
            constant = list(all_gains)
        is_small = bool(gains) and float(np.median(list(gains.values()))) < self.min_gain
        small = [f"{name} {number(gain)}x" for name, gain in gains.items() if is_small]
        equal_P = (snapshot.grad_min[sample] == snapshot.grad_max[sample]) & (snapshot.grad_max[sample] != 0)
        equal_P &= (size_P >= _MIN_UNITS) & (rms_P >= 0)
        equal = [name for name, same in zip(snapshot.names, equal_P, strict=True) if same and "bias" in name]
        signal = "than the size that preserves a signal"
        faults = (
            (large, f"weights are far larger {signal} (1/sqrt(fan-in))", "poor initialisation: too large"),
            (shifted, "biases are far from 0", "poor initialisation: biases far from 0"),
            (constant, "all elements of a weight are equal, and so are all units of its layer", _EQUAL),
            (small, f"the weights are far smaller {signal}", "poor initialisation: too small"),
            (equal, "all units of a layer have equal gradients and can never become different", _EQUAL),
        )
        return next(((f"{words}: {listing(names)}.", cause) for names, words, cause in faults if names), None)


@dataclass(kw_only=True)
class LargeInputs(ShippedRule):
    """Raises the alert "Large inputs" if the first layer's gradients show large inputs in both first samples.

    Args:
        max_scale: largest root mean square of the inputs. Healthy: up to 3.9; images as bytes: 130.
    """

    max_scale: float = 50.0
    _num_large: int = field(default=0, init=False)

    title: ClassVar[str] = "Large inputs"
    is_for_rare_samples: ClassVar[bool] = True
    bounds: ClassVar[Bounds] = {"max_scale": FROM_0}

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        for sample in snapshot.overview:
            if sample.step > FIRST_STEPS or not sample.norm > 0:
                continue
            name, scale = input_scale(snapshot, sample.place) or ("", 0.0)
            self._num_large += scale > self.max_scale
            if scale > self.max_scale and self._num_large == 2:
                fact = (
                    f"judging by the gradients of {name} and its bias, the inputs of this layer have a root mean "
                    f"square of about {number(scale)} (threshold {number(self.max_scale)})."
                )
                cause = "a large scale of the inputs: they are not normalised"
                remedy = (
                    "normalise the inputs to mean 0 and standard deviation 1, for example divide bytes of images by 255"
                )
                yield self._finding(sample.step, fact, cause, remedy)


def _was_trained(snapshot: Snapshot, sample: int) -> bool:
    """Whether half of the parameters are frozen, or a normalisation no longer has its first values: weights that are
    all 1 or all 0, a bias of 0."""
    if 2 * np.count_nonzero(snapshot.trainable) <= len(snapshot.names):
        return True
    size_P, sum_sq_P = snapshot.num_elements[sample], snapshot.column(Column.PARAM_SUM_SQ)[sample]
    for weight, bias in weights_beside_biases(snapshot.names):
        module, _, parameter = snapshot.names[weight].rpartition(".")
        is_normalisation = parameter == "weight" and _NORMALISATION.search(module.rpartition(".")[2])
        is_changed = sum_sq_P[bias] > 0 and sum_sq_P[weight] > 0 and sum_sq_P[weight] != size_P[weight] == size_P[bias]
        if is_normalisation and is_changed:
            return True
    return False


def _constant(snapshot: Snapshot, sample: int, gains: Mapping[str, float]) -> list[str]:
    """Return the names of the weights whose elements all have the same absolute value, other than 0.

    Their root mean square is exactly a float32 number; that of random weights is so at most once in 10,000 layers. An
    identity, with gain 1, is left out, and weights of 1 / fan-in, which take an average on purpose, as DLinear's do.
    """
    found = []
    for name, gain in gains.items():
        place = snapshot.names.index(name)
        size = float(snapshot.num_elements[sample, place])
        rms = math.sqrt(float(snapshot.column(Column.PARAM_SUM_SQ)[sample, place]) / size)
        is_exact = abs(rms - float(np.float32(rms))) < _EXACT * rms
        is_on_purpose = abs(gain - 1.0) < 1e-3 or abs(gain**2 - rms) < 1e-3 * rms
        if is_exact and size >= MIN_WEIGHTS and not is_on_purpose:
            found.append(name)
    return found
