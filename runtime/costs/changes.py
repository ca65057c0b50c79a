"""`CostChanges`: differences between the costs of two compiled programs, by graph, source line and collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from popxl.base.pages import OnPage, Page, Table, bytes_text, count_text, flops_text, seconds_text
from popxl.base.records import Record
from runtime.costs.cost import CollectiveUse, Cost
from runtime.costs.lines import LineCost


class CostChange(Record):
    """One quantity that changed.

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
        where = f" at {self.where}" if self.where else ""
        return f"{self.what}{where}: {self._text(self.before)} → {self._text(self.after)} ({self.ratio})"

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
        gone = "gone" if self.before and not self.after else self.ratio
        return [self.what, self.where, self._text(self.before), self._text(self.after), gone]


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
    found = (
        *_totals(before, after),
        *_of_arguments(before, after),
        *_of_graphs(before, after),
        *_of_collectives(before, after),
        *_of_lines(before, after),
    )
    return CostChanges(before=before.name, after=after.name, changes=tuple(c for c in found if c.before != c.after))


def _totals(before: Cost, after: Cost) -> Iterator[CostChange]:
    for what, (attribute, unit) in _TOTALS.items():
        scale = 1e9 if unit == "ns" else 1
        old, new = (round(scale * (getattr(cost, attribute) or 0)) for cost in (before, after))
        yield CostChange(what=what, where="", before=old, after=new, unit=unit)


def _of_arguments(before: Cost, after: Cost) -> Iterator[CostChange]:
    """Changes of each argument. Files of earlier versions have none."""
    if not (before.arguments and after.arguments):
        return
    for what, attribute in (("argument", "arguments"), ("overwritten with results", "overwritten")):
        old, new = (getattr(cost, attribute) for cost in (before, after))
        for name in {**old, **new}:
            yield CostChange(what=what, where=name, before=old.get(name, 0), after=new.get(name, 0), unit="B")


def _of_graphs(before: Cost, after: Cost) -> Iterator[CostChange]:
    """Differences of each graph, for programs with several graphs."""
    old, new = ({graph.name: graph for graph in cost.graphs} for cost in (before, after))
    names = dict.fromkeys((*old, *new))
    if len(names) < 2:
        return
    for name in names:
        for what, attribute, unit in (("read and written", "bytes_accessed", "B"), ("operations", "flops", "FLOP")):
            counts = [getattr(graphs[name], attribute) if name in graphs else 0 for graphs in (old, new)]
            where = name or "main graph"
            yield CostChange(what=what, where=where, before=counts[0], after=counts[1], unit=unit)


def _of_collectives(before: Cost, after: Cost) -> Iterator[CostChange]:
    """Changes of collectives by source line. One that only moved to another line has not changed."""
    old, new = Counter(before.uses), Counter(after.uses)
    old, new = old - new, new - old
    moved = Counter(map(_without_line, old.elements())) & Counter(map(_without_line, new.elements()))
    old, new = _less(old, moved), _less(new, moved)
    for place in dict.fromkeys(_place(use) for use in (*old, *new)):
        counts = [sum(use.bytes * n for use, n in uses.items() if _place(use) == place) for uses in (old, new)]
        kind, source, replicas = place
        what = f"bytes of {kind} between {replicas}"
        yield CostChange(what=what, where=source, before=counts[0], after=counts[1], unit="B")
        runs = [sum(use.count * n for use, n in uses.items() if _place(use) == place) for uses in (old, new)]
        yield CostChange(what=f"{kind} between {replicas}", where=source, before=runs[0], after=runs[1])


_OF_LINES = {
    "kernels": ("kernels", ""),
    "operations": ("flops", "FLOP"),
    "read and written": ("bytes_accessed", "B"),
    "live at the peak": ("live_bytes", "B"),
}
"""Quantities of a source line: the attribute of `LineCost`, and the unit."""


def _of_lines(before: Cost, after: Cost) -> Iterator[CostChange]:
    """Changes by source line: its work and memory, and what it computes. One that only moved has not changed.
    Files of earlier versions have none."""
    if not (before.lines and after.lines):
        return
    for old, new in _pairs(before.lines, after.lines):
        where = new.line or old.line
        for what, (attribute, unit) in _OF_LINES.items():
            yield CostChange(
                what=what, where=where, before=getattr(old, attribute), after=getattr(new, attribute), unit=unit
            )
        for kind in sorted({*old.kinds, *new.kinds}):
            yield CostChange(what=kind, where=where, before=old.kinds.get(kind, 0), after=new.kinds.get(kind, 0))


def _pairs(before: Sequence[LineCost], after: Sequence[LineCost]) -> Iterator[tuple[LineCost, LineCost]]:
    """Changed lines, before and after. Lines of equal cost match, at any position in a file; the others are paired by
    line numbers, or in order if their number is unchanged."""
    old, new = ({line.line: line for line in lines if line.line} for lines in (before, after))
    moved = Counter(map(_of_file, old.values())) & Counter(map(_of_file, new.values()))
    old, new = _unmoved(old, moved), _unmoved(new, moved)
    for file in dict.fromkeys(map(_file, (*old, *new))):
        first, second = (sorted((name for name in names if _file(name) == file), key=_number) for names in (old, new))
        if len(first) == len(second):
            named = [*zip(first, second, strict=True)]
        else:
            named = [(name, name) for name in sorted({*first, *second}, key=_number)]
        for one, other in named:
            yield old.get(one, _nothing(one)), new.get(other, _nothing(other))


def _unmoved(lines: Mapping[str, LineCost], moved: Counter[tuple[str, str]]) -> dict[str, LineCost]:
    """Lines whose costs are missing in the other program."""
    left, found = moved.copy(), dict[str, LineCost]()
    for name, line in lines.items():
        if left[_of_file(line)]:
            left[_of_file(line)] -= 1
        else:
            found[name] = line
    return found


def _of_file(line: LineCost) -> tuple[str, str]:
    """A line by its file and cost."""
    return _file(line.line), line.model_copy(update={"line": ""}).model_dump_json()


def _file(line: str) -> str:
    return line.rpartition(":")[0]


def _number(line: str) -> int:
    number = line.rpartition(":")[2]
    return int(number) if number.isdigit() else 0


def _nothing(line: str) -> LineCost:
    return LineCost(line=line, kernels=0, flops=0, bytes_accessed=0)


def _place(use: CollectiveUse) -> tuple[str, str, int]:
    return use.kind, use.source, use.replicas


def _without_line(use: CollectiveUse) -> CollectiveUse:
    return use.model_copy(update={"source": ""})


def _less(uses: Counter[CollectiveUse], moved: Counter[CollectiveUse]) -> Counter[CollectiveUse]:
    """The collectives without those that moved to another line."""
    left, found = moved.copy(), Counter[CollectiveUse]()
    for use in uses.elements():
        if left[_without_line(use)]:
            left[_without_line(use)] -= 1
        else:
            found[use] += 1
    return found
