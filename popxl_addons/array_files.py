"""Files of arrays, in two formats: written eagerly, read lazily.

    model/<name>.npz         an array, under the key <name>
    model.safetensors        all arrays together, in place of these
    model/<file name>        a memory map, copied as it is

`arrays_in` returns the spec and position of each array; its elements are read on access. Nothing is read as a Python
object.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Protocol, TypeVar, get_args

import numpy as np

import popxl
from popxl.errors import UnreadableFileError
from popxl.extend.arguments import word
from popxl.extend.files import ARCHIVE_ERRORS, CHECKSUMS

Format = Literal["npz", "safetensors"]
T = TypeVar("T")

MODEL = "model"
TENSORS = "model.safetensors"


class LazyArray(Protocol):
    """Array whose elements are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def elements(self, start: int, stop: int) -> np.ndarray:
        """Elements `start` to `stop` in row-major order."""


@dataclass(frozen=True)
class InMemory:
    """Array in memory."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    def elements(self, start: int, stop: int) -> np.ndarray:
        return self.array.reshape(-1)[start:stop]


@dataclass(frozen=True)
class InFile:
    """Array with contiguous elements in a file.

    Attributes:
        path: the file.
        start: position of their first byte.
        dtype, shape: spec of the array.
    """

    path: Path
    start: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def elements(self, start: int, stop: int) -> np.ndarray:
        values = np.fromfile(self.path, self.dtype, stop - start, offset=self.start + start * self.dtype.itemsize)
        if len(values) < stop - start:
            raise UnreadableFileError(f"`{self.path}` is damaged: it ends before element {stop} of {self.shape}.")
        return values


def files_in(directory: Path) -> list[Path]:
    """The files of arrays in a directory; without memory maps."""
    file = directory / TENSORS
    return [file] if file.exists() else sorted((directory / MODEL).glob("*.npz"))


# Written ------------------------------------------------------------------------------------------------------------


def write_arrays(directory: Path, arrays: Mapping[str, np.ndarray], format: Format = "npz") -> None:
    """Write arrays in a format, with copies of files for memory-mapped ones. Raises as `start_write` does."""
    start_write(directory, arrays, format)()


def start_write(directory: Path, arrays: Mapping[str, np.ndarray], format: Format = "npz") -> Callable[[], None]:
    """Copy the files of memory-mapped arrays; returns a function that writes the other arrays in a format.

    Raises:
        ValueError: for an unknown `format`, two memory maps whose files have the same name, or an array of Python
            objects.
    """
    word(format, "The format of a checkpoint", get_args(Format))
    maps = {name: file for name, array in arrays.items() if (file := map_file(array))}
    stored = {name: array for name, array in arrays.items() if name not in maps}
    model = directory / MODEL
    if maps or format == "npz":
        model.mkdir()
    sources: dict[str, Path] = {}
    for name, source in maps.items():
        if sources.setdefault(source.name, source) != source:
            raise ValueError(
                f"The memory map of `{name}`, {source}, and that of another array, {sources[source.name]}, would be "
                "one file in a checkpoint. Give one of them another name."
            )
        shutil.copyfile(source, model / source.name)

    def write() -> None:
        if format == "safetensors":
            _write_safetensors(directory / TENSORS, stored)
        else:
            for name, array in stored.items():
                _write_npz(model / f"{name}.npz", name, array)

    return write


def map_file(array: np.ndarray) -> Path | None:
    """File of a memory-mapped array; `None` for other arrays."""
    return Path(array.filename) if isinstance(array, np.memmap) and array.filename is not None else None


# Read ---------------------------------------------------------------------------------------------------------------


def arrays_in(directory: Path) -> dict[str, LazyArray]:
    """The arrays by name, of whichever format; without memory maps.

    With `checksums.json`, arrays stay in their files. Without it they are read at once, as an archive verifies its own
    sums while it is read; so are arrays with elements in another order.

    Raises:
        UnreadableFileError: if a file is damaged, or holds something that only Python could read.
    """
    if (directory / TENSORS).exists():
        return dict(_in_safetensors(directory / TENSORS))
    has_digests = (directory / CHECKSUMS).exists()
    arrays: dict[str, LazyArray] = {}
    for path in files_in(directory):
        in_file = _in_npz(path, path.stem) if has_digests else None
        arrays[path.stem] = InMemory(_read_npz(path, path.stem)) if in_file is None else in_file
    return arrays


_BFLOAT16 = np.dtype([("bfloat16", "u2")])
"""Stored dtype of bfloat16, with its name as that of a field: NumPy's format has none, and would store plain bytes."""


def _write_npz(path: Path, name: str, array: np.ndarray) -> None:
    """Write an archive with one array. `np.savez` would take a name such as `file` for its own parameter."""
    with zipfile.ZipFile(path, "w") as archive, archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        array = np.asarray(array)
        stored = array.view(_BFLOAT16) if array.dtype == popxl.bfloat16.as_numpy() else array
        np.lib.format.write_array(file, stored, allow_pickle=False)


