"""`popxl.testing` lists dtypes in the documented order."""

import popxl
from popxl.testing import get_all_dtypes, get_all_int_dtypes


def test_integers() -> None:
    assert [d.name for d in get_all_int_dtypes(include_signed=False)] == ["uint8", "uint16", "uint32", "uint64"]
    assert get_all_int_dtypes()[:4] == get_all_int_dtypes(include_unsigned=False)
    assert get_all_int_dtypes(False, False) == []


def test_all_but_bool() -> None:
    names = [d.name for d in get_all_dtypes()]
    assert names[8:] == ["float8_143", "float8_152", "float16", "bfloat16", *names[-4:]]
    assert names[-4:] == ["float32", "float64", "complex64", "complex128"]
    assert popxl.bool not in get_all_dtypes() and len(set(names)) == 16
