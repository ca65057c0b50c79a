"""Checkpoints that move: read back at other numbers of replicas, along other axes, and in other pieces, bit for bit.

A program has each kind of variable that replicas share or divide. It trains on 8 replicas, 2 of which divide a layer;
what it leaves is read by the same program on 4, 1 and 6 replicas.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons import TaskSession, checkpoint, layers, optimizers
from popxl_addons.layers.layer_norm_distributed import LayerNormDistributed
from popxl_addons.layers.linear_fp8 import LinearFP8
from popxl_addons.weights import load_safetensors, save_safetensors

ROOT = Path(__file__).parents[2]

AXES = [{"data": 4, "tensor": 2}, {"tensor": 4, "data": 1}, {"data": 1, "tensor": 1}, {"tensor": 3, "data": 2}]
"""8, 4, 1 and 6 replicas; 2, 4, 1 and 3 of them divide a layer."""

F32 = popxl.float32
DIVIDED = {"columns": ((3, 24), 1), "rows": ((12, 5), 0), "bf16": ((24,), 0)}
"""What replicas along `tensor` divide: the shape of all, and the axis."""


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def program(axes: Mapping[str, int], replication: Literal["popdist"] | None = None) -> TaskSession:
    """Variables that are whole, in pieces, in slots of remote memory, and divided; and an optimiser of most of them."""
    ir = popxl.Ir(replication, axes)
    count, several = axes["tensor"], ir.replication_factor > 1
    with ir.main_graph, popxl.in_sequence():
        state = addons.NamedTensors(whole=popxl.variable(numbers(5), F32, "whole"))
        facts = {"pieces": addons.VariableFactory(partial(numbers, 5, 7), F32, "pieces")}  # 35: with zeros at the end
        for name, (shape, axis) in DIVIDED.items():
            parts = iter(np.split(numbers(*shape), count, axis))
            dtype = popxl.bfloat16 if name == "bf16" else F32
            facts[name] = addons.VariableFactory(parts, dtype, name, replica_grouping="data", group_axis=axis)
        trained = addons.NamedVariableFactories.from_dict(facts).init_sharded()
        state.insert("trained", trained)
        on_replica = {name: t.piece if t.piece is not None else t for name, t in trained.to_dict().items()}
        gradients = {name: t * 0.5 for name, t in on_replica.items()}
        state.insert("optimizer", optimizers.adamw(trained, gradients, lr=0.1))
        for name, shape, groups, axis in [("all", (3, 5), None, None), ("some", (2, 24 // count), "data", 1)]:
            fact = addons.VariableFactory(
                iter(np.split(numbers(2, 24), count, 1)) if axis else partial(numbers, *shape),
                F32, name, replica_grouping=groups, group_axis=axis,
            )  # fmt: skip
            on_host = shape if fact.replica_grouping.num_groups == 1 else (count, *shape)
            cut = several and fact.replica_grouping.group_size > 1
            buffer = (
                popxl.replica_sharded_buffer(on_host, F32, fact.replica_grouping, entries=2)
                if cut
                else popxl.remote_buffer(shape, F32, entries=2)
            )
            state.insert(f"remote_{name}", fact.create_remote_tensor(buffer, 1))
            ops.remote_store(buffer, 1, ops.remote_load(buffer, 1) * 1.5)
        state.whole += 1.0
    return TaskSession([], [], state, ir=ir, device_desc="ipu_hw")


def whole(session: TaskSession) -> Iterator[tuple[str, bytes]]:
    """The bits of all values, whole, by name."""
    for name, array in session.get_named_tensors_data().to_dict().items():
        axis = session.state[name].group_axis
        divided = axis is not None and session.state[name].replica_grouping.num_groups > 1
        yield name, (np.concatenate(list(array), axis) if divided else array).tobytes()


def test_other_numbers_of_replicas(tmp_path: Path) -> None:
    with program(AXES[0]) as session:
        begun = dict(whole(session))
        session.run()
        expected = dict(whole(session))
        session.save_checkpoint(tmp_path / "0")
    assert all(expected[name] != begun[name] for name in begun) and len(begun) == 16
    for number, (axes, format) in enumerate(zip(AXES[1:], ["safetensors", "npz", "npz"], strict=True), 1):
        with program(axes) as session:
            session.load_checkpoint(tmp_path / str(number - 1), report_missing="error")
            session.weights_to_host()  # what is in the pieces on the devices
            assert dict(whole(session)) == expected
            session.save_checkpoint(tmp_path / str(number), format)
    with program(AXES[0]) as session:
        session.load_checkpoint(tmp_path / str(number), report_missing="error")
        assert dict(whole(session)) == expected
        session.run()
        assert not np.isnan(session.get_named_tensors_data().trained.pieces).any()


@pytest.mark.thorough
def test_other_numbers_of_processes(tmp_path: Path) -> None:
    """Two processes save, while they run on; one reads it, with other replicas; two go on from what that has saved."""
    source = """
        import sys
        from pathlib import Path
        import popdist
        from tests.popxl_addons.test_addons_moved_checkpoints import AXES, program, whole
        place = Path(sys.argv[1])
        with program(AXES[1], "popdist") as session:
            if (place / "six").exists():
                session.load_checkpoint(place / "six", "error")
                session.weights_to_host()
            else:
                session.run()
            expected = b"".join(bits for _, bits in whole(session))
            session.save_checkpoint(place / "two", wait=False)
            session.run()
        (place / f"bits{popdist.getInstanceIndex()}").write_bytes(expected)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "runtime.poprun", "--num-instances=2", "--num-replicas=4"]
    command += [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    found = set()
    for _ in range(2):
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT, check=True, timeout=300)
        found |= {(tmp_path / f"bits{i}").read_bytes() for i in range(2)}
        with program(AXES[3]) as session:
            session.load_checkpoint(tmp_path / "two", report_missing="error")
            session.weights_to_host()
            found.add(b"".join(bits for _, bits in whole(session)))
            session.save_checkpoint(tmp_path / "six")
    assert len(found) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("who", "where"), [(1, "write_arrays"), (1, "bring_to_disk"), (0, "bring_to_disk"), (0, "write_index")]
)
def test_a_process_dies_while_all_write(tmp_path: Path, who: int, where: str) -> None:
    """Before its pieces, before it has said that they are there, and between the pieces and the index. The second start
    finds the checkpoint before, runs on from it, and leaves its own and nothing else."""
    source = """
        import os, sys
        from pathlib import Path
        import numpy as np
        import popdist, popxl
        import popxl_addons as addons
        from popxl_addons import checkpoint, sharded_arrays

        place, who, where = Path(sys.argv[1]) / "c", int(sys.argv[2]), sys.argv[3]
        ir = popxl.Ir("popdist")
        with ir.main_graph:
            pieces, piece = popxl.replica_sharded_variable(np.arange(5, dtype=np.float32), name="pieces")
            whole = popxl.variable(np.arange(3), popxl.float32, "whole")
            for v in (piece, whole):
                popxl.ops.add_(v, popxl.ops.collectives.replicated_all_reduce(popxl.constant(1.0)))
        state = addons.NamedTensors(pieces=pieces, whole=whole)
        with addons.TaskSession([], [], state, ir=ir, device_desc="ipu_hw") as session:
            if popdist.getNumRestarts():
                assert place.exists()
                session.load_checkpoint(place, "error")
                assert session.session_state["steps"] == 1
            else:
                session.run()
                session.save_checkpoint(place)
                if popdist.getInstanceIndex() == who:
                    for module in (checkpoint, sharded_arrays):
                        setattr(module, where, lambda *_: os.kill(os.getpid(), 9))
            session.run()
            session.save_checkpoint(place, wait=False)
            session.run()
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "runtime.poprun", "--num-instances=2", "--num-replicas=2", "--max-restarts=1"]
    command += [sys.executable, str(tmp_path / "program.py"), str(tmp_path), str(who), where]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 0 and f"instance {who} was killed by SIGKILL" in done.stderr, done.stderr
    assert sorted(os.listdir(tmp_path)) == ["c", "program.py"]
    with checkpoint.open_checkpoint(str(tmp_path / "c")) as directory:
        arrays, info = checkpoint.read_arrays(directory), checkpoint.read_info(directory)
    assert info == {"steps": 2}
    assert {name: a.tolist() for name, a in arrays.items()} == {"pieces": [4, 5, 6, 7, 8], "whole": [4, 5, 6]}


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux, which counts what a process reads")
@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_each_process_reads_its_part(tmp_path: Path, format: str) -> None:
    """Two processes have half of the weights each: each reads that, and compares half of the files with their digests.
    If one finds a damaged file, both say so, and the values stay as they are."""
    source = """
        import sys
        from pathlib import Path
        import numpy as np
        import popdist, popxl
        import popxl_addons as addons
        from popxl.errors import PopxlRuntimeError, UnreadableFileError

        place, format = Path(sys.argv[1]) / "c", sys.argv[2]
        sizes = {"cut": 1 << 20, "grouped": 1 << 19, "fixed": 4, "remote": 1 << 20}
        ir = popxl.Ir("popdist", axes={"data": 2, "tensor": 2})
        numbers = {name: np.random.default_rng(size).normal(size=size).astype("f4") for name, size in sizes.items()}
        with ir.main_graph, popxl.in_sequence():
            cut, piece = popxl.replica_sharded_variable(numbers["cut"], name="cut")
            parts = np.stack([numbers["grouped"], 2 * numbers["grouped"]])
            grouped = popxl.variable(parts, name="grouped", replica_grouping=ir.grouping("tensor"))
            fixed = popxl.variable(numbers["fixed"], name="fixed")
            buffer = popxl.replica_sharded_buffer(numbers["remote"].shape, popxl.float32, entries=1)
            remote = popxl.remote_replica_sharded_variable(numbers["remote"], buffer, 0)
            popxl.ops.remote_store(buffer, 0, popxl.ops.remote_load(buffer, 0) + 1.0)
            piece += popxl.ops.mean(fixed)
            grouped += popxl.ops.mean(fixed)
        state = addons.NamedTensors(cut=cut, grouped=grouped, fixed=fixed, remote=remote)
        with addons.TaskSession([], [], state, ir=ir, device_desc="ipu_hw") as session:
            session.run()
            expected = {name: a.copy() for name, a in session.get_named_tensors_data().to_dict().items()}
            session.save_checkpoint(place, format)
            session.wait_for_checkpoint()
            popdist.synchronize()
            session.run()
            bytes_read = lambda: int(Path("/proc/self/io").read_text().split()[1])
            before = bytes_read()
            session.load_checkpoint(place, "error")
            read, stored = bytes_read() - before, sum(a.nbytes for a in expected.values())
            assert 0.5 * stored < read < 1.2 * stored, (read, stored)
            for name, array in session.get_named_tensors_data().to_dict().items():
                np.testing.assert_array_equal(array, expected[name])
            popdist.synchronize()
            if popdist.getInstanceIndex() == 0:
                file = max(place.glob("pieces/1/model*/*.npz" if format == "npz" else "pieces/1/*.safetensors"))
                content = bytearray(file.read_bytes())
                content[-2000] ^= 1
                file.write_bytes(content)
            popdist.synchronize()
            session.run()
            expected = session.get_tensor_data(grouped).copy()
            try:
                session.load_checkpoint(place, "error")
            except (PopxlRuntimeError, UnreadableFileError) as problem:
                assert "is damaged" in str(problem), problem
                print(type(problem).__name__, flush=True)
            np.testing.assert_array_equal(session.get_tensor_data(grouped), expected)
            session.run()
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "runtime.poprun", "--num-instances=2", "--num-replicas=4"]
    command += [sys.executable, str(tmp_path / "program.py"), str(tmp_path), format]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("[A-Z][A-Za-z]+Error", done.stdout)) == ["PopxlRuntimeError", "UnreadableFileError"]


