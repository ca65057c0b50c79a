"""Optimisers of programs on several IPUs: state lies beside its variable, and the numbers are those of one IPU."""

from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import CrossingUpdateWarning
from popxl_addons import optimizers

Array = np.ndarray


def trained(optimizer: Any, ipus: tuple[int, int], in_a_loop: bool, scaling: Any) -> tuple[Any, ...]:
    """The variables and state after two steps of a network of two layers, one on each IPU, and the bytes there."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        values = [np.arange(6).reshape(2, 3) / 6, np.ones((3, 5)) / 3]
        weights = [popxl.variable(v, popxl.float32, f"w{i}") for i, v in enumerate(values)]
        sums = [popxl.variable(np.zeros_like(v), popxl.float32, f"g{i}") for i, v in enumerate(values)]
        x = popxl.variable(np.ones((4, 2)) / 2, popxl.float32, "x")

        def step(x: Any, w0: Any, w1: Any, g0: popxl.TensorByRef, g1: popxl.TensorByRef) -> None:
            with popxl.ipu(ipus[0]):
                h = (x @ w0).copy_to_ipu(ipus[1]) if ipus[0] != ipus[1] else x @ w0
            with popxl.ipu(ipus[1]):
                dy = h @ w1
                g1 += h.T @ dy
                dh = dy @ w1.T
                dh = dh.copy_to_ipu(ipus[0]) if ipus[0] != ipus[1] else dh
            with popxl.ipu(ipus[0]):
                g0 += x.T @ dh

        graph = ir.create_graph(step, x, *weights, *sums)
        ops.repeat(graph, 2, x, *weights, *sums) if in_a_loop else ops.call(graph, x, *weights, *sums)
        scale = scaling.init() if scaling else 1.0
        state = optimizer(weights, sums, loss_scaling=scale)
    ir.options.placement = "several" if ipus[0] != ipus[1] else "one"  # small ops would be on one device
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
        session.run()
        found = {v.name: session.get_tensor_data(v) for v in [*weights, *state.values_flat(), *sums, x]}
        return found, [each.variables for each in session.memory().devices]


@pytest.mark.thorough(but_each=6)
@pytest.mark.parametrize("in_a_loop", [False, True], ids=["called", "in a loop"])
@pytest.mark.parametrize(
    ("optimizer", "scaling"),
    [
        (partial(optimizers.adamw, lr=0.1, clip_norm=0.5), None),
        (partial(optimizers.adafactor, lr=0.1), None),
        (partial(optimizers.sgd, lr=0.1, momentum=0.9, clip_norm=1.0), optimizers.DynamicLossScaling(start=4.0)),
    ],
    ids=["adamw", "adafactor", "sgd, scaled"],
)
def test_state_lies_beside_its_variable(optimizer: Any, scaling: Any, in_a_loop: bool) -> None:
    expected, _ = trained(optimizer, (0, 0), in_a_loop, scaling)
    for first in (0, 1):  # the optimiser is called on IPU 0
        found, bytes_there = trained(optimizer, (first, 1 - first), in_a_loop, scaling)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
        sizes, of = [0, 0], {"w0": first, "g0": first, "x": first, "w1": 1 - first, "g1": 1 - first}
        for name, value in expected.items():
            sizes[next((ipu for part, ipu in of.items() if part in name.split(".")), 0)] += value.nbytes
        assert bytes_there == sizes


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_loss_is_scaled_where_the_network_ends(clip_norm: float | None) -> None:
    """The last IPU reads the scale first, and the optimiser, on IPU 0, afterwards."""
    found = []
    for ipus in ((0, 0), (0, 1)):
        ir = popxl.Ir()
        ir.options.placement = "several" if ipus == (0, 1) else "one"
        with ir.main_graph, popxl.in_sequence():
            scale = optimizers.DynamicLossScaling(start=4.0).init()
            weights = [popxl.variable([1.0, 2.0], name=f"w{i}") for i in range(2)]
            gradients = []
            for weight, ipu in zip(weights, ipus, strict=True):
                with popxl.ipu(ipu):
                    gradients.append(weight * (scale.value if weight is weights[1] else 4.0))
            optimizers.sgd(weights, gradients, lr=0.1, clip_norm=clip_norm, loss_scaling=scale)
        with popxl.Session(ir, "ipu_model") as session:
            session.run()
        found.append([session.get_tensor_data(v) for v in (*weights, scale.good_steps)])
    clipped = 0.1 * (1.0 if clip_norm is None else clip_norm / np.sqrt(10))
    for values in found:
        for weight in values[:2]:
            np.testing.assert_allclose(weight, np.array([1, 2]) * (1 - clipped), rtol=1e-6)
        assert values[2] == 1


@pytest.mark.parametrize("placement", ["several", "one"])
@pytest.mark.parametrize("update_on", [0, 1])
def test_an_update_on_another_ipu_is_told(update_on: int, placement: Literal["several", "one"]) -> None:
    """Also where both are one device, as the program may run elsewhere."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        w = popxl.variable(np.ones((2, 3)), popxl.float32, "w")
        count = popxl.variable(0, popxl.float32, "count")  # a scalar is nothing to speak of

        def on_both(w: Any, count: Any) -> Any:
            with popxl.ipu(1):
                y = (w + count).copy_to_ipu(0)
            with popxl.ipu(0):
                return y + 1

        (y,) = ops.call(ir.create_graph(on_both, w, count), w, count)
        with popxl.ipu(update_on):
            ops.var_updates.accumulate_(w, y if update_on == 0 else y.copy_to_ipu(1))
        count += 1
    ir.options.placement = placement
    with nullcontext() if update_on == 1 else pytest.warns(CrossingUpdateWarning, match="`w` is .*accumulate_") as told:
        session = popxl.Session(ir, "ipu_model")
    assert told is None or "`count`" not in str(told[0].message)
    with session:
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(w), np.full((2, 3), 3.0))


