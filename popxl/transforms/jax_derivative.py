"""Custom derivatives of JAX functions (`jax.custom_jvp`, `jax.custom_vjp`), as ops.

JAX applies the function's own rule, which is traced in two parts: the part that computes residuals is added to the
graph of the function, when a gradient first needs it; the part that computes gradients from them is added to the
gradient graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from popxl.context import get_current_context
from popxl.core.tensor import Tensor
from popxl.core.tracing import depend_on_arguments, trace, with_results
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.transforms.jax_equations import known_spec, obstacle
from popxl.transforms.jax_keys import generator_of, on_key_data, with_keys
from popxl.transforms.jax_kinds import Function, function_kind, last_name
from popxl.transforms.op_gradient import Derivation, preferred_derivation, vjp_kind

if TYPE_CHECKING:
    from popxl.transforms.from_jax import Recorder

Wanted = tuple[int, ...]
Given = tuple[int, ...]


class JaxDerivative:
    """Graph derivative by the rule of its source function.

    Args:
        function: the function of the inputs of the graph.
    """

    def __init__(self, recorder: Recorder, function: Function, graph: Graph) -> None:
        self.name = function.name
        self.results = len(graph.outputs)
        self._recorder, self._function = recorder, function
        self._traces: dict[tuple[Wanted, Given], tuple[list[Tensor], ClosedJaxpr] | None] = {}

    def on_arrays(self, *arrays: Any) -> Sequence[Any]:
        """The function on arrays, as JAX differentiates it."""
        return on_key_data(self._function.code)(*arrays)

    def belongs_to(self, function: Function) -> bool:
        """Whether this function's recording produced the graph."""
        return function.name == self.name and str(function.code) == str(self._function.code)

    def gradients(
        self, graph: Graph, wanted: Wanted, gs: Mapping[int, Tensor], read: Callable[[Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """Add the gradients of inputs to the current graph.

        Args:
            read: function from a tensor of `graph` to its value in the current graph.
        """
        key = wanted, tuple(gs)
        if key not in self._traces:
            self._traces[key] = self._traced(graph, *key)
        traces = self._traces[key]
        if traces is None:
            return self._by_one_op(graph, *key, gs, read)
        residuals, backward = traces
        return self._recorder.record(backward, [*map(read, residuals), *gs.values()])

    def _traced(self, graph: Graph, wanted: Wanted, provided: Given) -> tuple[list[Tensor], ClosedJaxpr] | None:
        """Residuals of the rule, in the graph, and the jaxpr from them and the given gradients; `None` if ops cannot
        express it."""
        trees: list[Any] = []

        def forward(*arrays: Any) -> Any:
            values = list(arrays)

            def of_wanted(*values_: Any) -> list[Any]:
                for i, value in zip(wanted, values_, strict=True):
                    values[i] = value
                results = self.on_arrays(*values)
                return [results[k] for k in provided]

            _, pull = jax.vjp(of_wanted, *(values[i] for i in wanted))
            residuals, tree = jax.tree.flatten(pull)
            trees.append(tree)
            return residuals

        traced = trace(forward, [t.spec for t in graph.inputs])[0]
        if obstacle(traced):
            return None
        depends = depend_on_arguments(traced.jaxpr)  # independent values are computed where they are read
        first = with_results(traced, depends)
        fixed = with_results(traced, [not each for each in depends], all_arguments=False)

        def backward(*arrays: Any) -> Any:
            count = len(arrays) - len(provided)
            generators = [generator_of(value.aval) for value in first.jaxpr.outvars]
            computed, constants = iter(with_keys(arrays[:count], generators)), iter(jaxpr_as_fun(fixed)())
            residuals = [next(computed if is_computed else constants) for is_computed in depends]
            return jax.tree.unflatten(trees[-1], residuals)([*arrays[count:]])

        specs = [known_spec(value.aval) for value in first.jaxpr.outvars]
        second = with_results(trace(backward, [*specs, *(graph.outputs[k].spec for k in provided)])[0])
        if obstacle(second):
            return None
        site = graph.call_sites[0]
        recorder = self._recorder.for_graph(graph)
        with get_current_context().located_at(site.ipu, site.io_tiles), recorder.within(graph):
            return recorder.record(first, graph.inputs), second

    def _by_one_op(
        self,
        graph: Graph,
        wanted: Wanted,
        provided: Given,
        gs: Mapping[int, Tensor],
        read: Callable[[Tensor], Tensor],
    ) -> Sequence[Tensor]:
        """Gradients from a single op, which recomputes the function."""
        inputs, outputs = (tuple(t.spec for t in ts) for ts in (graph.inputs, graph.outputs[: self.results]))
        kind = function_kind(last_name(self.name))
        derivation = Derivation(kind, None, (("function", self._function),), inputs, outputs, wanted, provided)
        gradient, needed = vjp_kind(preferred_derivation(derivation))
        values = (*graph.inputs, *graph.outputs[: self.results])
        results = gradient(*(read(values[i]) for i in needed), *gs.values())
        return results if isinstance(results, tuple) else (results,)


class UnsavedDerivative:
    """The derivative of a graph that was saved: rules are code, and files hold none."""

    def __init__(self, name: str, results: int) -> None:
        self.name, self.results = name, results

    def belongs_to(self, function: Any) -> bool:
        """False: the source function is unknown."""
        return False

    def on_arrays(self, *arrays: Any) -> Sequence[Any]:
        """Refuse to differentiate."""
        raise PopxlError(
            f"The derivative of `{self.name}` is a rule in the code that it was made of, and a saved program holds no "
            "code. Differentiate before `Ir.save`: gradient graphs are saved."
        )

    def gradients(self, *_: Any) -> Sequence[Tensor]:
        """Refuse to differentiate."""
        return self.on_arrays()
