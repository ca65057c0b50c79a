"""Stochastic rounding of in-place updates: the ops that round, and the random state that they draw from.

The state is a variable of the main graph, a seed of two words. Each run of a session derives a key from it and replaces
it by the next seed. A program receives the key as an input stream that sessions feed automatically; the n-th update of
a run draws from the key and n. So all replicas draw the same numbers, and a program that is given the seed of another
continues its sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from popxl import dtypes
from popxl.core.create import variable
from popxl.core.recording import Op
from popxl.core.tensor import Tensor, Variable
from popxl.random_seed import create_seeds
from popxl.streams import HostToDeviceStream
from popxl.values.spec import TensorSpec

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir

SEED = "stochastic_rounding_seed"
"""Name of the variable with the seed."""

HALVES = frozenset({dtypes.float16, dtypes.bfloat16})


class RoundingKey(HostToDeviceStream):
    """The input stream of the key of stochastic rounding: one transfer per run, the same for all replicas."""

    __slots__ = ()
    num_host_transfers = 1  # type: ignore[override]
    has_own_transfers = True

    @classmethod
    def for_program(cls, main: Graph) -> RoundingKey:
        """The stream of a program. Its tensor is not among the graph's: only programs that round have the stream."""
        stream = object.__new__(cls)
        name = "stochastic_rounding_key"
        stream.tensor = Tensor._make(main, name, name, TensorSpec((2,), dtypes.uint32))
        return stream


def rounds(op: Op) -> bool:
    """Whether an op's updates are rounded stochastically: in-place ops on float16 or bfloat16, if the option is on."""
    if not op.modified or op.called_graphs or not op.graph.ir.options.enableStochasticRounding:
        return False
    return any(op.inputs[i].dtype in HALVES for i in op.modified)


def seed_of(ir: Ir) -> Variable | None:
    """Seed variable of a program, if any."""
    return next((v for v in ir.main_graph.variables if v.id == SEED), None)


def ensure_seed(ir: Ir) -> Variable:
    """Get or create the variable with the rounding seed."""
    found = seed_of(ir)
    if found is not None:
        return found
    with ir.main_graph:
        return variable(create_seeds(ir.options.stochasticRoundingSeed), dtypes.uint32, SEED)


def next_key(seed: Variable) -> np.ndarray:
    """The key of the next run. Replaces the seed on the host by its successor."""
    words = seed.data.tolist()
    key, following = (np.random.SeedSequence(words, spawn_key=(i,)).generate_state(2) for i in (0, 1))
    seed.data[...] = following
    return key
