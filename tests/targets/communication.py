"""What fifty-one programs send between chips, as they say and as they were compiled, on 8, 64 and 256 chips.

    python -m tests.targets.communication [--programs "sharded optimiser" "random 7"] [--kinds gpu tpu] [--chips 8 64]

Nothing is run. Forty-three programs are random; the others train: see `PROGRAMS`. Among TPUs, pipelines are compiled
for v4: on v5e, XLA refuses stages that share the hosts of a slice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.replica_grouping import Groups
from popxl_addons import optimizers
from popxl_addons.layers import Experts
from popxl_addons.named_replica_grouping import resolved
from popxl_addons.transforms.autodiff import autodiff_with_accumulation
from popxl_addons.transforms.pipelining import pipelined_execution
from runtime.costs.communication import CommunicationReport, communication_of_program
from runtime.program.compiled import compile_program
from tests.benchmarks import pod
from tests.popxl.test_communication import drawn, training
from tests.popxl_addons.gpt.model import Config
from tests.popxl_addons.gpt.variants import VARIANTS
from tests.targets.programs import Layers, caught, compile_faster, in_pieces, session, trained

MACHINES = {
    "gpu": {8: "gpu h100:8", 64: "gpu h100:64", 256: "gpu h100:256"},
    "tpu": {8: "tpu v5e:2x4", 64: "tpu v5e:8x8", 256: "tpu v5e:16x16"},
}
OF_PIPELINES = {8: "tpu v4:2x2x2", 64: "tpu v4:4x4x4", 256: "tpu v4:4x8x8"}
AXES = {8: {"data": 2, "tensor": 4}, 64: {"data": 8, "tensor": 8}, 256: {"data": 32, "tensor": 8}}


def along_axes(build: Callable[[int, int], popxl.Ir], chips: int) -> None:
    session(build(AXES[chips]["data"], AXES[chips]["tensor"]))


def gpt(chips: int) -> None:
    """The GPT whose weights and vocabulary are divided among all chips."""
    VARIANTS["tensor parallel"](
        Config(vocabulary=2 * chips, width=4 * chips, heads=chips, layers=1, batch=2, shards=chips)
    )


class Mixture(addons.Module):
    """An expert for each replica of a group, and a loss of what they make of tokens."""

    def build(self, x: popxl.Tensor, group: Groups) -> popxl.Tensor:
        self.experts = Experts(resolved(group, "here").group_size, chosen=2, capacity_factor=2.0, group=group)
        y, balance = self.experts(x)
        return ops.mean(y * y).astype(popxl.float32) + balance * 0.01


def experts(chips: int) -> None:
    """A mixture of experts, which are divided along an axis."""
    ir = popxl.Ir(axes=AXES[chips])
    with ir.main_graph:
        x = popxl.h2d_stream((64, 128), popxl.bfloat16, "x")
        addons.train_step(Mixture(), x, optimizer=partial(optimizers.adamw, lr=0.1), group="tensor")
    session(ir)


def pipeline(schedule: str, chips: int) -> None:
    """Two stages, each on a chip of its own, of half as many replicas as there are chips; gradients are summed."""
    ir = popxl.Ir(replication=chips // 2)
    ir.num_host_transfers = steps = 4
    with ir.main_graph, popxl.in_sequence():
        x_in = popxl.h2d_stream((16, 64), popxl.float32, "x")
        facts, grads, made = [], [], []
        for device in range(2):
            with popxl.ipu(device):
                one, graph = Layers(64).create_graph(x_in.spec)
                means, grad = autodiff_with_accumulation(
                    graph, graph.args.tensors, grads_required=graph.graph.inputs[:1]
                )
                facts.append((one.init(f"layer{device}"), means.init(f"means{device}")))
                grads.append(grad)
                made.append(graph)
        with pipelined_execution(steps, schedule) as p:
            with p.stage(0), popxl.ipu(0):
                first = made[0].bind(facts[0][0]).call_with_info(ops.host_load(x_in))
                x = first.outputs[0].copy_to_ipu(1)
            with p.stage(1), popxl.ipu(1):
                last = made[1].bind(facts[1][0]).call_with_info(x)
            with p.stage(2), popxl.ipu(1):
                bound = grads[1].bind(facts[1][1])
                (dx,) = bound.call(last.outputs[0], args=p.stash_and_restore_activations(last, grads[1]))
                dx = dx.copy_to_ipu(0)
            with p.stage(3), popxl.ipu(0):
                grads[0].bind(facts[0][1]).call(dx, args=p.stash_and_restore_activations(first, grads[0]))
        for device, (variables, means) in enumerate(facts):
            with popxl.ipu(device):
                for name, mean in means.accum.to_dict().items():
                    whole = ops.collectives.replicated_all_reduce(mean, "mean")
                    ops.scaled_add_(variables.to_dict()[name], whole, b=-0.01)
    session(ir)


PROGRAMS: Mapping[str, Callable[[int], None]] = {
    "a layer divided along an axis": partial(along_axes, lambda data, tensor: training(data, tensor, 256)),
    "blocks of a GPT, tensor-parallel": partial(along_axes, partial(pod.training, 2, 1024, 64)),
    "GPT, tensor-parallel": gpt,
    "sharded optimiser": lambda chips: in_pieces(chips, 16, 256),
    "data parallel, Adam": lambda chips: trained("Adam", chips, rows=16, width=128, hidden=256),
    "experts along an axis": experts,
    "pipeline, gpipe": partial(pipeline, "gpipe"),
    "pipeline, 1f1b": partial(pipeline, "1f1b"),
    **{f"random {seed}": partial(lambda seed, chips: session(drawn(seed, AXES[chips])), seed) for seed in range(43)},
}
"""By name; each is made for a number of chips."""


def machine(name: str, kind: str, chips: int) -> str:
    """What a program is compiled for."""
    return (OF_PIPELINES if kind == "tpu" and "pipeline" in name else MACHINES[kind])[chips]


def sent(name: str, kind: str, chips: int) -> CommunicationReport:
    """What a program sends on a machine, as it says and as it was compiled."""
    ir, device = caught(partial(PROGRAMS[name], chips), machine(name, kind, chips))
    ir.options.precision = "default"
    return communication_of_program(ir, compile_program(ir, device))


def lines(names: list[str], kinds: list[str], counts: list[int]) -> Iterator[str]:
    """The table in Markdown: a line for each program, and what differs."""
    yield "| | machine | collectives said | bytes said | compiled | bytes compiled | |"
    yield "|---" * 7 + "|"
    for kind in kinds:
        for chips in counts:
            agree = 0
            for name in names:
                found = sent(name, kind, chips)
                sums = np.sum(
                    [(e.expected, e.expected_bytes, e.compiled, e.compiled_bytes) for e in found.exchanges]
                    or [[0] * 4],
                    axis=0,
                )
                verdict = "; ".join(found.differences) or ", ".join(sorted({e.verdict for e in found.exchanges}))
                agree += not found.differences
                yield f"| {name} | {machine(name, kind, chips)} | {' | '.join(map(str, sums))} | {verdict} |"
            yield f"{kind}, {chips} chips: {agree} of {len(names)} send what they say."


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.targets.communication", description=__doc__.split("\n")[0])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=[*PROGRAMS])
    parser.add_argument("--kinds", nargs="+", choices=MACHINES, default=[*MACHINES])
    parser.add_argument("--chips", nargs="+", type=int, choices=AXES, default=[*AXES])
    options = parser.parse_args()
    compile_faster()
    for line in lines(options.programs, options.kinds, options.chips):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
