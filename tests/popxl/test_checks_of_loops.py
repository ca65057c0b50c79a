"""What is found in programs with loops, remote buffers, masks and gradient graphs: right ones, and siblings with a
mistake."""

from collections.abc import Callable

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.checking import check
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from tests.popxl.meshes import F32, c, divided, fed, mesh, update, weight

ONE = popxl.int32


def over_layers(is_right: bool) -> None:
    """A loop over divided layers, whose weights are rows of stacks; with the sum of each layer, or without."""
    a, b = divided(2, 3, 8, 6, name="a"), divided(1, 3, 6, 8, name="b")
    x, zero = fed(5, 8), popxl.constant(0, ONE)

    def layer(h: popxl.Tensor, i: popxl.Tensor, a: popxl.Tensor, b: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        v, w = (ops.gather(t, i.reshape((1,))).reshape(t.shape[1:]) for t in (a, b))
        y = ops.tanh(replicated_all_reduce_identical_inputs(h, group="tensor") @ v) @ w
        y = c.replicated_all_reduce(y, group="tensor") if is_right else y
        return h + y, i + popxl.constant(1, ONE)

    ops.repeat(popxl.gir().create_graph(layer, x, zero, a, b), 3, x, zero, a, b)


def halved_layers(is_right: bool) -> None:
    """Sums of the terms of two replicas, of which a half is added: in all passes; or behind one of two sums alone."""
    x, a, b = fed(5, 8), divided_in_two(1, 8, 6, name="a"), divided_in_two(0, 6, 8, name="b")

    def layer(x: popxl.Tensor, a: popxl.Tensor, b: popxl.Tensor) -> popxl.Tensor:
        inside = replicated_all_reduce_identical_inputs(x, group="tensor")
        y = replicated_all_reduce_identical_grad_inputs(ops.tanh(inside @ a) @ b, group="tensor")
        return x + (y * 0.5 if is_right else y)

    graph = popxl.gir().create_graph(layer, x, a, b)
    grad = addons.transforms.autodiff(graph).grad_graph_info
    site = ops.call_with_info(graph, x, a, b)
    ops.call(grad.graph, site.outputs[0], inputs_dict=grad.inputs_dict(site))
    if not is_right:
        for _ in range(2):
            h = ops.tanh(x @ a) @ b
            x = c.replicated_all_reduce(h, group="tensor")
        ops.mul(x, 0.5)


def divided_in_two(axis: int, *shape: int, name: str) -> popxl.Tensor:
    """A weight of which each of two replicas along `tensor` has a part."""
    w = popxl.variable(np.ones((2, *shape), np.float32), F32, name, replica_grouping="data")
    w.group_axis = axis
    return w


def over_micro_batches(is_right: bool) -> None:
    """A loop that carries sums of reduced gradients."""
    weights = [weight(8, n, name=f"w{n}") for n in (3, 4, 6)]
    sums = [popxl.constant(np.zeros(w.shape, np.float32)) for w in weights]
    x = fed(5, 8)

    def batch(*given: popxl.Tensor) -> list[popxl.Tensor]:
        sums, weights, x = given[:3], given[3:6], given[6]
        kinds = ("mean", "mean" if is_right else "add", "mean")
        return [
            t + c.replicated_all_reduce(x.T @ (x @ w), kind) for t, w, kind in zip(sums, weights, kinds, strict=True)
        ]

    graph = popxl.gir().create_graph(batch, *sums, *weights, x)
    for w, g in zip(weights, ops.repeat(graph, 2, *sums, *weights, x), strict=True):
        update(w, g)


def over_steps(is_right: bool) -> None:
    """A loop over steps, with the momentum in a remote buffer, which all replicas share."""
    w, ir = weight(8, 3), popxl.gir()
    buffer = popxl.remote_buffer((8, 3), F32, 1)
    popxl.remote_variable(np.zeros((8, 3), np.float32), buffer, 0, F32, "m")
    body = ir.create_empty_graph("body")
    with body, popxl.in_sequence():
        inside = popxl.graph_input((8, 3), F32, "w", by_ref=True)
        x = fed(5, 8)
        g = x.T @ (x @ inside)
        m = ops.remote_load(buffer, 0) * 0.9 + (c.replicated_all_reduce(g, "mean") if is_right else g)
        ops.remote_store(buffer, 0, m)
        update(inside, m)
    ir.num_host_transfers = 2
    ops.repeat(body, 2, inputs_dict={inside: w})


def masked_in_a_graph(is_right: bool) -> None:
    """A mask, drawn from one seed for all rows, of which each replica takes its slice; or each draws the same."""
    x, w = fed(5, 8), weight(8, 3)
    seed = popxl.variable(popxl.create_seeds(3), popxl.uint32, "seed")
    ones = popxl.constant(np.ones((40 if is_right else 5, 8), np.float32))
    mask = ops.dropout(ones, seed, 0.5)
    mask = c.replicated_slice(mask) if is_right else mask
    graph = popxl.gir().create_graph(lambda x, m: x * m, x, mask)
    (h,) = ops.call(graph, x, mask)
    update(w, c.replicated_all_reduce(h.T @ (h @ w), "mean"))


def with_two_rules(is_right: bool) -> None:
    """Gradients of one graph: one changes its variable at once, the others by a momentum."""
    x, names = fed(5, 8), ("a", "b", "c")
    weights = [weight(8, 8, name=name) for name in names]
    graph = popxl.gir().create_graph(lambda x, a, b, c: ops.mean(ops.tanh(ops.tanh(x @ a) @ b) @ c), x, *weights)
    grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
    site = ops.call_with_info(graph, x, *weights)
    found = ops.call(grad.graph, popxl.constant(1.0), inputs_dict=grad.inputs_dict(site))
    update(weights[0], c.replicated_all_reduce(found[0], "mean" if is_right else "add"))
    for w, g in zip(weights[1:], found[1:], strict=True):
        m = weight(8, 8, name=f"m{w.name}")
        ops.scaled_add_(m, c.replicated_all_reduce(g, "mean"), a=0.9, b=1.0)
        ops.scaled_add_(w, m, b=-0.3)


def with_two_uses(is_right: bool) -> None:
    """A weight whose gradient is the sum of those of two uses, each reduced by itself."""
    x, weights = fed(5, 8), [weight(8, 3, name=name) for name in "abc"]
    for w in weights:
        kind = "mean" if is_right or w.name != "b" else "add"
        g = x.T @ (x @ w)
        update(w, c.replicated_all_reduce(g, kind) + c.replicated_all_reduce(g * 3.0, kind))


def of_the_same_text(is_right: bool) -> None:
    """Gradients that all replicas have alike, before their mean is taken."""
    x = c.assert_replicated(fed(5, 8))
    for name in "abc":
        w = weight(8, 3, name=name)
        g = c.replicated_all_reduce(x.T @ (x @ w), "mean")
        update(w, g if is_right or name != "b" else g * 0.125)


def of_summed_shards(is_right: bool) -> None:
    """The norm of sums of gradients' shards, which are variables of each replica's own."""
    (_, piece), x = popxl.replica_sharded_variable(np.ones((8, 4)), F32, "w"), fed(5, 8)
    each = popxl.gir().replica_grouping(group_size=1)
    total = popxl.variable(np.zeros((8, 4)), F32, "total", replica_grouping=each)
    w = c.replicated_all_gather(piece).reshape((8, 4))
    shard = c.replicated_reduce_scatter(x.T @ (x @ w), "mean", None, True)
    ops.var_updates.accumulate_mean_(total, shard, 0.0)
    square = ops.sum(total * total)
    norm = ops.sqrt(c.replicated_all_reduce(square) if is_right else square)
    ops.scaled_add_(piece, total / norm, b=-0.1)


def of_columns(is_right: bool) -> None:
    """Squares of the columns that each replica takes of a value."""
    w = weight(8, 12)
    columns = c.replicated_slice(w, 1, "tensor")
    square = c.replicated_all_reduce(ops.sum(columns * columns), "add" if is_right else "mean", "tensor")
    ops.scaled_add_(w, w * square, b=-0.1)


def of_reshaped_shards(is_right: bool) -> None:
    """Squares of shards along a dimension that a reshape leaves open."""
    w, v = divided(0, 6, 8), weight(8, 12, name="v")
    rows = w.reshape((1, 6, 8))
    square = c.replicated_all_reduce(ops.sum(rows * rows), "add" if is_right else "mean", "tensor")
    ops.scaled_add_(v, v * square, b=-0.1)


def of_slices_of_terms(is_right: bool) -> None:
    """Slices of what goes back through a divided layer, of its sum, or of each replica's term."""
    x, w = c.assert_replicated(fed(5, 8), "tensor"), divided(1, 8, 4)
    terms = (x @ w) @ w.T
    dx = c.replicated_all_reduce(terms, group="tensor") if is_right else terms
    c.replicated_slice(dx, 1, "tensor")


def masked_by_own_seeds(is_right: bool) -> None:
    """Dropout within a divided layer, by a seed of each replica's own, before a sum or a mean of terms."""
    x, a, b = c.assert_replicated(fed(5, 8), "tensor"), divided(1, 8, 6, name="a"), divided(0, 6, 8, name="b")
    seeds = popxl.create_seeds(3, replicas=8)
    seed = popxl.variable(seeds, popxl.uint32, "seed", replica_grouping=popxl.gir().replica_grouping(group_size=1))
    y = ops.dropout(x @ a, seed, 0.5) @ b
    c.replicated_all_reduce(y, "add" if is_right else "mean", "tensor")


def of_divided_pieces(is_right: bool) -> None:
    """Pieces along `data` of a weight that is divided along `tensor`."""
    v, piece = popxl.replica_sharded_variable(np.ones((2, 8, 3), np.float32), F32, "w", replica_grouping="data")
    v.group_axis = 1
    c.replicated_all_gather(piece, group="data" if is_right else "tensor")


def of_changed_pieces(is_right: bool) -> None:
    """Pieces of a weight, each changed by rows of a gradient, which is reduced before, or each replica's own."""
    (_, piece), x = popxl.replica_sharded_variable(np.ones((8, 3)), F32, "w"), fed(5, 8)
    g = x.T @ (x @ c.replicated_all_gather(piece).reshape((8, 3)))
    if is_right:
        update(piece, c.replicated_reduce_scatter(g, "mean", None, True))
    else:
        update(piece, g[0])


OF_TWO = (halved_layers, of_divided_pieces)
"""Programs of two replicas along each axis."""

PROGRAMS: list[tuple[Callable[[bool], None], str]] = [
    (over_layers, "partial plus replicated"),
    (halved_layers, "factor of replicas"),
    (over_micro_batches, "mixed reductions"),
    (over_steps, "drifting variable"),
    (masked_in_a_graph, "same seed"),
    (with_two_rules, "mixed reductions"),
    (with_two_uses, "mixed reductions"),
    (of_the_same_text, "factor of replicas"),
    (of_summed_shards, "nonlinear function of partial"),
    (of_columns, "mean of a sum"),
    (of_reshaped_shards, "mean of a sum"),
    (of_slices_of_terms, "shards of different values"),
    (masked_by_own_seeds, "mean of a sum"),
    (of_divided_pieces, "shards of another layout"),
    (of_changed_pieces, "shards of different values"),
]


@pytest.mark.parametrize(("program", "category"), PROGRAMS, ids=[each.__name__ for each, _ in PROGRAMS])
def test_a_mistake_is_found(program: Callable[[bool], None], category: str) -> None:
    found = {}
    for is_right in (True, False):
        ir = popxl.Ir(axes={"data": 2, "tensor": 2}) if program in OF_TWO else mesh()
        with ir.main_graph, popxl.in_sequence():
            program(is_right)
        found[is_right] = {each.category for each in check(ir).findings}
    assert found[True] == set()
    assert category in found[False]
