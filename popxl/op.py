"""What an op is: a declaration, `OpKind`, and its records in graphs, `Op`.

Every op of this project, and every op of a user, is one `OpKind`: a JAX function, and beside it what JAX cannot know
(the names of the results, the gradient where it is not simply JAX's, what is overwritten or shared in place).
Calling the kind on tensors records an `Op` in the current graph; running the graph calls the same function on
arrays. Nothing here computes. How a recorded op is carried out is in `runtime.lowering.lower`, how it is
differentiated in `popxl.transforms.autodiff`.

    sin = OpKind("Sin", jnp.sin)
    y = sin(x)                       # x, y: tensors of the current graph
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from popxl.base.source import DebugRecord, SourceLocation
from popxl.context import get_current_context, user_frame
from popxl.core.tensor import Location, Tensor
from popxl.core.tracing import abstract_evaluation, trace
from popxl.core.traits import (
    REFUSED,
    VJP,
    BetweenReplicas,
    Colocated,
    Drops,
    Effect,
    Exchange,
    Mark,
    OnIpus,
    Overwrites,
    Placed,
    Requirement,
    Run,
    Runs,
    StandsFor,
    Trait,
    View,
)
from popxl.errors import PopxlError, PopxlInternalError
from popxl.graph import Graph
from popxl.values.shapes import like_first
from popxl.values.spec import TensorSpec, brief

if TYPE_CHECKING:
    from popxl.context import Context
    from popxl.tensorlocation import ExecutionContext

__all__ = [
    "REFUSED",
    "VJP",
    "BetweenReplicas",
    "Colocated",
    "Drops",
    "Effect",
    "Exchange",
    "OnIpus",
    "Op",
    "OpKind",
    "Overwrites",
    "Placed",
    "Requirement",
    "Run",
    "Runs",
    "SourceLocation",
    "StandsFor",
    "Trait",
    "View",
]

Specs = TensorSpec | Sequence[TensorSpec]
T = TypeVar("T")


class OpKind:
    """The declaration of an op. Call it on tensors to add the op to the current graph.

    The parameters of `lowering` say what the op takes. Positional ones are operands: tensors in a graph, arrays when
    it runs. An operand that has a default may instead be given a plain value (`None`, a number), which then becomes
    part of the op. Keyword-only parameters are attributes: plain values, fixed when the op is created.

    Args:
        name: what printed graphs call the op, for example `"MatMul"`.
        lowering: the meaning of the op: a JAX function of the operands (arrays) and the attributes, returning one
            array, or a tuple of arrays.
        shape: the function's counterpart on specs: given tensors in place of arrays, it returns the `TensorSpec` of
            the result (or a sequence of them), or raises. Left out, it is derived from `lowering` by abstract
            evaluation.
        gradient: how gradients flow. `VJP` (the default) takes JAX's derivative of `lowering`; `None` lets none
            pass; `REFUSED` makes autodiff raise. A mapping from operand names to rules gives gradients to these
            operands only. A rule is written with ops, and its parameters say what it reads: `g`, the incoming
            gradient (`gs`, those of all results); an operand or an attribute, by name; `out`, the result (`outs`, all
            of them); `<operand>_spec`, the spec of an operand; `attributes`, all there are; and where the last operand
            stands for several, `i`, `operand` and `operand_spec`, the one in question. Operands and results that it
            reads are kept alive. A rule that returns another shape than the operand's is summed over the broadcast
            axes. A single function `(forward, gs) -> {operand index: Tensor}` serves ops that run graphs.
        result: name of the result tensor; `{operand}` stands for the name of that operand, `{i}` for the number of
            the result where there are several; a tuple names several results.
        traits: what else is true of the op, as values of `popxl.core.traits`: that it overwrites operands, is a view,
            has effects, talks to other replicas, ...
        operands: names of the operands, where those of `lowering`'s parameters would not do.
        key: what saved programs call the op, where several share a name. By default the name.
        derivation: for an op that was made from another, how; saved programs keep that in place of a key.

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
        self.result = result if result is not None else f"{_snake(name)}_out"
        self._memory: dict[tuple[Any, ...], Any] = {}
        self._renamed = operands
        self._take(tuple(traits))
        parameters = _Parameters.of(lowering) if operands is None else _Parameters(operands, len(operands))
        if self.between_replicas:
            parameters = parameters.with_groups()
        self._operands, self._required, self._variadic = parameters.operands, parameters.required, parameters.variadic
        self._parameters = parameters
        for trait in self.traits:
            trait.check(self)

    def _take(self, traits: tuple[Trait, ...]) -> None:
        """Take the traits apart: everybody asks for them, and often."""
        self.traits = traits
        self.requirements = tuple(trait for trait in traits if isinstance(trait, Requirement))
        others = [trait for trait in traits if not isinstance(trait, Requirement)]
        known: dict[type, Any] = {type(trait): trait for trait in others}
        if len(known) < len(others) or not all(isinstance(trait, Trait) for trait in traits):
            raise TypeError(
                f"OpKind: the `traits` of {self.name} are {traits}; expected values of `popxl.core.traits`, each kind "
                "of trait once (but for requirements)."
            )
        self.view: View | None = known.get(View)
        self.overwrites: Overwrites | None = known.get(Overwrites)
        self.runs: Runs | None = known.get(Runs)
        self.graphs = () if self.runs is None else self.runs.graphs  # names of the attributes that hold graphs
        self.stands_for: StandsFor | None = known.get(StandsFor)
        self.placed: Placed | None = known.get(Placed)
        self.effect = Effect in known
        self.exchange: str = known[Exchange].attribute if Exchange in known else ""
        self.between_replicas = BetweenReplicas in known
        self.ipus: str = known[OnIpus].attribute if OnIpus in known else ""
        self.drops: Drops | None = known.get(Drops)
        self.aliased = self.overwrites is not None and self.overwrites.aliased
        anywhere = () if self.runs or self.stands_for or self.ipus else None
        self.colocated: tuple[str, ...] | None = known[Colocated].operands if Colocated in known else anywhere

    @property
    def is_carried_out_by_others(self) -> bool:
        """Whether it takes more than its function, called on arrays, to carry the op out."""
        return bool(self.runs or self.stands_for or self.exchange or self.between_replicas or self.effect)

    def check_operands(self, names: Iterable[str], does: str) -> None:
        """`TypeError` if there is no operand of one of these names."""
        for name in names:
            if name not in self._operands:
                raise TypeError(f"OpKind: {self.name} {does} `{name}`, and its operands are {self._operands}.")

    def check_attribute(self, name: str, does: str) -> None:
        """`TypeError` if there is no attribute of this name."""
        known = self._parameters.attributes
        if known is not None and self._renamed is None and name not in known:
            raise TypeError(f"OpKind: {self.name} {does} `{name}`, and its attributes are {tuple(known)}.")

    def __repr__(self) -> str:
        return f"OpKind[{self.name}]"

    @staticmethod
    def named(key: str) -> OpKind | None:
        """The op that was last declared under this key, if somebody still has it."""
        return _declared.get(key)

    def inplace(self, name: str, result: str, **changes: Any) -> OpKind:
        """The same op, overwriting its first operand and returning an alias of it."""
        traits = [
            Overwrites(self._operands[0]),
            *(trait for trait in self.traits if isinstance(trait, BetweenReplicas)),
        ]
        settings = {"shape": like_first, "operands": self._renamed, "traits": traits} | changes
        return OpKind(name, self.lowering, result=result, **settings)

    def on_arrays(self, names: tuple[str, ...] | None, attributes: Mapping[str, Any]) -> Callable[..., Any]:
        """The lowering as a function of arrays only: those of the named operands (by default, of the first ones).

        The same object for the same arguments, so that what JAX traced is found again.
        """

        def function(*arrays: Any) -> Any:
            if names is None:
                return self.lowering(*arrays, **attributes)
            return self.lowering(**dict(zip(names, arrays, strict=True)), **attributes)

        return self.remembered(("on_arrays", names, tuple(attributes.items())), lambda: function)

    def remembered(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """What `make` made for this key before. It is kept with the declaration, and gone with it.

        Nothing is kept for a key that cannot be hashed, or that holds a graph or a tensor: a declaration lives longer
        than any Ir.
        """
        if _holds_graph(key):
            return make()
        try:
            if key not in self._memory:
                self._memory[key] = make()
            return self._memory[key]
        except TypeError:  # from the hash
            return make()

    def modified(self, attributes: Mapping[str, Any], names: Sequence[str] | None = None) -> frozenset[int]:
        """Positions of the inputs that an op overwrites: one with these attributes, and inputs of these names."""
        if self.overwrites is None:
            return frozenset()
        return self.overwrites.among(self._operands if names is None else names, attributes)

    # Recording ------------------------------------------------------------------------------------------------------

    def __call__(self, *operands: Any, results: Sequence[str | None] | None = None, **attributes: Any) -> Any:
        """Add the op to the current graph.

        Args:
            *operands: tensors of the current graph (plain values too, for operands that have a default).
            results: names of the result tensors, instead of those declared.
            **attributes: the op's attributes.

        Returns:
            The result tensor; a tuple of tensors if the op has several; `None` if it has none.
        """
        op, single = self._record(operands, attributes, results)
        return op.outputs[0] if single else (op.outputs or None)

    def record(self, *operands: Any, results: Sequence[str | None] | None = None, **attributes: Any) -> Op:
        """As a call, but returns the op."""
        return self._record(operands, attributes, results)[0]

    def _record(
        self, operands: tuple[Any, ...], attributes: dict[str, Any], results: Sequence[str | None] | None
    ) -> tuple[Op, bool]:
        """The new op, and whether it is declared to have just one result."""
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
        """Make all the checks of a call, and add nothing: for functions that are made of several ops."""
        self._checked(operands, attributes, get_current_context().graph)

    def _checked(
        self, operands: tuple[Any, ...], attributes: dict[str, Any], graph: Graph
    ) -> tuple[tuple[Tensor, ...], tuple[str, ...] | None, dict[str, Any], Specs]:
        """Inputs, their names if some operand is a plain value, attributes, and specs of the results."""
        names = None
        plain: dict[str, Any] = {}
        try:
            if attributes:
                operands, attributes = self._parameters.sorted_out(self.name, operands, attributes)
            inputs = self._tensors(operands, graph)
            if len(inputs) < len(operands):
                named = dict(zip(self.operand_names(len(operands)), operands, strict=True))
                names = tuple(name for name, operand in named.items() if isinstance(operand, Tensor))
                plain = {name: operand for name, operand in named.items() if name not in names}
            if len(inputs) > 1 and self.colocated != ():
                check_colocated(names or self.operand_names(len(inputs)), inputs, self.colocated)
        except (ValueError, TypeError) as problem:
            raise type(problem)(f"{problem} {_at_this_line(graph)}") from None
        specs = self._infer(operands, inputs, names, attributes, plain, graph)
        return inputs, names, attributes | plain, specs

    def verify(self, op: Op) -> None:
        """Raise if an op of this kind does not have the results that its inputs and attributes give it."""
        operands, attributes = self.arguments(op, op.inputs)
        plain = {name: value for name, value in op.attributes.items() if name not in attributes}
        self._tensors(operands, op.graph)
        self._parameters.check_attributes(self.name, attributes)
        specs = self._infer(operands, op.inputs, op.operands, attributes, plain, op.graph)
        expected = [spec.to_tuple() for spec in ((specs,) if isinstance(specs, TensorSpec) else specs)]
        if op.gains:  # it need not have gained what its graph has
            expected = expected[: len(op.outputs)]
        if expected != [t.spec.to_tuple() for t in op.outputs]:
            shown = ", ".join(map(brief, op.outputs))
            raise PopxlError(f"{op!r} in {op.graph.title} does not make {shown} of its inputs.")

    def try_out(self, op: Op) -> None:
        """Raise if the function of an op cannot be traced: a rule for shapes does not look at all attributes.

        An op that others carry out is left to these.
        """
        if self.shape is not None and not self.is_carried_out_by_others:
            given, made = (tuple(t.spec for t in tensors) for tensors in (op.inputs, op.outputs))
            key = ("traced", op.operands, tuple(op.attributes.items()), given, made)
            self.remembered(key, lambda: trace(op.on_arrays(), given, made) is not None)

    def arguments(self, op: Op, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Operands and attributes that make the same op of other inputs."""
        if op.operands is None:
            return tuple(inputs), dict(op.attributes)
        known = op.attributes | dict(zip(op.operands, inputs, strict=True))
        operands = tuple(known[name] for name in self._operands if name in known)
        return operands, {name: value for name, value in op.attributes.items() if name not in self._operands}

    def operand_names(self, count: int) -> tuple[str, ...]:
        """Names of the first `count` operands."""
        if self._variadic:
            several = self._operands[-1]
            return self._operands[:-1] + tuple(f"{several}[{i}]" for i in range(count - len(self._operands) + 1))
        return self._operands[:count]

    def _tensors(self, operands: tuple[Any, ...], graph: Graph) -> tuple[Tensor, ...]:
        """The tensors among the operands, after the checks that every op makes."""
        here = graph.ref
        for i, operand in enumerate(operands):
            if isinstance(operand, Tensor):
                if operand.graph_ref is not here:
                    raise foreign_tensor(self.name, self.operand_names(i + 1)[i], operand, graph)
            elif i < self._required or self._variadic:
                raise not_a_tensor(self.name, self.operand_names(i + 1)[i], operand)
        if len(operands) == len(self._operands):  # by far the most common case, and it skips the comprehension
            if all(isinstance(operand, Tensor) for operand in operands):
                return operands
        elif len(operands) < self._required or (len(operands) > len(self._operands) and not self._variadic):
            raise TypeError(f"{self.name}: takes the operands {self._operands}; {len(operands)} were given.")
        return tuple(operand for operand in operands if isinstance(operand, Tensor))

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
                return self.shape(*operands, **attributes)
            return abstract_evaluation(self.on_arrays(names, attributes | plain), [t.spec for t in inputs])
        except (PopxlError, ValueError, TypeError) as problem:
            named = zip(names or self.operand_names(len(inputs)), inputs, strict=True)
            # An op that runs a graph names the input in question itself.
            shown = "" if self.runs else ", ".join(f"`{name}` is {brief(t)}" for name, t in named)
            here = f"Here {shown}. " if shown else ""
            raise type(problem)(f"{self.name}: {problem} {here}{_at_this_line(graph)}") from None


_declared: weakref.WeakValueDictionary[str, OpKind] = weakref.WeakValueDictionary()


def _holds_graph(value: Any) -> bool:
    """Whether a value, or one inside of it, is a graph or a tensor."""
    if isinstance(value, tuple | list | frozenset):
        return any(map(_holds_graph, value))
    return isinstance(value, Tensor | Graph)


def _snake(name: str) -> str:
    """`"LogicalNot"` → `"logical_not"`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@dataclass(frozen=True)
class _Parameters:
    """What the parameters of a lowering say.

    Attributes:
        operands: names of the operands.
        required: how many of them have no default.
        variadic: the last operand stands for any number of tensors.
        defaults: defaults of the operands that have one.
        attributes: names of the attributes, and whether each has to be given; `None` if any name will do.
    """

    operands: tuple[str, ...]
    required: int
    variadic: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    attributes: Mapping[str, bool] | None = None

    @staticmethod
    def of(lowering: Callable[..., Any]) -> _Parameters:
        """Of a function."""
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
        """`TypeError` if an attribute is missing, or one too many."""
        known = self.attributes
        if known is None:
            return
        odd = [n for n, required in known.items() if required and n not in attributes] + [*attributes.keys() - known]
        if odd:
            raise TypeError(f"{name}: the attributes {sorted(odd)} are missing, or too many; there are {[*known]}.")

    def with_groups(self) -> _Parameters:
        """Where the function takes a group: an op has what makes one."""
        if self.attributes is None:
            return self
        own = {key: required for key, required in self.attributes.items() if key != "group"}
        return replace(self, attributes=own | {"stride": True, "group_size": True})

    def sorted_out(
        self, name: str, operands: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Operands and attributes, where operands may have been given by name. `TypeError` for an unknown name."""
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


class Op:
    """One op in a graph: what it is, what it reads and makes, where it runs, and the line that created it.

    Attributes:
        kind: the declaration.
        id: number of the op, unique in the Ir; the first op has 100.
        inputs: the tensors read, in the order of the kind's operands. Operands given as plain values are attributes.
        outputs: the tensors made.
        attributes: the plain values, by name.
        modified: positions of the inputs that the op overwrites.
        ipu, io_tiles: placement of the op.
        location: placement of its results; that of the op, but for copies.
        execution_context: the part of the program that the op belongs to.
        name: the active name scopes and the kind's name, joined by slashes.
        after: ids of ops that `in_sequence` puts before this one. Creation order is always a legal order.
    """

    __slots__ = (
        "__weakref__",
        "_graph",
        "_made_at",
        "after",
        "attributes",
        "execution_context",
        "id",
        "inputs",
        "io_tiles",
        "ipu",
        "kind",
        "location",
        "modified",
        "name",
        "operands",
        "outputs",
    )

    def __init__(
        self,
        kind: OpKind,
        graph: Graph,
        inputs: tuple[Tensor, ...],
        operands: tuple[str, ...] | None,
        attributes: dict[str, Any],
        context: Context,
    ) -> None:
        self.kind = kind
        self._graph = graph.ref
        self.inputs = inputs
        self.outputs: tuple[Tensor, ...] = ()
        self.operands = operands
        self.attributes: MappingProxyType[str, Any] = MappingProxyType(attributes)
        self.modified = kind.modified(attributes, operands)
        self.ipu = context.ipu_id
        self.io_tiles = context.io_tile_set
        here = (context.ipu_id, context.io_tile_set)
        self.location: Location = here if kind.placed is None else kind.placed.place(inputs, attributes, here)
        self.execution_context: ExecutionContext = context.execution_context
        self.name = context.scope_prefix + kind.name
        self._made_at: SourceLocation | DebugRecord | tuple[Any, int] = context.debug_record or user_frame()
        self.after: tuple[int, ...] = ()
        self.id = -1  # given by the graph that the op is appended to

    @classmethod
    def restore(cls, kind: OpKind, graph: Graph, source: SourceLocation, **state: Any) -> Op:
        """An op as it was: one that was saved, or a part of one that stands for several."""
        op = object.__new__(cls)
        op.kind, op._graph, op._made_at = kind, graph.ref, source
        op._set(state)
        return op

    def _set(self, state: Mapping[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, MappingProxyType(dict(value)) if name == "attributes" else value)

    def edit(self, **state: Any) -> None:
        """Change what the op is. Attributes of an op are set by this alone: a session that was made before can tell.

        Args:
            **state: new values, by the names of attributes. What they mean together is not checked.

        Example:
            >>> site.op.edit(modified=site.op.modified | {0})
        """
        graph = self.graph
        self._set(state)
        graph.ir.edits.note()

    @property
    def graph(self) -> Graph:
        """The graph that the op is in."""
        graph = self._graph()
        if graph is None:
            raise ReferenceError(f"The Ir of the op {self} is gone; keep a reference to the Ir.")
        return graph

    def location_of(self, t: Tensor) -> Location:
        """Where one of the results is."""
        if not self.kind.ipus:
            return self.location
        return (self.attributes[self.kind.ipus][self.outputs.index(t)], self.location[1])

    @property
    def op_type(self) -> str:
        """Name of the kind, as printed: `"MatMul"`."""
        return self.kind.name

    @property
    def source(self) -> SourceLocation:
        """The user's line that created the op."""
        made_at = self._made_at
        if isinstance(made_at, DebugRecord):
            return made_at.location
        return made_at if isinstance(made_at, SourceLocation) else SourceLocation.of(made_at)

    @property
    def debug_record(self) -> DebugRecord:
        """Which call created the op: of a function with `popxl.context.op_debug_context`, or else of the op itself."""
        if isinstance(self._made_at, DebugRecord):
            return self._made_at
        inputs, outputs = (tuple(t.id for t in tensors) for tensors in (self.inputs, self.outputs))
        api = _snake(self.op_type)
        scopes = self.name.removesuffix(self.op_type)
        return DebugRecord(api, f"{scopes}{api}", inputs, self.source.resolved, outputs)

    @property
    def parts(self) -> tuple[Op, ...]:
        """The ops that are carried out, in order, when this one is: itself, unless it stands for several."""
        return (self,) if self.kind.stands_for is None else self.kind.stands_for.parts(self)

    @property
    def called_graphs(self) -> tuple[Graph, ...]:
        """The graphs that the op runs."""
        return tuple(self.attributes[name] for name in self.kind.graphs)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The same, each with what is bound to it."""
        return () if self.kind.runs is None else self.kind.runs.of(self)

    @property
    def bases(self) -> tuple[Tensor, ...]:
        """The inputs whose storage the first output shares: none, for an op whose results are its own."""
        if self.kind.view is not None:
            return self.inputs
        return tuple(self.inputs[i] for i in self.modified) if self.kind.aliased else ()

    def again(self, inputs: Sequence[Tensor]) -> Op:
        """Add the same op to the current graph, on other inputs."""
        operands, attributes = self.kind.arguments(self, inputs)
        return self.kind.record(*operands, results=[t.name for t in self.outputs], **attributes)

    @property
    def gains(self) -> bool:
        """Whether the op gains a result for each output that its graph gains."""
        return self.kind.runs is not None and self.kind.runs.gains is not None

    def gain_output(self, output: Tensor) -> None:
        """Add a result for an output that the op's graph has gained, if the op returns these."""
        if not self.gains:
            return
        name, spec = output.name, self.kind.runs.gains(output.spec, self.attributes)  # type: ignore[union-attr,misc]
        t: Tensor = self.graph.new_tensor(name, spec, scoped=False)
        t.made_by(self)
        self.edit(outputs=(*self.outputs, t))

    def gain_input(self, t: Tensor) -> None:
        """Bind a tensor to the input that the op's graph has gained last. A loop passes it to each turn as it is.

        Args:
            t: a tensor of the graph that the op is in, which looks like the input.

        Raises:
            PopxlError: if this is no such tensor, or the op is neither a call nor a loop.
        """
        wanted = self.called_graphs[0].inputs[-1] if self.gains else None
        if wanted is None or t.graph_ref is not self._graph or t.spec.to_tuple() != wanted.spec.to_tuple():
            raise PopxlError(f"{self!r} ({self.source}) cannot bind {t!r} to {wanted!r}, an input gained by its graph.")
        self.edit(inputs=(*self.inputs, t))
        t.used_by(self)
        wanted.bound_to(t)

    def trim_outputs(self, count: int) -> None:
        """Take back the results after the first `count`. Nothing may use them."""
        for t in self.outputs[count:]:
            self.graph.forget(t)
        self.edit(outputs=self.outputs[:count])

    def operand_names(self) -> tuple[str, ...]:
        """Names of the inputs, as the kind's function calls them."""
        return self.operands or self.kind.operand_names(len(self.inputs))

    def apply(self, values: Sequence[Any], attributes: Mapping[str, Any] | None = None) -> Any:
        """What the kind's function makes of values in place of the inputs, and of these attributes or its own."""
        return self._call(self.kind.lowering, values, attributes=self.attributes if attributes is None else attributes)

    def on_arrays(self) -> Callable[..., Any]:
        """The op as a function of the arrays of its inputs."""
        return self.kind.on_arrays(self.operands, self.attributes)

    def put(self, bases: Sequence[Any], view: Any) -> Any:
        """For a view op: its bases, with the view written into them."""
        if self.kind.view is None:
            raise PopxlInternalError(f"{self!r} is no view.")
        return self._call(self.kind.view.put, bases, view, attributes=self.attributes)

    def _call(
        self, function: Callable[..., Any], values: Sequence[Any], *more: Any, attributes: Mapping[str, Any]
    ) -> Any:
        if self.operands is None:
            return function(*values, *more, **attributes)
        return function(*more, **dict(zip(self.operands, values, strict=True)), **attributes)

    def result_names(self, count: int) -> Sequence[str]:
        """Names for the results, made from what the kind declares."""
        result = self.kind.result
        if not isinstance(result, str):
            return result
        if "{" not in result:
            return [result] * count
        known = dict(zip(self.operand_names(), (t.name for t in self.inputs), strict=True)) | self.attributes
        return [result.format(**known, i=i) for i in range(count)]

    def __repr__(self) -> str:
        return f"Op[{self.name}.{self.id}]"


# What every op checks -----------------------------------------------------------------------------------------------


def _at_this_line(graph: Graph) -> str:
    """Where a mistake is: the graph, and the user's line that is calling us."""
    source = SourceLocation.of(user_frame())
    return f"In {graph.title}, at `{source.text}` ({source})." if source.text else f"In {graph.title}."


def not_a_tensor(name: str, operand: str, value: Any) -> TypeError:
    """The error for an operand that is no tensor."""
    if isinstance(value, tuple | list) and any(isinstance(each, Tensor) for each in value):
        remedy = (
            "These are several tensors, such as a call returns: take one of them, as in `(y,) = ops.call(graph, x)`."
        )
    elif callable(getattr(value, "call", None)) or isinstance(value, Graph):
        remedy = "A graph is no value: call it first, and take what the call returns."
    else:
        remedy = "Make a tensor of it with `popxl.constant(value, dtype)`."
    return TypeError(f"{name}: `{operand}` must be a Tensor; got {value!r} ({type(value).__name__}). {remedy}")


def foreign_tensor(name: str, operand: str, t: Tensor, graph: Graph) -> ValueError:
    """The error for a tensor of another graph."""
    home = t.graph_ref()
    if home is None or home.ir is not graph.ir:
        remedy = "It belongs to another Ir; a program is made of the tensors of one."
    else:
        remedy = (
            f"It is in {home.title}. Pass it into the graph as an input (an argument of the function given to "
            "`create_graph`, or `popxl.graph_input`) and bind it where the graph is called."
        )
    return ValueError(f"{name}: `{operand}` is {t!r}, which is not in {graph.title}, the current graph. {remedy}")


def check_colocated(names: Sequence[str], tensors: Sequence[Tensor], which: tuple[str, ...] | None = None) -> None:
    """`ValueError` if two tensors, of all or of those named in `which`, are on different IPUs or tile sets."""
    for part, what, shown in ((0, "IPUs", "ipu"), (1, "tile sets", "tile_set")):
        first: tuple[str, Tensor, Any] | None = None
        for name, t in zip(names, tensors, strict=True):
            place = t.location[part]
            if place is None or (which is not None and name not in which):
                continue
            if first is None:
                first = (name, t, place)
            elif first[2] != place:
                raise ValueError(
                    f"The tensors `{first[0]}` and `{name}` are located on different {what}: "
                    f"{getattr(first[1], shown)} and {getattr(t, shown)}. Copy one of them first (`ops.ipu_copy`, "
                    "`ops.io_tile_copy`)."
                )
