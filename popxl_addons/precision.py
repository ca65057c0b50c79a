"""Mixed precision: graphs compute in 16 bits, and trained variables stay in 32.

A `MixedPrecision` is a value. `train_step` takes it; without that, `create_graph` makes the graph and `cast` passes it
the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax

import popxl
from popxl.context import get_current_context
from popxl.extend.graphs import reading_ipus
from popxl.extend.ops import cast_if_needed
from popxl_addons.named_tensors import NamedTensors

if TYPE_CHECKING:
    from popxl_addons.graph import GraphWithNamedArgs
    from popxl_addons.module import Module
    from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

__all__ = ["MixedPrecision"]


@dataclass(frozen=True)
class MixedPrecision:
    """Compute in `dtype`, train in float32.

    The variables are float32, whatever float the layers request; so are checkpoints, which a float32 program loads as
    well. The graph gets them, and its float inputs, as `dtype`. Within a kept layer, variables are unchanged and inputs
    are cast up; its results are cast down again.

    A computation whose dtype the program states keeps it: take the loss of ``logits.astype(popxl.float32)``.

    Args:
        dtype: `popxl.bfloat16` or `popxl.float16`. The latter needs its loss scaled; `train_step` does that.
        keep: layers that stay in float32: those with one of these words in their name, the attribute of the module that
            they are assigned to, directly or in a list.

    Raises:
        ValueError: for any other dtype, and for `keep` that is a single text.

    See also: `torch.amp`, `jmp.Policy`.

    Example:
        >>> from popxl_addons.layers import MLP, Attention, TransformerBlock
        >>> precision = MixedPrecision(popxl.bfloat16, keep=("norm",))
        >>> with popxl.Ir().main_graph:
        ...     text = popxl.TensorSpec((2, 5, 8), popxl.float32)
        ...     facts, graph = precision.create_graph(TransformerBlock(Attention(4), MLP()), text)
        ...     weights = precision.cast(facts.init(), graph.args)
        >>> facts.mlp.up.weight.dtype, weights.mlp.up.weight.dtype, weights.mlp_norm.weight.dtype
        (popxl.dtypes.float32, popxl.dtypes.bfloat16, popxl.dtypes.float32)
    """

    dtype: popxl.dtype
    keep: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (isinstance(self.dtype, popxl.dtype) and self.dtype.is_half):
            raise ValueError(f"MixedPrecision: `dtype` is {self.dtype!r}; expected popxl.float16 or popxl.bfloat16.")
        if isinstance(self.keep, str):
            raise ValueError(f"MixedPrecision: `keep` is the text {self.keep!r}; expected a tuple: ({self.keep!r},).")
        object.__setattr__(self, "keep", tuple(self.keep))

    def create_graph(
        self, module: Module, *args: Any, **kwargs: Any
    ) -> tuple[NamedVariableFactories, GraphWithNamedArgs]:
        """`module.create_graph`, in this precision: float arguments are inputs of `dtype`.

        Raises:
            ValueError: if a word of `keep` is in no name, in that of a layer with a `build_grad`, or in one that is
                given to variables only; and as for `module.create_graph`.
        """
        building = _Building(self)
        args, kwargs = jax.tree.map(self._narrow_spec, (args, kwargs), is_leaf=_is_spec)
        with _build_context(building):
            facts, graph = module.create_graph(*args, **kwargs)
        layers = {name: name.rpartition(".")[0] for name in facts.keys_flat()}
        names = [*building.names, *layers.values()]  # graphs that are cached are not built again
        if unknown := [word for word in self.keep if not any(word in name for name in names)]:
            known = sorted({name.partition(".")[0] for name in building.names})
            raise ValueError(f"MixedPrecision: `keep` has {unknown}, which no layer is called after: they are {known}.")
        inputs = graph.args.to_dict()
        if narrow := [n for n in layers if self._keeps(layers[n]) and not facts[n].by_ref and inputs[n].dtype.is_half]:
            raise ValueError(
                f"MixedPrecision: `keep` is {self.keep}, and {narrow} are computed in {self.dtype.name}: the names are "
                "those of variables, and `keep` goes by the attributes that layers are assigned to."
            )
        return facts, graph

    def cast(self, variables: NamedTensors, args: NamedTensors) -> NamedTensors:
        """Variables cast for graph inputs `args`; own shards of sharded variables.

        Raises:
            KeyError: if `variables` lacks one.
        """
        given = variables.to_dict()
        if missing := [name for name in args.keys_flat() if name not in given]:
            raise KeyError(f"MixedPrecision.cast: there are no `variables` for {missing}.")
        ipus = reading_ipus(args.tensors[0].graph) if args.tensors else {}

        def cast(name: str, t: popxl.Tensor) -> popxl.Tensor:
            with get_current_context().on_ipu(next(iter(ipus.get(t, ())), None)):
                return cast_if_needed(given[name].on_replica, t.dtype)

        return NamedTensors.from_dict({name: cast(name, t) for name, t in args.to_dict().items()})

    def narrowed(self, t: popxl.Tensor) -> popxl.Tensor:
        """Cast float tensors to `dtype`; others unchanged."""
        return cast_if_needed(t, self.dtype) if _is_float(t.dtype) else t

    def _narrow_spec(self, argument: Any) -> Any:
        if _is_spec(argument) and _is_float(argument.dtype):
            return popxl.TensorSpec(argument.shape, self.dtype, argument.meta_shape)
        return argument

    def _keeps(self, name: str | None) -> bool:
        return name is not None and any(word in name for word in self.keep)


@dataclass(frozen=True)
class _Building:
    """Build context: current precision, and whether a float32 layer encloses it."""

    precision: MixedPrecision
    in_float32: bool = False
    names: list[str] = field(default_factory=list, compare=False)


_building: ContextVar[_Building | None] = ContextVar("building", default=None)


@contextmanager
def _build_context(building: _Building) -> Iterator[None]:
    token = _building.set(building)
    try:
        yield
    finally:
        _building.reset(token)


def in_precision(factory: VariableFactory) -> VariableFactory:
    """Factory for the current build: float32 variable, placeholder in computation dtype.

    Variables that a graph changes in place are not cast: a change of the copy would be lost.
    """
    building = _building.get()
    if building is not None and _is_float(factory.dtype) and not factory.by_ref:
        factory.dtype = popxl.float32
        factory.input_dtype = popxl.float32 if building.in_float32 else building.precision.dtype
    return factory


def cache_key(name: str | None = None) -> Any:
    """Precision-dependent part of a named layer's cache key."""
    building = _building.get()
    return building and (building.precision, building.in_float32 or building.precision._keeps(name))


