"""An optimiser as popxl ops: golden numbers, ten steps beside torch's, groups, types, scaling, replicas, and errors."""

import copy
import logging
import pickle
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import popxl  # noqa: E402
from poptorch import optim  # noqa: E402
from poptorch.errors import Error  # noqa: E402
from poptorch.program.formulas import averaged  # noqa: E402
from poptorch.program.updates import Update  # noqa: E402
from popxl import TensorByRef, ops  # noqa: E402
from tests.tolerances import assert_near  # noqa: E402

STEPS = 10
SHAPES = {"a": (2, 3), "b": (4,)}
Optimizer = torch.optim.Optimizer


# Programs -----------------------------------------------------------------------------------------------------------


def parameters(dtype: Any = torch.float32) -> dict[str, torch.nn.Parameter]:
    """Two parameters with numbers of their own."""
    generator = torch.Generator().manual_seed(0)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def gradients(steps: int = STEPS) -> list[dict[str, np.ndarray]]:
    """Those of some steps."""
    generator = np.random.default_rng(1)
    return [{n: generator.normal(size=s).astype(np.float32) for n, s in SHAPES.items()} for _ in range(steps)]


class Program:
    """A program that gets gradients from the host, as they are after the backward pass, and makes one step of each.

    With `loop` steps, each run makes as many, in a subgraph.
    """

    def __init__(
        self, optimizer: Optimizer, named: dict[str, torch.nn.Parameter], loop: int = 0, half: bool = False, **how: Any
    ) -> None:
        self.update = update = Update(optimizer, named, **how)
        self.ir = popxl.Ir()
        self.ir.num_host_transfers = loop or 1
        self.numbers = update.hyperparameters.values(optimizer)
        with self.ir.main_graph, popxl.in_sequence():
            self.weights = {n: popxl.variable(p.detach(), name=n) for n, p in named.items()}
            self.state = update.create_state()
            dtype = popxl.float16 if half else popxl.float32
            self.streams = {n: popxl.h2d_stream(tuple(p.shape), dtype, f"d{n}") for n, p in named.items()}
            values = popxl.variable(self.numbers, name="values")
            self.scale = popxl.d2h_stream((), popxl.float32, "scale")
            trained = {n: self.weights[n] for n in update.names}

            def step(values: popxl.Tensor, *changed: TensorByRef) -> None:
                named = dict(zip([*trained, *self.state], changed, strict=True))
                weights, state = ({n: named[n] for n in names} for names in (trained, self.state))
                scale = update.loss_scale(values, state)
                scale = scale if isinstance(scale, popxl.Tensor) else popxl.constant(scale, popxl.float32)
                ops.host_store(self.scale, scale)
                arrived = {n: ops.host_load(self.streams[n]) for n in update.names}
                update(weights, {n: g * ops.cast(scale, g.dtype) for n, g in arrived.items()}, values, state)

            changed = [*trained.values(), *self.state.values()]
            if loop:
                ops.repeat(self.ir.create_graph(step, values, *changed), loop, values, *changed)
            else:
                step(values, *changed)
        self.loop = loop

    def run(self, steps: Sequence[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """The weights after each run."""
        results = []
        if self.loop:
            steps = [{n: np.stack([g[n] for g in steps]) for n in steps[0]}]
        with popxl.Session(self.ir, "ipu_model") as session:
            for given in steps:
                found = session.run({self.streams[n]: given[n] for n in self.update.names})
                self.scales = found[self.scale]
                results.append({n: np.array(session.get_tensor_data(w)) for n, w in self.weights.items()})
                self.kept = {n: np.array(session.get_tensor_data(v)) for n, v in self.state.items()}
        return results


def by_torch(
    optimizer: Optimizer, named: dict[str, torch.nn.Parameter], clip: float = 0
) -> list[dict[str, np.ndarray]]:
    """The weights after each step of the optimiser's own code."""
    results = []
    for given in gradients():
        for name, p in named.items():
            p.grad = torch.from_numpy(given[name].copy())
        if clip:
            torch.nn.utils.clip_grad_norm_(list(named.values()), clip)
        optimizer.step()
        results.append({n: p.detach().numpy().copy() for n, p in named.items()})
    return results


def assert_equal(found: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]], tolerance: float = 1e-5) -> None:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in theirs:
            assert_near(ours[name], theirs[name], tolerance, f"{name}, step {step}")


# Numbers ------------------------------------------------------------------------------------------------------------

