"""Information about the processes that run a program together; `poprun`, or a scheduler, starts those.

Only for programs: `popxl`, `runtime` and `popxl_addons` do not import this module. A process that was not started by
`poprun` is the only instance of its program, with one replica, so the functions always work. Options of PyTorch
programs are in `popdist.poptorch`.

Example:
    >>> import popdist
    >>> popdist.isPopdistEnvSet(), popdist.getInstanceIndex(), popdist.getNumInstances()
    (False, 0, 1)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from popxl.base.distributed import Instance, launched
from runtime import processes
from runtime.schedulers import ask_scheduler

__all__ = [
    "checkNumIpusPerReplica",
    "execute_on_instances",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumRestarts",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "isPopdistEnvSet",
    "synchronize",
]

_Result = TypeVar("_Result")

__path__ = [str(Path(__file__).parent / "poptorch" / "popdist")]  # modules that need torch are in poptorch


def init(num_replicas: int | None = None, num_ipus_per_replica: int = 1, adjacent_replicas: int = 0) -> None:
    """Join the other instances, and wait until all have. A session of a program for several processes does it, too.

    Call it at the beginning, if the program uses JAX, or makes other sessions, before that one. Without `poprun` it
    asks for a scheduler that has started this process as one of several: Slurm, Kubernetes, Open MPI, or that of a TPU
    pod. If there is none, or it was done before, nothing happens.

    Args:
        num_replicas: number of replicas of all instances, if a scheduler has started them; by default one each.
            `poprun` has its own option for each of these numbers.
        num_ipus_per_replica: number of devices of each replica: one for each stage of a pipeline. With fewer replicas
            than instances, an instance drives some of their stages.
        adjacent_replicas: number of replicas whose devices for a stage are adjacent; by default 1 if instances can get
            whole replicas, else all.

    Raises:
        PopxlError: if JAX has been used already; if a scheduler's environment is incomplete.
        PopxlRuntimeError: if another instance ends, or does not come.
        ValueError: if the instances cannot get equal shares of the replicas.

    Example:
        In a program that `srun --ntasks 64 python train.py` starts, which goes on with
        `popxl.Ir("popdist", axes={"data": 32, "tensor": 8})`:

            popdist.init(num_replicas=256)
    """
    ask_scheduler(num_replicas, num_ipus_per_replica, adjacent_replicas)
    processes.join()


def synchronize() -> None:
    """Wait until all instances have called this; for them to join, too, if they have not yet.

    Example:
        >>> import popdist
        >>> if popdist.getInstanceIndex() == 0:
        ...     print("The data is downloaded once.")
        The data is downloaded once.
        >>> popdist.synchronize()

    Raises:
        PopxlRuntimeError: if another instance ends, or does not come.
    """
    processes.join()
    processes.barrier("popdist.synchronize")


def execute_on_instances(
    instances: Collection[int], function: Callable[..., _Result], *args: Any, **kwargs: Any
) -> _Result | None:
    """Call a function on some instances only. All instances must call this, and continue when these have done it.

    Args:
        instances: indices of the instances that call it.
        function: function of these arguments.
        args, kwargs: arguments of the function.

    Returns:
        What it returns; `None` on the other instances.

    Raises:
        ValueError: if there is no such instance.
        PopxlRuntimeError: if another instance ends, or does not come.

    Example:
        >>> import popdist
        >>> popdist.execute_on_instances({0}, print, "The data is downloaded once.")
        The data is downloaded once.
    """
    if unknown := sorted(set(instances) - set(range(getNumInstances()))):
        raise ValueError(
            f"popdist.execute_on_instances: there is no instance {unknown[0]}; their numbers are 0 to "
            f"{getNumInstances() - 1}."
        )
    processes.join()
    try:
        return function(*args, **kwargs) if getInstanceIndex() in instances else None
    finally:
        processes.barrier("popdist.execute_on_instances")


def isPopdistEnvSet() -> bool:
    """Whether `poprun` has started this process, or a scheduler, once `init` has asked it."""
    return launched() is not None


def getNumInstances() -> int:
    """The number of instances: processes that run the program together."""
    return _instance().num_instances


def getInstanceIndex() -> int:
    """The number of this instance, from 0."""
    return _instance().instance_index


def getLocalInstanceIndex() -> int:
    """The number of this instance among those on the same machine, from 0."""
    return _instance().local_instance_index


def getNumTotalReplicas() -> int:
    """The number of replicas, over all instances."""
    return _instance().num_total_replicas


def getNumLocalReplicas() -> int:
    """The number of replicas that this instance drives."""
    return _instance().num_local_replicas


def getNumRestarts() -> int:
    """How many times `poprun --max-restarts N` has started the program again, because an instance had failed."""
    return int(os.environ.get("POPRUN_RESTARTS", "0"))


def getReplicaIndexOffset() -> int:
    """The number of the first replica that this instance drives."""
    return _instance().replica_offset


def getNumIpusPerReplica() -> int:
    """The number of devices that each replica has."""
    return _instance().num_ipus_per_replica


def checkNumIpusPerReplica(expected: int) -> bool:
    """Whether each replica has as many devices as are expected."""
    return getNumIpusPerReplica() == expected


def _instance() -> Instance:
    return launched() or Instance()
