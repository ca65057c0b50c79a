# %% [markdown]
# # Remote variables and replicated tensor sharding
#
# What need not be on a device all the time: variables in slots of remote buffers, and
# variables in pieces, one for each replica. At the end AdamW trains a network on four
# replicas, with its state in pieces, and the memory is counted. README.md beside this
# file tells the story.
#
#     python tutorials/5_remote_variables/remote_variables.py

# %%
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import NamedTensors
from popxl_addons.layers import Linear
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.optimizers.adam import AdamOptimizerStep
from popxl_addons.remote import (
    load_remote_graph,
    named_variable_buffers,
    store_remote_graph,
)
from popxl_addons.rts import (
    gather_replica_sharded_tensor,
    reduce_replica_sharded_graph,
    replica_sharded_spec,
)

# digits.py is shared by the tutorials, one folder up. A notebook has no file; it runs
# where it is.
sys.path.append(
    str(Path(globals().get("__file__", "notebook")).resolve().parent.parent)
)
from digits import SIZE, Batches, Digits, load

np.random.seed(42)

# %% [markdown]
# ## 1. A variable in a slot

# %%
ir = popxl.Ir()
with ir.main_graph, popxl.in_sequence():
    buffer = popxl.remote_buffer((2,), popxl.float32, entries=3)
    slots = [
        popxl.remote_variable([i, 10.0 * i], buffer, i, name=f"slot{i}")
        for i in range(3)
    ]
    t = ops.remote_load(buffer, 1, "t")
    t += 100
    ops.remote_store(buffer, 2, t)

print(ir.main_graph)
with popxl.Session(ir, "ipu_model") as session:
    session.run()
for variable in slots:
    print(variable.name, session.get_tensor_data(variable))

# %% [markdown]
# ## 2. Layers by number

# %%
LAYERS = 3

ir = popxl.Ir()
with ir.main_graph, popxl.in_sequence():
    x_stream = popxl.h2d_stream((2, 4), popxl.float32, "x")
    x = ops.host_load(x_stream)
    facts, layer = Linear(4).create_graph(x)

    buffers = named_variable_buffers(facts, entries=LAYERS)
    layers = [facts.init_remote(buffers, i, f"layer{i}") for i in range(LAYERS)]

    load_layer, names = load_remote_graph(buffers)
    for i in range(LAYERS):
        weights = NamedTensors.pack(names, load_layer.call(i))
        (x,) = layer.bind(weights).call(x)
    y_stream = addons.host_store(x)

print(buffers)
print("loaded in this order:", names)
print(ir.main_graph)

x_data = np.random.normal(size=(2, 4)).astype(np.float32)
with popxl.Session(ir, "ipu_model") as session:
    y_data = session.run({x_stream: x_data})[y_stream]
expected = x_data
for variables in layers:
    expected = expected @ session.get_tensor_data(
        variables.weight
    ) + session.get_tensor_data(variables.bias)
print("the same as NumPy:", np.allclose(y_data, expected, atol=1e-6))

# %% [markdown]
# ## 3. Pieces

# %%
ir = popxl.Ir(replication=4)
with ir.main_graph, popxl.in_sequence():
    everyone = ir.replica_grouping()
    gradient_stream = popxl.h2d_stream((2, 4), popxl.float32, "gradient")
    gradient = ops.host_load(gradient_stream)
    print("a piece:", repr(replica_sharded_spec(gradient, everyone)))

    # The mean of the four gradients, shared out; and put together again.
    reduce, names = reduce_replica_sharded_graph(NamedTensors(w=gradient), "mean")
    (piece,) = reduce.call(gradient)
    # reshaped, it is a tensor that the host may have
    piece_stream = addons.host_store(piece.reshape((2,)))
    whole_stream = addons.host_store(gather_replica_sharded_tensor(piece))

    # A sum over all runs, of which each replica keeps its piece in a slot of its own.
    buffer = popxl.replica_sharded_buffer((2, 4), popxl.float32)
    total = popxl.remote_replica_sharded_variable(
        np.zeros((2, 4)), buffer, dtype=popxl.float32, name="total"
    )
    own = ops.remote_load(buffer, 0)
    own += piece
    ops.remote_store(buffer, 0, own)
print("a slot of", buffer, "is a piece of", buffer.meta_shape)

