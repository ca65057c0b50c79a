"""`from_jax`: a function written in JAX, as ops of a graph.

The function is traced without a device, and every equation of the trace becomes one op: the kind is named after the
primitive (`Sin`, `DotGeneral`), the attributes are the equation's parameters, the gradient is JAX's. The result is
printed, called, differentiated and saved like any graph. The other direction, a graph as a JAX function, is
`popxl.to_jax`; a whole function as a single op is `popxl.OpKind`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from popxl.base.names import camel, identifier, name_of
from popxl.context import get_current_context
from popxl.core.create import constant
from popxl.core.recording import foreign_tensor
from popxl.core.tensor import Tensor
from popxl.core.tracing import trace
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ops.call import call
from popxl.ops.memory import available_after, offload, reload
from popxl.transforms.jax_control_flow import record_as_graphs, why_one_op
from popxl.transforms.jax_equations import (
    Policy,
    Treatment,
    at_line,
    conditions,
    first_effect,
    first_foreign,
    is_from_jax,
    known_spec,
    memory_moves,
    names_of,
    source_of,
)
from popxl.transforms.jax_keys import key_data
from popxl.transforms.jax_kinds import as_op, last_name
from popxl.values.spec import brief

if TYPE_CHECKING:
    from popxl.ir import Ir


def from_jax(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as a function of tensors: called on tensors, it adds one op for each equation of `fn`.

    Use it inside any graph, or pass it to `Ir.create_graph`. Tensor arguments (also inside of lists, tuples and dicts)
    represent arrays; all others are passed to `fn` unchanged. The result is that of `fn`, with tensors in place of
    arrays. `Ir.create_graph` makes inputs and outputs of all tensors in arguments and results, in the order of
    `jax.tree.leaves`.

    Equations that hold functions become graphs, with an op that runs them:

    - A function that you have jitted is a graph of its own within the Ir, and is called wherever `fn` calls it; so a
      jitted layer that is applied a hundred times is one graph with a hundred calls. Jitted functions of JAX itself are
      written out.
    - `scan`, `fori_loop` and a `while_loop` with a known trip count are loops, `cond` and `switch` conditionals.
    - A function with its own derivative (`jax.custom_jvp`, `jax.custom_vjp`, and so `jax.nn.relu`) is a graph that is
      differentiated by its rule.
    - `jax.checkpoint` is a graph that its gradient graph recomputes, except for the values that the policy saves,
      in device memory or in that of the host.

    An equation without an equivalent in graphs is one op, whose attribute `because` has the reason, and which `Ir.save`
    refuses: it saves no code. Examples are a `while_loop` with a data-dependent number of iterations, `jax.shard_map`
    and Pallas kernels. A session runs an op on one device, so a `shard_map` over several needs `popxl.to_jax`. Values
    that `fn` closes over become constants.

    A random key is a tensor of its data, `u32[2]` for the generator that JAX takes by default: as a value within `fn`,
    as a result, and as an argument. `fn` gets this data, which `jax.random` takes as a key.

    Which of the three:
        - `popxl.from_jax(fn)` exposes the content of `fn`: the ops can be read, transformed, and saved to a file.
        - `popxl.OpKind("Name", fn)` makes `fn` one opaque op. Take it for kernels, for functions with
          an effect or with values that no tensor can hold, and where one name says enough.
        - `popxl.to_jax(graph)` goes the other way.

    Args:
        fn: a function of arrays that JAX can trace.

    Returns:
        A function with the name and signature of `fn`. It raises

        - `RuntimeError` outside of a graph, `ValueError` for a tensor of another graph;
        - `PopxlError` if JAX refuses the operands, if `fn` has effects (prints, callbacks, changes of a `jax.Ref`), or
          if a value on the way has a dtype that tensors do not have. Nothing is added to the graph then.

    See also: `jax.make_jaxpr`.

    Example:
        >>> def layer(x, w):
        ...     return jnp.tanh(x @ w)
        >>> ir = popxl.Ir()
        >>> x, w = popxl.TensorSpec((2, 4), popxl.float32), popxl.TensorSpec((4, 3), popxl.float32)
        >>> graph = ir.create_graph(popxl.from_jax(layer), x, w)
        >>> print(graph)
        layer_subgraph(0)(x: f32[2, 4], w: f32[4, 3]):
            dot_general_out: f32[2, 3] = DotGeneral(x, w, dimension_numbers=(((1,), (0,)), ((), ())), ...)
            tanh_out: f32[2, 3]        = Tanh(dot_general_out)
            return tanh_out
    """
    if not callable(fn):
        raise TypeError(f"from_jax: `fn` must be a function; got {fn!r} ({type(fn).__name__}).")

    @functools.wraps(fn)
    def of_tensors(*args: Any, **kwargs: Any) -> Any:
        graph = get_current_context().graph
        leaves, structure = jax.tree.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for i, t in enumerate(tensors):
            if t.graph_ref is not graph.ref:
                raise foreign_tensor(f"from_jax({name})", f"tensor {i}", t, graph)

        def of_arrays(*arrays: Any) -> Any:
            waiting = iter(arrays)
            values = [next(waiting) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = jax.tree.unflatten(structure, values)
            return fn(*args, **kwargs)

        try:
            traced, results = trace(of_arrays, [t.spec for t in tensors])
        except (TypeError, ValueError) as problem:
            raise PopxlError(
                f"from_jax: `{name}` cannot be traced on {', '.join(map(brief, tensors)) or 'no tensors'}: {problem}"
            ) from problem
        body = _without_outer_jit(traced)
        _check(name, body)
        with graph.ir.undone_on_failure():
            outputs = Recorder(graph.ir).record(body, tensors)
        return jax.tree.unflatten(jax.tree.structure(results), outputs)

    name = getattr(fn, "__qualname__", None) or name_of(fn)
    of_tensors.__qualname__ = name
    of_tensors._takes_trees = True  # type: ignore[attr-defined]
    return of_tensors


# From a trace to ops -------------------------------------------------------------------------------------------------


def _without_outer_jit(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Unwrap a trace consisting of one jitted call."""
    while True:
        equations = traced.jaxpr.eqns
        if len(equations) != 1 or equations[0].primitive.name != "jit":
            return traced
        (call_equation,) = equations
        if call_equation.invars != traced.jaxpr.invars or call_equation.outvars != traced.jaxpr.outvars:
            return traced
        traced = call_equation.params["jaxpr"]


def _check(name: str, traced: ClosedJaxpr) -> None:
    """Raise `PopxlError` for traces without op form: effects, or unsupported value types."""
    last = "fn" if "lambda" in name else last_name(name)
    op = f"popxl.OpKind({camel(last) or 'Name'!r}, {last})"
    remedy = f"Make the function a single op instead: {op}."
    equation = first_effect(traced.jaxpr)
    if equation is not None:
        uses_refs = any("Ref{" in value.aval.str_short() for value in (*equation.invars, *equation.outvars))
        what = "changes a `jax.Ref`" if uses_refs else "does more than compute its results"
        instead = "Pass new values on" if uses_refs else "Leave prints and callbacks out (`ops.print_tensor` prints)"
        raise PopxlError(
            f"from_jax: `{name}` {what} in `{equation.primitive.name}`{at_line(equation)}, and an op for one "
            f"equation only computes. {instead}, or make the function a single op: {op}."
        )
    foreign = first_foreign(traced.jaxpr)
    if foreign is not None:
        equation, type_ = foreign
        if equation is None:
            raise PopxlError(
                f"from_jax: `{name}` takes or returns a value of the type {type_}, and no tensor can hold that. "
                f"{remedy}"
            )
        raise PopxlError(
            f"from_jax: `{name}` handles a value of the type {type_} in `{equation.primitive.name}`"
            f"{at_line(equation)}, and no tensor can hold that. {remedy}"
        )


class Recorder:
    """Adds the equations of traces to graphs.

    Args:
        policy: values to save or offload where a graph is recomputed. Functions that JAX has jitted are then inlined.
        evaluated: a graph whose outputs replace calls of its own function on its inputs.
    """

    def __init__(self, ir: Ir, policy: Policy | None = None, evaluated: Graph | None = None) -> None:
        self.ir = ir
        self.treated: dict[Treatment, set[Tensor]] = {"keep": set(), "offload": set(), "recompute": set()}
        self.evaluated = evaluated
        self._policy = policy

    def for_graph(self, graph: Graph) -> Recorder:
        """Recorder for residuals of a graph's derivative rule."""
        return Recorder(self.ir, evaluated=graph)

    def for_inner_graphs(self) -> Recorder:
        """Recorder for ordinary inner graphs."""
        return Recorder(self.ir)

    @contextmanager
    def within(self, graph: Graph) -> Iterator[None]:
        """Make a graph the current one, without the name scopes around it."""
        with get_current_context().set(scope_prefix=""), graph:
            yield

    def record(self, traced: ClosedJaxpr, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Record result tensors for given argument tensors."""
        jaxpr = traced.jaxpr
        tensor_of_value: dict[Any, Tensor] = dict(zip(jaxpr.invars, inputs, strict=True))
        constants, bools = dict(zip(jaxpr.constvars, traced.consts, strict=True)), conditions(jaxpr)

        def tensor_of(value: Any) -> Tensor:
            if isinstance(value, Literal):
                return self.constant_of(value)
            if value not in tensor_of_value:
                tensor_of_value[value] = _constant(constants[value], value.aval)
            return tensor_of_value[value]

        for equation in jaxpr.eqns:
            if not equation.outvars:  # nothing needs it
                continue
            if equation.outvars[0] in bools:
                tensor_of_value[equation.outvars[0]] = tensor_of(equation.invars[0])
                continue
            results = self._recorded(equation, tensor_of)
            tensor_of_value.update(zip(equation.outvars, results, strict=True))
            if self._policy is not None:
                self.treated[self._policy(equation)].update(results)
        return [tensor_of(value) for value in jaxpr.outvars]

    def _recorded(self, equation: JaxprEqn, read: Callable[[Any], Tensor]) -> Sequence[Tensor]:
        """The results of an equation, recorded at the user's line. `read` gives the tensors of its operands."""
        ops = get_current_context().graph.ops
        count = len(ops)
        results = self._equation(equation, read)
        source = source_of(equation)
        for op in ops[count:]:
            if source is not None and isinstance(op._created_at, tuple):  # unless an explicit location is set
                op._created_at = source
        return results

    def _equation(self, equation: JaxprEqn, read: Callable[[Any], Tensor]) -> Sequence[Tensor]:
        if equation.primitive.name == "jit":
            inner, arguments = equation.params["jaxpr"], [read(value) for value in equation.invars]
            if is_from_jax(inner) or self._policy is not None:
                return self.record(inner, arguments)
            results = call(self._graph_of_jitted(inner), *arguments)
            return results[: len(equation.outvars)]  # autodiff may have given the graph further outputs
        if equation.primitive.name in ("random_wrap", "random_unwrap"):  # of a key and its data, which are one tensor
            return [read(equation.invars[0])]
        if equation.primitive.name == "device_put" and (moves := memory_moves(equation)):
            moved = zip(equation.invars, moves, strict=True)
            return [(offload if space == "Host" else reload)(read(value)) for value, space in moved]
        why = why_one_op(equation, read)
        converted = None if why else record_as_graphs(self, equation, read)
        if converted is not None:
            return converted
        kind, operands, attributes = as_op(equation, why)
        return kind.record(*map(read, operands), **attributes).outputs

    # Graphs ---------------------------------------------------------------------------------------------------------

    def add_input(self, value: Any, name: str) -> Tensor:
        """Add an input for an argument to the current graph."""
        return get_current_context().graph.add_input(known_spec(value.aval), identifier(name))

    def constant_of(self, value: Literal) -> Tensor:
        """A constant of the current graph."""
        return _constant(value.val, value.aval)

    def graph_of(
        self, body: ClosedJaxpr, policy: Policy | None = None, recomputed: bool = False, waits: bool = False
    ) -> Graph:
        """A new graph of a function.

        Args:
            policy: values of the graph to save or offload, if it is recomputed for its gradient.
            waits: compute nothing before the last input is there.
        """
        graph = self.ir.create_empty_graph(body.jaxpr.debug_info.func_name)
        recorder = Recorder(self.ir, policy)
        with self.within(graph):
            named = zip(body.jaxpr.invars, names_of(body), strict=True)
            inputs = [self.add_input(value, name) for value, name in named]
            if waits:
                inputs[:-1] = [available_after(t, inputs[-1]) for t in inputs[:-1]]
            for t in recorder.record(body, inputs):
                graph.add_output(t)
        if recomputed:
            computed = {t for t in recorder.treated["offload"] if t.producer is not None}
            graph.keeps, graph.offloads = frozenset(recorder.treated["keep"] | computed), frozenset(computed)
        return graph

    def _graph_of_jitted(self, inner: ClosedJaxpr) -> Graph:
        """The graph of a jitted function. JAX traces it once for the same operands, so that it is made once."""
        graphs = _graphs.setdefault(self.ir, {})
        existing = graphs[inner]() if inner in graphs else None
        if existing is not None and existing in self.ir.graphs:
            return existing
        graph = self.graph_of(inner)
        graphs[inner] = graph.ref
        return graph


_graphs: weakref.WeakKeyDictionary[Ir, dict[ClosedJaxpr, weakref.ref[Graph]]] = weakref.WeakKeyDictionary()
"""The graphs that were made of jitted functions."""


def _constant(value: Any, aval: Any) -> Tensor:
    spec = known_spec(aval)
    (data,) = key_data([value])
    return constant(np.asarray(data, spec.dtype.as_jax()), spec.dtype)
