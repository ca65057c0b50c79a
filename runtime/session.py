"""`Session`: an Ir that is compiled and run. A finished Ir goes in; arrays go in and out at each run.

Programs know it as `popxl.Session`. How its variables get to the device and back is in `runtime.variable_copies`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar, Self

import numpy as np

from popxl.base.arguments import check_type
from popxl.base.choices import check_environment
from popxl.base.copies import NoCopies
from popxl.base.log import Logger
from popxl.base.source import SourceLocation, warn_at
from popxl.context import user_frame
from popxl.core.tensor import Constant, HostScalarTensor, Tensor, Variable
from popxl.errors import LostUpdateWarning, PopxlError
from popxl.ir import Ir
from popxl.looking.ambiguity import check_in_place_order
from popxl.looking.dot import write_checkpoint
from popxl.looking.doubts import warn_of_crossing_updates, warn_of_doubts
from popxl.looking.edits import Snapshot
from popxl.looking.memory import Memory
from popxl.looking.transfers import warn_of_unused_transfers
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from runtime.costs.communication import Sent, sent_by
from runtime.costs.cost import Cost, cost_of, texts
from runtime.costs.memory import memory_of_program
from runtime.files.session_files import read, write
from runtime.inspection import report_of
from runtime.machine import Machine, ProgramElsewhere
from runtime.processes import Notes
from runtime.program.host_arrays import HostArrays, Outputs
from runtime.program.program import Ready
from runtime.program.state import Given, Part
from runtime.report import Report
from runtime.targets.devices import Device
from runtime.targets.offline import Target
from runtime.timeline import Timeline
from runtime.traces import traced
from runtime.variable_copies import VariableCopies, new_data

__all__ = ["Session"]

_log = Logger("session")


class Session(NoCopies):
    """A compiled Ir, with its variables, ready to run as often as you like.

    Threads may share a session, or have sessions of one Ir: their calls take turns. Sessions of one Ir share the host
    copies of the variables. What interrupts a call, as Ctrl-C does, leaves the variables as they were before it or as
    they are after it, on the device and on the host; so it leaves files. An interrupted compilation is left at once.

    Args:
        ir: the program. It is taken as it is now. If it changes, sessions may be made of it again; one that was made
            before then runs what it was made of. As long as there is no other, `run` refuses.
        device_desc: `"cpu"`; `"ipu_model"` (the CPU too, with an estimate of what IPUs would need, in the report);
            `"ipu_hw"`, the best accelerator that JAX sees, else the CPU; `"gpu"` or `"tpu"`, that one; a machine that
            is not here, `"tpu v5e:4x4"` or a `popxl.Target`, for which the program is compiled and cannot be run; or a
            device. On one that is attached already the session can run at once. The environment variable
            `POPXL_OFFLINE_DEVICE` goes before a string.
        weights_to_host_on_exit: copy the variables back to the host when the `with` block is left.

    Raises:
        TypeError: if `ir` is no Ir, or `device_desc` none of these.
        RuntimeError: if the Ir has no ops.
        ValueError: for an unknown device, or a program for several devices on `"cpu"`.
        RuntimeError: if there is no device of this kind.

    Attributes:
        ir: the Ir.
        weights_to_host_on_exit: as given.
        program: the compiled program; `program.executable` is JAX's.
        machine: of the class: what finds devices and compiles for them. A tool may put its own there.

    Example:
        >>> with popxl.Session(ir, "ipu_hw") as session:
        ...     for images, labels in batches:
        ...         outputs = session.run({image_stream: images, label_stream: labels})
        ...         print(outputs[loss_stream])
        >>> session.get_tensor_data(weight)
    """

    machine: ClassVar[Machine] = Machine()

    def __init__(
        self, ir: Ir, device_desc: str | Device | Target = "cpu", weights_to_host_on_exit: bool = True
    ) -> None:
        self._prepare(ir, device_desc, weights_to_host_on_exit, None)

    def _prepare(
        self, ir: Ir, device_desc: str | Device | Target, weights_to_host_on_exit: bool, ready: Ready | None
    ) -> None:
        if not isinstance(ir, Ir):
            raise TypeError(f"Session: `ir` must be an Ir; got {ir!r} ({type(ir).__name__}).")
        if not ir.main_graph.ops and all(v.piece is None for v in ir.main_graph.variables):
            raise RuntimeError(f"Session: the main graph of {ir!r} has no ops; there is nothing to run.")
        if ir.options.enableInplaceAmbiguityChecking and ready is None:
            check_in_place_order(ir.main_graph)
        if ready is None:
            warn_of_unused_transfers(ir)
            warn_of_doubts(ir.main_graph)
        self._ir = ir
        self._device = self.machine.device(device_desc, ir)
        write_checkpoint(ir, "Final")
        self.program = self.machine.program(ir, self._device, ready)
        if ready is None and len(self.program.ipus) > 1:
            warn_of_crossing_updates(ir.main_graph)
        self._copies = VariableCopies(ir, self.program)
        comes_back = self._is_here and not self._copies.are_read_only
        self.weights_to_host_on_exit = weights_to_host_on_exit and comes_back
        self._made_of = Snapshot(ir.main_graph)
        self._known_edits = ir.edits.known = ir.edits.count
        self._was_attached_stack: list[bool] = []
        self._host_arrays = HostArrays(self.program.layout)
        self._lock = threading.RLock()  # a run gives up what the next one needs
        self._owners: dict[Variable, tuple[Session, Variable]] = {}  # of the variables that are other sessions'
        self._changed_owners: set[Session] = set()  # those of them whose variables a run changes
        if self.is_attached and self._is_here:
            self.weights_from_host()

    def __repr__(self) -> str:
        return f"Session[{self._ir!r} on {self._device}]"

    @property
    def ir(self) -> Ir:
        """The Ir that the session runs."""
        return self._ir

    @property
    def is_attached(self) -> bool:
        """Whether the device is attached, and the program can run: inside a `with session:` block."""
        return self._device.isAttached

    @property
    def _is_here(self) -> bool:
        """Whether the device is: whether anything can be run at all."""
        return self._device.target is None

    # Looking at it --------------------------------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """What the program consists of and what it needs: its schedule, its size with and without outlining, what was
        compiled and why, memory, operations, variables, streams, replicas, remote traffic, times.

        It prints as a page, notebooks show it with pictures, and `model_dump_json()` has all numbers. Called with a
        path, it is written there as one HTML page that needs nothing else. Nothing has to have run; what has is on it.
        For the device `"ipu_model"` there is an estimate of what the program would cost on IPUs, too.

        Example:
            >>> session = popxl.Session(ir, "ipu_model")
            >>> session.report("report.html")
            >>> print(session.report)
            >>> session.report.estimate.cycles
        """
        return report_of(self._ir, self.program)

    def memory(self) -> Memory:
        """The memory that the compiled program needs, in bytes on each device and on the host.

        Temporaries, code and what executables need on the host is what XLA says of them; variables, arguments and
        outputs have the sizes of their shapes. `ir.memory()` is a count of the same before anything is compiled.

        Example:
            >>> memory = popxl.Session(ir).memory()
            >>> print(memory)
            >>> memory.variables, memory.arguments, memory.outputs, memory.temporaries, memory.code, memory.host
            >>> [device.device for device in memory.devices]
        """
        return memory_of_program(self._ir, self.program)

    def cost(self) -> Cost:
        """What the compiled program costs on one chip: bytes, operations, kernels, what chips send each other, and an
        estimate of the time of a run. All of it is read off what was compiled; nothing is measured, and nothing runs.

        So two programs compiled for one target can be compared exactly, on any machine.

        Example:
            >>> cost = popxl.Session(ir, "tpu v5e:2x2").cost()
            >>> print(cost)
            >>> cost.flops, cost.kernels, cost.temporary_bytes, cost.cycles
        """
        return cost_of(self.program)

    def communication(self) -> Sent:
        """What the chips send each other in a run, as it was compiled, beside what the program says it sends:
        `ir.communication()`. Nothing runs.

        Example:
            >>> sent = popxl.Session(ir, "tpu v5e:2x4").communication()
            >>> print(sent)
            >>> assert not sent.differences  # nothing is sent that the program does not say
        """
        return sent_by(self._ir, self.program)

    def hlo(self) -> dict[str, str]:
        """The text of each compiled program, as XLA gives it: one, named "the program", or the pieces of a plan.

        Example:
            >>> for name, text in popxl.Session(ir, "gpu h100").hlo().items():
            ...     print(name, text.count("fusion("))
        """
        return texts(self.program)

    def recording(self, folder: str | os.PathLike[str] | None = None) -> AbstractContextManager[Timeline]:
        """Note when what runs on which device, while a block lasts. The timeline is complete at its end.

        Recorded runs may be slower: before an executable overwrites something, the host waits until it is there.

        Args:
            folder: where JAX's profiler writes what the devices do, instruction by instruction. XProf opens the folder
                (`xprof --logdir folder`). Perfetto (https://ui.perfetto.dev) opens `perfetto.json.gz` in it, where
                instructions have your names: of the op, its line and its graph. What XLA made one kernel of has the
                name of the last op.

        Example:
            >>> with popxl.Session(ir) as session, session.recording() as timeline:
            ...     outputs = session.run(inputs)
            >>> print(timeline)
            >>> timeline.picture().save("timeline.svg")

            >>> with session, session.recording("trace"):
            ...     outputs = session.run(inputs)
        """
        timeline = self.program.recording()
        return timeline if folder is None else traced(folder, timeline, lambda: self.hlo().values())

    def debugging(self, infinities: bool = True) -> AbstractContextManager[None]:
        """Run op by op while a block lasts, and stop at the first op that makes a NaN or an infinity.

        The same ops run on the same numbers as in the compiled program, each by itself, with all the graphs that are
        called, loops and replicas. Results agree with it but for rounding, as nothing is fused. It is slow, and needs
        memory for all that graphs compute while they run.

        What you put in is never at fault: an infinity in a variable, constant, stream or buffer, such as `-inf` in an
        attention mask, may pass through any number of ops. Reported is an op that makes

        * an infinity, if all that it was given is finite: `log(0)`, a division by 0, float16 beyond 65504;
        * a NaN, if it was given none: `log(-1)`, but also `inf - inf`, which is where an infinity did harm.

        Of an op that talks to other replicas, what all of them give counts.

        Args:
            infinities: report these. Without, only a NaN is reported.

        Raises:
            NonFiniteError: from `run`, with the op as its graph prints it and your line that made it, the way there
                with the turns of loops, the replica, and the numbers that the op was given. The variables and remote
                buffers are as they were before this run: the session can be used, and run again.
            PopxlError: if the Ir has changed since the session was made.
            NotImplementedError: if several processes run the program.

        Example:
            >>> with popxl.Session(ir) as session, session.debugging():
            ...     outputs = session.run(inputs)
        """
        self._check_unchanged("debugging")
        return self.program.debugging(infinities)

    # In a file ------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the compiled program to a file, with its Ir and the present values of its variables.

        `Session.load` makes a session of it, in another process, that runs without tracing or compiling. Nothing in the
        file is read as a Python object; but it holds machine code, so load it only if you trust who wrote it. A program
        that came from a file or from a cache is compiled again to be written. One whose replicas talk to each other on
        several CPU devices is compiled again to be loaded, as XLA reads back such code wrongly.

        What was compiled for a machine that is not here, a `popxl.Target`, is written for one that is: load it where
        there are as many such chips, with the same versions of popxl and JAX. That could not be tried: XLA writes
        these programs, and reads them only on a machine that has the chips.

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
            if self.is_attached and self._copies.has_run and not self._copies.are_read_only:
                self.weights_to_host()
            write(path, self._ir, self.program)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        device_desc: str | Device | Target | None = None,
        weights_to_host_on_exit: bool = True,
    ) -> Self:
        """A session from a file that `save` has written. Its Ir is `session.ir`; streams are found there.

        Args:
            path: the file.
            device_desc: as for a new session, by default as it was for the saved one. It must have the same kind and
                number of devices.
            weights_to_host_on_exit: as for a new session.

        Raises:
            UnreadableFileError: if the file is damaged, or of another kind. It is a `PopxlError` and a `ValueError`.
            PopxlError: if the program was compiled for other devices, or by other versions of popxl or JAX.
        """
        ir, device, ready = read(path, device_desc)
        session = cls.__new__(cls)
        session._prepare(ir, device, weights_to_host_on_exit, ready)
        return session

    def _check_unchanged(self, what: str) -> None:
        """`PopxlError` if the Ir has changed since the session was made."""
        if changes := self._made_of.changes():
            raise PopxlError(
                f"Session.{what}: {self._ir!r} has changed since this session was made, and the compiled program has "
                f"not: {'; '.join(changes)}. Make another session of the Ir: `popxl.Session(ir)`."
            )

    def _look_at_edits(self) -> None:
        """Check that the Ir is unchanged, unless some session has been made of it as it is."""
        if self._ir.edits.count != self._ir.edits.known:
            self._check_unchanged("run")
        self._known_edits = self._ir.edits.count

    # Attaching ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        with self._lock:
            was_attached, depth = self.is_attached, len(self._was_attached_stack)
            try:
                if not was_attached:
                    self._device.attach()
                    if self._is_here:
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
            # Who detaches a session by hand inside of the block may have emptied the stack.
            was_attached = self._was_attached_stack.pop() if self._was_attached_stack else False
            if was_attached or not self.is_attached:
                return
            try:
                if exception is None and self.weights_to_host_on_exit:
                    self.weights_to_host()
            finally:
                self.detach()

    def detach(self) -> None:
        """Release the device. The values of the variables there are lost unless they were copied to the host."""
        with self._lock:
            self._device.detach()

    def _set_device(self, device: Device) -> None:
        """Use another device object, which must stand for the devices that the program was compiled for."""
        if device.jax_devices != self._device.jax_devices:
            raise ValueError(
                f"Session._set_device: the program was compiled for {self._device}, which {device} is not. Make "
                "another session for it."
            )
        if not device.isAttached:
            self.program.release()
        self._device = self.program.device = device

    def _check_attached(self, what: str) -> None:
        if isinstance(self.program, ProgramElsewhere):
            raise self.program.refusal(what)
        if not self.is_attached:
            raise ValueError(f"Session.{what}: the session is not attached to a device. Use it inside `with session:`.")

    def _check_loaded(self, what: str) -> None:
        self._check_attached(what)
        if not self.program.is_loaded:  # somebody else attached the device, or detached it in between
            self._copies.upload()

    # Running --------------------------------------------------------------------------------------------------------

    def run(
        self, inputs: Mapping[HostToDeviceStream, HostScalarTensor] | None = None, downcast_inputs: bool = True
    ) -> Mapping[DeviceToHostStream, np.ndarray]:
        """Run the program once.

        Args:
            inputs: for each stream that the program loads from, its array: NumPy, JAX or torch, a list or a number. The
                shape is that of the stream, after a leading dimension of its `num_host_transfers`, and then one of the
                replicas that this process drives, each if it is above 1: `host_shape(stream)`. What no op reads has to
                be given, and is not sent.
            downcast_inputs: narrow 64-bit numbers to 32 bits, where they fit.

        Returns:
            The arrays of the output streams, by stream. Each is fetched from the device when you look at it, so a loop
            that does not is not slowed down by waiting. To time runs, look at an output of the last one before the
            clock is read, or call `weights_to_host`.

        Raises:
            ValueError: if the session is not attached; for a missing or unexpected stream, an array of the wrong
                shape, or a number that does not fit when it is narrowed: no finite one becomes infinite; and if the
                environment chooses what the program has not asked for (`popxl.choice`).
            PopxlRuntimeError: for an array of the wrong dtype, or a program that makes more transfers than there is
                room for.
            PopxlError: if the Ir has changed since the session was made, and no other session has been made of it
                since.
        """
        with self._lock:
            if not self.program.is_loaded:
                self._check_loaded("run")
            if self._known_edits != self._ir.edits.count:
                self._look_at_edits()
            feeds = self._host_arrays.feeds({} if inputs is None else inputs, downcast_inputs)
            if not self._copies.has_run:
                check_environment()
                self._copies.note_run()
            try:
                if self._owners:
                    with self._alone():
                        for owner in self._changed_owners:
                            owner._copies.note_run()
                        fetches = self.program.run(feeds)
                else:
                    fetches = self.program.run(feeds)
            finally:  # what handles a signal may have read the variables just before they changed
                self._copies.note_run()
                for owner in self._changed_owners:
                    owner._copies.note_run()
        return Outputs(dict(zip(self.program.outputs, fetches)))  # noqa: B905  # `strict` takes longer

    def run_with_outputs(
        self,
        inputs: Mapping[HostToDeviceStream, HostScalarTensor] | None = None,
        outputs: Mapping[DeviceToHostStream, np.ndarray] | None = None,
        downcast_inputs: bool = True,
    ) -> None:
        """Run the program once, and fill arrays with what it stores.

        Args:
            inputs, downcast_inputs: as for `run`.
            outputs: for each stream that the program stores to, an array of its shape and dtype; see
                `create_host_outputs`. Slots that no store can reach are left as they are. Those that stores in the
                branches of a conditional could have reached, and have not, become zeros.

        Raises:
            ValueError, PopxlRuntimeError: as `run` does, for outputs too; and for those that cannot be filled in place.
            TypeError: if an output is no NumPy array.
        """
        self._check_loaded("run_with_outputs")
        arrays = {} if outputs is None else outputs
        self._host_arrays.check_outputs(arrays)
        self._host_arrays.fill(arrays, self.run(inputs, downcast_inputs))

    def create_host_outputs(self) -> dict[DeviceToHostStream, np.ndarray]:
        """A new array for each stream that the program stores to, for `run_with_outputs`."""
        return self._host_arrays.new_outputs()

    def expected_inputs(self) -> set[HostToDeviceStream]:
        """The streams that the program loads from: the keys that `run` expects."""
        return set(self.program.inputs)

    def _expected_outputs(self) -> set[DeviceToHostStream]:
        return set(self.program.outputs)

    def host_shape(self, shape: Iterable[int] | Stream) -> tuple[int, ...]:
        """The shape of the host array of a stream, with the leading dimensions that `run` expects.

        Args:
            shape: the stream; or the shape of one that has no number of transfers of its own.
        """
        if isinstance(shape, Stream):
            self._check_own("host_shape", shape.tensor)
            return self.program.layout.host_shape(shape)
        return self.program.leading_dimensions + tuple(shape)

    _full_input_shape = host_shape

    @property
    def _extra_input_dims(self) -> tuple[int, ...]:
        return self.program.leading_dimensions

    def _validate_run_inputs(self, inputs: Mapping[HostToDeviceStream, Any]) -> None:
        self._host_arrays.feeds(inputs, downcast=True)

    # Variables of other sessions --------------------------------------------------------------------------------------

    def use_variables_of(self, other: Session, variables: Mapping[Variable, Variable]) -> None:
        """Have variables in common with another session, without a copy.

        From now on the other session has them. Each run of this one finds there what the last run of either has left,
        and leaves there what it changes. So a program that generates text follows one that trains, run by run.

        The other session has to be attached whenever this one runs, and holds what is on the host: values are written
        and saved there. `get_tensor_data` asks it.

        Args:
            other: a session on the same device.
            variables: its variables, by those of this session. Those that this program does not use are left out;
                `NamedTensors.to_mapping` pairs variables by their names.

        Raises:
            ValueError: if a variable has another shape, dtype or place there, if the other program does not use it, or
                only reads what this one changes; for `other` this session, or one that has variables of it. Nothing has
                changed then.
            TypeError: if something else than a session, and variables, is given.

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
        if self._is_here != other._is_here:
            raise ValueError(f"Session.use_variables_of: {self._device} and {other._device}: one of them is not here.")
        for mine, theirs in variables.items():
            self._check_own("use_variables_of", mine)
            other._check_own("use_variables_of", theirs)
        with self._lock, other._lock:
            if self._is_here:  # what is compiled for a machine elsewhere holds nothing, and does not run
                self.program.use_variables_of(other.program, variables)
            self._owners |= {mine: (other, theirs) for mine, theirs in variables.items()}
            layout = self.program.layout
            changed = {layout.held[t] for t in layout.changed}
            self._changed_owners = {owner for mine, (owner, _) in self._owners.items() if mine in changed}

    def owner_of(self, variable: Variable) -> tuple[Session, Variable]:
        """The session that has a variable of this program on its device, and which of its variables that is.

        Raises:
            TypeError: for something else than a variable.
            ValueError: for one of another program.

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

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While the block lasts, no session runs whose variables this one has. (They have none of this one's.)"""
        with ExitStack() as locks:
            for owner in sorted({owner for owner, _ in self._owners.values()}, key=id):
                locks.enter_context(owner._lock)
            yield

    # Variables ------------------------------------------------------------------------------------------------------

    def weights_from_host(self) -> None:
        """Copy the host values of all variables to the device. `ValueError` if the session is not attached.

        If several processes run the program, all have to do this, with the same values.
        """
        with self._lock:
            self._check_attached("weights_from_host")
            self._copies.upload()

    def weights_to_host(self) -> None:
        """Copy the values of all variables from the device to the host. `ValueError` if the session is not attached.

        If several processes run the program, all have to do this: then each has the values of all replicas. It is part
        of leaving a `with session:` block, and of `get_tensor_data` after a run.
        """
        if self._copies.are_read_only:
            raise Exception(
                "Session.weights_to_host: a variable of the program is a read-only memory map, which cannot be written."
            )
        with self._lock, self._ir.host_copies.lock:
            self._check_loaded("weights_to_host")
            self._copies.download()

    def get_tensor_data(self, tensor: Variable | Constant) -> np.ndarray:
        """The numbers of a variable or constant: the host copy, fetched from the device first if that is ahead.

        The array changes when the host copy does; copy it to keep it. If several processes run the program, all have to
        ask, as for `weights_to_host`; one may then be the one that saves it.

        Raises:
            TypeError: for any other tensor.
            ValueError: for a tensor of another Ir, and for a variable of int8, uint8 or complex128: see `values_of`.
        """
        return self.get_tensors_data([tensor])[tensor]

    def get_tensors_data(self, tensors: Iterable[Variable | Constant]) -> dict[Variable | Constant, np.ndarray]:
        """As `get_tensor_data`, for several tensors, with one transfer at most."""
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
        """As `get_tensors_data`, also for variables of int8, uint8 and complex128, which PopXL refuses to read back.

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
        known = {t: self._data_of_owner(t) for t in wanted if t in self._owners}
        own = [t for t in wanted if t not in known]
        with self._lock, self._ir.host_copies.lock:
            if any(isinstance(t, Variable) for t in own) and self._device_is_ahead():
                self.weights_to_host()
            return {t: known[t] if t in known else self._copies.read(t) for t in wanted}

    def _check_readable(self, t: Variable | Constant) -> None:
        if not isinstance(t, Variable | Constant):
            raise TypeError(
                f"Session.get_tensors_data: {t!r} is not of type Constant or Variable. Store other tensors to a "
                "stream (`ops.host_store`)."
            )
        self._check_own("get_tensors_data", t)

    def _device_is_ahead(self) -> bool:
        """Whether values are to be read from the device. Warns if they are ahead there, and cannot be."""
        is_here = self.is_attached and self._is_here
        if self._copies.has_run and not is_here:
            _log.warn(
                "Session.get_tensors_data: these are the values from before the last runs. What the device had was not "
                "copied to the host before the session was left."
            )
        return self._copies.host_is_stale and is_here

    # Each process its part ------------------------------------------------------------------------------------------

    _notes = Notes()

    @property
    def _is_divided(self) -> bool:
        """Whether several processes run the program."""
        return self.program.layout.divided is not None

    def _meet(self, place: str, said: Any) -> list[Any]:
        """Wait until all processes that run the program are at a place. Returns what each has said there."""
        return self.program.layout.replicas.meet(place, self.program.state.begun, said)

    def _own_parts(self, variables: Collection[Variable]) -> dict[Variable, list[Part]]:
        """What this process is to save of variables, if each process that runs the program saves a part: see
        `State.own_parts`. Meet before: with unequal numbers of runs, one would wait for ever."""
        for v in variables:
            self._check_readable(v)
        with self._lock, self._ir.host_copies.lock:
            own = [v for v in variables if v not in self._owners]
            parts = self.program.own_parts(own, self._device_is_ahead()) if own else {}
        for v in variables:
            if v in self._owners:
                owner, theirs = self._owners[v]
                parts[v] = owner._own_parts([theirs])[theirs]
        return parts

    def _write_parts(self, tensors: Given) -> None:
        """As `write_variables_data`, of values that are asked for in parts: each process asks for what its devices
        hold. All that run the program have to do this.

        What the program changes is on the devices only, as after a run. Of the rest, there are host copies.
        """
        for v in tensors:
            self._check_writable(v)
        self._check_attached("write_variable_data")
        with self._lock, self._ir.host_copies.lock:
            if self._device_is_ahead() and not self.program.read_back <= tensors.keys():
                self.weights_to_host()
            self._copies.write_parts(tensors)

    def _data_of_owner(self, t: Variable | Constant) -> np.ndarray:
        owner, theirs = self._owners[t]  # type: ignore[index]  # a variable
        return owner.values_of([theirs])[theirs]

    def write_variable_data(self, tensor: Variable, data: Any) -> None:
        """Give a variable new numbers, on the host and, if the session is attached, on the device.

        The device gets the host values of *all* variables: call `weights_to_host` first to keep what it changed.

        Args:
            tensor: the variable.
            data: an array of its `shape_on_host` and dtype; or a number, for a scalar.

        Raises:
            TypeError: if `tensor` is no variable, or for another dtype.
            ValueError: for another shape, a number that does not fit the dtype, a variable of another Ir, or one that
                is a read-only memory map.
        """
        self._check_writable(tensor)  # what is no tensor may not be hashable
        self.write_variables_data({tensor: data})

    def write_variables_data(self, tensors: Mapping[Variable, Any]) -> None:
        """As `write_variable_data`, for several variables, with one transfer. Nothing is written if one is refused."""
        check_type(tensors, Mapping, "Session.write_variables_data: `tensors`", "a mapping from variables to numbers")
        self._write_variables(tensors)

    def _write_variables(self, tensors: Mapping[Variable, Any], kept: bool = True) -> None:
        """See `write_variables_data`. Arrays that are not `kept` by the caller may become the host copies."""
        checked: dict[Variable, np.ndarray] = {}
        for t, data in tensors.items():
            self._check_writable(t)
            checked[t] = new_data(t, data)
        if self.is_attached:
            self._check_attached("write_variable_data")
        with self._lock, self._ir.host_copies.lock:
            if self.is_attached and self._copies.has_run:
                self._warn_of_reverted(checked)
            self._copies.write(checked, kept)
            if self.is_attached:
                self.weights_from_host()

    def _warn_of_reverted(self, written: Collection[Variable]) -> None:
        """Warn if an upload takes variables back to what they were before the last runs, besides those `written`."""
        layout = self.program.layout
        changed = [layout.held[t] for t in layout.changed]
        changed += [v for b in layout.stored_to for v in layout.in_buffers[b]]
        reverted = [v.name for v in dict.fromkeys(changed) if v not in written and v not in self._owners]
        if reverted:
            names = ", ".join(reverted[:3]) + f" and {len(reverted) - 3} more" * (len(reverted) > 3)
            warn_at(
                SourceLocation.of(user_frame()),
                "Session.write_variable_data: what runs have done to other variables is lost: the device takes the "
                f"host's numbers of all variables, and those of {names} are from before the last runs. Call "
                "`session.weights_to_host()` before you write.",
                LostUpdateWarning,
            )

    def _check_own(self, what: str, t: Tensor) -> None:
        """`ValueError` for a tensor of another program, whose names may be the same."""
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
