"""What capturing needs of torch that torch does not promise to keep. If torch moves, this file follows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.distributions import Distribution
from torch.nn.utils.stateless import _reparametrize_module as with_tensors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "UNREADABLE",
    "DynamicOutputShapeException",
    "FakeTensor",
    "TorchDispatchMode",
    "decomposition",
    "fake_mode",
    "storage_key",
    "unlogged_errors",
    "unvalidated_distributions",
    "with_tensors",
    "without_modes",
    "written_arguments",
]

UNREADABLE = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
"""What fake tensors raise where a result, or its shape, depends on the numbers in them."""


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and dtypes and no numbers; real ones are taken for such where they come."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def unlogged_errors() -> Iterator[None]:
    """Have fake tensors not log, with a traceback of their own, what they raise anyway: shapes that do not fit, say."""
    log = logging.getLogger(FakeTensorMode.__module__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def unvalidated_distributions() -> Iterator[None]:
    """Have `torch.distributions` not look at the numbers that they are given."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def storage_key(t: torch.Tensor) -> int:
    """The same for tensors that share their storage, as long as one of them lives."""
    return int(t.untyped_storage()._cdata)


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    table = dict(core_aten_decompositions())
    table.pop(torch.ops.aten.detach.default, None)  # it would forget that gradients stop there
    return table


def decomposition(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """A function that does the same as an op, made of simpler ones; `None` if there is none."""
    if op.namespace != "aten":  # asking for others inside of a mode ends the process
        return None
    known = _decompositions().get(op)
    if known is None and op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        known = op.decompose
    return known


@cache
def written_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the arguments that an op writes to; `input` for what PyTorch calls `self`."""
    written = (a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return tuple("input" if name == "self" else name for name in written)
