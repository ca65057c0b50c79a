"""Random ops: what their numbers look like, and that they depend on the seed and on nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate, store

Array = np.ndarray
SEED = np.array([3, 2**32 - 1], np.uint32)


def drawn(op: Callable[..., Any], *arguments: Any, seed: Array = SEED) -> Array:
    (numbers,) = evaluate(lambda s: op(s, *arguments), seed)
    return numbers


# What the numbers look like -----------------------------------------------------------------------------------------

MANY = (200, 250)
FLOATS = pytest.mark.parametrize("dtype", [popxl.float32, popxl.float16], ids=lambda dtype: dtype.name)


@FLOATS
@pytest.mark.parametrize(("low", "high"), [(0, 1), (-2.5, 0.5)])
def test_uniform(dtype, low, high) -> None:
    numbers = drawn(ops.random_uniform, MANY, low, high, dtype)
    assert (numbers.dtype, numbers.shape) == (dtype.as_numpy(), MANY)
    assert low <= numbers.min() and numbers.max() <= high
    shares, _ = np.histogram(numbers, 10, (low, high))
    np.testing.assert_allclose(shares / numbers.size, 0.1, atol=0.006)  # more than four standard deviations


@FLOATS
@pytest.mark.parametrize(("mean", "std"), [(0, 1), (-3, 0.5)])
def test_normal(dtype, mean, std) -> None:
    numbers = drawn(ops.random_normal, MANY, mean, std, dtype)
    assert (numbers.dtype, numbers.shape) == (dtype.as_numpy(), MANY)
    standard = (numbers.astype(np.float64) - mean) / std
    moments = [(standard**power).mean() for power in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.2)
    np.testing.assert_allclose(moments[:2], [0, 1], atol=0.03)
    assert (np.abs(standard) < 1).mean() == pytest.approx(0.6827, abs=0.01)


def test_defaults() -> None:
    with popxl.Ir().main_graph:
        seed = popxl.variable(SEED)
        for op in (ops.random_uniform, ops.random_normal):
            assert op(seed, (2, 3)).spec == op(seed, (2, 3), dtype=None).spec == popxl.TensorSpec((2, 3), popxl.float32)
    np.testing.assert_array_equal(drawn(ops.random_uniform, (9,)), drawn(ops.random_uniform, (9,), 0, 1))
    np.testing.assert_array_equal(drawn(ops.random_normal, (9,)), drawn(ops.random_normal, (9,), 0, 1))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_share_of_what_is_dropped(p) -> None:
    ones = np.ones(MANY, np.float32)
    for mask in evaluate(
        lambda t, s: [ops.dropout(t, s, p), ops.shaped_dropout(t, s, MANY, p)], ones, SEED
    ):  # the values that are kept are all the same, and exactly the quotient
        assert set(np.unique(mask)) == {0, np.float32(1) / np.float32(1 - p)}
        assert (mask == 0).mean() == pytest.approx(p, abs=5 * (p * (1 - p) / mask.size) ** 0.5)


@pytest.mark.here
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_what_is_kept_is_the_rounded_quotient(dtype) -> None:
    """Bit for bit, for any ratio; dropping is exact, too: of infinities and NaN, and without a negative zero."""
    t = np.concatenate([np.random.default_rng(0).standard_normal(10_000), [np.inf, -np.inf, np.nan] * 20]).astype(dtype)
    for ratio in (0.1, 0.3, 0.5, 0.6, 0.9):
        plain, shaped = evaluate(
            lambda t, s, r=ratio: [ops.dropout(t, s, r), ops.shaped_dropout(t, s, t.shape, r)], t, SEED
        )
        np.testing.assert_array_equal(plain.view(np.uint8), shaped.view(np.uint8))
        quotient = (t.astype(np.float32) / np.float32(1 - ratio)).astype(dtype)
        kept = plain != 0
        np.testing.assert_array_equal(plain[kept], quotient[kept])
        assert not plain[~kept].view(np.uint8).any() and 0 < kept.mean() < 1


def test_nothing_is_dropped_with_probability_zero() -> None:
    t = np.array([1.5, -0.0, np.inf, np.nan, 1e-45], np.float32)
    results = evaluate(lambda t, s: [ops.dropout(t, s, 0), ops.shaped_dropout(t, s, (5,), 0)], t, SEED)
    for result in results:
        np.testing.assert_array_equal(result.view(np.uint32), t.view(np.uint32))


def test_parts_are_dropped_as_a_whole() -> None:
    t = np.arange(1, 1 + 40 * 3, dtype=np.float32).reshape(40, 3)
    rows, columns = evaluate(
        lambda t, s: [ops.shaped_dropout(t, s, (40, 1), 0.5), ops.shaped_dropout(ops.transpose(t), s, (40,), 0.5)],
        t, SEED,
    )  # fmt: skip
    kept = rows.any(axis=1)
    assert 5 < kept.sum() < 35
    np.testing.assert_array_equal(rows, np.where(kept[:, None], 2 * t, 0))
    np.testing.assert_array_equal(columns, rows.T)


# Seeds --------------------------------------------------------------------------------------------------------------


def test_different_seeds_are_independent() -> None:
    """Seeds side by side, split ones, and a seed and what is split from it."""

    def build(s: Any) -> list[Any]:
        seeds = [s, s + 1, s + 2, *ops.split_random_seed(s, 3)]
        return [ops.random_uniform(seed, (10_000,)) for seed in seeds]

    correlation = np.corrcoef(evaluate(build, SEED))
    assert np.abs(correlation - np.eye(6)).max() < 0.05


def test_split_seeds_depend_on_the_seed_and_their_place() -> None:
    def build(s: Any) -> list[Any]:
        return [s, *ops.split_random_seed(s, 2), *ops.split_random_seed(s, 40), *ops.split_random_seed(s + 1, 2)]

    seeds = [tuple(seed.tolist()) for seed in evaluate(build, SEED)]
    assert seeds[1:3] == seeds[3:5]
    assert len(set(seeds)) == 1 + 40 + 2
    again = [tuple(seed.tolist()) for seed in evaluate(lambda s: ops.split_random_seed(s, 3), SEED)]
    assert again == seeds[3:6]


def test_split_adds_a_constant_and_an_op_for_each() -> None:
    with popxl.Ir().main_graph as main:
        seed = popxl.variable(SEED)
        seeds = ops.split_random_seed(seed, 4)
        assert isinstance(seeds, tuple) and all(s.spec == seed.spec for s in seeds)
        assert [op.op_type for op in main.ops] == ["ModifyRandomSeed"] * 4
        assert [c.data.tolist() for c in main.constants] == [0, 1, 2, 3]
        assert {c.dtype for c in main.constants} == {popxl.uint32}
        assert len(main.tensors) == 1 + 8
        with pytest.raises(ValueError, match="expected a seed"):
            ops.split_random_seed(popxl.variable([1, 2]), 3)
        assert len(main.constants) == 4


# The seed decides ---------------------------------------------------------------------------------------------------


def everything(t: Any, s: Any) -> list[Any]:
    """All random ops, of one seed."""
    first, second = ops.split_random_seed(s)
    return [
        ops.random_uniform(s, (3, 5)),
        ops.random_normal(first, (7,), dtype=popxl.float16),
        ops.dropout(t, second, 0.3),
        ops.shaped_dropout(t, s, (1, 4), 0.5),
        ops.cast(first, popxl.int32),
    ]


T = np.linspace(1, 2, 12, dtype=np.float32).reshape(3, 4)


def called(t: Any, s: Any) -> list[Any]:
    graph = popxl.gcg().ir.create_graph(everything, t, s)
    return list(ops.call(graph, t, s))


def called_again(t: Any, s: Any) -> list[Any]:
    """The second call of a graph that is called with another seed before: XLA keeps one function for both."""
    graph = popxl.gcg().ir.create_graph(everything, t, s)
    ops.print_tensor(ops.call(graph, t, s + 5)[0])
    return list(ops.call(graph, t, s))


def in_a_loop(t: Any, s: Any) -> list[Any]:
    """The last of three turns, which begins with the seed."""

    def turn(s: Any, t: Any, *before: Any) -> list[Any]:
        return [s + 1, t, *everything(t, s)]

    start = [ops.init(r.shape, r.dtype) for r in everything(t, s)]
    graph = popxl.gcg().ir.create_graph(turn, s, t, *start)
    _, _, *results = ops.repeat(graph, 3, s - 2, t, *start)
    return results


def among_wide_numbers(t: Any, s: Any) -> list[Any]:
    """In a program that computes in 64 bits."""
    wide = popxl.variable(np.array([1e-300]), downcast=False)
    ops.print_tensor(wide + 1)
    return everything(t, s)


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture(scope="module")
def numbers() -> list[Array]:
    return evaluate(everything, T, SEED)


def assert_same(found: list[Array], expected: list[Array]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("build", [everything, called, called_again, in_a_loop, among_wide_numbers])
def test_wherever_it_runs(numbers, build) -> None:
    assert_same(evaluate(build, T, SEED), numbers)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(
    "settings",
    [
        {"jax_threefry_partitionable": False},
        {"jax_threefry_partitionable": True},
        {"jax_default_prng_impl": "rbg"},
        {"jax_enable_x64": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("build", [everything, in_a_loop])
def test_whatever_jax_is_told(numbers, settings, build) -> None:
    with configured(**settings):
        assert_same(evaluate(build, T, SEED), numbers)


@pytest.mark.here
def test_words_are_drawn_without_a_loop() -> None:
    """Each draw is one call on CPUs: a loop of JAX's takes a dozen kernels, and as long to compile as a layer."""
    with popxl.Ir().main_graph as main:
        t, s = popxl.variable(T), popxl.variable(SEED)
        first, second = ops.split_random_seed(s)
        for seed in (first, second):
            store(ops.dropout(t, seed, 0.5))
    text = "".join(popxl.Session(main.ir).hlo().values())
    assert " while(" not in text and text.count(" call(") >= 4


