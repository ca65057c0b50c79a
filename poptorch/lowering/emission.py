"""`Emission`: write a trace into popxl graphs, node by node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import popxl
from poptorch.base.dtypes import device_dtype
from poptorch.base.patching import patched
from poptorch.capture.trace import Node, Trace, Value
from poptorch.errors import createPoptorchError
from poptorch.lowering.operands import broadcast
from poptorch.lowering.registry import lowering_of
from popxl import ops
from popxl.context import get_current_context
from popxl.errors import PopxlError
from popxl.extend.kernels import fold_in
from popxl.extend.ops import copied_to_ipu
from popxl.extend.source import DebugRecord


class _Emissions(threading.local):
    current: Emission | None = None


_emissions = _Emissions()


def emission() -> Emission:
    """The current emission, to which lowerings add ops."""
    assert _emissions.current is not None, "lowerings are called while a trace is written"
    return _emissions.current


def wanted() -> popxl.TensorSpec:
    """Shape and dtype of the first result of the current op."""
    return emission().wanted[0]


def next_seed() -> popxl.Tensor:
    """Seed of the next random op."""
    return emission().seeds.next()


def popxl_dtype(dtype: torch.dtype) -> popxl.dtype:
    """The popxl dtype on the device for a PyTorch dtype."""
    return _DTYPES[device_dtype(dtype)]


_DTYPES = {
    torch.float32: popxl.float32,
    torch.float16: popxl.float16,
    torch.bfloat16: popxl.bfloat16,
    torch.int32: popxl.int32,
    torch.int16: popxl.int16,
    torch.int8: popxl.int8,
    torch.uint8: popxl.uint8,
    torch.bool: popxl.bool,
    torch.complex64: popxl.complex64,
}


def spec_of(value: Value) -> popxl.TensorSpec:
    """Shape and device dtype of a value."""
    return popxl.TensorSpec(value.shape, popxl_dtype(value.dtype))


class SeedSequence:
    """Separate seeds for the random ops of a graph.

    Args:
        source: function that returns a seed tensor; `None` where random numbers are not available.
        derives: whether seeds are derived from that tensor; otherwise the source returns a new one for each op.
    """

    def __init__(self, source: Callable[[], popxl.Tensor] | None, derives: bool) -> None:
        self._source, self._derives = source, derives
        self._count = 0
        self._manual: popxl.Tensor | None = None
        self._saved: dict[int, tuple[popxl.Tensor | None, int]] = {}

    def next(self) -> popxl.Tensor:
        """Seed of the next random op: a numbered derivative of the program's seed, or of the manual one.

        Raises:
            poptorch.Error: if random numbers are not available.
        """
        if self._manual is not None and self._derives:
            base = self._manual
        elif self._source is None:
            raise createPoptorchError("Random numbers are not available here.")
        else:
            base = self._source()
            if not self._derives:
                return base
        self._count += 1
        return _derived_seed(base, number=self._count)

    def restart(self, seed: int | None) -> None:
        """Derive subsequent seeds from a number, identically in every run; `None` returns to the program's seed."""
        if seed is None:
            self._manual = None  # the count continues: earlier seeds are in use
            return
        words = np.array([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF], np.uint32)
        self._manual, self._count = popxl.constant(words, popxl.uint32, "manual_seed"), 0

    def save(self, number: int) -> None:
        """Save the position in the sequence under a number, for `restore`."""
        self._saved[number] = self._manual, self._count

    def restore(self, number: int) -> None:
        """Return to a saved position: the same seeds follow again."""
        self._manual, self._count = self._saved[number]


