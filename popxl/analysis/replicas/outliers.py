"""Inconsistencies within a program: one gradient that is a sum where the others are means, a loss that is reduced along
fewer axes than the gradients, replicas that start differently and are changed alike.

None of these is certain to be wrong, so only `check` reports them, and a session does not warn.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set

from popxl.analysis.replicas.axis_types import OWN_DATA, PARTIAL, REPLICATED, SAME, VARYING, is_term
from popxl.analysis.replicas.means import constant_number, is_of_replicas, share_of_mean
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
    fed_by_all,
    noise_lints,
    seed_lints,
    shards_of_own_values,
    stale_shards,
    transposed_weights,
    unread_batches,
)
from popxl.analysis.replicas.variable_types import begins_different
from popxl.base.group_by import group_by
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.core.traits import is_call
from popxl.graph import Graph


def outliers(report: Report) -> Iterator[Finding]:
    """Outliers of a program, by value types."""
    if report.mesh is None:
        return
    updates: list[Update] = []
    stored: Stored = []
    for made, out in reduced_values(report):
        yield from _outlying_updates(report, made)
        updates += made
        stored += out
    _accept_gradients_of_shared(report, updates)
    yield from _losses(report, updates, stored)
    stated = {i for op in report.index.statements for i in report.known_mesh.axes_of(op)} | fed_by_all(report)
    batches = {each.op: each for each in (*unread_batches(report), *_same_batches(report))}
    yield from batches.values() if batches else _same_data(report, updates, stated)
    yield from _scaled_sums(report)
    yield from _exchanges_without_dual(report)
    yield from stale_shards(report)
    if taken := [*shards_of_own_values(report)]:  # which explain what changes pieces
        report.findings = [each for each in report.findings if each.category != taken[0].category]
        yield from taken
    yield from transposed_weights(report)
    alike = stated | {i for i, along in enumerate(report.fed) if along.kind is REPLICATED}
    of_data = {i for each in updates for i in each.axes}
    yield from seed_lints(report, of_data, alike)
    yield from noise_lints(report, of_data)
    report.notes += _local_numbers(report, updates)
    yield from _initial_values(report)


def _accept_gradients_of_shared(report: Report, updates: Sequence[Update]) -> None:
    """Take back what was found in the sum over shards of the gradient of a variable that replicas share: each has used
    all of the variable with its shard of other values."""
    if not any(found.category == REDUCED_SHARDS for found in report.findings):
        return
    changed: dict[Op, list[Update]] = defaultdict(list)
    for each in updates:
        for op in each.how.by:
            changed[op].append(each)
    shared = {
        op
        for op, some in changed.items()
        if all(report.types[u.of][i].kind <= REPLICATED for u in some for i in report.reductions[op].axes)
    }
    report.findings = [each for each in report.findings if each.category != REDUCED_SHARDS or each.op not in shared]


def _outlying_updates(report: Report, updates: Sequence[Update]) -> Iterator[Finding]:
    """Updates whose values differ from most comparable ones by a factor of the replica count."""
    found = [each for some in _comparable_updates(updates) for each in _odd_updates(report, some)]
    reported = {each.op for each in found}
    yield from found
    for some in _gradient_updates(updates):
        yield from (each for each in _mixed_gradients(report, some) if each.op not in reported)


def _odd_updates(report: Report, some: Sequence[Update]) -> Iterator[Finding]:
    """The few of some comparable updates that differ from most."""
    by_scale = _by_scale(some)
    most = max(by_scale.values(), key=len)
    of_one = len({each.of for each in some}) == 1  # a variable with two updates cannot mean both
    if len(some) == 2 and len(by_scale) == 2 and not of_one:
        yield from _two_ways(report, *some)
        return
    if 2 * (len(some) - len(most)) > len(most) and not of_one:
        return
    for each in (each for those in by_scale.values() if those is not most for each in those):
        if _differ_by_count(report, each, most[0]):
            yield from _outlier(report, each, most[0], each.scale / most[0].scale)


def _by_scale(some: Iterable[Update]) -> dict[str, list[Update]]:
    """Updates by the weight of a replica's value in them, to five digits."""
    return group_by(some, lambda each: f"{each.scale:.5g}")


def _differ_by_count(report: Report, one: Update, other: Update) -> bool:
    """Whether the weights of a replica's value in two updates have a ratio of the number of replicas; or its square, if
    there are more than two."""
    counts = [report.known_mesh.count(one.axes), *(op.attributes["group_size"] for op in (*one.how.by, *other.how.by))]
    return is_of_replicas(one.scale / other.scale, *counts, *(n * n for n in counts if n > 2))


