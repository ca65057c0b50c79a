"""Programs in files: what is loaded prints, differentiates and runs as what was saved."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import popxl
from popxl import ops
from popxl.base.atomic_files import digest, with_digest
from popxl.base.container import pack, unpack
from popxl.errors import PopxlError, UnreadableFileError
from popxl.op import OpKind
from popxl.program.saved import KIND
from popxl.transforms import autodiff
from tests.popxl.ops.rows import ROWS
from tests.popxl.ops.rows.schema import function_of
from tests.popxl.ops.test_rows import flat, tensors_for

softplus = OpKind("SoftplusOfTheTests", jax.nn.softplus)


def layer(x, w):
    return softplus(x @ w)


def trained() -> tuple[popxl.Ir, Any, Any]:
    """A program with a called graph, its gradient, a loop, a stream each way and a variable that changes."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x_in, y_out = popxl.h2d_stream((2, 3), popxl.float32, "x"), popxl.d2h_stream((2, 3), popxl.float32, "y")
        w = popxl.variable(np.eye(3, dtype=np.float32), name="w")
        x = ops.host_load(x_in)
        graph = ir.create_graph(layer, x, w)
        site = ops.call_with_info(graph, x, w)
        (y,) = site.outputs
        info = autodiff(graph)
        _, dw = ops.call(info.graph, y, inputs_dict=info.inputs_dict(site))
        (twice,) = ops.repeat(ir.create_graph(lambda t: t * 2, dw), 3, dw)
        ops.scaled_add_(w, twice, b=-0.01)
        ops.host_store(y_out, y)
    return ir, x_in, y_out


def streams(ir: popxl.Ir) -> tuple[Any, Any]:
    return next(iter(ir.get_all_h2d_streams())), next(iter(ir.get_all_d2h_streams()))


def runs(ir: popxl.Ir, x_in: Any, y_out: Any, times: int = 3) -> list[np.ndarray]:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    with popxl.Session(ir) as session:
        found = [np.array(session.run({x_in: x})[y_out]) for _ in range(times)]
    return [*found, *(v.data for v in ir.main_graph.variables)]


