"""Replication types: the distribution of each value of a program over replicas, along each axis of its mesh.

A value is *replicated* along an axis if it is the same on all replicas that differ along it only; *sharded* if they
have shards of one value, or results computed from shards; *partial* if the value is the sum over replicas; and
*varying* if each has its own. One pass over the ops infers them, callees at their calls, each graph once for each tuple
of input types. The effect of an op follows from its operands, except for contractions and ops between replicas, whose
traits declare it. No values are computed: the result of an op with an unknown effect is *unknown*, and has no findings.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from popxl.analysis.mesh import Mesh
from popxl.analysis.op_index import ProgramOps
from popxl.core.printing import algebra
from popxl.core.tensor import Tensor, Variable

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph


class Replication(IntEnum):
    """Distribution of a value over replicas along an axis. A result of two values usually has the larger of their
    types.

    Attributes:
        ZERO: zeros on all.
        GIVEN: the same on all replicas by construction: constants, and scalars from the host's feeds.
        REPLICATED: the same on all.
        SHARDED: shards of one value, or results computed from them.
        PARTIAL: terms of a sum, which is the value.
        VARYING: each has its own.
        UNKNOWN: result of an op with an unknown effect.
    """

    __hash__ = int.__hash__  # which is not that of enumerations in Python

    ZERO = -1
    GIVEN = 0
    REPLICATED = 1
    SHARDED = 2
    PARTIAL = 3
    VARYING = 4
    UNKNOWN = 5


class Reduced(IntEnum):
    """Whether a value was made of one that was reduced along the axis. What differs then may be meant, as the program
    has reduced what it wants to be the same.

    Attributes:
        NEVER: of none.
        ONCE: of one.
        AGAIN: of a sum of what was the same already.
    """

    __hash__ = int.__hash__

    NEVER = 0
    ONCE = 1
    AGAIN = 2


class OwnVariables(IntEnum):
    """What was made of variables that each replica has for itself, if nothing else differs between replicas.

    Such variables are mostly pieces whose dimension the program does not say, and products of two such values, terms of
    a sum; so they are taken to be if they are summed in the end, and only then.

    Attributes:
        OWN: something of these variables.
        TERMS: presumed terms of a sum.
        TERMS_PLUS_SHARED: such terms to which something was added on each replica.
        NONLINEAR_TERMS: results of a function of such terms that is not linear.
    """

    __hash__ = int.__hash__

    OWN = 0
    TERMS = 1
    TERMS_PLUS_SHARED = 2
    NONLINEAR_TERMS = 3


ZERO, GIVEN, REPLICATED, SHARDED, PARTIAL, VARYING, UNKNOWN = Replication
NEVER, ONCE, AGAIN = Reduced
OWN, TERMS, TERMS_PLUS_SHARED, NONLINEAR_TERMS = OwnVariables


class AxisType(NamedTuple):
    """Distribution of a value along one axis of the mesh.

    Attributes:
        kind: distribution.
        dimension: for shards, the dimension that they are along, or `FLAT`; `None` if that is not known.
        reduced: for replicated and varying values, whether they were reduced along the axis.
        own: for varying values, what was made of the replicas' own variables, if nothing else differs; else `None`.
    """

    kind: Replication
    dimension: int | None = None
    reduced: Reduced = NEVER
    own: OwnVariables | None = None


ReplicaType = tuple[AxisType, ...]
"""Type of a value: its distribution along each axis of the mesh."""

FLAT = -1
"""Dimension of the shards of a flattened value."""
ZEROS = AxisType(ZERO)
LITERAL = AxisType(GIVEN)
SAME = AxisType(REPLICATED)
REDUCED = AxisType(REPLICATED, reduced=ONCE)
REPEATED_SUM = AxisType(REPLICATED, reduced=AGAIN)
SHARDS = AxisType(SHARDED)
FLAT_SHARDS = AxisType(SHARDED, FLAT)
SUM = AxisType(PARTIAL)
OWN_DATA = AxisType(VARYING)
NOT_KNOWN = AxisType(UNKNOWN)

REPEATED = "repeated reduction"
REDUCED_SHARDS = "reduced shards"


@dataclass(frozen=True, eq=False)
class Finding:
    """Something that a program can hardly mean.

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


