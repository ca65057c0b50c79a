"""A `LightningModule` step as a model, plus deferred execution of its host-side effects.

A step is captured once, without numbers. Its host-side effects, `self.log(...)`, updates of metrics and what it appends
to lists of the module, are *deferred*: the capture records each call, and the program returns the tensors among its
arguments, those of every micro-batch. After a run the host makes the calls with these numbers. So Lightning gets the
same calls as without a program, and metrics of torchmetrics are updated unchanged, micro-batch by micro-batch.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from inspect import signature
from math import prod
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch.utils import _pytree as pytree
from torchmetrics import Metric, MetricCollection

from poptorch.base.logging_ import Warned
from poptorch.base.patching import patched, restoring
from poptorch.errors import createPoptorchError
from poptorch.ops import identity_loss, return_all
from poptorch.program.batching import Batching

_METRIC_METHODS = ("forward", "update", "compute", "reset")
"""Deferred methods of a metric; calling a metric is `forward`."""


@dataclass(frozen=True)
class _ProgramOutput:
    """A program output used as a call argument: its index, and its dtype in the step."""

    index: int
    dtype: torch.dtype

    def of_micro_batch(self, outputs: Sequence[torch.Tensor], micro_batch: int) -> torch.Tensor:
        """The tensor of one micro-batch."""
        return outputs[self.index][micro_batch].to(self.dtype)


@dataclass(eq=False)
class _DeferredCall:
    """Deferred call of a metric's method, or of `append` of a list of the module.

    Attributes:
        function: the method.
        arguments: arguments and keyword arguments, flattened.
        structure: structure of the arguments.
    """

    function: Callable[..., Any]
    arguments: list[Any]
    structure: pytree.TreeSpec

    def execute(
        self, outputs: Sequence[torch.Tensor], micro_batch: int, results: Mapping[_DeferredCall, Sequence[Any]]
    ) -> Any:
        """Execute the call for one micro-batch."""
        flat = [
            each.of_micro_batch(outputs, micro_batch)
            if isinstance(each, _ProgramOutput)
            else results[each][-1]
            if type(each) is _DeferredCall
            else each
            for each in self.arguments
        ]
        args, kwargs = pytree.tree_unflatten(flat, self.structure)
        return self.function(*args, **kwargs)


@dataclass(frozen=True)
class _DeferredLog:
    """A deferred `LightningModule.log` call.

    Attributes:
        function: the method.
        value: value to log: an output of the program, the result of a call, or a metric.
        kwargs: other arguments, by name.
        on_epoch: whether values are reduced over an epoch.
    """

    function: Callable[..., Any]
    value: _ProgramOutput | _DeferredCall | Metric
    kwargs: Mapping[str, Any]
    on_epoch: bool

    def execute(self, values: torch.Tensor, outputs: Sequence[torch.Tensor], batch: Any) -> None:
        """Log values of shape `[micro-batches, replicas]` as if each micro-batch had been logged.

        Lightning keeps the last value, and reduces over an epoch. So the others are reduced together. Replicas are
        reduced like steps, as Lightning does for several processes.
        """
        kwargs = dict(self.kwargs)
        reduce = kwargs.get("reduce_fx", "mean")
        if isinstance(reduce, str):
            reduce = {"sum": torch.sum, "min": torch.min, "max": torch.max}.get(reduce.lower(), torch.mean)
        size = kwargs.pop("batch_size", None)
        weights = torch.ones_like(values)
        if isinstance(size, _ProgramOutput):
            weights = outputs[size.index].reshape(values.shape)
        is_aggregated = self.on_epoch and len(values) > 1
        if is_aggregated and size is None and reduce is torch.mean:
            size = extract_batch_size(batch)
        for selection in [slice(-1), slice(-1, None)] if is_aggregated else [slice(-1, None)]:
            value, weight = values[selection].flatten(), weights[selection].flatten()
            if isinstance(size, _ProgramOutput):
                kwargs["batch_size"] = weight.sum()
            elif size is not None:
                kwargs["batch_size"] = size * len(values[selection])
            reduced = (value * weight).sum() / weight.sum() if reduce is torch.mean else reduce(value)
            self.function(value=reduced, **kwargs)


_TRACING_ATTRIBUTES = {"_enable_grad": True, "validate_args": False}
"""Attributes of metrics that become a part of a program: gradients flow, and numbers are looked at on the host."""


class _MetricResult:
    """A metric's return value within a step: on the host, the deferred call's result; else the traced computation.

    Most steps only log it, or ignore it. Any other use makes the metric a part of the program.

    Args:
        call: the call that the host makes.
        trace: function that makes the same call within the capture.
    """

    def __init__(self, call: _DeferredCall, trace: Callable[[], Any]) -> None:
        self.call, self.traced = call, trace

    @staticmethod
    def substitute(value: Any) -> Any:
        """Replace deferred metric results by traced results."""
        return pytree.tree_map(lambda each: each.traced() if isinstance(each, _MetricResult) else each, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*cls.substitute(args), **cls.substitute(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.traced(), name)


def _traced_operator(name: str) -> Callable[..., Any]:
    """Create a method applying the named operator to the traced result."""

    def method(self: _MetricResult, *others: Any) -> Any:
        return getattr(self.traced(), name)(*_MetricResult.substitute(others))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow", "lt", "le", "gt", "ge", "eq", "ne"):
    setattr(_MetricResult, f"__{_name}__", _traced_operator(f"__{_name}__"))
for _name in ("__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__neg__", "__abs__", "__getitem__", "__iter__"):
    setattr(_MetricResult, _name, _traced_operator(_name))


@dataclass
class _StepEffects:
    """Host-side effects of a step, recorded during a single capture.

    Attributes:
        calls: calls of methods of metrics and lists, in the order of the step.
        logs: values logged after them.
        shapes: shapes of the tensors that the program has to return for them.
    """

    calls: list[_DeferredCall] = field(default_factory=list)
    logs: list[_DeferredLog] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def execute(self, returned: Sequence[torch.Tensor], batching: Batching, batch: Any) -> None:
        """Execute deferred calls for each micro-batch, then log.

        Args:
            returned: the tensors that the program returns for this, those of all micro-batches.
        """
        shape = batching.micro_batches, batching.groups.replicas
        count = prod(shape)
        outputs = [
            t[None] if count == 1 else t.reshape(count, *each) for t, each in zip(returned, self.shapes, strict=True)
        ]
        results: dict[_DeferredCall, list[Any]] = {call: [] for call in self.calls}
        for micro_batch in range(count if self.calls else 0):
            for call in self.calls:
                results[call].append(call.execute(outputs, micro_batch, results))
        for log in self.logs:
            if isinstance(log.value, Metric):
                log.function(value=log.value, **log.kwargs)
            elif isinstance(log.value, _ProgramOutput):
                log.execute(outputs[log.value.index].reshape(shape), outputs, batch)
            elif isinstance(results[log.value][0], Mapping):  # of a collection, by `log_dict`
                for name in results[log.value][0]:
                    values = torch.stack([torch.as_tensor(each[name]) for each in results[log.value]])
                    named = replace(log, kwargs={**log.kwargs, "name": name})
                    named.execute(values.reshape(shape).float(), outputs, batch)
            else:
                values = torch.stack(list(map(torch.as_tensor, results[log.value])))
                log.execute(values.reshape(shape).float(), outputs, batch)


class _EffectRecorder:
    """Records a step's host-side effects during capture.

    Attributes:
        effects: recorded calls.
        outputs: tensors that the program has to return.
        logged: those of them that are logged.
    """

    def __init__(self) -> None:
        self.effects = _StepEffects()
        self.outputs: list[torch.Tensor] = []
        self.logged: list[torch.Tensor] = []

    def call(self, function: Callable[..., Any], args: Any, kwargs: Any) -> _DeferredCall:
        """Record a call."""
        flat, structure = pytree.tree_flatten((args, kwargs))
        self.effects.calls.append(_DeferredCall(function, list(map(self._argument, flat)), structure))
        return self.effects.calls[-1]

    def log(self, function: Callable[..., Any], value: Any, kwargs: Mapping[str, Any], on_epoch: bool) -> None:
        """Record a logged value."""
        if isinstance(value, torch.Tensor):
            value = value.detach().float().mean()
            self.logged.append(value)
        kwargs = {key: self._argument(each) for key, each in kwargs.items()}
        self.effects.logs.append(_DeferredLog(function, self._argument(value), kwargs, on_epoch))

    def _argument(self, value: Any) -> Any:
        if isinstance(value, _MetricResult):
            return value.call
        if not isinstance(value, torch.Tensor):
            return value
        self.outputs.append(value.detach())
        self.effects.shapes.append(tuple(value.shape))
        return _ProgramOutput(len(self.outputs) - 1, value.dtype)


class _StepCaptures:
    """Host-side effects per capture of a step: they may differ between captures."""

    def __init__(self) -> None:
        self.effects: tuple[_StepEffects, ...] = ()

    def add(self, effects: _StepEffects) -> int:
        """Register a capture, and return its index, by which its program labels results."""
        self.effects = (*self.effects, effects)
        return len(self.effects) - 1


class Step(torch.nn.Module):
    """A `LightningModule` step as a model, returning its results and tensors required by host-side effects.

    Args:
        keywords: names of the last of the indices.
    """

    def __init__(self, module: LightningModule, name: str, keywords: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self.step, self.keywords = module, name, keywords
        self._captures = _StepCaptures()
        self.training = module.training

    def execute_side_effects(self, returned: Any, batching: Batching, batch: Any) -> Any:
        """Execute the step's deferred host-side effects. Returns the result of the step."""
        result, outputs, capture = returned
        self._captures.effects[capture].execute(outputs, batching, batch)
        return result

    def forward(self, batch: Any, *indices: torch.Tensor) -> tuple[Any, list[torch.Tensor], int]:
        scalars = [index[0] for index in indices]
        positional = len(scalars) - len(self.keywords)
        recorder, appended = _EffectRecorder(), _track_appends(self.module)
        with self._deferring(recorder), _warn_of_counters(self.module, self.step):
            result = getattr(self.module, self.step)(
                batch, *scalars[:positional], **dict(zip(self.keywords, scalars[positional:], strict=True))
            )
            result = _MetricResult.substitute(result)
            for append, item in appended():
                recorder.call(append, (item,), {})
        if self.step == "training_step":
            result = self._with_loss(result, recorder.logged)
        return result, [return_all(t) for t in recorder.outputs], self._captures.add(recorder.effects)

    def _with_loss(self, result: Any, logged: Sequence[torch.Tensor]) -> Any:
        """A training step's result, with its loss marked as the model's loss."""
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, torch.Tensor):
            raise createPoptorchError(
                f"{type(self.module).__name__}.training_step should return the loss, or a dict with it as 'loss'; got "
                f"{type(result).__name__}. A step that is captured cannot be skipped."
            )
        # The first of all: a logged value may be an identity loss, which must not be a second loss of the model.
        loss = torch.stack([loss, *(each.to(loss.dtype) for each in logged)])[0]
        loss = identity_loss(loss, "none")
        return {**result, "loss": loss} if isinstance(result, Mapping) else loss

    @contextmanager
    def _deferring(self, recorder: _EffectRecorder) -> Iterator[None]:
        """Context manager deferring logging and metric updates until after the run."""
        metrics = [each for each in self.module.modules() if isinstance(each, Metric | MetricCollection)]
        replacements: list[dict[str, Any]] = [
            {
                "log": _deferred_log(self.module, recorder, self.step != "training_step"),
                "log_dict": _deferred_log_dict(self.module),
            },
            *({name: _deferred_method(each, name, recorder, metrics) for name in _METRIC_METHODS} for each in metrics),
        ]
        namespaces = [vars(each) for each in (self.module, *metrics)]
        with restoring(*namespaces):
            for namespace, methods in zip(namespaces, replacements, strict=True):
                namespace.update(methods)
            yield


