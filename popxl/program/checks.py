"""Validation of loaded programs: contents that no sequence of popxl calls makes, or that exceed any machine's memory.

The author of a file is unknown, so its content is not trusted. Violations raise a `ValueError`, and the file is refused
before anything is compiled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.graph import Graph
from popxl.values.spec import TensorSpec

if TYPE_CHECKING:
    from popxl.ir import Ir

LARGEST = 2**42
"""Upper bound on bytes, 4 TiB, of an array, a stream, or all remote buffers of a program file. A file of a few lines
could otherwise claim any number."""

_MOST_CALLS = 10**8
"""Upper bound on ops of a program file with all calls expanded. Graphs that each call another twice grow exponentially:
ten levels make a thousand ops of one."""

_MOST_IPUS = 2**16


def check(holds: bool, otherwise: str) -> None:
    """`ValueError` unless something holds."""
    if not holds:
        raise ValueError(otherwise)


def check_unique(what: str, ids: Iterable[object]) -> None:
    """Raise `ValueError` for duplicate names or numbers."""
    twice = [id for id, count in Counter(ids).items() if count > 1]
    check(not twice, f"the {what} {', '.join(map(repr, twice[:3]))} is there twice")


def checked_shape(values: Any) -> tuple[int, ...]:
    """A shape. `ValueError` for anything else."""
    check(isinstance(values, list) and all(type(v) is int and v >= 0 for v in values), f"{values!r} is no shape")
    return tuple(values)


def check_size(what: str, spec: TensorSpec, times: int = 1) -> None:
    """Raise `ValueError` for total array sizes beyond any possible array."""
    size = math.prod(spec.shape) * spec.dtype.itemsize * times
    check(size <= LARGEST, f"{what} would have {size} bytes; the most is {LARGEST}")


def checked_location(location: tuple[int | None, bool | None]) -> tuple[int | None, bool | None]:
    """A location. Raises `ValueError` for an impossible IPU."""
    ipu = location[0]
    check(ipu is None or 0 <= ipu < _MOST_IPUS, f"there is no IPU {ipu}")
    return location


def check_bindings(t: Tensor) -> None:
    """Raise `ValueError` if a graph input is bound to itself, through inputs of other graphs."""
    seen = set()
    current: Tensor | None = t
    while current is not None:
        check(current not in seen, f"{t!r} is bound to itself")
        seen.add(current)
        current = None if current._bound is None else current._bound()


def check_overwritten(op: Op) -> None:
    """Raise `ValueError` for overwrites undeclared by the op kind, or duplicate overwritten call inputs."""
    if not op.kind.graphs:
        declared = op.kind.modified(op.attributes, op.operands)
        check(op.modified == declared, f"{op!r} overwrites its inputs {[*op.modified]}, and not {[*declared]}")
        return
    check(all(0 <= i < len(op.inputs) for i in op.modified), f"{op!r} has no inputs {[*op.modified]} to overwrite")
    twice = [op.inputs[i] for i in op.modified if op.inputs.count(op.inputs[i]) > 1]
    check(not twice, f"{op!r} overwrites {twice}, which are bound twice")


def check_calls(ir: Ir) -> None:
    """Raise `ValueError` for recursive graphs, and for call chains of excessive length."""
    waiting = {graph: len(graph.called_graphs) for graph in ir.graphs}
    callers: dict[Graph, list[Graph]] = {graph: [] for graph in ir.graphs}
    for graph in ir.graphs:
        for callee in graph.called_graphs:
            callers[callee].append(graph)
    ready = [graph for graph, count in waiting.items() if not count]
    ops: dict[Graph, int] = {}
    for graph in ready:  # which grows in the loop
        ops[graph] = sum(1 + sum(ops[callee] for callee in op.called_graphs) for op in graph.ops)
        check(ops[graph] <= _MOST_CALLS, f"the calls in {graph.title} come to {ops[graph]} ops")
        for caller in callers[graph]:
            waiting[caller] -= 1
            if not waiting[caller]:
                ready.append(caller)
    endless = [graph.title for graph in ir.graphs if graph not in ops]
    check(not endless, f"{', '.join(endless[:3])} would call itself")
