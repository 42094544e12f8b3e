"""Rules that read what the probes measured: pure, snapshot in, alerts out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .._analysis.formatting import listing, number
from .._analysis.forward import nonfinite_activations
from ..rules import Alert
from ..rules._base import check_limits, finding
from ..snapshot import Snapshot, keys


@dataclass(kw_only=True)
class NonFiniteActivation:
    """A module's output has NaN or infinite elements: "Non-finite activation", naming the first in the forward.

    Not at a sample that loss scaling skipped: an overflow there is how the scale finds its place.
    """

    title: ClassVar[str] = "Non-finite activation"

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        for sample in range(len(snapshot)):
            found = nonfinite_activations(snapshot, sample)
            if found and not snapshot.skipped[sample]:
                yield self._alert(int(snapshot.steps[sample]), found)

    def _alert(self, step: int, found: dict[str, int]) -> Alert:
        first = next(iter(found))
        fact = (
            f"Step {step}: the output of {first} was the first of the forward that is not finite, with {found[first]} "
            f"elements; {len(found)} module outputs are in all (threshold: 0)."
        )
        return finding(
            self.title,
            fact,
            listing(found, lambda name: f"{name} ({found[name]} non-finite)"),
            f"an input, a parameter or an operation of {first}: an overflow, 0/0, or the log or root of 0",
            f"look at the inputs and parameters of {first} at this step, add an epsilon to logs, roots and "
            "divisions, or use bfloat16 in place of float16",
            step,
            "ERROR",
        )

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass  # every sample is judged by itself


@dataclass(kw_only=True)
class OutgrownUpdate:
    """A gradient is far larger than the optimizer's second moment remembers: "Update outgrows".

    The update divides by what the gradients were, so that a gradient that comes back after a quiet time moves its
    parameter too far, and the loss may spike 1 to 8 steps later (Wortsman et al. 2023, arXiv 2304.13013, where a ratio
    of 2.3 is the mark). Only where it is also far from what it was in this run: noisy gradients are always somewhat so.

    Args:
        threshold: of the stale ratio: the root mean square of g / sqrt(v), with v as it was before the step.
        factor: times the parameter's median of the last 32 samples.
        patience: samples that a parameter has been seen for before it is judged.
    """

    threshold: float = 2.3
    factor: float = 3.0
    patience: int = 10
    _past: dict[str, list[float]] = field(default_factory=dict, init=False, repr=False)

    title: ClassVar[str] = "Update outgrows"

    def __post_init__(self) -> None:
        check_limits(self, threshold=(0.0, np.inf), factor=(1.0, np.inf), patience=(1.0, 32.0))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        ratios = {
            key.removeprefix(f"{keys.OPTIMIZER_STATE}/").removesuffix(f"/{keys.STALE}"): values
            for key, values in snapshot.metrics.items()
            if key.startswith(f"{keys.OPTIMIZER_STATE}/") and key.endswith(f"/{keys.STALE}")
        }
        for sample in range(len(snapshot)):
            outgrown = {}
            for name, values in ratios.items():
                ratio, past = float(values[sample]), self._past.setdefault(name, [])
                if not np.isfinite(ratio) or snapshot.skipped[sample]:
                    continue
                if len(past) >= self.patience and ratio > max(self.threshold, self.factor * float(np.median(past))):
                    outgrown[name] = ratio
                self._past[name] = [*past, ratio][-32:]
            if outgrown:
                yield self._alert(int(snapshot.steps[sample]), outgrown)

    def _alert(self, step: int, outgrown: dict[str, float]) -> Alert:
        worst = dict(sorted(outgrown.items(), key=lambda one: -one[1]))
        fact = (
            f"Step {step}: in {len(outgrown)} parameters the gradient is more than {number(self.threshold)} times what "
            "the optimizer's second moment says, so that their update is that much too large."
        )
        return finding(
            self.title,
            fact,
            listing(worst, lambda name: f"{name} ({number(worst[name])} times)"),
            "gradients that come back after a quiet time, with a second moment that has decayed meanwhile",
            "lower beta2 (0.95), clip the gradients or the update (StableAdamW), or lower the learning rate; the "
            "loss may spike within the next 8 steps",
            step,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"past": {name: list(past) for name, past in self._past.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._past = {str(name): list(map(float, past)) for name, past in state["past"].items()}


@dataclass(kw_only=True)
class EntropyCollapse:
    """Every head of an attention looks at one place only: "Attention entropy collapse".

    One such head is healthy (it copies the token before, say); all heads of a layer, for several samples in a row and
    not from the first sample on, mean logits that grow without bound.

    Args:
        threshold: of the entropy's ratio to its largest possible value, below which a head looks at one place.
        patience: samples in a row.
    """

    threshold: float = 0.02
    patience: int = 5
    _in_a_row: dict[str, int] = field(default_factory=dict, init=False)
    _once_open: set[str] = field(default_factory=set, init=False)

    title: ClassVar[str] = "Attention entropy collapse"

    def __post_init__(self) -> None:
        check_limits(self, threshold=(0.0, 1.0), patience=(1.0, np.inf))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        heads: dict[str, list[str]] = {}
        for key in snapshot.metrics:
            if key.startswith(f"{keys.ATTENTION}/") and key.endswith("/entropy_ratio"):
                heads.setdefault(key.split("/")[1], []).append(key)
        for sample in range(len(snapshot)):
            collapsed = {}
            for module, of_module in heads.items():
                highest = max(float(snapshot.metrics[key][sample]) for key in of_module)
                if np.isnan(highest):
                    continue
                if highest >= self.threshold:
                    self._once_open.add(module)
                low = highest < self.threshold and module in self._once_open
                self._in_a_row[module] = self._in_a_row.get(module, 0) + 1 if low else 0
                if self._in_a_row[module] >= self.patience:
                    collapsed[module] = highest
            if collapsed:
                yield self._alert(int(snapshot.steps[sample]), collapsed)

    def _alert(self, step: int, collapsed: dict[str, float]) -> Alert:
        fact = (
            f"Step {step}: in {len(collapsed)} attention modules no head has had more than {number(self.threshold)} of "
            f"the possible entropy for {self.patience} samples: each position looks at one place only."
        )
        return finding(
            self.title,
            fact,
            listing(collapsed, lambda name: f"{name} (at most {number(collapsed[name])})"),
            "query and key weights that grow, at too high a learning rate or without warm-up",
            "normalise queries and keys, lower the learning rate or warm up for longer, decay their weights",
            step,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": dict(self._in_a_row), "once_open": sorted(self._once_open)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row = {str(name): int(count) for name, count in state["in_a_row"].items()}
        self._once_open = set(state["once_open"])


@dataclass(kw_only=True)
class DeadExperts:
    """An expert of a mixture gets no token for many samples in a row: "Dead experts".

    Args:
        patience: samples in a row.
    """

    patience: int = 10
    _in_a_row: dict[str, int] = field(default_factory=dict, init=False, repr=False)

    title: ClassVar[str] = "Dead experts"

    def __post_init__(self) -> None:
        check_limits(self, patience=(1.0, np.inf))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        begin, end = f"{keys.ROUTER}/", f"/{keys.DEAD_EXPERTS}"
        for sample in range(len(snapshot)):
            dead = {}
            for key, values in snapshot.metrics.items():
                if not (key.startswith(begin) and key.endswith(end)) or np.isnan(values[sample]):
                    continue
                name, number_dead = key[len(begin) : -len(end)], float(values[sample])
                self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if number_dead else 0
                if self._in_a_row[name] >= self.patience:
                    dead[name] = int(number_dead)
            if dead:
                yield self._alert(int(snapshot.steps[sample]), dead)

    def _alert(self, step: int, dead: dict[str, int]) -> Alert:
        fact = f"Step {step}: {len(dead)} routers have sent no token to some experts for {self.patience} samples."
        return finding(
            self.title,
            fact,
            listing(dead, lambda name: f"{name} ({dead[name]} experts)"),
            "a router that sends ever more tokens to the experts that are already trained best",
            "raise the weight of the load-balancing loss, add noise to the router's logits, or lower its learning rate",
            step,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"in_a_row": dict(self._in_a_row)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._in_a_row = {str(name): int(count) for name, count in state["in_a_row"].items()}


@dataclass(kw_only=True)
class GrowingLogits:
    """The largest logit of an attention grows towards a limit: "Attention logits grow".

    From a tenth of the limit on, a straight line through the logarithm of the module's largest logit over the last 32
    samples is extrapolated to the limit; the alert comes where the limit is crossed, or will be within 4 times as
    many steps.

    Args:
        limit: of a logit. A softmax of logits that are 100 apart looks at one place, and half precision has no digit
            behind the point left.
        patience: samples that have been seen before anything is extrapolated.
    """

    limit: float = 100.0
    patience: int = 16
    _past: dict[str, list[tuple[int, float]]] = field(default_factory=dict, init=False, repr=False)

    title: ClassVar[str] = "Attention logits grow"

    def __post_init__(self) -> None:
        check_limits(self, limit=(1.0, np.inf), patience=(8.0, 32.0))

    def check(self, snapshot: Snapshot) -> Iterable[Alert]:
        heads: dict[str, list[str]] = {}
        for key in snapshot.metrics:
            if key.startswith(f"{keys.ATTENTION}/") and key.endswith(f"/{keys.LOGIT_MAX}"):
                heads.setdefault(key.split("/")[1], []).append(key)
        for sample in range(len(snapshot)):
            step, growing = int(snapshot.steps[sample]), {}
            for module, of_module in heads.items():
                largest = max(float(snapshot.metrics[key][sample]) for key in of_module)
                if not 0 < largest < np.inf:
                    continue
                past = self._past[module] = [*self._past.get(module, []), (step, largest)][-32:]
                crossed = self._crossed_at(past)
                if crossed is not None:
                    growing[module] = largest, crossed
            if growing:
                yield self._alert(step, growing)

    def _crossed_at(self, past: list[tuple[int, float]]) -> int | None:
        """The step at which the limit is, or will be, crossed; None where that is not to be expected."""
        step, largest = past[-1]
        if largest >= self.limit:
            return step
        if len(past) < self.patience or largest < self.limit / 10:
            return None
        steps, logs = np.array([s for s, _ in past], dtype=np.float64), np.log([value for _, value in past])
        x = steps - steps.mean()
        slope = float(x @ logs / (x @ x))
        left = logs - logs.mean() - slope * x
        error = float(np.sqrt(left @ left / (len(past) - 2) / (x @ x)))
        # Half a doubling over the stretch, and surely: scatter alone has no t-value of 8.
        if slope <= 8 * error or slope * (x[-1] - x[0]) < np.log(1.4):
            return None
        fitted = float(logs.mean() + slope * x[-1])
        crossed = step + (np.log(self.limit) - fitted) / slope
        return round(crossed) if crossed <= step + 4 * (x[-1] - x[0]) else None

    def _alert(self, step: int, growing: dict[str, tuple[float, int]]) -> Alert:
        first = min(growing, key=lambda name: growing[name][1])
        largest, crossed = growing[first]
        fact = f"Step {step}: the largest attention logit of {first} is {number(largest)}"
        if largest >= self.limit:
            fact += f", above the limit of {number(self.limit)}."
        else:
            fact += f"; at its growth over the last samples it crosses {number(self.limit)} at about step {crossed}."
        return finding(
            self.title,
            fact,
            listing(growing, lambda name: f"{name} {number(growing[name][0])} (step {growing[name][1]})"),
            "query and key weights that grow, at too high a learning rate",
            "normalise queries and keys, add a z-loss, lower the learning rate of these weights or decay them",
            step,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"past": {name: [list(one) for one in past] for name, past in self._past.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        past = state["past"].items()
        self._past = {str(name): [(int(step), float(value)) for step, value in of] for name, of in past}
