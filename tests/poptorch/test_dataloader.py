"""Loaders: which rows come in which batch, the same from another process, and nothing left of that afterwards."""

import gc
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, Dataset, IterableDataset, SequentialSampler, TensorDataset  # noqa: E402

from poptorch.base.custom_types import ICustomArgParser, registerCustomArgParser  # noqa: E402
from poptorch.data.accessor import AsynchronousDataAccessor  # noqa: E402
from poptorch.data.loader import DataLoader  # noqa: E402
from poptorch.enums import CommGroupType, DataLoaderMode, SharingStrategy  # noqa: E402
from poptorch.errors import Error  # noqa: E402
from poptorch.options import Options  # noqa: E402

FORK = {"sharing_strategy": SharingStrategy.Fork}
ROOT = Path(__file__).parents[2]


class Squares(Dataset):
    """Element i is the row [i, i * i] and the label i."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):  # never ends by itself: `len` says how far it goes
        return torch.tensor([float(i), float(i * i)]), i


class Numbers(Squares):
    def __getitem__(self, i):
        return torch.tensor([i]), torch.tensor(i)


class Split(IterableDataset):
    """The numbers below `size`, split among the loader's workers in blocks of equal size, the last one smaller."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        block = -(-self.size // workers)
        return iter(range(worker * block, min(self.size, (worker + 1) * block)))


class Failing(IterableDataset):
    """`good` rows, then an error."""

    def __init__(self, good):
        self.good = good

    def __iter__(self):
        yield from (torch.tensor([i]) for i in range(self.good))
        raise FileNotFoundError("images/7.png is not there")


class Dying(Failing):
    def __iter__(self):
        yield from (torch.tensor([i]) for i in range(self.good))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def _no_process_is_left():
    def alive():
        return {process.pid for process in multiprocessing.active_children()}

    before = alive()
    yield
    if not alive() <= before:
        gc.collect()
    assert alive() <= before


@pytest.fixture
def warned(caplog):
    """The warnings so far."""
    logging.getLogger("poptorch::python").propagate = True
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def rows(loader):
    """The batches of an epoch as lists."""
    return [batch.tolist() for batch in loader]


def labels(loader):
    return [batch[1].tolist() for batch in loader]


def accessor(dataset, **how):
    return AsynchronousDataAccessor(dataset, **{**FORK, **how})


def loader(options, dataset, batch_size=1, mode=DataLoaderMode.Async, **how):
    return DataLoader(options, dataset, batch_size, mode=mode, async_options=FORK, **how)


# Which rows ----------------------------------------------------------------------------------------------------------


def test_batch_holds_the_rows_of_a_call():
    options = Options().deviceIterations(2).replicationFactor(6)
    options.inputReplicaGrouping(2, CommGroupType.Consecutive)
    options.Training.gradientAccumulation(5)
    batches = DataLoader(options, Squares(200), batch_size=3)
    assert batches.combinedBatchSize == 3 * 2 * 3 * 5 == 90
    assert batches.options is options
    assert len(batches) == 2
    data, label = next(iter(batches))
    assert data.shape == (90, 2) and label.tolist() == list(range(90))
    batches.terminate()  # no effect
    assert len(labels(batches)) == 2


def test_no_batch_at_all_is_told_of(warned):
    assert len(DataLoader(Options().deviceIterations(3), Squares(6), batch_size=2)) == 1
    assert not warned()
    assert not list(DataLoader(Options().deviceIterations(4), Squares(6), batch_size=2))
    assert "there are 6 elements, and a call takes 8, so there is no batch" in warned()[0]


def test_options_are_frozen():
    options = Options()
    DataLoader(options, Squares(4))
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.deviceIterations(2)


def test_options_come_first():
    with pytest.raises(Error, match="`options`, the first argument, should be poptorch.Options; got Squares"):
        DataLoader(Squares(4), 2)


