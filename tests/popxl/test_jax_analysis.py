"""`popxl.analyze`: what a function of JAX needs, sends and costs, without a change to it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import popxl
from popxl.__main__ import main
from runtime.costs.hlo import parse_hlo
from runtime.costs.schedule import schedule_of

LAYERS, ROWS, WIDTH = 5, 64, 48


def loss(weights: Any, x: Any) -> Any:
    def turn(x: Any, w: Any) -> tuple[Any, None]:
        return jnp.tanh(x @ w), None

    return jnp.sum(jax.lax.scan(turn, x, weights)[0])


@partial(jax.jit, donate_argnums=0)
def step(weights: Any, x: Any) -> tuple[Any, Any]:
    value, gradients = jax.value_and_grad(loss)(weights, x)
    return weights - 0.1 * gradients, value


def specs(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


SHAPES = specs((LAYERS, WIDTH, WIDTH), (ROWS, WIDTH))


def test_sizes_and_operations() -> None:
    found = popxl.analyze(step, *SHAPES)
    weights, rows = 4 * LAYERS * WIDTH**2, 4 * ROWS * WIDTH
    assert found.cost.argument_bytes == weights + rows and found.cost.alias_bytes == weights
    products = 3 * 2 * ROWS * WIDTH**2 * LAYERS  # forward, and the gradients of both factors
    assert products <= found.cost.flops <= 1.1 * products + 10 * LAYERS * (weights + rows)
    assert found.memory.temporaries >= LAYERS * rows  # what the backward loop reads
    assert found.devices == 1 and "step needs" in str(found)


class Doubling:
    def __call__(self, x: Any) -> Any:
        return x * 2


def test_names_of_functions_without_one_hold_no_address() -> None:
    (x,) = specs((3,))
    assert popxl.analyze(Doubling(), x).name == "Doubling"
    assert popxl.analyze(partial(loss), *SHAPES).name == "loss"


@pytest.mark.here
def test_live_buffers_are_told_by_lines() -> None:
    found = popxl.analyze(step, *SHAPES)
    first = step.__wrapped__.__code__.co_firstlineno
    gradient = f"test_jax_analysis.py:{first + 2}"
    scan = f"test_jax_analysis.py:{loss.__code__.co_firstlineno + 4}"
    lines = {each.line: each for each in found.live}
    assert {scan, gradient} & lines.keys()
    assert sum(each.bytes for each in found.live) <= 1.1 * found.memory.temporaries
    assert sum(each.kernels for each in found.lines) == found.cost.kernels
    assert "Live at the peak" in str(found) and "svg" in found.picture()


@pytest.mark.parametrize("turns", [3, 9])
def test_what_loops_stack_is_live(turns: int) -> None:
    """Forward results that the backward loop reads are live as a whole; recomputed ones are not."""
    shapes = specs((turns, WIDTH, WIDTH), (ROWS, WIDTH))

    def live(function: Callable[..., Any]) -> int:
        executable = jax.jit(jax.grad(function)).lower(*shapes).compile()
        return max(schedule_of(parse_hlo(executable.as_text())).live_bytes())

    kept = live(lambda w, x: jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]))
    assert kept >= 4 * turns * ROWS * WIDTH


def test_a_function_that_is_not_jitted_and_static_arguments() -> None:
    def scaled(x: Any, *, by: int) -> Any:
        return x * by

    found = popxl.analyze(jax.jit(scaled, static_argnames="by"), np.ones((3, 4), np.float32), by=2)
    assert found.cost.argument_bytes == 48
    assert popxl.analyze(jnp.sin, *specs((3, 4))).cost.argument_bytes == 48


def test_arguments_on_several_devices() -> None:
    mesh = Mesh(np.asarray(jax.devices("cpu")[:2]), ("data",))
    x = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    found = popxl.analyze(lambda x: jnp.sum(jnp.sin(x)), x)
    assert found.devices == 2 and found.cost.argument_bytes == 4 * 24
    (use,) = found.cost.uses
    assert (use.kind, use.replicas, use.count, use.bytes) == ("all-reduce", 2, 1, 4)
    assert use.source.startswith("test_jax_analysis.py:")


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "said"),
    [
        ((3,), {}, TypeError, "`function` must be a function; got 3"),
        ((jnp.sin,), {"target": 4}, TypeError, "`target` must be a description such as 'gpu h100:8'"),
        ((jnp.sin,), {"target": "h100"}, ValueError, "'h100' describes no machine"),
    ],
)
def test_bad_input(arguments: Any, options: Any, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        popxl.analyze(*arguments, **options)


def test_a_mesh_of_another_size_than_the_target() -> None:
    with pytest.raises(ValueError, match=r"must multiply to the 8 chips of 'gpu h100:8'; got {'data': 3}"):
        popxl.Target("gpu h100:8").mesh(data=3)


PROGRAM = """
    import sys

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.asarray(jax.devices("cpu")[:2]), ("data",))

    @jax.jit
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    def train():
        x = jax.device_put(np.ones((8, 6), np.float32), NamedSharding(mesh, PartitionSpec("data")))
        w = jax.device_put(np.ones((6, 4), np.float32), NamedSharding(mesh, PartitionSpec()))
        print("before", *sys.argv[1:])
        step(w, x)
        print("after")

    if __name__ == "__main__":
        train()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    return path


