"""What a graph that is differentiated by a rule of its own knows of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from popxl.core.tensor import Tensor
    from popxl.graph import Graph


class Derivative(Protocol):
    """The rule of a graph.

    Attributes:
        name: name of the function that has the rule.
        results: how many outputs of the graph the rule is for, the first ones. Ops that none of them needs compute what
            the rule keeps, and are differentiated as they are.
    """

    name: str
    results: int

    def belongs_to(self, function: Any) -> bool:
        """Whether the rule belongs to a function."""

    def on_arrays(self, *arrays: Any) -> Sequence[Any]:
        """The function on arrays, as JAX differentiates it."""

    def gradients(
        self, graph: Graph, wanted: tuple[int, ...], gs: Mapping[int, Tensor], read: Callable[[Tensor], Tensor]
    ) -> Sequence[Tensor]:
        """Add the gradients of inputs to the current graph.

        Args:
            graph: the graph that has the rule.
            wanted: positions of the inputs.
            gs: gradients of results, by position.
            read: gives a tensor of `graph` in the current graph.
        """
