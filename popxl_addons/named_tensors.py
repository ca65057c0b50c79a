"""Trees of tensors and of host arrays: variables, placeholders and gradients of a model, by name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import popxl
from popxl import ops
from popxl.extend.arguments import check_type
from popxl_addons.dot_tree import DotTree, check_leaves

TensorMap = Mapping[popxl.Tensor, popxl.Tensor]


class NamedTensors(DotTree[popxl.Tensor]):
    """A tree with tensor leaves.

    There are two orders: `keys_flat()`, `values_flat()`, `to_dict()` and `named_tensors` have that of insertion, and
    `tensors` that of the tensors' names. For names beside tensors loop over ``named_tensors.items()``.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     nt = NamedTensors.pack(["w", "b"], [popxl.variable(1.0, name="w"), popxl.variable(2.0, name="b")])
        >>> nt.tensors
        (Variable[b popxl.dtypes.float32 ()], Variable[w popxl.dtypes.float32 ()])
        >>> [(name, t.name) for name, t in nt.named_tensors.items()]
        [('w', 'w'), ('b', 'b')]
    """

    @property
    def tensors(self) -> tuple[popxl.Tensor, ...]:
        """All leaves, sorted by ``tensor.name``: neither by flat name, nor in the order of `keys_flat()`.

        So ``zip(tree.keys_flat(), tree.tensors)`` mixes them up: take ``tree.named_tensors.items()`` for pairs. Two
        trees that were made of the same factories sort alike.

        `TypeError` for leaves that are not tensors.
        """
        if others := [name for name, leaf in self.to_dict().items() if not isinstance(leaf, popxl.Tensor)]:
            raise TypeError(f"NamedTensors.tensors: {others} are no tensors. Use `values_flat()` for other leaves.")
        return tuple(sorted(self.values_flat(), key=lambda tensor: tensor.name))

    @property
    def named_tensors(self) -> dict[str, popxl.Tensor]:
        """Flat name → tensor as a plain dictionary, in the order of `keys_flat()`."""
        return dict(self.to_dict())

    def remap(self, mapping: TensorMap) -> NamedTensors:
        """The same keys with every leaf replaced by ``mapping[leaf]``; `KeyError` lists the leaves that are missing.

        Example:
            >>> with popxl.Ir().main_graph:
            ...     a, b = popxl.constant(1.0), popxl.constant(2.0)
            >>> NamedTensors(x=a).remap({a: b}).x == b
            True
        """
        check_type(mapping, Mapping, "NamedTensors.remap: `mapping`", "a mapping from tensors to tensors")
        if missing := [name for name, tensor in self.to_dict().items() if tensor not in mapping]:
            raise KeyError(f"NamedTensors.remap: `mapping` has no tensor for {missing}.")
        return self.map(lambda tensor: mapping[tensor])


class NamedTensorData(DotTree[np.ndarray]):
    """A tree with NumPy leaves: host values of `NamedTensors`."""


def print_named_tensors(named_tensors: NamedTensors) -> NamedTensors:
    """Print every leaf when the program runs, titled with its flat name.

    Returns the outputs of the print ops under the same keys.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     printed = print_named_tensors(NamedTensors(w=popxl.variable([1.0, 2.0], name="w")))
        >>> printed.w.shape
        (2,)
    """
    check_leaves(named_tensors, popxl.Tensor, "print_named_tensors: `named_tensors`", "NamedTensors")
    return NamedTensors.from_dict(
        {name: ops.print_tensor(tensor, title=name) for name, tensor in named_tensors.to_dict().items()}
    )
