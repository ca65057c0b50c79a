"""Values of parameters and buffers on the host: reads in the format of devices, and writes in place."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

from poptorch.base.dtypes import as_array, from_numpy, to_device_dtype, to_numpy
from poptorch.base.replica_groups import GroupedParameter
from poptorch.capture.tensor_layout import overwrite
from poptorch.errors import createPoptorchError

Groupings = Mapping[str, GroupedParameter]


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters, then its buffers, by name; tied tensors appear once, under their first name.

    Raises:
        Error: if a buffer is not a tensor.
    """
    tensors: dict[str, Any] = dict(torch.nn.Module.named_parameters(module))
    tensors |= torch.nn.Module.named_buffers(module)
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise createPoptorchError(
                f"All buffers must be an instance of torch.Tensor; {name} is {value!r} ({type(value).__name__})."
            )
    return tensors


def check_apart(tensors: Mapping[str, torch.Tensor], written: Container[str]) -> None:
    """Check that tensors overwritten by a program share no memory with other tensors, which would not change too.

    Args:
        tensors: parameters and buffers by name; those that are the same object have one name.

    Raises:
        Error: if one is.
    """
    own = [(name, t) for name, t in tensors.items() if t.layout is torch.strided and t.device.type == "cpu"]
    arrays = [(name, as_array(t)) for name, t in own]
    bounded = sorted(((*byte_bounds(array), name, array) for name, array in arrays if array.size), key=itemgetter(0))
    near: list[tuple[int, str, np.ndarray]] = []  # arrays that may overlap with the next
    for start, stop, name, array in bounded:
        near = [each for each in near if each[0] > start]
        for _, other, memory in near:
            if (name in written or other in written) and np.shares_memory(memory, array):
                raise createPoptorchError(
                    f"{other} and {name} share memory, and the model overwrites {name if name in written else other}. "
                    "In a wrapped model each parameter and buffer is a tensor of its own, so the other would not "
                    f"change with it. Have one of them: tie parameters by `module.{name} = module.{other}`, and make "
                    "a view of one in `forward`. Or give each its memory: `tensor.clone()`."
                )
        near.append((stop, name, array))


def read_host_values(
    module: torch.nn.Module, groupings: Groupings | None = None, names: Iterable[str] | None = None
) -> dict[str, np.ndarray]:
    """Host values in device format: data for `popxl.variable`s. Arrays may share memory with tensors.

    Args:
        module: module with the parameters and buffers to read.
        groupings: the parameters with a value for each group of replicas.
        names: read these only.

    Raises:
        Error: for a name that the module does not have, or a dtype or an integer that the device does not have.
    """
    tensors = tensors_of(module)
    names = tensors if names is None else list(names)
    _check_names(names, tensors)
    arrays = {name: to_numpy(to_device_dtype(tensors[name], f"`{name}`")) for name in names}
    return {name: g.to_device(array) if (g := (groupings or {}).get(name)) else array for name, array in arrays.items()}


def overwrite_tensors(
    tensors: Mapping[str, torch.Tensor], arrays: Mapping[str, np.ndarray], groupings: Groupings
) -> None:
    """Overwrite parameters and buffers in place with device values. All values are checked before any write.

    Args:
        arrays: values by name, in the shapes that `read_host_values` gives.

    Raises:
        Error: for a name without a tensor, or a value of another shape.
    """
    _check_names(arrays, tensors)
    values = {name: g.to_host(a) if (g := groupings.get(name)) else a for name, a in arrays.items()}
    for name, value in values.items():
        shape = tuple(tensors[name].shape)
        if value.shape != shape and (name not in groupings or value.shape[1:] != shape[1:]):
            raise createPoptorchError(
                f"{name} has the shape {list(shape)} on the host and {list(value.shape)} on the device. It must keep "
                "its shape while the model is compiled; call `destroy()` before it changes."
            )
    for name, value in values.items():
        new = from_numpy(np.require(value, requirements="W"))  # torch warns of memory that it must not write
        tensor = tensors[name]
        if new.shape != tensor.shape:  # one row for each replica, from now on
            tensor.data = new.to(tensor.dtype, copy=True)
        else:
            overwrite(tensor.data, new)


def _check_names(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
    if unknown := [name for name in names if name not in tensors]:
        raise createPoptorchError(
            f"The model has no parameters or buffers named {', '.join(unknown)}. It has {', '.join(tensors) or 'none'}."
        )
