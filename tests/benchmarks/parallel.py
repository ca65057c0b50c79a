"""Training on four devices, each with batches of its own, beside `jax.shard_map` by hand.

The network is the first tutorial's; gradients are averaged over the devices. In one row each device has all weights. In
the other each has a piece of them and of their momentum: it gathers the weights, and changes its piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import popxl
from popxl import ops
from popxl.tensor import Variable
from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, time_of, times
from tests.benchmarks.network import RATE, Network, jax_loss, network, scores

DEVICES = 4
KEPT = 0.9
"""How much of the momentum a step keeps."""


def data_of(net: Network) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of all devices; always the same."""
    images, labels = Network(net.widths, DEVICES * net.batch).data()
    return images.reshape(DEVICES, net.batch, -1), labels.reshape(DEVICES, net.batch)


# Ours ---------------------------------------------------------------------------------------------------------------


class Training(ABC):
    """A session that trains, one step a run, and reads the losses of all devices."""

    def __init__(self, net: Network) -> None:
        ir = popxl.Ir(replication=DEVICES)
        with ir.main_graph, popxl.in_sequence():
            self.images = popxl.h2d_stream((net.batch, net.widths[0]), popxl.float32, "images")
            self.labels = popxl.h2d_stream((net.batch,), popxl.int32, "labels")
            self.loss = popxl.d2h_stream((), popxl.float32, "loss")
            weights = self.weights(net.parameters())
            forward = ir.create_graph(scores, self.images.spec, *weights)
            backward = popxl.transforms.autodiff(forward, grads_required=forward.inputs[1:])
            call = ops.call_with_info(forward, ops.host_load(self.images), *weights)
            loss, gradient = ops.nll_loss_with_softmax_grad(
                ops.softmax(call.outputs[0], -1), ops.host_load(self.labels)
            )
            self.change(ops.call(backward.graph, gradient, inputs_dict=backward.inputs_dict(call)))
            ops.host_store(self.loss, loss)
        self.session = popxl.Session(ir, "ipu_hw")

    variables: Sequence[Variable]
    """Weights and biases, for the host."""

    @abstractmethod
    def weights(self, first: Sequence[np.ndarray]) -> Sequence[popxl.Tensor]:
        """Make the variables. Returns all weights and biases, whole."""

    @abstractmethod
    def change(self, gradients: Sequence[popxl.Tensor]) -> None:
        """Make a step."""

    def run(self, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The losses of one run."""
        return self.session.run({self.images: images, self.labels: labels})[self.loss]

    def parameters(self) -> list[np.ndarray]:
        """The weights and biases now."""
        return list(self.session.get_tensors_data(self.variables).values())


class Whole(Training):
    """All weights on each device."""

    def weights(self, first: Sequence[np.ndarray]) -> Sequence[popxl.Tensor]:
        self.variables = [popxl.variable(p, name=f"p{i}") for i, p in enumerate(first)]
        return self.variables

    def change(self, gradients: Sequence[popxl.Tensor]) -> None:
        for p, g in zip(self.variables, gradients, strict=True):
            ops.scaled_add_(p, ops.collectives.replicated_all_reduce(g, "mean"), b=-RATE)


class InPieces(Training):
    """A piece of each weight, and of its momentum, on each device."""

    def weights(self, first: Sequence[np.ndarray]) -> Sequence[popxl.Tensor]:
        pairs = [popxl.replica_sharded_variable(p, name=f"p{i}") for i, p in enumerate(first)]
        self.variables, self.pieces = zip(*pairs, strict=True)
        self.momenta = [popxl.replica_sharded_variable(0 * p, name=f"m{i}")[1] for i, p in enumerate(first)]
        return [ops.collectives.replicated_all_gather(piece) for piece in self.pieces]

    def change(self, gradients: Sequence[popxl.Tensor]) -> None:
        for p, m, g in zip(self.pieces, self.momenta, gradients, strict=True):
            g = ops.collectives.replicated_reduce_scatter(g, "mean", None, True)
            ops.var_updates.accumulate_moving_average_(m, g, KEPT)
            ops.scaled_add_(p, m, b=-RATE)


# Plain JAX ----------------------------------------------------------------------------------------------------------

AXIS = "devices"
ACROSS, SAME = PartitionSpec(AXIS), PartitionSpec()


class JaxTraining(ABC):
    """The same in plain JAX, as one would write it: mapped, jitted, with the state donated."""

    where: ClassVar[PartitionSpec]
    """How the state is laid out."""

    def __init__(self, net: Network, devices: Sequence[jax.Device]) -> None:
        self.shapes = [p.shape for p in net.parameters()]
        mesh = Mesh(np.asarray(devices), (AXIS,))
        self.state = jax.device_put(self.first(net.parameters()), NamedSharding(mesh, self.where))
        specs = (self.where, ACROSS)
        step = jax.shard_map(self.step, mesh=mesh, in_specs=(*specs, ACROSS), out_specs=specs, check_vma=False)
        self.jitted = jax.jit(step, donate_argnums=0)

    @abstractmethod
    def first(self, parameters: list[np.ndarray]) -> Any:
        """The first state."""

    @abstractmethod
    def step(self, state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        """The next state, and the loss, as an array of one: what each device does."""

    def run(self, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        self.state, losses = self.jitted(self.state, images.reshape(-1, images.shape[-1]), labels.ravel())
        return np.asarray(losses)

    def parameters(self) -> list[np.ndarray]:
        return [np.asarray(p) for p in self.state]


class JaxWhole(JaxTraining):
    where = SAME

    def first(self, parameters: list[np.ndarray]) -> Any:
        return parameters

    def step(self, state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(jax_loss)(state, images, labels)
        gradients = lax.pmean(gradients, AXIS)
        return [p - RATE * g for p, g in zip(state, gradients, strict=True)], loss[None]


class JaxInPieces(JaxTraining):
    where = ACROSS

    def first(self, parameters: list[np.ndarray]) -> Any:
        flat = [np.pad(p.ravel(), (0, -p.size % DEVICES)) for p in parameters]
        return flat, [np.zeros_like(p) for p in flat]

    def step(self, state: Any, images: Any, labels: Any) -> tuple[Any, Any]:
        pieces, momenta = state
        weights = [
            self._whole(lax.all_gather(p, AXIS, tiled=True), s) for p, s in zip(pieces, self.shapes, strict=True)
        ]
        loss, gradients = jax.value_and_grad(jax_loss)(weights, images, labels)
        momenta = [KEPT * m + (1 - KEPT) * self._piece(g) for m, g in zip(momenta, gradients, strict=True)]
        return ([p - RATE * m for p, m in zip(pieces, momenta, strict=True)], momenta), loss[None]

    def _piece(self, gradient: Any) -> Any:
        flat = jax.numpy.pad(gradient.ravel(), (0, -gradient.size % DEVICES))
        return lax.psum_scatter(flat, AXIS, tiled=True) / DEVICES

    def _whole(self, flat: Any, shape: tuple[int, ...]) -> Any:
        return flat[: int(np.prod(shape))].reshape(shape)

    def parameters(self) -> list[np.ndarray]:
        return [self._whole(np.asarray(p), s) for p, s in zip(self.state[0], self.shapes, strict=True)]


# Rows ---------------------------------------------------------------------------------------------------------------


@contextmanager
def parallel(
    size: Size, training: type[Training], by_hand: type[JaxTraining], count: int
) -> Iterator[Mapping[str, Measure]]:
    """Each party trains its own weights, and reads the losses of every step."""
    net = network(size, batch=32)
    data = data_of(net)
    ours = training(net)
    with ours.session:
        rival = by_hand(net, ours.session.program.layout.devices)
        parties: dict[str, Training | JaxTraining] = {OURS: ours, "shard_map": rival}
        seen = {name: ([party.run(*data) for _ in range(3)], party.parameters()) for name, party in parties.items()}
        check_agreement(seen.pop("shard_map"), **seen)
        yield {
            name: time_of(lambda party=party: party.run(*data).sum(), 1 if size is Size.TINY else count)
            for name, party in parties.items()
        }


TARGETS = (times(0.95, "shard_map"),)
ABOUT = "a data-parallel training step on four devices: 784-512-512-512-10, batch 32 on each"
ROWS = (
    Row("parallel_4", lambda size: parallel(size, Whole, JaxWhole, 50), TARGETS, devices=DEVICES, about=ABOUT),
    Row(
        "sharded_4",
        lambda size: parallel(size, InPieces, JaxInPieces, 50),
        TARGETS,
        devices=DEVICES,
        about=f"{ABOUT}; weights and momentum in pieces",
    ),
)
