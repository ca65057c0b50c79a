"""Named parts in one file: a line of JSON that says what they are, then their bytes. No code is in it to be run.

What the parts hold is not judged here: those who read compiled programs from a file trust whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from popxl.base.files import digest, parsed

FORMAT = 3


class Header(BaseModel):
    """The first line.

    Attributes:
        kind: what the file is.
        format: the version of the form.
        about: what the writer says of the parts.
        sizes: the number of bytes of each part, in their order.
        digest: SHA-256 of all the rest, this line included.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

    kind: str
    format: int
    about: dict[str, Any]
    sizes: dict[str, int]
    digest: str = ""

    def of(self, body: bytes) -> str:
        """The digest that belongs to this line and what follows it."""
        line = self.model_copy(update={"digest": ""}).model_dump_json()
        return digest(line.encode(), body)


def pack(kind: str, about: Mapping[str, Any], parts: Mapping[str, bytes]) -> bytes:
    """The content of a file.

    Example:
        >>> kind, about, parts = "greetings", {"language": "en"}, {"first": b"hello"}
        >>> unpack(kind, pack(kind, about, parts)) == (about, parts)
        True
    """
    body = b"".join(parts.values())
    sizes = {name: len(part) for name, part in parts.items()}
    header = Header(kind=kind, format=FORMAT, about=dict(about), sizes=sizes)
    header.digest = header.of(body)
    return header.model_dump_json().encode() + b"\n" + body


def unpack(kind: str, content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What the writer said of the parts, and the parts.

    Raises:
        ValueError: if this is not the content of such a file, or it is damaged.
    """
    line, _, body = content.partition(b"\n")
    header = Header.model_validate(parsed(line))
    if header.kind != kind or header.format != FORMAT:
        raise ValueError(f"it is of the kind {header.kind!r}, format {header.format}; expected {kind!r}, {FORMAT}")
    if sum(header.sizes.values()) != len(body) or header.of(body) != header.digest:
        raise ValueError("it is damaged: its digest differs")
    parts, start = {}, 0
    for name, size in header.sizes.items():
        parts[name] = body[start : start + size]
        start += size
    return header.about, parts
