"""`CostChanges`: what changed between the costs of two compiled programs, by graph, source line and collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from popxl.base.pages import OnPage, Page, Table, bytes_text, count_text, flops_text
from popxl.base.records import Record
from runtime.costs.cost import CollectiveUse, Cost


class CostChange(Record):
    """One quantity that changed.

    Attributes:
        what: the quantity: "temporaries", "kernels", "bytes of all-reduce".
        where: the graph or source line that it is of; "" for the whole program.
        before, after: its values; 0 where there was none.
        unit: "B", "FLOP", "cycles", or "" for a count.
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
        units = {"B": bytes_text, "FLOP": flops_text, "cycles": lambda n: f"{count_text(n)} cycles"}
        return units[self.unit](count) if self.unit in units else str(count)

    def cells(self) -> list[str]:
        """Cells of a table row."""
        gone = "gone" if self.before and not self.after else self.ratio
        return [self.what, self.where, self._text(self.before), self._text(self.after), gone]


class CostChanges(OnPage, Record):
    """What changed from one compiled program to another. It is false where nothing changed.

    Both are read off compiled code, so equal programs have no changes, on any machine. Compile times are left out.

    Attributes:
        before, after: the names of the programs.
        changes: what changed, quantities of the whole program first.

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
}
"""Quantities of a whole program: the attribute of `Cost`, and the unit."""


def changes_of(before: Cost, after: Cost) -> CostChanges:
    """Changes from one cost to another."""
    found = (*_totals(before, after), *_of_graphs(before, after), *_of_collectives(before, after))
    return CostChanges(before=before.name, after=after.name, changes=tuple(c for c in found if c.before != c.after))


def _totals(before: Cost, after: Cost) -> Iterator[CostChange]:
    for what, (attribute, unit) in _TOTALS.items():
        old, new = getattr(before, attribute), getattr(after, attribute)
        yield CostChange(what=what, where="", before=old or 0, after=new or 0, unit=unit)


def _of_graphs(before: Cost, after: Cost) -> Iterator[CostChange]:
    """Changes of each graph, if there is more than the main graph."""
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
