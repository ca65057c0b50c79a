"""Model capture for compilation: argument layouts, and checks between capture and compilation."""

from __future__ import annotations

import pickle
import random
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from poptorch.base.host_numbers import NumberPath
from poptorch.base.logging_ import Warned, logger
from poptorch.base.outputs import OutputStructure, SideEffects, copy_containers, is_unchanged
from poptorch.capture.constants import numbers_of
from poptorch.capture.counters import Tape
from poptorch.capture.graph_breaks import GraphBreaks
from poptorch.capture.host_function import HostFunction
from poptorch.capture.host_state import HostState
from poptorch.capture.model import Captured, capture
from poptorch.capture.number_inputs import merge_captures
from poptorch.capture.request import CaptureRequest
from poptorch.capture.tensor_layout import TensorLayout
from poptorch.capture.trace import Data, Node, Trace, Value, with_values
from poptorch.errors import createPoptorchError
from poptorch.lowering import has_lowering
from poptorch.lowering.control import WATCH
from poptorch.options import Options
from poptorch.placement.capture_context import CaptureContext, capturing
from poptorch.program.batching import Batching
from poptorch.program.placement_checks import check_overlapped_io, check_placement
from poptorch.run.arguments import Signature
from poptorch.run.gradient_access import hook_problem
from poptorch.run.hooks import substituting
from poptorch.run.host_model import HostModel
from poptorch.run.subgraphs import ExecutionPath

_Capture = tuple[Captured, OutputStructure, CaptureContext]


@dataclass(frozen=True)
class ModelCapture:
    """Capture of a model for compilation.

    Attributes:
        training: whether the model is to be trained.
        has_fewer_rows: whether the program is for fewer rows than another one, which the options allowed.
    """

    model: HostModel
    options: Options
    training: bool
    has_fewer_rows: bool = False

    def __call__(
        self,
        signature: Signature,
        layouts: Sequence[TensorLayout],
        breaks: GraphBreaks | None = None,
        counts: Collection[str] | None = None,
    ) -> ExecutionPath:
        """Capture the model, and check that it can be compiled.

        Args:
            layouts: layouts of the tensors of a micro-batch in memory; see `layouts_of`.
            counts: numbers of the module that the program carries; `None` for all that it can.

        Raises:
            poptorch.Error: if it has no tensor operations, or unsupported ones; if its blocks or overlapped transfers
                do not fit the options.
        """
        model, options = self.model, self.options
        captured, answer, ambient = self._once(signature, layouts, breaks)
        path = () if breaks is None else breaks.found
        if not path:
            counting = _counting(captured, partial(self._once, signature, layouts, None), counts)
            captured, answer, ambient = counting or (captured, answer, ambient)
        _warn_of_carried(captured, model.module)
        for text in _on_host(captured):
            model.warned.once(text, "%s", text)
        if self.training and captured.hooks:
            raise hook_problem(captured.hooks[0])
        given = set(map(id, captured.trace.inputs))
        if not captured.trace.nodes and given.isdisjoint(map(id, captured.trace.outputs)) and not path:
            raise createPoptorchError("The model does nothing with tensors, so there is nothing to compile.")
        if options.Precision.floating_point_exceptions:
            _watch_comparisons(captured.trace)
        if ambient.overlaps:
            _check_overlaps(captured)
            check_overlapped_io(options, options.output_mode)
        options._Popart.check()
        if not self.has_fewer_rows:  # there may be too few for all stages of a pipeline
            check_placement([node.site for node in captured.trace.nodes], options, self.training)
        return ExecutionPath(captured, answer, path)

    def _once(
        self,
        signature: Signature,
        layouts: Sequence[TensorLayout],
        breaks: GraphBreaks | None,
        tape: Tape | None = None,
    ) -> _Capture:
        """Capture, its output structure and its placement; warns of arguments that the model overwrites."""
        model, options = self.model, self.options
        # Both of the last time that `forward` ran, as it may have to run again.
        answers: list[OutputStructure] = []
        overwritten: list[str] = []
        drawing: list[str] = []

        def forward(tensors: list[torch.Tensor]) -> Any:
            args, kwargs = signature.arguments(tensors, hides=True)
            objects = signature.objects(args, kwargs)
            named = signature.named(args, kwargs)
            before = copy_containers(named)
            changes, generators = SideEffects(objects), _host_generators()
            result = model.call(*args, **kwargs)
            drawing[:] = [name for name, state in _host_generators().items() if state != generators[name]]
            changed = changes.changed_attributes()
            overwritten[:] = [name for name, value in named.items() if not is_unchanged(before[name], value)]
            answers[:] = [OutputStructure(result, changed, objects)]
            return result, changed

        with substituting(), capturing(options.execution_strategy) as ambient:
            asked = CaptureRequest(
                forward,
                layouts,
                model.module,
                ambient,
                lowered=has_lowering,
                flatten=lambda returned: answers[0].tensors(returned),
                grouped=list(model.grouped),
                excludes=options.source_location_excludes,
                with_scopes=options.module_namescope_enabled,
                breaks=breaks,
                derives=self.training,
                function=model.call,
                tape=tape,
            )
            captured = capture(asked)
        _warn_of_arguments(overwritten, model)
        _warn_of_draws(drawing, model.module)
        return captured, answers[0], ambient


