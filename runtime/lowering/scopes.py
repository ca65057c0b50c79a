"""Names that the lowering leaves in a program, and that XLA keeps: of graphs, and of the user's lines.

They are scopes of JAX, which make up the `op_name` of an instruction: "jit(step)/{layer_subgraph(0)}/dot_general".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import jax

from popxl.core.recording import Op
from popxl.graph import Graph


class Scopes:
    """The scopes of graphs that call each other. Only the outermost are named: what is traced has the names of all that
    it is in, and programs may be thousands of calls deep."""

    def __init__(self) -> None:
        self._depth = 0

    @contextmanager
    def of_graph(self, graph: Graph) -> Iterator[None]:
        """While a graph is traced, whatever is traced has its name."""
        self._depth += 1
        try:
            with jax.named_scope(f"{{{graph.name}}}") if self._depth <= _DEEPEST else nullcontext():
                yield
        finally:
            self._depth -= 1


_DEEPEST = 16


def of_op(op: Op) -> AbstractContextManager[None]:
    """While an op is traced, whatever is traced has its line: in `session.hlo()`, and in what profilers show."""
    return jax.named_scope(f"{op.op_type} [{op.source}]")


def graph_of(scope: str) -> str:
    """The name of the innermost graph in a scope; "" for the main graph."""
    found = re.findall(r"\{([^{}]*)\}", scope)
    return found[-1] if found else ""


def source_of(scope: str) -> str:
    """The innermost line in a scope; "" if there is none."""
    found = re.findall(r" \[([^\[\]]*)\]", scope)
    return found[-1] if found else ""
