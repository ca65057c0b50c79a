"""Micro-batches of a loaded batch, and state of the optimiser on the host: the same training, with less memory."""

from __future__ import annotations

import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.__main__ import main
from popxl.errors import PopxlError
from popxl.extend.memory import is_on_host
from popxl_addons import optimizers
from tests.popxl_addons.test_addons_memory_budget import Deep
from tests.tolerances import assert_near

X = np.random.default_rng(0).normal(size=(3, 12, 5)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 4, (3, 12)).astype(np.int32)


class Classifier(addons.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = addons.layers.Linear(4)

    def build(self, x: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        return addons.cross_entropy(self.linear(x), labels)


def trained(replicas: int = 1, optimizer: Any = None, accumulate: int = 1, **how: Any) -> tuple[Any, ...]:
    """The losses of three steps on 12 samples, and the variables after them."""
    np.random.seed(3)
    size = 12 // replicas // accumulate
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        x, y = popxl.h2d_stream((size, 5), popxl.float32, "x"), popxl.h2d_stream((size,), popxl.int32, "y")
        optimizer = optimizer or partial(optimizers.adamw, lr=0.1, clip_norm=0.5)
        training = addons.train_step(Classifier(), x, y, optimizer=optimizer, accumulate=accumulate, **how)
        out = addons.host_store(training.loss)
    losses = []
    with popxl.Session(ir, "ipu_hw") as session:
        for rows, labels in zip(X, Y, strict=True):
            fed = {x: rows.reshape(session.host_shape(x)), y: labels.reshape(session.host_shape(y))}
            losses.append(float(session.run(fed)[out].ravel()[0]))
        named: dict[str, Any] = {**training.variables.to_dict(), **training.state.to_dict()}
        found = session.get_tensors_data(list(named.values()))
    return losses, {name: np.array(found[v]) for name, v in named.items()}, training


@pytest.mark.parametrize(
    "how",
    [
        {"micro_batches": 4},
        {"micro_batches": 3, "accumulate": 2, "loss_scaling": 128.0},
        {"micro_batches": 2, "replicas": 2, "sharded": True},
        {"optimizer_state": "host"},
        {"optimizer_state": "host", "replicas": 3, "sharded": True, "micro_batches": 2},
    ],
)
def test_the_same_training_in_slices_and_with_state_on_the_host(how: dict[str, Any]) -> None:
    """Weights of 20 elements on 3 replicas have padding."""
    losses, variables, _ = trained()
    others, found, training = trained(**how)
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    assert found.keys() == variables.keys()
    for name in variables:
        assert_near(found[name], variables[name], 1e-4)
    for name, v in training.state.to_dict().items():
        assert is_on_host(v) == (how.get("optimizer_state") == "host" and name != "step"), name


@pytest.mark.parametrize("optimizer", ["adafactor", "lion", "sgd", "optax"])
def test_each_optimizer_has_its_state_on_the_host(optimizer: str) -> None:
    if optimizer == "optax":
        optax = pytest.importorskip("optax")
        rule = optimizers.from_optax(optax.adam(0.1))
    else:
        rule = partial(getattr(optimizers, optimizer), lr=0.1, **({"momentum": 0.9} if optimizer == "sgd" else {}))
    losses, variables, _ = trained(optimizer=rule)
    others, found, training = trained(optimizer=rule, optimizer_state="host")
    np.testing.assert_allclose(others, losses, rtol=1e-6)
    for name in variables:
        assert_near(found[name], variables[name], 1e-5)
    assert any(is_on_host(v) for v in training.state.to_dict().values())


def test_half_precision_in_slices() -> None:
    losses, _, _ = trained()
    for dtype, precise in ((popxl.bfloat16, 2e-2), (popxl.float16, 3e-3)):
        how: dict[str, Any] = {"micro_batches": 3, "precision": addons.MixedPrecision(dtype), "optimizer_state": "host"}
        others, _, training = trained(**how)
        np.testing.assert_allclose(others, losses, rtol=precise)
        assert ("loss_scaling.value" in training.state.keys_flat()) == (dtype is popxl.float16)


class Scaled(addons.Module):
    """Rows times a scalar, and a mask of dropout."""

    def build(self, x: popxl.Tensor, scalar: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", lambda: np.ones(5), x.dtype)
        return ops.mean(ops.dropout(x, seed, 0.5) @ w * scalar)


def masked(rows: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Three slices of rows, each after dropout with a seed of its own."""
    ir = popxl.Ir()
    with ir.main_graph:
        seeds = ops.split_random_seed(popxl.variable(key, popxl.uint32), 3)
        parts = [
            ops.dropout(popxl.variable(part), seed, 0.5) for part, seed in zip(np.split(rows, 3), seeds, strict=True)
        ]
        out = addons.host_store(ops.concat(parts))
    with popxl.Session(ir, "cpu") as session:
        return np.asarray(session.run({})[out])


def test_scalars_are_the_same_for_all_and_seeds_are_not() -> None:
    """With inputs that are tensors."""
    rows, key = X[0], np.array([3, 4], np.uint32)
    ir = popxl.Ir()
    with ir.main_graph:
        x, scalar, seed = popxl.variable(rows, name="x"), popxl.variable(2.0), popxl.variable(key, popxl.uint32)
        inputs = (x, scalar, seed)
        training = addons.train_step(Scaled(), *inputs, optimizer=partial(optimizers.sgd, lr=0.5), micro_batches=3)
        loss = addons.host_store(training.loss)
    with popxl.Session(ir, "cpu") as session:
        outputs = session.run({})
        w = session.get_tensor_data(training.variables.w)
    kept = masked(rows, key)
    assert (kept[:4] == 0).tolist() != (kept[4:8] == 0).tolist()
    np.testing.assert_allclose(outputs[loss], kept.sum(1).mean() * 2, rtol=1e-5)
    np.testing.assert_allclose(w, 1 - 0.5 * 2 * kept.mean(0), rtol=1e-5)


def own_optimizer(variables: Any, gradients: Any, loss_scaling: Any) -> addons.NamedTensors:
    return addons.NamedTensors(velocity=popxl.variable(np.zeros((5, 4)), popxl.float32))


def test_what_is_refused() -> None:
    with popxl.Ir().main_graph:
        x, y = popxl.h2d_stream((12, 5), popxl.float32, "x"), popxl.h2d_stream((12,), popxl.int32, "y")
        step: Any = partial(addons.train_step, Classifier(), x, y, optimizer=optimizers.sgd)
        with pytest.raises(
            ValueError, match=r"`micro_batches` is 5, which does not divide a batch of 12 samples; .* 1, 2"
        ):
            step(micro_batches=5)
        with pytest.raises(ValueError, match="`micro_batches` is 0; expected 1 or more, or 'auto'"):
            step(micro_batches=0)
        with pytest.raises(TypeError, match="train_step: `micro_batches`"):
            step(micro_batches=2.0)
        with pytest.raises(ValueError, match="`optimizer_state` is 'disk'; expected 'device', 'host', or 'auto'"):
            step(optimizer_state="disk")
        with pytest.raises(ValueError, match=r"the optimiser leaves \['velocity'\] on the device"):
            step(optimizer_state="host", optimizer=own_optimizer)
        for name in ("micro_batches", "optimizer_state"):
            for memory in (None, "products"):
                with pytest.raises(
                    ValueError, match=f"`{name}` is 'auto', which is chosen for a budget.*memory='14 GB'"
                ):
                    step(memory=memory, **{name: "auto"})
        with pytest.raises(ValueError, match=r"got 12 in `inputs\[0\]`, 3 in `inputs\[1\]`. Give all inputs the same"):
            other = popxl.h2d_stream((3,), popxl.int32)
            addons.train_step(Classifier(), x, other, optimizer=optimizers.sgd, micro_batches=3)


# Chosen for a budget ------------------------------------------------------------------------------------------------


def deep(
    memory: Any, rule: Any = optimizers.adamw, calls: Any = "inlined", rows: int = 64, **how: Any
) -> tuple[popxl.Ir, Any]:
    np.random.seed(3)
    ir = popxl.Ir()
    ir.options.calledGraphs = calls
    with ir.main_graph:
        x = popxl.h2d_stream((16, rows, 32), popxl.float32, "x")
        step = addons.train_step(Deep(), x, optimizer=partial(rule, lr=0.1), memory=memory, **how)
        addons.host_store(step.loss)
    return ir, step


def peak(memory: Any, **how: Any) -> int:
    return popxl.Session(deep(memory, **how)[0], "cpu").memory().device


@pytest.mark.here
def test_as_few_micro_batches_as_a_budget_needs() -> None:
    assert peak("nothing") > 4.5e6
    built = []

    def build(memory: Any) -> popxl.Ir:
        ir, step = deep(memory, micro_batches="auto")
        built.append(step.memory)
        return ir

    found = addons.plan_memory(build, "4.5 MB")
    assert found.peak <= found.budget and found.plan.micro_batches > 1
    assert len(built) == found.compilations <= 4
    assert found.everything.device == peak("everything")
    assert {plan.micro_batches for plan in built} == {1, found.plan.micro_batches}, "none is compiled to be compared"
    assert f"In addition: {found.plan.micro_batches} micro-batches." in str(found)
    again, step = deep(addons.MemoryPlan.model_validate_json(found.plan.model_dump_json()), micro_batches="auto")
    assert step.memory == found.plan and popxl.Session(again, "cpu").memory().device == found.peak


def test_micro_batches_of_rerolled_layers_are_a_loop() -> None:
    """As those are that a host feeds one by one."""

    def temporaries(size: int, **how: Any) -> int:
        ir = popxl.Ir()
        ir.options.calledGraphs = "rolled"
        with ir.main_graph:
            x = popxl.h2d_stream((size, 64, 32), popxl.float32, "x")
            addons.host_store(addons.train_step(Deep(), x, optimizer=partial(optimizers.sgd, lr=0.1), **how).loss)
        return popxl.Session(ir, "cpu").memory().temporaries

    assert temporaries(16, micro_batches=4) <= 1.1 * temporaries(4, accumulate=4)


@pytest.mark.thorough
def test_a_budget_that_fits_in_one_piece_is_enough() -> None:
    """Where accumulators need more than activations."""
    budget = round(1.02 * peak("nothing", rows=2))
    assert peak("nothing", rows=2, micro_batches=2) > budget < peak("everything", rows=2)
    found = addons.plan_memory(lambda memory: deep(memory, rows=2, micro_batches="auto")[0], budget)
    assert found.plan.micro_batches == 1 and found.peak <= budget


def test_recomputing_in_one_piece_is_tried_before_slices_that_take_longer() -> None:
    """Slices of few rows would read the weights again for little."""
    lines: list[str] = []
    budget = round(1.08 * peak("nothing", rows=4))
    assert budget < peak("everything", rows=4)
    found = addons.plan_memory(lambda memory: deep(memory, rows=4, micro_batches="auto")[0], budget, told=lines.append)
    assert found.plan.micro_batches == 1 and found.compilations == 2, lines


def test_enough_memory_needs_one_micro_batch() -> None:
    found = addons.plan_memory(lambda memory: deep(memory, micro_batches="auto", optimizer_state="auto")[0], "1 GB")
    assert (found.plan.micro_batches, found.plan.optimizer_state, found.compilations) == (1, "device", 1)


def test_a_step_chooses_micro_batches_within_its_budget() -> None:
    """And trains as without."""

    def run(memory: Any, **how: Any) -> tuple[Any, Any]:
        ir, step = deep(memory, rule=optimizers.sgd, **how)
        rows = np.random.default_rng(1).normal(size=(16, 64, 32)).astype(np.float32)
        (x,), (loss,) = ir.get_all_h2d_streams(), ir.get_all_d2h_streams()
        with popxl.Session(ir, "cpu") as session:
            return step, [session.run({x: rows})[loss] for _ in range(2)]

    _, losses = run("everything")
    step, others = run("4.5 MB", micro_batches="auto")
    assert step.memory.micro_batches > 1
    np.testing.assert_allclose(others, losses, rtol=1e-5)


def test_a_step_that_is_divided_less_than_its_plan_warns() -> None:
    plan = deep("everything", micro_batches=4)[1].memory.model_copy(update={"optimizer_state": "host"})
    with pytest.warns(UserWarning, match=r"made for micro_batches=4, and the step has 2.*or 'auto'"):
        deep(plan, micro_batches=2, optimizer_state="auto")
    with pytest.warns(UserWarning, match=r"made for optimizer_state='host', and the step has 'device'"):
        deep(plan, micro_batches=8)
    assert deep(plan, micro_batches="auto", optimizer_state="auto")[1].memory == plan


@pytest.mark.thorough
def test_too_small_a_budget_has_tried_micro_batches() -> None:
    with pytest.raises(PopxlError, match=r"the least that was compiled, with \d+ micro-batches, needs [0-9.]+ MB"):
        addons.plan_memory(lambda memory: deep(memory, micro_batches="auto")[0], "300 kB")


@pytest.mark.targets
def test_state_moves_to_the_host_where_nothing_else_is_enough() -> None:
    """On CPUs, both memories are the same."""

    def build(memory: Any) -> popxl.Ir:
        return deep(memory, micro_batches="auto", optimizer_state="auto")[0]

    on_device = addons.plan_memory(build, "4 MB", "gpu h100")
    assert on_device.plan.optimizer_state == "device"
    found = addons.plan_memory(build, "1 MB", "gpu h100")
    assert found.plan.optimizer_state == "host" and found.peak <= found.budget
    assert "the state of the optimiser on the host" in str(found)


PROGRAM = """
    from functools import partial
    import popxl
    import popxl_addons as addons
    from popxl_addons import optimizers
    from tests.popxl_addons.test_addons_memory_budget import Deep

    ir = popxl.Ir()
    ir.options.calledGraphs = "inlined"
    with ir.main_graph:
        x = popxl.h2d_stream((16, 64, 32), popxl.float32, "x")
        sgd = partial(optimizers.sgd, lr=0.1)
        step = addons.train_step(Deep(), x, optimizer=sgd, micro_batches="auto", memory="9 MB")
        addons.host_store(step.loss)
    popxl.Session(ir, "ipu_hw").run({})
"""


def test_the_command_plans_micro_batches(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    command = ["plan", "--budget", "4.5 MB", "--save", str(tmp_path / "plan.json"), str(tmp_path / "train.py")]
    assert main(command) == 0
    plan = addons.MemoryPlan.read_json(tmp_path / "plan.json")
    assert plan.micro_batches > 1 and f"In addition: {plan.micro_batches} micro-batches." in capsys.readouterr().out
