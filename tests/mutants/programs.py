"""Right programs of several replicas, from which mutants are made: of the kit, and as people write them by hand.

They are small, so that hundreds run in minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, Experts, LanguageConfig, LanguageModel, LayerNorm, Linear
from popxl_addons.transforms.autodiff import autodiff_with_accumulation
from tests.popxl.test_communication import training

C = ops.collectives
F32 = popxl.float32
MESH = {"data": 2, "tensor": 2}

GPT = LanguageConfig(vocabulary=8, width=8, layers=1, heads=4, context=6, bias=True)
LLAMA = LanguageConfig(
    vocabulary=8, width=8, layers=1, heads=4, key_heads=2, channels=2, hidden=8, rotary=100.0, norm="rms",
    activation="swiglu", bias="qkv", mlp_bias=False, head_norm=True, tied=False,
)  # fmt: skip


def normal(*shape: int) -> Any:
    return lambda: np.random.default_rng(sum(shape)).normal(size=shape) / 2


class Net(addons.Module):
    """Two layers with a norm between them, and the mean square of what comes out."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        a = self.add_variable_input("a", normal(x.shape[-1], 6), x.dtype)
        scale = self.add_variable_input("scale", partial(np.ones, 6), x.dtype)
        h = ops.gelu(x @ a) * scale
        b = self.add_variable_input("b", normal(6, 3), x.dtype)
        bias = self.add_variable_input("bias", normal(3), x.dtype)
        y = h @ b + bias
        return ops.mean(y * y)


class Language(addons.Module):
    """The cross entropy of a language model."""

    def __init__(self, config: LanguageConfig, tensor: str | None = None) -> None:
        super().__init__()
        self.model = LanguageModel(config, tensor=tensor)

    def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
        logits = self.model(tokens[:, :-1])
        return addons.ops.cross_entropy(logits.reshape((-1, logits.shape[-1])), tokens[:, 1:].flatten())


class Mixture(addons.Module):
    """Experts along an axis."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.inner, self.experts = Linear(8), Experts(4, chosen=2, capacity_factor=4.0, group=group)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        y, balance = self.experts(ops.tanh(self.inner(x)))
        return ops.mean(y * y) + balance * 0.01


class Ring(addons.Module):
    """Attention over texts in pieces."""

    def __init__(self, group: str) -> None:
        super().__init__()
        self.attention, self.norm = Attention(2, rotary=100.0, group=group), LayerNorm()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        y = self.attention(self.norm(x))
        return ops.mean(y * y)


class Block(addons.Module):
    """Attention and the network after it, whose heads and channels are divided."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(2, tensor="tensor"), MLP(8, tensor="tensor")
        self.first, self.second = LayerNorm(), LayerNorm()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = x + self.attention(self.first(x))
        x = x + self.mlp(self.second(x))
        return ops.mean(x * x)


def kit(
    module: Callable[[], addons.Module],
    axes: dict[str, int],
    shape: tuple[int, ...] = (4, 5),
    dtype: popxl.dtype = F32,
    optimizer: Any = None,
    **settings: Any,
) -> popxl.Ir:
    """A step of training by the kit; texts are fed alike to what divides a layer."""
    np.random.seed(1)
    ir = popxl.Ir(axes=axes)
    with ir.main_graph:
        x = popxl.h2d_stream(shape, dtype, "x")
        training = addons.train_step(module(), x, optimizer=optimizer or partial(optimizers.sgd, lr=0.1), **settings)
        ops.host_store(popxl.d2h_stream((), F32, "loss"), training.loss)
    return ir


def large_kit(*arguments: Any, **settings: Any) -> popxl.Ir:
    """A step of training by the kit, with weights so large that no gradient is lost in rounding."""
    ir = kit(*arguments, **settings)
    for v in ir.main_graph.variables:
        if v.dtype.is_floating_point and v.numbers().std():  # not scales of norms, nor biases
            v.data = v.numbers() * np.float32(15)
    return ir


