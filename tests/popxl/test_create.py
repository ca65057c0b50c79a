"""`variable` and `constant`: what becomes of the data, names, replica groups, memory maps, and everything refused."""

import warnings

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError, PopxlWarning

makers = pytest.mark.parametrize("make", [popxl.variable, popxl.constant], ids=["variable", "constant"])


@makers
@pytest.mark.parametrize(
    ("data", "options", "dtype", "shape", "values"),
    [
        (1.5, {}, popxl.float32, (), 1.5),
        (3, {}, popxl.int32, (), 3),
        (True, {}, popxl.bool, (), True),
        ([[1, 2, 3], [4, 5, 6]], {}, popxl.int32, (2, 3), [[1, 2, 3], [4, 5, 6]]),
        (range(3), {}, popxl.int32, (3,), [0, 1, 2]),
        (np.float16(2), {}, popxl.float16, (), 2),
        (np.ones(2, np.uint8), {}, popxl.uint8, (2,), [1, 1]),
        (1.7, {"dtype": popxl.int32}, popxl.int32, (), 1),
        ([1, 2], {"dtype": popxl.float16}, popxl.float16, (2,), [1, 2]),
        ([1, 2], {"downcast": False}, popxl.int64, (2,), [1, 2]),
        (1.5, {"downcast": False}, popxl.float64, (), 1.5),
        (1.5, {"dtype": popxl.float64}, popxl.float64, (), 1.5),
        (np.zeros((0, 2)), {}, popxl.float32, (0, 2), []),
        (np.zeros((0,)), {"dtype": popxl.int8}, popxl.int8, (0,), []),
        ([], {"dtype": popxl.float32}, popxl.float32, (0,), []),
        (np.arange(6).reshape(2, 3).T, {}, popxl.int32, (3, 2), [[0, 3], [1, 4], [2, 5]]),
    ],
    ids=repr,
)
def test_data(ir, make, data, options, dtype, shape, values):
    with ir.main_graph:
        t = make(data, **options)
    assert (t.dtype, t.shape, t.meta_shape) == (dtype, shape, ())
    assert t.data.tolist() == values and t.data.dtype == dtype.as_numpy() and t.data.flags.c_contiguous
    assert ir.main_graph.ops == []


@makers
def test_numbers_that_32_bits_do_not_hold_are_told(ir, make):
    told = r"%s: %s does not fit %s, where it is %s\. Use numbers that fit, or a wider dtype\."
    name = make.__name__
    with ir.main_graph:
        with pytest.warns(PopxlWarning, match=told % (name, r"-1e\+300, at \[0, 1\],", "float32", "-inf")) as warned:
            assert make([[1.0, -1e300, 1e300]]).data.tolist() == [[1, -np.inf, np.inf]]
        assert [warning.filename for warning in warned] == [__file__]
        with pytest.warns(PopxlWarning, match=told % (name, "1099511627781", "int32", "5")):
            assert make(2**40 + 5).data == 5
        asked = [make(1e300, popxl.float32), make(2**40 + 5, popxl.int32), make(np.inf), make(1e300, downcast=False)]
    assert [t.data for t in asked] == [np.inf, 5, np.inf, 1e300]


def test_numbers_that_do_not_fit_the_tensor_beside_them_are_told(ir):
    told = (
        r"An operand of Variable\[.*\]: %s does not fit %s, where it is %s\. Use numbers that fit, or a wider dtype\."
    )
    with ir.main_graph:
        count, half = popxl.variable(np.array([3, 5]), name="count"), popxl.variable(1.0, popxl.float16, name="half")
        for case, number, dtype, there in (
            (lambda: count + 2.75, r"2\.75", "int32", "2"),
            (lambda: 2**40 - count, "1099511627776", "int32", "0"),
            (lambda: count**2**40, "1099511627776", "int32", "0"),
            (lambda: half * np.float32(-1e6), r"-1000000\.0", "float16", "-inf"),
            (lambda: 1e5**half, r"100000\.0", "float16", "inf"),
        ):
            with pytest.warns(PopxlWarning, match=told % (number, dtype, there)) as warned:
                case()
            assert [warning.filename for warning in warned] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [count + 2.0, half * np.inf, half + 0.1, half - 3, count == 0.5]


