"""See `poptorch._impl`."""

from poptorch._impl import PoplarExecutor

__all__ = ["PoplarExecutor"]
