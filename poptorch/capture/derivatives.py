"""Custom derivatives, `torch.autograd.Function`: their `backward` becomes part of the program.

A capture sees the ops of their `forward`, and never `backward`. So it records the inputs and results of each such
function. At the end each `backward` runs once, for gradients without numbers, and becomes a `Trace`. An op between the
results of `forward` and their readers has that as its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch

from poptorch.base.patching import patched
from poptorch.capture.contents import CANNOT_READ
from poptorch.capture.gradient_flow import APPLICATION, subclasses_of, warn_about_derivative
from poptorch.capture.torch_private import UNREADABLE, storage_key
from poptorch.capture.trace import Node, Trace, Value, with_values
from poptorch.capture.tracer import Tracer
from poptorch.errors import createPoptorchError

OWN = "poptorch.own_derivative"
"""Name of the op whose gradient is a trace. It returns its argument `results`."""


@dataclass
class Application:
    """Call of a function with a custom derivative.

    Attributes:
        context: context object that PyTorch passes to its `backward`.
        inputs: values of its arguments; `None` for one without a gradient.
        results: values of its results; `None` for a result that is not a tensor.
        differentiated: identities of the tensors that gradients flow through, according to PyTorch.
    """

    context: Any
    inputs: list[Value | None]
    results: list[Value | None]
    differentiated: set[int] = field(default_factory=set)

    @property
    def function(self) -> type[torch.autograd.Function]:
        """The custom function class."""
        function: type[torch.autograd.Function] = self.context._forward_cls
        return function

    @property
    def name(self) -> str:
        """Qualified name of the function."""
        return self.function.__qualname__

    @property
    def of_gradients(self) -> list[Value]:
        """Results of this call through which gradients flow."""
        return [value for value in self.results if value is not None and id(value) in self.differentiated]

    @property
    def is_saved(self) -> bool:
        """Whether tensors saved for `backward` still exist: a backward pass of PyTorch may have freed them."""
        try:
            self.context.saved_tensors  # noqa: B018 - it raises
        except RuntimeError:
            return False
        return True

    def give_up(self) -> None:
        """Fall back to differentiating the ops of `forward`."""
        for value in self.of_gradients:
            value.of_function = self.function


@dataclass(frozen=True)
class _Arguments:
    """Arguments of the last `forward`: earlier values, where they have gradients, and positions of overwritten ones."""

    values: list[Value | None] = field(default_factory=list)
    overwritten: set[int] = field(default_factory=set)


@contextmanager
def deriving(tracer: Tracer) -> Iterator[list[Application]]:
    """Collect calls of functions with custom derivatives within a block, during this tracer's capture."""
    applications: list[Application] = []
    recorder = tracer.recorder
    arguments = _Arguments()

    def record_results(context: Any, results: Any) -> None:
        dirty = [id(t) for t in context.dirty_tensors or () if not t._is_view()]
        if recorder.frames.is_nested:
            return
        if set(dirty) != arguments.overwritten:  # a view's, or one without `mark_dirty`
            warn_about_derivative(context._forward_cls)
            return
        outputs = results if isinstance(results, tuple) else (results,)
        values = [recorder.value_of(t) if isinstance(t, torch.Tensor) else None for t in outputs]
        application = Application(context, arguments.values, values)
        setattr(context, APPLICATION, application)
        applications.append(application)

    def noting_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            nonlocal arguments
            tensors = [t for t in args if isinstance(t, torch.Tensor)]
            if not tracer.is_recording(tensors):
                return forward(*args, **kwargs)
            (context, *inputs) = args if isinstance(args[0], torch.autograd.function.FunctionCtx) else (None, *args)
            values = [recorder.value_of(t) if isinstance(t, torch.Tensor) and t.requires_grad else None for t in inputs]
            before = [t._version for t in tensors]
            results = forward(*args, **kwargs)
            changed = [t for t, version in zip(tensors, before, strict=True) if t._version != version]
            returned = set(map(id, results if isinstance(results, tuple) else (results,)))
            overwritten = {id(t) for t in changed if t.requires_grad or id(t) in returned}
            arguments = _Arguments(values, overwritten)
            results = _clone_aliases(results, tensors, overwritten)
            if context is not None:
                record_results(context, results)
            return results

        return noted

    def noting_setup(setup: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(setup)
        def noted(ctx: Any, inputs: Sequence[Any], output: Any) -> Any:
            setup(ctx, inputs, output)
            if tracer.is_recording(inputs):
                record_results(ctx, output)

        return noted

    with _wrapped_methods({"forward": noting_forward, "setup_context": noting_setup}):
        yield applications


_Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextmanager
def _wrapped_methods(wrappers: Mapping[str, _Wrapper]) -> Iterator[None]:
    """Wrap methods of all `torch.autograd.Function` subclasses of users, and of those that the block defines."""
    changed = []

    def change(function: type) -> None:
        if not function.__module__.startswith("torch."):
            for name, wrapper in wrappers.items():
                if isinstance(method := vars(function).get(name), staticmethod | classmethod):
                    other = _replaced(method, wrapper)
                    changed.append((function, name, method, other))
                    setattr(function, name, other)

    for function in list(subclasses_of(torch.autograd.Function)):
        change(function)
    try:
        with _noting_classes(change):
            yield
    finally:
        for function, name, method, other in changed:
            if vars(function).get(name) is other:  # and `forward` has not replaced it
                setattr(function, name, method)


def _replaced(method: Any, wrapper: _Wrapper) -> Any:
    """Wrap the function inside a static method or class method."""
    if isinstance(method, staticmethod):
        return staticmethod(wrapper(method.__func__))
    return classmethod(lambda kind, *args, **kwargs: wrapper(partial(method.__func__, kind))(*args, **kwargs))


@contextmanager
def _noting_classes(callback: Callable[[type], None]) -> Iterator[None]:
    """Call a function for each `torch.autograd.Function` subclass that a block defines or imports."""
    kind: Any = type(torch.autograd.Function)
    make = kind.__init__

    def making(function: type, *args: Any) -> None:
        make(function, *args)
        callback(function)

    with patched(kind, __init__=making):
        yield


def _clone_aliases(results: Any, arguments: Sequence[torch.Tensor], overwritten: set[int]) -> Any:
    """Function results, cloned where they share storage with an argument, but not the arguments that it has
    overwritten."""
    if isinstance(results, tuple):
        return tuple(_clone_aliases(result, arguments, overwritten) for result in results)
    if not isinstance(results, torch.Tensor) or id(results) in overwritten:
        return results
    return results.clone() if storage_key(results) in map(storage_key, arguments) else results


def derive(tracer: Tracer, application: Application) -> None:
    """Record the `backward` of a function, and route gradients through it.

    Raises:
        poptorch.Error: if that fails.
    """
    with tracer.suspended():
        is_saved = application.is_saved
        gs = [torch.zeros(v.shape, dtype=v.dtype) for v in application.results if v is not None]
    if not is_saved:
        application.give_up()
    if not (is_saved and application.differentiated):
        return
    positions: list[int] = []

    def backward(*gs: torch.Tensor) -> list[torch.Tensor]:
        of_tensors = iter(gs)
        with torch.no_grad():
            result_gradients = (None if value is None else next(of_tensors) for value in application.results)
            outcome = application.context.apply(*result_gradients)
        gradients = []
        of_arguments = outcome if isinstance(outcome, tuple) else (outcome,)
        for i, (g, value) in enumerate(zip(of_arguments, application.inputs, strict=False)):  # it may give more `None`s
            if g is not None and value is not None:
                positions.append(i)
                gradients.append(g.sum_to_size(value.shape).to(value.dtype))
        return gradients

    (last, *_) = [value.producer for value in application.of_gradients]
    assert last is not None
    trace = trace_backward(tracer, last, f"{application.name}.backward", backward, gs)
    _insert(tracer.recorder.trace.nodes, application, trace, [application.inputs[i] for i in positions])


def trace_backward(
    tracer: Tracer, origin: Node, name: str, backward: Callable[..., Any], gradients: Sequence[torch.Tensor]
) -> Trace:
    """Trace a function of gradients, with the placement of an op.

    Raises:
        poptorch.Error: if that fails.
    """
    try:
        with tracer.recorder.recording_at(origin):
            return tracer.trace_body(backward, gradients)[0]
    except UNREADABLE as problem:
        raise createPoptorchError(f"{name}: {CANNOT_READ}") from problem
    except RuntimeError as problem:
        raise createPoptorchError(f"{name} cannot be captured: {problem}") from problem


def _insert(nodes: list[Node], application: Application, backward: Trace, inputs: Sequence[Value | None]) -> None:
    """Insert an op that returns a custom function's results, and substitute new inner values for them within
    `forward`."""
    own = application.of_gradients
    inner = {id(value): Value(value.shape, value.dtype, producer=value.producer, requires_grad=False) for value in own}

    def within(value: Value) -> Value:
        return inner.get(id(value), value)

    for value in own:
        assert value.producer is not None
        value.producer.results[:] = map(within, value.producer.results)
    backward.outer[:] = map(within, backward.outer)
    makers = {id(value.producer) for value in (*inner.values(), *backward.outer)}
    end = 1 + max(i for i, node in enumerate(nodes) if id(node) in makers)
    substitute(nodes[:end], within)
    numbers = [i for i, value in enumerate(filter(None, application.results)) if id(value) in inner]
    arguments = {"results": list(inner.values()), "inputs": list(inputs), "numbers": numbers, "name": application.name}
    nodes.insert(end, own_derivative(own, backward, nodes[end - 1], **arguments))


def substitute(nodes: Iterable[Node], replaced: Callable[[Value], Value]) -> None:
    """Substitute values that nodes read, also in traces that they run."""
    for node in nodes:
        node.arguments = with_values(node.arguments, replaced)
        for trace in node.traces:
            trace.outer[:] = map(replaced, trace.outer)


def own_derivative(values: Sequence[Value], backward: Trace, origin: Node, **arguments: Any) -> Node:
    """Op that returns these values, with a trace as its gradient, and the placement of another op."""
    arguments["backward"] = backward
    node = Node(OWN, "", arguments, origin.placement, origin.scope, origin.source, regions=origin.regions)
    node.results = list(values)
    for value in values:
        value.producer = node
    return node
