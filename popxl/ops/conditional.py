"""Running one of two graphs, by a condition that is evaluated at run time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from popxl import dtypes
from popxl.context import get_current_context
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Tensor, TensorLike
from popxl.core.traits import Runs
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ops.call import (
    CallSiteInfo,
    bind_inputs,
    call_gradient_graph,
    check_all_seeds_used,
    check_callable,
    check_fit,
    grad_info_for_call,
    lowered_by_runtime,
    relevant_outputs,
    seed_or_zeros,
    seeds_of,
)
from popxl.ops.elementwise import add_n
from popxl.ops.host import init
from popxl.ops.shape import reshape
from popxl.values.spec import TensorSpec, brief

__all__ = ["ConditionalSiteInfo", "conditional", "conditional_with_info"]

Inputs = Iterable[TensorLike | Iterable[TensorLike]]


class ConditionalSiteInfo(CallSiteInfo):
    """The call site of a conditional.

    The inputs of the op are the condition, then those of the then branch, then those of the else branch.
    """

    @property
    def called_graph(self) -> tuple[Graph, Graph]:  # type: ignore[override]  # two, where a call has one
        """The branches: `(then, else)`."""
        then_branch, else_branch = self.op.called_graphs
        return then_branch, else_branch

    def _first(self, then_branch: bool) -> int:
        """The parent index of the first input of a branch."""
        return 1 if then_branch else 1 + len(self.called_graph[0].inputs)

    def graph_to_parent_input_index(self, idx: int, then_branch: bool = True) -> int:
        """The parent index of a branch input. Raises `IndexError` out of range."""
        graph = self.called_graph[not then_branch]
        if not 0 <= idx < len(graph.inputs):
            raise IndexError(f"{graph.title} has no input {idx}; it has {len(graph.inputs)}.")
        return self._first(then_branch) + idx

    def is_parent_index_in_then_branch(self, idx: int) -> bool:
        """Whether an op input belongs to the then branch. Raises `IndexError` for the condition, and out of range."""
        if not 1 <= idx < len(self.op.inputs):
            raise IndexError(
                f"No branch has the input {idx} of this conditional; those of the branches are 1 to "
                f"{len(self.op.inputs) - 1}."
            )
        return idx < self._first(False)

    def parent_to_graph_input_index(self, idx: int) -> int:
        """The branch index of an op input. Raises `IndexError` for the condition, and out of range."""
        return idx - self._first(self.is_parent_index_in_then_branch(idx))

    def graph_to_parent_output_index(self, idx: int, then_branch: bool = True) -> int:
        """The parent index of a branch output (both are equal). Raises `IndexError` out of range."""
        self.parent_output(idx)
        return idx

    def parent_to_graph_output_index(self, idx: int, then_branch: bool = True) -> int:
        """The branch index of an op output (both are equal). Raises `IndexError` out of range."""
        self.parent_output(idx)
        return idx

    def graph_to_parent(self, graph_tensor: Tensor) -> Tensor:
        """The caller's tensor for a branch input or output; then branch first.

        Raises:
            ValueError: if it is neither.
        """
        for then_branch in (True, False):
            parents = self.parents(then_branch)
            if graph_tensor in parents:
                return parents[graph_tensor]
        raise ValueError(
            f"{graph_tensor!r} is neither an input nor an output of {' or '.join(g.title for g in self.called_graph)}."
        )

    def parents(self, then_branch: bool = True) -> dict[Tensor, Tensor]:
        """Map inputs and outputs of a branch to caller tensors."""
        graph, first = self.called_graph[not then_branch], self._first(then_branch)
        results = dict(zip(graph.outputs, self.op.outputs, strict=False))
        return results | dict(zip(graph.inputs, self.op.inputs[first:], strict=False))

    def parent_to_graph(self, parent_tensor: Tensor) -> Tensor:
        """The first branch input bound to a caller tensor.

        Raises:
            ValueError: if the tensor is not an input of this conditional.
            IndexError: if `parent_tensor` is the condition.
        """
        if parent_tensor not in self.op.inputs:
            raise ValueError(f"{parent_tensor!r} is not an input of this conditional.")
        idx = self.op.inputs.index(parent_tensor)
        then_branch = self.is_parent_index_in_then_branch(idx)
        return self.called_graph[not then_branch].inputs[self.parent_to_graph_input_index(idx)]

    def set_parent_input_modified(self, parent_tensor: Tensor, infer_modified_regions: bool = True) -> None:
        """A conditional writes nothing back: `NotImplementedError`."""
        raise NotImplementedError(
            "A branch of a conditional cannot change a tensor of the caller; return the new value from both branches."
        )


def _results(cond: Any, *inputs: Tensor, then_branch: Graph, else_branch: Graph) -> list[TensorSpec]:
    """Specs of the results, after checking that the condition, the inputs and the two branches fit."""
    if cond.dtype is not dtypes.bool or cond.nelms != 1:
        raise PopxlError(f"the condition has to be a bool of one element; `{cond.name}` is {brief(cond)}.")
    if any(t.by_ref for branch in (then_branch, else_branch) for t in branch.inputs):
        raise PopxlError("a branch takes an input by reference, and cannot change a tensor of the caller.")
    count = len(then_branch.inputs)
    check_fit(then_branch, inputs[:count], then_branch.inputs)
    check_fit(else_branch, inputs[count:], else_branch.inputs)
    for k, (t, u) in enumerate(zip(then_branch.outputs, else_branch.outputs, strict=True)):
        if t.spec.to_tuple() != u.spec.to_tuple():
            raise PopxlError(
                f"output {k} is {brief(t)} in {then_branch.title} and {brief(u)} in {else_branch.title}; the "
                "branches have to return the same shapes and dtypes."
            )
    return [t.spec for t in then_branch.outputs]


def _gradient(forward: Any, gs: tuple[Tensor | None, ...]) -> dict[int, Tensor]:
    """Differentiate a conditional: a conditional over branch gradients, with the same condition.

    It returns a gradient for each tensor bound to an input with a gradient in either branch. A branch without this
    input returns zeros.
    """
    op: Op = forward.op
    site = ConditionalSiteInfo(op)
    infos = [grad_info_for_call(forward, graph) for graph in op.called_graphs]
    bound = [site.parents(then_branch) for then_branch in (True, False)]
    candidates = [parents[t] for info, parents in zip(infos, bound, strict=True) if info for t in info.outputs]
    wanted = [t for t in dict.fromkeys(candidates) if t in forward.follows]
    if not wanted:
        return {}
    branches = []
    for graph, info, parents in zip(op.called_graphs, infos, bound, strict=True):
        branches.append(_gradient_branch(graph, info, parents, wanted, gs, forward.read))
    (then_branch, then_inputs), (else_branch, else_inputs) = branches
    results = conditional(forward.read(op.inputs[0]), then_branch, else_branch, then_inputs, else_inputs)
    return dict(zip(map(op.inputs.index, wanted), results, strict=True))


def _gradient_branch(
    graph: Graph, info: Any, parents: Mapping[Tensor, Tensor], wanted: Sequence[Tensor], gs: Any, read: Any
) -> tuple[Graph, list[Tensor]]:
    """Build a branch that returns requested caller gradients; also return its input bindings."""
    expected = () if info is None else info.expected_inputs
    seeds = {} if info is None else seeds_of(graph, gs)
    # Tensors from the caller, read there; one tensor may be several outputs, and the first gets its whole gradient.
    values = [read(parents[e.fwd_tensor]) if e.is_activation else seeds.pop(e.fwd_tensor, None) for e in expected]
    branch = graph.ir.create_empty_graph(f"{graph.id}_bwd__branch")
    with branch:
        operands = [
            seed_or_zeros(None, t) if value is None else branch.add_input(value.spec, t.name, path=t.path)
            for t, value in zip((e.fwd_tensor for e in expected), values, strict=True)
        ]
        by_tensor: dict[Tensor, list[Tensor]] = {}
        if info is not None:
            check_all_seeds_used(seeds, info)
            for t, g in call_gradient_graph(info, operands).items():
                by_tensor.setdefault(parents[t], []).append(g)
        for t in wanted:
            terms = by_tensor.get(t, [])
            gradient = add_n(*terms) if len(terms) > 1 else terms[0] if terms else init(t.shape, t.dtype)
            # The zeros of the other branch have no meta-shape.
            branch.add_output(reshape(gradient, t.shape) if gradient.meta_shape else gradient)
    return branch, [value for value in values if value is not None]


conditional_kind = OpKind(
    "If",
    lambda cond, *inputs, **branches: lowered_by_runtime(),
    shape=_results,
    gradient=_gradient,
    traits=[Runs(("then_branch", "else_branch"), returns=relevant_outputs)],
)


def conditional(
    cond: Tensor,
    then_branch: Graph,
    else_branch: Graph,
    then_inputs: Inputs | None = None,
    else_inputs: Inputs | None = None,
    then_inputs_dict: Mapping[Tensor, TensorLike] | None = None,
    else_inputs_dict: Mapping[Tensor, TensorLike] | None = None,
) -> tuple[Tensor, ...]:
    """Run one of two graphs: `then_branch` if `cond` is true, else `else_branch`.

    Only the branch that runs loads, stores and prints. Inputs are passed by value. Gradients flow to the inputs of the
    branch that ran; intermediate values are recomputed for that.

    Args:
        cond: bool tensor of one element.
        then_branch, else_branch: graphs with outputs of the same shapes and dtypes. Their inputs may differ.
        then_inputs, else_inputs: values for the inputs of each branch, in order; iterables among them are flattened by
            one level. A value that is not a tensor becomes a constant.
        then_inputs_dict, else_inputs_dict: values for inputs of each branch, by the input's tensor.

    Returns:
        One new tensor for each output of the branches.

    Raises:
        ValueError: if the branches do not have the same number of outputs; if inputs are missing, too many, or bound
            twice; for a tensor of another graph.
        TypeError: for a value that cannot become a constant.
        NotImplementedError: if a branch takes an input by reference.
        PopxlError: if the condition, an input or the outputs of the branches do not fit.

    See also: `jax.lax.cond`.

    Example:
        >>> grow, shrink = ir.create_graph(lambda x: x * 4, x), ir.create_graph(lambda x: x - 1, x)
        >>> (y,) = ops.conditional(flag, grow, shrink, [x], [x])
    """
    return conditional_with_info(
        cond, then_branch, else_branch, then_inputs, else_inputs, then_inputs_dict, else_inputs_dict
    ).outputs


def conditional_with_info(
    cond: Tensor,
    then_branch: Graph,
    else_branch: Graph,
    then_inputs: Inputs | None = None,
    else_inputs: Inputs | None = None,
    then_inputs_dict: Mapping[Tensor, TensorLike] | None = None,
    else_inputs_dict: Mapping[Tensor, TensorLike] | None = None,
    check_inputs: bool = True,
) -> ConditionalSiteInfo:
    """Add a conditional like `conditional`; returns the record of the call site.

    Args:
        check_inputs: report inputs that nothing is bound to as `ValueError`; they are an `IndexError` otherwise.

    Example:
        >>> grow, shrink = ir.create_graph(lambda x: x * 4, x), ir.create_graph(lambda x: x - 1, x)
        >>> site = ops.conditional_with_info(flag, grow, shrink, [x], [x])
        >>> site.graph_to_parent(grow.inputs[0]) == x
        True
    """
    branches = (then_branch, else_branch)
    for name, graph in zip(("then_branch", "else_branch"), branches, strict=True):
        check_callable(graph, get_current_context().graph, f"conditional: `{name}`")
        by_ref = [t.name for t in graph.inputs if t.by_ref]
        if by_ref:
            raise NotImplementedError(
                f"conditional: {graph.title} takes {', '.join(by_ref)} by reference, and a branch cannot change a "
                "tensor of the caller. Return the new value from both branches."
            )
    if len(then_branch.outputs) != len(else_branch.outputs):
        raise ValueError(
            f"conditional: {then_branch.title} has {len(then_branch.outputs)} outputs and {else_branch.title} "
            f"{len(else_branch.outputs)}; the branches have to return the same number."
        )
    bound = []
    for which, graph, inputs, by_tensor in (
        ("then", then_branch, then_inputs, then_inputs_dict),
        ("else", else_branch, else_inputs, else_inputs_dict),
    ):
        if isinstance(inputs, Tensor):
            raise TypeError(f"conditional: `{which}_inputs` is an iterable of values; write [{inputs.name}].")
        values = () if inputs is None else inputs
        bound.append(bind_inputs(graph, values, by_tensor, check_inputs, f"{which}_branch"))
    names = [f"{t.name}_or_{u.name}" for t, u in zip(then_branch.outputs, else_branch.outputs, strict=True)]
    site = ConditionalSiteInfo(
        conditional_kind.record(
            cond, *bound[0], *bound[1], then_branch=then_branch, else_branch=else_branch, results=names
        )
    )
    for graph, operands in zip(branches, bound, strict=True):
        for t, wanted in zip(operands, graph.inputs, strict=True):
            wanted.bound_to(t)
    return site
