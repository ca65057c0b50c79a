"""The current graph, and the settings that ops take on when they are created.

One `Context` per thread holds the stack of entered graphs and the active placement, name scopes and ordering. The
context managers below change it for the length of a block and restore it at the end, also after an exception. The state
of `in_sequence` is in `popxl.base.sequence`, the search for the user's line in `popxl.base.source`; use of the context
by ops is in `popxl.core.recording`.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

from popxl.base.arguments import check_type
from popxl.base.sequence import Mode, Sequencer
from popxl.base.source import DebugRecord, KnownCaller, SourceLocation, frame_above, user_frame_above, user_line
from popxl.core.tensor import Tensor
from popxl.tensorlocation import ExecutionContext

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph
    from popxl.ir import Ir

__all__ = [
    "Context",
    "debug_context_frame_offset",
    "gcg",
    "get_current_context",
    "get_current_graph",
    "get_ir",
    "get_main_graph",
    "get_source_location",
    "gir",
    "gmg",
    "in_sequence",
    "io_tiles",
    "ipu",
    "name_scope",
    "op_debug_context",
]

Fn = Callable[..., Any]
F = TypeVar("F", bound=Fn)
InSequenceKey = tuple[int, ExecutionContext]

# Handles of op-created hooks are unique in the process, across threads and graphs.
_hook_handles = itertools.count(1)
_hooks: dict[int, tuple[Fn, Graph | None]] = {}


class Context(threading.local):
    """Thread-local build settings, available via `get_current_context`.

    Attributes:
        ipu_id: the IPU that new ops are placed on; `None` for none.
        io_tile_set: whether ops are placed on its I/O tiles.
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
        self.known_caller: KnownCaller | None = None
        self.debug_record: DebugRecord | None = None
        self._deferred_ops: list[Op] | None = None

    # The graph stack ------------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The current graph. Raises `RuntimeError` outside any graph."""
        if not self._graphs:
            raise RuntimeError(
                "There is no current graph. Ops and tensors are created inside a graph: enter one with "
                "`with ir.main_graph:`, or build a subgraph with `ir.create_graph(...)`."
            )
        return self._graphs[-1]

    @property
    def has_graph(self) -> bool:
        """Whether a graph was entered."""
        return bool(self._graphs)

    @property
    def ir(self) -> Ir:
        """The current Ir, from the outermost entered graph. Raises `RuntimeError` outside any graph."""
        return (self._graphs[0] if self._graphs else self.graph).ir

    @property
    def main_graph(self) -> Graph:
        """The main graph of the current Ir. Raises `RuntimeError` outside any graph."""
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
        """Set context attributes for a `with` block."""
        before = {name: getattr(self, name) for name in settings}
        try:
            for name, value in settings.items():
                setattr(self, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def located_at(self, ipu: int | None, io_tiles: bool | None) -> AbstractContextManager[None]:
        """Place the ops of a `with` block at a location, such as that of a tensor; without an IPU for `None`.

        Example:
            >>> with popxl.context.get_current_context().located_at(*x.location):
            ...     copy = ops.identity(x)
        """
        return self.set(ipu_id=ipu, io_tile_set=bool(io_tiles))

    def on_ipu(self, ipu: int | None) -> AbstractContextManager[None]:
        """Place the ops of a `with` block on an IPU; for `None`, on the current one."""
        return self.set(ipu_id=self.ipu_id if ipu is None else ipu)

    # Hooks ----------------------------------------------------------------------------------------------------------

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Settings as of a new thread, to build another Ir while one is being built."""
        with self.set(_graphs=[], _name_scopes=[], scope_prefix="", sequence=Sequencer(), ipu_id=0, io_tile_set=False):
            yield

    def register_op_created_hook(self, fn: Fn, graph: Graph | None = None) -> int:
        """Call `fn(op)` after op creation, optionally only in `graph`. Returns a removal handle."""
        handle = next(_hook_handles)
        _hooks[handle] = (fn, graph)
        return handle

    def remove_op_created_hook(self, handle: int) -> None:
        """Remove a hook. Raises `ValueError` for an unknown handle."""
        if handle not in _hooks:
            raise ValueError(f"There is no op-created hook with handle {handle!r}; registered are {sorted(_hooks)}.")
        del _hooks[handle]

    @contextmanager
    def defer_hooks(self) -> Iterator[None]:
        """Defer hook calls to the end of a `with` block; skip them on failure."""
        before, self._deferred_ops = self._deferred_ops, []
        try:
            yield
            created = self._deferred_ops
        finally:
            self._deferred_ops = before
        for op in created:
            self.op_created(op)

    def op_created(self, op: Op) -> None:
        """Tell the hooks about a new op."""
        if self._deferred_ops is not None:
            self._deferred_ops.append(op)
        elif _hooks:
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
    """Place the ops created in the block on IPU number `ipu`. Placement never changes numbers.

    A session maps each IPU to a separate device, if it has enough devices; see the option `ir.options.placement`.

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

    Raises:
        TypeError: if the name is not a string.
    """
    check_type(name, str, "The name of a scope", "a string")
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

    Example:
        >>> with popxl.Ir().main_graph as main, popxl.in_sequence():
        ...     v = popxl.variable(1.0)
        ...     before = v + 0.0
        ...     v += 1.0  # in place: `before` has been computed by then
        >>> [op.op_type for op in main.ops]
        ['Add', 'AddLhsInplace']
    """
    if mode is None:
        raise TypeError("`None` cannot be passed to `in_sequence`: pass True, False or 'pass'.")
    with _context.sequence.block(mode):
        yield _context.sequence.mode


@contextmanager
def _execution_context(context: ExecutionContext) -> Iterator[ExecutionContext]:
    """Put the ops created in the block into another part of the program.

    Example:
        >>> with popxl.context._execution_context(popxl.ExecutionContext.WeightsFromHostFragment):
        ...     piece = ops.init((4,), popxl.float32)
    """
    with _context.set(execution_context=context):
        yield context


# The source line of an op -------------------------------------------------------------------------------------------


def user_frame() -> tuple[CodeType, int]:
    """Code object and line number of the user's line that is calling us."""
    return user_line(sys._getframe(2), _context.frame_offset, _context.known_caller)


@contextmanager
def with_known_caller() -> Iterator[None]:
    """Find the user's line once for a block that recurses: the search for an op's line ends at the function of the
    innermost such block."""
    frame = sys._getframe(2)
    with _context.set(known_caller=(frame, user_frame_above(frame, _context.known_caller))):
        yield


@contextmanager
def debug_context_frame_offset(i: int) -> Iterator[int]:
    """Attribute the ops of the block to the line of a caller further out.

    The source line of an op is that of the innermost frame outside popxl and popxl_addons. A function of yours that
    acts like an op can exclude itself: with offset `i`, this many further frames are skipped.

    Example:
        >>> @popxl.context.debug_context_frame_offset(1)
        ... def twice(x):
        ...     return x * 2
        >>> y = twice(x)                      # y.producer.source is this line
    """
    offset = _context.frame_offset + i
    with _context.set(frame_offset=offset):
        yield offset


def get_source_location(offset: int) -> SourceLocation:
    """The line that is being run `offset` levels above the function that asks. `IndexError` if there are fewer.

    Example:
        >>> def where_am_i():
        ...     return popxl.context.get_source_location(1)
        >>> where_am_i()                      # file, line and function of this call
    """
    frame = frame_above(offset)
    return SourceLocation.of((frame.f_code, frame.f_lineno)).resolved


@overload
def op_debug_context(name: F) -> F: ...
@overload
def op_debug_context(name: str) -> Callable[[F], F]: ...
def op_debug_context(name: Any) -> Any:
    """Decorator: record a function as the creator of its ops.

    The ops have one record of the call, `op.debug_record`: the name of the function, the tensors that it was given and
    that it returned, and the line of the caller. That is also their `op.source`. A decorated function that is called by
    another one has a record of its own.

    Args:
        name: function to decorate; or the name of the record, as in `@op_debug_context("gelu")`.

    Example:
        >>> @popxl.context.op_debug_context
        ... def squared(x):
        ...     return x * x
        >>> y = squared(x)
        >>> y.producer.debug_record.api, y.producer.debug_record.outputs
        ('squared', ('mul_out',))
    """
    if isinstance(name, str):
        return functools.partial(_recorded, api=name)
    return _recorded(name, api=name.__name__)


def _recorded(function: F, api: str) -> F:
    """See `op_debug_context`."""

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        record = DebugRecord(
            api,
            f"{_context.scope_prefix}{api}",
            tuple(value.id for value in (*args, *kwargs.values()) if isinstance(value, Tensor)),
            SourceLocation.of(user_line(sys._getframe(1), _context.frame_offset)).resolved,
        )
        with _context.set(debug_record=record):
            result = function(*args, **kwargs)
        if isinstance(result, Tensor | Collection):
            results = [result] if isinstance(result, Tensor) else result
            record.outputs = tuple(t.id for t in results if isinstance(t, Tensor))
        return result

    return cast(F, recorded)
