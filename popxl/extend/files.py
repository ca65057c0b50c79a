"""Write files atomically, pack JSON and blobs into one file, and verify the digests of files.

Example:
    >>> from popxl.extend.files import digest
    >>> len(digest(b"weights"))
    64
"""

from popxl.base.atomic_files import (
    ARCHIVE_ERRORS,
    CHECKSUMS,
    ReplacedError,
    bring_to_disk,
    check_checksums,
    consistent_read,
    digest,
    discard,
    parsed,
    replace_directory,
    replace_file,
    resolve_replaced,
    temporary_sibling,
    write_checksums,
)
from popxl.base.container import is_packed, pack, unpack

__all__ = [
    "CHECKSUMS",
    "ARCHIVE_ERRORS",
    "ReplacedError",
    "consistent_read",
    "bring_to_disk",
    "check_checksums",
    "resolve_replaced",
    "digest",
    "discard",
    "temporary_sibling",
    "is_packed",
    "pack",
    "parsed",
    "replace_file",
    "replace_directory",
    "unpack",
    "write_checksums",
]
