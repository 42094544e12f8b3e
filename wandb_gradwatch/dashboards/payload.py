"""What the page carries: small things as JSON, matrices as packed and compressed bytes.

Matrices of positive numbers are stored as 16-bit steps of their logarithm, each with its own range; half a step is
at most 0.05 % of the value for up to 26 decades. Missing, zero and infinity have codes of their own, in an order in
which the largest code is also what must win when cells are pooled.
"""

from __future__ import annotations

import base64
import json
import math
import unicodedata
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..statistics.columns import FloatArray, IntArray
from .history import FAMILIES, GLOBAL_KEYS, NAME_METRICS, HistogramSeries, RecordedTable, RunHistory
from .words import WORDS

# R rows of the run, P names, W columns of a picture (several rows pooled where there are too many), H histograms

MAX_CELLS: Final = 1_000_000  # of one names x steps matrix
MIN_COLUMNS: Final = 50
MAX_POINTS: Final = 4_000  # of one line
MAX_HISTOGRAM_BYTES: Final = 4_000_000
MAX_FAMILY_CELLS: Final = 4_000_000  # of all names x steps matrices of watch(metrics=...) together
MAX_TABLE_ROWS: Final = 20_000
MAX_OTHER_KEYS: Final = 300

CODE_MISSING: Final = 0
CODE_ZERO: Final = 1
CODE_FIRST: Final = 2
CODE_LAST: Final = 65534
CODE_INFINITE: Final = 65535

_SUMMED: Final = frozenset({"num_nan", "num_inf", "num_nonfinite", "num_skipped_steps", "num_guarded_steps"})


class Blob:
    """Arrays one after the other; what goes into the JSON is where each one lies."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> int:
        """Append bytes and return their offset."""
        offset = self._size
        self._parts.append(data)
        self._size += len(data)
        return offset

    def add_uint16(self, codes: npt.NDArray[np.uint16]) -> int:
        """Append the low bytes, then the high bytes: the high ones hardly change and compress well."""
        little = codes.astype("<u2").reshape(-1)
        return self.add((little & 0xFF).astype(np.uint8).tobytes() + (little >> 8).astype(np.uint8).tobytes())

    def encoded(self) -> str:
        """Everything compressed (gzip, which browsers unpack), as base64."""
        packer = zlib.compressobj(6, zlib.DEFLATED, zlib.MAX_WBITS | 16)
        packed = b"".join([*(packer.compress(part) for part in self._parts), packer.flush()])
        return base64.b64encode(packed).decode("ascii")


def build_payload(history: RunHistory) -> tuple[dict[str, Any], Blob]:
    """Everything the page needs, as (JSON-able content, bytes)."""
    blob = Blob()
    names = history.names
    columns = pool_width(len(history.steps), max(MIN_COLUMNS, MAX_CELLS // max(len(names), 1)))
    points = pool_width(len(history.steps), MAX_POINTS)
    content = {
        "run": {
            "id": history.run_id,
            "name": history.name or history.run_id,
            "project": history.project,
            "startedAt": history.started_at,
            "finished": history.finished,
            "exitCode": history.exit_code,
            "file": history.path.name,
            "numRows": history.num_rows,
            "numFlushes": len(history.steps),
        },
        "notes": list(history.notes),
        "words": {key: asdict(words) for key, words in WORDS.items()},
        "alerts": [
            {"title": alert.title, "text": alert.text, "level": alert.level, "step": alert.step}
            for alert in history.alerts
        ],
        "steps": pool_steps(history.steps, points)[1].tolist(),
        "pooledPoints": points,
        "globals": {
            key: _jsonable(pool(history.values[key][:, None], points, key)[:, 0])
            for key in GLOBAL_KEYS
            if key in history.values and not np.isnan(history.values[key]).all()
        },
        "names": names,
        "inModelOrder": history.in_model_order,
        "columns": [steps.tolist() for steps in pool_steps(history.steps, columns)],
        "pooledColumns": columns,
        "metrics": _metrics(history, columns, blob),
        "histograms": _histograms(history.histograms, names, MAX_HISTOGRAM_BYTES, blob),
        "families": _families(history, blob),
        "other": _other(history, points, blob),
        "flightRecorder": None if history.flight_recorder is None else _table(history.flight_recorder),
    }
    visible_content: dict[str, Any] = _visible(content)
    return visible_content, blob


# ---- pooling


def pool_width(num_rows: int, max_columns: int) -> int:
    """How many neighbouring rows become one column so that there are at most `max_columns`."""
    return max(1, math.ceil(num_rows / max_columns))


def pool_steps(steps: IntArray, width: int) -> tuple[IntArray, IntArray]:
    """First and last step of every column: two [W]."""
    return steps[::width], np.append(steps[width - 1 :: width], steps[-1:] if len(steps) % width else steps[:0])


def pool(values_RP: FloatArray, width: int, key: str) -> FloatArray:
    """Pool neighbouring rows: counts are added, everything else keeps its largest value, so a spike stays seen.

    Infinity wins over every number, a number over a missing value.
    """
    if width == 1:
        return values_RP
    starts = np.arange(0, len(values_RP), width)
    if key.rpartition("/")[2] not in _SUMMED:
        return np.fmax.reduceat(values_RP, starts, axis=0)
    missing = np.logical_and.reduceat(np.isnan(values_RP), starts, axis=0)
    return np.where(missing, np.nan, np.add.reduceat(np.nan_to_num(values_RP, nan=0.0), starts, axis=0))


# ---- matrices


def quantise(values: FloatArray) -> tuple[npt.NDArray[np.uint16], float, float]:
    """Store values >= 0 as steps of their logarithm.

    Returns:
        codes of the same shape, and (start, step): a code of CODE_FIRST or more, below CODE_INFINITE, is the value
        10 ** (start + step * (code - CODE_FIRST)). NaN and negative values are CODE_MISSING.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm = np.log10(values)
    known = np.isfinite(logarithm)
    low, high = (float(logarithm[known].min()), float(logarithm[known].max())) if known.any() else (0.0, 0.0)
    # Half a step of 0.0004 decades is 0.05 %: more than the eye or a tooltip of three digits can tell.
    step = max((high - low) / (CODE_LAST - CODE_FIRST), 0.0004)
    codes = np.full(values.shape, CODE_MISSING, dtype=np.uint16)
    codes[known] = np.rint((logarithm[known] - low) / step).astype(np.uint16) + CODE_FIRST
    codes[values == 0] = CODE_ZERO
    codes[values == np.inf] = CODE_INFINITE
    return codes, low, step


