"""The panels of the W&B report and the workspace, defined by metrics and patterns that fit any model's names.

W&B has no histogram panel, so the panels show scalars; the histograms are on the run's own page.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from .._measure.columns import FloatArray
from .._page.history import RunHistory, natural_order
from .._page.page import Words
from .._page.payload import own_role
from ..snapshot import keys

MAX_NAMES: Final = 5  # lines of a panel, and so names of its legend
# Sections of a report or workspace about runs that are not on this machine.
OF_EVERY_RUN: Final = ("loss", "norm", "lines", "ratio", "nonfinite")


@dataclass(frozen=True)
class LinePanel:
    """A line plot over `gradwatch/step`, or over another axis."""

    title: str
    metrics: tuple[str, ...] = ()  # the keys to draw
    pattern: str | None = None  # or a regular expression for the keys, with one line per key
    log_y: bool = False
    range_y: tuple[float | None, float | None] = (None, None)  # None: W&B chooses
    x: str = keys.STEP

    def build(self, reports: Any, *, width: int = 12) -> Any:
        """Build the panel as an object of wandb-workspaces; `width` is in 24ths of a report's page."""
        return reports.LinePlot(
            title=self.title,
            x=self.x,
            y=list(self.metrics),
            metric_regex=self.pattern,
            log_y=self.log_y,
            range_y=self.range_y,
            title_x="step" if self.x == keys.STEP else "W&B step",
            smoothing_type="none",  # the default would draw a smoothed line
            # Buckets keep their extremes; W&B's sampling would lose spikes.
            point_visualization_method="bucketing-gorilla",
            max_runs_to_show=10,
            layout=reports.Layout(w=width, h=8),
        )

    def of(self, history: RunHistory) -> "LinePanel | None":
        """The panel with the keys of a run that have data: of more than five, those that changed most; None if none."""
        found = [key for key in self.metrics if _has_data(history.values.get(key))]
        if self.pattern is None:
            return replace(self, metrics=tuple(found)) if found else None
        found = [key for key, values in history.values.items() if re.search(self.pattern, key) and _has_data(values)]
        if not found:
            return None
        chosen = sorted(found, key=lambda key: -_change(history.values[key]))[:MAX_NAMES]
        left_out = f": the {MAX_NAMES} of {len(found)} that changed most" if len(found) > MAX_NAMES else ""
        return replace(
            self, title=self.title + left_out, metrics=tuple(sorted(chosen, key=natural_order)), pattern=None
        )


def _has_data(values: FloatArray | None) -> bool:
    """Whether a series has a value other than 0."""
    return values is not None and bool(np.nan_to_num(values, posinf=1.0).any())


def _change(values: FloatArray) -> float:
    """By how much a series changes: the ratio of its largest value to its median; infinite values are above all."""
    known = np.abs(values[~np.isnan(values)])
    middle = float(np.median(known))
    return float(known.max()) / middle if middle > 0 else math.inf


def sections_of(history: RunHistory | None) -> dict[str, tuple[LinePanel, ...]]:
    """The sections for which a run has data; of an unknown run those that every run has."""
    if history is None:
        return {key: SECTIONS[key] for key in OF_EVERY_RUN}
    own = tuple(sorted((key for key in history.own if own_role(key) == "loss"), key=natural_order)[:MAX_NAMES])
    known = [value for key in own for value in history.own[key].values[np.isfinite(history.own[key].values)].tolist()]
    log_y = bool(known) and 0 < 100 * min(known) < max(known)
    losses = (
        [LinePanel("Your loss", own, log_y=log_y, x=WANDB_STEP)]
        if own
        else [LinePanel("Loss", (keys.LOSS,)).of(history)]
    )
    panels_of = {key: [panel.of(history) for panel in panels] for key, panels in SECTIONS.items()} | {"loss": losses}
    drawn = {key: tuple(panel for panel in panels if panel is not None) for key, panels in panels_of.items()}
    return {key: panels for key, panels in drawn.items() if panels}


def _forecast(what: str, *, without: str | None = None) -> tuple[str, ...]:
    return tuple(keys.forecast_key(name, what) for name in keys.FORMATS if name != without)


def _every(title: str, family: str, metric: str = "", **options: Any) -> LinePanel:
    """A panel with one line per layer, or per module, head or group that has the metric."""
    return LinePanel(title, pattern=f"^{family}/.+" + (f"/{metric}$" if metric else ""), **options)


