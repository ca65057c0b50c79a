"""Compilation decision: single executable or plan, and one device or a separate device per IPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.options import SessionOptions
from runtime.plan.choice import REPEATED, SMALLEST, SegmentationPolicy
from runtime.plan.loop_rerolling.rerolling import Rerolling
from runtime.plan.placement import IpuPlacement
from runtime.plan.planning import plan_of
from runtime.targets.compile_target import CompileTarget

ROLLED = 500
"""Loops are thought of where calls are not kept if XLA would otherwise compile this many ops again: what is less it
compiles in seconds, and turns have kernels that only cut rows out of arrays and put them back."""

SECONDS_AN_OP = {"tpu": 0.1, "gpu": 0.03}
"""How long XLA takes for an op at most, about, as training steps of language models were compiled on two cores. It is a
count, and no clock, so that all processes of a program decide alike."""

LONGEST = 6000
"""Seconds that XLA may take by that count for what is written out, where nothing is compared: beyond, loops are taken.
At each point of `docs/costs.md` where both were compiled, loops took at least 1.2 × as long in a run. So what is
written out repays the seconds of its compiler after five times as many of running, at most eight hours. A program of so
many ops (200 000 on a GPU: some two thousand layers) is trained for longer."""

WITHOUT_PRODUCTS = 2000
"""A loop without products is made there if it saves so many: it has more kernels than what is written out."""


class Decision(NamedTuple):
    """Compilation decision for a program.

    Attributes:
        calls: form of called graphs: see the option `calledGraphs`. "dispatched" is a plan.
        reason: reason for this form, in a sentence or two.
        choice: selection of calls as segments, for a plan.
        places: placement of ops, if IPUs are separate devices.
        rerolling: loops of rerolled calls, if there are any.
        others: further forms to compile and compare.
        rest: forms to compile if none of these fits into memory, in order.
        written_out: graphs whose calls are in no loop, each with the reason, if loops were sought.
    """

    calls: str
    reason: str
    choice: SegmentationPolicy
    places: IpuPlacement | None = None
    rerolling: Rerolling | None = None
    others: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    written_out: Mapping[Graph, str] = MappingProxyType({})


def decide(
    main: Graph,
    options: SessionOptions,
    compile_target: CompileTarget,
    held: Collection[Tensor],
    changed: Sequence[Tensor],
    calls: str | None,
) -> Decision:
    """Decide how to compile a program for a compile target.

    Args:
        calls: form of called graphs, if a file specifies it.
    """
    smallest = {"auto": SMALLEST, "kept": SMALLEST, "inlined": None}.get(options.calledGraphs, 1)
    places, of_places = _placement(main, options, compile_target, changed, smallest)
    choice = SegmentationPolicy(main, smallest, places)
    if places is not None:
        return Decision("dispatched", of_places, choice, places)
    if calls is not None:
        return _with_known_mode(main, held, options, compile_target, calls, "It was so in the file.", choice)
    if options.calledGraphs == "kept" and compile_target.platform == "tpu":
        reason = "`ir.options.calledGraphs` is 'kept', but XLA for TPUs writes out every call."
        return Decision("inlined", reason + of_places, choice)
    if options.calledGraphs != "auto":
        reason = f"`ir.options.calledGraphs` is {options.calledGraphs!r}.{of_places}"
        return _with_known_mode(main, held, options, compile_target, options.calledGraphs, reason, choice)
    if compile_target.platform != "cpu":
        an_op = SECONDS_AN_OP.get(compile_target.platform, max(SECONDS_AN_OP.values()))
        return _on_accelerators(main, held, choice, of_places, options.compareSeconds, an_op)
    return _on_cpus(main, held, choice, of_places)


def _with_known_mode(
    main: Graph,
    held: Collection[Tensor],
    options: SessionOptions,
    compile_target: CompileTarget,
    calls: str,
    reason: str,
    choice: SegmentationPolicy,
) -> Decision:
    """Decision for a known compilation mode."""
    if calls not in ("rolled", "batched"):
        return Decision(calls, reason, choice)
    automatic = REPEATED if compile_target.platform == "cpu" else WITHOUT_PRODUCTS
    rerolling = _rolled(main, held, automatic if options.calledGraphs == "auto" else 0, calls == "batched")
    return Decision(calls, reason, choice, rerolling=rerolling, written_out=rerolling.unrolled_graphs)


def _on_cpus(main: Graph, held: Collection[Tensor], choice: SegmentationPolicy, of_places: str) -> Decision:
    """Decision for CPUs, where XLA keeps calls and compiles each call."""
    if not choice.repeated:
        reason = (
            f"No graph of {SMALLEST} ops or more is called twice; a plan, in which such graphs are compiled by "
            "themselves, would save nothing."
        )
        return Decision("kept", reason + of_places, choice)
    again = f"In one program XLA would compile {choice.repeated} ops again that it has compiled already"
    if not choice.is_worth_it():
        return Decision("kept", f"{again}; a plan pays from {REPEATED} on.{of_places}", choice)
    if not choice.has_large_calls():  # as iterations of a loop they cost no dispatch
        rerolling = _rolled(main, held, REPEATED)
        if 2 * rerolling.saved >= choice.repeated:
            reason = f"{again}, in calls so small that dispatching them would take time. {rerolling.summary()}"
            return Decision(
                "rolled", reason + of_places, choice, rerolling=rerolling, written_out=rerolling.unrolled_graphs
            )
    return Decision("dispatched", f"{again}; a plan pays from {REPEATED} on.{of_places}", choice)


def _on_accelerators(
    main: Graph, held: Collection[Tensor], choice: SegmentationPolicy, of_places: str, limit: float, an_op: float
) -> Decision:
    """Decision for accelerators, where compilers inline calls, or fuse nothing inside kept calls. Plans are the last
    choice: they prevent fusion across segments, and copy values between segments.

    Args:
        main, held: as for `decide`.
        choice: selection of calls as segments.
        of_places: reason for a single device.
        limit: limit in seconds of the compile time of an unrolled program that is compiled for comparison.
        an_op: compile time of one op in seconds.
    """
    rerolling = _rolled(main, held, WITHOUT_PRODUCTS, batches_updates=True)
    loops, tighter = ("batched", ("rolled",)) if rerolling.has_batches else ("rolled", ())
    written_out = rerolling.unrolled_graphs
    size, again = choice.size(main.ops), rerolling.saved
    if again < ROLLED:
        what = f"Loops would save XLA {again} ops that it has compiled already; they are thought of from {ROLLED} on."
        reason = what if rerolling.loops else "Nothing is called again in a pattern."
        rest = (*(loops, *tighter) * bool(rerolling.loops), "dispatched")
        return Decision("inlined", reason + of_places, choice, rest=rest, written_out=written_out)
    saved = f"Loops would save XLA {again} ops that it has compiled already"
    if size * an_op <= limit:
        reason, rest = f"{saved}, and cost more in a run.", (*tighter, "dispatched")
        return Decision("inlined", reason + of_places, choice, others=(loops,), rest=rest, written_out=written_out)
    if size * an_op <= LONGEST:
        told = "Nothing was compared: that would take longer than `ir.options.compareSeconds` says."
        reason, rest = (
            f"{saved}, and nearly always cost more in a run. {told}{of_places}",
            (loops, *tighter, "dispatched"),
        )
        return Decision("inlined", reason, choice, rest=rest, written_out=written_out)
    reason = f"{rerolling.summary()} To compile all {size} ops would take hours.{of_places}"
    rest = (*tighter, "inlined", "dispatched")
    return Decision(loops, reason, choice, rerolling=rerolling, rest=rest, written_out=written_out)


def _rolled(main: Graph, held: Collection[Tensor], from_saved: int = 0, batches_updates: bool = False) -> Rerolling:
    """The loops of a program."""
    from runtime.plan.loop_rerolling.rerolling import Rerolling  # of no use on CPUs, unless requested

    return Rerolling(main, held, from_saved, batches_updates)


def _placement(
    main: Graph, options: SessionOptions, compile_target: CompileTarget, changed: Sequence[Tensor], smallest: int | None
) -> tuple[IpuPlacement | None, str]:
    """IPU placement, if each IPU is a separate device; plus a sentence explaining why or why not."""
    count, found = compile_target.count, len(compile_target.devices)
    places = IpuPlacement(main, count)
    needed = len(places.ipus) * count
    if len(places.ipus) <= 1:
        return None, ""
    shown = ", ".join(map(str, places.ipus))
    placed = f"Ops are on the IPUs {shown}, and each of these is a device of its own."
    if found >= needed and compile_target.has_parts_elsewhere(len(places.ipus)):
        if options.placement == "one":
            raise PopxlError(
                "Session: `ir.options.placement` is 'one', and each process drives some of the IPUs of its replicas. "
                "Set it to 'auto', or start so many instances that each gets whole replicas."
            )
        return places, placed
    if options.placement == "one":
        why = "`ir.options.placement` says so"
    elif found < needed:
        why = f"with {count} replica(s) they would need {needed}, and {found} can be used"
    elif (
        options.placement == "auto" and compile_target.platform == "cpu" and not _pays(main, changed, smallest, places)
    ):
        why = "there is so little work that a CPU would take longer to share it out than to do it"
    else:
        return places, placed
    return None, f" The {len(places.ipus)} IPUs of a replica are all on one device: {why}."


def _pays(main: Graph, changed: Sequence[Tensor], smallest: int | None, places: IpuPlacement) -> bool:
    """Whether distributing the work over cores makes a CPU faster."""
    return plan_of(main, SegmentationPolicy(main, smallest, places), (), changed).is_worthwhile()
