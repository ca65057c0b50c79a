"""What happens to host data on its way in (`to_numpy`), and tables on their way out."""

import warnings

import ml_dtypes
import numpy as np
import pytest

from popxl import dtypes
from popxl.utils import downcast_np_dtypes, host_pow2scale_cast_to_fp8, table_to_string, to_numpy

FLOAT8 = [dtypes.float8_143, dtypes.float8_152]


@pytest.mark.parametrize(
    ("data", "options", "expected"),
    [
        ([1, 2], {}, np.array([1, 2], np.int32)),
        (3, {}, np.array(3, np.int32)),
        (range(3), {}, np.array([0, 1, 2], np.int32)),
        ([1, 2.5], {}, np.array([1, 2.5], np.float32)),
        (3.5, {}, np.array(3.5, np.float32)),
        (np.float64(2), {}, np.array(2, np.float32)),
        (True, {}, np.array(True)),
        (np.int8(2), {}, np.array(2, np.int8)),
        (np.float16(2), {}, np.array(2, np.float16)),
        ([1, 2], {"downcast": False}, np.array([1, 2], np.int64)),
        (3.5, {"downcast": False}, np.array(3.5, np.float64)),
        (np.arange(4, dtype="uint64"), {}, np.arange(4, dtype=np.uint32)),
        (np.ones(4, "float32"), {"dtype": dtypes.float64}, np.ones(4)),
        ([1, 2], {"dtype": dtypes.int64, "downcast": True}, np.array([1, 2], np.int64)),
        (1.7, {"dtype": dtypes.int32}, np.array(1, np.int32)),
        (300, {"dtype": dtypes.int8}, np.array(44, np.int8)),
        ([-1], {"dtype": dtypes.uint32}, np.array([2**32 - 1], np.uint32)),
        (1e6, {"dtype": dtypes.float16}, np.array(np.inf, np.float16)),
        (np.array([2**32 + 5]), {}, np.array([5], np.int32)),
        ([1e300], {}, np.array([np.inf], np.float32)),
        (1j, {}, np.array(1j, np.complex128)),
        (np.zeros((0,)), {}, np.zeros((0,), np.float32)),
        ([], {"dtype": dtypes.int8}, np.zeros((0,), np.int8)),
        ([[1], [2]], {"dtype": dtypes.bool}, np.array([[True], [True]])),
    ],
    ids=repr,
)
@pytest.mark.parametrize("copy", [True, False])
def test_values_and_types(data, options, expected, copy):
    array = to_numpy(data, **options, copy=copy)
    assert type(array) is np.ndarray
    assert (array.dtype, array.shape, array.tolist()) == (expected.dtype, expected.shape, expected.tolist())
    assert array.flags.c_contiguous


def test_downcast_types():
    assert downcast_np_dtypes == {np.dtype(f"{kind}64"): np.dtype(f"{kind}32") for kind in ("int", "uint", "float")}


@pytest.mark.parametrize("data", [2**64, {"a": 1}, (i for i in range(3)), [], [[], []]])
def test_data_without_a_type(data):
    array = to_numpy(data)
    assert array.dtype == object
    with pytest.raises(ValueError, match="pass `dtype` along with it"):
        dtypes.dtype.as_dtype(array)


def test_ragged():
    with pytest.raises(ValueError):
        to_numpy([[1, 2], [3]])


@pytest.mark.parametrize("dtype", [None, dtypes.float32, dtypes.bool, dtypes.float8_143])
def test_none(dtype):
    with pytest.raises(ValueError, match="the data is None"):
        to_numpy(None, dtype)


def test_sharing():
    data = np.ones((2, 3), np.float32)
    assert to_numpy(data, copy=False) is data
    assert np.shares_memory(to_numpy(data, dtypes.float32, copy=False), data)
    assert not np.shares_memory(to_numpy(data), data)
    assert not np.shares_memory(to_numpy(data, dtypes.float32), data)
    assert not np.shares_memory(to_numpy(data.T, copy=False), data)
    assert to_numpy(np.arange(3), downcast=False, copy=False).dtype == np.int64
    wide = np.ones(3)
    assert to_numpy(wide, copy=False).dtype == np.float32
    assert to_numpy(wide, dtypes.float64, copy=False) is wide


