"""Serialization of compiled models to files, for execution elsewhere or later without recapture or recompilation.

The file is a container (`popxl.base.container`). Its JSON describes the calls of the program: arguments, results,
options, the optimiser's hyperparameters, the random state. Its blobs are:

    tensors     the numbers of parameters and buffers, and of constants, as safetensors
    session     the program with the values of its variables, as `popxl.Session.save` writes it

Files are read by the version that wrote them. Those of versions before 0.2 are ZIP archives.

All of it is read as data: no Python object is unpickled and nothing is imported, so `poptorch.load` returns a plain
module. Arguments and results may be named tuples, dataclasses and subclasses of dictionaries; they become objects of
their classes if the program has imported these, otherwise of similar ones: see `poptorch.run.serialization`.
Models whose arguments or results hold other objects of your own classes cannot be saved. The session does contain
machine code, which runs when the model is called. Load files only from sources that you trust to run programs.
"""

from __future__ import annotations

import inspect
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, NoReturn

import safetensors
import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict
from torch.utils import _pytree as pytree

import popxl
from poptorch.base.host_numbers import HostNumbers, NumberPath
from poptorch.base.logging_ import logger
from poptorch.base.replica_groups import GroupedParameter, ReplicaGroups
from poptorch.base.structures import structure_of
from poptorch.enums import ConnectionType
from poptorch.errors import createPoptorchError
from poptorch.options import Options
from poptorch.program.batching import Batching
from poptorch.program.program_io import ProgramIO, Result
from poptorch.program.request import ProgramRequest
from poptorch.program.state_layout import STEP
from poptorch.run import weight_values
from poptorch.run.arguments import Signature
from poptorch.run.compiled import Compiled
from poptorch.run.devices import chosen_device
from poptorch.run.host_model import HostModel
from poptorch.run.optimizer_data import OptimizerData
from poptorch.run.saved_options import options_from_data, options_to_data
from poptorch.run.serialization import from_data, to_data
from poptorch.run.trainer import Trainer
from popxl.errors import PopxlError
from popxl.extend.files import pack, replace_file, unpack
from popxl.tensor import Variable

KIND = "poptorch model"
FORMAT = 5

_TENSORS, _SESSION = "tensors", "session"
_ZIP = b"PK\x03\x04"


class _FileModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Stamp(BaseModel):
    """Header fields common to all format versions."""

    format: int
    poptorch: str


class _CallingConvention(_FileModel):
    """A program's calling convention: arguments, results, constants; see `Compiled`.

    Attributes:
        parameters: parameters of `forward`: name, kind and default of each; no default is an empty list, a value a list
            of one.
        args, kwargs: arguments, as data.
        result: result of `forward`, as data.
        constants: numbers of the results that are constants.
        rewritten: numbers of the inputs that are overwritten.
        read: names of the buffers whose numbers are a part of the program.
    """

    parameters: list[tuple[str, int, list[Any]]]
    args: Any
    kwargs: Any
    result: Any
    constants: list[int]
    rewritten: list[int]
    read: list[str]


class _Tensor(_FileModel):
    """Parameter or buffer of a module.

    Attributes:
        of: the name under which its numbers are: of tied ones, the first.
        parameter: whether it is a parameter.
        requires_grad: whether it requires a gradient.
        persistent: whether `state_dict` includes the buffer.
    """

    of: str
    parameter: bool
    requires_grad: bool = False
    persistent: bool = True


class _SavedModel(_FileModel):
    """Saved snapshot of the module and its optimiser."""

    training: bool
    tensors: dict[str, _Tensor]
    optimizer: OptimizerData | None


class _About(_FileModel, _Stamp):
    """The file's JSON header.

    Attributes:
        training: whether the program trains.
        options: the options.
        call: inputs and outputs of a call.
        io: streams and variables, as data: see `_io_to_data`.
        grouped: groups and retrieval mode of the parameters that differ between replicas, as data.
        seed: seed of the random numbers; `None` if their state was not saved.
        optimizer: state of the optimiser when the program was made.
        model: the module; `None` for files without a model.
        counting: counters, with their paths and dtypes, as data.
    """

    training: bool
    options: dict[str, Any]
    call: _CallingConvention
    io: Any
    grouped: Any
    seed: int | None
    optimizer: OptimizerData | None
    model: _SavedModel | None
    counting: Any = None


