"""Worker process of `AsynchronousDataAccessor`: startup, shutdown, loading, messages.

A process that is not forked from the program imports the same modules as the program, which takes seconds. So there is
at most one of them: its own children, the workers of a loader, are forked from it.
"""

from __future__ import annotations

import gc
import io
import math
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
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

from poptorch.base import custom_types
from poptorch.base.leaves import Structure
from poptorch.base.structures import structure_of
from poptorch.enums import SharingStrategy
from poptorch.errors import createPoptorchError

_START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}

FORKS = sys.platform == "linux"
"""Whether processes can be forks. On other systems, system libraries do not survive forking."""

_ALIGNMENT = 64
"""Bytes. Tensors in a slot begin at multiples of it: a cache line, and a multiple of the size of any number."""

_UNPICKLABLE = (pickle.PicklingError, AttributeError, TypeError)
"""Errors raised for objects that cannot be pickled."""

_PATIENCE = 5
"""Seconds between the request to end and the termination of a worker."""


# Messages -------------------------------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """Message to the worker: the program has begun this epoch, making earlier epochs obsolete."""

    epoch: int


class Free(NamedTuple):
    """Message to the worker: this slot may be filled."""

    slot: int


class _SlotRegion(NamedTuple):
    """A tensor's location within its slot; `start` in bytes."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class FilledSlot(NamedTuple):
    """Message from the worker: a filled slot. `buffer`: the slot's new memory, or `None` if unchanged."""

    epoch: int
    slot: int
    buffer: torch.Tensor | None
    layout: list[_SlotRegion]
    structure: bytes


class Over(NamedTuple):
    """Message from the worker: this epoch has no further batches."""

    epoch: int


class Failure(NamedTuple):
    """Final error message from the worker, or a substitute if it died without sending any."""

    text: str
    unsupported: bool = False


# The worker process ---------------------------------------------------------------------------------------------------


def _work(connection: Connection, data: Parcel, seed: int, slots: int, load_indefinitely: bool) -> None:
    """Main function of the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program decides the effect of an interrupt
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    gc.freeze()  # the program's objects: inspection copies pages, and JAX's arrays must live
    if FORKS:
        multiprocessing.set_start_method("fork", force=True)  # a loader's workers need not import all that again
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
        failure = Failure(str(error), unsupported=True)
    except Exception:  # any error of the data set: the program raises it
        failure = Failure(f"The data set failed in the worker process:\n{traceback.format_exc()}")
    try:
        connection.send(failure)
        while True:  # stay until the program has read this: unopened parts of the ring would be lost
            connection.recv()
    except (EOFError, OSError):
        pass  # the program has ended


def _leave_with_program() -> None:
    """Wait until the parent process ends, then terminate the worker, even if busy in the data set."""
    _wait_for_program()
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    time.sleep(_PATIENCE)
    os._exit(1)  # the main thread is in code that does not return to Python


def _wait_for_program() -> None:
    """Wait until the parent process ends."""
    program = multiprocessing.parent_process()
    assert program is not None
    wait([program.sentinel])


def _leave(*signal_and_frame: object) -> None:
    """Terminate the worker and its own workers."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal would interrupt the cleanup
    sys.unraisablehook = lambda _: None  # the signal may interrupt a destructor, which would print the exit as an error
    for child in multiprocessing.active_children():
        child.terminate()
    sys.exit()


