"""Silent loading of libraries that write to standard error past Python, about missing hardware for example."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

_FOR_INFORMATION = re.compile(r"I\d{4} |WARNING: All log messages before absl::InitializeLog")


def is_warning(line: str) -> bool:
    """Test whether a log line is a warning or an error."""
    return _FOR_INFORMATION.match(line) is None


@contextmanager
def silence_stderr(shows: Callable[[str], object] = lambda line: False) -> Iterator[None]:
    """Capture the standard error file during a `with` block.

    Args:
        shows: filter of lines to show afterwards. If the block fails, all are shown.
    """
    try:
        sys.stderr.flush()
        before = os.dup(2)
    except (AttributeError, OSError):  # no such stream
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            shows = bool
            raise
        finally:
            os.dup2(before, 2)
            os.close(before)
            kept.seek(0)
            for line in kept.read().decode(errors="replace").splitlines():
                if shows(line):
                    print(line, file=sys.stderr)


def import_jax() -> None:
    """Import JAX once, silencing verbose plugins."""
    if "jax" not in sys.modules and find_spec("jax_plugins") is not None:
        with silence_stderr(is_warning):
            import_module("jax")


import_jax()
