"""Programs that several processes run together, or one alone: what they compute has to be the same.

Each is a function of the replicas for its `Ir`, and of `share`, which takes what a process has of the arrays of all
replicas. It returns what every process knows, and what each replica has stored, one row for each. Run as a script by
`poprun`, this does all of them and writes what they return: `shared_programs.py FOLDER`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import popdist
import popxl
import popxl_addons as addons
from popxl import ops
from popxl.transforms import autodiff
from popxl_addons import checkpoint

Share = Callable[[np.ndarray], np.ndarray]
Results = tuple[dict[str, Any], dict[str, Any]]
Replication = int | Literal["popdist"]

REPLICAS = 4


def training(replication: Replication, share: Share, calls: Any = "kept", buffers: Any = "device") -> Results:
    """Data-parallel training: gradients are summed over all replicas; two transfers a run."""
    ir = popxl.Ir(replication)
    ir.options.calledGraphs, ir.options.remoteBuffers = calls, buffers
    ir.num_host_transfers = 2

    def model(x: Any, w: Any) -> Any:
        return ops.sum(ops.gelu(x @ w))

    rng = np.random.default_rng(1)
    with ir.main_graph, popxl.in_sequence():
        into, out = popxl.h2d_stream((3, 5), popxl.float32), popxl.d2h_stream((), popxl.float32)
        w = popxl.variable(rng.normal(size=(5, 2)).astype(np.float32), name="w")
        apart = popxl.variable(np.zeros(REPLICAS, np.float32), replica_grouping=ir.replica_grouping(group_size=1))
        graph = ir.create_graph(model, popxl.TensorSpec((3, 5), popxl.float32), w)
        info = autodiff(graph, grads_required=graph.inputs[1:])
        for _ in range(2):
            x = ops.host_load(into)
            site = ops.call_with_info(graph, x, w)
            (gradient,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
            ops.scaled_add_(w, ops.collectives.replicated_all_reduce(gradient, "mean"), b=-0.1)
            ops.add_(apart, ops.reshape(site.outputs[0], ()))
            ops.host_store(out, site.outputs[0])
    with popxl.Session(ir, "ipu_hw") as session:
        runs = [rng.normal(size=(2, REPLICAS, 3, 5)).astype(np.float32) for _ in range(3)]
        losses = [
            session.run({into: share(data.swapaxes(0, 1)).swapaxes(0, 1).reshape(session.host_shape((3, 5)))})[out]
            for data in runs
        ]
    own = np.stack(losses, 0).reshape(3, 2, -1)
    return {"w": session.get_tensor_data(w), "apart": session.get_tensor_data(apart)}, {
        "losses": np.moveaxis(own, 2, 0)
    }


def grouped_variables(replication: Replication, share: Share) -> Results:
    """Groups that lie in one process, and across; values read from all replicas; values written while it runs."""
    ir = popxl.Ir(replication)
    with ir.main_graph, popxl.in_sequence():
        across = ir.replica_grouping(stride=2, group_size=2)
        into, out = popxl.h2d_stream((3,), popxl.float32), popxl.d2h_stream((3,), popxl.float32)
        x = ops.host_load(into)
        v = popxl.variable(np.arange(6, dtype=np.float32).reshape(2, 3), replica_grouping=across)
        mixed = popxl.variable(
            np.arange(6, dtype=np.float32).reshape(2, 3),
            replica_grouping=ir.replica_grouping_from_assignments([0, 1, 1, 0]),
        )
        every = popxl.variable(np.float32([1, 2, 3]), retrieval_mode="all_replicas")
        unchanged = popxl.variable(np.float32([3, 2, 1]), popxl.float16)
        ops.add_(v, ops.collectives.replicated_all_reduce(x, "add", group=across))
        ops.add_(mixed, x * ops.cast(unchanged, popxl.float32))
        ops.add_(every, ops.collectives.replicated_all_reduce(x, "max", group=ir.replica_grouping(group_size=2)))
        ops.host_store(out, v + mixed + every)
    data = np.random.default_rng(2).integers(-9, 9, (REPLICAS, 3)).astype(np.float32)
    known, own = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", popxl.errors.DriftingVariableWarning)  # `mixed`
        session = popxl.Session(ir, "ipu_hw")
    with session:
        fed = share(data).reshape(session.host_shape((3,)))
        own["first"] = np.asarray(session.run({into: fed})[out]).reshape(-1, 3)
        known["v"] = session.get_tensor_data(v).copy()
        session.write_variables_data({v: v.data * 2, mixed: mixed.data + 100})
        room = session.create_host_outputs()
        session.run_with_outputs({into: jax.numpy.asarray(fed)}, room)
        own["second"] = room[out].reshape(-1, 3)
    for name, t in {"v after": v, "mixed": mixed, "every": every, "unchanged": unchanged}.items():
        known[name] = session.get_tensor_data(t)
    return known, own


def sharded_variables(replication: Replication, share: Share, buffers: Any = "device") -> Results:
    """Each replica holds a piece of a remote variable, and slots of a buffer that no variable fills."""
    ir = popxl.Ir(replication)
    ir.options.remoteBuffers = buffers
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.replica_sharded_buffer((10,), popxl.float32, entries=2)
        w = popxl.remote_replica_sharded_variable(np.arange(10, dtype=np.float32), buffer, 0)
        pieces = ir.replica_grouping(group_size=1)
        kept = popxl.remote_buffer((2,), popxl.float32, 2)
        each = popxl.remote_variable(np.arange(8, dtype=np.float32).reshape(4, 2), kept, 1, replica_grouping=pieces)
        into, out = popxl.h2d_stream((10,), popxl.float32), popxl.d2h_stream((10,), popxl.float32)
        piece = ops.remote_load(buffer, 0)
        ops.add_(piece, ops.collectives.replicated_reduce_scatter(ops.host_load(into), "add"))
        ops.remote_store(buffer, 0, piece)
        own = ops.remote_load(kept, 1)
        ops.remote_store(kept, 1, own * 2.0)
        ops.remote_store(kept, 0, ops.remote_load(kept, 0) + own)
        gathered = ops.collectives.replicated_all_gather(piece)
        ops.host_store(out, ops.reshape(gathered, (-1,))[:10] + ops.sum(ops.remote_load(kept, 0)))
    data = np.random.default_rng(3).integers(-9, 9, (REPLICAS, 10)).astype(np.float32)
    with popxl.Session(ir, "ipu_hw") as session:
        fed = share(data).reshape(session.host_shape((10,)))
        session.run({into: fed})
        session.weights_to_host()
        session.write_variable_data(each, each.data + 1)  # keeps the other slot
        stored = np.asarray(session.run({into: fed})[out]).reshape(-1, 10)
    return {"w": session.get_tensor_data(w), "each": session.get_tensor_data(each)}, {"stored": stored}


def seeds(replication: Replication, share: Share) -> Results:
    """Each replica draws from its own seed: one that is fed, and one that is kept."""
    ir = popxl.Ir(replication)
    values = popxl.create_seeds(5, replicas=REPLICAS)
    with ir.main_graph, popxl.in_sequence():
        into, out = popxl.h2d_stream((2,), popxl.uint32), popxl.d2h_stream((8,), popxl.float32)
        kept = popxl.variable(values, popxl.uint32, replica_grouping=ir.replica_grouping(group_size=1))
        ops.host_store(out, ops.random_normal(ops.host_load(into), (8,)) + ops.random_uniform(kept, (8,)))
        ops.add_(kept, popxl.constant(1, popxl.uint32))
    with popxl.Session(ir, "ipu_hw") as session:
        fed = share(values).reshape(session.host_shape((2,)))
        drawn = [np.asarray(session.run({into: fed})[out]).reshape(-1, 8) for _ in range(2)]
    return {"kept": session.get_tensor_data(kept)}, {"drawn": np.stack(drawn, 1)}


def other_dtypes(replication: Replication, share: Share) -> Results:
    """What JAX or NumPy have in another way: 64 bits, float8, bool."""
    ir = popxl.Ir(replication)
    with ir.main_graph, popxl.in_sequence():
        alone = ir.replica_grouping(group_size=1)
        v = popxl.variable(np.arange(4, dtype=np.int64) << 40, popxl.int64, replica_grouping=alone, downcast=False)
        into, out = popxl.h2d_stream((2,), popxl.float8_143), popxl.d2h_stream((2,), popxl.float8_143)
        flag = popxl.d2h_stream((), popxl.bool)
        ops.host_store(out, ops.reshape(ops.host_load(into), (2,)))
        ops.host_store(flag, ops.greater(v, popxl.constant(1 << 41, popxl.int64, downcast=False)))
        ops.add_(v, popxl.constant(1, popxl.int64, downcast=False))
    data = np.arange(8, dtype=np.uint8).reshape(4, 2)
    with popxl.Session(ir, "ipu_hw") as session:
        outputs = session.run({into: share(data).reshape(session.host_shape((2,)))})
        own = {"flag": outputs[flag].reshape(-1), "float8": outputs[out].reshape(-1, 2).view(np.uint8)}
    return {"v": session.get_tensor_data(v)}, own


def alone(replication: Replication, share: Share) -> Results:
    """Beside the program of all, each process may run one of its own, on its own devices."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(np.float32([1, 2]), replica_grouping=ir.replica_grouping(group_size=1))
        ops.add_(v, ops.collectives.replicated_all_reduce(v))
    with popxl.Session(ir, "ipu_hw") as session:
        session.run()
    return {"v": session.get_tensor_data(v)}, {}