def _gradient_updates(updates: Iterable[Update]) -> Iterator[list[Update]]:
    """Updates by results of gradient graphs that are reduced along the same axes, one for each reduction; whatever
    changes the variables."""
    alike: dict[Hashable, dict[Hashable, Update]] = defaultdict(dict)
    for each in updates:
        if each.axes and _is_gradient(each.how.by[0].inputs[0]):
            alike[each.axes].setdefault(each.how.by, each)
    for some in alike.values():
        if len({each.how.by[-1].attributes["op"] for each in some.values()}) > 1:
            yield [*some.values()]


def _is_gradient(t: Tensor) -> bool:
    """Whether a value is a result of a gradient graph, or made in one; maybe scaled, or the sum of several."""
    op = t.producer
    while op is not None and op.graph.gradient_of is None and not op.called_graphs:
        if op.op_type not in LINEAR | {"Sum"} and op.kind.view is None:
            return False
        op = op.inputs[0].producer
    return op is not None and (op.graph.gradient_of is not None or op.called_graphs[0].gradient_of is not None)


def _mixed_gradients(report: Report, some: Sequence[Update]) -> Iterator[Finding]:
    """Gradients that are sums over replicas where more are means, or the reverse; and one of each, if as many are."""
    by_scale = _by_scale(some)
    most = max(by_scale.values(), key=lambda those: (len(those), those[0].how.factor == 1))
    for those in by_scale.values():
        each, usual = those[0], most[0]
        if those is most or each.how.by[-1].attributes["op"] == usual.how.by[-1].attributes["op"]:
            continue
        if not _differ_by_count(report, each, usual):
            continue
        for one in those:
            yield from _outlier(report, one, usual, one.scale / usual.scale)
        if len(those) == len(most):  # either may be wrong
            yield from _outlier(report, usual, each, usual.scale / each.scale)


def _comparable_updates(updates: Iterable[Update]) -> Iterator[list[Update]]:
    """Updates along the same axes, by the same op with the same constants; excludes groups in which all agree."""

    def kind(each: Update) -> Hashable:
        groups = tuple((op.attributes["stride"], op.attributes["group_size"]) for op in each.how.by)
        return each.axes or groups, each.how.scalars, each.op.op_type

    for alike in group_by(updates, kind).values():
        if len({each.scale for each in alike}) > 1:
            yield from group_by(alike, lambda each: each.constants).values()


def _two_ways(report: Report, one: Update, other: Update) -> Iterator[Finding]:
    """The only two gradients, if their ratio is the number of replicas: either may be wrong, unless only one is scaled
    by a constant."""
    pairs = [(one, other), (other, one)]
    if (one.how.factor == 1) != (other.how.factor == 1):
        pairs = [pair for pair in pairs if pair[0].how.factor != 1]
    for each, usual in pairs:
        if _differ_by_count(report, each, usual):
            yield from _outlier(report, each, usual, each.scale / usual.scale)


def _outlier(report: Report, one: Update, usual: Update, ratio: float) -> Iterator[Finding]:
    """Finding of an update that is `ratio` times a usual one, by its factor or by its reduction."""
    op, usual_name = one.how.by[-1], usual.how.by[-1].attributes["op"]
    times = f"{ratio:g} times as large as" if ratio > 1 else f"{1 / ratio:g} times smaller than"
    words = {"add": "sum", "mean": "mean"}
    this, that = words[op.attributes["op"]], words[usual_name]
    over, such_as = report.along(one.axes), f"other variables, such as `{usual.of.path}`"
    if this == that:
        yield report.finding(
            "factor of replicas", one.how.scaled or op, one.of, one.axes,
            f"`{one.of.path}` is changed by the {this} over {over} times {one.how.factor:g}, and {such_as}, by the "
            f"{that} times {usual.how.factor:g}: what it gets is {times} theirs, and there are as many replicas. "
            "Leave that factor out.",
        )  # fmt: skip
    elif (
        this == "sum" or share_of_mean(op.inputs[0]) is None
    ):  # statistics of rows are means, however gradients are reduced
        yield report.finding(
            "mixed reductions", op, one.of, one.axes,
            f"`{one.of.path}` is changed by the {this} over {over}, and {such_as}, by the {that}: what it gets is "
            f"{times} theirs. Write \"{usual_name}\".",
        )  # fmt: skip


