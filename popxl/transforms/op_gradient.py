"""Gradients of single ops, by declared rules or by JAX.

JAX differentiates the op, the graph stays explicit: the gradient of an op without rules is one op, whose function is
`jax.vjp` of the op's. Dead-code elimination of its trace determines the forward values that it needs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from popxl import dtypes
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.core.tracing import arguments_used, computed_from_results, trace, with_results
from popxl.core.traits import REFUSED, VJP, ShardingRule
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ops.complex import conjugate
from popxl.ops.host import init
from popxl.transforms.grad_graph_info import GradGraphInfo
from popxl.values.spec import TensorSpec

Gradients = dict[int, Tensor]
"""Gradients of the inputs of an op, by position."""


@dataclass(frozen=True)
class Forward:
    """View of a forward op for its gradient rule.

    Attributes:
        follows: the tensors of its graph that depend on some required tensor.
        read: function from a tensor of the forward graph to its value in the gradient graph.
        differentiate: function that returns the gradient graph of a graph that the op runs, or `None` if no gradient
            flows through it.
        read_in_last_layout: the same as `read`, by way of the transposes and reshapes of the tensor that later ops
            read, so that only these are kept.
    """

    op: Op
    follows: AbstractSet[Tensor]
    read: Callable[[Tensor], Tensor]
    differentiate: Callable[[Graph], GradGraphInfo | None]
    read_in_last_layout: Callable[[Tensor], Tensor]

    def wants(self, i: int) -> bool:
        """Whether the gradient of input `i` leads anywhere."""
        return self.op.inputs[i] in self.follows


def passes(op: Op, i: int) -> bool:
    """Whether a gradient flows through an op to its input `i`, or should, and is refused there."""
    if op.inputs[i].dtype is dtypes.bool:
        return False
    rule = op.kind.gradient
    if rule is VJP or rule is REFUSED:
        return op.inputs[i].dtype.is_inexact
    if isinstance(rule, Mapping):
        return op.operand_names()[i].partition("[")[0] in rule
    return rule is not None


def gradients(forward: Forward, gs: tuple[Tensor | None, ...]) -> Gradients:
    """Input gradients of an op, given result gradients (`None` for missing ones).

    For complex tensors they are JAX's, the conjugates of those that users see: so rules are as for real numbers.
    """
    rule = forward.op.kind.gradient
    if rule is None:
        return {}
    if rule is VJP:
        return _by_jax(forward, gs)
    if rule is REFUSED:
        return _refuse(forward, gs)
    if isinstance(rule, Mapping):
        return _by_rules(rule, forward, gs)
    if not forward.op.runs:
        return cast(Any, rule)(forward, gs)
    # It calls gradient graphs, which take and return gradients as users see them.
    by_position = cast(Any, rule)(forward, tuple(None if g is None else conjugate(g) for g in gs))
    return {i: conjugate(g) for i, g in by_position.items()}


def _refuse(forward: Forward, gs: tuple[Tensor | None, ...]) -> Gradients:
    if any(g is None for g in gs):
        return {}
    op = forward.op
    hint = "Those of `popxl_addons.ops.replicated_all_reduce_TP` have one. " if op.kind.between_replicas else ""
    raise PopxlError(
        f"autodiff: a gradient reaches the op {op.name} ({op.source}), which has none. {hint}Pass the tensor through "
        "`ops.detach` if none is to flow there, or leave it out of `grads_provided`."
    )


def _by_rules(
    rules: Mapping[str, Callable[..., Tensor | None]], forward: Forward, gs: tuple[Tensor | None, ...]
) -> Gradients:
    """Apply the rules that an op states, one for each operand, for the operands that matter."""
    op = forward.op
    results = op.kind.result if isinstance(op.kind.result, tuple) else ()
    by_position: Gradients = {}
    for i, name in enumerate(op.operand_names()):
        rule = rules.get(name.partition("[")[0])
        if rule is not None and forward.wants(i):
            if gs[0] is None and "g" in _wishes(rule) and not set(results).isdisjoint(_wishes(rule)):
                continue  # it would read a result to multiply it by zeros
            gradient = rule(**{wish: _wish(wish, forward, gs, i) for wish in _wishes(rule)})
            if gradient is not None:
                by_position[i] = gradient
    return by_position


@functools.lru_cache(maxsize=4096)
def _wishes(rule: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(rule).parameters)


def _wish(name: str, forward: Forward, gs: tuple[Tensor | None, ...], i: int) -> Any:
    """Meaning of a gradient rule's parameter, for the gradient of input `i`; see `OpKind`."""
    op = forward.op
    match name:
        case "g":
            return init(op.outputs[0].shape, op.outputs[0].dtype) if gs[0] is None else gs[0]
        case "gs":
            return tuple(init(t.shape, t.dtype) if g is None else g for t, g in zip(op.outputs, gs, strict=True))
        case "out":
            return forward.read(op.outputs[0])
        case "outs":
            return tuple(forward.read(t) for t in op.outputs)
        case "i":
            return i
        case "operand":
            return forward.read(op.inputs[i])
        case "operand_spec":
            return op.inputs[i].spec
        case "attributes":
            return op.attributes
        case "specs":
            return tuple(t.spec for t in op.inputs)
    return _wish_by_name(name, forward)


