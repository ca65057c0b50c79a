"""`ProgramRequest`: settings of a model's programs, beside the captured model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import popxl
from poptorch.options import Options
from poptorch.program.batching import Batching
from poptorch.program.returned import Returned
from poptorch.program.updates import Update


@dataclass(frozen=True)
class ProgramRequest:
    """Settings of a model's programs.

    Attributes:
        options: the options.
        batching: distribution of the rows of a call.
        seed: seed of random numbers.
        update: optimiser of a model that is trained.
        groupings: groupings of parameters that have a row for each group of replicas, by name.
        anchors: the tensors to anchor.
    """

    options: Options
    batching: Batching
    seed: int
    update: Update | None = None
    groupings: Mapping[str, popxl.ReplicaGrouping] = field(default_factory=dict)
    anchors: Sequence[Returned] = ()
