"""Checkpoints as files: named arrays and a record of the session that they come from. Sessions are not known here.

A checkpoint is a directory. In it:

    model/<name>.npz         an array, under the key <name>
    model.safetensors        all arrays together, in place of these
    model/<file name>        a memory map, copied as it is
    session_info.json        the record
    dataloader.bin           what the data loader has written, if there is one
    checksums.json           the digests of all these files

Several processes that write a checkpoint together have, beside these, a directory each, with parts of arrays:

    pieces/<number>/         model/<name>.npz or model.safetensors, runs of elements one after the other; runs.json,
                             which elements these are; checksums.json, the digests of all this
    pieces.json              the index, written last: how many directories there are, and what they are parts of

Nothing in it is read as a Python object. It is written beside its place, brought to the disk and renamed: a program
that is interrupted at any moment leaves the old checkpoint or the new one, which `located` finds. What is read is
compared with the digests first. Checkpoints of others, and of earlier versions, have none, and are read as they are.

A `Writer` writes checkpoints one after the other, if wanted in a thread while the program goes on.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
import threading
import weakref
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError, model_validator

import popxl
from popxl.base.files import (
    CHECKSUMS,
    OF_ARCHIVES,
    bring_to_disk,
    check_checksums,
    current,
    discard,
    replacing,
    write_checksums,
)
from popxl.errors import UnreadableFileError
from popxl_addons import _wandb
from popxl_addons.array_munging import unshard

Format = Literal["npz", "safetensors"]

MODEL = "model"
TENSORS = "model.safetensors"
INFO = "session_info.json"
LOADER = "dataloader.bin"
PIECES, INDEX, RUNS = "pieces", "pieces.json", "runs.json"

_log = logging.getLogger(__name__)


# Places -------------------------------------------------------------------------------------------------------------


@contextmanager
def created(place: str) -> Iterator[Path]:
    """An empty directory to write a checkpoint to. It becomes `place` when the block ends, unless it fails.

    What is in `place` besides a checkpoint stays there. ``wandb://<name>`` stands for an artifact.
    """
    if place.startswith(_wandb.SCHEME):
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)
            write_checksums(Path(directory))
            _wandb.upload(place.removeprefix(_wandb.SCHEME), Path(directory))
    else:
        with replacing(as_path(place), own=(MODEL, TENSORS, INFO, LOADER, PIECES, INDEX, CHECKSUMS)) as directory:
            yield directory
            write_checksums(directory)


@contextmanager
def located(place: str) -> Iterator[Path]:
    """The directory with the files of the checkpoint `place`, for the duration of the block.

    All but the memory maps have been compared with their digests: `check_maps` compares these.

    `FileNotFoundError` if there is no checkpoint, `UnreadableFileError` if it is damaged.
    """
    if place.startswith(_wandb.SCHEME):
        with tempfile.TemporaryDirectory() as directory:
            _wandb.download(place.removeprefix(_wandb.SCHEME), Path(directory))
            yield _checked(Path(directory), place)
    else:
        yield _checked(current(as_path(place)), place)


def as_path(place: str) -> Path:
    """The absolute path of a checkpoint that is a directory; ``~`` is the user's home."""
    return Path(place).expanduser().resolve()


def forget(directory: Path) -> None:
    """Delete a checkpoint. A failure is only told in the log."""
    try:
        discard(directory)
    except OSError as problem:
        _log.warning("The old checkpoint `%s` could not be deleted: %s", directory, problem)


def _checked(directory: Path, place: str) -> Path:
    if not any((directory / name).exists() for name in (MODEL, TENSORS)):
        raise FileNotFoundError(f"`{place}` is no checkpoint: there is neither `{MODEL}` nor `{TENSORS}` in it.")
    check_checksums(directory, lambda name: not _is_map(name))
    return directory


def check_maps(directory: Path) -> None:
    """Compare the memory maps in a checkpoint with their digests. `UnreadableFileError` if one is damaged."""
    check_checksums(directory, _is_map)


def _is_map(name: str) -> bool:
    return name.startswith(f"{MODEL}/") and not name.endswith(".npz")


