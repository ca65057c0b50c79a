"""What a session holds on its device: the values of variables, and the slots of remote buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from popxl.core.tensor import Tensor, Variable
from popxl.errors import PopxlError, PopxlRuntimeError
from popxl.fp8_utils import to_device, to_host
from popxl.remote_buffer import RemoteBuffer
from popxl.utils import to_numpy
from popxl.values.sharding import parts_of
from runtime.lowering import remote_buffers as remote
from runtime.program.blocks import Block
from runtime.program.layout import Layout
from runtime.signals import defer_signals
from runtime.targets.replicas import DividedReplicas

Array = Any

_Taken = tuple[Variable, np.ndarray, np.ndarray | None]

Part = tuple[int, np.ndarray]
"""A part of the values of a variable on the host: the number of its first element, of all one after the other, and its
elements."""

Given = Mapping[Variable, Callable[[int, int], np.ndarray]]
"""What gives new values of variables on the host: their elements from one number to another, one value after the other,
of their dtype."""

_Place = tuple[bool, int]
"""Where a state has an array: whether among those that change, and at which position."""


@dataclass(frozen=True)
class Loan:
    """An array that belongs to another state, for the time of a run."""

    lender: State
    place: _Place


def _places_of(loan: Loan, loans: Mapping[_Place, Loan]) -> set[_Place]:
    """Where this array is, of those that are lent."""
    return {place for place, each in loans.items() if each == loan}


def _holder(v: Variable) -> Tensor:
    """What holds a variable on the device: itself, or its piece."""
    return v if v.piece is None else v.piece


class State:
    """The arrays that a program keeps on its device from run to run.

    Args:
        layout: where they lie.

    Attributes:
        changing: the variables that the program changes, and its remote buffers. A run gives them up, and puts new ones
            here. `None`, if there are none: they have not been uploaded, or a run that failed has lost them.
        constant: the variables that it only reads.
        is_loaded: whether the variables are on the device.
        values_of_all: the values on all replicas of the variables that are read from all, as they were when they were
            last copied to the host.
        begun: of a program over several processes: how many runs this one has begun.
        loans: the arrays that are other states', by their place here. Between runs there is `None` in these places.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.changing: tuple[Array, ...] | None = None
        self.constant: tuple[Array, ...] = ()
        self.is_loaded = False
        self.values_of_all: dict[Variable, np.ndarray] = {}
        self.begun = 0
        self.loans: dict[_Place, Loan] = {}

    def present(self) -> tuple[Array, ...]:
        """What changes. `PopxlRuntimeError` if it is lost."""
        if self.changing is None:
            raise PopxlRuntimeError(
                "Session: the values of the variables on the device were lost when a run failed. Upload the host "
                "copies again with `session.weights_from_host()`."
            )
        return self.changing

    def release(self) -> None:
        """Free the device memory of the variables."""
        self.changing, self.constant = None, ()
        self.is_loaded = False

    # What is another state's ----------------------------------------------------------------------------------------

    def borrow(self, lender: State, variables: Mapping[Variable, Variable]) -> None:
        """Have variables, from now on, where another state has some: its own by ours. Either all of them, or none.

        Variables that the program does not use are left out.

        `ValueError` if they do not lie in arrays of the same form, on the same devices.
        """
        wanted = {_holder(mine): _holder(theirs) for mine, theirs in variables.items()}
        found: dict[_Place, Loan] = {}
        for place, block in self._blocks().items():
            if not (mine := [t for t in block.tensors if t in wanted]):
                continue
            theirs = [wanted.get(t) for t in block.tensors]
            there = next(
                (p for p, other in lender._blocks().items() if not set(theirs).isdisjoint(other.tensors)), None
            )
            if problem := self._problem(place, theirs, lender, there):
                first = mine[0]
                raise ValueError(f"Session.use_variables_of: {first!r} cannot be {wanted[first]!r}: {problem}.")
            assert there is not None
            loan = Loan(lender, there)
            also = _places_of(loan, self.loans | found) - {place}
            if also and any(changes for changes, _ in also | {place}):
                raise ValueError(
                    f"Session.use_variables_of: {mine[0]!r} cannot be {wanted[mine[0]]!r}: another variable is that "
                    "one already, and this session changes one of the two. Give each a variable of its own."
                )
            found[place] = loan
        self.loans.update(found)
        if self.is_loaded:
            self._put_back()

    def _problem(self, place: _Place, theirs: Sequence[Tensor | None], lender: State, there: _Place | None) -> str:
        """Why an array cannot be another state's, where `theirs` are to be its variables; nothing, if it can."""
        if there is None:
            return "the other session does not use it"
        if list(lender._blocks()[there].tensors) != theirs:
            return (
                "calls are rolled into loops, so it lies in one array with others, and these are not in the same order "
                "in one array of the other session. Set `ir.options.calledGraphs = 'kept'` for both programs"
            )
        if there in lender.loans:
            return "the other session has it from a third one; take it from there"
        if place[0] and not there[0]:
            return "the other session only reads it, and this one changes it: let that session take it from this one"
        replicas, own_replicas = lender._layout.replicas.count, self._layout.replicas.count
        if replicas != own_replicas:
            return (
                f"the other session has {replicas} replicas, and this one {own_replicas}. Copy what it has: "
                "`session.write_variables_data({mine: other.get_tensor_data(theirs)})`"
            )
        ours, other = self._form(place), lender._form(there)
        return "" if ours == other else f"the other session has it as {other}, and this one as {ours}"

    def _blocks(self) -> dict[_Place, Block]:
        """The arrays of variables, by their places."""
        both = ((True, self._layout.changing), (False, self._layout.constant))
        return {(changes, i): block for changes, blocks in both for i, block in enumerate(blocks)}

    def _form(self, place: _Place) -> tuple[Any, ...]:
        """What an array is, as far as that matters to another program: shape, dtype, and where it lies."""
        layout, block = self._layout, self._blocks()[place]
        replicas = layout.terms_for(block.tensors[0]).replicas
        shared = layout.is_shared(block)
        shape = block.shape if shared else replicas.shape(block.shape)
        # By its devices: meshes of programs with other groups have other dimensions, which makes no difference here.
        return shape, str(np.dtype(block.dtype)), replicas.devices

    def take(self) -> None:
        """Have the arrays that are other states', for a run. `PopxlError` if one of these has none."""
        for loan in self.loans.values():
            if loan.place in loan.lender.loans:
                raise PopxlError(
                    "Session.run: some variables are those of another session (`use_variables_of`), which has them "
                    "from a third one by now. Take them from there."
                )
            if not loan.lender.is_loaded:
                raise PopxlError(
                    "Session.run: some variables are those of another session (`use_variables_of`), which is not "
                    "attached. Enter its `with` block first, and leave it last."
                )
        self._replace({place: loan.lender._arrays(loan.place[0])[loan.place[1]] for place, loan in self.loans.items()})

    def give_back(self) -> None:
        """Let other states have their arrays, as a run has left them."""
        for (changes, i), loan in self.loans.items():
            if changes and self.changing is not None:
                loan.lender._replace({loan.place: self.changing[i]})
            elif changes:
                loan.lender.changing = None  # given up in a run that failed
        self._put_back()

    def _put_back(self) -> None:
        self._replace(dict.fromkeys(self.loans))

    def _arrays(self, changes: bool) -> tuple[Array, ...]:
        return self.present() if changes else self.constant

    def _replace(self, arrays: Mapping[_Place, Array]) -> None:
        changing, constant = None if self.changing is None else list(self.changing), list(self.constant)
        for (changes, i), array in arrays.items():
            if not changes:
                constant[i] = array
            elif changing is not None:
                changing[i] = array
        self.changing, self.constant = None if changing is None else tuple(changing), tuple(constant)

    # To the device --------------------------------------------------------------------------------------------------

    def upload(self, given: Given | None = None) -> None:
        """Copy the host values of all variables to the device. Slots of buffers that no variable fills stay.

        Args:
            given: variables that get other values than they have on the host. These are asked for what the devices of
                this process hold, if each device has a replica; else for all.
        """
        given = given or {}
        layout = self._layout
        slots = [None] * len(layout.buffers) if self.changing is None else self.changing[len(layout.changing) :]
        buffers = zip(layout.in_buffers.items(), slots, strict=True)
        layout.replicas.barrier("Session.weights_from_host", self.begun)
        with layout.precision():
            changing = (
                *(
                    None if (True, i) in self.loans else self._put(block, given)
                    for i, block in enumerate(layout.changing)
                ),
                *(self._filled(buffer, vs, before, given) for (buffer, vs), before in buffers),
            )
            constant = tuple(
                None if (False, i) in self.loans else self._put(block, given) for i, block in enumerate(layout.constant)
            )
        self.changing, self.constant, self.is_loaded = changing, constant, True  # no signal comes between

    def _filled(self, buffer: RemoteBuffer, variables: Sequence[Variable], before: Array | None, given: Given) -> Array:
        terms = self._layout.terms_for(buffer)
        rows = {v: self._rows(v, given) for v in variables}
        return remote.filled(buffer, rows, terms.replicas, terms.slots, before)

    def _put(self, block: Block, given: Given) -> Array:
        layout = self._layout
        replicas = layout.terms_for(block.tensors[0]).replicas
        variables = [layout.held[t] for t in block.tensors]
        alike = layout.is_shared(block) or all(map(self._is_alike, block.tensors))
        if not alike and replicas.mesh is not None and any(v in given or v.initial for v in variables):
            rows = [self._rows(v, given) for v in variables]  # nobody makes what other processes have
            return replicas.made(replicas.shape(block.shape), lambda replica: np.stack([row(replica) for row in rows]))
        whole = [self._whole(v, given) for v in variables]
        if layout.is_shared(block):
            return replicas.place(np.stack(whole) if block.is_stack else whole[0], replicas.sharding(None))
        if all(map(self._is_alike, block.tensors)):
            return replicas.put(np.stack(whole) if block.is_stack else whole[0])
        parts = [self._parts(t, array, replicas.count) for t, array in zip(block.tensors, whole, strict=True)]
        array = np.stack(parts, 1) if block.is_stack else parts[0]
        return replicas.place(array.reshape(replicas.shape(block.shape)), replicas.sharding())

    def _whole(self, v: Variable, given: Given) -> np.ndarray:
        # JAX may keep the array that it is given as the device's memory, whatever it is told about aliasing; so it gets
        # one of its own. Host copies change, and donated memory is overwritten.
        size = math.prod(v.shape_on_host)
        return to_device(given[v](0, size).reshape(v.shape_on_host) if v in given else v.numbers(), v.dtype)

    def _rows(self, v: Variable, given: Given) -> Callable[[int], np.ndarray]:
        """What gives the numbers that a replica has of a variable at first."""
        elements = given.get(v, partial(_on_host, v))
        return partial(parts_of(v).row, lambda start, stop: to_device(elements(start, stop), v.dtype))

    def _is_alike(self, t: Tensor) -> bool:
        """Whether all replicas have the same of a variable at first."""
        v = self._layout.held[t]
        return v.replica_grouping.num_groups == 1 and t is v

    def _parts(self, t: Tensor, array: np.ndarray, count: int) -> np.ndarray:
        """What each replica has of a variable at first."""
        if self._is_alike(t):
            return np.broadcast_to(array, (count, *t.shape))
        return parts_of(self._layout.held[t]).of(array).reshape(count, *t.shape)

    # To the host ----------------------------------------------------------------------------------------------------

    def download(self) -> None:
        """Copy the values of all variables that the program changes from the device to the host."""
        layout, count = self._layout, len(self._layout.changing)
        if layout.changed or layout.stored_to:
            layout.replicas.barrier("Session.weights_to_host", self.begun)
        taken: list[_Taken] = []
        with layout.precision():
            for i, (block, value) in enumerate(zip(layout.changing, self.present()[:count], strict=True)):
                if (True, i) in self.loans:
                    continue
                replicas = layout.terms_for(block.tensors[0]).replicas
                changed = [t for t in block.tensors if t in layout.changed]
                one_will_do = all(map(self._is_one, changed)) and layout.divided is None
                fetched = replicas.fetched_once(value) if one_will_do else replicas.fetched(value)
                rows = fetched.reshape(replicas.count, len(block.tensors), -1)
                for t in changed:
                    taken.append(self._taken_from(layout.held[t], rows[:, block.tensors.index(t)]))
            for (buffer, vs), slots in zip(layout.in_buffers.items(), self.present()[count:], strict=True):
                if vs and buffer in layout.stored_to:
                    for v, array in remote.parts_in(buffer, vs, layout.terms_for(buffer).replicas, slots).items():
                        taken.append(self._taken_from(v, array))
        defer_signals(lambda: self._take(taken))  # the host copies of all variables are of one moment

    def _is_one(self, t: Tensor) -> bool:
        """Whether what holds a variable is declared to be the same on all replicas, and its value is asked for once."""
        v = self._layout.held[t]
        return v is t and v.replica_grouping.num_groups == 1 and v.retrieval_mode != "all_replicas"

    def read_here(self, variables: Sequence[Variable]) -> dict[Variable, np.ndarray] | None:
        """Values of variables as the first replica of this process has them. Host copies stay as they are.

        `None`, unless several processes run the program and none but this one is needed for it.
        """
        layout = self._layout
        if layout.divided is None:
            return None
        blocks = zip(layout.changing, self.present(), strict=False)
        changed = {layout.held[t]: (t, block, array) for block, array in blocks for t in block.tensors}
        elsewhere = {v for v, (t, *_) in changed.items() if not self._is_one(t)}
        elsewhere.update(v for b in layout.stored_to for v in layout.in_buffers[b])
        if not elsewhere.isdisjoint(variables):
            return None

        def value(v: Variable) -> np.ndarray:
            if v not in changed:
                return v.data
            t, block, array = changed[v]
            rows = layout.terms_for(t).replicas.fetched_once(array)[0].reshape(len(block.tensors), *v.shape)
            return to_host(rows[block.tensors.index(t)], v.dtype)

        with layout.precision():
            return {v: value(v) for v in variables}

    def own_parts(self, variables: Collection[Variable], is_ahead: bool) -> dict[Variable, list[Part]]:
        """Parts of the values of variables, of a program over several processes: those that replicas of this process
        are the first to hold. The parts that all processes have are all values, each once. They are copies.

        Args:
            variables: which.
            is_ahead: whether the devices are, of the host copies.
        """
        layout = self._layout
        assert layout.divided is not None
        own = layout.divided.own_replicas
        parts: dict[Variable, list[Part]] = {}
        if is_ahead:
            with layout.precision():
                parts = self._parts_on_devices(set(variables), set(own))
        for v in variables:
            held = parts_of(v)
            wanted = [*(held.without_room if own[0] == 0 else ())]
            if v not in parts:
                wanted += [each for replica, each in held.first_holders.items() if replica in own]
            parts.setdefault(v, []).extend((start, _on_host(v, start, stop)) for start, stop in wanted)
        return parts

    def _parts_on_devices(self, variables: set[Variable], own: set[int]) -> dict[Variable, list[Part]]:
        """The same, of what the program changes."""
        layout, count = self._layout, len(self._layout.changing)
        firsts = {v: parts_of(v).first_holders for v in variables}
        parts: dict[Variable, list[Part]] = {}

        def fetched(array: Array, thing: Tensor | RemoteBuffer, vs: Iterable[Variable]) -> dict[int, np.ndarray]:
            replicas = layout.terms_for(thing).replicas
            assert isinstance(replicas, DividedReplicas)
            return replicas.fetched_here(array, own & set(chain(*(firsts[v] for v in vs))))

        def note(replica: int, rows: Mapping[Variable, np.ndarray]) -> None:
            for v, row in rows.items():
                if replica in firsts[v]:
                    start, stop = firsts[v][replica]
                    parts[v].append((start, to_host(row[: stop - start], v.dtype)))

        for block, array in zip(layout.changing, self.present(), strict=False):
            held = {layout.held[t]: k for k, t in enumerate(block.tensors) if t in layout.changed}
            if vs := variables & held.keys():
                parts |= {v: [] for v in vs}
                for replica, values in fetched(array, block.tensors[0], vs).items():
                    rows = values.reshape(len(block.tensors), -1)
                    note(replica, {v: rows[held[v]] for v in vs})
        for (buffer, inside), array in zip(layout.in_buffers.items(), self.present()[count:], strict=True):
            if buffer in layout.stored_to and (vs := variables & set(inside)):
                parts |= {v: [] for v in vs}
                for replica, slots in fetched(array, buffer, vs).items():
                    note(replica, {v: row[0] for v, row in remote.in_slots(buffer, vs, slots).items()})
        return parts

    def _taken_from(self, v: Variable, array: np.ndarray) -> _Taken:
        """What the replicas hold of a variable: its host copy to be, and the values on all replicas if these are
        wanted. Elements that they have no room for are left out."""
        if self._layout.replicas.count == 1 and not v.location_info.isRemote():
            return v, to_host(array, v.dtype).reshape(1, -1), None
        parts, rows = parts_of(v), array.reshape(self._layout.replicas.count, -1)
        values = to_host(parts.values(rows), v.dtype)
        if v.retrieval_mode == "all_replicas" and v.replica_grouping.group_size > 1:
            return v, values, to_host(parts.values(rows, all_replicas=True), v.dtype)
        return v, values, None

    def _take(self, taken: Iterable[_Taken]) -> None:
        """Make what the replicas hold of variables their host copies."""
        for v, values, of_all in taken:
            if v.initial is not None and values.size == math.prod(v.shape_on_host):
                v.data = np.array(values).reshape(v.shape_on_host)  # nobody needs what it began with
            v.data.reshape(len(values), -1)[:, : values.shape[1]] = values
            if of_all is not None:
                whole = v.data.reshape(len(values), -1)[v.replica_grouping.assignment]
                whole[:, : of_all.shape[1]] = of_all
                self.values_of_all[v] = whole.reshape(-1, *v.shape)


def _on_host(v: Variable, start: int, stop: int) -> np.ndarray:
    """A copy of some elements of all values of a variable on the host, one after the other."""
    if v.initial is None:
        return np.array(v.data.reshape(-1)[start:stop])
    return to_numpy(v.initial.elements(start, stop), v.dtype)
