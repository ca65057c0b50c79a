"""Choices that a program leaves open: `popxl tune` finds the values that are fastest and fit a machine."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

VARIABLE = "POPXL_CHOICES"


@dataclass
class Choices:
    """Open choices of a program, with their selected values.

    Attributes:
        overrides: values by name that replace the environment's and the default, which is the first option.
        options: options of each choice, by name; known once the program asks.
        work: names of choices that scale the work of a run.
        fixed: values from the environment, by name.
    """

    overrides: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    work: set[str] = field(default_factory=set)
    fixed: dict[str, Any] = field(default_factory=dict)

    def selections(self) -> dict[str, Any]:
        """Selected value of each requested choice."""
        known = {**self.fixed, **self.overrides}
        return {name: known.get(name, options[0]) for name, options in self.options.items()}


_choices: ContextVar[Choices | None] = ContextVar("choices", default=None)

_asked: dict[str, tuple[Any, ...]] = {}
"""Options of each choice that was made without overrides in this process."""


def choice(name: str, options: Sequence[T], is_work: bool = False) -> T:
    """Declare a choice that a tool may make: by default the first of `options`.

    ``popxl tune FILE.py --target "tpu v5e:4x4"`` compiles the program with each combination of its choices. It reports
    which fit the machine, and the fastest of these by the estimate. The environment variable `POPXL_CHOICES` then
    chooses: ``POPXL_CHOICES="micro_batch=8 recompute=True" python FILE.py``; values with blanks need quotes, as in
    ``"mesh='(2, 4)'"``. `popxl tune` varies only choices that the variable leaves open. Call this before the first run:
    `popxl tune` stops there, and the run of a program with choices refuses unknown names in the variable.

    Args:
        name: name of the choice; one name has the same options everywhere in a program.
        options: values, the preferred one first. They, and the existence of the choice, may depend on choices made
            before.
        is_work: whether the work of a run grows with the value, such as a number of samples. Estimates are then divided
            by the value. Leave it out for values that divide the same work in another way.

    Raises:
        ValueError: for a name that is not an identifier, no options, options with equal text, options that differ from
            an earlier use of the name, or if the environment chooses a value that is not an option.

    Example:
        >>> micro_batch = popxl.choice("micro_batch", [4, 8, 16])
        >>> micro_batch
        4
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"choice: `name` is {name!r}, expected a name such as 'micro_batch'.")
    values = tuple(options)
    if not values or len({*map(str, values)}) < len(values):
        raise ValueError(f"choice: `options` of {name!r} are {values}, expected different values, at least one.")
    choices = _choices.get() or Choices()
    if choices.options.setdefault(name, values) != values:
        raise ValueError(
            f"choice: {name!r} has the options {values} here, and had {choices.options[name]} before; expected the "
            "same, or another name."
        )
    if is_work:
        choices.work.add(name)
    if name in choices.overrides:
        if choices.overrides[name] not in values:
            raise ValueError(
                f"choice: {name!r} has the options {values} here, and had {choices.overrides[name]!r} among them when "
                "the program was run with the same choices before. Let options depend on other choices only."
            )
        return choices.overrides[name]
    if _choices.get() is None:
        _asked[name] = values
    wanted = _from_environment().get(name)
    if wanted is None:
        return values[0]
    found = [value for value in values if str(value) == wanted]
    if not found:
        raise ValueError(f"choice: {VARIABLE} says {name}={wanted}, expected one of {', '.join(map(str, values))}.")
    choices.fixed[name] = found[0]
    return found[0]


def check_environment() -> None:
    """Raise `ValueError` for environment choices that the program never requests."""
    if not _asked or _choices.get() is not None:
        return
    if unknown := unknown_in_environment(_asked):
        raise ValueError(f"Session.run: {unknown} Correct the name, or call `popxl.choice` before the first run.")


def unknown_in_environment(asked: Mapping[str, Sequence[Any]]) -> str:
    """Error text for unknown choices in the environment; "" without any."""
    if not (unknown := {name: value for name, value in _from_environment().items() if name not in asked}):
        return ""
    known = "; ".join(f"{name}: {', '.join(map(str, values))}" for name, values in asked.items())
    return f"{VARIABLE} says {as_text(unknown)}, and the program has not asked for that. Its choices are {known}."


def as_text(values: Mapping[str, Any]) -> str:
    """Format choice values for the environment variable.

    Example:
        >>> as_text({"micro_batch": 8, "mesh": (2, 4)})
        "micro_batch=8 'mesh=(2, 4)'"
    """
    return " ".join(shlex.quote(f"{name}={value}") for name, value in values.items())


@contextmanager
def override_choices(overrides: Mapping[str, Any]) -> Iterator[Choices]:
    """Override the values of `choice` within a block. The result collects the options of all requested choices."""
    choices = Choices(overrides)
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


def _from_environment() -> dict[str, str]:
    """Choice texts from the environment."""
    pairs = [pair.partition("=") for pair in shlex.split(os.environ.get(VARIABLE, ""))]
    if wrong := ["".join(pair) for pair in pairs if not all(pair)]:
        raise ValueError(f"choice: {VARIABLE} has {wrong[0]!r}, expected name=value, divided by blanks.")
    return {name: value for name, _, value in pairs}
