"""Batches that another process prepares while this one computes: `AsynchronousDataAccessor`.

The worker process iterates over the data set and copies the tensors of each batch into the next slot of a ring of
shared memory. What travels through the pipe between the processes is only the news that a slot is filled, or free
again, and how to put the batch together. Neither side polls: each sleeps until the other has something to say, and
notices at once, by the end of the pipe, if the other is gone. Shared memory has no name that could outlive them.

Batches themselves are made in `dataloader.py`.
"""

from __future__ import annotations

import copy
import io
import math
import multiprocessing
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.multiprocessing  # teaches `ForkingPickler` to share tensors

from poptorch import arguments
from poptorch.arguments import Structure, structure_of
from poptorch.enums import SharingStrategy
from poptorch.errors import createPoptorchError

__all__ = ["AsynchronousDataAccessor", "Rebatched", "forking"]

_START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}

_ALIGNMENT = 64
"""Bytes. Tensors in a slot begin at multiples of it: a cache line, and a multiple of the size of any number."""

_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
"""What is raised for something that cannot be pickled."""

_PATIENCE = 5
"""Seconds that a worker has to end after it was asked to."""


class AsynchronousDataAccessor:
    """Iterates over a data set in a process of its own, ahead of the program.

    The tensors of a batch lie in memory that the worker uses again: they stay as they are until the next batch is asked
    for; `clone()` what is needed longer. If a loop is left, the next one begins at the start of the data set.

    With the strategies other than `Fork`, the worker imports the program's main module: programs protect what they do
    with `if __name__ == "__main__":`. The worker's random numbers are seeded from PyTorch's generator.

    Args:
        dataset: the batches; anything that can be iterated over, such as a `torch.utils.data.DataLoader`, or a
            map-style data set. A batch is a tensor, a tuple or list of tensors, a dictionary from strings to tensors,
            or of a type that was registered with `registerCustomArgParser`.
        buffer_size: number of slots in the ring. The batch that the program looks at takes one.
        miss_sleep_time_in_ms: without effect: the worker does not poll for a free slot, but is woken.
        load_indefinitely: at the end of the data set, begin to load it again before the next loop asks for that.
        early_preload: fill the ring from the beginning; else only the first batch is loaded before the first loop.
        sharing_strategy: how the data set reaches the worker.

            * `SharedMemory`: pickled; its tensors move to shared memory, without a copy.
            * `FileSystem`: through a temporary file.
            * `Fork`: not at all: the worker begins as a copy of this process. The only way for a data set that cannot
              be pickled; not safe if threads of this process hold locks which the data set needs.
            * `ForkServer`: pickled, through a pipe.
        rebatched_size: put together so many rows (dimension 0) from batches of any size; a tensor without dimensions is
            one row. An incomplete batch at the end is dropped, unless `dataset` is a loader with `drop_last=False`.

    Raises:
        Error: if the data set is empty, fails to give its first batch, cannot be pickled, or is an asynchronous loader.
        AssertionError: if the batches are of a type that is not supported, or for a size out of range.

    Example:
        >>> batches = [(torch.full((2, 3), float(i)), torch.tensor([i, i])) for i in range(4)]
        >>> accessor = AsynchronousDataAccessor(batches, sharing_strategy=SharingStrategy.Fork)
        >>> [int(labels.sum()) for images, labels in accessor]
        [0, 2, 4, 6]
        >>> accessor.terminate()
    """

    _terminate: util.Finalize | None = None
    _first: _Filled | None = None  # the batch that the worker has started with, until it is asked for

    def __init__(
        self,
        dataset: Iterable[Any] | torch.utils.data.Dataset[Any],
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: int | None = None,
    ) -> None:
        if isinstance(getattr(dataset, "_accessor", None), AsynchronousDataAccessor):
            raise createPoptorchError(
                "AsynchronousDataAccessor: `dataset` is a DataLoader that is asynchronous already. Iterate over it "
                "directly, or make it with mode=DataLoaderMode.Sync."
            )
        if buffer_size < 1:
            raise AssertionError(f"AsynchronousDataAccessor: `buffer_size` must be at least 1; got {buffer_size}.")
        if isinstance(dataset, torch.utils.data.DataLoader):
            dataset = copy.copy(dataset)
            dataset._iterator = None  # the worker cannot have the persistent workers of this process
        if rebatched_size is not None:
            if rebatched_size <= 1:
                raise AssertionError(
                    f"AsynchronousDataAccessor: `rebatched_size` must be greater than 1; got {rebatched_size}. "
                    "Leave it out to get the batches as they are."
                )
            dataset = Rebatched(dataset, rebatched_size, getattr(dataset, "drop_last", True))
        self._dataset = dataset
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * buffer_size
        self._unopened = deque(range(buffer_size))  # slots that the worker may not use before the first loop
        self._held: int | None = None  # the slot that the program looks at
        self._epoch = 0
        self._position = "start"  # of this epoch, or "inside" it, or at its "end"
        self._first = self._start(SharingStrategy(sharing_strategy), load_indefinitely, early_preload)

    def __len__(self) -> int:
        """The number of batches, if the data set knows it."""
        return len(self._dataset)  # type: ignore[arg-type]

    def __iter__(self) -> AsynchronousDataAccessor:
        """Begin at the start of the data set; there is one iterator, which is the accessor itself."""
        self._check_alive()
        if self._position != "start":
            self._release()
            self._epoch += 1
            self._position = "start"
            self._send(_Begin(self._epoch))
        while self._unopened:
            self._send(_Free(self._unopened.popleft()))
        return self

    def __next__(self) -> Any:
        """The next batch. The tensors of the one before may change from now on."""
        self._check_alive()
        if self._unopened:
            iter(self)
        if self._position == "end":
            raise StopIteration
        self._position = "inside"
        self._release()
        while True:
            message = self._receive()
            if isinstance(message, _Failure):
                self.terminate()
                raise AssertionError(f"An error occurred in the data fetcher: {message.text}")
            if isinstance(message, _Filled):
                batch = self._open(message)
                if message.epoch == self._epoch:
                    return batch
                self._release()
            elif message.epoch == self._epoch:
                self._position = "end"
                raise StopIteration

    def terminate(self) -> None:
        """End the worker process. Batches that were returned stay; there are no further ones."""
        if self._terminate is not None:
            self._terminate()

    def __del__(self) -> None:
        self.terminate()

    def _start(self, strategy: SharingStrategy, load_indefinitely: bool, early_preload: bool) -> _Filled:
        """Start the worker and wait for its first batch."""
        with tempfile.TemporaryDirectory() as folder:
            data = _Parcel(self._dataset, strategy, Path(folder))
            self._process, self._connection = _launch(strategy, data, len(self._buffers), load_indefinitely)
            # The priority makes it run at exit, before Python waits for the process.
            self._terminate = util.Finalize(self, _end, (self._process, self._connection), exitpriority=10)
            try:
                for _ in range(len(self._unopened) if early_preload else 1):
                    self._send(_Free(self._unopened.popleft()))
                first = self._receive()
            except BaseException:
                self.terminate()
                raise
        if isinstance(first, _Filled):
            return first
        self.terminate()
        if isinstance(first, _Failure) and first.unsupported:
            raise AssertionError(first.text)
        reason = first.text if isinstance(first, _Failure) else "The data set is empty: it gives no (complete) batch."
        raise createPoptorchError(f"AsynchronousDataAccessor: the worker thread failed to start. {reason}")

    def _check_alive(self) -> None:
        if self._connection.closed:
            raise createPoptorchError(
                "This loader has ended: `terminate()` was called, or an error occurred. Make a new one to go on."
            )

    def _send(self, message: _Begin | _Free) -> None:
        try:
            self._connection.send(message)
        except ConnectionError:
            pass  # the worker has ended; why is the last thing that it has sent, and will be read

    def _receive(self) -> Any:
        if self._first is not None:
            message, self._first = self._first, None
            return message
        self._connection.poll(None)  # an interrupt while waiting loses nothing
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return _Failure(_cause_of_death(self._process))
        except BaseException:  # half a message has been read: nothing after it could be understood
            self.terminate()
            raise

    def _open(self, message: _Filled) -> Any:
        if message.buffer is not None:
            self._buffers[message.slot] = message.buffer
        self._held = message.slot
        tensors = _views(self._buffers[message.slot], message.layout)
        return _Unpickler(message.structure, tensors).load().rebuild(tensors)

    def _release(self) -> None:
        if self._held is not None:
            self._send(_Free(self._held))
            self._held = None


