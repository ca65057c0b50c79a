"""The error class of this package; all other errors raised here are builtins."""


class GradientError(Exception):
    """A gradient was requested, or written by hand, in an invalid way.

    Cause: a module with ``build_grad`` was called inline, ``aux`` or ``var_grad`` was used at the wrong time, a
    hand-written gradient is incomplete, or a graph was differentiated twice. Remedy: the message names the module or
    graph and the way out.
    """
