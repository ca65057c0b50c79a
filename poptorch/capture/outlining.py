"""Outlining: equivalent modules of a model become calls of one function.

Twelve equal layers of an encoder are captured as twelve runs of ops. They are recognised by their key: the ops with all
their arguments, where values from outside are numbered in order. For each key that occurs often enough one
`Trace` is kept, and the runs are replaced by calls of it; so it is lowered, differentiated and compiled once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any

from torch.utils import _pytree as pytree

from poptorch.base.dtypes import to_numpy
from poptorch.capture.seeding import SEEDING
from poptorch.capture.trace import Data, Node, Trace, Value, View, external_inputs
from popxl.extend.arguments import exact_key
from popxl.extend.graphs import last_uses

CALL = "poptorch.call"
"""Op name of a call. Arguments: `trace`, `inputs` and `name`."""

SMALLEST = 8
"""Least number of ops of an outlined module, as calls have a cost."""


@dataclass(frozen=True)
class _OpRange:
    """Contiguous ops of one module.

    Attributes:
        path: path of the module.
        start, stop: positions among all ops.
    """

    path: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def outlined(nodes: Sequence[Node], wanted: Iterable[Value]) -> list[Node]:
    """Replace ops of equivalent modules by calls of one shared trace.

    Args:
        wanted: values that are used outside of `nodes`.
    """
    by_key: defaultdict[Hashable, list[_OpRange]] = defaultdict(list)
    for run in _runs(nodes):
        by_key[outlining_key(nodes[run.start : run.stop])].append(run)
    repeated = [runs for runs in by_key.values() if len(runs) > 1]
    covered: set[int] = set()
    chosen: list[list[_OpRange]] = []
    for runs in sorted(repeated, key=lambda runs: -len(runs[0])):
        # A module that does nothing but run another one has the same ops: they are there once.
        different = {run.start: run for run in runs}.values()
        free = [run for run in different if covered.isdisjoint(range(run.start, run.stop))]
        if len(free) > 1:
            chosen.append(free)
            covered.update(i for run in free for i in range(run.start, run.stop))
    return _with_calls(nodes, chosen, {id(value) for value in wanted})


def _runs(nodes: Sequence[Node]) -> list[_OpRange]:
    """Op ranges of outlining candidates: modules that run exactly once, with contiguous ops."""
    runs_of_path: dict[str, list[_OpRange]] = {}
    seeding = {position for position, node in enumerate(nodes) if node.op in SEEDING}
    for position, node in enumerate(nodes):
        for path in accumulate(node.scope.split("."), "{}.{}".format) if node.scope else ():
            runs = runs_of_path.setdefault(path, [])
            start = runs.pop().start if runs and runs[-1].stop == position else position
            runs.append(_OpRange(path, start, position + 1))
    once = [runs[0] for _, runs in sorted(runs_of_path.items()) if len(runs) == 1 and len(runs[0]) >= SMALLEST]
    return [
        run
        for run in once
        if seeding.isdisjoint(range(run.start, run.stop)) and not _keeps_in_larger_region(nodes, run)
    ]


def _keeps_in_larger_region(nodes: Sequence[Node], run: _OpRange) -> bool:
    """Whether a region saves results of a run, and extends beyond it: calls cannot save inner results."""
    own = nodes[run.start : run.stop]
    neighbours = [*nodes[max(run.start - 1, 0) : run.start], *nodes[run.stop : run.stop + 1]]
    enclosing = set(_regions_around(own))
    return any(node.is_saved for node in own) and any(not enclosing.isdisjoint(node.regions) for node in neighbours)


def outlining_key(nodes: Sequence[Node], labels: dict[int, Hashable] | None = None) -> Hashable:
    """Key of ops, independent of their inputs: equal for runs that can call one trace.

    So it holds all that affects the lowered graph: placement, effects, recomputation regions, and the identity of
    objects that cannot be compared. `Trace.capture_key` disregards these.

    Args:
        labels: labels of values from outside, by identity. Labels of results are added.
    """
    labels = {} if labels is None else labels
    key = []
    depth = len(_regions_around(nodes)) if nodes else 0
    numbers: dict[int, int] = {}
    for number, node in enumerate(nodes):
        leaves, structure = pytree.tree_flatten(node.arguments)
        operands = tuple(_leaf(leaf, labels) for leaf in leaves)
        results = tuple((r.shape, r.dtype) for r in node.results)
        labels |= {id(r): (number, i) for i, r in enumerate(node.results)}
        flags = (node.stops, node.has_effect, node.placement, node.is_saved)
        regions = tuple(numbers.setdefault(region, len(numbers)) for region in node.regions[depth:])
        key.append((node.op, node.overload, str(structure), operands, results, flags, regions))
    return tuple(key)


def _regions_around(nodes: Sequence[Node]) -> tuple[int, ...]:
    """Recomputation regions that enclose all of these ops."""
    enclosing = nodes[0].regions
    for node in nodes:
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(enclosing, node.regions, strict=False)))
        enclosing = enclosing[:common]
    return enclosing


def _leaf(leaf: Any, labels: dict[int, Hashable]) -> Hashable:
    """Key of one argument; see `outlining_key`."""
    if isinstance(leaf, Value):
        if id(leaf) not in labels:
            labels[id(leaf)] = ("from outside", len(labels), leaf.shape, leaf.dtype)
        return labels[id(leaf)]
    if isinstance(leaf, Data):
        return (leaf.tensor.dtype, leaf.tensor.shape, to_numpy(leaf.tensor).tobytes())
    if isinstance(leaf, View):
        return repr(leaf)
    if isinstance(leaf, Trace):
        inner_labels: dict[int, Hashable] = {id(v): (i, v.shape, v.dtype) for i, v in enumerate(leaf.inputs)}
        key = outlining_key(leaf.nodes, inner_labels)
        return (tuple(_leaf(v, labels) for v in leaf.outer), key, tuple(inner_labels[id(v)] for v in leaf.outputs))
    try:
        return (type(leaf), hash(leaf), exact_key(leaf))
    except TypeError:
        return id(leaf)


def _with_calls(nodes: Sequence[Node], chosen: list[list[_OpRange]], wanted: set[int]) -> list[Node]:
    """Nodes with runs replaced by calls: each list of runs shares the trace of its first one."""
    last = last_uses((map(id, node.inputs) for node in nodes), wanted)
    starts: dict[int, tuple[_OpRange, Trace, list[tuple[int, int]]]] = {}
    for runs in chosen:
        template = nodes[runs[0].start : runs[0].stop]
        used = (used_outside(nodes[run.start : run.stop], run.stop, last) for run in runs)
        returned = sorted({result_id for results_of_run in used for result_id in results_of_run})
        outputs = [template[i].results[k] for i, k in returned]
        inputs = external_inputs(template)
        names = [value.name.removeprefix(f"{runs[0].path}.") for value in inputs]
        trace = Trace(inputs, _within(template, runs[0].path), outputs, names=names)
        starts |= {run.start: (run, trace, returned) for run in runs}
    result: list[Node] = []
    position = 0
    while position < len(nodes):
        if position not in starts:
            result.append(nodes[position])
            position += 1
            continue
        run, trace, returned = starts[position]
        result.append(call(nodes[run.start : run.stop], trace, returned, run.path))
        position = run.stop
    return result


def used_outside(nodes: Sequence[Node], stop: int, last: Mapping[int, int]) -> list[tuple[int, int]]:
    """Results used at or after position `stop`, as pairs: op number, result number."""
    return [
        (number, k)
        for number, node in enumerate(nodes)
        for k, value in enumerate(node.results)
        if last.get(id(value), -1) >= stop
    ]


def _within(nodes: Sequence[Node], path: str) -> list[Node]:
    """Ops with scopes and regions relative to a module."""
    depth = len(_regions_around(nodes))
    return [
        replace(node, scope=node.scope.removeprefix(path).lstrip("."), regions=node.regions[depth:]) for node in nodes
    ]


def call(nodes: Sequence[Node], trace: Trace, returned: Sequence[tuple[int, int]], path: str) -> Node:
    """Call of a trace that replaces equivalent ops.

    Args:
        nodes: the ops.
        trace: trace to call.
        returned: results of the ops that the trace returns: number of the op, and of its result.
        path: path of the module that the ops are in.
    """
    name = ".".join(part for part in path.split(".") if not part.isdigit())
    arguments = {"trace": trace, "inputs": tuple(external_inputs(nodes)), "name": name or path or "region"}
    results = [nodes[i].results[k] for i, k in returned]
    has_effect = any(node.has_effect for node in nodes)
    return replace(
        nodes[0],
        op=CALL,
        overload="",
        arguments=arguments,
        results=results,
        has_effect=has_effect,
        stops=frozenset(),
        scope="",
        regions=_regions_around(nodes),
        is_saved=False,
    )
