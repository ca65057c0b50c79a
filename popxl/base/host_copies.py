"""Version and lock of the host copies of an Ir's variables."""

from __future__ import annotations

import itertools
import threading


class HostCopies:
    """State shared by all sessions of an Ir: versions of host copies of variables.

    The copies themselves are the variables' own (`Variable.data`).

    Attributes:
        lock: lock for writing copies, and for reading several consistently.
        version: the number of the last change of the copies. Changes on devices are counted with them.
        in_sync: whether variables are unchanged since the last download.
    """

    __slots__ = ("_versions", "in_sync", "lock", "version")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._versions = itertools.count(1)
        self.version = 0
        self.in_sync = True

    def new_version(self) -> int:
        """The next version number, larger than all earlier ones."""
        return next(self._versions)

    def record_write(self) -> int:
        """Record a write to host copies, past or imminent. Returns the new version."""
        self.version = self.new_version()
        return self.version
