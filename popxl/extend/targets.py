"""Machines to compile for: `Target`; the figures of a chip of your own; and estimated times before compilation.

`collective_time` prices a collective by the wires between its chips, `graph_time` a graph op by op.

Example:
    >>> from popxl.extend.targets import Gpu, Target, shipped
    >>> h100 = shipped(Gpu, "h100")
    >>> nvl = h100.model_copy(update={"name": "NVIDIA H100 NVL", "memory_bytes": 94 << 30})
    >>> Target("gpu h100-nvl:8", nvl).chip.name
    'NVIDIA H100 NVL'
"""

from runtime.costs.graph_time import GraphTime, graph_time, kernels_of
from runtime.costs.network import CollectiveTime, collective_time, spans_of
from runtime.program.host_arrays import Outputs
from runtime.targets.chip import Chip, Efficiency, Gpu, Link, Tpu, shipped
from runtime.targets.offline import Target

__all__ = [
    "Chip", "CollectiveTime", "Efficiency", "GraphTime", "Gpu", "Link", "Outputs", "Target", "Tpu",
    "collective_time", "graph_time", "kernels_of", "shipped", "spans_of",
]  # fmt: skip