GOLDEN: list[tuple[str, dict[str, Any], list[float]]] = [
    ("SGD", dict(weight_decay=0.01), [0.949000, 2.023000, 0.938051, 1.990977]),
    ("SGD", dict(momentum=0.9), [0.950000, 2.025000, 0.895000, 2.017500]),
    ("SGD", dict(momentum=0.9, dampening=0.1, weight_decay=0.01), [0.954100, 2.020700, 0.902931, 2.010511]),
    (
        "SGD",
        dict(
            momentum=0.9,
            dampening=0.1,
            weight_decay=0.01,
            loss_scaling=64.0,
            use_combined_accum=True,
            velocity_scaling=16.0,
        ),
        [0.954100, 2.020700, 0.902931, 2.010511],
    ),
    ("SGD", dict(momentum=0.9, nesterov=True, weight_decay=0.01), [0.903100, 2.043700, 0.841074, 2.001447]),
    ("SGD", dict(max_grad_norm=0.2), [0.982111, 2.008944, 0.975787, 1.989971]),
    ("Adam", dict(weight_decay=0.01), [0.900000, 2.100000, 0.818915, 2.078514]),
    ("AdamW", dict(weight_decay=0.01), [0.899000, 2.098000, 0.817797, 2.081608]),
    ("LAMB", dict(weight_decay=0.01), [0.839521, 2.155713, 0.612791, 2.109748]),
    ("LAMB", dict(weight_decay=0.01, bias_correction=False), [0.841137, 2.157361, 0.613401, 2.115486]),
    ("LAMB", dict(weight_decay=0.01, max_weight_norm=1), [0.928231, 2.069637, 0.830201, 2.049889]),
    ("RMSprop", dict(), [0.000000, 3.000000, -0.197066, 2.230199]),
    ("RMSprop", dict(momentum=0.9, weight_decay=0.01), [0.000000, 3.000000, -1.093347, 3.078257]),
    ("RMSprop", dict(centered=True), [-0.005038, 3.005037, -0.203472, 2.235167]),
    ("RMSprop", dict(use_tf_variant=True), [0.949811, 2.025118, 0.939724, 1.994838]),
    ("RMSprop", dict(momentum=0.9, use_tf_variant=True), [0.949811, 2.025118, 0.894554, 2.017445]),
]


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("variable", [True, False], ids=["variable", "constant"])
@pytest.mark.parametrize(("name", "numbers", "expected"), GOLDEN, ids=lambda v: v if isinstance(v, str) else "")
def test_golden(name: str, numbers: dict[str, Any], expected: list[float], variable: bool) -> None:
    w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = getattr(optim, name)([w], lr=0.1, **numbers)
    if not variable:
        for attribute in ("lr", *numbers):
            if attribute in optimizer.variable_attrs:
                optimizer.variable_attrs.markAsConstant(attribute)
    program = Program(optimizer, {"w": w})
    assert (program.numbers.size > 0) is variable
    steps = [{"w": np.array(g, np.float32)} for g in ([0.5, -0.25], [0.1, 0.3])]
    found = np.concatenate([after["w"] for after in program.run(steps)])
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    if variable:  # the same numbers as a mere reading of the formula on the host
        assert program.numbers.size == 1 + len([n for n in numbers if n in optimizer.variable_attrs])


