"""PyTorch modes that pass each function and each op to a `Tracer`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from poptorch.capture.captured_constants import is_users
from poptorch.capture.decompositions import COMPOSED, with_stacked_numbers
from poptorch.capture.devices import ASKING, IPU, LIKE_ANOTHER, on_cpu
from poptorch.capture.indexing import getitem, narrow, select, setitem
from poptorch.capture.number_inputs import holds_counters, with_numbers
from poptorch.capture.preserved_functions import (
    COMPOSED_LOSSES,
    PRESERVED_FUNCTIONS,
    PreservedFunction,
    as_activation,
    with_masks_of_bools,
    with_plain_sizes,
)
from poptorch.capture.row_views import RowViews
from poptorch.capture.tensor_hooks import TensorHooks
from poptorch.capture.torch_private import TorchDispatchMode, in_transform, with_weight
from poptorch.errors import createPoptorchError

if TYPE_CHECKING:
    from poptorch.capture.tracer import Tracer


class OpInterceptor(TorchDispatchMode):
    """Pass each op to a tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tracer.record_op(func, args, kwargs or {})


class FunctionInterceptor(TorchFunctionMode):
    """Pass functions with a special meaning in captures to a tracer."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer
        self.row_views = RowViews(tracer.recorder)
        self.tensor_hooks = TensorHooks(tracer.recorder)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = self._tracer
        if tracer.has_counters and holds_counters((args, kwargs)):
            call = partial(self.__torch_function__, func, types)
            return with_numbers(call, args, kwargs or {}, tracer.recorder.trace, tracer.recorder.frames.is_nested)
        if func in ASKING and not tracer.is_suspended and is_users(sys._getframe(1)):
            return ASKING[func](tracer.to_model(args[0]))
        func, args, kwargs, moves = on_cpu(func, args, kwargs or {})
        if func in LIKE_ANOTHER:
            others = [each for each in (*args[1:], *kwargs.values()) if isinstance(each, torch.Tensor)]
            moves |= any(tracer.to_model(other) == IPU for other in others)
        if not tracer.is_suspended:
            self.row_views.refresh((args, kwargs))
        with tracer.placing_intermediates(args, kwargs):
            results = self._function(func, args, kwargs)
        if not tracer.is_suspended:
            self.row_views.write_back()
        return pytree.tree_map_only(torch.Tensor, tracer.on_device, results) if moves else results

    def _function(self, func: Any, args: Any, kwargs: Any) -> Any:
        tracer = self._tracer
        preserved = None
        if not tracer.is_suspended:
            if (handle := _HANDLERS.get(func)) is not None:
                return handle(self, *args, **kwargs)
            if (note := _NOTES.get(func)) is not None:
                note(tracer, *args, **kwargs)
            tracer.generator = kwargs.get("generator")
            if func in _READING or func in _ROUNDING and tracer.contents.may_break_graph:
                return tracer.contents.read_contents(func, args, kwargs)
            if (composed := COMPOSED.get(func)) is not None:
                with self:
                    return composed(*args, **kwargs)
            if isinstance(func, torch._ops.HigherOrderOperator):
                raise createPoptorchError(
                    f"Unsupported function {func.name()} of functions at {tracer.recorder.source()}. Use "
                    "`poptorch.for_loop`, a loop of Python's, or `torch.where`, which chooses between what both "
                    "functions give; where a model only runs, `poptorch.cond`."
                )
            tracer.differentiates |= in_transform()
            preserved = None if in_transform() else _by_function().get(func)
        args, kwargs = as_activation(func, *with_masks_of_bools(func, args, with_weight(func, kwargs)))
        if preserved is None:
            results = func(*args, **kwargs)
            return tracer.record_loss(results) if any(func is each for each in COMPOSED_LOSSES) else results
        return tracer.record_preserved(preserved, func, *with_plain_sizes(func, args, kwargs))


def _indexing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Handler for a function whose numbers may be tensors that only a run knows."""
    return lambda self, *args, **kwargs: function(self._tracer.contents, self.row_views, *args, **kwargs)


def _making(function: Callable[..., Any]) -> Callable[..., Any]:
    """Handler for a function that makes a tensor of numbers, some of which may be in tensors."""

    def handle(self: FunctionInterceptor, *args: Any, **kwargs: Any) -> Any:
        with self:
            stacked = tuple(map(with_stacked_numbers, args))
            by_name = {name: with_stacked_numbers(each) for name, each in kwargs.items()}
        with warnings.catch_warnings():
            if any(a is not b for a, b in zip([*args, *kwargs.values()], [*stacked, *by_name.values()], strict=True)):
                warnings.filterwarnings("ignore", "To copy construct from a tensor")  # from the stacked one
            return function(*stacked, **by_name)

    return handle


_tensor: Any = torch.Tensor
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _tensor.detach_: lambda self, *args: self._tracer.record_detach_(*args),
    _tensor.data.__set__: lambda self, *args: self._tracer.record_set_data(*args),
    _tensor.__deepcopy__: lambda self, *args: self._tracer.deep_copy(*args),
    _tensor.__reduce_ex__: lambda self, *args: self._tracer.contents.reduced(*args),
    _tensor.register_hook: lambda self, *args, **kwargs: self.tensor_hooks.register(*args, **kwargs),
    _tensor.__getitem__: _indexing(getitem),
    _tensor.__setitem__: _indexing(setitem),
    **dict.fromkeys((torch.narrow, _tensor.narrow), _indexing(narrow)),
    **dict.fromkeys((torch.select, _tensor.select), _indexing(select)),
    **{make: _making(make) for make in (torch.tensor, torch.as_tensor, torch.asarray, _tensor.new_tensor)},
}
"""Replacements of functions, called with the interceptor and the arguments."""

_NOTES: dict[Any, Callable[..., None]] = {
    **dict.fromkeys(
        (_tensor.requires_grad_, _tensor.requires_grad.__set__),
        lambda tracer, *args, **kwargs: tracer.recorder.record_requires_grad(*args, **kwargs),
    ),
    **dict.fromkeys(
        (torch.autograd.grad, torch.autograd.backward, _tensor.backward),
        lambda tracer, *args, **kwargs: tracer.differentiate(is_forward=False),
    ),
    torch._VF._make_dual: lambda tracer, *args, **kwargs: tracer.differentiate(is_forward=True),
    torch.nn.functional.one_hot: lambda tracer, *args, **kwargs: tracer.contents.check_classes(*args, **kwargs),
    _tensor.register_post_accumulate_grad_hook: lambda tracer, *args, **kwargs: tracer.hooks.append(
        f"A tensor of `forward` ({tracer.recorder.source()})"
    ),
}
"""What a tracer does before a function runs, called with the tracer and the arguments."""

_READING = frozenset(getattr(torch.Tensor, name) for name in ("__array__", "__format__", "data_ptr", "numpy", "tolist"))
"""Functions in which numbers leave PyTorch without an op of its."""


_ROUNDING = (torch.Tensor.__bool__, torch.Tensor.__int__)
"""Functions that read a number and reduce it to fewer values, such as a truth value: programs depend on the result."""


@cache
def _by_function() -> dict[Any, PreservedFunction]:
    return {function: preserved for preserved in PRESERVED_FUNCTIONS for function in preserved.functions}
