"""Contents of JAX equations that hold functions: bodies, operands, iteration counts. The only file that handles
differences between versions of JAX.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral

from popxl.base.source import SourceLocation
from popxl.dtypes import dtype
from popxl.transforms.jax_keys import data_type
from popxl.values.spec import TensorSpec

LIBRARY = os.path.dirname(jax.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_OPS = os.path.join(os.path.dirname(os.path.dirname(_OURS)), "runtime", "lowering", "op_derivatives.py")


def source_of(equation: JaxprEqn) -> SourceLocation | None:
    """The user's line that an equation comes from: the innermost one that is neither JAX's nor ours."""
    traceback: Any = equation.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        if not frame.file_name.startswith((LIBRARY, _OURS)):
            return SourceLocation(frame.file_name, frame.line_num, frame.function_name)
    return None


def at_line(equation: JaxprEqn) -> str:
    """The user's line, as a part of a sentence."""
    source = source_of(equation)
    return "" if source is None else f", at `{source.text}` ({source})"


def spec_of(aval: Any) -> TensorSpec | None:
    """Tensor spec of a JAX type, if possible; of a random key that of its data."""
    try:
        data = data_type(aval)
        return TensorSpec(tuple(map(int, data.shape)), dtype.as_dtype(np.dtype(data.dtype)))
    except (AttributeError, TypeError, ValueError):  # tokens; keys of unknown generators; narrow integers and similar
        return None


def known_spec(aval: Any) -> TensorSpec:
    """Tensor spec for a JAX type."""
    spec = spec_of(aval)
    assert spec is not None
    return spec


def names_of(body: ClosedJaxpr) -> Sequence[str]:
    """Argument names of a function, where JAX has them."""
    names = body.jaxpr.debug_info.arg_names or ()
    count = len(body.jaxpr.invars)
    return names if len(names) == count else ("x",) * count


def is_from_jax(inner: ClosedJaxpr) -> bool:
    """Whether a jitted function is JAX's own."""
    return (inner.jaxpr.debug_info.func_filename or "").startswith(LIBRARY)


def is_op(equation: JaxprEqn) -> bool:
    """Whether a function with a custom derivative is a graph op of `popxl.to_jax`."""
    return equation.params["call_jaxpr"].jaxpr.debug_info.func_filename == _OPS


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations that become ops, those of jitted functions included."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name == "jit":
            yield from equations(equation.params["jaxpr"].jaxpr)


def first_effect(jaxpr: Jaxpr) -> JaxprEqn | None:
    """First equation with a side effect."""
    with_effects = (e for e in equations(jaxpr) if e.effects and e.primitive.name != "jit")  # includes nested effects
    return next(with_effects, None)


def first_foreign(jaxpr: Jaxpr) -> tuple[JaxprEqn | None, str] | None:
    """First value of a type without tensor equivalent: its equation, if any, and the type."""
    for equation in equations(jaxpr):
        for value in (*equation.invars, *equation.outvars):
            if spec_of(value.aval) is None:
                return equation, value.aval.str_short()
    for value in (*jaxpr.invars, *jaxpr.constvars, *jaxpr.outvars):
        if spec_of(value.aval) is None:
            return None, value.aval.str_short()
    return None


def obstacle(*bodies: ClosedJaxpr) -> str:
    """Why functions cannot be graphs; `""` if they can."""
    for body in bodies:
        if (effect := first_effect(body.jaxpr)) is not None:
            return f"{effect.primitive.name} does more than compute"
        if (foreign := first_foreign(body.jaxpr)) is not None:
            return f"no tensor holds a value of the type {foreign[1]}"
    return ""


def _with_arguments(body: ClosedJaxpr, choose: Callable[[Sequence[Any]], list[Any]]) -> ClosedJaxpr:
    """Jaxpr with selected or reordered arguments."""
    about, invars = body.jaxpr.debug_info, body.jaxpr.invars
    if about.arg_names is not None and len(about.arg_names) == len(invars):
        about = about._replace(arg_names=tuple(choose(about.arg_names)))
    return ClosedJaxpr(body.jaxpr.replace(invars=choose(invars), debug_info=about), body.consts)


