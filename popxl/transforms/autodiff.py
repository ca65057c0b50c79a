"""`autodiff`: gradient graphs by reverse-mode differentiation.

The forward graph is walked backwards once. Each op adds, by its own rule, ops to the gradient graph; the forward
tensors that a rule reads become inputs of the gradient graph (activations). Rules, and JAX's derivative of ops without
one, are in `popxl.transforms.op_gradient`. The result is printed, called, bound and differentiated like any other
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from popxl.base.arguments import check_type
from popxl.base.log import Logger
from popxl.base.source import warn_at
from popxl.context import get_current_context, with_known_caller
from popxl.core.aliasing import callees_first, has_effect, reachable, readers
from popxl.core.create import constant
from popxl.core.derivative import Derivative
from popxl.core.recording import Op
from popxl.core.recursion import nesting, raised_recursion_limit
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import is_call
from popxl.errors import PopxlError, UnusedGradientWarning
from popxl.graph import Graph
from popxl.ops.complex import conjugate
from popxl.ops.convert import cast_if_needed, copied_to_ipu, identity
from popxl.ops.elementwise import add_n
from popxl.ops.memory import available_after, offload, reload
from popxl.ops.reduce import sum as sum_
from popxl.ops.shape import last_layout, reshape
from popxl.transforms.grad_graph_info import (
    ExpectedConnection,
    ExpectedConnectionType,
    GradGraphInfo,
    make_grad_graph_info,
)
from popxl.transforms.op_gradient import Forward, gradients, passes
from popxl.values.shapes import flag

__all__ = ["ExpectedConnection", "ExpectedConnectionType", "GradGraphInfo", "autodiff", "make_grad_graph_info"]

_log = Logger("ir")


def autodiff(
    graph: Graph,
    grads_provided: Iterable[Tensor] | None = None,
    grads_required: Iterable[Tensor] | None = None,
    called_graphs_grad_info: Mapping[Graph, GradGraphInfo] | None = None,
    return_all_grad_graphs: bool = False,
    called_graphs_transform: Callable[[GradGraphInfo], GradGraphInfo] | None = None,
) -> Any:
    """The gradient graph of a graph: a new graph that computes vector-Jacobian products.

    Given gradients of the provided tensors, it returns for each required tensor `t` the sum of `gradient · ∂p/∂t` over
    the provided `p`. Gradients of complex tensors are PyTorch's: ∂L/∂x + i ∂L/∂y for z = x + iy. Forward tensors that
    it needs are further inputs; bind them with `info.inputs_dict(site)`. Those that are neither inputs nor outputs of
    `graph` are appended to its outputs, and to the results of every call of it that exists already.

    Args:
        graph: graph to differentiate. Nothing in it, or in its callees, may be modified in place.
        grads_provided: tensors of `graph` whose gradients the caller will give, in that order; the outputs by default.
        grads_required: tensors of `graph` whose gradients are wanted, in that order; the inputs by default.
        called_graphs_grad_info: gradient graphs to use for graphs that `graph` calls, instead of new ones.
        return_all_grad_graphs: whether to return the information of all graphs that were differentiated, and of the
            given ones.
        called_graphs_transform: applied to the gradient of each called graph that is differentiated on the way, before
            the gradient of its caller is made; the caller uses the result.

    Returns:
        The `GradGraphInfo`; or a dict from graphs to theirs, if `return_all_grad_graphs`.

    Raises:
        PopxlError: if nothing is required; if a tensor is not in `graph`; if a required tensor has no gradient (no
            provided tensor depends on it in a differentiable way: it is not zero, it does not exist); if the graph
            contains a modifying op.

    Example:
        >>> graph = ir.create_graph(lambda x, w: x @ w, x, w)
        >>> info = popxl.transforms.autodiff(graph)
        >>> site = ops.call_with_info(graph, x, w)
        >>> dx, dw = ops.call(info.graph, dy, inputs_dict=info.inputs_dict(site))
    """
    check_type(graph, Graph, "autodiff: `graph`", "a Graph")
    return_all_grad_graphs = flag(return_all_grad_graphs, "autodiff: `return_all_grad_graphs`")
    for name, argument in (("grads_provided", grads_provided), ("grads_required", grads_required)):
        if argument is not None:
            check_type(argument, Iterable, f"autodiff: `{name}`", "a list of tensors")
    if called_graphs_grad_info is not None:
        expected = "a mapping from graphs to their GradGraphInfo"
        check_type(called_graphs_grad_info, Mapping, "autodiff: `called_graphs_grad_info`", expected)
    infos: Infos = dict(called_graphs_grad_info or {})
    if graph not in infos:
        required = list(graph.inputs if grads_required is None else grads_required)
        provided = list(graph.outputs if grads_provided is None else grads_provided)
        _check_tensors(graph, provided, required)
        _refuse_modifying_ops(graph, infos)
        with graph.ir.undone_on_failure(), raised_recursion_limit(nesting(graph)):
            _bring_calls_up_to_date(graph)
            needed, followed = _needed_by_callers(graph, provided, infos), _followed_by_callers(graph, required, infos)
            _Differentiation(graph, provided, required, infos, needed, followed, called_graphs_transform).run()
    known_grads = {forward: info for forward, info in infos.items() if info is not None}
    return known_grads if return_all_grad_graphs else known_grads[graph]


Infos = dict[Graph, GradGraphInfo | None]
"""Gradient graphs by forward graph; `None` for a graph without gradient flow."""


def _check_tensors(graph: Graph, provided: list[Any], required: list[Any]) -> None:
    """Raise `PopxlError` without required gradients, or for tensors of other graphs."""
    if not required:
        raise PopxlError(f"autodiff: no gradients are required of {graph.title}; name some in `grads_required`.")
    for name, tensors in (("grads_provided", provided), ("grads_required", required)):
        for t in tensors:
            if not isinstance(t, Tensor) or t.graph_ref is not graph.ref:
                raise PopxlError(
                    f"autodiff: {t!r} in `{name}` is not a tensor of {graph.title}. Name tensors of the graph "
                    "itself, such as those of `graph.inputs` and `graph.outputs`."
                )
    if inner := [t.name for t in provided if t not in graph.outputs]:
        _log.warn(f"autodiff: {', '.join(inner)} of `grads_provided` are no outputs of {graph.title}.")


def _bring_calls_up_to_date(graph: Graph) -> None:
    """Give calls the outputs that the user added to their graph later: those that autodiff adds come after them."""
    for called in reachable(graph):
        for op in called.call_sites:
            if is_call(op):
                for t in called.outputs[len(op.outputs) :]:
                    op.add_result_for(t)


def _refuse_modifying_ops(root: Graph, infos: Infos) -> None:
    for graph in reversed(callees_first(root, infos)):
        for op in graph.ops:
            if op.modified:
                raise PopxlError(
                    f"The graph {graph.id} contains a modifying op: {op.name} ({op.source}). Autodiff cannot be used "
                    "on graphs with inplace modifying ops."
                )


def _needed_by_callers(root: Graph, provided: list[Tensor], infos: Infos) -> dict[Graph, list[Tensor]]:
    """Outputs, per graph to differentiate, whose gradients some call provides."""
    needed: dict[Graph, list[Tensor]] = {root: provided}
    for graph in reversed(callees_first(root, infos)):
        leads = _leading_to(graph, needed.get(graph, ()))
        for op in graph.ops:
            for run in op.runs:
                needed_outputs = needed.setdefault(run.graph, [])
                needed_outputs += [t for t in run.trait.returns(op, run.graph, leads) if t not in needed_outputs]
    return needed


def _followed_by_callers(root: Graph, required: list[Tensor], infos: Infos) -> dict[Graph, set[Tensor]]:
    """Inputs, per graph with a rule of its own, that depend on a required tensor in some call.

    A rule may refuse the gradients of others: that of `jax.custom_vjp` refuses values that its function closes over.
    """
    graphs = callees_first(root, infos)
    if all(graph.derivative is None for graph in graphs):
        return {}
    followed: dict[Graph, set[Tensor]] = {root: {*required}}
    for graph in reversed(graphs):
        follows = _following(graph, followed.get(graph, ()))
        for op in graph.ops:
            for run in op.runs:
                inputs = {inner for inner, t in run.bindings if t in follows}
                carried = run.inputs[: run.carried] if inputs else ()
                followed.setdefault(run.graph, set()).update(inputs, carried)
    return followed


@dataclass(eq=False)
class _Differentiation:
    """Differentiation of one graph.

    Attributes:
        provided, required: tensors of the graph whose gradients are given, and whose gradients are wanted.
        infos: known gradient graphs; this one is added.
        needed: for each called graph, the outputs whose gradients some call will provide.
        followed: for each called graph with a rule of its own, the inputs that depend on required tensors.
        transform: function applied to the gradients of called graphs.
        complete: whether each required gradient must exist. Otherwise missing ones are left out.
    """

    forward_graph: Graph
    provided: list[Tensor]
    required: list[Tensor]
    infos: Infos
    needed: dict[Graph, list[Tensor]]
    followed: dict[Graph, set[Tensor]]
    transform: Callable[[GradGraphInfo], GradGraphInfo] | None
    complete: bool = True

    def __post_init__(self) -> None:
        graph = self.forward_graph
        self.follows = _following(graph, self.required)
        self.contributions: dict[Tensor, list[Tensor]] = {}
        self.gradients: dict[Tensor, Tensor] = {}
        self.renamed: set[Tensor] = set()
        self.activations: dict[Tensor, Tensor] = {}
        self.copies: dict[Tensor, Tensor] = {}
        # Where some op cannot return more than it does, as a conditional, values on the way are computed again.
        self.recomputes = graph.keeps is not None or not all(site.gains for site in graph.call_sites)
        self.recomputed: dict[Op, Op] = {}
        self.delayed: dict[Tensor, Tensor] = {}

    def run(self) -> None:
        """Build the gradient graph and its `GradGraphInfo`. Reports missing gradients."""
        ir = self.forward_graph.ir
        self.graph = ir.create_gradient_graph(self.forward_graph)
        with get_current_context().set(scope_prefix=""), self.graph:
            outputs = self._build()
        if not outputs:
            ir.remove_graph(self.graph)
            self.infos[self.forward_graph] = None
            return
        required = [t for t in self.required if t in outputs]
        for t in required:
            self.graph.add_output(outputs[t])
        self._connect(required)

    def _build(self) -> dict[Tensor, Tensor]:
        """Fill the gradient graph. Returns the gradients, by the required tensors."""
        for t in self.provided:
            seed = self.graph.add_input(t.spec, f"Gradient___{t.name}", path=f"Gradient___{t.path}")
            self._contribute(t, conjugate(seed, _name_within(t)))
        derivative = self.forward_graph.derivative
        by_rule = set() if derivative is None else _computing(self.forward_graph, derivative.results)
        for op in reversed(self.forward_graph.ops):
            if op not in by_rule:
                self._follow_op(op)
        if derivative is not None:
            self._follow_rule(derivative)
        by_tensor = {t: g for t in self.required if (g := self.gradient(t)) is not None}
        missing = [t for t in self.required if t not in by_tensor]
        if missing and self.complete:
            remedy = "Leave it out of `grads_required`." if self.forward_graph.outputs else "The graph has no outputs."
            raise PopxlError(
                f"Unable to provide required gradient output of {', '.join(map(repr, missing))} in "
                f"{self.forward_graph.title}: no provided tensor "
                f"({', '.join(t.name for t in self.provided) or 'none'}) "
                f"depends on it in a differentiable way. {remedy}"
            )
        return {t: self._named(t, conjugate(g, f"Gradient___{t.name}")) for t, g in by_tensor.items()}

    def _follow_op(self, op: Op) -> None:
        """Differentiate an op, if it leads from required tensors to results with gradients."""
        gs = tuple(self.gradient(t) for t in op.outputs)
        if all(g is None for g in gs) or self.follows.isdisjoint(op.inputs):
            return
        for callee in op.called_graphs:
            if callee not in self.infos and self.needed[callee]:
                self._of_callee(callee, list(op.kind.runs.sought(callee)))  # type: ignore[union-attr]
        forward = Forward(op, self.follows, self.counterpart, self.infos.get, self._counterpart_in_last_layout)
        with get_current_context().located_at(op.ipu, op.io_tiles):
            for i, contribution in gradients(forward, gs).items():
                self._contribute(op.inputs[i], contribution)

    def _follow_rule(self, derivative: Derivative) -> None:
        """Differentiate what the graph returns by its own rule."""
        graph = self.forward_graph
        results = [(k, t) for k, t in enumerate(graph.outputs[: derivative.results]) if t.dtype.is_inexact]
        gs = {k: g for k, t in results if (g := self.gradient(t)) is not None}
        wanted = tuple(i for i, t in enumerate(graph.inputs) if t in self.follows and t.dtype.is_inexact)
        for _, t in results:
            self.gradients.pop(t, None)
        if gs and wanted:
            gradients = derivative.gradients(graph, wanted, gs, self.counterpart)
            for i, gradient in zip(wanted, gradients, strict=True):
                self._contribute(graph.inputs[i], gradient)

    def _named(self, t: Tensor, gradient: Tensor) -> Tensor:
        """A gradient under the name of its tensor; one that was passed through still has another's."""
        name = f"Gradient___{t.name}"
        is_named = name in (gradient.name, gradient.name.rpartition("__t")[0])
        with get_current_context().located_at(*gradient.location):
            named = gradient if is_named else identity(gradient, name)
        self.graph.show_as({named: f"Gradient___{t.path}"})
        return named

    def _connect(self, outputs: list[Tensor]) -> None:
        """Order the activations, make them outputs of the forward graph where needed, and write all this down."""
        count = len(self.provided)
        forward = {copy: t for t, copy in self.activations.items()}
        self.graph.sort_inputs(count, lambda t: forward[t].id)
        activations = [forward[t] for t in self.graph.inputs[count:]]
        bound = {*self.forward_graph.inputs, *self.forward_graph.outputs}
        for t in activations:
            if t not in bound:
                self.forward_graph.add_output(t)
        reads = {t for op in self.graph.ops for t in op.inputs} | set(self.graph.outputs)
        if unused := [t.name for t in self.graph.inputs[:count] if self.complete and t not in reads]:
            _log.warn(f"autodiff: {', '.join(unused)} are not used by {self.graph.title}.")
        self.infos[self.forward_graph] = make_grad_graph_info(
            self.forward_graph,
            self.graph,
            [(t, ExpectedConnectionType.FwdGrad) for t in self.provided]
            + [(t, ExpectedConnectionType.Fwd) for t in activations],
            outputs,
        )

    @cached_property
    def _independent(self) -> set[Tensor]:
        """Tensors that depend on no input, such as masks: the gradient computes them again, so that none is kept."""
        independent: set[Tensor] = set()
        for op in self.forward_graph.ops:
            kind = op.kind
            is_pure = not (kind.is_carried_out_by_others or kind.draws or kind.overwrites)
            if is_pure and all(isinstance(t, Constant) or t in independent for t in op.inputs):
                independent.update(op.outputs)
        return independent

    @cached_property
    def _readers(self) -> Mapping[Tensor, Sequence[Op]]:
        return readers(self.forward_graph)

    def _counterpart_in_last_layout(self, t: Tensor) -> Tensor:
        last, undone = last_layout(t, self._readers)
        return undone(self.counterpart(last))

    def _of_callee(self, callee: Graph, required: list[Tensor]) -> None:
        """Differentiate a called graph for those tensors that have gradients, and transform its gradient."""
        if not callee.differentiable:
            raise PopxlError(
                f"autodiff: {callee.title}, which {self.forward_graph.title} calls, has been marked as unsafe to "
                "autodiff. Pass its gradient graph in `called_graphs_grad_info`."
            )
        if callee.gradient_given_at is not None:
            warn_at(
                callee.gradient_given_at,
                f"autodiff: the gradient that is given for {callee.title} is not used: {self.forward_graph.title}, "
                "which calls it, is differentiated without. Whatever differentiates has to know: pass it in "
                "`called_graphs_grad_info`, differentiate the graph that `Module.create_graph` returned rather than "
                "its `graph`, and assign the module that knows it to an attribute of the one that uses it.",
                UnusedGradientWarning,
            )
        if callee.derivative is not None:
            required = [t for t in required if t in self.followed[callee]]
        known = self.infos, self.needed, self.followed, self.transform
        with with_known_caller():
            _Differentiation(callee, self.needed[callee], required, *known, complete=False).run()
        info = self.infos[callee]
        if self.transform is not None and info is not None:
            self.infos[callee] = self.transform(info)

    # Interface for rules --------------------------------------------------------------------------------------------

    def gradient(self, t: Tensor) -> Tensor | None:
        """The gradient of a forward tensor, all contributions summed; `None` if there are none so far."""
        terms = self.contributions.pop(t, None)
        if terms is not None:
            if t in self.gradients:
                terms.insert(0, self.gradients[t])
            beside = next((g for g in terms if g.location == t.location), terms[0])
            with get_current_context().located_at(*beside.location):
                total = terms[0] if len(terms) == 1 else add_n(*(copied_to_ipu(g, beside.location[0]) for g in terms))
            if len(terms) > 1 or self._has_no_name(total):
                self.graph.rename(total, _name_within(t))
                self.graph.show_as({total: f"Gradient___{t.path}"})
                self.renamed.add(total)
            self.gradients[t] = total
        return self.gradients.get(t)

    def _has_no_name(self, gradient: Tensor) -> bool:
        """Whether a gradient computed here lacks a name, or has a callee's tensor name."""
        producer = gradient.producer
        if producer is None or gradient in self.renamed:
            return False
        return bool(producer.called_graphs) or not gradient.name.startswith("Gradient___")

    def _contribute(self, t: Tensor, gradient: Tensor) -> None:
        term = cast_if_needed(_unbroadcast(gradient, t.shape), t.dtype)
        if term.meta_shape and not t.meta_shape:  # of a product with a shard, say; `t` itself is none
            term = reshape(term, t.shape)
        self.contributions.setdefault(t, []).append(term)

    def counterpart(self, t: Tensor) -> Tensor:
        """Gradient-graph counterpart of a forward tensor: activation, reloaded from the host or not, or constant."""
        if isinstance(t, Constant):
            if t not in self.copies:
                self.copies[t] = constant(t.data, t.dtype, t.name)
            return self.copies[t]
        if (self.recomputes or t in self._independent) and not self._is_caller_visible(t):
            return self._computed_again(t)
        if t in self.forward_graph.offloads:
            if t not in self.copies:
                self.copies[t] = self._reloaded(t)
            return self.copies[t]
        if t not in self.activations:
            self.activations[t] = self.graph.add_input_like(t)
        return self.activations[t]

    def _reloaded(self, t: Tensor) -> Tensor:
        """An activation that the forward graph offloads, copied back once the gradients are there."""
        with get_current_context().located_at(*t.location):
            with self.forward_graph:
                away = offload(t)
            self.activations[away] = self.graph.add_input_like(away)
            return reload(available_after(self.activations[away], self.graph.inputs[0]))

    def _is_caller_visible(self, t: Tensor) -> bool:
        """Whether callers of the forward graph have a tensor, or keep it."""
        kept = self.forward_graph.keeps
        return t in self.forward_graph.inputs or t in (self.forward_graph.outputs if kept is None else kept)

    def _computed_again(self, t: Tensor) -> Tensor:
        """A forward tensor, made in the gradient graph by the same ops."""
        producer = cast(Op, t.producer)
        if producer not in self.recomputed:
            self._compute_again(t)
        return self.recomputed[producer].outputs[producer.outputs.index(t)]

    def _compute_again(self, t: Tensor) -> None:
        missing = {t}
        ops = []
        for op in reversed(self.forward_graph.ops):
            if op not in self.recomputed and not missing.isdisjoint(op.outputs):
                ops.append(op)
                missing.update(u for u in op.inputs if not self._is_caller_visible(u))
        for op in reversed(ops):
            if has_effect(op):
                raise PopxlError(
                    f"autodiff: the gradient of {self.forward_graph.title} reads `{t.name}`, which depends on "
                    f"{op.name} ({op.source}). What a branch of a conditional computes is computed again for its "
                    "gradient, and this op cannot be carried out twice: move it out of the branch, or return what it "
                    "makes from both branches."
                )
            with get_current_context().located_at(op.ipu, op.io_tiles):
                self.recomputed[op] = op.clone(self._operands_again(op))

    def _operands_again(self, op: Op) -> list[Tensor]:
        """Operands of a recomputed op. With a policy, one operand is delayed until the gradients arrive."""
        operands = [self.counterpart(u) for u in op.inputs]
        visible = [i for i, u in enumerate(op.inputs) if not isinstance(u, Constant) and self._is_caller_visible(u)]
        if (
            self.forward_graph.keeps is not None
            and visible
            and not any(u.producer in self.recomputed for u in op.inputs)
        ):
            t = operands[visible[0]]
            if t not in self.delayed:
                self.delayed[t] = available_after(t, self.graph.inputs[0])
            operands[visible[0]] = self.delayed[t]
        return operands


