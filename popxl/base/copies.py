"""Copies of programs, and of what stands in them."""

from __future__ import annotations

from typing import NoReturn, Self, SupportsIndex


class NotCopyable:
    """Is, or stands in, a program or a session: a copy would be in none."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """`TypeError`, for `copy` and `pickle`."""
        raise TypeError(
            f"{self!r} can neither be copied nor pickled. `ir.save(path)` writes a program, and `popxl.Ir.load(path)` "
            "makes another one of that."
        )


class CopyIsSelf(NotCopyable):
    """A name for something in a program: the same in a copy, also a deep one, of what holds it."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
