"""`AxisTraffic`: traffic along each dimension of a program's replicas, and its links."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from popxl.base.pages import Page, Table, bytes_text, seconds_text
from popxl.base.records import Record
from runtime.costs.network import Wires
from runtime.costs.work import Collective
from runtime.program.compiled import CompiledProgram
from runtime.targets.mesh import dimensions_of


class AxisTraffic(Record):
    """Traffic of the replicas along a dimension in one run.

    Attributes:
        name: axis of the program; for one without a name, the distance of its replicas: "replicas 8". Several that a
            collective uses together are joined by " × ".
        size: number of replicas along the axis.
        over: the wires, the fastest first: "NVLink", "NVLink, InfiniBand NDR".
        bytes: bytes on one chip, as in `Cost.collectives`.
        seconds: total time, including overlapped time.
    """

    name: str
    size: int
    over: str
    bytes: int
    seconds: float


def axes_of(program: CompiledProgram, collectives: Sequence[Collective], wires: Wires) -> tuple[AxisTraffic, ...]:
    """Traffic along each dimension of the replicas of a program, the outermost first; none without a mesh."""
    if program.layout.replicas.mesh is None:
        return ()
    dimensions = dimensions_of(program.layout.main.ir)
    shape = [dimension.size for dimension in dimensions]
    sent, seconds = defaultdict[tuple[int, ...], int](int), defaultdict[tuple[int, ...], float](float)
    for each in collectives:
        axes = _varying_dimensions(each, shape)
        sent[axes] += each.runs * each.bytes
        seconds[axes] += each.runs * wires.time(each).seconds
    numbers = np.arange(math.prod(shape)).reshape(shape)
    traffic = []
    for axes in dict.fromkeys([*((d,) for d in range(len(shape))), *sorted(sent)]):
        if not axes or len(axes) > 1 and not sent[axes]:
            continue
        members = numbers[tuple(slice(None) if d in axes else 0 for d in range(len(shape)))].flat
        traffic.append(
            AxisTraffic(
                name=" × ".join(dimensions[d].name for d in axes),
                size=math.prod(shape[d] for d in axes),
                over=", ".join(span.link.name for span in wires.spans(map(int, members))),
                bytes=sent[axes],
                seconds=seconds[axes],
            )
        )
    return tuple(traffic)


def _varying_dimensions(collective: Collective, shape: Sequence[int]) -> tuple[int, ...]:
    """Varying dimensions among the members of a group."""
    if not collective.groups:
        return tuple(range(len(shape)))
    places = {np.unravel_index(each, shape) for each in collective.groups[0] if each < math.prod(shape)}
    return tuple(d for d in range(len(shape)) if len({place[d] for place in places}) > 1)


def page_of_axes(axes: Sequence[AxisTraffic]) -> list[Page]:
    """Page about axes and wires, with suggested changes of the order; empty without axes."""
    if not axes:
        return []
    rows = [[a.name, str(a.size), a.over or "none", bytes_text(a.bytes), seconds_text(a.seconds)] for a in axes]
    table = Table(["axis", "replicas", "over", "bytes of a chip", "takes"], rows)
    return [Page("Axes and wires", [table, *_misplaced(axes)])]


def _misplaced(axes: Sequence[AxisTraffic]) -> list[str]:
    """Sentences about an axis that sends more over slower wires than another over faster ones."""
    single = [a for a in axes if " × " not in a.name]
    slow = max((a for a in single if "," in a.over or a.over != single[-1].over), key=lambda a: a.bytes, default=None)
    inside = single[-1]
    if slow is None or slow is inside or slow.bytes <= inside.bytes:
        return []
    return [
        f"`{slow.name}` sends more than `{inside.name}`, and goes over {slow.over}: as the last of `axes` it would "
        f"stay on {inside.over}, as far as that reaches."
    ]
