"""`popxl.testing` lists dtypes in the documented order."""

import numpy as np

import popxl
from popxl.testing import get_all_dtypes, get_all_int_dtypes, get_all_supported_dtypes


def test_integers() -> None:
    assert [d.name for d in get_all_int_dtypes(include_signed=False)] == ["uint8", "uint16", "uint32", "uint64"]
    assert get_all_int_dtypes()[:4] == get_all_int_dtypes(include_unsigned=False)
    assert get_all_int_dtypes(False, False) == []


def test_all_of_popxl() -> None:
    names = [d.name for d in get_all_dtypes()]
    assert names[8:] == ["float8_143", "float8_152", "float16", "float32", "float64", "complex64", "complex128"]
    assert popxl.bool not in get_all_dtypes() and len(set(names)) == 15


def test_numpy_knows_all_of_popxl_by_name() -> None:
    """Programs ask it for each."""
    for name in (d.name for d in get_all_dtypes() if not d.name.startswith("float8")):
        assert np.dtype(name).name == name


def test_all_that_are_supported() -> None:
    names = [d.name for d in get_all_supported_dtypes()]
    assert names.index("bfloat16") == names.index("float16") + 1
    assert [name for name in names if name != "bfloat16"] == [d.name for d in get_all_dtypes()]