one = np.arange(8, dtype=np.float32).reshape(2, 4)
# on average, one + 150
gradients = np.stack([one + 100 * replica for replica in range(4)])
with popxl.Session(ir, "ipu_model") as session:
    for _ in range(2):
        outputs = session.run({gradient_stream: gradients})
for replica in range(4):
    print(f"replica {replica} has", outputs[piece_stream][replica])
print("each can have all:", outputs[whole_stream][3].tolist())
print("the host sees:    ", session.get_tensor_data(total).tolist())

# %% [markdown]
# ## 4. AdamW with its state in pieces

# %%
REPLICAS, BATCH, EPOCHS, LEARNING_RATE = 4, 8, 4, 1e-3


class Net(addons.Module):
    """Four linear layers with gelu between them, from images (n, 28, 28) to ten scores
    for each."""

    def __init__(self):
        super().__init__()
        self.fc1 = Linear(512)
        self.fc2 = Linear(512)
        self.fc3 = Linear(512)
        self.fc4 = Linear(10)

    def build(self, images: popxl.Tensor) -> popxl.Tensor:
        x = images.reshape((-1, SIZE * SIZE))
        for layer in (self.fc1, self.fc2, self.fc3):
            x = ops.gelu(layer(x))
        return self.fc4(x)


def gradients_of_own_batch(
    images: popxl.Tensor, labels: popxl.Tensor
) -> tuple[popxl.Tensor, NamedTensors, NamedTensors]:
    """The loss, and variables and gradients under the same names: each replica has
    gradients of its own."""
    facts, forward = Net().create_graph(images)
    backward = addons.autodiff(forward, grads_required=forward.args.tensors)
    variables = facts.init()
    forward_call = forward.bind(variables).call_with_info(images)
    loss, d_scores = addons.cross_entropy_with_grad(forward_call.outputs[0], labels)
    activations = backward.grad_graph_info.inputs_dict(forward_call)
    backward_call = backward.call_with_info(d_scores, args=activations)
    by_variable = backward.grad_graph_info.fwd_parent_ins_to_grad_parent_outs(
        forward_call, backward_call
    )
    return loss, variables, variables.map(lambda variable: by_variable[variable])


def update(
    variables: NamedTensors, gradients: NamedTensors, group: popxl.ReplicaGrouping
) -> None:
    """One step of AdamW by the mean of all gradients. The replicas of a `group` share
    out the work and the state."""
    groups = NamedReplicaGrouping.build_groups(variables.keys_flat(), group)
    reduce, names = reduce_replica_sharded_graph(gradients, "mean", shard_groups=groups)
    pieces = NamedTensors.pack(names, reduce.bind(gradients).call())
    adam = AdamOptimizerStep(cache=True)
    for name, variable in variables.to_dict().items():
        spec = replica_sharded_spec(variable, group)
        facts, step = adam.create_graph(
            spec, spec, lr=LEARNING_RATE, first_order_dtype=popxl.float32
        )
        # state for a piece is in pieces anyway
        buffers = named_variable_buffers(facts, shard_over_dict=False)
        facts.init_remote(buffers, prefix=f"adam.{name}")
        load_state, state_names = load_remote_graph(buffers)
        store_state = store_remote_graph(buffers)

        state = NamedTensors.pack(state_names, load_state.call(0))
        if spec.meta_shape:
            own = ops.collectives.replica_sharded_slice(variable, group)
            step.bind(state).call(own, pieces[name])
            ops.var_updates.copy_var_update_(
                variable, gather_replica_sharded_tensor(own, replica_group=group)
            )
        else:
            step.bind(state).call(variable, pieces[name])
        store_state.bind(state).call(0)


def training_session(in_pieces: bool) -> addons.TaskSession:
    """Takes images and labels for all replicas, improves the variables by one step,
    gives the losses."""
    ir = popxl.Ir(replication=REPLICAS)
    ir.options.remoteBuffers = "host"
    with ir.main_graph, popxl.in_sequence():
        inputs = addons.InputStreams(
            images=((BATCH, SIZE, SIZE), popxl.float32), labels=((BATCH,), popxl.int32)
        )
        images, labels = (ops.host_load(stream) for stream in inputs)
        loss, variables, gradients = gradients_of_own_batch(images, labels)
        losses = addons.host_store(loss)
        update(
            variables,
            gradients,
            ir.replica_grouping(group_size=REPLICAS if in_pieces else 1),
        )
    return addons.TaskSession(
        inputs, [losses], variables, ir=ir, device_desc="ipu_model"
    )


