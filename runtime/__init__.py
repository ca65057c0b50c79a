"""Runtime: translation of a finished Ir to a JAX program, and its execution.

Reading order: `lowering`, one loop that turns a graph into a function of arrays; `program`, an Ir compiled for a
device, its state and its runs; `plan`, programs of several executables; `targets`, devices and machines to compile for;
`processes`, programs of several processes, and `poprun`, which starts them.
"""

import popxl  # noqa: F401  # first, as it imports from here
from runtime.program.compiled import CompiledProgram
from runtime.targets.devices import Device, find_device

__all__ = ["CompiledProgram", "Device", "find_device"]
