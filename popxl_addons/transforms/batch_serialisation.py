"""Running a graph micro-batch after micro-batch, with its activations in remote memory: phased execution.

A serialised graph is a loop. Each iteration loads the inputs of one micro-batch from host streams or remote buffers,
calls the original graph, and stores the requested values. For any number of iterations, the program holds the loop's
body once. A forward graph and its gradient graph are serialised together, so that the second loop finds the values that
the first one computed. The loop is made in `_serial_loop`; positions of values in a buffer are in `remote_handle`.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import popxl
from popxl.extend.arguments import check_type, integer
from popxl.replica_grouping import Groups, means_groups
from popxl.tensor import Tensor
from popxl_addons.dot_tree import check_leaves
from popxl_addons.grad_info import activation_inputs, gradient_inputs
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.transforms._serial_loop import SerialLoop, Values
from popxl_addons.transforms.remote_handle import RemoteBufferWithOffset, RemoteHandle, batch_serial_buffer

__all__ = [
    "BatchSerialResult",
    "RemoteHandle",
    "batch_serial_buffer",
    "batch_serialise",
    "batch_serialise_fwd_and_grad",
    "batch_serialise_non_overlapped",
    "batch_serialise_overlapped",
]

IOMode = Literal["compute", "io", "io_overlapped"]
LoadHandles = dict[Tensor, popxl.HostToDeviceStream | RemoteHandle | RemoteBufferWithOffset]
StoreStreams = dict[Tensor, popxl.DeviceToHostStream]
StoreBuffers = dict[Tensor, RemoteHandle | RemoteBufferWithOffset]
StoreBuffersOrGroups = dict[Tensor, RemoteHandle | RemoteBufferWithOffset | Groups]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BatchSerialResult:
    """A serialised graph, with value locations.

    Attributes:
        graph: the new graph. Its inputs are the row, an int32 scalar; the seed, if there is one; and the inputs of the
            original that are not loaded, under their names in `args`. It has no outputs.
        stored_buffers: buffer of each tensor of the original graph that was to be stored.
    """

    graph: GraphWithNamedArgs
    stored_buffers: dict[Tensor, RemoteHandle]
    _inputs: Values = field(repr=False)

    def remap_tensors(self, ts: NamedTensors) -> NamedTensors:
        """Equal names, with original inputs replaced by new graph inputs.

        Raises:
            KeyError: for an input that is loaded, and for any other tensor.

        Example:
            >>> ir = popxl.Ir()
            >>> graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: x + x, popxl.TensorSpec((), popxl.float32)))
            >>> serial = batch_serialise(graph, 4, {}, {}, {}, io_mode="compute")
            >>> x = addons.NamedTensors(x=graph.graph.inputs[0])
            >>> serial.remap_tensors(x).x == serial.graph.graph.inputs[1]
            True
        """
        return ts.remap(self._inputs)


def batch_serialise(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: LoadHandles,
    store_streams: StoreStreams,
    store_buffers: StoreBuffers,
    seed_input: Tensor | None = None,
    rows: int = 1,
    io_mode: IOMode = "io",
) -> BatchSerialResult:
    """A graph that runs `graph` `steps` times, with inputs and outputs of each time outside of the device.

    An input that is neither loaded nor the seed is the same in every iteration, and an input of the new graph; by
    reference if it was. Outputs that are not stored are dropped. The new graph is called with the number of a row:
    ``result.graph.bind(variables).call(row)``, or ``call(row, seed)``.

    Args:
        graph: graph to run. Its named inputs cannot be loaded.
        steps: number of iterations, 1 or more.
        load_handles: stream or buffer of each input, that each iteration's value is loaded from. Tuples become
            `RemoteHandle`s in place, here and in `store_buffers`.
        store_streams: stream of each output or input, that each iteration's value is stored to.
        store_buffers: likewise for buffers. An input that is loaded from a buffer is not stored in another one.
        seed_input: an input that gets another random seed in each iteration, split from the one of the call.
        rows: the rows that the graph will be called with are 0 to ``rows - 1``. Buffers that are too small for them
            grow.
        io_mode: tiles for transfers: ``"compute"`` or ``"io"``; ``"io_overlapped"`` also loads the values of an
            iteration during the one before. The numbers are the same.

    Raises:
        ValueError: if `steps` or `rows` is below 1; for an unknown `io_mode`; in the modes with I/O tiles if there are
            none (``ir.options.numIOTiles``); for a key that is no such tensor of `graph`; for a buffer whose slots do
            not fit.
        TypeError: for anything else in the place of a handle or a stream.
        KeyError: if a named input is to be loaded.

    Example:
        Doubles four numbers of a stream. They are then in the slots 0 to 3 of the buffer.

        >>> ir = popxl.Ir()
        >>> double = addons.GraphWithNamedArgs(ir.create_graph(lambda x: x * 2.0, popxl.TensorSpec((), popxl.float32)))
        >>> (x,), (y,) = double.graph.inputs, double.graph.outputs
        >>> with ir.main_graph:
        ...     stream, buffer = popxl.h2d_stream((), popxl.float32), batch_serial_buffer(y, steps=4)
        ...     serial = batch_serialise(double, 4, {x: stream}, {}, {y: (buffer, 0)}, io_mode="compute")
        ...     _ = serial.graph.call(0)
        >>> ir.num_host_transfers = 4
    """
    check_type(graph, GraphWithNamedArgs, "batch_serialise: `graph`", "a GraphWithNamedArgs")
    _check_settings(graph.graph.ir, steps, rows, io_mode)
    if io_mode == "io_overlapped" and steps == 1:
        _logger.warning("`%s` has one step, and nothing to overlap: the io_mode is 'io'.", graph.graph.name)
        io_mode = "io"
    handles = load_handles, store_streams, store_buffers
    return _serialised(graph, steps, *handles, seed_input, rows, io_mode)


def batch_serialise_non_overlapped(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: LoadHandles,
    store_streams: StoreStreams,
    store_buffers: StoreBuffers,
    seed_input: Tensor | None = None,
    rows: int = 1,
    use_io_tiles: bool = False,
) -> BatchSerialResult:
    """`batch_serialise` in the mode ``"io"`` or, without `use_io_tiles`, ``"compute"``."""
    handles = load_handles, store_streams, store_buffers
    return _serialised(graph, steps, *handles, seed_input, rows, "io" if use_io_tiles else "compute")


def batch_serialise_overlapped(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: LoadHandles,
    store_streams: StoreStreams,
    store_buffers: StoreBuffers,
    seed_input: Tensor | None = None,
    rows: int = 1,
) -> BatchSerialResult:
    """`batch_serialise` in the mode ``"io_overlapped"``."""
    handles = load_handles, store_streams, store_buffers
    return _serialised(graph, steps, *handles, seed_input, rows, "io_overlapped")


def batch_serialise_fwd_and_grad(
    forward_graph: GraphWithNamedArgs,
    gradient_graph: GraphWithNamedArgs,
    named_inputs_for_grad_graph: NamedTensors,
    steps: int,
    load_handles: LoadHandles,
    store_streams: StoreStreams,
    store_buffers: StoreBuffersOrGroups,
    seed_input: Tensor | None = None,
    rows: int = 1,
    io_mode: IOMode = "io",
) -> tuple[BatchSerialResult, BatchSerialResult]:
    """`batch_serialise` forward and gradient graphs together, connecting stored activations.

    A forward value that the gradient graph needs is an input of the new gradient graph, if it is one of
    `named_inputs_for_grad_graph`. If not, it is loaded from the buffer that the forward graph loads it from, or stores
    it in; failing that, the forward graph stores it in a new buffer. This includes inputs of the forward graph, and its
    seed: an iteration of the backward pass sees the values of the same iteration of the forward pass.

    The `args` of the new gradient graph are these named inputs, and then those of `gradient_graph`: accumulators, say.
    Bind it to both sets of variables. `gradient_graph.args` becomes the same.

    Args:
        forward_graph, gradient_graph: a graph, and its gradient graph from `autodiff` or another transform.
        named_inputs_for_grad_graph: inputs of the forward graph, usually ``forward_graph.args``. Those that the
            gradient graph does not need are left out.
        steps, rows, io_mode: as for `batch_serialise`.
        load_handles: as for `batch_serialise`, by tensors of either graph. Each gradient that is an input of
            `gradient_graph` has to be loaded.
        store_streams: as for `batch_serialise`, by tensors of either graph.
        store_buffers: likewise. A replica grouping, or names of axes, stand for a new buffer, sharded over them;
            in place, it becomes the `RemoteHandle`.
        seed_input: as for `batch_serialise`, of the forward graph.

    Returns:
        The results for the forward graph and for the gradient graph.

    Raises:
        ValueError, TypeError, KeyError: as for `batch_serialise`. `ValueError` too if `gradient_graph` is not of
            `forward_graph`, if a gradient is not loaded, and if two inputs of the new gradient graph have one name.
        RuntimeError: for an activation that the forward graph neither takes nor returns.

    Example:
        The gradient of x², four times. The values of x are kept in a new buffer.

        >>> ir = popxl.Ir()
        >>> square = addons.GraphWithNamedArgs(ir.create_graph(lambda x: x * x, popxl.TensorSpec((), popxl.float32)))
        >>> grad = addons.autodiff(square)
        >>> x, dy, dx = square.graph.inputs[0], grad.graph.inputs[0], grad.graph.outputs[0]
        >>> with ir.main_graph:
        ...     xs, dys = popxl.h2d_stream((), popxl.float32), popxl.h2d_stream((), popxl.float32)
        ...     dxs = popxl.d2h_stream((), popxl.float32)
        ...     forward, backward = batch_serialise_fwd_and_grad(
        ...         square, grad, square.args, 4, {x: xs, dy: dys}, {dx: dxs}, {}, io_mode="compute"
        ...     )
        ...     _ = forward.graph.call(0), backward.graph.call(0)
        >>> list(forward.stored_buffers) == [x]
        True
    """
    caller = "batch_serialise_fwd_and_grad"
    check_type(forward_graph, GraphWithNamedArgs, f"{caller}: `forward_graph`", "a GraphWithNamedArgs")
    check_type(gradient_graph, GraphWithNamedArgs, f"{caller}: `gradient_graph`", "a GraphWithNamedArgs of a gradient")
    check_leaves(named_inputs_for_grad_graph, Tensor, f"{caller}: `named_inputs_for_grad_graph`", "NamedTensors")
    _check_dictionaries(caller, load_handles, store_streams, store_buffers)
    _check_settings(forward_graph.graph.ir, steps, rows, io_mode)
    _check_pair(forward_graph, gradient_graph, (*load_handles, *store_streams, *store_buffers))
    loads = _load_sources(load_handles)
    names = {t: name for name, t in named_inputs_for_grad_graph.to_dict().items()}
    _check_connections(gradient_graph, loads, names)

    def location(t: Tensor, destination: Any = None) -> RemoteHandle:
        """Storage location of `t` values in the forward graph."""
        if isinstance(source := loads.get(t), RemoteHandle):
            return source
        if destination is None or means_groups(destination):
            return RemoteHandle(batch_serial_buffer(t, steps, rows, destination), 0, destination)
        return RemoteHandle.from_argument("store_buffers", destination)

    def serialised(graph: GraphWithNamedArgs, seed_input: Tensor | None = None) -> BatchSerialResult:
        def own_tensors(destinations: dict[Tensor, Any]) -> dict[Tensor, Any]:
            return {t: destination for t, destination in destinations.items() if t.graph == graph.graph}

        return batch_serialise(
            graph, steps, own_tensors(loads), own_tensors(store_streams), own_tensors(stores), seed_input, rows, io_mode
        )

    with forward_graph.graph.ir.undone_on_failure():
        stores = {t: location(t, given) for t, given in store_buffers.items()}
        named: dict[str, Tensor] = {}
        for t, value in activation_inputs(gradient_graph.grad_graph_info).items():
            if t in loads:
                continue
            if value in names:
                named[names[value]] = t
                continue
            if value not in stores:
                stores[value] = location(value)
            loads[t] = stores[value]
        args = _merge_names(named, gradient_graph.args)
        forward = serialised(forward_graph, seed_input)
        gradient = serialised(GraphWithNamedArgs(gradient_graph.graph, args))
    gradient_graph.args = args
    load_handles.update({t: loads[t] for t in load_handles})
    store_buffers.update({t: stores[t] for t in store_buffers})
    return forward, gradient


def _serialised(
    graph: GraphWithNamedArgs,
    steps: int,
    load_handles: LoadHandles,
    store_streams: StoreStreams,
    store_buffers: StoreBuffers,
    seed_input: Tensor | None,
    rows: int,
    io_mode: IOMode,
) -> BatchSerialResult:
    """Convert a checked graph, with inputs and outputs, to a loop."""
    _check_dictionaries("batch_serialise", load_handles, store_streams, store_buffers)
    loads = _load_sources(load_handles)
    stores = {t: RemoteHandle.from_argument("store_buffers", handle) for t, handle in store_buffers.items()}
    _check_tensors(graph, loads, store_streams, stores, seed_input)
    remote_loads = {t: source for t, source in loads.items() if isinstance(source, RemoteHandle)}
    new_values = {t: handle for t, handle in stores.items() if t not in remote_loads}
    loop = SerialLoop(graph.graph, steps, loads, store_streams, new_values, seed_input, io_mode != "compute")
    with graph.graph.ir.undone_on_failure():
        loop_graph, inputs = loop.build(overlapped=io_mode == "io_overlapped")
    for handle in (*remote_loads.values(), *new_values.values()):
        handle.buffer.entries = max(handle.buffer.entries, handle.entries(steps, rows))
    load_handles.update(loads)
    store_buffers.update(stores)
    return BatchSerialResult(
        GraphWithNamedArgs(loop_graph, graph.args.remap(inputs)),
        {t: remote_loads.get(t, stores[t]) for t in stores},
        inputs,
    )


def _load_sources(load_handles: LoadHandles) -> dict[Tensor, popxl.HostToDeviceStream | RemoteHandle]:
    """The streams and handles themselves, also for tuples."""
    return {
        t: handle
        if isinstance(handle, popxl.HostToDeviceStream)
        else RemoteHandle.from_argument("load_handles", handle)
        for t, handle in load_handles.items()
    }


def _merge_names(named: dict[str, Tensor], args: NamedTensors) -> NamedTensors:
    """Names for activations, merged with existing `args` names of the gradient graph."""
    existing = args.to_dict()
    if conflicts := [name for name in named if existing.get(name, named[name]) != named[name]]:
        raise ValueError(
            f"batch_serialise_fwd_and_grad: {conflicts} of `named_inputs_for_grad_graph` are names of other inputs in "
            "`gradient_graph.args`; the new gradient graph would have two inputs of one name. Rename one of them."
        )
    return NamedTensors.from_dict({**named, **existing})


# Checks -------------------------------------------------------------------------------------------------------------


def _check_dictionaries(function: str, load_handles: Any, store_streams: Any, store_buffers: Any) -> None:
    """Check load and store dictionaries of tensors, which are modified in place."""
    for name, mapping in (
        ("load_handles", load_handles),
        ("store_streams", store_streams),
        ("store_buffers", store_buffers),
    ):
        check_type(mapping, MutableMapping, f"{function}: `{name}`", "a dictionary with tensors of the graph as keys")
        for key in mapping:
            check_type(key, Tensor, f"{function}: each key of `{name}`", "a tensor of the graph")


def _check_settings(ir: popxl.Ir, steps: int, rows: int, io_mode: str) -> None:
    for name, value in (("steps", steps), ("rows", rows)):
        if integer(value, f"batch_serialise: `{name}`") < 1:
            raise ValueError(f"batch_serialise: `{name}` is {value}; expected 1 or more.")
    if io_mode not in get_args(IOMode):
        raise ValueError(f"batch_serialise: `io_mode` is {io_mode!r}; expected one of {get_args(IOMode)}.")
    if io_mode != "compute" and ir.options.numIOTiles < 1:
        raise ValueError(
            f"batch_serialise: IR must have IO tiles for `io_mode` {io_mode!r}. Set `ir.options.numIOTiles`, or use "
            "'compute'; the numbers are the same."
        )


def _check_tensors(
    graph: GraphWithNamedArgs,
    loads: dict[Tensor, popxl.HostToDeviceStream | RemoteHandle],
    streams: StoreStreams,
    stores: dict[Tensor, RemoteHandle],
    seed_input: Tensor | None,
) -> None:
    """Check loadable and storable tensors, and required locations."""
    inputs, outputs = graph.graph.inputs, graph.graph.outputs
    _check_among("load_handles", loads, inputs, f"an input of `{graph.graph.name}`")
    _check_among("store_streams", streams, (*inputs, *outputs), f"an input or output of `{graph.graph.name}`")
    _check_among("store_buffers", stores, (*inputs, *outputs), f"an input or output of `{graph.graph.name}`")
    if seed_input is not None:
        allowed = [t for t in inputs if t not in loads]
        _check_among("seed_input", [seed_input], allowed, f"an input of `{graph.graph.name}` that is not loaded")
    for stream in streams.values():
        if not isinstance(stream, popxl.DeviceToHostStream):
            raise TypeError(
                f"batch_serialise: `store_streams` holds {stream!r} ({type(stream).__name__}); expected streams to the "
                "host, made with `popxl.d2h_stream`."
            )
    for t, source in (*loads.items(), *streams.items(), *stores.items()):
        if isinstance(source, RemoteHandle):
            source.check_fits(t)
        elif (source.shape, source.dtype) != (t.shape, t.dtype):
            raise ValueError(
                f"batch_serialise: {source} does not fit `{t.name}` of `{graph.graph.name}`, which has the shape "
                f"{t.shape} and the dtype {t.dtype.name}. Use a stream like that: nothing is converted on the way."
            )
    if named := [name for name, t in graph.args.to_dict().items() if t in loads]:
        raise KeyError(
            f"batch_serialise: {named} are named inputs of `{graph.graph.name}`, and in `load_handles`. Named inputs "
            "are bound when the new graph is called: leave them out of `load_handles` or of `graph.args`."
        )


def _check_pair(forward: GraphWithNamedArgs, gradient: GraphWithNamedArgs, keys: Iterable[Tensor]) -> None:
    """Whether two graphs belong together, and tensors to them."""
    if not hasattr(gradient, "grad_graph_info"):
        raise ValueError(
            f"batch_serialise_fwd_and_grad: `gradient_graph` is `{gradient.graph.name}`, which is no gradient graph; "
            "expected what `autodiff` or another transform made of `forward_graph`."
        )
    differentiated = gradient.grad_graph_info.forward_graph
    if differentiated != forward.graph:
        raise ValueError(
            f"batch_serialise_fwd_and_grad: `gradient_graph` is `{gradient.graph.name}`, the gradient graph of "
            f"`{differentiated.name}`, and not of `forward_graph`, which is `{forward.graph.name}`."
        )
    for t in keys:
        if t.graph not in (forward.graph, gradient.graph):
            raise ValueError(
                f"batch_serialise_fwd_and_grad: {t!r} is in neither of the graphs `{forward.graph.name}` and "
                f"`{gradient.graph.name}`; all loads and stores are of their tensors."
            )


def _check_connections(gradient: GraphWithNamedArgs, loads: Container[Tensor], names: Container[Tensor]) -> None:
    """Check availability of every gradient graph input."""
    info = gradient.grad_graph_info
    if missing := [t.name for t in gradient_inputs(info) if t not in loads]:
        raise ValueError(
            f"batch_serialise_fwd_and_grad: {missing} of `{gradient.graph.name}` have no entry in `load_handles`. All "
            "gradients that it is given are loaded, from a stream or a buffer."
        )
    forward = info.forward_graph
    available = {*forward.inputs, *forward.outputs}
    activations = (value for t, value in activation_inputs(info).items() if t not in loads)
    if lost := [value.name for value in activations if value not in available and value not in names]:
        raise RuntimeError(
            f"batch_serialise_fwd_and_grad: `{gradient.graph.name}` needs {lost} of `{forward.name}`, neither inputs "
            "nor outputs of it: they can be found nowhere. Make them outputs, or say where to load them."
        )


def _check_among(argument: str, tensors: Iterable[Tensor], allowed: Container[Tensor], what: str) -> None:
    for t in tensors:
        if t not in allowed:
            raise ValueError(f"batch_serialise: {t!r} in `{argument}` is not {what}.")
