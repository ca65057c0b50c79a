"""`ProgramIO`: inputs, outputs and variables of a program that the host accesses; `Result`: one of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import popxl
from poptorch.program.program import Program
from popxl.tensor import Variable


@dataclass(frozen=True)
class Result:
    """A program output, produced once per micro-batch.

    Attributes:
        shape: shape of one of them.
        count: number of results of each replica.
        anchor: name given by the user; empty for results of the model.
    """

    shape: tuple[int, ...]
    count: int
    anchor: str = ""


@dataclass(frozen=True)
class ProgramIO:
    """Program inputs, outputs and variables that the host accesses.

    Attributes:
        inputs: stream of each input, by number; unused inputs have none.
        outputs: streams of the results.
        variables: variables of parameters and buffers, by name.
        written: names of those that `forward` overwrites. Each replica has its own value of them.
        numbers: stream of the optimiser's hyperparameters, if some are variable.
        state: the variables of its state, by name.
        random: variable of random numbers, if there are any.
        names: names of all tensors that can be anchored.
        counted: the streams of numbers that the host computes from those that `forward` changes.
    """

    inputs: dict[int, popxl.HostToDeviceStream] = field(default_factory=dict)
    outputs: Sequence[popxl.DeviceToHostStream] = ()
    variables: Mapping[str, Variable] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    numbers: popxl.HostToDeviceStream | None = None
    state: Mapping[str, Variable] = field(default_factory=dict)
    random: Variable | None = None
    names: tuple[str, ...] = ()
    counted: Sequence[popxl.HostToDeviceStream] = ()

    @classmethod
    def collect(cls, program: Program) -> ProgramIO:
        """Collect a program's inputs, outputs and variables."""
        return cls(
            program.inputs,
            program.outputs,
            program.variables,
            frozenset(program.written),
            program.numbers,
            program.state,
            program.random,
            program.names,
            program.counted,
        )
