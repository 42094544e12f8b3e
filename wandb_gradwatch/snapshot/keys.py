"""All keys of a W&B row. Sinks write these keys; the page, the report and the flight recorder read them.

gradwatch/<number>                the whole model; with several models in a run gradwatch/<model>/<number>
<family>/<name>                   one layer; the name has / in place of every dot
<family>/<name>/<metric>          a value measured by watch(metrics=...)
"""

from functools import lru_cache
from typing import Final

PREFIX: Final = "gradwatch/"

STEP: Final = "gradwatch/step"  # step of the row's last sample; the step metric (x axis) of every other key
FLIGHT_RECORDER: Final = "gradwatch/flight_recorder"  # a table

# Only in the run's summary, and of all models in the run together.

VERDICT: Final = "gradwatch/verdict"  # a sentence
INCIDENTS: Final = "gradwatch/incidents"  # JSON: a list of Incident.to_dict()

# The file of a JSONLSink begins with this text and the number of its format.
JSONL_BEGIN: Final = '{"wandb_gradwatch":'
JSONL_FORMAT: Final = 1

# What a row holds. Values of one sample are those of its last one; maxima, counts and ratios are about all of them.

FIRST_SAMPLE: Final = "gradwatch/first_sample"  # step of the row's first sample
NUM_SAMPLES: Final = "gradwatch/num_samples"
# A list, which W&B stores but does not chart: [step, norm] of each sample, or [step, norm, NaN and Inf elements] where
# there are any. The norm has six digits, or is null.
SAMPLES: Final = "gradwatch/samples"
# A list, too: [key, smallest, largest, counts ...] of each histogram in the row, by its key in the row. The counts are
# those of the mergeable bins (columns.histogram_edges), where -n stands for n empty bins; empty bins at the end are
# left out. The extremes are those of the elements, or null. If a row is too large for W&B, further lists follow in
# HISTOGRAMS/1, HISTOGRAMS/2, ...
HISTOGRAMS: Final = "gradwatch/histograms"

# 0: no alert, 1: INFO, 2: WARN, 3: ERROR; the worst of the alerts since the last row. A number, for W&B's automations.
ALERT_LEVEL: Final = "gradwatch/alert_level"

# The whole model.

GRAD_NORM: Final = "gradwatch/grad_norm"
GRAD_NORM_MAX: Final = "gradwatch/grad_norm_max"
GRAD_NORM_CLIPPED: Final = "gradwatch/grad_norm_clipped"
CLIP_RATIO: Final = "gradwatch/clip_ratio"
GRAD_MEAN: Final = "gradwatch/grad_mean"
GRAD_STD: Final = "gradwatch/grad_std"
GRAD_ABS_MAX: Final = "gradwatch/grad_abs_max"
GRAD_ABS_QUANTILES: Final = {  # quantiles of |g| over all elements, zeros included
    "gradwatch/grad_abs_p01": 0.01,
    "gradwatch/grad_abs_p50": 0.50,
    "gradwatch/grad_abs_p99": 0.99,
}
DEAD_RATIO: Final = "gradwatch/dead_ratio"
PARAM_NORM: Final = "gradwatch/param_norm"
NUM_NAN: Final = "gradwatch/num_nan"
NUM_INF: Final = "gradwatch/num_inf"
LOSS_SCALE: Final = "gradwatch/grad_scale"  # without "loss": see OF_A_LOSS
NUM_SKIPPED_STEPS: Final = "gradwatch/num_skipped_steps"
NUM_GUARDED_STEPS: Final = "gradwatch/num_guarded_steps"  # steps that the guard withheld since the previous sample
SAMPLE_EVERY: Final = "gradwatch/sample_every"  # the current cadence: steps between the previous sample and this one
OVERHEAD_RATIO: Final = "gradwatch/overhead_ratio"

CHANGED_RATIO: Final = "gradwatch/changed_ratio"  # share of the samples whose gradient changed other than by clipping

# Prefixes of the norm of one model, or of one of several optimizers that step in turn. The model's or optimizer's name
# follows. The value is missing in samples of the other models or optimizers.
TOTAL: Final = "gradwatch/grad_norm_total/"
TOTAL_MAX: Final = "gradwatch/grad_norm_total_max/"

# Of the backward, or passed by the user or a framework; missing if it is not finite. Only in runs in which the user
# logs no loss, see RowScheduler.
LOSS: Final = "gradwatch/loss"
# What the name of a user's key must contain to be a loss; tools that read W&B runs look for the same. No other
# model-wide key of ours contains it, so that they find the user's loss.
OF_A_LOSS: Final = "loss"

