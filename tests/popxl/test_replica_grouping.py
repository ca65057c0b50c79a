"""Replica groupings: assignments, refinement, transposition, and what is refused."""

import gc
import weakref

import numpy as np
import pytest

import popxl
from popxl.ir import Ir
from popxl.replica_grouping import ReplicaGrouping


@pytest.mark.parametrize(
    ("replicas", "arguments", "assignment", "stride", "group_size"),
    [
        (6, (1, 2), [0, 0, 1, 1, 2, 2], 1, 2),
        (6, (3, 2), [0, 1, 2, 0, 1, 2], 3, 2),
        (6, (2, 1), [0, 1, 2, 3, 4, 5], 1, 1),
        (6, (), [0, 0, 0, 0, 0, 0], 1, 6),
        (8, (2,), [0, 1, 0, 1, 0, 1, 0, 1], 2, 4),
        (8, (8,), [0, 1, 2, 3, 4, 5, 6, 7], 1, 1),
        (12, (2, 3), [0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3], 2, 3),
        (12, (3, 4), [0, 1, 2] * 4, 3, 4),
        (1, (1,), [0], 1, 1),
    ],
)
def test_constant(replicas, arguments, assignment, stride, group_size):
    ir = Ir(replication=replicas)
    rg = ir.replica_grouping(*arguments)
    assert rg.assignment == assignment
    assert (rg.stride, rg.group_size, rg.num_groups) == (stride, group_size, replicas // group_size)
    assert rg.is_const and rg.const_rg is rg
    assert rg.to_device_map is None and rg.to_host_map is None
    assert repr(rg) == (
        f"ReplicaGrouping(num_replicas={replicas}, stride={stride}, group_size={group_size}, "
        f"num_groups={replicas // group_size})"
    )
    if group_size > 1:
        assert ir.replica_grouping_from_assignments(assignment) == rg


@pytest.mark.parametrize("replicas", [1, 4, 12, 16, 24])
def test_constant_by_its_definition(replicas):
    ir = Ir(replication=replicas)
    divisors = [n for n in range(1, replicas + 1) if replicas % n == 0]
    for stride in divisors:
        for group_size in divisors:
            if replicas % (stride * group_size) == 0:
                assignment = ir.replica_grouping(stride, group_size).assignment
                for group in range(replicas // group_size):
                    s = stride if group_size > 1 else 1
                    first = group // s * s * group_size + group % s
                    members = [first + i * s for i in range(group_size)]
                    assert [r for r in range(replicas) if assignment[r] == group] == members


@pytest.mark.parametrize(
    ("replicas", "arguments", "fragment"),
    [
        (4, (0, 2), "`stride` is 0. Expected 1 to 4"),
        (4, (-1, 2), "`stride` is -1. Expected 1 to 4"),
        (4, (5, 1), "`stride` is 5. Expected 1 to 4"),
        (4, (5,), "`stride` is 5. Expected 1 to 4"),
        (4, (3, 9), "`stride` is 3, which does not divide 4"),
        (4, (2, 0), "`group_size` is 0. Expected 1 to 4"),
        (4, (1, 5), "`group_size` is 5. Expected 1 to 4"),
        (6, (2, 2), "`stride` 2 times `group_size` 2 is 4, which does not divide 6"),
        (8, (4, 4), "`stride` 4 times `group_size` 4 is 16"),
        (8, (1, 3), "`stride` 1 times `group_size` 3 is 3, which does not divide 8"),
    ],
)
def test_constant_errors(replicas, arguments, fragment):
    with pytest.raises(ValueError) as error:
        Ir(replication=replicas).replica_grouping(*arguments)
    assert str(error.value).startswith("replica_grouping: ")
    assert fragment in str(error.value)


def test_stride_zero_with_the_largest_group():
    with pytest.raises(ZeroDivisionError):
        Ir(replication=4).replica_grouping(stride=0)


@pytest.mark.parametrize(
    ("assignment", "const", "device_map", "host_map"),
    [
        ([0, 0, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 1, 0], [0, 1]),
        ([0, 0, 0, 1, 1, 1] * 2, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0, 1, 0, 1], [0, 1]),
        ([0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], [0, 0, 1, 1, 0, 1], [0, 2]),
        ([0, 1, 1, 0], [0, 1, 2, 3], [0, 1, 1, 0], [0, 1]),
        ([0, 0, 1, 2, 1, 2], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 1, 2], [0, 2, 3]),
        (
            [0, 1, 0, 1, 2, 3, 2, 3] * 2,
            [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7],
            [0, 1, 2, 3] * 2,
            [0, 1, 2, 3],
        ),
    ],
)
def test_non_constant(assignment, const, device_map, host_map):
    rg = Ir(replication=len(assignment)).replica_grouping_from_assignments(assignment)
    assert rg.assignment == assignment
    assert not rg.is_const
    assert rg.num_groups == max(assignment) + 1
    assert rg.group_size == len(assignment) // rg.num_groups
    assert repr(rg) == f"ReplicaGrouping(assignment={assignment})"
    with pytest.raises(NotImplementedError, match="is not constant, so it has no single stride"):
        _ = rg.stride

    refined = rg.const_rg
    assert refined.is_const and refined.assignment == const
    assert (rg.to_device_map, rg.to_host_map) == (device_map, host_map)


