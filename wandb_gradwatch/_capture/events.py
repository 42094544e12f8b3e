"""What a sampler tells its watcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .._guard.pending_verdicts import StepJudge


@dataclass(frozen=True)
class SamplerEvents:
    """What a sampler tells its watcher.

    Args:
        deliver: it is a good moment to hand over what has arrived.
        notice: something to be said once, by kind and text.
        alert: gradients are computed and lead to no update (title, text, step): to be said once per title.
        judge: decides, at every step, whether its gradients are used; None: they are.
    """

    deliver: Callable[[], None]
    notice: Callable[[str, str], None]
    alert: Callable[[str, str, int], None]
    judge: StepJudge | None = None
