"""What a W&B run does beside its public methods, and what of it differs between versions of the SDK."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any


def call_before_the_end(run: Any, end: Callable[[], None]) -> Callable[[], None]:
    """Call `end`, which must be idempotent, when the run is about to end, on both ways there.

    run.finish(), wandb.finish(), `with wandb.init()` and a second wandb.init() run the teardown hooks. A script
    that just ends, sys.exit(), an exception and Ctrl-C do not: there, atexit calls the newest handler first, so
    ours, registered after wandb.init(), runs before the one that ends W&B's process. (A handler of the user's own
    that logs, registered between wandb.init() and us, runs after ours: its rows follow ours.) The returned function
    takes the exit handler back, once `end` has been called.
    """
    pid = os.getpid()

    def end_at_exit() -> None:
        if os.getpid() == pid:  # a forked child inherits the handler, but not the run
            end()

    atexit.register(end_at_exit)
    try:
        from wandb.sdk.wandb_run import TeardownHook, TeardownStage

        run._teardown_hooks.append(TeardownHook(end, TeardownStage.EARLY))
    except (ImportError, AttributeError):
        _wrap_finish(run, end)

    return lambda: atexit.unregister(end_at_exit)


def _wrap_finish(run: Any, end: Callable[[], None]) -> None:
    name = "_finish" if hasattr(run, "_finish") else "finish"
    finish = getattr(run, name)

    def finish_after_our_end(*args: Any, **kwargs: Any) -> Any:
        end()
        return finish(*args, **kwargs)

    vars(run)[name] = finish_after_our_end


def syncs_tensorboard() -> bool:
    """Whether W&B's process reads TensorBoard's event files and makes rows of them."""
    import wandb

    return bool(wandb.patched.get("tensorboard"))


def effective_step(step: Any) -> int | None:
    """The step that W&B makes of the one that the user gave; None for its own."""
    if step is None or syncs_tensorboard():  # W&B ignores the user's steps then
        return None
    try:
        return int(step)
    except (TypeError, ValueError):
        return None  # the user's call is about to say so


def media_counter(run: Any) -> tuple[str, int] | None:
    """The counter that W&B names media files after, which our log calls would move: its attribute and value."""
    for name in ("_local_step", "_step"):
        if name in vars(run):
            return name, vars(run)[name]
    return None


def restore_media_counter(run: Any, counter: tuple[str, int] | None) -> None:
    """Set it back."""
    if counter is not None:
        setattr(run, *counter)
