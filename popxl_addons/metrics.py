"""Metrics of a training while it runs: to files for TensorBoard, to Weights & Biases, or to both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import numpy as np

import popxl
from popxl.extend.processes import Instance, launched
from popxl.fp8_utils import host_pow2scale_cast_from_fp8
from popxl.streams import Stream
from popxl_addons import _wandb

__all__ = ["Metrics"]


class Metrics:
    """Logger for numbers and histograms. Close it after use, or use a ``with`` block.

    If several processes run a program, all call it, and the first one writes.

    Args:
        tensorboard: a folder for TensorBoard's event files; it is made if it is missing. Needs `tensorboardX` (extra
            ``tensorboard``); TensorBoard itself need not be there.
        wandb: log to the active run of Weights & Biases.

    Raises:
        ValueError: if no destination is given.
        ImportError: if `tensorboardX` or `wandb` is requested and not installed.

    Example:
        With `tensorboardX` installed::

            with Metrics(tensorboard="runs/first") as metrics, session:
                for step, batch in enumerate(batches):
                    metrics.log(session.run(batch), step)
                metrics.variables(session, step)
    """

    def __init__(self, tensorboard: str | os.PathLike[str] | None = None, wandb: bool = False) -> None:
        if tensorboard is None and not wandb:
            raise ValueError(
                "Metrics: there is nowhere to log to. Give a folder as `tensorboard`, or say `wandb=True`."
            )
        writes = (launched() or Instance()).instance_index == 0
        self._wandb = _wandb.wandb() if wandb and writes else None
        self._writer = _writer(tensorboard) if tensorboard is not None and writes else None

    def log(self, values: Mapping[str | Stream, Any], step: int) -> None:
        """Log a number under each name; of an array, such as the losses of several micro-batches, the mean.

        `values` may be the result of ``session.run``: streams have their names.
        """
        if self._writer is None and self._wandb is None:
            return
        numbers = {_name(key): _mean(_name(key), value) for key, value in values.items()}
        if self._writer is not None:
            for name, number in numbers.items():
                self._writer.add_scalar(name, number, step)
        if self._wandb is not None:
            self._wandb.log(numbers, step=step)

    def histograms(self, arrays: Mapping[str | Stream, np.ndarray], step: int) -> None:
        """Log how the finite elements of each array are distributed, and how many are not finite. Of complex ones the
        absolute values count. The names are ``<name>/histogram`` and ``<name>/not_finite``; for Weights & Biases, with
        a colon."""
        known = {_name(key): as_numbers(np.asarray(array)) for key, array in arrays.items()}
        if self._wandb is not None:
            _wandb.log_arrays(known, step)
        if self._writer is not None:
            for name, array in known.items():
                finite = array[np.isfinite(array)].astype(np.float32)
                self._writer.add_scalar(f"{name}/not_finite", array.size - finite.size, step)
                if finite.size:
                    self._writer.add_histogram(f"{name}/histogram", finite, step)

    def variables(self, session: popxl.Session, step: int) -> None:
        """Log `histograms` of all variables of a session's program, under their names."""
        data = session.values_of(session.ir.main_graph.variables)
        self.histograms({t.name: array for t, array in data.items()}, step)

    def close(self) -> None:
        """Write what is left to be written. Nothing can be logged to TensorBoard afterwards."""
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def as_numbers(array: np.ndarray) -> np.ndarray:
    """Convert float8 arrays to float32, complex ones to absolute values; others unchanged."""
    if array.dtype.names is not None:
        return host_pow2scale_cast_from_fp8(array, popxl.float32)
    return np.abs(array) if np.iscomplexobj(array) else array


def _writer(folder: str | os.PathLike[str]) -> Any:
    try:
        from tensorboardX import SummaryWriter  # the library is needed for this method only
    except ImportError as problem:
        raise ImportError(
            "Metrics: what writes files for TensorBoard is not installed. Install it with `pip install tensorboardX`."
        ) from problem
    return SummaryWriter(os.fspath(folder))


def _name(key: str | Stream) -> str:
    return key.tensor.name if isinstance(key, Stream) else key


def _mean(name: str, value: Any) -> float:
    given = np.asarray(value)
    if given.dtype.kind in "OSUc":
        raise TypeError(
            f"Metrics.log: `{name}` is {value!r} ({type(value).__name__}); expected a number, or an array: real ones."
        )
    array = as_numbers(given)
    if not array.size:
        raise ValueError(f"Metrics.log: `{name}` is an array without elements, which has no mean.")
    return float(np.mean(array, dtype=np.float64))