class Writer:
    """Writes checkpoints one after the other: at once, or each in a thread.

    What goes wrong in a thread is raised by the next `check`. If there is none, because the owner or the process has
    come to its end, it is told in the log.

    Args:
        owner: who asks. The end of the process waits for a thread; that of the owner does not.
    """

    def __init__(self, owner: object) -> None:
        self._thread: threading.Thread | None = None
        self._problem: BaseException | None = None
        self._is_left = False
        self._saved: list[Path] = []
        self._turn = threading.Lock()
        self._telling = threading.RLock()  # the owner may be collected in any thread, at any moment
        weakref.finalize(owner, self._leave)

    def do(self, work: Callable[[], None], what: str, wait: bool) -> None:
        """Do some work: in a thread, unless the caller is to wait. `what` it is, is told where it fails in a thread."""
        with self._turn:
            self.wait()
            if not wait:
                self._thread = threading.Thread(target=self._work, args=(work, what), name=f"write {what}")
                self._thread.start()
                return
        work()

    def join(self) -> None:
        """Wait until the thread has ended."""
        if (thread := self._thread) is not None:
            thread.join()

    def check(self) -> None:
        """Raise what went wrong in the last thread, once."""
        with self._telling:
            problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def wait(self) -> None:
        """Wait until the thread has ended, and raise what went wrong there."""
        self.join()
        self.check()

    def keep(self, directory: Path, count: int) -> None:
        """Note the newest checkpoint, and delete the oldest if there are more than `count`."""
        self._saved = [path for path in self._saved if path != directory] + [directory]
        while len(self._saved) > count:
            oldest = self._saved.pop(0)
            if oldest in directory.parents:
                _log.warning("The old checkpoint `%s` is not deleted: the newest, `%s`, is in it.", oldest, directory)
            else:
                forget(oldest)

    def _work(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except BaseException as problem:  # whatever it is, it is for the program's own thread
            problem.add_note(f"This was when {what} was written, while the program went on. It is not there.")
            with self._telling:
                self._problem = problem
                if self._is_left:
                    self._tell()

    def _leave(self) -> None:
        with self._telling:
            self._is_left = True
            self._tell()

    def _tell(self) -> None:
        if self._problem is not None:
            _log.error("Nobody has asked about a checkpoint that could not be written.", exc_info=self._problem)
            self._problem = None


# Contents -----------------------------------------------------------------------------------------------------------


def write_arrays(directory: Path, arrays: Mapping[str, np.ndarray], format: Format = "npz") -> None:
    """Write arrays in a format, and copy the files of those that are memory maps. Raises as `begun` does."""
    begun(directory, arrays, format)()


def begun(directory: Path, arrays: Mapping[str, np.ndarray], format: Format = "npz") -> Callable[[], None]:
    """Copy the files of the arrays that are memory maps. What is returned writes the others, in a format.

    Raises:
        ValueError: for another `format`, two memory maps whose files have the same name, or an array that only Python
            could read.
    """
    if format not in ("npz", "safetensors"):
        raise ValueError(f"The format of a checkpoint is {format!r}; expected 'npz' or 'safetensors'.")
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


def read_arrays(directory: Path) -> dict[str, np.ndarray]:
    """The arrays by name, of whichever format; without memory maps. Those in pieces are put together.

    Raises:
        UnreadableFileError: if a file is damaged or missing, or holds something that only Python could read.
    """
    return _read_whole(directory) | _read_pieces(directory)


def _read_whole(directory: Path) -> dict[str, np.ndarray]:
    if (directory / TENSORS).exists():
        return _read_safetensors(directory / TENSORS)
    return {path.stem: _read_npz(path, path.stem) for path in sorted((directory / MODEL).glob("*.npz"))}


def map_file(array: np.ndarray) -> Path | None:
    """The file that an array is mapped to, if there is one."""
    return Path(array.filename) if isinstance(array, np.memmap) and array.filename is not None else None


def write_info(directory: Path, info: Mapping[str, Any]) -> None:
    """Write the record. `TypeError` if it is not made of what JSON knows."""
    try:
        text = json.dumps(info, indent=2)
    except TypeError as problem:
        raise TypeError(
            "The record of a checkpoint holds text, numbers, booleans, None, and lists and dictionaries of these. "
            f"{problem}, in {info!r}."
        ) from problem
    (directory / INFO).write_text(text, encoding="utf-8")


def read_info(directory: Path) -> dict[str, Any]:
    """The record, or that of a session that has not run if there is none. `UnreadableFileError` if it is damaged."""
    path = directory / INFO
    if not path.exists():
        return {"steps": 0}
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise UnreadableFileError(f"`{path}` is damaged: {problem}.") from problem
    if not isinstance(info, dict):
        raise UnreadableFileError(f"`{path}` is damaged: expected a JSON object, found {info!r}.")
    return info


# Pieces -------------------------------------------------------------------------------------------------------------

Piece = tuple[int, np.ndarray]
"""Elements of an array, and the number of the first, in the order of the array's rows."""


class Divided(BaseModel):
    """An array in pieces.

    Attributes:
        shape: its shape.
        axis: along which the parts are joined that are stacked on its first axis; `None` if it is whole.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    shape: tuple[NonNegativeInt, ...]
    axis: NonNegativeInt | None = None

    @model_validator(mode="after")
    def _axis_is_there(self) -> Self:
        if self.axis is not None and self.axis + 1 >= len(self.shape):
            raise ValueError(f"parts of the shape {self.shape[1:]} have no axis {self.axis}")
        return self


class Index(BaseModel):
    """What a checkpoint in pieces consists of.

    Attributes:
        writers: how many directories with pieces there are.
        arrays: what they are pieces of, by name.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    writers: NonNegativeInt
    arrays: dict[str, Divided]


_Runs = TypeAdapter(dict[str, list[tuple[NonNegativeInt, NonNegativeInt]]])  # from one element to another


class Notes(Protocol):
    """How processes tell each other something: by notes under names."""

    def leave(self, name: str, text: str) -> None:
        """Leave a note for all."""

    def find(self, name: str) -> str:
        """Wait for the note of a name."""

    def forget(self, folder: str) -> None:
        """Forget all notes whose names begin with a folder's."""


class Share:
    """The part of one process in a checkpoint that several write together. Each tells once how that has ended.

    Args:
        directory: the draft of the checkpoint, which the first process has made.
        number: which process this is, from 0.
        count: how many there are.
        notes: how they tell each other.
    """

    def __init__(self, directory: Path, number: int, count: int, notes: Notes) -> None:
        self.directory = directory
        self._number, self._count, self._notes = number, count, notes

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell what goes wrong in a block."""
        try:
            yield
        except BaseException as problem:
            self._tell(f"Process {self._number}: {type(problem).__name__}: {problem}")
            raise

    def write(self, pieces: Mapping[str, list[Piece]], format: Format) -> None:
        """Write the pieces of this process, and tell that they are there."""
        with self.told():
            write_pieces(self.directory, self._number, pieces, format)
        self._tell("")

    def problems(self) -> list[str]:
        """What has gone wrong in any process. The first one asks; it waits until all have told."""
        told = [self._notes.find(f"{self.directory.name}/{number}") for number in range(self._count)]
        self._notes.forget(self.directory.name)
        return [text for text in told if text]

    def _tell(self, text: str) -> None:
        self._notes.leave(f"{self.directory.name}/{self._number}", text)


def write_pieces(directory: Path, number: int, pieces: Mapping[str, list[Piece]], format: Format = "npz") -> None:
    """Write the pieces of one process to a checkpoint that others write, too, and bring them to the disk.

    Args:
        directory: what `created` gives the process that begins the checkpoint.
        number: the number of this one, from 0.
        pieces: its pieces of arrays, by name.
        format: as for `write_arrays`.

    Raises:
        FileNotFoundError: if the directory is not there, as this process is on another machine, say.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"There is no directory `{directory}`, which the first process has made. Choose a place for checkpoints "
            "that all processes have in common."
        )
    own = directory / PIECES / str(number)
    own.mkdir(parents=True)
    joined = {name: _one_after_the_other(each) for name, each in pieces.items() if each}
    write_arrays(own, joined, format)
    runs = {name: [(start, start + elements.size) for start, elements in pieces[name]] for name in joined}
    (own / RUNS).write_bytes(_Runs.dump_json(runs))
    write_checksums(own)
    bring_to_disk(own)


