"""Random steps of training by hand, with loops: over layers with stacked weights, over micro-batches, over steps.

Loops carry what is the same on all replicas, terms of a sum, and shards; and change variables in place, by reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from tests.trials.by_hand import F32, INNER, Back, Step, Tensors, Weight
from tests.trials.of_the_kit import FUNCTIONS, WIDTH

COUNT = 2


class LoopingStep(Step):
    """A step of training with loops of the user's."""

    def __init__(
        self, seed: int, axes: Mapping[str, int], sizes: Mapping[str, int], mistakes: float, factor: float
    ) -> None:
        self.body: popxl.Graph | None = None
        self.bound: dict[popxl.Tensor, popxl.Tensor] = {}
        self.over = Random(seed + 1).choice(("layers", "micro-batches", "micro-batches", "steps", "steps"))
        super().__init__(seed, axes, sizes, mistakes, factor)

    # What the body of a loop has of the main graph --------------------------------------------------------------------

    def inside(self, t: popxl.Tensor, by_ref: bool = False) -> popxl.Tensor:
        """A tensor of the main graph, as the body of a loop has it."""
        if self.body is None:
            return t
        found = popxl.graph_input(t.shape, t.dtype, t.name, by_ref, t.meta_shape)
        self.bound[found] = t
        return found

    def variable(
        self, data: np.ndarray, name: str, axis: int | None = None, group: Any = None
    ) -> tuple[popxl.Tensor, popxl.ReplicaGrouping]:
        with self.ir.main_graph:
            v, grouping = super().variable(data, name, axis, group)
        return self.inside(v, by_ref=True), grouping

    def piece(self, data: np.ndarray, name: str) -> popxl.Tensor:
        with self.ir.main_graph:
            piece = super().piece(data, name)
        return self.inside(piece, by_ref=True)

    def slot(self, data: np.ndarray, name: str, group: Any) -> popxl.RemoteBuffer:
        with self.ir.main_graph:
            return super().slot(data, name, group)

    @contextmanager
    def in_body(self) -> Iterator[popxl.Graph]:
        """Build the body of a loop."""
        self.body, self.bound = self.ir.create_empty_graph("body"), {}
        try:
            with self.body, popxl.in_sequence():
                yield self.body
        finally:
            self.body = None

    # The step ---------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        if self.over == "micro-batches":
            self.batches = self.draw.choice((2, 3))
        self.ir.num_host_transfers = self.batches * (COUNT if self.over == "steps" else 1)
        super()._build()

    def _trained(self) -> popxl.Tensor:
        if self.over == "steps":
            return self._over_steps()
        return self._over_batches() if self.over == "micro-batches" else super()._trained()

    def _over_steps(self) -> popxl.Tensor:
        """Several steps, of which each changes the variables in place."""
        with self.in_body() as body:
            before = popxl.graph_input((), F32, "loss")
            loss = super()._trained()
            popxl.graph_output(loss + before * 0.5 if self.draw.random() < 0.5 else loss)
        return ops.repeat(body, COUNT, popxl.constant(0.0), inputs_dict=self.bound)[0]

    def _over_batches(self) -> popxl.Tensor:
        """A step in which all batches but the first are in a loop, which adds their gradients up."""
        is_reduced_inside, is_by_ref = self.draw.random() < 0.3, self.draw.random() < 0.5
        loss = self.forward_and_back(0)
        first = self._reduced_now() if is_reduced_inside else self._gradients_now()
        if is_by_ref:
            first = [g * 1.0 for g in first]
        with self.in_body() as body:
            total = popxl.graph_input((), F32, "total")
            sums = [popxl.graph_input(g.shape, F32, f"sum{i}", is_by_ref, g.meta_shape) for i, g in enumerate(first)]
            outside, self.weights = self.weights, [self._read_inside(w) for w in self.weights]
            again = self.forward_and_back(1)
            found = self._reduced_now() if is_reduced_inside else self._gradients_now()
            self.weights = outside
            popxl.graph_output(total + again)
            for t, gradient in zip(sums, found, strict=True):
                if is_by_ref:
                    ops.add_(t, gradient)
                else:
                    popxl.graph_output(t + gradient)
        given = [loss] if is_by_ref else [loss, *first]
        self.bound |= zip(sums, first, strict=True) if is_by_ref else ()
        loss, *sums = ops.repeat(body, self.batches - 1, *given, inputs_dict=self.bound)
        sums = first if is_by_ref else sums
        if not is_reduced_inside:
            pairs = zip(self.weights, sums, strict=True)
            sums = [self._reduced_gradient(w, g * self.scale, self.kind) for w, g in pairs]
        self.update(sums)
        return self.reduced(loss, self.kind, "data")

    def _read_inside(self, w: Weight) -> Weight:
        return Weight(w.variable, self.inside(w.tensor), w.is_divided, w.is_piece, w.axis, w.grouping)

    def _gradients_now(self) -> Tensors:
        return [w.gradient for w in self.weights]

    def _reduced_now(self) -> Tensors:
        """Reduced gradients of a micro-batch: in all, with the same mistakes."""
        before = self.draw.getstate()
        self.draw.seed(self.layers + 1)
        found = self.reduced_gradients()
        self.draw.setstate(before)
        return found

    # Layers -----------------------------------------------------------------------------------------------------------

    def layer(self, x: popxl.Tensor) -> tuple[popxl.Tensor, Back]:
        if self.draw.random() < 0.4:
            return super().layer(x)
        f = self.draw.choice((*FUNCTIONS[:6], *FUNCTIONS[7:]))
        kinds = ("stack", "recurrent", "in turns", "wandering")
        if "tensor" in self.axes:
            kinds += ("divided stack", "terms", "shards") * 2
        match self.draw.choice(kinds):
            case "stack":
                return self.graph(_over_rows(lambda h, w: h + f(h @ w) * 0.5), x, self.weight(3, WIDTH, WIDTH))
            case "recurrent":
                return self.graph(self._recurrent(f), x, self.weight(WIDTH, WIDTH))
            case "in turns":
                return self.graph(self._in_turns(f), x, self.weight(WIDTH, WIDTH), self.weight(WIDTH, WIDTH))
            case "wandering":  # gradients of sums of terms of all turns
                return self.graph(self._wandering(f), x, self.weight(WIDTH, WIDTH), self.weight(WIDTH, value=0.1))
            case "divided stack":
                return self._divided_stack(x, f)
            case "terms":
                a, b = self.weight(2, WIDTH, INNER, divided=2), self.weight(2, INNER, WIDTH, divided=1)
                y, back = self.graph(self._terms(f), x, a, b)
            case "shards":
                a, b = self.weight(WIDTH, INNER, divided=1), self.weight(INNER, WIDTH, divided=0)
                scale = self.weight(INNER, value=1.1, divided=0)
                y, back = self.graph(self._shards(f), x, a, b, scale)
        return self.reduced(y, "add", "tensor"), lambda dy: self.reduced(back(dy), "add", "tensor")

    def _recurrent(self, f: Any) -> Callable[..., popxl.Tensor]:
        def build(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
            body = self.ir.create_graph(lambda h, w, x: f(h @ w) + x * 0.5, x, w, x)
            return ops.repeat(body, 3, x * 0.1, w, x)[0]

        return build

    def _in_turns(self, f: Any) -> Callable[..., popxl.Tensor]:
        """One of two layers in each turn."""

        def turn(h: popxl.Tensor, i: popxl.Tensor, v: popxl.Tensor, w: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
            one, other = (self.ir.create_graph(g, h, v) for g in (lambda h, w: f(h @ w), lambda h, w: h + h @ w * 0.3))
            (made,) = ops.conditional(i < popxl.constant(1, popxl.int32), one, other, [h, v], [h, w])
            return made, i + popxl.constant(1, popxl.int32)

        def build(x: popxl.Tensor, v: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
            zero = popxl.constant(0, popxl.int32)
            return ops.repeat(self.ir.create_graph(turn, x, zero, v, w), 3, x, zero, v, w)[0]

        return build

    def _wandering(self, f: Any) -> Callable[..., popxl.Tensor]:
        """Two carried values, which change places."""

        def build(x: popxl.Tensor, w: popxl.Tensor, b: popxl.Tensor) -> popxl.Tensor:
            body = self.ir.create_graph(lambda g, h, w, b: (h + b, f(g @ w)), x, x, w, b)
            one, other = ops.repeat(body, 3, x, popxl.constant(np.zeros(x.shape, np.float32)), w, b)
            return one + other

        return build

    def _terms(self, f: Any) -> Callable[..., popxl.Tensor]:
        """Products that are added up in a loop, as terms of the sum over replicas."""

        def build(x: popxl.Tensor, a: popxl.Tensor, b: popxl.Tensor) -> popxl.Tensor:
            zeros = popxl.constant(np.zeros(x.shape, np.float32))
            return _looped(self.ir, lambda y, x, a, b: y + f(x @ a) @ b, zeros, [x], [a, b])

        return build

    def _shards(self, f: Any) -> Callable[..., popxl.Tensor]:
        """Columns on each replica, of which a loop takes functions."""

        def build(x: popxl.Tensor, a: popxl.Tensor, b: popxl.Tensor, s: popxl.Tensor) -> popxl.Tensor:
            h = x @ a
            return ops.repeat(self.ir.create_graph(lambda h, s: f(h * s), h, s), 2, h, s)[0] @ b

        return build

    def _divided_stack(self, x: popxl.Tensor, f: Any) -> tuple[popxl.Tensor, Back]:
        """A loop over divided layers, with their collectives."""
        a, b = self.weight(2, WIDTH, INNER, divided=2), self.weight(2, INNER, WIDTH, divided=1)
        tp, axis = addons.ops.replicated_all_reduce_TP, "tensor"
        if self.errs() and "data" in self.axes:
            axis = "data"
        is_left_out = self.errs()

        def enter(t: popxl.Tensor) -> popxl.Tensor:
            is_one = self.sizes["tensor"] == 1
            return t if is_one else tp.replicated_all_reduce_identical_inputs(t, group="tensor")

        def leave(t: popxl.Tensor) -> popxl.Tensor:
            is_one = self.sizes["tensor"] == 1
            return t if is_one or is_left_out else tp.replicated_all_reduce_identical_grad_inputs(t, group=axis)

        def build(x: popxl.Tensor, a: popxl.Tensor, b: popxl.Tensor) -> popxl.Tensor:
            return _looped(self.ir, lambda h, a, b: h + leave(f(enter(h) @ a) @ b) * 0.5, x, [], [a, b])

        return self.graph(build, x, a, b)

    def differentiated(self, graph: popxl.Graph, wanted: Tensors) -> popxl.transforms.GradGraphInfo:
        return addons.transforms.autodiff(graph, grads_required=wanted).grad_graph_info


def _looped(
    ir: popxl.Ir, function: Callable[..., popxl.Tensor], start: popxl.Tensor, same: Tensors, stacks: Tensors
) -> popxl.Tensor:
    """A loop that carries a value: each turn gets what is the `same` in all, and its rows of some stacks."""

    def turn(h: popxl.Tensor, i: popxl.Tensor, *others: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        rows = [ops.gather(t, i.reshape((1,)), 0).reshape(t.shape[1:]) for t in others[len(same) :]]
        return function(h, *others[: len(same)], *rows), i + popxl.constant(1, popxl.int32)

    given = (start, popxl.constant(0, popxl.int32), *same, *stacks)
    return ops.repeat(ir.create_graph(turn, *given), stacks[0].shape[0], *given)[0]


def _over_rows(function: Callable[..., popxl.Tensor]) -> Callable[..., popxl.Tensor]:
    return lambda x, stack: _looped(popxl.gcg().ir, function, x, [], [stack])
