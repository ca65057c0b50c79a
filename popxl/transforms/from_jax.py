"""`from_jax`: a function written in JAX, as ops of a graph.

The function is traced without a device, and every equation of the trace becomes one op: the kind is named after the
primitive (`Sin`, `DotGeneral`), the attributes are the equation's parameters, the gradient is JAX's. What comes out is
printed, called, differentiated and saved like any graph. The other direction, a graph as a function of JAX, is
`popxl.to_jax`; a whole function as a single op is `popxl.OpKind`.
"""

from __future__ import annotations

import functools
import os
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, jaxpr_as_fun, primitives

from popxl.base.names import camel, identifier
from popxl.base.source import SourceLocation
from popxl.context import get_current_context
from popxl.core.create import constant
from popxl.core.declaration import OpKind
from popxl.core.recording import foreign_tensor
from popxl.core.tensor import Tensor
from popxl.core.tracing import abstract_evaluation, trace
from popxl.core.traits import VJP
from popxl.dtypes import dtype
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ops.call import call
from popxl.values.spec import TensorSpec, brief

if TYPE_CHECKING:
    from popxl.ir import Ir

__all__ = ["from_jax"]

_LIBRARY = os.path.dirname(jax.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


def from_jax(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A JAX function as a function of tensors: called on tensors, it adds one op for each equation of `fn`.

    Use it inside any graph, or let `Ir.create_graph` make a graph of it. Of the arguments, tensors (also inside of
    lists, tuples and dicts) stand for arrays; everything else is handed to `fn` as it is. The result is what `fn`
    returns, with tensors in place of arrays.

    A function that you have jitted becomes a graph of its own within the Ir, and is called wherever `fn` calls it; so a
    jitted layer that is applied a hundred times is one graph with a hundred calls. Jitted functions of JAX itself are
    written out. What else holds functions is one op each, which `Ir.save` refuses: it saves no code. Such are `scan`,
    `while_loop`, `cond`, `jax.checkpoint`, `jax.shard_map`, kernels of Pallas, and functions with their own derivative
    (`jax.custom_jvp`, `jax.custom_vjp`, and so `jax.nn.relu`). A session runs an op on one device, so that a
    `shard_map` over several is for `popxl.to_jax`. What `fn` closes over becomes constants.

    Which of the three:
        - `popxl.from_jax(fn)` shows what `fn` does: the ops can be read, transformed, and kept in a file.
        - `popxl.OpKind("Name", fn)` makes `fn` one op that nobody looks into. Take it for kernels, for functions with
          an effect or with values that no tensor can hold (random keys), and where one name says enough.
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
            filled = [next(waiting) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = jax.tree.unflatten(structure, filled)
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
            outputs = _Recorder(graph.ir).record(body, tensors)
        return jax.tree.unflatten(jax.tree.structure(results), outputs)

    name = getattr(fn, "__qualname__", None) or _name_of_object(fn)
    of_tensors.__qualname__ = name
    return of_tensors


def _name_of_object(fn: Any) -> str:
    """Name for an unnamed callable."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__


# From a trace to ops -------------------------------------------------------------------------------------------------


def _without_outer_jit(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Unwrap a trace consisting of one jitted call."""
    while True:
        equations = traced.jaxpr.eqns
        if len(equations) != 1 or equations[0].primitive.name != "jit":
            return traced
        (only,) = equations
        if only.invars != traced.jaxpr.invars or only.outvars != traced.jaxpr.outvars:
            return traced
        traced = only.params["jaxpr"]


def _check(name: str, traced: ClosedJaxpr) -> None:
    """Raise `PopxlError` for traces without op form: effects, or unsupported value types."""
    last = "fn" if "lambda" in name else _last(name)
    op = f"popxl.OpKind({camel(last) or 'Name'!r}, {last})"
    remedy = f"Make the function a single op instead: {op}."
    for equation in _equations(traced.jaxpr):
        if equation.effects and equation.primitive.name != "jit":  # what is in that comes, too
            uses_refs = any("Ref{" in value.aval.str_short() for value in (*equation.invars, *equation.outvars))
            what = "changes a `jax.Ref`" if uses_refs else "does more than compute its results"
            instead = (
                "Pass new values on" if uses_refs else "Leave prints and callbacks out (`ops.print_tensor` prints)"
            )
            raise PopxlError(
                f"from_jax: `{name}` {what} in `{equation.primitive.name}`{_at_line(equation)}, and an op for one "
                f"equation only computes. {instead}, or make the function a single op: {op}."
            )
    for equation in _equations(traced.jaxpr):
        for value in (*equation.invars, *equation.outvars):
            if _spec(value.aval) is None:
                raise PopxlError(
                    f"from_jax: `{name}` handles a value of the type {value.aval.str_short()} in "
                    f"`{equation.primitive.name}`{_at_line(equation)}, and no tensor can hold that. {remedy}"
                )
    for value in (*traced.jaxpr.invars, *traced.jaxpr.constvars, *traced.jaxpr.outvars):
        if _spec(value.aval) is None:
            raise PopxlError(
                f"from_jax: `{name}` takes or returns a value of the type {value.aval.str_short()}, and no tensor can "
                f"hold that. {remedy}"
            )


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations that become ops, those of jitted functions included."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "jit":
            yield from _equations(equation.params["jaxpr"].jaxpr)


def _spec(aval: Any) -> TensorSpec | None:
    """Tensor spec of a JAX type, if possible."""
    try:
        return TensorSpec(tuple(map(int, aval.shape)), dtype.as_dtype(np.dtype(aval.dtype)))
    except (AttributeError, TypeError, ValueError):  # tokens; random keys; narrow integers and the like
        return None


class _Recorder:
    """Adds the equations of a trace to the current graph."""

    def __init__(self, ir: Ir) -> None:
        self._ir = ir

    def record(self, traced: ClosedJaxpr, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Record result tensors for given argument tensors."""
        jaxpr = traced.jaxpr
        known: dict[Any, Tensor] = dict(zip(jaxpr.invars, inputs, strict=True))
        constants = dict(zip(jaxpr.constvars, traced.consts, strict=True))

        def tensor_of(value: Any) -> Tensor:
            if isinstance(value, Literal):
                return _constant(value.val, value.aval)
            if value not in known:
                known[value] = _constant(constants[value], value.aval)
            return known[value]

        for equation in jaxpr.eqns:
            results = self._equation(equation, tensor_of)
            known.update(zip(equation.outvars, results, strict=True))
        return [tensor_of(value) for value in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, read: Callable[[Any], Tensor]) -> Sequence[Tensor]:
        """The results of an equation. `read` gives the tensors of its operands."""
        if equation.primitive.name != "jit":
            kind, operands, attributes = _as_op(equation)
            op = kind.record(*map(read, operands), **attributes)
            source = _source(equation)
            if source is not None and isinstance(op._made_at, tuple):  # nobody has said anything else
                op._made_at = source
            return op.outputs
        inner = equation.params["jaxpr"]
        operands = [read(value) for value in equation.invars]
        if (inner.jaxpr.debug_info.func_filename or "").startswith(_LIBRARY):
            return self.record(inner, operands)
        results = call(self._graph_of(inner), *operands)
        return results[: len(equation.outvars)]  # autodiff may have given the graph further outputs

    def _graph_of(self, inner: ClosedJaxpr) -> Graph:
        """The graph of a jitted function. JAX traces it once for the same operands, so that it is made once."""
        graphs = _graphs.setdefault(self._ir, {})
        found = graphs[inner]() if inner in graphs else None
        if found is not None and found in self._ir.graphs:
            return found
        jaxpr, about = inner.jaxpr, inner.jaxpr.debug_info
        names = about.arg_names or ()
        if len(names) != len(jaxpr.invars):  # JAX does not promise them
            names = ("x",) * len(jaxpr.invars)
        graph = self._ir.create_empty_graph(about.func_name)
        with get_current_context().set(scope_prefix=""), graph:
            inputs = [
                graph.add_input(_known_spec(value.aval), identifier(name))
                for value, name in zip(jaxpr.invars, names, strict=True)
            ]
            for t in self.record(inner, inputs):
                graph.add_output(t)
        graphs[inner] = graph.ref
        return graph


_graphs: weakref.WeakKeyDictionary[Ir, dict[ClosedJaxpr, weakref.ref[Graph]]] = weakref.WeakKeyDictionary()
"""The graphs that were made of jitted functions."""


def _known_spec(aval: Any) -> TensorSpec:
    """The spec for a type of JAX that `_check` has let pass."""
    spec = _spec(aval)
    assert spec is not None
    return spec


def _constant(value: Any, aval: Any) -> Tensor:
    spec = _known_spec(aval)
    return constant(np.asarray(value, spec.dtype.as_jax()), spec.dtype)


def _source(equation: JaxprEqn) -> SourceLocation | None:
    """The user's line that an equation comes from: the innermost one that is neither JAX's nor ours."""
    traceback: Any = equation.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        if not frame.file_name.startswith((_LIBRARY, _OURS)):
            return SourceLocation(frame.file_name, frame.line_num, frame.function_name)
    return None


def _at_line(equation: JaxprEqn) -> str:
    source = _source(equation)
    return "" if source is None else f", at `{source.text}` ({source})"


def _last(name: str) -> str:
    return re.sub(r"\W+", "", name.rpartition(".")[2])


# Kinds ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Function:
    """JAX code as an op attribute: loop body, or function with custom derivative.

    It prints as its name. It has no hash, so that no declaration remembers it: a declaration lives longer than code.

    Attributes:
        name: name of the function.
        code: what JAX runs: a jaxpr, or a function.
    """

    name: str
    code: Any

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return self.name


def _as_op(equation: JaxprEqn) -> tuple[OpKind, Sequence[Any], dict[str, Any]]:
    """The op that an equation becomes: its kind, its operands, its attributes."""
    primitive, parameters = equation.primitive, equation.params
    if primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
        return _kind(primitive), equation.invars, {n: _attribute(n, value) for n, value in parameters.items()}
    called = parameters["call_jaxpr"].jaxpr
    operands = list(dict.fromkeys(value for value in equation.invars if not isinstance(value, Literal)))
    alone = called.replace(constvars=[], invars=operands, outvars=equation.outvars, eqns=[equation])
    name = called.debug_info.func_name
    return _function_kind(_last(name)), operands, {"function": Function(name, ClosedJaxpr(alone, ()))}


@cache
def _kind(primitive: Primitive) -> OpKind:
    """The declaration of a primitive. Made once."""

    def lowering(*operands: Any, **attributes: Any) -> Any:
        parameters = {n: _multiplying(n, _parameter(v)) for n, v in attributes.items()}
        results = primitive.bind(*operands, **primitive.get_bind_params(parameters))
        return list(results) if primitive.multiple_results else results  # those of a `shard_map` are no list

    gradient = None if primitive.name == "stop_gradient" else VJP
    return _declared(primitive.name, lowering, f"jax.{primitive.name}", gradient)


@cache
def _function_kind(name: str) -> OpKind:
    """Cached declaration for functions with custom derivatives, by name."""

    def lowering(*operands: Any, function: Function) -> Any:
        results = jaxpr_as_fun(_multiplying("", function.code))(*operands)
        return results[0] if len(results) == 1 else results

    return _declared(name or "function", lowering, f"jax.function.{name}", VJP)


def _declared(name: str, lowering: Callable[..., Any], key: str, gradient: Any) -> OpKind:
    def shape(*operands: Any, **attributes: Any) -> Any:
        specs = tuple(t.spec for t in operands)

        def derived() -> Any:
            with jax.enable_x64(True):  # JAX has said each dtype, and where it said 64 bits they are meant
                return abstract_evaluation(kind.on_arrays(None, attributes), specs)

        return kind.remembered(("shape", tuple(attributes.items()), specs), derived)

    kind = OpKind(camel(name), lowering, shape=shape, gradient=gradient, key=key)
    return kind


def kind_with_key(key: str) -> OpKind | None:
    """Look up a primitive's declaration by key, such as `"jax.sin"`, for saved programs."""
    primitive = _primitives().get(key.removeprefix("jax.")) if key.startswith("jax.") else None
    return None if primitive is None else _kind(primitive)


@cache
def _primitives() -> dict[str, Primitive]:
    """The primitives that JAX publishes, by name."""
    return {value.name: value for value in vars(primitives).values() if isinstance(value, Primitive)}


def _attribute(name: str, value: Any) -> Any:
    """Encode an equation parameter as an op attribute: plain value, or named code."""
    if isinstance(value, np.dtype):
        return dtype.as_dtype(value)
    if isinstance(value, Enum) and hasattr(jax.lax, type(value).__name__):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.generic):  # `vmap` counts axes in NumPy's numbers
        return value.item()
    if isinstance(value, tuple) and type(value) is not tuple:
        if not hasattr(jax.lax, type(value).__name__):  # it could not be found again: the code of a solver, say
            return Function(type(value).__name__, value)
        return type(value).__name__, *(_attribute(name, part) for part in value)  # dimension numbers
    if isinstance(value, tuple):
        return tuple(_attribute(name, part) for part in value)
    if isinstance(value, ClosedJaxpr | Jaxpr):
        about = (value.jaxpr if isinstance(value, ClosedJaxpr) else value).debug_info
        return Function(about.func_name, value)
    if callable(value) and not isinstance(value, type):
        return Function(getattr(value, "__name__", type(value).__name__), value)
    return value


def _parameter(value: Any) -> Any:
    """Decode an op attribute to an equation parameter."""
    if isinstance(value, dtype):
        return value.as_jax()
    if isinstance(value, Function):
        return value.code
    if isinstance(value, str):
        kind, _, member = value.partition(".")
        found = getattr(jax.lax, kind, None) if member else None
        return found[member] if isinstance(found, type) and issubclass(found, Enum) else value
    if isinstance(value, tuple):
        parts = tuple(map(_parameter, value))
        found = getattr(jax.lax, parts[0], None) if parts and isinstance(parts[0], str) else None
        return found(*parts[1:]) if isinstance(found, type) and issubclass(found, tuple) else parts
    return value


def _multiplying(name: str, value: Any) -> Any:
    """A parameter, with products as exact as JAX is set to make them, where the function said nothing. It was traced
    when the graph was built; the session says it when it lowers the graph."""
    if name == "precision" and value is None:
        settings: Any = jax.config
        level = settings.jax_default_matmul_precision
        return None if level is None else (jax.lax.Precision(level),) * 2
    if isinstance(value, Jaxpr):
        equations = [e.replace(params={n: _multiplying(n, v) for n, v in e.params.items()}) for e in value.eqns]
        return value.replace(eqns=equations)
    if isinstance(value, ClosedJaxpr):  # from JAX 0.12 on a Jaxpr, too
        return value.replace(jaxpr=_multiplying(name, value.jaxpr))
    if type(value) is tuple:  # of branches, say
        return tuple(_multiplying("", part) for part in value)
    return value
