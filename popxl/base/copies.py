"""Base classes for programs, and for objects in them, that cannot be copied or are their own copies."""

from __future__ import annotations

from typing import NoReturn, Self, SupportsIndex


class NotCopyable:
    """A member of a program or session. Copying raises an error: no program would own the copy."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """`TypeError`, for `copy` and `pickle`."""
        raise TypeError(
            f"{self!r} can neither be copied nor pickled. `ir.save(path)` writes a program, and `popxl.Ir.load(path)` "
            "makes another one of that."
        )


class CopyIsSelf(NotCopyable):
    """A name inside a program; copies and deep copies of its holder keep this very object."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
