"""Parser of a compiled program's HLO text: instructions, and their execution counts.

The text is XLA's HLO after all its passes: it lists the instructions that run, in order. Here it becomes computations
of instructions that know each other: an instruction its operands, its users, and the computations that it calls.
`runtime.costs.work` computes their costs.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

HOST = 5
"""Memory space number of the host. 0 is device memory; others are on the chip."""


@dataclass(frozen=True)
class Shape:
    """Array shape: XLA dtype name, dimensions, and memory space number."""

    dtype: str
    dimensions: tuple[int, ...]
    memory: int = 0

    @property
    def elements(self) -> int:
        return math.prod(self.dimensions)

    @property
    def bytes(self) -> int:
        return math.ceil(self.elements * _bits(self.dtype) / 8)


def _bits(dtype: str) -> int:
    """Bits per element: 8 for `pred` and names without digits, 0 for tokens."""
    if dtype in ("token", "opaque"):
        return 0
    match = re.match(r"(?:bf|[a-z])(\d+)", dtype)
    return int(match[1]) if match else 8


@dataclass(eq=False)
class Instruction:
    """HLO instruction.

    Attributes:
        opcode: HLO opcode, such as "fusion" or "all-reduce-start".
        results: shapes of the results; several, if it is a tuple.
        arguments: names of its operands, or the text in their place.
        text: text after the operands: attributes and metadata.
        is_root: whether the instruction is its computation's result.
        computation: the computation that it is part of.
        line: the user's source line that it comes from, "train.py:12"; "" where XLA does not say.
    """

    name: str
    opcode: str
    results: tuple[Shape, ...]
    arguments: tuple[str, ...]
    text: str
    is_root: bool
    computation: Computation = field(repr=False)
    line: str = ""

    @property
    def kind(self) -> str:
        """Opcode, without the `-start` suffix of asynchronous instructions."""
        return self.opcode.removesuffix("-start")

    def attribute(self, name: str) -> str:
        """Value after `name=` in the instruction text; "" if absent."""
        match = re.search(rf"\b{name}=((?:{{[^}}]*}}|[^\s,{{])+)", self.text)
        return match[1] if match else ""

    def sizes(self, name: str) -> tuple[int, ...]:
        """Integer list attribute `name`."""
        return tuple(map(int, re.findall(r"-?\d+", self.attribute(name))))

    @property
    def target(self) -> str:
        """Function of a custom call; "" for other instructions."""
        return self.attribute("custom_call_target").strip('"')

    @property
    def number(self) -> int:
        """Number of a parameter."""
        return int(self.arguments[0])

    @property
    def operands(self) -> list[Instruction | None]:
        """Instructions that make the operands; `None` for text in place of one."""
        return [self.computation.instructions.get(name) for name in self.arguments]

    @property
    def operand_shapes(self) -> list[tuple[Shape, ...]]:
        """Result shapes of each operand; empty for an unknown operand."""
        return [() if each is None else each.results for each in self.operands]

    @property
    def source(self) -> Instruction:
        """First instruction of the chain of bitcasts that ends here."""
        before = self.operands[0] if self.opcode == "bitcast" else None
        return self if before is None else before.source

    @property
    def users(self) -> Iterator[Instruction]:
        """Users of this instruction, directly or through a bitcast."""
        for each in self.computation.instructions.values():
            if self.name in each.arguments:
                if each.opcode == "bitcast":
                    yield from each.users
                else:
                    yield each

    @cached_property
    def called(self) -> list[Computation]:
        """Called computations: fusion body, callee, branches, or loop body."""
        names = re.findall(r"%([\w.\-]+)", self.attribute("branch_computations"))
        single = ("calls", "to_apply", "body", "true_computation", "false_computation")
        names += [attribute.lstrip("%") for name in single if (attribute := self.attribute(name))]
        return [computations[name] for name in names if name in (computations := self.computation.module)]

    @property
    def trip_count(self) -> int:
        """Trip count of a loop, from XLA's annotation or its condition; 1 if neither is known."""
        if match := re.search(r'"known_trip_count":{"n":"(\d+)"}', self.text):
            return int(match[1])
        last = self.computation.module[self.attribute("condition").lstrip("%")].root
        if last.opcode != "compare" or last.attribute("direction") != "LT":
            return 1
        limit = last.operands[1]
        return int(limit.arguments[0]) if limit is not None and limit.opcode == "constant" else 1

    @cached_property
    def group_size(self) -> int:
        """Chips per group of a collective; 0 means all chips."""
        return len(self.groups[0]) if self.groups else 0

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of a collective, by numbers of chips; none means all chips.

        Which these are is written in three ways: `{{0,1},{2,3}}`; `[2,2]<=[4]`, two groups of two; and, with JAX 0.12,
        by axes of a mesh, `mesh['a'=2,'b'=4] {'a'}`, of which an axis may be divided: `{'b':(1)2}` takes two of it.
        """
        groups = re.search(r"\b(?:replica_groups|source_target_pairs)=(.*)", self.text)
        if groups is None:
            return ()
        if mesh := re.match(r"mesh\[([^\]]*)\][^{]*\{([^}]*)\}", groups[1]):
            return _groups_of_mesh(mesh[1], mesh[2])
        if iota := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", groups[1]):
            shape, sizes, order = ([int(n) for n in numbers.split(",")] if numbers else [] for numbers in iota.groups())
            ids = np.arange(math.prod(sizes)).reshape(sizes)
            return _as_groups((ids.transpose(order) if order else ids).reshape(-1, shape[-1]))
        listed = re.match(r"\{(\{[\d,]*\}(?:,\{[\d,]*\})*)\}", groups[1])
        lists = re.findall(r"\{([\d,]*)\}", listed[1]) if listed else []
        return tuple(tuple(map(int, each.split(","))) for each in lists if each)

    @cached_property
    def scope(self) -> str:
        """Origin of the instruction: names of JAX functions and scopes, separated by slashes."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return match[1] if match else ""

    @property
    def cycles(self) -> int:
        """XLA's cycle estimate for TPUs; 0 if absent."""
        match = re.search(r'"estimated_cycles":"(\d+)"', self.text)
        return int(match[1]) if match else 0


