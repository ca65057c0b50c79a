"""`from_optax`: an optimiser from any Optax transformation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import popxl
from popxl import initial
from popxl.errors import PopxlError, ShardedUpdateWarning
from popxl.extend.graphs import ELEMENTWISE_PRIMITIVES, leaf_equations
from popxl.extend.kernels import Array
from popxl.extend.source import SourceLocation, user_frame, warn_at
from popxl.op import Colocated, OpKind, Overwrites
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.optimizers.steps import Scale, Step, Tensors, Trained, select_if_finite
from popxl_addons.variable_factory import VariableFactory


def from_optax(transformation: Any) -> Callable[..., NamedTensors]:
    """Convert an Optax transformation to an optimizer: a function of variables and gradients, like `adamw`.

    The first step that runs makes the initial state, from the variables' values at that time; until then, the state is
    zeros. State of a sharded variable is sharded too. A transformation that needs a whole variable or all of them, such
    as clipping by norm, gets shards and parts only, and a `popxl.errors.ShardedUpdateWarning` says so: use `clip_norm`
    here. A process that saves or loads a program with such steps has to create the same optimizer first.

    Random keys of the state are kept as their numbers. A line search evaluates the loss again, which no step here can:
    it is refused, and so is whatever else needs more than gradients, variables and the loss.

    Args:
        transformation: an `optax.GradientTransformation`, with the learning rate in it.

    Returns:
        A function `(variables, gradients, clip_norm=None, loss_scaling=1.0, value=None)`, which makes one step, in
        place, and returns the state by name: `step`, and `state.0`, `state.1`, ... in the order of the leaves of
        Optax's. `value` is the loss, a scalar that is not multiplied by `loss_scaling`, for transformations that look
        at it: `optax.polyak_sgd`, `optax.contrib.reduce_on_plateau`, `optax.contrib.momo`.

    Raises:
        TypeError: for anything but a transformation.

        The function raises the errors of `adamw`, and `PopxlError` for a transformation that cannot make such a step.

    Example:
        With Optax installed::

            optimizer = from_optax(optax.adamw(1e-3))
            with ir.main_graph:
                state = optimizer(variables, gradients, clip_norm=1.0)
    """
    if not (callable(getattr(transformation, "init", None)) and callable(getattr(transformation, "update", None))):
        raise TypeError(
            f"from_optax: `transformation` is {transformation!r}; expected a GradientTransformation of Optax."
        )
    return partial(_optax_step, transformation)


def _optax_step(
    transformation: Any,
    variables: Tensors,
    gradients: Tensors,
    clip_norm: float | None = None,
    loss_scaling: Scale = 1.0,
    value: popxl.Tensor | None = None,
) -> NamedTensors:
    """Add one step of a transformation; see `from_optax`."""
    if value is not None and not (isinstance(value, popxl.Tensor) and value.shape == ()):
        raise TypeError(f"from_optax: `value` must be the loss, a tensor without dimensions; got {value!r:.200}.")
    values = [] if value is None else [value]
    with popxl.in_sequence():
        step = Step("from_optax", variables, gradients, 0.0, clip_norm, loss_scaling)
        trained = {t.name: t for t in step.trained}
        whole_specs = {
            name: jax.ShapeDtypeStruct(t.whole_shape, t.tensor.dtype.as_jax()) for name, t in trained.items()
        }
        steps = _OptaxSteps(transformation, tuple(trained), whole_specs, tuple(v.spec for v in values))
        _warn_of_parts(step.trained, steps, whole_specs)
        state = []
        for i, (leaf, name) in enumerate(zip(steps.leaves, steps.owners, strict=True)):
            dtype = popxl.dtype.as_dtype(leaf.dtype)
            if name and leaf.shape == trained[name].whole_shape:
                factory = trained[name].state(f"optax{i}", dtype)
            else:
                factory = VariableFactory(partial(initial.zeros, leaf.shape), dtype, f"optimizer.optax{i}")
            state.append(step.new_state(f"state.{i}", factory))
        tensors = [t.tensor for t in step.trained]
        new_gradients = (t.gradient for t in step.trained)
        steps.kind(*tensors, *state, *new_gradients, *values, step.number, *step.factors[1:])
        step.store_state()
        return step.named_state


def _warn_of_parts(trained: Iterable[Trained], steps: _OptaxSteps, whole_specs: Mapping[str, Any]) -> None:
    """Warn about updates combining elements that replicas hold in parts."""
    divided = [t.name for t in trained if t.tensor.meta_shape or t.grouping.num_groups > 1]
    if divided and (
        combined_by := non_elementwise_primitives(steps.update, whole_specs, steps.first, whole_specs, *steps.values)
    ):
        warn_at(
            SourceLocation.of(user_frame()),
            f"from_optax: the transformation combines elements of arrays ({', '.join(combined_by)}), and each replica "
            f"has a part of {', '.join(f'`{name}`' for name in divided)} only. What it does to parts is not what it "
            "would do to the whole. To clip by the norm use `clip_norm`; otherwise keep variables whole, or use an "
            "optimiser of `popxl_addons.optimizers`.",
            ShardedUpdateWarning,
        )


class _OptaxSteps:
    """Steps of an Optax transformation for named variables, by tracing only: no device starts.

    Args:
        values: spec of the loss, if it is given.

    Attributes:
        leaves: leaves of the state; random keys are numbers.
        owners: name of the variable that each belongs to; "" for none.

    Raises:
        PopxlError: if it cannot make a step.
    """

    def __init__(
        self,
        transformation: Any,
        names: tuple[str, ...],
        whole_specs: Mapping[str, jax.ShapeDtypeStruct],
        values: tuple[popxl.TensorSpec, ...],
    ) -> None:
        if values:
            import optax

            transformation = optax.with_extra_args_support(transformation)
        self._transformation, self._names = transformation, names
        self.values = [jax.ShapeDtypeStruct(spec.shape, spec.dtype.as_jax()) for spec in values]
        try:
            self.first = jax.eval_shape(transformation.init, dict(whole_specs))
            updates, new_state = jax.eval_shape(
                self.update, dict(whole_specs), self.first, dict(whole_specs), *self.values
            )
        except (TypeError, ValueError, AttributeError, LookupError) as problem:  # any error of its functions
            extra, remedy = (" and `value`", "") if values else ("", " If it looks at the loss, give it: `value=loss`.")
            raise PopxlError(
                f"from_optax: this transformation cannot make a step: {str(problem).rstrip('.')}. It is given "
                f"gradients, its state and the variables {[*whole_specs]} by name{extra}. What evaluates the loss "
                f"again, as a line search does, cannot be a step of a program.{remedy}"
            ) from problem
        numbers = jax.eval_shape(partial(jax.tree.map, _key_data), self.first)
        self._tree: Any = jax.tree.structure(numbers)
        paths = jax.tree_util.tree_leaves_with_path(numbers)
        new_tree: Any = jax.tree.structure(new_state)
        if self._tree != new_tree:
            raise PopxlError(
                "from_optax: the state of this transformation has another form after a step, so that no program can "
                f"repeat it: {self._tree} becomes {new_tree}."
            )
        if odd := [name for name in names if updates[name].size != math.prod(whole_specs[name].shape)]:
            raise PopxlError(f"from_optax: the updates of {odd} have other shapes than the variables.")
        self.leaves = [leaf for _, leaf in paths]
        self.owners = [_last_of(names, path) for path, _ in paths]

    def update(self, gradients: Any, state: Any, params: Any, *value: Array) -> Any:
        named = {"value": value[0]} if value else {}
        return self._transformation.update(gradients, state, params, **named)

    @property
    def kind(self) -> OpKind:
        """Declare the op for one step: variables, state, gradients, optional loss, step number, gradient factor. The
        first step starts from initial state."""
        names, count = self._names, len(self._names)
        changed = count + self._tree.num_leaves
        end = changed + count

        def lowering(*arrays: Array) -> tuple[Array, ...]:
            weights, old_state, gradients = arrays[:count], arrays[count:changed], arrays[changed:end]
            value, factors = arrays[end : end + len(self.values)], arrays[end + len(self.values) :]
            number, scale, *is_finite = factors
            params = dict(zip(names, weights, strict=True))
            initial = zip(jax.tree.leaves(self._transformation.init(params)), old_state, strict=True)
            state = jax.tree.unflatten(self._tree, [_initial_leaf(number == 1, *pair) for pair in initial])
            scaled = (g.astype(jnp.promote_types(g.dtype, jnp.float32)) * scale for g in gradients)
            grads = {name: g.astype(w.dtype) for (name, w), g in zip(params.items(), scaled, strict=True)}
            updates, new_state = self.update(grads, state, params, *value)
            new = (w + updates[name].astype(w.dtype).reshape(w.shape) for name, w in params.items())
            return select_if_finite(
                is_finite, (*new, *map(_key_data, jax.tree.leaves(new_state))), (*weights, *old_state)
            )

        return OpKind(
            "OptaxStep",
            lowering,
            shape=lambda *operands: (),
            gradient=None,
            traits=[Overwrites(positions=lambda attributes: frozenset(range(changed)), aliased=False), Colocated()],
            key=f"popxl_addons.OptaxStep.{self._tree}",
        )


def _last_of(names: Iterable[str], path: Sequence[Any]) -> str:
    """Last matching name on a leaf's path; "" without match."""
    keys = (key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey))
    return next((key for key in keys if key in names), "")


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Array:
    """Storable form of a state leaf: numbers of random keys, which tensors cannot hold."""
    leaf = jnp.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _initial_leaf(is_first: Array, first: Any, stored: Array) -> Array:
    """State leaf restored from storage, or initialized."""
    now = jnp.where(is_first, jnp.asarray(_key_data(first)).astype(stored.dtype), stored)
    return jax.random.wrap_key_data(now, impl=jax.random.key_impl(first)) if _is_key(jnp.asarray(first)) else now


def non_elementwise_primitives(function: Callable[..., Any], *args: Any) -> list[str]:
    """Primitives that may combine elements, such as sums and matrix products, found by tracing.

    Args:
        args: trees of arrays, or of `jax.ShapeDtypeStruct`.

    Example:
        >>> import jax.numpy as jnp
        >>> non_elementwise_primitives(lambda x: jnp.exp(x) * 2, jnp.ones(3))
        []
        >>> non_elementwise_primitives(lambda x: x / jnp.sum(x), jnp.ones(3))
        ['reduce_sum']
    """
    equations = leaf_equations(jax.make_jaxpr(function)(*args).jaxpr)
    others = (each for each in equations if each.primitive.name not in ELEMENTWISE_PRIMITIVES)
    return sorted({each.primitive.name for each in others if not _keeps_shapes(each)})


def _keeps_shapes(equation: Any) -> bool:
    """Whether all operands are scalars, or a shape op leaves the shape unchanged."""
    shapes = [value.aval.shape for value in equation.invars]
    if equation.primitive.name in ("broadcast_in_dim", "reshape", "squeeze"):
        return all(shape in ((), equation.outvars[0].aval.shape) for shape in shapes)
    return not any(shapes)
