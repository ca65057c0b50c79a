"""Transforms of finished graphs, from graph to graph, one in each module."""

from popxl_addons.no_effect import (
    disable_fc_pass,
    enable_fc_pass,
    set_available_memory_proportion_by_ipu,
    set_graph_available_memory_proportion_by_ipu,
)
from popxl_addons.transforms.activations import Activation, MemoryPolicy, Treatment, activations_of
from popxl_addons.transforms.autodiff import autodiff as autodiff
from popxl_addons.transforms.autodiff import autodiff_with_accumulation, remap_grad_info
from popxl_addons.transforms.batch_serialisation import (
    BatchSerialResult,
    RemoteHandle,
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
    batch_serialise_non_overlapped,
    batch_serialise_overlapped,
)
from popxl_addons.transforms.jax_gradients import ValueAndGrad, value_and_grad
from popxl_addons.transforms.memory_budget import plan_memory
from popxl_addons.transforms.memory_plan import GraphPlan, MemoryPlan, PlannedActivation
from popxl_addons.transforms.pipelining import pipelined_execution
from popxl_addons.transforms.recomputation import add_recompute_inputs, recompute_graph
from popxl_addons.transforms.schedule import PipelineSchedule

__all__ = [
    "Activation",
    "BatchSerialResult",
    "GraphPlan",
    "MemoryPlan",
    "MemoryPolicy",
    "PipelineSchedule",
    "PlannedActivation",
    "RemoteHandle",
    "Treatment",
    "ValueAndGrad",
    "activations_of",
    "add_recompute_inputs",
    "autodiff",
    "autodiff_with_accumulation",
    "batch_serial_buffer",
    "batch_serialise",
    "batch_serialise_fwd_and_grad",
    "batch_serialise_non_overlapped",
    "batch_serialise_overlapped",
    "disable_fc_pass",
    "enable_fc_pass",
    "pipelined_execution",
    "plan_memory",
    "recompute_graph",
    "remap_grad_info",
    "set_available_memory_proportion_by_ipu",
    "set_graph_available_memory_proportion_by_ipu",
    "value_and_grad",
]
