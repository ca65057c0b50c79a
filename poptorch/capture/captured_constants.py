"""Host tensors captured as program constants: their location in user objects, and changes after capture."""

from __future__ import annotations

import sys
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FrameType
from typing import Any

import torch

from poptorch.base.introspection import attributes, is_instance, items
from popxl.extend.source import SourceLocation


@dataclass
class CapturedConstant:
    """Host tensor whose contents became program constants.

    Attributes:
        text: the user's name for it: `model.scale`, `model.config.scales[0]`, `target`.
        of_module: whether it belongs to a module, or to a list or dictionary of one; otherwise to a variable or another
            object.
        holder, key: object that holds it, and its name or index there; without a holder, a variable of a function.
        tensor: refers to the tensor.
        numbers: its contents.
        version: PyTorch's version counter; -1, if PyTorch does not count.
        first_use: first line where it is combined with a tensor of the device, if it was not moved there.
    """

    text: str
    of_module: bool
    holder: Any
    key: Any
    tensor: weakref.ref[torch.Tensor]
    numbers: torch.Tensor
    version: int
    first_use: SourceLocation | None = None

    @property
    def current_object(self) -> Any:
        """Object currently stored at the recorded location."""
        if self.holder is None:
            return self.tensor()
        try:
            return self.holder[self.key]
        except LookupError:
            return None

    def change(self) -> str:
        """Description of changes since capture: "" if unchanged."""
        tensor = self.tensor()
        if self.holder is None and tensor is None:
            return ""
        if tensor is None or self.current_object is not tensor:
            return "is another object"
        version = _version(tensor)
        if version == self.version:
            return ""
        if not _is_equal(tensor.detach(), self.numbers):
            return "holds other numbers"
        self.version = version
        return ""


def locate_constant(
    t: torch.Tensor, numbers: torch.Tensor, module: torch.nn.Module, frame: FrameType | None
) -> CapturedConstant | None:
    """Locate a tensor among user objects; `None` if unreachable, such as an op's intermediate result.

    It is searched in the captured module, then in the closures of the functions that are running,
    then in their own variables.
    """
    own = {id(each) for each in torch.nn.Module.modules(module)}
    around: list[_Part] = []
    variables: list[_Part] = []
    while frame is not None and frame.f_code.co_name != "_capture":  # the names of callers of the model do not matter
        if is_users(frame):
            code, names, variables_here = frame.f_code, frame.f_globals, frame.f_locals
            around += [(None, name, variables_here.get(name), name) for name in code.co_freevars]
            around += [(names, name, names[name], name) for name in code.co_names if name in names]
            variables += [(None, name, value, name) for name, value in variables_here.items()]
        frame = frame.f_back
    for roots in ([(None, "", module, "model")], around, variables):
        if (place := _locate(t, roots, own)) is not None:
            (holder, key, _, text), is_own = place
            return CapturedConstant(text, is_own, holder, key, weakref.ref(t), numbers, _version(t))
    return None


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs user code, libraries included, rather than PyTorch or PopTorch."""
    return frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "poptorch", "contextlib")


def user_line(frame: FrameType | None = None, excludes: Sequence[str] = ()) -> SourceLocation:
    """User source line that is currently running, or active in a frame.

    Args:
        frame: where to begin; by default the caller.
        excludes: parts of file paths whose lines are passed over, if there are others further out.
    """
    frame = frame or sys._getframe(1)
    outermost = None
    while frame is not None:
        if is_users(frame):
            file = frame.f_code.co_filename
            outermost = SourceLocation.of((frame.f_code, frame.f_lineno))
            if not any(part in file for part in excludes):
                return outermost
        frame = frame.f_back
    return outermost or SourceLocation("", 0, "")


_Part = tuple[Any, Any, Any, str]
"""Reference to an object: its holder, its key there, the object, and its name in messages."""


def _locate(t: torch.Tensor, roots: Iterable[_Part], own: Collection[int]) -> tuple[_Part, bool] | None:
    """Locate a tensor among objects and their members; and whether any module `own` contains it."""
    waiting = deque((part, False) for part in roots)
    known: set[int] = set()
    while waiting and len(known) < _MOST:
        part, of_module = waiting.popleft()
        _, _, each, text = part
        if each is t:
            return part, of_module
        if is_instance(each, _CLOSED) or id(each) in known:
            continue
        known.add(id(each))
        is_own = id(each) in own or of_module and is_instance(each, _CONTAINERS)
        for holder, key, value, name in islice(_members(each), _MOST):
            if value is t or not is_instance(value, _CLOSED) and id(value) not in known:
                waiting.append(((holder, key, value, text + name), is_own))
    return None


_MOST = 1000
"""Limits of the search: objects inspected, and parts of each."""

_CONTAINERS = (dict, list, tuple, deque)
_CLOSED = (
    str, bytes, int, float, complex, type(None), type, torch.Tensor, torch.dtype, torch.device, types.ModuleType,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip
_OF_MODULES = frozenset(vars(torch.nn.Module()))


def _members(each: Any) -> Iterator[_Part]:
    """Members of an object: holder, key, value and display name. Runs no user code."""
    if is_instance(each, _CONTAINERS):
        for key, value in items(each):
            yield each, key, value, f"[{key!r}]" if type(key) in (int, str) else f"[{type(key).__name__}]"
    elif is_instance(each, partial):
        yield from ((None, name, getattr(each, name), f".{name}") for name in ("func", "args", "keywords"))
    else:
        own, is_module = attributes(each), is_instance(each, torch.nn.Module)
        ours = [kind for kind in type(each).__mro__[:-1] if kind.__module__.partition(".")[0] != "torch"]
        namespaces = [
            own,
            *([own.get(name, {}) for name in ("_parameters", "_buffers", "_modules")] if is_module else []),
        ]
        for namespace in (*namespaces, *map(vars, ours)):
            for name, value in namespace.items():
                if not (is_module and namespace is own and name in _OF_MODULES):
                    yield namespace, name, value, f".{name}"


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.allclose(a, b, 0, 0, equal_nan=True) if a.dtype.is_floating_point else torch.equal(a, b))
