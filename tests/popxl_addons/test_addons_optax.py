"""`from_optax` of all that Optax has: each transformation makes the steps that it makes there, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons import optimizers

optax = pytest.importorskip("optax")
contrib = optax.contrib
KEY = jax.random.key(3)
STEPS = 4

RANDOM = np.random.default_rng(0)
STARTS = {name: RANDOM.normal(size=shape).astype(np.float32) for name, shape in {"w": (3, 4), "b": (4,)}.items()}
GRADIENTS = [
    {name: RANDOM.normal(size=start.shape).astype(np.float32) for name, start in STARTS.items()} for _ in range(STEPS)
]
LOSSES = np.float32([2.0, 1.5, 1.6, 1.2])

WITH_A_RATE = """
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw
    noisy_sgd novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi
""".split()
WITHOUT = """
    centralize identity normalize_by_update_norm scale_by_adadelta scale_by_adam scale_by_adamax scale_by_adan
    scale_by_amsgrad scale_by_belief scale_by_distance_over_gradients scale_by_factored_rms scale_by_lbfgs scale_by_lion
    scale_by_novograd scale_by_optimistic_gradient scale_by_param_block_norm scale_by_param_block_rms scale_by_radam
    scale_by_rms scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio scale_by_yogi set_to_zero
    zero_nans
""".split()
OF_CONTRIB = """
    acprop ademamix adopt dadapt_adamw dog dowg madgrad muon prodigy schedule_free_adamw schedule_free_sgd
    simplified_ademamix
