"""`SessionInspection`, a base of `runtime.session.Session`: reports on its program, and recordings of its runs."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from popxl.analysis.edits import Snapshot
from popxl.analysis.memory import Memory
from popxl.errors import PopxlError
from popxl.ir import Ir
from runtime.costs.communication import CommunicationReport, communication_of_program
from runtime.costs.cost import Cost
from runtime.costs.executables import texts
from runtime.costs.memory import memory_of_program
from runtime.costs.program_cost import cost_of
from runtime.inspection import report_of
from runtime.program.compiled import Precompiled
from runtime.report import Report
from runtime.session_variables import SessionVariables
from runtime.targets.devices import Device
from runtime.timeline import Timeline
from runtime.traces import traced


class SessionInspection(SessionVariables):
    """Reports on a session's program, and recordings of its runs."""

    def __init__(self, ir: Ir, device: Device, precompiled: Precompiled | None = None) -> None:
        super().__init__(ir, device, precompiled)
        self._snapshot = Snapshot(ir.main_graph)

    @property
    def report(self) -> Report:
        """Report on the program: schedule, size with and without outlining, compiled executables and reasons, memory,
        operations, variables, streams, replicas, remote traffic, times.

        It prints as a page, notebooks show it with pictures, and `model_dump_json()` has all numbers. Called with a
        path, it writes one self-contained HTML page. The program need not have run; runs are included. For the device
        `"ipu_model"` it also has an estimate of the program's cost on IPUs.

        Example:
            >>> session = popxl.Session(ir, "ipu_model")
            >>> session.report("report.html")
            >>> print(session.report)
            >>> session.report.estimate.cycles
        """
        return report_of(self._ir, self.program, self.runner)

    def memory(self) -> Memory:
        """Memory required by the compiled program, in bytes per device and on the host.

        Temporaries, code and host memory of executables are XLA's figures; variables, arguments and
        outputs have the sizes of their shapes. `ir.memory()` is a count of the same before anything is compiled.

        Example:
            >>> memory = popxl.Session(ir).memory()
            >>> print(memory)
            >>> memory.variables, memory.arguments, memory.outputs, memory.temporaries, memory.code, memory.host
            >>> [device.device for device in memory.devices]
        """
        return memory_of_program(self._ir, self.program)

    def cost(self) -> Cost:
        """Cost of the compiled program on one chip: bytes, operations, kernels, traffic between chips, and estimated
        run time. Derived from the compiled code, without measurements or execution.

        So two programs compiled for one target can be compared exactly, on any machine.

        Example:
            >>> cost = popxl.Session(ir, "tpu v5e:2x2").cost()
            >>> print(cost)
            >>> cost.flops, cost.kernels, cost.temporary_bytes, cost.cycles
        """
        return cost_of(self.program)

    def communication(self) -> CommunicationReport:
        """Traffic between chips per run, as compiled, compared with the program's own, `ir.communication()`. Runs
        nothing.

        Example:
            >>> sent = popxl.Session(ir, "tpu v5e:2x4").communication()
            >>> print(sent)
            >>> assert not sent.differences  # nothing is sent that the program does not say
        """
        return communication_of_program(self._ir, self.program)

    def hlo(self) -> dict[str, str]:
        """XLA's text of each executable, keyed by name: "the program", or the segments of a plan.

        Example:
            >>> for name, text in popxl.Session(ir, "gpu h100").hlo().items():
            ...     print(name, text.count("fusion("))
        """
        return texts(self.program)

    def recording(self, folder: str | os.PathLike[str] | None = None) -> AbstractContextManager[Timeline]:
        """Record executions on each device while a block runs. The timeline is complete when the block ends.

        Recorded runs may be slower: before an executable overwrites something, the host waits until it is there.

        Args:
            folder: folder for the output of JAX's profiler about the devices, instruction by instruction. XProf opens
                the folder (`xprof --logdir folder`). Perfetto (https://ui.perfetto.dev) opens `perfetto.json.gz` in it,
                where instructions have your names: of the op, its line and its graph. A fused kernel has the name of
                its last op.

        Example:
            >>> with popxl.Session(ir) as session, session.recording() as timeline:
            ...     outputs = session.run(inputs)
            >>> print(timeline)
            >>> timeline.picture().save("timeline.svg")

            >>> with session, session.recording("trace"):
            ...     outputs = session.run(inputs)
        """
        timeline = self._runner_for("recording").recording()
        return timeline if folder is None else traced(folder, timeline, lambda: self.hlo().values())

    def debugging(self, infinities: bool = True) -> AbstractContextManager[None]:
        """Run op by op while a block lasts, stopping at the first op that produces NaN or infinity.

        The same ops run on the same numbers as in the compiled program, each separately, in all called graphs, loops
        and replicas. Results agree with it up to rounding, as nothing is fused. It is slow, and keeps all values of
        running graphs in memory.

        Your own inputs are never reported: an infinity in a variable, constant, stream or buffer, such as `-inf` in an
        attention mask, may pass through any number of ops. An op is reported if it makes

        * an infinity from finite operands: `log(0)`, a division by 0, float16 beyond 65504;
        * a NaN without NaN operands: `log(-1)`, but also `inf - inf`, where an infinity did harm.

        For an op between replicas, the operands of all of them count.

        Args:
            infinities: whether to report infinities; otherwise only a NaN is reported.

        Raises:
            NonFiniteError: from `run`, with the op as its graph prints it and your line that made it, the calls that
                lead there with the iterations of loops, the replica, and the operands of the op. The variables and
                remote buffers are as they were before this run: the session can be used, and run again.
            PopxlError: if the Ir has changed since the session was made.
            NotImplementedError: if several processes run the program.

        Example:
            >>> with popxl.Session(ir) as session, session.debugging():
            ...     outputs = session.run(inputs)
        """
        self._check_unchanged("debugging")
        return self._runner_for("debugging").debugging(infinities)

    def _check_unchanged(self, what: str) -> None:
        """Raise `PopxlError` if the Ir changed after the session's creation."""
        if changes := self._snapshot.changes():
            raise PopxlError(
                f"Session.{what}: {self._ir!r} has changed since this session was made, and the compiled program has "
                f"not: {'; '.join(changes)}. Make another session of the Ir: `popxl.Session(ir)`."
            )
