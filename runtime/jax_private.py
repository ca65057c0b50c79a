"""Private and version-dependent JAX APIs, isolated in one module: adapt this file to new JAX versions. XLA texts are
parsed in `runtime.costs.hlo`, traces in `popxl.core.tracing`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src import config, distributed, xla_bridge
from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm
from jax._src.clusters import ClusterEnv
from jax._src.compiler import get_compile_options
from jax._src.interpreters.pxla import UnloadedMeshExecutable, _get_layouts_from_executable, is_default_layout
from jax._src.lib import _jax, xla_client
from jax.extend.backend import register_backend_factory
from jax.sharding import SingleDeviceSharding

from popxl.base.log import Logger

_log = Logger("session")

NEWEST_TESTED = (0, 12)
"""Newest version of JAX that passed all tests. The oldest is in `pyproject.toml`."""


@cache
def warn_if_untested() -> None:
    """Warn once about JAX versions newer than tested."""
    if tuple(map(int, re.findall(r"\d+", jax.__version__)[:2])) > NEWEST_TESTED:
        tested = ".".join(map(str, NEWEST_TESTED))
        _log.warn(
            f"This is JAX {jax.__version__}; popxl has been tested with versions up to {tested}. If something fails "
            f"in JAX, `pip install 'jax=={tested}.*'` brings one that was tested."
        )


# cuDNN's attention ---------------------------------------------------------------------------------------------------


def cudnn_version() -> int:
    """Version of cuDNN in this process, such as 91002; 0 without it."""
    from jax._src.lib import cuda_versions

    return 0 if cuda_versions is None else int(cuda_versions.cudnn_get_version())


# Processes ------------------------------------------------------------------------------------------------------------

BACKEND_LOG = "jax._src.xla_bridge"
"""The name of the logger by which JAX says which devices it cannot use."""

HAS_TPUS = running_in_cloud_tpu_vm
"""Whether this is a machine of a TPU pod, which assigns chips to processes itself."""


def jax_runs() -> bool:
    """Whether JAX backends are initialized, and so JAX threads are running."""
    return xla_bridge.backends_are_initialized()


def schedulers() -> dict[str, Any]:
    """Cluster environments known to JAX, keyed by class name."""
    return {kind.__name__: kind for kind in ClusterEnv._cluster_types}


def distributed_client() -> Any:
    """Client of the service that `jax.distributed.initialize` connects to: key-value store and barriers."""
    return distributed.global_state.client


def bind_collectives(address: str) -> None:
    """Bind the CPU collectives of all processes to an address.

    By default gloo uses the address of the machine's host name: often one of an external network.
    """
    collectives = _jax.make_gloo_tcp_collectives(distributed_client=distributed_client(), hostname=address)
    make = partial(xla_bridge.make_cpu_client, collectives=collectives)
    register_backend_factory("cpu", make, priority=0, fail_quietly=False)


# Calls ----------------------------------------------------------------------------------------------------------------


def prepared(function: Any) -> tuple[Any, int] | None:
    """C fast path of a compiled function, and number of cached argument signatures: calls with these run entirely in C.
    `None` if calls always go through Python."""
    call: Any = getattr(function, "_call", None)
    return (call, call._cache_size()) if hasattr(call, "_cache_size") else None


def settings_of_this_thread() -> Callable[[], None]:
    """Snapshot of this thread's JAX settings, as a function that applies them in another thread: those of contexts such
    as `jax.enable_x64(True)` or `jax.default_matmul_precision("float32")`."""
    known = {id(each): each for each in (*config.config_states.values(), *vars(config).values())}
    settings = [each for each in known.values() if isinstance(each, config.config_ext.Config)]
    values = [(each, value) for each in settings if (value := each.get_local()) is not config.config_ext.unset]

    def apply() -> None:
        for setting, value in values:
            setting.set_local(value)
            hook = getattr(setting, "_update_thread_local_hook", None)
            if hook is not None:
                hook(value)

    return apply


def copied(array: jax.Array, sharding: Any) -> jax.Array:
    """Copy an array asynchronously to an equal number of other devices.

    `jax.device_put` does the same, but takes 50 us of the host's time, and this function 8. For an array of several
    processes each copies its own shards.
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


