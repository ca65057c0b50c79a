"""A Llama as large as a pod, as a pipeline: built, and compiled for devices that are not here. Nothing runs.

    python -m tests.benchmarks.pod_pipeline                                   # 126 layers, width 16 384: built
    python -m tests.benchmarks.pod_pipeline --target "gpu h100:512"           # and each stage compiled for 64 devices
    python -m tests.benchmarks.pod_pipeline --target "gpu h100:512" --picture docs/time/pod-pipeline.svg
    python -m tests.benchmarks.pod_pipeline --layers 8 --width 1024 --hidden 2816 --vocabulary 8192 --heads 8 \
        --stages 2 --tensor 2 --data 2 --target "gpu h100:8"

Blocks, the embedding and the head are divided along the axis "tensor". Variables are float32, in pieces along "data",
and so is the state of AdamW; a step puts weights together in bfloat16, sends micro-batches of one text through the
stages by a schedule, with layers recomputed for their gradients, and shares out the sums of these.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.base.pages import Table, bytes_text, seconds_text
from popxl.base.pictures import bars
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, Embedding, Linear, RMSNorm, TransformerBlock
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from popxl_addons.rts import gather_replica_sharded_tensor
from popxl_addons.transforms.pipeline_timeline import PipelineTimeline
from popxl_addons.transforms.pipelining import StageContext
from tests.benchmarks.pod import report_compiled, reporter

DTYPE = popxl.bfloat16
PRECISION = addons.MixedPrecision(DTYPE)

SIZES = {  # of Llama 3.1 405B, https://arxiv.org/abs/2407.21783, section 3.2; on 512 devices
    "layers": 126,
    "width": 16384,
    "hidden": 53248,
    "heads": 128,
    "key_heads": 8,
    "vocabulary": 128256,
    "length": 8192,
    "micro_batches": 16,
    "stages": 8,
    "tensor": 8,
    "data": 8,
}


class Part(NamedTuple):
    """A stage, bound to its weights, with its variables, its gradient and the sums of this."""

    graph: addons.BoundGraph
    variables: addons.NamedTensors
    backward: addons.GraphWithNamedArgs
    sums: addons.NamedTensors


class Stage(addons.Module):
    """Some layers of the model; the first stage has the embedding, too, and the last one the head and the loss."""

    def __init__(self, options: argparse.Namespace, layers: int) -> None:
        super().__init__()
        attention = Attention(options.heads, options.key_heads, rotary=500000.0, bias=False, tensor="tensor")
        mlp = MLP(options.hidden, "swiglu", bias=False, tensor="tensor")
        self.block = TransformerBlock(attention, mlp, "rms")
        self.count, self.layers = layers, addons.Module()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, layer = self.block.create_graph(x)
        for number in range(self.count):
            (x,) = layer.bind(self.layers.add_variable_inputs(number, facts)).call(x)
        return x


class First(Stage):
    def __init__(self, options: argparse.Namespace, layers: int) -> None:
        super().__init__(options, layers)
        self.embedding = Embedding(DTYPE, options.vocabulary, options.width, replica_grouping="data")

    def build(self, tokens: popxl.Tensor, first_row: popxl.Tensor) -> popxl.Tensor:
        rows = self.embedding(tokens - first_row)
        return super().build(replicated_all_reduce_identical_grad_inputs(rows, group="tensor"))


class Last(Stage):
    def __init__(self, options: argparse.Namespace, layers: int) -> None:
        super().__init__(options, layers)
        self.norm = RMSNorm()
        self.head = Linear(options.vocabulary // options.tensor, bias=False, replica_grouping="data", group_axis=1)

    def build(self, x: popxl.Tensor, labels: popxl.Tensor, first_row: popxl.Tensor) -> popxl.Tensor:
        x = replicated_all_reduce_identical_inputs(self.norm(super().build(x)), group="tensor")
        logits = ops.cast(self.head(x).reshape((labels.nelms, -1)), popxl.float32)
        return ops.mean(cross_entropy_sharded_loss(logits, labels.flatten() - first_row, replica_grouping="tensor"))


def training(options: argparse.Namespace) -> tuple[popxl.Ir, StageContext]:
    """A training step: the micro-batches of a replica through all stages, and the update of each stage."""
    ir = popxl.Ir(axes={"data": options.data, "stage": "ipus", "tensor": options.tensor})
    ir.num_host_transfers = options.micro_batches
    last, each = options.stages - 1, math.ceil(options.layers / options.stages)
    counts = [min(each, options.layers - each * s) for s in range(options.stages)]
    text = popxl.TensorSpec((1, options.length), popxl.int32)
    hidden = popxl.TensorSpec((1, options.length, options.width), DTYPE)
    with ir.main_graph, popxl.in_sequence():
        tokens, labels = (popxl.h2d_stream(text.shape, text.dtype, name) for name in ("tokens", "labels"))
        losses = popxl.d2h_stream((), popxl.float32, "losses")
        rows = Embedding.get_offsets(options.vocabulary, options.tensor)
        parts, begin = [], {}
        for s, count in enumerate(counts):
            with popxl.ipu(s):
                if s in (0, last):
                    begin[s] = popxl.variable(rows, popxl.int32, f"first_row{s}", replica_grouping="data")
                module = (
                    First(options, count) if s == 0 else Last(options, count) if s == last else Stage(options, count)
                )
                specs = [text, begin[s].spec] if s == 0 else [hidden, text, begin[s].spec] if s == last else [hidden]
                facts, graph = PRECISION.create_graph(module, *specs)
                sums, backward = addons.autodiff_with_accumulation(
                    graph,
                    graph.args.tensors,
                    graph.graph.outputs,
                    graph.graph.inputs[:1] if s else (),
                    dtype=popxl.float32,
                    memory="nothing",
                )
                variables = facts.init_sharded(f"stage{s}")
                pieces = PRECISION.cast(variables, graph.args)
                weights = addons.NamedTensors.from_dict(
                    {
                        name: gather_replica_sharded_tensor(piece, False, variables[name].replica_grouping)
                        for name, piece in pieces.to_dict().items()
                    }
                )
                parts.append(Part(graph.bind(weights), variables, backward, sums.init(f"sums{s}")))
        with addons.pipelined_execution(options.micro_batches, options.schedule) as p:
            sites, x = [], None
            for s, part in enumerate(parts):
                with p.stage(s), popxl.ipu(s):
                    first = [ops.host_load(tokens)] if s == 0 else [x, ops.host_load(labels)] if s == last else [x]
                    sites.append(part.graph.call_with_info(*first, *([begin[s]] if s in begin else [])))
                    x = sites[-1].outputs[0]
                    if s < last:
                        x = x.copy_to_ipu(s + 1)
            with p.stage(last), popxl.ipu(last):
                ops.host_store(losses, x)
            gradient = popxl.constant(1.0)
            for s, part in reversed([*enumerate(parts)]):
                with p.stage(2 * last + 1 - s), popxl.ipu(s):
                    kept = p.stash_and_restore_activations(sites[s], part.backward.grad_graph_info)
                    made = part.backward.bind(part.sums).call(gradient, args=kept)
                    gradient = made[0].copy_to_ipu(s - 1) if s else None
        for s, part in enumerate(parts):
            with popxl.ipu(s):
                gradients = {
                    name: ops.collectives.replicated_reduce_scatter(
                        mean, "mean", part.variables[name].replica_grouping, True
                    )
                    for name, mean in part.sums.accum.to_dict().items()
                }
                optimizers.adamw(part.variables, gradients, lr=1e-4)
                ops.var_updates.accumulator_zero_(part.sums.mean_accum_counter)
    return ir, p


def wires(cost: Any, sent: Any) -> Table:
    """What a step sends along each axis and from stage to stage: in the program, as compiled, and over which wires."""
    said = Counter[str]()
    for each in sent.program.collectives:
        said[each.groups.rpartition("along ")[2].replace(", ", " × ")] += each.turns * each.bytes
    rows = [
        [axis.name, bytes_text(said[axis.name]), bytes_text(axis.bytes), axis.over, seconds_text(axis.seconds)]
        for axis in cost.axes
    ]
    copied = [bytes_text(sent.copied.expected_bytes), bytes_text(sent.copied.compiled_bytes)]
    return Table(["axis", "in the program", "compiled", "over", "takes"], [*rows, ["stage", *copied, "", ""]])


def draw(timeline: PipelineTimeline, path: Path) -> None:
    """Draw when each stage computes."""
    half = timeline.devices
    spans = sorted((t.device, "forward" if t.task.stage < half else "backward", t.start, t.end) for t in timeline.tasks)
    title = f"A step of {half} stages, estimated: they wait {timeline.bubble:.0%} of the time"
    bars(title, [(f"stage {device}", kind, start, end) for device, kind, start, end in spans]).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--schedule", default="1f1b", help="the name of a schedule")
    parser.add_argument("--target", help='a machine, such as "gpu h100:512"')
    parser.add_argument("--picture", type=Path, help="the file for the timeline on the target, as SVG")
    options = parser.parse_args()
    said = reporter()
    ir, pipeline = training(options)
    count = sum(math.prod(v.shape_on_host) for v in ir.main_graph.variables if v.name.startswith("stage"))
    said(f"built, {count / 1e9:.1f} billion parameters")
    bubble = pipeline.schedule.simulate([1.0] * options.stages + [3.0] * options.stages).bubble
    print(f"devices wait for {bubble:.1%} of the time, if stages take as long as each other")
    print(f"sends {ir.communication().bytes / 1e9:.1f} GB a step and replica")
    if options.target is None:
        return
    session, sent = report_compiled(ir, options.target, said)
    cost, stages = session.cost(), pipeline.pipeline.stages
    print(wires(cost, sent).text())
    print(*(f"IPU {each.ipu} computes for {seconds_text(each.seconds)}" for each in cost.ipus), sep="\n")
    assert cost.seconds is not None and cost.utilisation is not None and cost.step is not None
    durations = [cost.step.inclusive[stage.graph.name] / options.micro_batches for stage in stages]
    timeline = pipeline.schedule.simulate(durations)
    print(f"a step of {seconds_text(cost.seconds)}, at {cost.utilisation:.0%} of the published rate")
    print(
        f"the stages by themselves: {seconds_text(timeline.seconds)}, of which devices wait for {timeline.bubble:.1%}"
    )
    said("priced")
    if options.picture is not None:
        draw(timeline, options.picture)


if __name__ == "__main__":
    main()
