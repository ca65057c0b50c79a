# %% [markdown]
# # Plan a run for 512 chips on a laptop
#
# A training step of a Llama of 34 billion parameters, for 512 H100: does it fit, what
# should it recompute, is it right, what is sent, how long does it take, and what does a
# change cost? Nothing runs, and no GPU is needed. README.md beside this file tells the
# story.
#
#     pip install -e '.[gpu]'   # XLA's compiler for GPUs, without drivers
#     python tutorials/13_plan_512_chips/plan.py

# %%
import math
import os
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("POPXL_CPU_DEVICES", "4")  # for a small plan without the extra

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.__main__ import main as popxl_command
from popxl.analysis.checking import check
from popxl_addons.layers import LanguageConfig, LanguageModel, NextTokenLoss
from popxl_addons.optimizers import adamw

# %% [markdown]
# ## 1. The run


# %%
class Run(NamedTuple):
    """A model, and how it is trained on which machine."""

    model: LanguageConfig
    axes: dict[str, int]
    texts: int  # of each replica
    budget: str  # for the memory of a chip
    target: str


def llama(**sizes: int) -> LanguageConfig:
    parts = dict(
        norm="rms", activation="swiglu", bias=False, mlp_bias=False, tied=False
    )
    return LanguageConfig(rotary=1e4, **parts, **sizes)


RUN = Run(
    llama(
        vocabulary=32000,
        width=8192,
        layers=48,
        heads=64,
        key_heads=8,
        hidden=22016,
        context=4096,
    ),
    axes={"data": 64, "tensor": 8},
    texts=2,
    budget="35 GB",
    target="gpu h100:512",
)


def build(memory, run=RUN, statistics=False):
    """A training step with a memory plan or policy; maybe with a mistake."""
    ir = popxl.Ir(axes=run.axes)
    ir.options.calledGraphs = "rolled"  # layers are iterations of a loop
    length = run.model.context + 1
    with ir.main_graph:
        stream = popxl.h2d_stream((run.texts, length), popxl.int32, "tokens")
        tokens = ops.host_load(stream)
        step = addons.train_step(
            NextTokenLoss(LanguageModel(run.model, tensor="tensor")),
            tokens,
            optimizer=partial(adamw, lr=3e-4, clip_norm=1.0),
            precision=addons.MixedPrecision(popxl.bfloat16),
            memory=memory,
            sharded=True,  # the optimiser's state is divided along "data"
        )
        addons.host_store(step.loss)
        if statistics:
            mean = popxl.variable(0.0, popxl.float32, "mean_token")
            now = ops.mean(tokens.astype(popxl.float32))
            now = ops.collectives.replicated_all_reduce(now, "mean", group="tensor")
            ops.scaled_add_(mean, now - mean, b=0.01)
    return ir


ir = build("products")
weights = [v for v in ir.main_graph.variables if not v.name.startswith("optimizer")]
count = sum(math.prod(v.shape_on_host) for v in weights)
print(
    f"{count / 1e9:.1f} billion parameters on {ir.replication_factor} chips: {ir.axes}"
)

# %% [markdown]
# ## 2. A budget

# %%
for policy in ("everything", "products", "nothing"):
    memory = build(policy).memory()
    print(f"{policy:10} {memory.device / 1e9:5.1f} GB on each chip, op by op")
folder = Path(tempfile.mkdtemp())
ir.picture().save(folder / "step.svg")
print("files are in", folder)

# %% [markdown]
# ## 3. A check

# %%
print("findings:", len(check(ir).findings))
for finding in check(build("products", statistics=True)).findings:
    print(f"{finding.category}: {finding.tensor} along {', '.join(finding.axes)}")

# %% [markdown]
# ## 4. What is sent

# %%
communication = ir.communication()
for kind, (times, size) in communication.totals.items():
    print(f"{kind:14} {times:4} times, {size / 1e9:6.1f} GB of each chip")

# %% [markdown]
# ## 5. A plan within the budget

# %%
SMALL = Run(
    llama(vocabulary=64, width=32, layers=2, heads=4, hidden=96, context=64),
    axes={"data": 2, "tensor": 2},
    texts=8,
    budget="2.3 MB",
    target="ipu_model",  # CPUs
)
has_compiler = any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin")))
if not has_compiler:
    print("The extra `gpu` is not installed: a small model is planned for CPUs.")
run = RUN if has_compiler else SMALL

found = addons.plan_memory(partial(build, run=run), run.budget, run.target, told=print)
print(found)
print("within the budget:", found.peak <= found.budget)

# %% [markdown]
# ## 6. Time, and collectives by line

# %%
print(found.cost)

# %% [markdown]
# ## 7. A diff

# %%
before, after = folder / "everything.json", folder / "plan.json"
found.everything_cost.save_budget(before)
found.cost.save_budget(after)
popxl_command(["diff", str(before), str(after)])