# Values of single samples. Rows do not contain them; rows contain counts and ratios instead.
NUM_NONFINITE_LOSS: Final = "gradwatch/num_nonfinite_loss"
CLIPPED: Final = "gradwatch/clipped"  # 1: clipped; 0: not clipped; MULTIPLIED: scaled by one factor, not by torch
CHANGED: Final = "gradwatch/changed"  # 1: changed after the backward, other than by clipping
GUARDED: Final = "gradwatch/guarded"  # 1: the guard withheld the sample's own step
LEARNING_RATE: Final = "gradwatch/learning_rate"  # the largest learning rate of the optimizers that made the update
LEFT_OUT: Final = "gradwatch/left_out"  # 1: the training loop skipped the optimizer step
INFERRED: Final = "gradwatch/inferred"  # 1: no step was seen, only a reset of the gradients: perhaps a trial point
# Defects of the training loop that the capture detects. Each key exists only while its defect lasts.
WIRING: Final = "gradwatch/wiring/"
WIRING_CARRIED: Final = "gradwatch/wiring/carried"  # 1: gradients were not reset since the last step
WIRING_UNOWNED: Final = "gradwatch/wiring/unowned/"  # + name: the parameter has a gradient but is in no optimizer
FIRST_NONFINITE_RANK: Final = "gradwatch/first_nonfinite_rank"  # where NaN or Inf comes from, if known

REPLICA_APART: Final = "gradwatch/wiring/apart/"  # + name: the parameter, or its gradient, differs between replicas

# Facts of a sample for the judgement: + one of SAMPLE_FACTS or REPLICA_FACTS. They are values of single samples, and
# are never logged.
FACT: Final = "gradwatch/fact/"
SAMPLE_FACTS: Final = (
    # Of the whole model's inputs and outputs, over the training forwards of the sample (micro-batches)
    "num_forwards",
    "batch_size",  # size of dimension 0 of the first tensor, summed over the forwards
    "input_rms",  # of the finite elements of all floating tensors
    "input_num_nonfinite",
    "input_zero_ratio",
    "input_repeated",  # share of forwards with the inputs of the measured forward before, 1 or 0 for one; NaN at first
    "input_largest",  # largest finite number of the dtype; of the narrowest range if there are several
    "output_rms",
    "output_num_nonfinite",
    "output_zero_ratio",
    "output_largest",  # 65504: float16
    "output_width",  # size of the last dimension of the first floating output
    "output_spread",  # std over dimension 0, as a root mean square over the rest, divided by the rms; 0: rows are equal
    "loss_largest",  # largest finite number of the dtype of the tensor that backward() was called on
)
REPLICA_FACTS: Final = (  # by the newest comparison of ranks, in samples after it; only while they differ
    "replicas",  # the number of ranks that were compared
    "replicas_step",  # the step of which they were compared
    "replicas_by_ddp",  # 1: DistributedDataParallel holds watched parameters
    "replicas_on_purpose",  # 1: something shows that ranks are meant to differ
    "replicas_uneven",  # 1: some steps call more collectives than others
    "replicas_own_rates",  # 1: ranks have had different learning rates
    # Of the gradients that the optimizers received, and of the parameters before the update: the share of the groups of
    # parameters in which ranks differ; the number of ranks that differ from most of them, 0 if most differ, and the
    # first of these
    *("replicas_gradients", "replicas_gradients_num", "replicas_gradients_rank"),
    *("replicas_parameters", "replicas_parameters_num", "replicas_parameters_rank"),
    "replicas_parameters_since",  # the first of the compared steps in a row
    # The compared steps, those with different gradients, and the first of these
    *("replicas_num_compared", "replicas_num_different", "replicas_different_since"),
    # Shares of the groups with different gradients: the backward left equal ones; they were changed after it
    *("replicas_left_equal", "replicas_changed"),
    "replicas_averaged",  # share of the groups with different parameters in which gradients are equal, and not 0
    *("replicas_begun", "replicas_begun_averaged"),  # replicas_parameters and replicas_averaged in the first sample
)
PARAMETER_FACTS: Final = (  # names in Snapshot.per_parameter
    # Of the optimizer's group that holds the parameter, when the optimizer is about to step
    "learning_rate",
    "weight_decay",
    "epsilon",
    "momentum",  # or the first of `betas`
    "trainable",  # 1: requires_grad, in this sample
    # By witnesses: at most 64 elements at a fixed stride, compared with those of the measured sample before
    "grad_cosine",  # of the two gradients
    "weight_change",  # norm of the difference of the parameter, divided by its norm
    "weight_moved",  # share of the witnesses whose bits have changed
)

