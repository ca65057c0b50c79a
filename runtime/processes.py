"""Several processes that run one program: discovery, barriers, and a common end.

Each process drives its own devices; JAX connects them (`jax.distributed`), and collectives go from device to device. In
addition, each process has a connection to the launcher that started it. At a barrier it sends the name of the place,
and receives an answer when all processes have reached it, or the reason why they never will: one has ended, another
waits elsewhere, or the time is up. If the connection breaks, the process ends too, so that no process waits for a dead
one.

The launcher's end is `runtime.rendezvous`. Processes that a scheduler starts have no launcher: `runtime.schedulers`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

import jax

from popxl.base.distributed import LOOPBACK, Instance, launched
from popxl.base.group_by import group_by
from popxl.base.log import Logger
from popxl.errors import PopxlError, PopxlRuntimeError
from popxl.ir import Ir
from runtime.jax_private import HAS_TPUS, bind_collectives, distributed_client
from runtime.schedulers import Service

_log = Logger("session")

JOINING, ENDING = "the start of the program over all instances (popdist.init)", "the end of the program"
"""Places of barriers."""

LEAVING = ""
"""Barrier name sent by an instance that is about to end."""

_CONNECT_TIMEOUT = 60  # seconds for JAX to connect processes that are all waiting

_FAILURE_DELAY = 1.0  # seconds for other instances that fail, too, to end before JAX's service does


class LauncherConnection:
    """Connection of an instance to its launcher.

    Raises:
        PopxlRuntimeError: if the launcher does not answer.
    """

    def __init__(self, instance: Instance) -> None:
        self._index, self._launcher = instance.instance_index, instance.launcher
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        host, _, port = instance.launcher.rpartition(":")
        try:
            self._socket = socket.create_connection((host, int(port)), timeout=30)
            self._socket.sendall(f"{instance.token}\n".encode())
        except (OSError, ValueError) as problem:
            raise PopxlRuntimeError(
                f"popdist: `poprun`, which started this process, does not answer at {instance.launcher!r}: {problem}."
            ) from problem
        self._socket.settimeout(None)
        threading.Thread(target=self._listen, name="popdist", daemon=True).start()

    def _listen(self) -> None:
        with self._socket, self._socket.makefile("rb") as lines:
            try:
                for text in lines:
                    self._answers.put(json.loads(text))
            except OSError:
                pass  # a broken connection counts as closed
            except ValueError:
                problem = f"what answers at {self._launcher!r} is not `poprun`: {text[:80]!r}."
                self._answers.put({"problem": problem, "is_last": True})
                return
            with contextlib.suppress(OSError):  # poprun may have read it already
                os.write(2, b"popdist: poprun has ended, or stops all instances; this one ends too.\n")
            self._end()

    @staticmethod
    def _end() -> NoReturn:
        """Kill this process and its children; the main thread may hang in a collective."""
        if os.getpgrp() == os.getpid():  # only the process that poprun started: its children are in its group
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def send(self, place: str, payload: Any = None) -> None:
        """Send this instance's place to the launcher."""
        with contextlib.suppress(OSError):  # broken, which `_listen` sees, too
            self._socket.sendall(
                json.dumps({"index": self._index, "place": place, "payload": payload}).encode() + b"\n"
            )

    def barrier(self, place: str, payload: Any = None) -> list[Any]:
        """Wait until all instances reach a place. Returns their payloads.

        Raises:
            PopxlRuntimeError: if an instance ends, times out or waits elsewhere.
        """
        with self._lock:
            self.send(place, payload)
            answer = self._answers.get()
            if "is_last" in answer:
                self._answers.put(answer)  # for later barriers
        if "problem" in answer:
            raise PopxlRuntimeError(f"popdist: instance {self._index} is at {place}, and {answer['problem']}")
        payloads: list[Any] = answer["payload"]
        return payloads

    def leave(self, is_first: bool, failed: bool) -> None:
        """Leave at exit; instance 0 waits for other instances.

        After a failure of its own it waits only briefly, as they may be waiting for it in a collective. Those that fail
        too leave meanwhile: JAX aborts instances that lose its service.

        Raises:
            PopxlRuntimeError: if an instance does not end.
        """
        if not is_first or failed:
            self.send(LEAVING, failed)
            if is_first:
                time.sleep(_FAILURE_DELAY)
            return
        try:
            self.barrier(ENDING)
        except PopxlRuntimeError:
            self.send(LEAVING, True)
            raise


