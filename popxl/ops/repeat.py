"""Running a graph a fixed number of times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from popxl import dtypes
from popxl.context import get_current_context
from popxl.core.aliasing import written_inputs
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Tensor, TensorLike
from popxl.core.traits import Overwrites, Runs
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ops.call import (
    CallSiteInfo,
    bind_inputs,
    call_gradient_graph,
    call_op,
    check_callable,
    check_fit,
    lowered_by_runtime,
    seed_or_zeros,
)
from popxl.ops.elementwise import add_n
from popxl.ops.host import init
from popxl.ops.index import picks_row, row
from popxl.values.shapes import integer
from popxl.values.spec import TensorSpec, brief

__all__ = ["repeat", "repeat_with_info"]

# The wrapper graph of a loop has these inputs before the user's: the iteration number and the flag to continue. The
# flag is also its first output.
EXTRA_INPUTS = 2
EXTRA_OUTPUTS = 1


class RepeatSiteInfo(CallSiteInfo):
    """The call site of a repeat. It describes the wrapper graph, which calls the user's graph once."""

    _first_input = EXTRA_INPUTS
    _first_output = EXTRA_OUTPUTS

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The results of the last iteration, in the order of the user's graph."""
        return self.op.outputs[: self.op.attributes["carried"]]


def _overwritten(attributes: Mapping[str, Any]) -> frozenset[int]:
    """Positions of inputs written back: carried by-reference inputs, and changed ones."""
    wrapper, carried = attributes["graph"], attributes["carried"]
    by_ref = [i for i, t in enumerate(wrapper.inputs[EXTRA_INPUTS:]) if t.by_ref]
    # Changes of them are found in the user's graph: the wrapper's call of it counts as changing all of them.
    changed = written_inputs(wrapper.called_graphs[0]) if by_ref else frozenset()
    return frozenset(i for i in by_ref if i < carried or i in changed)


def returned_by_ref(op: Op) -> frozenset[int]:
    """Positions of the carried inputs by reference that an iteration returns: they end up as what the loop returns."""
    graph = op.called_graphs[0].called_graphs[0]
    pairs = zip(graph.inputs, graph.outputs[: op.attributes["carried"]], strict=False)
    return frozenset(k for k, (t, result) in enumerate(pairs) if t.by_ref and result.origin is t)


def _carried_specs(
    *inputs: Tensor, graph: Graph, carried: int, repeat_count: int, backwards: bool = False, overlap: bool = False
) -> list[TensorSpec]:
    if type(repeat_count) is not int or not 0 <= repeat_count < 2**31:  # a file may hold any value
        raise PopxlError(f"`repeat_count` is {repeat_count!r}; expected 0 to {2**31 - 1}.")
    for name, value in (("backwards", backwards), ("overlap", overlap)):
        if type(value) is not bool:
            raise PopxlError(f"`{name}` is {value!r}; expected a bool.")
    if not 0 <= carried <= min(len(inputs), len(graph.outputs) - EXTRA_OUTPUTS) or len(graph.called_graphs) != 1:
        raise PopxlError(f"{graph.title} is no wrapper of a graph that carries {carried} values from turn to turn.")
    check_fit(graph.called_graphs[0], inputs, graph.inputs[EXTRA_INPUTS:])  # the user's graph, to name it
    results = [t.spec for t in graph.outputs[EXTRA_OUTPUTS:]]
    return results[:carried] + [_stacked(spec, {"repeat_count": repeat_count}) for spec in results[carried:]]


def _stacked(spec: TensorSpec, attributes: Mapping[str, Any]) -> TensorSpec:
    """Outputs that the wrapper gains are not carried: the loop returns those of all iterations, stacked."""
    return TensorSpec((attributes["repeat_count"], *spec.shape), spec.dtype)


def _carried(op: Op) -> tuple[Tensor, ...]:
    """The outputs of the wrapper that become inputs of the next iteration."""
    return op.called_graphs[0].outputs[EXTRA_OUTPUTS : EXTRA_OUTPUTS + op.attributes["carried"]]