def pipeline(replication: Replication, share: Share, placement: Any = "several") -> Results:
    """Two stages on two IPUs of each replica, over micro-batches, with a collective in each: each IPU is a device, if
    there are enough of them."""
    ir = popxl.Ir(replication)
    ir.options.placement = placement
    ir.num_host_transfers = 3
    with ir.main_graph, popxl.in_sequence():
        into, out = popxl.h2d_stream((2,), popxl.float32), popxl.d2h_stream((2,), popxl.float32)
        w = [popxl.variable(np.float32([k + 1, 2]), name=f"w{k}") for k in range(2)]

        def step(w0: popxl.TensorByRef, w1: popxl.TensorByRef) -> None:
            with popxl.ipu(0):
                x = ops.host_load(into)
                y = ops.sin(x * w0)
                ops.add_(w0, ops.collectives.replicated_all_reduce(y) * 0.1)
                y = ops.ipu_copy(y, 1)
            with popxl.ipu(1):
                z = y + w1
                ops.add_(w1, ops.collectives.replicated_all_reduce(z) * 0.1)
                ops.host_store(out, z)

        step.__annotations__ = {"w0": popxl.TensorByRef, "w1": popxl.TensorByRef}
        ops.repeat(ir.create_graph(step, *w), 3, *w)
    with popxl.Session(ir, "ipu_hw") as session:
        assert session.program.layout.ipus == ((0, 1) if placement == "several" else (0,)), session.program.reason
        data = np.random.default_rng(5).normal(size=(3, REPLICAS, 2)).astype(np.float32)
        own = session.run({into: share(data.swapaxes(0, 1)).swapaxes(0, 1).reshape(session.host_shape((2,)))})[out]
    known = {v.name: session.get_tensor_data(v) for v in w}
    return known, {"out": np.moveaxis(np.asarray(own).reshape(3, -1, 2), 1, 0)}


