"""Machines to compile for: `Target`, and the figures of a chip of your own.

Example:
    >>> from popxl.extend.targets import Gpu, Target, shipped
    >>> h100 = shipped(Gpu, "h100")
    >>> nvl = h100.model_copy(update={"name": "NVIDIA H100 NVL", "memory_bytes": 94 << 30})
    >>> Target("gpu h100-nvl:8", nvl).chip.name
    'NVIDIA H100 NVL'
"""

from runtime.program.host_arrays import Outputs
from runtime.targets.chip import Chip, Gpu, Tpu, shipped
from runtime.targets.offline import Target

__all__ = ["Chip", "Gpu", "Outputs", "Target", "Tpu", "shipped"]