def finding(mesh: Mesh, category: str, op: Op, t: Tensor, axes: Iterable[int], message: str) -> Finding:
    """A finding that is not certain, about a tensor along some axes."""
    return Finding(category, False, op, t.path, tuple(mesh.names[i] for i in axes), message)


@dataclass(frozen=True, eq=False)
class ReplicaReduction:
    """How a value is reduced over replicas; one object for all equal ones.

    Attributes:
        name: name of the reduction, such as `"add"`.
        before: type of the operand.
        axes: positions of the axes.
        completed: those along which replicas have different values before.
        weight: weight of one of these values in the result.
    """

    name: str
    before: ReplicaType
    axes: tuple[int, ...]
    completed: tuple[int, ...]
    weight: float


@lru_cache(256)
def reduction(name: str, before: ReplicaType, axes: tuple[int, ...], sizes: tuple[int, ...]) -> ReplicaReduction:
    """A reduction along axes, on a mesh of these sizes."""
    weight = 1.0
    for i in axes:
        if name == "mean" and before[i].kind > REPLICATED:
            weight /= sizes[i]
        elif name != "mean" and before[i].kind <= REPLICATED:
            weight *= sizes[i]
    return ReplicaReduction(name, before, axes, tuple(i for i in axes if before[i].kind is VARYING), weight)


