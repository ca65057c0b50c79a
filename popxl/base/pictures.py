"""Pictures of memory and time, written as SVG without further packages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from html import escape

from popxl.base import svg
from popxl.base.pages import Picture, bytes_text, seconds_text

Bar = tuple[str, str, float, float]
"""A lane, a name, a start and an end."""

SHOWN = 200
"""Maximum number of values drawn separately, largest products of size and lifetime first; one layer shows the rest."""

Held = tuple[str, int, int, int]
"""Live value: name, bytes, first step, and first step after its last use."""


def steps(
    title: str, below: int, lower: Sequence[int], upper: Sequence[int], names: Sequence[str], lives: Iterable[Held] = ()
) -> Picture:
    """Bytes over the steps of a program, in three layers.

    Args:
        title: title above the picture.
        below: constant part, the layer at the bottom.
        lower: live bytes at each step, on top of that.
        upper: temporary bytes of each step, on top of that.
        names: name of each step, shown under the pointer.
        lives: live values: each is a part of the second layer.
    """
    height, base = 320, 280
    live = [below + a for a in lower]
    totals = [a + b for a, b in zip(live, upper, strict=True)]
    ticks = svg.ticks(max(totals, default=below))
    across, up = svg.scale(len(lower) or 1, svg.LEFT, svg.WIDTH - svg.RIGHT), svg.scale(ticks[-1], base, svg.TOP)
    area = partial(svg.area, across, up)
    elements = [svg.text(svg.LEFT, 20, title, "start", 13)]
    for value in ticks:
        elements += [
            svg.line(svg.LEFT, up(value), svg.WIDTH - svg.RIGHT, up(value)),
            svg.text(svg.LEFT - 8, up(value) + 4, bytes_text(value)),
        ]
    if lower:
        elements += [
            area(0, live, totals, "within"),
            area(0, [below] * len(lower), live, "held"),
            area(0, [0] * len(lower), [below] * len(lower), "always"),
        ]
        for i, (name, size, first, bottoms) in enumerate(_stacked(live, lives)):
            tip = f"{name}: {bytes_text(size)}, steps {first + 1} to {first + len(bottoms)}"
            elements.append(area(first, bottoms, [bottom + size for bottom in bottoms], f"value v{i % 4}", tip))
    if len(totals) <= 1000:  # above that one could not point at a step
        elements += [
            f'<rect x="{across(i):.1f}" y="{svg.TOP}" width="{across(1) - across(0):.1f}" '
            f'height="{up(live[i]) - svg.TOP:.1f}" class="nothing">'
            f"<title>{escape(f'{name}: {bytes_text(total)}')}</title></rect>"
            for i, (name, total) in enumerate(zip(names, totals, strict=True))
        ]
    legend = [("there all the time", "always"), ("held between steps", "held"), ("within a step", "within")]
    return svg.picture(height, [*elements, *svg.legend(legend, height - 16)])


def _stacked(live: Sequence[int], lives: Iterable[Held]) -> Iterator[tuple[str, int, int, list[int]]]:
    """Stack values by age, oldest at the bottom, above everything left undrawn; gives the lower edge at each step."""
    largest = sorted(lives, key=lambda life: -life[1] * (life[3] - life[2]))[:SHOWN]
    drawn = sorted((life for life in largest if life[1] and life[3] > life[2]), key=lambda life: life[2])
    heights = [*live]
    for _, size, first, end in drawn:
        for i in range(first, end):
            heights[i] -= size
    for name, size, first, end in drawn:
        bottoms = heights[first:end]
        for i in range(first, end):
            heights[i] += size
        yield name, size, first, bottoms


def bars(title: str, spans: Iterable[Bar]) -> Picture:
    """Bars in lanes, over time in seconds."""
    spans = list(spans)
    lanes = list(dict.fromkeys(lane for lane, *_ in spans))
    names = list(dict.fromkeys(name for _, name, *_ in spans))
    colours = {name: f"c{i % svg.COLOURS}" for i, name in enumerate(names)}
    base = svg.TOP + 34 * len(lanes)
    rows = -(-len(names) // 2)
    ticks = svg.ticks(max((end for *_, end in spans), default=1.0))
    across = svg.scale(ticks[-1], svg.LEFT, svg.WIDTH - svg.RIGHT)
    elements = [svg.text(svg.LEFT, 20, title, "start", 13)]
    for value in ticks:
        elements += [
            svg.line(across(value), svg.TOP, across(value), base),
            svg.text(across(value), base + 16, seconds_text(value), "middle"),
        ]
    elements += [svg.text(svg.LEFT - 8, svg.TOP + 34 * i + 21, lane) for i, lane in enumerate(lanes)]
    for lane, name, start, end in spans:
        elements.append(
            f'<rect x="{across(start):.2f}" y="{svg.TOP + 34 * lanes.index(lane) + 4}" '
            f'width="{max(across(end) - across(start), 0.5):.2f}" height="26" class="bar {colours[name]}">'
            f"<title>{escape(f'{name}: {seconds_text(end - start)}')}</title></rect>"
        )
    for row in range(rows):
        entries = [(_shortened(name), colours[name]) for name in names[2 * row : 2 * row + 2]]
        elements += svg.legend(entries, base + 42 + 18 * row, 380)
    return svg.picture(base + 36 + 18 * rows, elements)


def scatter(title: str, below: str, beside: str, points: Iterable[tuple[str, str, float, float]]) -> Picture:
    """Points of two times each, over logarithmic axes, with the line where both are equal.

    Args:
        title, below, beside: title of the picture, and labels of both axes.
        points: kind (which is a colour), name, and both times in seconds, for each point.
    """
    points = list(points)
    kinds = list(dict.fromkeys(kind for kind, *_ in points))
    times = [time for _, _, *both in points for time in both] or [1.0]
    first, last = math.floor(math.log10(min(times))), math.floor(math.log10(max(times))) + 1
    base = 500

    def position(time: float, start: float, end: float) -> float:
        return start + (end - start) * (math.log10(time) - first) / (last - first)

    across, up = (
        partial(position, start=a, end=b) for a, b in ((svg.LEFT, svg.LEFT + base - svg.TOP), (base, svg.TOP))
    )
    low, high = 10.0**first, 10.0**last
    right = across(high)
    elements = [svg.text(svg.LEFT, 20, title, "start", 13)]
    for value in (10.0**power * digit for power in range(first, last + 1) for digit in (1, 2, 5)):
        if value <= high:
            elements += [
                svg.line(across(value), svg.TOP, across(value), base),
                svg.line(svg.LEFT, up(value), right, up(value)),
                svg.text(across(value), base + 16, seconds_text(value), "middle"),
                svg.text(svg.LEFT - 8, up(value) + 4, seconds_text(value)),
            ]
    ends = f'x1="{across(low):.1f}" y1="{up(low):.1f}" x2="{right:.1f}" y2="{up(high):.1f}"'
    elements.append(f'<line {ends} stroke="#888"/>')
    for kind, name, x, y in points:
        elements.append(
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3.5" fill-opacity="0.7" '
            f'class="c{kinds.index(kind) % svg.COLOURS}">'
            f"<title>{escape(f'{name}: {seconds_text(x)}, {seconds_text(y)}')}</title></circle>"
        )
    elements += [
        svg.text(right + 20, svg.TOP + 12, f"across: {below}", "start"),
        svg.text(right + 20, svg.TOP + 30, f"up: {beside}", "start"),
    ]
    for i, kind in enumerate(kinds):
        y = svg.TOP + 60 + 18 * i
        elements += [
            f'<circle cx="{right + 26:.1f}" cy="{y - 4}" r="4" class="c{i % svg.COLOURS}"/>',
            svg.text(right + 38, y, kind, "start"),
        ]
    return svg.picture(base + 60, elements)


def _shortened(name: str) -> str:
    return name if len(name) <= 56 else f"{name[:55]}…"