TORCH: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("SGD", dict(lr=0.1), {}),
    ("SGD", dict(lr=0.1, momentum=0.9, weight_decay=0.01), {}),
    ("SGD", dict(lr=0.1, momentum=0.9, nesterov=True), {}),
    ("SGD", dict(lr=0.1, momentum=0.9), dict(max_grad_norm=0.5)),
    ("SGD", dict(lr=0.1, momentum=0.9), dict(use_combined_accum=True, velocity_scaling=128.0, loss_scaling=32.0)),
    ("Adam", dict(lr=0.01, weight_decay=0.1), {}),
    ("Adam", dict(lr=0.01, betas=(0.0, 0.99)), {}),
    ("Adam", dict(lr=0.01, betas=(0.8, 0.95), eps=1e-3), dict(loss_scaling=1024.0, max_grad_norm=1.0)),
    ("AdamW", dict(lr=0.01), {}),
    ("AdamW", dict(lr=0.01, weight_decay=0.3), dict(max_grad_norm=1.0)),
    ("RMSprop", dict(lr=0.01, alpha=0.9, momentum=0.5, weight_decay=0.1), {}),
    ("RMSprop", dict(lr=0.01, centered=True, eps=1e-4), dict(loss_scaling=8.0)),
    ("SGD", dict(lr=0.1, momentum=0.9, weight_decay=0.2, maximize=True), dict(loss_scaling=8.0)),
    ("Adam", dict(lr=0.1, betas=(0.5, 0.4), amsgrad=True), dict(max_grad_norm=1.0)),
]


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize(("name", "numbers", "more"), TORCH, ids=[f"{i}-{row[0]}" for i, row in enumerate(TORCH)])
def test_ten_steps_beside_torch(name: str, numbers: dict[str, Any], more: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    groups = [{"params": [ours["a"]]}, {"params": [ours["b"]], "lr": 0.02}]
    program = Program(getattr(optim, name)(groups, **numbers, **more), ours)
    groups = [{"params": [theirs["a"]]}, {"params": [theirs["b"]], "lr": 0.02}]
    expected = by_torch(getattr(torch.optim, name)(groups, **numbers), theirs, clip=more.get("max_grad_norm", 0))
    assert_equal(program.run(gradients()), expected)


@pytest.mark.parametrize("numbers", [{}, dict(bias_correction=False, max_weight_norm=0.7, betas=(0.8, 0.9))])
def test_lamb_beside_its_steps_on_the_cpu(numbers: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    program = Program(optim.LAMB(ours.values(), lr=0.02, **numbers), ours)
    assert_equal(program.run(gradients()), by_torch(optim.LAMB(theirs.values(), lr=0.02, **numbers), theirs))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_optimisers_of_torch(name: str) -> None:
    ours, theirs = parameters(), parameters()
    numbers = dict(lr=0.01, weight_decay=0.02)
    program = Program(getattr(torch.optim, name)(ours.values(), **numbers), ours)
    expected = by_torch(getattr(torch.optim, name)(theirs.values(), **numbers), theirs)
    np.testing.assert_allclose(sorted(program.numbers), [0.01, 0.02], rtol=1e-6)
    assert_equal(program.run(gradients()), expected)


OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("Adagrad", {}),
    ("Adagrad", dict(lr=0.1, lr_decay=0.3, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-4)),
    ("Adadelta", {}),
    ("Adadelta", dict(lr=0.3, rho=0.7, weight_decay=0.1, eps=1e-3)),
    ("Adamax", {}),
    ("Adamax", dict(lr=0.1, betas=(0.7, 0.8), weight_decay=0.1, eps=1e-2)),
    ("NAdam", {}),
    ("NAdam", dict(lr=0.1, weight_decay=0.1, momentum_decay=0.1)),
    ("NAdam", dict(lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)),
    ("RAdam", dict(lr=0.1)),
    ("RAdam", dict(lr=0.1, betas=(0.0, 0.6))),  # the average of squares is never of more than four
    ("RAdam", dict(lr=0.1, weight_decay=0.1, betas=(0.8, 0.9))),
    ("RAdam", dict(lr=0.1, weight_decay=0.1, decoupled_weight_decay=True)),
]


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize(("name", "numbers"), OTHERS, ids=[f"{i}-{row[0]}" for i, row in enumerate(OTHERS)])
def test_ten_steps_of_optimisers_that_only_torch_has(name: str, numbers: dict[str, Any]) -> None:
    ours, theirs = (
        (named, getattr(torch.optim, name)([{"params": [named["a"]]}, {"params": [named["b"]], "lr": 0.02}], **numbers))
        for named in (parameters(), parameters())
    )
    assert_equal(Program(ours[1], ours[0]).run(gradients()), by_torch(theirs[1], theirs[0]), tolerance=2e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.999, 0.99999])
def test_how_many_steps_an_average_is_of(beta: float) -> None:
    """Beside the formula in exact fractions: in float32, 1998 would be taken from 1999."""
    b = Fraction(beta)
    for t in (1, 2, 5, 6, 30, 400):
        exact = float(2 / (1 - b) - 1 - 2 * t * b**t / (1 - b**t))
        assert float(averaged(beta, jnp.float32(t))) == pytest.approx(exact, rel=3e-7)