def several_ipus(replication: Replication, share: Share) -> Results:
    """A buffer in the host's memory that two IPUs use; a third one is only in a branch, which replicas take alone."""
    ir = popxl.Ir(replication)
    ir.options.placement, ir.options.remoteBuffers = "several", "host"
    rng = np.random.default_rng(7)
    with ir.main_graph, popxl.in_sequence():
        into, out = popxl.h2d_stream((3,), popxl.float32), popxl.d2h_stream((3,), popxl.float32)
        buffer = popxl.remote_buffer((3,), popxl.float32, 1)
        v = popxl.remote_variable(rng.normal(size=3).astype(np.float32), buffer, 0)
        x = ops.host_load(into)

        def far(x: popxl.Tensor) -> popxl.Tensor:
            with popxl.ipu(2):
                return ops.exp(x)

        branches = ir.create_graph(far, x), ir.create_graph(ops.negate, x)
        (y,) = ops.conditional(ops.cast(ops.sum(x), popxl.bool), *branches, [x], [x])
        for ipu in (1, 0, 1):
            with popxl.ipu(ipu):
                t = ops.remote_load(buffer, 0)
                ops.remote_store(buffer, 0, ops.sin(t) + ops.collectives.replicated_all_reduce(x))
        ops.host_store(out, y)
    with popxl.Session(ir, "ipu_hw") as session:
        assert session.program.layout.ipus == ((0, 1) if replication == "popdist" else (0,)), session.program.reason
        data = share(rng.normal(size=(REPLICAS, 3)).astype(np.float32))
        own = session.run({into: data.reshape(session.host_shape((3,)))})[out]
    return {"v": session.get_tensor_data(v)}, {"out": np.asarray(own).reshape(-1, 3)}


