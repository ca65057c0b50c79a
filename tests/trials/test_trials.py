"""The machinery of random programs: what it computes is what sessions compute, and its programs are as they are said
to be."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from popxl.extend.graphs import reachable
from tests.mutants.__main__ import numbers
from tests.trials.__main__ import Trial, table, tried
from tests.trials.families import FAMILIES, RIGHT
from tests.trials.in_numpy import in_numpy
from tests.trials.op_by_op import op_by_op


def computed(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Most primitives that NumPy computes."""
    z = jnp.where(x > 0, jnp.tanh(x), jax.nn.gelu(x, approximate=False)) / (1 + jnp.abs(y.T[:, :3]))
    padded = jax.lax.pad(z, 0.5, ((1, -1, 0), (0, 2, 1)))
    turned = jax.lax.reshape(jnp.stack([x, z]), (6, 4), dimensions=(1, 2, 0))
    ordered = jnp.cumsum(jnp.flip(turned, 0), 1), jax.lax.cumsum(z, 0, reverse=True)
    return x @ y, jnp.einsum("ab,cb->ca", y, y), jax.nn.softmax(padded, 0), x**3 + x**-2, *ordered, jnp.max(z, 1)


def test_numpy_computes_what_jax_does() -> None:
    x, y = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((4, 3), (3, 4)))
    found = in_numpy(computed, (x, y))(x, y)
    for value, expected in zip(found, jax.jit(computed)(x, y), strict=True):
        assert value.dtype == np.float64
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


def agree(family: str, seed: int) -> None:
    """Compare a program, run op by op, with the same program, compiled."""
    program = FAMILIES[family](seed)
    with op_by_op():
        found = numbers("kit, divided", program.build(dict(program.axes)))
    ir = program.build(dict(program.axes))
    is_half = any(t.dtype.is_half for graph in reachable(ir.main_graph) for op in graph.ops for t in op.outputs)
    tolerance = 1e-2 if is_half else 1e-3
    for name, expected in numbers("kit, divided", ir).items():
        largest = np.abs(expected).max(initial=0.01)
        np.testing.assert_allclose(found[name], expected, tolerance, tolerance * largest, err_msg=name)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", RIGHT)
def test_a_program_op_by_op_is_the_compiled_one(family: str, seed: int) -> None:
    agree(family, seed)


@pytest.mark.thorough(but_each=40)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("family", RIGHT)
def test_nothing_is_found_in_programs_that_are_right(family: str, seed: int) -> None:
    with op_by_op():
        trial = tried(family, seed)
    overflows = trial.differs.startswith(("FloatingPointError", "OverflowError"))
    assert overflows or trial == Trial(family, seed, True)


def test_mistakes_make_numbers_wrong_and_are_found() -> None:
    with op_by_op():
        trials = [tried("by hand, mistakes", seed) for seed in (4, 8)]
    assert any(each.is_right is False and (each.certain or each.uncertain) for each in trials)
    assert [*table(trials)][-1].startswith("| by hand, mistakes | 2 |")