@pytest.mark.parametrize("copy", [True, False])
def test_contiguous(copy):
    for data in (np.arange(6, dtype=np.int32).reshape(2, 3).T, np.arange(8, dtype=np.float32)[::2]):
        array = to_numpy(data, copy=copy)
        assert array.flags.c_contiguous
        assert array.tolist() == data.tolist()


def test_jax_arrays():
    jnp = pytest.importorskip("jax.numpy")
    data = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    for copy in (True, False):
        array = to_numpy(data, copy=copy)
        assert type(array) is np.ndarray and array.dtype == np.int32
        assert array.tolist() == [[0, 1, 2], [3, 4, 5]]
    to_numpy(data)[0, 0] = 9  # a copy may be written to
    eighth = jnp.array([1.5], ml_dtypes.float8_e4m3fnuz)
    assert to_numpy(eighth, dtypes.float8_143).view(np.uint8).tolist() == [0x44]


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    data = torch.arange(6, dtype=torch.float32).reshape(2, 3).requires_grad_()
    assert to_numpy(data).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.shares_memory(to_numpy(data, copy=False), data.detach().numpy())
    assert not np.shares_memory(to_numpy(data), data.detach().numpy())
    assert to_numpy(data.T, copy=False).flags.c_contiguous
    assert to_numpy(torch.tensor(3)).dtype == np.int32
    assert to_numpy(torch.tensor([1.5]), dtypes.float16).dtype == np.float16
    assert to_numpy(torch.tensor([1.5]), dtypes.float8_143).view(np.uint8).tolist() == [0x44]


# float8 -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_from_wider_floats(dtype):
    data = [0.1, 1.0, 1e6]
    for source in (data, np.array(data, np.float32), np.array([0.1, 1.0, np.inf], np.float16)):
        assert to_numpy(source, dtype).tolist() == host_pow2scale_cast_to_fp8(source, dtype).tolist()
    bytes_ = to_numpy(data, dtype, log2_scale=3, nan_on_overflow=False)
    assert bytes_.tolist() == host_pow2scale_cast_to_fp8(data, dtype, 3, False).tolist()
    assert bytes_.dtype == dtype.as_numpy()
    assert to_numpy(1.0, dtype).shape == ()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_as_it_is(dtype):
    data = np.arange(6, dtype=np.uint8).view(dtype.as_numpy()).reshape(2, 3)
    assert to_numpy(data, copy=False) is data
    assert to_numpy(data, dtype, copy=False, log2_scale=5) is data
    assert np.shares_memory(to_numpy(data, dtype, copy=False), data)
    copied = to_numpy(data.T, dtype)
    assert copied.flags.c_contiguous and copied.dtype == data.dtype and copied.tolist() == data.T.tolist()


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("data", [[1, 2], 1, True, np.ones(2, np.uint8), "1.0", np.ones(2, np.complex64)], ids=repr)
def test_float8_from_other_data(dtype, data):
    with pytest.raises(TypeError, match="Expected data of a wider float"):
        to_numpy(data, dtype)


def test_float8_from_the_other_float8():
    for dtype, other in (FLOAT8, FLOAT8[::-1]):
        with pytest.raises(TypeError, match=f"`dtype` is popxl.dtypes.{dtype.name}, but .*{other.name}"):
            to_numpy(np.zeros(2, other.as_numpy()), dtype)


@pytest.mark.parametrize("options", [{"log2_scale": 0}, {"nan_on_overflow": True}, {"nan_on_overflow": False}])
@pytest.mark.parametrize("dtype", [None, dtypes.float32], ids=repr)
@pytest.mark.parametrize("copy", [True, False])
def test_float8_options_elsewhere(options, dtype, copy):
    with pytest.raises(RuntimeError, match="`log2_scale` is .* and `nan_on_overflow` is .* but `dtype` is"):
        to_numpy(np.ones(2, np.float32), dtype, copy=copy, **options)


