"""`Ir.create_graph`: how arguments become inputs and results outputs, what is by reference, and what is refused.

This module must not defer its annotations: `TensorByRef` is recognised as an object.
"""

import functools
from typing import Dict, List, Optional, Tuple  # noqa: UP035

import pytest

import popxl
from popxl import TensorByRef, ops
from popxl.typing_ import NewAliasAnnotation

F32 = popxl.float32
SCALAR = popxl.TensorSpec((), F32)


def sizes(graph):
    """The inputs of a graph: names, and shapes in order."""
    return {name: t.shape for name, t in graph.inputs_by_name.items()}


def spec(*shape):
    return popxl.TensorSpec(shape, F32)


# Arguments ------------------------------------------------------------------------------------------------------------


def test_tensors_and_specs_become_inputs(ir):
    seen = []

    def function(a, b, c, d):
        seen.extend([a, b, c, d])

    with ir.main_graph:
        v = popxl.variable([1.0, 2.0])
        k = popxl.constant(3)
        graph = ir.create_graph(function, v, k, popxl.TensorSpec([4], popxl.float16, (2, 2)), d=v + 1)
    assert tuple(seen) == graph.inputs
    assert [(t.name, t.shape, t.dtype, t.meta_shape) for t in seen] == [
        ("a", (2,), popxl.float32, ()),
        ("b", (), popxl.int32, ()),
        ("c", (4,), popxl.float16, (2, 2)),
        ("d", (2,), popxl.float32, ()),
    ]
    assert {type(t) for t in seen} == {popxl.Tensor}
    assert graph.outputs == () and graph.ops == []


def test_everything_else_is_passed_through(ir):
    nested, mapping, empty = [[1, 2], [3]], {"a": 1}, []
    with ir.main_graph:
        x = popxl.variable(1.0)
    tensors = {"x": x}

    def function(n, m, e, t, flag, none=None):
        assert n is nested and m is mapping and e is empty and t is tensors and flag is False and none is None
        assert t["x"] is x  # tensors in a dict are not converted

    assert ir.create_graph(function, nested, mapping, empty, tensors, False).inputs == ()


def test_containers_of_tensors(ir):
    def function(in_a_list, in_a_tuple, *args, **kwargs):
        assert [type(c) for c in (in_a_list, in_a_tuple, args, kwargs)] == [list, list, tuple, dict]
        assert list(kwargs) == ["z", "y"]
        return args[1]

    graph = ir.create_graph(function, [spec(1), spec(2)], (spec(3),), spec(4), spec(5), z=spec(6), y=spec(7))
    assert sizes(graph) == {
        "in_a_list_0": (1,),
        "in_a_list_1": (2,),
        "in_a_tuple_0": (3,),
        "args_0": (4,),
        "args_1": (5,),
        "z": (6,),
        "y": (7,),
    }
    assert graph.outputs == (graph.inputs[4],)


def test_other_values_in_args_and_kwargs(ir):
    def function(*args, **kwargs):
        assert (args, kwargs) == ((1, "two"), {"three": 3})

    assert ir.create_graph(function, 1, "two", three=3).inputs == ()


def test_order_of_inputs(ir):
    def function(a, bs: List[popxl.Tensor], flag, *rest: TensorByRef, k, n=4, **extra):  # noqa: UP006
        popxl.graph_input((2,), F32, "c")

    t = [spec(i) for i in range(7)]
    graph = ir.create_graph(function, t[0], [t[1], t[2]], False, t[3], k=t[4], z=t[5], y=t[6])
    assert list(graph.inputs_by_name) == ["a", "bs_0", "bs_1", "rest_0", "k", "z", "y", "c"]
    assert [t.shape for t in graph.inputs] == [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (2,)]
    assert [t.name for t in graph.inputs if t.by_ref] == ["rest_0"]


def test_inputs_come_in_the_order_of_the_signature(ir):
    graph = ir.create_graph(lambda a, b: None, b=spec(2), a=spec(1))
    assert sizes(graph) == {"a": (1,), "b": (2,)}


def test_a_default_that_is_a_tensor_becomes_an_input(ir):
    graph = ir.create_graph(lambda a, b=spec(2), n=3: a + 1, spec(1))  # noqa: B008
    assert sizes(graph) == {"a": (1,), "b": (2,)}


def test_wrapped_functions_are_followed(ir):
    def plain(a, b: TensorByRef):
        return a

    @functools.wraps(plain)
    def wrapper(*args, **kwargs):
        return plain(*args, **kwargs)

    graph = ir.create_graph(wrapper, spec(1), spec(2))
    assert sizes(graph) == {"a": (1,), "b": (2,)}
    assert [t.by_ref for t in graph.inputs] == [False, True]


