"""The rules look at every sample when it arrives; what becomes of their findings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .._diagnosis import Diagnosis, diagnose, with_diagnosis
from .._runtime.error_boundary import CallbackError
from .._runtime.sharding import world_size
from .._transfer.transfers import ArrivedSample, Names
from ..rules import Alert
from ..rules._base import Finding, Level
from ..snapshot import Snapshot, keys
from .alert_manager import AlertManager
from .assembly import snapshot_of
from .dispatcher import Dispatcher


class RuleRunner:
    """Shows every sample to the rules once, in order, when it arrives.

    Args:
        alert_manager: the rules and what is sent of their findings.
        dispatcher: where alerts go, with their diagnosis; its recorder keeps what was judged.
        modules: class names of the model's modules by name, for the diagnosis.
    """

    def __init__(self, alert_manager: AlertManager, dispatcher: Dispatcher, *, modules: Mapping[str, str]) -> None:
        self._alert_manager = alert_manager
        self._dispatcher = dispatcher
        self._modules = modules
        self._seconds_on_alerts = 0.0

    def judge(self, samples: Sequence[ArrivedSample], known: Names) -> None:
        """Let the rules look at samples, at least one, under these names, and send what they find."""
        snapshot = snapshot_of(samples, known)
        self._dispatcher.recorder.add(snapshot)  # first: the history of an alert has the alert's own sample
        raised: CallbackError | None = None
        alerts = self._alert_manager.process(snapshot)
        began = time.perf_counter()
        for alert in alerts:
            alert = _with_interval(alert, snapshot)
            try:
                recorder = self._dispatcher.recorder
                told = with_diagnosis(alert, recorder.history(), earlier=recorder.alerts, **self._context)
                self._dispatcher.send(told)
            except CallbackError as error:
                raised = raised or error
        self._seconds_on_alerts += time.perf_counter() - began
        if raised is not None:
            raise raised

    def alert_once(self, title: str, text: str, step: int, level: Level = "WARN") -> None:
        """Once for each title: what the capture is certain of. It begins an episode, as what a rule finds does."""
        found = Alert(title, f"Step {step}: {text}", step, level)
        if self._dispatcher.is_new(title, found.text) and (alert := self._alert_manager.open(found)) is not None:
            self._dispatcher.send(alert)

    def pop_seconds_on_alerts(self) -> float:
        """What diagnosing and sending alerts has taken since this was last asked."""
        seconds, self._seconds_on_alerts = self._seconds_on_alerts, 0.0
        return seconds

    def diagnose(self) -> list[Diagnosis]:
        """Probable causes of what has been told, most probable first; none of a training that nothing was told of."""
        recorder = self._dispatcher.recorder
        history, titles = recorder.history(), {alert.title for alert in recorder.alerts if alert.level != "INFO"}
        found = [] if history is None or not titles else diagnose(history, **self._context)
        return [diagnosis for diagnosis in found if any(map(diagnosis.explains, titles))]

    @property
    def _context(self) -> dict[str, Any]:
        notes = self._dispatcher.recorder.notes
        return {"modules": self._modules, "notes": notes, "num_ranks": world_size()}


def _with_interval(alert: Alert, snapshot: Snapshot) -> Alert:
    """The alert, which says how far back its cause may lie where the steps before its sample were not measured."""
    every_S = snapshot.metrics.get(keys.SAMPLE_EVERY, ())
    every = {int(step): int(every) for step, every in zip(snapshot.steps, every_S, strict=False)}.get(alert.step, 1)
    if every <= 1 or (isinstance(alert, Finding) and alert.found_in > alert.step):
        return alert
    interval = f"What happened between steps {alert.step - every} and {alert.step} was not measured."
    if isinstance(alert, Finding):
        return alert.adding(interval)
    return replace(alert, text=f"{alert.text}\n{interval}")
