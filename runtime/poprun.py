"""`poprun`: launch and supervise several instances of a distributed program.

Its command-line options are in `runtime.poprun_options`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from types import FrameType
from typing import IO, Any, NamedTuple

from pydantic import ValidationError

from popxl.base.distributed import LOOPBACK, PREFIX, Instance
from popxl.errors import PopxlError
from runtime.pipes import exit_on_broken_pipe
from runtime.poprun_options import parser, variables_of
from runtime.rendezvous import RendezvousServer
from runtime.schedulers import scheduled

GRACE = 5.0
"""Seconds for an instance to shut down after a request to end."""

Ends = queue.SimpleQueue[tuple[int | None, int | None]]
"""Queue of events: an instance with its exit status, or `None` for a reported failure; or `None` with a signal to
poprun."""

_TOKEN = PREFIX + "TOKEN"
"""The environment variable that no list of processes should show."""

_MOMENT = 1.0
"""Seconds for which a killed process may still appear alive to others, generous for busy machines."""


@exit_on_broken_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Run poprun with `arguments`, by default `sys.argv`. Returns the exit code."""
    command_line = parser()
    options = command_line.parse_args(arguments)
    try:
        instance = _scheduled(options)
        launch = Launch(options)
    except ValueError as problem:
        command_line.error(str(problem))
    return launch.run() if instance is None else launch.become(instance)


def _scheduled(options: argparse.Namespace) -> Instance | None:
    """Instance assigned to this process, if a scheduler started several poprun processes."""
    is_unspecified = options.num_instances is None and options.host is None
    options.num_instances, options.host = options.num_instances or 1, options.host or "localhost"
    if not is_unspecified or options.scheduler == "none":
        return None
    try:
        name = None if options.scheduler == "auto" else options.scheduler
        counts = (options.num_replicas, options.ipus_per_replica, options.adjacent_replicas)
        instance = scheduled(*counts, timeout=options.timeout, name=name)
    except PopxlError as problem:
        raise ValueError(str(problem)) from None
    if instance is not None:
        options.num_instances = instance.num_instances
    return instance


class _Started:
    """Filter for startup lines of JAX's CPU collectives, interleaved by several threads.

    They are not shown. If one starts in the middle of another, the rest of that follows later.
    """

    _BEGIN = b"[Gloo] Rank "
    _PIECES = re.compile(rb"(\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of [^:]*: |\d|\s)*")

    def __init__(self) -> None:
        self._unfinished = 0

    def is_startup_line(self, line: bytes) -> bool:
        """Whether an output line is a startup message, given all earlier lines."""
        unfinished = self._unfinished + line.count(self._BEGIN)
        is_startup = unfinished > 0 and self._PIECES.fullmatch(line) is not None
        if is_startup:
            self._unfinished = unfinished - 1
        return is_startup


def _not_started(command: Sequence[str], problem: OSError) -> str:
    """Error message for a program that cannot be started, including a remedy if known."""
    remedy = f" Write `python` before it: poprun … python {shlex.join(command)}" if command[0].endswith(".py") else ""
    return f"{command[0]!r} cannot be started: {problem.strerror}.{remedy}"


class _End(NamedTuple):
    """Outcome of all instances: exit code, message, and whether an instance failed on its own."""

    code: int
    message: str
    failed: bool = False


