"""`Passes`: the forward and the backward pass of a micro-batch, with transfers of tensors that are off chip.

Both are graphs, independent of the location of their tensors. For tensors that are off chip, a pass is a copy of its
graph: weights are loaded right before their first use, or with those of their phase; activations are stored as soon as
they are made, and loaded right before the backward pass reads them; gradients are accumulated off chip as soon as they
are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import popxl
from poptorch.enums import Liveness
from poptorch.program.storage import Stored
from popxl import ops
from popxl.context import get_current_context
from popxl.op import Op
from popxl.transforms import GradGraphInfo
from popxl_addons.transforms.graph_copies import Transfers, copy_graph

Key = popxl.Tensor | str
"""Key of a value: a tensor of the model's graph, or the name of a caller's tensor."""

Values = Mapping[popxl.Tensor, popxl.Tensor]
"""Tensors of the current graph by those of the model's graph."""

START = "//start"
"""Name of the gradient of the loss."""

InputMaker = Callable[[str, popxl.TensorSpec], popxl.Tensor]
"""Function that adds a graph input for a named tensor of the caller."""


@dataclass(frozen=True)
class Weight:
    """Parameter or buffer stored off chip or sharded, and the IPU that reads it."""

    name: str
    stored: Stored
    ipu: int | None = None


@dataclass(frozen=True)
class Phases:
    """Phases of a phased execution strategy; without arguments, of another one, which has none.

    Attributes:
        by_op: the phase of each op of the model's graph.
        liveness: time when tensors are stored off chip.
        separate: whether the backward pass starts in a phase of its own. Otherwise it starts in the last phase, whose
            tensors stay on chip before it.
    """

    by_op: Mapping[Op, int] = field(default_factory=dict)
    liveness: Liveness = Liveness.AlwaysLive
    separate: bool = False

    @property
    def leave(self) -> bool:
        """Whether tensors leave the device between phases, unless options specify otherwise."""
        return self.liveness is not Liveness.AlwaysLive

    @property
    def shared_phase(self) -> int | None:
        """Forward phase in which the backward pass begins; `None` for a separate phase."""
        return None if self.separate else max(self.by_op.values(), default=None)

    def begins_backward(self, op: Op) -> bool:
        """Whether the backward pass begins in the phase of an op."""
        return bool(self.by_op) and self.by_op.get(op) == self.shared_phase

    def readers(self, graph: popxl.Graph) -> dict[popxl.Tensor, list[int]]:
        """Phases that read each input of the model's graph, in order."""
        phases_of: dict[popxl.Tensor, dict[int, None]] = {t: {} for t in graph.inputs}
        for op in graph.ops:
            for t in op.inputs:
                if t in phases_of and op in self.by_op:
                    phases_of[t][self.by_op[op]] = None
        return {t: sorted(phases) for t, phases in phases_of.items()}


@dataclass
class _Pass:
    """Graph with bindings of its inputs."""

    graph: popxl.Graph
    needs: dict[popxl.Tensor, Key]

    def input_named(self, name: str, spec: popxl.TensorSpec) -> popxl.Tensor:
        """Get or create the input for a tensor of the caller, by name."""
        for t, key in self.needs.items():
            if key == name:
                return t
        t = self.graph.add_input(spec, name.lstrip("/"))
        self.needs[t] = name
        return t

    def call(self, values: Values, tensors: Mapping[str, popxl.Tensor]) -> Sequence[popxl.Tensor]:
        bound = {t: tensors[key] if isinstance(key, str) else values[key] for t, key in self.needs.items()}
        return ops.call(self.graph, inputs_dict=bound)


