"""Compilation of a captured model to one program."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import popxl
from poptorch.base.leaves import Structure
from poptorch.capture.constants import constant_data
from poptorch.capture.host_function import host_functions_of
from poptorch.capture.model import Captured
from poptorch.enums import OutputMode
from poptorch.program.program import Program
from poptorch.program.request import ProgramRequest
from poptorch.program.returned import Returned
from poptorch.run.arguments import Signature
from poptorch.run.compiled import Compiled
from poptorch.run.devices import chosen_device


def compile_captured(
    ir: popxl.Ir,
    captured: Captured,
    structure: Structure,
    signature: Signature,
    request: ProgramRequest,
    host: Mapping[str, np.ndarray],
) -> Compiled:
    """Lower a captured model to a program, and compile it.

    Args:
        host: values of its parameters and buffers by name.
    """
    options = request.options
    mode, period = options.output_mode, options.output_return_period
    outputs = captured.trace.outputs
    constants = {i: data for i, value in enumerate(outputs) if (data := constant_data(value)) is not None}
    returned = [
        Returned(value, OutputMode.All)
        if value.producer is not None and value.producer.op == "poptorch.return_all"
        else Returned(value, mode, period)
        for i, value in enumerate(outputs)
        if i not in constants
    ]
    returned += request.anchors
    returned += [Returned(value, OutputMode.All) for value in captured.written_inputs.values()]
    names = [leaf.name for leaf in signature.leaves]
    ir.options.precision = options.product_precision
    ir.options.enableStochasticRounding = options.Precision.stochastic_rounding
    ir.options.stochasticRoundingSeed = options.random_seed or 0  # which all processes have alike
    options._Popart.apply(ir.options)
    if options.executable_cache is not None:
        ir.options.enableEngineCaching, ir.options.cachePath = True, options.executable_cache
    # A memory plan within a budget sets what the options leave open.
    program = Program(ir, captured, names, host, request, returned)
    return Compiled(
        signature,
        structure,
        request,
        constants,
        list(captured.written_inputs),
        program.io,
        popxl.Session(ir, chosen_device(options), weights_to_host_on_exit=False),
        host_functions=host_functions_of(captured.trace),
        read=captured.read_buffers,
        frozen=captured.frozen,
        counters=captured.numbers,
    )
