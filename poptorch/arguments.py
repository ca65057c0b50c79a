"""What goes into a wrapped model and comes out of it: bound to parameters, taken apart into tensors, dealt to replicas.

Arguments are bound by the signature of `forward`. Their structure is learnt once, at compilation: which tensors they
hold, where, of which shape and type, and what else. A later call must fit; then all that is left of it is a list of
tensors. The same structures put results together. What rows of a tensor which micro-batch gets is `Batching`.

Values of other tensors than arguments are found in `weights.py`.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch._subclasses import FakeTensor

from poptorch.dtypes import to_numpy
from poptorch.enums import OutputMode
from poptorch.errors import Error, createPoptorchError
from poptorch.logging_ import logger
from poptorch.replica_groups import ReplicaGroups

if TYPE_CHECKING:  # a data loader's worker process finds the tensors in batches without JAX, which options import
    from poptorch.options import Options

__all__ = [
    "Batching",
    "Binder",
    "Feeder",
    "ICustomArgParser",
    "Leaf",
    "Signature",
    "Structure",
    "parser_of",
    "parsers",
    "registerCustomArgParser",
    "result_structure",
    "structure_of",
]


# Types of the user ----------------------------------------------------------------------------------------------------


class ICustomArgParser(ABC):
    """How to find the tensors in an object of a type of your own, and how to make such an object of other tensors.

    Once registered with `registerCustomArgParser`, the type may be used for arguments and results of wrapped models and
    for the items of asynchronous loaders.

    Example:
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
    return exact or next((parser for base, parser in _parsers.items() if isinstance(value, base)), None)


def parsers() -> dict[type, ICustomArgParser]:
    """All registered parsers, in the order of their registration; for processes that are to know the same types."""
    return dict(_parsers)


# Structures -----------------------------------------------------------------------------------------------------------


class Structure(ABC):
    """An arrangement of tensors and other values, without the tensors. Made by `structure_of`.

    Attributes:
        name: how messages call it, such as `x[0]['mask']`.

    Example:
        >>> batch = {"x": torch.zeros(2, 3), "scale": 0.5}
        >>> structure = structure_of(batch, "batch")
        >>> structure.rebuild([torch.ones(3)])
        {'x': tensor([1., 1., 1.]), 'scale': 0.5}
    """

    name: str

    @abstractmethod
    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        """Append the tensors of a value that is arranged like this one.

        Raises:
            Error: if it is not: another type, length, key, dtype, shape or constant.
        """

    @abstractmethod
    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        """A new value with the next tensors of `tensors`."""

    @abstractmethod
    def leaves(self) -> Iterator[Leaf]:
        """The places of the tensors, in the order of `collect` and `build`."""

    @abstractmethod
    def constants(self) -> Iterator[tuple[str, Any]]:
        """What is not taken apart, and stays the same in all values that are built, with what messages call it."""

    def tensors(self, value: Any) -> list[torch.Tensor]:
        """The tensors of a value that is arranged like this one; see `collect`."""
        found: list[torch.Tensor] = []
        self.collect(value, found)
        return found

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> Any:
        """A new value with other tensors, one for each of `leaves()`; they may have any shape and type."""
        return self.build(iter(tensors))


