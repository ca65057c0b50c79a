"""Program plan: segments, each compiled once, dispatched sequentially and asynchronously by the host.

A graph that is called often is a segment; so are the ops between such calls. Segments of equal structure share one
executable, so that compile time does not grow with the number of calls, and programs that call the same graph share it
too. Storages that a segment overwrites are donated to it. The alternative, one program with noinline calls, is in
`runtime.program.compiled`; `runtime.plan.decision` chooses.

If each IPU of the program is a separate device, a segment is on one of them, and inputs from other IPUs are copied
there (`runtime.plan.placement`). The host does not wait for results, so segments on different devices run concurrently
unless they depend on each other, and so do the stages of a pipeline, whose loop the host executes.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from popxl.core.recursion import FRAMES, raised_recursion_limit
from popxl.core.tensor import Tensor
from popxl.remote_buffer import RemoteBuffer
from popxl.streams import HostToDeviceStream, Stream
from runtime.compile_pool import CompilePool
from runtime.lowering.channels import FAILURE, Channel, Channels, Failure
from runtime.lowering.environment import no_value
from runtime.plan.planning import LiveRange, PlanBuilder
from runtime.plan.segments import Array, Run, Segment, described_state
from runtime.plan.stages import stages_of
from runtime.plan.structure import Structure
from runtime.plan.terms import CompileOptions
from runtime.progress import Watch
from runtime.targets.destination import HOST
from runtime.timeline import Recorder


def compile_all(pieces: Sequence[Segment], terms_at: Mapping[int, CompileOptions], watch: Watch) -> None:
    """Compile segments in parallel, using all CPU cores.

    They are traced one after the other in this thread, while XLA compiles earlier ones in other threads: the largest
    first, as it takes longest. Devices of several processes need the same compilations in the same order: one at a
    time, then.
    """
    if not pieces:
        return
    pieces = sorted(pieces, key=lambda piece: piece.size, reverse=True)
    is_divided = any(terms.replicas.local_count < terms.replicas.count for terms in terms_at.values())
    with CompilePool(1 if is_divided else os.cpu_count() or 1) as pool:
        watch.begins(pieces[0].name, 0, len(pieces))
        compilations = [pool.submit(piece.lowered(terms_at[piece.place])) for piece in pieces]
        compiled = []
        for number, (piece, compilation) in enumerate(zip(pieces, compilations, strict=True)):
            if number:
                watch.begins(piece.name, number, len(pieces))
            compiled.append(compilation.result())
    for piece, executable in zip(pieces, compiled, strict=True):
        piece.take(executable)


def _check_shared(shared: Collection[Channel], terms_at: Mapping[int, CompileOptions]) -> None:
    """Raise `NotImplementedError` for a buffer in host memory that stages of several processes use."""
    buffers = [c for c in shared if isinstance(c, RemoteBuffer)]
    if buffers and any(terms.slots.memory_kind == HOST for terms in terms_at.values()):
        raise NotImplementedError(
            f"Session: ops on several IPUs use {buffers[0]!r}, which is in the memory of one host, and the IPUs are of "
            "several processes. Give each stage a buffer of its own; or set `ir.options.remoteBuffers = 'device'`."
        )


class Plan:
    """Host-executed program: `(changing, constant, feeds) -> (changing, fetches)`.

    Fetched are the transfers of the output streams; then, where anything is checked, which check failed: an array for
    each place.

    Args:
        steps: steps of the host.
        changed, read: storages of changed variables, and of variables only read.
        buffers: remote buffers that it uses, and their places; their arrays follow those of `changed` as inputs and
            outputs.
        inputs, outputs: the streams that are fed and fetched.
        channels: streams and failure flag of each place.
        terms_at: compile options of each place.
        ends: two compiled JAX functions for each place with streams: the first computes the initial state of its
            channels from the feeds, where `None` in place of the transfers of a feed means the feed itself; the second
            computes the fetches from the final state. The first one is `None` if the place belongs to another process.
        watch: observer of compilations.

    Attributes:
        steps: as passed.
        changed: storages that the program changes, at the start and at the end of the steps.
    """

    def __init__(
        self,
        steps: PlanBuilder,
        changed: Sequence[Tensor],
        read: Sequence[Tensor],
        buffers: Mapping[RemoteBuffer, int],
        inputs: Sequence[Stream],
        outputs: Sequence[Stream],
        channels: Mapping[int, Sequence[Stream | Failure]],
        terms_at: Mapping[int, CompileOptions],
        ends: Mapping[int, tuple[Any, Any]],
        watch: Watch,
    ) -> None:
        self.steps = steps
        self._variables = (*changed, *read)
        self.changed = tuple((v, steps.starts[v], steps.at[v]) for v in changed)
        self._buffers = buffers
        self._inputs, self._outputs = inputs, outputs
        self._channels = channels
        self._where = {c: place for place, cs in channels.items() for c in cs} | dict(buffers)
        self._terms_at = terms_at
        self._stages = stages_of(terms_at)
        self._ends = ends
        known = {*self._variables, *steps.changed}
        for step in steps.steps:
            for t in step.reads:
                if t not in known:
                    raise no_value(t)
            known.update(step.makes)
        users: defaultdict[Channel, set[int]] = defaultdict(set)
        for piece in self.segments:
            for c in piece.channels:
                users[c].add(piece.place)
        self._shared = {c for c, places in users.items() if len(places) > 1 and c is not FAILURE}
        if self._stages is not None:
            _check_shared(self._shared, terms_at)
        for piece in self.segments:
            piece.shared = tuple(c for c in piece.channels if c in self._shared)
        steps.prepare(terms_at, next(iter(terms_at)))
        for step, _ in steps.all_steps():
            step.prepare(terms_at)
        fresh: dict[Structure, Segment] = {}
        for piece in self.segments:
            if piece.structure.executable is None and not terms_at[piece.place].destination.is_elsewhere:
                fresh.setdefault(piece.structure, piece)
        compile_all(tuple(fresh.values()), terms_at, watch)

    def __call__(
        self,
        changing: Sequence[Array],
        constant: Sequence[Array],
        feeds: Sequence[Array],
        recorder: Recorder | None = None,
    ) -> Any:
        """Run the program. A recorder, if given, calls the executables in place of the plan."""
        count = len(self.changed)
        values = dict(zip(self._variables, (*changing[:count], *constant), strict=True))
        channels: dict[int, Channels] = {}
        run = Run(self._terms_at, self._where, channels, recorder, self._stages)
        given: dict[Channel, Array] = dict(zip(self._inputs, feeds, strict=True))
        for place in self._terms_at:
            channels[place] = Channels(self._initial_channels(place, given, run))
        for (buffer, place), slots in zip(self._buffers.items(), changing[count:], strict=True):
            channels[place].set_slots(buffer, slots)
        with raised_recursion_limit(FRAMES * self.steps.nesting):
            self.steps.run(values, run)
        fetches, failures = self._fetched(run)
        changed = [values[v] if start == end else run.copy_to_ipu(values[v], start) for v, start, end in self.changed]
        for buffer, place in self._buffers.items():
            changed.append(run.channels(place, self._shared & {buffer}).slots(buffer))
        return tuple(changed), (*(fetches[s] for s in self._outputs), *failures)

    def _initial_channels(self, place: int, given: Mapping[Channel, Array], run: Run) -> dict[Channel, Any]:
        """Initial channels of IPU `place`."""
        if place not in self._ends:
            return {}
        here = self._channels[place]
        begin, _ = self._ends[place]
        if begin is None:
            return {c: described_state(c, self._terms_at[place]) for c in here}
        states = run.call(begin, lambda: "feeds", tuple(given[c] for c in here if c in given))
        return {
            c: (self._fed(given[c], place) if array is None else array, position)
            for c, (array, position) in zip(here, states, strict=True)
        }

    def _fed(self, feed: Array, place: int) -> Array:
        """Feed used without a prologue copy. Several segments, such as loop iterations, may read it."""
        return feed if len(self._terms_at) == 1 else jax.device_put(feed, self._terms_at[place].replicas.sharding())

    def _fetched(self, run: Run) -> tuple[dict[Channel, Array], list[Array]]:
        """Output streams, and failed checks of each IPU."""
        fetches: dict[Channel, Array] = {}
        failures: list[Array] = []
        for place, (_, end) in self._ends.items():
            here = [c for c in self._channels[place] if not isinstance(c, HostToDeviceStream)]
            channels = run.channels(place, [c for c in here if c in self._shared])
            found = run.call(end, lambda: "fetches", [run.own_copy(channels.transfers(c)) for c in here])
            streams = [c for c in here if c is not FAILURE]
            fetches |= zip(streams, found[: len(streams)], strict=True)
            failures += found[len(streams) :]
        return fetches, failures

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments, ordered by first execution."""
        return self.steps.segments()

    @property
    def runs(self) -> Counter[Structure]:
        """Executions per run, for each segment structure."""
        runs: Counter[Structure] = Counter()
        for step, times in self.steps.all_steps():
            if isinstance(step, Segment):
                runs[step.structure] += times
        return runs

    @property
    def structures(self) -> tuple[Structure, ...]:
        """Distinct structures of the segments that this process runs."""
        own = (piece for piece in self.segments if not self._terms_at[piece.place].destination.is_elsewhere)
        return tuple(dict.fromkeys(piece.structure for piece in own))

    def text(self) -> str:
        """Compiled text of each distinct segment."""
        return "\n".join(structure.text() for structure in self.structures)

    def curve(self) -> tuple[list[tuple[Segment, int, int]], list[LiveRange]]:
        """Memory curve: segments in order, each with bytes in use on its device besides variables and feeds, split into
        earlier values and its own results and temporaries. Also returns values live between segments."""
        copies = next(iter(self._terms_at.values())).replicas.per_device
        with raised_recursion_limit(FRAMES * self.steps.nesting):
            return self.steps.curve(copies)

    def temporaries(self) -> int:
        """Peak bytes of one run on one device, excluding variables and feeds."""
        pieces, _ = self.curve()
        return max((held + inside for _, held, inside in pieces), default=0)
