"""What else can be measured along the way: the interface between the sampler and everything in metrics/."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Final, ParamSpec

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._interruptions import raise_interruption
from .._measure.probe_values import ArrivedSums
from .._runtime.error_boundary import CallbackError
from .._transfer.transfers import Found as Found  # what take() returns, for probes

Told = ParamSpec("Told")

logger: Final = logging.getLogger("wandb_gradwatch")


@dataclass(frozen=True)
class WatchedTensor:
    """One watched parameter at a moment of a sample. Not to be kept beyond the call."""

    name: str  # as in the snapshot
    parameter: Tensor  # the parameter, its local part where it is sharded
    gradient: Tensor | None  # its gradient as the backward left it; None where there is none
    # 0-dim: the true gradient is `gradient * inverse_scale`; None without a loss scale
    inverse_scale: Tensor | None = None
    optimizer: Optimizer | None = None  # the one that is about to update it, or has just done so; None after a backward
    held: Tensor | None = None  # the parameter as the optimizer holds it, and its state by it


class Probe:
    """Measures something at sampled steps and keeps it on the device; called under no_grad, in the error boundary."""

    @property
    def seconds_spent(self) -> float:
        """What it has taken on the host in hooks of its own, at other moments than these."""
        return 0.0

    @property
    def needs_ranks(self) -> bool:
        """Whether its sums are over all ranks, though each may have the whole model: windows are merged for it."""
        return False

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        """A sample has been opened; whether it will be measured, and whether histograms of it are wanted.

        Called once at watch(), then after every commit.
        """

    def gradient_arrived(self, name: str, gradient: Tensor) -> None:
        """Inside a measured backward: a parameter's gradient is accumulated, and not yet averaged over ranks.

        Called where the probe needs the ranks.
        """

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        """The gradients of a measured backward are final; called again if another backward adds to them."""

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        """An optimizer is about to update these parameters, in a measured sample."""

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        """It has updated them."""

    def loss_known(self, loss: Tensor) -> None:
        """The loss of the measured sample, NaN where it is not finite: on this rank."""

    def take(self) -> Mapping[str, Found]:
        """The measured sample's values by key, each on any device; forgets them."""
        return {}

    def derive(self, sums: Mapping[str, ArrivedSums]) -> Mapping[str, float]:
        """On the host: further numbers of a sample by key, from the sums of all probes, which are those of the whole.

        Called with every sample once, in order, so that a number may be of several samples.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What `derive` remembers of earlier samples: numbers and lists."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`."""

    def close(self) -> None:
        """Remove every hook. Idempotent."""


class Probes:
    """All the probes of a watcher. One that raises is dropped, with its traceback; the others and all else go on."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        self._probes = list(probes)
        kinds = [type(probe).__name__ for probe in self._probes]
        self._names = {
            id(probe): f"{kind}.{kinds[:place].count(kind)}"
            for place, (probe, kind) in enumerate(zip(self._probes, kinds, strict=True))
        }
        self._seconds_of_dropped = 0.0
        self._seconds: defaultdict[str, float] = defaultdict(float)  # at the moments below, by what the probe is called
        # Of all that there were: ranks must go on alike where one of them has dropped a probe.
        self.need_ranks = any(probe.needs_ranks for probe in self._probes)
        self.look_inside = [probe for probe in self._probes if probe.needs_ranks]  # want to know of each gradient

    def __bool__(self) -> bool:
        return bool(self._probes)

    @property
    def seconds_spent(self) -> float:
        """What they have taken on the host in hooks of their own, where they tell."""
        return self._seconds_of_dropped + sum(probe.seconds_spent for probe in self._probes)

    @property
    def seconds_of_each(self) -> dict[str, float]:
        """What each has taken on the host, at all moments and in hooks of its own, by what it is called."""
        found = self._seconds.copy()
        for probe in self._probes:
            found[repr(probe)] += probe.seconds_spent
        return dict(found)

    def tell(self, moment: Callable[Concatenate[Probe, Told], None], *told: Told.args, **_: Told.kwargs) -> None:
        """Call this method of all; of `gradient_arrived` only those know that look inside."""
        some = self.look_inside if moment is Probe.gradient_arrived else None
        self._each(lambda probe: getattr(probe, moment.__name__)(*told), some)

    def take(self, loss: float | Tensor | None = None) -> dict[str, Found]:
        """What all have measured in this sample, which has this loss."""
        found: dict[str, Found] = {}
        if self._probes and loss is not None:
            one = loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
            self._each(lambda probe: probe.loss_known(one))
        self._each(lambda probe: found.update(_checked(probe.take())))
        return found

    def derive(self, sums: Mapping[str, ArrivedSums]) -> dict[str, float]:
        found: dict[str, float] = {}
        self._each(lambda probe: found.update(probe.derive(sums)))
        return found

    def state_dict(self) -> dict[str, Any]:
        """What each remembers, by its kind and the place among its kind; of those that remember nothing nothing."""
        states: dict[str, Any] = {}
        self._each(lambda probe: states.update({self._names[id(probe)]: probe.state_dict()}))
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; what belongs to no probe of now is left out."""
        for probe in self._probes:
            if self._names[id(probe)] in states:
                probe.load_state_dict(states[self._names[id(probe)]])

    def close(self) -> None:
        """Remove every hook of theirs. Idempotent."""
        self._each(lambda probe: probe.close())

    def _each(self, function: Callable[[Probe], None], some: Sequence[Probe] | None = None) -> None:
        for probe in tuple(self._probes if some is None else some):
            began = time.perf_counter()
            try:
                function(probe)
                self._seconds[repr(probe)] += time.perf_counter() - began
            except CallbackError:  # meant for the training loop
                raise
            except Exception as error:
                raise_interruption(error)
                self._drop(probe, error)

    def _drop(self, probe: Probe, error: Exception) -> None:
        self._probes.remove(probe)
        self.look_inside = [one for one in self.look_inside if one is not probe]
        self._seconds_of_dropped += probe.seconds_spent
        logger.error(
            "wandb_gradwatch: %r failed and is dropped; training, the gradients and the other metrics go on.",
            probe,
            exc_info=error,
        )
        with contextlib.suppress(Exception):  # what has failed may fail at its end too: that is not news
            probe.close()


def _checked(found: Mapping[str, Found]) -> Mapping[str, Found]:
    for key, value in found.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise TypeError(f"a probe must find one number for each key, but {key!r} has shape {[*value.shape]}")
    return found
