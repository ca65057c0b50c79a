"""Subcommands of `popxl`. `runtime.command` reads their arguments."""

from __future__ import annotations

import json
import math
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from popxl.analysis.checking import check, report_data
from popxl.analysis.memory import Memory
from popxl.base.choices import override_choices
from popxl.base.container import is_packed
from popxl.base.memory_requests import MemoryRequest, RequestedMemory, requesting_memory
from popxl.base.pages import OnPage
from popxl.errors import PopxlError, ReplicationWarning
from popxl.ir import Ir
from runtime.comparison import Comparison, compare
from runtime.cost_budgets import read_budget
from runtime.costs.changes import changes_of
from runtime.costs.cost import Cost
from runtime.costs.memory import memory_of_program
from runtime.costs.program_cost import cost_of
from runtime.inspection import report_of
from runtime.machine import IdleMachine, LayoutMachine, Machine, TargetMachine
from runtime.memory_plans.budget import plan_within
from runtime.memory_plans.compiled import Compiled, compiled_function, planned_program
from runtime.progress import reporting
from runtime.session import Session
from runtime.targets.devices import ask_for_cpu_devices
from runtime.targets.offline import Target
from runtime.tuning import CompiledTrial, tune_choices
from runtime.watched_runs import AnalyzedNames, TrialMachine, WatchingMachine, run_file, silenced_stdout, watched


@dataclass(frozen=True)
class CommandArgs:
    """Arguments of a command: program and outputs.

    Attributes:
        file, arguments: the program.
        pictures, pages, costs: folders for pictures of the memory, for pages, and for costs as JSON.
        target: machine to compile for, by default this one.
        function: the JAX function of the program to report on; "" for its sessions.
        single_replica_args: arguments of the program for one replica, to compare with; `None` for no comparison.
        as_json: whether to print JSON.
    """

    file: Path
    arguments: Sequence[str]
    pictures: Path | None = None
    pages: Path | None = None
    costs: Path | None = None
    target: Target | None = None
    function: str = ""
    single_replica_args: Sequence[str] | None = None
    as_json: bool = False

    def idle_machine(self) -> Machine:
        """Machine that compiles for the target, or else for the devices that the program names, and runs nothing."""
        return IdleMachine() if self.target is None else TargetMachine(self.target)

    def write(self, record: OnPage, memory: Memory, name: str, cost: Cost | None = None) -> None:
        """Write the requested picture, page and costs."""
        if self.pictures is not None:
            memory.picture().save(self.pictures / f"{name}.svg")
        if self.pages is not None:
            record.save(self.pages / f"{name}.html")
        if self.costs is not None and cost is not None:
            cost.save_budget(self.costs / f"{name}.json")


def show(asked: CommandArgs) -> int:
    """Print each Ir built by a program, with its memory. Runs nothing; compiles only for a target, then also printing
    the cost.

    Returns:
        The exit code: that of the program, if it fails; 1, if it builds no Ir.
    """
    irs: dict[Ir, None] = {}
    target = asked.target
    machine = WatchingMachine(LayoutMachine() if target is None else TargetMachine(target))
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
            form = "a plan of executables" if plans[ir].layout.mode == "dispatched" else "one program"
            text = f"It would be compiled as {form}. {plans[ir].reason}"
            print("\n" + textwrap.fill(text, 100, initial_indent="  ", subsequent_indent="  "))
        asked.write(memory, memory, f"memory_{ir.id}")
    if stopped:
        print(f"\nStopped at {stopped}: nothing is {'compiled or ' * (target is None)}run.")
    if not irs and not code:
        return fail(f"{asked.file} builds no Ir: there is nothing to show.", 1)
    return code


