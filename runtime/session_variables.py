"""`SessionVariables`, the base of `runtime.session.Session`: a compiled program, and access to its variables."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from popxl.base.arguments import check_type
from popxl.base.copies import NotCopyable
from popxl.base.log import Logger
from popxl.base.pages import listed
from popxl.base.source import SourceLocation, warn_at
from popxl.context import user_frame
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.errors import LostUpdateWarning
from popxl.ir import Ir
from popxl.utils import narrowed
from runtime.machine import Machine
from runtime.program.compiled import Precompiled
from runtime.program.run import Runner
from runtime.program.store import VariableStore
from runtime.signals import defer_signals
from runtime.targets.devices import Device

_log = Logger("session")


class SessionVariables(NotCopyable):
    """Compiled program with its variables, on the host and on a device."""

    machine: ClassVar[Machine] = Machine()

    def __init__(self, ir: Ir, device: Device, precompiled: Precompiled | None = None) -> None:
        self._ir, self._device = ir, device
        self.program = self.machine.program(ir, device, precompiled)
        self.runner = self.machine.runner(self.program)
        # Offline targets have a store, too, which stays empty.
        self._store = VariableStore(self.program.layout) if self.runner is None else self.runner.store
        self._lock = self._store.lock
        self._owners: dict[Variable, tuple[Any, Variable]] = {}  # other sessions that own variables, with theirs

    @property
    def is_attached(self) -> bool:
        """Whether the device is attached, allowing runs: true inside a `with session:` block."""
        return self._device.isAttached

    @property
    def store(self) -> VariableStore | None:
        """Variables on the device; `None` for offline targets."""
        return None if self.runner is None else self._store

    @property
    def _can_run(self) -> bool:
        """Whether the program can be run now: its device is present, and attached."""
        return self.runner is not None and self.is_attached

    def _runner_for(self, what: str) -> Runner:
        """Runner of the program. Raises the machine's error if the session has none."""
        if self.runner is None:
            raise self.machine.refusal(what, self._device)
        return self.runner

    def _attached_store(self, what: str) -> VariableStore:
        """Store of device variables. Raises `ValueError` if the session is not attached; the machine's error if its
        device cannot run programs."""
        store = self._runner_for(what).store
        if not self.is_attached:
            raise ValueError(f"Session.{what}: the session is not attached to a device. Use it inside `with session:`.")
        return store

    def _loaded_store(self, what: str) -> VariableStore:
        """Store of device variables, after uploading them if necessary (after a manual attach or detach)."""
        store = self._attached_store(what)
        if not store.is_loaded:
            self._upload(store)
        return store

    def _upload(self, store: VariableStore) -> None:
        self._device.loads(store)
        store.upload()

    # Copying ------------------------------------------------------------------------------------------------------

    def weights_from_host(self) -> None:
        """Copy host values of all variables to the device; raises `ValueError` if the session is not attached.

        If several processes run the program, all have to do this, with the same values.
        """
        with self._lock:
            self._upload(self._attached_store("weights_from_host"))

    def weights_to_host(self) -> None:
        """Copy values of all variables from device to host; raises `ValueError` if the session is not attached.

        If several processes run the program, all have to do this: then each has the values of all replicas. It is part
        of leaving a `with session:` block, and of `get_tensor_data` after a run.
        """
        if self._is_memory_map:
            raise Exception(
                "Session.weights_to_host: a variable of the program is a read-only memory map, which cannot be written."
            )
        with self._lock, self._ir.host_copies.lock:
            self._loaded_store("weights_to_host").download()

    @property
    def _is_memory_map(self) -> bool:
        """Whether any host copy is a read-only memory map."""
        return any(v.is_read_only for v in self._ir.main_graph.variables)

    def get_tensor_data(self, tensor: Variable | Constant) -> np.ndarray:
        """Value of a variable or constant: the host copy, downloaded first if the device has newer values.

        The array changes when the host copy does; copy it to keep it. If several processes run the program, all have to
        ask, as for `weights_to_host`; one may then be the one that saves it.

        Raises:
            TypeError: for any other tensor.
            ValueError: for a tensor of another Ir, and for a variable of int8, uint8 or complex128: see `values_of`.
        """
        return self.get_tensors_data([tensor])[tensor]

    def get_tensors_data(self, tensors: Iterable[Variable | Constant]) -> dict[Variable | Constant, np.ndarray]:
        """Like `get_tensor_data` for several tensors, with at most one transfer."""
        if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
            raise TypeError(
                f"Session.get_tensors_data: expected a list of tensors; got {tensors!r} ({type(tensors).__name__})."
            )
        wanted = list(tensors)
        for t in wanted:
            self._check_readable(t)
            if isinstance(t, Variable) and t.dtype.name in ("int8", "uint8", "complex128"):
                raise ValueError(
                    f"Session.get_tensors_data: {t!r} cannot be read back: {t.dtype.name} is not supported, as in "
                    "PopXL. `session.values_of([variable])` reads any dtype."
                )
        return self.values_of(wanted)

    def values_of(self, tensors: Iterable[Variable | Constant]) -> dict[Variable | Constant, np.ndarray]:
        """Like `get_tensors_data`, but including variables of int8, uint8 and complex128, which PopXL refuses to read
        back.

        Example:
            >>> ir = popxl.Ir()
            >>> with ir.main_graph:
            ...     v = popxl.variable([1, 2], popxl.int8)
            ...     v += 1
            >>> with popxl.Session(ir) as session:
            ...     _ = session.run()
            >>> session.values_of([v])[v]
            array([2, 3], dtype=int8)
        """
        wanted = list(tensors)
        for t in wanted:
            self._check_readable(t)
        of_others = {v: self._owners[v] for v in wanted if isinstance(v, Variable) and v in self._owners}
        known = {v: owner.values_of([theirs])[theirs] for v, (owner, theirs) in of_others.items()}
        own = [t for t in wanted if t not in known]
        with self._lock, self._ir.host_copies.lock:
            if any(isinstance(t, Variable) for t in own) and self._device_is_ahead():
                self.weights_to_host()
            of_all = self._store.values_of_all
            return {t: known[t] if t in known else _host_value(t, of_all) for t in wanted}

    def _check_readable(self, t: Variable | Constant) -> None:
        if not isinstance(t, Variable | Constant):
            raise TypeError(
                f"Session.get_tensors_data: {t!r} is not of type Constant or Variable. Store other tensors to a "
                "stream (`ops.host_store`)."
            )
        self._check_own("get_tensors_data", t)

    def _device_is_ahead(self) -> bool:
        """Whether reading requires a download. Warns if the device has newer values that are inaccessible."""
        if self._store.has_run and not self.is_attached:
            _log.warn(
                "Session.get_tensors_data: these are the values from before the last runs. What the device had was not "
                "copied to the host before the session was left."
            )
        return self._store.is_ahead and self._can_run

    def write_variable_data(self, tensor: Variable, data: Any) -> None:
        """Write a variable's value on the host and, if attached, on the device.

        The device gets the host values of *all* variables: call `weights_to_host` first to keep its changes.

        Args:
            tensor: the variable.
            data: an array of its `shape_on_host` and dtype; or a number, for a scalar.

        Raises:
            TypeError: if `tensor` is not a variable, or for any other dtype.
            ValueError: for another shape, a number that does not fit the dtype, a variable of another Ir, or one that
                is a read-only memory map.
        """
        self._check_writable(tensor)  # other objects may not be hashable
        self.write_variables_data({tensor: data})

    def write_variables_data(self, tensors: Mapping[Variable, Any]) -> None:
        """Like `write_variable_data` for several variables, with one transfer. Writes nothing if any value is
        refused."""
        check_type(tensors, Mapping, "Session.write_variables_data: `tensors`", "a mapping from variables to numbers")
        self._write_variables(tensors)

    def _write_variables(self, tensors: Mapping[Variable, Any], copy: bool = True) -> None:
        """Implementation of `write_variables_data`. Arrays that are not copied may become host copies."""
        checked: dict[Variable, np.ndarray] = {}
        for t, data in tensors.items():
            self._check_writable(t)
            checked[t] = _new_data(t, data)
        store = self._attached_store("write_variable_data") if self.is_attached else self._store

        def write() -> None:
            _write_host_values(checked, copy)
            store.mark_host_written()  # so that a signal that interrupts the upload only delays it

        with self._lock, self._ir.host_copies.lock:
            if store.has_run and self.is_attached:
                self._warn_of_reverted(checked)
            defer_signals(write)
            if self.is_attached:
                self.weights_from_host()

    def _warn_of_reverted(self, written: Collection[Variable]) -> None:
        """Warn if an upload reverts variables changed by runs, except `written`."""
        changed = self.program.layout.downloaded
        reverted = [v.name for v in changed if v not in written and v not in self._owners]
        if reverted:
            names = listed(reverted, most=3)
            warn_at(
                SourceLocation.of(user_frame()),
                "Session.write_variable_data: what runs have done to other variables is lost: the device takes the "
                f"host's numbers of all variables, and those of {names} are from before the last runs. Call "
                "`session.weights_to_host()` before you write.",
                LostUpdateWarning,
            )

    def _check_own(self, what: str, t: Tensor) -> None:
        """Raise `ValueError` for a tensor of another program, even with matching names."""
        if t.ir is not self._ir:
            raise ValueError(
                f"Session.{what}: {t!r} is of {t.ir!r}, another program than this session's, {self._ir!r}. Pass this "
                "program's tensor (`NamedTensors.to_mapping` pairs tensors by their names)."
            )

    def _check_writable(self, t: Tensor) -> None:
        if not isinstance(t, Variable):
            raise TypeError(f"Tensor {t.id if isinstance(t, Tensor) else repr(t)} is not of type Variable.")
        if t.retrieval_mode == "all_replicas" and t.replica_grouping.group_size > 1:
            raise NotImplementedError(
                f"Session.write_variable_data: {t!r} is read from all replicas and cannot be written."
            )
        self._check_own("write_variable_data", t)
        if t in self._owners:
            owner, theirs = self._owners[t]
            raise ValueError(f"Session.write_variable_data: {t!r} is {theirs!r} of {owner!r}; write to it there.")
        if t.is_read_only:
            raise ValueError(f"Session.write_variable_data: {t!r} is a read-only memory map, which cannot be written.")


