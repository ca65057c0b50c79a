"""`Program`: a captured model as an `Ir`, with its inputs, outputs and state.

    main graph                  load the rows of a run; store the results
      device iteration × D        reduce gradients over replicas; step of the optimiser
        micro-batch × G             take the rows of a micro-batch; forward graph; its gradient graph; accumulate

Loops of one iteration are left out. Tensors changed in an iteration are passed by reference: parameters, buffers, the
state of the optimiser, the results kept so far. The model itself is one graph, and so is its gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import numpy as np

import popxl
from poptorch.capture.losses import final_loss, warn_about_other_loss
from poptorch.capture.model import Captured
from poptorch.capture.trace import Value
from poptorch.enums import MeanReductionStrategy, OutputMode
from poptorch.errors import createPoptorchError
from poptorch.lowering.emission import spec_of
from poptorch.lowering.operands import cast_like
from poptorch.placement.strategies import _IPhasedExecution
from poptorch.program.gradient_sums import GradientSums
from poptorch.program.model_graph import GRADIENT, INDEX, LARGEST, RANDOM, SLOT, UPDATED, VALUES, ModelGraph, Tensors
from poptorch.program.passes import Passes, Phases, Weight
from poptorch.program.program_io import ProgramIO, Result
from poptorch.program.request import ProgramRequest
from poptorch.program.returned import Returned, iteration_slot, result_slot
from poptorch.program.state_layout import LOSS_SCALE_FACTOR
from poptorch.program.storage import Storage, Stored
from poptorch.settings.locations import is_off_chip
from popxl import ops
from popxl.context import get_current_context
from popxl.extend.ops import copied_to_ipu
from popxl_addons.grad_info import activation_inputs


class Program:
    """Program of a captured model.

    Args:
        ir: an empty Ir, of whose replicas this process has as many as the batching of `request` says.
        host: values of its parameters and buffers by name, as from `poptorch.run.weight_values.read_host_values`.

    Attributes:
        ir: the program.
        loss: the value of the loss, in training.
        io: inputs, outputs and variables for the host.

    Raises:
        poptorch.Error: if there is not exactly one loss, in training; if something cannot be lowered; if buffers that
            are overwritten would have to be the same on several replicas; for a result that names no tensor.
    """

    def __init__(
        self,
        ir: popxl.Ir,
        captured: Captured,
        leaves: Sequence[str],
        host: Mapping[str, np.ndarray],
        request: ProgramRequest,
        returned: Sequence[Returned],
    ) -> None:
        options, update = request.options, request.update
        self.ir = ir
        self.loss = final_loss(captured.trace) if update is not None else None
        if self.loss is not None:
            warn_about_other_loss(captured.trace, self.loss)
        self._captured, self._leaves, self._returned = captured, list(leaves), list(returned)
        self._batching, self._options, self._update = request.batching, options, update
        self._updated = {name: value for name, value in captured.updated.items() if name in host}
        self.io = ProgramIO(written=frozenset(self._updated))
        self._groupings = request.groupings
        self._check_buffers()
        self._check_ops()
        self._storage = Storage(ir)
        self._weights: dict[str, Stored] = {}
        self._sums: GradientSums | None = None
        with self.ir.main_graph, popxl.in_sequence():
            requested = [r.value for r in self._returned if isinstance(r.value, str)]
            trained = None if update is None else update.names
            name = options.model_name or ("training" if update is not None else "inference")
            self._model = ModelGraph(
                ir, captured, self._leaves, self._outputs(), requested, self.loss, trained, options, name
            )
            self.io.names = self._model.names
            if update is not None:
                self._sums = GradientSums(request, update, self._replicas, self._weights, self._model.ipus)
            tensors = self._declared(host, request.seed)
            self._passes = self._with_transfers()
            self._store_results(self._all_iterations(tensors))

    def _store_results(self, results: Sequence[popxl.Tensor | None]) -> None:
        """Store the results of a run to streams."""
        for number, (result, t) in enumerate(zip(self._returned, results, strict=True)):
            assert t is not None
            stream = popxl.d2h_stream(t.shape, t.dtype, f"output{number}")
            with self._on_ipu_of(result):
                ops.host_store(stream, t)
            self.io.outputs.append(Result(stream, self._spec(result).shape, self._count(result), result.anchor))

    def _check_buffers(self) -> None:
        written = list(self._updated)
        if written and self._replicas > 1 and self._options.broadcast_buffers:
            raise createPoptorchError(
                "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers becoming "
                "out of sync between replicas, you can disable buffer broadcasting using "
                "poptorch.Options.broadcastBuffers(False). Each replica has a copy of its own then, of which the host "
                f"gets one. The model overwrites {', '.join(map(repr, written))}."
            )

    def _check_ops(self) -> None:
        if self._update is not None:
            for node in self._captured.trace.nodes:
                if node.op in _INFERENCE_ONLY:
                    raise createPoptorchError(
                        f"{_INFERENCE_ONLY[node.op]}() is only supported in inference, and the model is to be trained: "
                        f"{node}."
                    )

    @property
    def _replicas(self) -> int:
        """Number of replicas in all processes; this process feeds and returns rows of its own replicas only."""
        return self.ir.replication_factor

    # The main graph -------------------------------------------------------------------------------------------------

    def _declared(self, host: Mapping[str, np.ndarray], seed: int) -> Tensors:
        """Declare streams and variables: the working tensors of all loops."""
        tensors = self._loaded() | self._on_device(host)
        if self._update is not None and self._sums is not None:
            trained = self._model.trained
            self.io.state = self._update.create_state(trained, self._create_state)
            tensors |= {f"//{name}": s.tensor for name, s in self._update.stored.items() if s.tensor is not None}
            if self._batching.gradient_accumulation > 1:
                self._sums.create_accumulators(trained, self._storage)
            if count := self._update.hyperparameters.count:
                self.io.numbers = popxl.h2d_stream((count,), popxl.float32, "optimizer")
                tensors[VALUES] = ops.host_load(self.io.numbers, "optimizer")
                if self._replicas > 1:
                    tensors[VALUES] = ops.collectives.assert_replicated(tensors[VALUES])
        if RANDOM in self._model.inputs:
            seeds = popxl.create_seeds(seed, replicas=self._replicas)
            own = self._single_replicas
            self.io.random = tensors[RANDOM] = popxl.variable(seeds, popxl.uint32, "random", replica_grouping=own)
        if self._batching.micro_batches > 1:
            tensors[INDEX] = ops.init((1,), popxl.int32, "turn", "zero")
            for number, result in enumerate(self._returned):
                spec = self._spec(result)
                shape = spec.shape if result.is_single else (self._count(result), *spec.shape)
                with self._on_ipu_of(result):
                    tensors[f"//output{number}"] = ops.init(shape, spec.dtype, f"output{number}", "zero")
        return tensors

    def _create_state(self, name: str, value: np.ndarray, grouping: popxl.ReplicaGrouping | None) -> Stored:
        """Allocate state of the optimiser, on the IPU that reads its parameter."""
        _, _, parameter = name.partition("___")
        with get_current_context().on_ipu(self._model.ipus.get(parameter)):
            return self._storage.variable(name, value, grouping, self._options.TensorLocations.optimizer_location)

    @property
    def _single_replicas(self) -> popxl.ReplicaGrouping | None:
        """Replica grouping for per-replica values."""
        return self.ir.replica_grouping(group_size=1) if self._replicas > 1 else None

    def _loaded(self) -> Tensors:
        """Model inputs for all micro-batches."""
        tensors: Tensors = {}
        micro_batches = self._batching.micro_batches
        for number, (leaf, value) in enumerate(zip(self._leaves, self._captured.inputs, strict=True)):
            if f"/{leaf}" in self._model.inputs:
                spec = spec_of(value)
                shape = (micro_batches, *spec.shape) if micro_batches > 1 else spec.shape
                if self._options.synthetic_data:
                    tensors[f"/{leaf}"] = _noise(popxl.TensorSpec(shape, spec.dtype), number)
                    continue
                self.io.inputs[number] = popxl.h2d_stream(shape, spec.dtype, leaf)
                with get_current_context().on_ipu(self._model.ipus.get(f"/{leaf}")):
                    tensors[f"/{leaf}"] = ops.host_load(self.io.inputs[number], leaf)
        for number, value in enumerate(self._captured.slots):
            key, shape = f"{SLOT}{number}", (micro_batches,) if micro_batches > 1 else ()
            self.io.counted.append(popxl.h2d_stream(shape, spec_of(value).dtype, key.lstrip("/")))
            tensors[key] = ops.host_load(self.io.counted[-1], key.lstrip("/"))
        return tensors

    def _on_device(self, host: Mapping[str, np.ndarray]) -> Tensors:
        """Variables initialised from parameters and buffers, limited to used or overwritten tensors. Returns the main
        graph's tensors for them.
        """
        single_replicas, location = self._single_replicas, self._options.TensorLocations.weight_location
        leaves = self._phases.leave
        for name, data in host.items():
            if name in self._model.inputs or name in self._updated:
                grouping = self._groupings.get(name)
                if name in self._updated:
                    if single_replicas is not None:
                        grouping, data = single_replicas, np.broadcast_to(data, (self._replicas, *data.shape))
                    v = popxl.variable(data, name=name, replica_grouping=grouping)
                    self._weights[name] = Stored(v.spec, v, v)
                else:
                    with get_current_context().on_ipu(self._model.ipus.get(name)):
                        self._weights[name] = self._storage.variable(name, data, grouping, location, leaves)
        self.io.variables = {name: s.variable for name, s in self._weights.items() if s.variable is not None}
        return {name: s.tensor for name, s in self._weights.items() if s.tensor is not None}

    @cached_property
    def _phases(self) -> Phases:
        strategy = self._options.execution_strategy
        if not isinstance(strategy, _IPhasedExecution):
            return Phases()
        return Phases(self._model.emission.phases, strategy.liveness, strategy.separate_backward_phase)

    def _with_transfers(self) -> Passes:
        """The passes of a micro-batch, with transfers of what the options keep elsewhere."""
        weights = {
            self._model.inputs[name]: Weight(name, stored, self._model.ipus.get(name))
            for name, stored in self._weights.items()
            if not stored.is_plain and name in self._model.inputs
        }
        accumulated: defaultdict[popxl.Tensor, list[Any]] = defaultdict(list)
        if self._model.gradient is not None and self._sums is not None:
            by_parameter = dict(zip(self._model.gradient.outputs, self._model.gradient.graph.outputs, strict=True))
            for name, t in self._model.trained.items():
                if (stored := self._sums.accumulators.get(name)) is not None and stored.buffer is not None:
                    accumulated[by_parameter[t]].append(partial(self._sums.add_off_chip, name))
        return Passes(self._model.graph, self._model.gradient, weights, self._leaving(), accumulated, self._phases)

    def _leaving(self) -> list[popxl.Tensor]:
        """Activations that leave the device until the backward pass reads them."""
        if self._model.gradient is None:
            return []
        phases, location = self._phases, self._options.TensorLocations.activation_location
        wanted = {*map(self._model.emission.tensor, self._outputs()), *self._model.anchored.values()}
        return [
            t
            for t in activation_inputs(self._model.gradient).values()
            if t.producer is not None
            and t not in wanted
            and not phases.begins_backward(t.producer)
            and is_off_chip(location, t.nelms, phases.leave)
        ]

    def _all_iterations(self, tensors: Tensors) -> Sequence[popxl.Tensor | None]:
        """Loop over device iterations; returns the results."""
        if self._batching.micro_batches == 1:
            return self._device_iteration(tensors)
        self._loop(self._batching.device_iterations, "device_iteration", self._device_iteration, tensors)
        return [tensors[f"//output{number}"] for number in range(len(self._returned))]

    def _loop(self, count: int, name: str, body: Callable[[Tensors], Any], tensors: Tensors) -> None:
        """Run a loop body `count` times on tensors passed by reference."""
        if count == 1:
            body(tensors)
            return
        graph = self.ir.create_empty_graph(name)
        with graph, popxl.in_sequence():
            own = {k: graph.add_input(t.spec, k.lstrip("/"), by_ref=True) for k, t in tensors.items()}
            body(own)
        overlap = self._options.execution_strategy.overlaps_stages and len({*self._model.ipus.values()}) > 1
        ops.repeat(graph, count, inputs_dict={own[key]: t for key, t in tensors.items()}, overlap=overlap)

    def _device_iteration(self, tensors: Tensors) -> list[popxl.Tensor | None]:
        """Add the ops of a device iteration: micro-batches, reduction of gradients, an update. Returns results."""
        accumulation = self._batching.gradient_accumulation
        if self._model.gradient is None or self._update is None or self._sums is None:
            if accumulation > 1:
                self._loop(accumulation, "micro_batch", self._micro_batch, tensors)
                return []
            return self._micro_batch(tensors)[0]
        results: list[popxl.Tensor | None] = []
        if accumulation > 1:
            sums = {f"//sum/{name}": zeros for name, zeros in self._sums.zeros().items()}
            if self._adjusting:
                sums[LARGEST] = ops.init((), popxl.float32, "largest_gradient", "zero")
            # The optimiser's state is not among them: each tensor of it is where its parameter is updated.
            unread = {f"//{name}" for name in self.io.state} - {f"//{LOSS_SCALE_FACTOR}"}
            read = {key: t for key, t in tensors.items() if key not in unread}
            self._loop(accumulation, "micro_batch", self._accumulate, read | sums)
            stored_sums = self._sums.accumulators
            summed = {name: partial(self._sums.total, name, sums.get(f"//sum/{name}")) for name in stored_sums}
            is_lazy = any(stored.buffer is not None for stored in stored_sums.values())
            gradients: Mapping[str, popxl.Tensor]
            gradients = _Lazy(summed) if is_lazy else {name: reduce() for name, reduce in summed.items()}
            largest = sums.get(LARGEST)
        else:
            results, made = self._micro_batch(tensors)
            gradients = {name: self._sums.reduce(name, gradient) for name, gradient in made.items()}
            largest = self._largest(made) if self._adjusting else None
        if largest is not None and self._replicas > 1:
            largest = ops.collectives.replicated_all_reduce(largest, "max")
        state = self._state_on_chip(tensors)
        self._update(tensors, gradients, tensors.get(VALUES), state, largest, self._weights, self._model.ipus)
        self._return_updated(tensors, results)
        return results

    def _state_on_chip(self, tensors: Tensors) -> Tensors:
        return {name: tensors[f"//{name}"] for name in self.io.state if f"//{name}" in tensors}

    def _return_updated(self, tensors: Tensors, results: list[popxl.Tensor | None]) -> None:
        """Store updated parameters as results."""
        for number, result in enumerate(self._returned):
            if (name := result.updated) is not None:
                t = self._weights[name].load_for_update(tensors.get(name), None)
                if INDEX not in tensors:
                    results[number] = t
                    continue
                slot = tensors[INDEX]
                if not result.is_single:
                    accumulation = self._batching.gradient_accumulation
                    slot = iteration_slot(slot, micro_batches=accumulation, period=result.period)
                self._keep(result, t, tensors[f"//output{number}"], slot)

    def _count(self, result: Returned) -> int:
        """Number of values of a result per replica."""
        count = self._batching.returned(result.mode, result.period)
        if result.updated and not result.is_single:  # one value of each device iteration
            count //= self._batching.gradient_accumulation
        return count

    def _spec(self, result: Returned) -> popxl.TensorSpec:
        """Shape and dtype of one micro-batch's result."""
        if isinstance(result.value, Value):
            return spec_of(result.value)
        t = self._tensor(result)
        return popxl.TensorSpec(t.shape, t.dtype)

    def _tensor(self, result: Returned) -> popxl.Tensor:
        """Tensor of the model's graph that a result is, or is the gradient or the updated value of."""
        if isinstance(result.value, Value):
            return self._model.emission.tensor(result.value)
        if result.value in self._model.anchored:
            return self._model.anchored[result.value]
        return self._model.inputs[result.value.removeprefix(GRADIENT).removeprefix(UPDATED)]

    def _on_ipu_of(self, result: Returned) -> AbstractContextManager[Any]:
        """Context in which ops are on the IPU of a result."""
        return get_current_context().on_ipu(self._tensor(result).location[0])

    @property
    def _adjusting(self) -> frozenset[str]:
        """Parameters whose gradients adjust the loss scale."""
        is_automatic = self._update is not None and self._update.adjusts
        return self._model.half_gradients if is_automatic else frozenset()

    def _largest(self, gradients: Tensors) -> popxl.Tensor:
        assert self._update is not None
        return self._update.largest({name: t for name, t in gradients.items() if name in self._adjusting})

    # One micro-batch ------------------------------------------------------------------------------------------------

    def _micro_batch(self, tensors: Tensors) -> tuple[list[popxl.Tensor | None], Tensors]:
        """Run one micro-batch: slice inputs, call the model, store results and written buffers. Returns results (`None`
        if not yet available) and gradients.
        """
        arguments = {
            t: self._argument(key, tensors)
            for key, t in self._model.inputs.items()
            if key not in self._weights or self._weights[key].is_plain
        }
        if INDEX in tensors:  # before the model, so that the next micro-batch may begin while this one is in the model
            index = ops.identity(tensors[INDEX])
            ops.add_(tensors[INDEX], popxl.constant(1, popxl.int32))
            tensors = tensors | {INDEX: index}
        made = self._passes.forward(arguments, tensors)
        values_by_key: dict[int | str, popxl.Tensor] = {
            id(value): made[self._model.emission.tensor(value)] for value in self._outputs()
        }
        gradients: Tensors = {}
        read_later = self._model.read_by_gradient
        early = [name for name in self._updated if self._model.inputs.get(name) not in read_later]
        self._store_buffers(early, values_by_key, tensors)
        if self._model.gradient is not None and self.loss is not None:
            start = self._loss_gradient(values_by_key[id(self.loss)], tensors)
            by_parameter = self._passes.backward(start, made, tensors)
            gradients = {name: by_parameter[t] for name, t in self._model.trained.items()}
        self._store_buffers([name for name in self._updated if name not in early], values_by_key, tensors)
        values_by_key |= {name: made[t] for name, t in self._model.anchored.items()}
        values_by_key |= {GRADIENT + name: gradient for name, gradient in gradients.items()}
        results = [values_by_key.get(result.key) for result in self._returned]
        if INDEX in tensors:
            for number, (result, t) in enumerate(zip(self._returned, results, strict=True)):
                if t is not None:
                    self._keep(result, t, tensors[f"//output{number}"], self._slot(result, tensors[INDEX]))
        return results, gradients

    def _store_buffers(self, names: Iterable[str], values: Mapping[int | str, popxl.Tensor], tensors: Tensors) -> None:
        """Overwrite buffers by new values, on the IPU that reads them."""
        for name in names:
            new = values[id(self._updated[name])]
            ipu = self._model.ipus.get(name, new.location[0])
            with get_current_context().on_ipu(ipu):
                ops.var_updates.copy_var_update_(tensors[name], copied_to_ipu(new, ipu))

    def _outputs(self) -> list[Value]:
        """Values returned by the model graph."""
        loss = [] if self.loss is None else [self.loss]
        results = [r.value for r in self._returned if isinstance(r.value, Value)]
        return [*results, *self._updated.values(), *loss]

    def _argument(self, key: str, tensors: Tensors) -> popxl.Tensor:
        """Operand for one model input."""
        if key == RANDOM:
            following, seed = ops.split_random_seed(tensors[RANDOM])
            ops.var_updates.copy_var_update_(tensors[RANDOM], following)
            return seed
        t = tensors[key]
        if INDEX in tensors and key.startswith("/"):
            with get_current_context().on_ipu(ipu := self._model.ipus.get(key)):
                index = copied_to_ipu(tensors[INDEX], ipu)
                rows = ops.dynamic_slice(t, index, axes=[0], sizes=[1], no_overlap=True)
                return ops.reshape(rows, t.shape[1:])
        return t

    def _slot(self, result: Returned, iteration: popxl.Tensor) -> popxl.Tensor:
        """Index of a micro-batch's result among several returned results."""
        if result.mode is not OutputMode.EveryN:
            return iteration
        return result_slot(iteration, micro_batches=self._batching.gradient_accumulation, period=result.period)

    def _keep(self, result: Returned, t: popxl.Tensor, kept: popxl.Tensor, slot: popxl.Tensor) -> None:
        """Store a result in its output tensor: add, overwrite, or write one slot."""
        with self._on_ipu_of(result):
            ipu, _ = self._tensor(result).location
            t = copied_to_ipu(t, ipu)
            if result.mode is OutputMode.Sum:
                ops.add_(kept, t)
            elif result.mode is OutputMode.Final:
                ops.var_updates.copy_var_update_(kept, t)
            else:
                t, slot = ops.reshape(t, (1, *t.shape)), copied_to_ipu(slot, ipu)
                ops.dynamic_update_(kept, slot, t, axes=[0], sizes=[1], no_overlap=True)

    # Gradients ------------------------------------------------------------------------------------------------------

    def _loss_gradient(self, loss: popxl.Tensor, tensors: Tensors) -> popxl.Tensor:
        """Initial gradient of the loss: the loss scale, for each loss element."""
        assert self._update is not None and self._sums is not None
        scale = self._update.loss_scale(tensors.get(VALUES), self._state_on_chip(tensors))
        if self._sums.strategy is MeanReductionStrategy.PostAndLoss:
            scale = scale * (1 / self._replicas)
        if not isinstance(scale, popxl.Tensor):
            return popxl.constant(np.full(loss.shape, scale), loss.dtype, "loss_gradient")
        with get_current_context().on_ipu(loss.location[0]):
            return cast_like(scale, loss.dtype) * popxl.constant(np.ones(loss.shape), loss.dtype)

    def _accumulate(self, tensors: Tensors) -> None:
        """Run a micro-batch and accumulate its gradients."""
        assert self._sums is not None
        number = self._sums.step_number(tensors[INDEX])
        _, gradients = self._micro_batch(tensors)
        if LARGEST in tensors:
            largest = ops.maximum(tensors[LARGEST], self._largest(gradients))
            ops.var_updates.copy_var_update_(tensors[LARGEST], largest)
        for name, gradient in gradients.items():
            if self._sums.accumulators[name].buffer is None:
                self._sums.add(name, gradient, number, tensors[f"//sum/{name}"])


class _Lazy(Mapping[str, popxl.Tensor]):
    """Tensors whose ops are added to the current graph where the tensors are read."""

    def __init__(self, makers: Mapping[str, Callable[[], popxl.Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> popxl.Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _noise(spec: popxl.TensorSpec, number: int) -> popxl.Tensor:
    """Synthetic input generated on device: normal noise for floats; zeros for other dtypes."""
    if not spec.dtype.is_floating_point:
        return ops.init(spec.shape, spec.dtype, "synthetic", "zero")
    seed = popxl.constant(np.array([number, 0]), popxl.uint32, "synthetic_seed")
    return ops.random_normal(seed, spec.shape, dtype=spec.dtype)


_INFERENCE_ONLY = {name.lower(): name for name in ("poptorch.for_loop", "poptorch.cond", "poptorch.CPU")}
"""Non-differentiable ops, with their names for users."""
