"""Costs of two compiled programs are compared: by tests with a reviewed file, and by `popxl diff`."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import popxl
from popxl import ops
from popxl.__main__ import main
from popxl.testing import assert_costs
from runtime.costs.changes import changes_of
from runtime.costs.lines import LineCost

ROWS, WIDTH = 16, 24


def cost(function: Callable[..., Any], *specs: Any, **options: Any) -> Any:
    return popxl.analyze(jax.jit(function, **options), *specs).cost


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def stacked(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w)[0]


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(jax.checkpoint(lambda x, w: (layer(w, x), None)), x, w)[0])


def loss_that_keeps(w: Any, x: Any) -> Any:
    return jnp.sum(stacked(w, x))


W, X = spec(WIDTH, WIDTH), spec(ROWS, WIDTH)
STACK = spec(7, WIDTH, WIDTH)

HALVES = spec(WIDTH, WIDTH, dtype=jnp.float16), spec(ROWS, WIDTH, dtype=jnp.float16)

REGRESSIONS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "a wider dtype": (lambda: cost(layer, *HALVES), lambda: cost(layer, W, X), "arguments"),
    "a lost donation": (
        lambda: cost(jnp.add, X, X, donate_argnums=0),
        lambda: cost(jnp.add, X, X),
        "overwritten with results",
    ),
    "an unrolled loop": (
        lambda: cost(stacked, STACK, X),
        lambda: cost(lambda w, x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, w, unroll=True)[0], STACK, X),
        "read and written",
    ),
    "recomputation lost": (
        lambda: cost(jax.grad(loss), STACK, X),
        lambda: cost(jax.grad(loss_that_keeps), STACK, X),
        "operations",
    ),
    "a product more": (lambda: cost(layer, W, X), lambda: cost(lambda w, x: layer(w, layer(w, x)), W, X), "operations"),
}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions_are_named(name: str) -> None:
    before, after, what = REGRESSIONS[name]
    found = changes_of(before(), after())
    assert what in [change.what for change in found.changes]
    assert all(change.before != change.after for change in found.changes) and what in str(found)


def test_equal_programs_have_no_changes() -> None:
    found = changes_of(cost(layer, W, X), cost(lambda w, x: layer(w, x), W, X))
    assert not found and "Nothing changed." in str(found)


def test_of_two_equal_lines_the_one_that_is_gone_is_named() -> None:
    whole = cost(layer, spec(WIDTH, WIDTH), spec(ROWS, WIDTH))
    lines = [LineCost(line=f"step.py:{n}", kernels=3, flops=5, bytes_accessed=7) for n in (1, 2)]
    before, after = (whole.model_copy(update={"lines": tuple(some)}) for some in (lines, lines[1:]))
    assert {change.where for change in changes_of(before, after).changes} == {"step.py:1"}


def sharded() -> jax.ShapeDtypeStruct:
    mesh = Mesh(np.asarray(jax.devices("cpu")[:2]), ("data",))
    return jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))


def test_collectives_are_named_by_line_and_those_that_moved_are_not() -> None:
    def total(x: Any) -> Any:
        return jnp.sum(x)

    def total_elsewhere(x: Any) -> Any:
        return jnp.sum(x)

    def twice(x: Any) -> Any:
        return jnp.sum(x) + jnp.max(x)

    before = cost(total, sharded())
    assert not [c for c in changes_of(before, cost(total_elsewhere, sharded())).changes if "all-reduce" in c.what]
    line = f"test_cost_changes.py:{twice.__code__.co_firstlineno + 1}"
    found = [c for c in changes_of(before, cost(twice, sharded())).changes if "all-reduce" in c.what]
    assert found and {c.where for c in found} <= {line, before.uses[0].source}


@pytest.fixture
def session() -> popxl.Session:
    ir = popxl.Ir()
    with ir.main_graph:
        w = popxl.variable(np.ones((3, 4)), popxl.float32, "w")
        out = popxl.d2h_stream((3, 3), popxl.float32, "out")
        ops.host_store(out, w @ w.T)
    return popxl.Session(ir)


def test_a_file_of_budgets(session: popxl.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "costs.json"
    with pytest.raises(FileNotFoundError, match="set the environment variable POPXL_REWRITE_COSTS=1 once"):
        assert_costs(session, file)
    monkeypatch.setenv("POPXL_REWRITE_COSTS", "1")
    assert_costs(session, file)
    monkeypatch.delenv("POPXL_REWRITE_COSTS")
    assert_costs(session, file)
    assert_costs(session.cost(), file)
    more = session.cost().model_copy(update={"flops": 10_000, "kernels": 99})
    with pytest.raises(AssertionError, match=r"(?s)operations: .* → 10 kFLOP.*kernels: \d+ → 99"):
        assert_costs(more, file)


def test_bad_budgets(session: popxl.Session, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text("{}")
    with pytest.raises(popxl.errors.PopxlError, match="holds no cost of a program"):
        assert_costs(session, file)
    with pytest.raises(TypeError, match="`program` must be a session"):
        assert_costs(3, file)  # type: ignore[arg-type]


PROGRAM = """
    import jax, jax.numpy as jnp, numpy as np
    step = jax.jit(lambda x: FUNCTION)
    step(np.ones((3, 4), np.float32))