def _losses(report: Report, updates: Sequence[Update], stored: Stored) -> Iterator[Finding]:
    """Single numbers that are stored, and reduced otherwise than the gradients."""
    by_axis: dict[int, set[str]] = defaultdict(set)
    for axes, by in {(each.axes, report.reductions[op]) for each in updates for op in each.how.by}:
        for i in {*axes}.intersection(by.axes):
            by_axis[i].add(by.name)
    reduced = {*by_axis}
    for t, how in stored:
        op = how.by[-1]
        along, scale = how.completed(report)
        missing = [i for i, along in enumerate(report.types[t]) if along.kind is VARYING and i in reduced]
        if missing and (not along or not reduced.isdisjoint(along)):  # not the mean of an ensemble, for each part
            yield report.finding(
                "partly reduced number", op, t, missing,
                f"`{t.path}` is stored. It has been reduced, but not over {report.along(missing)}, as the gradients "
                f"are: each replica stores another number. Reduce it over {report.along(missing)}, too.",
            )  # fmt: skip
        before = how.by[0].inputs[0]
        share = share_of_mean(before)
        if share is None or how.scalars or not along or any(by_axis[i] != {"mean"} for i in along):
            continue
        count = report.known_mesh.count(along)
        ratio, of_all = share * scale * count, op.attributes["group_size"]
        if not (is_of_replicas(ratio, count, of_all) and is_of_replicas(scale * count, count, of_all)):
            continue  # what a factor before the reduction makes of a loss is the program's choice
        if how.factor == 1 and ratio > 1:
            yield report.finding(
                "sum of means", op, t, along,
                f"`{before.path}` is a mean over what a replica has, and `{t.path}`, which is stored, the sum of these "
                f"over {report.along(along)}, while the gradients are means over it. Write \"mean\".",
            )  # fmt: skip
        else:
            yield report.finding(
                "factor of replicas", how.scaled or op, t, along,
                f"`{before.path}` is a mean over what a replica has, and `{t.path}`, which is stored, {ratio:g} times "
                f"the mean of these over {report.along(along)}, where there are {count} replicas. Leave that factor "
                "out.",
            )  # fmt: skip


def _local_numbers(report: Report, updates: Sequence[Update]) -> Iterator[Finding]:
    """Stored scalars computed from each replica's own data. Possibly intended: the host receives all of them."""
    reduced = {i for each in updates for i in each.axes}
    for op in report.index.exchanges:
        if not op.outputs and op.inputs and op.inputs[0].nelms == 1:
            t = op.inputs[0]
            own = [i for i, along in enumerate(report.types[t]) if along == OWN_DATA and i in reduced]
            if own and t.dtype.is_floating_point:
                yield report.finding(
                    "local number", op, t, own,
                    f"each replica along {report.along(own)} stores its own `{t.path}`, of its own data. Take the mean "
                    "of what the host gets; or reduce it first.",
                )  # fmt: skip


def _exchanges_without_dual(report: Report) -> Iterator[Finding]:
    """Exchanges of a graph and of its gradient graph along different axes. The gradient of an exchange is an exchange
    along the same axes."""
    axes_in: dict[Graph, dict[Op, tuple[int, ...]]] = defaultdict(dict)
    for op in filter(_is_exchange, report.index.moves):
        axes_in[op.graph][op] = report.known_mesh.axes_of(op)
    for graph, own in axes_in.items():
        forward = graph.gradient_of
        if forward not in axes_in:
            continue
        others = axes_in[forward]
        odd = {op: axes for op, axes in own.items() if axes not in others.values()}
        if not odd and len(own) >= len(others):  # otherwise some have no gradient
            odd = {op: axes for op, axes in others.items() if axes not in own.values()}
        for op, axes in odd.items():
            usual = "; ".join(report.along(each) for each in {*others.values(), *own.values()} - {axes})
            yield report.finding(
                "gradient along other axes", op, op.outputs[0], axes,
                f"it exchanges along {report.along(axes)}, and others of {forward.title} or its gradient along "
                f"{usual}. A gradient returns the way that its value came: give both the same `group`.",
            )  # fmt: skip


def _is_exchange(op: Op) -> bool:
    """Whether replicas exchange floats by an op between them, which reduces nothing."""
    return bool(op.outputs) and op.outputs[0].dtype.is_floating_point and op.kind.exchanged(op.attributes) == "own"


