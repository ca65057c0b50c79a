"""Recursion into called graphs, which may be nested deeper than Python's recursion limit allows.

Python functions that call each other take no stack of C: with a raised limit they recurse 100 000 deep (Python 3.11 and
3.13).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from popxl.core.aliasing import callees_first
from popxl.core.recording import Op
from popxl.graph import Graph

_FRAMES = 8
"""Python frames of a function that recurses into a called graph, at most."""

_lock = Lock()
_raised: list[int] = []  # what blocks add to the limit, in all threads
_limit = 0  # outside of all blocks


def nesting(graph: Graph, counts: Callable[[Op], bool] = lambda op: True) -> int:
    """Largest number of ops that run graphs inside of each other, among those that `counts` accepts.

    Example:
        >>> inner = ir.create_graph(lambda x: x * 2.0, x)
        >>> outer = ir.create_graph(lambda x: ops.call(inner, x), x)
        >>> nesting(inner), nesting(outer)
        (0, 1)
    """
    depth: dict[Graph, int] = {}
    for each in callees_first(graph):
        runs = ((op, callee) for op in each.ops for callee in op.called_graphs)
        depth[each] = max((depth[callee] + counts(op) for op, callee in runs), default=0)
    return depth[graph]


@contextmanager
def raised_recursion_limit(depth: int, frames_a_level: int = _FRAMES) -> Iterator[None]:
    """Raise the recursion limit for `depth` nested graphs within a block. As all threads share one limit, it is lowered
    by the same number of frames afterwards."""
    global _limit
    frames = depth * frames_a_level
    if frames < 100:  # which the limit leaves
        yield
        return
    with _lock:
        if not _raised:
            _limit = sys.getrecursionlimit()
        _raised.append(frames)
        sys.setrecursionlimit(_limit + sum(_raised))
    try:
        yield
    finally:
        with _lock:
            _raised.remove(frames)
            sys.setrecursionlimit(_limit + sum(_raised))