# Divided variables --------------------------------------------------------------------------------------------------


def divided(groups: int, axis: int | None, start: float = 0.0) -> TaskSession:
    """A table of 2 rows and 12 columns, of which groups of replicas have columns, if there are several."""
    ir = popxl.Ir(replication=groups)
    with ir.main_graph:
        table = start + np.arange(24, dtype=np.float32).reshape(2, 12)
        data = np.stack(np.split(table, groups, 1)) if groups > 1 else table
        v = popxl.variable(data, F32, "v", replica_grouping=ir.replica_grouping(group_size=1))
        v.group_axis = axis
        v += 1.0
    return TaskSession([], [], addons.NamedTensors(v=v), ir=ir, device_desc="ipu_hw")


def test_a_divided_variable_is_in_the_file_as_one(tmp_path: Path) -> None:
    divided(3, -1).save_checkpoint(tmp_path)
    with checkpoint.open_checkpoint(str(tmp_path)) as directory:
        np.testing.assert_array_equal(checkpoint.read_arrays(directory)["v"], np.arange(24).reshape(2, 12))


@pytest.mark.parametrize("groups", [1, 2])
def test_without_an_axis_it_is_told_what_to_do(tmp_path: Path, groups: int) -> None:
    divided(3, None).save_checkpoint(tmp_path)
    session = divided(groups, None, 100.0)
    with pytest.raises(ValueError, match=r"float32\[3, 2, 4\] there.*If groups of replicas .* with `group_axis`"):
        session.load_checkpoint(tmp_path)
    assert session.get_tensor_data(session.state.v).min() == 100
    session.state.v.group_axis = 1  # what was saved before there was such a word
    session.load_checkpoint(tmp_path)
    found = session.get_tensor_data(session.state.v)
    np.testing.assert_array_equal(np.concatenate(list(found), 1) if groups > 1 else found, np.arange(24).reshape(2, 12))
    session.load_from_session(divided(6, 1, 50.0))
    assert session.get_tensor_data(session.state.v).flat[:3].tolist() == [50, 51, 52]


