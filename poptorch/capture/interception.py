"""PyTorch modes that pass each function and each op to a `Tracer`."""

from __future__ import annotations

import sys
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from poptorch.capture.captured_constants import is_users
from poptorch.capture.decompositions import COMPOSED
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
            if func is torch.Tensor.detach_:
                return tracer.record_detach_(*args)
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                return tracer.record_set_data(*args)
            if func is torch.Tensor.requires_grad_ or func == torch.Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
                tracer.recorder.record_requires_grad(*args, **kwargs)
            if func is torch.Tensor.__getitem__:
                return getitem(args[0], args[1], tracer.contents, self.row_views)
            if func is torch.Tensor.__setitem__:
                return setitem(args[0], args[1], args[2], tracer.contents, self.row_views)
            if (part := _PARTS.get(func)) is not None:
                return part(tracer.contents, self.row_views, *args, **kwargs)
            if func is torch.nn.functional.one_hot:
                tracer.contents.check_classes(*args, **kwargs)
            if func in _DIFFERENTIATING or func is _MAKE_DUAL:
                tracer.differentiate(is_forward=func is _MAKE_DUAL)
            tracer.generator = kwargs.get("generator")
            if func in _READING or func in _ROUNDING and tracer.contents.may_break_graph:
                return tracer.contents.read_contents(func, args, kwargs)
            if func is torch.Tensor.__deepcopy__:
                return tracer.deep_copy(*args)
            if func is torch.Tensor.register_hook:
                return self.tensor_hooks.register(*args, **kwargs)
            if func is torch.Tensor.register_post_accumulate_grad_hook:
                tracer.hooks.append(f"A tensor of `forward` ({tracer.recorder.source()})")
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


_PARTS: dict[Any, Any] = {
    torch.narrow: narrow,
    torch.Tensor.narrow: narrow,
    torch.select: select,
    torch.Tensor.select: select,
}
"""Functions whose numbers may be tensors that only a run knows."""


_READING = frozenset(getattr(torch.Tensor, name) for name in ("__array__", "__format__", "data_ptr", "numpy", "tolist"))
"""Functions in which numbers leave PyTorch without an op of its."""


_ROUNDING = (torch.Tensor.__bool__, torch.Tensor.__int__)
"""Functions that read a number and reduce it to fewer values, such as a truth value: programs depend on the result."""


_DIFFERENTIATING = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


_MAKE_DUAL = torch._VF._make_dual


@cache
def _by_function() -> dict[Any, PreservedFunction]:
    return {function: preserved for preserved in PRESERVED_FUNCTIONS for function in preserved.functions}
