"""Streams: the named channels between a running program and the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from popxl.base.arguments import check_type
from popxl.base.copies import CopyIsSelf
from popxl.context import get_current_context
from popxl.core.tensor import Tensor
from popxl.dtypes import dtype as dtype_
from popxl.values.shapes import integer, sizes
from popxl.values.spec import TensorSpec

__all__ = ["DeviceToHostStream", "HostToDeviceStream", "Stream", "d2h_stream", "h2d_stream"]


class Stream(CopyIsSelf):
    """A typed channel for tensors, created by `popxl.h2d_stream` or `popxl.d2h_stream`.

    Streams compare by identity: each channel has a single object.
    """

    __slots__ = ("tensor",)
    tensor: Tensor

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(
            f"{type(self).__name__}s are not constructed: use `popxl.h2d_stream` or `popxl.d2h_stream`."
        )

    @classmethod
    def _make(cls, shape: Iterable[int], dtype: dtype_, name: str, num_host_transfers: int | None = None) -> Self:
        stream = object.__new__(cls)
        check_type(name, str, "The name of a stream", "a string")
        spec = TensorSpec(sizes(shape, f"The shape of {name!r}"), dtype)
        count = _count(num_host_transfers, name)
        stream.tensor = get_current_context().main_graph.new_stream_tensor(name, spec)
        if count is not None:
            stream.num_host_transfers = count
        return stream

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one transfer per replica."""
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
    def num_host_transfers(self) -> int:
        """Reads or writes per `session.run`: an individual number, or by default `ir.num_host_transfers`.

        Above 1, its host array has a leading dimension of this size. Set it before a session is made of the Ir; `None`
        makes it the Ir's number again.
        """
        ir = self.tensor.ir
        return ir.stream_transfers.get(self.tensor_id, ir.num_host_transfers)

    @num_host_transfers.setter
    def num_host_transfers(self, value: int | None) -> None:
        ir, count = self.tensor.ir, _count(value, self.tensor.name)
        if count is None:
            ir.stream_transfers.pop(self.tensor_id, None)
        else:
            ir.stream_transfers[self.tensor_id] = count
        ir.edits.record_edit()

    @property
    def has_own_transfers(self) -> bool:
        """Whether the stream overrides the transfer count."""
        return self.tensor_id in self.tensor.ir.stream_transfers

    @property
    def tensor_id(self) -> str:
        """Name of the stream, made unique among streams: the id of the tensor that stands for it."""
        return self.tensor.id

    def __str__(self) -> str:
        return f"{type(self).__name__} {self.tensor!r}"

    __repr__ = __str__


class HostToDeviceStream(Stream):
    """A host-to-device stream, read with `ops.host_load`."""

    __slots__ = ()


class DeviceToHostStream(Stream):
    """A device-to-host stream, written with `ops.host_store`."""

    __slots__ = ()


def _count(value: int | None, name: str) -> int | None:
    """A number of transfers; `None` for the Ir's."""
    if value is None:
        return None
    count = integer(value, f"The stream {name!r}: `num_host_transfers`", "be an integer or `None`")
    if count < 1:
        raise ValueError(f"The stream {name!r}: `num_host_transfers` is {count}; expected 1 or more, or `None`.")
    return count


def h2d_stream(
    shape: Iterable[int], dtype: dtype_, name: str | None = None, num_host_transfers: int | None = None
) -> HostToDeviceStream:
    """Create a host-to-device stream.

    Args:
        shape: shape of one transfer of one replica.
        dtype: element type; feeds have to have it.
        name: name of the stream, `"h2d_stream"` by default.
        num_host_transfers: number of loads from it in one `session.run`, at most: `ir.num_host_transfers` by default.
            For example, a learning rate is fed once a run, and tokens are fed eight times.

    Raises:
        RuntimeError: if there is no current graph.
        TypeError: if `shape` is not a sequence of integers, or `dtype` is not a popxl dtype.
        ValueError: if `num_host_transfers` is less than 1.

    Example:
        >>> ir.num_host_transfers = 8
        >>> with ir.main_graph:
        ...     images = popxl.h2d_stream((4, 28, 28), popxl.float32, "images")
        ...     rate = popxl.h2d_stream((), popxl.float32, "rate", num_host_transfers=1)
        ...     x, lr = ops.host_load(images), ops.host_load(rate)
        >>> images.num_host_transfers, rate.num_host_transfers
        (8, 1)
    """
    return HostToDeviceStream._make(shape, dtype, name or "h2d_stream", num_host_transfers)


def d2h_stream(
    shape: Iterable[int], dtype: dtype_, name: str | None = None, num_host_transfers: int | None = None
) -> DeviceToHostStream:
    """Create a device-to-host stream.

    Args:
        shape: shape of one transfer of one replica.
        dtype: element type.
        name: name of the stream, `"d2h_stream"` by default.
        num_host_transfers: maximum number of stores per `session.run`, by default `ir.num_host_transfers`.

    Raises:
        RuntimeError: if there is no current graph.
        TypeError: if `shape` is not a sequence of integers, or `dtype` is not a popxl dtype.
        ValueError: if `num_host_transfers` is less than 1.

    Example:
        >>> with ir.main_graph:
        ...     losses = popxl.d2h_stream((), popxl.float32, "loss")
        ...     ops.host_store(losses, loss)
    """
    return DeviceToHostStream._make(shape, dtype, name or "d2h_stream", num_host_transfers)
