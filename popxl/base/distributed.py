"""Launcher environment, of `poprun` or a scheduler: number of instances, and index of this one.

An *instance* is one process of a program that several processes run together. Each builds the same program and drives
its share of the replicas, in order: the first instance has the first ones. Where replicas have several devices each,
the stages of a pipeline, an instance may drive some stages of its replicas, and other instances the rest: see `Share`.
This file makes no connection; see `runtime.processes`.
"""

from __future__ import annotations

import os
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from popxl.errors import PopxlError

LOOPBACK = "127.0.0.1"
"""Loopback address, for processes of one machine."""

PREFIX = "POPDIST_"
"""Prefix of the environment variables; the field name in capitals follows."""


class Share(NamedTuple):
    """Part of a program that one of several processes drives: consecutive replicas, and consecutive stages of these.

    The devices of all processes are numbered through, those of the first process first. `adjacent` replicas have their
    devices for one stage next to each other; then come their devices for the next stage, and after the last stage the
    next replicas. So with 1 each replica has its stages side by side, and with all replicas each stage has all of its
    own.

    Attributes:
        first_replica, replicas: first of its replicas, and their number.
        first_stage, stages: first of its stages, and their number.

    Example:
        >>> Share.of(3, 4, replicas=2, stages=4, adjacent=2)  # a stage of both replicas
        Share(first_replica=0, replicas=2, first_stage=3, stages=1)
        >>> Share.of(3, 4, replicas=4, stages=2, adjacent=4)  # two replicas of a stage
        Share(first_replica=2, replicas=2, first_stage=1, stages=1)
    """

    first_replica: int
    replicas: int
    first_stage: int
    stages: int

    @classmethod
    def of(cls, index: int, count: int, replicas: int, stages: int, adjacent: int) -> Share:
        """Share of process `index` among `count`.

        Raises:
            ValueError: if they cannot get equal shares.
        """
        if adjacent == 1 and not replicas % count:  # whole replicas, however many devices each takes
            return cls(index * (replicas // count), replicas // count, 0, stages)
        # A row is the devices of adjacent replicas for one stage. A block is their rows for all stages.
        devices, left = divmod(replicas * stages, count)
        rows, loose = divmod(devices, adjacent)
        if left or replicas % adjacent or not devices:
            fits = False
        elif rows == 0:
            fits = not adjacent % devices
        else:
            fits = not loose and not (stages % rows if rows <= stages else rows % stages)
        if not fits:
            of_stages = f" of {stages} stages" if stages > 1 else ""
            raise ValueError(f"{replicas} replicas{of_stages} cannot be shared out evenly among {count} instances")
        row, first = divmod(index * devices, adjacent)
        block, stage = divmod(row, stages)
        own = devices if rows == 0 else adjacent * max(1, rows // stages)
        return cls(block * adjacent + first, own, stage, min(max(1, rows), stages))


class Instance(BaseModel):
    """Process of a distributed program, as described by the launcher.

    Example:
        >>> instance = Instance(instance_index=1, num_instances=2, num_total_replicas=8)
        >>> instance.num_local_replicas, instance.replica_offset
        (4, 4)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    instance_index: int = Field(default=0, ge=0, description="The number of this instance.")
    num_instances: int = Field(default=1, ge=1, description="How many instances there are.")
    local_instance_index: int = Field(default=0, ge=0, description="Its number among those on the same machine.")
    num_total_replicas: int = Field(default=1, ge=1, description="How many replicas all instances drive together.")
    num_ipus_per_replica: int = Field(default=1, ge=1, description="How many devices each replica has.")
    adjacent_replicas: int = Field(
        default=0, ge=0, description="How many replicas have their devices for a stage side by side: see `Share`."
    )
    launcher: str = Field(default="", description="Where the launcher listens: `host:port`.")
    token: str = Field(default="", repr=False, description="A secret, by which the launcher knows its instances.")
    host: str = Field(default="localhost", description="A name of this machine that all instances know.")
    coordinator: str = Field(default="", description="Where JAX's service listens, if a scheduler says: `host:port`.")
    timeout: float = Field(default=300.0, gt=0, description="Seconds to wait for others, if there is no launcher.")

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        if self.instance_index >= self.num_instances:
            raise ValueError(f"there is no instance {self.instance_index} among {self.num_instances}")
        _ = self.share
        return self

    @property
    def is_single_host(self) -> bool:
        """Whether all instances share this machine, so that the loopback address suffices."""
        return self.host in (LOOPBACK, "localhost")

    @property
    def adjacent(self) -> int:
        """Number of replicas with adjacent devices per stage; by default 1 if the instances can get whole replicas,
        else all."""
        whole = self.num_total_replicas % self.num_instances == 0
        return self.adjacent_replicas or (1 if whole else self.num_total_replicas)

    @property
    def share(self) -> Share:
        """Share of the devices and replicas that this instance drives."""
        counts = (self.num_total_replicas, self.num_ipus_per_replica, self.adjacent)
        return Share.of(self.instance_index, self.num_instances, *counts)

    @property
    def has_whole_replicas(self) -> bool:
        """Whether this instance drives all stages of its replicas."""
        return self.share.stages == self.num_ipus_per_replica

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas that this instance drives completely or by stages."""
        return self.share.replicas

    @property
    def replica_offset(self) -> int:
        """Global number of the first local replica."""
        return self.share.first_replica

    def environment(self) -> dict[str, str]:
        """Environment variables that describe this instance to a process."""
        return {PREFIX + name.upper(): str(value) for name, value in self.model_dump().items()}


def launched() -> Instance | None:
    """Read the launcher's description of this process; `None` without a launcher.

    Raises:
        PopxlError: if the environment describes an impossible instance.
    """
    found = {name: os.environ.get(PREFIX + name.upper()) for name in Instance.model_fields}
    if found["num_instances"] is None:
        return None
    try:
        return Instance.model_validate({name: value for name, value in found.items() if value is not None})
    except ValidationError as problem:
        raise PopxlError(
            f"The environment variables {PREFIX}*, which `poprun` sets, do not describe an instance: {problem}. Start "
            "the program with `poprun`, or unset them."
        ) from problem
