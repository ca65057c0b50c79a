"""Ops of poptorch for models, and what places and names them.

On the host, PyTorch computes them. During capture, each is one op of the program, whose results have PyTorch's shapes
and dtypes. Their lowerings are in `poptorch.lowering`.
"""

from poptorch.ops.annotations import (
    identity_loss,
    ipu_print_tensor,
    nop,
    recomputationCheckpoint,
    return_all,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from poptorch.ops.control_flow import cond, for_loop
from poptorch.ops.custom import CPU, custom_op
from poptorch.ops.searches import ctc_beam_search_decoder, fps, nearest
from poptorch.ops.slices import dynamic_slice, dynamic_update
from poptorch.placement.blocks import Attribute, BeginBlock, Block, BlockFunction, MultiConv, NameScope, removeBlocks

__all__ = [
    "Attribute",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "CPU",
    "MultiConv",
    "NameScope",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "removeBlocks",
    "return_all",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]
