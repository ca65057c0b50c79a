"""How often a program has been changed, so that what was made of it before can tell."""


class EditCounter:
    """Change counter of an Ir.

    Whatever changes a graph, an op, a graph input, a remote buffer or an option after it was made calls `record_edit`.
    What it was that changed, `popxl.analysis.edits.Snapshot` says.

    Attributes:
        count: how many changes there have been.
        known: how many there had been when the last session was made; `None` before there was any.
    """

    __slots__ = ("count", "known")

    def __init__(self) -> None:
        self.count = 0
        self.known: int | None = None

    def record_edit(self) -> None:
        """Something has changed."""
        self.count += 1
