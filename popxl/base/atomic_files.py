"""Files and directories that are written completely or not at all, and checksums that are verified on reading.

If the writing is interrupted, either the old or the new content is in place. New content is written to a *draft* in the
same directory, called `.<name>-<32 hexadecimal digits>`, flushed to disk, and renamed. The writer of a draft holds a
lock on it, which the system releases when the process ends, for any reason. So an unlocked draft was left by a process
that has ended: the next writer deletes it. Where a file system has no locks, drafts are left in place.

While a directory `d` is replaced, `.d.previous` is its complete old content, from just before the new one takes its
place until just after.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import lzma
import os
import shutil
import struct
import uuid
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from popxl.errors import UnreadableFileError

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

# Files --------------------------------------------------------------------------------------------------------------


def replace_file(path: Path, content: bytes | Callable[[Path], object], like: str | None = None) -> None:
    """Write a file atomically. A path that is not a regular file, a pipe for example, is written to directly.

    Args:
        path: file, or a symbolic link to it, which is kept.
        content: content of the file; or a function that writes it to an existing, empty file.
        like: pattern of the names whose abandoned drafts are deleted; by default, the name of the file.
    """
    write = (lambda draft: draft.write_bytes(content)) if isinstance(content, bytes) else content
    if path.exists() and not path.is_file() and not path.is_dir():
        write(path)
        return
    path = Path(os.path.realpath(path))
    with temporary_sibling(path, like=like) as draft:
        write(draft)
        with draft.open("r+b") as file:
            os.fsync(file.fileno())  # otherwise a power cut could leave the name without its content
        draft.replace(path)


def clean_stale_temporaries(paths: Collection[Path] | Iterator[Path]) -> None:
    """Delete temporary files and directories, except those locked by a process or owned by other users."""
    for path in paths:
        lock = None
        try:
            lock = _locked(path, surely=True)
            if lock is not None:
                _delete(path)
        except PermissionError:
            continue  # its owner deletes it
        finally:
            if lock is not None:
                lock.release()


@contextmanager
def temporary_sibling(
    path: Path, make: Callable[[Path], object] = Path.touch, like: str | None = None
) -> Iterator[Path]:
    """Context with a locked draft beside a path. A remaining draft is deleted at the end.

    Args:
        make: function that creates a file, or a directory.
        like: pattern of the names whose abandoned drafts are deleted before; by default, the name in `path`.

    Raises:
        FileNotFoundError: if there is no folder for the path.
    """
    if not path.parent.exists():
        raise FileNotFoundError(errno.ENOENT, "There is no such folder to write to; make it before", str(path.parent))
    clean_stale_temporaries(path.parent.glob(f".{glob.escape(path.name) if like is None else like}-{'[0-9a-f]' * 32}"))
    lock = draft = None
    try:
        while lock is None:  # repeats while another process deletes the draft before it is locked
            draft = _temporary_path(path)
            make(draft)
            lock = _locked(draft, surely=False)
        assert draft is not None
        yield draft
    finally:
        if draft is not None:
            _delete(draft)
        if lock is not None:
            lock.release()


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}-{uuid.uuid4().hex}")


class _Lock:
    """Lock of a file or directory. `release` or garbage collection lifts it.

    The latter is why it is an object: a signal may end a block just before its `release`.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY)

    def acquire(self) -> None:
        """Raise `BlockingIOError` if another process holds the lock, and another `OSError` without locks."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def is_current(self, path: Path) -> bool:
        """Whether the path still leads to the locked file."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor != -1:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) != -1:
            os.close(self._descriptor)


class _NoLock:
    """Stand-in on systems without locks."""

    def release(self) -> None:
        pass


def _locked(path: Path, surely: bool) -> _Lock | _NoLock | None:
    """Lock a file or directory; `None` if another process holds the lock, or the path is gone.

    Args:
        surely: whether to return `None` too if the file system has no locks; otherwise it then behaves as if locked.
    """
    if fcntl is None:
        return None if surely else _NoLock()
    try:
        lock = _Lock(path)
    except FileNotFoundError:
        return None
    try:
        lock.acquire()
        if lock.is_current(path):
            return lock
    except BlockingIOError:
        pass  # it belongs to another process
    except OSError:  # this file system has no locks
        if not surely:
            return lock
    lock.release()
    return None


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# Directories --------------------------------------------------------------------------------------------------------


@contextmanager
def replace_directory(directory: Path, own: Collection[str]) -> Iterator[Path]:
    """A new directory to write to, which takes the place of `directory` when the block ends, unless that fails.

    Entries of the old directory with names outside `own` move to the new one.

    `NotADirectoryError` if `directory` is a file, `ValueError` if the process works in it: it would lose its place.
    `FileExistsError` if another process replaces it at the same moment: that content is then in place.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"`{directory}` is a file; expected a directory, or nothing.")
    if Path.cwd().is_relative_to(directory):
        raise ValueError(f"`{directory}` cannot be replaced: it holds the working directory. Choose one below it.")
    directory.parent.mkdir(parents=True, exist_ok=True)
    _finish_replacement(directory, own)
    try:
        with temporary_sibling(directory, Path.mkdir) as draft:
            yield draft
            bring_to_disk(draft)
            with _replacement_conflicts(directory):
                if directory.exists():
                    directory.rename(_previous(directory))
                draft.rename(directory)
            _sync(directory.parent)
    finally:
        _finish_replacement(directory, own)


@contextmanager
def _replacement_conflicts(directory: Path) -> Iterator[None]:
    """Raise `FileExistsError` for errors from concurrent replacement of a directory."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
        message = "Another program replaces this directory at the same time; let each write to one of its own"
        raise FileExistsError(errno.EEXIST, message, str(directory)) from problem


