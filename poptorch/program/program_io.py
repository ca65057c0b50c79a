"""`ProgramIO`: inputs, outputs and variables of a program that the host accesses; `Result`: one of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import popxl
from popxl.tensor import Variable


@dataclass(frozen=True)
class Result:
    """A program output, produced once per micro-batch.

    Attributes:
        stream: its stream to the host.
        shape: shape of one of them.
        count: number of results of each replica.
        anchor: name given by the user; empty for results of the model.
    """

    stream: popxl.DeviceToHostStream
    shape: tuple[int, ...]
    count: int
    anchor: str = ""


@dataclass
class ProgramIO:
    """Program inputs, outputs and variables that the host accesses. Saved files have the names of these attributes.

    Attributes:
        inputs: stream of each input, by number; unused inputs have none.
        outputs: results of the program: those of the model, anchored tensors, inputs that are overwritten.
        variables: variables of parameters and buffers, by name; tied ones are one. Unused ones have none.
        written: names of those that `forward` overwrites. Each replica has its own value of them.
        numbers: stream of the optimiser's hyperparameters, if some are variable.
        state: the variables of its state, by name.
        random: variable of random numbers, if there are any.
        names: names of the tensors that may be returned: parameters, inputs, `"loss"`, those of the model's graph, and
            in training `"Gradient___<parameter>"`, of a micro-batch and a replica, and `"UpdatedVar___<parameter>"`.
        counted: the streams of numbers that the host computes from those that `forward` changes.
    """

    inputs: dict[int, popxl.HostToDeviceStream] = field(default_factory=dict)
    outputs: list[Result] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    numbers: popxl.HostToDeviceStream | None = None
    state: dict[str, Variable] = field(default_factory=dict)
    random: Variable | None = None
    names: Sequence[str] = ()
    counted: list[popxl.HostToDeviceStream] = field(default_factory=list)