def test_op_by_op(numbers) -> None:
    """Each op by itself, on arrays, without a program around it."""
    with popxl.Ir().main_graph as main:
        t, s = popxl.variable(T), popxl.variable(SEED)
        results = everything(t, s)
        known = {t: T, s: SEED} | {c: c.data for c in main.constants}
        for op in main.ops:
            known[op.outputs[0]] = op.apply([jax.numpy.asarray(known[x]) for x in op.inputs])
    assert_same([np.asarray(known[r]).astype(r.dtype.as_numpy()) for r in results], numbers)


def test_run_after_run() -> None:
    """The same numbers from the same seed, others from another; and none of it is known when the program is made."""
    ir = popxl.Ir()
    with ir.main_graph:
        stream = popxl.h2d_stream((2,), popxl.uint32)
        out = popxl.d2h_stream((100,), popxl.float32)
        ops.host_store(out, ops.random_normal(ops.host_load(stream), (100,)))
    with popxl.Session(ir) as session:
        first, other, again = (session.run({stream: SEED + k})[out] for k in np.uint32([0, 1, 0]))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_dropout_takes_two_integers_as_a_seed() -> None:
    """Words that are int32 are words. Integers are dropped, too."""
    seed = np.array([1, 2], np.int32)
    with popxl.Ir().main_graph:
        t, s = popxl.variable(1), popxl.variable(seed)
        assert ops.dropout(t, s, 0.5).spec == ops.shaped_dropout(t, s, (), 0.5).spec == t.spec
    assert_same(*(evaluate(lambda t, s: ops.dropout(t, s, 0.5), T, v) for v in (seed, seed.astype(np.uint32))))


