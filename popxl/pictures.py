"""Pictures of memory and time, written as SVG. Nothing has to be installed to draw or to see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from popxl.pages import Picture, bytes_text, seconds_text

__all__ = ["Bar", "bars", "steps"]

_WIDTH, _LEFT, _RIGHT, _TOP = 860, 90, 20, 36
_COLOURS = ("#4878a8", "#e08a3c", "#5a9e6f", "#c25b56", "#8d6cab", "#8c6d5a", "#d287b5", "#7f7f7f")

Bar = tuple[str, str, float, float]
"""A lane, a name, a start and an end."""


def steps(title: str, below: int, lower: Sequence[int], upper: Sequence[int], names: Sequence[str]) -> Picture:
    """Bytes over the steps of a program, in three layers.

    Args:
        title: what to write above.
        below: what is there all the time: the layer at the bottom.
        lower: what is held at each step, on top of that.
        upper: what each step needs by itself, on top of that.
        names: what each step is; the picture says so where one points.
    """
    height, base = 320, 280
    highest = max((below + a + b for a, b in zip(lower, upper, strict=True)), default=below)
    ticks = _ticks(highest)
    across, up = _scale(len(lower) or 1, _LEFT, _WIDTH - _RIGHT), _scale(ticks[-1], base, _TOP)

    def area(heights: Sequence[int], colour: str) -> str:
        corners = [(across(i + k), up(value)) for i, value in enumerate(heights) for k in (0, 1)]
        points = [(across(0), base), *corners, (across(len(heights)), base)]
        return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" fill="{colour}"/>'

    totals = [below + a + b for a, b in zip(lower, upper, strict=True)]
    parts = [_text(_LEFT, 20, title, "start", 13)]
    for value in ticks:
        parts += [
            _line(_LEFT, up(value), _WIDTH - _RIGHT, up(value)),
            _text(_LEFT - 8, up(value) + 4, bytes_text(value)),
        ]
    parts += [
        area(totals, "#e9b98a"),
        area([below + a for a in lower], "#8fb2d3"),
        area([below] * len(lower), "#4878a8"),
    ]
    if len(totals) <= 1000:  # above that one could not point at a step
        parts += [
            f'<rect x="{across(i):.1f}" y="{_TOP}" width="{across(1) - across(0):.1f}" height="{base - _TOP}" '
            f'fill="transparent"><title>{escape(f"{name}: {bytes_text(total)}")}</title></rect>'
            for i, (name, total) in enumerate(zip(names, totals, strict=True))
        ]
    legend = [("there all the time", "#4878a8"), ("held between steps", "#8fb2d3"), ("within a step", "#e9b98a")]
    return _picture(height, [*parts, *_legend(legend, height - 16)])


def bars(title: str, spans: Iterable[Bar]) -> Picture:
    """Bars in lanes, over time in seconds."""
    spans = list(spans)
    lanes = list(dict.fromkeys(lane for lane, *_ in spans))
    names = list(dict.fromkeys(name for _, name, *_ in spans))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
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
            f'width="{max(across(end) - across(start), 0.5):.2f}" height="26" fill="{colours[name]}" stroke="white" '
            f'stroke-width="0.4"><title>{escape(f"{name}: {seconds_text(end - start)}")}</title></rect>'
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
        f'font-family="sans-serif">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _scale(highest: float, start: float, end: float):
    return lambda value: start + (end - start) * value / highest


def _ticks(highest: float) -> list[float]:
    """Round numbers from 0 up to one that is not below the highest: four to nine of them."""
    if highest <= 0:
        return [0, 1]
    size = 10.0 ** math.floor(math.log10(highest))
    step = next(size * part for part in (0.2, 0.5, 1, 2) if highest <= 8 * size * part)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, anchor: str = "end", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _legend(entries: Sequence[tuple[str, str]], y: float, width: float = 255) -> list[str]:
    parts = []
    for i, (name, colour) in enumerate(entries):
        x = _LEFT + width * i
        parts.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(x + 16, y, name, "start"))
    return parts


def _shortened(name: str) -> str:
    return name if len(name) <= 56 else f"{name[:55]}…"