def test_report_of_a_function_in_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"{file}:step", "5"]) == 0
    out = capsys.readouterr().out
    assert "before 5" in out and "after" not in out
    assert "Analysis of step" in out and "all-reduce" in out and "train.py:13" in out
    assert "Stopped at `step(w, x)`" in out


def test_report_of_a_program_that_lacks_a_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text("import no_such_optimizers", encoding="utf-8")
    assert main(["report", f"{tmp_path / 'train.py'}:step"]) == 1
    assert (
        f"needs 'no_such_optimizers', which is not installed beside popxl, in {sys.prefix}" in capsys.readouterr().err
    )


def test_report_of_a_function_that_is_not_called(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"{file}:other"]) == 1
    err = capsys.readouterr().err
    assert "does not call a function 'other' of its own" in err and "at the top level of the file" in err


@pytest.mark.targets
@pytest.mark.parametrize("machine", ["gpu h100:2", "tpu v5e:1x2"])
def test_functions_are_compiled_for_machines_that_are_not_here(
    machine: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = popxl.Target(machine).mesh(data=2)
    w, x = specs((6, 4), (8, 6))
    w, x = (
        jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for each, spec in ((w, ()), (x, ("data",)))
    )
    found = popxl.analyze(lambda w, x: jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w), w, x, target=machine)
    assert found.fits and found.devices == 2 and found.cost.collectives["all-reduce"].bytes >= 96
    assert found.cost.seconds is not None and any(each.line for each in found.lines)
    assert main(["report", "--target", machine, f"{file}:step"]) == 0
    assert f"Analysis of step on {machine}" in capsys.readouterr().out


@pytest.mark.targets
@pytest.mark.parametrize(
    ("axes", "spec", "said"),
    [
        ({}, (), "<lambda> uses 1 of the 2 chips: no array is sharded. To divide a batch"),
        ({"data": 2}, (), "All 2 chips compute the same: no array is sharded. To divide a batch"),
        ({"data": 2}, ("data",), ""),
    ],
)
def test_chips_without_work(axes: dict[str, int], spec: tuple[str, ...], said: str) -> None:
    target = popxl.Target("gpu h100:2")
    sharding = NamedSharding(target.mesh(**axes), PartitionSpec(*spec)) if axes else None
    x = jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=sharding)
    text = " ".join(str(popxl.analyze(lambda x: x * 2, x, target=target)).split())
    assert said in text and (bool(said) or "chips:" not in text)


@pytest.mark.targets
def test_meshes_of_the_program_are_those_of_the_target() -> None:
    """In arguments, in options of `jax.jit`, in constraints and in `shard_map`, by position."""
    mesh = Mesh(np.asarray(jax.devices("cpu")[:2]), ("data",))
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def total(x: Any) -> Any:
        return jax.lax.psum(x.sum(), "data")

    def step(w: Any, x: Any) -> Any:
        x = jax.lax.with_sharding_constraint(jnp.tanh(x), rows)
        return w + jax.shard_map(total, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())(x)

    jitted = jax.jit(step, in_shardings=(whole, rows), out_shardings=whole, donate_argnums=0)
    found = popxl.analyze(jitted, *specs((6, 4), (8, 6)), target="gpu h100:2")
    assert found.devices == 2 and found.cost.overwritten == {"w": 96} and "all-reduce" in found.cost.collectives
    with pytest.raises(popxl.errors.PopxlError, match=r"a mesh has 2 devices, and gpu h100 has 1"):
        popxl.analyze(jitted, *specs((6, 4), (8, 6)), target="gpu h100")


@pytest.mark.targets
def test_random_keys_are_arguments() -> None:
    def dropped(x: Any, key: Any, keys: Any) -> Any:
        return x * jax.random.bernoulli(key, 0.5, x.shape) + jax.random.normal(keys[1], x.shape)

    (x,) = specs((6, 4))
    key = jax.random.key(0)
    assert popxl.analyze(dropped, x, key, jax.eval_shape(jax.random.split, key), target="gpu h100").fits