def test_another_size_is_no_matter_of_groups(tmp_path: Path) -> None:
    divided(3, 0).save_checkpoint(tmp_path)  # rows of 4, one below the other
    told = "`v` is float32[6, 4] there and float32[2, 2, 6] in the state, [2, 12] as one value."
    with pytest.raises(ValueError, match=f"{re.escape(told)}$"):
        divided(2, 1).load_checkpoint(tmp_path)


def test_what_an_axis_may_be(tmp_path: Path) -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        v = popxl.variable(np.zeros((2, 3, 4)), F32, "v", replica_grouping=ir.replica_grouping(group_size=1))
        assert v.group_axis is None
        v.group_axis = -1
        assert v.group_axis == 1
        with pytest.raises(PopxlError, match=r"`group_axis` of Variable\[v .* 2 does not exist in a tensor of rank 2"):
            v.group_axis = 2
        with pytest.raises(TypeError, match=r"`group_axis` of .* must be an integer; got 'rows'"):
            v.group_axis = "rows"
        with pytest.raises(
            PopxlError, match=r"VariableFactory `w`: `group_axis` 1 does not exist in a tensor of rank 1"
        ):
            addons.VariableFactory(partial(np.zeros, 3), F32, "w", group_axis=1)
        with pytest.raises(ValueError, match="Linear: `group_axis` is 2; expected 0 or 1"):
            layers.Linear(3, group_axis=2)
        v += 1.0
    ir.save(tmp_path / "program")
    (loaded,) = popxl.Ir.load(tmp_path / "program").main_graph.variables
    assert loaded.group_axis == 1


