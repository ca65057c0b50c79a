"""Version of the source: for logs, and for the records of experiments."""

from __future__ import annotations

import re
from pathlib import Path


def checked_out_commit(root: Path) -> str | None:
    """First seven characters of the commit checked out in `root`; None without Git.

    Only `root` itself is looked at, not the folders around it: an installed package may lie within someone's project.

    Example:
        >>> checked_out_commit(Path("no/such/folder")) is None
        True
    """
    git = root / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head[:7]
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text()[:7]
        packed = re.search(rf"^(\w{{7}})\w* {re.escape(name)}$", (git / "packed-refs").read_text(), re.MULTILINE)
    except OSError:
        return None
    return packed and packed[1]


GIT_COMMIT = checked_out_commit(Path(__file__).parents[1])
