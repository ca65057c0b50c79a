"""Time of a training step of a GPT on a cluster, from the graphs of its parts, without compiling or running them.

The model is written with the kit: one layer, the embedding, the head with its loss, and the optimiser, each as on one
chip, with its gradient graph. Each of their ops is a kernel that the host dispatches, as in PyTorch. The step is
composed of them: layers form the stages of a pipeline, micro-batches go through its schedule, activations are sent from
stage to stage, gradients are summed along the data axis, and the optimiser updates each chip's share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import popxl
from popxl import ops
from popxl.extend.targets import Chip, Efficiency, GraphTime, Target, collective_time, graph_time, kernels_of, spans_of
from popxl_addons.layers import MLP, LayerNorm
from popxl_addons.layers.tensor_parallel import TensorParallel
from popxl_addons.module import Module
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_grad_inputs
from popxl_addons.optimizers import AdamOptimizerStep
from popxl_addons.transforms import PipelineSchedule, autodiff

__all__ = ["MEGATRON_ON_A100", "GPTLayout", "GPTSizes", "GPTStepTime", "gpt_step_time"]

MEGATRON_ON_A100 = Efficiency(
    products=0.893,
    memory=0.471,
    network=0.442,
    outside=0.8,
    launch=2.5e-6,
    dispatch=82.7e-6,
    tiles=((256, 128), (128, 128), (128, 64), (64, 64)),
    depth=64,
    sources=("products, memory, network, dispatch: fitted by `python -m tests.targets.gpt_times --fit`",),
)
"""Efficiency of Megatron-LM on A100s: its kernels in half precision, dispatched by PyTorch. See `docs/time.md`."""

BYTES_OF_STATE = 18
"""Bytes of a parameter with its gradient and AdamW's state in mixed precision."""