def _wish_by_name(name: str, forward: Forward) -> Any:
    """Operand, spec of an operand (`x_spec`), attribute or result that an op has under a name."""
    op = forward.op
    operands = dict(zip(op.operand_names(), op.inputs, strict=True))
    if name in operands:
        return forward.read(operands[name])
    if (operand := operands.get(name.removesuffix("_spec"))) is not None:
        return operand.spec
    if name in op.attributes:
        return op.attributes[name]
    if isinstance(op.kind.result, tuple) and name in op.kind.result:
        return forward.read(op.outputs[op.kind.result.index(name)])
    default = inspect.signature(op.kind.lowering).parameters[name].default
    if default is inspect.Parameter.empty:
        raise PopxlError(f"The gradient rule of {op.op_type} asks for {name!r}, which the op does not have.")
    return default


def _by_jax(forward: Forward, gs: tuple[Tensor | None, ...]) -> Gradients:
    """The gradient op of an op whose gradient is JAX's, for the operands that matter."""
    op = forward.op
    wanted = tuple(i for i, t in enumerate(op.inputs) if forward.wants(i) and t.dtype.is_inexact)
    provided = tuple(k for k, g in enumerate(gs) if g is not None and op.outputs[k].dtype.is_inexact)
    if not wanted or not provided:
        return {}
    derivation = preferred_derivation(Derivation(op.kind, *op.signature, wanted, provided))
    kind, reads = vjp_kind(derivation)
    values = (*op.inputs, *op.outputs)
    operands = [forward.read(values[i]) for i in reads] + [g for k in provided if (g := gs[k]) is not None]
    results = kind(*operands)
    return dict(zip(wanted, results if isinstance(results, tuple) else (results,), strict=True))


