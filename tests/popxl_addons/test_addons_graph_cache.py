"""Which calls share a graph, and which do not."""

import gc
import weakref

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl_addons.graph_cache import argument_hash, bound_arguments, get_function_hash, tensor_hash


def scale(x, by=2.0):
    return x * by


def takes_anything(x, value):
    return x + 1.0


class Sized(popxl.Module):
    def __init__(self, size):
        self.size = size

    def __hash__(self):
        return hash(self.size)

    def build(self, x):
        return x * float(self.size)


@pytest.fixture
def a(ir):
    return popxl.variable(np.zeros((2, 3)), popxl.float32, "a")


def test_hits(a):
    cache = addons.GraphCache()
    b = popxl.variable(np.ones((2, 3)), popxl.float32, "b")
    graph = cache.create_graph(scale, a)
    assert cache.create_graph(scale, a) is graph
    assert cache.create_graph(scale, b) is graph
    assert cache.create_graph(scale, b.spec) is graph
    with popxl.name_scope("scope"):
        assert cache.create_graph(scale, a) is graph
    with popxl.Ir.create_empty_graph(a.ir, "other"):
        assert cache.create_graph(scale, popxl.TensorSpec((2, 3), popxl.float32)) is graph
    assert len(a.ir.graphs) == 3


def test_misses(a):
    cache = addons.GraphCache()
    graphs = [
        cache.create_graph(scale, a),
        cache.create_graph(scale, a, 2.0),
        cache.create_graph(scale, a, 3.0),
        cache.create_graph(scale, a, by=2.0),
        cache.create_graph(scale, x=a),
        cache.create_graph(scale, popxl.TensorSpec((3, 2), popxl.float32)),
        cache.create_graph(scale, popxl.TensorSpec((2, 3), popxl.float16)),
        cache.create_graph(scale, popxl.TensorSpec((2, 3), popxl.float32, (4, 3))),
        cache.create_graph(lambda x: x * 2.0, a),
        cache.create_graph(lambda x: x * 2.0, a),
        addons.GraphCache().create_graph(scale, a),
    ]
    with popxl.ipu(1):
        graphs.append(cache.create_graph(scale, a))
    with popxl.io_tiles():
        graphs.append(cache.create_graph(scale, a))
    assert len({id(graph) for graph in graphs}) == len(graphs)


def test_values_of_different_types_are_different(a):
    cache = addons.GraphCache()
    graphs = [cache.create_graph(lambda x, flag: x, a, flag) for flag in (1, 1.0, True)]
    assert len({id(graph) for graph in graphs}) == 3


@pytest.mark.usefixtures("only_new_objects")
def test_zeros_of_either_sign_are_different(a):
    cache = addons.GraphCache()
    zeros = (0.0, -0.0, complex(0.0, -0.0), 0j, (0.0,), (-0.0,))
    assert len({cache.create_graph(takes_anything, a, zero) for zero in zeros}) == len(zeros)


def test_modules_are_compared_by_their_hashes(a):
    cache = addons.GraphCache()
    graph = cache.create_graph(Sized(2), a)
    gc.collect()
    assert cache.create_graph(Sized(2), a) is graph
    assert cache.create_graph(Sized(3), a) is not graph
    plain = [cache.create_graph(module, a) for module in (popxl.Module.__new__(Identity) for _ in range(2))]
    assert plain[0] is not plain[1]


class Identity(popxl.Module):
    def build(self, x):
        return x


def test_a_function_that_is_gone_is_not_confused_with_a_new_one(a):
    cache = addons.GraphCache()
    graphs = [cache.create_graph(eval("lambda x: x * 2.0"), a) for _ in range(5)]
    assert len({id(graph) for graph in graphs}) == 5


def test_containers_and_graphs_as_arguments(a):
    cache = addons.GraphCache()

    def take(x, things):
        return x

    inner = a.ir.create_graph(scale, a)
    wrapped = addons.GraphWithNamedArgs(inner)
    bound = wrapped.bind()

    def graph(things):
        return cache.create_graph(take, a, things)

    assert graph([a, a]) is graph([a.spec, a.spec]) is graph((a, a.spec))
    assert graph({"n": 1, "k": (2, None)}) is graph({"n": 1, "k": (2, None)})
    assert graph({"n": 1}) is not graph({"n": 2})
    assert graph(inner) is graph(wrapped)
    assert graph(wrapped) is not graph(addons.GraphWithNamedArgs(a.ir.create_graph(scale, a)))
    assert graph(bound) is graph(wrapped.bind())
    assert graph(bound) is not graph(bound.bind({inner.inputs[0]: a}))
    assert graph(Sized(2)) is graph(Sized(2))
    assert graph(popxl.float32) is graph(popxl.float32)
    with pytest.raises(TypeError, match="ndarray is unhashable"):
        graph(np.zeros(2))


def test_groupings_are_compared_by_assignment():
    ir, cache = popxl.Ir(replication=4), addons.GraphCache()
    with ir.main_graph:
        spec = popxl.TensorSpec((2,), popxl.float32)
        graphs = [
            cache.create_graph(lambda_with_group, spec, ir.replica_grouping(group_size=size)) for size in (2, 2, 4)
        ]
    assert graphs[0] is graphs[1] and graphs[0] is not graphs[2]


def lambda_with_group(x, group):
    return x


@pytest.mark.usefixtures("only_new_objects")
def test_entries_belong_to_an_ir_and_go_with_it():
    cache = addons.GraphCache()
    spec = popxl.TensorSpec((2,), popxl.float32)

    def build():
        ir = popxl.Ir()
        with ir.main_graph:
            graph = cache.create_graph(scale, spec)
            assert graph.ir is ir and cache.create_graph(scale, spec) is graph
        return weakref.ref(ir)

    refs = [build(), build()]
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_function(a, evaluate):
    calls = []

    @addons.function
    def mm(x, y):
        """Multiply."""
        calls.append((x, y))
        return x @ y

    b = popxl.variable(np.ones((3, 4)), popxl.float32)
    c = popxl.variable(np.full((2, 3), 2.0), popxl.float32)
    (y,) = mm(a, b)
    (z,) = mm(c, b)
    assert len(calls) == 1 and len(a.ir.graphs) == 2
    assert mm.__name__ == "mm" and mm.__doc__ == "Multiply."
    np.testing.assert_allclose(evaluate(y, z), [np.zeros((2, 4)), np.full((2, 4), 6.0)])
    mm(b, popxl.variable(np.ones((4, 2)), popxl.float32))
    assert len(a.ir.graphs) == 3


def test_helpers(a):
    assert tensor_hash(a) == tensor_hash(a.spec) != tensor_hash(popxl.TensorSpec((2,), popxl.float32))
    assert argument_hash([a, 1]) == argument_hash([a.spec, 1]) != argument_hash([a.spec, 2])
    assert get_function_hash(scale, a) == get_function_hash(scale, a.spec) != get_function_hash(scale, a, 2.0)
    assert get_function_hash(Sized(2), a) == get_function_hash(Sized(2), a) != get_function_hash(Sized(3), a)
    assert bound_arguments(scale, a, by=3.0) == {"args": (a,), "kwargs": {"by": 3.0}}
    module = Sized(2)
    assert list(bound_arguments(module, a)) == ["self", "args", "kwargs"]
    with pytest.raises(TypeError):
        argument_hash(np.zeros(2))
