"""Activations of a gradient graph: what it reads of its forward graph, with the paths that plans have for it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import popxl
from popxl.extend.graphs import has_effect, own_flops, through_calls, written_inputs
from popxl.extend.pages import listed
from popxl.transforms import GradGraphInfo
from popxl_addons.grad_info import activation_inputs, gradient_inputs
from popxl_addons.ops.weight_gather import gathered_weights_of

Treatment = Literal["keep", "recompute", "offload"]
"""Treatment of an activation between the forward and the backward call."""

MemoryPolicy = Literal["everything", "products", "products_without_batch", "nothing"]
"""Activations to keep; the others are recomputed. As in `jax.checkpoint_policies`: `everything_saveable`,
`dots_saveable`, `dots_with_no_batch_dims_saveable`, `nothing_saveable`."""


class Activation(NamedTuple):
    """A tensor of a forward graph that its gradient reads.

    Attributes:
        tensor: tensor of the forward graph.
        made_by: op that computes it, within a called graph if that computes it.
        path: name in plans: names of the called graphs on the way, then that of the tensor. It does not depend on other
            graphs of the program: equal names within a graph are numbered, as in `tanh_out#2`. Scopes that the name
            repeats stand there once.
        name: the path with the tensor's name as graphs print it, such as `tanh_out__t7`.
        is_gathered: whether it is computed of gathered weights alone, which policies do not keep.
        long_path: the path with repeated scopes, as in older plans.
    """

    tensor: popxl.Tensor
    made_by: popxl.Op
    path: str
    name: str
    is_gathered: bool = False
    long_path: str = ""

    @property
    def nbytes(self) -> int:
        """Memory of the tensor, on each replica: none for a transposed input, see `is_transposed_input`."""
        if is_transposed_input(self.tensor):
            return 0
        return math.prod(self.tensor.shape) * self.tensor.dtype.itemsize

    @property
    def line(self) -> str:
        """Source line of the computation, such as `model.py:12`."""
        return str(self.made_by.source)

    @property
    def is_product(self) -> bool:
        """Whether matrix products or convolutions compute the tensor."""
        return own_flops(self.made_by).products > 0

    @property
    def has_batch(self) -> bool:
        """Whether batched matrix products compute it, such as attention scores."""
        return all(t.rank > 2 for t in self.made_by.inputs[:2])


_GIVEN = re.compile(r"__t\d+")
"""Suffix that makes tensor names unique: a number that counts through all graphs of a program."""

_REPEATED = re.compile(r"(?<![^/.])((?:[^/*?[]+/)+?)\1+")


def without_repeated_scopes(path: str) -> str:
    """A path, or a pattern of paths, with each repeated scope once.

    The name of a view is made of the name of its operand, which already has the scope.

    Example:
        >>> without_repeated_scopes("block.mlp/up/mlp/up/mlp/up/matmul_out_reshaped_T")
        'block.mlp/up/matmul_out_reshaped_T'
    """
    while (shorter := _REPEATED.sub(r"\1", path)) != path:
        path = shorter
    return path


def is_transposed_input(t: popxl.Tensor) -> bool:
    """Whether `t` is a transposed input of its graph, such as a weight.

    With any treatment, a gradient reads the input itself, and transposes it. So there is no transposed copy to keep,
    and products of it sum in the same order with each plan.

    Example:
        >>> ir = popxl.Ir()
        >>> spec = popxl.TensorSpec((2, 3), popxl.float32)
        >>> graph = ir.create_graph(lambda w: popxl.ops.tanh(w.T), spec)
        >>> [is_transposed_input(op.outputs[0]) for op in graph.ops]
        [True, False]
    """
    op, inputs = t.producer, t.graph.inputs
    if op is None or op.op_type != "Transpose" or op.inputs[0] not in inputs:
        return False
    return inputs.index(op.inputs[0]) not in written_inputs(t.graph)


def candidates(info: GradGraphInfo) -> list[Activation]:
    """Forward tensors read by the gradient graph, or leading to such tensors, in graph order.

    Inputs of the forward graph are left out, and outputs whose gradients are provided, as its caller has them anyway;
    so is what ops with effects make, which is kept in any case.
    """
    forward = info.forward_graph
    provided, wanted = {*gradient_inputs(info).values()}, {*activation_inputs(info).values()}
    tensors: list[popxl.Tensor] = []
    for op in reversed(forward.ops):
        if wanted.isdisjoint(op.outputs) or has_effect(op) or op.modified:
            continue
        tensors += [t for t in reversed(op.outputs) if t in wanted and t not in provided]
        wanted.update(op.inputs)
    tensors.reverse()
    gathered = gathered_weights_of(forward)
    producers, names = zip(*map(_origin, tensors), strict=True) if tensors else ((), ())
    long_paths = [_GIVEN.sub("", name) for name in names]
    taken = {*long_paths}
    paths = [long if (short := without_repeated_scopes(long)) in taken else short for long in long_paths]
    columns = (tensors, producers, _numbered(paths), names, [t in gathered for t in tensors], _numbered(long_paths))
    return [Activation(*row) for row in zip(*columns, strict=True)]


def _numbered(paths: Iterable[str]) -> Iterator[str]:
    """Paths with numbers behind equal ones, from the second on."""
    counts = Counter[str]()
    for path in paths:
        counts[path] += 1
        yield path if counts[path] == 1 else f"{path}#{counts[path]}"


def activations_of(info: GradGraphInfo) -> list[Activation]:
    """The activations of a gradient graph that could be recomputed: it reads them and the forward graph computes them.

    Outputs of the forward graph whose gradients are provided are left out, as its caller has them in any case.

    Example:
        >>> ir = popxl.Ir()
        >>> spec = popxl.TensorSpec((2, 3), popxl.float32)
        >>> graph = ir.create_graph(lambda x: popxl.ops.exp(popxl.ops.tanh(x)) * 2.0, spec)
        >>> [(each.path, each.nbytes) for each in activations_of(popxl.transforms.autodiff(graph))]
        [('tanh_out', 24), ('exp_out', 24)]
    """
    activations = {*activation_inputs(info).values()}
    return [a for a in candidates(info) if a.tensor in activations]


def _origin(t: popxl.Tensor) -> tuple[popxl.Op, str]:
    """The op that computes a tensor, within graphs that are called, and the tensor's path after their names."""
    sources = list(through_calls(t))
    producers = [origin.producer for origin in sources if origin.producer is not None]  # the last one may be an input
    names = [origin.graph.name.partition("_subgraph")[0] for origin in sources[1:]]
    return producers[-1], ".".join([*names, sources[-1].path])


def is_kept_by_policy(policy: MemoryPolicy, activation: Activation) -> bool:
    """Whether a policy keeps an activation. None keeps weights that the graph gathers of shards: they are large."""
    if activation.is_gathered:
        return False
    match policy:
        case "everything":
            return True
        case "products":
            return activation.is_product
        case "products_without_batch":
            return activation.is_product and not activation.has_batch
        case _:
            return False


def matches_nothing(caller: str, missing: Sequence[str], paths: Sequence[str]) -> str:
    listing = listed(paths, most=12)
    return (
        f"{caller}: {', '.join(map(repr, missing))} {'matches' if len(missing) == 1 else 'match'} no activation. "
        f"There are {listing or 'none'}; `*` stands for any characters."
    )
