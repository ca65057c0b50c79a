"""Types of the user's own, and how the tensors in their objects are found."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from poptorch.base.introspection import is_a
from poptorch.errors import createPoptorchError


class ICustomArgParser(ABC):
    """How to find the tensors in an object of a type of your own, and how to make such an object of other tensors.

    Once registered with `registerCustomArgParser`, the type may be used for arguments and results of wrapped models and
    for the items of asynchronous loaders.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Pair:
        ...     left: torch.Tensor
        ...     right: torch.Tensor
        >>> class PairParser(ICustomArgParser):
        ...     def yieldTensors(self, struct):
        ...         yield struct.left
        ...         yield struct.right
        ...
        ...     def reconstruct(self, original_structure, tensor_iterator):
        ...         return Pair(next(tensor_iterator), next(tensor_iterator))
        >>> registerCustomArgParser(Pair, PairParser())
    """

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Iterable[torch.Tensor]:
        """The tensors of an object, in an order that is always the same.

        Args:
            struct: an object of the registered type.
        """

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """A new object that is like another one, but has other tensors.

        Args:
            original_structure: an object of the registered type. It must not be changed.
            tensor_iterator: as many tensors as `yieldTensors` gives for it, in the same order.
        """


_parsers: dict[type, ICustomArgParser] = {}


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Say how tensors are found in objects of a type, from now on and in the whole process.

    An object is handled by the parser of exactly its type, else by the first one registered for a base of it.

    Args:
        arg_data_type: the type.
        arg_parser: its parser, in place of an earlier one; `None` removes it.

    Raises:
        Error: if `arg_data_type` is not a type, or `arg_parser` not an `ICustomArgParser`.

    See `ICustomArgParser` for an example.
    """
    if not isinstance(arg_data_type, type):
        raise createPoptorchError(f"registerCustomArgParser: `arg_data_type` should be a type; got {arg_data_type!r}.")
    if arg_parser is None:
        _parsers.pop(arg_data_type, None)
    elif isinstance(arg_parser, ICustomArgParser):
        _parsers[arg_data_type] = arg_parser
    else:
        raise createPoptorchError(
            f"registerCustomArgParser: `arg_parser` should be an instance of a subclass of ICustomArgParser, or None; "
            f"got {arg_parser!r}."
        )


def parser_of(value: object) -> ICustomArgParser | None:
    """The registered parser for an object, if there is one."""
    if not _parsers:
        return None
    exact = _parsers.get(type(value))
    return exact or next((parser for base, parser in _parsers.items() if is_a(value, base)), None)


def parsers() -> dict[type, ICustomArgParser]:
    """All registered parsers, in the order of their registration; for processes that are to know the same types."""
    return dict(_parsers)
