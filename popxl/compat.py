"""Private names of the original PopXL that published programs use, implemented by public equivalents.

    the private name                                what to write instead
    ----------------------------------------------  --------------------------------------------
    ir._pb_ir.getSessionOptions()                   ir.options
    ir._pb_ir.getAllGraphs(), getMainGraph()        ir.graphs, ir.main_graph
    ir._pb_ir.getId()                               ir.id
    ir._pb_ir.logIr(), setPatterns(...),            nothing: what they did is not needed
        applyPreAliasPatterns(graph), updateVertices()
    graph._pb_graph.getOps()                        graph.ops
    graph._create_tensor_id(name)                   nothing: ids are given when tensors are made
    session._pb_session.setEngineIsLoaded(False)    session.detach()
    session._full_input_shape(shape)                session.host_shape(shape)

Paths too: the original had a module for each op, or for a few. Here ops live in families, and can also be imported from
those modules: `from popxl.ops.gather import tied_gather` is `popxl.ops.tied_gather`.

Further names that such programs use (`graph._ir`, `variable._memmap_arr`, `info._expected_inputs`, the underscored
names of `Session` and `popxl.context`) are attributes of these classes. The project itself does not use this file:
without it, and the line of `popxl/__init__.py` that imports it, everything else works as before.

Example:
    >>> options = ir._pb_ir.getSessionOptions()
    >>> options.numIOTiles = 32
    >>> options is ir.options
    True
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from popxl import ops
from popxl.core.recording import Op
from popxl.dtypes import float32
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.options import SessionOptions
from popxl.session import Session
from popxl.values.spec import TensorSpec

__all__: list[str] = []


class _LowLevelIr:
    """Substitute for an Ir's `_pb_ir`."""

    def __init__(self, ir: Ir) -> None:
        self._ir = ir

    def getSessionOptions(self) -> SessionOptions:
        """Assignable options of the Ir."""
        return self._ir.options

    def getAllGraphs(self) -> Sequence[Graph]:
        """All graphs, the main graph first."""
        return tuple(self._ir.graphs)

    def getMainGraph(self) -> Graph:
        """The main graph."""
        return self._ir.main_graph

    def getId(self) -> int:
        """The number of the Ir."""
        return self._ir.id

    def logIr(self) -> None:
        """Does nothing: print the Ir."""

    def setPatterns(self, *patterns: Any) -> None:
        """Does nothing: XLA rewrites programs as it finds best."""

    def applyPreAliasPatterns(self, graph: Graph) -> None:
        """Does nothing, as `setPatterns`."""

    def updateVertices(self) -> None:
        """Does nothing: ops know their graph."""


class _LowLevelGraph:
    """Substitute for a graph's `_pb_graph`."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def getOps(self) -> Sequence[Op]:
        """The ops, in the order of execution. `popart._internal.ir.op` has their classes."""
        return list(self._graph.ops)


class _LowLevelSession:
    """Substitute for a session's `_pb_session`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def setEngineIsLoaded(self, loaded: bool) -> None:
        """`False` frees device memory; the next run copies everything again."""
        if not loaded and self._session.store is not None:
            self._session.store.release()


def _create_tensor_id(graph: Graph, name: str | None = None) -> str:
    """Predict the id of a new tensor with this name in the graph."""
    t = graph.new_tensor(name, _ANY)
    graph.forget(t)
    return t.id


_ANY = TensorSpec((), float32)

_PRIVATE_ATTRIBUTES: dict[type, dict[str, Any]] = {
    Ir: {"_pb_ir": property(_LowLevelIr)},
    Session: {"_pb_session": property(_LowLevelSession)},
    Graph: {"_pb_graph": property(_LowLevelGraph), "_create_tensor_id": _create_tensor_id},
}

for _class, _attributes in _PRIVATE_ATTRIBUTES.items():
    for _name, _attribute in _attributes.items():
        setattr(_class, _name, _attribute)

# Modules of ops, by path in `popxl.ops`: with the op of the same name and its in-place form; and others.
_NAMED_LIKE_THEIR_OP = """
    abs add ceil concat cos cumsum detach div dropout dynamic_slice dynamic_update equal exp floor fmod gelu geluerf
    greater histogram host_load host_store increment_mod init io_tile_copy ipu_copy isfinite isinf isnan l1 l2
    logical_and logical_not logical_or logsum logsumexp mean median min mul negate onehot pow prod relu remote_load
    remote_store shaped_dropout sign sin softmax split sqrt squeeze sub subsample sum sumsquare swish tanh topk
    transpose where
"""
_OTHERS = {
    "argminmax": "argmax argmin",
    "batch_norm": "batch_norm_inference",
    "cast": "cast pow2scale_cast_from_fp8 pow2scale_cast_to_fp8",
    "clip": "clamp clip",
    "gather": "gather groupedgather tied_gather",
    "group_norm": "group_norm layer_norm",
    "identity": "identity rename",
    "interpolate": "InterpolateCoordinateTransformationType InterpolateNearestType InterpolateType interpolate",
    "lamb": "lamb_square",
    "log": "log log2",
    "max": "max maximum",
    "pool": "average_pool max_pool",
    "print_tensor": "FloatFormat print_tensor",
    "random_seed": "split_random_seed",
    "reshape": "flatten flatten_ reshape reshape_",
    "roialign": "roi_align",
    "slice": "process_args slice slice_",
    "collectives.replicated_all_gather": "replicated_all_gather",
    "collectives.replicated_all_reduce": "replicated_all_reduce replicated_all_reduce_",
    "collectives.replicated_reduce_scatter": "replica_sharded_slice replicated_reduce_scatter replicated_slice",
    "var_updates.accumulate": "sparse_accumulate_",  # the other ops are in our module
    "var_updates.adam_updater": "adam_updater adamax_updater lamb_updater",
    "var_updates.adam_var_update": "adam_var_update",
}


def _add_modules_of_ops() -> None:
    known: dict[str, Any] = {}
    for module in (ops.host, ops.resample, ops.slicing, ops.collectives, ops.var_updates, ops):
        known |= vars(module)
    alone = {name: f"{name} {name}_" if f"{name}_" in known else name for name in _NAMED_LIKE_THEIR_OP.split()}
    for name, contents in (alone | _OTHERS).items():
        # Registered beforehand: a module found on import would replace the op in `popxl.ops`.
        imported = sys.modules.setdefault(f"popxl.ops.{name}", ModuleType(f"popxl.ops.{name}"))
        vars(imported).update({key: known[key] for key in contents.split()})


_add_modules_of_ops()
