"""Hugging Face Trainer: one callback for any precision and gradient accumulation, with or without PEFT.

    trainer = Trainer(..., callbacks=[GradWatchCallback()])

A custom loop with Accelerate needs no callback: call `watcher = wandb_gradwatch.watch(model)` after
`accelerator.prepare`, and `watcher.remove()` before `accelerator.end_training`, which finishes the run.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Final

import torch

from .._arguments import check, check_flags, is_whole
from ..snapshot import keys
from ._session import DEFAULT_LOG_EVERY, Session, Watching, active_run, is_due, logger, named, require

_TrainerCallback: Any = require("transformers", extra="transformers").TrainerCallback

# Our file in each checkpoint. The Trainer's trainer_state.json is unsuitable: a window has too many numbers for it, the
# Trainer restores callbacks by making new ones, without the user's rules and functions, and it raises KeyError for a
# callback that the resumed checkpoint does not contain.
_FILE: Final = "gradwatch.pt"


class GradWatchCallback(Watching, _TrainerCallback):  # type: ignore[misc]
    """Watch the gradients of the model that a Trainer trains.

    The active W&B run, such as the Trainer's own with `report_to="wandb"`, receives the rows, histograms and alerts of
    `wandb_gradwatch.watch`; steps are the Trainer's global steps, also after resuming. `state.log_history` receives
    `gradwatch/grad_norm`, `grad_mean`, `grad_std` and `grad_sparsity` of every `log_every`-th step (by default
    `logging_steps`), or of the next measured step (`sample_every=1` measures all). During training,
    `callback.watcher` is the Watcher.

    `gradwatch/loss` is the loss that the Trainer differentiates, averaged over micro-batches as the Trainer does.

    Each checkpoint contains a file `gradwatch.pt`, with the state of alerts and rules and the row that is not complete,
    for resuming. The file is searched in `TrainingArguments.resume_from_checkpoint` and in the checkpoint folders of
    `output_dir`.

    The environment variable WANDB_WATCH ("gradients", "parameters" or "all") selects the histograms, unless `log=` is
    given. With `report_to="wandb"`, the Trainer's own `wandb.watch` reads the variable too and logs the histograms a
    second time; set WANDB_WATCH to any other value, such as "false", to switch only the Trainer's `wandb.watch` off.

    Args:
        log_every: write a row every n-th optimizer step; None: the Trainer's `logging_steps`.
        per_layer: also put the norm of every layer into `state.log_history`.
        run: the W&B run; None uses the active run.
        watch_options: further arguments of `wandb_gradwatch.watch`: rules, guard, include, group_by, ...

    Raises:
        ValueError: an argument is out of range.
        TypeError: an argument has the wrong type, or is not one of `wandb_gradwatch.watch`.
    """

    def __init__(
        self, *, log_every: int | None = None, per_layer: bool = False, run: Any = None, **watch_options: Any
    ) -> None:
        is_cadence = log_every is None or (is_whole(log_every) and log_every >= 1)
        check(is_cadence, "log_every", log_every, "a number of optimizer steps, at least 1, or None")
        caller = type(self).__name__
        check_flags(f"{caller}()", per_layer=per_layer)
        self._session = Session(caller, watch_options, reserved=("run", "log_every", "start_step"), run=run)
        self.log_every = log_every
        self.per_layer = per_layer
        self._run = run

    # The Trainer has no event for exceptions: after one, the watcher stays until the next training or the model's end.

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begin to watch. The run exists, the model is wrapped and the step is restored at this event."""
        self._session.end()
        if state.global_step:
            self._restore(args, state)
        self._begin(args, state, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begin to watch if a completely frozen model has been unfrozen."""
        if self.watcher is None:
            self._begin(args, state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the statistics of logged steps to the Trainer's log."""
        self._note_samples(args, state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save a file in the checkpoint that the Trainer has just written."""
        log_of_checkpoint = _log_of(state)
        watched = self._session.state_dict()  # on every rank, because of sharded models
        late = self._note_samples(args, state)  # too late for the log that the Trainer has written
        folder = _folder_of(args, state)
        if args.should_save and folder.is_dir():  # a hyperparameter search saves in other folders and is never resumed
            saved = {"log": log_of_checkpoint, "watched": watched, "late": late}
            unfinished = folder / f"{_FILE}.{os.getpid()}"
            torch.save(saved, unfinished)
            unfinished.replace(folder / _FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Flush and stop watching."""
        self._session.end()
        self._note_samples(args, state)

    def _begin(self, args: Any, state: Any, model: Any) -> None:
        asked = os.environ.get("WANDB_WATCH", "")  # the Trainer reads the same variable
        self._session.begin(
            model,
            start_step=int(state.global_step),
            log_every=self._every(args, state),
            log=self._session.options.get("log", asked if asked in ("parameters", "all") else "gradients"),
            run=active_run() if self._run is None else self._run,
        )

    def _restore(self, args: Any, state: Any) -> None:
        """Load this callback's file from the checkpoint that the Trainer has resumed from."""
        given = args.resume_from_checkpoint
        folders = [Path(given)] if isinstance(given, str) and Path(given).is_dir() else []
        folders.append(_folder_of(args, state))
        for path in filter(Path.exists, [folder / _FILE for folder in folders]):
            try:
                saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
                log, late, watched = (saved[name] for name in ("log", "late", "watched"))
            except Exception:  # a partial copy, or a file of another version, must not stop the training
                logger.exception("wandb_gradwatch: %s could not be read", path)
                continue
            if log == _log_of(state):  # otherwise the file belongs to another training
                state.log_history += late
                self._session.load_state_dict(watched)
                return
        if state.is_world_process_zero:
            logger.warning(
                "wandb_gradwatch: the training was resumed at step %d, but %s of that checkpoint was not found in %s: "
                "the rules start without saved state. If the checkpoint is in another folder, set "
                "TrainingArguments(resume_from_checkpoint=...) to that folder.",
                state.global_step,
                _FILE,
                " or ".join(map(str, folders)),
            )

    def _every(self, args: Any, state: Any) -> int:
        if self.log_every is not None:
            return self.log_every
        # `args.logging_steps` may be a fraction of all steps; `state.logging_steps` is the number of steps.
        return max(int(state.logging_steps), 1) if args.logging_strategy == "steps" else DEFAULT_LOG_EVERY

    def _note_samples(self, args: Any, state: Any) -> list[dict[str, float]]:
        """Add arrived samples to the Trainer's log, and return the added entries."""
        every = self._every(args, state)
        entries = [
            named(keys.PREFIX, self._session.numbers(sample, per_layer=self.per_layer))
            | {"step": int(sample.steps[0]), "epoch": state.epoch}
            for sample in self._session.take()
            if is_due(sample, int(sample.steps[0]), every)
        ]
        state.log_history += entries
        return entries


def _folder_of(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _log_of(state: Any) -> str:
    """A hash of the Trainer's log, which distinguishes the checkpoints of different trainings."""
    return hashlib.sha256(json.dumps(state.log_history, sort_keys=True).encode()).hexdigest()
