"""What each row of the operator tests goes through: captured, lowered, run; beside PyTorch itself.

A row is a function of tensors, and tensors to call it with. It is right if its results, and the gradients of all that
PyTorch has gradients for, are those of PyTorch, in float32 and in float16. `tests.poptorch.operator_table` makes a
table of the lowerings that rows use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

import popxl
from poptorch.base.dtypes import device_dtype, from_numpy, to_numpy
from poptorch.capture.model import capture
from poptorch.capture.request import CaptureRequest
from poptorch.capture.trace import Trace, Value
from poptorch.lowering import Emission, has_lowering
from poptorch.lowering.emission import spec_of
from poptorch.placement.capture_context import capturing
from poptorch.placement.strategies import PipelinedExecution
from popxl import ops
from popxl.transforms.autodiff import leading_to
from tests.tolerances import assert_sums_near, tolerances


@dataclass(frozen=True)
class Row:
    """A test of operators.

    Attributes:
        name: what is tested.
        function: of tensors (and what else there is in `inputs`); the results are tensors, in any structure.
        inputs: what it is called with. Floating-point and complex tensors get gradients.
        half: whether it is tested in float16, too.
        gradient: whether its gradients are.
        tolerance: relative and absolute, in float32.
        sums: whether results and gradients are sums of products of the inputs: in float32 they are as near as roundings
            of what is summed allow.
        like: how results that are random have to agree with those of PyTorch, in place of being equal.
    """

    name: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    half: bool = True
    gradient: bool = True
    tolerance: float = 1e-5
    half_tolerance: float = 5e-3
    sums: bool = False
    like: Callable[[torch.Tensor, torch.Tensor], None] | None = None


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers, always the same for a shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def positive(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers between 0.5 and 2."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 1.5 + 0.5


def whole(*shape: int, high: int = 10, seed: int = 0) -> torch.Tensor:
    """Integers from 0 on."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def check(*cases: tuple[Row, torch.dtype]) -> None:
    """Run rows, each in a dtype, both ways, and compare. Ours are one program: compiling takes most of the time."""
    ir = popxl.Ir()
    with ir.main_graph:
        written = [_told(_Case, row, dtype) for row, dtype in cases]
    with popxl.Session(ir) as session:
        fetched = session.run()
    for case in written:
        _told(case.compare, case.row, case.dtype, fetched)


def _told(work: Callable[..., Any], row: Row, dtype: torch.dtype, *more: Any) -> Any:
    """Do something for a row; errors say for which."""
    try:
        return work(row, dtype, *more)
    except BaseException as problem:
        problem.add_note(f"In the row {row.name!r}, {dtype}.")
        raise


class _Case:
    """A row in a dtype: what PyTorch makes of it, and ours, in the main graph."""

    def __init__(self, row: Row, dtype: torch.dtype) -> None:
        self.row, self.dtype = row, dtype
        function, tensors = _of_tensors(row, dtype)
        with_gradient = row.gradient and any(map(_has_gradient, tensors))
        torch.manual_seed(0)
        self._results, self._gradients = _eagerly(function, tensors, with_gradient)
        self._streams, self._found = _write(function, tensors, self._gradients is not None)
        self._magnitudes: list[torch.Tensor | None] = []
        if row.sums and dtype is torch.float32:
            results, of_gradients = _eagerly(function, [t.double().abs() for t in tensors], with_gradient)
            self._magnitudes = [*results, *(of_gradients or ())]

    def compare(self, row: Row, dtype: torch.dtype, fetched: Mapping[Any, np.ndarray]) -> None:
        """Compare results and gradients."""
        arrays = [from_numpy(np.array(fetched[stream])) for stream in self._streams]
        results, gradients = arrays[: len(self._results)], arrays[len(self._results) :]
        if self._magnitudes:
            by_tensor = dict(zip(self._found, gradients, strict=True))
            wishes = [*self._results, *(self._gradients or ())]
            found = [*results, *(by_tensor.get(i) for i in range(len(self._gradients or ())))]
            for mine, wish, magnitudes in zip(found, wishes, self._magnitudes, strict=True):
                if mine is not None and wish is not None:
                    assert_sums_near(mine, wish.detach(), magnitudes)
            return
        tolerance = row.tolerance if dtype is torch.float32 else row.half_tolerance
        tolerance *= 8 if dtype is torch.bfloat16 else 1  # so much farther are its numbers apart
        for mine, expected in zip(results, self._results, strict=True):
            _compare(mine, expected, tolerance, row.like)
        by_tensor = dict(zip(self._found, gradients, strict=True))
        for i, wanted in enumerate(self._gradients or ()):
            if wanted is not None:
                _compare(by_tensor.get(i, torch.zeros_like(wanted)), wanted, tolerance, row.like)