class Rebatched:
    """The rows of batches of any size, in batches of one size. Dimension 0 counts rows; a 0-d tensor is one.

    What else a batch of a registered type holds is that of the first of its parts.

    Args:
        batches: as for `AsynchronousDataAccessor`.
        size: number of rows in each batch.
        drop_last: leave out what remains at the end, and is less.

    Example:
        >>> [rows.tolist() for rows in Rebatched([torch.arange(3), torch.arange(3, 5)], size=2, drop_last=False)]
        [[0, 1], [2, 3], [4]]
    """

    def __init__(self, batches: Any, size: int, drop_last: bool) -> None:
        self._batches = batches
        self._size = size
        self._drop_last = drop_last

    def __len__(self) -> int:
        rows = len(self._batches) * (getattr(self._batches, "batch_size", None) or 1)
        return rows // self._size if self._drop_last else math.ceil(rows / self._size)

    def __iter__(self) -> Iterator[Any]:
        structure: Structure | None = None
        columns: list[list[torch.Tensor]] = []
        rows = 0
        for batch in _elements(self._batches):
            own = _structure(batch)
            tensors = [tensor.reshape(1) if tensor.ndim == 0 else tensor for tensor in own.tensors(batch)]
            lengths = {len(tensor) for tensor in tensors}
            if len(lengths) != 1:
                raise ValueError(
                    "Batches are put together row by row, so the tensors of each should have the same length in "
                    f"dimension 0; got the shapes {[tuple(tensor.shape) for tensor in tensors]}."
                )
            (length,) = lengths
            start = 0
            while start < length:
                if structure is None:
                    structure, columns, rows = own, [[] for _ in tensors], 0
                stop = min(length, start + self._size - rows)
                for column, tensor in zip(columns, tensors, strict=True):
                    column.append(tensor[start:stop])
                rows += stop - start
                start = stop
                if rows == self._size:
                    yield structure.rebuild(map(torch.cat, columns))
                    structure = None
        if structure is not None and not self._drop_last:
            yield structure.rebuild(map(torch.cat, columns))


