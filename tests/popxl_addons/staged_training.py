"""A pipeline's training over several processes, each of which drives some stages: the numbers are those of one process.

Each layer has momentum, in the device's memory, in a remote buffer or in pieces along the replicas. Run by `poprun`,
this trains by each schedule that it is told, and writes what each process knows:

    poprun --num-instances 4 --num-replicas 2 --ipus-per-replica 4 \
        python -m tests.popxl_addons.staged_training FOLDER CHECKPOINTS gpipe 1f1b:remote
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import popdist
import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.transforms.pipelining import pipelined_execution

F32 = popxl.float32
WIDTH, ROWS = 3, 2

SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved": "1f1b",
    "zero_bubble": "zero_bubble",
    "zero_bubble_v": "zero_bubble_v",
    "dualpipe_v": "dualpipe_v",
    "search": "search",
}
"""What to call them, and their names."""


class Training:
    """Layers on IPUs, trained by a schedule.

    Args:
        schedule: which: see `SCHEDULES`.
        ipus: how many stages go forward on different IPUs.
        memory: where momentum is: "device", "remote", "pieces" or "remote pieces".
        remote: which memory remote buffers are in.
    """

    def __init__(self, schedule: str, ipus: int, memory: str = "device", remote: Any = "device") -> None:
        ir = self.ir = popxl.Ir("popdist")
        ir.options.placement, ir.options.remoteBuffers = "several", remote
        self.steps = steps = ir.num_host_transfers = 2 * ipus
        forward = [*range(ipus)]
        forward += {"interleaved": forward, "zero_bubble_v": forward[::-1], "dualpipe_v": forward[::-1]}.get(
            schedule, []
        )
        rng, count = np.random.default_rng(1), len(forward)
        with ir.main_graph, popxl.in_sequence():
            self.x = popxl.h2d_stream((ROWS, WIDTH), F32, "x")
            w, sums = [], []
            for i, ipu in enumerate(forward):
                with popxl.ipu(ipu):
                    w.append(popxl.variable(rng.normal(size=(WIDTH, WIDTH)), F32, f"w{i}"))
                    sums.append(popxl.variable(np.zeros((WIDTH, WIDTH)), F32, f"sum{i}"))
            with pipelined_execution(steps, SCHEDULES[schedule]) as p:
                inputs, outputs, x = [], [], None
                for i, ipu in enumerate(forward):
                    with p.stage(i), popxl.ipu(ipu):
                        inputs.append(ops.host_load(self.x) if i == 0 else x)
                        outputs.append(ops.tanh(inputs[i] @ w[i]))
                        x = outputs[i] if i == count - 1 else outputs[i].copy_to_ipu(forward[i + 1])
                gradients, dy = {}, None
                for stage, i in enumerate(reversed(range(count)), count):
                    with p.stage(stage), popxl.ipu(forward[i]):
                        y = p.stash_and_restore_tensor(outputs[i])
                        if i == count - 1:
                            self.loss = addons.host_store(ops.sum(y * y))
                            dy = y * 2.0
                        gradients[i] = dy * (1.0 - y * y)
                        if i:
                            dy = (gradients[i] @ w[i].T).copy_to_ipu(forward[i - 1])
                        if "zero" not in schedule and "dual" not in schedule:
                            sums[i] += p.stash_and_restore_tensor(inputs[i]).T @ gradients[i]
                for stage, i in enumerate(reversed(range(count)), 2 * count):
                    if "zero" in schedule or "dual" in schedule:
                        with p.stage(stage), popxl.ipu(forward[i]):
                            gradient = p.stash_and_restore_tensor(gradients[i])
                            sums[i] += p.stash_and_restore_tensor(inputs[i]).T @ gradient
            for i, ipu in enumerate(forward):
                with popxl.ipu(ipu):
                    ops.scaled_add_(w[i], self._momentum(i, sums[i], memory), b=-0.1)
                    ops.scaled_add_(sums[i], sums[i], b=-1.0)

    def _momentum(self, i: int, gradient: popxl.Tensor, memory: str) -> popxl.Tensor:
        """Momentum of a layer with the mean of the replicas' gradients added, a part of each replica if in pieces."""
        start, name = np.full((WIDTH, WIDTH), 0.5, np.float32), f"m{i}"
        if "pieces" in memory:
            gradient = ops.collectives.replicated_reduce_scatter(
                gradient, "mean", configure_output_for_replicated_tensor_sharding=True
            )
        elif self.ir.replication_factor > 1:
            gradient = ops.collectives.replicated_all_reduce(gradient, "mean")
        if memory == "device":
            m = popxl.variable(start, F32, name)
        elif memory == "pieces":
            _, m = popxl.replica_sharded_variable(start, F32, name)
        elif memory == "remote":
            buffer = popxl.remote_buffer(start.shape, F32)
            popxl.remote_variable(start, buffer, 0, F32, name)
        else:
            buffer = popxl.replica_sharded_buffer(start.shape, F32)
            popxl.remote_replica_sharded_variable(start, buffer, 0, F32, name)
        if "remote" in memory:
            m = ops.remote_load(buffer, 0)
        ops.scaled_add_(m, gradient, a=0.9)
        if "remote" in memory:
            ops.remote_store(buffer, 0, m)
        if "pieces" not in memory:
            return m
        return ops.collectives.replicated_all_gather(m).flatten()[: WIDTH * WIDTH].reshape((WIDTH, WIDTH))

    def feed(self, step: int) -> np.ndarray:
        """Micro-batches of the replicas of this process."""
        whole = np.random.default_rng(step).normal(size=(self.steps, 8, ROWS, WIDTH)).astype(np.float32)
        return whole[:, popdist.getReplicaIndexOffset() :][:, : self.ir.instance_replication_factor]

    def session(self) -> addons.TaskSession:
        """A session, with all variables as its state."""
        state = addons.NamedTensors.from_dict({v.name: v for v in self.ir.main_graph.variables})
        return addons.TaskSession([self.x], [self.loss], state, ir=self.ir, device_desc="ipu_model")

    def step(self, session: addons.TaskSession, number: int) -> np.ndarray:
        """Run a step. Returns the losses of the replicas of this process."""
        losses = session.run({self.x: self.feed(number).reshape(session.host_shape((ROWS, WIDTH)))})[self.loss]
        return np.array(losses).reshape(self.steps, -1)