def _of_tensors(row: Row, dtype: torch.dtype) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """The function of a row, as one of tensors alone; and these."""
    inputs = [_as(value, dtype) for value in row.inputs]

    def function(given: Sequence[torch.Tensor]) -> Any:
        waiting = iter(given)
        return row.function(*(next(waiting) if isinstance(v, torch.Tensor) else v for v in inputs))

    return function, [value for value in inputs if isinstance(value, torch.Tensor)]


def _as(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value.clone()
    return value


def _leaves(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _eagerly(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], with_gradient: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor | None] | None]:
    """Results; gradients of the sum of the results, weighted."""
    leaves = [t.clone().requires_grad_(with_gradient and _has_gradient(t)) for t in tensors]
    results = _leaves(function([t.clone() for t in leaves]))
    tracked = [r for r in results if r.requires_grad]
    if not tracked:
        return results, None
    torch.autograd.backward(tracked, [_weights(r) for r in tracked])
    return [r.detach() for r in results], [t.grad for t in leaves]


def _has_gradient(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _weights(result: torch.Tensor) -> torch.Tensor:
    """What the gradients of a result begin with: something else for each of its numbers."""
    weights = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)
    return (weights * (1 - 0.5j) if result.is_complex() else weights).to(result.dtype)


def captured(row: Row) -> tuple[Trace, list[Value]]:
    """A row as a trace, in float32; and the values of its tensors."""
    function, tensors = _of_tensors(row, torch.float32)
    return _captured(function, _leaves_of_ours(tensors, row.gradient))


def _leaves_of_ours(tensors: Sequence[torch.Tensor], with_gradient: bool) -> list[torch.Tensor]:
    return [t.clone().requires_grad_(with_gradient and _has_gradient(t)) for t in tensors]


def _captured(function: Callable[..., Any], leaves: Sequence[torch.Tensor]) -> tuple[Trace, list[Value]]:
    module = _Holding(leaves)
    with capturing(PipelinedExecution()) as ambient:
        found = capture(
            CaptureRequest(
                lambda given: function([t.clone() for t in module.tensors()]),
                [],
                module,
                ambient,
                has_lowering,
                derives=True,
            )
        )
    return found.trace, [found.state[f"t{i}"] for i in range(len(leaves))]


def _write(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], with_gradient: bool
) -> tuple[list[popxl.DeviceToHostStream], list[int]]:
    """Write a function into the main graph. Returns streams of its results, and then of the gradients of some tensors;
    and which these are."""
    leaves = _leaves_of_ours(tensors, with_gradient)
    trace, values = _captured(function, leaves)
    nodes = trace.without_unused(trace.outputs)
    seed = popxl.constant([1, 2], popxl.uint32)
    graph = popxl.gir().create_empty_graph("function")
    with graph:
        seed_input = popxl.graph_input((2,), popxl.uint32)
        emission = Emission(lambda: seed_input)
        for value in values:
            emission.bind([value], [popxl.graph_input(value.shape, spec_of(value).dtype)])
        emission.write(nodes)
        results = [emission.tensor(value) for value in trace.outputs]
        for t in dict.fromkeys(results):
            popxl.graph_output(t)
    given = [popxl.variable(to_numpy(leaf.detach())) for leaf in leaves]
    site = ops.call_with_info(graph, seed, *given)
    stored = [site.graph_to_parent(t) for t in results]
    found: list[int] = []
    if with_gradient:
        tracked = [i for i, value in enumerate(trace.outputs) if value.requires_grad]
        leading = leading_to(graph, [results[i] for i in tracked])
        found = [i for i, t in enumerate(leaves) if t.requires_grad and emission.tensor(values[i]) in leading]
    if found:
        required = [emission.tensor(values[i]) for i in found]
        info = popxl.transforms.autodiff(graph, [results[i] for i in tracked], required)
        like = [torch.empty(stored[i].shape, dtype=stored[i].dtype.as_torch()) for i in tracked]
        weights = [popxl.constant(to_numpy(_weights(t))) for t in like]
        stored += ops.call_with_info(info.graph, *weights, inputs_dict=info.inputs_dict(site)).outputs
    streams = [popxl.d2h_stream(t.shape, t.dtype) for t in stored]
    for stream, t in zip(streams, stored, strict=True):
        ops.host_store(stream, t)
    return streams, found


class _Holding(torch.nn.Module):
    """A module whose buffers are some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        for i, t in enumerate(tensors):
            self.register_buffer(f"t{i}", t)
        self._count = len(tensors)

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, f"t{i}") for i in range(self._count)]


def _compare(
    mine: torch.Tensor,
    expected: torch.Tensor,
    tolerance: float,
    like: Callable[[torch.Tensor, torch.Tensor], None] | None,
) -> None:
    assert tuple(mine.shape) == tuple(expected.shape)
    assert mine.dtype is device_dtype(expected.dtype)
    if like is not None:
        like(mine, expected)
        return
    wide = torch.complex128 if expected.is_complex() else torch.float64
    mine, expected = mine.to(wide), expected.detach().to(wide)
    torch.testing.assert_close(mine, expected, **tolerances(expected, tolerance), equal_nan=True)
