"""Programs whose memory is foreseen, and compared with what compilers say: `tests.targets.memory`.

They are of the size of real ones, hundreds of megabytes to some gigabytes, as small ones lie in the caches of a chip.
`LARGE` are the same, of the size that fills a chip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers import Linear
from popxl_addons.optimizers import AdamOptimizerStep
from tests.benchmarks import pod
from tests.popxl_addons.gpt.model import Config
from tests.popxl_addons.gpt.variants import VARIANTS

C = ops.collectives
F32, BF16 = popxl.float32, popxl.bfloat16


def gpt_of(n: int) -> Config:
    """A GPT of two blocks."""
    size = {"vocabulary": 8192 * n * n, "width": 1024 * n, "heads": 8 * n, "sequence": 512 * n, "batch": 16 * n}
    return Config(layers=2, micro_batches=8, **size)


def session(ir: popxl.Ir) -> None:
    """Compile a program, with products as the chip likes them."""
    ir.options.precision = "default"
    popxl.Session(ir, "ipu_hw")


def variable(*shape: int, name: str, dtype: popxl.dtype = F32) -> popxl.tensor.Variable:
    return popxl.variable(popxl.initial.normal(shape, std=0.02, seed=len(name)), dtype, name)


class Layers(addons.Module):
    """Linear layers with gelu between them."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = addons.Module.from_list([Linear(width) for width in widths])

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for layer in self.layers:
            x = ops.gelu(layer(x))
        return x


def forward_only(rows: int) -> None:
    """A network that is only used."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((rows, 2048), F32, "x"))
        facts, graph = Layers(8192, 8192, 1024).create_graph(x)
        (y,) = graph.bind(facts.init()).call(x)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)
    session(ir)


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


def convolutions(batch: int, side: int, channels: Sequence[int] = (3, 64, 128, 128)) -> None:
    """Convolutions over images, and their gradients."""
    ir = popxl.Ir()

    def network(x: popxl.Tensor, *weights: popxl.Tensor) -> popxl.Tensor:
        for w in weights:
            x = ops.relu(ops.conv(x, w, padding=(1, 1, 1, 1)))
        return ops.mean(x, (2, 3))

    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((batch, channels[0], side, side), F32, "x"))
        weights = [variable(b, a, 3, 3, name=f"w{i}") for i, (a, b) in enumerate(pairwise(channels))]
        graph = ir.create_graph(network, x, *weights)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, x, *weights)
        update(weights, ops.call(grad.graph, call.outputs[0], inputs_dict=grad.inputs_dict(call)))
    session(ir)


def update(weights: Sequence[popxl.Tensor], gradients: Sequence[popxl.Tensor]) -> None:
    for w, g in zip(weights, gradients, strict=True):
        ops.scaled_add_(w, g, b=-0.01)


def vocabulary(tokens: int, words: int) -> None:
    """A table of words, looked up, multiplied with, and updated."""
    ir = popxl.Ir()

    def scores(tokens: popxl.Tensor, table: popxl.Tensor) -> popxl.Tensor:
        return ops.gather(table, tokens) @ table.T

    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((tokens,), popxl.int32, "tokens"))
        labels = ops.host_load(popxl.h2d_stream((tokens,), popxl.int32, "labels"))
        table = variable(words, 1024, name="table")
        graph = ir.create_graph(scores, x, table)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, x, table)
        loss, dlogits = addons.ops.cross_entropy_with_grad(call.outputs[0], labels)
        (gradient,) = ops.call(grad.graph, dlogits, inputs_dict=grad.inputs_dict(call))
        ops.scaled_add_(table, gradient, b=-0.01)
        ops.host_store(popxl.d2h_stream(loss.shape, loss.dtype, "loss"), loss)
    session(ir)


def repeated(rows: int) -> None:
    """A layer that a value goes through eight times, and the gradient of that."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((rows, 2048), F32, "x"))
        w = variable(2048, 2048, name="w")

        def network(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
            layer = popxl.gcg().ir.create_graph(lambda x, w: (ops.tanh(x @ w), w), x, w)
            return ops.repeat(layer, 8, x, w)[0]

        graph = ir.create_graph(network, x, w)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, x, w)
        (gradient,) = ops.call(grad.graph, call.outputs[0], inputs_dict=grad.inputs_dict(call))
        ops.scaled_add_(w, gradient, b=-0.01)
    session(ir)


def attention(batch: int, heads: int) -> None:
    """Attention over long sequences, in bfloat16, only used."""
    ir = popxl.Ir()
    with ir.main_graph:
        shape = (batch, heads, 2048, 128)
        q, k, v = (ops.host_load(popxl.h2d_stream(shape, BF16, name)) for name in "qkv")
        shares = ops.softmax(ops.cast(q @ k.transpose((0, 1, 3, 2)), F32), axis=-1)
        y = ops.cast(shares, BF16) @ v
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)
    session(ir)


