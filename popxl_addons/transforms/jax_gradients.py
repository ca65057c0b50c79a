"""`value_and_grad`: the gradient of a JAX function, with a memory plan."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, primitives
from jax.sharding import AxisType
from jax.tree_util import DictKey, SequenceKey, keystr

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.extend.arguments import check_type
from popxl.extend.graphs import leading_to
from popxl.extend.jax import generator_of, key_data, with_keys
from popxl.extend.memory import bytes_of, current_request
from popxl_addons.dot_tree import sanitise
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.transforms.activations import MemoryPolicy
from popxl_addons.transforms.autodiff import autodiff
from popxl_addons.transforms.memory_budget import is_budget, plan_memory
from popxl_addons.transforms.memory_plan import MemoryPlan
from popxl_addons.transforms.planned_gradients import PlannedGradients


def value_and_grad(
    fn: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    memory: MemoryPlan | MemoryPolicy | str | int | None = None,
) -> ValueAndGrad:
    """`jax.value_and_grad` with a memory plan: each activation is kept, recomputed or offloaded.

    The function is called like that of `jax.value_and_grad`, usually inside of `jax.jit`, with trees of arrays, and
    returns the same. It is a function of JAX: `jax.vmap`, shardings and further derivatives apply. The plan concerns
    the activations of the graphs that `fn` becomes (`popxl.from_jax`): of jitted functions that `fn` calls, such as a
    layer, and of bodies of its loops (`lax.scan`). A function without these is planned as a whole.

    `plan_memory` takes a function that builds a jitted training step with this, and finds a plan for a budget of the
    whole step, including the state of its optimiser, for any machine.

    Args:
        fn: function of trees of arrays, which returns a scalar.
        argnums: position of the arguments to differentiate by.
        has_aux: whether `fn` returns a pair of the scalar and other values, which are returned unchanged.
        memory: a plan; a policy, such as "products"; or a budget, such as "14 GB", for arguments, results and
            temporaries of this function alone on the local devices: the first call for arguments of some shapes plans.
            By default, everything is kept.

    Raises:
        TypeError: if `fn` is no function. When it is called, if the first result is not a scalar of a float dtype, and
            for arguments to differentiate by that are not floating-point or complex.
        ValueError: for another `memory`, or one that does not fit `fn`; for `argnums` without such arguments.
        NotImplementedError: when it is called inside of `jax.shard_map`, unless that has `check_vma=False`.
        PopxlError: if `fn` cannot be a graph (`popxl.from_jax`), or if no plan within a budget is found.

    Example:
        >>> @jax.jit
        ... def layer(x, w):
        ...     return x + jnp.tanh(x @ w)
        >>> def loss(params, x):
        ...     for w in params["layers"]:
        ...         x = layer(x, w)
        ...     return jnp.mean(x**2)
        >>> params = {"layers": [np.eye(3, dtype=np.float32)] * 2}
        >>> gradient = value_and_grad(loss, memory="nothing")
        >>> value, gradients = jax.jit(gradient)(params, np.ones((2, 3), np.float32))
        >>> gradients["layers"][1].shape, gradient.plan.graphs[0].paths("recompute")
        ((3, 3), ('tanh_out',))
    """
    return ValueAndGrad(fn, argnums, has_aux, memory)


class ValueAndGrad:
    """Value and gradient of a JAX function, with a memory plan. `value_and_grad` creates it, and documents it.

    Attributes:
        plan: the plan that the last call applied; `None` before the first call.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        argnums: int | Sequence[int],
        has_aux: bool,
        memory: MemoryPlan | MemoryPolicy | str | int | None,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"value_and_grad: `fn` must be a function; got {fn!r} ({type(fn).__name__}).")
        positions = tuple(argnums) if isinstance(argnums, Iterable) else (argnums,)
        for position in positions:
            check_type(position, int | np.integer, "value_and_grad: `argnums`", "a position, or several")
        self._argnums = tuple(map(int, positions)) if isinstance(argnums, Iterable) else int(argnums)
        self._fn, self._has_aux, self._memory = fn, has_aux, memory
        self._plans: dict[Hashable, MemoryPlan] = {}  # within the budget, by the traced function
        self.plan: MemoryPlan | None = None
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Value and gradients. See `value_and_grad`."""
        traced = _TracedFunction(self._fn, _Arguments(self._fn, self._argnums, args, kwargs), self._has_aux)
        memory = self._memory
        if is_budget(memory) and current_request() is None:
            memory = self._planned(traced, bytes_of(memory, "value_and_grad: `memory`"))
        gradient, planned = traced.gradient(memory)
        self.plan = planned.plan
        return traced.results(traced.with_shardings(gradient)(*traced.arrays))

    def _planned(self, traced: _TracedFunction, budget: int) -> MemoryPlan:
        """Plan within a budget for the traced function, which other plain arguments may change."""
        key = traced.text, *((spec.shape, spec.dtype, spec.sharding) for spec in traced.specs)
        if key not in self._plans:

            def build(memory: Any) -> Any:
                return functools.partial(jax.jit(traced.gradient(memory)[0]), *traced.specs)

            self._plans[key] = plan_memory(build, budget).plan
        return self._plans[key]


class _Arguments:
    """Arguments of a call: which of them are arrays, and which of these to differentiate by.

    Attributes:
        arrays: the arrays, with the data of random keys.
        names: their names: `params_layers_0_w`.
        wanted: positions, among the arrays, of those to differentiate by, in the form of `jax.grad`'s result.
    """

    def __init__(
        self, fn: Callable[..., Any], argnums: int | Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        name = _name_of(fn)
        positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        if beyond := [i for i in positions if not -len(args) <= i < len(args)]:
            raise ValueError(
                f"value_and_grad: `argnums` is {argnums!r}, and `{name}` was called with {len(args)} positional "
                f"arguments; {beyond[0]} is none of them."
            )
        paths, self._structure = jax.tree.flatten_with_path((args, kwargs))
        numbered, _ = jax.tree.unflatten(self._structure, range(len(paths)))
        wanted = numbered[argnums] if isinstance(argnums, int) else tuple(numbered[i] for i in positions)
        by = {*jax.tree.leaves(wanted)}
        # Arguments that are no arrays are given to the function as they are, unless there are gradients of them.
        self._leaves = [jnp.asarray(leaf) if i in by else _canonical(leaf) for i, (_, leaf) in enumerate(paths)]
        self._places = [i for i, leaf in enumerate(self._leaves) if _is_array(leaf)]
        types = [jax.typeof(self._leaves[i]) for i in self._places]
        self._generators = [*map(generator_of, types)]
        self.names = [_argument(fn, paths[i][0]) for i in self._places]
        for i, name_of_array, type_ in zip(self._places, self.names, types, strict=True):
            if i in by and not jnp.issubdtype(type_.dtype, jnp.inexact):
                raise TypeError(
                    f"value_and_grad: the argument `{name_of_array}` of `{name}` is {type_.str_short()}; expected "
                    "floating-point or complex numbers to differentiate by. Leave it out of `argnums`."
                )
        self.arrays = key_data(self._leaves[i] for i in self._places)
        self.wanted = jax.tree.map(self._places.index, wanted)

    def with_arrays(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments and keyword arguments, with other arrays."""
        leaves = dict(enumerate(self._leaves))
        leaves.update(zip(self._places, with_keys(arrays, self._generators), strict=True))
        return jax.tree.unflatten(self._structure, leaves.values())


