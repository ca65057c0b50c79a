"""Variables that are described, and get their numbers where and when they are needed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from scipy import stats

import popxl
import popxl_addons as addons
from popxl import initial, ops
from popxl.base.container import pack, unpack
from popxl.errors import PopxlError, UnreadableFileError
from popxl.program.writing import fingerprint
from popxl_addons.layers import Embedding, LayerNorm, Linear
from runtime.targets.devices import Device
from tests.popxl.evaluate import store


def file_of(folder: Path, array: np.ndarray, before: bytes = b"head") -> Path:
    path = folder / "numbers.bin"
    path.write_bytes(before + array.tobytes())
    return path


# Descriptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "described",
    [
        initial.zeros((7, 11)),
        initial.full((7, 11), 2.5),
        initial.uniform((7, 11), -1, 3, seed=5),
        initial.normal((7, 11), 2, 0.5, seed=2**64 - 1),
        initial.truncated_normal((7, 11), std=0.02, seed=0),
        initial.stacked([initial.normal((11,), seed=n) for n in range(7)]),
    ],
    ids=lambda described: described.kind,
)
def test_any_part_is_that_of_the_whole(described: initial.Initial) -> None:
    whole = np.asarray(described)
    assert (whole.shape, described.size, whole.dtype) == ((7, 11), 77, np.float32)
    for start, stop in ((0, 77), (0, 1), (3, 4), (5, 5), (9, 25), (30, 77), (11, 22), (76, 77)):
        np.testing.assert_array_equal(described.elements(start, stop).astype(np.float32), whole.ravel()[start:stop])


@pytest.mark.parametrize("kind", [initial.normal, initial.truncated_normal, initial.uniform])
def test_integers_hold_no_draws(kind: Any) -> None:
    """They would be zeros."""
    with popxl.Ir(replication=2).main_graph as main:
        for described in (kind((3,), seed=1), initial.full(3, 0.5)):
            for dtype in (popxl.int32, popxl.uint8):
                with pytest.raises(ValueError, match=f"^variable: `data` .*, which {dtype.name} does not hold"):
                    popxl.variable(described, dtype)
                with pytest.raises(ValueError, match="^VariableFactory `w`: `data_iter` (are draws|is 0.5)"):
                    addons.VariableFactory(lambda described=described: described, dtype, "w")
        with pytest.raises(ValueError, match="are draws"):
            rows = initial.stacked([kind((3,), seed=1)] * 2)
            popxl.variable(rows, popxl.int32, replica_grouping=main.ir.replica_grouping(group_size=1))
        assert not main.variables
        assert popxl.variable(initial.full(2, 3.0), popxl.int32).data.tolist() == [3, 3]


def test_a_number_is_rounded_to_the_dtype_of_the_variable_alone() -> None:
    with popxl.Ir().main_graph as main:
        variables = [popxl.variable(initial.full(2, 0.1), dtype) for dtype in (popxl.float64, popxl.float16)]
        outs = store(v * 1.0 for v in variables)
    with popxl.Session(main.ir) as session:
        found = session.run()
    for v, out in zip(variables, outs, strict=True):
        expected = np.full(2, 0.1, v.dtype.as_numpy()).tolist()
        assert found[out].tolist() == session.get_tensor_data(v).tolist() == expected


def test_draws_are_of_their_distributions() -> None:
    """Beside those of SciPy."""
    count = 20_000
    for described, expected in {
        initial.uniform(count, -1, 3, seed=5): stats.uniform(-1, 4),
        initial.normal(count, 2, 0.5, seed=6): stats.norm(2, 0.5),
        initial.truncated_normal(count, 1, 0.5, seed=7): stats.truncnorm(-2, 2, 1, 0.5),
    }.items():
        drawn = described.numbers(popxl.float64)
        assert stats.kstest(drawn, expected.cdf).pvalue > 0.01
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
    of_seeds = [initial.normal(9, seed=seed).numbers().tolist() for seed in (1, 2, 1)]
    assert of_seeds[0] == of_seeds[2] != of_seeds[1]


def test_a_part_of_a_file(tmp_path: Path) -> None:
    numbers = np.arange(20, dtype=np.float16)
    path = file_of(tmp_path, numbers)
    described = initial.file(path, (3, 4), popxl.float16, offset=4 + 2 * 5)
    np.testing.assert_array_equal(np.asarray(described), numbers[5:17].reshape(3, 4))
    np.testing.assert_array_equal(described.elements(2, 5), numbers[7:10])
    assert described.dtype == popxl.float16
    with pytest.raises(ValueError, match="has 44 bytes; 20 elements of float16 from byte 6 on end at byte 46"):
        initial.file(path, 20, popxl.float16, offset=6)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="ends before element 5 of the 12 from byte 14 on"):
        described.elements(2, 5)


def test_what_is_refused() -> None:
    for make, message in {
        lambda: initial.normal((2, -1), seed=0): "`shape` is .2, -1.; sizes are not negative",
        lambda: initial.normal(2, seed=-1): "`seed` is -1; expected 0 to 2",
        lambda: initial.stacked([initial.zeros(2), initial.zeros(3)]): "expected parts of one shape; got",
    }.items():
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="initial.full: `value` must be a number; got 'a'"):
        initial.full(2, "a")  # type: ignore[arg-type]
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        with pytest.raises(PopxlError, match="describes the shape .3, 2., but its first dimension has to have one row"):
            popxl.variable(initial.zeros((3, 2)), replica_grouping=ir.replica_grouping(group_size=1))
        with pytest.raises(ValueError, match="are for numbers, and `data` is a description"):
            popxl.variable(initial.zeros(2), popxl.float8_143, log2_scale=1)
    assert not ir.main_graph.variables


# Variables -----------------------------------------------------------------------------------------------------------


def program(describe: bool) -> tuple[popxl.Ir, list[Any], list[popxl.tensor.Variable]]:
    """All kinds of variables of eight replicas, described, or with the same numbers."""
    ir = popxl.Ir(axes={"data": 2, "tensor": 4})

    def value(described: initial.Initial, dtype: popxl.dtype = popxl.float32) -> Any:
        return described if describe else described.numbers(dtype)

    with ir.main_graph, popxl.in_sequence():
        a = popxl.variable(value(initial.normal((4, 3, 5), seed=1)), popxl.float32, "a", replica_grouping="data")
        half = initial.uniform((3, 5), -1, 1, seed=2)
        b = popxl.variable(value(half, popxl.float16), popxl.float16, "b")
        c, piece = popxl.replica_sharded_variable(value(initial.truncated_normal((3, 7), seed=3)), popxl.float32, "c")
        rows = initial.stacked([initial.normal((2,), seed=n) for n in range(2)])
        d = popxl.variable(value(rows), popxl.float32, "d", replica_grouping="tensor")
        buffer = popxl.remote_buffer((4,), popxl.float32, 2)
        e = popxl.remote_variable(value(initial.full((4,), 2.5)), buffer, 1, popxl.float32, "e")
        stored = []
        for t in (a, b, ops.collectives.replicated_all_gather(piece), d, ops.remote_load(buffer, 1)):
            stored.append(popxl.d2h_stream(t.shape, t.dtype))
            ops.host_store(stored[-1], t)
        ops.add_(a, popxl.constant(1.0))
    return ir, stored, [a, b, c, d, e]


@pytest.mark.parametrize("replicas_on", ["a device each", "one device"])
def test_sessions_make_the_numbers(replicas_on: str) -> None:
    devices = tuple(jax.devices("cpu")[: 8 if replicas_on == "a device each" else 1])
    if replicas_on == "a device each" and len(devices) < 8:
        pytest.skip("JAX was started with fewer devices")
    found = []
    for describe in (True, False):
        ir, stored, variables = program(describe)
        assert [v.initial is not None for v in variables] == [describe] * 5
        assert (ir.memory().variables_on_host == 0) == describe
        with popxl.Session(ir, Device("ipu_model", devices)) as session:
            outputs = session.run()
        # Those that the program has not changed are still only described.
        assert [v.initial is not None for v in variables] == [False, *[describe] * 4]
        found.append([outputs[s] for s in stored] + [session.get_tensor_data(v) for v in variables])
        assert not any(v.initial for v in variables)
    for array, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype


def test_they_are_written_and_read() -> None:
    ir, _, (a, *_) = program(True)
    devices = tuple(jax.devices("cpu")[:1])
    session = popxl.Session(ir, Device("ipu_model", devices))
    new = np.full(a.shape_on_host, 7, np.float32)
    session.write_variable_data(a, new)
    assert a.initial is None
    np.testing.assert_array_equal(a.data, new)


def test_looking_makes_them_once() -> None:
    with popxl.Ir().main_graph:
        v = popxl.variable(initial.normal((3, 4), seed=1), popxl.float32)
    assert v.initial is not None and v.dtype == popxl.float32 and v.shape == (3, 4)
    data = v.data
    assert v.initial is None and v.data is data
    data[0, 0] = 5
    assert v.data[0, 0] == 5


def test_a_program_is_saved_without_its_numbers(tmp_path: Path) -> None:
    ir, stored, variables = program(True)
    for v in variables[:1]:
        assert v.data is not None  # somebody has looked, and may have changed it
    ir.save(tmp_path / "program.popxl")
    assert all(v.initial for v in variables[1:])
    loaded = popxl.Ir.load(tmp_path / "program.popxl")
    for v, other in zip(ir.main_graph.variables, loaded.main_graph.variables, strict=True):
        assert v.initial == other.initial
        np.testing.assert_array_equal(v.data, other.data)


def test_a_program_is_the_same_however_it_begins() -> None:
    """To who keeps compiled programs."""

    def built(value: Any) -> str:
        ir = popxl.Ir()
        with ir.main_graph:
            ops.add_(popxl.variable(value, popxl.float32, "v"), popxl.constant(1.0))
        return fingerprint(ir)

    assert len({built(initial.normal(3, seed=1)), built(initial.zeros(3)), built(np.ones(3))}) == 1


def test_files_are_not_looked_for_by_who_loads(tmp_path: Path) -> None:
    """A program that begins with a part of a file is saved with the numbers; one that names a file is refused."""
    ir = popxl.Ir()
    numbers = np.arange(6, dtype=np.float32)
    path = file_of(tmp_path, numbers)
    with ir.main_graph:
        v = popxl.variable(initial.file(path, (2, 3), popxl.float32, offset=4), name="v")
        w = popxl.variable(initial.zeros(2), name="w")
        ops.add_(v, ops.sum(w))
    saved = tmp_path / "program.popxl"
    ir.save(saved)
    path.unlink()
    np.testing.assert_array_equal(popxl.Ir.load(saved).main_graph.get_tensor("v").data, numbers.reshape(2, 3))
    content, blobs = unpack("popxl program", saved.read_bytes())
    (told,) = (t for t in content["graphs"][0]["tensors"] if t["name"] == "w")
    told["begins"] = {"shape": [2], "kind": "file", "path": "/etc/hostname", "element": "uint8"}
    saved.write_bytes(pack("popxl program", content, blobs))
    with pytest.raises(UnreadableFileError, match="begins with a file of the machine that it was saved on"):
        popxl.Ir.load(saved)


# The kit -------------------------------------------------------------------------------------------------------------


def test_layers_describe_what_is_large() -> None:
    ir = popxl.Ir(axes={"data": 1, "tensor": 2})
    with ir.main_graph:
        x = ops.init((4, 2048), popxl.float32)
        facts, graph = Linear(1024, replica_grouping="data").create_graph(x)
        first, second = facts.init("first"), facts.init("second")
        table = Embedding(popxl.float32, 4096, 512).create_graph(ops.init((2, 3), popxl.int32))[0].init("table")
        norm = LayerNorm().create_graph(x)[0].init("norm")
        addons.autodiff_with_accumulation(graph, graph.args.values_flat())[0].init("means")
    assert ir.main_graph.variables
    assert all(v.initial is not None for v in ir.main_graph.variables)
    weights = [v.weight.initial for v in (first, second, table)]
    assert weights[0].shape == (2, 2048, 1024) and weights[2].shape == (4096, 512)
    seeds = [part.seed for part in (*weights[0].parts, *weights[1].parts, weights[2])]
    assert len({*seeds}) == 5
    np.testing.assert_array_equal(norm.weight.data, np.ones(2048))
    part = weights[0].elements(0, 50_000)
    assert abs(part).max() <= 0.04 and stats.kstest(part, stats.truncnorm(-2, 2, 0, 0.02).cdf).pvalue > 0.001


def test_layers_draw_what_is_small_as_ever() -> None:
    np.random.seed(3)
    stats.truncnorm.rvs(-2, 2, scale=0.02, size=(6, 5))  # a factory tries what it is given
    expected = stats.truncnorm.rvs(-2, 2, scale=0.02, size=(6, 5))
    np.random.seed(3)
    with popxl.Ir().main_graph:
        weight = Linear(5).create_graph(ops.init((2, 6), popxl.float32))[0].init().weight
    np.testing.assert_allclose(weight.data, expected, rtol=1e-6)


def test_no_memory_is_taken(tmp_path: Path) -> None:
    """100 GB of weights, built, printed, costed, saved and described, in a process that may have 4 GB."""
    program = """
        import resource
        resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
        import popxl
        from popxl import initial, ops
        ir = popxl.Ir()
        with ir.main_graph:
            x = ops.init((4, 50_000), popxl.float32)
            for layer in range(10):
                w = popxl.variable(initial.normal((50_000, 50_000), std=0.02, seed=layer), popxl.float32, "w")
                x = ops.gelu(x @ w)
            ops.host_store(popxl.d2h_stream(x.shape, x.dtype), x)
        assert "main graph" in str(ir)
        assert ir.memory().variables == 10 * 4 * 50_000**2 and ir.memory().variables_on_host == 0
        ir.save("program.popxl")
        assert len(popxl.Ir.load("program.popxl").main_graph.variables) == 10
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_numbers_in_another_order_may_be_written_and_come_back_after_a_run() -> None:
    """They became the host copy as they lay in memory, and what came from the device went into a copy of that."""
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(initial.normal((2, 3), seed=7), popxl.float32, "v")
        ops.add_(v, popxl.constant(1.0))
    numbers = np.arange(6, dtype=np.float32).reshape(3, 2).T
    session = popxl.Session(ir)
    session.write_variable_data(v, numbers)
    with session:
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(v), numbers + 1)
