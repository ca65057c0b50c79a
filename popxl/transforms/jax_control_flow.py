"""JAX equations that hold functions, as ops that run graphs: loops, conditionals, calls.

An equation without an equivalent in graphs stays one op, and `why_one_op` gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from popxl import dtypes
from popxl.core.create import constant
from popxl.core.tensor import Constant, Tensor
from popxl.core.tracing import traces_in
from popxl.graph import Graph
from popxl.ops.call import call
from popxl.ops.conditional import conditional
from popxl.ops.logic import less
from popxl.ops.repeat import loop_over
from popxl.transforms import jax_equations as of_jax
from popxl.transforms.jax_derivative import JaxDerivative
from popxl.transforms.jax_kinds import DERIVATIVES, combiner_name, of_equation

if TYPE_CHECKING:
    from popxl.transforms.from_jax import Recorder

Read = Callable[[Any], Tensor]


def why_one_op(equation: JaxprEqn, read: Read) -> str:
    """Why an equation that holds code is one op; `""` for the others."""
    name, parameters = equation.primitive.name, equation.params
    if name not in _AS_GRAPHS:
        return _ONE_OP.get(name, f"no graph says what `{name}` does") if _holds_code(equation) else ""
    if name == "scan" and not parameters["length"]:
        return "it takes no turn"
    if name == "while" and of_jax.iteration_count(equation, lambda operand: _number(operand, read)) is None:
        return "how many turns it takes is known when it runs"
    if name in DERIVATIVES and of_jax.is_op(equation):
        return "it is an op with rules"
    return of_jax.obstacle(*map(of_jax.closed, traces_in(equation)))


_ONE_OP = {
    "pallas_call": "a kernel has no ops",
    "shard_map": "it is the program of one device of a mesh",
    "custom_partitioning": "it says itself how devices share it",
    "pure_callback": "it is code of Python",
}


def _holds_code(equation: JaxprEqn) -> bool:
    functions = (value for value in equation.params.values() if callable(value) and not isinstance(value, type))
    return any(combiner_name(value) is None for value in traces_in(equation)) or any(True for _ in functions)


def record_as_graphs(recorder: Recorder, equation: JaxprEqn, read: Read) -> Sequence[Tensor] | None:
    """Record an equation as an op that runs graphs. Returns its results; `None` if it is not such an equation."""
    as_graphs = _AS_GRAPHS.get(equation.primitive.name)
    return None if as_graphs is None else as_graphs(recorder, equation, read)


def _number(operand: Any, read: Read) -> np.ndarray | None:
    """Value of an integer operand, if known."""
    if isinstance(operand, Literal):
        return of_jax.as_counter(operand.val, operand.aval)
    t = read(operand)
    return of_jax.as_counter(t.data, operand.aval) if isinstance(t, Constant) else None


# Loops ---------------------------------------------------------------------------------------------------------------


def _convert_while(recorder: Recorder, equation: JaxprEqn, read: Read) -> Sequence[Tensor]:
    iterations = of_jax.iteration_count(equation, lambda operand: _number(operand, read))
    assert iterations is not None
    return _loop(recorder, of_jax.while_loop(equation, iterations), read)


def _loop(recorder: Recorder, loop: of_jax.Loop, read: Read) -> Sequence[Tensor]:
    operands = tuple(map(read, loop.operands))
    body = recorder.graph_of(loop.body)
    return loop_over(body, loop.iterations, operands, loop.carried, loop.rows, loop.backwards).outputs


# Branches ------------------------------------------------------------------------------------------------------------


def _cond(recorder: Recorder, equation: JaxprEqn, read: Read) -> Sequence[Tensor]:
    number, *operands = map(read, equation.invars)
    return _choice(recorder, equation.params["branches"], number, operands)


def _choice(
    recorder: Recorder, branches: Sequence[ClosedJaxpr], number: Tensor, operands: Sequence[Tensor], first: int = 0
) -> Sequence[Tensor]:
    """Run the branch of a given number by binary search; the first branch has the number `first`."""
    if len(branches) == 1:
        return call(*_branch(recorder, branches, number, operands, first))
    half = len(branches) // 2
    low = _branch(recorder, branches[:half], number, operands, first)
    high = _branch(recorder, branches[half:], number, operands, first + half)
    if number.dtype is dtypes.bool:  # false comes first
        return conditional(number, high[0], low[0], high[1], low[1])
    return conditional(less(number, constant(first + half, number.dtype)), low[0], high[0], low[1], high[1])


def _branch(
    recorder: Recorder, branches: Sequence[ClosedJaxpr], number: Tensor, operands: Sequence[Tensor], first: int
) -> tuple[Graph, Sequence[Tensor]]:
    """Graph that runs one of several branches, with its input bindings."""
    if len(branches) == 1:
        (body,) = branches
        used = of_jax.used_operands(body)
        return recorder.graph_of(of_jax.with_operands(body, used)), [operands[i] for i in used]
    graph = recorder.ir.create_empty_graph("switch")
    with recorder.within(graph):
        inputs = [graph.add_input_like(t) for t in (number, *operands)]
        for t in _choice(recorder, branches, inputs[0], inputs[1:], first):
            graph.add_output(t)
    return graph, [number, *operands]


# Calls ---------------------------------------------------------------------------------------------------------------


def _with_derivative(recorder: Recorder, equation: JaxprEqn, read: Read) -> Sequence[Tensor]:
    """Convert a function with a custom derivative: call a graph with this rule."""
    operands, function = of_equation(equation)
    arguments = tuple(map(read, operands))
    evaluated = recorder.evaluated
    rule = None if evaluated is None else evaluated.derivative
    if evaluated is not None and rule is not None and arguments == evaluated.inputs and rule.belongs_to(function):
        return evaluated.outputs[: rule.results]
    body = of_jax.closed(equation.params["call_jaxpr"])
    graph = recorder.ir.create_empty_graph(function.name)
    plain = recorder.for_inner_graphs()
    with plain.within(graph):
        named = zip(equation.invars, of_jax.names_of(body), strict=True)
        names = {operand: name for operand, name in named if not isinstance(operand, Literal)}
        input_of = {operand: plain.add_input(operand, names[operand]) for operand in operands}
        inputs = [plain.constant_of(v) if isinstance(v, Literal) else input_of[v] for v in equation.invars]
        for t in plain.record(body, inputs):
            graph.add_output(t)
    graph.derivative = JaxDerivative(plain, function, graph)
    return call(graph, *arguments)


def _remat(recorder: Recorder, equation: JaxprEqn, read: Read) -> Sequence[Tensor]:
    """Convert `jax.checkpoint`: call a graph that its gradient recomputes.

    If JAX has differentiated it already, it is the recomputation: it waits for its last operand, a gradient.
    """
    body, operands = of_jax.closed(equation.params["jaxpr"]), [read(operand) for operand in equation.invars]
    if equation.params["differentiated"]:
        graph = recorder.graph_of(body, waits=bool(equation.params["prevent_cse"]))
    else:
        graph = recorder.graph_of(body, policy=of_jax.policy_of(equation), recomputed=True)
    return call(graph, *operands)[: len(equation.outvars)]


_REMAT = ("checkpoint", "remat", "remat2")

_AS_GRAPHS: dict[str, Callable[[Recorder, JaxprEqn, Read], Sequence[Tensor]]] = {
    "scan": lambda recorder, equation, read: _loop(recorder, of_jax.scan_of(equation), read),
    "while": _convert_while,
    "cond": _cond,
    **dict.fromkeys(DERIVATIVES, _with_derivative),
    **dict.fromkeys(_REMAT, _remat),
}