NO_SEEDS = [np.uint32([[1, 2]]), np.uint32([1, 2, 3]), np.uint32(1), np.float32([1, 2])]


@pytest.mark.parametrize("seed", NO_SEEDS)
def test_shaped_dropout_refuses_what_is_no_seed(seed) -> None:
    with popxl.Ir().main_graph as main:
        t, s = popxl.variable(1.0), popxl.variable(seed)
        with pytest.raises(ValueError, match=r"expected a seed, a uint32 tensor of shape \(2,\).*`seed_tensor` is"):
            ops.shaped_dropout(t, s, (), 0.5)
    assert main.ops == []


@pytest.mark.parametrize("seed", NO_SEEDS)
def test_dropout_is_built_with_any_seed_and_run_with_a_seed(seed) -> None:
    with popxl.Ir().main_graph as main:
        t, s = popxl.variable(1.0), popxl.variable(seed)
        assert ops.dropout(t, s, 0.5).spec == t.spec
    with pytest.raises(PopxlError, match=r"Dropout.* cannot be run: expected a seed, a uint32 tensor of shape \(2,\)"):
        popxl.Session(main.ir)


# Gradients ----------------------------------------------------------------------------------------------------------


def dropped(t: Any, s: Any) -> Any:
    return ops.dropout(t, s, 0.3)


