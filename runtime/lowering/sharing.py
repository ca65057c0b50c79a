"""By-reference inputs of a called graph that share storage.

A graph has a storage for each of its inputs. Two by-reference inputs may be bound to one storage, or to overlapping
parts of it: a variable and a view of it, for example. During the call, both alias the caller's tensors, so that a write
to one is visible through the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor
from popxl.graph import Graph


@dataclass(frozen=True)
class Sharing:
    """Overlapping inputs of a called graph, with the caller's storages under them; false without overlap.

    Attributes:
        positions: positions of the op's operands.
        caller_tensors: tensors of the caller, by input.
        values: initial values of the caller's storages that the inputs share.
        modified: storages among these that the op may change.
    """

    positions: frozenset[int] = frozenset()
    caller_tensors: Mapping[Tensor, Tensor] = field(default_factory=dict)
    values: Mapping[Tensor, Array] = field(default_factory=dict)
    modified: tuple[Tensor, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.positions)

    def with_values(self, values: Mapping[Tensor, Array]) -> Sharing:
        """The same inputs with other storage values."""
        return replace(self, values={**self.values, **values})


def bind_inputs(
    graph: Graph, inputs: Sequence[Array], sharing: Sharing
) -> tuple[dict[Tensor, Array], Mapping[Tensor, Tensor] | None]:
    """Bind a called graph's inputs. Returns initial storage values, and aliased tensors, if any."""
    values = dict(zip(graph.inputs, inputs, strict=True))
    if not sharing:
        return values, None
    aliases = sharing.caller_tensors
    return {t: value for t, value in values.items() if t not in aliases} | dict(sharing.values), aliases
