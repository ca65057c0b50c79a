"""A step of training in one call: forward, backward, accumulation, the mean over replicas, and the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.extend.arguments import integer
from popxl.extend.collectives import shard_count
from popxl.extend.graphs import final_ipu
from popxl.extend.memory import StateLocation, bytes_of, current_request
from popxl.extend.ops import cast_if_needed
from popxl.extend.source import SourceLocation, user_frame, warn_at
from popxl.tensor import Variable
from popxl_addons._micro_batches import MicroBatch, MicroBatches, samples_of
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops import host_store
from popxl_addons.optimizers.loss_scaling import DynamicLossScaling, LossScale
from popxl_addons.optimizers.state_location import check_on_host, state_on
from popxl_addons.optimizers.steps import Placement
from popxl_addons.precision import MixedPrecision
from popxl_addons.rts import gather_replica_sharded_tensor
from popxl_addons.transforms.activations import MemoryPolicy
from popxl_addons.transforms.autodiff import autodiff, autodiff_with_accumulation
from popxl_addons.transforms.gathered_weights import gather_where_read
from popxl_addons.transforms.memory_budget import is_budget, plan_memory
from popxl_addons.transforms.memory_plan import MemoryPlan
from popxl_addons.transforms.planned_gradients import PlannedGradients

__all__ = ["Training", "train_step"]

Scaling = float | popxl.Tensor | DynamicLossScaling | LossScale


@dataclass(frozen=True)
class Training:
    """Tensors of a training step.

    Attributes:
        loss: the mean over the micro-batches and replicas of a step.
        variables: variables of the model, by name.
        state: state of the optimiser, by name.
        memory: treatment of activations (kept, recomputed or offloaded), if the step has a memory plan.
    """

    loss: popxl.Tensor
    variables: NamedTensors
    state: NamedTensors
    memory: MemoryPlan | None = None


def train_step(
    module: Module,
    *inputs: popxl.HostToDeviceStream | popxl.Tensor,
    optimizer: Callable[..., NamedTensors],
    accumulate: int = 1,
    micro_batches: int | Literal["auto"] = 1,
    precision: MixedPrecision | None = None,
    loss_scaling: Scaling | None = None,
    sharded: bool = False,
    variables: NamedTensors | None = None,
    memory: MemoryPlan | MemoryPolicy | str | int | None = None,
    optimizer_state: StateLocation | Literal["auto"] = "device",
    **settings: Any,
) -> Training:
    """Add a step of training to the main graph: run the session once for each step.

    Gradients are the means over micro-batches and, for each variable, over the replicas that share it. The sums are
    made in float32. Variables of integers stay as they are.

    Args:
        module: module whose `build` takes `inputs`, and returns the loss (and possibly more, which is ignored): a
            scalar, the mean over its inputs.
        *inputs: streams, which are loaded `accumulate` times; or tensors, if that is 1.
        optimizer: updates variables by gradients, such as `partial(optimizers.adamw, lr=1e-3, clip_norm=1.0)`. It gets
            `loss_scaling`: a `LossScale`, if that adapts itself.
        accumulate: number of batches of a step. Each is one transfer of a run: if streams among `inputs` have
            fewer, their `num_host_transfers` is set to this. Streams with one transfer per step keep their number.
        micro_batches: number of micro-batches that each batch is divided into, after it was loaded: equal slices of the
            first dimension of the inputs. Scalars are the same for all; of a random seed (uint32, two numbers), each
            has one of its own. With a loss that is a mean over samples, the step trains as without. `"auto"`, together
            with a budget as `memory`: as many as take least time within it; together with a plan: as it states.
        precision: dtype that the model computes in, such as `MixedPrecision(popxl.bfloat16, keep=("norm",))`: variables
            are then float32. By default the model's own dtypes.
        loss_scaling: factor of the loss's gradient: a number, a tensor, or `optimizers.DynamicLossScaling()`, which
            adapts itself. By default the latter for a `precision` of float16, else 1.
        sharded: whether to shard the variables and the optimiser's state over the replicas that share them, as
            `facts.init_sharded()` does. Graphs that the model calls, usually layers, gather their weights whenever they
            run, and reduce-scatter their gradients at once: one layer is whole at a time. So does the model for what it
            reads itself: embeddings before its layers, and the head after them.
        variables: variables of the model, whole or sharded, if they exist; otherwise they are made.
        memory: treatment of the activations of the model's layers: kept for the gradient, recomputed or offloaded to
            host memory: a policy (`"everything"`, `"products"`, `"products_without_batch"`, `"nothing"`) or a
            `MemoryPlan`, such as that of a step that was made with a policy. Or a budget, such as `"14 GB"` or bytes of
            a device: the step is built and compiled separately for the devices of this host, up to four times, for a
            plan within it; see `plan_memory`, which takes other targets, and programs of several steps. By default all
            are kept.
        optimizer_state: where the optimiser's state is between steps: on the `"device"`, or in remote buffers on the
            `"host"`, from where the update of each variable loads what belongs to it, and stores it back. `"auto"`,
            together with a budget: on the host if nothing else is within it; together with a plan: as it states. On
            CPUs, both are the same memory.
        **settings: further arguments of `build`.

    Returns:
        The loss, the variables, the optimiser's state, and the memory plan if `memory` is given.

    Raises:
        TypeError: for an `accumulate` that is not an integer, or an invalid `module`, `precision` or kind of `inputs`.
        ValueError: for an `accumulate` below 1, or above 1 with inputs that are not streams; for `micro_batches` below
            1, or that do not divide the inputs; for `"auto"` without a budget or a plan; for a module with placeholders
            that are shards or that are never read, or whose loss is not a scalar; for `sharded` together with
            `variables`, a budget that is malformed or given with `variables`, and as for the optimiser.
        PopxlError: if no plan within a budget is found.

    Example:
        >>> from functools import partial
        >>> from popxl_addons import optimizers
        >>> class Squares(Module):
        ...     def build(self, x):
        ...         w = self.add_variable_input("w", lambda: np.ones(3), x.dtype)
        ...         return ops.mean((x @ w) * (x @ w))
        >>> with popxl.Ir().main_graph:
        ...     x = popxl.h2d_stream((4, 3), popxl.float32, "x")
        ...     training = train_step(Squares(), x, optimizer=partial(optimizers.sgd, lr=0.1))
        >>> training.variables.keys_flat(), training.loss.shape
        (['w'], ())
    """
    streams = _checked_streams(module, inputs)
    accumulate = integer(accumulate, "train_step: `accumulate`")
    _check_settings(accumulate, len(streams) == len(inputs), optimizer, sharded, variables, precision, loss_scaling)
    specs = [source.spec for source in inputs]
    _check_division(memory, micro_batches, optimizer_state)
    if is_budget(memory) and current_request() is None:
        _check_separable(inputs, variables, loss_scaling)
        division = {"micro_batches": micro_batches, "optimizer_state": optimizer_state}
        options = {"accumulate": accumulate, "precision": precision, "loss_scaling": loss_scaling, "sharded": sharded}
        memory = _plan_in_separate_ir(module, streams, memory, optimizer=optimizer, **division, **options, **settings)
    memory, count, location = _resolved_division(memory, micro_batches, optimizer_state, specs)
    _warn_of_other_division(memory, count, location)
    batch = MicroBatches(specs, count)
    if loss_scaling is None:
        loss_scaling = DynamicLossScaling() if precision and precision.dtype is popxl.float16 else 1.0
    with popxl.in_sequence():
        create_graph = module.create_graph if precision is None else partial(precision.create_graph, module)
        factories, forward = create_graph(*batch.specs, **settings)
        _check_trainable(module, forward, len(specs))
        for stream in streams:
            if stream.num_host_transfers < accumulate:
                stream.num_host_transfers = accumulate
        if variables is None:
            variables = factories.init_sharded() if sharded else factories.init()
        scale = loss_scaling.init() if isinstance(loss_scaling, DynamicLossScaling) else loss_scaling
        loaded = ([_load(source, precision) for source in inputs] for _ in range(accumulate))
        batches = (micro_batch for sources in loaded for micro_batch in batch.slices_of(sources))
        forward = gather_where_read(forward, variables)
        weights = variables if precision is None else precision.cast(variables, forward.args)
        planned = _planned_gradients(forward, memory, count, location)
        bound = _graph_arguments(forward, weights, variables)
        mean, unreduced = _gradients(forward, bound, batches, accumulate * count, scale, planned)
        mean, gradients = _means_over_replicas(mean, unreduced, forward.args, variables)
        trained = NamedTensors.from_dict({name: variables[name] for name in gradients})
        with state_on(location):
            state = optimizer(trained, gradients, loss_scaling=scale)
    if location == "host":
        check_on_host(state)
    return Training(mean, variables, state, None if planned is None or memory is None else planned.plan)


def _checked_streams(module: Any, inputs: Sequence[Any]) -> list[popxl.HostToDeviceStream]:
    """The streams among the inputs. `TypeError` unless a module has streams and tensors for inputs."""
    if not isinstance(module, Module):
        raise TypeError(f"train_step: `module` must be a Module; got {module!r} ({type(module).__name__}).")
    for i, source in enumerate(inputs):
        if not isinstance(source, popxl.HostToDeviceStream | popxl.Tensor):
            raise TypeError(
                f"train_step: `inputs[{i}]` must be a HostToDeviceStream, which `popxl.h2d_stream` makes, or a Tensor; "
                f"got {source!r} ({type(source).__name__})."
            )
    return [source for source in inputs if isinstance(source, popxl.HostToDeviceStream)]


def _check_settings(
    accumulate: int,
    only_streams: bool,
    optimizer: Any,
    sharded: bool,
    variables: Any,
    precision: Any,
    loss_scaling: Any,
) -> None:
    """Raise `ValueError` or `TypeError` for settings that contradict each other, or are of a wrong kind."""
    if accumulate < 1 or (accumulate > 1 and not only_streams):
        raise ValueError(
            f"train_step: `accumulate` is {accumulate}; expected 1 or more, and streams as inputs if it is more: each "
            "micro-batch is another."
        )
    if not callable(optimizer):
        raise TypeError(
            f"train_step: `optimizer` must be a function such as `partial(optimizers.adamw, lr=1e-3)`; got "
            f"{optimizer!r} ({type(optimizer).__name__}). `optimizers.from_optax` makes one from Optax's."
        )
    if sharded and variables is not None:
        raise ValueError("train_step: `sharded` says how variables are made, and there are `variables`. Leave one out.")
    if isinstance(loss_scaling, str):
        raise TypeError(
            f"train_step: `loss_scaling` is {loss_scaling!r}; expected a number, a tensor, or "
            "`optimizers.DynamicLossScaling()`."
        )
    if not isinstance(precision, MixedPrecision | None):
        raise TypeError(f"train_step: `precision` is {precision!r}; expected `MixedPrecision(...)`, or None.")


def _check_division(memory: Any, micro_batches: Any, optimizer_state: Any) -> None:
    """Check `micro_batches` and `optimizer_state`, which `memory` chooses if they are "auto"."""
    if micro_batches != "auto" and integer(micro_batches, "train_step: `micro_batches`") < 1:
        raise ValueError(f"train_step: `micro_batches` is {micro_batches}; expected 1 or more, or 'auto'.")
    if optimizer_state not in ("auto", *get_args(StateLocation)):
        raise ValueError(f"train_step: `optimizer_state` is {optimizer_state!r}; expected 'device', 'host', or 'auto'.")
    for name, value in (("micro_batches", micro_batches), ("optimizer_state", optimizer_state)):
        if value == "auto" and current_request() is None and not (is_budget(memory) or isinstance(memory, MemoryPlan)):
            raise ValueError(
                f"train_step: `{name}` is 'auto', which is chosen for a budget, and `memory` is {memory!r}. Give a "
                f"budget, such as memory='14 GB', or a plan that was made for one; or state `{name}`."
            )


def _check_separable(inputs: Sequence[Any], variables: NamedTensors | None, loss_scaling: Any) -> None:
    """`ValueError` for a step that cannot be built a second time, apart."""
    if variables is not None or any(isinstance(value, popxl.Tensor) for value in (*inputs, loss_scaling)):
        raise ValueError(
            "train_step: a budget as `memory` builds the step apart, from streams and variables of its own, "
            "and there are tensors among the arguments. Take the plan of `plan_memory` as `memory`."
        )


def _resolved_division(
    memory: Any, micro_batches: Any, optimizer_state: Any, specs: Sequence[popxl.TensorSpec]
) -> tuple[Any, int, StateLocation]:
    """Memory plan or policy of a step, if any, its number of micro-batches and the location of the state: as given; or,
    where that is left open, as the planner which builds the step asks, or as the plan states."""
    requested = current_request()
    if requested is not None:
        memory = requested.memory_of(None if is_budget(memory) else memory)
        if micro_batches == "auto":
            requested.open_samples.append(samples_of(specs))
        requested.is_state_open |= optimizer_state == "auto"
    stated = memory if requested is None else requested.request
    count = stated.micro_batches if micro_batches == "auto" else int(micro_batches)
    return memory, count, stated.optimizer_state if optimizer_state == "auto" else optimizer_state


def _warn_of_other_division(memory: Any, count: int, location: StateLocation) -> None:
    """Warn of a plan that was made for more micro-batches, or for the state on the host: the step needs more memory."""
    if not isinstance(memory, MemoryPlan) or memory.models:  # of several models, some may have had fewer
        return
    stated: dict[str, tuple[Any, Any]] = {}
    if count < memory.micro_batches:
        stated["micro_batches"] = (memory.micro_batches, count)
    if location == "device" and memory.optimizer_state == "host":
        stated["optimizer_state"] = (memory.optimizer_state, location)
    for name, (planned, own) in stated.items():
        warn_at(
            SourceLocation.of(user_frame()),
            f"train_step: the plan in `memory` was made for {name}={planned!r}, and the step has {own!r}, so it needs "
            f"more memory than the plan. State {name}={planned!r}, or 'auto', which does as the plan says.",
            UserWarning,
        )


def _plan_in_separate_ir(
    module: Module, streams: Sequence[popxl.HostToDeviceStream], budget: str | int, **arguments: Any
) -> MemoryPlan:
    """Memory plan within a budget, from a step built in a separate Ir."""
    outer = popxl.gir()
    random_state = np.random.get_state()

    def build(memory: MemoryPlan | MemoryPolicy) -> popxl.Ir:
        np.random.set_state(random_state)  # initial values are those of the step itself
        ir = popxl.Ir(outer.replication_factor, outer.axes or None)
        ir.options = outer.options.model_copy(deep=True)
        ir.num_host_transfers = outer.num_host_transfers
        with get_current_context().isolated(), ir.main_graph:
            alike = [
                popxl.h2d_stream(stream.spec.shape, stream.spec.dtype, num_host_transfers=stream.num_host_transfers)
                for stream in streams
            ]
            training = train_step(module, *alike, memory=memory, **arguments)
            host_store(training.loss)
        return ir

    try:
        return plan_memory(build, bytes_of(budget, "train_step: `memory`")).plan
    finally:
        np.random.set_state(random_state)


def _check_trainable(module: Module, forward: GraphWithNamedArgs, fed: int) -> None:
    """Raise `ValueError` for untrainable models. The first `fed` inputs of the graph are those of the step."""
    named = set(forward.args.tensors)
    if unbound := [t.name for t in forward.graph.inputs[fed:] if t not in named]:
        kind = type(module).__name__
        raise ValueError(
            f"train_step: nothing is bound to the inputs {unbound} of the graph of `{kind}`: the modules that declare "
            f"them are no attributes of `{kind}`. Assign each to one; of a list, `Module.from_list(layers)`."
        )
    if sharded := [name for name, t in forward.args.to_dict().items() if t.meta_shape]:
        raise ValueError(
            f"train_step: {sharded} are pieces within the graph, where nothing sums their gradients over replicas. "
            "Declare whole variables, and use `sharded=True`."
        )
    if not forward.graph.outputs or forward.graph.outputs[0].shape:
        result = forward.graph.outputs[0].spec if forward.graph.outputs else "nothing"
        raise ValueError(
            f"train_step: `{type(module).__name__}.build` returns {result} first; expected the loss, a scalar, such "
            "as `ops.mean(losses)`."
        )
    if complex_ones := [name for name, t in forward.args.to_dict().items() if t.dtype.is_complex]:
        raise ValueError(
            f"train_step: the variables {complex_ones} are complex, and optimisers take real ones. Declare them as "
            "float32, with a last dimension of 2 for both parts, and use `ops.view_as_complex` of them."
        )
    reads = {t for op in forward.graph.ops for t in op.inputs}
    floats = {name: t for name, t in forward.args.to_dict().items() if t.dtype.is_floating_point}
    if unread := [name for name, t in floats.items() if t not in reads]:
        raise ValueError(
            f"train_step: nothing reads the variables {unread}, so they have no gradient. Leave them out of "
            f"`{type(module).__name__}.build`."
        )


def _planned_gradients(
    forward: GraphWithNamedArgs, memory: Any, count: int, location: StateLocation
) -> PlannedGradients | None:
    """Gradients under a memory plan or policy, if there is one, or if layers gather sharded weights: then everything
    but the gathered weights is kept."""
    if memory is None and any(t.meta_shape for t in forward.args.tensors):
        memory = "everything"
    if memory is None:
        return None
    planned = PlannedGradients(forward.graph, memory, count, location)
    planned.warn_if_nothing_is_saved()
    return planned


def _gradients(
    forward: GraphWithNamedArgs,
    weights: NamedTensors,
    batches: Iterable[MicroBatch],
    count: int,
    scale: float | popxl.Tensor | LossScale,
    memory: PlannedGradients | None,
) -> tuple[popxl.Tensor, NamedTensors]:
    """Mean float32 loss and gradients over batches. Integers have no gradient."""
    loss, bound = forward.graph.outputs[0], forward.bind(weights)
    names = [name for name, t in forward.args.to_dict().items() if t.dtype.is_floating_point]
    trained = [forward.args[name] for name in names]
    factor = scale.value if isinstance(scale, LossScale) else scale
    start = (
        cast_if_needed(factor, loss.dtype) if isinstance(factor, popxl.Tensor) else popxl.constant(factor, loss.dtype)
    )
    if count == 1:
        backward = autodiff(forward, [loss], trained, memory=memory)
        (batch,) = batches
        site = bound.call_with_info(*batch(None))
        results = backward.call(start, args=backward.grad_graph_info.inputs_dict(site))
        mean, *gradients = map(_as_float32, (site.outputs[0], *results))
        return mean, NamedTensors.pack(names, gradients)
    means, backward = autodiff_with_accumulation(forward, trained, [loss], dtype=popxl.float32, memory=memory)
    accumulators = means.init("gradients")
    ops.var_updates.accumulator_zero_(accumulators.mean_accum_counter)
    total: popxl.Tensor = popxl.constant(0.0, popxl.float32)
    here = get_current_context().ipu_id
    first = [accumulators.accum[name] for name, t in backward.args.accum.to_dict().items() if t.location[0] == here]
    for batch in batches:
        # A micro-batch begins when the gradients of those before are accumulated. Otherwise XLA postpones updates, or
        # computes several micro-batches together, and holds what they need meanwhile.
        for t in first:
            total = ops.available_after(total, t)
        site = bound.call_with_info(*batch(total))
        backward.bind(accumulators).call(start, args=backward.grad_graph_info.inputs_dict(site))
        mean = _as_float32(site.outputs[0])
        ipu = final_ipu(mean)
        total = total + (mean if here is None or ipu in (None, here) else ops.ipu_copy(mean, here, ipu))
    return total / count, accumulators.accum


def _means_over_replicas(
    loss: popxl.Tensor, gradients: NamedTensors, args: NamedTensors, variables: NamedTensors
) -> tuple[popxl.Tensor, dict[str, popxl.Tensor]]:
    """Loss and gradients of all replicas, as means. Those of weights that layers gather are reduced there."""
    placement = Placement()
    means = {
        name: g if args[name].meta_shape else _mean_gradient(g, variables[name], placement)
        for name, g in gradients.to_dict().items()
    }
    if popxl.gir().replication_factor > 1:
        loss = ops.collectives.replicated_all_reduce(loss, "mean")
    return loss, means


def _load(source: popxl.Tensor | popxl.HostToDeviceStream, precision: MixedPrecision | None) -> popxl.Tensor:
    """Model input in computation dtype; next element for streams."""
    t = ops.host_load(source) if isinstance(source, popxl.HostToDeviceStream) else source
    return t if precision is None else precision.narrowed(t)


def _as_float32(t: popxl.Tensor) -> popxl.Tensor:
    with get_current_context().on_ipu(final_ipu(t)):
        return cast_if_needed(t, popxl.float32) if t.dtype.is_half else t


def _graph_arguments(forward: GraphWithNamedArgs, weights: NamedTensors, variables: NamedTensors) -> NamedTensors:
    """Graph arguments: shards, where the graph takes these, and else full weights, gathered of sharded variables."""
    args, placement = forward.args, Placement(forward.graph)

    def bound(name: str, t: popxl.Tensor) -> popxl.Tensor:
        with placement.beside(args[name]):
            if not args[name].meta_shape:
                return gather_replica_sharded_tensor(t, False, _group(variables[name]))
            return cast_if_needed(t.on_replica, args[name].dtype)

    return NamedTensors.from_dict({name: bound(name, t) for name, t in weights.to_dict().items()})


def _group(variable: popxl.Tensor) -> popxl.ReplicaGrouping:
    """The replicas that share a variable."""
    return variable.replica_grouping if isinstance(variable, Variable) else popxl.gir().replica_grouping()


def _mean_gradient(gradient: popxl.Tensor, variable: popxl.Tensor, placement: Placement) -> popxl.Tensor:
    """Mean gradient over replicas sharing a variable, on the IPU of the gradient; own shard for sharded ones."""
    group, shard = _group(variable), variable.piece if isinstance(variable, Variable) else None
    if group.group_size == 1:
        return gradient
    with placement.beside(gradient):
        if shard is None:
            return ops.collectives.replicated_all_reduce(gradient, "mean", group)
        count = shard_count(gradient.nelms, shard.nelms, group.const_rg.group_size)
        if count == group.group_size:
            return ops.collectives.replicated_reduce_scatter(gradient, "mean", group, True)
        mean = ops.collectives.replicated_all_reduce(gradient, "mean", group)
        holders = popxl.gir().replica_grouping(group.const_rg.stride, count)
        return ops.collectives.replica_sharded_slice(mean, holders)