class Launch:
    """Launch of a program, including restarts after failures.

    Raises:
        ValueError: if they do not fit together.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._command: list[str] = options.command[options.command[:1] == ["--"] :]
        self._hosts = [host.strip() for host in options.host.split(",") if host.strip()]
        self._count: int = options.num_instances
        self._variables = variables_of(options)
        replicas = self._count if options.num_replicas is None else options.num_replicas
        if not self._command:
            raise ValueError(
                "there is no program to run. Write it after the options: poprun --num-instances 2 python a.py"
            )
        self._replicas: int = replicas
        if not self._is_possible_count(self._count):
            adjacent = options.adjacent_replicas
            raise ValueError(
                f"--num-replicas {replicas} cannot be shared out evenly among --num-instances {self._count}"
                f"{f' with --adjacent-replicas {adjacent}' if adjacent else ''}; choose a multiple of it, or so many "
                "instances that each gets a stage, or several, of replicas with several devices (--ipus-per-replica)."
            )
        if not self._hosts or self._count % len(self._hosts):
            raise ValueError(
                f"--num-instances {self._count} cannot be shared out evenly among the {len(self._hosts)} machines of "
                "--host; choose a multiple of their number."
            )
        self._least: int = self._count if options.min_instances is None else options.min_instances
        if self._least > self._count:
            raise ValueError(f"--min-instances {self._least} is more than --num-instances {self._count}.")
        if options.only_output_from_instance not in (None, *range(self._count)):
            raise ValueError(
                f"--only-output-from-instance {options.only_output_from_instance}: there is no such instance; their "
                f"numbers are 0 to {self._count - 1}."
            )
        self._lock = threading.Lock()

    def become(self, instance: Instance) -> int:
        """Replace this process by the program, as one instance under a scheduler."""
        variables = _for_instance(instance) | self._variables | instance.environment()
        if self._options.verbose:
            _log(f"instance {instance.instance_index} of {instance.num_instances}: {shlex.join(self._command)}")
        try:
            os.execvpe(self._command[0], self._command, os.environ | variables)
        except OSError as problem:
            _log(_not_started(self._command, problem))
            return 127

    def run(self) -> int:
        """Start all instances and wait for their end; restart after failures, up to the limit. Return the exit code."""
        for restart in range(self._options.max_restarts + 1):
            end = self._once(restart)
            if not end.failed or restart == self._options.max_restarts:
                break
            self._count = self._next_count()
            _log(
                f"{end.message} Starting again, {restart + 1} of {self._options.max_restarts}, with {self._count} "
                f"instance{'s' * (self._count > 1)}."
            )
        if end.message:
            _log(end.message)
        return end.code

    def _next_count(self) -> int:
        """Instance count for a restart: fewer, if permitted and divisible by replicas and machines."""
        fewer = range(self._count - 1, self._least - 1, -1)
        return next((n for n in fewer if self._is_possible_count(n) and not n % len(self._hosts)), self._count)

    def _is_possible_count(self, count: int) -> bool:
        """Whether so many instances can get equal shares."""
        try:
            self._instance(0, count)
        except ValidationError:
            return False
        return True

    def _instance(self, index: int, count: int, **fields: Any) -> Instance:
        """Instance description: one of `count` instances."""
        return Instance(
            instance_index=index,
            num_instances=count,
            num_total_replicas=self._replicas,
            num_ipus_per_replica=self._options.ipus_per_replica,
            adjacent_replicas=self._options.adjacent_replicas,
            **fields,
        )

    def _once(self, restart: int) -> _End:
        """Start all instances and wait for their end."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._token = secrets.token_hex(16)
        self._variables["POPRUN_RESTARTS"] = str(restart)
        is_local = all(map(_is_this_machine, self._hosts))
        address = LOOPBACK if is_local else socket.getfqdn()
        ends: Ends = queue.SimpleQueue()

        def failed(index: int) -> None:
            ends.put((index, None))

        def interrupted(number: int, frame: FrameType | None) -> None:
            ends.put((None, -number))

        rendezvous = RendezvousServer(
            self._count, self._options.timeout, address if is_local else "", self._token, failed
        )
        heeded = (n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN)
        before = [(number, signal.signal(number, interrupted)) for number in heeded]
        readers: list[threading.Thread] = []
        try:
            for index in range(self._count):
                readers += self._start(index, address, f"{address}:{rendezvous.port}", ends)
            return self._watch(rendezvous, ends)
        except OSError as problem:
            return _End(127, _not_started(self._command, problem))
        finally:
            self._stop()
            rendezvous.close()
            for reader in readers:
                reader.join(1.0)  # not longer: children of an instance may hold its output open
            for number, handler in before:
                signal.signal(number, handler)

    def _watch(self, rendezvous: RendezvousServer, ends: Ends) -> _End:
        """Wait for all instances to end, or the first failure."""
        for number_of_ended in range(self._count):
            try:
                index, code = ends.get(timeout=self._options.timeout if number_of_ended else None)
            except queue.Empty:
                self._say_who_runs_on()
                index, code = ends.get()
            if index is None:
                number = signal.Signals(-(code or 0))
                is_broken_pipe = number == signal.SIGPIPE  # so no report is possible
                return _End(128 + number, "" if is_broken_pipe else f"{number.name}: all instances are stopped.")
            if code != 0:
                index, code = self._first_to_fail(rendezvous, index, code)
                outcome = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
                others = "; the others are stopped" if self._count > 1 else ""
                sentences = [f"instance {index} {outcome}{others}.", *rendezvous.problems[:1]]
                return _End(128 - code if code < 0 else code, " ".join(sentences), failed=True)
            rendezvous.note_exit(index, code)
        if self._count > 1 and not rendezvous.any_arrived:
            return _End(
                0,
                f"each of the {self._count} instances ran the program by itself: none made a session of a `popxl.Ir("
                "replication='popdist')`, or called `popdist.init()`.",
            )
        return _End(0, "")

    def _say_who_runs_on(self) -> None:
        """Report instances still running after other instances ended. Not a failure: an instance may have separate
        work."""
        running = {i for i, process in self._processes.items() if process.returncode is None}
        ended = self._processes.keys() - running
        _log(
            f"instances that have ended: {', '.join(map(str, sorted(ended)))}; that still run, "
            f"{self._options.timeout:g} seconds later: {', '.join(map(str, sorted(running)))}. If these wait for what "
            "only all compute together, it will not come: each instance has to run the program as many times as "
            "the others. Then stop poprun."
        )

    def _first_to_fail(self, rendezvous: RendezvousServer, index: int, code: int | None) -> tuple[int, int]:
        """Index and exit code of the first failed instance. Instance `index` ended first, or announced its end.

        It may have failed because another instance ended, which takes longer. That one is left to end on its own, and
        so is instance 0, without which it could not. JAX aborts processes that have lost instance 0.
        """
        latest = time.monotonic() + _MOMENT
        while time.monotonic() < latest:
            time.sleep(_MOMENT / 20)
            ended = {i: process.returncode for i, process in self._processes.items() if process.returncode is not None}
            killed = [i for i in (index, *ended) if ended.get(i, 0) < 0 and ended[i] != -signal.SIGABRT]
            if killed:
                return killed[0], ended[killed[0]]
            if len(ended) == len(self._processes):
                break
        if code is None:
            self._stop(but={0, *rendezvous.leaving})
        for other in rendezvous.leaving:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if exit_code := self._processes[other].wait(GRACE):  # JAX may abort the process after an exception
                    return other, 1 if exit_code == -signal.SIGABRT else exit_code
        return index, code or 1

    # Starting -------------------------------------------------------------------------------------------------------

    def _start(self, index: int, address: str, launcher: str, ends: Ends) -> list[threading.Thread]:
        """Start an instance. Returns threads that read its output."""
        share = self._count // len(self._hosts)
        host = self._hosts[index // share]
        instance = self._instance(
            index,
            self._count,
            local_instance_index=index % share,
            launcher=launcher,
            host=address if _is_this_machine(host) else host,
            token=self._token,
        )
        variables = _for_instance(instance)
        if instance.is_single_host:  # of NCCL, by which GPUs meet: it would take an address of a network
            variables["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
        variables |= self._variables | instance.environment()
        command = self._command if _is_this_machine(host) else _over_ssh(host, self._command, variables)
        if self._options.verbose:
            _log(f"instance {index} on {host}: {shlex.join(command)}")
        is_visible = self._options.only_output_from_instance in (None, index)
        is_tagged = is_visible and self._options.tag_output and self._count > 1
        output = subprocess.PIPE if is_tagged else None if is_visible else subprocess.DEVNULL
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL if _is_this_machine(host) else subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # a process group: children end together
        )
        self._processes[index] = process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # ssh has failed, of which its exit code will tell
                os.write(process.stdin.fileno(), f"{self._token}\n".encode())
        threading.Thread(target=lambda: ends.put((index, process.wait())), daemon=True).start()
        streams = ((process.stdout, 1), (process.stderr, 2)) if is_tagged else ()
        readers = [threading.Thread(target=self._forward, args=(index, *pair, ends), daemon=True) for pair in streams]
        for reader in readers:
            reader.start()
        return readers

    def _forward(self, index: int, source: IO[bytes], target: int, ends: Ends) -> None:
        """Copy an instance's output to a file descriptor, prefixing each line with its number."""
        with source:
            try:
                self._tag(index, source, target)
            except BrokenPipeError:  # the reader is gone, so all are stopped
                ends.put((None, -signal.SIGPIPE))
                while os.read(source.fileno(), 1 << 16):  # else the instance would fail first, and say so
                    pass

    def _tag(self, index: int, source: IO[bytes], target: int) -> None:
        tag = f"[{index}] ".encode()
        unfinished: list[bytes] = []  # parts of a line, which may be long
        started = _Started()
        while chunk := os.read(source.fileno(), 1 << 16):
            *ends, rest = re.split(rb"(?<=[\n\r])(?!\n)", chunk)
            lines = [b"".join((*unfinished, end)) for end in ends[:1]] + ends[1:]
            self._write(target, b"".join(tag + line for line in lines if not started.is_startup_line(line)))
            unfinished = [*([] if ends else unfinished), rest]
        if any(unfinished):
            self._write(target, tag + b"".join(unfinished) + b"\n")

    def _write(self, target: int, text: bytes) -> None:
        remaining = memoryview(text)
        with self._lock:
            while remaining:
                remaining = remaining[os.write(target, remaining) :]

    # Stopping -------------------------------------------------------------------------------------------------------

    def _stop(self, but: Collection[int] = ()) -> None:
        """Terminate all instances and their children, except `but`."""
        stopped = [process for index, process in self._processes.items() if index not in but]
        for process in stopped:
            if process.stdin is not None:
                process.stdin.close()  # on another machine, the sign to end
            _send(process, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for process in stopped:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _send(process, signal.SIGKILL)
            process.wait()


def _for_instance(instance: Instance) -> dict[str, str]:
    """Environment variables controlling an instance's execution."""
    # More than it takes: each has a thread, and those that wait for other instances leave some to say so.
    devices = str(max(8, instance.num_local_replicas * instance.share.stages))
    return {"PYTHONUNBUFFERED": "1", "POPXL_CPU_DEVICES": os.environ.get("POPXL_CPU_DEVICES", devices)}


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, with all its children
        os.killpg(process.pid, number)


def _over_ssh(host: str, command: Sequence[str], variables: dict[str, str]) -> list[str]:
    """SSH command that runs `command` on another machine, and ends it when standard input closes.

    It reads the token from there, because other users of either machine may see command lines.
    """
    handed_on = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV") if name in os.environ}
    settings = [f"{name}={value}" for name, value in (handed_on | variables).items() if name != _TOKEN]
    script = (
        f"cd {shlex.quote(os.getcwd())} || exit 1; read -r {_TOKEN} || exit 1; export {_TOKEN}; exec 3<&0; "
        f"{shlex.join(['env', *settings, *command])} </dev/null 3<&- & "
        "program=$!; { cat <&3; kill $program; } >/dev/null 2>&1 & wait $program"
    )
    return ["ssh", "-o", "BatchMode=yes", host, script]


def _is_this_machine(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


def _log(message: str) -> None:
    print(f"poprun: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
