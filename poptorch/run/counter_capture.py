"""`capture_with_counters`: capture of a model whose `forward` changes numbers, such as `self.step += 1`.

The host computes these *counters* for each run; see `poptorch.base.host_numbers`. Each Python branch on them needs a
capture of its own, and the program is the same in all branches but for its number inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from poptorch.base.host_numbers import Number, NumberPath
from poptorch.base.logging_ import logger
from poptorch.base.outputs import OutputStructure
from poptorch.capture.counters import Tape
from poptorch.capture.model import Captured
from poptorch.capture.number_inputs import merge_captures
from poptorch.placement.capture_context import CaptureContext

Capture = tuple[Captured, OutputStructure, CaptureContext]

_MAX_CAPTURES = 16


def capture_with_counters(
    plain: Captured, capture: Callable[[Tape], Capture], counters: Collection[str] | None
) -> Capture | None:
    """Capture with counters, if it is otherwise equivalent to the `plain` capture; else `None`.

    Numbers that cannot be carried are left out.

    Args:
        counters: names of the counters to carry; `None` for all that are found.
    """
    initial, refused, budget = dict(plain.changed), set[str](), iter(range(_MAX_CAPTURES))
    while initial:
        branches = _capture_branches(initial, refused, capture, budget)
        if branches is None:
            return None
        changed = {name: number for name, number in branches.changed.items() if name not in refused}
        if changed == initial:
            return _merge(plain, branches) if counters is None or set(counters) == set(initial) else None
        initial = changed
    return None


@dataclass
class _Branches:
    """Captures of all Python branches on counters.

    Attributes:
        captures: captures with their tapes.
        problems: branches that end with an error.
        changed: initial values of all numbers that `forward` changes in any branch.
    """

    changed: dict[str, Number]
    captures: list[tuple[Tape, Capture]] = field(default_factory=list)
    problems: list[NumberPath] = field(default_factory=list)


def _capture_branches(
    initial: Mapping[str, Number], refused: set[str], capture: Callable[[Tape], Capture], budget: Iterator[int]
) -> _Branches | None:
    """Capture all branches on counters, up to a counter that cannot be carried. `None` if counters are not possible.

    Args:
        initial: counters with initial values.
        refused: names of counters that cannot be carried; extended.
        budget: iterator whose items allow one capture each.
    """
    branches, waiting = _Branches(dict(initial)), [tuple[bool, ...]()]
    while waiting and refused.isdisjoint(initial):
        if next(budget, None) is None:
            return None
        tape = Tape(initial, given := waiting.pop())
        try:
            found = capture(tape)
        except Exception as problem:  # any error: code that is not written in Python may have received a counter
            logger.debug("Numbers that `forward` changes are not carried.", exc_info=True)
            if not tape.refused and (tape.is_natural or isinstance(problem, TypeError)):
                return None
            branches.problems.append(tape.path(problem=f"{type(problem).__name__} in `forward`: {problem}"))
        else:
            branches.captures.append((tape, found))
            branches.changed |= found[0].changed
        refused |= tape.refused
        choices = tape.choices
        waiting += ((*choices[:i], not choices[i]) for i in range(len(given), len(choices)))
    return branches


def _merge(plain: Captured, branches: _Branches) -> Capture | None:
    """The first branch's capture, with the number arithmetic of all; `None` if their programs differ otherwise."""
    traces = [(tape, captured.trace) for tape, (captured, *_) in branches.captures]
    merged = merge_captures(plain.trace, traces, branches.problems)
    if merged is None:
        return None
    numbers, slots = merged
    (tape, (captured, structure, context)), *_ = branches.captures
    counters = {f"model.{name}" for name in tape.first}
    shown = {text: line for text, line in plain.carried.items() if text.removeprefix("model.") in tape.formatted}
    changes = plain.carried | captured.carried  # changes that cannot be undone occur once
    others = {text: line for text, line in changes.items() if text not in counters}
    return replace(captured, numbers=numbers, slots=slots, carried=others, formatted_numbers=shown), structure, context
