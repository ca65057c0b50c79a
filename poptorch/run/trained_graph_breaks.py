"""`TrainedBrokenGraph`: a training model split into subgraphs by graph breaks, where the host inspects data.

The program at the end of a path is a whole step, and receives the results of the host. It recomputes all values that
gradients flow through, for any number of breaks, so gradients flow as if there were none: through `hidden` in
`hidden[labels > 0]`, and not through the positions. Earlier programs only compute the operands of the host. Their
results without a gradient are passed on.

Each end has its own variables. The final values of one, weights, state of the optimiser and of random numbers, are
passed to the next one through the host. Nothing is copied as long as the same one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from poptorch.capture.constants import constant_data
from poptorch.capture.losses import final_loss
from poptorch.capture.trace import Trace, Value
from poptorch.errors import Error, createPoptorchError
from poptorch.lowering.emission import drawing
from poptorch.program.program_io import ProgramIO
from poptorch.run.compiled import Compiled
from poptorch.run.graph_breaks import BrokenGraph
from poptorch.run.subgraphs import Call, Content, IdentifiedPath, Subgraph, is_constant, partition
from popxl.tensor import Variable


class TrainedBrokenGraph(BrokenGraph):
    """A training model compiled as several subgraphs.

    Raises:
        poptorch.Error: as for `BrokenGraph`; if ops that draw random numbers, or have another effect, would have to run
            twice.
    """

    _keeps_buffers = False  # the program of the step has them

    def __init__(self, *args: Any) -> None:
        self._newest: Compiled | None = None  # the end program that ran last, whose variables are the newest
        self._saved: dict[tuple[str, str], np.ndarray] = {}  # final values of programs that ran before it
        self._state: dict[str, Variable] = {}
        self._numbers: np.ndarray | None = None
        super().__init__(*args)

    # Subgraphs ------------------------------------------------------------------------------------------------------

    def _contents(self, path: IdentifiedPath, before: Sequence[Content | None]) -> list[Content]:
        """Contents of the subgraphs before the step, which only compute what the host looks at, and of the step."""
        trace = path.captured.trace
        operands = [value for graph_break in path.breaks for value in graph_break.operands]
        of_operands = Trace(nodes=trace.nodes[: path.breaks[-1].position]).without_unused(operands, with_effects=False)
        known = {id(node) for node in of_operands if not is_constant(node) and not any(map(_is_tracked, node.results))}
        needed = [*path.outputs, *path.captured.updated.values(), final_loss(trace)]
        nodes = Trace(nodes=[node for node in trace.nodes if id(node) not in known]).without_unused(needed)
        made = {id(value) for node in nodes for value in node.results}
        used = dict.fromkeys([*(value for node in nodes for value in node.inputs), *needed])
        others = [value for value in used if id(value) not in made and constant_data(value) is None]
        inputs = [value for value in others if path.id_of(value)[0] in ("op", "graph break")]
        twice = {id(node) for node in nodes} & set(map(id, of_operands))
        for node in nodes:
            if node.has_effect and id(node) in twice:
                raise _cannot_be_done_twice(f"{node} does more than to compute", path)
        step = Content(nodes, path.ids_of(inputs), path.ids_of(path.outputs))
        return [*partition(path, before[:-1], set(inputs), with_effects=False), step]

    def _compile(self, path: IdentifiedPath, content: Content, number: int = 0) -> Compiled:
        compiled = super()._compile(path, content, number)
        if compiled.io.random is not None:
            for node in drawing(content.nodes):
                if any(map(_is_tracked, node.results)):
                    compiled.close()
                    raise _cannot_be_done_twice(f"{node} draws random numbers", path)
        return compiled

    def _end_maker(self, path: IdentifiedPath, content: Content) -> Callable[[], Compiled]:
        return partial(self._compile_step, path, content)

    def _compile_step(self, path: IdentifiedPath, content: Content) -> Compiled:
        captured = path.captured
        inputs = [*captured.inputs, *path.values_of(content.inputs)]
        trace = Trace([*inputs, *captured.state.values()], content.nodes, captured.trace.outputs)
        step = replace(captured, trace=trace, inputs=inputs)
        compiled = self._compile_captured(step, path.structure, self._request, dict(self._host()))
        if self._numbers is not None:
            compiled.write_numbers(self._numbers)
        self._state |= compiled.io.state
        if self._newest is None and not self._saved:  # the first one
            self._newest = compiled
        return compiled

    def _close(self, subgraph: Subgraph) -> None:
        if subgraph.compiled is not None and subgraph.compiled is self._newest:
            self._save_newest()
        super()._close(subgraph)

    # Running --------------------------------------------------------------------------------------------------------

    def _run_subgraph(self, subgraph: Subgraph, call: Call) -> None:
        program = subgraph.program()
        if program is not None and (names := program.io.variables):
            program.write_weights(self.weights(names))
        super()._run_subgraph(subgraph, call)

    def _run_end(self, end: Subgraph, path: IdentifiedPath, call: Call) -> Any:
        step, content = end.program(), end.content
        assert step is not None and content is not None
        if step is not self._newest:
            self._save_newest()
            step.write_persistent_state(self._saved)
            self._newest = step
        try:
            return step.run([*call.tensors, *call.select(content.inputs)], call.objects)
        finally:
            self.times = step.times

    def _save_newest(self) -> None:
        """Save the newest end program's persistent state."""
        if self._newest is not None:
            self._saved |= self._newest.persistent_state()
            self._newest = None

    # Interface of `Compiled` ----------------------------------------------------------------------------------------

    @property
    def io(self) -> ProgramIO:
        """Tensor names of all programs, and their combined optimiser state."""
        return replace(super().io, state=self._state)

    def attach(self, host: Mapping[str, np.ndarray]) -> None:
        self._save_weights(host)
        super().attach(host)

    def weights(self, names: Container[str] | None = None) -> dict[str, np.ndarray]:
        saved = {name: array for name, array in self._saved_as("weight").items() if names is None or name in names}
        return saved if self._newest is None else saved | self._newest.weights(names)

    def write_weights(self, host: Mapping[str, np.ndarray]) -> None:
        self._save_weights(host)
        for each in self._root.descendants():
            if each.compiled is not None and (each.graph_break is not None or each.compiled is self._newest):
                each.compiled.write_weights(host)

    def _save_weights(self, host: Mapping[str, np.ndarray]) -> None:
        """Save weights unused by the newest end program, for programs that use them."""
        own = {} if self._newest is None else self._newest.io.variables
        self._saved |= {("weight", name): array.copy() for name, array in host.items() if name not in own}

    def persistent_state(self) -> dict[tuple[str, str], np.ndarray]:
        """Persistent state between runs, keyed by kind (weight, state or random) and name."""
        self._save_newest()
        return self._saved

    def write_persistent_state(self, values: Mapping[tuple[str, str], np.ndarray]) -> None:
        self._newest, self._saved = None, {**self._saved, **values}

    def state(self) -> dict[str, np.ndarray]:
        """Optimiser state by name."""
        saved = self._saved_as("state")
        return saved if self._newest is None else saved | self._newest.state()

    def write_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite optimiser state."""
        self._saved |= {("state", name): array for name, array in state.items()}
        if self._newest is not None:
            self._newest.write_state({name: a for name, a in state.items() if name in self._newest.io.state})

    def write_numbers(self, numbers: np.ndarray) -> None:
        self._numbers = numbers
        for each in self._programs:
            each.write_numbers(numbers)

    def _saved_as(self, kind: str) -> dict[str, np.ndarray]:
        """Saved values of a kind, by name."""
        return {name: array for (saved_as, name), array in self._saved.items() if saved_as == kind}


def _is_tracked(value: Value) -> bool:
    return bool(value.requires_grad)


def _cannot_be_done_twice(what: str, path: IdentifiedPath) -> Error:
    return createPoptorchError(
        f"{path.breaks[0].source}: the host has to look at numbers here, to know a shape or what Python does next. "
        "What they come of is computed before, and once more in the step, for gradients to flow. But "
        f"{what} there, which cannot be done twice. Have the host look at what comes before that; or keep shapes, with "
        "`torch.where(mask, x, 0)`."
    )
