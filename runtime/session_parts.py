"""`SessionParts`: variables of a session for tools that save and load them, with each process its own parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from popxl.core.tensor import Constant, Tensor, Variable
from runtime.program.transfers import NewValues, Part
from runtime.session_variables import SessionVariables


class SessionParts:
    """Variables of a session, whole or in parts, and barriers of the processes that run it.

    Args:
        session: any `popxl.Session`.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     v = popxl.variable([1.0, 2.0])
        ...     v += 1
        >>> session = popxl.Session(ir)
        >>> SessionParts(session).is_divided  # one process runs it
        False
        >>> SessionParts(session).write({v: np.zeros(2, np.float32)})
        >>> session.get_tensor_data(v)
        array([0., 0.], dtype=float32)
    """

    def __init__(self, session: SessionVariables) -> None:
        self._session = session

    @property
    def is_divided(self) -> bool:
        """Whether several processes run the program."""
        return self._session.program.layout.divided is not None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No thread runs the session, or transfers its variables, while the block does."""
        with self._session._lock, self._session._ir.host_copies.lock:
            yield

    def check_own(self, what: str, t: Tensor) -> None:
        """Raise `ValueError`, with `what` before the message, for a tensor of another program."""
        self._session._check_own(what, t)

    def check_readable(self, t: Variable | Constant) -> None:
        """Raise unless `t` is a variable or constant of the program: `TypeError`, or `ValueError`."""
        self._session._check_readable(t)

    def barrier(self, place: str, payload: Any) -> list[Any]:
        """Wait for all processes running the program at barrier `place`. Returns their payloads."""
        session = self._session
        return session.program.layout.replicas.barrier(place, session._attached_store(place).run_count, payload)

    def saved_parts(self, variables: Collection[Variable]) -> dict[Variable, list[Part]]:
        """Variable parts saved by this process, if every process saves its own: see `VariableStore.saved_parts`.
        Requires a barrier first: unequal run counts would cause a deadlock."""
        session = self._session
        for v in variables:
            session._check_readable(v)
        with self.locked():
            own = [v for v in variables if v not in session._owners]
            store = session._attached_store("values_of") if own else None
            parts = {} if store is None else store.saved_parts(own, session._device_is_ahead())
        for v in variables:
            if v in session._owners:
                owner, theirs = session._owners[v]
                parts[v] = SessionParts(owner).saved_parts([theirs])[theirs]
        return parts

    def write_parts(self, tensors: NewValues) -> None:
        """Like `write_variables_data`, but reading values in parts: each process reads only parts held by its devices.
        A collective operation of all processes.

        Variables that the program changes are then on the devices only, as after a run. The others have host copies.
        """
        session = self._session
        for v in tensors:
            session._check_writable(v)
        store = session._attached_store("write_variable_data")
        with self.locked():
            if session._device_is_ahead() and not session.program.layout.downloaded <= tensors.keys():
                session.weights_to_host()
            session._device.loads(store)
            store.upload_parts(tensors)

    def write(self, values: Mapping[Variable, np.ndarray]) -> None:
        """Like `write_variables_data` for exclusively owned arrays; unlisted variables keep their values."""
        if values:
            with self.locked():
                if self._session._device_is_ahead():
                    self._session.weights_to_host()  # as all are uploaded
                self._session._write_variables(values, copy=False)
