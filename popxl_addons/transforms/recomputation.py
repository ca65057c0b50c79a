"""Recomputation: gradient graphs that recompute activations, instead of taking them from the forward call."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Container, Iterable, Sequence
from functools import partial
from typing import NamedTuple, get_args

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.extend.arguments import check_type
from popxl.extend.graphs import has_effect, is_attention, is_call, reachable
from popxl.extend.ops import Op, available_after_all, recomputed_after, scheduled_after
from popxl.tensor import Constant
from popxl.transforms import ExpectedConnectionType, GradGraphInfo
from popxl.transforms.autodiff import make_grad_graph_info
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.transforms.graph_copies import Transfers, copy_graph
from popxl_addons.transforms.memory_plan import (
    Activation,
    MemoryPolicy,
    candidates,
    is_kept_by_policy,
    is_transposed_input,
    matches_nothing,
)
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
        known = candidates(info)
        kept = _chosen("keep", keep, known, info)
        recomputed, bound = recompute_activations(info, kept, _chosen("offload", offload, known, info))
    # Bindings of the named inputs: inputs of the new graph, except for activations.
    inputs = recomputed.graph.inputs
    named = {name: bound[t] for name, t in grad_graph.args.to_dict().items() if bound[t] in inputs}
    return GraphWithNamedArgs.from_grad_graph(recomputed, type(grad_graph.args).from_dict(named))


_Bound = dict[popxl.Tensor, popxl.Tensor]
"""What the inputs of a gradient graph are bound to, in the graph that calls it."""


def _recompute_all(info: GradGraphInfo) -> tuple[GradGraphInfo, _Bound]:
    """Graph that calls the forward graph again before its gradient graph."""
    grad, forward = info.graph, info.forward_graph
    _refuse_streams(forward)
    graph = forward.ir.create_empty_graph(suffix_graph_name(grad.name, "recomp"))
    with graph:
        inputs = add_recompute_inputs(info)
        of = {connection: t for t, connection in inputs.items()}
        bound = {
            t: of[expected.fwd_tensor, expected.connection_type]
            for t, expected in zip(grad.inputs, info.expected_inputs, strict=False)
            if not expected.is_activation
        }
        bound |= _further_inputs(info)
        site = ops.call_with_info(forward, inputs_dict={t: of[t, ExpectedConnectionType.Fwd] for t in forward.inputs})
        bound |= info.inputs_dict(site)
        for result in ops.call(grad, inputs_dict=bound):
            popxl.graph_output(result)
    return make_grad_graph_info(forward, graph, inputs.values(), info.outputs), bound


def _further_inputs(info: GradGraphInfo) -> _Bound:
    """Add inputs to the current graph for those of a gradient graph that stand for nothing of the forward graph."""
    further = sorted(info.graph.inputs[len(info.expected_inputs) :], key=lambda t: t.name)
    return {t: popxl.gcg().add_input_like(t, t.by_ref) for t in further}


def recompute_activations(
    info: GradGraphInfo, keep: Collection[popxl.Tensor], offload: Collection[popxl.Tensor], as_read: bool = False
) -> tuple[GradGraphInfo, _Bound]:
    """Gradient graph that takes some activations and recomputes others from these and forward inputs.

    Args:
        keep, offload: tensors of the forward graph to take: unchanged, or from host memory.
        as_read: whether each activation is recomputed right before the gradient reads it. Else all are recomputed
            first, and the gradient graph is called.

    Returns:
        The information of the new graph, and the bindings of the gradient graph's inputs in it.
    """
    grad, forward = info.graph, info.forward_graph
    Fwd, FwdGrad = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad
    gradients = [
        (t, e.fwd_tensor) for t, e in zip(grad.inputs, info.expected_inputs, strict=False) if not e.is_activation
    ]
    read = {t: e.fwd_tensor for t, e in zip(grad.inputs, info.expected_inputs, strict=False) if e.is_activation}
    again, taken = recomputed_ops(info, {*keep, *offload})
    inputs, outputs = {*forward.inputs}, {*forward.outputs}
    away = {t: _offloaded(t) for t in sorted(offload, key=lambda t: t.id) if t in taken}
    for t in taken:
        if t not in inputs and t not in away and t not in outputs:
            forward.add_output(t)
    graph = forward.ir.create_empty_graph(suffix_graph_name(grad.name, "recomp"))
    with graph, popxl.in_sequence(False):
        bound = {t: graph.add_input_like(t) for t, _ in gradients}
        first = next(iter(bound.values()))
        of: _Bound = {}
        expected = [(of_t, FwdGrad) for _, of_t in gradients]
        for t in taken:
            source = away.get(t, t)
            expected.append((source, Fwd))
            given = graph.add_input_like(source)
            of[t] = ops.reload(ops.available_after(given, first)) if t in away else given
        bound |= _further_inputs(info)
        if as_read:
            missing = {t: of_t for t, of_t in read.items() if of_t not in of}
            bound |= {t: of[of_t] for t, of_t in read.items() if t not in missing}

            def compute(t: popxl.Tensor, latest: popxl.Tensor | None) -> popxl.Tensor:
                _compute(again.leading_to(t, of), of, first if latest is None else latest, inputs)
                return _forward_tensor(t, of)

            fetched = {t: partial(compute, of_t) for t, of_t in missing.items()}
            _, copies = copy_graph(grad, Transfers(fetched=fetched), graph, bound)
            return make_grad_graph_info(forward, graph, expected, info.outputs), bound | copies
        _compute(again, of, first, inputs)
        bound |= {t: _forward_tensor(of_t, of) for t, of_t in read.items()}
        for t in _ordered(ops.call(grad, inputs_dict=bound)):
            popxl.graph_output(t)
    return make_grad_graph_info(forward, graph, expected, info.outputs), bound


def _ordered(results: Sequence[popxl.Tensor]) -> list[popxl.Tensor]:
    """Results of a backward call: all after those that are shared out, the first also after the others.

    The layer before begins to recompute with the first gradient, usually that of the layer's input. XLA puts off what
    nothing waits for, such as gradients of weights, and keeps the operands of their products and sums.
    """
    shards = [t for t in results if t.meta_shape]
    first, *others = (t if t.meta_shape else available_after_all(t, shards) for t in results)
    for t in others:
        if not (t.meta_shape or first.meta_shape):
            first = scheduled_after(first, t)
    return [first, *others]


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

    def leading_to(self, t: popxl.Tensor, there: Container[popxl.Tensor]) -> RecomputedOps:
        """The ops among these that compute a tensor from those that are there."""
        makers = {made: i for i, (op, _) in enumerate(self.ops) for made in op.outputs}
        needed = set[int]()
        wanted = [t]
        while wanted:
            number = makers.get(t) if (t := wanted.pop()) not in there else None
            if number is not None and number not in needed:
                needed.add(number)
                wanted += self.ops[number][0].inputs
        return self._replace(ops=[self.ops[i] for i in sorted(needed)])


def _compute(again: RecomputedOps, of: _Bound, first: popxl.Tensor, available: set[popxl.Tensor]) -> None:
    """Copy ops into the current graph.

    Args:
        of: tensors of the current graph for those of the forward graph; the results are added.
        first: the gradient that the copies wait for.
        available: inputs of their graph that do not wait for it.
    """
    waiting = again.reads.intersection(of) - again.saved - available
    held: _Bound = {}
    for op, within in again.ops:
        with get_current_context().set(ipu_id=op.ipu, io_tile_set=op.io_tiles):
            if within is not None:
                _compute_in_part(op, within, of, first, waiting)
                continue
            for t in _to_wait(op, waiting, available):
                held[t] = recomputed_after(_forward_tensor(t, of), first)
                waiting.add(t)
            of |= zip(op.outputs, _computed(op, of, held), strict=False)
        waiting.update(op.outputs)


def _computed(op: Op, of: _Bound, held: _Bound) -> Sequence[popxl.Tensor]:
    """Results of an op in the current graph: all, or the first one, if it is computed from others that are there.

    In the latter case the gradient, too, reads the operands that wait: XLA computes once what both compute of these.

    Args:
        held: operands that wait, which differ from those of the gradient.
    """
    inputs = [held[t] if t in held else _forward_tensor(t, of) for t in op.inputs]
    short = op.kind.recomputed_from
    if short is None or not all(op.outputs[i] in of for i in short.results):
        return op.clone(inputs).outputs
    of |= {t: held[t] for t in op.inputs if t in held}
    given = [of[op.outputs[i]] for i in short.results]
    return [short.function(*given, **op.attributes | dict(zip(op.operand_names(), inputs, strict=True)))]


def _to_wait(op: Op, waiting: set[popxl.Tensor], available: set[popxl.Tensor]) -> list[popxl.Tensor]:
    """Operands that have to wait, so that the results do.

    One operand that waits is enough, such as a weight that is transposed here. Of attention, all have to: scores, which
    are the most of it, are computed without the values.
    """
    activations = [t for t in op.inputs if not (t in waiting or t in available or isinstance(t, Constant))]
    if is_attention(op) and activations:
        return activations
    return [] if not waiting.isdisjoint(op.inputs) else [*activations, *op.inputs][:1]


def _compute_in_part(
    call: Op, within: RecomputedOps, of: _Bound, first: popxl.Tensor, waiting: set[popxl.Tensor]
) -> None:
    """Copy some ops of a called graph into the current graph, in place of the call. Adds its results to `of`, and those
    that wait for `first` to `waiting`."""
    (run,) = call.runs
    inputs = {inner: t for inner, t in zip(run.inputs, run.operands, strict=True) if inner in within.reads}
    outputs = [*zip(run.outputs, call.outputs, strict=True)]
    given = inputs | {inner: t for inner, t in outputs if inner in within.saved and t in of}
    inner_of = {inner: _forward_tensor(t, of) for inner, t in given.items()}
    _compute(within, inner_of, first, {inner for inner, t in inputs.items() if t not in waiting})
    of |= {t: inner_of[inner] for inner, t in given.items()}
    for inner, t in outputs:
        if inner in inner_of:
            of.setdefault(t, inner_of[inner])
            if inner not in given:
                waiting.add(t)


def _forward_tensor(t: popxl.Tensor, of: _Bound) -> popxl.Tensor:
    """A tensor of the forward graph, in the current graph."""
    if isinstance(t, Constant) and t not in of:
        of[t] = popxl.constant(t.data, t.dtype, t.name)
    return of[t]


def recomputed_ops(info: GradGraphInfo, given: Collection[popxl.Tensor]) -> tuple[RecomputedOps, list[popxl.Tensor]]:
    """Ops to recompute for the reads of a gradient, and forward tensors for their saved inputs.

    Args:
        given: tensors of the forward graph to take, except transposed inputs. Outputs whose gradients are provided are
            taken, too, as the caller has them, and what ops with effects make.

    Returns:
        The ops in order; and the tensors: the inputs of the forward graph, then computed ones.
    """
    known = {
        *(t for t in given if not is_transposed_input(t)),
        *(e.fwd_tensor for e in info.expected_inputs if not e.is_activation),
    }
    again = _leading(info.forward_graph, {e.fwd_tensor for e in info.expected_inputs if e.is_activation}, known)
    inputs = [t for t in info.forward_graph.inputs if t in again.reads]
    return again, inputs + sorted(again.saved, key=lambda t: t.id)


def _leading(graph: popxl.Graph, wanted: Iterable[popxl.Tensor], known: set[popxl.Tensor]) -> RecomputedOps:
    """Ops of a graph that lead from its inputs and known tensors to wanted ones, within called graphs, too."""
    again = RecomputedOps([], set(), {*wanted})
    for op in reversed(graph.ops):
        read = again.reads.intersection(op.outputs)
        taken = read if has_effect(op) or op.modified else read & known
        again.saved.update(taken)
        if taken == read:
            continue
        if is_call(op) and not known.isdisjoint(op.outputs):
            (run,) = op.runs
            pairs = [*zip(run.outputs, op.outputs, strict=True)]
            within = _leading(
                run.graph, {i for i, t in pairs if t in read - taken}, {i for i, t in pairs if t in known}
            )
            again.saved.update(t for i, t in pairs if i in within.saved and t in known)
            again.reads.update(t for i, t in zip(run.inputs, run.operands, strict=True) if i in within.reads)
            again.ops.append((op, within))
        else:
            again.reads.update(op.inputs)
            again.ops.append((op, None))
    again.ops.reverse()
    return again


def _offloaded(t: popxl.Tensor) -> popxl.Tensor:
    """Have a forward graph hand out an activation in the memory of the host."""
    with t.graph, get_current_context().set(ipu_id=t.location[0], io_tile_set=bool(t.location[1])):
        copy = ops.offload(t)
    t.graph.add_output(copy)
    return copy


def _chosen(
    name: str, given: MemoryPolicy | Iterable[str | popxl.Tensor], known: Sequence[Activation], info: GradGraphInfo
) -> set[popxl.Tensor]:
    """The tensors of the forward graph that an argument names."""
    if isinstance(given, str):
        policy = next((policy for policy in get_args(MemoryPolicy) if policy == given and name == "keep"), None)
        if policy is None:
            raise ValueError(
                f"recompute_graph: `{name}` is {given!r}; expected "
                + (f"a policy, one of {', '.join(map(repr, get_args(MemoryPolicy)))}, or " if name == "keep" else "")
                + "a list of tensors and paths."
            )
        return {each.tensor for each in known if is_kept_by_policy(policy, each)}
    check_type(given, Iterable, f"recompute_graph: `{name}`", "a list of tensors and paths")
    chosen: set[popxl.Tensor] = set()
    tensors = {a.tensor for a in known} | {*info.forward_graph.inputs, *info.forward_graph.outputs}
    for each in given:
        if isinstance(each, popxl.Tensor):
            if each not in tensors:
                raise ValueError(
                    f"recompute_graph: {each!r} in `{name}` is not a tensor of {info.forward_graph.title}, the forward "
                    "graph, that the gradient needs. Name one of those that `activations_of` lists."
                )
            chosen.add(each)
            continue
        check_type(each, str, f"recompute_graph: each of `{name}`", "a tensor of the forward graph, or a path")
        found = {a.tensor for a in known if fnmatch.fnmatchcase(a.path, each) or fnmatch.fnmatchcase(a.name, each)}
        if not found:
            raise ValueError(matches_nothing(f"recompute_graph: `{name}`", [each], [a.path for a in known]))
        chosen |= found
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
    kept = [
        (t, expected.fwd_tensor, expected.connection_type)
        for t, expected in zip(grad_info.graph.inputs, grad_info.expected_inputs, strict=False)
        if not expected.is_activation or expected.fwd_tensor in forward.inputs
    ]
    missing: Iterable[popxl.Tensor] = {*forward.inputs} - {of for _, of, kind in kept if kind is Fwd}
    kept += [(t, t, Fwd) for t in sorted(missing, key=lambda t: t.name)]
    return {popxl.gcg().add_input_like(like): (of, kind) for like, of, kind in kept}


def _refuse_streams(forward: popxl.Graph) -> None:
    for graph in reachable(forward):
        for op in (part for each in graph.ops for part in each.parts):
            if op.kind.exchange == "stream":
                raise ValueError(
                    f"recompute_graph: {forward.title} runs {op!r} ({op.source}), which uses the stream "
                    f"`{op.attributes['stream'].tensor.name}`; run again, it would move on to the next element. Load "
                    "and store where the graph is called."
                )
