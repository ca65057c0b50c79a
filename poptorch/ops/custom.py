"""Custom ops: JAX functions on the device, and Python functions on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from poptorch.base.structures import structure_of
from poptorch.capture.host_function import HostFunction
from poptorch.capture.torch_private import without_modes
from poptorch.capture.tracer import current
from poptorch.errors import createPoptorchError
from poptorch.ops.declaration import Tensors, shapes_text, tracked_like


def custom_op(
    inputs: Sequence[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Iterable[torch.Tensor],
    attributes: Mapping[str, Any] | None = None,
) -> Tensors:
    """Apply an op that `poptorch.registerCustomOp` has declared: a JAX function.

    One is built in: `"FastGatherLastDim"` of `"poptorch.custom_ops"` is `torch.gather` along the last axis, for data
    and indices whose other axes agree.

    Args:
        inputs: tensors of the op.
        name, domain: registered name.
        domain_version: has no effect.
        example_outputs: tensors of the shapes and dtypes of its results.
        attributes: keyword arguments: numbers, strings, or lists of values of one of these types.

    Returns:
        Its results.

    Raises:
        ValueError: for attributes of other types.
        poptorch.Error: for an unknown op; for a float beyond the range of float32.

    Example:
        >>> poptorch.registerCustomOp("Cube", "examples", lambda x: x**3)
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return poptorch.custom_op((x,), "Cube", "examples", 1, example_outputs=(x,))[0]
        >>> poptorch.inferenceModel(Model())(torch.tensor([2.0]))
        tensor([8.])
    """
    examples = list(example_outputs)
    given = {key: _attribute(key, value) for key, value in (attributes or {}).items()}
    if (tracer := current()) is None:
        return [torch.zeros_like(t) for t in examples]
    arguments = {"inputs": list(inputs), "name": f"{domain}.{name}", "attributes": tuple(given.items())}
    return cast(
        Tensors,
        tracer.record(
            "poptorch.custom_op", lambda **_: [tracked_like(torch.empty_like(t), *inputs) for t in examples], arguments
        ),
    )


def _attribute(key: Any, value: Any) -> Any:
    """Check an attribute of a custom op; lists become tuples."""
    if not isinstance(key, str):
        raise ValueError(f"custom_op: the attribute {key!r} is named by a {type(key).__name__}; expected a str.")
    if isinstance(value, list | tuple):
        if len({type(each) for each in value}) > 1:
            raise ValueError(f"custom_op: the attribute {key!r} mixes types: {value!r}; expected values of one type.")
        return tuple(_attribute(key, each) for each in value)
    if not isinstance(value, float | int | str):
        raise ValueError(
            f"custom_op: the attribute {key!r} is {value!r} ({type(value).__name__}); expected a float, an int, a str, "
            "or a list of these."
        )
    if isinstance(value, str) and not (value.isascii() and key.isascii()):
        raise ValueError(f"custom_op: the attribute {key!r} is {value!r}, which is not ASCII.")
    if isinstance(value, float) and math.isfinite(value) and abs(value) > torch.finfo(torch.float32).max:
        raise createPoptorchError(f"custom_op: the attribute {key!r} is {value!r}, which float32 cannot hold.")
    return value


class CPU:
    """Python function on the host within a model on the device, for inference only.

    It is called with host tensors whenever the program reaches this op, without restrictions on its code. Its
    exceptions are raised by the call of the model; the run continues with zeros in place of its results.

    Args:
        layer_to_call: the function, or a module, whose parameters are frozen. It is called with zeros at compilation:
            its results always need the shapes and dtypes of those.
        ID: name of the op.

    Raises:
        poptorch.Error: if it returns no tensors, or empty ones; at a call, if their shapes differ.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.cpu = poptorch.CPU(lambda x: x * 2, "Double")
        ...
        ...     def forward(self, x):
        ...         return self.cpu(x) + 1
        >>> poptorch.inferenceModel(Model())(torch.tensor([2.0]))
        tensor([5.])
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self._function = layer_to_call
        self._name = ID

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        """Call the function at once; during a capture, record the call."""
        tracer = current()
        if tracer is None:
            return self._function(*input, **kwargs)
        given = structure_of((input, kwargs), self._name)
        tensors = given.tensors((input, kwargs))
        function = HostFunction(self._name, self._function, given)
        on_host = tracer.host_state
        with on_host.excluding(), without_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            example = function.result([torch.zeros(t.shape, dtype=t.dtype) for t in tensors])  # not of the program
        function.changes = frozenset(on_host.excluded)
        structure = structure_of(example, self._name)
        leaves = list(structure.leaves())
        if not leaves or any(0 in leaf.shape for leaf in leaves) and not any(0 in t.shape for t in tensors):
            shown = shapes_text(leaves) if leaves else repr(example)
            raise createPoptorchError(
                f"CPU: for zeros, {self._name} returns {shown}. From what it makes of zeros the program learns the "
                "shapes of its results, which cannot depend on numbers; expected tensors that are not empty."
            )
        made = tracer.record(
            "poptorch.cpu",
            lambda **_: [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in leaves],
            {"inputs": tensors, "function": function, "name": self._name},
            True,
        )
        return structure.rebuild(made)

    def execute(self) -> None:
        """No-op: the program calls the function."""

    def registerPersistentData(self) -> None:
        """No-op: the function holds its own data."""