class Passes:
    """Forward and backward pass of a micro-batch.

    Args:
        weights: weights that are off chip or sharded, by input of `graph`.
        leaving: tensors of `graph` that leave the device until the gradient reads them.
        accumulated: by output of the gradient graph, the function that accumulates it as soon as it is made, with
            inputs for its values from the caller.
    """

    def __init__(
        self,
        graph: popxl.Graph,
        gradient: GradGraphInfo | None,
        weights: Mapping[popxl.Tensor, Weight],
        leaving: Collection[popxl.Tensor],
        accumulated: Mapping[popxl.Tensor, Sequence[Callable[[popxl.Tensor, InputMaker], None]]],
        phases: Phases,
    ) -> None:
        self._weights, self._phases = weights, phases
        self._readers = phases.readers(graph)
        self._forward = _Pass(graph, {t: t for t in graph.inputs})
        self._results = list(graph.outputs)
        self._backward: _Pass | None = None
        self._gradients: Sequence[popxl.Tensor] = ()
        if weights or leaving:
            self._copy_forward(graph, leaving)
        if gradient is not None:
            self._gradients = gradient.outputs
            start, *others = zip(gradient.graph.inputs, gradient.inputs, strict=True)
            self._backward = _Pass(gradient.graph, {start[0]: START, **dict(others)})
            if weights or leaving or accumulated:
                self._copy_backward(gradient.graph, dict(others), leaving, accumulated)

    def forward(self, arguments: Values, tensors: Mapping[str, popxl.Tensor]) -> Values:
        """Add the forward pass to the current graph. Returns the arguments, and the outputs of the model.

        Args:
            arguments: bindings of the model's inputs, except for those of `weights`.
            tensors: the caller's tensors for stored tensors, by name.
        """
        return {**arguments, **dict(zip(self._results, self._forward.call(arguments, tensors), strict=True))}

    def backward(self, start: popxl.Tensor, values: Values, tensors: Mapping[str, popxl.Tensor]) -> Values:
        """Add the backward pass to the current graph. Returns gradients by input of the model.

        Args:
            tensors: the caller's tensors for stored tensors, and for `accumulated`, by name.
        """
        assert self._backward is not None
        results = self._backward.call(values, {**tensors, START: start})
        return dict(zip(self._gradients, results, strict=True))

    # Copies ---------------------------------------------------------------------------------------------------------

    def _copy_forward(self, graph: popxl.Graph, leaving: Collection[popxl.Tensor]) -> None:
        """Replace the forward graph by a copy that loads weights, and offloads activations."""
        copy = graph.ir.create_empty_graph(graph.name.partition("_subgraph")[0])
        forward = _Pass(copy, {})
        phases = self._phases
        transfers = Transfers(
            fetched={t: self._fetch(forward, weight) for t, weight in self._weights.items()},
            fetch_group=lambda op, t: [w for w in self._weights if phases.by_op.get(op) in self._readers[w]] or (t,),
            period=(phases.by_op if phases.liveness is Liveness.OffChipAfterEachPhase else {}).get,
            offloaded=dict.fromkeys(leaving, ops.offload),
        )
        _, copied = copy_graph(graph, transfers, copy)
        forward.needs.update((copied[t], t) for t in graph.inputs if t not in self._weights)
        for t in self._weights:
            if self._stays(t):
                copy.add_output(copied[t])
                self._results.append(t)
        self._forward = forward
        graph.ir.remove_graph(graph)

    def _copy_backward(
        self,
        graph: popxl.Graph,
        read: Mapping[popxl.Tensor, popxl.Tensor],
        leaving: Collection[popxl.Tensor],
        accumulated: Mapping[popxl.Tensor, Sequence[Callable[[popxl.Tensor, InputMaker], None]]],
    ) -> None:
        """Replace the gradient graph by a copy that loads weights and activations, and accumulates gradients."""
        copy = graph.ir.create_gradient_graph(self._forward.graph)
        copy.gradient_of = self._forward.graph
        backward = _Pass(copy, {})
        fetched: dict[popxl.Tensor, Callable[[popxl.Tensor | None], popxl.Tensor]] = {}
        weights: dict[popxl.Tensor, popxl.Tensor] = {}  # inputs of the gradient graph, by those of the model
        for t, of_model in read.items():
            if of_model in self._weights and not self._stays(of_model):
                fetched[t], weights[of_model] = self._fetch(backward, self._weights[of_model]), t
            elif of_model in leaving:
                fetched[t] = _reload(backward, of_model)
        last = {weights[t]: max(self._readers[t], default=-1) for t in weights}

        def phase_weights(op: Op, t: popxl.Tensor) -> Iterable[popxl.Tensor]:
            """Weights of the tensor's phase; a weight read in several phases belongs to the last."""
            has_phase = last.get(t, -1) >= 0
            return [each for each in last if last[each] == last[t]] if has_phase else [t]

        def accumulate(t: popxl.Tensor) -> Callable[[popxl.Tensor], popxl.Tensor]:
            def take(gradient: popxl.Tensor) -> popxl.Tensor:
                for each in accumulated[t]:
                    each(gradient, backward.input_named)
                return gradient

            return take

        leaves = {t: accumulate(t) for t in accumulated}
        _, copied = copy_graph(graph, Transfers(fetched, phase_weights, offloaded=leaves), copy)
        backward.needs.update((copied[t], read.get(t, START)) for t in graph.inputs if t not in fetched)
        self._backward = backward
        graph.ir.remove_graph(graph)

    def _fetch(self, made: _Pass, weight: Weight) -> Callable[[popxl.Tensor | None], popxl.Tensor]:
        """Function that fetches a whole weight to the device."""
        stored, overlaps = weight.stored, self._phases.liveness is not Liveness.OffChipAfterFwdNoOverlap

        def fetch(after: popxl.Tensor | None) -> popxl.Tensor:
            with get_current_context().on_ipu(weight.ipu):
                if stored.buffer is not None:  # the runtime overlaps loads with earlier ops
                    return stored.gather(stored.load(None, None if overlaps else after))
                return stored.gather(stored.load(made.input_named(weight.name, stored.local_spec), after))

        return fetch

    def _stays(self, t: popxl.Tensor) -> bool:
        """Whether the backward pass starts with a weight still on the device."""
        return self._phases.shared_phase in self._readers[t]


def _reload(made: _Pass, activation: popxl.Tensor) -> Callable[[popxl.Tensor | None], popxl.Tensor]:
    def reload(after: popxl.Tensor | None) -> popxl.Tensor:
        given = made.graph.add_input_like(activation)
        made.needs[given] = activation
        return ops.reload(given if after is None else ops.available_after(given, after))

    return reload
