"""Compilation decision: single executable or plan, and one device or a separate device per IPU."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from popxl.analysis.memory import runs_of
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ops.memory import offloads
from popxl.options import SessionOptions
from runtime.plan.loop_rerolling.patterns import FEWEST
from runtime.plan.loop_rerolling.rerolling import Rerolling
from runtime.plan.placement import IpuPlacement
from runtime.plan.planning import plan_of
from runtime.plan.segmentation import REPEATED, SMALLEST, SegmentationPolicy
from runtime.plan.segments import Segment
from runtime.targets.compile_target import CompileTarget

ROLLED = 500
"""Number of ops that loops have to save XLA, where calls are not kept: it compiles fewer in seconds, and iterations
have kernels that only slice rows out of arrays and write them back."""

SECONDS_AN_OP = {"tpu": 0.1, "gpu": 0.03}
"""Estimated upper bound of XLA's compile time per op, for training steps of language models on two cores. A count, not
a measured time, so that all processes of a program decide alike."""

LONGEST = 6000
"""Longest compile time in seconds, by that estimate, of an unrolled program that is not compared with others; above it,
loops are used. At each point of `docs/costs.md` where both were compiled, loops took at least 1.2 × as long in a run.
So an unrolled program repays its compile time after five times as much running, at most eight hours. A program of so
many ops (200 000 on a GPU: some two thousand layers) is trained for longer."""

WITHOUT_PRODUCTS = 2000
"""Least number of saved ops for which a loop without products is rerolled: it has more kernels than unrolled code."""


WORTHWHILE = 100_000
"""Numbers that a dispatch reads and writes, on average, from which placing ops on several CPU devices pays: these share
the cores, and would wait for the host."""


class Decision(NamedTuple):
    """Compilation decision for a program.

    Attributes:
        mode: mode of called graphs, as in the option `calledGraphs`. "dispatched" is a plan.
        reason: reason for this mode, in a sentence or two.
        segmentation: selection of calls as segments, for a plan.
        placement: placement of ops, if IPUs are separate devices.
        rerolling: loops of rerolled calls, if there are any.
        compared: further modes to compile and compare.
        fallbacks: modes to compile if none of these fits into memory, in order.
        unrolled_graphs: graphs whose calls are in no loop, each with the reason, if loops were sought.
    """

    mode: str
    reason: str
    segmentation: SegmentationPolicy
    placement: IpuPlacement | None = None
    rerolling: Rerolling | None = None
    compared: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    unrolled_graphs: Mapping[Graph, str] = MappingProxyType({})


Reroll = Callable[..., Rerolling]
"""Function that creates a program's `Rerolling` from its further arguments."""


def decide(
    main: Graph,
    options: SessionOptions,
    compile_target: CompileTarget,
    resident: Collection[Tensor],
    changed: Sequence[Tensor],
    mode: str | None,
) -> Decision:
    """Decide how to compile a program for a compile target.

    Args:
        mode: mode of called graphs, if it is already decided.
    """
    platform = compile_target.platform
    asked, why = options.calledGraphs, f"`ir.options.calledGraphs` is {options.calledGraphs!r}."
    if asked == "auto" and options.plannedCalls and platform != "cpu":
        asked, why = options.plannedCalls, f"The memory plan was made for {options.plannedCalls!r}."
    smallest = {"auto": SMALLEST, "kept": SMALLEST, "inlined": None}.get(asked, 1)
    placement, placed = _placement(main, options, compile_target, changed, smallest)
    segmentation = SegmentationPolicy(main, smallest, placement)
    if placement is not None:
        return Decision("dispatched", placed, segmentation, placement)
    reroll = partial(Rerolling, main, resident)
    if mode is not None:
        least = 0 if asked != "auto" else REPEATED if platform == "cpu" else WITHOUT_PRODUCTS
        return _in_mode(mode, "It was so in the file.", segmentation, partial(reroll, from_saved=least))
    if asked == "kept" and platform == "tpu":
        reason = "`ir.options.calledGraphs` is 'kept', but XLA for TPUs writes out every call."
        decision = Decision("inlined", reason, segmentation)
    elif asked != "auto":
        decision = _in_mode(asked, why, segmentation, reroll)
    elif platform == "cpu":
        decision = _on_cpus(segmentation, reroll)
    elif _offload_count(main) >= FEWEST and (rerolling := reroll()).loops:
        reason = (
            f"{rerolling.summary()} Activations are offloaded, and XLA would copy those of all inlined calls back at "
            "once."
        )
        decision = _in_loops("rolled", reason, segmentation, rerolling)._replace(fallbacks=("inlined", "dispatched"))
    else:
        seconds_an_op = SECONDS_AN_OP.get(platform, max(SECONDS_AN_OP.values()))
        seconds = segmentation.total_size * seconds_an_op
        decision = _on_accelerators(segmentation, reroll, seconds, options.compareSeconds)
    return decision._replace(reason=decision.reason + placed)


def _offload_count(main: Graph) -> int:
    """Number of activations that a run copies to the host's memory."""
    return sum(runs for graph, runs in runs_of(main).items() for op in graph.ops if offloads((op,)))


def _in_mode(mode: str, reason: str, segmentation: SegmentationPolicy, reroll: Reroll) -> Decision:
    """Decision for a known mode."""
    if mode not in ("rolled", "batched"):
        return Decision(mode, reason, segmentation)
    return _in_loops(mode, reason, segmentation, reroll(batches_updates=mode == "batched"))