def test_operands_that_are_no_numbers(ir):
    with ir.main_graph:
        x = popxl.variable(1.0, name="x")
        with pytest.raises(
            TypeError, match=r"Variable\[x .*\] is 'a' \(str\); expected a tensor, a number or an array"
        ):
            x + "a"
        with pytest.raises(TypeError, match=r"\(Graph\); expected a tensor, a number or an array"):
            x * ir.main_graph
        with pytest.raises(ValueError, match="the data is None"):
            x - None
    assert ir.main_graph.constants == ()


@makers
def test_data_is_copied(ir, make):
    data = np.ones(3, np.float32)
    with ir.main_graph:
        t = make(data)
    data[:] = 7
    assert t.data.tolist() == [1, 1, 1]


@makers
def test_names(ir, make):
    with ir.main_graph:
        assert [make(1, name=name).name for name in ("w", "w", None, "", "v")] == ["w", "w__t0", "t", "t__t1", "v"]


@makers
def test_kinds(ir, make):
    with ir.main_graph:
        t = make(1)
    assert type(t).__name__ == make.__name__.capitalize()
    assert isinstance(t, popxl.Tensor)
    assert t.in_sync_with_ipu is True
    assert t in (ir.main_graph.variables if make is popxl.variable else ir.main_graph.constants)


@makers
def test_a_dtype_of_others_is_told_with_ours(ir, make):
    for dtype, remedy in (
        (np.float32, r"Write `popxl\.float32`"),
        ("int8", r"Write `popxl\.int8`"),
        ("f4x", "There are bool"),
    ):
        with (
            ir.main_graph,
            pytest.raises(TypeError, match=rf"^{make.__name__}: `dtype` must be a popxl dtype.*{remedy}"),
        ):
            make(1, dtype)
    assert ir.main_graph.tensors == ()


def test_constants_do_not_change(ir):
    with ir.main_graph:
        t = popxl.constant([1, 2])
    with pytest.raises(ValueError, match="read-only"):
        t.data[0] = 3


def test_where_they_are_made(ir):
    sub = ir.create_empty_graph()
    with ir.main_graph, sub:
        assert popxl.constant(1).graph is sub
        with pytest.raises(ValueError, match="variables live in the main graph"):
            popxl.variable(1)
        with ir.main_graph:
            assert popxl.variable(1).graph is ir.main_graph
    assert sub.variables == ()


@makers
def test_no_current_graph(make):
    with pytest.raises(RuntimeError, match="no current graph"):
        make(1.0)


@makers
@pytest.mark.parametrize(
    ("data", "options", "error"),
    [
        ("text", {}, ValueError),
        (np.array([None]), {}, ValueError),
        ({"a": 1}, {}, ValueError),
        ([], {}, ValueError),
        ([[1, 2], [3]], {}, ValueError),
        (2**70, {}, ValueError),
        (np.ones(2, np.int32), {"dtype": popxl.float8_143}, TypeError),
        (1, {"dtype": popxl.float8_152}, TypeError),
        (1.0, {"log2_scale": 0}, RuntimeError),
        (1.0, {"dtype": popxl.float16, "nan_on_overflow": True}, RuntimeError),
    ],
    ids=repr,
)
def test_refused_data(ir, make, data, options, error):
    with ir.main_graph, pytest.raises(error):
        make(data, **options)
    assert ir.main_graph.tensors == ()


@makers
def test_data_in_the_byte_order_of_another_machine(ir, make):
    data = np.array([1.0, 2.5], np.dtype(np.float32).newbyteorder())
    with ir.main_graph:
        with pytest.raises(ValueError, match=r"ndarray of dtype .f4 has the byte order .*newbyteorder"):
            make(data)
        assert make(data.astype(data.dtype.newbyteorder("="))).data.tolist() == [1, 2.5]
        assert make(data, popxl.float32).data.tolist() == [1, 2.5]


