"""AdamW as a module of our own, with a part of its state in float16; then a network
that learns to read digits by it.

    python tutorials/2_custom_optimiser/custom_optimiser.py

README.md beside this file tells the story. The file is also a notebook: each `# %%`
opens a cell.
"""

# %%
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers import Linear

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
title("1. A step is a graph")


class AdamW(addons.Module):
    """One step of AdamW on one variable, in place."""

    @popxl.in_sequence()
    def build(
        self,
        variable: popxl.TensorByRef,
        gradient: popxl.Tensor,
        *,
        rate: float | popxl.Tensor,
        decay: float | popxl.Tensor = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        m_dtype: popxl.dtype = popxl.float16,
        v_dtype: popxl.dtype = popxl.float32,
    ) -> None:
        zeros = partial(np.zeros, variable.shape)
        m = self.add_variable_input("m", zeros, m_dtype, by_ref=True)
        v = self.add_variable_input("v", zeros, v_dtype, by_ref=True)
        t = self.add_variable_input(
            "t", partial(np.zeros, ()), popxl.float32, by_ref=True
        )

        ops.var_updates.accumulate_moving_average_(m, gradient, beta1)
        ops.var_updates.accumulate_moving_average_square_(v, gradient, beta2)
        direction = ops.var_updates.adam_updater(
            m, v, variable, t, decay, beta1, beta2, epsilon
        )
        ops.scaled_add_(variable, direction, b=-rate)


ir = popxl.Ir()
with ir.main_graph:
    weight = popxl.variable(np.ones((2, 2)), popxl.float32, "weight")
    gradient = popxl.constant(np.full((2, 2), 0.1), popxl.float32, "gradient")
    facts, step = AdamW().create_graph(weight, gradient, rate=0.001)
    state = facts.init("weight")
    step.bind(state).call(weight, gradient)
print(step.print_schedule())

# %%
title("2. The numbers of one step")

with popxl.Session(ir, "ipu_hw") as session:
    session.run()
for tensor in (*state.tensors, weight):
    data = session.get_tensor_data(tensor)
    print(f"{tensor.name:8}  {data.dtype}  {data.flat[0]:.6f}")
np.testing.assert_allclose(
    session.get_tensor_data(weight), 1 - 0.001 * (1 + 0.01), rtol=1e-6
)

# %%
title("3. A number or a tensor")

with popxl.Ir().main_graph:
    spec = popxl.TensorSpec((2, 2), popxl.float32)
    _, step = AdamW().create_graph(
        spec, spec, rate=popxl.TensorSpec((), popxl.float32), decay=0.0
    )
    print(step.print_schedule())

# %%
title("4. A step for every variable")

BATCH = 32


class Net(addons.Module):
    """Four linear layers with gelu between them, from images (n, 28, 28) to ten scores
    for each."""

    def __init__(self):
        super().__init__()
        self.layers = addons.Module.from_list(
            [Linear(features) for features in (256, 256, 256, 10)]
        )

    def build(self, images: popxl.Tensor) -> popxl.Tensor:
        first, *others = self.layers
        x = first(images.reshape((-1, SIZE * SIZE)))
        for layer in others:
            x = layer(ops.gelu(x))
        return x


def add_steps(
    variables: addons.NamedTensors,
    gradients: Mapping[popxl.Tensor, popxl.Tensor],
    rate: popxl.Tensor,
    **settings: Any,
) -> addons.NamedTensors:
    """A step of AdamW for each of the variables, in the current graph. Only matrices
    decay. Returns the state."""
    adamw = AdamW(cache=True)  # gives the same graph for equal arguments
    states = {}
    for name, variable in variables.to_dict().items():
        gradient, decay = gradients[variable], 0.01 if variable.rank > 1 else 0.0
        facts, step = adamw.create_graph(
            variable, gradient, rate=rate, decay=decay, **settings
        )
        states[name] = facts.init(name)
        step.bind(states[name]).call(variable, gradient, rate)
    return addons.NamedTensors.from_dict(states)


class Training(NamedTuple):
    """A program that takes images, labels and a learning rate, improves the variables,
    and gives the loss."""

    session: popxl.Session
    inputs: list[popxl.HostToDeviceStream]
    loss: popxl.DeviceToHostStream
    variables: addons.NamedTensors
    state: addons.NamedTensors


def training_program(**settings: Any) -> Training:
    """`settings` are those of `AdamW`."""
    np.random.seed(42)  # the layers draw their first weights from here
    ir = popxl.Ir()
    with ir.main_graph:
        inputs = [
            popxl.h2d_stream((BATCH, SIZE, SIZE), popxl.float32, "images"),
            popxl.h2d_stream((BATCH,), popxl.int32, "labels"),
            popxl.h2d_stream((), popxl.float32, "rate"),
        ]
        images, labels, rate = map(ops.host_load, inputs)

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

        state = add_steps(variables, gradients, rate, **settings)
        loss_stream = addons.host_store(loss)
    return Training(popxl.Session(ir, "ipu_hw"), inputs, loss_stream, variables, state)


