"""PopXL for JAX: write a whole machine-learning program as an explicit graph, and run it on CPU, GPU or TPU.

Example:
    >>> import popxl
    >>> from popxl import ops
    >>> ir = popxl.Ir()
    >>> with ir.main_graph:
    ...     x = popxl.variable([1.0, 2.0], name="x")
    ...     total = ops.sum(x * x)
    ...     out = popxl.d2h_stream(total.shape, total.dtype, "total")
    ...     ops.host_store(out, total)
    >>> with popxl.Session(ir) as session:
    ...     print(session.run()[out])
    5.0
"""

from popxl.base import quiet as quiet  # imports JAX, before other modules need it

# isort: split
from popxl import compat as compat  # private names that published programs use
from popxl import errors, fp8_utils, initial, ops, transforms, utils
from popxl import operators as operators  # gives tensors their operators
from popxl import tensor as tensor
from popxl import testing as testing
from popxl.base.choices import choice
from popxl.base.version import VERSION as __version__  # noqa: F401
from popxl.context import (
    gcg,
    get_current_graph,
    get_ir,
    get_main_graph,
    gir,
    gmg,
    in_sequence,
    io_tiles,
    ipu,
    name_scope,
)
from popxl.core.create import constant, graph_input, graph_output, variable
from popxl.core.remote_variables import (
    remote_replica_sharded_variable,
    remote_variable,
    replica_sharded_buffer,  # noqa: F401
    replica_sharded_variable,
)
from popxl.core.tensor import Tensor
from popxl.dtypes import (
    bfloat16,
    bool,
    complex64,
    complex128,
    double,
    dtype,
    float,
    float8_143,
    float8_152,
    float16,
    float32,
    float64,
    half,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.module import Module
from popxl.op import Op, OpKind
from popxl.random_seed import create_seeds
from popxl.remote_buffer import RemoteBuffer, remote_buffer
from popxl.replica_grouping import ReplicaGrouping
from popxl.session import Analysis, GraphFunction, Session, Target, analyze, export, to_jax
from popxl.streams import DeviceToHostStream, HostToDeviceStream, d2h_stream, h2d_stream
from popxl.tensorlocation import ExecutionContext, ReplicatedTensorSharding, TensorLocation, TensorStorage, TileSet
from popxl.transforms.from_jax import from_jax
from popxl.values.spec import TensorByRef, TensorSpec

__all__ = [
    "Analysis",
    "DeviceToHostStream",
    "ExecutionContext",
    "Graph",
    "GraphFunction",
    "HostToDeviceStream",
    "Ir",
    "Module",
    "Op",
    "OpKind",
    "RemoteBuffer",
    "ReplicaGrouping",
    "ReplicatedTensorSharding",
    "Session",
    "Target",
    "Tensor",
    "TensorByRef",
    "TensorLocation",
    "TensorSpec",
    "TensorStorage",
    "TileSet",
    "analyze",
    "bfloat16",
    "bool",
    "complex64",
    "complex128",
    "choice",
    "constant",
    "create_seeds",
    "d2h_stream",
    "double",
    "dtype",
    "errors",
    "export",
    "float",
    "float8_143",
    "float8_152",
    "float16",
    "float32",
    "float64",
    "fp8_utils",
    "from_jax",
    "gcg",
    "get_current_graph",
    "get_ir",
    "get_main_graph",
    "gir",
    "gmg",
    "graph_input",
    "graph_output",
    "h2d_stream",
    "half",
    "in_sequence",
    "initial",
    "int8",
    "int16",
    "int32",
    "int64",
    "io_tiles",
    "ipu",
    "name_scope",
    "ops",
    "remote_buffer",
    "remote_replica_sharded_variable",
    "remote_variable",
    "replica_sharded_variable",
    "to_jax",
    "transforms",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "utils",
    "variable",
]
