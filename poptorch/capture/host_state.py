"""Changes that `forward` makes to host objects. No program carries these between runs: they are detected and undone.

It inspects the attributes of modules, the variables that functions name (of files and of enclosing functions), and the
user's containers and objects that can be reached from there. This is the only comparison around a run of `forward`;
those of later calls with the time of the capture are `poptorch.run.host_changes` and `poptorch.run.host_writes`.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from operator import is_
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from poptorch.base.host_numbers import Number
from poptorch.base.introspection import CONTAINERS, attributes, is_instance, items, slots
from poptorch.capture.changing_lines import line_changing
from poptorch.capture.counters import COUNTER_TYPES, Counter
from poptorch.capture.torch_private import FakeTensor

_NOT_THE_USERS = {"torch", "poptorch", "popxl", "runtime", "jax", "jaxlib", "numpy", "lightning", "pytorch_lightning"}
_NOT_THE_USERS |= set(sys.stdlib_module_names) - {"__main__"}
NUMBERS = (bool, int, float, complex, np.generic)
_PLAIN = (*NUMBERS, str)
_CLOSED = (*_PLAIN, bytes, type(None), torch.Tensor, ModuleType, threading.Thread)
"""Types whose attributes are not compared. A thread, such as the monitor of `tqdm`, changes its own meanwhile."""
_HOLDING = {"argparse", "collections", "queue", "types", "weakref"}
"""Modules of Python whose objects hold those of users."""

_MOST = 10_000
"""Maximum number of inspected objects."""


@dataclass
class HolderSnapshot:
    """Contents of an object, list, dictionary or set: recorded before `forward` ran, and current ones.

    Attributes:
        text: the user's name for it.
        holder: itself; the dictionary of an object.
        read_contents: function that returns its contents.
        restore_contents: function that restores the contents, or only some of the items; `None` if that is impossible.
        is_models: whether it belongs to the model.
        is_namespace: whether it holds them under names, as an object or a function does.
        derived: names of what each run computes anew before it is read.
        contents: contents when this was made.
    """

    text: str
    holder: Any
    read_contents: Callable[[], Any]
    restore_contents: Callable[[Any], None] | None = None
    is_models: bool = False
    is_namespace: bool = False
    derived: frozenset[str | None] = frozenset()
    contents: Any = field(init=False)

    def __post_init__(self) -> None:
        self.contents = self.read_contents()

    def inner_objects(self) -> Iterator[tuple[str, Any]]:
        """Objects among the contents that may hold others, by display name."""
        pairs = self.contents.items() if isinstance(self.contents, dict) else enumerate(self.contents)
        return ((self._text_of(key), value) for key, value in pairs if not is_instance(value, _CLOSED))

    def restore(self) -> None:
        """Restore the contents of model objects. In other objects, replace only entries with fake tensors."""
        now = self.read_contents()
        if self.restore_contents is None or _same_content(now, self.contents):
            return
        if self.is_models:
            self.restore_contents(self.contents)
        elif isinstance(now, dict):
            pairs = [(key, old, now.get(key)) for key, old in self.contents.items()]
            self.restore_contents({key: old for key, old, value in pairs if value is not old and _holds_fake(value)})

    def changed(self) -> Iterator[tuple[str, Any, Any]]:
        """Entries that are now different objects: display name, old value, new value."""
        now = self.read_contents()
        if isinstance(now, dict):
            for key, value in now.items():
                if key not in self.derived and value is not (old := self.contents.get(key, _ABSENT)):
                    yield self._text_of(key), old, value
        elif isinstance(now, set) and now != self.contents or len(now) != len(self.contents):
            yield self.text, GROWS, GROWS
        elif isinstance(now, list):
            for i, (old, value) in enumerate(zip(self.contents, now, strict=True)):
                if value is not old:
                    yield f"{self.text}[{i}]", old, value

    def _text_of(self, key: Any) -> str:
        if self.is_namespace:
            return f"{self.text}.{key}".removeprefix(".")
        return f"{self.text}[{key!r}]" if type(key) in _PLAIN else self.text


_ABSENT, GROWS = object(), object()
"""Markers: item that was absent before, container that may have grown."""


class HostState:
    """Snapshot of host state from before a function runs.

    Args:
        with_functions: whether to inspect variables of functions and classes too.

    Attributes:
        snapshots: objects that hold other objects.
        excluded: the user's names of what `excluding` has found.

    Example:
        >>> module = torch.nn.Module()
        >>> module.seen = []
        >>> with HostState(module, None).restored() as state:
        ...     module.seen.append(1)
        ...     [name for name, line in state.changes(lambda value: False)]
        ['model.seen']
        >>> module.seen
        []
    """

    def __init__(
        self, module: torch.nn.Module, function: Callable[..., Any] | None, with_functions: bool = True
    ) -> None:
        self.snapshots: list[HolderSnapshot] = []
        self._with_functions = with_functions
        self.excluded: set[str] = set()
        self._visited: set[int] = set()
        self._codes: dict[CodeType, None] = {}
        self._globals: dict[int, dict[str, Any]] = {}
        self._waiting: deque[tuple[str, Any, bool]] = deque()
        modules = {each: path for path, each in torch.nn.Module.named_modules(module)}
        for each, path in modules.items():
            self._visited.add(id(each))
            self._add_namespace(f"model.{path}" if path else "model", attributes(each), without=_OF_MODULES)
            self.snapshots[-1].derived = frozenset(map(_weight_name, each._forward_pre_hooks.values()))
        self._modules = tuple(self.snapshots)
        self._explore()
        if not with_functions:
            return
        for kind in dict.fromkeys(chain.from_iterable(type(each).__mro__ for each in modules)):
            if is_users(kind):
                self._add_class(kind)
        self._waiting.append(("", function, False))
        for each, path in modules.items():
            for hook in (*each._forward_pre_hooks.values(), *each._forward_hooks.values()):
                self._waiting.append((f"a hook of {path or 'model'}", hook, False))
        self._explore()

    @property
    def namespaces(self) -> list[dict[str, Any]]:
        """Global namespaces of user functions."""
        return list(self._globals.values())

    @contextmanager
    def restored(self) -> Iterator[HostState]:
        """Restore the contents of model objects after a block."""
        try:
            yield self
        finally:
            for holder in self.snapshots:
                holder.restore()

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """Leave out of `changes` what a block changes: it is code that the host executes in each run."""
        before = [replace(holder) for holder in self.snapshots]
        yield
        self.excluded |= {text for holder in before for text, _, _ in holder.changed()}

    def changes(self, is_of_run: Callable[[Any], bool]) -> Iterator[tuple[str, str]]:
        """Changes that may be intended for later runs: display name, and source line of the change.

        These are numbers and texts; lists, sets and queues that have grown; and holders of a tensor of this run.

        Args:
            is_of_run: whether an object is a tensor that each run makes again.
        """
        for snapshot in self.snapshots:
            for text, before, now in snapshot.changed():
                counts = is_instance(now, NUMBERS) and before is _ABSENT and not snapshot.is_namespace
                differs = is_instance(now, _PLAIN) and is_instance(before, _PLAIN) and before != now
                may_be_intended = now is GROWS or counts or differs or any(map(is_of_run, pytree.tree_leaves(now)))
                if may_be_intended and text not in self.excluded:
                    yield text, self.line_of(text, is_rebound=snapshot.is_namespace and now is not GROWS)

    def changed_counters(self) -> dict[str, Number]:
        """Numbers among the attributes of modules that have changed: values before, by module path and name."""
        return {
            text.removeprefix("model."): before
            for snapshot in self._modules
            for text, before, now in snapshot.changed()
            if type(before) in COUNTER_TYPES and text not in self.excluded
            if type(now) is Counter or type(now) in COUNTER_TYPES and now != before
        }

    def line_of(self, text: str, is_rebound: bool = False) -> str:
        """Source line that changes an object with this display name; see `line_changing`."""
        return line_changing(self._codes, text, is_rebound)

    # Looking around -------------------------------------------------------------------------------------------------

    def _explore(self) -> None:
        """Take snapshots of all objects that can be reached from those waiting."""
        while self._waiting and len(self._visited) < _MOST:
            text, each, is_models = self._waiting.popleft()
            if id(each) in self._visited or is_instance(each, _CLOSED):
                continue
            self._visited.add(id(each))
            if is_instance(each, CONTAINERS):
                self._add_container(text, each, is_models)
            elif read := next((read for kind, read in _STATES.items() if is_instance(each, kind)), None):
                self._add(HolderSnapshot(text, each, partial(_single_value, read, each), None, is_models))
            elif is_instance(each, FunctionType):
                if self._with_functions:
                    self._add_function(each)
            elif is_instance(each, MethodType):
                self._waiting += [(text, each.__func__, is_models), (text, each.__self__, is_models)]
            elif is_instance(each, type):
                if self._with_functions and is_users(each):
                    self._add_class(each)
            elif is_users(type(each)) or type(each).__module__ in _HOLDING:
                is_models = is_models and type(each).__module__ != "queue"  # which other threads may fill meanwhile
                self._add_namespace(text, attributes(each), is_models)
                self._add_slots(text, each, is_models)
                self._waiting.append((text, type(each), False))

    def _add_namespace(
        self, text: str, namespace: dict[str, Any], is_models: bool = True, without: frozenset[str] = frozenset()
    ) -> None:
        def snapshot() -> dict[str, Any]:
            return {key: value for key, value in namespace.items() if key not in without}

        def restore(before: dict[str, Any]) -> None:
            for key in snapshot().keys() - before.keys() if is_models else ():
                del namespace[key]
            namespace.update(before)

        self._add(HolderSnapshot(text, namespace, snapshot, restore, is_models, is_namespace=True))

    def _add_slots(self, text: str, each: Any, is_models: bool) -> None:
        def snapshot() -> dict[str, Any]:
            return {name: slot.__get__(each) for name, slot in slots(each).items()}

        if descriptors := slots(each):
            restore = _assigning(lambda name, value: descriptors[name].__set__(each, value))
            self._add(HolderSnapshot(text, each, snapshot, restore, is_models, is_namespace=True))

    def _add_container(self, text: str, each: Any, is_models: bool) -> None:
        """Take a snapshot of a container; of the contents, if it cannot change itself."""
        base: Any = next(kind for kind in CONTAINERS if is_instance(each, kind))
        if base in (tuple, frozenset):
            self._waiting += [(f"{text}[{key}]", value, is_models) for key, value in items(each)]
            return

        def snapshot() -> Any:
            if base is dict:
                return dict(items(each))
            return {value for _, value in items(each)} if base is set else [value for _, value in items(each)]

        def restore(before: Any) -> None:
            if is_models:
                base.clear(each)
            (base.update if base in (dict, set) else base.extend)(each, before)

        self._add(HolderSnapshot(text, each, snapshot, restore, is_models))

    def _add_class(self, kind: type) -> None:
        self._visited.add(id(kind))
        for name, value in vars(kind).items():
            of_method = value.__func__ if is_instance(value, (staticmethod, classmethod)) else value
            function = value.fget if is_instance(value, property) else of_method
            if is_instance(function, FunctionType):
                self._waiting.append((f"{kind.__name__}.{name}", function, False))

        restore = _assigning(partial(setattr, kind))
        self._add(HolderSnapshot(kind.__name__, kind, lambda: dict(vars(kind)), restore, is_namespace=True))

    def _add_function(self, function: FunctionType) -> None:
        """Take a snapshot of the variables that a function names, and of its attributes."""
        if not is_users(function):
            return
        self._codes[function.__code__] = None
        self._globals[id(function.__globals__)] = function.__globals__
        named, global_values = _names(function.__code__), function.__globals__
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

        def snapshot() -> dict[str, Any]:
            values = {name: global_values[name] for name in named if name in global_values}
            return values | {name: _content(cell) for name, cell in cells.items()}

        def assign(name: str, value: Any) -> None:
            if name in cells:
                cells[name].cell_contents = value
            else:
                global_values[name] = value

        self._add(HolderSnapshot("", function, snapshot, _assigning(assign), is_namespace=True))
        for name, value in _defaults(function):
            self._waiting.append((name, value, True))  # the next call finds them unchanged
        self._add_namespace(function.__name__, vars(function), is_models=False)

    def _add(self, snapshot: HolderSnapshot) -> None:
        self.snapshots.append(snapshot)
        self._waiting += ((text, each, snapshot.is_models) for text, each in snapshot.inner_objects())


_OF_MODULES = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has; PyTorch looks after what these hold."""