def closed(body: ClosedJaxpr | Jaxpr) -> ClosedJaxpr:
    """A body with what it closes over, which is nothing where JAX leaves it out."""
    return body if isinstance(body, ClosedJaxpr) else ClosedJaxpr(body, ())


# Loops ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loop:
    """A loop with a known number of iterations.

    Attributes:
        body: jaxpr from the carried values, then the loop invariants, then rows, to the carried values, then the
            outputs to stack.
        operands: operands of the body: initial carried values, invariants, and arrays of rows.
        backwards: whether iterations take the rows from last to first.
    """

    body: ClosedJaxpr
    operands: Sequence[Any]
    iterations: int
    carried: int
    rows: int = 0
    backwards: bool = False


def scan_of(equation: JaxprEqn) -> Loop:
    """Convert a `scan` to a loop."""
    body = equation.params["jaxpr"]
    pairs = zip(equation.outvars, body.jaxpr.outvars, strict=True)
    carried = sum(_rank(outer) == _rank(inner) for outer, inner in pairs)
    inputs = zip(equation.invars, body.jaxpr.invars, strict=True)
    rows = sum(_rank(outer) > _rank(inner) for outer, inner in inputs)
    num_invariants = len(equation.invars) - carried - rows
    return Loop(
        _reordered(body, num_invariants, carried),
        _swapped(equation.invars, num_invariants, carried),
        int(equation.params["length"]),
        carried,
        rows,
        bool(equation.params["reverse"]),
    )


def _rank(value: Any) -> int:
    return len(value.aval.shape)


def while_loop(equation: JaxprEqn, iterations: int) -> Loop:
    """Convert a `while` with a known trip count to a loop."""
    of_condition, num_invariants = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    body, operands = equation.params["body_jaxpr"], equation.invars[of_condition:]
    carried = len(operands) - num_invariants
    return Loop(
        _reordered(body, num_invariants, carried), _swapped(operands, num_invariants, carried), iterations, carried
    )


def _swapped(values: Sequence[Any], first: int, second: int) -> list[Any]:
    """Swap two leading groups of values."""
    return [*values[first : first + second], *values[:first], *values[first + second :]]


def _reordered(body: ClosedJaxpr, num_invariants: int, carried: int) -> ClosedJaxpr:
    """A body that takes what is carried first."""
    return _with_arguments(body, lambda values: _swapped(values, num_invariants, carried))


MAX_ITERATIONS = 2**14
"""Maximum number of iterations of a `while` that are counted when a graph is built."""

_COUNTING: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.bitwise_not,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "shift_right_arithmetic": np.right_shift,
    "shift_left": np.left_shift,
}
"""NumPy functions of the primitives that compute counters."""


def iteration_count(equation: JaxprEqn, known: Callable[[Any], np.ndarray | None]) -> int | None:
    """Number of iterations of a `while`, if it depends only on counters with known initial values.

    Args:
        known: function that returns the value of an operand, if it is a known integer or bool.
    """
    parameters = equation.params
    of_condition, of_body = parameters["cond_nconsts"], parameters["body_nconsts"]
    condition, body = parameters["cond_jaxpr"], parameters["body_jaxpr"]
    values = [known(operand) for operand in equation.invars]
    fixed_condition, fixed_body = values[:of_condition], values[of_condition : of_condition + of_body]
    state = values[of_condition + of_body :]
    with np.errstate(over="ignore"):  # integers wrap
        for iterations in range(MAX_ITERATIONS + 1):
            (goes_on,) = _fold_counters(condition, [*fixed_condition, *state])
            if goes_on is None:
                return None
            if not goes_on:
                return iterations
            state = _fold_counters(body, [*fixed_body, *state])
    return None