"""


def test_diff_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, function in (("old.py", "jnp.sum(x)"), ("new.py", "jnp.sum(x @ x.T)")):
        (tmp_path / name).write_text(textwrap.dedent(PROGRAM).replace("FUNCTION", function), encoding="utf-8")
        files.append(f"{tmp_path / name}:step")
    assert main(["diff", *files]) == 0
    assert "operations" in capsys.readouterr().out
    assert main(["diff", files[0], files[0]]) == 0
    assert "Nothing changed." in capsys.readouterr().out
    assert main(["diff", files[0], "none.py"]) == 2
    assert "'none.py' is not a file" in capsys.readouterr().err


def test_diff_of_saved_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, dtype in (("old.popxl", popxl.float16), ("new.popxl", popxl.float32)):
        ir = popxl.Ir()
        with ir.main_graph:
            w = popxl.variable(np.ones((ROWS, WIDTH)), dtype, "w")
            graph = ir.create_graph(lambda w: ops.tanh(w @ w.T), w)
            (y,) = ops.call(graph, w)
            ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "out"), y)
        files.append(str(tmp_path / name))
        ir.save(files[-1])
    assert main(["diff", *files]) == 0
    said = capsys.readouterr().out
    assert re.search(r"argument +w +768 B +1.54 kB", said) and re.search(r"operations +test_cost_changes.py:\d+", said)
    assert "lower.py" not in said
    assert main(["diff", "--exit-code", *files]) == 1
    assert main(["diff", "--exit-code", files[0], files[0]]) == 0
    assert "Nothing changed." in capsys.readouterr().out


SAVES_A_STEP = """
import sys
import numpy as np
import popxl
import popxl_addons as addons
from popxl import ops


class Model(addons.Module):
    def build(self, x):
        return ops.mean(x @ self.add_variable_input("w", lambda: np.ones((4, 2)), x.dtype))


ir = popxl.Ir(replication=2)
with ir.main_graph:
    x = popxl.h2d_stream((3, 4), popxl.float32, "x")
    addons.train_step(Model(), x, optimizer=lambda *args, **kwargs: addons.optimizers.adamw(*args, lr=1e-3, **kwargs))
ir.save(sys.argv[1])
"""


def test_diff_of_saved_programs_of_a_kit(tmp_path: Path) -> None:
    """With replicas, and ops that `popxl_addons` declares, which the command imports by itself."""
    file = str(tmp_path / "step.json")  # a name as of costs
    assert subprocess.run([sys.executable, "-c", SAVES_A_STEP, file], check=False).returncode == 0
    command = [sys.executable, "-m", "popxl", "diff", file, file]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "Nothing changed." in done.stdout


def test_diff_of_programs_of_earlier_versions(capsys: pytest.CaptureFixture[str]) -> None:
    """Such files are text, and no Python."""
    files = [str(Path(__file__).with_name("earlier_files") / f"format_{i}.popxl") for i in (1, 2)]
    assert main(["diff", *files]) == 0
    assert "Nothing changed." in capsys.readouterr().out
