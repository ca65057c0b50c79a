"""Graphs with named inputs, and graphs bound to some of the tensors that they are called with.

`GraphWithNamedArgs` pairs a `popxl.Graph` with names for the inputs that hold state. Binding it to tensors of the same
names gives a `BoundGraph`; one graph may be bound to many sets of variables and stays one graph in the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import popxl
from popxl import ops
from popxl.errors import UnusedGradientWarning
from popxl.extend.arguments import check_type
from popxl.extend.graphs import reachable, schedule
from popxl.extend.source import warn_at
from popxl.ops import CallSiteInfo
from popxl.transforms import GradGraphInfo
from popxl_addons.dot_tree import DotTree
from popxl_addons.errors import GradientError
from popxl_addons.grad_info import merge_called_graphs
from popxl_addons.named_tensors import NamedTensors, TensorMap
from popxl_addons.patterns import apply_patterns
from popxl_addons.variable_factory import NamedVariableFactories

if TYPE_CHECKING:
    from popxl_addons.graph_common import CalledGraphsGradInfoLike
    from popxl_addons.module import Module


class GraphWithNamedArgs:
    """A graph with named inputs under `args`.

    Usually made by `Module.create_graph`, together with factories of the same names. `from_module` and `aux` are needed
    for a hand-written gradient; `called_graphs_grad_info` has the gradients known for graphs that this one calls.

    Example:
        >>> ir = popxl.Ir()
        >>> graph = ir.create_graph(lambda x, w: x * w, *[popxl.TensorSpec((2,), popxl.float32)] * 2)
        >>> scale = GraphWithNamedArgs(graph, NamedTensors(w=graph.inputs[1]))
        >>> with ir.main_graph:
        ...     variables = NamedTensors(w=popxl.variable([1.0, 2.0]))
        ...     (y,) = scale.bind(variables).call(popxl.constant([3.0, 4.0]))
    """

    def __init__(
        self,
        graph: popxl.Graph,
        args: NamedTensors | None = None,
        grad_graph_info: GradGraphInfo | None = None,
        from_module: Module | None = None,
        aux: Mapping[Any, Any] | None = None,
        called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
    ):
        check_type(graph, popxl.Graph, "GraphWithNamedArgs: `graph`", "a popxl.Graph")
        self.graph = graph
        self.args = NamedTensors() if args is None else args
        check_type(self.args, NamedTensors, "GraphWithNamedArgs: `args`", "NamedTensors")
        graph.show_as({tensor: name for name, tensor in self.args.to_dict().items()})
        self.from_module = from_module
        self.aux = dict(aux or {})
        self.called_graphs_grad_info: CalledGraphsGradInfoLike = dict(called_graphs_grad_info or {})
        self.autodiff_applied = False
        self._grad_graph_info = grad_graph_info

    @classmethod
    def from_grad_graph(cls, grad_graph_info: GradGraphInfo, args: NamedTensors | None = None) -> GraphWithNamedArgs:
        """The gradient graph that `grad_graph_info` describes."""
        return cls(grad_graph_info.graph, args, grad_graph_info)

    @property
    def grad_graph_info(self) -> GradGraphInfo:
        """Relation of this gradient graph to its forward graph. `AttributeError` for other graphs."""
        if self._grad_graph_info is None:
            raise AttributeError("`grad_graph_info` attribute does not exist. Not a gradient graph.")
        return self._grad_graph_info

    @grad_graph_info.setter
    def grad_graph_info(self, info: GradGraphInfo) -> None:
        self._grad_graph_info = info

    def bind(self, args: NamedTensors | None = None) -> BoundGraph:
        """Bind named inputs to tensors of equal flat names in `args`.

        Names found on one side only are ignored: inputs without a partner have to be given at the call.
        """
        if args is None:
            return BoundGraph(self.graph)
        if not isinstance(args, DotTree):
            raise TypeError(
                f"GraphWithNamedArgs.bind: `args` is a {type(args).__name__}, expected NamedTensors. "
                "Make one of a dictionary with `NamedTensors.from_dict`."
            )
        if isinstance(args, NamedVariableFactories):
            raise TypeError(
                "GraphWithNamedArgs.bind: `args` are NamedVariableFactories, which have no variables yet; expected "
                "NamedTensors. Make the variables with `args.init()`, in the main graph."
            )
        return BoundGraph(self.graph, self.args.to_mapping(args))

    def call(self, *targs: Any, args: TensorMap | None = None) -> tuple[popxl.Tensor, ...]:
        """Call the graph with nothing bound; see `BoundGraph.call`."""
        return self.bind().call(*targs, args=args)

    def call_with_info(self, *targs: Any, args: TensorMap | None = None) -> CallSiteInfo:
        """Call the graph with nothing bound; see `BoundGraph.call_with_info`."""
        return self.bind().call_with_info(*targs, args=args)

    def copy(self) -> GraphWithNamedArgs:
        """Copy with equal graph, copied `args` and gradient info; drops module, `aux` and similar data."""
        return GraphWithNamedArgs(self.graph, self.args.copy(), self._grad_graph_info)

    def print_schedule(self) -> str:
        """The graph as text, one line per op in the order of execution, with the flat names of its inputs."""
        return schedule(self.graph, {tensor: name for name, tensor in self.args.to_dict().items()})

    def autodiff(
        self,
        grads_provided: Iterable[popxl.Tensor] | None = None,
        grads_required: Iterable[popxl.Tensor] | None = None,
        called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
        method: Literal["auto", "build_grad", "autodiff"] = "auto",
        force: bool = False,
    ) -> GraphWithNamedArgs:
        """The gradient graph: hand-written if the module has a `build_grad`, else made by the transform.

        `method` requires one of the two. Differentiating may add outputs to this graph, so it is done once; `force`
        allows it again. The other arguments are those of `popxl_addons.autodiff`.

        `ValueError` for an unknown `method`; `GradientError` for a second time, or if a `build_grad` is asked for and
        there is none.
        """
        by_hand = self.from_module is not None and self.from_module.implements_grad_graph
        if method not in ("auto", "build_grad", "autodiff"):
            raise ValueError(f"autodiff: `method` is {method!r}, expected 'auto', 'build_grad' or 'autodiff'.")
        if method == "build_grad" and not by_hand:
            raise GradientError(
                f"autodiff: the graph `{self.graph.name}` only has a `build_grad` if `from_module` is specified and is "
                "a module that implements it. Create the graph with `Module.create_graph`, or use another `method`."
            )
        if self.autodiff_applied and not force:
            raise GradientError(
                f"Autodiff has already been applied to the graph `{self.graph.name}`. Keep the first result, or pass "
                "`force=True` if a second gradient graph is really wanted."
            )
        if self.from_module is not None and by_hand and method != "autodiff":
            grad = self.from_module.create_grad_graph(self, grads_provided, grads_required)
        else:
            grad = self.differentiate(grads_provided, grads_required, called_graphs_grad_info)
        self.autodiff_applied = True
        return grad

    def differentiate(
        self,
        grads_provided: Iterable[popxl.Tensor] | None = None,
        grads_required: Iterable[popxl.Tensor] | None = None,
        called_graphs_grad_info: CalledGraphsGradInfoLike | None = None,
        called_graphs_transform: Callable[[GradGraphInfo], GradGraphInfo] | None = None,
    ) -> GraphWithNamedArgs:
        """The gradient graph made by the transform, unconditionally: `popxl_addons.autodiff` of this graph.

        Patterns have been applied to it and to the gradient graphs that were made along with it.
        `called_graphs_transform` is that of `popxl.transforms.autodiff`.
        """
        given = merge_called_graphs(self.called_graphs_grad_info, called_graphs_grad_info)
        self._warn_of_uncalled_graphs()
        infos = popxl.transforms.autodiff(
            self.graph,
            grads_provided=grads_provided,
            grads_required=grads_required,
            called_graphs_grad_info=given,
            return_all_grad_graphs=True,
            called_graphs_transform=called_graphs_transform,
        )
        apply_patterns(info.graph for graph, info in infos.items() if graph not in given)
        return GraphWithNamedArgs.from_grad_graph(infos[self.graph])

    def _warn_of_uncalled_graphs(self) -> None:
        called = reachable(self.graph)
        for graph in merge_called_graphs(self.called_graphs_grad_info):
            if graph not in called and graph.gradient_given_at is not None:
                names = ", ".join(f"`{each.name}`" for each in called[1:]) or "no graphs"
                warn_at(
                    graph.gradient_given_at,
                    f"autodiff: the gradient that is given for {graph.title} is not used: {self.graph.title} does not "
                    f"call that graph, it calls {names}. Each `create_graph` makes another graph: give the gradient of "
                    "the one that is called.",
                    UnusedGradientWarning,
                )


class BoundGraph:
    """A graph together with tensors for some of its inputs: `args` maps graph inputs to tensors of the calling graph.

    Example:
        >>> ir = popxl.Ir()
        >>> graph = ir.create_graph(lambda x, w: x * w, *[popxl.TensorSpec((), popxl.float32)] * 2)
        >>> with ir.main_graph:
        ...     double = BoundGraph(graph, {graph.inputs[1]: popxl.constant(2.0)})
        ...     (y,) = double.call(popxl.constant(3.0))
    """

    def __init__(self, graph: popxl.Graph, args: TensorMap | None = None):
        check_type(graph, popxl.Graph, "BoundGraph: `graph`", "a popxl.Graph")
        self.graph = graph
        self.args = _by_tensor(args)

    def call(self, *targs: Any, args: TensorMap | None = None) -> tuple[popxl.Tensor, ...]:
        """Call the graph in the current graph; returns its outputs.

        `targs` go to the graph inputs from the first on (lists are flattened by one level, numbers become constants).
        The others are looked up in `args`, then in the bound tensors. Errors are those of `popxl.ops.call`.
        """
        return ops.call(self.graph, *targs, inputs_dict=self._inputs_dict(args))

    def call_with_info(self, *targs: Any, args: TensorMap | None = None) -> CallSiteInfo:
        """Call like `call`; returns the call site: its ``outputs``, and accessors of activations and gradients."""
        return ops.call_with_info(self.graph, *targs, inputs_dict=self._inputs_dict(args))

    def bind(self, args: TensorMap) -> BoundGraph:
        """Add bindings from `args`, which override existing bindings."""
        return BoundGraph(self.graph, self._inputs_dict(args))

    def subgraph_io_map(
        self, *targs: Any, args: TensorMap | None = None, outs: Iterable[popxl.Tensor] | None = None
    ) -> dict[popxl.Tensor, Any]:
        """Graph tensor → tensor of the calling graph, for a call with `targs` and `args` that returned `outs`.

        `outs` has to be given, though it comes last: `TypeError` otherwise.

        Example:
            >>> ir = popxl.Ir()
            >>> graph = ir.create_graph(lambda x: x + 1.0, popxl.TensorSpec((), popxl.float32))
            >>> with ir.main_graph:
            ...     x = popxl.constant(2.0)
            ...     y = BoundGraph(graph).call(x)
            >>> BoundGraph(graph).subgraph_io_map(x, outs=y) == {graph.inputs[0]: x, graph.outputs[0]: y[0]}
            True
        """
        if outs is None:
            raise TypeError("BoundGraph.subgraph_io_map: `outs` is missing, the tensors that the call returned.")
        return {
            **self._inputs_dict(args),
            **dict(zip(self.graph.inputs, _flattened(targs), strict=False)),
            **dict(zip(self.graph.outputs, outs, strict=False)),
        }

    def _inputs_dict(self, args: TensorMap | None) -> dict[popxl.Tensor, popxl.Tensor]:
        return {**self.args, **_by_tensor(args)}


def _by_tensor(args: TensorMap | None) -> dict[popxl.Tensor, popxl.Tensor]:
    if isinstance(args, DotTree):
        raise TypeError(
            f"BoundGraph: `args` is a {type(args).__name__}, expected a mapping of graph inputs to tensors. Tensors by "
            "name are for `GraphWithNamedArgs.bind`."
        )
    if isinstance(args, CallSiteInfo):
        raise TypeError(
            "BoundGraph: `args` is the call of a graph, expected a mapping of graph inputs to tensors. What a gradient "
            "graph needs of a forward call is `grad.grad_graph_info.inputs_dict(info)`."
        )
    found = {} if args is None else args
    check_type(found, Mapping, "BoundGraph: `args`", "a mapping from graph inputs to tensors")
    return dict(found)


def _flattened(targs: Iterable[Any]) -> Iterator[Any]:
    for targ in targs:
        if isinstance(targ, Iterable) and not isinstance(targ, str):
            yield from targ
        else:
            yield targ