def _track_appends(module: torch.nn.Module) -> Callable[[], Iterator[tuple[Callable[[Any], None], Any]]]:
    """Track what is appended to the lists among a module's attributes, and in dictionaries there.

    Returns:
        A function that removes what has been appended since: calls that append to the list then there, and the items.
    """

    def lists() -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
        for name, value in vars(module).items():
            entries = value.items() if isinstance(value, dict) and not name.startswith("_") else ()
            yield from (((name, key), each) for key, each in entries if type(each) is list)
            if type(value) is list:
                yield (name,), value

    def append_to(path: tuple[Any, ...]) -> Callable[[Any], None]:
        def append(item: Any) -> None:
            name, *keys = path
            target = getattr(module, name)
            for key in keys:
                target = target[key]
            target.append(item)

        return append

    before = {path: list(each) for path, each in lists()}

    def appended() -> Iterator[tuple[Callable[[Any], None], Any]]:
        for path, each in lists():
            old = before.get(path)
            if old is not None and len(each) > len(old) and all(map(operator.is_, old, each)):
                items = each[len(old) :]
                del each[len(old) :]
                yield from ((append_to(path), item) for item in items)

    return appended


@contextmanager
def _warn_of_counters(module: LightningModule, step: str) -> Iterator[None]:
    """Warn, once per step, about counters of the trainer that a step reads: they are constants of its program."""

    def warning_property(kind: type, name: str) -> property:
        getter = getattr(kind, name).fget

        def read(owner: Any) -> Any:
            count = getter(owner)
            _warned.setdefault(module, Warned()).once(
                (step, name),
                "`%s` reads `%s`, which is %s now. A step is captured once, so this number is a part of the program, "
                "and stays. What is to follow it is a buffer (`register_buffer`) that a hook overwrites, such as "
                "`on_train_batch_start`: `self.progress.fill_(self.%s)`.",
                step,
                name,
                count,
                name,
            )
            return count

        return property(read)

    with ExitStack() as stack:
        for name in ("current_epoch", "global_step"):
            for kind in (LightningModule, Trainer):
                stack.enter_context(patched(kind, **{name: warning_property(kind, name)}))
        yield


