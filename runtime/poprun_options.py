"""Command line of `poprun`: options and help texts. `runtime.poprun` implements these."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from runtime.schedulers import NAMES
from runtime.versions import ShowVersions

Number = TypeVar("Number", int, float)

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

  poprun --host node0,node1,node2,node3 --num-instances 4 --num-replicas 8 --ipus-per-replica 4 python train.py
      A pipeline of four stages over four machines: each process drives one stage of all eight replicas.

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
  secret. JAX's coordinator and the exchange (gloo on CPUs, NCCL on GPUs) know no secrets and encrypt nothing: any
  process that reaches their ports can disturb the program, and any machine that sees the network can read what it
  computes. So use a network whose users you trust, behind a firewall.
"""

_WITHOUT_MEANING = (
    "--num-ilds --vipu-server-host --vipu-server-port --vipu-server-timeout --vipu-partition --vipu-partition-attempts "
    "--vipu-cluster --vipu-allocation --update-partition --reset-partition --remove-partition --numa-aware "
    "--executable-cache-path --print-topology --offline-mode --version-format"
).split()


class _Parser(argparse.ArgumentParser):
    """Parser accepting option values with a leading dash: `--mpi-global-args --tag-output`."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_args(self._with_values(sys.argv[1:] if args is None else args), namespace)

    def _with_values(self, arguments: Sequence[str]) -> list[str]:
        """Join options with dash-prefixed values into single arguments. Program arguments stay unchanged."""
        left, found = list(arguments), []
        while left and left[0].startswith("-"):
            name = left.pop(0)
            action = self._option_string_actions.get(name)
            takes_value = action is not None and action.nargs is None
            if takes_value and left and left[0].startswith("-"):
                found.append(f"{name}={left.pop(0)}")
            else:
                found += [name, *([left.pop(0)] if takes_value and left else [])]
        return found + left


def parser() -> argparse.ArgumentParser:
    """Argument parser of `poprun`."""
    parser = _Parser(
        "poprun",
        usage="poprun [options] program [arguments of the program]",
        description="Start several instances of a program, which run it together; each drives a share of the replicas.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # an abbreviation of several of these options may be an option of the program
    )
    _add_shares(parser.add_argument)
    _add_runs(parser.add_argument)
    ignored = parser.add_argument_group("accepted, without effect", " ".join(_WITHOUT_MEANING))
    for name in _WITHOUT_MEANING:
        ignored.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_shares(add: Callable[..., Any]) -> None:
    """Options of the instances, and their shares of replicas and devices."""
    add("--num-instances", type=_count, metavar="N", help="how many processes to start (default: 1)")
    add(
        "--num-replicas",
        type=_count,
        metavar="N",
        help="how many replicas there are in all; instances get equal shares (default: one for each instance)",
    )
    add(
        "--ipus-per-replica",
        type=_count,
        default=1,
        metavar="N",
        help="how many devices each replica has; on GPUs, instances on one machine get different ones (default: 1)",
    )
    add(
        "--adjacent-replicas",
        type=_count,
        default=0,
        metavar="N",
        help="how many replicas have their devices for a stage of a pipeline side by side. With 1, an instance gets "
        "whole replicas if it can; with all, a stage, or several, of all (default: 1 if instances can get whole "
        "replicas, else all)",
    )
    add(
        "--host",
        "-H",
        metavar="HOSTS",
        help="the machines to start instances on, separated by commas; they get equal shares (default: this machine)",
    )


def _add_runs(add: Callable[..., Any]) -> None:
    """Options of how instances start, wait for each other, and write."""
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
        type=partial(_count, least=0),
        default=0,
        metavar="N",
        help="how many times to start all instances again after one has failed; `popdist.getNumRestarts()` says which "
        "time it is (default: 0)",
    )
    add(
        "--min-instances",
        type=_count,
        metavar="N",
        help="with --max-restarts: start fewer instances each time, as few as N, that share out the replicas evenly "
        "(default: as many as before)",
    )
    add("--only-output-from-instance", type=int, metavar="I", help="show the output of this instance only")
    add("--verbose", "-v", "--vv", action="store_true", help="say how each instance is started")
    add("--version", action=ShowVersions)
    for where in ("--mpi-global-args", "--mpi-local-args"):
        add(where, default="", metavar="ARGS", help="only `-x NAME[=VALUE]` in it is heeded, as --env")


def _parse_number(kind: type[Number], text: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' if kind is int else ''}number") from None


def _count(text: str, least: int = 1) -> int:
    number = _parse_number(int, text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is below {least}")
    return number


def _seconds(text: str) -> float:
    seconds = _parse_number(float, text)
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text} is no time to wait")
    return seconds


def variables_of(options: argparse.Namespace) -> dict[str, str]:
    """Environment variables for instances; raises an error for unset variables."""
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
