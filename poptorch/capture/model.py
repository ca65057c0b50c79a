"""`capture`: trace a function by running it on fake tensors, which have shapes and dtypes but no contents.

Afterwards its module is unchanged. Hooks on gradients are found, and code that cannot be captured is an error with its
line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from traceback import walk_tb
from typing import Any

import torch

from poptorch.base.host_numbers import HostNumbers
from poptorch.base.patching import restoring
from poptorch.capture.attributes import paths_of_modules
from poptorch.capture.captured_constants import CapturedConstant
from poptorch.capture.checkpoints import checkpoints_in_regions
from poptorch.capture.contents import CANNOT_READ
from poptorch.capture.counters import Tape, recording_number_functions
from poptorch.capture.derivatives import Application, derive, deriving
from poptorch.capture.devices import named_as_cpus
from poptorch.capture.gradient_hooks import apply_hooks, hooks_of, recording_hooks
from poptorch.capture.graph_breaks import GraphBreaks
from poptorch.capture.host_state import HostState
from poptorch.capture.modules import around_forward, averaging, recurrent_in_any_dtype
from poptorch.capture.rebinding import not_rebound
from poptorch.capture.recorder import Recorder
from poptorch.capture.request import CaptureRequest
from poptorch.capture.seeding import seeding
from poptorch.capture.torch_private import (
    UNREADABLE,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    decomposing_functions,
    derivable_attention,
    forget_history,
    unlogged_errors,
    unvalidated_distributions,
    with_tensors,
    without_compile,
)
from poptorch.capture.torchvision_ops import choosing
from poptorch.capture.trace import Trace, Value
from poptorch.capture.tracer import RetryWithoutPreserving, Tracer, capture_in_progress
from poptorch.errors import Error, createPoptorchError
from poptorch.placement.capture_context import CaptureContext
from popxl.extend.source import SourceLocation


@dataclass(frozen=True)
class Captured:
    """Result of capturing a module's `forward`.

    Attributes:
        trace: recorded trace; its inputs are the given ones, followed by the tensors of the module.
        inputs: the values of the tensors given.
        state: the values that the module's parameters and buffers have at the beginning, by name.
        result: result of `forward`, with tensors without numbers; the outputs of `trace` are the values of these.
        updated: final values of tensors that are overwritten.
        written_inputs: as `updated`, for the given tensors, by position.
        hooks: descriptions of hooks on gradients: they have no effect.
        read_buffers: the buffers whose numbers have become a part of the program, with these numbers.
        frozen: other host tensors whose contents are constants.
        carried: host objects that it changes, and that the next run may be meant to find: the user's names, and the
            lines.
        changed: initial values of numbers of its modules that it changes.
        numbers: numbers that the host computes for each run, if there are any.
        slots: values that receive them in a micro-batch.
        formatted_numbers: numbers that it formats as text: the user's names, and the lines that change them.
    """

    trace: Trace
    inputs: list[Value]
    state: dict[str, Value]
    result: Any
    updated: dict[str, Value] = field(default_factory=dict)
    written_inputs: dict[int, Value] = field(default_factory=dict)
    hooks: Sequence[str] = ()
    read_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    frozen: Sequence[CapturedConstant] = ()
    carried: dict[str, str] = field(default_factory=dict)
    changed: dict[str, int | float] = field(default_factory=dict)
    numbers: HostNumbers | None = None
    slots: Sequence[Value] = ()
    formatted_numbers: dict[str, str] = field(default_factory=dict)


def capture(request: CaptureRequest) -> Captured:
    """Trace a function by running it on fake tensors.

    A function that computes gradients runs twice: the second time it is recorded op by op, and PyTorch knows the
    derivatives of ops.

    Raises:
        poptorch.Error: if it reads the numbers in a tensor, or their shape depends on them, without `breaks`.
    """
    try:
        return _capture(Tracer(request, preserves=True), request)
    except RetryWithoutPreserving:
        vars(request.context).update(vars(CaptureContext(request.context._strategy)))  # blocks are numbered again
    return _capture(Tracer(request, preserves=False), request)


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a capture: arguments of the function, parameters and buffers of its module by name.

    Attributes:
        arguments, values: fake arguments, and their values.
        state: tensors of the module.
        state_fakes, state_values: their fake counterparts, and their values; tied tensors have one value.
    """

    arguments: list[torch.Tensor]
    values: list[Value]
    state: dict[str, torch.Tensor]
    state_fakes: dict[str, torch.Tensor]
    state_values: dict[str, Value]

    @classmethod
    def for_request(cls, tracer: Tracer, request: CaptureRequest) -> _Inputs:
        """Inputs of a requested capture."""
        recorder, state = tracer.recorder, dict(_tensors_of(request.module))
        if lazy := [key for key, t in state.items() if torch.nn.parameter.is_lazy(t)]:
            raise createPoptorchError(
                f"{', '.join(lazy)} have no shape yet. Run the module once in PyTorch, `module(x)`, before the first "
                "call of its wrapper: this initializes lazy modules."
            )
        fakes = {key: tracer.fake(_first_row(t) if key in request.grouped else t) for key, t in state.items()}
        arguments = list(map(tracer.fake_in, request.layouts))
        values = [recorder.new_input(t) for t in arguments]
        state_values: dict[str, Value] = {}
        by_tensor: dict[int, Value] = {}
        for key, t in fakes.items():
            of_buffer = None if isinstance(state[key], torch.nn.Parameter) else state[key].detach()
            state_values[key] = by_tensor[id(t)] = by_tensor.get(id(t)) or recorder.new_input(t, key, of_buffer)
        return cls(arguments, values, state, fakes, state_values)

    @contextmanager
    def cleared(self) -> Iterator[None]:
        """Context manager dropping fake tensors at its end."""
        try:
            yield
        finally:
            self.arguments.clear()
            self.state_fakes.clear()

    def begin(self, breaks: GraphBreaks) -> None:
        """Reset graph breaks for a capture with these inputs."""
        contents = {value: self.state[key].detach() for key, value in self.state_values.items()}
        trained = [value for key, value in self.state_values.items() if self.state[key].requires_grad]
        breaks.begin(self.values, contents, trained)


