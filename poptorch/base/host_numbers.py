"""`HostNumbers`: Python numbers changed by `forward`, such as `self.step += 1`, computed on the host for each run.

A capture records each step of Python's arithmetic on them, up to where a tensor op receives the result. These steps are
replayed for each micro-batch of a run, and their results are inputs of the program.
"""

from __future__ import annotations

import builtins
import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from poptorch.errors import createPoptorchError

Number = bool | int | float
Operand = Number | tuple[int]
"""Operand of a step: a number, or the position of a carried or computed number as a tuple."""

CHOICE = "?"
"""Step that asks for the truth value of a number. Arguments: the number, and the answer."""

_OPERATORS = "add sub mul truediv floordiv mod pow neg pos abs eq ne lt le gt ge and_ or_ xor invert lshift rshift"
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"math.{name}": each for name, each in vars(math).items() if callable(each) and not name.startswith("_")},
    **{f"numpy.{name}": each for name, each in vars(np).items() if isinstance(each, np.ufunc)},
    **{f"builtins.{name}": getattr(builtins, name) for name in ("bool", "float", "int", "max", "min", "round")},
}
"""Functions of steps, by name."""


@dataclass(frozen=True)
class NumberPath:
    """Control-flow path of `forward` through its number arithmetic, up to a return or error.

    Attributes:
        steps: names of functions, and their arguments.
        slots: values that the program receives.
        final_values: values of the carried numbers afterwards, in order.
        problem: error that `forward` raises at the end; "" if it returns.
    """

    steps: Sequence[tuple[str, Sequence[Operand]]]
    slots: Sequence[Operand] = ()
    final_values: Sequence[Operand] = ()
    problem: str = ""

    def follow(self, numbers: Sequence[Number]) -> tuple[list[Number], list[Number]] | None:
        """Numbers of all slots, and final numbers, computed from initial numbers; `None` if branches take another path.

        Raises:
            poptorch.Error: if `forward` raises something.
        """
        known = list(numbers)

        def number(operand: Operand) -> Number:
            return known[operand[0]] if isinstance(operand, tuple) else operand

        for name, operands in self.steps:
            given = list(map(number, operands))
            if name != CHOICE:
                known.append(FUNCTIONS[name](*given))
            elif bool(given[0]) is not given[1]:
                return None
        if self.problem:
            raise createPoptorchError(self.problem)
        return list(map(number, self.slots)), list(map(number, self.final_values))


class HostNumbers:
    """A module's numbers changed by `forward`. Thread-safe.

    Args:
        paths: paths of `forward`, one of which applies to each possible number.
        dtypes: dtypes of the slots; integers have 32 bits.

    Attributes:
        now: values at the start of the next run.

    Example:
        >>> doubled = NumberPath([("operator.mul", ((0,), 2))], slots=[(1,)], final_values=[(1,)])
        >>> numbers = HostNumbers({"x": 3}, [doubled], ["int32"])
        >>> numbers.advance(2)
        [array([ 6, 12], dtype=int32)]
        >>> numbers.now
        {'x': 12}
    """

    def __init__(self, first: Mapping[str, Number], paths: Sequence[NumberPath], dtypes: Sequence[str]) -> None:
        self.now = dict(first)
        self.paths, self.dtypes = list(paths), list(dtypes)
        self._lock = threading.Lock()

    def advance(self, count: int) -> list[np.ndarray]:
        """Numbers computed by `forward` over `count` calls, one array per slot.

        Raises:
            poptorch.Error: if one of them raises an error, or an integer has more than 32 bits.
        """
        with self._lock:
            now, rows = list(self.now.values()), []
            for _ in range(count):
                slots, now = next(found for path in self.paths if (found := path.follow(now)) is not None)
                rows.append(slots)
            columns = [[row[i] for row in rows] for i in range(len(self.dtypes))]
            arrays = list(map(_as_array, columns, self.dtypes))
            self.now = dict(zip(self.now, now, strict=True))
        return arrays


def _as_array(column: Sequence[Number], dtype: str) -> np.ndarray:
    kind = np.dtype(dtype)
    numbers = list(map(partial(_fitting, kind=kind), column))
    with np.errstate(over="ignore"):  # beyond float32 is infinity
        return np.array(numbers, kind)


def _fitting(number: Number, kind: np.dtype[Any]) -> Number:
    is_whole = kind.kind != "i" or isinstance(number, int) and abs(number) < 2**31
    if not is_whole:
        raise createPoptorchError(
            f"`forward` computes the number {number!r} from those that it changes, where the program takes an integer "
            "of 32 bits. Compute with floats (`float(self.step)`), or have it begin anew in time (`%`)."
        )
    return number
