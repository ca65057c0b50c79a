"""`Graph`: what it holds, how it is found and compared, and how it is entered."""

import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError

SCALAR = popxl.TensorSpec((), popxl.float32)


def test_graphs_are_not_constructed():
    with pytest.raises(TypeError, match="create_graph"):
        popxl.Graph()


def test_the_main_graph(ir):
    main = ir.main_graph
    assert (main.id, main.name, main.ir, main.main_graph) == ("", "", ir, main)
    assert repr(main) == "Graph[id= name=]"
    assert (main.inputs, main.outputs, main.tensors, main.variables, main.constants) == ((), (), (), (), ())
    assert (main.called_graphs, main.inputs_by_name) == ((), {})


def test_a_subgraph(ir):
    sub = ir.create_empty_graph("s")
    assert (sub.id, sub.name, sub.ir, sub.main_graph) == ("s_subgraph(0)", "s_subgraph(0)", ir, ir.main_graph)
    assert repr(sub) == "Graph[id=s_subgraph(0) name=s_subgraph(0)]"


def test_the_same_graph_is_the_same_object(ir):
    graph = ir.create_graph(lambda x: x, SCALAR)
    with ir.main_graph:
        site = ops.call_with_info(graph, popxl.variable(1.0))
    assert site.called_graph is graph
    assert ir.main_graph.called_graphs[0] is graph
    assert graph.inputs[0].graph is graph


def test_equality(ir):
    one, two = ir.create_empty_graph("a"), ir.create_empty_graph("a")
    assert one == one
    assert one != two
    assert one != popxl.Ir().create_empty_graph("a")
    assert ir.main_graph != popxl.Ir().main_graph
    assert len({one, two, one}) == 2
    for other in (None, "a_subgraph(0)", ir):
        with pytest.raises(TypeError):
            one == other  # noqa: B015
        with pytest.raises(TypeError):
            one != other  # noqa: B015


def test_what_a_graph_holds(ir):
    with ir.main_graph as main:
        w = popxl.variable(1.0, name="w")
        a = popxl.variable(1.0, name="a")
        stream = popxl.h2d_stream((), popxl.float32, "data")
        k = popxl.constant(1.0, name="k")
        i = popxl.graph_input((), popxl.float32, "i")
        y = w + 2
        popxl.graph_output(y)
        popxl.graph_output(y)
        popxl.graph_output(i)
    two = y.producer.inputs[1]
    assert main.tensors == (a, y, stream.tensor, i, k, two, w)  # sorted by id
    assert [t.id for t in main.tensors] == ["a", "add_out", "data", "i", "k", "t", "w"]
    assert main.variables == (a, w)
    assert main.constants == (k, two)
    assert main.inputs == (i,)
    assert main.outputs == (y, y, i)


def test_a_call_adds_its_results_and_nothing_hidden(ir):
    graph = ir.create_graph(lambda x: x, SCALAR)
    with ir.main_graph:
        ops.call(graph, popxl.variable(1.0))
    assert (len(ir.main_graph.tensors), len(graph.tensors)) == (2, 1)


def test_inputs_by_name(ir):
    def function(x, w):
        with popxl.name_scope("inner"):
            popxl.graph_input((), popxl.float32, "k")
        popxl.graph_input((), popxl.float32, "w")
        return x + w

    with popxl.name_scope("outer"):
        graph = ir.create_graph(function, SCALAR, SCALAR)
    assert list(graph.inputs_by_name) == ["outer/x", "outer/w", "outer/inner/k", "outer/w__t0"]
    assert tuple(graph.inputs_by_name.values()) == graph.inputs


def test_called_graphs(ir):
    inner = ir.create_graph(lambda x: x + 1, SCALAR)
    other = ir.create_graph(lambda x: x + 2, SCALAR)
    outer = ir.create_graph(lambda x: ops.call(inner, ops.call(other, ops.call(inner, x))), SCALAR)
    with ir.main_graph:
        ops.call(outer, 1.0)
    assert set(outer.called_graphs) == {inner, other} and len(outer.called_graphs) == 2
    assert ir.main_graph.called_graphs == (outer,)  # only those called directly


