"""Call arguments of wrapped models: binding to the parameters of `forward`, and comparison with the first call.

Values of parameters and buffers are read in `weight_values.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from poptorch.base.carried import all_numbers_name, may_be_carried
from poptorch.base.custom_types import parser_of
from poptorch.base.hidden_tensors import hidden_problem, holds_tensor
from poptorch.base.introspection import is_instance
from poptorch.base.leaves import Components, KnownObjects, Structure
from poptorch.base.logging_ import logger
from poptorch.base.structures import structure_of
from poptorch.errors import Error, createPoptorchError


class Binder:
    """Binds call arguments to the parameters of a `forward`.

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
        """Bind arguments: return each parameter's value, in signature order, defaults included.

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

    def passed_names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Names of parameters passed explicitly in a call, excluding those collected by `*args` and `**kwargs`."""
        return [name for name in self._signature.bind_partial(*args, **kwargs).arguments if name not in self._open]

    def unbind(
        self, values: Mapping[str, Any], positional: int, wanted: Collection[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert parameter values, as returned by `bind`, back to call arguments `args, kwargs`.

        Args:
            wanted: names of the parameters to pass a value for. Others use their default; a wrapping function may have
                another default than the one with these parameters.
        """
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            if name == self.rest:
                args += values[name]
            elif name == self.extra:
                kwargs |= values[name]
            elif len(args) < positional and parameter.kind is not parameter.KEYWORD_ONLY:
                args.append(values[name])
            elif name in wanted:
                kwargs[name] = values[name]
        return tuple(args), kwargs


class Signature:
    """The signature that a model is compiled for: argument structure, tensor shapes and dtypes, constants.

    Args:
        args: positional arguments of the first call.
        kwargs: keyword arguments of the first call.
        inspected: names of the values beside tensors that are a part of the program, as `forward` looks at them, and
            those by `all_numbers_name`; `None` stands for all.
        carries_numbers: whether carried values may be numbers anywhere, not only in arguments with tensors or texts.

    Raises:
        Error, AssertionError: if they cannot be bound; see `Binder.bind`.
        Error: if there are tensors in them that cannot be found. (Functions and modules may have their own.)

    Attributes:
        leaves: name, shape and dtype of each tensor, in the order of `check` and `arguments`.
        carries: whether some values may differ in each call.

    Example:
        >>> forward = lambda x, mask=None: x
        >>> signature = Signature(forward, (torch.zeros(4, 3),), {})
        >>> signature.leaves
        (Leaf(name='x', shape=(4, 3), dtype=torch.float32),)
        >>> (x,) = signature.check((torch.ones(4, 3),), {})  # an error for one of another shape
        >>> args, kwargs = signature.arguments([torch.zeros(2, 3)])  # the arguments for a micro-batch
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inspected: Collection[str] | None = None,
        carries_numbers: bool = False,
    ) -> None:
        self._binder = Binder(forward)
        values = self._binder.bind(args, kwargs)
        self._passed_names = self._binder.passed_names(args, kwargs)
        self._positional = len(args)
        self._structures: dict[str, Structure] = {}
        self.carries, self.carries_numbers = False, carries_numbers
        for name, value in values.items():
            is_beside = inspected is not None and all_numbers_name(name) not in inspected
            is_beside = is_beside and (carries_numbers or holds_tensor(value, torch.Tensor))

            def carries(name: str, value: Any, is_beside: bool = is_beside) -> bool:
                is_carried = inspected is not None and name not in inspected and may_be_carried(value, is_beside)
                self.carries |= is_carried
                return is_carried

            self._structures[name] = structure_of(value, name, KnownObjects(carries=carries, inspected=inspected or ()))
        self._has_objects = any(True for name, s in self._structures.items() for _ in s.objects(values[name]))
        self.leaves = tuple(leaf for structure in self._structures.values() for leaf in structure.leaves())
        self._wanted = {name for name, s in self._structures.items() if name in self._passed_names or any(s.leaves())}
        for structure in self._structures.values():
            for name, constant in structure.constants():
                if not callable(constant) and holds_tensor(constant, torch.Tensor):
                    raise hidden_problem(f"The argument {name}", constant)
        self._dicts = [name for name, value in values.items() if name != self._binder.extra and _has_dict(value)]

    def tell_of_dicts(self) -> None:
        """Warn about dictionary arguments, whose keys are compiled in."""
        if self._dicts:
            logger.warning(
                "Dictionaries among the arguments (%s): their keys are compiled in; later calls need the same.",
                ", ".join(self._dicts),
            )

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The function's parameters."""
        return self._binder.parameters

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Validate a call's arguments. Return their tensors, unconverted, in the order of `leaves`.

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

    def fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether call arguments match this signature."""
        try:
            self.check(args, kwargs)
        except Error:
            return False
        return True

    def _differences(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Describe each argument mismatch between a call and the first call, one sentence per mismatch."""
        given = self._binder.passed_names(args, kwargs)
        missing = [name for name in self._passed_names if name not in given]
        unexpected = [name for name in given if name not in self._passed_names]
        return (
            f"Number of positional arguments mismatch: expected {self._positional} arguments but got {len(args)}. "
            * (len(args) != self._positional)
            + f"Missing arguments: {', '.join(missing)}. " * bool(missing)
            + f"Unexpected arguments: {', '.join(unexpected)}. " * bool(unexpected)
        )

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[torch.Tensor], list[Any]]:
        """Tensors of a call's arguments, as by `check`, and objects, as by `objects`."""
        return self.check(args, kwargs), self.objects(args, kwargs)

    def objects(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Call arguments whose attributes `forward` may set; see `Structure.objects`.

        Args:
            args, kwargs: arguments of a call that `check` accepted.
        """
        if not self._has_objects:
            return []
        values = self.named(args, kwargs).values()
        return [o for s, value in zip(self._structures.values(), values, strict=True) for o in s.objects(value)]

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Call arguments by parameter, defaults included."""
        return self._binder.bind(args, kwargs)

    def arguments(self, tensors: Iterable[torch.Tensor], hides: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Build call arguments `args, kwargs` for `forward` from new tensors, one per leaf in `leaves`.

        Args:
            hides: whether carried values are hidden, to detect whether `forward` inspects them.
        """
        left = Components(iter(tensors), hides=hides)
        values = {name: structure.build(left) for name, structure in self._structures.items()}
        return self._binder.unbind(values, self._positional, self._wanted)


def _has_dict(value: Any) -> bool:
    if parser_of(value) is not None:
        return False
    return is_instance(value, dict) or (is_instance(value, (tuple, list)) and any(map(_has_dict, value)))