class GPTSizes(NamedTuple):
    """Sizes of a GPT.

    Attributes:
        layers, hidden, heads: sizes of the transformer.
        sequence: tokens of a text.
        vocabulary: tokens that there are.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int = 51200

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return 12 * self.hidden**2 + 13 * self.hidden


class GPTLayout(NamedTuple):
    """Parallelism of a step; neighbouring chips form the tensor axis, then the data axis, then the pipeline.

    Attributes:
        tensor, data, pipeline: chips along each axis.
        micro_batch: texts that a replica computes at a time.
        global_batch: texts of a step, of all replicas.
    """

    tensor: int
    data: int
    pipeline: int
    micro_batch: int
    global_batch: int

    @property
    def chips(self) -> int:
        """All chips."""
        return self.tensor * self.data * self.pipeline

    @property
    def steps(self) -> int:
        """Micro-batches that go through a pipeline."""
        return self.global_batch // (self.data * self.micro_batch)


@dataclass(frozen=True)
class GPTStepTime:
    """Time of a training step.

    Attributes:
        seconds: time of the step.
        pipeline: until the last backward stage has ended, in seconds.
        bubble: share of this time in which chips wait, from 0 to 1.
        reduction: seconds that the gradients are summed.
        optimizer: seconds of the update.
        network: seconds of collectives within a stage for one micro-batch.
        bound: bottleneck of the layers of a stage: the "chip", or the "host", which dispatches.
        recomputes: whether the gradient recomputes layers.
        utilisation: model FLOPs utilisation: of the products without recomputation, by the published rate.
        chip_hours: seconds of all chips, in hours.
    """

    seconds: float
    pipeline: float
    bubble: float
    reduction: float
    optimizer: float
    network: float
    bound: str
    recomputes: bool
    utilisation: float
    chip_hours: float


def gpt_step_time(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    tensor: int = 1,
    data: int = 1,
    pipeline: int = 1,
    micro_batch: int,
    global_batch: int,
    chips: int | None = None,
    vocabulary: int = 51200,
    chip: str | Target = "gpu a100",
    efficiency: Efficiency | None = MEGATRON_ON_A100,
    recompute: bool | None = None,
) -> GPTStepTime:
    """Time of one training step of a GPT in half precision, with Adam in float32, by 1F1B.

    Args:
        layers, hidden, heads, sequence, vocabulary: sizes of the model.
        tensor, data, pipeline: chips along each axis.
        micro_batch: texts that a replica computes at a time.
        global_batch: texts of a step, of all replicas.
        chips: number of chips, as a check of the product of the axes.
        chip: the machine's kind of chip, as `popxl.Target` takes it.
        efficiency: attained share of the chip's figures; that of its own figures for `None`.
        recompute: whether the gradient recomputes layers; by default if the memory of a chip does not hold the
            activations.

    Raises:
        ValueError: if the axes do not multiply to `chips`, or do not divide the layers, heads or batch.

    Example:
        >>> from popxl_addons.step_time import gpt_step_time
        >>> sizes = dict(layers=24, hidden=2048, heads=16, sequence=1024)
        >>> found = gpt_step_time(**sizes, data=8, micro_batch=8, global_batch=128)
        >>> 0.5 < found.seconds < 2
        True
    """
    sizes = GPTSizes(layers, hidden, heads, sequence, vocabulary)
    layout = GPTLayout(tensor, data, pipeline, micro_batch, global_batch)
    _check(sizes, layout, chips)
    target = Target(chip) if isinstance(chip, str) else chip
    figures = target.chip if efficiency is None else target.chip.model_copy(update={"efficiency": efficiency})
    recomputes = _keeps_too_much(sizes, micro_batch, figures) if recompute is None else recompute
    network = _Network(figures, layout)
    model_parts = [_part(kind, sizes, tensor, micro_batch, network) for kind in ("layer", "embedding", "head")]
    layer, _, head = model_parts
    stage_layers = layers // pipeline
    stages = [_stage(stage, pipeline, stage_layers, model_parts, recomputes) for stage in range(pipeline)]
    transfer = network.stage_transfer(2 * micro_batch * sequence * hidden) if pipeline > 1 else 0.0
    times = [forward for forward, _ in stages] + [backward for _, backward in reversed(stages)]
    timeline = _schedule(pipeline, layout.steps).simulate([_stage_seconds(time, figures) + transfer for time in times])
    parameters = stage_layers * sizes.layer_parameters / tensor
    embedded = (vocabulary / tensor + sequence) * hidden
    reduction = network.all_reduce(2 * (parameters + embedded), "data")
    if pipeline > 1:  # the embedding and the head are one table, on two stages
        reduction += network.all_reduce(2 * vocabulary // tensor * hidden, "ends")
    adam = graph_time(_adam(), figures, lambda *_: 0.0).device  # for the numbers of one kernel
    update = adam * round(parameters + embedded) / _ADAM
    seconds = timeline.seconds + reduction + update
    flops = 3 * layout.steps * (layers * layer[0].flops + head[0].flops) / pipeline
    total = GraphTime().plus(layer[0], stage_layers).plus(layer[1], stage_layers)
    return GPTStepTime(
        seconds=seconds,
        pipeline=timeline.seconds,
        bubble=timeline.bubble,
        reduction=reduction,
        optimizer=update,
        network=total.network,
        bound="chip" if total.device > _host(total, figures) else "host",
        recomputes=recomputes,
        utilisation=flops / (seconds * figures.rate("float16")),
        chip_hours=layout.chips * seconds / 3600,
    )


def _check(sizes: GPTSizes, layout: GPTLayout, chips: int | None) -> None:
    if chips is not None and chips != layout.chips:
        raise ValueError(
            f"gpt_step_time: `tensor`, `data` and `pipeline` are {layout[:3]}, of {layout.chips} chips in all; `chips` "
            f"is {chips}."
        )
    for name, count, factor, axes in (
        ("layers", sizes.layers, layout.pipeline, "pipeline"),
        ("heads", sizes.heads, layout.tensor, "tensor"),
        ("global_batch", layout.global_batch, layout.data * layout.micro_batch, "data` times `micro_batch"),
    ):
        if factor < 1 or count % factor or count < 1:
            raise ValueError(f"gpt_step_time: `{name}` is {count}; expected a multiple of `{axes}`, which is {factor}.")


def _host(time: GraphTime, figures: Chip) -> float:
    return time.dispatched * figures.efficiency.dispatch


def _stage(
    stage: int, pipeline: int, layers: int, model_parts: Sequence[tuple[GraphTime, GraphTime]], recomputes: bool
) -> tuple[GraphTime, GraphTime]:
    """Work of a stage's forward and backward pass."""
    layer, embedding, head = model_parts
    forward, backward = GraphTime().plus(layer[0], layers), GraphTime().plus(layer[1], layers)
    if recomputes:
        backward = backward.plus(layer[0], layers)
    for model_part, is_included in ((embedding, stage == 0), (head, stage == pipeline - 1)):
        if is_included:
            forward, backward = forward.plus(model_part[0]), backward.plus(model_part[1])
    return forward, backward


