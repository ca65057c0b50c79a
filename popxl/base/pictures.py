"""Pictures of memory and time, written as SVG. Nothing has to be installed to draw or to see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape

from popxl.base.pages import Picture, bytes_text, seconds_text

_WIDTH, _LEFT, _RIGHT, _TOP = 860, 90, 20, 36
_COLOURS = 10
_LIGHT = {
    "paper": "#fff", "ink": "#333b47", "always": "#3f6e9f", "held": "#8fb2d3", "within": "#ecc193",
    "v0": "#8fb2d3", "v1": "#a8c5de", "v2": "#7aa2c8", "v3": "#bdd3e7",
    "c0": "#4878a8", "c1": "#e08a3c", "c2": "#5a9e6f", "c3": "#c25b56",
    "c4": "#8d6cab", "c5": "#8c6d5a", "c6": "#d287b5", "c7": "#7f7f7f", "c8": "#b3a33e", "c9": "#4fa8b3",
}  # fmt: skip
_DARK = {
    "paper": "#14181d", "ink": "#c3ccd8", "always": "#4f84bb", "held": "#4c6f92", "within": "#8a6335",
    "v0": "#4c6f92", "v1": "#5a7fa4", "v2": "#41617f", "v3": "#688eb4",
}  # fmt: skip


def _rules(fills: Mapping[str, str], lines: str) -> str:
    """CSS rules for shape classes, scoped to pictures, since notebooks have classes too."""
    fill = " ".join(f".popxl .{name} {{ fill: {colour} }}" for name, colour in fills.items())
    return f"{fill} .popxl .grid {{ stroke: {lines} }} .popxl .bar {{ stroke: {fills['paper']}; stroke-width: 0.5 }}"


_STYLE = (
    ".popxl .nothing { fill: transparent } .popxl .value:hover, .popxl .bar:hover { fill: #f0b64f } "
    f"{_rules(_LIGHT, '#e1e5ea')} "
    f"@media (prefers-color-scheme: dark) {{ {_rules(_DARK, '#2b323b')} }}"
)

Bar = tuple[str, str, float, float]
"""A lane, a name, a start and an end."""

Scale = Callable[[float], float]


SHOWN = 200
"""How many values are drawn one by one: the large ones that are held for long. The others are one layer."""

Held = tuple[str, int, int, int]
"""A name, a size, the first step during which it is held, and the first one during which it is not any more."""


def steps(
    title: str, below: int, lower: Sequence[int], upper: Sequence[int], names: Sequence[str], lives: Iterable[Held] = ()
) -> Picture:
    """Bytes over the steps of a program, in three layers.

    Args:
        title: what to write above.
        below: what is there all the time: the layer at the bottom.
        lower: what is held at each step, on top of that.
        upper: what each step needs by itself, on top of that.
        names: what each step is; the picture says so where one points.
        lives: the values that are held: each is a part of the second layer.
    """
    height, base = 320, 280
    held = [below + a for a in lower]
    totals = [a + b for a, b in zip(held, upper, strict=True)]
    ticks = _ticks(max(totals, default=below))
    across, up = _scale(len(lower) or 1, _LEFT, _WIDTH - _RIGHT), _scale(ticks[-1], base, _TOP)

    def area(first: int, bottoms: Sequence[float], tops: Sequence[float], style: str, tip: str = "") -> str:
        there = _corners(first, tops, across, up)
        back = reversed(_corners(first, bottoms, across, up))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*there, *back))
        return f'<polygon points="{points}" class="{style}">{f"<title>{escape(tip)}</title>" if tip else ""}</polygon>'

    parts = [_text(_LEFT, 20, title, "start", 13)]
    for value in ticks:
        parts += [
            _line(_LEFT, up(value), _WIDTH - _RIGHT, up(value)),
            _text(_LEFT - 8, up(value) + 4, bytes_text(value)),
        ]
    if lower:
        parts += [
            area(0, held, totals, "within"),
            area(0, [below] * len(lower), held, "held"),
            area(0, [0] * len(lower), [below] * len(lower), "always"),
        ]
        for i, (name, size, first, bottoms) in enumerate(_stacked(held, lives)):
            tip = f"{name}: {bytes_text(size)}, steps {first + 1} to {first + len(bottoms)}"
            parts.append(area(first, bottoms, [bottom + size for bottom in bottoms], f"value v{i % 4}", tip))
    if len(totals) <= 1000:  # above that one could not point at a step
        parts += [
            f'<rect x="{across(i):.1f}" y="{_TOP}" width="{across(1) - across(0):.1f}" '
            f'height="{up(held[i]) - _TOP:.1f}" class="nothing">'
            f"<title>{escape(f'{name}: {bytes_text(total)}')}</title></rect>"
            for i, (name, total) in enumerate(zip(names, totals, strict=True))
        ]
    legend = [("there all the time", "always"), ("held between steps", "held"), ("within a step", "within")]
    return _picture(height, [*parts, *_legend(legend, height - 16)])


def _stacked(held: Sequence[int], lives: Iterable[Held]) -> Iterator[tuple[str, int, int, list[int]]]:
    """Stack values by age, oldest at the bottom, above everything left undrawn; gives the lower edge at each step."""
    largest = sorted(lives, key=lambda life: -life[1] * (life[3] - life[2]))[:SHOWN]
    shown = sorted((life for life in largest if life[1] and life[3] > life[2]), key=lambda life: life[2])
    heights = [*held]
    for _, size, first, end in shown:
        for i in range(first, end):
            heights[i] -= size
    for name, size, first, end in shown:
        bottoms = heights[first:end]
        for i in range(first, end):
            heights[i] += size
        yield name, size, first, bottoms


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


def bars(title: str, spans: Iterable[Bar]) -> Picture:
    """Bars in lanes, over time in seconds."""
    spans = list(spans)
    lanes = list(dict.fromkeys(lane for lane, *_ in spans))
    names = list(dict.fromkeys(name for _, name, *_ in spans))
    colours = {name: f"c{i % _COLOURS}" for i, name in enumerate(names)}
    base = _TOP + 34 * len(lanes)
    rows = -(-len(names) // 2)
    ticks = _ticks(max((end for *_, end in spans), default=1.0))
    across = _scale(ticks[-1], _LEFT, _WIDTH - _RIGHT)
    parts = [_text(_LEFT, 20, title, "start", 13)]
    for value in ticks:
        parts += [
            _line(across(value), _TOP, across(value), base),
            _text(across(value), base + 16, seconds_text(value), "middle"),
        ]
    parts += [_text(_LEFT - 8, _TOP + 34 * i + 21, lane) for i, lane in enumerate(lanes)]
    for lane, name, start, end in spans:
        parts.append(
            f'<rect x="{across(start):.2f}" y="{_TOP + 34 * lanes.index(lane) + 4}" '
            f'width="{max(across(end) - across(start), 0.5):.2f}" height="26" class="bar {colours[name]}">'
            f"<title>{escape(f'{name}: {seconds_text(end - start)}')}</title></rect>"
        )
    for row in range(rows):
        shown = [(_shortened(name), colours[name]) for name in names[2 * row : 2 * row + 2]]
        parts += _legend(shown, base + 42 + 18 * row, 380)
    return _picture(base + 36 + 18 * rows, parts)


# Pieces of a picture -------------------------------------------------------------------------------------------------


def _picture(height: float, parts: Sequence[str]) -> Picture:
    body = "\n".join(parts)
    return Picture(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'class="popxl" font-family="sans-serif">\n<style>{_STYLE}</style>\n'
        f'<rect width="100%" height="100%" class="paper"/>\n{body}\n</svg>\n'
    )


def _scale(highest: float, start: float, end: float) -> Scale:
    return lambda value: start + (end - start) * value / highest


def _ticks(highest: float) -> list[float]:
    """Four to nine round axis ticks from 0 to at least the maximum."""
    if highest <= 0:
        return [0, 1]
    size = 10.0 ** math.floor(math.log10(highest))
    step = next(size * part for part in (0.2, 0.5, 1, 2) if highest <= 8 * size * part)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid"/>'


def _text(x: float, y: float, text: str, anchor: str = "end", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" class="ink">{escape(text)}</text>'


def _legend(entries: Sequence[tuple[str, str]], y: float, width: float = 255) -> list[str]:
    parts = []
    for i, (name, style) in enumerate(entries):
        x = _LEFT + width * i
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" class="{style}"/>')
        parts.append(_text(x + 16, y, name, "start"))
    return parts


def _shortened(name: str) -> str:
    return name if len(name) <= 56 else f"{name[:55]}…"
