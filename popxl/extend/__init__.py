"""Public interfaces for kits, ops, transforms, kernels and targets of your own, beyond the names of `popxl`.

Import the module for the purpose; `import popxl` alone loads none of them. `docs/extending.md` has runnable examples.

- `popxl.extend.ops`: declare an op with its gradient.
- `popxl.extend.kernels`: functions of arrays, and implementations for one platform.
- `popxl.extend.graphs`: read and rewrite graphs.
- `popxl.extend.collectives`: ops between replicas.
- `popxl.extend.arguments`: checks of arguments.
- `popxl.extend.source`: lines of the user's program.
- `popxl.extend.files`: atomic files with digests.
- `popxl.extend.pages`: reports that print, and show in notebooks.
- `popxl.extend.processes`: programs of several processes.
- `popxl.extend.sessions`: sessions that save and load variables.
- `popxl.extend.jax`: random keys of JAX as tensors.
- `popxl.extend.targets`: machines to compile for.
- `popxl.extend.memory`: budgets of memory, and plans within them.
"""
