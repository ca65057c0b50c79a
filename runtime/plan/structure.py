"""Structural identity of segments, independent of tensor names: segments of equal structure share one executable.

A structure is computed once and compared by identity: the structure of a graph represents its whole content. Equal
graphs have the same one, also if they belong to different programs.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterable
from functools import cache
from typing import Any

import numpy as np

from popxl.base.exact_key import exact_key
from popxl.core.aliasing import bases_first, callees_first, view_of
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import is_call
from popxl.graph import Graph
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import Stream


class Structure:
    """Interned content of a graph or op sequence, with one object per distinct content.

    Attributes:
        executable: executable of the content, once it is compiled.
        text: function that returns the text that it was compiled from.
    """

    __slots__ = ("__weakref__", "code", "executable", "text")

    def __init__(self, code: tuple[Any, ...]) -> None:
        self.code = code
        self.executable: Any = None
        self.text: Callable[[], str] = str


_LARGE = 4096
"""Bytes from which arrays are compared by identity: copying and hashing their numbers would take long."""

_interned: weakref.WeakValueDictionary[tuple[Any, ...], Structure] = weakref.WeakValueDictionary()
_lock = threading.RLock()  # the caches are shared by threads


def structure_of(code: tuple[Any, ...]) -> Structure:
    """Interned structure of `code`. Weakly referenced: lives while referenced elsewhere."""
    with _lock:
        interned = _interned.get(code)
        if interned is None:
            interned = _interned[code] = Structure(code)
    return interned


def clear_cache() -> None:
    """Clear the structure cache, forcing subsequent compilations to start anew."""
    _interned.clear()


class _ById:
    """Wrapper comparing an object by identity."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and self.value is other.value


class Structures:
    """Memoized structures of one program's graphs."""

    def __init__(self, main: Graph) -> None:
        self.of_graph = cache(self._graph)
        self.size = cache(self._size)
        self.calls = cache(self._calls)
        for graph in callees_first(main)[:-1]:  # so that each of these recurses only one call deep
            self.of_graph(graph)
            self.size(graph)
            self.calls(graph)

    def _graph(self, graph: Graph) -> Structure:
        """The structure of a graph."""
        encoding = StructuralEncoder(self)
        for t in graph.inputs:
            encoding.add_tensor(t, ("input", t.spec, t.by_ref))
        for op in graph.ops:
            encoding.add_op(op)
        encoding.code.append(tuple(map(encoding.operand, graph.outputs)))
        return structure_of(tuple(encoding.code))

    def _size(self, graph: Graph) -> int:
        """Number of ops in a graph after inlining all calls."""
        return sum(1 + sum(map(self.size, op.called_graphs)) for op in graph.ops)

    def _calls(self, graph: Graph) -> Counter[Structure]:
        """Calls of each structure per graph execution, excluding calls in loops and conditionals."""
        counts: Counter[Structure] = Counter()
        for op in graph.ops:
            if is_call(op):
                (callee,) = op.called_graphs
                counts[self.of_graph(callee)] += 1
                counts.update(self.calls(callee))
        return counts


def _view_bases(t: Tensor) -> list[Tensor]:
    """Bases of a view; none for other tensors."""
    view = view_of(t)
    return [] if view is None else [base.origin for base in view.inputs]


class StructuralEncoder:
    """Structural encoding of ops, with numbers in place of tensors.

    Args:
        structures: structures of called graphs.
        parameters: constants that are roots too: the encoding does not depend on their values.

    Attributes:
        code: encoding, a sequence of hashable values.
        roots: tensors that are read and not made by these ops, in the order of their first use.
        numbers: numbers of the tensors that are read or made, in the order in which `code` has them.
    """

    def __init__(self, structures: Structures, parameters: Container[Tensor] = ()) -> None:
        self.code: list[Any] = []
        self.roots: list[Tensor] = []
        self.numbers: dict[Tensor, int] = {}
        self._structures = structures
        self._parameters = parameters

    def add_tensor(self, t: Tensor, code: Any) -> int:
        """Encode a tensor as `code`, and return its number: the next one."""
        self.code.append(code)
        number = self.numbers[t] = len(self.numbers)
        return number

    def add_op(self, op: Op) -> None:
        """Encode an op. Views are encoded at their uses."""
        if op.kind.view is None:
            for part in op.parts:
                inputs = tuple(map(self.operand, part.inputs))
                self.code.append((*self.function(part), inputs, part.modified))
                for t in part.outputs:
                    if t.origin is t:
                        self.add_tensor(t, t.spec)

    def operand(self, t: Tensor) -> int:
        """Number of a tensor, after resolving aliases."""
        t = t.origin
        if t not in self.numbers:
            for each in bases_first(t, self.numbers, _view_bases):
                self._number_tensor(each)
        return self.numbers[t]

    def _number_tensor(self, t: Tensor) -> None:
        """Assign a number to a new tensor; the bases of a view have numbers."""
        view = view_of(t)
        if view is not None:
            numbers = tuple(self.numbers[base] for base in _view_bases(t))
            self.add_tensor(t, (*self.function(view), numbers))
        elif isinstance(t, Constant) and t not in self._parameters:
            self.add_tensor(t, (t.spec, self._key(t.data)))
        else:
            self.roots.append(t)
            self.add_tensor(t, ("root", t.spec))

    def function(self, op: Op) -> tuple[Any, ...]:
        """What an op computes of its inputs, whichever program it is in: `Op.signature` without specs, and with graphs
        by their structure."""
        return op.kind, op.operands, tuple((name, self._key(value)) for name, value in op.attributes.items())

    def _key(self, value: Any) -> Any:
        """Hashable key of a value, equal only for equal values of equal type: 1, 1.0 and True are distinct."""
        if isinstance(value, Graph):
            return self._structures.of_graph(value)
        if isinstance(value, tuple | list):
            return (type(value), *map(self._key, value))
        if isinstance(value, dict):
            return (dict, *((self._key(k), self._key(v)) for k, v in value.items()))
        if isinstance(value, np.ndarray) and value.nbytes <= _LARGE:
            return (value.dtype, value.shape, value.tobytes())
        if isinstance(value, RemoteBuffer):  # the executable depends on the number of slots, which may be set
            return (_ById(value), value.spec, value.entries)
        if isinstance(value, Stream):  # likewise on the number of transfers
            return (_ById(value), value.num_host_transfers)
        if isinstance(value, np.ndarray) or type(value).__hash__ is None:
            return _ById(value)
        return (type(value), exact_key(value))


def encoded(ops: Iterable[Op], structures: Structures, parameters: Container[Tensor] = ()) -> StructuralEncoder:
    """Encode an op sequence; see `StructuralEncoder`."""
    encoding = StructuralEncoder(structures, parameters)
    for op in ops:
        encoding.add_op(op)
    return encoding
