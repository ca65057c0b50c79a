"""The lowering loop: from a graph to a function of arrays.

Ops run in creation order. Each reads its operands from the environment, applies its lowering, and writes its results
back. The environment keeps one value for each *storage*: views are read from their base and written through to it, so
in-place ops and views need no special handling.

A graph with several call sites becomes one jitted function that is compiled once: its calls are marked as noinline.
State other than its inputs (streams, the failure flag) is passed and returned as values; see
`runtime.lowering.channels`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp

from popxl.base.arrays import Array
from popxl.base.names import identifier
from popxl.core.aliasing import call_counts
from popxl.core.recording import Op
from popxl.core.recursion import nesting, raised_recursion_limit
from popxl.core.rounding import HALVES
from popxl.core.tensor import Tensor
from popxl.core.traits import chooses, is_call
from popxl.errors import PopxlError, PopxlInternalError
from popxl.graph import Graph
from popxl.ops.kernels import memory
from popxl.ops.kernels.kernel import overriding_kernels
from popxl.ops.kernels.rounding import round_stochastically
from popxl.ops.kernels.words import fold_in
from popxl.ops.memory import offloads
from popxl.ops.precision import is_half, widen
from popxl.options import SessionOptions
from runtime.lowering import availability, control_flow, host_ops  # noqa: F401  # they register what ops do
from runtime.lowering.batched_loops import is_batch, lower_batched
from runtime.lowering.channels import COLLECTIVES, AnyChannel, Channels, channels_of_ops, has_side_effects
from runtime.lowering.collectives import devices_meet, group_of
from runtime.lowering.context import Context
from runtime.lowering.environment import Environment, Results
from runtime.lowering.packed_arrays import PackedSlot, load
from runtime.lowering.platform_hooks import PlatformHooks, hooks_for, hooks_for_device
from runtime.lowering.registry import LOWERINGS
from runtime.lowering.rerolled_loops import ProgramOrder, RerolledLoop, lower_rerolled, pack_together
from runtime.lowering.scopes import of_graph, of_op
from runtime.lowering.sharing import Sharing, bind_inputs
from runtime.noinline import noinline
from runtime.signals import deliver_pending_signals
from runtime.targets.replicas import Replicas, is_on_host


class Lowering:
    """The lowering of one program: from graphs to functions of arrays.

    Args:
        options: the options of the Ir, with the precision of products and the runtime checks.
        keep_calls: whether calls of graphs with several call sites are noinline.
        replicas: the replicas of the program; the program of one replica is lowered.
        scheduling: the schedule of each graph: ops, or rerolled loops.
        in_order: whether prints of a single replica are ordered, unless something is offloaded. JAX (0.10.2 to 0.12)
            cannot lower ordered effects along with results or copies in host memory.
    """

    def __init__(
        self,
        ops: Iterable[Op],
        options: SessionOptions,
        keep_calls: bool = True,
        replicas: Replicas = Replicas(),  # noqa: B008  # one replica, which nothing changes
        scheduling: ProgramOrder = ProgramOrder(),  # noqa: B008  # it has no state
        in_order: bool = True,
    ) -> None:
        ops = tuple(ops)
        call_sites = call_counts(ops)
        copies_to_host = any(offloads(each) for each in (ops, *(g.ops for g in call_sites))) and not replicas.is_cpu
        self.replicas = replicas
        self.scheduling = scheduling
        self.prints_in_order = in_order and not copies_to_host and replicas.count == 1  # JAX: of one device
        self._options = options
        self._noinline = {graph for graph, sites in call_sites.items() if keep_calls and sites > 1}
        prefetching = [op for graph in call_sites for op in graph.ops if op.kind.prefetched]
        self._prefetched = {t.producer for op in prefetching for t in op.inputs if t.producer is not None}
        self._functions = cache(self._noinline_function)

    @cached_property
    def hooks(self) -> PlatformHooks:
        """Platform hooks: of the device if known, else of the platform."""
        platform, device = self.replicas.platform, self.replicas.device
        is_known = isinstance(device, jax.Device)
        return hooks_for_device(platform, device, self.replicas.is_present) if is_known else hooks_for(platform)

    @property
    def is_vmapped(self) -> bool:
        """Whether one device runs several replicas, by `jax.vmap`."""
        return self.replicas.count > 1 and self.replicas.mesh is None

    def run(
        self, ops: Iterable[Op | RerolledLoop], values: Mapping[Tensor, Array | PackedSlot], channels: Channels
    ) -> Environment:
        """Lower ops of an outermost graph, in order. Returns its environment."""
        return self.lower_ops(ops, values, Context(channels))

    def lower_ops(
        self,
        ops: Iterable[Op | RerolledLoop],
        values: Mapping[Tensor, Array | PackedSlot],
        context: Context,
        aliases: Mapping[Tensor, Tensor] | None = None,
    ) -> Environment:
        """Lower ops of one graph, in order. Returns its environment.

        Args:
            aliases: tensors, and the tensors that hold their values; by default, those of the schedule.
        """
        environment = self.environment(values, context, aliases)
        for op in (part for each in ops for part in ((each,) if isinstance(each, RerolledLoop) else each.parts)):
            deliver_pending_signals()
            if isinstance(op, RerolledLoop):
                (lower_batched if is_batch(op) else lower_rerolled)(self, op, environment, context)
                continue
            self.lower_op(op, environment, context)
            if not op.called_graphs:
                environment.record_reads(op)
            for storages in self.scheduling.gathered.get(op, ()):
                pack_together(environment, storages)
        return environment

    def environment(
        self, values: Mapping[Tensor, Array | PackedSlot], context: Context, aliases: Mapping[Tensor, Tensor] | None
    ) -> Environment:
        """Create the environment of a graph; see `lower_ops`."""
        aliases = self.scheduling.aliases if aliases is None else aliases
        return Environment(values, self.hooks.update_order(context.in_loop), aliases, context.iterations)

    def lower_op(self, op: Op, environment: Environment, context: Context) -> None:
        """Lower one op: read operands, apply its rule or lowering, write results."""
        if op.kind in LOWERINGS:
            LOWERINGS[op.kind](self, op, environment, context)
            return
        if op in context.sliced_rows:
            environment.write(op.outputs[0], context.sliced_rows[op])
            return
        if op.kind.view is not None:  # a view is made when it is read
            return
        operands = [environment.value_of(t) for t in op.inputs]
        try:
            self._check(op, operands, context.channels)
            with (
                of_op(op),
                overriding_kernels(self.replicas.platform, self.hooks.overrides),
                jax.default_matmul_precision(self._options.precision),
            ):
                results = self._results(op, operands, context.channels)
        except PopxlError:  # a complete message already
            raise
        except Exception as problem:
            where = f"{op!r} in {op.graph.title}, at {op.source.quoted}"
            raise PopxlError(f"Session: {where}, cannot be run: {problem}") from problem
        store_results(op, results, environment)
        if op.inputs:  # else it waits for nothing
            context.channels.record_computed(results)

    def _results(self, op: Op, operands: Sequence[Array], channels: Channels) -> Any:
        """Results of an op: prefetched after the last call, and rounded stochastically, if the program says so."""
        after = channels.before_last_call if op in self._prefetched else None
        if after is not None:
            operands = [t if is_on_host(t) else memory.prefetched_after(t, after) for t in operands]
        seed = channels.rounding_seed(op)
        if seed is None:
            return self.apply(op, operands, channels)
        if not op.kind.between_replicas:  # collectives exchange their operands unwidened
            operands = [*map(widen, operands)]
        return round_updates(op, self.apply(op, operands, channels), seed)

    def apply(self, op: Op, operands: Sequence[Array], channels: Channels) -> Any:
        """Compute an op's results from operands."""
        return self._apply_collective(op, operands, channels) if op.kind.between_replicas else op.apply(operands)

    def _apply_collective(self, op: Op, operands: Sequence[Array], channels: Channels) -> Any:
        """Compute a collective's results, after earlier collectives."""
        attributes = dict(op.attributes)
        try:
            group = group_of(self.replicas, attributes.pop("stride"), attributes.pop("group_size"))
            if not self._are_ordered((op,)):
                return op.apply(operands, attributes | {"group": group})
            results = op.apply([*map(channels.ordered, operands)], attributes | {"group": group})
            channels.record_exchanged(results)
            return results
        except PopxlError as problem:
            raise PopxlError(f"Session: {op!r} ({op.source}) cannot be run: {problem}") from None

    def channels_of(self, ops: Iterable[Op]) -> tuple[AnyChannel, ...]:
        """The channels that ops use, including called graphs, in a fixed order."""
        ops = tuple(ops)
        return (*channels_of_ops(ops), *((COLLECTIVES,) if self._are_ordered(ops) else ()))

    def _are_ordered(self, ops: Iterable[Op]) -> bool:
        """Whether any op is a collective that requires the token: XLA orders collectives within one computation
        only."""
        return self.hooks.collective_lock is not None and devices_meet(ops, self.replicas)

    def _check(self, op: Op, operands: Sequence[Array], channels: Channels) -> None:
        """Record checks of an op's operands, if options enable them."""
        for number, required in enumerate(op.kind.requirements):
            is_enabled = not required.option or getattr(self._options, required.option)
            if is_enabled and required.operand in op.operand_names():
                operand = operands[op.operand_names().index(required.operand)]
                channels.record_failure(op.id, number, required.holds(operand))

    def lower_call(
        self,
        graph: Graph,
        inputs: Sequence[Array | PackedSlot],
        context: Context,
        packed: bool = False,
        sharing: Sharing = Sharing(),  # noqa: B008  # it has no state
    ) -> Results:
        """Lower a call of a graph: inline its ops, or emit a noinline call.

        Args:
            inputs: values of the graph's inputs; or packed slots, which are overwritten where the graph overwrites
                these inputs.
            packed: whether results may be packed slots too.
            sharing: inputs that share storage. Calls with such inputs are inlined.
        """
        channels = context.channels
        if self.inlines(graph, context, sharing):
            results = self._inline(graph, inputs, context, sharing)
            return results if packed else results.unpacked()
        used = self.channels_of(graph.ops)
        outputs, written, states = self._functions(graph)(tuple(map(load, inputs)), channels.states(used))
        channels.set_states(used, states)
        channels.record_computed((outputs, written))
        return Results(outputs, written)

    def inlines(self, graph: Graph, context: Context, sharing: Sharing) -> bool:
        """Whether a call of a graph is lowered to the graph's ops."""
        if graph not in self._noinline or sharing:
            return True
        return context.channels.running is not None and has_side_effects(graph)

    def _inline(
        self, graph: Graph, inputs: Sequence[Array | PackedSlot], context: Context, sharing: Sharing
    ) -> Results:
        values, aliases = bind_inputs(graph, inputs, sharing)
        if self._prefetched and not self._prefetched.isdisjoint(graph.ops):
            context.channels.enter_call()
        with of_graph(graph, context.depth):
            ops = self.scheduling.schedule(graph)
            environment = self.lower_ops(ops, values, context.in_graph(inputs), aliases)
        return environment.results(graph, values, sharing)

    def _noinline_function(self, graph: Graph) -> Callable[..., Any]:
        """The jitted function of a graph with noinline calls."""
        used = self.channels_of(graph.ops)

        def function(inputs: tuple[Array, ...], taken: Any) -> Any:
            channels = Channels(dict(zip(used, taken, strict=True)))
            context = Context(channels).in_loop_body(channels)  # as in a loop, because it is called several times
            results = self._inline(graph, inputs, context, Sharing()).unpacked()
            return results.outputs, results.modified, channels.states(used)

        function.__name__ = function.__qualname__ = identifier(graph.id) or "graph"
        return noinline(function, in_order=1)


