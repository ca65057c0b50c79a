"""Propagation of sharded and partial values through JAX functions, by the equations of their jaxprs.

Custom ops and JAX functions then need no declaration of linear operands and contracted dimensions. Abstract
interpretation along one axis of replicas, by the sharding rule of each primitive; unknown primitives yield shards along
an unknown dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from popxl.analysis.replicas.axis_types import REPLICATED, SAME, SHARDED, ZEROS, AxisType
from popxl.analysis.replicas.sharding_rules import Flaws, Propagated, Rule, types_by_rule
from popxl.core.tracing import traces_in
from popxl.values.subscripts import Labels, parse, permutation_subscripts, reshape_subscripts, sum_subscripts

_ADDING = frozenset(
    "add sub add_any concatenate select_n dynamic_update_slice scatter-add scatter_add scatter pad".split()
)
_LINEAR = frozenset(
    "neg convert_element_type copy copy_p real imag reduce_precision stop_gradient cumsum rev gather dynamic_slice "
    "slice reduce_window_sum optimization_barrier div reduce_sum transpose reshape broadcast_in_dim squeeze".split()
)
"""Primitives that are linear in their first operand."""
_PRODUCTS = frozenset("mul dot_general conv_general_dilated".split())
_NONLINEAR = frozenset(
    "exp exp2 log log1p expm1 tanh logistic sqrt rsqrt cbrt pow integer_pow square sin cos tan erf erfc erf_inv max "
    "min abs sinh cosh asinh acosh atanh atan atan2".split()
)


def propagate(jaxpr: Any, types: Sequence[AxisType]) -> Propagated:
    """Result types of a function, given its operand types, along one axis.

    Returns:
        The type of each result, and the flaws: operations on terms that do not commute with their sum.

    Example:
        >>> jaxpr = jax.make_jaxpr(jnp.matmul)(np.ones((3, 4)), np.ones((4, 5))).jaxpr
        >>> types, flaws = propagate(jaxpr, [AxisType(SHARDED, 1), AxisType(SHARDED, 0)])
        >>> [along.kind.name for along in types], flaws
        (['PARTIAL'], ())
    """
    flaws: Flaws = {}
    return _jaxpr_types(jaxpr, types, flaws), tuple(flaws)


def _jaxpr_types(jaxpr: Any, types: Sequence[AxisType], flaws: Flaws) -> list[AxisType]:
    type_of: dict[Any, AxisType] = dict(zip(jaxpr.invars, types, strict=True))

    def read(v: Any) -> AxisType:
        if hasattr(v, "val"):  # a literal
            return SAME if np.any(v.val) else ZEROS
        return type_of.get(v, SAME)

    for equation in jaxpr.eqns:
        operands = [read(v) for v in equation.invars]
        if all(along.kind <= REPLICATED for along in operands):
            is_zero = operands == [ZEROS] and equation.primitive.name in ("broadcast_in_dim", "convert_element_type")
            results = [ZEROS if is_zero else SAME] * len(equation.outvars)
        elif (inner := _called_jaxpr(equation)) is not None:
            results = _jaxpr_types(inner, operands, flaws)
        else:
            results = types_by_rule(_rule(equation), _largest_shards(equation, operands), flaws) * len(equation.outvars)
        type_of |= zip(equation.outvars, results, strict=False)
    return [read(v) for v in jaxpr.outvars]


def _called_jaxpr(equation: Any) -> Any:
    """Jaxpr that an equation calls once on its operands; `None` for other equations."""
    inner = traces_in(equation)
    if len(inner) != 1 or equation.primitive.name == "scan":
        return None
    shapes = ([v.aval.shape for v in function.invars] for function in (inner[0], equation))
    return inner[0] if len({*map(tuple, shapes)}) == 1 else None


def _largest_shards(equation: Any, operands: Sequence[AxisType]) -> Sequence[AxisType]:
    """Operand types with replicated types for broadcast shards beside sharded operands of full shape, such as the
    maximum of a softmax."""
    shape = equation.outvars[0].aval.shape
    if equation.primitive.name in _PRODUCTS - {"mul"}:
        return operands
    is_full = [v.aval.shape == shape for v in equation.invars]
    if not any(along.kind is SHARDED and full for along, full in zip(operands, is_full, strict=True)):
        return operands
    return [
        SAME if along.kind is SHARDED and not full else along for along, full in zip(operands, is_full, strict=True)
    ]


def _rule(equation: Any) -> Rule:
    """Sharding rule of a primitive, common to all results."""
    operands, result = _labels(equation)
    return Rule(operands, [result], _linear(equation), [_is_float(v.aval.dtype) for v in equation.invars])


def _is_float(dtype: Any) -> bool:
    """Whether a JAX dtype is of floating-point or complex numbers. Those of random keys have no kind."""
    kind = getattr(dtype, "kind", None)
    return kind is not None and kind not in "biu"


def _linear(equation: Any) -> list[set[int]] | None:
    """Sets of operands in which a primitive is jointly linear; `None` if unknown."""
    name, count = equation.primitive.name, len(equation.invars)
    if name in _ADDING:
        first_term = 1 if name == "select_n" else 0  # after the condition
        return [set(range(first_term, count))]
    if name in _PRODUCTS:
        return [{0}, {1}]
    if name in _LINEAR:
        return [{0}]
    return [] if name in _NONLINEAR else None


def _labels(equation: Any) -> tuple[Sequence[Labels], Labels]:
    """Labels of the dimensions of operands, and of results."""
    name, parameters = equation.primitive.name, equation.params
    shapes, shape = [tuple(v.aval.shape) for v in equation.invars], tuple(equation.outvars[0].aval.shape)
    ranks = tuple(map(len, shapes))
    if name == "dot_general":
        return _product(ranks, *parameters["dimension_numbers"])
    if name == "conv_general_dilated" and parameters["feature_group_count"] == parameters["batch_group_count"] == 1:
        return _convolution(ranks, parameters["dimension_numbers"])
    if name == "broadcast_in_dim":
        positions = [
            d if size == shape[d] else None
            for d, size in zip(parameters["broadcast_dimensions"], shapes[0], strict=True)
        ]
        return [_labels_at(positions)], _labels_at(d if d in positions else None for d in range(len(shape)))
    if name == "squeeze":
        dropped = [d % ranks[0] for d in parameters["dimensions"]]
        remaining = [(d,) for d in range(ranks[0]) if d not in dropped]
        return [tuple(() if d in dropped else (d,) for d in range(ranks[0]))], tuple(remaining)
    if name == "reduce_sum":
        return _parsed(sum_subscripts(ranks[0], parameters["axes"]), ranks)
    if name == "transpose":
        return _parsed(permutation_subscripts(tuple(parameters["permutation"])), ranks)
    if name == "reshape":
        return _parsed(reshape_subscripts(shapes[0], shape), ranks)
    if name.startswith(("reduce_", "arg", "sort", "top_k", "cum", "gather", "conv_")):
        return [((),) * rank for rank in ranks], ((),) * len(shape)
    return [_broadcast(operand_shape, shape) for operand_shape in shapes], _labels_at(range(len(shape)))


def _parsed(subscripts: str, ranks: tuple[int, ...]) -> tuple[Sequence[Labels], Labels]:
    """Labels of an operation with one operand, by its subscripts."""
    operand, result = subscripts.split("->")
    operands, (labels,) = parse((operand,), (result,), ranks)
    return operands, labels


def _convolution(ranks: Sequence[int], numbers: Any) -> tuple[Sequence[Labels], Labels]:
    """Labels of `conv_general_dilated`, whose input features are contracted; other dimensions have none."""
    features = (numbers.lhs_spec[1], numbers.rhs_spec[1])
    return [
        tuple(("k",) if d == contracted else () for d in range(rank))
        for rank, contracted in zip(ranks, features, strict=True)
    ], ()


def _broadcast(shape: Sequence[int], result: Sequence[int]) -> Labels:
    """Labels of an operand broadcast to a result; dimensions of size 1 have none."""
    if len(shape) != len(result) or any(
        size not in (1, result_size) for size, result_size in zip(shape, result, strict=True)
    ):
        return ((),) * len(shape)
    return _labels_at(d if size == result[d] else None for d, size in enumerate(shape))


def _labels_at(positions: Iterable[int | None]) -> Labels:
    """Labels of dimensions by their positions in a result; none for `None`."""
    return tuple(() if d is None else (d,) for d in positions)


def _product(ranks: Sequence[int], contracted: Any, batch: Any) -> tuple[Sequence[Labels], Labels]:
    """Labels of `dot_general`: contracted, batch and free dimensions."""
    sides = []
    for operand, rank in enumerate(ranks):
        names = {d: f"k{i}" for i, d in enumerate(contracted[operand])} | {
            d: f"b{i}" for i, d in enumerate(batch[operand])
        }
        sides.append([names.get(d, f"{'mn'[operand]}{d}") for d in range(rank)])
    free = [label for operand in sides for label in operand if label[0] in "mn"]
    result = [f"b{i}" for i in range(len(batch[0]))] + free
    return [tuple((label,) for label in operand) for operand in sides], tuple((label,) for label in result)
