"""`seeding`: recorded operations of a model on PyTorch's random number generator.

    torch.manual_seed(0)                  # in `forward`: later draws are the same in every run
    state = torch.get_rng_state()
    torch.set_rng_state(state)            # repeats the draws that followed `state`

The device has its own generator, so the numbers differ from the CPU's. The host's generator is unchanged. A user's
`torch.Generator` draws on the host; one made in `forward` is recognised by its class, `Remade`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from poptorch.base.patching import patched
from poptorch.capture.recorder import Recorder
from poptorch.capture.torch_private import without_modes
from poptorch.capture.trace import Node
from poptorch.errors import createPoptorchError

SEEDING = frozenset(f"poptorch.{name}" for name in ("manual_seed", "get_rng_state", "set_rng_state"))
"""Names of the recorded ops. Seeding within a called function ends with the call, so it is not recorded."""


_torch_generator: Any = torch.Generator


class _Kind(type(_torch_generator)):  # type: ignore[misc]
    """Metaclass of `Remade`, which replaces `torch.Generator`: any generator counts as an instance."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _torch_generator)


class Remade(_torch_generator, metaclass=_Kind):
    """Generator created anew by `forward` in each run. The device has only PyTorch's default generator."""

    def __new__(cls, device: Any = None) -> Any:
        return super().__new__(cls)

    def __init__(self, device: Any = None) -> None:
        super().__init__()

    @staticmethod
    def new_generator(state: torch.Tensor) -> torch.Generator:
        """New generator in this state."""
        made: torch.Generator = _torch_generator()
        made.set_state(state)
        return made


class _Generator:
    """Proxy for PyTorch's default generator that records seeding."""

    def __init__(self, generator: torch.Generator, recorder: Recorder) -> None:
        self._generator, self._recorder = generator, recorder
        self._states: list[tuple[torch.Tensor, Node]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def manual_seed(self, seed: int) -> torch.Generator:
        self._node("manual_seed", seed=seed)
        return self._generator

    def seed(self) -> int:
        self._node("manual_seed", seed=None)
        return self._generator.initial_seed()

    def get_state(self) -> torch.Tensor:
        with without_modes():
            state = self._generator.get_state()
        self._states.append((state, self._node("get_rng_state", number=len(self._states))))
        self._states[-1][1].has_effect = False  # until it is set
        return state

    def set_state(self, state: torch.Tensor) -> None:
        number = next((i for i, (known, _) in enumerate(self._states) if known is state), None)
        if number is None:
            raise createPoptorchError(
                f"`torch.set_rng_state` ({self._recorder.source()}): in `forward` of a wrapped model only a state can "
                "be set that `torch.get_rng_state` has given there. The device has a generator of its own: seed it "
                "with `options.randomSeed(0)`, or in `forward` with `torch.manual_seed(0)`."
            )
        self._states[number][1].has_effect = True
        self._node("set_rng_state", number=number)

    def _node(self, name: str, **arguments: Any) -> Node:
        if self._recorder.frames.is_nested:
            raise createPoptorchError(
                f"`torch.{name}` ({self._recorder.source()}): the generator of random numbers cannot be seeded in a "
                "body of a loop or of a conditional. Seed it before that."
            )
        return self._recorder.add_node(f"poptorch.{name}", "", arguments, has_effect=True)


class _OfThisThread:
    """Generator proxy: the creating thread uses one generator, other threads use another."""

    def __init__(self, own: _Generator, others: torch.Generator) -> None:
        self._thread, self._recorded, self._generator = threading.get_ident(), own, others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorded if threading.get_ident() == self._thread else self._generator, name)


@contextmanager
def seeding(recorder: Recorder) -> Iterator[None]:
    """Record operations on the default generator within a block."""
    functions: Any = torch.random
    before = functions.default_generator
    with without_modes():
        start, seed = before.get_state(), before.initial_seed()
    own = _OfThisThread(_Generator(before, recorder), before)
    with patched(functions, default_generator=own), patched(torch, Generator=Remade):
        yield
    with without_modes():
        now = before.get_state()
        is_seeded = torch.equal(now, _torch_generator().manual_seed(before.initial_seed()).get_state())
        if before.initial_seed() != seed or is_seeded and not torch.equal(now, start):
            before.set_state(start)
            raise createPoptorchError(
                "`forward` seeds `torch.default_generator`, the generator of the host, which would have no effect: the "
                "device has a generator of its own. Seed that one with `torch.manual_seed(0)`, or with "
                "`options.randomSeed(0)`."
            )
