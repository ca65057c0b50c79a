"""A program on its device: what was compiled of an Ir, the state that a session holds, and how it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

from popxl.core.tensor import Variable
from popxl.ir import Ir
from runtime.files.cache import compiling
from runtime.program.compiled import Compiled, Ready, can_be_kept, compiled
from runtime.program.layout import Layout
from runtime.program.run import Runner
from runtime.program.state import Given, Part, State
from runtime.signals import defer_signals
from runtime.targets.destination import Destination
from runtime.targets.devices import Device
from runtime.targets.mesh import dimensions_of
from runtime.targets.replicas import Replicas
from runtime.timeline import Timeline

__all__ = ["CompiledProgram", "Described", "Program", "Ready"]


class Described:
    """What can be said of a program before it is compiled.

    Args:
        ir: the program.
        device: where it is to run.
        calls: how called graphs are compiled, if that has been decided before.

    Attributes:
        device: as given. Another that stands for the same devices may take its place.
        layout: where everything of it lies.
        inputs, outputs, variables, calls, reason: as the layout has them.
    """

    def __init__(self, ir: Ir, device: Device, calls: str | None = None) -> None:
        self.device = device
        dimensions = dimensions_of(ir, are_weighed=device.jax_devices[0].platform == "tpu")
        destination = Destination(device.jax_devices, ir.instance_replication_factor, device.target is None, dimensions)
        self.layout = Layout(ir, destination, calls)
        device.check_parts([terms.replicas.devices for terms in self.layout.terms.values()])
        self.inputs, self.outputs = self.layout.inputs, self.layout.outputs
        self.variables = self.layout.variables
        self.calls, self.reason = self.layout.calls, self.layout.reason

    @property
    def replicas(self) -> Replicas:
        """The replicas that run it. On the device, arrays have a leading dimension for them, if there are several."""
        return self.layout.replicas

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The JAX devices that it runs on."""
        return self.layout.devices

    @property
    def ipus(self) -> tuple[int, ...]:
        """The IPUs that are devices of their own; 0, which stands for all, if none is."""
        return self.layout.ipus

    @property
    def leading_dimensions(self) -> tuple[int, ...]:
        """The dimensions that host arrays have before those of the stream."""
        return self.layout.leading_dimensions


class CompiledProgram(Described):
    """An Ir, compiled for a device: `(variables, feeds) -> (variables, fetches)`.

    Args:
        ir: the program.
        device: where it runs.
        ready: what compiling it would give, if that is known.

    Attributes:
        compiled: what was compiled.
        executable: what runs the program: a JAX executable, or a `runtime.plan.plan.Plan`.
        text: what XLA was given.
        runs: how often it has been run.
        run_seconds: how long the host was busy with these runs.
        timeline: the last recording of runs.
    """

    def __init__(self, ir: Ir, device: Device, ready: Ready | None = None) -> None:
        super().__init__(ir, device, None if ready is None else ready.calls)
        if ready is None or ready.executables is None:
            keeping = compiling(ir, device, self.calls, self.layout.prints, can_be_kept(self.layout))
            self.compiled: Compiled = compiled(self.layout, keeping)
        else:
            self.compiled = compiled(self.layout, nullcontext(True), ready.executables)
        self.executable: Any = self.compiled.executable
        self.text = self.compiled.text

    @property
    def is_fresh(self) -> bool:
        """Whether XLA compiled all executables in this process."""
        return self.compiled.is_fresh

    def executables(self) -> tuple[Any, ...]:
        """All JAX executables of the program, each once, in an order that depends on the program only."""
        return self.compiled.executables()

    def temporaries(self) -> int:
        """Bytes of device memory that one run needs, besides the variables and the streams."""
        return self.compiled.temporaries()

    @property
    def runs(self) -> int:
        return 0

    @property
    def run_seconds(self) -> float:
        return 0.0

    @property
    def timeline(self) -> Timeline | None:
        return None


class Program(CompiledProgram):
    """A compiled program, with its state on its device.

    Variables that the program changes are donated at each run and replaced by their new values; so are the remote
    buffers that it uses. Other variables are only read. Nothing is fetched before somebody looks at it.

    Args:
        ir, device, ready: as for a compiled program.

    Attributes:
        state: what it keeps on the device.
        runner: runs it.
        run: as the runner has it.
    """

    def __init__(self, ir: Ir, device: Device, ready: Ready | None = None) -> None:
        super().__init__(ir, device, ready)
        self.state = State(self.layout)
        self.runner = Runner(self.compiled, self.state)
        self.run = self.runner.run  # with no step between

    @property
    def runs(self) -> int:
        return self.runner.runs

    @property
    def run_seconds(self) -> float:
        return self.runner.run_seconds

    @property
    def timeline(self) -> Timeline | None:
        return self.runner.timeline

    # The state ------------------------------------------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether the variables are on the device. It may be set to `False`, if they are to be uploaded again."""
        return self.state.is_loaded

    @is_loaded.setter
    def is_loaded(self, value: bool) -> None:
        self.state.is_loaded = value

    @property
    def values_of_all(self) -> dict[Variable, np.ndarray]:
        """The values on all replicas of the variables that are read from all, as of the last download."""
        return self.state.values_of_all

    def upload(self, given: Given | None = None) -> None:
        """Copy the host values of all variables to the device, or those that are given; see `State.upload`."""
        self.device.loads(self)
        self.state.upload(given)

    @property
    def read_back(self) -> Set[Variable]:
        """The variables whose values come to the host by `download`: those that the program changes."""
        layout = self.layout
        return {layout.held[t] for t in layout.changed} | {v for b in layout.stored_to for v in layout.in_buffers[b]}

    def download(self) -> None:
        """Copy the values of all variables that the program changes from the device to the host."""
        self.state.download()

    def read_here(self, variables: Sequence[Variable]) -> dict[Variable, np.ndarray] | None:
        """Values of variables as the first replica of this process has them; see `State.read_here`."""
        return self.state.read_here(variables)

    def own_parts(self, variables: Collection[Variable], is_ahead: bool) -> dict[Variable, list[Part]]:
        """Parts of the values of variables, of a program over several processes; see `State.own_parts`."""
        return self.state.own_parts(variables, is_ahead)

    def release(self) -> None:
        """Free the device memory of the variables."""
        self.state.release()

    def use_variables_of(self, other: Program, variables: Mapping[Variable, Variable]) -> None:
        """Have variables, from now on, where another program has some: its own by ours; see `State.borrow`."""
        self.state.borrow(other.state, variables)
        self.run = self._run_on_loan

    def _run_on_loan(self, feeds: tuple[Any, ...]) -> tuple[Any, ...]:
        fetched: list[tuple[Any, ...]] = []

        def run() -> None:
            self.state.take()
            try:
                fetched.append(self.runner.run(feeds))
            finally:
                self.state.give_back()

        defer_signals(run)  # or what was taken might never be given back
        return fetched[0]

    # The run --------------------------------------------------------------------------------------------------------

    def recording(self) -> AbstractContextManager[Timeline]:
        """Note, while the block lasts, when what runs on which device. It is all there at the end of the block."""
        return self.runner.recording()

    def debugging(self, infinities: bool) -> AbstractContextManager[None]:
        """While the block lasts, run op by op; see `Session.debugging`."""
        return self.runner.debugging(infinities)