_connections: list[LauncherConnection | Service] = []  # none before this process has joined, and one after


def is_connected() -> bool:
    """Whether this process joined other instances."""
    return bool(_connections)


def join() -> None:
    """Connect this process to other instances, if any, and wait for them. Repeated calls have no effect.

    Raises:
        PopxlError: if JAX runs already: it cannot be connected later.
        PopxlRuntimeError: if an instance does not arrive.
    """
    instance = launched()
    if instance is None or instance.num_instances == 1 or is_connected():
        return
    address = LOOPBACK if instance.is_single_host else ""
    connection: LauncherConnection | Service
    if instance.coordinator:
        port = int(instance.coordinator.rpartition(":")[2])
        _connect(instance, instance.coordinator, f"{address or '[::]'}:{port}", int(instance.timeout))
        connection = Service(instance, distributed_client())
    else:
        connection = LauncherConnection(instance)
        with held_port(address) as port:
            payload = f"{instance.host}:{port}" if instance.instance_index == 0 else None
            coordinator = connection.barrier(JOINING, payload)[0]
            _connect(instance, coordinator, f"{address or '[::]'}:{port}", _CONNECT_TIMEOUT)
    _connections.append(connection)
    atexit.register(_leave, connection, instance.instance_index == 0, os.getpid())


def _connect(instance: Instance, coordinator: str, own: str, timeout: int) -> None:
    """Connect instances by `jax.distributed`; instance 0 serves the coordinator's address."""
    devices = instance.num_local_replicas * instance.share.stages
    first = instance.local_instance_index * devices
    # JAX would hold SIGTERM back, and the process could not be stopped.
    jax.config.update("jax_enable_preemption_service", False)
    if jax.config.values["jax_cpu_collectives_implementation"] is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            instance.num_instances,
            instance.instance_index,
            local_device_ids=None if instance.coordinator and HAS_TPUS else range(first, first + devices),
            cluster_detection_method="deactivate",
            initialization_timeout=timeout,
            coordinator_bind_address=own,
            shutdown_timeout_seconds=0,  # instances may end at different times
        )
    except RuntimeError as problem:
        raise PopxlError(
            "popdist: this process cannot be connected with the other instances. If JAX has been used before, call "
            f"`popdist.init()` at the beginning of the program. JAX says: {problem}"
        ) from problem
    if instance.is_single_host and jax.config.values["jax_cpu_collectives_implementation"] == "gloo":
        bind_collectives(LOOPBACK)


@contextlib.contextmanager
def held_port(address: str) -> Iterator[int]:
    """Hold a free port until JAX's service also listens there."""
    with socket.socket() as held:
        if hasattr(socket, "SO_REUSEPORT"):  # elsewhere, JAX could not listen where something is held
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((address, 0))
            yield held.getsockname()[1]
            return
        held.bind((address, 0))
        port = held.getsockname()[1]
    yield port


def _leave(connection: LauncherConnection | Service, is_first: bool, process: int) -> None:
    """Exit handler: leave other instances before JAX shuts down its service.

    Instance 0 waits for them: JAX's service is in its process.
    """
    if os.getpid() != process:  # a copy that the program has forked
        return
    failed = getattr(sys, "last_value", None) is not None
    try:
        connection.leave(is_first, failed)
    except PopxlRuntimeError as problem:
        print(problem, file=sys.stderr)


def barrier(place: str, payload: Any = None) -> list[Any]:
    """Wait until all instances reach a place, if there are others; returns their payloads in order.

    Raises:
        PopxlRuntimeError: if some instance cannot arrive.
    """
    return _connections[0].barrier(place, payload) if _connections else [payload]


