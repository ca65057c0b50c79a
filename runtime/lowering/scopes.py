"""Name scopes of graphs and source lines in compiled programs.

JAX's name scopes make up the `op_name` of an instruction: "jit(step)/{layer_subgraph(0)}/dot_general".
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext

import jax

from popxl.core.recording import Op
from popxl.graph import Graph

_DEEPEST = 16
"""Maximum depth of named graphs: traced ops carry the names of all enclosing graphs, and programs may nest thousands of
calls."""


def of_graph(graph: Graph, depth: int) -> AbstractContextManager[None]:
    """The name scope of a graph at a nesting depth."""
    return jax.named_scope(f"{{{graph.name}}}") if depth < _DEEPEST else nullcontext()


def of_op(op: Op) -> AbstractContextManager[None]:
    """The name scope of an op: its type and source line, visible in `session.hlo()` and profilers."""
    return jax.named_scope(f"{op.op_type} [{op.source}]")


def graphs_in(scope: str) -> list[str]:
    """Parse the graph names from a scope, the outermost first."""
    return re.findall(r"\{([^{}]*)\}", scope)


def graph_of(scope: str) -> str:
    """Parse the innermost graph name from a scope; "" for the main graph."""
    names = graphs_in(scope)
    return names[-1] if names else ""


def source_of(scope: str) -> str:
    """Parse the innermost source line from a scope; "" without one."""
    sources = re.findall(r" \[([^\[\]]*)\]", scope)
    return sources[-1] if sources else ""
