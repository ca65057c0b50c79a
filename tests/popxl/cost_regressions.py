"""Changes of JAX functions that cost something: before, after, what changes in cost, and where.

Each function is one line, so that a change is at the line of the function after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
ROWS, WIDTH, LAYERS = 16, 24, 5


def spec(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


class Side(NamedTuple):
    """A function with its arguments, and the options of `jax.jit`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = {}


class Regression(NamedTuple):
    """A change: what a comparison has to name, and the argument where it is, if not a line."""

    before: Side
    after: Side
    what: str
    argument: str = ""


X, W, STACK = spec(ROWS, WIDTH), spec(WIDTH, WIDTH), spec(LAYERS, WIDTH, WIDTH)
HALF_X, HALF_W = spec(ROWS, WIDTH, dtype=jnp.bfloat16), spec(WIDTH, WIDTH, dtype=jnp.bfloat16)
IDS, TABLE = spec(7, dtype=jnp.int32), spec(50, WIDTH)


def on_mesh(*shape: int, along: P, devices: int = 2) -> jax.ShapeDtypeStruct:
    mesh = Mesh(np.asarray(jax.devices("cpu")[:devices]), ("data",))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, along))


def kept_whole(x: Any) -> Any:
    mesh = Mesh(np.asarray(jax.devices("cpu")[:2]), ("data",))
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P()))


def layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def one(before: Any, after: Any, arguments: tuple[Any, ...], what: str) -> Regression:
    """Two functions of the same arguments."""
    return Regression(Side(before, arguments), Side(after, arguments), what)


def gradient(fn: Any) -> Any:
    return jax.grad(lambda *own: jnp.sum(fn(*own)))


BY_ROWS, BY_COLUMNS, WHOLE = (
    on_mesh(ROWS, WIDTH, along=P("data")),
    on_mesh(WIDTH, WIDTH, along=P(None, "data")),
    on_mesh(WIDTH, WIDTH, along=P()),
)

