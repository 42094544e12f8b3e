"""What a resumed training goes on with: numbers, lists and tensors only, matched by the parameters' names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .._capture.parts import CaptureParts
from .alert_manager import AlertManager
from .dispatcher import Dispatcher
from .pipeline import Pipeline
from .saved_samples import NameMatch, load_histogram, load_samples, save_samples

_KEYS: Final = ("sampler", "alert_manager", "guard", "said", "names", "samples", "histogram", "metrics")


class SavedState:
    """A watcher's parts as a state, and back.

    Args:
        parts: of the capture.
        pipeline: has the window that is not flushed.
        alert_manager: has the rules' memory.
        dispatcher: knows what was said.
    """

    def __init__(
        self, parts: CaptureParts, pipeline: Pipeline, alert_manager: AlertManager, dispatcher: Dispatcher
    ) -> None:
        self._parts, self._pipeline = parts, pipeline
        self._alert_manager, self._dispatcher = alert_manager, dispatcher

    def save(self) -> dict[str, Any]:
        """The step, what was learnt about the loop, the memory of rules, guard and metrics, and the window."""
        guard = self._parts.guard
        return {
            "sampler": self._parts.schedule.state_dict(),
            "alert_manager": self._alert_manager.state_dict(),
            "guard": None if guard is None else guard.state_dict(),
            "said": self._dispatcher.said,
            "names": list(self._parts.registry.names),
            "samples": save_samples(self._pipeline.window),
            "histogram": self._parts.window.open_histogram(),
            "metrics": self._parts.probes.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from `save()`.

        Raises:
            ValueError: it is something else; nothing is changed.
        """
        if missing := [key for key in _KEYS if key not in state]:
            raise ValueError(
                f"load_state_dict() needs what a watcher's state_dict() returned, but {missing[0]!r} is not among the "
                f"keys {list(state)[:5]}; pass that part of the checkpoint"
            )
        parts, registry = self._parts, self._parts.registry
        parts.schedule.load_state_dict(state["sampler"])
        self._alert_manager.load_state_dict(state["alert_manager"])
        self._dispatcher.do_not_repeat(state["said"])
        parts.probes.load_state_dict(state["metrics"])
        match = NameMatch.of(state["names"], registry.slot_of_name, len(registry.names))
        if parts.guard is not None and state["guard"] is not None:
            parts.guard.load_state_dict(state["guard"], dict(zip(match.saved, match.slots, strict=True)))
        self._pipeline.window = load_samples(state["samples"], match)
        histogram = state["histogram"]
        parts.window.restore_histogram(load_histogram(histogram["counts"], match), histogram["steps"])
