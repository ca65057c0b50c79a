"""Classes of ops under PopART's names, for programs that count the ops of a graph.

Any name that ends in `Op` is a class here: `isinstance` asks for the type of an op that a printed graph shows. New
programs compare `op.op_type`.

Example:
    >>> import popart._internal.ir as _ir
    >>> graph = ir.create_graph(lambda x: x @ x + x, popxl.TensorSpec((2, 2), popxl.float32))
    >>> [isinstance(op, _ir.op.MatMulOp) for op in graph._pb_graph.getOps()]
    [True, False]
"""

from __future__ import annotations

from functools import cache

from popxl import Op

_TYPES = {
    "BatchNorm": "BatchNormalization",
    "GroupNorm": "GroupNormalization",
    "Negate": "Neg",
    "Onehot": "OneHot",
    "Subtract": "Sub",
}
"""Types of ops that are called otherwise than their class."""


class _OpClass(type):
    """Class of all ops of one type."""

    op_type: str

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Op) and instance.op_type == cls.op_type


@cache
def __getattr__(name: str) -> type:
    if not name.endswith("Op") or name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own = name.removesuffix("Op")
    return _OpClass(name, (), {"op_type": _TYPES.get(own, own), "__doc__": "Class of ops for `isinstance`."})
