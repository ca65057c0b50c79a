"""`ModelCapture`: captures of a model for compilation, with checks between capture and compilation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from poptorch.base.outputs import OutputStructure, SideEffects, copy_containers, is_unchanged
from poptorch.capture.counters import Tape
from poptorch.capture.graph_breaks import GraphBreaks
from poptorch.capture.model import Captured, capture
from poptorch.capture.request import CaptureRequest
from poptorch.capture.tensor_layout import TensorLayout
from poptorch.capture.trace import Node, Trace, Value, with_values
from poptorch.errors import createPoptorchError
from poptorch.lowering import has_lowering
from poptorch.lowering.control import WATCH
from poptorch.options import Options
from poptorch.placement.capture_context import capturing
from poptorch.program.batching import Batching
from poptorch.program.placement_checks import check_overlapped_io, check_placement
from poptorch.run.arguments import Signature
from poptorch.run.capture_warnings import (
    host_generators,
    warn_of_changed_arguments,
    warn_of_draws,
    warn_of_host_changes,
    warn_of_host_tensors,
)
from poptorch.run.counter_capture import Capture, capture_with_counters
from poptorch.run.gradient_access import hook_problem
from poptorch.run.hooks import substituting
from poptorch.run.host_model import HostModel
from poptorch.run.subgraphs import ExecutionPath


@dataclass
class ModelCapture:
    """Captures of one model for one compilation.

    Attributes:
        batching: distribution of the rows of a call.
        training: whether the model is to be trained.
        counters: names of the numbers changed by `forward` that the program carries; `None` for all that it can.
        has_fewer_rows: whether the program is for fewer rows than another one, which the options allowed.
        may_split: whether graph breaks may split the model.
    """

    model: HostModel
    options: Options
    batching: Batching
    training: bool
    counters: Collection[str] | None = None
    has_fewer_rows: bool = False
    may_split: bool = True
    _layouts: Sequence[TensorLayout] = ()

    def first(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExecutionPath:
        """Capture for the arguments of a call, which decide the memory layouts of tensors.

        Raises:
            poptorch.Error: if the model has no tensor operations, or unsupported ones; if its blocks or overlapped
                transfers do not fit the options.
        """
        tensors = signature.check(args, kwargs)
        self._layouts = _layouts_of(tensors, signature, self.batching)
        return self._path(signature, tensors, (), self.counters)

    def recapture(self, signature: Signature, tensors: Sequence[torch.Tensor], results: Sequence[Any]) -> ExecutionPath:
        """Capture for other tensors, and results of the first graph breaks."""
        return self._path(signature, tensors, results, ())

    def _path(
        self,
        signature: Signature,
        tensors: Sequence[torch.Tensor],
        results: Sequence[Any],
        counters: Collection[str] | None,
    ) -> ExecutionPath:
        """Capture, carry numbers that change, warn of what has no effect, and check the result against the options."""
        model, options, breaks = self.model, self.options, None
        if self.may_split and options.kept_programs > 1:
            micro_batches = self.batching.micro_batches * self.batching.groups.replicas
            breaks = GraphBreaks(tensors, results, self.training, micro_batches)
        captured, structure, context = self._capture(signature, breaks)
        path = () if breaks is None else breaks.breaks
        if not path:
            with_counters = capture_with_counters(captured, partial(self._capture, signature, None), counters)
            captured, structure, context = with_counters or (captured, structure, context)
        warn_of_host_changes(captured, model.module)
        warn_of_host_tensors(captured, model.warned)
        if self.training and captured.hooks:
            raise hook_problem(captured.hooks[0])
        given = set(map(id, captured.trace.inputs))
        if not captured.trace.nodes and given.isdisjoint(map(id, captured.trace.outputs)) and not path:
            raise createPoptorchError("The model does nothing with tensors, so there is nothing to compile.")
        if options.Precision.floating_point_exceptions:
            _watch_comparisons(captured.trace)
        if context.overlaps:
            _check_overlaps(captured)
            check_overlapped_io(options, options.output_mode)
        options._Popart.check()
        if not self.has_fewer_rows:  # there may be too few for all stages of a pipeline
            check_placement([node.placement for node in captured.trace.nodes], options, self.training)
        return ExecutionPath(captured, structure, path)

    def _capture(self, signature: Signature, breaks: GraphBreaks | None, tape: Tape | None = None) -> Capture:
        """Capture, its output structure and its placement; warns of arguments that the model overwrites."""
        model, options = self.model, self.options
        # Both of the last time that `forward` ran, as it may have to run again.
        structures: list[OutputStructure] = []
        overwritten: list[str] = []
        drawing: list[str] = []

        def forward(tensors: list[torch.Tensor]) -> Any:
            args, kwargs = signature.arguments(tensors, hides=True)
            objects = signature.objects(args, kwargs)
            named = signature.named(args, kwargs)
            before = copy_containers(named)
            changes, generators = SideEffects(objects), host_generators()
            result = model.call(*args, **kwargs)
            drawing[:] = [name for name, state in host_generators().items() if state != generators[name]]
            changed = changes.changed_attributes()
            overwritten[:] = [name for name, value in named.items() if not is_unchanged(before[name], value)]
            structures[:] = [OutputStructure(result, changed, objects)]
            return result, changed

        with substituting(), capturing(options.execution_strategy) as context:
            request = CaptureRequest(
                forward,
                self._layouts,
                model.module,
                context,
                lowered=has_lowering,
                flatten=lambda returned: structures[0].tensors(returned),
                grouped=list(model.grouped),
                excludes=options.source_location_excludes,
                with_scopes=options.module_namescope_enabled,
                breaks=breaks,
                derives=self.training,
                function=model.call,
                tape=tape,
            )
            captured = capture(request)
        warn_of_changed_arguments(overwritten, model)
        warn_of_draws(drawing, model.module)
        return captured, structures[0], context


def _layouts_of(tensors: Sequence[torch.Tensor], signature: Signature, batching: Batching) -> list[TensorLayout]:
    """Memory layouts of the first micro-batch of given tensors."""
    places = []
    for t, leaf in zip(tensors, signature.leaves, strict=True):
        shape = batching.micro_batch_shape(leaf.shape, leaf.name)
        if t.layout is not torch.strided:
            t = torch.empty(leaf.shape, device="meta")
        places.append(TensorLayout(shape, t.stride(), int(t.storage_offset()), leaf.dtype))
    return places


def _check_overlaps(captured: Captured) -> None:
    """Check that tensors marked for overlapped transfer are model inputs and outputs without other uses."""
    inputs, outputs = captured.inputs, captured.trace.outputs
    nodes = list(captured.trace.all_nodes())
    for node in nodes:
        if node.op == "poptorch.set_overlap_for_input":
            (value,) = node.inputs
            if not any(value is each for each in inputs):
                raise createPoptorchError(
                    f"{node}: the tensor is no input of the model. Mark inputs before any other op."
                )
            others = [each for each in nodes if each is not node and any(value is v for v in each.inputs)]
            if others or any(value is each for each in outputs):
                raise createPoptorchError(
                    "poptorch.set_overlap_for_input must be the only op applied to an input. This is not the case for "
                    f"input {inputs.index(value)} to the model. Another is {others[0] if others else 'its return'}: "
                    "use the result of set_overlap_for_input in its place."
                )
        if node.op == "poptorch.set_overlap_for_output":
            count = sum(each is node.results[0] for each in outputs)
            if not count:
                raise createPoptorchError(
                    f"{node}: the tensor is no result of the model. Return the result of set_overlap_for_output."
                )
            if count > 1:
                raise createPoptorchError(
                    "poptorch.set_overlap_for_output cannot be used with a tensor that is returned twice. Please check "
                    "all returned tensors including those nested in tuples/lists."
                )


_COMPARISONS = frozenset(f"aten.{name}" for name in ("lt", "le", "gt", "ge", "eq", "ne"))


def _watch_comparisons(trace: Trace) -> None:
    """Insert NaN checks before comparison operands: comparisons produce no NaN, so op-by-op debugging misses them."""
    nodes: list[Node] = []
    for node in trace.nodes:
        for inner in node.traces:
            _watch_comparisons(inner)
        compared = dict.fromkeys(node.inputs)
        is_test = node.op in ("aten.eq", "aten.ne") and len(compared) < len(node.inputs)  # `x != x` asks for NaN
        if node.op in _COMPARISONS and not is_test:
            watched: dict[Value, Value] = {}
            for value in compared:
                if value.dtype.is_floating_point:
                    looking = {"inputs": [value], "name": WATCH, "attributes": (("where", str(node)),)}
                    look = Node("poptorch.custom_op", "", looking, node.placement, node.scope, node.source)
                    watched[value] = Value(value.shape, value.dtype, producer=look, requires_grad=False)
                    look.results = [watched[value]]
                    nodes.append(look)
            node.arguments = with_values(node.arguments, partial(_substitute, watched))
        nodes.append(node)
    trace.nodes[:] = nodes


def _substitute(others: Mapping[Value, Value], value: Value) -> Value:
    return others.get(value, value)