def by_hand(axes: dict[str, int], group: Any = None, rule: str = "sgd", sharded: bool = False) -> popxl.Ir:
    """Data parallelism as people write it: a mean of each gradient, and the update; or of pieces of them."""
    ir = popxl.Ir(axes=axes)
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((4, 5), F32, "x"))
        facts, graph = Net().create_graph(x)
        grad = addons.autodiff(graph, grads_required=graph.args.values_flat())
        made = (facts.init_sharded() if sharded else facts.init()).to_dict()
        variables = {name: t if t.piece is None else t.piece for name, t in made.items()}
        whole = addons.NamedTensors.from_dict(
            {name: C.replicated_all_gather(t) if t.meta_shape else t for name, t in variables.items()}
        )
        call = graph.bind(whole).call_with_info(x)
        loss = C.replicated_all_reduce(call.outputs[0], "mean")
        ops.host_store(popxl.d2h_stream((), F32, "loss"), loss)
        gradients = grad.call(popxl.constant(1.0), args=grad.grad_graph_info.inputs_dict(call))
        for name, gradient in zip(graph.args.keys_flat(), gradients, strict=True):
            variable = variables[name]
            if variable.meta_shape:
                gradient = C.replicated_reduce_scatter(gradient, "mean", None, True)
            else:
                gradient = C.replicated_all_reduce(gradient, "mean", group)
            if rule == "momentum":
                momentum = popxl.variable(np.zeros(variable.shape), F32, f"{name}_momentum")
                ops.scaled_add_(momentum, gradient, a=0.9, b=1.0)
                gradient = momentum
            ops.scaled_add_(variable, gradient, b=-0.1)
    return ir


def accumulated(replicas: int) -> popxl.Ir:
    """Gradients of several micro-batches, in a loop; their means over replicas after it."""
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = 2
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((4, 5), F32, "x")
        facts, graph = Net().create_graph(stream.spec)
        mean_facts, backward = autodiff_with_accumulation(graph, graph.args.tensors, graph.graph.outputs)
        state, means = facts.init(), mean_facts.init("means")
        bound, back = graph.bind(state), backward.bind(means)

        for _ in range(2):
            call = bound.call_with_info(ops.host_load(stream))
            back.call(popxl.constant(1.0), args=backward.grad_graph_info.inputs_dict(call))
        for variable, gradient in zip(state.tensors, means.accum.tensors, strict=True):
            mean = C.replicated_all_reduce(gradient, "mean")
            ops.scaled_add_(variable, mean, b=-0.1)
        ops.var_updates.accumulator_zero_(means.mean_accum_counter)
    return ir


def divided_network(data: int, tensor: int) -> popxl.Ir:
    """Columns of the first matrix and rows of the second are divided, forward and backward by hand."""
    ir = popxl.Ir(axes={"data": data, "tensor": tensor})
    with ir.main_graph, popxl.in_sequence():
        tokens = ops.host_load(popxl.h2d_stream((4, 4), F32, "x"))
        x = C.replicated_all_gather(tokens, 0, "tensor")  # replicas that divide a layer have the same rows
        scale = popxl.variable(np.ones(4), F32, "scale")
        a = popxl.variable(normal(tensor, 4, 4)(), F32, "a", replica_grouping="data")
        b = popxl.variable(normal(tensor, 4, 4)(), F32, "b", replica_grouping="data")
        bias = popxl.variable(np.zeros(4), F32, "bias")
        n = x * scale
        h = ops.tanh(n @ a)
        y = C.replicated_all_reduce(h @ b, group="tensor") + bias
        loss = C.replicated_all_reduce(ops.mean(y * y), "mean", "data")
        ops.host_store(popxl.d2h_stream((), F32, "loss"), loss)
        dy = y * (2 / y.nelms)
        dh = (dy @ b.T) * (1 - h * h)
        dn = C.replicated_all_reduce(dh @ a.T, group="tensor")
        da = C.replicated_all_reduce(n.T @ dh, "mean", "data")
        db = C.replicated_all_reduce(h.T @ dy, "mean", "data")
        dbias = C.replicated_all_reduce(ops.sum(dy, 0), "mean", "data")
        dscale = C.replicated_all_reduce(ops.sum(dn * x, 0), "mean", "data")
        for variable, gradient in ((a, da), (b, db), (bias, dbias), (scale, dscale)):
            ops.scaled_add_(variable, gradient, b=-0.1)
    return ir


def dropped(replicas: int) -> popxl.Ir:
    """A dropout on data of each replica, with seeds of its own."""
    ir = popxl.Ir(axes={"data": replicas})
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((4, 5), F32, "x"))
        a = popxl.variable(normal(5, 6)(), F32, "a")
        own = ir.replica_grouping(group_size=1)
        seeds = popxl.variable(popxl.create_seeds(7, replicas=replicas), popxl.uint32, "seeds", replica_grouping=own)
        following, seed = ops.split_random_seed(seeds)
        ops.var_updates.copy_var_update_(seeds, following)
        h = ops.dropout(x @ a, seed, 0.5)
        dh = ops.dropout(h * (2 / h.nelms), seed, 0.5)
        ops.scaled_add_(a, C.replicated_all_reduce(x.T @ dh, "mean"), b=-0.1)
    return ir


