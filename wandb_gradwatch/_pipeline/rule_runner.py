"""Run the rules on samples that have arrived, and send their alerts with a diagnosis."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .._boundary import CallbackError
from .._diagnosis import with_diagnosis
from .._judgement.incident import Incident
from .._judgement.verdict import Verdict, verdict_of
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
        count_steps: returns the number of measured steps and of all steps since watch(), for the verdict.
    """

    def __init__(
        self,
        alert_manager: AlertManager,
        dispatcher: Dispatcher,
        *,
        modules: Mapping[str, str],
        count_steps: Callable[[], tuple[int, int]],
    ) -> None:
        self._alert_manager = alert_manager
        self._dispatcher = dispatcher
        self._modules = modules
        self._count_steps = count_steps
        self._num_over = 0  # incidents that had ended when the sinks last received the verdict
        self._num_windows = 0  # since the newest alert, while an incident lasts

    @property
    def verdict(self) -> Verdict:
        """What the samples so far say of the run."""
        num_measured, num_steps = self._count_steps()
        return verdict_of(self._alert_manager.incidents, num_steps=num_steps, num_measured=num_measured)

    def tell_verdict(self) -> None:
        """Send the verdict to the sinks."""
        self._num_over = self._count_over()
        self._dispatcher.tell(self.verdict)

    def window_ends(self) -> None:
        """Send the verdict to the sinks if an incident lasts, because its last step is now a later one.

        Not after every window, because it may cost as much as a row: after the 1st, 2nd, 4th, 8th and so on.
        """
        if self._count_over() < len(self._alert_manager.incidents):
            self._num_windows += 1
            if self._num_windows.bit_count() == 1:
                self.tell_verdict()

    def _count_over(self) -> int:
        return sum(incident.is_over for incident in self._alert_manager.incidents)

    def check(self, snapshot: Snapshot) -> None:
        """Run the rules on at least one sample, and send the alerts."""
        self._dispatcher.recorder.add(snapshot)  # first, because the history of an alert must contain its own sample
        alerts = self._alert_manager.process(snapshot)
        began = time.perf_counter()
        if self._count_over() > self._num_over:
            self.tell_verdict()
        if not alerts:
            return
        self._num_windows = 0
        raised: CallbackError | None = None
        for alert in alerts:
            alert = _with_interval(alert, snapshot)
            try:
                recorder = self._dispatcher.recorder
                # The diagnosis compares updates, and advises on them.
                is_inferred = bool(snapshot.inferred[snapshot.steps == alert.step].any())
                history = None if is_inferred else recorder.history()
                told = with_diagnosis(alert, history, earlier=recorder.alerts, **self._context)
                self.send(told)
            except CallbackError as error:
                raised = raised or error
        self._dispatcher.news.seconds_on_alerts += time.perf_counter() - began
        if raised is not None:
            raise raised

    def alert_once(self, title: str, text: str, step: int, level: Level = "WARN") -> None:
        """Send an alert of the capture itself, once for each title. It begins an episode, like a rule's finding."""
        found = Alert(title, f"Step {step}: {text}", step, level)
        if self._dispatcher.is_new(title, found.text) and (alert := self._alert_manager.open(found)) is not None:
            self.send(alert)

    def send(self, alert: Alert) -> None:
        """Send an alert with its incident, and the verdict that includes it."""
        fact = alert.text.partition("\n")[0]
        at = alert.step
        incident = Incident(kind_of(alert.title), alert.title, alert.level, at, at, at, fact)
        self._alert_manager.add(incident)
        self._dispatcher.send(replace(alert, incident=incident), self.verdict)

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
