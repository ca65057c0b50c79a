"""Outlier detection among the reductions of a program: a gradient that is a sum where the others are means, a loss that
is reduced along fewer axes than the gradients, replicas with different initial values and equal updates.

An outlier may be intended, so only `check` reports it, and sessions do not warn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set

from popxl.analysis.replicas.axis_types import OWN_DATA, PARTIAL, REPLICATED, SAME, VARYING, is_term
from popxl.analysis.replicas.means import constant_number, is_replica_count, mean_factor
from popxl.analysis.replicas.reduced_values import (
    LINEAR,
    ReducedValue,
    Stored,
    Update,
    reduced_values,
    scaled,
)
from popxl.analysis.replicas.report import REDUCED_SHARDS, Finding, Report
from popxl.analysis.replicas.value_lints import (
    gathered_feed_axes,
    noise_lints,
    seed_lints,
    shards_of_own_values,
    stale_shards,
    transposed_weights,
    unread_batches,
)
from popxl.analysis.replicas.variable_types import starts_different
from popxl.base.group_by import group_by
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.core.traits import is_call
from popxl.graph import Graph


def outliers(report: Report) -> Iterator[Finding]:
    """All outliers and value lints of a program with inferred types."""
    if report.mesh is None:
        return
    updates: list[Update] = []
    stored: Stored = []
    for graph_updates, graph_stored in reduced_values(report):
        yield from _outlying_updates(report, graph_updates)
        updates += graph_updates
        stored += graph_stored
    _accept_gradients_of_shared(report, updates)
    yield from _loss_reductions(report, updates, stored)
    stated = {i for op in report.index.statements for i in report.known_mesh.axes_of(op)} | gathered_feed_axes(report)
    batches = {finding.op: finding for finding in (*unread_batches(report), *_same_batches(report))}
    yield from batches.values() if batches else _gradients_of_same_data(report, updates, stated)
    yield from _scaled_sums(report)
    yield from _exchanges_without_dual(report)
    yield from stale_shards(report)
    if shard_findings := [*shards_of_own_values(report)]:  # they explain other findings of their category
        report.findings = [finding for finding in report.findings if finding.category != shard_findings[0].category]
        yield from shard_findings
    yield from transposed_weights(report)
    same_feeds = stated | {i for i, along in enumerate(report.fed) if along.kind is REPLICATED}
    data_axes = {i for update in updates for i in update.axes}
    yield from seed_lints(report, data_axes, same_feeds)
    yield from noise_lints(report, data_axes)
    report.notes += _unreduced_numbers(report, updates)
    yield from _initial_values(report)


def _accept_gradients_of_shared(report: Report, group: Sequence[Update]) -> None:
    """Drop findings of summed shards for gradients of variables that replicas share: each replica has used the whole
    variable with its shard of other values, so the shards of the gradient are terms."""
    if not any(finding.category == REDUCED_SHARDS for finding in report.findings):
        return
    by_reduction: dict[Op, list[Update]] = defaultdict(list)
    for update in group:
        for op in update.value.reductions:
            by_reduction[op].append(update)
    shared = {
        op
        for op, users in by_reduction.items()
        if all(report.types[u.target][i].kind <= REPLICATED for u in users for i in report.reductions[op].axes)
    }
    report.findings = [
        finding for finding in report.findings if finding.category != REDUCED_SHARDS or finding.op not in shared
    ]


def _outlying_updates(report: Report, updates: Sequence[Update]) -> Iterator[Finding]:
    """Updates that differ from the majority of comparable ones by a factor of the replica count."""
    findings = [finding for group in _comparable_updates(updates) for finding in _minority_updates(report, group)]
    reported = {finding.op for finding in findings}
    yield from findings
    for group in _gradient_updates(updates):
        yield from (finding for finding in _mixed_gradients(report, group) if finding.op not in reported)


def _minority_updates(report: Report, group: Sequence[Update]) -> Iterator[Finding]:
    """Outliers in a group of comparable updates: the minority with another scale."""
    by_scale = _by_scale(group)
    majority = max(by_scale.values(), key=len)
    is_one_variable = len({update.target for update in group}) == 1  # a variable with two updates cannot mean both
    if len(group) == 2 and len(by_scale) == 2 and not is_one_variable:
        yield from _two_gradients(report, *group)
        return
    if 2 * (len(group) - len(majority)) > len(majority) and not is_one_variable:
        return
    for update in (update for minority in by_scale.values() if minority is not majority for update in minority):
        if _differ_by_count(report, update, majority[0]):
            yield from _outlier(report, update, majority[0], update.scale / majority[0].scale)


def _by_scale(updates: Iterable[Update]) -> dict[str, list[Update]]:
    """Updates grouped by the weight of one replica's value, to five digits."""
    return group_by(updates, lambda update: f"{update.scale:.5g}")


