"""Attention by cuDNN's kernels, on NVIDIA GPUs: programs call them, and cuDNN generates them where it is.

Scores stay within the kernels, which read and write no more than operands, results and a workspace. For an absent GPU,
XLA compiles such a call only as a name, and would count no workspace, so the program allocates one; it is compiled
again where it is loaded. A GPU that is here is asked first whether it has the kernel. Targets, operands and settings of
the calls are those of `jax.nn.dot_product_attention`.

A mask becomes a bias, which kernels add to the scores: the same for all heads, if the mask is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from popxl.base.arrays import Array
from popxl.base.log import Logger
from popxl.ops.attention import attended_backward_anew
from popxl.ops.attention import attention_backward as of_backward
from popxl.ops.attention import attention_forward as of_forward
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from runtime import jax_private
from runtime.score_bias import ScoreBias

OLDEST = 90000
"""Version of cuDNN: 9.0."""

MOST_CHANNELS, MOST_ON_HOPPER = 128, 256
"""Of GPUs of the Ampere generation, and of the Hopper generation or a newer one."""

SHORTEST = 64
"""Queries and keys of a text: with fewer there is little to gain, and cuDNN has no kernels for one."""

HIDDEN = {jnp.dtype(jnp.bfloat16): -(2.0**41), jnp.dtype(jnp.float16): -(2.0**15)}
"""Bias of hidden scores by dtype. cuDNN subtracts two such numbers, so they are finite, and far from the smallest."""


_log = Logger("session")


def overrides(device: jax.Device, is_here: bool) -> Mapping[Kernel, KernelImpl]:
    """Kernels of attention for a GPU: none without cuDNN, if it is here, or for GPUs older than those of the Ampere
    generation, whose units for products have no bfloat16."""
    generation = str(getattr(device, "compute_capability", "0")).partition(".")[0]
    if not generation.isdecimal() or int(generation) < 8 or (is_here and jax_private.cudnn_version() < OLDEST):
        return {}
    most = MOST_CHANNELS if int(generation) < 9 else MOST_ON_HOPPER
    on: dict[str, Any] = {"device": device if is_here else None, "most_channels": most}
    return {of_forward: partial(attention_forward, **on), of_backward: partial(attention_backward, **on)}


def _is_supported(queries: Array, keys: Array, values: Array, mask: Any, dropout: float, most_channels: int) -> bool:
    """Whether cuDNN has kernels for these operands. Dropout, whose seed is an operand, has none here."""
    channels = queries.shape[-1]
    return (
        (mask is None or _makes_bias(mask, queries, keys, values))
        and not dropout
        and queries.dtype in (jnp.bfloat16, jnp.float16)
        and values.shape[-1] == channels
        and channels % 8 == 0
        and channels <= most_channels
        and min(queries.shape[-2], keys.shape[-2]) >= SHORTEST
        and 0 not in (*queries.shape, *keys.shape)
    )


def _makes_bias(mask: Array, queries: Array, keys: Array, values: Array) -> bool:
    """Whether a mask makes a bias for which cuDNN has kernels: of the operands' dtype, and no larger than they are.

    Kernels with a bias have gradients only for even lengths.
    """
    is_same = mask.dtype in (jnp.bool_, queries.dtype)
    is_even = queries.shape[-2] % 2 == keys.shape[-2] % 2 == 0
    return is_same and is_even and ScoreBias.is_small(mask, queries, keys, values, each_query=True)


def attention_forward(
    queries: Array,
    keys: Array,
    values: Array,
    mask: Any,
    seed: Any,
    *,
    causal: bool,
    scale: float,
    dropout: float,
    device: jax.Device | None = None,
    most_channels: int = MOST_CHANNELS,
) -> tuple[Array, Array]:
    """`popxl.ops.attention.attention_forward`.

    Args:
        device: the GPU, if it is here.
        most_channels: of the kernels that it has.
    """
    forward = partial(attend, causal=causal, scale=scale)
    if _is_supported(queries, keys, values, mask, dropout, most_channels):
        bias = ScoreBias.of(mask, queries, keys, causal, HIDDEN[queries.dtype], each_query=True)
        given = (*map(_of_four, (queries, keys, values)), *bias.operands)
        if _compiles(device, forward, given):
            out, logs = _per_batch(forward)(*given)
            return bias.fill_results(out.reshape(queries.shape), logs.reshape(queries.shape[:-1]))
    how = {"causal": causal, "scale": scale, "dropout": dropout}
    return of_forward.plain(queries, keys, values, mask, seed, **how)


def attention_backward(
    g: Array,
    queries: Array,
    keys: Array,
    values: Array,
    out: Array,
    logs: Array,
    mask: Any,
    seed: Any,
    *,
    is_part: bool = False,
    causal: bool,
    scale: float,
    dropout: float,
    device: jax.Device | None = None,
    most_channels: int = MOST_CHANNELS,
) -> tuple[Array, Array, Array]:
    """`popxl.ops.attention.attention_backward`. Results over more keys, with their sums, make it a part.

    Args:
        device: the GPU, if it is here.
        most_channels: of the kernels that it has.
    """
    backward = partial(gradients, causal=causal, scale=scale, allocates_workspace=device is None)
    if _is_supported(queries, keys, values, mask, dropout, most_channels):
        bias = ScoreBias.of(mask, queries, keys, causal, HIDDEN[queries.dtype], each_query=True)
        g_given, logs_given = bias.clear_gradients(g, logs)
        arrays = map(_of_four, (g_given.astype(queries.dtype), queries, keys, values, out.astype(queries.dtype)))
        given = (*arrays, _of_four(logs_given[..., None])[..., 0], *bias.operands)
        if _compiles(device, backward, given):
            dq, dk, dv = _per_batch(backward)(*given)
            return dq.reshape(queries.shape), dk.reshape(keys.shape), dv.reshape(values.shape)
    how = {"causal": causal, "scale": scale, "dropout": dropout}
    return attended_backward_anew(g, queries, keys, values, out, logs, mask, seed, is_part=is_part, **how)


def _of_four(t: Array) -> Array:
    """An operand of shape (batch, heads, length, channels)."""
    heads = t.shape[-3] if t.ndim > 2 else 1
    return t.reshape(math.prod(t.shape[:-3]), heads, *t.shape[-2:])


def _compiles(device: jax.Device | None, call: partial[Any], operands: Sequence[Array]) -> bool:
    """Whether a call can be compiled for a GPU that is here: cuDNN has the kernel. For others, it is thought to."""
    if device is None:
        return True
    known = tuple((t.shape, t.dtype) for t in operands)
    return _compiles_alone(device, call.func, frozenset(call.keywords.items()), known)


@cache
def _compiles_alone(device: jax.Device, call: Callable[..., Any], how: frozenset[Any], operands: Any) -> bool:
    where = jax.sharding.SingleDeviceSharding(device)
    given = (jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in operands)
    try:
        jax.jit(partial(call, **dict(how))).lower(*given).compile()
    except jax.errors.JaxRuntimeError as problem:
        shapes = ", ".join(str(shape) for shape, _ in operands)
        _log.warn(f"Attention of {shapes} is computed without cuDNN, which has no kernel for it: {problem}")
        return False
    return True


def _per_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays with a batch, also within `jax.vmap`, as replicas on one device are: of a larger batch."""
    batched = custom_vmap(function)

    @batched.def_vmap
    def of_several(size: int, is_batched: list[bool], *operands: Array) -> tuple[Any, Any]:
        batch = operands[0].shape[is_batched[0]]
        each = (t if known else t[None] for t, known in zip(operands, is_batched, strict=True))
        whole = [jnp.broadcast_to(t, (size, batch, *t.shape[2:])) for t in each]  # a bias may be of one text
        results = batched(*(t.reshape(-1, *t.shape[2:]) for t in whole))
        return tuple(t.reshape(size, -1, *t.shape[1:]) for t in results), (True,) * len(results)

    return batched


