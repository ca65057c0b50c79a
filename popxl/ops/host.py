"""Ops without tensor operands, or with effects outside of the graph: `init`, host streams, printing.

Most depend on the runtime: they only declare their specs here, and `runtime.lowering.host_ops` implements them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NoReturn

import jax.numpy as jnp
import numpy as np

from popxl import dtypes
from popxl.context import get_current_context
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.core.traits import Effect, Exchange
from popxl.dtypes import check_dtype
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError
from popxl.ops.complex import conjugate
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream
from popxl.values.shapes import integers, is_known_word, like_first, number, sizes, word
from popxl.values.spec import TensorSpec

FloatFormat = Literal["auto", "fixed", "scientific", "none"]

init_kind = OpKind(
    "Init",
    lambda *, spec, init_type: jnp.zeros(spec.shape, spec.dtype.as_jax()),
    shape=lambda *, spec, init_type: spec,
    result="t",
    gradient=None,
)


def is_init(op: Op) -> bool:
    """Whether an op only allocates a tensor."""
    return op.kind is init_kind


def _lowered_by_runtime(*operands: Any, **attributes: Any) -> NoReturn:
    raise PopxlError("this op talks to the host, and is carried out by a Session only.")


def _stored(t: Any, *, stream: Any) -> tuple[()]:
    if t.dtype is not stream.dtype:
        raise ValueError(
            f"the stream `{stream.tensor.name}` takes {stream.dtype.name}, and `t` is {t.dtype.name}; nothing is "
            "converted on the way. Use `ops.cast`, or make the stream of that dtype."
        )
    if t.shape != stream.shape:
        raise ValueError(
            f"the stream `{stream.tensor.name}` takes the shape {stream.shape}, and `t` has {t.shape}; nothing is "
            "broadcast on the way. Use `ops.reshape`, or make the stream of that shape."
        )
    if t.meta_shape:
        raise PopxlError("a replica-sharded piece cannot be stored to the host; gather it first.")
    return ()


host_load_kind = OpKind(
    "HostLoad",
    _lowered_by_runtime,
    operands=("t",),
    shape=lambda t, *, stream: stream.spec,
    gradient=None,
    traits=[Effect(), Exchange("stream")],
)
host_store_kind = OpKind(
    "HostStore",
    _lowered_by_runtime,
    operands=("t",),
    shape=_stored,
    gradient=None,
    traits=[Effect(), Exchange("stream")],
)
print_tensor_kind: OpKind = OpKind(
    "PrintTensor",
    _lowered_by_runtime,
    operands=("t",),
    shape=like_first,
    result="print_out",
    traits=[Effect()],
    gradient={
        "t": lambda g, title, print_gradient, style: (
            conjugate(
                print_tensor_kind(
                    conjugate(g), title=f"{title}_gradient", print_self=True, print_gradient=False, style=style
                )
            )
            if print_gradient
            else g
        )
    },
)

host_call_kind = OpKind(
    "HostFunction",
    _lowered_by_runtime,
    shape=lambda *operands, function, specs: specs,
    gradient=None,
    traits=[Effect()],
    key="poptorch.HostFunction",
)
"""Call `function(arrays, wanted)` on the host with operands and result specs."""


def _spaced(*, start: float, step: float, count: int, dtype: dtype_) -> Any:
    # Halves are rounded once; whole numbers stay exact.
    wide = jnp.promote_types(dtype.as_jax(), jnp.float32) if dtype.is_floating_point else dtype.as_jax()
    return (jnp.arange(count, dtype=wide) * np.asarray(step, wide) + np.asarray(start, wide)).astype(dtype.as_jax())


_arange = OpKind(
    "Arange",
    _spaced,
    shape=lambda *, start, step, count, dtype: TensorSpec((count,), dtype),
    gradient=None,
)


def arange(start: float, stop: float | None = None, step: float = 1, dtype: dtype_ | None = None) -> Tensor:
    """Evenly spaced numbers: `start`, `start + step`, ... up to, and without, `stop`.

    Args:
        start: first number; if it is the only argument, the end, and the first number is 0.
        stop: the end.
        step: difference between neighbours; negative to count down.
        dtype: int32 by default, or float32 if one of the numbers is not an integer.

    Returns:
        A new tensor of rank 1, which the program makes when it runs.

    Raises:
        TypeError: if one of them is not a number, or `dtype` is not a popxl dtype of numbers.
        ValueError: for a step of 0, and if one of the numbers is not finite.

    See also: `numpy.arange`.

    Example:
        >>> positions = ops.arange(128)
    """
    begin, end = (0, start) if stop is None else (start, stop)
    given = {"start": begin, "stop": end, "step": step}
    begin, end, step = (number(value, f"arange: `{name}`") for name, value in given.items())
    if step == 0:
        raise ValueError("arange: `step` is 0; expected another number.")
    if not all(map(math.isfinite, (begin, end, step))):
        raise ValueError(f"arange: `start`, `stop` and `step` are {begin}, {end} and {step}; expected finite numbers.")
    if dtype is None:
        dtype = dtypes.int32 if all(isinstance(value, int) for value in (begin, end, step)) else dtypes.float32
    check_dtype(dtype, "arange: `dtype`")
    if not (dtype.is_int or dtype.is_floating_point) or dtype.is_float8:
        raise TypeError(f"arange: `dtype` is {dtype.name}; expected an integer type, or a float of 16 bits or more.")
    return _arange(start=begin, step=step, count=max(math.ceil((end - begin) / step), 0), dtype=dtype)


def init(
    shape: Iterable[int],
    dtype: dtype_,
    name: str | None = None,
    init_type: Literal["zero", "undef"] = "zero",
    meta_shape: Iterable[int] | None = None,
) -> Tensor:
    """A tensor that is created each time the graph runs.

    Args:
        shape, dtype, meta_shape: spec of the tensor.
        name: name of the tensor, `t` by default.
        init_type: `"zero"` for zeros; `"undef"` for undefined contents (zeros too, here).

    Returns:
        A new tensor in the current graph.

    Raises:
        TypeError: if sizes are not integers, or `dtype` is not a popxl dtype.
        ValueError: for an unknown `init_type`, or a negative size.

    Example:
        >>> acc = ops.init((4, 3), popxl.float32, "acc")
    """
    word(init_type, "init: `init_type`", ("zero", "undef"))
    whole = () if meta_shape is None else integers(meta_shape, "init: `meta_shape`")
    spec = TensorSpec(sizes(shape, "init: `shape`"), dtype, whole)
    return init_kind(spec=spec, init_type=init_type, results=(name,))


def host_load(h2d_stream: HostToDeviceStream, name: str | None = None) -> Tensor:
    """The next element of a stream, each time the op runs.

    Args:
        h2d_stream: the stream.
        name: stem of the result's name; the stream's name by default.

    Returns:
        A new tensor in the current graph, with the shape and dtype of the stream.

    Raises:
        TypeError: if `h2d_stream` is not such a stream.
        ValueError: if the stream is of another Ir.

    Example:
        >>> x = ops.host_load(image_stream, "x")
    """
    _check_stream("host_load", h2d_stream, HostToDeviceStream)
    name = name or h2d_stream.tensor.name
    buffer = init_kind(spec=h2d_stream.spec, init_type="undef", results=(f"{name}_init",))
    return host_load_kind(buffer, stream=h2d_stream, results=(f"{name}_hostload",))


def host_store(d2h_stream: DeviceToHostStream, t: Tensor) -> None:
    """Send a tensor to the host, each time the op runs.

    Args:
        d2h_stream: the stream.
        t: tensor with the stream's shape and dtype; nothing is converted.

    Raises:
        TypeError: if `d2h_stream` is not such a stream, or `t` is not a tensor.
        ValueError: if the stream is of another Ir, or the dtypes or shapes differ.
        PopxlError: for a shard of a replica-sharded variable.

    Example:
        >>> ops.host_store(loss_stream, loss)
    """
    _check_stream("host_store", d2h_stream, DeviceToHostStream)
    host_store_kind(t, stream=d2h_stream, results=())


def _check_stream(name: str, stream: Any, kind: type[Stream]) -> None:
    if not isinstance(stream, kind):
        maker = "h2d_stream" if kind is HostToDeviceStream else "d2h_stream"
        raise TypeError(
            f"{name}: the first argument must be a {kind.__name__}, which `popxl.{maker}` makes; got {stream!r} "
            f"({type(stream).__name__})."
        )
    main = get_current_context().graph.main_graph
    if stream.tensor.graph_ref is not main.ref:
        raise ValueError(f"{name}: the stream {stream} is of another Ir than the current graph.")


def print_tensor(
    t: Tensor,
    title: str | None = None,
    print_self: bool = True,
    print_gradient: bool = False,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 75,
    digits: int = 8,
    float_format: FloatFormat = "auto",
    separator: str = " ",
    open_bracket: str = "[",
    close_bracket: str = "]",
) -> Tensor:
    """Write a tensor to standard error each time the op runs, and pass it on.

    Lines come in the order in which the ops run; with remote buffers in host memory JAX does not guarantee this. Each
    of several replicas prints its own, in any order: only under `session.debugging()` they come one replica after the
    other.

    Args:
        t: tensor of any shape.
        title: text before the values; `print_<name of t>` by default.
        print_self: print the tensor.
        print_gradient: print the gradient that flows back through the op, as `<title>_gradient`. For that the result
            has to be used.
        summarise_threshold: above this number of elements only the edges are printed; 0 prints all.
        edge_items: elements printed at each edge of a summary.
        max_line_width: width at which lines are broken; 0 for never.
        digits: digits of a number.
        float_format: `"auto"`, `"fixed"`, `"scientific"` or `"none"`.
        separator, open_bracket, close_bracket: one character each.

    Returns:
        A copy of `t`.

    Raises:
        ValueError: if a separator or bracket is not one character.
        KeyError: for an unknown `float_format`.

    Example:
        >>> loss = ops.print_tensor(loss, "loss")
    """
    characters = {"separator": separator, "open_bracket": open_bracket, "close_bracket": close_bracket}
    for name, character in characters.items():
        if not isinstance(character, str) or len(character) != 1:
            raise ValueError(f"print_tensor: `{name}` must be a single character; got {character!r}.")
    if not is_known_word(float_format, ("auto", "fixed", "scientific", "none")):
        raise KeyError(
            f"print_tensor: `float_format` is {float_format!r}; use 'auto', 'fixed', 'scientific' or 'none'."
        )
    if title is None and isinstance(t, Tensor):
        title = f"print_{t.name}"
    style = (summarise_threshold, edge_items, max_line_width, digits, float_format, *characters.values())
    return print_tensor_kind(t, title=title, print_self=print_self, print_gradient=print_gradient, style=style)
