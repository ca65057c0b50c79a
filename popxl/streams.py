"""Streams: the named channels between a running program and the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from popxl.context import get_current_context
from popxl.core.tensor import Tensor
from popxl.dtypes import dtype as dtype_
from popxl.values.shapes import integers
from popxl.values.spec import TensorSpec

__all__ = ["DeviceToHostStream", "HostToDeviceStream", "Stream", "d2h_stream", "h2d_stream"]


class Stream:
    """A channel of tensors of one shape and dtype. Make streams with `popxl.h2d_stream` and `popxl.d2h_stream`.

    Two streams are equal if they are the same object: there is one for each channel.
    """

    __slots__ = ("tensor",)
    tensor: Tensor

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}s are not constructed: use `popxl.h2d_stream` or `popxl.d2h_stream`."
        )

    @classmethod
    def _make(cls, shape: Iterable[int], dtype: dtype_, name: str) -> Self:
        stream = object.__new__(cls)
        spec = TensorSpec(integers(shape, f"The shape of {name!r}"), dtype)
        stream.tensor = get_current_context().main_graph.new_stream_tensor(name, spec)
        return stream

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one transfer of one replica."""
        return self.tensor.shape

    @property
    def dtype(self) -> dtype_:
        """Element type."""
        return self.tensor.dtype

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype of one transfer."""
        return self.tensor.spec

    @property
    def tensor_id(self) -> str:
        """Name of the stream, made unique among streams: the id of the tensor that stands for it."""
        return self.tensor.id

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.tensor!r}"

    __repr__ = __str__


class HostToDeviceStream(Stream):
    """A stream that the program loads from, with `ops.host_load`."""

    __slots__ = ()


class DeviceToHostStream(Stream):
    """A stream that the program stores to, with `ops.host_store`."""

    __slots__ = ()


def h2d_stream(shape: Iterable[int], dtype: dtype_, name: str | None = None) -> HostToDeviceStream:
    """A stream from the host to the program.

    Args:
        shape: shape of one transfer of one replica.
        dtype: element type; feeds have to have it.
        name: name of the stream, `"h2d_stream"` by default.

    Raises:
        RuntimeError: without a current graph.
        TypeError: if `shape` is no sequence of integers, or `dtype` no popxl dtype.

    Example:
        >>> with ir.main_graph:
        ...     images = popxl.h2d_stream((8, 28, 28), popxl.float32, "images")
        ...     x = ops.host_load(images)
    """
    return HostToDeviceStream._make(shape, dtype, name or "h2d_stream")


def d2h_stream(shape: Iterable[int], dtype: dtype_, name: str | None = None) -> DeviceToHostStream:
    """A stream from the program to the host.

    Args:
        shape: shape of one transfer of one replica.
        dtype: element type.
        name: name of the stream, `"d2h_stream"` by default.

    Raises:
        RuntimeError: without a current graph.
        TypeError: if `shape` is no sequence of integers, or `dtype` no popxl dtype.

    Example:
        >>> with ir.main_graph:
        ...     losses = popxl.d2h_stream((), popxl.float32, "loss")
        ...     ops.host_store(losses, loss)
    """
    return DeviceToHostStream._make(shape, dtype, name or "d2h_stream")
