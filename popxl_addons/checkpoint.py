"""Checkpoints as files: named arrays and a record of their session. Independent of sessions.

A checkpoint is a directory with:

    model/, model.safetensors    files of arrays, in one of two formats: `popxl_addons.array_files`
    pieces/, pieces.json         shards of arrays, if several processes have written them: `popxl_addons.sharded_arrays`
    session_info.json            the record
    dataloader.bin               state of the data loader, if there is one
    checksums.json               the digests of all these files

Nothing in it is read as a Python object. It is written to a temporary sibling, flushed to disk and renamed: a program
that is interrupted at any moment leaves the old checkpoint or the new one, which `open_checkpoint` finds. Files are
compared with the digests before they are read. Checkpoints of other programs, and of earlier versions, have no digests,
and are read without.

A `Writer` writes checkpoints one after the other, optionally in a thread while the program continues.
"""

from __future__ import annotations

import json
import logging
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from popxl.errors import UnreadableFileError
from popxl.extend.files import (
    CHECKSUMS,
    check_checksums,
    consistent_read,
    digest,
    discard,
    replace_directory,
    resolve_replaced,
    write_checksums,
)
from popxl_addons import _wandb
from popxl_addons.array_files import MODEL, TENSORS, files_in
from popxl_addons.sharded_arrays import INDEX, PIECES, arrays_of, read_all

__all__ = ["INFO", "LOADER", "Writer", "as_path", "check_maps", "checkpoint_id", "delete"]
__all__ += ["new_checkpoint", "open_checkpoint", "read_arrays", "read_info", "write_info"]

INFO = "session_info.json"
LOADER = "dataloader.bin"

_PATIENCE = 0.005
"""Polling interval for the thread that writes a checkpoint, in seconds."""

_log = logging.getLogger(__name__)


# Directories ------------------------------------------------------------------------------------------------------


@contextmanager
def new_checkpoint(place: str) -> Iterator[Path]:
    """An empty directory to write a checkpoint to. It becomes `place` when the block ends, unless it fails.

    Other files in `place` are kept. ``wandb://<name>`` stands for an artifact.
    """
    if place.startswith(_wandb.SCHEME):
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)
            write_checksums(Path(directory))
            _wandb.upload(place.removeprefix(_wandb.SCHEME), Path(directory))
    else:
        with replace_directory(
            as_path(place), own=(MODEL, TENSORS, INFO, LOADER, PIECES, INDEX, CHECKSUMS)
        ) as directory:
            yield directory
            write_checksums(directory)


@contextmanager
def open_checkpoint(place: str, reader: int = 0, readers: int = 1) -> Iterator[Path]:
    """Context manager with the directory of a checkpoint's files.

    They have been compared with their digests; but for the memory maps, which `check_maps` compares.

    Args:
        place: a directory, or an artifact.
        reader, readers: index of this process, and number of processes that read a directory together. Each verifies
            its share of the files of arrays, so it has to ask the others whether theirs are damaged.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        UnreadableFileError: if it is damaged.
        ReplacedError: if another checkpoint has taken its place while the block lasted.
    """
    if place.startswith(_wandb.SCHEME):
        with tempfile.TemporaryDirectory() as directory:
            _wandb.download(place.removeprefix(_wandb.SCHEME), Path(directory))
            yield _checked(Path(directory), place)
    else:
        found = resolve_replaced(as_path(place))
        with consistent_read(found):
            yield _checked(found, place, reader, readers)


def checkpoint_id(directory: Path) -> str:
    """Identifier of a checkpoint: the digest of its digests; empty without digests."""
    path = directory / CHECKSUMS
    return digest(path.read_bytes()) if path.exists() else ""


def as_path(place: str) -> Path:
    """Absolute path of a checkpoint's directory; expands ``~``."""
    return Path(place).expanduser().resolve()


def delete(directory: Path) -> None:
    """Delete a checkpoint, and log failures."""
    try:
        discard(directory)
    except OSError as problem:
        _log.warning("The old checkpoint `%s` could not be deleted: %s", directory, problem)


def _checked(directory: Path, place: str, reader: int = 0, readers: int = 1) -> Path:
    if not any((directory / name).exists() for name in (MODEL, TENSORS)):
        raise FileNotFoundError(f"`{place}` is no checkpoint: there is neither `{MODEL}` nor `{TENSORS}` in it.")
    folders = [directory, *sorted((directory / PIECES).glob("*"))]
    largest_first = sorted((-path.stat().st_size, path) for folder in folders for path in files_in(folder))
    of_others = {path for i, (_, path) in enumerate(largest_first) if i % readers != reader}
    for folder in folders:
        check_checksums(folder, partial(_is_owned_file, folder, of_others))
    return directory


