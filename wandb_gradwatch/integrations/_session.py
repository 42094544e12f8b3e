"""What every integration does alike: a watcher that begins when there is something to watch, its samples and memory."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch import nn

from .._capture.parameter_registry import Models, with_prefixes
from .._runtime.sharding import has_fsdp1, local_part, rank
from .._watch import COMPANIONS, watch
from .._watcher import Watcher
from ..metrics._metric import rules_of
from ..rules import Alert, Rule, default_rules, rule
from ..sinks import Sink
from ..snapshot import Snapshot, keys

logger: Final = logging.getLogger("wandb_gradwatch")


def require(*modules: str, extra: str) -> Any:
    """The first of these modules that the program has already imported, otherwise the first that can be imported.

    Raises:
        ImportError: none of them is installed; it names the extra.
    """
    first: ImportError | None = None
    for module in sorted(modules, key=lambda name: sys.modules.get(name) is None):
        try:
            return importlib.import_module(module)
        except ImportError as error:
            first = first or error
    raise ImportError(
        f"wandb_gradwatch.integrations.{extra} needs {' or '.join(modules)}, which could not be imported "
        f"({first}); run: pip install 'wandb-gradwatch[{extra}]'"
    ) from first


class _AlertLog(Sink):
    """Writes alerts to the program's log, for trainings without W&B; an ERROR goes to standard error by itself."""

    def alert(self, alert: Alert) -> None:
        if alert.level != "ERROR":
            logger.warning("%s: %s", alert.title, alert.text)


