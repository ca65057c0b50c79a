"""A step of training in one call: forward, backward, accumulation, the mean over replicas, and the update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import popxl
from popxl import ops
from popxl.ops.convert import cast_if_needed
from popxl.tensor import Variable
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.transforms.autodiff import autodiff_with_accumulation

__all__ = ["Training", "train_step"]


@dataclass(frozen=True)
class Training:
    """What a step of training has made.

    Attributes:
        loss: the mean over the micro-batches and replicas of a step.
        variables: those of the model, by name.
        state: what the optimiser keeps, by name.
    """

    loss: popxl.Tensor
    variables: NamedTensors
    state: NamedTensors


def train_step(
    module: Module,
    *inputs: popxl.HostToDeviceStream | popxl.Tensor,
    optimizer: Callable[..., NamedTensors],
    accumulate: int = 1,
    loss_scaling: float | popxl.Tensor = 1.0,
    variables: NamedTensors | None = None,
    **settings: Any,
) -> Training:
    """Add a step of training to the main graph: run the session once for each step.

    Gradients are the means over micro-batches and, for each variable, over the replicas that share it. The sums are
    made in float32.

    Args:
        module: its `build` takes `inputs`, and returns the loss (and more, which is not looked at): a scalar, the mean
            over what it is given.
        *inputs: streams, which are loaded once for each micro-batch; or tensors, if there is one.
        optimizer: updates variables by gradients, such as `partial(optimizers.adamw, lr=1e-3, clip_norm=1.0)`. It gets
            `loss_scaling`.
        accumulate: how many micro-batches a step has. Each is one transfer of a run: where streams among `inputs` have
            fewer, their `num_host_transfers` is set to as many. What is fed or stored once a step keeps its number.
        loss_scaling: what the gradient of the loss starts with.
        variables: those of the model, if there are some already; otherwise they are made.
        **settings: further arguments of `build`.

    Returns:
        The loss, the variables and the optimiser's state.

    Raises:
        ValueError: for an `accumulate` below 1, or above 1 of inputs that are no streams; for variables in pieces, and
            as the optimiser does.

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
    streams = [each for each in inputs if isinstance(each, popxl.HostToDeviceStream)]
    if accumulate < 1 or (accumulate > 1 and len(streams) < len(inputs)):
        raise ValueError(
            f"train_step: `accumulate` is {accumulate}; expected 1 or more, and streams as inputs if it is more: each "
            "micro-batch is another."
        )
    ir = popxl.gir()
    for stream in streams:
        if stream.num_host_transfers < accumulate:
            stream.num_host_transfers = accumulate
    with popxl.in_sequence():
        factories, forward = module.create_graph(*(each.spec for each in inputs), **settings)
        variables = factories.init() if variables is None else variables
        loss, trained = forward.graph.outputs[0], forward.args.values_flat()
        if pieces := [name for name, t in forward.args.to_dict().items() if t.meta_shape]:
            raise ValueError(f"train_step: {pieces} are in pieces. Write the step by hand, with `rts`.")
        means, backward = autodiff_with_accumulation(forward, trained, [loss], dtype=popxl.float32)
        accumulators = means.init("gradients")
        ops.var_updates.accumulator_zero_(accumulators.mean_accum_counter)
        start = (
            cast_if_needed(loss_scaling, loss.dtype)
            if isinstance(loss_scaling, popxl.Tensor)
            else popxl.constant(loss_scaling, loss.dtype)
        )
        losses = []
        for _ in range(accumulate):
            batch = [ops.host_load(each) if each in streams else each for each in inputs]
            site = forward.bind(variables).call_with_info(*batch)
            backward.bind(accumulators).call(start, args=backward.grad_graph_info.inputs_dict(site))
            losses.append(cast_if_needed(site.outputs[0], popxl.float32))
        mean = ops.add_n(*losses) / accumulate
        gradients = {name: _shared(accumulators.accum[name], variables[name]) for name in variables.keys_flat()}
        if ir.replication_factor > 1:
            mean = ops.collectives.replicated_all_reduce(mean, "mean")
        state = optimizer(variables, gradients, loss_scaling=loss_scaling)
    return Training(mean, variables, state)


def _shared(gradient: popxl.Tensor, variable: popxl.Tensor) -> popxl.Tensor:
    """The mean over the replicas that share a variable."""
    group = variable.replica_grouping if isinstance(variable, Variable) else popxl.gir().replica_grouping()
    if group.group_size == 1:
        return gradient
    return ops.collectives.replicated_all_reduce(gradient, "mean", group)
