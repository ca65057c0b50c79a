"""Attention by cuDNN's kernels, on NVIDIA GPUs: programs call them, and cuDNN generates them where it is.

Scores stay within the kernels, which read and write no more than operands, results and a workspace. For an absent GPU,
XLA compiles such a call only as a name, and would count no workspace, so the program allocates one; it is compiled
again where it is loaded. Targets, operands and settings of the calls are those of `jax.nn.dot_product_attention`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from popxl.base.arrays import Array
from popxl.ops.attention import attended_backward_anew
from popxl.ops.attention import attention_backward as of_backward
from popxl.ops.attention import attention_forward as of_forward
from popxl.ops.kernels.kernel import Kernel, KernelImpl
from runtime import jax_private

OLDEST = 90000
"""Version of cuDNN: 9.0."""

MOST_CHANNELS = 128

SHORTEST = 64
"""Queries and keys of a text: with fewer there is little to gain, and cuDNN has no kernels for one."""

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
"""Names of the kernels in XLA."""


def overrides(device: jax.Device, is_here: bool) -> Mapping[Kernel, KernelImpl]:
    """Kernels of attention for a GPU: none without cuDNN, if it is here, or for GPUs older than those of the Ampere
    generation, whose units for products have no bfloat16."""
    generation = str(getattr(device, "compute_capability", "0")).partition(".")[0]
    if not generation.isdecimal() or int(generation) < 8 or (is_here and jax_private.cudnn_version() < OLDEST):
        return {}
    return {of_forward: attention_forward, of_backward: partial(attention_backward, allocates_workspace=not is_here)}


def _is_supported(queries: Array, keys: Array, values: Array, mask: Any, dropout: float) -> bool:
    """Whether cuDNN has kernels for these operands. Masks and dropout, whose seed is an operand, have none here."""
    channels = queries.shape[-1]
    return (
        mask is None
        and not dropout
        and queries.dtype in (jnp.bfloat16, jnp.float16)
        and values.shape[-1] == channels
        and channels % 8 == 0
        and channels <= MOST_CHANNELS
        and min(queries.shape[-2], keys.shape[-2]) >= SHORTEST
        and 0 not in (*queries.shape, *keys.shape)
    )


def attention_forward(
    queries: Array, keys: Array, values: Array, mask: Any, seed: Any, *, causal: bool, scale: float, dropout: float
) -> tuple[Array, Array]:
    """`popxl.ops.attention.attention_forward`."""
    if not _is_supported(queries, keys, values, mask, dropout):
        how = {"causal": causal, "scale": scale, "dropout": dropout}
        return of_forward.plain(queries, keys, values, mask, seed, **how)
    forward = _per_batch(partial(attend, causal=causal, scale=scale))
    out, logs = forward(*map(_of_four, (queries, keys, values)))
    return out.reshape(queries.shape), logs.reshape(queries.shape[:-1])


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
    allocates_workspace: bool = False,
) -> tuple[Array, Array, Array]:
    """`popxl.ops.attention.attention_backward`. Results over more keys, with their sums, make it a part.

    Args:
        allocates_workspace: whether the program allocates the workspace that cuDNN would ask for.
    """
    if not _is_supported(queries, keys, values, mask, dropout):
        how = {"causal": causal, "scale": scale, "dropout": dropout}
        return attended_backward_anew(g, queries, keys, values, out, logs, mask, seed, is_part=is_part, **how)
    backward = _per_batch(partial(gradients, causal=causal, scale=scale, allocates_workspace=allocates_workspace))
    given = map(_of_four, (g.astype(queries.dtype), queries, keys, values, out.astype(queries.dtype)))
    dq, dk, dv = backward(*given, logs.reshape(_of_four(queries).shape[:-1]))
    return dq.reshape(queries.shape), dk.reshape(keys.shape), dv.reshape(values.shape)


def _of_four(t: Array) -> Array:
    """An operand of shape (batch, heads, length, channels)."""
    heads = t.shape[-3] if t.ndim > 2 else 1
    return t.reshape(math.prod(t.shape[:-3]), heads, *t.shape[-2:])


def _per_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays with a batch, also within `jax.vmap`, as replicas on one device are: of a larger batch."""
    batched = custom_vmap(function)

    @batched.def_vmap
    def of_several(size: int, is_batched: list[bool], *operands: Array) -> tuple[Any, Any]:
        whole = (
            t if known else jnp.broadcast_to(t, (size, *t.shape)) for t, known in zip(operands, is_batched, strict=True)
        )
        results = batched(*(t.reshape(-1, *t.shape[2:]) for t in whole))
        return tuple(t.reshape(size, -1, *t.shape[1:]) for t in results), (True,) * len(results)

    return batched


# Calls --------------------------------------------------------------------------------------------------------------


def attend(queries: Array, keys: Array, values: Array, causal: bool, scale: float) -> tuple[Array, Array]:
    """Call the kernel of attention: results, and log-sum-exp of the scores in float32.

    Args:
        queries, keys, values: float16 or bfloat16, of shape (batch, heads, length, channels).
    """
    logs = jax.ShapeDtypeStruct(queries.shape[:-1], jnp.float32)
    products = {
        "bmm1": (3, 3, "02", "02"),  # of queries and keys
        "bmm2": (3, 1, "01", "02"),  # of scores and values
    }
    settings = _settings(queries, keys, causal, scale, products)
    out, logs = _call(FORWARD, settings, (queries, keys, values), (queries, logs), 0)
    return out, logs


def gradients(
    g: Array,
    queries: Array,
    keys: Array,
    values: Array,
    out: Array,
    logs: Array,
    causal: bool,
    scale: float,
    allocates_workspace: bool = False,
) -> tuple[Array, Array, Array]:
    """Call the kernel of attention's gradients, of queries, keys and values.

    Args:
        g: gradient of `out`.
        queries, keys, values: as for `attend`.
        out, logs: its results.
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
    operands = (queries, keys, values, logs, g, out)
    dq, dk, dv = _call(BACKWARD, settings, operands, (queries, keys, values), workspace)
    return dq, dk, dv


def _call(
    name: str, settings: dict[str, Any], operands: tuple[Array, ...], like: tuple[Any, ...], workspace: int
) -> list[Array]:
    """Call a kernel of cuDNN.

    Models split channels into heads, which makes the length come first: so it does in all arrays of the kernels, and
    XLA leaves out the transposes of both.

    Args:
        like: arrays with the shapes and dtypes of the results.
        workspace: its bytes; with 0, XLA asks cuDNN.
    """
    results = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in like]
    call = jax.ffi.ffi_call(
        name,
        [*results, jax.ShapeDtypeStruct((workspace,), jnp.uint8)],
        output_layouts=[*((0, 2, 1, 3) if t.ndim == 4 else None for t in results), None],
        custom_call_api_version=2,  # with settings as text
        legacy_backend_config=json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": settings}),
    )
    return list(call(*(t.swapaxes(1, 2) if t.ndim == 4 else t for t in operands))[:-1])


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
