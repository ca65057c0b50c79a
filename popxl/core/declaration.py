"""Op declarations, `OpKind`. Records of ops in graphs are in `popxl.core.recording`.

Every op of this project, and every op of a user, is one `OpKind`: a JAX function, and what JAX cannot know about it
(the names of the results, a gradient other than JAX's, operands that are overwritten or share storage with results).
Calling the kind on tensors records an `Op` in the current graph; running the graph calls the same function on arrays.
Nothing here computes. Lowering of a recorded op is in `runtime.lowering.lower`, its differentiation in
`popxl.transforms.autodiff`.

    sin = OpKind("Sin", jnp.sin)
    y = sin(x)                       # x, y: tensors of the current graph
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from popxl.base.exact_key import exact_key
from popxl.base.names import snake
from popxl.context import get_current_context
from popxl.core.recording import Op, at_this_line, check_colocated, foreign_tensor, not_a_tensor
from popxl.core.tensor import Tensor
from popxl.core.tracing import abstract_evaluation, trace
from popxl.core.traits import (
    VJP,
    Asserts,
    BetweenReplicas,
    Colocated,
    Composite,
    Contracts,
    Draws,
    Drops,
    Effect,
    Exchange,
    Makes,
    Mark,
    OnIpus,
    Overwrites,
    Placed,
    Prefetched,
    RealOnly,
    RecomputedFrom,
    Requirement,
    Runs,
    Schedules,
    ShardingRule,
    Trait,
    View,
)
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.values.shapes import like_first
from popxl.values.spec import TensorSpec, brief

Specs = TensorSpec | Sequence[TensorSpec]
T = TypeVar("T")


class OpKind:
    """An op declaration. Call it on tensors to add an op to the current graph.

    The parameters of `lowering` are the parameters of the op. Positional ones are operands: tensors in a graph, arrays
    when it runs. An operand with a default may instead be given a plain value (`None`, a number), which then becomes
    part of the op. Keyword-only parameters are attributes: plain values, fixed when the op is created.

    Args:
        name: name of the op in printed graphs, for example `"MatMul"`.
        lowering: meaning of the op: a JAX function of the operands (arrays) and the attributes that returns one array,
            or a tuple of arrays.
        shape: shape rule: called like `lowering`, but with tensors in place of arrays. It returns the `TensorSpec` of
            the result, or a tensor with the same spec (or a sequence of these), or raises. By default the specs are
            derived from `lowering` by abstract evaluation.
        gradient: gradient rule. `VJP` (the default) takes JAX's derivative of `lowering`, which reads operands, or
            results if it then reads fewer operands; with `None` no gradient flows; with `REFUSED` autodiff raises. A
            mapping from operand names to rules gives gradients to these operands only. A rule is written with ops, and
            the names of its parameters say what it reads: `g`, the incoming gradient (`gs`, those of all results); an
            operand or an attribute, by name; `out`, the result (`outs`, all of them; one of several, by its name in
            `result`); `<operand>_spec`, the spec of an operand; `attributes`, all attributes; and, where the last
            operand is variadic, `i`, `operand` and `operand_spec` of the one whose gradient is asked for.
            Operands and results that it reads are kept alive. The result of a rule is summed over broadcast axes if its
            shape differs from the operand's. Rules are written as for real numbers: for complex tensors, `g` and the
            result of a rule are conjugates of gradients. A single function `(forward, gs) -> {operand index: Tensor}`
            serves ops that run graphs.
        result: name of the result tensor; `{operand}` stands for the name of that operand, `{i}` for the number of the
            result where there are several. A tuple names several results; an op may have only the first of them.
        traits: further properties of the op, as values of `popxl.core.traits`: it overwrites operands, is a view, has
            effects, communicates with other replicas, ...
        operands: names of the operands, if other than the parameter names of `lowering`.
        key: name of the op in saved programs, where several ops share a name; by default the name.
        derivation: for an op derived from another, the derivation; saved programs keep it in place of a key.

    Example:
        Any JAX function becomes an op, with its gradient, in one statement.

        >>> softplus = popxl.OpKind("Softplus", jax.nn.softplus)
        >>> with ir.main_graph:
        ...     y = softplus(x)
    """

    def __init__(
        self,
        name: str,
        lowering: Callable[..., Any],
        *,
        shape: Callable[..., Specs] | None = None,
        gradient: Mapping[str, Callable[..., Any]] | Callable[..., Any] | Mark | None = VJP,
        result: str | tuple[str, ...] | None = None,
        traits: Iterable[Trait] = (),
        operands: tuple[str, ...] | None = None,
        key: str | None = None,
        derivation: Any = None,
    ) -> None:
        self.name = name
        self.key = key or name
        self.derivation = derivation
        if derivation is None:
            _declared[self.key] = self
        self.lowering = lowering
        self.shape = shape
        self.gradient = gradient
        self.result = result if result is not None else f"{snake(name)}_out"
        self._memory: dict[tuple[Any, ...], Any] = {}
        self._renamed = operands
        self._take(tuple(traits))
        parameters = _Parameters.from_function(lowering) if operands is None else _Parameters(operands, len(operands))
        if self.between_replicas:
            parameters = parameters.with_groups()
        self._operands, self._required, self._variadic = parameters.operands, parameters.required, parameters.variadic
        self._parameters = parameters
        for trait in self.traits:
            trait.check(self)

    def _take(self, traits: tuple[Trait, ...]) -> None:
        """Index the traits as attributes, which are read often."""
        self.traits = traits
        self.requirements = tuple(trait for trait in traits if isinstance(trait, Requirement))
        plain_traits = [trait for trait in traits if not isinstance(trait, Requirement)]
        by_type: dict[type, Any] = {type(trait): trait for trait in plain_traits}
        if len(by_type) < len(plain_traits) or not all(isinstance(trait, Trait) for trait in traits):
            raise TypeError(
                f"OpKind: the `traits` of {self.name} are {traits}; expected values of `popxl.core.traits`, each kind "
                "of trait once (but for requirements)."
            )
        self.view: View | None = by_type.get(View)
        self.overwrites: Overwrites | None = by_type.get(Overwrites)
        self.runs: Runs | None = by_type.get(Runs)
        self.graphs = () if self.runs is None else self.runs.graphs  # names of the attributes that hold graphs
        self.stands_for: Composite | None = by_type.get(Composite)
        self.placed: Placed | None = by_type.get(Placed)
        self.effect = Effect in by_type
        self.schedules = Schedules in by_type
        self.prefetched = Prefetched in by_type
        self.exchange: str = by_type[Exchange].attribute if Exchange in by_type else ""
        self.between_replicas = BetweenReplicas in by_type
        self._between: BetweenReplicas = by_type.get(BetweenReplicas, BetweenReplicas())
        self.asserts = Asserts in by_type
        self.contracts: Contracts | None = by_type.get(Contracts)
        self.recomputed_from: RecomputedFrom | None = by_type.get(RecomputedFrom)
        self.sharding_rule: ShardingRule | None = by_type.get(ShardingRule)
        self.real_only = RealOnly in by_type
        self.ipus: str = by_type[OnIpus].attribute if OnIpus in by_type else ""
        self.drops: Drops | None = by_type.get(Drops)
        self.draws = Draws in by_type
        self.aliased = self.overwrites is not None and self.overwrites.aliased
        external = (Runs, Composite, Exchange, BetweenReplicas, Effect)
        self.is_carried_out_by_others = not by_type.keys().isdisjoint(external)  # lowering is no call on arrays
        anywhere = () if self.runs or self.stands_for or self.ipus else None
        self.colocated: tuple[str, ...] | None = by_type[Colocated].operands if Colocated in by_type else anywhere

    def exchanged(self, attributes: Mapping[str, Any]) -> Makes:
        """Distribution of a collective's result over the members of a group."""
        makes = self._between.makes
        return makes(attributes) if callable(makes) else makes

    def needs_same_feeds(self, attributes: Mapping[str, Any]) -> bool:
        """Whether a cross-replica op requires equal feeds on replicas of its groups."""
        asks = self._between.same_feeds
        return asks is not None and asks(attributes)

    def check_operands(self, names: Iterable[str], does: str) -> None:
        """Raise `TypeError` for unknown operand names."""
        for name in names:
            if name not in self._operands:
                raise TypeError(f"OpKind: {self.name} {does} `{name}`, and its operands are {self._operands}.")

    def check_attribute(self, name: str, does: str) -> None:
        """Raise `TypeError` for an unknown attribute name."""
        names = self._parameters.attributes
        if names is not None and self._renamed is None and name not in names:
            raise TypeError(f"OpKind: {self.name} {does} `{name}`, and its attributes are {tuple(names)}.")

    def __repr__(self) -> str:
        return f"OpKind[{self.name}]"

    @staticmethod
    def named(key: str) -> OpKind | None:
        """The live op last declared under this key."""
        return _declared.get(key)

    def inplace(self, name: str, result: str, **changes: Any) -> OpKind:
        """Declare the in-place version: it overwrites the first operand and returns an alias."""
        traits = [
            Overwrites(self._operands[0]),
            *(trait for trait in self.traits if isinstance(trait, BetweenReplicas | RealOnly | ShardingRule)),
        ]
        settings = {"shape": like_first, "operands": self._renamed, "traits": traits} | changes
        return OpKind(name, self.lowering, result=result, **settings)

    def as_view(self, name: str, update: Callable[..., tuple[Any, ...]]) -> OpKind:
        """Declare the version whose result is a view of the operands; see `View` for `update`."""
        traits = [View(update), *self.traits]
        return OpKind(name, self.lowering, shape=self.shape, gradient=self.gradient, result=self.result, traits=traits)

    def on_arrays(self, names: tuple[str, ...] | None, attributes: Mapping[str, Any]) -> Callable[..., Any]:
        """The lowering as a pure function of arrays: of the named operands, or by default of the first ones.

        Returns the same object for the same arguments, so that JAX finds earlier traces.
        """

        def function(*arrays: Any) -> Any:
            if names is None:
                return self.lowering(*arrays, **attributes)
            return self.lowering(**dict(zip(names, arrays, strict=True)), **attributes)

        return self.remembered(("on_arrays", names, tuple(attributes.items())), lambda: function)

    def remembered(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Memoize `make` per key for the declaration's lifetime. Keys distinguish equal numbers of different types: see
        `exact_key`.

        A key that cannot be hashed, or that holds a graph or a tensor, is not cached: a declaration outlives any Ir.
        """
        if holds_graph(key):
            return make()
        key = exact_key(key)
        try:
            found = self._memory.get(key, _MISSING)
        except TypeError:  # from the hash
            return make()
        if found is _MISSING:
            found = self._memory[key] = make()
        return found

    def modified(self, attributes: Mapping[str, Any], names: Sequence[str] | None = None) -> frozenset[int]:
        """Positions of overwritten inputs, for given attributes and input names."""
        if self.overwrites is None:
            return frozenset()
        return self.overwrites.among(self._operands if names is None else names, attributes)

    # Recording ------------------------------------------------------------------------------------------------------

    def __call__(self, *operands: Any, results: Sequence[str | None] | None = None, **attributes: Any) -> Any:
        """Add the op to the current graph.

        Args:
            *operands: tensors of the current graph (or plain values, for operands that have a default).
            results: names of the result tensors, in place of the declared ones.
            **attributes: the op's attributes.

        Returns:
            The result tensor; a tuple of tensors if the op has several; `None` if it has none.
        """
        op, single = self._record(operands, attributes, results)
        return op.outputs[0] if single else (op.outputs or None)

    def record(self, *operands: Any, results: Sequence[str | None] | None = None, **attributes: Any) -> Op:
        """Add an op like calling the kind, but return the op."""
        return self._record(operands, attributes, results)[0]

    def _record(
        self, operands: tuple[Any, ...], attributes: dict[str, Any], results: Sequence[str | None] | None
    ) -> tuple[Op, bool]:
        """Record an op; also tell whether it declares a single result."""
        context = get_current_context()
        graph = context.graph
        inputs, names, attributes, specs = self._checked(operands, attributes, graph)
        op = Op(self, graph, inputs, names, attributes, context)
        single = isinstance(specs, TensorSpec)
        several = (specs,) if single else specs
        graph.append(op, several, op.result_names(len(several)) if results is None else results)  # type: ignore[arg-type]
        context.op_created(op)
        return op, single

    def check(self, *operands: Any, **attributes: Any) -> None:
        """Run all checks of a call without recording: for functions composed of several ops."""
        self._checked(operands, attributes, get_current_context().graph)

    def _checked(
        self, operands: tuple[Any, ...], attributes: dict[str, Any], graph: Graph
    ) -> tuple[tuple[Tensor, ...], tuple[str, ...] | None, dict[str, Any], Specs]:
        """Checked inputs, their names (with plain-value operands), attributes and result specs."""
        names = None
        plain: dict[str, Any] = {}
        try:
            if attributes:
                operands, attributes = self._parameters.sorted_out(self.name, operands, attributes)
                for name, value in attributes.items():
                    if isinstance(value, np.ndarray):
                        raise TypeError(f"{self.name}: `{name}` must be a plain value; got {value!r:.200}, an array.")
            inputs = self._tensors(operands, graph)
            self._parameters.check_attributes(self.name, attributes)
            if len(inputs) < len(operands):
                named = dict(zip(self.operand_names(len(operands)), operands, strict=True))
                names = tuple(name for name, operand in named.items() if isinstance(operand, Tensor))
                plain = {name: operand for name, operand in named.items() if name not in names}
            if len(inputs) > 1 and self.colocated != ():
                check_colocated(names or self.operand_names(len(inputs)), inputs, self.colocated)
            if self.real_only:
                self._check_real(names or self.operand_names(len(inputs)), inputs)
        except (ValueError, TypeError) as problem:
            raise type(problem)(f"{problem} {at_this_line(graph)}") from None
        specs = self._infer(operands, inputs, names, attributes, plain, graph)
        return inputs, names, attributes | plain, specs

    def verify(self, op: Op) -> None:
        """Raise unless the op's results match the specs derived from inputs and attributes."""
        operands, attributes = self.arguments(op, op.inputs)
        plain = {name: value for name, value in op.attributes.items() if name not in attributes}
        self._tensors(operands, op.graph)
        self._parameters.check_attributes(self.name, attributes)
        specs = self._infer(operands, op.inputs, op.operands, attributes, plain, op.graph)
        expected = [spec.to_tuple() for spec in ((specs,) if isinstance(specs, TensorSpec) else specs)]
        if op.gains:  # the op may have fewer inputs than its graph has gained
            expected = expected[: len(op.outputs)]
        if expected != [t.spec.to_tuple() for t in op.outputs]:
            specs_text = ", ".join(map(brief, op.outputs))
            raise PopxlError(f"{op!r} in {op.graph.title} does not make {specs_text} of its inputs.")

    def try_out(self, op: Op) -> None:
        """Raise if JAX cannot trace the op's function: shape rules ignore some attributes.

        Ops that the runtime or another op carries out are checked there.
        """
        if self.shape is not None and not self.is_carried_out_by_others:
            op.remembered("traced", lambda: trace(op.on_arrays(), *op.signature[2:]) is not None)

    def arguments(self, op: Op, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Operands and attributes that recreate the op on other inputs."""
        if op.operands is None:
            return tuple(inputs), dict(op.attributes)
        values = op.attributes | dict(zip(op.operands, inputs, strict=True))
        operands = tuple(values[name] for name in self._operands if name in values)
        return operands, {name: value for name, value in op.attributes.items() if name not in self._operands}

    def operand_names(self, count: int) -> tuple[str, ...]:
        """Names of the first `count` operands."""
        if self._variadic:
            several = self._operands[-1]
            return self._operands[:-1] + tuple(f"{several}[{i}]" for i in range(count - len(self._operands) + 1))
        return self._operands[:count]

    def _tensors(self, operands: tuple[Any, ...], graph: Graph) -> tuple[Tensor, ...]:
        """The tensors among the operands, after the checks that every op makes."""
        current = graph.ref
        for i, operand in enumerate(operands):
            if isinstance(operand, Tensor):
                if operand.graph_ref is not current:
                    raise foreign_tensor(self.name, self.operand_names(i + 1)[i], operand, graph)
            elif i < self._required or self._variadic:
                raise not_a_tensor(self.name, self.operand_names(i + 1)[i], operand)
        if len(operands) == len(self._operands):  # by far the most common case, and it skips the comprehension
            if all(isinstance(operand, Tensor) for operand in operands):
                return operands
        elif len(operands) < self._required or (len(operands) > len(self._operands) and not self._variadic):
            raise TypeError(f"{self.name}: takes the operands {self._operands}; {len(operands)} were given.")
        return tuple(operand for operand in operands if isinstance(operand, Tensor))

    def _check_real(self, names: Iterable[str], inputs: tuple[Tensor, ...]) -> None:
        for name, t in zip(names, inputs, strict=True):
            if t.dtype.is_complex:
                raise TypeError(
                    f"{self.name}: `{name}` is {brief(t)}, and the op is for real numbers alone. Take what is meant of "
                    "it: `ops.real`, `ops.imag`, `ops.abs`, `ops.angle`, or `ops.view_as_real` for both parts."
                )

    def _infer(
        self,
        operands: tuple[Any, ...],
        inputs: tuple[Tensor, ...],
        names: tuple[str, ...] | None,
        attributes: dict[str, Any],
        plain: dict[str, Any],
        graph: Graph,
    ) -> Specs:
        """Specs of the results; errors are told with the operands and the user's source line."""
        try:
            if self.shape is not None:
                inferred = self.shape(*operands, **attributes)
                return inferred if isinstance(inferred, TensorSpec) else _specs(inferred)
            return abstract_evaluation(self.on_arrays(names, attributes | plain), [t.spec for t in inputs])
        except (PopxlError, ValueError, TypeError) as problem:
            named = zip(names or self.operand_names(len(inputs)), inputs, strict=True)
            # An op that runs a graph names the input in question itself.
            operands_text = "" if self.runs else ", ".join(f"`{name}` is {brief(t)}" for name, t in named)
            context = f"Here {operands_text}. " if operands_text else ""
            raise type(problem)(f"{self.name}: {problem} {context}{at_this_line(graph)}") from None


def _specs(result: Any) -> Specs:
    """Normalize a shape rule's result: specs, or tensors with equal specs."""
    several = result if isinstance(result, list | tuple) else [result]
    if invalid := [item for item in several if not isinstance(item, TensorSpec | Tensor)]:
        raise TypeError(
            f"`shape` made {invalid[0]!r} ({type(invalid[0]).__name__}); expected the TensorSpec of a result."
        )
    specs = [item if isinstance(item, TensorSpec) else item.spec for item in several]
    return specs if several is result else specs[0]


_MISSING = object()
_declared: weakref.WeakValueDictionary[str, OpKind] = weakref.WeakValueDictionary()


def holds_graph(value: Any) -> bool:
    """Test whether a value contains a graph or tensor."""
    if isinstance(value, (tuple, list, frozenset)):  # as a tuple of types: a union would be made anew each time
        return any(map(holds_graph, value))
    return isinstance(value, (Tensor, Graph))


@dataclass(frozen=True)
class _Parameters:
    """Parsed parameters of a lowering.

    Attributes:
        operands: names of the operands.
        required: number of operands without a default.
        variadic: whether the last operand stands for any number of tensors.
        defaults: defaults of the operands that have one.
        attributes: names of the attributes, with a flag for those without a default; `None` if any name is allowed.
    """

    operands: tuple[str, ...]
    required: int
    variadic: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, bool] | None = None

    @staticmethod
    def from_function(lowering: Callable[..., Any]) -> _Parameters:
        by_kind: dict[Any, list[inspect.Parameter]] = defaultdict(list)
        for parameter in inspect.signature(lowering).parameters.values():
            by_kind[parameter.kind].append(parameter)
        single = by_kind[_POSITIONAL_ONLY] + by_kind[_POSITIONAL]
        defaults = {p.name: p.default for p in single if p.default is not p.empty}
        attributes = {p.name: p.default is p.empty for p in by_kind[_KEYWORD_ONLY]}
        return _Parameters(
            operands=tuple(p.name for p in single + by_kind[_SEVERAL]),
            required=len(single) - len(defaults),
            variadic=bool(by_kind[_SEVERAL]),
            defaults=defaults,
            attributes=None if by_kind[_ANY_KEYWORD] else attributes,
        )

    def check_attributes(self, name: str, attributes: Mapping[str, Any]) -> None:
        """Raise `TypeError` for missing or surplus attributes."""
        names = self.attributes
        if names is None:
            return
        odd = [n for n, required in names.items() if required and n not in attributes] + [*attributes.keys() - names]
        if odd:
            raise TypeError(f"{name}: the attributes {sorted(odd)} are missing, or too many; there are {[*names]}.")

    def with_groups(self) -> _Parameters:
        """Replace the function's group parameter by attributes that construct a group."""
        if self.attributes is None:
            return self
        named = {key: required for key, required in self.attributes.items() if key != "group"}
        return replace(self, attributes=named | {"stride": True, "group_size": True})

    def sorted_out(
        self, name: str, operands: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Separate operands from attributes, given by position or name. Raises `TypeError` for unknown names."""
        attributes = {key: value for key, value in keywords.items() if key not in self.operands}
        if len(attributes) < len(keywords):
            last = max(self.operands.index(key) for key in keywords if key in self.operands)
            for operand in self.operands[len(operands) : last + 1]:
                if operand not in keywords and operand not in self.defaults:
                    raise TypeError(f"{name}: the operand `{operand}` is missing.")
                operands += (keywords.get(operand, self.defaults.get(operand)),)
        if self.attributes is not None and not attributes.keys() <= self.attributes.keys():
            unknown = ", ".join(f"`{key}`" for key in attributes if key not in self.attributes)
            raise TypeError(
                f"{name}: there is no parameter {unknown}; the operands are {self.operands}, the attributes "
                f"{tuple(self.attributes)}."
            )
        for key, value in attributes.items():
            if isinstance(value, Tensor):
                raise TypeError(f"{name}: `{key}` is an attribute, a plain value; got {value!r}.")
        return operands, attributes


_POSITIONAL_ONLY = inspect.Parameter.POSITIONAL_ONLY
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_SEVERAL = inspect.Parameter.VAR_POSITIONAL
_KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
_ANY_KEYWORD = inspect.Parameter.VAR_KEYWORD