def _differ_by_count(report: Report, a: Update, b: Update) -> bool:
    """Test whether the ratio of two scales is a replica count, or its square for counts above two."""
    counts = [
        report.known_mesh.count(a.axes),
        *(op.attributes["group_size"] for op in (*a.value.reductions, *b.value.reductions)),
    ]
    return is_replica_count(a.scale / b.scale, *counts, *(n * n for n in counts if n > 2))


def _gradient_updates(updates: Iterable[Update]) -> Iterator[list[Update]]:
    """Groups of updates by gradients that are reduced along the same axes, by any op; one update per reduction."""
    by_axes: dict[Hashable, dict[Hashable, Update]] = defaultdict(dict)
    for update in updates:
        if update.axes and _is_gradient(update.value.reductions[0].inputs[0]):
            by_axes[update.axes].setdefault(update.value.reductions, update)
    for group in by_axes.values():
        if len({update.reduction_name for update in group.values()}) > 1:
            yield [*group.values()]


def _is_gradient(t: Tensor) -> bool:
    """Whether a value comes from a gradient graph, through linear ops, sums and views."""
    op = t.producer
    while op is not None and op.graph.gradient_of is None and not op.called_graphs:
        if op.op_type not in LINEAR | {"Sum"} and op.kind.view is None:
            return False
        op = op.inputs[0].producer
    return op is not None and (op.graph.gradient_of is not None or op.called_graphs[0].gradient_of is not None)


def _mixed_gradients(report: Report, group: Sequence[Update]) -> Iterator[Finding]:
    """Gradients that are sums over replicas where the majority are means, or the reverse; both kinds in a tie."""
    by_scale = _by_scale(group)
    majority = max(by_scale.values(), key=lambda candidates: (len(candidates), candidates[0].value.factor == 1))
    for candidates in by_scale.values():
        update, usual = candidates[0], majority[0]
        if candidates is majority or update.reduction_name == usual.reduction_name:
            continue
        if not _differ_by_count(report, update, usual):
            continue
        for member in candidates:
            yield from _outlier(report, member, usual, member.scale / usual.scale)
        if len(candidates) == len(majority):  # either may be wrong
            yield from _outlier(report, usual, update, usual.scale / update.scale)


def _comparable_updates(updates: Iterable[Update]) -> Iterator[list[Update]]:
    """Groups of updates along the same axes, by the same op with the same constants, whose scales differ."""

    def kind(update: Update) -> Hashable:
        groups = tuple((op.attributes["stride"], op.attributes["group_size"]) for op in update.value.reductions)
        return update.axes or groups, update.value.scalars, update.op.op_type

    for same_kind in group_by(updates, kind).values():
        if len({update.scale for update in same_kind}) > 1:
            yield from group_by(same_kind, lambda update: update.constants).values()


def _two_gradients(report: Report, a: Update, b: Update) -> Iterator[Finding]:
    """Outliers of a program with two gradients in the ratio of a replica count: both, unless one is scaled by a
    constant."""
    pairs = [(a, b), (b, a)]
    if (a.value.factor == 1) != (b.value.factor == 1):
        pairs = [pair for pair in pairs if pair[0].value.factor != 1]
    for update, usual in pairs:
        if _differ_by_count(report, update, usual):
            yield from _outlier(report, update, usual, update.scale / usual.scale)


