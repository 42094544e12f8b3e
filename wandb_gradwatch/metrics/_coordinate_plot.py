"""The coordinate check as a picture: two panels over the widths, both axes logarithmic, one line per layer."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from .._measure.columns import FloatArray
    from ._coordinate_check import CoordinateCheck

_PANEL_WIDTH, _PANEL_HEIGHT, _MARGIN = 360, 280, 64
_LEGEND_WIDTH: Final = 260
_STYLE: Final = "font-family:sans-serif;font-size:12px"
_PANELS: Final = (("weight_change", "(Wₜ − W₀) xₜ"), ("input_change", "W₀ (xₜ − x₀)"))


def draw(check: CoordinateCheck) -> str:
    """The whole SVG."""
    colours = [f"hsl({360 * index / max(len(check.layers), 1):.0f} 65% 42%)" for index in range(len(check.layers))]
    height = max(_PANEL_HEIGHT + 2 * _MARGIN, 40 + 18 * (len(check.layers) + 2))
    width = 2 * (_PANEL_WIDTH + _MARGIN) + _LEGEND_WIDTH + _MARGIN
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" style="{_STYLE}">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for index, (quantity, title) in enumerate(_PANELS):
        sizes_WL: FloatArray = getattr(check, quantity)[:, -1]
        left = _MARGIN + index * (_PANEL_WIDTH + _MARGIN)
        parts += _panel(check.widths, sizes_WL, colours, f"{title} after {check.steps[-1]:.0f} steps", left)
    left = 2 * (_PANEL_WIDTH + _MARGIN) + _MARGIN // 2
    parts.append(f'<text x="{left}" y="48" font-weight="bold">layer: power of the width</text>')
    for index, (layer, power) in enumerate(zip(check.layers, check.growth(), strict=True)):
        y = 70 + 18 * index
        parts.append(f'<rect x="{left}" y="{y - 9}" width="10" height="10" fill="{colours[index]}"/>')
        parts.append(f'<text x="{left + 16}" y="{y}">{escape(layer)}: {power:+.2f}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _panel(widths: FloatArray, sizes_WL: FloatArray, colours: list[str], title: str, left: int) -> list[str]:
    positive = sizes_WL[sizes_WL > 0]
    low, high = (np.log10(positive.min()), np.log10(positive.max())) if positive.size else (-1.0, 0.0)
    low, high = np.floor(low), max(np.ceil(high), np.floor(low) + 1)
    first, last = np.log(widths.min()), np.log(widths.max())

    def x_of(value: float) -> float:
        return float(left + _PANEL_WIDTH * (np.log(value) - first) / (last - first))

    def y_of(value: float) -> float:
        return float(_MARGIN + _PANEL_HEIGHT * (high - np.log10(value)) / (high - low))

    bottom = _MARGIN + _PANEL_HEIGHT
    parts = [f'<text x="{left}" y="{_MARGIN - 16}" font-weight="bold">{escape(title)}</text>']
    for exponent in range(int(low), int(high) + 1):
        y = y_of(10.0**exponent)
        parts.append(f'<line x1="{left}" x2="{left + _PANEL_WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">1e{exponent}</text>')
    for width in widths:
        parts.append(f'<text x="{x_of(width):.1f}" y="{bottom + 18}" text-anchor="middle">{width:.0f}</text>')
    parts.append(f'<text x="{left + _PANEL_WIDTH / 2}" y="{bottom + 38}" text-anchor="middle">width</text>')
    for sizes_W, colour in zip(sizes_WL.T, colours, strict=True):
        points = " ".join(f"{x_of(w):.1f},{y_of(s):.1f}" for w, s in zip(widths, sizes_W, strict=True) if s > 0)
        if points:
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return parts
