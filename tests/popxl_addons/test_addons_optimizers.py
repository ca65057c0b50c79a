"""Optimisers as a whole, against torch's and Optax's; schedules; norms of what is in pieces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import ShardedUpdateWarning
from popxl_addons import optimizers
from popxl_addons.optimizers import schedules
from tests.tolerances import assert_near

Array = np.ndarray
RANDOM = np.random.default_rng(0)
SHAPES = {"layers.0.weight": (3, 4), "layers.0.bias": (5,)}
STARTS = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
GRADIENTS = [{name: RANDOM.normal(size=s).astype(np.float32) for name, s in SHAPES.items()} for _ in range(4)]


def trained(optimizer: Callable[..., Any], dtype: popxl.dtype = popxl.float32, **how: Any) -> dict[str, Array]:
    """The variables after a step for each of the gradients."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        variables = {name: popxl.variable(value, dtype, name) for name, value in STARTS.items()}
        streams = {name: popxl.h2d_stream(shape, popxl.float32, name) for name, shape in SHAPES.items()}
        state = optimizer(variables, {name: ops.host_load(s) for name, s in streams.items()}, **how)
    with popxl.Session(ir, "cpu") as session:
        for gradients in GRADIENTS:
            session.run({streams[name]: g for name, g in gradients.items()})
        assert session.get_tensor_data(state.step) == len(GRADIENTS)
        found = session.get_tensors_data(variables.values())
    return {name: found[v] for name, v in variables.items()}


def by_torch(make: Callable[..., Any], clip: float | None = None, rates: Any = None) -> dict[str, Array]:
    import torch

    parameters = {name: torch.nn.Parameter(torch.tensor(value.astype(np.float64))) for name, value in STARTS.items()}
    optimizer = make(list(parameters.values()))
    for i, gradients in enumerate(GRADIENTS):
        for name, p in parameters.items():
            p.grad = torch.tensor(gradients[name].astype(np.float64))
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip)
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[i]
        optimizer.step()
    return {name: p.detach().numpy() for name, p in parameters.items()}


def assert_close(found: dict[str, Array], expected: dict[str, Array], near: float = 1e-5) -> None:
    for name, array in found.items():
        assert_near(array.astype(np.float64), expected[name], near, name)


def test_adamw_as_torch() -> None:
    torch = pytest.importorskip("torch")
    rates = [0.05, 0.1, 0.1 * (1 + np.cos(np.pi / 4)) / 2, 0.1 * (1 + np.cos(np.pi / 2)) / 2]
    schedule = schedules.cosine(0.1, steps=6, warmup=2)
    expected = by_torch(lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.2), clip=1.5, rates=rates)
    assert_close(trained(optimizers.adamw, lr=schedule, weight_decay=0.2, clip_norm=1.5), expected)
    assert_close(
        trained(optimizers.adamw, popxl.bfloat16, lr=schedule, weight_decay=0.2, clip_norm=1.5), expected, 3e-2
    )