def test_callables(ir):
    class Layer:
        def build(self, x):
            return x

        @classmethod
        def make(cls, x):
            return x

    class Net(popxl.Module):
        def build(self, x, n: int = 2):
            return x * n

    for fn in (Layer().build, Layer.make, lambda x: x, Net(), ops.exp):
        graph = ir.create_graph(fn, SCALAR)
        assert (len(graph.inputs), len(graph.outputs)) == (1, 1)


def test_values_are_baked_in(ir, run):
    with ir.main_graph:
        x = popxl.variable(3.0)
        doubled, halved = (ir.create_graph(lambda x, a: x * a, x, a) for a in (2.0, 0.5))
        y, z = ops.call(doubled, x) + ops.call(halved, x)
    assert doubled is not halved
    assert run(ir, y, z) == [6.0, 1.5]


def test_a_graph_needs_no_current_graph(ir):
    assert ir.create_graph(lambda: popxl.graph_output(popxl.constant(1.0))).outputs[0].shape == ()


def test_no_graph_is_left_current(ir):
    ir.create_graph(lambda x: x, SCALAR)
    with pytest.raises(RuntimeError):
        popxl.gcg()
    with pytest.raises(KeyError):
        ir.create_graph(lambda x: {}["key"], SCALAR)
    with pytest.raises(RuntimeError):
        popxl.gcg()


# Results --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "count"),
    [
        (lambda x: None, 0),
        (lambda x: x, 1),
        (lambda x: [x, x], 2),
        (lambda x: (x,), 1),
        (lambda x: iter([x, x]), 2),
        (lambda x: {x: 1}, 1),
        (lambda x: {"a": x}.values(), 1),
        (lambda x: (), 0),
        (lambda x: "", 0),
        (lambda x: {}, 0),
    ],
)
def test_results(ir, result, count):
    graph = ir.create_graph(result, SCALAR)
    assert graph.outputs == graph.inputs * count


@pytest.mark.parametrize("result", [1.0, True, "x", len, {"a": 1}], ids=repr)
def test_results_that_are_no_tensors(ir, result):
    with pytest.raises(ValueError, match="expected None, a Tensor, or an iterable of Tensors"):
        ir.create_graph(lambda: result)
    with pytest.raises(ValueError):
        ir.create_graph(lambda x: [x, result], SCALAR)
    assert len(ir.graphs) == 1


def test_outputs_marked_by_hand_come_first(ir):
    def function(a, b):
        popxl.graph_output(b)
        return a

    graph = ir.create_graph(function, SCALAR, SCALAR)
    assert graph.outputs == (graph.inputs[1], graph.inputs[0])


# What is refused ------------------------------------------------------------------------------------------------------


def test_what_is_no_function(ir):
    class Callable:
        def __call__(self, x):
            return x

    for fn in (functools.partial(lambda x: x), Callable(), None, "function", 3):
        with pytest.raises(TypeError, match="must be a function"):
            ir.create_graph(fn, SCALAR)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 2, 3), {}), ((1,), {"c": 2}), ((1,), {"a": 2})],
    ids=["too few", "too many", "unknown", "twice"],
)
def test_arguments_that_do_not_fit(ir, args, kwargs):
    def fn(a: popxl.TensorByRef, b: int = 3, *, d: int) -> None: ...

    with pytest.raises(ValueError, match=r"do not match the signature of .*\. It takes \(a, b=3, \*, d\)\.$"):
        ir.create_graph(fn, *args, **kwargs)
    assert len(ir.graphs) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda ir: ir.create_graph(lambda xs: None, [SCALAR, 1]),
        lambda ir: ir.create_graph(lambda xs: None, (None, SCALAR)),
        lambda ir: ir.create_graph(lambda *xs: None, SCALAR, 1),
        lambda ir: ir.create_graph(lambda **xs: None, a=SCALAR, b=3),
    ],
    ids=["list", "tuple", "args", "kwargs"],
)
def test_containers_that_mix(ir, call):
    with pytest.raises(TypeError, match="`xs` mixes tensors with other values"):
        call(ir)
    assert len(ir.graphs) == 1


