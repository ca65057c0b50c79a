"""The errors of poptorch. Wrong arguments of setters stay what Python calls them, `AssertionError` and `ValueError`."""

from __future__ import annotations

__all__ = ["Error", "RecoverableError", "UnrecoverableError", "createPoptorchError"]


class Error(Exception):
    """A model, or a use of one, that does not work out; what a running program meets on its device, too.

    Args:
        message: what happened, and what to do.
        type: the part that says so; `poptorch_py_error` is Python code.
        location: where, if that is known; else empty.

    Example:
        >>> error = Error("Couldn't find a loss in graph")
        >>> print(error)
        'poptorch_py_error': Couldn't find a loss in graph
        >>> error.message, error.type, error.location
        ("Couldn't find a loss in graph", 'poptorch_py_error', '')
    """

    def __init__(self, message: str, type: str = "poptorch_py_error", location: str = "") -> None:
        super().__init__(message, type, location)
        self.message = message
        self.type = type
        self.location = location

    def __str__(self) -> str:
        return f"'{self.type}': {self.message}"


class RecoverableError(Error):
    """A failure of the device that is likely to pass.

    Args:
        message: what happened.
        recovery_action: what helps: `"IPU_RESET"`, `"LINK_RESET"`, `"PARTITION_RESET"` or `"FULL_RESET"`.
        type: the part that says so.
        location: where, if that is known.

    Example:
        >>> RecoverableError("The device does not answer.", "IPU_RESET").recovery_action
        'IPU_RESET'
    """

    def __init__(self, message: str, recovery_action: str, type: str = "poptorch_py_error", location: str = "") -> None:
        super().__init__(message, type, location)
        self.args = (message, recovery_action, type, location)  # what a copy or a pickle is made from
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """A failure of the device that will come again."""


def createPoptorchError(msg: str) -> Error:
    """An `Error` of Python code, to be raised.

    Example:
        >>> raise createPoptorchError("The model has no parameters.")
        Traceback (most recent call last):
        ...
        poptorch.errors.Error: 'poptorch_py_error': The model has no parameters.
    """
    return Error(msg)