_warned: weakref.WeakKeyDictionary[LightningModule, Warned] = weakref.WeakKeyDictionary()


def _deferred_log(module: LightningModule, recorder: _EffectRecorder, on_epoch: bool) -> Callable[..., None]:
    """Replacement for `LightningModule.log` within a step; `on_epoch` is the default of that argument."""
    method = module.log
    parameters = signature(method)

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        arguments = parameters.bind(name, value, *args, **kwargs).arguments
        if not isinstance(value, torch.Tensor | _MetricResult | Metric):
            raise createPoptorchError(
                f"log: {name!r} is {value!r} ({type(value).__name__}) in a step, which is captured once: it would be "
                "logged as it was then. Log a tensor that is computed in the step, and others in a hook such as "
                "`on_train_batch_end`."
            )
        del arguments["value"]
        stated = arguments.get("on_epoch")
        recorder.log(method, value, arguments, on_epoch if stated is None else stated)

    return log


def _deferred_log_dict(module: LightningModule) -> Callable[..., None]:
    """Replacement for `LightningModule.log_dict`: logs a metric collection's results as a single metric."""
    method = module.log_dict

    def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(dictionary, _MetricResult):
            arguments = signature(method).bind(dictionary, *args, **kwargs).arguments
            del arguments["dictionary"]
            module.log("", dictionary, **arguments)
        else:
            method(dictionary, *args, **kwargs)

    return log_dict


def _deferred_method(
    metric: Any, name: str, recorder: _EffectRecorder, metrics: Sequence[torch.nn.Module]
) -> Callable[..., _MetricResult]:
    """Replacement for a metric method within a step."""
    method = getattr(metric, name)
    attributes_before = [(each, dict(vars(each))) for each in metrics]

    def deferred(*args: Any, **kwargs: Any) -> _MetricResult:
        @cache
        def trace() -> Any:
            if name != "forward":
                raise createPoptorchError(
                    f"{type(metric).__name__}.{name}: what a metric has seen is on the host, so a step cannot compute "
                    f"with it. Log the result as it is, or call `{name}()` in a hook such as `on_train_epoch_end`."
                )
            with restoring(*(vars(each) for each, _ in attributes_before)):
                for each, attributes in attributes_before:
                    others = {key: value for key, value in _TRACING_ATTRIBUTES.items() if key in attributes}
                    vars(each).clear()
                    vars(each).update({**attributes, **others})
                metric.reset()
                metric.update(*_MetricResult.substitute(args), **_MetricResult.substitute(kwargs))
                return metric.compute()

        return _MetricResult(recorder.call(method, args, kwargs), trace)

    return deferred
