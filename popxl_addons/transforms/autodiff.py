"""Gradient graphs made by popxl's transform: unchanged, or accumulating means of gradients.

Hand-written ones are in `popxl_addons.build_grad`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import popxl
from popxl import initial, ops
from popxl.context import get_current_context
from popxl.extend.arguments import check_type
from popxl.extend.graphs import final_ipu
from popxl.extend.memory import current_request
from popxl.replica_grouping import Groups
from popxl.transforms.autodiff import make_grad_graph_info
from popxl_addons.dot_tree import sanitise
from popxl_addons.grad_info import as_graph, merge_called_graphs, remap_grad_info
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.graph_common import CalledGraphsGradInfoLike, GraphLike
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.transforms.planned_gradients import Memory, PlannedGradients
from popxl_addons.utils import duplicate_items
from popxl_addons.variable_factory import NamedVariableFactories, add_variable_input

__all__ = ["autodiff", "autodiff_with_accumulation", "remap_grad_info"]


def autodiff(
    graph: GraphLike,
    grads_provided: Iterable[popxl.Tensor] | None = None,
    grads_required: Iterable[popxl.Tensor] | None = None,
    called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
    memory: Memory | None = None,
) -> GraphWithNamedArgs:
    """Transform-based gradient graph of `graph`, ignoring `build_grad` of its module.

    Its first inputs are the gradients of `grads_provided` (default: all outputs), its outputs those of
    `grads_required` (default: all inputs), in these orders. The further inputs are forward values, found for a call
    of the forward graph with ``grad.grad_graph_info.inputs_dict(info)``; those that were neither inputs nor outputs
    of `graph` are now outputs of it, so take results as ``y, *_ = info.outputs``.

    `called_graphs_grad_info` says which gradient graphs to use for the graphs that `graph` calls; its entries win over
    those that `graph` brings along. `memory`, a policy or a plan, says which activations of the graphs that `graph`
    calls are kept, recomputed or offloaded, also for those whose gradient graphs are given. Errors are those of
    `popxl.transforms.autodiff`. The patterns of `popxl_addons.patterns` are applied to the gradient graphs that are
    made.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     x = popxl.variable([1.0, 2.0], name="x")
        ...     square = GraphWithNamedArgs(ir.create_graph(lambda x: x * x, x))
        ...     grad = autodiff(square)
        ...     info = square.call_with_info(x)
        ...     dy = popxl.constant([1.0, 1.0])
        ...     (dx,) = grad.call(dy, args=grad.grad_graph_info.inputs_dict(info))
        >>> dx.shape
        (2,)
    """
    named = graph if isinstance(graph, GraphWithNamedArgs) else GraphWithNamedArgs(as_graph(graph))
    if memory is None or isinstance(memory, PlannedGradients):
        planned = memory
    else:
        requested = current_request()
        planned = PlannedGradients(named.graph, memory if requested is None else requested.memory_of(memory))
    if planned is not None:
        given = merge_called_graphs(named.called_graphs_grad_info, called_graphs_grad_info)
        called_graphs_grad_info = merge_called_graphs(called_graphs_grad_info, planned.with_treatments(given))
    grad = named.differentiate(grads_provided, grads_required, called_graphs_grad_info, planned)
    return grad if planned is None else GraphWithNamedArgs.from_grad_graph(planned(grad.grad_graph_info))


def autodiff_with_accumulation(
    graph: GraphWithNamedArgs,
    tensors_to_accumulate_grads: Iterable[popxl.Tensor],
    grads_provided: Iterable[popxl.Tensor] | None = None,
    grads_required: Iterable[popxl.Tensor] | None = None,
    called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
    replica_groupings: NamedReplicaGrouping | None = None,
    dtype: popxl.dtype | None = None,
    memory: Memory | None = None,
) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
    """Gradient graph that accumulates some gradients as running means in variables and returns others.

    The variables are inputs by reference: the float32 scalar `mean_accum_counter`, which counts the calls, and for each
    tensor ``accum.<name>``, of its shape and dtype. `<name>` is the tensor's flat name in ``graph.args``, or for others
    ``sanitise(tensor.name)``. A call takes a gradient ``g`` into a mean of ``c`` values as
    ``accum = (c * accum + g) / (c + 1)``, and then counts up ``c``. All start at zero; setting the counter to zero
    starts new means. For a tensor that is a piece, each replica has the mean of its piece, without a meta-shape: the
    host has one for every replica.

    Args:
        graph: graph to differentiate.
        tensors_to_accumulate_grads: tensors of `graph` whose gradients go into means.
        grads_provided: as for `autodiff`.
        grads_required: tensors of `graph` whose gradients are returned, in this order; by default none.
        called_graphs_grad_info: as for `autodiff`.
        replica_groupings: groups of replicas that share an accumulator's initial value, by `<name>`; by default all.
            Further names are ignored, and those of shards, which differ between replicas.
        dtype: dtype of the means; by default that of each tensor.
        memory: as for `autodiff`.

    Returns:
        Factories of the variables, and the gradient graph, with the same names in `args`.

    Raises:
        ValueError: if a tensor is named twice, or two would have the same name.
        PopxlError: as for `popxl.transforms.autodiff`.

    Example:
        After gradients of 2, 4 and 9 an accumulator is 5, and the counter 3.

        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     x, w, dy = (popxl.variable(value) for value in (3.0, 2.0, 1.0))
        ...     product = ir.create_graph(lambda x, w: x * w, x, w)
        ...     graph = GraphWithNamedArgs(product, NamedTensors(w=product.inputs[1]))
        ...     facts, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=product.inputs[:1])
        ...     accumulators = facts.init()
        ...     info = graph.call_with_info(x, w)
        ...     (dx,) = grad.bind(accumulators).call(dy, args=grad.grad_graph_info.inputs_dict(info))
        >>> facts.keys_flat()
        ['mean_accum_counter', 'accum.w']
    """
    check_type(graph, GraphWithNamedArgs, "autodiff_with_accumulation: `graph`", "a GraphWithNamedArgs")
    for name, tensors in (
        ("tensors_to_accumulate_grads", tensors_to_accumulate_grads),
        ("grads_required", () if grads_required is None else grads_required),
    ):
        check_type(tensors, Iterable, f"autodiff_with_accumulation: `{name}`", "a list of tensors")
    accumulated = _by_name(graph, list(tensors_to_accumulate_grads))
    required = list(grads_required or ())
    grad = autodiff(graph, grads_provided, required + accumulated.values_flat(), called_graphs_grad_info, memory)
    info, gradients = grad.grad_graph_info, grad.graph.outputs[len(required) :]
    grad.graph.trim_outputs(len(required))
    grad.grad_graph_info = make_grad_graph_info(
        info.forward_graph,
        info.graph,
        [(expected.fwd_tensor, expected.connection_type) for expected in info.expected_inputs],
        required,
    )
    factories = NamedVariableFactories()

    def state(name: str, shape: tuple[int, ...], dtype: popxl.dtype, group: Groups | None) -> popxl.Tensor:
        t, factory = add_variable_input(name, partial(initial.zeros, shape), dtype, by_ref=True, replica_grouping=group)
        grad.args.insert(name, t, overwrite=True)
        factories.insert(name, factory, overwrite=True)
        return t

    named = NamedReplicaGrouping() if replica_groupings is None else replica_groupings
    check_type(named, NamedReplicaGrouping, "autodiff_with_accumulation: `replica_groupings`", "a NamedReplicaGrouping")
    groups = named.to_dict()
    ipus = {gradient: final_ipu(gradient) for gradient in gradients}
    home = next((ipu for ipu in ipus.values() if ipu is not None), get_current_context().ipu_id)
    with grad.graph, popxl.in_sequence(), get_current_context().on_ipu(home):
        counter = state("mean_accum_counter", (), popxl.float32, None)
        counters = {home: counter}  # by IPU
        for (name, t), gradient in zip(accumulated.to_dict().items(), gradients, strict=True):
            group = groups.get(name) if not t.meta_shape else grad.graph.ir.replica_grouping(group_size=1)
            mean = state(f"accum.{name}", t.shape, t.dtype if dtype is None else dtype, group)
            ipu = home if ipus[gradient] is None else ipus[gradient]
            if ipu is not None and ipu not in counters:
                counters[ipu] = ops.ipu_copy(counter, ipu, home)
            with get_current_context().on_ipu(ipu):
                ops.var_updates.accumulate_mean_(mean, gradient, counters[ipu])
        ops.var_updates.accumulate_(counter, popxl.constant(1, popxl.float32))
    return factories, grad


def _by_name(graph: GraphWithNamedArgs, tensors: list[popxl.Tensor]) -> NamedTensors:
    """Accumulated tensors by accumulator name."""
    for t in tensors:
        what = "autodiff_with_accumulation: each of `tensors_to_accumulate_grads`"
        check_type(t, popxl.Tensor, what, "a tensor of the graph")
    if twice := duplicate_items(tensors):
        raise ValueError(f"autodiff_with_accumulation: `tensors_to_accumulate_grads` has some tensors twice: {twice}.")
    flat_names = {t: name for name, t in graph.args.to_dict().items()}
    names = [flat_names.get(t) or sanitise(t.name) for t in tensors]
    if same := duplicate_items(names):
        raise ValueError(
            f"autodiff_with_accumulation: several of the tensors {tensors} would have accumulators of the same name: "
            f"{same}. Give the graph's inputs other names."
        )
    return NamedTensors.pack(names, tensors)