""".split()
ONE = {"w": True, "b": False}


def only_b(params: Mapping[str, Any]) -> dict[str, str]:
    return {name: "trained" if name == "b" else "kept" for name in params}


MADE: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: getattr(optax, name)(0.1) for name in WITH_A_RATE},
    **{name: lambda name=name: getattr(optax, name)() for name in WITHOUT},
    **{name: lambda name=name: getattr(contrib, name)(0.1) for name in OF_CONTRIB},
    "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
    "add_decayed_weights": lambda: optax.add_decayed_weights(0.1),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, KEY), optax.sgd(0.1)),
    "apply_every": lambda: optax.apply_every(2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 2),
    "clip": lambda: optax.clip(0.3),
    "clip_by_block_rms": lambda: optax.clip_by_block_rms(0.3),
    "clip_by_global_norm": lambda: optax.clip_by_global_norm(0.3),
    "cocob": contrib.cocob,
    "conditionally_mask": lambda: optax.conditionally_mask(optax.sgd(0.1), lambda step: step % 2 == 0),
    "conditionally_transform": lambda: optax.conditionally_transform(optax.sgd(0.1), lambda step: step % 2 == 0),
    "ema": lambda: optax.ema(0.5),
    "flatten": lambda: optax.flatten(optax.adam(0.1)),
    "freeze": lambda: optax.freeze(ONE),
    "galore": lambda: contrib.galore(0.1, rank=2),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 5)),
    "keep_params_nonnegative": lambda: optax.chain(optax.sgd(0.3), optax.keep_params_nonnegative()),
    "masked": lambda: optax.masked(optax.adam(0.1), ONE),
    "mechanize": lambda: contrib.mechanize(optax.adam(0.1)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
    "named_chain": lambda: optax.named_chain(("w", optax.trace(0.9)), ("b", optax.scale(-0.1))),
    "normalize": contrib.normalize,
    "partition": lambda: optax.partition({"trained": optax.adam(0.1), "kept": optax.set_to_zero()}, only_b),
    "sam": lambda: contrib.sam(optax.sgd(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05))),
    "scale_by_rprop": lambda: optax.scale_by_rprop(0.1),
    "scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, 4)),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(0.1), 0.1),
    "selective_transform": lambda: optax.selective_transform(optax.sgd(0.1), freeze_mask=ONE),
    "snapshot": lambda: optax.snapshot("norm", lambda updates, **_: optax.tree.norm(updates)),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(optax.adam(0.1)),
    "stateless": lambda: optax.stateless(lambda updates, params: jax.tree.map(jnp.multiply, updates, params)),
    "trace in bfloat16": lambda: optax.trace(0.9, accumulator_dtype=jnp.bfloat16),
}

OF_THE_LOSS: dict[str, Callable[[], Any]] = {
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.sgd(0.1), lambda step, value: value > 1.5, forward_extra_args=True
    ),
    "momo": lambda: contrib.momo(0.1),
    "momo_adam": lambda: contrib.momo_adam(0.1),
    "polyak_sgd": lambda: optax.polyak_sgd(0.1),
    "reduce_on_plateau": lambda: optax.chain(optax.sgd(0.1), contrib.reduce_on_plateau(patience=1)),
    "without": lambda: optax.sgd(0.1),
}

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "hutchinson": (contrib.hutchinson_estimator_diag_hessian, "obj_fn must be provided"),
    "lbfgs": (optax.lbfgs, "missing 3 required .*'value_fn'.* What evaluates the loss again, as a line search"),
    "lookahead": (lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5), "has no attribute 'fast'"),
    "monitor": (
        lambda: optax.monitor({"norm": lambda updates, **_: optax.tree.norm(updates)}),
        "has another form after a step",
    ),
    "per example": (
        lambda: contrib.differentially_private_aggregate(1.0, 0.1, KEY),
        r"batch dimension.*variables \['w', 'b'\]",
    ),
    "polyak_sgd": (optax.polyak_sgd, "argument: 'value'.* If it looks at the loss, give it: `value=loss`"),
    "sophia": (lambda: contrib.sophia(0.1), "obj_fn must be provided"),
}


def by_optax(transformation: Any, of_loss: bool) -> dict[str, np.ndarray]:
    if of_loss:
        transformation = optax.with_extra_args_support(transformation)

    @jax.jit
    def step(gradients, state, params, loss):
        named = {"value": loss} if of_loss else {}
        updates, state = transformation.update(gradients, state, params, **named)
        return optax.apply_updates(params, updates), state

    params, state = STARTS, transformation.init(STARTS)
    for gradients, loss in zip(GRADIENTS, LOSSES, strict=True):
        params, state = step(gradients, state, params, loss)
    return params


def check(transformations: Mapping[str, Callable[[], Any]], of_loss: bool = False) -> None:
    """All in one program."""
    ir, trained = popxl.Ir(), {}
    with ir.main_graph, popxl.in_sequence():
        streams = {name: popxl.h2d_stream(start.shape, popxl.float32, name) for name, start in STARTS.items()}
        gradients = {name: ops.host_load(stream) for name, stream in streams.items()}
        losses = popxl.h2d_stream((), popxl.float32, "loss")
        named = {"value": ops.host_load(losses)} if of_loss else {}
        for each, make in transformations.items():
            trained[each] = {name: popxl.variable(start, name=name) for name, start in STARTS.items()}
            optimizers.from_optax(make())(trained[each], gradients, **named)
    with popxl.Session(ir, "ipu_model") as session:
        for given, loss in zip(GRADIENTS, LOSSES, strict=True):
            fed = {streams[name]: value for name, value in given.items()}
            session.run(fed | ({losses: loss} if of_loss else {}))
    for each, make in transformations.items():
        for name, expected in by_optax(make(), of_loss).items():
            found = session.get_tensor_data(trained[each][name])
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5, err_msg=f"{each}, {name}")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
@pytest.mark.parametrize("part", range(8))
def test_every_transformation_makes_the_steps_of_optax(part) -> None:
    check(dict([*MADE.items()][part::8]))


@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
def test_states_of_all_forms() -> None:
    """Random keys, lists for each variable, one vector for all, labels."""
    check({name: MADE[name] for name in ("add_noise", "sm3", "flatten", "partition")})


def test_transformations_that_look_at_the_loss() -> None:
    check(OF_THE_LOSS, of_loss=True)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_make_a_step_is_refused_where_it_is_built(name) -> None:
    make, message = REFUSED[name]
    with popxl.Ir().main_graph:
        variables = {each: popxl.variable(start, name=each) for each, start in STARTS.items()}
        with pytest.raises(PopxlError, match=f"(?s)from_optax: .*{message}"):
            optimizers.from_optax(make())(variables, variables)


def test_the_loss_is_a_number() -> None:
    with popxl.Ir().main_graph:
        w = popxl.variable(STARTS["w"], name="w")
        for value in (1.0, w):
            with pytest.raises(TypeError, match="`value` must be the loss, a tensor without dimensions; got"):
                optimizers.from_optax(optax.polyak_sgd())([w], [w], value=value)
