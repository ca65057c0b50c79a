"""`VariableStore`: a session's variables on its device, and synchronization with host copies."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from popxl.base.arrays import Array
from popxl.base.log import Logger
from popxl.core.tensor import Tensor, Variable
from popxl.errors import PopxlError, PopxlRuntimeError
from runtime.program.blocks import VariableBlock
from runtime.program.layout import Layout
from runtime.program.transfers import (
    NewValues,
    Part,
    fetch_local,
    fetch_values,
    fill_buffer,
    put_variables,
    saved_parts,
    write_host_copies,
)
from runtime.signals import defer_signals

_log = Logger("devicex")

NEVER = -1
"""Version of device values before the first upload."""


class Slot(NamedTuple):
    """Position of an array in a store.

    Attributes:
        changes: whether the slot is in `changing` rather than `constant`.
        number: index there.
    """

    changes: bool
    number: int


@dataclass(frozen=True)
class BorrowedArray:
    """Array borrowed from another store.

    Attributes:
        is_stacked: whether it has a row for each replica there, where replicas share an array here: a copy, made anew
            when it has changed.
    """

    store: VariableStore
    slot: Slot
    is_stacked: bool = False


class SharedCopy(NamedTuple):
    """Copy, shared by all replicas, of an array that each replica has in another store.

    Attributes:
        source: that array, while it exists.
    """

    source: weakref.ref[Array]
    array: Array


_COPY = "Copy what it has: `session.write_variables_data({mine: other.get_tensor_data(theirs)})`"


class VariableStore:
    """Arrays resident on a program's device between runs, with versions of their values.

    Versions count the changes of the variables of an Ir, wherever they are made. `device` and `host` say which has the
    newest values:

    * equal: both have the same values;
    * `device` is larger: runs have changed the variables since the last download, which is due before they are read;
    * `host` is larger: this session has written the host copies, and an upload is due before the next run.

    As in PopXL, an upload or a write makes a download due. All sessions of an Ir share its host copies, whose version
    is `ir.host_copies.version`: if it differs from `host`, another session has written them, and a download is due too.

    Attributes:
        lock: lock for running the program and for transferring its variables.
        changing: the variables that the program changes, and its remote buffers. A run donates them, and puts new ones
            here. `None` if there are none: nothing was uploaded, or a run that failed has lost them.
        constant: arrays of the variables that it only reads; `None` if an upload is due.
        host: the version of the host copies that this store took or gave last.
        device: version of the values that are, or were last, on the device.
        values_of_all: values on all replicas, for variables that are read from all, as of the last download.
        run_count: for a program over several processes: number of runs that this one has started.
        borrowed: the arrays of other stores, by their slots here, which hold `None` between runs.
    """

    def __init__(self, layout: Layout) -> None:
        ir = layout.main.ir
        self._layout, self._host_copies = layout, ir.host_copies
        self._variables = ir.main_graph.variables
        self.lock = threading.RLock()
        self.changing: tuple[Array, ...] | None = None
        self.constant: tuple[Array, ...] | None = None
        self.host, self.device = ir.host_copies.version, NEVER
        self.values_of_all: dict[Variable, np.ndarray] = {}
        self.run_count = 0
        self.borrowed: dict[Slot, BorrowedArray] = {}
        self._shared_copies: dict[Slot, SharedCopy] = {}
        self._owning_stores: tuple[VariableStore, ...] = ()  # in the common order of locking
        self._changed_stores: tuple[VariableStore, ...] = ()

    # Who has the newest values --------------------------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether variables are on the device without a pending upload."""
        return self.constant is not None

    @property
    def has_run(self) -> bool:
        """Whether runs have changed the variables since the last download."""
        return self.device > self.host

    @property
    def is_ahead(self) -> bool:
        """Whether reading variables requires a download first."""
        return self.has_run or self.host != self._host_copies.version

    def note_run(self) -> None:
        """Mark device values as newer before a run starts: even an interrupted run may change variables."""
        if self.device <= self.host:
            self._host_copies.in_sync = False
            self.device = self._host_copies.new_version()
        for store in self._changed_stores:
            store.note_run()

    def mark_host_written(self) -> None:
        """Mark host copies as written, making an upload due."""
        has_run = self.has_run
        self.host, self.constant = self._host_copies.record_write(), None
        if has_run:  # since the last download, as before the write
            self.device = self._host_copies.new_version()

    def present(self) -> tuple[Array, ...]:
        """Arrays changed by runs; raises `PopxlRuntimeError` if lost."""
        if self.changing is None:
            raise PopxlRuntimeError(
                "Session: the values of the variables on the device were lost when a run failed. Upload the host "
                "copies again with `session.weights_from_host()`."
            )
        return self.changing

    def release(self) -> None:
        """Free the device memory of variables."""
        self.changing = self.constant = None
        self._shared_copies.clear()

    # Transfers ------------------------------------------------------------------------------------------------------

    def upload(self, new_values: NewValues | None = None) -> None:
        """Upload host values of all variables to the device. Remote buffer slots without variables stay unchanged.

        Args:
            new_values: variables with values other than their host copies. Only parts on the devices of this process
                are requested, if each device has a replica; else all.
        """
        _log.debug(f"Writing weights from host, {len(self._layout.variables)} variables.")
        is_first = self.device == NEVER
        with self._host_copies.lock:
            version = self._host_copies.version
            changing, constant = self._uploaded(new_values or {})
            device = self._host_copies.new_version() if self.has_run else version
            # No call is made between these, so no signal is handled.
            self.changing, self.constant = changing, constant
            self.host, self.device = version, device
        if is_first:
            remote = [v for v in self._variables if v.location_info.isRemote()]
            for v in dict.fromkeys([*self._layout.variables, *remote]):
                if v.retrieval_mode == "one_per_group":
                    _log.trace(f"Reusing TensorData for d2hWeightBuffer of tensor {v.id}")

    def _uploaded(self, new_values: NewValues) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        layout = self._layout
        slots = [None] * len(layout.buffers) if self.changing is None else self.changing[len(layout.changing) :]
        layout.replicas.barrier("Session.weights_from_host", self.run_count)

        def upload_blocks(changes: bool, blocks: Sequence[VariableBlock]) -> list[Array]:
            own = [Slot(changes, i) not in self.borrowed for i in range(len(blocks))]
            return [
                put_variables(layout, b, new_values) if is_own else None for b, is_own in zip(blocks, own, strict=True)
            ]

        with layout.x64_context():
            changing = upload_blocks(True, layout.changing)
            changing += [fill_buffer(layout, b, old, new_values) for b, old in zip(layout.buffers, slots, strict=True)]
            return tuple(changing), tuple(upload_blocks(False, layout.constant))

    def download(self) -> None:
        """Download values of all changed variables from device to host."""
        layout = self._layout
        version = self._host_copies.record_write()  # if this is interrupted, no store takes the host copies for its own
        if layout.changed or layout.stored_to:
            layout.replicas.barrier("Session.weights_to_host", self.run_count)
        with layout.x64_context():
            fetched = fetch_values(layout, self.present())
        # The host copies of all variables are of one moment.
        defer_signals(lambda: self.values_of_all.update(write_host_copies(fetched)))
        _log.debug("Writing weights to host complete.")
        self.host = self.device = version
        self._host_copies.in_sync = True
        for v in self._variables:
            if (mapped := v._memmap_arr) is not None:
                mapped.flush()

    def upload_parts(self, new_values: NewValues) -> None:
        """Upload values given in parts. Changed variables without host memory receive values only on the device."""
        on_device = {v for v in self._layout.downloaded if v._memmap_arr is None}
        host_values = {v: read(0, math.prod(v.shape_on_host)) for v, read in new_values.items() if v not in on_device}
        self.upload(new_values)

        def store_host_values() -> None:
            for v, data in host_values.items():
                np.copyto(v.data, data.reshape(v.shape_on_host))
            self.host = self._host_copies.record_write()
            self.device = self._host_copies.new_version()
            self._host_copies.in_sync = False

        defer_signals(store_host_values)

    def local_values(self, variables: Sequence[Variable]) -> dict[Variable, np.ndarray] | None:
        """Variable values on this process's first replica; see `transfers.fetch_local`."""
        with self._layout.x64_context():
            return fetch_local(self._layout, self.present(), variables)

    def saved_parts(self, variables: Collection[Variable], is_ahead: bool) -> dict[Variable, list[Part]]:
        """Parts of variable values saved by this process; see `transfers.saved_parts`."""
        with self._layout.x64_context():
            return saved_parts(self._layout, self.present() if is_ahead else (), variables, is_ahead)

    # Variables of other stores --------------------------------------------------------------------------------------

    def share(self, other: VariableStore, variables: Mapping[Variable, Variable]) -> None:
        """Share variables of another store: `variables` maps own variables to foreign ones. Shares all or none.

        Variables that the program does not use are left out.

        `ValueError` for arrays of different layouts or devices.
        """
        wanted = {mine.on_replica: theirs.on_replica for mine, theirs in variables.items()}
        borrowed: dict[Slot, BorrowedArray] = {}
        for slot, block in self._blocks().items():
            if not (mine := [t for t in block.tensors if t in wanted]):
                continue
            theirs = [wanted.get(t) for t in block.tensors]
            source = next((s for s, each in other._blocks().items() if not set(theirs).isdisjoint(each.tensors)), None)
            if problem := self._problem(slot, theirs, other, source):
                first = mine[0]
                raise ValueError(f"Session.use_variables_of: {first!r} cannot be {wanted[first]!r}: {problem}.")
            assert source is not None
            array = BorrowedArray(other, source, self._is_replicated(slot) and not other._is_replicated(source))
            same_source = {each for each, source in (self.borrowed | borrowed).items() if source == array} - {slot}
            if same_source and any(changes for changes, _ in same_source | {slot}):
                raise ValueError(
                    f"Session.use_variables_of: {mine[0]!r} cannot be {wanted[mine[0]]!r}: another variable is that "
                    "one already, and this session changes one of the two. Give each a variable of its own."
                )
            borrowed[slot] = array
        self.borrowed.update(borrowed)
        self._owning_stores = tuple(sorted({each.store for each in self.borrowed.values()}, key=id))
        self._changed_stores = tuple(dict.fromkeys(each.store for slot, each in self.borrowed.items() if slot.changes))
        self._replace(dict.fromkeys(self.borrowed))

    def _problem(self, slot: Slot, theirs: Sequence[Tensor | None], other: VariableStore, source: Slot | None) -> str:
        """Reason why an array cannot be shared from another store, with `theirs` as its variables; empty if it can."""
        if source is None:
            return "the other session does not use it"
        if list(other._blocks()[source].tensors) != theirs:
            return (
                "calls are rolled into loops, so it lies in one array with others, and these are not in the same order "
                "in one array of the other session. Set `ir.options.calledGraphs = 'kept'` for both programs"
            )
        if source in other.borrowed:
            return "the other session has it from a third one; take it from there"
        if slot.changes and not source.changes:
            return "the other session only reads it, and this one changes it: let that session take it from this one"
        replicas, own_replicas = other._layout.replicas.count, self._layout.replicas.count
        if replicas != own_replicas:
            return f"the other session has {replicas} replicas, and this one {own_replicas}. {_COPY}"
        ours, source_spec = self._slot_spec(slot), other._slot_spec(source)
        if ours == source_spec or self._can_share(slot, other, source):
            return ""
        block, source_block = self._blocks()[slot], other._blocks()[source]
        remedy = f". {_COPY}" if (block.shape, block.dtype) == (source_block.shape, source_block.dtype) else ""
        return f"the other session has it as {source_spec}, and this one as {ours}{remedy}"

    def _blocks(self) -> dict[Slot, VariableBlock]:
        """Variable arrays, keyed by slot."""
        both = ((True, self._layout.changing), (False, self._layout.constant))
        return {Slot(changes, i): block for changes, blocks in both for i, block in enumerate(blocks)}

    def _slot_spec(self, slot: Slot) -> tuple[Any, ...]:
        """Shape, dtype and devices of an array, required to match between sharing programs."""
        layout, block = self._layout, self._blocks()[slot]
        replicas = layout.compile_options_for(block.tensors[0]).replicas
        shape = block.shape if layout.is_replicated(block) else replicas.shape(block.shape)
        # By its devices: meshes of programs with other groups have other dimensions, which makes no difference here.
        return shape, str(np.dtype(block.dtype)), replicas.devices

    def _is_replicated(self, slot: Slot) -> bool:
        return self._layout.is_replicated(self._blocks()[slot])

    def _can_share(self, slot: Slot, other: VariableStore, source: Slot) -> bool:
        """Whether replicas share an array here that each replica has in the other store, with equal values."""
        if not self._is_replicated(slot) or self._layout.divided is not None:
            return False
        variables = (other._layout.resident[t] for t in other._blocks()[source].tensors)
        shape, *others = self._slot_spec(slot)
        source_spec = self._layout.replicas.shape(shape), *others
        return other._slot_spec(source) == source_spec and all(v.replica_grouping.num_groups == 1 for v in variables)

    @contextmanager
    def lock_shared(self) -> Iterator[None]:
        """Lock the stores owning shared variables, blocking their sessions while the block runs. (Owners never borrow
        from this store.)"""
        with ExitStack() as locks:
            for store in self._owning_stores:
                locks.enter_context(store.lock)
            yield

    def gather(self) -> None:
        """Borrow arrays from other stores for a run; raises `PopxlError` if a store has none."""
        for each in self.borrowed.values():
            if each.slot in each.store.borrowed:
                raise PopxlError(
                    "Session.run: some variables are those of another session (`use_variables_of`), which has them "
                    "from a third one by now. Take them from there."
                )
            if not each.store.is_loaded:
                raise PopxlError(
                    "Session.run: some variables are those of another session (`use_variables_of`), which is not "
                    "attached. Enter its `with` block first, and leave it last."
                )
        arrays = {slot: each.store._array(each.slot) for slot, each in self.borrowed.items()}
        stacked = {slot: arrays[slot] for slot, each in self.borrowed.items() if each.is_stacked}
        self._replace(arrays | self._shared_among_replicas(stacked))

    def _shared_among_replicas(self, arrays: Mapping[Slot, Array]) -> dict[Slot, Array]:
        """Copies of arrays of all replicas that these share, made anew of arrays that have changed."""
        copies = self._shared_copies
        changed = {slot: a for slot, a in arrays.items() if slot not in copies or copies[slot].source() is not a}
        if changed:
            for slot in changed:
                copies.pop(slot, None)  # free before there is another
            with self._layout.x64_context():
                made = self._layout.replicas.shared([*changed.values()])
            for (slot, source), array in zip(changed.items(), made, strict=True):
                copies[slot] = SharedCopy(weakref.ref(source), array)
        return {slot: copies[slot].array for slot in arrays}

    def scatter(self) -> None:
        """Return borrowed arrays, as updated by a run."""
        for slot, each in self.borrowed.items():
            if slot.changes and self.changing is not None:
                each.store._replace({each.slot: self.changing[slot.number]})
            elif slot.changes:
                each.store.changing = None  # donated to a run that failed
        self._replace(dict.fromkeys(self.borrowed))

    def _array(self, slot: Slot) -> Array:
        constant = self.constant
        assert constant is not None
        return self.present()[slot.number] if slot.changes else constant[slot.number]

    def _replace(self, arrays: Mapping[Slot, Array]) -> None:
        """Replace arrays in their slots, if the store is loaded."""
        changing = None if self.changing is None else list(self.changing)
        constant = None if self.constant is None else list(self.constant)
        for (changes, number), array in arrays.items():
            target = changing if changes else constant
            if target is not None:
                target[number] = array
        self.changing = None if changing is None else tuple(changing)
        self.constant = None if constant is None else tuple(constant)
