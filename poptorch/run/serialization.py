"""Serialization: Python values to JSON data and back. Deserialization creates only types listed here.

Named tuples, dataclasses, and subclasses of tuples, lists and dictionaries are written with the names of their classes.
They are read as instances of these if the program has imported them, and filled without a call of the class. Reading
imports nothing. Otherwise, and for classes of Python's own library, a similar object takes their place: a named tuple
or a dataclass with the same name and fields, a plain tuple, list or dictionary.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Sequence
from enum import Enum
from types import ModuleType
from typing import Any

import numpy as np
import torch

from poptorch import enums
from poptorch.base.custom_types import parser_of
from poptorch.errors import createPoptorchError
from poptorch.options import Anchor, TensorLocationSettings

_PLAIN = (bool, int, float, str, type(None))


def to_data(value: Any, name: str) -> Any:
    """Serialize a value. Tensors are stored as shape and dtype only.

    Args:
        value: a number, string, `None`, slice, range, dtype, enum of poptorch, NumPy array or tensor; or a tuple, list,
            set, dictionary or dataclass of these, subclasses included.

    Raises:
        poptorch.Error: for any other value, or an object with a registered parser.
    """
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {"float": str(value)}  # JSON has no such numbers
    if kind in _PLAIN:
        return value
    if kind is complex:
        return {"complex": [to_data(value.real, name), to_data(value.imag, name)]}
    if isinstance(value, torch.Tensor):
        return {"tensor": list(value.shape), "dtype": _dtype_name(value.dtype)}
    if kind in (slice, range):
        return {kind.__name__: [to_data(each, name) for each in (value.start, value.stop, value.step)]}
    if kind in (set, frozenset):
        return {kind.__name__: [to_data(each, name) for each in value]}
    if kind is torch.Size:
        return {"size": list(value)}
    if kind is torch.dtype:
        return {"dtype": _dtype_name(value)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        shape = list(value.shape) if isinstance(value, np.ndarray) else None
        return {"numbers": to_data(value.ravel().tolist(), name), "numpy": value.dtype.name, "shape": shape}
    if isinstance(value, Enum) and kind.__module__ == enums.__name__:
        return {"enum": f"{kind.__name__}.{value.name}"}
    if kind is Anchor:
        return {"anchor": [to_data(each, name) for each in vars(value).values()]}
    if isinstance(value, TensorLocationSettings):
        return {"location": to_data(value._values(), name)}
    if parser_of(value) is None and (container := _container_data(value, name)) is not None:
        return container  # a parser finds the tensors in an order of its own
    raise createPoptorchError(
        f"{name} is {value!r}, a {kind.__name__}, which cannot be saved: a file holds numbers, strings, tensors, "
        "dtypes and tuples, lists, dictionaries and dataclasses of these, and no code."
    )


def _container_data(value: Any, name: str) -> Any:
    """Serialize a tuple, list, dictionary or dataclass; `None` for another value."""
    if isinstance(value, tuple | list):
        items = [to_data(each, f"{name}[{i}]") for i, each in enumerate(value)]
        return items if type(value) is list else _of_class(value, (list, tuple), items, getattr(value, "_fields", ()))
    if isinstance(value, dict):
        pairs = [[to_data(key, name), to_data(each, f"{name}[{key!r}]")] for key, each in value.items()]
        return _of_class(value, (OrderedDict, dict), pairs)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        items = [to_data(getattr(value, field), f"{name}.{field}") for field in fields]
        return _of_class(value, (object,), items, fields)
    return None


def _of_class(value: Any, bases: Sequence[type], items: list[Any], fields: Sequence[str] = ()) -> dict[str, Any]:
    """Serialize a container under the name of its first matching base class; subclasses add their class name."""
    kind, base = type(value), next(base for base in bases if isinstance(value, base))
    data = {_CONTAINERS[base]: items}
    return data if kind is base else data | {"class": f"{kind.__module__}:{kind.__qualname__}", "fields": list(fields)}


_CONTAINERS: dict[type, str] = {tuple: "tuple", list: "list", dict: "dict", OrderedDict: "ordered", object: "dataclass"}

_NUMBERS = "biuf"  # kinds of NumPy's dtypes


def from_data(data: Any) -> Any:
    """Deserialize `to_data` output. Tensors have a shape and a dtype but no data: their device is "meta".

    Raises:
        ValueError, TypeError: if it is nothing that `to_data` writes.
    """
    match data:
        case bool() | int() | float() | str() | None:
            return data
        case list():
            return [from_data(each) for each in data]
        case {"float": str(number)}:
            return float(number)
        case {"complex": [real, imag]}:
            return complex(from_data(real), from_data(imag))
        case {"tensor": list(shape), "dtype": str(name)}:
            return torch.empty(shape, dtype=_dtype(name), device="meta")
        case {"dtype": str(name)}:
            return _dtype(name)
        case {"size": list(items)}:
            return torch.Size(items)
        case {"slice": [start, stop, step]}:
            return slice(*map(from_data, (start, stop, step)))
        case {"range": [int(start), int(stop), int(step)]}:
            return range(start, stop, step)
        case {"set": list(items)}:
            return set(map(from_data, items))
        case {"frozenset": list(items)}:
            return frozenset(map(from_data, items))
        case {"numbers": list(numbers), "numpy": str(name), "shape": shape} if np.dtype(name).kind in _NUMBERS:
            array = np.array(from_data(numbers), name)
            return array[0] if shape is None else array.reshape(shape)
        case {"enum": str(path)}:
            kind, _, member = path.partition(".")
            if kind in enums.__all__:
                return getattr(enums, kind)[member]
        case {"anchor": list(items)}:
            return Anchor(*map(from_data, items))
        case {"location": settings}:
            return TensorLocationSettings()._set(**from_data(settings))
        case {"class": str(path), "fields": list(fields), **content} if len(content) == 1:
            return _like_class(path, [str(field) for field in fields], *content.items())
        case {"tuple": list(items)}:
            return tuple(map(from_data, items))
        case {"dict": list(items)}:
            return {from_data(key): from_data(each) for key, each in items}
        case {"ordered": list(items)}:
            return OrderedDict((from_data(key), from_data(each)) for key, each in items)
    raise ValueError(f"{data!r} is no value")


def _like_class(path: str, fields: list[str], content: tuple[Any, Any]) -> Any:
    """Create an object of a class named by a file; see this module's docstring."""
    what, data = content
    base = next((base for base, name in _CONTAINERS.items() if name == what), None)
    if base is None:
        raise ValueError(f"{what!r} is no container")
    items = from_data(data) if base in (object, list) else from_data({what: data})
    kind = _imported(path, base)
    made = None if kind is None else _create_instance(kind, base, fields, items)
    if made is not None and parser_of(made) is None:
        return made
    title = path.rpartition(".")[2].rpartition(":")[2]
    if not title.isidentifier():
        raise ValueError(f"{title!r} is no name")
    if base is tuple and fields:
        generic: Any = namedtuple(title, fields)  # type: ignore[misc]  # which checks that these are mere names
        return generic(*items)
    if base is object:
        return dataclasses.make_dataclass(title, fields)(*items)  # it, too
    return items


