"""Arrays in shards: the elements that each process has written, and their lookup.

Several processes that write a checkpoint together have a directory each, with shards of arrays:

    pieces/<number>/         files of arrays (`popxl_addons.array_files`), runs of elements one after the other;
                             runs.json, the index of these elements; checksums.json, the digests of all this
    pieces.json              the index, written last: the number of directories, and the arrays with their shapes

A reader needs no knowledge of the shards, or of the replicas that had them: `LazyArray.elements` reads a range of
elements from the files that hold it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError, model_validator

from popxl.errors import UnreadableFileError
from popxl.extend.files import bring_to_disk, write_checksums
from popxl_addons.array_files import Format, LazyArray, arrays_in, write_arrays

PIECES, INDEX, RUNS = "pieces", "pieces.json", "runs.json"

Shard = tuple[int, np.ndarray]
"""Index of the first element in row-major order, and consecutive elements of an array."""


class ShardSpec(BaseModel):
    """Layout of a sharded array.

    Attributes:
        shape: shape of the array.
        axis: axis to join the parts along that are stacked on the first axis; `None` for an undivided array.
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
    """Index of the shards in a joint checkpoint.

    Attributes:
        writers: number of directories with shards.
        arrays: layouts of the arrays, by name.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    writers: NonNegativeInt
    arrays: dict[str, ShardSpec]


_Runs = TypeAdapter(dict[str, list[tuple[NonNegativeInt, NonNegativeInt]]])  # from one element to another


# Written ------------------------------------------------------------------------------------------------------------


class KeyValueStore(Protocol):
    """A store of texts by key, which several processes share."""

    def set(self, name: str, text: str) -> None:
        """Set the text of a key, once."""

    def get(self, name: str) -> str:
        """The text of a key; waits until some process has set it."""

    def delete(self, folder: str) -> None:
        """Delete all keys under a folder."""


class ShardWriter:
    """Writer of one process's shards of a joint checkpoint, with a report of success or failure to the other processes.

    Args:
        directory: the draft of the checkpoint, which the first process has made.
    """

    def __init__(self, directory: Path, number: int, count: int, store: KeyValueStore) -> None:
        self.directory = directory
        self._number, self._count, self._store = number, count, store

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Tell what goes wrong in a block."""
        try:
            yield
        except BaseException as problem:
            self._report(f"Process {self._number}: {type(problem).__name__}: {problem}")
            raise

    def write(self, shards: Mapping[str, list[Shard]], format: Format) -> None:
        """Write the shards of this process, and report success or failure."""
        with self.reporting_failures():
            write_shards(self.directory, self._number, shards, format)
        self._report("")

    def problems(self) -> list[str]:
        """Failures reported by any process. Called by the first process; waits for all reports."""
        texts = [self._store.get(f"{self.directory.name}/{number}") for number in range(self._count)]
        self._store.delete(self.directory.name)
        return [text for text in texts if text]

    def _report(self, text: str) -> None:
        self._store.set(f"{self.directory.name}/{self._number}", text)


