"""`Session`: compilation and execution of an Ir. Takes a finished Ir; each run maps input arrays to output arrays.

Programs import it as `popxl.Session`. Its bases have its reports, in `runtime.session_inspection`, and the compiled
program with access to its variables, in `runtime.session_variables`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

import numpy as np

from popxl.analysis.ambiguity import check_in_place_order
from popxl.analysis.dot import write_checkpoint
from popxl.analysis.lints import run_lints, warn_of_crossing_updates
from popxl.analysis.transfers import warn_of_unused_transfers
from popxl.base.arguments import check_type
from popxl.base.choices import check_environment
from popxl.core.rounding import ensure_seed
from popxl.core.tensor import HostScalarTensor, Variable
from popxl.errors import PopxlError
from popxl.ir import Ir
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from runtime.costs.memory import warn_of_exceeded_budget
from runtime.files.session_files import load_session, write
from runtime.lowering.channels import channels_of
from runtime.program.compiled import Precompiled
from runtime.program.host_arrays import HostArrays, Outputs
from runtime.session_inspection import SessionInspection
from runtime.targets.devices import Device
from runtime.targets.offline import Target

__all__ = ["Session"]


class Session(SessionInspection):
    """Compiled Ir with variables, ready for any number of runs.

    Threads may share a session, or have sessions of one Ir: their calls take turns. Sessions of one Ir share the host
    copies of the variables. An interrupted call, by Ctrl-C for example, leaves the variables in their state before or
    after it, on the device and on the host, and files likewise. An interrupted compilation ends at once.

    Args:
        ir: program in its current state. If it changes, further sessions may be made from it; an earlier session then
            runs the program that it was made from. As long as there is no later session, `run` refuses.
        device_desc: `"cpu"`; `"ipu_model"` (the CPU too, with an estimate of the program's cost on IPUs, in the
            report); `"ipu_hw"`, the best accelerator that JAX sees, else the CPU; `"gpu"` or `"tpu"`, that one; a
            machine that is not present, `"tpu v5e:4x4"` or a `popxl.Target`, for which the program is compiled and
            cannot be run; or a device. If that is already attached, the session can run at once. The environment
            variable `POPXL_OFFLINE_DEVICE` has priority over a string.
        weights_to_host_on_exit: copy the variables back to the host when the `with` block is left.

    Raises:
        TypeError: if `ir` is not an Ir, or `device_desc` has another type.
        RuntimeError: if the Ir has no ops.
        ValueError: for an unknown device, or a program for several devices on `"cpu"`.
        RuntimeError: if there is no device of this kind.

    Attributes:
        ir: the Ir.
        weights_to_host_on_exit: as passed.
        program: the compiled program; `program.executable` is JAX's.
        store: variables on the device, and `runner`, which runs the program; `None` for offline targets.
        machine: class attribute: device lookup and compilation. A tool may replace it.

    Example:
        >>> with popxl.Session(ir, "ipu_hw") as session:
        ...     for images, labels in batches:
        ...         outputs = session.run({image_stream: images, label_stream: labels})
        ...         print(outputs[loss_stream])
        >>> session.get_tensor_data(weight)
    """

    def __init__(
        self, ir: Ir, device_desc: str | Device | Target = "cpu", weights_to_host_on_exit: bool = True
    ) -> None:
        self._prepare(ir, device_desc, weights_to_host_on_exit)

    def _prepare(
        self,
        ir: Ir,
        device_desc: str | Device | Target,
        weights_to_host_on_exit: bool,
        precompiled: Precompiled | None = None,
    ) -> None:
        check_type(ir, Ir, "Session: `ir`", "an Ir")
        if not ir.main_graph.ops and all(v.piece is None for v in ir.main_graph.variables):
            raise RuntimeError(f"Session: the main graph of {ir!r} has no ops; there is nothing to run.")
        if precompiled is None:
            if ir.options.enableInplaceAmbiguityChecking:
                check_in_place_order(ir.main_graph)
            warn_of_unused_transfers(ir)
            run_lints(ir.main_graph)
            warn_of_crossing_updates(ir.main_graph)
        if ir.rounding_key in channels_of(ir.main_graph):
            ensure_seed(ir)
        device = self.machine.device(device_desc, ir)
        write_checkpoint(ir, "Final")
        super().__init__(ir, device, precompiled)
        warn_of_exceeded_budget(ir, self.program)
        if self.runner is not None:
            self._run = self.runner.run
        comes_back = self.runner is not None and not self._is_memory_map
        self.weights_to_host_on_exit = weights_to_host_on_exit and comes_back
        self._known_edits = ir.edits.compiled = ir.edits.count
        self._was_attached_stack: list[bool] = []
        self._host_arrays = HostArrays(self.program.layout)
        self._output_streams = self.program.layout.outputs
        if self._can_run:
            self.weights_from_host()

    def __repr__(self) -> str:
        return f"Session[{self._ir!r} on {self._device}]"

    @property
    def ir(self) -> Ir:
        """The session's Ir."""
        return self._ir

    # In a file ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the compiled program to a file, including its Ir and current variable values.

        `Session.load` makes a session of it, in another process, that runs without tracing or compiling. Nothing in the
        file is read as a Python object; but it holds machine code, so load it only if you trust who wrote it. A program
        that came from a file or from a cache is compiled again to be written. One whose replicas talk to each other on
        several CPU devices is compiled again to be loaded, as XLA reads back such code wrongly.

        A program for a machine that is not present, a `popxl.Target`, is written for later use: load it where there are
        as many such chips, with the same versions of popxl and JAX. This has not been tested: XLA writes these
        programs, and reads them only on a machine that has the chips. With attention for an absent GPU, whose kernels
        cuDNN generates, it is compiled again to be loaded.

        Raises:
            PopxlError: if the program prints from the device, has an op that cannot be saved (see `Ir.save`), or if the
                Ir has changed since the session was made.

        Example:
            >>> with popxl.Session(ir, "ipu_hw") as session:
            ...     session.save("program.session")
            >>> with popxl.Session.load("program.session") as session:
            ...     streams = {stream.tensor_id: stream for stream in session.expected_inputs()}
            ...     for images, labels in batches:
            ...         outputs = session.run({streams["images"]: images, streams["labels"]: labels})
        """
        self._check_unchanged("save")
        if self._owners:
            raise PopxlError(
                "Session.save: some variables are another session's, which is not in the file. Save a session that has "
                "all of its own."
            )
        with self._lock, self._ir.host_copies.lock:
            if self.is_attached and self._store.has_run and not self._is_memory_map:
                self.weights_to_host()
            write(path, self._ir, self.program)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device_desc: str | Device | Target | None = None,
        weights_to_host_on_exit: bool = True,
    ) -> Self:
        """Load a session from a file written by `save`. Its Ir is `session.ir`, which provides the streams.

        Args:
            path: the file.
            device_desc: as for a new session, by default as for the saved one. It must have the same kind and number of
                devices.
            weights_to_host_on_exit: as for a new session.

        Raises:
            UnreadableFileError: if the file is damaged, or of another kind. It is a `PopxlError` and a `ValueError`.
            PopxlError: if the program was compiled for other devices, or by other versions of popxl or JAX.
        """
        ir, device, precompiled = load_session(path, device_desc)
        session = cls.__new__(cls)
        session._prepare(ir, device, weights_to_host_on_exit, precompiled)
        return session

    def _check_edits(self) -> None:
        """Check that the Ir is unchanged, unless a newer session was created from its current state."""
        if self._ir.edits.count != self._ir.edits.compiled:
            self._check_unchanged("run")
        self._known_edits = self._ir.edits.count

    # Attaching ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with self._lock:
            was_attached, depth = self.is_attached, len(self._was_attached_stack)
            try:
                if not was_attached:
                    self._device.attach()
                    if self._can_run:
                        self.weights_from_host()
                self._was_attached_stack.append(was_attached)
            except BaseException:
                del self._was_attached_stack[depth:]
                if not was_attached:
                    self.detach()
                raise
        return self

    def __exit__(self, exception: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            # The stack may be empty, if the session was detached by hand inside of the block.
            was_attached = self._was_attached_stack.pop() if self._was_attached_stack else False
            if was_attached or not self.is_attached:
                return
            try:
                if exception is None and self.weights_to_host_on_exit:
                    self.weights_to_host()
            finally:
                self.detach()

    def detach(self) -> None:
        """Release the device. Variable values on the device are lost unless copied to the host."""
        with self._lock:
            self._device.detach()

    def _set_device(self, device: Device) -> None:
        """Replace the device object by one for the same JAX devices."""
        if device.jax_devices != self._device.jax_devices:
            raise ValueError(
                f"Session._set_device: the program was compiled for {self._device}, which {device} is not. Make "
                "another session for it."
            )
        if not device.isAttached:
            self._store.release()
        self._device, self.program = device, replace(self.program, device=device)

    # Running --------------------------------------------------------------------------------------------------------

    def run(
        self, inputs: Mapping[HostToDeviceStream, HostScalarTensor] | None = None, downcast_inputs: bool = True
    ) -> Mapping[DeviceToHostStream, np.ndarray]:
        """Run the program once.

        Args:
            inputs: array of each stream that the program loads from: NumPy, JAX or torch, a list or a number. The shape
                is that of the stream, after a leading dimension of its `num_host_transfers`, and then one of the
                replicas that this process drives, each if it is above 1: `host_shape(stream)`. Unused feeds are
                required too, and are not sent.
            downcast_inputs: narrow 64-bit numbers to 32 bits, where they fit.

        Returns:
            The arrays of the output streams, by stream. Each is fetched from the device on first access, so a loop
            without accesses does not wait. To time runs, access an output of the last one before the clock is read, or
            call `weights_to_host`.

        Raises:
            ValueError: if the session is not attached; for a missing or unexpected stream, an array of the wrong shape,
                or a number that does not fit when it is narrowed: no finite one becomes infinite; and if the
                environment sets a choice that the program does not have (`popxl.choice`).
            PopxlRuntimeError: for an array of the wrong dtype, or a program that exceeds a stream's number of
                transfers.
            PopxlError: if the Ir has changed since the session was made, without a later session of it.
        """
        with self._lock:
            store = self._store
            if store.constant is None:
                store = self._loaded_store("run")
            if self._known_edits != self._ir.edits.count:
                self._check_edits()
            feeds = self._host_arrays.feeds({} if inputs is None else inputs, downcast_inputs)
            feeds = self._host_arrays.completed(feeds)
            if store.device == store.host:
                check_environment()
                store.note_run()
            try:
                fetches = self._run(feeds)
            finally:  # signal handlers may have read the variables just before they changed
                store.note_run()
        return Outputs(dict(zip(self._output_streams, fetches)))  # noqa: B905  # `strict` takes longer

    def run_with_outputs(
        self,
        inputs: Mapping[HostToDeviceStream, HostScalarTensor] | None = None,
        outputs: Mapping[DeviceToHostStream, np.ndarray] | None = None,
        downcast_inputs: bool = True,
    ) -> None:
        """Run the program once, storing results in the given arrays.

        Args:
            inputs, downcast_inputs: as for `run`.
            outputs: array of each stream that the program stores to, of its shape and dtype; see `create_host_outputs`.
                Slots that no store reaches are unchanged.

        Raises:
            ValueError, PopxlRuntimeError: as for `run`, for outputs too; and for those that cannot be filled in place.
            TypeError: if an output is no NumPy array.
        """
        self._loaded_store("run_with_outputs")
        arrays = {} if outputs is None else outputs
        self._host_arrays.check_outputs(arrays)
        with self._lock, self._host_arrays.keeping(arrays):
            results = self.run(inputs, downcast_inputs)
        self._host_arrays.fill(arrays, results)

    def create_host_outputs(self) -> dict[DeviceToHostStream, np.ndarray]:
        """New array for each output stream, for use with `run_with_outputs`."""
        layout = self.program.layout
        return {s: np.empty(layout.host_shape(s), s.dtype.as_numpy()) for s in layout.outputs}

    def expected_inputs(self) -> set[HostToDeviceStream]:
        """Input streams of the program: keys expected by `run`."""
        return {s for s in self.program.layout.inputs if s is not self._ir.rounding_key}

    def _expected_outputs(self) -> set[DeviceToHostStream]:
        return set(self._output_streams)

    def host_shape(self, shape: Iterable[int] | Stream) -> tuple[int, ...]:
        """Host array shape of a stream, including leading dimensions expected by `run`.

        Args:
            shape: a stream; or the shape of one with the default number of transfers.
        """
        if isinstance(shape, Stream):
            self._check_own("host_shape", shape.tensor)
            return self.program.layout.host_shape(shape)
        return self.program.layout.leading_dimensions + tuple(shape)

    _full_input_shape = host_shape

    @property
    def _extra_input_dims(self) -> tuple[int, ...]:
        return self.program.layout.leading_dimensions

    def _validate_run_inputs(self, inputs: Mapping[HostToDeviceStream, Any]) -> None:
        self._host_arrays.feeds(inputs, downcast=True)

    # Variables of other sessions --------------------------------------------------------------------------------------

    def use_variables_of(self, other: Session, variables: Mapping[Variable, Variable]) -> None:
        """Share variables of another session without copying.

        The variables then belong to the other session. Each run of this session reads the values of the last run of
        either, and writes its changes there. So a program that generates text can follow one that trains, run by run.

        The other session has to be attached whenever this one runs, and owns the host copies: values are written and
        saved there. `get_tensor_data` reads them through it. A variable that replicas change there, and only read here,
        is copied once after each change: here, all replicas of a device share one.

        Args:
            other: a session on the same device.
            variables: variables of the other session, by those of this one. Unused variables of this program are
                ignored; `NamedTensors.to_mapping` pairs variables by their names.

        Raises:
            ValueError: if a variable has another shape, dtype or place there, if the other program does not use it, or
                only reads a variable that this one changes; for `other` this session, or one that shares variables of
                it. Nothing has changed then.
            TypeError: if `other` is not a session, or the mapping does not consist of variables.

        Example:
            >>> def program() -> tuple[popxl.Ir, popxl.Tensor]:
            ...     ir = popxl.Ir()
            ...     with ir.main_graph:
            ...         w = popxl.variable([1.0, 2.0], name="w")
            ...         w += 1.0
            ...     return ir, w
            >>> (training, theirs), (sampling, mine) = program(), program()
            >>> with popxl.Session(training) as trained, popxl.Session(sampling) as session:
            ...     session.use_variables_of(trained, {mine: theirs})
            ...     _ = trained.run(), session.run()
            ...     print(session.get_tensor_data(mine))
            [3. 4.]
        """
        if not isinstance(other, Session):
            raise TypeError(f"Session.use_variables_of: `other` is {other!r} ({type(other).__name__}); not a session.")
        if others := [t for pair in variables.items() for t in pair if not isinstance(t, Variable)]:
            raise TypeError(f"Session.use_variables_of: expected variables, by variables; got {others}.")
        if other is self or any(owner is self for owner, _ in other._owners.values()):
            raise ValueError("Session.use_variables_of: `other` is this session, or has variables of this one.")
        if (self.runner is None) != (other.runner is None):
            raise ValueError(f"Session.use_variables_of: {self._device} and {other._device}: one of them is not here.")
        for mine, theirs in variables.items():
            self._check_own("use_variables_of", mine)
            other._check_own("use_variables_of", theirs)
        with self._lock, other._lock:
            if self.runner is not None:
                self._store.share(other._store, variables)
                self._run = self.runner.run_sharing
            self._owners |= {mine: (other, theirs) for mine, theirs in variables.items()}

    def owner_of(self, variable: Variable) -> tuple[Session, Variable]:
        """Session owning a variable of this program on its device, and the corresponding variable there.

        Raises:
            TypeError: for anything but a variable.
            ValueError: for a variable of another program.

        Example:
            >>> ir = popxl.Ir()
            >>> with ir.main_graph:
            ...     w = popxl.variable([1.0, 2.0], name="w")
            ...     w += 1.0
            >>> session = popxl.Session(ir)
            >>> session.owner_of(w) == (session, w)
            True
        """
        if not isinstance(variable, Variable):
            raise TypeError(f"Session.owner_of: `variable` is {variable!r}; expected a variable.")
        self._check_own("owner_of", variable)
        return self._owners.get(variable, (self, variable))
