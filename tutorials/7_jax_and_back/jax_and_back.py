"""From a JAX function to an op and back: a network in JAX with an op of our own,
trained here, looked at there, saved.

    python tutorials/7_jax_and_back/jax_and_back.py

README.md beside this file tells the story. The file is also a notebook: each `# %%`
opens a cell.
"""

# %%
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import popxl
import popxl_addons as addons
import read_digits
from popxl import ops
from popxl_addons.optimizers import AdamOptimizerStep
from ternary import Ternary, ternary

# A notebook has no file, and runs in the folder it is in. digits.py, in the folder
# above, is shared by the tutorials.
sys.path.append(
    str(
        Path(__file__).resolve().parents[1]
        if "__file__" in globals()
        else Path.cwd().parent
    )
)
from digits import SIZE, Batches, load


def title(text: str) -> None:
    print(f"\n=== {text} ===\n")


# %%
title("1. An op of our own")

numbers = np.array([-2.0, -0.7, 0.2, 0.7], np.float32)
print("w:              ", numbers)
print("rounded:        ", ternary(numbers, step=1.0))
print("JAX's gradient: ", jax.grad(lambda w: ternary(w, step=1.0).sum())(numbers))

# %%
# as Ternary, but with JAX's gradient
PlainTernary = popxl.OpKind("PlainTernary", ternary)


def rounded(w: popxl.Tensor, kind: popxl.OpKind) -> popxl.Tensor:
    return kind(w, step=1.0)


ir = popxl.Ir()
spec = popxl.TensorSpec(numbers.shape, popxl.float32)
with_plain, with_ternary = (
    ir.create_graph(rounded, spec, kind) for kind in (PlainTernary, Ternary)
)
for graph in (with_plain, with_ternary):
    print(popxl.transforms.autodiff(graph).graph)

# %%
title("2. A network written in JAX")


