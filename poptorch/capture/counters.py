"""Python numbers updated by `forward`, such as `self.step += 1`: the host recomputes them for each run.

During a second capture of a model, a `Counter` replaces each of them, and a `Tape` records the arithmetic on it. Ops
that receive one get an input of the program in place of the number: see `poptorch.capture.number_inputs`. Numbers whose
use cannot be recorded are refused: they become constants of the program, with a warning.
"""

from __future__ import annotations

import builtins
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType
from typing import Any

import numpy as np
from torch.utils import _pytree as pytree

from poptorch.base.host_numbers import CHOICE, FUNCTIONS, Number, NumberPath, Operand
from poptorch.base.patching import patched
from poptorch.capture.trace import Value

COUNTER_TYPES = (bool, int, float)
"""Types of numbers that are carried from run to run."""


class Refused(TypeError):
    """Use of a number that no program input can represent."""


class Tape:
    """Recorded Python arithmetic on numbers that `forward` updates, during one capture.

    Args:
        choices: forced outcomes of the first branches on them; later branches follow the numbers.

    Attributes:
        choices: outcomes of all branches on numbers.
        slots: program inputs for numbers.
        final_values: final values of the numbers.
        formatted: names of numbers that `forward` formats as text.
        refused: names of numbers used in a way that no program input can represent.
    """

    def __init__(self, first: Mapping[str, Number], choices: Sequence[bool] = ()) -> None:
        self.first, self._forced_choices = dict(first), tuple(choices)
        self.refused, self.formatted = set[str](), set[str]()
        self.clear()

    def clear(self) -> None:
        """Clear all records for a new run of `forward`."""
        self.choices: list[bool] = []
        self.slots: dict[Value, Operand] = {}
        self.final_values: dict[str, Operand] = {}
        self._steps: list[tuple[str, tuple[Operand, ...]]] = []
        self._numbers: list[Number] = list(self.first.values())
        self._sources = [frozenset([name]) for name in self.first]
        self._indices: dict[Any, int] = {}
        self._stand_ins = 0
        self._counters: list[weakref.ref[Counter]] = []

    def counter(self, index: int) -> Counter:
        """New counter for a number of this tape, given its index."""
        counter = Counter(self, index)
        self._counters.append(weakref.ref(counter))
        return counter

    def number(self, operand: Operand) -> Number:
        """Value of an operand in the first run, under the choices of this capture."""
        return self._numbers[operand[0]] if isinstance(operand, tuple) else operand

    def call(self, name: str, *arguments: Any) -> Any:
        """Record a function call on counters and numbers; returns a counter."""
        if not all(type(each) in (Counter, *COUNTER_TYPES) for each in arguments):
            return self.refuse(*arguments)
        operands = tuple(map(_operand_of, arguments))
        key = name, operands, tuple(map(type, operands))
        if key not in self._indices:
            try:
                number = FUNCTIONS[name](*map(self.number, operands))
            except (ArithmeticError, ValueError):
                if self.is_natural:
                    raise
                number = math.nan  # unreachable in a run with these numbers
            number = as_python(number)
            if type(number) not in COUNTER_TYPES:
                return self.refuse(*arguments)
            self._indices[key] = len(self._numbers)
            self._steps.append((name, operands))
            self._numbers.append(number)
            self._sources.append(self.sources(arguments))
        return self.counter(self._indices[key])

    def choose(self, counter: Counter) -> bool:
        """Truth value of a number for Python's control flow: the given choice, else the number's own truth value."""
        key = CHOICE, counter.index
        if key not in self._indices:
            forced = self._forced_choices[len(self.choices) :][:1]
            choice = forced[0] if forced else bool(self._numbers[counter.index])
            self._indices[key] = choice
            self._steps.append((CHOICE, ((counter.index,), choice)))
            self.choices.append(choice)
        return bool(self._indices[key])

    @property
    def is_natural(self) -> bool:
        """Whether no choices were given, so that control flow follows the first run."""
        return not self._forced_choices

    def sources(self, values: Iterable[Any]) -> frozenset[str]:
        """Names of the initial numbers from which counters derive."""
        return frozenset().union(*(self._sources[each.index] for each in values if type(each) is Counter))

    def refuse(self, *values: Any) -> Any:
        """Mark numbers as refused: no program input can represent their use.

        Raises:
            Refused: always.
        """
        self.refused |= self.sources(values)
        raise Refused("`forward` uses a number that it changes in a way that cannot be noted.")

    def stand_in(self, counter: Counter) -> Number:
        """Unique placeholder for a counter's number, distinct from all numbers even in float32."""
        self._stand_ins += 1
        number = self._numbers[counter.index]
        if type(number) is int:
            return 1_000_003 + self._stand_ins
        if not math.isfinite(number):
            self.refuse(counter)
        return number * (1 - self._stand_ins * 2.0**-20) or self._stand_ins * 1e-30

    def set_final(self, name: str, number: Any) -> None:
        """Record the final value of a number, or refuse a non-number; names outside this tape are ignored."""
        if name in self.first and type(number) in (Counter, *COUNTER_TYPES):
            self.final_values[name] = _operand_of(number)
        elif name in self.first:
            self.refused.add(name)

    def refuse_referenced(self) -> None:
        """Refuse numbers whose counters are still referenced."""
        self.refused |= self.sources(counter for ref in self._counters if (counter := ref()) is not None)

    def path(self, slots: Sequence[Operand] = (), problem: str = "") -> NumberPath:
        """Recorded steps of this capture, with operands for the program's number inputs."""
        return NumberPath(self._steps, slots, [self.final_values.get(name, 0) for name in self.first], problem)


