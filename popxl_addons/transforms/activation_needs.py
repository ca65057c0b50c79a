"""Memory and time of the activations of a gradient graph, from which a plan within a budget is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import popxl
from popxl.extend.collectives import exchanges_of
from popxl.extend.graphs import Flops, is_attention, is_call, live_ranges, op_work, own_flops, size_in_bytes
from popxl.extend.memory import GraphNeeds, OpNeeds, ReplicaExchange
from popxl.transforms import GradGraphInfo
from popxl_addons.grad_info import activation_inputs
from popxl_addons.transforms.activations import candidates
from popxl_addons.transforms.call_groups import calls_in


def graph_needs(
    info: GradGraphInfo, backward: popxl.Graph, name: str, model: popxl.Graph, live: int = 1, as_read: bool = False
) -> GraphNeeds:
    """Candidates of a gradient graph, ops that compute them, and their reads by the gradient.

    Args:
        info: information of the gradient graph that takes all activations.
        backward: the gradient graph that the program calls.
        model: the graph that calls the forward graph, or the forward graph itself.
        live: number of steps of the model that have their activations in memory at a time.
        as_read: whether activations are recomputed right before the gradient reads them.
    """
    activations = {a.tensor: a for a in candidates(info) if not a.is_gathered}  # those are gathered again
    paths = {t: a.path for t, a in activations.items()}
    spans = _spans(info.graph)
    read_spans = {paths[forward_t]: spans[t] for t, forward_t in activation_inputs(info).items() if forward_t in paths}
    calls = [*calls_in(model)]
    positions = [i for i, (op, _) in enumerate(calls) if info.forward_graph in op.called_graphs]
    counts = [calls[i][1] for i in positions] or [1]
    variables = {*_variables(info.forward_graph, model)}
    return GraphNeeds(
        name=name,
        calls=sum(counts),
        bytes={a.path: a.nbytes for a in activations.values()},
        read=read_spans,
        ops=tuple(_op_needs(info.forward_graph, paths, _factors_of(info))),
        steps=tuple(_steps(info.graph)),
        gradients=sum(size_in_bytes(t) for t in info.outputs if t in variables),
        waiting_gradients=_waiting_bytes(info, variables, backward),
        ends=tuple(accumulate(counts[:-1])),
        span=(min(positions, default=0), max(positions, default=0)),
        live_steps=live,
        as_read=as_read,
    )


def _op_needs(
    graph: popxl.Graph, paths: Mapping[popxl.Tensor, str], factors: _Factors, is_called: bool = False
) -> Iterator[OpNeeds]:
    """Costs of recomputing activations: one entry per op; for a call, one per returned activation.

    Args:
        paths: paths of the activations, and of the inputs of the graph that are activations.
        factors: tensors of the graph that products read elsewhere.
        is_called: whether it is called by the planned graph, which can keep only its results.
    """
    sources_of: dict[popxl.Tensor, tuple[dict[str, None], list[popxl.Op]]] = {}
    """Source activations of other values, with the ops in between."""
    for op in graph.ops:
        results = tuple(paths[t] for t in op.outputs if t in paths)
        if is_call(op) and len(results) > 1:
            (run,) = op.runs
            pairs = [*zip(run.inputs, run.operands, strict=True), *zip(run.outputs, op.outputs, strict=True)]
            inner_factors = _factors(run.graph) | factors.where(pairs)
            yield from _op_needs(run.graph, {inner: paths[t] for inner, t in pairs if t in paths}, inner_factors, True)
            continue
        sources = [({paths[t]: None}, []) if t in paths else sources_of.get(t, ({}, [])) for t in op.inputs]
        operands = {path: None for paths, _ in sources for path in paths}
        ops = [*dict.fromkeys(source_op for _, ops in sources for source_op in ops), op]
        if results:
            is_fused = [_is_fused(source_op, factors.any_product) for source_op in ops]
            yield OpNeeds(
                operands=tuple(operands),
                results=results,
                products=sum(_flops(source_op).products for source_op in ops),
                bytes=sum(_moved(source_op, fused) for source_op, fused in zip(ops, is_fused, strict=True)),
                dtype=op.inputs[0].dtype.name if op.inputs else op.outputs[0].dtype.name,
                is_fused=all(is_fused),
                fused_bytes=_moved_if_products_fuse(ops, factors),
                statistics=tuple(paths[t] for t in _statistics(op) if t in paths),
                exchanges=tuple(exchange for source_op in ops for exchange in _exchanges(source_op)),
                is_kernel=any(map(is_attention, ops)),
            )
        elif is_called:
            sources_of.update(dict.fromkeys(op.outputs, (operands, ops)))


class _Factors(NamedTuple):
    """Tensors that products read.

    Attributes:
        any_product: operands of any product.
        of_attention: operands of attention, whose kernels are several products.
    """

    any_product: set[popxl.Tensor]
    of_attention: set[popxl.Tensor]

    def where(self, pairs: Sequence[tuple[popxl.Tensor, popxl.Tensor]]) -> _Factors:
        """Factors with the second tensor of each pair replaced by the first."""
        return _Factors(*({inner for inner, t in pairs if t in group} for group in self))

    def __or__(self, more: _Factors) -> _Factors:
        return _Factors(*(a | b for a, b in zip(self, more, strict=True)))


def _factors(graph: popxl.Graph) -> _Factors:
    """Operands of a graph's products."""
    products = [op for op in graph.ops if _flops(op).products]
    return _Factors(
        *({t for op in factor_ops for t in op.inputs} for factor_ops in (products, filter(is_attention, products)))
    )


