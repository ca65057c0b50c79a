"""`Foreseen`: the memory that a program will need on a chip, before anything is compiled.

What JAX traces of the program becomes kernels, by rules: `runtime.costs.kernels`. These are gone through in two orders,
that of the program and one that always takes next what frees most; compilers take the one that needs less. GPUs that
send to each other begin with that as soon as they can; so does what comes from the host. A value needs room from the
kernel that makes it to the last one that reads it. Variables that are overwritten stay where they are, if all that read
them come before; on GPUs, if the data say so: else these read a copy. On TPUs, there are gaps between values:
`runtime.costs.heap`.

How far this is from what compilers say: `docs/scaling.md`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import permutations
from operator import eq, ge
from typing import Any

import jax
from pydantic import computed_field

from popxl.base.pages import OnPage, Page, Table, bytes_text
from popxl.base.records import Record
from runtime.costs.heap import Span, Spans, packed
from runtime.costs.kernels import Kernel, Room, Step, Traced, Turn, Value, kernels_of, rounded
from runtime.program.compiled import traced_for
from runtime.program.layout import Layout
from runtime.targets.destination import HOST


class Foreseen(OnPage, Record):
    """The memory that a program will need on a chip, in bytes; nothing was compiled.

    Attributes:
        arguments: variables, remote buffers that are on the chip, and what is fed.
        needed: what comes out, and all else, at its highest. Of what comes out, what overwrites variables is not in it.
        device: both.
        largest: what is there when most is needed, the largest first: what it is, and its bytes.
    """

    arguments: int
    needed: int
    largest: tuple[tuple[str, int], ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def device(self) -> int:
        """All that is needed of the memory of a chip."""
        return self.arguments + self.needed

    def told(self) -> str:
        """What is largest when most is needed, in a sentence."""
        shown = ", ".join(f"{name} ({bytes_text(count)})" for name, count in self.largest[:3])
        return f"The largest values then are {shown}." if shown else "All of it is variables, and what is fed."

    def page(self) -> Page:
        """What `print` and notebooks show."""
        rows = [
            ["variables, and what is fed", bytes_text(self.arguments)],
            ["all else", bytes_text(self.needed)],
            ["in all", bytes_text(self.device)],
        ]
        largest = [[name, bytes_text(count)] for name, count in self.largest]
        return Page("Memory of a chip, foreseen", [Table(["", "bytes"], rows), *Table.cut(["when most", ""], largest)])


def foreseen(layout: Layout) -> Foreseen | None:
    """What a program will need on a chip. Nothing is compiled; the program is traced.

    Args:
        layout: the program, for its target.

    Returns:
        `None` for a plan of executables, of which each is compiled alone.
    """
    if layout.calls == "dispatched":
        return None
    traced, given = traced_for(layout)
    program = _Program("tpu" if layout.destination.platform == "tpu" else "cuda", len(layout.devices))
    most = program.most(traced.jaxpr, 0, len(given[0]))
    arguments = sum(_of_a_chip(each, program.room) for each in jax.tree.leaves(given))
    return Foreseen(arguments=arguments, needed=most.bytes, largest=most.largest)


def _of_a_chip(given: jax.ShapeDtypeStruct, room: Room) -> int:
    """The bytes that an argument needs on one chip: none, if it is in the host's memory."""
    where = given.sharding
    if where is None:
        return room(given.shape, given.dtype.itemsize)
    return 0 if where.memory_kind == HOST else room(where.shard_shape(given.shape), given.dtype.itemsize)


def exact(shape: Sequence[int], size: int, along: Sequence[int] | None = None) -> int:
    """The bytes of an array whose elements lie side by side, along whichever dimensions."""
    return math.prod(shape) * size


