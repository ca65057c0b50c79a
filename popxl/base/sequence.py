"""State of `popxl.in_sequence`: the ops that the next op has to follow.

For each graph (and execution context) the state is a pair: the predecessors of every new op, and the ops of an
unordered block without successors so far. A chained op follows both and becomes the new state; an unordered op follows
only the first and joins the second. Nesting then needs no special case.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Mode = bool | None


@dataclass
class _OrderState:
    """Ids of ops: `predecessors` of every new op, and ops that are `unordered` among themselves."""

    predecessors: tuple[int, ...] = ()
    unordered: list[int] = field(default_factory=list)

    @property
    def all_ops(self) -> tuple[int, ...]:
        return (*self.predecessors, *self.unordered)


class Sequencer:
    """Hands out ordering constraints as ops are created."""

    def __init__(self) -> None:
        self.mode: Mode = None
        self._depth = 0
        self._states: dict[Hashable, _OrderState] = {}

    @contextmanager
    def block(self, mode: object) -> Iterator[None]:
        """Enter a mode; leaving the outermost block clears the state."""
        outer_mode = self.mode
        is_nested_chain = mode is True and outer_mode is False
        earlier = {key: state.all_ops for key, state in self._states.items()} if is_nested_chain else {}
        if mode == "pass":
            self._states.clear()
        elif mode is False and outer_mode is True:
            for key, state in self._states.items():  # a block nested in a chain follows whole blocks before it
                self._states[key] = _OrderState(state.all_ops)
        self.mode = None if mode == "pass" else mode  # type: ignore[assignment]  # checked by the first op
        self._depth += 1
        try:
            yield
        finally:
            if is_nested_chain:  # the unordered block goes on after all of the chain, also where this ends unordered
                changed = {k: s.all_ops for k, s in self._states.items() if s.all_ops != earlier.get(k)}
                self._states |= {key: _OrderState(predecessors=ops) for key, ops in changed.items()}
            self.mode = outer_mode
            self._depth -= 1
            if self._depth == 0:
                self._states.clear()

    def predecessors(self, key: Hashable) -> tuple[int, ...]:
        """Ids of required predecessors of a new op. Raises `ValueError` for an unknown mode."""
        if self.mode is None:
            return ()
        if not isinstance(self.mode, bool):
            raise ValueError(f"in_sequence: the mode {self.mode!r} is unknown; expected True, False or 'pass'.")
        state = self._states.get(key)
        if state is None:
            return ()
        return state.all_ops if self.mode else state.predecessors

    def remember(self, key: Hashable, op_id: int) -> None:
        """Take note of a new op."""
        if self.mode is None:
            return
        state = self._states.setdefault(key, _OrderState())
        if self.mode:
            self._states[key] = _OrderState(predecessors=(op_id,))
        else:
            state.unordered.append(op_id)

    def replace(self, old: Collection[int], new: Iterable[int]) -> None:
        """Replace op ids by others."""
        for state in self._states.values():
            state.predecessors = with_ids_replaced(state.predecessors, old, new)
            state.unordered = list(with_ids_replaced(state.unordered, old, new))


def with_ids_replaced(ids: Iterable[int], old: Collection[int], new: Iterable[int]) -> tuple[int, ...]:
    """Deduplicated ids, with `old` ids replaced by `new` ones."""
    return tuple(dict.fromkeys(found for id in ids for found in (new if id in old else (id,))))
