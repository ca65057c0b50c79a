"""State of `popxl.in_sequence`: the ops that the next op has to follow.

For each graph (and execution context) the memory is a pair: the ops that everything new must follow, and the ops of
an unordered block that nothing has followed yet. A chained op follows both and becomes the new memory; an unordered
op follows only the first and joins the second. Nesting then needs no special case.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Mode = bool | None


@dataclass
class _Memory:
    """Ids of ops: `before` precede every new op, `members` are unordered among themselves."""

    before: tuple[int, ...] = ()
    members: list[int] = field(default_factory=list)

    @property
    def all_members(self) -> tuple[int, ...]:
        return (*self.before, *self.members)


class Sequencer:
    """Hands out ordering constraints as ops are created."""

    def __init__(self) -> None:
        self.mode: Mode = None
        self._depth = 0
        self._memories: dict[Hashable, _Memory] = {}

    @contextmanager
    def block(self, mode: object) -> Iterator[None]:
        """Enter a mode; leaving the outermost block forgets everything."""
        before = self.mode
        is_nested_chain = mode is True and before is False
        earlier = {key: memory.all_members for key, memory in self._memories.items()} if is_nested_chain else {}
        if mode == "pass":
            self._memories.clear()
        elif mode is False and before is True:
            for key, memory in self._memories.items():  # a block nested in a chain follows whole blocks before it
                self._memories[key] = _Memory(memory.all_members)
        self.mode = None if mode == "pass" else mode  # type: ignore[assignment]  # checked by the first op
        self._depth += 1
        try:
            yield
        finally:
            if is_nested_chain:  # the unordered block goes on after all of the chain, also where this ends unordered
                changed = {k: m.all_members for k, m in self._memories.items() if m.all_members != earlier.get(k)}
                self._memories |= {key: _Memory(before=members) for key, members in changed.items()}
            self.mode = before
            self._depth -= 1
            if self._depth == 0:
                self._memories.clear()

    def predecessors(self, key: Hashable) -> tuple[int, ...]:
        """Ids of required predecessors of a new op. Raises `ValueError` for an unknown mode."""
        if self.mode is None:
            return ()
        if not isinstance(self.mode, bool):
            raise ValueError(f"in_sequence: the mode {self.mode!r} is unknown; expected True, False or 'pass'.")
        memory = self._memories.get(key)
        if memory is None:
            return ()
        return memory.all_members if self.mode else memory.before

    def remember(self, key: Hashable, op_id: int) -> None:
        """Take note of a new op."""
        if self.mode is None:
            return
        memory = self._memories.setdefault(key, _Memory())
        if self.mode:
            self._memories[key] = _Memory(before=(op_id,))
        else:
            memory.members.append(op_id)

    def replace(self, old: Collection[int], new: Iterable[int]) -> None:
        """Replace op ids by others."""
        for memory in self._memories.values():
            memory.before = with_ids_replaced(memory.before, old, new)
            memory.members = list(with_ids_replaced(memory.members, old, new))


def with_ids_replaced(ids: Iterable[int], old: Collection[int], new: Iterable[int]) -> tuple[int, ...]:
    """Deduplicated ids, with `old` ids replaced by `new` ones."""
    return tuple(dict.fromkeys(found for id in ids for found in (new if id in old else (id,))))
