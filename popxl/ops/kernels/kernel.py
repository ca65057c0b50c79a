"""`Kernel`: a function of arrays that ops are made of, and that a machine may compute in another form.

Here each is plain JAX, and says what is meant. While a program is traced, a machine may put forms of its own in the
place of some of them (`in_forms`): the same numbers, quicker there. Which these are, nobody knows here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any

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
