"""`TaskSession`: a session with named streams, named state, and checkpoints.

Checkpoints are in `popxl_addons.checkpoint_session`, their file format in `popxl_addons.checkpoint`.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

import popxl
from popxl.errors import MissingStateWarning
from popxl.extend.arguments import check_type
from popxl.extend.files import replace_file
from popxl.tensor import HostScalarTensor, Variable
from popxl_addons import _wandb, array_files, checkpoint, sharded_arrays
from popxl_addons.checkpoint_session import CheckpointSession, check_state
from popxl_addons.checkpoint_session import DataLoader as DataLoader
from popxl_addons.metrics import as_numbers
from popxl_addons.named_tensors import NamedTensorData, NamedTensors
from popxl_addons.state_matching import (
    ReportMissingMethods,
    match_state,
    named_tensors,
)
from popxl_addons.streams import InputStreams, OutputStreams
from popxl_addons.utils import timer

__all__ = ["TaskSession", "write_variables_pb"]


class TaskSession(CheckpointSession):
    """A `popxl.Session` with named streams and state, run counter, saving and loading.

    Args:
        inputs: streams from the host, in order, or by name in a dictionary.
        outputs: streams to the host.
        state: variables to save and load. Constants among them are saved, too, and loading does not change them. The
            seed of stochastic rounding is added, if the program has one.
        max_checkpoints: number of checkpoints of this session to keep; a further one deletes the oldest.
        *args, **kwargs: arguments of `popxl.Session`, by keyword: ``ir``, ``device_desc``, ``weights_to_host_on_exit``.

    Attributes:
        inputs, outputs: the streams, by name and position.
        state: variables to save and load. May be assigned, for example to a subset.
        session_state: JSON-serialisable data that is saved with the state. ``steps`` counts the runs.

    Raises:
        TypeError: for streams in the wrong direction, a `max_checkpoints` that is not an integer, and a `state` of
            anything but variables and constants.
        ValueError: if `max_checkpoints` is less than 1, for a `state` of another program, and as `popxl.Session` does.

    Example:
        >>> import tempfile
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     state = addons.NamedTensors(total=popxl.variable(0.0, name="total"))
        ...     _, stream, x = addons.host_load(0.0, popxl.float32, "x")
        ...     _ = popxl.ops.add_(state.total, x)
        >>> with tempfile.TemporaryDirectory() as folder, TaskSession([stream], [], state, ir=ir) as session:
        ...     for value in (1.0, 2.0, 3.0):
        ...         _ = session.run({session.inputs[0]: value})
        ...     session.save_checkpoint(f"{folder}/after_3")
        ...     session.write_variable_data(state.total, np.float32(0))
        ...     session.load_checkpoint(f"{folder}/after_3", report_missing="error")
        ...     session.get_named_tensors_data().total, session.session_state
        (array(6., dtype=float32), {'steps': 3})
    """

    def __init__(
        self,
        inputs: InputStreams | Iterable[popxl.HostToDeviceStream],
        outputs: OutputStreams | Iterable[popxl.DeviceToHostStream],
        state: NamedTensors,
        max_checkpoints: int = 1,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not isinstance(max_checkpoints, Integral):
            raise TypeError(
                f"TaskSession: `max_checkpoints` is {max_checkpoints!r}, expected a number. What `popxl.Session` takes "
                "is given by name: `TaskSession(inputs, outputs, state, ir=ir)`."
            )
        if max_checkpoints < 1:
            raise ValueError(f"TaskSession: `max_checkpoints` is {max_checkpoints}; expected at least 1.")
        check_state(state)
        with timer("PopXL compilation"):
            super().__init__(*args, **kwargs)
        seed = self.ir.rounding_seed
        if seed is not None and seed not in state.to_dict().values():
            state = NamedTensors.from_dict({**state.to_dict(), seed.name: seed})
        self.state = state
        self.inputs = inputs if isinstance(inputs, InputStreams) else InputStreams.from_streams(inputs)
        self.outputs = outputs if isinstance(outputs, OutputStreams) else OutputStreams.from_streams(outputs)
        self.max_checkpoints = max_checkpoints
        self.session_state: dict[str, Any] = {"steps": 0}

    @classmethod
    def load(cls, *args: Any, **kwargs: Any) -> NoReturn:
        """Unsupported: session files lack state names."""
        raise NotImplementedError(
            "TaskSession.load: the file of a saved session has no names for its state. Load it with "
            "`popxl.Session.load`; or build the program again, make a TaskSession of it, and use `load_checkpoint`."
        )

    # Running

    def run(
        self, inputs: Mapping[popxl.HostToDeviceStream, HostScalarTensor] | None = None, downcast_inputs: bool = True
    ) -> Mapping[popxl.DeviceToHostStream, np.ndarray]:
        """Run the program as `popxl.Session.run` does. Increments ``session_state["steps"]`` first."""
        self.session_state["steps"] = self.session_state.get("steps", 0) + 1
        return super().run(inputs, downcast_inputs)

    def add_session_state_info(self, info: dict[str, Any]) -> None:
        """Add JSON-serialisable data to `session_state`."""
        self.session_state.update(info)

    # State

    def get_named_tensors_data(self) -> NamedTensorData:
        """Values of the state by name, fetched in one transfer.

        A variable with several groups of replicas has a leading dimension for them. The arrays change with the host
        copies of the variables; copy them to keep them.
        """
        named = named_tensors(self.state)
        data = self.values_of(named.values())
        return NamedTensorData.from_dict({name: data[t] for name, t in named.items()})

    def load_from_session(self, src: TaskSession, report_missing: ReportMissingMethods = "warn") -> None:
        """Copy `src.state` values to equally named variables of this session's state.

        The programs may differ as those of a checkpoint: see `load_checkpoint`.

        Args:
            src: another session.
            report_missing: treatment of names that only one of them has: ``"none"`` ignores them, ``"warn"`` issues a
                `popxl.errors.MissingStateWarning`, ``"error"`` raises.

        Raises:
            ValueError: if no name is in both states, or shapes or dtypes differ; for missing names, if these are
                errors. Nothing is written then.
        """
        check_type(src, TaskSession, "TaskSession.load_from_session: `src`", "another TaskSession")
        # Copies: sessions of one Ir share the host copies of its variables.
        theirs = src._values(named_tensors(src.state), copied=True)
        arrays = {name: array_files.InMemory(a.copy() if array_files.map_file(a) else a) for name, a in theirs.items()}
        what = f"TaskSession.load_from_session, from {src!r}"
        values, missing = match_state(self._readable_state(), what, "Source", arrays, report_missing)
        if missing and report_missing == "warn":
            text = f'{what}: {missing}. These keep their values. To expect that, say `report_missing="none"`.'
            warnings.warn(text, MissingStateWarning, stacklevel=2)
        self._parts.write({v: sharded_arrays.read_all(array) for v, array in values.items()})

    # Weights & Biases

    def wandb_histogram(self, name: str, step: int, data: np.ndarray) -> None:
        """Log an array as ``<name>:histogram``, its finite values, and ``<name>:not_finite``, how many are not.

        `ImportError` if `wandb` is not installed.
        """
        _wandb.log_arrays({name: as_numbers(data)}, step)

    def wandb_variable_histograms(self, step: int = 0) -> None:
        """Log each variable of the main graph as `wandb_histogram` does, under its name."""
        data = self.values_of(self.ir.main_graph.variables)
        _wandb.log_arrays({v.name: as_numbers(array) for v, array in data.items()}, step)


def write_variables_pb(session: popxl.Session, weights: Mapping[popxl.Tensor, np.ndarray]) -> None:
    """Write arrays to equally identified variables of `session`.

    As `Session.write_variables_data`, but the tensors may be those of another program that is built alike.

    Raises:
        PopxlError: if the program has no tensor of an id.
        TypeError, ValueError: as for `Session.write_variables_data`.

    Example:
        >>> def program() -> tuple[popxl.Ir, popxl.Tensor]:
        ...     ir = popxl.Ir()
        ...     with ir.main_graph:
        ...         v = popxl.variable(0.0, name="v")
        ...         _ = v + 1.0
        ...     return ir, v
        >>> (ir, v), (_, same) = program(), program()
        >>> session = popxl.Session(ir)
        >>> write_variables_pb(session, {same: np.array(2, np.float32)})
        >>> session.get_tensor_data(v)
        array(2., dtype=float32)
    """
    check_type(session, popxl.Session, "write_variables_pb: `session`", "a Session")
    check_type(weights, Mapping, "write_variables_pb: `weights`", "a mapping from tensors to arrays")
    for t in weights:
        check_type(t, popxl.Tensor, "write_variables_pb: each key of `weights`", "a tensor")
    main = session.ir.main_graph
    session.write_variables_data({cast(Variable, main.get_tensor(t.id)): data for t, data in weights.items()})


def initialise_memmap_dir_from_checkpoint(
    checkpoint_dir: str | os.PathLike[str], memmap_dir: str | os.PathLike[str]
) -> None:
    """Copy the raw files of a checkpoint, ``model/*.npy``, to a directory for memory-mapped variables.

    Do this before the program is built: its variables then start from these values. Files of the same names are
    replaced.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        UnreadableFileError: if one of the files is damaged.

    Example:
        >>> import tempfile
        >>> def total(folder: str) -> addons.NamedTensors:
        ...     factory = addons.VariableFactory(lambda: np.zeros(3), popxl.float32)
        ...     return addons.NamedVariableFactories(total=factory).init(memmap_dir=folder)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ir = popxl.Ir()
        ...     with ir.main_graph:
        ...         state = total(f"{folder}/maps")
        ...         _ = popxl.ops.add_(state.total, popxl.constant(1.0))
        ...     with TaskSession([], [], state, ir=ir) as session:
        ...         _ = session.run()
        ...         session.save_checkpoint(f"{folder}/step_1")
        ...     initialise_memmap_dir_from_checkpoint(f"{folder}/step_1", f"{folder}/other_maps")
        ...     with popxl.Ir().main_graph:
        ...         total(f"{folder}/other_maps").total.data.tolist()
        [1.0, 1.0, 1.0]
    """
    target = Path(memmap_dir)
    with checkpoint.open_checkpoint(os.fspath(checkpoint_dir)) as directory:
        checkpoint.check_maps(directory)
        target.mkdir(parents=True, exist_ok=True)
        for source in sorted((directory / array_files.MODEL).glob("*.npy")):
            # A program that maps the old file keeps it as it was.
            replace_file(target / source.name, partial(shutil.copyfile, source))
