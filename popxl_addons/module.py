"""The class that layers, models and optimisers derive from: it builds a graph with named state.

`build` is the mathematics. Variables are declared where they are used, with `add_variable_input`; they are made later,
from the factories that `create_graph` returns with the graph. A module called inside another `build` is inlined; a
module whose graph is created there is outlined, and may be called many times. Hand-written gradients are in
`popxl_addons.build_grad`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, Self, SupportsInt, get_args
from weakref import WeakKeyDictionary

import popxl
from popxl.errors import UnnamedVariableWarning
from popxl.extend.arguments import check_type
from popxl.extend.graphs import is_input
from popxl.extend.source import SourceLocation, user_frame, warn_at
from popxl.replica_grouping import Groups
from popxl_addons._collected import BuildResult, BuildState
from popxl_addons.build_grad import Aux, VarGrad, create_grad_graph
from popxl_addons.errors import GradientError
from popxl_addons.grad_info import CalledGraphs
from popxl_addons.grad_info import create_grad_graph_info as create_grad_graph_info
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.graph_cache import GraphCache
from popxl_addons.name_scope import NameScopeMeta as NameScopeMeta
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.precision import in_precision, layer
from popxl_addons.utils import overrides
from popxl_addons.variable_factory import (
    DataIter,
    NamedVariableFactories,
    VariableFactory,
    replica_sharded_factory,
)

__all__ = ["Module", "NameScopeMeta", "create_grad_graph_info"]

Autodiff = Literal["auto", "build_grad", "autodiff", "none"]
Choice = Callable[[GraphWithNamedArgs], Iterable[popxl.Tensor]]


class Module(popxl.Module, metaclass=NameScopeMeta):
    """Builder of a graph with named state. Subclasses implement `build`, and may implement `build_grad`.

    With a truthy `cache`, `create_graph` reuses the graph of an earlier call with equal arguments.
    `grad_inlining_error` selects the reaction to inlining a module with a `build_grad`, which leaves its `build_grad`
    unused.

    A module has no state between builds: the state of a build is returned and dropped.

    Example:
        >>> class Affine(Module):
        ...     def __init__(self, features: int):
        ...         super().__init__()
        ...         self.features = features
        ...
        ...     def build(self, x: popxl.Tensor) -> popxl.Tensor:
        ...         w = self.add_variable_input("w", lambda: np.ones((x.shape[-1], self.features)), x.dtype)
        ...         b = self.add_variable_input("b", lambda: np.zeros(self.features), x.dtype)
        ...         return x @ w + b
        >>> with popxl.Ir().main_graph:
        ...     x = popxl.variable(np.ones((5, 2)), popxl.float32, "x")
        ...     facts, graph = Affine(3).create_graph(x)
        ...     (y,) = graph.bind(facts.init()).call(x)
        >>> facts.keys(), y.shape
        (['w', 'b'], (5, 3))
    """

    # Class attributes, so that a module whose constructor does not call this one can still be called.
    _own_collected: BuildState | None = None
    _name_scope: str | None = None
    _grad_inlining_error: Literal["error", "warning", "none"] = "error"
    _is_graph_body = False
    _list_length: int | None = None
    _list_name: str | None = None  # name of the list that contains it

    def __init__(self, cache: Any = False, grad_inlining_error: Literal["error", "warning", "none"] = "error"):
        if cache and self.implements_grad_graph:
            raise ValueError(
                "You cannot use graph caching if you have implemented `build_grad`. "
                f"Create {type(self).__name__} without `cache`."
            )
        if grad_inlining_error not in ("error", "warning", "none"):
            raise ValueError(
                f"grad_inlining_error should be one of 'error', 'warning', 'none'; got {grad_inlining_error!r}."
            )
        self._grad_inlining_error = grad_inlining_error
        self._own_collected = BuildState()
        self._cache = GraphCache() if cache else None
        self._cached_builds: WeakKeyDictionary[popxl.Graph, BuildResult] = WeakKeyDictionary()

    # Building

    def create_graph(self, *args: Any, **kwargs: Any) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """Build a graph from `build`, with factories for its variables named like its `args`.

        Tensors and specs among the arguments become inputs of the graph; everything else is passed to `build`
        unchanged. Needs a current graph. `ValueError` if the arguments do not match the signature of `build`, or if it
        returns
        something other than tensors.
        """
        with self._collected.build_scope():
            create = popxl.gir().create_graph if self._cache is None else self._cache.create_graph
            self._is_graph_body = True
            try:
                graph = create(self, *args, **kwargs)
            finally:
                self._is_graph_body = False
            self._warn_of_unnamed(graph)
            build = self._collected.result()
        if self._cache is not None:
            build = self._cached_builds.setdefault(graph, build)
        graph.differentiable = not self.implements_grad_graph
        return build.factories.copy(), GraphWithNamedArgs(
            graph,
            build.args.copy(),
            from_module=self,
            aux=build.aux,
            called_graphs_grad_info=build.called_graphs_grad_info,
        )

    def _warn_of_unnamed(self, graph: popxl.Graph) -> None:
        """Warn of variables that users cannot make and bind by name: they notice where they call the graph."""
        if unnamed := self._collected.unnamed(graph):
            warn_at(
                SourceLocation.of(user_frame()),
                f"{type(self).__name__}.create_graph: the graph has inputs for variables that are not among its "
                f"`args` and factories: {', '.join(t.name for t in unnamed)}. Those of a submodule are if it is an "
                "attribute of the module that calls it; make lists of modules with `Module.from_list`.",
                UnnamedVariableWarning,
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `build` in the current graph, which gets its ops and inputs."""
        if self._is_graph_body:
            self._is_graph_body = False
        elif self.implements_grad_graph:
            self._complain_about_inlining()
        return layer(self.layer_name, self.implements_grad_graph, super().__call__, *args, **kwargs)

    def set_name_scope(self, name: str | None) -> None:
        """Set the name scope of `build` to `name`; attribute assignment calls this."""
        self._name_scope = name
        for module in () if self._list_length is None else self:
            module._list_name = name

    @property
    def layer_name(self) -> str | None:
        """Attribute name of the module, such as "norm", or "layers.3" in a list; `None` if unnamed."""
        return self._name_scope if self._list_name is None else f"{self._list_name}.{self._name_scope}"

    # Inputs

    def add_variable_input(
        self,
        name: str,
        data_iter: DataIter,
        dtype: popxl.dtype | None = None,
        by_ref: bool = False,
        replica_grouping: Groups | None = None,
        overwrite: bool = False,
        group_axis: int | None = None,
    ) -> popxl.Tensor:
        """A placeholder for a variable `name`, whose initial values `data_iter` gives; see `VariableFactory`.

        `ValueError` if the name is taken. `overwrite` replaces it, and is needed to add to a namespace that exists.
        """
        factory = VariableFactory(data_iter, dtype, name, by_ref, replica_grouping, group_axis=group_axis)
        return self._collected.add(name, in_precision(factory), overwrite)

    def add_replica_sharded_variable_input(
        self,
        name: str,
        data_iter: DataIter,
        dtype: popxl.dtype | None = None,
        by_ref: bool = False,
        replica_grouping: Groups | None = None,
        shard_over: SupportsInt | None = None,
        group_axis: int | None = None,
    ) -> popxl.Tensor:
        """A placeholder for one replica's shard of a variable, sharded over `shard_over` replicas (default: the group).

        Its shape is ``(ceil(nelms / shard_over),)``, its meta-shape that of the data.
        """
        factory = replica_sharded_factory(name, data_iter, dtype, by_ref, replica_grouping, shard_over, group_axis)
        return self._collected.add(name, in_precision(factory))

    def add_variable_inputs(
        self, name: str | int, variable_f: NamedVariableFactories, overwrite: bool = False
    ) -> NamedTensors:
        """Add placeholders for all `variable_f` under namespace `name`, to bind an outlined graph to them."""
        if not isinstance(variable_f, NamedVariableFactories):
            raise TypeError(
                f"{type(self).__name__}.add_variable_inputs: `variable_f` is a {type(variable_f).__name__}, expected "
                "the NamedVariableFactories that `create_graph` returns first."
            )
        return self._collected.add(name, variable_f, overwrite)

    def add_variable_factory(self, variable_f: VariableFactory, name: str | None = None) -> popxl.Tensor:
        """A placeholder for an existing factory, under `name` or the factory's own name."""
        what = f"{type(self).__name__}.add_variable_factory: `variable_f`"
        check_type(variable_f, VariableFactory, what, "a VariableFactory; for several, there is `add_variable_inputs`")
        return self._collected.add(name or variable_f.name or "", variable_f)

    def call_module(
        self,
        module: Module,
        name: str | None = None,
        autodiff: Autodiff = "auto",
        grads_provided: Choice | None = None,
        grads_required: Choice | None = None,
    ) -> OutlinedCall:
        """Outline `module`: the result takes tensors, and calls a graph of `module` that has inputs under `name`.

        With a `build_grad`, or if `autodiff` says so, the graph is differentiated at once, and a transform of this
        module's graph uses that. `grads_provided` and `grads_required` choose tensors of the graph for it.

        Example:
            >>> class Square(Module):
            ...     def build(self, x):
            ...         return x * x
            >>> class Twice(Module):
            ...     def build(self, x):
            ...         (y,) = self.call_module(Square(), name="first")(x)
            ...         (z,) = self.call_module(Square(), name="second")(y)
            ...         return z
            >>> with popxl.Ir().main_graph:
            ...     facts, graph = Twice().create_graph(popxl.TensorSpec((3,), popxl.float32))
            >>> len(graph.graph.called_graphs)
            2
        """
        check_type(module, Module, "call_module: `module`", "a popxl_addons.Module, whose graph is to be made")
        return OutlinedCall(self, module, name, autodiff, grads_provided, grads_required)

    # Submodules

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Module):
            self._collected.link(name, value._collected)
            value.set_name_scope(name)
        super().__setattr__(name, value)

    @classmethod
    def from_list(cls, sub_modules: Iterable[Module]) -> Self:
        """Wrap a module list as one iterable module with children ``m[0]``, ``m[1]``, ….

        Example:
            >>> class Shift(Module):
            ...     def build(self, x):
            ...         return x + self.add_variable_input("s", lambda: np.ones(3), popxl.float32)
            >>> class Chain(Module):
            ...     def __init__(self):
            ...         super().__init__()
            ...         self.layers = Module.from_list([Shift() for _ in range(2)])
            ...     def build(self, x):
            ...         for layer in self.layers:
            ...             x = layer(x)
            ...         return x
            >>> with popxl.Ir().main_graph:
            ...     facts, graph = Chain().create_graph(popxl.TensorSpec((3,), popxl.float32))
            >>> facts.keys_flat()
            ['layers.0.s', 'layers.1.s']
        """
        modules = list(sub_modules)
        container = cls()
        for i, module in enumerate(modules):
            setattr(container, str(i), module)
        container._list_length = len(modules)
        return container

    @classmethod
    def from_variable_factories(cls, inputs: Iterable[VariableFactory]) -> Self:
        """Placeholders in the current graph for a list of factories: ``m[i]``. Assign it inside `build`."""
        container = cls()
        for i, factory in enumerate(inputs):
            setattr(container, str(i), container.add_variable_factory(factory, str(i)))
        return container

    def get(self, key: str | int) -> Any:
        """The attribute called ``str(key)``: an entry of a list of modules or placeholders."""
        return getattr(self, str(key))

    __getitem__ = get

    def __iter__(self) -> Iterator[Any]:
        if self._list_length is None:
            raise AttributeError(
                f"{type(self).__name__}: iteration not supported. Only a module made by `Module.from_list` is a list."
            )
        return (self[i] for i in range(self._list_length))

    # Gradients

    def build_grad(self, *args: Any, **kwargs: Any) -> Any:
        """Gradient of `build`, given output gradients. Optional to implement, with plain parameters.

        Returns the gradients of the inputs that are not variables; those of variables go to `var_grad`. It can read the
        values that `build` put in `aux`.

        Example:
            >>> class Square(Module):
            ...     def build(self, x):
            ...         s = self.add_variable_input("s", lambda: np.array(2.0), popxl.float32)
            ...         self.aux["x"], self.aux["s"] = x, s
            ...         return s * x * x
            ...
            ...     def build_grad(self, dy):
            ...         x, s = self.aux["x"], self.aux["s"]
            ...         self.var_grad["s"] = dy * x * x
            ...         return dy * s * x * 2.0
            >>> with popxl.Ir().main_graph:
            ...     facts, graph = Square().create_graph(popxl.TensorSpec((), popxl.float32))
            ...     grad = graph.autodiff()
            >>> [tensor.name for tensor in grad.graph.inputs]
            ['dy', 'x', 's']
        """
        raise NotImplementedError(f"{type(self).__name__} does not implement `build_grad`.")

    @property
    def implements_grad_graph(self) -> bool:
        """Whether `build_grad` is overridden."""
        return overrides(type(self), Module, "build_grad")

    @property
    def aux(self) -> Aux:
        """Values for `build_grad`: set in `build`, read there."""
        return self._collected.aux

    @property
    def var_grad(self) -> VarGrad:
        """Gradients of variables by flat name, set in `build_grad`."""
        return self._collected.var_grad

    @property
    def called_graphs_grad_info(self) -> CalledGraphs:
        """The gradients known for the graphs that this build calls; see `CalledGraphs`."""
        return self._collected.called_graphs

    def create_grad_graph(
        self,
        fwd_graph: GraphWithNamedArgs,
        grads_provided: Iterable[popxl.Tensor] | None = None,
        grads_required: Iterable[popxl.Tensor] | None = None,
    ) -> GraphWithNamedArgs:
        """The gradient graph that `build_grad` states for `fwd_graph`: what ``fwd_graph.autodiff()`` returns."""
        return create_grad_graph(self, fwd_graph, grads_provided, grads_required)

    def _complain_about_inlining(self) -> None:
        message = (
            f"`build_grad` has been implemented for {type(self).__name__}, but the module is called inline: its ops "
            "will be differentiated one by one, without `build_grad`. Outline it with `call_module`, or pass "
            "`grad_inlining_error='none'` to its constructor if this is intended."
        )
        if self._grad_inlining_error == "error":
            raise GradientError(message)
        if self._grad_inlining_error == "warning":
            warnings.warn(message, UserWarning, stacklevel=3)

    @property
    def _collected(self) -> BuildState:
        if self._own_collected is None:
            raise AttributeError(
                f"{type(self).__name__}: call `super().__init__()` first, at the start of the constructor. Submodules, "
                "variable inputs and `create_graph` need it."
            )
        return self._own_collected