# Calls --------------------------------------------------------------------------------------------------------------


def attend(
    queries: Array, keys: Array, values: Array, bias: Array | None = None, *, causal: bool, scale: float
) -> tuple[Array, Array]:
    """Call the kernel of attention: results, and log-sum-exp of the scores in float32.

    Args:
        queries, keys, values: float16 or bfloat16, of shape (batch, heads, length, channels).
        bias: added to the scores; of their dtype and shape, for one text or one head, if it is the same for all.
    """
    logs = jax.ShapeDtypeStruct(queries.shape[:-1], jnp.float32)
    products = {
        "bmm1": (3, 3, "02", "02"),  # of queries and keys
        "bmm2": (3, 1, "01", "02"),  # of scores and values
    }
    settings = _settings(queries, keys, causal, scale, products)
    given = (*map(_length_first, (queries, keys, values)), *(() if bias is None else (bias,)))
    out, logs = _call("", bias, settings, given, (queries, logs), 0)
    return out, logs


def gradients(
    g: Array,
    queries: Array,
    keys: Array,
    values: Array,
    out: Array,
    logs: Array,
    bias: Array | None = None,
    *,
    causal: bool,
    scale: float,
    allocates_workspace: bool = False,
) -> tuple[Array, Array, Array]:
    """Call the kernel of attention's gradients, of queries, keys and values.

    Args:
        g: gradient of `out`.
        queries, keys, values, bias: as for `attend`.
        out, logs: its results.
        allocates_workspace: whether the program allocates the workspace that cuDNN would ask for.
    """
    products = {
        "bmm1_grad_gemm1": (2, 1, "01", "02"),
        "bmm1_grad_gemm2": (3, 1, "01", "02"),
        "bmm2_grad_gemm1": (2, 1, "01", "02"),
        "bmm2_grad_gemm2": (3, 3, "02", "02"),
    }
    settings = _settings(queries, keys, causal, scale, products)
    # Gradients of queries are summed in float32, and products of results and their gradients for each row.
    workspace = 4 * (queries.size + logs.size) if allocates_workspace else 0
    q, k, v, g, out = map(_length_first, (queries, keys, values, g, out))
    given = (q, k, v, logs, g, *(() if bias is None else (bias,)), out)
    dq, dk, dv = _call("Backward", bias, settings, given, (queries, keys, values), workspace)
    return dq, dk, dv


