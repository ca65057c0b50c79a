"""Functions of JAX with loops, branches, rules and recomputation: each takes float32 arrays and returns a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Array = Any
POLICIES = jax.checkpoint_policies

X = np.float32(np.sin(np.arange(12))).reshape(3, 4)
W = np.float32(np.cos(np.arange(16))).reshape(4, 4) / 2
B = np.float32([0.1, -0.2, 0.3, 0.4])
LAYERS = np.float32(np.sin(1.0 + np.arange(48))).reshape(3, 4, 4) / 2


@jax.custom_jvp
def steep(x):
    return x * 3


steep.defjvp(lambda x, t: (steep(*x), t[0] * 6))


@jax.custom_jvp
def exponential(x):
    return jnp.exp(x)


exponential.defjvps(lambda t, result, x: t * result * 0.5)


@jax.custom_jvp
def both(x, y):
    return x * y, jnp.sin(x)


@both.defjvp
def _(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return both(x, y), (dx * y + 2 * x * dy, jnp.cos(x) * dx)


@jax.custom_vjp
def clipped(x, limit):
    return x * limit


clipped.defvjp(lambda x, limit: (x * limit, limit), lambda limit, g: (jnp.clip(g, -limit, limit), None))


@jax.custom_vjp
def normed(x, w):
    return w * x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)


def _normed(x, w):
    scale = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)
    return w * x * scale, (x, w, scale)


def _normed_back(kept, g):
    x, w, scale = kept
    y, gy = x * scale, g * w
    return (gy - y * jnp.mean(gy * y, -1, keepdims=True)) * scale, (g * y).sum(0)


normed.defvjp(_normed, _normed_back)


KEY = jax.random.key(7)


def dropped(x, key):
    return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)


def with_a_key(c, row):
    c, key = c
    key, own = jax.random.split(key)
    return (dropped(c * row, own), key), c


@jax.custom_vjp
def noisy(x, key):
    return x + jax.random.normal(key, x.shape)


noisy.defvjp(
    lambda x, key: (noisy(x, key), (x, key)),
    lambda kept, g: (g * kept[0] * jax.random.uniform(kept[1], g.shape), None),
)


@jax.custom_vjp
def rounded(x):
    return jnp.round(x * 8) / 8


rounded.defvjp(lambda x: (rounded(x), None), lambda _, g: (g,))


@jax.custom_vjp
def attended(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def _attended(q, k, v):
    scores = q @ k.T
    total = jax.nn.logsumexp(scores, -1, keepdims=True)
    return jnp.exp(scores - total) @ v, (q, k, v, total)


def _attended_back(kept, g):
    q, k, v, total = kept
    p = jnp.exp(q @ k.T - total)
    dp = g @ v.T
    ds = p * (dp - (dp * p).sum(-1, keepdims=True))
    return ds @ k, ds.T @ q, p.T @ g


attended.defvjp(_attended, _attended_back)


@jax.jit
def layer(x, w):
    return jnp.tanh(x @ w) + x


def step(c, row):
    return jnp.tanh(c @ W) + row, c.sum()


def fixed_point(x):
    return lax.fori_loop(0, 5, lambda i, y: jnp.cos(y) + x / (i + 1.0), x)


def counted(x):
    def more(state):
        i, y, _ = state
        return (i < 7) & (i >= 0)

    return lax.while_loop(more, lambda s: (s[0] + 2, jnp.sin(s[1]) + s[1], s[2] * 0.5), (1, x, x))


def newton(x):
    """Under `vmap`, over rows."""
    return lax.fori_loop(0, 3, lambda _, y: y - (y * y - 2) / (2 * y), x * x + 1)


def checkpointed(policy=None, **options):
    def block(x, w):
        y = checkpoint_name(jnp.sin(x @ w), "inner")
        return jnp.cos(y @ w) * y

    return jax.checkpoint(block, policy=policy, **options)


offloading = checkpointed(
    POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["inner"],
        offload_src="device",
        offload_dst="pinned_host",
    )
)
"""A function whose gradient takes a value from host memory."""


def llama(x, layers, head):
    """Two layers of attention and gated products, scanned, each computed again."""

    def norm(x):
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)

    @jax.checkpoint
    def block(x, p):
        y = norm(x)
        scores = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), (y @ p) @ (y @ p.T).T, -jnp.inf)
        x = x + jax.nn.softmax(scores) @ y
        y = norm(x)
        return x + (jax.nn.silu(y @ p) * (y @ p.T)) @ p

    x, _ = lax.scan(lambda x, p: (block(x, p), None), x, layers)
    logits = norm(x) @ head
    return -jax.nn.log_softmax(logits)[jnp.arange(3), jnp.array([2, 0, 1])].mean()


def llama_step(x, layers, head):
    """A step of gradient descent."""
    value, (dl, dh) = jax.value_and_grad(llama, (1, 2))(x, layers, head)
    return value + llama(x, layers - 0.1 * dl, head - 0.1 * dh)


def scan(body, *xs, start=None, **options):
    return lax.scan(body, jnp.zeros(4) if start is None else start, *xs, **options)


Function = tuple[Callable[..., Array], tuple[np.ndarray, ...]]

FUNCTIONS: dict[str, Function] = {
    # loops
    "scan": (lambda x: scan(step, x)[0].sum(), (X,)),
    "scan, stacked": (lambda x: (scan(step, x)[1] ** 2).sum(), (X,)),
    "scan backwards": (lambda x: jnp.vdot(*map(jnp.sum, scan(step, x, reverse=True))), (X,)),
    "scan without rows": (lambda x: scan(lambda c, _: (jnp.sin(c) + x[0], None), None, length=4)[0].sum(), (X,)),
    "scan of layers": (
        lambda x, layers: jnp.sum(scan(lambda c, w: (layer(c, w), None), layers, start=x)[0] ** 2),
        (X, LAYERS),
    ),
    "scan with what is the same": (lambda x, w: scan(lambda c, r: (jnp.tanh(c @ w) + r, c @ w), x)[1].sum(), (X, W)),
    "scan of a tree": (
        lambda x, b: scan(
            lambda c, r: ({"a": c["b"] * r[0], "b": c["a"] + r[1]}, c["a"]), (x, x * 2), start={"a": b, "b": b}
        )[1].sum(),
        (X, B),
    ),
    "scan with integers": (
        lambda x: scan(lambda c, r: ((c[0] + 1, c[1] + r * c[0]), c[0]), x, start=(1, B))[0][1].sum(),
        (X,),
    ),
    "scan of one turn": (lambda x: scan(step, x[:1])[0].sum(), (X,)),
    "scan of no turn": (lambda x: scan(step, x[:0], start=x[0])[0].sum() + x[1, 1], (X,)),
    "scan, unrolled": (lambda x: scan(step, x, unroll=2)[0].sum(), (X,)),
    "scan in scan": (
        lambda x, layers: scan(lambda c, w: scan(lambda d, r: (jnp.tanh(d @ w) + r, d), x, start=c), layers)[1].sum(),
        (X, LAYERS),
    ),
    "scan under vmap": (
        lambda x, layers: jax.vmap(lambda r: scan(lambda c, w: (jnp.tanh(c @ w), c), layers, start=r)[1].sum())(
            x
        ).sum(),
        (X, LAYERS),
    ),
    "gradient in scan": (
        lambda x: scan(lambda c, r: (c - 0.1 * jax.grad(lambda c: jnp.sum((c - r) ** 3))(c), None), x)[0].sum(),
        (X,),
    ),
    "scan of the gradient": (lambda x: jnp.sum(jax.grad(lambda x: scan(step, x)[0].sum())(x) ** 2), (X,)),
    "map": (lambda x, w: lax.map(lambda row: jnp.sin(row @ w), x).sum(), (X, W)),
    "associative scan": (lambda x: lax.associative_scan(lambda a, b: a * b + 0.1, x).sum(), (X,)),
    "cumulated": (lambda x: (jnp.cumsum(x, 0) * jnp.cumprod(x + 2, 1)).sum(), (X,)),
    "counted loop": (lambda x: fixed_point(x).sum(), (X,)),
    "counted loop of a row": (lambda x: lax.fori_loop(0, 3, lambda i, c: c * x[i] + x[i], jnp.ones(4)).sum(), (X,)),
    "loop that writes rows": (lambda x: jnp.sum(lax.fori_loop(0, 3, lambda i, c: c.at[i].mul(i + 1.0), x) ** 2), (X,)),
    "loop under vmap": (lambda x: jax.vmap(newton)(x).sum(), (X,)),
    # branches
    "cond": (lambda x, w: lax.cond(x.sum() > 0, lambda: jnp.sin(x).sum(), lambda: (x @ w).sum()), (X, W)),
    "cond, else": (lambda x, w: lax.cond(x.sum() > 99, lambda: jnp.sin(x).sum(), lambda: (x @ w).sum()), (X, W)),
    "cond of several": (
        lambda x: jnp.vdot(*lax.cond(x[0, 0] < 1, lambda x: (x, x * 2), lambda x: (jnp.exp(x), x), x)),
        (X,),
    ),
    "cond of an argument": (
        lambda x, b: (lax.cond(x.sum() > 0, lambda: (x, b), lambda: (x * 2, b + 1))[1] ** 2).sum() * (x**2).sum(),
        (X, B),
    ),
    "cond without operands": (lambda x: lax.cond(x.sum() > 0, lambda: 1.0, lambda: 2.0) * (x**3).sum(), (X,)),
    "cond in scan": (
        lambda x: scan(lambda c, r: (lax.cond(r[0] > 0, lambda: c * r, lambda: c + r), c), x, start=B)[0].sum(),
        (X,),
    ),
    "scan in cond": (lambda x: lax.cond(x.sum() > 0, lambda: scan(step, x)[0].sum(), lambda: x.sum()), (X,)),
    "switch": (lambda x: lax.switch(jnp.argmax(x[1]), [jnp.sin, jnp.cos, lambda x: x * x, jnp.exp], x).sum(), (X,)),
    "switch of five in scan": (
        lambda x: scan(
            lambda c, i: (lax.switch(i, [jnp.sin, jnp.cos, jnp.tanh, lambda c: c * c, lambda c: c + x[0]], c), c),
            jnp.arange(-1, 6),
            start=B,
        )[1].sum(),
        (X,),
    ),
    "cond under vmap": (lambda x: jax.vmap(lambda r: lax.cond(r[0] > 0, jnp.sin, jnp.cos, r))(x).sum(), (X,)),
    # rules
    "custom_jvp": (lambda x: (steep(x) * x).sum(), (X,)),
    "custom_jvp of its result": (lambda x: (exponential(x) ** 2).sum(), (X,)),
    "custom_jvp of several": (lambda x, w: jnp.vdot(*map(jnp.sum, both(x, x @ w))), (X, W)),
    "custom_jvp in scan": (lambda x: scan(lambda c, r: (exponential(c) * 0.1 + steep(r), c), x)[1].sum(), (X,)),
    "custom_jvp in custom_jvp": (lambda x: exponential(steep(exponential(x * 0.1))).sum(), (X,)),
    "custom_vjp": (lambda x: clipped(jnp.sin(x), 0.25).sum() * 2, (X,)),
    "custom_vjp that keeps": (lambda x, b: (normed(x, b) * X).sum(), (X, B)),
    "custom_vjp straight through": (lambda x: (rounded(x) ** 2).sum(), (X,)),
    "custom_vjp of attention": (lambda x, w: (attended(x @ w, x, x * 2) ** 2).sum(), (X, W)),
    "custom_vjp in scan": (lambda x, b: scan(lambda c, r: (normed(c[None] + r, b)[0], c), x)[0].sum(), (X, B)),
    "custom_vjp under vmap": (lambda x: (jax.vmap(lambda r: rounded(jnp.sin(r)))(x) ** 2).sum(), (X,)),
    "relu": (lambda x, w: (jax.nn.relu(x @ w) ** 2).sum(), (X, W)),
    "relu6 and more": (
        lambda x: sum(f(x * 3).sum() for f in (jax.nn.relu6, jax.nn.elu, jax.nn.celu, jax.nn.selu)),
        (X,),
    ),
    "smooth functions": (
        lambda x: sum(f(x).sum() for f in (jax.nn.softplus, jax.nn.silu, jax.nn.gelu, jax.nn.log_sigmoid)),
        (X,),
    ),
    "logsumexp": (lambda x: jax.nn.logsumexp(x * 2, -1).sum(), (X,)),
    # recomputation
    "remat": (lambda x, w: checkpointed()(x, w).sum(), (X, W)),
    "remat twice": (lambda x, w: jax.checkpoint(checkpointed())(checkpointed()(x, w), w).sum(), (X, W)),
    "remat that keeps names": (lambda x, w: checkpointed(POLICIES.save_only_these_names("inner"))(x, w).sum(), (X, W)),
    "remat that keeps products": (lambda x, w: checkpointed(POLICIES.dots_saveable)(x, w).sum(), (X, W)),
    "remat that keeps all": (lambda x, w: checkpointed(POLICIES.everything_saveable)(x, w).sum(), (X, W)),
    "remat that moves": (
        lambda x, w: checkpointed(
            POLICIES.save_and_offload_only_these_names(
                names_which_can_be_saved=["inner"],
                names_which_can_be_offloaded=[],
                offload_src="device",
                offload_dst="pinned_host",
            )
        )(x, w).sum(),
        (X, W),
    ),
    "remat that offloads": (lambda x, w: offloading(x, w).sum(), (X, W)),
    "remat that offloads in scan": (
        lambda x, layers: scan(lambda c, w: (offloading(c, w), None), layers, start=x)[0].sum(),
        (X, LAYERS),
    ),
    "remat in scan": (
        lambda x, layers: scan(lambda c, w: (checkpointed(prevent_cse=False)(c, w), None), layers, start=x)[0].sum(),
        (X, LAYERS),
    ),
    "scan in remat": (lambda x: jax.checkpoint(lambda x: scan(step, x)[0].sum())(x), (X,)),
    "cond in remat": (
        lambda x: jax.checkpoint(lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x * x))(x).sum(),
        (X,),
    ),
    "rule in remat": (lambda x: jax.checkpoint(lambda x: exponential(jnp.sin(x)) * x)(x).sum(), (X,)),
    "remat of a jitted function": (lambda x, w: jax.checkpoint(layer)(layer(x, w), w).sum(), (X, W)),
    "gradient of remat": (lambda x, w: jnp.sum(jax.grad(lambda x: checkpointed()(x, w).sum())(x) ** 2), (X, W)),
    # random keys
    "dropout": (lambda x: (dropped(x, jax.random.key(1)) ** 2).sum(), (X,)),
    "dropout of an old key": (lambda x: (dropped(x, jax.random.PRNGKey(1)) ** 2).sum(), (X,)),
    "dropout in scan": (lambda x: scan(with_a_key, x, start=(B, jax.random.key(2)))[1].sum(), (X,)),
    "keys of turns": (
        lambda x: scan(lambda c, key: (dropped(c, key) * c, None), jax.random.split(jax.random.key(3), 3), start=x)[
            0
        ].sum(),
        (X,),
    ),
    "dropout in remat": (lambda x, w: jax.checkpoint(lambda x: dropped(jnp.sin(x @ w), KEY) ** 2)(x).sum(), (X, W)),
    "dropout in cond": (
        lambda x: lax.cond(x.sum() > 0, dropped, lambda x, key: x * 2, x, jax.random.fold_in(KEY, 5)).sum() ** 2,
        (X,),
    ),
    "custom_vjp that keeps a key": (lambda x: (noisy(x, KEY) ** 2).sum(), (X,)),
    "other generator": (lambda x: (x * jax.random.normal(jax.random.key(4, impl="rbg"), x.shape)).sum() ** 2, (X,)),
    # and all of it
    "llama": (llama, (X, LAYERS, W)),
    "step of a llama": (llama_step, (X, LAYERS, W)),
}