def _capture(tracer: Tracer, request: CaptureRequest) -> Captured:
    """Implementation of `capture`. Context managers around `forward` restore the module and changed host objects."""
    module, breaks, tape, recorder = request.module, request.breaks, request.tape, tracer.recorder
    inputs = _Inputs.for_request(tracer, request)
    if breaks is not None:
        inputs.begin(breaks)
    tracer.hooks += hooks_of(module, inputs.state)
    tracer.function_interceptor.tensor_hooks.add_parameters(inputs.state, inputs.state_values)
    with (
        recorder.materialising_constants(),
        inputs.cleared(),  # unreferenced tensors are gone before that
        restoring(*map(vars, paths_of_modules(module))),
        _surroundings(tracer, request, inputs) as applications,
    ):
        host_state = tracer.host_state
        with _located_errors(recorder):
            result = request.forward(list(inputs.arguments))
        changed = host_state.changed_counters()
        returned = request.flatten(result)
        tracer.function_interceptor.row_views.refresh(returned)
        outputs = [recorder.value_of(t) for t in returned]
        ends = [recorder.value_of(t) for t in inputs.arguments]
        state_ends = {key: recorder.value_of(t) for key, t in inputs.state_fakes.items()}
        _check_buffers(recorder, inputs, state_ends)
        recorder.trace.outputs = outputs
        carried = dict(host_state.changes(recorder.is_of_run))
        if tape is not None:
            _remove_counters(module, tape, changed)
        carried |= {text: host_state.line_of(text) for text in recorder.overwritten()}
        recorder.resolve_requires_grad()
        if request.derives:
            _derive(tracer, applications, has_breaks=breaks is not None and bool(breaks.breaks))
        trace = recorder.finish(request.derives)
        with tracer.suspended():
            for t in returned:
                forget_history(t)
    return Captured(
        trace=trace,
        inputs=inputs.values,
        state=inputs.state_values,
        updated={key: end for key, end in state_ends.items() if end is not inputs.state_values[key]},
        written_inputs={i: end for i, end in enumerate(ends) if end is not inputs.values[i]},
        result=result,
        hooks=tracer.hooks,
        read_buffers={key: inputs.state[key].detach().clone() for key in recorder.read_buffers},
        frozen=recorder.host.constants,
        carried=carried,
        changed=changed,
    )


