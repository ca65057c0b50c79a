# %% [markdown]
# # Several processes
#
# The data-parallel training of the third tutorial, by two processes that have two
# replicas each. README.md beside this file tells the story.
#
#     poprun --num-instances 2 --num-replicas 4 \
#         python tutorials/9_several_processes/several_processes.py
#     python tutorials/9_several_processes/several_processes.py

# %%
import sys
import tempfile
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

import popdist
import popxl
import popxl_addons as addons
from popxl import ops

# digits.py is shared by the tutorials. A notebook has no file, and runs in the folder
# it lies in.
sys.path.append(
    str(Path(globals().get("__file__", "notebook")).resolve().parent.parent)
)
from digits import SIZE, Batches, load

BATCH_SIZE = 64  # digits in a step, of all replicas together
EPOCHS = 12
LEARNING_RATE = 0.2


# %% [markdown]
# ## 1. Who am I?

# %%
INSTANCE, INSTANCES = popdist.getInstanceIndex(), popdist.getNumInstances()
TOGETHER: int | Literal["popdist"] = "popdist" if popdist.isPopdistEnvSet() else 2
popdist.init()


def say_once(text: str) -> None:
    """Print what all processes know."""
    if INSTANCE == 0:
        print(text)


ir = popxl.Ir(replication=TOGETHER)
first, own = popdist.getReplicaIndexOffset(), ir.instance_replication_factor
say_once(f"{INSTANCES} process(es), {ir.replication_factor} replicas")
print(
    f"I am process {INSTANCE}, and have {own} of the replicas: "
    f"{list(range(first, first + own))}"
)

# %% [markdown]
# ## 2. What goes in and out is for own replicas

# %%
with ir.main_graph:
    number_stream = popxl.h2d_stream((), popxl.float32, "number")
    number = ops.host_load(number_stream)
    own_stream = addons.host_store(number * 10.0)
    sum_stream = addons.host_store(
        ops.collectives.replicated_all_reduce(number, op="add")
    )

with popxl.Session(ir, "ipu_hw") as session:
    numbers = np.arange(first, first + own, dtype=np.float32).reshape(
        session.host_shape(())
    )
    results = session.run({number_stream: numbers})
print(
    f"I give {numbers}, and get {results[own_stream]} and the sums "
    f"{results[sum_stream]}"
)


# %% [markdown]
# ## 3. The training program


# %%
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


def mean_of_all(x: popxl.Tensor) -> popxl.Tensor:
    return ops.collectives.replicated_all_reduce(x, op="mean")


def training_session(replication: int | Literal["popdist"]) -> addons.TaskSession:
    """Takes a share of a batch, improves the variables by one step, gives the mean loss
    of the whole batch."""
    np.random.seed(42)  # every process draws the same first weights
    ir = popxl.Ir(replication)
    digits = BATCH_SIZE // ir.replication_factor
    with ir.main_graph, popxl.in_sequence():
        image_stream = popxl.h2d_stream((digits, SIZE, SIZE), popxl.float32, "images")
        label_stream = popxl.h2d_stream((digits,), popxl.int32, "labels")
        images, labels = ops.host_load(image_stream), ops.host_load(label_stream)

        facts, forward = Net().create_graph(images)
        backward = addons.autodiff(forward, grads_required=forward.args.tensors)
        variables = facts.init()
        forward_call = forward.bind(variables).call_with_info(images)
        loss, d_scores = addons.cross_entropy_with_grad(forward_call.outputs[0], labels)
        activations = backward.grad_graph_info.inputs_dict(forward_call)
        backward_call = backward.call_with_info(d_scores, args=activations)

        gradients = backward.grad_graph_info.fwd_parent_ins_to_grad_parent_outs(
            forward_call, backward_call
        )
        for variable in variables.tensors:
            ops.scaled_add_(
                variable, mean_of_all(gradients[variable]), b=-LEARNING_RATE
            )
        loss_stream = addons.host_store(mean_of_all(loss))
    return addons.TaskSession(
        [image_stream, label_stream],
        [loss_stream],
        variables,
        ir=ir,
        device_desc="ipu_hw",
    )


def run(session: addons.TaskSession, *arrays: np.ndarray) -> np.ndarray:
    """One run: an array for each input, with the digits of the replicas one after the
    other."""
    shares = {
        stream: array.reshape(session.host_shape(stream.shape))
        for stream, array in zip(session.inputs, arrays, strict=True)
    }
    return session.run(shares)[session.outputs[0]]


def own_share(array: np.ndarray) -> np.ndarray:
    """What this process takes of an array for all."""
    return np.split(array, INSTANCES)[INSTANCE]


# %% [markdown]
# ## 4. The same numbers

# %%
training_digits, test_digits = load()


def first_batches() -> list[tuple[np.ndarray, np.ndarray]]:
    return list(islice(Batches(training_digits, BATCH_SIZE, seed=1), 5))


with training_session(replication=1) as alone:
    for images, labels in first_batches():
        run(alone, images, labels)
with training_session(TOGETHER) as together:
    for images, labels in first_batches():
        run(together, own_share(images), own_share(labels))
weights, expected = (
    session.get_named_tensors_data().to_dict() for session in (together, alone)
)
same = all(np.allclose(weights[name], expected[name], atol=1e-5) for name in expected)
print(f"the same weights as one process with whole batches: {same}")
assert same

# %% [markdown]
# ## 5. Training, and a checkpoint

# %%
training = training_session(TOGETHER)
batches = Batches(training_digits, BATCH_SIZE, seed=42)
with training, tempfile.TemporaryDirectory() as folder:
    for epoch in range(1, EPOCHS + 1):
        losses = [
            run(training, own_share(images), own_share(labels))
            for images, labels in batches
        ]
        say_once(f"epoch {epoch}/{EPOCHS}, loss {np.mean(losses):.4f}")
    # by all: each writes what its replicas hold
    training.save_checkpoint(f"{folder}/checkpoint")
    print("the checkpoint is in my folder:", Path(folder, "checkpoint").exists())

# %% [markdown]
# ## 6. Testing


# %%
def testing_session(digits: int) -> addons.TaskSession:
    """Takes so many images and labels for each replica, gives the share of all digits
    that are read correctly."""
    ir = popxl.Ir(TOGETHER)
    with ir.main_graph:
        image_stream = popxl.h2d_stream((digits, SIZE, SIZE), popxl.float32, "images")
        label_stream = popxl.h2d_stream((digits,), popxl.int32, "labels")
        images, labels = ops.host_load(image_stream), ops.host_load(label_stream)
        facts, network = Net().create_graph(images)
        variables = facts.init()
        (scores,) = network.bind(variables).call(images)
        hits = ops.equal(ops.cast(ops.argmax(scores, dim=-1), popxl.int32), labels)
        accuracy_stream = addons.host_store(
            mean_of_all(ops.mean(ops.cast(hits, popxl.float32)))
        )
    return addons.TaskSession(
        [image_stream, label_stream],
        [accuracy_stream],
        variables,
        ir=ir,
        device_desc="ipu_hw",
    )


testing = testing_session(len(test_digits) // training.ir.replication_factor)
testing.load_from_session(training, report_missing="error")
with testing:
    accuracy = (
        100
        * run(
            testing, own_share(test_digits.images), own_share(test_digits.labels)
        ).flat[0]
    )
say_once(f"Accuracy on test set: {accuracy:.2f}%")
assert accuracy > 90
