"""The page's colours, simulated for people with each kind of colour blindness."""

from __future__ import annotations

import json
import re
from itertools import combinations

import numpy as np
import pytest

from wandb_gradwatch._page.page import ASSETS

THEME = (ASSETS / "theme.js").read_text(encoding="utf-8")
STYLE = (ASSETS / "page.css").read_text(encoding="utf-8")
# Machado, Oliveira and Fernandes (2009), "A physiologically-based model for simulation of color vision deficiency",
# severity 1.0, on linear RGB.
SIMULATIONS = {
    "trichromat": np.eye(3),
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanope": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(rgb: object, eyes: str) -> np.ndarray:
    """Convert sRGB colours (0 to 255) to CIELAB as people with this colour vision see them: [N, 3]."""
    srgb = np.atleast_2d(np.asarray(rgb, dtype=np.float64)) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ np.asarray(SIMULATIONS[eyes]).T, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = seen @ to_xyz.T / [0.9505, 1.0, 1.089]
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.stack([116 * root[:, 1] - 16, 500 * (root[:, 0] - root[:, 1]), 200 * (root[:, 1] - root[:, 2])], axis=1)


def colours(name: str) -> list[list[int]]:
    found: list[list[int]] = json.loads(re.search(rf"const {name} = (\[.*\]);", THEME)[1])  # type: ignore[index]
    return found


def line_colours() -> list[list[list[int]]]:
    """Return the colours of the light theme, and those of the dark theme."""
    found = re.findall(r"--line-\d: #([0-9a-f]{6});", STYLE)
    rgb = [[int(one[place : place + 2], 16) for place in (0, 2, 4)] for one in found]
    return [rgb[:8], rgb[8:]]


@pytest.mark.parametrize("eyes", SIMULATIONS)
def test_larger_values_are_lighter_for_every_colour_vision(eyes: str) -> None:
    assert (np.diff(lab(colours("SEQUENTIAL"), eyes)[:, 0]) > 3).all()


@pytest.mark.parametrize("eyes", SIMULATIONS)
@pytest.mark.parametrize("name", ["DIVERGING_LIGHT", "DIVERGING_DARK"])
def test_values_above_and_below_the_usual_can_be_distinguished(name: str, eyes: str) -> None:
    seen = lab(colours(name), eyes)
    middle = len(seen) // 2
    away = np.linalg.norm(seen - seen[middle], axis=1)
    assert (np.diff(away[middle:]) > 0).all()
    assert (np.diff(away[: middle + 1]) < 0).all()
    # A difference of 2.3 can just be seen side by side. These colours are compared from memory.
    assert np.linalg.norm(seen[0] - seen[-1]) > 25


@pytest.mark.parametrize("eyes", SIMULATIONS)
@pytest.mark.parametrize("theme", [0, 1])
def test_lines_can_be_distinguished(theme: int, eyes: str) -> None:
    seen = lab(line_colours()[theme], eyes)
    assert len(seen) == 8
    # A difference of 2.3 can just be seen between areas side by side; thin lines need several times that.
    closest = min(np.linalg.norm(one - other) for one, other in combinations(seen, 2))
    assert closest > 15
