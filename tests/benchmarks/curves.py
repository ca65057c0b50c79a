"""Draws what calling a block L times costs, over L, from what was measured for the rows of `blocks.py`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.harness import OURS

PANELS = {
    "compile": ("compile time", "s", 1),
    "run": ("time of a step", "ms", 1e3),
    "temporaries": ("memory", "MB", 1e-6),
}
PARTIES = {
    OURS: ("popxl", "C0", "o-"),
    "one program": ("popxl, as one program", "C0", "o:"),
    "JAX": ("JAX, unrolled", "C1", "s-"),
    "checkpoint": ("JAX, unrolled, jax.checkpoint", "C1", "s:"),
    "scan": ("JAX, scan over stacked weights", "C2", "^-"),
}


def curves(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[int, float]]]:
    """Medians by panel, party and number of blocks."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        name = re.fullmatch(r"blocks(\d+)_(\w+)", row["row"])
        if name:
            for party, measures in row["measures"].items():
                found[name[2]][party][int(name[1])] = float(np.median(measures))
    return found


def draw(rows: list[dict[str, Any]], picture: Path) -> None:
    """What was measured for rows of called blocks."""
    draw_panels(curves(rows), PARTIES, "blocks", picture)


def draw_panels(
    found: Mapping[str, Mapping[str, Mapping[int, float]]],
    parties: Mapping[str, tuple[str, str, str]],
    counted: str,
    picture: Path,
) -> None:
    """Three panels, both axes logarithmic: a straight line is a power of the number of what is `counted`.

    Args:
        found: measures by panel, party and number.
        parties: of each the label, the colour and the style of its line.
        counted: what there are more and more of.
        picture: the file.
    """
    from matplotlib.figure import Figure  # takes a second, in each process of the tests
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    lines: dict[str, Any] = {}
    for axis, (what, (title, unit, scale)) in zip(axes, PANELS.items(), strict=True):
        of_panel = found.get(what, {})
        for party, (label, colour, style) in parties.items():
            points = sorted(of_panel.get(party, {}).items())
            if points:
                values = [scale * y for _, y in points]
                (lines[label],) = axis.plot([n for n, _ in points], values, style, color=colour, label=label)
        axis.set(title=f"{title} [{unit}]", xlabel=counted, xscale="log", yscale="log")
        counts = sorted({n for points in of_panel.values() for n in points})
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.legend(
        lines.values(), lines.keys(), loc="outside lower center", ncols=len(parties), frameon=False, fontsize=9
    )
    save(figure, picture)


def save(figure: Any, picture: Path) -> None:
    """Write a picture. The same one has the same bytes, so only what is measured anew changes in the repository."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": picture.stem}):
        figure.savefig(picture, metadata={"Date": None})
