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
import torch

from poptorch.capture.losses import final_loss
from poptorch.capture.trace import Trace, Value
from poptorch.errors import Error, createPoptorchError
from poptorch.lowering.emission import drawing
from poptorch.program.program_io import ProgramIO
from poptorch.run.captured import constant_of
from poptorch.run.compiled import Compiled
from poptorch.run.graph_breaks import BrokenGraph
from poptorch.run.subgraphs import Content, ExecutionPath, Subgraph, ValueIds, is_constant, outputs_of
from popxl.tensor import Variable


class TrainedBrokenGraph(BrokenGraph):
    """A training model compiled as several subgraphs.

    Raises:
        poptorch.Error: as for `BrokenGraph`; if ops that draw random numbers, or have another effect, would have to run
            twice.
    """

    _holds_buffers = False  # the program of the step holds them

    def __init__(self, *of_parts: Any) -> None:
        self._newest: Compiled | None = None
        self._left: dict[tuple[str, str], np.ndarray] = {}  # of programs that ran before the newest
        self._state: dict[str, Variable] = {}
        self._numbers: np.ndarray | None = None
        super().__init__(*of_parts)

    # Parts ----------------------------------------------------------------------------------------------------------

    def _needed(self, path: ExecutionPath, places: ValueIds, parts: Sequence[Subgraph]) -> list[Content]:
        trace = path.captured.trace
        before = Trace(nodes=trace.nodes[: path.breaks[-1].at])
        looked_at = before.without_unused(
            [value for graph_break in path.breaks for value in graph_break.given], with_effects=False
        )
        known = {id(node) for node in looked_at if not is_constant(node) and not any(map(_is_tracked, node.results))}
        outputs = outputs_of(path)
        wanted = [*outputs, *path.captured.written.values(), final_loss(trace)]
        nodes = Trace(nodes=[node for node in trace.nodes if id(node) not in known]).without_unused(wanted)
        made = {id(value) for node in nodes for value in node.results}
        inputs = dict.fromkeys([*(value for node in nodes for value in node.inputs), *wanted])
        given = [
            v for v in inputs if id(v) not in made and constant_of(v) is None and places[v][0] in ("op", "graph_break")
        ]
        twice = {id(node) for node in nodes} & {id(node) for node in looked_at}
        for node in nodes:
            if node.has_effect and id(node) in twice:
                raise _cannot_be_done_twice(f"{node} does more than to compute", path)
        step = Content(nodes, [places[value] for value in given], [places[value] for value in outputs])
        return [*self._handed_on(path, places, parts[:-1], set(given), with_effects=False), step]

    def _compile(self, path: ExecutionPath, places: ValueIds, content: Content, number: int = 0) -> Compiled:
        compiled = super()._compile(path, places, content, number)
        if compiled.io.random is not None:
            for node in drawing(content.nodes):
                if any(map(_is_tracked, node.results)):
                    compiled.close()
                    raise _cannot_be_done_twice(f"{node} draws random numbers", path)
        return compiled

    def _maker_of_end(self, path: ExecutionPath, places: ValueIds, content: Content) -> Callable[[], Compiled]:
        return partial(self._made_step, path, places, content)

    def _made_step(self, path: ExecutionPath, places: ValueIds, content: Content) -> Compiled:
        captured = path.captured
        inputs = [*captured.inputs, *(places.value[place] for place in content.given)]
        trace = Trace([*inputs, *captured.state.values()], content.nodes, captured.trace.outputs)
        step = replace(captured, trace=trace, inputs=inputs)
        compiled = self._compiled(step, path.answer, self._request, dict(self._host()))
        if self._numbers is not None:
            compiled.write_numbers(self._numbers)
        self._state |= compiled.io.state
        if self._newest is None and not self._left:  # the first one
            self._newest = compiled
        return compiled

    def _close(self, part: Subgraph) -> None:
        if part.compiled is not None and part.compiled is self._newest:
            self._leave()
        super()._close(part)

    # Running --------------------------------------------------------------------------------------------------------

    def _run_part(self, part: Subgraph, known: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        program = self._program(part)
        if program is not None and (names := program.io.variables):
            program.write_weights(self.weights(names))
        return super()._run_part(part, known)

    def _end(
        self,
        part: Subgraph,
        path: ExecutionPath,
        known: dict[Any, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        objects: Any,
    ) -> Any:
        step, content = self._program(part), part.content
        assert step is not None and content is not None
        if step is not self._newest:
            self._leave()
            step.write_lasting(self._left)
            self._newest = step
        try:
            return step.run([*tensors, *content.select_inputs(known)], objects)
        finally:
            self.times = step.times

    def _leave(self) -> None:
        """Save the newest end program's persistent state."""
        if self._newest is not None:
            self._left |= self._newest.lasting()
            self._newest = None

    # Interface of `Compiled` ----------------------------------------------------------------------------------------

    @property
    def io(self) -> ProgramIO:
        """Tensor names of all programs, and their combined optimiser state."""
        return replace(super().io, state=self._state)

    def attach(self, host: Mapping[str, np.ndarray]) -> None:
        """Attach a device, loading given parameter and buffer values."""
        self._save_weights(host)
        super().attach(host)

    def weights(self, names: Container[str] | None = None) -> dict[str, np.ndarray]:
        """Device values of parameters and buffers by name, optionally only the named ones."""
        left = {name: array for name, array in self._saved_weights("weight").items() if names is None or name in names}
        return left if self._newest is None else left | self._newest.weights(names)

    def write_weights(self, host: Mapping[str, np.ndarray]) -> None:
        """Overwrite parameter and buffer values on the device, only those given."""
        self._save_weights(host)
        for part in self._root.descendants():
            if part.compiled is not None and (part.graph_break is not None or part.compiled is self._newest):
                part.compiled.write_weights(host)

    def _save_weights(self, host: Mapping[str, np.ndarray]) -> None:
        """Save weights unused by the newest end program, for programs that use them."""
        own = {} if self._newest is None else self._newest.io.variables
        self._left |= {("weight", name): array.copy() for name, array in host.items() if name not in own}

    def lasting(self) -> dict[tuple[str, str], np.ndarray]:
        """All state carried between runs, keyed by kind (weight, state or random) and name."""
        self._leave()
        return self._left

    def write_lasting(self, values: Mapping[tuple[str, str], np.ndarray]) -> None:
        """Overwrite state carried between runs."""
        self._newest, self._left = None, {**self._left, **values}

    def state(self) -> dict[str, np.ndarray]:
        """Optimiser state by name."""
        left = self._saved_weights("state")
        return left if self._newest is None else left | self._newest.state()

    def write_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite optimiser state."""
        self._left |= {("state", name): array for name, array in state.items()}
        if self._newest is not None:
            self._newest.write_state({name: a for name, a in state.items() if name in self._newest.io.state})

    def write_numbers(self, numbers: np.ndarray) -> None:
        """Set optimiser hyperparameters, effective next run."""
        self._numbers = numbers
        for each in self._programs:
            each.write_numbers(numbers)

    def _saved_weights(self, kind: str) -> dict[str, np.ndarray]:
        return {name: array for (of, name), array in self._left.items() if of == kind}


def _is_tracked(value: Value) -> bool:
    return bool(value.requires_grad)


def _cannot_be_done_twice(what: str, path: ExecutionPath) -> Error:
    return createPoptorchError(
        f"{path.breaks[0].source}: the host has to look at numbers here, to know a shape or what Python does next. "
        "What they come of is computed before, and once more in the step, for gradients to flow. But "
        f"{what} there, which cannot be done twice. Have the host look at what comes before that; or keep shapes, with "
        "`torch.where(mask, x, 0)`."
    )