def checkpoint_in_pieces(replication: Replication, share: Share) -> Results:
    """Each process saves its pieces, while the program runs on. What is read is what was, and goes back."""
    ir = popxl.Ir(replication)
    with ir.main_graph, popxl.in_sequence():
        w, piece = popxl.replica_sharded_variable(np.arange(5, dtype=np.float32), name="w")
        whole = popxl.variable(np.arange(3), popxl.float16, "whole")
        columns = popxl.variable(
            np.arange(12, dtype=np.float32).reshape(2, 2, 3), name="columns", replica_grouping=ir.replica_grouping(2, 2)
        )
        columns.group_axis = 1
        every = popxl.variable(1.0, popxl.float32, "every", retrieval_mode="all_replicas")
        described = popxl.variable(popxl.initial.normal((4, 3), seed=5), popxl.float32, "described")
        buffer = popxl.replica_sharded_buffer((7,), popxl.float32, entries=2)
        remote = popxl.remote_replica_sharded_variable(np.arange(7, dtype=np.float32), buffer, 1)
        for v in (piece, whole, columns, every):
            ops.add_(v, popxl.constant(1, v.dtype))
        ops.remote_store(buffer, 1, ops.remote_load(buffer, 1) * 2.0)
        tensors = {"w": w, "whole": whole, "columns": columns, "every": every, "described": described}
        state = addons.NamedTensors.from_dict({**tensors, "remote": remote, "constant": popxl.constant(np.arange(2.0))})
    session = addons.TaskSession([], [], state, ir=ir, device_desc="ipu_hw")
    is_shared, known = replication == "popdist", {}
    with contextlib.nullcontext(sys.argv[1]) if is_shared else tempfile.TemporaryDirectory() as folder, session:
        session.run()
        session.save_checkpoint(f"{folder}/checkpoint", wait=False)
        session.run()
        session.wait_for_checkpoint()
        popdist.synchronize()
        with checkpoint.open_checkpoint(f"{folder}/checkpoint") as directory:
            known |= checkpoint.read_arrays(directory)
            assert is_shared == (directory / checkpoint.INDEX).exists()
            if is_shared:  # what each process has written of `w`, of which 4 replicas have 2, 2, 1 and 0 elements
                sizes = [checkpoint.read_arrays(own)["w"].size for own in sorted(directory.glob("pieces/*"))]
                assert sizes in ([4, 1], [2, 2, 1, 0])
        state.pop("every")  # is read from all replicas, and cannot be written
        session.load_checkpoint(f"{folder}/checkpoint", report_missing="none")
        session.run()
        known |= {f"{name} after": array for name, array in session.get_named_tensors_data().to_dict().items()}
    return known, {}