def test_no_batching():
    batches = DataLoader(Options().deviceIterations(3), [torch.tensor([1, 2]), torch.tensor([3])], batch_size=None)
    assert batches.combinedBatchSize is None and batches.batch_size is None
    assert len(batches) == 2
    assert rows(batches) == [[1, 2], [3]]


@pytest.mark.parametrize("mode", DataLoaderMode)
@pytest.mark.parametrize(("drop_last", "expected"), [(True, [4, 4]), (False, [4, 4, 3])])
def test_remainder(mode, drop_last, expected, warned):
    batches = loader(Options().deviceIterations(2), Squares(11), 2, mode, drop_last=drop_last)
    assert len(batches) == len(expected)
    assert [len(label) for label in labels(batches)] == expected
    assert [n for batch in labels(batches) for n in batch] == list(range(sum(expected)))
    counts = [re.findall(r"\d+", message) for message in warned()]
    assert counts == ([] if drop_last else [["11", "4", "3"]])


def test_shuffle():
    torch.manual_seed(3)
    batches = DataLoader(Options(), Squares(50), batch_size=10, shuffle=True)
    first, second = labels(batches), labels(batches)
    assert first != second
    assert sorted(sum(first, [])) == sorted(sum(second, [])) == list(range(50))


def test_workers_persist_unless_told_otherwise():
    assert DataLoader(Options(), Squares(8), num_workers=1).persistent_workers
    assert not DataLoader(Options(), Squares(8)).persistent_workers
    assert not DataLoader(Options(), Squares(8), num_workers=1, persistent_workers=False).persistent_workers