def test_get_tensor(ir):
    graph = ir.create_graph(lambda x: x, SCALAR)
    x = graph.inputs[0]
    assert graph.get_tensor(x.id) is x
    for name in ("x", "", "nothing"):
        with pytest.raises(PopxlError, match="no tensor with the id"):
            graph.get_tensor(name)


def test_membership(ir):
    with ir.main_graph as main:
        x = popxl.variable(1.0, name="x")
    graph = ir.create_graph(lambda x: x, x)
    assert x in main and graph.inputs[0] in graph
    assert x not in graph and graph.inputs[0] not in main
    for other in ("x", None, 1):
        with pytest.raises(TypeError):
            other in main  # noqa: B015


def test_a_graph_can_be_entered_again(ir):
    graph = ir.create_graph(lambda x: x + 1, SCALAR)
    with graph:
        popxl.graph_output(graph.outputs[0] * 2)
        k = popxl.graph_input((), popxl.float32, "k")
    assert graph.inputs == (graph.inputs[0], k)
    assert [op.op_type for op in graph.ops] == ["Add", "Mul"]
    assert len(graph.outputs) == 2


def test_an_empty_graph_is_filled_by_hand(ir, run):
    graph = ir.create_empty_graph("by_hand")
    with graph:
        x = popxl.graph_input([2], popxl.float32, "x")
        popxl.graph_output(x * 3)
    with ir.main_graph:
        (y,) = ops.call(graph, [popxl.constant([1.0, 2.0])])
    assert run(ir, y) == [[3, 6]]


def test_graph_input(ir):
    with ir.create_empty_graph("g") as graph:
        plain = popxl.graph_input((2, 3), popxl.float16)
        full = popxl.graph_input(iter([4]), popxl.float32, "full", by_ref=True, meta_shape=[2, 3])
        empty = popxl.graph_input(**popxl.TensorSpec((1,), popxl.int32), name="")
    assert graph.inputs == (plain, full, empty)
    assert (plain.name, plain.shape, plain.dtype, plain.meta_shape, plain.by_ref) == (
        "t",
        (2, 3),
        popxl.float16,
        (),
        False,
    )
    assert (full.name, full.shape, full.meta_shape, full.by_ref) == ("full", (4,), (2, 3), True)
    assert empty.name == "t__t0"
    with pytest.raises(RuntimeError):
        popxl.graph_input((), popxl.float32)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((2.7,), TypeError, r"must hold integers; got 2\.7"),
        ((3, -1), ValueError, r"is \(3, -1\); sizes are not negative"),
    ],
)
def test_shapes_of_inputs_that_cannot_be(ir, shape, error, message):
    graph = ir.create_empty_graph()
    with graph, pytest.raises(error, match=f"The shape of 'k' {message}"):
        popxl.graph_input(shape, popxl.float32, "k")
    assert graph.inputs == ()


def test_graph_output(ir):
    with ir.main_graph:
        foreign = popxl.variable(1.0)
    with ir.create_empty_graph("g"):
        with pytest.raises(ValueError, match="not in graph"):
            popxl.graph_output(foreign)
        for other in (1.0, None, [foreign]):
            with pytest.raises(TypeError, match="expected a Tensor"):
                popxl.graph_output(other)
    with pytest.raises(RuntimeError):
        popxl.graph_output(foreign)


def test_names_after_the_module_table(ir):
    """A module keeps the input it made, as a key for calls."""

    class Affine(popxl.Module):
        def build(self, x, width):
            self.k = popxl.graph_input((x.shape[-1], width), x.dtype, "k")
            return x @ self.k

    with ir.main_graph:
        x, k = popxl.variable([[1.0, 2.0]]), popxl.variable([[1.0], [10.0]])
        affine = Affine()
        graph = ir.create_graph(affine, x, 1)
        (y,) = ops.call(graph, x, inputs_dict={affine.k: k})
    assert list(graph.inputs_by_name) == ["x", "k"]
    assert y.shape == (1, 1)


def test_a_module_without_build():
    class Empty(popxl.Module):
        pass

    with pytest.raises(NotImplementedError, match="Empty has no `build`"):
        Empty()()
    with pytest.raises(NotImplementedError):
        popxl.Ir().create_graph(Empty())
