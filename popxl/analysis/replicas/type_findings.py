"""Contradictions between replication types, with messages: reductions of shards, functions of partial sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from popxl.analysis.replicas.axis_types import (
    FLAT,
    FLAT_SHARDS,
    NEVER,
    NONLINEAR_TERMS,
    OWN,
    OWN_DATA,
    PARTIAL,
    REPLICATED,
    SAME,
    SHARDED,
    TERMS_PLUS_SHARED,
    VARYING,
    AxisType,
    ReplicaType,
    is_term,
)
from popxl.analysis.replicas.means import share_of_mean
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
        self.divided: Sequence[int] = ()  # positions of axes along which layers are divided
        self.found: dict[tuple[Op, str], Finding] = {}

    def find(
        self, category: str, op: Op, t: Tensor, axes: Sequence[int], message: str, is_certain: bool = False
    ) -> None:
        """Note a finding, once for an op."""
        found = self.report.finding(category, op, t, axes, message, is_certain)
        self.found.setdefault((op, category), found)

    def variable_update(self, v: Variable, was: ReplicaType, op: Op, by: ReplicaType, own: Sequence[int]) -> None:
        """Check the updates of a variable along its `own_axes`."""
        along = self.report.along
        reduced = [i for i in own if by[i].kind is REPLICATED and by[i].reduced is not NEVER]
        gathered = [i for i in own if by[i] == SAME] if _is_gathered_reduction(op) else []
        if reduced or gathered:
            self.report.reduced_updates[v] = op, tuple(sorted((*reduced, *gathered)))
        if terms := [i for i in own if by[i].kind is PARTIAL and was[i].kind is SHARDED]:
            self.find(
                "partial update", op, v, terms,
                f"`{v.path}` has pieces on replicas along {along(terms)}, and each is changed by a term of a sum over "
                "them. Reduce that first, with `ops.collectives.replicated_all_reduce`.",
            )  # fmt: skip
        if unreduced := [i for i in own if was[i] == FLAT_SHARDS]:
            self.find(
                "shards of different values", op, v, unreduced,
                f"replicas along {along(unreduced)} have shards of `{v.path}`, and each changes its shard by a value "
                "of its own, such as a gradient that is not reduced. Reduce it first; "
                "`ops.collectives.replicated_reduce_scatter` does both.",
            )  # fmt: skip
        shards = [i for i in own if was[i].kind is SHARDED]
        if turned := [i for i in shards if by[i].dimension not in (None, FLAT, was[i].dimension)]:
            d, e = was[turned[0]].dimension, by[turned[0]].dimension
            self.find(
                "shards of another layout", op, v, turned,
                f"`{v.path}` has pieces along its dimension {d} on replicas along {along(turned)}, and is changed by "
                f"pieces along dimension {e}. Transpose these, or divide the variable otherwise.",
            )  # fmt: skip

    def missing_sum(self, op: Op, types: Sequence[ReplicaType], is_given: Callable[[Tensor], bool]) -> None:
        """Find terms, presumably, with something replicated added, that enter the next divided layer without a sum."""
        for t, with_more, weight, own in zip(op.inputs, types, op.inputs[::-1], types[::-1], strict=True):
            divided = [i for i in self.divided if own[i] == AxisType(VARYING, own=OWN)]
            axes = [i for i in divided if with_more[i].own is TERMS_PLUS_SHARED]
            if axes and is_given(weight):
                self.find(
                    "partial plus replicated", op, t, axes,
                    f"`{t.path}` was made of products with what each replica along {self.report.along(axes)} has of "
                    f"its own, and of something that is the same on all, and is multiplied with `{weight.path}`, which "
                    "is divided among them, too. The products are terms of a sum, presumably: reduce them first, and "
                    "add then.",
                )  # fmt: skip

    def nonlinear_use(self, op: Op, axis: int, types: Sequence[AxisType], flaw: str) -> None:
        """Record nonlinear use of summation terms."""
        t = next((t for t, along in zip(op.inputs, types, strict=True) if along.kind is PARTIAL), op.inputs[0])
        others = [
            other
            for other, along in zip(op.inputs, types, strict=True)
            if along.kind <= REPLICATED and other.dtype.is_floating_point
        ]
        if flaw == "linear" and all(self.is_compared(each, axis) for each in op.outputs):
            return
        terms = f"replicas along {self.report.along([axis])} have terms of a sum, `{t.path}`, and"
        if flaw == "linear":
            self.find(
                "nonlinear function of partial", op, t, [axis],
                f"{terms} {op.op_type} of each is taken, which is not linear: the sum of the results is not that of "
                f"the sum. Reduce `{t.path}` first, with `ops.collectives.replicated_all_reduce`.",
            )  # fmt: skip
        else:
            more = f"`{others[0].path}`" if others else "a constant"
            self.find(
                "partial plus replicated", op, t, [axis],
                f"{terms} each adds {more}, which is the same on all: the sum has it as many times as there are "
                f"replicas. Reduce `{t.path}` first, with `ops.collectives.replicated_all_reduce`, and add then.",
            )  # fmt: skip

    def is_compared(self, t: Tensor, axis: int) -> bool:
        """Whether replicas along an axis use a value of each, such as the norm of a shard, for nothing but the largest
        or smallest of these."""
        readers = [op for op in t.graph.ops if t in op.inputs]
        return (
            bool(readers)
            and t not in t.graph.outputs
            and all(op.kind.between_replicas and op.attributes.get("op") in ("max", "min") for op in readers)
            and all(axis in self.report.known_mesh.axes_of(op) for op in readers)
        )

    def gather(self, op: Op, before: ReplicaType, axes: Sequence[int]) -> None:
        """Find shards that are gathered along another axis than the one that they are divided along."""
        others = [i for i, along in enumerate(before) if along == FLAT_SHARDS and i not in axes]
        if others and all(before[i] != FLAT_SHARDS for i in axes):
            t, along = op.inputs[0], self.report.along(others)
            self.find(
                "shards of another layout", op, t, others,
                f"replicas along {along} have shards of `{t.path}`, and copies of a shard are gathered over "
                f"{self.report.along(axes)}, as if these were the whole. Gather it over {along}.",
            )  # fmt: skip

    def reduction(self, op: Op, before: ReplicaType, axes: Sequence[int], reduction: str) -> bool:
        """Check a reduction of partial values. Returns whether it sums equal values."""
        (t, *_), over = op.inputs, self.report.along
        if _is_own_data(before, axes):  # the operand of most reductions
            return False
        repeated = bool(axes) and reduction in ("add", "square_add") and all(before[i].kind is REPLICATED for i in axes)
        if repeated:
            self.find(
                REPEATED, op, t, axes,
                f"`{t.path}` is the same on all replicas along {over(axes)}, and is summed over them: the result is as "
                "many times too large as there are. Leave that reduction out, or take the mean.",
            )  # fmt: skip
        terms = [i for i in axes if is_term(before[i])]
        if terms and reduction == "mean" and share_of_mean(t) is None:
            self.find(
                "mean of a sum", op, t, terms,
                f"`{t.path}` is a term of a sum over {over(terms)}, and the mean of the terms is taken: the result is "
                "as many times too small as there are replicas. Write \"add\".",
            )  # fmt: skip
        for own, flaw in ((TERMS_PLUS_SHARED, "more"), (NONLINEAR_TERMS, "linear")):
            if reduction == "add" and (spoiled := [i for i in axes if before[i].own is own]):
                self.sum_of_flawed_terms(op, t, spoiled, flaw)
        if cut := [i for i in axes if before[i].dimension is not None and reduction != "max"]:
            self.find(
                REDUCED_SHARDS, op, t, cut,
                f"replicas along {over(cut)} have different pieces of `{t.path}`, and these are reduced as if they "
                "were terms of a sum. Gather them, with `replicated_all_gather`, or reduce over another axis.",
            )  # fmt: skip
        return repeated

    def sum_of_flawed_terms(self, op: Op, t: Tensor, axes: Sequence[int], flaw: str) -> None:
        """Record a sum of presumed terms after an operation that does not commute with their sum."""
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

    def contradiction(self, op: Op, before: ReplicaType, axes: Sequence[int]) -> None:
        """Find a statement that values are equal, of shards or of terms of a sum."""
        if wrong := [i for i in axes if before[i].kind in (SHARDED, PARTIAL)]:
            kinds = " and ".join(dict.fromkeys(before[i].kind.name.lower() for i in wrong))
            self.find(
                "contradicted statement", op, op.inputs[0], wrong,
                f"`{op.inputs[0].path}` is said to be the same on all replicas along {self.report.along(wrong)}, and "
                f"it is {kinds}.", is_certain=True,
            )  # fmt: skip


@lru_cache(256)
def own_axes(was: ReplicaType, by: ReplicaType) -> tuple[int, ...]:
    """The axes along which replicas have a variable of their own, or shards along a dimension, and change it by values
    that are equal, terms of a sum, or shards along another dimension; or pieces, and change them by own data."""
    own = [i for i, along in enumerate(was) if along.kind in (VARYING, SHARDED)]
    return tuple(
        i
        for i in own
        if (by[i] == OWN_DATA if was[i] == FLAT_SHARDS else by[i].kind in (REPLICATED, PARTIAL))
        or (by[i].kind is SHARDED and by[i] != was[i] and was[i] != FLAT_SHARDS)
    )


@lru_cache(256)
def _is_own_data(type_: ReplicaType, axes: Sequence[int]) -> bool:
    return all(type_[i] == OWN_DATA for i in axes)


def _is_gathered_reduction(op: Op) -> bool:
    """Whether an update takes what was reduced in shards, and gathered."""
    for t in op.inputs:
        if (gather := t.producer) is not None and gather.kind.between_replicas and "op" not in gather.attributes:
            scatter = gather.inputs[0].producer
            return scatter is not None and scatter.attributes.get("op") in ("add", "mean")
    return False