REGRESSIONS: dict[str, Regression] = {
    # dtypes
    "a wider argument": Regression(Side(layer, (HALF_X, HALF_W)), Side(layer, (X, W)), "argument", "w"),
    "a product in float32": one(
        lambda x, w: x @ w,
        lambda x, w: (x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(x.dtype),
        (HALF_X, HALF_W),
        "convert f32",
    ),
    "a wider constant": one(lambda x: x * 2, lambda x: x * np.float32(2), (HALF_X,), "convert"),
    "a wider result": one(lambda x: jnp.tanh(x), lambda x: jnp.tanh(x).astype(jnp.float32), (HALF_X,), "convert"),
    "a wider accumulator": one(
        lambda x: x.sum(0, dtype=jnp.int32),
        lambda x: x.astype(jnp.float32).sum(0),
        (spec(ROWS, 8, dtype=jnp.int32),),
        "convert f32",
    ),
    # more work
    "a product more": one(lambda x, w: x @ w, lambda x, w: x @ w @ w, (X, W), "operations"),
    "a product of all instead of one row": one(lambda x, w: x[:1] @ w, lambda x, w: (x @ w)[:1], (X, W), "operations"),
    "products in another order": one(
        lambda x, w: x.sum(0) @ w @ w, lambda x, w: x.sum(0) @ (w @ w), (X, W), "operations"
    ),
    "an exponential more": one(lambda x: jnp.exp(x), lambda x: jnp.exp(x) + jnp.exp(2 * x), (X,), "exponential f32"),
    "a sort more": one(lambda x: x.max(-1), lambda x: jnp.sort(x, -1)[..., -1], (X,), "sort f32"),
    "a wrong axis of a sum": one(lambda x: x.sum(1), lambda x: x.sum(0), (X,), "read and written"),
    "a convolution more": one(
        lambda x: x * 3,
        lambda x: lax.conv_general_dilated(x[None, None], jnp.ones((1, 1, 3, 3)), (1, 1), "SAME")[0, 0],
        (X,),
        "operations",
    ),
    "a division by each": one(lambda x: x * (1 / 3), lambda x: x / (x + 3), (X,), "divide f32"),
    "a square root more": one(lambda x: x * x + 1, lambda x: jnp.sqrt(x * x + 1), (X,), "sqrt f32"),
    "random numbers more": one(
        lambda x: x, lambda x: x + jax.random.uniform(jax.random.key(0), x.shape), (X,), "add f32"
    ),
    "a mask of all pairs": one(
        lambda x: x @ x.T, lambda x: jnp.where(jnp.tril(jnp.ones((ROWS, ROWS), bool)), x @ x.T, 0), (X,), "select f32"
    ),
    # moved data
    "a gather more": one(lambda t, i: t[:7], lambda t, i: t[i], (TABLE, IDS), "gather f32"),
    "a product with one-hot rows": one(
        lambda t, i: t[i], lambda t, i: jax.nn.one_hot(i, 50) @ t, (TABLE, IDS), "dot f32"
    ),
    "a scatter more": one(lambda t, i: t + 1, lambda t, i: t.at[i].add(1), (TABLE, IDS), "scatter f32"),
    "a transposition": one(lambda x: jnp.tanh(x), lambda x: jnp.tanh(x.T), (X,), "transpose f32"),
    "a concatenation": one(lambda x: x * 2, lambda x: jnp.concatenate([x, x * 2]), (X,), "concatenate f32"),
    "a repeated array": one(lambda x: x.sum(), lambda x: jnp.sort(jnp.repeat(x, 3, 0), 0).sum(), (X,), "temporaries"),
    "a padded array": one(lambda x: x + 1, lambda x: jnp.pad(x, 3) + 1, (X,), "pad f32"),
    "a reversed array": one(lambda x: x + 1, lambda x: x[::-1] + 1, (X,), "reverse f32"),
    # donation
    "a lost donation": Regression(
        Side(lambda state, x: state + x, (X, X), {"donate_argnums": 0}),
        Side(lambda state, x: state + x, (X, X)),
        "overwritten with results",
        "state",
    ),
    "a lost donation of one of two": Regression(
        Side(lambda mean, square, x: (mean + x, square + x), (X, X, X), {"donate_argnums": (0, 1)}),
        Side(lambda mean, square, x: (mean + x, square + x), (X, X, X), {"donate_argnums": 0}),
        "overwritten with results",
        "square",
    ),
    "a result that is a dtype too wide to overwrite": Regression(
        Side(lambda state: state + 1, (HALF_X,), {"donate_argnums": 0}),
        Side(lambda state: state.astype(jnp.float32) + 1, (HALF_X,), {"donate_argnums": 0, "keep_unused": True}),
        "overwritten with results",
        "state",
    ),
    # loops
    "an unrolled loop": one(
        lambda x, w: lax.scan(lambda x, w: (layer(x, w), None), x, w)[0],
        lambda x, w: lax.scan(lambda x, w: (layer(x, w), None), x, w, unroll=True)[0],
        (X, STACK),
        "while",
    ),
    "a loop of Python": one(
        lambda x, w: lax.fori_loop(0, LAYERS, lambda i, x: layer(x, w[i]), x),
        lambda x, w: layer(layer(layer(layer(layer(x, w[0]), w[1]), w[2]), w[3]), w[4]),
        (X, STACK),
        "while",
    ),
    "a turn more": one(
        lambda x, w: lax.fori_loop(0, 4, lambda _, x: layer(x, w), x),
        lambda x, w: lax.fori_loop(0, 5, lambda _, x: layer(x, w), x),
        (X, W),
        "operations",
    ),
    "results of all turns": one(
        lambda x, w: lax.scan(lambda x, w: (layer(x, w), None), x, w)[0],
        lambda x, w: lax.scan(lambda x, w: (layer(x, w),) * 2, x, w),
        (X, STACK),
        "read and written",
    ),
    "a product in the loop": one(
        lambda x, w: lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x), x @ w),
        lambda x, w: lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x),
        (X, W),
        "operations",
    ),
    # recomputation
    "recomputation lost": one(
        gradient(lambda x, w: lax.scan(jax.checkpoint(lambda x, w: (layer(jnp.sin(layer(x, w)), w), None)), x, w)[0]),
        gradient(lambda x, w: lax.scan(lambda x, w: (layer(jnp.sin(layer(x, w)), w), None), x, w)[0]),
        (X, STACK),
        "operations",
    ),
    "recomputation of too much": one(
        gradient(lambda x, w: layer(layer(x, w), w)),
        gradient(jax.checkpoint(lambda x, w: layer(layer(x, w), w), prevent_cse=True)),
        (X, W),
        "operations",
    ),
    "a policy that saves products": one(
        gradient(lambda x, w: lax.scan(jax.checkpoint(lambda x, w: (jnp.sin(layer(x, w)), None)), x, w)[0]),
        gradient(
            lambda x, w: lax.scan(
                jax.checkpoint(lambda x, w: (jnp.sin(layer(x, w)), None), policy=jax.checkpoint_policies.dots_saveable),
                x,
                w,
            )[0]
        ),
        (X, STACK),
        "operations",
    ),
    # losses and fusion
    "an unfused loss": one(
        lambda x: -jnp.take_along_axis(jax.nn.log_softmax(x), jnp.zeros((ROWS, 1), int), -1).mean(),
        lambda x: -jnp.log(lax.optimization_barrier(jax.nn.softmax(x))[:, 0]).mean(),
        (X,),
        "kernels",
    ),
    "a value that is returned, too": one(
        lambda x: jnp.sum(jnp.tanh(x) * 2),
        lambda x: (jnp.sum(jnp.tanh(x) * 2), jnp.tanh(x)),
        (X,),
        "read and written",
    ),
    "a gradient of more": one(
        lambda x, w: jax.grad(lambda x: layer(x, w).sum())(x),
        lambda x, w: jax.grad(lambda x, w: layer(x, w).sum(), (0, 1))(x, w),
        (X, W),
        "operations",
    ),
    "another flag of XLA": Regression(
        Side(lambda x, w: jnp.sum(jnp.tanh(x @ w) * 2), (X, W)),
        Side(
            lambda x, w: jnp.sum(jnp.tanh(x @ w) * 2),
            (X, W),
            {"compiler_options": {"xla_disable_hlo_passes": "fusion,cpu-instruction-fusion"}},
        ),
        "kernels",
    ),
    "higher precision": one(
        lambda x, w: lax.fori_loop(0, 1, lambda _, x: x @ w, x),
        lambda x, w: lax.fori_loop(0, 1, lambda _, x: x @ w + (x - x) @ w, x),
        (X, W),
        "operations",
    ),
    # collectives
    "a gather of rows": Regression(
        Side(lambda x: jnp.tanh(x), (BY_ROWS,)),
        Side(lambda x: kept_whole(jnp.tanh(x)), (BY_ROWS,)),
        "bytes of all-gather between 2",
    ),
    "a sum between devices": Regression(
        Side(lambda x: jnp.sum(x, 1), (BY_ROWS,)),
        Side(lambda x: jnp.sum(x, 0), (BY_ROWS,)),
        "bytes of all-reduce between 2",
    ),
    "weights in columns": Regression(
        Side(lambda x, w: x @ w, (BY_ROWS, WHOLE)), Side(lambda x, w: x @ w, (BY_ROWS, BY_COLUMNS)), "all-gather"
    ),
    "a larger sum between devices": Regression(
        Side(lambda x: jnp.sum(x, 0), (BY_ROWS,)),
        Side(lambda x: x.T @ x, (BY_ROWS,)),
        "bytes of all-reduce between 2",
    ),
}
