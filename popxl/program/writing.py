"""Serialisation of an `Ir` to a file: its parts, as in `popxl.program.saved`, and the numbers. See `Ir.save`."""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from popxl.base.atomic_files import replace_file
from popxl.base.container import pack
from popxl.base.version import VERSION
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ops.exchange import MergedOp
from popxl.options import OF_THE_RUN
from popxl.program.saved import (
    ARRAYS,
    FORMAT,
    KIND,
    SavedBuffer,
    SavedGraph,
    SavedOp,
    SavedProgram,
    SavedTensor,
    safetensors_library,
)
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import ReplicaGrouping
from popxl.streams import Stream
from popxl.transforms.jax_kinds import Function
from popxl.values.spec import TensorSpec

if TYPE_CHECKING:
    from popxl.ir import Ir


def save(ir: Ir, path: str | os.PathLike[str]) -> None:
    """See `Ir.save`."""
    replace_file(Path(path), packed(ir))


def packed(ir: Ir) -> bytes:
    """File content of a program."""
    writer = _Writer()
    with ir.host_copies.lock:
        program = writer.program(ir)
    about = program.model_dump_json(exclude={"options": OF_THE_RUN, "arrays": True, "digest": True})
    return pack(KIND, about, {ARRAYS: safetensors_library().numpy.save(writer.arrays)})


def fingerprint(ir: Ir) -> str:
    """Digest of a program's behaviour, independent of variable values and source locations.

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
    """Collected program parts and referenced arrays, keyed by tensor id or number."""

    def __init__(self, variables: bool = True) -> None:
        self._numbers_of = Variable | Constant if variables else Constant
        self.arrays: dict[str, np.ndarray] = {}

    def program(self, ir: Ir) -> SavedProgram:
        return SavedProgram(
            format=FORMAT,
            popxl=VERSION,
            options=ir.options,
            num_host_transfers=ir.num_host_transfers,
            axes={} if ir.named_axes is None else ir.named_axes.mapping,
            stream_transfers=dict(sorted(ir.stream_transfers.items())),
            counters=ir.counters,
            graphs=[self.graph(graph) for graph in ir.graphs],
            buffers=[
                SavedBuffer(slot=self.value(b.spec, repr(b)), entries=b.entries, shard_over=b.shard_over)
                for b in ir.remote_buffers
            ],
        )

    def graph(self, graph: Graph) -> SavedGraph:
        rule = graph.derivative
        return SavedGraph(
            id=graph.id,
            inputs=[t.id for t in graph.inputs],
            outputs=[t.id for t in graph.outputs],
            differentiable=graph.differentiable,
            derivative=None if rule is None else (rule.name, rule.results),
            keeps=None if graph.keeps is None else sorted(t.id for t in graph.keeps),
            offloads=sorted(t.id for t in graph.offloads),
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
            path=t._path,
        )
        if isinstance(t, self._numbers_of):
            initial = t.initial if isinstance(t, Variable) else None
            if initial is not None and initial.is_complete:
                saved.begins = initial.model_dump(mode="json")
            else:
                self.array(t.data if initial is None else initial.numbers(t.dtype), t.id)
        if isinstance(t, Variable):
            saved.grouping, saved.retrieval_mode = self.value(t.replica_grouping, t.id), t.retrieval_mode
            if t.location_info.isRemote():
                saved.remote = (*t.location_info.getRemoteBufferInfo(), t.location_info.sharded)
            saved.piece = None if t.piece is None else t.piece.id
            saved.group_axis = t.group_axis
        return saved

    def array(self, array: np.ndarray, name: str | None = None) -> str:
        name = f"#{len(self.arrays)}" if name is None else name
        if array.dtype == np.complex128:
            raise PopxlError(f"Ir.save: {name} is of complex128, which cannot be saved; use popxl.complex64.")
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

    def kind(self, kind: OpKind, op: Op | MergedOp) -> Any:
        """Key of a declaration, or derivation of a JAX gradient op."""
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
            **({"reads_outputs": True} if of.reads_outputs else {}),  # earlier files lack it
        }

    def merged_op(self, op: MergedOp) -> dict[str, Any]:
        """Parts of an op that was merged into another one."""
        known = {f.name: getattr(op, f.name) for f in fields(MergedOp) if f.name not in ("kind", "source")}
        source = [op.source.file, op.source.line, op.source.function]
        saved = {name: self.value(value, f"`{name}` of {op!r}") for name, value in known.items()}
        return {"kind": self.kind(op.kind, op), "source": source, **saved}

    def value(self, value: Any, what: str) -> Any:
        """Encode a value as JSON. Types without JSON form become single-key objects named after the type."""
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
        if isinstance(value, MergedOp):
            return {"part": self.merged_op(value)}
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
        if isinstance(value, Function):
            raise PopxlError(
                f"Ir.save: {what} is {value!r}, code of JAX, which cannot be saved. Print the graph: the op says why "
                "it is one and not a graph. Write it with other functions; or keep what was compiled, with "
                "`session.save` or `popxl.export`."
            )
        raise PopxlError(
            f"Ir.save: {what} is {value!r} ({type(value).__name__}), which cannot be saved. Attributes of ops that are "
            "saved are numbers, strings, arrays, dtypes, specs, graphs, streams, remote buffers, and tuples, lists and "
            "dicts of these."
        )