class Session:
    """The watcher of a training, from its first step to its last, over checkpoints and resumes.

    Raises:
        TypeError: an option is not one of watch(), or a reserved one: found when the callback is made, not when
            training starts.
    """

    def __init__(
        self,
        caller: str,
        options: Mapping[str, Any],  # the user's arguments of watch()
        *,
        reserved: Iterable[str],  # those that the caller sets by itself
        on_sample: Callable[[Snapshot], None] | None = None,  # None: samples wait for `take`
        adapt: Callable[[list[Rule]], list[Rule]] = list,  # of the default rules, where the user gave none
    ) -> None:
        known = [name for name in inspect.signature(watch).parameters if name not in {"model", *reserved}]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"{caller} got an unexpected argument {unknown[0]!r}; beside its own it takes watch()'s: {known}"
            )
        self.watcher: Watcher | None = None
        self.options = dict(options)
        self._arrived: list[Snapshot] = []
        # A rule, which finds nothing: rules are given every sample once, in order, as soon as it is on the host.
        self._on_sample = rule(title="Each sample")(on_sample or self._arrived.append)
        self._adapt = adapt
        self._memory: dict[str, Any] = {}  # of the watcher that was last; {}: there was none
        self._is_loaded = False  # from a checkpoint, and not gone on with so far
        self._is_sharded = False
        self._said_frozen = False

    def begin(
        self,
        model: Models,
        *,
        start_step: int = 0,  # where there is no memory that knows it
        goes_on: bool = False,  # this training continues the last one, also where nothing was loaded
        beside: Iterable[Watcher] = (),  # watchers of the same model that go on
        sinks: Iterable[Sink] = (),  # beside the user's and, on rank 0, the program's log for alerts
        **more: Any,  # arguments of watch() that the caller sets
    ) -> None:
        """Watch, unless the model is frozen as a whole: that is said once, and later calls look again."""
        if not any(parameter.requires_grad for parameter in _parameters_of(model)):
            if not self._said_frozen and rank() == 0:
                self._said_frozen = True
                logger.warning(
                    "wandb_gradwatch: the model has no trainable parameter; watching begins when it has one."
                )
            return
        self._arrived.clear()  # what a training that raised has left
        memory = self._memory if goes_on or self._is_loaded else {}
        rules = self.options.get("rules")
        if rules is None:  # as watch() does where it is given none; with the queue among them it is given some
            rules = self._adapt(default_rules() + rules_of(self.options.get("metrics", ())))
        options = {**self.options, **more, "rules": [*rules, self._on_sample]}
        options["sinks"] = [*(self.options.get("sinks") or ()), *sinks, *([_AlertLog()] if rank() == 0 else [])]
        self._is_sharded = is_sharded(model)
        companions = COMPANIONS.set(tuple(beside))
        try:
            self.watcher = watch(model, start_step=memory.get("step", start_step), **options)
        finally:
            COMPANIONS.reset(companions)
        if memory:
            try:
                self.watcher.load_state_dict(memory["watcher"])
            except Exception:  # a checkpoint of another version: the training goes on all the same
                logger.exception(
                    "wandb_gradwatch: its part of the checkpoint could not be read; it starts without memory"
                )
        self._memory, self._is_loaded = {}, False

    def end(self) -> None:
        """Flush and stop watching; what was learnt is kept for a training that goes on."""
        if self.watcher is not None:
            try:
                self.watcher.remove()
                self._memory = {"step": self.watcher.step, "watcher": self.watcher.state_dict()}
            finally:  # what the user's on_alert raised
                self.watcher = None

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
        taken = self._arrived.copy()
        self._arrived.clear()
        return taken

    def numbers(self, sample: Snapshot, *, per_layer: bool, sparsity: bool = True) -> dict[str, float]:
        """The numbers of one sample by name, of the whole model, and with a slash in the name those of the layers.

        Returns:
            What is missing in the sample has no name here.
        """
        if not sample.names:
            return {}
        numbers = {name: float(getattr(sample.total, name)[0, 0]) for name in ("grad_norm", "grad_mean", "grad_std")}
        if sparsity:
            numbers["grad_sparsity"] = float(sample.total.dead_ratio[0, 0])
        if per_layer:
            layers = sample.by_group(self.options.get("group_by") or "parameter")
            layer_keys = keys.layer_keys(keys.LAYER_GRAD_NORM, layers.names)
            numbers |= dict(zip(layer_keys, layers.grad_norm[0].tolist(), strict=True))
        return {name: number for name, number in numbers.items() if number == number}

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed training goes on with: numbers, strings, lists, dicts and tensors.

        The same on every rank; of a sharded model, call it on all of them.
        """
        if self.watcher is not None:
            self.settle()
            return {"step": self.watcher.step, "watcher": self.watcher.state_dict()}
        return self._memory

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memory, self._is_loaded = dict(state), True


def _parameters_of(model: Models) -> Iterable[nn.Parameter]:
    return (parameter for _, module in with_prefixes(model) for parameter in module.parameters())


class Watching:
    """A training's callback, which has a session."""

    _session: Session

    @property
    def watcher(self) -> Watcher | None:
        """What `watch()` returned for the training that is under way; None between trainings."""
        return self._session.watcher


def is_sharded(model: Models) -> bool:
    """By DTensors (FSDP2, tensor parallel) or by flat parameters (FSDP1)."""
    return has_fsdp1([module for _, module in with_prefixes(model)]) or any(
        local_part(parameter) is not parameter for parameter in _parameters_of(model)
    )


def is_due(sample: Snapshot, place: int, every: int) -> bool:
    """Whether a framework that logs every n-th step, from 1, logs this sample: the first at or after each n-th."""
    since = int(sample.metrics[keys.SAMPLE_EVERY][0]) if keys.SAMPLE_EVERY in sample.metrics else 1  # the one before
    return every > 0 and place // every > (place - since) // every


def named(prefix: str, numbers: Mapping[str, float], *, layers: bool = True) -> dict[str, float]:
    """Numbers under their full names, with or without those of layers."""
    return {prefix + name: number for name, number in numbers.items() if layers or "/" not in name}


def active_run() -> Any:
    """The W&B run of this process; None where there is none, W&B was never imported, or the rank is not 0."""
    return getattr(sys.modules.get("wandb"), "run", None) if rank() == 0 else None
