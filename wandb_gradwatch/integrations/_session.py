"""What every integration does alike: a watcher that begins when there is something to watch, and its memory."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import nn

from .._capture.parameter_registry import Models, with_prefixes
from .._runtime.sharding import local_part, rank
from .._watch import COMPANIONS, watch
from .._watcher import Watcher
from ..metrics import rules_of
from ..rules import Rule, default_rules
from ..sinks import Sink
from ..snapshot import GroupBy, Snapshot
from ._sample_queue import AlertLog, SampleQueue, sample_numbers

logger: Final = logging.getLogger("wandb_gradwatch")


class Session:
    """The watcher of a training, from its first step to its last, over checkpoints and resumes.

    Args:
        caller: whose argument a misspelt option is.
        options: the user's arguments of `watch()`.
        reserved: those that the caller sets by itself.
        queue: where samples wait for the caller.
        adapt: what the caller makes of the default rules, where the user gave none.

    Raises:
        TypeError: an option is not one of watch(), or a reserved one: found when the callback is made, not when
            training starts.
    """

    def __init__(
        self,
        caller: str,
        options: Mapping[str, Any],
        *,
        reserved: Iterable[str],
        queue: SampleQueue | None = None,
        adapt: Callable[[list[Rule]], list[Rule]] = list,
    ) -> None:
        _check_options(caller, options, reserved)
        self.watcher: Watcher | None = None
        self.options = dict(options)
        self._queue = SampleQueue() if queue is None else queue
        self._adapt = adapt
        self._memory: dict[str, Any] = {}  # of the watcher that was last; {}: there was none
        self._is_loaded = False  # from a checkpoint, and not gone on with so far
        self._is_sharded = False
        self._said_frozen = False

    # ---- begin and end

    def begin(
        self,
        model: Models,
        *,
        start_step: int = 0,
        goes_on: bool = False,
        beside: Iterable[Watcher] = (),
        sinks: Iterable[Sink] = (),
        **more: Any,
    ) -> None:
        """Watch, unless the model is frozen as a whole: that is said once, and later calls look again.

        Args:
            model: as in watch().
            start_step: the number of the last step already made, where there is no memory that knows it.
            goes_on: this training continues the last one, also where nothing was loaded.
            beside: watchers of the same model that go on.
            sinks: those of the caller, beside the user's and, on rank 0, the program's log for alerts.
            more: arguments of watch() that the caller sets.
        """
        if not any(parameter.requires_grad for module in modules_of(model) for parameter in module.parameters()):
            self._say_frozen()
            return
        self._queue.take()  # what a training that raised has left
        memory = self._memory if goes_on or self._is_loaded else {}
        options = {**self.options, **more, "rules": [*self._rules(), self._queue]}
        options["sinks"] = [*(self.options.get("sinks") or ()), *sinks, *([AlertLog()] if rank() == 0 else [])]
        self._is_sharded = is_sharded(model)
        companions = COMPANIONS.set(tuple(beside))
        try:
            self.watcher = watch(model, start_step=memory.get("step", start_step), **options)
        finally:
            COMPANIONS.reset(companions)
        if memory:
            self._restore(self.watcher, memory["watcher"])
        self._memory, self._is_loaded = {}, False

    def _restore(self, watcher: Watcher, state: dict[str, Any]) -> None:
        try:
            watcher.load_state_dict(state)
        except Exception:  # a checkpoint of another version: the training goes on all the same
            logger.exception("wandb_gradwatch: its part of the checkpoint could not be read; it starts without memory")

    def _say_frozen(self) -> None:
        if not self._said_frozen and rank() == 0:
            self._said_frozen = True
            logger.warning("wandb_gradwatch: the model has no trainable parameter; watching begins when it has one.")

    def _rules(self) -> list[Rule]:
        given = self.options.get("rules")
        if given is not None:
            return list(given)
        # As watch() does where it is given none; with the queue among them it is given some.
        return self._adapt(default_rules() + rules_of(self.options.get("metrics", ())))

    def end(self) -> None:
        """Flush and stop watching; what was learnt is kept for a training that goes on."""
        if self.watcher is not None:
            try:
                self.watcher.remove()
                self._memory = _memory_of(self.watcher)
            finally:  # what the user's on_alert raised
                self.watcher = None

    # ---- samples

    def settle(self) -> None:
        """Wait until all samples of the steps made so far are in the queue.

        Of a sharded model each rank has a part: this ends the window and merges it, so all ranks must call.
        """
        if self.watcher is not None:
            self.watcher.wait()
            if self._is_sharded:
                self.watcher.flush()

    def take(self) -> list[Snapshot]:
        """The samples that have arrived since the last call, in order, one snapshot each."""
        return self._queue.take()

    def numbers(self, sample: Snapshot, *, per_layer: bool, sparsity: bool = True) -> dict[str, float]:
        """The numbers of one sample by name; with a slash in the name those of the layers."""
        group_by: GroupBy = self.options.get("group_by") or "parameter"
        return sample_numbers(sample, per_layer=group_by if per_layer else None, sparsity=sparsity)

    # ---- memory

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed training goes on with: numbers, strings, lists, dicts and tensors.

        The same on every rank; of a sharded model, call it on all of them.
        """
        if self.watcher is None:
            return self._memory
        self.settle()
        return _memory_of(self.watcher)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next training goes on where this was saved."""
        self._memory, self._is_loaded = dict(state), True


def _memory_of(watcher: Watcher) -> dict[str, Any]:
    return {"step": watcher.step, "watcher": watcher.state_dict()}


def modules_of(model: Models) -> list[nn.Module]:
    """The module, or each of several."""
    return [module for _, module in with_prefixes(model)]


def is_sharded(model: Models) -> bool:
    """By DTensors (FSDP2, tensor parallel) or by flat parameters (FSDP1)."""
    modules = modules_of(model)
    fsdp1 = any(type(part).__name__ == "FullyShardedDataParallel" for module in modules for part in module.modules())
    return fsdp1 or any(local_part(parameter) is not parameter for each in modules for parameter in each.parameters())


def _check_options(caller: str, options: Mapping[str, Any], reserved: Iterable[str]) -> None:
    known = [name for name in inspect.signature(watch).parameters if name not in {"model", *reserved}]
    for name in options:
        if name not in known:
            raise TypeError(f"{caller} got an unexpected argument {name!r}; beside its own it takes watch()'s: {known}")
