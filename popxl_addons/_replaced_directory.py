"""Replacing a directory as a whole: whatever interrupts it, the old contents or the new ones are there.

The new contents are written to a directory beside, brought to the disk, and renamed into place. Two names beside a
directory `d` are used for that:

    .d.draft     being written, or being deleted: of no use to anybody
    .d.previous  what `d` was, complete, from just before the new one takes its place until just after
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(directory: Path, own: Collection[str]) -> Iterator[Path]:
    """A new directory to write to, which takes the place of `directory` when the block ends, unless that fails.

    Entries of the old directory that are not called one of `own` are moved to the new one.

    `NotADirectoryError` if `directory` is a file, `ValueError` if the process works in it: it would lose its place.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"`{directory}` is a file; expected a directory, or nothing.")
    if Path.cwd().is_relative_to(directory):
        raise ValueError(f"`{directory}` cannot be replaced: it holds the working directory. Choose one below it.")
    draft = _beside(directory, "draft")
    directory.parent.mkdir(parents=True, exist_ok=True)
    _settle(directory, own)
    _delete(draft)
    try:
        draft.mkdir()
        yield draft
        _bring_to_disk(draft)
        if directory.exists():
            directory.rename(_beside(directory, "previous"))
        draft.rename(directory)
        _sync(directory.parent)
    except BaseException:
        _settle(directory, own)
        _delete(draft)
        raise
    _settle(directory, own)


def current(directory: Path) -> Path:
    """Where the contents of `directory` are: there, or beside it if they were about to be replaced.

    `FileNotFoundError` if there are none.
    """
    for path in (directory, _beside(directory, "previous")):
        if path.is_dir():
            return path
    raise FileNotFoundError(f"There is no directory `{directory}`.")


def discard(directory: Path) -> None:
    """Delete `directory`: it is there complete, or not at all."""
    draft = _beside(directory, "draft")
    _delete(draft)
    directory.rename(draft)
    _sync(directory.parent)
    _delete(draft)


def _settle(directory: Path, own: Collection[str]) -> None:
    """Finish a replacement that got as far as the renaming, or take it back if it did not get further."""
    previous = _beside(directory, "previous")
    if not previous.exists():
        return
    if not directory.exists():
        previous.rename(directory)
        return
    for path in previous.iterdir():
        if path.name not in own and not (directory / path.name).exists():
            path.rename(directory / path.name)
    draft = _beside(directory, "draft")
    _delete(draft)
    previous.rename(draft)  # first, because half a directory must never be taken for the previous one
    _sync(directory.parent)
    _delete(draft)


def _beside(directory: Path, role: str) -> Path:
    return directory.with_name(f".{directory.name}.{role}")


def _delete(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)


def _bring_to_disk(directory: Path) -> None:
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