def parts_dropped(t: Any, s: Any) -> Any:
    return ops.shaped_dropout(t, s, (20, 1), 0.3)


def forward_and_back(build: Callable[..., Any], t: Any, s: Any, g: Any) -> tuple[Any, Any]:
    """A call of a graph, and of its gradient graph."""
    graph = popxl.gcg().ir.create_graph(build, t, s)
    info = autodiff(graph, grads_required=graph.inputs[:1])
    forward = ops.call_with_info(graph, t, s)
    (gradient,) = ops.call(info.graph, g, inputs_dict=info.inputs_dict(forward))
    return forward.outputs[0], gradient


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("build", [dropped, parts_dropped])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("settings", [{}, {"jax_threefry_partitionable": False}], ids=str)
def test_the_gradient_has_the_same_mask(build, dtype, settings) -> None:
    ones = np.ones((20, 30), dtype)
    with configured(**settings):
        mask, gradient = evaluate(lambda t, s, g: forward_and_back(build, t, s, g), ones, SEED, ones)
    assert 0 < (mask == 0).mean() < 1
    np.testing.assert_array_equal(gradient, mask)


@pytest.mark.parametrize("build", [dropped, parts_dropped])
def test_the_gradient_reads_the_seed_alone(build) -> None:
    with popxl.Ir().main_graph:
        t, s = popxl.variable(np.ones((20, 30), np.float32)), popxl.variable(SEED)
        graph = popxl.gcg().ir.create_graph(build, t, s)
        info = autodiff(graph, grads_required=graph.inputs[:1])
        assert [c.fwd_tensor for c in info.expected_inputs] == [graph.outputs[0], graph.inputs[1]]
        with pytest.raises(PopxlError, match="Unable to provide"):
            autodiff(graph)


def test_what_is_computed_again_has_the_same_mask() -> None:
    """A second call with the same seed, and the gradient after it, for a seed that changes in between."""

    def build(t: Any, s: Any, g: Any) -> list[Any]:
        first, back = forward_and_back(dropped, t, s, g)
        forward = popxl.gcg().ir.create_graph(dropped, t, s)
        other = ops.call(forward, t, s + 1)
        again = ops.call(forward, t, s)
        return [first, back, *again, *other]

    ones = np.ones((20, 30), np.float32)
    first, back, again, other = evaluate(build, ones, SEED, ones)
    np.testing.assert_array_equal(back, first)
    np.testing.assert_array_equal(again, first)
    assert (other != first).any()


def test_a_loop_and_its_gradient() -> None:
    """Each turn with a seed of its own: the gradient goes back through the same masks."""

    def turn(t: Any, s: Any) -> Any:
        s, mine = ops.split_random_seed(s)
        return ops.dropout(t, mine, 0.2), s

    def build(t: Any, s: Any, g: Any) -> tuple[Any, Any]:
        ir = popxl.gcg().ir
        body = ir.create_graph(turn, t, s)
        return forward_and_back(lambda t, s: ops.repeat(body, 3, t, s)[0], t, s, g)

    ones = np.ones((20, 30), np.float32)
    forward, gradient = evaluate(build, ones, SEED, ones)
    assert 0.3 < (forward == 0).mean() < 0.65
    np.testing.assert_array_equal(gradient, forward)
