"""Model compilation: capture for given arguments, then compilation as one program or as several subgraphs."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

import popxl
from poptorch.base.carried import HiddenValueAccess
from poptorch.base.logging_ import logger
from poptorch.capture.model import Captured
from poptorch.options import Options
from poptorch.program.batching import Batching
from poptorch.program.request import ProgramRequest
from poptorch.program.returned import Returned
from poptorch.run import weight_values
from poptorch.run.arguments import Signature
from poptorch.run.compiled import Compiled
from poptorch.run.graph_breaks import BrokenGraph, CompiledModel
from poptorch.run.host_model import HostModel
from poptorch.run.model_capture import ModelCapture
from poptorch.run.program_compilation import compile_captured
from poptorch.run.subgraphs import ExecutionPath
from poptorch.run.trained_graph_breaks import TrainedBrokenGraph
from poptorch.run.trainer import Trainer
from popxl.session import CompilationProgress, compilation_progress

_turn = threading.RLock()


@contextmanager
def compiling() -> Iterator[None]:
    """Context manager that serializes model compilation: captured modules hold tensors without data."""
    with _turn, torch.inference_mode(False):  # otherwise no gradients would flow
        yield


def compiled_model(
    model: HostModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    trainer: Trainer | None,
    read: Callable[[], Mapping[str, np.ndarray]],
    whole: CompiledModel | None = None,
) -> CompiledModel:
    """Compile a model for given arguments. The model has its `attributes` during compilation.

    Args:
        trainer: optimiser, which the program is registered with; `None` without training.
        read: function that returns the host's values of parameters and buffers. It is kept if there are graph breaks.
        whole: program for more rows, with which this one shares the optimiser, and whose values it carries.

    Raises:
        poptorch.Error: for an unsupported op, a missing loss, and any other error of the model.
    """
    ir = popxl.Ir(replication=options.replication)
    groupings = _groupings(ir, model, options)
    update = None
    if trainer is not None:
        update = trainer.prepare(model.tensors(), options, groupings) if whole is None else trainer.update
    request = ProgramRequest(
        options,
        Batching.from_options(options, update is not None),
        options.random_seed if options.random_seed is not None else secrets.randbits(31),
        update,
        groupings,
        _anchors(options, trainer.names() if trainer is not None else ()),
    )
    counters = None if whole is None else tuple(whole.counter_values)
    capture = ModelCapture(model, options, request.batching, update is not None, counters, whole is not None)
    carries_numbers = whole is not None and whole.signature.carries_numbers
    signature_of = partial(Signature, model.forward, args, kwargs, carries_numbers=carries_numbers)
    signature, path = _capture_hiding(signature_of, partial(capture.first, args=args, kwargs=kwargs))
    _check_apart(model, path.captured, () if update is None else update.names)
    if path.breaks:
        attributes = model.attributes

        def capture_again(tensors: Sequence[torch.Tensor], results: Sequence[Any]) -> ExecutionPath:
            with compiling(), attributes.restored():
                return capture.recapture(signature, tensors, results)

        kind = BrokenGraph if update is None else TrainedBrokenGraph
        return kind(capture_again, path, signature, request, read)
    return compile_captured(ir, path.captured, path.structure, signature, request, read())


_MAX_HIDDEN_CAPTURES = 4
"""Maximum number of captures with hidden values, before all are visible."""

_SignatureOf = Callable[[Collection[str] | None], Signature]
"""Function that returns a signature, from the names of inspected values; `None` for all."""


def _capture_hiding(
    signature_of: _SignatureOf, capture: Callable[[Signature], ExecutionPath]
) -> tuple[Signature, ExecutionPath]:
    """Capture a model, hiding the values beside tensors that it does not inspect, if that makes no difference."""
    signature, hidden, visible = _try_hiding(signature_of, capture)
    if hidden is not None:
        return signature, hidden
    signature = signature_of(None)
    return signature, visible or capture(signature)


def _try_hiding(
    signature_of: _SignatureOf, capture: Callable[[Signature], ExecutionPath]
) -> tuple[Signature, ExecutionPath | None, ExecutionPath | None]:
    """The capture with hidden values, if equivalent to the capture with visible values, and the latter."""
    inspected: set[str] = set()
    has_numbers: set[str] = set()
    for _ in range(_MAX_HIDDEN_CAPTURES):
        signature = signature_of(inspected)
        if not signature.carries:
            return signature, (path := capture(signature)), path
        try:
            path = capture(signature)
        except HiddenValueAccess as access:
            inspected |= {access.name, *({access.numbers} & has_numbers)}  # two usually mean more
            has_numbers |= {access.numbers} - {""}
        except Exception:  # any error: code that is not written in Python may have received a hidden value
            logger.debug("Values beside tensors are a part of the program.", exc_info=True)
            break
        else:
            visible = capture(signature_of(None))
            # Paths may inspect different values, and checks of a `type` go unnoticed.
            is_same = not visible.breaks and visible.captured.trace.is_like(path.captured.trace)
            return signature, path if is_same else None, visible
    return signature, None, None


def extend_program(
    model: HostModel,
    compiled: Compiled,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    training: bool,
) -> bool:
    """Extend a program to new non-tensor argument values, if `forward` only passes them through. Return success."""
    first = compiled.signature.arguments(
        torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in compiled.signature.leaves
    )
    signature_of = partial(Signature, model.forward, args, kwargs, carries_numbers=True)
    if not (widest := signature_of(())).carries or not widest.fits(*first):
        return False

    counters = list(compiled.counter_values)
    capture = ModelCapture(model, options, compiled.batching, training, counters, may_split=False)
    signature, path, _ = _try_hiding(signature_of, partial(capture.first, args=args, kwargs=kwargs))
    if path is None or not signature.fits(*first):
        return False
    compiled.signature, compiled.structure = signature, path.structure
    return True


def _check_apart(model: HostModel, captured: Captured, trained: Iterable[str]) -> None:
    """Raise an `Error` if the program overwrites memory shared with another parameter or buffer that it uses."""
    written = {*captured.updated, *trained}
    trace = captured.trace
    values = {id(value) for node in trace.nodes for value in node.inputs} | set(map(id, trace.outputs))
    used = {name for name, value in captured.state.items() if id(value) in values} | written
    weight_values.check_apart({name: t for name, t in model.tensors().items() if name in used}, written)


def _groupings(ir: popxl.Ir, model: HostModel, options: Options) -> dict[str, popxl.ReplicaGrouping]:
    """Replica groupings by parameter name, for parameters differing between replicas."""
    if model.grouped and ir.replication_factor != options.replication_factor:
        raise NotImplementedError(
            f"replicaGrouping: {', '.join(map(repr, model.grouped))} has groups of replicas, of which other "
            "processes have some. Run the program in one process, with `options.replicationFactor`."
        )
    groups = {name: each.groups for name, each in model.grouped.items() if each.groups.count > 1}
    return {name: ir.replica_grouping(each.stride, each.size) for name, each in groups.items()}


def _anchors(options: Options, on_host: Collection[str]) -> list[Returned]:
    """Additional program outputs: anchored tensors, excluding those already available on the host."""
    return [
        Returned(
            anchor.long_name,
            options.output_mode if anchor.output_mode is None else anchor.output_mode,
            options.output_return_period if anchor.output_mode is None else anchor.output_return_period,
            short,
        )
        for short, anchor in options.anchored_tensors.items()
        if anchor.long_name not in on_host
    ]


@contextmanager
def progress_bar(shown: bool) -> Iterator[None]:
    """Show a compilation progress bar on terminals for long compilations, provided tqdm is installed."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        shown = False
    if not shown:
        yield
        return
    with tqdm(desc="Graph compilation", total=100, bar_format="{l_bar}{bar}|", disable=None, delay=1) as bar:

        def show(progress: CompilationProgress) -> None:
            bar.n = 100 * progress.done // max(progress.total, 1)
            bar.refresh()

        with compilation_progress(show):
            yield
