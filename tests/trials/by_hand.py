"""Random steps of training with collectives by hand, some of them wrong.

Layers run forward and backward as called graphs, with collectives between them, and an update of each variable follows.
Wherever a collective or a place for one has to be chosen, a mistake is made now and then: none, another, or two; a
mean for a sum; other replicas; a wrong factor; a bias or a function before the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

import popxl
from popxl import ops
from tests.trials.of_the_kit import FUNCTIONS, ROWS, WIDTH
from tests.trials.program import MESHES, WEIGHTS, Program

C = ops.collectives
F32 = popxl.float32
INNER = 8

Tensors = Sequence[popxl.Tensor]
Back = Callable[[popxl.Tensor], popxl.Tensor]


def by_hand(seed: int, mistakes: float = 0.0, step: type[Step] | None = None) -> Program:
    """A random step of training by hand.

    Args:
        seed: what it is made of.
        mistakes: chance of a mistake wherever one can be made.
        step: how it is made.
    """
    axes = Random(seed).choices(MESHES, WEIGHTS)[0]

    def build(sizes: Mapping[str, int], factor: float = 1.0) -> popxl.Ir:
        return (step or Step)(seed, axes, sizes, mistakes, factor).ir

    return Program(seed, axes, build)


@dataclass
class Weight:
    """A variable, how to read it, and the gradient that it gets.

    Attributes:
        variable: what is updated: the variable, or a piece of it.
        tensor: its value on this replica.
        is_divided: whether replicas along `tensor` have parts of it.
        is_piece: whether replicas have pieces of it.
        axis: the dimension that parts are along.
        grouping: replicas that share it, as variables for its optimiser do.
        gradients: of all its uses, before the reduction.
    """

    variable: popxl.Tensor
    tensor: popxl.Tensor
    is_divided: bool
    is_piece: bool
    axis: int | None = None
    grouping: popxl.ReplicaGrouping | None = None
    gradients: list[popxl.Tensor] = field(default_factory=list)

    @property
    def gradient(self) -> popxl.Tensor:
        return ops.add_n(*self.gradients) if len(self.gradients) > 1 else self.gradients[0]


class Step:
    """A step of training for some sizes of the axes. The same numbers are drawn for any."""

    def __init__(
        self, seed: int, axes: Mapping[str, int], sizes: Mapping[str, int], mistakes: float, factor: float
    ) -> None:
        self.draw, self.axes, self.sizes, self.mistakes, self.factor = Random(seed), axes, sizes, mistakes, factor
        self.values, self.names = np.random.default_rng(seed), 0
        self.draw.random()
        self.ir = popxl.Ir(axes=dict(sizes))
        self.batches = self.draw.choice((1, 1, 2))
        self.ir.num_host_transfers = self.batches
        self.is_mean = self.draw.random() < 0.7
        self.weights: list[Weight] = []
        with self.ir.main_graph, popxl.in_sequence():
            self._build()

    # Mistakes ---------------------------------------------------------------------------------------------------------

    def errs(self) -> bool:
        return self.draw.random() < self.mistakes

    def reduced(self, t: popxl.Tensor, op: str, *along: str) -> popxl.Tensor:
        """The reduction along some axes of those that there are; or another, by mistake."""
        group = tuple(axis for axis in self.axes if axis in along)
        kind = self.draw.choice(("none", "other op", "other group", "twice", "factor")) if self.errs() else "right"
        others = [
            each for each in (("data",), ("tensor",), ("data", "tensor")) if each != group and {*each} <= {*self.axes}
        ]
        other = self.draw.choice(others) if others else ()
        n = int(np.prod([self.sizes[axis] for axis in group or other]))
        if kind == "other group":
            group = other
        if kind == "other op":
            op = {"add": "mean", "mean": "add"}[op]
        if kind == "none" or not group:
            return t
        t = C.replicated_all_reduce(t, op, group)
        if kind == "twice":
            t = C.replicated_all_reduce(t, op, group)
        return t * (1 / n if self.draw.random() < 0.5 else n) if kind == "factor" else t

    # Variables --------------------------------------------------------------------------------------------------------

    def name(self, what: str) -> str:
        self.names += 1
        return f"{what}{self.names}"

    def weight(self, *shape: int, divided: int | None = None, value: float | None = None) -> Weight:
        """A weight, of which each replica along `tensor` may have a part along a dimension."""
        data = (self.values.normal(0, 0.4, shape) if value is None else np.full(shape, value)).astype(np.float32)
        name, parts = self.name("w"), self.sizes.get("tensor", 1)
        is_piece = self.draw.random() < 0.2
        if divided is not None:
            rows = np.stack(np.split(data, parts, divided)) if parts > 1 else data
            group = tuple(axis for axis in self.axes if axis != "tensor") or self.ir.replica_grouping(group_size=1)
            v, grouping = self.variable(rows, name, divided, group)
            made = Weight(v, v, True, False, divided, grouping)
        elif is_piece and self.ir.replication_factor > 1:
            piece = self.piece(data, name)
            made = Weight(piece, C.replicated_all_gather(piece).reshape(shape), False, True)
        else:
            v, grouping = self.variable(data, name)
            made = Weight(v, v, False, is_piece, None, grouping)
        self.weights.append(made)
        return made

    def variable(
        self, data: np.ndarray, name: str, axis: int | None = None, group: Any = None
    ) -> tuple[popxl.Tensor, popxl.ReplicaGrouping]:
        """A variable as the graph that is built has it, and the replicas that share it."""
        v = popxl.variable(data, F32, name, replica_grouping=group)
        v.group_axis = axis
        return v, v.replica_grouping

    def piece(self, data: np.ndarray, name: str) -> popxl.Tensor:
        """Each replica's piece of a variable."""
        return popxl.replica_sharded_variable(data, F32, name)[1]

    def slot(self, data: np.ndarray, name: str, group: Any) -> popxl.RemoteBuffer:
        """A remote buffer with a variable."""
        shape = data.shape[1:] if group.num_groups > 1 else data.shape
        buffer = popxl.remote_buffer(shape, F32, 1)
        popxl.remote_variable(data, buffer, 0, F32, name, replica_grouping=group)
        return buffer

    # Layers -----------------------------------------------------------------------------------------------------------

    def graph(
        self, function: Callable[..., popxl.Tensor], x: popxl.Tensor, *weights: Weight, given: Tensors = ()
    ) -> tuple[popxl.Tensor, Back]:
        """The result of a function as a graph, and the function that takes the gradient back: to that of `x`.

        What is `given`, such as a seed, has no gradient.
        """
        inputs = (x, *(w.tensor for w in weights), *given)
        graph = self.ir.create_graph(function, *inputs)
        grad = self.differentiated(graph, graph.inputs[: 1 + len(weights)])
        site = ops.call_with_info(graph, *inputs)

        def back(dy: popxl.Tensor) -> popxl.Tensor:
            dx, *others = ops.call(grad.graph, dy, inputs_dict=grad.inputs_dict(site))
            for weight, gradient in zip(weights, others, strict=True):
                weight.gradients.append(gradient)
            return dx

        return site.outputs[0], back

    def differentiated(self, graph: popxl.Graph, wanted: Tensors) -> popxl.GradGraphInfo:
        return popxl.transforms.autodiff(graph, grads_required=wanted)

    def layer(self, x: popxl.Tensor) -> tuple[popxl.Tensor, Back]:
        f, g = self.draw.sample(FUNCTIONS, 2)
        kinds = (
            "dense",
            "dense",
            "norm",
            "attention",
            "residual",
            *(("divided", "gathered") * 3 if "tensor" in self.axes else ()),
        )
        match self.draw.choice(kinds):
            case "dense":
                return self.graph(
                    lambda x, w, b: f(x @ w + b), x, self.weight(WIDTH, WIDTH), self.weight(WIDTH, value=0.1)
                )
            case "norm":
                scale = self.weight(WIDTH, value=1.0)
                return self.graph(lambda x, s: f(x / ops.sqrt(ops.mean(x * x, -1, keepdims=True) + 0.1) * s), x, scale)
            case "attention":
                q, k, v = (self.weight(WIDTH, WIDTH) for _ in range(3))
                return self.graph(
                    lambda x, q, k, v: ops.softmax((x @ q) @ ops.transpose(x @ k, (0, 2, 1)), -1) @ (x @ v), x, q, k, v
                )
            case "residual":
                w = self.weight(WIDTH, WIDTH)
                return self.graph(lambda x, w: x + g(f(x) @ w), x, w)
            case "gathered":
                return self.gathered(x, f)
        return self.divided(x, f, g)

    def divided(self, x: popxl.Tensor, f: Any, g: Any) -> Any:
        """Columns of a matrix, and rows of another."""
        a, b = self.weight(WIDTH, INNER, divided=1), self.weight(INNER, WIDTH, divided=0)
        bias = self.weight(WIDTH, value=0.2) if self.draw.random() < 0.5 else None
        f = ops.tanh if f in FUNCTIONS[6:7] else f  # a softmax needs all columns
        is_early, is_bent = self.errs(), self.errs()
        if bias is not None and is_early:
            y, back = self.graph(lambda x, a, b, c: f(x @ a) @ b + c, x, a, b, bias)
        elif is_bent:
            y, back = self.graph(lambda x, a, b: g(f(x @ a) @ b), x, a, b)
        else:
            y, back = self.between(x, a, b, f)
        y = self.reduced(y, "add", "tensor")
        after: Any = lambda dy: dy  # noqa: E731
        if bias is not None and not is_early:
            y, after = self.graph(lambda y, c: y + c, y, bias)
        return y, lambda dy: self.reduced(back(after(dy)), "add", "tensor")

    def between(self, x: popxl.Tensor, a: Weight, b: Weight, f: Any) -> tuple[popxl.Tensor, Back]:
        """Both products of a divided layer, and a function between them."""
        return self.graph(lambda x, a, b: f(x @ a) @ b, x, a, b)

    def gathered(self, x: popxl.Tensor, f: Any) -> Any:
        """Columns of a matrix, and all of the product on each replica."""
        a = self.weight(WIDTH, WIDTH, divided=1)
        f = ops.tanh if f in FUNCTIONS[6:7] else f
        h, back = self.graph(lambda x, a: f(x @ a), x, a)
        axis = "data" if self.errs() and self.axes.get("data") == self.axes["tensor"] else "tensor"
        y = C.replicated_all_gather(h, -1, axis)

        def down(dy: popxl.Tensor) -> popxl.Tensor:
            part = C.replicated_slice(dy, -1, axis).reshape(h.shape)
            return self.reduced(back(part), "add", "tensor")

        return y, down

    # The step ---------------------------------------------------------------------------------------------------------

    def feed(self) -> popxl.Tensor:
        """Rows: those along `tensor` are the same, as fed or gathered."""
        parts, rows = self.sizes.get("tensor", 1), ROWS * self.axes.get("data", 1) // self.sizes.get("data", 1)
        if "tensor" not in self.axes:
            return ops.host_load(self.stream(rows))
        if self.are_gathered:
            return C.replicated_all_gather(ops.host_load(self.stream(rows * self.axes["tensor"] // parts)), 0, "tensor")
        return C.assert_replicated(ops.host_load(self.stream(rows)), "tensor")

    @property
    def are_gathered(self) -> bool:
        """Whether replicas along `tensor` gather the rows that the host feeds to each."""
        return "tensor" in self.axes and self.is_gathered

    def stream(self, rows: int) -> Any:
        if self.source is None:
            self.source = popxl.h2d_stream((rows, 4, WIDTH), F32, "x")
        return self.source

    def _build(self) -> None:
        self.source: Any = None
        self.is_gathered = self.draw.random() < 0.3
        self.depth = self.draw.randint(1, 3)
        self.layers = self.draw.getrandbits(32)
        self.kind = "mean" if self.is_mean else "add"
        self.scale = self.factor / self.batches * (1.0 if self.is_mean else 0.1)
        self._store(self._trained())

    def _store(self, loss: popxl.Tensor) -> None:
        ops.host_store(popxl.d2h_stream((), F32, "loss", num_host_transfers=1), loss)

    def _trained(self) -> popxl.Tensor:
        """The loss that is stored, after a step."""
        for batch in range(self.batches):
            loss = self.forward_and_back(batch)
        self.update(self.reduced_gradients())
        return self.reduced(loss, self.kind, "data")

    def reduced_gradients(self) -> Tensors:
        gradients = [w.gradient for w in self.weights]
        return [
            self._reduced_gradient(w, g * self.scale, self.kind) for w, g in zip(self.weights, gradients, strict=True)
        ]

    def forward_and_back(self, batch: int) -> popxl.Tensor:
        """The loss of a batch. All batches have the same layers and mistakes, and the weights of the first."""
        before = self.draw.getstate()
        self.draw.seed(self.layers)
        if batch:
            known, make = iter([*self.weights]), self.weight

            def again(*shape: int, **settings: Any) -> Weight:
                self.draw.random()
                return next(known)

            self.weight = again  # type: ignore[method-assign]
        x = self.feed()
        backs = []
        for _ in range(self.depth):
            x, back = self.layer(x)
            backs.append(back)
        mean = ops.mean if self.is_mean else ops.sum
        loss, back = self.graph(lambda y: mean(y * y + y), x)
        dy = back(popxl.constant(1.0))
        for back in reversed(backs):
            dy = back(dy)
        if batch:
            self.weight = make  # type: ignore[method-assign]
        self.draw.setstate(before)
        return loss

    def _reduced_gradient(self, weight: Weight, gradient: popxl.Tensor, op: str) -> popxl.Tensor:
        if weight.is_piece:  # all replicas have one
            if self.errs():
                op = {"add": "mean", "mean": "add"}[op]
            if self.ir.replication_factor == 1:
                return gradient
            if op == "add" and "tensor" in self.axes:
                gradient = C.replicated_all_reduce(gradient, "mean", "tensor") * (1 / self.sizes["tensor"])
            return C.replicated_reduce_scatter(gradient, op, None, True)
        return self.reduced(gradient, op, "data")

    def update(self, gradients: Tensors) -> None:
        if self.draw.random() < 0.3:
            gradients = self._clipped(gradients)
        rule = self.draw.choice(("sgd", "momentum", "remote momentum", "adam"))
        for weight, gradient in zip(self.weights, gradients, strict=True):
            v = weight.variable
            if weight.is_piece or rule == "sgd":
                ops.scaled_add_(v, gradient, b=-0.2)
                continue
            groups = 1 if weight.grouping is None else weight.grouping.num_groups
            zeros = np.zeros((*((groups,) * (groups > 1)), *v.shape), np.float32)
            if rule == "remote momentum":
                buffer = self.slot(zeros, self.name("m"), weight.grouping)
                m = ops.remote_load(buffer, 0) * 0.9 + gradient
                ops.remote_store(buffer, 0, m)
                ops.scaled_add_(v, m, b=-0.2)
                continue
            m, _ = self.variable(zeros, self.name("m"), weight.axis, weight.grouping)
            ops.scaled_add_(m, gradient, a=0.9, b=1.0)
            if rule == "adam":
                s, _ = self.variable(zeros, self.name("s"), weight.axis, weight.grouping)
                ops.scaled_add_(s, gradient * gradient, a=0.9, b=0.1)
                ops.scaled_add_(v, m / (ops.sqrt(s) + 0.05), b=-0.05)
            else:
                ops.scaled_add_(v, m, b=-0.2)

    def _clipped(self, gradients: Tensors) -> Tensors:
        """Gradients, shortened to a norm of 0.05."""
        total: Any = None
        for weight, gradient in zip(self.weights, gradients, strict=True):
            square = ops.sum(gradient * gradient)
            if weight.is_piece:
                square = self.reduced(square, "add", "data", "tensor")
            elif weight.is_divided:
                square = self.reduced(square, "add", "tensor")
            total = square if total is None else total + square
        limit = popxl.constant(0.05)
        if self.draw.random() < 0.5:
            factor = limit / ops.maximum(ops.sqrt(total), limit)
        else:
            shrink = self.ir.create_graph(lambda t: popxl.constant(0.05) / ops.sqrt(t), total)
            keep = self.ir.create_graph(lambda t: t * 0.0 + 1.0, total)
            (factor,) = ops.conditional(total > limit * limit, shrink, keep, [total], [total])
        return [gradient * factor for gradient in gradients]
