"""The specification's programs of several replicas, with their numbers: streams, groupings, collectives, remote
variables, and variables in pieces.

One process runs them, or several that share the replicas out, on however many devices there are. As a script this runs
all of them, or those of as many replicas as `poprun` was told of, and prints their names:

    POPXL_CPU_DEVICES=4 python -m tests.popxl.replicated_programs
    poprun --num-instances 2 --num-replicas 8 python -m tests.popxl.replicated_programs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

import popdist
import popxl
from popxl import ops

F32, I32 = popxl.float32, popxl.int32
collectives = ops.collectives
equal = np.testing.assert_array_equal

Arrays = Mapping[Any, Any]
"""For streams, arrays of all replicas, with a dimension for these also if there is only one."""


class Program:
    """A program of so many replicas, of which this process drives some, or all.

    Args:
        replicas: how many.
        buffers: which memory remote buffers are in.

    Attributes:
        ir: the program.
    """

    def __init__(self, replicas: int, buffers: Any = "device") -> None:
        self.ir = popxl.Ir("popdist" if popdist.getNumInstances() > 1 else replicas)
        self.ir.options.remoteBuffers = buffers
        self._stored: list[tuple[popxl.DeviceToHostStream, Any]] = []

    def own(self, rows: Any) -> popxl.Tensor:
        """A tensor that is another row on each replica."""
        return popxl.variable(rows, replica_grouping=self.ir.replica_grouping(group_size=1))

    def stores(self, t: popxl.Tensor, rows: Any) -> None:
        """Store a tensor. It has to be these rows, one for each replica, in each run."""
        stream = popxl.d2h_stream(t.shape, t.dtype)
        ops.host_store(stream, t)
        self._stored.append((stream, rows))

    def session(self) -> popxl.Session:
        """A session: with a device for each replica, if there are enough, else one for all."""
        session = popxl.Session(self.ir, "ipu_model")
        is_enough = jax.local_device_count() >= self.ir.instance_replication_factor
        assert len(session.program.layout.devices) == (self.ir.replication_factor if is_enough else 1)
        return session

    def run(self, session: popxl.Session, feeds: Arrays | None = None) -> Arrays:
        """Run the program, and compare what is stored. Returns all outputs, of the replicas of this process."""
        inputs = {s: self.part(array).reshape(session.host_shape(s.shape)) for s, array in (feeds or {}).items()}
        counts = (self.ir.num_host_transfers, self.ir.instance_replication_factor)
        leading = counts if counts[0] > 1 else counts[1:]
        outputs = {s: array.reshape(leading + s.shape) for s, array in session.run(inputs).items()}
        for stream, rows in self._stored:
            np.testing.assert_allclose(outputs[stream], self.part(rows), rtol=1e-6)
        return outputs

    def part(self, of_all: Any) -> np.ndarray:
        """What of an array of all replicas belongs to this process."""
        first, count = popdist.getReplicaIndexOffset(), self.ir.instance_replication_factor
        return np.asarray(of_all).take(range(first, first + count), axis=int(self.ir.num_host_transfers > 1))


# Streams ------------------------------------------------------------------------------------------------------------


def transfers_and_replicas() -> None:
    """Transfers come first, then replicas."""
    program = Program(2)
    program.ir.num_host_transfers = 3
    with program.ir.main_graph, popxl.in_sequence():
        source, sink = popxl.h2d_stream((4,), F32, "source"), popxl.d2h_stream((4,), F32, "sink")
        ops.repeat(program.ir.create_graph(lambda: ops.host_store(sink, ops.host_load(source) * 2)), 3)
    data = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    with program.session() as session:
        equal(program.run(session, {source: data})[sink], program.part(2 * data))


def two_loads_in_a_turn() -> None:
    """Turn `i` sees `p[i]`, `q[2i]` and `q[2i + 1]`; what is left over is ignored."""
    program = Program(2)
    program.ir.num_host_transfers = 8
    with program.ir.main_graph, popxl.in_sequence():
        p, q, o = popxl.h2d_stream((), F32, "p"), popxl.h2d_stream((), F32, "q"), popxl.d2h_stream((), F32, "o")

        def turn() -> None:
            first, second = ops.host_load(q), ops.host_load(q)
            ops.host_store(o, ops.host_load(p) * 10000 + first * 100 + second)

        ops.repeat(program.ir.create_graph(turn), 4)
    of_p, of_q = (np.arange(start, start + 16, dtype=np.float32).reshape(8, 2) for start in (0, 20))
    with program.session() as session:
        found = program.run(session, {p: of_p, q: of_q})[o]
    equal(found[:4], program.part(of_p[:4] * 10000 + of_q[::2] * 100 + of_q[1::2]))


# Groups -------------------------------------------------------------------------------------------------------------


def grouped_variables(mode: Any, read: list[int]) -> None:
    """Three groups of two; each replica adds its number."""
    program = Program(6)
    with program.ir.main_graph, popxl.in_sequence():
        grouping = program.ir.replica_grouping(stride=3, group_size=2)
        v = popxl.variable([[1, 1], [2, 2], [3, 3]], replica_grouping=grouping, retrieval_mode=mode)
        program.stores(v, [[1, 1], [2, 2], [3, 3]] * 2)
        ops.add_(v, program.own(np.arange(6, dtype=np.int32)))
    with program.session() as session:
        program.run(session)
        equal(session.get_tensor_data(v), np.array([[1, 1], [3, 3], [5, 5], [4, 4], [6, 6], [8, 8]])[read])


def collectives_of_four() -> None:
    """All of them, over all replicas, over neighbours, and over every other one."""
    program = Program(4)
    one_to_four = np.arange(1, 5, dtype=np.float32)[:, None]
    with program.ir.main_graph, popxl.in_sequence():
        x, y = program.own(one_to_four * [1, 10]), program.own(np.arange(5) + 10 * (one_to_four - 1))
        w, rows = popxl.variable(np.arange(5.0), F32), popxl.constant(one_to_four * [1, 10], F32)
        pairs, strided = program.ir.replica_grouping(1, 2), program.ir.replica_grouping(2, 2)
        program.stores(collectives.replicated_all_reduce(x), [[10, 100]] * 4)
        program.stores(collectives.replicated_all_reduce(x, "mean"), [[2.5, 25]] * 4)
        program.stores(collectives.replicated_all_reduce(x, "square_add"), [[30, 3000]] * 4)
        program.stores(collectives.replicated_all_reduce(x, group=pairs), [[3, 30]] * 2 + [[7, 70]] * 2)
        program.stores(collectives.replicated_all_reduce(x, group=strided), [[4, 40], [6, 60]] * 2)
        program.stores(collectives.replicated_all_gather(x), [[1, 10, 2, 20, 3, 30, 4, 40]] * 4)
        program.stores(collectives.replicated_all_gather(x, group=pairs), [[1, 10, 2, 20]] * 2 + [[3, 30, 4, 40]] * 2)
        program.stores(collectives.replicated_all_gather(x, group=strided), [[1, 10, 3, 30], [2, 20, 4, 40]] * 2)
        program.stores(
            collectives.replicated_all_gather(x, output_shape="new_axis"), [[[1, 10], [2, 20], [3, 30], [4, 40]]] * 4
        )
        program.stores(collectives.replicated_reduce_scatter(y), [[60, 64], [68, 72], [76, 0], [0, 0]])
        program.stores(
            collectives.replicated_reduce_scatter(y, group=pairs),
            [[10, 12, 14], [16, 18, 0], [50, 52, 54], [56, 58, 0]],
        )
        program.stores(
            collectives.replicated_reduce_scatter(y, group=strided),
            [[20, 22, 24], [40, 42, 44], [26, 28, 0], [46, 48, 0]],
        )
        piece = ops.reshape(collectives.replica_sharded_slice(y), (2, 1))  # as it is, the host does not take it
        program.stores(piece, [[[0], [1]], [[12], [13]], [[24], [0]], [[0], [0]]])
        program.stores(collectives.replicated_all_gather(collectives.replica_sharded_slice(w)), [[0, 1, 2, 3, 4]] * 4)
        program.stores(collectives.replicated_slice(rows), [[1, 10], [2, 20], [3, 30], [4, 40]])
    with program.session() as session:
        program.run(session)


def groups_in_blocks() -> None:
    """{0, 2}, {1, 3}, {4, 6} and {5, 7}."""
    program = Program(8)
    with program.ir.main_graph, popxl.in_sequence():
        total = collectives.replicated_all_reduce(program.own(np.arange(8)), group=program.ir.replica_grouping(2, 2))
        program.stores(total, [2, 4, 2, 4, 10, 12, 10, 12])
    with program.session() as session:
        program.run(session)


# Remote variables and pieces ----------------------------------------------------------------------------------------


def remote_variable(buffers: str) -> None:
    """Each replica changes its own slot."""
    program = Program(2, buffers)
    with program.ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((3,), I32, entries=2)
        alone = program.ir.replica_grouping(group_size=1)
        h = popxl.remote_variable([[1, 2, 3], [7, 8, 9]], buffer, offset=1, replica_grouping=alone)
        t = ops.remote_load(buffer, 1)
        t += 10
        ops.remote_store(buffer, 1, t)
    with program.session() as session:
        program.run(session)
        session.weights_to_host()
        equal(session.get_tensor_data(h), [[11, 12, 13], [17, 18, 19]])


def remote_pieces(buffers: str) -> None:
    """Three elements and two: gathered, doubled, taken apart again."""
    program = Program(2, buffers)
    with program.ir.main_graph, popxl.in_sequence():
        buffer = popxl.replica_sharded_buffer((5,), F32)
        h = popxl.remote_replica_sharded_variable([1.0, 2.0, 3.0, 4.0, 5.0], buffer)
        full = collectives.replicated_all_gather(ops.remote_load(buffer, 0))
        program.stores(full, [[1, 2, 3, 4, 5]] * 2)
        ops.remote_store(buffer, 0, collectives.replica_sharded_slice(full * 2.0))
    with program.session() as session:
        program.run(session)
        equal(session.get_tensor_data(h), [2, 4, 6, 8, 10])


PIECES = (
    (8, None, (3, 5), None, 2),
    (8, None, (3, 5), 4, 4),
    (8, (2, 4), (2, 3, 5), None, 4),
    (8, (2, 4), (2, 3, 5), 2, 8),
    (8, [0, 0, 1, 1, 1, 1, 0, 0], (2, 6), None, 3),
    (3, None, (7,), None, 3),
    (4, (1, 2), (2, 12), None, 6),
    (2, (1, 1), (2, 4, 5), None, 20),
    (16, (4, 4), (4, 6), 2, 3),
)
"""How many replicas, the stride and size of their groups or the group of each, the shape on the host, how many pieces
were asked for, and the elements of a piece."""


def pieces(replicas: int, groups: Any, shape: tuple[int, ...], asked: int | None, length: int, buffers: str) -> None:
    """Each replica gathers the value of its group, and adds to its piece: on the chip, and in a buffer."""
    program = Program(replicas, buffers)
    ir = program.ir
    grouping = ir.replica_grouping(*(groups or ())) if not isinstance(groups, list) else None
    grouping = grouping or ir.replica_grouping_from_assignments(groups)
    data = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    of_each = data[grouping.assignment] if grouping.num_groups > 1 else np.stack([data] * replicas)
    with ir.main_graph, popxl.in_sequence():
        members = ir.replica_grouping(grouping.const_rg.stride, asked or grouping.const_rg.group_size)
        buffer = popxl.replica_sharded_buffer(shape, F32, grouping, asked)
        remote = popxl.remote_replica_sharded_variable(data, buffer, replica_grouping=grouping)
        near, piece = popxl.replica_sharded_variable(data, replica_grouping=grouping, shard_over=asked)
        for each in (ops.remote_load(buffer, 0), piece):
            assert (each.shape, each.meta_shape) == ((length,), of_each.shape[1:])
            program.stores(collectives.replicated_all_gather(each, group=members), of_each)
            each += 1
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) - 1)
    with program.session() as session:
        program.run(session)
        equal(session.get_tensor_data(near), data + 1)
        equal(session.get_tensor_data(remote), data - 1)
        session.write_variables_data({near: data, remote: data})
        program.run(session)
    equal(session.get_tensor_data(near), data + 1)


def sharded_optimiser() -> None:
    """A step with momentum, of which each replica makes a quarter; beside NumPy with all of it."""
    program = Program(4)
    random = np.random.default_rng(0)
    first, gradients = (random.normal(size=shape).astype(np.float32) for shape in ((3, 5), (4, 3, 5)))
    with program.ir.main_graph, popxl.in_sequence():
        gradient = popxl.h2d_stream((3, 5), F32, "gradient")
        w, w_piece = popxl.replica_sharded_variable(first, name="w")
        m, m_piece = popxl.replica_sharded_variable(np.zeros_like(first), name="m")
        g_piece = collectives.replicated_reduce_scatter(ops.host_load(gradient), "mean", None, True)
        ops.var_updates.accumulate_moving_average_(m_piece, g_piece, 0.9)
        ops.scaled_add_(w_piece, m_piece, b=-0.5)
        out = popxl.d2h_stream((3, 5), F32)
        ops.host_store(out, collectives.replicated_all_gather(w_piece))
    momentum, weights = np.zeros_like(first), first
    with program.session() as session:
        for _ in range(3):
            momentum = 0.9 * momentum + 0.1 * gradients.mean(axis=0)
            weights = weights - 0.5 * momentum
            found = program.run(session, {gradient: gradients})[out]
            np.testing.assert_allclose(found, program.part([weights] * 4), rtol=1e-5)
    np.testing.assert_allclose(session.get_tensor_data(w), weights, rtol=1e-5)
    np.testing.assert_allclose(session.get_tensor_data(m), momentum, rtol=1e-5)


def name_of(program: Callable[[], None]) -> str:
    """What a program is called."""
    return getattr(program, "func", program).__name__


MEMORIES = ("device", "host")
PROGRAMS: tuple[tuple[int, Callable[[], None]], ...] = (
    (2, transfers_and_replicas),
    (2, two_loads_in_a_turn),
    (6, partial(grouped_variables, "one_per_group", [0, 1, 2])),
    (6, partial(grouped_variables, "all_replicas", [0, 1, 2, 3, 4, 5])),
    (4, collectives_of_four),
    (8, groups_in_blocks),
    *((2, partial(remote_variable, buffers)) for buffers in MEMORIES),
    *((2, partial(remote_pieces, buffers)) for buffers in MEMORIES),
    *((row[0], partial(pieces, *row, MEMORIES[number % 2])) for number, row in enumerate(PIECES)),
    (4, sharded_optimiser),
)
"""How many replicas, and the program."""


def main() -> None:
    wanted = popdist.getNumTotalReplicas() if popdist.getNumInstances() > 1 else None
    for replicas, program in PROGRAMS:
        if wanted in (replicas, None):
            program()
            print(name_of(program), flush=True)


if __name__ == "__main__":
    main()
