"""Counter of changes of a program, by which earlier sessions detect edits."""


class EditCounter:
    """Change counter of an Ir.

    Whatever changes a graph, an op, a graph input, a remote buffer or an option after it was made calls `record_edit`.
    `popxl.analysis.edits.Snapshot` describes the changes.

    Attributes:
        compiled: value of `count` that the last session has compiled; `None` before the first session.
    """

    __slots__ = ("compiled", "count")

    def __init__(self) -> None:
        self.count = 0
        self.compiled: int | None = None

    def record_edit(self) -> None:
        """Count an edit of the program."""
        self.count += 1