# Writing --------------------------------------------------------------------------------------------------------------


def save(
    filename: str | os.PathLike[str],
    compiled: Compiled,
    options: Options,
    host: HostModel,
    trainer: Trainer | None,
    export_model: bool,
    save_rng_state: bool,
) -> None:
    """Write a compiled model to a file; see `PoplarExecutor.save`. The module's weights must already be up to date.

    Raises:
        poptorch.Error: if something cannot be saved as data.
    """
    path = Path(filename)
    if path.is_dir():
        path /= "model.poptorch"
        logger.warning("save: %s is a folder; the model is saved as %s.", os.fspath(filename), path)
    call, tensors = _call(compiled)
    model = None
    if export_model:
        own = host.tensors()
        tensors |= {f"weights/{name}": t.detach().contiguous() for name, t in own.items()}
        model = _model(
            host.module, OptimizerData.from_optimizer(trainer.optimizer, own) if trainer is not None else None
        )
    numbers = compiled.counters
    counters = None if numbers is None else [numbers.now, list(map(astuple, numbers.paths)), numbers.dtypes]
    about = _About(
        format=FORMAT,
        poptorch=popxl.__version__,
        training=trainer is not None,
        options=options_to_data(options),
        call=call,
        io=_io_to_data(compiled.io),
        grouped=to_data({name: astuple(each) for name, each in host.grouped.items()}, "grouped"),
        seed=compiled.seed if save_rng_state else None,
        optimizer=trainer.compiled_optimizer if trainer is not None else None,
        model=model,
        counting=to_data(counters, "counting"),
    )
    blobs = {_TENSORS: safetensors.torch.save(tensors), _SESSION: _session(compiled.session)}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, pack(KIND, about.model_dump_json(), blobs))


def _call(compiled: Compiled) -> tuple[_CallingConvention, dict[str, torch.Tensor]]:
    """Describe a program's calling convention, with associated tensor data."""
    signature = compiled.signature
    meta = [torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for leaf in signature.leaves]
    args, kwargs = signature.arguments(meta)
    placeholders = [torch.empty(0, dtype=leaf.dtype, device="meta") for leaf in compiled.structure.leaves()]
    tensors = {f"constants/{i}": t.contiguous() for i, t in compiled.constants.items()}
    tensors |= {f"read/{name}": t.contiguous() for name, t in compiled.read_buffers.items()}
    parameters: list[tuple[str, int, list[Any]]] = []
    for name, parameter in signature.parameters.items():
        default = parameter.default
        if isinstance(default, torch.Tensor):
            tensors[f"defaults/{name}"] = default.detach().contiguous()
        has_default = default is not parameter.empty
        parameters.append((name, int(parameter.kind), [to_data(default, name)] if has_default else []))
    call = _CallingConvention(
        parameters=parameters,
        args=to_data(list(args), "the arguments"),
        kwargs=to_data(kwargs, "the arguments"),
        result=to_data(compiled.structure.rebuild(placeholders, signature.objects(args, kwargs)), "the result"),
        constants=list(compiled.constants),
        rewritten=list(compiled.rewritten),
        read=list(compiled.read_buffers),
    )
    return call, tensors


def _model(module: torch.nn.Module, optimizer: OptimizerData | None) -> _SavedModel:
    first = {id(t): name for name, t in weight_values.tensors_of(module).items()}
    parameters = torch.nn.Module.named_parameters(module, remove_duplicate=False)
    buffers = torch.nn.Module.named_buffers(module, remove_duplicate=False)
    transient = {
        f"{path}.{name}".lstrip(".")
        for path, each in torch.nn.Module.named_modules(module, remove_duplicate=False)
        for name in each._non_persistent_buffers_set
    }
    tensors = {n: _Tensor(of=first[id(p)], parameter=True, requires_grad=p.requires_grad) for n, p in parameters}
    tensors |= {n: _Tensor(of=first[id(b)], parameter=False, persistent=n not in transient) for n, b in buffers}
    return _SavedModel(training=module.training, tensors=tensors, optimizer=optimizer)