def _weight_name(hook: Any) -> str | None:
    """Name of an attribute that a `torch.nn.utils` hook computes from parameters before each `forward`: a normalised
    (`weight_norm`, `spectral_norm`) or pruned weight."""
    is_torchs = type(hook).__module__.startswith("torch.nn.utils.")
    return getattr(hook, "name", getattr(hook, "_tensor_name", None)) if is_torchs else None


def _assigning(assign: Callable[[str, Any], object]) -> Callable[[dict[str, Any]], None]:
    """Function that restores contents under names, one by one."""

    def restore(before: dict[str, Any]) -> None:
        for name, value in before.items():
            assign(name, value)

    return restore


def is_users(each: Any) -> bool:
    """Whether a class or function belongs to user code."""
    return str(each.__module__).partition(".")[0] not in _NOT_THE_USERS


def _same_content(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(map(is_, a.values(), map(b.get, a)))
    return a == b if isinstance(a, set) else len(a) == len(b) and all(map(is_, a, b))


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Parameters of a function with default values, paired with these defaults."""
    code, defaults = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _names(code: CodeType) -> set[str]:
    """Names used by a function and its nested functions."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _position(generator: GeneratorType[Any, Any, Any]) -> tuple[Any, ...]:
    """Progress of a generator: instruction offset and plain local values."""
    frame = generator.gi_frame
    if frame is None:
        return ()
    return frame.f_lasti, *(value for value in frame.f_locals.values() if type(value) in _PLAIN)


_STATES: dict[type, Callable[[Any], Any]] = {
    count: repr,
    GeneratorType: _position,
    np.ndarray: np.ndarray.tobytes,
}
"""States of objects that change without being rebound, and that are not put back."""


def _holds_fake(value: Any) -> bool:
    return any(is_instance(each, FakeTensor) for each in pytree.tree_leaves(value))


def _single_value(read: Callable[[Any], Any], each: Any) -> set[Any]:
    return {read(each)}


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _ABSENT