def write_index(directory: Path, index: Index) -> None:
    """Say what the pieces are, when all are there. They are no checkpoint before."""
    (directory / INDEX).write_text(index.model_dump_json(indent=1), encoding="utf-8")


def _read_pieces(directory: Path) -> dict[str, np.ndarray]:
    path = directory / INDEX
    if not (directory / PIECES).exists():
        return {}
    index = _understood(path, Index.model_validate_json)
    found: dict[str, list[Piece]] = {name: [] for name in index.arrays}
    for number in range(index.writers):
        own = directory / PIECES / str(number)
        if not own.is_dir():
            raise UnreadableFileError(f"`{directory}` is damaged: `{PIECES}/{number}` is missing, of {index.writers}.")
        check_checksums(own, lambda name: True)
        runs, arrays = _understood(own / RUNS, _Runs.validate_json), _read_whole(own)
        for name in (name for name in runs if runs[name] and name in arrays and name in found):
            ends = np.cumsum([stop - start for start, stop in runs[name]])
            parts = np.split(arrays[name].reshape(-1), ends[:-1])
            found[name] += [(start, part) for (start, _), part in zip(runs[name], parts, strict=True)]
    return {name: _joined(path, name, found.pop(name), index.arrays[name]) for name in index.arrays}


def _joined(path: Path, name: str, pieces: list[Piece], divided: Divided) -> np.ndarray:
    """An array of its pieces. `UnreadableFileError` if one is missing, or there are too many."""
    size = math.prod(divided.shape)
    own = sorted(((start, elements) for start, elements in pieces if elements.size or not size), key=itemgetter(0))
    starts = np.cumsum([0, *(elements.size for _, elements in own)]).tolist()
    if not own or [start for start, _ in own] + [size] != starts:
        raise UnreadableFileError(f"`{path}` is damaged: the pieces of `{name}` are not all there, each once.")
    array = _one_after_the_other(own).reshape(divided.shape)
    return array if divided.axis is None else unshard(array, divided.axis)