class Parts(addons.Module):
    """A layer whose parts replicas have, and state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(F32, 32, 4, replica_grouping="data")
        self.columns = layers.Linear(6, replica_grouping="data", group_axis=1)
        self.rows = layers.Linear(4, replica_grouping="data", group_axis=0)
        self.norm = LayerNormDistributed("tensor")

    def build(self, indices: popxl.Tensor) -> popxl.Tensor:
        self.add_variable_input("own", partial(np.zeros, (2, 3)), F32, replica_grouping="data", group_axis=0)
        self.add_replica_sharded_variable_input(
            "cut", partial(np.zeros, (2, 3)), F32, replica_grouping="data", group_axis=1
        )
        return self.norm(self.rows(self.columns(self.embedding(indices))))


def test_layers_and_optimisers_know_their_axes() -> None:
    assert LinearFP8(4, group_axis=1).group_axis == 1
    with popxl.Ir(axes={"data": 2, "tensor": 2}).main_graph:
        facts, _ = Parts().create_graph(popxl.TensorSpec((5,), popxl.int32))
        variables = facts.init()
        found = {name: v.group_axis for name, v in variables.to_dict().items()}
        assert found == {
            **{"embedding.weight": 0, "columns.weight": 1, "columns.bias": 0, "rows.weight": 0, "rows.bias": None},
            **{"norm.weight": 0, "norm.bias": 0, "own": 0, "cut": 1},
        }
        chosen = {"columns": variables.columns.weight, "rows": variables.rows.weight, "bias": variables.columns.bias}
        state = optimizers.adafactor(chosen, {name: v * 1.0 for name, v in chosen.items()})
        axes = {name: v.group_axis for name, v in state.to_dict().items() if name != "step"}
        assert axes == {  # a mean over what is divided is none of the whole
            **{"columns.row_variance": None, "columns.column_variance": 1},
            **{"rows.row_variance": 0, "rows.column_variance": None, "bias.variance": 0},
        }
        w = variables.columns.weight
        step, _ = optimizers.AdamOptimizerStep().create_graph(w, w.spec, "data", lr=0.1, group_axis=1)
        assert {name: v.group_axis for name, v in step.init().to_dict().items()} == {
            **{"first_order": 1, "second_order": 1, "step": None}
        }


def test_weights_by_the_axis(tmp_path: Path) -> None:
    """Groups have different values: a file for others has the whole, if it is known how they divide it."""
    whole = np.arange(16, dtype=np.float32).reshape(4, 4)
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        fact = addons.VariableFactory(
            iter(np.split(whole, 2, 1)), F32, "w", replica_grouping=ir.replica_grouping(group_size=1), group_axis=1
        )
        variables = addons.NamedVariableFactories(w=fact).init()
    save_safetensors(variables, tmp_path / "w.safetensors")
    variables.w.data[...] = 0
    load_safetensors(variables, tmp_path / "w.safetensors")
    np.testing.assert_array_equal(variables.w.data, np.stack(np.split(whole, 2, 1)))
