"""Device placement of tensors during capture: `x.device` is `ipu`, except for host tensors.

Inputs, parameters and buffers, and results of functions without a `device`, are on the device. Tensors made before the
capture that are neither parameters nor buffers are on the host; so are results of `torch.LongTensor([1, 0])`, and of
ops on host tensors only. `t.to(x.device)` makes the contents of `t` a part of the program.

PyTorch has no kernels for this device, and needs none: it infers shapes as for a CPU. A model that asks for the device
gets its name; where the model passes it on, PyTorch gets a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import FrameType
from typing import Any

import torch

from poptorch.base.patching import patched
from poptorch.capture.torch_private import answering_for_devices

IPU, HOST = torch.device("ipu"), torch.device("cpu")

ASKING: dict[Any, Callable[[torch.device], Any]] = {
    torch.Tensor.device.__get__: lambda device: device,
    torch.Tensor.is_ipu.__get__: lambda device: device.type == "ipu",  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
}
"""Attributes of a tensor that describe its device, with their values by device."""

LIKE_ANOTHER = frozenset([torch.Tensor.to, torch.Tensor.type_as])
"""Functions that may move a tensor to the device of another tensor."""


def on_cpu(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, Any, bool]:
    """A PyTorch function and its arguments, with CPU replacing `ipu`; and whether any device was replaced."""
    if function is torch.Tensor.ipu:  # type: ignore[attr-defined]
        return torch.Tensor.to, (args[0], "cpu"), {}, True
    is_to = function is torch.Tensor.to
    plain = tuple(_cpu(each) if isinstance(each, torch.device) or is_to else each for each in args)
    if "device" in kwargs:
        device = _cpu(kwargs["device"])
        if device is not kwargs["device"]:
            return function, plain, {**kwargs, "device": device}, True
    return function, plain, kwargs, any(a is not b for a, b in zip(plain, args, strict=True))


def _cpu(device: Any) -> Any:
    """Replace device `ipu`, or its name, by the CPU; return other objects unchanged."""
    name = device.type if isinstance(device, torch.device) else device
    return "cpu" if isinstance(name, str) and name.partition(":")[0] == "ipu" else device


@contextmanager
def named_as_cpus(device_of: Callable[[torch.Tensor, FrameType], torch.device | None]) -> Iterator[None]:
    """Make device APIs without tensor arguments, such as `torch.autocast`, treat `ipu` as a CPU within a block.

    Args:
        device_of: function that returns the device of a tensor without numbers, for the reading frame; `None` to leave
            it to PyTorch.
    """
    places: list[tuple[Any, str]] = [
        (torch.amp.autocast_mode.autocast, "__init__"),
        (torch.utils._device.DeviceContext, "__init__"),
        (torch, "is_autocast_enabled"),
        (torch, "get_autocast_dtype"),
        (torch, "set_autocast_enabled"),
        (torch, "set_autocast_dtype"),
        (torch, "get_device_module"),
    ]
    with ExitStack() as stack:
        for holder, name in places:
            stack.enter_context(patched(holder, **{name: _of_cpus(getattr(holder, name))}))
        stack.enter_context(answering_for_devices(device_of))
        yield


def _of_cpus(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def of_cpus(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_cpu, args), **{name: _cpu(value) for name, value in kwargs.items()})

    return of_cpus
