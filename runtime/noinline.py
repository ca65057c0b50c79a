"""`noinline`: functions whose calls XLA does not inline.

XLA inlines other calls: it compiles the function again for each, and may fuse its operations with their users.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.tree_util import Partial


def noinline(function: Callable[..., Any], in_order: int | None = None) -> Callable[..., Any]:
    """Jit a function whose calls XLA must not inline. Nested calls are inlined.

    Results that are arguments, or equal to other results, do not pass through the call. XLA (jaxlib 0.10.2) takes such
    a result for a separate array, and overwrites it while it still reads the other one.

    Args:
        in_order: the position of an argument whose leaves pass through the call all the same, so that their next use
            comes after the call: a slot of a remote buffer that was fetched early would take memory until it is needed.
    """

    @wraps(function)
    def body(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # or all calls that are traced inside would be kept
            results, tree = jax.tree.flatten(function(*arguments))
        given, own = jax.tree.leaves(arguments), list[Any]()
        passing = set() if in_order is None else {id(leaf) for leaf in jax.tree.leaves(arguments[in_order])}
        known = {id(leaf): i for i, leaf in enumerate(given) if id(leaf) not in passing}
        for leaf in results:
            if id(leaf) not in known:
                known[id(leaf)] = len(given) + len(own)
                own.append(leaf)
        return Partial(partial(_rebuild, tree, [known[id(leaf)] for leaf in results]), own)

    compiled = jax.jit(body)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            results = compiled(*arguments)
        return results.func(jax.tree.leaves(arguments), *results.args)

    return call


def _rebuild(tree: Any, places: Sequence[int], given: Sequence[Any], own: Sequence[Any]) -> Any:
    """Rebuild results from argument leaves and own results, by position."""
    known = [*given, *own]
    return jax.tree.unflatten(tree, [known[place] for place in places])
