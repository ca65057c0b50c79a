"""The container of all files of popxl: a line of JSON, then blobs of bytes. Programs, sessions and models are schemas
of it.

The line holds the kind of the file (`kind`), the writer's metadata (`about`), and the size of each blob. It ends with
the digest of itself and the blobs. A container holds no code; its schema decides whether its content is valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt

from popxl.base.atomic_files import digest, parsed

FORMAT = 3

_START = b'{"kind":'
_NO_DIGEST = b'""}'


class Header(BaseModel):
    """The first line.

    Attributes:
        sizes: number of bytes of each blob, in order.
        digest: SHA-256 of all the rest, this line included.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

    kind: str
    format: int
    about: dict[str, Any]
    sizes: dict[str, NonNegativeInt]
    digest: str = ""


def pack(kind: str, about: Mapping[str, Any] | str, blobs: Mapping[str, bytes]) -> bytes:
    """Encode a header and blobs as the content of a file.

    Args:
        kind: kind of the file.
        about: metadata of the blobs, as values that JSON has; or their JSON text, in one line.

    Example:
        >>> kind, about, blobs = "greetings", {"language": "en"}, {"first": b"hello"}
        >>> unpack(kind, pack(kind, about, blobs)) == (about, blobs)
        True
    """
    text = about if isinstance(about, str) else _json(about)
    sizes = _json({name: len(blob) for name, blob in blobs.items()})
    line = f'{{"kind":{_json(kind)},"format":{FORMAT},"about":{text},"sizes":{sizes},"digest":""}}'.encode()
    seal = digest(line, *blobs.values())
    return b"".join([line.removesuffix(_NO_DIGEST), f'"{seal}"}}\n'.encode(), *blobs.values()])


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def is_packed(content: bytes) -> bool:
    """Whether bytes begin as a container does."""
    return content.startswith(_START)


def unpack(kind: str, content: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Header and blobs of a container.

    Raises:
        ValueError: if this is not the content of such a file, or it is damaged.
    """
    end = content.find(b"\n")
    line, body = (content, b"") if end < 0 else (content[:end], memoryview(content)[end + 1 :])
    header = Header.model_validate(parsed(line))
    if header.kind != kind or header.format != FORMAT:
        raise ValueError(f"it is of the kind {header.kind!r}, format {header.format}; expected {kind!r}, {FORMAT}")
    seal = f'"{header.digest}"}}'.encode()
    unsealed = line.removesuffix(seal) + _NO_DIGEST
    if not line.endswith(seal) or sum(header.sizes.values()) != len(body) or digest(unsealed, body) != header.digest:
        raise ValueError("it is damaged: its digest differs")
    blobs, start = {}, 0
    for name, size in header.sizes.items():
        blobs[name] = bytes(body[start : start + size])
        start += size
    return header.about, blobs
