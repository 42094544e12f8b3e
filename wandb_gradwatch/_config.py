"""The arguments of watch() as the watcher gets them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ._capture.parts import CaptureConfig
from .rules import Alert, Judgement, Rule
from .sinks import Sink


@dataclass(frozen=True)
class Config:
    """The arguments of watch(), checked and resolved."""

    capture: CaptureConfig  # which steps are measured, and what is measured at them
    sinks: tuple[Sink, ...]  # receive the snapshots and alerts
    rules: tuple[Rule | Judgement, ...]  # raise the alerts
    on_alert: tuple[Callable[[Alert], object], ...]  # the user's functions, called with every alert that is sent
    on_nonfinite: Literal["trace"] | None  # "trace": run a step again after a NaN or Inf, to name its operation
