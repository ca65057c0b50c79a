"""Runtime: translation of a finished Ir to a JAX program, and its execution.

Reading order: `lower`, one loop that turns a graph into a function of arrays; `effects`, what crosses to the host;
`program`, an Ir compiled for a device; `targets`, which device that is; `host_arrays`, what goes in and comes out;
`processes`, how several processes run one program, and `poprun`, which starts them.
"""

import popxl  # noqa: F401  # first, as it imports from here
from runtime.program.compiled import CompiledProgram
from runtime.targets.devices import Device, find_device

__all__ = ["CompiledProgram", "Device", "find_device"]
