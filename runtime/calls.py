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


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls are kept. Those that it makes itself, of functions of JAX among them, are inlined.

    What it hands back as it was given, or gives twice, does not pass through the call. XLA (jaxlib 0.10.2) takes the
    result for an array of its own, and overwrites it in the same breath as it reads the other one.
    """

    @wraps(function)
    def body(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # or all calls that are traced inside would be kept
            results, tree = jax.tree.flatten(function(*arguments))
        given, own = jax.tree.leaves(arguments), list[Any]()
        known = {id(leaf): i for i, leaf in enumerate(given)}
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
