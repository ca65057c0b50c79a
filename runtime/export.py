"""`export`: serialize a program with `jax.export`, for use without popxl."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import jax
import jax.export
import numpy as np

from popxl.base.arguments import check_type
from popxl.base.atomic_files import replace_file
from popxl.errors import PopxlError
from popxl.ir import Ir
from popxl.program.saved import safetensors_library
from popxl.values.shapes import word
from runtime.lowering.channels import prints
from runtime.lowering.to_jax import MainFunction, main_function
from runtime.session import Session
from runtime.targets.replicas import Replicas


def export(
    program: Ir | Session,
    path: str | os.PathLike[str],
    weights: Literal["inside", "beside"] = "inside",
    platforms: Sequence[str] | None = None,
) -> jax.export.Exported:
    """Export a program to a file for plain JAX: StableHLO, serialized by `jax.export`.

    Loaded, it is a function from a dict of input streams to a dict of output streams, by the names of
    `popxl.to_jax(ir.main_graph)`. It can be called, compiled by `jax.jit`, and be part of other programs. It stays
    readable as long as JAX promises: six months of releases. Requirements of ops on their operands are not checked.

    Args:
        program: an Ir, with the host values of its variables; or a session, with their present values.
        path: the file.
        weights: `"inside"`: the variables are constants of the program, which must not change any. Or `"beside"`: the
            function takes a dict of the variables first, and returns the changed ones second. Their values are in a
            file of the same name that ends in `.safetensors`.
        platforms: platforms that it can run on, in JAX's names: `["cpu", "cuda", "tpu"]`. By default, JAX's default
            platform.

    Returns:
        The exported function; `mlir_module()` is its text.

    Raises:
        TypeError: if `program` is neither an Ir nor a session.
        ValueError: for unknown `weights`; and for `"inside"`, if the program changes variables.
        ImportError: if `flatbuffers` is not installed, which JAX writes such files with (extra `export`).
        PopxlError: if the program has replicas, uses remote buffers, prints, has 64-bit numbers that JAX would narrow,
            or float8 variables beside it; or if the Ir has changed since the session was made.

    Example:
        >>> popxl.export(ir, "model.jax")

        In a process without popxl:

        >>> images, labels = batches[0]
        >>> model = jax.export.deserialize(Path("model.jax").read_bytes())
        >>> outputs = model.call({"images": images, "labels": labels})

        A training step, with its state outside:

        >>> ops.scaled_add_(w, gradient, b=-0.1)
        >>> popxl.export(ir, "step.jax", weights="beside")

        >>> from safetensors.flax import load_file
        >>> step = jax.export.deserialize(Path("step.jax").read_bytes())
        >>> variables = load_file("step.safetensors")
        >>> outputs, changed = step.call(variables, {"images": images, "labels": labels})
        >>> variables |= changed
    """
    try:
        import flatbuffers  # noqa: F401  # what JAX writes the file with
    except ImportError as problem:
        raise ImportError(
            "export: JAX needs `flatbuffers` for this. Install it with `pip install flatbuffers`."
        ) from problem
    word(weights, "export: `weights`", ("inside", "beside"))
    ir, present = _ir_and_values(program)
    if prints(ir.main_graph):
        raise PopxlError(
            "export: the program prints while it runs, which a file cannot hold. Leave out `print_tensor`."
        )
    function = _function(ir, platforms)
    values = function.variables(present)
    if weights == "inside" and function.written:
        raise ValueError(
            f"export: the program changes the variables {', '.join(function.written)}, so they cannot be constants of "
            "it. Use `weights='beside'`; or build a program that only reads them."
        )
    if weights == "beside":
        beside = Path(path).with_suffix(".safetensors")
        if beside == Path(path):
            raise ValueError(f"export: `path` is {os.fspath(path)!r}, where the weights are to be: use another suffix.")
        arrays = _as_file(values)
    specs = function.specs()
    of_variables = {name: specs.pop(name) for name in values}
    if weights == "inside":
        exported = _exported(lambda inputs: function(**values, **inputs)[0], platforms, specs)
    else:
        exported = _exported(lambda variables, inputs: function(**variables, **inputs), platforms, of_variables, specs)
    content = bytes(exported.serialize())
    if weights == "beside":
        replace_file(beside, arrays)
    replace_file(Path(path), content)
    return exported


def _ir_and_values(program: Any) -> tuple[Ir, Mapping[Any, np.ndarray]]:
    """Ir of a program; for sessions, also current variable values."""
    if isinstance(program, Session):
        program._check_unchanged("export")
        wanted = (v for v in program.ir.main_graph.variables if not v.location_info.isRemote())
        return program.ir, program.values_of(wanted)
    check_type(program, Ir, "export: `program`", "an Ir or a Session")
    return program, {}


def _function(ir: Ir, platforms: Sequence[str] | None) -> MainFunction:
    """Main graph as a function, with kernels for the given platforms."""
    if platforms is None:
        return main_function(ir.main_graph, "export", checks=False)  # JAX cannot export `checkify` checks
    alone = platforms[0] if len(platforms) == 1 else ""
    return main_function(ir.main_graph, "export", Replicas(1, [SimpleNamespace(platform=alone)]), checks=False)


def _exported(function: Any, platforms: Sequence[str] | None, *specs: Any) -> jax.export.Exported:
    function.__name__ = "program"
    return jax.export.export(jax.jit(function), platforms=platforms)(*specs)


def _as_file(values: Mapping[str, Any]) -> bytes:
    """Serialize arrays to safetensors bytes."""
    arrays = {name: np.array(value, order="C") for name, value in values.items()}
    if unknown := [name for name, array in arrays.items() if str(array.dtype).startswith("float8")]:
        raise PopxlError(
            f"export: {', '.join(unknown)} are float8, which safetensors does not know as these. Use "
            "`weights='inside'`."
        )
    return safetensors_library().numpy.save(arrays)
