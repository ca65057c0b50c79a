"""Tracebacks of errors in a model's code, without the frames between the call of the model and that code."""

from __future__ import annotations

import logging
from types import TracebackType

from poptorch.base.logging_ import logger

_LIBRARIES = frozenset({"contextlib", "functools", "poptorch", "popxl", "runtime", "torch"})
"""Packages with frames between a call and the code of a model."""


class ShortTracebacks:
    """Context that removes traceback frames before the first frame of the model's code; later ones stay, such as those
    of an op that rejects an operand.

    Errors without such a frame, or below JAX, keep all frames, as do all with the log level `"DEBUG"`.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, problem: BaseException | None, frames: TracebackType | None) -> None:
        if frames is None or logger.isEnabledFor(logging.DEBUG):
            return
        first = frames.tb_next  # after the frame of this context
        while first is not None and _package(first) in _LIBRARIES:
            first = first.tb_next
        if first is not None and _package(first) != "jax":
            frames.tb_next = first


def _package(frame: TracebackType) -> str:
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