@makers
def test_float8(ir, make):
    with ir.main_graph:
        t = make([1.0, 300.0], popxl.float8_143, log2_scale=-1, nan_on_overflow=False)
    assert t.dtype is popxl.float8_143
    assert t.data.dtype == popxl.float8_143.as_numpy()


def test_float8_data_of_a_constant_needs_its_dtype(ir):
    data = popxl.utils.to_numpy([1.0], popxl.float8_152)
    with ir.main_graph:
        assert popxl.variable(data).dtype is popxl.float8_152
        assert popxl.constant(data, popxl.float8_152).dtype is popxl.float8_152
        with pytest.raises(TypeError, match="float8"):
            popxl.constant(data)


# Replica groups -------------------------------------------------------------------------------------------------------


def test_groups():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        default = popxl.variable([1.0, 2.0])
        one = popxl.variable([1.0, 2.0], replica_grouping=ir.replica_grouping(group_size=4))
        two = popxl.variable([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], replica_grouping=ir.replica_grouping(group_size=2))
        four = popxl.variable(np.arange(4.0), replica_grouping=ir.replica_grouping(group_size=1))
    shapes = [(v.shape, v.shape_on_host, v.shape_on_replica) for v in (default, one, two, four)]
    assert shapes == [((2,), (2,), (2,)), ((2,), (2,), (2,)), ((3,), (2, 3), (3,)), ((), (4,), ())]
    assert default.replica_grouping == ir.replica_grouping()
    assert two.replica_grouping == ir.replica_grouping(group_size=2)


def test_retrieval_modes(ir):
    with ir.main_graph:
        modes = [popxl.variable(1, retrieval_mode=m).retrieval_mode for m in (None, "one_per_group", "all_replicas")]
        assert modes == ["one_per_group", "one_per_group", "all_replicas"]
        with pytest.raises(ValueError, match="retrieval_mode"):
            popxl.variable(1, retrieval_mode="all")


@pytest.mark.parametrize("data", [1.0, np.ones(3), np.ones((1, 2)), np.ones((3, 2))], ids=np.shape)
def test_data_has_one_row_for_each_group(data):
    ir = popxl.Ir(replication=4)
    with ir.main_graph, pytest.raises(PopxlError, match="one row for each of the 2 groups"):
        popxl.variable(data, replica_grouping=ir.replica_grouping(group_size=2))


UNEVEN = [0, 1, 1, 0]


def test_rows_of_a_grouping_that_is_not_constant():
    ir = popxl.Ir(replication=4)
    grouping = ir.replica_grouping_from_assignments(UNEVEN)
    assert not grouping.is_const
    with ir.main_graph:
        v = popxl.variable([[1, 2], [3, 4], [5, 6]], replica_grouping=grouping)  # the last row belongs to no group
        for data in (1, [[1, 2]]):
            with pytest.raises(IndexError):
                popxl.variable(data, replica_grouping=grouping)
    assert (v.shape, v.shape_on_host, v.data.tolist()) == ((2,), (2, 2), [[1, 2], [3, 4]])


# Memory maps ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    np.array([1, 2, 3], np.float32).tofile(path)
    return path


def adding_one(ir, data):
    """A program that adds one to a variable."""
    with ir.main_graph:
        v = popxl.variable(data)
        ops.add_(v, popxl.constant(1.0))
    return v


def test_a_memory_map_is_the_host_copy(ir, file):
    data = np.memmap(file, np.float32, "r+")
    flushed = []
    data.flush = lambda: (flushed.append(1), np.memmap.flush(data))  # the attribute of the object itself is called
    v = adding_one(ir, data)
    assert v.data is data
    with popxl.Session(ir) as session:
        session.run()
        assert np.fromfile(file, np.float32).tolist() == [1, 2, 3] and not flushed
        assert session.get_tensor_data(v) is data
        assert np.fromfile(file, np.float32).tolist() == [2, 3, 4] and len(flushed) == 1
        session.run()
    assert np.fromfile(file, np.float32).tolist() == [3, 4, 5] and len(flushed) == 2
    assert session.get_tensor_data(v) is data
    session.write_variable_data(v, np.array([7, 8, 9], np.float32))
    assert np.fromfile(file, np.float32).tolist() == [7, 8, 9]


