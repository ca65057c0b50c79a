"""`Tensor`: ids and names, properties, identity, operators with every kind of operand, indexing, placement."""

import contextlib
import math
import operator
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import NarrowedNumberWarning, PopxlError, TensorTruthWarning, UndefinedValue
from popxl.tensor import Constant, Variable

F32 = popxl.float32

# Ids and names --------------------------------------------------------------------------------------------------------


def test_ids(ir):
    """The example of the specification, name by name."""
    with ir.main_graph:
        assert popxl.variable(1.0, name="w").id == "w"
        assert popxl.variable(1.0, name="w").id == "w__t0"
        assert popxl.constant(1.0, name="w").id == "w__t1"
        a = popxl.variable(1.0)
        assert a.id == "t"
        b = a + 2
        assert (b.producer.inputs[1].id, b.id) == ("t__t2", "add_out")
        c = a + 3
        assert (c.producer.inputs[1].id, c.id) == ("t__t3", "add_out__t4")
    assert [op.id for op in ir.main_graph.ops] == [100, 101]


def test_a_tensor_is_no_array(ir):
    with ir.main_graph:
        x = popxl.variable([1.0, 2.0], name="x")
        for make in (np.asarray, popxl.variable, lambda t: np.array([t, t])):
            with pytest.raises(TypeError, match=r"is no array\. A tensor has numbers only when a session runs"):
                make(x + 1)


def test_functions_of_others_name_the_op_to_use(ir):
    """Of Python, NumPy and JAX. Operators with arrays, on whichever side, are ops."""
    array = np.ones((2, 3), np.float32)
    with ir.main_graph:
        x = popxl.variable(array, name="x")
        for function, of, op in (
            (np.exp, (x,), "exp"),
            (np.sum, (x,), "sum"),
            (np.add.reduce, (x,), "sum"),
            (np.multiply, (x, array), "mul"),
            (np.concatenate, ([x, x],), "concat"),
            (np.where, (x, x, array), "where"),
        ):
            with pytest.raises(TypeError, match=rf"^NumPy's .* takes arrays, and Variable\[x .* Use `ops\.{op}`"):
                function(*of)
        with pytest.raises(TypeError, match=r"There is no `ops\.arctan2`"):
            np.arctan2(array, x)
        for function in (jnp.exp, jnp.sum, jax.nn.softplus, lambda t: jnp.where(t, 1, 0)):
            with pytest.raises(
                PopxlError,
                match=r"Variable\[x .* at `.*\(test_tensor\.py:.*`ops\.exp` for `jnp\.exp`.*`popxl\.from_jax",
            ):
                function(x)
        for function, kind in ((float, "a float"), (int, "an int"), (complex, "a complex"), (math.exp, "a float")):
            with pytest.raises(TypeError, match=rf"Variable\[x .* cannot become {kind}.*`ops\.exp\(x\)`"):
                function(x)
        with pytest.raises(TypeError, match=r"Variable\[x .* does not support item assignment.*`ops\.dynamic_update_"):
            x[0] = 2.0
        assert np.shape(x) == (2, 3)
        assert not array == x and array != x and not jnp.ones(3) == x
        for left in (array, np.float32(2), jnp.ones((2, 3)), 2):
            for make, kind in ((operator.sub, "Sub"), (operator.mul, "Mul"), (operator.pow, "Pow")):
                made = make(left, x).producer
                assert made.op_type == kind and made.inputs[1] is x


def test_ids_in_a_subgraph(ir):
    def h(x):
        with popxl.name_scope("deep"):
            return popxl.constant(1.0, name="x"), popxl.constant(1.0, name="x")

    with popxl.name_scope("outer"):
        graph = ir.create_graph(h, popxl.TensorSpec((), F32))
    tensors = (*graph.inputs, *graph.outputs)
    scope = "test_ids_in_a_subgraph.h_subgraph(0)"
    assert [t.name for t in tensors] == ["outer/x", "outer/deep/x", "outer/deep/x__t0"]
    assert [t.id for t in tensors] == [f"{scope}/{t.name}" for t in tensors]
    assert {t.scope for t in tensors} == {scope}


