"""Debug information in a file: the parts of programs, and the user's lines that made them.

An open file collects the Irs that are made. Their contents are written when it is closed.

    {"contexts": [a record for each Ir, each call that made ops, and each tensor], "stringTable": [strings]}

The names in the `location` of an op's record are numbers of strings in the table.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from popxl.base.atomic_files import replace_file
from popxl.values.spec import brief

if TYPE_CHECKING:
    from popxl.base.source import DebugRecord
    from popxl.ir import Ir

_path: Path | None = None
_irs: list[Ir] = []


def open_file(file_name: str | os.PathLike[str], format: str = "json") -> None:
    """Collect debug information of all Irs created later, keeping them alive until `close` or interpreter exit.

    One file is open at a time: another one is closed first.

    Raises:
        ValueError: for another format than `"json"`.
        FileNotFoundError: if there is no folder for the file.
    """
    global _path
    if format != "json":
        raise ValueError(f"Debug information is written as 'json'; the format {format!r} is not known.")
    folder = Path(file_name).absolute().parent
    if not folder.is_dir():
        raise FileNotFoundError(
            f"`file_name` is {os.fspath(file_name)!r}, and there is no folder {folder}: make it first."
        )
    close()
    _path = Path(file_name).absolute()


def close() -> None:
    """Write the open file, if any."""
    global _path
    if _path is not None:
        path, irs, _path = _path, [*_irs], None
        _irs.clear()
        replace_file(path, json.dumps(_content(irs), indent=1).encode())


atexit.register(close)


def register_ir(ir: Ir) -> None:
    """Take note of a new Ir, if a file is open."""
    if _path is not None:
        _irs.append(ir)


def _content(irs: list[Ir]) -> dict[str, Any]:
    """Content of a debug info file."""
    strings: dict[str, int] = {}
    contexts: list[dict[str, Any]] = []
    for ir in irs:
        contexts.append({"category": "ir", "layer": "popxl", "name": repr(ir)})
        records = {id(record): record for graph in ir.graphs for op in graph.ops for record in [op.debug_record]}
        contexts += (_of_op(record, strings) for record in records.values())
        contexts += (
            {"category": "tensor", "layer": "popxl", "tensorId": t.id, "type": brief(t)}
            for graph in ir.graphs
            for t in graph.tensors
        )
    return {"contexts": contexts, "stringTable": [*strings]}


def _of_op(record: DebugRecord, strings: dict[str, int]) -> dict[str, Any]:
    """Debug record of an op-creating call."""
    file, function = (strings.setdefault(s, len(strings)) for s in (record.location.file, record.location.function))
    return {
        "category": record.category,
        "layer": record.layer,
        "name": record.name,
        "api": record.api,
        "inputs": record.inputs,
        **({} if record.outputs is None else {"outputs": record.outputs}),
        "location": {"lineNumber": record.location.line, "fileName": file, "functionName": function},
    }
