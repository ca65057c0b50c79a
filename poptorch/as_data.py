"""Python values as data that JSON can hold, and back: nothing else can come of them than what is written out here."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from poptorch import enums, optim
from poptorch.errors import createPoptorchError
from poptorch.options import Anchor, Options, TensorLocationSettings
from poptorch.settings import OptionsDict
from poptorch.strategies import _IExecutionStrategy

__all__ = ["OptimizerData", "from_data", "options_from_data", "options_to_data", "to_data"]

_PLAIN = (bool, int, float, str, type(None))


def to_data(value: Any, name: str) -> Any:
    """A value as data. Of a tensor, there is its shape and dtype.

    Args:
        value: a number, string, `None`, dtype, enum of poptorch or tensor, or a tuple, list or dictionary of these.
        name: what messages call it.

    Raises:
        poptorch.Error: if it is something else.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": list(value.shape), "dtype": _dtype_name(value.dtype)}
    if kind is list:
        return [to_data(each, f"{name}[{i}]") for i, each in enumerate(value)]
    if kind in (tuple, torch.Size):
        what = "tuple" if kind is tuple else "size"
        return {what: [to_data(each, f"{name}[{i}]") for i, each in enumerate(value)]}
    if kind in (dict, OrderedDict):
        items = [[to_data(key, name), to_data(each, f"{name}[{key!r}]")] for key, each in value.items()]
        return {"dict" if kind is dict else "ordered": items}
    if kind is torch.dtype:
        return {"dtype": _dtype_name(value)}
    if isinstance(value, Enum) and kind.__module__ == enums.__name__:
        return {"enum": f"{kind.__name__}.{value.name}"}
    if kind is Anchor:
        return {"anchor": [to_data(each, name) for each in vars(value).values()]}
    if isinstance(value, TensorLocationSettings):
        return {"location": to_data(value._values(), name)}
    raise createPoptorchError(
        f"{name} is {value!r}, a {kind.__name__}, which cannot be saved: a file holds numbers, strings, tensors, "
        "dtypes and tuples, lists and dictionaries of these, and no code."
    )


def from_data(data: Any) -> Any:
    """The value that `to_data` wrote. A tensor has a shape and a dtype, and no numbers: it is on the device "meta".

    Raises:
        ValueError: if it is nothing that `to_data` writes.
    """
    match data:
        case bool() | int() | float() | str() | None:
            return data
        case list():
            return [from_data(each) for each in data]
        case {"tensor": list(shape), "dtype": str(name)}:
            return torch.empty(shape, dtype=_dtype(name), device="meta")
        case {"dtype": str(name)}:
            return _dtype(name)
        case {"tuple": list(items)}:
            return tuple(map(from_data, items))
        case {"size": list(items)}:
            return torch.Size(items)
        case {"dict": list(items)}:
            return {from_data(key): from_data(each) for key, each in items}
        case {"ordered": list(items)}:
            return OrderedDict((from_data(key), from_data(each)) for key, each in items)
        case {"enum": str(path)}:
            kind, _, member = path.partition(".")
            if kind in enums.__all__:
                return getattr(enums, kind)[member]
        case {"anchor": list(items)}:
            return Anchor(*map(from_data, items))
        case {"location": settings}:
            return TensorLocationSettings()._set(**from_data(settings))
    raise ValueError(f"{data!r} is no value")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


# Options --------------------------------------------------------------------------------------------------------------

_OF_THE_PROCESS = ("Distributed.",)  # what the environment says


def options_to_data(options: Options) -> dict[str, Any]:
    """Options as data. What blocks do where is in the program, so the execution strategy is not written."""
    return {
        name: to_data(value, f"options.{name}")
        for name, value in options._dotted()
        if not (isinstance(value, _IExecutionStrategy) or name.startswith(_OF_THE_PROCESS))
    }


def options_from_data(data: Mapping[str, Any]) -> Options:
    """Options of what `options_to_data` wrote.

    Raises:
        ValueError, AttributeError, AssertionError: if they are no options.
    """
    options = Options()
    for name, value in data.items():
        path, _, last = name.rpartition(".")
        group: OptionsDict = options._values()[path] if path else options
        group._set(**{last: from_data(value)})
    return options


# Optimisers -----------------------------------------------------------------------------------------------------------

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "poptorch.SGD": optim.SGD,
    "poptorch.AdamW": optim.AdamW,
    "poptorch.Adam": optim.Adam,
    "poptorch.RMSprop": optim.RMSprop,
    "poptorch.LAMB": optim.LAMB,
    "torch.SGD": torch.optim.SGD,
    "torch.AdamW": torch.optim.AdamW,  # which is an Adam
    "torch.Adam": torch.optim.Adam,
    "torch.RMSprop": torch.optim.RMSprop,
}


class OptimizerData(BaseModel):
    """An optimiser as data: its numbers, and the names of the parameters that it trains.

    Attributes:
        kind: its class; of a class of the user's, the one above it.
        numbers: what its constructor takes.
        groups: the numbers of each parameter group, with the names of its `"params"`.
        variable: which numbers are variable, if it is one of poptorch.
    """

    model_config = ConfigDict(extra="forbid")

    kind: str
    numbers: dict[str, Any]
    groups: list[dict[str, Any]]
    variable: list[str] = []

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> OptimizerData:
        """What an optimiser says now.

        Args:
            optimizer: of one of the classes that models can be trained with.
            parameters: of the model, by name. Others are left out.
        """
        kind = next(name for name, known in _CLASSES.items() if isinstance(optimizer, known))
        names = {id(p): name for name, p in parameters.items()}
        accepted = inspect.signature(_CLASSES[kind]).parameters
        own = {name: value for name, value in vars(optimizer).items() if name in getattr(optimizer, "_own", ())}
        numbers = optimizer.defaults | own
        attributes = getattr(optimizer, "variable_attrs", None)
        return cls(
            kind=kind,
            numbers={n: to_data(_plain(v), f"the optimizer's {n}") for n, v in numbers.items() if n in accepted},
            groups=[
                {
                    name: [names[id(p)] for p in value if id(p) in names]
                    if name == "params"
                    else to_data(_plain(value), f"the optimizer's {name}")
                    for name, value in group.items()
                    if name == "params" or name in accepted
                }
                for group in optimizer.param_groups
            ],
            variable=[n for n in accepted if attributes and n in attributes and not attributes.isConstant(n)],
        )

    def make(self, parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        """An optimiser that says the same, for these parameters.

        Raises:
            KeyError: if one is missing, or there is no such class.
        """
        groups = [
            {n: [parameters[p] for p in value] if n == "params" else from_data(value) for n, value in group.items()}
            for group in self.groups
        ]
        numbers = {name: from_data(value) for name, value in self.numbers.items()}
        optimizer = _CLASSES[self.kind](groups, **numbers)
        if isinstance(optimizer, optim.Optimizer):
            attributes = optimizer.variable_attrs
            for name in inspect.signature(_CLASSES[self.kind]).parameters:
                if name in attributes:
                    (attributes.markAsVariable if name in self.variable else attributes.markAsConstant)(name)
        return optimizer


def _plain(value: Any) -> Any:
    """A number, where a tensor says it."""
    return value.item() if isinstance(value, torch.Tensor) else value