# The precision forecast: the effect of smaller number formats on the gradients.
FORMATS: Final = ("fp16", "bf16", "fp8_e5m2", "fp8_e4m3")
FORECASTS: Final = ("underflow_ratio", "flush_ratio", "headroom")

# One layer, in the order of the charts.

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
# Families of which a healthy layer has 0 in every row. A layer's rows have them from its first value that is not 0 on;
# before, a row with the layer's LAYER_GRAD_NORM means 0.
ONCE_NOT_ZERO: Final = (LAYER_DEAD_RATIO, LAYER_NUM_NONFINITE)
# Statistics of watch(details=...): by name, the family of keys, which is also the name of Snapshot's array.
DETAILS: Final = {
    "mean": "grad_mean",
    "std": "grad_std",
    "min": "grad_min",
    "max": "grad_max",
    "abs_max": "grad_abs_max",
    "abs_min_nonzero": "grad_abs_min_nonzero",
    "zero_ratio": "zero_ratio",
    "received": "grad_norm_clipped",  # the norm of the gradient that the optimizer received
}
# The value for the whole model that details=... logs beside those of the layers: by name.
MODEL_DETAILS: Final = {"mean": GRAD_MEAN, "std": GRAD_STD, "abs_max": GRAD_ABS_MAX}
PRECISION: Final = "precision"  # in details: GRAD_ABS_QUANTILES and the precision forecast, for the whole model alone
LAYER_SCALARS: Final = (*LAYER_FAMILIES, *DETAILS.values())
GRADIENT_HISTOGRAMS: Final = "gradients"  # wandb.watch uses the same two families
PARAMETER_HISTOGRAMS: Final = "parameters"
HISTOGRAM_FAMILIES: Final = (GRADIENT_HISTOGRAMS, PARAMETER_HISTOGRAMS)

# Values measured by watch(metrics=...), in the order of the charts.

ACTIVATION: Final = "activation"
ATTENTION: Final = "attention"
UPDATE: Final = "update"
PARAMETER: Final = "parameter"
GRADIENT: Final = "gradient"
OPTIMIZER_STATE: Final = "optimizer_state"
STALE: Final = "stale_ratio"  # in OPTIMIZER_STATE: gradient divided by the root of the second moment before the step
LOGIT_MAX: Final = "logit_max"  # in ATTENTION
NOISE_SCALE: Final = "noise_scale"
ROUTER: Final = "router"
DEAD_EXPERTS: Final = "dead_experts"  # in ROUTER
LOAD_RATIO: Final = "load_ratio"  # in ROUTER, of one expert
RANKS: Final = "ranks"
APART: Final = "apart"  # in RANKS: 1 if this rank's replica differs from that of most ranks
SECONDS: Final = "seconds"  # in RANKS
AVERAGE_ERROR: Final = "average_error"  # in RANKS, of all: the error of the average over ranks
LOST_RANK: Final = "lost_rank"  # in RANKS, of all: the rank whose contribution to the average is missing
METRIC_FAMILIES: Final = (
    *(ACTIVATION, ATTENTION, ROUTER, UPDATE, OPTIMIZER_STATE, NOISE_SCALE, RANKS),
    *(PARAMETER, GRADIENT),
)
HISTOGRAM: Final = "histogram"  # the only metric that is not a number
NONFINITE_METRIC: Final = "num_nonfinite"

# W&B prints the first ten keys of the summary when a run ends. We add only these two, to leave room for the user's.
SUMMARY: Final = (GRAD_NORM, GRAD_NORM_MAX)


def forecast_key(number_format: str, forecast: str) -> str:
    """The key of one number of the precision forecast."""
    return f"{PREFIX}{number_format}_{forecast}"


MODEL_KEYS: Final = (  # model-wide keys with a chart of their own, in the order of the charts
    *(LOSS, GRAD_NORM, GRAD_NORM_MAX, GRAD_NORM_CLIPPED, CLIP_RATIO),
    *(GRAD_MEAN, GRAD_STD, GRAD_ABS_MAX, *GRAD_ABS_QUANTILES, PARAM_NORM),
    *(DEAD_RATIO, NUM_NAN, NUM_INF, LOSS_SCALE, NUM_SKIPPED_STEPS, NUM_GUARDED_STEPS, OVERHEAD_RATIO),
    *(forecast_key(number_format, forecast) for forecast in FORECASTS for number_format in FORMATS),
)


def is_count(key: str) -> bool:
    """Whether the values of this key are model-wide counts, which are summed over a window."""
    return key.startswith(f"{PREFIX}num_")


