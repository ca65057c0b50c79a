"""The inference of how replicas hold values: one pass over the ops of each graph, for what it is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from popxl.analysis.means import share_of_mean
from popxl.analysis.mesh import Mesh, mesh_of
from popxl.analysis.pieces import made_by
from popxl.analysis.replication import (
    BY_REDUCED,
    BY_TEXT,
    FLAT,
    NOT_KNOWN,
    OWN,
    OWN_DATA,
    PARTIAL,
    REDUCED,
    REPEATED,
    REPEATED_SUM,
    REPLICATED,
    SAME,
    SHARDED,
    SPOILED,
    UNKNOWN,
    VARYING,
    WITH_MORE,
    Along,
    Finding,
    Held,
    Report,
    after_reduction,
    is_term,
    joined,
    joined_all,
    joined_along,
    plain,
    variable_type,
)
from popxl.core.aliasing import lowered_ops, reachable, storages
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.core.traits import Run, is_call, is_loop
from popxl.remote_buffer import RemoteBuffer

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph
    from popxl.ir import Ir


def infer(ir: Ir) -> Report:
    """Infer how replicas hold the values of a program. What its reductions can hardly mean is found on the way."""
    collectives = [op for op in lowered_ops(ir.main_graph) if op.kind.between_replicas]
    mesh = mesh_of(ir, collectives)
    report = Report(mesh)
    if mesh is not None and mesh.names:
        Typing(ir.main_graph, mesh, report, collectives)
    return report


@dataclass(frozen=True)
class _Outcome:
    """What a run of a graph makes of what it is given: types of outputs, and of what it was given, afterwards; and the
    last op that changes each of that, with the type of what all of them change it by."""

    outputs: tuple[Held, ...]
    contents: tuple[Held, ...]
    changes: tuple[tuple[Op, Held] | None, ...]


class Typing:
    """The inference: each graph once for each tuple of types that it is given."""

    def __init__(self, main: Graph, mesh: Mesh, report: Report, collectives: Sequence[Op]) -> None:
        self.mesh, self.report = mesh, report
        self.width = len(mesh.names)
        self.given: Held = (BY_TEXT,) * self.width
        self.known: dict[tuple[Graph, tuple[Held, ...]], _Outcome] = {}
        self.stored: dict[Graph, dict[Tensor, tuple[Tensor, ...]]] = {g: storages(g.ops) for g in reachable(main)}
        self.found: dict[tuple[Op, str], Finding] = {}
        self.buffers: dict[RemoteBuffer, Held] = {}
        variables = main.variables
        for v in variables:
            if (buffer := v.location_info.buffer) is not None:
                own = variable_type(mesh, v)
                self.buffers[buffer] = joined(self.buffers.get(buffer, own), own)
        held = [v if v.piece is None else v.piece for v in variables]
        changed = {op.inputs[i].origin for op in main.ops for i in op.modified}
        first = tuple(variable_type(mesh, v, v in changed) for v in variables)
        self.fed = self.feeds(collectives, [t for v, t in zip(variables, first, strict=True) if v in changed])
        self.divided = [i for i, along in enumerate(self.fed) if along == SAME]
        outcome = _Pass(self, main, held, first).outcome
        repeated: set[int] = set()  # axes along which some variable gets what was summed though it was the same
        report.types |= dict(zip(variables, first, strict=True))
        for v, was, after, change in zip(variables, first, outcome.contents, outcome.changes, strict=True):
            repeated.update(i for i, along in enumerate(after) if along[1] == 2 and along[0] in (REPLICATED, VARYING))
            certain, others = _no_longer_shared(was, after)
            if certain:
                report.parted[v] = certain
            elif others:
                report.unsettled[v] = others
            if change is not None and not v.location_info.isRemote():
                self.of_own(v, was, *change)
        of_learning = {mesh.names[i] for i in repeated}
        report.findings += [
            each
            for each in self.found.values()
            if each.category != REPEATED or not of_learning.isdisjoint(each.axes) or _is_at_once(each.op)
        ]

    def of_own(self, v: Variable, was: Held, op: Op, by: Held) -> None:
        """Check updates of a variable that is per replica or sharded."""
        own = [i for i, along in enumerate(was) if along[0] in (VARYING, SHARDED) and along != (SHARDED, FLAT)]
        if alike := tuple(i for i in own if by[i] in BY_REDUCED or (by[i] == SAME and _is_reduced_and_gathered(op))):
            self.report.changed_alike[v] = op, alike
        if terms := [i for i in own if by[i][0] is PARTIAL and was[i][0] is SHARDED]:
            self.find(
                "terms in an update", False, op, v, terms,
                "{t} has pieces on replicas along {axes}, and each is changed by a term of a sum over them. Reduce "
                "that first, with `ops.collectives.replicated_all_reduce`.",
            )  # fmt: skip
        if turned := [i for i in own if was[i][0] is by[i][0] is SHARDED and by[i][1] not in (None, FLAT, was[i][1])]:
            (d, e) = was[turned[0]][1], by[turned[0]][1]
            self.find(
                "pieces of another layout", False, op, v, turned,
                f"{{t}} has pieces along its dimension {d} on replicas along {{axes}}, and is changed by pieces along "
                f"dimension {e}. Transpose these, or divide the variable otherwise.",
            )  # fmt: skip

    def feeds(self, collectives: Sequence[Op], learned: Sequence[Held]) -> Held:
        """The type of what the host feeds: own data, but for axes along which some op needs the same.

        So does a sum of more than single numbers along an axis where replicas share no weight, if they do so along
        another: that is how layers are divided.
        """
        found = [OWN_DATA] * self.width
        shared = [any(each[i][0] is REPLICATED for each in learned) for i in range(self.width)]
        divided = [any(each[i] == (VARYING, OWN) for each in learned) for i in range(self.width)]
        for op in collectives if any(shared) else ():
            axes = self.mesh.along(op.attributes["stride"], op.attributes["group_size"])
            sums = op.attributes.get("op") == "add" and op.inputs[0].nelms > 1
            if sums and len(axes) == 1 and divided[axes[0]] and not shared[axes[0]]:
                found[axes[0]] = SAME
        for op in collectives:
            if op.kind.needs_same_feeds(op.attributes):
                for i in self.mesh.along(op.attributes["stride"], op.attributes["group_size"]):
                    found[i] = SAME
        return tuple(found)

    def run(self, graph: Graph, given: Sequence[Held]) -> _Outcome:
        """What a called graph makes of values of these types."""
        key = (graph, tuple(given))
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = _Pass(self, graph, graph.inputs, key[1]).outcome
        return found

    def find(self, category: str, certain: bool, op: Op, t: Tensor, axes: Sequence[int], message: str) -> None:
        """Note a finding, once for an op."""
        names = tuple(self.mesh.names[i] for i in axes)
        text = message.format(t=f"`{t.path}`", axes=self.mesh.text(axes))
        self.found.setdefault((op, category), Finding(category, certain, op, t.path, names, text))


class _Pass:
    """One pass over the ops of a graph."""

    def __init__(self, program: Typing, graph: Graph, held: Sequence[Tensor], given: Sequence[Held]) -> None:
        self.program, self.graph = program, graph
        self.made_of = program.stored[graph]
        self.content: dict[Tensor, Held] = dict(zip(held, given, strict=True))
        self.changes: dict[Tensor, tuple[Op, Held]] = {}
        types = program.report.types
        for t, type_ in self.content.items():
            types[t] = joined(types.get(t, type_), type_)
        for op in graph.ops:
            for part in op.parts:
                self.visit(part)
                for t in part.outputs:
                    now = self.of(t)
                    types[t] = joined(types.get(t, now), now)
        self.outcome = _Outcome(
            tuple(self.of(t) for t in graph.outputs),
            tuple(self.content[t] for t in held),
            tuple(self.changes.get(t) for t in held),
        )
        program.report.graphs.setdefault(graph, []).append(tuple(given))

    def of(self, t: Tensor) -> Held:
        """Current type of a tensor."""
        found = self.content.get(t)
        if found is not None:
            return found
        if isinstance(t, Constant):
            return self.program.given
        op = t.producer
        if op is not None and op.kind.view is not None:
            bases = [self.of(each) for each in op.inputs]
            return tuple(self.seen(op, along) for along in joined_all(bases)) if bases else self.program.given
        if op is not None and op.kind.aliased:
            return joined_all([self.of(each) for each in op.bases])
        return self.program.given if op is None else (NOT_KNOWN,) * self.program.width

    def seen(self, op: Op, along: Along) -> Along:
        """Type of a view along an axis, given its source's type."""
        kind, dimension = along
        if kind is not SHARDED or dimension is None or dimension == FLAT:
            return along
        return joined_along(made_by(op, [along] * len(op.inputs))[0])

    def writes(self, t: Tensor, type_: Held, whole: bool = True) -> None:
        """Note what an op has written to a tensor."""
        stored = self.made_of.get(t, (t,))
        for s in stored:
            of_all = whole and len(stored) == 1 and s is t.origin
            self.content[s] = type_ if of_all else joined(self.of(s), type_)

    def visit(self, op: Op) -> None:
        kind = op.kind
        if kind.view is not None:
            return
        if kind.graphs:
            results = self.call(op)
        elif kind.exchange:
            results = self.exchange(op)
        elif kind.between_replicas:
            results = [self.between_replicas(op)] * len(op.outputs)
        else:
            results = [self.computed(op)] * len(op.outputs)
        if op.modified and not kind.graphs:
            made = results[0] if results else self.computed(op)
            others = [self.of(t) for i, t in enumerate(op.inputs) if i not in op.modified]
            for i in op.modified:
                self.notes(op.inputs[i], (op, joined_all(others or [self.program.given])))
                self.writes(op.inputs[i], made)
        for t, type_ in zip(op.outputs, results, strict=False):
            if not (kind.aliased and t is op.outputs[0]):
                self.content[t] = type_

    def notes(self, t: Tensor, change: tuple[Op, Held] | None) -> None:
        """Note by what an op changes what the graph was given."""
        if change is not None:
            op, by = change
            before = self.changes.get(t.origin)
            self.changes[t.origin] = op, by if before is None else joined(before[1], by)

    def computed(self, op: Op) -> Held:
        """What an op of the replica alone makes."""
        forgotten = op.modified if op.kind.overwrites is not None and op.kind.overwrites.forgets(op.attributes) else ()
        inputs = [t for i, t in enumerate(op.inputs) if i not in forgotten]
        types = [self.of(t) for t in inputs]
        if not types:
            return self.program.given
        found = joined_all(types)
        if op.kind.asserts:
            return self.asserted(op, found)
        if op.kind.contracts is not None and self.program.divided:
            self.unsummed(op, types)
        axes = [i for i, along in enumerate(found) if along[0] in (SHARDED, PARTIAL) or _is_of_own(along)]
        if not axes:
            return found
        made = list(found)
        for i in axes:
            made[i] = self.of_parts(op, i, [t[i] for t in types], inputs)
        return tuple(made)

    def asserted(self, op: Op, before: Held) -> Held:
        """Apply the program's statement that replicas of a group hold equal values."""
        axes = self.program.mesh.along(op.attributes["stride"], op.attributes["group_size"])
        if wrong := [i for i in axes if before[i][0] in (SHARDED, PARTIAL)]:
            what = " and ".join(dict.fromkeys(before[i][0].name.lower() for i in wrong))
            self.program.find(
                "contradicted statement", True, op, op.inputs[0], wrong,
                f"{{t}} is said to be the same on all replicas along {{axes}}, and it is {what}.",
            )  # fmt: skip
        return tuple(SAME if i in axes else each for i, each in enumerate(before))

    def of_parts(self, op: Op, axis: int, types: Sequence[Along], inputs: Sequence[Tensor]) -> Along:
        """What an op makes of pieces or terms of a sum, along one axis: the function that it computes says it."""
        if op.kind.is_carried_out_by_others or len(inputs) < len(op.inputs):
            return joined_along(types)
        whole = joined_along(types)
        if len(types) == 1 and whole[0] is VARYING and plain(whole[1]) == OWN:
            return whole
        made, flaws = made_by(op, [_plain(each) for each in types])
        if not op.modified:
            for flaw in flaws:
                self.spoiled(op, axis, types, flaw)
        result = joined_along(made) if made else whole
        return (VARYING, after_reduction(result[1])) if _is_of_own(result) and (whole[1] or 0) < SPOILED else result

    def unsummed(self, op: Op, types: Sequence[Held]) -> None:
        """Find terms, presumably, with something replicated added, that enter the next divided layer without a sum."""
        for t, with_more, weight, own in zip(op.inputs, types, op.inputs[::-1], types[::-1], strict=True):
            if not self.is_given(weight):
                continue
            if axes := [i for i in self.program.divided if _is_of_own(with_more[i], WITH_MORE) and own[i][1] == OWN]:
                self.program.find(
                    "terms and a whole", False, op, t, axes,
                    "{t} was made of products with what each replica along {axes} has of its own, and of something "
                    f"that is the same on all, and is multiplied with `{weight.path}`, which is divided among them, "
                    "too. The products are terms of a sum, presumably: reduce them first, and add then.",
                )  # fmt: skip

    def is_given(self, t: Tensor) -> bool:
        """Whether a tensor is a variable or an input of the graph, a view of one, or its transpose."""
        if t.producer is not None and t.producer.attributes.get("permutation"):
            (t,) = t.producer.inputs
        return all(s.producer is None and not isinstance(s, Constant) for s in self.made_of.get(t, (t,)))

    def spoiled(self, op: Op, axis: int, types: Sequence[Along], flaw: str) -> None:
        """Record nonlinear use of summation terms."""
        t = next((t for t, (kind, _) in zip(op.inputs, types, strict=True) if kind is PARTIAL), op.inputs[0])
        others = [
            other
            for other, (kind, _) in zip(op.inputs, types, strict=True)
            if kind <= REPLICATED and other.dtype.is_floating_point
        ]
        if flaw == "linear":
            self.program.find(
                "function of terms", False, op, t, [axis],
                "replicas along {axes} have terms of a sum, {t}, and "
                f"{op.op_type} of each is taken, which is not linear: the sum of the results is not that of the sum. "
                "Reduce {t} first, with `ops.collectives.replicated_all_reduce`.",
            )  # fmt: skip
        elif not (others and all(isinstance(each, Constant) and not np.any(each.data) for each in others)):
            more = f"`{others[0].path}`" if others else "a constant"
            self.program.find(
                "terms and a whole", False, op, t, [axis],
                "replicas along {axes} have terms of a sum, {t}, and "
                f"each adds {more}, which is the same on all: the sum has it as many times as there are replicas. "
                "Reduce {t} first, with `ops.collectives.replicated_all_reduce`, and add then.",
            )  # fmt: skip

    def exchange(self, op: Op) -> list[Held]:
        """Loads and stores."""
        with_what = op.attributes[op.kind.exchange]
        if not isinstance(with_what, RemoteBuffer):
            if with_what.tensor.nelms == 1 or not op.outputs:
                return [self.program.given] * len(op.outputs)
            self.program.report.fed = self.program.fed
            return [self.program.fed] * len(op.outputs)
        if not op.outputs and not op.modified:
            now = self.of(op.inputs[0])
            if joined(self.program.buffers.get(with_what, now), now) != self.program.buffers.get(with_what, now):
                self.program.buffers[with_what] = (NOT_KNOWN,) * self.program.width
            return []
        unknown: Held = (NOT_KNOWN,) * self.program.width
        return [self.program.buffers.get(with_what, unknown)]

    def between_replicas(self, op: Op) -> Held:
        """What an op makes that replicas carry out together."""
        makes = op.kind.exchanged(op.attributes)
        types = [self.of(t) for t in op.inputs]
        before = joined_all(types)
        size = op.attributes["group_size"]
        axes = self.program.mesh.along(op.attributes["stride"], size) if size > 1 else ()
        if makes is None:
            if axes:
                self.program.report.untyped.setdefault(op, "an op between replicas that does not say what it makes")
            return tuple(NOT_KNOWN if i in axes else each for i, each in enumerate(before))
        reduction = op.attributes.get("op")
        repeated = False
        if reduction is None and makes == "same" and op.inputs[0].meta_shape:
            self.gathered(op, before, axes)
        if reduction is not None and makes != "own":
            repeated = self.reduced(op, before, axes, reduction)
            known = self.program.report.reductions
            known[op] = joined(known.get(op, before), before)
        same = SAME if reduction is None else REPEATED_SUM if repeated else REDUCED
        after: dict[str, Along] = {"same": same, "pieces": (SHARDED, FLAT)}
        return tuple(
            each if i not in axes else self.own_piece(each, reduction) if makes == "pieces" else after.get(makes, each)
            for i, each in enumerate(before)
        )

    def gathered(self, op: Op, before: Held, axes: Sequence[int]) -> None:
        """Find shards that are gathered along another axis than the one that they are divided along."""
        others = [i for i, along in enumerate(before) if along == (SHARDED, FLAT) and i not in axes]
        if others and all(before[i][0] is not SHARDED for i in axes):
            self.program.find(
                "pieces of another layout", False, op, op.inputs[0], others,
                f"replicas along {{axes}} have shards of {{t}}, and copies of a shard are gathered over "
                f"{self.program.mesh.text(axes)}, as if these were the whole. Gather it over {{axes}}.",
            )  # fmt: skip

    def own_piece(self, along: Along, reduction: str | None) -> Along:
        """Type of a replica's own shard of a value, or of a reduced value."""
        return along if reduction is None and along[0] >= SHARDED else (SHARDED, FLAT)

    def reduced(self, op: Op, before: Held, axes: Sequence[int], reduction: str) -> bool:
        """Look at a reduction: whether it is what completes the value. Returns whether it sums what is the same."""
        find, (t, *_) = self.program.find, op.inputs
        repeated = bool(axes) and reduction in ("add", "square_add") and all(before[i][0] is REPLICATED for i in axes)
        if repeated:
            find(REPEATED, False, op, t, axes,
                 "{t} is the same on all replicas along {axes}, and is summed over them: the result is as many times "
                 "too large as there are. Leave that reduction out, or take the mean.")  # fmt: skip
        terms = [i for i in axes if is_term(before[i])]
        if terms and reduction == "mean" and share_of_mean(t) is None:
            find("mean of a sum", False, op, t, terms,
                 "{t} is a term of a sum over {axes}, and the mean of the terms is taken: the result is as many times "
                 "too small as there are replicas. Write \"add\".")  # fmt: skip
        for slot, flaw in ((WITH_MORE, "more"), (SPOILED, "linear")):
            if reduction == "add" and (
                spoiled := [i for i in axes if before[i][0] is VARYING and plain(before[i][1]) == slot]
            ):
                self.spoiled_sum(op, t, spoiled, flaw)
        if cut := [i for i in axes if before[i][0] is SHARDED and before[i][1] is not None and reduction != "max"]:
            find("reduced pieces", False, op, t, cut,
                 "replicas along {axes} have different pieces of {t}, and these are reduced as if they were terms of a "
                 "sum. Gather them, with `replicated_all_gather`, or reduce over another axis.")  # fmt: skip
        return repeated

    def spoiled_sum(self, op: Op, t: Tensor, axes: Sequence[int], flaw: str) -> None:
        """Note a sum of what was made of terms, as is presumed, in a way that their sum does not survive."""
        if flaw == "linear":
            self.program.find(
                "function of terms", False, op, t, axes,
                "{t} is summed over {axes}, and was made by a function that is not linear of products with what each "
                "replica has of its own, which are terms of a sum: the sum of the results is not that of the sum. "
                "Reduce before.",
            )  # fmt: skip
        else:
            self.program.find(
                "terms and a whole", False, op, t, axes,
                "{t} is summed over {axes}, and was made of products with what each replica has of its own, and of "
                "something that is the same on all: the sum has that as many times as there are replicas. Reduce "
                "first, and add then.",
            )  # fmt: skip

    # Ops that run graphs --------------------------------------------------------------------------------------------

    def call(self, op: Op) -> list[Held]:
        given = [self.of(t) for t in op.inputs]
        if is_call(op):
            (run,) = op.runs
            bound = self.bound(run, given)
            outcome = self.program.run(run.graph, bound)
            for i in op.modified:
                self.notes(op.inputs[i], outcome.changes[i])
                self.writes(op.inputs[i], outcome.contents[i])
            return list(outcome.outputs)
        if is_loop(op):
            return self.loop(op, given)
        results: list[Held] = [given[0]] * len(op.outputs)
        for run in op.runs:
            bound = self.bound(run, given[run.first : run.first + len(run.given)])
            outputs = self.program.run(run.graph, bound).outputs
            results = [joined(a, b) for a, b in zip(results, outputs, strict=False)]
        return results

    def bound(self, run: Run, given: Sequence[Held]) -> list[Held]:
        """Types of a graph's inputs. What nothing is bound to is unknown."""
        missing: list[Held] = [(NOT_KNOWN,) * self.program.width] * (len(run.inputs) - len(given))
        return [self.program.given] * len(run.op_inputs) + list(given) + missing

    def loop(self, op: Op, given: list[Held]) -> list[Held]:
        """A loop: its graph, until what it carries does not change any more."""
        (run,) = op.runs
        own_in, own_out, carried = len(run.op_inputs), run.trait.own_outputs, run.carried
        if not run.iterations:
            return given[:carried] + [self.program.given] * (len(op.outputs) - carried)
        turn = self.bound(run, given)
        while True:
            outcome, before = self.program.run(run.graph, turn), list(turn)
            for k in range(carried):
                turn[own_in + k] = joined(turn[own_in + k], outcome.outputs[own_out + k])
            for i in op.modified:
                turn[own_in + i] = joined(turn[own_in + i], outcome.contents[own_in + i])
            if turn == before:
                break
        for i in op.modified:
            self.notes(op.inputs[i], outcome.changes[own_in + i])
            self.writes(op.inputs[i], outcome.contents[own_in + i])
        return list(outcome.outputs[own_out:])


