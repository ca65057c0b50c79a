"""`analyze`: memory, communication and cost of a jitted JAX function on a machine, from that machine's compiler."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, NamedSharding

from popxl.analysis.memory import Memory
from popxl.base.arguments import check_type
from popxl.base.memory_requests import current_request
from popxl.base.names import name_of
from popxl.base.pages import OnPage, Page, Picture, Table, bytes_text, flops_text
from popxl.base.records import Record
from popxl.errors import PopxlError
from runtime.costs.cost import Cost
from runtime.costs.hlo import Module, parse_hlo
from runtime.costs.lines import LineCost, live_buffers
from runtime.costs.program_cost import cost_of_executable
from runtime.costs.schedule import schedule_of
from runtime.jax_private import change_parameters
from runtime.targets import chip
from runtime.targets.offline import Target

_request = jax.make_user_context(0)
"""Number of the request of a memory plan: JAX traces functions again for each of them."""
_request_numbers = itertools.count(1)


class LineMemory(Record):
    """Buffers written at one source line that are live at the peak.

    Attributes:
        line: the line, `train.py:12`; "" for buffers whose line XLA does not say.
        bytes: total bytes.
        buffers: names of the buffers, the largest first.
    """

    line: str
    bytes: int
    buffers: tuple[str, ...]


class Analysis(OnPage, Record):
    """Memory, communication and cost of a compiled JAX function on one chip. Nothing was run or measured.

    Attributes:
        name: the function.
        target: the machine, as it was described; "" for local devices.
        devices: number of chips that it uses.
        chips: number of chips of the machine.
        is_replicated: whether each chip holds all of every argument and result.
        capacity: memory of a chip, in bytes; `None` where it is not known.
        memory: memory over the schedule.
        live: live memory at the peak of temporaries, by source lines, most bytes first.
        cost: bytes, operations, kernels, collectives by line, and estimated time.
        lines: the same work by source lines, most bytes first.
    """

    name: str
    target: str
    devices: int
    chips: int
    is_replicated: bool
    capacity: int | None
    memory: Memory
    live: tuple[LineMemory, ...]
    cost: Cost
    lines: tuple[LineCost, ...]

    def __repr__(self) -> str:
        return f"Analysis[{self.name} on {self.target or self.cost.chip}: {bytes_text(self.memory.device)}]"

    @property
    def fits(self) -> bool | None:
        """Whether a program fits into chip memory; `None` if unknown."""
        return None if self.capacity is None else self.memory.device <= self.capacity

    def picture(self) -> Picture:
        """Memory over the schedule, as a picture."""
        return self.memory.picture()

    def page(self) -> Page:
        """Page for `print`, notebooks and browsers."""
        on = "one chip" if self.devices == 1 else f"each of {self.devices} chips"
        fits = {True: " It fits.", False: " It does not fit.", None: ""}[self.fits]
        has = "" if self.capacity is None else f" One {self.cost.chip} has {bytes_text(self.capacity)}."
        needed = f"{self.name} needs {bytes_text(self.memory.device)} on {on}.{has}{fits} Nothing was run."
        live = [[each.line or "unknown", bytes_text(each.bytes), each.buffers[0]] for each in self.live]
        costs = [
            [each.line or "unknown", str(each.kernels), flops_text(each.flops), bytes_text(each.bytes_accessed)]
            for each in self.lines
        ]
        parts: list[str | Page] = [
            self.memory.page(),
            Page("Live at the peak", [*Table.first_rows(["line", "bytes", "largest"], live)]),
            Page("Work by lines", [*Table.first_rows(["line", "kernels", "operations", "read and written"], costs)]),
        ]
        where = self.target or self.cost.chip
        about = [needed, *self._unused()]
        return Page(f"Analysis of {self.name} on {where}", [*about, self.cost.totals(), *parts, *self.cost.details()])

    def _unused(self) -> list[str]:
        """Message about idle chips or duplicate work, with a remedy; empty without these."""
        is_repeated = self.devices == self.chips and self.is_replicated and not self.cost.collectives
        if self.chips == 1 or (self.devices == self.chips and not is_repeated):
            return []
        if is_repeated:
            problem = f"All {self.chips} chips compute the same: no array is sharded."
        elif self.devices == 1:
            problem = f"{self.name} uses 1 of the {self.chips} chips: no array is sharded."
        else:
            problem = f"{self.name} uses {self.devices} of the {self.chips} chips: its mesh has {self.devices} devices."
        return [
            f'{problem} To divide a batch among all, write `mesh = Mesh(jax.devices(), ("data",))`, pass '
            '`jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))`, and place the other arrays with '
            "`PartitionSpec()`; the names are those of `jax.sharding`."
        ]


def analyze(function: Callable[..., Any], *args: Any, target: Target | str | None = None, **kwargs: Any) -> Analysis:
    """Compile a JAX function for a machine that need not be present, and report its memory, communication and cost.

    The function is compiled unchanged, including its scans, `jax.checkpoint`, donated arguments and shardings.
    Meshes of other devices, in arguments and inside the function, stand for the same places of the target.

    Args:
        function: a jitted function; another one is jitted.
        args, kwargs: arguments of the function, trees of arrays or of `jax.ShapeDtypeStruct`. For several chips, with
            shardings on a mesh of the target, `popxl.Target(...).mesh(...)`, or of the same number of local devices;
            those without sharding are replicated, or follow the function's own `in_shardings`.
        target: the machine: a description such as `"gpu h100:8"`, or a `popxl.Target`. By default the local
            devices.

    Raises:
        TypeError: if `function` cannot be called, or `target` is neither.
        PopxlError: if a mesh has more devices than the target, or the function names other devices without a mesh.

    Example:
        >>> target = popxl.Target("gpu h100:2")
        >>> rows = jax.sharding.NamedSharding(target.mesh(data=2), jax.sharding.PartitionSpec("data"))
        >>> x = jax.ShapeDtypeStruct((64, 512), "float32", sharding=rows)
        >>> found = popxl.analyze(jax.jit(lambda x: (x * x).mean()), x, target=target)
        >>> print(found)
        Analysis of <lambda> on gpu h100:2...
        >>> found.fits, [use.kind for use in found.cost.uses]
        (True, ['all-reduce'])
    """
    if not callable(function):
        raise TypeError(f"analyze: `function` must be a function; got {function!r} ({type(function).__name__}).")
    if isinstance(target, str):
        target = Target(target)
    check_type(target, Target | None, "analyze: `target`", "a description such as 'gpu h100:8', or a popxl.Target")
    jitted = function if hasattr(function, "trace") else jax.jit(function)
    with _request(0 if current_request() is None else next(_request_numbers)):
        executable, seconds = _compiled(jitted, args, kwargs, target)
    return _analysis(getattr(function, "__name__", None) or name_of(function), executable, seconds, target)


def _compiled(jitted: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Target | None) -> tuple[Any, float]:
    """Compile a jitted function for a target. Returns the executable, and the seconds it took."""
    start = time.perf_counter()
    if target is None:
        return jitted.trace(*args, **kwargs).lower().compile(), time.perf_counter() - start
    args, kwargs = jax.tree.map(lambda leaf: _on_target(leaf, target), (args, kwargs))
    platform = "cuda" if target.kind == "gpu" else target.kind
    try:
        with jax.default_device(target.devices[0]):
            traced = jitted.trace(*args, **kwargs)
            change_parameters(traced, lambda value: _moved(value, target))
            executable = traced.lower(lowering_platforms=(platform,)).compile()
    except ValueError as problem:
        if not re.search("incompatible devices|device_assignment", str(problem)):
            raise
        raise _other_devices(target, f" JAX says: {problem}") from problem
    if not {device for each in _shardings(executable) for device in each.device_set} <= {*target.devices}:
        raise _other_devices(target)
    return executable, time.perf_counter() - start


def _other_devices(target: Target, reason: str = "") -> PopxlError:
    return PopxlError(
        f"analyze: the function names devices that {target} does not have. Place arrays by `NamedSharding`, whose mesh "
        f"is replaced by one of the target, or make the mesh by `popxl.Target({str(target)!r}).mesh(...)`.{reason}"
    )


def _shardings(executable: Any) -> list[Any]:
    """Shardings of the arguments and results of a compiled function."""
    return jax.tree.leaves((executable.input_shardings, executable.output_shardings))


def _on_target(leaf: Any, target: Target) -> Any:
    """Argument type; shardings over devices of another machine become shardings over the same positions of the target.

    Other arguments, including static ones, are passed unchanged.
    """
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf
    sharding = leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = _moved(sharding, target)
    elif isinstance(leaf, jax.Array):
        sharding = None  # a local device
    weak = getattr(leaf, "weak_type", False)  # arrays of random keys do not say
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)


def _moved(value: Any, target: Target) -> Any:
    """JAX parameter with meshes remapped to the target's devices."""
    if isinstance(value, NamedSharding):
        return NamedSharding(_moved(value.mesh, target), value.spec, memory_kind=value.memory_kind)
    if isinstance(value, Mesh):
        devices, found = target.devices, value.devices
        if found.size > len(devices):
            raise PopxlError(f"analyze: a mesh has {found.size} devices, and {target} has {len(devices)}.")
        if value.empty or {*found.flat} <= {*devices}:
            return value
        places = np.arange(found.size).reshape(found.shape)
        return Mesh(np.asarray(devices)[places], value.axis_names, axis_types=value.axis_types)
    if isinstance(value, Jaxpr):
        equations = [e.replace(params={n: _moved(v, target) for n, v in e.params.items()}) for e in value.eqns]
        return value.replace(eqns=equations)
    if isinstance(value, ClosedJaxpr):
        return value.replace(jaxpr=_moved(value.jaxpr, target))
    if type(value) in (tuple, list):
        return type(value)(_moved(part, target) for part in value)
    return value


