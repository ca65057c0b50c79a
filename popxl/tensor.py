"""Tensors, and the functions that make them, under the names that programs import. No module of popxl imports this."""

from popxl.core.create import constant, graph_input, graph_output, variable
from popxl.core.remote_variables import (
    remote_replica_sharded_variable,
    remote_variable,
    replica_sharded_buffer,
    replica_sharded_variable,
)
from popxl.core.tensor import (
    TILE_SET_MAP,
    Constant,
    HostScalarTensor,
    HostTensor,
    ScalarType,
    Tensor,
    TensorLike,
    Variable,
    host_tensor_types,
)
from popxl.utils import to_numpy
from popxl.values.spec import TensorByRef, TensorSpec

__all__ = [
    "TILE_SET_MAP",
    "Constant",
    "HostScalarTensor",
    "HostTensor",
    "ScalarType",
    "Tensor",
    "TensorByRef",
    "TensorLike",
    "TensorSpec",
    "Variable",
    "constant",
    "graph_input",
    "graph_output",
    "host_tensor_types",
    "remote_replica_sharded_variable",
    "remote_variable",
    "replica_sharded_buffer",
    "replica_sharded_variable",
    "to_numpy",
    "variable",
]
