"""A summary of a history for a terminal or a notebook: the worst layers, the total norm and the incidents."""

import html
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np

from ._analysis.formatting import number, visible_text
from ._boundary import Boundary, entry_point
from ._judgement.verdict import Verdict, verdict_of
from .snapshot import Snapshot
from .snapshot._arrays import last_present

logger: Final = logging.getLogger("wandb_gradwatch")

# S samples, P watched parameters

_MAX_LAYERS: Final = 8
TRACE_WIDTH: Final = 24
_MAX_NAME: Final = 28
_MAX_INCIDENTS: Final = 5
_BLOCKS: Final = "▁▂▃▄▅▆▇█"  # the levels of a sparkline
_MIN_OCTAVES: Final = 3.0  # the smallest range of a sparkline, so that noise does not look like a trend
_NO_TEXT: Final = "Gradients: the summary could not be made"
_NOTHING: Final = verdict_of((), num_steps=0, num_measured=0)
_HEADINGS: Final = ("parameter", "norm", "peak (step)", "grad/param", "dead", "NaN+Inf", "norm over time")


@dataclass(frozen=True)
class LayerSummary:
    """Statistics of one layer, or of all layers together, over the samples of a history. Missing values are NaN."""

    name: str  # as in the snapshot
    norm: float  # of the newest sample that has the layer; missing if an element of it is not finite
    peak: float  # the largest norm, divided by the layer's median norm
    peak_step: int | None  # the step of the largest norm; None if there is no norm
    grad_param_ratio: float  # gradient norm / parameter norm, newest
    dead_ratio: float  # share of dead elements, newest
    num_nonfinite: int  # number of NaN and Inf elements in all samples
    # Norms over the samples, at most TRACE_WIDTH: neighbours are pooled to their maximum. Inf where one was not finite.
    trace: tuple[float, ...]


def _failed(error: Exception) -> None:
    logger.error("wandb_gradwatch: a summary could not be made; training goes on.", exc_info=error)