def inlines_calls(options: SessionOptions, platform: str) -> bool:
    """Whether calls are inlined: XLA for GPUs fuses nothing inside of noinline calls, and XLA for TPUs keeps none."""
    return options.calledGraphs == "inlined" or (options.calledGraphs != "kept" and platform != "cpu")


def recursing_into(main: Graph) -> AbstractContextManager[None]:
    """Context with a raised recursion limit, for nested calls and branches of a program.

    Loops in loops get no more than there is, enough for some forty, because XLA does not survive a hundred; branches
    may be a hundred and fifty deep.
    """
    frames = _CALL * nesting(main, is_call) + _BRANCH * min(nesting(main, chooses), 150)
    return raised_recursion_limit(frames, frames_a_level=1)


_CALL, _BRANCH = 6, 10
"""Approximate Python stack frames per nested call and per nested branch; the default limit suffices for some."""


def written_tensors_of(op: Op) -> list[Tensor]:
    """The tensors that an op's lowering returns: outputs, unless they alias modified inputs, then modified inputs."""
    overwritten = [op.inputs[i] for i in sorted(op.modified)]
    return overwritten if op.kind.aliased else [*op.outputs, *overwritten]


def round_updates(op: Op, results: Array | Sequence[Array], seed: Array) -> Sequence[Array]:
    """Round an op's results stochastically, as far as it writes them to float16 or bfloat16 in place."""
    values = list(results) if isinstance(results, tuple | list) else [results]
    overwritten = {op.inputs[i] for i in op.modified}
    targets = written_tensors_of(op)
    for i, (t, value) in enumerate(zip(targets, values, strict=False)):  # `store_results` compares their numbers
        if t in overwritten and t.dtype in HALVES and not is_half(value):
            values[i] = round_stochastically(value, t.dtype.as_jax(), fold_in(seed, i))
    return values