def _session(session: popxl.Session) -> bytes:
    """Serialize a session using `popxl.Session.save`."""
    with tempfile.TemporaryDirectory(prefix="poptorch-") as folder:
        path = Path(folder, _SESSION)
        try:
            session.save(path)
        except PopxlError as problem:
            raise createPoptorchError(f"The model cannot be saved: {problem}") from problem
        return path.read_bytes()


# Reading --------------------------------------------------------------------------------------------------------------


def read_model(filename: str | os.PathLike[str]) -> Saved:
    """Read a saved model file.

    Raises:
        poptorch.Error: for a damaged file, or one of another kind.
        AssertionError: for a file of another version.
    """
    name = os.fspath(filename)
    try:
        content = Path(filename).read_bytes()
        if content.startswith(_ZIP):
            raise ValueError("it is of a version before 0.2, if it is a model; compile and save it with this version")
        data, blobs = unpack(KIND, content)
        stamp = _Stamp.model_validate(data)
    except (OSError, ValueError) as problem:
        raise createPoptorchError(f"{name} holds no model that can be read: {problem}") from problem
    ours = FORMAT, popxl.__version__
    assert (stamp.format, stamp.poptorch) == ours, (
        f"{name} was written by version {stamp.poptorch} of poptorch, format {stamp.format}, and this is {ours[1]}, "
        f"format {ours[0]}. Compile and save the model with this version."
    )
    try:
        about = _About.model_validate(data)
        return Saved(name, about, safetensors.torch.load(blobs[_TENSORS]), blobs[_SESSION])
    except (*_WRONG, safetensors.SafetensorError) as problem:
        raise createPoptorchError(f"{name} holds no model that can be read: {problem}") from problem


_WRONG = (ValueError, KeyError, TypeError, AttributeError, AssertionError, RuntimeError)
"""Errors raised for invalid data."""


