"""Report of a program's variables."""

from __future__ import annotations

from collections.abc import Sequence

from popxl.base.group_by import group_by
from popxl.base.pages import Page, Table, bytes_text, starred
from popxl.base.records import Record

__all__ = ["VariableReport", "variables_page"]


class VariableReport(Record):
    """A variable.

    Attributes:
        name: name of the variable.
        spec: dtype and shape, on one replica.
        bytes: on one device.
        place: location: "device", or the slot of a remote buffer; "unused" if the program does not use it.
        changes: whether the program changes it.
        ipu: number of its IPU, if IPUs are separate devices.
    """

    name: str
    spec: str
    bytes: int
    place: str
    changes: bool
    ipu: int | None = None


def variables_page(variables: Sequence[VariableReport]) -> list[Page]:
    """Table of variables, the largest first; nothing if there are none. Those of equal layers share a line."""
    if not variables:
        return []
    alike = group_by(variables, lambda v: (starred(v.name), v.spec, _location(v) + ", changes" * v.changes))
    sizes = {key: sum(v.bytes for v in each) for key, each in alike.items()}
    held = [v for v in variables if v.place == "device"]
    changing = sum(v.bytes for v in held if v.changes)
    rows = [["in all, on the device", "", bytes_text(sum(v.bytes for v in held)), f"{bytes_text(changing)} change"]]
    for key, each in sorted(alike.items(), key=lambda item: -sizes[item[0]]):
        name, spec, place = key if len(each) > 1 else (each[0].name, *key[1:])
        rows.append([name, f"{len(each)} × {spec}" if len(each) > 1 else spec, bytes_text(sizes[key]), place])
    return [Page("Variables", [*Table.first_rows(["variable", "shape", "bytes", "place"], rows)])]


def _location(variable: VariableReport) -> str:
    return variable.place if variable.ipu is None else f"IPU {variable.ipu}"
