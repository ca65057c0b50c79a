"""One compiled JAX function as JSON and bytes, and back; how it is called; arrays from device to device; and settings
from thread to thread: this is the file that knows JAX's private side.

What JAX offers for this (`jax.experimental.serialize_executable`) is a pickle, from which reading runs whatever the
writer chose. Here XLA's own serialization is kept, and beside it in plain words what JAX has to know of it: the trees
of arguments and results, their shapes and dtypes, and how they lie on the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config
from jax._src.compiler import get_compile_options
from jax._src.interpreters.pxla import UnloadedMeshExecutable, _get_layouts_from_executable, is_default_layout
from jax._src.lib import xla_client
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from pydantic import BaseModel, ConfigDict

from popxl.errors import PopxlError


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", defer_build=True)


class Placement(_Part):
    """How an array lies on the devices: whole on the first one, or along the axes of a mesh of all of them.

    Attributes:
        memory: the kind of memory.
        mesh: the axes of the mesh and their sizes; none for a single device.
        spec: for each dimension, the axes that divide it.
    """

    memory: str | None
    mesh: dict[str, int]
    spec: list[list[str]]


class Array(_Part):
    """An argument or a result."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool
    space: Literal["Device", "Host"]
    placement: Placement | None


class Executable(_Part):
    """What JAX has to know of an executable.

    Attributes:
        name: the name of the function.
        devices: the devices that it runs on, by their numbers among those of the program.
        arguments: all arguments, also those that are not used and have no placement; `donated` are the numbers of those
            that are given up.
        results: the results.
        trees: those of the arguments and of the results, with numbers for leaves.
    """

    name: str
    devices: list[int]
    arguments: list[Array]
    donated: list[int]
    results: list[Array]
    trees: tuple[Any, Any]


# Calls --------------------------------------------------------------------------------------------------------------


def donating(function: Callable[..., Any], *positions: int) -> Any:
    """A function for JAX to compile whose results take the memory of the arguments that they replace.

    Args:
        function: takes trees of arrays. Its results begin with the new values of those at `positions`, in their order.
        positions: the arguments that are donated.

    JAX gives a result the first donated array that has its shape and dtype, whichever memory that is in. An array in
    the host's memory, returned where one in the device's is expected, ends the process. So the order of the results is
    that of the arguments, and JAX may leave out none of these, not even one that nothing reads.
    """
    return jax.jit(function, donate_argnums=positions, keep_unused=True)


def prepared(function: Any) -> tuple[Any, int] | None:
    """What a compiled function is called by, and for how many kinds of arguments JAX has prepared it: for these, it is
    C alone that calls it. `None`, if it is always Python that does."""
    call: Any = getattr(function, "_call", None)
    return (call, call._cache_size()) if hasattr(call, "_cache_size") else None


# Between threads ------------------------------------------------------------------------------------------------------


def settings_of_this_thread() -> Callable[[], None]:
    """What makes the settings of another thread those that this one has now: of `jax.enable_x64(True)`, say, or
    `jax.default_matmul_precision("float32")`, whose blocks are a thread's."""
    known = {id(each): each for each in (*config.config_states.values(), *vars(config).values())}
    settings = [each for each in known.values() if isinstance(each, config.config_ext.Config)]
    values = [(each, value) for each in settings if (value := each.get_local()) is not config.config_ext.unset]

    def take_over() -> None:
        for setting, value in values:
            setting.set_local(value)
            hook = getattr(setting, "_update_thread_local_hook", None)
            if hook is not None:
                hook(value)

    return take_over


# Between devices -----------------------------------------------------------------------------------------------------