_MOST_CAPTURES = 16
"""How often a model is captured, until it is known what it does with the numbers that it changes."""


def _counting(plain: Captured, capture: Callable[[Tape], _Capture], counts: Collection[str] | None) -> _Capture | None:
    """The capture with `forward`'s changing numbers computed on the host, if otherwise equivalent; else `None`.

    Each Python branch on these numbers needs a capture of its own. Numbers that cannot be carried are left out.
    """
    first, refused, left = plain.changed, set[str](), _MOST_CAPTURES
    while first:
        found: list[tuple[Tape, _Capture]] = []
        wanted, problems, waiting = dict(first), list[NumberPath](), [tuple[bool, ...]()]
        while waiting and refused.isdisjoint(first):
            if not left:
                return None
            left -= 1
            tape = Tape(first, given := waiting.pop())
            try:
                found.append((tape, capture(tape)))
                wanted |= found[-1][1][0].changed
            except Exception as problem:  # any error: code that is not written in Python may have received a counter
                logger.debug("Numbers that `forward` changes are not carried.", exc_info=True)
                if not tape.refused and (tape.is_natural or isinstance(problem, TypeError)):
                    return None
                problems.append(tape.path(problem=f"{type(problem).__name__} in `forward`: {problem}"))
            refused |= tape.refused
            choices = tape.choices
            waiting += ((*choices[:i], not choices[i]) for i in range(len(given), len(choices)))
        wanted = {name: number for name, number in wanted.items() if name not in refused}
        if wanted == first:
            return _with_numbers(plain, found, problems) if counts is None or set(counts) == set(first) else None
        first = wanted
    return None


def _with_numbers(
    plain: Captured, found: Sequence[tuple[Tape, _Capture]], problems: Sequence[NumberPath]
) -> _Capture | None:
    together = merge_captures(plain.trace, [(tape, captured.trace) for tape, (captured, *_) in found], problems)
    if together is None:
        return None
    (tape, (captured, answer, ambient)), *_ = found
    numbers, slots = together
    carried = {f"model.{name}" for name in tape.first}
    shown = {text: line for text, line in plain.carried.items() if text.removeprefix("model.") in tape.formatted}
    changes = plain.carried | captured.carried  # changes that cannot be undone occur once
    others = {text: line for text, line in changes.items() if text not in carried}
    return replace(captured, numbers=numbers, slots=slots, carried=others, shown=shown), answer, ambient


def layouts_of(tensors: Sequence[torch.Tensor], signature: Signature, batching: Batching) -> list[TensorLayout]:
    """Memory layouts of the first micro-batch of given tensors."""
    places = []
    for t, leaf in zip(tensors, signature.leaves, strict=True):
        shape = batching.micro_batch_shape(leaf.shape, leaf.name)
        if t.layout is not torch.strided:
            t = torch.empty(leaf.shape, device="meta")
        places.append(TensorLayout(shape, t.stride(), int(t.storage_offset()), leaf.dtype))
    return places


_warned: weakref.WeakKeyDictionary[torch.nn.Module, Warned] = weakref.WeakKeyDictionary()
"""Warnings given, by module."""


def _warn_of_carried(captured: Captured, module: torch.nn.Module) -> None:
    """Warn, once per item, about host state changed by `forward`."""
    warned = _warned.setdefault(module, Warned())
    for text, line in captured.shown.items():
        warned.once(
            f"text of {text}",
            "`forward` makes a text of %s (%s), or of what it computes with it. The program carries the number from "
            "run to run, but the text stays that of the first one.",
            text,
            line,
        )
    if names := [text for text in captured.carried if text not in warned]:
        warned.update(names)
        places = [f"{text} ({line})" if (line := captured.carried[text]) else text for text in names]
        logger.warning(
            "`forward` changes %s. A program carries parameters, buffers and numbers that `forward` only computes with "
            "from run to run, and nothing else: each run begins with what was there when the model was wrapped. Have "
            "the module own it as a buffer (`register_buffer`), and overwrite that: `self.x.copy_(...)`, "
            "`self.step.add_(1)`. What the host changes from call to call is to be an argument of `forward`, and what "
            "you want to look at a result.",
            ", ".join(places),
        )