@dataclass(eq=False)
class Report:
    """The types of a program's values, and the findings.

    Attributes:
        mesh: the axes; `None` if the groups of the program do not form a mesh, so that nothing could be typed.
        findings: likely mistakes, in the order of the program's lines.
        notes: valid programs that are easily misread.
        untyped: why values are unknown: the ops that make them, with the reason.
        graphs: for each graph, types of its inputs and variables, for each combination with which it is called.
        types: type of each tensor, over all calls.
        diverged: shared or sharded variables that differ between replicas after a run, with the positions of the axes.
        maybe_diverged: as `diverged`, if there was a reduction along these axes before the changes.
        reduced_updates: variables with a value for each replica, whose changes are all equal reduced values; with the
            op, and the positions of the axes.
        reductions: reductions over replicas.
        fed: type of the host's feeds; empty if it feeds single numbers only.
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

    def text(self, t: Tensor) -> str:
        """Type of a tensor as text, such as `{data: varying, tensor: sharded 1}`; empty for replicated tensors."""
        return "" if self.mesh is None or t not in self.types else type_text(self.mesh, self.types[t])

    def listing(self, graph: Graph) -> str:
        """Printed graph with the types of its values: `y: f32[4, 2]{data: partial} = ...`."""
        return algebra(graph, self.text)

    def __str__(self) -> str:
        if self.mesh is None:
            return "The groups of replicas do not form a mesh: nothing could be checked."
        parts = [str(each) for each in self.findings] or ["Nothing was found."]
        parts += [f"note: {each}" for each in self.notes]
        parts += [f"not typed: {op.op_type}, {why} ({op.source})" for op, why in self.untyped.items()]
        for graph in self.graphs:
            held = graph.variables if not graph.id else graph.inputs
            rows = [("in ", t) for t in held] + [("out", t) for t in graph.outputs]
            shown = [f"    {way} {t.path}: {text}" for way, t in rows if (text := self.text(t))]
            parts += [f"{graph.title}:", *shown] if shown else []
        return "\n".join(parts)


def type_text(mesh: Mesh, held: ReplicaType) -> str:
    """Text of a type, without replicated axes."""
    parts = []
    for name, along in zip(mesh.names, held, strict=True):
        if along.kind > REPLICATED:
            where = {None: "", FLAT: " flat"}.get(along.dimension, f" {along.dimension}")
            parts.append(f"{name}: {along.kind.name.lower()}{where}")
    return f"{{{', '.join(parts)}}}" if parts else ""


@lru_cache(4096)
def join(left: ReplicaType, right: ReplicaType) -> ReplicaType:
    """Join of two types."""
    return tuple(_join_axis(a, b) for a, b in zip(left, right, strict=True))


def _join_axis(a: AxisType, b: AxisType) -> AxisType:
    if a == b:
        return a
    larger = max(a.kind, b.kind)
    if larger not in (REPLICATED, VARYING):
        return AxisType(larger) if a.kind == b.kind else a if a.kind is larger else b
    reduced, own = max(a.reduced, b.reduced), {each.own for each in (a, b) if each.kind is VARYING}
    if not own or None in own or reduced is AGAIN:
        return AxisType(larger, reduced=reduced)
    return AxisType(VARYING, reduced=reduced, own=own.pop() if len(own) == 1 else OWN)


def is_term(along: AxisType) -> bool:
    """Whether replicas hold terms of a sum, or presumably do."""
    return along.kind is PARTIAL or along.own is TERMS


def join_axis(all: Sequence[AxisType]) -> AxisType:
    """The join of several, along one axis."""
    found = all[0]
    for each in all[1:]:
        found = _join_axis(found, each)
    return found


def begins_different(mesh: Mesh, v: Variable, axis: int) -> bool:
    """Whether replicas along an axis have different numbers to begin with."""
    if v.replica_grouping.num_groups == 1:
        return False
    groups = np.asarray(v.replica_grouping.assignment).reshape(mesh.sizes)
    first = np.broadcast_to(groups.take([0], axis), groups.shape)
    rows = v.numbers()
    return not np.array_equal(rows[groups.ravel()], rows[first.ravel()], equal_nan=v.dtype.is_floating_point)


def variable_types(mesh: Mesh, variables: Iterable[Variable], learned: Container[Tensor]) -> Iterator[ReplicaType]:
    """Declared types of variables. Separate values of replicas count as data, unless they are `learned`."""
    known: dict[Hashable, ReplicaType] = {}  # many variables have the same grouping, that of a weight or of the Ir
    for v in variables:
        grouping, place = v.replica_grouping, v.location_info
        is_learned = grouping.num_groups > 1 and v in learned and v.dtype.is_floating_point
        key = (id(grouping), v.group_axis, is_learned, id(place.buffer if place.sharded else None))
        found = known.get(key)
        if found is None:
            found = known[key] = _variable_type(mesh, v, is_learned)
        yield found


def _variable_type(mesh: Mesh, v: Variable, is_learned: bool) -> ReplicaType:
    shared = mesh.spanned_axes(v.replica_grouping)
    if shared is None:
        return (NOT_KNOWN,) * len(mesh.names)
    own = AxisType(SHARDED, v.group_axis)
    if v.group_axis is None:
        own = AxisType(VARYING, own=OWN if is_learned else None)
    place = v.location_info
    divided: tuple[int, ...] = ()
    if place.sharded and place.buffer is not None:
        group = v.replica_grouping.const_rg
        count = place.buffer.shard_over
        divided = shared if group is None or count is None else mesh.along(group.stride, count)
    return _declared_type(len(mesh.names), shared, own, divided)


@lru_cache(256)
def _declared_type(width: int, shared: tuple[int, ...], own: AxisType, divided: tuple[int, ...]) -> ReplicaType:
    return tuple(FLAT_SHARDS if i in divided else SAME if i in shared else own for i in range(width))


@lru_cache(4096)
def join_all(types: tuple[ReplicaType, ...]) -> ReplicaType:
    """The join of several types."""
    found = types[0]
    for each in types:
        if each != found:
            found = join(found, each)
    return found