class Saved:
    """A compiled model loaded from a file.

    Attributes:
        training: whether the program trains.
        grouped: the parameters that differ between replicas.
        has_model: whether the file contains the module.
    """

    def __init__(self, name: str, about: _About, tensors: Mapping[str, torch.Tensor], session: bytes) -> None:
        self.training = about.training
        self.has_model = about.model is not None
        grouped = from_data(about.grouped).items()
        self.grouped = {name: GroupedParameter(ReplicaGroups(*groups), mode) for name, (groups, mode) in grouped}
        self._name, self._about, self._tensors, self._session = name, about, tensors, session
        self._args, self._kwargs = tuple(from_data(about.call.args)), from_data(about.call.kwargs)
        self._result, self._io = from_data(about.call.result), from_data(about.io)
        self._options = options_from_data(about.options)

    def options(self) -> Options:
        """Options adapted for a local device."""
        options = self._options.clone()
        options._set(ipu_version=None, target=None)
        if options.connection_type is ConnectionType.Never:
            options.connectionType(ConnectionType.Always)
        return options

    def module(self) -> torch.nn.Module:
        """Create a plain module with all parameters and buffers, whose `forward` runs on the device only."""
        assert self._about.model is not None
        module = torch.nn.Module()
        weights: dict[str, torch.Tensor] = {}
        for name, each in self._about.model.tensors.items():
            if each.of not in weights:
                t = self._tensors[f"weights/{each.of}"]
                weights[each.of] = torch.nn.Parameter(t, each.requires_grad) if each.parameter else t
            *path, last = name.split(".")
            owner = module
            for path_name in path:
                if path_name not in owner._modules:
                    owner.add_module(path_name, torch.nn.Module())
                owner = owner.get_submodule(path_name)
            if each.parameter:
                owner.register_parameter(last, weights[each.of])  # type: ignore[arg-type]
            else:
                owner.register_buffer(last, weights[each.of], each.persistent)
        module.forward = self._forward()
        return module.train(self._about.model.training)

    def _forward(self) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> NoReturn:
            raise createPoptorchError(
                "A model that `poptorch.load` returned runs on the device only: its code is not in the file. Call the "
                "wrapper; or make the model yourself, and use `loadExecutable`."
            )

        parameters = []
        for name, kind, default in self._about.call.parameters:
            value = [self._tensors.get(f"defaults/{name}", from_data(each)) for each in default]
            given = value[0] if value else inspect.Parameter.empty
            parameters.append(inspect.Parameter(name, inspect._ParameterKind(kind), default=given))
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return forward

    def optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer | None:
        """Recreate the saved optimiser for a module's parameters."""
        assert self._about.model is not None
        data = self._about.model.optimizer
        return None if data is None else data.make(weight_values.tensors_of(module))

    def check(self, host: HostModel, training: bool) -> None:
        """Raise an `Error` for an incompatible model."""
        if training != self.training:
            kinds = {True: "training", False: "inference"}
            raise createPoptorchError(
                f"{self._name} was saved by a model for {kinds[self.training]}, and this one is for {kinds[training]}."
            )
        tensors = host.tensors()
        if missing := [name for name in self._io["variables"] if name not in tensors]:
            raise createPoptorchError(
                f"{self._name} was saved by another model: this one has no {', '.join(missing)}; it has "
                f"{', '.join(tensors) or 'no parameters'}."
            )

    def prepare(self, trainer: Trainer, host: HostModel, options: Options) -> None:
        """Prepare a trainer using the saved optimiser settings."""
        assert self._about.optimizer is not None
        parameters = host.tensors()
        counted_apart = [name for name in parameters if f"{STEP}___{name}" in self._io["state"]]
        trainer.prepare(parameters, options, made_with=self._about.optimizer, counted_apart=counted_apart)

    def compiled(self, host: HostModel, options: Options) -> Compiled:
        """Create the compiled model, for a model whose `forward` has identical parameters."""
        call = self._about.call
        with tempfile.TemporaryDirectory(prefix="poptorch-") as folder:
            path = Path(folder, _SESSION)
            path.write_bytes(self._session)
            try:
                session = popxl.Session.load(path, chosen_device(options), weights_to_host_on_exit=False)
            except (PopxlError, ValueError) as problem:
                raise createPoptorchError(f"{self._name} holds no program that can be run here: {problem}") from problem
        seed = secrets.randbits(31) if self._about.seed is None else self._about.seed
        compiled = Compiled(
            Signature(host.forward, self._args, self._kwargs),
            structure_of(self._result, "result"),
            ProgramRequest(options, Batching.from_options(options, self.training), seed),
            {i: self._tensors[f"constants/{i}"] for i in call.constants},
            call.rewritten,
            _io_within(session, self._io),
            session,
            read={name: self._tensors[f"read/{name}"] for name in call.read},
            counters=_counters(self._about.counting),
        )
        if self._about.seed is None:
            compiled.reseed()
        return compiled


def _counters(data: Any) -> HostNumbers | None:
    """Numbers that the host computes, from a file."""
    if data is None:
        return None
    now, paths, dtypes = from_data(data)
    return HostNumbers(now, [NumberPath(*each) for each in paths], dtypes)


def _io_to_data(io: ProgramIO) -> Any:
    """Serialize streams and variables of a program, each as a tuple of its kind and id."""
    outputs = [[each.stream, list(each.shape), each.count, each.anchor] for each in io.outputs]
    others = {"written": sorted(io.written), "names": list(io.names), "outputs": outputs}
    return to_data(pytree.tree_map(_reference, vars(io) | others), "io")


def _reference(item: Any) -> Any:
    if isinstance(item, Variable):
        return "Variable", item.id
    is_stream = isinstance(item, popxl.HostToDeviceStream | popxl.DeviceToHostStream)
    return (type(item).__name__, item.tensor_id) if is_stream else item


def _io_within(session: popxl.Session, io: Any) -> ProgramIO:
    """Streams and variables of a loaded session that correspond to those of a file."""
    streams = (*session.expected_inputs(), *session.create_host_outputs())
    by_reference = {_reference(item): item for item in (*session.ir.main_graph.variables, *streams)}
    loaded = pytree.tree_map_only(tuple, by_reference.__getitem__, io, is_leaf=lambda leaf: isinstance(leaf, tuple))
    outputs = [Result(stream, tuple(shape), *others) for stream, shape, *others in loaded["outputs"]]
    return ProgramIO(**loaded | {"written": frozenset(loaded["written"]), "outputs": outputs})