@dataclass(frozen=True)
class Derivation:
    """Key of a gradient op that JAX derives from an op.

    Attributes:
        kind, operands, attributes, inputs, outputs: signature of the op: its declaration, the names of its inputs if
            some operand is a plain value, its attributes, and the specs of its inputs and outputs.
        wanted: positions of the inputs to differentiate with respect to.
        given: positions of the outputs with gradients.
        reads_outputs: whether the gradient reads outputs, in place of operands from which it would compute them again.
    """

    kind: OpKind
    operands: tuple[str, ...] | None
    attributes: tuple[tuple[str, Any], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    wanted: tuple[int, ...]
    given: tuple[int, ...]
    reads_outputs: bool = False

    def gradients(self, inputs: Sequence[Any], outputs: Sequence[Any], gs: Sequence[Any]) -> Sequence[Any]:
        """The gradients of the wanted inputs, on arrays. Values that they do not depend on may be anything."""
        if not self.reads_outputs:
            return self._gradients_and_outputs(*inputs, *gs)[: len(self.wanted)]
        traced = self._traced()
        if traced is None:
            raise PopxlError(
                f"The gradient of {self.kind.name} is to read the results of the op, and cannot with this version of "
                "JAX. Build the program again."
            )
        return jaxpr_as_fun(traced)(*inputs, *gs, *outputs)

    def reads(self) -> tuple[int, ...]:
        """Positions of the values that the gradients depend on, among the inputs and then the outputs."""
        traced, count = self._traced(), len(self.inputs)
        used = () if traced is None else arguments_used(traced.jaxpr)
        return tuple(i for i, is_used in enumerate(used[:count] + used[count + len(self.given) :]) if is_used)

    def follows_outputs(self) -> bool:
        """Whether JAX's derivative computes the outputs as the op does. Its rule of `cholesky` has others, with zeros
        where the op has none.
        """
        whole, own = self._whole(), trace(self._outputs, self.inputs, self.outputs)[0]
        outputs = with_results(whole, [k >= len(self.wanted) for k in range(len(whole.out_avals))], False)
        return str(outputs) == str(with_results(own, all_arguments=False))

    def _traced(self) -> ClosedJaxpr | None:
        """The gradients as a function of all inputs, the given gradients, and all outputs if it reads those. `None` if
        the outputs do not do in place of what computes them.
        """
        whole = self._whole()
        if self.reads_outputs:
            return computed_from_results(with_results(whole), len(self.outputs))
        return with_results(whole, [k < len(self.wanted) for k in range(len(whole.out_avals))])

    def _whole(self) -> ClosedJaxpr:
        specs = [*self.inputs, *(self.outputs[k] for k in self.given)]
        return trace(self._gradients_and_outputs, specs, self.outputs)[0]

    def _outputs(self, *inputs: Any) -> tuple[Any, ...]:
        """The outputs, those with gradients in the dtypes of the op."""
        result = self.kind.on_arrays(self.operands, dict(self.attributes))(*inputs)
        results = result if isinstance(result, tuple | list) else (result,)
        dtype_of = {k: self.outputs[k].dtype.as_jax() for k in self.given}
        return tuple(r.astype(dtype_of[k]) if k in dtype_of else r for k, r in enumerate(results))

    def _gradients_and_outputs(self, *operands: Any) -> tuple[Any, ...]:
        """The gradients of the wanted inputs and all outputs, by all inputs and the given gradients."""
        primals, gs = list(operands[: len(self.inputs)]), operands[len(self.inputs) :]

        def of_wanted(*values: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            for i, value in zip(self.wanted, values, strict=True):
                primals[i] = value
            outputs = self._outputs(*primals)
            return tuple(outputs[k] for k in self.given), outputs

        _, pull, outputs = jax.vjp(of_wanted, *(primals[i] for i in self.wanted), has_aux=True)
        return (*pull(gs), *outputs)


def preferred_derivation(derivation: Derivation) -> Derivation:
    """The derivation of the same gradient that reads fewer inputs: by the outputs of the op, if there is a choice.

    The gradient of an exponential function then computes none again, and that of a decomposition of a matrix no other.
    """
    d = derivation
    key = ("preferred", d.operands, d.attributes, d.inputs, d.outputs, d.wanted, d.given)

    def choose() -> Derivation:
        inputs_read = len(d.reads())
        if not inputs_read:
            return d
        alternative = replace(d, reads_outputs=True)
        reads = alternative.reads()
        is_better = reads and sum(i < len(d.inputs) for i in reads) < inputs_read
        return alternative if is_better and d.follows_outputs() else d

    return d.kind.remembered(key, choose)


def vjp_kind(derivation: Derivation) -> tuple[OpKind, tuple[int, ...]]:
    """A gradient op, and the positions of the values that it reads, among the inputs and then the outputs.

    Remembered, so that a program has one gradient op for each op that it uses.
    """
    d = derivation
    key = ("vjp", d.operands, d.attributes, d.inputs, d.outputs, d.wanted, d.given, d.reads_outputs)
    return d.kind.remembered(key, lambda: _vjp(derivation))


def _vjp(derivation: Derivation) -> tuple[OpKind, tuple[int, ...]]:
    """See `vjp_kind`."""
    d, reads = derivation, derivation.reads()

    def lowering(*operands: Any) -> Any:
        read = dict(zip(reads, operands, strict=False))
        specs = (*d.inputs, *d.outputs) if d.reads_outputs else d.inputs
        values = [read[i] if i in read else jnp.zeros(s.shape, s.dtype.as_jax()) for i, s in enumerate(specs)]
        count = len(d.inputs)
        results = d.gradients(values[:count], values[count:], operands[len(reads) :])
        return tuple(results) if len(d.wanted) > 1 else results[0]

    specs = [TensorSpec(d.inputs[i].shape, d.inputs[i].dtype, d.inputs[i].meta_shape) for i in d.wanted]
    shape = specs if len(d.wanted) > 1 else specs[0]
    rule = _gradient_rule(d, reads)
    return (
        OpKind(
            f"{d.kind.name}Grad",
            lowering,
            shape=lambda *operands: shape,
            traits=[] if rule is None else [rule],
            derivation=d,
        ),
        reads,
    )


def _gradient_rule(derivation: Derivation, reads: Sequence[int]) -> ShardingRule | None:
    """Sharding rule of a gradient op, from that of its op: gradients have the dimensions of operands, and are linear in
    the incoming ones. `None` without a rule, or if operands are broadcast."""
    rule, shapes = derivation.kind.sharding_rule, [spec.shape for spec in derivation.inputs]
    if rule is None:
        return None
    operands, results = rule.written(derivation.kind, derivation.operands, shapes, dict(derivation.attributes))
    ranks = {len(derivation.outputs[k].shape) for k in derivation.given} | {len(shapes[i]) for i in derivation.wanted}
    if len(results) < len(derivation.outputs) or len(ranks) > 1:
        return None
    operand_letters = [(*operands, *results)[i] for i in reads] + [results[k] for k in derivation.given]
    incoming = " ".join(f"operands[{i}]" for i in range(len(reads), len(operand_letters)))
    return ShardingRule(f"{','.join(operand_letters)}->{','.join(operands[i] for i in derivation.wanted)}", (incoming,))
