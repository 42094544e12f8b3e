"""What a sampler tells its watcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .._guard.pending_verdicts import StepJudge
from .._nonfinite.replay import StepReplay


@dataclass(frozen=True)
class SamplerEvents:
    """What a sampler tells its watcher.

    Args:
        deliver: it is a good moment to hand over what has arrived.
        notice: something to be said once, by kind and text.
        alert: gradients are computed and lead to no update (title, text, step): to be said once per title.
        judge: decides, at every step, whether its gradients are used; None: they are.
        replay: runs a step that is left out once more; None: it is not asked for.
    """

    deliver: Callable[[], None]
    notice: Callable[[str, str], None]
    alert: Callable[[str, str, int], None]
    judge: StepJudge | None = None
    replay: StepReplay | None = None
