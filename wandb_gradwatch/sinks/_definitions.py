"""Defines our keys to W&B: their x axis, and whether the run's summary keeps their last values."""

import logging
from collections.abc import Mapping
from typing import Any, Final

from .._interruptions import raise_interruption
from ..snapshot import keys

logger = logging.getLogger("wandb_gradwatch")

# The time of W&B's process grows with the square of the number of definitions: 0.4 s for 500, 1.1 s for 1,000, 4 s for
# 2,000, once in a run and in the background.
MAX_DEFINITIONS: Final = 2000
_IN_HISTOGRAM: Final = ("._type", ".values", ".bins")  # the parts of wandb.Histogram, which the summary keeps apart


class MetricDefinitions:
    """Calls `run.define_metric` once for each key, when the key is first logged in the run.

    Keys are defined by their exact names. Patterns such as `grad_norm/*` would match the same keys as the `*` of a
    framework, and W&B would choose one of the two at random. Only layers beyond MAX_DEFINITIONS are defined by a
    pattern.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._logged: set[str] = set()
        self._defined: set[str] = set()

    def add(self, row: Mapping[str, Any]) -> None:
        """Define the keys of a row that is about to be logged. Cost: 0.1 ms for each key that is new."""
        for key in [key for key in row if key not in self._logged]:
            self._logged.add(key)
            try:
                self._define(key)
            except Exception as error:  # a name that W&B refuses, such as one with a star: the row is logged without
                raise_interruption(error)
                logger.debug("%r could not be defined: %s", key, error)

    def _define(self, key: str) -> None:
        if keys.is_in_summary(key):
            self._define_once(key)
        elif len(self._defined) > MAX_DEFINITIONS and not key.startswith(keys.PREFIX):
            self._define_once(f"{key.partition('/')[0]}/*", summary="none")
        else:
            self._define_once(key, summary="none")
            for part in _IN_HISTOGRAM if keys.split_histogram(key) is not None else ():
                self._define_once(key + part, summary="none")

    def _define_once(self, name: str, **summary: str) -> None:
        if name not in self._defined:
            self._defined.add(name)
            # Without step_sync=False, W&B adds our step to rows of the user that contain a key of these families.
            options = {} if name == keys.STEP else {"step_metric": keys.STEP, "step_sync": False}
            self._run.define_metric(name, **options, **summary)
