"""From graphs to functions of arrays: the lowering loop, and lowerings of ops that depend on the runtime."""
