"""The table of operators: what each is in ops of popxl, and what the rows of the tests check of it.

    python -m tests.poptorch.operator_table > poptorch/OPERATORS.md

It is made of the rows, which are captured and written as graphs, but not run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import popxl
from poptorch.capture.trace import Node
from poptorch.lowering import Emission
from poptorch.lowering.emission import spec_of
from poptorch.lowering.registry import lowering_name, lowerings
from tests.poptorch.operators import Row, captured

FAMILIES = sorted(path.stem for path in (Path(__file__).parent / "rows").glob("*.py"))
ROWS: tuple[tuple[str, Row], ...] = tuple(
    (family, row) for family in FAMILIES for row in import_module(f"tests.poptorch.rows.{family}").ROWS
)

HEAD = """\
# Operators

What each operator of PyTorch becomes, in ops of popxl. `torch.` are functions that are captured as a whole, `aten.` the
operators below them; other functions of PyTorch consist of these. The tests compare each with PyTorch: its results in
float32, and where it says so, its gradient, and both in float16. Made by `python -m tests.poptorch.operator_table`.

| operator | ops of popxl | gradient | half |
|---|---|---|---|
"""


ELSEWHERE = {
    "poptorch.call": "test_outline",
    "poptorch.ctc_beam_search_decoder": "test_ops",
    "poptorch.custom_op": "test_ops",
    "poptorch.fps": "test_ops",
    "poptorch.nearest": "test_ops",
    "poptorch.set_overlap_for_input": "test_programs_in_use",
    "poptorch.set_overlap_for_output": "test_programs_in_use",
}
"""Operators that have no row, since they mean something on the device alone, and where they are tested."""


@dataclass
class Line:
    """What rows tell of an operator.

    Attributes:
        kinds: the ops that it became.
        gradient, half: whether any row checks these.
    """

    kinds: set[str] = field(default_factory=set)
    gradient: bool = False
    half: bool = False


def lines() -> Mapping[str, Line]:
    """What all rows tell, by the name of the lowering."""
    found: defaultdict[str, Line] = defaultdict(Line)
    for _, row in ROWS:
        trace, values = captured(row)
        with popxl.Ir().create_empty_graph("row") as graph:
            seed = popxl.graph_input((2,), popxl.uint32)
            emission = Emission(lambda seed=seed: seed)
            emission.bind(values, [popxl.graph_input(value.shape, spec_of(value).dtype) for value in values])
            for node in trace.without_unused(trace.outputs):
                before = len(graph.ops)
                emission.write([node])
                line = found[lowering_name(node.op, node.overload)]
                line.kinds |= {op.op_type for op in graph.ops[before:]}
                line.gradient |= row.gradient and _has_gradient(node)
                line.half |= row.half
    return found


def _has_gradient(node: Node) -> bool:
    return any(result.requires_grad for i, result in enumerate(node.results) if i not in node.stops)


def missing(found: Mapping[str, Line]) -> list[str]:
    """The lowerings that no row uses, and that are not tested elsewhere."""
    return sorted(set(lowerings()) - set(found) - set(ELSEWHERE))


def table(found: Mapping[str, Line]) -> str:
    """The page, in Markdown."""
    rows = (
        f"| {name} | {', '.join(sorted(line.kinds))} | {'yes' * line.gradient} | {'yes' * line.half} |\n"
        for name, line in sorted(found.items())
    )
    return HEAD + "".join(rows)


if __name__ == "__main__":
    print(table(lines()), end="")