def _host_generators() -> dict[str, Any]:
    """States of the random number generators of Python and NumPy."""
    return {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}


def _warn_of_draws(generators: Sequence[str], module: torch.nn.Module) -> None:
    """Warn, once per generator, about random numbers that `forward` draws on the host."""
    warned = _warned.setdefault(module, Warned())
    for name in generators:
        warned.once(
            f"draws of {name}",
            "`forward` draws random numbers of `%s`. They are drawn once, and a part of the program: each run has the "
            "same. Draw them on the device, as `torch.rand(())`, and choose by them with `torch.where`; or give them "
            "to the model as tensors.",
            name,
        )


def _warn_of_arguments(names: Sequence[str], model: HostModel) -> None:
    """Warn, once per name, about arguments whose lists and dictionaries `forward` changes."""
    module = model.module
    warned = _warned.setdefault(module, Warned())
    for name in names:
        if f"argument {name}" not in warned:
            line = HostState(module, model.call).line_of(name)
            warned.once(
                f"argument {name}",
                "`forward` changes its argument `%s`%s. It has a copy of the lists and dictionaries among its "
                "arguments: the caller's stay as they were. Return what you need; tensors may be written to, and "
                "attributes of objects set.",
                name,
                line and f" ({line})",
            )


_MOST_WARNINGS = 3
"""Maximum number of an object's further tensors with a warning each."""


def _on_host(captured: Captured) -> Iterator[str]:
    """Yield warnings about host tensors: those used on the device, and outputs computed entirely on the host."""
    frozen = [each for each in captured.frozen if each.met is not None and not each.of_module]
    for holder, group in groupby(frozen, lambda each: re.split(r"[.\[]", each.text, maxsplit=1)[0]):
        first, *others = group
        if len(others) > _MOST_WARNINGS:
            yield (
                f"`{first.text}` and {len(others)} other tensors of `{holder}` are tensors of the host, and used on "
                f"the device ({first.met}): their numbers are frozen, a part of the program from now on. If they are "
                "those of a layer, wrap the layer, or a module that has it: a function has no parameters."
            )
            continue
        for each in (first, *others):
            yield (
                f"`{each.text}` is a tensor of the host, and used on the device ({each.met}): its numbers are frozen, "
                "a part of the program from now on. If that is meant, move it: "
                f"`{each.text}.to(x.device)`, where `x` is an input. If they are to change, give it to the model as an "
                "argument, or have the module own it as a buffer (`register_buffer`)."
            )
    if any(value.is_on_host for value in captured.trace.outputs):
        yield (
            "Output expected to be on the IPU but is on cpu: it is made of tensors of the host alone, and comes back "
            "as it is. Move them, if the device is to make it: `t.to(x.device)`, where `x` is an input."
        )


def _check_overlaps(captured: Captured) -> None:
    """Check that tensors marked for overlapped transfer are model inputs and outputs without other uses."""
    inputs, outputs = captured.inputs, captured.trace.outputs
    nodes = list(_all_nodes(captured.trace))
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


def _all_nodes(trace: Trace) -> Iterator[Node]:
    """Iterate over a function's ops, including ops of nested functions."""
    for node in trace.nodes:
        yield node
        for inner in node.traces:
            yield from _all_nodes(inner)


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
                    look = Node("poptorch.custom_op", "", looking, node.site, node.scope, node.source)
                    watched[value] = Value(value.shape, value.dtype, made_by=look, requires_grad=False)
                    look.results = [watched[value]]
                    nodes.append(look)
            node.arguments = with_values(node.arguments, partial(_substitute, watched))
        nodes.append(node)
    trace.nodes[:] = nodes


def _substitute(others: Mapping[Value, Value], value: Value) -> Value:
    return others.get(value, value)


def host_functions_of(trace: Trace) -> Iterator[HostFunction]:
    """Host functions called by a captured function."""
    for node in _all_nodes(trace):
        if node.op == "poptorch.cpu":
            yield node.arguments["function"]


def constant_of(value: Value) -> torch.Tensor | None:
    """Constant data of a value from the host or without computation; `None` for device results."""
    made_by = value.made_by
    while made_by is not None and made_by.op in ("aten.lift_fresh", "aten.detach", "aten.alias"):
        made_by = made_by.inputs[0].made_by
    data = made_by.arguments.get("data") if made_by is not None else None
    if isinstance(data, Data):
        return data.tensor
    return numbers_of(value, {}) if value.is_on_host else None