def _is_owned_file(folder: Path, of_others: set[Path], name: str) -> bool:
    return not _is_map(name) and folder / name not in of_others


def check_maps(directory: Path) -> None:
    """Verify digests of the memory maps in a checkpoint. `UnreadableFileError` for damaged ones."""
    check_checksums(directory, _is_map)


def _is_map(name: str) -> bool:
    return name.startswith(f"{MODEL}/") and not name.endswith(".npz")


class Writer:
    """Sequential writer of checkpoints, in the caller's thread or in the background.

    Errors in a thread are raised by the next `check`. If there is none, because the owner or the process has ended,
    they are logged.

    Args:
        owner: object that checks for errors. The thread delays the end of the process, but not that of the owner.

    Attributes:
        lock: lock for preparing a checkpoint, and writing it or starting a thread that does.
    """

    def __init__(self, owner: object) -> None:
        self._thread: threading.Thread | None = None
        self._is_finished = True
        self._problem: BaseException | None = None
        self._is_orphaned = False
        self._saved: list[Path] = []
        self.lock = threading.RLock()  # a signal handler may write a checkpoint too
        self._problem_lock = threading.RLock()  # the owner may be collected in any thread, at any moment
        weakref.finalize(owner, self._orphan)

    def submit(self, work: Callable[[], None], what: str, wait: bool) -> None:
        """Run `work`, in the background unless `wait` is set. `what` names it in logged failures."""
        self.wait()
        if wait:
            work()
            return
        self._is_finished = False
        self._thread = threading.Thread(target=self._work, args=(work, what), name=f"write {what}")
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has done its work.

        A signal handler may wait too: just before the thread starts, or while this waits. `Thread.join` would
        then raise, or wait for itself.
        """
        thread = self._thread
        while thread is not None and thread.is_alive() and not self._is_finished:
            time.sleep(_PATIENCE)

    def check(self) -> None:
        """Raise what went wrong in the last thread, once."""
        with self._problem_lock:
            problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def wait(self) -> None:
        """Wait until the thread has ended, and raise what went wrong there."""
        self.join()
        self.check()

    def keep(self, directory: Path, count: int) -> None:
        """Register the newest checkpoint, and delete the oldest beyond `count`."""
        self._saved = [path for path in self._saved if path != directory] + [directory]
        while len(self._saved) > count:
            oldest = self._saved.pop(0)
            if oldest in directory.parents:
                _log.warning("The old checkpoint `%s` is not deleted: the newest, `%s`, is in it.", oldest, directory)
            else:
                delete(oldest)

    def _work(self, work: Callable[[], None], what: str) -> None:
        try:
            work()
        except BaseException as problem:  # any error is for the program's own thread
            problem.add_note(f"This was when {what} was written, while the program went on. It is not there.")
            with self._problem_lock:
                self._problem = problem
                if self._is_orphaned:
                    self._log_failure()
        finally:
            self._is_finished = True

    def _orphan(self) -> None:
        with self._problem_lock:
            self._is_orphaned = True
            self._log_failure()

    def _log_failure(self) -> None:
        if self._problem is not None:
            _log.error("Nobody has asked about a checkpoint that could not be written.", exc_info=self._problem)
            self._problem = None


# Contents -----------------------------------------------------------------------------------------------------------


def read_arrays(directory: Path) -> dict[str, np.ndarray]:
    """The arrays by name, of whichever format; without memory maps. Raises as `arrays_of` does."""
    return {name: read_all(array) for name, array in arrays_of(directory).items()}


def write_info(directory: Path, info: Mapping[str, Any]) -> None:
    """Write the session record. `TypeError` for values that JSON lacks."""
    try:
        text = json.dumps(info, indent=2)
    except TypeError as problem:
        raise TypeError(
            "The record of a checkpoint holds text, numbers, booleans, None, and lists and dictionaries of these. "
            f"{problem}, in {info!r}."
        ) from problem
    (directory / INFO).write_text(text, encoding="utf-8")


def read_info(directory: Path) -> dict[str, Any]:
    """Read the session record; zero steps if missing. `UnreadableFileError` if damaged."""
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