def run(session: addons.TaskSession, *arrays: np.ndarray) -> np.ndarray:
    """One run: an array for each input, with a row for each replica if there are
    several. The result is its output."""
    feeds = (
        array.reshape(session.host_shape(stream.shape))
        for stream, array in zip(session.inputs, arrays, strict=True)
    )
    return session.run(dict(zip(session.inputs, feeds, strict=True)))[
        session.outputs[0]
    ]


# %% [markdown]
# ## 5. The same numbers, in less memory


# %%
def mebibytes(nelms: int, dtype: popxl.dtype) -> float:
    return nelms * np.dtype(dtype.as_numpy()).itemsize / 2**20


def print_memory(title: str, session: popxl.Session) -> None:
    """What one replica keeps from run to run: variables on the device, and slots of
    remote buffers."""
    variables = [
        v for v in session.ir.main_graph.variables if not v.location_info.isRemote()
    ]
    on_device = sum(mebibytes(v.nelms, v.dtype) for v in variables)
    remote = sum(
        mebibytes(b.entries * b.slot_nelms, b.tensor_dtype)
        for b in session.ir.remote_buffers
    )
    print(
        f"{title}: {on_device:.2f} MiB on the device, {remote:.2f} MiB in remote memory"
    )


whole, pieces = training_session(in_pieces=False), training_session(in_pieces=True)
for variable_name in ("fc1.weight", "fc4.bias"):
    variable = pieces.state[variable_name]
    spec = replica_sharded_spec(variable, pieces.ir.replica_grouping())
    print(
        f"{variable_name} has the shape {variable.shape}, a replica's share "
        f"{spec.shape}"
    )
print_memory("state whole    ", whole)
print_memory("state in pieces", pieces)
for title, session in (("whole", whole), ("in pieces", pieces)):
    print(
        f"during a step, besides, with the state {title}: "
        f"{session.program.temporaries() / 2**20:.1f} MiB"
    )

# %%
training_digits, test_digits = load()
whole.load_from_session(pieces)  # both start from the same weights
first_losses = []
for session in (whole, pieces):
    batches = Batches(training_digits, REPLICAS * BATCH, seed=42)
    with session:
        first_losses.append(
            [
                run(session, *batch).mean()
                for batch, _ in zip(batches, range(10), strict=False)
            ]
        )
print("the same losses:", np.allclose(*first_losses))

# %% [markdown]
# ## 6. Training and testing


# %%
def train(session: addons.TaskSession, batches: Batches, epochs: int) -> None:
    with session, tqdm(total=epochs * len(batches)) as bar:
        for epoch in range(1, epochs + 1):
            for images, labels in batches:
                losses = run(session, images, labels)
                bar.set_description(
                    f"Epoch {epoch}/{epochs}, loss {losses.mean():.4f}", refresh=False
                )
                bar.update()


def test_session(count: int) -> addons.TaskSession:
    """Takes images, gives ten scores for each. No replicas, nothing remote: a program
    of its own."""
    ir = popxl.Ir()
    with ir.main_graph:
        inputs = addons.InputStreams(images=((count, SIZE, SIZE), popxl.float32))
        images = ops.host_load(inputs.images)
        facts, network = Net().create_graph(images)
        variables = facts.init()
        (scores,) = network.bind(variables).call(images)
        output = addons.host_store(scores)
    return addons.TaskSession(
        inputs, [output], variables, ir=ir, device_desc="ipu_model"
    )


def accuracy(session: addons.TaskSession, digits: Digits) -> float:
    """The share of digits, in percent, whose highest score is that of their label."""
    with session:
        scores = run(session, digits.images)
    return 100 * float(np.mean(scores.argmax(axis=-1) == digits.labels))


train(pieces, Batches(training_digits, REPLICAS * BATCH, seed=42), EPOCHS)
testing = test_session(len(test_digits))
testing.load_from_session(pieces, report_missing="error")
result = accuracy(testing, test_digits)
print(f"Accuracy on test set: {result:.2f}%")
assert result > 90
