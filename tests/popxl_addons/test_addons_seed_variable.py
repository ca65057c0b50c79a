"""Seeds that live in the program, one for each group of replicas."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.seed_variable import seed_variable
from popxl_addons.task_session import TaskSession


def program(replication, grouping=None, step=0):
    """A program that stores its seed, and then changes it by `step`."""
    ir = popxl.Ir(replication=replication)
    with ir.main_graph, popxl.in_sequence():
        variable, seed = seed_variable(7, grouping and grouping(ir))
        stream = addons.host_store(seed)
        if step:
            seed += step
    return ir, variable, seed, stream


GROUPINGS = {
    "each": (None, range(4)),
    "pairs": (lambda ir: ir.replica_grouping(group_size=2), [0, 0, 1, 1]),
    "strided": (lambda ir: ir.replica_grouping(stride=2, group_size=2), [0, 1, 0, 1]),
    "irregular": (lambda ir: ir.replica_grouping_from_assignments([0, 1, 1, 0]), [0, 1, 1, 0]),
    "all": (lambda ir: ir.replica_grouping(), [0] * 4),
}


@pytest.mark.parametrize("name", GROUPINGS)
def test_equal_in_a_group_and_different_between_groups(name):
    grouping, assignment = GROUPINGS[name]
    ir, variable, seed, stream = program(4, grouping)
    groups = len(set(assignment))
    seeds = popxl.create_seeds(7, replicas=groups).reshape(groups, 2)
    assert variable.name == "random_seed" and variable.shape_on_host == ((groups, 2) if groups > 1 else (2,))
    assert (seed.shape, seed.dtype) == ((2,), popxl.uint32)
    with popxl.Session(ir, "ipu_hw") as session:
        np.testing.assert_array_equal(session.run()[stream], seeds[list(assignment)])
        host = session.get_tensor_data(variable).reshape(groups, 2)
        np.testing.assert_array_equal(host, seeds)
    assert len(np.unique(host, axis=0)) == groups


def test_one_replica():
    ir, variable, _, stream = program(1)
    with popxl.Session(ir, "ipu_hw") as session:
        np.testing.assert_array_equal(session.run()[stream], popxl.create_seeds(7))
    assert variable.shape_on_host == (2,)


def test_it_lasts_from_run_to_run_and_context_to_context():
    ir, variable, _, stream = program(4, GROUPINGS["pairs"][0], step=1)
    first = popxl.create_seeds(7, replicas=2)
    session = popxl.Session(ir, "ipu_hw")
    with session:
        for i in range(3):
            np.testing.assert_array_equal(session.run()[stream], (first + np.uint32(i))[[0, 0, 1, 1]])
        np.testing.assert_array_equal(session.get_tensor_data(variable), first + np.uint32(3))
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(variable), first + np.uint32(4))
    with session:  # the value goes back to the device
        np.testing.assert_array_equal(session.run()[stream], (first + np.uint32(4))[[0, 0, 1, 1]])


def test_written_from_the_host():
    ir, variable, _, stream = program(4, GROUPINGS["strided"][0])
    chosen = np.array([[1, 2], [3, 4]], np.uint32)
    with popxl.Session(ir, "ipu_hw") as session:
        session.write_variable_data(variable, chosen)
        np.testing.assert_array_equal(session.run()[stream], chosen[[0, 1, 0, 1]])


def test_random_numbers_are_those_of_the_group():
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        _, seed = seed_variable(3, ir.replica_grouping(group_size=2))
        key, _ = ops.split_random_seed(seed)
        stream = addons.host_store(ops.random_normal(key, (5,)))
        seed += 1
    with popxl.Session(ir, "ipu_hw") as session:
        first, second = (np.array(session.run()[stream]) for _ in range(2))
    for numbers in (first, second):
        np.testing.assert_array_equal(numbers[[0, 2]], numbers[[1, 3]])
        assert not np.array_equal(numbers[0], numbers[2])
    assert not np.array_equal(first, second)


def test_part_of_the_state_of_a_task():
    ir, variable, _, _ = program(2, step=1)
    with TaskSession([], [], addons.NamedTensors(random_seed=variable), ir=ir, device_desc="ipu_hw") as session:
        session.run()
        np.testing.assert_array_equal(
            session.get_named_tensors_data().random_seed, popxl.create_seeds(7, replicas=2) + np.uint32(1)
        )


def test_errors():
    ir = popxl.Ir()
    with ir.main_graph, pytest.raises(ValueError, match="seed"):
        seed_variable(-1)
    assert not ir.main_graph.variables
    with ir.create_empty_graph("sub"), pytest.raises(ValueError, match="main graph"):
        seed_variable(1)
    with pytest.raises(RuntimeError):
        seed_variable(1)
