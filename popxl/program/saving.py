"""An `Ir` in a file: the graphs as JSON, and beside it the numbers of variables and constants as safetensors.

Ops are saved by the keys of their declarations and found again by them, so a program that uses an op of your own is
loaded where that op is declared. No code is in the files and none is run from them. The file of the numbers is named
after its content: whoever reads while somebody writes, or after a crash, finds the old program or the new one. The JSON
has a digest of itself and, in that name, of the numbers. Format 1, of earlier versions, has none of itself.
Reached as `Ir.save` and `Ir.load`.

Who has written a file is not known, so nothing in it is believed. A program that no sequence of calls of popxl can have
made is refused before anything is compiled. Session options that touch the machine are not in the file, and are not
taken from it: they are for who runs the program.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from pydantic import BaseModel, ConfigDict

from popxl.base.files import digest, parsed, remove_abandoned, replace_file, replaced_file, sealed, unsealed
from popxl.base.source import SourceLocation
from popxl.base.version import VERSION
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError, UnreadableFileError
from popxl.graph import Graph
from popxl.op import Op, OpKind
from popxl.ops.exchange import Part
from popxl.options import OF_THE_RUN, SessionOptions
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import ReplicaGrouping
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.tensorlocation import ON_DEVICE, ExecutionContext, LocationInfo
from popxl.transforms.from_jax import kind_with_key
from popxl.transforms.op_gradient import Derivation, vjp_kind
from popxl.values.spec import TensorSpec, brief

if TYPE_CHECKING:
    from popxl.ir import Ir

__all__ = ["fingerprint", "load", "save"]


FORMAT = 2


class Stamp(BaseModel):
    """What every version of the file says of itself. The digest is that of the file without it; format 1 has none."""

    format: int
    popxl: str
    digest: str = ""


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
    streams: list[SavedTensor] = []
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
    program.arrays = f"{path.stem}-{digest(arrays)[:16]}.safetensors"
    likewise = f"{glob.escape(path.stem)}-{'[0-9a-f]' * 16}.safetensors"
    beside = path.with_name(program.arrays)
    # Locked until the program says that they are its own: else who saves another one there would delete them.
    with replaced_file(beside, lambda draft: draft.write_bytes(arrays), likewise):
        replace_file(path, sealed(program.model_dump_json(indent=1, exclude={"options": OF_THE_RUN}).encode()))
    remove_abandoned(older for older in path.parent.glob(likewise) if older != beside)


def fingerprint(ir: Ir) -> str:
    """A digest of what a program does: not of the numbers of its variables, nor of where it was written.

    Raises:
        PopxlError: if the program cannot be saved.
    """
    writer = _Writer(variables=False)
    program = writer.program(ir).model_dump(
        exclude={"options": OF_THE_RUN, "counters": True, "graphs": {"__all__": {"ops": {"__all__": {"source"}}}}}
    )
    digest = hashlib.sha256(repr(program).encode())
    for name, array in writer.arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


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
            tensors=[self.tensor(t) for _, t in sorted(graph._tensors.items())],
            streams=[self.tensor(t) for _, t in sorted(graph._streams.items())],
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


def load(path: str | os.PathLike[str], ir: Ir, traces: bool = True) -> None:
    """Fill an empty Ir with the program in a file. See `Ir.load`.

    Args:
        path: the file.
        ir: an Ir that is new.
        traces: have JAX trace the functions of ops, where there is doubt. A program that comes with its executables,
            which are trusted, need not wait for that.
    """
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
        found = digest(arrays)[:16]
        if not program.arrays.endswith(f"-{found}.safetensors"):
            raise ValueError(f"{program.arrays!r} is not what was written; its digest is {found}")
        numbers = library.numpy.load(arrays)
    except (OSError, KeyError, TypeError, ValueError, library.SafetensorError) as problem:
        raise _unreadable(path, problem) from problem
    try:
        _Reader(ir, program, numbers, traces).read()
    except _Unknown:
        raise
    except Exception as problem:  # whatever the functions of ops raise for attributes that nobody can have given them
        raise _unreadable(path, problem) from problem


def _unreadable(path: Path, problem: Exception) -> UnreadableFileError:
    told = str(problem)
    if isinstance(problem, KeyError):
        told = f"{problem} is missing"
    elif not isinstance(problem, OSError | ValueError | PopxlError):
        told = f"{type(problem).__name__}: {problem}"
    told = told.rstrip(".") if len(told) < 1000 else f"{told[:1000]} ..."
    return UnreadableFileError(
        f"Ir.load: {os.fspath(path)!r} does not hold a program that can be read: {told}. Take another copy, "
        "or build the program and save it again."
    )


class _Unknown(PopxlError):
    """The file is as it should be, and this process does not know what is in it."""


def _read_program(text: bytes) -> SavedProgram:
    content = parsed(text)
    stamp = Stamp.model_validate(content)
    if not 0 < stamp.format <= FORMAT:
        raise ValueError(f"it has format {stamp.format}, of popxl {stamp.popxl}; this popxl reads format {FORMAT}.")
    if stamp.format > 1 and not unsealed(text, stamp.digest):
        raise ValueError("it is damaged: its digest differs")
    options = content["options"]
    if isinstance(options, dict) and (named := sorted(OF_THE_RUN & options.keys())):
        if stamp.format > 1:
            raise ValueError(f"it sets {', '.join(named)}, which are for who runs it")
        content["options"] = {name: value for name, value in options.items() if name not in named}
    return SavedProgram.model_validate(content)


class _Reader:
    """Makes a saved program again: tensors and graphs first, then the ops, in the order they run."""

    def __init__(self, ir: Ir, program: SavedProgram, arrays: Mapping[str, np.ndarray], traces: bool) -> None:
        self._ir = ir
        self._traces = traces
        self._program = program
        self._arrays = arrays
        self._graphs: dict[str, Graph] = {}
        self._tensors: dict[str, Tensor] = {}
        self._streams: dict[str, Stream] = {}
        self._pieces: list[Tensor] = []

    def read(self) -> None:
        ir, program = self._ir, self._program
        ir.options = program.options
        ir.num_host_transfers = program.num_host_transfers
        for buffer in program.buffers:
            self._add_buffer(buffer)
        _once("graph", (saved.id for saved in program.graphs))
        _check(bool(program.graphs) and program.graphs[0].id == "", "the first graph is not the main graph")
        ir.graphs = [Graph._make(ir, saved.id) for saved in program.graphs]
        self._graphs = {graph.id: graph for graph in ir.graphs}
        _once("tensor", (t.id for saved in program.graphs for t in saved.tensors))
        _once("stream", (t.id for saved in program.graphs for t in saved.streams))
        for graph, saved in zip(ir.graphs, program.graphs, strict=True):
            for tensor in saved.tensors:
                graph._tensors[tensor.id] = self._tensors[tensor.id] = self._tensor(graph, tensor)
            _check(not graph.id or not saved.streams, f"{graph.title} has streams, and is not the main graph")
            for stream in saved.streams:
                t = graph._streams[stream.id] = self._tensor(graph, stream)
                _check(type(t) is Tensor, f"{t!r} stands for no stream")
        for graph, saved in zip(ir.graphs, program.graphs, strict=True):
            graph._inputs = self._tensors_in(graph, saved.inputs, f"input of {graph.title}")
            graph._outputs = self._tensors_in(graph, saved.outputs, f"output of {graph.title}")
            graph.differentiable = saved.differentiable
            graph.gradient_of = None if saved.gradient_of is None else self._graphs[saved.gradient_of]
            _once(f"input of {graph.title}", saved.inputs)
            _check(bool(graph.id) or not saved.inputs, "the main graph has inputs")
            for tensor in saved.tensors:
                self._add_ties(self._tensors[tensor.id], tensor)
        for t in self._tensors.values():
            _check_places(t)
        _once("op", (op.id for saved in program.graphs for op in saved.ops))
        for graph, saved in zip(ir.graphs, program.graphs, strict=True):
            self._add_ops(graph, saved)
        for graph in ir.graphs:
            graph.call_sites.sort(key=lambda op: op.id)
        _check_calls(ir)
        for graph in ir.graphs:
            for op in graph.ops:
                _check_overwritten(op)
                for checked in dict.fromkeys((op, *op.parts)):
                    checked.kind.verify(checked)
                    if self._traces:
                        checked.kind.try_out(checked)
        self._check_sizes()
        self._set_counters()

    def _add_buffer(self, saved: SavedBuffer) -> None:
        spec = self._spec_of(saved.slot)
        made = RemoteBuffer._make(self._ir, spec.shape, spec.dtype, saved.entries)
        _check(saved.shard_over is None or saved.shard_over > 0, f"{made!r} is cut into {saved.shard_over} pieces")
        made.meta_shape, made.shard_over = spec.meta_shape, saved.shard_over

    def _spec_of(self, saved: Any) -> TensorSpec:
        spec = self.value(saved)
        _check(isinstance(spec, TensorSpec), f"{saved!r} is no spec")
        return cast(TensorSpec, spec)

    def _tensors_in(self, graph: Graph, ids: Iterable[str], what: str) -> list[Tensor]:
        found = [self._tensors[id] for id in ids]
        for t in found:
            _check(t.graph_ref is graph.ref, f"an {what} is {t.id!r}, of another graph")
        return found

    def _tensor(self, graph: Graph, saved: SavedTensor) -> Tensor:
        _check(saved.id == graph._prefix + saved.name, f"a tensor of {graph.title} has the id {saved.id!r}")
        t: Tensor = Tensor._kinds.get(saved.type, Tensor)._make(graph, saved.id, saved.name, self._spec_of(saved.spec))
        t.by_ref = saved.by_ref
        t._used_at = _ipu_checked(saved.used_at)
        if isinstance(t, Variable):
            _check(not graph.id, f"{t!r} is not in the main graph")
            t.replica_grouping = self.value(saved.grouping)
            _check(isinstance(t.replica_grouping, ReplicaGrouping), f"{t!r} has no replica grouping")
            t.retrieval_mode = saved.retrieval_mode or "one_per_group"
            t.location_info, t.piece = ON_DEVICE, None
            if saved.remote is not None:
                number, entry, sharded = saved.remote
                buffer = self._buffer(number)
                _check(0 <= entry < buffer.entries, f"{t!r} is in slot {entry} of {buffer!r}")
                t.location_info = LocationInfo(buffer, entry, sharded)
            t._in_sync = True
        if isinstance(t, Variable | Constant):
            wanted, array = t.dtype.as_numpy(), self._arrays[t.id]
            _check(array.dtype == (np.uint8 if wanted.names else wanted), f"{t!r} has numbers of {array.dtype}")
            t.data = array.view(wanted)
            expected = t.shape_on_host if isinstance(t, Variable) else t.shape
            _check(t.data.shape == expected, f"{t!r} has numbers of the shape {t.data.shape}")
        if isinstance(t, Constant):
            t.data.flags.writeable = False
        return t

    def _add_ties(self, t: Tensor, saved: SavedTensor) -> None:
        """What a tensor has to do with others, which are there by now."""
        if saved.bound is not None:
            t.bound_to(self._tensors[saved.bound])
        _check(not saved.by_ref or t in t.graph.inputs, f"{t!r} is by reference, and no input")
        if saved.piece is None:
            return
        _check(isinstance(t, Variable), f"{t!r} is no variable and is in pieces")
        piece, buffer = self._tensors[saved.piece], t.location_info.buffer
        _check(type(piece) is Tensor and piece.graph_ref is t.graph_ref, f"the piece of {t!r} is {piece!r}")
        fits = buffer is not None and piece.spec.to_tuple() == buffer.spec.to_tuple()
        _check(fits, f"the piece of {t!r} is {piece!r}, which is not what a slot of {buffer!r} holds")
        t.piece = piece  # type: ignore[attr-defined]
        self._pieces.append(piece)

    def _add_ops(self, graph: Graph, saved: SavedGraph) -> None:
        """The ops of a graph. Each finds what it reads made before, and makes what nobody else does."""
        there = {t for t in graph.tensors if isinstance(t, Variable | Constant)} | {*graph.inputs}
        _check(not any(isinstance(t, Variable | Constant) for t in graph.inputs), f"{graph.title} has odd inputs")
        there |= {t for t in self._pieces if t.graph_ref is graph.ref}
        earlier: set[int] = set()
        for each in saved.ops:
            op = self._op(graph, each)
            for t in op.inputs:
                _check(t in there, f"{op!r} reads {t.id!r}, which nothing has made before it")
            for t in op.outputs:
                _check(type(t) is Tensor and t not in there, f"{op!r} makes {t.id!r}, which is there already")
                there.add(t)
            _check({*op.after} <= earlier, f"{op!r} comes after ops that do not come before it")
            graph.take_in(op)
            earlier.add(op.id)
        for t in graph.outputs:
            _check(t in there, f"{graph.title} returns {t.id!r}, which nothing makes")

    def _op(self, graph: Graph, saved: SavedOp) -> Op:
        kind = self.kind(saved.kind, len(saved.inputs))
        attributes = {n: self._graph(v) if n in kind.graphs else self.value(v) for n, v in saved.attributes.items()}
        what = f"Op[{saved.name}.{saved.id}]"
        op = Op.restore(
            kind,
            graph,
            SourceLocation(*saved.source),
            id=saved.id,
            name=saved.name,
            inputs=tuple(self._tensors_in(graph, saved.inputs, f"input of {what}")),
            outputs=tuple(self._tensors_in(graph, saved.outputs, f"output of {what}")),
            operands=saved.operands,
            attributes=attributes,
            modified=frozenset(saved.modified),
            ipu=_ipu_checked((saved.ipu, None))[0],
            io_tiles=saved.io_tiles,
            location=_ipu_checked(saved.location),
            execution_context=ExecutionContext[saved.execution_context],
            after=saved.after,
        )
        _check(saved.id >= 0, f"{what} has a negative number")
        _check(saved.operands is None or len(saved.operands) == len(op.inputs), f"{what} names {saved.operands}")
        _check({*kind.graphs} <= attributes.keys(), f"{what} does not have the graphs {kind.graphs} to run")
        if kind.ipus:
            ipus: Any = attributes[kind.ipus]
            _check(len(ipus) == len(op.outputs), f"{what} has {len(op.outputs)} results, on the IPUs {ipus}")
        return op

    def _check_sizes(self) -> None:
        """Of all that is asked for when a session is made: on each replica, and for each transfer."""
        ir = self._ir
        replicas = ir.options.instance_replication_factor
        for t in self._tensors.values():
            _check_size(repr(t), t.spec, replicas)
        for stream in self._streams.values():
            _check_size(str(stream), stream.spec, replicas * ir.num_host_transfers)
        entries = sum(b.slot_nelms * b.tensor_dtype.itemsize * b.entries for b in ir.remote_buffers) * replicas
        _check(entries <= LARGEST, f"the remote buffers would have {entries} bytes; the most is {LARGEST}")

    def _set_counters(self) -> None:
        """The numbers that come next. None of them has been given to something that is there."""
        given = self._program.counters
        ops = (part.id for graph in self._ir.graphs for op in graph.ops for part in (op, *op.parts))
        named = (re.search(r"_subgraph\((\d+)\)$", graph.id) for graph in self._ir.graphs)
        taken = {"op_ids": max(ops, default=-1), "subgraph_numbers": max((int(m[1]) for m in named if m), default=-1)}
        for name in self._ir.counters:
            _check(given[name] > taken.get(name, -1), f"the next of {name} is {given[name]}, which is taken")
            self._ir.counters[name] = given[name]

    def kind(self, saved: Any, inputs: int) -> OpKind:
        """The declaration under a key, or the gradient op made again as it was made."""
        if isinstance(saved, dict):
            of = {name: self.value(value) for name, value in saved.items() if name != "vjp"}
            base = self.kind(saved["vjp"], len(of["inputs"]))
            made_of = Derivation(base, **of)
            runs_others = base.runs is not None or base.stands_for is not None
            _check(not runs_others, f"a gradient by JAX of {base.name}, which runs others")
            gradient, read = vjp_kind(made_of)
            if len(read) + len(of["given"]) != inputs:
                raise _Unknown(
                    f"Ir.load: the gradient of {base.name} was saved with {inputs} operands and "
                    f"has {len(read) + len(of['given'])} here; this version of JAX or of the op's declaration differs "
                    "from the one that the program was saved with. Build the program again."
                )
            return gradient
        _check(isinstance(saved, str), f"{saved!r} is no key of an op")
        kind = OpKind.named(saved) or kind_with_key(saved)
        if kind is None:
            raise _Unknown(
                f"Ir.load: the program uses an op with the key {saved!r}, and no op has been declared under it. "
                "Declare it, or import the module that does, before the program is loaded."
            )
        return kind

    def value(self, value: Any) -> Any:
        """The value that `_Writer.value` wrote."""
        if not isinstance(value, dict):
            _check(not isinstance(value, list), f"{value!r} is no value")
            return value
        ((what, content),) = value.items()
        return self._made[what](self, content)

    def _spec(self, content: Any) -> TensorSpec:
        shape, name, meta_shape = content
        spec = TensorSpec(_sizes(shape), dtype_.from_name(name), _sizes(meta_shape))
        _check_size(f"a tensor {brief(spec)}", spec)
        return spec

    def _graph(self, value: Any) -> Graph:
        """The graph that an op runs. Nowhere else is there one."""
        _check(isinstance(value, dict) and value.keys() == {"graph"}, f"{value!r} is no graph")
        return self._graphs[value["graph"]]

    def _part(self, content: Any) -> Part:
        known = {name: self.value(v) for name, v in content.items() if name not in ("kind", "source")}
        kind = self.kind(content["kind"], known["inputs"])
        file, line, function = content["source"]
        part = Part(kind, source=SourceLocation(str(file), int(line), str(function)), **known)
        _check(bool(kind.exchange) and not kind.graphs, f"{part!r} cannot be a part of an exchange")
        _check(isinstance(part.attributes, dict) and isinstance(part.name, str), f"{part!r} has odd attributes")
        _check(type(part.inputs) is int and part.inputs >= 0, f"{part!r} has {part.inputs} inputs")
        _check(all(isinstance(spec, TensorSpec) for spec in part.outputs), f"{part!r} has odd outputs")
        return part

    def _stream(self, content: Any) -> Stream:
        type_, id = content
        kind = {kind.__name__: kind for kind in (HostToDeviceStream, DeviceToHostStream)}[type_]
        main = self._ir.main_graph
        if id not in main._streams:  # in format 1 they are among the other tensors
            main._streams[id] = main._tensors.pop(id)
        t = main._streams[id]
        if id not in self._streams:
            self._streams[id] = object.__new__(kind)
            self._streams[id].tensor = t
        _check(type(self._streams[id]) is kind, f"the stream {id!r} goes both ways")
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


# What no program can be ---------------------------------------------------------------------------------------------

LARGEST = 2**42
"""So many bytes, 4 TiB, no array of a program in a file may have, nor all remote buffers or one stream: nobody has the
memory. A file of a few lines could claim any number."""

_MOST_CALLS = 10**8
"""So many ops at most a program in a file may come to, if each call is written out. Graphs that call others twice, ten
times over, make a thousand of one; thirty times over, nobody gets to the end."""

_MOST_IPUS = 2**16


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _once(what: str, ids: Iterable[object]) -> None:
    twice = [id for id, count in Counter(ids).items() if count > 1]
    _check(not twice, f"the {what} {', '.join(map(repr, twice[:3]))} is there twice")


def _sizes(values: Any) -> tuple[int, ...]:
    _check(isinstance(values, list) and all(type(v) is int and v >= 0 for v in values), f"{values!r} is no shape")
    return tuple(values)


def _check_size(what: str, spec: TensorSpec, times: int = 1) -> None:
    size = math.prod(spec.shape) * spec.dtype.itemsize * times
    _check(size <= LARGEST, f"{what} would have {size} bytes; the most is {LARGEST}")


def _ipu_checked(location: tuple[int | None, bool | None]) -> tuple[int | None, bool | None]:
    ipu = location[0]
    _check(ipu is None or 0 <= ipu < _MOST_IPUS, f"there is no IPU {ipu}")
    return location


def _check_places(t: Tensor) -> None:
    """`ValueError` if a tensor is where a tensor is which is where it is."""
    met = set()
    here: Tensor | None = t
    while here is not None:
        _check(here not in met, f"{t!r} is bound to itself")
        met.add(here)
        here = None if here._bound is None else here._bound()


def _check_overwritten(op: Op) -> None:
    """`ValueError` if an op overwrites what ops of its kind do not, or as a call two inputs that are one."""
    if not op.kind.graphs:
        declared = op.kind.modified(op.attributes, op.operands)
        _check(op.modified == declared, f"{op!r} overwrites its inputs {[*op.modified]}, and not {[*declared]}")
        return
    _check(all(0 <= i < len(op.inputs) for i in op.modified), f"{op!r} has no inputs {[*op.modified]} to overwrite")
    twice = [op.inputs[i] for i in op.modified if op.inputs.count(op.inputs[i]) > 1]
    _check(not twice, f"{op!r} overwrites {twice}, which are bound twice")


def _check_calls(ir: Ir) -> None:
    """`ValueError` for a graph that calls itself, whichever way, and for calls that nobody gets to the end of."""
    waiting = {graph: len(graph.called_graphs) for graph in ir.graphs}
    callers: dict[Graph, list[Graph]] = {graph: [] for graph in ir.graphs}
    for graph in ir.graphs:
        for callee in graph.called_graphs:
            callers[callee].append(graph)
    ready = [graph for graph, count in waiting.items() if not count]
    ops: dict[Graph, int] = {}
    for graph in ready:  # which grows meanwhile
        ops[graph] = sum(1 + sum(ops[callee] for callee in op.called_graphs) for op in graph.ops)
        _check(ops[graph] <= _MOST_CALLS, f"the calls in {graph.title} come to {ops[graph]} ops")
        for caller in callers[graph]:
            waiting[caller] -= 1
            if not waiting[caller]:
                ready.append(caller)
    endless = [graph.title for graph in ir.graphs if graph not in ops]
    _check(not endless, f"{', '.join(endless[:3])} would call itself")
