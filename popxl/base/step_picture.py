"""Picture of a training step: memory over its schedule, beside the mesh of its replicas and their communication."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from popxl.base import svg
from popxl.base.pages import Picture, bytes_text

_PLOT_END, _MESH, _BASE = 500, 535, 300
"""Right end of the memory, left end of the mesh, and the height of the memory's axis, in pixels."""
_CHIP, _GAP = 15, 11
"""Size of a drawn chip, and the gap between chips, in pixels."""


class Layer(NamedTuple):
    """Memory use by category: its CSS class, label, and bytes per column."""

    style: str
    name: str
    heights: Sequence[int]


class LineCollectives(NamedTuple):
    """Collectives of one kind at one line: over which axes of the mesh, in which phase, how many, and their bytes."""

    axes: tuple[int, ...]
    kind: str
    line: str
    phase: str
    times: int
    bytes: int


def step_picture(
    title: str,
    layers: Sequence[Layer],
    phases: Mapping[str, tuple[float, float]],
    axes: Sequence[tuple[str, int]],
    collectives: Sequence[LineCollectives],
) -> Picture:
    """Memory in layers over the schedule, beside a mesh and its collectives.

    Args:
        layers: uses of memory, the lowest first.
        phases: parts of the schedule, with their beginning and end, from 0 to 1.
        axes: names and sizes of the axes of the mesh, the outermost first.
        collectives: collectives, the most bytes first.
    """
    elements = [svg.text(svg.LEFT - 60, 20, title, "start", 13)]
    elements += _memory(layers, phases)
    mesh, y = _mesh(axes)
    elements += mesh
    elements += _collectives(axes, collectives, y + 26)
    used = [layer for layer in layers if any(layer.heights)]
    for i, layer in enumerate(used):
        x, y = svg.LEFT - 60 + 200 * (i % 4), _BASE + 46 + 18 * (i // 4)
        elements += svg.legend_entry(x, y, layer.name, layer.style)
    return svg.picture(_BASE + 58 + 18 * ((len(used) - 1) // 4), elements)


def _memory(layers: Sequence[Layer], phases: Mapping[str, tuple[float, float]]) -> list[str]:
    """Layers of memory on top of each other, above an axis with the phases."""
    margin, count = svg.LEFT - 20, len(layers[0].heights)
    total = [sum(heights) for heights in zip(*(layer.heights for layer in layers), strict=True)]
    ticks = svg.ticks(max(total, default=0))
    across, up = svg.scale(count or 1, margin, _PLOT_END), svg.scale(ticks[-1], _BASE, svg.TOP)
    elements = [element for value in ticks for element in (
        svg.line(margin, up(value), _PLOT_END, up(value)),
        svg.text(margin - 8, up(value) + 4, bytes_text(value)),
    )]  # fmt: skip
    bottoms = [0] * count
    for layer in layers:
        tops = [a + b for a, b in zip(bottoms, layer.heights, strict=True)]
        if tops != bottoms:
            tip = f"{layer.name}: {bytes_text(max(layer.heights))} at most"
            elements.append(svg.area(across, up, 0, bottoms, tops, layer.style, tip))
        bottoms = tops
    for name, (start, end) in phases.items():
        x1, x2 = (margin + (_PLOT_END - margin) * share for share in (start, end))
        elements += [svg.line(x2, svg.TOP, x2, _BASE + 6), svg.text((x1 + x2) / 2, _BASE + 16, name, "middle")]
    return elements


def _mesh(axes: Sequence[tuple[str, int]]) -> tuple[list[str], float]:
    """Drawing of the chips, with lines between those along one axis; and the height at which it ends."""
    if not axes:
        return [svg.text(_MESH, svg.TOP + 8, "1 chip", "start", 12)], svg.TOP + 8
    count = math.prod(size for _, size in axes)
    heading = f"{count} chips: {' × '.join(f'{name} {size}' for name, size in axes)}"
    elements = [svg.text(_MESH, svg.TOP + 8, heading, "start", 12)]
    *outer, (_, size) = axes
    rows, columns = min(math.prod(n for _, n in outer), 4), min(size, 8)
    top, pitch = svg.TOP + 22, _CHIP + _GAP
    centres = [
        (_MESH + pitch * c + _CHIP / 2, top + pitch * r + _CHIP / 2) for r in range(rows) for c in range(columns)
    ]
    right, bottom = centres[-1]
    inner, outermost = f"a{len(axes) - 1}", f"a{len(axes) - 2}"
    for r in range(rows):
        elements.append(_wire(_MESH, top + pitch * r + _CHIP / 2, right, top + pitch * r + _CHIP / 2, inner))
    for c in range(columns if rows > 1 else 0):
        x = _MESH + pitch * c + _CHIP / 2
        elements.append(_wire(x, top, x, bottom, outermost))
    for x, y in centres:
        elements.append(
            f'<rect x="{x - _CHIP / 2:.1f}" y="{y - _CHIP / 2:.1f}" width="{_CHIP}" height="{_CHIP}" rx="3" '
            'class="state"/>'
        )
    if rows * columns < count:
        elements.append(svg.text(right + _CHIP, bottom + 4, f"… {count} in all", "start"))
    return elements, bottom + _CHIP / 2


def _wire(x1: float, y1: float, x2: float, y2: float, axis: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="wire {axis}"/>'


def _collectives(axes: Sequence[tuple[str, int]], collectives: Sequence[LineCollectives], y: float) -> list[str]:
    """Heading for each group of axes, with one row per source line that communicates along them."""
    if not collectives:
        return [svg.text(_MESH, y, "Nothing is sent.", "start")] if axes else []
    elements: list[str] = []
    groups = dict.fromkeys(collective.axes for collective in collectives)
    rows = {along: [collective for collective in collectives if collective.axes == along] for along in groups}
    for along, members in sorted(rows.items(), key=lambda row: (len(row[0]), [-a for a in row[0]])):
        size = math.prod(axes[i][1] for i in along)
        name = " and ".join(axes[i][0] for i in along)
        style = f"a{along[0]}" if len(along) == 1 else "all"
        elements += [
            f'<rect x="{_MESH}" y="{y - 6:.1f}" width="10" height="4" class="{style}"/>',
            svg.text(_MESH + 16, y, f"along {name}, {size} chips", "start", 12),
        ]
        y += 17
        for collective in members:
            if y > _BASE + 20:
                return elements
            summary = f"{collective.kind} ×{collective.times}"
            elements += [
                svg.text(
                    _MESH + 16, y, _shortened(f"{collective.line} {collective.phase}", 37 - len(summary)), "start"
                ),
                svg.text(svg.WIDTH - 64, y, summary),
                svg.text(svg.WIDTH - 8, y, bytes_text(collective.bytes)),
            ]
            y += 16
        y += 4
    return elements


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"…{text[1 - width :]}"
