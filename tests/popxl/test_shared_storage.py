"""What is passed to a graph twice by reference is one storage there: variables and views of them, as NumPy has them.

Each case is a function of one variable, written once for PopXL and once for NumPy, whose views are what is meant. All
of them make one program, which is compiled in each way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import CrossingUpdateWarning

CASES: dict[str, tuple[Callable[[popxl.Tensor], object], Callable[[np.ndarray], object]]] = {}
START = np.arange(12, dtype=np.int32).reshape(4, 3)
WAYS = ("auto", "inlined", "kept", "dispatched", "rolled")


def case(expected: Callable[[np.ndarray], object]) -> Callable[[Callable[[popxl.Tensor], object]], None]:
    def register(build: Callable[[popxl.Tensor], object]) -> None:
        CASES[build.__name__] = build, expected

    return register


def graph_of(body: Callable[..., object], *inputs: popxl.Tensor, extra: int = 0) -> popxl.Graph:
    """A graph whose inputs are by reference, but for the first `extra` ones."""

    def built() -> object:
        given = [popxl.graph_input(t.shape, t.dtype, f"x{i}", by_ref=i >= extra) for i, t in enumerate(inputs)]
        return body(*given)

    return popxl.gcg().ir.create_graph(built)


def alias_of(t: popxl.Tensor) -> popxl.Tensor:
    """Another name of the same storage."""
    return ops.var_updates.accumulate_(t, ops.init(t.shape, t.dtype))


def add(t: popxl.Tensor, other: object) -> popxl.Tensor:
    if not isinstance(other, popxl.Tensor):
        other = popxl.constant(np.full(t.shape, other, np.int32))
    return ops.var_updates.accumulate_(t, other)


# In NumPy a name is enough, so that the first and the second argument are the same array or views of it.


def swap(x: np.ndarray, y: np.ndarray) -> None:
    x += 10
    y += x
    x *= 2


def swapped(x: popxl.Tensor, y: popxl.Tensor) -> None:
    add(x, 10)
    add(y, ops.identity(x))
    add(x, ops.identity(x))


@case(lambda t: [swap(t, t) for _ in range(4)])
def calls(t: popxl.Tensor) -> None:
    graph = graph_of(swapped, t, t)
    alias = alias_of(t)
    for _ in range(2):
        ops.call(graph, t, alias)
        ops.call(graph, alias, t)


@case(lambda t: (swap(t[:3], t[1:]), swap(t[2:], t[:2][::-1]), swap(t[1:3], t[2:])))
def overlapping_parts(t: popxl.Tensor) -> None:
    three, two = ops.slice_(t, 0, 3), ops.slice_(t, 2, 4)
    ops.call(graph_of(swapped, three, three), three, ops.slice_(t, 1, 4))
    graph = graph_of(swapped, two, two)
    ops.call(graph, two, ops.slice_(t, 1, None, -1))
    ops.call(graph, ops.slice_(t, 1, 3), two)


def _joined(t: np.ndarray) -> None:
    for row in (0, 3):  # the two rows are the first argument, joined
        t[row] += 10
    t[0] += t[3]
    for row in (0, 3):
        t[row] *= 3


@case(_joined)
def several_joined(t: popxl.Tensor) -> None:
    """A view of two tensors, and one of these."""
    first, last = ops.slice_(t, 0, 1), ops.slice_(t, 3, 4)

    def body(x: popxl.Tensor, y: popxl.Tensor, z: popxl.Tensor) -> None:
        add(x, 10)
        add(y, ops.identity(z))
        add(x, ops.identity(x) * 2)

    both = ops.concat_([first, last], 0)
    ops.call(graph_of(body, both, first, last), both, first, last)


@case(lambda t: np.add(t, 30, out=t))
def a_loop_that_changes_the_first(t: popxl.Tensor) -> None:
    def body(x: popxl.Tensor, y: popxl.Tensor) -> object:
        return add(x, 10), y

    ops.repeat(graph_of(body, t, t), 3, t, alias_of(t))


def _turns(t: np.ndarray) -> None:
    number = np.int32(2)
    for _ in range(3):
        t[1:] += number
        number = number + t[:3].sum()
        t[:3] += 1


@case(_turns)
def a_loop_beside_what_is_carried(t: popxl.Tensor) -> None:
    def body(number: popxl.Tensor, x: popxl.Tensor, y: popxl.Tensor) -> object:
        ops.add_(x, number)
        total = number + ops.sum(y)
        add(y, 1)
        return total

    number, last, first = popxl.constant(2, popxl.int32), ops.slice_(t, 1, 4), ops.slice_(t, 0, 3)
    ops.repeat(graph_of(body, number, last, first, extra=1), 3, number, last, first)


def _turns_of_two(t: np.ndarray) -> None:
    other = np.full((2, 3), 2, np.int32)
    for _ in range(3):
        t[1:3] += other
        other += t[:2] + 1


@case(_turns_of_two)
def a_loop_that_changes_two_storages(t: popxl.Tensor) -> None:
    def body(x: popxl.Tensor, y: popxl.Tensor, other: popxl.Tensor, flat: popxl.Tensor) -> None:
        add(y, ops.identity(other))
        add(other, ops.slice(x, 0, 2))
        add(flat, 1)

    other = popxl.variable(np.full((2, 3), 2, np.int32), name="other")
    inputs = t, ops.slice_(t, 1, 3), other, ops.flatten_(other)
    ops.repeat(graph_of(body, *inputs), 3, *inputs)


@case(lambda t: None)
def no_turns(t: popxl.Tensor) -> None:
    ops.repeat(graph_of(lambda x, y: (add(x, 1), y), t, t), 0, t, alias_of(t))


@case(lambda t: swap(t[:2], t[1:3]))
def in_a_branch(t: popxl.Tensor) -> None:
    """A branch has a copy of its own; what it returns is written to the variable afterwards."""

    def branch(x: popxl.Tensor) -> popxl.Tensor:
        first = ops.slice_(x, 0, 2)
        ops.call(graph_of(swapped, first, first), first, ops.slice_(x, 1, 3))
        return x

    ir = popxl.gcg().ir
    taken, other = ir.create_graph(branch, t.spec), ir.create_graph(lambda x: x * 2, t.spec)
    (result,) = ops.conditional(ops.greater(ops.sum(t), popxl.constant(0)), taken, other, [t], [t])
    ops.var_updates.copy_var_update_(t, result)


def _nested(t: np.ndarray) -> None:
    for _ in range(2):
        swap(t, t[::-1])
        t += 1


def _reversed_of_its_own(x: popxl.Tensor, y: popxl.Tensor) -> None:
    ops.call(graph_of(swapped, x, y), x, y)
    add(y, 1)


@case(_nested)
def calls_in_a_loop(t: popxl.Tensor) -> None:
    ops.repeat(graph_of(lambda x, y: _reversed_of_its_own(x, y) or [], t, t), 2, t, ops.slice_(t, 3, None, -1))


@case(lambda t: (swap(t, t), np.add(t, 5, out=t)))
def marked_at_the_call(t: popxl.Tensor) -> None:
    graph = popxl.gcg().ir.create_graph(lambda x, y: swapped(x, y), t.spec, t.spec)
    alias = alias_of(t)
    site = ops.call_with_info(graph, t, alias)
    site.set_parent_input_modified(t)
    site.set_parent_input_modified(alias)
    add(t, 5)


@case(lambda t: np.add(t, t + 110, out=t))
def by_value_beside_it(t: popxl.Tensor) -> None:
    """A copy, made when the graph begins."""

    def body(y: popxl.Tensor, x: popxl.Tensor) -> None:
        add(y, 100)
        add(x, 10)
        add(x, ops.identity(y))

    ops.call(graph_of(body, t, t, extra=1), alias_of(t), t)


def program() -> tuple[popxl.Ir, dict[str, popxl.tensor.Variable]]:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        variables = {name: popxl.variable(START, name=name) for name in CASES}
        for name, (build, _) in CASES.items():
            build(variables[name])
    return ir, variables


def expected(name: str) -> np.ndarray:
    t = START.copy()
    CASES[name][1](t)
    return t


def check(session: popxl.Session, variables: dict[str, popxl.tensor.Variable]) -> None:
    session.run()
    found = {name: np.array(session.get_tensor_data(v)) for name, v in variables.items()}
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected(name), err_msg=name)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("way", WAYS)
def test_one_storage_under_two_names(way: str) -> None:
    ir, variables = program()
    ir.options.calledGraphs = way
    with popxl.Session(ir, "ipu_model") as session:
        check(session, variables)


def test_layers_that_change_one_weight_under_two_names() -> None:
    """They are turns of a loop, and each changes another row of its stack."""
    ir = popxl.Ir()
    ir.options.calledGraphs = "rolled"
    with ir.main_graph, popxl.in_sequence():
        weights = [popxl.variable(START + i, name=f"w{i}") for i in range(4)]
        aliases = [alias_of(w) for w in weights]
        graph = graph_of(swapped, weights[0], weights[0])
        for w, alias in zip(weights, aliases, strict=True):
            ops.call(graph, w, alias)
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
        assert [loop.iterations for loop in session.report.loops] == [4]
        for i, w in enumerate(weights):
            t = START + np.int32(i)
            swap(t, t)
            np.testing.assert_array_equal(session.get_tensor_data(w), t)


def test_on_two_ipus() -> None:
    """The graph runs on one of them, for each would have a storage of its own."""
    ir = popxl.Ir()
    ir.options.placement = "several"

    def body(x: popxl.Tensor, y: popxl.Tensor) -> None:
        with popxl.ipu(0):
            add(x, 10)
        with popxl.ipu(1):
            add(y, ops.identity(x))

    with ir.main_graph, popxl.in_sequence():
        t = popxl.variable(START, name="t")
        ops.call(graph_of(body, t, t), t, alias_of(t))
        with popxl.ipu(1):
            add(popxl.variable(START, name="other"), 1)
    with pytest.warns(CrossingUpdateWarning):
        session = popxl.Session(ir, "ipu_hw")
    with session:
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(t), (START + 10) * 2)


@pytest.mark.thorough
def test_op_by_op() -> None:
    ir, variables = program()
    with popxl.Session(ir, "ipu_model") as session, session.debugging():
        check(session, variables)
