"""The common part of all integrations: the life of a watcher, its samples, and its state in checkpoints."""

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from .._capture.parameter_registry import Models, with_prefixes
from .._engines.find import engine_of
from .._runtime.sharding import has_shards, rank
from .._watch import COMPANIONS, check_options, watch
from .._watcher import Watcher
from ..metrics._metric import rules_of
from ..rules import Alert, Judgement, Rule, default_rules, rule
from ..sinks import Sink
from ..snapshot import Snapshot, keys

logger: Final = logging.getLogger("wandb_gradwatch")
DEFAULT_LOG_EVERY: Final = 50  # steps, if the framework logs by epochs or not at all


def require(*modules: str, extra: str) -> Any:
    """Return the first of these modules that can be imported; otherwise raise an error that names the extra."""
    first: ImportError | None = None
    for module in modules:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            first = first or error
    raise ImportError(
        f"wandb_gradwatch.integrations.{extra} needs {' or '.join(modules)}, which could not be imported "
        f"({first}); run: pip install 'wandb-gradwatch[{extra}]'"
    ) from first


class _AlertLog(Sink):
    """Logs alerts for trainings without W&B; ERROR alerts are omitted, because they are printed to standard error."""

    def alert(self, alert: Alert) -> None:
        if alert.level != "ERROR":
            logger.warning("%s: %s", alert.title, alert.text)


class Session:
    """The watcher of one training, from the first step to the last, including checkpoints and resuming.

    Options that are not arguments of watch(), are reserved or are invalid raise an error when the callback is made.
    """

    def __init__(
        self,
        caller: str,
        options: Mapping[str, Any],  # the user's arguments for watch()
        *,
        reserved: Iterable[str],  # arguments of watch() that the caller sets itself
        run: Any = None,  # that the user gave, to check it with the other arguments
        on_sample: Callable[[Snapshot], None] | None = None,  # None: samples are kept until `take`
    ) -> None:
        known = [name for name in inspect.signature(watch).parameters if name not in {"model", *reserved}]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(
                f"{caller} got an unexpected argument {unknown[0]!r}; of watch()'s arguments it accepts {known}"
            )
        check_options({**options, "run": run})
        self.watcher: Watcher | None = None
        self.options = dict(options)
        self._arrived: list[Snapshot] = []
        # A rule without findings, because rules receive every sample once, in order, as soon as it is on the host.
        self._on_sample = rule(title="Each sample")(on_sample or self._arrived.append)
        self._memory: dict[str, Any] = {}  # state of the last watcher; {}: there was none
        self._is_loaded = False  # whether the state comes from a checkpoint and has not been used yet
        self._is_sharded = False
        self._said_frozen = False

    def begin(
        self,
        model: Models,
        *,
        start_step: int = 0,  # used if no saved state contains the step
        goes_on: bool = False,  # True: continue the last training of this session, even if no checkpoint was loaded
        beside: Iterable[Watcher] = (),  # other watchers of the same model, which stay active
        defaults: Callable[[], list[Rule | Judgement]] = default_rules,  # not used with the user's rules
        sinks: Iterable[Sink] = (),  # in addition to the user's sinks and, on rank 0, to the log for alerts
        **more: Any,  # arguments of watch() that the caller sets
    ) -> None:
        """Begin to watch. If the whole model is frozen, warn once instead; later calls try again."""
        models = [module for _, module in with_prefixes(model)]
        if not any(parameter.requires_grad for module in models for parameter in module.parameters()):
            if not self._said_frozen and rank() == 0:
                self._said_frozen = True
                logger.warning(
                    "wandb_gradwatch: the model has no trainable parameter; watching begins when it has one."
                )
            return
        self._arrived.clear()  # samples of a training that raised
        memory = self._memory if goes_on or self._is_loaded else {}
        rules = self.options.get("rules")
        if rules is None:  # watch() would add its defaults only for rules=None, but it receives self._on_sample
            rules = [*defaults(), *rules_of(self.options.get("metrics") or ())]
        options = {**self.options, **more, "rules": [*rules, self._on_sample]}
        options["sinks"] = [*(self.options.get("sinks") or ()), *sinks, *([_AlertLog()] if rank() == 0 else [])]
        self._is_sharded = has_shards(models) or any(map(engine_of, models))
        companions = COMPANIONS.set(tuple(beside))
        try:
            self.watcher = watch(model, start_step=memory.get("step", start_step), **options)
        finally:
            COMPANIONS.reset(companions)
        if memory:
            try:
                self.watcher.load_state_dict(memory["watcher"])
            except Exception:  # a checkpoint of another version must not stop the training
                logger.exception(
                    "wandb_gradwatch: its part of the checkpoint could not be read; it starts without saved state"
                )
        self._memory, self._is_loaded = {}, False

    def end(self) -> None:
        """Flush and stop watching; keep the watcher's state for a training that continues."""
        if self.watcher is not None:
            try:
                self.watcher.remove()
                self._memory = {"step": self.watcher.step, "watcher": self.watcher.state_dict()}
            finally:  # the user's on_alert may raise
                self.watcher = None

    def settle(self) -> None:
        """Wait until all samples have arrived; of a sharded model, on all ranks: it ends the window to merge them."""
        if self.watcher is not None:
            self.watcher.wait()
            if self._is_sharded:
                self.watcher.flush()

    def take(self) -> list[Snapshot]:
        """Return the samples that have arrived since the last call, in order, as one snapshot each."""
        taken = self._arrived.copy()
        self._arrived.clear()
        return taken

    def numbers(self, sample: Snapshot, *, per_layer: bool, sparsity: bool = True) -> dict[str, float]:
        """Statistics of one sample by name; those of layers have a slash in their names. Missing ones are left out."""
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
        """The state for resuming a training, in plain values and tensors; of a sharded model, on all ranks."""
        if self.watcher is not None:
            self.settle()
            return {"step": self.watcher.step, "watcher": self.watcher.state_dict()}
        return self._memory

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memory, self._is_loaded = dict(state), True


class Watching:
    """The base class of the frameworks' callbacks."""

    _session: Session

    @property
    def watcher(self) -> Watcher | None:
        """The Watcher of the current training; None between trainings."""
        return self._session.watcher


def is_due(sample: Snapshot, place: int, every: int) -> bool:
    """Whether a sample is the first at or after a multiple of `every` steps, at which the framework logs."""
    since = int(sample.metrics[keys.SAMPLE_EVERY][0]) if keys.SAMPLE_EVERY in sample.metrics else 1  # previous sample
    return every > 0 and place // every > (place - since) // every


def named(prefix: str, numbers: Mapping[str, float], *, layers: bool = True) -> dict[str, float]:
    """Add the prefix to all names; layers=False drops the statistics of layers."""
    return {prefix + name: number for name, number in numbers.items() if layers or "/" not in name}


def active_run() -> Any:
    """The active W&B run of this process; None without a run, if W&B was not imported, or if the rank is not 0."""
    return getattr(sys.modules.get("wandb"), "run", None) if rank() == 0 else None
