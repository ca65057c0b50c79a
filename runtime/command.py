"""The command line of `popxl`, from `show` to `calibrate`. Invoked by `popxl.__main__`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from popxl.errors import PopxlError
from runtime.calibration import calibrate
from runtime.memory_plans.budget import bytes_of
from runtime.memory_plans.search import COMPILATIONS
from runtime.pipes import exit_on_broken_pipe
from runtime.subcommands import CommandArgs, check_program, diff, fail, function_of, plan, report, show, tune
from runtime.targets.devices import ask_for_cpu_devices
from runtime.targets.offline import FORMS, Target
from runtime.versions import ShowVersions
from runtime.watched_runs import exit_without_threads

_EXAMPLES = """\
examples:
  popxl show train.py                       print the graphs of the program, and the memory that they need
  popxl show --pictures plots train.py      the same, with pictures of the memory in the folder plots
  popxl check train.py                      print probable mistakes between replicas, and how they hold each value
  popxl check train.py --json               the same, as JSON
  popxl check train.py --run                also run it beside the same program on one replica, and compare results
  popxl report train.py --layers 12         run the program; options after the file are its own
  popxl report --pages pages train.py       the same, with the reports as HTML pages in the folder pages
  popxl report --costs costs train.py       the same, with the costs in the folder costs, for `popxl diff`
  popxl show train.py --target "tpu v5e"    compile it for a TPU elsewhere, and print the memory that it needs there
  popxl report train.py --target "gpu h100:8"   the same for eight GPUs, with the reports
  popxl report train_jax.py:step --target "gpu h100:8"   the first call of a JAX function of the program
  popxl tune train.py --target "tpu v5e:4x4"    try the choices of the program; print those that fit, and the fastest
  popxl diff costs/session_0.json train.py    compare costs with those of a file; --exit-code returns 1 if they differ
  popxl plan train.py --target "gpu h100" --budget 40GB   plan saved activations within 40 GB
  popxl calibrate --save cpu.json           measure this device, for times with POPXL_CHIP=cpu.json
  popxl --version                           versions and devices, for a bug report