WANDB_STEP: Final = "Step"  # of every row, in wandb-workspaces' words
# A key with "loss" in it that the user logs, or ours if there is none; not the keys of layers and modules whose names
# contain it.
A_LOSS: Final = "^([^/]+/)?[^/]*([Ll]oss|LOSS)[^/]*$|^([Ll]oss|LOSS)[^/]*/[^/]+$"
_INTERVAL: Final = tuple(f"{keys.NOISE_SCALE}/total/{keys.NOISE_SCALE}{end}" for end in ("", "_low", "_high"))
SECTIONS: Final[Mapping[str, tuple[LinePanel, ...]]] = {  # by the key of their words
    "loss": (
        # The user's own rows seldom have a step of ours.
        LinePanel("Every loss of the run", pattern=A_LOSS, x=WANDB_STEP),
    ),
    "norm": (
        LinePanel("Norm before clipping, and received", (keys.GRAD_NORM, keys.GRAD_NORM_CLIPPED), log_y=True),
        LinePanel("Largest norm of each window", (keys.GRAD_NORM_MAX,), log_y=True),
        LinePanel("Clip ratio", (keys.CLIP_RATIO,), range_y=(0.0, 1.0)),
    ),
    "lines": (
        _every("Gradient norm of every layer", keys.LAYER_GRAD_NORM, log_y=True),
        _every("Largest norm of each window, every layer", keys.LAYER_GRAD_NORM_MAX, log_y=True),
    ),
    "ratio": (
        _every("Gradient / parameter norm (healthy: 1e-6 to 1)", keys.LAYER_GRAD_PARAM_RATIO, log_y=True),
        LinePanel("Parameter norm, whole model", (keys.PARAM_NORM,), log_y=True),
        _every("Parameter norm of every layer", keys.LAYER_PARAM_NORM, log_y=True),
    ),
    "dead": (
        LinePanel("Dead elements, whole model", (keys.DEAD_RATIO,), range_y=(0.0, None)),
        _every("Dead elements of every layer", keys.LAYER_DEAD_RATIO, range_y=(0.0, 1.0)),
    ),
    "nonfinite": (
        LinePanel("NaN and Inf elements, whole model", (keys.NUM_NAN, keys.NUM_INF)),
        _every("NaN and Inf elements of every layer", keys.LAYER_NUM_NONFINITE),
    ),
    "scale": (
        LinePanel("Loss scale", (keys.LOSS_SCALE,), log_y=True),
        LinePanel(
            "Steps not applied in each window: skipped by the loss scaler, withheld by the guard",
            (keys.NUM_SKIPPED_STEPS, keys.NUM_GUARDED_STEPS),
        ),
    ),
    "quantiles": (
        LinePanel(
            "Size of the elements: 1st percentile, median, 99th percentile, largest",
            (*keys.GRAD_ABS_QUANTILES, keys.GRAD_ABS_MAX),
            log_y=True,
        ),
    ),
    "precision": (
        LinePanel("Share below full precision", _forecast("underflow_ratio"), range_y=(0.0, None)),
        LinePanel("Share that would become 0", _forecast("flush_ratio"), range_y=(0.0, None)),
        # bfloat16 overflows where float32 does: its line would compress the others.
        LinePanel("Octaves up to overflow", _forecast("headroom", without="bf16")),
    ),
    "activation": (
        _every("Spread of every module's output", keys.ACTIVATION, "std", log_y=True),
        _every("Dead outputs", keys.ACTIVATION, "dead_ratio", range_y=(0.0, 1.0)),
        _every("NaN and Inf outputs", keys.ACTIVATION, "num_nonfinite"),
    ),
    "attention": (
        _every("Entropy of every head, of the possible", keys.ATTENTION, "entropy_ratio", range_y=(0, 1)),
        _every("Largest element of queries and keys", keys.ATTENTION, "(query|key)_abs_max", log_y=True),
        _every("Largest logit (limit: 100)", keys.ATTENTION, keys.LOGIT_MAX, log_y=True),
    ),
    "router": (
        _every("Fullest expert (1 is the ideal)", keys.ROUTER, "load_max_ratio", log_y=True),
        _every("Experts without a token", keys.ROUTER, keys.DEAD_EXPERTS),
        _every("Entropy, of the possible", keys.ROUTER, "entropy_ratio", range_y=(0, 1)),
    ),
    "update": (_every("Update / parameter norm (usual: 1e-3)", keys.UPDATE, "ratio", log_y=True),),
    "optimizer_state": (
        _every("Stale second moment (alarming: 2.3)", keys.OPTIMIZER_STATE, keys.STALE),
        _every("Update in units of the learning rate", keys.OPTIMIZER_STATE, "update_rms"),
        _every("Share that has a direction", keys.OPTIMIZER_STATE, "coherence"),
    ),
    "noise_scale": (
        _every("Noise scale", keys.NOISE_SCALE, "noise_scale", log_y=True),
        LinePanel("Of all groups together, with its 95 % interval", _INTERVAL, log_y=True),
        _every("Cosine between parts of a batch", keys.NOISE_SCALE, "cosine"),
    ),
    "parameter": (
        _every("Largest singular value", keys.PARAMETER, "largest_singular_value", log_y=True),
        _every("Stable rank", keys.PARAMETER, "stable_rank", log_y=True),
    ),
    "ranks": (
        _every("Seconds of each rank's own work", keys.RANKS, keys.SECONDS, log_y=True),
        _every("Norm of each rank's own gradient", keys.RANKS, "local_norm", log_y=True),
        _every("Loss of each rank", keys.RANKS, "loss"),
        _every("Ranks whose parameters differ", keys.RANKS, keys.APART),
    ),
    "spread": (LinePanel("Mean and deviation", (keys.GRAD_MEAN, keys.GRAD_STD)),),
    "overhead": (LinePanel("Share of the training time", (keys.OVERHEAD_RATIO,)),),
}


def markdown_words(words: Words) -> str:
    """Format the texts `healthy` and `otherwise` as markdown."""
    return f"**Healthy.** {words.healthy}\n\n**Otherwise.** {words.otherwise}"


def no_project(entity: str, project: str) -> ValueError:
    """Return the error for a project that does not exist or cannot be accessed."""
    return ValueError(
        f"there is no project {entity}/{project}, or you have no access to it; a run that logs to it creates it"
    )


def require_workspaces() -> tuple[Any, Any]:
    """Import wandb-workspaces and return its modules (reports, workspaces)."""
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ImportError(
            "W&B reports and workspaces need wandb-workspaces: pip install 'wandb-gradwatch[report]'"
        ) from error
    return reports, workspaces


@contextmanager
def speaking_to_wandb() -> Iterator[Any]:
    """Yield W&B's API, and convert its exceptions that have no public class to a RuntimeError with their text."""
    import wandb

    try:
        yield wandb.Api()  # without a login this raises wandb's own error
    except (wandb.Error, ValueError, ImportError):
        raise
    except Exception as error:
        raise RuntimeError(f"W&B did not answer as expected: {str(error).strip()}") from error
