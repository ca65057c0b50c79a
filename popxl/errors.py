"""Error and warning classes of popxl: few kinds, each for a case that a program may want to catch or switch off.

Wrong kinds and wrong values of arguments raise Python's `TypeError` and `ValueError`; the classes here are for the
rest. The package `popart` re-exports them under the names that existing programs catch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from popxl.core.recording import Op


class PopxlError(Exception):
    """An invalid program; base class of popxl errors.

    Raised if each argument is valid by itself and the program as a whole is not: shapes that do not broadcast, an
    unknown tensor id, data that does not fit its replica grouping, ambiguous in-place changes, dtypes without device
    support, more stream transfers than feeds.

    Not raised for errors of a running program on its device: that is a `DeviceError`.

    Example:
        try:
            session.run(inputs)
        except popxl.errors.PopxlError as error:
            print(error)
    """


class PopxlInternalError(PopxlError):
    """A broken invariant: a popxl bug, or a tensor bound twice by reference with a single write-back.

    Please report it together with the printed graph, unless the message names the two bindings.
    """


class PopxlRuntimeError(PopxlError):
    """A failed run: wrong array dtype for a stream, insufficient input for transfers, or variables lost in an earlier
    failed run."""


class UnreadableFileError(PopxlError, ValueError):
    """A file that is damaged, of another kind, or with impossible content, such as recursive calls.

    Example:
        try:
            ir = popxl.Ir.load(path)
        except popxl.errors.UnreadableFileError as error:
            print(error)
    """


class UndefinedValue(Exception):
    """An undetermined property, such as the IPU of a tensor without producers and consumers."""


class DeviceError(Exception):
    """Something failed on the device; the base class of the errors of running programs. Not a `PopxlError`."""


class DeviceRuntimeError(DeviceError):
    """The device stopped while a program ran."""


class ApplicationRuntimeError(DeviceRuntimeError):
    """A value that the program computed failed a check on the device, such as a float8 scale outside `[-32, 32)`."""


class NonFiniteError(ApplicationRuntimeError):
    """A NaN or infinity produced by an op, found by `Session.debugging`. Variables keep their values from before the
    run.

    Attributes:
        op: the op.
        replica: number of the first replica that it ran on.
    """

    def __init__(self, message: str, op: Op, replica: int = 0) -> None:
        super().__init__(message)
        self.op = op
        self.replica = replica


class PopxlWarning(UserWarning):
    """A runnable program that probably does something unintended; base class of popxl warnings.

    Each is issued once for a line of the program. Python's `warnings` switches it off where the program means it.

    Example:
        import warnings

        warnings.filterwarnings("ignore", category=popxl.errors.DriftingVariableWarning)
    """


class NarrowedNumberWarning(PopxlWarning):
    """A number out of range for an implicit dtype: 32 bits, or that of a neighbouring tensor."""


class UnusedTransferWarning(PopxlWarning):
    """A stream with fewer transfers than host array rows."""


class MissingStateWarning(PopxlWarning):
    """State to be copied or loaded without counterparts for some variables."""


class RemoteSlotWarning(PopxlWarning):
    """Variables without a fitting, exclusive remote buffer slot: shared slots, slots of another size or out of range.

    A program that ties variables by their slot does well to switch this off.
    """


class RowsAsValuesWarning(PopxlWarning):
    """An array interpreted as several values: each row becomes one variable value."""


class ShardedUpdateWarning(PopxlWarning):
    """An update that combines array elements, while each replica sees only its own shard."""


class TensorTruthWarning(PopxlWarning):
    """`if tensor:` tests presence of elements, ignoring their values."""


class UnnamedVariableWarning(PopxlWarning):
    """A variable input without a name: its module is not an attribute of the calling module."""


class UnusedGradientWarning(PopxlWarning):
    """A gradient graph given for a called graph, unused in the caller's differentiation."""


class LostUpdateWarning(PopxlWarning):
    """A lost change: in-place to a by-value input, leaving the caller's tensor unchanged; to an unread value outside
    all variables; or to variables restored from host copies when another one was written between runs."""


class RepeatedSeedWarning(PopxlWarning):
    """A program that learns drops the same elements in every run: nothing in it changes the seed.

    A program that writes the seed between runs, with `session.write_variable_data`, does well to switch this off.
    """


class CrossingUpdateWarning(PopxlWarning):
    """A variable updated on another device than its reader, causing copies in both directions every run."""


class ReplicationWarning(PopxlWarning):
    """Numbers that are certainly wrong because replicas differ; base class of the findings of a session.

    As an error, a session refuses such a program before compiling it.

    Example:
        import warnings

        warnings.filterwarnings("error", category=popxl.errors.ReplicationWarning)
    """


class DriftingVariableWarning(ReplicationWarning):
    """Replicas that share a variable update it with different values, so that their copies diverge.

    Values differ that come from what each replica is fed, or from variables that it does not share, and that no op
    between replicas has met. A program that feeds all replicas the same numbers does well to switch this off.
    """


class ContradictedStatementWarning(ReplicationWarning):
    """A value declared equal on all replicas of a group consists of shards or partial sums on them."""
