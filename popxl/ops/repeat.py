"""Running a graph a fixed number of times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from popxl import dtypes
from popxl.aliasing import written_inputs
from popxl.context import get_current_context
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.op import OpKind
from popxl.ops.call import CallSiteInfo, bind_inputs, by_the_machine, call_op
from popxl.spec import TensorSpec, brief
from popxl.tensor import Tensor, TensorLike

__all__ = ["repeat", "repeat_with_info"]

# The wrapper graph that a loop runs has these inputs before the user's: the number of the turn and the flag to go on.
# The flag is also its first output.
EXTRA_INPUTS = 2
EXTRA_OUTPUTS = 1


class RepeatSiteInfo(CallSiteInfo):
    """The call site of a repeat. It describes the wrapper graph, which calls the user's graph once."""

    _first_input = EXTRA_INPUTS
    _first_output = EXTRA_OUTPUTS


def _overwritten(attributes: Mapping[str, Any]) -> frozenset[int]:
    """Positions of the inputs that the loop writes back: carried ones by reference, and others if they are changed."""
    wrapper = attributes["graph"]
    written = written_inputs(wrapper)
    carried = len(wrapper.outputs) - EXTRA_OUTPUTS
    return frozenset(
        i
        for i, t in enumerate(wrapper.inputs[EXTRA_INPUTS:])
        if t.by_ref and (i < carried or i + EXTRA_INPUTS in written)
    )


def _carried_specs(*inputs: Tensor, graph: Graph, repeat_count: int) -> list[TensorSpec]:
    return [t.spec for t in graph.outputs[EXTRA_OUTPUTS:]]


def _refuse(forward: Any, gs: Any) -> dict[int, Tensor]:
    raise PopxlError(
        f"autodiff: {forward.op!r} repeats a graph, and repeats have no derivative yet. Repeat a graph that "
        "contains the "
        "forward and the gradient call instead."
    )


loop_kind = OpKind(
    "Loop",
    by_the_machine,
    shape=_carried_specs,
    modifies=_overwritten,
    aliased=False,
    gradient=_refuse,
    calls=("graph",),
    colocated=False,
)


def repeat(
    graph: Graph,
    repeat_count: int,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
) -> tuple[Tensor, ...]:
    """Run a graph `repeat_count` times.

    The graph's first inputs, as many as it has outputs, are carried: each turn gets the results of the turn before.
    The others are the same in every turn, unless they are by reference: then changes made to them in place are kept
    from turn to turn and written back at the end. Streams go on with each turn.

    Args:
        graph: what to run. Output `k` has the shape and dtype of input `k`.
        repeat_count: number of turns, 0 or more.
        *inputs, inputs_dict: values for the graph's inputs, as for `call`.

    Returns:
        The results of the last turn; the first values of the carried inputs if `repeat_count` is 0.

    Raises:
        ValueError: for a negative count, more outputs than inputs, and as `call` does.
        PopxlError: if a carried output does not look like its input, and as `call` does.

    Example:
        >>> graph = ir.create_graph(lambda x, step: x + step, x, step)
        >>> (y,) = ops.repeat(graph, 4, x, step)      # x + 4 * step
    """
    return repeat_with_info(graph, repeat_count, *inputs, inputs_dict=inputs_dict).outputs


def repeat_with_info(
    graph: Graph,
    repeat_count: int,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """As `repeat`, but returns the record of the call site.

    The loop runs a wrapper graph, which calls `graph` once: `info.called_graph` is the wrapper. It has two inputs
    before those of `graph` (the number of the turn and a flag) and one output before (the flag), and parent indices of
    inputs count them. `info.inputs` and `info.outputs` hold only the user's tensors.

    Example:
        >>> info = ops.repeat_with_info(graph, 4, x, step)
        >>> info.called_graph.called_graphs == (graph,)
        True
    """
    if repeat_count < 0:
        raise ValueError(f"Repeat count must be >= 0; it is {repeat_count} for the graph {graph.name}.")
    if len(graph.outputs) > len(graph.inputs):
        raise ValueError(
            f"To repeat the subgraph {graph.name}, it may not have more outputs than inputs, because outputs "
            "become the "
            f"inputs of the next turn; it has {len(graph.outputs)} outputs and {len(graph.inputs)} inputs."
        )
    for k, (out, into) in enumerate(zip(graph.outputs, graph.inputs, strict=False)):
        if out.spec.to_tuple() != into.spec.to_tuple():
            raise PopxlError(
                f"repeat: output {k} of {graph.title}, `{out.name}`, is {brief(out)} and becomes the input "
                f"`{into.name}` of the next turn, which is {brief(into)}; they have to be alike."
            )
    bound = bind_inputs(graph, inputs, inputs_dict, check_inputs)
    context = get_current_context()
    ir = context.graph.ir
    with context.set(scope_prefix=""):
        wrapper = ir.create_empty_graph(f"{graph.id}__loop_wrapper")
        with wrapper:
            wrapper.add_input(TensorSpec((), dtypes.int32), "iteration")
            go_on = wrapper.add_input(TensorSpec((), dtypes.bool), "keep_going")
            own = [wrapper.add_input(t.spec, t.name, t.by_ref) for t in graph.inputs]
            results = call_op(graph, tuple(own), numbered(graph, ir)).outputs
            for t in (go_on, *results):
                wrapper.add_output(t)
        try:
            return RepeatSiteInfo(
                call_op(wrapper, bound, numbered(graph, ir), loop_kind, repeat_count=int(repeat_count))
            )
        except Exception:
            graph.call_sites.pop()
            ir.remove_graph(wrapper)
            raise


def numbered(graph: Graph, ir: Any) -> list[str]:
    """Names for the results of a loop: those of the graph's outputs, always with a number."""
    return [f"{t.name}__t{ir.next_suffix()}" for t in graph.outputs]
