"""An `Ir` in a file: the graphs as JSON, and beside it the numbers of variables and constants as safetensors.

Ops are saved by the keys of their declarations and found again by them, so a program that uses an op of your own is
loaded where that op is declared. No code is in the files and none is run from them. The file of the numbers is named
after its content: whoever reads while somebody writes, or after a crash, finds the old program or the new one.
Reached as `Ir.save` and `Ir.load`.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from popxl.base.source import SourceLocation
from popxl.base.version import VERSION
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.op import Op, OpKind
from popxl.ops.exchange import Part
from popxl.options import SessionOptions
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import ReplicaGrouping
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.tensorlocation import ON_DEVICE, ExecutionContext, LocationInfo
from popxl.transforms.from_jax import kind_with_key
from popxl.transforms.op_gradient import Derivation, vjp_kind
from popxl.values.spec import TensorSpec

if TYPE_CHECKING:
    from popxl.ir import Ir

__all__ = ["fingerprint", "load", "replace_file", "save"]


FORMAT = 1


class Stamp(BaseModel):
    """What every version of the file says of itself."""

    format: int
    popxl: str


class _Saved(BaseModel):
    """A part of the file."""

    model_config = ConfigDict(extra="forbid")


class SavedTensor(_Saved):
    """A tensor. The numbers of a variable or constant are found by its id.

    Of a variable in a remote buffer: the numbers of the buffer and the slot, and whether it is in pieces; and the id of
    the piece that programs use in its place, if there is one.
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


class SavedOp(_Saved):
    """An op. Values of attributes are JSON, or an object that names their kind: see `_Writer.value`."""

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


class SavedGraph(_Saved):
    """A graph."""

    id: str
    inputs: list[str]
    outputs: list[str]
    differentiable: bool
    gradient_of: str | None
    tensors: list[SavedTensor]
    ops: list[SavedOp]


class SavedBuffer(_Saved):
    """A remote buffer. Its number is its place in the list."""

    slot: Any
    entries: int
    shard_over: int | None


class SavedProgram(_Saved, Stamp):
    """A whole Ir. The counters are the numbers that come next; `arrays` names the file of numbers."""

    arrays: str
    options: SessionOptions
    num_host_transfers: int
    counters: dict[str, int]
    graphs: list[SavedGraph]
    buffers: list[SavedBuffer] = []


# Writing ------------------------------------------------------------------------------------------------------------


def save(ir: Ir, path: str | os.PathLike[str]) -> None:
    """See `Ir.save`."""
    path = Path(path)
    writer = _Writer()
    with ir.host_data_lock:
        program = writer.program(ir)
    arrays = _safetensors().numpy.save(writer.arrays)
    program.arrays = f"{path.stem}-{hashlib.sha256(arrays).hexdigest()[:16]}.safetensors"
    beside = path.with_name(program.arrays)
    if not beside.exists():
        replace_file(beside, arrays)
    replace_file(path, program.model_dump_json(indent=1).encode())
    for older in path.parent.glob(f"{glob.escape(path.stem)}-{'[0-9a-f]' * 16}.safetensors"):
        if older != beside:
            older.unlink()


def fingerprint(ir: Ir) -> str:
    """A digest of what a program does: not of the numbers of its variables, nor of where it was written.

    Raises:
        PopxlError: if the program cannot be saved.
    """
    writer = _Writer(variables=False)
    program = writer.program(ir).model_dump(
        exclude={"options": _OF_NO_EFFECT, "counters": True, "graphs": {"__all__": {"ops": {"__all__": {"source"}}}}}
    )
    digest = hashlib.sha256(repr(program).encode())
    for name, array in writer.arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


