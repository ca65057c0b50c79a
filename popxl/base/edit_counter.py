"""Counter of changes of a program, by which earlier sessions detect edits."""


class EditCounter:
    """Change counter of an Ir.

    Whatever changes a graph, an op, a graph input, a remote buffer or an option after it was made calls `record_edit`.
    `popxl.analysis.edits.Snapshot` describes the changes.

    Attributes:
        known: value of `count` when the last session was made; `None` before the first session.
    """

    __slots__ = ("count", "known")

    def __init__(self) -> None:
        self.count = 0
        self.known: int | None = None

    def record_edit(self) -> None:
        """Something has changed."""
        self.count += 1
