# %% [markdown]
# # Data parallelism
#
# One network on several replicas, each with a share of every batch, and the numbers
# that one replica would get. README.md beside this file tells the story.
#
#     python tutorials/3_data_parallelism/data_parallelism.py

# %%
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import popxl
import popxl_addons as addons
from popxl import ops

# digits.py is shared by the tutorials. A notebook has no file, and runs in the folder
# it lies in.
sys.path.append(
    str(Path(globals().get("__file__", "notebook")).resolve().parent.parent)
)
from digits import SIZE, Batches, Digits, load

REPLICAS = 4
MICRO_BATCHES = 2  # that each replica goes through in a step
BATCH_SIZE = 64  # digits in a step, of all replicas together
EPOCHS = 12
LEARNING_RATE = 0.2


def title(text: str) -> None:
    print(f"\n=== {text} ===\n")


# %% [markdown]
# ## 1. One program, several replicas

# %%
title("1. One program, several replicas")
ir = popxl.Ir(replication=REPLICAS)
groupings = {
    "all": ir.replica_grouping(),
    "neighbours": ir.replica_grouping(group_size=2),
    "every second": ir.replica_grouping(stride=2, group_size=2),
}
with ir.main_graph:
    number_stream = popxl.h2d_stream((), popxl.float32, "number")
    number = ops.host_load(number_stream)
    sum_streams = {
        name: addons.host_store(
            ops.collectives.replicated_all_reduce(number, op="add", group=grouping)
        )
        for name, grouping in groupings.items()
    }

with popxl.Session(ir, "ipu_hw") as session:
    print(
        "the shape of a number on a replica:",
        number.shape,
        "and on the host:",
        session.host_shape(number.shape),
    )
    sums = session.run({number_stream: np.array([1, 2, 3, 4], np.float32)})
for name, grouping in groupings.items():
    print(f"{name:>12}: groups {grouping.assignment}, sums {sums[sum_streams[name]]}")

# %% [markdown]
# ## 2. Equal variables stay equal if they are changed equally

# %%
title("2. Equal variables stay equal if they are changed equally")
ir = popxl.Ir(replication=REPLICAS)
with ir.main_graph:
    gradient_stream = popxl.h2d_stream((), popxl.float32, "gradient")
    gradient = ops.host_load(gradient_stream)
    mean = ops.collectives.replicated_all_reduce(gradient, op="mean")

    alone = popxl.variable(0.0, name="alone", retrieval_mode="all_replicas")
    together = popxl.variable(0.0, name="together", retrieval_mode="all_replicas")
    ops.scaled_add_(alone, gradient, b=-1.0)
    ops.scaled_add_(together, mean, b=-1.0)

    own = popxl.variable(
        [10.0, 20.0, 30.0, 40.0],
        name="own",
        replica_grouping=ir.replica_grouping(group_size=1),
    )
    ops.scaled_add_(own, mean, b=-1.0)

with popxl.Session(ir, "ipu_hw") as session:
    session.run({gradient_stream: np.array([1, 2, 3, 4], np.float32)})
for variable in (alone, together, own):
    print(f"{variable.name:>8}: {session.get_tensor_data(variable)}")


# %% [markdown]
# ## 3. A micro-batch

# %%
title("3. A micro-batch")


class Linear(addons.Module):
    """`x @ weight + bias`, from (..., n) to (..., features)."""

    def __init__(self, features: int):
        super().__init__()
        self.features = features

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        n = x.shape[-1]
        random = partial(np.random.normal, 0, n**-0.5, (n, self.features))
        weight = self.add_variable_input("weight", random, x.dtype)
        bias = self.add_variable_input(
            "bias", partial(np.zeros, self.features), x.dtype
        )
        return x @ weight + bias


class Net(addons.Module):
    """Two linear layers with gelu between them, from images (..., 28, 28) to ten scores
    for each."""

    def __init__(self):
        super().__init__()
        self.fc1 = Linear(256)
        self.fc2 = Linear(10)

    def build(self, images: popxl.Tensor) -> popxl.Tensor:
        x = images.reshape((-1, SIZE * SIZE))
        return self.fc2(ops.gelu(self.fc1(x)))


class MicroBatch(addons.Module):
    """Loads a few digits, stores their loss, and takes its gradients into means over
    all micro-batches of the step."""

    def build(
        self,
        image_stream: popxl.HostToDeviceStream,
        label_stream: popxl.HostToDeviceStream,
        loss_stream: popxl.DeviceToHostStream,
    ) -> None:
        images, labels = ops.host_load(image_stream), ops.host_load(label_stream)

        facts, forward = Net().create_graph(images)
        mean_facts, backward = addons.autodiff_with_accumulation(
            forward, forward.args.tensors
        )
        variables = self.add_variable_inputs("net", facts)
        means = self.add_variable_inputs("means", mean_facts)

        forward_call = forward.bind(variables).call_with_info(images)
        loss, d_scores = addons.cross_entropy_with_grad(forward_call.outputs[0], labels)
        activations = backward.grad_graph_info.inputs_dict(forward_call)
        backward.bind(means).call(d_scores, args=activations)
        ops.host_store(loss_stream, loss)


with popxl.Ir().main_graph:
    facts, _ = MicroBatch().create_graph(
        popxl.h2d_stream((8, SIZE, SIZE), popxl.float32),
        popxl.h2d_stream((8,), popxl.int32),
        popxl.d2h_stream((), popxl.float32),
    )