def check_program(asked: CommandArgs) -> int:
    """Print the findings and types of each Ir that a program builds; with a comparison, also what differs from the
    program on one replica when both run. Compiles and runs nothing else. As JSON, all of that is one list, of an object
    for each Ir; what the program prints then goes to standard error.

    Returns:
        The exit code: that of the program, if it fails; 1, if something is certainly wrong or differs, or it builds no
        Ir; 2, if it cannot be compared.
    """
    irs: dict[Ir, None] = {}
    with watched(WatchingMachine(LayoutMachine()), irs), warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplicationWarning)  # which is among the findings
        with redirect_stdout(sys.stderr if asked.as_json else sys.stdout):
            _, code = run_file(asked.file, asked.arguments)
    certain = False
    data = []
    for number, ir in enumerate(irs):
        findings = check(ir)
        certain = certain or any(each.certain for each in findings.findings)
        data.append({"ir": repr(ir), **report_data(findings)})
        if not asked.as_json:
            print(f"\n=== {ir!r} ===\n\n{findings}")
        if asked.single_replica_args is not None and not code:
            try:
                comparison = _compared_run(asked.file, asked.arguments, asked.single_replica_args, number, ir)
            except (PopxlError, ValueError) as problem:
                return fail(f"--run: {problem}", 2)
            data[-1]["comparison"] = asdict(comparison)
            if not asked.as_json:
                print(f"\n{comparison}")
            certain = certain or not comparison
    if asked.as_json:
        print(json.dumps(data, indent=2))
    if not irs and not code:
        return fail(f"{asked.file} builds no Ir: there is nothing to check.", 1)
    return code or int(certain)


_HOW = (
    'Let the program take the sizes of its axes from `popxl.choice("NAME", [SIZE, 1])`, where NAME is that of the '
    "axis; or from its command line, and say how with --run=ARGUMENTS, such as --run='--data 1'."
)


def _compared_run(
    file: Path, arguments: Sequence[str], single_replica_args: Sequence[str], number: int, ir: Ir
) -> Comparison:
    """Run an Ir from a file, and its single-replica copy, and compare both.

    Args:
        single_replica_args: arguments of the program for one replica; empty for the same ones.
        number, ir: the Ir, and its index among those that the file builds. It is built again to be run.

    Raises:
        PopxlError: for an Ir without named axes, or an Ir that the file does not build for one replica.
    """
    axes = ir.axes
    if math.prod(axes.values()) < 2:
        raise PopxlError(f"{ir!r} has no named axes of several replicas, such as those of `popxl.Ir(axes=...)`.")
    try:
        single_irs = _irs_built(file, single_replica_args or arguments, dict.fromkeys(axes, 1))
    except ValueError as problem:  # of a choice without this option
        raise PopxlError(f"{problem} {_HOW}") from problem
    if len(single_irs) <= number or single_irs[number].replication_factor != 1:
        raise PopxlError(f"the program does not build {ir!r} for one replica. {_HOW}")
    replicated = _irs_built(file, arguments, {})[number]

    def program(sizes: dict[str, int]) -> Ir:
        return replicated if sizes == axes else single_irs[number]

    return compare(program, axes=axes)


def _irs_built(file: Path, arguments: Sequence[str], choices: dict[str, Any]) -> list[Ir]:
    """The Irs that a program builds with these choices; what it prints is left out."""
    irs: dict[Ir, None] = {}
    with override_choices(choices), watched(WatchingMachine(LayoutMachine()), irs), silenced_stdout():
        _, code = run_file(file, arguments)
    if code:
        raise PopxlError(f"{file} ended with the exit code {code}.")
    return [*irs]


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
        session_report = report_of(ir, program, machine.runners.get(program))
        print(f"\n=== session {number} ===\n\n{session_report}")
        asked.write(
            session_report,
            session_report.memory,
            f"session_{number}",
            cost_of(program) if asked.costs is not None else None,
        )
    if stopped:
        print(f"\nStopped at {stopped}: nothing is run.")
    if not machine.programs and not code:
        hint = f"`popxl show` prints what it builds, and `popxl report {asked.file}:NAME` reports on a JAX function."
        return fail(f"{asked.file} makes no session: there is nothing to report. {hint}", 1)
    return code