def structure_of(value: Any, name: str) -> Structure:
    """The structure of a value: tensors in tuples, lists, dictionaries, dataclasses and registered types, nested.

    Whatever else is in there is a constant, and stands for itself; so does a dataclass without tensors.

    Args:
        value: any value.
        name: how messages call it.
    """
    if (parser := parser_of(value)) is not None:
        return _Custom(name, value, parser)
    if isinstance(value, torch.Tensor):
        return Leaf(name, tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return _Sequence(name, value)
    if isinstance(value, dict):
        return _Mapping(name, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        fields = _Fields(name, value)
        if any(True for _ in fields.leaves()):
            return fields
    return _Constant(name, value)


def result_structure(result: Any) -> Structure:
    """The structure of what a captured model has returned.

    Raises:
        Error: if there are tensors in it that cannot be found: they would come back without numbers.
    """
    structure = structure_of(result, "result")
    for name, constant in structure.constants():
        if _holds_tensor(constant, FakeTensor):
            raise _hidden(f"The {name} of the model", constant)
    return structure


def _hidden(what: str, constant: Any) -> Exception:
    kind = type(constant).__name__
    return createPoptorchError(
        f"{what} is a {kind} that holds tensors, which are not found there. Put tensors into tuples, lists, "
        f"dictionaries or dataclasses; or say where they are, with `poptorch.registerCustomArgParser({kind}, ...)`."
    )


def _holds_tensor(value: Any, kind: type[torch.Tensor]) -> bool:
    """Whether a tensor of some kind can be reached from an object, however that keeps it: a set, an attribute."""
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, kind):
            return True
        if isinstance(each, FunctionType):  # what it has taken along, not all that its module knows
            left += [each.__closure__, each.__defaults__, each.__kwdefaults__]
        else:
            left += gc.get_referents(each)
    return False


@dataclass(frozen=True, slots=True)
class Leaf(Structure):
    """The place of a tensor.

    Attributes:
        name: how messages call it.
        shape: of the whole tensor, the rows of all micro-batches.
        dtype: on the host.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if not isinstance(value, torch.Tensor):
            raise _mismatch(f"Type mismatch for {self.name}: expected {torch.Tensor} but got {type(value)}")
        if value.dtype is not self.dtype:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self.dtype} but got {value.dtype}")
        if value.shape != self.shape:
            last = (
                _MAY_BE_THE_LAST if self.shape[1:] == value.shape[1:] and _rows(value.shape) < _rows(self.shape) else ""
            )
            raise _mismatch(
                f"Shape mismatch for {self.name}: expected {torch.Size(self.shape)} but got {value.shape}", last
            )
        into.append(value)

    def build(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        return next(tensors)

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def constants(self) -> Iterator[tuple[str, Any]]:
        return iter(())


@dataclass(frozen=True, slots=True)
class _Constant(Structure):
    name: str
    value: Any

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if value is self.value:
            return
        if type(value) is not type(self.value):
            raise _mismatch(f"Type mismatch for {self.name}: expected {type(self.value)} but got {type(value)}")
        try:
            is_equal = _equal(value, self.value)
        except (TypeError, ValueError, RuntimeError) as problem:  # so say arrays of several numbers
            raise _mismatch(
                f"Value mismatch for {self.name}: whether it is the {type(value).__name__} that was expected cannot be "
                f"told ({problem})"
            ) from problem
        if not is_equal:
            raise _mismatch(f"Value mismatch for {self.name}: expected {self.value!r} but got {value!r}")

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        return self.value

    def leaves(self) -> Iterator[Leaf]:
        return iter(())

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self.value


class _Sequence(Structure):
    """A tuple or list, named tuples and other subclasses included."""

    def __init__(self, name: str, value: Sequence[Any]) -> None:
        self.name = name
        self._type = type(value)
        # A named tuple takes its fields one by one.
        self._make: Callable[[list[Any]], Any] = getattr(value, "_make", None) or type(value)
        self._items = [structure_of(item, f"{name}[{i}]") for i, item in enumerate(value)]

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        if len(value) != len(self._items):
            raise _mismatch(f"Length mismatch for {self.name}: expected {len(self._items)} but got {len(value)}")
        for structure, item in zip(self._items, value, strict=True):
            structure.collect(item, into)

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        return self._make([structure.build(tensors) for structure in self._items])

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items:
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        for structure in self._items:
            yield from structure.constants()


class _Mapping(Structure):
    """A dictionary, subclasses included. The order of its keys is that of the first one."""

    def __init__(self, name: str, value: dict[Any, Any]) -> None:
        self.name = name
        self._type = type(value)
        self._items = {key: structure_of(item, f"{name}[{key!r}]") for key, item in value.items()}
        self._empty = copy.copy(value)  # a subclass may have attributes of its own, or want arguments to be made
        for key in value:  # without keeping tensors alive; one by one, as some subclasses have no `update`
            self._empty[key] = None

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        if value.keys() != self._items.keys():
            missing = [key for key in self._items if key not in value]
            unexpected = [key for key in value if key not in self._items]
            raise _mismatch(
                f"Keys mismatch for {self.name}: "
                + ". ".join(
                    f"{what} arguments: {', '.join(map(str, keys))}"
                    for what, keys in (("Missing", missing), ("Unexpected", unexpected))
                    if keys
                )
            )
        for key, structure in self._items.items():
            structure.collect(value[key], into)

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        built = copy.copy(self._empty)
        for key, structure in self._items.items():
            built[key] = structure.build(tensors)
        return built

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items.values():
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self._empty  # for its attributes
        for structure in self._items.values():
            yield from structure.constants()


class _Fields(Structure):
    """A dataclass. Its fields are set one by one, so it may be frozen; `__init__` is not called for others like it."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._type = type(value)
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        self._items = {field: structure_of(getattr(value, field), f"{name}.{field}") for field in names}
        self._empty = copy.copy(value)
        for field in names:  # without keeping tensors alive
            object.__setattr__(self._empty, field, None)

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        for field, structure in self._items.items():
            structure.collect(getattr(value, field, None), into)

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        built = copy.copy(self._empty)
        for field, structure in self._items.items():
            object.__setattr__(built, field, structure.build(tensors))
        return built

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items.values():
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self._empty  # for what it has beside its fields
        for structure in self._items.values():
            yield from structure.constants()


class _Custom(Structure):
    """An object of a registered type. It is kept, with its tensors: its parser makes others in its likeness."""

    def __init__(self, name: str, value: Any, parser: ICustomArgParser) -> None:
        self.name = name
        self._value = value
        self._parser = parser
        self._tensors = [structure_of(tensor, f"{name}.tensor{i}") for i, tensor in enumerate(self._parsed(value))]

    def _parsed(self, value: Any) -> list[torch.Tensor]:
        tensors = list(self._parser.yieldTensors(value))
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise createPoptorchError(
                    f"{type(self._parser).__name__}.yieldTensors gave {tensor!r} for {self.name}, which is not a "
                    "tensor. It should yield tensors only."
                )
        return tensors

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not type(self._value):
            raise _mismatch(f"Type mismatch for {self.name}: expected {type(self._value)} but got {type(value)}")
        tensors = self._parsed(value)
        if len(tensors) != len(self._tensors):
            raise _mismatch(
                f"Length mismatch for {self.name}: expected {len(self._tensors)} tensors but got {len(tensors)}"
            )
        for structure, tensor in zip(self._tensors, tensors, strict=True):
            structure.collect(tensor, into)

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        own = iter([structure.build(tensors) for structure in self._tensors])
        parser = f"{type(self._parser).__name__}.reconstruct"
        try:
            built = self._parser.reconstruct(self._value, own)
        except StopIteration:
            raise createPoptorchError(
                f"{parser} took more than the {len(self._tensors)} tensors that yieldTensors gave for {self.name}."
            ) from None
        if left := len(list(own)):
            raise createPoptorchError(
                f"{parser} left {left} of the {len(self._tensors)} tensors that yieldTensors gave for {self.name}. It "
                "should take each with next(tensor_iterator)."
            )
        return built

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._tensors:
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        return iter(())  # its parser knows


def _mismatch(what: str, more: str = "") -> Exception:
    return createPoptorchError(
        f"{what}. Arguments must match those that the model was compiled with. Make a new wrapper for other arguments, "
        f"or call `destroy()` on this one, which then compiles again.{more}"
    )


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


_MAY_BE_THE_LAST = (
    " If this is the last batch of a data set that does not divide evenly, leave it out: "
    "`poptorch.DataLoader(..., drop_last=True)`, as it is by default, or `drop_last=True` of PyTorch's."
)


def _equal(a: Any, b: Any) -> bool:
    """Whether two constants are equal, NaN being equal to itself."""
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))
    return bool(a == b) or bool(a != a and b != b)


