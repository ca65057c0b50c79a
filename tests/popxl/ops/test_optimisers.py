"""Optimisers made of `ops.var_updates`, step by step beside torch's and NumPy's; and what no row of these ops says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import TensorByRef, ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate, store

Array = np.ndarray
vu = ops.var_updates

STEPS = 10
LR, BETA1, BETA2, EPSILON, DECAY = 0.01, 0.9, 0.999, 1e-8, 0.1
START = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)
GRADIENTS = np.random.default_rng(1).normal(size=(STEPS, 2, 3)).astype(np.float32)


# Programs -----------------------------------------------------------------------------------------------------------


def trained(
    how: str, update: Callable[..., Any], gradients: Array = GRADIENTS, dtypes: str = "f4 f4 f4 f4", *others: Any
) -> tuple[Array, Any]:
    """The weight after each step of a program, and the time step at its end.

    Args:
        how: the steps are runs of the session (`"run"`), runs that call a graph (`"call"`), or turns of a loop
            (`"repeat"`). A graph gets its state by reference.
        update: adds the ops of a step, given the weight, both moments, the time step, the gradient, and `others`.
        gradients: one for each step.
        dtypes: of the weight, the moments and the time step.
        others: numbers that are variables, which the graph gets by value.
    """
    ir = popxl.Ir()
    ir.num_host_transfers = STEPS if how == "repeat" else 1
    w, m, v, t = map(np.dtype, dtypes.split())
    with ir.main_graph, popxl.in_sequence():
        zeros = np.zeros_like(START)
        state = [popxl.variable(a) for a in (START.astype(w), zeros.astype(m), zeros.astype(v), np.zeros((), t))]
        numbers = [popxl.variable(np.float32(number)) for number in others]
        incoming = popxl.h2d_stream(START.shape, popxl.dtype.as_dtype(gradients))
        outgoing = popxl.d2h_stream(START.shape, popxl.dtype.as_dtype(w))

        def step(w: TensorByRef, m: TensorByRef, v: TensorByRef, t: TensorByRef, *numbers: popxl.Tensor) -> None:
            update(w, m, v, t, ops.host_load(incoming), *numbers)
            ops.host_store(outgoing, w)

        if how == "run":
            step(*state, *numbers)
        else:
            graph = ir.create_graph(step, *state, *numbers)
            if how == "call":
                ops.call(graph, *state, *numbers)
            else:
                ops.repeat(graph, STEPS, *state, *numbers)
    with popxl.Session(ir, "ipu_model") as session:
        runs = [gradients] if how == "repeat" else gradients
        weights = [np.array(session.run({incoming: g})[outgoing]) for g in runs]
        count = session.get_tensor_data(state[3])[()]
    return (weights[0] if how == "repeat" else np.stack(weights)), count


def adam(l2: float = 0, decoupled: Any = 0.0) -> Callable[..., Any]:
    """Adam, whose weight decays by way of the gradient, or by itself."""

    def update(w, m, v, t, g):
        if l2:
            g = ops.scaled_add(g, w, b=l2)
        vu.accumulate_moving_average_(m, g, BETA1)
        vu.accumulate_moving_average_square_(v, g, BETA2)
        direction = vu.adam_updater(m, v, w, t, decoupled, BETA1, BETA2, EPSILON)
        ops.scaled_add_(w, direction, b=-LR)

    return update


def adam_of_tensors(w, m, v, t, g, lr, beta1, beta2, epsilon, decay):
    """Every number is a tensor that the running program may change."""
    vu.accumulate_moving_average_(m, g, beta1)
    vu.accumulate_moving_average_square_(v, g, beta2)
    direction = vu.adam_updater(m, v, w, t, decay, beta1, beta2, epsilon)
    ops.scaled_add_(w, direction, b=-lr)


def adamax(w, m, v, t, g):
    """v is the infinity norm, made of other ops."""
    vu.accumulate_moving_average_(m, g, BETA1)
    vu.copy_var_update_(v, ops.maximum(v * BETA2, ops.abs(g)))
    direction = vu.adamax_updater(m, v, time_step=t, beta1=BETA1, epsilon=0.0)
    ops.scaled_add_(w, direction, b=-LR)


def lamb(limit: float | None = None) -> Callable[..., Any]:
    def update(w, m, v, t, g):
        vu.accumulate_moving_average_(m, g, BETA1)
        vu.accumulate_moving_average_square_(v, g, BETA2)
        direction = vu.lamb_updater(m, v, w, t, DECAY, BETA1, BETA2, EPSILON)
        vu.adam_var_update(w, direction, ops.lamb_square(w), ops.lamb_square(direction), LR, limit)

    return update


# What they should do ------------------------------------------------------------------------------------------------


def by_torch(name: str, **settings: Any) -> Array:
    """The weight after each step, in double precision."""
    torch = pytest.importorskip("torch")
    w = torch.nn.Parameter(torch.from_numpy(START.astype(np.float64)))
    optimiser = getattr(torch.optim, name)([w], lr=LR, betas=(BETA1, BETA2), **settings)
    weights = []
    for g in GRADIENTS:
        w.grad = torch.from_numpy(g.astype(np.float64))
        optimiser.step()
        weights.append(w.detach().numpy().copy())
    return np.stack(weights)


def by_numpy(limit: float = np.inf) -> Array:
    """LAMB: Adam's direction, as long as the weight is, but no longer than `limit`, times the learning rate."""
    w, m, v = START.astype(np.float64), np.zeros(START.shape), np.zeros(START.shape)
    weights = []
    for t, g in enumerate(GRADIENTS.astype(np.float64), start=1):
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g**2
        x = m / (1 - BETA1**t) / (np.sqrt(v / (1 - BETA2**t)) + EPSILON) + DECAY * w
        w = w - LR * min(np.linalg.norm(w), limit) / np.linalg.norm(x) * x
        weights.append(w)
    return np.stack(weights)


