"""Estimated cost of a program on IPUs, from the published figures of the hardware. Nothing is run.

Each op is a step, as on the hardware, where all tiles of an IPU first exchange data and then compute (bulk synchronous
parallel). A lower bound of its time follows from four numbers of the op: its operations, the bytes that it reads and
writes, the bytes that move between tiles, and the bytes that come from outside. The steps are added up. Costs without
published figures are left out: code, vertex state, imbalance between tiles, rearrangements within an op,
synchronisation. So real programs need more memory and more time; the numbers are for comparing parts of a program.

Sources of the figures:
    the IPU Programmer's Guide (docs.graphcore.ai/projects/ipu-programmers-guide), for tiles and their memory; the data
    sheets of the IPU-M2000 and the Bow-2000 (docs.graphcore.ai/projects/bow-2000-datasheet), for FLOP/s, links and
    clocks; the announcement of the GC200 of July 2020, for 62.5 TFLOP/s in float32, 47.5 TB/s of memory and 8 TB/s of
    exchange; the Tile Vertex ISA, for vectors of 8 bytes. There is no official figure for streaming memory; about
    20 GB/s for each IPU is what programs see.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import computed_field

from popxl.analysis.flops import Flops, moved, op_work, own_flops
from popxl.analysis.memory import constants_of, held_variables, runs_of, steps_of
from popxl.base.pages import OnPage, Page, Table, bytes_text, count_text, seconds_text
from popxl.base.records import Record
from popxl.core.aliasing import reachable
from popxl.values.spec import size_in_bytes

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.core.tensor import Tensor
    from popxl.ir import Ir


@dataclass(frozen=True)
class Hardware:
    """Published figures of an IPU.

    Attributes:
        name: name of the IPU.
        tiles: number of tiles; each has a core and memory of its own.
        clock: cycles a second.
        tile_memory: bytes, on each tile.
        products_16, products_32: operations of a tile in a cycle, in products of matrices of float16 and of float32.
        vector: bytes of operands that a tile computes with in a cycle, element by element.
        memory: bytes that a tile reads and writes in a cycle.
        exchange: bytes a second between the tiles, in all.
        links: bytes a second to other IPUs.
        host: bandwidth to and from the host, in bytes a second.
        streaming: bytes a second to and from streaming memory, where remote buffers are.
    """

    name: str
    tiles: int = 1472
    clock: float = 1.33e9
    tile_memory: int = 624 * 1024
    products_16: int = 128
    products_32: int = 32
    vector: int = 8
    memory: int = 24
    exchange: float = 8e12
    links: float = 320e9
    host: float = 64e9
    streaming: float = 20e9

    @property
    def memory_size(self) -> int:
        """Bytes of all tiles."""
        return self.tiles * self.tile_memory


GC200 = Hardware("Colossus Mk2 GC200")
"""The IPU of the IPU-M2000: 1472 * 1.33 GHz * 128 are 250 TFLOP/s in float16, and 62.5 in float32."""

BOW = Hardware("Bow", clock=1.85e9, exchange=8e12 * 1.85 / 1.33)
"""The IPU of the Bow-2000: the same at a higher clock, 350 TFLOP/s in float16."""


class OpEstimate(Record):
    """Cost of one op type in one graph, over all runs of that graph.

    Attributes:
        op: the type.
        graph: the name of the graph; that of the main graph is empty.
        count: number of executions in one run of the program, at most.
        flops: operations of all of them.
        cycles: cycles of all of them on their IPU.
        bound: resource that takes most of the time: "compute", "memory", "exchange", "links", "host" or "streaming
            memory".
    """

    op: str
    graph: str
    count: int
    flops: int
    cycles: int
    bound: str


class IpuEstimate(Record):
    """Cost of one IPU per program run.

    Attributes:
        ipu: number of the IPU.
        cycles: cycles of all its ops, one after the other.
        seconds: the cycles as time.
        variables, constants: bytes that are live all the time.
        temporaries: bytes of all other values, counted op by op, at their highest.
        memory: bytes in all.
        share: ratio to the memory of the IPU; above 1 the program does not fit.
    """

    ipu: int
    cycles: int
    seconds: float
    variables: int
    constants: int
    temporaries: int
    memory: int
    share: float


class Estimate(OnPage, Record):
    """Estimated cost of a program on IPUs, based on published figures, without measurement.

    Attributes:
        hardware: name of the IPU.
        ipus: estimates for each IPU of a replica.
        ops: the ops, by type and graph, the longest first.
        cycles: cycles of the slowest IPU: IPUs of a pipeline work at the same time, once it is full.
        fits: whether the program fits the memory of every IPU.

    Example:
        >>> session = popxl.Session(ir, "ipu_model")
        >>> session.report.estimate.cycles
        >>> print(popxl.analysis.estimate.estimate_of(ir, popxl.analysis.estimate.BOW))
    """

    hardware: str
    ipus: tuple[IpuEstimate, ...]
    ops: tuple[OpEstimate, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def cycles(self) -> int:
        """The cycles of the IPU that takes longest."""
        return max((ipu.cycles for ipu in self.ipus), default=0)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def fits(self) -> bool:
        """Test whether every IPU has enough memory."""
        return all(ipu.share <= 1 for ipu in self.ipus)

    def __repr__(self) -> str:
        return f"Estimate[{count_text(self.cycles)} cycles on {self.hardware}]"

    def page(self) -> Page:
        """Page for `print` and notebooks."""
        fits = "" if self.fits else " The program does not fit: not all IPUs have enough memory."
        summary = (
            f"An estimate for one replica on the {self.hardware}, from its published figures; nothing was measured. "
            "Each op takes as long as its operations, its bytes or its exchange need at best. Code, synchronisation "
            f"and imbalance between tiles are not counted.{fits}"
        )
        ipus = [
            [
                f"IPU {row.ipu}",
                count_text(row.cycles),
                seconds_text(row.seconds),
                bytes_text(row.variables + row.constants),
                bytes_text(row.temporaries),
                f"{100 * row.share:.1f} %",
            ]
            for row in self.ipus
        ]
        ops = [
            [row.op, row.graph or "main graph", str(row.count), count_text(row.cycles), row.bound] for row in self.ops
        ]
        return Page(
            "Estimate for IPUs",
            [
                summary,
                Table(["", "cycles", "time", "variables", "temporaries", "of its memory"], ipus),
                *Table.first_rows(["op", "graph", "runs", "cycles", "bound by"], ops),
            ],
        )


def estimate_of(ir: Ir, hardware: Hardware = GC200) -> Estimate:
    """Estimate the cost of one replica on IPUs. Compiles and runs nothing; needs no device.

    Args:
        ir: the program.
        hardware: IPU: `GC200` or `BOW`, or figures of your own.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     x = popxl.variable(np.ones((1024, 1024)), popxl.float32)
        ...     y = x @ x
        >>> estimate_of(ir)
        Estimate[47.0 k cycles on Colossus Mk2 GC200]
    """
    main = ir.main_graph
    runs = runs_of(main)
    cycles: Counter[int] = Counter()
    sums: defaultdict[tuple[str, str], _Sum] = defaultdict(_Sum)
    for graph in reachable(main):
        for op in graph.ops:
            if not op.called_graphs:
                flops, spent = own_flops(op), cycles_of(op, hardware)
                cycles[op.ipu or 0] += runs[graph] * spent.total()
                sums[op.op_type, graph.name].add(runs[graph], flops, spent)
    return Estimate(
        hardware=hardware.name,
        ipus=tuple(_of_ipu(ir, ipu, spent, hardware) for ipu, spent in sorted(cycles.items())),
        ops=tuple(
            OpEstimate(op=op, graph=graph, count=s.count, flops=s.flops, cycles=s.cycles, bound=s.bound)
            for (op, graph), s in sorted(sums.items(), key=lambda item: -item[1].cycles)
        ),
    )


def cycles_of(op: Op, hardware: Hardware) -> Counter[str]:
    """Cycles of an op, split into computation or memory (the longer one) and exchange."""
    return Counter({resource: math.ceil(cycles) for resource, cycles in _spent(op, hardware).items()})


def _spent(op: Op, hardware: Hardware) -> dict[str, float]:
    if op.kind.stands_for is not None:
        spent: Counter[str] = Counter()
        for member in op.parts:
            spent.update(cycles_of(member, hardware))
        return {**spent}
    moves = moved(op) * hardware.clock
    if op.kind.exchange == "stream":
        return {"host": moves / hardware.host}
    if op.kind.exchange == "buffer":
        return {"streaming memory": moves / hardware.streaming}
    if op.kind.between_replicas or op.op_type == "IpuCopy":
        return {"links": moves / hardware.links}
    if op.kind.view is not None or op.kind.effect or not op.inputs:
        return {}
    work = op_work(op)
    flops = work.flops
    computing = _computing(op, flops, hardware) / hardware.tiles
    touched = (work.read + work.written) / hardware.memory / hardware.tiles
    # An operand of the result's shape lies where the result will, if each element is computed of its counterparts.
    stays = flops.others and not flops.products
    exchanged = sum(
        size_in_bytes(t) for t in op.inputs if not (stays and op.outputs and t.shape == op.outputs[0].shape)
    )
    resource = "compute" if computing >= touched else "memory"
    return {resource: max(computing, touched), "exchange": exchanged * hardware.clock / hardware.exchange}


def _computing(op: Op, flops: Flops, hardware: Hardware) -> float:
    """Cycles for one tile computing everything."""
    width = max((t.dtype.itemsize for t in op.inputs), default=4)
    products = hardware.products_16 if width <= 2 else hardware.products_32
    return flops.products / products + flops.others * width / hardware.vector


@dataclass
class _Sum:
    """Accumulated cost of several ops."""

    count: int = 0
    flops: int = 0
    spent: Counter[str] = field(default_factory=Counter)

    def add(self, count: int, flops: Flops, spent: Counter[str]) -> None:
        """Add `count` ops with these operations and cycles."""
        self.count += count
        self.flops += count * flops.total
        for resource, cycles in spent.items():
            self.spent[resource] += count * cycles

    @property
    def cycles(self) -> int:
        return self.spent.total()

    @property
    def bound(self) -> str:
        """The resource that dominates the cycles."""
        return max(self.spent, key=lambda resource: self.spent[resource], default="nothing")


def _of_ipu(ir: Ir, ipu: int, cycles: int, hardware: Hardware) -> IpuEstimate:
    """The part of a program on one IPU."""

    def on_this_ipu(t: Tensor) -> int:
        return size_in_bytes(t) if (t.location[0] or 0) == ipu else 0

    main = ir.main_graph
    variables, constants = (sum(map(on_this_ipu, tensors)) for tensors in (held_variables(main), constants_of(main)))
    temporaries = steps_of(main, on_this_ipu).peak
    memory = variables + constants + temporaries
    return IpuEstimate(
        ipu=ipu,
        cycles=cycles,
        seconds=cycles / hardware.clock,
        variables=variables,
        constants=constants,
        temporaries=temporaries,
        memory=memory,
        share=memory / hardware.memory_size,
    )