def _no_longer_shared(was: Held, after: Held) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes along which a variable is not any more what it was declared as: those where nothing was reduced, and
    the others. None, if something is not known."""
    if any(kind is UNKNOWN for kind, _ in after):
        return (), ()
    found = [
        i
        for i, (before, (kind, _)) in enumerate(zip(was, after, strict=True))
        if (before[0] is REPLICATED and kind > REPLICATED) or (before == (SHARDED, FLAT) and kind > SHARDED)
    ]
    certain = tuple(i for i in found if after[i][0] is not VARYING or after_reduction(after[i][1]) != after[i][1])
    return certain, tuple(i for i in found if i not in certain)


def _is_at_once(op: Op) -> bool:
    """Whether an op sums the result of another one that does the same, and it stays a sum: nothing divides it."""
    (t, *_), (made, *_) = op.inputs, op.outputs or op.inputs
    before = t.producer
    if before is None or before.kind is not op.kind or before.attributes != op.attributes:
        return False
    return made.nelms > 1 and all(t.nelms > 1 for each in op.graph.ops if made in each.inputs for t in each.inputs)


def _is_reduced_and_gathered(op: Op) -> bool:
    """Whether an update takes what was reduced in shards, and gathered."""
    for t in op.inputs:
        if (gather := t.producer) is not None and gather.kind.between_replicas and "op" not in gather.attributes:
            scatter = gather.inputs[0].producer
            return scatter is not None and scatter.attributes.get("op") in ("add", "mean")
    return False


def _is_of_own(along: Along, slot: int | None = None) -> bool:
    """Whether nothing differs but variables of each replica's own; and if it is asked, in which way."""
    kind, now = along
    return kind is VARYING and now is not None and now < 0 and slot in (None, plain(now))


def _plain(along: Along) -> Along:
    return (along[0], plain(along[1])) if along[0] is VARYING else along