def resolve_replaced(directory: Path) -> Path:
    """Path with the contents of `directory`: a sibling after an interrupted replacement.

    `FileNotFoundError` if there are none.
    """
    for path in (directory, _previous(directory), directory):  # again: it may have come meanwhile
        if path.is_dir():
            return path
    raise FileNotFoundError(f"There is no directory `{directory}`.")


class ReplacedError(UnreadableFileError):
    """Replacement of a directory during a read."""


@contextmanager
def consistent_read(directory: Path) -> Iterator[None]:
    """Context that reads a directory consistently: all files from one moment.

    `ReplacedError` at its end, or in place of an error raised in it, if the directory has been replaced meanwhile.
    """
    if fcntl is None:  # directories cannot be opened there
        yield
        return
    message = f"`{directory}` was replaced, or deleted, while it was read. Read it again."
    try:
        found = _Lock(directory)  # open, so that no other directory gets its number
    except FileNotFoundError as problem:
        raise ReplacedError(message) from problem
    try:
        try:
            yield
        except Exception as problem:
            if found.is_current(directory):
                raise
            raise ReplacedError(message) from problem
        if not found.is_current(directory):
            raise ReplacedError(message)
    finally:
        found.release()


def discard(directory: Path) -> None:
    """Delete `directory` atomically: an interruption leaves all or nothing."""
    _discard(directory, _temporary_path(directory))


def _discard(directory: Path, waste: Path) -> None:
    lock = _locked(directory, surely=False)
    try:
        directory.rename(waste)
        _sync(directory.parent)
        _delete(waste)
    finally:
        if lock is not None:
            lock.release()


def _finish_replacement(directory: Path, own: Collection[str]) -> None:
    """Finish a replacement that got as far as the renaming, or take it back if it did not get further."""
    previous = _previous(directory)
    if not previous.exists():
        return
    with _replacement_conflicts(directory), suppress(FileNotFoundError):  # another process has done it
        if not directory.exists():
            previous.rename(directory)
            return
        for path in previous.iterdir():
            if path.name not in own and not (directory / path.name).exists():
                path.rename(directory / path.name)
        _discard(previous, _temporary_path(directory))  # half a directory must never be taken for the previous one


def _previous(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.previous")


def bring_to_disk(directory: Path) -> None:
    """Flush a directory and its contents to disk."""
    for parent, _, files in os.walk(directory):
        for name in files:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Checksums ----------------------------------------------------------------------------------------------------------


def digest(*parts: bytes | memoryview) -> str:
    """Hexadecimal SHA-256 digest of concatenated bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()


_EMPTY = b'"digest": ""'


def with_digest(text: bytes) -> bytes:
    """The text of a JSON object, with its own digest in its first field `"digest": ""`.

    Example:
        >>> text = with_digest(b'{"digest": "", "weight": 2.5}')
        >>> verify_digest(text, parsed(text)["digest"])
        True
        >>> verify_digest(text.replace(b"2.5", b"2.7"), parsed(text)["digest"])
        False
    """
    return text.replace(_EMPTY, _digest_field(digest(text)), 1)


def verify_digest(text: bytes, seal: str) -> bool:
    """Verify the digest of a text."""
    return digest(text.replace(_digest_field(seal), _EMPTY, 1)) == seal


def _digest_field(seal: str) -> bytes:
    return _EMPTY[:-1] + seal.encode() + b'"'


def parsed(text: bytes) -> Any:
    """JSON as a value. `ValueError` if it is not JSON, names something twice, or is nested too deeply."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"a name is there twice among {', '.join(name for name, _ in pairs)}")
        return found

    def refused(name: str) -> None:
        raise ValueError(f"{name} is no number in JSON")

    try:
        return json.loads(text.decode(), object_pairs_hook=once, parse_constant=refused)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"it is no JSON: {problem}") from None


ARCHIVE_ERRORS = (
    *(OSError, ValueError, KeyError, TypeError, EOFError, RuntimeError, OverflowError, struct.error),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)
"""Errors of `zipfile` for damaged archives, which may look encrypted or compressed in unknown ways."""

CHECKSUMS = "checksums.json"


def write_checksums(directory: Path) -> None:
    """Write file digests of a directory to its `checksums.json`.

    Existing digests of a subdirectory are copied, without reading its files again.
    """
    done = {path.parent for path in directory.glob(f"**/*/{CHECKSUMS}")}
    files = sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and (path.name == CHECKSUMS or done.isdisjoint(path.parents))
    )
    content = {"digest": "", "files": {path.relative_to(directory).as_posix(): _digest_of(path) for path in files}}
    (directory / CHECKSUMS).write_bytes(with_digest(json.dumps(content, indent=1).encode()))


def check_checksums(directory: Path, files: Callable[[str], bool]) -> None:
    """Compare files with the digests in `checksums.json`. Without that file, which other writers omit, nothing is
    compared.

    Args:
        files: filter of the names in `checksums.json`. A file may be missing, or unlisted.

    Raises:
        UnreadableFileError: if one differs.
    """
    path = directory / CHECKSUMS
    if not path.exists():
        return
    for name, expected in _checksums(path).items():
        file = directory / name
        if files(name) and file.is_file() and _digest_of(file) != expected:
            raise UnreadableFileError(
                f"`{file}` is damaged: it is not what was written, says `{CHECKSUMS}`. Take another copy; or delete "
                f"`{path}`, if you have changed the file yourself."
            )


def _checksums(path: Path) -> Mapping[str, str]:
    text = path.read_bytes()
    try:
        content = parsed(text)
        if verify_digest(text, content["digest"]):
            return dict(content["files"])
        problem: object = "its digest differs"
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        problem = error
    raise UnreadableFileError(
        f"`{path}` is damaged: {problem}. Take another copy; or delete the file, to read the others without checksums."
    )


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
