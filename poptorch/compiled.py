"""`Compiled`: a model that has been captured, written as a program and compiled; and what goes to and from its device.

It knows arrays and tensors, and one structure of arguments. Who holds the truth about weights, and when anything is
transferred, is decided in `poptorch.executor`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import popxl
from poptorch import weights
from poptorch.ambient import capturing, check_overlapped_io, check_placement
from poptorch.arguments import Batching, Feeder, Signature, Structure, structure_of
from poptorch.capture.recorder import Data
from poptorch.capture.trace import Value
from poptorch.capture.tracer import Captured, capture
from poptorch.enums import OutputMode
from poptorch.errors import createPoptorchError
from poptorch.lowering import has_lowering
from poptorch.options import Options
from poptorch.program import Program, Returned
from poptorch.replica_groups import GroupedParameter
from poptorch.updates import Update

__all__ = ["Compiled"]


class Compiled:
    """A model, compiled for arguments of some structure.

    Args:
        model: what is called: the module, or a function.
        module: the module whose parameters and buffers it uses, if any.
        args, kwargs: arguments as they will come, with the rows of a whole run.
        options: the options.
        update: the optimiser, for training.
        numbers: its variable numbers, at first.
        grouped: the parameters that differ between groups of replicas.
        host: the values of parameters and buffers.
        seed: what random numbers begin with.

    Attributes:
        signature: what arguments have to look like.
        program: the program.
        session: the session that runs it, attached.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        module: torch.nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options,
        *,
        update: Update | None = None,
        numbers: np.ndarray | None = None,
        grouped: Mapping[str, GroupedParameter],
        host: Mapping[str, np.ndarray],
        seed: int,
    ) -> None:
        forward = module.forward if module is not None else model
        self.signature = Signature(forward, args, kwargs)
        self._batching = Batching.of(options, update is not None)
        self._feeder = Feeder(self._batching)
        self._names = [leaf.name for leaf in self.signature.leaves]
        captured = self._captured(model, module, options, update is not None, grouped)
        self._result: Structure = structure_of(captured.result, "result")
        mode, period = options.output_mode, options.output_return_period or 1
        trace = captured.trace
        self._constants = {i: data for i, value in enumerate(trace.outputs) if (data := _constant(value)) is not None}
        returned = [Returned(v, mode, period) for i, v in enumerate(trace.outputs) if i not in self._constants]
        self._rewritten = list(captured.written_inputs)
        returned += [Returned(value, OutputMode.All) for value in captured.written_inputs.values()]
        self._returned = returned
        self.program = Program(
            captured,
            self._names,
            host,
            self._batching,
            options,
            returned,
            update,
            0 if numbers is None else len(numbers),
            {name: each.groups for name, each in grouped.items() if each.groups.count > 1},
            seed,
            options.model_name or ("training" if update is not None else "inference"),
        )
        self._feeds: dict[popxl.HostToDeviceStream, Any] = {}
        if numbers is not None:
            self.write_numbers(numbers)
        self.session = popxl.Session(
            self.program.ir, _device(options), weights_to_host_on_exit=False
        ).__enter__()

    def _captured(
        self,
        model: Callable[..., Any],
        module: torch.nn.Module | None,
        options: Options,
        training: bool,
        grouped: Mapping[str, GroupedParameter],
    ) -> Captured:
        micro_batch = [
            torch.empty(self._batching.micro_batch_shape(leaf.shape, leaf.name), dtype=leaf.dtype)
            for leaf in self.signature.leaves
        ]

        def forward(tensors: list[torch.Tensor]) -> Any:
            args, kwargs = self.signature.arguments(tensors)
            return model(*args, **kwargs)

        with capturing(options.execution_strategy) as ambient:
            captured = capture(
                forward,
                micro_batch,
                module,
                ambient=ambient,
                lowered=has_lowering,
                flatten=lambda result: structure_of(result, "result").tensors(result),
                grouped=[name for name, each in grouped.items()],
                excludes=options.source_location_excludes,
                with_scopes=options.module_namescope_enabled,
            )
        if not captured.trace.nodes:
            raise createPoptorchError("The model does nothing with tensors, so there is nothing to compile.")
        if ambient.overlaps:
            check_overlapped_io(options, options.output_mode)
        options._Popart.check()
        check_placement([node.site for node in captured.trace.nodes], options, training)
        return captured

    # Running --------------------------------------------------------------------------------------------------------

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the program once on the tensors of a call, as `signature.check` returns them. Returns the result."""
        arrays = self._feeder.arrays(tensors, self._names)
        for i, stream in self.program.inputs.items():
            self._feeds[stream] = self._fed(arrays[i])
        fetched = self.session.run(self._feeds)
        results = [
            self._rows(fetched[stream], returned)
            for stream, returned in zip(self.program.outputs, self._returned, strict=True)
        ]
        rewritten = results[len(results) - len(self._rewritten) :]
        for i, rows in zip(self._rewritten, rewritten, strict=True):
            with torch.no_grad():
                tensors[i].copy_(rows.reshape(tensors[i].shape))
        return self._rebuilt(results[: len(results) - len(self._rewritten)])

    @property
    def _both(self) -> bool:
        """Whether arrays have a dimension for micro-batches and one for replicas."""
        return self._batching.micro_batches > 1 and self._batching.groups.replicas > 1

    def _fed(self, array: np.ndarray) -> np.ndarray:
        """Rows as the program takes them: those of a replica together."""
        return array.swapaxes(0, 1) if self._both else array

    def _rows(self, array: np.ndarray, returned: Returned) -> torch.Tensor:
        """A result as a call returns it."""
        shape = returned.value.shape
        leading = array.ndim - len(shape)
        if leading == 2:
            array = array.swapaxes(0, 1)
        return torch.from_numpy(np.array(self._batching.join(array, shape)))

    def _rebuilt(self, results: list[torch.Tensor]) -> Any:
        left = iter(results)
        count = len(results) + len(self._constants)
        every = [self._constants[i].clone() if i in self._constants else next(left) for i in range(count)]
        for t in results:
            t.backward = _no_backward  # type: ignore[assignment, method-assign]
        return self._result.rebuild(every)

    # Variables ------------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, np.ndarray]:
        """The values of parameters and buffers that the device has, by name."""
        found = self._fetched(self.program.variables)
        own = self.program.written if self._batching.groups.replicas > 1 else ()
        return found | {name: found[name][0] for name in own}

    def write_weights(self, host: Mapping[str, np.ndarray]) -> None:
        """Overwrite the device's values of parameters and buffers."""
        variables = self.program.variables
        self._write({v: np.broadcast_to(host[name], v.shape_on_host) for name, v in variables.items() if name in host})

    def state(self) -> dict[str, np.ndarray]:
        """The state of the optimiser, by name."""
        return self._fetched(self.program.state)

    def write_state(self, state: Mapping[str, np.ndarray]) -> None:
        """Overwrite state of the optimiser."""
        self._write({self.program.state[name]: value for name, value in state.items()})

    def write_numbers(self, numbers: np.ndarray) -> None:
        """Give the optimiser other numbers, from the next run on."""
        if self.program.numbers is not None:
            replicas = self._batching.groups.replicas
            self._feeds[self.program.numbers] = np.tile(numbers, (replicas, 1)) if replicas > 1 else numbers

    def _write(self, values: Mapping[popxl.Variable, np.ndarray]) -> None:
        self.session.weights_to_host()  # what is written goes with all the others
        self.session.write_variables_data(values)

    def _fetched(self, variables: Mapping[str, popxl.Variable]) -> dict[str, np.ndarray]:
        found = self.session.get_tensors_data(variables.values())
        return {name: np.asarray(found[v]) for name, v in variables.items()}


def _constant(value: Value) -> torch.Tensor | None:
    """The numbers of a value that a model does not compute."""
    made_by = value.made_by
    while made_by is not None and made_by.op in ("aten.lift_fresh", "aten.detach", "aten.alias"):
        made_by = made_by.inputs[0].made_by
    data = made_by.arguments.get("data") if made_by is not None else None
    return data.tensor if isinstance(data, Data) else None


def _device(options: Options) -> str:
    return "ipu_model" if options.ipu_model else "ipu_hw"


def _no_backward(*args: Any, **kwargs: Any) -> None:
    raise createPoptorchError(
        "`backward` has no meaning for a result of a wrapped model: the backward pass is a part of the program that "
        "`poptorch.trainingModel` makes, and has been carried out with the call."
    )