def rows_of(wrapper: Graph) -> dict[Tensor, Tensor]:
    """Rows that a loop wrapper selects by the iteration number, with stacked inputs that it reads for nothing else."""
    iteration = wrapper.inputs[0]
    used = Counter(t for op in wrapper.ops for t in op.inputs)
    used.update(wrapper.outputs)
    return {
        op.outputs[0]: op.inputs[0]
        for op in wrapper.ops
        if picks_row(op, iteration) and used[op.inputs[0]] == 1 and op.inputs[0] in wrapper.inputs[EXTRA_INPUTS:]
    }


def _sought(wrapper: Graph) -> list[Tensor]:
    """Tensors of a wrapper whose gradients a loop needs: rows replace the tensors that they are selected from, whose
    gradients would be large and nearly all zeros in each iteration.
    """
    rows = {stack: row for row, stack in rows_of(wrapper).items()}
    return [rows.get(t, t) for t in wrapper.inputs]


def _loop_gradient(forward: Any, gs: tuple[Tensor | None, ...]) -> dict[int, Tensor]:
    """Differentiate a loop: run the wrapper's gradient over iterations in reverse.

    It carries the gradients of the carried values, and sums of the gradients of the others. The forward loop stacks the
    values that an iteration's gradient reads; gradients that arrive for such stacks (second derivatives have them) are
    unstacked, iteration by iteration. Gradients of rows are stacked.
    """
    op = forward.op
    flowing = [k for k, t in enumerate(_carried(op)) if t.dtype.is_inexact]
    if op.attributes["repeat_count"] == 0:  # the results are the carried inputs; to `returns`, the wrapper is nothing
        return {k: g for k in flowing if (g := gs[k]) is not None}
    info = forward.differentiate(op.attributes["graph"])
    return {} if info is None else _GradientLoop(forward, info, flowing).build(gs)


