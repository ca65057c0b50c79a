"""complex64 through whole programs: in and out, through calls and loops and back, onto files, beside JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate, store

C64 = popxl.complex64


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(np.complex64)


def test_in_and_out(tmp_path: Path) -> None:
    """Streams, constants, numbers beside tensors, variables that are read and written; saved and loaded."""
    ir = popxl.Ir()
    with ir.main_graph as main, popxl.in_sequence():
        z_in = popxl.h2d_stream((2, 3), C64, "z")
        w = popxl.variable(numbers(3), name="w")
        z = ops.host_load(z_in, "z")
        y = (1j * z - popxl.constant(2 - 1j, C64)) / w
        w += ops.sum(z, 0)
        out = popxl.d2h_stream(y.shape, y.dtype, "y")
        ops.host_store(out, y)
    assert "div_out: c64[2, 3]" in str(main) and "Div(" in str(main)
    given = numbers(2, 3, seed=1)
    expected = (1j * given - (2 - 1j)) / numbers(3)
    ir.save(tmp_path / "program.json")
    loaded = popxl.Ir.load(tmp_path / "program.json")
    (weight,) = loaded.main_graph.variables
    with popxl.Session(loaded, "ipu_model") as session:
        (z_in,) = session.expected_inputs()
        results = session.run({z_in: given})
        np.testing.assert_allclose(*results.values(), expected, rtol=1e-5)
        after = session.get_tensor_data(weight).copy()
        np.testing.assert_allclose(after, numbers(3) + given.sum(0), rtol=1e-5)
        session.write_variable_data(weight, after * 1j)
        (result,) = session.run({z_in: given}).values()
        np.testing.assert_allclose(result, expected * numbers(3) / (after * 1j), rtol=1e-5)


def test_gradients_through_calls_loops_and_choices() -> None:
    """PyTorch's, of a real function of complex tensors; one descends by it."""
    torch = pytest.importorskip("torch")
    z, w, a = numbers(3), numbers(3, seed=1), np.float32([0.5, -1, 2])

    def step(t: Any, w: Any) -> Any:
        return ops.exp(t * w * 0.3j)

    def build(z: Any, w: Any, a: Any) -> list[Any]:
        ir = popxl.gcg().ir
        turn = ir.create_graph(step, z, w)
        choice = [ir.create_graph(lambda t, f=f: f(t), z) for f in (ops.conj, lambda t: t * t)]

        def loss(z: Any, w: Any, a: Any) -> Any:
            (looped,) = ops.repeat(turn, 3, z, w)
            (called,) = ops.call(turn, looped, ops.complex(a, a))
            (chosen,) = ops.conditional(popxl.constant(True), *choice, [called], [called])
            return ops.sum(ops.square(ops.abs(chosen))) + ops.sum(ops.imag(chosen))

        graph = ir.create_graph(loss, z, w, a)
        info = autodiff(graph)
        site = ops.call_with_info(graph, z, w, a)
        return [site.outputs[0], *ops.call(info.graph, popxl.constant(1.0), inputs_dict=info.inputs_dict(site))]

    found = evaluate(build, z, w, a)
    leaves = [torch.tensor(t, requires_grad=True) for t in (z, w, a)]
    t, tw, ta = leaves
    for _ in range(3):
        t = torch.exp(t * tw * 0.3j)
    t = torch.exp(t * torch.complex(ta, ta) * 0.3j).conj()
    total = t.abs().square().sum() + t.imag.sum()
    total.backward()
    for ours, theirs in zip(found, [total.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        np.testing.assert_allclose(ours, theirs.resolve_conj().numpy(), rtol=2e-5, atol=1e-6)


def test_gradients_have_names_of_their_own() -> None:
    """Inside of a gradient graph there are conjugates, and no name that says something else."""
    ir = popxl.Ir()
    info = autodiff(ir.create_graph(lambda z, w: ops.sum(z * w, 0), *[popxl.TensorSpec((2,), C64)] * 2))
    names = [t.name for t in info.graph.outputs], {t.name for op in info.graph.ops for t in op.outputs}
    assert names[0] == ["Gradient___z", "Gradient___w"]
    assert {"Gradient___z__conj", "Gradient___w__conj", "Gradient___sum_out__conj"} < names[1]


def test_beside_jax() -> None:
    """A graph as a function of JAX has JAX's gradients, the conjugates; and a function of JAX becomes a graph."""
    z = numbers(2, 3)

    def ours(z: Any) -> Any:
        return ops.sum(ops.abs(ops.fft(z * z, norm="ortho")) * 2.0)

    def theirs(z: Any) -> Any:
        return jnp.sum(jnp.abs(jnp.fft.fft(z * z, norm="ortho")) * 2.0)

    graph = popxl.Ir().create_graph(ours, popxl.TensorSpec((2, 3), C64))
    np.testing.assert_allclose(jax.grad(popxl.to_jax(graph))(z), jax.grad(theirs)(z), rtol=1e-5, atol=1e-6)

    def build(z: Any) -> list[Any]:
        imported = popxl.gcg().ir.create_graph(popxl.from_jax(theirs), z)
        info = autodiff(imported)
        site = ops.call_with_info(imported, z)
        return [site.outputs[0], *ops.call(info.graph, popxl.constant(1.0), inputs_dict=info.inputs_dict(site))]

    value, gradient = evaluate(build, z)
    np.testing.assert_allclose(value, theirs(z), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.conj(jax.grad(theirs)(z)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda z, x: ops.cast(z, popxl.float32), "complex, and float32 has no imaginary part.*`ops.real`"),
        (lambda z, x: z + x, "different dtypes, complex64 and float32"),
        (lambda z, x: x * 1j, "the data is complex, and `dtype` is popxl.dtypes.float32"),
        (lambda z, x: popxl.variable(np.ones(2) * 1j, popxl.float32), "which has no imaginary part"),
        (lambda z, x: z > z, "Greater: `input` is c64.*for real numbers alone.*`ops.abs`"),
        (lambda z, x: ops.var_updates.accumulate_(x, z), "complex numbers cannot be added to float32"),
        (lambda z, x: ops.scaled_add_(x, z), "complex numbers cannot be added to float32"),
        (lambda z, x: ops.scatter_reduce(z, popxl.constant([0, 1]), "max", axis_size=2), "for real numbers alone"),
        (lambda z, x: ops.arange(3, dtype=C64), "`dtype` is complex64; expected an integer type, or a float"),
    ],
)
def test_what_complex_numbers_are_not_for(build: Any, message: str) -> None:
    with popxl.Ir().main_graph as main:
        z, x = ops.init((2,), C64), ops.init((2,), popxl.float32)
        with pytest.raises((TypeError, PopxlError), match=message):
            build(z, x)
        assert len(main.ops) == 2


def test_a_complex_number_is_not_written_to_a_real_variable() -> None:
    with popxl.Ir().main_graph as main:
        v = popxl.variable(3.0, name="v")
        store(v * 1.0)
    with popxl.Session(main.ir) as session:
        with pytest.raises(TypeError, match=r"the data for Variable\[v .*\(1\+2j\), which is complex"):
            session.write_variable_data(v, 1 + 2j)
        assert session.get_tensor_data(v) == 3


def test_complex128_is_for_graphs_that_are_only_built() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        store(ops.conj(ops.cast(popxl.variable(np.ones(2)), popxl.complex128)))
    with pytest.raises(PopxlError, match=r"complex128, which cannot be run; use popxl.complex64"):
        popxl.Session(ir, "ipu_model")


def test_replicas_add_them_up() -> None:
    ir = popxl.Ir(replication=2)
    z = numbers(2, 3)
    with ir.main_graph:
        z_in = popxl.h2d_stream((3,), C64)
        total = ops.collectives.replicated_all_reduce(ops.host_load(z_in))
        (out,) = store(total)
    with popxl.Session(ir, "ipu_model") as session:
        np.testing.assert_allclose(session.run({z_in: z})[out][0], z.sum(0), rtol=1e-6)
