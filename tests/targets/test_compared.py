"""What our programs cost on a machine that is not here, beside the same by hand in JAX: those of docs/costs.md, less
deep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff
from tests.benchmarks import models
from tests.benchmarks.harness import Size
from tests.targets.compared import OF_MEMORY, Case, by_poptorch, of_jax, of_ours, small_gpt


def pools() -> Case:
    """Windows that overlap, over what is trained."""
    from torch import nn

    from tests.poptorch.models import WithLoss

    def model() -> nn.Module:
        return WithLoss(nn.Linear(28, 28), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(16 * 14 * 14, 10))

    def loss(w: models.Weights, x: Any, labels: Any) -> Any:
        x = jax.nn.relu(models.linear(w, "layers.0", x))
        edges = [(0, 0), (0, 0), (1, 1), (1, 1)]
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 3, 3), (1, 1, 2, 2), edges)
        return models.cross_entropy(models.linear(w, "layers.4", x.reshape(len(x), -1)), labels)

    return by_poptorch(models.Task(model, loss, (16, 28, 28), batch=8, classes=10, steps=10))


CASES: dict[str, Callable[[], Case]] = {
    "gpt, gpu h100": lambda: small_gpt(Size.FULL, 1),
    "encoder, gpu h100": lambda: by_poptorch(models.encoder(Size.FULL, layers=1, steps=2)),
    "encoder, tpu v5e": lambda: by_poptorch(models.encoder(Size.FULL, layers=2, steps=10)),
    "lenet, gpu h100": lambda: by_poptorch(models.lenet(Size.FULL, steps=2)),
    "pools, tpu v5e": pools,
}


@pytest.mark.targets
@pytest.mark.parametrize("name", CASES)
def test_no_column_is_worse_than_by_hand(name: str) -> None:
    program, target = name.split(", ")
    if program != "gpt":
        pytest.importorskip("torch")
    case = CASES[name]()
    ours = of_ours(case, target)
    with jax.default_matmul_precision("highest"):
        by_hand = of_jax(case, target)
    columns = ["arguments", "code", "flops", OF_MEMORY, "kernels", "cycles"]
    if target.startswith("gpu"):  # of TPUs in the core's own memory; it is full of what is fetched early
        columns += ["temporaries", "bytes accessed"]
    for column in columns:
        assert ours[column] <= 1.02 * by_hand[column] + 16, f"{column}: {ours[column]} for {by_hand[column]}"


@pytest.mark.targets
def test_the_gradient_of_a_small_convolution_is_little_code() -> None:
    """XLA writes out what it takes for a kernel, an image here, and does not end for a batch of 32."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        images, filters = (popxl.variable(np.zeros(shape, np.float32)) for shape in ((4, 1, 28, 28), (6, 1, 5, 5)))
        graph = ir.create_graph(lambda t, w: ops.conv(t, w, padding=(2,) * 4), images, filters)
        info = autodiff(graph, grads_required=graph.inputs[1:])
        site = ops.call_with_info(graph, images, filters)
        (gradient,) = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
        ops.var_updates.accumulate_(filters, gradient)
    code = popxl.Session(ir, "tpu v5e").cost().code_bytes
    assert code is not None and code < 3_000_000
