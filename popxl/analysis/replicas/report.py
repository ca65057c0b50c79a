"""`Report`: the types of a program's values along each axis of replicas, and the findings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from popxl.analysis.mesh import Mesh
from popxl.analysis.replicas.axis_types import FLAT, REPLICATED, VARYING, ReplicaType
from popxl.analysis.replicas.op_index import ProgramOps
from popxl.core.printing import algebra
from popxl.core.tensor import Tensor, Variable

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph

REPEATED = "repeated reduction"
REDUCED_SHARDS = "reduced shards"


@dataclass(frozen=True, eq=False)
class Finding:
    """Likely mistake in a program.

    Attributes:
        category: short name of the mistake, such as `"repeated reduction"`.
        certain: whether numbers are certain to be wrong.
        op: op with the mistake.
        tensor: path of the tensor.
        axes: names of the axes.
        message: the mistake, and its remedy.
    """

    category: str
    certain: bool
    op: Op
    tensor: str
    axes: tuple[str, ...]
    message: str

    @property
    def line(self) -> str:
        """The line of the program."""
        return str(self.op.source)

    def __str__(self) -> str:
        source = self.op.source
        text = f"`{source.text}`, {source}" if source.text else str(source)
        return f"{self.category}: {self.message} ({text})"


@dataclass(frozen=True, eq=False)
class ReplicaReduction:
    """Reduction of a value over replicas; equal reductions share an object.

    Attributes:
        name: name of the reduction, such as `"add"`.
        operand_type: type of the operand.
        axes: positions of the axes.
        varying_axes: those along which the operand varies.
        weight: weight of one of these values in the result.
    """

    name: str
    operand_type: ReplicaType
    axes: tuple[int, ...]
    varying_axes: tuple[int, ...]
    weight: float


@lru_cache(256)
def reduction(name: str, operand_type: ReplicaType, axes: tuple[int, ...], sizes: tuple[int, ...]) -> ReplicaReduction:
    """A reduction along axes, on a mesh of these sizes."""
    weight = 1.0
    for i in axes:
        if name == "mean" and operand_type[i].kind > REPLICATED:
            weight /= sizes[i]
        elif name != "mean" and operand_type[i].kind <= REPLICATED:
            weight *= sizes[i]
    return ReplicaReduction(name, operand_type, axes, tuple(i for i in axes if operand_type[i].kind is VARYING), weight)


@dataclass(eq=False)
class Report:
    """The types of a program's values, and the findings.

    Attributes:
        mesh: the axes; `None` if the groups of the program do not form a mesh, so that nothing could be typed.
        findings: likely mistakes, in the order of the program's lines.
        notes: facts about valid programs that are easily misread.
        untyped: ops with results of unknown type, with the reason.
        graphs: for each graph, types of its inputs and variables, for each combination with which it is called.
        types: type of each tensor, over all calls.
        diverged: shared or sharded variables that differ between replicas after a run, with the positions of the axes.
        maybe_diverged: as `diverged`, if there was a reduction along these axes before the changes.
        reduced_updates: variables with a value for each replica, whose changes are all equal reduced values; with the
            op, and the positions of the axes.
        reductions: reductions over replicas.
        fed: type of the host's feeds; empty if it feeds scalars only.
        index: ops of the program, by their traits.
    """

    mesh: Mesh | None
    findings: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    untyped: dict[Op, str] = field(default_factory=dict)
    graphs: dict[Graph, list[tuple[ReplicaType, ...]]] = field(default_factory=dict)
    types: dict[Tensor, ReplicaType] = field(default_factory=dict)
    diverged: dict[Variable, tuple[int, ...]] = field(default_factory=dict)
    maybe_diverged: dict[Variable, tuple[int, ...]] = field(default_factory=dict)
    reduced_updates: dict[Variable, tuple[Op, tuple[int, ...]]] = field(default_factory=dict)
    reductions: dict[Op, ReplicaReduction] = field(default_factory=dict)
    fed: ReplicaType = ()
    index: ProgramOps = field(default_factory=ProgramOps)

    @property
    def known_mesh(self) -> Mesh:
        """The mesh; an assertion error without one."""
        assert self.mesh is not None
        return self.mesh

    def along(self, axes: Iterable[int]) -> str:
        """Names of axes for a sentence: `` `data` and `tensor` ``."""
        return self.known_mesh.text(axes)

    def finding(
        self, category: str, op: Op, t: Tensor, axes: Iterable[int], message: str, is_certain: bool = False
    ) -> Finding:
        """A finding about a tensor along some axes, by their positions."""
        return Finding(category, is_certain, op, t.path, tuple(self.known_mesh.names[i] for i in axes), message)

    def text(self, t: Tensor) -> str:
        """Type of a tensor as text, such as `{data: varying, tensor: sharded 1}`; empty for replicated tensors."""
        return "" if self.mesh is None or t not in self.types else type_text(self.mesh, self.types[t])

    def listing(self, graph: Graph) -> str:
        """Printed graph with the types of its values: `y: f32[4, 2]{data: partial} = ...`."""
        return algebra(graph, self.text)

    def __str__(self) -> str:
        if self.mesh is None:
            return "The groups of replicas do not form a mesh: nothing could be checked."
        lines = [str(finding) for finding in self.findings] or ["Nothing was found."]
        lines += [f"note: {finding}" for finding in self.notes]
        lines += [f"not typed: {op.op_type}, {reason} ({op.source})" for op, reason in self.untyped.items()]
        for graph in self.graphs:
            boundary = graph.variables if not graph.id else graph.inputs
            rows = [("in ", t) for t in boundary] + [("out", t) for t in graph.outputs]
            rows_text = [f"    {direction} {t.path}: {text}" for direction, t in rows if (text := self.text(t))]
            lines += [f"{graph.title}:", *rows_text] if rows_text else []
        return "\n".join(lines)


def type_text(mesh: Mesh, type_: ReplicaType) -> str:
    """Text of a type, without replicated axes."""
    entries = []
    for name, along in zip(mesh.names, type_, strict=True):
        if along.kind > REPLICATED:
            dimension = {None: "", FLAT: " flat"}.get(along.dimension, f" {along.dimension}")
            entries.append(f"{name}: {along.kind.name.lower()}{dimension}")
    return f"{{{', '.join(entries)}}}" if entries else ""
