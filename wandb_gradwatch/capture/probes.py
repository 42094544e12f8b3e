"""What else can be measured along the way: the interface between the sampler and everything in modules/."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..window import Found as Found  # what take() returns, for probes


@dataclass(frozen=True)
class WatchedTensor:
    """One watched parameter at a moment of a sample. Not to be kept beyond the call.

    Args:
        name: as in the snapshot.
        parameter: the parameter, its local part where it is sharded.
        gradient: its gradient as the backward left it; None where there is none.
        inverse_scale: 0-dim: the true gradient is `gradient * inverse_scale`; None without a loss scale.
    """

    name: str
    parameter: Tensor
    gradient: Tensor | None
    inverse_scale: Tensor | None = None


@runtime_checkable
class Probe(Protocol):
    """Measures something at sampled steps and keeps it on the device. Called under no_grad, inside the containment.

    One that works at other moments too, in hooks of its own, tells how long: see `seconds_spent`.
    """

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        """A sample has been opened; whether it will be measured, and whether histograms of it are wanted.

        Called once at watch(), then after every commit.
        """

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        """The gradients of a measured backward are final; called again if another backward adds to them."""

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        """An optimizer is about to update these parameters, in a measured sample."""

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        """It has updated them."""

    def take(self) -> Mapping[str, Found]:
        """The measured sample's values by key, each on any device; forgets them."""

    def close(self) -> None:
        """Remove every hook. Idempotent."""


def seconds_spent(probes: Iterable[Probe]) -> float:
    """What probes have taken on the host in hooks of their own: their `seconds_spent`, where they have it."""
    return sum(float(getattr(probe, "seconds_spent", 0.0)) for probe in probes)