def test_suffixes_count_over_all_graphs(ir):
    with ir.main_graph:
        names = [popxl.variable(0, name=name).name for name in "aab"]
        with ir.create_empty_graph():
            names += [popxl.constant(0, name=name).name for name in "aab"]
        names.append(popxl.variable(0, name="b").name)
    assert names == ["a", "a__t0", "b", "a", "a__t1", "b", "b__t2"]


def test_a_suffix_that_is_taken(ir):
    with ir.main_graph:
        popxl.variable(0, name="w__t0")
        popxl.variable(0, name="w")
        with pytest.raises(PopxlError, match="w__t0"):
            popxl.variable(0, name="w")


def test_streams_have_names_of_their_own(ir):
    """A stream may have the name of what comes from it; the tensor is found first."""
    with ir.main_graph as main:
        w = popxl.variable(0, name="loss")
        streams = [f((), F32, "loss") for f in (popxl.h2d_stream, popxl.h2d_stream, popxl.d2h_stream)]
        v = popxl.variable(0, name="loss__t0")
    assert [s.tensor_id for s in streams] == ["loss", "loss__t0", "loss__t1"]
    assert (w.id, v.id) == ("loss", "loss__t0")
    assert {*main.tensors} == {w, v, *(s.tensor for s in streams)}
    assert [main.get_tensor(id) for id in ("loss", "loss__t0", "loss__t1")] == [w, v, streams[2].tensor]
    assert all(s.tensor in main for s in streams)


# What a tensor knows --------------------------------------------------------------------------------------------------


def test_properties(ir):
    with ir.main_graph as main:
        t = popxl.variable(np.zeros((3, 4, 2)), popxl.float16, "t")
        scalar = popxl.constant(1)
    assert (t.id, t.name, t.scope, t.ir, t.graph) == ("t", "t", "", ir, main)
    assert (t.shape, t.dtype, t.meta_shape, t.rank, t.nelms) == ((3, 4, 2), popxl.float16, (), 3, 24)
    assert t.spec == popxl.TensorSpec((3, 4, 2), popxl.float16)
    assert t.strides() == (16, 4, 2)
    assert t.strides((5, 3)) == t.strides(iter([5, 3])) == (6, 2)
    assert (scalar.shape, scalar.rank, scalar.nelms, scalar.strides()) == ((), 0, 1, ())


def test_kinds(ir):
    with ir.main_graph:
        v, c = popxl.variable(1.0), popxl.constant(1.0)
        y = v + c
    assert (type(v), type(c), type(y)) == (Variable, Constant, popxl.Tensor)
    for kind in (popxl.Tensor, Variable, Constant):
        with pytest.raises(RuntimeError, match="not constructed"):
            kind()
    assert y.producer.outputs == (y,) and v.producer is None


def test_repr(ir):
    with ir.main_graph:
        tensors = [popxl.variable(np.zeros((3, 1)), popxl.float16, "gain"), popxl.constant(1, name="one")]

    def f(x):
        pass

    tensors += ir.create_graph(f, popxl.TensorSpec((1,), popxl.int32)).inputs
    assert list(map(repr, tensors)) == [
        "Variable[gain popxl.dtypes.float16 (3, 1)]",
        "Constant[one popxl.dtypes.int32 ()]",
        "Tensor[test_repr.f_subgraph(0)/x popxl.dtypes.int32 (1,)]",
    ]


def test_subclasses_are_registered():
    class Strange(popxl.Tensor, tensor_type="Strange"):
        __slots__ = ()

    assert popxl.Tensor._kinds["Strange"] is Strange
    assert popxl.Tensor._kinds["Variable"] is Variable
    del popxl.Tensor._kinds["Strange"]


def test_numbers_on_the_host(ir):
    with ir.main_graph:
        v, c = popxl.variable(1.0), popxl.constant(1.0)
        y = v + c
    assert v.in_sync_with_ipu is True and c.in_sync_with_ipu is True
    with pytest.raises(PopxlError, match="no numbers on the host"):
        y.in_sync_with_ipu  # noqa: B018


