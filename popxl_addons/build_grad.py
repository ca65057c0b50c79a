"""Hand-written gradients. A module that implements ``build_grad`` defines its own gradient graph.

`Aux` and `VarGrad` are the two dictionaries that such a module writes to and reads from: ``self.aux`` carries values
from ``build`` to ``build_grad``, ``self.var_grad`` takes the gradients of variables. `create_grad_graph` runs
``build_grad``, checks that nothing is missing, and only then changes the forward graph.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import popxl
from popxl.transforms import ExpectedConnectionType
from popxl.transforms.autodiff import make_grad_graph_info
from popxl_addons.errors import GradientError
from popxl_addons.graph import GraphWithNamedArgs
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import duplicate_items

if TYPE_CHECKING:
    from popxl_addons.module import Module


class Aux:
    """Values stashed in ``build`` for ``build_grad``. There a tensor comes back as an input of the gradient graph."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}
        self._inputs: dict[Any, popxl.Tensor] | None = None

    def __setitem__(self, key: Any, value: Any) -> None:
        self._values[key] = value

    def __contains__(self, key: Any) -> bool:
        return key in self._values

    def __getitem__(self, key: Any) -> Any:
        if self._inputs is None:
            raise GradientError(
                "You can only get items within the `build_graph` method of the gradient, which is `build_grad`: "
                f"`self.aux[{key!r}]` was read outside of it. In `build`, use the value itself."
            )
        if key not in self._values:
            raise KeyError(f"`self.aux` has no {key!r}; `build` stashed {list(self._values)}.")
        value = self._values[key]
        if not isinstance(value, popxl.Tensor):
            return value
        if key not in self._inputs:
            self._inputs[key] = popxl.graph_input(**value.spec, name=str(key))
        return self._inputs[key]

    def to_dict(self) -> dict[Any, Any]:
        """All stashed items, in order."""
        return dict(self._values)

    @contextmanager
    def reading(self, values: Mapping[Any, Any]) -> Iterator[Mapping[Any, popxl.Tensor]]:
        """Give access to `values`. Yields the inputs made for them: key → input, in the order of first access."""
        stashed, self._values, self._inputs = self._values, dict(values), {}
        try:
            yield self._inputs
        finally:
            self._values, self._inputs = stashed, None


class VarGrad:
    """Gradients of variables by flat name, writable while ``build_grad`` runs."""

    def __init__(self) -> None:
        self._variables = NamedTensors()
        self._gradients: dict[str, popxl.Tensor] | None = None

    def __setitem__(self, name: str, gradient: popxl.Tensor) -> None:
        gradients = self._open(name)
        if not isinstance(gradient, popxl.Tensor):
            raise TypeError(
                f"Not a tensor: `self.var_grad[{name!r}]` was given a {type(gradient).__name__}, expected the gradient "
                "as a tensor of the gradient graph."
            )
        if name not in self._variables.to_dict():
            raise KeyError(f"Not a variable: {name!r}. The forward graph has {self._variables.keys_flat()}.")
        variable = self._variables[name]
        if _layout(gradient) != _layout(variable):
            raise ValueError(
                "Shape or meta-shape of Tensor does not match variable. "
                f"`self.var_grad[{name!r}]` was given {_described(gradient)}, the variable is {_described(variable)}."
            )
        gradients[name] = gradient

    def __getitem__(self, name: str) -> popxl.Tensor:
        gradients = self._open(name)
        if name not in gradients:
            raise KeyError(f"`self.var_grad` has no {name!r} yet; set so far: {list(gradients)}.")
        return gradients[name]

    def __contains__(self, name: str) -> bool:
        return name in (self._gradients or {})

    @contextmanager
    def collecting(self, variables: NamedTensors) -> Iterator[Mapping[str, popxl.Tensor]]:
        """Accept gradients of `variables`. Yields those set so far."""
        self._variables, self._gradients = variables, {}
        try:
            yield self._gradients
        finally:
            self._variables, self._gradients = NamedTensors(), None

    def _open(self, name: str) -> dict[str, popxl.Tensor]:
        if self._gradients is None:
            raise GradientError(
                "You can only set or get variable gradients within the `build_graph` method of the gradient, which is "
                f"`build_grad`: `self.var_grad[{name!r}]` was used outside of it."
            )
        return self._gradients


