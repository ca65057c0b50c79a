"""`LineCost`: work and memory of the source lines of a program, derived from its compiled code."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from popxl.base.group_by import group_by
from popxl.base.records import Record
from runtime.costs.hlo import Instruction, Module
from runtime.costs.schedule import Buffer, schedule_of
from runtime.costs.work import Account, account_of
from runtime.lowering.scopes import source_of


class LineCost(Record):
    """Work of one source line's kernels in one run, on one chip. A fusion counts at the line of its result.

    Attributes:
        line: the line, `train.py:12`; "" for kernels whose line XLA does not say.
        kernels: number of kernel executions.
        flops: floating point operations.
        bytes_accessed: bytes that they read and write.
        live_bytes: bytes of buffers that the line has written and that are live at the peak.
        kinds: computations in a run, including those in fusions, by operation and dtype: `{"dot f32": 7, "while": 1}`.
    """

    line: str
    kernels: int
    flops: int
    bytes_accessed: int
    live_bytes: int = 0
    kinds: Mapping[str, int] = {}


_PLAIN = frozenset(
    "parameter constant tuple get-tuple-element bitcast bitcast-convert broadcast iota reshape after-all call "
    "async-start async-done async-update add-dependency domain opt-barrier optimization-barrier partition-id "
    "replica-id".split()
)
"""Instructions that say little about a line: compilers add and drop them freely."""


def line_of(instruction: Instruction) -> str:
    """The user's source line of an instruction; "" where it is not known."""
    return source_of(instruction.scope) or instruction.line


def lines_of(modules: Sequence[tuple[Module, int]]) -> tuple[LineCost, ...]:
    """Costs of source lines, most bytes first.

    Args:
        modules: the executables of a program, each with how often a run carries it out.
    """
    account = Account()  # of lines
    kinds: defaultdict[str, Counter[str]] = defaultdict(Counter)
    live: dict[str, int] = {}
    for module, times in modules:
        account.add(account_of(module, line_of), times)
        for line, kind, count in _kinds(module):
            kinds[line][kind] += times * count
        at_peak = {line: sum(buffer.bytes for buffer in costs) for line, costs in live_buffers(module).items()}
        if sum(at_peak.values()) > sum(live.values()):
            live = at_peak
    work = account.graphs
    costs = (
        LineCost(
            line=line,
            kernels=work[line].kernels,
            flops=work[line].flops,
            bytes_accessed=work[line].bytes,
            live_bytes=live.get(line, 0),
            kinds=dict(sorted(kinds[line].items())),
        )
        for line in {**work, **live, **kinds}
    )
    return tuple(sorted(costs, key=lambda each: (-each.bytes_accessed, each.line)))


def live_buffers(module: Module) -> dict[str, list[Buffer]]:
    """Live buffers at an executable's peak, by the lines that write them."""
    schedule = schedule_of(module)
    live = schedule.live_bytes()
    at_peak = schedule.live_at(live.index(max(live))) if live else ()
    return group_by(at_peak, lambda buffer: line_of(schedule.steps[buffer.first]))


def _kinds(module: Module) -> Iterator[tuple[str, str, int]]:
    """Kinds of executed instructions: lines, operations with dtypes, and counts."""
    for instruction, times in module.entry.runs(inside_fusions=True):
        if instruction.opcode not in _PLAIN and not instruction.opcode.endswith("-done"):
            is_typed = instruction.results and instruction.kind not in ("fusion", "conditional", "while")
            dtype = f" {instruction.results[0].dtype}" if is_typed else ""
            yield line_of(instruction), f"{instruction.kind}{dtype}", times


# Arguments -----------------------------------------------------------------------------------------------------------


def arguments_of(
    modules: Sequence[tuple[Module, int]], names: Mapping[str, str]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the executables' arguments by name, and of those that results overwrite.

    Args:
        names: replacements for some of the names.
    """
    arguments, overwritten = Counter[str](), Counter[str]()
    for module, _ in modules:
        for number, parameter in module.entry.parameters.items():
            name, bytes = names.get(parameter.scope, parameter.scope), sum(shape.bytes for shape in parameter.results)
            if name:
                arguments[name] += bytes
                overwritten[name] += bytes if number in module.overwritten else 0
    return dict(sorted(arguments.items())), {name: n for name, n in sorted(overwritten.items()) if n}