@contextmanager
def forking() -> Iterator[None]:
    """Where processes are forked that load data: JAX's warning of forks is not for them, as they do not enter JAX."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        yield


# Messages -------------------------------------------------------------------------------------------------------------


class _Begin(NamedTuple):
    """To the worker: the program has begun this epoch, and wants nothing from earlier ones."""

    epoch: int


class _Free(NamedTuple):
    """To the worker: this slot may be filled."""

    slot: int


class _Place(NamedTuple):
    """Where in its slot a tensor lies; `start` in bytes."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Filled(NamedTuple):
    """From the worker: a batch. `buffer` is the memory of the slot from now on, or None if that has not changed."""

    epoch: int
    slot: int
    buffer: torch.Tensor | None
    layout: list[_Place]
    structure: bytes


class _Over(NamedTuple):
    """From the worker: this epoch has no further batches."""

    epoch: int


class _Failure(NamedTuple):
    """From the worker, as its last words; or in its place, if it had none."""

    text: str
    unsupported: bool = False


# The worker process ---------------------------------------------------------------------------------------------------


def _work(connection: Connection, data: _Parcel, seed: int, slots: int, load_indefinitely: bool) -> None:
    """What the worker process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program decides what an interrupt means
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    util.register_after_fork(connection, Connection.close)  # a loader's own workers must not keep it open
    threading.Thread(target=_leave_with_program, daemon=True).start()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with forking():
            _Worker(connection, slots, load_indefinitely).run(data.open())
    except _Unsupported as error:
        failure = _Failure(str(error), unsupported=True)
    except Exception:  # of the data set, whatever it is: the program raises it
        failure = _Failure(f"The data set failed in the worker process:\n{traceback.format_exc()}")
    try:
        connection.send(failure)
        while True:  # stay until the program has read this: what it has not opened yet of the ring would go with us
            connection.recv()
    except (EOFError, OSError):
        pass  # nobody is left who could want to know


def _leave_with_program() -> None:
    """Wait for the end of the program, and end the worker, too, even if the data set keeps it busy."""
    program = multiprocessing.parent_process()
    assert program is not None
    wait([program.sentinel])
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _leave(*signal_and_frame: object) -> None:
    for child in multiprocessing.active_children():
        child.terminate()
    sys.exit()


class _Worker:
    """Fills slots with the batches of one epoch after the other.

    It is at most one epoch ahead of the program, so that an epoch without batches does not keep it busy.
    """

    def __init__(self, connection: Connection, slots: int, load_indefinitely: bool) -> None:
        self._connection = connection
        self._load_indefinitely = load_indefinitely
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * slots
        self._free: deque[int] = deque()
        self._wanted = 0  # the epoch that the program is in

    def run(self, dataset: Any) -> None:
        epoch = 0
        while True:
            self._run_epoch(epoch, dataset)
            epoch = max(epoch + 1, self._wanted)
            while self._wanted < epoch - self._load_indefinitely:
                self._receive()

    def _run_epoch(self, epoch: int, dataset: Any) -> None:
        batches = iter(_elements(dataset))
        while (slot := self._next_slot(epoch)) is not None:
            try:
                batch = next(batches)
            except StopIteration:
                self._free.appendleft(slot)
                self._send(_Over(epoch))
                return
            self._send(self._fill(slot, epoch, batch))

    def _next_slot(self, epoch: int) -> int | None:
        """A free slot, as soon as there is one; None if the program has gone on to a later epoch."""
        while self._connection.poll() or (not self._free and self._wanted <= epoch):
            self._receive()
        return self._free.popleft() if self._wanted <= epoch else None

    def _fill(self, slot: int, epoch: int, batch: Any) -> _Filled:
        structure = _structure(batch)
        tensors = structure.tensors(batch)
        layout, size = _layout(tensors)
        grows = size > len(self._buffers[slot])
        if grows:
            self._buffers[slot] = torch.empty(size, dtype=torch.uint8).share_memory_()
        buffer = self._buffers[slot]
        for view, tensor in zip(_views(buffer, layout), tensors, strict=True):
            view.copy_(tensor.detach())
        return _Filled(epoch, slot, buffer if grows else None, layout, _pickled(structure, tensors))

    def _receive(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            sys.exit()  # the program has ended
        if isinstance(message, _Begin):
            self._wanted = message.epoch
        else:
            self._free.append(message.slot)

    def _send(self, message: _Filled | _Over) -> None:
        try:
            self._connection.send(message)
        except ConnectionError:
            sys.exit()


def _elements(dataset: Any) -> Iterable[Any]:
    """What a data set holds; a map-style one need not end by itself when iterated over."""
    return dataset if hasattr(type(dataset), "__iter__") else (dataset[i] for i in range(len(dataset)))


class _Unsupported(Exception):
    """The batches are of a type that cannot be sent."""


def _structure(batch: Any) -> Structure:
    """The structure of a batch, if it is of a supported type."""
    if arguments.parser_of(batch) is None:
        if isinstance(batch, dict):
            tensors = list(batch.values()) if all(isinstance(key, str) for key in batch) else [None]
        else:
            tensors = list(batch) if isinstance(batch, (tuple, list)) else [batch]
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise _Unsupported(
                "An asynchronous loader needs batches that are a tensor, a tuple or list of tensors, a dictionary from "
                f"strings to tensors, or of a type registered with registerCustomArgParser; got {_described(batch)}."
            )
    return structure_of(batch, "batch")


def _described(batch: Any) -> str:
    name = type(batch).__name__
    if isinstance(batch, dict):
        return f"{name} of " + ", ".join(f"{key!r}: {type(value).__name__}" for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return f"{name} of " + ", ".join(type(item).__name__ for item in batch)
    return name


# Memory and pickles ---------------------------------------------------------------------------------------------------


def _layout(tensors: list[torch.Tensor]) -> tuple[list[_Place], int]:
    """Places for tensors, one behind the other, and their size in bytes."""
    layout, end = [], 0
    for tensor in tensors:
        layout.append(_Place(end, tuple(tensor.shape), tensor.dtype))
        end += math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT
    return layout, end


def _views(buffer: torch.Tensor, layout: list[_Place]) -> list[torch.Tensor]:
    """The tensors that lie in a buffer of bytes."""
    return [
        buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for start, shape, dtype in layout
    ]


class _Pickler(ForkingPickler):
    """Pickles tensors as values: shared ones would take a file descriptor each, of which few can be sent.

    Args:
        file: what to write to.
        places: tensors to be written as their number in this list.
    """

    def __init__(self, file: Any, places: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = {
            kind: reduce
            for kind, reduce in self.dispatch_table.items()
            if reduce.__module__ != "torch.multiprocessing.reductions"
        }
        self._numbers = {id(tensor): number for number, tensor in enumerate(places)}

    def persistent_id(self, value: Any) -> int | None:
        return self._numbers.get(id(value))


class _Unpickler(pickle.Unpickler):
    """Reads what a `_Pickler` has written, with other tensors."""

    def __init__(self, data: bytes, places: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._places = places

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._places[pid]


def _pickled(value: Any, places: Iterable[torch.Tensor] = ()) -> bytes:
    file = io.BytesIO()
    _Pickler(file, places).dump(value)
    return file.getvalue()


def _can_be_pickled(value: Any) -> bool:
    try:
        _pickled(value)
    except _UNPICKLABLE:
        return False
    return True


class _Parcel:
    """Something on its way to a worker process, by a sharing strategy; it is unpacked there by `open`.

    It is pickled only while a process starts: then locks and other things can be sent that cannot be at other times.
    The parsers of registered types go with it; without those that cannot be pickled, as then their types cannot either.
    """

    def __init__(self, content: Any, strategy: SharingStrategy, folder: Path) -> None:
        self._content = content
        self._strategy = strategy
        self._path = folder / "dataset.pickle"
        self._data = b""

    def __getstate__(self) -> dict[str, Any]:
        parsers = {kind: parser for kind, parser in arguments.parsers().items() if _can_be_pickled((kind, parser))}
        content = (parsers, self._content)
        state = {**self.__dict__, "_content": None}
        if self._strategy is SharingStrategy.SharedMemory:
            state["_data"] = bytes(ForkingPickler.dumps(content))
        elif self._strategy is SharingStrategy.FileSystem:
            with self._path.open("wb") as file:
                _Pickler(file).dump(content)
        else:
            state["_data"] = _pickled(content)
        return state

    def open(self) -> Any:
        if self._strategy is SharingStrategy.Fork:
            return self._content
        if self._strategy is SharingStrategy.FileSystem:
            with self._path.open("rb") as file:
                parsers, content = pickle.load(file)
        else:
            parsers, content = pickle.loads(self._data)
        for kind, parser in parsers.items():
            arguments.registerCustomArgParser(kind, parser)
        return content


# Processes ------------------------------------------------------------------------------------------------------------


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold back SIGINT, and so in a process that is started, until that says how it takes interrupts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _launch(strategy: SharingStrategy, data: _Parcel, *how: Any) -> tuple[BaseProcess, Connection]:
    """Start a worker process; with this side of the pipe to it."""
    context: Any = multiprocessing.get_context(_START_METHODS[strategy])
    if strategy is SharingStrategy.ForkServer:
        context.set_forkserver_preload([__name__])  # has an effect before the first start only
    connection, theirs = context.Pipe()
    util.register_after_fork(connection, Connection.close)  # else the worker would not see its end
    seed = int(torch.empty((), dtype=torch.int64).random_())
    process = context.Process(target=_work, args=(theirs, data, seed, *how), name="poptorch data")
    with theirs:
        try:
            with forking(), _interrupts_held():
                process.start()
        except _UNPICKLABLE as error:
            connection.close()
            raise createPoptorchError(
                f"The data set cannot be sent to a worker process: {error}. Define its classes and functions at the top "
                "of a module, or use sharing_strategy=SharingStrategy.Fork."
            ) from error
    return process, connection


def _end(process: BaseProcess, connection: Connection) -> None:
    connection.close()
    process.terminate()
    if _exit_code(process) is None:
        process.kill()
        _exit_code(process)


def _exit_code(process: BaseProcess) -> int | None:
    """Wait for the end of a process, but not for those that it has forked, as `join` does; None if that takes long."""
    deadline = time.monotonic() + _PATIENCE
    while process.exitcode is None and time.monotonic() < deadline:
        process.join(0.05)
    return process.exitcode


def _cause_of_death(process: BaseProcess) -> str:
    code = _exit_code(process)
    if code is not None and code < 0:
        how = f"by {signal.Signals(-code).name}"
        hint = {
            signal.SIGKILL: " Perhaps the machine has run out of memory.",
            signal.SIGBUS: " Perhaps its shared memory (/dev/shm) is too small for the ring of batches.",
        }.get(signal.Signals(-code), "")
    else:
        how = f"with exit code {code}"
        hint = (
            ' It imports the main module; the program should stand under `if __name__ == "__main__":`.' if code else ""
        )
    return f"The worker process ended {how}.{hint}"