def _factors_of(info: GradGraphInfo) -> _Factors:
    """Forward tensors that products read in the backward pass or in recomputation."""
    inputs_of = [(forward_t, t) for t, forward_t in activation_inputs(info).items()]
    return _factors(info.graph).where(inputs_of) | _factors(info.forward_graph)


def _is_fused(op: popxl.Op, factors: set[popxl.Tensor]) -> bool:
    """Whether XLA fuses an elementwise op into the kernels that read its result.

    Products read their factors from memory.
    """
    by_element = all(t.nelms >= u.nelms for t in op.outputs for u in op.inputs)
    return by_element and factors.isdisjoint(op.outputs) and not _flops(op).products


def _moved_if_products_fuse(ops: Sequence[popxl.Op], factors: _Factors) -> int | None:
    """Bytes as of `_moved` where XLA fuses ops into products, as on TPUs; `None` if it does not fuse these.

    Normalisations are elementwise with their statistics, which are small. Kernels of attention read arrays.
    """
    are_fused = all(_is_by_element(op) and factors.of_attention.isdisjoint(op.outputs) for op in ops)
    return sum(_moved(op, True) for op in ops) if are_fused else None


def _is_by_element(op: popxl.Op) -> bool:
    """Whether the first result is elementwise, given the statistics. That includes normalisations, unlike
    `OpWork.is_elementwise`: a kernel of their own reduces the statistics."""
    first, *more = op.outputs
    is_large = all(first.nelms >= t.nelms for t in op.inputs)
    return is_large and (not more or bool(_statistics(op))) and not _flops(op).products


def _statistics(op: popxl.Op) -> list[popxl.Tensor]:
    """Statistics of a normalisation: results that the first one is recomputed from."""
    trait = op.kind.recomputed_from
    return [] if trait is None else [op.outputs[i] for i in trait.results]


def _moved(op: popxl.Op, is_fused: bool) -> int:
    """Bytes that recomputing the results of an op moves, beyond those of reading kept ones.

    A kernel reads the operands of ops that are fused into it, in place of their results.
    """
    work = op_work(op)
    return max(work.read - work.written, work.written // 10) if is_fused else work.read + work.written


def _spans(graph: popxl.Graph) -> dict[popxl.Tensor, tuple[int, int]]:
    """Live range of each tensor of a graph, as indices of its first and last op: inputs from their first use on."""
    uses = live_ranges(((), (*op.inputs, *op.outputs)) for op in graph.ops)
    spans = {t: (ranges[0].first, ranges[-1].last) for t, ranges in uses.items()}
    end = max(len(graph.ops) - 1, 0)
    for t in graph.outputs:
        spans[t] = (spans[t][0] if t in spans else 0, end)
    return {t: spans.get(t, (0, 0)) for t in (*graph.inputs, *spans)}


def _steps(graph: popxl.Graph) -> Iterator[int]:
    """Bytes computed by the graph itself, at each op."""
    factors = _factors(graph).any_product | {*graph.outputs}
    spans = _spans(graph)
    sized_spans = [(spans[t], size_in_bytes(t)) for op in graph.ops if not _is_fused(op, factors) for t in op.outputs]
    for number in range(max(len(graph.ops), 1)):
        yield sum(size for (first, last), size in sized_spans if first <= number <= last)


def _waiting_bytes(info: GradGraphInfo, variables: set[popxl.Tensor], backward: popxl.Graph) -> int:
    """Bytes of a call's gradients for variables whose updates wait for other gradients: for a norm of all of them."""
    positions = [i for i, t in enumerate(info.outputs) if t in variables]
    gradients = {t for call in backward.call_sites for i in positions for t in _returned(call.outputs[i])}
    waiting = set[popxl.Tensor]()
    for graph in {t.graph for t in gradients}:
        computed_from = {t: {t} for t in gradients if t.graph is graph}
        waiting |= {t for t in graph.outputs if t in computed_from}
        for op in graph.ops:
            sources = {t for operand in op.inputs for t in computed_from.get(operand, ())}
            waiting |= sources if len(sources) > 1 else set()
            for t in op.outputs:
                computed_from.setdefault(t, sources)
    return sum(map(size_in_bytes, waiting)) // max(len(backward.call_sites), 1)


def _variables(graph: popxl.Graph, model: popxl.Graph) -> Iterator[popxl.Tensor]:
    """Inputs of a called graph that are inputs of the model: usually variables."""
    for op, _ in calls_in(model):
        if graph in op.called_graphs:
            bindings = zip(graph.inputs, op.inputs[-len(graph.inputs) :], strict=False)
            yield from (inner for inner, outer in bindings if outer.producer is None)
            return


def _returned(t: popxl.Tensor) -> Iterator[popxl.Tensor]:
    """A tensor where callers have it, if its graph returns it; else the tensor itself."""
    calls = t.graph.call_sites if t in t.graph.outputs else []
    if not calls:
        yield t
    for call in calls:
        yield from _returned(call.outputs[t.graph.outputs.index(t)])


def _flops(op: popxl.Op) -> Flops:
    """Floating-point operations of an op, including its called graphs."""
    total = own_flops(op)
    for graph in op.called_graphs:
        for inner in graph.ops:
            total = total.plus(_flops(inner), op.attributes.get("repeat_count", 1))
    return total


def _exchanges(op: popxl.Op, times: int = 1) -> Iterator[ReplicaExchange]:
    """Collectives of an op, including its called graphs."""
    if op.kind.between_replicas and (size := op.attributes["group_size"]) > 1:
        reach = (size - 1) * op.attributes["stride"] + 1
        yield from (ReplicaExchange(kind, nbytes, size, reach, times) for kind, nbytes in exchanges_of(op))
    for graph in op.called_graphs:
        for inner in graph.ops:
            yield from _exchanges(inner, times * op.attributes.get("repeat_count", 1))
