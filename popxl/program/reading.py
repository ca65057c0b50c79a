"""Loading an `Ir` from a file: tensors and graphs, then ops, from the parts in `popxl.program.saved`. See `Ir.load`.

The author of a file is unknown, so its content is not trusted. A program that no sequence of popxl calls can make is
refused before anything is compiled. Session options that affect the machine are not in the file, and are not taken from
it: the caller sets them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from popxl.base.atomic_files import digest, parsed, verify_digest
from popxl.base.container import is_packed, unpack
from popxl.base.source import SourceLocation
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError, UnreadableFileError
from popxl.graph import Graph
from popxl.initial import Saved as SavedInitial
from popxl.ops.exchange import MergedOp
from popxl.options import OF_THE_RUN
from popxl.program.checks import (
    LARGEST,
    check,
    check_bindings,
    check_calls,
    check_overwritten,
    check_size,
    check_unique,
    checked_location,
    checked_shape,
)
from popxl.program.saved import (
    ARRAYS,
    FORMAT,
    KIND,
    SavedBuffer,
    SavedGraph,
    SavedOp,
    SavedProgram,
    SavedTensor,
    Stamp,
    arrays_in,
    safetensors_library,
)
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import ReplicaGrouping
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.tensorlocation import ON_DEVICE, ExecutionContext, LocationInfo
from popxl.transforms.jax_derivative import UnsavedDerivative
from popxl.transforms.jax_kinds import kind_with_key
from popxl.transforms.op_gradient import Derivation, vjp_kind
from popxl.values.axes import Axes
from popxl.values.spec import TensorSpec, brief

if TYPE_CHECKING:
    from popxl.ir import Ir


def load(path: str | os.PathLike[str], ir: Ir) -> None:
    """Fill an empty Ir with the program in a file. See `Ir.load`."""
    path = Path(path)
    restore(ir, path.read_bytes(), lambda name: path.with_name(name).read_bytes(), os.fspath(path))


def restore(ir: Ir, content: bytes, beside: Callable[[str], bytes], name: str, traces: bool = True) -> None:
    """Fill an empty Ir with the program that the content of a file holds.

    Args:
        content: bytes packed by `popxl.program.writing`, or the JSON of an earlier version.
        beside: reads the file of numbers of an earlier version, by its name.
        traces: have JAX trace the functions of ops, where there is doubt. A program that comes with its executables,
            which are trusted, need not wait for that.
    """
    library = safetensors_library()
    try:
        program, arrays = _opened(content, beside)
        numbers = arrays_in(arrays)
    except (OSError, KeyError, TypeError, ValueError, library.SafetensorError) as problem:
        raise _unreadable(name, problem) from problem
    try:
        _Reader(ir, program, numbers, traces).fill_ir()
    except _Unknown:
        raise
    except Exception as problem:  # functions of ops raise any error for invalid attributes
        raise _unreadable(name, problem) from problem


def _unreadable(name: str, problem: Exception) -> UnreadableFileError:
    reason = str(problem)
    if isinstance(problem, KeyError):
        reason = f"{problem} is missing"
    elif not isinstance(problem, OSError | ValueError | PopxlError):
        reason = f"{type(problem).__name__}: {problem}"
    reason = reason.rstrip(".") if len(reason) < 1000 else f"{reason[:1000]} ..."
    return UnreadableFileError(
        f"Ir.load: {name!r} does not hold a program that can be read: {reason}. Take another copy, "
        "or build the program and save it again."
    )


class _Unknown(PopxlError):
    """A valid file with content unknown to this process."""


def _opened(content: bytes, beside: Callable[[str], bytes]) -> tuple[SavedProgram, bytes]:
    """A saved program, and the safetensors file with its numbers."""
    about, blobs = unpack(KIND, content) if is_packed(content) else (parsed(content), {})
    stamp = Stamp.model_validate(about)
    if not 0 < stamp.format <= FORMAT or (stamp.format == FORMAT) != bool(blobs):
        raise ValueError(f"it has format {stamp.format}, of popxl {stamp.popxl}; this popxl reads format {FORMAT}.")
    if stamp.format == 2 and not verify_digest(content, stamp.digest):
        raise ValueError("it is damaged: its digest differs")
    options = about["options"]
    if isinstance(options, dict) and (named := sorted(OF_THE_RUN & options.keys())):
        if stamp.format > 1:
            raise ValueError(f"it sets {', '.join(named)}, which are for who runs it")
        about["options"] = {name: value for name, value in options.items() if name not in named}
    program = SavedProgram.model_validate(about)
    if blobs:
        return program, blobs[ARRAYS]
    arrays = beside(program.arrays)
    hash_ = digest(arrays)[:16]
    if not program.arrays.endswith(f"-{hash_}.safetensors"):
        raise ValueError(f"{program.arrays!r} is not what was written; its digest is {hash_}")
    return program, arrays


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
        self._shards: list[Tensor] = []

    def fill_ir(self) -> None:
        """Fill the Ir and check its content, in dependency order."""
        ir, program = self._ir, self._program
        ir.options = program.options
        ir.num_host_transfers = program.num_host_transfers
        ir._axes = Axes.from_mapping(program.axes) if program.axes else None
        ir.checked_axes("the program")
        for buffer in program.buffers:
            self._add_buffer(buffer)
        check_unique("graph", (saved.id for saved in program.graphs))
        check(bool(program.graphs) and program.graphs[0].id == "", "the first graph is not the main graph")
        ir.graphs = [Graph._make(ir, saved.id) for saved in program.graphs]
        self._graphs = {graph.id: graph for graph in ir.graphs}
        graphs = [*zip(ir.graphs, program.graphs, strict=True)]
        check_unique("tensor", (t.id for saved in program.graphs for t in saved.tensors))
        check_unique("stream", (t.id for saved in program.graphs for t in saved.streams))
        for pair in graphs:
            self._add_tensors(*pair)
        for pair in graphs:
            self._add_ends(*pair)
        for t in self._tensors.values():
            check_bindings(t)
        check_unique("op", (op.id for saved in program.graphs for op in saved.ops))
        for pair in graphs:
            self._add_ops(*pair)
        for graph in ir.graphs:
            graph.call_sites.sort(key=lambda op: op.id)
        check_calls(ir)
        self._check_ops()
        self._set_transfers()
        self._check_sizes()
        self._set_counters()

    def _add_tensors(self, graph: Graph, saved: SavedGraph) -> None:
        """Create tensors and stream tensors of a graph, without links."""
        for tensor in saved.tensors:
            graph._tensors[tensor.id] = self._tensors[tensor.id] = self._tensor(graph, tensor)
        check(not graph.id or not saved.streams, f"{graph.title} has streams, and is not the main graph")
        for stream in saved.streams:
            t = graph._streams[stream.id] = self._tensor(graph, stream)
            check(type(t) is Tensor, f"{t!r} stands for no stream")

    def _add_ends(self, graph: Graph, saved: SavedGraph) -> None:
        """Set inputs and outputs of a graph, plus their links."""
        graph._inputs = self._tensors_in(graph, saved.inputs, f"input of {graph.title}")
        graph._outputs = self._tensors_in(graph, saved.outputs, f"output of {graph.title}")
        graph.differentiable = saved.differentiable
        if saved.keeps is not None:
            graph.keeps = frozenset(self._tensors_in(graph, saved.keeps, f"tensor that is kept of {graph.title}"))
            away = self._tensors_in(graph, saved.offloads, f"tensor that is offloaded of {graph.title}")
            graph.offloads = frozenset(away) & graph.keeps
        if saved.derivative is not None:
            name, results = saved.derivative
            check(0 <= results <= len(saved.outputs), f"{graph.title} has a rule for {results} outputs")
            graph.derivative = UnsavedDerivative(name, results)
        graph.gradient_of = None if saved.gradient_of is None else self._graphs[saved.gradient_of]
        check_unique(f"input of {graph.title}", saved.inputs)
        check(bool(graph.id) or not saved.inputs, "the main graph has inputs")
        for tensor in saved.tensors:
            self._add_ties(self._tensors[tensor.id], tensor)

    def _add_buffer(self, saved: SavedBuffer) -> None:
        spec = self._spec_of(saved.slot)
        buffer = RemoteBuffer._make(self._ir, spec.shape, spec.dtype, saved.entries)
        check(saved.shard_over is None or saved.shard_over > 0, f"{buffer!r} is cut into {saved.shard_over} pieces")
        buffer.meta_shape, buffer.shard_over = spec.meta_shape, saved.shard_over

    def _spec_of(self, saved: Any) -> TensorSpec:
        spec = self.value(saved)
        check(isinstance(spec, TensorSpec), f"{saved!r} is no spec")
        return cast(TensorSpec, spec)

    def _tensors_in(self, graph: Graph, ids: Iterable[str], what: str) -> list[Tensor]:
        tensors = [self._tensors[id] for id in ids]
        for t in tensors:
            check(t.graph_ref is graph.ref, f"an {what} is {t.id!r}, of another graph")
        return tensors

    def _tensor(self, graph: Graph, saved: SavedTensor) -> Tensor:
        check(saved.id == graph._prefix + saved.name, f"a tensor of {graph.title} has the id {saved.id!r}")
        t: Tensor = Tensor._kinds.get(saved.type, Tensor)._make(graph, saved.id, saved.name, self._spec_of(saved.spec))
        t.by_ref, t._path = saved.by_ref, saved.path
        t._used_at = checked_location(saved.used_at)
        if isinstance(t, Variable):
            self._place_variable(t, saved)
        if saved.begins is not None:
            if not isinstance(t, Variable):
                raise ValueError(f"{t!r} is no variable, and begins with {saved.begins}")
            initial = SavedInitial.model_validate({"initial": saved.begins}).initial
            check(initial.is_complete, f"{t!r} begins with a file of the machine that it was saved on")
            check(initial.shape == t.shape_on_host, f"{t!r} begins with the shape {initial.shape}")
            t.set_initial(initial)
        elif isinstance(t, Variable | Constant):
            wanted, array = t.dtype.as_numpy(), self._arrays[t.id]
            check(array.dtype == (np.uint8 if wanted.names else wanted), f"{t!r} has numbers of {array.dtype}")
            t.data = array.view(wanted)
            expected = t.shape_on_host if isinstance(t, Variable) else t.shape
            check(t.data.shape == expected, f"{t!r} has numbers of the shape {t.data.shape}")
        if isinstance(t, Constant):
            t.data.flags.writeable = False
        return t

    def _place_variable(self, v: Variable, saved: SavedTensor) -> None:
        """Set replica grouping and storage location of a variable."""
        check(not v.graph.id, f"{v!r} is not in the main graph")
        v.replica_grouping = self.value(saved.grouping)
        check(isinstance(v.replica_grouping, ReplicaGrouping), f"{v!r} has no replica grouping")
        v.retrieval_mode = saved.retrieval_mode or "one_per_group"
        v.location_info, v.piece, v._group_axis = ON_DEVICE, None, None
        if saved.remote is not None:
            number, entry, sharded = saved.remote
            buffer = self._buffer(number)
            check(0 <= entry < buffer.entries, f"{v!r} is in slot {entry} of {buffer!r}")
            v.location_info = LocationInfo(buffer, entry, sharded)
        if saved.group_axis is not None:
            check(0 <= saved.group_axis < len(v.shape), f"{v!r} has no axis {saved.group_axis}")
            v.group_axis = saved.group_axis

    def _add_ties(self, t: Tensor, saved: SavedTensor) -> None:
        """Link a tensor to other existing tensors."""
        if saved.bound is not None:
            t.bound_to(self._tensors[saved.bound])
        check(not saved.by_ref or t in t.graph.inputs, f"{t!r} is by reference, and no input")
        if saved.piece is None:
            return
        check(isinstance(t, Variable), f"{t!r} is no variable and is in pieces")
        shard, buffer = self._tensors[saved.piece], t.location_info.buffer
        check(type(shard) is Tensor and shard.graph_ref is t.graph_ref, f"the piece of {t!r} is {shard!r}")
        fits = buffer is not None and shard.spec.to_tuple() == buffer.spec.to_tuple()
        check(fits, f"the piece of {t!r} is {shard!r}, which is not what a slot of {buffer!r} holds")
        t.piece = shard  # type: ignore[attr-defined]
        self._shards.append(shard)

    def _add_ops(self, graph: Graph, saved: SavedGraph) -> None:
        """Create the ops of a graph. Each reads earlier results and creates unique ones."""
        available = {t for t in graph.tensors if isinstance(t, Variable | Constant)} | {*graph.inputs}
        check(not any(isinstance(t, Variable | Constant) for t in graph.inputs), f"{graph.title} has odd inputs")
        available |= {t for t in self._shards if t.graph_ref is graph.ref}
        earlier: set[int] = set()
        for saved_op in saved.ops:
            op = self._op(graph, saved_op)
            for t in op.inputs:
                check(t in available, f"{op!r} reads {t.id!r}, which nothing has made before it")
            for t in op.outputs:
                check(type(t) is Tensor and t not in available, f"{op!r} makes {t.id!r}, which is there already")
                available.add(t)
            check({*op.after} <= earlier, f"{op!r} comes after ops that do not come before it")
            graph.take_in(op)
            earlier.add(op.id)
        for t in graph.outputs:
            check(t in available, f"{graph.title} returns {t.id!r}, which nothing makes")

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
            ipu=checked_location((saved.ipu, None))[0],
            io_tiles=saved.io_tiles,
            location=checked_location(saved.location),
            execution_context=ExecutionContext[saved.execution_context],
            after=saved.after,
        )
        check(saved.id >= 0, f"{what} has a negative number")
        check(saved.operands is None or len(saved.operands) == len(op.inputs), f"{what} names {saved.operands}")
        check({*kind.graphs} <= attributes.keys(), f"{what} does not have the graphs {kind.graphs} to run")
        if kind.ipus:
            ipus: Any = attributes[kind.ipus]
            check(len(ipus) == len(op.outputs), f"{what} has {len(op.outputs)} results, on the IPUs {ipus}")
        return op

    def _check_ops(self) -> None:
        """Check each op and its parts: overwrites, results, and optionally traceability by JAX."""
        for op in (op for graph in self._ir.graphs for op in graph.ops):
            check_overwritten(op)
            for checked in dict.fromkeys((op, *op.parts)):
                checked.kind.verify(checked)
                if self._traces:
                    checked.kind.try_out(checked)

    def _set_transfers(self) -> None:
        streams = self._ir.main_graph._streams
        for name, count in self._program.stream_transfers.items():
            check(name in streams, f"{name!r} has {count} transfers, and is no stream")
            check(count > 0, f"the stream {name!r} has {count} transfers")
            self._ir.stream_transfers[name] = count

    def _check_sizes(self) -> None:
        """Check total sizes required at session creation: per replica and per transfer."""
        ir = self._ir
        replicas = ir.options.instance_replication_factor
        for t in self._tensors.values():
            check_size(repr(t), t.spec, replicas)
        for stream in self._streams.values():
            check_size(str(stream), stream.spec, replicas * stream.num_host_transfers)
        entries = sum(buffer.nbytes for buffer in ir.remote_buffers) * replicas
        check(entries <= LARGEST, f"the remote buffers would have {entries} bytes; the most is {LARGEST}")

    def _set_counters(self) -> None:
        """Set next free numbers, unused by existing objects."""
        counters = self._program.counters
        ops = (member.id for graph in self._ir.graphs for op in graph.ops for member in (op, *op.parts))
        named = (re.search(r"_subgraph\((\d+)\)$", graph.id) for graph in self._ir.graphs)
        used = {"op_ids": max(ops, default=-1), "subgraph_numbers": max((int(m[1]) for m in named if m), default=-1)}
        for name in self._ir.counters:
            check(counters[name] > used.get(name, -1), f"the next of {name} is {counters[name]}, which is taken")
            self._ir.counters[name] = counters[name]

    def kind(self, saved: Any, inputs: int) -> OpKind:
        """Look up a declaration by key, or recreate a derived gradient op."""
        if isinstance(saved, dict):
            fields = {name: self.value(value) for name, value in saved.items() if name != "vjp"}
            base = self.kind(saved["vjp"], len(fields["inputs"]))
            derivation = Derivation(base, **fields)
            runs_others = base.runs is not None or base.stands_for is not None
            check(not runs_others, f"a gradient by JAX of {base.name}, which runs others")
            gradient, reads = vjp_kind(derivation)
            if len(reads) + len(fields["given"]) != inputs:
                raise _Unknown(
                    f"Ir.load: the gradient of {base.name} was saved with {inputs} operands and "
                    f"has {len(reads) + len(fields['given'])} here; this version of JAX or of the op's declaration "
                    "differs from the one that the program was saved with. Build the program again."
                )
            return gradient
        check(isinstance(saved, str), f"{saved!r} is no key of an op")
        kind = OpKind.named(saved) or kind_with_key(saved)
        if kind is None:
            raise _Unknown(
                f"Ir.load: the program uses an op with the key {saved!r}, and no op has been declared under it. "
                "Declare it, or import the module that does, before the program is loaded."
            )
        return kind

    def value(self, value: Any) -> Any:
        """The value that was written."""
        if not isinstance(value, dict):
            check(not isinstance(value, list), f"{value!r} is no value")
            return value
        ((what, content),) = value.items()
        return self._constructors[what](self, content)

    def _spec(self, content: Any) -> TensorSpec:
        shape, name, meta_shape = content
        spec = TensorSpec(checked_shape(shape), dtype_.from_name(name), checked_shape(meta_shape))
        check_size(f"a tensor {brief(spec)}", spec)
        return spec

    def _graph(self, value: Any) -> Graph:
        """The op's called graph, stored nowhere else."""
        check(isinstance(value, dict) and value.keys() == {"graph"}, f"{value!r} is no graph")
        return self._graphs[value["graph"]]

    def _exchanged_op(self, content: Any) -> MergedOp:
        known = {name: self.value(v) for name, v in content.items() if name not in ("kind", "source")}
        kind = self.kind(content["kind"], known["inputs"])
        file, line, function = content["source"]
        part = MergedOp(kind, source=SourceLocation(str(file), int(line), str(function)), **known)
        check(bool(kind.exchange) and not kind.graphs, f"{part!r} cannot be a part of an exchange")
        check(isinstance(part.attributes, dict) and isinstance(part.name, str), f"{part!r} has odd attributes")
        check(type(part.inputs) is int and part.inputs >= 0, f"{part!r} has {part.inputs} inputs")
        check(all(isinstance(spec, TensorSpec) for spec in part.outputs), f"{part!r} has odd outputs")
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
        check(type(self._streams[id]) is kind, f"the stream {id!r} goes both ways")
        return self._streams[id]

    def _buffer(self, number: int) -> RemoteBuffer:
        if not 0 < number <= len(self._ir.remote_buffers):
            raise ValueError(f"there is no remote buffer with the number {number}")
        return self._ir.remote_buffers[number - 1]

    _constructors: Mapping[str, Callable[[_Reader, Any], Any]] = {
        "array": lambda self, name: self._arrays[name][()],  # an array without dimensions was a number of NumPy
        "float": lambda self, text: float(text),
        "dtype": lambda self, name: dtype_.from_name(name),
        "spec": _spec,
        "part": _exchanged_op,
        "stream": _stream,
        "buffer": _buffer,
        "strided": lambda self, pair: self._ir.replica_grouping(*pair),
        "assigned": lambda self, assignment: self._ir.replica_grouping_from_assignments(assignment),
        "dict": lambda self, items: {self.value(k): self.value(v) for k, v in items},
        "tuple": lambda self, items: tuple(map(self.value, items)),
        "list": lambda self, items: list(map(self.value, items)),
        "frozenset": lambda self, items: frozenset(map(self.value, items)),
    }
