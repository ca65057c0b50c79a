# %% [markdown]
# # A language model
#
# A small GPT learns from Python's own documentation, resumes from a checkpoint, and
# writes. Then the same program runs sharded over four replicas, in bfloat16, and as a
# pipeline, and is compiled for sixteen chips that are not here. README.md beside this
# file tells the story.
#
#     python tutorials/11_language_model/language_model.py

# %%
import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

import popxl
import popxl_addons as addons

# gpt.py and pipeline.py lie beside this file. A notebook has no file, and runs in the
# folder it lies in.
sys.path.append(str(Path(globals().get("__file__", "notebook")).resolve().parent))
import gpt
import pipeline

parser = argparse.ArgumentParser(
    description="Train a small GPT on Python's documentation."
)
parser.add_argument(
    "--quick",
    action="store_true",
    help="a tiny model and few steps, to see that all of it runs",
)
parser.add_argument(
    "--steps",
    type=int,
    default=600,
    help="how many steps of training (default: %(default)s)",
)
options, _ = parser.parse_known_args()
if options.steps < 10:  # five after the checkpoint are compared
    parser.error(f"--steps is {options.steps}; expected 10 or more")

CONFIG = gpt.Config(steps=options.steps)
if options.quick:
    CONFIG = gpt.Config(width=32, layers=2, length=32, steps=12)
TARGET = "tpu v5e:4x4"


def title(text: str) -> None:
    print(f"\n=== {text} ===\n")


# %% [markdown]
# ## 1. A text

# %%
title("1. A text")
print(f"{len(gpt.TEXT)} characters, {len(np.unique(gpt.TEXT))} different ones")
tokens = gpt.batch(CONFIG, step=0)
print("a batch:", tokens.shape, tokens.dtype)

# %% [markdown]
# ## 2. A model

# %%
title("2. A model")
with popxl.Ir().main_graph:
    text = popxl.TensorSpec((1, CONFIG.length), popxl.int32)
    facts, model = gpt.GPT(replace(CONFIG, layers=1)).create_graph(text)
print("variables of a model of one block:", *facts.to_dict(), sep="\n  ")

# %% [markdown]
# ## 3. Training, and going on from a checkpoint

# %%
title("3. Training, and going on from a checkpoint")
checkpoint = tempfile.mkdtemp(prefix="gpt_") + "/halfway"
half = CONFIG.steps // 2
with gpt.training(CONFIG) as session:
    losses = gpt.train(session, CONFIG, half)
    session.save_checkpoint(checkpoint)
    losses += gpt.train(session, CONFIG, CONFIG.steps)
    print(f"loss in the first step: {losses[0]:.2f}, in the last: {losses[-1]:.2f}")
    written = gpt.sample(session, CONFIG, "The ", 40 if options.quick else 400)

with gpt.training(CONFIG) as session:
    session.load_checkpoint(checkpoint, report_missing="error")
    resumed = gpt.train(session, CONFIG, half + 5)
print(
    "the same losses after a restart, bit for bit:", resumed == losses[half : half + 5]
)

# %% [markdown]
# ## 4. Writing

# %%
title("4. Writing")
print(written)

# %% [markdown]
# ## 5. The same program in other ways

# %%
title("5. The same program in other ways")
bfloat16 = addons.MixedPrecision(popxl.bfloat16, keep=("norm",))
expected = losses[half : half + 3]


def compare(name: str, found: list[float], near: float) -> None:
    print(
        f"{name}: the same losses to {near:g}: "
        f"{np.allclose(found, expected, rtol=near, atol=0)}"
    )


with gpt.training(CONFIG, replicas=4, sharded=True) as session:
    session.load_checkpoint(checkpoint, report_missing="error")
    weight = session.state.model.blocks[0].mlp.up.weight
    print(
        f"the weight {weight.shape} is a quarter on each replica: "
        f"{weight.piece.shape == (weight.nelms // 4,)}"
    )
    compare("on four replicas, sharded", gpt.train(session, CONFIG, half + 3), 1e-4)

with gpt.training(CONFIG, precision=bfloat16) as session:
    session.load_checkpoint(checkpoint, report_missing="error")
    compare("in bfloat16", gpt.train(session, CONFIG, half + 3), 1e-2)

with pipeline.pipelined(CONFIG) as session:
    session.load_checkpoint(checkpoint, report_missing="error")
    batches = [gpt.batch(CONFIG, step) for step in range(half, half + 3)]
    compare("as a pipeline", pipeline.train(session, CONFIG, batches), 1e-4)

# %% [markdown]
# ## 6. Chips that are not here

# %%
title("6. Chips that are not here")
try:
    far = gpt.training(
        CONFIG, replicas=16, sharded=True, precision=bfloat16, device=TARGET
    )
except popxl.errors.PopxlError as missing:
    print(f"not compiled: {missing}")
else:
    memory, cost = far.memory(), far.cost()
    print(f"for {TARGET}: {len(memory.devices)} chips")
    print(
        f"a chip holds {memory.variables / 1e6:.2f} MB of variables, and needs "
        f"{memory.temporaries / 1e6:.2f} MB more"
    )
    print(f"a step takes some {cost.cycles} cycles, in {cost.kernels} kernels")
