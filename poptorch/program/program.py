"""`Program`: a captured model as an `Ir`, with its inputs, outputs and state.

    main graph                  load the rows of a run; store the results
      device iteration × D        reduce gradients over replicas; step of the optimiser
        micro-batch × G             take the rows of a micro-batch; forward graph; its gradient graph; accumulate

Loops of one turn are left out. What a turn changes it has by reference: parameters, buffers, the state of the
optimiser, the results kept so far. The model itself is one graph, and so is its gradient.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

import popxl
from poptorch.base.logging_ import logger
from poptorch.capture.losses import final_loss, warn_about_other_loss
from poptorch.capture.model import Captured
from poptorch.capture.outline import outlined
from poptorch.capture.trace import Value
from poptorch.enums import MeanReductionStrategy, OutputMode, ReductionType
from poptorch.errors import createPoptorchError
from poptorch.lowering import Emission
from poptorch.lowering.emission import spec_of
from poptorch.lowering.operands import cast_like
from poptorch.options import Options
from poptorch.placement.strategies import _IPhasedExecution
from poptorch.program.batching import Batching
from poptorch.program.passes import Given, Passes, Phases, Weight
from poptorch.program.recomputation import Recomputation
from poptorch.program.storage import Storage, Stored
from poptorch.program.updates import Update
from poptorch.settings.locations import is_off_chip
from popxl import ops
from popxl.extend.graphs import leading_to
from popxl.extend.memory import asked_memory
from popxl.tensor import Variable
from popxl.transforms import GradGraphInfo
from popxl_addons.rts import gather_replica_sharded_tensor, reduce_replica_sharded_tensor
from popxl_addons.transforms.planned_gradients import PlannedGradients
from popxl_addons.transforms.recomputation import recompute_activations

Tensors = dict[str, popxl.Tensor]
"""What a graph works with, by name: those of parameters and buffers are their own, those of inputs begin with a slash,
and all others with two."""

RANDOM, TURN, VALUES, LARGEST, SLOT = "//random", "//turn", "//values", "//largest", "//number"

GRADIENT, UPDATED = "Gradient___", "UpdatedVar___"
"""What the names of gradients and of updated parameters begin with."""


@dataclass(frozen=True)
class Returned:
    """A program result.

    Attributes:
        value: what is returned of each micro-batch; or the name of a tensor, one of `Program.names`.
        mode, period: of which micro-batches; of updated parameters, of which device iterations.
    """

    value: Value | str
    mode: OutputMode
    period: int = 1


@dataclass
class _Model:
    """Graph of a model.

    Attributes:
        graph: the graph.
        placed: whether its ops are on the IPUs of their blocks.
        inputs: its inputs, by what they are in `Tensors`.
        emission: knows which of its tensors each value is.
        anchored: its outputs that are asked for by name.
    """

    graph: popxl.Graph
    placed: bool = False
    inputs: Tensors = field(default_factory=dict)
    emission: Emission = field(init=False)
    anchored: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.emission = Emission(lambda: self.input(RANDOM, popxl.TensorSpec((2,), popxl.uint32)), self.placed)

    def input(self, key: str, spec: popxl.TensorSpec) -> popxl.Tensor:
        """Get or create a graph input."""
        if key not in self.inputs:
            with self.graph:
                self.inputs[key] = popxl.graph_input(spec.shape, spec.dtype, key.lstrip("/"))
        return self.inputs[key]


class Program:
    """Program of a captured model.

    Args:
        ir: an empty Ir, of whose replicas this process has as many as `batching` says.
        captured: the model.
        leaves: names of its inputs.
        host: values of its parameters and buffers by name, as from `poptorch.run.weight_values.read_host_values`.
        batching: how the rows of a call are dealt.
        options: the options.
        returned: the results.
        update: the optimiser, for training.
        count: how many numbers of it are variable.
        groupings: of parameters that have a row for each group of replicas, by name.
        seed: what random numbers begin with.
        name: name of the forward graph.

    Attributes:
        ir: the program.
        loss: the value of the loss, in training.
        inputs: by number of an input, its stream; inputs that are not used have none.
        outputs: a stream for each of `returned`.
        variables: the variables of parameters and buffers, by name; tied ones are one. What is not used has none.
        written: the values that buffers end up with, by name, of those that the model overwrites. With several replicas
            each has its own.
        counted: a stream for each number that the host computes from those that `forward` changes.
        numbers: a stream for the numbers of the optimiser, if it has any that change.
        state: the variables of its state, by name.
        random: the variable with the state of random numbers, if there are any.
        names: of the tensors that may be returned: parameters, inputs, `"loss"`, those of the model's graph, and in
            training `"Gradient___<parameter>"`, of a micro-batch and a replica, and `"UpdatedVar___<parameter>"`.

    Raises:
        poptorch.Error: if there is not exactly one loss, in training; if something cannot be lowered; if buffers that
            are overwritten would have to be the same on several replicas; for a result whose name no tensor has.
    """

    def __init__(
        self,
        ir: popxl.Ir,
        captured: Captured,
        leaves: Sequence[str],
        host: Mapping[str, np.ndarray],
        batching: Batching,
        options: Options,
        returned: Sequence[Returned],
        update: Update | None = None,
        count: int = 0,
        groupings: Mapping[str, popxl.ReplicaGrouping] | None = None,
        seed: int = 0,
        name: str = "model",
    ) -> None:
        self.ir = ir
        self.loss = final_loss(captured.trace) if update is not None else None
        if self.loss is not None:
            warn_about_other_loss(captured.trace, self.loss)
        self.inputs: dict[int, popxl.HostToDeviceStream] = {}
        self.outputs: list[popxl.DeviceToHostStream] = []
        self.variables: dict[str, Variable] = {}
        self.state: dict[str, Variable] = {}
        self.numbers: popxl.HostToDeviceStream | None = None
        self.random: Variable | None = None
        self._captured, self._leaves, self._returned = captured, list(leaves), list(returned)
        self._batching, self._options, self._update = batching, options, update
        self.written = {name: value for name, value in captured.written.items() if name in host}
        self.counted: list[popxl.HostToDeviceStream] = []
        self._groupings = dict(groupings or {})
        self._check_buffers()
        self._check_ops()
        self._storage = Storage(ir)
        self._weights: dict[str, Stored] = {}
        self._sums: dict[str, Stored] = {}
        with self.ir.main_graph, popxl.in_sequence():
            self._model = self._write_model(name)
            self._gradient = self._differentiated()
            self._name_trained()
            tensors = self._declared(host, count, seed)
            self._passes = self._with_transfers()
            results = self._all_iterations(tensors)
            for number, result in enumerate(results):
                assert result is not None
                stream = popxl.d2h_stream(result.shape, result.dtype, f"output{number}")
                ops.host_store(stream, result)
                self.outputs.append(stream)

    def _check_buffers(self) -> None:
        written = list(self.written)
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

    # The model ------------------------------------------------------------------------------------------------------

    def _write_model(self, name: str) -> _Model:
        captured = self._captured
        wanted = self._outputs()
        nodes = captured.trace.without_unused(wanted)
        recomputation = Recomputation(self._options, nodes) if self._update is not None else None
        if recomputation is not None and (within := self._asked_within()):
            recomputation.leave_out(nodes, within)
            recomputation = None
        if recomputation is not None:
            nodes = recomputation.before_outlining(nodes)
        if self._options._Popart.options.get("enableOutlining", True):
            nodes = outlined(nodes, wanted)
        if recomputation is not None:
            nodes = recomputation.after_outlining(nodes, wanted)
        used = {id(value) for node in nodes for value in node.inputs} | set(map(id, wanted))
        model = _Model(self.ir.create_empty_graph(name), any(node.site.unit for node in nodes))
        inputs = {f"/{leaf}": value for leaf, value in zip(self._leaves, captured.inputs, strict=True)}
        slots = {f"{SLOT}{number}": value for number, value in enumerate(captured.slots)}
        with model.graph:
            for key, value in (inputs | captured.state | slots).items():
                if id(value) in used and id(value) not in model.emission.tensors:
                    model.emission.bind([value], [model.input(key, spec_of(value))])
            model.emission.write(nodes)
            for value in dict.fromkeys(wanted):
                t = model.emission.tensor(value)
                if t in model.graph.inputs or t in model.graph.outputs:
                    t = ops.identity(t)
                    model.emission.bind([value], [t])
                popxl.graph_output(t)
            self._anchor(model)
        return model

    def _asked_within(self) -> list[str]:
        """Names of requested tensors computed by ops inside the model."""
        asked = [r.value for r in self._returned if isinstance(r.value, str)]
        others = {"loss", *self._captured.state, *map(_name_of, self._leaves)}
        return [name for name in asked if name not in others and not name.startswith((GRADIENT, UPDATED))]

    def _anchor(self, model: _Model) -> None:
        """Add graph outputs for model tensors requested by name."""
        named = {_name_of(key): t for key, t in model.inputs.items() if not key.startswith("//")}
        if self.loss is not None:
            named["loss"] = model.emission.tensor(self.loss)
        named |= {t.name: t for op in model.graph.ops for t in op.outputs if t.name not in named}
        self.names = tuple(named)
        for result in self._returned:
            if isinstance(result.value, str) and result.value in named:
                t = named[result.value]
                if t in model.graph.inputs:
                    t = ops.identity(t)
                if t not in model.graph.outputs:
                    popxl.graph_output(t)
                model.anchored[result.value] = t

    def _differentiated(self) -> GradGraphInfo | None:
        """Gradient graph of the loss by all trainable parameters; `None` without any."""
        if self._update is None or self.loss is None:
            return None
        loss = self._model.emission.tensor(self.loss)
        reached = leading_to(self._model.graph, [loss])
        trained = [self._model.inputs.get(name) for name in self._update.names]
        required = [t for t in trained if t in reached]
        if self._update.names and not required:
            logger.warning(
                "Nothing is trained: the loss does not depend on any parameter that the optimizer has, or no gradient "
                "flows to them (`torch.no_grad`, `detach`)."
            )
        if not required:
            return None
        planned = self._planned()
        transform = self._recomputed if planned is None else planned
        info = popxl.transforms.autodiff(self._model.graph, [loss], required, called_graphs_transform=transform)
        return info if planned is None else planned(info)

    def _planned(self) -> PlannedGradients | None:
        """What applies the memory plan of the options, or the one that a tool asks for where these leave it open."""
        plan, asked = self._options.Training.memory_plan, asked_memory()
        has_checkpoints = bool(self._model.emission.recomputed)
        if plan is not None and has_checkpoints:
            raise createPoptorchError(
                "setMemoryPlan: the model has checkpoints, or options that recompute (`autoRecomputation`, a "
                "pipeline), which say what the backward pass keeps. Leave out one of both."
            )
        if plan is None and asked is not None and not has_checkpoints:
            plan = asked.memory
        return None if plan is None else PlannedGradients(self._model.graph, plan)

    def _recomputed(self, gradient: GradGraphInfo) -> GradGraphInfo:
        """Rewrite the gradient of a called graph to recompute activations of recomputed regions."""
        kept = self._model.emission.recomputed.get(gradient.forward_graph)
        return gradient if kept is None else recompute_activations(gradient, kept, ())[0]

    def _name_trained(self) -> None:
        """Add names of gradients and updated parameters to `names`, and check that all requested names exist."""
        trained = self._trained() if self._gradient is not None else ()
        self.names += tuple(prefix + name for prefix in (GRADIENT, UPDATED) for name in trained)
        for result in self._returned:
            if isinstance(result.value, str) and result.value not in self.names:
                near = difflib.get_close_matches(result.value, self.names)
                raise createPoptorchError(
                    f"anchorTensor: there is no tensor {result.value!r} in the program"
                    + (f"; there is {', '.join(near)}." if near else ".")
                    + " `getTensorNames()` lists all."
                )

    # The main graph -------------------------------------------------------------------------------------------------

    def _declared(self, host: Mapping[str, np.ndarray], count: int, seed: int) -> Tensors:
        """Declare streams and variables: the working tensors of all loops."""
        tensors = self._loaded() | self._on_device(host)
        if self._update is not None:
            trained = self._trained() if self._gradient is not None else {}
            locations = self._options.TensorLocations
            keep = partial(self._storage.variable, location=locations.optimizer_location)
            self.state = self._update.create_state(trained, keep)
            tensors |= {f"//{name}": s.held for name, s in self._update.stored.items() if s.held is not None}
            if self._batching.gradient_accumulation > 1:
                self._sums = {
                    name: self._storage.accumulator(
                        popxl.TensorSpec(t.shape, self._summed_in(t)),
                        self._groupings.get(name),
                        locations.accumulator_location,
                    )
                    for name, t in trained.items()
                }
            if count:
                self.numbers = popxl.h2d_stream((count,), popxl.float32, "optimizer")
                tensors[VALUES] = ops.host_load(self.numbers, "optimizer")
                if self._replicas > 1:
                    tensors[VALUES] = ops.collectives.assert_replicated(tensors[VALUES])
        if RANDOM in self._model.inputs:
            seeds = popxl.create_seeds(seed, replicas=self._replicas)
            own = self._each_its_own
            self.random = tensors[RANDOM] = popxl.variable(seeds, popxl.uint32, "random", replica_grouping=own)
        if self._batching.micro_batches > 1:
            tensors[TURN] = ops.init((1,), popxl.int32, "turn", "zero")
            for number, result in enumerate(self._returned):
                spec = self.spec(result)
                shape = spec.shape if result.mode in _SINGLE else (self.count(result), *spec.shape)
                tensors[f"//output{number}"] = ops.init(shape, spec.dtype, f"output{number}", "zero")
        return tensors

    @property
    def _each_its_own(self) -> popxl.ReplicaGrouping | None:
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
                self.inputs[number] = popxl.h2d_stream(shape, spec.dtype, leaf)
                tensors[f"/{leaf}"] = ops.host_load(self.inputs[number], leaf)
        for number, value in enumerate(self._captured.slots):
            key, shape = f"{SLOT}{number}", (micro_batches,) if micro_batches > 1 else ()
            self.counted.append(popxl.h2d_stream(shape, spec_of(value).dtype, key.lstrip("/")))
            tensors[key] = ops.host_load(self.counted[-1], key.lstrip("/"))
        return tensors

    def _on_device(self, host: Mapping[str, np.ndarray]) -> Tensors:
        """Variables initialised from parameters and buffers, limited to used or overwritten tensors. Returns what the
        main graph holds of them.
        """
        each_its_own, location = self._each_its_own, self._options.TensorLocations.weight_location
        leaves = self._phases is not None and self._phases.leave
        for name, data in host.items():
            if name in self._model.inputs or name in self.written:
                grouping = self._groupings.get(name)
                if name in self.written:
                    if each_its_own is not None:
                        grouping, data = each_its_own, np.broadcast_to(data, (self._replicas, *data.shape))
                    v = popxl.variable(data, name=name, replica_grouping=grouping)
                    self._weights[name] = Stored(v.spec, v, v)
                else:
                    self._weights[name] = self._storage.variable(name, data, grouping, location, leaves)
        self.variables = {name: s.variable for name, s in self._weights.items() if s.variable is not None}
        return {name: s.held for name, s in self._weights.items() if s.held is not None}

    @cached_property
    def _phases(self) -> Phases | None:
        strategy = self._options.execution_strategy
        if not isinstance(strategy, _IPhasedExecution):
            return None
        return Phases(self._model.emission.phases, strategy.liveness, strategy.separate_backward_phase)

    def _with_transfers(self) -> Passes:
        """The passes of a micro-batch, with transfers of what the options keep elsewhere."""
        weights = {
            self._model.inputs[name]: Weight(name, stored)
            for name, stored in self._weights.items()
            if not stored.is_plain and name in self._model.inputs
        }
        accumulated: defaultdict[popxl.Tensor, list[Any]] = defaultdict(list)
        if self._gradient is not None:
            by_parameter = dict(zip(self._gradient.outputs, self._gradient.graph.outputs, strict=True))
            for name, t in self._trained().items():
                if name in self._sums and self._sums[name].buffer is not None:
                    accumulated[by_parameter[t]].append(partial(self._accumulate_off_chip, name))
        return Passes(self._model.graph, self._gradient, weights, self._leaving(), accumulated, self._phases)

    def _leaving(self) -> list[popxl.Tensor]:
        """Activations that leave the device until the backward pass reads them."""
        if self._gradient is None:
            return []
        phases, location = self._phases, self._options.TensorLocations.activation_location
        wanted = {*map(self._model.emission.tensor, self._outputs()), *self._model.anchored.values()}
        read = [e.fwd_tensor for e in self._gradient.expected_inputs if e.is_activation]
        return [
            t
            for t in read
            if t.producer is not None
            and t not in wanted
            and not (phases is not None and phases.of.get(t.producer) == phases.shared)
            and is_off_chip(location, t.nelms, phases is not None and phases.leave)
        ]

    def _all_iterations(self, tensors: Tensors) -> Sequence[popxl.Tensor | None]:
        """Loop over device iterations; returns the results."""
        if self._batching.micro_batches == 1:
            return self._device_iteration(tensors)
        self._loop(self._batching.device_iterations, "device_iteration", self._device_iteration, tensors)
        return [tensors[f"//output{number}"] for number in range(len(self._returned))]

    def _loop(self, count: int, name: str, turn: Callable[[Tensors], Any], tensors: Tensors) -> None:
        """Run a loop body `count` times on tensors passed by reference."""
        if count == 1:
            turn(tensors)
            return
        graph = self.ir.create_empty_graph(name)
        with graph, popxl.in_sequence():
            own = {k: graph.add_input(t.spec, k.lstrip("/"), by_ref=True) for k, t in tensors.items()}
            turn(own)
        ops.repeat(graph, count, inputs_dict={own[key]: t for key, t in tensors.items()})

    def _device_iteration(self, tensors: Tensors) -> list[popxl.Tensor | None]:
        accumulation = self._batching.gradient_accumulation
        if self._gradient is None or self._update is None:
            if accumulation > 1:
                self._loop(accumulation, "micro_batch", self._micro_batch, tensors)
                return []
            return self._micro_batch(tensors)[0]
        results: list[popxl.Tensor | None] = []
        if accumulation > 1:
            sums: Tensors = {}
            for name, stored in self._sums.items():
                spec = stored.kept
                zeros = ops.init(spec.shape, spec.dtype, f"Accum___{name}", "zero", spec.meta_shape)
                if stored.buffer is None:
                    sums[f"//sum/{name}"] = zeros
                else:
                    stored.store(zeros, None)
            if self._halves:
                sums[LARGEST] = ops.init((), popxl.float32, "largest_gradient", "zero")
            self._loop(accumulation, "micro_batch", self._accumulate, tensors | sums)
            summed = {name: partial(self._summed, name, sums.get(f"//sum/{name}")) for name in self._sums}
            is_lazy = any(stored.buffer is not None for stored in self._sums.values())
            gradients: Mapping[str, popxl.Tensor]
            gradients = _Lazy(summed) if is_lazy else {name: reduce() for name, reduce in summed.items()}
            largest = sums.get(LARGEST)
        else:
            results, made = self._micro_batch(tensors)
            gradients = {name: self._reduced(name, gradient) for name, gradient in made.items()}
            largest = self._largest(made) if self._halves else None
        if largest is not None and self._replicas > 1:
            largest = ops.collectives.replicated_all_reduce(largest, "max")
        state = self._state_on_chip(tensors)
        self._update(tensors, gradients, tensors.get(VALUES), state, largest, self._weights)
        self._return_updated(tensors, results)
        return results

    def _state_on_chip(self, tensors: Tensors) -> Tensors:
        return {name: tensors[f"//{name}"] for name in self.state if f"//{name}" in tensors}

    def _return_updated(self, tensors: Tensors, results: list[popxl.Tensor | None]) -> None:
        """Store updated parameters as results."""
        for number, result in enumerate(self._returned):
            if _is_updated(result):
                name = str(result.value).removeprefix(UPDATED)
                t = self._weights[name].take(tensors.get(name), None)
                if TURN not in tensors:
                    results[number] = t
                    continue
                slot = tensors[TURN]
                if result.mode not in _SINGLE:
                    accumulation = self._batching.gradient_accumulation
                    slot = _iteration_slot(slot, micro_batches=accumulation, period=result.period)
                self._keep(result, t, tensors[f"//output{number}"], slot)

    def count(self, result: Returned) -> int:
        """Number of values of a result per replica."""
        count = self._batching.returned(result.mode, result.period)
        if _is_updated(result) and result.mode not in _SINGLE:  # of each device iteration, there is one
            count //= self._batching.gradient_accumulation
        return count

    def spec(self, result: Returned) -> popxl.TensorSpec:
        """Shape and dtype of one micro-batch's result."""
        if isinstance(result.value, Value):
            return spec_of(result.value)
        if result.value in self._model.anchored:
            t = self._model.anchored[result.value]
        else:
            t = self._model.inputs[result.value.removeprefix(GRADIENT).removeprefix(UPDATED)]
        return popxl.TensorSpec(t.shape, t.dtype)

    def _trained(self) -> dict[str, popxl.Tensor]:
        """Parameters with a gradient, as model inputs."""
        assert self._gradient is not None and self._update is not None
        wanted = set(self._gradient.outputs)
        return {name: t for name in self._update.names if (t := self._model.inputs.get(name)) in wanted}

    @cached_property
    def _halves(self) -> frozenset[str]:
        """Parameters with float16 gradients, for automatic loss scaling; empty without it."""
        if self._update is None or self._gradient is None or not self._update.adjusts:
            return frozenset()
        made_of = {
            op.outputs[0]: op.inputs[0] for op in self._gradient.graph.ops if len(op.inputs) == len(op.outputs) == 1
        }
        outputs = dict(zip(self._gradient.outputs, self._gradient.graph.outputs, strict=True))

        def is_half(t: popxl.Tensor) -> bool:
            while t.dtype != popxl.float16 and t in made_of:  # it may have been cast in the end
                t = made_of[t]
            return t.dtype == popxl.float16

        return frozenset(name for name, t in self._trained().items() if is_half(outputs[t]))

    def _largest(self, gradients: Tensors) -> popxl.Tensor:
        assert self._update is not None
        return self._update.largest({name: t for name, t in gradients.items() if name in self._halves})

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
        made = self._passes.forward(arguments, tensors)
        found: dict[int | str, popxl.Tensor] = {
            id(value): made[self._model.emission.tensor(value)] for value in self._outputs()
        }
        gradients: Tensors = {}
        if self._gradient is not None and self.loss is not None:
            start = self._loss_gradient(found[id(self.loss)], tensors)
            by_parameter = self._passes.backward(start, made, tensors)
            gradients = {name: by_parameter[t] for name, t in self._trained().items()}
        for name, value in self.written.items():
            new = found[id(value)]
            ops.var_updates.copy_var_update_(tensors[name], new)
        found |= {name: made[t] for name, t in self._model.anchored.items()}
        found |= {GRADIENT + name: gradient for name, gradient in gradients.items()}
        results = [found.get(_key(result.value)) for result in self._returned]
        if TURN in tensors:
            for number, (result, t) in enumerate(zip(self._returned, results, strict=True)):
                if t is not None:
                    self._keep(result, t, tensors[f"//output{number}"], self._slot(result, tensors[TURN]))
            ops.add_(tensors[TURN], popxl.constant(1, popxl.int32))
        return results, gradients

    def _outputs(self) -> list[Value]:
        """Values returned by the model graph."""
        loss = [] if self.loss is None else [self.loss]
        results = [r.value for r in self._returned if isinstance(r.value, Value)]
        return [*results, *self.written.values(), *loss]

    def _argument(self, key: str, tensors: Tensors) -> popxl.Tensor:
        """Operand for one model input."""
        if key == RANDOM:
            following, seed = ops.split_random_seed(tensors[RANDOM])
            ops.var_updates.copy_var_update_(tensors[RANDOM], following)
            return seed
        t = tensors[key]
        if TURN in tensors and key.startswith("/"):
            rows = ops.dynamic_slice(t, tensors[TURN], axes=[0], sizes=[1], no_overlap=True)
            return ops.reshape(rows, t.shape[1:])
        return t

    def _slot(self, result: Returned, turn: popxl.Tensor) -> popxl.Tensor:
        """Index of a micro-batch's result among several returned results."""
        if result.mode is not OutputMode.EveryN:
            return turn
        return _slot(turn, micro_batches=self._batching.gradient_accumulation, period=result.period)

    def _keep(self, result: Returned, t: popxl.Tensor, kept: popxl.Tensor, slot: popxl.Tensor) -> None:
        """Store a result in its output tensor: add, overwrite, or write one slot."""
        if result.mode is OutputMode.Sum:
            ops.add_(kept, t)
        elif result.mode is OutputMode.Final:
            ops.var_updates.copy_var_update_(kept, t)
        else:
            ops.dynamic_update_(kept, slot, ops.reshape(t, (1, *t.shape)), axes=[0], sizes=[1], no_overlap=True)

    # Gradients ------------------------------------------------------------------------------------------------------

    def _summed_in(self, parameter: popxl.Tensor) -> popxl.dtype:
        """Accumulation dtype for gradients of a parameter."""
        assert self._update is not None
        return parameter.dtype if parameter.dtype.is_complex else self._update.accumulation_dtype

    def _loss_gradient(self, loss: popxl.Tensor, tensors: Tensors) -> popxl.Tensor:
        """Initial gradient of the loss: the loss scale, for each loss element."""
        assert self._update is not None
        scale = self._update.loss_scale(tensors.get(VALUES), self._state_on_chip(tensors))
        if self._strategy is MeanReductionStrategy.PostAndLoss:
            scale = scale * (1 / self._replicas)
        if not isinstance(scale, popxl.Tensor):
            return popxl.constant(np.full(loss.shape, scale), loss.dtype, "loss_gradient")
        return cast_like(scale, loss.dtype) * popxl.constant(np.ones(loss.shape), loss.dtype)

    @property
    def _strategy(self) -> MeanReductionStrategy | None:
        """Mean reduction strategy; `None` for a sum."""
        training = self._options.Training
        if training.accumulation_and_replication_reduction_type is ReductionType.Sum:
            return None
        return training.mean_accumulation_and_replication_reduction_strategy

    def _accumulate(self, tensors: Tensors) -> None:
        """Run a micro-batch and accumulate its gradients."""
        number = self._number(tensors[TURN])
        _, gradients = self._micro_batch(tensors)
        if LARGEST in tensors:
            largest = ops.maximum(tensors[LARGEST], self._largest(gradients))
            ops.var_updates.copy_var_update_(tensors[LARGEST], largest)
        for name, gradient in gradients.items():
            if self._sums[name].buffer is None:
                self._add_to(name, gradient, number, tensors[f"//sum/{name}"])

    def _accumulate_off_chip(self, name: str, gradient: popxl.Tensor, given: Given) -> None:
        """Accumulate a gradient within the backward pass."""
        with popxl.in_sequence():
            self._add_to(name, gradient, self._number(given(TURN, popxl.TensorSpec((1,), popxl.int32))), None)

    def _number(self, turn: popxl.Tensor) -> popxl.Tensor | None:
        """Number of a micro-batch, where the mean is accumulated."""
        if self._strategy is not MeanReductionStrategy.Running:
            return None
        return _step(turn, micro_batches=self._batching.gradient_accumulation)

    def _add_to(
        self, name: str, gradient: popxl.Tensor, number: popxl.Tensor | None, held: popxl.Tensor | None
    ) -> None:
        """Accumulate a gradient of a micro-batch; of a sharded one, this replica's piece of the sum over replicas."""
        stored = self._sums[name]
        gradient = cast_like(gradient, stored.spec.dtype)
        if stored.group is not None:
            gradient = reduce_replica_sharded_tensor(gradient, "add", stored.group)
        total = stored.load(held)
        if number is None:
            ops.var_updates.accumulate_(total, gradient)
        else:
            ops.var_updates.accumulate_mean_(total, gradient, number)
        stored.store(total, held)

    def _summed(self, name: str, held: popxl.Tensor | None) -> popxl.Tensor:
        """Accumulated gradient of a parameter, reduced over all replicas sharing it."""
        stored = self._sums[name]
        return self._reduced(name, stored.load(held), stored.group)

    def _reduced(self, name: str, gradient: popxl.Tensor, given: popxl.ReplicaGrouping | None = None) -> popxl.Tensor:
        """Gradient of a parameter, reduced over all replicas sharing it; this replica's piece, if the step takes one.

        Args:
            name: of the parameter.
            gradient: of this replica.
            given: where it is the piece of a sum over replicas, these.
        """
        assert self._update is not None
        strategy, accumulation, replicas = self._strategy, self._batching.gradient_accumulation, self._replicas
        divisor = {
            None: 1,
            MeanReductionStrategy.Running: replicas,
            MeanReductionStrategy.Post: accumulation * replicas,
            MeanReductionStrategy.PostAndLoss: accumulation,
        }[strategy]
        pieces, group = self._update.pieces(name, self._weights[name]), self._groupings.get(name)
        if given is not None:
            gradient = gradient if pieces is not None else gather_replica_sharded_tensor(gradient, replica_group=given)
        elif pieces is not None:
            gradient = reduce_replica_sharded_tensor(gradient, "add", pieces)
        elif replicas > 1:
            gradient = ops.collectives.replicated_all_reduce(gradient, "add", group=group)
        return gradient if divisor == 1 else gradient * (1 / divisor)