@pytest.mark.parametrize("seed", range(30))
def test_any_assignment_is_refined_and_transposed(seed):
    random = np.random.default_rng(seed)
    groups, size = random.integers(2, 5, 2)
    shuffled = np.repeat(random.permutation(np.repeat(range(groups), size)), random.integers(1, 4)).tolist()
    appearing = list(dict.fromkeys(shuffled))
    assignment = [appearing.index(group) for group in shuffled]
    rg = Ir(replication=len(assignment)).replica_grouping_from_assignments(assignment)
    assert rg.assignment == assignment
    assert rg.transpose().assignment == [assignment[:r].count(group) for r, group in enumerate(assignment)]
    if not rg.is_const:
        assert [rg.to_device_map[group] for group in rg.const_rg.assignment] == assignment
        assert [rg.to_device_map[group] for group in rg.to_host_map] == list(range(rg.num_groups))


@pytest.mark.parametrize(
    ("assignment", "fragment"),
    [
        ([0, 0, 0, 1], "groups of equal size; there are 3 in group 0, 1 in group 1"),
        ([1, 1, 2, 2], "groups numbered 0 to 1; there are [1, 2]"),
        ([0, 0, 2, 2], "groups numbered 0 to 1; there are [0, 2]"),
        ([1, 1, 0, 0], "groups numbered in order of appearance; they appear as [1, 0]"),
        ([0, 1], "one entry for each of the 4 replicas"),
        ([0] * 5, "one entry for each of the 4 replicas"),
        ([], "one entry for each of the 4 replicas"),
        ([0, 1, 2, 3], "use `ir.replica_grouping(group_size=1)`"),
    ],
)
def test_assignment_errors(assignment, fragment):
    with pytest.raises(ValueError) as error:
        Ir(replication=4).replica_grouping_from_assignments(assignment)
    assert str(error.value).startswith(f"replica_grouping_from_assignments: `assignment` is {assignment}")
    assert fragment in str(error.value)


@pytest.mark.parametrize(
    ("replicas", "grouping", "transposed"),
    [
        (6, (1, 2), (2, 3)),
        (6, (3, 2), (1, 3)),
        (6, (1, 1), (1, 6)),
        (4, (1, 4), (1, 1)),
        (1, (1, 1), (1, 1)),
        (12, (3, 2), [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1]),
        (12, [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1], (3, 2)),
        (16, (2, 4), [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3]),
        (4, [0, 1, 1, 0], (1, 2)),
        (6, [0, 0, 1, 2, 1, 2], [0, 1, 0, 0, 1, 1]),
    ],
)
def test_transpose(replicas, grouping, transposed):
    ir = Ir(replication=replicas)

    def make(description):
        if isinstance(description, list):
            return ir.replica_grouping_from_assignments(description)
        return ir.replica_grouping(*description)

    result = make(grouping).transpose()
    assert result == make(transposed)
    assert result.is_const == isinstance(transposed, tuple)
    if result.is_const:
        assert (result.stride, result.group_size) == transposed