class EndsWithProgram:
    """A `worker_init_fn` that terminates loader workers when their parent process ends, for whatever reason.

    PyTorch's look for it every few seconds, and not while the data set keeps them busy.

    Args:
        then: user's `worker_init_fn`, or None.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._init_function = then

    def __call__(self, worker: int) -> None:
        threading.Thread(target=self._end, daemon=True).start()
        if self._init_function is not None:
            self._init_function(worker)

    @staticmethod
    def _end() -> None:
        _wait_for_program()
        os._exit(1)


class _Worker:
    """Fills slots with batches, epoch by epoch.

    It is at most one epoch ahead of the program, so that an epoch without batches does not keep it busy.
    """

    def __init__(self, connection: Connection, slots: int, load_indefinitely: bool) -> None:
        self._connection = connection
        self._load_indefinitely = load_indefinitely
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * slots
        self._free: deque[int] = deque()
        self._wanted = 0  # current epoch of the program

    def run(self, dataset: Any) -> None:
        epoch = 0
        while True:
            self._run_epoch(epoch, dataset)
            epoch = max(epoch + 1, self._wanted)
            while self._wanted < epoch - self._load_indefinitely:
                self._receive()

    def _run_epoch(self, epoch: int, dataset: Any) -> None:
        batches = iter(elements(dataset))
        while (slot := self._next_slot(epoch)) is not None:
            try:
                batch = next(batches)
            except StopIteration:
                self._free.appendleft(slot)
                self._send(Over(epoch))
                return
            self._send(self._fill(slot, epoch, batch))

    def _next_slot(self, epoch: int) -> int | None:
        """Wait for a free slot; return `None` if the program has advanced to a later epoch."""
        while self._connection.poll() or (not self._free and self._wanted <= epoch):
            self._receive()
        return self._free.popleft() if self._wanted <= epoch else None

    def _fill(self, slot: int, epoch: int, batch: Any) -> FilledSlot:
        structure = supported_structure(batch)
        tensors = structure.tensors(batch)
        layout, size = _layout(tensors)
        grows = size > len(self._buffers[slot])
        if grows:
            self._buffers[slot] = torch.empty(size, dtype=torch.uint8).share_memory_()
        buffer = self._buffers[slot]
        for view, tensor in zip(views(buffer, layout), tensors, strict=True):
            view.copy_(tensor.detach())
        return FilledSlot(epoch, slot, buffer if grows else None, layout, _pickled(structure, tensors))

    def _receive(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            sys.exit()  # the program has ended
        if isinstance(message, Begin):
            self._wanted = message.epoch
        else:
            self._free.append(message.slot)

    def _send(self, message: FilledSlot | Over) -> None:
        try:
            self._connection.send(message)
        except ConnectionError:
            sys.exit()


def elements(dataset: Any) -> Iterable[Any]:
    """Iterate over a data set's elements; map-style data sets need not support iteration with proper termination."""
    return dataset if hasattr(type(dataset), "__iter__") else (dataset[i] for i in range(len(dataset)))


class _Unsupported(Exception):
    """Raised for batches of unsupported types."""


def supported_structure(batch: Any) -> Structure:
    """A batch's structure; raises `_Unsupported` for unsupported types."""
    if custom_types.parser_of(batch) is None:
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


def _layout(tensors: list[torch.Tensor]) -> tuple[list[_SlotRegion], int]:
    """Compute consecutive tensor locations, and total size in bytes."""
    layout, end = [], 0
    for tensor in tensors:
        layout.append(_SlotRegion(end, tuple(tensor.shape), tensor.dtype))
        end += math.ceil(tensor.numel() * tensor.element_size() / _ALIGNMENT) * _ALIGNMENT
    return layout, end


def views(buffer: torch.Tensor, layout: list[_SlotRegion]) -> list[torch.Tensor]:
    """Tensor views into a byte buffer."""
    return [
        buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for start, shape, dtype in layout
    ]


class _Pickler(ForkingPickler):
    """Pickles tensors by value: each shared tensor would require a file descriptor, of which few can be sent.

    Args:
        file: file to write to.
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


class Unpickler(pickle.Unpickler):
    """Reads `_Pickler` output, substituting different tensors."""

    def __init__(self, data: bytes, places: list[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = places

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]


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


class Parcel:
    """An object transferred to a worker process using a sharing strategy, and unpacked there by `open`.

    It is pickled only while a process starts: then locks and other things can be sent that cannot be at other times.
    The parsers of registered types go with it; without those that cannot be pickled, as then their types cannot either.
    """

    def __init__(self, content: Any, strategy: SharingStrategy, folder: Path) -> None:
        self._content = content
        self._strategy = strategy
        self._path = folder / "dataset.pickle"
        self._data = b""

    def __getstate__(self) -> dict[str, Any]:
        parsers = {kind: parser for kind, parser in custom_types.parsers().items() if _can_be_pickled((kind, parser))}
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
            custom_types.registerCustomArgParser(kind, parser)
        return content


# Processes ------------------------------------------------------------------------------------------------------------


@contextmanager
def forking() -> Iterator[None]:
    """Context manager suppressing JAX's fork warning for data loading processes, which do not use JAX."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        yield


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Context manager blocking SIGINT, also in processes started within, until these set their own handling."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def launch(strategy: SharingStrategy, data: Parcel, *how: Any) -> tuple[BaseProcess, Connection]:
    """Start a worker process. Return it, and the local pipe connection."""
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
                f"The data set cannot be sent to a worker process: {error}. Define its classes and functions at the "
                "top of a module, or use sharing_strategy=SharingStrategy.Fork."
            ) from error
    return process, connection


def stop(process: BaseProcess, connection: Connection) -> None:
    """Terminate a worker process, and close its connection."""
    connection.close()
    process.terminate()
    if _exit_code(process) is None:
        process.kill()
        _exit_code(process)


def _exit_code(process: BaseProcess) -> int | None:
    """Wait for a process to exit, ignoring its forked children, unlike `join`; return `None` on timeout."""
    deadline = time.monotonic() + _PATIENCE
    while process.exitcode is None and time.monotonic() < deadline:
        process.join(0.05)
    return process.exitcode


def cause_of_death(process: BaseProcess) -> str:
    """Describe why a worker process ended unexpectedly."""
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