# Host copies ----------------------------------------------------------------------------------------------------------


def _host_value(t: Variable | Constant, values_of_all: Mapping[Variable, np.ndarray]) -> np.ndarray:
    """Host value of a variable or constant; one row per replica for variables retrieved from all replicas.

    Args:
        values_of_all: values of such variables on all replicas, if they have been downloaded.
    """
    if isinstance(t, Constant) or t.retrieval_mode != "all_replicas" or t.replica_grouping.group_size == 1:
        return t.data if isinstance(t, Constant) or t.replica_grouping.is_const else t.data.copy()
    if t in values_of_all:
        return values_of_all[t].copy()
    grouping = t.replica_grouping
    rows = t.data if grouping.num_groups > 1 else t.data[None]
    return rows[np.asarray(grouping.assignment)]


def _write_host_values(data: Mapping[Variable, np.ndarray], copy: bool) -> None:
    """Overwrite host copies of variables.

    Args:
        copy: whether to copy these arrays. Otherwise they may become the host copies.
    """
    for v, array in data.items():
        if v.initial is None:
            np.copyto(v.data, array)
        else:  # its initial value need not be made
            v.data = np.array(array) if copy else array


def _new_data(v: Variable, data: Any) -> np.ndarray:
    """Convert user data to an array of a variable's host dtype and shape; see `Session.write_variable_data`.

    Raises:
        TypeError: for any other dtype, or a complex number for a real variable.
        ValueError: for another shape, or a number that does not fit the dtype.
        AttributeError: for an object that is neither an array nor a number.
    """
    wanted = v.dtype.as_numpy()
    if isinstance(data, numbers.Number):
        if wanted.names:
            raise TypeError(f"Session.write_variable_data: {v!r} is a float8; expected an array of dtype {wanted}.")
        if np.asarray(data).dtype.kind == "c" and not v.dtype.is_complex:
            raise TypeError(
                f"Session.write_variable_data: the data for {v!r} is {data!r}, which is complex; expected a real "
                "number."
            )
        data = narrowed(np.asarray(data), wanted, f"Session.write_variable_data: the data for {v!r}")
    if not hasattr(data, "dtype"):
        raise AttributeError(
            f"Session.write_variable_data: the data for {v!r} is {data!r} ({type(data).__name__}); expected an "
            f"array: `np.asarray(data, np.{wanted})`."
        )
    if data.dtype != wanted:
        raise TypeError(
            f"Session.write_variable_data: the data for {v!r} has the dtype {data.dtype}; expected {wanted}."
        )
    if data.shape != v.shape_on_host:
        raise ValueError(
            f"Session.write_variable_data: the data for {v!r} has the shape {data.shape}; expected {v.shape_on_host}."
        )
    return np.asarray(data)