--target may come right after the file, too; a program that has such an option itself gets the second one.
"""

_SHOW = """\
Print the graphs of a program, and the memory that they need, without a run. The program runs up to its first
`session.run`; its sessions compile and run nothing.
"""

_PLAN = """\
Plan which activations training steps save, recompute or offload, within a memory budget per device. One plan covers
each `train_step` of the program, and each `autodiff` with `memory`; with FILE.py:NAME, the `value_and_grad` in the
jitted function of that name. It is compiled for a machine that can be elsewhere. Nothing is run.
"""

_CHECK = """\
Print probable mistakes between replicas, such as a missing all-reduce, and how replicas hold each value. The program
runs up to its first `session.run`; its sessions compile and run nothing. Two options are given directly before or after
the file. With --json, all of that is printed as JSON, and what the program prints goes to standard error. With --run,
each Ir also runs on the CPU, beside the same program on one replica, and differences are printed: `popxl.choice` then
gives all axes the size one, or --run="ARGUMENTS" passes arguments that do so.
"""

_TUNE = """\
Compile a program with each combination of its choices, `popxl.choice(name, options)`, and print those that fit into a
machine's memory, and the fastest by estimate. The machine can be elsewhere; nothing is run.
"""

_REPORT = """\
Run a program, and print a report of each session. FILE.py:NAME runs it up to the first call of its JAX function NAME,
and prints memory, communication and cost of that function, for arguments of these shapes and shardings.
"""

_DIFF = """\
Compare memory, bytes, operations, kernels and collectives of two programs, both compiled for one machine. Differences
are listed in all, by argument, graph and source line. Programs are files of Python, of `Ir.save`, or costs, written by
`popxl report --costs FOLDER` or `session.cost().save_budget("costs.json")`.
"""

_CALIBRATE = """\
Measure the device of this machine, in less than a minute, and write its figures to a file. With `POPXL_CHIP=FILE`,
reports and costs on this device use these figures.
"""

_REMOVED = {
    "foresee": "`popxl report FILE.py --target MACHINE` compiles the program and prints the exact memory that a chip "
    "needs; `popxl tune FILE.py --target MACHINE` does so for each of its choices"
}
"""Commands of earlier versions, and what to use instead."""

_RENAMED = {"fit": "tune"}
"""Earlier names of commands, which still work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments`, by default `sys.argv`. Returns the exit code."""
    return exit_without_threads(_interruptible(arguments))


@exit_on_broken_pipe
def _interruptible(arguments: Sequence[str] | None) -> int:
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except _WrongUse as problem:
        return fail(str(problem), 2)
    except KeyboardInterrupt:
        return fail("interrupted.", 130)


class _WrongUse(Exception):
    """What is wrong with the arguments, for an exit with 2."""


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in _REMOVED:
        raise _WrongUse(f"`{arguments[0]}` was removed: {_REMOVED[arguments[0]]}.")
    arguments = [*(_RENAMED.get(each, each) for each in arguments[:1]), *arguments[1:]]
    arguments, check_fields = _options_of_check(_options_of_plan(arguments))
    options = _parser().parse_args(arguments)
    saved: Path | None = getattr(options, "save", None)
    if saved is not None and (saved.is_dir() or not os.access(saved.parent, os.W_OK)):
        raise _WrongUse(f"--save {saved}: expected a file in a folder that exists and can be written.")
    if options.command == "calibrate":
        print("Measuring, for less than a minute.", file=sys.stderr, flush=True)
        print(calibrate(options.save))
        return 0
    if options.command == "diff":
        return diff(options.old, options.new, options.target, options.exit_code)
    if options.target is None and options.command != "check":
        options.target, options.args = _target_of(options.args)
    file, function = _program_of(options)
    with _problems_of("--target"):
        target = None if options.target is None else Target(options.target)
        if function and target is not None:
            ask_for_cpu_devices(target.count)  # devices for the program's arrays
        if target is not None:
            target.devices  # noqa: B018  # that there is no compiler is said now
    folders = (options.pictures, options.pages, options.costs)
    asked = CommandArgs(file, options.args, *folders, target, function, **check_fields)
    with _folder("pictures", asked.pictures), _folder("pages", asked.pages), _folder("costs", asked.costs):
        if options.command == "plan":
            with _problems_of("plan"):
                budget = bytes_of(options.budget, "--budget")
            return plan(asked, budget, saved, options.compilations)
        return {"show": show, "check": check_program, "report": report, "tune": tune}[options.command](asked)


@contextmanager
def _problems_of(what: str) -> Iterator[None]:
    """Say of which option or command a wrong value is."""
    try:
        yield
    except (ValueError, PopxlError) as problem:
        raise _WrongUse(f"{what}: {problem}") from None


def _program_of(options: argparse.Namespace) -> tuple[Path, str]:
    """File of the program, and the function that is named behind it, or ""."""
    name, function = function_of(options.file)
    if function and options.command not in ("report", "plan"):
        takers = "`report`, `plan` and `diff`"
        raise _WrongUse(f"{options.command}: {options.file!r} names a function, which only {takers} take.")
    file = Path(name)
    if not file.is_file():
        why = "is a folder" if file.is_dir() else "does not exist"
        raise _WrongUse(f"{name!r} {why}; expected a Python file.")
    if file.read_bytes()[:1] == b"{":
        hint = "; `popxl diff` takes the first two" if options.command in ("show", "report") else ""
        raise _WrongUse(f"{name!r} is a saved program, costs or a notebook{hint}; expected a Python file.")
    return file, function


@contextmanager
def _folder(option: str, folder: Path | None) -> Iterator[None]:
    """Make a folder; if nothing was written into it, remove it afterwards."""
    new = [] if folder is None else [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise _WrongUse(f"--{option} {folder}: {problem.strerror}.") from None
    try:
        yield
    finally:
        with suppress(OSError):  # of a folder that is not empty
            for each in new:
                each.rmdir()


def _options_of_plan(arguments: Sequence[str]) -> Sequence[str]:
    """Move options of `plan` from behind the file to before it, unless `--budget` precedes the file already."""
    file = next((i for i, each in enumerate(arguments) if function_of(each)[0].endswith(".py")), 0)
    if arguments[:1] != ["plan"] or not file or any(each.startswith("--budget") for each in arguments[:file]):
        return arguments
    end = file + 1
    own = ("--target", "--budget", "--save", "--pages", "--compilations")
    while end < len(arguments) and arguments[end].partition("=")[0] in own:
        end += 1 if "=" in arguments[end] else 2
    if end > len(arguments):  # the value of the last one is missing
        return arguments
    return ["plan", *arguments[file + 1 : end], *arguments[1 : file + 1], *arguments[end:]]


def _options_of_check(arguments: Sequence[str]) -> tuple[Sequence[str], dict[str, Any]]:
    """Split `--run` and `--json`, directly before or after the file, off the arguments of `check`. Returns the other
    arguments, and fields of `CommandArgs` for these options. A repeated option is the program's.
    """
    if arguments[:1] != ["check"]:
        return arguments, {}
    rest, fields = [*arguments], dict[str, Any]()
    for i in (1, 2):  # at the place of the file, and after it
        while i < len(rest):
            name, _, value = rest[i].partition("=")
            if name == "--run" and "single_replica_args" not in fields:
                fields["single_replica_args"] = shlex.split(value)
            elif rest[i] == "--json" and "as_json" not in fields:
                fields["as_json"] = True
            else:
                break
            del rest[i]
    return rest, fields


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "popxl",
        description="Inspect unmodified programs: graphs, memory, cost, and mistakes between replicas.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersions)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("show", _SHOW), ("check", _CHECK), ("report", _REPORT), ("tune", _TUNE), ("plan", _PLAN)):
        # Without abbreviations: one that fits several of these options may be an option of the program.
        command = commands.add_parser(name, help=_summary(text), description=text, allow_abbrev=False)
        command.set_defaults(pictures=None, pages=None, costs=None, target=None)
        _add_options(command, name)
        _takes_program(command)
    command = commands.add_parser("diff", help=_summary(_DIFF), description=_DIFF, allow_abbrev=False)
    command.add_argument("--target", metavar="MACHINE", help=f"compile programs for this machine: {FORMS}")
    command.add_argument("--exit-code", action="store_true", help="exit with 1 if anything differs, as `git diff` does")
    for name in ("old", "new"):
        command.add_argument(
            name, metavar=name.upper(), help="FILE.py, FILE.py:NAME, a saved program, or costs in a JSON file"
        )
    command = commands.add_parser("calibrate", help=_summary(_CALIBRATE), description=_CALIBRATE, allow_abbrev=False)
    command.add_argument(
        "--save",
        type=Path,
        default=Path("chip.json"),
        metavar="FILE.json",
        help="file for the figures, by default chip.json",
    )
    return parser


def _add_options(command: argparse.ArgumentParser, name: str) -> None:
    """Add the options of a command that takes a program."""
    if name == "check":  # it compiles nothing, and draws nothing; its options are found before parsing
        return
    if name in ("show", "report"):
        command.add_argument(
            "--pictures", type=Path, metavar="FOLDER", help="folder for pictures of the memory, as SVG"
        )
    command.add_argument("--pages", type=Path, metavar="FOLDER", help="folder for the reports, as HTML pages")
    if name == "report":
        command.add_argument("--costs", type=Path, metavar="FOLDER", help="folder for the costs, as JSON")
    target = "compile for a machine elsewhere, and run nothing"
    if name in ("tune", "plan"):
        target = "the machine, which can be elsewhere; by default the device that the program names"
    command.add_argument("--target", metavar="MACHINE", help=f"{target}: {FORMS}")
    if name == "plan":
        command.add_argument("--budget", required=True, help="memory of a device, such as 40GB")
        command.add_argument("--save", type=Path, metavar="PLAN.json", help="file for the plan, as JSON")
        most = f"most compilations, {COMPILATIONS} by default: with more, the plan uses more of the budget"
        command.add_argument("--compilations", type=int, default=COMPILATIONS, metavar="COUNT", help=most)


def _summary(text: str) -> str:
    """First sentence of a command's description."""
    return text.partition(". ")[0].replace("\n", " ") + "."


def _takes_program(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE.py", help="the program")
    args = command.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the program")
    args.required = False  # or argparse would say that they are missing, too, where the file is


def _target_of(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split a leading `--target` option off a program's arguments: target, remaining arguments."""
    if arguments[:1] == ["--target"]:
        return "".join(arguments[1:2]), arguments[2:]
    if arguments and arguments[0].startswith("--target="):
        return arguments[0].partition("=")[2], arguments[1:]
    return None, arguments
