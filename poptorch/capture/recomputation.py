"""Activation recomputation: selected regions of a model, each a call of a function that the backward pass recomputes.

Regions come from three sources: checkpoints of `torch.utils.checkpoint`, which the tracer records; ops between the
tensors of `poptorch.recomputationCheckpoint`; and the option `autoRecomputation`, which pipelines have by default. A
region is a call of a trace, shared by equal regions: its gradient recomputes everything in it from its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise, takewhile
from typing import Any

from poptorch.capture.outlining import CALL, call, outlining_key, used_outside
from poptorch.capture.seeding import SEEDING
from poptorch.capture.trace import Node, Trace, Value, external_inputs
from popxl.extend.graphs import last_uses

_NORMS = frozenset(
    f"torch.{name}_norm" for name in ("batch", "group", "instance", "layer", "local_response", "rms")
) | frozenset(f"aten.native_{name}_norm" for name in ("batch", "group", "layer"))


def between_checkpoints(nodes: Sequence[Node], by_stage: bool, to_the_end: bool = False) -> list[Node]:
    """Assign ops to recomputation regions that end at saved tensors.

    Args:
        nodes: all ops, in order. Those already in regions are unchanged.
        by_stage: whether regions also end where pipeline stages do.
        to_the_end: whether the ops after the last tensor that is kept are a region. Their backward pass follows
            directly, so nothing is saved.
    """
    groups: list[tuple[Hashable, list[Node]]] = []
    segment = 0
    for node in nodes:
        segment += node.is_saved and not node.regions
        key = (segment, (node.placement.unit, node.placement.stage) if by_stage else None)
        if node.is_saved and not node.regions or not groups or groups[-1][0] != key:
            groups.append((key, []))
        groups[-1][1].append(node)
    first = 1 + max((region for node in nodes for region in node.regions), default=0)
    result: list[Node] = []
    for number, (_, group) in enumerate(groups):
        is_region = to_the_end or number < len(groups) - 1
        for node in group:
            keeps_region = bool(node.regions) or node.is_saved
            result.append(replace(node, regions=(first + number,)) if is_region and not keeps_region else node)
    return result


def keeping_all_but_norms(nodes: Iterable[Node]) -> list[Node]:
    """Mark all ops as saved, except norms and ops whose single input is unsaved."""
    result, lost = list[Node](), set[int]()
    for node in nodes:
        is_norm = node.op in _NORMS or len(node.inputs) == 1 and id(node.inputs[0]) in lost
        if is_norm:
            lost.update(map(id, node.results))
        result.append(node if is_norm else replace(node, is_saved=True))
    return result


def layers(nodes: Sequence[Node]) -> list[Node]:
    """Assign each outlined layer to a recomputation region, and divide ops between layers into regions.

    A segment of n ops has pieces of about √n ops each. They end where the values passed on are smallest.
    """
    first = 1 + max((region for node in nodes for region in node.regions), default=0)
    ends = sorted({0, len(nodes)} | {i + k for i, node in enumerate(nodes) if node.op == CALL for k in (0, 1)})
    crossing = _crossing(nodes)
    bounds = [0]
    for start, end in pairwise(ends):
        size = math.isqrt(end - start)
        while end - bounds[-1] > size + size // 2:
            candidates = range(bounds[-1] + max(1, size // 2), min(end, bounds[-1] + size + size // 2 + 1))
            bounds.append(min(candidates, key=lambda i: (crossing[i], -i)))
        bounds.append(end)
    result: list[Node] = []
    for number, (start, end) in enumerate(pairwise(bounds)):
        for node in nodes[start:end]:
            keeps_region = bool(node.regions) or end == len(nodes)
            result.append(node if keeps_region else replace(node, regions=(first + number,)))
    return result


def _crossing(nodes: Sequence[Node]) -> list[int]:
    """Live elements at each position: produced by earlier ops, and read from this position onwards."""
    change = [0] * (len(nodes) + 2)
    produced = {id(value): (i, value) for i, node in enumerate(nodes) for value in node.results}
    last = last_uses(map(id, node.inputs) for node in nodes)
    for key, (i, value) in produced.items():
        if key in last:
            change[i + 1] += math.prod(value.shape)
            change[last[key] + 1] -= math.prod(value.shape)
    return list(accumulate(change))


def as_calls(nodes: Sequence[Node], wanted: Iterable[Value]) -> list[Node]:
    """Replace recomputation regions by calls of traces; equivalent regions share one trace.

    Args:
        wanted: values that are used outside of `nodes`.
    """
    traces: dict[Hashable, Trace] = {}
    converted: dict[Trace, Trace] = {}
    return _as_calls(nodes, {id(value) for value in wanted}, traces, converted)


def _as_calls(
    nodes: Sequence[Node], wanted: set[int], traces: dict[Hashable, Trace], converted: dict[Trace, Trace]
) -> list[Node]:
    """As `as_calls`; `traces` and `converted` are shared with regions inside of others."""
    last = last_uses((map(id, node.inputs) for node in nodes), wanted)
    result: list[Node] = []
    position = 0
    for region, run in groupby(nodes, lambda node: None if node.op in SEEDING else node.regions[:1]):
        region_nodes = list(run)
        position += len(region_nodes)
        region_nodes = [_within_call(node, traces, converted) for node in region_nodes]
        if not region:
            result += region_nodes
            continue
        region_nodes = [replace(node, regions=node.regions[1:]) for node in region_nodes]
        returned = used_outside(region_nodes, position, last)
        if not returned:
            result += _as_calls(region_nodes, set(), traces, converted)
            continue
        key = (outlining_key(region_nodes), tuple(returned))
        if key not in traces:
            traces[key] = _trace(region_nodes, returned, traces, converted)
        result.append(call(region_nodes, traces[key], returned, _module(region_nodes)))
    return result


def _within_call(node: Node, traces: dict[Hashable, Trace], converted: dict[Trace, Trace]) -> Node:
    """A node; for calls of traces, regions inside the trace become calls."""
    if node.op != CALL:
        return node
    trace: Trace = node.arguments["trace"]
    if trace not in converted:
        converted[trace] = replace(trace, nodes=_as_calls(trace.nodes, set(map(id, trace.outputs)), traces, converted))
    return replace(node, arguments=node.arguments | {"trace": converted[trace]})


def _module(nodes: Sequence[Node]) -> str:
    """Longest common module path of these ops."""
    paths = [node.scope.split(".") for node in nodes]
    return ".".join(names[0] for names in takewhile(lambda names: len({*names}) == 1, zip(*paths, strict=False)))


def _trace(region_nodes: Sequence[Node], returned: Sequence[tuple[int, int]], traces: Any, converted: Any) -> Trace:
    """Trace of a region's ops, recomputed for its gradient."""
    if len(region_nodes) == 1 and region_nodes[0].op == CALL:
        called: Trace = region_nodes[0].arguments["trace"]
        return replace(called, outputs=[called.outputs[k] for _, k in returned], is_recomputed=True)
    inputs, outputs = external_inputs(region_nodes), [region_nodes[i].results[k] for i, k in returned]
    nodes = _as_calls(region_nodes, set(map(id, outputs)), traces, converted)
    return Trace(inputs, nodes, outputs, names=[v.name for v in inputs], is_recomputed=True, keeps_seeds=True)