class _TracedFunction:
    """A function traced on arguments: its gradient with any memory plan.

    Attributes:
        arrays: arrays that the gradient takes: those that the function closes over, and those among its arguments.
    """

    def __init__(self, fn: Callable[..., Any], arguments: _Arguments, has_aux: bool) -> None:
        self.name, self._has_aux = _name_of(fn), has_aux

        def of_arrays(*arrays: Any) -> list[Any]:
            args, kwargs = arguments.with_arrays(arrays)
            leaves, self._results = jax.tree.flatten(self._checked(fn(*args, **kwargs)))
            results = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}
            # Results that are no arrays are returned as they are.
            self._leaves = {i: leaf for i, leaf in enumerate(leaves) if i not in results}
            self._generators = {i: generator_of(jax.typeof(leaf)) for i, leaf in results.items()}
            return key_data(results.values())

        traced = jax.make_jaxpr(of_arrays)(*arguments.arrays)
        self._jaxpr, constants = traced.jaxpr, traced.consts
        self._constant_generators = [generator_of(jax.typeof(each)) for each in constants]
        self._result_types = traced.out_avals
        self.arrays = [*key_data(constants), *arguments.arrays]
        self._names = [*(f"constant{i}" for i in range(len(constants))), *arguments.names]
        self._wanted = jax.tree.map(lambda place: place + len(constants), arguments.wanted)
        if any(jax.typeof(array).manual_axis_type.varying for array in self.arrays):
            raise NotImplementedError(
                f"value_and_grad: `{self.name}` is differentiated inside of `jax.shard_map`, by arrays that vary over "
                "its axes. Call `jax.shard_map` inside of it; or with `check_vma=False`, and reduce the gradients by "
                "`jax.lax.psum` or `pmean`."
            )

    @property
    def text(self) -> str:
        """Text of what was traced, without addresses."""
        return re.sub("0x[0-9a-f]+", "", str(self._jaxpr))

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Types of the arrays, with the shardings of those that stay on their devices."""
        shardings = (
            None if isinstance(a, jax.core.Tracer | np.ndarray) or not a.committed else a.sharding for a in self.arrays
        )
        pairs = zip(self.arrays, shardings, strict=True)
        return [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding) for array, sharding in pairs]

    def gradient(self, memory: Any) -> tuple[Callable[..., list[Any]], PlannedGradients]:
        """Function of the arrays that returns the results of the function, and then the gradients."""
        ir = popxl.Ir()
        ir.options.precision = "default"  # JAX's: what the function states itself comes first
        specs = [popxl.TensorSpec(a.shape, popxl.dtype.as_dtype(np.dtype(a.dtype))) for a in self.arrays]
        wanted = jax.tree.leaves(self._wanted)
        with get_current_context().isolated(), ir.main_graph:
            forward = GraphWithNamedArgs(self._forward_graph(ir, specs))
            value, *_ = results = forward.graph.outputs
            reached = leading_to(forward.graph, [value])
            required = [t for t in dict.fromkeys(forward.graph.inputs[i] for i in wanted) if t in reached]
            planned = PlannedGradients(forward.graph, _requested(memory), inputs_wait=True)
            backward = autodiff(forward, [value], required, memory=planned) if required else None
            streams = [popxl.h2d_stream(spec.shape, spec.dtype, f"array{i}") for i, spec in enumerate(specs)]
            site = forward.call_with_info(*map(ops.host_load, streams))
            computed = list(site.outputs[: len(results)])
            if backward is not None:
                args = backward.grad_graph_info.inputs_dict(site)
                computed += backward.call(popxl.constant(1.0, value.dtype), args=args)
            for i, t in enumerate(computed):
                ops.host_store(popxl.d2h_stream(t.shape, t.dtype, f"result{i}"), t)
        function = popxl.to_jax(ir.main_graph)
        places = {forward.graph.inputs.index(t): len(results) + i for i, t in enumerate(required)}

        def gradient(*arrays: Any) -> list[Any]:
            stored, _ = function(**{f"array{i}": array for i, array in enumerate(arrays)})
            found = [stored[f"result{i}"] for i in range(len(computed))]
            # JAX's gradients of complex numbers are the conjugates of those that graphs have.
            gradients = [jnp.conj(found[places[i]]) if i in places else jnp.zeros_like(arrays[i]) for i in wanted]
            return [*found[: len(results)], *gradients]

        return gradient, planned

    def _forward_graph(self, ir: popxl.Ir, specs: Sequence[popxl.TensorSpec]) -> popxl.Graph:
        """Graph of the function, with the arrays as inputs."""
        count = len(self._constant_generators)

        def evaluate(*arrays: Any) -> list[Any]:
            constants = with_keys(arrays[:count], self._constant_generators)
            return jaxpr_as_fun(ClosedJaxpr(self._jaxpr, constants))(*arrays[count:])

        def build() -> list[popxl.Tensor]:
            named = zip(specs, self._names, strict=True)
            inputs = [popxl.graph_input(spec.shape, spec.dtype, name) for spec, name in named]
            return popxl.from_jax(evaluate)(*inputs)

        evaluate.__qualname__ = build.__qualname__ = self.name
        return ir.create_graph(build)

    def with_shardings(self, gradient: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """The function that `gradient` returned, for arrays whose types have shardings on a mesh with explicit axes.

        Types inside of it have none: XLA divides it. Gradients have the shardings of the arrays.
        """
        types = [jax.typeof(array).sharding for array in self.arrays]
        if not any(AxisType.Explicit in sharding.mesh.axis_types for sharding in types):
            return gradient
        results = (type_.sharding.spec for type_ in self._result_types)
        specs = [*results, *(types[i].spec for i in jax.tree.leaves(self._wanted))]
        return jax.sharding.auto_axes(gradient, out_sharding=specs)

    def results(self, flat: Sequence[Any]) -> Any:
        """Results in the form of `jax.value_and_grad`, from those of `gradient`."""
        wanted, structure = jax.tree.flatten(self._wanted)
        types = [*self._result_types, *(jax.typeof(self.arrays[i]) for i in wanted)]
        flat = [_weak(a) if type_.weak_type else a for a, type_ in zip(flat, types, strict=True)]
        count = len(self._generators)
        found = with_keys(flat[:count], self._generators.values())
        leaves = self._leaves | dict(zip(self._generators, found, strict=True))
        value, aux = jax.tree.unflatten(self._results, [leaves[i] for i in range(len(leaves))])
        gradients = jax.tree.unflatten(structure, flat[count:])
        return ((value, aux) if self._has_aux else value), gradients

    def _checked(self, result: Any) -> tuple[Any, Any]:
        """The scalar that the function returns, and its other results."""
        if self._has_aux and not (isinstance(result, tuple | list) and len(result) == 2):
            raise TypeError(
                f"value_and_grad: `{self.name}` returns {result!r}; expected a pair with `has_aux`: a scalar, and "
                "other values."
            )
        value, aux = result if self._has_aux else (result, None)
        leaves = jax.tree.leaves(value)
        type_ = jax.typeof(leaves[0]) if len(leaves) == 1 and leaves[0] is value else None
        if type_ is None or type_.shape or not jnp.issubdtype(type_.dtype, jnp.floating):
            hint = "" if self._has_aux else " A function that returns other values beside it needs `has_aux=True`."
            found = value if type_ is None else type_.str_short()
            raise TypeError(f"value_and_grad: `{self.name}` returns {found}; expected a scalar of a float dtype.{hint}")
        return jnp.asarray(value), aux


def _is_array(leaf: Any) -> bool:
    """Whether JAX takes a value for an array: NumPy's arrays of text, objects and dates are plain values."""
    return isinstance(leaf, jax.Array) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "OSUmM")


