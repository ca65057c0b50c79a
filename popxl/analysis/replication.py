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
from typing import TYPE_CHECKING

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
        GIVEN: the same on all replicas by construction: constants, and scalars from the host's feeds.
        REPLICATED: the same on all.
        SHARDED: shards of one value, or results computed from them.
        PARTIAL: terms of a sum, which is the value.
        VARYING: each has its own.
        UNKNOWN: result of an op with an unknown effect.
    """

    __hash__ = int.__hash__  # which is not that of enumerations in Python

    GIVEN = 0
    REPLICATED = 1
    SHARDED = 2
    PARTIAL = 3
    VARYING = 4
    UNKNOWN = 5


GIVEN, REPLICATED, SHARDED, PARTIAL, VARYING, UNKNOWN = Replication

AxisType = tuple[Replication, int | None]
"""How a value is held along one axis: its distribution, and a qualifier, or `None`.

* What is sharded has the dimension that it is divided along, if that is known; or `FLAT`.
* What is replicated or varying has `AFTER_REDUCTION` if a reduction along the axis has gone into it: what differs then
  may be meant, as the program has reduced what it wants to be the same. It has `AFTER_REPEATED_SUM` if that has summed
  what was the same already.
* What is varying has another one if nothing differs but variables of each replica's own, which the program changes.
  Such variables are mostly pieces whose dimension the program does not say, and products of two such values, terms of a
  sum; so they are taken to be if they are summed in the end, and only then. `OWN` is made of such variables, `TERMS`
  are presumed terms of a sum, `TERMS_PLUS_SHARED` are such terms to which something was added on each replica,
  `NONLINEAR_TERMS` are what a function that is not linear makes of them. `after_reduction` marks these."""

ReplicaType = tuple[AxisType, ...]
"""The same for each axis of the mesh: the type of a value."""

FLAT = -1
"""Qualifier of shards of a flattened value."""
AFTER_REDUCTION, AFTER_REPEATED_SUM = 1, 2
OWN, TERMS, TERMS_PLUS_SHARED, NONLINEAR_TERMS = -1, -2, -3, -4
REPEATED = "repeated reduction"
REDUCED_SHARDS = "reduced shards"
LITERAL: AxisType = (GIVEN, None)
SAME: AxisType = (REPLICATED, None)
REDUCED: AxisType = (REPLICATED, AFTER_REDUCTION)
REPEATED_SUM: AxisType = (REPLICATED, AFTER_REPEATED_SUM)
BY_REDUCED = (REDUCED, REPEATED_SUM)
OWN_DATA: AxisType = (VARYING, None)
NOT_KNOWN: AxisType = (UNKNOWN, None)


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
        if name == "mean" and before[i][0] > REPLICATED:
            weight /= sizes[i]
        elif name != "mean" and before[i][0] <= REPLICATED:
            weight *= sizes[i]
    return ReplicaReduction(name, before, axes, tuple(i for i in axes if before[i][0] is VARYING), weight)


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
    for name, (kind, dimension) in zip(mesh.names, held, strict=True):
        if kind > REPLICATED:
            where = (
                "" if dimension is None or kind is not SHARDED else " flat" if dimension == FLAT else f" {dimension}"
            )
            parts.append(f"{name}: {kind.name.lower()}{where}")
    return f"{{{', '.join(parts)}}}" if parts else ""


@lru_cache(4096)
def join(left: ReplicaType, right: ReplicaType) -> ReplicaType:
    """Join of two types."""
    return tuple(_join_axis(a, b) for a, b in zip(left, right, strict=True))


def _join_axis(a: AxisType, b: AxisType) -> AxisType:
    if a == b:
        return a
    larger = max(a[0], b[0])
    if larger in (REPLICATED, VARYING):
        qualifiers = [each for kind, each in (a, b) if kind in (REPLICATED, VARYING) and each is not None]
        most = max(qualifiers, default=None)
        if most is None or most == AFTER_REPEATED_SUM or larger is REPLICATED:
            return (larger, most)
        is_reduced = any(each == AFTER_REDUCTION or each < NONLINEAR_TERMS for each in qualifiers)
        own = {each for kind, each in (a, b) if kind is VARYING}
        if own.isdisjoint((None, AFTER_REDUCTION)):
            own = {before_reduction(each) for each in own}
            kept = own.pop() if len(own) == 1 else OWN
        else:
            kept = None
        return (VARYING, after_reduction(kept) if is_reduced else kept)
    return (larger, None) if a[0] == b[0] else a if a[0] is larger else b


def differs_by_own_variables(along: AxisType, qualifier: int | None = None) -> bool:
    """Whether nothing differs but variables of each replica's own; and if it is asked, in which way."""
    kind, now = along
    return kind is VARYING and now is not None and now < 0 and qualifier in (None, before_reduction(now))


def is_term(along: AxisType) -> bool:
    """Whether replicas presumably hold terms of a sum."""
    return along[0] is PARTIAL or (along[0] is VARYING and before_reduction(along[1]) == TERMS)


def before_reduction(qualifier: int | None) -> int | None:
    """Qualifier without its mark for reductions."""
    return qualifier if qualifier is None or qualifier >= NONLINEAR_TERMS else qualifier - NONLINEAR_TERMS


def after_reduction(qualifier: int | None) -> int | None:
    """Qualifier after a reduction."""
    if qualifier is None:
        return AFTER_REDUCTION
    return qualifier + NONLINEAR_TERMS if NONLINEAR_TERMS <= qualifier < 0 else qualifier


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
    own: AxisType = (SHARDED, v.group_axis)
    if v.group_axis is None:
        own = (VARYING, OWN if is_learned else None)
    place = v.location_info
    divided: tuple[int, ...] = ()
    if place.sharded and place.buffer is not None:
        group = v.replica_grouping.const_rg
        count = place.buffer.shard_over
        divided = shared if group is None or count is None else mesh.along(group.stride, count)
    return _declared_type(len(mesh.names), shared, own, divided)


@lru_cache(256)
def _declared_type(width: int, shared: tuple[int, ...], own: AxisType, divided: tuple[int, ...]) -> ReplicaType:
    shards: AxisType = (SHARDED, FLAT)
    return tuple(shards if i in divided else SAME if i in shared else own for i in range(width))


@lru_cache(4096)
def join_all(types: tuple[ReplicaType, ...]) -> ReplicaType:
    """The join of several types."""
    found = types[0]
    for each in types:
        if each != found:
            found = join(found, each)
    return found
