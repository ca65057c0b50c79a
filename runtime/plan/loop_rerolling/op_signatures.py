"""Op signatures: op properties required to match across loop iterations, independent of operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from popxl.base.trampoline import Trampolined, run_trampoline
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from runtime.lowering.environment import view_of
from runtime.plan.structure import StructuralEncoder, Structures


class OpSignatures:
    """Numbered signatures of a program's ops.

    An operand is seen through its views: they are part of the signature, their bases are not.

    Args:
        structures: structures of the graphs.
        same: aliases of tensors.
    """

    def __init__(self, structures: Structures, same: Mapping[Tensor, Tensor]) -> None:
        self._same = same
        self._attributes = StructuralEncoder(structures).attributes
        self._numbers: dict[Any, int] = {}
        self._seen: dict[Tensor, tuple[int, tuple[Tensor, ...]]] = {}

    def signature(self, op: Op) -> int:
        """Signature number of an op; unique for composite ops and ops with checks."""
        if op.parts != (op,) or op.kind.requirements:
            return self._number(id(op))
        made = tuple(t.spec for t in op.outputs)
        operands = tuple(self._resolve_cached(t)[0] for t in op.inputs)
        return self._number((op.kind, op.operands, self._attributes(op), operands, made, op.modified))

    def roots(self, t: Tensor) -> tuple[Tensor, ...]:
        """Storages under a tensor."""
        return self._resolve_cached(t)[1]

    def storage(self, t: Tensor) -> Tensor | None:
        """A tensor's storage; `None` for views."""
        code, roots = self._resolve_cached(t)
        return roots[0] if code == self._number(t.spec.to_tuple()) else None

    def _resolve_cached(self, t: Tensor) -> tuple[int, tuple[Tensor, ...]]:
        t = t.origin
        return self._seen[t] if t in self._seen else run_trampoline(self._resolve(t))

    def _resolve(self, t: Tensor) -> Trampolined[tuple[int, tuple[Tensor, ...]]]:
        view = view_of(t)
        if t in self._same:
            origin = self._same[t].origin
            if origin not in self._seen:
                yield self._resolve(origin)
            self._seen[t] = self._seen[origin]
        elif view is None:
            self._seen[t] = (self._number(t.spec.to_tuple()), (t,))
        else:
            bases = [base.origin for base in view.inputs]
            for base in bases:
                if base not in self._seen:
                    yield self._resolve(base)
            codes, roots = zip(*(self._seen[base] for base in bases), strict=True)
            code = (view.kind, view.operands, self._attributes(view), codes, t.spec.to_tuple())
            self._seen[t] = (self._number(code), tuple(root for each in roots for root in each))
        return self._seen[t]

    def _number(self, code: Any) -> int:
        return self._numbers.setdefault(code, len(self._numbers))
