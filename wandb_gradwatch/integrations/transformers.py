"""Hugging Face Trainer: one callback, before or after PEFT, whatever the precision and accumulation.

    trainer = Trainer(..., callbacks=[GradWatchCallback()])

A loop of one's own with Accelerate needs no class: `wandb_gradwatch.watch(model)` after `accelerator.prepare`, and
`remove()` of what it returned before `accelerator.end_training`, which finishes the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from .._capture.parameter_registry import with_prefixes
from ..metrics._forward_hooks import ROOT, ForwardHook, ModuleIndex
from ..snapshot import keys
from ._session import Session, Watching, active_run, is_due, named, require

_TrainerCallback: Any = require("transformers", extra="transformers").TrainerCallback

logger: Final = logging.getLogger("wandb_gradwatch")

_DEFAULT_LOG_EVERY: Final = 50  # where the Trainer logs by epochs, or not at all
# Beside the Trainer's own files in each checkpoint. Not in its trainer_state.json: an open window has too many numbers
# for it, the Trainer restores callbacks by making new ones without the user's rules and functions, and it cannot save
# one that is new since the checkpoint (KeyError).
_FILE: Final = "gradwatch.pt"


class GradWatchCallback(Watching, _TrainerCallback):  # type: ignore[misc]
    """Watch the gradients of the model that a Trainer trains.

    The active W&B run, such as the Trainer's own with `report_to="wandb"`, gets the rows, histograms and alerts of
    `wandb_gradwatch.watch`; steps are the Trainer's global steps, also after a resume. `state.log_history` gets
    `gradwatch/grad_norm` and its like under the step that they belong to: of each `logging_steps`-th step, or of the
    first one after it that is measured (`sample_every=1` measures all). The watcher is `callback.watcher` while the
    Trainer trains.

    The loss that the model returns is logged as `gradwatch/loss`; another one, of `compute_loss`, is not seen: call
    `callback.watcher.loss(...)` there.

    Each checkpoint has a file `gradwatch.pt`, with which a resumed training goes on: its alerts, its rules and its open
    row. It is looked for in `TrainingArguments.resume_from_checkpoint` and in the checkpoints of `output_dir`.

    The environment variable WANDB_WATCH ("gradients", "parameters" or "all") says of what histograms are logged, unless
    `log=` does. With `report_to="wandb"` the Trainer's own `wandb.watch` heeds it too, and logs them once more; any
    other value turns only that one off.

    Args:
        log_every: write a row every n-th optimizer step; None: as the Trainer logs (`logging_steps`).
        per_layer: put the norm of every layer into `state.log_history` too.
        run: the W&B run; None takes the active one.
        watch_options: further arguments of `wandb_gradwatch.watch`: rules, guard, include, group_by, ...

    Raises:
        ValueError: log_every is not a positive number.
        TypeError: an argument that watch() does not have.
    """

    def __init__(
        self, *, log_every: int | None = None, per_layer: bool = False, run: Any = None, **watch_options: Any
    ) -> None:
        if log_every is not None and (not isinstance(log_every, int) or log_every < 1):
            raise ValueError(f"log_every={log_every!r} must be a number of optimizer steps, at least 1, or None")
        self._session = Session(type(self).__name__, watch_options, reserved=("run", "log_every", "start_step"))
        self.log_every = log_every
        self.per_layer = per_layer
        self._run = run
        self._forwards: ForwardHook | None = None  # while the Trainer trains
        self._share_of: int = 1  # what a share of the loss is multiplied with

    # The Trainer makes no event of an exception: its watcher stays until the next training, or as long as the model.

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begin to watch: the run is there, the model is wrapped, the step is restored."""
        self._end_session()
        if state.global_step:
            self._restore(args, state)
        self._begin(args, state, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """A model that was frozen as a whole may be unfrozen later."""
        if self.watcher is None:
            self._begin(args, state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the numbers of the steps that are logged."""
        self._note_samples(args, state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put a file into the checkpoint that has just been written."""
        log_of_checkpoint = _log_of(state)
        watched = self._session.state_dict()  # on every rank, for sharded models
        late = self._note_samples(args, state)  # the Trainer has already written its log
        folder = _folder_of(args, state)
        if args.should_save and folder.is_dir():  # a hyperparameter search saves elsewhere, and is not resumed
            saved = {"log": log_of_checkpoint, "watched": watched, "late": late}
            unfinished = folder / f"{_FILE}.{os.getpid()}"
            torch.save(saved, unfinished)
            unfinished.replace(folder / _FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Flush and stop watching."""
        self._end_session()
        self._note_samples(args, state)

    def _forward_done(self, name: str, module: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        is_mapping = isinstance(output, Mapping)
        loss = output.get("loss") if is_mapping else output[0] if isinstance(output, tuple) and output else None
        if self.watcher is None or not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            return
        is_share = kwargs.get("num_items_in_batch") is not None  # divided by the tokens of all micro-batches
        self.watcher.loss(loss.detach() * self._share_of if is_share else loss, is_share=is_share)

    def _end_session(self) -> None:
        if self._forwards is not None:
            self._forwards.remove()
            self._forwards = None
        self._session.end()

    def _begin(self, args: Any, state: Any, model: Any) -> None:
        asked = os.environ.get("WANDB_WATCH", "")  # in the Trainer's own words
        self._session.begin(
            model,
            start_step=int(state.global_step),
            log_every=self._every(args, state),
            log=self._session.options.get("log", asked if asked in ("parameters", "all") else "gradients"),
            run=active_run() if self._run is None else self._run,
        )
        # What the model returns: the Trainer shows its callbacks no loss before the update.
        if self.watcher is not None and args.n_gpu <= 1:
            # As the Trainer multiplies it afterwards.
            self._share_of = args.world_size if args.average_tokens_across_devices else 1
            self._forwards = ForwardHook(type(self).__name__, ModuleIndex(with_prefixes(model)))
            self._forwards.hook(lambda name, _: name == ROOT, self._forward_done)
            self._forwards.open()

    def _restore(self, args: Any, state: Any) -> None:
        """Find what this callback put into the checkpoint that the Trainer has resumed from."""
        given = args.resume_from_checkpoint
        folders = [Path(given)] if isinstance(given, str) and Path(given).is_dir() else []
        folders.append(_folder_of(args, state))
        for path in (folder / _FILE for folder in folders if (folder / _FILE).exists()):
            try:
                saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
            except Exception:  # copied by halves, say: the training goes on all the same
                logger.exception("wandb_gradwatch: %s could not be read", path)
                continue
            if saved["log"] == _log_of(state):  # otherwise it is of another training
                state.log_history += saved["late"]
                self._session.load_state_dict(saved["watched"])
                return
        if state.is_world_process_zero:
            logger.warning(
                "wandb_gradwatch: the training was resumed at step %d, and no %s of that checkpoint was found in %s: "
                "the rules begin without memory. If the checkpoint is elsewhere, set "
                "TrainingArguments(resume_from_checkpoint=...) to its folder.",
                state.global_step,
                _FILE,
                " or ".join(map(str, folders)),
            )

    def _every(self, args: Any, state: Any) -> int:
        if self.log_every is not None:
            return self.log_every
        # The state's is resolved: a fraction in the arguments is a share of all steps.
        return max(int(state.logging_steps), 1) if args.logging_strategy == "steps" else _DEFAULT_LOG_EVERY

    def _note_samples(self, args: Any, state: Any) -> list[dict[str, float]]:
        """Add what has arrived to the Trainer's log, and return what was added."""
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
    """Tells the checkpoints of different trainings apart: what the Trainer has logged, as it writes it."""
    return hashlib.sha256(json.dumps(state.log_history, sort_keys=True).encode()).hexdigest()