OPTIMISERS: dict[str, tuple[Callable[..., Any], Callable[[], Array]]] = {
    "Adam": (adam(), lambda: by_torch("Adam", eps=EPSILON)),
    "Adam with L2": (adam(l2=DECAY), lambda: by_torch("Adam", eps=EPSILON, weight_decay=DECAY)),
    "AdamW": (adam(decoupled=DECAY), lambda: by_torch("AdamW", eps=EPSILON, weight_decay=DECAY)),
    "Adamax": (adamax, lambda: by_torch("Adamax", eps=0)),
    "LAMB": (lamb(), by_numpy),
    "LAMB with a limit": (lamb(0.5), lambda: by_numpy(0.5)),
}


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("how", ["run", "call", "repeat"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_step_by_step(name, how) -> None:
    update, reference = OPTIMISERS[name]
    weights, count = trained(how, update)
    np.testing.assert_allclose(weights, reference(), rtol=2e-6, atol=2e-6)
    assert count == STEPS


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("dtype", ["i4", "u4", "i2", "f4", "f2"])
def test_the_time_step_may_be_an_integer(dtype) -> None:
    """It stays of its dtype, and the steps are the same."""
    weights, count = trained("repeat", adam(decoupled=DECAY), GRADIENTS, f"f4 f4 f4 {dtype}")
    assert count == STEPS and count.dtype == dtype
    np.testing.assert_array_equal(weights, trained("run", adam(decoupled=DECAY))[0])


@pytest.mark.parametrize("how", ["run", "call", "repeat"])
def test_numbers_that_are_tensors(how) -> None:
    weights, _ = trained(how, adam_of_tensors, GRADIENTS, "f4 f4 f4 i4", LR, BETA1, BETA2, EPSILON, DECAY)
    # 0.999 in float32 differs from 0.999 by 1.3e-8, which 1 - 0.999 makes 1.3e-5 of.
    np.testing.assert_allclose(weights, by_torch("AdamW", eps=EPSILON, weight_decay=DECAY), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["run", "repeat"])
def test_half_precision(how) -> None:
    """Weight and first moment in float16, the second moment in float32: each is rounded once in a step."""

    def half(a: Array) -> Array:
        return a.astype(np.float16).astype(np.float64)

    w, m, v = half(START), np.zeros(START.shape), np.zeros(START.shape)
    expected = []
    for t, g in enumerate(half(GRADIENTS), start=1):
        m = half(BETA1 * m + (1 - BETA1) * g)
        v = BETA2 * v + (1 - BETA2) * g**2
        x = half(m / (1 - BETA1**t) / (np.sqrt(v / (1 - BETA2**t)) + EPSILON) + DECAY * w)
        w = half(w - LR * x)
        expected.append(w)
    weights, _ = trained(how, adam(decoupled=DECAY), GRADIENTS.astype(np.float16), "f2 f2 f4 f4")
    assert weights.dtype == np.float16
    np.testing.assert_allclose(weights, np.stack(expected), rtol=1e-3, atol=1e-3)
    assert (weights == np.stack(expected)).mean() > 0.9


def test_small_gradients_reach_a_float32_second_moment() -> None:
    """Their squares are nothing in float16, so they may not be squared there."""
    g = np.full((2,), 1e-4, np.float16)

    def build(m, v, g):
        vu.accumulate_moving_average_(m, g, 0.9)
        vu.accumulate_moving_average_square_(v, g, 0.999)
        return vu.adam_updater(m, v, epsilon=1e-12)

    (direction,) = evaluate(build, np.zeros(2, np.float16), np.zeros(2, np.float32), g)
    np.testing.assert_allclose(direction, 0.1 / np.sqrt(0.001), rtol=2e-2)  # not a division by 1e-12


@pytest.mark.parametrize("how", ["run", "repeat"])
def test_loss_scaling(how) -> None:
    """Scaled gradients in float16 are added up in float32, unscaled by the factor."""
    scale = 2.0**10

    def update(w, m, v, t, g):
        total = ops.init(w.shape, popxl.float32)
        vu.accumulate_(total, g, 0.25 / scale)
        vu.accumulate_(total, g, 0.75 / scale)
        adam(decoupled=DECAY)(w, m, v, t, total)

    gradients = (GRADIENTS * scale).astype(np.float16)
    weights, _ = trained(how, update, gradients)
    expected, _ = trained("run", adam(decoupled=DECAY), (gradients / np.float16(scale)).astype(np.float32))
    np.testing.assert_allclose(weights, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore::popxl.errors.UnusedTransferWarning")  # one result of ten batches
def test_mean_over_micro_batches() -> None:
    """The mean, the counter, and both at zero again."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        mean, count = popxl.variable(np.zeros((2, 3), np.float32)), popxl.variable(0)
        gradient = popxl.h2d_stream((2, 3), popxl.float32)

        def accumulate(mean: TensorByRef, count: TensorByRef) -> None:
            vu.accumulate_mean_(mean, ops.host_load(gradient), count)
            ops.add_(count, popxl.constant(1))

        ops.repeat(ir.create_graph(accumulate, mean, count), STEPS, mean, count)
        streams = store([mean, count])
        vu.accumulator_zero_(mean), vu.accumulator_zero_(count)
        streams += store([mean, count])
    ir.num_host_transfers = STEPS
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run({gradient: GRADIENTS})
    found = [np.asarray(outputs[stream])[0] for stream in streams]
    np.testing.assert_allclose(found[0], GRADIENTS.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert found[1] == STEPS and not found[2].any() and found[3] == 0


# Examples -----------------------------------------------------------------------------------------------------------

WEIGHT, FIRST, SECOND = np.float32([1, -2]), np.float32([0.1, -0.2]), np.float32([0.01, 0.04])
BETAS = {"beta1": 0.9, "beta2": 0.999}
UPDATES = [
    (1, lambda t, x: [vu.accumulate_(t, x)], [4]),
    (1, lambda t, x: [vu.accumulate_(t, x, f=0.5)], [2.5]),
    (1, lambda t, x: [vu.accumulate_square_(t, x, f=0.5)], [5.5]),
    (1, lambda t, x: [vu.accumulate_square_(t, x)], [10]),
    (1, lambda t, x: [vu.accumulate_moving_average_(t, x, 0.9)], [1.2]),
    (1, lambda t, x: [vu.accumulate_moving_average_square_(t, x, 0.9)], [1.8]),
    (2, lambda t, x: [vu.accumulator_scale_(t, 0.25)], [0.5]),
    (2, lambda t, x: [vu.accumulator_zero_(t)], [0]),
]


@pytest.mark.parametrize(("t", "build", "expected"), UPDATES)
def test_examples_of_accumulators(t, build, expected) -> None:
    results = evaluate(build, np.float32(t), np.float32(3))
    np.testing.assert_allclose(results, expected, rtol=1e-6)


def test_example_of_a_running_mean() -> None:
    def build(t, *Xs):
        for step, X in enumerate(Xs):
            yield ops.identity(vu.accumulate_mean_(t, X, step))

    np.testing.assert_allclose(evaluate(build, *np.float32([0, 1, 2, 6])), [1, 1.5, 3], rtol=1e-6)


DIRECTIONS = [
    (vu.adam_updater, SECOND, None, {}, [0.999999, -0.9999995]),
    (vu.adam_updater, SECOND, 0, BETAS, [0.31622776, -0.31622776]),
    (vu.adam_updater, SECOND, 0, {"weight_decay": 0.01, **BETAS}, [0.32622776, -0.33622776]),
    (vu.adam_updater, SECOND, 9, BETAS, [0.15318906, -0.15318907]),
    (vu.adam_updater, SECOND, 0, {"beta1": 0, "beta2": 0.0}, [0.999999, -0.9999995]),
    (vu.adamax_updater, np.float32([0.5, 0.4]), 1, {"beta1": 0.9}, [1.05263137, -2.63157829]),
]


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32], ids=str)
@pytest.mark.parametrize(("updater", "second", "step", "settings", "expected"), DIRECTIONS)
def test_examples_of_updaters(updater, second, step, settings, expected, dtype) -> None:
    """To the last digits but one, for LAMB as for Adam; the time step is the next one, of whatever shape it is."""
    for form in (updater, vu.lamb_updater) if updater is vu.adam_updater else (updater,):
        for shape in ((), (1,)) if step is not None else ((),):

            def build(w, m, v, *t):
                return [form(m, v, w, *t, **settings), w, m, v, *t]  # noqa: B023  # called at once

            t = [] if step is None else [np.full(shape, step, dtype)]
            found, *after = evaluate(build, WEIGHT, FIRST, second, *t)
            np.testing.assert_allclose(found, expected, rtol=3e-7)
            for operand, was in zip(after, [WEIGHT, FIRST, second, *(a + dtype(1) for a in t)], strict=True):
                np.testing.assert_array_equal(operand, was)
                assert operand.dtype == was.dtype


def test_dtype_of_the_direction() -> None:
    """That of the weight if it decays, else that of the first moment."""
    with popxl.Ir().main_graph:
        m, v, w = (popxl.variable(np.ones((2, 3)), dtype) for dtype in (popxl.float16, popxl.float32, popxl.float32))
        t = popxl.variable(0.0)
        for updater in (vu.adam_updater, vu.lamb_updater, vu.adamax_updater):
            betas = {} if updater is vu.adamax_updater else BETAS
            assert updater(m, v, w, t, **betas).spec == m.spec
            assert updater(m, v, w, t, 0.0, **betas).spec == m.spec
            assert updater(m, v, w, t, 0.1, **betas).spec == w.spec


# What is built ------------------------------------------------------------------------------------------------------


def test_plain_numbers_are_part_of_the_op() -> None:
    """They are printed with it, and add no tensor; and what does not count is no operand."""
    with popxl.Ir().main_graph as main:
        names = ("w", "m", "v", "g", "t")
        w, m, v, g, t = (popxl.variable(np.float32([1, 2] if name != "t" else 0), name=name) for name in names)
        vu.accumulate_moving_average_(m, g, np.float32(0.5))
        vu.accumulate_(v, g)
        vu.accumulator_scale_(v, 2)
        vu.adam_updater(m, v, w, t, 0.25, 0.5, 0.75)
        vu.lamb_updater(m, v, w, weight_decay=0, beta1=0.5)
        vu.adamax_updater(m, v, w, t)
        vu.adam_var_update(w, m, t, t, 0.5)
        assert not main.constants
    listing = [line.partition(" = ")[2] for line in str(main).splitlines()[6:]]
    assert listing == [
        "Accumulate(&m, g, f=0.5)",
        "Accumulate(&v, g)",
        "AccumulatorScale(&v, f=2)",
        "AdamUpdater(m, v, w, &t, mode=adam, weight_decay=0.25, beta1=0.5, beta2=0.75, epsilon=1e-07)",
        "AdamUpdater(m, v, mode=lamb, epsilon=1e-07)",
        "AdamUpdater(m, v, time_step=&t, mode=adamax, beta1=0.9, epsilon=1e-07)",
        "AdamVarUpdate(&w, m, t, t, learning_rate=0.5)",
    ]


def test_builds_what_is_not_run() -> None:
    """Integers where numbers are meant, and shapes that do not fit, are not judged before they have to be."""
    with popxl.Ir().main_graph as main:
        number, row, table = popxl.variable(1), popxl.variable([1, 2, 3]), popxl.variable([[1, 2], [3, 4]])
        decay = popxl.variable(0.1)
        for t in (number, row, table):
            vu.accumulate_(t, t, 0.5), vu.accumulate_square_(t, t, 0.5), vu.accumulate_mean_(t, t, number)
            vu.accumulate_moving_average_(t, t, 0.5), vu.accumulate_moving_average_square_(t, t, decay)
            vu.accumulator_scale_(t, 0.5), vu.accumulator_scale_(t, t), vu.accumulator_zero_(t)
            for updater in (vu.adam_updater, vu.lamb_updater):
                updater(t, t)
                updater(t, t, t, number, 0.1, 0.9, 0.999)
                assert updater(t, t, t, weight_decay=decay).dtype is popxl.int32
            vu.adamax_updater(t, t, time_step=number)
            for settings in ({}, {"learning_rate": 0.1}, {"max_weight_norm": decay}):
                vu.adam_var_update(t, t, number, number, **settings)
            for axis in (0, 1, -1):
                vu.sparse_accumulate_(t, row, row, axis, 0.5), vu.sparse_accumulate_(t, t, number, axis, W=table)
        assert all(len(op.outputs) == 1 for op in main.ops)


# Operands, where a row has no time step -----------------------------------------------------------------------------


@pytest.mark.parametrize("updater", [vu.adam_updater, vu.lamb_updater, vu.adamax_updater])
def test_operands_of_updaters(updater) -> None:
    """Tensors of the current graph, in one place; and numbers only where numbers are meant."""
    ir = popxl.Ir()
    mode = {} if updater is vu.adamax_updater else {"beta2": 0.999}
    operands = {"acc_first_order": FIRST, "acc_second_order": SECOND, "weight": WEIGHT, "time_step": np.float32(0)}
    factors = {"weight_decay": 0.1, "beta1": 0.9, "epsilon": 0.5} | mode
    with ir.main_graph:
        inside = {name: popxl.variable(value) for name, value in (operands | factors).items()}
        assert len(updater(**inside).producer.inputs) == len(inside)
        before = len(ir.main_graph.ops)
    with ir.create_empty_graph():
        outside = {name: popxl.graph_input(t.shape, t.dtype) for name, t in inside.items()}
    with pytest.raises(RuntimeError, match="There is no current graph"):
        updater(**inside)
    with ir.main_graph as main:
        for name in inside:
            with pytest.raises(ValueError, match=f"`{name}` is .*, which is not in the main graph"):
                updater(**inside | {name: outside[name]})
            with pytest.raises(TypeError, match=rf"`{name}` must be a .*got \[2\] \(list\)"):
                updater(**inside | {name: [2]})
        for name in operands:
            with pytest.raises(TypeError, match=rf"`{name}` must be a Tensor; got 2 \(int\)"):
                updater(**inside | {name: 2})
        for name in ("time_step", *factors):
            with pytest.raises(PopxlError, match=r"a number or a tensor of one element; `t.*` has the shape \(3,\)"):
                updater(**inside | {name: popxl.variable([1.0, 2.0, 3.0])})
        assert len(main.ops) == before
        here = {name: ops.identity(t) for name, t in inside.items()}
        with popxl.ipu(1):
            there = {name: ops.identity(t) for name, t in inside.items()}
        for name in inside:
            if name in ("beta1", "beta2", "epsilon"):
                updater(**here | {name: there[name]})
            else:
                with pytest.raises(ValueError, match="different IPUs: "):
                    updater(**here | {name: there[name]})


def test_order_of_the_checks_of_adamax() -> None:
    with popxl.Ir().main_graph:
        m, t = popxl.variable([1.0, 2.0]), popxl.variable(0.0)
        with pytest.raises(ValueError, match="Weight decay requires weight to not be None."):
            vu.adamax_updater(m, m, weight_decay=t)
        with pytest.raises(ValueError, match="AdaMax requires time_step to not be None."):
            vu.adamax_updater(m, m, m, weight_decay=0.1)
        with pytest.raises(PopxlError, match="the moments, and the weight that decays, have to have the same shape"):
            vu.adamax_updater(m, m, t, t, weight_decay=0.1)
        with pytest.raises(TypeError, match="`beta1` must be a number or a Tensor of one element; got None"):
            vu.adamax_updater(m, m, time_step=t, beta1=None)
        vu.adamax_updater(m, m, t, t)  # a weight that does not decay is not looked at


def test_the_step_of_lamb_reads_from_anywhere() -> None:
    with popxl.Ir().main_graph:
        w, x, r1, r2, lr, limit = (ops.identity(popxl.variable(1.0)) for _ in range(6))
        with popxl.ipu(1):
            away = [ops.identity(t) for t in (x, r1, r2, lr, limit)]
        vu.adam_var_update(w, *away)


def test_no_gradient_of_updaters() -> None:
    """With a time step they modify it; without, none flows."""

    def counted(m: TensorByRef, t: TensorByRef):
        return vu.adam_updater(m, m, time_step=t, **BETAS)

    ir = popxl.Ir()
    with ir.main_graph:
        m, t = popxl.variable([1.0, 2.0]), popxl.variable(0.0)
        with pytest.raises(PopxlError, match="contains a modifying op: AdamUpdater"):
            autodiff(ir.create_graph(counted, m, t))
        with pytest.raises(PopxlError, match="Unable to provide"):
            autodiff(ir.create_graph(lambda m: vu.adam_updater(m, m), m))


# Sparse -------------------------------------------------------------------------------------------------------------


def test_sparse_accumulate_is_the_gradient_of_gather() -> None:
    """Added to what was there, without a table in between."""
    random = np.random.default_rng(0)
    table, ids = random.normal(size=(4, 5, 3)).astype(np.float32), np.int32([[0, 4, 4], [-1, 2, 7]])
    g = random.normal(size=(4, 2, 3, 3)).astype(np.float32)

    def build(table, ids, g, total):
        graph = popxl.gcg().ir.create_graph(lambda t, i: ops.gather(t, i, axis=1, zero_OOR=True), table, ids)
        info = autodiff(graph, grads_required=graph.inputs[:1])
        site = ops.call_with_info(graph, table, ids)
        (gradient,) = ops.call(info.graph, g, inputs_dict=info.inputs_dict(site))
        return [total + gradient, vu.sparse_accumulate_(total, g, ids, axis=1, W=table)]

    dense, sparse = evaluate(build, table, ids, g, table + 1)
    np.testing.assert_allclose(sparse, dense, rtol=1e-6)


@pytest.mark.parametrize(
    ("t", "X", "axis", "message"),
    [
        ((4, 2), (2, 2), 0, r"`X` has the shape \(2, 2\); expected that of `t`, \(4, 2\), .*dimension 0: \(3, 2\)"),
        ((4, 2), (3, 2), -1, r"dimension -1: \(4, 3\)"),
        ((4,), (3,), 1, r"`t`, \(4,\), with that of `indices`, \(3,\), in place of dimension 1\."),
        ((), (3,), 0, r"in place of dimension 0\."),
    ],
)
def test_sparse_accumulate_of_shapes_that_do_not_fit(t, X, axis, message) -> None:
    """Found out when the program is compiled."""
    with pytest.raises(PopxlError, match=f"^sparse_accumulate_: .*{message}"):
        evaluate(
            lambda *operands: vu.sparse_accumulate_(*operands, axis=axis),
            np.zeros(t, np.float32), np.zeros(X, np.float32), np.int32([0, 1, 2]),
        )  # fmt: skip


# 64 bits ------------------------------------------------------------------------------------------------------------


def test_double_precision() -> None:
    def build() -> list[Any]:
        w, m, v, g = (popxl.variable(np.float64([x, 2 * x]), downcast=False) for x in (1, 0.1, 0.01, 1 / 3))
        t, ids = popxl.variable(np.int64(4), downcast=False), popxl.variable(np.int64([0, 2**33]), downcast=False)
        vu.accumulate_moving_average_(m, g, 0.9)
        vu.accumulate_moving_average_square_(v, g, 0.999)
        x = vu.adam_updater(m, v, w, t, 0.1, 0.9, 0.999)
        squares = ops.sum(w * w), ops.sum(x * x)
        return [x, vu.adam_var_update(w, x, *squares, 0.1), t, vu.sparse_accumulate_(g, w * 0 + 1, ids)]

    w, m, v, g = (np.float64([x, 2 * x]) for x in (1, 0.1, 0.01, 1 / 3))
    m, v = 0.9 * m + (1 - 0.9) * g, 0.999 * v + (1 - 0.999) * g * g
    x = m / (1 - 0.9**5) / (np.sqrt(v / (1 - 0.999**5)) + 1e-7) + 0.1 * w
    expected = [x, w - np.linalg.norm(w) / np.linalg.norm(x) * 0.1 * x, 5, [4 / 3, 2 / 3]]
    for found, wish in zip(evaluate(build), expected, strict=True):
        assert found.dtype.itemsize == 8
        np.testing.assert_allclose(found, wish, rtol=1e-13)