def is_loss(key: str) -> bool:
    """Whether this is our key of the loss, in any namespace.

    Examples:
        >>> is_loss("gradwatch/loss"), is_loss("gradwatch/model1/loss"), is_loss("gradwatch/grad_norm_total/loss")
        (True, True, False)
    """
    name = LOSS.removeprefix(PREFIX)
    return key.startswith(PREFIX) and key.endswith(f"/{name}") and key not in (TOTAL + name, TOTAL_MAX + name)


def in_key(name: str) -> str:
    """Replace every dot in a layer's name by /, because W&B ignores `define_metric` options of keys with dots."""
    return name.replace(".", "/")


@lru_cache(maxsize=256)  # all rows of a run have the same keys
def layer_keys(family: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of one family, one for each layer.

    Examples:
        >>> layer_keys(LAYER_GRAD_NORM, ("blocks.0.fc.weight",))
        ('grad_norm/blocks/0/fc/weight',)
    """
    return tuple(f"{family}/{in_key(name)}" for name in names)


def in_namespace(key: str, namespace: str) -> str:
    """Insert a namespace ("": none) into a model-wide key. The step's key and the keys of layers stay as they are.

    Examples:
        >>> in_namespace("gradwatch/grad_norm", "model1")
        'gradwatch/model1/grad_norm'
    """
    if not namespace or key == STEP or not key.startswith(PREFIX):
        return key
    return f"{PREFIX}{namespace}/{key.removeprefix(PREFIX)}"


@lru_cache(maxsize=2**14)  # all samples of a run have the same keys
def split_metric(key: str) -> tuple[str, str, str] | None:
    """Split a key of watch(metrics=...) into family, name and metric; None for any other key.

    Examples:
        >>> split_metric("activation/blocks/0/std")
        ('activation', 'blocks/0', 'std')
    """
    family, _, rest = key.partition("/")
    name, _, metric = rest.rpartition("/")
    return (family, name, metric) if family in METRIC_FAMILIES and name and metric else None


@lru_cache(maxsize=2**14)
def nonfinite_output(key: str) -> str | None:
    """Return the name of the output whose NaN and Inf elements a key counts; None for any other key.

    Gradients of outputs, whose names end in `.grad` or `.grad_<index or key>`, are no outputs of the forward.
    """
    family, name, metric = split_metric(key) or ("", "", "")
    is_gradient = name.rpartition(".")[2].partition("_")[0] == "grad"
    return name if (family, metric) == (ACTIVATION, NONFINITE_METRIC) and not is_gradient else None


def split_histogram(key: str) -> tuple[str, str] | None:
    """Split a histogram's key into family ("" for gradients) and name; None for a key that is not one of ours."""
    family, _, name = key.partition("/")
    if name and family in HISTOGRAM_FAMILIES:
        return ("" if family == GRADIENT_HISTOGRAMS else PARAMETER), name
    parts = split_metric(key)
    return parts[:2] if parts is not None and (parts[0], parts[2]) == (ACTIVATION, HISTOGRAM) else None


def holds_histograms(key: str) -> bool:
    """Whether this is HISTOGRAMS, or a list that continues it, in any namespace.

    Examples:
        >>> holds_histograms("gradwatch/histograms"), holds_histograms("gradwatch/model1/histograms/1")
        (True, True)
    """
    name = HISTOGRAMS.removeprefix(PREFIX)
    return key.startswith(PREFIX) and name in key.split("/")[-2:]


def is_ours(key: str) -> bool:
    """Whether this package writes the scalar key, in any namespace.

    Examples:
        >>> is_ours("gradwatch/model1/grad_norm"), is_ours("grad_std/0/weight"), is_ours("train/loss")
        (True, True, False)
    """
    family, slash, _ = key.partition("/")
    return key.startswith(PREFIX) or (slash != "" and family in LAYER_SCALARS) or split_metric(key) is not None


def is_in_summary(key: str) -> bool:
    """Whether the run's summary keeps the last value of a key that we log.

    The summary is the user's: of our keys it keeps the step, two norms, the table of the flight recorder, through which
    the W&B report finds it, and metrics whose names the user or a framework has chosen.

    Examples:
        >>> is_in_summary("gradwatch/model1/grad_norm"), is_in_summary("gradwatch/dead_ratio")
        (True, False)
    """
    if key.startswith(PREFIX):
        return PREFIX + key.rpartition("/")[2] in (STEP, FLIGHT_RECORDER, *SUMMARY)
    return not is_ours(key) and split_histogram(key) is None
