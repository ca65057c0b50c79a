"""User-defined types: extraction and replacement of tensors in their objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from poptorch.base.introspection import is_instance
from poptorch.errors import createPoptorchError


class ICustomArgParser(ABC):
    """Parser for objects of a user-defined type: extracts their tensors, and rebuilds objects from new tensors.

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
        """Tensors of an object, in deterministic order.

        Args:
            struct: an object of the registered type.
        """

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """Build an object like the original, with new tensors.

        Args:
            original_structure: an object of the registered type. It must not be changed.
            tensor_iterator: as many tensors as `yieldTensors` returns for it, in the same order.
        """


_parsers: dict[type, ICustomArgParser] = {}


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Register a tensor parser for a type, process-wide.

    An object is handled by the parser of exactly its type, else by the first one registered for a base of it.

    Args:
        arg_data_type: the type.
        arg_parser: parser of the type, which replaces an earlier one; `None` removes it.

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
    """Registered parser for an object, if any."""
    if not _parsers:
        return None
    exact = _parsers.get(type(value))
    return exact or next((parser for base, parser in _parsers.items() if is_instance(value, base)), None)


def parsers() -> dict[type, ICustomArgParser]:
    """Registered parsers in registration order, for sharing with other processes."""
    return dict(_parsers)
