# %% [markdown]
# # Pipelining
#
# A network in two parts, each on a device of its own, that train at the same time on
# different micro-batches. README.md beside this file tells the story.
#
#     python tutorials/4_pipelining/pipelining.py
#
# With `--draw` it also draws the pictures of the README anew.

# %%
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

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

MICRO_BATCHES = 8  # that go through the pipeline in a step
MICRO_BATCH_SIZE = 8
BATCH_SIZE = MICRO_BATCHES * MICRO_BATCH_SIZE
EPOCHS = 12
LEARNING_RATE = 0.2


def title(text: str) -> None:
    print(f"\n=== {text} ===\n")


# %% [markdown]
# ## 1. A place for every op

# %%
title("1. A place for every op")

ir = popxl.Ir()
with ir.main_graph:
    with popxl.ipu(0):
        number = ops.host_load(popxl.h2d_stream((), popxl.float32, "number"))
        more = (number + 1).copy_to_ipu(1)
    with popxl.ipu(1):
        addons.host_store(more * 2)
print(ir.main_graph)

# %% [markdown]
# ## 2. Stages

# %%
title("2. Stages")

ir = popxl.Ir()
ir.num_host_transfers = 6
with ir.main_graph:
    number_stream = popxl.h2d_stream((), popxl.float32, "number")
    result_stream = popxl.d2h_stream((), popxl.float32, "result")
    with addons.pipelined_execution(6) as pipeline:
        with pipeline.stage(0), popxl.ipu(0):
            number = ops.host_load(number_stream)
            more = (number + 1).copy_to_ipu(1)
        with pipeline.stage(1), popxl.ipu(1):
            ops.host_store(result_stream, more * 2)
print(ir.main_graph)

with popxl.Session(ir, "ipu_hw") as session:
    results = session.run({number_stream: np.arange(6, dtype=np.float32)})
print("\nresults:", results[result_stream])

# %% [markdown]
# ## 3. The schedule

# %%
title("3. The schedule")

# a device, when it starts, what it does, and on which micro-batch
Cell = tuple[int, int, str, int]


def one_after_the_other(micro_batches: int) -> list[Cell]:
    """Each micro-batch goes to the end and back before the next one starts."""
    path = [(0, "forward"), (1, "forward"), (1, "backward"), (0, "backward")]
    return [
        (device, len(path) * n + step, what, n)
        for n in range(micro_batches)
        for step, (device, what) in enumerate(path)
    ]


def pipelined(micro_batches: int) -> list[Cell]:
    """In cycle `c` stage `s` works on micro-batch `c - s`. In each cycle a device has
    time for two passes."""
    stages = [
        (0, 0, "forward"),
        (1, 0, "forward"),
        (1, 1, "backward"),
        (0, 1, "backward"),
    ]
    return [
        (device, 2 * (n + stage) + half, what, n)
        for n in range(micro_batches)
        for stage, (device, half, what) in zip((0, 1, 1, 2), stages, strict=True)
    ]


def busy(cells: list[Cell]) -> float:
    """The share of the time, up to the end, that the two devices have something to
    do."""
    return len(cells) / (2 * (1 + max(start for _, start, _, _ in cells)))


def draw(schedules: Mapping[str, list[Cell]]) -> Any:
    """A row for each device, time from left to right, and in each cell the number of
    the micro-batch."""
    from matplotlib import pyplot as plt  # here, so that the rest needs no matplotlib

    figure, axes = plt.subplots(
        len(schedules), 1, figsize=(8, 2.9), sharex=True, layout="constrained"
    )
    for axis, (name, cells) in zip(axes, schedules.items(), strict=True):
        for device, start, what, n in cells:
            colour = {"forward": "C0", "backward": "C1"}[what]
            axis.broken_barh(
                [(start, 1)], (device - 0.4, 0.8), color=colour, edgecolor="white"
            )
            axis.text(
                start + 0.5,
                device,
                str(n),
                ha="center",
                va="center",
                color="white",
                fontsize=8,
            )
        axis.set_title(f"{name}: blue forward, orange backward", loc="left", fontsize=9)
        axis.set(
            yticks=[0, 1], yticklabels=["IPU 0", "IPU 1"], xticks=[], ylim=(1.5, -0.5)
        )
        axis.margins(x=0.01)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    axes[-1].set_xlabel("time →")
    return figure


schedules = {
    "one after the other": one_after_the_other(MICRO_BATCHES),
    "pipelined": pipelined(MICRO_BATCHES),
}
for name, cells in schedules.items():
    print(f"{name}: the devices are busy for {busy(cells):.0%} of the time")
print(f"pipelined, with 64 micro-batches: {busy(pipelined(64)):.0%}")

if find_spec("matplotlib"):
    picture = draw(schedules)
    if "--draw" in sys.argv:
        picture.savefig(Path(__file__).with_name("schedule.png"), dpi=110)

