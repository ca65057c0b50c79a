"""Calls that XLA keeps.

Other calls it inlines: it compiles the function anew for each, and makes what is in it part of whatever reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.tree_util import Partial


def kept(function: Callable[..., Any], in_order: int | None = None) -> Callable[..., Any]:
    """A function whose calls are kept. Those that it makes itself, of functions of JAX among them, are inlined.

    What it hands back as it was given, or gives twice, does not pass through the call. XLA (jaxlib 0.10.2) takes the
    result for an array of its own, and overwrites it in the same breath as it reads the other one.

    Args:
        function: the function.
        in_order: one of its arguments, by its place. What it holds passes through the call all the same, so that who
            uses it next does so after the call: a slot of a remote buffer that was read at once with all others would
            take memory until it is needed.
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
        return Partial(partial(_put_together, tree, [known[id(leaf)] for leaf in results]), own)

    compiled = jax.jit(body)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            results = compiled(*arguments)
        return results.func(jax.tree.leaves(arguments), *results.args)

    return call


def _put_together(tree: Any, places: Sequence[int], given: Sequence[Any], own: Sequence[Any]) -> Any:
    """The results of a function, by their places among the leaves of its arguments and its own results after these."""
    known = [*given, *own]
    return jax.tree.unflatten(tree, [known[place] for place in places])