# Identity -------------------------------------------------------------------------------------------------------------


def test_equality(ir):
    other = popxl.Ir()
    with ir.main_graph:
        x, y = popxl.variable(1.0, name="x"), popxl.variable(1.0)
    with other.main_graph:
        same_id = popxl.variable(1.0, name="x")
    assert x == x and ir.main_graph.get_tensor("x") is x
    assert x != y and x != same_id and not x == y
    assert x != 1.0 and x is not None and x != "x" and not x == np.float32(1)
    assert {x: 1, y: 2}[x] == 1 and len({x, y, x}) == 2 and x in [y, x]


def test_length_and_truth(ir):
    with ir.main_graph:
        scalar, three = popxl.variable(1.0), popxl.variable([1, 2, 3])
        empty = popxl.variable(np.zeros((0, 2)))
    assert (len(three), len(empty)) == (3, 0)
    for ask in (len, bool):
        with pytest.raises(ValueError, match="is a scalar"):
            ask(scalar)
    with pytest.warns(TensorTruthWarning, match=r"`assert three and not empty`.*`ops\.where`.*`ops\.conditional`"):
        assert three and not empty


def test_the_truth_of_a_tensor_is_told_once_a_line(ir):
    """Programs ask it of optional tensors, in layer after layer."""
    with ir.main_graph, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for k in range(3):
            assert popxl.variable([k, k])
        assert popxl.variable([1])
        warnings.simplefilter("ignore", popxl.errors.PopxlWarning)
        assert popxl.variable([2])
    assert [each.filename for each in told] == [__file__] * 2
    assert told[0].lineno + 1 == told[1].lineno


def test_tensors_are_not_iterated(ir):
    with ir.main_graph:
        x = popxl.variable([1, 2])
        with pytest.raises(TypeError):
            iter(x)
        with pytest.raises(TypeError):
            a, b = x
        with pytest.raises(TypeError):
            1 in x  # noqa: B015
        with pytest.raises(TypeError):
            x[0] = 1


# Operators ------------------------------------------------------------------------------------------------------------

BINARY = [
    (operator.add, "Add"),
    (operator.sub, "Sub"),
    (operator.mul, "Mul"),
    (operator.truediv, "Div"),
    (operator.mod, "Fmod"),
    (operator.matmul, "MatMul"),
]
LEFT, RIGHT = np.array([[7.0, 8.0], [9.0, 10.0]], np.float32), np.array([[1.0, 2.0], [4.0, 5.0]], np.float32)
HOST = [lambda a: a, lambda a: a.tolist(), lambda a: a.astype(np.float64)]


@pytest.mark.parametrize(("op", "kind"), BINARY)
def test_operators(ir, run, op, kind):
    """Tensor and tensor, and tensor and host data on either side: the order of the operands stays."""
    with ir.main_graph:
        x, y = popxl.constant(LEFT), popxl.constant(RIGHT)
        results = [op(x, y), *(op(x, host(RIGHT)) for host in HOST), *(op(host(LEFT), y) for host in HOST)]
    assert {t.producer.op_type.lower() for t in results} == {kind.lower()}
    expected = np.fmod(LEFT, RIGHT) if op is operator.mod else op(LEFT, RIGHT)
    for found in run(ir, *results):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(("op", "kind"), [(operator.and_, "And"), (operator.or_, "Or")])
def test_logical_operators(ir, run, op, kind):
    left, right = np.array([True, True, False, False]), np.array([True, False, True, False])
    with ir.main_graph:
        x, y = popxl.constant(left), popxl.constant(right)
        results = [op(x, y), op(x, right), op(left, y), op(x, right.tolist())]
        inverse = ~x
    assert {t.producer.op_type for t in results} == {kind}
    *found, inverted = run(ir, *results, inverse)
    assert found == [op(left, right).tolist()] * 4
    assert inverted == (~left).tolist()