class KeyValueStore:
    """Texts shared by instances, under single-use keys.

    No barrier is needed: a thread may set a key, or wait for one, while the program continues.
    """

    _FOLDER = "popxl/notes"
    _POLL_INTERVAL = 1000  # milliseconds, after which a waiting thread can be interrupted

    def set(self, name: str, text: str) -> None:
        """Set a key's text, visible to all instances."""
        distributed_client().key_value_set(f"{self._FOLDER}/{name}", text)

    def get(self, name: str) -> str:
        """Wait for a key's text. If another instance dies meanwhile, this process ends too.

        Raises:
            PopxlRuntimeError: if the instances are no longer connected.
        """
        while True:
            try:
                text: str = distributed_client().blocking_key_value_get(f"{self._FOLDER}/{name}", self._POLL_INTERVAL)
                return text
            except RuntimeError as problem:  # JAX wraps errors of the service
                if not str(problem).startswith("DEADLINE_EXCEEDED"):
                    raise PopxlRuntimeError(
                        f"popdist: other instances cannot be heard any more: {problem}"
                    ) from problem

    def delete(self, folder: str) -> None:
        """Delete keys under a folder."""
        distributed_client().key_value_delete(f"{self._FOLDER}/{folder}/")


# Replicas of a program over processes --------------------------------------------------------------------------------


def spans_processes(ir: Ir) -> bool:
    """Whether a program's replicas, or their stages, span several instances.

    Raises:
        PopxlError: if the launcher has counted otherwise.
    """
    instance, instance_replicas, replicas = launched(), ir.instance_replication_factor, ir.replication_factor
    if instance is None or instance.num_instances == 1 or not ir.options.enableDistributedReplicatedGraphs:
        return False
    if replicas == instance_replicas and instance.has_whole_replicas:
        return False
    if (instance_replicas, replicas) != (instance.num_local_replicas, instance.num_total_replicas):
        raise PopxlError(
            f"Session: the program has {replicas} replicas, of which {instance_replicas} are this process's, and "
            f"poprun was told of {instance.num_total_replicas} for {instance.num_instances} instances. Leave both to "
            "`popxl.Ir(replication='popdist')`, and give `poprun --num-replicas` the number that you want."
        )
    return True


def check_stages(ipus: int) -> None:
    """Raise `PopxlError` unless a program that instances share by stages uses as many IPUs as the launcher said."""
    instance = launched()
    if instance is not None and not instance.has_whole_replicas and ipus != instance.num_ipus_per_replica:
        raise PopxlError(
            f"Session: each of the {instance.num_instances} instances drives some stages of its replicas, and `poprun` "
            f"was told of {instance.num_ipus_per_replica} devices a replica; the program uses {ipus} IPUs. Give "
            f"`poprun --ipus-per-replica {ipus}`, or without poprun `popdist.init(num_ipus_per_replica={ipus})`."
        )


def devices_of_all(own: Sequence[jax.Device], count: int, best: int) -> list[jax.Device]:
    """Devices of all processes' replicas, in process order.

    Args:
        count: number of replicas that it drives.
        best: number of devices that it would use. If a process has fewer, each replica has one.

    Raises:
        PopxlError: if there are fewer devices than replicas.
    """
    if len(own) < count:
        raise PopxlError(
            f"Session: this process drives {count} replicas and has {len(own)} {own[0].platform} device(s): over "
            "several processes, each replica needs a device of its own. Start more instances, or, for CPUs, set "
            f"POPXL_CPU_DEVICES={count}."
        )
    by_process = group_by(jax.devices(own[0].platform), lambda device: device.process_index)
    used = best if all(len(found) >= best for found in by_process.values()) else count
    return [device for process in sorted(by_process) for device in by_process[process][:used]]


@cache
def warn_if_forgotten() -> None:
    """Warn once if poprun started several instances and this one runs a program for a single process."""
    instance = launched()
    if instance is not None and instance.num_instances > 1 and not is_connected():
        _log.warn(
            f"poprun has started {instance.num_instances} instances, and each runs this program by itself: its Ir was "
            "not made with `popxl.Ir(replication='popdist')`. If that is meant, call `popdist.init()`."
        )
