"""Whether a program is compiled as one, or as a plan; and whether its IPUs are devices of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from popxl.base.nesting import done
from popxl.core.tensor import Tensor
from popxl.graph import Graph
from popxl.options import SessionOptions
from runtime.plan.choice import REPEATED, SMALLEST, Choice
from runtime.plan.placement import Places
from runtime.plan.planning import Steps
from runtime.targets.destination import Destination

if TYPE_CHECKING:
    from runtime.plan.rolling.rolling import Rolling

ROLLED = 500
"""Calls are rolled where they are not kept if XLA would otherwise compile this many ops again: what is less it compiles
in seconds, and turns have kernels that only cut rows out of arrays and put them back."""

WITHOUT_PRODUCTS = 2000
"""A loop without products is made there if it saves so many: it has more kernels than what is written out."""


class Decision(NamedTuple):
    """How a program is compiled.

    Attributes:
        calls: how called graphs are: see the option `calledGraphs`. "dispatched" is a plan.
        reason: why they are compiled like this, in a sentence or two.
        choice: which calls are pieces, in a plan.
        places: where ops run, if IPUs are devices of their own.
        rolling: the loops that calls are rolled to, if they are.
    """

    calls: str
    reason: str
    choice: Choice
    places: Places | None = None
    rolling: Rolling | None = None


def decide(
    main: Graph,
    options: SessionOptions,
    destination: Destination,
    held: Collection[Tensor],
    changed: Sequence[Tensor],
    calls: str | None,
) -> Decision:
    """How a program is compiled for a destination.

    Args:
        main: the graph that it runs.
        options: those of its Ir.
        destination: what it is compiled for.
        held: what holds its variables.
        changed: of these, what it changes.
        calls: how called graphs were compiled, if that is in a file.
    """
    smallest = {"auto": SMALLEST, "kept": SMALLEST, "inlined": None}.get(options.calledGraphs, 1)
    places, of_places = _placement(main, options, destination, changed, smallest)
    choice = Choice(main, smallest, places)
    if places is not None:
        return Decision("dispatched", of_places, choice, places)
    if calls is not None:
        return Decision(calls, "It was so in the file.", choice, rolling=_rolling(main, held, calls))
    if options.calledGraphs == "kept" and destination.platform == "tpu":
        reason = "`ir.options.calledGraphs` is 'kept', but XLA for TPUs writes out every call."
        return Decision("inlined", reason + of_places, choice)
    if options.calledGraphs != "auto":
        reason = f"`ir.options.calledGraphs` is {options.calledGraphs!r}.{of_places}"
        rolling = _rolling(main, held, options.calledGraphs)
        return Decision(options.calledGraphs, reason, choice, rolling=rolling)
    if destination.platform != "cpu":
        return _on_accelerators(main, held, choice, of_places)
    return _on_cpus(main, held, choice, of_places)


def _on_cpus(main: Graph, held: Collection[Tensor], choice: Choice, of_places: str) -> Decision:
    """The same where XLA keeps calls, and compiles each of them."""
    if not choice.repeated:
        reason = (
            f"No graph of {SMALLEST} ops or more is called twice; a plan, in which such graphs are compiled by "
            "themselves, would save nothing."
        )
        return Decision("kept", reason + of_places, choice)
    again = f"In one program XLA would compile {choice.repeated} ops again that it has compiled already"
    if not choice.is_worth_it():
        return Decision("kept", f"{again}; a plan pays from {REPEATED} on.{of_places}", choice)
    if not choice.has_large_calls():  # as turns of a loop they cost no dispatch
        rolling = _rolled(main, held, REPEATED)
        if 2 * rolling.saved >= choice.repeated:
            reason = f"{again}, in calls so small that dispatching them would take time. {rolling.told()}"
            return Decision("rolled", reason + of_places, choice, rolling=rolling)
    return Decision("dispatched", f"{again}; a plan pays from {REPEATED} on.{of_places}", choice)


def _on_accelerators(main: Graph, held: Collection[Tensor], choice: Choice, of_places: str) -> Decision:
    """The same where compilers do not keep calls, or fuse nothing in those that they keep."""
    rolling = _rolled(main, held, WITHOUT_PRODUCTS)
    if rolling.saved >= ROLLED and (not choice.is_worth_it() or 2 * rolling.saved >= choice.repeated):
        return Decision("rolled", f"{rolling.told()}{of_places}", choice, rolling=rolling)
    if choice.is_worth_it():
        reason = f"{choice.repeated} ops are called again, in no pattern; a plan pays from {REPEATED} on."
        return Decision("dispatched", reason + of_places, choice)
    if rolling.loops:
        reason = f"Loops would save XLA {rolling.saved} ops that it has compiled already; they pay from {ROLLED} on."
        return Decision("inlined", reason + of_places, choice)
    return Decision("inlined", f"Nothing is called again in a pattern, or often enough for a plan.{of_places}", choice)


def _rolling(main: Graph, held: Collection[Tensor], calls: str) -> Rolling | None:
    """The loops of a program, if that is the way."""
    return _rolled(main, held) if calls == "rolled" else None


def _rolled(main: Graph, held: Collection[Tensor], from_saved: int = 0) -> Rolling:
    """The loops of a program."""
    from runtime.plan.rolling.rolling import Rolling  # of no use on CPUs, unless it is asked for

    return Rolling(main, held, from_saved)


def _placement(
    main: Graph, options: SessionOptions, destination: Destination, changed: Sequence[Tensor], smallest: int | None
) -> tuple[Places | None, str]:
    """The IPUs of the program, if each is a device of its own; and why, or why not, in a sentence."""
    count, found = destination.replicas.count, len(destination.devices)
    places = Places(main, count)
    needed = len(places.ipus) * count
    if len(places.ipus) <= 1:
        return None, ""
    if options.placement == "one":
        why = "`ir.options.placement` says so"
    elif found < needed:
        why = f"with {count} replica(s) they would need {needed}, and {found} can be used"
    elif options.placement == "auto" and destination.platform == "cpu" and not _pays(main, changed, smallest, places):
        why = "there is so little work that a CPU would take longer to share it out than to do it"
    else:
        shown = ", ".join(map(str, places.ipus))
        return places, f"Ops are on the IPUs {shown}, and each of these is a device of its own."
    return None, f" The {len(places.ipus)} IPUs of a replica are all on one device: {why}."


def _pays(main: Graph, changed: Sequence[Tensor], smallest: int | None, places: Places) -> bool:
    """Whether a CPU is quicker if its cores share out the work."""
    steps: Steps = done(Steps(main.ops, Choice(main, smallest, places), (), changed).planned())
    return steps.is_worthwhile()
