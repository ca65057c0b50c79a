"""Calls of a graph from another: `call`, and the record of a call site.

A call copies its inputs into the graph, runs it, and copies the results out. Only inputs passed by reference are copied
back. Compilation of a graph once for all its calls is in `runtime.lowering.lower`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from popxl.base.arguments import check_type
from popxl.context import get_current_context
from popxl.core.aliasing import reachable, written_inputs
from popxl.core.create import constant, warn_of_narrowed
from popxl.core.declaration import OpKind
from popxl.core.recording import Op, foreign_tensor
from popxl.core.tensor import Tensor, TensorLike, Variable
from popxl.core.traits import Overwrites, Runs
from popxl.errors import PopxlError, PopxlInternalError
from popxl.fp8_utils import as_array
from popxl.graph import Graph
from popxl.ops.elementwise import add_n
from popxl.ops.host import init
from popxl.utils import table_to_string, to_numpy
from popxl.values.spec import TensorSpec, brief

__all__ = ["CallSiteInfo", "call", "call_with_info"]


class CallSiteInfo:
    """A call site: one call or repeat of a graph, with the mapping between caller tensors and graph tensors.

    A live view of the op. "Parent" means the calling graph; a parent index is a position among the inputs or outputs
    of the op, a graph index one among those of the called graph.

    Example:
        >>> site = ops.call_with_info(graph, x, w)
        >>> site.graph_to_parent(graph.inputs[1]) == w
        True
    """

    # Positions of the user's inputs and outputs within the called graph's.
    _first_input = 0
    _first_output = 0

    def __init__(self, subgraph_op: Op) -> None:
        self.op = subgraph_op

    @property
    def called_graph(self) -> Graph:
        """The graph that is called."""
        return self.op.called_graphs[0]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Caller tensors bound to graph inputs, in graph order."""
        return self.op.inputs

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Caller results, in graph output order."""
        return self.op.outputs

    def parent_input(self, idx: int) -> Tensor:
        """The op input at a parent index. Raises `IndexError` out of range."""
        return _tensor_at(self.op.inputs, idx, "input", self._first_input)

    def parent_output(self, idx: int) -> Tensor:
        """The op output at a parent index. Raises `IndexError` out of range."""
        return _tensor_at(self.op.outputs, idx, "output")

    def graph_to_parent_input_index(self, idx: int) -> int:
        """The parent index of a graph input."""
        return idx

    def parent_to_graph_input_index(self, idx: int) -> int:
        """Convert an op input index to a graph input index."""
        return idx

    def graph_to_parent_output_index(self, idx: int) -> int:
        """The parent index of a graph output."""
        return idx - self._first_output

    def parent_to_graph_output_index(self, idx: int) -> int:
        """Convert an op output index to a graph output index."""
        return idx + self._first_output

    def graph_to_parent(self, graph_tensor: Tensor) -> Tensor:
        """The caller's tensor for a graph input or output; inputs take precedence.

        Raises:
            ValueError: if it is neither.
        """
        parents = self.parents()
        if graph_tensor not in parents:
            raise ValueError(f"{graph_tensor!r} is neither an input nor an output of {self.called_graph.title}.")
        return parents[graph_tensor]

    def parents(self) -> dict[Tensor, Tensor]:
        """Map graph inputs and outputs to caller tensors; see `graph_to_parent`."""
        graph = self.called_graph
        caller_of: dict[Tensor, Tensor] = {}
        for t, result in zip(graph.outputs[self._first_output :], self.op.outputs, strict=False):
            caller_of.setdefault(t, result)
        return caller_of | dict(zip(graph.inputs[self._first_input :], self.op.inputs, strict=False))

    def parent_to_graph(self, parent_tensor: Tensor) -> Tensor:
        """The first graph input bound to a caller tensor.

        Raises:
            ValueError: if the tensor is not an input of this call.
        """
        if parent_tensor not in self.op.inputs:
            raise ValueError(f"{parent_tensor!r} is not an input of this call of {self.called_graph.title}.")
        return self.called_graph.inputs[self.op.inputs.index(parent_tensor) + self._first_input]

    def set_parent_input_modified(self, parent_tensor: Tensor, infer_modified_regions: bool = False) -> None:
        """Copy the final content of a graph input back to the caller's tensor, at this call.

        Args:
            parent_tensor: an input of this call.
            infer_modified_regions: whether to mark it only if the graph changes the input. The numbers are the same.

        Raises:
            PopxlInternalError: if the tensor is not an input of this call, or is bound more than once.
        """
        positions = [i for i, t in enumerate(self.op.inputs) if t is parent_tensor]
        if len(positions) != 1:
            raise PopxlInternalError(
                f"set_parent_input_modified: {parent_tensor!r} is bound to {len(positions)} inputs of this call of "
                f"{self.called_graph.title}; it has to be bound to exactly one."
            )
        (i,) = positions
        if not infer_modified_regions or i + self._first_input in written_inputs(self.called_graph):
            self.op.edit(modified=self.op.modified | {i})

    def __repr__(self) -> str:
        called = " and ".join(graph.title for graph in self.op.called_graphs)
        return f"{type(self).__name__}[{self.op!r} of {called}]"


def _tensor_at(tensors: tuple[Tensor, ...], idx: int, what: str, first: int = 0) -> Tensor:
    if not 0 <= idx - first < len(tensors):
        raise IndexError(f"This call has no {what} {idx}; it has {len(tensors)}, numbered from {first}.")
    return tensors[idx - first]


def by_ref_inputs(attributes: Mapping[str, Any]) -> frozenset[int]:
    """Positions of the inputs that a call of the graph writes back."""
    return frozenset(i for i, t in enumerate(attributes["graph"].inputs) if t.by_ref)


def results_of(*inputs: Tensor, graph: Graph, **attributes: Any) -> list[TensorSpec]:
    """Result specs of a call, after checking its inputs."""
    check_fit(graph, inputs, graph.inputs)
    return [t.spec for t in graph.outputs]


def check_fit(graph: Graph, inputs: Iterable[Tensor], graph_inputs: Iterable[Tensor]) -> None:
    """Raise `PopxlError`, listing tensors incompatible with their graph inputs.

    Meta-shapes of a gradient graph's inputs are not checked: gradients may have lost theirs on the way.
    """
    compared = 3 if graph.gradient_of is None else 2  # of shape, dtype, meta-shape
    unfit = [
        f"the input `{wanted.name}` of {graph.title} is {_described(wanted)}, and {t.id!r}, which is bound to it, "
        f"is {_described(t)}"
        for t, wanted in zip(inputs, graph_inputs, strict=True)
        if t.spec.to_tuple()[:compared] != wanted.spec.to_tuple()[:compared]
    ]
    if unfit:
        raise PopxlError(f"{'; '.join(unfit)}. Nothing is broadcast or converted at a call.")


def _described(t: Tensor) -> str:
    return brief(t) + (f" with meta-shape {t.meta_shape}" if t.meta_shape else "")


def seed_or_zeros(gradient: Tensor | None, t: Tensor) -> Tensor:
    """The gradient of an output, or zeros."""
    return init(t.shape, t.dtype, f"Gradient___{t.name}") if gradient is None else gradient


def _call_gradient(forward: Any, gs: tuple[Tensor | None, ...]) -> dict[int, Tensor]:
    site = CallSiteInfo(forward.op)
    graph = site.called_graph
    info = grad_info_for_call(forward, graph)
    if info is None:
        return {}
    seeds = seeds_of(graph, gs)
    parents = site.parents()
    inputs = [
        forward.read(parents[expected.fwd_tensor])
        if expected.is_activation
        else seed_or_zeros(seeds.pop(expected.fwd_tensor, None), expected.fwd_tensor)
        for expected in info.expected_inputs
    ]
    check_all_seeds_used(seeds, info)
    return {graph.inputs.index(t): gradient for t, gradient in call_gradient_graph(info, inputs).items()}


def call_gradient_graph(info: Any, inputs: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Call a gradient graph; map forward tensors to returned gradients.

    Outputs that the user has added to the gradient graph come after those, and are ignored here.
    """
    return dict(zip(info.outputs, call(info.graph, *inputs), strict=False))


