"""The saved state of a watcher: only numbers, lists and tensors, matched to parameters by name."""

from collections.abc import Callable, Mapping
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
from .state_schema import checked

# P watched parameters, N of them known when the state was saved

_NEEDED: Final = "load_state_dict() needs what a watcher's state_dict() returned"
_BROKEN: Final = (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError)


def save_state(
    parts: CaptureParts, pipeline: Pipeline, alert_manager: AlertManager, dispatcher: Dispatcher
) -> dict[str, Any]:
    """The step and schedule, the state of rules, guard and metrics, and the samples of the open window."""
    return {
        "sampler": parts.schedule.state_dict(),
        "alert_manager": _with_tensors(alert_manager.state_dict()),
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
    num_names, guard, probes = len(parts.registry.names), parts.guard, parts.probes
    try:
        saved = checked(state)
        place = {
            old: slot
            for old, name in enumerate(saved["names"])
            if (slot := parts.registry.slot_of_name.get(name)) is not None
        }
        window = [_loaded(sample, place, num_names) for sample in saved["samples"]]
        counts, steps = saved["histogram"]["counts"], saved["histogram"]["steps"]
        histogram = None if counts is None else torch.from_numpy(_placed(counts.numpy(), place, num_names, 0))
    except _BROKEN as error:
        raise ValueError(f"{_NEEDED}, but {error}") from error
    # Guards and metrics check their own state while they load it: if one raises, both get their present state back.
    unchanged = None if guard is None else guard.state_dict(), probes.state_dict()
    try:
        if guard is not None and saved["guard"] is not None:
            guard.load_state_dict(saved["guard"])
        probes.load_state_dict(saved["metrics"])
    except _BROKEN as error:
        if guard is not None and unchanged[0] is not None:
            guard.load_state_dict(unchanged[0])
        probes.load_state_dict(unchanged[1])
        raise ValueError(f"{_NEEDED}, but its 'guard' or 'metrics' does not fit: {error!r:.200}") from error
    parts.schedule.load_state_dict(saved["sampler"])
    alert_manager.load_state_dict(_with_arrays(saved["alert_manager"]))
    dispatcher.do_not_repeat(saved["said"])
    pipeline.waiting.begin()
    is_own = saved["part_of"] == (_own_part() if parts.shards.any or saved["part_of"] else None)
    if not is_own and window:
        dispatcher.notice(
            "other part",
            "load_state_dict() has left out the measured steps of the window that was open when the state was saved, "
            "because they are of another rank's part of the gradients. Save and load a state on every rank.",
        )
    pipeline.window = window if is_own else []
    parts.window.restore_histogram(histogram if is_own else None, steps)


def _own_part() -> list[int]:
    """Identifies the part of the gradients that this rank has: its number, and the number of ranks."""
    return [rank(), world_size()]


def _with_tensors(state: Any) -> Any:
    """The state with a tensor in place of each array, which a checkpoint keeps without running code."""
    return _converted(state, np.ndarray, torch.from_numpy)


def _with_arrays(state: Any) -> Any:
    return _converted(state, torch.Tensor, lambda tensor: tensor.numpy())


def _converted(state: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    if isinstance(state, Mapping):
        return {key: _converted(value, kind, convert) for key, value in state.items()}
    if isinstance(state, list):
        return [_converted(value, kind, convert) for value in state]
    return convert(state) if isinstance(state, kind) else state


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
