"""What the page carries: small things as JSON, matrices as packed bytes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from .._measure.columns import FloatArray
from ..snapshot import keys
from .axes import other_axes
from .finding import without_finding
from .formatting import WORDS
from .grids import pack_grids
from .history import RecordedAlert, RecordedTable, RunHistory, natural_order
from .packing import Blob, pack_histograms
from .pooling import pool, pool_extremes, pool_steps, pool_width
from .safe_text import visible
from .verdict import fold, judge, severity

MAX_POINTS: Final = 4_000  # of one line
MAX_HISTOGRAM_BYTES: Final = 4_000_000
MAX_TABLE_ROWS: Final = 20_000
MAX_OWN_KEYS: Final = 300
MAX_OWN_POINTS: Final = 1_000_000  # of all keys together


def build_payload(history: RunHistory) -> tuple[dict[str, Any], Blob]:
    """Everything the page needs, as (JSON-able content, bytes)."""
    blob = Blob()
    points = pool_width(len(history.steps), MAX_POINTS)
    content = {
        "run": describe_run(history),
        "notes": list(history.notes),
        "words": {key: asdict(words) for key, words in WORDS.items()},
        "verdict": asdict(judge(history)),
        "alerts": [_alert(group) for group in fold(history.alerts)],
        "steps": pool_steps(history.steps, points)[1].tolist(),
        "pooledPoints": points,
        "axes": other_axes(history),
        "globals": {
            key: _jsonable(pool(history.values[key][:, None], points, key)[:, 0])
            for key in _model_keys(history)
            if not np.isnan(history.values[key]).all()
        },
        "totals": sorted(key.removeprefix(keys.TOTAL) for key in history.values if key.startswith(keys.TOTAL)),
        "inModelOrder": history.in_model_order,
        "grids": pack_grids(history, blob),
        "histograms": pack_histograms(history.histograms, history.names, MAX_HISTOGRAM_BYTES, blob),
        "own": _own(history, blob),
        "flightRecorder": None if history.flight_recorder is None else _table(history.flight_recorder),
    }
    visible_content: dict[str, Any] = visible(content)
    return visible_content, blob


def _model_keys(history: RunHistory) -> list[str]:
    """The keys of the whole model's numbers that the run has, the norms of its single models or optimizers included."""
    totals = (key for key in history.values if key.startswith((keys.TOTAL, keys.TOTAL_MAX)))
    return [key for key in (*keys.MODEL_KEYS, keys.CHANGED_RATIO, keys.SAMPLE_EVERY, *totals) if key in history.values]


def _alert(group: Sequence[RecordedAlert]) -> dict[str, Any]:
    """Alerts of one title: the first of the most severe in full, and when each was told."""
    shown = min(group, key=severity)
    times = [{"step": alert.step, "level": alert.level} for alert in group]
    text, finding = without_finding(shown.text)
    told = {"title": shown.title, "text": text, "level": shown.level, "step": shown.step, "times": times}
    return told | {"finding": finding}


def describe_run(history: RunHistory) -> dict[str, Any]:
    """What the head of the page says about the run."""
    return {
        "id": history.run_id,
        "name": history.name or history.run_id,
        "project": history.project,
        "startedAt": history.started_at,
        "finished": history.finished,
        "exitCode": history.exit_code,
        "file": history.path.name,
        "numRows": history.num_rows,
        "newestAt": float(history.times[-1]) if len(history.times) and math.isfinite(history.times[-1]) else None,
        "numFlushes": len(history.steps),
    }


def _own(history: RunHistory, blob: Blob) -> dict[str, Any]:
    """The user's scalars, those first that tell how the training goes; keys of the same rows share their steps."""
    found = sorted(history.own, key=lambda key: (_role_order(history, key), natural_order(key)))
    chosen = found[:MAX_OWN_KEYS]
    axes: dict[bytes, list[float]] = {}
    items = []
    for key in chosen:
        series = history.own[key]
        steps, values = pool_extremes(series.steps, series.values, max(MAX_POINTS, MAX_OWN_POINTS // len(chosen)))
        axes.setdefault(steps.tobytes(), steps.tolist())
        place = list(axes).index(steps.tobytes())
        items.append({"key": key, "role": own_role(key), "axis": place, "offset": blob.add_floats(values)})
    return {"axes": list(axes.values()), "items": items, "left": len(found) - len(chosen)}


def _role_order(history: RunHistory, key: str) -> int:
    role = own_role(key)
    changes = len(np.unique(history.own[key].values)) > 1
    return {"loss": 0, "rate": 1}.get(role, 2) if changes else 3


def own_role(key: str) -> str:
    """What a scalar of the user probably is, by its name: "loss", "rate" for a learning rate, or "".

    Example:
        >>> own_role("train/loss"), own_role("lr-AdamW"), own_role("accuracy")
        ('loss', 'rate', '')
    """
    words = re.split(r"[^a-z]+", key.lower())
    if "loss" in words or words[-1] in ("nll", "perplexity"):
        return "loss"
    return "rate" if "lr" in words or ("learning" in words and "rate" in words) else ""


def _table(table: RecordedTable) -> dict[str, Any]:
    rows = [[_cell(value) for value in row] for row in table.rows[:MAX_TABLE_ROWS]]  # the newest stand first
    return {"columns": list(table.columns), "rows": rows, "total": len(table.rows)}


def _cell(value: Any) -> Any:
    """A table's cell as a number, a text or None."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _jsonable(values: FloatArray) -> list[float | None]:
    """Numbers with the digits that a picture can show; None where there is none to draw."""
    return [float(f"{value:.7g}") if math.isfinite(value) else None for value in values.tolist()]
