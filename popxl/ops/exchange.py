"""`MultiExchange`: one op for several transfers between the device and the outside.

Users do not create it; `popxl.transforms.merge_exchange` replaces the original ops by it. These are kept as plain data,
`MergedOp`, and rebuilt as ops on the inputs and outputs of the exchange in `op.parts`. Analyses look at the parts: an
exchange has no further meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

from popxl.base.source import SourceLocation
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.traits import Composite, Effect, Overwrites
from popxl.errors import PopxlInternalError
from popxl.values.spec import TensorSpec


@dataclass(frozen=True, repr=False, eq=False)
class MergedOp:
    """Original op of a merged exchange, compared by identity.

    Attributes:
        kind, id, name, operands, attributes, source: attributes of the merged op.
        inputs: number of the exchange's inputs that belong to it; they follow those of earlier parts.
        outputs: specs of its outputs, likewise.
    """

    kind: OpKind
    id: int
    name: str
    operands: tuple[str, ...] | None
    attributes: dict[str, Any]
    inputs: int
    outputs: tuple[TensorSpec, ...]
    source: SourceLocation

    @staticmethod
    def from_op(op: Op) -> MergedOp:
        """Convert an op to a part of an exchange."""
        outputs = tuple(t.spec for t in op.outputs)
        return MergedOp(op.kind, op.id, op.name, op.operands, dict(op.attributes), len(op.inputs), outputs, op.source)

    def __repr__(self) -> str:
        return f"Op[{self.name}.{self.id}]"


def _exchanged_ops(op: Op) -> tuple[Op, ...]:
    """Original ops of an exchange."""
    inputs, outputs = iter(op.inputs), iter(op.outputs)
    return tuple(
        Op.restore(
            part.kind,
            op.graph,
            part.source,
            id=part.id,
            name=part.name,
            inputs=tuple(islice(inputs, part.inputs)),
            outputs=tuple(islice(outputs, len(part.outputs))),
            operands=part.operands,
            attributes=part.attributes,
            modified=part.kind.modified(part.attributes, part.operands),
            ipu=op.ipu,
            io_tiles=op.io_tiles,
            location=op.location,
            execution_context=op.execution_context,
            after=op.after,
        )
        for part in op.attributes["parts"]
    )


def _overwritten(attributes: Mapping[str, Any]) -> Iterator[int]:
    """Positions of the inputs that some part overwrites."""
    first = 0
    for part in attributes["parts"]:
        yield from (first + i for i in part.kind.modified(part.attributes, part.operands))
        first += part.inputs


def _run_exchanged_ops(*ts: Any, parts: Any) -> NoReturn:
    raise PopxlInternalError("A MultiExchange is carried out part by part; see `op.parts`.")


multi_exchange_kind = OpKind(
    "MultiExchange",
    _run_exchanged_ops,
    shape=lambda *ts, parts: [spec for part in parts for spec in part.outputs],
    gradient=None,
    traits=[
        Overwrites(positions=lambda attributes: frozenset(_overwritten(attributes))),
        Effect(),
        Composite(_exchanged_ops),
    ],
)
