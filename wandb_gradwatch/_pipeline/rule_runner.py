"""When the rules look at which samples, and what becomes of their findings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .._diagnosis import Diagnosis, diagnose, with_diagnosis
from .._measure.columns import Column
from .._runtime.error_boundary import CallbackError
from .._transfer.transfers import ArrivedSample
from .alert_manager import AlertManager
from .assembly import Names, snapshot_of
from .dispatcher import Dispatcher

# Healthy samples wait for each other before the rules look at them: once for several costs little more than for one.
_JUDGED_TOGETHER: Final = 32
# One whose norm has grown this much since the last look, or that is not finite, is judged at once.
_SUSPICIOUS_GROWTH: Final = 1.5


class RuleRunner:
    """Shows every sample to the rules once, in order. Owns the samples that they have not seen.

    Args:
        desk: the rules and what is sent of their findings.
        outlets: where alerts go, with their diagnosis; their recorder keeps what was judged.
        names: asks for the names as they are now.
        modules: class names of the model's modules by name, for the diagnosis.
        at_once: judge every sample when it arrives, as rules of the user's may need.
    """

    def __init__(
        self,
        alert_manager: AlertManager,
        dispatcher: Dispatcher,
        *,
        names: Callable[[], Names],
        modules: Mapping[str, str],
        at_once: bool,
    ) -> None:
        self._alert_manager = alert_manager
        self._dispatcher = dispatcher
        self._names = names
        self._modules = modules
        self._batch = 1 if at_once else _JUDGED_TOGETHER
        self._waiting: list[ArrivedSample] = []
        self._judged_sum_sq = math.inf  # of the last sample that the rules have seen

    def add(self, sample: ArrivedSample, total_C: Sequence[float]) -> None:
        """A sample waits its turn, unless it looks suspicious.

        Args:
            total_C: the sums of its rows' columns; only those of sum columns mean anything.
        """
        self._waiting.append(sample)
        sum_sq = total_C[Column.GRAD_SUM_SQ]
        nonfinite = total_C[Column.NUM_NAN] + total_C[Column.NUM_INF] > 0
        grown = not sum_sq <= self._judged_sum_sq * _SUSPICIOUS_GROWTH**2
        if nonfinite or grown or sample.skipped or len(self._waiting) >= self._batch:
            self._judged_sum_sq = sum_sq
            self.judge()

    def judge(self, more: Sequence[ArrivedSample] = ()) -> None:
        """Let the rules look at what they have not seen yet, and at these, and send what they find."""
        samples, self._waiting = [*self._waiting, *more], []
        if not samples:
            return
        snapshot = snapshot_of(samples, self._names())
        self._dispatcher.recorder.add(snapshot)  # before the desk: the history of an alert has the alert's own sample
        raised: CallbackError | None = None
        for alert in self._alert_manager.process(snapshot):
            try:
                self._dispatcher.send(with_diagnosis(alert, self._dispatcher.recorder.history(), **self._context))
            except CallbackError as error:
                raised = raised or error
        if raised is not None:
            raise raised

    @property
    def healthy(self) -> bool:
        """No rule found an error in the newest sample."""
        self.judge()
        return self._alert_manager.healthy

    def diagnose(self) -> list[Diagnosis]:
        """Probable causes of what the last samples show, most probable first."""
        self.judge()
        history = self._dispatcher.recorder.history()
        return [] if history is None else diagnose(history, **self._context)

    @property
    def _context(self) -> dict[str, Any]:
        return {"modules": self._modules, "notes": self._dispatcher.recorder.notes}