def test_an_adam_whose_weight_decay_is_decoupled_is_an_adamw() -> None:
    ours, theirs = parameters(), parameters()
    program = Program(torch.optim.Adam(ours.values(), 0.01, weight_decay=0.3, decoupled_weight_decay=True), ours)
    assert_equal(program.run(gradients()), by_torch(torch.optim.AdamW(theirs.values(), 0.01, weight_decay=0.3), theirs))


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", *dict(OTHERS)])
def test_one_group_maximises(name: str) -> None:
    numbers = dict(lr=0.05, weight_decay=0.2)
    if name in ("Adam", "AdamW"):
        numbers |= dict(betas=(0.5, 0.4), amsgrad=True)
    ours, theirs = (
        (
            named,
            getattr(torch.optim, name)(
                [{"params": [named["a"]], "maximize": True}, {"params": [named["b"]]}], **numbers
            ),
        )
        for named in (parameters(), parameters())
    )
    assert_equal(Program(ours[1], ours[0]).run(gradients()), by_torch(theirs[1], theirs[0]))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_groups_of_which_one_has_decoupled_weight_decay(kind: type[Optimizer]) -> None:
    ours, theirs = (
        (
            named,
            kind(
                [{"params": [p], "decoupled_weight_decay": p is named["b"]} for p in named.values()],
                0.1,
                weight_decay=0.5,
            ),
        )
        for named in (parameters(), parameters())
    )
    assert_equal(Program(ours[1], ours[0]).run(gradients()), by_torch(theirs[1], theirs[0]))


def test_adagrad_begins_with_what_its_constructor_was_given() -> None:
    """PyTorch has no regard for what a group says."""
    ours, theirs = (
        (named, torch.optim.Adagrad([{"params": named.values(), "initial_accumulator_value": 2.0}], 0.1, 0.0, 0.0, 0.3))
        for named in (parameters(), parameters())
    )
    assert_equal(Program(ours[1], ours[0]).run(gradients()), by_torch(theirs[1], theirs[0]))


def test_steps_in_a_loop() -> None:
    ours, theirs = parameters(), parameters()
    program = Program(optim.Adam(ours.values(), lr=0.01, max_grad_norm=1.0), ours, loop=STEPS)
    expected = by_torch(torch.optim.Adam(theirs.values(), lr=0.01), theirs, clip=1.0)
    assert_equal(program.run(gradients()), expected[-1:])
    assert program.kept["Step"] == STEPS


def test_dampening_from_the_first_step_on_and_without_momentum() -> None:
    """Where torch's formula differs: it takes the first gradient as it is, and dampens nothing without momentum."""
    for momentum, expected in ((0.0, 2 - 0.1 * 0.7 * 3), (0.5, 2 - 0.1 * 0.7 * 3)):
        w = torch.nn.Parameter(torch.tensor([2.0]))
        program = Program(optim.SGD([w], lr=0.1, momentum=momentum, dampening=0.3), {"w": w})
        (after,) = program.run([{"w": np.array([3.0], np.float32)}])
        np.testing.assert_allclose(after["w"], expected, rtol=1e-6)


# What is trained, and what is kept ----------------------------------------------------------------------------------


def test_parameters_that_are_not_trained() -> None:
    named = parameters() | {"c": torch.nn.Parameter(torch.ones(3))}
    named["b"].requires_grad_(False)
    optimizer = optim.SGD([named["a"], named["b"]], lr=0.1)
    program = Program(optimizer, named)
    assert program.update.names == ("a",)
    (after,) = program.run([{n: np.ones(tuple(p.shape), np.float32) for n, p in named.items()}])
    assert_equal([after], [{n: p.detach() - 0.1 * (n == "a") for n, p in named.items()}])


def test_a_parameter_without_a_gradient_stays() -> None:
    w = {name: torch.nn.Parameter(torch.ones(2)) for name in "ab"}
    optimizer = optim.AdamW(w.values(), lr=0.1)
    update, ir = Update(optimizer, w), popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        variables, state = {n: popxl.variable(np.ones(2, np.float32)) for n in w}, update.create_state()
        values = popxl.variable(update.hyperparameters.values(optimizer))
        update(variables, {"b": popxl.constant([1.0, 1.0])}, values, state)
        update(variables, {}, values, state)
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
    assert [variables[n].data.tolist() for n in "ab"] == [[1, 1], pytest.approx([0.899] * 2)]
    assert state["Accl1___a"].data.tolist() == [0, 0] and state["Step"].data == 1


KEPT: list[tuple[Callable[..., Optimizer], dict[str, Any], list[str]]] = [
    (optim.SGD, dict(lr=0.1), []),
    (torch.optim.SGD, dict(lr=0.1, momentum=0.0), []),
    (optim.SGD, dict(lr=0.1, momentum=0.0), ["Accl1___w"]),  # it may change
    (optim.SGD, dict(lr=0.1, momentum=0.9), ["Accl1___w"]),
    (optim.Adam, dict(), ["Accl1___w", "Accl2___w", "Step"]),
    (optim.LAMB, dict(), ["Accl1___w", "Accl2___w", "Step"]),
    (torch.optim.Adam, dict(amsgrad=True), ["Accl1___w", "Accl2___w", "Accl3___w", "Step"]),
    (torch.optim.Adagrad, dict(), ["Accl1___w", "Step"]),
    (optim.RMSprop, dict(), ["Accl1___w", "Step"]),
    (optim.RMSprop, dict(centered=True, momentum=0.9), ["Accl1___w", "Accl2___w", "Accl3___w", "Step"]),
]


