"""One outlined call of a module: graph, placeholders, gradient and call site in one step. See `Module.call_module`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, get_args

import popxl
from popxl.extend.graphs import is_input
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.variable_factory import NamedVariableFactories

if TYPE_CHECKING:
    from popxl_addons.module import Module

Autodiff = Literal["auto", "build_grad", "autodiff", "none"]
Choice = Callable[[GraphWithNamedArgs], Iterable[popxl.Tensor]]


class OutlinedCall:
    """Outlined call: runs `module` as a separate graph, called from `caller`.

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
