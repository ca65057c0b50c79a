"""Serialization of one compiled JAX function to JSON and bytes.

JAX's own function for this (`jax.experimental.serialize_executable`) writes a pickle; reading one runs arbitrary code
of its writer. Here XLA's own serialization is kept, with JAX's metadata as plain JSON: the trees of arguments and
results, their shapes and dtypes, and their placement on the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from pydantic import BaseModel, ConfigDict

from popxl.errors import PopxlError
from runtime.jax_private import Contents, contents, loaded


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)


class Placement(_Saved):
    """Device placement of an array: unsharded on the first device, or sharded along mesh axes over all devices.

    Attributes:
        mesh: the axes of the mesh and their sizes; none for a single device.
        spec: axes that divide each dimension.
    """

    memory: str | None
    mesh: dict[str, int]
    spec: list[list[str]]


class Array(_Saved):
    """Argument or result of an executable."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool
    space: Literal["Device", "Host"]
    placement: Placement | None


class Executable(_Saved):
    """JAX metadata of an executable.

    Attributes:
        devices: numbers of its devices among those of the program.
        arguments: all arguments, including unused ones without a placement; `donated` has the positions of donated
            ones.
        trees: trees of the arguments and of the results, with numbers for leaves.
    """

    name: str
    devices: list[int]
    arguments: list[Array]
    donated: list[int]
    results: list[Array]
    trees: tuple[Any, Any]


# Calls --------------------------------------------------------------------------------------------------------------


def donating(function: Callable[..., Any], *positions: int) -> Any:
    """Jit a function with donated arguments: its results reuse the memory of the arguments they replace.

    Args:
        function: function of trees of arrays. Its results start with the new values of those at `positions`, in their
            order.

    JAX assigns to a result the first donated array of its shape and dtype, in any memory. An array in host memory,
    returned in place of one in device memory, ends the process. So the results are in the order of the arguments, and
    JAX must not drop unused ones.
    """
    return jax.jit(function, donate_argnums=positions, keep_unused=True)


# Out ----------------------------------------------------------------------------------------------------------------


def serialized(compiled: Any, devices: Sequence[jax.Device]) -> tuple[Executable, bytes]:
    """Serialize a compiled function: JAX metadata, and XLA's serialized executable.

    Args:
        compiled: result of `jax.jit(function).lower(...).compile()`.

    Raises:
        PopxlError: if it calls back into Python, or depends on other state of this process.
    """
    metadata, is_complete = contents(compiled)
    if not is_complete:
        raise PopxlError(
            f"Session.save: {metadata.name} cannot be saved, because it calls back into Python (as `ops.print_tensor` "
            "does), or holds on to something else of this process."
        )
    about = Executable(
        name=metadata.name,
        devices=[devices.index(device) for device in metadata.devices],
        arguments=[_array(*each) for each in metadata.arguments],
        donated=list(metadata.donated),
        results=[_array(*each) for each in metadata.results],
        trees=(_tree(compiled.in_tree), _tree(compiled.out_tree)),
    )
    return about, compiled.runtime_executable().serialize()


def _array(aval: Any, sharding: Any) -> Array:
    return Array(
        shape=aval.shape,
        dtype=np.dtype(aval.dtype).name,
        weak=aval.weak_type,
        space="Host" if aval.memory_space == jax.memory.Space.Host else "Device",
        placement=None if sharding is None else _placement(sharding),
    )


def _placement(sharding: Any) -> Placement:
    if isinstance(sharding, SingleDeviceSharding):
        return Placement(memory=sharding.memory_kind, mesh={}, spec=[])
    if isinstance(sharding, NamedSharding):
        axes = [[] if names is None else [names] if isinstance(names, str) else list(names) for names in sharding.spec]
        return Placement(memory=sharding.memory_kind, mesh=dict(sharding.mesh.shape), spec=axes)
    raise PopxlError(f"Session.save: an array lies on the devices as {sharding} says, which cannot be saved.")


def _tree(tree: Any) -> Any:
    """Encode a tree structure as JSON, with numbered leaves."""

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            return {"dict": [[key, plain(value)] for key, value in node.items()]}
        if isinstance(node, tuple | list):
            return {type(node).__name__: list(map(plain, node))}
        return node

    return plain(jax.tree.unflatten(tree, range(tree.num_leaves)))


# In -----------------------------------------------------------------------------------------------------------------


def restored(about: Executable, content: bytes, devices: Sequence[jax.Device]) -> Any:
    """Deserialize a compiled function for the same devices of a program."""
    devices = [devices[number] for number in about.devices]

    def placed(arrays: Sequence[Array]) -> list[tuple[Any, Any]]:
        return [(_aval(each), _sharding(each.placement, devices)) for each in arrays]

    metadata = Contents(about.name, devices, placed(about.arguments), about.donated, placed(about.results))
    return loaded(metadata, content, *(jax.tree.structure(_plain(tree)) for tree in about.trees))


def _aval(array: Array) -> Any:
    space = jax.memory.Space.Host if array.space == "Host" else jax.memory.Space.Device
    return ShapedArray(array.shape, jnp.dtype(array.dtype), weak_type=array.weak, memory_space=space)


def _sharding(placement: Placement | None, devices: Sequence[jax.Device]) -> Any:
    if placement is None:
        return None
    if not placement.mesh:
        return SingleDeviceSharding(devices[0], memory_kind=placement.memory)
    mesh = Mesh(np.asarray(devices).reshape(tuple(placement.mesh.values())), tuple(placement.mesh))
    spec = PartitionSpec(*(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in placement.spec))
    return NamedSharding(mesh, spec, memory_kind=placement.memory)


def _plain(tree: Any) -> Any:
    """Decode a tree structure encoded by `_tree`."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {key: _plain(value) for key, value in content}
    return {"tuple": tuple, "list": list}[kind](map(_plain, content))
