"""Contradictions between replication types, with messages: reductions of shards, functions of partial sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from popxl.analysis.replicas.axis_types import (
    FLAT,
    FLAT_SHARDS,
    NEVER,
    NONLINEAR_TERMS,
    OWN_DATA,
    PARTIAL,
    REPLICATED,
    SAME,
    SHARDED,
    TERMS_PLUS_SHARED,
    VALUES,
    VARYING,
    AxisType,
    ReplicaType,
    is_term,
)
from popxl.analysis.replicas.means import mean_factor
from popxl.analysis.replicas.report import REDUCED_SHARDS, REPEATED, Finding, Report
from popxl.core.recording import Op
from popxl.core.tensor import Tensor, Variable


class TypeFindings:
    """The findings of an inference, each category once for an op.

    Args:
        report: report whose updates by reduced values are recorded.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.layer_axes: Sequence[int] = ()  # positions of axes along which layers are divided
        self.by_op: dict[tuple[Op, str], Finding] = {}

    def find(
        self, category: str, op: Op, t: Tensor, axes: Sequence[int], message: str, is_certain: bool = False
    ) -> None:
        """Record a finding, once per op and category."""
        finding = self.report.finding(category, op, t, axes, message, is_certain)
        self.by_op.setdefault((op, category), finding)

    def variable_update(
        self, v: Variable, declared: ReplicaType, op: Op, change: ReplicaType, axes: Sequence[int]
    ) -> None:
        """Check the update of a variable along its `own_axes`."""
        along = self.report.along
        reduced = [i for i in axes if change[i].kind is REPLICATED and change[i].reduced is not NEVER]
        gathered = [i for i in axes if change[i] == SAME] if _is_gathered_reduction(op) else []
        if reduced or gathered:
            self.report.reduced_updates[v] = op, tuple(sorted((*reduced, *gathered)))
        if terms := [i for i in axes if change[i].kind is PARTIAL and declared[i].kind is SHARDED]:
            self.find(
                "partial update", op, v, terms,
                f"`{v.path}` has pieces on replicas along {along(terms)}, and each is changed by a term of a sum over "
                "them. Reduce that first, with `ops.collectives.replicated_all_reduce`.",
            )  # fmt: skip
        if unreduced := [i for i in axes if declared[i] == FLAT_SHARDS]:
            self.find(
                "shards of different values", op, v, unreduced,
                f"replicas along {along(unreduced)} have shards of `{v.path}`, and each changes its shard by a value "
                "of its own, such as a gradient that is not reduced. Reduce it first; "
                "`ops.collectives.replicated_reduce_scatter` does both.",
            )  # fmt: skip
        shards = [i for i in axes if declared[i].kind is SHARDED]
        if transposed := [i for i in shards if change[i].dimension not in (None, FLAT, declared[i].dimension)]:
            declared_dimension, change_dimension = declared[transposed[0]].dimension, change[transposed[0]].dimension
            self.find(
                "shards of another layout", op, v, transposed,
                f"`{v.path}` has pieces along its dimension {declared_dimension} on replicas along "
                f"{along(transposed)}, and is changed by pieces along dimension {change_dimension}. Transpose these, "
                "or divide the variable otherwise.",
            )  # fmt: skip

    def missing_sum(self, op: Op, types: Sequence[ReplicaType], is_input_or_variable: Callable[[Tensor], bool]) -> None:
        """Find presumed terms plus a replicated value that enter the next divided layer without a sum."""
        for operand, type_, weight, weight_type in zip(op.inputs, types, op.inputs[::-1], types[::-1], strict=True):
            layer_axes = [i for i in self.layer_axes if weight_type[i] == AxisType(VARYING, per_replica=VALUES)]
            axes = [i for i in layer_axes if type_[i].per_replica is TERMS_PLUS_SHARED]
            if axes and is_input_or_variable(weight):
                self.find(
                    "partial plus replicated", op, operand, axes,
                    f"`{operand.path}` was made of products with what each replica along {self.report.along(axes)} has "
                    f"of its own, and of something that is the same on all, and is multiplied with `{weight.path}`, "
                    "which is divided among them, too. The products are terms of a sum, presumably: reduce them first, "
                    "and add then.",
                )  # fmt: skip

    def nonlinear_use(self, op: Op, axis: int, types: Sequence[AxisType], flaw: str) -> None:
        """Find a nonlinear function of terms, or a replicated value added to each."""
        t = next((t for t, along in zip(op.inputs, types, strict=True) if along.kind is PARTIAL), op.inputs[0])
        replicated = [
            u
            for u, along in zip(op.inputs, types, strict=True)
            if along.kind <= REPLICATED and u.dtype.is_floating_point
        ]
        if flaw == "linear" and all(self.is_compared(result, axis) for result in op.outputs):
            return
        terms = f"replicas along {self.report.along([axis])} have terms of a sum, `{t.path}`, and"
        if flaw == "linear":
            self.find(
                "nonlinear function of partial", op, t, [axis],
                f"{terms} {op.op_type} of each is taken, which is not linear: the sum of the results is not that of "
                f"the sum. Reduce `{t.path}` first, with `ops.collectives.replicated_all_reduce`.",
            )  # fmt: skip
        else:
            added = f"`{replicated[0].path}`" if replicated else "a constant"
            self.find(
                "partial plus replicated", op, t, [axis],
                f"{terms} each adds {added}, which is the same on all: the sum has it as many times as there are "
                f"replicas. Reduce `{t.path}` first, with `ops.collectives.replicated_all_reduce`, and add then.",
            )  # fmt: skip

    def is_compared(self, t: Tensor, axis: int) -> bool:
        """Whether a per-replica value, such as the norm of a shard, is only reduced to a maximum or minimum."""
        readers = [op for op in t.graph.ops if t in op.inputs]
        return (
            bool(readers)
            and t not in t.graph.outputs
            and all(op.kind.between_replicas and op.attributes.get("op") in ("max", "min") for op in readers)
            and all(axis in self.report.known_mesh.axes_of(op) for op in readers)
        )

    def gather(self, op: Op, type_: ReplicaType, axes: Sequence[int]) -> None:
        """Find shards that are gathered along another axis than the sharded one."""
        shard_axes = [i for i, along in enumerate(type_) if along == FLAT_SHARDS and i not in axes]
        if shard_axes and all(type_[i] != FLAT_SHARDS for i in axes):
            t, along = op.inputs[0], self.report.along(shard_axes)
            self.find(
                "shards of another layout", op, t, shard_axes,
                f"replicas along {along} have shards of `{t.path}`, and copies of a shard are gathered over "
                f"{self.report.along(axes)}, as if these were the whole. Gather it over {along}.",
            )  # fmt: skip

    def reduction(self, op: Op, type_: ReplicaType, axes: Sequence[int], reduction: str) -> bool:
        """Check a reduction, by the type of its operand. Returns whether it sums equal values."""
        (t, *_), axis_names = op.inputs, self.report.along
        if _is_own_data(type_, axes):  # the operand of most reductions
            return False
        repeated = bool(axes) and reduction in ("add", "square_add") and all(type_[i].kind is REPLICATED for i in axes)
        if repeated:
            self.find(
                REPEATED, op, t, axes,
                f"`{t.path}` is the same on all replicas along {axis_names(axes)}, and is summed over them: the result "
                "is as many times too large as there are. Leave that reduction out, or take the mean.",
            )  # fmt: skip
        terms = [i for i in axes if is_term(type_[i])]
        if terms and reduction == "mean" and mean_factor(t) is None:
            self.find(
                "mean of a sum", op, t, terms,
                f"`{t.path}` is a term of a sum over {axis_names(terms)}, and the mean of the terms is taken: the "
                "result is as many times too small as there are replicas. Write \"add\".",
            )  # fmt: skip
        for kind, flaw in ((TERMS_PLUS_SHARED, "more"), (NONLINEAR_TERMS, "linear")):
            if reduction == "add" and (flawed := [i for i in axes if type_[i].per_replica is kind]):
                self.sum_of_flawed_terms(op, t, flawed, flaw)
        if sharded := [i for i in axes if type_[i].dimension is not None and reduction != "max"]:
            self.find(
                REDUCED_SHARDS, op, t, sharded,
                f"replicas along {axis_names(sharded)} have different pieces of `{t.path}`, and these are reduced as "
                "if they were terms of a sum. Gather them, with `replicated_all_gather`, or reduce over another axis.",
            )  # fmt: skip
        return repeated

    def sum_of_flawed_terms(self, op: Op, t: Tensor, axes: Sequence[int], flaw: str) -> None:
        """Record a sum of presumed terms after a flaw."""
        summed = f"`{t.path}` is summed over {self.report.along(axes)}, and was made"
        if flaw == "linear":
            self.find(
                "nonlinear function of partial", op, t, axes,
                f"{summed} by a function that is not linear of products with what each replica has of its own, which "
                "are terms of a sum: the sum of the results is not that of the sum. Reduce before.",
            )  # fmt: skip
        else:
            self.find(
                "partial plus replicated", op, t, axes,
                f"{summed} of products with what each replica has of its own, and of something that is the same on "
                "all: the sum has that as many times as there are replicas. Reduce first, and add then.",
            )  # fmt: skip

    def contradiction(self, op: Op, type_: ReplicaType, axes: Sequence[int]) -> None:
        """Find an assertion of equal values for shards or terms of a sum."""
        if wrong := [i for i in axes if type_[i].kind in (SHARDED, PARTIAL)]:
            kinds = " and ".join(dict.fromkeys(type_[i].kind.name.lower() for i in wrong))
            self.find(
                "contradicted statement", op, op.inputs[0], wrong,
                f"`{op.inputs[0].path}` is said to be the same on all replicas along {self.report.along(wrong)}, and "
                f"it is {kinds}.", is_certain=True,
            )  # fmt: skip


@lru_cache(256)
def own_axes(declared: ReplicaType, change: ReplicaType) -> tuple[int, ...]:
    """Axes along which the type of an update contradicts that of a per-replica or sharded variable: equal values, terms
    of a sum, or shards along another dimension; for flat shards, per-replica data."""
    separate_axes = [i for i, along in enumerate(declared) if along.kind in (VARYING, SHARDED)]
    return tuple(
        i
        for i in separate_axes
        if (change[i] == OWN_DATA if declared[i] == FLAT_SHARDS else change[i].kind in (REPLICATED, PARTIAL))
        or (change[i].kind is SHARDED and change[i] != declared[i] and declared[i] != FLAT_SHARDS)
    )


@lru_cache(256)
def _is_own_data(type_: ReplicaType, axes: Sequence[int]) -> bool:
    return all(type_[i] == OWN_DATA for i in axes)


def _is_gathered_reduction(op: Op) -> bool:
    """Whether an update takes a gathered reduce-scatter."""
    for t in op.inputs:
        if (gather := t.producer) is not None and gather.kind.between_replicas and "op" not in gather.attributes:
            scatter = gather.inputs[0].producer
            return scatter is not None and scatter.attributes.get("op") in ("add", "mean")
    return False
