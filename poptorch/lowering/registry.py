"""Registry of lowerings: popxl implementations of PyTorch ops. Declare new lowerings here.

    @lowers("aten.addcmul")                     # a function of popxl tensors, which adds ops to the graph
    def addcmul(input, tensor1, tensor2, value=1):
        return input + value * tensor1 * tensor2

    @jax_op("aten.erfinv")                      # or a function of arrays, which becomes one op
    def erfinv(input):
        return jax.scipy.special.erfinv(input)

A lowering is called with the given arguments of the op by name; PyTorch's `self` is called `input`. Its results are
cast to PyTorch's dtypes, and broadcast to PyTorch's shapes. So it need not implement type promotion, as long as it
computes no less precisely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, TypeVar

from popxl import OpKind

Lowering = Callable[..., Any]
F = TypeVar("F", bound=Lowering)

_lowerings: dict[str, Lowering] = {}


def lowers(*names: str) -> Callable[[F], F]:
    """Register a function as the lowering of ops (`"aten.add"`) or single overloads (`"aten.add.Scalar"`)."""

    def declare(lowering: F) -> F:
        for name in names:
            if name in _lowerings:
                raise ValueError(f"{name} has a lowering already: {_lowerings[name]!r}.")
            _lowerings[name] = lowering
        return lowering

    return declare


def jax_op(
    *names: str, title: str = "", prepare: Callable[..., Iterable[Any]] | None = None, **settings: Any
) -> Callable[[Lowering], OpKind]:
    """Declare a JAX function as an op, and register it as a lowering.

    Args:
        title: name of the op in printed graphs; by default derived from the function's name, `log_softmax` →
            `LogSoftmax`.
        prepare: function that converts PyTorch's operands, all together, to those of the op.
        **settings: gradient and further settings; see `popxl.OpKind`.
    """

    def declare(function: Lowering) -> OpKind:
        name = title or "".join(part.capitalize() for part in function.__name__.strip("_").split("_"))
        kind = OpKind(name, function, key=f"poptorch.{name}", **settings)
        operands = [p.name for p in signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]

        def prepared(**given: Any) -> Any:
            own = [name for name in operands if given.get(name) is not None]
            assert prepare is not None
            return kind(**given | dict(zip(own, prepare(*(given[name] for name in own)), strict=True)))

        lowers(*names)(kind if prepare is None else prepared)
        return kind

    return declare


def lowering_name(op: str, overload: str) -> str:
    """Registered name of an op's lowering: the overload's, else the op's."""
    full = f"{op}.{overload}"
    return full if full in _lowerings else op


def lowering_of(op: str, overload: str) -> Lowering | None:
    """Lowering of an op; `None` if unsupported."""
    return _lowerings.get(lowering_name(op, overload))


def has_lowering(op: str, overload: str) -> bool:
    """Whether an op has a registered lowering."""
    return lowering_of(op, overload) is not None


def lowerings() -> Mapping[str, Lowering]:
    """Registered lowerings by op name."""
    return dict(_lowerings)
