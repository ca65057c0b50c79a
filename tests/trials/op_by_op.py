"""A machine of sessions that runs programs op by op, on all replicas at once, without compiling them.

Each op is traced once for its operands' shapes, however many programs have it, and computed by NumPy in float64
(`in_numpy`). Thousands of small programs, each run once, take a tenth of the time that XLA would need to compile them.
The meaning of ops, collectives, calls and views is that of the lowering. Every array has a first dimension for the
replicas, also of one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl.core.aliasing import view_of
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import chooses, is_loop
from popxl.fp8_utils import to_device
from popxl.ops.remote import remote_load_inplace_kind, remote_load_kind, remote_store_kind
from runtime.lowering.channels import FAILURE, Channels
from runtime.lowering.collectives import group_of
from runtime.lowering.context import Context
from runtime.lowering.control_flow import Loop
from runtime.lowering.environment import Environment
from runtime.lowering.lower import Lowering, written_tensors_of
from runtime.lowering.platform_hooks import Unordered
from runtime.lowering.registry import LOWERINGS
from runtime.lowering.sharing import bind_inputs
from runtime.machine import Machine
from runtime.program.build_layout import layout_for
from runtime.program.compiled import CompiledProgram, Precompiled
from runtime.program.layout import Layout
from runtime.targets.devices import Device
from runtime.targets.replicas import AXIS, Replicas
from tests.devices import one_device
from tests.trials.in_numpy import Array, in_numpy


class OpByOp(Machine):
    """Finds one device for all replicas, and runs programs op by op."""

    def device(self, description: Any, ir: popxl.Ir) -> Device:
        return one_device(ir.replication_factor)

    def program(self, ir: popxl.Ir, device: Device, precompiled: Precompiled | None) -> CompiledProgram:
        layout = layout_for(ir, device, "inlined")
        return CompiledProgram(device, layout, "", _Interpreter(layout), str, 0.0, False)


@contextmanager
def op_by_op() -> Iterator[None]:
    """Sessions made inside run op by op."""
    before, popxl.Session.machine = popxl.Session.machine, OpByOp()
    try:
        yield
    finally:
        popxl.Session.machine = before


class _Interpreter:
    """A program as an executable: a function of its arrays."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._count = layout, layout.replicas.count
        self._lowering = _OnAll(layout.main.ops, layout.options, keep_calls=False, replicas=layout.replicas)

    def __call__(self, changing: Sequence[Any], constant: Sequence[Any], feeds: Sequence[Any]) -> Any:
        layout = self._layout
        slots = changing[len(layout.changing) :]
        channels = Channels({**self._streams(feeds), **self._slots(slots)})
        blocks = zip((*layout.changing, *layout.constant), (*changing[: len(layout.changing)], *constant), strict=True)
        values = {block.tensors[0]: self._on_all(array, block.shape) for block, array in blocks}
        environment = self._lowering.run(layout.main.ops, values, channels)

        def as_held(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
            return jnp.asarray(array, dtype).reshape(layout.replicas.shape(shape))

        with np.errstate(over="raise"):  # infinite numbers agree in right and in wrong programs
            changed = [as_held(environment.value_of(b.tensors[0]), b.shape, b.dtype) for b in layout.changing]
            changed += [
                as_held(channels.slots(b), (b.entries, *b.tensor_shape), b.tensor_dtype.as_jax())
                for b in layout.buffers
            ]
            fetches = [
                np.asarray(channels.transfers(s), s.dtype.as_jax()).reshape(layout.shape_of_all(s))
                for s in layout.outputs
            ]
        no_failure = np.zeros(layout.replicas.shape(FAILURE.shape), np.int32)
        return tuple(changed), (*fetches, *(no_failure,) * layout.checks)

    def _on_all(self, array: Any, shape: tuple[int, ...]) -> Array:
        """The values of all replicas, of an array of one replica, of all, or that all share."""
        return np.broadcast_to(np.asarray(array), (self._count, *shape))

    def _streams(self, feeds: Sequence[Any]) -> Mapping[Any, Any]:
        """The transfers of streams, each with a dimension for the replicas, and the number of the next."""
        layout, given = self._layout, dict(zip(self._layout.used_inputs, feeds, strict=True))
        streams = [channel for channel in layout.channels if channel is not FAILURE]
        shapes = {s: (layout.capacity[s], self._count, *s.shape) for s in streams}
        return {
            s: (np.asarray(given[s]).reshape(shape) if s in given else np.zeros(shape, s.dtype.as_jax()), 0)
            for s, shape in shapes.items()
        }

    def _slots(self, arrays: Sequence[Any]) -> Mapping[Any, Any]:
        """The slots of remote buffers, behind a dimension for the replicas."""
        buffers = zip(self._layout.buffers, arrays, strict=True)
        return {b: (self._on_all(array, (b.entries, *b.tensor_shape)), 0) for b, array in buffers}


class _OnAll(Lowering):
    """A lowering to computations on the arrays of all replicas, each made at once."""

    def environment(
        self, values: Mapping[Tensor, Any], context: Context, aliases: Mapping[Tensor, Tensor] | None
    ) -> Environment:
        return _Environment(values, Unordered(), aliases or {}, 1, self.replicas)

    def lower_op(self, op: Op, environment: Environment, context: Context) -> None:
        if is_loop(op):
            self._loop(op, environment, context)
        elif chooses(op):
            self._conditional(op, environment, context)
        elif op.kind in (remote_load_kind, remote_load_inplace_kind, remote_store_kind):
            self._remote(op, environment, context.channels)
        elif op.kind in LOWERINGS:
            LOWERINGS[op.kind](self, op, environment, context)
        elif op.kind.view is None:  # a view is made when it is read
            results = _computed(op, self.replicas, [environment.value_of(t) for t in op.inputs])
            for t, value in zip(written_tensors_of(op), results, strict=True):
                environment.write(t, value)

    def _loop(self, op: Op, environment: Environment, context: Context) -> None:
        count, loop, (run,) = self.replicas.count, Loop(op, environment), op.runs
        state, rows = loop.start, []
        for i in run.numbers:
            iteration = loop.begin_iteration(state, np.full(count, i, np.int32))
            iteration.inputs[1] = np.ones(count, bool)
            values, aliases = bind_inputs(loop.graph, iteration.inputs, iteration.sharing)
            inside = self.lower_ops(loop.graph.ops, values, context, aliases)
            state, further = loop.end_iteration(iteration, inside.results(loop.graph, values, iteration.sharing))
            rows.append(further)
        if run.numbers.step < 0:
            rows.reverse()
        loop.finish(state, [np.stack(each, 1) for each in zip(*rows, strict=True)], environment)

    def _conditional(self, op: Op, environment: Environment, context: Context) -> None:
        taken = np.asarray(environment.value_of(op.inputs[0])).reshape(self.replicas.count)
        results = []
        for run in op.runs:
            if (taken == run.condition).any():
                given = [environment.value_of(t) for t in run.operands]
                results.append(self.lower_call(run.graph, given, context).outputs[: len(op.outputs)])
        if len(results) == 2:
            first, second = results if op.runs[0].condition else results[::-1]
            masks = (taken.reshape(-1, *(1,) * len(t.shape)) for t in op.outputs)
            results = [[np.where(mask, a, b) for mask, a, b in zip(masks, first, second, strict=True)]]
        for t, value in zip(op.outputs, results[0], strict=True):
            environment.write(t, value)

    def _remote(self, op: Op, environment: Environment, channels: Channels) -> None:
        buffer, (t, offset) = op.attributes["buffer"], op.inputs
        slots, (slot,) = channels.slots(buffer), {*np.asarray(environment.value_of(offset)).ravel().tolist()}
        if op.kind is remote_store_kind:
            slots = np.array(slots, np.result_type(slots, environment.value_of(t)))
            slots[:, slot] = environment.value_of(t)
            channels.set_slots(buffer, slots)
        else:
            environment.write(op.inputs[0] if op.kind is remote_load_inplace_kind else op.outputs[0], slots[:, slot])


class _Environment(Environment):
    """An environment whose values have a first dimension for the replicas."""

    def __init__(self, values: Any, order: Any, aliases: Any, iterations: int, replicas: Replicas) -> None:
        super().__init__(values, order, aliases, iterations)
        self._replicas = replicas

    def _storage(self, t: Tensor) -> Array:
        if view_of(t) is not None:
            raise NotImplementedError(f"{t!r} is a view of several tensors")
        if t not in self.values and isinstance(t, Constant):
            data = to_device(t.data, t.dtype)
            self.values[t] = np.broadcast_to(data, (self._replicas.count, *data.shape))
        return super()._storage(t)

    def _resolve_views(self, t: Tensor) -> tuple[Tensor, list[Any]]:
        storage, views = super()._resolve_views(t)
        return storage, [_View(op, self._replicas) for op in views]


class _View:
    """A view op on the arrays of all replicas."""

    def __init__(self, op: Op, replicas: Replicas) -> None:
        self._op, self._replicas = op, replicas

    def apply(self, values: Sequence[Array]) -> Array:
        return _computed(self._op, self._replicas, values)[0]

    def put(self, bases: Sequence[Array], value: Array) -> tuple[Array, ...]:
        return _computed(self._op, self._replicas, [*bases, value], is_put=True)


def _computed(op: Op, replicas: Replicas, arrays: Sequence[Any], is_put: bool = False) -> list[Array]:
    """The results of an op on the arrays of all replicas; or of writing a view back, the last of the arrays."""
    tensors = (*op.inputs, *op.outputs) if is_put else op.inputs
    attributes = tuple((name, _hashable(value)) for name, value in op.attributes.items())
    shapes = tuple((t.shape, t.dtype) for t in tensors)
    key = (op.kind, op.operands, attributes, replicas.count, is_put, shapes)
    if (function := _FUNCTIONS.get(key)) is None:
        lifted = jax.vmap(_function(op, replicas, is_put), axis_name=AXIS, axis_size=replicas.count)
        specs = [jax.ShapeDtypeStruct((replicas.count, *t.shape), t.dtype.as_jax()) for t in tensors]
        function = _FUNCTIONS[key] = in_numpy(lifted, specs)
    return function(*map(np.asarray, arrays))


_FUNCTIONS: dict[Any, Callable[..., list[Array]]] = {}


def _function(op: Op, replicas: Replicas, is_put: bool) -> Callable[..., Any]:
    """An op as a function of the arrays of one replica."""
    attributes = dict(op.attributes)
    if op.kind.between_replicas:
        attributes["group"] = group_of(replicas, attributes.pop("stride"), attributes.pop("group_size"))
    if is_put and op.kind.view is not None:
        put = op.kind.view.put
        return lambda *arrays: put(arrays[:-1], arrays[-1], **attributes)
    return op.kind.on_arrays(op.operands, attributes)


def _hashable(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.shape, str(value.dtype), value.tobytes())
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