@pytest.mark.parametrize(("kind", "numbers", "names"), KEPT)
def test_what_is_kept(kind: Callable[..., Optimizer], numbers: dict[str, Any], names: list[str]) -> None:
    w = torch.nn.Parameter(torch.ones(2, 3))
    update = Update(kind([w], **numbers), {"w": w})
    assert sorted(kept.name for kept in update.state) == names
    assert all((kept.value.shape, kept.parameter) == (((), None) if kept.name == "Step" else ((2, 3), "w")) for kept in
               update.state)  # fmt: skip


def test_momentum_of_one_group_only() -> None:
    named = parameters()
    groups = [{"params": [named["a"]], "momentum": 0.9}, {"params": [named["b"]]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    update = Update(optimizer, named)
    assert [kept.name for kept in update.state] == ["Accl1___a"]
    np.testing.assert_allclose(update.hyperparameters.values(optimizer), [0.1, 0.9, 0.1], rtol=1e-6)


def test_the_mean_square_of_tensorflow_starts_at_one() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    kept, step = Update(optim.RMSprop([w], use_tf_variant=True), {"w": w}).state
    assert (kept.name, kept.value.tolist(), step.name) == ("Accl1___w", [1, 1], "Step")


def test_types() -> None:
    half = {"accum_type": torch.float16, "first_order_momentum_accum_type": torch.float16}
    named = parameters(torch.float16)
    update = Update(optim.Adam(named.values(), **half), named)
    assert update.accumulation_dtype == popxl.float16
    dtypes = {kept.name: kept.value.dtype for kept in update.state}
    assert (dtypes["Accl1___a"], dtypes["Accl2___a"], dtypes["Step"]) == ("float16", "float32", "float32")

    combined = optim.SGD(named.values(), lr=0.1, momentum=0.9, use_combined_accum=True, accum_type=torch.float16)
    update = Update(combined, named)
    assert update.accumulation_dtype == popxl.float32
    assert {kept.value.dtype for kept in update.state} == {np.dtype("float16")}
    assert Update(torch.optim.SGD(named.values(), lr=0.1), named).accumulation_dtype == popxl.float32


def test_half_parameters_are_rounded_once() -> None:
    """State in float32, the step in float32: each weight is what the exact step gives, rounded."""
    named = parameters(torch.float16)
    program = Program(optim.Adam(named.values(), lr=0.01, loss_scaling=128.0), named)
    theirs = {n: torch.nn.Parameter(p.detach().float()) for n, p in named.items()}
    (ours,), expected = program.run(gradients(1)), by_torch(torch.optim.Adam(theirs.values(), lr=0.01), theirs)[0]
    for name in SHAPES:
        assert ours[name].dtype == np.float16
        np.testing.assert_array_equal(ours[name], expected[name].astype(np.float16))


# Loss scaling -------------------------------------------------------------------------------------------------------


def test_automatic_loss_scaling() -> None:
    """It doubles up to where gradients of half parameters, times the scale, would be too large."""
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    optimizer = optim.SGD([w], lr=0.125, loss_scaling=1024.0)
    program = Program(optimizer, {"w": w}, half=True, automatic_loss_scaling=True)
    scales, weights = [], []
    gradient = {"w": np.array([1.0, -2.0], np.float16)}
    with popxl.Session(program.ir, "ipu_model") as session:
        for given in (gradient, gradient, gradient, gradient, {"w": gradient["w"] * np.inf}, gradient):
            scales.append(float(session.run({program.streams["w"]: given["w"]})[program.scale]))
            weights.append(np.array(session.get_tensor_data(program.weights["w"])).tolist())
            factor = float(session.get_tensor_data(program.state["lossScaleUpdateFactor"]))
    assert scales == [1024, 2048, 4096, 2048, 4096, 2048]
    assert weights[:4] == [[1 - 0.125 * i, 1 + 0.25 * i] for i in (1, 2, 3, 4)]
    assert factor == 4
    assert program.update.named_values(program.numbers)["lossScaling_FLOAT"] == 1024


def test_automatic_loss_scaling_has_a_limit_and_looks_at_half_parameters_only() -> None:
    for dtype, scales in ((torch.float16, [16384, 32768, 32768]), (torch.float32, [16384] * 3)):
        w = torch.nn.Parameter(torch.ones(2, dtype=dtype))
        optimizer = torch.optim.SGD([w], lr=0.5)
        optimizer.loss_scaling = 16384.0
        program = Program(optimizer, {"w": w}, loop=3, automatic_loss_scaling=True)
        program.run([{"w": np.zeros(2, np.float32)}] * 3)
        assert np.asarray(program.scales).tolist() == scales


# Replicas -----------------------------------------------------------------------------------------------------------


def test_the_norm_of_parameters_that_differ_between_replica_groups() -> None:
    """Four replicas, `b` in two groups: all of `b`, each row once, counts in the norm of every replica."""
    ir = popxl.Ir(replication=4)
    grouping = ir.replica_grouping(stride=2, group_size=2)  # replicas 0 and 2, 1 and 3
    named = {"a": torch.nn.Parameter(torch.ones(3)), "b": torch.nn.Parameter(torch.ones(2, 3))}
    optimizer = optim.SGD(named.values(), lr=1.0, momentum=0.5, max_grad_norm=1.0)
    update = Update(optimizer, named, replica_groupings={"b": grouping})
    assert {kept.name: kept.value.shape for kept in update.state} == {"Accl1___a": (3,), "Accl1___b": (2, 3)}
    rows = np.array([[1.0, 2, 3], [4, 5, 6]], np.float32)
    with ir.main_graph, popxl.in_sequence():
        weights = {n: popxl.variable(p.detach(), name=n, replica_grouping=grouping if n == "b" else None) for n, p in
                   named.items()}  # fmt: skip
        gradient = popxl.variable(rows, name="gradient", replica_grouping=grouping)
        state = update.create_state()
        values = popxl.variable(update.hyperparameters.values(optimizer))
        update(weights, {"a": popxl.constant([7.0, 8.0, 9.0]), "b": gradient}, values, state)
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
        found = {n: np.array(session.get_tensor_data(w)) for n, w in weights.items()}
        velocity = np.array(session.get_tensor_data(state["Accl1___b"]))
    norm = np.sqrt(sum(i * i for i in range(1, 10)))
    np.testing.assert_allclose(found["a"], 1 - np.array([7, 8, 9]) / norm, rtol=1e-5)
    np.testing.assert_allclose(found["b"], 1 - rows / norm, rtol=1e-5)
    np.testing.assert_allclose(velocity, rows / norm, rtol=1e-5)


def test_a_parameter_is_updated_where_it_is() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer, ir = optim.SGD([w], lr=0.5, max_grad_norm=10.0), popxl.Ir()
    update = Update(optimizer, {"w": w})
    with ir.main_graph, popxl.in_sequence():
        variable = popxl.variable(w.detach(), name="w")
        with popxl.ipu(1):
            gradient = variable + 1
        update(
            {"w": variable},
            {"w": gradient},
            popxl.variable(update.hyperparameters.values(optimizer)),
            update.create_state(),
        )
    assert [op.ipu for op in ir.main_graph.ops if op.op_type == "SGD"] == [1]
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
    assert variable.data.tolist() == [0, 0]


# Numbers that change ------------------------------------------------------------------------------------------------


def test_values_follow_the_optimiser() -> None:
    named = parameters()
    optimizer = optim.SGD([{"params": [named["a"]]}, {"params": [named["b"]], "lr": 0.2}], lr=0.1, loss_scaling=4.0)
    update = Update(optimizer, named)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert update.hyperparameters.values(optimizer).dtype == np.float32
    np.testing.assert_allclose(update.hyperparameters.values(optimizer), [4, 0.1, 0.2], rtol=1e-6)
    optimizer.step()
    scheduler.step()
    optimizer.loss_scaling = 8.0
    np.testing.assert_allclose(update.hyperparameters.values(optimizer), [8, 0.05, 0.1], rtol=1e-6)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        np.testing.assert_allclose(update.hyperparameters.values(copied), [8, 0.05, 0.1], rtol=1e-6)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.25)
    np.testing.assert_allclose(update.hyperparameters.values(optimizer), [8, 0.25, 0.1], rtol=1e-6)


VARIABLE: list[tuple[Callable[..., Optimizer], dict[str, Any], list[float]]] = [
    (optim.SGD, dict(lr=0.5, momentum=0.25), [0.5, 0.25]),
    (optim.SGD, dict(lr=0.5, velocity_scaling=2.0, use_combined_accum=True), [0.5, 2]),
    (optim.SGD, dict(lr=0.5, momentum=0.25, nesterov=True), [0.5, 0.25, 1]),
    (optim.Adam, dict(), []),
    (optim.Adam, dict(betas=(0.5, 0.25)), [0.5, 0.25]),
    (optim.Adam, dict(lr=0.5, max_grad_norm=4.0, accum_type=torch.float16), [4, 0.5]),
    (optim.LAMB, dict(bias_correction=False, max_weight_norm=8.0), [8]),
    (optim.RMSprop, dict(alpha=0.5, centered=True, use_tf_variant=True), [0.5]),
    (torch.optim.SGD, dict(lr=1e-3, momentum=0.0), [1e-3]),
    (torch.optim.SGD, dict(lr=0.5, momentum=0.25, nesterov=True), [0.5, 0.25]),
    (torch.optim.Adam, dict(betas=(0.5, 0.25), eps=0.125), [1e-3, 0.125]),
    (torch.optim.AdamW, dict(weight_decay=0.01), [1e-3]),
    (torch.optim.RMSprop, dict(alpha=0.5, momentum=0.25), [0.01, 0.25]),
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("kind", "numbers", "values"), VARIABLE)
def test_which_numbers_are_variable(
    kind: Callable[..., Optimizer], numbers: dict[str, Any], values: list[float]
) -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([w], **numbers)
    np.testing.assert_allclose(Update(optimizer, {"w": w}).hyperparameters.values(optimizer), values, rtol=1e-6)


def test_marked_by_hand() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([w], lr=0.5, momentum=0.25)
    optimizer.variable_attrs.markAsConstant("momentum")
    optimizer.variable_attrs.markAsVariable("weight_decay")
    np.testing.assert_allclose(Update(optimizer, {"w": w}).hyperparameters.values(optimizer), [0.5, 0])


def test_names_of_the_numbers() -> None:
    named = parameters()
    groups = [{"params": [named["a"]]}, {"params": [named["b"]], "lr": 0.5}]
    optimizer = optim.SGD(groups, lr=0.25, momentum=0.5, dampening=0.5, weight_decay=0.125, loss_scaling=4.0)
    update = Update(optimizer, named)
    found = update.named_values(update.hyperparameters.values(optimizer))
    assert found["lossScaling_FLOAT"] == 4
    assert [found[f"{name}___specific___a"] for name in ("learningRate", "momentum", "weightDecay")] == [
        0.25,
        0.5,
        0.125,
    ]
    assert found["scaledLearningRate0___specific___b"] == 0.5 * 0.5 / 4
    assert found["weightDecayScaleFactor0___specific___b"] == 1 - 0.5 * 0.5 * 0.125
    adam = optim.Adam(named.values(), betas=(0.5, 0.75))
    found = (update := Update(adam, named)).named_values(update.hyperparameters.values(adam))
    assert (found["beta1___specific___a"], found["beta2___specific___b"]) == (0.5, 0.75)
    assert all(type(value) is float for value in found.values())


def changed(optimizer: Optimizer, name: str, value: Any) -> Optimizer:
    if name in optimizer.param_groups[0]:
        optimizer.param_groups[0][name] = value
    else:
        setattr(optimizer, name, value)
    return optimizer


CONSTANT: list[tuple[Callable[..., Optimizer], str, Any, str]] = [
    (optim.SGD, "momentum", 0.5, "'momentum' of group 0 is 0.5, and the model was compiled with 0.0"),
    (optim.SGD, "loss_scaling", 2.0, "'loss_scaling' is 2.0.*markAsVariable\\('loss_scaling'\\)"),
    (optim.SGD, "use_combined_accum", True, "'use_combined_accum' is True.*as a constant. To compile"),
    (optim.Adam, "betas", (0.5, 0.999), "'betas' of group 0 is 0.5, .* 0.9 .*markAsVariable\\('betas'\\)"),
    (optim.Adam, "accum_type", torch.float16, "'accum_type' is torch.float16.*as a constant. To compile"),
    (torch.optim.SGD, "weight_decay", 0.5, "'weight_decay' of group 0 is 0.5.*is made with `weight_decay=...`"),
    (optim.RMSprop, "centered", True, "'centered' of group 0 is True"),
    (optim.RMSprop, "use_tf_variant", True, "'use_tf_variant' is True"),
    (torch.optim.SGD, "maximize", True, "'maximize' of group 0 is True, and the model was compiled with False"),
    (optim.Adam, "amsgrad", True, "'amsgrad' of group 0 is True"),
]


@pytest.mark.parametrize(("kind", "name", "value", "message"), CONSTANT)
def test_constants_do_not_change(kind: Callable[..., Optimizer], name: str, value: Any, message: str) -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = kind([w], lr=0.1)
    update = Update(optimizer, {"w": w})
    with pytest.raises(Error, match=message):
        update.hyperparameters.values(changed(optimizer, name, value))


def test_another_optimiser() -> None:
    named = parameters()
    update = Update(torch.optim.SGD(named.values(), lr=0.1), named)
    np.testing.assert_allclose(update.hyperparameters.values(optim.SGD(named.values(), lr=0.2)), [0.2], rtol=1e-6)
    with pytest.raises(Error, match="compiled with SGD, and this optimizer is Adam.*destroy"):
        update.hyperparameters.values(optim.Adam(named.values(), lr=0.2))
    with pytest.raises(Error, match="optimizer of 1 parameter groups, and this one has 2"):
        update.hyperparameters.values(torch.optim.SGD([{"params": [p]} for p in named.values()], lr=0.1))


# What is told, and what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("relaxed", [False, True])
def test_unknown_attributes(caplog: pytest.LogCaptureFixture, relaxed: bool) -> None:
    caplog.set_level(logging.DEBUG, "poptorch::python")
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.1)
    optimizer.early = optimizer.param_groups[0]["early"] = optimizer.defaults["early"] = 1
    update = Update(optimizer, {"w": w}, relaxed_checks=relaxed)
    update.hyperparameters.values(optimizer)
    assert not caplog.records
    optimizer.late = optimizer.param_groups[0]["loss_scaling"] = optimizer.defaults["other"] = 1
    update.hyperparameters.values(optimizer)
    update.hyperparameters.values(optimizer)
    assert [r.getMessage() for r in caplog.records] == [
        "Ignoring unexpected optimizer attribute in SGD optimizer: ['late']",
        "Ignoring unexpected default group variable in SGD optimizer: ['other']",
        "Ignoring unexpected group 0 attribute in SGD optimizer: ['loss_scaling']",
    ]
    assert {r.levelname for r in caplog.records} == {"DEBUG" if relaxed else "WARNING"}
    caplog.clear()
    update.hyperparameters.values(optim.SGD([w], lr=0.1))  # what other optimisers of this name have is known
    assert not caplog.records