def copied(array: jax.Array, sharding: Any) -> jax.Array:
    """A copy of an array on as many other devices, which nobody waits for.

    So does `jax.device_put`, but it takes 50 us of the host's time, and this takes 8. Of an array of several processes
    each copies what it has.
    """
    if not array.is_fully_addressable:
        own = [device for device in sharding.mesh.devices.flat if device.process_index == jax.process_index()]
        memory = sharding.memory_kind
        parts = [
            copied(shard.data, SingleDeviceSharding(device, memory_kind=memory))
            for shard, device in zip(array.addressable_shards, own, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)
    always = xla_client.ArrayCopySemantics.ALWAYS_COPY
    devices = [sharding._internal_device_list]
    (copy,) = xla_client.batched_copy_array_to_devices_with_sharding([array], devices, [sharding], [always])
    return copy


# Out ----------------------------------------------------------------------------------------------------------------


def described(compiled: Any, devices: Sequence[jax.Device]) -> tuple[Executable, bytes]:
    """A compiled function, as what JAX has to know of it, and what XLA made.

    Args:
        compiled: what `jax.jit(function).lower(...).compile()` gave.
        devices: those of the program.

    Raises:
        PopxlError: if it calls back into Python, or takes part in something else that is not in it.
    """
    unloaded = compiled._executable._unloaded_executable
    kept_out = (unloaded.host_callbacks, unloaded.keepalive, unloaded.ordered_effects, unloaded.unordered_effects)
    if any(kept_out) or unloaded.mut is not None or compiled._params.const_args:
        raise PopxlError(
            f"Session.save: {unloaded.name} cannot be saved, because it calls back into Python (as `ops.print_tensor` "
            "does), or holds on to something else of this process."
        )
    infos = jax.tree.leaves(compiled.args_info)
    placed = zip(unloaded.input_avals, unloaded.input_shardings, strict=True)
    used = dict(zip(sorted(unloaded.kept_var_idx), placed, strict=True))
    arguments = [_array(*used.get(i, (info._aval, None))) for i, info in enumerate(infos)]
    results = list(map(_array, unloaded.output_avals, unloaded.output_shardings))
    about = Executable(
        name=unloaded.name,
        devices=[devices.index(device) for device in unloaded.device_list],
        arguments=arguments,
        donated=[i for i, info in enumerate(infos) if info.donated],
        results=results,
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
        axes = [[] if part is None else [part] if isinstance(part, str) else list(part) for part in sharding.spec]
        return Placement(memory=sharding.memory_kind, mesh=dict(sharding.mesh.shape), spec=axes)
    raise PopxlError(f"Session.save: an array lies on the devices as {sharding} says, which cannot be saved.")


def _tree(tree: Any) -> Any:
    """A tree with numbers for leaves, as JSON."""

    def plain(node: Any) -> Any:
        if isinstance(node, dict):
            return {"dict": [[key, plain(value)] for key, value in node.items()]}
        if isinstance(node, tuple | list):
            return {type(node).__name__: list(map(plain, node))}
        return node

    return plain(jax.tree.unflatten(tree, range(tree.num_leaves)))


# In -----------------------------------------------------------------------------------------------------------------


def restored(about: Executable, content: bytes, devices: Sequence[jax.Device]) -> Any:
    """The compiled function that was described, for the same ones of a program's devices."""
    devices = [devices[number] for number in about.devices]
    used = [i for i, each in enumerate(about.arguments) if each.placement is not None]
    arguments, results = list(map(_aval, about.arguments)), list(map(_aval, about.results))
    shardings = [_sharding(each.placement, devices) for each in about.arguments]
    placed = [_sharding(each.placement, devices) for each in about.results]
    inputs, input_shardings = [arguments[i] for i in used], [shardings[i] for i in used]
    backend, device_list = devices[0].client, xla_client.DeviceList(tuple(devices))
    assignment = np.array([[device.id for device in devices]])  # else it is for the devices that it was compiled for
    options = get_compile_options(num_replicas=1, num_partitions=len(devices), device_assignment=assignment)
    executable = backend.deserialize_executable(content, executable_devices=device_list, compile_options=options)
    layouts, result_layouts = _get_layouts_from_executable(
        executable, [None] * len(inputs), [None] * len(results), 0, inputs, results
    )
    placed_inputs = zip(layouts, input_shardings, inputs, strict=True)
    loaded = UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=device_list,
        backend=backend,
        input_avals=inputs,
        input_shardings=input_shardings,
        output_avals=results,
        output_shardings=placed,
        committed=True,
        name=about.name,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(used),
        mut=None,
        xla_in_layouts=layouts,
        dispatch_in_layouts=[None if is_default_layout(*each) else each[0] for each in placed_inputs],
        xla_out_layouts=result_layouts,
        all_args_info=None,
        pgle_profiler=None,
    ).load()
    into, out_of = (jax.tree.structure(_plain(tree)) for tree in about.trees)
    infos = [jax.stages.ArgInfo(aval, i in about.donated) for i, aval in enumerate(arguments)]
    return jax.stages.Compiled(loaded, [], jax.tree.unflatten(into, infos), out_of)


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
    """The tree that `_tree` wrote."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {key: _plain(value) for key, value in content}
    return {"tuple": tuple, "list": list}[kind](map(_plain, content))
