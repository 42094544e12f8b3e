"""Lightning (`lightning` or `pytorch_lightning` 2.x): log gradient statistics to all loggers, callback_metrics and W&B.

trainer = Trainer(callbacks=[GradWatchCallback()])
"""

import copy
import re
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from .._arguments import check, check_flags, is_number, is_whole
from .._capture.scaling import scale_tensor
from .._measure.elements import onto
from ..rules import Judgement, Rule, default_rules, rule
from ..sinks import WandbSink
from ..snapshot import Snapshot
from ..snapshot._arrays import last_present
from ._session import Session, Watching, active_run, is_due, named, require

# The Callback base class of each of the two packages that is imported; trainers before 2.6 check for theirs.
_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
_IMPORTED: Final = tuple(sys.modules[name].Callback for name in _PACKAGES if sys.modules.get(name) is not None)
_Callback: Any = types.new_class("Callback", _IMPORTED or (require(*_PACKAGES, extra="lightning").Callback,))


class GradWatchCallback(Watching, _Callback):  # type: ignore[misc]
    """Watch the gradients of a LightningModule.

    Gradients are measured at optimizer steps, in automatic and manual optimization: accumulated, reduced over ranks,
    unscaled and unclipped. All steps are measured if that costs at most 1 % of the time, or with `sample_every=1`; if
    not, fewer. Statistics of a step go to `trainer.callback_metrics` and to every logger, under the step of their own
    batch; statistics of layers go to the loggers only. Statistics of an epoch are means over its measured optimizer
    steps with finite gradients: `train_epoch/grad_norm` is the mean of the norms.

    The run of a WandbLogger, or the active run, receives the rows, histograms and alerts of `wandb_gradwatch.watch`,
    the loss as `gradwatch/loss`, and the statistics of steps, such as `train/grad_norm`. During a fit,
    `callback.watcher` is the Watcher.

    With several callbacks in one trainer, the second logs under `gradwatch/callback1/`, and under `train/callback1/` if
    its prefix is that of the first. Lightning rejects two callbacks that differ only in `run`, `sinks` or `on_alert`,
    because it could not distinguish their checkpoints: give one of them another `step_prefix`.

    To log other statistics, override `compute_batch_stats`; for other aggregates over an epoch, `init_epoch_stats`,
    `update_epoch_stats` and `compute_epoch_stats`. A name with a slash is that of a layer. Subclasses can also set the
    prefixes.

    Args:
        log_every_n_steps: log the statistics of every n-th batch that ended in an update, or of the next measured
            batch; 0: never; None: the Trainer's `log_every_n_steps`.
        step_prefix: prefix of the names of a step's statistics; None: the class attribute, "train/".
        epoch_prefix: prefix of the names of an epoch's statistics; None: the class attribute, "train_epoch/".
        track_epochs: log statistics of an epoch when it ends.
        per_layer: also log the norm of every layer to the loggers.
        track_sparsity: log `grad_sparsity`, the share of dead elements (|g| <= `dead_threshold`, by default exactly 0).
        explosion_threshold: a norm before clipping above this value raises an "Exploding gradient" alert; None: only
            norms that are unusual for this run do. The argument has no effect if `rules` is given.
        run: the W&B run; None uses that of a WandbLogger, otherwise the active run.
        watch_options: further arguments of `wandb_gradwatch.watch`: rules, guard, include, group_by, ...

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument has the wrong type, or is not one of `wandb_gradwatch.watch`.
    """

    step_prefix: str = "train/"
    epoch_prefix: str = "train_epoch/"
    _epoch: dict[str, Any]  # the number of the epoch, that of its updates so far, and its statistics

    def __init__(
        self,
        *,
        log_every_n_steps: int | None = None,
        step_prefix: str | None = None,
        epoch_prefix: str | None = None,
        track_epochs: bool = True,
        per_layer: bool = False,
        track_sparsity: bool = True,
        explosion_threshold: float | None = None,
        run: Any = None,
        **watch_options: Any,
    ) -> None:
        super().__init__()
        is_cadence = log_every_n_steps is None or (is_whole(log_every_n_steps) and log_every_n_steps >= 0)
        check(is_cadence, "log_every_n_steps", log_every_n_steps, "a number of steps, 0 for never, or None")
        is_limit = explosion_threshold is None or (is_number(explosion_threshold) and explosion_threshold > 0)
        check(is_limit, "explosion_threshold", explosion_threshold, "a positive number or None")
        for name, prefix in (("step_prefix", step_prefix), ("epoch_prefix", epoch_prefix)):
            check(isinstance(prefix, str | None), name, prefix, "a string or None", TypeError)
        caller = type(self).__name__
        check_flags(f"{caller}()", track_epochs=track_epochs, per_layer=per_layer, track_sparsity=track_sparsity)
        self.log_every_n_steps = log_every_n_steps
        if step_prefix is not None:  # a subclass may have a property in place of the attribute
            self.step_prefix = step_prefix
        if epoch_prefix is not None:
            self.epoch_prefix = epoch_prefix
        self.track_epochs = track_epochs
        self.per_layer = per_layer
        self.track_sparsity = track_sparsity
        self.explosion_threshold = explosion_threshold
        self._run = run
        self._session = Session(caller, watch_options, reserved=("run", "log_every", "start_step"), run=run)
        self._trainer: weakref.ref[Any] | None = None  # set during a fit
        self._places: dict[int, _BatchPlace] = {}  # places of samples that have not arrived, by step
        self._new: list[tuple[_BatchPlace, Snapshot]] = []  # arrived, and not yet in the epoch's statistics
        self._due: dict[int, list[Snapshot]] = {}  # arrived samples of batches to be logged, by batch
        self._is_restored = False
        self._begin_epoch(0)

    def compute_batch_stats(self, sample: Snapshot) -> dict[str, float]:
        """The statistics of one optimizer step by name, without prefix; missing values are left out.

        Args:
            sample: a snapshot with one sample.
        """
        return self._session.numbers(sample, per_layer=self.per_layer, sparsity=self.track_sparsity)

    def init_epoch_stats(self) -> dict[str, Any]:
        """The initial statistics of an epoch. Checkpoints save them: use numbers, strings, lists, dicts and tensors."""
        return {}

    def update_epoch_stats(self, epoch_stats: dict[str, Any], batch_stats: Mapping[str, float]) -> None:
        """Add the statistics of a step to those of the epoch, in place. Not called for non-finite gradients."""
        for name, number in batch_stats.items():
            count, total = epoch_stats.get(name, (0, 0.0))
            epoch_stats[name] = (count + 1, total + number)

    def compute_epoch_stats(self, epoch_stats: Mapping[str, Any]) -> dict[str, float]:
        """The statistics of an epoch by name, without prefix."""
        return {name: total / count for name, (count, total) in epoch_stats.items()}

    @property
    def state_key(self) -> str:
        """The key of this instance in checkpoints, made from all arguments except run, sinks and on_alert.

        These three are destinations: a training that resumes in another run must find its state.
        """
        own = ("log_every_n_steps", "step_prefix", "epoch_prefix", "track_epochs", "per_layer", "track_sparsity")
        arguments = {name: getattr(self, name) for name in (*own, "explosion_threshold")}
        options = self._session.options.items()
        arguments |= {name: _described(value) for name, value in options if name not in ("sinks", "on_alert")}
        key: str = self._generate_state_key(**arguments)
        return key

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch. The model is wrapped and restored; learning rate finder and sanity check are over."""
        self._session.end()
        if not self._is_restored:
            self._begin_epoch(trainer.current_epoch)
        self._is_restored = False
        self._begin(trainer, pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Begin to watch if a completely frozen model has been unfrozen."""
        if self.watcher is None:
            self._begin(trainer, pl_module)
        if self._epoch["number"] != trainer.current_epoch:
            # After resuming at an epoch's last batch, Lightning calls neither the epoch's end nor the next one's start.
            self._end_epoch(trainer)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Pass the loss to the watcher, without Lightning's division by accumulation and without the loss scale."""
        if self.watcher is not None and loss.numel() == 1:
            scale = scale_tensor(getattr(trainer.precision_plugin, "scaler", None))
            value = loss.detach() * trainer.accumulate_grad_batches
            self.watcher.loss(value if scale is None else value / onto(scale, value.device))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note that the next sample belongs to this batch; the sample may arrive later."""
        if self.watcher is not None:
            self._places[self.watcher.step + 1] = _place_of(trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the samples that have arrived."""
        self._log_arrived(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the epoch's statistics."""
        self._session.settle()
        self._log_arrived(trainer)
        self._end_epoch(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Flush and stop watching."""
        self._session.end()
        self._log_arrived(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop watching without a last merge over ranks: other ranks may not take part, and no teardown follows."""
        if self.watcher is not None:
            self.watcher.__exit__(type(exception), exception, exception.__traceback__)
        self._session.end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stop watching if on_train_end has not."""
        self._session.end()

    def state_dict(self) -> dict[str, Any]:
        """The watcher's state and the epoch's statistics as plain values and tensors, for a resumed fit."""
        watched = self._session.state_dict()
        # The checkpoint does not contain the samples that have just been waited for: this process logs them.
        self._log_arrived(self._trainer and self._trainer())
        return {"watched": watched, "epoch": copy.deepcopy(self._epoch)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._session.load_state_dict(state_dict["watched"])
        self._epoch, self._is_restored = copy.deepcopy(state_dict["epoch"]), True

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        every = trainer.log_every_n_steps if self.log_every_n_steps is None else self.log_every_n_steps
        self._every, self._trainer = every, weakref.ref(trainer)
        self._places, self._new, self._due = {}, [], {}
        ours = [callback for callback in trainer.callbacks if isinstance(callback, GradWatchCallback)]
        self._before = ours[: ours.index(self)] if self in ours else []  # those that precede this one in the trainer
        self._namespace = f"callback{len(self._before)}" if self._before else ""
        asked: dict[str, Any] = {"group_by": None, "details": ()} | self._session.options
        of_rows = {"namespace": self._namespace, "group_by": asked["group_by"], "details": asked["details"]}
        numbers_of = self._named_numbers if every else None
        self._session.begin(
            pl_module,
            beside=[callback.watcher for callback in ours if callback is not self and callback.watcher is not None],
            goes_on=trainer.global_step > 0,
            defaults=self._default_rules,
            log_every=every or None,  # without rows, alerts still need windows
            sinks=[_NamedWandbSink(run, numbers_of, **of_rows) for run in _runs_of(trainer, self._run)],
        )

    def _default_rules(self) -> list[Rule | Judgement]:
        limit = self.explosion_threshold
        if limit is None:
            return default_rules()

        @rule(title="Exploding gradient", level="ERROR")
        def above(snapshot: Snapshot) -> str | None:
            norm = float(snapshot.total_grad_norm[0])
            if snapshot.skipped[0] or not norm > limit:
                return None
            return f"Step {snapshot.steps[0]}: the gradient norm is {norm:.3g}, above explosion_threshold={limit:g}."

        return [*default_rules(), above]

    def _log_arrived(self, trainer: Any) -> None:
        """Log the due batches whose samples have all arrived. W&B runs receive these numbers in rows of the sinks."""
        self._take_arrived()
        new, self._new = self._new, []
        for place, sample in new:
            is_update = not sample.skipped[0] and float(np.nansum(sample.num_nonfinite)) == 0
            if self.track_epochs and is_update and place.epoch == self._epoch["number"]:
                self.update_epoch_stats(self._epoch["stats"], self.compute_batch_stats(sample))
                self._epoch["num_updates"] += 1
        waiting = {place.batch for place in self._places.values()}
        for batch in [batch for batch in self._due if trainer is not None and batch not in waiting]:
            numbers = self.compute_batch_stats(_newest_of(self._due.pop(batch)))
            _log(trainer, numbers, self._prefix("step_prefix"), step=batch, with_wandb=False)

    def _take_arrived(self) -> None:
        """Assign samples to their batches: one may be completed late (the second of a GAN), and arrive late (a GPU)."""
        for sample in self._session.take():
            step, trainer = int(sample.steps[0]), self._trainer and self._trainer()
            place = self._places.get(step) or _place_of(trainer)
            # Samples arrive in order: noted steps up to this one that did not arrive were not measured.
            self._places = {later: where for later, where in self._places.items() if later > step}
            self._new.append((place, sample))
            if is_due(sample, place.batch + 1, self._every):
                self._due.setdefault(place.batch, []).append(sample)

    def _begin_epoch(self, epoch: int) -> None:
        self._epoch = {"number": epoch, "num_updates": 0, "stats": self.init_epoch_stats()}

    def _end_epoch(self, trainer: Any) -> None:
        """Log the statistics of the epoch, if it has any, and begin the next epoch."""
        if self._epoch["num_updates"]:
            step = _place_of(trainer).batch - 1  # the epoch's last batch, where Lightning logs metrics of epochs
            numbers = self.compute_epoch_stats(self._epoch["stats"])
            _log(trainer, numbers, self._prefix("epoch_prefix"), step=step, with_wandb=True)
        is_over = self._epoch["number"] == trainer.current_epoch
        self._begin_epoch(trainer.current_epoch + 1 if is_over else trainer.current_epoch)

    def _named_numbers(self, step: int) -> dict[str, float]:
        """The statistics of a due step for its W&B row, without layers, which the row contains under other keys."""
        self._take_arrived()
        due = next((samples for samples in self._due.values() if samples[-1].steps[0] == step), None)
        numbers = {} if due is None else self.compute_batch_stats(_newest_of(due))
        return named(self._prefix("step_prefix"), numbers, layers=False)

    def _prefix(self, which: str) -> str:
        """The step or epoch prefix. If an earlier callback has the same prefix, the namespace is appended."""
        prefix: str = getattr(self, which)
        is_taken = any(getattr(other, which) == prefix for other in self._before)
        return f"{prefix}{self._namespace}/" if is_taken else prefix


def _described(value: Any) -> str:
    """A text for an argument that is the same in every process: names of functions, but no memory addresses."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described, value))}]"
    name = getattr(value, "__qualname__", None)
    return f"{getattr(value, '__module__', '')}.{name}" if name else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


class _BatchPlace(NamedTuple):
    batch: int  # the loggers' step: index, from 0, among the batches that ended in an update
    epoch: int


def _newest_of(samples: list[Snapshot]) -> Snapshot:
    """Merge samples into one with each parameter's last present row, such as the two updates of a GAN in one batch."""
    merged = samples[0].merge(*samples[1:])
    return replace(merged.sample(-1), rows=last_present(merged.rows, merged.present)[None])


def _place_of(trainer: Any) -> _BatchPlace:
    # The step that Trainer passes to its loggers, which is private; global_step counts the steps of every optimizer.
    batch = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step)
    return _BatchPlace(batch, trainer.current_epoch)


def _log(trainer: Any, numbers: Mapping[str, float], prefix: str, *, step: int, with_wandb: bool) -> None:
    """Log numbers to every logger under their own step, and model-wide numbers to callback_metrics.

    `with_wandb=False` omits W&B's loggers, because their runs receive the numbers in the rows of the sinks.
    """
    # Not by log_dict, which logs at another step of the trainer or never, takes 0.3 ms per name, and demands a
    # collective to average numbers that are equal on all ranks.
    if not numbers:
        return
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if with_wandb or not _is_wandb(logger):
            logger.log_metrics(named(prefix, numbers), step=step)
    whole = named(prefix, numbers, layers=False)
    trainer.callback_metrics.update({name: torch.tensor(number) for name, number in whole.items()})


class _NamedWandbSink(WandbSink):
    """A W&B sink that adds numbers under the framework's own names to its rows."""

    def __init__(self, run: Any, numbers_of: Callable[[int], Mapping[str, float]] | None, **options: Any) -> None:
        super().__init__(run, **options)
        self._numbers_of = numbers_of  # from a sample's step to its additional numbers by key; None: only alerts

    def write(self, snapshot: Snapshot) -> None:
        if self._numbers_of is None:
            return
        numbers_S = [self._numbers_of(int(step)) for step in snapshot.steps]
        keys = dict.fromkeys(key for numbers in numbers_S for key in numbers)
        columns = {key: np.array([numbers.get(key, np.nan) for numbers in numbers_S]) for key in keys}
        super().write(replace(snapshot, metrics={**snapshot.metrics, **columns}) if columns else snapshot)


def _runs_of(trainer: Any, run: Any) -> list[Any]:
    """The user's run; otherwise, on rank 0, the runs of the WandbLoggers, or else the active run."""
    if run is not None or not trainer.is_global_zero:
        return [] if run is None else [run]
    runs = [logger.experiment for logger in trainer.loggers if _is_wandb(logger)] or [active_run()]
    return list({id(each): each for each in runs if each is not None}.values())


def _is_wandb(logger: Any) -> bool:
    return any(cls.__name__ == "WandbLogger" for cls in type(logger).__mro__)
