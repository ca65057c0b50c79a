"""Groups of calls of one graph, each with a copy of it, and thus with a gradient graph of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import popxl
from popxl.context import get_current_context
from popxl.extend.graphs import is_call
from popxl.extend.ops import Op
from popxl_addons.transforms.graph_copies import call_in_place_of, copy_graph


def calls_in(graph: popxl.Graph, times: int = 1) -> Iterator[tuple[Op, int]]:
    """Direct calls of a graph in order, including loops and branches, with their repeat counts."""
    for op in graph.ops:
        if is_call(op):
            yield op, times
        else:
            for body in op.called_graphs:
                yield from calls_in(body, times * op.attributes.get("repeat_count", 1))


def divide_calls(model: popxl.Graph, graph: popxl.Graph, counts: Sequence[int]) -> list[popxl.Graph]:
    """Redirect calls of `graph` in `model`: the first `counts[0]` keep it, each later group calls a copy.

    Args:
        model: graph that makes the calls, directly and in its loops.

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
            f"{model.title} makes {done}. Groups fit the number of calls that they were made for: plan this program "
            "anew, or divide the calls of a plan that has all of them in one group, such as that of a policy: "
            "`plan.with_treatments('recompute', '*', calls=slice(4))`."
        )
    graphs = [graph, *(copy_graph(graph)[0] for _ in counts[1:])]
    for op, group in group_of.items():
        if group:
            _redirect(op, graphs[group])
    return graphs


def _redirect(call: Op, to: popxl.Graph) -> None:
    """Redirect a call to another graph with equal inputs and outputs."""

    def recompute(*inputs: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        with get_current_context().set(debug_record=call.debug_record):
            twin = call_in_place_of(call, inputs, to)
        twin.edit(modified=call.modified)
        return twin.outputs

    call.graph.replace([call], recompute)