@contextmanager
def _surroundings(tracer: Tracer, request: CaptureRequest, inputs: _Inputs) -> Iterator[list[Application]]:
    """Context manager in which `forward` runs: fake tensors in its module, and PyTorch functions that are intercepted.

    Afterwards the module and the host objects that `forward` changes are as before. Collects custom derivatives, if the
    trace is to be differentiated.
    """
    module, recorder = request.module, tracer.recorder

    def is_constant_state(name: str, t: torch.Tensor) -> bool:  # the same in every run
        is_read = name in recorder.read_buffers or recorder.uses(inputs.state_values.get(name))
        return recorder.is_constant(t) and not is_read

    with ExitStack() as stack:
        enter = stack.enter_context
        tracer.host_state = enter(HostState(module, request.function).restored())
        enter(with_tensors(module, inputs.state_fakes))
        enter(averaging())
        enter(recurrent_in_any_dtype())
        if request.with_scopes:
            enter(_scopes(module, recorder.scopes))
        enter(not_rebound(module, is_constant_state))
        enter(capture_in_progress(tracer))
        enter(seeding(recorder))
        enter(checkpoints_in_regions(tracer))
        enter(named_as_cpus(tracer.device_of))
        for patch in _PATCHES:
            enter(patch())
        applications = enter(deriving(tracer)) if request.derives else []
        if request.derives:
            enter(recording_hooks(tracer))
        enter(tracer.intercepting())
        if request.tape is not None:  # counters in place of its numbers
            enter(recording_number_functions(tracer.host_state.namespaces))
            _insert_counters(module, request.tape)
        yield applications


def _derive(tracer: Tracer, applications: Iterable[Application], has_breaks: bool) -> None:
    """Trace the custom derivatives of functions, and hooks on tensors. With graph breaks, which know ops by their
    positions, fall back to the derivatives of their ops."""
    for application in applications:
        if has_breaks:
            application.give_up()
        else:
            derive(tracer, application)
    apply_hooks(tracer, tracer.function_interceptor.tensor_hooks.hooks, has_breaks)


def _check_buffers(recorder: Recorder, inputs: _Inputs, ends: Mapping[str, Value]) -> None:
    """Raise an error if a constant-folded buffer is overwritten, or if any tensor of the module changes shape."""
    starts = inputs.state_values
    for key, where in recorder.read_buffers.items():
        if ends[key] is not starts[key]:
            raise createPoptorchError(
                f"{CANNOT_READ} The buffer {key} is needed here ({where}), and `forward` overwrites it, so that it "
                "is another one in each run."
            )
    for key, t in inputs.state_fakes.items():
        if ends[key].shape != starts[key].shape:
            raise _reshaped(key, inputs.state[key], starts[key], ends[key], recorder.reshaped.get(id(t)))


def _insert_counters(module: torch.nn.Module, tape: Tape) -> None:
    """Replace the tape's numbers in module attributes by counters."""
    tape.clear()
    for index, (namespace, key) in enumerate(_namespaces_of(module, tape.first)):
        namespace[key] = tape.counter(index)


def _remove_counters(module: torch.nn.Module, tape: Tape, changed: Iterable[str]) -> None:
    """Record final numbers on the tape, and remove counters from the module."""
    names = list({*tape.first, *changed})
    for name, (namespace, key) in zip(names, _namespaces_of(module, names), strict=True):
        tape.set_final(name, namespace.pop(key, None))
    tape.refuse_referenced()