def create_grad_graph(
    module: Module,
    fwd_graph: GraphWithNamedArgs,
    grads_provided: Iterable[popxl.Tensor] | None = None,
    grads_required: Iterable[popxl.Tensor] | None = None,
) -> GraphWithNamedArgs:
    """The gradient graph that ``module.build_grad`` states for `fwd_graph`, a graph made from `module`.

    Its inputs are the gradients of `grads_provided` (default: all outputs), then the stashed tensors that were read;
    its outputs are the gradients of `grads_required` (default: all inputs), in that order. All stashed tensors become
    outputs of the forward graph, so that its calls deliver them. If anything fails the forward graph stays as it was.
    """
    forward = fwd_graph.graph
    _check_implementation(module)
    provided = _chosen(grads_provided, forward.outputs, "`grads_provided` is not a output of `fwd_graph`")
    required = _chosen(grads_required, forward.inputs, "`grads_required` is not a input of `fwd_graph`")
    stashed = [tensor for tensor in fwd_graph.aux.values() if isinstance(tensor, popxl.Tensor)]
    if strays := [tensor.id for tensor in stashed if tensor not in forward]:
        raise ValueError(f"`self.aux` holds tensors that are not in the graph `{forward.name}`: {strays}.")

    with module.aux.reading(fwd_graph.aux) as inputs, module.var_grad.collecting(fwd_graph.args) as var_grads:

        @functools.wraps(module.build_grad)
        def gradients(*seeds: popxl.Tensor) -> list[popxl.Tensor]:
            return _arranged(_tensors(module.build_grad(*seeds)), var_grads, required, fwd_graph.args)

        backward = forward.ir.create_graph(gradients, *(tensor.spec for tensor in provided))
        read = [fwd_graph.aux[key] for key in inputs]

    for tensor in stashed:
        forward.add_output(tensor)
    info = make_grad_graph_info(
        forward,
        backward,
        [(tensor, ExpectedConnectionType.FwdGrad) for tensor in provided]
        + [(tensor, ExpectedConnectionType.Fwd) for tensor in read],
        list(required),
    )
    return GraphWithNamedArgs.from_grad_graph(info)


def _check_implementation(module: Module) -> None:
    if not module.implements_grad_graph:
        raise GradientError(f"{type(module).__name__} has no `build_grad` to make a gradient graph of.")
    parameters = inspect.signature(module.build_grad).parameters.values()
    if any(p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters):
        raise TypeError(
            f"{type(module).__name__}.build_grad: method signature must only have a fixed number of positional "
            f"parameters as inputs. Expected one for each provided gradient, got `{', '.join(map(str, parameters))}`."
        )


def _chosen(
    tensors: Iterable[popxl.Tensor] | None, available: Sequence[popxl.Tensor], complaint: str
) -> tuple[popxl.Tensor, ...]:
    if tensors is None:
        return tuple(available)
    chosen = tuple(tensors)
    if strays := [tensor for tensor in chosen if tensor not in available]:
        raise ValueError(f"A Tensor specified in {complaint}: {strays}. Available: {list(available)}.")
    if repeated := duplicate_items(chosen):
        raise ValueError(f"{complaint.split()[0]} names a tensor more than once: {repeated}.")
    return chosen


def _tensors(returned: Any) -> tuple[popxl.Tensor, ...]:
    if returned is None:
        return ()
    if isinstance(returned, popxl.Tensor):
        return (returned,)
    tensors = tuple(returned) if isinstance(returned, Iterable) else (returned,)
    if not all(isinstance(tensor, popxl.Tensor) for tensor in tensors):
        raise ValueError(f"`build_grad` returned {returned!r}, expected None, a tensor, or tensors.")
    return tensors


def _arranged(
    returned: Sequence[popxl.Tensor],
    var_grads: Mapping[str, popxl.Tensor],
    required: Sequence[popxl.Tensor],
    args: NamedTensors,
) -> list[popxl.Tensor]:
    """Gradients of `required` tensors in order; `returned` holds those of non-variables."""
    names = {tensor: name for name, tensor in args.to_dict().items()}
    inputs = [tensor for tensor in required if tensor not in names]
    if missing := [names[tensor] for tensor in required if tensor in names and names[tensor] not in var_grads]:
        raise GradientError(
            f"Not all variable gradients have been specified in `self.var_grad`. Missing: {missing}. Set them in "
            "`build_grad`, or leave the variables out of `grads_required`."
        )
    if len(returned) > len(inputs):
        raise GradientError(
            f"Too many outputs in the grad graph. `build_grad` returned {len(returned)} tensors for "
            f"{len(inputs)} required inputs: {[tensor.name for tensor in inputs]}."
        )
    if len(returned) < len(inputs):
        raise GradientError(
            "Not all forward graph inputs have been specified as outputs in the grad graph. `build_grad` returned "
            f"{len(returned)} tensors for {len(inputs)} required inputs: {[tensor.name for tensor in inputs]}."
        )
    for i, (gradient, tensor) in enumerate(zip(returned, inputs, strict=True)):
        if _layout(gradient) != _layout(tensor):
            raise ValueError(
                f"Shape or meta-shape of output Tensor at position {i} does not match the input `{tensor.name}`: "
                f"`build_grad` returned {_described(gradient)}, the input is {_described(tensor)}."
            )
    given = iter(returned)
    return [var_grads[names[tensor]] if tensor in names else next(given) for tensor in required]


def _layout(tensor: popxl.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tuple(tensor.meta_shape)


def _described(tensor: popxl.Tensor) -> str:
    shape, meta_shape = _layout(tensor)
    return f"of shape {shape}" + (f" (meta-shape {meta_shape})" if meta_shape else "")
