"""`GradientSums`: gradients summed over micro-batches and replicas."""

from __future__ import annotations

from collections.abc import Mapping

import popxl
from poptorch.enums import MeanReductionStrategy, ReductionType
from poptorch.lowering.operands import cast_like
from poptorch.program.model_graph import INDEX
from poptorch.program.passes import InputMaker
from poptorch.program.request import ProgramRequest
from poptorch.program.storage import Storage, Stored
from poptorch.program.updates import Update
from popxl import ops
from popxl.extend.ops import copied_to_ipu
from popxl_addons.rts import gather_replica_sharded_tensor, reduce_replica_sharded_tensor


class GradientSums:
    """Sums of gradients over micro-batches and replicas, by name of the parameter. Each is on the parameter's IPU.

    Args:
        ipus: IPU of each parameter.

    Attributes:
        accumulators: storage of the sums; empty without accumulation.
    """

    def __init__(
        self,
        request: ProgramRequest,
        update: Update,
        replicas: int,
        weights: Mapping[str, Stored],
        ipus: Mapping[str, int],
    ) -> None:
        self._update, self._batching, self._options = update, request.batching, request.options
        self._replicas, self._groupings, self._weights, self._ipus = replicas, request.groupings, weights, ipus
        self.accumulators: dict[str, Stored] = {}

    def create_accumulators(self, trained: Mapping[str, popxl.Tensor], storage: Storage) -> None:
        """Create accumulators for parameters with a gradient."""
        location = self._options.TensorLocations.accumulator_location
        self.accumulators = {
            name: storage.accumulator(popxl.TensorSpec(t.shape, self.dtype(t)), self._groupings.get(name), location)
            for name, t in trained.items()
        }

    def zeros(self) -> dict[str, popxl.Tensor]:
        """Set the sums to zero; returns those on chip, in the current graph."""
        on_chip: dict[str, popxl.Tensor] = {}
        for name, stored in self.accumulators.items():
            spec = stored.local_spec
            with popxl.ipu(self._ipus[name]):
                zeros = ops.init(spec.shape, spec.dtype, f"Accum___{name}", "zero", spec.meta_shape)
                if stored.buffer is None:
                    on_chip[name] = zeros
                else:
                    stored.store(zeros, None)
        return on_chip

    def dtype(self, parameter: popxl.Tensor) -> popxl.dtype:
        """Accumulation dtype for gradients of a parameter."""
        return parameter.dtype if parameter.dtype.is_complex else self._update.accumulation_dtype

    @property
    def strategy(self) -> MeanReductionStrategy | None:
        """Mean reduction strategy; `None` for a sum."""
        training = self._options.Training
        if training.accumulation_and_replication_reduction_type is ReductionType.Sum:
            return None
        return training.mean_accumulation_and_replication_reduction_strategy

    def add_off_chip(self, name: str, gradient: popxl.Tensor, given: InputMaker) -> None:
        """Accumulate a gradient within the backward pass."""
        with popxl.in_sequence():
            self.add(name, gradient, self.step_number(given(INDEX, popxl.TensorSpec((1,), popxl.int32))), None)

    def step_number(self, iteration: popxl.Tensor) -> popxl.Tensor | None:
        """Number of a micro-batch, where the mean is accumulated."""
        if self.strategy is not MeanReductionStrategy.Running:
            return None
        return _step(iteration, micro_batches=self._batching.gradient_accumulation)

    def add(self, name: str, gradient: popxl.Tensor, number: popxl.Tensor | None, held: popxl.Tensor | None) -> None:
        """Accumulate a gradient of a micro-batch; of a sharded one, this replica's piece of the sum over replicas."""
        stored = self.accumulators[name]
        with popxl.ipu(self._ipus[name]):
            gradient = cast_like(copied_to_ipu(gradient, self._ipus[name]), stored.spec.dtype)
            if stored.group is not None:
                gradient = reduce_replica_sharded_tensor(gradient, "add", stored.group)
            total = stored.load(held)
            if number is None:
                ops.var_updates.accumulate_(total, gradient)
            else:
                ops.var_updates.accumulate_mean_(total, gradient, copied_to_ipu(number, self._ipus[name]))
            stored.store(total, held)

    def total(self, name: str, held: popxl.Tensor | None) -> popxl.Tensor:
        """Accumulated gradient of a parameter, reduced over all replicas sharing it."""
        stored = self.accumulators[name]
        with popxl.ipu(self._ipus[name]):
            return self.reduce(name, stored.load(held), stored.group)

    def reduce(self, name: str, gradient: popxl.Tensor, given: popxl.ReplicaGrouping | None = None) -> popxl.Tensor:
        """Gradient of a parameter, reduced over all replicas sharing it; this replica's shard, if the step takes one.

        Args:
            given: if it is a shard of a sum over replicas, their grouping.
        """
        strategy, accumulation, replicas = self.strategy, self._batching.gradient_accumulation, self._replicas
        divisor = {
            None: 1,
            MeanReductionStrategy.Running: replicas,
            MeanReductionStrategy.Post: accumulation * replicas,
            MeanReductionStrategy.PostAndLoss: accumulation,
        }[strategy]
        pieces, group = self._update.shard_group(name, self._weights[name]), self._groupings.get(name)
        with popxl.ipu(self._ipus[name]):
            gradient = copied_to_ipu(gradient, self._ipus[name])
            if given is not None and pieces is None:
                gradient = gather_replica_sharded_tensor(gradient, replica_group=given)
            elif given is None and pieces is not None:
                gradient = reduce_replica_sharded_tensor(gradient, "add", pieces)
            elif given is None and replicas > 1:
                gradient = ops.collectives.replicated_all_reduce(gradient, "add", group=group)
            return gradient if divisor == 1 else gradient * (1 / divisor)


_step = popxl.OpKind(
    "MicroBatch",
    lambda iteration, *, micro_batches: (iteration[0] % micro_batches).astype("float32"),
    gradient=None,
    key="poptorch.MicroBatch",
)
"""Number of a micro-batch within its device iteration."""
