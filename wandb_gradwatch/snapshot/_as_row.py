"""One sample as plain numbers under the keys of a W&B row, for trackers other than W&B."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from . import keys

if TYPE_CHECKING:
    from ._snapshot import Snapshot

# S samples, P watched parameters

_FAMILIES: Final = (  # of keys; each is the name of a property [S, P], too
    *(keys.LAYER_GRAD_NORM, keys.LAYER_GRAD_PARAM_RATIO, keys.LAYER_PARAM_NORM),
    *(keys.LAYER_DEAD_RATIO, keys.LAYER_NUM_NONFINITE),
)


def row_of(snapshot: Snapshot, step: int | None) -> dict[str, float]:
    """Return the numbers of one sample; see `Snapshot.as_row`."""
    if not len(snapshot):
        raise ValueError("as_row() needs a sample, but the snapshot has none")
    places = np.flatnonzero(snapshot.steps == step) if step is not None else [len(snapshot) - 1]
    if not len(places):
        first, last = snapshot.steps[0], snapshot.steps[-1]
        raise ValueError(f"as_row(step={step!r}): no sample of this step; the snapshot has steps {first} to {last}")
    place = int(places[0])
    total = snapshot.total
    of_model = {
        keys.GRAD_NORM: snapshot.total_grad_norm,
        keys.GRAD_NORM_CLIPPED: snapshot.total_grad_norm_clipped,
        keys.PARAM_NORM: total.param_norm,
        keys.DEAD_RATIO: total.dead_ratio,
        keys.NUM_NAN: total.num_nan,
        keys.NUM_INF: total.num_inf,
        keys.LOSS_SCALE: snapshot.loss_scale,
    }
    row = {key: float(values[place].item()) for key, values in of_model.items() if values.size}
    own = (keys.LOSS, keys.LEARNING_RATE)  # of the sample; others are those of the window, or facts of the judgement
    row |= {
        keys.in_key(key): float(values_S[place])
        for key, values_S in snapshot.metrics.items()
        if key in own or not (key.startswith(keys.PREFIX) or keys.is_count(key))
    }
    for family in _FAMILIES:
        values_P = getattr(snapshot, family)[place].tolist()
        row |= zip(keys.layer_keys(family, snapshot.names), values_P, strict=True)
    return {keys.STEP: int(snapshot.steps[place])} | {key: value for key, value in row.items() if value == value}
