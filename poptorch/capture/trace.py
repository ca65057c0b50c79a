"""`Trace`: a captured PyTorch function in functional form, with single-assignment values and no mutation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

from poptorch.placement.capture_context import OpPlacement
from popxl.extend.source import SourceLocation


@dataclass(eq=False)
class Value:
    """Immutable tensor value of the program.

    Attributes:
        shape, dtype: PyTorch's shape and dtype.
        name: name of an input, or a parameter or buffer; empty for others.
        producer: the node that makes it; `None` for inputs.
        requires_grad: whether gradients flow through it; `None` before the capture has ended.
        of_function: class of the function that returned it, a `torch.autograd.Function`, if it is differentiated
            through its ops although the function defines a derivative.
        of_buffer: whether it is the initial value of a buffer.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str = ""
    producer: Node | None = field(default=None, repr=False)
    requires_grad: bool | None = None
    of_function: type | None = None
    of_buffer: bool = False

    @property
    def buffer_dependencies(self) -> frozenset[str] | None:
        """Names of buffers on which its contents depend; `None` if they depend on other run-time data."""
        if self.of_buffer:
            return frozenset([self.name])
        return self.producer.buffers if self.producer is not None else None

    @property
    def is_on_host(self) -> bool:
        """Whether the model sees this value on the host: derived from host tensors only, and never moved."""
        return self.producer is not None and self.producer.is_on_host

    @property
    def is_constant(self) -> bool:
        """Whether its contents are constant across runs."""
        return self.buffer_dependencies == frozenset()

    @property
    def is_differentiable(self) -> bool:
        """Whether its dtype supports gradients."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class Data:
    """Contents of a constant."""

    tensor: torch.Tensor


BASE = object()
"""Placeholder for the base among a view's arguments."""


@dataclass(frozen=True)
class View:
    """View step of a lens: a view op applied to `BASE`, with a result position.

    Attributes:
        repeats: whether the view overlaps itself: some elements of its base occur more than once.
    """

    op: str
    overload: str
    arguments: dict[str, Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    result: int = 0
    repeats: bool = False


@dataclass(eq=False)
class Node:
    """An op of the program.

    Attributes:
        op: name of the op: `"aten.addmm"` for an op of PyTorch, `"torch.cross_entropy"` for a preserved function,
            `"poptorch.identity_loss"` for one of ours.
        overload: PyTorch's overload of that name.
        arguments: arguments by name, with values in place of tensors, and `Trace`s in place of functions.
        results: values that it makes.
        placement: block of the op, and its further annotations.
        scope: path of the module that runs it.
        source: the user's line.
        has_effect: whether it is kept, even if nothing uses its results.
        stops: positions of the results that stop gradients.
        buffers: names of the buffers that its results come of; `None` if they come of anything else of a run.
        is_on_host: whether the results are on the host, for the model.
        regions: the regions it is in whose activations are recomputed for the backward pass, outermost first.
        is_saved: whether its results are kept for the backward pass in any case.
    """

    op: str
    overload: str
    arguments: dict[str, Any]
    placement: OpPlacement
    scope: str
    source: SourceLocation
    has_effect: bool = False
    results: list[Value] = field(default_factory=list)
    stops: frozenset[int] = frozenset()
    buffers: frozenset[str] | None = None
    is_on_host: bool = False
    regions: tuple[int, ...] = ()
    is_saved: bool = False

    @property
    def inputs(self) -> list[Value]:
        """Values that the op reads, including external values of its traces."""
        values = list(values_in(self.arguments))
        for trace in self.traces:
            values += trace.outer
        return values

    @property
    def traces(self) -> list[Trace]:
        """Functions that the op runs."""
        return [leaf for leaf in pytree.tree_leaves(self.arguments) if isinstance(leaf, Trace)]

    def __str__(self) -> str:
        return f"{self.op} ({self.source})"


@dataclass(eq=False)
class Trace:
    """A captured function.

    Attributes:
        inputs: arguments; followed by one input for each of `outer`.
        nodes: ops, in order.
        outputs: values that it returns.
        outer: values of the function around it that it uses.
        names: names of the inputs, if they have any.
        is_recomputed: whether the backward pass recomputes the values that its gradient reads.
        keeps_seeds: whether random ops in it are given the seeds that they would have outside of it.
    """

    inputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    outer: list[Value] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    is_recomputed: bool = False
    keeps_seeds: bool = False

    def all_nodes(self) -> Iterator[Node]:
        """Iterate over ops, including those of nested functions."""
        for node in self.nodes:
            yield node
            for inner in node.traces:
                yield from inner.all_nodes()

    def is_like(self, other: Trace) -> bool:
        """Whether another trace performs equal ops on equal numbers, disregarding nested functions."""
        return self._key() == other._key()

    def _key(self) -> list[Any]:
        steps = [(node.op, node.overload, node.arguments, node.results) for node in self.nodes]
        return self.capture_key([self.inputs, steps, self.outputs])

    @staticmethod
    def capture_key(structure: Any) -> list[Any]:
        """Key of ops or arguments, equal in two captures of one model.

        Values are numbered, constants are compared by contents. Other objects are compared by type only, as each
        capture makes its own; `outlining_key` of two captures would never be equal.
        """
        numbers: dict[Value, int] = {}

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return numbers.setdefault(leaf, len(numbers)), leaf.shape, leaf.dtype
            if isinstance(leaf, Data):
                return leaf.tensor.shape, leaf.tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return leaf if isinstance(leaf, str | int | float | complex | torch.dtype | torch.device) else type(leaf)

        return [plain(leaf) for leaf in pytree.tree_leaves(structure)]

    def without_unused(self, wanted: Sequence[Value], with_effects: bool = True) -> list[Node]:
        """Nodes on which the wanted values depend, plus nodes with side effects unless excluded."""
        needed, kept = set(map(id, wanted)), []
        for node in reversed(self.nodes):
            if node.has_effect and with_effects or any(id(result) in needed for result in node.results):
                kept.append(node)
                needed.update(map(id, node.inputs))
        return kept[::-1]


def origins(values: Iterable[Value], is_followed: Callable[[Node], bool] = lambda node: True) -> Iterator[Node]:
    """Ops from which values derive, directly or indirectly, through followed ops."""
    waiting, known = list(values), set[Node]()
    while waiting:
        node = waiting.pop().producer
        if node is not None and node not in known and is_followed(node):
            known.add(node)
            yield node
            waiting += node.inputs


def external_inputs(nodes: Sequence[Node]) -> list[Value]:
    """External inputs of ops, in order of first use."""
    made = {value for node in nodes for value in node.results}
    return list(dict.fromkeys(value for node in nodes for value in node.inputs if value not in made))


def values_in(arguments: Any) -> Iterator[Value]:
    """Values among arguments, in order."""
    return (leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Value))


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Tensors in nested values, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def with_values(arguments: Any, change: Callable[[Value], Any]) -> Any:
    """Arguments with each value replaced."""
    return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, Value) else leaf, arguments)


def with_leaf(arguments: Any, one: Any, by: Any) -> Any:
    """Arguments with one leaf replaced."""
    return pytree.tree_map(lambda leaf: by if leaf is one else leaf, arguments)


def detached(value: Value) -> View:
    """View of a whole value, through which no gradients flow."""
    return View("aten.detach", "default", {"input": BASE}, (value.shape,), value.dtype)
