"""`Cost`: numeric per-chip cost of a compiled program, returned by `session.cost()`.

`runtime.costs.program_cost` computes it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from popxl.analysis.communication import COPY
from popxl.base.atomic_files import replace_file
from popxl.base.pages import OnPage, Page, Table, bytes_text, count_text, flops_text, seconds_text
from popxl.base.records import Record
from runtime.costs.axes import AxisTraffic, page_of_axes
from runtime.costs.graph_costs import GraphCost
from runtime.costs.lines import LineCost
from runtime.costs.precision import PrecisionCost
from runtime.costs.step_timeline import StepTimeline


class CollectiveCost(Record):
    """Cost of all collectives of one kind.

    Attributes:
        count: number of executions in a run.
        bytes: bytes on one chip: of operands or results, whichever is more.
    """

    count: int
    bytes: int


class CollectiveUse(Record):
    """Collectives at one source line of the program.

    Attributes:
        kind: kind of XLA collective: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute".
        source: the line, `train.py:12`; "" where XLA does not say.
        graph: name of the graph; "" for the main graph.
        replicas: number of replicas in a group.
        count, bytes: as in `CollectiveCost`.
    """

    kind: str
    source: str
    graph: str
    replicas: int
    count: int
    bytes: int


class IpuCost(Record):
    """Cost of an IPU as a separate device.

    Attributes:
        ipu: number of the IPU.
        seconds: time of its computation in a run; it waits during the rest. `None` without figures.
    """

    ipu: int
    seconds: float | None


class Cost(OnPage, Record):
    """Cost of a compiled program on one chip: sizes reported by XLA, and one run.

    A run is derived from the compiled program: loops count with their iterations, conditionals with all branches.
    Nothing was measured. `seconds` is an estimate: kernels in XLA's order, each by the figures and the efficiency of
    the chip, collectives by their wires; see `docs/time.md`.

    Attributes:
        code_bytes: machine code; `None` where XLA does not say.
        argument_bytes: bytes of variables, remote buffers on the device, and feeds.
        temporary_bytes: further bytes that a run needs.
        alias_bytes: bytes of arguments that are overwritten with results, rather than copied.
        host_bytes: bytes of host memory for the device: remote buffers, and temporaries of executables.
        flops: floating point operations.
        bytes_accessed: bytes that kernels read and write, in whichever memory.
        kernels: number of kernels that the chip runs one after the other: fusions, products, copies, collectives.
        copies: number of kernels that only copy; including a TPU's transfers between its memories during computation.
        collectives: collectives by kind. Copies between IPUs that are separate devices have the kind "copy between
            IPUs"; `argument_bytes`, operations and kernels are then totals of all IPUs.
        uses: collectives by lines of the program.
        cycles: XLA's own estimate, for TPUs; `None` elsewhere. For several IPUs, from the first start to the last end,
            including the copies between them.
        compile_seconds: compile time, including all overheads.
        graphs: the graphs, the longest first.
        seconds: time of a run; `None` for a device without figures. IPUs that are separate devices work at the same
            time unless they wait for each other: a pipeline takes the time of its schedule.
        step: timeline of the run: its bounds, and exposed communication.
        axes: traffic along each dimension of the replicas, and its links.
        utilisation: share of the published rate of products that a run attains: its model FLOPs utilisation, if it
            recomputes nothing.
        lines: work and memory by source lines, most bytes first.
        arguments: bytes of the executables' arguments, by name.
        overwritten: bytes of arguments that results overwrite.
        chip_hours: seconds of all chips in a run, in hours.
        ipus: these IPUs; nothing where one device stands for all.
        precisions: the same for the precision that float32 products have, and for faster ones: "highest", "high" and
            "default". Nothing for a device without figures, and for programs without such products.

    Example:
        >>> cost = popxl.Session(ir, "tpu v5e:2x2").cost()
        >>> cost.cycles, {kind: each.bytes for kind, each in cost.collectives.items()}
        >>> print(cost)
    """

    name: str
    chip: str
    code_bytes: int | None
    argument_bytes: int
    temporary_bytes: int
    alias_bytes: int
    host_bytes: int
    flops: int
    bytes_accessed: int
    kernels: int
    copies: int
    collectives: Mapping[str, CollectiveCost]
    uses: tuple[CollectiveUse, ...]
    cycles: int | None
    compile_seconds: float
    graphs: tuple[GraphCost, ...]
    seconds: float | None
    ipus: tuple[IpuCost, ...] = ()
    precisions: Mapping[str, PrecisionCost] = {}
    step: StepTimeline | None = None
    axes: tuple[AxisTraffic, ...] = ()
    utilisation: float | None = None
    chip_hours: float | None = None
    lines: tuple[LineCost, ...] = ()
    arguments: Mapping[str, int] = {}
    overwritten: Mapping[str, int] = {}

    def page(self) -> Page:
        """Page for `print` and notebooks."""
        return Page(f"Cost of {self.name}, on one {self.chip}", [self.totals(), *self.details()])

    def totals(self) -> Table:
        """Table of sizes, operations, kernels and times of one run."""
        sizes = ("code", "argument", "temporary", "alias", "host")
        sized = ((name, getattr(self, f"{name}_bytes")) for name in sizes)
        rows = [[name, bytes_text(count)] for name, count in sized if count is not None]
        rows += [["read and written", bytes_text(self.bytes_accessed)], ["operations", flops_text(self.flops)]]
        rows += [["kernels", str(self.kernels)], ["copies", str(self.copies)]]
        rows += [["cycles, estimated by XLA", count_text(self.cycles)]] if self.cycles is not None else []
        rows += [["a run, estimated", seconds_text(self.seconds)]] if self.seconds is not None else []
        rows += [["compiled in", seconds_text(self.compile_seconds)]]
        return Table(["", "of a run"], rows)

    def save_budget(self, path: str | os.PathLike[str]) -> None:
        """Write the cost to a JSON file that `popxl.testing.assert_costs` and `popxl diff` read.

        Example:
            >>> popxl.Session(ir, "gpu h100").cost().save_budget("costs.json")
        """
        stable = self.model_copy(update={"compile_seconds": 0.0})  # the same at each compilation
        replace_file(Path(path), (stable.model_dump_json(indent=2) + "\n").encode())

    def details(self) -> list[Page]:
        """Pages about collectives between chips, and about the bound of each graph."""
        shown = [
            [use.kind, use.source, str(use.replicas), str(use.count), bytes_text(use.bytes), use.graph or "main graph"]
            for use in self.uses
        ]
        columns = ["collective", "line", "replicas", "in a run", "bytes of a chip", "graph"]
        parts = [Page("Between chips", Table.first_rows(columns, shown))] if shown else []
        parts += self._between_ipus()
        parts += page_of_axes(self.axes)
        if self.seconds is None:
            return parts
        rows = [
            [
                *(g.name or "main graph", g.bound or "", seconds_text(sum(g.limits.values()))),
                *(seconds_text(g.seconds or 0), flops_text(g.flops)),
                *map(bytes_text, (g.bytes_accessed, g.network_bytes, g.host_bytes)),
            ]
            for g in self.graphs
        ]
        columns = ["graph", "bound by", "estimate", "at least", "operations", "memory", "network", "host"]
        summary = [f"{seconds_text(self.seconds)} for a run of a {self.chip}. It is an estimate; nothing was measured."]
        if self.utilisation is not None and self.chip_hours is not None:
            summary[0] += (
                f" Products attain {100 * self.utilisation:.1f} % of the published rate. A million runs take "
                f"{1e6 * self.chip_hours:.3g} chip-hours."
            )
        step = [] if self.step is None else [self.step.page()]
        return [
            *parts,
            Page("Time, estimated", [*summary, *Table.first_rows(columns, rows)]),
            *step,
            *self._by_precision(),
        ]

    def _between_ipus(self) -> list[Page]:
        """Page about copies between IPUs, and the waiting time of each IPU."""
        if not self.ipus:
            return []
        copied = self.collectives.get(COPY, CollectiveCost(count=0, bytes=0))
        summary = f"A run copies {copied.count} tensors of {bytes_text(copied.bytes)} in all from one IPU to another."
        if not self.seconds:
            return [Page("Between IPUs", [summary])]
        rows = [
            [str(each.ipu), seconds_text(each.seconds or 0), f"{100 * (1 - (each.seconds or 0) / self.seconds):.0f} %"]
            for each in self.ipus
        ]
        return [Page("Between IPUs", [summary, Table(["IPU", "computes, estimated", "waits"], rows)])]

    def _by_precision(self) -> list[Page]:
        """Page about the cost of float32 product precision."""
        if not self.precisions:
            return []
        own, *faster = self.precisions.values()
        summary = f"Products of float32 are computed at the precision {next(iter(self.precisions))!r}."
        if faster:
            less = seconds_text(own.seconds - faster[-1].seconds)
            summary += (
                f" By their passes, a run would take {less} less at 'default', which computes with fewer digits: "
                "`ir.options.precision`. It is an estimate."
            )
        rows = [
            [
                level,
                seconds_text(each.products),
                *([] if each.cycles is None else [count_text(each.cycles)]),
                seconds_text(each.seconds),
            ]
            for level, each in self.precisions.items()
        ]
        columns = ["at most", "products", *([] if own.cycles is None else ["in cycles"]), "a run"]
        return [Page("Precision of float32, estimated", [summary, Table(columns, rows)])]
