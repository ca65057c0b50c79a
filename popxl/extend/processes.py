"""Programs of several processes: the index of this instance, the connection to the others, and JAX settings.

Example:
    >>> from popxl.extend.processes import launched
    >>> launched() is None  # no launcher has started this process
    True
"""

from popxl.base.distributed import Instance, launched
from runtime.jax_private import jax_runs
from runtime.pipes import exit_on_broken_pipe
from runtime.processes import KeyValueStore, barrier, is_connected, join

__all__ = [
    "Instance",
    "KeyValueStore",
    "barrier",
    "exit_on_broken_pipe",
    "is_connected",
    "jax_runs",
    "join",
    "launched",
]
