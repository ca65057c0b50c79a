"""`value_and_grad` beside `jax.value_and_grad`: numbers, trees, plans and budgets; the errors of bad input."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl.errors import PopxlError
from runtime.command import main

POLICIES = ("everything", "products", "nothing")


def randoms(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


@jax.jit
def layer(x: Any, w: Any, b: Any) -> Any:
    return jnp.tanh(x @ w + b)


def loss(params: Any, x: Any, rows: Any, layers: int = 2) -> Any:
    for _ in range(layers):
        x = layer(x, params["w"], params["b"])
    return jnp.mean((x - params["w"][rows]) ** 2)


def scanned(weights: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w, 0.0), x), x, weights)[0] ** 2)


def with_a_rule_over(w: Any, x: Any) -> Any:
    """A function with a rule of its own that closes over an argument, in a loop."""

    @jax.custom_vjp
    def scaled(w: Any) -> Any:
        return w * jnp.sum(x)

    scaled.defvjp(lambda w: (scaled(w), None), lambda _, g: (7 * g,))
    return jax.lax.scan(lambda total, row: (total * jnp.sum(scaled(w)) + row, None), jnp.float32(1), x[:, 0])[0]


PARAMS = {"w": randoms(3, 3), "b": randoms(3, seed=1), "unused": randoms(2)}
X, ROWS = randoms(4, 3, seed=2), np.array([0, 1, 2, 0], np.int32)
KEY = jax.random.key(3)
COMPLEX = randoms(3, 3) + 1j * randoms(3, 3, seed=1)


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a, np.complex64), np.asarray(b, np.complex64), rtol=2e-5, atol=1e-5)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "tree": (loss, (PARAMS, X, ROWS), {}),
    "several": (loss, (PARAMS, X, ROWS), {"argnums": (1, 0)}),
    "one of several": (loss, (PARAMS, X, ROWS), {"argnums": (-2,)}),
    "others": (
        lambda p, x, rows: (loss(p, x, rows), {"x": x, "sum": x.sum()}),
        (PARAMS, X, ROWS),
        {"has_aux": True},
    ),
    "loop": (scanned, (randoms(5, 3, 3), X), {}),
    "branches": (lambda w, x: jax.lax.cond(x.sum() > 0, lambda: jnp.sum(w**2), lambda: jnp.sum(w)), (X, X), {}),
    "checkpoint": (
        lambda p, x: jnp.sum(jax.checkpoint(partial(layer, b=p["b"]))(x, p["w"])),
        (PARAMS, X),
        {},
    ),
    "own rule": (lambda w, x: jnp.sum(jax.nn.relu(x @ w)), (randoms(3, 3), X), {}),
    "own rule over an argument": (with_a_rule_over, (randoms(2), randoms(3, 2)), {}),
    "itself": (lambda p: p, (jnp.float32(3.0),), {}),
    "number": (lambda p: p * p, (3.0,), {}),
    "constant": (lambda p: jnp.float32(2.0), (X,), {}),
    "bfloat16": (lambda w: jnp.mean(w**2), (jnp.asarray(X, jnp.bfloat16),), {}),
    "complex": (lambda w, x: jnp.sum(jnp.real(jnp.exp(w * w) * x)), (COMPLEX, randoms(3, 3, seed=4)), {}),
    "key": (
        lambda w, key: (jnp.sum(w * jax.random.normal(key, w.shape)), jax.random.split(key)),
        (X, KEY),
        {"has_aux": True},
    ),
    "closure": (lambda w: jnp.sum(w * jax.random.normal(KEY, w.shape) * X), (X,), {}),
}


@pytest.mark.parametrize("memory", POLICIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_and_trees(name: str, memory: str) -> None:
    function, arguments, settings = FUNCTIONS[name]
    found = jax.jit(addons.value_and_grad(function, memory=memory, **settings))(*arguments)
    assert_same(found, jax.jit(jax.value_and_grad(function, **settings))(*arguments))


def test_arguments_that_are_no_arrays() -> None:
    gradient = addons.value_and_grad(loss)
    assert_same(gradient(PARAMS, X, rows=ROWS, layers=3), jax.value_and_grad(loss)(PARAMS, X, rows=ROWS, layers=3))
    assert gradient.__name__ == "loss"
    named = addons.value_and_grad(lambda w, names: jnp.sum(w) * len(names))(X, np.array(["a", "b"]))
    assert_same(named, jax.value_and_grad(lambda w: jnp.sum(w) * 2)(X))


@pytest.mark.parametrize("memory", POLICIES)
def test_inside_of_other_transforms(memory: str) -> None:
    def of_a_trained_model(value_and_grad: Any) -> Any:
        def trained(p: Any) -> Any:
            _, gradients = value_and_grad(loss)(p, X, ROWS)
            return loss(jax.tree.map(lambda p, g: p - 0.1 * g, p, gradients), X, ROWS)

        return jax.jit(value_and_grad(trained))(PARAMS)

    def closes_over_tracers(value_and_grad: Any) -> Any:
        return jax.jit(lambda p, x, rows: value_and_grad(lambda p: loss(p, x, rows))(p))(PARAMS, X, ROWS)

    def accumulated(value_and_grad: Any) -> Any:
        def add(total: Any, batch: Any) -> Any:
            return jax.tree.map(jnp.add, total, value_and_grad(loss)(PARAMS, *batch)[1]), None

        batches = np.stack([X, 2 * X]), np.stack([ROWS, ROWS])
        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, PARAMS), batches)[0]

    def of_each_sample(value_and_grad: Any) -> Any:
        return jax.vmap(value_and_grad(loss), (None, 0, 0))(PARAMS, X[:, None], ROWS[:, None])

    def second_derivative(value_and_grad: Any) -> Any:
        return jax.jacrev(lambda weights: value_and_grad(scanned)(weights, X)[1])(randoms(2, 3, 3))

    for use in (closes_over_tracers, accumulated, of_each_sample, second_derivative, of_a_trained_model):
        assert_same(use(partial(addons.value_and_grad, memory=memory)), use(jax.value_and_grad))


def test_results_that_are_no_arrays() -> None:
    def with_others(w: Any) -> Any:
        return [jnp.sum(w), {"size": w.shape[0], "name": "w", "none": None, "rows": ROWS}]

    for value_and_grad in (addons.value_and_grad, jax.value_and_grad):
        (_, others), _ = value_and_grad(with_others, has_aux=True)(X)
        assert others == {"size": 4, "name": "w", "none": None, "rows": ROWS} and type(others["size"]) is int


def test_dtypes_of_numpy_and_python() -> None:
    def scaled(scale: Any, w: Any, labels: Any) -> Any:
        return jnp.sum(scale * w.at[labels].get()), scale * 2

    arguments = 2.0, jnp.asarray(X, jnp.bfloat16), np.array([0, 2, 1], np.int64)
    positions = [np.int64(1), 0]
    found = addons.value_and_grad(scaled, positions, has_aux=True)(*arguments)
    expected = jax.value_and_grad(scaled, (1, 0), has_aux=True)(*arguments)
    assert_same(found, expected)
    assert [a.weak_type for a in jax.tree.leaves(found)] == [a.weak_type for a in jax.tree.leaves(expected)]
    labels = np.array([1, 0, 2, 2], np.int64)
    assert_same(
        addons.value_and_grad(lambda w: jnp.mean(jnp.argmax(w, 1) == labels) + jnp.sum(w))(X),
        jax.value_and_grad(lambda w: jnp.mean(jnp.argmax(w, 1) == labels) + jnp.sum(w))(X),
    )


class Loss:
    """A function with attributes."""

    def __init__(self, activation: Any) -> None:
        self._fn, self.plan, self._has_aux = activation, "no plan", True

    def __call__(self, w: Any) -> Any:
        return jnp.sum(self._fn(w))


def test_an_object_with_attributes() -> None:
    assert_same(addons.value_and_grad(Loss(jnp.tanh))(X), jax.value_and_grad(Loss(jnp.tanh))(X))


# Memory --------------------------------------------------------------------------------------------------------------

WEIGHTS = [(randoms(16, 64, seed=i) / 8, randoms(64, 16, seed=i) / 8) for i in range(8)]
BATCH = randoms(256, 16)


@jax.jit
def block(x: Any, up: Any, down: Any) -> Any:
    return x + jnp.tanh(jnp.exp(jnp.sin(x @ up))) @ down


def of_blocks(weights: Any, x: Any) -> Any:
    for up, down in weights:
        x = block(x, up, down)
    return jnp.mean(x**2)


def step_with(memory: Any) -> Any:
    @partial(jax.jit, donate_argnums=0)
    def step(weights: Any, x: Any) -> Any:
        value, gradients = addons.value_and_grad(of_blocks, memory=memory)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    return partial(step, WEIGHTS, BATCH)


def test_a_policy_recomputes() -> None:
    def temporaries(memory: str) -> int:
        gradient = jax.jit(addons.value_and_grad(of_blocks, memory=memory))
        return gradient.lower(WEIGHTS, BATCH).compile().memory_analysis().temp_size_in_bytes

    everything, products, nothing = map(temporaries, POLICIES)
    assert nothing < 0.35 * everything and nothing < products < 0.6 * everything
    gradient = addons.value_and_grad(of_blocks, memory="products")
    assert gradient.plan is None
    gradient(WEIGHTS, BATCH)
    (graph,) = gradient.plan.graphs
    assert (graph.graph, graph.calls, graph.paths("keep")) == ("block", 8, ("dot_general_out",))


def test_a_budget_of_a_step() -> None:
    whole = popxl.analyze(step_with("everything").func, WEIGHTS, BATCH).memory.device
    found = addons.plan_memory(step_with, whole * 2 // 3)
    assert found.everything.device == whole
    assert 0.8 * found.budget < found.peak <= found.budget and found.plan.bytes("recompute") > 0
    applied = popxl.analyze(step_with(found.plan).func, WEIGHTS, BATCH)
    assert applied.memory.device == found.peak
    step = step_with(found.plan)
    weights, value = step.func(*jax.tree.map(jnp.array, step.args))
    expected, gradients = jax.value_and_grad(of_blocks)(WEIGHTS, BATCH)
    assert_same(value, expected)
    assert_same(weights, jax.tree.map(lambda w, g: w - 0.1 * g, WEIGHTS, gradients))


def test_a_budget_of_the_gradient_alone() -> None:
    whole = popxl.analyze(jax.jit(addons.value_and_grad(of_blocks)), WEIGHTS, BATCH).memory.device
    gradient = addons.value_and_grad(of_blocks, memory=f"{whole * 0.7:.0f} B")
    traced = jax.jit(gradient)
    assert_same(traced(WEIGHTS, BATCH), jax.value_and_grad(of_blocks)(WEIGHTS, BATCH))
    assert popxl.analyze(traced, WEIGHTS, BATCH).memory.device <= 0.7 * whole
    assert gradient.plan.budget == round(0.7 * whole) and gradient.plan.bytes("recompute") > 0


def test_a_budget_and_plain_arguments() -> None:
    def of_first(weights: Any, x: Any, layers: int) -> Any:
        return of_blocks(weights[:layers], x)

    gradient = addons.value_and_grad(of_first, memory="700 kB")
    for layers in (4, 8, 4):
        assert_same(gradient(WEIGHTS, BATCH, layers), jax.value_and_grad(of_first)(WEIGHTS, BATCH, layers))
        assert sum(graph.calls for graph in gradient.plan.graphs) == layers


def test_a_plan_from_a_file(tmp_path: Path) -> None:
    gradient = addons.value_and_grad(of_blocks)
    gradient(WEIGHTS, BATCH)
    gradient.plan.with_treatments("recompute", "tanh*", "exp*", calls=slice(4)).write_json(tmp_path / "plan.json")
    planned = addons.value_and_grad(of_blocks, memory=addons.MemoryPlan.read_json(tmp_path / "plan.json"))
    assert_same(planned(WEIGHTS, BATCH), jax.value_and_grad(of_blocks)(WEIGHTS, BATCH))
    assert [graph.calls for graph in planned.plan.graphs] == [4, 4]


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import popxl_addons as addons

@jax.jit
def block(x, up, down):
    return x + jnp.tanh(jnp.exp(x @ up)) @ down

def loss(weights, x):
    for up, down in weights:
        x = block(x, up, down)
    return jnp.mean(x**2)

@jax.jit
def step(weights, x):
    return addons.value_and_grad(loss)(weights, x)

weights = [(np.ones((16, 64), np.float32), np.ones((64, 16), np.float32))] * 8
step(weights, np.ones((256, 16), np.float32))
print("it has run")
"""


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    plan = tmp_path / "plan.json"
    assert main(["plan", f"{tmp_path / 'train.py'}:step", "--budget", "700 kB", "--save", str(plan)]) == 0
    out = capsys.readouterr().out
    assert "The budget is 700 kB of a device." in out and "it has run" not in out
    assert out.endswith(f"addons.value_and_grad(..., memory=addons.MemoryPlan.read_json({str(plan)!r}))\n")
    assert addons.MemoryPlan.read_json(plan).bytes("recompute") > 0
    assert main(["plan", "--budget", "700 kB", f"{tmp_path / 'train.py'}:none"]) == 1
    assert "does not call a function 'none' of its own" in capsys.readouterr().err