_OF_NO_EFFECT = {"enableEngineCaching", "cachePath", "dotChecks", "logDir"}


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, all of it or nothing."""
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or, after a power cut, the name might be there and the content not
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class _Writer:
    """The parts of a program, and the arrays that they name: by the id of a tensor, or a number.

    Args:
        variables: with the numbers of variables.
    """

    def __init__(self, variables: bool = True) -> None:
        self._numbers_of = Variable | Constant if variables else Constant
        self.arrays: dict[str, np.ndarray] = {}

    def program(self, ir: Ir) -> SavedProgram:
        return SavedProgram(
            format=FORMAT,
            popxl=VERSION,
            arrays="",
            options=ir.options,
            num_host_transfers=ir.num_host_transfers,
            counters=ir.counters,
            graphs=[self.graph(graph) for graph in ir.graphs],
            buffers=[
                SavedBuffer(slot=self.value(b.spec, repr(b)), entries=b.entries, shard_over=b.shard_over)
                for b in ir.remote_buffers
            ],
        )

    def graph(self, graph: Graph) -> SavedGraph:
        return SavedGraph(
            id=graph.id,
            inputs=[t.id for t in graph.inputs],
            outputs=[t.id for t in graph.outputs],
            differentiable=graph.differentiable,
            gradient_of=None if graph.gradient_of is None else graph.gradient_of.id,
            tensors=[self.tensor(t) for t in graph.tensors],
            ops=[self.op(op) for op in graph.ops],
        )

    def tensor(self, t: Tensor) -> SavedTensor:
        bound = None if t._bound is None else t._bound()
        saved = SavedTensor(
            id=t.id,
            name=t.name,
            type=type(t).__name__,  # type: ignore[arg-type]
            spec=self.value(t.spec, t.id),
            by_ref=t.by_ref,
            bound=None if bound is None else bound.id,
            used_at=t._used_at,
        )
        if isinstance(t, self._numbers_of):
            self.array(t.data, t.id)
        if isinstance(t, Variable):
            saved.grouping, saved.retrieval_mode = self.value(t.replica_grouping, t.id), t.retrieval_mode
            if t.location_info.isRemote():
                saved.remote = (*t.location_info.getRemoteBufferInfo(), t.location_info.sharded)
            saved.piece = None if t.piece is None else t.piece.id
        return saved

    def array(self, array: np.ndarray, name: str | None = None) -> str:
        name = f"#{len(self.arrays)}" if name is None else name
        if array.dtype.kind == "c":
            raise PopxlError(f"Ir.save: {name} holds complex numbers, which cannot be saved.")
        # The bytes of a float8 array, which NumPy has no dtype for.
        own = np.array(array, order="C")
        self.arrays[name] = own.view(np.uint8) if array.dtype.names else own
        return name

    def op(self, op: Op) -> SavedOp:
        return SavedOp(
            id=op.id,
            kind=self.kind(op.kind, op),
            name=op.name,
            inputs=[t.id for t in op.inputs],
            outputs=[t.id for t in op.outputs],
            operands=op.operands,
            attributes={name: self.value(value, f"`{name}` of {op!r}") for name, value in op.attributes.items()},
            modified=sorted(op.modified),
            ipu=op.ipu,
            io_tiles=op.io_tiles,
            location=op.location,
            execution_context=op.execution_context.name,
            after=op.after,
            source=(op.source.file, op.source.line, op.source.function),
        )

    def kind(self, kind: OpKind, op: Op | Part) -> Any:
        """The key of a declaration; for a gradient op that JAX made, what it was made of."""
        of = kind.derivation
        if of is None:
            if OpKind.named(kind.key) is not kind:
                raise PopxlError(
                    f"Ir.save: {op!r} ({op.source}) cannot be saved, because another op has been declared under its "
                    f"key {kind.key!r}. Keys are what ops are found by: give yours one of its own, "
                    f"`OpKind(..., key=...)`."
                )
            return kind.key
        return {
            "vjp": self.kind(of.kind, op),
            **{
                name: self.value(getattr(of, name), f"`{name}` of {op!r}")
                for name in ("operands", "attributes", "inputs", "outputs", "wanted", "given")
            },
        }

    def value(self, value: Any, what: str) -> Any:
        """A value as JSON. What JSON does not have is an object with one key, which names what it is."""
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, np.generic | np.ndarray):
            return {"array": self.array(np.asarray(value))}
        if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return value
        if isinstance(value, float):
            return {"float": repr(value)}
        if isinstance(value, dtype_):
            return {"dtype": value.name}
        if isinstance(value, TensorSpec):
            return {"spec": [value.shape, value.dtype.name, value.meta_shape]}
        if isinstance(value, Graph):
            return {"graph": value.id}
        if isinstance(value, Part):
            known = {f.name: getattr(value, f.name) for f in fields(Part) if f.name not in ("kind", "source")}
            source = [value.source.file, value.source.line, value.source.function]
            saved = {name: self.value(v, f"`{name}` of {value!r}") for name, v in known.items()}
            return {"part": {"kind": self.kind(value.kind, value), "source": source, **saved}}
        if isinstance(value, Stream):
            return {"stream": [type(value).__name__, value.tensor_id]}
        if isinstance(value, RemoteBuffer):
            return {"buffer": value.remote_buffer_id}
        if isinstance(value, ReplicaGrouping):
            return {"strided": [value.stride, value.group_size]} if value.is_const else {"assigned": value.assignment}
        if isinstance(value, dict):
            return {"dict": [[self.value(k, what), self.value(v, what)] for k, v in value.items()]}
        for container in (tuple, list, frozenset):
            if type(value) is container:
                return {container.__name__: [self.value(v, what) for v in value]}
        raise PopxlError(
            f"Ir.save: {what} is {value!r} ({type(value).__name__}), which cannot be saved. Attributes of ops that are "
            "saved are numbers, strings, arrays, dtypes, specs, graphs, streams, remote buffers, and tuples, lists and "
            "dicts of these."
        )


def _safetensors() -> Any:
    """The library of the files of numbers. Imported by who saves or loads: all else is to work, and start, without."""
    import safetensors.numpy

    return safetensors


# Reading ------------------------------------------------------------------------------------------------------------


def load(path: str | os.PathLike[str], ir: Ir) -> None:
    """Fill an empty Ir with the program in a file. See `Ir.load`."""
    path = Path(path)
    text = path.read_bytes()
    library = _safetensors()
    try:
        while True:
            program = _read_program(text)
            try:
                arrays = path.with_name(program.arrays).read_bytes()
                break
            except FileNotFoundError:
                before, text = text, path.read_bytes()
                if text == before:
                    raise  # nobody has just put another program in its place
        digest = hashlib.sha256(arrays).hexdigest()[:16]
        if not program.arrays.endswith(f"-{digest}.safetensors"):
            raise ValueError(f"{program.arrays!r} is not what was written; its digest is {digest}.")
        _Reader(ir, program, library.numpy.load(arrays)).read()
    except (OSError, KeyError, TypeError, ValueError, library.SafetensorError) as problem:
        told = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise ValueError(f"Ir.load: {os.fspath(path)!r} does not hold a program that can be read: {told}") from problem


def _read_program(text: bytes) -> SavedProgram:
    stamp = Stamp.model_validate_json(text)
    if stamp.format != FORMAT:
        raise ValueError(f"it has format {stamp.format}, of popxl {stamp.popxl}; this popxl reads format {FORMAT}.")
    return SavedProgram.model_validate_json(text)


class _Reader:
    """Makes a saved program again: tensors and graphs first, then the ops, in the order they run."""

    def __init__(self, ir: Ir, program: SavedProgram, arrays: Mapping[str, np.ndarray]) -> None:
        self._ir = ir
        self._program = program
        self._arrays = arrays
        self._graphs: dict[str, Graph] = {}
        self._tensors: dict[str, Tensor] = {}
        self._streams: dict[str, Stream] = {}

    def read(self) -> None:
        ir, program = self._ir, self._program
        ir.options = program.options
        ir.num_host_transfers = program.num_host_transfers
        ir.counters = {name: program.counters[name] for name in ir.counters}
        for buffer in program.buffers:
            spec = self.value(buffer.slot)
            made = RemoteBuffer._make(ir, spec.shape, spec.dtype, buffer.entries)
            made.meta_shape, made.shard_over = spec.meta_shape, buffer.shard_over
        ir.graphs = [Graph._make(ir, saved.id) for saved in program.graphs]
        self._graphs = {graph.id: graph for graph in ir.graphs}
        for graph, saved in zip(ir.graphs, program.graphs, strict=True):
            for tensor in saved.tensors:
                self._add_tensor(graph, tensor)
        for graph, saved in zip(ir.graphs, program.graphs, strict=True):
            graph._inputs = [self._tensors[id] for id in saved.inputs]
            graph._outputs = [self._tensors[id] for id in saved.outputs]
            graph.differentiable = saved.differentiable
            graph.gradient_of = None if saved.gradient_of is None else self._graphs[saved.gradient_of]
            for tensor in saved.tensors:
                t = self._tensors[tensor.id]
                if tensor.bound is not None:
                    t.bound_to(self._tensors[tensor.bound])
                if tensor.piece is not None and isinstance(t, Variable):
                    t.piece = self._tensors[tensor.piece]
        for graph, saved in zip(ir.graphs, program.graphs, strict=True):
            for op in saved.ops:
                self._add_op(graph, op)
        for graph in ir.graphs:
            graph.call_sites.sort(key=lambda op: op.id)

    def _add_tensor(self, graph: Graph, saved: SavedTensor) -> None:
        t = Tensor._kinds.get(saved.type, Tensor)._make(graph, saved.id, saved.name, self.value(saved.spec))
        t.by_ref = saved.by_ref
        t._used_at = saved.used_at
        if isinstance(t, Variable | Constant):
            t.data = self._arrays[t.id].view(t.dtype.as_numpy())
            if t.data.shape[t.data.ndim - t.rank :] != t.shape:
                raise ValueError(f"{t!r} has numbers of the shape {t.data.shape}")
        if isinstance(t, Constant):
            t.data.flags.writeable = False
        if isinstance(t, Variable):
            t.replica_grouping = self.value(saved.grouping)
            t.retrieval_mode = saved.retrieval_mode or "one_per_group"
            t.location_info, t.piece = ON_DEVICE, None
            if saved.remote is not None:
                number, entry, sharded = saved.remote
                t.location_info = LocationInfo(self._buffer(number), entry, sharded)
            t._in_sync = True
        graph._tensors[t.id] = self._tensors[t.id] = t

    def _add_op(self, graph: Graph, saved: SavedOp) -> None:
        inputs, outputs = (tuple(self._tensors[id] for id in ids) for ids in (saved.inputs, saved.outputs))
        op = Op.restore(
            self.kind(saved.kind, len(inputs)),
            graph,
            SourceLocation(*saved.source),
            id=saved.id,
            name=saved.name,
            inputs=inputs,
            outputs=outputs,
            operands=saved.operands,
            attributes={name: self.value(value) for name, value in saved.attributes.items()},
            modified=frozenset(saved.modified),
            ipu=saved.ipu,
            io_tiles=saved.io_tiles,
            location=saved.location,
            execution_context=ExecutionContext[saved.execution_context],
            after=saved.after,
        )
        graph.take_in(op)
        if not op.called_graphs:
            try:
                for checked in dict.fromkeys((op, *op.parts)):
                    checked.kind.verify(checked)
            except PopxlError as problem:
                raise ValueError(str(problem)) from problem

    def kind(self, saved: Any, inputs: int) -> OpKind:
        """The declaration under a key, or the gradient op made again as it was made."""
        if isinstance(saved, dict):
            of = {name: self.value(value) for name, value in saved.items() if name != "vjp"}
            base = self.kind(saved["vjp"], len(of["inputs"]))
            gradient, read = vjp_kind(Derivation(base, **of))
            if len(read) + len(of["given"]) != inputs:
                raise PopxlError(
                    f"Ir.load: the gradient of {base.name} was saved with {inputs} operands and "
                    f"has {len(read) + len(of['given'])} here; this version of JAX or of the op's declaration differs "
                    "from the one that the program was saved with. Build the program again."
                )
            return gradient
        kind = OpKind.named(saved) or kind_with_key(saved)
        if kind is None:
            raise PopxlError(
                f"Ir.load: the program uses an op with the key {saved!r}, and no op has been declared under it. "
                "Declare it, or import the module that does, before the program is loaded."
            )
        return kind

    def value(self, value: Any) -> Any:
        """The value that `_Writer.value` wrote."""
        if not isinstance(value, dict):
            return value
        ((what, content),) = value.items()
        return self._made[what](self, content)

    def _spec(self, content: Any) -> TensorSpec:
        shape, name, meta_shape = content
        return TensorSpec(tuple(shape), dtype_.from_name(name), tuple(meta_shape))

    def _part(self, content: Any) -> Part:
        known = {name: self.value(v) for name, v in content.items() if name not in ("kind", "source")}
        return Part(self.kind(content["kind"], known["inputs"]), source=SourceLocation(*content["source"]), **known)

    def _stream(self, content: Any) -> Stream:
        type_, id = content
        if id not in self._streams:
            types = {kind.__name__: kind for kind in (HostToDeviceStream, DeviceToHostStream)}
            self._streams[id] = object.__new__(types[type_])
            self._streams[id].tensor = self._tensors[id]
        return self._streams[id]

    def _buffer(self, number: int) -> RemoteBuffer:
        if not 0 < number <= len(self._ir.remote_buffers):
            raise ValueError(f"there is no remote buffer with the number {number}")
        return self._ir.remote_buffers[number - 1]

    _made: Mapping[str, Callable[[_Reader, Any], Any]] = {
        "array": lambda self, name: self._arrays[name],
        "float": lambda self, text: float(text),
        "dtype": lambda self, name: dtype_.from_name(name),
        "spec": _spec,
        "graph": lambda self, id: self._graphs[id],
        "part": _part,
        "stream": _stream,
        "buffer": _buffer,
        "strided": lambda self, pair: self._ir.replica_grouping(*pair),
        "assigned": lambda self, assignment: self._ir.replica_grouping_from_assignments(assignment),
        "dict": lambda self, items: {self.value(k): self.value(v) for k, v in items},
        "tuple": lambda self, items: tuple(map(self.value, items)),
        "list": lambda self, items: list(map(self.value, items)),
        "frozenset": lambda self, items: frozenset(map(self.value, items)),
    }