def dropped_after_division(data: int, tensor: int) -> popxl.Ir:
    """A dropout on what a divided layer makes: replicas along `tensor` drop the same elements."""
    ir = popxl.Ir(axes={"data": data, "tensor": tensor})
    with ir.main_graph, popxl.in_sequence():
        x = C.assert_replicated(ops.host_load(popxl.h2d_stream((4, 4), F32, "x")), "tensor")
        a = popxl.variable(normal(tensor, 4, 3)(), F32, "a", replica_grouping="data")
        b = popxl.variable(normal(tensor, 3, 4)(), F32, "b", replica_grouping="data")
        bias = popxl.variable(np.zeros(4), F32, "bias")
        made = popxl.create_seeds(7, replicas=data)
        seeds = popxl.variable(made, popxl.uint32, "seeds", replica_grouping="tensor")
        following, seed = ops.split_random_seed(seeds)
        ops.var_updates.copy_var_update_(seeds, following)
        h = ops.tanh(x @ a)
        y = ops.dropout(C.replicated_all_reduce(h @ b, group="tensor") + bias, seed, 0.5)
        dy = ops.dropout(y * (2 / y.nelms), seed, 0.5)
        dh = (dy @ b.T) * (1 - h * h)
        for variable, gradient in ((a, x.T @ dh), (b, h.T @ dy), (bias, ops.sum(dy, 0))):
            ops.scaled_add_(variable, C.replicated_all_reduce(gradient, "mean", "data"), b=-0.1)
    return ir


def steps_in_pieces(replicas: int) -> popxl.Ir:
    """Two steps in one run: what is in pieces is gathered again for the second."""
    ir = popxl.Ir(axes={"data": replicas})
    ir.num_host_transfers = 2
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((4, 6), F32, "x")
        _, piece = popxl.replica_sharded_variable(normal(6, 2)(), F32, "w")
        for _ in range(2):
            x, w = ops.host_load(stream), C.replicated_all_gather(piece).reshape((6, 2))
            gradient = x.T @ (x @ w) / x.nelms
            ops.scaled_add_(piece, C.replicated_reduce_scatter(gradient, "mean", None, True), b=-0.1)
    return ir


def divided_layers() -> popxl.Ir:
    """Divided layers of which replicas do not begin alike."""
    ir = training(2, 2, 4)
    for v in ir.main_graph.variables:
        v.data = normal(*v.numbers().shape)().astype(np.float32)
    return ir


DATA = {"data": 4}
adamw = partial(optimizers.adamw, lr=0.05, eps=1e-3)
clipped = partial(optimizers.adamw, lr=0.05, eps=1e-3, clip_norm=0.5)

PROGRAMS: Mapping[str, Callable[[], popxl.Ir]] = {
    "by hand, sgd": partial(by_hand, DATA),
    "by hand, momentum": partial(by_hand, DATA, rule="momentum"),
    "by hand, two axes": partial(by_hand, {"data": 2, "more": 2}, ("data", "more")),
    "by hand, in pieces": partial(by_hand, DATA, sharded=True),
    "by hand, accumulated": partial(accumulated, 4),
    "by hand, divided network": partial(divided_network, 2, 2),
    "by hand, dropout": partial(dropped, 4),
    "by hand, dropout after division": partial(dropped_after_division, 2, 2),
    "by hand, steps in pieces": partial(steps_in_pieces, 4),
    "communication, divided layers": divided_layers,
    "kit, sgd": partial(kit, Net, DATA),
    "kit, adamw": partial(kit, Net, DATA, optimizer=clipped),
    "kit, in pieces": partial(kit, Net, DATA, optimizer=clipped, sharded=True),
    "kit, accumulated": partial(kit, Net, DATA, accumulate=2),
    "kit, accumulated in pieces": partial(kit, Net, DATA, accumulate=2, sharded=True, optimizer=adamw),
    "kit, divided block": partial(large_kit, Block, MESH, (2, 3, 4)),
    "kit, divided GPT": partial(large_kit, partial(Language, GPT, "tensor"), MESH, (2, 5), popxl.int32),
    "kit, divided Llama": partial(large_kit, partial(Language, LLAMA, "tensor"), MESH, (2, 5), popxl.int32),
    "kit, experts": partial(large_kit, partial(Mixture, "expert"), {"data": 2, "expert": 2}, (8, 8)),
    "kit, ring attention": partial(large_kit, partial(Ring, "text"), {"data": 2, "text": 2}, (2, 4, 8)),
}
"""By name. Replicas along `tensor` are fed alike where nothing gathers for them: see `ALIKE`."""

ALIKE = ("kit, divided", "communication", "by hand, dropout after")
"""How the names of programs begin whose replicas along `tensor` have the same data."""
