"""`poprun`: start several instances of a program, which run it together, and look after them until they have ended."""

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

from popxl.base.distributed import LOOPBACK, PREFIX, Instance
from popxl.errors import PopxlError
from runtime.meetings import Meetings
from runtime.pipes import quiet_in_a_pipe
from runtime.schedulers import NAMES, scheduled
from runtime.versions import ShowVersions

GRACE = 5.0
"""For how many seconds an instance may tidy up, once it has been told to end."""

Ends = queue.SimpleQueue[tuple[int | None, int | None]]
"""An instance, and how it has ended, or `None` if it says that it fails; or `None`, and a signal that poprun got."""

_TOKEN = PREFIX + "TOKEN"
"""The environment variable that no list of processes should show."""

_MOMENT = 0.2
"""For how many seconds a process that has been killed may seem to live, though others see that it has gone."""

_EXAMPLES = """\
examples:
  poprun --num-instances 2 --num-replicas 8 python train.py --epochs 3
      Two processes on this machine, with four replicas each.

  poprun --host node0,node1 --num-instances 4 --num-replicas 8 -x WANDB_API_KEY python train.py
      Two processes on each of two machines. They are reached by ssh, which must not ask for a password, and have the
      same folders with the same programs.

  poprun --num-instances 4 --num-replicas 4 --max-restarts 10 python train.py
      If a process dies, all four start again, up to ten times. The program goes on from its last checkpoint:
      `if os.path.exists("state"): session.load_checkpoint("state")`.

  srun --ntasks 64 poprun --num-replicas 256 python train.py
      Slurm starts 64 processes, and each becomes an instance. So do those of Open MPI (mpirun), of an indexed job of
      Kubernetes, and of a TPU pod: where neither --num-instances nor --host is given, poprun asks who has started it.

In the program:
  import popdist, popxl
  ir = popxl.Ir(replication="popdist" if popdist.isPopdistEnvSet() else 1)
  ...
  if popdist.getInstanceIndex() == 0:
      print("Only one instance says this.")

Each instance builds the same program. Host arrays of streams are for its own replicas; the data of variables is for
all, and after a run all instances have to ask for it, also if only one saves it.

The first instance to fail ends the others, and its exit code becomes that of poprun: 128 plus the number of the
signal, if it was killed by one. Stopping poprun, with Ctrl-C for example, stops all, and so does the end of what reads
their output. Instances have no standard input.

Who can reach what:
  If all instances are on this machine, poprun and all instances listen on the loopback address (127.0.0.1) only. Other
  machines reach nothing; all users of this machine reach the ports.
  With --host and other machines, poprun, JAX's coordinator in instance 0, and the exchange between devices listen on
  the networks of their machines, at ports that the system chooses. poprun closes connections that do not know its
  secret. JAX's coordinator and the exchange (gloo on CPUs, NCCL on GPUs) know no secrets and encrypt nothing: whoever
  reaches their ports can disturb the program, and whoever sees the network can read what it computes. So use a network
  whose users you trust, behind a firewall.
"""

_WITHOUT_MEANING = (
    "--num-ilds --vipu-server-host --vipu-server-port --vipu-server-timeout --vipu-partition --vipu-partition-attempts "
    "--vipu-cluster --vipu-allocation --update-partition --reset-partition --remove-partition --numa-aware "
    "--executable-cache-path --print-topology --offline-mode --version-format"
).split()


@quiet_in_a_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Run poprun with these arguments, by default those of the command line. Returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        instance = _scheduled(options)
        launch = Launch(options)
    except ValueError as problem:
        parser.error(str(problem))
    return launch.run() if instance is None else launch.become(instance)


