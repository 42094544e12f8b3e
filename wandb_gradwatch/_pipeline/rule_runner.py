"""Judge samples that have arrived, and send what is to be told."""

import time
from collections.abc import Callable

from .._boundary import CallbackError
from .._judgement.verdict import Verdict, verdict_of
from .._runtime.notices import Notice
from ..rules import Alert
from ..snapshot import Snapshot
from .alert_manager import AlertManager
from .dispatcher import Dispatcher


class RuleRunner:
    """Passes every sample to the judgement and the rules once, in order.

    Args:
        alert_manager: finds incidents, and says which of them are to be told.
        dispatcher: sends alerts; its recorder keeps the samples.
        count_steps: returns the number of measured steps and of all steps since watch(), for the verdict.
    """

    def __init__(
        self, alert_manager: AlertManager, dispatcher: Dispatcher, *, count_steps: Callable[[], tuple[int, int]]
    ) -> None:
        self._alert_manager = alert_manager
        self._dispatcher = dispatcher
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
        """Judge at least one sample, and send the alerts."""
        self._dispatcher.recorder.add(snapshot)  # first: its file must contain the sample of an alert
        self._alert_manager.notes = self._dispatcher.recorder.notes
        alerts = self._alert_manager.process(snapshot)
        began = time.perf_counter()
        if self._count_over() > self._num_over:
            self.tell_verdict()
        if not alerts:
            return
        self._num_windows = 0
        raised: CallbackError | None = None
        for alert in alerts:
            try:
                self.send(alert)
            except CallbackError as error:
                raised = raised or error
        self._dispatcher.news.seconds_on_alerts += time.perf_counter() - began
        if raised is not None:
            raise raised

    def alert_once(self, notice: Notice) -> None:
        """Take a finding of the capture itself; send its alert if its incident is not told yet."""
        if notice.step is None:
            return
        self._dispatcher.count(notice.kind, f"step {notice.step}: {notice.text}")
        alert = self._alert_manager.report(
            notice.kind, notice.text, notice.step, notice.level, notice.cause, notice.rival
        )
        if alert is not None:
            self.send(alert)

    def send(self, alert: Alert) -> None:
        """Send an alert, and the verdict that includes its incident."""
        self._dispatcher.send(alert, self.verdict)