@pytest.mark.parametrize("replicas", [1, 2, 8, 12])
def test_transpose_by_its_definition(replicas):
    ir = Ir(replication=replicas)
    for stride in range(1, replicas + 1):
        for group_size in range(1, replicas // stride + 1):
            if replicas % stride == 0 and replicas % (stride * group_size) == 0:
                rg = ir.replica_grouping(stride, group_size)
                positions = [rg.assignment[:r].count(group) for r, group in enumerate(rg.assignment)]
                assert rg.transpose().assignment == positions


def test_equality():
    ir, other = Ir(replication=4), Ir(replication=4)
    assert ir.replica_grouping(2, 2) == ir.replica_grouping_from_assignments([0, 1, 0, 1])
    assert ir.replica_grouping(2, 2) != ir.replica_grouping(1, 2)
    assert ir.replica_grouping() != other.replica_grouping()
    for foreign in (None, 1, [0, 0, 0, 0]):
        with pytest.raises(TypeError):
            _ = ir.replica_grouping() == foreign
        with pytest.raises(TypeError):
            _ = ir.replica_grouping() != foreign
    with pytest.raises(TypeError, match="unhashable"):
        hash(ir.replica_grouping())


def test_it_is_plain_data():
    ir = Ir(replication=4)
    rg = ir.replica_grouping(np.int64(2), np.int64(2))
    rg.assignment.append(7)
    assert rg.assignment == [0, 1, 0, 1]
    assert rg and all(type(n) is int for n in (rg.stride, rg.group_size, rg.num_groups))
    assert ir.replica_grouping_from_assignments(np.array([0, 1, 1, 0])).assignment == [0, 1, 1, 0]
    for read_only in ("stride", "group_size", "num_groups", "assignment", "is_const", "const_rg"):
        with pytest.raises(AttributeError):
            setattr(rg, read_only, 1)


def test_it_comes_from_an_ir():
    with pytest.raises(RuntimeError, match="a grouping belongs to an Ir"):
        ReplicaGrouping()


@pytest.mark.usefixtures("only_new_objects")
def test_it_does_not_keep_its_ir():
    ir = Ir(replication=4)
    dead = weakref.ref(ir)
    rg, same = ir.replica_grouping_from_assignments([0, 1, 1, 0]), ir.replica_grouping_from_assignments([0, 1, 1, 0])
    del ir
    gc.collect()
    assert dead() is None
    assert rg == same
    assert rg.const_rg.assignment == [0, 1, 2, 3]
    assert rg.transpose().assignment == [0, 0, 1, 1]


@pytest.mark.parametrize("wrong", [None, "2", 1.0, [1]], ids=repr)
def test_groupings_of_what_is_no_integer(wrong) -> None:
    ir = Ir(4)
    with pytest.raises(TypeError, match="^replica_grouping: `stride` must be an integer; got"):
        ir.replica_grouping(stride=wrong)
    with pytest.raises(TypeError, match="^replica_grouping_from_assignments: `assignment` must "):
        ir.replica_grouping_from_assignments(None if wrong is None else [0, 0, 1, wrong])
    if wrong is not None:
        with pytest.raises(TypeError, match="^replica_grouping: `group_size` must be an integer; got"):
            ir.replica_grouping(group_size=wrong)
    assert ir.replica_grouping(np.int64(2), np.int8(2)).assignment == [0, 1, 0, 1]


def test_values_are_shared_by_the_replicas_of_their_ir() -> None:
    """A grouping of other replicas would be found when a session is made, if at all."""
    ir = Ir(2)
    others = Ir(4).replica_grouping(group_size=2)
    with ir.main_graph as main:
        with pytest.raises(ValueError, match="^variable: `replica_grouping` groups 4 replicas, and the Ir has 2. Make"):
            popxl.variable(np.zeros((2, 3)), replica_grouping=others)
        with pytest.raises(ValueError, match="^replica_sharded_buffer: `replica_grouping` groups 4 replicas"):
            popxl.replica_sharded_buffer((2, 3), popxl.float32, others)
    assert not main.variables
