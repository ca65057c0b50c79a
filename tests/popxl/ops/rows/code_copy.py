"""Rows of ops about the code of graphs."""

from __future__ import annotations

from typing import Any

import popxl
from popxl import ops
from tests.popxl.ops.rows.schema import Row, X, sample


def loaded(t: Any) -> Any:
    """A tensor that has nothing to do with the graph that is loaded."""
    graph = popxl.gcg().ir.create_graph(lambda t: t, t)
    assert ops.remote_code_load(graph, "executable") is None
    return t


CODE_COPY = [
    Row("remote_code_load", lambda t: t, [sample(X)], "RemoteCodeLoad", "", adds=0, build=loaded, colocated=False),
]
