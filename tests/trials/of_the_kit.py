"""Random steps of training, made with the kit: right by construction."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, Conv2D, Embedding, LayerNorm, Linear, RMSNorm, TiedEmbedding
from tests.trials.program import MESHES, WEIGHTS, Program

F32 = popxl.float32
WIDTH, WORDS, ROWS = 8, 8, 2

FUNCTIONS: tuple[Callable[[popxl.Tensor], popxl.Tensor], ...] = (
    ops.tanh, ops.gelu, ops.sigmoid, ops.sin, ops.swish, ops.abs, lambda t: ops.softmax(t, -1), lambda t: t * 0.5,
    lambda t: t + 1.0, lambda t: t * t * 0.5, lambda t: ops.exp(t * 0.1), lambda t: ops.maximum(t, t * 0.1),
)  # fmt: skip
"""Of an array of any shape."""

LAYERS = (
    "linear", "layer norm", "rms norm", "function", "product", "block", "residual", "concat", "split", "scale", "bias",
    "turned", "twice", "cumulated", "row norm",
)  # fmt: skip
INPUTS = ("rows", "rows", "rows", "tokens", "tied tokens", "images")


class Network(addons.Module):
    """Some layers and the loss of what comes out, as a source of random numbers has it."""

    def __init__(self, draw: Random, inputs: str, tensor: str | None, own: Mapping[str, int]) -> None:
        """
        Args:
            draw: source of random numbers.
            inputs: what it is fed.
            tensor: the axis that layers are divided along.
            own: sizes of the axes along which replicas have other data.
        """
        super().__init__()
        self.inputs = inputs
        self.kinds = draw.choices(LAYERS, k=draw.randint(0, 3))
        self.kinds.insert(draw.randint(0, len(self.kinds)), draw.choice(("linear", "block", "scale", "layer norm")))
        if inputs == "tied tokens":  # a row for each label
            self.kinds = [kind if kind != "concat" else "product" for kind in self.kinds]
        self.functions = [draw.sample(FUNCTIONS, 2) for _ in self.kinds]
        self.divided = {"tensor": tensor} if tensor is not None else {}
        self.layers = addons.Module.from_list([self._layer(draw, kind) for kind in self.kinds])
        self.is_square = draw.random() < 0.5
        if inputs == "tokens":
            self.embedding = Embedding(F32, WORDS, WIDTH)
        elif inputs == "tied tokens":
            self.tied = TiedEmbedding(F32, WORDS, WIDTH)
        elif inputs == "images":
            self.convolution = Conv2D(WIDTH, 3, paddings=(1, 1, 1, 1))

    def _layer(self, draw: Random, kind: str) -> addons.Module:
        if kind == "block":
            norm = draw.choice((LayerNorm, RMSNorm))
            attention = Attention(4, causal=draw.random() < 0.5, **self.divided)
            return addons.Module.from_list([norm(), attention, norm(), MLP(16, **self.divided)])
        return Linear(WIDTH) if kind in ("linear", "twice") else RMSNorm() if kind == "rms norm" else LayerNorm()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        if self.inputs == "rows":
            return self._loss(self._layers(x))
        if self.inputs == "tokens":
            return self._loss(self._layers(self.embedding(x)))
        if self.inputs == "images":
            made = ops.gelu(self.convolution(x))
            return self._loss(self._layers(ops.transpose(made.reshape((*made.shape[:2], -1)), (0, 2, 1))))
        weight = self.add_variable_input("words", partial(np.random.normal, 0, 0.3, (WORDS, WIDTH)), F32)
        logits = self._layers(ops.gather(weight, x[:, :-1])) @ weight.T
        return addons.ops.cross_entropy(logits.reshape((-1, WORDS)), x[:, 1:].flatten())

    def _loss(self, y: popxl.Tensor) -> popxl.Tensor:
        return ops.mean(y * y) if self.is_square else ops.mean(ops.abs(y + 0.3))

    def _layers(self, h: popxl.Tensor) -> popxl.Tensor:
        for i, (kind, layer, (f, g)) in enumerate(zip(self.kinds, self.layers, self.functions, strict=True)):
            h = self._one(i, kind, layer, f, g, h)
        return h

    def _one(self, i: int, kind: str, layer: Any, f: Any, g: Any, h: popxl.Tensor) -> popxl.Tensor:
        match kind:
            case "function":
                return f(h)
            case "product":
                return f(h) * g(h)
            case "block":
                first, attention, second, mlp = layer
                h = h + attention(first(h))
                return h + mlp(second(h))
            case "residual":
                return h + f(layer(h))
            case "concat":
                return ops.concat([f(h), g(h)], axis=1)
            case "split":
                return ops.concat(ops.split(f(h), 2, axis=2)[::-1], axis=2)
            case "scale":
                return f(h) * self.add_variable_input(f"scale{i}", partial(np.ones, WIDTH), F32)
            case "bias":
                return f(h + self.add_variable_input(f"bias{i}", partial(np.zeros, WIDTH), F32))
            case "turned":
                return ops.transpose(f(ops.transpose(h, (0, 2, 1))), (0, 2, 1))
            case "twice":  # one graph, with two call sites
                facts, graph = Linear(WIDTH).create_graph(h)
                bound = graph.bind(self.add_variable_inputs(f"shared{i}", facts))
                (once,) = bound.call(h)
                (again,) = bound.call(f(once))
                return again
            case "cumulated":
                return ops.cumsum(h, 1) * 0.3
            case "row norm":
                return h / (ops.mean(h * h, -1, keepdims=True) + 1.0)
        return layer(h)


def of_the_kit(seed: int, made: type[Network] = Network) -> Program:
    """A random step of training of a network, by the kit."""
    draw = Random(seed)
    whole = draw.choices(MESHES, WEIGHTS)[0]
    inputs = draw.choice(INPUTS)
    transfers = draw.choice((1, 1, 1, 2, 3))
    is_narrow = draw.random() < 0.15
    settings: dict[str, Any] = {
        "sharded": draw.random() < 0.3,
        "memory": draw.choice((None, None, None, "nothing", "products")),
        "precision": addons.MixedPrecision(popxl.bfloat16) if is_narrow else None,
        "loss_scaling": draw.choice((None, None, 8.0)),
    }
    clipped = {"clip_norm": 0.02} if draw.random() < 0.3 else {}
    rate = draw.choice((0.1, 0.3))
    rule = draw.choice(
        (
            partial(optimizers.sgd, **clipped),
            partial(optimizers.sgd, momentum=0.9, **clipped),
            partial(optimizers.adamw, eps=1e-2, weight_decay=0.0, **clipped),
        )
    )
    of_network = draw.getrandbits(32)
    is_divided = "tensor" in whole and "block" in made(Random(of_network), inputs, "tensor", {}).kinds
    split = ("data",) if is_divided else tuple(whole)  # axes that the batch is divided along

    def build(axes: dict[str, int], factor: float = 1.0) -> popxl.Ir:
        np.random.seed(seed)
        ir = popxl.Ir(axes=axes)
        rows = ROWS * math.prod(whole[axis] // axes[axis] for axis in split if axis in whole)
        shape = {"rows": (rows, 4, WIDTH), "images": (rows, 2, 3, 3)}.get(inputs, (rows, 5))
        with ir.main_graph, popxl.in_sequence():
            x = popxl.h2d_stream(shape, popxl.int32 if "tokens" in inputs else F32, "x")
            own = {axis: whole[axis] for axis in split if axis in whole}
            network = made(Random(of_network), inputs, "tensor" if "tensor" in axes else None, own)
            optimizer = partial(rule, lr=rate * factor)
            given = {name: value for name, value in settings.items() if value is not None}
            with warnings.catch_warnings():  # of memory="nothing" where the network calls no graph
                warnings.filterwarnings("ignore", "memory: graph .* calls no graph")
                training = addons.train_step(network, x, optimizer=optimizer, accumulate=transfers, **given)
            ops.host_store(popxl.d2h_stream((), F32, "loss"), training.loss)
            for v in training.variables.tensors:
                if v.dtype is popxl.uint32:  # a seed, which changes with each step
                    ops.add_(v.on_replica, popxl.constant(1, popxl.uint32))
        return ir

    return Program(seed, whole, build)