def _imported(path: str, base: type) -> type | None:
    """Look up an already imported class by name, except standard-library classes: some do more than store data."""
    module, _, names = path.partition(":")
    if module.partition(".")[0] in sys.stdlib_module_names:
        return None
    found: Any = sys.modules.get(module)
    for name in names.split("."):
        found = vars(found).get(name) if isinstance(found, type | ModuleType) else None
    return found if isinstance(found, type) and issubclass(found, base) else None


def _create_instance(kind: type, base: Any, fields: Sequence[str], items: Any) -> Any:
    """Create an object without calling its class; return `None` on a field mismatch."""
    if base is object:
        if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
            return None
        if not {field.name for field in dataclasses.fields(kind)}.issuperset(fields):
            return None
        made = object.__new__(kind)
        for field, item in zip(fields, items, strict=True):
            object.__setattr__(made, field, item)
        return made
    if base is tuple:
        if kind.__module__ == torch.return_types.__name__:
            return kind(items)
        return tuple.__new__(kind, items) if list(getattr(kind, "_fields", ())) == fields else None
    made = base.__new__(kind)
    if base is list:
        list.extend(made, items)
        return made
    for key, item in items.items():
        base.__setitem__(made, key, item)
        if dataclasses.is_dataclass(kind) and isinstance(key, str):  # whose fields are its items
            object.__setattr__(made, key, item)
    return made


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return dtype
