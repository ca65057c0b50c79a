# %% [markdown]
# # Phased execution
#
# A network that is trained with one layer on the device at a time: weights, optimiser
# state and activations are in remote memory. How much of the device it needs does not
# depend on how many layers it has. README.md beside this file tells the story.
#
#     python tutorials/6_phased_execution/phased_execution.py

# %%
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import NamedTensors, NamedVariableFactories
from popxl_addons.layers import Linear
from popxl_addons.optimizers.adam import AdamOptimizerStep
from popxl_addons.remote import (
    load_remote_graph,
    named_variable_buffers,
    store_remote_graph,
)

# digits.py is shared by the tutorials, one folder up. A notebook has no file; it runs
# where it is.
sys.path.append(
    str(Path(globals().get("__file__", "notebook")).resolve().parent.parent)
)
from digits import SIZE, Batches, Digits, load

np.random.seed(42)

# %% [markdown]
# ## 1. Rows of micro-batches


# %%
def tenfold(x: popxl.Tensor) -> popxl.Tensor:
    return x * 10


ir = popxl.Ir()
with ir.main_graph, popxl.in_sequence():
    buffer = popxl.remote_buffer((), popxl.float32, entries=12)
    slots = [
        popxl.remote_variable(
            float(i + 1) if i < 4 else 0.0, buffer, i, name=f"slot{i}"
        )
        for i in range(12)
    ]

    layer = addons.GraphWithNamedArgs(
        ir.create_graph(tenfold, popxl.TensorSpec((), popxl.float32))
    )
    (x,), (y,) = layer.graph.inputs, layer.graph.outputs
    serial = addons.batch_serialise(
        layer,
        steps=4,
        load_handles={x: (buffer, 0)},
        store_streams={},
        store_buffers={y: (buffer, 1)},
        rows=2,
        io_mode="compute",
    )
    serial.graph.call(0)
    serial.graph.call(1)

print(serial.graph.graph)
with popxl.Session(ir, "ipu_model") as session:
    session.run()
numbers = [float(session.get_tensor_data(variable)) for variable in slots]
for row in range(3):
    print(f"row {row}:", numbers[4 * row : 4 * row + 4])

# %% [markdown]
# ## 2. The network, and where its values are

# %%
STEPS, BATCH, WIDTH, CLASSES, LEARNING_RATE = 4, 16, 14 * 14, 10, 1e-3
FLOAT, INT = popxl.float32, popxl.int32


def halved(images: popxl.Tensor) -> popxl.Tensor:
    """Images (n, 28, 28) of half the height and width, as rows (n, 196)."""
    return ops.mean(images.reshape((-1, 14, 2, 14, 2)), (2, 4)).reshape((-1, WIDTH))


