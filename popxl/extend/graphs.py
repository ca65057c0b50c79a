"""Read and rewrite graphs: reachable graphs, shared storage, overwritten tensors, dependencies and costs.

Methods do the rewriting itself: `Graph.replace`, `Graph.reorder`, `Graph.move` and `Op.edit`.

Example:
    >>> from popxl.extend.graphs import reachable
    >>> y = ops.call(graph, x, w)
    >>> reachable(main) == (main, graph)
    True
"""

from popxl.analysis.estimate import estimate_of
from popxl.analysis.flops import ELEMENTWISE_PRIMITIVES, Flops, MatrixProduct, OpWork, op_work, own_flops
from popxl.analysis.placement import Readers, ipus_by_graph, reading_ipus
from popxl.base.liveness import last_uses, live_ranges
from popxl.core.aliasing import has_effect, reachable, storages, through_calls, written_inputs
from popxl.core.binding import is_input
from popxl.core.printing import schedule
from popxl.core.tracing import leaf_equations
from popxl.core.traits import is_call
from popxl.ops.attention import is_attention
from popxl.ops.call import call_kind
from popxl.ops.host import host_call_kind
from popxl.ops.repeat import EXTRA_INPUTS, final_ipu, loop_kind
from popxl.transforms.autodiff import leading_to
from popxl.values.spec import size_in_bytes

__all__ = [
    "ELEMENTWISE_PRIMITIVES",
    "EXTRA_INPUTS",
    "Flops",
    "MatrixProduct",
    "OpWork",
    "Readers",
    "call_kind",
    "estimate_of",
    "has_effect",
    "host_call_kind",
    "ipus_by_graph",
    "is_attention",
    "is_call",
    "is_input",
    "last_uses",
    "leading_to",
    "leaf_equations",
    "live_ranges",
    "final_ipu",
    "loop_kind",
    "op_work",
    "own_flops",
    "reachable",
    "reading_ipus",
    "schedule",
    "size_in_bytes",
    "storages",
    "through_calls",
    "written_inputs",
]