def assert_same(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    ir, x_in, y_out = trained()
    ir.save(tmp_path / "program")
    loaded = popxl.Ir.load(tmp_path / "program")
    assert str(loaded) == str(ir)
    for a, b in zip(ir.graphs, loaded.graphs, strict=True):
        assert a.print_schedule() == b.print_schedule()
        assert [op.source for op in a.ops] == [op.source for op in b.ops]
        assert [t.location for t in a.tensors] == [t.location for t in b.tensors]
        assert [repr(op) for op in a.call_sites] == [repr(op) for op in b.call_sites]
    assert_same(runs(loaded, *streams(loaded)), runs(ir, x_in, y_out))


def test_numbers_of_numpy_stay_numbers(tmp_path: Path) -> None:
    repeated = OpKind("RepeatedOfTheTests", lambda x, *, times, scale: jnp.concatenate([x] * times) * scale)
    ir = popxl.Ir()
    with ir.main_graph:
        repeated(popxl.variable([1.0, 2.0], name="x"), times=np.int64(3), scale=np.float32(2))
    ir.save(tmp_path / "program")
    (op,) = popxl.Ir.load(tmp_path / "program").main_graph.ops
    assert op.attributes == {"times": 3, "scale": 2}
    assert isinstance(op.attributes["times"], np.int64) and isinstance(op.attributes["scale"], np.float32)


def test_the_host_values_of_now_are_saved(tmp_path: Path) -> None:
    """After training: what the session has brought back."""
    ir, x_in, y_out = trained()
    runs(ir, x_in, y_out)
    ir.save(tmp_path / "program")
    loaded = popxl.Ir.load(tmp_path / "program")
    assert_same(runs(loaded, *streams(loaded)), runs(ir, x_in, y_out))


def test_a_stream_may_have_the_name_of_a_tensor(tmp_path: Path) -> None:
    ir = popxl.Ir()
    with ir.main_graph as main, popxl.in_sequence():
        x = popxl.variable([1.0, 2.0], name="x")
        ops.host_store(popxl.d2h_stream((2,), popxl.float32, "x"), ops.host_load(popxl.h2d_stream((2,), x.dtype, "w")))
    ir.save(tmp_path / "program")
    loaded = popxl.Ir.load(tmp_path / "program")
    assert str(loaded) == str(ir)
    assert [s.tensor_id for s in streams(loaded)] == ["w", "x"]
    assert [t.id for t in loaded.main_graph.tensors] == [t.id for t in main.tensors]
    assert loaded.main_graph.get_tensor("x") is loaded.main_graph.variables[0]


def test_a_loaded_program_can_be_built_on(tmp_path: Path) -> None:
    """Names and numbers go on where they were; the gradient graph, which JAX made in part, can be differentiated."""
    ir, *_ = trained()
    ir.save(tmp_path / "program")
    texts = []
    for program in (ir, popxl.Ir.load(tmp_path / "program")):
        (gradient,) = (g for g in program.graphs if g.gradient_of is not None)
        autodiff(gradient)
        with program.main_graph:
            (w,) = program.main_graph.variables
            ops.add(w, w), ops.add(w, w)
            program.create_graph(lambda t: t + 1, w)
        texts.append(str(program))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("samples", [1, pytest.param(None, marks=pytest.mark.thorough)])
def test_every_op_can_be_saved(samples: int | None, tmp_path: Path) -> None:
    """Each is found again by its key, and its attributes are what they were."""
    ir = popxl.Ir()
    with ir.main_graph:
        for row in ROWS:
            for sample in row.samples[:samples]:
                (row.build or row.op)(*tensors_for(sample.operands), **sample.attributes)
    ir.save(tmp_path / "program")
    loaded = popxl.Ir.load(tmp_path / "program")
    assert str(loaded) == str(ir)
    for op, other in zip(ir.main_graph.ops, loaded.main_graph.ops, strict=True):
        assert (op.kind, op.modified) == (other.kind, other.modified)
        for name, value in op.attributes.items():
            if not isinstance(value, popxl.Graph | popxl.streams.Stream | popxl.RemoteBuffer):
                np.testing.assert_equal(other.attributes[name], value)
                assert type(other.attributes[name]) is type(value)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.differentiable and not row.steps and not row.build], ids=repr
)
def test_every_gradient_can_be_saved(row, tmp_path: Path) -> None:
    ir = popxl.Ir()
    sample = row.samples[0]
    with ir.main_graph:
        operands = tensors_for(sample.operands)
        tensors = [t for t in flat(operands) if isinstance(t, popxl.Tensor)]

        def build(*inside: Any) -> Any:
            rest = iter(inside)
            return row.op(*[place(v, rest) for v in operands], **sample.attributes)

        graph = ir.create_graph(build, *tensors)
        autodiff(graph, grads_required=[graph.inputs[i] for i in row.differentiable if i < len(graph.inputs)])
    ir.save(tmp_path / "program")
    assert str(popxl.Ir.load(tmp_path / "program")) == str(ir)


def place(value: Any, rest: Any) -> Any:
    if isinstance(value, list):
        return [place(v, rest) for v in value]
    return next(rest) if isinstance(value, popxl.Tensor) else value


@pytest.mark.thorough
def test_an_op_of_a_user_in_another_process(tmp_path: Path) -> None:
    """It is found by its name where it is declared, and named where it is not."""
    ir, *_ = trained()
    ir.save(tmp_path / "program")
    load = f"import popxl, jax\nir = popxl.Ir.load({str(tmp_path / 'program')!r})\nprint(ir.main_graph)"
    declared = load.replace("\n", "\nk = popxl.OpKind('SoftplusOfTheTests', jax.nn.softplus)\n", 1)
    run = [sys.executable, "-W", "ignore", "-c"]
    assert subprocess.run([*run, declared], capture_output=True, text=True, check=True).stdout == f"{ir.main_graph}\n"
    refused = subprocess.run([*run, load], capture_output=True, text=True, check=False)
    assert "no op has been declared under it. Declare it, or import the module that does" in refused.stderr


