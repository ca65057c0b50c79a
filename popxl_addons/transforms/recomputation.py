"""Recomputation: gradient graphs that recompute activations, instead of taking them from the forward call."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple, get_args

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.extend.arguments import check_type
from popxl.extend.graphs import has_effect, ipus_by_graph, is_attention, is_call, own_flops, reachable
from popxl.extend.ops import Op, available_after_all, recomputed_after, scheduled_after
from popxl.tensor import Constant
from popxl.transforms import ExpectedConnectionType, GradGraphInfo
from popxl.transforms.autodiff import make_grad_graph_info
from popxl_addons.grad_info import activation_inputs, gradient_inputs
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.transforms.activations import (
    Activation,
    MemoryPolicy,
    candidates,
    is_kept_by_policy,
    is_transposed_input,
    matches_nothing,
)
from popxl_addons.transforms.graph_copies import Transfers, copy_graph
from popxl_addons.utils import suffix_graph_name

__all__ = ["add_recompute_inputs", "recompute_graph"]

_Inputs = dict[popxl.Tensor, tuple[popxl.Tensor, ExpectedConnectionType]]


def recompute_graph(
    grad_graph: GraphWithNamedArgs,
    keep: MemoryPolicy | Iterable[str | popxl.Tensor] = (),
    offload: Iterable[str | popxl.Tensor] = (),
) -> GraphWithNamedArgs:
    """A gradient graph that computes activations again, in place of taking them from the forward call.

    It is used like `grad_graph` and returns the same, but ``grad_graph_info.inputs_dict(info)`` binds only the inputs
    of the forward graph and the tensors named here, so that nothing else outlives the forward call. Without `keep` and
    `offload` it calls the whole forward graph again; with them, only the ops of the forward graph that lead from kept
    values to those that the gradient reads.

    Recomputed ops wait for the first incoming gradient (`ops.available_after`), so that XLA does not merge them with
    the forward pass. Rerolled loops compile backward calls apart from forward calls, without a wait.

    Its inputs are the gradients and the forward inputs that `grad_graph` expects, in its order; the other forward
    inputs, sorted by name; and the further inputs of `grad_graph`, such as accumulators, sorted by name. With `keep` or
    `offload`, only forward inputs that are read are included, in the order of the forward graph, followed by kept and
    offloaded values. `args` holds inputs under the same names as before.

    Args:
        grad_graph: the gradient graph that takes activations.
        keep: values to pass on from the forward call: tensors of the forward graph, whether or not the gradient itself
            reads them; or their paths, in which `*` stands for any characters; or a policy: `"everything"`,
            `"products"`, `"products_without_batch"`, `"nothing"`. Results of ops with effects are always kept.
        offload: values that the forward call copies to host memory, to be copied back for the backward call: tensors or
            paths. It has priority over `keep`.

    Raises:
        AttributeError: if `grad_graph` is not a gradient graph.
        ValueError: if the forward graph uses host streams, as loading again would load something else; if a path
            matches no activation, or a tensor is none of the forward graph; for an unknown policy.

    Example:
        >>> ir = popxl.Ir()
        >>> forward = ir.create_graph(lambda x: ops.exp(ops.tanh(x)) * 2.0, popxl.TensorSpec((), popxl.float32))
        >>> grad = GraphWithNamedArgs(forward).autodiff()
        >>> for again in (grad, recompute_graph(grad), recompute_graph(grad, keep=["tanh_out"])):
        ...     [t.name for t in again.graph.inputs]
        ['Gradient___mul_out', 'exp_out', 'tanh_out']
        ['Gradient___mul_out', 'x']
        ['Gradient___mul_out', 'tanh_out']
    """
    check_type(grad_graph, GraphWithNamedArgs, "recompute_graph: `grad_graph`", "a GraphWithNamedArgs of a gradient")
    info = grad_graph.grad_graph_info
    if not keep and not offload:
        recomputed, bound = _recompute_all(info)
    else:
        activations = candidates(info)
        kept_tensors = _chosen("keep", keep, activations, info)
        recomputed, bound = recompute_activations(info, kept_tensors, _chosen("offload", offload, activations, info))
    # Bindings of the named inputs: inputs of the new graph, except for activations.
    inputs = recomputed.graph.inputs
    named = {name: bound[t] for name, t in grad_graph.args.to_dict().items() if bound[t] in inputs}
    return GraphWithNamedArgs.from_grad_graph(recomputed, type(grad_graph.args).from_dict(named))


_Bound = dict[popxl.Tensor, popxl.Tensor]
"""Bindings of the inputs of a gradient graph, in its caller."""


def _recompute_all(info: GradGraphInfo) -> tuple[GradGraphInfo, _Bound]:
    """Graph that calls the forward graph again before its gradient graph."""
    grad, forward = info.graph, info.forward_graph
    _refuse_streams(forward)
    graph = forward.ir.create_empty_graph(suffix_graph_name(grad.name, "recomp"))
    with graph, _on_ipu_of(grad):
        inputs = add_recompute_inputs(info)
        inputs_by = {connection: t for t, connection in inputs.items()}
        bound = {t: inputs_by[of, ExpectedConnectionType.FwdGrad] for t, of in gradient_inputs(info).items()}
        bound |= _further_inputs(info)
        site = ops.call_with_info(
            forward, inputs_dict={t: inputs_by[t, ExpectedConnectionType.Fwd] for t in forward.inputs}
        )
        bound |= info.inputs_dict(site)
        for result in ops.call(grad, inputs_dict=bound):
            popxl.graph_output(result)
    return make_grad_graph_info(forward, graph, inputs.values(), info.outputs), bound


def _further_inputs(info: GradGraphInfo) -> _Bound:
    """Add inputs to the current graph for those of a gradient graph that stand for nothing of the forward graph."""
    further = sorted(info.graph.inputs[len(info.expected_inputs) :], key=lambda t: t.name)
    return {t: popxl.gcg().add_input_like(t, t.by_ref) for t in further}


def recompute_activations(
    info: GradGraphInfo,
    keep: Collection[popxl.Tensor],
    offload: Collection[popxl.Tensor],
    as_read: bool = False,
    inputs_wait: bool = False,
) -> tuple[GradGraphInfo, _Bound]:
    """Gradient graph that takes some activations and recomputes others from these and forward inputs.

    Args:
        keep, offload: tensors of the forward graph to take: unchanged, or from host memory.
        as_read: whether each activation is recomputed right before the gradient reads it. Else all are recomputed
            first, and the gradient graph is called.
        inputs_wait: whether the inputs of the graph and kept products wait for the first incoming gradient, those that
            only the gradient reads, too, as in `jax.checkpoint`. XLA for TPUs then casts a float32 weight once, instead
            of within each product that reads it. Other kept values do not: XLA may compute them again where they are
            read. Without this, operands of recomputed ops wait, as few as ensure recomputation.

    Returns:
        The information of the new graph, and the bindings of the gradient graph's inputs in it.
    """
    grad, forward = info.graph, info.forward_graph
    Fwd, FwdGrad = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad
    gradients, activations = gradient_inputs(info), activation_inputs(info)
    recomputed, saved = recomputed_ops(info, {*keep, *offload})
    inputs, outputs = {*forward.inputs}, {*forward.outputs}
    host_copies = {t: _offloaded(t) for t in sorted(offload, key=lambda t: t.id) if t in saved}
    for t in saved:
        if t not in inputs and t not in host_copies and t not in outputs:
            forward.add_output(t)
    graph = forward.ir.create_empty_graph(suffix_graph_name(grad.name, "recomp"))
    with graph, _on_ipu_of(grad), popxl.in_sequence(False):
        bound = {t: graph.add_input_like(t) for t in gradients}
        first = next(iter(bound.values()))
        values: _Bound = {}
        waiting = set[popxl.Tensor]()
        expected = [(forward_t, FwdGrad) for forward_t in gradients.values()]
        for t in saved:
            source = host_copies.get(t, t)
            expected.append((source, Fwd))
            saved_input = graph.add_input_like(source)
            if t in host_copies:
                values[t] = _reloaded(saved_input, t, first)
            elif inputs_wait and (t in inputs or _is_product(t)):
                values[t] = recomputed_after(saved_input, first)
                waiting.add(t)
            else:
                values[t] = saved_input
        bound |= _further_inputs(info)
        if as_read:
            missing = {t: forward_t for t, forward_t in activations.items() if forward_t not in values}
            bound |= {t: values[forward_t] for t, forward_t in activations.items() if t not in missing}

            def compute(t: popxl.Tensor, latest: popxl.Tensor | None) -> popxl.Tensor:
                leading, latest = recomputed.leading_to(t, values), first if latest is None else latest
                _compute(leading, values, latest, inputs, {*values} - recomputed.saved - inputs)
                return _forward_tensor(t, values)

            fetched = {t: partial(compute, forward_t) for t, forward_t in missing.items()}
            _, copies = copy_graph(grad, Transfers(fetched=fetched), graph, bound)
            bound |= copies
        else:
            _compute(recomputed, values, first, inputs, waiting)
            bound |= {t: _forward_tensor(forward_t, values) for t, forward_t in activations.items()}
            for t in _ordered(ops.call(grad, inputs_dict=bound)):
                popxl.graph_output(t)
    return make_grad_graph_info(forward, graph, expected, info.outputs), bound


def _on_ipu_of(grad: popxl.Graph) -> AbstractContextManager[None]:
    """Context in which new ops are on the IPU of a gradient graph, if it is on one: else its caller would be on two."""
    ipus = ipus_by_graph(grad)[grad]
    return get_current_context().on_ipu(next(iter(ipus)) if len(ipus) == 1 else None)


def _ordered(results: Sequence[popxl.Tensor]) -> list[popxl.Tensor]:
    """Results of a backward call: all after reduce-scattered ones, the first also after the others.

    The layer before begins to recompute with the first gradient, usually that of the layer's input. XLA puts off what
    nothing waits for, such as gradients of weights, and keeps the operands of their products and sums.
    """
    shards = [t for t in results if t.meta_shape]
    first, *later = (t if t.meta_shape else available_after_all(t, shards) for t in results)
    for t in later:
        if not (t.meta_shape or first.meta_shape):
            first = scheduled_after(first, t)
    return [first, *later]


class RecomputedOps(NamedTuple):
    """Ops of a forward graph to recompute.

    Attributes:
        ops: ops in order; calls of which some results are taken, each with the ops of the called graph that lead to the
            other results.
        saved: tensors that are passed from the forward call.
        reads: all operands, including inputs of the graph.
    """

    ops: list[tuple[Op, RecomputedOps | None]]
    saved: set[popxl.Tensor]
    reads: set[popxl.Tensor]

    def leading_to(self, t: popxl.Tensor, available: Container[popxl.Tensor]) -> RecomputedOps:
        """The subset of ops that compute a tensor from `available` ones."""
        makers = {result: i for i, (op, _) in enumerate(self.ops) for result in op.outputs}
        needed = set[int]()
        wanted = [t]
        while wanted:
            number = makers.get(t) if (t := wanted.pop()) not in available else None
            if number is not None and number not in needed:
                needed.add(number)
                wanted += self.ops[number][0].inputs
        return self._replace(ops=[self.ops[i] for i in sorted(needed)])


def _compute(
    recomputed: RecomputedOps,
    values: _Bound,
    first: popxl.Tensor,
    available: set[popxl.Tensor],
    waiting: set[popxl.Tensor],
) -> None:
    """Copy ops into the current graph.

    Args:
        values: tensors of the current graph by those of the forward graph; extended by the results.
        first: the gradient that the copies wait for.
        available: inputs of their graph that do not wait for it.
        waiting: values that wait for it; extended by the results.
    """
    delayed: _Bound = {}
    for op, inner in recomputed.ops:
        with get_current_context().located_at(op.ipu, op.io_tiles):
            if inner is not None:
                _compute_in_part(op, inner, values, delayed, first, waiting)
                continue
            for t in _to_wait(op, waiting, available):
                delayed[t] = recomputed_after(_forward_tensor(t, values), first)
                waiting.add(t)
            values |= zip(op.outputs, _computed(op, values, delayed), strict=False)
        waiting.update(op.outputs)


def _computed(op: Op, values: _Bound, delayed: _Bound) -> Sequence[popxl.Tensor]:
    """Results of an op in the current graph: recomputed, or the first one from available others.

    In the latter case the gradient, too, reads the delayed operands: XLA then merges their common computations.

    Args:
        delayed: operands that wait for a gradient; the gradient reads them without.
    """
    inputs = [delayed[t] if t in delayed else _forward_tensor(t, values) for t in op.inputs]
    rule = op.kind.recomputed_from
    if rule is None or not all(op.outputs[i] in values for i in rule.results):
        return op.clone(inputs).outputs
    values |= {t: delayed[t] for t in op.inputs if t in delayed}
    saved = [values[op.outputs[i]] for i in rule.results]
    return [rule.function(*saved, **op.attributes | dict(zip(op.operand_names(), inputs, strict=True)))]


def _to_wait(op: Op, waiting: set[popxl.Tensor], available: set[popxl.Tensor]) -> list[popxl.Tensor]:
    """Operands to delay, so that the results wait.

    One delayed operand is enough, such as a weight that is transposed here. Attention needs all: its scores, the
    largest part, are computed without the values.
    """
    activations = [t for t in op.inputs if not (t in waiting or t in available or isinstance(t, Constant))]
    if is_attention(op) and activations:
        return activations
    return [] if not waiting.isdisjoint(op.inputs) else [*activations, *op.inputs][:1]


def _compute_in_part(
    call: Op, inner_ops: RecomputedOps, values: _Bound, delayed: _Bound, first: popxl.Tensor, waiting: set[popxl.Tensor]
) -> None:
    """Copy some ops of a called graph into the current graph, in place of the call. Extends `values` by results, and
    `waiting` by those that wait for `first`."""
    (run,) = call.runs
    inputs = {inner: t for inner, t in zip(run.inputs, run.operands, strict=True) if inner in inner_ops.reads}
    outputs = [*zip(run.outputs, call.outputs, strict=True)]
    known_values = inputs | {inner: t for inner, t in outputs if inner in inner_ops.saved and t in values}
    inner_values = {
        inner: delayed[t] if t in delayed else _forward_tensor(t, values) for inner, t in known_values.items()
    }
    inner_waiting = {inner for inner, t in known_values.items() if t in waiting}
    _compute(inner_ops, inner_values, first, inputs.keys() - inner_waiting, inner_waiting)
    values |= {t: inner_values[inner] for inner, t in known_values.items()}
    for inner, t in outputs:
        if inner in inner_values:
            values.setdefault(t, inner_values[inner])
            if inner not in known_values:
                waiting.add(t)


def _is_product(t: popxl.Tensor) -> bool:
    """Whether a product computes a tensor, or the tensor that it is a view of."""
    op = t.origin.producer
    return op is not None and own_flops(op).products > 0


def _forward_tensor(t: popxl.Tensor, values: _Bound) -> popxl.Tensor:
    """A tensor of the forward graph, in the current graph."""
    if isinstance(t, Constant) and t not in values:
        values[t] = popxl.constant(t.data, t.dtype, t.name)
    return values[t]


def recomputed_ops(info: GradGraphInfo, saved: Collection[popxl.Tensor]) -> tuple[RecomputedOps, list[popxl.Tensor]]:
    """Ops to recompute for the reads of a gradient, and forward tensors for their saved inputs.

    Args:
        saved: tensors of the forward graph to save, except transposed inputs. Outputs with provided gradients are
            saved, too, as the caller has them, and results of ops with effects.

    Returns:
        The ops in order; and the tensors: the inputs of the forward graph, then computed ones.
    """
    known = {t for t in saved if not is_transposed_input(t)}.union(gradient_inputs(info).values())
    recomputed = _leading(info.forward_graph, activation_inputs(info).values(), known)
    inputs = [t for t in info.forward_graph.inputs if t in recomputed.reads]
    return recomputed, inputs + sorted(recomputed.saved, key=lambda t: t.id)


def _leading(graph: popxl.Graph, wanted: Iterable[popxl.Tensor], known_values: set[popxl.Tensor]) -> RecomputedOps:
    """Ops of a graph that lead from its inputs and known tensors to wanted ones, within called graphs, too."""
    leading = RecomputedOps([], set(), {*wanted})
    for op in reversed(graph.ops):
        reads = leading.reads.intersection(op.outputs)
        saved = reads if has_effect(op) or op.modified else reads & known_values
        leading.saved.update(saved)
        if saved == reads:
            continue
        if is_call(op) and not known_values.isdisjoint(op.outputs):
            (run,) = op.runs
            pairs = [*zip(run.outputs, op.outputs, strict=True)]
            inner = _leading(
                run.graph, {i for i, t in pairs if t in reads - saved}, {i for i, t in pairs if t in known_values}
            )
            leading.saved.update(t for i, t in pairs if i in inner.saved and t in known_values)
            leading.reads.update(t for i, t in zip(run.inputs, run.operands, strict=True) if i in inner.reads)
            leading.ops.append((op, inner))
        else:
            leading.reads.update(op.inputs)
            leading.ops.append((op, None))
    leading.ops.reverse()
    return leading


def _offloaded(t: popxl.Tensor) -> popxl.Tensor:
    """Add an output to a forward graph: a copy of an activation in host memory."""
    with t.graph, get_current_context().located_at(*t.location):
        copy = ops.offload(t)
    t.graph.add_output(copy)
    return copy


def _reloaded(copy: popxl.Tensor, t: popxl.Tensor, first: popxl.Tensor) -> popxl.Tensor:
    """A forward tensor `t` from its copy in host memory, back on its IPU after the gradient `first`."""
    with get_current_context().on_ipu(t.location[0]):
        return ops.reload(ops.available_after(copy, first))


def _chosen(
    name: str,
    selection: MemoryPolicy | Iterable[str | popxl.Tensor],
    activations: Sequence[Activation],
    info: GradGraphInfo,
) -> set[popxl.Tensor]:
    """The tensors of the forward graph that an argument names."""
    if isinstance(selection, str):
        policy = next((policy for policy in get_args(MemoryPolicy) if policy == selection and name == "keep"), None)
        if policy is None:
            raise ValueError(
                f"recompute_graph: `{name}` is {selection!r}; expected "
                + (f"a policy, one of {', '.join(map(repr, get_args(MemoryPolicy)))}, or " if name == "keep" else "")
                + "a list of tensors and paths."
            )
        return {item.tensor for item in activations if is_kept_by_policy(policy, item)}
    check_type(selection, Iterable, f"recompute_graph: `{name}`", "a list of tensors and paths")
    chosen: set[popxl.Tensor] = set()
    tensors = {a.tensor for a in activations} | {*info.forward_graph.inputs, *info.forward_graph.outputs}
    for item in selection:
        if isinstance(item, popxl.Tensor):
            if item not in tensors:
                raise ValueError(
                    f"recompute_graph: {item!r} in `{name}` is not a tensor of {info.forward_graph.title}, the forward "
                    "graph, that the gradient needs. Name one of those that `activations_of` lists."
                )
            chosen.add(item)
            continue
        check_type(item, str, f"recompute_graph: each of `{name}`", "a tensor of the forward graph, or a path")
        matches = {
            a.tensor
            for a in activations
            if any(fnmatch.fnmatchcase(path, item) for path in (a.path, a.name, a.long_path))
        }
        if not matches:
            raise ValueError(matches_nothing(f"recompute_graph: `{name}`", [item], [a.path for a in activations]))
        chosen |= matches
    return chosen


def add_recompute_inputs(grad_info: GradGraphInfo) -> _Inputs:
    """Add inputs to the current graph: those of a gradient graph that runs the forward graph again.

    Args:
        grad_info: information of the gradient graph that takes activations.

    Returns:
        For each new input, in order, the forward tensor that it stands for, and whether for the tensor or its gradient:
        `expected_inputs` for `popxl.transforms.autodiff.make_grad_graph_info`.

    Example:
        >>> ir = popxl.Ir()
        >>> info = popxl.transforms.autodiff(ir.create_graph(lambda x: x * 2.0, popxl.TensorSpec((), popxl.float32)))
        >>> with ir.create_empty_graph():
        ...     [t.name for t in add_recompute_inputs(info)]
        ['Gradient___mul_out', 'x']
    """
    check_type(grad_info, GradGraphInfo, "add_recompute_inputs: `grad_info`", "what `grad_graph_info` of a graph says")
    forward = grad_info.forward_graph
    Fwd = ExpectedConnectionType.Fwd
    kept_inputs = [
        (t, expected.fwd_tensor, expected.connection_type)
        for t, expected in zip(grad_info.graph.inputs, grad_info.expected_inputs, strict=False)
        if not expected.is_activation or expected.fwd_tensor in forward.inputs
    ]
    missing: Iterable[popxl.Tensor] = {*forward.inputs} - {t for _, t, kind in kept_inputs if kind is Fwd}
    kept_inputs += [(t, t, Fwd) for t in sorted(missing, key=lambda t: t.name)]
    return {popxl.gcg().add_input_like(like): (t, kind) for like, t, kind in kept_inputs}


def _refuse_streams(forward: popxl.Graph) -> None:
    for graph in reachable(forward):
        for op in (inner_op for inner_graph in graph.ops for inner_op in inner_graph.parts):
            if op.kind.exchange == "stream":
                raise ValueError(
                    f"recompute_graph: {forward.title} runs {op!r} ({op.source}), which uses the stream "
                    f"`{op.attributes['stream'].tensor.name}`; run again, it would move on to the next element. Load "
                    "and store where the graph is called."
                )