def change_parameters(traced: Any, change: Callable[[Any], Any]) -> None:
    """Modify the parameters that a traced function is lowered from: its jaxpr, shardings of arguments and results,
    mesh.

    Args:
        traced: result of `jax.jit(function).trace(...)`, or Flax's wrapper of it.
        change: function applied to each of these.
    """
    inner = getattr(traced, "traced", traced)
    if not isinstance(inner, jax.stages.Traced):  # of something else that can be compiled
        return
    own = {name: change(inner._params[name]) for name in ("jaxpr", "in_shardings", "out_shardings", "ctx_mesh")}
    inner._params = {**inner._params, **own}


# Executables ----------------------------------------------------------------------------------------------------------


class Contents(NamedTuple):
    """Decomposed compiled function, excluding argument and result trees.

    Attributes:
        devices: devices of the executable.
        arguments: types of all arguments, and their placements; `None` for unused ones.
        donated: positions of donated arguments.
        results: types of the results, and their placements.
    """

    name: str
    devices: Sequence[jax.Device]
    arguments: Sequence[tuple[Any, Any]]
    donated: Sequence[int]
    results: Sequence[tuple[Any, Any]]


def contents(compiled: Any) -> tuple[Contents, bool]:
    """Decompose a function compiled by `jax.jit(function).lower(...).compile()`. Also returns whether the contents are
    complete: callbacks of Python and references to state of the process are left out."""
    unloaded = compiled._executable._unloaded_executable
    left_out = (unloaded.host_callbacks, unloaded.keepalive, unloaded.ordered_effects, unloaded.unordered_effects)
    is_complete = not any(left_out) and unloaded.mut is None and not compiled._params.const_args
    infos = jax.tree.leaves(compiled.args_info)
    placed = zip(unloaded.input_avals, unloaded.input_shardings, strict=True)
    used = dict(zip(sorted(unloaded.kept_var_idx), placed, strict=True))
    found = Contents(
        name=unloaded.name,
        devices=list(unloaded.device_list),
        arguments=[used.get(i, (info._aval, None)) for i, info in enumerate(infos)],
        donated=[i for i, info in enumerate(infos) if info.donated],
        results=list(zip(unloaded.output_avals, unloaded.output_shardings, strict=True)),
    )
    return found, is_complete


def loaded(found: Contents, serialized: bytes, argument_tree: Any, result_tree: Any) -> Any:
    """Load a compiled function.

    Args:
        found: its contents.
        serialized: the executable, as XLA has serialized it.
        argument_tree, result_tree: structures of its arguments and results.
    """
    devices = list(found.devices)
    used = [i for i, (_, sharding) in enumerate(found.arguments) if sharding is not None]
    inputs, input_shardings = zip(*(found.arguments[i] for i in used), strict=True) if used else ((), ())
    results, placed = zip(*found.results, strict=True) if found.results else ((), ())
    backend, device_list = devices[0].client, xla_client.DeviceList(tuple(devices))
    assignment = np.array([[device.id for device in devices]])  # otherwise it is for the devices of its compilation
    options = get_compile_options(num_replicas=1, num_partitions=len(devices), device_assignment=assignment)
    executable = backend.deserialize_executable(serialized, executable_devices=device_list, compile_options=options)
    layouts, result_layouts = _get_layouts_from_executable(
        executable, [None] * len(inputs), [None] * len(results), 0, inputs, results
    )
    placed_inputs = zip(layouts, input_shardings, inputs, strict=True)
    made = UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=device_list,
        backend=backend,
        input_avals=list(inputs),
        input_shardings=list(input_shardings),
        output_avals=list(results),
        output_shardings=list(placed),
        committed=True,
        name=found.name,
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
    infos = [jax.stages.ArgInfo(aval, i in found.donated) for i, (aval, _) in enumerate(found.arguments)]
    return jax.stages.Compiled(made, [], jax.tree.unflatten(argument_tree, infos), result_tree)
