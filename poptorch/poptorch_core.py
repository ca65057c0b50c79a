"""The errors under the name that programs catch them by, `poptorch.poptorch_core.Error`."""

from poptorch.errors import Error, RecoverableError, UnrecoverableError

__all__ = ["Error", "RecoverableError", "UnrecoverableError"]
