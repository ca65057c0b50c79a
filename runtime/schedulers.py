"""Detection of schedulers that started this process among several: Slurm, Kubernetes, Open MPI, TPU pods.

JAX reads each scheduler's environment, only if a program or `poprun` asks for it. Without a launcher, processes
connect through JAX's own service, which the first of them runs.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from typing import Any

from pydantic import ValidationError

from popxl.base.distributed import Instance, launched
from popxl.errors import PopxlError, PopxlRuntimeError
from runtime.jax_private import schedulers

SCHEDULER = "POPDIST_SCHEDULER"
"""Environment variable with the name of the scheduler to ask; `none` for none."""

NAMES = {
    "slurm": "SlurmCluster",
    "k8s": "K8sCluster",
    "ompi": "OmpiCluster",
    "gcetpu": "GceTpuCluster",
    "gketpu": "GkeTpuCluster",
}
"""Known schedulers, with JAX's names of them."""

TIMEOUT = 300.0
"""Seconds of waiting for other processes."""


def scheduled(
    num_replicas: int | None = None,
    ipus_per_replica: int = 1,
    adjacent_replicas: int = 0,
    timeout: float = TIMEOUT,
    name: str | None = None,
) -> Instance | None:
    """Instance description from a scheduler; `None` without a scheduler, or for a single process.

    Args:
        num_replicas: number of replicas of all processes; by default one each.
        adjacent_replicas: number of replicas whose devices for a stage are adjacent; 0 derives it from the counts.
        timeout: seconds that processes wait for each other.
        name: name of the scheduler; by default the value of `POPDIST_SCHEDULER`, or the first one found.

    Raises:
        PopxlError: if there is no such scheduler, or its environment is incomplete.
        ValueError: if the processes cannot get equal shares of the replicas.
    """
    name = _present(name or os.environ.get(SCHEDULER, "auto"))
    if name is None:
        return None
    scheduler = schedulers()[NAMES[name]]
    try:
        count = scheduler.get_process_count()
        if count == 1:
            return None
        address = scheduler.get_coordinator_address(int(timeout), os.environ.get("JAX_COORDINATOR_PORT"))
        index, local = scheduler.get_process_id(), scheduler.get_local_process_id() or 0
    except (RuntimeError, KeyError, ValueError) as problem:
        raise PopxlError(
            f"popdist: the scheduler {name!r} has started this process, and does not say who it is: {problem}. "
            f"Set {SCHEDULER}=none if it is alone."
        ) from problem
    replicas = count if num_replicas is None else num_replicas
    try:
        return Instance(
            instance_index=index,
            num_instances=count,
            local_instance_index=local,
            num_total_replicas=replicas,
            num_ipus_per_replica=ipus_per_replica,
            adjacent_replicas=adjacent_replicas,
            coordinator=address,
            host=address.rpartition(":")[0],
            timeout=timeout,
        )
    except ValidationError:
        shared_out = f"{replicas} replicas{f' of {ipus_per_replica} devices' if ipus_per_replica > 1 else ''}"
        raise ValueError(
            f"popdist: {shared_out} cannot be shared out evenly among the {count} processes of {name}."
        ) from None


def _present(wanted: str) -> str | None:
    """Name of the scheduler that started this process; `None` if absent or disabled."""
    if wanted == "none":
        return None
    if wanted not in ("auto", *NAMES):
        raise PopxlError(f"popdist: {SCHEDULER} is {wanted!r}; expected auto, none, {', '.join(NAMES)}.")
    kinds = schedulers()
    names = [name for name in NAMES if name != "k8s" or "JOB_COMPLETION_INDEX" in os.environ]  # other pods are alone
    present = (name for name in (names if wanted == "auto" else (wanted,)) if kinds[NAMES[name]].is_env_present())
    scheduler = next(present, None)
    if scheduler is None and wanted != "auto":
        raise PopxlError(f"popdist: {SCHEDULER} is {wanted!r}, and this process was not started by it.")
    return scheduler


def ask_scheduler(num_replicas: int | None, ipus_per_replica: int, adjacent_replicas: int) -> None:
    """Store the scheduler's description of this process in environment variables, as `poprun` does."""
    if launched() is None and (instance := scheduled(num_replicas, ipus_per_replica, adjacent_replicas)) is not None:
        os.environ.update(instance.environment())


class Service:
    """Connection to other processes through JAX's service, for processes started without a launcher."""

    def __init__(self, instance: Instance, client: Any) -> None:
        self._instance, self._client = instance, client
        self._barriers = itertools.count()
        self._lock = threading.Lock()
        self._all_fail = False  # for the same reason, reported to all

    def barrier(self, place: str, payload: Any = None) -> list[Any]:
        """Wait until all processes reach a place. Returns their payloads.

        Raises:
            PopxlRuntimeError: for processes that do not arrive, or wait at another barrier.
        """
        own, count = self._instance.instance_index, self._instance.num_instances
        with self._lock:
            name = f"popxl/meeting {next(self._barriers)}"
            self._client.key_value_set(f"{name}/{own}", json.dumps([place, payload]))
            self._wait(place, lambda limit: self._client.wait_at_barrier(name, limit))
            found = [json.loads(self._client.key_value_try_get(f"{name}/{i}")) for i in range(count)]
        if any(there != place for there, _ in found):
            self._all_fail = True
            places = " ".join(f"Instance {i} is at {there}." for i, (there, _) in enumerate(found))
            raise PopxlRuntimeError(
                f"popdist: instance {own} is at {place}, and others wait elsewhere; all instances have to do the same. "
                f"{places}"
            )
        return [each for _, each in found]

    def leave(self, is_first: bool, failed: bool) -> None:
        """Leave at the end of the program. The first process hosts the service, and waits for all other processes.

        After a failure of its own it does not, as they may be waiting for it in a collective. Where all fail it does:
        the end of the service would end them before they have said why.
        """
        if not is_first:
            self._client.key_value_set(f"popxl/left/{self._instance.instance_index}", str(failed))
            return
        if failed and not self._all_fail:
            return
        for other in range(1, self._instance.num_instances):
            key = f"popxl/left/{other}"
            self._wait("the end of the program", lambda limit, key=key: self._client.blocking_key_value_get(key, limit))
        # Processes that have reported are still connected, and would be cut off: wait until only this one is left.
        self._client.get_live_nodes([*range(self._instance.num_instances)])

    def _wait(self, place: str, wait: Any) -> None:
        try:
            wait(int(1000 * self._instance.timeout))
        except RuntimeError as problem:  # JAX wraps errors of the service
            raise PopxlRuntimeError(
                f"popdist: instance {self._instance.instance_index} is at {place}, and others do not come: they have "
                f"ended, or need more than {self._instance.timeout:g} seconds. JAX says: {problem}"
            ) from problem
