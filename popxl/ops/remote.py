"""Ops that move tensors between the device and remote buffers.

They depend on the runtime, so they only declare their specs here; `runtime.lowering.remote_buffers` implements them.
Ops that use one buffer run in the order in which they were created.
"""

from __future__ import annotations

from typing import Any, NoReturn

from popxl import dtypes
from popxl.context import get_current_context
from popxl.core.create import constant
from popxl.core.declaration import OpKind
from popxl.core.recording import foreign_tensor, not_a_tensor
from popxl.core.tensor import Tensor
from popxl.core.traits import Colocated, Effect, Exchange, Overwrites, Trait, always
from popxl.errors import PopxlError
from popxl.ops.host import init
from popxl.remote_buffer import RemoteBuffer
from popxl.values.shapes import integer, like_first
from popxl.values.spec import brief

__all__ = ["remote_load", "remote_load_", "remote_store"]


def _lowered_by_runtime(*operands: Any, **attributes: Any) -> NoReturn:
    raise PopxlError("this op uses a remote buffer, and is carried out by a Session only.")


def _exchange(name: str, *more: Trait, **settings: Any) -> OpKind:
    """Declare an op that uses a buffer: with the tensor in question, and the number of the slot."""
    traits = [Effect(), Exchange("buffer"), Colocated(), *more]
    return OpKind(name, _lowered_by_runtime, operands=("t", "offset"), gradient=None, traits=traits, **settings)


remote_load_kind = _exchange("RemoteLoad", shape=like_first)
remote_load_inplace_kind = _exchange("RemoteLoadInplace", Overwrites("t", forgets=always), shape=like_first)
remote_store_kind = _exchange("RemoteStore", shape=lambda t, offset, *, buffer: ())


def remote_load(remote_buffer: RemoteBuffer, offset: int | Tensor, name: str | None = None) -> Tensor:
    """Load a copy of a remote buffer slot at run time.

    Args:
        remote_buffer: the buffer.
        offset: number of the slot, below `remote_buffer.entries`; or an integer tensor of one element, which is read
            when the op runs. Numbers beyond the last slot mean the last one; a session refuses such constants,
            including those bound to a call, and a run under `session.debugging()` refuses any.
        name: stem of the result's name, `id_<number of the buffer>_offset_<name of the offset>` by default.

    Returns:
        A new tensor in the current graph, with the shape, dtype and meta-shape of the buffer. Changes to it reach the
        buffer when it is stored.

    Raises:
        TypeError: if `remote_buffer` is not such a buffer, or `offset` is not an integer.
        ValueError: if the buffer is of another Ir, for an `offset` below 0, and for a tensor with several elements.

    Example:
        The weights of a layer, by its number.

        >>> w = ops.remote_load(buffer, layer)
    """
    number = _offset("remote_load", remote_buffer, offset)
    name = name or f"id_{remote_buffer.remote_buffer_id}_offset_{number.name}"
    destination = init(
        remote_buffer.tensor_shape,
        remote_buffer.tensor_dtype,
        f"{name}_remote_load",
        "undef",
        remote_buffer.meta_shape,
    )
    return remote_load_kind(destination, number, buffer=remote_buffer, results=(f"{name}_remote_loaded",))


def remote_load_(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> Tensor:
    """Overwrite a tensor with a slot of a remote buffer.

    Args:
        remote_buffer, offset: as for `remote_load`.
        t: tensor to overwrite, of the shape and dtype of the buffer. It takes on the buffer's meta-shape too.

    Returns:
        An alias of `t`.

    Raises:
        TypeError: if `remote_buffer` is not such a buffer, `offset` is not an integer, or `t` is not a tensor.
        ValueError: as for `remote_load`, and if the shapes or dtypes differ.

    Example:
        >>> w = ops.remote_load_(buffer, layer, w)
    """
    number = _offset("remote_load_", remote_buffer, offset, t)
    alias: Tensor = remote_load_inplace_kind(t, number, buffer=remote_buffer)
    alias._meta_shape = t._meta_shape = remote_buffer.meta_shape
    return alias


def remote_store(remote_buffer: RemoteBuffer, offset: int | Tensor, t: Tensor) -> None:
    """Copy a tensor into a slot of a remote buffer.

    Args:
        remote_buffer, offset: as for `remote_load`.
        t: tensor to store, of the shape and dtype of the buffer; nothing is converted.

    Raises:
        TypeError: if `remote_buffer` is not such a buffer, `offset` is not an integer, or `t` is not a tensor.
        ValueError: as for `remote_load`, and if the shapes or dtypes differ.

    Example:
        >>> ops.remote_store(buffer, layer, w)
    """
    number = _offset("remote_store", remote_buffer, offset, t)
    remote_store_kind(t, number, buffer=remote_buffer, results=())


def _offset(name: str, buffer: Any, offset: Any, *ts: Any) -> Tensor:
    """The offset as a tensor, after all checks: a number becomes a constant."""
    graph = get_current_context().graph
    if not isinstance(buffer, RemoteBuffer):
        raise TypeError(f"{name}: expected a RemoteBuffer, got {buffer!r} ({type(buffer).__name__}).")
    buffer.check_belongs_to(graph.ir, name)
    for t in ts:
        if not isinstance(t, Tensor):
            raise not_a_tensor(name, "t", t)
        if t.graph_ref is not graph.ref:
            raise foreign_tensor(name, "t", t, graph)
        buffer.validate_tensor_matches_buffer(t)
    if not isinstance(offset, Tensor):
        number = integer(offset, f"{name}: `offset`", "be an integer or an integer tensor")
        if not 0 <= number < 2**32:
            raise ValueError(f"{name}: `offset` is {number}; slots are numbered from 0.")
        return constant(number, dtypes.uint32, "offset")
    if offset.graph_ref is not graph.ref:
        raise foreign_tensor(name, "offset", offset, graph)
    if not offset.dtype.is_int:
        raise TypeError(f"{name}: `offset` is {brief(offset)}; expected an integer, the number of a slot.")
    if offset.shape not in ((), (1,)):
        raise ValueError(f"{name}: `offset` is {brief(offset)}; expected the shape () or (1,), for one number.")
    return offset