def _as_groups(ids: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in ids)


def _groups_of_mesh(axes: str, selected: str) -> tuple[tuple[int, ...], ...]:
    """Groups along mesh axes, each possibly divided into a part before, the selected one, and one after."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    divisions = {
        name: (int(before or 1), int(chosen or sizes[name])) for name, before, chosen in _PARTS.findall(selected)
    }
    shape, group_dims = list[int](), list[int]()
    for name, size in sizes.items():
        before, chosen = divisions.get(name, (size, 1))
        group_dims += [len(shape) + 1] if name in divisions else []
        shape += [before, chosen, size // (before * chosen)]
    other_dims = [d for d in range(len(shape)) if d not in group_dims]
    ids = np.arange(math.prod(shape)).reshape(shape).transpose(other_dims + group_dims)
    return _as_groups(ids.reshape(-1, math.prod(shape[d] for d in group_dims)))


_PARTS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


@dataclass(eq=False)
class Computation:
    """Instructions by name, in execution order.

    Attributes:
        module: the computations of the same program, by name.
    """

    name: str
    module: Mapping[str, Computation] = field(repr=False)
    instructions: dict[str, Instruction] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameter instructions, keyed by number."""
        return {i.number: i for i in self.instructions.values() if i.opcode == "parameter"}

    @cached_property
    def root(self) -> Instruction:
        """Root instruction."""
        return next(i for i in reversed(self.instructions.values()) if i.is_root)

    def runs(self, inside_fusions: bool = False) -> Iterator[tuple[Instruction, int]]:
        """Every executed instruction, with its execution count: all branches of a conditional, those of callees and
        loops after their callers.

        Args:
            inside_fusions: whether instructions of fusions count, in addition to the fusions.
        """
        entered = {"while", "call", "conditional", "async-start", *(["fusion"] if inside_fusions else [])}
        waiting: list[tuple[Computation, int]] = [(self, 1)]
        while waiting:
            computation, times = waiting.pop()
            for instruction in computation.instructions.values():
                yield instruction, times
                if instruction.opcode in entered:
                    callee_times = times * instruction.trip_count if instruction.opcode == "while" else times
                    waiting += ((callee, callee_times) for callee in instruction.called)


