"""What each picture shows, what healthy looks like, and what to do otherwise: the same words on the page, in the report
and in the workspace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Words:
    """The words beside one picture."""

    title: str
    healthy: str
    otherwise: str


WORDS: Final[Mapping[str, Words]] = {
    "loss": Words(
        "Loss at the samples",
        "Falls and wobbles, and comes back after every outlier.",
        "Where it turns, compare with the step at which a gradient does: what moved first is nearer the cause. A "
        "loss that is not finite where every gradient is comes from the loss itself: a log, a root or a division.",
    ),
    "norm": Words(
        "Gradient norm of the whole model",
        "Falls in the first hundred steps, then stays within a factor of ten. The largest of each window lies "
        "close above the line. A clip ratio below 10 % means clipping only catches outliers.",
        "A single spike: look for a bad batch, and clip the norm. Growth over many steps: lower the learning rate "
        "or warm up for longer. A clip ratio near 100 %: the limit, not the loss, sets the step size; raise it or "
        "lower the learning rate. Below 1e-7: nothing is being learnt.",
    ),
    "layers": Words(
        "Every layer, every step",
        "Pale rows: every layer stays near its own usual size. By value, neighbouring layers differ by less than a "
        "hundred times, and colours fade slowly from left to right.",
        "Colours that change steadily along the depth are a signal that dies or grows on its way: check "
        "initialisation, normalisation and residual connections. A vertical stripe is a bad step; of the layers "
        "that turn red in it, the one nearest the output was first. A grey row receives nothing.",
    ),
    "lines": Words(
        "Chosen layers",
        "Lines run side by side. On a logarithmic scale healthy layers stay parallel.",
        "A line that leaves the others names the layer. For gradient / parameter norm, 0.001 is usual: above 1 "
        "one step can overwrite the weights, below 0.000001 the layer stands still.",
    ),
    "ratio": Words(
        "Gradient norm / parameter norm",
        "Between 1e-6 and 1, around 1e-3 for most layers.",
        "Above 1 one step can overwrite the weights: lower the learning rate. Below 1e-6 the layer stands still: "
        "look for a signal that dies before it. A layer whose parameters are all zero has no ratio yet.",
    ),
    "histogram": Words(
        "Distribution of one layer's gradient",
        "The distribution keeps its shape, and its width changes slowly.",
        "A width that grows step by step precedes an explosion. One that shrinks to nothing is a layer that "
        "stopped learning. Elements of one sign alone point to activations that are always positive, or to a "
        "saturated output.",
    ),
    "quantiles": Words(
        "Size of the elements",
        "The band between the 1st and the 99th percentile keeps its width and moves slowly.",
        "A median below 6e-8 is zero in float16: use a loss scale, or bfloat16. A maximum far above the band is a "
        "few outlying elements: look at embeddings and the last layer.",
    ),
    "dead": Words(
        "Dead elements",
        "Near zero for dense layers. Embeddings are mostly dead by nature: only the rows in the batch receive a "
        "gradient.",
        "A share that keeps rising is units that switched off: lower the learning rate, or use a leaky "
        "activation. A share of 100 % from the start is a layer that the loss does not reach.",
    ),
    "nonfinite": Words(
        "NaN and Inf elements",
        "None. Under float16 with a loss scale, a single skipped step now and then is calibration.",
        "Find the first bad step, and in it the bad layer nearest the output: the backward reached it first. Then "
        "look at what its forward computes: a logarithm or a root of zero, a division, an overflow in half "
        "precision.",
    ),
    "scale": Words(
        "Loss scale, and steps that were not applied",
        "The scale doubles every few thousand steps and halves now and then, with one skipped step each time. The "
        "guard, where there is one, withholds a step only now and then.",
        "Skips in a row, or a scale that falls towards 1: the gradients overflow for real. Lower the learning "
        "rate or switch to bfloat16. Steps withheld by the guard: look at their batches; many of them are no bad "
        "batches but a training that is not stable.",
    ),
    "precision": Words(
        "Precision forecast",
        "What would become of these gradients, without a loss scale, in smaller number formats: of the elements "
        "that are not 0, the share that would lose digits, the share that would become 0, and how many times the "
        "largest could double before it overflows. Nothing lost below 1 %, some octaves left.",
        "A share that becomes 0 in fp16 is what a loss scale must save: each octave of headroom is one doubling of "
        "it. Where headroom is used up before the share is gone, use bf16, or one scale per tensor for fp8.",
    ),
    "spread": Words(
        "Mean and deviation",
        "The mean is far smaller than the deviation and crosses zero.",
        "A mean as large as the deviation is a gradient that pushes everything one way: check the loss for a "
        "constant term, and the data for an offset.",
    ),
    "overhead": Words(
        "Cost of watching",
        "A few percent of the training time or less; the larger the batch, the smaller the share.",
        "Raise sample_every, log histograms less often, or set max_overhead.",
    ),
    "recorder": Words(
        "Flight recorder",
        "Not there: it is written when an alert says ERROR, when training crashes, or on demand.",
        "It holds the last samples of every layer, newest first. Sort by step and look for the first NaN or Inf; "
        "of several bad layers in that step, the one nearest the output was first.",
    ),
    "activation": Words(
        "Activations: what the modules put out",
        "Size and spread stay of one order of magnitude along the depth and over the run. No element is NaN or Inf.",
        "Sizes that grow from block to block: look at initialisation, residual scaling and normalisation. A "
        "share of dead outputs that rises is units that switched off. The first module of the forward that "
        "holds NaN or Inf is where it broke.",
    ),
    "activation_histogram": Words(
        "Distribution of one module's output",
        "The width changes slowly. Behind a ReLU there is one sign only, and many zeros.",
        "Elements at both ends of a sigmoid or tanh are saturation. A width that grows without bound precedes an "
        "overflow, first in half precision.",
    ),
    "attention": Words(
        "Attention heads",
        "The entropy ratio is 1 where a head looks everywhere alike and 0 where it looks at one place only. At "
        "first all heads are near 1; then they spread. Sizes of queries and keys, and the largest logit, grow "
        "slowly.",
        "All heads of a layer near 0 are collapsed attention: query and key weights grow. Normalise queries and "
        "keys, lower the learning rate or warm up for longer. A largest logit on its way to 100 says so before.",
    ),
    "router": Words(
        "Routers of the experts",
        "The loads lie around 1, the ideal share, and no expert is dead for long. The entropy ratio falls slowly "
        "from 1.",
        "A largest load that grows while others fall to 0 is a router that has collapsed: raise the weight of the "
        "load-balancing loss, or add noise to the logits. Dead experts learn nothing and do not come back.",
    ),
    "update": Words(
        "Updates: how far each step moves the parameters",
        "The ratio of the update's norm to the parameter's lies around 0.001, the dashed line, and falls with "
        "the learning rate. Biases and norms that begin at zero move more.",
        "Ten times above the line: lower the learning rate, or warm up for longer. A hundred times below: the "
        "layer hardly learns; raise its learning rate, or look for a gradient that dies before it.",
    ),
    "optimizer_state": Words(
        "The optimizer's state, and the update that it makes",
        "The stale ratio is near 1: the gradient is as large as the second moment says. The update, in units of "
        "the learning rate, lies between 0.2, where gradients are noise, and 1, where they agree.",
        "A stale ratio above 2.3 comes some steps before a spike of the loss: lower beta2, or clip the gradients. "
        "A gradient below eps is scaled by eps, not by its second moment: lower eps.",
    ),
    "noise_scale": Words(
        "Noise of the batch's parts",
        "The noise scale rises slowly while the loss falls: the gradient becomes smaller, its noise stays. Its "
        "interval is wide. The cosine between micro-batches, or ranks, is above 0.",
        "A noise scale that rises fast, or a cosine near 0, is a gradient that drowns in noise: a larger batch or "
        "a lower learning rate averages more of it. The batch that trains best need not be the noise scale.",
    ),
    "ranks": Words(
        "Ranks side by side",
        "The norms and losses of the ranks lie around their median, now one above and now another. The seconds are "
        "alike, and no rank is apart.",
        "A rank that is apart holds other parameters than the others: go on from a checkpoint of before. A rank "
        "whose norm or loss stays far from the others' has other data. One with more seconds keeps all waiting.",
    ),
    "parameter": Words(
        "Parameters",
        "Distances to the reference grow fast at first and then slowly, alike in layers of one kind. The largest "
        "singular value grows slowly and the stable rank falls slowly.",
        "A layer that stays at its reference does not learn. One that runs away from the others has a learning "
        "rate of its own, or no weight decay.",
    ),
    "parameter_histogram": Words(
        "Distribution of one parameter",
        "The distribution keeps its shape, and its width and middle move slowly.",
        "A width that grows from step to step: lower the learning rate, or use weight decay. One that shrinks to "
        "nothing: less weight decay.",
    ),
    "gradient": Words(
        "Metrics of the gradients",
        "Metrics of your own, of gradients without the loss scale and before clipping.",
        "Compare with the gradient norm of the same layer at the same step.",
    ),
    "strips": Words(
        "The runs on one axis",
        "Lines that cross and touch: runs that differ by chance alone.",
        "Lines that leave each other and stay apart. Look at the step where they do, in the picture of the layers "
        "below, and at the settings above.",
    ),
    "ratio_of_runs": Words(
        "Where the runs part",
        "Pale everywhere: no layer's norm is far from its norm in the other run.",
        "A stripe from one step on is a layer that parts there; of the layers that part in one step, the one "
        "nearest the output was first. Bands of one colour from the start point to initialisation or scale.",
    ),
    "own": Words(
        "Your own metrics, at every row",
        "The loss falls and wobbles, and comes back after every outlier. The learning rate follows its schedule.",
        "Compare the step at which the loss turns with the step at which a gradient does: the one that moves "
        "first is the cause. A red band is a value that was logged as NaN or Inf.",
    ),
}