def test_two_ops_of_one_key(tmp_path: Path) -> None:
    """The last one declared is found by it; a key of its own tells the other apart."""
    first = OpKind("Twice", jnp.sin)
    second = OpKind("Twice", jnp.cos)
    other = OpKind("Twice", jnp.tan, key="the other")

    def saved(kind: OpKind) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            kind(popxl.variable(1.0))
        ir.save(tmp_path / "program")
        return popxl.Ir.load(tmp_path / "program")

    assert saved(second).main_graph.ops[0].kind is second
    assert saved(other).main_graph.ops[0].kind is other
    with pytest.raises(PopxlError, match=r"another op has been declared under its key 'Twice'.*OpKind\(..., key"):
        saved(first)


def test_the_keys_of_our_ops_are_their_own() -> None:
    ours = {op.kind for op in all_ops()}
    assert all(OpKind.named(kind.key) is kind for kind in ours)


def all_ops() -> list[Any]:
    ir = popxl.Ir()
    with ir.main_graph as main:
        for row in ROWS:
            for form in (row.build or row.op, function_of(row.inplace.name) if row.inplace else None):
                if form is not None:
                    form(*tensors_for(row.samples[0].operands), **row.samples[0].attributes)
    return main.ops


def test_what_cannot_be_written(tmp_path: Path) -> None:
    """The op and the attribute are named; a file that is there stays."""
    path = tmp_path / "program"
    path.write_text("the old one")
    kind = OpKind("WithFunction", lambda t, *, by: by(t))
    ir = popxl.Ir()
    with ir.main_graph:
        kind(popxl.variable(1.0), by=jnp.sin)
    with pytest.raises(PopxlError, match=r"`by` of Op\[WithFunction\.\d+\] is .* cannot be saved"):
        ir.save(path)
    assert path.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_the_files(tmp_path: Path) -> None:
    """It says its version, and has the numbers by tensor id; saving again leaves nothing behind."""
    ir, x_in, y_out = trained()
    path = tmp_path / "program.json"
    ir.save(path)
    program, blobs = unpack(KIND, path.read_bytes())
    assert (program["format"], program["popxl"]) == (3, popxl.__version__)
    np.testing.assert_array_equal(safetensors.numpy.load(blobs["arrays"])["w"], np.eye(3))
    runs(ir, x_in, y_out)
    ir.save(path)
    assert unpack(KIND, path.read_bytes())[1] != blobs
    assert [*tmp_path.iterdir()] == [path]


def test_files_of_earlier_versions(tmp_path: Path) -> None:
    """Two files: JSON, and numbers in a file that is named after its digest."""
    ir, *_ = trained()
    path = tmp_path / "program"
    write_format_2(ir, path)
    assert str(popxl.Ir.load(path)) == str(ir)
    (arrays,) = tmp_path.glob("*.safetensors")
    arrays.write_bytes(arrays.read_bytes()[:-1])
    with pytest.raises(UnreadableFileError, match="is not what was written; its digest is"):
        popxl.Ir.load(path)
    for elsewhere in ("/etc/passwd", f"../{arrays.name}"):
        write_format_2(ir, path, elsewhere)
        with pytest.raises(UnreadableFileError, match="Invalid name"):
            popxl.Ir.load(path)
    write_format_2(ir, path)
    arrays.unlink()
    with pytest.raises(UnreadableFileError, match="No such file"):
        popxl.Ir.load(path)
    path.write_bytes(path.read_bytes().replace(b'"id"', b'"di"', 1))
    with pytest.raises(UnreadableFileError, match="it is damaged: its digest differs"):
        popxl.Ir.load(path)


@pytest.mark.parametrize("format", [1, 2])
def test_files_that_earlier_versions_wrote(format: int) -> None:
    """Versions of November 2026, before all files were one container."""
    ir = popxl.Ir.load(Path(__file__).parent / "earlier_files" / f"format_{format}.popxl")
    (x,), (y,), (w,) = ir.get_all_h2d_streams(), ir.get_all_d2h_streams(), ir.main_graph.variables
    rows, weights = np.ones((2, 3), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)
    with popxl.Session(ir, "ipu_model") as session:
        np.testing.assert_array_equal(session.run({x: rows})[y], rows @ weights)
        np.testing.assert_array_equal(session.get_tensor_data(w), weights - 0.5)