training = training_program()
step_graphs = [
    graph
    for graph in training.session.ir.main_graph.called_graphs
    if graph.name.startswith("AdamW")
]
print(
    f"{len(training.variables.tensors)} variables, {len(step_graphs)} graphs of a step"
)
print(training.state.layers[1])

# %%
title("5. A rate that falls")

RATE = 0.001
EPOCHS = 6

train_digits, test_digits = load()


def falling_rate(done: float) -> float:
    """Half a wave of the cosine: from `RATE` when nothing is done (0) to nothing when
    all is (1)."""
    return RATE * (1 + np.cos(np.pi * done)) / 2


def train(training: Training) -> float:
    """Shows all digits `EPOCHS` times, and returns the mean loss of the last time."""
    batches = Batches(train_digits, BATCH)
    count = EPOCHS * len(batches)
    losses: list[float] = []
    with training.session as session, tqdm(total=count) as bar:
        for _ in range(EPOCHS):
            for images, labels in batches:
                arrays = images, labels, falling_rate(len(losses) / count)
                losses.append(
                    float(
                        session.run(dict(zip(training.inputs, arrays, strict=True)))[
                            training.loss
                        ]
                    )
                )
                bar.set_description(f"loss {losses[-1]:.4f}", refresh=False)
                bar.update()
    return float(np.mean(losses[-len(batches) :]))


def accuracy(training: Training) -> float:
    """The share of the test digits, in percent, that a network with the trained
    variables reads correctly."""
    ir = popxl.Ir()
    with ir.main_graph:
        image_stream = popxl.h2d_stream(
            test_digits.images.shape, popxl.float32, "images"
        )
        images = ops.host_load(image_stream)
        facts, network = Net().create_graph(images)
        variables = facts.init()
        (scores,) = network.bind(variables).call(images)
        score_stream = addons.host_store(scores)
    session = popxl.Session(ir, "ipu_hw")
    trained = training.session.get_tensors_data(training.variables.tensors)
    partners = training.variables.to_mapping(variables)
    session.write_variables_data(
        {theirs: trained[ours] for ours, theirs in partners.items()}
    )
    with session:
        answers = session.run({image_stream: test_digits.images})[score_stream].argmax(
            axis=-1
        )
    return 100 * float(np.mean(answers == test_digits.labels))


loss, correct = train(training), accuracy(training)
print(f"Loss {loss:.3f}, accuracy on test set: {correct:.2f}%")
assert correct > 90

# %%
title("6. What fits into float16")

print("m        v        state    loss   accuracy")
for m_dtype, v_dtype, learns in (
    (popxl.float32, popxl.float32, True),
    (popxl.float16, popxl.float32, True),
    (popxl.float16, popxl.float16, False),
):
    variant = training_program(m_dtype=m_dtype, v_dtype=v_dtype)
    loss, correct = train(variant), accuracy(variant)
    size = sum(
        data.nbytes
        for data in variant.session.get_tensors_data(variant.state.tensors).values()
    )
    print(
        f"{m_dtype.name}  {v_dtype.name}  {size / 1e6:.2f} MB  {loss:5.3f}  "
        f"{correct:.2f}%"
    )
    assert (correct > 90) == learns

# %%
# half the smallest number of float16: what is not above it is rounded to zero
TINY = 2**-25
LEAST = {"m": TINY / (1 - 0.9), "v": np.sqrt(TINY / (1 - 0.999))}


def gradient_sizes(training: Training) -> np.ndarray:
    """For each weight and bias how large its gradients are: the root of their mean
    square, for which there is v."""
    sizes = []
    for name in training.variables.keys_flat():
        state = training.state[name]
        v, t = (
            training.session.get_tensor_data(tensor) for tensor in (state.v, state.t)
        )
        sizes.append(np.sqrt(v.ravel() / (1 - 0.999**t)))
    return np.concatenate(sizes)


def draw(sizes: np.ndarray) -> Any:
    """How many weights have gradients of which size, and which of them float16 takes
    note of."""
    from matplotlib import pyplot as plt  # here, so that the rest needs no matplotlib

    figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
    axis.hist(sizes, bins=np.geomspace(1e-7, 1, 100).tolist())
    for name, least in LEAST.items():
        axis.axvline(least, color="black")
        axis.text(
            1.1 * least,
            0.9,
            f"{name} in float16 →",
            transform=axis.get_xaxis_transform(),
        )
    axis.set(
        xscale="log", xlim=(1e-7, 1), xlabel="size of the gradients", ylabel="weights"
    )
    return figure


sizes = gradient_sizes(training)
for name, least in LEAST.items():
    print(
        f"{name} in float16 takes note of gradients above {least:.1e}: "
        f"{np.mean(sizes > least):.0%} of the weights"
    )

if find_spec("matplotlib"):
    picture = draw(sizes)
    if "--draw" in sys.argv:
        picture.savefig(Path(__file__).with_name("gradients.png"), dpi=110)