def test_numbers_on_the_left_and_right(ir, run):
    with ir.main_graph:
        x = popxl.constant(2.0)
        results = [x + 3, 3 + x, x - 3, 5 - x, x * 3, 3 * x, x / 4, 4 / x, x % 1.5, 7 % x, x**3, 3.0**x, -x]
    assert run(ir, *results) == [5, 5, -1, 3, 6, 6, 0.5, 2, 0.5, 1, 8, 9, -2]
    assert [t.producer.op_type for t in results[-2:]] == ["Pow", "Neg"]


def test_numbers_take_the_dtype_of_the_tensor(ir, run):
    with ir.main_graph:
        integer, half, flag = popxl.constant(5), popxl.constant(2.0, popxl.float16), popxl.constant(True)
        with pytest.warns(NarrowedNumberWarning, match="does not fit"):
            results = [integer + 1.7, half * 1e6, flag & 2, 1.7 + integer]
    assert [t.dtype for t in results] == [popxl.int32, popxl.float16, popxl.bool, popxl.int32]
    assert run(ir, *results) == [6, np.inf, True, 6]


COMPARISONS = (operator.gt, operator.ge, operator.lt, operator.le)


@pytest.mark.filterwarnings("error::popxl.errors.TensorTruthWarning")
def test_comparisons_are_ops(ir, run):
    """For each element; what they come to is not known while the program is written."""
    left, right = np.array([1.0, 2.0, 3.0], np.float32), np.array([2.0, 2.0, 2.0], np.float32)
    with ir.main_graph:
        x, y = popxl.constant(left), popxl.constant(right)
        pairs = [(x, y), (x, right), (left, y), (x, 2), (np.float32(2), y)]
        results = [compare(*pair) for compare in COMPARISONS for pair in pairs]
        assert {t.dtype for t in results} == {popxl.bool}
        with pytest.raises(ValueError, match="is a scalar, which is neither true nor false"):
            max(popxl.constant(1.0), popxl.constant(2.0))
        with pytest.raises(popxl.errors.TensorTruthWarning, match="ops.where"):
            assert 0 < x < 2
    expected = [compare(a, right) for compare in COMPARISONS for a in (left, left, left, left, right)]
    assert run(ir, *results) == [e.tolist() for e in expected]


def test_methods_are_ops(ir, run):
    data = np.array([[1.0, -2.0, 3.0], [0.5, 4.0, 0.0]], np.float32)
    with ir.main_graph:
        x = popxl.constant(data)
        whole = [x.sum(), x.mean(1), x.max(0, True), x.min(), x.std(-1), x.var()]
        assert x.astype(popxl.float16).dtype is popxl.float16
    expected = [data.sum(), data.mean(1), data.max(0, keepdims=True), data.min(), data.std(-1), data.var()]
    for found, wish in zip(run(ir, *whole), expected, strict=True):
        np.testing.assert_allclose(found, wish, rtol=1e-6)


def test_numbers_become_constants_of_the_current_graph(ir):
    graph = ir.create_graph(lambda x: 2 + x, popxl.TensorSpec((), F32))
    (two,) = graph.constants
    assert (two.data, graph.ops[0].inputs) == (2, (two, graph.inputs[0]))
    assert ir.main_graph.constants == ()


def test_exponents_keep_their_own_dtype(ir):
    """Arrays do; a Python number is for convenience of the dtype of a float."""
    with ir.main_graph:
        x = popxl.constant(2.0, popxl.float16)
        assert (x**2).producer.inputs[1].dtype is popxl.float16
        with pytest.raises(PopxlError, match="different dtypes"):
            x ** np.array(2)
        assert (2**x).producer.inputs[0].dtype is popxl.float16
        with pytest.raises(PopxlError, match="different dtypes"):
            np.array(2) ** x


