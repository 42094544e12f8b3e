"""The pictures of docs/alerts.md: for each title a training of the zoo, when its fault began, and when it was told.

python -m benchmarks.zoo.pictures
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from wandb_gradwatch import Snapshot

from .cases import CASES, SCORING_SEEDS
from .record import record

FOLDER: Final = Path(__file__).parent.parent.parent / "docs/pictures"
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 300, 96, 44, 14, 84  # of the picture; of the curves in it
_COLOURS: Final = ("#3b7dd8", "#d98b2b")  # to be read on white and on black

Values = npt.NDArray[np.float64]
Curve = Callable[[Snapshot], Values]


@dataclass(frozen=True)
class Picture:
    """The training that a picture shows, and its curves."""

    case: str
    curves: dict[str, Curve]


def _norm(snapshot: Snapshot) -> Values:
    return snapshot.total_grad_norm


def _parameters(snapshot: Snapshot) -> Values:
    return np.asarray(np.sqrt(np.nansum(snapshot.param_norm**2, axis=1)))


def _of(column: str, name: str) -> Curve:
    return lambda snapshot: np.asarray(getattr(snapshot, column)[:, snapshot.names.index(name)])


PICTURES: Final = {
    "NaN gradient": Picture(
        "division by a deviation of 0 at step 80 | MLP, squared error", {"gradient norm": _norm}
    ),
    "Exploding gradient": Picture("100x from step 120 | several tasks", {"gradient norm": _norm}),
    "Vanishing gradient": Picture(
        "24 sigmoid layers | MLP, SGD with momentum",
        {"norm of the last layer": _of("grad_norm", "50.weight"), "of the first": _of("grad_norm", "0.weight")},
    ),
    "Dead gradient": Picture(
        "biases pushed to -50 at step 120 | MLP, squared error",
        {"dead share of layer 2": _of("dead_ratio", "2.weight")},
    ),
    "No gradient": Picture(
        "a layer's output detached from step 100 | MLP, squared error",
        {"gradient norm of layer 2": _of("grad_norm", "2.weight"), "of layer 0": _of("grad_norm", "0.weight")},
    ),
    "Loss scale collapse": Picture(
        "activations 1e6 in float16 | float16, scaler", {"loss scale": lambda snapshot: snapshot.loss_scale}
    ),
    "Gradients not reset": Picture("zero_grad() forgotten | MLP, squared error", {"gradient norm": _norm}),
    "Parameters unchanged": Picture("learning rate of 0 | MLP, squared error", {"parameters' norm": _parameters}),
    "Initial weights": Picture(
        "one layer 100x | MLP, squared error",
        {"weights of layer 2": _of("param_norm", "2.weight"), "of layer 0": _of("param_norm", "0.weight")},
    ),
    "Parameters grow too fast": Picture(
        "restarts at 200x at step 120 | MLP, squared error", {"parameters' norm": _parameters}
    ),
    "Parameters shrink": Picture(
        "of 30, decoupled | transformer, warm-up and cosine", {"parameters' norm": _parameters}
    ),
    "Clipping too tight": Picture(
        "to a norm of 1e-5 | MLP, SGD with momentum",
        {"norm before clipping": _norm, "after": lambda snapshot: snapshot.total_grad_norm_clipped},
    ),
}  # fmt: skip


def file_name(title: str) -> str:
    return title.lower().replace(" ", "-") + ".svg"


def draw(steps: Values, curves: dict[str, Values], *, began: int, told: int) -> str:
    """One picture, logarithmic where the curves span more than a factor of 100: whole pixels, for a thousand bytes."""
    finite = np.concatenate([values[np.isfinite(values)] for values in curves.values()])
    positive = finite[finite > 0]
    is_log = bool(positive.size) and positive.max() > 100 * positive.min()
    scale: Callable[[float], float] = (lambda value: math.log10(max(value, positive.min()))) if is_log else float
    low, high = scale(float(finite.min())), scale(float(finite.max()))
    if high - low < 1e-3 * abs(high):  # a constant line is drawn in the middle
        low, high = low - 0.05 * abs(low), high + 0.05 * abs(high)
    first, last = float(steps[0]), float(steps[-1])

    def x(step: float) -> int:
        return round(_LEFT + (step - first) / max(last - first, 1.0) * (_WIDTH - _LEFT - 4))

    def y(value: float) -> int:
        return round(_BOTTOM - 2 - (scale(value) - low) / ((high - low) or 1.0) * (_BOTTOM - _TOP - 2))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'font-family="sans-serif" font-size="9" fill="#808080">',
        f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_WIDTH - 4}" fill="none" stroke="#808080"/>',
        *(
            f'<text x="{_LEFT - 3}" y="{place}" text-anchor="end">{_short(10**value if is_log else value)}</text>'
            for value, place in ((high, _TOP + 6), (low, _BOTTOM))
        ),
        f'<text x="{_LEFT}" y="{_HEIGHT - 2}">step {first:.0f}</text>'
        if x(told) > _WIDTH / 2
        else f'<text x="{_WIDTH - 4}" y="{_HEIGHT - 2}" text-anchor="end">step {last:.0f}</text>',
        f'<path d="M{x(began)} {_TOP}V{_BOTTOM}" stroke="#808080" stroke-dasharray="3"/>',
        f'<path d="M{x(told)} {_TOP}V{_BOTTOM}" stroke="#d83b3b"/>',
        f'<text x="{min(x(told), _WIDTH - 30)}" y="{_HEIGHT - 2}" text-anchor="middle" fill="#d83b3b">'
        f"told at {told}</text>",
    ]
    for place, (label, values) in enumerate(curves.items()):
        points = [(x(step), y(value)) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        line = " ".join(f"{at},{height}" for at, height in _thinned(points))
        colour = _COLOURS[place]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{_LEFT + place * 5 * (len(next(iter(curves))) + 2)}" y="9" fill="{colour}">{label}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def _short(value: float) -> str:
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-")


def _thinned(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Leave out points inside horizontal segments."""
    return [
        point
        for before, point, after in zip([(-1, -1), *points], points, [*points[1:], (-1, -1)], strict=False)
        if not before[1] == point[1] == after[1]
    ]


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for title, picture in PICTURES.items():
        recording = record(CASES[picture.case], SCORING_SEEDS[0])
        samples = recording.samples
        told = next((one.at for one in recording.told if one.alert.title == title), None)
        if samples is None or told is None or recording.first_bad is None:
            raise RuntimeError(
                f"{title!r} was not told of {picture.case!r}, but {[t.alert.title for t in recording.told]}"
            )
        curves = {label: curve(samples) for label, curve in picture.curves.items()}
        svg = draw(samples.steps.astype(float), curves, began=recording.first_bad, told=max(told, 1))
        (FOLDER / file_name(title)).write_text(svg, encoding="utf-8")
        print(f"{title}: {len(svg)} bytes")


if __name__ == "__main__":
    main()
