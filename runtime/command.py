"""Subcommands of `popxl`, from `show` to `calibrate`. Invoked by `popxl.__main__`."""

from __future__ import annotations

import argparse
import shlex
import sys
import textwrap
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from popxl.analysis.checking import check
from popxl.analysis.memory import Memory
from popxl.base.asked_memory import asking
from popxl.base.container import is_packed
from popxl.base.pages import OnPage
from popxl.errors import PopxlError, ReplicationWarning
from popxl.ir import Ir
from runtime.calibration import calibrate
from runtime.compared_runs import compared_run
from runtime.cost_budgets import read_budget
from runtime.costs.changes import changes_of
from runtime.costs.cost import Cost
from runtime.costs.memory import memory_of_program
from runtime.costs.program_cost import cost_of
from runtime.fitting import CompiledTrial, fit
from runtime.inspection import report_of
from runtime.machine import Machine, PlanningMachine, TargetMachine
from runtime.memory_budget import Compiled, bytes_of, plan_within, planned_program
from runtime.pipes import exit_on_broken_pipe
from runtime.session import Session
from runtime.targets.devices import ask_for_cpu_devices
from runtime.targets.offline import FORMS, Target
from runtime.versions import ShowVersions
from runtime.watched_runs import AnalyzedNames, TrialMachine, WatchingMachine, run_file, watched

_EXAMPLES = """\
examples:
  popxl show train.py                       print the graphs of the program, and the memory that they need
  popxl show --pictures plots train.py      the same, with pictures of the memory in the folder plots
  popxl check train.py                      print probable mistakes between replicas, and how they hold each value
  popxl check train.py --run                also run it beside the same program on one replica, and compare results
  popxl report train.py --layers 12         run the program; options after the file are its own
  popxl report --pages pages train.py       the same, with the reports as HTML pages in the folder pages
  popxl show train.py --target "tpu v5e"    compile it for a TPU elsewhere, and print the memory that it needs there
  popxl report train.py --target "gpu h100:8"   the same for eight GPUs, with the reports
  popxl report train_jax.py:step --target "gpu h100:8"   the first call of a JAX function of the program
  popxl tune train.py --target "tpu v5e:4x4"    try the choices of the program; print those that fit, and the fastest
  popxl diff costs.json train.py --target "tpu v5e"   compare costs with those of a file
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
Plan which activations a training step saves, recomputes or offloads, within a memory budget per device. The plan is for
the `train_step` of the program that leaves `memory` out, or states a budget there; it is compiled for a machine that
can be elsewhere. Nothing is run.
"""

