"""What has to be equal in all turns of a loop: the form of an op, which leaves open what the op is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from popxl.base.trampoline import Nested, done
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from runtime.lowering.environment import view_of
from runtime.plan.structure import Encoding, Structures


class OpSignatures:
    """The forms of the ops of one program, as numbers.

    An operand is seen through its views: the form has these, and not what lies behind them.

    Args:
        structures: those of the graphs.
        same: tensors that stand for others.
    """

    def __init__(self, structures: Structures, same: Mapping[Tensor, Tensor]) -> None:
        self._same = same
        self._attributes = Encoding(structures).attributes
        self._numbers: dict[Any, int] = {}
        self._seen: dict[Tensor, tuple[int, tuple[Tensor, ...]]] = {}

    def of(self, op: Op) -> int:
        """The form of an op. One that stands for several is like no other, nor is one that makes checks by itself."""
        if op.parts != (op,) or op.kind.requirements:
            return self._number(id(op))
        made = tuple(t.spec for t in op.outputs)
        operands = tuple(self._look(t)[0] for t in op.inputs)
        return self._number((op.kind, op.operands, self._attributes(op), operands, made, op.modified))

    def roots(self, t: Tensor) -> tuple[Tensor, ...]:
        """The storages that a tensor shows."""
        return self._look(t)[1]

    def storage(self, t: Tensor) -> Tensor | None:
        """The storage that a tensor is all of; `None`, if it is a view."""
        code, roots = self._look(t)
        return roots[0] if code == self._number(t.spec.to_tuple()) else None

    def _look(self, t: Tensor) -> tuple[int, tuple[Tensor, ...]]:
        t = t.origin
        return self._seen[t] if t in self._seen else done(self._looking(t))

    def _looking(self, t: Tensor) -> Nested[tuple[int, tuple[Tensor, ...]]]:
        view = view_of(t)
        if t in self._same:
            origin = self._same[t].origin
            if origin not in self._seen:
                yield self._looking(origin)
            self._seen[t] = self._seen[origin]
        elif view is None:
            self._seen[t] = (self._number(t.spec.to_tuple()), (t,))
        else:
            bases = [base.origin for base in view.inputs]
            for base in bases:
                if base not in self._seen:
                    yield self._looking(base)
            codes, roots = zip(*(self._seen[base] for base in bases), strict=True)
            code = (view.kind, view.operands, self._attributes(view), codes, t.spec.to_tuple())
            self._seen[t] = (self._number(code), tuple(root for each in roots for root in each))
        return self._seen[t]

    def _number(self, code: Any) -> int:
        return self._numbers.setdefault(code, len(self._numbers))