def write_shards(directory: Path, number: int, shards: Mapping[str, list[Shard]], format: Format = "npz") -> None:
    """Write and flush one process's shards of a joint checkpoint.

    Args:
        directory: result of `new_checkpoint` in the process that begins the checkpoint.
        number: index of this process, from 0.
        shards: shards of arrays, by name.
        format: as for `write_arrays`.

    Raises:
        FileNotFoundError: if the directory does not exist, for example because this process is on another machine.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"There is no directory `{directory}`, which the first process has made. Choose a place for checkpoints "
            "that all processes have in common."
        )
    folder = directory / PIECES / str(number)
    folder.mkdir(parents=True)
    contents = {name: _concatenate_shards(values) for name, values in shards.items() if values}
    write_arrays(folder, contents, format)
    runs = {name: [(start, start + elements.size) for start, elements in shards[name]] for name in contents}
    (folder / RUNS).write_bytes(_Runs.dump_json(runs))
    write_checksums(folder)
    bring_to_disk(folder)


def write_index(directory: Path, index: Index) -> None:
    """Write the index of all shards, which completes a checkpoint."""
    (directory / INDEX).write_text(index.model_dump_json(indent=1), encoding="utf-8")


def _concatenate_shards(shards: list[Shard]) -> np.ndarray:
    return shards[0][1] if len(shards) == 1 else np.concatenate([elements for _, elements in shards])


# Read ---------------------------------------------------------------------------------------------------------------


def arrays_of(directory: Path) -> dict[str, LazyArray]:
    """Lazy arrays of a checkpoint by name, without memory maps.

    Raises:
        UnreadableFileError: if a file is damaged or missing, or holds something that only Python could read.
    """
    return arrays_in(directory) | _sharded_arrays(directory)


def read_all(array: LazyArray) -> np.ndarray:
    """All elements of an array."""
    return array.elements(0, math.prod(array.shape)).reshape(array.shape)


@dataclass(frozen=True)
class ReshapedArray:
    """An array whose parts along an axis are stacked on its first axis, or joined, otherwise than they are stored.

    Attributes:
        source: array as it is stored.
        shape: shape of this view.
        unsplit_shape: shape of one value, before the split.
        axis: the axis of that.
        stored, num_parts: number of parts in the stored array, and in this view.
    """

    source: LazyArray
    shape: tuple[int, ...]
    unsplit_shape: tuple[int, ...]
    axis: int
    stored: int
    num_parts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.source.dtype

    def elements(self, start: int, stop: int) -> np.ndarray:
        outer, size = math.prod(self.unsplit_shape[: self.axis]), self.unsplit_shape[self.axis]
        inner = math.prod(self.unsplit_shape[self.axis + 1 :])
        view_size, stored_size = size // self.num_parts, size // self.stored
        chunks = [self.source.elements(0, 0)]
        while start < stop:  # as long as elements are contiguous both here and there
            row, inner_index = divmod(start, inner)
            row, view_index = divmod(row, view_size)
            view_part, row = divmod(row, outer)
            stored_part, stored_index = divmod(view_part * view_size + view_index, stored_size)
            count = min(min(view_size - view_index, stored_size - stored_index) * inner - inner_index, stop - start)
            source_start = ((stored_part * outer + row) * stored_size + stored_index) * inner + inner_index
            chunks.append(self.source.elements(source_start, source_start + count))
            start += count
        return np.concatenate(chunks)


def join(array: LazyArray, axis: int) -> LazyArray:
    """An array as one value, whose parts along an axis are stacked on its first axis: see `array_munging.unshard`."""
    num_parts, *shape = array.shape
    shape[axis] *= num_parts
    return ReshapedArray(array, tuple(shape), tuple(shape), axis, stored=num_parts, num_parts=1)


def split(array: LazyArray, num_parts: int, axis: int) -> LazyArray:
    """An array as equal parts along an axis, stacked on a new first axis: see `array_munging.shard`."""
    shape = list(array.shape)
    shape[axis] //= num_parts
    return ReshapedArray(array, (num_parts, *shape), array.shape, axis, stored=1, num_parts=num_parts)


@dataclass(frozen=True)
class _ConcatenatedArray:
    """Array stored as consecutive shards.

    Attributes:
        starts: number of the first element of each shard.
        sources: array with each shard, and the index of its first element there.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    starts: tuple[int, ...]
    sources: tuple[tuple[LazyArray, int], ...]

    def elements(self, start: int, stop: int) -> np.ndarray:
        chunks = [np.empty(0, self.dtype)]
        ends = (*self.starts[1:], math.prod(self.shape))
        i = bisect_right(self.starts, start) - 1
        while start < stop:
            (source, first), begin, end = self.sources[i], self.starts[i], min(ends[i], stop)
            chunks.append(source.elements(first + start - begin, first + end - begin))
            start, i = end, i + 1
        return np.concatenate(chunks)


def _sharded_arrays(directory: Path) -> dict[str, LazyArray]:
    path = directory / INDEX
    if not (directory / PIECES).exists():
        return {}
    index = _parse_file(path, Index.model_validate_json)
    runs_of: dict[str, list[tuple[int, int, LazyArray, int]]] = {name: [] for name in index.arrays}
    for number in range(index.writers):
        folder = directory / PIECES / str(number)
        if not folder.is_dir():
            raise UnreadableFileError(f"`{directory}` is damaged: `{PIECES}/{number}` is missing, of {index.writers}.")
        runs, arrays = _parse_file(folder / RUNS, _Runs.validate_json), arrays_in(folder)
        for name in (name for name in runs if name in arrays and name in runs_of):
            first = 0
            for start, stop in runs[name]:
                runs_of[name].append((start, stop, arrays[name], first))
                first += stop - start
            if first != math.prod(arrays[name].shape):
                runs_of[name].clear()  # shapes or dtypes do not match the index
    return {name: _concatenated_array(path, name, runs_of[name], index.arrays[name]) for name in index.arrays}


def _concatenated_array(
    path: Path, name: str, runs: list[tuple[int, int, LazyArray, int]], spec: ShardSpec
) -> LazyArray:
    """Array from its shards. `UnreadableFileError` for missing or duplicate ones."""
    size = math.prod(spec.shape)
    ordered = sorted((run for run in runs if run[0] < run[1] or not size), key=itemgetter(0, 1))
    if not ordered or [0, *(stop for _, stop, *_ in ordered)] != [*(start for start, *_ in ordered), size]:
        raise UnreadableFileError(f"`{path}` is damaged: the pieces of `{name}` are not all there, each once.")
    starts, sources = tuple(start for start, *_ in ordered), tuple((source, first) for *_, source, first in ordered)
    array = _ConcatenatedArray(spec.shape, sources[0][0].dtype, starts, sources)
    return array if spec.axis is None else join(array, spec.axis)


def _parse_file(path: Path, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse(path.read_bytes())
    except (ValidationError, FileNotFoundError) as problem:
        raise UnreadableFileError(f"`{path}` is damaged: {problem}") from problem