class _GradientLoop:
    """Builder of the loop that differentiates a loop.

    Args:
        info: gradient of the wrapper.
        flowing: positions of the carried values with gradients.
    """

    def __init__(self, forward: Any, info: Any, flowing: Sequence[int]) -> None:
        self._forward, self._op, self._info, self._flowing = forward, forward.op, info, flowing
        self._wrapper = self._op.attributes["graph"]
        self._own_inputs = self._wrapper.inputs[EXTRA_INPUTS:]
        self._others = self._own_inputs[self._op.attributes["carried"] :]  # inputs that the loop does not carry
        self._rows = rows_of(self._wrapper)
        self._body = self._wrapper.ir.create_empty_graph(f"{info.graph.id}__loop_wrapper")
        self._initial: list[Tensor] = []

    def build(self, gs: tuple[Tensor | None, ...]) -> dict[int, Tensor]:
        """Add the loop. Returns the gradients of the forward loop's inputs, by position."""
        op, info, body, wrapper, own_inputs = self._op, self._info, self._body, self._wrapper, self._own_inputs
        results, carried = _carried(op), op.attributes["carried"]
        summed = [t for t in info.outputs if t in self._others]
        row_gradients = [t for t in info.outputs if t in self._rows]
        iteration, go_on = (
            body.add_input(TensorSpec((), dtypes.int32), "iteration"),
            body.add_input(_FLAG, "keep_going"),
        )
        seeds = [(results[k], self._seed(results[k], seed_or_zeros(gs[k], results[k]))) for k in self._flowing]
        sums = {t: self._seed(t, init(t.shape, t.dtype)) for t in summed}
        stacked = zip(wrapper.outputs[EXTRA_OUTPUTS + carried :], gs[carried:], strict=False)  # some are just added
        of_stacks = [(t, self._seed(t, g)) for t, g in stacked if g is not None]
        values, stacks = self._add_activations()
        values |= {wrapper.inputs[0]: iteration, wrapper.inputs[1]: go_on}
        with body:
            values |= {t: _stack_row(stack, iteration, t) for t, stack in stacks.items()}
            arrived = [*seeds, *((t, _stack_row(stack, iteration, t)) for t, stack in of_stacks)]
            operands = [
                values[expected.fwd_tensor] if expected.is_activation else _total(expected.fwd_tensor, arrived)
                for expected in info.expected_inputs
            ]
            gradients = call_gradient_graph(info, operands)
            carried_gradients = [seed_or_zeros(gradients.get(own_inputs[k]), results[k]) for k in self._flowing]
            totals = [sums[t] + gradients[t] for t in summed]
            for t in (go_on, *carried_gradients, *totals, *(gradients[t] for t in row_gradients)):
                body.add_output(t)
        count, backwards, overlap = map(op.attributes.get, ("repeat_count", "backwards", "overlap"))
        num_carried, names = len(self._flowing) + len(summed), loop_names(body, EXTRA_OUTPUTS)
        loop = loop_op(body, tuple(self._initial), count, num_carried, names, not backwards, bool(overlap))
        sources = [*(own_inputs[k] for k in self._flowing), *summed, *(self._rows[t] for t in row_gradients)]
        return dict(zip(map(own_inputs.index, sources), loop.outputs, strict=True))

    def _add_input(self, t: Tensor, value: Tensor, prefix: str = "") -> Tensor:
        """Add an input for a forward tensor, with its value before the first iteration."""
        self._initial.append(value)
        return self._body.add_input(value.spec, prefix + t.name, path=prefix + t.path)

    def _seed(self, t: Tensor, value: Tensor) -> Tensor:
        """Add an input for the gradient of a forward tensor."""
        return self._add_input(t, value, "Gradient___")

    def _add_activations(self) -> tuple[dict[Tensor, Tensor], dict[Tensor, Tensor]]:
        """Add inputs for the activations that the gradient reads: values of all iterations, and stacks of values."""
        values: dict[Tensor, Tensor] = {}
        stacks: dict[Tensor, Tensor] = {}
        read = self._forward.read
        for t in (expected.fwd_tensor for expected in self._info.expected_inputs if expected.is_activation):
            if t in self._others:
                values[t] = self._add_input(t, read(self._operand(t)))
            elif t in self._rows:
                stacks[t] = self._add_input(self._rows[t], read(self._operand(self._rows[t])))
            elif t not in self._wrapper.inputs[:EXTRA_INPUTS]:
                stacks[t] = self._add_input(t, read(_stack_of(self._op, t)))
        return values, stacks

    def _operand(self, t: Tensor) -> Tensor:
        """Operand of the forward loop for an input of its wrapper."""
        return self._op.inputs[self._own_inputs.index(t)]


def _stack_row(stack: Tensor, iteration: Tensor, t: Tensor) -> Tensor:
    """One iteration's row of a stack, selected on the stacked tensor's IPU."""
    with get_current_context().on_ipu(final_ipu(t)):
        return row(stack, iteration)


def final_ipu(t: Tensor) -> int | None:
    """The IPU where the producing op leaves a tensor."""
    op = t.origin.producer
    return None if op is None else op.actual_location(t.origin)[0]


