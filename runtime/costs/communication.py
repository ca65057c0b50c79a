"""`CommunicationReport`: traffic between the chips of a compiled program, compared with its Ir. See
`Session.communication`.

If IPUs are separate devices, they exchange the program's copies (`ops.ipu_copy`), and operands of ops on other IPUs:
both numbers are reported, and not compared.

XLA may merge several exchanges, and implement small ones as an all-reduce of whole arrays, with the same number of
bytes. It may drop exchanges with unused results, and add operands first where the program adds the results of two
reductions. Anything else is a difference: an unexpected or missing exchange, or other sizes.

CPU devices of several processes sum in the order of the replicas, by other exchanges of the same number of bytes
(`runtime.lowering.collectives.OrderedSums`). The comparison uses those.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from popxl.analysis.communication import COPY, Communication, ExchangeRecorder, communication_of
from popxl.base.pages import OnPage, Page, Table, bytes_text
from popxl.base.records import Record
from popxl.ir import Ir
from runtime.costs.executables import check_whole
from runtime.costs.program_cost import account_of_program, copies_of
from runtime.lowering.collectives import OrderedSums, sums_are_ordered
from runtime.program.compiled import CompiledProgram

Verdict = Literal["the same", "merged", "as all-reduce", "not all needed", "added first", "differs"]


class _EarlierNames:
    """Names that fields of a record had in earlier versions."""

    if TYPE_CHECKING:
        expected: int
        expected_bytes: int

    @property
    def said(self) -> int:
        """`expected`, by its name in earlier versions."""
        return self.expected

    @property
    def said_bytes(self) -> int:
        """`expected_bytes`, by its name in earlier versions."""
        return self.expected_bytes


class Exchange(_EarlierNames, Record):
    """Sum of all exchanges of one kind and one group size.

    Attributes:
        kind: kind of collective: "all-reduce".
        group_size: number of chips in a group: two in a `"collective-permute"`, in which each chip sends to one other.
        expected, expected_bytes: number of executions in a run according to the program, and their bytes. Where several
            processes drive CPU devices, a reduce-scatter is an all-to-all, whose parts each replica adds itself, and a
            sum of more than two replicas an all-to-all and an all-gather.
        needed_bytes: bytes of those with uses other than a sum with another one's result.
        compiled, compiled_bytes: the same for the compiled program.
        repeated_bytes: bytes of compiled ones that are repeated, because there was no memory to keep the first result.
        verdict: outcome of the comparison: `"merged"`, into fewer with the same bytes; `"as all-reduce"`, by which a
            TPU sums or gathers small arrays fastest; `"not all needed"`, without some with unused results; `"added
            first"`, without some whose results are added to those of others; `"differs"`, anything else.
    """

    kind: str
    group_size: int
    expected: int
    expected_bytes: int
    needed_bytes: int
    compiled: int
    compiled_bytes: int
    repeated_bytes: int
    verdict: Verdict


class Copied(_EarlierNames, Record):
    """Copies between the IPUs of a replica in one run.

    Attributes:
        expected, expected_bytes: number of copies in the program, and their bytes.
        compiled, compiled_bytes: number of copies that a run makes. They are more where ops read tensors of another
            IPU, and where state is changed on another IPU than it is read.
    """

    expected: int
    expected_bytes: int
    compiled: int
    compiled_bytes: int


class CommunicationReport(OnPage, Record):
    """Communication between chips in a run: as written in the program, and as compiled.

    Attributes:
        program: communication of the program: `ir.communication()`.
        is_sent: whether replicas are on separate chips. On one device nothing is sent, and nothing is compared.
        exchanges: both, by kinds and sizes of groups.
        copied: copies between IPUs; `None` if one device represents all.
        is_ordered: whether several processes drive CPU devices, which sum in the order of the replicas.
        differences: differences, in sentences. There should be none: please report any.

    Example:
        >>> sent = popxl.Session(ir, "tpu v5e:2x4").communication()
        >>> assert not sent.differences
        >>> print(sent)
    """

    program: Communication
    is_sent: bool
    exchanges: tuple[Exchange, ...]
    copied: Copied | None = None
    is_ordered: bool = False

    @property
    def said(self) -> Communication:
        """`program`, by its name in earlier versions."""
        return self.program

    @property
    def differences(self) -> tuple[str, ...]:
        """Unexpected differences, as sentences."""
        return tuple(
            f"{e.kind} in groups of {e.group_size}: the program says {e.expected} of {bytes_text(e.expected_bytes)} in "
            f"all, and {e.compiled} of {bytes_text(e.compiled_bytes)} were compiled{_repeated_text(e)}."
            for e in self.exchanges
            if e.verdict == "differs"
        )

    def page(self) -> Page:
        """Page for `print` and notebooks."""
        title = f"Communication of {self.program.name}, as it was compiled"
        if not self.is_sent:
            where = "on one device" if self.copied is None else "on the same devices"
            summary = f"All replicas are {where}: they send each other nothing."
            return Page(title, [summary, *self._between_ipus(), self.program.page()])
        columns = ["collective", "groups of", "said", "bytes", "compiled", "bytes", ""]
        rows = [
            [e.kind, str(e.group_size), str(e.expected), bytes_text(e.expected_bytes), str(e.compiled)]
            + [bytes_text(e.compiled_bytes), e.verdict]
            for e in self.exchanges
        ]
        notes = ["Nothing is sent that the program does not say." if not self.differences else "Something differs."]
        if self.is_ordered:
            notes.append("CPU devices of several processes sum in the order of the replicas, by all-to-all.")
        return Page(title, [*notes, Table(columns, rows), *self._between_ipus(), self.program.page()])

    def _between_ipus(self) -> list[str]:
        if self.copied is None:
            return []
        expected, compiled = bytes_text(self.copied.expected_bytes), bytes_text(self.copied.compiled_bytes)
        return [
            f"IPUs copy {self.copied.compiled} tensors of {compiled} in all from each other; the program says "
            f"{self.copied.expected} of {expected}."
        ]


def _repeated_text(exchange: Exchange) -> str:
    if not exchange.repeated_bytes:
        return ""
    again = bytes_text(exchange.repeated_bytes)
    return f"; {again} of these are sent again, as there is not enough memory to keep what has come"


class _OrderedRecorder(OrderedSums, ExchangeRecorder):
    """Recorder of the exchanges by which CPU devices of several processes sum."""


def communication_of_program(ir: Ir, program: CompiledProgram) -> CommunicationReport:
    """Compare a compiled program's traffic with its Ir. See `Session.communication`."""
    check_whole(program, "communication")
    expected, count = communication_of(ir), program.layout.replicas.count
    copied = _copied(expected, program)
    if program.layout.replicas.mesh is None:
        return CommunicationReport(program=expected, is_sent=False, exchanges=(), copied=copied)
    totals: dict[tuple[str, int], _Totals] = {}
    added: set[tuple[str, int]] = set()
    is_ordered = sums_are_ordered(program.layout.replicas)
    for each in (communication_of(ir, _OrderedRecorder) if is_ordered else expected).collectives:
        size = 2 if each.kind == "collective-permute" else each.group_size
        total = totals.setdefault((each.kind, size), _Totals())
        total.expected += each.turns
        total.expected_bytes += each.turns * each.bytes
        if each.is_added:
            added.add((each.kind, size))
        else:
            total.needed_bytes += each.needed * each.bytes
    for collective in account_of_program(program).collectives:
        total = totals.setdefault((collective.kind, collective.group_size or count), _Totals())
        total.compiled += collective.runs
        total.compiled_bytes += collective.runs * collective.bytes
        total.repeated_bytes += collective.runs * collective.bytes * collective.is_repeated
    exchanges = tuple(
        Exchange(kind=kind, group_size=size, **vars(total), verdict=_verdict(kind, size, totals, added))
        for (kind, size), total in totals.items()
    )
    return CommunicationReport(
        program=expected, is_sent=True, exchanges=exchanges, copied=copied, is_ordered=is_ordered
    )


