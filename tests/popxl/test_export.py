"""Programs as files of JAX: in a process that cannot import popxl they compute the same."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError

pytest.importorskip("flatbuffers")  # what JAX writes these files with; the extra `export`

X = np.arange(6, dtype=np.float32).reshape(2, 3)

ELSEWHERE = """
    import sys
    for name in ("popxl", "runtime", "popxl_addons", "poptorch", "popart", "popdist"):
        sys.modules[name] = None  # as if there were none
    from pathlib import Path
    import jax, numpy as np
    from jax import export
    from safetensors.flax import load_file

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    model = export.deserialize(Path("model.jax").read_bytes())
    step = export.deserialize(Path("step.jax").read_bytes())
    variables = load_file("step.safetensors")
    losses = []
    for _ in range(3):
        outputs, changed = jax.jit(step.call)(variables, {"x": x})
        variables |= changed
        losses.append(outputs["loss"])
    np.savez("found.npz", y=model.call({"x": x})["y"], losses=losses, **variables)
"""


class Halves(addons.Module):
    """Two layers, one outlined graph."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = addons.layers.Linear(3).create_graph(x)
        for name in ("first", "second"):
            (x,) = graph.bind(self.add_variable_inputs(name, facts)).call(ops.tanh(x))
        return x


def model() -> tuple[popxl.Ir, Any]:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        np.random.seed(5)
        x = popxl.h2d_stream((2, 3), popxl.float32, "x")
        facts, graph = Halves().create_graph(x.spec)
        (y,) = graph.bind(facts.init()).call(ops.host_load(x))
        out = popxl.d2h_stream(y.shape, y.dtype, "y")
        ops.host_store(out, y)
    return ir, (x, out)


def step() -> tuple[popxl.Ir, Any]:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream((2, 3), popxl.float32, "x")
        w = popxl.variable(np.eye(3), popxl.bfloat16, "model.w")
        n = popxl.variable(0, popxl.int32, "n")
        y = ops.cast(ops.host_load(x), popxl.bfloat16) @ w
        ops.scaled_add_(w, w, b=-0.25)
        ops.add_(n, popxl.constant(1, popxl.int32))
        loss = popxl.d2h_stream((), popxl.float32, "loss")
        ops.host_store(loss, ops.cast(ops.sum(y), popxl.float32))
    return ir, (x, w, n, loss)


@pytest.mark.compiled_whole
def test_in_a_process_without_popxl(tmp_path: Path) -> None:
    ir, (x, y) = model()
    popxl.export(ir, tmp_path / "model.jax")
    other, (x_in, w, n, loss) = step()
    with popxl.Session(ir) as session, popxl.Session(other) as training:
        expected = session.run({x: X})[y]
        training.run({x_in: X})
        popxl.export(training, tmp_path / "step.jax", weights="beside")  # as it is now, on the device
        losses = [training.run({x_in: X})[loss] for _ in range(3)]
        weight = training.get_tensor_data(w)
    np.testing.assert_allclose(losses, 15 * 0.75 ** np.arange(1, 4), rtol=0.01)
    code = [sys.executable, "-c", textwrap.dedent(ELSEWHERE)]
    done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "found.npz") as found:
        np.testing.assert_allclose(found["y"], expected, rtol=1e-6)
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-2)
        assert found["n"] == 4
        assert found["model.w"].view(popxl.bfloat16.as_numpy()).tolist() == weight.tolist()


def test_for_other_platforms(tmp_path: Path) -> None:
    ir, _ = model()
    exported = popxl.export(ir, tmp_path / "model.jax", platforms=["cpu", "cuda", "tpu"])
    assert exported.platforms == ("cpu", "cuda", "tpu")
    again = jax.export.deserialize((tmp_path / "model.jax").read_bytes())
    assert again.mlir_module() == exported.mlir_module() and "stablehlo.tanh" in exported.mlir_module()
    assert (again.in_tree, again.out_tree) == (jax.tree.structure((({"x": 0},), {})), jax.tree.structure({"y": 0}))


@pytest.mark.parametrize(
    ("platform", "called_graphs", "noinline_calls"),
    [("cpu", "auto", 2), ("cpu", "inlined", 0), ("cuda", "auto", 0), ("tpu", "auto", 0), ("cuda", "kept", 2)],
)
def test_calls_are_inlined_on_accelerators(
    tmp_path: Path, platform: str, called_graphs: str, noinline_calls: int
) -> None:
    ir, _ = model()
    ir.options.calledGraphs = called_graphs
    text = popxl.export(ir, tmp_path / "model.jax", platforms=[platform]).mlir_module()
    assert text.count('inlineable = "false"') == noinline_calls


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    path = tmp_path / "program.jax"
    ir, _ = step()
    with pytest.raises(ValueError, match=r"changes the variables model\.w, n, .*`weights='beside'`"):
        popxl.export(ir, path)
    with pytest.raises(ValueError, match="`weights` is 'outside'; expected 'inside' or 'beside'"):
        popxl.export(ir, path, weights="outside")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="where the weights are to be"):
        popxl.export(ir, path.with_suffix(".safetensors"), weights="beside")
    with pytest.raises(TypeError, match="`program` must be an Ir or a Session; got Graph"):
        popxl.export(ir.main_graph, path)  # type: ignore[arg-type]
    session = popxl.Session(ir)
    with ir.main_graph:
        ops.print_tensor(popxl.constant(1.0))
    with pytest.raises(PopxlError, match=r"Session\.export: .* has changed"):
        popxl.export(session, path)
    with pytest.raises(PopxlError, match="export: the program prints"):
        popxl.export(ir, path)
    with pytest.raises(PopxlError, match="export: .* has 2 replicas"):
        popxl.export(popxl.Ir(replication=2), path)
    assert not list(tmp_path.iterdir())


def test_variables_of_another_session(tmp_path: Path) -> None:
    """A session that has variables of another one is written with what these are there."""
    training, using = popxl.Ir(), popxl.Ir()
    with training.main_graph:
        theirs = popxl.variable(np.ones(3), popxl.float32, "w")
        ops.add_(theirs, 1.0)
    with using.main_graph:
        w = popxl.variable(np.zeros(3), popxl.float32, "w")
        ops.host_store(popxl.d2h_stream((3,), popxl.float32, "out"), w * 2.0)
    with popxl.Session(training, "cpu") as trained, popxl.Session(using, "cpu") as session:
        session.use_variables_of(trained, {w: theirs})
        trained.run()
        exported = popxl.export(session, tmp_path / "model.jax")
    np.testing.assert_array_equal(exported.call({})["out"], [4, 4, 4])