def test_workers_after_jax_has_started():
    import jax

    jax.devices()  # from now on JAX warns of forks
    batches = DataLoader(Options(), Squares(12), batch_size=3, num_workers=2)
    for _ in range(2):
        assert labels(batches) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_batch_sampler():
    sampler = BatchSampler(SequentialSampler(range(11)), batch_size=2, drop_last=False)
    options = Options().deviceIterations(2)
    batches = DataLoader(options, Squares(11), batch_sampler=sampler)
    assert batches.combinedBatchSize == 4
    assert len(batches) == 3
    assert labels(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    batches = loader(options, Squares(11), batch_sampler=[[9], [1, 2], [0, 4, 3]], drop_last=True)
    assert batches.combinedBatchSize is None
    assert labels(batches) == [[9, 1, 2]]
    assert len(batches) == 1


class Restarting:
    """A batch sampler that is its own iterator, and begins anew whenever it is asked for one. Lightning has such."""

    def __iter__(self):
        self.batches = iter([[0], [1], [2]])
        return self

    def __next__(self):
        return next(self.batches)


def test_batch_sampler_is_asked_for_one_iterator():
    assert labels(DataLoader(Options().deviceIterations(2), Squares(3), batch_sampler=Restarting())) == [[0, 1]]


@pytest.mark.parametrize(
    ("how", "argument"),
    [({"batch_size": 2}, "batch_size"), ({"shuffle": True}, "shuffle"), ({"processes": 2}, "options.Distributed")],
)
def test_batch_sampler_decides_alone(how, argument):
    options = Options()
    options.Distributed.configureProcessId(0, how.pop("processes", 1))
    with pytest.raises(Error, match=f"`batch_sampler` cannot be combined with `{argument}`"):
        DataLoader(options, Squares(8), batch_sampler=[[0], [1]], **how)


# Several processes ---------------------------------------------------------------------------------------------------


def shares(size, processes, epochs=2, seed=None, iterations=1, mode=DataLoaderMode.Sync, **how):
    """The labels that each process sees in each epoch: [process][epoch]."""
    result = []
    for process in range(processes):
        options = Options().deviceIterations(iterations)
        options.Distributed.configureProcessId(process, processes)
        if seed is not None:
            options.randomSeed(seed)
        batches = loader(options, Squares(size), mode=mode, **how)
        result.append([sum(labels(batches), []) for _ in range(epochs)])
        batches.terminate()
    return result


@pytest.mark.parametrize("mode", DataLoaderMode)
def test_processes_take_blocks(mode):
    # 23 // (4 * 2) = 2 batches of 4 for each of the two processes; 7 are left over, at the end and at the beginning.
    (a0, a1), (b0, b1) = shares(23, 2, batch_size=2, iterations=2, mode=mode)
    assert (a0, b0) == (list(range(8)), list(range(8, 16)))
    assert (a1, b1) == (list(range(7, 15)), list(range(15, 23)))


def test_processes_share_evenly_if_nothing_is_dropped(warned):
    taken = shares(11, 3, epochs=1, batch_size=2, drop_last=False)
    assert [epochs[0] for epochs in taken] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert len(warned()) == 1


@pytest.mark.parametrize("mode", [DataLoaderMode.Sync, DataLoaderMode.Async])
def test_processes_shuffle_together(mode):
    (a0, a1), (b0, b1) = shares(24, 2, seed=5, batch_size=4, shuffle=True, mode=mode)
    assert sorted(a0 + b0) == sorted(a1 + b1) == list(range(24))
    assert a0 != a1 and a0 != sorted(a0)


def test_processes_that_cannot_share():
    options = Options()
    options.Distributed.configureProcessId(1, 2)
    with pytest.raises(AssertionError, match="call options.randomSeed"):
        DataLoader(options, Squares(8), shuffle=True)
    with pytest.raises(AssertionError, match="iterable data set cannot be shared out"):
        DataLoader(options, Split(8))
    with pytest.raises(Error, match="`sampler` would give every process the same elements"):
        DataLoader(options, Squares(8), sampler=[0, 1])
    assert rows(DataLoader(options, Split(4), batch_size=2, auto_distributed_partitioning=False)) == [[0, 1], [2, 3]]


# Iterable data sets --------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but_each=6)
@pytest.mark.filterwarnings("ignore:This DataLoader will create 7 worker processes:UserWarning")
@pytest.mark.filterwarnings("ignore:Length of IterableDataset:UserWarning")
@pytest.mark.parametrize("mode", DataLoaderMode)
@pytest.mark.parametrize("drop_last", [True, False])
def test_iterable_split_over_seven_workers(mode, drop_last, warned):
    """101 numbers: six workers have 15, the last has 11."""
    size = 4 if drop_last else 6
    batches = loader(Options(), Split(101), size, mode, num_workers=7, drop_last=drop_last, persistent_workers=False)
    lengths = [len(batch) for batch in batches]
    if mode is DataLoaderMode.AsyncRebatched:
        expected = [4] * 25 if drop_last else [6] * 16 + [5]
    else:
        expected = [4] * 20 if drop_last else [6] * 13 + [5, 3, 3, 3, 3, 3, 3]
    assert sorted(lengths) == sorted(expected)
    assert lengths[-1] in (4, 5, 3)
    assert len(batches) == (25 if drop_last else 17)
    assert any("7 workers load an iterable data set" in message for message in warned())


@pytest.mark.parametrize("worker_size", [None, 2, 5])
def test_rebatched_workers_load_parts(worker_size):
    batches = loader(
        Options(), Split(13), 5, DataLoaderMode.AsyncRebatched, rebatched_worker_size=worker_size, drop_last=False
    )
    assert rows(batches) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12]]


def test_rebatched_needs_a_size():
    with pytest.raises(AssertionError, match="from 1 to the combined batch size, 4; got 5"):
        loader(Options(), Split(8), 4, DataLoaderMode.AsyncRebatched, rebatched_worker_size=5)
    with pytest.raises(Error, match="Give a `batch_size`"):
        loader(Options(), Split(8), None, DataLoaderMode.AsyncRebatched)


# The accessor --------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: object
    right: object


class Graph:
    def __init__(self, nodes, edges, name):
        self.nodes, self.edges, self.name = nodes, edges, name


class GraphParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.nodes
        yield struct.edges

    def reconstruct(self, original_structure, tensor_iterator):
        return Graph(next(tensor_iterator), next(tensor_iterator), original_structure.name)


x, y = torch.tensor([[1.5, 2.5, 3.5]]), torch.tensor([True])