def as_python(number: Any) -> Any:
    """Convert a NumPy scalar, which tensors treat as a number, to Python's; return other objects unchanged."""
    return number.item() if isinstance(number, np.bool_ | np.floating | np.integer) else number


def _operand_of(each: Any) -> Operand:
    return (each.index,) if type(each) is Counter else each


class Counter:
    """Symbolic number. Python arithmetic on counters and numbers returns new counters."""

    __slots__ = ("__weakref__", "index", "tape")

    def __init__(self, tape: Tape, index: int) -> None:
        self.tape, self.index = tape, index

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.tape.number((self.index,)))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counters = [each for each in pytree.tree_leaves((args, kwargs)) if type(each) is Counter]
        return counters[0].tape.refuse(*counters)  # the tracer only receives plain numbers

    def __array_ufunc__(self, function: Any, method: str, *arguments: Any, **settings: Any) -> Any:
        if method != "__call__" or settings:
            return self.tape.refuse(self, *arguments)
        return self.tape.call(f"numpy.{function.__name__}", *arguments)

    def __bool__(self) -> bool:
        return self.tape.choose(self)

    def __round__(self, digits: int | None = None) -> Any:
        return self.tape.call("builtins.round", self, *(() if digits is None else (digits,)))

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __repr__(self) -> str:
        return repr(self._number_text())

    def __format__(self, spec: str) -> str:
        return format(self._number_text(), spec)

    def _number_text(self) -> Number:
        self.tape.formatted |= self.tape.sources([self])
        return self.tape.number((self.index,))


def _binary(name: str) -> Callable[[Counter, Any], Any]:
    is_reflected = name.startswith("r") and f"operator.{name}" not in FUNCTIONS
    step = f"operator.{name[is_reflected:]}"

    def method(self: Counter, other: Any) -> Any:
        if type(other) not in (Counter, *COUNTER_TYPES):
            return NotImplemented  # a tensor computes with it as with a number
        return self.tape.call(step, *((other, self) if is_reflected else (self, other)))

    return method


def _unary(step: str) -> Callable[[Counter], Any]:
    return lambda self: self.tape.call(step, self)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Counter, f"__{_name}__", _binary(_name))
    setattr(Counter, f"__r{_name}__", _binary(f"r{_name}"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Counter, f"__{_name}__", _binary(_name))
for _name in ("neg", "pos", "abs"):
    setattr(Counter, f"__{_name}__", _unary(f"operator.{_name}"))
for _name in ("floor", "ceil", "trunc"):
    setattr(Counter, f"__{_name}__", _unary(f"math.{_name}"))
for _name in "int float index complex hash reduce_ex".split():
    setattr(Counter, f"__{_name}__", lambda self, *args: self.tape.refuse(self))


# Functions written in C -----------------------------------------------------------------------------------------------


def _recording(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of numbers so that a tape records calls with counters."""

    def record_call(*args: Any, **settings: Any) -> Any:
        arguments = args
        if len(args) == 1 and name in ("builtins.min", "builtins.max") and type(args[0]) in (list, tuple):
            arguments = tuple(args[0])
        counters = [each for each in arguments if type(each) is Counter]
        is_recorded = counters and not settings and all(type(each) in (Counter, *COUNTER_TYPES) for each in arguments)
        return counters[0].tape.call(name, *arguments) if is_recorded else function(*args, **settings)

    return record_call


class _Class(type):
    """Metaclass of substitutes for `int` and `float` that record conversions of counters."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        return _recording(f"builtins.{cls.__name__}", cls.__mro__[1])(*args, **settings)

    def __instancecheck__(cls, each: Any) -> bool:
        return isinstance(each, cls.__mro__[1])


_MATH = {name: _recording(f"math.{name}", vars(math)[name]) for name in vars(math) if f"math.{name}" in FUNCTIONS}
_BUILTINS: dict[str, Any] = {
    **{name: _recording(f"builtins.{name}", getattr(builtins, name)) for name in ("max", "min")},
    **{kind.__name__: _Class(kind.__name__, (kind,), {}) for kind in (int, float)},
}


@contextmanager
def recording_number_functions(namespaces: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Record counter arguments of `math` functions, and of `int`, `float`, `min` and `max`, within a block.

    Args:
        namespaces: global names of functions that may call them.
    """
    by_function = {vars(math)[name]: each for name, each in _MATH.items()}
    with ExitStack() as stack:
        stack.enter_context(patched(math, **_MATH))
        for names in namespaces:
            functions = [(key, value) for key, value in names.items() if type(value) is BuiltinFunctionType]
            own = {key: by_function[value] for key, value in functions if value in by_function}
            own |= {key: each for key, each in _BUILTINS.items() if key not in names}
            stack.enter_context(patched(names, **own))
        yield
