"""A fixed vocabulary of causes, and the recognition of its causes in the text of an alert."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

# cause -> (how a text names it, how a text names its remedy)
VOCABULARY: Final[dict[str, tuple[str, str]]] = {
    "learning rate": (
        r"learning rates? (is |was )?(far |much )?(too|that is too) (high|large)|too (high|large) a (learning rate|step)"
        r"|learning rate (rose|jumped|went up)|too large (a step|an update)",
        r"learning rate|warm-up|warmup",
    ),
    "initialisation": (
        r"initialisation|initial weights|weights (begin|start)",
        r"initialisation|Kaiming|Xavier|gain|initialise",
    ),
    "symmetry": (r"constant initialisation|same weights|equal (weights|units|gradients)|symmetr", r"random|initialis"),
    "depth": (r"through (the )?depth|with (the )?depth", r"residual|normalisation|gain"),
    "recurrence": (r"recurren|through time", r"clip|shorten|LSTM|GRU|orthogonal"),
    "saturation": (r"saturat", r"ReLU|GELU|residual|normalisation|scale"),
    "dead units": (r"dead (ReLU|unit|layer)|units? (that )?never fires?|never fire|switched off", r"learning rate|bias|LeakyReLU|GELU|dropout|mask"),
    "bad batch": (r"bad batch|one batch|(its|this|the) batch\b(?!es)|outlier", r"look at the batch|clip|the batch of|batch"),
    "data change": (
        r"data (has |have )?(changed|change)|change of (the )?(data|targets|task)|other data|distribution|new level",
        r"data|targets|labels|normalis",
    ),
    "data scale": (
        r"scale of (the )?(data|inputs|targets|loss)|(inputs|targets|data|loss) (are |is )?(not normalised|unnormalised|too large|of a large scale)"
        r"|unnormalised|summed|loss (is )?(multiplied|far too large)",
        r"normalis|divide|mean|reduction|scale",
    ),
    "reduction": (r"divided too often|loss('s)? reduction|divided (twice|too)|too small a loss|loss (is )?too small", r"reduction|divide|scale"),
    "invalid operation": (
        r"without a (finite )?derivative|0/0|log 0|sqrt at 0|division by (almost )?(0|zero)|invalid operation",
        r"epsilon|names the operation|eps\b",
    ),
    "loss or inputs": (r"\bthe loss\b.*inputs|inputs or the loss|loss or (the )?inputs|loss itself", r"loss|inputs|labels"),
    "backward": (r"backward (pass )?of|own backward|wrong backward|gradient hook|multiplies the gradient", r"backward|hook|gradcheck"),
    "overflow": (r"overflow|beyond the range|beyond float16", r"bfloat16|clip|learning rate|float32|epsilon"),
    "underflow": (r"underflow", r"GradScaler|loss scale|bfloat16"),
    "loss scale": (r"loss scale (is |was )?too high|scale.*too high", r"wait|bfloat16|clip|scale"),
    "unscale": (r"unscale_", r"unscale_"),
    "clipping": (r"clip\w* (is |was )?(far |much )?too (tight|low|small)|too (tight|small|low) a clip|(?<!without )(?<!no )clipping|maximum norm", r"clip|max_norm|raise"),
    "decay": (r"decay", r"decay"),
    "batch norm": (r"batch norm", r"GroupNorm|LayerNorm|batches of at least|larger batch|SyncBatchNorm|eps"),
    "attention": (r"attention", r"sqrt|QK|scale|mask|logits|normalis"),
    "routing": (r"rout(er|ing)|experts?\b", r"balanc|auxiliary|router|noise"),
    "optimizer": (
        r"(by|of|in) the (optimizer|update)\b.*(NaN|non-finite|state|eps)|optimizer('s)? (itself|state|eps|epsilon)|made by the optimizer|eps = 0|half precision",
        r"eps|float32|state|optimizer",
    ),
    "unowned": (r"no optimizer (owns|has|updates|steps|was given)|not (owned|in any optimizer|in the optimizer)|without an optimizer", r"add_param_group|build the optimizer|optimizer"),
    "stale optimizer": (r"model does not have|not (of|in|part of) the (watched )?model|rebuilt|another model|other tensors|replaced parameters", r"optimizer|build|after"),
    "zero_grad": (r"zero_grad\(\).*(forgotten|missing|not called|never)|forgotten zero_grad|gradients (are|were) (added|summed|accumulated|kept)|without zero_grad", r"zero_grad"),
    "zeroed": (r"zeroed (between|before|after)|gradients zeroed", r"zero_grad|before backward"),
    "unused": (r"frozen or unused|unused|does not use|does not reach|detach|no gradient reaches|constant loss", r"requires_grad|detach|no_grad|use of the output|exclude|loss"),
    "no step": (r"step\(\) (is |was )?(not|never)|no step\(\)|never steps|without (a |any )?(optimizer )?step|forgotten step|step\(\) (is )?(forgotten|missing)", r"step\(\)|learning rate"),
    "undone": (r"undoes|undone|written over|overwritten", r"load_state_dict|copies|copy|undo|overwr|wr[io]te?s? over"),
    "zero learning rate": (
        r"learning rate (is |was |of )?(0|zero|so small)|zero learning rate|updates? of 0|too (low|small) a learning rate|learning rate (that is )?(far )?too (low|small)",
        r"learning rate|schedule|step\(\)",
    ),
    "schedule": (r"schedul|ascend|negative learning rate", r"schedul|learning rate"),
    "sign": (r"sign of the loss|wrong sign|loss (is |was )?maximi[sz]ed|minimi[sz]es? minus|uphill", r"sign|minus|maximi"),
    "bad parameter": (r"(was|were) already non-finite|already NaN|broken parameter|weights that were (loaded|rescaled)", r"checkpoint"),
}  # fmt: skip
_WORDS: Final = {cause: re.compile(names, re.IGNORECASE) for cause, (names, _) in VOCABULARY.items()}


@dataclass(frozen=True)
class Named:
    """Return the causes that a text names, in order, and its remedy."""

    causes: tuple[str, ...]
    remedy: str


def read_causes(text: str) -> Named:
    """Return the text of the causes, between "Probable cause:" (or "Cause not clear:") and the remedy."""
    _, _, said = text.replace("\n", " ").partition("ause")
    cause, _, remedy = said.partition("Remedy:")
    # "either A or B: C tells them apart" and "A (evidence)": neither C nor the evidence is a cause.
    while (stripped := re.sub(r"\((?!\))[^()]*\)", "", cause)) != cause:
        cause = stripped
    cause = re.split(r"tells? them apart|; |\. ", cause)[0]
    places = {name: match.start() for name, words in _WORDS.items() if (match := words.search(cause))}
    return Named(tuple(sorted(places, key=lambda name: places[name])), remedy)


def fits_remedy(cause: str, remedy: str) -> bool:
    """Return whether the remedy matches this cause."""
    return bool(re.search(VOCABULARY[cause][1], remedy, re.IGNORECASE))
