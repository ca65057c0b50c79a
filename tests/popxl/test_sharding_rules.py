"""The sharding rules that ops declare: what they say of shards and of terms of a sum is what their functions do."""

from collections.abc import Iterator

import numpy as np
import pytest

import popxl
from popxl.analysis.replicas.axis_types import PARTIAL, REPLICATED, SAME, SHARDED, SHARDS, SUM, AxisType
from popxl.analysis.replicas.op_effects import result_types
from popxl.analysis.replicas.propagation import propagate
from popxl.core.tracing import needed
from popxl.op import Op
from popxl.transforms import autodiff
from tests.popxl.ops.rows.convert import CONVERT
from tests.popxl.ops.rows.elementwise import ELEMENTWISE
from tests.popxl.ops.rows.index import INDEX
from tests.popxl.ops.rows.nn import NN
from tests.popxl.ops.rows.norm import NORM
from tests.popxl.ops.rows.random import RANDOM
from tests.popxl.ops.rows.reduce import REDUCE
from tests.popxl.ops.rows.schema import Row, telling
from tests.popxl.ops.rows.shape import SHAPE
from tests.popxl.ops.rows.var_updates import VAR_UPDATES
from tests.popxl.ops.rows.windows import WINDOWS
from tests.popxl.ops.test_rows import arrays_of, nested, wanted_of

DECLARED = [*ELEMENTWISE, *CONVERT, *INDEX, *REDUCE, *SHAPE, *NN, *NORM, *RANDOM, *VAR_UPDATES, *WINDOWS]
TELLING = "add div gelu sum reshape transpose matmul attention scaled_add swish".split()


def ops_of(row: Row) -> Iterator[Op]:
    """Ops of two samples of a row, and of their gradients, that declare a rule."""
    samples = [s for s in telling(row.samples) if all(a.dtype == np.float32 for a in arrays_of(s.operands))]
    for sample in samples[:2]:
        ir = popxl.Ir()
        with ir.main_graph:
            arrays = arrays_of(sample.operands)
            graph = ir.create_graph(
                lambda *tensors, of=sample: nested(row.op, of, tensors), *(popxl.variable(a) for a in arrays)
            )
            found = [*graph.ops]
            if wanted := wanted_of(row, sample):
                found += autodiff(graph, grads_required=[graph.inputs[i] for i in wanted]).graph.ops
        floats = (op for op in found if all(t.dtype.is_inexact for t in op.outputs))
        yield from (op for op in floats if op.kind.sharding_rule is not None)


def given_types(op: Op) -> Iterator[list[AxisType]]:
    """Types of operands: shards along each dimension of one of them, or of all that have its shape; terms of a sum."""
    for t in op.inputs:
        for d in range(t.rank):
            if t.shape[d] > 1:
                yield [AxisType(SHARDED, d) if other is t else SAME for other in op.inputs]
                yield [AxisType(SHARDED, d) if other.shape == t.shape else SAME for other in op.inputs]
        yield [SUM if other is t else SAME for other in op.inputs]
    yield [SUM] * len(op.inputs)


def disagreements(op: Op) -> Iterator[str]:
    """Types for which an op's rule says otherwise than its jaxpr, unless that leaves a dimension open.

    A jaxpr does not call comparisons and roundings of terms nonlinear; a rule may. A factor of zero makes an op ignore
    an operand, which a rule does not say.
    """
    jaxpr, used = needed(op.on_arrays(), *op.signature[2:])
    for given in given_types(op):
        ruled, flaws = result_types(op, given)
        traced, traced_flaws = propagate(jaxpr, [each for each, is_used in zip(given, used, strict=True) if is_used])
        if any(along.kind is PARTIAL for along in given):
            agree = bool(flaws) or not traced_flaws
        else:
            agree = all(a == b or b == SHARDS or b.kind <= REPLICATED for a, b in zip(ruled, traced, strict=False))
        if not agree:
            yield f"{op} of {given}: {ruled} {flaws}, and its jaxpr says {traced} {traced_flaws}"


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=row.name, marks=[pytest.mark.thorough] * (row.name not in TELLING)) for row in DECLARED],
)
def test_rules(row: Row) -> None:
    assert [text for op in ops_of(row) for text in disagreements(op)] == []


def test_equal_attributes_of_different_types_are_different_ops() -> None:
    """As for an op that takes 1 for an axis, and `True` for all of them."""
    kind = popxl.OpKind("Reduced", lambda x, *, over: x.sum(None if over is True else over, keepdims=True))
    with popxl.Ir().main_graph as main:
        x = popxl.variable(np.ones((2, 3)))
        kind(x, over=1), kind(x, over=True)
    along = [result_types(op, [AxisType(SHARDED, 0)])[0] for op in main.ops]
    assert along[0] == [AxisType(SHARDED, 0)] and along[1] != along[0]