def quantise_evenly(values: FloatArray) -> tuple[npt.NDArray[np.uint16], float, float]:
    """Store values of both signs in even steps: as above, but a code's value is start + step * (code - CODE_FIRST).

    Half a step is at most a hundred-thousandth of the range. Negative infinity is CODE_MISSING.
    """
    known = np.isfinite(values)
    low, high = (float(values[known].min()), float(values[known].max())) if known.any() else (0.0, 0.0)
    step = (high / 2 - low / 2) / ((CODE_LAST - CODE_FIRST) / 2) or 1.0  # halves: the difference may overflow
    codes = np.full(values.shape, CODE_MISSING, dtype=np.uint16)
    codes[known] = np.rint(values[known] / step - low / step).astype(np.uint16) + CODE_FIRST
    codes[values == np.inf] = CODE_INFINITE
    return codes, low, step


def _metrics(history: RunHistory, width: int, blob: Blob) -> list[dict[str, Any]]:
    """The names x steps matrices that hold anything, names first: [P, W]."""
    found = []
    for metric in NAME_METRICS:
        values = pool(history.of_names(metric), width, metric)
        if np.isnan(values).all():
            continue
        codes, start, step = quantise(values.T)
        found.append({"key": metric, "start": start, "step": step, "offset": blob.add_uint16(codes)})
    return found


