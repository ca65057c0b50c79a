"""Small helpers independent of modules and graphs: two dictionaries, a timer, and a few one-line functions."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
import sys
import time
from collections import Counter, UserDict
from collections import OrderedDict as _OrderedDict
from collections.abc import Hashable, Iterable, Iterator, KeysView
from typing import Any, TypeVar

import jax
import numpy as np

import popxl
from popxl.extend.arguments import check_type
from popxl.tensor import Variable

K = TypeVar("K")
V = TypeVar("V")
E = TypeVar("E", bound=Hashable)

WANDB_IMPORTED = "wandb" in sys.modules or importlib.util.find_spec("wandb") is not None
"""Whether Weights & Biases was installed at import. It is imported on first use."""

_logger = logging.getLogger(__name__)


class _Keys(KeysView[K]):
    """Keys that print like those of a plain ``dict``: the order is nothing to point out any more."""

    def __reversed__(self) -> Iterator[K]:
        return reversed(list(self))

    def __repr__(self) -> str:
        return f"dict_keys({list(self)})"


class OrderedDict(_OrderedDict[K, V]):
    """A ``collections.OrderedDict`` that prints one item per line and can be read by position. JAX takes it as a tree.

    Example:
        >>> d = OrderedDict(w=1, b=2)
        >>> d
        {
        w: 1,
        b: 2,
        }
        >>> d.idx(-1)
        2
        >>> d.keys()
        dict_keys(['w', 'b'])
    """

    def idx(self, idx: int) -> V:
        """The value at position `idx`; negative positions count from the end. `IndexError` outside."""
        if not -len(self) <= idx < len(self):
            raise IndexError(f"OrderedDict.idx: position {idx} is outside; there are {len(self)} items.")
        return list(self.values())[idx]

    def keys(self) -> Any:
        """View of keys, like `dict.keys`."""
        return _Keys(self)

    def __repr__(self) -> str:
        if not self:
            return "{}"
        return "{\n" + "".join(f"{key}: {value},\n" for key, value in self.items()) + "}"

    __str__ = __repr__


def _entries(d: OrderedDict[Any, Any]) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    return [(jax.tree_util.DictKey(key), value) for key, value in d.items()], tuple(d)


jax.tree_util.register_pytree_with_keys(
    OrderedDict, _entries, lambda keys, values: OrderedDict(zip(keys, values, strict=True))
)


class WeightsDict(UserDict[Variable, np.ndarray]):
    """Host data for variables, checked on insertion. Pass it to ``Session.write_variables_data``.

    An array must have the variable's dtype and its shape on the host (with the leading group dimension of a grouped
    variable); otherwise `ValueError`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     w = popxl.variable(np.zeros((2, 3)), popxl.float32, "w")
        >>> weights = WeightsDict({w: np.ones((2, 3), np.float32)})
        >>> weights[w] = np.ones((3, 2), np.float32)
        Traceback (most recent call last):
            ...
        ValueError: WeightsDict: the array for `w` has shape (3, 2), expected (2, 3), the variable's shape on the host.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # as PopXL declares it
        super().__init__(*args, **kwargs)

    def __setitem__(self, variable: Variable, array: np.ndarray) -> None:
        check_type(variable, Variable, "WeightsDict: each key", "a Variable")
        if not hasattr(array, "dtype"):
            raise TypeError(f"WeightsDict: the value for `{variable.name}` must be an array; got {array!r:.80}.")
        dtype = popxl.dtype.as_dtype(array.dtype)
        if dtype != variable.dtype:
            raise ValueError(
                f"WeightsDict: the array for `{variable.name}` is of {dtype.name}, expected {variable.dtype.name}, "
                "the variable's dtype. Convert it with `array.astype(...)`."
            )
        if tuple(array.shape) != tuple(variable.shape_on_host):
            raise ValueError(
                f"WeightsDict: the array for `{variable.name}` has shape {tuple(array.shape)}, expected "
                f"{tuple(variable.shape_on_host)}, the variable's shape on the host."
            )
        self.data[variable] = array

    def __repr__(self) -> str:
        return f"WeightsDict({self.data!r})"


@contextlib.contextmanager
def timer(title: str | None = None, log_to_wandb: bool = True) -> Iterator[None]:
    """Log how many minutes the body took, unless it raised.

    With a `title`, and while a ``wandb`` run is active, the minutes also go to the run's summary as ``<title>_mins``
    (lower case, underscores for spaces); `log_to_wandb=False` switches that off.

    Example:
        >>> with timer("Graph building"):
        ...     pass
    """
    if title:
        _logger.info("Starting %s", title)
    start = time.perf_counter()
    yield
    minutes = (time.perf_counter() - start) / 60
    _logger.info("%s: %.2f mins", f"{title} duration" if title else "Duration", minutes)
    if log_to_wandb and title:
        _add_to_wandb_summary(title.lower().replace(" ", "_") + "_mins", minutes)


def _add_to_wandb_summary(key: str, value: float) -> None:
    try:
        import wandb
    except ImportError:
        return

    run = getattr(wandb, "run", None)  # a folder `wandb` of earlier runs can be imported, too
    if run is not None:
        run.summary[key] = value


def null_context() -> contextlib.AbstractContextManager[None]:
    """A context manager that does nothing, for ``with a() if condition else null_context():``.

    Example:
        >>> with null_context():
        ...     pass
    """
    return contextlib.nullcontext()


def suffix_graph_name(name: str, suffix: str) -> str:
    """A name for a graph made from the graph `name`: without its ``_subgraph(<k>)``, and with ``_<suffix>``.

    Example:
        >>> suffix_graph_name("Net_subgraph(3)_bwd", "recomp")
        'Net_bwd_recomp'
    """
    return re.sub(r"_subgraph\(\d+\)", "", name) + "_" + suffix


def overrides(cls: type, base_cls: type, method: str) -> bool:
    """Whether `cls` overrides `method` of `base_cls`, directly or by inheritance.

    Example:
        >>> overrides(bool, int, "__repr__"), overrides(bool, int, "__add__")
        (True, False)
    """
    return bool(getattr(cls, method) != getattr(base_cls, method))


def duplicate_items(iterable: Iterable[E]) -> list[E]:
    """Repeated items, in order of first appearance.

    Example:
        >>> duplicate_items([3, 1, 3, 2, 1])
        [3, 1]
    """
    return [item for item, count in Counter(iterable).items() if count > 1]
