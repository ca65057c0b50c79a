"""A step of training of a Llama in plain JAX and Optax, as people write it: what the kit's is compared with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from popxl_addons.layers import LanguageConfig
from runtime.gpu import attention

Array = Any
Tree = dict[str, Any]


def shapes(config: LanguageConfig, stacked: bool) -> Tree:
    """The shapes of the parameters; of layers, one for each or a stack of all."""
    width, hidden = config.width, config.hidden or 4 * config.width
    layer = {name: (width, width) for name in ("query", "key", "value", "output")}
    layer |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    layer |= {"attention_norm": (width,), "mlp_norm": (width,)}
    layers: Any = [layer] * config.layers
    if stacked:
        layers = {name: (config.layers, *shape) for name, shape in layer.items()}
    table = (config.vocabulary, width)
    return {"embedding": table, "layers": layers, "norm": (width,), "head": table[::-1]}


def parameters(config: LanguageConfig, stacked: bool) -> Any:
    """Parameters in float32, as types."""
    found = shapes(config, stacked)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), found, is_leaf=lambda x: isinstance(x, tuple))


def partition(shape: tuple[int, ...], devices: int) -> PartitionSpec:
    """How an array is divided among devices: along the longest of its last two dimensions that they can share."""
    shared = [d for d in range(len(shape))[-2:] if shape[d] % devices == 0] if devices > 1 else []
    longest = max(shared, key=shape.__getitem__, default=None)
    return PartitionSpec(*("data" if d == longest else None for d in range(len(shape))))


def norm(x: Array, weight: Array, eps: float) -> Array:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight


def rotary(x: Array, base: float) -> Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def causal_by_cudnn(q: Array, k: Array, v: Array, allocates_workspace: bool) -> Array:
    """`jax.nn.dot_product_attention(…, is_causal=True, implementation="cudnn")`, which JAX refuses for absent GPUs."""
    scale = q.shape[-1] ** -0.5

    @jax.custom_vjp
    def attended(*heads: Array) -> Array:
        return forward(*heads)[0]

    def forward(*heads: Array) -> tuple[Array, Any]:
        out, logs = attention.attend(*heads, causal=True, scale=scale)
        return out, (*heads, out, logs)

    def backward(kept: Any, g: Array) -> tuple[Array, Array, Array]:
        return attention.gradients(g, *kept, causal=True, scale=scale, allocates_workspace=allocates_workspace)

    attended.defvjp(forward, backward)
    return attended(*(t.swapaxes(1, 2) for t in (q, k, v))).swapaxes(1, 2)


def block(x: Array, p: Tree, config: LanguageConfig, attend: Callable[..., Array]) -> Array:
    batch, length, width = x.shape
    y = norm(x, p["attention_norm"], config.eps)
    q, k, v = ((y @ p[name]).reshape(batch, length, config.heads, -1) for name in ("query", "key", "value"))
    base = config.rotary or 1.0
    attended = attend(rotary(q, base), rotary(k, base), v)
    x = x + attended.reshape(batch, length, width) @ p["output"]
    y = norm(x, p["mlp_norm"], config.eps)
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def step(
    config: LanguageConfig, way: str, rows: NamedSharding, value_and_grad: Callable[..., Any] = jax.value_and_grad
) -> Callable[..., Any]:
    """A step of AdamW in bfloat16, of float32 parameters.

    Args:
        config: the model.
        way: "unrolled", "scan", or "scan, checkpoint"; of these for GPUs also "unrolled, cuDNN", and so on. "products"
            after "checkpoint" is its policy; in "unrolled, jitted" a layer is a jitted function.
        rows: how the texts of a batch are divided among devices, and what layers make of them.
        value_and_grad: transform of the loss.
    """
    attend: Callable[..., Array] = partial(jax.nn.dot_product_attention, is_causal=True)
    if "cuDNN" in way:
        is_absent = rows.mesh.devices.flat[0] not in jax.devices()
        kernel, specs = partial(causal_by_cudnn, allocates_workspace=is_absent), (rows.spec,) * 3
        attend = jax.shard_map(kernel, mesh=rows.mesh, in_specs=specs, out_specs=rows.spec, check_vma=False)

    def turn(x: Array, p: Tree) -> Array:
        return block(jax.lax.with_sharding_constraint(x, rows), p, config, attend)

    policies = jax.checkpoint_policies
    policy = policies.dots_with_no_batch_dims_saveable if "products" in way else policies.nothing_saveable
    turn = jax.checkpoint(turn, policy=policy) if "checkpoint" in way else turn
    turn = jax.jit(turn) if "jitted" in way else turn

    def loss(parameters: Tree, tokens: Array) -> Array:
        p = jax.tree.map(lambda w: w.astype(jnp.bfloat16), parameters)
        x = p["embedding"][tokens[:, :-1]]
        if "unrolled" in way:
            for each in p["layers"]:
                x = turn(x, each)
        else:
            x, _ = jax.lax.scan(lambda x, each: (turn(x, each), None), x, p["layers"])
        logits = (norm(x, p["norm"], config.eps) @ p["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    optimizer = optax.adamw(3e-4, weight_decay=0.1)

    def step(state: Any, tokens: Array) -> tuple[Any, Array]:
        parameters, moments = state
        value, gradients = value_and_grad(loss)(parameters, tokens)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), value

    return step


def state(config: LanguageConfig, way: str) -> Any:
    """What a step is given and gives, as types: the parameters, and what the optimiser keeps."""
    given = parameters(config, stacked="unrolled" not in way)
    return given, jax.eval_shape(optax.adamw(3e-4).init, given)
