"""See `poptorch._impl`."""

from poptorch._impl import PoplarExecutor, _OverwriteContextManager

__all__ = ["PoplarExecutor", "_OverwriteContextManager"]
