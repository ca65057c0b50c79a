"""Several processes that run one program: how they find each other, wait for each other, and end together.

Each process drives its own devices; JAX connects them (`jax.distributed`), and collectives go from device to device.
What is here is what comes before and around that: a line to the launcher that started the processes. Along it a process
says that it has come to a place where all must meet, and hears when all are there, or why they never will be: one has
ended, another waits elsewhere, or time is up. If the line breaks, the process ends too. So nobody waits for the dead.

The other end of the line is `runtime.meetings`. Where a scheduler has started the processes there is no launcher:
`runtime.schedulers`.
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
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NoReturn

import jax

from popxl.base.distributed import LOOPBACK, Instance, launched
from popxl.base.log import Logger
from popxl.errors import PopxlError, PopxlRuntimeError
from runtime.jax_private import HAS_TPUS, exchange_on, service
from runtime.schedulers import Service

_log = Logger("session")

JOINING, ENDING = "the start of the program over all instances (popdist.init)", "the end of the program"
"""Places where instances meet."""

LEAVING = ""
"""No place: an instance says so when it is about to end."""

_ALL_ARE_HERE = 60  # seconds for JAX to connect processes of which each is known to be waiting


class Line:
    """The line from an instance to the launcher.

    Args:
        instance: what the launcher says of this process.

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
                pass  # broken, which is the same as closed
            except ValueError:
                problem = f"what answers at {self._launcher!r} is not `poprun`: {text[:80]!r}."
                self._answers.put({"problem": problem, "is_last": True})
                return
            with contextlib.suppress(OSError):  # poprun may have read what is written here
                os.write(2, b"popdist: poprun has ended, or stops all instances; this one ends too.\n")
            self._end()

    @staticmethod
    def _end() -> NoReturn:
        """End this process, whose main thread may be in a collective that never ends, and all that it has started."""
        if os.getpgrp() == os.getpid():  # as poprun starts an instance: what that starts is in its group
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    def say(self, place: str, said: Any = None) -> None:
        """Tell the launcher where this instance is."""
        with contextlib.suppress(OSError):  # broken, which `_listen` sees, too
            self._socket.sendall(json.dumps({"index": self._index, "place": place, "said": said}).encode() + b"\n")

    def meet(self, place: str, said: Any = None) -> list[Any]:
        """Wait until all instances are at a place. Returns what each has said there.

        Raises:
            PopxlRuntimeError: if they will not all come.
        """
        with self._lock:
            self.say(place, said)
            answer = self._answers.get()
            if "is_last" in answer:
                self._answers.put(answer)  # for whoever comes later
        if "problem" in answer:
            raise PopxlRuntimeError(f"popdist: instance {self._index} is at {place}, and {answer['problem']}")
        said_by_all: list[Any] = answer["said"]
        return said_by_all

    def leave(self, is_first: bool, failed: bool) -> None:
        """At the end of the program. Instance 0 waits for the others.

        Raises:
            PopxlRuntimeError: if they will not all end.
        """
        if not is_first or failed:
            self.say(LEAVING, failed)
            return
        try:
            self.meet(ENDING)
        except PopxlRuntimeError:
            self.say(LEAVING, True)
            raise


_lines: list[Line | Service] = []  # none before this process has joined, and one after


def has_joined() -> bool:
    """Whether this process has joined the other instances."""
    return bool(_lines)


def join() -> None:
    """Connect this process with the other instances, if there are any; it waits for them. Once is enough.

    Raises:
        PopxlError: if JAX runs already: it cannot be connected later.
        PopxlRuntimeError: if some instance does not come.
    """
    instance = launched()
    if instance is None or instance.num_instances == 1 or has_joined():
        return
    address = LOOPBACK if instance.all_are_here else ""
    line: Line | Service
    if instance.coordinator:
        port = int(instance.coordinator.rpartition(":")[2])
        _connect(instance, instance.coordinator, f"{address or '[::]'}:{port}", int(instance.timeout))
        line = Service(instance, service())
    else:
        line = Line(instance)
        with held_port(address) as port:
            said = f"{instance.host}:{port}" if instance.instance_index == 0 else None
            coordinator = line.meet(JOINING, said)[0]
            _connect(instance, coordinator, f"{address or '[::]'}:{port}", _ALL_ARE_HERE)
    _lines.append(line)
    atexit.register(_leave, line, instance.instance_index == 0, os.getpid())


def _connect(instance: Instance, coordinator: str, own: str, timeout: int) -> None:
    """Have JAX connect the instances. The first one listens at an address of its own for the coordinator's."""
    devices = instance.num_local_replicas * instance.num_ipus_per_replica
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
            shutdown_timeout_seconds=0,  # instances may end one after the other
        )
    except RuntimeError as problem:
        raise PopxlError(
            "popdist: this process cannot be connected with the other instances. If JAX has been used before, call "
            f"`popdist.init()` at the beginning of the program. JAX says: {problem}"
        ) from problem
    if instance.all_are_here and jax.config.values["jax_cpu_collectives_implementation"] == "gloo":
        exchange_on(LOOPBACK)