def _report_function(asked: CommandArgs) -> int:
    """Print the analysis of a program's JAX function, for the arguments of its first call, where the program stops."""
    try:
        program = AnalyzedNames(asked.function, asked.target)
        stopped, code = run_file(asked.file, asked.arguments, program)
    except PopxlError as problem:
        return fail(str(problem), 1)
    if program.analysis is None:
        reason = f"{program.absence(asked.file)}: there is nothing to report."
        hint = "Only names at the top level of the file are found: define the function there, or import it there."
        return code or fail(f"{reason} {hint}", 1)
    print(f"\n=== {asked.function} ===\n\n{program.analysis}\n\nStopped at {stopped}: it is not run.")
    asked.write(program.analysis, program.analysis.memory, asked.function, program.analysis.cost)
    return code


def diff(old: str, new: str, machine: str | None, exit_code: bool) -> int:
    """Print the changes in cost from one program to another, session by session.

    Returns:
        The exit code: 0, also where something changed, unless it is to be the `exit_code`: then 1; 2 for files that
        cannot be compared.
    """
    has_changed = False
    try:
        target = None if machine is None else Target(machine)
        before, after = (_costs(each, target) for each in (old, new))
        if len(before) != len(after):
            return fail(f"diff: {old} makes {len(before)} sessions, and {new} {len(after)}: nothing to compare.", 2)
        for first, second in zip(before, after, strict=True):
            changes = changes_of(first, second)
            has_changed = has_changed or bool(changes)
            print(changes)
    except (ValueError, PopxlError) as problem:
        return fail(f"diff: {problem}", 2)
    return int(exit_code and has_changed)


def function_of(description: str) -> tuple[str, str]:
    """Split `FILE.py:NAME` into file and function name; the latter is "" without a colon."""
    file, colon, name = description.rpartition(":")
    is_name = all(part.isidentifier() for part in name.split("."))
    return (file, name) if colon and file.endswith(".py") and is_name else (description, "")


_KITS = ("popxl_addons", "poptorch")
"""Packages that declare ops of saved programs, by keys that begin with the name of the package."""


def _costs(description: str, target: Target | None) -> list[Cost]:
    """Costs of a program's sessions, of its JAX function, of a saved program, or in a file.

    Raises:
        PopxlError: if there is none.
    """
    name, function = function_of(description)
    file = Path(name)
    if not file.is_file():
        raise PopxlError(f"{name!r} is not a file; expected a program, one that was saved, or a JSON file of costs.")
    content = file.read_bytes()
    if file.suffix == ".json" and not is_packed(content):
        return [read_budget(file)]
    if content.startswith(b"{"):  # a program, of earlier versions as well; no Python file begins so
        for kit in _KITS:
            if f'"{kit}.'.encode() in content:
                with suppress(ImportError):  # of PyTorch: then loading says which op is missing
                    import_module(kit)
        ir = Ir.load(file)
        return [Session(ir, target or "ipu_model").cost()]  # on the CPUs, however many replicas there are
    if function and target is not None:
        ask_for_cpu_devices(target.count)
    with silenced_stdout():
        if function:
            program = AnalyzedNames(function, target)
            _, code = run_file(file, (), program)
            absence = program.absence(file)
            costs = [program.analysis.cost] if program.analysis is not None else []
        else:
            machine = WatchingMachine(Machine() if target is None else TargetMachine(target))
            with watched(machine):
                _, code = run_file(file, ())
            absence = f"{file} makes no session"
            costs = [cost_of(compiled) for _, compiled in machine.programs]
    if code or not costs:
        raise PopxlError(f"{f'{description} ended with the exit code {code}' if code else absence}: it has no cost.")
    return costs