class Hidden(addons.Module):
    """`x + gelu(x @ weight + bias)`: what comes in and what goes out have the same
    shape."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(WIDTH)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return x + ops.gelu(self.linear(x))


class Head(addons.Module):
    """The last layer with its loss, forwards and backwards: gradients go into running
    means, the loss goes out."""

    def build(
        self, x: popxl.Tensor, labels: popxl.Tensor
    ) -> tuple[popxl.Tensor, popxl.Tensor]:
        facts, linear = Linear(CLASSES).create_graph(x)
        mean_facts, gradient = addons.autodiff_with_accumulation(
            linear, linear.args.tensors, grads_required=linear.graph.inputs[:1]
        )
        call = linear.bind(self.add_variable_inputs("weights", facts)).call_with_info(x)
        loss, d_scores = addons.cross_entropy_with_grad(call.outputs[0], labels)
        activations = gradient.grad_graph_info.inputs_dict(call)
        (dx,) = gradient.bind(self.add_variable_inputs("means", mean_facts)).call(
            d_scores, args=activations
        )
        return dx, loss


class Streams(NamedTuple):
    """What crosses between host and device, once for each micro-batch."""

    images: popxl.HostToDeviceStream
    labels: popxl.HostToDeviceStream
    losses: popxl.DeviceToHostStream

    @classmethod
    def of(cls, count: int) -> "Streams":
        return cls(
            popxl.h2d_stream((count, SIZE, SIZE), FLOAT, "images"),
            popxl.h2d_stream((count,), INT, "labels"),
            popxl.d2h_stream((), FLOAT, "loss"),
        )


class Phases:
    """The graphs that work on micro-batches, each a loop over all of them, and the
    buffers between them.

    Row i of `values` is what goes into layer i, and row i of `gradients` is its
    gradient. The last row belongs to the head.
    """

    def __init__(self, layers: int, streams: Streams):
        first = addons.GraphWithNamedArgs(
            popxl.gir().create_graph(halved, streams.images.spec)
        )
        activation = first.graph.outputs[0].spec
        values = addons.batch_serial_buffer(activation, STEPS, rows=layers + 1)
        gradients = addons.batch_serial_buffer(activation, STEPS, rows=layers + 1)
        self.input = addons.batch_serialise(
            first,
            STEPS,
            load_handles={first.graph.inputs[0]: streams.images},
            store_streams={},
            store_buffers={first.graph.outputs[0]: (values, 0)},
            io_mode="compute",
        ).graph

        self.hidden_facts, hidden = Hidden().create_graph(activation)
        self.hidden_means, gradient = addons.autodiff_with_accumulation(
            hidden, hidden.args.tensors, grads_required=hidden.graph.inputs[:1]
        )
        forward, backward = addons.batch_serialise_fwd_and_grad(
            hidden,
            gradient,
            hidden.args,
            STEPS,
            load_handles={
                hidden.graph.inputs[0]: (values, 0),
                gradient.graph.inputs[0]: (gradients, 1),
            },
            store_streams={},
            store_buffers={
                hidden.graph.outputs[0]: (values, 1),
                gradient.graph.outputs[0]: (gradients, 0),
            },
            rows=layers,
            io_mode="compute",
        )
        self.forward, self.backward = forward.graph, backward.graph

        self.head_facts, head = Head().create_graph(activation, streams.labels.spec)
        self.head_means = self.head_facts.pop("means")
        (x, labels, *_), (dx, loss, *_) = head.graph.inputs, head.graph.outputs
        self.head = addons.batch_serialise(
            head,
            STEPS,
            load_handles={x: (values, layers), labels: streams.labels},
            store_streams={loss: streams.losses},
            store_buffers={dx: (gradients, layers)},
            io_mode="compute",
        ).graph


# %% [markdown]
# ## 3. Weights and optimiser state


# %%
class Slots:
    """The weights and the optimiser state of layers that are alike: those of layer i
    are in slot i."""

    def __init__(self, facts: NamedVariableFactories, layers: int, prefix: str):
        adam = AdamOptimizerStep(cache=True)
        states, self.steps = {}, {}
        for name, factory in facts.to_dict().items():
            spec = popxl.TensorSpec(factory.shape, factory.dtype)
            states[name], self.steps[name] = adam.create_graph(
                spec, spec, lr=LEARNING_RATE, first_order_dtype=FLOAT
            )
        everything = NamedVariableFactories(
            weights=facts, adam=NamedVariableFactories.from_dict(states)
        )
        buffers = named_variable_buffers(everything, entries=layers)
        self.variables = [
            everything.init_remote(buffers, i, f"{prefix}{i}") for i in range(layers)
        ]
        self.load_weights, self.weight_names = load_remote_graph(buffers.weights)
        self.load_all, self.names = load_remote_graph(buffers)
        self.store_all = store_remote_graph(buffers)

    def weights(self, i: int) -> NamedTensors:
        """Layer i on the device, as long as something needs it."""
        return NamedTensors.pack(self.weight_names, self.load_weights.call(i))

    def update(self, i: int, gradients: NamedTensors) -> None:
        """The optimiser phase of layer i: load, step, store."""
        loaded = NamedTensors.pack(self.names, self.load_all.call(i))
        for name, step in self.steps.items():
            step.bind(loaded.adam[name]).call(loaded.weights[name], gradients[name])
        self.store_all.bind(loaded).call(i)


# %% [markdown]
# ## 4. One step of training


# %%
def phased_session(layers: int) -> addons.TaskSession:
    """Takes images and labels in micro-batches, improves the weights by one step, gives
    the losses."""
    ir = popxl.Ir()
    ir.options.remoteBuffers = "host"
    # the layers are turns of loops; `auto` may choose what is faster on a CPU
    ir.options.calledGraphs = "rolled"
    ir.num_host_transfers = STEPS
    with ir.main_graph, popxl.in_sequence():
        streams = Streams.of(BATCH)
        phases = Phases(layers, streams)
        hidden = Slots(phases.hidden_facts, layers, "hidden")
        head = Slots(phases.head_facts.weights, 1, "head")

        phases.input.call(0)
        for i in range(layers):
            phases.forward.bind(hidden.weights(i)).call(i)

        means = phases.head_means.init_zero()
        phases.head.bind(NamedTensors(weights=head.weights(0), means=means)).call(0)
        head.update(0, means.accum)

        for i in reversed(range(layers)):
            means = phases.hidden_means.init_zero()
            arguments = hidden.weights(i)
            arguments.update(means.copy())
            phases.backward.bind(arguments).call(i)
            hidden.update(i, means.accum)
    state = {
        f"layers.{i}": variables.weights for i, variables in enumerate(hidden.variables)
    }
    state["head"] = head.variables[0].weights
    return task_session(ir, streams, NamedTensors.from_dict(state))


def task_session(
    ir: popxl.Ir, streams: Streams, state: NamedTensors
) -> addons.TaskSession:
    return addons.TaskSession(
        streams[:2], streams[2:], state, ir=ir, device_desc="ipu_model"
    )


def run(session: addons.TaskSession, *arrays: np.ndarray) -> np.ndarray:
    """One run: an array for each input, with a row for each micro-batch if there are
    several. Gives the output."""
    feeds = (
        array.reshape(session.host_shape(s.shape))
        for s, array in zip(session.inputs, arrays, strict=True)
    )
    return session.run(dict(zip(session.inputs, feeds, strict=True)))[
        session.outputs[0]
    ]


# %% [markdown]
# ## 5. The same in the ordinary way


# %%
class Net(addons.Module):
    """The whole network at once, from images (n, 28, 28) to ten scores for each."""

    def __init__(self, layers: int):
        super().__init__()
        self.layers = addons.Module.from_list([Hidden() for _ in range(layers)])
        self.head = Linear(CLASSES)

    def build(self, images: popxl.Tensor) -> popxl.Tensor:
        x = halved(images)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def ordinary_session(layers: int) -> addons.TaskSession:
    """As `phased_session`, with everything on the device, and all micro-batches at
    once."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        streams = Streams.of(STEPS * BATCH)
        images, labels = ops.host_load(streams.images), ops.host_load(streams.labels)
        facts, forward = Net(layers).create_graph(images)
        backward = addons.autodiff(forward, grads_required=forward.args.tensors)
        variables = facts.init()
        forward_call = forward.bind(variables).call_with_info(images)
        loss, d_scores = addons.cross_entropy_with_grad(forward_call.outputs[0], labels)
        ops.host_store(streams.losses, loss)
        activations = backward.grad_graph_info.inputs_dict(forward_call)
        backward_call = backward.call_with_info(d_scores, args=activations)
        gradients = backward.grad_graph_info.fwd_parent_ins_to_grad_parent_outs(
            forward_call, backward_call
        )
        adam = AdamOptimizerStep(cache=True)
        for name, variable in variables.to_dict().items():
            gradient = gradients[variable]
            state_facts, step = adam.create_graph(
                variable, gradient, lr=LEARNING_RATE, first_order_dtype=FLOAT
            )
            step.bind(state_facts.init(f"adam.{name}")).call(variable, gradient)
    return task_session(ir, streams, variables)