def _namespaces_of(module: torch.nn.Module, names: Iterable[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Attribute dictionary and key of each number, from its module path and name."""
    modules = dict(torch.nn.Module.named_modules(module))
    for name in names:
        path, _, key = name.rpartition(".")
        yield modules[path].__dict__, key


_PATCHES = (
    unvalidated_distributions,
    unlogged_errors,
    decomposing_functions,
    choosing,
    without_compile,
    derivable_attention,
)
"""Changes of PyTorch's behaviour during any capture."""


def _reshaped(name: str, t: torch.Tensor, before: Value, after: Value, where: SourceLocation | None) -> Error:
    kind = "Parameter" if isinstance(t, torch.nn.Parameter) else "Buffer"
    return createPoptorchError(
        f"{kind} {name} has the shape {list(before.shape)}, and `forward` leaves it with {list(after.shape)} "
        f"({where}). What a program keeps from run to run keeps its shape: use a view, such as `self.x.t()` in place "
        "of `self.x.t_()`, or undo the change in `forward`."
    )


@contextmanager
def _located_errors(recorder: Recorder) -> Iterator[None]:
    """Add source lines, and known remedies, to errors raised by a captured function."""
    try:
        yield
    except UNREADABLE as problem:
        where = _line_of(problem, recorder)
        raise createPoptorchError(f"{_unreadable(problem)} It is needed here ({where}): {problem}") from problem
    except UnsupportedOperatorException as problem:
        where = _line_of(problem, recorder)
        raise createPoptorchError(
            f"Unsupported op {problem} at {where}: tensors of its kind have no numbers in "
            "rows and columns. Pad nested tensors before the model."
        ) from problem
    except (RuntimeError, TypeError, ValueError) as problem:
        if "its data is not allocated yet" in str(problem):  # of a function that is no op, such as `torch.FloatTensor`
            raise createPoptorchError(f"{CANNOT_READ} It is needed here ({_line_of(problem, recorder)}).") from problem
        problem.args = tuple(map(_as_eager_says, problem.args))
        raise


def _as_eager_says(text: Any) -> Any:
    """Error argument from PyTorch, with fake tensor types renamed to real ones."""
    return text.replace("FakeTensor", "Tensor") if isinstance(text, str) else text


def _line_of(problem: BaseException, recorder: Recorder) -> SourceLocation:
    """Innermost user line of an exception's traceback."""
    frames = [frame for frame, _ in walk_tb(problem.__traceback__)]
    lines = map(recorder.source, reversed(frames))  # each in turn: a generator that has ended has no caller
    return next((line for line in lines if line.line), SourceLocation("", 0, ""))


def _unreadable(problem: Exception) -> str:
    if isinstance(problem, DynamicOutputShapeException):
        return (
            "The shape of a tensor cannot depend on numbers in another one: a model becomes one program, in which all "
            "shapes are fixed. Keep the shape, with `torch.where(mask, x, 0)` in place of `x[mask]`, or state it where "
            "a function has an `output_size` or `minlength`."
        )
    return CANNOT_READ


def _first_row(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach()[0].requires_grad_(parameter.requires_grad)


def _tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, by name: tied tensors under every name, tensors of shared modules under their first."""
    modules = dict(torch.nn.Module.named_modules(module))
    for kind in ("_parameters", "_buffers"):
        for path, each in modules.items():
            for name, t in getattr(each, kind).items():
                if t is not None:
                    yield f"{path}.{name}" if path else name, t


def _scopes(module: torch.nn.Module, scopes: list[str]) -> AbstractContextManager[None]:
    """Maintain a list of paths of running modules within a block."""
    paths = {each: path for path, each in module.named_modules()}
    entered: list[bool] = []

    def enter(each: torch.nn.Module) -> None:
        entered.append(bool(paths.get(each)))
        if entered[-1]:
            scopes.append(paths[each])

    def leave(each: torch.nn.Module) -> None:
        if entered and entered.pop():
            scopes.pop()

    return around_forward(enter, leave)
