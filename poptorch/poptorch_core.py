"""Exception types under their PopTorch names, such as `poptorch.poptorch_core.Error`."""

from poptorch.errors import Error, RecoverableError, UnrecoverableError

__all__ = ["Error", "RecoverableError", "UnrecoverableError"]
