"""Programs that are trained on several chips, and what finds the program that makes a session on a target."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.ir import Ir
from popxl_addons.layers import Linear
from popxl_addons.optimizers import AdamOptimizerStep
from runtime.machine import NothingRuns, TargetMachine
from runtime.program.compiled import CompiledProgram, Precompiled
from runtime.session import Session
from runtime.targets.devices import Device
from runtime.targets.offline import Target

C = ops.collectives
F32 = popxl.float32

FASTER = "--xla_gpu_autotune_level=0 --xla_backend_optimization_level=0"
"""For XLA: memory is laid out before code is made, which need not be good here."""


class _Catching(TargetMachine):
    """Takes the first program that is asked for, and ends what asks."""

    found: tuple[Ir, Device]

    def program(self, ir: Ir, device: Device, precompiled: Precompiled | None) -> CompiledProgram:
        self.found = ir, device
        raise NothingRuns


def compile_faster() -> None:
    """Have XLA make code of no quality. It looks before it compiles first."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FASTER}".strip()


def caught(make: Callable[[], object], target: str) -> tuple[Ir, Device]:
    """The first program that makes a session on a target, and where; it is not compiled."""
    machine, before = _Catching(Target(target)), Session.machine
    Session.machine = machine
    try:
        make()
    except NothingRuns:
        return machine.found
    finally:
        Session.machine = before
    raise AssertionError(f"{make} makes no session")


def session(ir: popxl.Ir) -> None:
    """Compile a program, with products as the chip likes them."""
    ir.options.precision = "default"
    popxl.Session(ir, "ipu_hw")


class Layers(addons.Module):
    """Linear layers with gelu between them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = addons.Module.from_list([Linear(width) for width in widths])

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for layer in self.layers:
            x = ops.gelu(layer(x))
        return x


def trained(rule: str, replicas: int = 1, dtype: popxl.dtype = F32, *, rows: int, width: int, hidden: int) -> None:
    """A network that is trained by plain gradients or Adam, alone or by several replicas."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((rows, width), dtype, "x"))
        facts, graph = Layers(hidden, hidden, hidden, width).create_graph(x)
        grad = addons.autodiff(graph, grads_required=graph.args.values_flat())
        variables = facts.init()
        info = graph.bind(variables).call_with_info(x)
        y, *_ = info.outputs
        ops.host_store(popxl.d2h_stream((), dtype, "loss"), ops.mean(y))
        gradients = grad.call(y, args=grad.grad_graph_info.inputs_dict(info))
        adam = AdamOptimizerStep(cache=True)
        for name, gradient in zip(graph.args.keys_flat(), gradients, strict=True):
            v = variables[name]
            if replicas > 1:
                gradient = C.replicated_all_reduce(gradient, "mean")
            if rule == "plain":
                ops.scaled_add_(v, gradient, b=-0.01)
            else:
                state, step = adam.create_graph(v.spec, gradient.spec, lr=0.01, first_order_dtype=dtype)
                step.bind(state.init(f"adam.{name}")).call(v, gradient)
    session(ir)


def in_pieces(replicas: int, rows: int, width: int) -> None:
    """Each replica keeps a piece of the weights and their momentum, gathers them, and changes its piece."""
    ir = popxl.Ir(replication=replicas)
    shapes = [(width, 8 * width), (8 * width, 8 * width), (8 * width, width)]
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((rows, width), F32, "x"))
        made = [popxl.replica_sharded_variable(np.zeros(s, np.float32), name=f"w{i}") for i, s in enumerate(shapes)]
        zeros = (np.zeros(shape, np.float32) for shape in shapes)
        momenta = [popxl.replica_sharded_variable(data, name=f"m{i}")[1] for i, data in enumerate(zeros)]

        def network(x: popxl.Tensor, *weights: popxl.Tensor) -> popxl.Tensor:
            for w in weights:
                x = ops.relu(x @ w)
            return x

        weights = [C.replicated_all_gather(piece) for _, piece in made]
        graph = ir.create_graph(network, x, *weights)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, x, *weights)
        gradients = ops.call(grad.graph, call.outputs[0], inputs_dict=grad.inputs_dict(call))
        for (_, w), m, g in zip(made, momenta, gradients, strict=True):
            g = C.replicated_reduce_scatter(g, "mean", None, True)
            ops.var_updates.accumulate_moving_average_(m, g, 0.9)
            ops.scaled_add_(w, m, b=-0.01)
    session(ir)
