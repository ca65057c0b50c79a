"""`Context`: the surroundings of the ops of a graph during lowering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakValueDictionary

import jax

from popxl.base.arrays import Array
from popxl.core.recording import Op
from popxl.graph import Graph
from runtime.lowering.channels import Channels
from runtime.lowering.packed_arrays import PackedSlot


class TracedCalls:
    """The calls of graphs in one trace, by their inputs."""

    def __init__(self) -> None:
        self._first_inputs: WeakValueDictionary[tuple[Graph, tuple[int, ...]], Array] = WeakValueDictionary()

    def record(self, graph: Graph, inputs: Sequence[Array | PackedSlot]) -> bool:
        """Record a call, and return whether the graph was called with these inputs before: compilers may merge both."""
        if not inputs or not all(isinstance(value, jax.core.Tracer) for value in inputs):  # slots, or no compiler
            return False
        key = graph, tuple(map(id, inputs))
        is_first = self._first_inputs.get(key) is not inputs[0]
        self._first_inputs[key] = inputs[0]
        return not is_first


@dataclass(frozen=True)
class Context:
    """The context of ops being lowered: channels and surrounding graphs and loops.

    It is frozen: calls, branches and loop bodies derive theirs. What changes from op to op has objects of its own, the
    channels and the calls of the trace.

    Attributes:
        channels: the streams, remote buffers and flags that they use.
        calls: the calls of the trace so far.
        inputs: the inputs of the graph. The body of a loop has none: it sees nothing around it.
        in_loop: whether they are in the body of a loop, or in a graph with noinline calls.
        iterations: number of iterations of the enclosing loops of calls. A value may be one of as many packed slots.
        sliced_rows: for ops in a loop body that slice an iteration's row out of an array, that row.
        only_graph: the graph that the enclosing loop of calls calls, if it calls no other and that one once.
        depth: number of enclosing called graphs.
    """

    channels: Channels
    calls: TracedCalls = field(default_factory=TracedCalls)
    inputs: Sequence[Array | PackedSlot] = ()
    in_loop: bool = False
    iterations: int = 1
    sliced_rows: Mapping[Op, Array] = field(default_factory=dict)
    only_graph: Graph | None = None
    depth: int = 0

    def in_graph(self, inputs: Sequence[Array | PackedSlot]) -> Context:
        """The context inside a called graph with these inputs."""
        return replace(self, inputs=inputs, depth=self.depth + 1)

    def in_loop_body(
        self,
        channels: Channels,
        iterations: int = 1,
        sliced_rows: Mapping[Op, Array] | None = None,
        only_graph: Graph | None = None,
    ) -> Context:
        """The context inside a loop body, of so many `iterations` if values may be packed slots of all of them."""
        inside = replace(self, channels=channels, inputs=(), in_loop=True, iterations=self.iterations * iterations)
        return replace(inside, sliced_rows=sliced_rows or {}, only_graph=only_graph)
