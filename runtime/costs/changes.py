"""`CostChanges`: differences between the costs of two compiled programs, by graph, source line and collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

from popxl.base.pages import OnPage, Page, Table, bytes_text, count_text, flops_text, seconds_text
from popxl.base.records import Record
from runtime.costs.cost import CollectiveUse, Cost
from runtime.costs.lines import LineCost

R = TypeVar("R", bound=Record)


class CostChange(Record):
    """Change of one quantity.

    Attributes:
        what: the quantity: "temporaries", "kernels", "bytes of all-reduce".
        where: graph, source line or argument; "" for the whole program.
        before, after: values; 0 where there was none.
        unit: "B", "FLOP", "cycles", "ns", or "" for a count.
    """

    what: str
    where: str
    before: int
    after: int
    unit: str = ""

    def __str__(self) -> str:
        location = f" at {self.where}" if self.where else ""
        return f"{self.what}{location}: {self._text(self.before)} → {self._text(self.after)} ({self.ratio})"

    @property
    def ratio(self) -> str:
        """Change in percent."""
        return f"{100 * (self.after / self.before - 1):+.1f} %" if self.before else "new"

    def _text(self, count: int) -> str:
        units = {
            "B": bytes_text,
            "FLOP": flops_text,
            "cycles": lambda n: f"{count_text(n)} cycles",
            "ns": lambda n: seconds_text(n / 1e9),
        }
        return units[self.unit](count) if self.unit in units else str(count)

    def cells(self) -> list[str]:
        """Cells of a table row."""
        change = "gone" if self.before and not self.after else self.ratio
        return [self.what, self.where, self._text(self.before), self._text(self.after), change]


class CostChanges(OnPage, Record):
    """Differences in cost between two compiled programs. False if there are none.

    Both are read off compiled code, so equal programs have no changes, on any machine. Compile times are left out.

    Attributes:
        before, after: the names of the programs.
        changes: differences, starting with quantities of the whole program.

    Example:
        >>> before = popxl.analyze(jnp.sin, np.ones((3, 4), np.float32)).cost
        >>> after = popxl.analyze(jnp.sin, np.ones((3, 5), np.float32)).cost
        >>> [(change.what, change.before, change.after) for change in changes_of(before, after).changes][0]
        ('arguments', 48, 60)
    """

    before: str
    after: str
    changes: tuple[CostChange, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def page(self) -> Page:
        """Page for `print` and notebooks."""
        if not self.changes:
            return Page(f"From {self.before} to {self.after}", ["Nothing changed."])
        columns = ["what", "where", "before", "after", "change"]
        table = Table(columns, [each.cells() for each in self.changes])
        return Page(f"From {self.before} to {self.after}", [table])


_TOTALS = {
    "arguments": ("argument_bytes", "B"),
    "overwritten with results": ("alias_bytes", "B"),
    "temporaries": ("temporary_bytes", "B"),
    "in the host's memory": ("host_bytes", "B"),
    "code": ("code_bytes", "B"),
    "read and written": ("bytes_accessed", "B"),
    "operations": ("flops", "FLOP"),
    "kernels": ("kernels", ""),
    "copies": ("copies", ""),
    "cycles": ("cycles", "cycles"),
    "a run, estimated": ("seconds", "ns"),
}
"""Quantities of a whole program: the attribute of `Cost`, and the unit."""


def changes_of(before: Cost, after: Cost) -> CostChanges:
    """Differences between two costs, first to second."""
    changes = (
        *_total_changes(before, after),
        *_argument_changes(before, after),
        *_graph_changes(before, after),
        *_collective_changes(before, after),
        *_line_changes(before, after),
    )
    return CostChanges(before=before.name, after=after.name, changes=tuple(c for c in changes if c.before != c.after))


def _total_changes(before: Cost, after: Cost) -> Iterator[CostChange]:
    for quantity, (attribute, unit) in _TOTALS.items():
        scale = 1e9 if unit == "ns" else 1
        old, new = (round(scale * (getattr(cost, attribute) or 0)) for cost in (before, after))
        yield CostChange(what=quantity, where="", before=old, after=new, unit=unit)


def _argument_changes(before: Cost, after: Cost) -> Iterator[CostChange]:
    """Changes of each argument. Files of earlier versions have none."""
    if not (before.arguments and after.arguments):
        return
    for quantity, attribute in (("argument", "arguments"), ("overwritten with results", "overwritten")):
        old, new = (getattr(cost, attribute) for cost in (before, after))
        for name in {**old, **new}:
            yield CostChange(what=quantity, where=name, before=old.get(name, 0), after=new.get(name, 0), unit="B")


def _graph_changes(before: Cost, after: Cost) -> Iterator[CostChange]:
    """Differences of each graph, for programs with several graphs."""
    old, new = ({graph.name: graph for graph in cost.graphs} for cost in (before, after))
    names = dict.fromkeys((*old, *new))
    if len(names) < 2:
        return
    for name in names:
        for quantity, attribute, unit in (("read and written", "bytes_accessed", "B"), ("operations", "flops", "FLOP")):
            counts = [getattr(graphs[name], attribute) if name in graphs else 0 for graphs in (old, new)]
            graph_name = name or "main graph"
            yield CostChange(what=quantity, where=graph_name, before=counts[0], after=counts[1], unit=unit)


def _collective_changes(before: Cost, after: Cost) -> Iterator[CostChange]:
    """Changes of collectives by source line; a collective moved to another line is unchanged."""
    changed = _unmatched(before.uses, after.uses, lambda use: use.model_copy(update={"source": ""}))
    (old_bytes, new_bytes), (old_counts, new_counts) = (
        [_summed(uses, attribute) for uses in changed] for attribute in ("bytes", "count")
    )
    for key in dict.fromkeys((*old_bytes, *new_bytes)):
        kind, line, replicas = key
        quantity = f"{kind} between {replicas}"
        old, new = old_bytes[key], new_bytes[key]
        yield CostChange(what=f"bytes of {quantity}", where=line, before=old, after=new, unit="B")
        yield CostChange(what=quantity, where=line, before=old_counts[key], after=new_counts[key])


def _summed(uses: Iterable[CollectiveUse], attribute: str) -> Counter[tuple[str, str, int]]:
    """Sums of an attribute of collectives, by kind, line and number of replicas."""
    sums = Counter[tuple[str, str, int]]()
    for use in uses:
        sums[use.kind, use.source, use.replicas] += getattr(use, attribute)
    return sums


_LINE_QUANTITIES = {
    "kernels": ("kernels", ""),
    "operations": ("flops", "FLOP"),
    "read and written": ("bytes_accessed", "B"),
    "live at the peak": ("live_bytes", "B"),
}
"""Quantities of a source line: the attribute of `LineCost`, and the unit."""


def _line_changes(before: Cost, after: Cost) -> Iterator[CostChange]:
    """Changes by source line of work, memory and computed quantities; moved lines are unchanged. Files of earlier
    versions have none."""
    if not (before.lines and after.lines):
        return
    for old, new in _line_pairs(before.lines, after.lines):
        location = new.line or old.line
        for quantity, (attribute, unit) in _LINE_QUANTITIES.items():
            yield CostChange(
                what=quantity, where=location, before=getattr(old, attribute), after=getattr(new, attribute), unit=unit
            )
        for kind in sorted({*old.kinds, *new.kinds}):
            yield CostChange(what=kind, where=location, before=old.kinds.get(kind, 0), after=new.kinds.get(kind, 0))


def _line_pairs(before: Sequence[LineCost], after: Sequence[LineCost]) -> Iterator[tuple[LineCost, LineCost]]:
    """Pairs of changed lines, before and after. Lines of equal cost match, at any position in a file; others are paired
    by line numbers, or in order if their number is unchanged."""
    named_before, named_after = ([line for line in lines if line.line] for lines in (before, after))
    changed = _unmatched(named_before, named_after, _file_and_cost)
    old, new = ({line.line: line for line in lines} for lines in changed)
    for file in dict.fromkeys(map(_file, (*old, *new))):
        first, second = (sorted((name for name in names if _file(name) == file), key=_number) for names in (old, new))
        if len(first) == len(second):
            pairs = [*zip(first, second, strict=True)]
        else:
            pairs = [(name, name) for name in sorted({*first, *second}, key=_number)]
        for old_line, new_line in pairs:
            yield old.get(old_line, _nothing(old_line)), new.get(new_line, _nothing(new_line))


def _unmatched(before: Iterable[R], after: Iterable[R], key: Callable[[R], Hashable]) -> tuple[list[R], list[R]]:
    """Unmatched records of both programs: those without an equal record, or one of equal `key` (a moved line), in the
    other program."""
    old, new = list(before), list(after)
    keys: tuple[Callable[[R], Hashable], ...] = (lambda record: record.model_dump_json(), key)
    for key_of in keys:  # what is equal is no candidate for what has moved
        common = Counter(map(key_of, old)) & Counter(map(key_of, new))
        old, new = _without(old, common, key_of), _without(new, common, key_of)
    return old, new


def _without(records: Iterable[R], excluded: Counter[Hashable], key: Callable[[R], Hashable]) -> list[R]:
    """Records that remain after removing as many of each key as `excluded` has."""
    remaining, kept = excluded.copy(), list[R]()
    for record in records:
        if remaining[key(record)]:
            remaining[key(record)] -= 1
        else:
            kept.append(record)
    return kept


def _file_and_cost(line: LineCost) -> tuple[str, str]:
    return _file(line.line), line.model_copy(update={"line": ""}).model_dump_json()


def _file(line: str) -> str:
    return line.rpartition(":")[0]


def _number(line: str) -> int:
    number = line.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _nothing(line: str) -> LineCost:
    return LineCost(line=line, kernels=0, flops=0, bytes_accessed=0)
