"""A kit for models, built only on what popxl offers in public: modules with named state, and what one does with them.

Reading order: `dot_tree` (the form of all named collections), `variable_factory`, `graph`, `module`.
"""

from popxl_addons import ops as ops
from popxl_addons import transforms as transforms
from popxl_addons.grad_info import create_grad_graph_info
from popxl_addons.graph import BoundGraph, GraphWithNamedArgs
from popxl_addons.graph_cache import (
    GraphCache,
    argument_hash,
    bound_arguments,
    function,
    get_function_hash,
    tensor_hash,
)
from popxl_addons.graph_common import CalledGraphsGradInfo, CalledGraphsGradInfoLike, GradGraphInfoLike, GraphLike
from popxl_addons.module import Module
from popxl_addons.name_scope import NameScopeMeta
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops import cross_entropy, cross_entropy_with_grad, host_load, host_store
from popxl_addons.streams import InputStreams, OutputStreams
from popxl_addons.transforms import autodiff
from popxl_addons.utils import OrderedDict, WeightsDict, duplicate_items, overrides, timer
from popxl_addons.variable_factory import (
    NamedVariableFactories,
    VariableFactory,
    add_replica_sharded_variable_input,
    add_variable_input,
)

__all__ = [
    "BoundGraph",
    "CalledGraphsGradInfo",
    "CalledGraphsGradInfoLike",
    "GradGraphInfoLike",
    "GraphCache",
    "GraphLike",
    "GraphWithNamedArgs",
    "InputStreams",
    "Module",
    "NameScopeMeta",
    "NamedTensors",
    "NamedVariableFactories",
    "OrderedDict",
    "OutputStreams",
    "VariableFactory",
    "WeightsDict",
    "add_replica_sharded_variable_input",
    "add_variable_input",
    "argument_hash",
    "autodiff",
    "bound_arguments",
    "create_grad_graph_info",
    "cross_entropy",
    "cross_entropy_with_grad",
    "duplicate_items",
    "function",
    "get_function_hash",
    "host_load",
    "host_store",
    "ops",
    "overrides",
    "tensor_hash",
    "timer",
    "transforms",
]
