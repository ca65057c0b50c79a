"""Transfers of graph code. Code is always in place here, so these ops only occupy places in the schedule."""

from __future__ import annotations

from typing import Literal, NoReturn

from popxl.base.arguments import check_type
from popxl.context import get_current_context
from popxl.core.declaration import OpKind
from popxl.core.traits import Effect, Exchange
from popxl.errors import PopxlError
from popxl.graph import Graph

__all__ = ["CODE_LOCATION", "code_copy", "remote_code_load"]

CODE_LOCATION = Literal["executable", "compute_buffer", "io_buffer"]

_remote_code_load = OpKind(
    "RemoteCodeLoad",
    lambda *, graph, destination: (),
    shape=lambda *, graph, destination: (),
    gradient=None,
    traits=[Effect(), Exchange("graph")],
)


def remote_code_load(graph: Graph, destination: CODE_LOCATION) -> None:
    """Mark where to load a graph's code. The mark stays in the schedule without numerical effect.

    Args:
        graph: the graph whose code is meant; any but the current one.
        destination: memory for the code: `"executable"`.

    Raises:
        RuntimeError: if there is no current graph.
        ValueError: if `graph` is the current graph, or of another Ir.
        TypeError: if `graph` is not a graph.
        NotImplementedError: for other destinations.
        PopxlError: inside of `popxl.io_tiles()`: code runs on the compute tiles.

    Example:
        >>> with popxl.in_sequence():
        ...     ops.remote_code_load(graph, "executable")
        ...     y, = ops.call(graph, x, w)
    """
    context = get_current_context()
    if graph is context.graph:
        raise ValueError(
            f"The remote_code_load op cannot load the code of {graph.title}, the current graph: it would be running "
            "already. Load it from the graph that calls it."
        )
    check_type(graph, Graph, "remote_code_load: `graph`", "a Graph")
    if graph.ir is not context.ir:
        raise ValueError(f"remote_code_load: `graph` is {graph.title} of another Ir than the current graph.")
    if destination != "executable":
        raise NotImplementedError(
            f"remote_code_load: code cannot be loaded to {destination!r}; the one `destination` is 'executable'."
        )
    if context.io_tile_set:
        raise PopxlError(
            "remote_code_load: code is loaded to the compute tiles; call it outside of `popxl.io_tiles()`."
        )
    _remote_code_load(graph=graph.id, destination=destination)


def code_copy(graph: Graph, source: CODE_LOCATION, destination: CODE_LOCATION) -> NoReturn:
    """Not available: code is not copied between places.

    Raises:
        NotImplementedError: always.

    Example:
        >>> ops.remote_code_load(graph, "executable")      # what there is instead
    """
    raise NotImplementedError("code_copy: code is not copied between places. There is `ops.remote_code_load`.")