def seeds_of(graph: Graph, gs: Iterable[Tensor | None]) -> dict[Tensor, Tensor]:
    """Gradients of graph outputs, summed for repeated tensors."""
    arrived: dict[Tensor, list[Tensor]] = {}
    for t, g in zip(graph.outputs, gs, strict=False):
        if g is not None:
            arrived.setdefault(t, []).append(g)
    return {t: terms[0] if len(terms) == 1 else add_n(*terms) for t, terms in arrived.items()}


def check_all_seeds_used(seeds: Mapping[Tensor, Tensor], info: Any) -> None:
    """Raise `PopxlError` for output gradients unused by the gradient graph."""
    if seeds:
        names = ", ".join(t.name for t in seeds)
        raise PopxlError(
            f"autodiff: a gradient reaches the outputs {names} of {info.forward_graph.title}, and its gradient graph "
            f"{info.graph.id} does not take them. Name them in its `grads_provided`."
        )


def grad_info_for_call(forward: Any, graph: Graph) -> Any:
    """Gradient information of a called graph; `None` without gradient flow.

    Raises:
        PopxlError: if it takes or returns tensors that a caller of the graph does not have.
    """
    info = forward.differentiate(graph)
    if info is None:
        return None
    visible = {*graph.inputs, *graph.outputs}
    hidden = [e.fwd_tensor for e in info.expected_inputs if e.fwd_tensor not in visible]
    hidden += [t for t in info.outputs if t not in graph.inputs]
    if hidden:
        raise PopxlError(
            f"autodiff: the gradient graph {info.graph.id} cannot be used where {graph.title} is called: "
            f"{', '.join(map(repr, hidden))} would have to be inputs or outputs of {graph.title}, and gradients are of "
            "inputs."
        )
    added = info.graph.inputs[len(info.expected_inputs) :]
    if added:
        raise PopxlError(
            f"autodiff: the gradient graph {info.graph.id} cannot be used where {graph.title} is called: nothing would "
            f"be bound to {', '.join(t.name for t in added)}, which were added to its inputs. Leave it out of "
            "`called_graphs_grad_info`, or call it by hand."
        )
    return info


