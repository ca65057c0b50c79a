"""Draws what calling a block L times costs, over L, from what was measured for the rows of `blocks.py`."""

from __future__ import annotations

import re
from collections import defaultdict
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
    """Three panels, both axes logarithmic: a straight line is a power of L."""
    from matplotlib.figure import Figure  # takes a second, in each process of the tests

    found = curves(rows)
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    axes = figure.subplots(1, len(PANELS))
    for axis, (what, (title, unit, scale)) in zip(axes, PANELS.items(), strict=True):
        for party, (label, colour, style) in PARTIES.items():
            points = sorted(found[what][party].items())
            if not points:
                continue
            axis.plot([n for n, _ in points], [scale * y for _, y in points], style, color=colour, label=label)
        axis.set(title=f"{title} [{unit}]", xlabel="blocks", xscale="log", yscale="log")
        counts = sorted({n for points in found[what].values() for n in points})
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(PARTIES), frameon=False, fontsize=9)
    figure.savefig(picture, metadata={"Date": None})