def _scaled_sums(report: Report) -> Iterator[Finding]:
    """Sums that are scaled by the number of replicas, unlike others."""
    sums = [
        op
        for op, by in report.reductions.items()
        if by.name == "add" and op.outputs and by.axes and all(is_term(by.before[i]) for i in by.axes)
    ]
    by_sum = {op.outputs[0]: op for op in sums}
    odd: dict[Op, Op] = {}
    for reader in (op for graph in dict.fromkeys(op.graph for op in sums) for op in graph.ops):
        if by_sum.keys().isdisjoint(reader.inputs):
            continue
        for t in reader.inputs:
            if (summed := by_sum.get(t)) is not None:
                made = scaled(reader, t, ReducedValue((summed,)))
                count = summed.attributes["group_size"]
                if made is not None and any(math.isclose(made.factor, n) for n in (count, 1 / count)):
                    if count > 2 or not _is_differentiated(report, reader):
                        odd[summed] = reader
    for op, reader in odd.items():
        by = report.reductions[op]
        is_sum = all(by.before[i].kind is PARTIAL for i in by.axes) and share_of_mean(op.inputs[0]) is None
        if 2 * len(odd) <= len(sums) or (is_sum and op.attributes["group_size"] > 2):  # a half is a half of anything
            yield report.finding(
                "factor of replicas", reader, op.inputs[0], by.axes,
                f"replicas along {report.along(by.axes)} have terms of a sum, `{op.inputs[0].path}`, and their "
                f"sum is multiplied by their number, {op.attributes['group_size']}, or divided by it. Leave that out.",
            )  # fmt: skip


def _is_differentiated(report: Report, scaling: Op) -> bool:
    """Whether a gradient has the constant that an op scales by, too, so that the factor belongs to the function."""
    numbers = {number for t in scaling.inputs if (number := constant_number(t)) is not None}
    return any(
        graph.gradient_of is scaling.graph
        and any(constant_number(t) in numbers for op in graph.ops if op.op_type in ("Mul", "Div") for t in op.inputs)
        for graph in report.graphs
    )


def _same_batches(report: Report) -> Iterator[Finding]:
    """Graph calls with one replica's data on all replicas, beside calls with data of each replica."""
    for graph in report.graphs:
        sites = [site for site in graph.call_sites if is_call(site)]
        for given in zip(*(site.inputs for site in sites), strict=False) if len(sites) > 1 else ():
            if len({*map(report.types.get, given)} - {None}) < 2:
                continue
            types = {t: report.types[t] for t in given if t in report.types}
            own = {i for each in types.values() for i, along in enumerate(each) if along.kind is VARYING}
            for t, held in types.items():
                alike = [i for i in own if held[i] == SAME and report.fed and report.fed[i].kind is VARYING]
                if alike and (load := _fed_by(t)) is not None:
                    yield report.finding(
                        "same batch", load, t, sorted(alike),
                        f"`{t.path}` is made of what the host feeds, and is the same on all replicas along "
                        f"{report.along(alike)}; where {graph.title} is called elsewhere, each has its own. Let each "
                        "replica compute with its own here, too.",
                    )  # fmt: skip


def _fed_by(t: Tensor) -> Op | None:
    """Host load that a value derives from, if any."""
    seen, left = {t}, [t]
    while left:
        op = left.pop().producer
        if op is None or op.called_graphs:
            continue
        if op.kind.exchange:
            return op
        left += [each for each in op.inputs if each not in seen]
        seen.update(op.inputs)
    return None


def _same_data(report: Report, updates: Sequence[Update], stated: Set[int]) -> Iterator[Finding]:
    """Means of gradients that are already equal on all replicas, although these have different feeds.

    Not along axes on which the program has `stated` that values are equal, by an assertion or a gather that it reads
    whole; nor where it takes the mean of only some gradients: a weight may be in pieces on replicas that divide layers.
    """
    reductions = dict.fromkeys(op for each in updates for op in each.how.by)
    found: dict[Op, list[int]] = defaultdict(list)
    for i, along in enumerate(report.fed):
        is_own = along.kind is VARYING and i not in stated
        some = [op for op in reductions if i in report.reductions[op].axes] if is_own else []
        before = {report.reductions[op].before[i] for op in some}
        if any(op.attributes["op"] == "mean" and i not in report.reductions[op].axes for op in reductions):
            continue
        if before == {SAME} and all(op.attributes["op"] == "mean" for op in some):
            found[some[0]].append(i)
    for op, axes in found.items():
        (t, *_), over = op.inputs, report.along(axes)
        yield report.finding(
            "gradients of the same data", op, t, axes,
            f"`{t.path}` is the same on all replicas along {over} before it is reduced, and so are the others: nothing "
            "of what the host feeds to each goes into them. Let each replica compute with its own.",
        )  # fmt: skip


def _initial_values(report: Report) -> Iterator[Finding]:
    """Variables that differ between replicas from the beginning, and are changed alike on all of them."""
    for v, (op, axes) in report.reduced_updates.items():
        if v.dtype.is_floating_point and (found := [i for i in axes if begins_different(report.known_mesh, v, i)]):
            yield report.finding(
                "different beginnings", op, v, found,
                f"`{v.path}` begins with different numbers on replicas along {report.along(found)}, and is changed by "
                "what is reduced over them, so that it stays different by as much. Let them share the variable: leave "
                "`replica_grouping` out; or do not reduce what changes it.",
            )  # fmt: skip
