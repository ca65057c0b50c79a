"""Liveness of the buffers of a compiled program over its schedule, from its HLO text.

XLA has ordered the instructions; a buffer is live from the instruction that writes it to the last one that reads it.
Loops are walked once: carried values stay in place. XLA may leave gaps between buffers, so it allocates a little more
than the live bytes at the peak.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from popxl.analysis.memory import LiveTensor, Moment
from runtime.costs.hlo import Computation, Instruction, Module, Shape

_ALIASES = frozenset("bitcast tuple opt-barrier optimization-barrier add-dependency domain".split())
"""Instructions whose results are their operands."""


@dataclass(eq=False)
class Buffer:
    """Buffer on the device.

    Attributes:
        name: name of the buffer, with its line, dtype and shape.
        bytes: size in bytes; 0 if it is elsewhere: in host memory, or in on-chip memory.
        first: the step that writes it; -1 for the program's arguments.
        last: the last step that reads it.
    """

    name: str
    bytes: int
    first: int
    last: int


@dataclass
class Schedule:
    """Steps of a compiled program, with the buffers live during each.

    Attributes:
        buffers: buffers that they write, without arguments and results of the program.
    """

    steps: list[Instruction] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    def live_at(self, step: int) -> list[Buffer]:
        """Buffers live during a step, the largest first."""
        return sorted((b for b in self.buffers if b.first <= step <= b.last), key=lambda b: -b.bytes)

    def live_bytes(self) -> list[int]:
        """Bytes live during each step."""
        changes = [0] * (len(self.steps) + 1)
        for buffer in self.buffers:
            changes[buffer.first] += buffer.bytes
            changes[buffer.last + 1] -= buffer.bytes
        return [*accumulate(changes[:-1])]

    def moments(self) -> tuple[Moment, ...]:
        """Steps for a memory report."""
        allocated = [0] * len(self.steps)
        for buffer in self.buffers:
            allocated[buffer.first] += buffer.bytes
        return tuple(
            Moment(name=step_label(step), held=live - own, inside=own)
            for step, live, own in zip(self.steps, self.live_bytes(), allocated, strict=True)
        )

    def tensors(self) -> tuple[LiveTensor, ...]:
        """The buffers that later steps read, as a report of memory has them."""
        return tuple(
            LiveTensor(name=b.name, bytes=b.bytes, first=b.first, last=b.last)
            for b in self.buffers
            if b.bytes and b.last > b.first
        )


def schedule_of(module: Module) -> Schedule:
    """Schedule of a compiled program."""
    walk = _Walk()
    arguments = {number: _arguments(each) for number, each in module.entry.parameters.items()}
    results = walk.computation(module.entry, arguments)
    program_io = {id(buffer) for each in (*arguments.values(), results) for buffer in each}
    walk.schedule.buffers = [b for b in walk.schedule.buffers if id(b) not in program_io and b.bytes]
    return walk.schedule


def step_label(instruction: Instruction) -> str:
    """Short description of an instruction: its operation, as JAX names it, and its source line."""
    operation = instruction.scope.rpartition("/")[2] or instruction.kind
    return f"{operation} ({instruction.line})" if instruction.line else operation


def _arguments(parameter: Instruction) -> list[Buffer]:
    return [Buffer(parameter.scope or parameter.name, shape.bytes, -1, -1) for shape in parameter.results]


class _Walk:
    """Walk through the computations of a module in execution order.

    Live ranges grow during the walk, without `popxl.base.liveness`: after its last step a loop reads all of its carried
    values once more, and so does the program its results.
    """

    def __init__(self) -> None:
        self.schedule = Schedule()

    def computation(self, computation: Computation, arguments: dict[int, list[Buffer]]) -> list[Buffer]:
        """Add the steps of a computation; returns the buffers of its result."""
        values: dict[str, list[Buffer]] = {}
        for instruction in computation.instructions.values():
            if instruction.opcode == "parameter":
                values[instruction.name] = arguments.get(instruction.number, [])
                continue
            operands = [values.get(name, []) for name in instruction.arguments]
            values[instruction.name] = self._results(instruction, operands)
        results = values[computation.root.name]
        self._extend_lives(results)
        return results

    def _extend_lives(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            buffer.last = len(self.schedule.steps) - 1

    def _results(self, instruction: Instruction, operands: list[list[Buffer]]) -> list[Buffer]:
        """Buffers of an instruction's results, after adding its steps."""
        opcode, flat = instruction.opcode, [buffer for each in operands for buffer in each]
        if opcode in _ALIASES:
            return flat
        if opcode == "get-tuple-element":
            index = int(instruction.attribute("index") or 0)
            return [flat[index]] if index < len(flat) and len(instruction.results) == 1 else flat
        if opcode.endswith(("-done", "-update")):
            self._step(instruction, flat)
            return flat[-len(instruction.results) :]  # operands come first
        if opcode == "while":
            (body,) = instruction.called
            self.computation(body, {0: flat})
            self._extend_lives(flat)
            return flat
        if opcode == "call":
            (callee,) = instruction.called
            return self.computation(callee, dict(enumerate(operands)))
        overwritten = _overwritten(instruction)
        buffers: list[Buffer] = []
        self._step(instruction, flat)
        for i, shape in enumerate(instruction.results):
            number = overwritten.get(i)
            if number is not None and number < len(operands) and len(operands[number]) == 1:
                buffers += operands[number]
            else:
                buffers.append(self._new_buffer(instruction, shape))
        return buffers

    def _step(self, instruction: Instruction, operands: Sequence[Buffer]) -> None:
        self.schedule.steps.append(instruction)
        self._extend_lives(operands)

    def _new_buffer(self, instruction: Instruction, shape: Shape) -> Buffer:
        now = len(self.schedule.steps) - 1
        name = f"{step_label(instruction)}: {shape.dtype}[{', '.join(map(str, shape.dimensions))}]"
        buffer = Buffer(name, shape.bytes if shape.memory == 0 else 0, now, now)
        self.schedule.buffers.append(buffer)
        return buffer


_ALIASING = re.compile(r"\{(\d*)\}: ?\((\d+), ?\{\}")


def _overwritten(instruction: Instruction) -> dict[int, int]:
    """Operands that an instruction overwrites with its results: operand numbers by result number."""
    if instruction.kind == "dynamic-update-slice":
        return {0: 0}
    if stated := instruction.text.partition("output_to_operand_aliasing=")[2]:
        aliasing = stated[: stated.find("}}") + 1]
        return {int(result or 0): int(operand) for result, operand in _ALIASING.findall(aliasing)}
    if instruction.kind != "fusion":
        return {}
    root = instruction.called[0].root
    overwritten = {}
    for i, result in enumerate(root.operands if root.opcode == "tuple" else [root]):
        if result is not None and (update := result.source).opcode == "dynamic-update-slice":
            target = update.operands[0]
            if target is not None and target.source.opcode == "parameter":
                overwritten[i] = target.source.number
    return overwritten