def test_only_iadd_is_in_place(ir):
    with ir.main_graph:
        x = before = popxl.variable(3.0)
        x += 2
        assert x is before
        for in_place in (operator.isub, operator.imul, operator.itruediv, operator.imod, operator.ipow):
            assert in_place(x, 2) is not x
        m = popxl.variable([[1.0]])
        assert operator.imatmul(m, [[2.0]]) is not m
    assert [op.op_type for op in ir.main_graph.ops if op.modified] == ["AddLhsInplace"]


def test_lists_that_meet_tensors(ir):
    with ir.main_graph:
        t = popxl.constant([1, 2])
        empty = []
        with pytest.raises(ValueError, match="without elements"):
            empty += t
        numbers = [10, 20]
        numbers += t
    assert isinstance(numbers, popxl.Tensor) and numbers.producer.op_type == "Add"


def test_refused_operands(ir):
    with ir.main_graph:
        x = popxl.constant([1.0, 2.0])
        for op in (operator.add, operator.sub, operator.mul, operator.truediv, operator.mod, operator.matmul):
            with pytest.raises(ValueError, match="without elements"):
                op(x, [])
            with pytest.raises(ValueError, match="without elements"):
                op(np.zeros((0, 2)), x)
        with pytest.raises(PopxlError, match="different dtypes"):
            x + popxl.constant([1, 2])
        with pytest.raises(PopxlError, match="do not broadcast"):
            x + [1, 2, 3]
        with pytest.raises(PopxlError, match="shape|dimension"):
            x @ [1, 2, 3]
    with ir.create_empty_graph():
        with pytest.raises(ValueError, match="not in graph"):
            x + 1
        with pytest.raises(ValueError, match="not in graph"):
            -x  # noqa: B018


@pytest.mark.parametrize("op", [operator.floordiv, operator.lshift, operator.rshift, operator.xor, divmod])
def test_operators_that_are_not_defined(ir, op):
    with ir.main_graph:
        x = popxl.constant([1, 2])
        for left, right in ((x, x), (x, 1), (1, x)):
            with pytest.raises(TypeError):
                op(left, right)
        for unary in (abs, operator.pos):
            with pytest.raises(TypeError):
                unary(x)


def test_meta_shapes_pass_through_elementwise_ops(ir):
    with ir.create_empty_graph():
        plain = popxl.graph_input((4,), F32)
        sharded = popxl.graph_input((4,), F32, meta_shape=(2, 4))
        other = popxl.graph_input((4,), F32, meta_shape=(8,))
        for t in (sharded + plain, plain * sharded, sharded - sharded, -sharded, ops.relu(sharded)):
            assert t.meta_shape == (2, 4)
        with pytest.raises(PopxlError, match="meta-shapes"):
            sharded + other


# Methods --------------------------------------------------------------------------------------------------------------


def test_methods(ir, run):
    data = np.arange(6, dtype=np.float32).reshape(2, 3)
    with ir.main_graph:
        x = popxl.constant(data)
        pairs = [
            (x.T, data.T),
            (x.T_, data.T),
            (x.transpose(), data.T),
            (x.transpose((1, 0)), data.T),
            (x.transpose_([0, 1]), data),
            (x.reshape((3, 2)), data.reshape(3, 2)),
            (x.reshape_((-1,)), data.ravel()),
            (x.flatten(), data.ravel()),
            (x.flatten_(), data.ravel()),
            (x.detach(), data),
            (x.detach_(), data),
        ]
    assert len({t for t, _ in pairs}) == len(pairs) and x not in [t for t, _ in pairs]
    for found, (_, expected) in zip(run(ir, *(t for t, _ in pairs)), pairs, strict=True):
        assert found == expected.tolist()


@pytest.mark.parametrize(("shape", "expected"), [((4, 4), [0, 5, 10, 15]), ((4, 6), [0, 7, 14, 21]), ((1, 3), [0])])
def test_diag(ir, run, shape, expected):
    with ir.main_graph:
        d = popxl.constant(np.arange(np.prod(shape), dtype=np.float32).reshape(shape)).diag()
    assert run(ir, d) == [expected]


