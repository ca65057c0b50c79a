"""Device traces from JAX's profiler: unmodified for XProf, with user names for Perfetto."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jax

from popxl.base.atomic_files import replace_file
from runtime.costs.hlo import parse_hlo
from runtime.lowering.scopes import graph_of

T = TypeVar("T")

PERFETTO = "perfetto.json.gz"
"""Name of the Perfetto file in a trace folder."""

_OP = re.compile(r"(?:^|/)(\w+ \[[^\[\]]*\])(?=/|$)")  # as written by `runtime.lowering.scopes.of_op`


@contextmanager
def traced(
    folder: str | os.PathLike[str], recording: AbstractContextManager[T], texts: Callable[[], Iterable[str]]
) -> Iterator[T]:
    """Write a device trace to a folder while a block runs. See `Session.recording`.

    Args:
        recording: context manager entered meanwhile; it ends after all dispatched work has ended.
        texts: function that returns XLA's text of each executable.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls would be most of the trace
    before = _trace_files(folder)
    with jax.profiler.trace(os.fspath(folder), profiler_options=options), recording as recorded:
        yield recorded
    for path in sorted(_trace_files(folder) - before):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        trace["traceEvents"] = list(_renamed(trace["traceEvents"], _names(texts())))
        replace_file(Path(folder) / PERFETTO, gzip.compress(json.dumps(trace).encode(), mtime=0))


def _trace_files(folder: str | os.PathLike[str]) -> set[Path]:
    return set(Path(folder).glob("plugins/profile/*/*.trace.json.gz"))


def _names(texts: Iterable[str]) -> dict[tuple[str, str], str]:
    """User names of instructions, keyed by module name and instruction name. Omits ambiguous keys, shared by different
    modules."""
    names: dict[tuple[str, str], str | None] = {}
    for text in texts:
        module = text.partition("HloModule ")[2].partition(",")[0].split()[0]
        for computation in parse_hlo(text).computations.values():
            for instruction in computation.instructions.values():
                key, name = (module, instruction.name), user_name(instruction.scope)
                names[key] = name if names.get(key, name) == name else None
    return {key: name for key, name in names.items() if name}


def user_name(scope: str) -> str:
    """User name of an instruction's op, with source line and graph; "" without an op.

    Example:
        >>> user_name("jit(step)/{layer_subgraph(0)}/MatMul [train.py:12]/dot_general")
        'MatMul [train.py:12] in layer_subgraph(0)'
    """
    ops = _OP.findall(scope)
    graph = graph_of(scope)
    return f"{ops[-1]} in {graph}" if ops and graph else ops[-1] if ops else graph


def _renamed(events: Iterable[dict[str, Any]], names: Mapping[tuple[str, str], str]) -> Iterator[dict[str, Any]]:
    """Trace events, with instructions renamed to user names; without end markers."""
    for event in events:
        arguments = event.get("args") or {}
        name = names.get((arguments.get("hlo_module", ""), arguments.get("hlo_op", "")))
        if name is None and (said := arguments.get("tf_op") or arguments.get("name")) and "hlo_op" in arguments:
            name = user_name(said)  # on GPUs and TPUs, where an event has the scope itself
        if event.get("name", "").startswith("end: "):
            continue
        yield event | {"name": name} if name else event