def lowered_by_runtime(*inputs: Any, **attributes: Any) -> Any:
    """In place of a lowering: running a graph needs to know what is lowered already."""
    raise PopxlInternalError("An op that runs graphs is carried out by `runtime.lowering.lower`.")


def relevant_outputs(op: Op, callee: Graph, matter: AbstractSet[Tensor]) -> list[Tensor]:
    """The outputs of a graph whose results matter."""
    return [t for t, result in zip(callee.outputs, op.outputs, strict=False) if result in matter]


call_kind = OpKind(
    "Call",
    lowered_by_runtime,
    shape=results_of,
    gradient=_call_gradient,
    traits=[
        Overwrites(aliased=False, positions=by_ref_inputs),
        Runs(("graph",), returns=relevant_outputs, gains=lambda spec, attributes: spec),
    ],
)


def call(
    graph: Graph,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
) -> tuple[Tensor, ...]:
    """Run a graph.

    The graph gets copies of its inputs, and changes only these copies. An input by reference is the caller's tensor
    itself; where several share storage, a write to one is visible in the others.

    Args:
        graph: graph to run.
        *inputs: values for the graph's inputs, in order. Iterables are flattened by one level. A value that is not a
            tensor becomes a constant of the input's dtype. A replica-sharded variable is replaced by its shard if the
            input is one.
        inputs_dict: values for inputs of the graph, by the input's tensor.

    Returns:
        One new tensor for each output of the graph.

    Raises:
        ValueError: for too many or too few values, an input bound twice, or a tensor of another graph.
        TypeError: for a value that cannot become a constant.
        PopxlError: if a value's shape or dtype is not that of the input: nothing is broadcast at a call.

    Example:
        >>> graph = ir.create_graph(lambda x, y: x * 2 + y, x, y)
        >>> (z,) = ops.call(graph, x, y)
    """
    return call_with_info(graph, *inputs, inputs_dict=inputs_dict).outputs