@dataclass(frozen=True)
class Summary:
    """The result of `Watcher.summary()`: print it, or let a notebook show it."""

    steps: tuple[int, int] | None  # the first and the last step of the history; None without samples
    num_samples: int  # number of samples in the history
    num_names: int  # number of parameters
    total: LayerSummary | None  # all watched parameters as one layer; None without samples
    worst: tuple[LayerSummary, ...]  # the layers with the most conspicuous gradients, worst first
    verdict: Verdict  # what all measured steps so far say of the run, with all incidents, oldest first
    overhead_ratio: float  # the monitor's share of the time; NaN if unknown
    num_guarded: int = 0  # number of steps in the history that the guard did not apply

    _boundary: ClassVar[Boundary] = Boundary(_failed)

    @property
    def num_more(self) -> int:
        """The number of layers that are not in `worst`."""
        return self.num_names - len(self.worst)

    @classmethod
    def empty(cls) -> "Summary":
        """Return the summary of no samples."""
        return summarise(None)

    @entry_point(lambda: _NO_TEXT)
    def __str__(self) -> str:
        """Return the text, with a question mark for each character that standard output cannot encode."""
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        return self.text().encode(encoding, "replace").decode(encoding)

    @entry_point(lambda: _NO_TEXT)
    def text(self) -> str:
        """Return the summary as lines of text."""
        facts = [(label, visible_text(words, keep="")) for label, words in self._facts()]
        width = max(len(label) for label, _ in facts)
        lines = [self._title(), *(f"  {label.ljust(width)}  {words}" for label, words in facts)]
        if self.worst:
            rows = [_HEADINGS, *([visible_text(cell, keep="") for cell in _cells(layer)] for layer in self.worst)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines += ["", *("  " + _aligned(row, widths) for row in rows)]
            lines += [f"  and {self.num_more} more"] * bool(self.num_more)
        return "\n".join(lines)

    @entry_point(lambda: _NO_TEXT)
    def _repr_html_(self) -> str:
        def row(cells: Sequence[str], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(visible_text(cell))}</{tag}>' for cell in cells)}</tr>"

        facts = "<br>".join(f"{label}: {html.escape(visible_text(words))}" for label, words in self._facts())
        rows = [row(_HEADINGS, "th"), *(row(_cells(layer), "td") for layer in self.worst)] if self.worst else []
        more = f"<p>and {self.num_more} more</p>" if self.worst and self.num_more else ""
        title = f"<p><b>{html.escape(self._title())}</b><br>{facts}</p>"
        return f"{self.verdict._repr_html_()}{title}<table>{''.join(rows)}</table>{more}"

    def _title(self) -> str:
        if self.steps is None:
            return "Gradients: no sample has arrived yet"
        measured = f"{self.num_samples} of {self.steps[1] - self.steps[0] + 1} measured"
        layers = "1 parameter" if self.num_names == 1 else f"{self.num_names} parameters"
        first, last = self.steps
        return f"Gradients of {layers}, " + (
            f"step {last}" if first == last else f"steps {first} to {last}, {measured}"
        )

    def _facts(self) -> list[tuple[str, str]]:
        facts = []
        if (total := self.total) is not None:
            peak = f", peak {number(total.peak)}x the median at step {total.peak_step}"
            peak = "" if math.isnan(total.peak) else peak
            bad = f", {total.num_nonfinite} NaN or Inf elements" if total.num_nonfinite else ""
            facts.append(("total norm", f"{_number(total.norm)}{peak}{bad}  {sparkline(total.trace)}"))
        incidents = self.verdict.incidents
        newest = [f"{one.cause_text or one.title} (step {one.first_step})" for one in incidents[-_MAX_INCIDENTS:]]
        earlier = len(incidents) - len(newest)
        facts.append(("incidents", ", ".join(([f"{earlier} earlier"] if earlier else []) + newest) or "none"))
        if self.num_guarded:
            facts.append(("guard", f"{self.num_guarded} step{'s' if self.num_guarded > 1 else ''} not applied"))
        if not math.isnan(self.overhead_ratio):
            facts.append(("overhead", f"{100 * self.overhead_ratio:.2g} % of the time since watch()"))
        return facts


def summarise(history: Snapshot | None, *, verdict: Verdict = _NOTHING, overhead_ratio: float = math.nan) -> Summary:
    """Summarise a history: choose the worst layers and compute their statistics.

    The order: layers with NaN or Inf in a sample that AMP did not skip (the earliest sample first; within a sample, the
    layer nearest the output, where the backward starts); trainable layers without any gradient; layers whose gradient
    is dead in every element; then by the largest share of the squared total norm, times `peak`. The share keeps
    rounding noise out, such as the gradient of an attention's key bias.
    """
    if history is None or not len(history) or not history.names:
        return Summary(None, 0, 0 if history is None else len(history.names), None, (), verdict, overhead_ratio)
    layers = _layers(history)
    return Summary(
        steps=(int(history.steps[0]), int(history.steps[-1])),
        num_samples=len(history),
        num_names=len(history.names),
        total=_layers(history.total)[0],
        worst=tuple(layers[place] for place in _worst_first(history, layers)[:_MAX_LAYERS]),
        verdict=verdict,
        overhead_ratio=overhead_ratio,
        num_guarded=int(np.nan_to_num(history.num_guarded_steps)),
    )


def sparkline(trace: Sequence[float]) -> str:
    """Return norms over time as one line of text with a logarithmic scale.

    A blank is a missing norm, `0` a norm of exactly zero, `×` a norm that is not finite.

    Example: sparkline([1, 2, 4, 8]) is "▁▃▆█".
    """
    octaves = [math.log2(value) for value in trace if 0 < value < math.inf]
    low = min(octaves, default=0.0)
    span = max(max(octaves, default=0.0) - low, _MIN_OCTAVES)

    def sign(value: float) -> str:
        if math.isnan(value):
            return " "
        if math.isinf(value):
            return "×"
        return _BLOCKS[round((math.log2(value) - low) / span * (len(_BLOCKS) - 1))] if value > 0 else "0"

    return "".join(map(sign, trace))


def _layers(history: Snapshot) -> list[LayerSummary]:
    bad_SP = history.num_nonfinite > 0
    norm_SP = np.where(bad_SP, np.nan, history.grad_norm)  # the norm of the finite elements is not the layer's norm
    # Pool neighbouring samples to their maximum, so that at most TRACE_WIDTH remain; missing only if all are missing.
    starts_W = np.linspace(0, len(history), min(TRACE_WIDTH, len(history)), endpoint=False).astype(np.int64)
    trace_WP = np.fmax.reduceat(np.where(bad_SP, np.inf, norm_SP), starts_W, axis=0)
    values = (norm_SP, history.grad_param_ratio, history.dead_ratio)
    newest = zip(*(last_present(values_SP, history.present).tolist() for values_SP in values), strict=True)
    found = []
    for place, (norm, grad_param_ratio, dead_ratio) in enumerate(newest):
        norm_S = norm_SP[:, place]
        known = norm_S[~np.isnan(norm_S)]
        median = float(np.median(known)) if known.size else math.nan
        peak = float(known.max() / median) if median > 0 else math.nan
        peak_step = int(history.steps[np.nanargmax(norm_S)]) if known.size else None
        num_nonfinite, trace = int(np.nansum(history.num_nonfinite[:, place])), tuple(trace_WP[:, place].tolist())
        name = history.names[place]
        found.append(LayerSummary(name, norm, peak, peak_step, grad_param_ratio, dead_ratio, num_nonfinite, trace))
    return found


def _worst_first(history: Snapshot, layers: Sequence[LayerSummary]) -> list[int]:
    """Return the positions of the layers, worst first."""
    bad_SP = (history.num_nonfinite > 0) & ~history.skipped[:, None]
    silent_P = ~history.present.any(axis=0) & history.trainable
    with np.errstate(invalid="ignore", divide="ignore"):
        share_P = np.nan_to_num(np.fmax.reduce((history.grad_norm / history.total_grad_norm[:, None]) ** 2, axis=0))
    peak_P = [layer.peak if layer.peak > 0 else 1.0 for layer in layers]
    dead_P = np.array([layer.dead_ratio == 1 for layer in layers])
    first_bad_P = np.where(bad_SP.any(axis=0), bad_SP.argmax(axis=0), len(history))
    depth_P = np.where(bad_SP.any(axis=0), -np.arange(len(layers)), 0)
    # np.lexsort sorts by the last key first.
    worst_first: list[int] = np.lexsort((-share_P * peak_P, ~dead_P, ~silent_P, depth_P, first_bad_P)).tolist()
    return worst_first


def _cells(layer: LayerSummary) -> tuple[str, ...]:
    return (
        layer.name if len(layer.name) <= _MAX_NAME else "…" + layer.name[1 - _MAX_NAME :],  # the end says more
        _number(layer.norm),
        "-" if math.isnan(layer.peak) else f"{number(layer.peak)}x ({layer.peak_step})",
        _number(layer.grad_param_ratio),
        "-" if math.isnan(layer.dead_ratio) else f"{100 * layer.dead_ratio:.0f} %",
        str(layer.num_nonfinite) if layer.num_nonfinite else "-",
        sparkline(layer.trace),
    )


def _number(value: float) -> str:
    return "-" if math.isnan(value) else number(value)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Align the name and the trace left, and the numbers right."""
    first, *numbers, last = [(cell, width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in numbers), last[0]]).rstrip()
