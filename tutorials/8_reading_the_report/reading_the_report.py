"""What a program needs, before and after it is compiled; and why a graph that is called
often pays.

    python tutorials/8_reading_the_report/reading_the_report.py

README.md beside this file tells the story. The file is also a notebook: each `# %%`
opens a cell.
"""

# %%
import sys
from dataclasses import dataclass
from gc import collect
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.ops.call import CallSiteInfo
from popxl_addons.layers import LayerNorm, Linear

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

BATCH = 32
WIDTH = 32
HEADS = 2
RATE = 0.02


def title(text: str) -> None:
    print(f"\n=== {text} ===\n")


# %%
title("1. A deep network, nested or outlined")


class Embed(addons.Module):
    """From images (n, 28, 28) to what the blocks work on: a row of WIDTH for each row
    of pixels, (n * 28, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(WIDTH)

    def build(self, images: popxl.Tensor) -> popxl.Tensor:
        return self.linear(images.reshape((-1, SIZE)))


class Block(addons.Module):
    """A block of a transformer: the rows of an image look at each other, then each at
    itself."""

    def __init__(self):
        super().__init__()
        self.norms = addons.Module.from_list([LayerNorm(), LayerNorm()])
        self.qkv, self.out = Linear(3 * WIDTH), Linear(WIDTH)
        self.up, self.down = Linear(2 * WIDTH), Linear(WIDTH)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = x + self.attend(self.norms[0](x)) * 0.2
        return x + self.down(ops.gelu(self.up(self.norms[1](x)))) * 0.2

    def attend(self, x: popxl.Tensor) -> popxl.Tensor:
        heads = (
            t.reshape((-1, SIZE, HEADS, WIDTH // HEADS))
            for t in ops.split(self.qkv(x), 3, axis=-1)
        )
        q, k, v = (t.transpose((0, 2, 1, 3)) for t in heads)
        shares = ops.softmax(
            q @ k.transpose((0, 1, 3, 2)) * (WIDTH // HEADS) ** -0.5, -1
        )
        return self.out((shares @ v).transpose((0, 2, 1, 3)).reshape(x.shape))


class Blocks(addons.Module):
    """Blocks, one after the other, all written into one graph."""

    def __init__(self, count: int):
        super().__init__()
        self.blocks = addons.Module.from_list([Block() for _ in range(count)])

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Scores(addons.Module):
    """From what the blocks have made of the images to ten scores for each."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = LayerNorm(), Linear(10)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.linear(self.norm(x).reshape((-1, SIZE * WIDTH)))


class Part:
    """A graph of the network and its gradient, to be called as often as one likes."""

    def __init__(self, module: addons.Module, x: popxl.Tensor, recompute: bool = False):
        self.facts, self.forward = module.create_graph(x)
        wanted = (self.forward.graph.inputs[0], *self.forward.args.tensors)
        backward = addons.autodiff(self.forward, grads_required=wanted)
        self.backward = addons.recompute_graph(backward) if recompute else backward

    def call(self, x: popxl.Tensor, variables: addons.NamedTensors) -> CallSiteInfo:
        return self.forward.bind(variables).call_with_info(x)

    def learn(
        self, call: CallSiteInfo, gradient: popxl.Tensor, variables: addons.NamedTensors
    ) -> popxl.Tensor:
        """Improves the variables of a call, from the gradient of its result. Returns
        the gradient of its `x`."""
        info = self.backward.grad_graph_info
        back = self.backward.call_with_info(gradient, args=info.inputs_dict(call))
        gradients = info.fwd_parent_ins_to_grad_parent_outs(call, back)
        for variable in variables.tensors:
            ops.scaled_add_(variable, gradients[variable], b=-RATE)
        return gradients[call.inputs[0]]