def test_attributes_of_a_scheduler_that_was_there_at_first(caplog: pytest.LogCaptureFixture) -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([w], lr=0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4, cycle_momentum=False)
    update = Update(optimizer, {"w": w})
    update.hyperparameters.values(optimizer)
    assert not caplog.records


def test_subclasses_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            raise AssertionError("this is never called")

    w = torch.nn.Parameter(torch.ones(2))
    program = Program(Mine([w], lr=0.1), {"w": w})
    assert "Mine is a subclass of an optimiser" in caplog.text and "AdamW" in caplog.text
    (after,) = program.run([{"w": np.ones(2, np.float32)}])
    np.testing.assert_allclose(after["w"], 0.899, rtol=1e-5)


def test_what_is_refused() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(AssertionError, match="type Rprop. Expected one of `poptorch.optim` .*, NAdam"):
        Update(torch.optim.Rprop([w]), {"w": w})
    with pytest.raises(ValueError, match="SGD: there is no `use_tf_variant` of it"):
        Update(changed(optim.SGD([w], lr=0.1), "use_tf_variant", True), {"w": w})
    named = parameters()
    groups = [{"params": [named["a"]], "centered": True}, {"params": [named["b"]]}]
    with pytest.raises(AssertionError, match="must have the same `centered`"):
        Update(optim.RMSprop(groups), named)


def test_a_gradient_of_another_shape() -> None:
    w = torch.nn.Parameter(torch.ones(2))
    optimizer = optim.Adam([w])
    update, ir = Update(optimizer, {"w": w}), popxl.Ir()
    with ir.main_graph:
        state, w, values = update.create_state(), popxl.variable([1.0, 2.0]), popxl.variable(1.0)
        for gradient in ([1.0] * 3, 1.0):
            with pytest.raises(popxl.errors.PopxlError, match="shape of the parameter, \\(2,\\)"):
                update({"w": w}, {"w": popxl.constant(gradient)}, values, state)
