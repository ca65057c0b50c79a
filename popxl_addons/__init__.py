"""A kit for models, built only on the public names of popxl: modules with named state, and transforms and training.

Reading order: `dot_tree` (the structure of all named collections), `variable_factory`, `graph`, `module`.
"""

from popxl_addons import layers as layers
from popxl_addons import named_replica_grouping as named_replica_grouping
from popxl_addons import ops as ops
from popxl_addons import optimizers as optimizers
from popxl_addons import rts as rts
from popxl_addons import transforms as transforms
from popxl_addons import weights as weights
from popxl_addons.array_munging import (
    handle_negative_axis,
    pad_axis,
    repeat,
    repeat_axis,
    repeat_shard,
    shard,
    shard2D,
    split2D,
    squeeze_safe,
    tensor_parallel_input,
    unshard,
    unshard2D,
    unshard_arrays,
)
from popxl_addons.debugging import print_tensor, print_text
from popxl_addons.generation import Generator, Request
from popxl_addons.git_commit import GIT_COMMIT
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
from popxl_addons.metrics import Metrics
from popxl_addons.module import Module
from popxl_addons.name_scope import NameScopeMeta
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops import cross_entropy, cross_entropy_with_grad, fp8_amax_scale, host_load, host_store
from popxl_addons.performance_utils import (
    evaluate_FLOPs,
    evaluate_ir_FLOPs,
    format_flops_scientific,
    print_FLOPs,
    total_FLOPs,
)
from popxl_addons.precision import MixedPrecision
from popxl_addons.remote import (
    create_remote_buffer,
    load_remote_graph,
    named_buffers,
    named_variable_buffers,
    store_remote_graph,
)
from popxl_addons.route_tensor import is_subgraph, route_tensor_into_graph
from popxl_addons.seed_variable import seed_variable as seed_variable
from popxl_addons.streams import InputStreams, OutputStreams
from popxl_addons.task_session import TaskSession, write_variables_pb
from popxl_addons.training import Training, train_step
from popxl_addons.transforms import (
    MemoryPlan,
    RemoteHandle,
    activations_of,
    add_recompute_inputs,
    autodiff,
    autodiff_with_accumulation,
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
    disable_fc_pass,
    enable_fc_pass,
    pipelined_execution,
    plan_memory,
    recompute_graph,
    set_available_memory_proportion_by_ipu,
    set_graph_available_memory_proportion_by_ipu,
    value_and_grad,
)
from popxl_addons.utils import OrderedDict, WeightsDict, duplicate_items, overrides, timer
from popxl_addons.variable_factory import (
    NamedVariableFactories,
    VariableFactory,
    add_replica_sharded_variable_input,
    add_variable_input,
)
from popxl_addons.weights import load_safetensors, save_safetensors

__all__ = [
    "BoundGraph",
    "CalledGraphsGradInfo",
    "CalledGraphsGradInfoLike",
    "GIT_COMMIT",
    "Generator",
    "GradGraphInfoLike",
    "GraphCache",
    "GraphLike",
    "GraphWithNamedArgs",
    "InputStreams",
    "MemoryPlan",
    "Metrics",
    "MixedPrecision",
    "Module",
    "NameScopeMeta",
    "NamedTensors",
    "NamedVariableFactories",
    "OrderedDict",
    "OutputStreams",
    "RemoteHandle",
    "Request",
    "TaskSession",
    "Training",
    "VariableFactory",
    "WeightsDict",
    "activations_of",
    "add_recompute_inputs",
    "add_replica_sharded_variable_input",
    "add_variable_input",
    "argument_hash",
    "autodiff",
    "autodiff_with_accumulation",
    "batch_serial_buffer",
    "batch_serialise",
    "batch_serialise_fwd_and_grad",
    "bound_arguments",
    "create_grad_graph_info",
    "create_remote_buffer",
    "cross_entropy",
    "cross_entropy_with_grad",
    "disable_fc_pass",
    "duplicate_items",
    "enable_fc_pass",
    "evaluate_FLOPs",
    "evaluate_ir_FLOPs",
    "format_flops_scientific",
    "fp8_amax_scale",
    "function",
    "get_function_hash",
    "handle_negative_axis",
    "host_load",
    "host_store",
    "is_subgraph",
    "layers",
    "load_remote_graph",
    "load_safetensors",
    "named_buffers",
    "named_replica_grouping",
    "named_variable_buffers",
    "ops",
    "optimizers",
    "overrides",
    "pad_axis",
    "pipelined_execution",
    "plan_memory",
    "print_FLOPs",
    "print_tensor",
    "print_text",
    "recompute_graph",
    "repeat",
    "repeat_axis",
    "repeat_shard",
    "route_tensor_into_graph",
    "rts",
    "save_safetensors",
    "seed_variable",
    "set_available_memory_proportion_by_ipu",
    "set_graph_available_memory_proportion_by_ipu",
    "shard",
    "shard2D",
    "split2D",
    "squeeze_safe",
    "store_remote_graph",
    "tensor_hash",
    "tensor_parallel_input",
    "timer",
    "total_FLOPs",
    "train_step",
    "transforms",
    "unshard",
    "unshard2D",
    "unshard_arrays",
    "value_and_grad",
    "weights",
    "write_variables_pb",
]
