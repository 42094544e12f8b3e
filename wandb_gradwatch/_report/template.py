"""Which panels the W&B report and the workspace show: metrics and patterns, so that they fit a model of any naming.

W&B draws no histogram panel, so the template stands on scalars; the histograms are on the run's own page.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from .._page.formatting import WORDS, Words
from ..snapshot import keys


@dataclass(frozen=True)
class LinePanel:
    """One line plot over `gradwatch/step`.

    Args:
        title: what it shows.
        metrics: the keys that it draws.
        pattern: or a regular expression for them, one line per name.
        log_y: a logarithmic vertical axis.
        range_y: its limits; None where W&B chooses.
    """

    title: str
    metrics: tuple[str, ...] = ()
    pattern: str | None = None
    log_y: bool = False
    range_y: tuple[float | None, float | None] = (None, None)

    def build(self, reports: Any, *, width: int = 12) -> Any:
        """The panel as an object of wandb-workspaces; `width` in 24ths of a report's page."""
        return reports.LinePlot(
            title=self.title,
            x=keys.STEP,
            y=list(self.metrics),
            metric_regex=self.pattern,
            log_y=self.log_y,
            range_y=self.range_y,
            title_x="step",
            smoothing_type="none",  # the default would draw another line than the one that was logged
            # Bins keep their extremes: W&B's sampling would lose the spike that everybody looks for.
            point_visualization_method="bucketing-gorilla",
            max_runs_to_show=10,
            layout=reports.Layout(w=width, h=8),
        )


@dataclass(frozen=True)
class TemplateSection:
    """Panels that belong together; `key` finds their words."""

    key: str
    panels: tuple[LinePanel, ...]

    @property
    def words(self) -> Words:
        return WORDS[self.key]


def _forecast(what: str, *, without: str | None = None) -> tuple[str, ...]:
    return tuple(keys.forecast_key(name, what) for name in keys.FORMATS if name != without)


def _layers(family: str) -> str:
    return f"^{family}/.+"


def _metric(family: str, metric: str) -> str:
    return f"^{family}/.+/{metric}$"


def _interval() -> tuple[str, ...]:
    return tuple(f"{keys.NOISE_SCALE}/total/{keys.NOISE_SCALE}{end}" for end in ("", "_low", "_high"))


def _section(key: str, *panels: LinePanel) -> TemplateSection:
    return TemplateSection(key, panels)


