"""Copies between device and host memory in a compiled program: those that overlap with kernels."""

from __future__ import annotations

from typing import NamedTuple

from runtime.costs.hlo import HOST, Computation, Instruction, Module
from runtime.costs.work import is_kernel, work_of


class HostCopies(NamedTuple):
    """How often a run copies between the two memories.

    Attributes:
        beside: while other kernels run.
        alone: while other kernels wait.
    """

    beside: int = 0
    alone: int = 0


def host_copies(module: Module) -> HostCopies:
    """Count the copies in a compiled program. A copy that starts and ends without a kernel between is alone."""
    beside = alone = 0
    for computation, instruction, times in module.runs():
        if not is_kernel(instruction):
            continue
        shapes = [*instruction.results, *(s for each in computation.operands(instruction) for s in each)]
        if any(shape.memory == HOST for shape in shapes):
            is_beside = instruction.opcode.endswith("-start") and _has_kernels_before_end(
                module, computation, instruction
            )
            beside, alone = beside + times * is_beside, alone + times * (not is_beside)
    return HostCopies(beside, alone)


def _has_kernels_before_end(module: Module, computation: Computation, start: Instruction) -> bool:
    """Whether kernels run between the start of an asynchronous instruction and its end."""
    names = [*computation.instructions]
    end = next((each.name for each in computation.users(start.name) if each.opcode.endswith("-done")), start.name)
    between = (computation.instructions[name] for name in names[names.index(start.name) + 1 : names.index(end)])
    return any(is_kernel(each) and work_of(module, computation, each).kernels for each in between)