# Arguments ------------------------------------------------------------------------------------------------------------


class Binder:
    """The parameters of a `forward`, and how arguments get to them.

    Args:
        forward: the function. One without a signature, such as some of torch's, takes any positional arguments.

    Example:
        >>> binder = Binder(lambda x, y=2, *, scale=1.0: x * y)
        >>> binder.bind((torch.ones(1),), {"scale": 3.0})
        {'x': tensor([1.]), 'y': 2, 'scale': 3.0}
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._title = getattr(forward, "__qualname__", type(forward).__name__)
        try:
            self._signature = inspect.signature(forward)
        except ValueError:
            self._signature = inspect.signature(lambda *args: None)
        self.parameters = parameters = self._signature.parameters
        self.defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        self.rest: str | None = next((n for n, p in parameters.items() if p.kind is p.VAR_POSITIONAL), None)
        self._open = {n for n, p in parameters.items() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
        self.extra: str | None = next(iter(self._open - {self.rest}), None)
        simple = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values())
        self._positional = tuple(parameters) if simple else None

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The value of every parameter, in the order of the signature, defaults included.

        Raises:
            Error: if a mandatory parameter has no value.
            AssertionError: for an unknown keyword, too many arguments, or two values for one parameter.
        """
        if not kwargs and self._positional is not None and len(args) == len(self._positional):
            return dict(zip(self._positional, args, strict=True))
        try:
            bound = self._signature.bind_partial(*args, **kwargs)
        except TypeError as problem:
            raise AssertionError(f"{self._title}{self._signature}: {problem}.") from None
        given = bound.arguments
        missing = [n for n in self._signature.parameters if not (n in given or n in self.defaults or n in self._open)]
        if missing:
            raise createPoptorchError(
                "; ".join(f"Mandatory parameter {name} missing" for name in missing)
                + f". The model takes {self._signature}."
            )
        bound.apply_defaults()
        return bound.arguments

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """The names of the parameters that a call gives a value, which can be bound."""
        return list(self._signature.bind_partial(*args, **kwargs).arguments)

    def unbind(self, values: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments `args, kwargs` of a call in which parameters have these values, as `bind` returns them."""
        bound = inspect.BoundArguments(self._signature, values)
        return bound.args, bound.kwargs


class Signature:
    """What a model is compiled for: the structure of its arguments, the shapes and types of their tensors, constants.

    Args:
        forward: the function, whose parameters the arguments are for.
        args: positional arguments of the first call.
        kwargs: keyword arguments of the first call.

    Raises:
        Error, AssertionError: if they cannot be bound; see `Binder.bind`.
        Error: if there are tensors in them that cannot be found. (Functions and modules may have their own.)

    Attributes:
        leaves: name, shape and dtype of each tensor, in the order of `check` and `arguments`.

    Example:
        >>> forward = lambda x, mask=None: x
        >>> signature = Signature(forward, (torch.zeros(4, 3),), {})
        >>> signature.leaves
        (Leaf(name='x', shape=(4, 3), dtype=torch.float32),)
        >>> (x,) = signature.check((torch.ones(4, 3),), {})  # an error for one of another shape
        >>> args, kwargs = signature.arguments([torch.zeros(2, 3)])  # the arguments for a micro-batch
    """

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._binder = Binder(forward)
        values = self._binder.bind(args, kwargs)
        self._given = self._binder.given(args, kwargs)
        self._positional = len(args)
        self._structures = {name: structure_of(value, name) for name, value in values.items()}
        self.leaves = tuple(leaf for structure in self._structures.values() for leaf in structure.leaves())
        for structure in self._structures.values():
            for name, constant in structure.constants():
                if not callable(constant) and _holds_tensor(constant, torch.Tensor):
                    raise _hidden(f"The argument {name}", constant)
        dicts = [name for name, value in values.items() if name != self._binder.extra and _has_dict(value)]
        if dicts:
            logger.warning(
                "Dictionaries among the arguments (%s): their keys are compiled in; later calls need the same.",
                ", ".join(dicts),
            )

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function."""
        return self._binder.parameters

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, which must fit. They are the caller's own, unconverted, in the order of `leaves`.

        Raises:
            Error: if arguments do not match those compiled with. It names the argument and both sides.
            AssertionError: if they cannot be bound; see `Binder.bind`.
        """
        values = self._binder.bind(args, kwargs)
        tensors: list[torch.Tensor] = []
        try:
            for structure, value in zip(self._structures.values(), values.values(), strict=True):
                structure.collect(value, tensors)
        except Error as problem:
            if differences := self._differences(args, kwargs):
                raise createPoptorchError(f"{differences}{problem.message}") from None
            raise
        return tensors

    def _differences(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """In which arguments a call differs from the first, each in a sentence."""
        given = self._binder.given(args, kwargs)
        missing = [name for name in self._given if name not in given]
        unexpected = [name for name in given if name not in self._given]
        return (
            f"Number of positional arguments mismatch: expected {self._positional} arguments but got {len(args)}. "
            * (len(args) != self._positional)
            + f"Missing arguments: {', '.join(missing)}. " * bool(missing)
            + f"Unexpected arguments: {', '.join(unexpected)}. " * bool(unexpected)
        )

    def arguments(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments `args, kwargs` of a call of `forward` with other tensors, one for each of `leaves`."""
        left = iter(tensors)
        return self._binder.unbind({name: structure.build(left) for name, structure in self._structures.items()})


def _has_dict(value: Any) -> bool:
    if parser_of(value) is not None:
        return False
    return isinstance(value, dict) or (isinstance(value, (tuple, list)) and any(map(_has_dict, value)))


# Rows -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batching:
    """How the rows of a call are dealt to its micro-batches, and how those of results are put together.

    Rows are ordered by device iteration, then accumulation step, then group of replicas, then within the micro-batch.

    Attributes:
        device_iterations: how often a run goes through the model, with an update each in training.
        gradient_accumulation: micro-batches for each update; 1 for inference.
        groups: of replicas that are given the same rows.

    Example:
        >>> batching = Batching(2, 3, ReplicaGroups(4))
        >>> batching.micro_batch_shape((96, 10), "x")
        (4, 10)
        >>> batching.deal(np.zeros((96, 10))).shape
        (6, 4, 4, 10)
    """

    device_iterations: int
    gradient_accumulation: int
    groups: ReplicaGroups

    @classmethod
    def of(cls, options: Options, training: bool) -> Batching:
        """The batching that options ask for."""
        accumulation = options.Training.gradient_accumulation if training else 1
        return cls(options.device_iterations, accumulation, options.input_groups)

    @property
    def micro_batches(self) -> int:
        """How many micro-batches each replica goes through in a run."""
        return self.device_iterations * self.gradient_accumulation

    @property
    def factor(self) -> int:
        """How many micro-batches the rows given to a call make up."""
        return self.micro_batches * self.groups.count

    def micro_batch_shape(self, shape: Sequence[int], name: str) -> tuple[int, ...]:
        """The shape of what `forward` sees of a tensor.

        Args:
            shape: of the tensor given to a call. Without dimensions it counts as one row.
            name: of the argument, for the message.

        Raises:
            AssertionError: if its rows cannot be divided evenly.
        """
        factor = self.factor
        if factor == 1:
            return tuple(shape)
        rows = shape[0] if len(shape) else 1
        if not len(shape) or rows % factor:
            raise AssertionError(
                f"Invalid batch dimension: the argument {name} has {rows} rows in the shape {list(shape)}, which do "
                f"not make up {factor} micro-batches of equal size: deviceIterations ({self.device_iterations}) * "
                f"replicationFactor ({self.groups.replicas}) / size of inputReplicaGrouping ({self.groups.size}) * "
                f"Training.gradientAccumulation ({self.gradient_accumulation}). Stack the rows of a whole run in the "
                f"first dimension: a multiple of {factor}.{_MAY_BE_THE_LAST}"
            )
        return (rows // factor, *shape[1:])

    def deal(self, array: np.ndarray) -> np.ndarray:
        """The rows of a call, dealt to micro-batches and replicas.

        Args:
            array: rows for all micro-batches, of a shape that `micro_batch_shape` accepts.

        Returns:
            The micro-batches, in the shape `[micro-batches of a replica, replicas, *micro-batch]`, where each of the
            first two is left out if it is 1. A view, unless several replicas share their rows.
        """
        micro_batch = self.micro_batch_shape(array.shape, "array")
        dealt = array.reshape(self.micro_batches, self.groups.count, *micro_batch)
        if self.groups.size > 1:
            dealt = dealt[:, list(self.groups.assignment)]
        return dealt.reshape((*(n for n in dealt.shape[:2] if n > 1), *micro_batch))

    @staticmethod
    def join(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The rows of a result, in the order in which `deal` takes rows.

        Args:
            array: the results of micro-batches and replicas, with leading dimensions as `deal` makes them.
            shape: of the result of one micro-batch.

        Returns:
            All rows in one dimension: `[n * rows, ...]`. Results without dimensions become `[n]`; a single one stays as
            it is.
        """
        n = math.prod(array.shape[: array.ndim - len(shape)])
        if n == 1:
            return array.reshape(shape)
        return array.reshape(n * (shape[0] if len(shape) else 1), *shape[1:])

    def returned(self, mode: OutputMode, period: int = 1) -> int:
        """How many results of each replica a run returns.

        Args:
            mode: the output mode, other than `Default`.
            period: for `EveryN`: return those of every `period`-th device iteration.

        Raises:
            AssertionError: if the period is not positive, or does not divide the number of device iterations.
        """
        match mode:
            case OutputMode.All:
                return self.micro_batches
            case OutputMode.EveryN:
                if period < 1 or self.device_iterations % period:
                    raise AssertionError(
                        f"The output return period is {period}; with OutputMode.EveryN it should be a divisor of "
                        f"deviceIterations ({self.device_iterations})."
                    )
                return self.micro_batches // period
        return 1


class Feeder:
    """Turns the tensors of calls into the arrays that a program is fed with. An executor keeps one, for its warnings.

    Args:
        batching: how rows are dealt.

    Example:
        >>> feeder = Feeder(Batching(2, 1, ReplicaGroups(1)))
        >>> (labels,) = feeder.arrays([torch.tensor([1, 2])], ["labels"])
        >>> labels.shape, labels.dtype
        ((2, 1), dtype('int32'))
    """

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self._warned: set[str] = set()

    def arrays(self, tensors: Iterable[torch.Tensor], names: Iterable[str]) -> list[np.ndarray]:
        """The arrays for one run, in the types of the device; see `Batching.deal`. They may share memory with tensors.

        Warns, once, of tensors that are not contiguous, and of ones that require a gradient.

        Args:
            tensors: as `Signature.check` returns them.
            names: of them, for the warnings.

        Raises:
            Error: for a dtype that the device does not have.
        """
        arrays = []
        for tensor, name in zip(tensors, names, strict=True):
            if not tensor.is_contiguous():
                self._warn_once(
                    "contiguous",
                    f"The argument {name} is not contiguous: it is copied at every call. Call `.contiguous()` on it "
                    "where it is made to avoid that.",
                )
                tensor = tensor.contiguous()
            if tensor.requires_grad:
                self._warn_once(
                    "requires_grad",
                    f"The argument {name} requires a gradient, which a wrapped model does not compute for its inputs: "
                    "it is detached.",
                )
            arrays.append(self.batching.deal(to_numpy(tensor)))
        return arrays

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning(message)
