"""Functions of arrays that ops are made of, and that a machine may compute in another form.

Here each is plain JAX, and says what is meant. While a program is traced, a machine may put forms of its own in the
place of some of them (`in_forms`): the same numbers, quicker there. Which these are, nobody knows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any

import jax.numpy as jnp

Form = Callable[..., Any]


class Kernel:
    """A function of arrays that a machine may compute in another form, of the same parameters; used as a decorator.

    Attributes:
        plain: the function as it is written.
    """

    def __init__(self, plain: Form) -> None:
        self.plain = plain
        update_wrapper(self, plain)

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        return _forms.get().get(self, self.plain)(*arguments, **settings)


_forms: ContextVar[Mapping[Kernel, Form]] = ContextVar("forms", default={})  # noqa: B039  # it is never changed


@contextmanager
def in_forms(forms: Mapping[Kernel, Form]) -> Iterator[None]:
    """Within the block, kernels are computed in these forms, as far as they are among them."""
    token = _forms.set(forms)
    try:
        yield
    finally:
        _forms.reset(token)


@Kernel
def quotient(lhs: Any, rhs: Any) -> Any:
    """lhs / rhs of floats, rounded once."""
    return jnp.true_divide(lhs, rhs)


@Kernel
def computed_once(function: Callable[..., Any], *arrays: Any) -> Any:
    """What a function makes of arrays, which takes long and is worth to be computed once for all that reads it."""
    return function(*arrays)


@Kernel
def over_images(function: Callable[..., Any], axes: int, *arrays: Any) -> Any:
    """What a function makes of images that goes over their spatial axes. The batch may be any axis but one of these.

    Args:
        function: of the number of the first spatial axis, and arrays. Gives an array or several, with the other axes as
            they were.
        axes: how many spatial axes there are, the last ones. Those of the batch and the channels, if any, come before.
        *arrays: the images.
    """
    return function(arrays[0].ndim - axes, *arrays)


@Kernel
def of_elements(function: Callable[[Any], Any], t: Any) -> Any:
    """What a function of elements makes of an array, if it takes long."""
    return function(t)
