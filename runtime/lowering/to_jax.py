"""`to_jax`: a graph as a function of arrays, for use inside of any JAX program.

It is the lowering that a session uses, without the session: nothing is compiled or kept on a device, and `jax.jit`,
`jax.grad`, `jax.vmap` apply. Gradients are those that the ops declare: no gradient flows through `popxl.ops.detach`,
and a rule of your own op is applied. The other direction, a JAX function in a graph, is `popxl.from_jax`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from popxl.analysis.edits import Snapshot
from popxl.analysis.transfers import transfers_of
from popxl.base.arguments import check_type
from popxl.base.arrays import Array
from popxl.base.log import Logger
from popxl.base.names import identifier
from popxl.core.aliasing import lowered_ops, used_storages, written_inputs, written_tensors
from popxl.core.rounding import RoundingKey
from popxl.core.tensor import Tensor, Variable
from popxl.errors import PopxlError
from popxl.fp8_utils import in_transit, to_device
from popxl.graph import Graph
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.transforms.jax_keys import key_data
from popxl.values.spec import TensorSpec, brief
from runtime.lowering.channels import (
    FAILURE,
    Channel,
    Channels,
    Failure,
    channels_of,
    decode_transfer,
    encode_transfer,
)
from runtime.lowering.context import Context
from runtime.lowering.differentiable import DifferentiableLowering
from runtime.lowering.lower import inlines_calls, recursing_into
from runtime.targets.replicas import Replicas

_log = Logger("session")


def to_jax(graph: Graph) -> GraphFunction:
    """Convert a graph to a pure JAX function, compatible with `jax.jit`, `jax.grad`, `jax.vmap` and other transforms.

    The arguments are arrays for the inputs of the graph, in their order or by their names (`Tensor.path`: those that
    stand for a module's variables have dotted paths, such as `layers.0.query.weight`). They have the shape and
    dtype of the input; Python numbers are taken in its dtype, and nothing else is converted. Float8 arrays are JAX's
    (`float8_143` is `float8_e4m3fnuz`); those of NumPy, in structured dtypes, are accepted too.

    The result is the graph's output: one array, or a tuple of them if there are none or several. If the graph changes
    inputs that it takes by reference (`f.written` names them), the result is a pair: that, and a dict of the new
    contents by name. No argument is ever overwritten.

    The **main graph** has no inputs and outputs; its function uses names. It takes the variables (by default, their
    host copies) and the input streams, and returns a pair: a dict of the output streams, and a dict of the variables
    that it changed. Streams have the shapes that `session.run` expects.

    On CPUs, graphs with several call sites are compiled once. Elsewhere calls are inlined, because XLA for GPUs fuses
    nothing inside of them. `ir.options.calledGraphs = "kept"` or `"inlined"` decides otherwise. Printing ops print.
    Requirements of ops on their operands are checked at run time if the function is given to
    `jax.experimental.checkify.checkify`. Gradients of complex arguments are JAX's, the conjugates of PyTorch's and
    `autodiff`'s.

    Args:
        graph: graph in its current state: a function refuses to run once ops have been added.

    Returns:
        The function. It raises `TypeError` for missing, unknown and unsuitable arguments, `ValueError` for shapes that
        do not fit, and `PopxlError` if the graph has 64-bit numbers and JAX is not set to keep them.

    Raises:
        TypeError: if `graph` is not a graph.
        PopxlError: if the graph talks to the host by streams without being the main graph, or if the Ir has replicas.

    Example:
        >>> graph = ir.create_graph(lambda x, w: ops.sum(ops.gelu(x @ w)), x, w)
        >>> loss = popxl.to_jax(graph)
        >>> gradient = jax.jit(jax.grad(loss, argnums=1))(np.ones((2, 4)), np.eye(4, 3))
        >>> gradient.shape
        (4, 3)

        A training step, on variables that JAX holds:

        >>> step = popxl.to_jax(ir.main_graph)
        >>> variables = step.variables()
        >>> for images, labels in batches:
        ...     fetched, changed = jax.jit(step)(**variables, images=images, labels=labels)
        ...     variables |= changed
    """
    check_type(graph, Graph, "to_jax: `graph`", "a Graph")
    if graph is graph.main_graph:
        return main_function(graph, "to_jax")
    _check_replicas(graph, "to_jax")
    channels = [channel for channel in _channels_of(graph) if channel is not FAILURE]
    if channels:
        raise PopxlError(
            f"to_jax: {graph.title} uses {', '.join(map(str, channels))}, and a function only has its arguments and "
            "results. Load and store in the main graph and pass the tensors, or make a function of the main graph "
            "(`popxl.to_jax(ir.main_graph)`), whose arguments are the streams."
        )
    return GraphFunction(graph)


def main_function(main: Graph, asker: str, replicas: Replicas | None = None, checks: bool = True) -> MainFunction:
    """Convert a main graph to a function of variables and streams, by name.

    Args:
        asker: name of the caller, at the beginning of errors.
        replicas: replicas, and platform to lower for; by default, JAX's default platform.
        checks: whether requirements of ops on their operands become `checkify` checks.
    """
    _check_replicas(main, asker)
    others = [channel for channel in _channels_of(main) if not isinstance(channel, Stream | Failure)]
    if others:
        raise PopxlError(f"{asker}: {main.title} uses {', '.join(map(str, others))}, which only a Session has.")
    return MainFunction(main, asker, Replicas() if replicas is None else replicas, checks)


def _channels_of(graph: Graph) -> tuple[Channel, ...]:
    """Channels required by a graph's function."""
    return tuple(c for c in channels_of(graph) if not isinstance(c, RoundingKey))


def _check_replicas(graph: Graph, asker: str) -> None:
    if graph.ir.replication_factor > 1:
        raise PopxlError(
            f"{asker}: {graph.ir!r} has {graph.ir.replication_factor} replicas, which only a Session runs. Build the "
            "Ir with replication=1, and apply `jax.shard_map` or `jax.vmap` to the function."
        )


@dataclass(frozen=True)
class _Parameter:
    """A function argument: array spec, and default variable."""

    name: str
    spec: TensorSpec
    default: Variable | None = None


class GraphFunction:
    """A graph as a JAX function. `popxl.to_jax` creates it, and documents arguments and results.

    Attributes:
        written: names of the arguments that the graph changes; the second result has their new contents.
    """

    _replicas = Replicas()

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.__name__ = self.__qualname__ = identifier(graph.id) or "main_graph"
        self._remember_graph()
        if graph.ir.rounding_key in channels_of(graph):
            _log.warn(
                f"to_jax: {graph.title} updates float16 or bfloat16 in place. A session would round these "
                "stochastically (`enableStochasticRounding`); the function rounds to nearest."
            )
        computed = (t for g in self._snapshot.graphs for op in g.ops for t in (*op.inputs, *op.outputs))
        self._dtypes = {t.dtype for t in (*graph.inputs, *graph.outputs, *computed)}
        self._outputs = graph.outputs
        self._set_parameters()
        self.inputs = tuple(self._parameters)
        if all(name.isidentifier() for name in self.inputs):
            kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
            self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in self.inputs])

    def _remember_graph(self) -> None:
        """Remember the state of the graph, which the next call lowers: only then is its platform known, because asking
        for JAX's default starts devices."""
        self._snapshot, self._known_edits = Snapshot(self.graph), self.graph.ir.edits.count
        self._platform: str | None = None

    def _set_parameters(self) -> None:
        """Set the parameters, and which of them the graph writes."""
        changed = written_inputs(self.graph)
        names = [t.path for t in self.graph.inputs]
        if len({*names}) < len(names):
            names = [t.name for t in self.graph.inputs]
        inputs = dict(zip(names, self.graph.inputs, strict=True))
        self._modified_inputs = {i: name for i, (name, t) in enumerate(inputs.items()) if t.by_ref and i in changed}
        self.written = tuple(self._modified_inputs.values())
        self._parameters = {name: _Parameter(name, t.spec) for name, t in inputs.items()}

    def __repr__(self) -> str:
        parameters = ", ".join(f"{p.name}: {p.spec}" for p in self._parameters.values())
        return f"{type(self).__name__.strip('_')}[{self.__name__}({parameters})]"

    def __call__(self, /, *arrays: Any, **named: Any) -> Any:
        """Run the graph on arrays. See `popxl.to_jax`."""
        values = self._arguments(arrays, named)
        channels = Channels({FAILURE: (jnp.asarray(FAILURE.start), 0)})
        with recursing_into(self.graph):
            results = self._lowering.lower_call(self.graph, [values[name] for name in self.inputs], Context(channels))
        self._check(channels)
        count = len(self._outputs)
        outputs = results.outputs[0] if count == 1 else results.outputs[:count]
        if not self._modified_inputs:
            return outputs
        return outputs, {name: results.modified[i] for i, name in self._modified_inputs.items()}

    def variables(self, present: Mapping[Variable, np.ndarray] | None = None) -> dict[str, Array]:
        """Host values of variables, by name, as initial arguments. Only main graphs have variables.

        Args:
            present: values that replace the host copies, for some variables.
        """
        known = present or {}
        own = {p.name: p.default for p in self._parameters.values() if p.default is not None}
        return {name: _on_device(v, known[v] if v in known else v.numbers()) for name, v in own.items()}

    # Arguments ------------------------------------------------------------------------------------------------------

    def _arguments(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Array]:
        """Check all arguments. Returns arrays by name."""
        self._prepare()
        if len(arrays) > len(self.inputs):
            raise TypeError(
                f"{self.__name__}: takes {len(self.inputs)} arrays, {list(self.inputs)}; {len(arrays)} were given."
            )
        given = dict(zip(self.inputs, arrays, strict=False))
        twice = [name for name in named if name in given]
        unknown = [name for name in named if name not in self._parameters]
        missing = [p.name for p in self._parameters.values() if p.default is None and p.name not in given | dict(named)]
        problems = [
            f"{what} {', '.join(names)}"
            for what, names in (("missing are", missing), ("unknown are", unknown), ("given twice are", twice))
            if names
        ]
        if problems:
            raise TypeError(
                f"{self.__name__}: the arguments do not match the inputs {list(self.inputs)}: {'; '.join(problems)}."
            )
        given |= named
        values = {}
        for name, p in self._parameters.items():
            if name in given:
                values[name] = self._convert(p, given[name])
            elif p.default is not None:
                values[name] = _on_device(p.default, p.default.numbers())
        return values

    def _convert(self, parameter: _Parameter, value: Any) -> Array:
        """Convert an argument to an array. Raises `TypeError` or `ValueError` on mismatch."""
        spec, name = parameter.spec, f"{self.__name__}: the input `{parameter.name}`"
        if isinstance(value, np.ndarray) and value.dtype.names and value.dtype == spec.dtype.as_numpy():
            value = to_device(value, spec.dtype)
        try:
            (array,) = map(jnp.asarray, key_data([value]))
        except (TypeError, ValueError) as problem:
            raise TypeError(f"{name} is {brief(spec)}; got {value!r} ({type(value).__name__}): {problem}") from problem
        wanted = spec.dtype.as_jax()
        if array.dtype != wanted:
            if not (array.weak_type and _can_hold(wanted, array.dtype)):
                raise TypeError(
                    f"{name} is {brief(spec)}; got an array of the dtype {array.dtype}. Nothing is converted: pass "
                    f"`array.astype({str(wanted)!r})`."
                )
            array = array.astype(wanted)
        if array.shape != spec.shape:
            raise ValueError(
                f"{name} is {brief(spec)}; got an array of the shape {array.shape}. Nothing is broadcast; for a batch "
                "of inputs use `jax.vmap`."
            )
        return array

    def _prepare(self) -> None:
        """Check for later graph edits and JAX's 64-bit setting; lower the graph again for new outputs or platforms."""
        if self._known_edits != self.graph.ir.edits.count:
            if changes := self._snapshot.changes(outputs=False):  # autodiff may add outputs
                raise PopxlError(
                    f"{self.__name__}: {'; '.join(changes)} since `popxl.to_jax` was called. Call it again."
                )
            self._remember_graph()
        platform = self._replicas.platform  # of `jax.default_device`, as for a target
        if self._platform != platform:
            options = self.graph.ir.options
            keeps = not inlines_calls(options, platform)
            self._lowering = DifferentiableLowering(self.graph.ops, options, keeps, self._replicas)
            self._platform = platform
        for dtype in self._dtypes:
            if jax.dtypes.canonicalize_dtype(dtype.as_jax()) != dtype.as_jax():
                raise PopxlError(
                    f"{self.__name__}: {self.graph.title} has numbers of the dtype {dtype.name}, and JAX is set to "
                    "narrow them to 32 bits. Keep them with `jax.config.update('jax_enable_x64', True)`, or inside of "
                    "`with jax.enable_x64(True):`."
                )

    def _check(self, channels: Channels) -> None:
        """Report failed checks to `checkify`; a no-op outside of it."""
        if FAILURE not in channels_of(self.graph):
            return
        id, number = channels.transfers(FAILURE)
        for op in lowered_ops(self.graph.ops):
            for k, required in enumerate(op.kind.requirements):
                where = f"in {op!r} of {op.graph.title} ({op.source})"
                message = f"{where}, `{required.operand}` {required.message}, and it is not."
                as_format = message.replace("{", "{{").replace("}", "}}")
                checkify.debug_check((id != op.id) | (number != k), as_format)