def trained(name: str, checkpoint: Path, ipus: int) -> dict[str, np.ndarray]:
    """Train two steps, with a checkpoint after the first one, and the second one again from there.

    Args:
        name: the schedule; and where momentum is: "gpipe:remote".
        checkpoint: where a checkpoint is to be; if there is one, the first step is left out.
        ipus: how many there are.

    Returns:
        Losses, and the variables in the end.
    """
    schedule, _, memory = name.partition(":")
    found: dict[str, np.ndarray] = {}
    is_first = not checkpoint.exists()
    for turn in range(1 + is_first):
        training = Training(schedule, ipus, memory or "device")
        with training.session() as session:
            assert len(session.program.layout.ipus) == ipus
            if turn == 0 and is_first:
                found["losses of step 0"] = training.step(session, 0)
                session.save_checkpoint(checkpoint)
            else:
                session.load_checkpoint(checkpoint, report_missing="error")
            losses = training.step(session, 1)
            values = {v.name: np.array(session.get_tensor_data(v)) for v in training.ir.main_graph.variables}
        for key, value in {"losses of step 1": losses, **values}.items():
            assert found.setdefault(key, value).tobytes() == value.tobytes(), f"{name}: {key}"
    return found


def various() -> dict[str, np.ndarray]:
    """What two IPUs share: a stream, a buffer, a branch, a loop. Returns outputs and variables."""
    ir = popxl.Ir("popdist")
    ir.options.placement, ir.num_host_transfers = "several", 2
    with ir.main_graph, popxl.in_sequence():
        into, out = popxl.h2d_stream((3,), F32, "in"), popxl.d2h_stream((3,), F32, "out")
        buffer = popxl.remote_buffer((3,), F32)
        kept = popxl.remote_variable(np.float32([3, 1, 2]), buffer, 0, F32, "kept")
        total = popxl.variable(np.zeros(3), F32, "total")
        first = ops.host_load(into)
        there = first.copy_to_ipu(1)
        with popxl.ipu(1):
            ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + there * ops.host_load(into))
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) * 2.0)

        def far(x: popxl.Tensor) -> popxl.Tensor:
            y = ops.ipu_copy(x, 1, source=0)
            with popxl.ipu(1):
                y = ops.exp(y)
            return y.copy_to_ipu(0)

        positive = ops.cast(ops.greater(ops.sum(first), popxl.constant(0.0)), popxl.bool)
        branches = ir.create_graph(far, first), ir.create_graph(ops.negate, first)
        (y,) = ops.conditional(positive, *branches, [first], [first])
        ops.add_(total, *ops.repeat(branches[0], 3, first * 0.1))
        ops.host_store(out, y)
        with popxl.ipu(1):
            ops.host_store(out, there + 1.0)
    found: dict[str, np.ndarray] = {}
    with popxl.Session(ir, "ipu_model") as session:
        assert len(session.program.layout.ipus) == 2, session.program.reason
        for step in range(3):
            data = np.random.default_rng(step).normal(size=(2, ir.replication_factor, 3)).astype(np.float32)
            own = data[:, popdist.getReplicaIndexOffset() :][:, : ir.instance_replication_factor]
            stored = session.run({into: own.reshape(session.host_shape((3,)))})[out]
            found[f"losses of step {step}"] = np.array(stored).reshape(2, -1, 3)
        session.write_variable_data(total, session.get_tensor_data(total) + 1.0)
        session.run({into: own.reshape(session.host_shape((3,)))})
    return found | {v.name: session.get_tensor_data(v) for v in (kept, total)}


def main(folder: Path, others: Path, *names: str) -> None:
    """Train by schedules, and write what this process knows. With a checkpoint of `others`, train from there, too."""
    found = {}
    for name in names:
        is_various = name == "various"
        results = various() if is_various else trained(name, folder / name, popdist.getNumIpusPerReplica())
        if (others / name).exists():
            for key, value in trained(name, others / name, popdist.getNumIpusPerReplica()).items():
                assert results[key].tobytes() == value.tobytes(), f"{name}: {key}"
        found |= {f"{name}: {key}": value for key, value in results.items()}
    np.savez(folder / f"{popdist.getInstanceIndex()}.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