def _in_loops(mode: str, reason: str, segmentation: SegmentationPolicy, rerolling: Rerolling) -> Decision:
    """Decision for loops."""
    return Decision(mode, reason, segmentation, rerolling=rerolling, unrolled_graphs=rerolling.unrolled_graphs)


def _on_cpus(segmentation: SegmentationPolicy, reroll: Reroll) -> Decision:
    """Decision for CPUs, where XLA keeps calls and compiles each call."""
    if not segmentation.repeated:
        reason = (
            f"No graph of {SMALLEST} ops or more is called twice; a plan, in which such graphs are compiled by "
            "themselves, would save nothing."
        )
        return Decision("kept", reason, segmentation)
    again = f"In one program XLA would compile {segmentation.repeated} ops again that it has compiled already"
    if segmentation.repeated >= REPEATED and not segmentation.has_large_calls():
        rerolling = reroll(from_saved=REPEATED)  # as iterations of a loop such calls cost no dispatch
        if 2 * rerolling.saved >= segmentation.repeated:
            reason = f"{again}, in calls so small that dispatching them would take time. {rerolling.summary()}"
            return _in_loops("rolled", reason, segmentation, rerolling)
    mode = "dispatched" if segmentation.repeated >= REPEATED else "kept"
    return Decision(mode, f"{again}; a plan pays from {REPEATED} on.", segmentation)


def _on_accelerators(segmentation: SegmentationPolicy, reroll: Reroll, seconds: float, limit: float) -> Decision:
    """Decision for accelerators, where compilers inline calls, or fuse nothing inside kept calls. Plans are the last
    choice: they prevent fusion across segments, and copy values between segments.

    Args:
        seconds: compile time of the unrolled program.
        limit: upper limit of that, for programs that are compiled for comparison.
    """
    rerolling = reroll(from_saved=WITHOUT_PRODUCTS, batches_updates=True)
    loops, tighter = ("batched", ("rolled",)) if rerolling.has_batches else ("rolled", ())
    unrolled = Decision("inlined", "", segmentation, unrolled_graphs=rerolling.unrolled_graphs)
    again = f"Loops would save XLA {rerolling.saved} ops that it has compiled already"
    if rerolling.saved < ROLLED:
        reason = f"{again}; they are thought of from {ROLLED} on."
        if not rerolling.loops:
            return unrolled._replace(reason="Nothing is called again in a pattern.", fallbacks=("dispatched",))
        return unrolled._replace(reason=reason, fallbacks=(loops, *tighter, "dispatched"))
    if seconds <= limit:
        reason = f"{again}, and cost more in a run."
        return unrolled._replace(reason=reason, compared=(loops,), fallbacks=(*tighter, "dispatched"))
    if seconds <= LONGEST:
        reason = (
            f"{again}, and nearly always cost more in a run. Nothing was compared: that would take longer than "
            "`ir.options.compareSeconds` says."
        )
        return unrolled._replace(reason=reason, fallbacks=(loops, *tighter, "dispatched"))
    reason = f"{rerolling.summary()} To compile all {segmentation.total_size} ops would take hours."
    return _in_loops(loops, reason, segmentation, rerolling)._replace(fallbacks=(*tighter, "inlined", "dispatched"))


def _placement(
    main: Graph, options: SessionOptions, compile_target: CompileTarget, changed: Sequence[Tensor], smallest: int | None
) -> tuple[IpuPlacement | None, str]:
    """IPU placement, if each IPU is a separate device; plus a sentence explaining why or why not."""
    count, available = compile_target.count, len(compile_target.devices)
    placement = IpuPlacement(main, count)
    needed = len(placement.ipus) * count
    if len(placement.ipus) <= 1:
        return None, ""
    shown = ", ".join(map(str, placement.ipus))
    placed = f"Ops are on the IPUs {shown}, and each of these is a device of its own."
    if available >= needed and compile_target.has_parts_elsewhere(len(placement.ipus)):
        if options.placement == "one":
            raise PopxlError(
                "Session: `ir.options.placement` is 'one', and each process drives some of the IPUs of its replicas. "
                "Set it to 'auto', or start so many instances that each gets whole replicas."
            )
        return placement, placed
    if options.placement == "one":
        why = "`ir.options.placement` says so"
    elif available < needed:
        why = f"with {count} replica(s) they would need {needed}, and {available} can be used"
    elif (
        options.placement == "auto"
        and compile_target.platform == "cpu"
        and not _occupies_devices(main, changed, SegmentationPolicy(main, smallest, placement))
    ):
        why = "there is so little work that a CPU would take longer to share it out than to do it"
    else:
        return placement, placed
    return None, f" The {len(placement.ipus)} IPUs of a replica are all on one device: {why}."


def _occupies_devices(main: Graph, changed: Sequence[Tensor], segmentation: SegmentationPolicy) -> bool:
    """Whether segments are large enough for distribution over several CPU devices."""
    steps = [*plan_of(main, segmentation, (), changed).all_steps()]
    segments = [(step, times) for step, times in steps if isinstance(step, Segment)]
    copies = sum(len(step.copies) * times for step, times in steps)
    copies += sum(sum(p != step.ipu for p in step.result_ipus.values()) * times for step, times in segments)
    numbers = sum(segmentation.numbers(step.ops) * times for step, times in segments)
    return numbers >= WORTHWHILE * (copies + sum(times for _, times in segments))
