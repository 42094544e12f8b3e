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


CAUSES: Final[dict[str, tuple[str, ...]]] = {}  # cause -> titles of the shipped rules' alerts that it can explain
APART: Final[dict[str, str]] = {}  # cause -> what tells it apart from another cause that the samples show as well


def _cause(name: str, *titles: str, apart: str = "") -> str:
    CAUSES[name] = titles
    if apart:
        APART[name] = apart
    return name


SILENCE, _NONFINITE = ("Vanishing gradient", "Dead gradient"), ("NaN gradient", "Inf gradient")
_EXPLOSION, _GROWTH = ("Exploding gradient", *_NONFINITE), "Parameters grow too fast"
_RISES = (_GROWTH, "Loss spike", "Non-finite loss")
_TRACED = 'watch(model, on_nonfinite="trace"), which names the first bad operation,'

LEARNING_RATE = _cause(
    "learning rate too high",
    *_EXPLOSION,
    "Loss scale collapse",
    *_RISES,
    apart="a run with a tenth of the learning rate",
)
_WEIGHTS = "the size of the weights at the first step"
INITIALISATION = _cause(
    "poor initialisation", *_EXPLOSION, *SILENCE, "Loss scale collapse", "Initial weights", apart=_WEIGHTS
)
DEPTH = _cause("explosion through depth", *_EXPLOSION, _GROWTH)
RECURRENCE = _cause("explosion through recurrence", *_EXPLOSION)
SATURATION = _cause("saturating activations", "Vanishing gradient")
BATCH_NORM = _cause("batch norm on small batches", *_EXPLOSION, *SILENCE)
UNDERFLOW = _cause("float16 underflow", *SILENCE, "No gradient")
SCALE = _cause("loss scale too high or values beyond float16", "Loss scale collapse")
DEAD_UNITS = _cause("dead units: ReLUs that never fire, or an output that is multiplied by 0 or not used", *SILENCE)
DYING = _cause(
    "a learning rate that is too high: its updates take the gradient from one unit after the other", *SILENCE
)
FROZEN = _cause("frozen or unused layers", "No gradient")
BAD_BATCH = _cause("one bad batch", "Exploding gradient", _GROWTH, apart="a look at that batch")
NONFINITE_BATCH = _cause("inputs or labels of the batch that are not finite", *_NONFINITE, apart=_TRACED)
NONFINITE_FORWARD = _cause("an invalid operation in the forward or in the loss (log 0, 0/0, an overflow)", *_NONFINITE)
OPTIMIZER = _cause("NaN made by the optimizer's update, by its state or its eps", *_NONFINITE)
UNMEASURED = _cause("not clear: parameters became NaN or Inf in a step that was not measured", *_NONFINITE)
DATA_SCALE = _cause(
    "a large scale of the inputs, targets or loss", *_EXPLOSION, _GROWTH, apart="the size of the loss at the first step"
)
INSIDE = _cause("an explosion inside the model, through depth or through recurrence", *_EXPLOSION, _GROWTH)
LARGE_DATA = _cause("a large scale of the inputs or the targets", *SILENCE)
LOSS_SCALE = _cause("the scale of the loss has changed", "Exploding gradient", _GROWTH, "Loss spike")
BACKWARD = _cause("something in the backward of a layer multiplies the gradient", "Exploding gradient")
_cause(UNBOUNDED[0], *_EXPLOSION, *SILENCE, _GROWTH, "Loss below 0")
DEVIATION = _cause("a batch norm, or another normalisation, of inputs that are nearly all alike", "Exploding gradient")
FADING = _cause("weights too small for the depth: poor initialisation", "Vanishing gradient")
WRITTEN = _cause("an optimizer's state that was lost, or weights that were loaded or rescaled", *_EXPLOSION, *_RISES)
LEAP = _cause("too large an update", *_EXPLOSION, *_RISES)
MULTIPLIED = _cause("a weight decay below 0, or a factor that multiplies all parameters", *_EXPLOSION, *_RISES)
FORWARD = _cause("activations beyond the range of float16", "Loss scale collapse")
BAD_RANK = _cause("one bad rank", *_EXPLOSION, "Loss scale collapse")
OVERFLOW = _cause("an overflow: values beyond the range of their type", *_NONFINITE)
INVALID = _cause(
    "an operation without a finite derivative", *_NONFINITE, "Non-finite loss", "Loss scale collapse", apart=_TRACED
)
