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
from poptorch.capture.constants import constant_data
from poptorch.capture.graph_breaks import GraphBreak
from poptorch.capture.model import Captured
from poptorch.capture.tensor_layout import overwrite
from poptorch.capture.trace import Trace, Value, tensors_in
from poptorch.errors import createPoptorchError
from poptorch.program.program_io import ProgramIO
from poptorch.program.request import ProgramRequest
from poptorch.run.arguments import Signature
from poptorch.run.compiled import Compiled
from poptorch.run.program_compilation import compile_captured
from poptorch.run.subgraphs import Call, Content, ExecutionPath, IdentifiedPath, Subgraph, partition
from poptorch.run.timings import Times
from popxl.extend.source import SourceLocation


class BrokenGraph:
    """A model compiled as several subgraphs, with `Compiled`'s interface where that needs no single program.

    Args:
        capture: function that captures the model again: for these tensors, and results of the first breaks.
        path: first capture of the model.
        request: what programs are made with; there is one micro-batch.
        host: function that returns the values of parameters and buffers.

    Raises:
        poptorch.Error: if there are anchored tensors.
    """

    counter_values: Mapping[str, Number] = MappingProxyType({})
    """Values of counters: it has none."""
    changed_on_host: Collection[str] = ()
    """Names of what host functions change: none are known."""
    _keeps_buffers = True
    """Whether the host keeps the buffers that the model overwrites, from one call to the next."""

    def __init__(
        self,
        capture: Callable[[Sequence[torch.Tensor], Sequence[Any]], ExecutionPath],
        path: ExecutionPath,
        signature: Signature,
        request: ProgramRequest,
        host: Callable[[], Mapping[str, np.ndarray]],
    ) -> None:
        self.signature = signature
        self.read_buffers = dict(path.captured.read_buffers)
        self.anchored: dict[str, torch.Tensor] = {}
        self.times = Times()
        self._capture, self._host = capture, host
        self._request, self._options = request, request.options
        self._run_lock = threading.Lock()
        self._root = Subgraph()
        self._runs = 0
        self.is_attached = False  # whether a device is
        self._warned = Warned()
        self._host_buffers: dict[str, torch.Tensor] = {}
        if path.captured.updated and self._keeps_buffers:
            arrays, buffers = host(), [name for name, value in path.captured.state.items() if value.of_buffer]
            self._host_buffers = {name: from_numpy(arrays[name].copy()) for name in buffers if name in arrays}
        if self._options.anchored_tensors:
            raise createPoptorchError(
                f"{path.breaks[0].source}: a model that is split here, for the host to look, has no anchored tensors."
            )
        self._extend(path)
        for subgraph in self._root.descendants():  # results of the host are known for a call: often the guess is right
            subgraph.program()

    # Subgraphs ------------------------------------------------------------------------------------------------------

    def _extend(self, captured_path: ExecutionPath) -> bool:
        """Extend the subgraph tree with an execution path. Return whether an existing program needs additional outputs.

        Each program is compiled when a run reaches it: host results further along the path are guesses so far.
        """
        path = IdentifiedPath(captured_path, self._host_buffers)
        if self._keeps_buffers and (others := path.captured.updated.keys() - self._host_buffers.keys()):
            raise createPoptorchError(
                f"{path.breaks[0].source}: `forward` overwrites {', '.join(sorted(others))} after what the host has "
                "found here now, and no buffer after what it found first. Have it overwrite a buffer in all cases."
            )
        subgraphs = self._subgraphs_along(path)
        contents = self._contents(path, [each.content for each in subgraphs])
        recompiles = False
        for number, (subgraph, content) in enumerate(zip(subgraphs, contents, strict=True), 1):
            if subgraph.content is not None and subgraph.content.outputs == content.outputs:
                continue
            recompiles |= subgraph.content is not None and subgraph.make is None
            self._close(subgraph)
            subgraph.content, subgraph.compiled, subgraph.make = content, None, None
            if subgraph is subgraphs[-1]:
                subgraph.make = self._end_maker(path, content)
            elif content.outputs:
                subgraph.make = partial(self._compile, path, content, number)
        subgraphs[-1].path = path
        self._evict()
        return recompiles

    def _subgraphs_along(self, path: IdentifiedPath) -> list[Subgraph]:
        """Subgraphs of a path, created where missing."""
        subgraphs = [self._root]
        for graph_break in path.breaks:
            last = subgraphs[-1]
            last.graph_break, last.operands = last.graph_break or graph_break, path.ids_of(graph_break.operands)
            subgraphs.append(last.branches.setdefault(graph_break.key, Subgraph(last_run=self._runs)))
        for subgraph, (begin, end) in zip(subgraphs, path.bounds, strict=True):
            ops = [node.op for node in path.captured.trace.nodes[begin:end]]
            if subgraph.content is not None and subgraph.ops != ops:
                raise createPoptorchError(
                    f"`forward` does something else than before, up to where the host looks ({path.breaks[0].source}), "
                    "for the same shapes and numbers. Python that changes from call to call cannot be compiled."
                )
            subgraph.ops = ops
        return subgraphs

    def _contents(self, path: IdentifiedPath, before: Sequence[Content | None]) -> list[Content]:
        """Contents of the subgraphs of a path, given their previous ones."""
        outputs = [*path.outputs, *path.captured.updated.values()]
        return partition(path, before, {value for value in outputs if constant_data(value) is None})

    def _compile(self, path: IdentifiedPath, content: Content, number: int = 0) -> Compiled:
        """Compile a subgraph. Its number offsets the seed: earlier programs draw different random numbers."""
        nodes = content.nodes
        inputs, outputs = path.values_of(content.inputs), path.values_of(content.outputs)
        used = {id(value) for node in nodes for value in node.inputs} | set(map(id, outputs))
        own = {name: value for name, value in path.captured.state.items() if name not in self._host_buffers}
        state = {name: value for name, value in own.items() if id(value) in used}
        results = [torch.empty(value.shape, dtype=value.dtype) for value in outputs]
        captured = Captured(
            trace=Trace(inputs=[*inputs, *state.values()], nodes=nodes, outputs=outputs),
            inputs=inputs,
            state=state,
            result=results,
        )
        host = {name: array for name, array in self._host().items() if name in state}
        if self.is_attached:
            host |= self.weights(state)  # the host may have changed these meanwhile
        request = replace(self._request, update=None, seed=self._request.seed + number)
        return self._compile_captured(captured, OutputStructure(results, {}, []), request, host)

    def _compile_captured(
        self, captured: Captured, structure: Structure, request: ProgramRequest, host: Mapping[str, np.ndarray]
    ) -> Compiled:
        """Compile a captured subgraph, whose arguments are its inputs, and attach it if others are attached."""
        tensors = tuple(torch.empty(value.shape, dtype=value.dtype) for value in captured.inputs)
        signature = Signature(lambda *inputs: None, tensors, {})
        compiled = compile_captured(popxl.Ir(replication=1), captured, structure, signature, request, host)
        if self.is_attached:
            compiled.attach(host)
        return compiled

    def _end_maker(self, path: IdentifiedPath, content: Content) -> Callable[[], Compiled] | None:
        """Compilation function of a path's last subgraph."""
        return partial(self._compile, path, content) if content.outputs else None

    def _evict(self) -> None:
        """Evict least recently used path ends beyond the limit in the options."""
        while True:
            ends = [subgraph for subgraph in self._root.descendants() if subgraph.path is not None]
            if len(ends) <= self._options.kept_programs:
                return
            line = self._evict_end(min(ends, key=lambda subgraph: subgraph.last_run))
            self._warned.once(
                "kept programs",
                "The model is compiled for each shape and number that the host finds on the way (%s), and these "
                "are more than %d. Each new one costs a compilation. Pad to a few shapes, or choose with "
                "`torch.where` in place of a number; or keep more programs: `options.keptPrograms(%d)`.",
                line,
                self._options.kept_programs,
                2 * self._options.kept_programs,
            )

    def _evict_end(self, end: Subgraph) -> SourceLocation:
        """Evict programs leading only to the given end. Return the source line where its path diverges from others."""
        while True:
            self._close(end)
            before = next(each for each in self._root.descendants() if end in each.branches.values())
            before.branches = {key: each for key, each in before.branches.items() if each is not end}
            if before.branches or before is self._root:
                assert before.graph_break is not None
                return before.graph_break.source
            end = before

    def _close(self, subgraph: Subgraph) -> None:
        if subgraph.compiled is not None:
            subgraph.compiled.close()

    # Running --------------------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[torch.Tensor], objects: Sequence[Any] = ()) -> Any:
        """Run subgraph programs on call tensors in sequence; see `Compiled.run`."""
        with self._run_lock:
            self._runs += 1
            end = None
            while end is None:
                call = Call(tensors, objects, {("input", i): t for i, t in enumerate(tensors)})
                call.values.update({("host buffer", name): t for name, t in self._host_buffers.items()})
                end = self._run_to_end(call)
            assert end.path is not None
            return self._run_end(end, end.path, call)

    def _run_to_end(self, call: Call) -> Subgraph | None:
        """Run a call up to its last subgraph, which is returned; `None` if an existing program was recompiled: then the
        call has to be restarted.
        """
        results: list[Any] = []  # of the host operations
        subgraph = self._root
        while True:
            subgraph.last_run = self._runs
            if subgraph.path is not None:
                return subgraph
            self._run_subgraph(subgraph, call)
            assert subgraph.graph_break is not None
            result = subgraph.graph_break.compute([call.values[value_id] for value_id in subgraph.operands])
            call.values.update({("graph break", len(results), j): t for j, t in enumerate(tensors_in(result))})
            results.append(result)
            key = GraphBreak.key_of(result)
            branch = subgraph.branches.get(key)
            if branch is None or branch.content is None:  # it was tried, and could not be captured
                if self._extend(self._capture(call.tensors, results)):
                    return None
                branch = subgraph.branches[key]
            subgraph = branch

    def _run_subgraph(self, subgraph: Subgraph, call: Call) -> None:
        """Run a subgraph's program, if there is one, and record its outputs."""
        program, content = subgraph.program(), subgraph.content
        if program is not None and content is not None:
            call.values.update(zip(content.outputs, program.run(call.select(content.inputs)), strict=True))

    def _run_end(self, end: Subgraph, path: IdentifiedPath, call: Call) -> Any:
        """Run the last subgraph. Return the model's result, after overwriting arguments and buffers."""
        self._run_subgraph(end, call)
        captured = path.captured

        def numbers(value: Value) -> torch.Tensor:
            constant = constant_data(value)
            return constant.clone() if constant is not None else call.values[path.id_of(value)]

        with torch.no_grad():
            rewritten = [(i, numbers(value)) for i, value in captured.written_inputs.items()]
            results = [numbers(value) for value in captured.trace.outputs]
            self._host_buffers |= {name: numbers(value).detach().clone() for name, value in captured.updated.items()}
            for i, content in rewritten:
                overwrite(call.tensors[i], content)
        return path.structure.rebuild(results, call.objects)

    # Interface of `Compiled` ----------------------------------------------------------------------------------------

    @property
    def _programs(self) -> list[Compiled]:
        return [each.compiled for each in self._root.descendants() if each.compiled is not None]

    @property
    def session(self) -> popxl.Session:
        """The session of the last program on the most recently used path."""
        newest = max(
            self._root.descendants(), key=lambda each: (each.last_run, each.compiled is not None, each.path is not None)
        )
        if newest.compiled is None:
            raise createPoptorchError("The model has no program: the host does all that there is to do.")
        return newest.compiled.session

    @property
    def io(self) -> ProgramIO:
        """Tensor names of all programs, and buffers overwritten by the model."""
        names = tuple(chain.from_iterable(each.io.names for each in self._programs))
        return ProgramIO(names=names, written=frozenset(self._host_buffers))

    def attach(self, host: Mapping[str, np.ndarray]) -> None:
        """Attach a device, loading given parameter and buffer values."""
        self._copy_buffers(host)
        for each in self._programs:
            each.attach(host)
        self.is_attached = True

    def detach(self) -> None:
        """Release the device."""
        for each in self._programs:
            each.detach()
        self.is_attached = False

    def close(self) -> None:
        """Release the device permanently."""
        for each in self._programs:
            each.close()
        self.is_attached = False

    def weights(self, names: Container[str] | None = None) -> dict[str, np.ndarray]:
        """Device values of parameters and buffers by name, optionally only the named ones."""
        buffers = {name: to_numpy(t) for name, t in self._host_buffers.items() if names is None or name in names}
        return buffers | {name: array for each in self._programs for name, array in each.weights(names).items()}

    def write_weights(self, host: Mapping[str, np.ndarray]) -> None:
        """Overwrite parameter and buffer values on the device, only those given."""
        self._copy_buffers(host)
        for each in self._programs:
            each.write_weights(host)

    def _copy_buffers(self, host: Mapping[str, np.ndarray]) -> None:
        """Overwrite the buffers kept on the host."""
        self._host_buffers |= {name: from_numpy(host[name].copy()) for name in self._host_buffers.keys() & host.keys()}

    @property
    def version(self) -> int:
        """Number of variable writes so far."""
        return sum(each.version for each in self._programs)

    def persistent_state(self) -> dict[tuple[str, str], np.ndarray]:
        """Persistent state between runs: weights, keyed by kind and name."""
        return {("weight", name): array for name, array in self.weights().items()}

    def write_persistent_state(self, values: Mapping[tuple[str, str], np.ndarray]) -> None:
        """Overwrite state carried between runs."""
        self.write_weights({name: array for (_, name), array in values.items()})

    def write_numbers(self, numbers: np.ndarray) -> None:
        """No-op: this model has no optimiser."""


CompiledModel = Compiled | BrokenGraph
