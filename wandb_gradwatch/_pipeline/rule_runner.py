"""Run the rules on samples that have arrived, and send their alerts with a diagnosis."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .._boundary import CallbackError
from .._diagnosis import Diagnosis, diagnose, with_diagnosis
from .._judgement.incident import Incident
from .._runtime.sharding import world_size
from ..rules import Alert
from ..rules._base import Finding, Level
from ..snapshot import Snapshot, keys
from .alert_manager import AlertManager, kind_of
from .dispatcher import Dispatcher


class RuleRunner:
    """Passes every sample to the rules once, in order.

    Args:
        alert_manager: runs the rules, and selects the alerts to send.
        dispatcher: sends alerts with their diagnosis; its recorder keeps the samples.
        modules: class names of the model's modules by module name, for the diagnosis.
    """

    def __init__(self, alert_manager: AlertManager, dispatcher: Dispatcher, *, modules: Mapping[str, str]) -> None:
        self._alert_manager = alert_manager
        self._dispatcher = dispatcher
        self._modules = modules

    def check(self, snapshot: Snapshot) -> None:
        """Run the rules on at least one sample, and send the alerts."""
        self._dispatcher.recorder.add(snapshot)  # first, because the history of an alert must contain its own sample
        if not (alerts := self._alert_manager.process(snapshot)):
            return
        raised: CallbackError | None = None
        began = time.perf_counter()
        for alert in alerts:
            alert = _with_interval(alert, snapshot)
            try:
                recorder = self._dispatcher.recorder
                # The diagnosis compares updates, and advises on them.
                is_inferred = bool(snapshot.inferred[snapshot.steps == alert.step].any())
                history = None if is_inferred else recorder.history()
                told = with_diagnosis(alert, history, earlier=recorder.alerts, **self._context)
                self._send(told)
            except CallbackError as error:
                raised = raised or error
        self._dispatcher.news.seconds_on_alerts += time.perf_counter() - began
        if raised is not None:
            raise raised

    def alert_once(self, title: str, text: str, step: int, level: Level = "WARN") -> None:
        """Send an alert of the capture itself, once for each title. It begins an episode, like a rule's finding."""
        found = Alert(title, f"Step {step}: {text}", step, level)
        if self._dispatcher.is_new(title, found.text) and (alert := self._alert_manager.open(found)) is not None:
            self._send(alert)

    def _send(self, alert: Alert) -> None:
        fact = alert.text.partition("\n")[0]
        at = alert.step
        incident = Incident(kind_of(alert.title), alert.title, alert.level, at, at, at, fact)
        self._alert_manager.add(incident)
        self._dispatcher.send(replace(alert, incident=incident))

    def diagnose(self) -> list[Diagnosis]:
        """Return probable causes of the alerts that were sent, most probable first; empty without alerts."""
        recorder = self._dispatcher.recorder
        history, titles = recorder.history(), {alert.title for alert in recorder.alerts if alert.level != "INFO"}
        found = [] if history is None or not titles or history.inferred.any() else diagnose(history, **self._context)
        return [diagnosis for diagnosis in found if any(map(diagnosis.explains, titles))]

    @property
    def _context(self) -> dict[str, Any]:
        notes = self._dispatcher.recorder.notes
        return {"modules": self._modules, "notes": notes, "num_ranks": world_size()}


def _with_interval(alert: Alert, snapshot: Snapshot) -> Alert:
    """Add the interval that was not measured before the alert's sample, since its cause may lie there."""
    every_S = snapshot.metrics.get(keys.SAMPLE_EVERY, ())
    every = {int(step): int(every) for step, every in zip(snapshot.steps, every_S, strict=False)}.get(alert.step, 1)
    if every <= 1 or (isinstance(alert, Finding) and alert.found_in > alert.step):
        return alert
    interval = f"What happened between steps {alert.step - every} and {alert.step} was not measured."
    if isinstance(alert, Finding):
        return alert.but(more=(*alert.more, interval))
    return replace(alert, text=f"{alert.text}\n{interval}")