def _scheduled(options: argparse.Namespace) -> Instance | None:
    """The instance that this process is to be, if a scheduler has started several of poprun itself."""
    is_asked = options.num_instances is None and options.host is None
    options.num_instances, options.host = options.num_instances or 1, options.host or "localhost"
    if not is_asked or options.scheduler == "none":
        return None
    try:
        name = None if options.scheduler == "auto" else options.scheduler
        return scheduled(options.num_replicas, options.ipus_per_replica, options.timeout, name)
    except PopxlError as problem:
        raise ValueError(str(problem)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "poprun",
        usage="poprun [options] program [arguments of the program]",
        description="Start several instances of a program, which run it together; each drives a share of the replicas.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--num-instances", type=_positive, metavar="N", help="how many processes to start (default: 1)")
    add(
        "--num-replicas",
        type=_positive,
        metavar="N",
        help="how many replicas there are in all; instances get equal shares (default: one for each instance)",
    )
    add(
        "--ipus-per-replica",
        type=_positive,
        default=1,
        metavar="N",
        help="how many devices each replica has; on GPUs, instances on one machine get different ones (default: 1)",
    )
    add(
        "--host",
        "-H",
        metavar="HOSTS",
        help="the machines to start instances on, separated by commas; they get equal shares (default: this machine)",
    )
    add(
        "--env",
        "-x",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set an environment variable, or hand one on to other machines, for all instances; may be given again. On "
        "this machine instances have all that poprun has",
    )
    add(
        "--timeout",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long instances wait for each other: for all to start, where variables are copied to or from devices, "
        "in `popdist.synchronize`, and at the end (default: 300)",
    )
    add(
        "--tag-output",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="begin each line of output with the number of the instance (default: yes)",
    )
    add(
        "--scheduler",
        choices=("auto", "none", *NAMES),
        default="auto",
        help="which scheduler has started poprun in several processes, if neither --num-instances nor --host is given: "
        "poprun then becomes one instance. auto: whichever is there (default)",
    )
    add(
        "--max-restarts",
        type=_not_negative,
        default=0,
        metavar="N",
        help="how many times to start all instances again after one has failed; `popdist.getNumRestarts()` says which "
        "time it is (default: 0)",
    )
    add(
        "--min-instances",
        type=_positive,
        metavar="N",
        help="with --max-restarts: start fewer instances each time, as few as N, that share out the replicas evenly "
        "(default: as many as before)",
    )
    add("--only-output-from-instance", type=int, metavar="I", help="show the output of this instance only")
    add("--verbose", "-v", "--vv", action="store_true", help="say how each instance is started")
    add("--version", action=ShowVersions)
    for where in ("--mpi-global-args", "--mpi-local-args"):
        add(where, default="", metavar="ARGS", help="only `-x NAME[=VALUE]` in it is heeded, as --env")
    ignored = parser.add_argument_group("accepted, without effect", " ".join(_WITHOUT_MEANING))
    for name in _WITHOUT_MEANING:
        ignored.add_argument(name, help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait")
    return seconds


class _Started:
    """Lines in which JAX's collectives on CPUs say that they have started, by several threads through each other.

    They are not shown. With the beginning of one in the middle of another, what is left of that comes later.
    """

    _BEGIN = b"[Gloo] Rank "
    _PIECES = re.compile(rb"(\[Gloo\] Rank | is connected to | peer ranks\. |Expected number of [^:]*: |\d|\s)*")

    def __init__(self) -> None:
        self._left = 0

    def have(self, line: bytes) -> bool:
        """Whether a line of output is one of these, given all lines before it."""
        left = self._left + line.count(self._BEGIN)
        is_one = left > 0 and self._PIECES.fullmatch(line) is not None
        if is_one:
            self._left = left - 1
        return is_one


def _not_started(command: Sequence[str], problem: OSError) -> str:
    """Why a program cannot be started, and what to do where that is known."""
    remedy = f" Write `python` before it: poprun … python {shlex.join(command)}" if command[0].endswith(".py") else ""
    return f"{command[0]!r} cannot be started: {problem.strerror}.{remedy}"


class _End(NamedTuple):
    """How all instances have ended: the exit code, what there is to say, and whether one failed by itself."""

    code: int
    message: str
    failed: bool = False


class Launch:
    """The start of a program, and as many more as it may have if it fails.

    Args:
        options: those of the command line.

    Raises:
        ValueError: if they do not fit together.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._command: list[str] = options.command[options.command[:1] == ["--"] :]
        self._hosts = [host.strip() for host in options.host.split(",") if host.strip()]
        self._count: int = options.num_instances
        self._variables = _variables(options)
        replicas = self._count if options.num_replicas is None else options.num_replicas
        if not self._command:
            raise ValueError(
                "there is no program to run. Write it after the options: poprun --num-instances 2 python a.py"
            )
        if replicas % self._count:
            raise ValueError(
                f"--num-replicas {replicas} cannot be shared out evenly among --num-instances {self._count}; choose a "
                "multiple of it."
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
        self._replicas: int = replicas
        self._lock = threading.Lock()

    def become(self, instance: Instance) -> int:
        """Run the program in place of this process, as one of the instances that a scheduler has started."""
        variables = _for_instance(instance) | self._variables | instance.environment()
        if self._options.verbose:
            _say(f"instance {instance.instance_index} of {instance.num_instances}: {shlex.join(self._command)}")
        try:
            os.execvpe(self._command[0], self._command, os.environ | variables)
        except OSError as problem:
            _say(_not_started(self._command, problem))
            return 127

    def run(self) -> int:
        """Start the instances, and wait until they have ended; again, if one fails, as often as it may be.

        Returns:
            The exit code.
        """
        for restart in range(self._options.max_restarts + 1):
            end = self._once(restart)
            if not end.failed or restart == self._options.max_restarts:
                break
            self._count = self._next_count()
            _say(
                f"{end.message} Starting again, {restart + 1} of {self._options.max_restarts}, with {self._count} "
                f"instance{'s' * (self._count > 1)}."
            )
        if end.message:
            _say(end.message)
        return end.code

    def _next_count(self) -> int:
        """How many instances to start again: fewer, if that may be and they can share out replicas and machines."""
        fewer = range(self._count - 1, self._least - 1, -1)
        return next((n for n in fewer if not self._replicas % n and not n % len(self._hosts)), self._count)

    def _once(self, restart: int) -> _End:
        """Start the instances, and wait until they have ended."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._token = secrets.token_hex(16)
        self._variables["POPRUN_RESTARTS"] = str(restart)
        all_here = all(map(_is_here, self._hosts))
        here = LOOPBACK if all_here else socket.getfqdn()
        ends: Ends = queue.SimpleQueue()

        def failed(index: int) -> None:
            ends.put((index, None))

        def interrupted(number: int, frame: FrameType | None) -> None:
            ends.put((None, -number))

        meetings = Meetings(self._count, self._options.timeout, here if all_here else "", self._token, failed)
        heeded = (n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN)
        before = [(number, signal.signal(number, interrupted)) for number in heeded]
        readers: list[threading.Thread] = []
        try:
            for index in range(self._count):
                readers += self._start(index, here, f"{here}:{meetings.port}", ends)
            return self._watch(meetings, ends)
        except OSError as problem:
            return _End(127, _not_started(self._command, problem))
        finally:
            self._stop()
            meetings.close()
            for reader in readers:
                reader.join(1.0)  # no longer: what an instance has started may hold its output open
            for number, handler in before:
                signal.signal(number, handler)

    def _watch(self, meetings: Meetings, ends: Ends) -> _End:
        """Wait for the instances to end, or for the first to fail."""
        for number_of_ended in range(self._count):
            try:
                index, code = ends.get(timeout=self._options.timeout if number_of_ended else None)
            except queue.Empty:
                self._say_who_runs_on()
                index, code = ends.get()
            if index is None:
                number = signal.Signals(-(code or 0))
                nobody_reads = number == signal.SIGPIPE  # so nobody is told
                return _End(128 + number, "" if nobody_reads else f"{number.name}: all instances are stopped.")
            if code != 0:
                index, code = self._first_to_fail(meetings, index, code)
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
                others = "; the others are stopped" if self._count > 1 else ""
                said = [f"instance {index} {how}{others}.", *meetings.problems[:1]]
                return _End(128 - code if code < 0 else code, " ".join(said), failed=True)
            meetings.ended(index, code)
        if self._count > 1 and not meetings.anybody_came:
            return _End(
                0,
                f"each of the {self._count} instances ran the program by itself: none made a session of a `popxl.Ir("
                "replication='popdist')`, or called `popdist.init()`.",
            )
        return _End(0, "")

    def _say_who_runs_on(self) -> None:
        """An instance may have work of its own to do, so this is no failure."""
        running = {i for i, process in self._processes.items() if process.returncode is None}
        ended = self._processes.keys() - running
        _say(
            f"instances that have ended: {', '.join(map(str, sorted(ended)))}; that still run, "
            f"{self._options.timeout:g} seconds later: {', '.join(map(str, sorted(running)))}. If these wait for what "
            "only all compute together, it will not come: each instance has to run the program as many times as "
            "the others. Then stop poprun."
        )

    def _first_to_fail(self, meetings: Meetings, index: int, code: int | None) -> tuple[int, int]:
        """The instance that failed first, and how. `index` has ended first, or says that it is about to.

        It may have died of the end of another one, which takes longer. That one is left to end by itself, and so is
        instance 0, without which it could not. JAX aborts processes that have lost instance 0.
        """
        time.sleep(_MOMENT)
        ended = {i: process.returncode for i, process in self._processes.items() if process.returncode is not None}
        killed = [i for i in (index, *ended) if ended.get(i, 0) < 0 and ended[i] != -signal.SIGABRT]
        if killed:
            return killed[0], ended[killed[0]]
        if code is None:
            self._stop(but={0, *meetings.leaving})
        for other in meetings.leaving:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if how := self._processes[other].wait(GRACE):  # after an exception, JAX may abort what is left of it
                    return other, 1 if how == -signal.SIGABRT else how
        return index, code or 1

    # Starting -------------------------------------------------------------------------------------------------------

    def _start(self, index: int, here: str, launcher: str, ends: Ends) -> list[threading.Thread]:
        """Start an instance. Returns what reads its output."""
        share = self._count // len(self._hosts)
        host = self._hosts[index // share]
        instance = Instance(
            instance_index=index,
            num_instances=self._count,
            local_instance_index=index % share,
            num_total_replicas=self._replicas,
            num_ipus_per_replica=self._options.ipus_per_replica,
            launcher=launcher,
            host=here if _is_here(host) else host,
            token=self._token,
        )
        variables = _for_instance(instance)
        if instance.all_are_here:  # of NCCL, by which GPUs meet: it would take an address of a network
            variables["NCCL_SOCKET_IFNAME"] = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
        variables |= self._variables | instance.environment()
        command = self._command if _is_here(host) else _over_ssh(host, self._command, variables)
        if self._options.verbose:
            _say(f"instance {index} on {host}: {shlex.join(command)}")
        is_shown = self._options.only_output_from_instance in (None, index)
        is_read = is_shown and self._options.tag_output and self._count > 1
        output = subprocess.PIPE if is_read else None if is_shown else subprocess.DEVNULL
        process = subprocess.Popen(
            command,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL if _is_here(host) else subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that all that it starts can be stopped with it
        )
        self._processes[index] = process
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # ssh has failed, of which its exit code will tell
                os.write(process.stdin.fileno(), f"{self._token}\n".encode())
        threading.Thread(target=lambda: ends.put((index, process.wait())), daemon=True).start()
        streams = ((process.stdout, 1), (process.stderr, 2)) if is_read else ()
        readers = [threading.Thread(target=self._forward, args=(index, *pair, ends), daemon=True) for pair in streams]
        for reader in readers:
            reader.start()
        return readers

    def _forward(self, index: int, source: IO[bytes], target: int, ends: Ends) -> None:
        """Copy the output of an instance to a file descriptor, with its number at the beginning of each line."""
        with source:
            try:
                self._tag(index, source, target)
            except BrokenPipeError:  # nobody reads on, so all are stopped
                ends.put((None, -signal.SIGPIPE))
                while os.read(source.fileno(), 1 << 16):  # else the instance would fail first, and say so
                    pass

    def _tag(self, index: int, source: IO[bytes], target: int) -> None:
        tag = f"[{index}] ".encode()
        begun: list[bytes] = []  # pieces of a line, which may be long
        started = _Started()
        while chunk := os.read(source.fileno(), 1 << 16):
            *ends, rest = re.split(rb"(?<=[\n\r])(?!\n)", chunk)
            lines = [b"".join((*begun, end)) for end in ends[:1]] + ends[1:]
            self._write(target, b"".join(tag + line for line in lines if not started.have(line)))
            begun = [*([] if ends else begun), rest]
        if any(begun):
            self._write(target, tag + b"".join(begun) + b"\n")

    def _write(self, target: int, text: bytes) -> None:
        left = memoryview(text)
        with self._lock:
            while left:
                left = left[os.write(target, left) :]

    # Stopping -------------------------------------------------------------------------------------------------------

    def _stop(self, but: Collection[int] = ()) -> None:
        """End all instances, but for some, and what they have started."""
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
    """The environment variables that say how an instance is to run."""
    # More than it takes: each has a thread, and those that wait for other instances leave some to say so.
    devices = str(max(8, instance.num_local_replicas * instance.num_ipus_per_replica))
    return {"PYTHONUNBUFFERED": "1", "POPXL_CPU_DEVICES": os.environ.get("POPXL_CPU_DEVICES", devices)}


def _send(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended, and so has all that it had started
        os.killpg(process.pid, number)


def _over_ssh(host: str, command: Sequence[str], variables: dict[str, str]) -> list[str]:
    """A command that runs another one on another machine, and ends it when the standard input is closed.

    It reads the token from there, as others on either machine may see what a command says.
    """
    handed_on = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "VIRTUAL_ENV") if name in os.environ}
    settings = [f"{name}={value}" for name, value in (handed_on | variables).items() if name != _TOKEN]
    script = (
        f"cd {shlex.quote(os.getcwd())} || exit 1; read -r {_TOKEN} || exit 1; export {_TOKEN}; exec 3<&0; "
        f"{shlex.join(['env', *settings, *command])} </dev/null 3<&- & "
        "program=$!; { cat <&3; kill $program; } >/dev/null 2>&1 & wait $program"
    )
    return ["ssh", "-o", "BatchMode=yes", host, script]


def _is_here(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn())


def _variables(options: argparse.Namespace) -> dict[str, str]:
    """The environment variables that instances are to have; an unset one is an error."""
    asked = list(options.env)
    for arguments in (options.mpi_global_args, options.mpi_local_args):
        words = shlex.split(arguments)
        asked += [value for flag, value in zip(words, words[1:], strict=False) if flag == "-x"]
    settings: dict[str, Any] = dict(
        each.split("=", 1) if "=" in each else (each, os.environ.get(each)) for each in asked
    )
    missing = [name for name, value in settings.items() if value is None]
    if missing:
        raise ValueError(
            f"--env {missing[0]}: there is no such environment variable. Write {missing[0]}=VALUE to set it."
        )
    return settings


def _say(message: str) -> None:
    print(f"poprun: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