def test_session(layers: int, count: int) -> addons.TaskSession:
    """Takes images, gives ten scores for each."""
    ir = popxl.Ir()
    with ir.main_graph:
        image_stream = popxl.h2d_stream((count, SIZE, SIZE), FLOAT, "images")
        images = ops.host_load(image_stream)
        facts, network = Net(layers).create_graph(images)
        variables = facts.init()
        (scores,) = network.bind(variables).call(images)
        score_stream = addons.host_store(scores)
    return addons.TaskSession(
        [image_stream], [score_stream], variables, ir=ir, device_desc="ipu_model"
    )


# %% [markdown]
# ## 6. Memory, by the number of layers


# %%
class Memory(NamedTuple):
    """What a session needs, in KiB: variables on the device, what comes and goes there
    in a run, and remote buffers."""

    kept: float
    temporary: float
    remote: float

    @classmethod
    def of(cls, session: popxl.Session) -> "Memory":
        variables = [
            v for v in session.ir.main_graph.variables if not v.location_info.isRemote()
        ]
        buffers = session.ir.remote_buffers
        kept = sum(v.nelms * v.dtype.itemsize for v in variables)
        remote = sum(
            b.entries * b.slot_nelms * b.tensor_dtype.itemsize for b in buffers
        )
        return cls(kept / 1024, session.program.temporaries() / 1024, remote / 1024)

    @property
    def on_device(self) -> float:
        return self.kept + self.temporary


