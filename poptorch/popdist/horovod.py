"""`popdist.horovod`: collectives on host tensors between instances started by `poprun`.

Names and arguments are those of `horovod.torch`. A rank is the index of an instance, not of a replica. Every instance
has to make the same calls in the same order, with tensors of the same dtype. Gradients do not need them: a model with
the options of `popdist.poptorch` reduces them on the devices. Use it for metrics, and for weights that only one
instance has loaded.

Example:
    >>> import popdist.horovod as hvd
    >>> hvd.init()
    >>> hvd.rank(), hvd.size()                                             # without `poprun`
    (0, 1)
    >>> hvd.allreduce(torch.tensor([1.0, 3.0]))
    tensor([1., 3.])
"""

from __future__ import annotations

import enum
import math
import pickle
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch
from jax.experimental import multihost_utils

import popdist
from popxl.extend import processes

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "is_initialized",
    "local_rank",
    "rank",
    "shutdown",
    "size",
]


class ReduceOp(enum.Enum):
    """Reduction operator of `allreduce`. Members are also available as module attributes."""

    Average = "Average"
    Sum = "Sum"
    Min = "Min"
    Max = "Max"
    Product = "Product"


Average, Sum, Min, Max, Product = ReduceOp

_COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.Average: torch.add,
    ReduceOp.Sum: torch.add,
    ReduceOp.Min: torch.minimum,
    ReduceOp.Max: torch.maximum,
    ReduceOp.Product: torch.mul,
}


def init() -> None:
    """Join other instances through `popdist.init`; does nothing if already joined."""
    popdist.init()


def shutdown() -> None:
    """Do nothing: instances disconnect at program exit."""


def is_initialized() -> bool:
    """Whether this instance has joined; always true for a single instance."""
    return processes.is_connected() or size() == 1


def size() -> int:
    """Number of instances."""
    return popdist.getNumInstances()


def rank() -> int:
    """Index of this instance, starting at 0."""
    return popdist.getInstanceIndex()


def local_rank() -> int:
    """Index of this instance on its machine, starting at 0."""
    return popdist.getLocalInstanceIndex()


def barrier() -> None:
    """Wait until all instances have called this."""
    popdist.synchronize()


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None
) -> torch.Tensor:
    """Reduce tensors elementwise across all instances.

    Args:
        tensor: tensor of the same shape and dtype on all instances.
        average: the former way to choose `op`: `Average` if True, `Sum` if False.
        name: has no effect.
        op: reduction; `Average` if not given. The average of integers is rounded toward negative infinity.

    Returns:
        A new tensor, the same on all instances.

    Raises:
        ValueError: if both `average` and `op` are given, or if shapes or dtypes differ between instances.
        PopxlRuntimeError: if another instance ends, or does not come.
    """
    if average is not None and op is not None:
        raise ValueError("popdist.horovod.allreduce: give `average` or `op`, not both; `average` is the former name.")
    op = op or (Sum if average is False else Average)
    total = reduce(_COMBINE[op], _gather("allreduce", tensor, same_shape=True))
    if op is not Average:
        return total
    is_inexact = total.dtype.is_floating_point or total.dtype.is_complex
    return total / size() if is_inexact else torch.div(total, size(), rounding_mode="floor")


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: ReduceOp | None = None
) -> torch.Tensor:
    """`allreduce` in place. Returns the same tensor."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, average, name, op))


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Concatenate tensors of all instances along the first dimension, in rank order.

    Args:
        tensor: tensor with at least one dimension; only the first one may differ between instances.
        name: has no effect.

    Raises:
        ValueError: if dtypes or other dimensions differ between instances.
        PopxlRuntimeError: if another instance ends, or does not come.
    """
    return torch.cat(_gather("allgather", tensor, same_shape=False))


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Copy the tensor of one instance.

    Args:
        tensor: tensor of the same shape and dtype on all instances.
        root_rank: the rank of the instance whose tensor all get.
        name: has no effect.

    Raises:
        ValueError: if there is no such rank, or if shapes or dtypes differ between instances.
        PopxlRuntimeError: if another instance ends, or does not come.
    """
    _check_rank("broadcast", root_rank)
    return _gather("broadcast", tensor, same_shape=True)[root_rank]


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """`broadcast` in place. Returns the same tensor."""
    with torch.no_grad():
        return tensor.copy_(broadcast(tensor, root_rank, name))


def broadcast_parameters(params: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]], root_rank: int = 0) -> None:
    """Overwrite model tensors with those of one instance.

    Args:
        params: `model.state_dict()` or `model.named_parameters()`. Values that are not tensors are ignored.
        root_rank: the rank of the instance whose tensors all get.

    Raises:
        ValueError: as for `broadcast`.
        PopxlRuntimeError: if another instance ends, or does not come.
    """
    for _, value in sorted(params.items() if isinstance(params, Mapping) else params, key=lambda pair: pair[0]):
        if isinstance(value, torch.Tensor):
            broadcast_(value, root_rank)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Load the optimizer state and options of another instance."""
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank))


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Broadcast a picklable object from one instance; other instances may omit `obj`."""
    _check_rank("broadcast_object", root_rank)
    return _objects("broadcast_object", obj if rank() == root_rank else None)[root_rank]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gather picklable objects of all instances, in rank order."""
    return _objects("allgather_object", obj)


def _check_rank(function: str, root_rank: int) -> None:
    if not 0 <= root_rank < size():
        raise ValueError(
            f"popdist.horovod.{function}: there is no instance {root_rank}; `root_rank` is from 0 to {size() - 1}."
        )


def _objects(function: str, obj: Any) -> list[Any]:
    """Gather pickled objects of all instances."""
    text = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
    return [pickle.loads(each.numpy().tobytes()) for each in _gather(function, text, same_shape=False)]


def _gather(function: str, tensor: torch.Tensor, same_shape: bool) -> list[torch.Tensor]:
    """Gather copies of all instances' tensors. Unless `same_shape`, the first dimension may differ."""
    own = tensor.detach().to("cpu", copy=True).contiguous()
    if not same_shape and not own.dim():
        raise ValueError(
            f"popdist.horovod.{function}: `tensor` is a scalar; it needs a dimension to concatenate along."
        )
    if size() == 1:
        return [own]
    processes.join()
    said = processes.barrier(f"popdist.horovod.{function}", [str(own.dtype), list(own.shape)])
    fixed = 0 if same_shape else 1
    if len({(dtype, *shape[fixed:], len(shape)) for dtype, shape in said}) > 1:
        listed = "; ".join(f"instance {i} has {dtype} of shape {tuple(s)}" for i, (dtype, s) in enumerate(said))
        which = "All dimensions" if same_shape else "All dimensions but the first"
        raise ValueError(
            f"popdist.horovod.{function}: {which} and the dtype must be the same everywhere, but {listed}."
        )
    shapes = [tuple(shape) for _, shape in said]
    sizes = [math.prod(shape) * own.element_size() for shape in shapes]
    if not max(sizes):
        return [own.new_empty(shape) for shape in shapes]
    sent = np.zeros(max(sizes), np.uint8)  # bytes, so that nothing is converted to JAX's dtypes
    sent[: sizes[rank()]] = own.view(-1).view(torch.uint8).numpy() if own.numel() else 0
    gathered = np.asarray(multihost_utils.process_allgather(sent))
    return [
        torch.frombuffer(bytearray(row[:length].tobytes()), dtype=own.dtype).view(shape)
        if length
        else own.new_empty(shape)
        for row, length, shape in zip(gathered, sizes, shapes, strict=True)
    ]