class OnTwo(addons.Module):
    """Two layers on IPUs 0 and 1. The first weight is also that of the last product, as embeddings often are."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w0 = self.add_variable_input("w0", lambda: np.arange(40).reshape(2, 20) / 40, x.dtype)
        w1 = self.add_variable_input("w1", lambda: np.ones((20, 20)) / 3, x.dtype)
        h = ops.tanh(x @ w0).copy_to_ipu(1)
        with popxl.ipu(1):
            y = ops.tanh(h @ w1) @ w0.T
            return ops.mean(y * y)


def squares(x: Any, w0: Any, w1: Any) -> Any:
    """The same in JAX."""
    return jnp.mean((jnp.tanh(jnp.tanh(x @ w0) @ w1) @ w0.T) ** 2)


@pytest.mark.parametrize("settings", [{}, {"accumulate": 3}, {"micro_batches": 2}], ids=str)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_a_training_step_on_two_ipus(settings: dict[str, Any], sharded: bool) -> None:
    """Gradients are accumulated, and reduced over replicas, on the IPU of their layer: only activations go across, and
    the weight that both read."""
    if len(jax.devices("cpu")) < 4:
        pytest.skip("JAX was started with fewer devices")
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = popxl.h2d_stream((4, 2), popxl.float32, "x")
        optimizer = partial(optimizers.sgd, lr=0.1, momentum=0.9, clip_norm=0.01)
        training = addons.train_step(OnTwo(), x, optimizer=optimizer, sharded=sharded, **settings)
        loss = addons.host_store(training.loss)
    ir.options.placement = "several"
    feeds = np.random.default_rng(0).normal(size=(2, settings.get("accumulate", 1), 2, 4, 2)).astype(np.float32)
    weights = {name: v.data.copy() for name, v in training.variables.to_dict().items()}
    velocity = dict.fromkeys(weights, 0.0)
    with popxl.Session(ir, "ipu_model") as session:
        for each in feeds:
            expected, gradients = jax.value_and_grad(lambda w: squares(each.reshape(-1, 2), **w))(weights)  # noqa: B023
            stored = np.array(session.run({x: each.squeeze(0) if len(each) == 1 else each})[loss])
            np.testing.assert_allclose(stored, np.full_like(stored, expected), rtol=1e-5)
            norm = np.sqrt(sum(np.sum(g**2) for g in gradients.values()))
            for name, g in gradients.items():
                velocity[name] = 0.9 * velocity[name] + np.array(g) * min(1, 0.01 / norm)
                weights[name] = weights[name] - 0.1 * velocity[name]
        for name, v in training.variables.to_dict().items():
            np.testing.assert_allclose(session.get_tensor_data(v), weights[name], rtol=1e-5, atol=1e-6)
        batches = settings.get("accumulate", 1) * settings.get("micro_batches", 1)
        copied = session.communication().copied
        of_w0, activations = 40 * 4, 4 * 20 * 4 // settings.get("micro_batches", 1)
        assert copied is not None and copied.compiled_bytes <= batches * 2 * (of_w0 + activations) + 100
