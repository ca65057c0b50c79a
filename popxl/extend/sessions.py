"""Classes of sessions of your own, derived from `popxl.Session`: access to variables, for saving and loading them.

Example:
    >>> from popxl.extend.sessions import SessionParts
    >>> SessionParts(session).is_divided  # one process runs the program
    False
"""

from runtime.session_parts import SessionParts

__all__ = ["SessionParts"]
