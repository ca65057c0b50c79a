"""Factories for families of ops: the common parameters, docstrings and names of their public functions.

A family function declares an `OpKind` and returns the function that users call; the kind is its attribute `kind`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast, get_type_hints

from popxl.base.names import camel
from popxl.core.create import with_numbers
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor, TensorLike
from popxl.core.traits import RealOnly, ShardingRule, Trait
from popxl.ops.kernels.sums import rounded
from popxl.ops.precision import round_once, widen
from popxl.values.shapes import (
    broadcast,
    broadcast_to_first,
    flag,
    integer_or_integers,
    like_first,
    predicate,
    reduced_shape,
    reduction_axes,
)
from popxl.values.spec import TensorSpec
from popxl.values.subscripts import sum_subscripts

Rule = Callable[..., Tensor]
REAL = (RealOnly(),)
"""Traits of ops whose only property is to refuse complex numbers."""
ELEMENTWISE = ShardingRule()
"""Sharding rule of an elementwise op that is linear in no operand."""
LINEAR_IN_GRADIENT = ShardingRule(linear=("g",))
"""Sharding rule of its gradient, linear in the incoming gradient `g`."""
F = TypeVar("F", bound=Callable[..., Any])


class Unary(Protocol):
    """An op of one tensor."""

    kind: OpKind

    def __call__(self, t: Tensor) -> Tensor: ...


class Binary(Protocol):
    """A binary op; one operand may be a number."""

    kind: OpKind

    def __call__(self, lhs: TensorLike, rhs: TensorLike) -> Tensor: ...


class ReduceFunction(Protocol):
    """An op that reduces axes."""

    kind: OpKind

    def __call__(self, t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor: ...


def public(function: F, kind: OpKind, name: str, doc: str) -> Any:
    """Dress a function as the public face of an op."""
    function.__name__ = function.__qualname__ = name
    function.__module__ = "popxl.ops"
    function.__doc__ = doc
    function.__annotations__ = get_type_hints(function)  # their names are known in this module only
    cast(Any, function).kind = kind
    return function


def unary(
    name: str,
    lowering: Callable[[Any], Any],
    meaning: str,
    gradient: Rule | None | Any = ...,
    *,
    kind: str = "",
    shape: Callable[..., TensorSpec] = like_first,
    linear: bool = False,
    traits: Iterable[Trait] = (),
    see: str = "",
    of: str = "x",
) -> Unary:
    """Declare an elementwise op of one tensor `t`.

    Args:
        lowering: JAX function of the array `t`, which gets halves as float32.
        meaning: first line of the docstring.
        gradient: rule for the gradient of `t`; `None` if none flows. Left out, it is JAX's.
        kind: name in printed graphs, where it is not the name in capitals.
        shape: shape rule, for ops whose result has another dtype.
        see: the namesake in NumPy or PyTorch.
        of: name of the tensor in the example.
    """
    declared: dict[str, Any] = (
        {} if gradient is ... else {"gradient": {"t": gradient} if callable(gradient) else gradient}
    )
    rule = () if shape is predicate else (ShardingRule(linear=("t",) if linear else ()),)
    declared |= {"shape": shape, "result": f"{name}_out", "operands": ("t",), "traits": [*traits, *rule]}
    declaration = OpKind(kind or camel(name), round_once(lowering), **declared)
    result = "a bool for each element" if shape is predicate else "same shape and dtype"
    also = f"\n\nSee also: `{see}`." if see else ""
    return _unary(
        declaration,
        name,
        f"{meaning}\n\nArgs:\n    t: tensor of any shape.\n\nReturns:\n    A new tensor: {result}.{also}\n\n"
        f"Example:\n    >>> y = ops.{name}({of})",
    )


def _unary(kind: OpKind, name: str, doc: str) -> Unary:
    def op(t: Tensor) -> Tensor:
        return kind(t)

    return public(op, kind, name, doc)


def inplace(op: Unary | Binary, name: str, result: str) -> Any:
    """In-place version of an elementwise op: overwrites its first operand and returns an alias."""
    original = op.kind
    first = "t" if len(original.operand_names(2)) == 1 else "lhs"
    shape = like_first if first == "t" else broadcast_to_first
    kind = original.inplace(f"{original.name}{'Inplace' if first == 't' else 'LhsInplace'}", result, shape=shape)
    doc = (
        f"`{op.__name__}`, written over `{first}`.\n\nReturns:\n    An alias of `{first}`, which holds the new value "  # type: ignore[union-attr]
        f"from now on. To read it in a defined order use the alias, or\n    `popxl.in_sequence()`. "
        f"Autodiff refuses graphs with this op.\n\nExample:\n    >>> y = ops.{name}(x{'' if first == 't' else ', y'})"
    )
    return _unary(kind, name, doc) if first == "t" else _binary(kind, name, doc, overwrites=True)


def binary(
    name: str,
    lowering: Callable[[Any, Any], Any],
    meaning: str,
    gradient: Mapping[str, Rule] | Any = ...,
    *,
    shape: Callable[..., TensorSpec] = broadcast,
    linear: tuple[str, ...] | None = (),
    traits: Iterable[Trait] = (),
    see: str = "",
) -> Binary:
    """Declare an elementwise op of two tensors, `lhs` and `rhs`, which broadcast.

    Arguments as for `unary`, but `lowering` gets float16 and bfloat16 operands without widening, and `linear` names the
    operands in which the op is linear, as `ShardingRule` does; `None` for a predicate.
    """
    declared: dict[str, Any] = {} if gradient is ... else {"gradient": gradient}
    rule = () if linear is None else (ShardingRule(linear=linear),)
    declared |= {"shape": shape, "result": f"{name}_out", "operands": ("lhs", "rhs"), "traits": [*traits, *rule]}
    declaration = OpKind(camel(name), lowering, **declared)
    returns = "a bool for each element" if shape is predicate else "their dtype"
    refused = "" if shape is predicate else " or the dtypes differ"
    also = f"\n\nSee also: `{see}`." if see else ""
    return _binary(
        declaration,
        name,
        f"{meaning}\n\nArgs:\n    lhs, rhs: tensors whose shapes broadcast, of one dtype. "
        "One of them may be a number or an array,\n        "
        "which becomes a constant of the dtype of the other.\n\nReturns:\n"
        f"    A new tensor of the broadcast shape: {returns}.\n\nRaises:\n    PopxlError: if the shapes do not "
        f"broadcast{refused}.{also}\n\nExample:\n    >>> z = ops.{name}(x, y)",
    )


def _binary(kind: OpKind, name: str, doc: str, overwrites: bool = False) -> Binary:
    def op(lhs: TensorLike, rhs: TensorLike) -> Tensor:
        if isinstance(lhs, Tensor):
            if isinstance(rhs, Tensor):  # nearly always, so it comes first
                return kind(lhs, rhs)
        elif overwrites:
            return kind(lhs, rhs)  # which refuses it
        return with_numbers(kind, lhs, rhs)

    return public(op, kind, name, doc)


def _summed(shapes: Sequence[tuple[int, ...]], attributes: Mapping[str, Any]) -> str:
    rank = len(shapes[0])
    return sum_subscripts(rank, reduction_axes(attributes["axis"], rank), attributes["keepdims"])


SUM, SUM_OF_FUNCTION = ShardingRule(_summed, linear=("t",)), ShardingRule(_summed)
"""Sharding rules of sums: of the elements, and of a function of each."""


def reduction(
    name: str,
    lowering: Callable[..., Any],
    meaning: str,
    gradient: Rule | Any = ...,
    *,
    kind: str = "",
    rule: ShardingRule | None = None,
    traits: Iterable[Trait] = (),
) -> ReduceFunction:
    """Declare a reduction of `t` over `axis`.

    `lowering(t, axes, keepdims)` gets the axes as a tuple, and halves as float32: the result is rounded once.
    Reductions that are sums have the rule `SUM`, or `SUM_OF_FUNCTION`.
    """

    def reduce(t: Any, *, axis: tuple[int, ...] | None, keepdims: bool) -> Any:
        return rounded(lowering(widen(t), reduction_axes(axis, t.ndim), keepdims), t.dtype)

    def shape(t: Any, *, axis: tuple[int, ...] | None, keepdims: bool) -> TensorSpec:
        return TensorSpec(reduced_shape(t.shape, axis, keepdims), t.dtype)

    declared: dict[str, Any] = {} if gradient is ... else {"gradient": {"t": gradient}}
    declared |= {"shape": shape, "result": f"{name}_out", "traits": [*traits, *filter(None, [rule])]}
    declaration = OpKind(kind or f"Reduce{camel(name)}", reduce, **declared)

    def op(t: Tensor, axis: int | Iterable[int] | None = None, keepdims: bool = False) -> Tensor:
        axes = axis if axis is None else integer_or_integers(axis, f"{name}: `axis`")
        return declaration(t, axis=axes, keepdims=flag(keepdims, f"{name}: `keepdims`"))

    doc = (
        f"{meaning}\n\nArgs:\n    t: tensor of any shape.\n    axis: the dimension to reduce, or several; negative "
        "ones count from the back; `None` means all,\n        an empty sequence none.\n    keepdims: keep the reduced "
        "dimensions, with size 1.\n\nReturns:\n    A new tensor of the same dtype.\n\nRaises:\n    PopxlError: if "
        f"there is no such axis.\n\nExample:\n    >>> y = ops.{name}(x, axis=-1)"
    )
    return public(op, declaration, name, doc)