_CHECK = """\
Print probable mistakes between replicas, such as a missing all-reduce, and how replicas hold each value. The program
runs up to its first `session.run`; its sessions compile and run nothing. With --run, directly before or after the file,
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
are listed in all, by argument, graph and source line. Programs are files of Python, of `Ir.save`, or costs written by
`session.cost().save_budget("costs.json")`.
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


@exit_on_broken_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments`, by default `sys.argv`. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _REMOVED:
        return _fail(f"`{arguments[0]}` was removed: {_REMOVED[arguments[0]]}.", 2)
    arguments = [*(_RENAMED.get(each, each) for each in arguments[:1]), *arguments[1:]]
    arguments, alone = _run_of(_options_of_plan(arguments))
    options = _parser().parse_args(arguments)
    if options.command == "calibrate":
        print(calibrate(options.save))
        return 0
    if options.command == "diff":
        return diff(options.old, options.new, options.target)
    if options.target is None and options.command != "check":
        options.target, options.args = _target_of(options.args)
    name, function = _function_of(options.file) if options.command == "report" else (options.file, "")
    file = Path(name)
    if not file.is_file():
        why = "is a folder" if file.is_dir() else "does not exist"
        return _fail(f"{name!r} {why}; expected a Python file.", 2)
    try:
        target = None if options.target is None else Target(options.target)
        if function and target is not None:
            ask_for_cpu_devices(target.count)  # devices for the program's arrays
        if target is not None:
            target.devices  # noqa: B018  # that there is no compiler is said now
    except (ValueError, PopxlError) as problem:
        return _fail(f"--target: {problem}", 2)
    for name in ("pictures", "pages"):
        folder = getattr(options, name)
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            return _fail(f"--{name} {folder}: {problem}", 2)
    if options.command in ("tune", "plan") and target is None:
        return _fail(f"{options.command}: `--target` is missing; expected {FORMS}.", 2)
    if options.command == "plan":
        try:
            budget = bytes_of(options.budget, "--budget")
        except ValueError as problem:
            return _fail(f"plan: {problem}", 2)
        return plan(CommandArgs(file, options.args, pages=options.pages, target=target), budget, options.save)
    run = {"show": show, "check": check_program, "report": report, "tune": tune}[options.command]
    return run(CommandArgs(file, options.args, options.pictures, options.pages, target, function, alone))


def _options_of_plan(arguments: Sequence[str]) -> Sequence[str]:
    """Move options of `plan` from behind the file to before it, unless `--budget` precedes the file already."""
    file = next((i for i, each in enumerate(arguments) if each.endswith(".py")), 0)
    if arguments[:1] != ["plan"] or not file or any(each.startswith("--budget") for each in arguments[:file]):
        return arguments
    end = file + 1
    while end < len(arguments) and arguments[end].partition("=")[0] in ("--target", "--budget", "--save", "--pages"):
        end += 1 if "=" in arguments[end] else 2
    return ["plan", *arguments[file + 1 : end], *arguments[1 : file + 1], *arguments[end:]]


def _run_of(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """Split `--run`, directly before or after the file, off the arguments of `check`: the other arguments, and the
    program's arguments for one replica; `None` without the option.
    """
    for i in (1, 2) if arguments[:1] == ["check"] else ():
        name, _, value = arguments[i].partition("=") if i < len(arguments) else ("", "", "")
        if name == "--run":
            return [*arguments[:i], *arguments[i + 1 :]], shlex.split(value)
    return arguments, None


def _function_of(description: str) -> tuple[str, str]:
    """Split `FILE.py:NAME` into file and function name; the latter is "" without a colon."""
    file, colon, name = description.rpartition(":")
    return (file, name) if colon and file.endswith(".py") and name.isidentifier() else (description, "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "popxl",
        description="Inspect unmodified programs: graphs, memory, cost, and mistakes between replicas.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersions)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{show,check,report,tune,plan,diff}|calibrate"
    )
    for name, text in (("show", _SHOW), ("check", _CHECK), ("report", _REPORT), ("tune", _TUNE), ("plan", _PLAN)):
        runs = name not in ("tune", "plan")  # which runs nothing in any case, and has no schedule to draw
        # Without abbreviations: one that fits several of these options may be an option of the program.
        command = commands.add_parser(name, help=_summary(text), description=text, allow_abbrev=False)
        command.set_defaults(pictures=None)
        if name == "check":  # which compiles nothing, and draws nothing
            command.set_defaults(target=None, pages=None)
            _takes_program(command)
            continue
        if runs:
            command.add_argument(
                "--pictures", type=Path, metavar="FOLDER", help="folder for pictures of the memory, as SVG"
            )
        command.add_argument("--pages", type=Path, metavar="FOLDER", help="folder for the reports, as HTML pages")
        target = "compile for a machine elsewhere, and run nothing" if runs else "the machine, which can be elsewhere"
        command.add_argument("--target", metavar="MACHINE", help=f"{target}: {FORMS}")
        if name == "plan":
            command.add_argument("--budget", required=True, help="memory of a device, such as 40GB")
            command.add_argument("--save", type=Path, metavar="PLAN.json", help="file for the plan, as JSON")
        _takes_program(command)
    command = commands.add_parser("diff", help=_summary(_DIFF), description=_DIFF, allow_abbrev=False)
    command.add_argument("--target", metavar="MACHINE", help=f"compile programs for this machine: {FORMS}")
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


def _summary(text: str) -> str:
    """First sentence of a command's description."""
    return text.partition(". ")[0].replace("\n", " ") + "."