MODEL = """
import jax, jax.numpy as jnp
import popxl_addons as addons

@jax.jit
def block(x, w):
    return jnp.tanh(jnp.exp(jnp.sin(x @ w)))

def loss(weights, x):
    for w in weights:
        x = block(x, w)
    return jnp.mean(x**2)

@jax.jit
def gradients(weights, x):
    return addons.value_and_grad(loss)(weights, x)

@jax.jit
def other(w, x):
    return addons.value_and_grad(lambda w: jnp.sum(jnp.sin(block(x, w))))(w)
"""

IMPORTING = """
import jax, numpy as np
from model_of_plans import gradients, other

@jax.jit
def step(weights, x):
    return gradients(weights, x)

@jax.jit
def forward(x):
    return x + 1

weights, x = [np.ones((32, 32), np.float32)] * 8, np.ones((256, 32), np.float32)
other(weights[0], x)
step(weights, x)
"""


def test_the_command_on_functions_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model_of_plans.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(IMPORTING)
    (tmp_path / "eval.py").write_text(IMPORTING.replace("\nstep(weights, x)", "\nforward(x)"))
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        assert main(["plan", "--budget", "500 kB", f"{tmp_path / 'train.py'}:step"]) == 0
        assert "The budget is 500 kB of a device." in capsys.readouterr().out
    assert main(["plan", "--budget", "500 kB", f"{tmp_path / 'eval.py'}:forward"]) == 1
    assert "applies 0 memory plans" in capsys.readouterr().err


