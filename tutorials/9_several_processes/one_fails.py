# %% [markdown]
# # One fails
#
# Two processes add up numbers until one of them fails. README.md beside this file tells
# the story.
#
#     poprun --num-instances 2 --num-replicas 4 \
#         python tutorials/9_several_processes/one_fails.py

# %%
import numpy as np

import popdist
import popxl
import popxl_addons as addons
from popxl import ops

STEPS = 10


def numbers_of_step(step: int, count: int) -> np.ndarray:
    """The numbers that a process has read, but for the second process in step 5."""
    if step == 5 and popdist.getInstanceIndex() == 1:
        raise ValueError("the numbers of step 5 cannot be read")
    return np.full(count, step, np.float32)


ir = popxl.Ir("popdist")
with ir.main_graph:
    number_stream = popxl.h2d_stream((), popxl.float32, "number")
    total = ops.collectives.replicated_all_reduce(
        ops.host_load(number_stream), op="add"
    )
    total_stream = addons.host_store(total)

with popxl.Session(ir, "ipu_hw") as session:
    for step in range(1, STEPS + 1):
        numbers = numbers_of_step(step, ir.instance_replication_factor)
        total_data = session.run(
            {number_stream: numbers.reshape(session.host_shape(()))}
        )[total_stream]
        print(f"step {step}: the total is {total_data.flat[0]:.0f}")
