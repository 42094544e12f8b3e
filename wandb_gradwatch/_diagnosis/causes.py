"""The names of the probable causes, the alerts that each can explain, and the Diagnosis of one cause."""

from dataclasses import dataclass
from typing import Final

from ..rules._loss import UNBOUNDED


@dataclass(frozen=True)
class Diagnosis:
    """One probable cause of a fault.

    Args:
        cause: what probably went wrong; one of the CAUSES.
        confidence: between 0 and 1, to rank causes; not a probability.
        evidence: what the samples show, with numbers.
        remedy: what to do about the cause.
        rival: another cause with the same evidence, and what tells the two apart; "" if the evidence is for this cause
            alone.
        also: titles of further alerts that this diagnosis explains, besides those of its cause in CAUSES.
    """

    cause: str
    confidence: float
    evidence: str
    remedy: str
    rival: str = ""
    also: tuple[str, ...] = ()

    def explains(self, title: str) -> bool:
        """Whether an alert of this title may have this cause."""
        return title in CAUSES[self.cause] or title in self.also

    def __str__(self) -> str:
        return f"{self.in_words}. Remedy: {self.remedy}."

    @property
    def in_words(self) -> str:
        """The cause with its evidence and its rival, as a text."""
        words = f"{self.cause} ({self.evidence})"
        return f"not clear: either {words}, or {self.rival}" if self.rival else words


LEARNING_RATE = "learning rate too high"
INITIALISATION = "poor initialisation"
DEPTH = "explosion through depth"
RECURRENCE = "explosion through recurrence"
SATURATION = "saturating activations"
BATCH_NORM = "batch norm on small batches"
UNDERFLOW = "float16 underflow"
SCALE = "loss scale too high or values beyond float16"
DEAD_UNITS = "dead units: ReLUs that never fire, or an output that is multiplied by 0 or not used"
DYING = "a learning rate that is too high: its updates take the gradient from one unit after the other"
FROZEN = "frozen or unused layers"
BAD_BATCH = "one bad batch"
BAD_RANK = "one bad rank"
NONFINITE_BATCH = "inputs or labels of the batch that are not finite"
NONFINITE_FORWARD = "an invalid operation in the forward or in the loss (log 0, 0/0, an overflow)"
OPTIMIZER = "NaN made by the optimizer's update, by its state or its eps"
WRITTEN = "an optimizer's state that was lost, or weights that were loaded or rescaled"
LEAP = "too large an update"
UNMEASURED = "not clear: parameters became NaN or Inf in a step that was not measured"
DATA_SCALE = "a large scale of the inputs, targets or loss"
INSIDE = "an explosion inside the model, through depth or through recurrence"
LARGE_DATA = "a large scale of the inputs or the targets"
LOSS_SCALE = "the scale of the loss has changed"
BACKWARD = "something in the backward of a layer multiplies the gradient"
MULTIPLIED = "a weight decay below 0, or a factor that multiplies all parameters"
DEVIATION = "a batch norm, or another normalisation, of inputs that are nearly all alike"
FADING = "weights too small for the depth: poor initialisation"
FORWARD = "activations beyond the range of float16"
OVERFLOW = "an overflow: values beyond the range of their type"
INVALID = "an operation without a finite derivative"

# cause -> titles of the shipped rules' alerts that it can explain
_EXPLOSION, SILENCE = ("Exploding gradient", "NaN gradient", "Inf gradient"), ("Vanishing gradient", "Dead gradient")
CAUSES: Final[dict[str, tuple[str, ...]]] = {
    LEARNING_RATE: (*_EXPLOSION, "Loss scale collapse", "Parameters grow too fast", "Loss spike", "Non-finite loss"),
    INITIALISATION: (*_EXPLOSION, *SILENCE, "Loss scale collapse", "Initial weights"),
    DEPTH: (*_EXPLOSION, "Parameters grow too fast"),
    RECURRENCE: _EXPLOSION,
    SATURATION: ("Vanishing gradient",),
    BATCH_NORM: (*_EXPLOSION, *SILENCE),
    UNDERFLOW: (*SILENCE, "No gradient"),
    SCALE: ("Loss scale collapse",),
    DEAD_UNITS: SILENCE,
    DYING: SILENCE,
    FROZEN: ("No gradient",),
    BAD_BATCH: ("Exploding gradient", "Parameters grow too fast"),
    NONFINITE_BATCH: ("NaN gradient", "Inf gradient"),
    NONFINITE_FORWARD: ("NaN gradient", "Inf gradient"),
    OPTIMIZER: ("NaN gradient", "Inf gradient"),
    UNMEASURED: ("NaN gradient", "Inf gradient"),
    DATA_SCALE: (*_EXPLOSION, "Parameters grow too fast"),
    INSIDE: (*_EXPLOSION, "Parameters grow too fast"),
    LARGE_DATA: SILENCE,
    LOSS_SCALE: ("Exploding gradient", "Parameters grow too fast", "Loss spike"),
    BACKWARD: ("Exploding gradient",),
    UNBOUNDED[0]: (*_EXPLOSION, *SILENCE, "Parameters grow too fast", "Loss below 0"),
    DEVIATION: ("Exploding gradient",),
    FADING: ("Vanishing gradient",),
    **dict.fromkeys(
        (WRITTEN, LEAP, MULTIPLIED), (*_EXPLOSION, "Parameters grow too fast", "Loss spike", "Non-finite loss")
    ),
    FORWARD: ("Loss scale collapse",),
    BAD_RANK: (*_EXPLOSION, "Loss scale collapse"),
    OVERFLOW: ("NaN gradient", "Inf gradient"),
    INVALID: ("NaN gradient", "Inf gradient", "Non-finite loss", "Loss scale collapse"),
}

# cause -> what tells it apart from another cause that the samples show as well
APART: Final = {
    NONFINITE_BATCH: 'watch(model, on_nonfinite="trace"), which names the first bad operation,',
    INVALID: 'watch(model, on_nonfinite="trace"), which names the first bad operation,',
    DATA_SCALE: "the size of the loss at the first step",
    LEARNING_RATE: "a run with a tenth of the learning rate",
    INITIALISATION: "the size of the weights at the first step",
    BAD_BATCH: "a look at that batch",
}
