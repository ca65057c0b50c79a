"""Logging: Python's logger `poptorch::python` and its levels.

The environment variable `POPTORCH_LOG_LEVEL` sets the initial level, `setLogLevel` changes it. Messages go to the
handlers of the program if it has some (`logging.basicConfig`); else to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Hashable

LEVELS = {
    "TRACE_ALL": 5,
    "TRACE": 5,
    "DEBUG_IR": 10,
    "DEBUG": 10,
    "INFO": 20,
    "WARN": 30,
    "ERR": 40,
    "OFF": 100,
}
"""The levels, and their numbers in Python's logging."""

_BY_INTEGER = {0: "TRACE", 1: "DEBUG", 2: "INFO", 3: "WARN", 4: "ERR", 6: "OFF"}

logger = logging.getLogger("poptorch::python")


def setLogLevel(level: str | int) -> None:
    """Show messages at `level` and above.

    Args:
        level: `"TRACE"`, `"DEBUG"`, `"INFO"`, `"WARN"` (the level at first), `"ERR"` or `"OFF"`; also `"TRACE_ALL"` and
            `"DEBUG_IR"`. Older programs give integers: 0 to 4 for `TRACE` to `ERR`, 6 for `OFF`.

    Raises:
        ValueError: if there is no such level.

    Example:
        >>> setLogLevel("WARN")
    """
    if isinstance(level, int):
        if level not in _BY_INTEGER:
            known = ", ".join(f"{number} ({name})" for number, name in _BY_INTEGER.items())
            raise ValueError(f"Invalid log level integer {level}; expected one of {known}.")
        level = _BY_INTEGER[level]
    if level not in LEVELS:
        raise ValueError(
            f"Unknown log level: {level}. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN. Level must be one of "
            "these, or TRACE_ALL or DEBUG_IR, which are TRACE and DEBUG."
        )
    logger.setLevel(LEVELS[level])


def trace(message: str, *args: object) -> None:
    """Log at level `TRACE`, for which Python's loggers lack a method: fine-grained steps."""
    logger.log(LEVELS["TRACE"], message, *args)


class Warned(set[Hashable]):
    """Topics that were warned about."""

    def once(self, topic: Hashable, message: str, *args: object) -> None:
        """Log a warning, unless there was one about the topic."""
        if topic not in self:
            self.add(topic)
            logger.warning(message, *args)


class _Stderr(logging.StreamHandler):
    """Handler that writes to the current `sys.stderr`, unless the application configures its own handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


def _set_up() -> None:
    logging.addLevelName(LEVELS["TRACE"], "TRACE")
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(name)s] [%(levelname)s] %(message)s"))
    logger.addHandler(handler)
    level = os.environ.get("POPTORCH_LOG_LEVEL") or "WARN"
    try:
        setLogLevel(int(level) if level.isdigit() else level)
    except ValueError as error:
        raise ValueError(f"The environment variable POPTORCH_LOG_LEVEL: {error}") from None


_set_up()
