"""What others meet who ask a tensor for its numbers: it has none while a program is written.

Python, NumPy and JAX each have their way to ask. A program that takes a tensor for an array is told which op to use.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from popxl.base.source import SourceLocation, user_line, warn_at
from popxl.errors import PopxlError, TensorTruthWarning

if TYPE_CHECKING:
    from popxl.core.tensor import Tensor

HOW_TO_READ = (
    "A tensor has numbers only when a session runs: store it to a stream with `ops.host_store`. The array of a "
    "variable is `session.get_tensor_data(variable)`."
)

# NumPy's operators; each is asked with an array, or a scalar of NumPy's, on the left of a tensor.
_OPERATORS: dict[np.ufunc, Callable[[Tensor, Any], Any]] = {
    np.add: lambda t, other: t.__radd__(other),
    np.subtract: lambda t, other: t.__rsub__(other),
    np.multiply: lambda t, other: t.__rmul__(other),
    np.true_divide: lambda t, other: t.__rtruediv__(other),
    np.remainder: lambda t, other: t.__rmod__(other),
    np.matmul: lambda t, other: t.__rmatmul__(other),
    np.power: lambda t, other: t.__rpow__(other),
    np.bitwise_and: lambda t, other: t.__rand__(other),
    np.bitwise_or: lambda t, other: t.__ror__(other),
    np.equal: lambda t, other: False,  # only tensors are equal, to themselves
    np.not_equal: lambda t, other: True,
}

_REDUCTIONS: dict[np.ufunc, str] = {np.add: "sum", np.multiply: "prod", np.maximum: "max", np.minimum: "min"}

_NAMES = {
    "absolute": "abs",
    "amax": "max",
    "amin": "min",
    "concatenate": "concat",
    "divide": "div",
    "multiply": "mul",
    "negative": "negate",
    "power": "pow",
    "remainder": "fmod",
    "subtract": "sub",
    "take": "gather",
}
"""The op for a function of NumPy's, where the names differ."""


def of_ufunc(t: Tensor, ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """What a function of NumPy's for single elements makes of a tensor: `array + t`, or an error that names the op."""
    meaning = _OPERATORS.get(ufunc)
    if method == "__call__" and not keywords and meaning is not None and inputs[1] is t:
        return meaning(t, inputs[0])
    raise refusal(t, _REDUCTIONS.get(ufunc, ufunc.__name__) if method == "reduce" else ufunc.__name__)


def refusal(t: Tensor, name: str) -> TypeError:
    """The error for a tensor that was given to a function of NumPy's."""
    from popxl import ops  # ops are written with tensors

    op = _NAMES.get(name, name)
    remedy = f"Use `ops.{op}`." if hasattr(ops, op) else f"There is no `ops.{op}`: write it with those that there are."
    return TypeError(f"NumPy's `{name}` takes arrays, and {t!r} is a tensor, to be computed by a session. {remedy}")


def number_refused(t: Tensor, kind: str) -> TypeError:
    """The error for a tensor that is to be a Python number."""
    return TypeError(
        f"{t!r} cannot become {kind}. Of a tensor, `ops.exp(x)` is what `math.exp(x)` is of a number. {HOW_TO_READ}"
    )


def asked_by_jax(t: Tensor) -> None:
    """Refuse what asks for the array of a tensor, if that is a function of JAX.

    An operator of a JAX array asks too, before it leaves the work to the tensor; that gets `None`.
    """
    asking = sys._getframe(2)  # the property's caller
    its_own = isinstance(asking.f_locals.get("self"), jax.Array)
    if its_own or asking.f_globals.get("__name__", "").partition(".")[0] != "jax":
        return
    frame = asking
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "jax":
        frame = frame.f_back
    source = SourceLocation.of(user_line(frame, 0))
    where = f", at `{source.text}` ({source})" if source.text else ""
    # No TypeError: JAX would replace it by one of its own.
    raise PopxlError(
        f"A function of JAX takes arrays, and {t!r} is a tensor{where}. Use the op of `popxl.ops` that has its name, "
        "such as `ops.exp` for `jnp.exp`; or make an op of any function of arrays: "
        "`popxl.OpKind('Softplus', jax.nn.softplus)`."
    )


def truth(t: Tensor) -> bool:
    """What `if t:` comes to: whether there is a tensor at all. Programs ask that of optional tensors.

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
