"""Copies between device and host memory in a compiled program: those that overlap with kernels."""

from __future__ import annotations

from typing import NamedTuple

from runtime.costs.hlo import HOST, Instruction, Module
from runtime.costs.work import is_kernel, work_of


class HostCopies(NamedTuple):
    """Number of copies between device and host memory in a run.

    Attributes:
        overlapped: while other kernels run.
        exposed: while other kernels wait.
    """

    overlapped: int = 0
    exposed: int = 0


def host_copies(module: Module) -> HostCopies:
    """Count the copies in a compiled program. A copy without a kernel between its start and its end is exposed."""
    beside = alone = 0
    for instruction, times in module.entry.runs():
        shapes = [*instruction.results, *(shape for each in instruction.operand_shapes for shape in each)]
        if is_kernel(instruction) and any(shape.memory == HOST for shape in shapes):
            is_beside = instruction.opcode.endswith("-start") and _has_kernels_before_end(instruction)
            beside, alone = beside + times * is_beside, alone + times * (not is_beside)
    return HostCopies(beside, alone)


def _has_kernels_before_end(start: Instruction) -> bool:
    """Whether kernels run between the start of an asynchronous instruction and its end."""
    instructions = [*start.computation.instructions.values()]
    end = next((each for each in start.users if each.opcode.endswith("-done")), start)
    between = instructions[instructions.index(start) + 1 : instructions.index(end)]
    return any(is_kernel(each) and work_of(each).kernels for each in between)