def test_tensors_of_another_graph(ir):
    with ir.main_graph:
        x = popxl.variable(1.0)
        with pytest.raises(ValueError, match="not in graph"):
            ir.create_graph(lambda: x)
        with pytest.raises(ValueError, match="the current graph"):
            ir.create_graph(lambda a: a + x, x)
        with pytest.raises(ValueError, match="variables live in the main graph"):
            ir.create_graph(lambda: popxl.variable(1.0))
    assert len(ir.graphs) == 1


# By reference ---------------------------------------------------------------------------------------------------------


def by_ref(a: TensorByRef):
    pass


def args_by_ref(*a: TensorByRef):
    pass


def list_by_ref(a: List[TensorByRef]):  # noqa: UP006
    pass


def tuple_by_ref(a: Tuple[TensorByRef]):  # noqa: UP006
    pass


def plain(a: popxl.Tensor):
    pass


def as_text(a: "TensorByRef"):
    pass


def builtin_list(a: list[TensorByRef]):
    pass


def long_tuple(a: Tuple[TensorByRef, ...]):  # noqa: UP006
    pass


def optional(a: Optional[TensorByRef]):  # noqa: UP045
    pass


def another_generic(a: Dict[str, TensorByRef]):  # noqa: UP006
    pass


@pytest.mark.parametrize(
    ("fn", "marked"),
    [
        (by_ref, True),
        (args_by_ref, True),
        (list_by_ref, True),
        (tuple_by_ref, True),
        (plain, False),
        (as_text, False),
        (builtin_list, False),
        (long_tuple, False),
        (optional, False),
        (another_generic, False),
    ],
)
def test_marks(ir, fn, marked):
    args = ([SCALAR],) if fn in (list_by_ref, tuple_by_ref, builtin_list, long_tuple) else (SCALAR,)
    assert [t.by_ref for t in ir.create_graph(fn, *args).inputs] == [marked]


def test_kwargs_by_ref(ir):
    def function(a, **others: TensorByRef):
        pass

    graph = ir.create_graph(function, SCALAR, b=SCALAR, c=SCALAR)
    assert [t.by_ref for t in graph.inputs] == [False, True, True]


def test_the_marker_is_not_called():
    for marker in (TensorByRef, NewAliasAnnotation("Name", None)):
        with pytest.raises(NotImplementedError):
            marker()
    assert NewAliasAnnotation("Name", None).__name__ == "Name"
    assert TensorByRef.__name__ == "TensorByRef"


@pytest.mark.filterwarnings("ignore::popxl.errors.LostUpdateWarning")
def test_changes_by_reference_reach_the_caller(ir):
    def bump(a: TensorByRef, b):
        a += 10
        b += 10

    with ir.main_graph, popxl.in_sequence():
        p, q = popxl.variable(1), popxl.variable(1)
        ops.call(ir.create_graph(bump, p, q), p, q)
    with popxl.Session(ir) as session:
        session.run()
    assert (p.data, q.data) == (11, 1)


# Specs ----------------------------------------------------------------------------------------------------------------


def test_specs():
    shape = [1, 2]
    found = popxl.TensorSpec(shape, popxl.int32)
    assert found.shape is shape  # nothing is converted
    found = popxl.TensorSpec((1, 2), popxl.int32)
    assert (found.shape, found.dtype, found.meta_shape) == ((1, 2), popxl.int32, ())
    assert list(found) == ["shape", "dtype", "meta_shape"] and len(found) == 3
    assert found.to_dict() == {"shape": (1, 2), "dtype": popxl.int32, "meta_shape": ()} == found == dict(**found)
    assert found.to_tuple() == ((1, 2), popxl.int32, ())
    assert repr(found) == "TensorSpec(shape=(1, 2), dtype=popxl.dtypes.int32, meta_shape=())"
    assert found["dtype"] is popxl.int32
    with pytest.raises(KeyError):
        found["name"]
    found.shape = (3,)
    assert found["shape"] == (3,)


def test_specs_are_equal_and_hashable_by_value():
    first, second = popxl.TensorSpec((1,), F32), popxl.TensorSpec((1,), F32, ())
    assert first == second and hash(first) == hash(second) and len({first, second}) == 1
    assert first != popxl.TensorSpec((2,), F32) and first != popxl.TensorSpec((1,), F32, (2,))
    with pytest.raises(TypeError):
        hash(popxl.TensorSpec([1], F32))


def test_a_spec_without_a_shape_is_refused(ir):
    """Shape and dtype exchanged, or a single number."""
    for shape, dtype in ((F32, (2,)), (3, F32)):
        with pytest.raises(TypeError, match="The shape of 'x' must be a sequence of integers; got"):
            ir.create_graph(lambda x: x, popxl.TensorSpec(shape, dtype))