def _outlier(report: Report, update: Update, reference: Update, ratio: float) -> Iterator[Finding]:
    """Finding of an update `ratio` times as large as a reference, due to a constant factor or another reduction."""
    op, usual_name = update.value.reductions[-1], reference.reduction_name
    ratio_text = f"{ratio:g} times as large as" if ratio > 1 else f"{1 / ratio:g} times smaller than"
    words = {"add": "sum", "mean": "mean"}
    own_word, reference_word = words[op.attributes["op"]], words[usual_name]
    over, other_variables = report.along(update.axes), f"other variables, such as `{reference.target.path}`"
    if own_word == reference_word:
        yield report.finding(
            "factor of replicas", update.value.scaled or op, update.target, update.axes,
            f"`{update.target.path}` is changed by the {own_word} over {over} times {update.value.factor:g}, and "
            f"{other_variables}, by the {reference_word} times {reference.value.factor:g}: what it gets is "
            f"{ratio_text} theirs, and there are as many replicas. Leave that factor out.",
        )  # fmt: skip
    elif (
        own_word == "sum" or mean_factor(op.inputs[0]) is None
    ):  # statistics of rows are means, however gradients are reduced
        yield report.finding(
            "mixed reductions", op, update.target, update.axes,
            f"`{update.target.path}` is changed by the {own_word} over {over}, and {other_variables}, by the "
            f"{reference_word}: what it gets is {ratio_text} theirs. Write \"{usual_name}\".",
        )  # fmt: skip


def _loss_reductions(report: Report, updates: Sequence[Update], stored: Stored) -> Iterator[Finding]:
    """Stored scalars, such as losses, with other reductions than the gradients."""
    by_axis: dict[int, set[str]] = defaultdict(set)
    for axes, r in {(update.axes, report.reductions[op]) for update in updates for op in update.value.reductions}:
        for i in {*axes}.intersection(r.axes):
            by_axis[i].add(r.name)
    reduced = {*by_axis}
    for t, value in stored:
        op = value.reductions[-1]
        along, scale = value.axes_and_weight(report)
        missing = [i for i, along in enumerate(report.types[t]) if along.kind is VARYING and i in reduced]
        if missing and (not along or not reduced.isdisjoint(along)):  # not the mean of an ensemble, for each part
            yield report.finding(
                "partly reduced number", op, t, missing,
                f"`{t.path}` is stored. It has been reduced, but not over {report.along(missing)}, as the gradients "
                f"are: each replica stores another number. Reduce it over {report.along(missing)}, too.",
            )  # fmt: skip
        operand = value.reductions[0].inputs[0]
        factor = mean_factor(operand)
        if factor is None or value.scalars or not along or any(by_axis[i] != {"mean"} for i in along):
            continue
        count = report.known_mesh.count(along)
        ratio, group_size = factor * scale * count, op.attributes["group_size"]
        if not (is_replica_count(ratio, count, group_size) and is_replica_count(scale * count, count, group_size)):
            continue  # a factor before the reduction is part of the loss
        if value.factor == 1 and ratio > 1:
            yield report.finding(
                "sum of means", op, t, along,
                f"`{operand.path}` is a mean over what a replica has, and `{t.path}`, which is stored, the sum of "
                f"these over {report.along(along)}, while the gradients are means over it. Write \"mean\".",
            )  # fmt: skip
        else:
            yield report.finding(
                "factor of replicas", value.scaled or op, t, along,
                f"`{operand.path}` is a mean over what a replica has, and `{t.path}`, which is stored, {ratio:g} times "
                f"the mean of these over {report.along(along)}, where there are {count} replicas. Leave that "
                "factor out.",
            )  # fmt: skip


