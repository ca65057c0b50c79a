"""Who may write the host copies of the variables of a program, and how often that was done."""

from __future__ import annotations

import threading

__all__ = ["HostCopies"]


class HostCopies:
    """What the sessions of an Ir have to agree on, as they share the host copies of its variables.

    The copies themselves are the variables' own (`Variable.data`).

    Attributes:
        lock: held by whoever writes copies, or reads several that have to be of one moment.
        version: counts what was written, so that a session can tell whether they are still what it put there.
    """

    __slots__ = ("lock", "version")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version = 0

    def note(self) -> int:
        """They have been written, or are about to be. Returns the new version."""
        self.version += 1
        return self.version
