"""Where the next op goes: the current graph and the settings that ops pick up when they are created.

One `Context` per thread holds the stack of entered graphs and the active placement, name scopes and ordering. The
context managers below change it for the length of a block and always put back what was there, also when the block
is left by an exception. What `in_sequence` remembers is in `popxl.sequence`; what an op does with all this is in
`popxl.op`.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from popxl.sequence import Mode, Sequencer
from popxl.tensorlocation import ExecutionContext

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir
    from popxl.op import Op

__all__ = [
    "Context",
    "debug_context_frame_offset",
    "gcg",
    "get_current_context",
    "get_current_graph",
    "get_ir",
    "get_main_graph",
    "gir",
    "gmg",
    "in_sequence",
    "io_tiles",
    "ipu",
    "name_scope",
]

Fn = Callable[..., Any]
InSequenceKey = tuple[int, ExecutionContext]

# Handles of op-created hooks are unique in the process, whichever thread or graph registered them.
_hook_handles = itertools.count(1)
_hooks: dict[int, tuple[Fn, Graph | None]] = {}


class Context(threading.local):
    """The build settings of this thread. Obtain it from `get_current_context`.

    Attributes:
        ipu_id: the IPU that new ops are placed on; `None` for none.
        io_tile_set: whether they are placed on the I/O tiles of it.
    """

    ipu_id: int | None = 0
    io_tile_set: bool = False

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        self._name_scopes: list[str] = []
        self.scope_prefix = ""
        self.execution_context = ExecutionContext.Normal
        self.sequence = Sequencer()
        self.frame_offset = 0

    # The graph stack ------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The graph that ops are created in. `RuntimeError` if no graph was entered."""
        if not self._graphs:
            raise RuntimeError(
                "There is no current graph. Ops and tensors are created inside a graph: enter one with "
                "`with ir.main_graph:`, or build a subgraph with `ir.create_graph(...)`."
            )
        return self._graphs[-1]

    @property
    def ir(self) -> Ir:
        """The Ir in use: that of the graph entered first. `RuntimeError` if no graph was entered."""
        return (self._graphs[0] if self._graphs else self.graph).ir

    @property
    def main_graph(self) -> Graph:
        """The main graph of the Ir in use. `RuntimeError` if no graph was entered."""
        return self.ir.main_graph

    def push_graph(self, g: Graph) -> None:
        """Make `g` current. `RuntimeError` if it belongs to another Ir than the graphs entered already."""
        if self._graphs and self._graphs[0].ir is not g.ir:
            raise RuntimeError(
                f"Cannot enter {g!r} of {g.ir!r}: {self._graphs[-1]!r} of {self._graphs[0].ir!r} is current. "
                "Leave the `with` blocks of one Ir before you build another."
            )
        self._graphs.append(g)

    def pop_graph(self) -> None:
        """Make the graph current that was current before the last `push_graph`."""
        self._graphs.pop()

    # Settings -------------------------------------------------------------------------------------------------------

    @property
    def name_scopes(self) -> list[str]:
        """The active name scopes, outermost first (a copy)."""
        return list(self._name_scopes)

    def push_name_scope(self, name: str) -> None:
        """Prefix the names of new ops and tensors with `name` and a slash."""
        self._name_scopes.append(name)
        self.scope_prefix = "".join(f"{scope}/" for scope in self._name_scopes)

    def pop_name_scope(self) -> None:
        """Undo the last `push_name_scope`."""
        self._name_scopes.pop()
        self.scope_prefix = "".join(f"{scope}/" for scope in self._name_scopes)

    @property
    def in_sequence(self) -> Mode:
        """`True`, `False`, or `None` where no order is imposed (no `in_sequence` block, or a "pass" block)."""
        return self.sequence.mode

    @in_sequence.setter
    def in_sequence(self, mode: Mode) -> None:
        self.sequence.mode = mode

    @contextmanager
    def set(self, **settings: Any) -> Iterator[None]:
        """Set attributes of this context for the length of a block."""
        before = {name: getattr(self, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    # Hooks ----------------------------------------------------------------------------------------------------------

    def register_op_created_hook(self, fn: Fn, graph: Graph | None = None) -> int:
        """Call `fn(op)` after each op is created (in `graph`, if given). Returns a handle for removing it."""
        handle = next(_hook_handles)
        _hooks[handle] = (fn, graph)
        return handle

    def remove_op_created_hook(self, handle: int) -> None:
        """Remove a hook. `ValueError` if there is none with this handle."""
        if handle not in _hooks:
            raise ValueError(f"There is no op-created hook with handle {handle!r}; registered are {sorted(_hooks)}.")
        del _hooks[handle]

    def op_created(self, op: Op) -> None:
        """Tell the hooks about a new op."""
        if _hooks:
            for fn, graph in list(_hooks.values()):
                if graph is None or graph is op.graph:
                    fn(op)


_context = Context()


def get_current_context() -> Context:
    """The build settings of this thread."""
    return _context


def get_current_graph() -> Graph:
    """The graph entered last. `RuntimeError` outside any `with graph:` block."""
    return _context.graph


def get_main_graph() -> Graph:
    """The main graph of the Ir in use. `RuntimeError` outside any `with graph:` block."""
    return _context.main_graph


def get_ir() -> Ir:
    """The Ir in use. `RuntimeError` outside any `with graph:` block."""
    return _context.ir


gcg, gmg, gir = get_current_graph, get_main_graph, get_ir


@contextmanager
def ipu(ipu: int) -> Iterator[int]:
    """Place the ops created in the block on device number `ipu`. Placement never changes numbers.

    Example:
        >>> with popxl.ipu(1):
        ...     y = x + 1        # y.ipu == 1
    """
    with _context.set(ipu_id=ipu):
        yield ipu


@contextmanager
def io_tiles() -> Iterator[None]:
    """Place the ops created in the block on the I/O tile set. Placement never changes numbers."""
    with _context.set(io_tile_set=True):
        yield


@contextmanager
def name_scope(name: str) -> Iterator[list[str]]:
    """Prefix the names of all ops and tensors created in the block with `name/`. Scopes nest.

    Example:
        >>> with ir.main_graph, popxl.name_scope("enc"):
        ...     popxl.variable(0, name="w").name
        'enc/w'
    """
    _context.push_name_scope(name)
    try:
        yield _context.name_scopes
    finally:
        _context.pop_name_scope()


@contextmanager
def in_sequence(mode: bool | Literal["pass"] = True) -> Iterator[Mode]:
    """Order the ops created in the block.

    Args:
        mode: `True` chains the ops in creation order. `False` leaves them unordered among themselves; inside a
            `True` block, the whole `False` block then counts as one element of the chain. `"pass"` neither orders
            nor remembers the ops of the block, and forgets what was remembered before it.

    Raises:
        TypeError: if `mode` is `None`.
        ValueError: by the first op created in the block, for any other mode.
    """
    if mode is None:
        raise TypeError("`None` cannot be passed to `in_sequence`: pass True, False or 'pass'.")
    with _context.sequence.block(mode):
        yield _context.sequence.mode


@contextmanager
def debug_context_frame_offset(i: int) -> Iterator[int]:
    """Attribute the ops of the block to the line of a caller further out.

    The source line of an op is that of the innermost frame outside popxl and popxl_addons. A function of yours that
    is itself a kind of op can step aside: with offset `i` that many further frames are passed over.
    """
    offset = _context.frame_offset + i
    with _context.set(frame_offset=offset):
        yield offset


# The source line of an op -------------------------------------------------------------------------------------------

_OURS = ("popxl", "popxl_addons", "contextlib")
_is_ours: dict[str, bool] = {}


def _module_is_ours(module: str) -> bool:
    known = _is_ours.get(module)
    if known is None:
        known = _is_ours[module] = module.partition(".")[0] in _OURS
    return known


def user_frame() -> tuple[Any, int]:
    """Code object and line number of the innermost frame that is not ours. Cheap: nothing is formatted."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _module_is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    for _ in range(_context.frame_offset):
        if frame.f_back is not None:
            frame = frame.f_back
    return frame.f_code, frame.f_lineno
