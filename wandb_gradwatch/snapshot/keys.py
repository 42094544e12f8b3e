"""The keys of a W&B row, each written here and nowhere else: what sinks write, and page, report and recorder read.

gradwatch/<number>                the whole model; with several models in a run gradwatch/<model>/<number>
<family>/<name>                   one layer; the name with / for every dot
<family>/<name>/<metric>          what watch(metrics=...) measures
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

PREFIX: Final = "gradwatch/"

STEP: Final = "gradwatch/step"  # of the row's last sample: the step metric of every other key
FLIGHT_RECORDER: Final = "gradwatch/flight_recorder"  # a table

# ---- the whole model

GRAD_NORM: Final = "gradwatch/grad_norm"
GRAD_NORM_MAX: Final = "gradwatch/grad_norm_max"
GRAD_NORM_CLIPPED: Final = "gradwatch/grad_norm_clipped"
CLIP_RATIO: Final = "gradwatch/clip_ratio"
GRAD_MEAN: Final = "gradwatch/grad_mean"
GRAD_STD: Final = "gradwatch/grad_std"
GRAD_ABS_MAX: Final = "gradwatch/grad_abs_max"
GRAD_ABS_QUANTILES: Final = {  # of the elements' magnitudes, zeros included
    "gradwatch/grad_abs_p01": 0.01,
    "gradwatch/grad_abs_p50": 0.50,
    "gradwatch/grad_abs_p99": 0.99,
}
DEAD_RATIO: Final = "gradwatch/dead_ratio"
PARAM_NORM: Final = "gradwatch/param_norm"
NUM_NAN: Final = "gradwatch/num_nan"
NUM_INF: Final = "gradwatch/num_inf"
LOSS_SCALE: Final = "gradwatch/loss_scale"
NUM_SKIPPED_STEPS: Final = "gradwatch/num_skipped_steps"
LOSS: Final = "gradwatch/loss"  # what the user, or a framework, hands over; missing where it is not finite
NUM_NONFINITE_LOSS: Final = "gradwatch/num_nonfinite_loss"
NUM_GUARDED_STEPS: Final = "gradwatch/num_guarded_steps"  # withheld since the sample before, its own among them
SAMPLE_EVERY: Final = "gradwatch/sample_every"  # the cadence in force: steps from the sample before to this one
OVERHEAD_RATIO: Final = "gradwatch/overhead_ratio"

CHANGED_RATIO: Final = "gradwatch/changed_ratio"  # of the samples: something else than clipping changed the gradient

# The norm of one model, or of one optimizer that steps in turn with others; missing in the samples of the others. The
# name follows.
TOTAL: Final = "gradwatch/grad_norm_total/"
TOTAL_MAX: Final = "gradwatch/grad_norm_total_max/"

# In samples, and in no row, which has counts and ratios.
CLIPPED: Final = "gradwatch/clipped"  # 1: it was; 0: it was not; MULTIPLIED: by one factor, not by torch's functions
CHANGED: Final = "gradwatch/changed"  # 1: something else than clipping happened to it after the backward
GUARDED: Final = "gradwatch/guarded"  # 1 where the sample's own step was withheld
LEARNING_RATE: Final = "gradwatch/learning_rate"  # the largest of the optimizers that made the update
LEFT_OUT: Final = "gradwatch/left_out"  # 1 where the training loop has left the step out
# What the capture knows of the wiring; there only while it is so.
WIRING: Final = "gradwatch/wiring/"
WIRING_CARRIED: Final = "gradwatch/wiring/carried"  # 1: gradients were used that were not reset since the last step
WIRING_UNOWNED: Final = "gradwatch/wiring/unowned/"  # + a name: trained by no optimizer, though it has a gradient
FIRST_NONFINITE_RANK: Final = "gradwatch/first_nonfinite_rank"  # whose gradients were non-finite first, of shards

# The precision forecast: what smaller number formats would do to the gradients.
FORMATS: Final = ("fp16", "bf16", "fp8_e5m2", "fp8_e4m3")
FORECASTS: Final = ("underflow_ratio", "flush_ratio", "headroom")

# ---- one layer, in the order in which the pictures offer them

LAYER_GRAD_NORM: Final = "grad_norm"
LAYER_GRAD_NORM_MAX: Final = "grad_norm_max"
LAYER_GRAD_PARAM_RATIO: Final = "grad_param_ratio"
LAYER_PARAM_NORM: Final = "param_norm"
LAYER_DEAD_RATIO: Final = "dead_ratio"
LAYER_NUM_NONFINITE: Final = "num_nonfinite"
LAYER_FAMILIES: Final = (
    *(LAYER_GRAD_NORM, LAYER_GRAD_NORM_MAX, LAYER_GRAD_PARAM_RATIO),
    *(LAYER_PARAM_NORM, LAYER_DEAD_RATIO, LAYER_NUM_NONFINITE),
)
# On request, watch(details=...): each the family, and the Snapshot's array, of that name.
DETAILS: Final = {
    "mean": "grad_mean",
    "std": "grad_std",
    "min": "grad_min",
    "max": "grad_max",
    "abs_max": "grad_abs_max",
    "abs_min_nonzero": "grad_abs_min_nonzero",
    "zero_ratio": "zero_ratio",
    "received": "grad_norm_clipped",  # the norm of what the optimizer received
}
GRADIENT_HISTOGRAMS: Final = "gradients"  # the families that wandb.watch uses too
PARAMETER_HISTOGRAMS: Final = "parameters"
HISTOGRAM_FAMILIES: Final = (GRADIENT_HISTOGRAMS, PARAMETER_HISTOGRAMS)

# ---- what watch(metrics=...) measures, in the order of the pictures

ACTIVATION: Final = "activation"
ATTENTION: Final = "attention"
UPDATE: Final = "update"
PARAMETER: Final = "parameter"
GRADIENT: Final = "gradient"
OPTIMIZER_STATE: Final = "optimizer_state"
STALE: Final = "stale_ratio"  # of OPTIMIZER_STATE: the gradient over what its second moment said before the step
LOGIT_MAX: Final = "logit_max"  # of ATTENTION
NOISE_SCALE: Final = "noise_scale"
ROUTER: Final = "router"
DEAD_EXPERTS: Final = "dead_experts"  # of ROUTER
RANKS: Final = "ranks"
APART: Final = "apart"  # of RANKS: 1 where the replica is another than that of most ranks
SECONDS: Final = "seconds"  # of RANKS
METRIC_FAMILIES: Final = (
    *(ACTIVATION, ATTENTION, ROUTER, UPDATE, OPTIMIZER_STATE, NOISE_SCALE, RANKS),
    *(PARAMETER, GRADIENT),
)
HISTOGRAM: Final = "histogram"  # the one metric that is no number
NONFINITE_METRIC: Final = "num_nonfinite"

# W&B prints the first ten keys of a run's summary when the run ends: these are ours, and the rest is the user's.
SUMMARY: Final = (GRAD_NORM, GRAD_NORM_MAX)


def forecast_key(number_format: str, forecast: str) -> str:
    """The key of one number of the precision forecast."""
    return f"{PREFIX}{number_format}_{forecast}"


MODEL_KEYS: Final = (  # the whole model's numbers that have a picture of their own, in its order
    *(LOSS, GRAD_NORM, GRAD_NORM_MAX, GRAD_NORM_CLIPPED, CLIP_RATIO),
    *(GRAD_MEAN, GRAD_STD, GRAD_ABS_MAX, *GRAD_ABS_QUANTILES, PARAM_NORM),
    *(DEAD_RATIO, NUM_NAN, NUM_INF, LOSS_SCALE, NUM_SKIPPED_STEPS, NUM_GUARDED_STEPS, OVERHEAD_RATIO),
    *(forecast_key(number_format, forecast) for forecast in FORECASTS for number_format in FORMATS),
)


def is_count(key: str) -> bool:
    """Whether the values of this key are counts of the whole model, which are added up over a window."""
    return key.startswith(f"{PREFIX}num_")


def in_key(name: str) -> str:
    """A layer's name in a key: with / for every dot, because W&B ignores the options of metrics with dots."""
    return name.replace(".", "/")


