"""Stochastic rounding of in-place updates: probabilities, means, and the seed as state of the program."""

import logging

import ml_dtypes
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops

HALVES = {popxl.bfloat16: ml_dtypes.bfloat16, popxl.float16: np.float16}


def accumulate(t: popxl.TensorByRef, x: popxl.Tensor) -> None:
    ops.var_updates.accumulate_(t, x)


def counting(dtype, start, step, turns=1, calls=1, replicas=1, enabled=True, seed=0, ways="auto"):
    """A program that adds `step` to a variable, `turns` times in a loop, `calls` times in a row."""
    ir = popxl.Ir(replicas)
    ir.options.enableStochasticRounding, ir.options.stochasticRoundingSeed = enabled, seed
    ir.options.calledGraphs = ways
    with ir.main_graph, popxl.in_sequence():
        w = popxl.variable(np.asarray(start, np.float32), dtype, name="w")
        d = popxl.constant(np.broadcast_to(np.asarray(step, np.float32), w.shape))
        graph = ir.create_graph(accumulate, w, d)
        for _ in range(calls):
            ops.repeat(
                graph, turns, inputs_dict=dict(zip(graph.inputs, (w, d), strict=True))
            ) if turns > 1 else ops.call(graph, w, d)
    return ir, w


def ran(ir, w, runs=1):
    with popxl.Session(ir) as session:
        for _ in range(runs):
            session.run()
    return session.get_tensor_data(w).astype(np.float32)


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("start", [1.0, -3.0, 2.0**-15, 1e-7])
def test_both_neighbours_come_with_the_right_probability(dtype, start):
    low = np.asarray(start, HALVES[dtype])
    high = np.nextafter(low, np.asarray(np.inf, low.dtype))
    low, high = np.float32(low), np.float32(high)
    size, share = 1 << 14, 0.3
    found = ran(*counting(dtype, np.full(size, low), np.float32(share) * (high - low)))
    exact = (np.float32(low + np.float32(share) * (high - low)) - low) / (high - low)
    assert set(found.tolist()) == {float(low), float(high)}
    assert abs((found == high).mean() - exact) < 5 * np.sqrt(exact * (1 - exact) / size)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_what_can_be_represented_stays_and_infinities_and_nan_do(dtype):
    largest = float(ml_dtypes.finfo(HALVES[dtype]).max)
    numbers = np.array([0, -0.0, 1.5, -(2.0**-16), largest, -largest, np.inf, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(ran(*counting(dtype, numbers, 0.0), runs=3), numbers)
    assert ran(*counting(dtype, [largest], largest)).item() == np.inf


def test_the_mean_is_exact_where_rounding_to_nearest_stalls():
    step, times = 2.0**-13, 2 * 5 * 8
    start = np.ones(4096)
    found = ran(*counting(popxl.bfloat16, start, step, turns=5, calls=2), runs=8)
    assert abs(found.mean() - (1 + times * step)) < 5 * np.sqrt(times * step / 128 / 4096)
    assert (ran(*counting(popxl.bfloat16, start, step, turns=5, calls=2, enabled=False), runs=8) == 1).all()


def test_numbers_do_not_depend_on_how_calls_are_compiled():
    ways = ("inlined", "kept", "dispatched", "rolled")
    found = [ran(*counting(popxl.float16, np.ones(64), 1e-4, calls=3, ways=each), runs=2) for each in ways]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


def test_runs_repeat_by_their_seed():
    one, same, other = (ran(*counting(popxl.bfloat16, np.ones(64), 1e-3, seed=s), runs=3) for s in (4, 4, 5))
    np.testing.assert_array_equal(one, same)
    assert (one != other).any()


def test_a_program_continues_from_variables_and_seed():
    ir, w = counting(popxl.bfloat16, np.ones(64), 1e-3)
    with popxl.Session(ir) as session:
        for _ in range(3):
            session.run()
        kept = session.get_tensors_data([w, ir.rounding_seed])
        kept = {t.name: array.copy() for t, array in kept.items()}
        session.run()
        expected = session.get_tensor_data(w).copy()
    later, w = counting(popxl.bfloat16, np.ones(64), 1e-3, seed=9)
    with popxl.Session(later) as session:
        session.write_variables_data({w: kept["w"], later.rounding_seed: kept["stochastic_rounding_seed"]})
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(w), expected)


def test_a_saved_session_continues(tmp_path):
    ir, w = counting(popxl.bfloat16, np.ones(64), 1e-3, turns=2)
    with popxl.Session(ir) as session:
        session.run()
        session.save(tmp_path / "program")
        session.run()
        expected = session.get_tensor_data(w).copy()
    with popxl.Session.load(tmp_path / "program") as session:
        assert not session.expected_inputs()
        session.run()
        (same,) = (v for v in session.ir.main_graph.variables if v.name == "w")
        np.testing.assert_array_equal(session.get_tensor_data(same), expected)


def test_checkpoints_of_task_sessions_have_the_seed(tmp_path):
    ir, w = counting(popxl.bfloat16, np.ones(64), 1e-3)
    with addons.TaskSession([], [], addons.NamedTensors(w=w), ir=ir, device_desc="cpu") as session:
        session.run()
        session.save_checkpoint(str(tmp_path / "one"))
        session.run()
        expected = session.get_tensor_data(w).copy()
        session.load_checkpoint(str(tmp_path / "one"), report_missing="error")
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(w), expected)


def test_replicas_that_share_a_variable_agree():
    ir, w = counting(popxl.bfloat16, np.ones(64), 1e-3, replicas=2)
    w.retrieval_mode = "all_replicas"
    with popxl.Session(ir, "ipu_hw") as session:
        for _ in range(3):
            session.run()
        first, second = session.get_tensor_data(w)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first.astype(np.float32), ran(*counting(popxl.bfloat16, np.ones(64), 1e-3), runs=3))


def test_in_place_ops_of_every_kind_round():
    def mean_of(update):
        ir = popxl.Ir()
        ir.options.enableStochasticRounding = True
        with ir.main_graph, popxl.in_sequence():
            w = popxl.variable(np.ones(4096, np.float32), popxl.bfloat16, name="w")
            update(w, popxl.constant(np.full(4096, 2.0**-10), popxl.bfloat16))
        return ran(ir, w).mean() - 1

    updates = {
        "add": ops.add_,
        "scaled": lambda w, d: ops.scaled_add_(w, d, b=1.0),
        "view": lambda w, d: ops.add_(ops.reshape_(w, (64, 64)), ops.reshape(d, (64, 64))),
        "adamw": lambda w, d: addons.optimizers.adamw([w], [-d], lr=2.0**-10, weight_decay=0.0),
        "sgd": lambda w, d: addons.optimizers.sgd([w], [-d], lr=1.0),
    }
    for name, update in updates.items():
        assert abs(mean_of(update) - 2.0**-10) < 3e-4, name


def test_functions_of_jax_round_to_nearest_and_say_so(caplog):
    ir, _ = counting(popxl.bfloat16, np.ones(8), 2.0**-13)
    with caplog.at_level(logging.WARNING):
        step = popxl.to_jax(ir.main_graph)
    assert caplog.text.count("rounds to nearest") == 1
    _, changed = step()
    assert (np.asarray(changed["w"], np.float32) == 1).all()
