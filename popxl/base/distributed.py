"""What the launcher `poprun`, or a scheduler, tells each process: how many instances there are, and which one this is.

An *instance* is one process of a program that several run together. Each builds the same program and drives its share
of the replicas, which are numbered through: those of the first instance come first. Nothing is connected here; see
`runtime.processes`.
"""

from __future__ import annotations

import os
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from popxl.errors import PopxlError

LOOPBACK = "127.0.0.1"
"""Where processes of one machine reach each other, and no other machine reaches them."""

PREFIX = "POPDIST_"
"""What the names of the environment variables begin with; the rest is the name of the field, in capitals."""


class Instance(BaseModel):
    """One process of a distributed program, as described by the launcher.

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
    launcher: str = Field(default="", description="Where the launcher listens: `host:port`.")
    token: str = Field(default="", repr=False, description="A secret, by which the launcher knows its instances.")
    host: str = Field(default="localhost", description="A name of this machine that all instances know.")
    coordinator: str = Field(default="", description="Where JAX's service listens, if a scheduler says: `host:port`.")
    timeout: float = Field(default=300.0, gt=0, description="Seconds to wait for others, if there is no launcher.")

    @model_validator(mode="after")
    def _counts_fit(self) -> Self:
        if self.instance_index >= self.num_instances:
            raise ValueError(f"there is no instance {self.instance_index} among {self.num_instances}")
        if self.num_total_replicas % self.num_instances:
            raise ValueError(
                f"{self.num_total_replicas} replicas cannot be shared out evenly among {self.num_instances} instances"
            )
        return self

    @property
    def is_single_host(self) -> bool:
        """Whether all instances share this machine, so that the loopback address suffices."""
        return self.host in (LOOPBACK, "localhost")

    @property
    def num_local_replicas(self) -> int:
        """How many replicas this instance drives."""
        return self.num_total_replicas // self.num_instances

    @property
    def replica_offset(self) -> int:
        """Global number of the first local replica."""
        return self.instance_index * self.num_local_replicas

    def environment(self) -> dict[str, str]:
        """Environment variables that describe this instance to a process."""
        return {PREFIX + name.upper(): str(value) for name, value in self.model_dump().items()}


def launched() -> Instance | None:
    """Read the launcher's description of this process; `None` without a launcher.

    Raises:
        PopxlError: if the environment describes no instance that there can be.
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
