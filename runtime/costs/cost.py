"""`Cost`: what a compiled program costs on one chip, in numbers. Programs get it from `session.cost()`."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from popxl.base.pages import OnPage, Page, Table, bytes_text, count_text, flops_text, seconds_text
from popxl.base.records import Record
from popxl.looking.flops import moved
from popxl.looking.memory import runs_of
from runtime.costs.hlo import read
from runtime.costs.work import Account, Collective, Product, Work, account_of
from runtime.plan.plan import Plan
from runtime.program.program import CompiledProgram
from runtime.targets import chip
from runtime.targets.chip import Chip, Tpu

Bound = Literal["compute", "memory", "network", "host"]


class CollectiveCost(Record):
    """All collectives of one kind.

    Attributes:
        count: how many of them a run carries out.
        bytes: of one chip: what goes into them, or comes out, whichever is more.
    """

    count: int
    bytes: int


class CollectiveUse(Record):
    """Collectives of one line of the program.

    Attributes:
        kind: what XLA made of it: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute".
        source: the line, `train.py:12`; "" where XLA does not say.
        graph: the graph that it is in; "" for the main graph.
        replicas: how many replicas talk to each other.
        count, bytes: as for all of one kind.
    """

    kind: str
    source: str
    graph: str
    replicas: int
    count: int
    bytes: int


class GraphCost(Record):
    """What one graph does in a run of the program, all its calls together.

    Attributes:
        name: the name of the graph; that of the main graph is "".
        flops: floating point operations.
        bytes_accessed: bytes read and written in the memory of the device.
        network_bytes: bytes that a chip sends to others.
        host_bytes: bytes between a chip and its host.
        seconds: how long it takes by the chip's published figures, if each of these goes on while the others do;
            `None` for a device without such figures.
        bound: which of them takes longest.
    """

    name: str
    flops: int
    bytes_accessed: int
    network_bytes: int
    host_bytes: int
    seconds: float | None
    bound: Bound | None


class PrecisionCost(Record):
    """What a run would cost if float32 products were computed at a precision, and no more exactly. It is an estimate,
    by the chip's published figures: of the passes that products take, and of nothing else.

    Attributes:
        products: seconds for the products of float32.
        cycles: the same in cycles, for TPUs; `None` elsewhere.
        seconds: for a run, as in `Cost.seconds`: it takes no longer where something else bounds it.
    """

    products: float
    cycles: int | None
    seconds: float


class Cost(OnPage, Record):
    """What a compiled program costs: sizes as XLA says them, and one run of it, on one chip.

    A run is read off the compiled program: loops count as often as they turn, of conditionals all branches. Nothing was
    measured. `seconds` is an estimate from published figures: no program reaches them.

    Attributes:
        code_bytes: machine code; `None` where XLA does not say.
        argument_bytes: variables, remote buffers on the device, and what is fed.
        temporary_bytes: what a run needs besides.
        alias_bytes: what of the arguments is overwritten with results, rather than copied.
        host_bytes: what is in the host's memory for the device: remote buffers, and what executables need there.
        flops: floating point operations.
        bytes_accessed: bytes that kernels read and write, in whichever memory.
        kernels: what the chip is told to run, one after the other: fusions, products, copies, collectives.
        copies: what only copies; among them what a TPU moves between its memories while it computes.
        collectives: what chips do together, by kind.
        uses: the same, by lines of the program.
        cycles: XLA's own estimate, for TPUs; `None` elsewhere.
        compile_seconds: how long compiling took, with all around it.
        graphs: the graphs, the longest first.
        seconds: how long a run takes by the chip's published figures; `None` for a device without such figures.
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
    precisions: Mapping[str, PrecisionCost] = {}

    def page(self) -> Page:
        """What `print` and notebooks show."""
        sizes = ("code", "argument", "temporary", "alias", "host")
        found = ((name, getattr(self, f"{name}_bytes")) for name in sizes)
        rows = [[name, bytes_text(count)] for name, count in found if count is not None]
        rows += [["read and written", bytes_text(self.bytes_accessed)], ["operations", flops_text(self.flops)]]
        rows += [["kernels", str(self.kernels)], ["copies", str(self.copies)]]
        rows += [["cycles, estimated by XLA", count_text(self.cycles)]] if self.cycles is not None else []
        rows += [["a run, estimated", seconds_text(self.seconds)]] if self.seconds is not None else []
        rows += [["compiled in", seconds_text(self.compile_seconds)]]
        return Page(f"Cost of {self.name}, on one {self.chip}", [Table(["", "of a run"], rows), *self.details()])

    def details(self) -> list[Page]:
        """What the chips do together, and what bounds each graph."""
        shown = [
            [use.kind, use.source, str(use.replicas), str(use.count), bytes_text(use.bytes), use.graph or "main graph"]
            for use in self.uses
        ]
        columns = ["collective", "line", "replicas", "in a run", "bytes of a chip", "graph"]
        parts = [Page("Between chips", Table.cut(columns, shown))] if shown else []
        if self.seconds is None:
            return parts
        rows = [
            [
                *(g.name or "main graph", g.bound or "", seconds_text(g.seconds or 0), flops_text(g.flops)),
                *map(bytes_text, (g.bytes_accessed, g.network_bytes, g.host_bytes)),
            ]
            for g in self.graphs
        ]
        columns = ["graph", "bound by", "estimate", "operations", "memory", "network", "host"]
        told = (
            f"{seconds_text(self.seconds)} for a run, if a {self.chip} did all that its published figures promise, and "
            "computed, read, sent and fetched at the same time. It is an estimate; nothing was measured."
        )
        return [*parts, Page("Time, estimated", [told, *Table.cut(columns, rows)]), *self._by_precision()]

    def _by_precision(self) -> list[Page]:
        """What the precision of products costs."""
        if not self.precisions:
            return []
        own, *faster = self.precisions.values()
        told = f"Products of float32 are computed at the precision {next(iter(self.precisions))!r}."
        if faster:
            less = seconds_text(own.seconds - faster[-1].seconds)
            told += (
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
        return [Page("Precision of float32, estimated", [told, Table(columns, rows)])]


def cost_of(program: CompiledProgram) -> Cost:
    """What a compiled program costs. See `Session.cost`."""
    account = account_of_program(program)
    figures = chip_of(program)
    host = _host_traffic(program)
    graphs = tuple(_graphs(account, host, figures, program.replicas.count))
    total = account.total
    return Cost(
        name=f"Ir[id={program.layout.main.ir.id}]",
        chip=figures.name if figures is not None else program.devices[0].device_kind,
        **_sizes(program),
        flops=total.flops,
        bytes_accessed=total.bytes,
        kernels=total.kernels,
        copies=total.copies,
        collectives=_by_kind(account.collectives),
        uses=_by_line(account.collectives, program.replicas.count),
        cycles=total.cycles if program.layout.destination.platform == "tpu" else None,
        compile_seconds=program.compiled.seconds,
        graphs=graphs,
        seconds=sum(graph.seconds or 0 for graph in graphs) if figures is not None else None,
        precisions={} if figures is None else precisions_of(account, host, figures, program.replicas.count),
    )


def account_of_program(program: CompiledProgram) -> Account:
    """What a run of a program does: of all its executables."""
    account = Account()
    for executable, times in _runs(program):
        account.add(account_of(read(executable.as_text())), times)
    return account


def chip_of(program: CompiledProgram) -> Chip | None:
    """The published figures of the chip that a program is compiled for; `None` if there are none."""
    target = program.device.target
    return chip.of_device(program.devices[0].device_kind) if target is None else target.chip


def texts(program: CompiledProgram) -> dict[str, str]:
    """The text of each executable, by what it does. See `Session.hlo`."""
    if not isinstance(program.executable, Plan):
        return {"the program": program.executable.as_text()}
    found: dict[str, str] = {}
    for place, pair in program.compiled.ends.items():
        for name, executable in zip(("feeds", "fetches"), pair, strict=True):
            found[_unused(f"{name} of IPU {place}" if len(program.ipus) > 1 else name, found)] = executable.as_text()
    first = {piece.structure: piece.name for piece in reversed(program.executable.pieces)}
    for structure in program.executable.structures:
        found[_unused(first[structure], found)] = structure.executable.as_text()
    return found


def _unused(name: str, names: Mapping[str, object]) -> str:
    """A name that nothing has yet."""
    number = 1
    while (numbered := f"{name} ({number})" if number > 1 else name) in names:
        number += 1
    return numbered


def _runs(program: CompiledProgram) -> Iterator[tuple[Any, int]]:
    """The executables, each with how often a run of the program runs it."""
    if not isinstance(program.executable, Plan):
        yield program.executable, 1
        return
    yield from ((executable, 1) for pair in program.compiled.ends.values() for executable in pair)
    yield from ((structure.executable, times) for structure, times in program.executable.runs.items())


def _sizes(program: CompiledProgram) -> dict[str, Any]:
    """What XLA says of executables; of a plan, what they keep between them, too."""
    found = [executable.memory_analysis() for executable in program.executables()]
    on_host = sum(bytes for bytes, is_there in program.layout.bytes_of_buffers().values() if is_there)
    sizes: dict[str, Any] = {
        "code_bytes": sum(each.generated_code_size_in_bytes for each in found) or None,
        "temporary_bytes": program.temporaries(),
        "host_bytes": on_host + max(each.host_temp_size_in_bytes for each in found),
    }
    if not isinstance(program.executable, Plan):
        (whole,) = found
        return sizes | {
            "argument_bytes": whole.argument_size_in_bytes,
            "alias_bytes": whole.alias_size_in_bytes,
        }
    layout = program.layout
    held = [*layout.bytes_of_variables().values()]
    buffers = [
        (bytes, buffer in layout.stored_to)
        for buffer, (bytes, is_there) in layout.bytes_of_buffers().items()
        if not is_there
    ]
    streams = layout.bytes_of_streams()
    fed = sum(streams[stream] for stream in program.inputs)
    return sizes | {
        "argument_bytes": sum(bytes for bytes, _ in (*held, *buffers)) + fed,
        "alias_bytes": sum(bytes for bytes, changes in (*held, *buffers) if changes),
    }


def _host_traffic(program: CompiledProgram) -> dict[str, int]:
    """The bytes that cross to and from the host in a run, by graphs: slots of remote buffers, feeds and fetches."""
    layout, found = program.layout, defaultdict[str, int](int)
    on_host = {buffer for buffer, (_, is_there) in layout.bytes_of_buffers().items() if is_there}
    for graph, times in runs_of(layout.main).items():
        name = "" if graph is layout.main else graph.name
        for op in (part for each in graph.ops for part in each.parts):
            if op.kind.exchange == "buffer" and op.attributes["buffer"] in on_host:
                found[name] += times * moved(op) * program.replicas.per_device
    found[""] += sum(layout.bytes_of_streams().values())
    return found


def _by_kind(collectives: Iterable[Collective]) -> dict[str, CollectiveCost]:
    found: defaultdict[str, list[Collective]] = defaultdict(list)
    for each in collectives:
        found[each.kind].append(each)
    return {
        kind: CollectiveCost(count=sum(e.runs for e in alike), bytes=sum(e.runs * e.bytes for e in alike))
        for kind, alike in found.items()
    }


def _by_line(collectives: Iterable[Collective], all_replicas: int) -> tuple[CollectiveUse, ...]:
    found: defaultdict[tuple[str, str, str, int], list[Collective]] = defaultdict(list)
    for each in collectives:
        found[each.kind, each.source, each.graph, each.group_size or all_replicas].append(each)
    return tuple(
        CollectiveUse(
            kind=kind,
            source=source,
            graph=graph,
            replicas=replicas,
            count=sum(e.runs for e in alike),
            bytes=sum(e.runs * e.bytes for e in alike),
        )
        for (kind, source, graph, replicas), alike in found.items()
    )


# Times ---------------------------------------------------------------------------------------------------------------

_DTYPES = {"f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "u8": "int8"}
"""XLA's names of dtypes, and those of the figures. All that begin with "f8" are float8."""

_SENT = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
}
"""How much of its bytes a chip sends in a collective of n chips, if each sends to its neighbour only."""


def _sent(collective: Collective, all_replicas: int) -> int:
    """The bytes that one chip sends in a run."""
    count = collective.group_size or all_replicas
    share = _SENT.get(collective.kind, lambda _: 1.0)(count)
    return math.ceil(collective.runs * collective.bytes * share)


def _graphs(account: Account, host: Mapping[str, int], figures: Chip | None, all_replicas: int) -> Iterable[GraphCost]:
    """The graphs, the longest first."""
    sent: defaultdict[str, int] = defaultdict(int)
    for each in account.collectives:
        sent[each.graph] += _sent(each, all_replicas)
    names = dict.fromkeys((*account.graphs, *(name for name, count in host.items() if count)))
    graphs = (_graph(name, account.graphs.get(name, Work()), sent[name], host.get(name, 0), figures) for name in names)
    return sorted(graphs, key=lambda graph: -(graph.seconds or 0))


def _graph(name: str, work: Work, sent: int, crossing: int, figures: Chip | None) -> GraphCost:
    times = {} if figures is None else _times(work, sent, crossing, figures)
    bound = max(times, key=lambda each: times[each], default=None)
    return GraphCost(
        name=name,
        flops=work.flops,
        bytes_accessed=work.memory_bytes,
        network_bytes=sent,
        host_bytes=crossing,
        seconds=None if bound is None else times[bound],
        bound=bound,
    )


def _times(work: Work, sent: int, crossing: int, figures: Chip) -> dict[Bound, float]:
    """How long each of the four would take by itself."""
    rates = {key: figures.rate(_dtype(key.dtype), key.precision) for key in work.products}
    return {
        "compute": sum(count / rates[key] for key, count in work.products.items()),
        "memory": work.memory_bytes / figures.memory_bandwidth,
        "network": sent / figures.network_bandwidth,
        "host": crossing / figures.host_bandwidth,
    }


_LEVELS = ("highest", "high", "default")
"""JAX's precisions, the slowest first."""


def precisions_of(
    account: Account, host: Mapping[str, int], figures: Chip, all_replicas: int
) -> dict[str, PrecisionCost]:
    """What runs would cost at the precision that float32 products have, and at faster ones."""
    levels = {key.precision for work in account.graphs.values() for key in work.products if key.dtype == "f32"}
    first = min(map(_LEVELS.index, levels), default=len(_LEVELS))
    found = {}
    for level in _LEVELS[first:]:
        limited = Account({name: _at_most(level, work) for name, work in account.graphs.items()}, account.collectives)
        products = (item for work in limited.graphs.values() for item in work.products.items())
        seconds = sum(count / figures.rate("float32", key.precision) for key, count in products if key.dtype == "f32")
        found[level] = PrecisionCost(
            products=seconds,
            cycles=round(seconds * figures.clock) if isinstance(figures, Tpu) else None,
            seconds=sum(graph.seconds or 0 for graph in _graphs(limited, host, figures, all_replicas)),
        )
    return found


def _at_most(level: str, work: Work) -> Work:
    """Work whose float32 products are computed at a precision, or at the faster one that they have."""
    products: Counter[Product] = Counter()
    for key, count in work.products.items():
        reached = max(level, key.precision, key=_LEVELS.index) if key.dtype == "f32" else key.precision
        products[key._replace(precision=reached)] += count
    return replace(work, products=products)


def _dtype(of_xla: str) -> str:
    return "float8" if of_xla.startswith("f8") else _DTYPES.get(of_xla, of_xla)