def call_with_info(
    graph: Graph,
    *inputs: TensorLike | Iterable[TensorLike],
    inputs_dict: Mapping[Tensor, TensorLike] | None = None,
    check_inputs: bool = True,
) -> CallSiteInfo:
    """Call a graph like `call`; returns the record of the call site, for gradients.

    Args:
        graph, inputs, inputs_dict: as for `call`.
        check_inputs: report inputs that nothing is bound to as `ValueError`; they are an `IndexError` otherwise.

    Example:
        >>> site = ops.call_with_info(graph, x, w)
        >>> site.outputs[0].shape
        (2, 3)
    """
    bound = bind_inputs(graph, inputs, inputs_dict, check_inputs)
    return CallSiteInfo(call_op(graph, bound, [t.name for t in graph.outputs]))


def call_op(
    graph: Graph, bound: tuple[Tensor, ...], names: list[str], kind: OpKind = call_kind, **attributes: Any
) -> Op:
    """Add an op that runs a graph on bound inputs."""
    twice = {t for i in kind.modified({"graph": graph, **attributes}) for t in (bound[i],) if bound.count(t) > 1}
    if twice:
        raise PopxlInternalError(
            f"{kind.name}: {', '.join(map(repr, twice))} is bound to several inputs of {graph.title}, and one "
            "of them is by reference; only one value could be written back. "
            "Where it is meant by value, pass a copy, such as `ops.identity(t)`."
        )
    op = kind.record(*bound, graph=graph, results=names, **attributes)
    for t, wanted in zip(bound, graph.inputs[len(graph.inputs) - len(bound) :], strict=True):
        wanted.bound_to(t)
    return op


def bind_inputs(
    graph: Graph,
    positional: Iterable[Any],
    by_tensor: Mapping[Tensor, Any] | None,
    check_inputs: bool = True,
    which: str = "called",
) -> tuple[Tensor, ...]:
    """Current-graph tensors for each input of `graph`, in order.

    All checks come before any constant is made, so that nothing is left behind by a call that is refused.
    """
    current = get_current_context().graph
    check_callable(graph, current)
    check_type(positional, Iterable, f"The inputs of the {which} graph {graph.name}", "an iterable of values")
    positional = list(positional)
    values = list(_flattened(positional))
    hint = ""
    if any(hasattr(value, "shape") and not isinstance(value, Tensor) for value in positional):
        hint = " An array that is given by position is taken apart into its rows: make a tensor of it, with `constant`."
    if len(values) > len(graph.inputs):
        raise ValueError(
            f"Too many inputs have been provided to the {which} graph {graph.name}: {len(values)} for its "
            f"{len(graph.inputs)} inputs {list(graph.inputs_by_name)}.{hint}"
        )
    for i, value in enumerate(values):
        if isinstance(value, Tensor) and value.graph_ref is not current.ref:
            raise foreign_tensor("call", f"input {i}", value, current)
    named = {} if by_tensor is None else by_tensor
    check_type(
        named, Mapping, f"`inputs_dict` of the {which} graph {graph.name}", "a mapping from its inputs to values"
    )
    named = dict(named)
    _check_named(graph, named, current, which)
    bound: dict[Tensor, Any] = dict(zip(graph.inputs, values, strict=False))
    for key in named:
        if key in bound:
            twice = f"Graph input tensor is specified twice for the {which} graph {graph.name}: {key!r}."
            raise ValueError(twice + hint)
    bound |= named
    arrays = {t: _array(value, t) for t, value in bound.items() if not isinstance(value, Tensor)}
    missing = [t for t in graph.inputs if t not in bound]
    if missing:
        table = table_to_string(
            [["Graph input", "Bound to"], *([t.name, bound.get(t, "nothing")] for t in graph.inputs)]
        )
        error = ValueError if check_inputs else IndexError
        raise error(
            f"Not enough inputs have been provided for the {which} graph {graph.name}; nothing is bound to "
            f"{', '.join(t.name for t in missing)}.\n{table}"
        )
    return tuple(constant(arrays[t], t.dtype) if t in arrays else _shard_or_tensor(bound[t], t) for t in graph.inputs)


