"""Ops that interact with the host: streams, printing, and host functions."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl.base.arrays import Array
from popxl.core.recording import Op
from popxl.ops.host import host_call_kind, host_load_kind, host_store_kind, print_tensor_kind
from runtime.lowering.context import Context
from runtime.lowering.environment import Environment
from runtime.lowering.registry import register_lowering

if TYPE_CHECKING:
    from runtime.lowering.lower import Lowering


@register_lowering(host_load_kind)
def _host_load(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Load the next element of an input stream."""
    environment.write(op.outputs[0], context.channels.load(op.attributes["stream"]))


@register_lowering(host_store_kind)
def _host_store(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Store a tensor to an output stream."""
    context.channels.store(op.attributes["stream"], environment.value_of(op.inputs[0]))


@register_lowering(print_tensor_kind)
def _print_tensor(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Print a tensor to standard error, and return it."""
    value = environment.value_of(op.inputs[0])
    title, style = op.attributes["title"], op.attributes["style"]

    def write(array: Array, running: Array, replica: Array) -> None:
        if running:
            _write(f"{title}: {_formatted(np.asarray(array), *style)}\n")

    if op.attributes["print_self"]:
        running = True if context.channels.running is None else context.channels.running
        replica = lax.axis_index(lowering.replicas.axis) if lowering.is_vmapped else 0  # or equal values print once
        if _has_callbacks(lowering):
            jax.debug.callback(write, value, running, replica, ordered=lowering.prints_in_order)
        else:
            _gpu_callback((), value, jnp.asarray(running), jnp.asarray(replica))
    environment.write(op.outputs[0], value)


@register_lowering(host_call_kind)
def _host_call(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Call a Python function on the host."""
    function, specs = op.attributes["function"], op.attributes["specs"]
    values = [environment.value_of(t) for t in op.inputs]
    made = [jax.ShapeDtypeStruct(spec.shape, spec.dtype.as_jax()) for spec in specs]

    def run(*arrays: Array) -> tuple[np.ndarray, ...]:
        return tuple(function(map(np.array, arrays), [np.zeros(spec.shape, spec.dtype.as_numpy()) for spec in specs]))

    if _has_callbacks(lowering):
        results = jax.pure_callback(run, made, *values, vmap_method="sequential")
    else:
        results = _gpu_callback(made, *values)
    for t, result in zip(op.outputs, results, strict=True):
        environment.write(t, result)


def _has_callbacks(lowering: Lowering) -> bool:
    """Whether JAX can lower Python callbacks for the device; it cannot for offline GPU targets (jax-ml/jax#23971)."""
    return lowering.replicas.is_present or lowering.replicas.device.platform == "tpu"


def _gpu_callback(made: Sequence[jax.ShapeDtypeStruct], *operands: Array) -> Sequence[Array]:
    """Emit a Python callback for an offline GPU target: JAX's own custom call, with callback index 0."""
    call = jax.ffi.ffi_call("xla_ffi_python_gpu_callback", made, has_side_effect=True)
    return call(*operands, index=np.uint64(0))


def _write(text: str) -> None:
    os.write(2, text.encode())  # the file descriptor, so that redirections after the start of the program count


def _formatted(
    array: np.ndarray,
    summarise_threshold: int,
    edge_items: int,
    max_line_width: int,
    digits: int,
    float_format: str,
    separator: str,
    open_bracket: str,
    close_bracket: str,
) -> str:
    if array.dtype.kind == "V" or array.dtype.name.startswith("float8"):  # which NumPy supports only in part
        array = array.astype(np.float32)
    number = {
        "auto": None,
        "none": None,
        "fixed": lambda x: np.format_float_positional(x, digits, unique=False),
        "scientific": lambda x: np.format_float_scientific(x, digits, unique=False),
    }[float_format if digits else "none"]
    if array.ndim == 0:
        return number(array[()]) if number and array.dtype.kind == "f" else str(array[()])
    mark = "\0" * len(separator)  # of the same width, and in no number
    text = np.array2string(
        array,
        max_line_width=max_line_width or 10**9,
        precision=digits or None,
        separator=mark,
        threshold=summarise_threshold or array.size + 1,
        edgeitems=edge_items,
        formatter={"float_kind": number} if number else None,
    )
    text = _break_rows(text).replace("[", open_bracket).replace("]", close_bracket).replace(mark, separator)
    return "\n".join(line.rstrip() for line in text.split("\n"))


def _break_rows(text: str) -> str:
    """Format nested brackets: one line per row and per outer bracket.

    A line is indented by one space for each bracket around it.
    """
    if not text.startswith("[["):
        return text
    lines: list[str] = []
    depth = 0
    for line in filter(None, (each.strip() for each in text.split("\n"))):
        while line.startswith("[["):
            lines.append(" " * depth + "[")
            line, depth = line[1:], depth + 1
        line, marked = line.rstrip("\0"), line
        separator = marked.removeprefix(line)
        ends = max(len(line) - len(line.rstrip("]")) - 1, 0)  # brackets that end more than this row
        rows = [line[: len(line) - ends], *("]" * ends)]
        for i, row in enumerate(rows):
            depth -= i > 0
            is_continued = i == 0 and not row.startswith(("[", "..."))
            lines.append(" " * (depth + is_continued) + row + (separator if i == ends else ""))
    return "\n".join(lines)
