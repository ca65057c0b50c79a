"""Private PyTorch APIs used by capture. If torch changes, this file follows."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,  # noqa: F401
)
from torch.distributions import Distribution
from torch.jit._state import _try_get_jit_cached_function
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel
from torch.nn.utils.stateless import _reparametrize_module as with_tensors  # noqa: F401
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401
from torch.utils._python_dispatch import _disable_current_modes as without_modes  # noqa: F401
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from poptorch.base.patching import patched
from poptorch.capture.backward import BACKWARD
from poptorch.capture.foreach import tensorwise
from poptorch.capture.quantisation import QUANTISATION
from poptorch.capture.torchvision_ops import OF_TORCHVISION

UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""Errors raised by fake tensors if a result, or its shape, depends on their numbers."""


def fake_mode() -> FakeTensorMode:
    """Mode with fake tensors, which have shapes and dtypes but no contents; real tensors are converted on use.

    `export` makes it have none: from PyTorch 2.15 on, results computed from a real scalar otherwise answer `item()`.
    """
    return FakeTensorMode(allow_non_fake_inputs=True, export=True)


def unlogged_errors() -> AbstractContextManager[None]:
    """Suppress logged tracebacks for errors that fake tensors raise anyway, such as shape mismatches."""
    return patched(logging.getLogger(FakeTensorMode.__module__), disabled=True)


def unvalidated_distributions() -> AbstractContextManager[None]:
    """Disable argument validation of `torch.distributions`, which would read tensor contents."""
    return patched(Distribution, _validate_args=False)


@contextmanager
def decomposing_functions() -> Iterator[None]:
    """Make functions run as ops that PyTorch can decompose and differentiate.

    Functions of `torch.jit.script` run as their original Python, and those of `torch.jit.trace` in their unoptimised
    form: later they differentiate by themselves, and hide what they detach. Recurrent layers and attention would
    otherwise be ops of a CPU library.
    """
    kind: Any = torch._C.ScriptFunction
    before, run = torch._C._get_mkldnn_enabled(), kind.__call__

    def run_python(function: Any, *args: Any, **kwargs: Any) -> Any:
        python: Any = getattr(function, "_torchdynamo_inline", None)
        is_script = python is not None and _try_get_jit_cached_function(python) is not None
        return python(*args, **kwargs) if is_script else run(function, *args, **kwargs)

    torch._C._set_mkldnn_enabled(False)
    try:
        with patched(kind, __call__=run_python), torch.jit.optimized_execution(False), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def uncompiled(model: Any) -> Any:
    """Original argument of `torch.compile`; other objects are returned unchanged."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # takes a second to import: only `torch.compile` does
    if dynamo is not None and isinstance(model, dynamo.OptimizedModule):
        return model._orig_mod
    return getattr(model, "_torchdynamo_orig_callable", model)


@contextmanager
def without_compile() -> Iterator[None]:
    """Run the original Python code of `torch.compile` results within a block."""
    from torch._dynamo.eval_frame import OptimizedModule  # here, as it takes a second

    def run(module: OptimizedModule, *args: Any, **kwargs: Any) -> Any:
        return module._orig_mod(*args, **kwargs)

    with patched(OptimizedModule, __call__=run), torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def checkpoints_run_by(region: Callable[[Any], AbstractContextManager[None]]) -> Iterator[None]:
    """Make checkpoints of `torch.utils.checkpoint` run their function once, within a region.

    PyTorch's own function runs it again in the backward pass: with `use_reentrant=True` below autograd, so that
    derivatives inside would not count. As in PyTorch, no gradients flow through that kind if none flows into it, and a
    warning says so.

    Args:
        region: function that makes the region of a checkpoint, from the context of the forward pass.
    """
    module: Any = torch.utils.checkpoint
    kind, generator = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    apply, own = kind.apply, threading.get_ident()

    def run(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if threading.get_ident() != own:
            return apply(function, preserve_rng_state, *args)
        module.check_backward_validity(args)
        tracked = any(isinstance(t, torch.Tensor) and t.requires_grad for t in args)
        with torch.set_grad_enabled(torch.is_grad_enabled() and tracked), region(nullcontext()):
            return function(*args)

    def checkpoint_generator(
        function: Any, preserve: bool = True, context_fn: Any = module.noop_context_fn, *args: Any, **kwargs: Any
    ) -> Any:
        if threading.get_ident() != own:
            yield from generator(function, preserve, context_fn, *args, **kwargs)
            return
        forward, _ = context_fn()
        with region(forward):
            yield

    with (
        patched(kind, apply=staticmethod(run)),
        patched(module, _checkpoint_without_reentrant_generator=checkpoint_generator),
    ):
        yield


def saving_policy(context: Any) -> Callable[..., bool] | None:
    """Predicate on an op's results, op and arguments: whether a checkpoint saves the results, by its context's policy;
    `None` if the context has no policy."""
    if not isinstance(context, torch.utils.checkpoint._CachingTorchDispatchMode):
        return None
    saved = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

    def saves(results: Any, op: Any, args: Any, kwargs: Any) -> bool:
        if op in torch.utils.checkpoint.SAC_IGNORED_OPS:
            return False
        about = SelectiveCheckpointContext(is_recompute=False, op_output=results)
        return context.policy_fn(about, op, *args, **kwargs) in saved

    return saves


def derivable_attention() -> AbstractContextManager[None]:
    """Allow `flex_attention` on tensors that require gradients, for which PyTorch has no CPU kernel."""
    return patched(flex_attention, _validate_device=lambda query, key, value: None)


def is_wrapped(t: torch.Tensor) -> bool:
    """Whether a tensor is a `torch.func` wrapper around other tensors."""
    return torch._C._functorch.is_functorch_wrapped_tensor(t)


def answering_for_devices(
    device_of: Callable[[torch.Tensor, FrameType], torch.device | None],
) -> AbstractContextManager[None]:
    """Override `device` of fake tensors by a function of tensor and calling frame, where it returns a device."""
    before: Any = FakeTensor.device
    return patched(FakeTensor, device=property(lambda t: device_of(t, sys._getframe(1)) or before.fget(t)))


def hears_functions(mode: TorchFunctionMode) -> bool:
    """Whether a mode intercepts this thread's next function call."""
    return torch._C._is_torch_function_mode_enabled() and mode in _get_current_function_mode_stack()