def test_diag_of_other_ranks(ir):
    with ir.main_graph:
        for shape in ((), (3,), (2, 2, 2)):
            with pytest.raises(ValueError, match="expected a matrix"):
                popxl.constant(np.zeros(shape)).diag()


# Indexing -------------------------------------------------------------------------------------------------------------

KEYS = [
    (2,), (-2,), (-1,), (slice(2, 5),), (slice(1, 5, 2), 3), (slice(None, None, 4),), (slice(5, 1, -2),),
    (slice(None, None, -1),), (slice(None, None, 5), slice(None, None, 2)), (), (slice(None),), (slice(-3, 100),),
    (0, 1, 2), (slice(4, 2),), (slice(1, 2), slice(None), -4),
]  # fmt: skip


def test_basic_indexing(ir, run):
    data = np.arange(120, dtype=np.int32).reshape(6, 5, 4)
    with ir.main_graph:
        x = popxl.constant(data)
        results = [x[key] for key in KEYS] + [x[2], x[::-1], x[2:5]]
    expected = [data[key] for key in KEYS] + [data[2], data[::-1], data[2:5]]
    assert [t.shape for t in results] == [e.shape for e in expected]
    for key, found, wanted in zip([*KEYS, "2", "::-1", "2:5"], run(ir, *results), expected, strict=True):
        assert found == wanted.tolist(), key


def test_integer_indexing(ir, run):
    data = np.arange(12, dtype=np.float32).reshape(4, 3)
    keys = [[0, 2, 3], [[0, 1], [3, 3]], np.array([1, 2], np.int64), np.array([3], np.uint32), [1]]
    with ir.main_graph:
        x, i = popxl.constant(data), popxl.variable(2)
        results = [x[key] for key in keys] + [x[i]]
    assert {t.producer.op_type for t in results} == {"Gather"}
    assert run(ir, *results) == [data[key].tolist() for key in keys] + [data[2].tolist()]


def test_masks(ir, run):
    data = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
    masks = [data > 3, data[:, :1] > 3, np.array([True, False])]
    with ir.main_graph:
        x = popxl.constant(data)
        results = [x[mask] for mask in masks] + [x[popxl.constant(masks[2])], x[masks[2].tolist()]]
        with pytest.raises(PopxlError, match="broadcast"):
            x[[True, False, True, True]]
    masked = [np.where(mask, data, 0).tolist() for mask in masks]
    assert run(ir, *results) == [*masked, masked[2], masked[2]]


def test_refused_keys(ir):
    with ir.main_graph:
        x = popxl.constant(np.zeros((3, 2)))
        for key in ("a", True, 1.0, None, ..., np.int64(1), popxl.constant(1.0), [0.5]):
            with pytest.raises(TypeError):
                x[key]
        for key in (3, -4, (0, 2)):
            with pytest.raises(ValueError, match="out of range"):
                x[key]
        for key in ((0, 0, 0), slice(None, None, 0)):
            with pytest.raises(PopxlError):
                x[key]
        foreign = ir.create_empty_graph()
        with foreign:
            index = popxl.constant(1)
        with pytest.raises(ValueError, match="not in the main graph"):
            x[index]


def test_a_refused_key_leaves_nothing_behind(ir):
    with ir.main_graph as main:
        x, scalar = popxl.constant(np.zeros((3, 2))), popxl.constant(0.0)
        before = list(main.tensors)
        for t, key in ((x, [True, False, True, True]), (scalar, [0])):
            with pytest.raises(PopxlError):
                t[key]
        assert list(main.tensors) == before


# Placement ------------------------------------------------------------------------------------------------------------


def test_nobody_knows_where_an_unused_tensor_is(ir):
    with ir.main_graph:
        tensors = [popxl.variable(1), popxl.constant(1), popxl.graph_input((), F32)]
    for t in tensors:
        with pytest.raises(UndefinedValue):
            t.ipu  # noqa: B018
        with pytest.raises(UndefinedValue):
            t.tile_set  # noqa: B018


