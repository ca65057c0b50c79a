"""Memory and time of the activations of a gradient graph, from which a plan within a budget is computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import accumulate

import popxl
from popxl.extend.collectives import exchanges_of
from popxl.extend.graphs import Flops, is_call, own_flops
from popxl.extend.memory import GraphNeeds, OpNeeds, ReplicaExchange
from popxl.transforms import GradGraphInfo
from popxl_addons.transforms.call_groups import calls_in
from popxl_addons.transforms.memory_plan import candidates


def graph_needs(info: GradGraphInfo, name: str, model: popxl.Graph, held: int = 1, as_read: bool = False) -> GraphNeeds:
    """Candidates of a gradient graph, ops that compute them, and their reads by the gradient.

    Args:
        info: information of the gradient graph that takes all activations.
        model: the graph that calls the forward graph, or the forward graph itself.
        held: number of calls of the model that have their activations in memory at a time.
        as_read: whether activations are recomputed right before the gradient reads them.
    """
    known = {each.tensor: each for each in candidates(info) if not each.is_gathered}  # those are gathered again
    paths = {t: each.path for t, each in known.items()}
    spans = _spans(info.graph)
    read = {
        known[e.fwd_tensor].path: spans[t]
        for t, e in zip(info.graph.inputs, info.expected_inputs, strict=False)
        if e.is_activation and e.fwd_tensor in known
    }
    calls = [*calls_in(model)]
    places = [i for i, (op, _) in enumerate(calls) if info.forward_graph in op.called_graphs]
    counts = [calls[i][1] for i in places] or [1]
    return GraphNeeds(
        name=name,
        calls=sum(counts),
        bytes={each.path: each.nbytes for each in known.values()},
        read=read,
        ops=tuple(_op_needs(info.forward_graph, paths, _factors(info))),
        steps=tuple(_steps(info.graph)),
        gradients=_gradient_bytes(info, model),
        ends=tuple(accumulate(counts[:-1])),
        span=(min(places, default=0), max(places, default=0)),
        held=held,
        as_read=as_read,
    )


def _op_needs(
    graph: popxl.Graph, paths: Mapping[popxl.Tensor, str], factors: set[popxl.Tensor], is_called: bool = False
) -> Iterator[OpNeeds]:
    """Costs of recomputing activations: an entry for each op, and for a call one for each activation that it returns.

    Args:
        paths: paths of the activations, and of the inputs of the graph that are activations.
        factors: tensors of the graph that products read elsewhere.
        is_called: whether it is called by the planned graph, which can keep only its results.
    """
    leading: dict[popxl.Tensor, tuple[dict[str, None], list[popxl.Op]]] = {}
    """For values that are no activations: the activations that they come from, and the ops in between."""
    for op in graph.ops:
        results = tuple(paths[t] for t in op.outputs if t in paths)
        if is_call(op) and len(results) > 1:
            (run,) = op.runs
            pairs = [*zip(run.inputs, run.given, strict=True), *zip(run.outputs, op.outputs, strict=True)]
            inner_factors = _read_by_products(run.graph) | {inner for inner, t in pairs if t in factors}
            yield from _op_needs(run.graph, {inner: paths[t] for inner, t in pairs if t in paths}, inner_factors, True)
            continue
        before = [({paths[t]: None}, []) if t in paths else leading.get(t, ({}, [])) for t in op.inputs]
        operands = {path: None for paths, _ in before for path in paths}
        ops = [*dict.fromkeys(each for _, ops in before for each in ops), op]
        if results:
            is_fused = [_is_fused(each, factors) for each in ops]
            yield OpNeeds(
                operands=tuple(operands),
                results=results,
                products=sum(_flops(each).products for each in ops),
                bytes=sum(_moved(each, fused) for each, fused in zip(ops, is_fused, strict=True)),
                dtype=op.inputs[0].dtype.name if op.inputs else op.outputs[0].dtype.name,
                is_fused=all(is_fused),
                exchanges=tuple(exchange for each in ops for exchange in _exchanges(each)),
            )
        elif is_called:
            leading.update(dict.fromkeys(op.outputs, (operands, ops)))


def _factors(info: GradGraphInfo) -> set[popxl.Tensor]:
    """Forward tensors that products read in the backward pass or in recomputation."""
    of = {t: e.fwd_tensor for t, e in zip(info.graph.inputs, info.expected_inputs, strict=False) if e.is_activation}
    return {of.get(t, t) for graph in (info.graph, info.forward_graph) for t in _read_by_products(graph)}


def _read_by_products(graph: popxl.Graph) -> set[popxl.Tensor]:
    return {t for op in graph.ops if _flops(op).products for t in op.inputs}


def _is_fused(op: popxl.Op, factors: set[popxl.Tensor]) -> bool:
    """Whether XLA fuses an elementwise op into the kernels that read its result.

    Products read their factors from memory.
    """
    by_element = all(t.nelms >= u.nelms for t in op.outputs for u in op.inputs)
    return by_element and factors.isdisjoint(op.outputs) and not _flops(op).products


def _moved(op: popxl.Op, is_fused: bool) -> int:
    """Bytes that recomputing the results of an op moves, beyond those of reading kept ones.

    A kernel reads the operands of ops that are fused into it, in place of their results.
    """
    read, made = sum(map(_nbytes, op.inputs)), sum(map(_nbytes, op.outputs))
    return max(read - made, made // 10) if is_fused else read + made


def _nbytes(t: popxl.Tensor) -> int:
    return math.prod(t.shape) * t.dtype.itemsize


def _spans(graph: popxl.Graph) -> dict[popxl.Tensor, tuple[int, int]]:
    """Live range of each tensor of a graph, as indices of its first and last op."""
    spans = dict[popxl.Tensor, tuple[int, int]]()
    for number, op in enumerate(graph.ops):
        for t in (*op.inputs, *op.outputs):
            spans[t] = (spans[t][0] if t in spans else number, number)
    end = max(len(graph.ops) - 1, 0)
    for t in graph.outputs:
        spans[t] = (spans[t][0] if t in spans else 0, end)
    return {t: spans.get(t, (0, 0)) for t in (*graph.inputs, *spans)}


def _steps(graph: popxl.Graph) -> Iterator[int]:
    """Bytes computed by the graph itself, at each op."""
    factors = _read_by_products(graph) | {*graph.outputs}
    spans = _spans(graph)
    made = [(spans[t], _nbytes(t)) for op in graph.ops if not _is_fused(op, factors) for t in op.outputs]
    for number in range(max(len(graph.ops), 1)):
        yield sum(size for (first, last), size in made if first <= number <= last)


def _gradient_bytes(info: GradGraphInfo, model: popxl.Graph) -> int:
    """Bytes of the gradients that a call returns for inputs of the model: its variables, usually."""
    of_inputs = {*info.outputs}
    for op, _ in calls_in(model):
        if info.forward_graph in op.called_graphs:
            given = zip(info.forward_graph.inputs, op.inputs[-len(info.forward_graph.inputs) :], strict=False)
            return sum(_nbytes(inner) for inner, outer in given if inner in of_inputs and outer.producer is None)
    return 0


def _flops(op: popxl.Op) -> Flops:
    """Floating-point operations of an op, including its called graphs."""
    found = own_flops(op)
    for graph in op.called_graphs:
        for each in graph.ops:
            found = found.plus(_flops(each), op.attributes.get("repeat_count", 1))
    return found


def _exchanges(op: popxl.Op, times: int = 1) -> Iterator[ReplicaExchange]:
    """Collectives of an op, including its called graphs."""
    if op.kind.between_replicas and (size := op.attributes["group_size"]) > 1:
        reach = (size - 1) * op.attributes["stride"] + 1
        yield from (ReplicaExchange(kind, nbytes, size, reach, times) for kind, nbytes in exchanges_of(op))
    for graph in op.called_graphs:
        for each in graph.ops:
            yield from _exchanges(each, times * op.attributes.get("repeat_count", 1))