def checkpoint_of_borrowed_variables(replication: Replication, share: Share) -> Results:
    """A session saves what another session has: each process its pieces."""

    def program() -> tuple[popxl.Ir, popxl.Variable]:
        ir = popxl.Ir(replication)
        with ir.main_graph:
            rows = np.arange(8, dtype=np.float32).reshape(REPLICAS, 2)
            w = popxl.variable(rows, replica_grouping=ir.replica_grouping(group_size=1), name="w")
            ops.add_(w, popxl.constant(1, w.dtype))
        return ir, w

    (lent, theirs), (ir, mine) = program(), program()
    state = addons.NamedTensors.from_dict({"w": mine})
    is_shared = replication == "popdist"
    with (
        contextlib.nullcontext(sys.argv[1]) if is_shared else tempfile.TemporaryDirectory() as folder,
        popxl.Session(lent, "ipu_hw") as owner,
        addons.TaskSession([], [], state, ir=ir, device_desc="ipu_hw") as session,
    ):
        session.use_variables_of(owner, {mine: theirs})
        owner.run()
        session.run()
        session.save_checkpoint(f"{folder}/borrowed")
        popdist.synchronize()
        with checkpoint.open_checkpoint(f"{folder}/borrowed") as directory:
            return checkpoint.read_arrays(directory), {}


def communication(replication: Replication, share: Share) -> Results:
    """What is sent is what the program says, also where CPU devices of several processes sum in order."""
    ir = popxl.Ir(replication, axes={"data": 2, "tensor": 2})

    def layer(x: popxl.Tensor) -> popxl.Tensor:
        pieces = ops.collectives.replicated_reduce_scatter(x, "mean", "data", True)
        x += ops.collectives.replicated_all_gather(pieces, 0, "data")
        return x + ops.collectives.replicated_all_reduce(ops.tanh(x), "add", "tensor")

    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((3, 5), popxl.float32))
        graph = ir.create_graph(layer, x)
        for _ in range(2):
            (x,) = ops.call(graph, x)
        total = ops.collectives.replicated_all_reduce(x, "mean")
        count = ops.collectives.replicated_all_reduce(ops.cast(x > 0.0, popxl.int32))
        ops.host_store(popxl.d2h_stream((3, 5), popxl.float32), total + ops.cast(count, popxl.float32))
    sent = popxl.Session(ir, "ipu_hw").communication()
    assert not sent.differences, sent
    assert replication != "popdist" or {"all-to-all", "all-gather", "all-reduce"} == {e.kind for e in sent.exchanges}
    return {"differences": np.int64(len(sent.differences))}, {}


PROGRAMS: dict[str, Callable[[Replication, Share], Results]] = {
    "training": training,
    "training, dispatched": lambda replication, share: training(replication, share, calls="dispatched"),
    "grouped variables": grouped_variables,
    "sharded variables": sharded_variables,
    "sharded variables on the host": lambda replication, share: sharded_variables(replication, share, buffers="host"),
    "seeds": seeds,
    "communication": communication,
    "other dtypes": other_dtypes,
    "alone": alone,
    "pipeline": pipeline,
    "several IPUs": several_ipus,
    "checkpoint in pieces": checkpoint_in_pieces,
    "checkpoint of borrowed variables": checkpoint_of_borrowed_variables,
    "pipeline on one device": lambda replication, share: pipeline(replication, share, "one"),
}


def listening() -> list[str]:
    """The addresses at which this process listens to others, on Linux."""
    sockets = {f"socket:[{line[9]}]": line[1] for line in _connections() if line[3] == "0A"}
    opened = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()}
    return [_address(where.split(":")[0]) for name, where in sockets.items() if name in opened]


def _connections() -> list[list[str]]:
    tables = (Path(f"/proc/self/net/{protocol}") for protocol in ("tcp", "tcp6"))
    return [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]


def _address(words: str) -> str:
    """An address as one writes it, of one as Linux lists it: words of four bytes, the last byte first."""
    data = bytes.fromhex(words)
    address = ipaddress.ip_address(b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4)))
    return str(getattr(address, "ipv4_mapped", None) or address)


def main(folder: Path, *names: str) -> None:
    first, count = popdist.getReplicaIndexOffset(), popdist.getNumLocalReplicas()
    results: dict[str, np.ndarray] = {}
    for name in names:
        known, own = PROGRAMS[name]("popdist", lambda data: data[first : first + count])
        results |= {f"{name}/known/{key}": value for key, value in known.items()}
        results |= {f"{name}/own/{key}": value for key, value in own.items()}
    results["listening"] = np.array(listening(), str)
    np.savez(folder / f"{popdist.getInstanceIndex()}.npz", **results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