class OutlinedCall:
    """Outlined call: runs `module` as a separate graph, called from `caller`. See `Module.call_module`.

    After the call `var_factories` and `graph` are the results of the module's `create_graph`, and
    `n_outputs_pre_autodiff` is the number of outputs before differentiating added more.
    """

    var_factories: NamedVariableFactories
    graph: GraphWithNamedArgs
    n_outputs_pre_autodiff: int

    def __init__(
        self,
        caller: Module,
        module: Module,
        name: str | None,
        autodiff: Autodiff,
        grads_provided: Choice | None,
        grads_required: Choice | None,
    ):
        if autodiff not in get_args(Autodiff):
            raise ValueError(f"call_module: `autodiff` is {autodiff!r}, expected one of {get_args(Autodiff)}.")
        self._caller = caller
        self._module = module
        self._name = name or type(module).__name__
        self._autodiff = autodiff
        self._grads_provided = grads_provided
        self._grads_required = grads_required

    def __call__(self, *inputs: Any, **options: Any) -> tuple[popxl.Tensor, ...]:
        """Call the module's graph; returns the outputs of `create_graph`.

        Tensors among `inputs`, and lists of them, are the inputs of the graph. `TypeError` for tensors by name.
        """
        if named := [name for name, value in options.items() if is_input(value)]:
            raise TypeError(
                f"call_module: the tensors {named} are given by name; give them by position, as they come in `build`."
            )
        self.var_factories, self.graph = self._module.create_graph(*inputs, **options)
        args = self._caller.add_variable_inputs(self._name, self.var_factories)
        self.n_outputs_pre_autodiff = len(self.graph.graph.outputs)
        self._record_gradients()
        return self.graph.bind(args).call(*filter(is_input, inputs))[: self.n_outputs_pre_autodiff]

    def _record_gradients(self) -> None:
        known = self._caller.called_graphs_grad_info
        known.add_submap(self.graph.called_graphs_grad_info)
        if self._autodiff == "none" or (self._autodiff == "auto" and not self._module.implements_grad_graph):
            return
        grad = self.graph.autodiff(
            method=self._autodiff,
            grads_provided=self._grads_provided and self._grads_provided(self.graph),
            grads_required=self._grads_required and self._grads_required(self.graph),
        )
        known.add(self.graph, grad)
