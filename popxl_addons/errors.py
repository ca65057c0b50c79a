"""The error classes of this package; all other errors raised here are builtins."""

from popxl.errors import PopxlError


class GradientError(Exception):
    """A gradient was requested, or written by hand, in an invalid way.

    Cause: a module with ``build_grad`` was called inline, ``aux`` or ``var_grad`` was used at the wrong time, a
    hand-written gradient is incomplete, or a graph was differentiated twice. Remedy: the message names the module or
    graph and the way out.
    """


class OperandShapeError(PopxlError, AssertionError):
    """An operand of an op has another rank or shape than the op is written for.

    An `AssertionError` too: in PopXL these checks are assertions. Remedy: reshape the operand as the message says.
    """