@pytest.mark.parametrize(
    ("ipu", "io", "expected"), [(0, False, (0, "compute")), (1, False, (1, "compute")), (2, True, (2, "io"))]
)
def test_a_tensor_is_where_the_op_is(ir, ipu, io, expected):
    with ir.main_graph, popxl.ipu(ipu):
        v = popxl.variable(1)
        if io:
            with popxl.io_tiles():
                y = v + 0
        else:
            y = v + 0
    assert (y.ipu, y.tile_set) == expected
    assert (v.ipu, v.tile_set) == expected  # from its consumer


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(1, False), (0, True)], (0, "io")),  # the compute tiles are those of another IPU
        ([(0, True), (1, False)], (0, "io")),
        ([(1, True), (1, False), (2, False)], (1, "compute")),
        ([(None, False), (3, True)], (3, "io")),
    ],
)
def test_a_tensor_is_where_the_first_of_its_consumers_is(ir, places, expected):
    with ir.main_graph:
        v = popxl.variable(1)
        for ipu, io in places:
            with popxl.ipu(ipu), popxl.io_tiles() if io else contextlib.nullcontext():
                ops.identity(v)
    assert (v.ipu, v.tile_set) == expected


def test_a_graph_input_is_where_the_caller_has_it(ir):
    graph = ir.create_graph(lambda x: None, popxl.TensorSpec((), F32))
    (x,) = graph.inputs
    with ir.main_graph, popxl.ipu(3):
        ops.call(graph, popxl.constant(1.0) + 1)
    assert (x.ipu, x.tile_set) == (3, "compute")


def test_a_graph_input_without_callers_is_where_it_is_used(ir):
    with popxl.ipu(2):
        graph = ir.create_graph(lambda x: x + 1, popxl.TensorSpec((), F32))
    assert graph.inputs[0].ipu == 2


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("loop", [False, True])
def test_what_a_called_graph_has_elsewhere(ir, loop, nested):
    """A call is on one IPU, and its graph on two: nobody is to copy what is there already."""

    def on_two(v, w):
        y = v * 2.0
        with popxl.ipu(1):
            z = w * y.copy_to_ipu(1)
        return y, z

    with ir.main_graph:
        v, w, x = (popxl.variable(k, popxl.float32) for k in (1.0, 2.0, 3.0))
        graph = ir.create_graph(on_two, v, w)
        if nested:
            graph = ir.create_graph(lambda v, w: ops.call(graph, v, w), v, w)
        y, z = ops.repeat(graph, 3, v, w) if loop else ops.call(graph, v, w)
        with popxl.ipu(1):
            there = x + 1.0
            ops.add_(there, w), ops.add_(there, z)
        assert (v.ipu, w.ipu, y.ipu, z.ipu) == (0, 0, 0, 0)
        with pytest.raises(ValueError, match="different IPUs: 1 and 0"):
            there + y


@pytest.mark.parametrize("kind", ["call", "repeat", "conditional", "nested"])
def test_a_graph_of_another_ipu(ir, kind):
    """Its ops were placed on IPU 1. The call is on IPU 0, and moves no op: results and inputs go with both."""
    with ir.main_graph:
        v, w, x = (popxl.variable(k, F32) for k in (1.0, 2.0, 3.0))
        with popxl.ipu(1):
            graph = ir.create_graph(lambda v, w: v * w, v, w)
            there = x + 1.0
        if kind == "nested":
            graph = ir.create_graph(lambda v, w: ops.call(graph, v, w), v, w)
        if kind == "conditional":
            (y,) = ops.conditional(popxl.constant(True), graph, graph, [v, w], [v, w])
        else:
            (y,) = ops.repeat(graph, 3, v, w) if kind == "repeat" else ops.call(graph, v, w)
        here = popxl.constant(4.0) + 1.0
        for t in (y, v, w):
            ops.add_(there, t), t + there, here + t
        with pytest.raises(ValueError, match="different IPUs: 5 and 1"), popxl.ipu(5):
            ops.add(popxl.constant(1.0) + 1.0, there)


