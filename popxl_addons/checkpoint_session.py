"""`CheckpointSession`: a session that saves its named state to checkpoints, and loads it from them.

All processes of a program take part: each writes and reads the shards of its replicas. The file format is in
`popxl_addons.checkpoint`. Base class of `TaskSession`, whose methods these are for users.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

import popxl
from popxl.errors import PopxlRuntimeError
from popxl.extend.arguments import check_type
from popxl.extend.files import ReplacedError
from popxl.extend.processes import Instance, KeyValueStore, launched
from popxl.extend.sessions import SessionParts
from popxl.tensor import Constant, Variable
from popxl_addons import _wandb, array_files, checkpoint, sharded_arrays
from popxl_addons.dot_tree import DotTree, check_leaves
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.state_matching import (
    ReportMissingMethods,
    is_saved_as_shards,
    key_differences,
    match_state,
    merged_value,
    named_tensors,
    shard_spec,
)

_log = logging.getLogger(__name__)

_ATTEMPTS = 10
"""Maximum number of attempts to read a checkpoint that other processes keep replacing."""


class DataLoader(Protocol):
    """Data loader protocol with savable position."""

    def save(self, path: str) -> Any:
        """Write the position to a file."""

    def resume(self, filename: str) -> Any:
        """Restore the position from a file."""


class CheckpointSession(popxl.Session):
    """A `popxl.Session` with named state, a data loader, and checkpoints of both.

    Attributes:
        state: variables to save and load. May be assigned, for example to a subset.
        session_state: JSON-serialisable data that is saved with the state.
        max_checkpoints: number of checkpoints of this session to keep.
    """

    session_state: dict[str, Any]
    max_checkpoints: int
    _dataloader: DataLoader | None = None

    @property
    def _parts(self) -> SessionParts:
        return SessionParts(self)

    @property
    def state(self) -> NamedTensors:
        """Variables to save and load, by name. May be assigned.

        `TypeError` for anything but `NamedTensors`, and for leaves that are neither variables nor constants;
        `ValueError` for variables of another program.
        """
        return self._state

    @state.setter
    def state(self, state: NamedTensors) -> None:
        check_state(state)
        for t in named_tensors(state).values():
            self._parts.check_own("state", t)
        self._state = state
        self._writer = checkpoint.Writer(self)

    @property
    def dataloader(self) -> DataLoader | None:
        """Data loader whose position checkpoints include; `None` with warning if absent.

        `ValueError` on assigning an object without the methods ``save(path)`` and ``resume(filename)``.
        """
        if self._dataloader is None:
            _log.warning("TaskSession.dataloader: no data loader has been assigned to this session.")
        return self._dataloader

    @dataloader.setter
    def dataloader(self, dataloader: DataLoader) -> None:
        if missing := [name for name in ("save", "resume") if not callable(getattr(dataloader, name, None))]:
            raise ValueError(
                f"TaskSession.dataloader: the {type(dataloader).__name__} has no method {missing}; expected "
                "`save(path)`, which writes its position to a file, and `resume(filename)`, which goes there."
            )
        self._dataloader = dataloader

    # Saving

    def save_checkpoint(
        self, checkpoint_dir: str | os.PathLike[str], format: array_files.Format = "npz", wait: bool = True
    ) -> None:
        """Write state, `session_state` and the data loader's position to a directory.

        The directory is replaced when everything has been written: an interruption at any moment leaves the old
        checkpoint or the new one. In an existing directory the files of a checkpoint are replaced, and others stay.
        Then the oldest checkpoint that this session has written is deleted, if there are now more than
        `max_checkpoints`; so the disk needs room for one more. The data loader also writes to the new directory, which
        has a temporary name until then.

        Values of sharded variables are assembled before they are read: also those that groups of replicas divide, if
        the variable has a `group_axis`. With `wait=False` they are copied, and so are memory maps and the position of
        the data loader; a thread does the rest while the session continues. The next checkpoint, leaving the ``with``
        block and the end of the process wait for it, and so does `wait_for_checkpoint`. They raise errors of the
        thread. At the end of the process errors are only logged.

        If several processes run the program, all have to call this, with a directory that all reach. Each writes the
        parts of values that its replicas hold; of shared values, only the first of these replicas writes. No process
        needs memory for all values. The first process writes `session_state`, constants and memory maps; and last, when
        all have reported that their parts are written, an index. Only this process then knows that the checkpoint is
        complete: to read it at once, wait for that (``session.wait_for_checkpoint(); popdist.synchronize()``). An
        artifact is written by the first process alone.

        Args:
            checkpoint_dir: a directory, ``~`` for the user's home; or ``wandb://<name>`` for an artifact of the type
                ``checkpoints`` of the active Weights & Biases run.
            format: ``"npz"``, a NumPy archive for each name; or ``"safetensors"``, one file for all. Memory-mapped
                variables are copied as raw files in both. With either come digests, in ``checksums.json``: delete that
                file if you change the others by hand.
            wait: whether to return after everything is written.

        Raises:
            OSError: for errors of the file system, of this checkpoint or of the one before.
            PopxlRuntimeError: if another process could not write its part, of this checkpoint or of the one before.
            TypeError: if `session_state` holds something that JSON does not know.
            ValueError: for an unknown `format`, or memory maps that lie in `checkpoint_dir`.
            ImportError: for an artifact, if `wandb` is not installed; `RuntimeError` if no run is active.
        """
        path = _checkpoint_name("save_checkpoint", checkpoint_dir)
        with self._writer.lock:
            self._save(path, format, wait)

    def _save(self, path: str, format: array_files.Format, wait: bool) -> None:
        """See `save_checkpoint`. One thread at a time."""
        self._writer.join()  # there is room for one copy of the values
        is_joint = self._parts.is_divided and not path.startswith(_wandb.SCHEME)
        named = named_tensors(self.state)
        sharded = {name: t for name, t in named.items() if is_joint and is_saved_as_shards(t)}
        arrays = self._values({name: t for name, t in named.items() if name not in sharded}, copied=not wait)
        is_first = (launched() or Instance()).instance_index == 0
        with ExitStack() as stack:
            if is_joint:
                finish = self._start_joint(stack, path, format, arrays, cast("dict[str, Variable]", sharded))
            else:
                self._writer.check()  # here, where all processes have given their values
                if not is_first:
                    return
                _, finish = self._start_checkpoint(stack, path, format, arrays)
            draft = stack.pop_all()
        writer, count = self._writer, self.max_checkpoints  # not the session: a thread would keep it

        def complete() -> None:
            with draft:
                finish()
            if is_first and not path.startswith(_wandb.SCHEME):
                writer.keep(checkpoint.as_path(path), count)

        writer.submit(complete, f"the checkpoint `{path}`", wait)

    def _start_checkpoint(
        self, stack: ExitStack, path: str, format: array_files.Format, arrays: Mapping[str, np.ndarray]
    ) -> tuple[Path, Callable[[], None]]:
        """Draft checkpoint without arrays, with a writer for arrays."""
        self._check_maps_elsewhere(path, arrays)
        directory = stack.enter_context(checkpoint.new_checkpoint(path))
        checkpoint.write_info(directory, self.session_state)
        write = array_files.start_write(directory, arrays, format)
        if self._dataloader is not None:
            self._dataloader.save(str(directory / checkpoint.LOADER))
        return directory, write

    def _start_joint(
        self,
        stack: ExitStack,
        path: str,
        format: array_files.Format,
        arrays: Mapping[str, np.ndarray],
        sharded: Mapping[str, Variable],
    ) -> Callable[[], None]:
        """Distributed `_start_checkpoint`: first process writes `arrays`, every process its shards of `sharded`.

        They meet once, to know the draft. Later each says how its part has ended, and the first one waits for that.
        """
        instance = launched() or Instance()
        number, count = instance.instance_index, instance.num_instances
        with self._joint("TaskSession.save_checkpoint", True, f"`{path}` has not been begun") as (payload, answers):
            self._writer.check()
            if number == 0:
                directory, write = self._start_checkpoint(stack, path, format, arrays)
                payload["directory"] = str(directory)
        share = sharded_arrays.ShardWriter(Path(answers[0]["directory"]), number, count, KeyValueStore())
        with share.reporting_failures():
            shards = self._parts.saved_parts([*sharded.values()])
            own_shards = {name: shards[v] for name, v in sharded.items()}
        if number > 0:
            return partial(share.write, own_shards, format)
        index = sharded_arrays.Index(writers=count, arrays={name: shard_spec(v) for name, v in sharded.items()})

        def finish() -> None:
            try:
                share.write(own_shards, format)
            finally:  # the draft must exist while any process writes to it
                problems = share.problems()
            if problems:
                raise PopxlRuntimeError(
                    f"TaskSession.save_checkpoint: `{path}` is not complete, and is not there. {' '.join(problems)}"
                )
            write()
            sharded_arrays.write_index(share.directory, index)

        return finish

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is complete, if it was saved with `wait=False`.

        Raises its error, if that was not raised before.
        """
        self._writer.wait()

    def __exit__(self, exception: type[BaseException] | None, *others: object) -> None:
        try:
            super().__exit__(exception, *others)
        finally:
            self._writer.join()
        if exception is None:
            self._writer.check()

    def _check_maps_elsewhere(self, path: str, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            file = array_files.map_file(array)
            if file is not None and checkpoint.as_path(path) in file.resolve().parents:
                raise ValueError(
                    f"TaskSession.save_checkpoint: the state `{name}` is mapped to `{file}`, which is in `{path}`, "
                    "the checkpoint that is to be replaced. Save to another directory."
                )

    # Loading

    def load_checkpoint(
        self,
        checkpoint_dir: str | os.PathLike[str],
        report_missing: ReportMissingMethods = "warn",
        skip_memmap: bool = False,
    ) -> None:
        """Read a checkpoint of either format: into the state, the data loader and `session_state`.

        Works in and out of the ``with`` block; variables that are not in the state keep their values. Everything is
        read and compared before anything changes. All of it is of one checkpoint: if another one takes its place
        meanwhile, as a training writes on, that one is read.

        The program may have other replicas, axes, shards and processes than the one that saved the checkpoint. A
        variable with a value for each of several groups of replicas needs a `group_axis` for that: it is then read from
        the whole value, or from a checkpoint with values for other groups.

        If several processes run the program, all of them call this within the ``with`` block, or none does. Each reads
        what its devices hold, to the devices: `get_tensor_data` brings the values to the hosts, as after a run.
        If the checkpoint is replaced meanwhile, this raises; load it again. Outside of the block each reads everything.

        Args:
            checkpoint_dir: as for `save_checkpoint`.
            report_missing: treatment of names of the state, and keys of `session_state`, that are in the checkpoint or
                in the session only: ``"none"`` ignores them, ``"warn"`` logs them, ``"error"`` raises.
            skip_memmap: has no effect. The raw files of memory-mapped variables are never read here: copy them with
                `initialise_memmap_dir_from_checkpoint` before the program is built.

        Raises:
            ValueError: if no name of the state is in the checkpoint, or shapes or dtypes differ; with ``"error"``, for
                all that is missing.
            UnreadableFileError: if files are damaged, or replaced faster than they can be read. It is a `ValueError`.
            PopxlRuntimeError: if another process that reads its part has raised one of these.
            FileNotFoundError: if there is no checkpoint; or, by the data loader, if its file is not in it.
            ImportError: for an artifact, if `wandb` is not installed.
        """
        path = _checkpoint_name("load_checkpoint", checkpoint_dir)
        self._writer.wait()
        is_joint = self._parts.is_divided and self.is_attached
        for _ in range(0 if is_joint else _ATTEMPTS - 1):
            with suppress(ReplacedError):
                return self._load(path, report_missing, is_joint)
        self._load(path, report_missing, is_joint)

    def _load(self, path: str, report_missing: ReportMissingMethods, is_joint: bool) -> None:
        """Load a checkpoint once. `ReplacedError` if another checkpoint replaces it meanwhile."""
        instance = launched() or Instance()
        share = (instance.instance_index, instance.num_instances) if is_joint else (0, 1)
        caller = f"TaskSession.load_checkpoint, from `{path}`"
        with ExitStack() as opened:
            with self._joint(caller, is_joint, "nothing has been loaded") as (payload, _), ExitStack() as stack:
                directory = stack.enter_context(checkpoint.open_checkpoint(path, *share))
                payload["mark"] = checkpoint.checkpoint_id(directory)
                info = checkpoint.read_info(directory)
                differences = key_differences("Checkpoint", info.keys(), self.session_state.keys(), "session_state")
                maps = {file.name for file in (directory / array_files.MODEL).glob("*")}
                arrays = sharded_arrays.arrays_of(directory)
                values, missing = match_state(
                    self._readable_state(), caller, "Checkpoint", arrays, report_missing, differences, maps
                )
                if missing and report_missing == "warn":
                    _log.warning("%s: %s.", caller, missing)
                if self._dataloader is not None:
                    self._dataloader.resume(filename=str(directory / checkpoint.LOADER))
                    if hasattr(self._dataloader, "get_state"):
                        _log.info("The data loader goes on at %s.", self._dataloader.get_state())
                if is_joint:
                    opened.push(stack.pop_all())
                else:
                    host_values = {v: sharded_arrays.read_all(array) for v, array in values.items()}
            if is_joint and values:
                with (
                    self._joint(caller, is_joint, "not all values have been loaded; load them again"),
                    opened.pop_all(),
                ):
                    self._parts.write_parts({v: array.elements for v, array in values.items()})
        if not is_joint:
            self._parts.write(host_values)
        self.session_state = info

    @contextmanager
    def _joint(
        self, caller: str, is_joint: bool, otherwise: str
    ) -> Iterator[tuple[dict[str, str], list[dict[str, Any]]]]:
        """Per-process block in distributed programs, with a barrier at its end: failures in one process, and differing
        `mark` payloads, raise in all.

        The block fills the payload of its process. Those of all are in the list, once the block has ended.

        Args:
            is_joint: whether several processes take part.
            otherwise: description of the state after an error in another process.
        """
        payload: dict[str, str] = {}
        answers: list[dict[str, Any]] = []
        problem: BaseException | None = None
        try:
            yield payload, answers
        except BaseException as raised:  # any error: the other processes wait for the report
            problem = raised
        if is_joint:
            answers += self._parts.barrier(
                caller, payload | {"problem": problem and f"{type(problem).__name__}: {problem}"}
            )
        if problem is not None:
            raise problem
        if problems := [f"Process {i}: {answer['problem']}" for i, answer in enumerate(answers) if answer["problem"]]:
            raise PopxlRuntimeError(f"{caller}: {otherwise}. {' '.join(problems)}")
        if len({answer.get("mark") for answer in answers}) > 1:
            raise ReplacedError(f"{caller}: {otherwise}. Processes found different checkpoints there. Read it again.")

    # Values

    def _readable_state(self) -> dict[str, Variable | Constant]:
        named = named_tensors(self.state)
        for t in named.values():
            self._parts.check_readable(t)
        return named

    def _values(self, named: Mapping[str, Variable | Constant], copied: bool) -> dict[str, np.ndarray]:
        """Whole tensor values by name: memory maps unchanged, other arrays optionally copied."""
        with self._parts.locked():
            data = self.values_of(named.values())
            wholes = {name: merged_value(t, data[t]) for name, t in named.items()}
            if copied:
                for name, t in named.items():
                    if wholes[name] is data[t] and array_files.map_file(data[t]) is None:
                        wholes[name] = data[t].copy()
        return wholes


def _checkpoint_name(method: str, checkpoint_dir: Any) -> str:
    expected = 'the path of a directory, or the name of an artifact, "wandb://<name>"'
    check_type(checkpoint_dir, str | os.PathLike, f"TaskSession.{method}: `checkpoint_dir`", expected)
    return os.fspath(checkpoint_dir)


def check_state(state: Any) -> None:
    """Check that each name of the state can be saved, before the first checkpoint."""
    if not isinstance(state, DotTree):
        raise TypeError(
            f"TaskSession: `state` is a {type(state).__name__}, expected NamedTensors. "
            "Make one of a dictionary with `NamedTensors.from_dict`."
        )
    check_leaves(
        state,
        Variable | Constant,
        "TaskSession: `state`",
        "NamedTensors of variables and constants, as `facts.init()` is",
    )