def tune(asked: CommandArgs) -> int:
    """Compile a program for each combination of its choices; print combinations that fit a machine, and the fastest.

    Returns:
        The exit code: 1, if nothing fits, or there is nothing to choose; 130 after Ctrl-C, as of other commands.
    """

    def compiled() -> CompiledTrial:
        machine = TrialMachine(asked.idle_machine())
        with watched(machine), silenced_stdout():
            _, code = run_file(asked.file, asked.arguments)
        if code and not machine.problem:
            raise PopxlError(f"{asked.file} ended with the exit code {code}.")
        if not machine.has_figures:  # of no combination is it known whether it fits
            raise PopxlError(machine.problem)
        return CompiledTrial(machine.programs, machine.problem)

    try:
        with reporting(_print_progress):
            result = tune_choices(compiled)
    except PopxlError as problem:
        return fail(f"tune: {problem}", 1)
    print(result)
    if asked.pages is not None:
        result.save(asked.pages / "tune.html")
    return 130 if not result.is_complete else 0 if result.best is not None else 1


def plan(asked: CommandArgs, budget: int, save: Path | None, compilations: int) -> int:
    """Plan the activations that the training steps of a program keep within a budget; print the plan, and its costs.

    Returns:
        The exit code: 1, if no plan is within the budget, or there is nothing to plan.
    """

    has_own_plan = False

    def compiled(request: MemoryRequest) -> Compiled:
        nonlocal has_own_plan
        requesting = partial(requesting_memory, *request, overrides=True)
        requested, read = (_compiled_function if asked.function else _compiled_sessions)(asked, requesting)
        if requested.has_overridden and not has_own_plan:
            _print_progress("The training step has a plan or policy of its own, which is ignored here.")
        has_own_plan = requested.has_overridden
        return read(requested)

    try:
        budget_plan = plan_within(compiled, budget, _print_progress, compilations)
    except (PopxlError, ValueError) as problem:
        return fail(f"plan: {problem}", 1)
    print(budget_plan)
    if save is not None:
        budget_plan.plan.write_json(save)
        takes = "options.Training.setMemoryPlan({})" if "poptorch" in sys.modules else "train_step(..., memory={})"
        takes = "addons.value_and_grad(..., memory={})" if asked.function else takes
        if models := budget_plan.plan.models:
            takes = f"memory={{}}, for each of {', '.join(models)}"
        print(f"\nThe plan is in {save}: {takes.format(f'addons.MemoryPlan.read_json({str(save)!r})')}")
    if asked.pages is not None:
        budget_plan.save(asked.pages / "plan.html")
    return 0


_Requesting = Callable[[], AbstractContextManager[RequestedMemory]]
_CompiledWith = tuple[RequestedMemory, Callable[[RequestedMemory], Compiled]]
"""Request under which something was compiled, and a function that reads what the search for a plan needs of it."""


def _compiled_sessions(asked: CommandArgs, requesting: _Requesting) -> _CompiledWith:
    """Compile the sessions of a program under a request for a memory plan."""
    machine = WatchingMachine(asked.idle_machine())
    with requesting() as requested, watched(machine), silenced_stdout():
        _, code = run_file(asked.file, asked.arguments)
    if code or not machine.programs:
        raise _compiles_nothing(asked, code, f"{asked.file} makes no session")
    return requested, partial(planned_program, machine.programs)


def _compiled_function(asked: CommandArgs, requesting: _Requesting) -> _CompiledWith:
    """Compile a JAX function of a program under a request for a memory plan."""
    names = AnalyzedNames(asked.function, asked.target, requesting)
    with watched(WatchingMachine(asked.idle_machine())), silenced_stdout():
        _, code = run_file(asked.file, asked.arguments, names)
    if code or names.analysis is None:
        raise _compiles_nothing(asked, code, names.absence(asked.file))
    return names.requested, partial(compiled_function, names.analysis, asked.target)


def _compiles_nothing(asked: CommandArgs, code: int, why: str) -> PopxlError:
    ended = f"{asked.file} ended with the exit code {code}" if code else f"{why}, so there is nothing to compile"
    return PopxlError(f"{ended}.")


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def fail(message: str, code: int) -> int:
    print(f"popxl: {message}", file=sys.stderr)
    return code
