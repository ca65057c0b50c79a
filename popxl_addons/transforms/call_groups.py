"""Calls of one graph divided among copies of it, so that each group of calls can have a gradient graph of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import popxl
from popxl.context import get_current_context
from popxl.extend.graphs import is_call
from popxl.extend.ops import Op
from popxl.tensor import Constant

__all__ = ["calls_in", "copy_graph", "divide_calls"]


def calls_in(graph: popxl.Graph, times: int = 1) -> Iterator[tuple[Op, int]]:
    """The calls that a graph makes by itself, in its loops and in its branches, in order, and how often each runs.

    Args:
        graph: the graph that calls.
        times: how often it runs itself.
    """
    for op in graph.ops:
        if is_call(op):
            yield op, times
        else:
            for body in op.called_graphs:
                yield from calls_in(body, times * op.attributes.get("repeat_count", 1))


def divide_calls(model: popxl.Graph, graph: popxl.Graph, counts: Sequence[int]) -> list[popxl.Graph]:
    """Have the calls of `graph` in `model` run copies of it: the first `counts[0]` calls `graph`, the next a copy, …

    Args:
        model: the graph that makes the calls, by itself and in its loops.
        graph: the graph that is called.
        counts: how many calls each group has.

    Returns:
        The graph of each group.

    Raises:
        ValueError: if the counts do not sum up to the number of calls, or a group ends within a loop. Nothing has
            changed then.
    """
    bounds = [*accumulate(counts)]
    group_of: dict[Op, int] = {}
    done = 0
    for op, times in calls_in(model):
        if graph not in op.called_graphs:
            continue
        group = next((i for i, bound in enumerate(bounds) if done < bound), len(bounds))
        done += times
        if group < len(bounds) and (done > bounds[group] or group_of.setdefault(op, group) != group):
            raise ValueError(
                f"memory: the plan divides the calls of {graph.title} into groups of {[*counts]}, and a loop makes "
                f"{times} of them ({op.source}), which have one gradient graph. Let groups end where loops end."
            )
    if done != bounds[-1]:
        raise ValueError(
            f"memory: the plan has groups of {[*counts]} calls of {graph.title}, {bounds[-1]} together, and "
            f"{model.title} makes {done}."
        )
    graphs = [graph, *(copy_graph(graph) for _ in counts[1:])]
    for op, group in group_of.items():
        if group:
            _redirect(op, graphs[group])
    return graphs


def copy_graph(graph: popxl.Graph) -> popxl.Graph:
    """A graph with the same ops, on the same devices, under the same names, and with the lines of the program.

    It calls the graphs that `graph` calls.
    """
    copy = graph.ir.create_empty_graph(graph.name.partition("_subgraph")[0])
    context = get_current_context()
    of: dict[popxl.Tensor, popxl.Tensor] = {}
    with copy, popxl.in_sequence(False), context.set(scope_prefix=""):
        of.update((t, copy.add_input_like(t, t.by_ref)) for t in graph.inputs)
        of.update((t, popxl.constant(t.data, t.dtype, t.name)) for t in graph.tensors if isinstance(t, Constant))
        ids: dict[int, int] = {}
        for op in graph.ops:
            with context.set(ipu_id=op.ipu, io_tile_set=op.io_tiles, debug_record=op.debug_record):
                twin = op.clone([of[t] for t in op.inputs])
            twin.edit(modified=op.modified, name=op.name, after=tuple(ids[id] for id in op.after if id in ids))
            of.update(zip(op.outputs, twin.outputs, strict=True))
            ids[op.id] = twin.id
        copy.show_as({twin: t.path for t, twin in of.items()})
        for t in graph.outputs:
            popxl.graph_output(of[t])
    return copy


def _redirect(call: Op, to: popxl.Graph) -> None:
    """Have a call run another graph, which has the same inputs and outputs."""

    def recompute(*inputs: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        operands, attributes = call.kind.arguments(call, inputs)
        with get_current_context().set(debug_record=call.debug_record):
            name = next(iter(call.kind.graphs))
            twin = call.kind.record(*operands, results=[t.name for t in call.outputs], **{**attributes, name: to})
        twin.edit(modified=call.modified)
        return twin.outputs

    call.graph.replace([call], recompute)
