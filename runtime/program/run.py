"""Execution of a program: feeds, fetches, and donated state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from gc import disable, enable, isenabled
from itertools import starmap
from time import perf_counter
from typing import Any

import jax
import numpy as np

from popxl.base.arrays import Array
from popxl.core.aliasing import lowered_ops
from popxl.core.recursion import nesting, raised_recursion_limit
from popxl.errors import ApplicationRuntimeError
from runtime.jax_private import prepared
from runtime.lowering.channels import FAILURE, TRANSFERS, Channel, Channels
from runtime.lowering.context import Context
from runtime.lowering.platform_hooks import hooks_for
from runtime.program.blocks import VariableBlock
from runtime.program.compiled import CompiledProgram, begin_run, end_run
from runtime.program.debugging import DebugLowering, run_replicas, warn_of_given_nans
from runtime.program.host_arrays import too_many_transfers
from runtime.program.store import VariableStore
from runtime.signals import defer_signals
from runtime.targets.compile_target import HOST
from runtime.timeline import Recorder, Timeline

_GC_BLOCKERS: set[Runner] = set()
"""Runners that disable garbage collection at present, in any thread. The last one enables it again."""


def _is_lost(array: Array) -> bool:
    """Whether an array was donated; abstract arrays of other processes never are."""
    return isinstance(array, jax.Array) and array.is_deleted()


class Runner:
    """Runner of a compiled program on its variables, reusable for any number of runs.

    Attributes:
        run_seconds: time that the host was busy with these runs.
        timeline: the last recording.
    """

    def __init__(self, program: CompiledProgram, store: VariableStore) -> None:
        self._layout = program.layout
        self._executable, self._plan = program.executable, program.plan
        self.store = store
        self.runs, self.run_seconds = 0, 0.0
        self.timeline: Timeline | None = None
        self._outputs, self._divided = self._layout.outputs, self._layout.divided
        self._prints, self._checks = self._layout.prints, self._layout.checks
        self._call: Callable[..., Any] = self._executable
        needs_lock = self._layout.devices_meet and self._plan is None  # segments lock
        self._lock = hooks_for(self._layout.compile_target.platform).collective_lock if needs_lock else None
        self._debugs_infinities: bool | None = None  # whether `debugging` reports them; `None` outside of it
        self._c_call: Any = None  # calls the executable without any Python code, for feeds of these types
        self._c_call_types: tuple[type, ...] | None = None

    def run(self, feeds: tuple[Array, ...]) -> tuple[Array, ...]:
        """Run the program once. Returns the arrays of the output streams, still on the device.

        Raises:
            ApplicationRuntimeError: if an op was given invalid numbers. The variables hold the results of the run.
        """
        start = perf_counter()
        store = self.store
        changing = store.changing if store.changing is not None else store.present()
        if self._divided is not None:
            feeds = self._global_feeds(feeds)
            store.run_count += 1
        if self._lock is None:
            fetches = self._call_executable(changing, feeds)
        else:
            with self._lock.acquire(changing) as set_results:
                fetches = self._call_executable(changing, feeds)
                set_results(store.changing or fetches)
        if self._divided is not None:
            fetches = self._local_fetches(fetches)
        if self._prints:
            jax.effects_barrier()
        if self._checks:
            fetches = self._checked(fetches)
        self.runs += 1
        self.run_seconds += perf_counter() - start
        return fetches

    def _call_executable(self, changing: tuple[Array, ...], feeds: tuple[Array, ...]) -> tuple[Array, ...]:
        """Call the executable and return its fetches."""
        store = self.store
        results: list[Any] = []
        try:
            if self._c_call_types == (*map(type, feeds),):
                # Signals are handled, and may raise, after calls made by Python, and changed variables are donated. So
                # C calls the executable, and no other call comes before its results are stored. Garbage collection is
                # off too: JAX would call Python, where signals are handled.
                collects = bool(_GC_BLOCKERS) or isenabled()
                try:
                    if collects:
                        _GC_BLOCKERS.add(self)
                        disable()
                    results += starmap(self._c_call, ((changing, store.constant, feeds),))
                    ((store.changing, fetches),) = results
                finally:
                    if collects:
                        try:  # a signal may be handled, and raise, behind each call: here, too
                            _GC_BLOCKERS.discard(self)
                        finally:
                            if not _GC_BLOCKERS:
                                enable()
            else:
                fetches = self._call_through_python(changing, feeds)
        except BaseException:
            if store.changing is changing and any(map(_is_lost, changing)):
                store.changing = None
            raise
        return fetches

    def _call_through_python(self, changing: tuple[Array, ...], feeds: tuple[Array, ...]) -> tuple[Array, ...]:
        """Call the executable through Python, with signals deferred: calls that JAX must prepare, and host-executed
        plans. Also runs op-by-op debugging. Returns fetches."""
        store = self.store
        if self._debugs_infinities is not None:
            with self._layout.x64_context():
                store.changing, fetches = self._op_by_op(changing, feeds, self._debugs_infinities)
            return fetches
        before = prepared(self._call)
        fetched: list[tuple[Array, ...]] = []

        def call() -> None:
            store.changing, fetches = self._call(changing, store.constant, feeds)
            fetched.append(fetches)

        with self._layout.x64_context():
            defer_signals(call)
        if before is not None and before == prepared(self._call) and not self._layout.uses_x64:
            (self._c_call, _), self._c_call_types = before, (*map(type, feeds),)
        return fetched[0]

    def run_sharing(self, feeds: tuple[Array, ...]) -> tuple[Array, ...]:
        """Run with arrays borrowed from other stores, blocking sessions that own these."""
        fetched: list[tuple[Array, ...]] = []

        def run() -> None:
            self.store.gather()
            try:
                fetched.append(self.run(feeds))
            finally:
                self.store.scatter()

        with self.store.lock_shared():
            self.store.note_run()
            defer_signals(run)  # or the other stores might never get their arrays back
        return fetched[0]

    # Several processes ----------------------------------------------------------------------------------------------

    def _global_feeds(self, feeds: tuple[Array, ...]) -> tuple[Array, ...]:
        """Global feed arrays of all replicas, assembled from local feeds."""
        layout = self._layout
        return tuple(
            None
            if layout.is_elsewhere(s)
            else layout.compile_options_for(s).replicas.assemble_global(feed, layout.shape_of_all(s), layout.axis(s))
            for s, feed in zip(layout.used_inputs, feeds, strict=True)
        )

    def _local_fetches(self, fetches: tuple[Array, ...]) -> tuple[Array, ...]:
        """Local shards of the global fetches."""
        assert self._divided is not None
        checks = [(self._divided.local_count, *FAILURE.shape)] * (len(fetches) - len(self._outputs))
        return tuple(map(self._divided.local_shards, fetches, (*map(self._layout.host_shape, self._outputs), *checks)))

    # Checks ---------------------------------------------------------------------------------------------------------

    def _checked(self, fetches: tuple[Array, ...]) -> tuple[Array, ...]:
        """Strip check results from fetches, raising the first failed check of any location and replica."""
        count = len(self._outputs)
        rows = [row for failure in fetches[count:] for row in np.asarray(failure).reshape(-1, 2).tolist()]
        self._raise_failure(*min((row for row in rows if row[0]), default=(0, 0)))
        return fetches[:count]

    def _raise_failure(self, id: int, number: int) -> None:
        """Raise an error naming the op with invalid operand values, or the stream with too many transfers; no error for
        id 0."""
        if id == TRANSFERS:
            raise too_many_transfers(self._layout, self._layout.limited[number])
        for op in (op for op in lowered_ops(self._layout.main.ops) if op.id == id):
            required = op.kind.requirements[number]
            raise ApplicationRuntimeError(
                f"Session.run: in {op!r} of {op.graph.title}, at {op.source.quoted}, `{required.operand}` "
                f"{required.message}, and it is not."
            )

    # Recording and debugging ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self) -> Iterator[Timeline]:
        """Record a device execution timeline while the block runs. Complete once the block ends."""
        timeline = self.timeline = Timeline()
        recorder, before = Recorder(timeline), self._call
        self._c_call_types = None
        if self._plan is not None:
            self._call = partial(self._plan, recorder=recorder)
        else:
            self._call = partial(recorder, "the program", self._executable)
        try:
            yield timeline
        finally:
            self._call = before
            recorder.finish()

    @contextlib.contextmanager
    def debugging(self, infinities: bool) -> Iterator[None]:
        """Run op by op while the block lasts; see `Session.debugging`."""
        if self._divided is not None:
            raise NotImplementedError(
                f"Session.debugging: the program runs on {self._divided}, and what other processes compute cannot be "
                "looked at here. Run it in one process: with `popxl.Ir(replication=...)`, without `poprun`."
            )
        before, self._debugs_infinities, self._c_call_types = self._debugs_infinities, infinities, None
        try:
            yield
        finally:
            self._debugs_infinities = before

    def _op_by_op(self, changing: Sequence[Array], feeds: Sequence[Array], infinities: bool) -> Any:
        """Run op by op, equivalent to the executable, without donation."""
        layout, constants = self._layout, self.store.constant or ()
        replicas, count = layout.replicas, layout.replicas.count
        devices = [replicas.device] * count if replicas.mesh is None else list(replicas.mesh.devices.flat)

        def shares(array: Array, is_shared: bool = False) -> list[Array]:
            """Split an array into per-replica arrays on their devices."""
            fetched_array = replicas.fetched(array)
            if is_shared or count == 1:
                pieces = [fetched_array] * count
            elif isinstance(array, jax.Array) and array.sharding.memory_kind == HOST:
                pieces = np.split(fetched_array, count)  # replicas follow each other there
            else:
                pieces = list(fetched_array)
            return [jax.device_put(share, device) for share, device in zip(pieces, devices, strict=True)]

        def stack_replicas(pieces: Sequence[Array], like: Array) -> Array:
            """Stack per-replica arrays into one array of all replicas. Always copies, as later donation must not affect
            foreign arrays."""
            return replicas.transfer(np.stack(pieces).reshape(like.shape), like.sharding)

        own = layout.replicas_first([np.array(feed) for feed in feeds], layout.channels)
        arguments: list[VariableBlock | Channel] = [
            *layout.changing,
            *layout.buffers,
            *layout.constant,
            *layout.used_inputs,
        ]
        given = zip(arguments, [*changing, *constants, *own], strict=True)
        warn_of_given_nans((a, array) for a, array in given if a not in layout.kept_outputs)
        changed_shares, feed_shares = (list(map(shares, arrays)) for arrays in (changing, own))
        constant = [shares(array, layout.is_replicated(b)) for b, array in zip(layout.constant, constants, strict=True)]
        lowerings = [DebugLowering(layout.main.ops, layout.options, replicas, i, infinities) for i in range(count)]
        tasks, all_channels = [], list[Channels]()
        for i, lowering in enumerate(lowerings):
            own_shares = [[shares[i] for shares in each] for each in (changed_shares, constant, feed_shares)]
            values, channels = begin_run(layout, *own_shares)
            all_channels.append(channels)
            tasks.append(lowering.run_ops(layout.main.ops, values, Context(channels)))
        with raised_recursion_limit(nesting(layout.main)):
            environments = run_replicas(tasks, lowerings, devices)
        runs = [end_run(layout, *each) for each in zip(environments, all_channels, strict=True)]
        changed = tuple(map(stack_replicas, zip(*(changed for changed, _ in runs), strict=True), changing))
        fetched = zip(*(fetches for _, fetches in runs), strict=True)
        fetches = [np.stack(pieces) if count > 1 else pieces[0] for pieces in fetched]
        return changed, layout.transfers_first(fetches, layout.channels)
