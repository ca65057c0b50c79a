"""Copies of programs, and of what stands in them."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class NoCopies:
    """Is, or stands in, a program or a session: a copy would be in none."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """`TypeError`, for `copy` and `pickle`."""
        raise TypeError(
            f"{self!r} can neither be copied nor pickled. `ir.save(path)` writes a program, and `popxl.Ir.load(path)` "
            "makes another one of that."
        )
