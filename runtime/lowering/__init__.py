"""From graphs to functions of arrays: one loop, and what the ops mean that need the machine."""
