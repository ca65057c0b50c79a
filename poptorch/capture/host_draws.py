"""Random numbers from generators of users, which the host draws in each run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from poptorch.base.structures import structure_of
from poptorch.capture.host_function import HostFunction
from poptorch.capture.seeding import Remade
from poptorch.capture.torch_private import without_modes

if TYPE_CHECKING:
    from poptorch.capture.tracer import Tracer


class HostDraws:
    """Draws of one capture, in program order per generator."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._last: dict[torch.Generator, list[torch.Tensor]] = {}

    def draw(self, op: torch._ops.OpOverload, generator: torch.Generator, args: Any, kwargs: Any) -> Any:
        """Draw from a user's generator, on the host, each time the program reaches this op.

        A generator made in `forward` is another object in each run, with the same draws: it gives constants.
        """
        kwargs = {**kwargs, "generator": None}
        given = structure_of((args, kwargs), op._opname)
        tensors = given.tensors((args, kwargs))
        is_in_place = op._schema.arguments[0].alias_info is not None

        def draw(generator: torch.Generator, args: Any, kwargs: Any) -> Any:
            args = (args[0].clone(), *args[1:]) if is_in_place else args
            return op(*args, **{**kwargs, "generator": generator})

        function = HostFunction(op._opname, lambda *args, **kwargs: draw(generator, args, kwargs), given)
        if type(generator) is Remade:  # further generators seem to be of this class too
            state = generator.get_state()
            with self._tracer.suspended(), without_modes():
                zeros = given.rebuild([torch.zeros(t.shape, dtype=t.dtype) for t in tensors])
                drawn = draw(generator, *zeros)
            if is_in_place or not tensors:
                made = self._tracer.contents.constant(drawn)
                return args[0].copy_(made) if is_in_place else made
            function = HostFunction(
                op._opname, lambda *args, **kwargs: draw(Remade.new_generator(state), args, kwargs), given
            )

        def compute(**_: Any) -> Any:
            return torch.empty_like(args[0]) if is_in_place else op(*args, **kwargs)

        before = self._last.get(generator, [])  # earlier draws are known before later ones
        parts = {"inputs": [*tensors, *before], "function": function, "name": op._opname}
        made = self._tracer.record("poptorch.cpu", compute, parts, True)
        self._last[generator] = [made.reshape(-1)[:1]]
        return args[0].copy_(made) if is_in_place else made
