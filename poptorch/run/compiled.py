"""`Compiled`: a compiled model, and its data transfers to and from the device.

It is made from a captured model (`poptorch.run.program_compilation`) or a file (`poptorch.run.saving`). It handles
arrays and tensors, and one structure of arguments. `poptorch.run.weight_sync` knows whether the host or the device has
the current weights, and `poptorch.run.lifecycle` when anything is transferred.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import torch

import popxl
from poptorch.base.dtypes import to_numpy
from poptorch.base.host_numbers import HostNumbers, Number
from poptorch.base.leaves import Structure
from poptorch.base.logging_ import logger
from poptorch.capture.captured_constants import CapturedConstant
from poptorch.capture.host_function import HostFunction
from poptorch.capture.tensor_layout import overwrite
from poptorch.errors import Error, createPoptorchError
from poptorch.program.program_io import ProgramIO
from poptorch.program.request import ProgramRequest
from poptorch.run.arguments import Signature
from poptorch.run.row_layout import RowLayout
from poptorch.run.timings import Times
from popxl.errors import DeviceError, PopxlRuntimeError
from popxl.extend.targets import Outputs
from popxl.fp8_utils import as_array
from popxl.tensor import Variable

Name = TypeVar("Name")


class Compiled:
    """A model compiled for a given argument structure, initially detached from any device. Threads may share it.

    Args:
        constants: numbers of results that the program does not compute, by number of the result.
        rewritten: numbers of the inputs that are overwritten.
        io: inputs, outputs and variables of the program for the host.
        host_functions: functions that the program calls on the host.
        read: buffers whose numbers are a part of the program, with these numbers.
        frozen: tensors of the host whose numbers are a part of the program.
        counters: numbers of the module that `forward` changes; the host computes them.

    Attributes:
        signature, structure: as passed, until more values are found to be carried.
        io, session, counters: as passed.
        read_buffers: those passed as `read`.
        batching, seed: those of the request.
        anchored: the tensors that are anchored, of the last call, by the names that the user gave them.
        times: timestamps of the last call.
        version: number of writes to the variables.
    """

    def __init__(
        self,
        signature: Signature,
        structure: Structure,
        request: ProgramRequest,
        constants: Mapping[int, torch.Tensor],
        rewritten: Sequence[int],
        io: ProgramIO,
        session: popxl.Session,
        host_functions: Iterable[HostFunction] = (),
        read: Mapping[str, torch.Tensor] | None = None,
        frozen: Iterable[CapturedConstant] = (),
        counters: HostNumbers | None = None,
    ) -> None:
        self.signature, self.structure = signature, structure
        self.batching, self.seed = request.batching, request.seed
        self.constants, self.rewritten = dict(constants), tuple(rewritten)
        self.io, self.session = io, session
        self.read_buffers = dict(read or {})
        self.counters = counters
        self.version = 0
        self.anchored: dict[str, torch.Tensor] = {}
        self._checks = request.options.Precision.floating_point_exceptions
        self._is_synthetic = request.options.synthetic_data
        self._frozen = list(frozen)
        self._problems: list[Exception] = []
        functions = list(host_functions)
        self.changed_on_host = {name for function in functions for name in function.changes}
        for function in functions:
            function.problems = self._problems
        self._run = self._run_exclusive if self._checks or functions else session.run
        self._numbers: dict[popxl.HostToDeviceStream, np.ndarray] = {}
        self._run_lock = threading.Lock()
        self._anchors = [result.anchor for result in io.outputs if result.anchor]
        self._count = len(io.outputs) - len(self._anchors) - len(rewritten)
        self._rows = RowLayout(self.batching, signature.leaves, io, self._count)
        self.times = Times(*self._rows.steps)

    # Running --------------------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[torch.Tensor], objects: Sequence[Any] = ()) -> Any:
        """Run the program once on call tensors, as returned by `signature.check`. Returns the result.

        Args:
            objects: objects among the arguments, as returned by `signature.objects`. Their attributes are changed as by
                the model.

        Raises:
            poptorch.Error: for errors of the running program; if a tensor that is overwritten shares its memory with
                another.
            Exception: whatever a function raises that the program calls on the host.
        """
        return self.rebuilt(tensors, self.fetched(tensors), objects)

    def fetched(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the program once. Return all raw outputs, from which `rebuilt` assembles the result."""
        if self._frozen:
            self._warn_of_changed_constants()
        if self.rewritten:
            self._check_apart(tensors)
        requested = perf_counter()
        feeds: dict[popxl.HostToDeviceStream, Any] = self._numbers | self._counter_feeds()
        feeds.update(self._rows.feeds(tensors))
        supplied = ready = perf_counter()
        try:
            fetched = self._zeros(self._run(feeds)) if self._is_synthetic else self._run(feeds)
            results: list[torch.Tensor] = []
            for result in self._rows.results(fetched):
                if not results:
                    ready = perf_counter()
                results.append(result)
        except DeviceError as problem:
            raise Error(str(problem), "popxl_runtime_error") from problem
        # One assignment: other threads assign, too.
        self.times = Times(*self._rows.steps, requested, supplied, ready, perf_counter())
        return results

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the raw outputs of `fetched`."""
        return self._rows.result_shapes

    def _check_apart(self, tensors: Sequence[torch.Tensor]) -> None:
        """Check that overwritten arguments share no memory with other arguments, which would have to change too."""
        for i in self.rewritten:
            for j, other in enumerate(tensors):
                if j != i and np.shares_memory(as_array(tensors[i]), as_array(other)):
                    target, name = self.signature.leaves[i].name, self.signature.leaves[j].name
                    raise createPoptorchError(
                        f"The arguments {target} and {name} share memory, and the model overwrites {target}. In a "
                        f"wrapped model each argument is a tensor of its own, so {name} would not change with it. Give "
                        "it a copy: `tensor.clone()`."
                    )

    def rebuilt(self, tensors: Sequence[torch.Tensor], results: list[torch.Tensor], objects: Sequence[Any]) -> Any:
        """Assemble a call's result from raw program outputs, and write back arguments overwritten by `forward`.

        Args:
            tensors: tensors of the call, as for `run`.
            results: results of `fetched`.
            objects: as for `run`.
        """
        of_model = results
        if len(results) > self._count:
            of_model, others = results[: self._count], results[self._count :]
            self.anchored = dict(zip(self._anchors, others, strict=False))
            self.write_back(tensors, results)
        if self.constants:
            remaining = iter(of_model)
            count = self._count + len(self.constants)
            of_model = [self.constants[i].clone() if i in self.constants else next(remaining) for i in range(count)]
        for t in of_model:
            t.__dict__.update(_OF_A_RESULT)
        return self.structure.rebuild(of_model, objects)

    def write_back(self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Overwrite arguments that `forward` overwrites; see `rebuilt`."""
        with torch.no_grad():
            for i, rows in zip(self.rewritten, results[self._count + len(self._anchors) :], strict=True):
                if tensors[i].shape != rows.shape:  # the `out` of a function, which gives it another
                    tensors[i].data = torch.empty(rows.shape, dtype=tensors[i].dtype)
                overwrite(tensors[i], rows)

    def _zeros(self, outputs: Any) -> dict[popxl.DeviceToHostStream, np.ndarray]:
        """Wait for a run, and return zeros instead of its outputs: reading them would cause a transfer."""
        if isinstance(outputs, Outputs):
            outputs.wait()
        streams = [result.stream for result in self.io.outputs]
        return {s: np.zeros(self.session.host_shape(s), s.dtype.as_numpy()) for s in streams}

    def _warn_of_changed_constants(self) -> None:
        """Warn once per changed host tensor that its change has no effect: the program contains its numbers."""
        changed = [(each, change) for each in self._frozen if (change := each.change())]
        self._frozen = [each for each in self._frozen if all(each is not other for other, _ in changed)]
        for each, change in changed:
            logger.warning(
                "`%s` %s than when the model was compiled, which has no effect: its numbers are a part of the program. "
                "Have the module own it as a buffer (`register_buffer`), or give it to the model as an argument. To "
                "have the program made with what is there now, wrap the model anew.",
                each.text,
                change,
            )

    def _run_exclusive(
        self, feeds: Mapping[popxl.HostToDeviceStream, Any]
    ) -> Mapping[popxl.DeviceToHostStream, np.ndarray]:
        """Run exclusively, collecting errors as well as outputs: the run finishes before another thread's begins."""
        with self._run_lock, self.session.debugging() if self._checks else nullcontext():
            try:
                fetched = self.session.run(feeds)
                outputs = {result.stream: fetched[result.stream] for result in self.io.outputs}
            finally:
                problems = self._problems.copy()
                self._problems.clear()
        if problems:
            raise problems[0]
        return outputs

    # Attaching ------------------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """Whether a device is attached."""
        return self.session.is_attached

    def attach(self, host: Mapping[str, np.ndarray]) -> None:
        """Attach a device, loading given parameter and buffer values."""
        self.write_weights(host)
        self.session.__enter__()

    def close(self) -> None:
        """Release the device permanently."""
        self.session.__exit__(None)

    def detach(self) -> None:
        """Copy variables back to the host, then release the device."""
        if self.is_attached:
            self.session.weights_to_host()
            self.session.__exit__(None)

    # Variables ------------------------------------------------------------------------------------------------------

    def weights(self, names: Container[str] | None = None) -> dict[str, np.ndarray]:
        """Device values of parameters and buffers by name, optionally only the named ones."""
        arrays = self._fetched({n: v for n, v in self.io.variables.items() if names is None or n in names})
        of_each_replica = self.io.written if self.session.ir.replication_factor > 1 else ()
        return {name: array[0] if name in of_each_replica else array for name, array in arrays.items()}

    def write_weights(self, host: Mapping[str, np.ndarray]) -> None:
        """Overwrite parameter and buffer values on the device, only those given.

        Raises:
            poptorch.Error: for a value that the program holds as a constant, if it differs.
        """
        for name, t in self.read_buffers.items():
            if name in host and not np.array_equal(host[name], to_numpy(t), equal_nan=t.is_floating_point()):
                raise createPoptorchError(
                    f"The buffer {name} is not what it was when the model was compiled. `forward` has read its numbers "
                    "then (as `item()` does), so they are a part of the program. Call `destroy()` to compile it anew."
                )
        variables = {name: v for name, v in self.io.variables.items() if name in host}
        for name, v in variables.items():
            shape = host[name].shape
            if v.shape_on_host[len(v.shape_on_host) - len(shape) :] != shape:
                raise createPoptorchError(
                    f"{name} has the shape {list(shape)} on the host and {list(v.shape)} on the device. It must keep "
                    "its shape while the model is compiled; call `destroy()`, and wrap the module anew."
                )
        self._write({v: np.broadcast_to(host[name], v.shape_on_host) for name, v in variables.items()})

    def state(self) -> dict[str, np.ndarray]:
        """The optimiser state by name."""
        return {name: array.copy() for name, array in self._fetched(self.io.state).items()}

    def write_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite optimiser state."""
        self._write({self.io.state[name]: value for name, value in state.items()})

    def write_numbers(self, numbers: np.ndarray) -> None:
        """Set optimiser hyperparameters, effective next run."""
        if self.io.numbers is not None:
            replicas = self.batching.groups.replicas
            self._numbers[self.io.numbers] = np.tile(numbers, (replicas, 1)) if replicas > 1 else numbers

    @property
    def counter_values(self) -> dict[str, Number]:
        """Values of counters that the next run starts with, by module path and name."""
        return {} if self.counters is None else self.counters.now

    def write_counters(self, numbers: Mapping[str, Number]) -> None:
        """Overwrite counters; names that the program lacks are ignored."""
        if self.counters is not None:
            self.counters.now |= {name: numbers[name] for name in self.counters.now.keys() & numbers.keys()}

    def _counter_feeds(self) -> dict[popxl.HostToDeviceStream, np.ndarray]:
        """Counters for a run: all replicas receive the same value per micro-batch."""
        if self.counters is None:
            return {}
        replicas, count = self.batching.groups.replicas, self.batching.micro_batches
        arrays = [array if count > 1 else array[0] for array in self.counters.advance(count)]
        stacked = [np.stack([array] * replicas) if replicas > 1 else array for array in arrays]
        return dict(zip(self.io.counted, stacked, strict=True))

    @property
    def _random(self) -> dict[tuple[str, str], Variable]:
        """Variables with the state of random numbers: of the model's ops, and of stochastic rounding."""
        variables = {("random", ""): self.io.random, ("rounding", ""): self.session.ir.rounding_seed}
        return {key: v for key, v in variables.items() if v is not None}

    @property
    def random_state(self) -> list[int]:
        """The seed, followed by the generator's state words if random numbers are used."""
        found = self._fetched(self._random)
        return [self.seed, *(word for words in found.values() for word in words.ravel().tolist())]

    @random_state.setter
    def random_state(self, state: Sequence[int]) -> None:
        seed, *words = state
        sizes = {v: int(np.prod(v.shape_on_host)) for v in self._random.values()}
        wanted = sum(sizes.values())
        if len(words) != wanted or not all(0 <= word < 2**32 for word in words):
            raise createPoptorchError(
                f"rng_state: the state has {len(words)} words after the seed, {words}; this program has {wanted}, from "
                "0 to 2**32 - 1."
            )
        parts = np.split(np.array(words, np.uint32), np.cumsum([*sizes.values()])[:-1]) if sizes else []
        self._write({v: part.reshape(v.shape_on_host) for v, part in zip(sizes, parts, strict=True)})
        self.seed = seed

    def reseed(self) -> None:
        """Reset the random generator to its seed."""
        if (random := self.io.random) is not None:
            seeds = popxl.create_seeds(self.seed, replicas=self.session.ir.replication_factor)
            self._write({random: seeds.reshape(random.shape_on_host)})

    def persistent_state(self) -> dict[tuple[str, str], np.ndarray]:
        """Persistent state between runs, keyed by kind (weight, state, number or random) and name."""
        counters = {("number", name): np.asarray(number) for name, number in self.counter_values.items()}
        return self._fetched(self._persistent) | counters

    def write_persistent_state(self, values: Mapping[tuple[str, str], np.ndarray]) -> None:
        """Overwrite state carried between runs; entries that the program lacks are ignored.

        A single replica's value is broadcast to all others, except random state: each replica draws its own.
        """
        own = {}
        for key, v in self._persistent.items():
            value, shape = values.get(key), v.shape_on_host
            if value is not None and (value.shape == shape or key[0] != "random"):
                own[v] = np.broadcast_to(value[0] if value.ndim > len(shape) else value, shape)
        self._write(own)
        self.write_counters({name: value.item() for (kind, name), value in values.items() if kind == "number"})

    @property
    def _persistent(self) -> dict[tuple[str, str], Variable]:
        io = self.io
        variables = {("weight", name): v for name, v in io.variables.items()}
        variables |= {("state", name): v for name, v in io.state.items()}
        return variables | self._random

    def _write(self, values: Mapping[Variable, np.ndarray]) -> None:
        self.version += 1
        if self.is_attached:  # all are written, including those that the device has changed
            others = set(self.session.ir.main_graph.variables) - set(values)
            self.session.values_of(others)
        self.session.write_variables_data(values)

    def _fetched(self, variables: Mapping[Name, Variable]) -> dict[Name, np.ndarray]:
        """Fetch variables from the device. Any process can independently fetch variables identical on all replicas."""
        wanted, store = list(variables.values()), self.session.store
        values: Mapping[Any, np.ndarray] | None = None
        if store is not None and self.is_attached:
            values = store.local_values(wanted)
        if values is None:
            try:
                values = self.session.values_of(wanted)
            except PopxlRuntimeError as problem:
                if self.session.program.layout.divided is None:
                    raise
                raise PopxlRuntimeError(
                    f"{problem} No process has all parts of these values, such as those of weights with "
                    "`useReplicatedTensorSharding`: all processes read them together. Call `model.copyWeightsToHost()` "
                    "in each process, and read the weights of the PyTorch model then."
                ) from problem
        return {name: np.asarray(values[v]) for name, v in variables.items()}


def _no_backward(*args: Any, **kwargs: Any) -> None:
    raise createPoptorchError(
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a trainingModel, the "
        "backwards pass is performed automatically when invoking the model. If you're using an inferenceModel, you "
        "should use a trainingModel instead."
    )


def _plain() -> None:
    """Serialize a result as a plain tensor, which `torch.load` always accepts in files and other processes."""


_OF_A_RESULT = {"backward": _no_backward, "__getstate__": _plain}
