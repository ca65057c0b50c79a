"""What functions make of pieces and of terms of a sum: types of their results, and what is found in wrong programs."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.checking import check
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_inputs
from tests.popxl.meshes import F32, divided, fed, mesh, update, weight

c = ops.collectives
double = popxl.OpKind("Double", lambda t: jnp.flip(t, 0) * 2)
wave = popxl.OpKind("Wave", jax.jit(lambda t: jnp.sin(t) * 2))


def same(*shape: int) -> popxl.Tensor:
    """What the host feeds alike along `tensor`."""
    return c.assert_replicated(fed(*shape), "tensor")


def own(*shape: int, name: str = "own") -> popxl.Tensor:
    """A weight of each replica along `tensor`, which does not say what it is a part of."""
    w = popxl.variable(np.ones((4, *shape), np.float32), F32, name, replica_grouping="data")
    update(w, w * 0.1)
    return w


def terms() -> popxl.Tensor:
    """Terms of a sum over `tensor`."""
    return (same(5, 8) @ divided(1, 8, 6, name="up")) @ divided(0, 6, 8, name="down")


def a_sum_over_turns() -> popxl.Tensor:
    """A decayed sum of terms over the turns of a loop, which starts at zero."""
    zeros, t = popxl.constant(np.zeros((5, 8), np.float32)), terms()
    return ops.repeat(t.ir.create_graph(lambda total, t: total * 0.9 + t, zeros, t), 3, zeros, t)[0]


# Types ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ops.einsum("bi,io->bo", divided(1, 5, 6), divided(0, 6, 8, name="b")), "partial"),
        (lambda: ops.einsum("bi,io->ob", weight(5, 6), divided(1, 6, 8, name="b")), "sharded 0"),
        (lambda: ops.einsum("hbi,hio->hbo", divided(0, 2, 5, 6), divided(0, 2, 6, 8, name="b")), "sharded 0"),
        (lambda: ops.conv(divided(1, 2, 3, 4, 4), divided(1, 5, 3, 1, 1, name="b")), "partial"),
        (lambda: ops.sum(divided(1, 5, 6), axis=1), "partial"),
        (lambda: ops.sum(divided(1, 5, 6), axis=0), "sharded 0"),
        (lambda: ops.sum(divided(0, 5, 6) * divided(0, 5, 6, name="b")), "partial"),
        (lambda: divided(1, 5, 6).reshape((5, 3, 2)), "sharded 1"),
        (lambda: divided(1, 5, 6).reshape((5, 1, 6)), "sharded"),  # which of the two is divided?
        (lambda: divided(1, 5, 6, 2).transpose((1, 2, 0)).reshape((12, 5)), "sharded 0"),
        (lambda: divided(1, 5, 6, 2).transpose((2, 1, 0)).reshape((12, 5)), "sharded"),  # inside of the dimension
        (lambda: ops.softmax(divided(1, 2, 3, 5), axis=2), "sharded 1"),
        (lambda: ops.sum(divided(0, 1, 8) * same(5, 8), axis=0), "sharded"),  # one row on each replica, for all five
        (lambda: ops.gelu(divided(1, 5, 6)) * 2, "sharded 1"),
        (lambda: double(terms()), "partial"),
        (lambda: ops.concat([terms(), -terms()], axis=0), "partial"),
        (lambda: ops.where(same(5, 8) > 0, terms(), popxl.constant(0.0)), "partial"),
        (lambda: ops.gather(terms(), popxl.constant([1, 0])), "partial"),
        (lambda: terms() * same(5, 8) / 3, "partial"),
        (lambda: terms() + ops.init((5, 8), F32), "partial"),
        (lambda: ops.concat([terms(), popxl.constant(np.zeros((2, 8), np.float32))]), "partial"),
        (lambda: a_sum_over_turns(), "partial"),
    ],
)
def test_types(make: Callable[[], popxl.Tensor], expected: str) -> None:
    with (ir := mesh()).main_graph:
        t = make()
    report = check(ir)
    assert report.findings == []
    assert f"tensor: {expected}}}" in report.text(t)


# Wrong programs -------------------------------------------------------------------------------------------------------


def a_bias_before_the_sum() -> None:
    y = terms() + weight(8, name="bias")  # found
    c.replicated_all_reduce(y, group="tensor")


def a_function_before_the_sum() -> None:
    c.replicated_all_reduce(ops.gelu(terms()), group="tensor")  # found


def a_function_of_a_users_own() -> None:
    wave(terms())  # found


def a_softmax_over_pieces() -> None:
    """Each replica would divide by the sum over its own piece."""
    logits = same(5, 8) @ divided(1, 8, 6)
    ops.softmax(logits, axis=1)  # found


def a_norm_of_pieces() -> None:
    w = divided(1, 8, 6)
    ops.sqrt(ops.sum(w * w))  # found


def a_product_of_terms() -> None:
    y = terms()
    ops.mul(y, y)  # found


def an_update_by_terms() -> None:
    """What goes back through two divided layers, without the sum between them."""
    x = same(5, 8)
    dn = (x @ divided(1, 8, 6)) @ divided(1, 8, 6, name="b").T
    first = divided(1, 8, 8, name="first")
    g = c.replicated_all_reduce(x.T @ dn, "mean", group="data")
    ops.scaled_add_(first, g, b=-0.1)  # found


def an_update_by_other_pieces() -> None:
    w, x = divided(1, 6, 6), same(5, 6)
    dw = x.T @ (x @ w)
    g = c.replicated_all_reduce(dw.T, "mean", group="data")
    ops.scaled_add_(w, g, b=-0.1)  # found


def a_mean_of_own_products() -> None:
    h = ops.gelu(same(5, 8) @ own(8, 6))
    c.replicated_all_reduce(h @ own(6, 8, name="b"), "mean", group="tensor")  # found


def a_bias_in_a_sum_of_own_products() -> None:
    h = ops.gelu(same(5, 8) @ own(8, 6))
    y = h @ own(6, 8, name="b") + weight(8, name="bias")
    c.replicated_all_reduce(y, group="tensor")  # found


def a_sum_of_functions_of_own_products() -> None:
    h = ops.gelu(same(5, 8) @ own(8, 6)) @ own(6, 8, name="b")
    c.replicated_all_reduce(ops.tanh(h), group="tensor")  # found


def summed_twice_at_once() -> None:
    y = c.replicated_all_reduce(terms(), group="tensor")
    c.replicated_all_reduce(y, group="tensor")  # found


def a_norm_of_which_the_square_is_summed_twice() -> None:
    w, x = weight(8, 3), fed(5, 8)
    g = c.replicated_reduce_scatter(x.T @ (x @ w), "mean", None, True)
    square = c.replicated_all_reduce(ops.sum(g * g))
    square = c.replicated_all_reduce(square)  # found
    g = c.replicated_all_gather(g / ops.maximum(ops.sqrt(square / 64.0), popxl.constant(1.0)))
    update(w, g.reshape((8, 3)))


def one_of_two_sums_is_scaled() -> None:
    y = c.replicated_all_reduce(terms(), group="tensor")
    h = ops.gelu(y @ own(8, 6)) @ own(6, 8, name="b")
    ops.mul(c.replicated_all_reduce(h, group="tensor"), 0.25)  # found


def a_scaled_loss() -> None:
    w, x = weight(8, 3), fed(5, 8)
    loss = c.replicated_all_reduce(ops.mean(x @ w), "mean")
    addons.host_store(loss / 8)  # found
    update(w, c.replicated_all_reduce(x.T @ (x @ w), "mean"))


def one_batch_for_all() -> None:
    """The second of two batches is that of the first replica, for all of them."""
    w = weight(8, 3)
    graph = w.ir.create_graph(lambda x, w: x.T @ (x @ w), popxl.TensorSpec((5, 8), F32), w)
    (a,) = ops.call(graph, fed(5, 8), w)
    x = ops.host_load(popxl.h2d_stream((5, 8), F32, "x"))  # found
    x = c.replicated_all_gather(x, output_shape="new_axis")[0]
    (b,) = ops.call(graph, x, w)
    update(w, c.replicated_all_reduce(a + b, "mean"))


def seeds_of(replicas: int, shared: Any) -> popxl.Tensor:
    """Seeds, one for each group of replicas."""
    return popxl.variable(popxl.create_seeds(3, replicas=replicas), popxl.uint32, "seeds", replica_grouping=shared)


def trained_with(x: popxl.Tensor, seed: popxl.Tensor, group: Any = None) -> None:
    w = weight(8, 3)
    h = ops.dropout(x, seed, 0.5)  # found
    update(w, c.replicated_all_reduce(h.T @ (h @ w), "mean", group=group))


def one_seed_for_all() -> None:
    trained_with(fed(5, 8), popxl.variable(popxl.create_seeds(3), popxl.uint32, "seeds"))


def seeds_that_are_alike() -> None:
    rows = [[1, 2]] * 8
    trained_with(fed(5, 8), popxl.variable(rows, popxl.uint32, "seeds", replica_grouping=ir_of_each()))


def a_seed_for_each_of_the_same() -> None:
    trained_with(same(5, 8), seeds_of(8, ir_of_each()))


def what_was_gathered_before() -> None:
    _, piece = popxl.replica_sharded_variable(np.ones((8, 3)), F32, "pieces")
    x = fed(5, 8)
    w = c.replicated_all_gather(piece).reshape((8, 3))
    g = c.replicated_reduce_scatter(x.T @ (x @ w), "mean", None, True)
    ops.scaled_add_(piece, g, b=-0.1)
    ops.matmul(x, w)  # found


def a_turned_weight() -> None:
    x, w = fed(5, 6), weight(6, 6)
    y = ops.tanh(x @ w.T)  # found
    update(w, c.replicated_all_reduce(x.T @ y, "mean"))


def the_batch_of_one_replica() -> None:
    x = ops.host_load(popxl.h2d_stream((5, 8), F32, "x"))  # found
    rows = c.replicated_all_gather(x)
    trained_with(rows[:5], seeds_of(8, ir_of_each()))


def layers_whose_feeds_are_not_stated() -> None:
    """Replicas share weights along `data` alone, and sum along `tensor`: they are fed the same along that."""
    x, a, b = fed(5, 8), own(8, 6, name="a"), own(6, 8, name="b")
    y = c.replicated_all_reduce(ops.tanh(x @ a) @ b, "add", group="tensor")
    c.replicated_all_reduce(ops.tanh(y @ a) @ b, "mean", group="tensor")  # found


def a_layer_that_enters_the_next_without_a_sum() -> None:
    """Two layers, divided alike, of which the first lacks its sum."""
    x, a, b = fed(5, 8), own(8, 6, name="a"), own(6, 8, name="b")
    y = x + ops.tanh(x @ a) @ b
    h = ops.tanh(y @ a)  # found
    c.replicated_all_reduce(h @ b, group="tensor")


def a_gradient_that_enters_the_layer_before_without_a_sum() -> None:
    x, a, b = fed(5, 8), own(8, 6, name="a"), own(6, 8, name="b")
    y = c.replicated_all_reduce(ops.tanh(x @ a) @ b, group="tensor")
    dy = y + ops.tanh(y @ b.T) @ a.T
    ops.matmul(dy, b.T)  # found


def one_of_two_gradients_is_scaled() -> None:
    x, a, b = fed(5, 8), weight(8, 6, name="a"), weight(6, 3, name="b")
    h = x @ a
    dy = h @ b
    update(a, c.replicated_all_reduce(x.T @ (dy @ b.T), "mean"))
    update(b, c.replicated_all_reduce(h.T @ dy, "mean") * 8.0)  # found


def a_sum_among_means_in_a_called_graph() -> None:
    x, *weights = fed(5, 8), *(weight(8, n, name=f"w{n}") for n in (3, 4, 6))

    def gradients(x: popxl.Tensor, *weights: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
        first, second, third = (x.T @ (x @ w) for w in weights)
        return (
            c.replicated_all_reduce(first, "mean"),
            c.replicated_all_reduce(second, "add"),  # found
            c.replicated_all_reduce(third, "mean"),
        )

    graph = popxl.gir().create_graph(gradients, x, *weights)
    for w, g in zip(weights, ops.call(graph, x, *weights), strict=True):
        update(w, g)


def a_scaled_sum_of_squares() -> None:
    """The only sum of terms: its scale is that of a mean, and what is summed is none."""
    w = divided(1, 8, 6)
    ops.mul(c.replicated_all_reduce(ops.sum(w * w), group="tensor"), 0.25)  # found


@pytest.mark.parametrize(
    ("program", "category"),
    [
        (a_layer_that_enters_the_next_without_a_sum, "partial plus replicated"),
        (a_gradient_that_enters_the_layer_before_without_a_sum, "partial plus replicated"),
        (one_of_two_gradients_is_scaled, "factor of replicas"),
        (a_sum_among_means_in_a_called_graph, "mixed reductions"),
        (a_scaled_sum_of_squares, "factor of replicas"),
        (a_turned_weight, "transposed weight"),
        (the_batch_of_one_replica, "same batch"),
        (layers_whose_feeds_are_not_stated, "mean of a sum"),
        (one_seed_for_all, "same seed"),
        (seeds_that_are_alike, "same seed"),
        (a_seed_for_each_of_the_same, "different seeds"),
        (what_was_gathered_before, "stale shards"),
        (a_bias_before_the_sum, "partial plus replicated"),
        (a_function_before_the_sum, "nonlinear function of partial"),
        (a_function_of_a_users_own, "nonlinear function of partial"),
        (a_softmax_over_pieces, "nonlinear function of partial"),
        (a_norm_of_pieces, "nonlinear function of partial"),
        (a_product_of_terms, "nonlinear function of partial"),
        (an_update_by_terms, "partial update"),
        (an_update_by_other_pieces, "shards of another layout"),
        (a_mean_of_own_products, "mean of a sum"),
        (a_bias_in_a_sum_of_own_products, "partial plus replicated"),
        (a_sum_of_functions_of_own_products, "nonlinear function of partial"),
        (summed_twice_at_once, "repeated reduction"),
        (a_norm_of_which_the_square_is_summed_twice, "repeated reduction"),
        (one_of_two_sums_is_scaled, "factor of replicas"),
        (a_scaled_loss, "factor of replicas"),
        (one_batch_for_all, "same batch"),
    ],
)
def test_wrong_programs(program: Callable[[], None], category: str) -> None:
    with (ir := mesh()).main_graph:
        program()
    (finding,) = check(ir).findings
    lines, first = inspect.getsourcelines(trained_with if "seed" in category else program)
    (at,) = (first + i for i, line in enumerate(lines) if line.endswith("# found\n"))
    assert (finding.category, finding.line, finding.certain) == (category, f"test_propagation.py:{at}", False)


def test_names_with_braces() -> None:
    with (ir := mesh()).main_graph:
        c.replicated_all_reduce(terms() + weight(8, name="bias{0}{of}"), group="tensor")
    (finding,) = check(ir).findings
    assert "each adds `bias{0}{of}`, which is the same on all" in finding.message


def test_both_of_two_gradients_are_named_if_either_may_be_wrong() -> None:
    with (ir := mesh()).main_graph:
        x, a, b = fed(5, 8), weight(8, 6, name="a"), weight(6, 3, name="b")
        h = x @ a
        dy = h @ b
        update(a, c.replicated_all_reduce(x.T @ (dy @ b.T), "mean"))
        update(b, c.replicated_all_reduce(h.T @ dy, "add"))
    found = [(each.category, each.tensor) for each in check(ir).findings]
    assert found == [("mixed reductions", "a"), ("mixed reductions", "b")]


def test_shards_are_gathered_along_their_axis() -> None:
    """Where groups are equally large, the shape does not tell."""
    with (ir := popxl.Ir(axes={"data": 2, "tensor": 2})).main_graph:
        x, w = fed(5, 8), weight(8, 3)
        shard = c.replicated_reduce_scatter(x.T @ (x @ w), "mean", "tensor", True)
        c.replicated_all_gather(shard, 0, "tensor")
        assert check(ir).findings == []
        c.replicated_all_gather(shard, 0, "data")
    assert [(each.category, each.axes) for each in check(ir).findings] == [("shards of another layout", ("tensor",))]


def test_beginnings_differ_where_updates_were_reduced_in_shards_and_gathered() -> None:
    rows = np.arange(96, dtype=np.float32).reshape((2, 8, 6))
    with (ir := popxl.Ir(axes={"data": 2})).main_graph:
        w, x = popxl.variable(rows, F32, "w", replica_grouping=ir_of_each()), fed(5, 8)
        shard = c.replicated_reduce_scatter(x.T @ (x @ w), "mean", None, True)
        update(w, c.replicated_all_gather(shard))
    assert [each.category for each in check(ir).findings] == ["different beginnings"]


# Right siblings -------------------------------------------------------------------------------------------------------


def a_bias_after_the_sum() -> None:
    c.replicated_all_reduce(terms(), group="tensor") + weight(8, name="bias")


def terms_from_a_zero() -> None:
    c.replicated_all_reduce(sum([terms(), terms()], popxl.constant(0.0)), group="tensor")


def a_share_of_a_bias() -> None:
    """What each has of its own may be added to a term."""
    h = ops.gelu(same(5, 8) @ own(8, 6)) @ own(6, 8, name="b")
    c.replicated_all_reduce(h + own(8, name="bias"), group="tensor")


def a_mean_over_divided_channels() -> None:
    """The mean of the means of shards is that of all."""
    h = same(5, 8) @ divided(1, 8, 6)
    c.replicated_all_reduce(ops.mean(h * h, axis=1), "mean", group="tensor")


def sums_of_one() -> None:
    """Along an axis of size one there is no sum."""
    w = popxl.variable(np.ones((8, 6)), F32, "w")
    y = c.replicated_all_reduce(fed(5, 8) @ w, "add", popxl.gcg().ir.replica_grouping(group_size=1))
    update(w, c.replicated_all_reduce(ops.matmul(fed(8, 5), y), "mean"))


def heads() -> None:
    """Attention in which each replica has heads of its own, without saying so: products within a head are no terms."""
    x = same(5, 8)
    q, k, v = (x @ own(8, 4, name=name) for name in "qkv")
    mixed = ops.softmax(q @ k.T / 2 + popxl.constant(np.ones((5, 5), np.float32)), axis=1) @ v
    c.replicated_all_reduce(mixed @ own(4, 8, name="out"), group="tensor")


def data_in_variables() -> None:
    """What each replica has of its own, and the program does not change, is data."""
    w, x = weight(8, 3), popxl.variable(np.ones((8, 5, 8)), F32, "x", replica_grouping=ir_of_each())
    y = ops.tanh(x @ w)
    update(w, c.replicated_all_reduce(x.T @ y, "mean"))


def ir_of_each() -> popxl.ReplicaGrouping:
    return popxl.gcg().ir.replica_grouping(group_size=1)


def a_weight_used_both_ways() -> None:
    x, w = fed(5, 6), weight(6, 6)
    y = ops.tanh(x @ w) @ w.T
    update(w, c.replicated_all_reduce(x.T @ y, "mean"))


def gathered_rows() -> None:
    rows = c.replicated_all_gather(fed(5, 8))
    trained_with(rows[:5] + rows[5:10], seeds_of(8, ir_of_each()))


def seeds_for_each() -> None:
    trained_with(fed(5, 8), seeds_of(8, ir_of_each()))


def seeds_that_the_host_writes() -> None:
    rows = [[0, 0]] * 8
    trained_with(fed(5, 8), popxl.variable(rows, popxl.uint32, "seeds", replica_grouping=ir_of_each()))


def seeds_along_data() -> None:
    """Replicas along `tensor` share theirs, as they share what is dropped of."""
    trained_with(same(5, 8), seeds_of(2, "tensor"), "data")


def gathered_again() -> None:
    _, piece = popxl.replica_sharded_variable(np.ones((8, 3)), F32, "pieces")
    for _ in range(2):
        x, w = fed(5, 8), c.replicated_all_gather(piece).reshape((8, 3))
        ops.scaled_add_(piece, c.replicated_reduce_scatter(x.T @ (x @ w), "mean", None, True), b=-0.1)


def batches_of_each() -> None:
    w = weight(8, 3)
    graph = w.ir.create_graph(lambda x, w: x.T @ (x @ w), popxl.TensorSpec((5, 8), F32), w)
    (a,), (b,) = ops.call(graph, fed(5, 8), w), ops.call(graph, fed(5, 8), w)
    update(w, c.replicated_all_reduce(a + b, "mean"))


@pytest.mark.parametrize(
    "program",
    [
        a_bias_after_the_sum,
        terms_from_a_zero,
        a_share_of_a_bias,
        a_mean_over_divided_channels,
        heads,
        sums_of_one,
        data_in_variables,
        a_weight_used_both_ways,
        gathered_rows,
        seeds_for_each,
        seeds_that_the_host_writes,
        seeds_along_data,
        gathered_again,
        batches_of_each,
    ],
)
def test_right_programs(program: Callable[[], None]) -> None:
    with (ir := mesh()).main_graph:
        program()
    assert check(ir).findings == []


def test_a_local_number_is_a_note() -> None:
    """What each replica stores of its own data is no finding: the host gets all of it."""
    with (ir := mesh()).main_graph:
        w, x = weight(8, 3), fed(5, 8)
        y = x @ w
        addons.host_store(ops.mean(y))
        update(w, c.replicated_all_reduce(x.T @ y, "mean"))
    report = check(ir)
    assert report.findings == []
    (note,) = report.notes
    assert (note.category, note.axes) == ("local number", ("data", "tensor"))
    assert f"note: {note}" in str(report)


def test_terms_of_layers_for_the_host_fed_alike() -> None:
    """Layers of the kit say what they need, so nothing has to be stated."""

    def step(x: Any) -> popxl.Tensor:
        inside = replicated_all_reduce_identical_inputs(x, group="tensor")
        return ops.gelu(inside @ divided(1, 8, 6, name="up")) @ divided(0, 6, 8, name="down")

    with (ir := mesh()).main_graph:
        y = step(fed(5, 8))
    assert check(ir).text(y) == "{data: varying, tensor: partial}"


# Functions of JAX -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_reduced", "found"), [(True, []), (False, ["drifting variable"])])
def test_the_gradient_of_a_jax_function_is_checked(is_reduced: bool, found: list[str]) -> None:
    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2)

    ir = popxl.Ir(axes={"data": 4})
    with ir.main_graph:
        weights = popxl.variable(np.ones((3, 5, 5)), F32, "weights")
        x = ops.host_load(popxl.h2d_stream((2, 5), F32, "x"))
        graph = ir.create_graph(popxl.from_jax(loss), weights, x)
        gradient = popxl.transforms.autodiff(graph, grads_required=graph.inputs[:1])
        site = ops.call_with_info(graph, weights, x)
        (g,) = ops.call(gradient.graph, 1.0, inputs_dict=gradient.inputs_dict(site))
        if is_reduced:
            g = c.replicated_all_reduce(g, "mean", group="data")
        ops.scaled_add_(weights, g, b=-0.1)
    assert [each.category for each in check(ir).findings] == found
