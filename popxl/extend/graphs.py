"""Read and rewrite graphs: reachable graphs, shared storage, overwritten tensors, dependencies and costs.

Methods do the rewriting itself: `Graph.replace`, `Graph.reorder`, `Graph.move` and `Op.edit`.

Example:
    >>> from popxl.extend.graphs import reachable
    >>> y = ops.call(graph, x, w)
    >>> reachable(main) == (main, graph)
    True
"""

from popxl.analysis.estimate import estimate_of
from popxl.analysis.flops import Flops, own_flops
from popxl.analysis.placement import Readers, reading_ipus
from popxl.base.liveness import last_uses, live_ranges
from popxl.core.aliasing import has_effect, reachable, storages, through_calls, written_inputs
from popxl.core.binding import is_input
from popxl.core.printing import schedule
from popxl.core.traits import is_call
from popxl.ops.attention import is_attention
from popxl.ops.call import call_kind
from popxl.ops.host import host_call_kind
from popxl.ops.repeat import EXTRA_INPUTS, final_ipu, loop_kind
from popxl.transforms.autodiff import leading_to

__all__ = [
    "EXTRA_INPUTS",
    "Flops",
    "Readers",
    "call_kind",
    "estimate_of",
    "has_effect",
    "host_call_kind",
    "is_attention",
    "is_call",
    "is_input",
    "last_uses",
    "leading_to",
    "live_ranges",
    "final_ipu",
    "loop_kind",
    "own_flops",
    "reachable",
    "reading_ipus",
    "schedule",
    "storages",
    "through_calls",
    "written_inputs",
]
