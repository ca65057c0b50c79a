"""Likely mistakes in a finished program: lost updates, unchanging masks, diverging replicas.

Each graph is analysed once, callees first. Effects of a run are expressed in terms of the graph's inputs: the
dependencies of an output, as a bit set. A caller replaces the bits of these inputs by the bits of the tensors that it
binds. No values are computed, so a program that cannot be judged counts as right.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from popxl.analysis.dataflow import INPUTS, PER_RUN, EffectsPass, GraphEffects, UnreadChange, bind_inputs
from popxl.analysis.placement import crossing_updates
from popxl.analysis.replicas.inference import infer
from popxl.analysis.replicas.report import Report
from popxl.base.pages import listed
from popxl.base.source import SourceLocation, warn_at
from popxl.context import user_frame
from popxl.core.aliasing import callees_first
from popxl.core.recording import Op
from popxl.core.tensor import Variable
from popxl.errors import (
    ContradictedStatementWarning,
    CrossingUpdateWarning,
    DriftingVariableWarning,
    LostUpdateWarning,
    PopxlWarning,
    RemoteSlotWarning,
    RepeatedSeedWarning,
)
from popxl.graph import Graph
from popxl.remote_buffer import RemoteBuffer
from popxl.values.spec import brief

if TYPE_CHECKING:
    from popxl.ir import Ir


def run_lints(main: Graph) -> None:
    """Warn about program lines that are probably mistakes. Needs a few passes over the ops.

    If the program means it, `popxl.errors.PopxlWarning` says how to switch the warning off.
    """
    program = _Program(main)
    reported: _Reported = defaultdict(dict)
    for run in program.runs.values():
        for change, op, t in sorted(run.unread_changes, key=itemgetter(0)):
            where = f" in {run.graph.title}" if change == "input" else ""
            reported[_UNREAD_CHANGES[change], op.source][f"`{t.path}`{where}"] = None
        for op in _rebound_names(run.graph):
            reported[_REBOUND_NAME, op.source][f"`{op.inputs[0].path}`"] = None
    for op in program.repeated():
        reported[_REPEATED, op.source][op.graph.title] = None
    if main.ir.replication_factor > 1:
        report = infer(main.ir)
        for v, op, along in program.drifting(report, report.diverged):
            reported[_drifting(along), op.source][f"`{v.name}`"] = None
        for each in report.findings:
            if each.certain:
                text = each.message.replace("{", "{{").replace("}", "}}").removesuffix(".")
                reported[Lint(ContradictedStatementWarning, f"{text} ({{line}})."), each.op.source][""] = None
    for found_in, lint in _without_own_slot(main):
        reported[lint, SourceLocation.of(user_frame())][found_in] = None
    _warn(reported)


def drifting(ir: Ir, report: Report) -> Iterator[tuple[bool, Variable, Op, tuple[str, ...], str]]:
    """Variables that drift apart on replicas that share them: whether that is certain, the variable, the last op to
    change it, the axes, and a text."""
    if report.diverged or report.maybe_diverged:
        program = _Program(ir.main_graph)
        for diverged in (report.diverged, report.maybe_diverged):
            for v, op, axes in program.drifting(report, diverged):
                text = _drifting(axes).text.replace(" ({line})", "").format(names=f"`{v.name}`")
                yield diverged is report.diverged, v, op, axes, text


def warn_of_crossing_updates(main: Graph) -> None:
    """Warn about variables that are read on one IPU and updated on another, which may be devices of their own."""
    reported: _Reported = defaultdict(dict)
    for v, op in crossing_updates(main):
        reported[_CROSSING, op.source][f"`{v.name}`"] = None
    _warn(reported)


def _warn(reported: _Reported) -> None:
    for (lint, source), found in reported.items():
        names = listed(found, most=3)
        line = f"`{source.text}`, {source}" if source.text else str(source)
        warn_at(source, lint.text.format(names=names, line=line), lint.category)


class Lint(NamedTuple):
    """Kind of mistake: the category of its warnings, and their text, with fields `names` and `line`."""

    category: type[PopxlWarning]
    text: str


_Reported = dict[tuple[Lint, SourceLocation], dict[str, None]]
"""Names of the tensors or graphs concerned, by lint and line."""


_LOST = Lint(
    LostUpdateWarning,
    "The change of {names} is lost ({line}): the graph takes it by value, and nothing reads it afterwards. Take it "
    "by reference: annotate the parameter with `popxl.TensorByRef`, or pass `by_ref=True`.",
)
_NOT_STORED = Lint(
    LostUpdateWarning,
    "What was loaded from a remote buffer, {names}, is changed ({line}), and the buffer keeps what it had: nothing "
    "reads or stores it afterwards. Store it, with `ops.remote_store` or a graph that does.",
)
_NOT_KEPT = Lint(
    LostUpdateWarning,
    "The change of {names} is lost ({line}): no variable keeps it, and nothing reads it afterwards. Change the "
    "variable itself, or its piece if it is in pieces; or write to it what was computed, with "
    "`ops.var_updates.copy_var_update_(variable, ...)`.",
)
_UNREAD_CHANGES: Mapping[UnreadChange, Lint] = {"input": _LOST, "loaded": _NOT_STORED, "local": _NOT_KEPT}
_SAME_SLOT = Lint(
    RemoteSlotWarning,
    "Variables have the same slot of a remote buffer: {names}. One value fills it, and those of the others are lost. "
    "Give each a slot of its own: `offset`, or `entry` of `init_remote`.",
)
_NO_SLOT = Lint(
    RemoteSlotWarning,
    "Variables are in slots that their remote buffers do not have: {names}. Their values never reach the device. Make "
    "`entries` of the buffer larger.",
)
_OTHER_SIZE = Lint(
    RemoteSlotWarning,
    "Variables have another number of elements than the slots of their remote buffers: {names}. The first elements are "
    "copied, and the rest of a slot is undefined. Make the buffer of the shape of its variables.",
)
_REBOUND_NAME = Lint(
    LostUpdateWarning,
    "{names} stays as it is, and nothing reads what was computed ({line}): of these operators only `+=` works in "
    "place. Others make a new tensor, for the name on the left alone. Write `x += -y` for `x -= y`; or say what to "
    "write, with `ops.var_updates.copy_var_update_(x, ...)`.",
)
_REPEATED = Lint(
    RepeatedSeedWarning,
    "A dropout in {names} drops the same elements in every run ({line}): its seed comes from constants and from "
    "variables that the program does not change. Change the seed in each run (`seed += 1`), or load it from a stream.",
)
_CROSSING = Lint(
    CrossingUpdateWarning,
    "{names} is read on one IPU and changed on another ({line}), so that each run copies it there and back where these "
    "are two devices. Make the change within `with popxl.ipu(n):` of the IPU that reads it; the optimisers of "
    "popxl_addons do so by themselves.",
)


def _drifting(axes: tuple[str, ...]) -> Lint:
    """The lint of variables that drift apart along axes."""
    named = [name for name in axes if name.isidentifier() and name != "replicas"]
    group = repr(named[0]) if len(named) == 1 else repr(tuple(named))
    along, over = (f" along {group}", f"(..., group={group})") if named else ("", "")
    return Lint(
        DriftingVariableWarning,
        f"Replicas share {{names}}, and each changes it by a value of its own{along} ({{line}}), so that it drifts "
        f"apart. Reduce that value first, with `ops.collectives.replicated_all_reduce{over}`; or give each replica its "
        "own variable, with `replica_grouping=ir.replica_grouping(group_size=1)`.",
    )


def _without_own_slot(main: Graph) -> Iterator[tuple[str, Lint]]:
    """Remote variables without a slot of their own."""
    slots: dict[tuple[RemoteBuffer, int], list[str]] = defaultdict(list)
    for v in main.variables:
        buffer, entry = v.location_info.buffer, v.location_info.entry
        if buffer is not None:
            slots[buffer, entry].append(f"`{v.name}`")
            if not buffer.meta_shape and v.nelms != math.prod(buffer.tensor_shape):
                yield f"`{v.name}` ({brief(v)}, in {buffer!r})", _OTHER_SIZE
    for (buffer, entry), names in slots.items():
        if entry >= buffer.entries:
            yield f"{', '.join(names)} (slot {entry} of {buffer!r})", _NO_SLOT
        elif len(names) > 1:
            yield f"{', '.join(names)} (slot {entry} of {buffer!r})", _SAME_SLOT


_OPERATOR = re.compile(r"(\*\*|[-*/@%&|])=(?!=)")
"""Augmented assignment in a source line: `x -= y` and `x - y` record the same op, and only the line distinguishes them.
"""

_KINDS = {"**": "Pow", "-": "Sub", "*": "Mul", "/": "Div", "@": "MatMul", "%": "Fmod", "&": "And", "|": "Or"}
"""Ops that these operators record; other ops of the line compute their operands."""


def _rebound_names(graph: Graph) -> Iterator[Op]:
    """Unread results of `x -= y` and similar ops, which create a new `x`."""
    if graph.gradient_of is not None:  # its ops are identified by lines of the forward graph
        return
    read = {*graph.outputs}.union(*(op.inputs for op in graph.ops))
    for op in graph.ops:
        unread = op.outputs and op.inputs and read.isdisjoint(op.outputs)
        if unread and op.kind.name in {_KINDS[operator] for operator in _OPERATOR.findall(op.source.text)}:
            yield op


class _Program:
    """All graphs of a program, and lints that concern the whole program."""

    def __init__(self, main: Graph) -> None:
        self.main = main
        # The content of a value in a remote buffer, or of a sharded one, is unknown.
        self.variables = [v for v in main.variables if v.piece is None and not v.location_info.isRemote()]
        self.runs: dict[Graph, GraphEffects] = {}
        for graph in callees_first(main):
            storages = self.variables if graph is main else graph.inputs
            self.runs[graph] = EffectsPass(graph, storages, self.runs).run
        self.run = self.runs[main]
        # Content of variables before a run.
        self.first = [0 if writer is None else PER_RUN for writer in self.run.writers]

    def repeated(self) -> Iterator[Op]:
        """Dropout ops that repeat their mask in every run of a stateful program."""
        if any(self.run.writers):
            for op, seed in sorted(self.run.masks, key=lambda mask: mask[0].id):
                is_recomputed = op.graph.gradient_of is not None  # recomputation draws the same numbers
                if not is_recomputed and not bind_inputs(seed, self.first) & PER_RUN:
                    yield op

    def drifting(
        self, report: Report, diverged: Mapping[Variable, tuple[int, ...]]
    ) -> Iterator[tuple[Variable, Op, tuple[str, ...]]]:
        """Variables that drift apart on replicas sharing them, with the last op to change each, and the axes.

        Not those whose numbers are reduced, such as sums over micro-batches, nor those that nothing reads before they
        are written, and means over micro-batches, which start afresh in each run. A variable that is not sharded may
        hold a shard of each replica's own, such as a momentum, which is gathered.

        Args:
            diverged: variables of the report that differ after a run, with the axes.
        """
        if report.mesh is None or not diverged:
            return
        shared_variables = [v for v in self.main.variables if v.piece is not None or not v.location_info.isRemote()]
        run = EffectsPass(self.main, [v.on_replica for v in shared_variables], self.runs).run
        for i, (v, writer) in enumerate(zip(shared_variables, run.writers, strict=True)):
            bit = 1 << (INPUTS + i)
            is_intended = v.replica_grouping.group_size == 1 or v.retrieval_mode == "all_replicas"
            restarts = writer is not None and writer.kind.overwrites is not None and writer.kind.overwrites.restarts
            reduced = run.reduced if v.piece is not None else run.reduced | run.gathered
            if (
                v in diverged
                and writer
                and not (is_intended or restarts)
                and run.initial_reads & bit
                and not reduced & bit
            ):
                yield v, writer, tuple(report.mesh.names[axis] for axis in diverged[v])
