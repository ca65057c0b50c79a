"""The error class of this package; everything else raised here is a builtin that says what kind of mistake it was."""


class GradientError(Exception):
    """Gradients were asked for, or written by hand, in a way that cannot work.

    Cause: a module with ``build_grad`` was called inline, ``aux`` or ``var_grad`` was used at the wrong time, a
    hand-written gradient is incomplete, or a graph was differentiated twice. Remedy: the message names the module or
    graph and the way out.
    """
