"""`repeat_graph`: runs a finished graph in a loop. Applications call it on the main graph, last of all."""

from __future__ import annotations

import popxl
from popxl import Tensor, ops
from popxl.extend.arguments import check_type, integer
from popxl_addons.transforms._stand_in import stand_in

__all__ = ["repeat_graph"]


def repeat_graph(graph: popxl.Graph, repeat_count: int) -> popxl.Graph:
    """Repeat a graph's work `repeat_count` times, in place.

    All its ops move into a new graph, which a loop repeats; only ops that run when weights are loaded or read back
    stay. Variables, constants and inputs stay too. The new graph has them as inputs by reference, so state is carried
    from iteration to iteration. The order given by `popxl.in_sequence` stays. Outputs of the graph are those of the
    last iteration.

    Host streams continue with each iteration: set ``ir.num_host_transfers`` accordingly. Tensors that the graph has
    computed are no longer in it, and later ops cannot use them.

    Args:
        graph: graph to repeat, possibly the main graph. It need not be current.
        repeat_count: number of iterations. With 1 or fewer nothing happens.

    Returns:
        The new graph; `graph` itself if nothing happened.

    Raises:
        TypeError: if `repeat_count` is not an integer.
        PopxlError: if an op that stays reads a result of one that moves. Nothing has changed then.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph as main:
        ...     count = popxl.variable(0, name="count")
        ...     count += 1
        >>> body = repeat_graph(main, 5)
        >>> [op.op_type for op in main.ops], [op.op_type for op in body.ops]
        (['Loop'], ['AddLhsInplace'])
        >>> ir.num_host_transfers = 5
    """
    check_type(graph, popxl.Graph, "repeat_graph: `graph`", "a popxl.Graph, such as `graph.graph` of one with names")
    if integer(repeat_count, "repeat_graph: `repeat_count`") <= 1:
        return graph
    ir, outputs = graph.ir, graph.outputs
    moving = [op for op in graph.ops if op.execution_context is popxl.ExecutionContext.Normal]
    computed = {t for op in moving for t in op.outputs}
    carried = dict.fromkeys(t for t in outputs if t in computed)
    body = ir.create_empty_graph("repeat_graph")
    for t in carried:  # a loop returns its carried values, so it carries its results
        body.add_input_like(t)
    outer: dict[Tensor, Tensor] = {}

    def input_for(t: Tensor) -> Tensor:
        if t not in outer:
            outer[t] = body.add_input_like(t, by_ref=True)
        return outer[t]

    read = dict.fromkeys(t for op in moving for t in op.inputs if t not in computed)
    given = {t: stand_in(t, (), body, input_for) for t in read}
    graph.trim_outputs(0)
    try:
        graph.move(moving, body, given)
    except BaseException:
        for t in outputs:
            graph.add_output(t, extend_calls=False)
        ir.remove_graph(body)
        raise
    for t in carried:
        body.add_output(t)
    with graph:
        initial = [ops.init(**t.spec) for t in carried]
        results = dict(zip(carried, ops.repeat(body, repeat_count, *initial, *outer), strict=True))
    for t in outputs:
        graph.add_output(results.get(t, t), extend_calls=False)
    return body
