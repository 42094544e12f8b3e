"""What comparisons of ranks show. Ranks may differ on purpose: then nothing is said.

The facts are those of `keys.REPLICA_FACTS`, which samples have only while ranks differ, and what `Ranks()` has compared
bit by bit, which is remembered from one checksum to the next.
"""

from __future__ import annotations

import numpy as np

from .._measure.columns import BoolArray
from ..snapshot import keys
from .facts import Facts

_SURE = 3  # compared steps in a row
_LONG = 50  # steps without averaging
_MAX_NAMED = 5  # ranks


def _of(facts: Facts, name: str) -> float:
    return facts.fact(f"replicas_{name}")


def _may_be_judged(facts: Facts) -> bool:
    return facts.fact("replicas") > 1 and not _of(facts, "on_purpose") > 0


def others_gradient(facts: Facts) -> bool:
    """Whether some ranks apply other gradients than the rest, which is averaged; or all do, after the averaging."""
    if not _may_be_judged(facts) or not _of(facts, "gradients") > 0:
        return False
    if _of(facts, "gradients_num") > 0 or _of(facts, "left_equal") > 0.5:
        return True
    if _of(facts, "by_ddp") > 0 or facts.metric(keys.CLIPPED) > 0:
        return False
    # Experts have gradients of their own, but nothing changes only these.
    return _of(facts, "gradients") < 0.5 and _of(facts, "changed") > 0.5


def never_averaged(facts: Facts) -> bool:
    """Whether all ranks have applied gradients of their own, although DistributedDataParallel holds the parameters."""
    is_meant = _may_be_judged(facts) and _of(facts, "by_ddp") > 0 and not others_gradient(facts)
    return is_meant and not _of(facts, "gradients_num") > 0 and _of(facts, "num_different") >= _SURE


def averaged_by_nothing(facts: Facts) -> bool:
    """The same without DistributedDataParallel, for so long that nothing averages parameters either."""
    if not _may_be_judged(facts) or others_gradient(facts) or _of(facts, "gradients_num") > 0:
        return False
    is_always = _of(facts, "num_different") == _of(facts, "num_compared") and _of(facts, "gradients") >= 0.5
    steps = _of(facts, "step") - _of(facts, "different_since")
    return is_always and _of(facts, "begun") == 0 and steps >= _LONG and not _of(facts, "uneven") > 0


def began_apart(facts: Facts) -> bool:
    """Whether parameters differed at the first sample, though ranks apply the same gradients to them."""
    return _may_be_judged(facts) and _of(facts, "begun") > 0 and _of(facts, "begun_averaged") > 0.5


def moved_apart(facts: Facts) -> bool:
    """Whether parameters differ that began alike and get the same gradients, at least now."""
    if facts.run.apart_ranks and not facts.fact("replicas") > 1:
        return True
    if not _may_be_judged(facts) or _of(facts, "begun") > 0 or not _of(facts, "averaged") > 0.5:
        return False
    # If the averaging was left out in some steps, a few more show it.
    is_clear = not _of(facts, "num_different") > 0 or not _of(facts, "by_ddp") > 0 or _of(facts, "parameters_num") > 0
    return is_clear and not others_gradient(facts)


def has_lost(facts: Facts) -> bool:
    """Whether the averaged gradient lacks what one rank has contributed, while it is usually right."""
    return facts.ranks(keys.LOST_RANK) >= 0 and facts.run.num_exact > facts.run.num_inexact


def said_of_average(facts: Facts) -> str:
    """What was seen of the average over ranks, in words."""
    return f"the averaged gradient lacks what rank {facts.ranks(keys.LOST_RANK):.0f} has contributed"


def named_P(facts: Facts) -> BoolArray | bool:
    """The parameters that are concerned: [P]; True if that are most of them."""
    begin, metrics = keys.REPLICA_APART, facts.snapshot.metrics
    names = {key.removeprefix(begin) for key in metrics if key.startswith(begin) and facts.metric(key) > 0}
    named_P = np.array([name in names for name in facts.structure.names])
    return named_P if named_P.any() else True


def rank_of(facts: Facts) -> int | None:
    """The only rank that differs from most others; None if there are several, or only two ranks."""
    if has_lost(facts):
        return int(facts.ranks(keys.LOST_RANK))
    for name in ("gradients", "parameters"):
        if _of(facts, f"{name}_num") == 1:
            return int(_of(facts, f"{name}_rank"))
    return facts.run.apart_ranks[0] if len(facts.run.apart_ranks) == 1 else None


def since(facts: Facts) -> int:
    """The first compared step in which ranks differed."""
    if has_lost(facts):
        return facts.step
    if not facts.fact("replicas") > 1:
        return facts.run.apart_step
    name = "different_since" if _of(facts, "num_different") > 0 else "parameters_since"
    return int(_of(facts, name))


def said_of_gradients(facts: Facts) -> str:
    """What was seen of the gradients, in words."""
    num, which = f"{facts.fact('replicas'):.0f} ranks", _who(facts, "gradients")
    fact = f"{which} applied another gradient than most of {num}" if which else f"{num} applied different gradients"
    if _of(facts, "left_equal") > 0.5:
        fact += ", although the backward had left equal ones"
    num_different, num_compared = _of(facts, "num_different"), _of(facts, "num_compared")
    return f"{fact}, in {num_different:.0f} of {num_compared:.0f} compared steps, from step {since(facts)} on"


def said_of_parameters(facts: Facts) -> str:
    """What was seen of the parameters, in words."""
    num = f"{facts.fact('replicas'):.0f} ranks"
    if began_apart(facts):
        return f"the parameters of {num} differed in the first sample, at step {since(facts)}"
    which = _who(facts, "parameters") or _named(facts.run.apart_ranks)
    told = f"{which} are not those that most ranks have" if which else f"{num} differ"
    return f"the parameters of {told}, since step {since(facts)}"


def _who(facts: Facts, what: str) -> str:
    """The ranks that differ from most others, in words; "" if there are none."""
    num, first = _of(facts, f"{what}_num"), _of(facts, f"{what}_rank")
    if not num > 0:
        return ""
    return f"rank {first:.0f}" if num == 1 else f"{num:.0f} ranks, the first of them rank {first:.0f},"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_MAX_NAMED]))}" if ranks else ""