def _length_first(t: Array) -> Array:
    """An operand in the order of a kernel, (batch, length, heads, channels).

    Models split channels into heads, which makes the length come first: XLA leaves out the transposes of both.
    """
    return t.swapaxes(1, 2)


def _call(
    direction: str,
    bias: Array | None,
    settings: dict[str, Any],
    operands: Sequence[Array],
    like: tuple[Any, ...],
    workspace: int,
) -> list[Array]:
    """Call a kernel of cuDNN, with results as `like`, of which the length comes first in memory, as in operands.

    Args:
        like: arrays with the shapes and dtypes of the results.
        workspace: its bytes; with 0, XLA asks cuDNN.
    """
    results = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in like]
    call = jax.ffi.ffi_call(
        f"__cudnn$fmha{'' if bias is None else 'ScaleBias'}Softmax{direction}",
        [*results, jax.ShapeDtypeStruct((workspace,), jnp.uint8)],
        output_layouts=[*((0, 2, 1, 3) if t.ndim == 4 else None for t in results), None],
        custom_call_api_version=2,  # with settings as text
        legacy_backend_config=json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": settings}),
    )
    return list(call(*operands)[:-1])


def _settings(
    queries: Array, keys: Array, causal: bool, scale: float, products: Mapping[str, tuple[int, int, str, str]]
) -> dict[str, Any]:
    """Settings of a kernel, a `CudnnfMHABackendConfig` of XLA.

    Args:
        products: contracted dimensions and batch dimensions of the operands of its products, by name.
    """
    dimensions = {
        f"{name}_dot_dimension_numbers": {
            "lhs_contracting_dimensions": [str(lhs)],
            "rhs_contracting_dimensions": [str(rhs)],
            "lhs_batch_dimensions": list(lhs_batch),
            "rhs_batch_dimensions": list(rhs_batch),
        }
        for name, (lhs, rhs, lhs_batch, rhs_batch) in products.items()
    }
    scores = (*queries.shape[:-1], keys.shape[-2])
    return {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": "BF16" if queries.dtype == jnp.bfloat16 else "F16",
            "dimensions": [*map(str, scores)],
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if causal else "NO_MASK",
        "dropout_rate": 0.0,
        "max_seg_per_batch": 1,
    } | dimensions