def in_transform() -> bool:
    """Whether a `torch.func` transform is active: its tensors are wrappers without storage."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def with_weight(function: Callable[..., Any], named: dict[str, Any]) -> dict[str, Any]:
    """Named function arguments, as passed by the caller: `l1_loss` hides its `weight` from modes (PyTorch 2.13)."""
    if function is not torch.nn.functional.l1_loss or "weight" in named:
        return named
    frames = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code is function.__code__)
    frame = next(frames, None)
    return named if frame is None else {**named, "weight": frame.f_locals["weight"]}


def storage_key(t: torch.Tensor) -> int:
    """Key shared by tensors with common storage, valid while one tensor lives."""
    return int(t.untyped_storage()._cdata)


def shares_storage(t: Any, given: Any) -> bool:
    """Whether an object is a tensor that shares storage with any tensor in a nested structure."""
    if not _has_storage(t):
        return False
    return any(_has_storage(each) and storage_key(each) == storage_key(t) for each in pytree.tree_leaves(given))


def _has_storage(t: Any) -> bool:
    return isinstance(t, torch.Tensor) and t.layout is torch.strided


def become(t: torch.Tensor, other: torch.Tensor) -> None:
    """Replace a tensor in place by another, for all references, if possible: not for tensors held by PyTorch itself,
    for views of them or for a backward pass.
    """
    if t._use_count() != 1:  # type: ignore[attr-defined]
        return
    t.__class__, other.__class__ = other.__class__, t.__class__
    t.__dict__, other.__dict__ = other.__dict__, t.__dict__
    torch._C._swap_tensor_impl(t, other)


def forget_history(t: torch.Tensor) -> None:
    """Drop the autograd history of a fake tensor, including tensors saved for its backward pass."""
    if not isinstance(t, FakeTensor) or not t.requires_grad:
        return
    if t._is_view():  # which `detach_` refuses
        become(t, t.detach())
    else:
        t.detach_()


NORMS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
                 "_fused_rms_norm")
)  # fmt: skip
"""Ops that give, beside their result, the statistics that their derivatives use: functions of the input there."""


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    table = dict(core_aten_decompositions())
    table |= get_decompositions(NORMS) | BACKWARD | QUANTISATION
    table.pop(torch.ops.aten.detach.default, None)  # it would forget that gradients stop there
    return table


def decomposition(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Decomposition of an op into simpler ones; `None` if unavailable."""
    if op.namespace == "torchvision":
        return OF_TORCHVISION.get(op._opname)
    if (each := tensorwise(op)) is not None:
        return each
    if op.namespace != "aten":  # looking up ops of other namespaces inside of a mode ends the process
        return None
    known = _decompositions().get(op)
    if known is None and op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        known = op.decompose
    return known


@cache
def written_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of arguments that an op overwrites, with `input` for PyTorch's `self`."""
    written = (a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return tuple("input" if name == "self" else name for name in written)


_IRRELEVANT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})
"""Op arguments that change no numbers here."""


def arguments_of(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Relevant op arguments by name, with `input` for PyTorch's `self`, as in its functions."""
    names = ("input" if a.name == "self" else a.name for a in op._schema.arguments)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    return {name: value for name, value in given.items() if name not in _IRRELEVANT}
