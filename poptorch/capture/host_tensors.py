"""Host tensors of a capture, and their first use on the device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from poptorch.capture.captured_constants import CapturedConstant
from poptorch.capture.trace import Node, Value, origins, values_in
from poptorch.errors import createPoptorchError
from popxl.extend.source import SourceLocation

MADE_IN_CAPTURE = "_poptorch_made_in_capture"
"""Name of the attribute that marks tensors made in a capture and kept after it."""


_INDICES = {
    f"aten.{name}": ("index", "indices")
    for name in ("embedding", "gather", "index", "index_add", "index_copy", "index_fill", "index_put", "index_reduce",
                 "index_select", "scatter", "scatter_add", "scatter_reduce", "take")
} | {f"torch.{name}": ("input",) for name in ("embedding", "embedding_bag")}  # fmt: skip
"""Argument names of row indices, for ops that have them."""


_KINDS = {
    torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
    torch.bool: "Bool",
}  # fmt: skip
"""PyTorch's names of dtypes in errors."""


class HostTensors:
    """Host tensors of a capture.

    Attributes:
        constants: tensors whose contents have become constants of the program.
        created: ops that create tensors which `forward` wants on the host.
    """

    def __init__(self) -> None:
        self.constants: list[CapturedConstant] = []
        self.created: set[Node] = set()
        self._by_node: dict[Node, CapturedConstant] = {}

    def add(self, node: Node, constant: CapturedConstant) -> None:
        """Register a constant, and the op that gives it."""
        self.constants.append(constant)
        self._by_node[node] = constant

    def check_use(self, node: Node) -> None:
        """Record the first use of host tensors among inputs of a device op.

        Raises:
            poptorch.Error: for an index that `forward` has computed on the host.
        """
        indices = [values_in(node.arguments[name]) for name in _INDICES.get(node.op, ()) if name in node.arguments]
        for value in chain(*indices):
            if value.is_on_host and not self.created.isdisjoint(_origins(value)):
                kind = _KINDS.get(value.dtype, str(value.dtype))
                raise createPoptorchError(
                    f"Expected an IPU tensor but got tensor(device=cpu, shape={list(value.shape)}, dtype={kind}). "
                    f"`forward` makes an index on the host, and uses it on the device ({node.source}). Make it with "
                    "`torch.tensor`, or move it: `index.to(x.device)`, where `x` is an input."
                )
        for value in node.inputs:
            self.leave(value, node.source)

    def leave(self, value: Value, source: SourceLocation) -> None:
        """Record the first device use of host tensors from which a value derives."""
        for origin in _origins(value):
            constant = self._by_node.get(origin)
            if constant is not None and constant.first_use is None:
                constant.first_use = source


def _origins(value: Value) -> Iterator[Node]:
    """Host ops from which a value derives."""
    return origins([value], lambda node: node.is_on_host)
