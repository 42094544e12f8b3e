"""The saved state of a watcher: only numbers, lists and tensors, matched to parameters by name."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from .._capture.parts import CaptureParts
from .._measure.probe_values import MetricHistogram
from .._runtime.sharding import rank, world_size
from .._transfer.transfers import ArrivedSample, Sample
from .alert_manager import AlertManager
from .assembly import Number, placed
from .dispatcher import Dispatcher
from .pipeline import Pipeline

# P watched parameters, N of them known when the state was saved

_KEYS: Final = ("sampler", "alert_manager", "guard", "said", "names", "samples", "part_of", "histogram", "metrics")


def save_state(
    parts: CaptureParts, pipeline: Pipeline, alert_manager: AlertManager, dispatcher: Dispatcher
) -> dict[str, Any]:
    """The step and schedule, the state of rules, guard and metrics, and the samples of the open window."""
    return {
        "sampler": parts.schedule.state_dict(),
        "alert_manager": alert_manager.state_dict(),
        "guard": None if parts.guard is None else parts.guard.state_dict(),
        "said": dispatcher.said,
        "names": list(parts.registry.names),
        "samples": [_saved(sample) for sample in pipeline.window],
        "part_of": _own_part() if parts.shards.any else None,  # None: of no rank, but whole gradients
        "histogram": parts.window.open_histogram(),
        "metrics": parts.probes.state_dict(),
    }


def load_state(
    state: Mapping[str, Any],
    parts: CaptureParts,
    pipeline: Pipeline,
    alert_manager: AlertManager,
    dispatcher: Dispatcher,
) -> None:
    """Restore what `save_state()` returned. Removed parameters are left out; new ones are missing in the window.

    Raises:
        ValueError: `state` is not such a state; nothing is changed.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"load_state_dict() needs what a watcher's state_dict() returned, but got {state!r:.100}")
    if missing := [key for key in _KEYS if key not in state]:
        raise ValueError(
            f"load_state_dict() needs what a watcher's state_dict() returned, but {missing[0]!r} is not among the "
            f"keys {list(state)[:5]}; pass that part of the checkpoint"
        )
    parts.schedule.load_state_dict(state["sampler"])
    alert_manager.load_state_dict(state["alert_manager"])
    dispatcher.do_not_repeat(state["said"])
    parts.probes.load_state_dict(state["metrics"])
    slot_of_name, num_names = parts.registry.slot_of_name, len(parts.registry.names)
    place = {old: slot_of_name[name] for old, name in enumerate(state["names"]) if name in slot_of_name}
    if parts.guard is not None and state["guard"] is not None:
        parts.guard.load_state_dict(state["guard"], place)
    pipeline.waiting.begin()
    is_own = state["part_of"] == (_own_part() if parts.shards.any or state["part_of"] else None)
    if not is_own and state["samples"]:
        dispatcher.notice(
            "other part",
            "load_state_dict() has left out the measured steps of the window that was open when the state was saved, "
            "because they are of another rank's part of the gradients. Save and load a state on every rank.",
        )
    pipeline.window = [_loaded(saved, place, num_names) for saved in state["samples"] if is_own]
    counts = state["histogram"]["counts"] if is_own else None
    histogram = None if counts is None else torch.from_numpy(_placed(counts.numpy(), place, num_names, 0))
    parts.window.restore_histogram(histogram, state["histogram"]["steps"])


def _own_part() -> list[int]:
    """Identifies the part of the gradients that this rank has: its number, and the number of ranks."""
    return [rank(), world_size()]


def _saved(sample: ArrivedSample) -> dict[str, Any]:
    return {
        "step": sample.sample.step,
        "rows": torch.from_numpy(sample.rows.copy()),
        "loss_scale": sample.loss_scale,
        "skipped": sample.skipped,
        "metrics": dict(sample.metrics),
        "histograms": {key: torch.from_numpy(h.packed()) for key, h in sample.histograms.items()},
    }


def _loaded(saved: Mapping[str, Any], place: Mapping[int, int], num_names: int) -> ArrivedSample:
    skipped = bool(saved["skipped"])
    return ArrivedSample(
        Sample(int(saved["step"]), skipped, ()),
        _placed(saved["rows"].numpy(), place, num_names, np.nan),
        float(saved["loss_scale"]),
        skipped,
        dict(saved["metrics"]),
        {key: MetricHistogram.of(packed.numpy()) for key, packed in saved["histograms"].items()},
    )


def _placed(saved: NDArray[Number], place: Mapping[int, int], num_names: int, missing: float) -> NDArray[Number]:
    """Move saved rows [at most N, any] to the current slots: [P, any]."""
    known = [old for old in place if old < len(saved)]  # the array lacks names that appeared after it was measured
    return placed(saved[known], [place[old] for old in known], num_names, fill=missing)