def _stage_seconds(time: GraphTime, figures: Chip) -> float:
    """Seconds of a stage: the maximum of chip time and dispatch time on the host, smoothed.

    Where both have as much to do they wait for each other now and then, as neither is always ahead: fourth powers make
    that 19 % more. This is assumed.
    """
    return (time.device**4 + _host(time, figures) ** 4) ** 0.25


def _keeps_too_much(sizes: GPTSizes, micro_batch: int, figures: Chip) -> bool:
    """Whether model state and activations of a micro-batch exceed the memory of one chip.

    It is a setting of the model, not of its layout: a model that is too large for one chip is trained with
    recomputation. The activations of a layer are from Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.
    """
    s, b, h = sizes.sequence, micro_batch, sizes.hidden
    layer = s * b * h * (34 + 5 * sizes.heads * s / h)
    state = BYTES_OF_STATE * (sizes.layers * sizes.layer_parameters + sizes.vocabulary * h)
    return state + layer * sizes.layers > figures.memory_bytes


# The parts of the model -----------------------------------------------------------------------------------------------


class _UnfusedAttention(Module):
    """Attention by separate products, softmax and dropout, with one projection for queries, keys and values."""

    def __init__(self, heads: int, tensor: Any):
        super().__init__()
        self.heads, self.tensor = heads, tensor

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> Any:
        """`x` of shape (batch, length, width) to the same."""
        parallel = TensorParallel.along(self.tensor, "Attention")
        batch, length, width = x.shape
        heads = parallel.share(self.heads, "`heads`")
        local_width = heads * (width // self.heads)
        self.qkv, self.output = parallel.columns(3 * local_width, True), parallel.rows(width, True)
        projections = ops.split(self.qkv(parallel.entered(x)), 3, axis=-1)
        q, k, v = (t.reshape((batch, length, heads, local_width // heads)).transpose((0, 2, 1, 3)) for t in projections)
        weights = ops.dropout(ops.softmax(q @ k.transpose((0, 1, 3, 2)), -1), seed, 0.1)
        return self.output((weights @ v).transpose((0, 2, 1, 3)).reshape((batch, length, local_width)))


class _Layer(Module):
    """A transformer layer, with dropout after attention and MLP."""

    def __init__(self, heads: int, tensor: Any):
        super().__init__()
        self.attention_norm, self.mlp_norm = LayerNorm(), LayerNorm()
        self.attention, self.mlp = _UnfusedAttention(heads, tensor), MLP(tensor=tensor)

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        """`x` of shape (batch, length, width) to the same."""
        x = x + ops.dropout(self.attention(self.attention_norm(x), seed), seed, 0.1)
        return x + ops.dropout(self.mlp(self.mlp_norm(x)), seed, 0.1)


class _Head(Module):
    """Final norm, vocabulary-parallel logits of all tokens, and loss in float32."""

    def __init__(self, vocabulary: int, tensor: Any):
        super().__init__()
        self.vocabulary, self.tensor = vocabulary, tensor
        self.norm = LayerNorm()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """`x` of shape (batch, length, width) to the loss."""
        parallel = TensorParallel.along(self.tensor, "Head")
        self.scores = parallel.columns(self.vocabulary // parallel.size, False)
        scores = ops.cast(self.scores(parallel.entered(self.norm(x))), popxl.float32)
        weights = ops.exp(scores - 1.0)
        total = ops.sum(weights, -1, keepdims=True)
        if parallel.group is not None:
            total = replicated_all_reduce_identical_grad_inputs(total, group=parallel.group)
        return ops.sum(ops.log(weights / total))


class _EmbeddingSum(Module):
    """Tokens and places to vectors, with dropout."""

    def __init__(self, tensor: Any):
        super().__init__()
        self.tensor = tensor

    def build(self, rows: popxl.Tensor, places: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        """Rows that were looked up, of shape (batch, length, width), to the text."""
        parallel = TensorParallel.along(self.tensor, "Embedding")
        if parallel.group is not None:
            rows = replicated_all_reduce_identical_grad_inputs(rows, group=parallel.group)
        return ops.dropout(rows + places, seed, 0.1)


def _part(kind: str, sizes: GPTSizes, tensor: int, micro_batch: int, network: _Network) -> tuple[GraphTime, GraphTime]:
    """Times of a part's forward and gradient graphs for one micro-batch."""
    shape = sizes.hidden, sizes.heads, sizes.sequence, sizes.vocabulary, tensor, micro_batch
    forward, backward = (
        graph_time(kernels, network.figures, network.tensor_collective) for kernels in _kernels(kind, *shape)
    )
    return forward, backward


@cache
def _kernels(kind: str, *shape: int) -> tuple[Any, Any]:
    """Kernels of a model part and of its gradient, cached by shape."""
    forward, backward = _graphs(kind, *shape)
    return kernels_of(forward), kernels_of(backward)


def _graphs(
    kind: str, hidden: int, heads: int, sequence: int, vocabulary: int, tensor: int, micro_batch: int
) -> tuple[popxl.Graph, popxl.Graph]:
    """Forward and gradient graph of a model part on one chip."""
    ir = popxl.Ir(axes={"tensor": tensor})
    group = "tensor" if tensor > 1 else None
    text = popxl.TensorSpec((micro_batch, sequence, hidden), popxl.float16)
    seed = popxl.TensorSpec((2,), popxl.uint32)
    with ir.main_graph:
        if kind == "layer":
            _, forward = _Layer(heads, group).create_graph(text, seed)
        elif kind == "head":
            _, forward = _Head(math.ceil(vocabulary / tensor) * tensor, group).create_graph(text)
        else:
            positions = popxl.TensorSpec((sequence, hidden), popxl.float16)
            _, forward = _EmbeddingSum(group).create_graph(text, positions, seed)
        wanted = [t for t in forward.graph.inputs if t.dtype.is_floating_point]
        backward = autodiff(forward, grads_required=wanted)
    return forward.graph, backward.graph


_ADAM = 1 << 20


@cache
def _adam() -> Any:
    ir = popxl.Ir()
    with ir.main_graph:
        variable, gradient = (popxl.TensorSpec((_ADAM,), dtype) for dtype in (popxl.float32, popxl.float16))
        _, graph = AdamOptimizerStep().create_graph(variable, gradient, lr=1e-3, first_order_dtype=popxl.float32)
    return kernels_of(graph.graph)


# The machine ----------------------------------------------------------------------------------------------------------


@cache
def _schedule(pipeline: int, steps: int) -> PipelineSchedule:
    stages = [*range(pipeline)]
    return PipelineSchedule.one_forward_one_backward(stages + stages[::-1], steps)


class _Network:
    """Communication times between chips, by position."""

    def __init__(self, figures: Chip, layout: GPTLayout) -> None:
        self.figures, self.layout = figures, layout

    def _time(self, kind: str, nbytes: float, members: range) -> float:
        all_chips = [(i,) for i in range(self.layout.chips)]
        spans = spans_of(self.figures, [(i,) for i in members], all_chips)
        return collective_time(self.figures, kind, nbytes, spans).seconds

    def tensor_collective(self, kind: str, nbytes: int, stride: int, size: int) -> float:
        """Time of a collective along the tensor axis."""
        return self._time(kind, nbytes, range(0, stride * size, stride))

    def all_reduce(self, nbytes: float, axis: str) -> float:
        """Time of an all-reduce along the data axis, or between the first stage and the last."""
        t, d, p, *_ = self.layout
        members = range(0, t * d, t) if axis == "data" else range(0, t * d * p, max(1, t * d * (p - 1)))
        return self._time("all-reduce", nbytes, members)

    def stage_transfer(self, nbytes: int) -> float:
        """Transfer time from a stage to its successor."""
        distance = self.layout.tensor * self.layout.data
        return self._time("collective-permute", nbytes, range(0, 2 * distance, distance))