def _families(history: RunHistory, blob: Blob) -> list[dict[str, Any]]:
    """What watch(metrics=...) measured: for each family the names and a names x steps matrix of every metric."""
    families = {family: _present(history.family(family)) for family in FAMILIES}
    num_series = sum(len(of_name) for found in families.values() for of_name in found.values())
    width = pool_width(len(history.steps), max(MIN_COLUMNS, MAX_FAMILY_CELLS // max(num_series, 1)))
    columns = [steps.tolist() for steps in pool_steps(history.steps, width)]
    return [
        {"key": family, "columns": columns, "pooled": width, **_family(history, family, found, width, blob)}
        for family, found in families.items()
        if found or family in history.family_histograms
    ]


def _family(
    history: RunHistory, family: str, found: Mapping[str, Mapping[str, FloatArray]], width: int, blob: Blob
) -> dict[str, Any]:
    metrics = sorted({metric for of_name in found.values() for metric in of_name}, key=_metric_order)
    histograms = history.family_histograms.get(family, {})
    pictured = history.in_order(histograms)
    return {
        "names": list(found),
        "metrics": [_family_metric(metric, found, width, blob) for metric in metrics],
        "histogramNames": pictured,
        "histograms": _histograms(histograms, pictured, MAX_HISTOGRAM_BYTES // 2, blob),
    }


# The metric that a family's picture shows first stands first; what is not listed follows by name.
_METRIC_ORDER: Final = (
    *("norm", "ratio", "entropy_ratio", "entropy", "relative_difference", "difference"),
    *("rms", "mean", "std", "min", "max", "abs_max", "dead_ratio", "zero_ratio", "num_nonfinite"),
)


def _metric_order(metric: str) -> tuple[int, str]:
    return (_METRIC_ORDER.index(metric) if metric in _METRIC_ORDER else len(_METRIC_ORDER)), metric


def _present(found: Mapping[str, Mapping[str, FloatArray]]) -> dict[str, dict[str, FloatArray]]:
    """Without metrics that are missing everywhere, and names that have no other."""
    kept = {
        name: {metric: values for metric, values in of_name.items() if not np.isnan(values).all()}
        for name, of_name in found.items()
    }
    return {name: of_name for name, of_name in kept.items() if of_name}


def _family_metric(
    metric: str, found: Mapping[str, Mapping[str, FloatArray]], width: int, blob: Blob
) -> dict[str, Any]:
    """One metric of all names, names first: [P, W]; by logarithms where nothing is negative, else evenly."""
    missing = np.full(len(next(iter(next(iter(found.values())).values()))), np.nan)
    values = pool(np.stack([of_name.get(metric, missing) for of_name in found.values()], axis=1), width, metric).T
    signed = bool((values < 0).any())
    codes, start, step = quantise_evenly(values) if signed else quantise(values)
    return {"key": metric, "signed": signed, "start": start, "step": step, "offset": blob.add_uint16(codes)}


def _histograms(
    histograms: Mapping[str, HistogramSeries], names: list[str], max_bytes: int, blob: Blob
) -> dict[str, Any]:
    """Each name's histograms, thinned to a common budget: limits as float32, shares as bytes of their square root."""
    series = {name: histograms[name] for name in names if name in histograms}
    if not series:
        return {"bins": 0, "items": []}
    bins = next(iter(series.values())).counts.shape[1]
    per_name = max(8, max_bytes // (bins * len(series)))
    items = []
    for index, name in enumerate(names):
        if name in series:
            items.append({"name": index, "total": len(series[name].steps), **_histogram(series[name], per_name, blob)})
    return {"bins": bins, "items": items}


def _histogram(series: HistogramSeries, most: int, blob: Blob) -> dict[str, Any]:
    stride = max(1, math.ceil(len(series.steps) / most))
    kept = np.arange(len(series.steps) - 1, -1, -stride)[::-1]  # the last one always
    counts = series.counts[kept]
    total = counts.sum(axis=1, keepdims=True)
    share = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
    limits = np.concatenate([series.low[kept], series.high[kept]]).astype("<f4")
    return {
        "steps": series.steps[kept].tolist(),
        "limits": blob.add(limits.tobytes()),
        "shares": blob.add(np.rint(255 * np.sqrt(share)).astype(np.uint8).tobytes()),
    }


def _other(history: RunHistory, width: int, blob: Blob) -> dict[str, Any]:
    """Further scalars of the same rows: float32 [K, points]."""
    keys = [key for key in history.other_keys() if not np.isnan(history.values[key]).all()]
    chosen = keys[:MAX_OTHER_KEYS]
    values = [pool(history.values[key][:, None], width, key)[:, 0] for key in chosen]
    with np.errstate(over="ignore"):
        offset = blob.add(b"".join(value.astype("<f4").tobytes() for value in values))
    return {"keys": chosen, "offset": offset, "left": len(keys) - len(chosen)}


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


# ---- text


def visible_text(text: str) -> str:
    """Make characters that steer the text's direction, or cannot be seen at all, visible: U+202E becomes ‹U+202E›."""
    return "".join(
        f"‹U+{ord(char):04X}›"
        if char not in "\n\t" and unicodedata.category(char) in ("Cf", "Cc", "Cs", "Co")
        else char
        for char in text
    )


def _visible(content: Any) -> Any:
    if isinstance(content, str):
        return content if content.isascii() and content.isprintable() else visible_text(content)
    if isinstance(content, dict):
        return {key: _visible(value) for key, value in content.items()}
    if isinstance(content, list) and any(isinstance(value, (str, list, dict)) for value in content):
        return [_visible(value) for value in content]
    return content


def script_json(content: Any) -> str:
    """JSON that can stand in a script element: no character in it can end the element or open another."""
    text = json.dumps(content, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