@lru_cache(maxsize=256)  # of a run they are the same in every row
def layer_keys(family: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The key of each layer's number or histogram.

    Example:
        >>> layer_keys(LAYER_GRAD_NORM, ("blocks.0.fc.weight",))
        ('grad_norm/blocks/0/fc/weight',)
    """
    return tuple(f"{family}/{in_key(name)}" for name in names)


def in_namespace(key: str, namespace: str) -> str:
    """The key of the whole model's number below a namespace, "" for none; the step, and a layer's key, stay.

    Example:
        >>> in_namespace("gradwatch/grad_norm", "model1")
        'gradwatch/model1/grad_norm'
    """
    if not namespace or key == STEP or not key.startswith(PREFIX):
        return key
    return f"{PREFIX}{namespace}/{key.removeprefix(PREFIX)}"


@lru_cache(maxsize=2**14)  # of a run they are the same in every sample
def split_metric(key: str) -> tuple[str, str, str] | None:
    """Family, name and metric of a key of watch(metrics=...); None for any other key.

    Example:
        >>> split_metric("activation/blocks/0/std")
        ('activation', 'blocks/0', 'std')
    """
    family, _, rest = key.partition("/")
    name, _, metric = rest.rpartition("/")
    return (family, name, metric) if family in METRIC_FAMILIES and name and metric else None


def split_histogram(key: str) -> tuple[str, str] | None:
    """The family of a histogram, "" for that of gradients, and its name; None for a key that is not ours."""
    family, _, name = key.partition("/")
    if name and family in HISTOGRAM_FAMILIES:
        return ("" if family == GRADIENT_HISTOGRAMS else PARAMETER), name
    parts = split_metric(key)
    return parts[:2] if parts is not None and (parts[0], parts[2]) == (ACTIVATION, HISTOGRAM) else None


def is_ours(key: str) -> bool:
    """Whether a scalar's key is of this package, whatever model or namespace it is of.

    Example:
        >>> is_ours("gradwatch/model1/grad_norm"), is_ours("train/loss")
        (True, False)
    """
    family, slash, _ = key.partition("/")
    return key.startswith(PREFIX) or (slash != "" and family in LAYER_FAMILIES) or split_metric(key) is not None


def definitions(keys: Iterable[str] = (), namespace: str = "") -> dict[str, bool]:
    """What W&B is told of our keys: each key, or pattern, and whether the run's summary keeps its last value.

    Args:
        keys: what a snapshot has beside the numbers that every row has, such as metrics.
        namespace: what the whole model's numbers are logged below; "": nothing.
    """
    told = {f"{PREFIX}*": False, FLIGHT_RECORDER: True}  # a report finds the table by the summary
    told |= {in_namespace(key, namespace): True for key in SUMMARY}
    told |= {f"{family}/*": False for family in (*LAYER_FAMILIES, *DETAILS.values(), *HISTOGRAM_FAMILIES)}
    for key in keys:
        if split_metric(key) is not None:
            told[f"{key}*"] = False  # W&B heeds "none" for patterns only, and one may end in nothing but a star
        elif not key.startswith(PREFIX) and split_histogram(key) is None:
            told[key] = True
    return told
