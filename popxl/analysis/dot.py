"""Graphviz files of graphs, as `Ir.dot_checkpoint` writes them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from popxl.base.atomic_files import replace_file
from popxl.values.spec import brief

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir


def write_checkpoint(ir: Ir, check: str, save_dir: Path | str | None = None, explicit: bool = False) -> None:
    """Write one file per graph of the Ir if the checkpoint is active.

    Args:
        save_dir: folder for this and later dumps of the Ir.
        explicit: whether the user asked for this checkpoint. If no option says which are active, all become active.
    """
    if explicit and "POPART_DOT_CHECKS" not in os.environ and not ir.options.dotChecks:
        ir.options.dotChecks = {"ALL"}
    if save_dir is not None:
        ir.options.logDir = str(save_dir)
        Path(save_dir).mkdir(parents=True, exist_ok=True)
    asked = {*ir.options.dotChecks, *os.environ.get("POPART_DOT_CHECKS", "").split(":")}
    active = {name.upper() for name in asked if name}
    if not active & {"ALL", check.upper()}:
        return
    folder = Path(ir.options.logDir)
    folder.mkdir(parents=True, exist_ok=True)
    for k, graph in enumerate(ir.graphs):
        replace_file(folder / f"{check}_{k or 'r'}.dot", ("\n".join(_dot(graph)) + "\n").encode())


def _dot(graph: Graph) -> Iterator[str]:
    yield f'digraph "{graph.name or "main"}" {{'
    yield "  rankdir=TB; node [shape=box];"
    for t in graph.inputs:
        yield f'  "{t.id}" [shape=oval, label="{t.path}\\n{brief(t)}"];'
    for op in graph.ops:
        called = "".join(f"\\n{callee.name}" for callee in op.called_graphs)
        yield f'  "{op.id}" [label="{op.op_type}.{op.id}{called}"];'
        for t in op.inputs:
            source = t.producer
            yield f'  "{t.id if source is None else source.id}" -> "{op.id}" [label="{brief(t)}"];'
    for i, t in enumerate(graph.outputs):
        source = t.producer
        yield f'  "out{i}" [shape=oval, label="output {i}"];'
        yield f'  "{t.id if source is None else source.id}" -> "out{i}" [label="{brief(t)}"];'
    yield "}"
