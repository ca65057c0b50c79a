"""`VariableCopies`: the variables of a session on the host and on the device; which is ahead, and what copies them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from popxl.base.log import Logger
from popxl.core.tensor import Constant, Variable
from popxl.ir import Ir
from popxl.utils import narrowed
from runtime.program.program import Program
from runtime.program.state import Given
from runtime.signals import defer_signals

__all__ = ["VariableCopies", "new_data"]

_log = Logger("devicex")


class VariableCopies:
    """The variables of a session, of which the host has copies, and the device others.

    Sessions of an Ir share those of the host: hold `ir.host_copies.lock` around whatever has to be of one moment.

    Args:
        ir: the program.
        program: the same, compiled.

    Attributes:
        has_run: whether the program has run since the device's were fetched: whether the device may be ahead.
    """

    def __init__(self, ir: Ir, program: Program) -> None:
        self._ir, self._program = ir, program
        self._variables = ir.main_graph.variables
        self._known = ir.host_copies.version
        self._has_uploaded = False
        self.has_run = False

    @property
    def host_is_stale(self) -> bool:
        """Whether the host's are not what this session last put there: it has run, or somebody else wrote them."""
        return self.has_run or self._known != self._ir.host_copies.version

    @property
    def are_read_only(self) -> bool:
        """Whether any of the host's is a memory map that cannot be written."""
        return any(v.is_read_only for v in self._variables)

    def note_run(self) -> None:
        """Say that the host's are behind, before it is so: an interrupted run may have changed the variables."""
        if not self.has_run:
            for v in self._variables:
                v._in_sync = False
            self.has_run = True

    def upload(self, given: Given | None = None) -> None:
        """Copy all from the host to the device, but for those whose values are given in parts."""
        _log.debug(f"Writing weights from host, {len(self._program.variables)} variables.")
        with self._ir.host_copies.lock:
            version = self._ir.host_copies.version
            self._program.upload(given)
        if not self._has_uploaded:
            self._has_uploaded = True
            remote = [v for v in self._variables if v.location_info.isRemote()]
            for v in dict.fromkeys([*self._program.variables, *remote]):
                if v.retrieval_mode == "one_per_group":
                    _log.trace(f"Reusing TensorData for d2hWeightBuffer of tensor {v.id}")
        self._known = version

    def download(self) -> None:
        """Copy all from the device, where they have to be, to the host."""
        version = self._ir.host_copies.note()  # whoever is interrupted from here on trusts them no more
        self._program.download()
        _log.debug("Writing weights to host complete.")
        self.has_run, self._known = False, version
        for v in self._variables:
            v._in_sync = True
            if (mapped := v._memmap_arr) is not None:
                mapped.flush()

    def write(self, data: Mapping[Variable, np.ndarray], kept: bool = True) -> None:
        """Overwrite some of the host's; all are to be uploaded then.

        Args:
            data: their new values.
            kept: whether the caller goes on with these arrays. Otherwise they may become the host's.
        """

        def write() -> None:
            for v, array in data.items():
                if v.initial is None:
                    np.copyto(v.data, array)
                else:  # nobody makes the numbers that it would have begun with
                    v.data = np.array(array) if kept else array
            self._known = self._ir.host_copies.note()
            self._program.is_loaded = False  # so that what interrupts the upload only puts it off

        defer_signals(write)

    def write_parts(self, given: Given) -> None:
        """Upload values that are asked for in parts. Those that the program changes are on the device only then."""
        only_there = {v for v in self._program.read_back if v._memmap_arr is None}
        whole = {v: read(0, math.prod(v.shape_on_host)) for v, read in given.items() if v not in only_there}
        self.upload(given)

        def note() -> None:
            for v, data in whole.items():
                np.copyto(v.data, data.reshape(v.shape_on_host))
            self._known = self._ir.host_copies.note()
            self.note_run()

        defer_signals(note)

    def read(self, t: Variable | Constant) -> np.ndarray:
        """The host's; of a variable that is read from all replicas, a row for each of them."""
        if isinstance(t, Constant) or t.retrieval_mode != "all_replicas" or t.replica_grouping.group_size == 1:
            return t.data if isinstance(t, Constant) or t.replica_grouping.is_const else t.data.copy()
        if t in self._program.values_of_all:
            return self._program.values_of_all[t].copy()
        grouping = t.replica_grouping
        rows = t.data if grouping.num_groups > 1 else t.data[None]
        return rows[np.asarray(grouping.assignment)]


def new_data(v: Variable, data: Any) -> np.ndarray:
    """What a user gives a variable, as an array of its dtype and shape on the host; see `Session.write_variable_data`.

    Raises:
        TypeError: for another dtype, or a complex number for a real variable.
        ValueError: for another shape, or a number that does not fit the dtype.
        AttributeError: for what is neither an array nor a number.
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