def _as_ours(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return popxl.bfloat16.as_numpy() if dtype == _BFLOAT16 else dtype


def _read_npz(path: Path, name: str) -> np.ndarray:
    """Read the array of an archive. `np.load` would leave a damaged file open."""

    def read_entry(file: IO[bytes], about: zipfile.ZipInfo) -> np.ndarray:
        _read_header(file, about.file_size)
        file.seek(0)
        array = np.lib.format.read_array(file, allow_pickle=False)
        if file.read(1):  # to the end, where the archive's own sum is compared
            raise ValueError("there is more than the array in it.")
        return array.view(_as_ours(array.dtype))

    return _with_entry(path, name, read_entry)


def _in_npz(path: Path, name: str) -> InFile | None:
    """Position of an array in an archive; `None` if its elements are compressed or in column order."""

    def locate_entry(file: IO[bytes], about: zipfile.ZipInfo) -> InFile | None:
        header = _read_header(file, about.file_size)
        if about.compress_type != zipfile.ZIP_STORED or header.by_columns or header.dtype.hasobject:
            return None
        with path.open("rb") as archive:
            archive.seek(about.header_offset)
            lengths = struct.unpack("<26xHH", archive.read(30))  # of two fields between this header and the data
        return InFile(path, about.header_offset + 30 + sum(lengths) + file.tell(), _as_ours(header.dtype), header.shape)

    return _with_entry(path, name, locate_entry)


def _with_entry(path: Path, name: str, look: Callable[[IO[bytes], zipfile.ZipInfo], T]) -> T:
    """Result of a function of one entry of an archive. `UnreadableFileError` for damaged archives."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            return look(file, archive.getinfo(f"{name}.npy"))
    except ARCHIVE_ERRORS as problem:
        raise UnreadableFileError(
            f"`{path}` is damaged: expected a NumPy archive with the array `{name}`. {problem}"
        ) from problem


class _NpyHeader(NamedTuple):
    """Header of a NumPy file: dtype, shape and order."""

    shape: tuple[int, ...]
    by_columns: bool
    dtype: np.dtype[Any]


def _read_header(file: IO[bytes], size: int) -> _NpyHeader:
    """Read an array's header, up to its first element.

    `ValueError` if it declares more bytes than there are, before memory for them is allocated.
    """
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    header = _NpyHeader(*read_header(file))
    claimed = math.prod(header.shape) * header.dtype.itemsize
    if not header.dtype.hasobject and claimed != size - file.tell():
        raise ValueError(f"The array is said to have {claimed} bytes, and there are {size - file.tell()}.")
    return header


DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": popxl.bfloat16.as_numpy(),
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    "C64": np.complex64,
}  # fmt: skip
"""NumPy dtypes by their names in safetensors."""


class InSafetensors(NamedTuple):
    """An array in a safetensors file: position, dtype name and shape."""

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        numpy_dtype = DTYPES.get(self.dtype)
        return f"{self.dtype if numpy_dtype is None else np.dtype(numpy_dtype).name}{list(self.shape)}"

    def mapped(self) -> np.ndarray:
        """Memory-mapped values, read on access."""
        if 0 in self.shape:
            return np.empty(self.shape, DTYPES[self.dtype])
        return np.memmap(self.path, DTYPES[self.dtype], "r", self.start, self.shape)


def safetensors_in(path: Path) -> tuple[dict[str, InSafetensors], dict[str, str]]:
    """Arrays of a safetensors file by name, and its metadata. Reads the header only.

    `UnreadableFileError` if that is damaged, or the file is shorter than it says.
    """
    from safetensors import SafetensorError, safe_open  # the library is needed for such files only

    try:
        with safe_open(path, framework="numpy"):
            pass  # it checks the header: sizes, and that nothing lies outside
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (SafetensorError, ValueError, OSError) as problem:
        raise UnreadableFileError(f"`{path}` is damaged: {problem}") from problem
    metadata = header.pop("__metadata__", None) or {}
    return {
        name: InSafetensors(path, 8 + length + about["data_offsets"][0], about["dtype"], tuple(about["shape"]))
        for name, about in header.items()
    }, metadata


def _write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write a safetensors file. The format has no float8: their bytes are stored, and their dtypes as metadata."""
    float8 = {name: popxl.dtype.as_dtype(array.dtype).name for name, array in arrays.items() if array.dtype.names}
    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    from safetensors.numpy import save_file  # the library is needed for this format only

    save_file(plain | {name: plain[name].view(np.uint8) for name in float8}, path, metadata=float8 or None)


def _in_safetensors(path: Path) -> dict[str, InFile]:
    entries, float8 = safetensors_in(path)
    try:
        dtypes = {
            name: popxl.dtype.as_dtype(float8[name]).as_numpy() if name in float8 else np.dtype(DTYPES[entry.dtype])
            for name, entry in entries.items()
        }
    except (KeyError, ValueError) as problem:
        raise UnreadableFileError(f"`{path}` is damaged: it holds a dtype that nobody knows: {problem}.") from problem
    return {name: InFile(path, entry.start, dtypes[name], entry.shape) for name, entry in entries.items()}
