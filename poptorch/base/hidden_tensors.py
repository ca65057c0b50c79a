"""Detection of tensors inside opaque objects, for error messages."""

from __future__ import annotations

import gc
from types import FunctionType, ModuleType
from typing import Any

from poptorch.base.introspection import is_instance
from poptorch.errors import createPoptorchError


def hidden_problem(what: str, constant: Any) -> Exception:
    """Error for an object with undetected tensors; `what` begins the message."""
    kind = type(constant).__name__
    return createPoptorchError(
        f"{what} is a {kind} that holds tensors, which are not found there. Put tensors into tuples, lists, "
        f"dictionaries or dataclasses; or say where they are, with `poptorch.registerCustomArgParser({kind}, ...)`."
    )


def holds_tensor(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether a tensor of some kind, or a placeholder, is reachable from an object through any reference: sets,
    attributes.
    """
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen or is_instance(each, (type, ModuleType)):
            continue
        seen.add(id(each))
        if is_instance(each, kind):
            return True
        if is_instance(each, FunctionType):  # its closure, not all that its module knows
            left += [each.__closure__, each.__defaults__, each.__kwdefaults__]
        else:
            left += gc.get_referents(each)
    return False
