"""Interface of a derivative rule that is attached to a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from popxl.core.tensor import Tensor
    from popxl.graph import Graph


class Derivative(Protocol):
    """Custom derivative rule of a graph.

    Attributes:
        name: name of the function that has the rule.
        results: number of outputs of the graph, counted from the first, that the rule differentiates. Ops that none of
            these outputs needs compute values that the rule keeps, and are differentiated as usual.
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
            read: function from a tensor of `graph` to its value in the current graph.
        """
