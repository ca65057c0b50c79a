"""`AsynchronousDataAccessor`: prefetching of batches in a separate process, concurrently with computation.

The worker process iterates over the data set and copies the tensors of each batch into the next slot of a ring in
shared memory. Only messages go through the pipe between the processes: a slot is filled, or free again, and the
structure of the batch. Neither side polls: each sleeps until the other sends a message, and the end of the pipe shows
at once that the other has ended. The shared memory is anonymous, so it does not outlive them.

The tensors of a batch are views of its slot, which is free again once no tensor refers to its memory. A loop still has
one batch when it requests the next. A program that keeps more gets copies, so slots never run out.

This file is the side of the program; the worker is in `worker.py`. Batches themselves are made in `loader.py`.
"""

from __future__ import annotations

import copy
import math
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from poptorch.base.leaves import Structure
from poptorch.data.worker import (
    FORKS,
    Begin,
    Failure,
    FilledSlot,
    Free,
    Parcel,
    Unpickler,
    cause_of_death,
    elements,
    launch,
    stop,
    supported_structure,
    views,
)
from poptorch.enums import SharingStrategy
from poptorch.errors import createPoptorchError
from popxl.extend.processes import jax_runs


class _Lease(NamedTuple):
    """A slot whose memory may be referenced by the program's tensors.

    Attributes:
        slot: number of the slot.
        memory: refers to an array that every such tensor keeps alive.
    """

    slot: int
    memory: weakref.ref[np.ndarray]