def test_a_memory_map_that_cannot_be_written(ir, file):
    v = adding_one(ir, np.memmap(file, np.float32, "r"))
    session = popxl.Session(ir)
    assert session.weights_to_host_on_exit is False
    with pytest.raises(Exception, match="read-only") as error:
        session.weights_to_host()
    assert error.type is Exception
    with session:
        assert session.get_tensor_data(v).tolist() == [1, 2, 3]
        session.run()
        with pytest.raises(Exception, match="read-only"):
            session.get_tensor_data(v)
    assert session.get_tensor_data(v).tolist() == [1, 2, 3]


def test_memory_maps_are_used_as_they_are(ir, file, tmp_path):
    wide = tmp_path / "wide"
    np.arange(4.0).tofile(wide)
    data = np.memmap(file, np.float32, "r+")
    with ir.main_graph:
        assert popxl.variable(data, popxl.float32).data is data
        with pytest.raises(ValueError, match="^When passing a memory-mapped NumPy array, the `dtype` parameter"):
            popxl.variable(data, popxl.float16)
        with pytest.raises(ValueError, match="^When passing a memory-mapped NumPy array, it must already be in C-ord"):
            popxl.variable(data[::2])
        for options, name in (({}, "None"), ({"downcast": False}, "None"), ({"dtype": popxl.float64}, ".*float64")):
            start = f"^When passing a memory-mapped NumPy array, the dtype {name} is not supported, as it requires down"
            with pytest.raises(ValueError, match=start):
                popxl.variable(np.memmap(wide, np.float64, "r+"), **options)


def test_a_constant_copies_a_memory_map(ir, file):
    with ir.main_graph:
        t = popxl.constant(np.memmap(file, np.float32, "r+"))
    assert not isinstance(t.data, np.memmap) and t.data.tolist() == [1, 2, 3]


def test_a_memory_map_with_a_grouping_that_is_not_constant(file, capfd):
    ir = popxl.Ir(replication=4)
    data = np.memmap(file, np.float32, "r+", shape=(2,))
    with ir.main_graph:
        v = popxl.variable(data, replica_grouping=ir.replica_grouping_from_assignments(UNEVEN))
        popxl.variable(data, replica_grouping=ir.replica_grouping(group_size=2))
    assert capfd.readouterr().err.count("you have passed np.memmap data and a non-const replica grouping") == 1
    assert not isinstance(v.data, np.memmap)
    data[:] = 7
    assert (v.shape, v.data.tolist()) == ((), [1, 2])


def test_a_meta_shape_that_is_none(ir: popxl.Ir) -> None:
    with ir.create_empty_graph() as graph:
        for wrong in (3, "a", [1.5]):
            with pytest.raises(TypeError, match="^graph_input: `meta_shape` must "):
                popxl.graph_input((2,), popxl.float32, meta_shape=wrong)
        assert graph.inputs == ()
        assert popxl.graph_input((2,), popxl.float32, meta_shape=[4]).meta_shape == (4,)


@makers
@pytest.mark.parametrize(
    "data",
    [[1.0, None], ["1.5", "2"], {"a": 1}, np.array([1, object()])],
    ids=["None", "text", "a mapping", "an object"],
)
def test_data_that_are_no_numbers(ir: popxl.Ir, make, data) -> None:
    """NumPy makes NaN of `None`, and reads text."""
    with ir.main_graph as main:
        with pytest.raises(TypeError, match=r"the data holds .*; expected numbers\."):
            make(data, popxl.float32)
        assert main.tensors == ()
        make(np.array([1, np.float32(2), np.True_], object), popxl.float32)
