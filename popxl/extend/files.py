"""Write files atomically, pack JSON and blobs into one, and find out whether a file is damaged.

Example:
    >>> from popxl.extend.files import digest
    >>> len(digest(b"weights"))
    64
"""

from popxl.base.container import is_packed, pack, unpack
from popxl.base.files import (
    CHECKSUMS,
    OF_ARCHIVES,
    ReplacedError,
    as_found,
    bring_to_disk,
    check_checksums,
    current,
    digest,
    discard,
    drafted,
    parsed,
    replace_file,
    replacing,
    write_checksums,
)

__all__ = [
    "CHECKSUMS",
    "OF_ARCHIVES",
    "ReplacedError",
    "as_found",
    "bring_to_disk",
    "check_checksums",
    "current",
    "digest",
    "discard",
    "drafted",
    "is_packed",
    "pack",
    "parsed",
    "replace_file",
    "replacing",
    "unpack",
    "write_checksums",
]