class Emission:
    """Writer of trace nodes into the current graph, with a mapping from values to tensors.

    Args:
        seed: function that returns a seed tensor; required only if some op draws random numbers.
        placed: whether ops are placed on the IPUs of their blocks.
        is_part: whether each random op calls `seed` for a seed of its own.
        recomputed: graphs whose activations are recomputed, with the tensors to keep; extended in place.

    Attributes:
        tensors: tensor of each value, by the value's `id`.
        seeds: seeds of random ops.
        phases: phase of each emitted op, for a phased strategy.
        wanted: shapes and dtypes of the results of the current op.
    """

    def __init__(
        self,
        seed: Callable[[], popxl.Tensor] | None = None,
        placed: bool = False,
        is_part: bool = False,
        recomputed: dict[popxl.Graph, list[popxl.Tensor]] | None = None,
    ) -> None:
        self.recomputed = {} if recomputed is None else recomputed
        self.tensors: dict[int, popxl.Tensor] = {}
        self.phases: dict[popxl.Op, int] = {}
        self.seeds = SeedSequence(seed, derives=not is_part)
        self._placed = placed
        self._functions: dict[Trace, _Function] = {}
        self._copies: dict[tuple[popxl.Tensor, int], popxl.Tensor] = {}
        self.wanted: tuple[popxl.TensorSpec, ...] = ()

    def bind(self, values: Iterable[Value], tensors: Iterable[popxl.Tensor]) -> None:
        """Bind values to tensors of the current graph."""
        for value, t in zip(values, tensors, strict=True):
            self.tensors[id(value)] = t

    def tensor(self, value: Value) -> popxl.Tensor:
        """The tensor of a value; raises `poptorch.Error` for a result unsupported by its op's lowering."""
        if id(value) not in self.tensors and (node := value.producer) is not None:
            number = next(i for i, result in enumerate(node.results) if result is value)
            raise createPoptorchError(f"{node.op} at {node.source}: its result number {number} is not supported.")
        return self.tensors[id(value)]

    def call(self, trace: Trace, inputs: Sequence[popxl.Tensor], name: str) -> tuple[popxl.Tensor, ...]:
        """Call a trace as a subgraph, shared between all its calls."""
        function = self._function(trace, name)
        return ops.call_with_info(function.graph, *inputs, *self._seed_for(function)).outputs

    def loop(self, trace: Trace, count: int, inputs: Sequence[popxl.Tensor]) -> Sequence[popxl.Tensor]:
        """Repeat a trace `count` times; each iteration receives the previous iteration's results."""
        function = self._function(trace, "for_loop")
        outer = [self.tensor(value) for value in trace.outer]
        graph = function.graph
        carried = list(inputs)
        if function.seeds:  # a seed that changes is carried along
            carried = [self.seeds.next(), *inputs]
            graph = popxl.gir().create_empty_graph("for_loop_turn")
            with graph:
                seed, *given = [popxl.graph_input(t.shape, t.dtype, t.name) for t in (*carried, *outer)]
                following, own = ops.split_random_seed(seed)
                results = ops.call_with_info(function.graph, *given, own).outputs
                for t in (following, *results):
                    popxl.graph_output(t)
        results = ops.repeat(graph, count, *carried, *outer)
        return results[1:] if function.seeds else results

    def either(
        self,
        condition: popxl.Tensor,
        then: tuple[Trace, Sequence[popxl.Tensor]],
        otherwise: tuple[Trace, Sequence[popxl.Tensor]],
    ) -> Sequence[popxl.Tensor]:
        """Run one of two traces, selected by `condition`."""
        functions, given = [], []
        for (trace, inputs), name in ((then, "then"), (otherwise, "else")):
            function = self._function(trace, name)
            functions.append(function.graph)
            given.append([*inputs, *map(self.tensor, trace.outer), *self._seed_for(function)])
        return ops.conditional(condition, functions[0], functions[1], given[0], given[1])

    def _function(self, trace: Trace, name: str) -> _Function:
        """The cached graph of a trace."""
        if trace not in self._functions:
            self._functions[trace] = _Function(trace, name, self._placed, self.recomputed)
        return self._functions[trace]

    def _seed_for(self, function: _Function) -> list[popxl.Tensor]:
        return [self.seeds.next() for _ in function.seeds]

    def write(self, nodes: Sequence[Node]) -> None:
        """Emit nodes as ops of the current graph.

        Raises:
            poptorch.Error: for an op without a lowering, or one that its lowering refuses.
        """
        with patched(_emissions, current=self):
            for node in nodes:
                self._write(node)

    def _write(self, node: Node) -> None:
        """Lower one node, on its IPU and in its scope, and bind its results."""
        lowering = lowering_of(node.op, node.overload)
        if lowering is None:
            where = f", in the module {node.scope!r}" if node.scope else ""
            raise createPoptorchError(
                f"Unsupported op {node.op}{'.' + node.overload if node.overload else ''} at {node.source}"
                f"{f' `{node.source.text}`' if node.source.text else ''}{where}: there is no lowering for it. Write it "
                "with other ops, or declare one with `poptorch.lowering.registry.lowers`."
            )
        self.wanted = tuple(map(spec_of, node.results))
        count = len(popxl.gcg().ops)
        arguments = {name: self._plain(argument) for name, argument in node.arguments.items()}
        scope = "/".join(filter(None, (node.placement.scope, node.scope)))
        record = DebugRecord(node.op, f"{scope}/{node.op}", (), node.source, layer="poptorch")
        with ExitStack() as stack:
            stack.enter_context(get_current_context().set(debug_record=record))
            if self._placed:
                unit = node.placement.unit
                stack.enter_context(popxl.ipu(unit))
                arguments = pytree.tree_map_only(popxl.Tensor, lambda t: self._on_ipu(t, unit), arguments)
            if scope:
                stack.enter_context(popxl.name_scope(scope))
            try:
                made = lowering(**arguments)
                made = made if isinstance(made, tuple | list) else () if made is None else (made,)
                made = [_with_spec_of(t, value) for value, t in zip(node.results, made, strict=False)]
            except (PopxlError, TypeError, ValueError) as problem:
                raise createPoptorchError(f"{node.op} at {node.source}, `{node.source.text}`: {problem}") from problem
            for i, (value, t) in enumerate(zip(node.results, made, strict=False)):
                self.tensors[id(value)] = ops.detach(t) if i in node.stops else t
        if node.placement.phase is not None:
            self.phases |= dict.fromkeys(popxl.gcg().ops[count:], node.placement.phase)

    def _on_ipu(self, t: popxl.Tensor, unit: int) -> popxl.Tensor:
        """A tensor on an IPU: copied there once, if it is on another. Inputs reside where first used."""
        if (t, unit) not in self._copies:
            self._copies[t, unit] = copied_to_ipu(t, unit)
        return self._copies[t, unit]

    def _plain(self, argument: Any) -> Any:
        """Convert an argument for lowerings: values to tensors, PyTorch dtypes to popxl dtypes."""
        if isinstance(argument, Value):
            return self.tensor(argument)
        if isinstance(argument, torch.dtype):
            return popxl_dtype(argument)
        if isinstance(argument, list | tuple) and not hasattr(argument, "_fields"):
            return tuple(map(self._plain, argument))
        return argument


