"""A GPT as large as a pod: built, saved, and compiled for chips that are not here. Nothing runs.

    python -m tests.benchmarks.pod                                    # 96 layers, width 12 288: built and saved
    python -m tests.benchmarks.pod --target "tpu v5p:8x8x8"           # and compiled for 512 chips
    python -m tests.benchmarks.pod --layers 4 --target "tpu v5p:4x4x4" --data 8

Weights and activations are bfloat16. Blocks are divided along the axis "tensor", with their gradients computed again;
gradients are reduced along "data". Each replica has one sequence. The state of Adam is in remote buffers.
"""

from __future__ import annotations

import argparse
import math
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers import LayerNorm, Linear
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from popxl_addons.optimizers import AdamOptimizerStep
from popxl_addons.remote import NamedRemoteBuffers, named_variable_buffers

DTYPE = popxl.bfloat16
HEAD = 128


class Block(addons.Module):
    """Attention and a feed-forward, of which each replica along "tensor" has some heads and some columns."""

    def __init__(self, width: int, tensor: int) -> None:
        super().__init__()
        self.heads = width // HEAD // tensor
        self.norm1, self.norm2 = LayerNorm(), LayerNorm()
        self.qkv = Linear(3 * width // tensor, replica_grouping="data")
        self.out = Linear(width, bias=False, replica_grouping="data")
        self.up = Linear(4 * width // tensor, replica_grouping="data")
        self.down = Linear(width, bias=False, replica_grouping="data")

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = x + self.closed(self.out(self.attention(self.qkv(self.opened(self.norm1(x))))))
        return x + self.closed(self.down(ops.gelu(self.up(self.opened(self.norm2(x))))))

    def attention(self, qkv: popxl.Tensor) -> popxl.Tensor:
        rows = qkv.shape[0]
        q, k, v = (t.reshape((rows, self.heads, HEAD)).transpose((1, 0, 2)) for t in ops.split(qkv, 3, axis=1))
        scores = ops.cast(q @ k.transpose((0, 2, 1)) * HEAD**-0.5, popxl.float32)
        mixed = ops.cast(ops.softmax(scores, axis=-1), DTYPE) @ v
        return mixed.transpose((1, 0, 2)).reshape((rows, self.heads * HEAD))

    def opened(self, x: popxl.Tensor) -> popxl.Tensor:
        return replicated_all_reduce_identical_inputs(x, group="tensor")

    def closed(self, x: popxl.Tensor) -> popxl.Tensor:
        return replicated_all_reduce_identical_grad_inputs(x, group="tensor")


def training(layers: int, width: int, rows: int, data: int, tensor: int) -> popxl.Ir:
    """A training step of the blocks alone; the loss is the mean of what comes out."""
    ir = popxl.Ir(axes={"data": data, "tensor": tensor})
    ir.options.precision = "default"
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((rows, width), DTYPE, "x"))
        facts, graph = Block(width, tensor).create_graph(x)
        names = graph.args.keys_flat()
        required = [graph.graph.inputs[0], *graph.args.values_flat()]
        grad = addons.recompute_graph(addons.autodiff(graph, grads_required=required))
        called = []
        for i in range(layers):
            weights = facts.init(f"layer{i}")
            called.append((weights, graph.bind(weights).call_with_info(x)))
            x = called[-1][1].outputs[0]
        ops.host_store(popxl.d2h_stream((), popxl.float32, "loss"), ops.mean(ops.cast(x, popxl.float32)))
        dx, adam = x * (1 / x.nelms), Adam(layers)
        for i, (weights, info) in reversed([*enumerate(called)]):
            dx, *gradients = grad.call(dx, args=grad.grad_graph_info.inputs_dict(info))
            for name, gradient in zip(names, gradients, strict=True):
                mean = ops.collectives.replicated_all_reduce(gradient, "mean", "data")
                adam.update(name, i, weights[name], mean)
    return ir


class Adam:
    """Adam, whose state is in remote buffers: a slot for each layer."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.step = AdamOptimizerStep(cache=True)
        self.buffers: dict[str, NamedRemoteBuffers] = {}

    def update(self, name: str, layer: int, w: popxl.tensor.Variable, gradient: popxl.Tensor) -> None:
        facts, step = self.step.create_graph(
            w.spec, gradient.spec, w.replica_grouping, lr=1e-4, first_order_dtype=DTYPE
        )
        if name not in self.buffers:
            self.buffers[name] = named_variable_buffers(facts, self.layers, shard_over_dict=False)
        slots = self.buffers[name].to_dict()
        facts.init_remote(self.buffers[name], layer, f"adam.{name}.{layer}")
        state = addons.NamedTensors.from_dict({key: ops.remote_load(slot, layer) for key, slot in slots.items()})
        step.bind(state).call(w, gradient)
        for key, slot in slots.items():
            ops.remote_store(slot, layer, state[key])


def reporter() -> Callable[[str], None]:
    """Function that prints what was done, with CPU and wall time since now, and the most memory of the process."""
    begun, entered = time.process_time(), time.monotonic()

    def report(what: str) -> None:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        spent, passed = time.process_time() - begun, time.monotonic() - entered
        print(f"{what}: {spent:.1f} s of CPU time so far, {passed:.0f} s in all, {most:.2f} GB of memory", flush=True)

    return report


def report_compiled(ir: popxl.Ir, target: str, report: Callable[[str], None]) -> tuple[popxl.Session, Any]:
    """Compile a program for a target, and print its memory and what differs in what it sends.

    Returns:
        The session, and its report of communication.
    """
    session = popxl.Session(ir, target)
    report("compiled")
    sent = session.communication()
    print(session.memory(), *sent.differences, sep="\n")
    return session, sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 96, "width": 12288, "rows": 2048, "data": 64, "tensor": 8}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--target", help='a machine, such as "tpu v5p:8x8x8"')
    options = parser.parse_args()
    said = reporter()
    ir = training(**{name: getattr(options, name) for name in sizes})
    counts = (math.prod(v.shape_on_host) for v in ir.main_graph.variables if not v.location_info.isRemote())
    said(f"built, {sum(counts) / 1e9:.1f} billion parameters")
    print(f"sends {ir.communication().bytes / 1e9:.1f} GB a step and replica")
    said(f"printed, {len(str(ir))} letters")
    with tempfile.TemporaryDirectory() as folder:
        ir.save(Path(folder) / "pod.popxl")
        said(f"saved, {sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e6:.1f} MB")
    if options.target is not None:
        report_compiled(ir, options.target, said)


if __name__ == "__main__":
    main()