def test_a_static_argument_for_the_plan() -> None:
    @partial(jax.jit, static_argnames="memory")
    def step(weights: Any, x: Any, *, memory: Any = "everything") -> Any:
        return addons.value_and_grad(of_blocks, memory=memory)(weights, x)

    step(WEIGHTS, BATCH)
    first, second = (
        addons.plan_memory(lambda memory: partial(step, WEIGHTS, BATCH, memory=memory), "800 kB") for _ in range(2)
    )
    assert first.plan == second.plan and first.peak <= first.budget
    assert_same(step(WEIGHTS, BATCH, memory=first.plan), jax.value_and_grad(of_blocks)(WEIGHTS, BATCH))


# Several devices -----------------------------------------------------------------------------------------------------


def test_several_devices() -> None:
    spec = jax.sharding.PartitionSpec
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            weights, batch = jax.device_put((WEIGHTS, BATCH), jax.NamedSharding(mesh, spec("data")))
            found = jax.jit(addons.value_and_grad(of_blocks, memory="nothing"))(weights, batch)
            assert_same(found, jax.value_and_grad(of_blocks)(WEIGHTS, BATCH))
            if kind is jax.sharding.AxisType.Explicit:
                assert jax.typeof(found[1][0][0]).sharding.spec == spec("data", None)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = partial(jax.shard_map, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())

    def outside(weights: Any, x: Any) -> Any:
        return split(lambda weights, x: jax.lax.pmean(of_blocks(weights, x), "data"))(weights, x)

    def inside(weights: Any, x: Any) -> Any:
        return jax.lax.pmean(addons.value_and_grad(of_blocks, memory="nothing")(weights, x), "data")

    expected = jax.value_and_grad(of_blocks)(WEIGHTS, BATCH)
    assert_same(jax.jit(addons.value_and_grad(outside, memory="nothing"))(WEIGHTS, BATCH), expected)
    assert_same(jax.jit(split(inside, check_vma=False))(WEIGHTS, BATCH), expected)
    with pytest.raises(NotImplementedError, match="inside of `jax.shard_map`.*check_vma=False"):
        jax.jit(split(inside))(WEIGHTS, BATCH)


# Errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(3), TypeError, "value_and_grad: `fn` must be a function; got 3 (int)."),
        (
            lambda f: f(loss, argnums="a"),
            TypeError,
            "`argnums` must be a position, or several; got 'a'",
        ),
        (lambda f: f(loss, argnums=3)(PARAMS, X, ROWS), ValueError, "called with 3 positional arguments; 3 is none"),
        (
            lambda f: f(loss, argnums=2)(PARAMS, X, ROWS),
            TypeError,
            "the argument `rows` of `loss` is int32[4]",
        ),
        (lambda f: f(layer)(X, PARAMS["w"], 0.0), TypeError, "`layer` returns float32[4,3]; expected a scalar"),
        (lambda f: f(lambda x: (x.sum(), 1))(X), TypeError, "beside it needs `has_aux=True`"),
        (lambda f: f(lambda x: x.sum(), has_aux=True)(X), TypeError, "expected a pair with `has_aux`"),
        (lambda f: f(lambda x: x.sum().astype(int))(X), TypeError, "returns int32[]; expected a scalar of a float"),
        (lambda f: f(loss, memory="some")(PARAMS, X, ROWS), ValueError, "memory: expected a MemoryPlan, or one of"),
        (lambda f: f(loss, memory=0)(PARAMS, X, ROWS), ValueError, "value_and_grad: `memory` is 0; expected more than"),
        (lambda f: f(loss, memory="10 B")(PARAMS, X, ROWS), PopxlError, "memory: no plan was found within 10 B"),
    ],
)
def test_bad_input(call: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call(addons.value_and_grad)


def test_functions_that_cannot_be_planned() -> None:
    def build(memory: Any, others: Any = None) -> Any:
        def two(weights: Any, x: Any) -> Any:
            first = addons.value_and_grad(of_blocks, memory=memory)(weights, x)
            of_one = addons.value_and_grad(lambda x: jnp.sum(jnp.sin(block(x, *weights[0]))), memory=others or memory)
            return first, of_one(x)

        return partial(jax.jit(two), WEIGHTS, BATCH)

    found = addons.plan_memory(partial(build, others="products"), "1.5 MB")
    assert found.peak <= found.budget < found.everything.device and found.plan.graphs[0].graph == "block"
    with pytest.raises(ValueError, match="calls `value_and_grad` for 2 functions"):
        addons.plan_memory(build, "1 MB")
    with pytest.raises(PopxlError, match=r"no plan was found.*`lax.scan` over slices of the batch"):
        addons.plan_memory(step_with, "100 kB")
    with pytest.raises(ValueError, match="applies 0 memory plans.*value_and_grad"):
        addons.plan_memory(lambda memory: partial(jax.jit(of_blocks), WEIGHTS, BATCH), "1 MB")
    with pytest.raises(TypeError, match="what `build` returns"):
        addons.plan_memory(lambda memory: of_blocks, "1 MB")


# For accelerators ----------------------------------------------------------------------------------------------------


@pytest.mark.targets
@pytest.mark.parametrize("target", ["gpu h100", "tpu v5e"])
def test_what_is_compiled_is_what_jax_makes(target: str) -> None:
    def costs(value_and_grad: Any) -> tuple[int, int, int, int | None]:
        found = popxl.analyze(jax.jit(value_and_grad(of_blocks)), WEIGHTS, BATCH, target=target)
        return found.memory.temporaries, found.cost.bytes_accessed, found.cost.kernels, found.cost.cycles

    assert costs(addons.value_and_grad) == costs(jax.value_and_grad)


@pytest.mark.targets
@pytest.mark.parametrize(
    ("policy", "of_jax"), [("nothing", "nothing_saveable"), ("products", "dots_with_no_batch_dims_saveable")]
)
def test_recomputation_costs_what_jax_checkpoint_costs(policy: str, of_jax: str) -> None:
    def block(x: Any, w: Any, v: Any) -> Any:
        return x + jax.nn.gelu(x @ w) @ v

    def costs(block: Any, value_and_grad: Any) -> tuple[int, int, int | None]:
        def loss(weights: Any, x: Any) -> Any:
            for pair in jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights):
                x = block(x, *pair)
            return jnp.mean(x.astype(jnp.float32) ** 2)

        x = jax.ShapeDtypeStruct((8192, 512), jnp.bfloat16)
        pair = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 2048), (2048, 512))]
        found = popxl.analyze(jax.jit(value_and_grad(loss)), [pair] * 3, x, target="tpu v5e")
        return found.memory.device, found.cost.bytes_accessed, found.cost.cycles

    ours = costs(jax.jit(block), partial(addons.value_and_grad, memory=policy))
    checkpointed = jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, of_jax))
    assert ours == pytest.approx(costs(checkpointed, jax.value_and_grad), rel=0.02)


@pytest.mark.targets
def test_a_budget_of_sharded_arrays() -> None:
    target = popxl.Target("gpu h100:4")
    mesh = target.mesh(data=4)

    def on_mesh(arrays: Any, *axes: str) -> Any:
        sharding = jax.NamedSharding(mesh, jax.P(*axes))
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arrays)

    weights, batch = on_mesh(WEIGHTS), on_mesh(np.zeros((4096, 16), np.float32), "data")

    def build(memory: Any) -> Any:
        return partial(step_with(memory).func, weights, batch)

    whole = popxl.analyze(build("everything").func, weights, batch, target=target).memory.device
    found = addons.plan_memory(build, whole * 6 // 10, target)
    assert 0.8 * found.budget < found.peak <= found.budget and found.plan.bytes("recompute") > 0
