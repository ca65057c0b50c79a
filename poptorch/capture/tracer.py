"""`Tracer`: intercepts PyTorch functions and ops, and records them.

Two modes of PyTorch intercept calls: see `poptorch.capture.interception`. One receives each op, after PyTorch has
worked out dtypes, broadcasting and autograd; the other, above it, functions that are recorded as one op: losses, norms,
recurrent layers and others with a name of their own in printed graphs. Ops without a lowering are decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from poptorch.base.patching import patched, pushed
from poptorch.capture.autocast import NARROWED, autocast_dtype, narrowed
from poptorch.capture.captured_constants import is_users
from poptorch.capture.contents import TensorContents
from poptorch.capture.decompositions import sequential_update
from poptorch.capture.devices import HOST, IPU
from poptorch.capture.host_draws import HostDraws
from poptorch.capture.host_state import HostState
from poptorch.capture.indexing import index_by_masks, is_mixed, masks_to_indices
from poptorch.capture.interception import FunctionInterceptor, OpInterceptor
from poptorch.capture.losses import retry_loss
from poptorch.capture.preserved_functions import LOSSES, PreservedFunction
from poptorch.capture.recorder import Recorder
from poptorch.capture.request import CaptureRequest
from poptorch.capture.tensor_layout import TensorLayout
from poptorch.capture.torch_private import (
    NORMS,
    UNREADABLE,
    FakeTensor,
    arguments_of,
    decomposition,
    fake_mode,
    hears_functions,
    in_transform,
    is_wrapped,
    shares_storage,
    written_arguments,
)
from poptorch.capture.trace import Trace, tensors_in
from poptorch.errors import createPoptorchError

_OVERWRITING = frozenset(
    f"aten.{name}_"
    for name in ("bernoulli", "cauchy", "copy", "exponential", "fill", "geometric", "log_normal", "normal", "random")
) | {"aten.uniform_", "aten.zero_"}
"""Overwriting ops whose results are independent of previous contents. Their names keep the underscore."""


_NOT_A_VIEW = (
    "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
    "contiguous subspaces). Use .reshape(...) instead."
)


class Tracer:
    """A capture in progress.

    Attributes:
        recorder: recorder of the ops.
        contents: contents of tensors, where code reads them.
        hooks: descriptions of hooks on gradients.
        host_state: state of the host before `forward`.
    """

    def __init__(self, request: CaptureRequest, preserves: bool) -> None:
        self._lowered = request.lowered
        self.has_counters = request.tape is not None
        self.recorder = Recorder(request)
        self.contents = TensorContents(self, request.breaks)
        self.hooks: list[str] = []
        self.host_state: HostState
        self._preserves = preserves
        self._has_preserved = False
        self.differentiates = not preserves
        self.is_suspended = False
        self.generator: torch.Generator | None = None
        self._host_draws = HostDraws(self)
        self._fake = fake_mode()
        self.op_interceptor, self.function_interceptor = OpInterceptor(self), FunctionInterceptor(self)

    def fake(self, t: torch.Tensor) -> torch.Tensor:
        """Fake counterpart of a tensor; repeated calls return an identical object."""
        return self._fake.from_tensor(t)

    def fake_in(self, tensor_layout: TensorLayout) -> torch.Tensor:
        """Fake tensor with a given layout in separate storage."""
        steps = zip(tensor_layout.shape, tensor_layout.stride, strict=True)
        extent = tensor_layout.offset + 1 + sum((size - 1) * stride for size, stride in steps)
        with self._fake:
            memory = torch.empty(max(extent, 0), dtype=tensor_layout.dtype)
            return memory.as_strided(tensor_layout.shape, tensor_layout.stride, tensor_layout.offset).detach()

    @contextmanager
    def intercepting(self) -> Iterator[None]:
        """Intercept all ops within a block."""
        with torch.enable_grad(), self._fake, self.op_interceptor, self.function_interceptor:
            yield

    def suspended(self) -> AbstractContextManager[None]:
        """Suspend recording within a block."""
        return patched(self, is_suspended=True)

    def is_recording(self, arguments: Any) -> bool:
        """Whether operations on these arguments are recorded: another thread may run unrelated ones."""
        is_of_capture = any(
            isinstance(t, FakeTensor) and t.fake_mode is self._fake for t in pytree.tree_leaves(arguments)
        )
        return is_of_capture and not self.is_suspended and not in_transform()

    # Devices of tensors ----------------------------------------------------------------------------------------------

    def device_of(self, t: torch.Tensor, frame: FrameType) -> torch.device | None:
        """Device of a tensor, as reported to user code in a frame; `None` if PyTorch should answer."""
        is_intercepting = hears_functions(self.function_interceptor) and not self.is_suspended
        return self.to_model(t) if is_intercepting and is_users(frame) else None

    def to_model(self, t: torch.Tensor) -> torch.device:
        """Device of a tensor from the model's perspective."""
        return HOST if not is_wrapped(t) and self.recorder.is_on_host(t) else IPU

    def placing_intermediates(self, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """Place intermediate tensors of a function on the host, if all tensor arguments are host tensors."""
        tensors = tensors_in((args, kwargs))
        makes_on_host = bool(tensors) and all(self.to_model(t) == HOST for t in tensors)
        return patched(self.recorder, makes_on_host=makes_on_host)

    def on_device(self, t: torch.Tensor) -> torch.Tensor:
        """Move a host tensor to the device; return other tensors unchanged."""
        if self.is_suspended or self.to_model(t) == IPU:
            return t
        with self.suspended():
            moved = t.clone()
        self.recorder.move_to_device(t, moved)
        return moved

    # Records --------------------------------------------------------------------------------------------------------

    def record(
        self, op: str, compute: Callable[..., Any], arguments: Mapping[str, Any], has_effect: bool = False
    ) -> Any:
        """Record a computation as a single op, regardless of its constituent ops.

        Args:
            compute: function that returns results of the right shapes and dtypes, for these arguments.
            has_effect: whether it is kept even if nothing uses it.
        """
        with self.suspended():
            results = compute(**arguments)
        node = self.recorder.add_node(op, "", arguments, has_effect)
        self.recorder.add_results(node, results)
        return results

    def trace_body(self, body: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> tuple[Trace, list[torch.Tensor]]:
        """Trace a function body for a control-flow op, on copies of its inputs; returns fake results, too."""
        with self.recorder.frames.nested() as trace:
            with self.suspended():
                copies = [t.clone() for t in inputs]
            for t in copies:
                self.recorder.new_input(t)
            results = body(*copies)
            results = list(results) if isinstance(results, list | tuple) else [results]
            if others := [each for each in results if not isinstance(each, torch.Tensor)]:
                raise createPoptorchError(
                    f"The body {getattr(body, '__qualname__', body)} of a loop or of a conditional returns "
                    f"{others[0]!r}; expected a tensor, or a list or tuple of tensors."
                )
            trace.outputs = [self.recorder.value_of(t) for t in results]
        return trace, results

    def record_preserved(
        self, preserved: PreservedFunction, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Record a preserved PyTorch function as one op, or run it op by op if preserving is disabled."""
        narrow = autocast_dtype()
        if self._preserves and narrow is not None and preserved.op in NARROWED:
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: narrowed(t, narrow), (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return self.record_preserved(preserved, function, args, kwargs)
        if not self._preserves or narrow is not None:  # autocast casts the arguments of inner functions
            results = function(*args, **kwargs)
            return self.record_loss(results) if preserved.op in LOSSES else results
        arguments = preserved.arguments(function, args, kwargs)
        if arguments is None and preserved.otherwise is not None:
            with self.function_interceptor:
                return preserved.otherwise(*args, **kwargs)
        if arguments is None:
            return function(*args, **kwargs)
        if arguments.pop("inplace", False):
            return arguments["input"].copy_(self.record_preserved(preserved, function, (), arguments))
        overwritten = preserved.writes(arguments)
        with self.suspended():
            try:
                results = function(*args, **kwargs) if preserved.shaped_as is None else preserved.shaped_as(**arguments)
            except (AssertionError, IndexError, RuntimeError, ValueError):
                if preserved.op not in LOSSES:
                    raise
                results = retry_loss(function, args, kwargs)
        if any(shares_storage(t, arguments) for t in pytree.tree_leaves(results)):  # a view, or the argument itself
            return function(*args, **kwargs)
        self._has_preserved = True
        node = self.recorder.add_node(preserved.op, "", arguments)
        self.recorder.add_results(node, results)
        self.recorder.overwrite(node, overwritten)
        return results

    def record_detach_(self, t: torch.Tensor) -> torch.Tensor:
        """Record `Tensor.detach_`, which PyTorch does not dispatch as an op."""
        node = self.recorder.add_node("aten.detach", "default", {"input": t})
        self.recorder.overwrite(node, [t])
        return t.detach_()

    def record_set_data(self, t: torch.Tensor, data: torch.Tensor) -> None:
        """Record `t.data = data`, which PyTorch does not dispatch as an op: new contents, unchanged autograd history.

        They are copied: later writes to `data` do not show in `t`. Earlier views of `t` keep the old numbers.
        """
        if (t.shape, t.dtype) != (data.shape, data.dtype):
            raise createPoptorchError(
                f"`.data` of a tensor of {tuple(t.shape)} and {t.dtype} is set to one of {tuple(data.shape)} and "
                f"{data.dtype} ({self.recorder.source()}). While a model is compiled a tensor keeps its shape and "
                "dtype: use a new tensor for others."
            )
        before, content = self.recorder.value_of(t), self.recorder.value_of(data)
        with self.suspended():
            t.data = data.detach().clone()
        self.recorder.rebind(t, before, content)

    def deep_copy(self, t: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        """Copy a tensor, as `copy.deepcopy` does."""
        if id(t) not in memo:
            copy = t.detach().clone().requires_grad_(t.requires_grad)
            memo[id(t)] = torch.nn.Parameter(copy, t.requires_grad) if isinstance(t, torch.nn.Parameter) else copy
        return memo[id(t)]

    def differentiate(self, is_forward: bool) -> None:
        """Ensure that PyTorch can differentiate recorded functions: preserved ones hide their ops from autograd.

        Args:
            is_forward: whether it is forward-mode (`torch.autograd.forward_ad`), computed together with later ops.

        Raises:
            RetryWithoutPreserving: if a preserved function was recorded, or may have been.
        """
        if (self._preserves if is_forward else self._has_preserved) and not in_transform():
            raise RetryWithoutPreserving

    def record_loss(self, x: torch.Tensor) -> Any:
        """Mark a tensor as a loss."""
        return self.record("poptorch.identity_loss", lambda x, reduction: x.clone(), {"x": x, "reduction": "none"})

    def record_op(self, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Record an op of PyTorch."""
        if self.is_suspended or op.namespace == "prim":
            return op(*args, **kwargs)
        if op._opname.rstrip("_") == "index_put" and is_mixed(args[1]):
            args = (args[0], masks_to_indices(self.contents, args[1]) or args[1], *args[2:])
        call = _OpCall.of(op, args, kwargs)
        generator = call.arguments.pop("generator", None)
        if generator is not None and generator is not torch.default_generator:
            with self.op_interceptor:  # ops get a proxy of the user's generator, which is another object
                return self._host_draws.draw(op, self.generator or generator, args, kwargs)
        results = self._decomposed(call)
        if results is not NotImplemented:
            return results
        try:
            results = self._on_stand_ins(call)
        except ValueError:
            if op is torch.ops.aten.view.default:  # as PyTorch says it of tensors that have numbers
                raise RuntimeError(_NOT_A_VIEW) from None
            raise
        except UNREADABLE:
            reads_masks = op in (torch.ops.aten.index.Tensor, torch.ops.aten.masked_select.default)
            constant = index_by_masks(self, *args) if reads_masks else self.contents.result_of(op, args, kwargs)
            if constant is None and not self.contents.may_break_graph:
                raise
            return self.contents.break_graph(op, args, kwargs) if constant is None else constant
        if torch.Tag.inplace_view in op.tags:
            self.recorder.record_new_view(args[0])
        elif call.overwritten:
            self._record_written(call, results)
        elif call.name != "aten.as_strided":  # whose layout is known when it is read
            self._record_new(call, results)
        return results

    def _decomposed(self, call: _OpCall) -> Any:
        """Record an op as its decomposition, and return the results; `NotImplemented` for ops without one."""
        op, args = call.op, call.args
        is_norm = self.differentiates and op in NORMS  # its statistics are functions of the input, to derivatives
        updates = [*call.overwritten] == ["input"] and torch.Tag.inplace_view not in op.tags and call.reads_overwritten
        decomposed = sequential_update(op, args[0]) if updates and isinstance(args[0], torch.Tensor) else None
        if decomposed is None and (is_norm or not self._lowered(call.name, op._overloadname)):
            decomposed = decomposition(op)
        if decomposed is None:
            return NotImplemented
        with self.recorder.recording_decomposition() as final, self.op_interceptor:
            results = decomposed(*args, **call.kwargs)
            if all(result.alias_info is None for result in op._schema.returns):  # where the parts give a view
                results = pytree.tree_map(lambda t: t.clone() if shares_storage(t, call.arguments) else t, results)
            differentiable = results[:1] if is_norm else results
            final += tensors_in([differentiable, *call.overwritten.values()])
        return results

    def _record_new(self, call: _OpCall, results: Any) -> None:
        """Record an op that returns new tensors or views; nothing for one that returns plain values."""
        if not tensors_in(results):
            return
        is_fresh = call.name == "aten.lift_fresh"  # `torch.tensor`, and types of the host, such as `torch.LongTensor`
        if is_fresh and not isinstance(call.args[0], FakeTensor):
            self.recorder.add_preexisting(call.args[0])  # which no object of the user holds: a search would be in vain
        node = self.recorder.add_node(call.name, call.op._overloadname, call.arguments)
        if is_fresh:
            if is_of_type := hears_functions(self.function_interceptor):  # which is no function
                self.recorder.host.created.add(node)
            node.is_on_host = is_of_type or self.recorder.makes_on_host
        # A lazy conjugate or negation is materialised in a clone, below autograd.
        is_lazy = call.name == "aten.clone" and (call.args[0].is_conj() or call.args[0].is_neg())
        if not self.recorder.add_views(node, call.arguments, results):
            self.recorder.add_results(node, results, blocks_grad=not (is_lazy and torch.is_grad_enabled()))

    def _record_written(self, call: _OpCall, results: Any) -> None:
        """Record an op that overwrites arguments: their new values become results."""
        read = {"input"} if call.reads_overwritten else set()
        inputs = {key: value for key, value in call.arguments.items() if key not in call.overwritten or key in read}
        tensors = tensors_in(dict(call.overwritten))
        node = self.recorder.add_node(call.name, call.op._overloadname, inputs, written=tensors)
        ids = list(map(id, tensors))
        self.recorder.add_results(node, [t for t in pytree.tree_leaves(results) if id(t) not in ids])
        self.recorder.overwrite(node, tensors)

    def _on_stand_ins(self, call: _OpCall) -> Any:
        """Run an op; one that overwrites user tensors outside the model on fake copies, so that these keep their
        contents."""
        plain = [t for t in pytree.tree_leaves(call.overwritten) if not isinstance(t, FakeTensor)]
        if not plain:
            return call.op(*call.args, **call.kwargs)
        for t in plain:
            self.recorder.value_of(t)  # its current value
        stand_ins = {id(t): self.fake(t) for t in plain}
        originals = {id(other): t for other, t in zip(stand_ins.values(), plain, strict=True)}
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: stand_ins.get(id(t), t), (call.args, call.kwargs))
        return pytree.tree_map_only(torch.Tensor, lambda t: originals.get(id(t), t), call.op(*args, **kwargs))


@dataclass(frozen=True)
class _OpCall:
    """Call of an op of PyTorch.

    Attributes:
        args, kwargs: arguments as passed.
        name: name of the recorded op.
        arguments: arguments by name.
        overwritten: arguments that the op overwrites, by name.
    """

    op: torch._ops.OpOverload
    args: Any
    kwargs: Any
    name: str
    arguments: dict[str, Any]
    overwritten: dict[str, Any]

    @classmethod
    def of(cls, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> _OpCall:
        """A call, given as to PyTorch."""
        arguments = arguments_of(op, args, kwargs)
        overwritten = {name: arguments[name] for name in written_arguments(op) if name in arguments}
        name = f"{op.namespace}.{op._opname}"
        if overwritten and name not in _OVERWRITING and not name.endswith("__"):
            name = name.removesuffix("_")
        return cls(op, args, kwargs, name, arguments, overwritten)

    @property
    def reads_overwritten(self) -> bool:
        """Whether results depend on previous contents of what it overwrites."""
        return self.name not in _OVERWRITING


class RetryWithoutPreserving(BaseException):
    """Request to restart a capture without preserved functions. Models' `except Exception` must not catch it."""


_tracers: list[Tracer] = []


def current() -> Tracer | None:
    """Innermost capture in progress; `None` outside captures."""
    return _tracers[-1] if _tracers else None


def capture_in_progress(tracer: Tracer) -> AbstractContextManager[Tracer]:
    """Make this capture `current` within a block."""
    return pushed(_tracers, tracer)