def leading_to(graph: Graph, provided: Iterable[Tensor]) -> set[Tensor]:
    """Tensors with differentiable paths to provided tensors, also through called graphs: all candidates for required
    gradients."""
    with raised_recursion_limit(nesting(graph)):
        return _leading_through_calls(graph, frozenset(provided), {})


def _leading_through_calls(
    graph: Graph, provided: frozenset[Tensor], known: dict[tuple[Graph, frozenset[Tensor]], set[Tensor]]
) -> set[Tensor]:
    """Implementation of `leading_to`; `known` caches results by graph and provided outputs, across calls."""
    if (graph, provided) in known:
        return known[graph, provided]
    leads = set(provided)
    for op in reversed(graph.ops):
        if leads.isdisjoint(op.outputs):
            continue
        inputs = {t for i, t in enumerate(op.inputs) if passes(op, i)}
        if is_call(op) and op.called_graphs[0].derivative is None:
            (run,) = op.runs
            leading = frozenset(inner for inner, t in zip(run.outputs, op.outputs, strict=False) if t in leads)
            within = _leading_through_calls(run.graph, leading, known)
            inputs &= {t for inner, t in run.bindings if inner in within}
        leads |= inputs
    known[graph, provided] = leads
    return leads


def _leading_to(graph: Graph, provided: Iterable[Tensor]) -> set[Tensor]:
    """Tensors as in `leading_to`, under the assumption that all outputs of a called graph depend on all its inputs."""
    leads = set(provided)
    for op in reversed(graph.ops):
        if not leads.isdisjoint(op.outputs):
            leads.update(t for i, t in enumerate(op.inputs) if passes(op, i))
    return leads