print("what a micro-batch is bound to:", *facts.to_dict(), sep="\n  ")

# %% [markdown]
# ## 4. A step of training

# %%
title("4. A step of training")


class Program(NamedTuple):
    """A session with the handles that the host needs: what to feed, what to read, and
    the variables by name."""

    session: popxl.Session
    inputs: list[popxl.HostToDeviceStream]
    output: popxl.DeviceToHostStream
    variables: addons.NamedTensors

    def run(self, *arrays: np.ndarray) -> np.ndarray:
        """One run of the program: one array for each input, which is dealt out to
        micro-batches and replicas."""
        shares = {
            stream: array.reshape(self.session.host_shape(stream.shape))
            for stream, array in zip(self.inputs, arrays, strict=True)
        }
        return self.session.run(shares)[self.output]


def training_program(replicas: int, micro_batches: int) -> Program:
    """Takes a batch of images and labels, improves the variables by one step, gives the
    loss of each micro-batch."""
    np.random.seed(42)  # so that all training programs start with the same weights
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = micro_batches
    digits = BATCH_SIZE // (replicas * micro_batches)
    with ir.main_graph, popxl.in_sequence():
        images = popxl.h2d_stream((digits, SIZE, SIZE), popxl.float32, "images")
        labels = popxl.h2d_stream((digits,), popxl.int32, "labels")
        losses = popxl.d2h_stream((), popxl.float32, "losses")

        # Each replica for itself: forward, backward, and into the means.
        facts, micro_batch = MicroBatch().create_graph(images, labels, losses)
        state = facts.init()
        ops.repeat(
            micro_batch.graph, micro_batches, inputs_dict=micro_batch.bind(state).args
        )

        # All replicas together: one mean of their means, and the same step everywhere.
        for variable, gradient in zip(
            state.net.tensors, state.means.accum.tensors, strict=True
        ):
            ops.collectives.replicated_all_reduce_(gradient, op="mean")
            ops.scaled_add_(variable, gradient, b=-LEARNING_RATE)
        ops.var_updates.accumulator_zero_(state.means.mean_accum_counter)
    return Program(popxl.Session(ir, "ipu_hw"), [images, labels], losses, state.net)


training = training_program(REPLICAS, MICRO_BATCHES)
for stream in (*training.inputs, training.output):
    print(
        f"{stream.tensor_id}: {stream.shape} on a replica, "
        f"{training.session.host_shape(stream.shape)} on the host"
    )

# %% [markdown]
# ## 5. The same numbers

# %%
title("5. The same numbers")
training_digits, test_digits = load()


def weights_after(program: Program, steps: int) -> list[np.ndarray]:
    """The variables after so many steps from the start, sorted by name."""
    with program.session as session:
        for images, labels in islice(
            Batches(training_digits, BATCH_SIZE, seed=1), steps
        ):
            program.run(images, labels)
    return list(session.get_tensors_data(program.variables.tensors).values())


expected = weights_after(training_program(replicas=1, micro_batches=1), steps=5)
for replicas, micro_batches in ((1, 4), (4, 1), (4, 4), (8, 2)):
    weights = weights_after(training_program(replicas, micro_batches), steps=5)
    same = all(
        np.allclose(ours, theirs, atol=1e-5)
        for ours, theirs in zip(weights, expected, strict=True)
    )
    print(
        f"replicas: {replicas}, micro-batches on each: {micro_batches}, the same "
        f"weights as one with all: {same}"
    )
    assert same


# %% [markdown]
# ## 6. Training and testing

# %%
title("6. Training and testing")


def train(program: Program, digits: Digits) -> None:
    """Shows all digits to the training program, several times over."""
    batches = Batches(digits, BATCH_SIZE, seed=42)
    with program.session, tqdm(total=EPOCHS * len(batches)) as bar:
        for epoch in range(1, EPOCHS + 1):
            for images, labels in batches:
                losses = program.run(images, labels)
                bar.set_description(
                    f"Epoch {epoch}/{EPOCHS}, loss {losses.mean():.4f}", refresh=False
                )
                bar.update()


def test_program(digits: int) -> Program:
    """Takes so many images for each replica, gives ten scores for each image."""
    ir = popxl.Ir(replication=REPLICAS)
    with ir.main_graph:
        images = popxl.h2d_stream((digits, SIZE, SIZE), popxl.float32, "images")
        facts, network = Net().create_graph(images.spec)
        variables = facts.init()
        (scores,) = network.bind(variables).call(ops.host_load(images))
        score_stream = addons.host_store(scores)
    return Program(popxl.Session(ir, "ipu_hw"), [images], score_stream, variables)


def copy_variables(source: Program, target: Program) -> None:
    """Gives the variables of `target` the values of those in `source` that have the
    same names."""
    values = source.session.get_tensors_data(source.variables.tensors)
    partners = source.variables.to_mapping(target.variables)
    target.session.write_variables_data(
        {theirs: values[ours] for ours, theirs in partners.items()}
    )


train(training, training_digits)
testing = test_program(len(test_digits) // REPLICAS)
copy_variables(training, testing)
with testing.session:
    scores = testing.run(test_digits.images)
print("the scores come back as", scores.shape)
accuracy = 100 * np.mean(scores.argmax(axis=-1).flatten() == test_digits.labels)
print(f"Accuracy on test set: {accuracy:.2f}%")
assert accuracy > 90