# %% [markdown]
# ## 4. Training in a pipeline

# %%
title("4. Training in a pipeline")


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


class Features(addons.Module):
    """The first part, from images (..., 28, 28) to 512 numbers for each."""

    def __init__(self):
        super().__init__()
        self.fc1 = Linear(512)
        self.fc2 = Linear(512)

    def build(self, images: popxl.Tensor) -> popxl.Tensor:
        x = images.reshape((-1, SIZE * SIZE))
        return ops.gelu(self.fc2(ops.gelu(self.fc1(x))))


class Scores(addons.Module):
    """The second part, from there to ten scores for each image."""

    def __init__(self):
        super().__init__()
        self.fc3 = Linear(512)
        self.fc4 = Linear(10)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.fc4(ops.gelu(self.fc3(x)))


class Net(addons.Module):
    """Both parts in one, for a program without a pipeline."""

    def __init__(self):
        super().__init__()
        self.features = Features()
        self.scores = Scores()

    def build(self, images: popxl.Tensor) -> popxl.Tensor:
        return self.scores(self.features(images))


class Part(NamedTuple):
    """The two graphs of a part, its variables, and the means of their gradients."""

    forward: addons.GraphWithNamedArgs
    backward: addons.GraphWithNamedArgs
    variables: addons.NamedTensors
    means: addons.NamedTensors


def part(
    module: addons.Module, x: popxl.TensorSpec, gradient_of_x: bool, recompute: bool
) -> Part:
    """A part for inputs like `x`, on the current IPU."""
    facts, forward = module.create_graph(x)
    required = forward.graph.inputs[:1] if gradient_of_x else ()
    mean_facts, backward = addons.autodiff_with_accumulation(
        forward, forward.args.tensors, grads_required=required
    )
    if recompute:
        backward = addons.recompute_graph(backward)
    return Part(forward, backward, facts.init(), mean_facts.init())


class Program(NamedTuple):
    """A session with the handles that the host needs: what to feed, what to read, and
    the variables by name."""

    session: popxl.Session
    inputs: list[popxl.HostToDeviceStream]
    output: popxl.DeviceToHostStream
    variables: addons.NamedTensors

    def run(self, *arrays: np.ndarray) -> np.ndarray:
        """One run of the program: one array for each input, which is dealt out to
        micro-batches."""
        shares = {
            stream: array.reshape(self.session.host_shape(stream.shape))
            for stream, array in zip(self.inputs, arrays, strict=True)
        }
        return self.session.run(shares)[self.output]


def pipelined_program(
    recompute: bool, placement: Literal["auto", "one", "several"] = "auto"
) -> Program:
    """Takes a batch of images and labels, improves the variables by one step, gives the
    loss of each micro-batch."""
    np.random.seed(42)  # so that all training programs start with the same weights
    ir = popxl.Ir()
    ir.options.placement = placement
    ir.num_host_transfers = MICRO_BATCHES
    with ir.main_graph, popxl.in_sequence():
        images = popxl.h2d_stream(
            (MICRO_BATCH_SIZE, SIZE, SIZE), popxl.float32, "images"
        )
        labels = popxl.h2d_stream((MICRO_BATCH_SIZE,), popxl.int32, "labels")
        losses = popxl.d2h_stream((), popxl.float32, "losses")
        with popxl.ipu(0):
            first = part(
                Features(), images.spec, gradient_of_x=False, recompute=recompute
            )
        with popxl.ipu(1):
            second = part(
                Scores(),
                first.forward.graph.outputs[0].spec,
                gradient_of_x=True,
                recompute=False,
            )

        with addons.pipelined_execution(MICRO_BATCHES) as pipeline:
            with pipeline.stage(0), popxl.ipu(0):
                first_call = first.forward.bind(first.variables).call_with_info(
                    ops.host_load(images)
                )
                x = first_call.outputs[0].copy_to_ipu(1)

            with pipeline.stage(1), popxl.ipu(1):
                second_call = second.forward.bind(second.variables).call_with_info(x)
                loss, d_scores = addons.cross_entropy_with_grad(
                    second_call.outputs[0], ops.host_load(labels)
                )
                ops.host_store(losses, loss)
                activations = second.backward.grad_graph_info.inputs_dict(second_call)
                (d_x,) = second.backward.bind(second.means).call(
                    d_scores, args=activations
                )
                d_x = d_x.copy_to_ipu(0)

            with pipeline.stage(2), popxl.ipu(0):
                activations = pipeline.stash_and_restore_activations(
                    first_call, first.backward.grad_graph_info
                )
                first.backward.bind(first.means).call(d_x, args=activations)

        for ipu, each in enumerate((first, second)):
            with popxl.ipu(ipu):
                for variable, gradient in zip(
                    each.variables.tensors, each.means.accum.tensors, strict=True
                ):
                    ops.scaled_add_(variable, gradient, b=-LEARNING_RATE)
                ops.var_updates.accumulator_zero_(each.means.mean_accum_counter)
    variables = addons.NamedTensors(features=first.variables, scores=second.variables)
    return Program(popxl.Session(ir, "ipu_hw"), [images, labels], losses, variables)


