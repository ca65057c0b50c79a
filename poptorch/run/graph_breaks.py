"""`BrokenGraph`: a model split into subgraphs by graph breaks, where the host inspects data.

It is a tree. Each node is a program, followed by a host operation. The results of the host operation, shapes of tensors
and Python numbers, select the next branch. A missing branch is captured and compiled when a call reaches it; the most
recently used are kept. Values that later programs need are passed on by the host.

A capture goes through all of `forward`, so it makes all programs of a path. Paths have equal programs up to their
branching point: the same function does the same there. So a value is identified, in all of them, by its `ValueId`.

A model for training is split in another way: see `poptorch.run.trained_graph_breaks`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

import popxl
from poptorch.base.dtypes import from_numpy, to_numpy
from poptorch.base.host_numbers import Number
from poptorch.base.leaves import Structure
from poptorch.base.logging_ import Warned
from poptorch.base.outputs import OutputStructure
from poptorch.capture.graph_breaks import GraphBreak
from poptorch.capture.model import Captured
from poptorch.capture.tensor_layout import overwrite
from poptorch.capture.trace import Trace, Value, tensors_in
from poptorch.errors import createPoptorchError
from poptorch.program.program_io import ProgramIO
from poptorch.program.request import ProgramRequest
from poptorch.run.arguments import Signature
from poptorch.run.captured import constant_of
from poptorch.run.compiled import Compiled
from poptorch.run.program_compilation import compile_captured
from poptorch.run.subgraphs import (
    Content,
    ExecutionPath,
    Subgraph,
    ValueId,
    ValueIds,
    is_constant,
    outputs_of,
    segment_bounds,
    segment_ops,
)
from poptorch.run.timings import Times


class BrokenGraph:
    """A model compiled as several subgraphs, with `Compiled`'s interface where that needs no single program.

    Args:
        capture: function that captures the model again: for these tensors, and results of the first breaks.
        request: what programs are made with; there is one micro-batch.
        host: function that returns the values of parameters and buffers.

    Raises:
        poptorch.Error: if there are several micro-batches.
    """

    host_numbers: Mapping[str, Number] = MappingProxyType({})
    """The numbers of the module that it carries: none."""
    changed_on_host: Collection[str] = ()
    """What functions of the host are known to change: nothing."""
    _holds_buffers = True
    """Whether the host has the buffers that the model overwrites, from one call to the next."""

    def __init__(
        self,
        capture: Callable[[Sequence[torch.Tensor], Sequence[Any]], ExecutionPath],
        capturing: Callable[[], AbstractContextManager[Any]],
        path: ExecutionPath,
        signature: Signature,
        request: ProgramRequest,
        host: Callable[[], Mapping[str, np.ndarray]],
    ) -> None:
        self.signature = signature
        self.read = dict(path.captured.read)
        self.anchored: dict[str, torch.Tensor] = {}
        self.times = Times()
        self._capture, self._capturing, self._host = capture, capturing, host
        self._request, self._options = request, request.options
        self._turn = threading.Lock()
        self._root = Subgraph()
        self._runs = 0
        self._is_attached = False
        self._warned = Warned()
        self._host_buffers: dict[str, torch.Tensor] = {}
        if path.captured.written and self._holds_buffers:
            arrays, buffers = host(), [name for name, value in path.captured.state.items() if value.of_buffer]
            self._host_buffers = {name: from_numpy(arrays[name].copy()) for name in buffers if name in arrays}
        self._check(path)
        self._extend(path)
        for part in self._root.descendants():  # the host has seen the numbers of a call: most often the guess is right
            self._program(part)

    # Parts ----------------------------------------------------------------------------------------------------------

    def _extend(self, path: ExecutionPath) -> bool:
        """Extend the subgraph tree with an execution path. Return whether an existing program needs additional outputs.

        Each program is compiled when a run reaches it: host results further along the path are guesses so far.
        """
        if self._holds_buffers and (others := path.captured.written.keys() - self._host_buffers.keys()):
            raise createPoptorchError(
                f"{path.breaks[0].source}: `forward` overwrites {', '.join(sorted(others))} after what the host has "
                "found here now, and no buffer after what it found first. Have it overwrite a buffer in all cases."
            )
        parts = [self._root]
        for graph_break in path.breaks:
            parts[-1].graph_break = parts[-1].graph_break or graph_break
            parts.append(parts[-1].after.setdefault(graph_break.key, Subgraph(used=self._runs)))
        for part, ops in zip(parts, segment_ops(path), strict=True):
            if part.content is not None and part.ops != ops:
                raise createPoptorchError(
                    f"`forward` does something else than before, up to where the host looks ({path.breaks[0].source}), "
                    "for the same shapes and numbers. Python that changes from call to call cannot be compiled."
                )
            part.ops = ops
        places = ValueIds(path, self._host_buffers)
        for part, graph_break in zip(parts, path.breaks, strict=False):
            part.asked = [places[value] for value in graph_break.given]
        needed = self._needed(path, places, parts)
        changed = False
        for number, (part, content) in enumerate(zip(parts, needed, strict=True)):
            if part.content is not None and part.content.wanted == content.wanted:
                continue
            changed |= part.content is not None and part.make is None
            self._close(part)
            part.content, part.compiled = content, None
            if part is parts[-1]:
                part.make = self._maker_of_end(path, places, content)
            else:
                part.make = partial(self._compile, path, places, content, number + 1) if content.wanted else None
        parts[-1].path = path
        self._forget_some()
        return changed

    def _program(self, part: Subgraph) -> Compiled | None:
        """A subgraph's program, compiled on first use."""
        if part.make is not None:
            part.compiled = part.make()
            part.make = None
        return part.compiled

    def _needed(self, path: ExecutionPath, places: ValueIds, parts: Sequence[Subgraph]) -> list[Content]:
        """Compute each subgraph's content."""
        outputs = [*outputs_of(path), *path.captured.written.values()]
        return self._handed_on(path, places, parts, {v for v in outputs if constant_of(v) is None})

    @staticmethod
    def _handed_on(
        path: ExecutionPath, places: ValueIds, parts: Sequence[Subgraph], needed: set[Value], with_effects: bool = True
    ) -> list[Content]:
        """Partition ops into subgraph contents, each computing only values not computed earlier.

        Each subgraph recomputes run-invariant values itself.

        Args:
            needed: values that are needed after the last of them.
            with_effects: whether to keep unused ops that have effects.
        """
        trace, (begins, ends) = path.captured.trace, segment_bounds(path)
        ordered = {place: i for i, place in enumerate(places.value)}
        constants = {id(node) for node in trace.nodes if is_constant(node)}
        found: list[Content] = []
        for i in reversed(range(len(parts))):
            if i < len(path.breaks):
                needed |= set(path.breaks[i].given)
            ops = [node for node in trace.nodes[: begins[i]] if id(node) in constants]
            ops += trace.nodes[begins[i] : ends[i]]
            here = {id(value) for node in ops for value in node.results}
            here |= {id(value) for value in needed if places[value][0] == "state"}
            wanted = {places[value] for value in needed if id(value) in here}
            if (before := parts[i].content) is not None:
                wanted |= set(before.wanted)
            ordered_wanted = sorted(wanted, key=ordered.__getitem__)
            values = [places.value[place] for place in ordered_wanted]
            nodes = Trace(nodes=ops).without_unused(values, with_effects)
            made = {id(value) for node in nodes for value in node.results}
            inputs = dict.fromkeys(value for node in nodes for value in node.inputs if id(value) not in made)
            given = [value for value in inputs if places[value][0] != "state"]
            needed = {value for value in needed if id(value) not in here} | set(given)
            found.append(Content(nodes, [places[value] for value in given], ordered_wanted))
        return found[::-1]

    def _compile(self, path: ExecutionPath, places: ValueIds, content: Content, number: int = 0) -> Compiled:
        """Compile a subgraph. Its number offsets the seed: earlier programs draw different random numbers."""
        nodes = content.nodes
        values = [places.value[place] for place in content.given]
        wanted = [places.value[place] for place in content.wanted]
        used = {id(value) for node in nodes for value in node.inputs} | set(map(id, wanted))
        own = {name: value for name, value in path.captured.state.items() if name not in self._host_buffers}
        state = {name: value for name, value in own.items() if id(value) in used}
        results = [torch.empty(value.shape, dtype=value.dtype) for value in wanted]
        captured = Captured(
            trace=Trace(inputs=[*values, *state.values()], nodes=nodes, outputs=wanted),
            inputs=values,
            state=state,
            written={},
            written_inputs={},
            result=results,
            hooks=[],
            read={},
            frozen=[],
        )
        host = {name: array for name, array in self._host().items() if name in state}
        if self._is_attached:
            host |= self.weights(state)  # the host may have changed these meanwhile
        request = replace(self._request, update=None, seed=self._request.seed + number)
        return self._compiled(captured, OutputStructure(results, {}, []), request, host)

    def _compiled(
        self, captured: Captured, answer: Structure, request: ProgramRequest, host: Mapping[str, np.ndarray]
    ) -> Compiled:
        """Compile a captured subgraph, whose arguments are its inputs, and attach it if others are attached."""
        tensors = tuple(torch.empty(value.shape, dtype=value.dtype) for value in captured.inputs)
        signature = Signature(lambda *given: None, tensors, {})
        compiled = compile_captured(popxl.Ir(replication=1), captured, answer, signature, request, host)
        if self._is_attached:
            compiled.attach(host)
        return compiled

    def _maker_of_end(self, path: ExecutionPath, places: ValueIds, content: Content) -> Callable[[], Compiled] | None:
        """Compilation function of a path's last subgraph."""
        return partial(self._compile, path, places, content) if content.wanted else None

    def _forget_some(self) -> None:
        """Evict least recently used path ends beyond the limit in the options."""
        while True:
            ends = [part for part in self._root.descendants() if part.path is not None]
            if len(ends) <= self._options.kept_programs:
                return
            oldest = min(ends, key=lambda part: part.used)
            line = self._forget(oldest)
            self._warned.once(
                "kept programs",
                "The model is compiled for each shape and number that the host finds on the way (%s), and these "
                "are more than %d. Each new one costs a compilation. Pad to a few shapes, or choose with "
                "`torch.where` in place of a number; or keep more programs: `options.keptPrograms(%d)`.",
                line,
                self._options.kept_programs,
                2 * self._options.kept_programs,
            )

    def _forget(self, end: Subgraph) -> Any:
        """Evict programs leading only to the given end. Return the source line where its path diverges from others."""
        while True:
            self._close(end)
            before = next(part for part in self._root.descendants() if end in part.after.values())
            before.after = {key: part for key, part in before.after.items() if part is not end}
            if before.after or before is self._root:
                assert before.graph_break is not None
                return before.graph_break.source
            end = before

    def _check(self, path: ExecutionPath) -> None:
        """Check that graph breaks are allowed for a model."""
        where = path.breaks[0].source
        if self._options.anchored_tensors:
            raise createPoptorchError(
                f"{where}: a model that is graph_break here, for the host to look, has no anchored tensors."
            )

    def _close(self, part: Subgraph) -> None:
        if part.compiled is not None:
            part.compiled.close()

    # Running --------------------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[torch.Tensor], objects: Sequence[Any] = ()) -> Any:
        """Run subgraph programs on call tensors in sequence; see `Compiled.run`."""
        with self._turn:
            self._runs += 1
            while (done := self._run(tensors, objects)) is None:
                continue
            return done[0]

    def _run(self, tensors: Sequence[torch.Tensor], objects: Sequence[Any]) -> tuple[Any] | None:
        """Execute one call. Return `None` if an existing program was recompiled, which requires restarting the call."""
        known: dict[ValueId, torch.Tensor] = {("input", i): t for i, t in enumerate(tensors)}
        known |= {("held", name): t for name, t in self._host_buffers.items()}
        answers: list[Any] = []
        part = self._root
        while True:
            part.used = self._runs
            if part.path is not None:
                return (self._end(part, part.path, known, tensors, objects),)
            known |= self._run_part(part, known)
            assert part.graph_break is not None
            made = part.graph_break.numbers([known[place] for place in part.asked])
            known |= {("graph_break", len(answers), j): t for j, t in enumerate(tensors_in(made))}
            answers.append(made)
            key = GraphBreak.key_of(made)
            if key not in part.after or part.after[key].content is None:  # it was tried, and could not be captured
                with self._capturing():
                    path = self._capture(tensors, answers)
                    if self._extend(path):
                        return None
            part = part.after[key]

    def _run_part(self, part: Subgraph, known: Mapping[ValueId, torch.Tensor]) -> dict[ValueId, torch.Tensor]:
        """Run a subgraph, and return its outputs."""
        program, content = self._program(part), part.content
        if program is None or content is None:
            return {}
        return dict(zip(content.wanted, program.run(content.select_inputs(known)), strict=True))

    def _end(
        self,
        part: Subgraph,
        path: ExecutionPath,
        known: dict[ValueId, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        objects: Sequence[Any],
    ) -> Any:
        """Run the last subgraph. Return the result."""
        return self._result(path, known | self._run_part(part, known), tensors, objects)

    def _result(
        self,
        path: ExecutionPath,
        known: Mapping[ValueId, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        objects: Sequence[Any],
    ) -> Any:
        captured, places = path.captured, ValueIds(path, self._host_buffers)

        def numbers(value: Value) -> torch.Tensor:
            constant = constant_of(value)
            return constant.clone() if constant is not None else known[places[value]]

        with torch.no_grad():
            rewritten = [(i, numbers(value)) for i, value in captured.written_inputs.items()]
            results = [numbers(value) for value in captured.trace.outputs]
            self._host_buffers |= {name: numbers(value).detach().clone() for name, value in captured.written.items()}
            for i, content in rewritten:
                overwrite(tensors[i], content)
        return path.answer.rebuild(results, objects)

    # Interface of `Compiled` ----------------------------------------------------------------------------------------

    @property
    def _programs(self) -> list[Compiled]:
        return [part.compiled for part in self._root.descendants() if part.compiled is not None]

    @property
    def session(self) -> popxl.Session:
        """The session of the last program on the most recently used path."""
        newest = max(
            self._root.descendants(), key=lambda part: (part.used, part.compiled is not None, part.path is not None)
        )
        if newest.compiled is None:
            raise createPoptorchError("The model has no program: the host does all that there is to do.")
        return newest.compiled.session

    @property
    def io(self) -> ProgramIO:
        """Tensor names of all programs, and buffers overwritten by the model."""
        names = tuple(chain.from_iterable(each.io.names for each in self._programs))
        return ProgramIO(names=names, written=frozenset(self._host_buffers))

    @property
    def is_attached(self) -> bool:
        """Whether a device is attached."""
        return self._is_attached

    def attach(self, host: Mapping[str, np.ndarray]) -> None:
        """Attach a device, loading given parameter and buffer values."""
        self._hold(host)
        for each in self._programs:
            each.attach(host)
        self._is_attached = True

    def detach(self) -> None:
        """Release the device."""
        for each in self._programs:
            each.detach()
        self._is_attached = False

    def close(self) -> None:
        """Release the device permanently."""
        for each in self._programs:
            each.close()
        self._is_attached = False

    def weights(self, names: Container[str] | None = None) -> dict[str, np.ndarray]:
        """Device values of parameters and buffers by name, optionally only the named ones."""
        held = {name: to_numpy(t) for name, t in self._host_buffers.items() if names is None or name in names}
        return held | {name: array for each in self._programs for name, array in each.weights(names).items()}

    def write_weights(self, host: Mapping[str, np.ndarray]) -> None:
        """Overwrite parameter and buffer values on the device, only those given."""
        self._hold(host)
        for each in self._programs:
            each.write_weights(host)

    def _hold(self, host: Mapping[str, np.ndarray]) -> None:
        self._host_buffers |= {name: from_numpy(host[name].copy()) for name in self._host_buffers.keys() & host.keys()}

    @property
    def version(self) -> int:
        """Number of variable writes so far."""
        return sum(each.version for each in self._programs)

    def lasting(self) -> dict[tuple[str, str], np.ndarray]:
        """All state carried between runs: weights, keyed by kind and name."""
        return {("weight", name): array for name, array in self.weights().items()}

    def write_lasting(self, values: Mapping[tuple[str, str], np.ndarray]) -> None:
        """Overwrite state carried between runs."""
        self.write_weights({name: array for (_, name), array in values.items()})

    def write_numbers(self, numbers: np.ndarray) -> None:
        """No-op: this model has no optimiser."""
