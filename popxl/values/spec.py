"""`TensorSpec`, the shape and dtype of a tensor, and `TensorByRef`, the annotation of a by-reference input."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from popxl.typing_ import NewAliasAnnotation

if TYPE_CHECKING:
    from popxl.core.tensor import Tensor as TensorByRef
    from popxl.dtypes import dtype as dtype_
else:
    TensorByRef = NewAliasAnnotation("TensorByRef", None)
    TensorByRef.__doc__ = """Annotate a parameter of a graph function with this to pass the tensor by reference.

    The caller sees the changes that the graph makes to such an input in place, after every call. Type checkers read
    the annotation as `Tensor`. It is recognised as an object, so a module that defers its annotations
    (`from __future__ import annotations`) cannot use it.

    Example:
        >>> def bump(a: popxl.TensorByRef):
        ...     a += 10
    """


class TensorSpec(Mapping[str, Any]):
    """Shape, dtype and meta-shape of a tensor.

    A mapping with the keys `shape`, `dtype`, `meta_shape`, so that `popxl.graph_input(**spec, name="w")` works.

    Args:
        shape: size of each dimension; `()` for a scalar.
        dtype: element type.
        meta_shape: shape before sharding, for a replica-sharded tensor; else `()`.

    Example:
        >>> popxl.TensorSpec((1, 2), popxl.int32)
        TensorSpec(shape=(1, 2), dtype=popxl.dtypes.int32, meta_shape=())
    """

    __slots__ = ("dtype", "meta_shape", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: dtype_, meta_shape: tuple[int, ...] = ()) -> None:
        self.shape = shape
        self.dtype = dtype
        self.meta_shape = meta_shape

    def to_dict(self) -> dict[str, Any]:
        """`{"shape": ..., "dtype": ..., "meta_shape": ...}`."""
        return dict(self)

    def to_tuple(self) -> tuple[tuple[int, ...], dtype_, tuple[int, ...]]:
        """`(shape, dtype, meta_shape)`."""
        return (self.shape, self.dtype, self.meta_shape)

    def __getitem__(self, key: str) -> Any:
        if key not in ("shape", "dtype", "meta_shape"):
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(("shape", "dtype", "meta_shape"))

    def __len__(self) -> int:
        return 3

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TensorSpec):  # far faster than a comparison of mappings
            return self.to_tuple() == other.to_tuple()
        return super().__eq__(other)

    def __hash__(self) -> int:
        return hash(self.to_tuple())

    def __repr__(self) -> str:
        return f"TensorSpec(shape={self.shape!r}, dtype={self.dtype!r}, meta_shape={self.meta_shape!r})"

    def __str__(self) -> str:
        return brief(self)


def brief(t: Any) -> str:
    """Dtype and shape of anything that has both, in the short form of printed graphs: `f32[4, 8]`."""
    return f"{t.dtype.short}[{', '.join(map(str, t.shape))}]"


def size_in_bytes(t: Any) -> int:
    """Bytes of an array of the dtype and shape of anything that has both."""
    return math.prod(t.shape) * t.dtype.itemsize
