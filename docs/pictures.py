"""The pictures of README.md, popxl/README.md and runtime/README.md: `python docs/pictures.py` draws them anew.

`step.svg` is what the program of README.md draws; the others are drawn here.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"
sys.path.insert(0, str(ROOT))

from popxl.base import svg  # noqa: E402


class Box(NamedTuple):
    """A box with a title and lines of text below it."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lines: Sequence[str] = ()
    style: str = "box"


def drawn(box: Box) -> list[str]:
    found = [
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="5" class="{box.style}"/>',
        svg.text(box.x + 9, box.y + 18, box.title, "start", 12),
    ]
    return found + [svg.text(box.x + 9, box.y + 37 + 16 * i, line, "start") for i, line in enumerate(box.lines)]


def arrow(*points: tuple[float, float], label: str = "") -> list[str]:
    """A line through some points, with a head at the last; its label is above the middle of the first part."""
    (x1, y1), (x2, y2) = points[-2:]
    step = 6 if x2 > x1 else -6 if x2 < x1 else 0
    fall = 6 if y2 > y1 else -6 if y2 < y1 else 0
    head = [(x2, y2), (x2 - step - fall / 2, y2 - fall - step / 2), (x2 - step + fall / 2, y2 - fall + step / 2)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    tip = " ".join(f"{x:.1f},{y:.1f}" for x, y in head)
    found = [f'<polyline points="{path}" class="arrow"/>', f'<polygon points="{tip}" class="ink"/>']
    if label:
        (x1, y1), (x2, y2) = points[:2]
        found.append(svg.text((x1 + x2) / 2, min(y1, y2) - 5, label, "middle"))
    return found


def program() -> str:
    """Ir, graph, call site, session."""
    main = (
        "x = HostLoad",
        "h = Call layer (x, w1)",
        "y = Call layer (h, w2)",
        "dw2 = Call layer_bwd (…)",
        "w2 -= 0.1 dw2",
    )
    parts = [
        *drawn(Box(16, 12, 500, 236, "Ir: one program", style="frame")),
        *drawn(Box(34, 44, 196, 186, "main graph", (), "box")),
        *drawn(Box(330, 44, 168, 78, "graph: layer (x, w)", ("MatMul, Gelu", "built once"), "box")),
        *drawn(Box(330, 152, 168, 78, "graph: layer_bwd", ("made by autodiff", "from layer"), "box")),
        *drawn(Box(612, 12, 232, 236, "Session: compiled for one machine", style="frame")),
        *drawn(Box(630, 44, 196, 58, "executable", ("each graph compiled once",), "box")),
        *drawn(Box(630, 116, 196, 58, "variables", ("w1, w2, on the device",), "box")),
        *drawn(Box(630, 188, 196, 42, "run: arrays in, arrays out", (), "box")),
    ]
    tops = [86 + 30 * i for i in range(len(main))]
    parts += [svg.text(46, y, line, "start") for y, line in zip(tops, main, strict=True)]
    for y, to in ((tops[1], 76), (tops[2], 92), (tops[3], 190)):
        parts += arrow((218, y - 4), (282, y - 4), (282, to), (328, to))
    parts += [svg.text(280, 64, "call sites", "middle")]
    parts += arrow((516, 130), (610, 130), label="compile")
    return svg.picture(262, parts, STYLE)


def steps(title: str, rows: Sequence[Sequence[tuple[str, str]]], numbered_from: int = 1) -> str:
    """Boxes in rows, read like text, each a concept with what it does."""
    width, height, gap = 154, 62, 13
    parts = [svg.text(16, 22, title, "start", 13)]
    number = numbered_from
    for r, row in enumerate(rows):
        y = 40 + (height + 22) * r
        for c, (name, what) in enumerate(row):
            x = 16 + (width + gap) * c
            words = wrapped(what, 27)
            parts += drawn(Box(x, y, width, height, f"{number} {name}", words))
            number += 1
            if c:
                parts += arrow((x - gap, y + height / 2), (x - 1, y + height / 2))
        if r + 1 < len(rows):
            end = 16 + (width + gap) * (len(row) - 1) + width / 2
            below = y + height + 11
            parts += arrow((end, y + height), (end, below), (16 + width / 2, below), (16 + width / 2, below + 10))
    return svg.picture(40 + (height + 22) * len(rows), parts, STYLE)


def wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def run_cold() -> str:
    """What a first run goes through."""
    return steps(
        "The first run: Session(ir), and session.run()",
        [
            [
                ("Ir", "graphs, checked: order of updates, likely mistakes"),
                ("Device", "which devices, or a target that is not here"),
                ("CompileTarget", "platform, replicas and their places, as a value"),
                ("Layout", "where streams, variables and buffers are"),
                ("Decision", "one program, rerolled loops, or a plan"),
            ],
            [
                ("Lowering", "one loop over ops, graph by graph"),
                ("Context", "what surrounds an op, as a frozen value"),
                ("Environment", "arrays by storage"),
                ("channels", "streams, buffers, failures, as values"),
                ("PlatformHooks", "overrides for one platform"),
            ],
            [
                ("traced function", "by JAX, for all replicas"),
                ("CompilePool", "threads in which XLA compiles"),
                ("cache", "executables of earlier processes"),
                ("mode_selection", "compares modes by their costs"),
                ("CompiledProgram", "layout and executables, frozen"),
            ],
            [
                ("VariableStore", "variables on the device"),
                ("transfers", "initial values, made for each device"),
                ("HostArrays", "checks and converts what is fed"),
                ("Runner", "calls the executable"),
                ("Outputs", "fetched when read"),
            ],
        ],
    )


def run_warm() -> str:
    """What later runs go through."""
    return steps(
        "Every later run: session.run()",
        [
            [
                ("Session", "takes its lock; the Ir has not changed"),
                ("HostArrays", "checks and converts what is fed"),
                ("versions", "of host and device: the device will be ahead"),
                ("Runner", "donates the variables that change"),
                ("executable", "queued; or segments of a plan, in order"),
            ],
            [
                ("VariableStore", "keeps the new arrays"),
                ("failure flag", "raised as an error, if ops check operands"),
                ("Outputs", "fetched when read"),
            ],
        ],
    )


POPXL = {
    "__main__": "the command; names that programs import",
    "session": "the bridge to the machine",
    "operators": "operators of tensors, such as x + y",
    "program.rule_graph": "gradient rules as graphs",
    "ir": "a whole program",
    "program.reading": "programs in files",
    "program.checks": "their schema and checks",
    "analysis": "memory, operations, communication, checks",
    "transforms": "autodiff, merging, JAX functions as ops",
    "ops": "declarations of ops, by family",
    "core": "recording of ops in graphs; tensors, traits, streams",
    "values": "dtypes, shapes, shards, groupings, options",
    "base": "log, pages, lines, files. Imports no graphs",
}
RUNTIME = {
    "poprun": "command lines; processes; a program as a JAX file",
    "subcommands": "what the commands of popxl do",
    "poprun_options": "costs in reviewed files",
    "watched_runs": "runs of programs for commands",
    "jax_analysis": "analysis of JAX functions",
    "session": "what users run; choices and budgets that fit",
    "session_inspection": "its reports",
    "session_variables": "a compiled program, and its variables",
    "machine": "finds devices; compiles and runs",
    "mode_selection": "selects the mode of called graphs",
    "inspection": "data of a compiled program",
    "report": "reports; a compiled program in a file",
    "costs": "cost and memory, from XLA's output",
    "program": "layout, executables, variables, runs",
    "plan": "segments that the host runs; rerolled loops",
    "compile_pool": "threads that compile; timelines; cache",
    "files.executables": "executables in files",
    "lowering": "graphs to functions of arrays",
    "targets": "devices and compilation targets",
    "cpu": "for one platform only",
    "noinline": "what all use",
    "jax_private": "JAX's private interfaces",
}
"""What each floor is for, by the first name of its contract."""


def floors(package: str, purposes: dict[str, str]) -> str:
    """The floors of a package, as its contract in pyproject.toml has them: each imports from those below it only."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["id"] == package)
    parts, y = [svg.text(16, 22, f"{package}: each floor imports from those below it", "start", 13)], 34
    for layer in layers:
        names = wrapped(layer.replace(" : ", " · "), 72)
        purpose = purposes.get(layer.split(" : ")[0], "")
        height = 12 + 16 * len(names)
        parts.append(f'<rect x="16" y="{y}" width="828" height="{height}" rx="4" class="box"/>')
        parts += [svg.text(26, y + 18 + 16 * i, line, "start", 12) for i, line in enumerate(names)]
        parts.append(svg.text(520, y + 18, purpose, "start"))
        y += height + 4
    return svg.picture(y + 8, parts, STYLE)


STYLE = (
    ".popxl .box { fill: #eef2f6; stroke: #9fb0c3 } .popxl .frame { fill: none; stroke: #9fb0c3 } "
    ".popxl .arrow { fill: none; stroke: #333b47; stroke-width: 1.2 } @media (prefers-color-scheme: dark) { "
    ".popxl .box { fill: #202730; stroke: #52606f } .popxl .frame { stroke: #52606f } "
    ".popxl .arrow { stroke: #c3ccd8 } }"
)

DRAWN: dict[str, Callable[[], str]] = {
    "program.svg": program,
    "run-cold.svg": run_cold,
    "run-warm.svg": run_warm,
    "floors-popxl.svg": partial(floors, "popxl", POPXL),
    "floors-runtime.svg": partial(floors, "runtime", RUNTIME),
}


def step() -> str:
    """What the first program of README.md draws."""
    text = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)[0]
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            exec(compile(text, "train.py", "exec"), {})
            return Path("step.svg").read_text("utf-8")
        finally:
            os.chdir(before)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in {**DRAWN, "step.svg": step}.items():
        (FOLDER / name).write_text(draw(), "utf-8")
