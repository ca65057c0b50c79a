"""Classes of sessions of your own, derived from `popxl.Session`: access to variables, for saving and loading them.

Example:
    >>> import popxl
    >>> from popxl.extend.sessions import SessionParts
    >>> ir = popxl.Ir()
    >>> with ir.main_graph:
    ...     sum = popxl.variable(1.0) + 1.0
    >>> session = popxl.Session(ir, "ipu_model")
    >>> SessionParts(session).is_divided  # one process runs the program
    False
"""

from runtime.session_parts import SessionParts

__all__ = ["SessionParts"]