def store_results(op: Op, results: Array | Sequence[Array], environment: Environment) -> None:
    """Write the results of an op's lowering to the environment."""
    values = list(results) if isinstance(results, tuple | list) else [results]
    targets = written_tensors_of(op)
    if len(values) != len(targets):
        raise PopxlInternalError(
            f"{op!r} ({op.source}): the lowering returned {len(values)} results for {len(targets)}."
        )
    for t, value in zip(targets, values, strict=True):
        environment.write(t, cast_to_declared(t, value, op))


def cast_to_declared(t: Tensor, value: Array, op: Op) -> Array:
    """Cast a result to the declared dtype of its tensor, and check its shape: ops may compute in a wider dtype."""
    value = jnp.asarray(value)
    if value.shape != t.shape and op.modified:
        raise PopxlError(
            f"{op!r} ({op.source}) would overwrite {t!r} with a result of shape {value.shape}; what is written in "
            "place has to broadcast to the shape of the first operand."
        )
    if value.shape != t.shape:
        raise PopxlInternalError(
            f"{op!r} ({op.source}) declares {t!r}, and its lowering made an array of shape {value.shape}. If the op is "
            "yours, its `shape` rule and its `lowering` disagree; otherwise this is a bug in popxl."
        )
    wanted = t.dtype.as_jax()
    return value if value.dtype == wanted else value.astype(wanted)
