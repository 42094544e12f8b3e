"""Hugging Face Trainer: one callback, before or after PEFT, whatever the precision and accumulation.

    trainer = Trainer(..., callbacks=[GradWatchCallback()])

A loop of one's own with Accelerate needs no class: `wandb_gradwatch.watch(model)` after `accelerator.prepare`, and
`remove()` of what it returned before `accelerator.end_training`, which finishes the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from ..snapshot import GroupBy
from ..watch import watch
from ..watcher import Watcher
from .feed import AlertLog, SampleFeed, active_run, check_watch_options, sample_numbers, with_feed
from .require import require

_TrainerCallback: Any = require("transformers", extra="transformers").TrainerCallback

logger: Final = logging.getLogger("wandb_gradwatch")

_DEFAULT_LOG_EVERY: Final = 50  # where the Trainer logs by epochs, or not at all


class GradWatchCallback(_TrainerCallback):  # type: ignore[misc]
    """Watch the gradients of the model that a Trainer trains.

    The active W&B run, such as the Trainer's own with `report_to="wandb"`, gets the rows, histograms and alerts of
    `wandb_gradwatch.watch`; steps are the Trainer's global steps, also after a resume. `state.log_history` gets
    `gradwatch/grad_norm` and its like under the step that they belong to. The watcher is `callback.watcher` while the
    Trainer trains.

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
        check_watch_options(type(self).__name__, watch_options, reserved=("run", "log_every", "start_step"))
        self.log_every = log_every
        self.per_layer = per_layer
        self.watcher: Watcher | None = None
        self._run = run
        self._watch_options = watch_options
        self._feed = SampleFeed()
        self._said_frozen = False

    # The Trainer makes no event of an exception: its watcher stays until the next training, or as long as the model.

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Begin to watch: the run is there, the model is wrapped, the step is restored."""
        self._end()
        self._feed.take()
        self._begin(args, state, model)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """A model that was frozen as a whole may be unfrozen later."""
        if self.watcher is None:
            self._begin(args, state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the numbers of the steps that are logged."""
        self._take_samples(args, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Flush and stop watching."""
        self._end()
        self._take_samples(args, state)

    def _begin(self, args: Any, state: Any, model: Any) -> None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            if not self._said_frozen and state.is_world_process_zero:
                logger.warning(
                    "wandb_gradwatch: the model has no trainable parameter; watching begins when it has one."
                )
            self._said_frozen = True
            return
        options = with_feed(self._watch_options, self._feed)
        options["sinks"] = [*(self._watch_options.get("sinks") or ()), AlertLog()]
        options["run"] = active_run() if self._run is None else self._run
        every = self._every(args, state)
        self.watcher = watch(model, log_every=every, start_step=int(state.global_step), **options)

    def _every(self, args: Any, state: Any) -> int:
        if self.log_every is not None:
            return self.log_every
        by_steps = str(getattr(args.logging_strategy, "value", args.logging_strategy)) == "steps"
        # The state's is resolved: a fraction in the arguments is a share of all steps.
        return max(int(state.logging_steps), 1) if by_steps else _DEFAULT_LOG_EVERY

    def _take_samples(self, args: Any, state: Any) -> None:
        every = self._every(args, state)
        for sample in self._feed.take():
            step = int(sample.steps[0])
            if step % every == 0:
                group_by: GroupBy = self._watch_options.get("group_by", "parameter")
                numbers = sample_numbers(sample, per_layer=group_by if self.per_layer else None, sparsity=True)
                state.log_history.append(_named(numbers) | {"step": step, "epoch": state.epoch})

    def _end(self) -> None:
        if self.watcher is not None:
            self.watcher.remove()
            self.watcher = None


def _named(numbers: Mapping[str, float]) -> dict[str, float]:
    return {f"gradwatch/{name}": number for name, number in numbers.items()}