def _fold_counters(body: ClosedJaxpr, arguments: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
    """Constant folding of counters: results of a function, `None` for unknown values."""
    values: dict[Any, np.ndarray | None] = dict(zip(body.jaxpr.invars, arguments, strict=True))

    def read(value: Any) -> np.ndarray | None:
        return as_counter(value.val, value.aval) if isinstance(value, JaxLiteral) else values.get(value)

    for equation in body.jaxpr.eqns:
        operands = [read(value) for value in equation.invars]
        if any(operand is None for operand in operands) or len(equation.outvars) != 1:
            continue
        compute, (result,) = _COUNTING.get(equation.primitive.name), equation.outvars
        if equation.primitive.name == "convert_element_type":
            compute = partial(np.asarray, dtype=result.aval.dtype)
        if compute is not None:
            values[result] = as_counter(compute(*operands), result.aval)
    return [read(value) for value in body.jaxpr.outvars]


def as_counter(value: Any, aval: Any) -> np.ndarray | None:
    """Convert integer and bool scalars to NumPy; `None` for others."""
    counts = aval.shape == () and np.dtype(aval.dtype).kind in "iub"
    return np.asarray(value, aval.dtype) if counts else None


# Branches ------------------------------------------------------------------------------------------------------------


def conditions(jaxpr: Jaxpr) -> dict[Any, Any]:
    """The bools that are made numbers only to choose between two branches, by these numbers."""
    uses: dict[Any, list[bool]] = {}
    for equation in jaxpr.eqns:
        chooses = equation.primitive.name == "cond" and len(equation.params["branches"]) == 2
        for i, value in enumerate(equation.invars):
            if not isinstance(value, JaxLiteral):
                uses.setdefault(value, []).append(chooses and i == 0)
    bool_of = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type" and not isinstance(equation.invars[0], JaxLiteral):
            (bool_,), (number,) = equation.invars, equation.outvars
            aval: Any = bool_.aval
            if aval.dtype == np.bool_ and all(uses.get(number, [False])) and number not in jaxpr.outvars:
                bool_of[number] = bool_
    return bool_of


def used_operands(body: ClosedJaxpr) -> list[int]:
    """Positions of the arguments that a function looks at, or returns."""
    reads = {v for e in body.jaxpr.eqns for v in e.invars if not isinstance(v, JaxLiteral)}
    reads.update(v for v in body.jaxpr.outvars if not isinstance(v, JaxLiteral))
    return [i for i, value in enumerate(body.jaxpr.invars) if value in reads]


def with_operands(body: ClosedJaxpr, positions: Sequence[int]) -> ClosedJaxpr:
    """Restrict a function to the arguments that it reads."""
    return _with_arguments(body, lambda values: [values[i] for i in positions])


# Recomputation -------------------------------------------------------------------------------------------------------

Treatment = Literal["keep", "offload", "recompute"]

Policy = Callable[[JaxprEqn], Treatment]
"""Treatment of an equation's results by a policy of `jax.checkpoint`."""


def policy_of(equation: JaxprEqn) -> Policy | None:
    """Policy of a `jax.checkpoint`; `None` if it saves nothing."""
    policy = equation.params["policy"]
    return None if policy is None else lambda inner: _treatment(policy, inner)


def _treatment(policy: Any, equation: JaxprEqn) -> Treatment:
    """Decision of a policy about an equation: a bool, or a value of an unpublished JAX type."""
    decision = policy(equation.primitive, *(value.aval for value in equation.invars), **equation.params)
    if type(decision).__name__ == "Offloadable":
        return "offload"
    return "keep" if decision is True or type(decision).__name__ == "SaveableType" else "recompute"


def memory_moves(equation: JaxprEqn) -> Sequence[str]:
    """Memories that a `device_put` moves its operands to, "Host" or "Device"; empty if it moves them otherwise."""
    spaces = equation.params["devices"]
    is_move = all(space in (jax.memory.Space.Host, jax.memory.Space.Device) for space in spaces)
    return [space.name for space in spaces] if is_move else ()
