"""Plans: programs as several executables that the host calls in order; and the choice between these and a single one.

Reading order. `decision` makes the choice. It asks `segmentation` for the calls that would be segments of a plan, equal
ones by their `structure`; `placement`, for the IPU of each op; and `loop_rerolling`, for the calls that would be
iterations of loops in one executable. `planning` splits graphs into the steps of a plan: `segments`, which are compiled
for their `compile_options`, and the control flow of the host around them, in `host_steps`. `repeats` merges steps that
repeat, and `stacks` holds stacked outputs of loops. `plan` compiles the steps and runs them, and `stages` copies to and
from IPUs of other processes.
"""
