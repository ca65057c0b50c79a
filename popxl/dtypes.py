"""The element types of tensors: one object for each, and their NumPy, JAX and PyTorch equivalents.

Nothing here converts data; for that see `popxl.utils.to_numpy` and, for float8, `popxl.fp8_utils`. The module defines
`bool` and `float` as popxl does, so the builtins of these names are spelled out below.
"""

import builtins
import numbers
import string
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    import torch

torch_imported = find_spec("torch") is not None
"""Whether PyTorch is installed. It is never imported here: programs that pass its objects have imported it."""

np_dtype_float8_143 = np.dtype([("float8_143", "u1")])
np_dtype_float8_152 = np.dtype([("float8_152", "u1")])


class dtype:
    """The type of a tensor's elements.

    Each dtype is a single object, such as `popxl.float32`; compare with `is` or `==`.

    Example:
        >>> popxl.float16.as_numpy()
        dtype('float16')
        >>> popxl.dtype.as_dtype("int8") is popxl.int8
        True
    """

    __slots__ = ("__weakref__", "_jax", "_kind", "_name", "_numpy")
    _name: str
    _kind: str  # NumPy's letter: b(ool), i(nt), u(nsigned), f(loat), c(omplex)
    _numpy: np.dtype[Any]
    _jax: np.dtype[Any]

    def __init__(self) -> None:
        raise TypeError(
            "popxl.dtype() makes no new data types. Use one that exists, such as popxl.float32, "
            "or look one up: popxl.dtype.as_dtype(np.float32)."
        )

    @classmethod
    def as_dtype(cls, type_value: Any) -> "dtype":
        """Convert a type-like value or array to its dtype.

        Accepts a canonical name, `bool`, `float` (which is `float32`), what `np.dtype` accepts, a torch dtype, and
        anything with a NumPy or torch `dtype`. Names that are not canonical mean what they mean to NumPy: `"double"`,
        but also `"float"` and `None`, are `float64`.

        Raises:
            ValueError: if there is no such dtype. A `popxl.dtype` is refused, too: there is nothing to look up.

        Example:
            >>> popxl.dtype.as_dtype(np.zeros(2, np.int16))
            popxl.dtypes.int16
        """
        if isinstance(type_value, str) and type_value in _BY_NAME:
            return _BY_NAME[type_value]
        if isinstance(type_value, type) and type_value in _BY_PYTHON_TYPE:
            return _BY_PYTHON_TYPE[type_value]
        found = _find(type_value) or _find(getattr(type_value, "dtype", None)) or _find(_numpy_dtype(type_value))
        if found is None:
            raise ValueError(_letter_of_as_dtype(type_value))
        return found

    @classmethod
    def from_name(cls, name: str) -> "dtype":
        """Return the dtype with this canonical name: `"float16"`, but not `"half"`.

        Raises:
            ValueError: if there is no such name.
        """
        if not isinstance(name, str) or name not in _BY_NAME:
            raise ValueError(
                f"dtype.from_name: no data type has the `name` {name!r}. Expected one of {', '.join(_BY_NAME)}. "
                "Other spellings, such as NumPy's, are understood by dtype.as_dtype."
            )
        return _BY_NAME[name]

    @property
    def name(self) -> str:
        """The canonical name, such as `"float32"`."""
        return self._name

    @property
    def short(self) -> str:
        """The name used in printed graphs: `f32`, `bf16`, `u8`, `c64`, `bool`, `f8_143`."""
        if self._kind == "b":
            return "bool"
        return "b" * self._name.startswith("b") + self._kind + self._name.lstrip(string.ascii_lowercase)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self._numpy.itemsize

    @property
    def is_int(self) -> builtins.bool:
        """Whether the type is an integer, signed or unsigned."""
        return self._kind in "iu"

    @property
    def is_floating_point(self) -> builtins.bool:
        """Whether this is a real floating point type, float8 included."""
        return self._kind == "f"

    @property
    def is_half(self) -> builtins.bool:
        """Whether the type is `float16` or `bfloat16`, computed in float32 and rounded once."""
        return self._kind == "f" and self.itemsize == 2

    def holds(self, value: Any) -> builtins.bool:
        """Whether a value is a plain number compatible with the dtype; floats accept integers, complex types accept
        both."""
        if self.is_complex:
            return isinstance(value, numbers.Complex)
        if self.is_floating_point:
            return isinstance(value, numbers.Real)
        return self.is_int and isinstance(value, numbers.Integral)

    @property
    def is_signed(self) -> builtins.bool:
        """Whether there are negative elements; true for complex types, too."""
        return self._kind in "ifc"

    @property
    def is_complex(self) -> builtins.bool:
        """Whether the type is complex."""
        return self._kind == "c"

    @property
    def is_inexact(self) -> builtins.bool:
        """Whether this is a real or complex floating point type: gradients flow through tensors of these."""
        return self._kind in "fc"

    @property
    def is_wide(self) -> builtins.bool:
        """Whether numbers (or components of `complex128`) have 64 bits."""
        return self.component_dtype.itemsize == 8

    @property
    def component_dtype(self) -> "dtype":
        """Component type of complex types; other types unchanged."""
        return {"complex64": float32, "complex128": float64}.get(self._name, self)

    @property
    def is_float8(self) -> builtins.bool:
        """Whether the type is an 8-bit float, with different array layouts on host and device."""
        return self._numpy is not self._jax

    def as_numpy(self) -> np.dtype[Any]:
        """NumPy dtype of host arrays; structured for float8, with a byte field named after the type."""
        return self._numpy

    def as_jax(self) -> np.dtype[Any]:
        """Return the dtype of device arrays: `as_numpy()`, except that float8 is a number here (see `ml_dtypes`)."""
        return self._jax

    def as_torch(self) -> "torch.dtype":
        """Return the torch dtype of the same name.

        Raises:
            ModuleNotFoundError: if PyTorch is not installed.
            TypeError: for float8 and for unsigned integers of more than 8 bits.
        """
        import torch

        if self in _NOT_IN_TORCH:
            raise TypeError(
                f"{self}.as_torch: PyTorch tensors of {self.name} do not correspond to ours. "
                "Go through NumPy (as_numpy), or choose another data type."
            )
        return getattr(torch, self.name)

    def __repr__(self) -> str:
        return f"popxl.dtypes.{self._name}"

    def __reduce__(self) -> tuple[Callable[[str], "dtype"], tuple[str]]:
        return dtype.from_name, (self._name,)  # copies and unpickled dtypes are the same object