def _unreduced_numbers(report: Report, updates: Sequence[Update]) -> Iterator[Finding]:
    """Stored scalars without a reduction over replicas' data. A note: the host receives those of all replicas."""
    reduced = {i for update in updates for i in update.axes}
    for op in report.index.exchanges:
        if not op.outputs and op.inputs and op.inputs[0].nelms == 1:
            t = op.inputs[0]
            types = report.types.get(t, ())  # constants have none
            local_axes = [i for i, axis_type in enumerate(types) if axis_type == OWN_DATA and i in reduced]
            if local_axes and t.dtype.is_floating_point:
                yield report.finding(
                    "local number", op, t, local_axes,
                    f"each replica along {report.along(local_axes)} stores its own `{t.path}`, of its own data. Take "
                    "the mean of what the host gets; or reduce it first.",
                )  # fmt: skip


def _exchanges_without_dual(report: Report) -> Iterator[Finding]:
    """Exchanges of a graph and of its gradient graph along different axes, which should be the same."""
    axes_in: dict[Graph, dict[Op, tuple[int, ...]]] = defaultdict(dict)
    for op in filter(_is_exchange, report.index.moves):
        axes_in[op.graph][op] = report.known_mesh.axes_of(op)
    for graph, axes_of in axes_in.items():
        forward = graph.gradient_of
        if forward not in axes_in:
            continue
        forward_axes = axes_in[forward]
        mismatches = {op: axes for op, axes in axes_of.items() if axes not in forward_axes.values()}
        if not mismatches and len(axes_of) >= len(forward_axes):  # otherwise some have no gradient
            mismatches = {op: axes for op, axes in forward_axes.items() if axes not in axes_of.values()}
        for op, axes in mismatches.items():
            usual = "; ".join(report.along(other) for other in {*forward_axes.values(), *axes_of.values()} - {axes})
            yield report.finding(
                "gradient along other axes", op, op.outputs[0], axes,
                f"it exchanges along {report.along(axes)}, and others of {forward.title} or its gradient along "
                f"{usual}. A gradient returns the way that its value came: give both the same `group`.",
            )  # fmt: skip


def _is_exchange(op: Op) -> bool:
    """Whether an op exchanges floats between replicas without a reduction."""
    return bool(op.outputs) and op.outputs[0].dtype.is_floating_point and op.kind.exchanged(op.attributes) == "own"


def _scaled_sums(report: Report) -> Iterator[Finding]:
    """Sums over replicas that are scaled by the replica count, unlike the majority."""
    sums = [
        op
        for op, r in report.reductions.items()
        if r.name == "add" and op.outputs and r.axes and all(is_term(r.operand_type[i]) for i in r.axes)
    ]
    by_sum = {op.outputs[0]: op for op in sums}
    readers = (op for graph in dict.fromkeys(op.graph for op in sums) for op in graph.ops)
    odd: dict[Op, Op] = {}
    for reader, t in ((op, t) for op in readers for t in op.inputs if t in by_sum):
        result = scaled(reader, t, ReducedValue((by_sum[t],)))
        count = by_sum[t].attributes["group_size"]
        is_scaled = result is not None and any(math.isclose(result.factor, n) for n in (count, 1 / count))
        if is_scaled and (count > 2 or not _is_differentiated(report, reader)):
            odd[by_sum[t]] = reader
    for op, reader in odd.items():
        r = report.reductions[op]
        is_sum = all(r.operand_type[i].kind is PARTIAL for i in r.axes) and mean_factor(op.inputs[0]) is None
        if 2 * len(odd) <= len(sums) or (is_sum and op.attributes["group_size"] > 2):  # a half is a half of anything
            yield report.finding(
                "factor of replicas", reader, op.inputs[0], r.axes,
                f"replicas along {report.along(r.axes)} have terms of a sum, `{op.inputs[0].path}`, and their "
                f"sum is multiplied by their number, {op.attributes['group_size']}, or divided by it. Leave that out.",
            )  # fmt: skip