def _copied(expected: Communication, program: CompiledProgram) -> Copied | None:
    """Copies between IPUs; `None` unless IPUs are separate devices."""
    if len(program.layout.ipus) == 1:
        return None
    count, nbytes = expected.totals.get(COPY, (0, 0))
    timing = copies_of(program)
    return Copied(expected=count, expected_bytes=nbytes, compiled=timing.copies, compiled_bytes=timing.copied_bytes)


@dataclass(eq=False)
class _Totals:
    """Sums over all exchanges of one kind and group size, with the fields of `Exchange`."""

    expected: int = 0
    expected_bytes: int = 0
    needed_bytes: int = 0
    compiled: int = 0
    compiled_bytes: int = 0
    repeated_bytes: int = 0


def _verdict(
    kind: str, size: int, totals: Mapping[tuple[str, int], _Totals], added: Collection[tuple[str, int]]
) -> Verdict:
    """Classify how XLA compiled exchanges of one kind; `added` lists kinds with exchanges added to other exchanges."""
    compared = totals[kind, size]
    expected, upper, lower = compared.expected, compared.expected_bytes, compared.needed_bytes
    alternatives = [totals.get((each, size), _Totals()) for each in ("reduce-scatter", "all-gather")]
    moved = [each for each in alternatives if each.compiled_bytes < each.needed_bytes]
    all_reduce = totals.get(("all-reduce", size), _Totals())
    is_made_up_for = (
        all_reduce.needed_bytes + sum(each.needed_bytes - each.compiled_bytes for each in moved)
        <= all_reduce.compiled_bytes
        <= all_reduce.expected_bytes + sum(each.expected_bytes - each.compiled_bytes for each in moved)
    )
    if moved and is_made_up_for:
        if compared in moved:
            return "as all-reduce"
        if compared is all_reduce:
            expected, upper = expected + sum(each.expected for each in moved), compared.compiled_bytes
            lower = upper
    if not lower <= compared.compiled_bytes <= upper or compared.compiled > expected:
        return "differs"
    if compared.compiled_bytes < upper:
        return "added first" if (kind, size) in added else "not all needed"
    return "the same" if compared.compiled == expected else "merged"
