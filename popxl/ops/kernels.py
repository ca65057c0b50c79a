"""Functions of arrays that ops are made of, and that a machine may compute in another form.

Here each is plain JAX, and says what is meant. While a program is traced, a machine may put forms of its own in the
place of some of them (`in_forms`): the same numbers, quicker there. Which these are, nobody knows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, cast

import jax.numpy as jnp

Form = Callable[..., Any]

_forms: ContextVar[Mapping[Form, Form]] = ContextVar("forms", default={})  # noqa: B039  # it is never changed


def kernel(plain: Form) -> Form:
    """A function of arrays that a machine may compute in another form, of the same parameters.

    As it is written it is the attribute `plain`.
    """

    @wraps(plain)
    def call(*arguments: Any, **settings: Any) -> Any:
        return _forms.get().get(call, plain)(*arguments, **settings)

    cast(Any, call).plain = plain
    return call


@contextmanager
def in_forms(forms: Mapping[Form, Form]) -> Iterator[None]:
    """Within the block, kernels are computed in these forms, as far as they are among them."""
    token = _forms.set(forms)
    try:
        yield
    finally:
        _forms.reset(token)


@kernel
def quotient(lhs: Any, rhs: Any) -> Any:
    """lhs / rhs of floats, rounded once."""
    return jnp.true_divide(lhs, rhs)


@kernel
def computed_once(function: Callable[..., Any], *arrays: Any) -> Any:
    """What a function makes of arrays, which takes long and is worth to be computed once for all that reads it."""
    return function(*arrays)


@kernel
def over_images(function: Callable[..., Any], axes: int, *arrays: Any) -> Any:
    """What a function makes of images that goes over their spatial axes. The batch may be any axis but one of these.

    Args:
        function: of the number of the first spatial axis, and arrays. Gives an array or several, with the other axes as
            they were.
        axes: how many spatial axes there are, the last ones. Those of the batch and the channels, if any, come before.
        *arrays: the images.
    """
    return function(arrays[0].ndim - axes, *arrays)


@kernel
def of_elements(function: Callable[[Any], Any], t: Any) -> Any:
    """What a function of elements makes of an array, if it takes long."""
    return function(t)