COUNTS = (4, 8) if "--quick" in sys.argv else (4, 8, 16)
ordinary = {layers: Memory.of(ordinary_session(layers)) for layers in COUNTS}
phased = {layers: Memory.of(phased_session(layers)) for layers in COUNTS}
print("layers | ordinary: on the device | phased: on the device, in remote memory")
for layers in COUNTS:
    device, other_device, remote = (
        ordinary[layers].on_device,
        phased[layers].on_device,
        phased[layers].remote,
    )
    print(
        f"{layers:6} | {device:19.0f} KiB | {other_device:18.0f} KiB, {remote:12.0f} "
        "KiB"
    )


def growth(memory: dict[int, Memory]) -> float:
    """By how much the device has to be larger for each layer, in KiB."""
    first, last = COUNTS[0], COUNTS[-1]
    return (memory[last].on_device - memory[first].on_device) / (last - first)


print(
    f"each layer adds to the device: {growth(ordinary):.1f} KiB if ordinary, "
    f"{growth(phased):.1f} KiB if phased"
)
assert growth(phased) < 0.01 * growth(ordinary)


# %%
def draw() -> None:
    """The table as a picture, memory.svg beside this file."""
    from matplotlib import pyplot as plt  # here, so that the rest runs without it

    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    axis.plot(
        COUNTS,
        [ordinary[n].on_device / 1024 for n in COUNTS],
        "s-C1",
        label="ordinary: on the device",
    )
    axis.plot(
        COUNTS,
        [phased[n].on_device / 1024 for n in COUNTS],
        "o-C0",
        label="phased: on the device",
    )
    axis.plot(
        COUNTS,
        [phased[n].remote / 1024 for n in COUNTS],
        "o:C0",
        label="phased: in remote memory",
    )
    axis.set(xlabel="layers", ylabel="memory [MiB]", ylim=(0, None), xticks=COUNTS)
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(
        Path(globals().get("__file__", "notebook")).with_name("memory.svg"),
        metadata={"Date": None},
    )


if "--picture" in sys.argv:
    draw()

# %% [markdown]
# ## 7. Training and testing

# %%
LAYERS, EPOCHS = 8, 8


def first_losses(session: addons.TaskSession, digits: Digits) -> list[float]:
    """The losses of ten steps, means over the micro-batches."""
    batches = Batches(digits, STEPS * BATCH, seed=42)
    with session:
        return [
            float(run(session, *batch).mean())
            for batch, _ in zip(batches, range(10), strict=False)
        ]


def train(session: addons.TaskSession, batches: Batches, epochs: int) -> None:
    with session, tqdm(total=epochs * len(batches)) as bar:
        for epoch in range(1, epochs + 1):
            for images, labels in batches:
                losses = run(session, images, labels)
                bar.set_description(
                    f"Epoch {epoch}/{epochs}, loss {losses.mean():.4f}", refresh=False
                )
                bar.update()


def accuracy(session: addons.TaskSession, digits: Digits) -> float:
    """The share of digits, in percent, whose highest score is that of their label."""
    with session:
        scores = run(session, digits.images)
    return 100 * float(np.mean(scores.argmax(axis=-1) == digits.labels))


training_digits, test_digits = load()
training, reference = phased_session(LAYERS), ordinary_session(LAYERS)
# both start from the same weights
reference.load_from_session(training, report_missing="error")
losses = first_losses(training, training_digits)
print(
    "the same losses:",
    np.allclose(losses, first_losses(reference, training_digits), rtol=1e-3),
)

train(training, Batches(training_digits, STEPS * BATCH, seed=42), EPOCHS)
testing = test_session(LAYERS, len(test_digits))
testing.load_from_session(training, report_missing="error")
result = accuracy(testing, test_digits)
print(f"Accuracy on test set: {result:.2f}%")
assert result > 90
