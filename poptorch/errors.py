"""Exception types of poptorch. Setters raise Python's `AssertionError` and `ValueError` for invalid arguments."""

from __future__ import annotations

__all__ = ["Error", "RecoverableError", "UnrecoverableError", "createPoptorchError"]


class Error(Exception):
    """Invalid models, invalid model usage, and device errors of running programs.

    Args:
        message: description of the error, and its remedy.
        type: the part that says so; `poptorch_py_error` is Python code.
        location: place of the error, if known; else empty.

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
    """A probably transient device failure.

    Args:
        message: description of the error.
        recovery_action: remedy: `"IPU_RESET"`, `"LINK_RESET"`, `"PARTITION_RESET"` or `"FULL_RESET"`.
        type: component that reports the error.
        location: place of the error, if known.

    Example:
        >>> RecoverableError("The device does not answer.", "IPU_RESET").recovery_action
        'IPU_RESET'
    """

    def __init__(self, message: str, recovery_action: str, type: str = "poptorch_py_error", location: str = "") -> None:
        super().__init__(message, type, location)
        self.args = (message, recovery_action, type, location)  # arguments for copies and pickles
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """A permanent device failure: retrying will not help."""


def createPoptorchError(msg: str) -> Error:
    """Create an `Error` attributed to Python code.

    Example:
        >>> raise createPoptorchError("The model has no parameters.")
        Traceback (most recent call last):
        ...
        poptorch.errors.Error: 'poptorch_py_error': The model has no parameters.
    """
    return Error(msg)
