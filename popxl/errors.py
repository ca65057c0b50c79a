"""The errors of our own: few kinds, each for something that a program may want to catch.

Wrong kinds and wrong values of arguments stay what Python calls them, `TypeError` and `ValueError`; what is here
is for the rest. The package `popart` re-exports these classes under the names that existing programs catch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl.op import Op


class PopxlError(Exception):
    """A program that cannot be what it says it is; the base class of our errors.

    Raised where every argument is of a good kind and value by itself and the program as a whole does not work out:
    shapes that do not broadcast, a tensor id that nobody has, data that does not fit its replica grouping, ambiguous
    in-place changes, dtypes that no device handles, more stream transfers than were fed.

    Not raised for what a running program meets on its device: that is a `DeviceError`.

    Example:
        try:
            session.run(inputs)
        except popxl.errors.PopxlError as error:
            print(error)
    """


class PopxlInternalError(PopxlError):
    """A broken invariant: a bug in popxl, or one tensor bound by reference twice where only one can be written back.

    Please report it together with the printed graph, unless the message names the two bindings.
    """


class PopxlRuntimeError(PopxlError):
    """A run that does not work out: an array of another dtype than its stream, more transfers than were fed, or
    variables that an earlier run which failed has lost.
    """


class UnreadableFileError(PopxlError, ValueError):
    """A file that is damaged, of another kind, or holds what nobody can have written: a program that calls itself, say.

    Example:
        try:
            ir = popxl.Ir.load(path)
        except popxl.errors.UnreadableFileError as error:
            print(error)
    """


class UndefinedValue(Exception):
    """Asked for a fact that nothing has settled yet, such as the IPU of a tensor that no op produces or consumes."""


class DeviceError(Exception):
    """Something failed on the device; the base class of the errors of running programs. Not a `PopxlError`."""


class DeviceRuntimeError(DeviceError):
    """The device stopped while a program ran."""


class ApplicationRuntimeError(DeviceRuntimeError):
    """A value that the program computed failed a check on the device, such as a float8 scale outside `[-32, 32)`."""


class NonFiniteError(ApplicationRuntimeError):
    """An op made a NaN or an infinity, and `Session.debugging` looked for that. The variables are as before the run.

    Attributes:
        op: the op.
        replica: the number of the replica that it ran on, first.
    """

    def __init__(self, message: str, op: Op, replica: int = 0) -> None:
        super().__init__(message)
        self.op = op
        self.replica = replica
