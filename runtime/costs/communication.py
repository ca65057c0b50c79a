"""`Sent`: what a compiled program sends between its chips, beside what the program says: `Session.communication`.

XLA may carry out several exchanges as one, and small ones as an all-reduce of whole arrays, as long as the bytes stay.
All else is a difference: an exchange that nobody asked for, or one that is not there, or of other bytes.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from pydantic import BaseModel, ConfigDict

from popxl.base.pages import OnPage, Page, Table, bytes_text
from popxl.ir import Ir
from popxl.looking.communication import Communication, communication_of
from runtime.costs.cost import account_of_program
from runtime.program.program import CompiledProgram

Verdict = Literal["the same", "merged", "as all-reduce", "differs"]


class Exchange(BaseModel):
    """All exchanges of one kind, in groups of one size.

    Attributes:
        kind: what chips do together: "all-reduce".
        group_size: how many are together.
        said, said_bytes: how many of them a run carries out as the program says, and their bytes.
        compiled, compiled_bytes: the same, of what was compiled.
        verdict: what became of them: `"merged"`, into fewer with the same bytes; `"as all-reduce"`, by which a TPU sums
            or gathers small pieces, as nothing is quicker; `"differs"`, if something else.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    kind: str
    group_size: int
    said: int
    said_bytes: int
    compiled: int
    compiled_bytes: int
    verdict: Verdict


class Sent(OnPage, BaseModel):
    """What chips send each other in a run: as the program says, and as it was compiled.

    Attributes:
        said: what the program says: `ir.communication()`.
        is_sent: whether replicas are on chips of their own. On one device nothing is sent, and nothing compared.
        exchanges: both, by kinds and sizes of groups.
        differences: what differs, in sentences. Nothing should: if something does, tell us.

    Example:
        >>> sent = popxl.Session(ir, "tpu v5e:2x4").communication()
        >>> assert not sent.differences
        >>> print(sent)
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    said: Communication
    is_sent: bool
    exchanges: tuple[Exchange, ...]

    @property
    def differences(self) -> tuple[str, ...]:
        """What differs, in sentences."""
        return tuple(
            f"{e.kind} in groups of {e.group_size}: the program says {e.said} of {bytes_text(e.said_bytes)} in all, "
            f"and {e.compiled} of {bytes_text(e.compiled_bytes)} were compiled."
            for e in self.exchanges
            if e.verdict == "differs"
        )

    def page(self) -> Page:
        """What `print` and notebooks show."""
        if not self.is_sent:
            told = "All replicas are on one device: nothing is sent."
            return Page(f"Communication of {self.said.name}, as it was compiled", [told, self.said.page()])
        columns = ["collective", "groups of", "said", "bytes", "compiled", "bytes", ""]
        rows = [
            [e.kind, str(e.group_size), str(e.said), bytes_text(e.said_bytes), str(e.compiled)]
            + [bytes_text(e.compiled_bytes), e.verdict]
            for e in self.exchanges
        ]
        told = "Nothing is sent that the program does not say." if not self.differences else "Something differs."
        return Page(
            f"Communication of {self.said.name}, as it was compiled", [told, Table(columns, rows), self.said.page()]
        )


def sent_by(ir: Ir, program: CompiledProgram) -> Sent:
    """What a compiled program sends, beside what its Ir says. See `Session.communication`."""
    said, count = communication_of(ir), program.replicas.count
    if program.replicas.mesh is None:
        return Sent(said=said, is_sent=False, exchanges=())
    counts, sizes = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for each in said.collectives:
        counts[each.kind, each.group_size] += each.turns
        sizes[each.kind, each.group_size] += each.turns * each.bytes
    made, made_sizes = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for found in account_of_program(program).collectives:
        key = (found.kind, found.group_size or count)
        made[key] += found.runs
        made_sizes[key] += found.runs * found.bytes
    exchanges = tuple(
        Exchange(
            kind=kind,
            group_size=size,
            said=counts[kind, size],
            said_bytes=sizes[kind, size],
            compiled=made[kind, size],
            compiled_bytes=made_sizes[kind, size],
            verdict=_verdict(kind, size, counts, sizes, made, made_sizes),
        )
        for kind, size in dict.fromkeys((*counts, *made))
    )
    return Sent(said=said, is_sent=True, exchanges=exchanges)


Totals = Counter[tuple[str, int]]


def _verdict(kind: str, size: int, counts: Totals, sizes: Totals, made: Totals, made_sizes: Totals) -> Verdict:
    """What became of the exchanges of one kind."""
    whole, number, bytes = ("all-reduce", size), counts[kind, size], sizes[kind, size]
    moved = [key for key in (("reduce-scatter", size), ("all-gather", size)) if sizes[key] > made_sizes[key]]
    if moved and made_sizes[whole] == sizes[whole] + sum(sizes[key] - made_sizes[key] for key in moved):
        if (kind, size) in moved:
            return "as all-reduce"
        if (kind, size) == whole:
            number, bytes = number + sum(counts[key] for key in moved), made_sizes[whole]
    if made_sizes[kind, size] != bytes or made[kind, size] > number:
        return "differs"
    return "the same" if made[kind, size] == number else "merged"