def _canonical(leaf: Any) -> Any:
    """An array of NumPy in the dtype that JAX gives it, which has 32 bits by default; other values unchanged."""
    is_of_numpy = isinstance(leaf, np.ndarray) and _is_array(leaf)
    return leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False) if is_of_numpy else leaf


def _weak(array: Any) -> Any:
    """The array with the weak type of a number of Python."""
    return primitives.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def _requested(memory: Any) -> Any:
    """The plan or policy to apply: the stated one, unless a tool requests another."""
    request = current_request()
    if request is None:
        return "everything" if memory is None else memory
    return request.memory_of(None if is_budget(memory) else memory)


def _name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__name__)


def _argument(fn: Callable[..., Any], path: Sequence[Any]) -> str:
    """Name of a leaf of the arguments: "params_layers_0_w"."""
    _, first, *rest = path
    name = first.key if isinstance(first, DictKey) else f"arg{first.idx}"
    if isinstance(first, SequenceKey):
        try:
            parameters = [*inspect.signature(fn).parameters.values()]
        except (TypeError, ValueError):  # of builtins
            parameters = []
        if first.idx < len(parameters) and parameters[first.idx].kind is not inspect.Parameter.VAR_POSITIONAL:
            name = parameters[first.idx].name
    inner = keystr(tuple(rest), simple=True, separator="_")
    return sanitise(f"{name}_{inner}" if inner else name)