def test_a_graph_of_other_tiles(ir):
    """As of another IPU."""
    with ir.main_graph:
        v, x = popxl.variable(1.0), popxl.variable(2.0)
        with popxl.io_tiles():
            graph = ir.create_graph(lambda v: v + 1.0, v)
            there = x + 1.0
        (y,) = ops.call(graph, v)
        ops.add_(there, y), v + there, y + popxl.constant(1.0)


def test_a_copied_tensor_is_where_it_is_copied_from(ir):
    with ir.main_graph, popxl.ipu(3):
        v, c = popxl.variable(1.0), popxl.constant(1.0)
        there, here = v.copy_to_ipu(3, 1), c.copy_to_ipu(dst=2, src=0)
    assert (v.ipu, there.ipu, c.ipu, here.ipu) == (1, 3, 0, 2)


def test_copies(ir):
    with ir.main_graph:
        v = popxl.variable(1.0)
        y = v + 1
        assert y.copy_to_ipu(1).ipu == 1
        assert y.copy_to_ipu(destination=1, source=0).ipu == 1
        for t in (v, popxl.constant(1.0)):
            with pytest.raises(TypeError):
                t.copy_to_ipu(1)
    with ir.create_empty_graph():
        with pytest.raises(ValueError, match="source"):
            popxl.graph_input((), F32).copy_to_ipu(1)


def test_tensors_on_two_ipus_do_not_meet(ir):
    with ir.main_graph:
        v = popxl.variable(1.0)
        here = v + 1
        with popxl.ipu(1):
            there = popxl.constant(1.0) + 1
        with popxl.io_tiles():
            on_io = popxl.constant(1.0) + 1
        with pytest.raises(ValueError, match="different IPUs: 0 and 1"):
            here + there
        with pytest.raises(ValueError, match="different tile sets: compute and io"):
            here + on_io
        assert (here.copy_to_ipu(1) * there).ipu == 0  # where the op is, not the operands
        assert (ops.io_tile_copy(on_io) + here).tile_set == "compute"


@pytest.mark.parametrize(
    "build",
    [
        lambda t: t + np.zeros(7),
        lambda t: np.zeros(7) * t,
        lambda t: t @ np.zeros((9, 9)),
        lambda t: t ** np.zeros(7),
        lambda t: np.zeros(7) ** t,
        lambda t: t.__iadd__(np.zeros(7)),
    ],
    ids=range(6),
)
def test_an_operator_that_is_refused_leaves_nothing(build):
    with popxl.Ir().main_graph as main:
        t = popxl.variable(np.zeros((2, 3), np.float32))
        with pytest.raises(popxl.errors.PopxlError):
            build(t)
        assert (main.constants, main.ops) == ((), [])


def test_names_of_tile_sets():
    assert list(popxl.tensor.TILE_SET_MAP) == [popxl.TileSet.Compute, popxl.TileSet.IO, popxl.TileSet.Undefined]
    assert list(popxl.tensor.TILE_SET_MAP.values()) == ["compute", "io", "undefined"]


@pytest.mark.parametrize("name", ["id", "name", "shape", "dtype", "meta_shape"])
def test_what_a_tensor_is_cannot_be_assigned(name):
    with popxl.Ir().main_graph:
        t = popxl.variable([1.0])
        with pytest.raises(AttributeError):
            setattr(t, name, getattr(t, name))


@pytest.mark.here
@pytest.mark.compiled_whole
def test_quotients_are_rounded_once():
    """Not multiplied by the inverse, as XLA does with divisors that are constants, or broadcast."""
    random = np.random.default_rng(0)
    x = random.normal(size=(30, 10)).astype(np.float32)
    for shape in ((), (10,), (30, 1), (30, 10)):
        d = random.normal(size=shape).astype(np.float32)
        for make in (popxl.variable, popxl.constant):
            ir = popxl.Ir()
            with ir.main_graph:
                out = popxl.d2h_stream(x.shape, popxl.float32)
                ops.host_store(out, popxl.variable(x) / make(d))
            with popxl.Session(ir) as session:
                np.testing.assert_array_equal(session.run()[out], x / d)