def _total(t: Tensor, arrived: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Summed gradient of a wrapper output, possibly returned repeatedly."""
    terms = [g for output, g in arrived if output is t]
    return add_n(*terms) if len(terms) > 1 else seed_or_zeros(terms[0] if terms else None, t)


def _stack_of(op: Op, t: Tensor) -> Tensor:
    """The result of a loop that stacks a tensor of its wrapper over iterations; added to the loop if it is missing."""
    wrapper, first = op.called_graphs[0], EXTRA_OUTPUTS + op.attributes["carried"]
    if t not in wrapper.outputs[first:]:
        wrapper.add_output(t)
    return op.outputs[wrapper.outputs.index(t, first) - EXTRA_OUTPUTS]


def _that_matter(op: Op, callee: Graph, matter: AbstractSet[Tensor]) -> list[Tensor]:
    """Outputs of the wrapper that matter: over iterations, each carried value can come to depend on every other."""
    carried, count = op.attributes["carried"], op.attributes["repeat_count"]
    if not count or matter.isdisjoint(op.outputs):
        return []
    stacked = zip(callee.outputs[EXTRA_OUTPUTS + carried :], op.outputs[carried:], strict=True)
    found = [*_carried(op), *(t for t, result in stacked if result in matter)]
    return [t for t in dict.fromkeys(found) if t.dtype.is_inexact]


_FLAG = TensorSpec((), dtypes.bool)

loop_kind: OpKind = OpKind(
    "Loop",
    lowered_by_runtime,
    shape=_carried_specs,
    gradient=_loop_gradient,
    traits=[
        Overwrites(aliased=False, positions=_overwritten),
        Runs(
            ("graph",),
            returns=_that_matter,
            gains=_stacked,
            iterations="repeat_count",
            backwards="backwards",
            overlap="overlap",
            carried="carried",
            sought=_sought,
            own_inputs=EXTRA_INPUTS,
            own_outputs=EXTRA_OUTPUTS,
        ),
    ],
)


def repeat(
    graph: Graph,
    repeat_count: int,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
    overlap: bool = False,
) -> tuple[Tensor, ...]:
    """Run a graph `repeat_count` times.

    The graph's first inputs, one for each output, are carried: each iteration gets the results of the previous one. The
    others are the same in every iteration, unless they are by reference: in-place changes are then kept from iteration
    to iteration and written back at the end. Streams continue with each iteration.

    Args:
        graph: graph to run. Output `k` has the shape and dtype of input `k`.
        repeat_count: number of iterations, 0 or more.
        *inputs, inputs_dict: values for the graph's inputs, as for `call`.
        overlap: whether an iteration may begin before the previous one has ended, if the graph's ops are on several
            IPUs and these are separate devices. Then the iterations go through the devices as through a pipeline. For
            a forward and a backward pass, this is the schedule 1F1B: all devices work at the same time, and the first
            one has the values of as many iterations in memory as there are devices. The results are the same. It has
            no effect for ops on one IPU, and where iterations have to wait for the end of the previous one: for a
            value that they change, or a stream. Consecutive ops on an IPU wait together.

    Returns:
        The results of the last iteration; the first values of the carried inputs if `repeat_count` is 0.

    Raises:
        ValueError: for a negative count, more outputs than inputs, and as for `call`.
        PopxlError: if a carried output has another spec than its input, and as for `call`.

    Example:
        >>> graph = ir.create_graph(lambda x, dx: x + dx, x, dx)
        >>> (y,) = ops.repeat(graph, 4, x, dx)      # x + 4 * dx
    """
    return repeat_with_info(graph, repeat_count, *inputs, inputs_dict=inputs_dict, overlap=overlap).outputs


def repeat_with_info(
    graph: Graph,
    repeat_count: int,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
    check_inputs: bool = True,
    overlap: bool = False,
) -> CallSiteInfo:
    """Add a loop like `repeat`; returns the record of the call site.

    The loop runs a wrapper graph, which calls `graph` once: `info.called_graph` is the wrapper. It has two inputs
    before those of `graph` (the iteration number and a flag) and one output before (the flag), and parent indices of
    inputs count them. `info.inputs` and `info.outputs` hold only the user's tensors.

    Example:
        >>> graph = ir.create_graph(lambda x, dx: x + dx, x, dx)
        >>> info = ops.repeat_with_info(graph, 4, x, dx)
        >>> info.called_graph.called_graphs == (graph,)
        True
    """
    check_callable(graph, get_current_context().graph, "repeat: `graph`")
    repeat_count = _checked_count(graph, repeat_count)
    _check_carried(graph)
    bound = bind_inputs(graph, inputs, inputs_dict, check_inputs)
    if type(overlap) is not bool:
        raise TypeError(f"repeat: `overlap` is {overlap!r} ({type(overlap).__name__}); expected a bool.")
    op = loop_over(graph, repeat_count, bound, overlap=overlap)
    op.edit(name=get_current_context().scope_prefix + op.name)  # the results take no name scope, the op does
    return RepeatSiteInfo(op)


def loop_over(
    graph: Graph,
    count: int,
    bound: tuple[Tensor, ...],
    carried: int | None = None,
    rows: int = 0,
    backwards: bool = False,
    overlap: bool = False,
) -> Op:
    """Add a loop over a graph, by way of a wrapper.

    Args:
        bound: tensors of the current graph for the inputs. Those for the last `rows` inputs have a row for each
            iteration.
        carried: number of leading outputs that become inputs of the next iteration; by default all. The others are
            stacked over all iterations.
        rows: number of inputs that get one row in each iteration.
        backwards: whether iterations are counted down, so that the first one has the last rows.
        overlap: as for `repeat`.
    """
    ir = graph.ir
    carried = len(graph.outputs) if carried is None else carried
    wrapper = ir.create_empty_graph(f"{graph.id}__loop_wrapper")
    try:
        with get_current_context().set(scope_prefix=""):
            with wrapper:
                iteration = wrapper.add_input(TensorSpec((), dtypes.int32), "iteration")
                go_on = wrapper.add_input(_FLAG, "keep_going")
                num_whole = len(bound) - rows
                inner_inputs = [wrapper.add_input_like(t, t.by_ref) for t in graph.inputs[:num_whole]]
                stacked_inputs = zip(graph.inputs[num_whole:], bound[num_whole:], strict=True)
                stacks = [(t.name, wrapper.add_input(stack.spec, f"{t.name}_of_turns")) for t, stack in stacked_inputs]
                inner_inputs += [row(stack, iteration, name) for name, stack in stacks]
                results = call_op(graph, tuple(inner_inputs), loop_names(graph)).outputs
                for t in (go_on, *results):
                    wrapper.add_output(t)
            return loop_op(wrapper, bound, count, carried, loop_names(graph), backwards, overlap)
    except BaseException:
        ir.remove_graph(wrapper)
        raise


def loop_op(
    wrapper: Graph,
    bound: tuple[Tensor, ...],
    count: int,
    carried: int,
    names: list[str],
    backwards: bool = False,
    overlap: bool = False,
) -> Op:
    """Add a loop that runs a wrapper."""
    order = {name: True for name, is_set in (("backwards", backwards), ("overlap", overlap)) if is_set}
    return call_op(wrapper, bound, names, loop_kind, repeat_count=count, carried=carried, **order)


def _checked_count(graph: Graph, repeat_count: Any) -> int:
    """A non-negative iteration count."""
    count = integer(repeat_count, "repeat: `repeat_count`", "be an int")
    if count < 0:
        raise ValueError(f"Repeat count must be >= 0; it is {count} for the graph {graph.name}.")
    return count


def _check_carried(graph: Graph) -> None:
    """Check that the outputs of a graph can become its first inputs."""
    if len(graph.outputs) > len(graph.inputs):
        raise ValueError(
            f"To repeat the subgraph {graph.name}, it may not have more outputs than inputs, because outputs become "
            f"the inputs of the next iteration; outputs: {len(graph.outputs)}, inputs: {len(graph.inputs)}."
        )
    for k, (out, into) in enumerate(zip(graph.outputs, graph.inputs, strict=False)):
        if out.spec.to_tuple() != into.spec.to_tuple():
            raise PopxlError(
                f"repeat: output {k} of {graph.title}, `{out.name}`, is {brief(out)} and becomes the input "
                f"`{into.name}` of the next iteration, which is {brief(into)}; they have to be alike."
            )


def loop_names(graph: Graph, first: int = 0) -> list[str]:
    """Names for the results of a loop: those of the graph's outputs, always with a number."""
    return [f"{t.name}__t{graph.ir.next_suffix()}" for t in graph.outputs[first:]]
