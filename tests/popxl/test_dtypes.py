"""Element types: the table of them, how they are looked up, and what they correspond to."""

import builtins
import copy
import pickle
import subprocess
import sys
import weakref

import ml_dtypes
import numpy as np
import pytest

from popxl import dtypes
from popxl.dtypes import dtype

# name: is_int, is_floating_point, is_signed, is_complex, short, bytes, in torch
TABLE = {
    "bool": (False, False, False, False, "bool", 1, True),
    "int8": (True, False, True, False, "i8", 1, True),
    "int16": (True, False, True, False, "i16", 2, True),
    "int32": (True, False, True, False, "i32", 4, True),
    "int64": (True, False, True, False, "i64", 8, True),
    "uint8": (True, False, False, False, "u8", 1, True),
    "uint16": (True, False, False, False, "u16", 2, False),
    "uint32": (True, False, False, False, "u32", 4, False),
    "uint64": (True, False, False, False, "u64", 8, False),
    "float8_143": (False, True, True, False, "f8_143", 1, False),
    "float8_152": (False, True, True, False, "f8_152", 1, False),
    "float16": (False, True, True, False, "f16", 2, True),
    "bfloat16": (False, True, True, False, "bf16", 2, True),
    "float32": (False, True, True, False, "f32", 4, True),
    "float64": (False, True, True, False, "f64", 8, True),
    "complex64": (False, False, True, True, "c64", 8, True),
    "complex128": (False, False, True, True, "c128", 16, True),
}
FLOAT8 = {
    "float8_143": (np.dtype([("float8_143", "u1")]), ml_dtypes.float8_e4m3fnuz),
    "float8_152": (np.dtype([("float8_152", "u1")]), ml_dtypes.float8_e5m2fnuz),
}
ORDINARY = [name for name in TABLE if name not in FLOAT8]
IN_TORCH = [name for name, row in TABLE.items() if row[-1]]


@pytest.mark.parametrize("name", TABLE)
def test_table(name):
    t = getattr(dtypes, name)
    kinds = (t.is_int, t.is_floating_point, t.is_signed, t.is_complex)
    assert (*kinds, t.short, t.itemsize) == TABLE[name][:-1]
    assert all(type(kind) is builtins.bool for kind in kinds)
    assert (t.name, repr(t)) == (name, f"popxl.dtypes.{name}")
    assert t.is_float8 == (name in FLOAT8)
    assert t.is_half == (name in ("float16", "bfloat16"))


def test_aliases():
    assert dtypes.half is dtypes.float16
    assert dtypes.float is dtypes.float32
    assert dtypes.double is dtypes.float64


@pytest.mark.parametrize("name", TABLE)
def test_one_object_each(name):
    t = getattr(dtypes, name)
    assert dtype.from_name(name) is dtype.as_dtype(name) is t
    assert copy.copy(t) is copy.deepcopy(t) is pickle.loads(pickle.dumps(t)) is t
    assert {t: 1}[t] == 1
    assert weakref.ref(t)() is t
    assert [other for other in TABLE if getattr(dtypes, other) == t] == [name]
    assert t != name and t != t.as_numpy()
    with pytest.raises(AttributeError):
        t.name = "other"


def test_no_new_ones():
    with pytest.raises(TypeError, match="makes no new data types"):
        dtype()


@pytest.mark.parametrize("name", ORDINARY)
def test_numpy(name):
    t = getattr(dtypes, name)
    assert t.as_numpy() == t.as_jax() == np.dtype(name)
    for value in (np.dtype(name), np.dtype(name).type, np.zeros(2, name), np.zeros((), name)[()]):
        assert dtype.as_dtype(value) is t


@pytest.mark.parametrize("name", FLOAT8)
def test_float8(name):
    t, (host, device) = getattr(dtypes, name), FLOAT8[name]
    assert t.as_numpy() == host == getattr(dtypes, f"np_dtype_{name}")
    assert t.as_jax() == device
    for value in (host, np.zeros(2, host), np.zeros((), host), device, np.zeros(2, device)):
        assert dtype.as_dtype(value) is t


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (int, "int64"),
        (builtins.float, "float32"),
        (builtins.bool, "bool"),
        (complex, "complex128"),
        ("int16", "int16"),
        ("i2", "int16"),
        ("half", "float16"),
        ("float", "float64"),
        ("double", "float64"),
        ("int", "int64"),
        (None, "float64"),
        (np.float64(2), "float64"),
        (np.zeros(2, np.int16), "int16"),
    ],
)
def test_as_dtype(value, name):
    assert dtype.as_dtype(value) is getattr(dtypes, name)


@pytest.mark.parametrize(
    "value",
    [str, "nothing", "f4,i4", "f4,(", [1, 2], [], {}, 3, 2.5, object(), object, np.array("text"), np.array(None)],
    ids=lambda value: f"{type(value).__name__}-{value}".partition(" at ")[0],  # no addresses
)
def test_as_dtype_finds_nothing(value):
    with pytest.raises(ValueError, match=r"^dtype.as_dtype: no popxl dtype corresponds to `type_value`, "):
        dtype.as_dtype(value)


def test_as_dtype_refuses_a_dtype():
    with pytest.raises(ValueError, match="popxl.dtypes.float32, which is a popxl dtype already"):
        dtype.as_dtype(dtypes.float32)

    class Tensor:
        dtype = dtypes.float32

    with pytest.raises(ValueError, match="a Tensor of dtype popxl.dtypes.float32"):
        dtype.as_dtype(Tensor())


@pytest.mark.parametrize("value", ["half", "float", "double", "int", "i2", "", None, 3, [], np.float32, dtypes.int8])
def test_from_name_takes_canonical_names_only(value):
    with pytest.raises(ValueError, match=r"^dtype.from_name: no data type has the `name` .* one of bool, int8"):
        dtype.from_name(value)


@pytest.mark.parametrize("name", IN_TORCH)
def test_torch(name):
    torch = pytest.importorskip("torch")
    t = getattr(dtypes, name)
    assert t.as_torch() is getattr(torch, name)
    assert dtype.as_dtype(t.as_torch()) is t
    assert dtype.as_dtype(torch.zeros(2, dtype=t.as_torch())) is t


@pytest.mark.parametrize("name", [name for name in TABLE if name not in IN_TORCH])
def test_not_in_torch(name):
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match=f"^popxl.dtypes.{name}.as_torch: "):
        getattr(dtypes, name).as_torch()
    for theirs in (name, "float8_e4m3fnuz"):
        if hasattr(torch, theirs):
            with pytest.raises(ValueError, match=f"torch.{theirs}"):
                dtype.as_dtype(getattr(torch, theirs))


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # what importing it then says is that there is none
    with pytest.raises(ModuleNotFoundError):
        dtypes.float32.as_torch()
    assert dtype.as_dtype(np.int16) is dtypes.int16
    with pytest.raises(ValueError):
        dtype.as_dtype("nothing")


@pytest.mark.thorough
def test_torch_is_not_imported_to_look():
    program = "import sys, numpy; from popxl.utils import to_numpy; to_numpy([1]); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
