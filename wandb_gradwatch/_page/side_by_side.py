"""What the page of several runs carries: the first run beside each of the others."""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from ..snapshot import keys
from .compare import Comparison, compare, differing_settings, sentence
from .formatting import WORDS
from .grids import empty_grid
from .history import OwnSeries, RunHistory, natural_order
from .packing import Blob
from .payload import MAX_POINTS, describe_run, own_role
from .pooling import picture_width, pool, pool_extremes, pool_steps
from .safe_text import visible
from .verdict import judge

MAX_RUNS: Final = 8  # lines of more runs could not be told apart
MAX_CELLS: Final = 500_000  # of one layers x steps matrix, of which each run has one
_OWN_STRIPS: Final = 4  # strips of the user's own scalars that are drawn at once


def build_comparison(histories: Sequence[RunHistory]) -> tuple[dict[str, Any], Blob]:
    """Everything the page of several runs needs, as (JSON-able content, bytes).

    Raises:
        ValueError: there are too many runs, or one has no layer or no step in common with the first.
    """
    if len(histories) > MAX_RUNS:
        raise ValueError(f"{len(histories)} runs are too many for one page; give at most {MAX_RUNS}")
    blob = Blob()
    letters = string.ascii_uppercase[: len(histories)]
    pairs = [
        _pair(compare(histories[0], other), letters[0], letter, blob)
        for letter, other in zip(letters[1:], histories[1:], strict=True)
    ]
    content = {
        "run": {"id": "+".join(history.run_id for history in histories), "name": " and ".join(letters)},
        "notes": [
            f"{letter}: {note}" for letter, history in zip(letters, histories, strict=True) for note in history.notes
        ],
        "words": {key: asdict(words) for key, words in WORDS.items()},
        "alerts": [],
        "steps": sorted(
            {step for history in histories for step in (*history.steps[:1].tolist(), *history.steps[-1:].tolist())}
        ),
        "axes": [],  # time and the like are each run's own
        "own": {"axes": [], "items": []},
        "grids": [empty_grid()],
        "runs": [
            {
                "letter": letter,
                **describe_run(history),
                "verdict": asdict(judge(history)),
                "numLayers": len(history.names),
                "lastStep": int(history.steps[-1]) if len(history.steps) else None,
            }
            for letter, history in zip(letters, histories, strict=True)
        ],
        "settings": [
            [key, *map(_setting, values)]
            for key, values in differing_settings(*(one.config for one in histories)).items()
        ],
        "strips": _strips(histories, blob),
        "pairs": pairs,
    }
    return visible(content), blob


def _pair(found: Comparison, first: str, second: str, blob: Blob) -> dict[str, Any]:
    width = picture_width(len(found.steps), len(found.names), MAX_CELLS)
    norms = [pool(norm.T, width, keys.LAYER_GRAD_NORM_MAX).T for norm in found.norms]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(np.isinf(norms[0]) | np.isinf(norms[1]), np.inf, norms[1] / norms[0])
    ratio[(norms[0] == 0) & np.isfinite(norms[1])] = np.nan
    matrices = {"ratio": ratio, first: norms[0], second: norms[1]}
    return {
        "key": "pair",
        "first": first,
        "second": second,
        "sentence": sentence(found, first, second),
        "alike": found.alike,
        "step": None if found.parting is None else found.parting.step,
        "name": None if found.parting is None else found.names.index(found.parting.name),
        "names": found.names,
        "onlyFirst": found.only_first,
        "onlySecond": found.only_second,
        "columns": [steps.tolist() for steps in pool_steps(found.steps, width)],
        "pooled": width,
        "metrics": [{"key": key, **blob.add_matrix(matrix)} for key, matrix in matrices.items()],
    }


def _setting(value: Any) -> str:
    return "not set" if value is None else str(value)


def _strips(histories: Sequence[RunHistory], blob: Blob) -> list[dict[str, Any]]:
    """The scalars that the runs share, each with one line per run: the norm, then the user's own by their roles."""
    norms = [
        OwnSeries(one.steps.astype(np.float64), one.first_of(keys.GRAD_NORM_MAX, keys.GRAD_NORM)) for one in histories
    ]
    strips = [_strip("gradient norm", "norm", norms, blob)]
    shared = set.intersection(*(set(history.own) for history in histories))
    order = {"loss": 0, "rate": 1, "": 2}
    for key in sorted(shared, key=lambda key: (order[own_role(key)], natural_order(key)))[:_OWN_STRIPS]:
        strips.append(_strip(key, own_role(key), [history.own[key] for history in histories], blob))
    return strips


def _strip(label: str, role: str, lines: Sequence[OwnSeries], blob: Blob) -> dict[str, Any]:
    pooled = [pool_extremes(line.steps, line.values, MAX_POINTS) for line in lines]
    return {
        "label": label,
        "role": role,
        "lines": [{"xs": steps.tolist(), "offset": blob.add_floats(values)} for steps, values in pooled],
    }
