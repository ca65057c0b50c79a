"""Schema of a saved program: the parts of an Ir, as JSON.

An Ir is saved as a container (`popxl.base.container`): the graphs are its JSON, and a blob has the numbers of variables
and constants as safetensors. Ops are saved and looked up by the keys of their declarations, so a program that uses an
op of your own must be loaded where that op is declared. The file contains no code and none is run from it.

Formats 1 and 2, of earlier versions, are two files: the JSON, which in format 2 has a digest of itself, and a file for
the numbers, named after its digest.

`popxl.program.writing` makes these parts from an Ir, and `popxl.program.reading` an Ir from these parts.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from popxl import dtypes
from popxl.options import SessionOptions

KIND = "popxl program"
FORMAT = 3
ARRAYS = "arrays"


class Stamp(BaseModel):
    """Version header of every file version. In format 2, its digest covers the JSON without it; format 1 has none."""

    format: int
    popxl: str
    digest: str = ""


class SavedRecord(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class SavedTensor(SavedRecord):
    """A saved tensor. Its id locates variable or constant values, unless `begins` describes them.

    For a variable in a remote buffer: the numbers of the buffer and the slot, and whether it is sharded; the id of the
    shard that programs use in its place, if there is one; and the axis along which the values of groups are parts of
    one value. The path is its display name.
    """

    id: str
    name: str
    type: Literal["Tensor", "Variable", "Constant"]
    spec: Any
    by_ref: bool = False
    bound: str | None = None
    used_at: tuple[int | None, bool | None] = (None, None)
    grouping: Any = None
    retrieval_mode: str | None = None
    remote: tuple[int, int, bool] | None = None
    piece: str | None = None
    group_axis: int | None = None
    path: str | None = None
    begins: dict[str, Any] | None = None


class SavedOp(SavedRecord):
    """An op. Values of attributes are JSON, or an object that names their kind: see `popxl.program.writing`."""

    id: int
    kind: Any
    name: str
    inputs: list[str]
    outputs: list[str]
    operands: tuple[str, ...] | None
    attributes: dict[str, Any]
    modified: list[int]
    ipu: int | None
    io_tiles: bool
    location: tuple[int | None, bool | None]
    execution_context: str
    after: tuple[int, ...]
    source: tuple[str, int, str]


class SavedGraph(SavedRecord):
    """Saved graph. Its custom rule is code, saved by name only, with the number of its outputs."""

    id: str
    inputs: list[str]
    outputs: list[str]
    differentiable: bool
    derivative: tuple[str, int] | None = None
    keeps: list[str] | None = None
    offloads: list[str] = []
    gradient_of: str | None
    tensors: list[SavedTensor]
    streams: list[SavedTensor] = []
    ops: list[SavedOp]


class SavedBuffer(SavedRecord):
    """A saved remote buffer, numbered by list position."""

    slot: Any
    entries: int
    shard_over: int | None


class SavedProgram(SavedRecord, Stamp):
    """A complete saved Ir. Counters hold next free numbers; `axes` list outermost first; `stream_transfers` lists
    streams with individual transfer counts; `arrays` names the value file of formats 1 and 2."""

    arrays: str = ""
    options: SessionOptions
    num_host_transfers: int
    stream_transfers: dict[str, int] = {}
    counters: dict[str, int]
    graphs: list[SavedGraph]
    buffers: list[SavedBuffer] = []
    axes: dict[str, int | Literal["ipus"]] = {}


def safetensors_library() -> Any:
    """Import safetensors on demand, for saving and loading only."""
    import safetensors.numpy

    return safetensors


def arrays_in(content: bytes) -> dict[str, np.ndarray]:
    """Load arrays by name from a value file. Raises `KeyError` for dtypes without tensor equivalent."""
    found = safetensors_library().deserialize(content)
    return {name: np.frombuffer(t["data"], _DTYPES[t["dtype"]]).reshape(t["shape"]) for name, t in found}


_DTYPES = {
    dtype.short.upper(): dtype.as_numpy() for dtype in dtypes.ALL if not (dtype.is_float8 or dtype is dtypes.complex128)
}