def check_dtype(value: Any, what: str) -> dtype:
    """Check and return a popxl dtype. Raises `TypeError` with a suggestion; `what` names the argument."""
    if isinstance(value, dtype):
        return value
    remedy = f"There are {', '.join(_BY_NAME)}."
    if value is not None:  # which NumPy takes for float64
        with suppress(ValueError):
            remedy = f"Write `popxl.{dtype.as_dtype(value).name}`."
    came = f"{value!r} ({type(value).__name__})"
    raise TypeError(f"{what} must be a popxl dtype such as popxl.float32; got {came:.200}. {remedy}")


def kind_of(array_dtype: np.dtype[Any]) -> str:
    """NumPy's letter for the kind of an array's dtype; `"f"` for bfloat16, too, of which NumPy knows no kind."""
    return "f" if array_dtype == bfloat16.as_numpy() else array_dtype.kind


def _declare(name: str, kind: str, host: Any = None, device: Any = None) -> dtype:
    declared: dtype = object.__new__(dtype)
    declared._name, declared._kind = name, kind
    declared._numpy = np.dtype(host or name)
    declared._jax = np.dtype(device) if device else declared._numpy
    return declared


bool = _declare("bool", "b")
int8 = _declare("int8", "i")
int16 = _declare("int16", "i")
int32 = _declare("int32", "i")
int64 = _declare("int64", "i")
uint8 = _declare("uint8", "u")
uint16 = _declare("uint16", "u")
uint32 = _declare("uint32", "u")
uint64 = _declare("uint64", "u")
float8_143 = _declare("float8_143", "f", host=np_dtype_float8_143, device=ml_dtypes.float8_e4m3fnuz)
float8_152 = _declare("float8_152", "f", host=np_dtype_float8_152, device=ml_dtypes.float8_e5m2fnuz)
half = float16 = _declare("float16", "f")
bfloat16 = _declare("bfloat16", "f", host=ml_dtypes.bfloat16)
float = float32 = _declare("float32", "f")
double = float64 = _declare("float64", "f")
complex64 = _declare("complex64", "c")
complex128 = _declare("complex128", "c")

ALL = (
    *(bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64),
    *(float8_143, float8_152, float16, bfloat16, float32, float64, complex64, complex128),
)
"""All dtypes."""

_BY_NAME = {each.name: each for each in ALL}
_BY_NUMPY = {array_dtype: each for each in ALL for array_dtype in (each.as_numpy(), each.as_jax())}
_BY_PYTHON_TYPE: dict[type, dtype] = {builtins.bool: bool, builtins.float: float32}
_NOT_IN_TORCH = (uint16, uint32, uint64, float8_143, float8_152)


def _find(value: Any) -> dtype | None:
    """Find the dtype for a NumPy or torch dtype object, if `value` is one with an equivalent."""
    if isinstance(value, np.dtype):
        return _BY_NUMPY.get(value)
    torch = sys.modules.get("torch")  # an object of torch's exists only where torch is imported
    if torch is not None and isinstance(value, torch.dtype):
        named = _BY_NAME.get(str(value).removeprefix("torch."))
        return None if named in _NOT_IN_TORCH else named
    return None


def _numpy_dtype(value: Any) -> np.dtype[Any] | None:
    try:
        return np.dtype(value)
    except (TypeError, ValueError, SyntaxError):  # the last for strings that NumPy takes for a list of fields
        return None


def _letter_of_as_dtype(value: Any) -> str:
    if isinstance(value, dtype):
        return f"dtype.as_dtype: `type_value` is {value!r}, which is a popxl dtype already. Use it as it is."
    own = getattr(value, "dtype", None)
    came = repr(value) if own is None else f"a {type(value).__name__} of dtype {own}"
    if (numpy := _numpy_dtype(value if own is None else own)) is not None and numpy.newbyteorder("=") in _BY_NUMPY:
        return (
            f"dtype.as_dtype: {came:.200} has the byte order of another machine. Convert data, with "
            "`array.astype(array.dtype.newbyteorder('='))`."
        )
    return (
        f"dtype.as_dtype: no popxl dtype corresponds to `type_value`, {came:.200}. Expected a name "
        f"({', '.join(_BY_NAME)}), a type or dtype of Python, NumPy or PyTorch, or an array of such a dtype. "
        "If this is data without a usable type of its own, pass `dtype` along with it."
    )