@jax.jit
def hidden(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def network(images: jax.Array, weights: list[jax.Array]) -> jax.Array:
    x = images.reshape(-1, SIZE * SIZE)
    *inner, last = weights
    for w in inner:
        x = hidden(x, w)
    return x @ last


class Net(addons.Module):
    """`network` with weights that are -step, 0 or step, from images (n, 28, 28) to ten
    scores for each."""

    def build(self, images: popxl.Tensor) -> popxl.Tensor:
        weights = [
            self.weight("w1", SIZE * SIZE, 256),
            self.weight("w2", 256, 256),
            self.weight("w3", 256, 256),
            self.weight("w4", 256, 10),
        ]
        return popxl.from_jax(network)(images, weights)

    def weight(self, name: str, n: int, features: int) -> popxl.Tensor:
        step = n**-0.5  # keeps the size of what passes through
        w = self.add_variable_input(
            name, partial(np.random.normal, 0, step, (n, features)), popxl.float32
        )
        return Ternary(w, step=step)


with popxl.Ir().main_graph:
    _, reader = Net().create_graph(popxl.TensorSpec((SIZE, SIZE), popxl.float32))
print(reader.graph)

# %%
title("3. Training")

BATCH = 32
EPOCHS = 6

train_digits, test_digits = load()


class Training(NamedTuple):
    """A program that takes images and labels, improves the variables, and gives the
    loss."""

    ir: popxl.Ir
    inputs: list[popxl.HostToDeviceStream]
    loss: popxl.DeviceToHostStream
    variables: addons.NamedTensors


def training_program() -> Training:
    np.random.seed(42)  # the first weights are drawn from here
    ir = popxl.Ir()
    with ir.main_graph:
        inputs = [
            popxl.h2d_stream((BATCH, SIZE, SIZE), popxl.float32, "images"),
            popxl.h2d_stream((BATCH,), popxl.int32, "labels"),
        ]
        images, labels = map(ops.host_load, inputs)

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

        adamw = AdamOptimizerStep(cache=True)
        for name, variable in variables.to_dict().items():
            facts, step = adamw.create_graph(
                variable, gradients[variable], lr=0.001, weight_decay=0.0
            )
            step.bind(facts.init(name)).call(variable, gradients[variable])
        loss_stream = addons.host_store(loss)
    return Training(ir, inputs, loss_stream, variables)


training = training_program()
batches = Batches(train_digits, BATCH)
losses: list[float] = []
with (
    popxl.Session(training.ir, "ipu_hw") as session,
    tqdm(total=EPOCHS * len(batches)) as bar,
):
    for _ in range(EPOCHS):
        for arrays in batches:
            losses.append(
                float(
                    session.run(dict(zip(training.inputs, arrays, strict=True)))[
                        training.loss
                    ]
                )
            )
            bar.set_description(f"loss {losses[-1]:.4f}", refresh=False)
            bar.update()
weights = {
    name: session.get_tensor_data(variable)
    for name, variable in training.variables.to_dict().items()
}
print(f"loss of the first and the last step: {losses[0]:.1f}, {losses[-1]:.1f}")

# %%
title("4. A graph becomes a JAX function")

rounded_in_jax = popxl.to_jax(with_ternary)
print("the gradient of our op:", jax.grad(lambda w: rounded_in_jax(w).sum())(numbers))

# %%
scores_of = popxl.to_jax(reader.graph)
print(scores_of)


def read(image: jax.Array) -> jax.Array:
    """Ten scores for an image."""
    return scores_of(image, **weights)[0]


answers = jax.jit(jax.vmap(read))(test_digits.images).argmax(axis=-1)
correct = 100 * np.mean(answers == test_digits.labels)
print(f"Accuracy on test set: {correct:.2f}%")
assert correct > 90


# %%
def advantage(image: jax.Array, label: jax.Array) -> jax.Array:
    """How far the score of the label is above the mean of all."""
    scores = read(image)
    return scores[label] - scores.mean()


influence = jax.jit(jax.vmap(jax.grad(advantage)))(
    test_digits.images, test_digits.labels
)
print("influence:", influence.shape)


def draw(influence: np.ndarray) -> Any:
    """For each digit its mean image, and the mean influence of the pixels on its
    score."""
    from matplotlib import pyplot as plt  # here, so that the rest needs no matplotlib

    figure, axes = plt.subplots(2, 10, figsize=(10, 2.1), layout="constrained")
    for digit, (above, below) in enumerate(axes.T):
        chosen = test_digits.labels == digit
        mean = influence[chosen].mean(axis=0)
        above.imshow(
            test_digits.images[chosen].mean(axis=0),
            cmap="gray_r",
            interpolation="nearest",
        )
        most = abs(mean).max()
        below.imshow(mean, cmap="RdBu", vmin=-most, vmax=most, interpolation="nearest")
        above.axis("off")
        below.axis("off")
    return figure


if find_spec("matplotlib"):
    picture = draw(np.asarray(influence))
    if "--draw" in sys.argv:
        picture.savefig(Path(__file__).with_name("influence.png"), dpi=80)

# %%
title("5. A program becomes a JAX function")

again = training_program()  # with the same first weights; there is no session of it
step = popxl.to_jax(again.ir.main_graph)


@jax.jit
def epoch(variables: dict[str, jax.Array], batches: dict[str, jax.Array]) -> Any:
    def one(variables: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
        stored, changed = step(**variables, **batch)
        return variables | changed, stored

    return jax.lax.scan(one, variables, batches)


images, labels = map(np.stack, zip(*Batches(train_digits, BATCH), strict=True))
variables, stored = epoch(step.variables(), {"images": images, "labels": labels})
for name, values in stored.items():
    # The last digit of a sum may decide which value a weight is rounded to.
    print(
        f"{name}: {len(values)} values, the same as before:",
        np.allclose(values, losses[: len(values)], atol=1e-2),
    )

# %%
title("6. A program in a file")


def reading_program() -> popxl.Ir:
    """Takes all images of the test digits, and gives their scores."""
    ir = popxl.Ir()
    with ir.main_graph:
        images = ops.host_load(
            popxl.h2d_stream(test_digits.images.shape, popxl.float32, "images")
        )
        _, network = Net().create_graph(images)
        variables = {
            name: popxl.variable(data, name=name) for name, data in weights.items()
        }
        (scores,) = network.bind(addons.NamedTensors.from_dict(variables)).call(images)
        addons.host_store(scores)
    return ir


ir = reading_program()
with tempfile.TemporaryDirectory() as folder:
    ir.save(Path(folder, "digits.popxl"))
    loaded = popxl.Ir.load(Path(folder, "digits.popxl"))
    print("the same program:", str(loaded) == str(ir))

    start = time.perf_counter()
    session = popxl.Session(loaded, "ipu_hw")
    print(f"compiled in {time.perf_counter() - start:.2f} s")

    session.save(Path(folder, "digits.session"))
    print("\nin a process of its own:")
    command = [
        sys.executable,
        read_digits.__file__,
        str(Path(folder, "digits.session")),
    ]
    print(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout,
        end="",
    )