def test_dtype_is_ours():
    with pytest.raises(TypeError, match="Expected a popxl.dtype such as popxl.float32, or None"):
        to_numpy([1.0], np.float32)


# Memory-mapped arrays -----------------------------------------------------------------------------------------------


@pytest.fixture
def memmap(tmp_path):
    """`memmap(dtype, shape)` makes a memory-mapped array of zeros."""
    return lambda dtype, shape=(2, 3): np.memmap(tmp_path / "data", dtype=dtype, mode="w+", shape=shape)


@pytest.mark.parametrize("numpy_dtype", ["float32", "int8", "bool", "complex128", dtypes.np_dtype_float8_143])
def test_memmap_is_returned(memmap, numpy_dtype):
    data = memmap(numpy_dtype)
    assert to_numpy(data, copy=False) is data
    assert to_numpy(data, dtypes.dtype.as_dtype(data), copy=False) is data


def test_memmap_is_copied_like_any_array(memmap):
    data = memmap("float64")
    copied = to_numpy(data)
    assert type(copied) is np.ndarray and copied.dtype == np.float32
    assert not np.shares_memory(to_numpy(data, dtypes.float64), data)


@pytest.mark.parametrize(
    ("numpy_dtype", "dtype", "fragment"),
    [
        ("float32", dtypes.float16, "the `dtype` parameter"),
        ("float64", dtypes.float32, "the `dtype` parameter"),
        ("float32", dtypes.float8_143, "the `dtype` parameter"),
        (dtypes.np_dtype_float8_152, dtypes.float8_143, "the `dtype` parameter"),
        ("float64", None, "the dtype None is not supported, as it requires downcasting"),
        ("int64", dtypes.int64, "the dtype popxl.dtypes.int64 is not supported, as it requires downcasting"),
        ("uint64", None, "the dtype None is not supported, as it requires downcasting"),
    ],
)
@pytest.mark.parametrize("downcast", [True, False])
def test_memmap_is_not_converted(memmap, numpy_dtype, dtype, fragment, downcast):
    with pytest.raises(ValueError) as error:
        to_numpy(memmap(numpy_dtype), dtype, downcast=downcast, copy=False)
    assert str(error.value).startswith(f"When passing a memory-mapped NumPy array, {fragment}")


def test_memmap_layout(memmap, tmp_path):
    unaligned = np.memmap(tmp_path / "more", dtype="float32", mode="w+", shape=(3,), offset=1)
    for data in (memmap("float32").T, memmap("float64")[:, ::2], unaligned):  # layout is looked at before the type
        with pytest.raises(ValueError) as error:
            to_numpy(data, copy=False)
        assert str(error.value).startswith("When passing a memory-mapped NumPy array, it must already be in C-ordered")
    with pytest.raises(ValueError, match="the `dtype` parameter"):  # and after a `dtype` that differs
        to_numpy(memmap("float32").T, dtypes.float16, copy=False)


def test_conversions_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_numpy([np.nan, 1e300, -1.0]).dtype == np.float32
        assert to_numpy([np.nan, np.inf, 1e300], dtypes.uint8).shape == (3,)


# Tables -------------------------------------------------------------------------------------------------------------


def test_table():
    assert table_to_string([["op", "n"], ["add", 12]]) == "op  | n \n---------\nadd | 12\n"


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ([["op", "n"], ["add", 12]], {"header": False}, "op  | n \nadd | 12\n"),
        ([["op", "n"], ["add", 12]], {"delimiter": ","}, "op ,n \n-------\nadd,12\n"),
        ([["only", "row"]], {}, "only | row\n"),
        ([["a", None], [1.5, "b"], [(), "c"]], {}, "a   | None\n-----------\n1.5 | b   \n()  | c   \n"),
        ([], {}, ""),
        ((row for row in (["a"], ["b"])), {}, "a\n--\nb\n"),
    ],
)
def test_tables(rows, options, expected):
    assert table_to_string(rows, **options) == expected