def test_a_gradient_that_an_earlier_version_saved_reads_inputs() -> None:
    """The gradient of an exponential function now reads its result."""
    ir = popxl.Ir.load(Path(__file__).parent / "earlier_files" / "gradient_by_inputs.popxl")
    with popxl.Session(ir, "ipu_model") as session:
        (dx,) = session.run().values()
    np.testing.assert_allclose(dx, 2 * np.exp(np.array([[0.5, -1.0, 2.0]], np.float32)), rtol=1e-6)


def write_format_2(ir: popxl.Ir, path: Path, named: str | None = None) -> None:
    """Save a program as earlier versions have."""
    ir.save(path)
    program, blobs = unpack(KIND, path.read_bytes())
    name = f"{path.stem}-{digest(blobs['arrays'])[:16]}.safetensors"
    path.with_name(name).write_bytes(blobs["arrays"])
    program |= {"format": 2, "arrays": named or name}
    path.write_bytes(with_digest(json.dumps({"digest": ""} | program, indent=1).encode()))


def edited(program: dict[str, Any], damage: str) -> None:
    """Damage the JSON of a program."""
    ops, tensors = program["graphs"][0]["ops"], program["graphs"][0]["tensors"]
    if damage == "newer":
        program |= {"format": 99, "popxl": "99.0", "something": "new"}
    elif damage == "unknown field":
        ops[0]["colour"] = "red"
    elif damage == "dangling tensor":
        ops[1]["inputs"][0] = "nobody"
    elif damage == "dangling graph":
        next(op for op in ops if op["kind"] == "Call")["attributes"]["graph"] = {"graph": "nobody"}
    elif damage == "shape of a variable":
        next(t for t in tensors if t["id"] == "w")["spec"] = {"spec": [[9, 9], "float32", []]}
    elif damage == "shape of a result":
        next(t for t in tensors if t["id"] == "scaled_add__w")["spec"] = {"spec": [[9, 9], "float32", []]}
    elif damage == "dtype":
        next(t for t in tensors if t["id"] == "w")["spec"] = {"spec": [[3, 3], "float31", []]}
    elif damage == "attribute":
        next(op for op in ops if op["kind"] == "ScaledAddLhsInplace")["attributes"]["a"] = {"what": 1}


DAMAGES = {
    "newer": "it has format 99, of popxl 99.0; this popxl reads format 3",
    "other bytes": "it is damaged: its digest differs",
    "unknown field": "colour",
    "dangling tensor": "'nobody' is missing",
    "dangling graph": "'nobody' is missing",
    "shape of a variable": r"Variable\[w .*numbers of the shape \(3, 3\)",
    "shape of a result": "does not make",
    "dtype": "float31",
    "attribute": "'what' is missing",
    "truncated": "it is no JSON",
    "truncated arrays": "digest",
    "no arrays": "'arrays' is missing",
    "another file": "JSON",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    """A clear error for each, which says what is wrong."""
    ir, *_ = trained()
    path = tmp_path / "program"
    ir.save(path)
    program, blobs = unpack(KIND, path.read_bytes())
    edited(program, damage)
    content = pack(KIND, program, {"others": b""} if damage == "no arrays" else blobs)
    others = {
        "other bytes": content.replace(b"trained", b"drained").replace(b"float32", b"float16"),
        "truncated": content[:900],
        "truncated arrays": content[:-1],
        "another file": b"hello",
    }
    path.write_bytes(others.get(damage, content))
    with pytest.raises(
        UnreadableFileError, match=r"Ir.load: '.*program' does not hold a program that can be read"
    ) as error:
        popxl.Ir.load(path)
    assert re.search(DAMAGES[damage], str(error.value)), error.value


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        popxl.Ir.load(tmp_path / "nothing")
