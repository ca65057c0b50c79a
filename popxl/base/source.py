"""Source locations of ops in the user's program, and debug records with more detail.

Ops are created by functions of popxl that call each other; source locations name the line outside of them. This file
inspects frames only; the context of op creation is in `popxl.context`.
"""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from dataclasses import dataclass
from types import CodeType, FrameType


@dataclass(frozen=True)
class SourceLocation:
    """A program line, with its function."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """The source line itself, or an empty string where it cannot be read.

        A saved program may name any file: only Python files, and files of the running program, are opened.
        """
        ours = self.file in linecache.cache or self.file == getattr(sys.modules["__main__"], "__file__", None)
        if not ours and not (self.file.endswith(".py") and os.path.isfile(self.file)):
            return ""
        return linecache.getline(self.file, self.line).strip()

    @property
    def quoted(self) -> str:
        """The line and its place, in errors: "`y = x @ w` (model.py:12)"; the place alone where it cannot be read."""
        return f"`{text}` ({self})" if (text := self.text) else f"({self})"

    @staticmethod
    def of(place: tuple[CodeType, int]) -> SourceLocation:
        """Create a location from a code object and a line number."""
        code, line = place
        return SourceLocation(code.co_filename, line, code.co_name)

    @property
    def resolved(self) -> SourceLocation:
        """The same line, by the file's name without symbolic links."""
        return SourceLocation(os.path.realpath(self.file), self.line, self.function)

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


@dataclass
class DebugRecord:
    """The interface function and call that created an op.

    Attributes:
        api: name of the function.
        name: the active name scopes and `api`, joined by slashes.
        inputs: ids of the tensors among the arguments.
        location: line of the call.
        outputs: ids of the tensors that the function returned; `None` until it returns, or if it returns something
            else.
        layer, category: kind of the record.
    """

    api: str
    name: str
    inputs: tuple[str, ...]
    location: SourceLocation
    outputs: tuple[str, ...] | None = None
    layer: str = "popxl"
    category: str = "op"


_warned: dict[str, dict[str | tuple[str, type[Warning], int], int]] = {}


def warn_at(source: SourceLocation, message: str, category: type[Warning]) -> None:
    """Issue a warning attributed to a source line of the user; Python's filters show it once per line by default."""
    registry = _warned.setdefault(source.file, {})
    warnings.warn_explicit(message, category, source.file, source.line, registry=registry)


_OURS = ("popxl", "popxl_addons", "runtime", "contextlib")
_is_ours: dict[str, bool] = {}


def _module_is_ours(module: str) -> bool:
    known = _is_ours.get(module)
    if known is None:
        known = _is_ours[module] = module.partition(".")[0] in _OURS
    return known


KnownCaller = tuple[FrameType, FrameType]
"""A frame of ours, and the innermost user frame above it."""


def user_frame_above(frame: FrameType, known: KnownCaller | None = None) -> FrameType:
    """The innermost user frame, starting at this frame. A known caller ends the search early."""
    ours, caller = known or (None, None)
    while frame.f_back is not None and _module_is_ours(frame.f_globals.get("__name__", "")):
        if frame is ours and caller is not None:
            return caller
        frame = frame.f_back
    return frame


def user_line(frame: FrameType, further: int, known: KnownCaller | None = None) -> tuple[CodeType, int]:
    """Code object and line number of the innermost frame that is not ours. Cheap: nothing is formatted.

    Args:
        frame: first frame to inspect.
        further: number of further frames outside of popxl to skip.
        known: see `user_frame_above`.
    """
    frame = user_frame_above(frame, known)
    for _ in range(further):
        if frame.f_back is not None:
            frame = user_frame_above(frame.f_back)
    return frame.f_code, frame.f_lineno


def frame_above(offset: int) -> FrameType:
    """The frame `offset` levels above the caller's caller. Raises `IndexError` beyond the stack."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(offset):
        frame = frame and frame.f_back
    if frame is None:
        raise IndexError(f"get_source_location: there is no frame {offset} levels above the caller.")
    return frame