@pytest.mark.parametrize("how", [{}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}])
def test_sgd_as_torch(how: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    expected = by_torch(lambda ps: torch.optim.SGD(ps, lr=0.1, **how))
    assert_close(trained(optimizers.sgd, lr=0.1, **how), expected)


def test_adafactor_as_torch() -> None:
    torch = pytest.importorskip("torch")
    smallest = float(np.finfo(np.float32).eps)
    expected = by_torch(lambda ps: torch.optim.Adafactor(ps, lr=0.3, weight_decay=0.1, eps=(smallest, 1e-3)))
    assert_close(trained(optimizers.adafactor, lr=0.3, weight_decay=0.1), expected)


def test_adafactor_beside_optax() -> None:
    """The same where Optax takes all matrices as such and the rate is below its bound; its defaults by `from_optax`."""
    optax = pytest.importorskip("optax")

    def by_optax(transformation: Any) -> dict[str, Array]:
        params, state = STARTS, transformation.init(STARTS)
        for gradients in GRADIENTS:
            updates, state = transformation.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return {name: np.asarray(value) for name, value in params.items()}

    assert_close(
        trained(optimizers.adafactor, lr=0.3), by_optax(optax.adafactor(learning_rate=0.3, min_dim_size_to_factor=1))
    )
    defaults = optax.adafactor(learning_rate=0.3)
    assert_close(trained(optimizers.from_optax(defaults)), by_optax(defaults))


def test_lion() -> None:
    expected = {name: value.astype(np.float64) for name, value in STARTS.items()}
    momentum = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for gradients in GRADIENTS:
        for name, g in gradients.items():
            decay = 0.1 if name.endswith("weight") else 0
            direction = np.sign(0.9 * momentum[name] + 0.1 * g)
            expected[name] = expected[name] - 0.05 * (direction + decay * expected[name])
            momentum[name] = 0.99 * momentum[name] + 0.01 * g
    decays = lambda name: name.endswith("weight")  # noqa: E731
    assert_close(trained(optimizers.lion, lr=0.05, weight_decay=0.1, decays=decays, loss_scaling=1.0), expected)


def test_transformations_of_optax() -> None:
    """Scaled gradients, clipped here, and state with leaves of all kinds."""
    optax = pytest.importorskip("optax")
    schedule = optax.linear_schedule(0.1, 0.0, 8)
    to_the_start = optax.GradientTransformation(  # whose state begins with the parameters
        lambda params: params,
        lambda updates, start, params: (
            {name: u + 0.1 * (start[name] - params[name]) for name, u in updates.items()},
            start,
        ),
    )
    of_one = optax.masked(optax.trace(0.5), lambda params: {name: name == min(params) for name in params})
    transformation = optax.chain(
        optax.add_decayed_weights(0.1), optax.adam(schedule), of_one, optax.ema(0.5), to_the_start
    )
    found = trained(optimizers.from_optax(transformation), clip_norm=2.0, loss_scaling=0.5)
    params, state = STARTS, transformation.init(STARTS)
    for gradients in GRADIENTS:
        norm = 2 * np.sqrt(sum((g**2).sum() for g in gradients.values()))
        scaled = {name: 2 * g * min(1, 2 / norm) for name, g in gradients.items()}
        updates, state = transformation.update(scaled, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(found, {name: np.asarray(value) for name, value in params.items()})


def test_transformations_of_optax_that_combine_elements() -> None:
    """They see the pieces and parts of a replica, so what they do depends on how many replicas there are."""
    optax = pytest.importorskip("optax")
    plain = [optax.sgd(0.1, momentum=0.9), optax.adamw(optax.cosine_decay_schedule(0.1, 5)), optax.rmsprop(0.1)]
    plain += [optax.lion(0.1), optax.adagrad(0.1), optax.MultiSteps(optax.adam(0.1), 2), optax.clip(0.1)]
    combining = [optax.clip_by_global_norm(1.0), optax.lamb(0.1), optax.adafactor(0.1, 1), optax.centralize()]
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        v, piece = popxl.replica_sharded_variable(np.ones((4, 3), np.float32), name="cut")
        whole = popxl.variable(np.ones((4, 3), np.float32), name="whole")
        own = popxl.variable(np.ones((2, 3), np.float32), name="own", replica_grouping=ir.replica_grouping(1, 1))
        for transformation in plain:
            optimizers.from_optax(transformation)([v, own], [piece * 1.0, own * 1.0])
        for transformation in combining:
            with pytest.warns(ShardedUpdateWarning, match="has a part of `cut` only.*To clip by the norm use `clip_n"):
                optimizers.from_optax(transformation)([v], [piece * 1.0])
            optimizers.from_optax(transformation)([whole], [whole * 1.0])
        with pytest.warns(ShardedUpdateWarning, match=r"\(.*reduce_sum.*\), and each replica has a part of `own` only"):
            optimizers.from_optax(combining[0])([own, whole], [own * 1.0, whole * 1.0])


def test_schedules() -> None:
    made = [
        (schedules.cosine(2.0, 10, end=1.0), lambda t: 1 + (1 + np.cos(np.pi * min(t / 10, 1))) / 2),
        (schedules.linear(2.0, 10, warmup=4, end=0.5), lambda t: t / 2 if t < 4 else 2 - 1.5 * min((t - 4) / 6, 1)),
        (schedules.inverse_square_root(2.0, 4), lambda t: t / 2 if t < 4 else 2 * np.sqrt(4 / t)),
    ]
    steps = np.arange(1, 14, dtype=np.float32)
    ir = popxl.Ir()
    with ir.main_graph:
        outs = [popxl.d2h_stream((13,), popxl.float32) for _ in made]
        for out, (schedule, _) in zip(outs, made, strict=True):
            ops.host_store(out, schedule(popxl.constant(steps)))
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    for out, (_, meaning) in zip(outs, made, strict=True):
        np.testing.assert_allclose(found[out], [meaning(t) for t in steps], rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="cosine: `warmup` is 5, of 5 steps"):
        schedules.cosine(1.0, 5, warmup=5)


def test_norms_and_state_of_what_is_in_pieces() -> None:
    """One variable in pieces, one with a value for each of two groups, one that all share: each number counts once."""
    ir = popxl.Ir(replication=4)
    pairs = ir.replica_grouping(group_size=2)
    values = {"cut": RANDOM.normal(size=(2, 3)), "paired": RANDOM.normal(size=(2, 5)), "shared": RANDOM.normal(size=3)}
    values = {name: value.astype(np.float32) for name, value in values.items()}
    with ir.main_graph, popxl.in_sequence():
        cut, piece = popxl.replica_sharded_variable(values["cut"], name="cut")
        paired = popxl.variable(values["paired"], name="paired", replica_grouping=pairs)
        shared = popxl.variable(values["shared"], name="shared")
        gradients = {"cut": piece * 1.0, "paired": paired * 1.0, "shared": shared * 1.0}
        out = popxl.d2h_stream((), popxl.float32)
        variables = {"cut": cut, "paired": paired, "shared": shared}
        ops.host_store(out, optimizers.global_norm(variables, gradients))
        state = optimizers.sgd(variables, gradients, lr=1.0, momentum=0.5, clip_norm=1.0)
    norm = np.sqrt(sum((value.astype(np.float64) ** 2).sum() for value in values.values()))
    with popxl.Session(ir, "ipu_hw") as session:
        np.testing.assert_allclose(session.run()[out], [norm] * 4, rtol=1e-5)
        found = session.get_tensors_data([*variables.values(), *state.tensors])
    assert state.cut.velocity.piece is not None and state.paired.velocity.replica_grouping == pairs
    for name, v in variables.items():
        np.testing.assert_allclose(found[v], values[name] * (1 - 1 / norm), rtol=1e-4)
        np.testing.assert_allclose(found[state[name].velocity], values[name] / norm, rtol=1e-4)


@pytest.mark.thorough
def test_adafactor_over_pieces() -> None:
    """Pieces that begin within a row, hold parts of two matrices, have padding, or are held twice: as if whole."""
    shapes = {"matrix": (5, 3), "two": (2, 3, 2), "vector": (6,), "twice": (4, 3)}
    values = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    gradients = [{name: RANDOM.normal(size=s).astype(np.float32) for name, s in shapes.items()} for _ in range(2)]

    def updated(replicas: int) -> dict[str, Array]:
        ir = popxl.Ir(replication=replicas)
        variables, streams, given = {}, {}, {}
        with ir.main_graph, popxl.in_sequence():
            for name, shape in shapes.items():
                streams[name] = popxl.h2d_stream(shape, popxl.float32, name)
                given[name] = ops.host_load(streams[name])
                if replicas == 1:
                    variables[name] = popxl.variable(values[name], name=name)
                    continue
                over = 2 if name == "twice" else replicas
                variables[name], _ = popxl.replica_sharded_variable(values[name], name=name, shard_over=over)
                holders = ir.replica_grouping(group_size=over)
                given[name] = ops.collectives.replica_sharded_slice(given[name], holders)
            state = optimizers.adafactor(variables, given, lr=0.3, weight_decay=0.1, clip_norm=1.5)
        assert state.matrix.row_variance.shape == (5, 1) and state.two.column_variance.shape == (2, 1, 2)
        with popxl.Session(ir, "ipu_hw") as session:
            for each in gradients:
                session.run({s: np.broadcast_to(each[n], session.host_shape(s.shape)) for n, s in streams.items()})
            found = session.get_tensors_data([*variables.values(), state.two.column_variance])
        return {name: found[v] for name, v in variables.items()} | {"state": found[state.two.column_variance]}

    assert_close(updated(4), updated(1))


@pytest.mark.parametrize("in_pieces", [False, True])
def test_adafactor_of_what_groups_divide(in_pieces: bool) -> None:
    """Groups of replicas have parts of one value, as with tensor parallelism: the numbers are those of the whole."""
    torch = pytest.importorskip("torch")
    axes = {"rows": 0, "columns": 1, "batches": 0, "vector": 0, "everyone": None}
    shapes = {"rows": (4, 3), "columns": (3, 4), "batches": (2, 3, 5), "vector": (6,), "everyone": (3, 2)}
    starts = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    # One half has far larger gradients, so that means over a part are other ones.
    steps = [
        {name: (RANDOM.normal(size=s) * np.linspace(0.1, 3, np.prod(s)).reshape(s)) for name, s in shapes.items()}
        for _ in range(2)
    ]
    ir = popxl.Ir(axes={"data": 2, "tensor": 2})
    variables, given, streams = {}, {}, {}
    with ir.main_graph, popxl.in_sequence():
        for name, axis in axes.items():
            parts = [starts[name]] if axis is None else np.split(starts[name], 2, axis)
            factory = addons.VariableFactory(
                iter(parts), popxl.float32, name, replica_grouping=None if axis is None else "data", group_axis=axis
            )
            v = variables[name] = factory.create_tensor(sharded=in_pieces)
            streams[name] = popxl.h2d_stream(v.shape, popxl.float32, name)
            given[name] = ops.host_load(streams[name])
            if v.piece is not None:
                given[name] = ops.collectives.replica_sharded_slice(given[name], v.replica_grouping.const_rg)
        state = optimizers.adafactor(variables, given, lr=0.3, weight_decay=0.1)
    assert (state.rows.column_variance.replica_grouping.num_groups, state.rows.row_variance.group_axis) == (1, 0)
    with popxl.Session(ir, "ipu_hw") as session:
        for gradients in steps:
            fed = {}
            for name, axis in axes.items():
                halves = [gradients[name]] * 2 if axis is None else np.split(gradients[name], 2, axis)
                fed[streams[name]] = np.stack(halves * 2).astype(np.float32)
            session.run(fed)
        found = {name: np.array(session.get_tensor_data(v)) for name, v in variables.items()}
    parameters = {name: torch.nn.Parameter(torch.tensor(value.astype(np.float64))) for name, value in starts.items()}
    smallest = float(np.finfo(np.float32).eps)
    adafactor = torch.optim.Adafactor(parameters.values(), lr=0.3, weight_decay=0.1, eps=(smallest, 1e-3))
    for gradients in steps:
        for name, p in parameters.items():
            p.grad = torch.tensor(gradients[name])
        adafactor.step()
    for name, axis in axes.items():
        whole = found[name] if axis is None else np.concatenate([*found[name]], axis)
        np.testing.assert_allclose(whole, parameters[name].detach(), rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_is_refused() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        w, b = popxl.variable(np.ones((2, 3)), popxl.float32, "w"), popxl.variable([1.0], name="b")
        for gradients, message in [
            ({"w": w}, "`b` has no gradient"),
            ({"w": w, "b": b, "c": b}, "there is a gradient of `c`, and no such variable"),
            ({"w": b, "b": b}, r"`w` has the shape \(2, 3\), and its gradient \(1,\)"),
            ([w], "there are 2 `variables` and 1 `gradients`"),
        ]:
            with pytest.raises(ValueError, match=message):
                optimizers.adamw({"w": w, "b": b}, gradients, lr=0.1)
        with pytest.raises(ValueError, match="`clip_norm` is 0"):
            optimizers.adamw([w], [w], lr=0.1, clip_norm=0)
        with pytest.raises(TypeError, match="`lr` must be a number"):
            optimizers.sgd([w], [w], lr="0.1")
        with pytest.raises(TypeError, match="expected a GradientTransformation"):
            optimizers.from_optax(0.1)
        assert len(main.variables) == 2 and main.ops == []
    with ir.create_empty_graph("inner"), pytest.raises(ValueError, match="Call the optimiser in the main graph"):
        optimizers.adamw([], [], lr=0.1)


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a tensor": (lambda w: optimizers.adamw(w, [w], 0.1), "adamw: `variables` must be tensors by name, or a sequence"),
    "none": (lambda w: optimizers.sgd([w], None, 0.1), "sgd: `gradients` must be tensors by name, or a .* got None"),
    "beta": (lambda w: optimizers.adamw([w], [w], 0.1, beta1="0.9"), "adamw: `beta1` must be a number; got '0.9'"),
    "eps": (lambda w: optimizers.adamw([w], [w], 0.1, eps=None), "adamw: `eps` must be a number; got None"),
    "clip": (lambda w: optimizers.lion([w], [w], 0.1, clip_norm="1"), "lion: `clip_norm` must be a number; got '1'"),
    "decay": (lambda w: optimizers.lion([w], [w], 0.1, weight_decay="1"), "lion: `weight_decay` must be a number"),
    "decays": (lambda w: optimizers.sgd([w], [w], 0.1, decays=["w"]), "sgd: `decays` must be a function of a variable"),
    "nesterov": (lambda w: optimizers.sgd([w], [w], 0.1, nesterov="no"), "sgd: `nesterov` must be True or False"),
    "pair": (lambda w: optimizers.adafactor([w], [w], eps=1e-3), "adafactor: `eps` must be a pair of numbers; got 0.0"),
    "of a pair": (lambda w: optimizers.adafactor([w], [w], eps=(1, "2")), r"adafactor: `eps\[1\]` must be a number"),
    "clipping": (
        lambda w: optimizers.adafactor([w], [w], update_clip=[1]),
        "adafactor: `update_clip` must be a number",
    ),
    "dtype": (lambda w: optimizers.adamw([w], [w], 0.1, moment_dtype="f32"), "adamw: `moment_dtype` must be a popxl"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_the_wrong_kind(name: str) -> None:
    call, message = WRONG[name]
    with popxl.Ir().main_graph as main:
        w = popxl.variable([1.0], name="w")
        with pytest.raises(TypeError, match=message):
            call(w)
        assert main.variables == (w,) and main.ops == []


def test_steps_are_parts_of_numbers() -> None:
    """Integers would lose them: weights and moments of zeros, and no word of it."""
    with popxl.Ir().main_graph as main:
        w, whole = popxl.variable([1.0, 2.0], name="w"), popxl.variable([1, 2], popxl.int32, "whole")
        for optimizer in (optimizers.adamw, optimizers.sgd, optimizers.lion, optimizers.adafactor):
            with pytest.raises(ValueError, match="the dtype of the variable `whole` is int32; expected a floating"):
                optimizer([w, whole], [w, w], 0.1)
        for optimizer, name in [
            (optimizers.adamw, "moment_dtype"),
            (optimizers.lion, "moment_dtype"),
            (optimizers.sgd, "velocity_dtype"),
        ]:
            with pytest.raises(ValueError, match=f"`{name}` is int32; expected a floating point type"):
                optimizer([w], [w], 0.1, **{name: popxl.int32})
        assert len(main.variables) == 2 and main.ops == []
        for given, dtype in ((whole, popxl.float16), (w, popxl.int32)):
            with pytest.raises(ValueError, match="is int32; expected a floating point type"):
                optimizers.AdamOptimizerStep().create_graph(given, w, lr=0.1, first_order_dtype=dtype)


@pytest.mark.parametrize("optimizer", [optimizers.adamw, optimizers.lion, optimizers.sgd, optimizers.adafactor])
def test_state_is_described(optimizer: Callable[..., Any]) -> None:
    """A model may be larger than the machine that builds it, and so may be its state."""
    with popxl.Ir(replication=2).main_graph:
        table = popxl.variable(popxl.initial.zeros((1 << 17, 1 << 17)), popxl.bfloat16, "table")
        momentum = {"momentum": 0.9} if optimizer is optimizers.sgd else {}
        state = optimizer([table], [table], lr=0.1, **momentum)
    assert all(v.initial is not None or v.nelms < 1 << 20 for v in state.to_dict().values())


@pytest.mark.parametrize("in_a_graph", [False, True], ids=["loaded", "loaded by a graph"])
def test_shards_that_are_loaded_from_a_remote_buffer(in_a_graph: bool) -> None:
    """They count like the variable in their slot: in the norm, and in the state on the host."""
    ir = popxl.Ir(axes={"tensor": 2})
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    with ir.main_graph, popxl.in_sequence():
        own = ir.replica_grouping(group_size=1)
        g = popxl.variable(values + 1, popxl.float32, "g", replica_grouping=own)
        buffer = popxl.remote_buffer((3,), popxl.float32, 2)
        popxl.remote_variable(np.zeros((2, 3)), buffer, 0, popxl.float32, "other", replica_grouping=own)
        w = popxl.remote_variable(values, buffer, 1, popxl.float32, "w", replica_grouping=own)
        w.group_axis = 0
        loaded = ops.remote_load(buffer, 1)
        if in_a_graph:
            (loaded,) = ops.call(ir.create_graph(lambda: ops.remote_load(buffer, 1)))
        state = optimizers.sgd(addons.NamedTensors(w=loaded), {"w": g}, lr=0.5, momentum=0.9, clip_norm=1.0)
        ops.remote_store(buffer, 1, loaded)
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
        gradient = (values + 1) / np.linalg.norm(values + 1)
        np.testing.assert_allclose(session.get_tensor_data(w), values - 0.5 * gradient, rtol=1e-5)
        np.testing.assert_allclose(session.get_tensor_data(state.w.velocity), gradient, rtol=1e-5)