@contextlib.contextmanager
def held_port(address: str) -> Iterator[int]:
    """A port that no other process gets, while this one waits for all instances. JAX's service listens there, too."""
    with socket.socket() as held:
        if hasattr(socket, "SO_REUSEPORT"):  # elsewhere, JAX could not listen where something is held
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind((address, 0))
            yield held.getsockname()[1]
            return
        held.bind((address, 0))
        port = held.getsockname()[1]
    yield port


def _leave(line: Line | Service, is_first: bool, process: int) -> None:
    """At the end of the program, before JAX takes down what the others may be using.

    Instance 0 waits for them: JAX's service, by which all are connected, is in its process. After an uncaught exception
    it does not, as they may be waiting for it in a collective.
    """
    if os.getpid() != process:  # a copy that the program has forked
        return
    failed = getattr(sys, "last_value", None) is not None
    try:
        line.leave(is_first, failed)
    except PopxlRuntimeError as problem:
        print(problem, file=sys.stderr)


def meet(place: str, said: Any = None) -> list[Any]:
    """Wait until all instances are at this place: nothing, in a program of a single process.

    Args:
        place: its name.
        said: what this instance says there, such as JSON knows.

    Returns:
        What each has said, in the order of the instances.

    Raises:
        PopxlRuntimeError: if they will not all come.
    """
    return _lines[0].meet(place, said) if _lines else [said]


class Notes:
    """Notes that instances leave for each other, under names that are used once.

    They take no meeting: a thread may leave one, or wait for one, while the program goes on.
    """

    _FOLDER = "popxl/notes"
    _PATIENCE = 1000  # milliseconds, after which somebody who waits can be interrupted

    def leave(self, name: str, text: str) -> None:
        """Leave a note for all."""
        service().key_value_set(f"{self._FOLDER}/{name}", text)

    def find(self, name: str) -> str:
        """The note of a name. Waits until there is one: an instance that dies meanwhile ends this one, too.

        Raises:
            PopxlRuntimeError: if the instances are no longer connected.
        """
        while True:
            try:
                text: str = service().blocking_key_value_get(f"{self._FOLDER}/{name}", self._PATIENCE)
                return text
            except RuntimeError as problem:  # of JAX, in whichever form it raises what the service says
                if not str(problem).startswith("DEADLINE_EXCEEDED"):
                    raise PopxlRuntimeError(
                        f"popdist: other instances cannot be heard any more: {problem}"
                    ) from problem

    def forget(self, folder: str) -> None:
        """Forget all notes whose names begin with a folder's."""
        service().key_value_delete(f"{self._FOLDER}/{folder}/")


# Replicas of a program over processes --------------------------------------------------------------------------------


def spans(instance_replicas: int, replicas: int) -> bool:
    """Whether other instances drive some of the replicas of a program.

    Args:
        instance_replicas: number of replicas of this process, as the program says.
        replicas: number of replicas, over all processes.

    Raises:
        PopxlError: if the launcher has counted otherwise.
    """
    instance = launched()
    if instance is None or instance.num_instances == 1 or replicas == instance_replicas:
        return False
    if (instance_replicas, replicas) != (instance.num_local_replicas, instance.num_total_replicas):
        raise PopxlError(
            f"Session: the program has {replicas} replicas, of which {instance_replicas} are this process's, and "
            f"poprun was told of {instance.num_total_replicas} for {instance.num_instances} instances. Leave both to "
            "`popxl.Ir(replication='popdist')`, and give `poprun --num-replicas` the number that you want."
        )
    return True


def devices_of_all(own: Sequence[jax.Device], count: int, best: int) -> list[jax.Device]:
    """The devices of the replicas of all processes, in their order.

    Args:
        own: the devices of this process.
        count: how many replicas it drives.
        best: how many devices it would use. If some process has fewer, each replica has one.

    Raises:
        PopxlError: if there are not even so many.
    """
    if len(own) < count:
        raise PopxlError(
            f"Session: this process drives {count} replicas and has {len(own)} {own[0].platform} device(s): over "
            "several processes, each replica needs a device of its own. Start more instances, or, for CPUs, set "
            f"POPXL_CPU_DEVICES={count}."
        )
    by_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices(own[0].platform):
        by_process.setdefault(device.process_index, []).append(device)
    used = best if all(len(found) >= best for found in by_process.values()) else count
    return [device for process in sorted(by_process) for device in by_process[process][:used]]


@cache
def warn_if_forgotten() -> None:
    """Warn, once, if poprun has started several instances, and this one runs a program that knows nothing of them."""
    instance = launched()
    if instance is not None and instance.num_instances > 1 and not has_joined():
        _log.warn(
            f"poprun has started {instance.num_instances} instances, and each runs this program by itself: its Ir was "
            "not made with `popxl.Ir(replication='popdist')`. If that is meant, call `popdist.init()`."
        )
