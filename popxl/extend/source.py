"""Lines of the user's program: the line that added an op, and warnings that name that line.

Example:
    >>> from popxl.extend.source import SourceLocation, user_frame
    >>> location = SourceLocation.of(user_frame())
"""

from popxl.base.source import DebugRecord, SourceLocation, warn_at
from popxl.context import user_frame

__all__ = ["DebugRecord", "SourceLocation", "user_frame", "warn_at"]
