"""Errors for conversions of a tensor to numbers, and for assignment: it has no numbers while a program is written.

Python and JAX each have their own protocols for such a conversion. The errors name the op to use instead. NumPy's
protocols are among the operators (`popxl.operators`).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import jax

from popxl.base.source import SourceLocation, user_line, warn_at
from popxl.errors import PopxlError, TensorTruthWarning

if TYPE_CHECKING:
    from popxl.core.tensor import Tensor

HOW_TO_READ = (
    "A tensor has numbers only when a session runs: store it to a stream with `ops.host_store`. The array of a "
    "variable is `session.get_tensor_data(variable)`."
)


def number_refused(t: Tensor, kind: str) -> TypeError:
    """Build the error for conversion of a tensor to a Python number."""
    return TypeError(
        f"{t!r} cannot become {kind}. Of a tensor, `ops.exp(x)` is what `math.exp(x)` is of a number. {HOW_TO_READ}"
    )


def assignment_refused(t: Tensor) -> TypeError:
    """Build the error for assignment to elements of a tensor."""
    return TypeError(
        f"{t!r} does not support item assignment. To overwrite part of it, use `ops.dynamic_update_(t, index, value, "
        "axes, sizes, no_overlap)`; for a changed copy, `ops.dynamic_update`, or `ops.where` with a mask."
    )


def asked_by_jax(t: Tensor) -> None:
    """Refuse array conversion requested by a JAX function.

    An operator of a JAX array asks for a conversion too, before it defers to the tensor; that gets `None`.
    """
    asking = sys._getframe(2)  # frame of the property's caller
    its_own = isinstance(asking.f_locals.get("self"), jax.Array)
    if its_own or asking.f_globals.get("__name__", "").partition(".")[0] != "jax":
        return
    frame = asking
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "jax":
        frame = frame.f_back
    source = SourceLocation.of(user_line(frame, 0))
    where = f", at `{source.text}` ({source})" if source.text else ""
    # Not a TypeError: JAX would replace it by its own.
    raise PopxlError(
        f"A function of JAX takes arrays, and {t!r} is a tensor{where}. Use the op of `popxl.ops` that has its name, "
        "such as `ops.exp` for `jnp.exp`; or make a function of tensors from any function of arrays: "
        f"`popxl.from_jax(jax.nn.softplus)`. {_AS_ARGUMENT}"
    )


_AS_ARGUMENT = "A function that is given to `popxl.from_jax` takes each tensor as an argument, and closes over none."


def check_not_traced(t: Tensor, other: Any) -> None:
    """Refuse an operator between a tensor and an array that JAX traces."""
    if isinstance(other, jax.core.Tracer):
        raise PopxlError(f"{t!r} is the operand of an array that JAX traces. {_AS_ARGUMENT}")


def truth(t: Tensor) -> bool:
    """Truth value of a tensor in `if t:`: presence. Programs test optional tensors this way.

    Raises:
        ValueError: for a scalar.
    """
    if not t.shape:
        raise ValueError(
            f"{t!r} is a scalar, which is neither true nor false while the program is written. Choose between values "
            "with `ops.where`, between graphs with `ops.conditional`; ask `t is None` of an optional tensor."
        )
    source = SourceLocation.of(user_line(sys._getframe(2), 0))
    warn_at(
        source,
        "The truth of a tensor says whether it has elements, not what they are"
        f"{f': `{source.text}`' if source.text else ''}. Choose between values with `ops.where`, between graphs with "
        "`ops.conditional`; ask `t is None` of an optional tensor.",
        TensorTruthWarning,
    )
    return t.shape[0] != 0