@pytest.mark.parametrize(
    "batch",
    [x, (x, y), [y, x, x], {"x": x, "y": y}, OrderedDict(b=x, a=y), Pair(x, y), x.double().T, torch.tensor(7), x[:0]],
    ids=["tensor", "tuple", "list", "dict", "ordered", "named", "transposed", "0-d", "empty"],
)
def test_batches_keep_their_structure(batch):
    (got,) = accessor([batch])
    assert type(got) is type(batch)
    torch.testing.assert_close(got, batch, rtol=0, atol=0)


def test_dtypes():
    batch = tuple(
        torch.tensor([1, 0, 2]).to(dtype)
        for dtype in (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
        + (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    )
    (got,) = accessor([batch])
    assert [t.dtype for t in got] == [t.dtype for t in batch]
    assert all(a.equal(b) for a, b in zip(got, batch, strict=True))


@pytest.fixture
def graphs():
    registerCustomArgParser(Graph, GraphParser())
    yield [Graph(torch.tensor([[i], [i + 1]]), torch.tensor([float(i), -1]), f"graph {i}") for i in range(4)]
    registerCustomArgParser(Graph, None)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("strategy", [SharingStrategy.Fork, SharingStrategy.ForkServer])
def test_registered_types(graphs, strategy):
    got = accessor(graphs, sharing_strategy=strategy)
    for i, graph in enumerate(got):
        assert (graph.nodes.tolist(), graph.edges.tolist(), graph.name) == ([[i], [i + 1]], [i, -1], f"graph {i}")


def test_registered_types_are_rebatched(graphs):
    (got, _) = ((g.nodes.tolist(), g.edges.tolist(), g.name) for g in accessor(graphs, rebatched_size=3))
    assert got == ([[0], [1], [1]], [0, -1, 1], "graph 0")


@pytest.mark.parametrize(
    ("batch", "described"),
    [
        (3, "int"),
        ((x, 3), "tuple of Tensor, int"),
        ((x, (x,)), "tuple of Tensor, tuple"),
        ({1: x}, "dict of 1: Tensor"),
    ],
)
def test_other_batches_are_refused(batch, described):
    with pytest.raises(AssertionError, match=f"needs batches that are a tensor, .*; got {re.escape(described)}"):
        accessor([batch])


def test_shapes_may_change():
    batches = [torch.arange(3), torch.arange(500), torch.zeros(0), torch.arange(6.0).reshape(2, 3)] * 2
    for got, expected in zip(accessor(batches, buffer_size=2), batches, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("buffer_size", [1, 2, 3])
def test_ring_is_used_again(buffer_size):
    """A loop over batches copies none of them, but for a ring of one slot, and they stay as they are in it."""
    addresses = set()
    for i, batch in enumerate(accessor([torch.full((4,), i) for i in range(10)], buffer_size=buffer_size)):
        time.sleep(0.01)  # the worker fills what it may
        assert batch.tolist() == [i] * 4
        addresses.add(batch.data_ptr())
    assert buffer_size == 1 or len(addresses) == buffer_size + 1


KEPT = {
    "all": lambda got: [int(rows[0]) for rows, _ in list(got)],
    "labels": lambda got: [int(label) for label in [labels[:1] for _, labels in got]],
    "arrays": lambda got: [int(array[0]) for array in [rows.numpy() for rows, _ in got]],
    "pairs": lambda got: [int(rows[0]) for pair in zip(*[iter(got)] * 2, strict=True) for rows, _ in pair],
    "the first": lambda got: [int(rows[0]) for first in [next(iter(got))] for rows, _ in [first, *list(got)[1:]]],
}


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("buffer_size", [1, 3])
@pytest.mark.parametrize("kept", KEPT)
def test_batches_that_are_kept_stay_as_they_are(kept, buffer_size):
    batches = accessor([(torch.full((4,), i), torch.tensor([i, -1])) for i in range(8)], buffer_size=buffer_size)
    for _ in range(2):
        assert KEPT[kept](batches) == list(range(8))


def test_a_loader_in_a_list():
    options = Options().deviceIterations(2)
    batches = loader(options, torch.arange(24.0), 3)
    assert torch.stack(list(batches)).flatten().tolist() == list(range(24))


def test_batches_outlive_the_worker():
    batches = accessor([torch.arange(3)])
    batch = next(iter(batches))
    batches.terminate()
    assert batch.tolist() == [0, 1, 2]
    with pytest.raises(Error, match=r"This loader has ended: `terminate\(\)` was called"):
        iter(batches)
    batches.terminate()  # again: no effect


def test_iterates_again_and_after_a_break():
    batches = accessor([torch.tensor(i) for i in range(7)])
    assert len(batches) == 7
    for stop in (7, 0, 3, 7, 1, 6, 7, 7):
        seen = [int(batch) for batch, _ in zip(batches, range(stop), strict=False)]
        assert seen == list(range(stop))
    it = iter(batches)
    assert rows(it) == list(range(7))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(it)


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("load_indefinitely", [True, False])
@pytest.mark.parametrize("early_preload", [True, False])
@pytest.mark.parametrize("buffer_size", [1, 4])
def test_how_far_ahead(tmp_path, load_indefinitely, early_preload, buffer_size):
    """The files that the worker has made say how much it has loaded."""
    log = tmp_path / "log"

    class Logging(IterableDataset):
        def __iter__(self):
            for i in range(2):
                with log.open("a") as file:
                    file.write(str(i))
                yield torch.tensor(i)

    def settled(expected):
        """What has been loaded, once that is what is expected, and a moment later."""
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_text() == expected) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        return log.read_text()

    ring = "0101"[: buffer_size if load_indefinitely else min(2, buffer_size)]
    batches = accessor(
        Logging(), load_indefinitely=load_indefinitely, early_preload=early_preload, buffer_size=buffer_size
    )
    loaded = ring if early_preload else "0"
    assert settled(loaded) == loaded
    it = iter(batches)
    assert settled(ring) == ring
    assert rows(it) == [0, 1]
    # the last slot is free again: one epoch ahead, but no further
    again = "01" + ("01"[:buffer_size]) if load_indefinitely else "01"
    assert settled(again) == again
    assert rows(batches) == [0, 1]


def test_map_style_data_set_ends_at_its_length():
    assert labels(accessor(Numbers(5))) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("drop_last", "expected"), [(None, 2), (True, 2), (False, 3)])
def test_rebatched_accessor(drop_last, expected):
    """Rows of a data set, or of a loader with an own `drop_last`; a 0-d tensor is one row."""
    source = Numbers(5) if drop_last is None else DataLoader(Options(), Squares(5), drop_last=drop_last)
    batches = accessor(source, rebatched_size=2)
    assert len(batches) == expected
    assert labels(batches) == [[0, 1], [2, 3], [4]][:expected]


def test_rebatched_tensors_need_the_same_rows():
    with pytest.raises(Error, match=r"same length in dimension 0; got the shapes \[\(2,\), \(3,\)\]"):
        accessor([(torch.zeros(2), torch.zeros(3))], rebatched_size=4)


def test_wrong_arguments():
    with pytest.raises(AssertionError, match="`rebatched_size` must be greater than 1; got 1"):
        accessor([x], rebatched_size=1)
    with pytest.raises(AssertionError, match="`buffer_size` must be at least 1; got 0"):
        accessor([x], buffer_size=0)
    with pytest.raises(Error, match="is a DataLoader that is asynchronous already"):
        accessor(loader(Options(), Squares(4)))


def test_accessor_of_a_loader():
    synchronous = DataLoader(Options(), Squares(4), batch_size=2, num_workers=1)
    assert labels(synchronous) == [[0, 1], [2, 3]]  # and its worker waits for the next epoch
    batches = accessor(synchronous)
    assert len(batches) == 2
    assert labels(batches) == [[0, 1], [2, 3]]


def test_randomness_follows_the_seed():
    def order():
        torch.manual_seed(11)
        return labels(loader(Options(), Squares(30), 5, shuffle=True))

    first = order()
    assert first == order() and sorted(sum(first, [])) == list(range(30)) != sum(first, [])


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("mode", [DataLoaderMode.Async, DataLoaderMode.AsyncRebatched])
@pytest.mark.parametrize("persistent", [True, False])
def test_asynchronous_loader_with_workers(mode, persistent):
    batches = loader(Options(), Squares(24), 4, mode, num_workers=2, persistent_workers=persistent)
    for stop in (2, 6, 6):
        seen = [label.tolist() for (_, label), _ in zip(batches, range(stop), strict=False)]
        assert sum(seen, []) == list(range(4 * stop))


# What goes wrong -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rebatched_size", [None, 2])
def test_empty_data_set(rebatched_size):
    with pytest.raises(Error, match="worker thread failed to start. The data set is empty"):
        accessor([], rebatched_size=rebatched_size)


def test_failure_at_the_start():
    with pytest.raises(Error, match=r"worker thread failed to start.(.|\n)*FileNotFoundError: images/7.png"):
        accessor(Failing(0))


@pytest.mark.parametrize("workers", [0, 1])
def test_failure_later(workers):
    batches = loader(Options(), Failing(4), 2, num_workers=workers)
    it = iter(batches)
    assert [next(it).tolist(), next(it).tolist()] == [[[0], [1]], [[2], [3]]]
    with pytest.raises(
        AssertionError,
        match=r"An error occurred in the data fetcher: (.|\n)*, in __iter__\n(.|\n)*images/7.png is not there",
    ):
        next(it)
    with pytest.raises(Error, match="This loader has ended"):
        next(it)


def test_workers_run_what_they_are_told_to():
    started = multiprocessing.get_context("fork").SimpleQueue()
    assert len(labels(DataLoader(Options(), Squares(4), 2, num_workers=2, worker_init_fn=started.put))) == 2
    assert {started.get(), started.get()} == {0, 1}


def test_worker_dies():
    with pytest.raises(Error, match="failed to start. The worker process ended by SIGKILL. Perhaps .* out of memory"):
        accessor(Dying(0))
    it = iter(accessor(Dying(1)))
    next(it)
    with pytest.raises(
        AssertionError, match="An error occurred in the data fetcher: The worker process ended by SIGKILL"
    ):
        next(it)


class Gated(Numbers):
    """Elements from 2 on are there once a file is."""

    def __init__(self, size, gate):
        super().__init__(size)
        self.gate = gate

    def __getitem__(self, i):
        while i >= 2 and not self.gate.exists():
            time.sleep(0.01)
        return super().__getitem__(i)


def test_an_interrupt_while_waiting_loses_nothing(tmp_path):
    def interrupt(*_):
        (tmp_path / "gate").touch()
        raise KeyboardInterrupt

    batches = accessor(Gated(4, tmp_path / "gate"))
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        assert [next(batches)[1].item(), next(batches)[1].item()] == [0, 1]
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [next(batches)[1].item(), next(batches)[1].item()] == [2, 3]


def test_worker_of_a_dead_worker_does_not_hold_us():
    """Processes that the worker has forked have its end of the pipe, too."""
    it = iter(loader(Options(), Squares(1000), 2, num_workers=1))
    next(it)
    os.kill(it._batches._process.pid, signal.SIGKILL)
    with pytest.raises(AssertionError, match="ended by SIGKILL"):
        for _ in it:
            pass


def test_data_set_that_cannot_be_pickled():
    with pytest.raises(
        Error, match="cannot be sent to a worker process: .*lambda.*use sharing_strategy=SharingStrategy.Fork"
    ):
        AsynchronousDataAccessor(map(lambda i: i, [x]), sharing_strategy=SharingStrategy.ForkServer)
    (got,) = accessor(map(lambda i: i, [x]))
    assert got.equal(x)


# Processes -----------------------------------------------------------------------------------------------------------


class Witness(TensorDataset):
    """Says, in its only column, what is true in the process that loads it."""

    counter = None

    def __getitem__(self, i):
        if self.counter is not None:
            with self.counter.get_lock():
                self.counter.value += 1
        is_elsewhere, is_frozen = os.getpid() != self.parent, gc.get_freeze_count() > 0
        return torch.tensor([self.tensors[0][i] * 2, self.tensors[0].is_shared(), is_elsewhere, is_frozen])


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", SharingStrategy)
def test_sharing_strategies(strategy):
    dataset = Witness(torch.arange(6))
    dataset.parent = os.getpid()
    context = "forkserver" if strategy is SharingStrategy.ForkServer else "spawn"
    dataset.counter = multiprocessing.get_context(context).Value("i", 0)  # can be sent only while a process starts
    how = {"sharing_strategy": strategy}
    batches = DataLoader(Options(), dataset, batch_size=3, mode=DataLoaderMode.Async, async_options=how)
    first, second = batches
    again = [batch[:, 0].tolist() for batch in batches]
    assert first[:, 0].tolist() == [0, 2, 4] and second[:, 0].tolist() == [6, 8, 10]
    assert again == [[0, 2, 4], [6, 8, 10]]
    assert first[:, 1].tolist() == [strategy is SharingStrategy.SharedMemory] * 3
    assert first[:, 2:].all()
    assert dataset.counter.value >= 12


@pytest.mark.thorough
def test_many_tensors_can_be_sent():
    """More than a process may be started with open files."""
    batches = [torch.tensor(i) for i in range(300)]
    assert rows(AsynchronousDataAccessor(batches)) == list(range(300))


PROGRAM = """
import os, sys, time
import torch
sys.path.insert(0, {root!r})
from poptorch import AsynchronousDataAccessor, DataLoader, Options

print("imported", flush=True)

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        time.sleep(0 if i < 4 else 60)
        return torch.tensor(i)

def main():
    import jax

    kept = [DataLoader(Options(), Slow(), 2, num_workers=2)]
    for when in "before", "after":
        loader = torch.utils.data.DataLoader(Slow(), 2, num_workers=2)
        kept.append(AsynchronousDataAccessor(loader))  # forks before JAX runs, and asks a server to do so afterwards
        jax.devices()
    kept = list(map(iter, kept))
    for batches in kept:
        assert next(batches).tolist() == [0, 1]
    print("ready", flush=True)
    {last}

if __name__ == "__main__":
    main()
"""


def family(tag):
    """The processes that have `tag` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if (
                tag.encode() in path.read_bytes()
                and "Z" not in (path.parent / "stat").read_text().rsplit(")", 1)[1][:3]
            ):
                found.append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("last", "sent", "code", "says"),
    [
        ("time.sleep(60)", signal.SIGKILL, -signal.SIGKILL, ""),
        ("pass", None, 0, ""),
        ("for _ in kept[1]: pass", signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"),
    ],
    ids=["kill", "end", "interrupt"],
)
def test_nothing_is_left_of_a_program(tmp_path, last, sent, code, says):
    """Of nine processes: the workers of three loaders are busy, two of them with a process of the accessor above them.

    Only one of them has imported the program anew: the accessor's that was made when JAX ran already.
    """
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.format(root=str(ROOT), last=last))
    tag = f"POPTORCH_TEST={tmp_path}"
    process = subprocess.Popen(
        [sys.executable, script],
        env={**os.environ, "POPTORCH_TEST": str(tmp_path), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert [process.stdout.readline() for _ in range(3)] == ["imported\n", "imported\n", "ready\n"]
    members = family(tag)
    if sent == signal.SIGINT:
        os.killpg(process.pid, sent)  # as the terminal does: to all of them
    elif sent:
        process.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert errors.count("Traceback") == (1 if says else 0), errors
    assert says in errors
    deadline = time.monotonic() + 60
    while family(tag) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not family(tag)
    shared = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    assert not [name for name in shared if int(name.split("_")[1]) in members]
