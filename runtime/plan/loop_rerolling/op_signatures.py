"""Op signatures: op properties required to match across loop iterations, independent of operands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from popxl.core.aliasing import bases_first, view_of
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from runtime.plan.structure import StructuralEncoder, Structures


class OpSignatures:
    """Numbered signatures of a program's ops.

    An operand is seen through its views: they are part of the signature, their bases are not.

    Attributes:
        function: what an op computes of its inputs, as `StructuralEncoder.function`.
    """

    def __init__(self, structures: Structures, aliases: Mapping[Tensor, Tensor]) -> None:
        self._aliases = aliases
        self.function = StructuralEncoder(structures).function
        self._numbers: dict[Any, int] = {}
        self._resolved: dict[Tensor, tuple[int, tuple[Tensor, ...]]] = {}

    def signature(self, op: Op) -> int:
        """Signature number of an op; unique for composite ops and ops with checks."""
        if op.parts != (op,) or op.kind.requirements:
            return self._number(id(op))
        made = tuple(t.spec for t in op.outputs)
        operands = tuple(self._resolve_cached(t)[0] for t in op.inputs)
        return self._number((*self.function(op), operands, made, op.modified))

    def roots(self, t: Tensor) -> tuple[Tensor, ...]:
        """Storages under a tensor."""
        return self._resolve_cached(t)[1]

    def roots_read(self, op: Op) -> list[Tensor]:
        """Storages under the operands of an op, in order, with duplicates."""
        return [root for t in op.inputs for root in self.roots(t)]

    def roots_written(self, op: Op) -> list[Tensor]:
        """Storages that an op overwrites."""
        return [root for i in op.modified for root in self.roots(op.inputs[i])]

    def storage(self, t: Tensor) -> Tensor | None:
        """A tensor's storage; `None` for views."""
        code, roots = self._resolve_cached(t)
        return roots[0] if code == self._number(t.spec.to_tuple()) else None

    def _resolve_cached(self, t: Tensor) -> tuple[int, tuple[Tensor, ...]]:
        t = t.origin
        if t not in self._resolved:
            for each in bases_first(t, self._resolved, self._bases_of):
                self._resolved[each] = self._resolve(each)
        return self._resolved[t]

    def _bases_of(self, t: Tensor) -> list[Tensor]:
        """Alias of a tensor, or bases of a view; none for other tensors."""
        if t in self._aliases:
            return [self._aliases[t].origin]
        view = view_of(t)
        return [] if view is None else [base.origin for base in view.inputs]

    def _resolve(self, t: Tensor) -> tuple[int, tuple[Tensor, ...]]:
        """Signature number and storages of a tensor; those of its bases are known."""
        view, bases = view_of(t), [self._resolved[base] for base in self._bases_of(t)]
        if t in self._aliases:
            return bases[0]
        if view is None:
            return self._number(t.spec.to_tuple()), (t,)
        codes, roots = zip(*bases, strict=True)
        code = (*self.function(view), codes, t.spec.to_tuple())
        return self._number(code), tuple(root for each in roots for root in each)

    def _number(self, code: Any) -> int:
        return self._numbers.setdefault(code, len(self._numbers))
