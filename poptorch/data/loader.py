"""`DataLoader`: PyTorch's data loader, with batches sized for complete calls of wrapped models.

It selects the elements of a batch; PyTorch loads them, and `AsynchronousDataAccessor`, in `accessor.py`, does so ahead
of time in another process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from poptorch.base.logging_ import logger
from poptorch.data.accessor import AsynchronousDataAccessor, Rebatched
from poptorch.data.samplers import JoinedBatches, Share
from poptorch.data.worker import EndsWithProgram, forking
from poptorch.enums import DataLoaderMode
from poptorch.errors import createPoptorchError
from poptorch.options import Options
from poptorch.profiling import Channel

_channel = Channel("DataLoader")


class DataLoader(torch.utils.data.DataLoader):
    """Loads batches sized for single calls of a wrapped model, according to its options.

    A batch holds `batch_size` times device iterations, groups of replicas that share inputs, and gradient accumulation.
    If the options are those of one of several processes, each takes its own share of a map-style data set.

    Loader processes are forked, as PyTorch does, even if JAX runs already; JAX's warning of that is left out, as they
    do not enter JAX. For a data set that does, choose `multiprocessing_context="forkserver"`. They end when the process
    that has started them ends, however that happens.

    Args:
        options: options of the model. They are frozen.
        dataset: map-style or iterable. Several workers of an iterable one should each take a part of it: see PyTorch.
        batch_size: rows that the model sees at a time; None for a data set that makes batches itself.
        shuffle: take the elements in another order in each epoch.
        num_workers: processes that load elements; 0 loads where the loader is iterated over.
        drop_last: leave out an incomplete batch at the end. Else its tensors are smaller, and a model is compiled once
            more for them; see `options.partialBatch`.
        persistent_workers: whether to keep the workers from one epoch to the next; by default true.
        auto_distributed_partitioning: whether to take a share of `dataset` if there are several processes. If False,
            `dataset` is already a share.
        mode: whether to load on request (`Sync`), or ahead of time in another process (`Async`, `AsyncRebatched`). With
            `AsyncRebatched`, workers of an iterable data set load single elements, so that none of them drops an
            incomplete batch.
        async_options: further arguments of `AsynchronousDataAccessor`; without effect with `Sync`.
        rebatched_worker_size: number of elements that workers load at a time, with `AsyncRebatched`; if not given, 1
            for an iterable data set, else a whole batch.
        batch_sampler: sampler of lists of indices, in place of `batch_size` and `shuffle`. As many lists are joined as
            a call takes micro-batches.
        kwargs: further arguments of `torch.utils.data.DataLoader`.

    Raises:
        Error: if `batch_sampler` is given with arguments that it replaces, or with several processes; if
            `AsyncRebatched` has no batch size; and as for `AsynchronousDataAccessor`.
        AssertionError: if several processes are to share an iterable data set, or one that is shuffled, without
            `options.randomSeed`; if `rebatched_worker_size` is greater than a whole batch.

    Example:
        >>> options = Options().deviceIterations(2)
        >>> loader = DataLoader(options, torch.arange(10), batch_size=2)
        >>> loader.combinedBatchSize, len(loader)
        (4, 2)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    _accessor: AsynchronousDataAccessor | None = None

    def __init__(
        self,
        options: Options,
        dataset: torch.utils.data.Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: bool | None = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: dict[str, Any] | None = None,
        rebatched_worker_size: int | None = None,
        batch_sampler: Sampler[Sequence[Any]] | Iterable[Sequence[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Prepare batches for calls of a model; an asynchronous loader starts its process. See the class."""
        if not isinstance(options, Options):
            raise createPoptorchError(
                f"DataLoader: `options`, the first argument, should be poptorch.Options; got {type(options).__name__}."
            )
        options.freeze()
        self._options = options
        micro_batches = _micro_batches(options)
        processes = options.Distributed.numProcesses if auto_distributed_partitioning else 1
        loading: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent_workers, **kwargs}
        if persistent_workers is None:
            loading["persistent_workers"] = num_workers > 0
        if num_workers > 0:
            loading["worker_init_fn"] = EndsWithProgram(kwargs.get("worker_init_fn"))
        if batch_sampler is not None:
            _check_no_other_order(batch_size, shuffle, processes)
            loading["batch_sampler"] = JoinedBatches(batch_sampler, micro_batches, drop_last)
            batch_size = getattr(batch_sampler, "batch_size", None)
        combined = None if batch_size is None else batch_size * micro_batches
        if processes > 1:
            _check_no_sampler(kwargs)
            loading["sampler"] = _share(options, dataset, (combined or 1) if drop_last else None, shuffle)
        elif batch_sampler is None:
            loading["shuffle"] = shuffle
        self._combined_batch_size = combined
        sizes: dict[str, Any] = {}
        if batch_sampler is None:
            sizes = {"batch_size": combined, "drop_last": drop_last and combined is not None}
        super().__init__(dataset, **sizes, **loading)
        self._warn(divides=kwargs.get("worker_init_fn") is not None)
        mode = DataLoaderMode(mode)
        if mode is DataLoaderMode.Sync:
            return
        if mode is DataLoaderMode.AsyncRebatched and batch_sampler is None:
            source: Iterable[Any] = _rebatched(dataset, combined, rebatched_worker_size, drop_last, loading)
        else:
            source = torch.utils.data.DataLoader(dataset, **sizes, **loading)
        self._accessor = AsynchronousDataAccessor(source, **async_options or {})

    @property
    def combinedBatchSize(self) -> int | None:
        """Number of elements consumed per model call; `None` if the data set itself creates batches."""
        return self._combined_batch_size

    @property
    def options(self) -> Options:
        """The options passed to the constructor."""
        return self._options

    def __len__(self) -> int:
        """Number of batches per epoch: an estimate for iterable data sets with several workers."""
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Begin an epoch. Asynchronous loaders have a single iterator: a new epoch ends the previous epoch."""
        if self._accessor is not None:
            return _Traced(iter(self._accessor), self)
        with forking():
            return _Traced(super().__iter__(), self)

    def terminate(self) -> None:
        """Stop an asynchronous loader's process: no further batches follow. Synchronous loaders are unaffected."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __del__(self) -> None:
        self.terminate()

    def _warn(self, divides: bool) -> None:
        """Warn about probably unintended settings; `divides`: a user function may divide the data set."""
        iterable = isinstance(self.dataset, IterableDataset)
        if iterable and self.num_workers > 1 and not divides:
            logger.warning(
                "DataLoader: %d workers load an iterable data set, and no `worker_init_fn` is given. Unless the data "
                "set asks torch.utils.data.get_worker_info() for its part, each of them loads everything.",
                self.num_workers,
            )
        elements: Any = self.dataset if iterable else self.sampler
        if self.batch_size is None or not hasattr(elements, "__len__"):
            return
        if self.drop_last and len(elements) < self.batch_size:
            logger.warning(
                "DataLoader: there are %d elements%s, and a call takes %d, so there is no batch. Lower `batch_size`, "
                "or deviceIterations, replicationFactor and gradientAccumulation of the options.",
                len(elements),
                " for this process" if self.options.Distributed.numProcesses > 1 else "",
                self.batch_size,
            )
        if self.drop_last:
            return
        if remainder := len(elements) % self.batch_size:
            logger.warning(
                "DataLoader: the number of elements, %d, is not divisible by the combined batch size, %d, and "
                "drop_last=False: the tensors of the last batch have %d rows, for which a model is compiled once more.",
                len(elements),
                self.batch_size,
                remainder,
            )


class _Traced:
    """Iterator recording waits for batches in profiles. Keeps its loader alive, whose deletion would end iteration."""

    def __init__(self, batches: Iterator[Any], loader: DataLoader) -> None:
        self._batches = batches
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with _channel.tracepoint("__getitem__"):
            return next(self._batches)


def _micro_batches(options: Options) -> int:
    """Micro-batches of a call that have rows of their own."""
    groups = options.replication_factor // options.input_group_size
    return options.device_iterations * groups * options.Training.gradient_accumulation


def _check_no_sampler(loading: Mapping[str, Any]) -> None:
    if "sampler" in loading:
        raise createPoptorchError(
            "DataLoader: `sampler` would give every process the same elements. Let it give each its share, and set "
            "auto_distributed_partitioning=False."
        )


def _check_no_other_order(batch_size: int | None, shuffle: bool | None, processes: int) -> None:
    """Raise an `Error` if other arguments conflict with a batch sampler."""
    for argument, given, instead in (
        ("batch_size", batch_size != 1, "Leave it out: the batch sampler decides."),
        ("shuffle", bool(shuffle), "Leave it out, and let the batch sampler shuffle."),
        (
            "options.Distributed",
            processes > 1,
            "Let the batch sampler of each process give its share, and set auto_distributed_partitioning=False.",
        ),
    ):
        if given:
            raise createPoptorchError(f"DataLoader: `batch_sampler` cannot be combined with `{argument}`. {instead}")


def _share(options: Options, dataset: Any, multiple: int | None, shuffle: bool | None) -> Share:
    """Sampler for this process's share of a data set."""
    if isinstance(dataset, IterableDataset):
        raise AssertionError(
            "DataLoader: an iterable data set cannot be shared out among processes. Let it give each process its part, "
            "and set auto_distributed_partitioning=False."
        )
    if shuffle and options.random_seed is None:
        raise AssertionError(
            "DataLoader: processes that shuffle a data set need the same seed: call options.randomSeed(seed) in each."
        )
    distributed = options.Distributed
    seed = options.random_seed if shuffle else None
    return Share(len(dataset), distributed.processId, distributed.numProcesses, multiple, seed)


def _rebatched(
    dataset: Any, combined: int | None, worker_size: int | None, drop_last: bool, loading: dict[str, Any]
) -> Rebatched:
    """Combine partial batches loaded by workers into full batches."""
    if combined is None:
        raise createPoptorchError(
            "DataLoader: DataLoaderMode.AsyncRebatched makes batches of a given size. Give a `batch_size`, or use "
            "DataLoaderMode.Async for a data set that makes batches itself."
        )
    size = worker_size or (1 if isinstance(dataset, IterableDataset) else combined)
    if not 1 <= size <= combined:
        raise AssertionError(
            f"DataLoader: `rebatched_worker_size` must be from 1 to the combined batch size, {combined}; got {size}."
        )
    return Rebatched(torch.utils.data.DataLoader(dataset, size, **loading), combined, drop_last)