def random_program(seed: int, rows: int = 8192) -> None:
    """Products, sums, and what is computed element by element, in a random order."""
    rng = np.random.default_rng(seed)
    ir = popxl.Ir()
    with ir.main_graph:
        width = 4096
        known = [ops.host_load(popxl.h2d_stream((rows, width), F32, f"x{i}")) for i in range(2)]
        weights = [variable(width, width, name=f"w{i}") for i in range(2)]
        for _ in range(14):
            a, b = (known[rng.integers(len(known))] for _ in range(2))
            match rng.integers(5):
                case 0 | 1:
                    known.append(a @ weights[rng.integers(2)])
                case 2:
                    known.append(ops.exp(a) * b)
                case 3:
                    known.append(a - ops.max(b, 1, keepdims=True))
                case 4:
                    known.append(ops.sin(a) + b)
        ops.host_store(popxl.d2h_stream(known[-1].shape, F32, "y"), known[-1])
        ops.host_store(popxl.d2h_stream((), F32, "s"), ops.sum(known[-2] * known[-3]))
    session(ir)


def energies() -> None:
    """Products whose squares are summed, and which are multiplied again."""
    ir = popxl.Ir()
    with ir.main_graph:
        x, sums = ops.host_load(popxl.h2d_stream((12288, 3072), F32, "x")), []
        for i in range(3):
            x = x @ variable(3072, 3072, name=f"w{i}")
            sums.append(ops.sum(x * x))
        ops.host_store(popxl.d2h_stream(x.shape, F32, "y"), x)
        ops.host_store(popxl.d2h_stream((), F32, "sum"), sums[0] + sums[1] + sums[2])
    session(ir)


def penalised() -> None:
    """A network whose loss is the mean of the squares of all that passes through it, and its gradients."""
    ir = popxl.Ir()

    def network(x: popxl.Tensor, *weights: popxl.Tensor) -> popxl.Tensor:
        means = []
        for w in weights:
            x = x @ w
            means.append(ops.mean(x * x))
            x = ops.tanh(x)
        return means[0] + means[1] + means[2]

    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((8192, 2048), F32, "x"))
        shapes = ((2048, 6144), (6144, 6144), (6144, 2048))
        weights = [variable(*shape, name=f"w{i}") for i, shape in enumerate(shapes)]
        graph = ir.create_graph(network, x, *weights)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, x, *weights)
        update(weights, ops.call(grad.graph, popxl.constant(1.0, F32), inputs_dict=grad.inputs_dict(call)))
        ops.host_store(popxl.d2h_stream((), F32, "loss"), call.outputs[0])
    session(ir)


def blocks_in_bfloat16(layers: int, width: int, rows: int) -> None:
    """Blocks of a transformer, divided among four chips, with Adam's state in remote buffers."""
    session(pod.training(layers, width, rows, 1, 4))


Programs = Mapping[str, tuple[int, Callable[[], object]]]
"""By name: how many chips a program is for, and what makes its session."""


def programs(n: int) -> Programs:
    """Twenty programs; whose sizes are so many times larger, or twice as many times."""
    size = {"rows": 8192 * n * n, "width": 1024 * n, "hidden": 4096 * n}
    gpt = {name: partial(make, gpt_of(n)) for name, make in VARIANTS.items()}
    del gpt["pipelined"]  # a plan, of which each executable is compiled alone
    return {
        "network, only used": (1, partial(forward_only, 16384 * n * n)),
        "network, plain gradients": (1, partial(trained, "plain", **size)),
        "network, Adam": (1, partial(trained, "Adam", **size)),
        "network, Adam, bfloat16": (1, partial(trained, "Adam", dtype=BF16, **size)),
        "network, Adam, 4 chips": (4, partial(trained, "Adam", 4, **size)),
        "weights and momenta in pieces, 4 chips": (4, partial(in_pieces, 4, 4096 * n * n, 1024 * n)),
        "convolutions": (1, partial(convolutions, 64 * n, 112 * n)),
        "vocabulary": (1, partial(vocabulary, 4096 * n, 65536 * n)),
        "a layer, eight times": (1, partial(repeated, 16384 * n * n)),
        "attention, bfloat16": (1, partial(attention, 8 * n, 8 * n)),
        "random 1": (1, partial(random_program, 1, 8192 * n * n)),
        "random 2": (1, partial(random_program, 2, 8192 * n * n)),
        "blocks, bfloat16, 4 chips": (4, partial(blocks_in_bfloat16, 2 * n, 4096 * n, 2048 * n)),
        **{f"GPT, {name}": (4 if "tensor" in name else 1, make) for name, make in gpt.items()},
        "GPT, plain, dropout": (1, partial(VARIANTS["plain"], replace(gpt_of(n), dropout=0.1))),
    }


PROGRAMS, LARGE = programs(1), {f"{name}, large": program for name, program in programs(2).items()}
"""Those of some hundred megabytes, and those that fill a chip."""

OTHERS: Programs = {
    **{f"random {seed}": (1, partial(random_program, seed)) for seed in range(3, 9)},
    "products, squared and summed": (1, energies),
    "the same, trained": (1, penalised),
    "convolutions, 96 images": (1, partial(convolutions, 96, 64, (3, 64, 128, 256))),
    "convolutions, 32 images": (1, partial(convolutions, 32, 128, (16, 128, 128, 128))),
    "network, Adam, bfloat16, wide": (1, partial(trained, "Adam", dtype=BF16, rows=16384, width=2048, hidden=3072)),
    "network, plain gradients, wide": (1, partial(trained, "plain", rows=12288, width=1536, hidden=5120)),
}
"""Programs that no rule was made for: how far one can trust the rules."""
