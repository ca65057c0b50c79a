"""Log messages while a program is built, compiled and run, filtered by level and module.

Nothing is fixed at import. Each message reads the environment:

    POPART_LOG_LEVEL    TRACE, DEBUG, INFO, WARN (the default), ERR, CRITICAL or OFF
    POPART_LOG_DEST     stderr (the default), stdout, or the name of a file
    POPART_LOG_CONFIG   a JSON file, {"session": "DEBUG"}: levels of modules, which go before the level above

Levels set by `Logger.setLevel` have priority over all of them. Messages are records of Python's logger `popart`, to
which you may add handlers; they do not propagate to the root logger.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

LEVELS = {"TRACE": 5, "DEBUG": 10, "INFO": 20, "WARN": 30, "ERR": 40, "CRITICAL": 50, "OFF": 100}
"""The levels, and their numbers in Python's logging."""

_NAMES = {number: name.lower() for name, number in LEVELS.items()}

_chosen: dict[str, int] = {}  # levels set by `setLevel`, by module


class Logger:
    """The messages of one module.

    Args:
        name: name of the module; `"all"` stands for all of them.

    Example:
        >>> log = Logger("session")
        >>> log.setLevel("DEBUG")
        >>> log.debug("Starting compilation")
    """

    def __init__(self, name: str = "all") -> None:
        self.name = name
        self._logger = _root if name == "all" else _root.getChild(name)

    def setLevel(self, level: str) -> None:
        """Show the messages from this level on, until the process ends, whatever the environment says."""
        number = _number(level, f"Logger {self.name!r}: the level")
        if self.name == "all":
            _chosen.clear()
        _chosen[self.name] = number

    def shows(self, level: str) -> bool:
        """Test whether the log level is enabled."""
        return LEVELS[level] >= self._threshold()

    def _threshold(self) -> int:
        for name in (self.name, "all"):
            if name in _chosen:
                return _chosen[name]
        path = os.environ.get("POPART_LOG_CONFIG")
        levels = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
        for name in (self.name, "all"):
            if name in levels:
                return _number(levels[name], f"{path}, named by POPART_LOG_CONFIG: the level of {name!r}")
        return _number(os.environ.get("POPART_LOG_LEVEL") or "WARN", "The environment variable POPART_LOG_LEVEL")

    def _write(self, level: str, message: str) -> None:
        if self.shows(level):
            self._logger.log(LEVELS[level], "%s", message)

    def trace(self, message: str) -> None:
        """Say something of the level `TRACE`: steps within steps."""
        self._write("TRACE", message)

    def debug(self, message: str) -> None:
        """Log a `DEBUG` message: an action, with its reason."""
        self._write("DEBUG", message)

    def info(self, message: str) -> None:
        """Say something of the level `INFO`."""
        self._write("INFO", message)

    def warn(self, message: str) -> None:
        """Log a `WARN` message: execution continues, perhaps against intention."""
        self._write("WARN", message)

    def error(self, message: str) -> None:
        """Say something of the level `ERR`."""
        self._write("ERR", message)

    def critical(self, message: str) -> None:
        """Say something of the level `CRITICAL`."""
        self._write("CRITICAL", message)


def _number(level: object, what: str) -> int:
    if not isinstance(level, str) or level.upper() not in LEVELS:
        raise ValueError(f"{what} is {level!r}; expected one of {', '.join(LEVELS)}.")
    return LEVELS[level.upper()]


class _Destination(logging.Handler):
    """A writer to the destination from the environment, looked up per message."""

    def emit(self, record: logging.LogRecord) -> None:
        destination = os.environ.get("POPART_LOG_DEST") or "stderr"
        standard = {"stdout": (1, sys.stdout), "stderr": (2, sys.stderr)}
        try:
            target: int | str = destination
            if destination in standard:
                target, stream = standard[destination]
                if stream is not None:
                    stream.flush()  # keep the order with earlier prints
            with open(target, "ab", closefd=not isinstance(target, int)) as file:
                file.write(f"{self.format(record)}\n".encode())
        except OSError:
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        time = self._times.formatTime(record)
        return f"[{time}] [{record.name.replace('.', ':')}] [{_NAMES[record.levelno]}] {record.getMessage()}"

    _times = logging.Formatter()


_root = logging.getLogger("popart")
_root.setLevel(1)  # levels are filtered above, by the environment
_root.propagate = False
_root.addHandler(_Destination())