@dataclass(frozen=True)
class Module:
    """Compiled program: computations and entry.

    Attributes:
        overwritten: numbers of the arguments that results overwrite.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    overwritten: frozenset[int] = frozenset()


# Reading -------------------------------------------------------------------------------------------------------------

_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\) -> .*{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<= ]*)\](?:{([^}]*)})?")
_MEMORY = re.compile(r"S\((\d+)\)")


def parse_hlo(text: str) -> Module:
    """Parse HLO text into computations.

    Example:
        >>> module = parse_hlo(jax.jit(jnp.sin).lower(1.0).compile().as_text())
        >>> [instruction.opcode for instruction, _ in module.entry.runs()]
    """
    computations: dict[str, Computation] = {}
    entry = current = Computation("", computations)
    lines, derived = _user_lines(text), list[Instruction]()
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[2]] = Computation(header[2], computations)
            entry = current if header[1] else entry
        elif start := _INSTRUCTION.match(line):
            instruction = _instruction(line[start.end() :], start[2], bool(start[1]), current)
            current.instructions[instruction.name] = instruction
            if frame := _FRAME_OF.search(line):
                instruction.line = lines.get(frame[1], "")
            else:
                derived.append(instruction)
    for instruction in derived:
        instruction.line = _line_of_parts(instruction)
    aliases = text.partition("\n")[0].partition("input_output_alias=")[2]
    overwritten = frozenset(int(number) for number in _ALIASED.findall(aliases.partition("alias) }")[0] + "alias)"))
    return Module(computations, entry, overwritten)


_ALIASED = re.compile(r"\((\d+), \{[\d, ]*\}, [\w-]*alias\)")
_FRAME_OF = re.compile(r"\bstack_frame_id=(\d+)")
_HOME = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_OURS = tuple(os.path.join(_HOME, name, "") for name in ("popxl", "runtime", "popxl_addons", "poptorch"))
_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) {file_name_id=(\d+) .*?\bline=(\d+) ", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) {file_location_id=(\d+) parent_frame_id=(\d+)}", re.MULTILINE)


def _user_lines(text: str) -> dict[str, str]:
    """Innermost source line outside of installed libraries, for each stack frame in the tables of an HLO text."""
    files = dict(_FILE.findall(text.partition("FunctionNames")[0]))
    locations = {number: (files.get(file, ""), line) for number, file, line in _LOCATION.findall(text)}
    lines: dict[str, str] = {}
    for number, location, parent in _FRAME.findall(text):  # callers come before callees
        file, line = locations.get(location, ("", ""))
        is_library = "site-packages" in file or "dist-packages" in file or file.startswith(_OURS)
        # XLA prints the number of the caller plus one
        lines[number] = lines.get(str(int(parent) - 1), "") if is_library else f"{file.rpartition('/')[2]}:{line}"
    return lines


def _line_of_parts(instruction: Instruction) -> str:
    """Source line of an instruction that XLA derived: of its fusion's result, or of the first operand that has one; ""
    if none has."""
    sources = (*(called.root for called in instruction.called), *instruction.operands)
    return next((each.line for each in sources if each is not None and each.line), "")


def _instruction(text: str, name: str, is_root: bool, computation: Computation) -> Instruction:
    """Parse an instruction's text after the equals sign: type, opcode, operands in parentheses, attributes."""
    end = _closing(text) + 1 if text[0] == "(" else text.index(" ")
    opcode, _, rest = text[end:].strip().partition("(")
    stop = _closing("(" + rest) - 1
    arguments = tuple(operand.rpartition("%")[2].strip() for operand in _split_operands(rest[:stop]) if operand.strip())
    return Instruction(name, opcode, tuple(shapes(text[:end])), arguments, rest[stop + 1 :], is_root, computation)


def shapes(text: str) -> Iterator[Shape]:
    """Parse all array shapes in a type."""
    for dtype, dimensions, layout in _SHAPE.findall(text):
        memory = _MEMORY.search(layout)
        yield Shape(dtype, tuple(map(int, re.findall(r"\d+", dimensions))), int(memory[1]) if memory else 0)


def _closing(text: str) -> int:
    """Index of the bracket that closes the first bracket of `text`. Strings may contain arbitrary brackets."""
    depth, is_quoted = 0, False
    for i, letter in enumerate(text):
        if letter == '"' and text[i - 1] != "\\":
            is_quoted = not is_quoted
        elif not is_quoted:
            depth += (letter in "({") - (letter in ")}")
            if depth == 0:
                return i
    return len(text)


def _split_operands(text: str) -> list[str]:
    """Split operands at top-level commas."""
    operands, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            operands.append(text[start:i])
            start = i + 1
    return [*operands, text[start:]]
