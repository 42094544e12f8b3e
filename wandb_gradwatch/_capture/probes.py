"""Probe: the interface through which the sampler calls everything in metrics/."""

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

from .._boundary import CallbackError
from .._interruptions import raise_interruption
from .._measure.probe_values import ArrivedSums
from .._transfer.transfers import Found as Found  # what take() returns, for probes

Told = ParamSpec("Told")

logger: Final = logging.getLogger("wandb_gradwatch")


@dataclass(frozen=True)
class WatchedTensor:
    """A watched parameter at one moment of a sample. Valid only during the call."""

    name: str  # as in the snapshot
    parameter: Tensor  # the parameter, or its local part if it is sharded
    gradient: Tensor | None  # its gradient as the backward left it; None if there is none
    # 0-dim: the true gradient is `gradient * inverse_scale`; None without a loss scale
    inverse_scale: Tensor | None = None
    optimizer: Optimizer | None = None  # the optimizer that is about to update or has updated it; None after a backward
    held: Tensor | None = None  # the parameter as the model and the optimizer hold it: the key of the optimizer's state
    is_whole: bool = True  # False: sharded


class Probe:
    """Measures something at sampled steps and keeps it on the device; called under no_grad, in the error boundary."""

    @property
    def seconds_spent(self) -> float:
        """Seconds that the probe has taken on the host in hooks of its own, outside the methods below."""
        return 0.0

    @property
    def needs_ranks(self) -> bool:
        """Whether its sums are over all ranks, so that windows are merged even if every rank has the whole model."""
        return False

    def start(self, next_step_is_due: bool, histogram_is_due: bool) -> None:
        """A sample has been opened. Called once at watch(), then after every commit.

        The arguments say whether the sample will be measured, and whether it will have histograms.
        """

    def gradient_arrived(self, name: str, gradient: Tensor) -> None:
        """A gradient has been accumulated inside a measured backward, and is not averaged over ranks yet.

        Called only if the probe `needs_ranks`, and not for sharded parameters.
        """

    def gradients_ready(self, tensors: Sequence[WatchedTensor]) -> None:
        """The gradients of a measured backward are final; called again if another backward adds to them."""

    def before_update(self, tensors: Sequence[WatchedTensor]) -> None:
        """An optimizer is about to update these parameters, in a measured sample."""

    def after_update(self, tensors: Sequence[WatchedTensor]) -> None:
        """The optimizer has updated these parameters."""

    def loss_known(self, loss: Tensor) -> None:
        """The loss of the measured sample on this rank is known: 0-dim."""

    def take(self) -> Mapping[str, Found]:
        """Return the measured sample's values by key, each on any device, and forget them."""
        return {}

    def derive(self, sums: Mapping[str, ArrivedSums]) -> Mapping[str, float]:
        """Return further numbers of a sample by key, on the host, from the sums of all probes after merging over ranks.

        Called once for every sample, in order, so that a number may depend on several samples.
        """
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what `derive` remembers of earlier samples, as numbers and lists."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""

    def close(self) -> None:
        """Remove every hook. Idempotent."""


class Probes:
    """All probes of a watcher. A probe that raises is dropped and its traceback logged; everything else goes on."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        self._all = tuple(probes)  # those that were dropped, too
        self.active = list(self._all)
        kinds = [type(probe).__name__ for probe in self._all]
        self._names = {id(probe): f"{kinds[at]}.{kinds[:at].count(kinds[at])}" for at, probe in enumerate(self._all)}
        self._has_said_twice = False  # that two probes measure the same key
        self._seconds: defaultdict[str, float] = defaultdict(float)  # repr(probe) -> seconds in its methods
        self.look_inside = [probe for probe in self._all if probe.needs_ranks]  # get every `gradient_arrived`
        self.need_ranks = bool(self.look_inside)  # does not change: if one rank drops a probe, all must still merge

    @property
    def seconds_spent(self) -> float:
        """Seconds that the probes have taken on the host in hooks of their own, as far as they report them."""
        return sum([probe.seconds_spent for probe in self._all])

    @property
    def seconds_of_each(self) -> dict[str, float]:
        """Seconds that each probe has taken on the host, by its repr: in its methods and in hooks of its own."""
        found = self._seconds.copy()
        for probe in self._all:
            found[repr(probe)] += probe.seconds_spent
        return dict(found)

    def tell(self, moment: Callable[Concatenate[Probe, Told], None], *told: Told.args, **_: Told.kwargs) -> None:
        """Call this method of every probe; `gradient_arrived` only of those in `look_inside`."""
        some = self.look_inside if moment is Probe.gradient_arrived else None
        self._each(lambda probe: getattr(probe, moment.__name__)(*told), some)

    def take(self, loss: float | Tensor | None = None) -> dict[str, Found]:
        """Tell the probes the sample's loss if it is known, and return the values that they have measured."""
        found: dict[str, Found] = {}
        if self.active and loss is not None:
            one = loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
            self._each(lambda probe: probe.loss_known(one))
        self._each(lambda probe: self._add(probe, found))
        return found

    def _add(self, probe: Probe, found: dict[str, Found]) -> None:
        taken = probe.take()
        for key, value in taken.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise TypeError(f"a probe must return one number for each key, but {key!r} has shape {[*value.shape]}")
        if not self._has_said_twice and (twice := found.keys() & taken.keys()):
            self._has_said_twice = True
            logger.warning(
                "wandb_gradwatch: two of metrics= log %r, and only the value of the later one, %r, is kept. Choose "
                "different names with their match=, or leave one of them out.",
                min(twice),
                probe,
            )
        found.update(taken)

    def derive(self, sums: Mapping[str, ArrivedSums]) -> dict[str, float]:
        found: dict[str, float] = {}
        self._each(lambda probe: found.update(probe.derive(sums)))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each probe that has one, by its class name and its number among that class."""
        states: dict[str, Any] = {}
        self._each(lambda probe: states.update({self._names[id(probe)]: probe.state_dict()}))
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. The state of a probe that no longer exists is ignored."""
        for probe in self.active:
            if (name := self._names[id(probe)]) in states:
                probe.load_state_dict(states[name])

    def close(self) -> None:
        """Remove every hook of the probes. Idempotent."""
        self._each(lambda probe: probe.close())

    def _each(self, function: Callable[[Probe], None], some: Sequence[Probe] | None = None) -> None:
        for probe in tuple(self.active if some is None else some):
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
        self.active.remove(probe)
        self.look_inside = [one for one in self.look_inside if one is not probe]
        logger.error(
            "wandb_gradwatch: %r failed and is dropped; training, gradient logging and the other metrics go on.",
            probe,
            exc_info=error,
        )
        with contextlib.suppress(Exception):  # a failed probe may fail again here; its first error is logged
            probe.close()