def _is_differentiated(report: Report, scaling: Op) -> bool:
    """Whether a gradient graph scales by the same constant, so that the factor belongs to the function."""
    numbers = {number for t in scaling.inputs if (number := constant_number(t)) is not None}
    return any(
        graph.gradient_of is scaling.graph
        and any(constant_number(t) in numbers for op in graph.ops if op.op_type in ("Mul", "Div") for t in op.inputs)
        for graph in report.graphs
    )


def _same_batches(report: Report) -> Iterator[Finding]:
    """Calls of a graph with the same data on all replicas, beside calls with per-replica data."""
    for graph in report.graphs:
        sites = [site for site in graph.call_sites if is_call(site)]
        if len(sites) < 2:
            continue
        for tensors in zip(*(site.inputs for site in sites), strict=False):
            if len({*map(report.types.get, tensors)} - {None}) < 2:
                continue
            types = {t: report.types[t] for t in tensors if t in report.types}
            varying_axes = {i for type_ in types.values() for i, along in enumerate(type_) if along.kind is VARYING}
            for t, type_ in types.items():
                equal = [i for i in varying_axes if type_[i] == SAME and report.fed and report.fed[i].kind is VARYING]
                if equal and (load := _source_load(t)) is not None:
                    yield report.finding(
                        "same batch", load, t, sorted(equal),
                        f"`{t.path}` is made of what the host feeds, and is the same on all replicas along "
                        f"{report.along(equal)}; where {graph.title} is called elsewhere, each has its own. Let "
                        "each replica compute with its own here, too.",
                    )  # fmt: skip


def _source_load(t: Tensor) -> Op | None:
    """Host load that a value derives from; `None` without one."""
    visited, stack = {t}, [t]
    while stack:
        op = stack.pop().producer
        if op is None or op.called_graphs:
            continue
        if op.kind.exchange:
            return op
        stack += [operand for operand in op.inputs if operand not in visited]
        visited.update(op.inputs)
    return None


def _gradients_of_same_data(report: Report, updates: Sequence[Update], stated: Set[int]) -> Iterator[Finding]:
    """Means of gradients that are already equal on all replicas, despite different feeds.

    Excludes `stated` axes, along which an assertion or a fully read gather makes values equal; and axes along which
    only some gradients are averaged: replicas that divide layers hold shards of weights.
    """
    reductions = dict.fromkeys(op for update in updates for op in update.value.reductions)
    axes_by_op: dict[Op, list[int]] = defaultdict(list)
    for i, axis_type in enumerate(report.fed):
        is_varying = axis_type.kind is VARYING and i not in stated
        axis_reductions = [op for op in reductions if i in report.reductions[op].axes] if is_varying else []
        operand_types = {report.reductions[op].operand_type[i] for op in axis_reductions}
        if any(op.attributes["op"] == "mean" and i not in report.reductions[op].axes for op in reductions):
            continue
        if operand_types == {SAME} and all(op.attributes["op"] == "mean" for op in axis_reductions):
            axes_by_op[axis_reductions[0]].append(i)
    for op, axes in axes_by_op.items():
        (t, *_), over = op.inputs, report.along(axes)
        yield report.finding(
            "gradients of the same data", op, t, axes,
            f"`{t.path}` is the same on all replicas along {over} before it is reduced, and so are the others: nothing "
            "of what the host feeds to each goes into them. Let each replica compute with its own.",
        )  # fmt: skip


def _initial_values(report: Report) -> Iterator[Finding]:
    """Variables with different initial values on replicas, and equal updates."""
    for v, (op, axes) in report.reduced_updates.items():
        if v.dtype.is_floating_point and (differing := [i for i in axes if starts_different(report.known_mesh, v, i)]):
            yield report.finding(
                "different beginnings", op, v, differing,
                f"`{v.path}` begins with different numbers on replicas along {report.along(differing)}, and is changed "
                "by what is reduced over them, so that it stays different by as much. Let them share the variable: "
                "leave `replica_grouping` out; or do not reduce what changes it.",
            )  # fmt: skip
