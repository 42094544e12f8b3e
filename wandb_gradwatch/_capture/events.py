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
        no_gradient: gradients are computed and lead to no update (text, step): to be said once, as an alert.
        judge: decides, at every step, whether its gradients are used; None: they are.
    """

    deliver: Callable[[], None]
    notice: Callable[[str, str], None]
    no_gradient: Callable[[str, int], None]
    judge: StepJudge | None = None