def tiled(shape: Sequence[int], size: int, along: Sequence[int] | None = None) -> int:
    """The bytes of an array in the memory of a TPU: in tiles of up to 8 rows and 128 columns, along the two dimensions
    of which it needs least; in several rows are the bytes of a word.

    Args:
        shape: of the array.
        size: the bytes of an element.
        along: the two dimensions, if there is no choice: convolutions want images and channels.
    """
    together = max(1, 4 // size) if size else 1
    elements = math.prod(shape)
    if len(shape) < 2 or elements == 0:
        tile = min(1024, max(128 * together, 1 << (elements - 1).bit_length() if elements else 0))
        return math.ceil(elements / tile) * tile * size

    def padded(rows: int, columns: int) -> int:
        tile = min(8, max(together, 1 << (rows - 1).bit_length()))
        return math.ceil(rows / tile) * tile * math.ceil(columns / 128) * 128

    pairs = {(shape[i], shape[j]) for i, j in permutations(along or range(len(shape)), 2)}
    return min(elements // (rows * columns) * padded(rows, columns) for rows, columns in pairs) * size


@dataclass(frozen=True)
class _Most(Turn):
    """What a trace needs, and what is there when most is."""

    largest: tuple[tuple[str, int], ...] = ()


class _Program:
    """Asks of traces what they need, those of loops within them first.

    Args:
        platform: "tpu" or "cuda".
        chips: how many share what is traced outside of what each does.
    """

    def __init__(self, platform: str, chips: int) -> None:
        self._platform, self._chips = platform, chips
        self.room = tiled if platform == "tpu" else exact

    def most(self, jaxpr: Any, others: int, replaced: int, is_turn: bool = False) -> _Most:
        """The most that a trace needs besides what it is given.

        Args:
            jaxpr: the trace.
            others: how many it is given before what it replaces.
            replaced: how many of what it is given its first results replace.
            is_turn: whether it is a turn of a loop, whose other results lie in stacks that are there already.
        """
        chips = 1 if is_turn else self._chips
        traced = Traced(self._platform, self.room, self._most_of_a_turn, chips)
        given = traced.given(jaxpr)
        results = traced.go_through(jaxpr, given)
        old = dict(zip(results[:replaced], given[others : others + replaced], strict=True))
        kernels = kernels_of(traced, results)
        if self._platform == "cuda":
            kernels = _copied(kernels, old)
        stacked = set(results[replaced:]) if is_turn else set()
        orders = [kernels, _frees_most_first(kernels, {*results})]
        if self._platform == "cuda" and any(kernel.step.is_exchange for kernel in kernels):
            orders = [_sends_first(order) for order in orders]
        orders = [_fetched_early(order) for order in orders]
        is_tpu = self._platform == "tpu"
        found = (_Room(order, {*results}, old, stacked, is_turn, is_tpu).most() for order in orders)
        return replace(min(found, key=lambda most: most.bytes), rounded=rounded(traced, given, results))

    def _most_of_a_turn(self, jaxpr: Any, others: int, replaced: int) -> Turn:
        """The same, of a turn of a loop."""
        return self.most(jaxpr, others, replaced, is_turn=True)


def _copied(kernels: Sequence[Kernel], old: Mapping[Value, Value]) -> list[Kernel]:
    """The same kernels, where what is replaced is copied for those that read it, unless what replaces it is computed of
    all that they make: XLA for GPUs settles that before it orders them."""
    makers = {value: kernel for kernel in kernels for value in kernel.made}
    readers: defaultdict[Value, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        for value in kernel.reads:
            readers[value].append(kernel)
    copies: dict[Value, Value] = {}
    for new, value in old.items():
        last = makers.get(new)
        if last is None or last.step.taken == (value,):
            continue
        before = _ancestors(last, makers)
        if any(kernel not in before for kernel in readers[value]):
            copies[value] = Value(value.shape, value.bytes, name=f"copy of {value.name}")
    found, made = list[Kernel](), set[Value]()
    for kernel in kernels:
        for value in (value for value in kernel.reads if value in copies and value not in made):
            found.append(Kernel(Step("copy", (value,), (copies[value],)), (value,), (copies[value],), ()))
            made.add(value)
        reads, overwrites = (tuple(copies.get(v, v) for v in values) for values in (kernel.reads, kernel.overwrites))
        found.append(replace(kernel, reads=reads, overwrites=overwrites))
    return found


def _ancestors(kernel: Kernel, makers: Mapping[Value, Kernel], among: Set[Kernel] | None = None) -> set[Kernel]:
    """A kernel and all that it needs, or of those all that are among some."""
    found, waiting = {kernel}, [kernel]
    while waiting:
        before = {makers[value] for value in waiting.pop().reads if value in makers}
        new = (before if among is None else before & among) - found
        found |= new
        waiting += new
    return found


def _frees_most_first(kernels: Sequence[Kernel], results: Collection[Value]) -> list[Kernel]:
    """An order in which the next kernel is, of those that can be, the one that frees most for what it makes."""
    makers = {value: kernel for kernel in kernels for value in kernel.made}
    waits = {kernel: {v for barrier in kernel.made[0].waits for v in barrier} for kernel in kernels if kernel.made}
    needed = {kernel: waits.get(kernel, set()).union(kernel.reads) for kernel in kernels}
    before = {kernel: {makers[v] for v in values if v in makers} - {kernel} for kernel, values in needed.items()}
    after: defaultdict[Kernel, list[Kernel]] = defaultdict(list)
    for kernel, others in before.items():
        for other in others:
            after[other].append(kernel)
    left = Counter(value for kernel in kernels for value in kernel.reads)
    waiting = {kernel: len(others) for kernel, others in before.items()}
    number = {kernel: i for i, kernel in enumerate(kernels)}

    def merit(kernel: Kernel) -> tuple[int, int, int]:
        freed = sum(v.bytes for v in kernel.reads if left[v] == 1 and v in makers and v not in results)
        return freed - sum(v.bytes for v in kernel.made), sum(left[v] for v in kernel.made), -number[kernel]

    ready, order = [kernel for kernel in kernels if not waiting[kernel]], []
    while ready:
        kernel = max(ready, key=merit)
        ready.remove(kernel)
        order.append(kernel)
        left.subtract(kernel.reads)
        for next_ in after[kernel]:
            waiting[next_] -= 1
            if not waiting[next_]:
                ready.append(next_)
    return order


def _sends_first(kernels: Sequence[Kernel]) -> list[Kernel]:
    """An order, where collectives begin as soon as they can: what one needs comes right before it, and what is there to
    do besides comes after, so that it is under way meanwhile."""
    makers = {value: kernel for kernel in kernels for value in kernel.made}
    sent = {value for kernel in kernels if kernel.step.is_exchange for value in kernel.reads}
    place: dict[Kernel, tuple[int, int]] = {}
    for i, kernel in enumerate(kernels):  # a collective follows what it reads, and so does what is moved for it
        follows = kernel.step.is_exchange or (kernel.step.is_fused and sent.issuperset(kernel.made))
        before = [place[makers[value]] for value in kernel.reads if value in makers]
        place[kernel] = (max(before, default=(i, 0))[0], i + 1) if follows else (i, 0)
    order, stretch = list[Kernel](), list[Kernel]()
    for kernel in sorted(kernels, key=place.__getitem__):
        if not kernel.step.is_exchange:
            stretch.append(kernel)
            continue
        needed = _ancestors(kernel, makers, {*stretch})
        order += [*(each for each in stretch if each in needed), kernel]
        order += [each for each in stretch if each not in needed]
        order.append(Kernel(Step("done", kernel.reads, ()), kernel.reads, (), ()))
        stretch = []
    return order + stretch


def _fetched_early(kernels: Sequence[Kernel]) -> list[Kernel]:
    """An order, where what comes from the host is on its way as soon as what it waits for is there."""
    place: dict[Value, int] = {}
    for i, kernel in enumerate(kernels):
        at = i
        if any(value.is_on_host for value in kernel.reads):
            waits = {value for made in kernel.made for barrier in made.waits for value in barrier}
            at = max((place[value] for value in waits.union(kernel.reads) if value in place), default=0)
        place.update((value, at) for value in kernel.made)
    places = [place[kernel.made[0]] if kernel.made else i for i, kernel in enumerate(kernels)]
    return [kernel for _, kernel in sorted(zip(places, kernels, strict=True), key=lambda each: each[0])]


class _Room:
    """The values that are there while kernels run in an order.

    Args:
        order: the kernels.
        results: what the program gives.
        old: what its results replace.
        stacked: results that have room already.
        is_turn: whether it is a turn of a loop.
        is_tpu: whether values lie apart from results, with gaps between them. Else they lie in the places of results
            that are not made yet, too.
    """

    def __init__(
        self,
        order: Sequence[Kernel],
        results: set[Value],
        old: Mapping[Value, Value],
        stacked: set[Value],
        is_turn: bool = False,
        is_tpu: bool = False,
    ) -> None:
        self._order, self._results, self._old, self._stacked = order, results, old, stacked
        self._is_turn, self._is_tpu = is_turn, is_tpu
        self._last = {value: i for i, kernel in enumerate(order) for value in kernel.reads}
        made = {value: i for i, kernel in enumerate(order) for value in kernel.made}
        own = (value for value in results if value in made and value not in old and value not in stacked)
        unread = ((value.bytes, made[new], self._last.get(value, -1)) for new, value in old.items() if new in made)
        places = [[value.bytes, made[value], -1] for value in own]
        self._always = sum(bytes for bytes, *_ in places)
        places += [[*place] for place in unread if place[2] < place[1] and not is_turn]  # a loop keeps what it carries
        self._free = sorted(places, key=lambda place: place[0]) if not is_tpu else []
        self._bytes: dict[Value, int] = {}  # of what is there
        self._place = {value: value.bytes for value in old.values()}  # how large the place is in which a value lies

    def most(self) -> _Most:
        """What is there when most is."""
        now, most, largest = 0, 0, {}
        spans = Spans()
        for i, kernel in enumerate(self._order):
            ended = [v for v in kernel.reads if self._last[v] == i and (v in self._bytes or v in self._place)]
            over = [v for v in ended if v in kernel.overwrites and not (kernel.step.is_fused and v not in self._bytes)]
            for value in kernel.made:
                bytes = self._new(value, i, kernel)
                places = ((v, self._place.get(v, 0)) for v in over)
                fits = eq if kernel.step.is_fused else ge  # what is computed by element lies in a place of its size
                taken = next((v for v, place in places if fits(place, bytes)), None) if bytes else None
                if taken is not None:
                    over.remove(taken)
                    self._bytes[value], self._place[value] = self._bytes.pop(taken, 0), self._place.pop(taken)
                    spans.pass_on(taken, value)
                    continue
                self._bytes[value] = self._place[value] = bytes
                spans.take(value, bytes)
                now += bytes
            inside = kernel.step.inside
            if self._always + now + inside.bytes > most:
                most, largest = self._always + now + inside.bytes, dict(self._bytes)
            spans.insert(inside.kernels, inside.spans)
            for value in (*ended, *kernel.made):
                if value not in self._results and self._last.get(value, i) <= i:
                    now -= self._bytes.pop(value, 0)
                    self._place.pop(value, None)
                    spans.free(value)
            spans.kernels += 1
        room = [*spans.all(), *([Span(0, spans.kernels, self._always)] if self._always else [])]
        gaps = packed(room) - most if self._is_tpu and not self._is_turn else 0
        there = [(value.name, bytes) for value, bytes in largest.items()] + [("gaps between them", gaps)]
        shown = sorted((each for each in there if each[1] > 0), key=lambda each: -each[1])
        return _Most(most + max(gaps, 0), kernels=spans.kernels, spans=tuple(room), largest=tuple(shown))

    def _new(self, value: Value, i: int, kernel: Kernel) -> int:
        """The bytes that a value needs which kernel `i` makes, if it overwrites nothing."""
        if value in self._old:
            old = self._old[value]
            can_replace = kernel.step.is_fused or old in kernel.overwrites or old not in kernel.reads
            return 0 if self._last.get(old, -1) <= i and can_replace else value.bytes
        if value in self._stacked or value in self._results:
            return 0
        end = self._last.get(value, i)
        for place in self._free:  # of a result that is not made yet, or of what it replaces and nobody reads any more
            bytes, made, until = place
            if value.bytes <= bytes <= 4 * value.bytes and until < i and self._is_over(value, end, made):
                place[2] = end
                return 0
        return value.bytes

    def _is_over(self, value: Value, end: int, made: int) -> bool:
        """Whether a value is needed no more when a result is made in its place."""
        return end < made or (end == made and value in self._order[made].overwrites)
