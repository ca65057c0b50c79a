"""Detection of user changes to a module after compilation: hooks, methods, attribute contents.

A program is the earlier `forward`, so the user is warned. The snapshots are those of `poptorch.capture.host_state`,
compared at each call. `host_writes.py` detects changes of parameters, buffers and layers, which could take effect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch

from poptorch.base.introspection import CONTAINERS, attributes, is_instance
from poptorch.capture.host_state import GROWS, NUMBERS, HolderSnapshot, HostState, is_users
from poptorch.run.watched import original_class

_MOST = 1000
"""Maximum number of items inspected in a container."""


class HostChanges:
    """Detects module changes without effect on the device.

    Example:
        >>> module = torch.nn.Linear(2, 3)
        >>> changes = HostChanges(module)
        >>> handle = module.register_forward_hook(lambda module, inputs, result: 2 * result)
        >>> changes.new_changes()
        ['the hooks of model']
        >>> changes.new_changes()
        []
    """

    def __init__(self, module: torch.nn.Module) -> None:
        paths = {each: f"model.{path}" if path else "model" for path, each in torch.nn.Module.named_modules(module)}
        self._hooks = [
            (f"the hooks of {path}", hooks, len(hooks))
            for path, hooks in (
                *((p, hooks) for each, p in paths.items() for hooks in (each._forward_hooks, each._forward_pre_hooks)),
                *(("all modules", hooks) for hooks in _HOOKS_OF_ALL),
            )
        ]
        self._paths = paths
        self._kinds = {id(vars(each)): original_class(each) for each in paths}
        own = {id(vars(each)) for each in paths if not is_users(type(each))}  # of PyTorch: a method may be new there
        snapshots = HostState(module, None, with_functions=False).snapshots
        small = [s for s in snapshots if is_instance(s.holder, CONTAINERS) and len(s.contents) <= _MOST]
        self._users = [each for each in small if id(each.holder) not in own]
        self._frameworks = [each for each in small if id(each.holder) in own]
        kinds = dict.fromkeys(chain.from_iterable(type(each).__mro__ for each in paths))
        self._classes = [
            HolderSnapshot(kind.__name__, kind, partial(dict, vars(kind)), is_namespace=True)
            for kind in kinds
            if is_users(kind)
        ]
        self._readers: list[Callable[[], Iterable[Any]]] = [
            *(_content_reader(each.holder) for each in self._users),
            *(vars(each.holder).values for each in self._classes),
        ]
        self._contents: list[tuple[Any, ...]] = []
        self._counts: list[Any] = []
        self._warned: set[str] = set()

    def new_changes(self) -> list[str]:
        """New changes by user-visible name, each reported once. Every model call checks, so this must be fast."""
        counts: list[Any] = [len(hooks) for _, hooks, _ in self._hooks]
        counts += (len(each.holder) for each in self._frameworks)
        counts += map(type, self._paths)
        if counts == self._counts and all(map(_is_unchanged, self._readers, self._contents)):
            return []
        self._counts, self._contents = counts, [tuple(read()) for read in self._readers]
        names = [name for name in dict.fromkeys(self._changed()) if name not in self._warned]
        self._warned.update(names)
        return names

    def _changed(self) -> Iterator[str]:
        yield from (text for text, hooks, count in self._hooks if len(hooks) != count)
        for each, path in self._paths.items():
            if original_class(each) is not self._kinds[id(vars(each))]:
                yield f"the class of {path}"
        for place in (*self._users, *self._frameworks):
            kind = self._kinds.get(id(place.holder))
            for text, before, now in place.changed():
                if _counts(before, now, place) if kind is None else _counts_in_module(kind, text, before, now):
                    yield text
        for text, _, value in chain.from_iterable(each.changed() for each in self._classes):
            if callable(value) or is_instance(value, property):
                yield text


_private: Any = torch.nn.modules.module
_HOOKS_OF_ALL = (_private._global_forward_hooks, _private._global_forward_pre_hooks)


def _content_reader(holder: Any) -> Callable[[], Iterable[Any]]:
    return partial(dict.values, holder) if is_instance(holder, dict) else partial(iter, holder)


def _is_unchanged(read: Callable[[], Iterable[Any]], before: tuple[Any, ...]) -> bool:
    now = tuple(read())
    return len(now) == len(before) and all(map(is_, now, before))


def _counts_in_module(kind: type, text: str, before: Any, now: Any) -> bool:
    """Whether a changed module attribute was probably intended to take effect. Numbers are checked elsewhere."""
    name = text.rpartition(".")[2]
    if callable(getattr(kind, name, None)):  # a method
        return True
    return not name.startswith("_") and not is_instance(before, NUMBERS) and _differs(before, now)


def _counts(before: Any, now: Any, place: HolderSnapshot) -> bool:
    """Whether a changed item of a container or object was probably intended to take effect. Added or removed layers and
    functions count; numbers and texts are more likely hook records.
    """
    if now is GROWS:
        known = {id(each): each for each in place.contents}
        there = {id(each): each for each in place.read_contents()}
        others = [(known | there)[key] for key in known.keys() ^ there.keys()]
        return any(is_instance(each, torch.nn.Module) or callable(each) for each in others)
    return _differs(before, now)


def _differs(before: Any, now: Any) -> bool:
    if is_instance(before, (*NUMBERS, str)):
        return is_instance(now, (*NUMBERS, str)) and bool(before != now)
    return callable(before) or type(before) is SimpleNamespace or bool(attributes(before)) and is_users(type(before))