def _analysis(name: str, executable: Any, seconds: float, target: Target | None) -> Analysis:
    """Analysis of a compiled function."""
    module, sizes = parse_hlo(executable.as_text()), executable.memory_analysis()
    leaves = _shardings(executable)
    devices = max((len(each.device_set) for each in leaves), default=1)
    used = next((each.device_set for each in leaves), {jax.devices()[0]})
    kind = next(iter(used)).device_kind
    # A mesh has the order of XLA's numbers; without one there is one device, or all in theirs.
    meshes = (
        each.mesh.devices.flat for each in leaves if isinstance(each, NamedSharding) and len(each.device_set) == devices
    )
    ordered = [*next(meshes, sorted(used, key=lambda device: device.id))]
    figures = chip.of_device(kind) if target is None else target.chip
    schedule = schedule_of(module)
    cost = cost_of_executable(name, module, sizes, figures, ordered, seconds, kind)
    memory = Memory(
        name=f"{name}, on each device" if devices > 1 else name,
        source="schedule",
        variables=0,
        buffers=0,
        arguments=sizes.argument_size_in_bytes,
        outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        constants=0,
        temporaries=sizes.temp_size_in_bytes,
        code=sizes.generated_code_size_in_bytes or None,
        buffers_on_host=0,
        variables_on_host=sizes.host_argument_size_in_bytes,
        temporaries_on_host=sizes.host_temp_size_in_bytes,
        moments=schedule.moments(),
        tensors=schedule.tensors(),
    )
    return Analysis(
        name=name,
        target="" if target is None else str(target),
        devices=devices,
        chips=devices if target is None else target.count,
        is_replicated=all(each.is_fully_replicated for each in leaves),
        capacity=None if figures is None else figures.memory_bytes,
        memory=memory,
        live=_live(module),
        cost=cost,
        lines=tuple(line for line in cost.lines if line.kernels),
    )


def _live(module: Module) -> tuple[LineMemory, ...]:
    """Buffers live at the peak, by the lines that write them, most bytes first."""
    lines = [
        LineMemory(line=line, bytes=sum(b.bytes for b in alike), buffers=tuple(b.name for b in alike))
        for line, alike in live_buffers(module).items()
    ]
    return tuple(sorted(lines, key=lambda each: -each.bytes))