class AsynchronousDataAccessor:
    """Iterates over a data set in a separate process, prefetching batches.

    If a loop is left, the next one begins at the start of the data set.

    A worker that is not forked imports the program's main module, which takes seconds: programs guard their code with
    `if __name__ == "__main__":`. The worker's random numbers are seeded from PyTorch's generator.

    Args:
        dataset: the batches; anything that can be iterated over, such as a `torch.utils.data.DataLoader`, or a
            map-style data set. A batch is a tensor, a tuple or list of tensors, a dictionary from strings to tensors,
            or of a type that was registered with `registerCustomArgParser`.
        buffer_size: number of batches that are loaded at a time. The one that the program looks at is among them; the
            ring has another slot for the one before.
        miss_sleep_time_in_ms: without effect: the worker does not poll for a free slot, but is woken.
        load_indefinitely: at the end of the data set, begin to load it again before the next loop asks for that.
        early_preload: fill the ring from the beginning; else only the first batch is loaded before the first loop.
        sharing_strategy: transfer of the data set to the worker.

            * `SharedMemory`: pickled; its tensors move to shared memory, without a copy.
            * `FileSystem`: through a temporary file.
            * `Fork`: none: the worker starts as a copy of this process. The only way for a data set that cannot be
              pickled; not safe if threads of this process hold locks that the data set needs.
            * `ForkServer`: as `Fork` as long as no program has run on a device and there is one thread. Later pickled,
              through a pipe, to a copy of a process that has run nothing.
        rebatched_size: number of rows (dimension 0) to combine from batches of any size; a tensor without dimensions is
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
    _first: FilledSlot | None = None  # the first batch of the worker, until it is requested

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
        self._buffers = [torch.empty(1, dtype=torch.uint8)] * (buffer_size + 1)  # for tensors without elements, so far
        self._unopened = deque(range(buffer_size))  # slots that the worker may not use before the first loop
        self._leases = [_Lease(buffer_size, weakref.ref(np.empty(0)))]  # of all slots closed to the worker
        self._most_leases = min(buffer_size, 2)  # beyond them batches are copies; so the worker always has a slot
        self._epoch = 0
        self._position = "start"  # start of the epoch, "inside" it, or its "end"
        strategy = SharingStrategy(sharing_strategy)
        if strategy is SharingStrategy.ForkServer and FORKS and not jax_runs() and threading.active_count() == 1:
            strategy = SharingStrategy.Fork  # nothing but this thread could hold a lock
        self._first = self._start(strategy, load_indefinitely, early_preload)

    def __len__(self) -> int:
        """Number of batches, if known by the data set."""
        return len(self._dataset)  # type: ignore[arg-type]

    def __iter__(self) -> AsynchronousDataAccessor:
        """Restart iteration at the data set's beginning. The accessor itself is the only iterator."""
        self._check_alive()
        if self._position != "start":
            self._release()
            self._epoch += 1
            self._position = "start"
            self._send(Begin(self._epoch))
        while self._unopened:
            self._send(Free(self._unopened.popleft()))
        return self

    def __next__(self) -> Any:
        """The next batch."""
        self._check_alive()
        if self._unopened:
            iter(self)
        if self._position == "end":
            raise StopIteration
        self._position = "inside"
        self._release()
        while True:
            message = self._receive()
            if isinstance(message, Failure):
                self.terminate()
                raise AssertionError(f"An error occurred in the data fetcher: {message.text}")
            if isinstance(message, FilledSlot):
                if message.buffer is not None:
                    self._buffers[message.slot] = message.buffer
                if message.epoch == self._epoch:
                    return self._open(message)
                self._send(Free(message.slot))
            elif message.epoch == self._epoch:
                self._position = "end"
                raise StopIteration

    def terminate(self) -> None:
        """Stop the worker process. Returned batches remain valid; no further batches follow."""
        if self._terminate is not None:
            self._terminate()

    def __del__(self) -> None:
        self.terminate()

    def _start(self, strategy: SharingStrategy, load_indefinitely: bool, early_preload: bool) -> FilledSlot:
        """Start the worker process, and wait for its first batch."""
        with tempfile.TemporaryDirectory() as folder:
            data = Parcel(self._dataset, strategy, Path(folder))
            self._process, self._connection = launch(strategy, data, len(self._buffers), load_indefinitely)
            # The priority makes it run at exit, before Python waits for the process.
            self._terminate = util.Finalize(self, stop, (self._process, self._connection), exitpriority=10)
            try:
                for _ in range(len(self._unopened) if early_preload else 1):
                    self._send(Free(self._unopened.popleft()))
                first = self._receive()
            except BaseException:
                self.terminate()
                raise
        if isinstance(first, FilledSlot):
            return first
        self.terminate()
        if isinstance(first, Failure) and first.unsupported:
            raise AssertionError(first.text)
        reason = first.text if isinstance(first, Failure) else "The data set is empty: it gives no (complete) batch."
        raise createPoptorchError(f"AsynchronousDataAccessor: the worker thread failed to start. {reason}")

    def _check_alive(self) -> None:
        if self._connection.closed:
            raise createPoptorchError(
                "This loader has ended: `terminate()` was called, or an error occurred. Make a new one to go on."
            )

    def _send(self, message: Begin | Free) -> None:
        try:
            self._connection.send(message)
        except ConnectionError:
            pass  # the worker has ended; its last message has the reason, and will be read

    def _receive(self) -> Any:
        if self._first is not None:
            message, self._first = self._first, None
            return message
        self._connection.poll(None)  # an interrupt while waiting loses nothing
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return Failure(cause_of_death(self._process))
        except BaseException:  # half a message has been read: nothing after it could be understood
            self.terminate()
            raise

    def _open(self, message: FilledSlot) -> Any:
        memory = self._buffers[message.slot].numpy()
        tensors = views(torch.from_numpy(memory), message.layout)
        if sum(lease.memory() is not None for lease in self._leases) < self._most_leases:
            self._leases.append(_Lease(message.slot, weakref.ref(memory)))
        else:
            tensors = [tensor.clone() for tensor in tensors]
            self._send(Free(message.slot))
        return Unpickler(message.structure, tensors).load().rebuild(tensors)

    def _release(self) -> None:
        """Free slots of released batches except one, limiting how far the worker runs ahead."""
        for lease in [lease for lease in self._leases if lease.memory() is None][: len(self._leases) - 1]:
            self._leases.remove(lease)
            self._send(Free(lease.slot))


class Rebatched:
    """Regroups batches of any size into fixed-size batches. Dimension 0 counts rows; a 0-d tensor is one row.

    Other contents of a batch of a registered type are those of the first part.

    Args:
        batches: as for `AsynchronousDataAccessor`.
        size: number of rows in each batch.
        drop_last: whether to drop an incomplete batch at the end.

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
        for batch in elements(self._batches):
            own = supported_structure(batch)
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