class _Lazy(Mapping[str, popxl.Tensor]):
    """Tensors whose ops are added to the current graph where the tensors are read."""

    def __init__(self, made: Mapping[str, Callable[[], popxl.Tensor]]) -> None:
        self._made = made

    def __getitem__(self, name: str) -> popxl.Tensor:
        return self._made[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)


def _name_of(key: str) -> str:
    """Public name of a model input: own names for parameters and buffers, `"input..."` otherwise."""
    name = key.removeprefix("/")
    return name if key == name or name.startswith("input") else f"input/{name}"


def _key(value: Value | str) -> int | str:
    return value if isinstance(value, str) else id(value)


def _is_updated(result: Returned) -> bool:
    return isinstance(result.value, str) and result.value.startswith(UPDATED)


def _noise(spec: popxl.TensorSpec, number: int) -> popxl.Tensor:
    """Synthetic input generated on device: normal noise for floats; zeros for other dtypes."""
    if not spec.dtype.is_floating_point:
        return ops.init(spec.shape, spec.dtype, "synthetic", "zero")
    seed = popxl.constant(np.array([number, 0]), popxl.uint32, "synthetic_seed")
    return ops.random_normal(seed, spec.shape, dtype=spec.dtype)


_INFERENCE_ONLY = {name.lower(): name for name in ("poptorch.for_loop", "poptorch.cond", "poptorch.CPU")}
"""Ops that are not differentiated, and what users call them."""

_SINGLE = (OutputMode.Final, OutputMode.Sum)
"""Modes in which a single result is returned of all micro-batches of a replica."""

_slot = popxl.OpKind(
    "ResultSlot",
    lambda turn, *, micro_batches, period: turn // (micro_batches * period) * micro_batches + turn % micro_batches,
    gradient=None,
    key="poptorch.ResultSlot",
)
"""Where the result of a micro-batch goes, if those of every `period`-th iteration are kept: over those before."""

_iteration_slot = popxl.OpKind(
    "IterationSlot",
    lambda turn, *, micro_batches, period: (turn // micro_batches - 1) // period,
    gradient=None,
    key="poptorch.IterationSlot",
)
"""The same for what there is one of in each device iteration, at its end: over those before."""

_step = popxl.OpKind(
    "MicroBatch",
    lambda turn, *, micro_batches: (turn[0] % micro_batches).astype("float32"),
    gradient=None,
    key="poptorch.MicroBatch",
)
"""Number of a micro-batch within its device iteration."""
