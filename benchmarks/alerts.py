"""Write the generated parts of docs/alerts.md: a section per title, and a table of what to do about each cause.

python -m benchmarks.alerts
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from wandb_gradwatch._judgement.causes import CAUSES
from wandb_gradwatch._judgement.patterns import PATTERNS
from wandb_gradwatch._judgement.symptoms import SYMPTOMS, Symptom

PAGE: Final = Path(__file__).parent.parent / "docs/alerts.md"

# What each kind looks for, without the limits: these are in the code alone.
LOOKS_FOR: Final = {
    "nan_gradient": "a gradient with a NaN element, in a step that the gradient scaler did not skip; WARN if the "
    "training loop left the step out",
    "inf_gradient": "the same of infinite elements, where none is NaN",
    "nonfinite_loss": "a loss that is not finite, while all gradients and parameters are",
    "loss_scale_collapse": "updates that the gradient scaler skips one after the other, or a tiny loss scale",
    "not_in_optimizer": "a trainable parameter with a gradient that no optimizer holds",
    "gradients_not_reset": "gradients of the step before, to which a backward adds",
    "learning_rate_negative": "an update with a negative learning rate",
    "exploding_gradient": "a norm far above all usual ones, or one that rises steadily while the loss or the "
    "parameters suffer, or that is huge; ERROR if several in a row are, or if the parameters move",
    "gradient_spike": "a norm far above the usual one in a single sample, after which it is usual again",
    "vanishing_gradient": "a tiny norm; norms that fall layer by layer towards the input; gradients of some weights "
    "that are only rounding errors, or of float16 that are its smallest numbers",
    "dead_gradient": "units of a layer, always the same, without a gradient; a layer that loses its gradient or its "
    "inputs",
    "no_gradient": "trainable parameters without a gradient, for longer than chance explains; gradients that are all "
    "0, or were zeroed before the step",
    "parameters_unchanged": "parameters that no update changes although they have gradients, or far less than the "
    "learning rate implies",
    "initial_weights": "at the first step: weights far larger or smaller than what keeps a signal's size, large "
    "biases, large outputs",
    "equal_units": "at the first step: units of a layer that are all equal",
    "large_inputs": "at the first steps: inputs far from a size of one",
    "zero_inputs": "inputs that are all 0",
    "repeated_inputs": "the same inputs again and again, after others",
    "parameters_grow": "weights that grow fast, or jump, while the loss does not fall",
    "parameters_shrink": "weights that shrink in update after update, or have lost most of their norm",
    "clipping_too_tight": "norms after clipping of a tiny share of those before",
    "gradient_changed": "an optimizer that receives far more or far less than the backward computed, without clipping",
    "layer_jump": "a few weights whose gradients jump, while all others and the loss are usual",
    "loss_spike": "a loss that rises and stays there, or rises all the time",
    "loss_below_zero": "a loss that falls below 0 although it was above, or falls without a bound",
    "layers_frozen": "parameters that had a gradient, and are frozen while their optimizer goes on",
    "ranks_disagree": "ranks that are meant to be [replicas](distributed.md#replicas) apply different gradients, or "
    "have different parameters; with `Ranks()` bit by bit",
    "nothing_learned": "a loss that stays that of guessing, or where it began",
}


def written(name: str, lines: Iterable[str], page: str) -> str:
    """The page with these lines between the markers of this name."""
    begin, end = (f"<!-- {name}, by python -m benchmarks.alerts: {word} -->" for word in ("begin", "end"))
    before, after = page[: page.index(begin) + len(begin)], page[page.index(end) :]
    return "\n".join([before, *lines, after])


def symptoms() -> list[str]:
    """One section per title: what is looked for, and the causes that can be named."""
    kinds: dict[str, list[Symptom]] = {}
    for symptom in SYMPTOMS:
        kinds.setdefault(symptom.kind, []).append(symptom)
    lines = []
    for kind, rows in kinds.items():
        levels = ", ".join(dict.fromkeys(row.level for row in rows))
        causes_of = dict.fromkeys(CAUSES[row.cause].text for row in PATTERNS[kind])
        lines += ["", f"### {rows[0].title}", "", f"`{kind}`, {levels}. Looked for: {LOOKS_FOR[kind]}."]
        lines += ["", f"Causes: {'; '.join(causes_of)}."]
    return [*lines, ""]


def causes() -> list[str]:
    """The table of causes and remedies."""
    lines = ["| cause | what to do |", "|---|---|"]
    lines += [f"| {cause.text} (`{cause.name}`) | {cause.remedy} |" for cause in CAUSES.values()]
    return ["", '<div class="causes" markdown="1">', "", *lines, "", "</div>", ""]


def rendered(page: str) -> str:
    """The page with both parts as they are now."""
    return written("causes", causes(), written("kinds", symptoms(), page))


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