def layer(name: str | None, states_gradient: bool, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build a named layer from arguments, in float32 for kept layers.

    Raises:
        ValueError: for a kept layer with a gradient of its own, which would ignore the casts around it.
    """
    building = _building.get()
    if building is None:
        return build(*args, **kwargs)
    if name is not None:
        building.names.append(name)
    if building.in_float32 or not building.precision._keeps(name):
        return build(*args, **kwargs)
    if states_gradient:
        raise ValueError(
            f"MixedPrecision: `keep` holds the layer `{name}`, which has a `build_grad`: its gradient is stated for "
            "what `build` is given. Cast within `build` and `build_grad`, and take the layer out of `keep`."
        )
    args, kwargs = _cast_all((args, kwargs), popxl.float32)
    with _build_context(replace(building, in_float32=True)):
        made = build(*args, **kwargs)
    return _cast_all(made, building.precision.dtype)


def _cast_all(tree: Any, dtype: popxl.dtype) -> Any:
    def converted(leaf: Any) -> Any:
        return cast_if_needed(leaf, dtype) if isinstance(leaf, popxl.Tensor) and _is_float(leaf.dtype) else leaf

    return jax.tree.map(converted, tree)


def _is_float(dtype: popxl.dtype) -> bool:
    """Whether mixed precision concerns a dtype: float32 or a half."""
    return dtype is popxl.float32 or dtype.is_half


def _is_spec(argument: Any) -> bool:
    return isinstance(argument, popxl.Tensor | popxl.TensorSpec)