def _takes_program(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE.py", help="the program")
    args = command.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the program")
    args.required = False  # or argparse would say that they are missing, too, where the file is


def _target_of(arguments: list[str]) -> tuple[str | None, list[str]]:
    """Split a leading `--target` option off a program's arguments: target, remaining arguments."""
    if arguments[:1] == ["--target"] and len(arguments) > 1:
        return arguments[1], arguments[2:]
    if arguments and arguments[0].startswith("--target="):
        return arguments[0].partition("=")[2], arguments[1:]
    return None, arguments


# The commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommandArgs:
    """Arguments of a command: program and outputs.

    Attributes:
        file, arguments: the program.
        pictures, pages: folders for pictures of the memory, and for pages.
        target: machine to compile for, by default this one.
        function: the JAX function of the program to report on; "" for its sessions.
        alone: arguments of the program for one replica, to compare with; `None` for no comparison.
    """

    file: Path
    arguments: Sequence[str]
    pictures: Path | None = None
    pages: Path | None = None
    target: Target | None = None
    function: str = ""
    alone: Sequence[str] | None = None

    def write(self, record: OnPage, memory: Memory, name: str) -> None:
        """Write the requested picture and page."""
        if self.pictures is not None:
            memory.picture().save(self.pictures / f"{name}.svg")
        if self.pages is not None:
            record.save(self.pages / f"{name}.html")


def show(asked: CommandArgs) -> int:
    """Print each Ir built by a program, with its memory. Runs nothing; compiles only for a target, then also printing
    the cost.

    Returns:
        The exit code: that of the program, if it fails; 1, if it builds no Ir.
    """
    irs: dict[Ir, None] = {}
    target = asked.target
    machine = WatchingMachine(PlanningMachine() if target is None else TargetMachine(target))
    with watched(machine, irs):
        stopped, code = run_file(asked.file, asked.arguments)
    irs |= dict.fromkeys(ir for ir, _ in machine.programs)
    plans = {ir: program for ir, program in reversed(machine.programs)}
    for ir in irs:
        memory = ir.memory()
        print(f"\n=== {ir!r} ===\n\n{ir.main_graph}\n\n{memory}")
        if ir in plans and target is not None:
            compiled = plans[ir]
            memory = memory_of_program(ir, compiled)
            print(f"\nCompiled for {target}\n\n{memory}\n\n{cost_of(compiled)}")
        elif ir in plans:
            way = "a plan of executables" if plans[ir].layout.calls == "dispatched" else "one program"
            text = f"It would be compiled as {way}. {plans[ir].reason}"
            print("\n" + textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  "))
        asked.write(memory, memory, f"memory_{ir.id}")
    if stopped:
        print(f"\nStopped at {stopped}: nothing is {'compiled or ' * (target is None)}run.")
    if not irs and not code:
        return _fail(f"{asked.file} builds no Ir: there is nothing to show.", 1)
    return code


def check_program(asked: CommandArgs) -> int:
    """Print the findings and types of each Ir that a program builds; with a comparison, also what differs from the
    program on one replica when both run. Compiles and runs nothing else.

    Returns:
        The exit code: that of the program, if it fails; 1, if something is certainly wrong or differs, or it builds no
        Ir; 2, if it cannot be compared.
    """
    irs: dict[Ir, None] = {}
    with watched(WatchingMachine(PlanningMachine()), irs), warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicationWarning)  # which is among the findings
        _, code = run_file(asked.file, asked.arguments)
    certain = False
    for number, ir in enumerate(irs):
        found = check(ir)
        certain = certain or any(each.certain for each in found.findings)
        print(f"\n=== {ir!r} ===\n\n{found}")
        if asked.alone is not None and not code:
            try:
                comparison = compared_run(asked.file, asked.arguments, asked.alone, number)
            except (PopxlError, ValueError) as problem:
                return _fail(f"--run: {problem}", 2)
            print(f"\n{comparison}")
            certain = certain or not comparison
    if not irs and not code:
        return _fail(f"{asked.file} builds no Ir: there is nothing to check.", 1)
    return code or int(certain)


def report(asked: CommandArgs) -> int:
    """Run a program, and print a report of each session. With a target, execution stops at the first `session.run`.

    Returns:
        The exit code: that of the program, if it fails; 1, if it makes no session.
    """
    if asked.function:
        return _report_function(asked)
    machine = WatchingMachine(Machine() if asked.target is None else TargetMachine(asked.target))
    with watched(machine):
        stopped, code = run_file(asked.file, asked.arguments)
    for number, (ir, program) in enumerate(machine.programs):
        found = report_of(ir, program, machine.runners.get(program))
        print(f"\n=== session {number} ===\n\n{found}")
        asked.write(found, found.memory, f"session_{number}")
    if stopped:
        print(f"\nStopped at {stopped}: nothing is run.")
    if not machine.programs and not code:
        return _fail(
            f"{asked.file} makes no session: there is nothing to report. `popxl show` prints what it builds.", 1
        )
    return code


def _report_function(asked: CommandArgs) -> int:
    """Print the analysis of a program's JAX function, for the arguments of its first call, where the program stops.

    Returns:
        The exit code: that of the program, if it fails; 1, if it does not call the function.
    """
    program = AnalyzedNames(asked.function, asked.target)
    try:
        stopped, code = run_file(asked.file, asked.arguments, program)
    except PopxlError as problem:
        return _fail(str(problem), 1)
    if program.found is None:
        said = f"{asked.file} does not call a function {asked.function!r} of its own: there is nothing to report."
        return code or _fail(said, 1)
    print(f"\n=== {asked.function} ===\n\n{program.found}\n\nStopped at {stopped}: it is not run.")
    asked.write(program.found, program.found.memory, asked.function)
    return code


def diff(old: str, new: str, machine: str | None) -> int:
    """Print the changes in cost from one program to another, session by session.

    Returns:
        The exit code: 0, also where something changed; 2 for files that cannot be compared.
    """
    try:
        target = None if machine is None else Target(machine)
        before, after = (_costs(each, target) for each in (old, new))
        if len(before) != len(after):
            return _fail(f"diff: {old} makes {len(before)} sessions, and {new} {len(after)}: nothing to compare.", 2)
        for first, second in zip(before, after, strict=True):
            print(changes_of(first, second))
    except (ValueError, PopxlError) as problem:
        return _fail(f"diff: {problem}", 2)
    return 0


def _costs(description: str, target: Target | None) -> list[Cost]:
    """Costs of a program's sessions, of its JAX function, of a saved program, or in a file.

    Raises:
        PopxlError: if there is none.
    """
    name, function = _function_of(description)
    file = Path(name)
    if not file.is_file():
        raise PopxlError(f"{name!r} is no file; expected a program, one that was saved, or a JSON file of costs.")
    if file.suffix == ".json":
        return [read_budget(file)]
    if is_packed(file.read_bytes()):
        ir = Ir.load(file)
        return [(Session(ir) if target is None else Session(ir, target)).cost()]
    if function and target is not None:
        ask_for_cpu_devices(target.count)
    with redirect_stdout(StringIO()):
        if function:
            program = AnalyzedNames(function, target)
            _, code = run_file(file, (), program)
            found = [program.found.cost] if program.found is not None else []
        else:
            machine = WatchingMachine(Machine() if target is None else TargetMachine(target))
            with watched(machine):
                _, code = run_file(file, ())
            found = [cost_of(compiled) for _, compiled in machine.programs]
    if code or not found:
        raise PopxlError(
            f"{description} {f'ended with the exit code {code}' if code else 'compiles nothing'}: it has no cost."
        )
    return found


def tune(asked: CommandArgs) -> int:
    """Compile a program for each combination of its choices; print combinations that fit a target, and the fastest.

    Returns:
        The exit code: 1, if nothing fits, or there is nothing to choose; 130 after Ctrl-C, as of other commands.
    """
    target = asked.target
    assert target is not None  # the command line has it

    def compiled() -> CompiledTrial:
        machine = TrialMachine(TargetMachine(target))
        with watched(machine), redirect_stdout(StringIO()):
            _, code = run_file(asked.file, asked.arguments)
        if code and not machine.problem:
            raise PopxlError(f"{asked.file} ended with the exit code {code}.")
        return CompiledTrial(machine.programs, machine.problem)

    try:
        found = fit(compiled, lambda line: print(line, file=sys.stderr, flush=True))
    except PopxlError as problem:
        return _fail(f"fit: {problem}", 1)
    print(found)
    if asked.pages is not None:
        found.save(asked.pages / "fit.html")
    return 130 if not found.is_complete else 0 if found.best is not None else 1


def plan(asked: CommandArgs, budget: int, save: Path | None) -> int:
    """Plan the activations that the training step of a program keeps within a budget; print the plan, and its costs.

    Returns:
        The exit code: 1, if no plan is within the budget, or there is nothing to plan.
    """
    target = asked.target
    assert target is not None  # the command line has it

    def compiled(memory: Any) -> Compiled:
        machine = WatchingMachine(TargetMachine(target))
        with asking(memory) as open_memory, watched(machine), redirect_stdout(StringIO()):
            _, code = run_file(asked.file, asked.arguments)
        if code or not machine.programs:
            why = f"ended with the exit code {code}" if code else "makes no session, so there is nothing to compile"
            raise PopxlError(f"{asked.file} {why}.")
        return planned_program(machine.programs, open_memory.applied)

    try:
        found = plan_within(compiled, budget, lambda line: print(line, file=sys.stderr, flush=True))
    except (PopxlError, ValueError) as problem:
        return _fail(f"plan: {problem}", 1)
    print(found)
    if save is not None:
        found.plan.write_json(save)
        takes = "options.Training.setMemoryPlan({})" if "poptorch" in sys.modules else "train_step(..., memory={})"
        print(f"\nThe plan is in {save}: {takes.format(f'addons.MemoryPlan.read_json({str(save)!r})')}")
    if asked.pages is not None:
        found.save(asked.pages / "plan.html")
    return 0


def _fail(message: str, code: int) -> int:
    print(f"popxl: {message}", file=sys.stderr)
    return code