def _computing(graph: Graph, count: int) -> set[Op]:
    """The ops that compute the first outputs of a graph."""
    needed, ops = {*graph.outputs[:count]}, set[Op]()
    for op in reversed(graph.ops):
        if not needed.isdisjoint(op.outputs):
            ops.add(op)
            needed.update(op.inputs)
    return ops


def _following(graph: Graph, required: Iterable[Tensor]) -> set[Tensor]:
    """The tensors that depend on some required tensor."""
    follows = set(required)
    for op in graph.ops:
        if any(t in follows and passes(op, i) for i, t in enumerate(op.inputs)):
            follows.update(op.outputs)
    return follows


def _name_within(t: Tensor) -> str:
    """Name of a tensor's gradient; complex tensors use its conjugate."""
    return f"Gradient___{t.name}{'__conj' if t.dtype.is_complex else ''}"


def _unbroadcast(gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Sum a gradient over the dimensions that broadcasting added or repeated."""
    if gradient.shape == shape:
        return gradient
    added = gradient.rank - len(shape)
    repeated = [d for d in range(added, gradient.rank) if gradient.shape[d] != shape[d - added]]
    axes = [*range(added), *repeated]
    summed = sum_(gradient, axes) if axes else gradient
    return summed if summed.shape == shape else reshape(summed, shape)