def stashes(program: Program) -> list[popxl.Tensor]:
    """The rings of slots in which activations wait."""
    return [
        t for t in program.session.ir.main_graph.tensors if t.name.startswith("stash")
    ]


training = pipelined_program(recompute=False)
for stream in (*training.inputs, training.output):
    print(
        f"{stream.tensor_id}: {stream.shape} in a stage, "
        f"{training.session.host_shape(stream.shape)} on the host"
    )
print("stashes:", *(stash.shape for stash in stashes(training)))

# %% [markdown]
# ## 5. Recomputation

# %%
title("5. Recomputation")

with popxl.Ir().main_graph:
    _, forward = Features().create_graph(
        popxl.TensorSpec((MICRO_BATCH_SIZE, SIZE, SIZE), popxl.float32)
    )
    _, backward = addons.autodiff_with_accumulation(forward, forward.args.tensors)
    print(addons.recompute_graph(backward).print_schedule())

recomputing = pipelined_program(recompute=True)
print("\nstashes:", *(stash.shape for stash in stashes(recomputing)))
for name, program in {
    "without recomputation": training,
    "with recomputation": recomputing,
}.items():
    print(f"{name}: {sum(4 * stash.nelms for stash in stashes(program)) / 1e3:.0f} kB")

# %% [markdown]
# ## 6. The same numbers

# %%
title("6. The same numbers")


def straight_program() -> Program:
    """The same step of training without a pipeline: the whole network, and the whole
    batch at once."""
    np.random.seed(42)
    ir = popxl.Ir()
    with ir.main_graph:
        images = popxl.h2d_stream((BATCH_SIZE, SIZE, SIZE), popxl.float32, "images")
        labels = popxl.h2d_stream((BATCH_SIZE,), popxl.int32, "labels")
        facts, forward = Net().create_graph(images.spec)
        backward = addons.autodiff(forward, grads_required=forward.args.tensors)
        variables = facts.init()

        forward_call = forward.bind(variables).call_with_info(ops.host_load(images))
        loss, d_scores = addons.cross_entropy_with_grad(
            forward_call.outputs[0], ops.host_load(labels)
        )
        gradients = backward.call(
            d_scores, args=backward.grad_graph_info.inputs_dict(forward_call)
        )
        for variable, gradient in zip(variables.tensors, gradients, strict=True):
            ops.scaled_add_(variable, gradient, b=-LEARNING_RATE)
        loss_stream = addons.host_store(loss)
    return Program(
        popxl.Session(ir, "ipu_hw"), [images, labels], loss_stream, variables
    )


def weights_after(program: Program, steps: int) -> list[np.ndarray]:
    """The variables after so many steps from the start, sorted by name."""
    with program.session as session:
        for images, labels in islice(
            Batches(training_digits, BATCH_SIZE, seed=1), steps
        ):
            program.run(images, labels)
    return list(session.get_tensors_data(program.variables.tensors).values())


training_digits, test_digits = load()
expected = weights_after(straight_program(), steps=5)
for name, program in {
    "a pipeline": pipelined_program(False),
    "a pipeline that recomputes": recomputing,
}.items():
    weights = weights_after(program, steps=5)
    same = all(
        np.allclose(ours, theirs, atol=1e-5)
        for ours, theirs in zip(weights, expected, strict=True)
    )
    print(f"{name}: the same weights as without: {same}")
    assert same

# %% [markdown]
# ## 7. Training and testing

# %%
title("7. Training and testing")


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
    """Takes so many images, gives ten scores for each."""
    ir = popxl.Ir()
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
testing = test_program(len(test_digits))
copy_variables(training, testing)
with testing.session:
    scores = testing.run(test_digits.images)
accuracy = 100 * np.mean(scores.argmax(axis=-1) == test_digits.labels)
print(f"Accuracy on test set: {accuracy:.2f}%")
assert accuracy > 90

# %% [markdown]
# ## 8. Where the stages run

# %%
title("8. Where the stages run")

spread = pipelined_program(recompute=False, placement="several")
same = all(
    np.allclose(ours, theirs, atol=1e-5)
    for ours, theirs in zip(weights_after(spread, 5), expected, strict=True)
)
print(f"on several devices: the same weights as without: {same}")
assert same

with spread.session as session, session.recording() as timeline:
    spread.run(*next(iter(Batches(training_digits, BATCH_SIZE, seed=1))))
print("devices:", ", ".join(sorted(timeline.devices())))
print(timeline)
if "--draw" in sys.argv:
    timeline.picture().save(Path(__file__).with_name("timeline.svg"))
