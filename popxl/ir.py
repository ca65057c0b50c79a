"""`Ir`: a whole program. One main graph, the subgraphs it calls, and the counters that make their names unique."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from popxl.analysis.communication import Communication, communication_of
from popxl.analysis.dot import write_checkpoint
from popxl.analysis.memory import Memory, memory_of
from popxl.analysis.overview import overview_of
from popxl.base.arguments import check_type
from popxl.base.copies import NotCopyable
from popxl.base.distributed import launched
from popxl.base.edit_counter import EditCounter
from popxl.base.host_copies import HostCopies
from popxl.base.pages import Picture
from popxl.core.binding import build_graph, graph_name
from popxl.core.printing import definition
from popxl.core.rounding import RoundingKey, seed_of
from popxl.core.tensor import Variable
from popxl.graph import Graph
from popxl.module import Module
from popxl.options import MOST_REPLICAS, SessionOptions
from popxl.program import debug_info, reading, writing
from popxl.program.launch import share_replicas
from popxl.remote_buffer import RemoteBuffer
from popxl.replica_grouping import (
    ReplicaGrouping,
    constant_grouping,
    grouping_along,
    grouping_from_assignments,
)
from popxl.streams import DeviceToHostStream, HostToDeviceStream
from popxl.values.axes import Axes
from popxl.values.shapes import integer

__all__ = ["Ir"]

_ids = itertools.count()


class Ir(NotCopyable):
    """A program under construction, and later run by a `popxl.Session`.

    Args:
        replication: number of replicas that run the program side by side; by default 1, or that of `axes`. `"popdist"`:
            the number given to `poprun`; this process drives its share of them.
        axes: arrangement of the replicas: names of dimensions, outermost first, with their sizes. Replicas are then
            grouped by names: see `grouping`. One axis may have the size `"ipus"`: the IPUs of a replica, which are the
            stages of a pipeline, lie along it: see `adjacent_replicas`.

    Raises:
        PopxlError: for `"popdist"`, if this process was not started by `poprun`.
        ValueError: if `axes` have another number of replicas, or sizes below 1.

    Attributes:
        graphs: all graphs, the main graph first.
        remote_buffers: all remote buffers, in the order of their numbers, which start at 1.
        edits: counts the changes of the program.
        rounding_key: the stream with the key of stochastic rounding, which sessions feed.
        host_copies: version and lock of the host copies of its variables, shared by its sessions.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     x = popxl.variable(1.0, name="x")
        ...     ops.add_(x, popxl.constant(1.0))
        >>> with popxl.Session(ir) as session:
        ...     session.run()
    """

    def __init__(
        self,
        replication: int | Literal["popdist"] | None = None,
        axes: Mapping[str, int | Literal["ipus"]] | None = None,
    ) -> None:
        self._id = next(_ids)
        self._axes = Axes.from_mapping(axes) if axes else None
        self.edits = EditCounter()
        self.options = SessionOptions()
        self._num_host_transfers = 1
        self.stream_transfers: dict[str, int] = {}  # of streams with a number of their own, by id
        self.host_copies = HostCopies()
        self.counters = {"op_ids": 100, "subgraph_numbers": 0, "suffixes": 0}
        self.graphs: list[Graph] = [Graph._make(self, "")]
        self.remote_buffers: list[RemoteBuffer] = []
        self.rounding_key = RoundingKey.for_program(self.main_graph)
        if isinstance(replication, str) and replication == "popdist":
            share_replicas(self)
        else:
            of_axes = 1 if self._axes is None else self._axes.count
            self.replication_factor = of_axes if replication is None else replication
        debug_info.register_ir(self)

    @property
    def id(self) -> int:
        """Number of the Ir, unique in the process."""
        return self._id

    @property
    def num_host_transfers(self) -> int:
        """Reads or writes of each stream per `session.run`, unless overridden: see `Stream.num_host_transfers`.

        Above 1, host arrays have a leading dimension of this size. Set it before a session is made of the Ir.
        """
        return self._num_host_transfers

    @num_host_transfers.setter
    def num_host_transfers(self, value: int) -> None:
        count = integer(value, "Ir.num_host_transfers")
        if count < 1:
            raise ValueError(f"Ir.num_host_transfers is {count}; expected 1 or more.")
        self._num_host_transfers = count
        self.edits.record_edit()

    @property
    def options(self) -> SessionOptions:
        """The session options; see `popxl.options.SessionOptions`."""
        return self._options

    @options.setter
    def options(self, value: SessionOptions) -> None:
        self._options = value
        value.count_in(self.edits)

    @property
    def rounding_seed(self) -> Variable | None:
        """The variable with the seed of stochastic rounding: part of the program's state, as its weights are.

        A session makes it, of the option `stochasticRoundingSeed`, if `enableStochasticRounding` is on. Each run
        replaces it. `None` without stochastic rounding.
        """
        return seed_of(self)

    @property
    def main_graph(self) -> Graph:
        """The graph that a session runs."""
        return self.graphs[0]

    @property
    def replication_factor(self) -> int:
        """Number of replicas, over all processes. It cannot be set once a session has been made of the Ir.

        With `replication="popdist"`, its value is the number of replicas of this process; do not change it.
        """
        return self.options.replication_factor

    @replication_factor.setter
    def replication_factor(self, value: int) -> None:
        if self.edits.compiled is not None:
            raise RuntimeError(
                "Ir.replication_factor: a session has been made of this Ir; set the number of replicas before that."
            )
        count = integer(value, "Ir: the number of replicas")
        if not 1 <= count <= MOST_REPLICAS:
            raise ValueError(f"Ir: the number of replicas is {count}; expected 1 to {MOST_REPLICAS}.")
        if self._axes is not None and count != self._axes.count:
            raise ValueError(
                f"Ir: the number of replicas is {count}, and the axes {self._axes} have {self._axes.count}. Leave it "
                "to the axes, or make an Ir with others."
            )
        self.options.enableReplicatedGraphs = count > 1
        self.options.replicatedGraphCount = count

    @property
    def instance_replication_factor(self) -> int:
        """Number of replicas that this process drives."""
        return self.options.instance_replication_factor

    @property
    def adjacent_replicas(self) -> int:
        """Number of replicas with adjacent devices for an IPU, before the devices for the next IPU.

        With 1, the default, all IPUs of a replica are next to each other, within a process or host; with all replicas,
        the stages of a pipeline are as far from each other as can be. The place of `"ipus"` among the axes says it, or
        `poprun` or `popdist.init` for a program of several processes.

        Example:
            >>> popxl.Ir(axes={"data": 2, "stage": "ipus", "tensor": 8}).adjacent_replicas
            8
        """
        instance = launched() if self.options.enableDistributedReplicatedGraphs else None
        if instance is not None:
            return instance.adjacent
        return (None if self._axes is None else self._axes.adjacent) or 1

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the named axes of replicas, by name, the outermost first; empty without names."""
        return {} if self._axes is None else dict(self._axes.sizes)  # without that of the IPUs

    @property
    def named_axes(self) -> Axes | None:
        """Named replica axes with lookup methods; `None` without names."""
        return self._axes

    def checked_axes(self, what: str) -> Axes | None:
        """Named axes, if any. Raises `ValueError` after changes of the replica count."""
        if self._axes is not None and self._axes.count != self.replication_factor:
            raise ValueError(
                f"{what}: the Ir has {self.replication_factor} replicas, and its axes {self._axes} have "
                f"{self._axes.count}. Make the Ir with axes of as many replicas as there are."
            )
        return self._axes

    # Graphs ---------------------------------------------------------------------------------------------------------

    def create_graph(self, fn: Callable[..., Any] | Module, *args: Any, **kwargs: Any) -> Graph:
        """Build a graph from the ops created by `fn`.

        Tensors and specs among the arguments (also in lists and tuples made only of them) become graph inputs, which
        `fn` gets in their place; everything else is passed through. The inputs come in the order of the parameters of
        `fn`, then those that `fn` makes with `popxl.graph_input`. What `fn` returns (`None`, a tensor, or an iterable
        of tensors) becomes the outputs. An input is by reference where its parameter is annotated
        `popxl.TensorByRef`.

        Args:
            fn: a function, a method, or a `popxl.Module`, whose `build` is used.
            *args, **kwargs: arguments for `fn`. Of a tensor only the spec matters.

        Raises:
            TypeError: if `fn` is not such a callable, or a container mixes tensors with other things.
            ValueError: if the arguments do not fit the signature, or `fn` returns something else, or uses a tensor
                of another graph.

        Example:
            >>> def linear(x, w, bias: bool):
            ...     return x @ w + 1.0 if bias else x @ w
            >>> graph = ir.create_graph(linear, x, w, bias=True)
            >>> (y,) = ops.call(graph, x, w)
        """
        graph = self._add_graph(f"{graph_name(fn)}_subgraph({self._next('subgraph_numbers')})")
        try:
            build_graph(graph, fn, args, kwargs)
        except BaseException:
            self.remove_graph(graph)
            raise
        return graph

    def create_empty_graph(self, name: str | None = None) -> Graph:
        """A graph without inputs, ops and outputs. Enter it with `with` and fill it."""
        if name is not None:
            check_type(name, str, "The name of a graph", "a string")
        return self._add_graph(f"{name or 'graph'}_subgraph({self._next('subgraph_numbers')})")

    def create_gradient_graph(self, forward: Graph) -> Graph:
        """An empty graph named after the graph whose gradient it will compute."""
        taken = {graph.id for graph in self.graphs}
        names = itertools.chain([f"{forward.id}_bwd"], (f"{forward.id}_bwd_{k}" for k in itertools.count(1)))
        return self._add_graph(next(name for name in names if name not in taken))

    def remove_graph(self, graph: Graph) -> None:
        """Forget a graph that nothing calls, and the calls that it makes."""
        self.graphs.remove(graph)
        for op in graph.ops:
            for callee in op.called_graphs:
                callee.call_sites.remove(op)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """On failure of a `with` block, remove its graphs and buffers, plus outputs and slots added elsewhere."""
        graphs = [(graph, len(graph.outputs)) for graph in self.graphs]
        calls = [(op, len(op.outputs)) for graph in self.graphs for op in graph.call_sites]
        buffers = [(buffer, buffer.entries) for buffer in self.remote_buffers]
        try:
            yield
        except BaseException:
            for graph, count in graphs:
                graph.trim_outputs(count)
            for op, count in calls:
                op.trim_outputs(count)
            for graph in self.graphs[len(graphs) :]:
                self.remove_graph(graph)
            del self.remote_buffers[len(buffers) :]
            for buffer, entries in buffers:
                buffer.entries = entries
            raise

    def _add_graph(self, id: str) -> Graph:
        graph = Graph._make(self, id)
        self.graphs.append(graph)
        return graph

    def next_op_id(self) -> int:
        """A number for a new op."""
        return self._next("op_ids")

    def next_suffix(self) -> int:
        """A number to make a taken name unique."""
        return self._next("suffixes")

    def _next(self, counter: str) -> int:
        number = self.counters[counter]
        self.counters[counter] = number + 1
        return number

    # Streams and replicas -------------------------------------------------------------------------------------------

    def get_all_h2d_streams(self) -> set[HostToDeviceStream]:
        """Streams read by ops of the Ir."""
        return {s for s in self._streams() if isinstance(s, HostToDeviceStream)}

    def get_all_d2h_streams(self) -> set[DeviceToHostStream]:
        """Streams written by ops of the Ir."""
        return {s for s in self._streams() if isinstance(s, DeviceToHostStream)}

    def _streams(self) -> set[Any]:
        parts = (part for graph in self.graphs for op in graph.ops for part in op.parts)
        return {part.attributes["stream"] for part in parts if "stream" in part.attributes}

    def replica_grouping(self, stride: int = 1, group_size: int | None = None) -> ReplicaGrouping:
        """Group replicas by size `group_size` and `stride`; by default one group of all.

        Raises:
            ValueError: if the replicas cannot be grouped like this.

        Example:
            >>> popxl.Ir(replication=6).replica_grouping(stride=3, group_size=2).assignment
            [0, 1, 2, 0, 1, 2]
        """
        return constant_grouping(self, stride, group_size)

    def grouping(self, *names: str) -> ReplicaGrouping:
        """Groups by names of axes: replicas that differ along these axes only are together.

        Along one axis, and along axes that follow each other, this is a strided grouping, as `replica_grouping` makes.
        Collectives take no other: so put axes next to each other that are to be summed over together.

        Raises:
            ValueError: if the Ir has no such axes, or an axis is named twice, or none is.

        Example:
            >>> ir = popxl.Ir(axes={"data": 2, "tensor": 3})
            >>> ir.grouping("tensor").assignment, ir.grouping("data").assignment
            ([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2])
            >>> ir.grouping("data", "tensor") == ir.replica_grouping()
            True
        """
        return grouping_along(self, names)

    def replica_grouping_from_assignments(self, assignment: list[int]) -> ReplicaGrouping:
        """Group replicas by group numbers per replica, numbered in order of first appearance.

        Raises:
            ValueError: if groups differ in size, are misnumbered, have one member each, or do not cover all replicas.

        Example:
            >>> popxl.Ir(replication=4).replica_grouping_from_assignments([0, 1, 1, 0]).is_const
            False
        """
        return grouping_from_assignments(self, assignment)

    # Files ----------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the program to a file: graphs, and host values of variables and constants.

        Ops are written by name, so an op of your own has to be declared where the program is loaded. An existing file
        is replaced once the new one is complete. It has a checksum. Options for this machine (`cachePath`,
        `enableEngineCaching`, `logDir`, `dotChecks`) are not written: the loading program sets them.

        Raises:
            PopxlError: if an op has an attribute that cannot be written, or shares its key with another op.

        Example:
            >>> ir.save("program.popxl")
            >>> print(popxl.Ir.load("program.popxl").main_graph)
        """
        writing.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Ir:
        """Load a saved program, with identical printing, differentiation and execution.

        Files of unknown origin may be loaded: nothing in them is run as Python, or names folders, and an invalid
        program is refused. A running program may take any amount of time and memory.

        Raises:
            UnreadableFileError: if the file is damaged, or of another kind, or holds an invalid program: one that calls
                itself, for example, or one with an array of more than 4 TiB. It is a `PopxlError` and a `ValueError`.
            FileNotFoundError: if there is no such file.
            PopxlError: if the program uses an op that is not declared.
        """
        ir = cls()
        reading.load(path, ir)
        return ir

    # Inspection -----------------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Peak memory per replica, with contributing steps, computed without compilation.

        XLA needs less as a rule, because it fuses ops: `session.memory()` says how much.

        Example:
            >>> ir = popxl.Ir()
            >>> with ir.main_graph:
            ...     w = popxl.variable(np.zeros((1024, 1024)), popxl.float32, "w")
            ...     y = ops.gelu(w @ w)
            >>> print(ir.memory())
            Memory of Ir[id=...]
            <BLANKLINE>
                                  bytes
              variables         4.19 MB
              temporaries       8.39 MB
              in all, at most   12.6 MB
            <BLANKLINE>
              Most is in use at step 2 of 2: Gelu. ...
            >>> ir.memory().picture().save("memory.svg")
        """
        return memory_of(self)

    def picture(self) -> Picture:
        """Memory over the schedule, coloured by treatment (kept, recomputed, moved), beside the mesh and its
        collectives by line, computed without compilation.

        Every call is drawn with the steps of the graph that it calls. Values that a recomputing gradient graph makes
        are *recomputed*; results of the forward pass that are live when the gradients begin are *kept*; what comes from
        other chips or from the memory of the host, other than sums, is *moved*.

        Example:
            >>> ir = popxl.Ir(axes={"data": 2, "tensor": 4})
            >>> with ir.main_graph:
            ...     x = popxl.variable(np.zeros((1024, 1024)), popxl.float32, "x")
            ...     y = ops.collectives.replicated_all_reduce(ops.gelu(x @ x), group="tensor")
            >>> "8 chips: data 2 × tensor 4" in ir.picture()
            True
            >>> ir.picture().save("step.svg")
        """
        return overview_of(self)

    def communication(self) -> Communication:
        """Collectives of a run, each with bytes, groups and source line, and copies between IPUs, computed without
        compilation.

        `session.communication()` compares it with the compiled program.

        Example:
            >>> ir = popxl.Ir(replication=4)
            >>> with ir.main_graph:
            ...     x = popxl.variable(np.ones((1024, 1024)), popxl.float32, "x")
            ...     y = ops.collectives.replicated_all_reduce(x, "mean", ir.replica_grouping(stride=2))
            >>> print(ir.communication())
            Communication of Ir[id=...]
            <BLANKLINE>
              4 replicas. Bytes are those of one: what goes in, or comes out, whichever is more.
            <BLANKLINE>
              what         tensor     bytes   groups ...
              all-reduce   x        4.19 MB   of 2, 2 apart ...
        """
        return communication_of(self)

    def dot_checkpoint(self, check: str, save_dir: Path | str | None = None) -> None:
        """Write graphs in Graphviz form, one file each, if the checkpoint `check` is active.

        Active are the names in the option `dotChecks` and in the environment variable `POPART_DOT_CHECKS` (separated
        by colons), in any case; `ALL` activates everything. If neither says anything, this call activates everything.

        Args:
            check: name of the checkpoint, and first part of the file names: `<check>_r.dot` for the main graph,
                `<check>_<k>.dot` for the `k`-th other graph.
            save_dir: folder for this and all later dumps of the Ir; created if it is missing.
        """
        write_checkpoint(self, check, save_dir, explicit=True)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ir):
            raise TypeError(f"An Ir is compared with an Ir only; got {other!r} ({type(other).__name__}).")
        return self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"Ir[id={self.id}]"

    def __str__(self) -> str:
        axes = [] if self._axes is None else [f"replicas: {self._axes}"]
        return "\n\n".join([*axes, *(definition(graph) for graph in self.graphs)])

    def _repr_html_(self) -> str:
        return self.main_graph._repr_html_()