def _one_after_the_other(pieces: list[Piece]) -> np.ndarray:
    return pieces[0][1] if len(pieces) == 1 else np.concatenate([elements for _, elements in pieces])


def _understood(path: Path, read: Callable[[bytes], Any]) -> Any:
    try:
        return read(path.read_bytes())
    except (ValidationError, FileNotFoundError) as problem:
        raise UnreadableFileError(f"`{path}` is damaged: {problem}") from problem


# Files of arrays ----------------------------------------------------------------------------------------------------

# NumPy's files have no word for bfloat16, and would say that these are just bytes: its name stands beside them.
_BFLOAT16 = np.dtype([("bfloat16", "u2")])


def _as_stored(array: np.ndarray) -> np.ndarray:
    return array.view(_BFLOAT16) if array.dtype == popxl.bfloat16.as_numpy() else array


# By hand: `np.savez` takes a name such as `file` for its own parameter, and `np.load` leaves a damaged file open.
def _write_npz(path: Path, name: str, array: np.ndarray) -> None:
    with zipfile.ZipFile(path, "w") as archive, archive.open(f"{name}.npy", "w", force_zip64=True) as file:
        np.lib.format.write_array(file, _as_stored(np.asarray(array)), allow_pickle=False)


def _read_npz(path: Path, name: str) -> np.ndarray:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
            _check_claim(file, archive.getinfo(f"{name}.npy").file_size)
            array = np.lib.format.read_array(file, allow_pickle=False)
            if file.read(1):  # to the end, where the archive's own sum is compared
                raise ValueError("there is more than the array in it.")
            return array.view(popxl.bfloat16.as_numpy()) if array.dtype == _BFLOAT16 else array
    except OF_ARCHIVES as problem:
        raise UnreadableFileError(
            f"`{path}` is damaged: expected a NumPy archive with the array `{name}`. {problem}"
        ) from problem


def _check_claim(file: IO[bytes], size: int) -> None:
    """`ValueError` if an array is said to have more bytes than there are: nobody is to make room for these."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    claimed = math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and claimed != size - file.tell():
        raise ValueError(f"The array is said to have {claimed} bytes, and there are {size - file.tell()}.")
    file.seek(0)


# A float8 is one byte with a name, which safetensors does not know: the byte is stored, and the name beside it.
def _write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    float8 = {name: popxl.dtype.as_dtype(array.dtype).name for name, array in arrays.items() if array.dtype.names}
    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    from safetensors.numpy import save_file  # only who asks for this format needs the library

    save_file(plain | {name: plain[name].view(np.uint8) for name in float8}, path, metadata=float8 or None)


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            float8 = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}
            named = {name: popxl.dtype.as_dtype(float8[name]).as_numpy() for name in float8 if name in arrays}
            return arrays | {name: arrays[name].view(dtype) for name, dtype in named.items()}
    except (SafetensorError, ValueError, OSError) as problem:
        raise UnreadableFileError(f"`{path}` is damaged: {problem}") from problem