class MainFunction(GraphFunction):
    """A main graph as a JAX function of variables and streams, by name. `main_function` creates it."""

    def __init__(self, main: Graph, asker: str, replicas: Replicas, checks: bool) -> None:
        self._asker, self._replicas, self._checks = asker, replicas, checks
        super().__init__(main)

    def specs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Argument types by name."""
        return {p.name: jax.ShapeDtypeStruct(p.spec.shape, p.spec.dtype.as_jax()) for p in self._parameters.values()}

    def _set_parameters(self) -> None:
        main = self.graph
        used, changed = used_storages(main), written_tensors(main)
        self._variables = tuple(v for v in main.variables if v in used)
        self.written = tuple(v.name for v in self._variables if v in changed)
        streams = _channels_of(main)
        self._loads = tuple(s for s in streams if isinstance(s, HostToDeviceStream))
        self._stores = tuple(s for s in streams if isinstance(s, DeviceToHostStream))
        self._capacities = {s: s.num_host_transfers for s in (*self._loads, *self._stores)}
        for stream, count in transfers_of(main).items():
            if count > self._capacities[stream]:
                setting = "its own `num_host_transfers`" if stream.has_own_transfers else "`ir.num_host_transfers`"
                raise PopxlError(
                    f"{self._asker}: the program makes {count} transfers of {stream} in one run, and {setting} is "
                    f"{self._capacities[stream]}. Set it to at least {count}."
                )
        self._parameters = {v.name: _Parameter(v.name, v.spec, v) for v in self._variables}
        self._feeds: dict[HostToDeviceStream, str] = {}
        for s in self._loads:
            name = s.tensor.name
            while name in self._parameters:  # a stream may have the name of a variable
                name += "_stream"
            self._feeds[s] = name
            self._parameters[name] = _Parameter(name, TensorSpec(self._host_shape(s), s.dtype))

    def _host_shape(self, stream: Stream) -> tuple[int, ...]:
        return (self._capacities[stream], *stream.shape) if self._capacities[stream] > 1 else stream.shape

    def __call__(self, /, *arrays: Any, **named: Any) -> Any:
        if arrays:
            raise TypeError(f"{self.__name__}: takes variables and streams by name only: {', '.join(self.inputs)}.")
        values = self._arguments((), named)
        states: dict[Channel, Any] = {FAILURE: (jnp.asarray(FAILURE.start), 0)}
        for feed, name in self._feeds.items():
            transfers = encode_transfer(values[name], feed.dtype)
            states[feed] = (transfers.reshape(self._capacities[feed], *feed.shape), 0)
        for s in self._stores:
            states[s] = (jnp.zeros((self._capacities[s], *s.shape), in_transit(s.dtype)), 0)
        channels = Channels(states)
        state: dict[Tensor, Array] = {v: values[v.name] for v in self._variables}
        with recursing_into(self.graph):
            environment = self._lowering.run(self.graph.ops, state, channels)
        if self._checks:
            self._check(channels)
        stored = {s: decode_transfer(channels.transfers(s), s.dtype) for s in self._stores}
        fetched = {s.tensor.name: array.reshape(self._host_shape(s)) for s, array in stored.items()}
        return fetched, {v.name: environment.value_of(v) for v in self._variables if v.name in self.written}


def _on_device(v: Variable, data: np.ndarray) -> Array:
    """Copy a variable's numbers to a new device array."""
    return jnp.asarray(to_device(np.array(data), v.dtype))


_KINDS_OF_NUMBERS = (np.integer, np.floating, np.complexfloating)
"""Kinds of dtypes, each of which can represent Python numbers of the earlier ones."""


def _can_hold(wanted: Any, dtype: Any) -> bool:
    """Whether a dtype can represent Python numbers of another dtype: integers cannot represent floats."""
    for i, kind in enumerate(_KINDS_OF_NUMBERS):
        if jnp.issubdtype(dtype, kind):
            return any(jnp.issubdtype(wanted, each) for each in _KINDS_OF_NUMBERS[i:])
    return False  # booleans are no numbers