SECTIONS: Final = (
    _section(
        "loss",
        LinePanel("Loss at the samples", (keys.LOSS,)),
        LinePanel("Losses that are not finite, in each window", (keys.NUM_NONFINITE_LOSS,)),
    ),
    _section(
        "norm",
        LinePanel("Norm before clipping, and received", (keys.GRAD_NORM, keys.GRAD_NORM_CLIPPED), log_y=True),
        LinePanel("Largest norm of each window", (keys.GRAD_NORM_MAX,), log_y=True),
        LinePanel("Clip ratio", (keys.CLIP_RATIO,), range_y=(0.0, 1.0)),
    ),
    _section(
        "lines",
        LinePanel("Gradient norm of every layer", pattern=_layers(keys.LAYER_GRAD_NORM), log_y=True),
        LinePanel("Largest norm of each window, every layer", pattern=_layers(keys.LAYER_GRAD_NORM_MAX), log_y=True),
    ),
    _section(
        "ratio",
        LinePanel(
            "Gradient / parameter norm (healthy: 1e-6 to 1)",
            pattern=_layers(keys.LAYER_GRAD_PARAM_RATIO),
            log_y=True,
        ),
        LinePanel("Parameter norm, whole model", (keys.PARAM_NORM,), log_y=True),
        LinePanel("Parameter norm of every layer", pattern=_layers(keys.LAYER_PARAM_NORM), log_y=True),
    ),
    _section(
        "dead",
        LinePanel("Dead elements, whole model", (keys.DEAD_RATIO,), range_y=(0.0, None)),
        LinePanel("Dead elements of every layer", pattern=_layers(keys.LAYER_DEAD_RATIO), range_y=(0.0, 1.0)),
    ),
    _section(
        "nonfinite",
        LinePanel("NaN and Inf elements, whole model", (keys.NUM_NAN, keys.NUM_INF)),
        LinePanel("NaN and Inf elements of every layer", pattern=_layers(keys.LAYER_NUM_NONFINITE)),
    ),
    _section(
        "scale",
        LinePanel("Loss scale", (keys.LOSS_SCALE,), log_y=True),
        LinePanel(
            "Steps not applied in each window: skipped by the loss scaler, withheld by the guard",
            (keys.NUM_SKIPPED_STEPS, keys.NUM_GUARDED_STEPS),
        ),
    ),
    _section(
        "quantiles",
        LinePanel(
            "Size of the elements: 1st percentile, median, 99th percentile, largest",
            (*keys.GRAD_ABS_QUANTILES, keys.GRAD_ABS_MAX),
            log_y=True,
        ),
    ),
    _section(
        "precision",
        LinePanel("Share below full precision", _forecast("underflow_ratio"), range_y=(0.0, None)),
        LinePanel("Share that would become 0", _forecast("flush_ratio"), range_y=(0.0, None)),
        # bfloat16 ends where float32 does: its line would press the others flat.
        LinePanel("Octaves up to overflow", _forecast("headroom", without="bf16")),
    ),
    _section(
        "activation",
        LinePanel("Spread of every module's output", pattern=_metric(keys.ACTIVATION, "std"), log_y=True),
        LinePanel("Dead outputs", pattern=_metric(keys.ACTIVATION, "dead_ratio"), range_y=(0.0, 1.0)),
        LinePanel("NaN and Inf outputs", pattern=_metric(keys.ACTIVATION, "num_nonfinite")),
    ),
    _section(
        "attention",
        LinePanel(
            "Entropy of every head, of the possible",
            pattern=_metric(keys.ATTENTION, "entropy_ratio"),
            range_y=(0, 1),
        ),
        LinePanel(
            "Largest element of queries and keys",
            pattern=_metric(keys.ATTENTION, "(query|key)_abs_max"),
            log_y=True,
        ),
        LinePanel("Largest logit (limit: 100)", pattern=_metric(keys.ATTENTION, keys.LOGIT_MAX), log_y=True),
    ),
    _section(
        "router",
        LinePanel("Fullest expert (1 is the ideal)", pattern=_metric(keys.ROUTER, "load_max_ratio"), log_y=True),
        LinePanel("Experts without a token", pattern=_metric(keys.ROUTER, keys.DEAD_EXPERTS)),
        LinePanel("Entropy, of the possible", pattern=_metric(keys.ROUTER, "entropy_ratio"), range_y=(0, 1)),
    ),
    _section(
        "update",
        LinePanel("Update / parameter norm (usual: 1e-3)", pattern=_metric(keys.UPDATE, "ratio"), log_y=True),
    ),
    _section(
        "optimizer_state",
        LinePanel("Stale second moment (alarming: 2.3)", pattern=_metric(keys.OPTIMIZER_STATE, keys.STALE)),
        LinePanel("Update in units of the learning rate", pattern=_metric(keys.OPTIMIZER_STATE, "update_rms")),
        LinePanel("Share that has a direction", pattern=_metric(keys.OPTIMIZER_STATE, "coherence")),
    ),
    _section(
        "noise_scale",
        LinePanel("Noise scale", pattern=_metric(keys.NOISE_SCALE, "noise_scale"), log_y=True),
        LinePanel("Of all groups together, with its 95 % interval", _interval(), log_y=True),
        LinePanel("Cosine between parts of a batch", pattern=_metric(keys.NOISE_SCALE, "cosine")),
    ),
    _section(
        "parameter",
        LinePanel("Largest singular value", pattern=_metric(keys.PARAMETER, "largest_singular_value"), log_y=True),
        LinePanel("Stable rank", pattern=_metric(keys.PARAMETER, "stable_rank"), log_y=True),
    ),
    _section(
        "ranks",
        LinePanel("Seconds of each rank's own work", pattern=_metric(keys.RANKS, keys.SECONDS), log_y=True),
        LinePanel("Norm of each rank's own gradient", pattern=_metric(keys.RANKS, "local_norm"), log_y=True),
        LinePanel("Loss of each rank", pattern=_metric(keys.RANKS, "loss")),
        LinePanel("Ranks whose parameters differ", pattern=_metric(keys.RANKS, keys.APART)),
    ),
    _section("spread", LinePanel("Mean and deviation", (keys.GRAD_MEAN, keys.GRAD_STD))),
    _section("overhead", LinePanel("Share of the training time", (keys.OVERHEAD_RATIO,))),
)


def markdown_words(words: Words) -> str:
    """Healthy and otherwise, as W&B's markdown."""
    return f"**Healthy.** {words.healthy}\n\n**Otherwise.** {words.otherwise}"


def require_workspaces() -> tuple[Any, Any]:
    """wandb-workspaces' two modules: (reports, workspaces).

    Raises:
        ImportError: it is not installed; the message names the extra.
    """
    try:
        import wandb_workspaces.reports.v2 as reports
        import wandb_workspaces.workspaces as workspaces
    except ImportError as error:
        raise ImportError(
            "W&B reports and workspaces need wandb-workspaces: pip install 'wandb-gradwatch[report]'"
        ) from error
    return reports, workspaces


@contextmanager
def speaking_to_wandb() -> Iterator[None]:
    """Turn the failures of W&B's API, which have no public class, into a RuntimeError with their own words."""
    import wandb

    try:
        wandb.Api()  # no login is said here, in wandb's own words
        yield
    except (wandb.Error, ValueError, ImportError):
        raise
    except Exception as error:
        raise RuntimeError(f"W&B did not answer as expected: {str(error).strip()}") from error