class _Function:
    """A trace as a graph: its inputs, then a seed if it draws random numbers; partial traces have one seed per draw."""

    def __init__(
        self, trace: Trace, name: str, placed: bool, recomputed: dict[popxl.Graph, list[popxl.Tensor]]
    ) -> None:
        self.graph = popxl.gir().create_empty_graph(name)
        self.seeds: list[popxl.Tensor] = []
        self._keeps_seeds = trace.keeps_seeds
        emission = Emission(self._seed, placed, trace.keeps_seeds, recomputed)
        with get_current_context().set(scope_prefix=""), self.graph:
            names = trace.names or [v.name for v in trace.inputs]
            inputs = [
                popxl.graph_input(v.shape, popxl_dtype(v.dtype), name or None)
                for v, name in zip(trace.inputs, names, strict=True)
            ]
            emission.bind(trace.inputs, inputs)
            emission.write(trace.nodes)
            for value in trace.outputs:
                popxl.graph_output(emission.tensor(value))

        if trace.is_recomputed:
            kept = [value for node in trace.nodes if node.is_saved for value in node.results]
            recomputed[self.graph] = [emission.tensors[id(v)] for v in kept if id(v) in emission.tensors]

    def _seed(self) -> popxl.Tensor:
        if self._keeps_seeds or not self.seeds:
            self.seeds.append(popxl.graph_input((2,), popxl.uint32, "random"))
        return self.seeds[-1]


_derived_seed = popxl.OpKind(
    "DeriveSeed", lambda seed, *, number: fold_in(seed, number), gradient=None, key="poptorch.DeriveSeed"
)


def _with_spec_of(t: popxl.Tensor, value: Value) -> popxl.Tensor:
    """Convert a result to PyTorch's dtype and shape."""
    wanted = spec_of(value)
    if t.dtype != wanted.dtype:
        t = ops.cast(t, wanted.dtype)
    if t.shape == wanted.shape:
        return t
    return ops.reshape(t, wanted.shape) if t.nelms == prod(wanted.shape) else broadcast(t, shape=wanted.shape)


def drawing(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that draw random numbers, among nodes in execution order."""
    seeds: list[popxl.Tensor] = []

    def seed() -> popxl.Tensor:
        seeds.append(popxl.graph_input((2,), popxl.uint32, "random"))
        return seeds[-1]

    emission, drawing_nodes = Emission(seed), list[Node]()
    with popxl.Ir().create_empty_graph("drawing"):
        for node in nodes:
            for value in node.inputs:
                if id(value) not in emission.tensors:
                    emission.bind([value], [popxl.graph_input(value.shape, popxl_dtype(value.dtype))])
            before = len(seeds)
            emission.write([node])
            if len(seeds) > before:
                drawing_nodes.append(node)
    return drawing_nodes