class Network:
    """So many blocks, each graph of which holds `in_a_graph`: with 1 the block is
    outlined, with all it is nested."""

    def __init__(
        self,
        images: popxl.Tensor,
        layers: int,
        in_a_graph: int = 1,
        recompute: bool = False,
    ):
        self.variables = addons.NamedTensors()
        self.calls: list[tuple[Part, CallSiteInfo, addons.NamedTensors]] = []
        x = self.add("embed", Part(Embed(), images), images)
        blocks = Part(Blocks(in_a_graph), x, recompute)
        for number in range(layers // in_a_graph):
            x = self.add(f"blocks{number}", blocks, x)
        self.scores = self.add("scores", Part(Scores(), x), x)

    def add(self, name: str, part: Part, x: popxl.Tensor) -> popxl.Tensor:
        """Calls a part, with variables of its own."""
        variables = part.facts.init(name)
        self.variables.insert(name, variables)
        self.calls.append((part, part.call(x, variables), variables))
        return self.calls[-1][1].outputs[0]

    def learn(self, gradient: popxl.Tensor) -> None:
        """Goes back through all calls."""
        for part, call, variables in reversed(self.calls):
            gradient = part.learn(call, gradient, variables)


@dataclass
class Program:
    """An Ir with what the host needs of it."""

    ir: popxl.Ir
    inputs: list[popxl.HostToDeviceStream]
    output: popxl.DeviceToHostStream
    variables: addons.NamedTensors

    def run(self, session: popxl.Session, *arrays: np.ndarray) -> np.ndarray:
        """One run: an array for each input, in order; the result is its output."""
        return session.run(dict(zip(self.inputs, arrays, strict=True)))[self.output]


def training_program(
    layers: int, in_a_graph: int = 1, recompute: bool = False
) -> Program:
    """Takes images and labels, takes a step downhill, gives the loss."""
    np.random.seed(42)  # the layers draw their first weights from here
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        images = popxl.h2d_stream((BATCH, SIZE, SIZE), popxl.float32, "images")
        labels = popxl.h2d_stream((BATCH,), popxl.int32, "labels")
        network = Network(ops.host_load(images), layers, in_a_graph, recompute)
        loss, gradient = addons.cross_entropy_with_grad(
            network.scores, ops.host_load(labels)
        )
        network.learn(gradient)
        return Program(ir, [images, labels], addons.host_store(loss), network.variables)


def test_program(layers: int, count: int) -> Program:
    """Takes images, gives ten scores for each."""
    ir = popxl.Ir()
    with ir.main_graph:
        images = popxl.h2d_stream((count, SIZE, SIZE), popxl.float32, "images")
        network = Network(ops.host_load(images), layers)
        return Program(
            ir, [images], addons.host_store(network.scores), network.variables
        )


for in_a_graph in (12, 1):
    main = training_program(12, in_a_graph).ir.main_graph
    sizes = [len(graph.ops) for graph in main.called_graphs]
    print(
        f"{in_a_graph:2} blocks in a graph: {len(main.ops)} ops in the main graph, "
        f"{sizes} in those that it calls"
    )

# %%
title("2. Before anything is compiled")

LAYERS = 32

training = training_program(LAYERS)
print(training.ir.memory())

# %%
title("3. The report, line by line")

session = popxl.Session(training.ir, "ipu_hw")
report = session.report
print(report)

# %%
title("4. What outlining saves")

COUNTS = (1, 2, 4) if "--quick" in sys.argv else (4, 16, 48)


def price(layers: int, in_a_graph: int) -> tuple[float, float]:
    """Seconds to compile a program, and MB of its temporaries."""
    collect()  # what another session still holds would not be compiled again
    program = training_program(layers, in_a_graph)
    report = popxl.Session(program.ir, "ipu_hw").report
    return report.seconds, report.memory.temporaries / 1e6


del session
prices = {
    "nested": [price(layers, in_a_graph=layers) for layers in COUNTS],
    "outlined": [price(layers, in_a_graph=1) for layers in COUNTS],
}
for number, what in enumerate(("seconds to compile", "MB of temporaries")):
    print(f"{what:18}", *(f"{layers:2} layers" for layers in COUNTS))
    for name, found in prices.items():
        print(f"  {name:16}", *(f"{pair[number]:9.1f}" for pair in found))


def draw() -> Any:
    """Both prices over the number of layers."""
    from matplotlib import pyplot as plt  # here, so that the rest needs no matplotlib

    figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
    for number, what in enumerate(("seconds to compile", "MB of temporaries")):
        for (name, found), style in zip(prices.items(), ("s-", "o-"), strict=True):
            axes[number].plot(
                COUNTS, [pair[number] for pair in found], style, label=name
            )
        axes[number].set(title=what, xlabel="layers", xticks=COUNTS, ylim=(0, None))
    axes[0].legend(frameon=False)
    return figure


if find_spec("matplotlib"):
    picture = draw()
    if "--draw" in sys.argv:
        picture.savefig(Path(__file__).with_name("prices.svg"))

# %%
title("5. Computed again instead of kept")

training = training_program(LAYERS, recompute=True)
session = popxl.Session(training.ir, "ipu_hw")
again = session.report

for name, each in (("kept", report), ("computed again", again)):
    held = max(moment.held for moment in each.memory.moments)
    print(
        f"{name:15} {held / 1e6:5.1f} MB between segments at most, "
        f"{each.graphs[2].runs} forward runs of the block"
    )
assert again.memory.temporaries < report.memory.temporaries / 4
if "--draw" in sys.argv:
    report.memory.picture().save(Path(__file__).with_name("kept.svg"))
    again.memory.picture().save(Path(__file__).with_name("again.svg"))

# %%
title("6. When it runs")

EPOCHS = 2

train_digits, test_digits = load()
batches = Batches(train_digits, BATCH)

with session:
    for epoch in range(1, EPOCHS + 1):
        losses = [
            training.run(session, *batch)
            for batch in tqdm(batches, f"epoch {epoch}", leave=False)
        ]
        print(f"epoch {epoch}: loss {np.mean(losses):.2f}")
    with session.recording() as timeline:
        training.run(session, *next(iter(batches)))

print(timeline)
if "--draw" in sys.argv:
    timeline.picture().save(Path(__file__).with_name("timeline.svg"))

# %%
title("7. Digits that it has not seen")

testing = test_program(LAYERS, len(test_digits))
trained = session.get_tensors_data(training.variables.tensors)
partners = training.variables.to_mapping(testing.variables)
with popxl.Session(testing.ir, "ipu_hw") as session:
    session.write_variables_data(
        {theirs: trained[ours] for ours, theirs in partners.items()}
    )
    answers = testing.run(session, test_digits.images).argmax(axis=-1)
correct = 100 * np.mean(answers == test_digits.labels)
print(f"Accuracy on test set: {correct:.2f}%")
assert correct > 90