def _check_named(graph: Graph, named: Mapping[Any, Any], current: Graph, which: str) -> None:
    """Check the keys (graph inputs) and tensors (current graph) of an `inputs_dict`."""
    for key in named:
        if not isinstance(key, Tensor):
            raise TypeError(f"call: the keys of `inputs_dict` are inputs of the graph; got {key!r}.")
        if key.graph_ref is not graph.ref:
            raise ValueError(f"call: the key {key!r} of `inputs_dict` is not in the {which} graph {graph.name}.")
    for key, value in named.items():
        if isinstance(value, Tensor) and value.graph_ref is not current.ref:
            raise foreign_tensor("call", f"input {key.name}", value, current)
    inputs_ = {*graph.inputs}
    for key in named:
        if key not in inputs_:
            raise PopxlError(f"call: the key {key!r} of `inputs_dict` is in {graph.title}, but is not an input of it.")


def _shard_or_tensor(t: Tensor, wanted: Tensor) -> Tensor:
    """Bind a sharded variable's shard where the graph expects a shard, otherwise the tensor."""
    if wanted.meta_shape and isinstance(t, Variable) and t.piece is not None:
        return t.piece
    return t


def check_callable(graph: Any, current: Graph, argument: str = "call: `graph`") -> None:
    """Refuse what the current graph cannot call."""
    expected = "a Graph: what `ir.create_graph` returns, or the `graph` of what a module's `create_graph` does"
    check_type(graph, Graph, argument, expected)
    if graph.ir is not current.ir:
        raise ValueError(f"call: {graph.title} is of another Ir than {current.title}, which is current.")
    # A graph without callers, which is the usual case, can only call itself directly.
    if graph is current or (current.call_sites and current in reachable(graph)):
        raise PopxlError(f"call: {current.title} would be a graph that calls itself, by way of {graph.title}.")


def _flattened(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, Iterable) and not isinstance(value, str | Tensor):
            if getattr(value, "shape", None) == ():
                raise TypeError(
                    f"call: {value!r} is a 0-d array, and arrays are taken apart into values. Pass the number in it, "
                    "or bind it by `inputs_dict`."
                )
            yield from value
        else:
            yield value


def _array(value: Any, wanted: Tensor) -> np.ndarray:
    """Values of a constant for a graph input."""
    try:
        is_empty = np.size(value) == 0 and getattr(value, "shape", None) != wanted.shape
        if value is None or isinstance(value, str) or is_empty:
            raise ValueError("it holds no numbers")
        warn_of_narrowed(as_array(value), wanted.dtype, f"call: what is bound to the input `{wanted.name}`")
        return to_numpy(value, wanted.dtype)
    except (ValueError, TypeError) as problem:
        raise TypeError(
            f"call: {value!r} ({type(value).__name__}) cannot become a constant for the input `{wanted.name}`, "
            f"which is {brief(wanted)}: {problem}."
        ) from problem
