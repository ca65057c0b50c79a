"""The errors and warnings of our own: few kinds, each for something that a program may want to catch or switch off.

Wrong kinds and wrong values of arguments stay what Python calls them, `TypeError` and `ValueError`; what is here
is for the rest. The package `popart` re-exports these classes under the names that existing programs catch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl.core.recording import Op


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


class PopxlWarning(UserWarning):
    """Something in a program that runs, and is most likely not what was meant; the base class of our warnings.

    Each is told once for a line of the program. Python's `warnings` switches it off where it is meant.

    Example:
        import warnings

        warnings.filterwarnings("ignore", category=popxl.errors.DriftingVariableWarning)
    """


class NarrowedNumberWarning(PopxlWarning):
    """A number does not fit the dtype that it is given without being asked: 32 bits, or that of a tensor beside it."""


class UnusedTransferWarning(PopxlWarning):
    """A run stores to a stream, or loads from it, less often than its host array has room for."""


class MissingStateWarning(PopxlWarning):
    """State that was to be copied or loaded has no counterpart for some variables."""


class RemoteSlotWarning(PopxlWarning):
    """Variables have no slot of a remote buffer to themselves: others have the same one, or the buffer has not so many.

    A program that ties variables by their slot does well to switch this off.
    """


class RowsAsValuesWarning(PopxlWarning):
    """An array was given where several values are expected: each of its rows is taken for the value of a variable."""


class ShardedUpdateWarning(PopxlWarning):
    """An update combines elements of arrays, of which each replica sees its own piece or part only."""


class TensorTruthWarning(PopxlWarning):
    """`if tensor:` says whether the tensor has elements, and not what they are."""


class UnusedGradientWarning(PopxlWarning):
    """A gradient graph was given for a graph that is called, and differentiating the caller does not use it."""


class LostUpdateWarning(PopxlWarning):
    """A change is lost. A graph makes it in place to an input that it takes by value, and the caller's tensor stays as
    it is; a program makes it to what no variable keeps, and does not read that; or a write to one variable between runs
    takes the others back to what the host has.
    """


class RepeatedSeedWarning(PopxlWarning):
    """A program that learns drops the same elements in every run: nothing in it changes the seed.

    A program that writes the seed between runs, with `session.write_variable_data`, does well to switch this off.
    """


class CrossingUpdateWarning(PopxlWarning):
    """A variable is changed on another device than the one that reads it, so that each run copies it there and back."""


class DriftingVariableWarning(PopxlWarning):
    """Replicas that share a variable change it by values that differ, so that it is no longer the same for them.

    Values differ that come from what each replica is fed, or from variables that it does not share, and that no op
    between replicas has met. A program that feeds all replicas the same numbers does well to switch this off.
    """
