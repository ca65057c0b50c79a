"""Checks and small helpers that ops share, and that ops written outside of popxl import from here."""

from __future__ import annotations

from popxl.core.recording import check_colocated, foreign_tensor, not_a_tensor
from popxl.core.tensor import Tensor
from popxl.dtypes import dtype as dtype_
from popxl.graph import Graph
from popxl.ops.convert import cast_if_needed

__all__ = [
    "cast_if_needed",
    "check_in_graph",
    "check_tensor_ipu_and_tile_set",
    "convert_optional_dtype",
    "convert_optional_float",
    "convert_optional_int",
    "convert_optional_int64_list",
    "handle_negative_axis",
]


def check_in_graph(graph: Graph, *args: Tensor, **tensors: Tensor) -> None:
    """Check that each keyword argument is a tensor of `graph`.

    Raises:
        TypeError: for a value that is not a tensor.
        ValueError: for a tensor of another graph.
        Exception: for a positional tensor: its name is needed for the message.
    """
    _keywords_only("check_in_graph", args)
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise not_a_tensor("check_in_graph", name, t)
        if t.graph_ref is not graph.ref:
            raise foreign_tensor("check_in_graph", name, t, graph)


def check_tensor_ipu_and_tile_set(*args: Tensor, **tensors: Tensor) -> None:
    """Check that the keyword arguments are not known to be on different IPUs or tile sets.

    Raises:
        ValueError: if two are, or if there are none.
        Exception: for a positional tensor: its name is needed for the message.
    """
    _keywords_only("check_tensor_ipu_and_tile_set", args)
    if not tensors:
        raise ValueError("check_tensor_ipu_and_tile_set: there are no tensors to check.")
    check_colocated(tuple(tensors), tuple(tensors.values()))


def _keywords_only(name: str, args: tuple[object, ...]) -> None:
    if args:
        raise Exception(f"{name}: pass tensors as keyword arguments, so that messages can name them; got {args!r}.")


def handle_negative_axis(t: Tensor, axis: int) -> int:
    """The axis counted from the front: a negative one counts from the back. The range is not checked."""
    return axis + t.rank if axis < 0 else axis


def convert_optional_float(v: float | None) -> float | None:
    """The argument. (PopXL wrapped it for a native layer.)"""
    return v


def convert_optional_int(v: int | None) -> int | None:
    """The argument. (PopXL wrapped it for a native layer.)"""
    return v


def convert_optional_dtype(dt: dtype_ | None) -> dtype_ | None:
    """The argument. (PopXL wrapped it for a native layer.)"""
    return dt


def convert_optional_int64_list(l: list[int] | None) -> list[int] | None:  # noqa: E741  # PopXL's name
    """The argument. (PopXL wrapped it for a native layer.)"""
    return l
