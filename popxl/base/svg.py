"""Elements of SVG pictures: lines, texts, axes and the colours of light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

from popxl.base.pages import Picture

WIDTH, LEFT, RIGHT, TOP = 860, 90, 20, 36
COLOURS = 10
_LIGHT = {
    "paper": "#fff", "ink": "#333b47", "always": "#3f6e9f", "held": "#8fb2d3", "within": "#ecc193",
    "v0": "#8fb2d3", "v1": "#a8c5de", "v2": "#7aa2c8", "v3": "#bdd3e7",
    "c0": "#4878a8", "c1": "#e08a3c", "c2": "#5a9e6f", "c3": "#c25b56",
    "c4": "#8d6cab", "c5": "#8c6d5a", "c6": "#d287b5", "c7": "#7f7f7f", "c8": "#b3a33e", "c9": "#4fa8b3",
    "state": "#6b7a8c", "copies": "#a3b0bf", "moved": "#9467bd", "kept": "#3f7fc1", "gradients": "#4d9d6a",
    "recomputed": "#e5822f", "other": "#cfd6de",
}  # fmt: skip
_DARK = {
    "paper": "#14181d", "ink": "#c3ccd8", "always": "#4f84bb", "held": "#4c6f92", "within": "#8a6335",
    "v0": "#4c6f92", "v1": "#5a7fa4", "v2": "#41617f", "v3": "#688eb4",
    "state": "#5d6b7c", "copies": "#8291a3", "other": "#3a4552",
}  # fmt: skip


def _rules(fills: Mapping[str, str], lines: str) -> str:
    """CSS rules for shape classes, scoped to pictures, since notebooks have classes too."""
    fill = " ".join(f".popxl .{name} {{ fill: {colour} }}" for name, colour in fills.items())
    return f"{fill} .popxl .grid {{ stroke: {lines} }} .popxl .bar {{ stroke: {fills['paper']}; stroke-width: 0.5 }}"


AXES = ("#2e97a7", "#d0504a", "#b3a33e", "#8d6cab")
"""Colours of the axes of a mesh, the outermost first; `.all` is that of several axes."""

_STYLE = (
    ".popxl .nothing { fill: transparent } .popxl .value:hover, .popxl .bar:hover { fill: #f0b64f } "
    ".popxl .wire { stroke-width: 3 } .popxl .all { fill: #7f7f7f } "
    + " ".join(f".popxl .a{i} {{ fill: {colour}; stroke: {colour} }}" for i, colour in enumerate(AXES))
    + " "
    + f"{_rules(_LIGHT, '#e1e5ea')} "
    f"@media (prefers-color-scheme: dark) {{ {_rules(_DARK, '#2b323b')} }}"
)

Scale = Callable[[float], float]


def picture(height: float, parts: Sequence[str], style: str = "") -> Picture:
    """Complete SVG document with additional style rules."""
    body = "\n".join(parts)
    return Picture(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'class="popxl" font-family="sans-serif">\n<style>{_STYLE}{style}</style>\n'
        f'<rect width="100%" height="100%" class="paper"/>\n{body}\n</svg>\n'
    )


def scale(highest: float, start: float, end: float) -> Scale:
    return lambda value: start + (end - start) * value / highest


def ticks(highest: float) -> list[float]:
    """Four to nine round axis ticks from 0 to at least the maximum."""
    if highest <= 0:
        return [0, 1]
    size = 10.0 ** math.floor(math.log10(highest))
    step = next(size * part for part in (0.2, 0.5, 1, 2) if highest <= 8 * size * part)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid"/>'


def text(x: float, y: float, text: str, anchor: str = "end", size: int = 11, style: str = "ink") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text {place} class="{style}">{escape(text)}</text>'


def legend_entry(x: float, y: float, name: str, style: str) -> list[str]:
    """A square of the style, and its name."""
    return [f'<rect x="{x}" y="{y - 9}" width="10" height="10" class="{style}"/>', text(x + 16, y, name, "start")]


def legend(entries: Sequence[tuple[str, str]], y: float, width: float = 255) -> list[str]:
    return [part for i, entry in enumerate(entries) for part in legend_entry(LEFT + width * i, y, *entry)]


def area(
    across: Scale, up: Scale, first: int, bottoms: Sequence[float], tops: Sequence[float], style: str, tip: str = ""
) -> str:
    """The area between two lines of steps; the tip is shown under the pointer."""
    edges = (*_corners(first, tops, across, up), *reversed(_corners(first, bottoms, across, up)))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in edges)
    return f'<polygon points="{points}" class="{style}">{f"<title>{escape(tip)}</title>" if tip else ""}</polygon>'


def _corners(first: int, heights: Sequence[float], across: Scale, up: Scale) -> list[tuple[float, float]]:
    """The corners of a line of steps, those on straight parts left out."""
    corners: list[tuple[float, float]] = []
    for i, value in enumerate(heights):
        if i and heights[i - 1] == value:
            corners.pop()
        else:
            corners.append((across(first + i), up(value)))
        corners.append((across(first + i + 1), up(value)))
    return corners
