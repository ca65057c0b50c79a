"""Properties of an op besides its computation: frozen values, in the `traits` of its declaration.

Most ops have none. A trait checks itself when the op is declared. Transforms, reports and the runtime ask for traits
instead of op names, so that a new op needs no change to them.

    decay_ = OpKind("Decay", lambda w, *, rate: w * (1 - rate), traits=[Overwrites("w")])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from popxl.core.declaration import OpKind
    from popxl.core.recording import Op
    from popxl.core.tensor import Location, Tensor
    from popxl.graph import Graph
    from popxl.values.spec import TensorSpec


class Mark:
    """A sentinel, equal only to itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


VJP = Mark("VJP")
"""Gradient of an op: one gradient op, whose function is `jax.vjp` of the op's function."""

REFUSED = Mark("REFUSED")
"""Gradient of an op that cannot be asked for: autodiff raises when one reaches the op."""


class Trait:
    """Base class of traits."""

    def check(self, kind: OpKind) -> None:
        """Raise `TypeError` for op kinds incompatible with the trait."""


@dataclass(frozen=True)
class View(Trait):
    """The result shares storage with the operands, its *bases*.

    Attributes:
        put: inverse of `lowering`, which reads the view from its bases: `put(*bases, view, **attributes)` returns the
            bases with the view written into them, as a tuple.
    """

    put: Callable[..., Any]


@dataclass(frozen=True, init=False)
class Overwrites(Trait):
    """The op overwrites operands. Its `lowering` returns their new content.

    Attributes:
        operands: names of the operands.
        aliased: whether the new content is also the result of the op, which shares the operand's storage. Otherwise new
            contents follow the results.
        forgets: whether an op with these attributes overwrites without reading.
        restarts: whether the op starts afresh where its step-count operand is 0, as each run sets it, so that state of
            earlier runs has no influence.
        positions: function of the op's attributes that gives the positions of these operands, in place of names.
    """

    operands: tuple[str, ...]
    aliased: bool
    forgets: Callable[[Mapping[str, Any]], bool]
    restarts: bool
    positions: Callable[[Mapping[str, Any]], AbstractSet[int]] | None

    def __init__(
        self,
        *operands: str,
        aliased: bool = True,
        forgets: Callable[[Mapping[str, Any]], bool] = lambda attributes: False,
        restarts: bool = False,
        positions: Callable[[Mapping[str, Any]], AbstractSet[int]] | None = None,
    ) -> None:
        vars(self).update(operands=operands, aliased=aliased, forgets=forgets, restarts=restarts, positions=positions)

    def check(self, kind: OpKind) -> None:
        if bool(self.operands) == bool(self.positions):
            raise TypeError(f"OpKind: {kind.name} overwrites operands: give their names, or a function of attributes.")
        kind.check_operands(self.operands, "overwrites")

    def among(self, names: Sequence[str], attributes: Mapping[str, Any]) -> frozenset[int]:
        """Positions of overwritten inputs, for given input names and attributes."""
        if self.positions is not None:
            return frozenset(self.positions(attributes))
        return frozenset(names.index(name) for name in self.operands if name in names)


def always(attributes: Mapping[str, Any]) -> bool:
    """A predicate over attributes: constant true."""
    return True


@dataclass(frozen=True)
class Drops(Trait):
    """The op leaves out elements at random.

    Attributes:
        seed: name of the seed operand.
        ratio: name of the attribute with the ratio of dropped elements; an op with ratio 0 reads no seed.
    """

    seed: str
    ratio: str

    def check(self, kind: OpKind) -> None:
        kind.check_operands((self.seed,), "draws what it drops by")
        kind.check_attribute(self.ratio, "drops as many as")


@dataclass(frozen=True)
class Draws(Trait):
    """The op makes random numbers, the same whenever its only operand, a seed, is the same."""


@dataclass(frozen=True)
class Effect(Trait):
    """Side effects beyond computing results, such as host communication; never eliminated."""


@dataclass(frozen=True)
class Schedules(Trait):
    """The op affects the schedule alone: the result is the first operand, in the same memory."""


@dataclass(frozen=True)
class Prefetched(Trait):
    """The op may run ahead of the ops that read its result, but at most one call ahead: results wait in memory.

    Its operands are computed no earlier than the call before the surrounding one, where a compiler would prefetch
    without limit. Operands that are there already are not held back.
    """


@dataclass(frozen=True)
class Exchange(Trait):
    """The op moves data between the device and the outside. Such ops can be merged into one that makes several moves.

    Attributes:
        attribute: name of the attribute with the other end: a stream, a buffer.
    """

    attribute: str

    def check(self, kind: OpKind) -> None:
        kind.check_attribute(self.attribute, "exchanges data with")


@dataclass(frozen=True)
class Requirement(Trait):
    """A runtime condition on operand values.

    The device checks the condition whenever the op runs. `session.run` raises an `ApplicationRuntimeError` for the
    first failure; the results of the op are then undefined.

    Attributes:
        operand: name of the operand.
        holds: JAX function of the operand's array that returns whether the condition holds, one bool or several.
        message: condition in words, as the end of "`operand` ...": `"has to be in [-32, 32)"`.
        option: session option that switches the check, if one does.
    """

    operand: str
    holds: Callable[[Any], Any]
    message: str
    option: str = ""

    def check(self, kind: OpKind) -> None:
        kind.check_operands((self.operand,), "requires something of")


Makes = Literal["same", "pieces", "own"] | None
"""Distribution of a collective's result over the members of a group."""


@dataclass(frozen=True)
class BetweenReplicas(Trait):
    """Communication with other replicas.

    `lowering` then has a keyword `group`, the `popxl.ops.collectives.Group` of the replica that runs it, where the op
    itself has the attributes `stride` and `group_size`, computed from a grouping by
    `popxl.ops.collectives.collectives.members`. Such an op states its shape and its gradient.

    Attributes:
        makes: distribution of the result over the members of a group: `"same"`, one value on all; `"pieces"`, one shard
            of a value each; `"own"`, the distribution of the operands; `None`, unknown. A function of the op's
            attributes, if it depends on them. If the op has an attribute `op`, that reduction comes first.
        same_feeds: whether an op with these attributes requires the replicas of a group to have the same feeds.
    """

    makes: Makes | Callable[[Mapping[str, Any]], Makes] = None
    same_feeds: Callable[[Mapping[str, Any]], bool] | None = None

    def check(self, kind: OpKind) -> None:
        if kind.shape is None or (kind.gradient is VJP and kind.overwrites is None):
            raise TypeError(f"OpKind: {kind.name} talks to other replicas: state its `shape`, and its `gradient`.")


@dataclass(frozen=True)
class Asserts(Trait):
    """The op returns its operand, declared equal on all replicas of the group in its attributes."""


@dataclass(frozen=True)
class Contracts(Trait):
    """The op multiplies two operands and sums over a dimension of each.

    Attributes:
        dimensions: function that returns the dimension of the first operand, and that of the second.
    """

    dimensions: Callable[[Op], tuple[int, int]]


@dataclass(frozen=True)
class RecomputedFrom(Trait):
    """Cheap recomputation of the first result from the operands and some other results, such as the statistics of a
    normalisation, where these are kept.

    Attributes:
        results: positions of these results.
        function: function that computes the first result with ops. It is called with these results, and by name with
            the operands and attributes.
    """

    results: tuple[int, ...]
    function: Callable[..., Tensor]


@dataclass(frozen=True)
class ShardingRule(Trait):
    """Correspondence between operand and result dimensions, and operands in which the op is linear.

    Checks of programs with replicas trace `lowering` for what is not declared.

    Attributes:
        subscripts: letters of the dimensions, as `popxl.values.subscripts` explains them: `"...ik,...kj->...ij"`; or a
            function of the operands' shapes and the attributes that returns them. By default, each element of a result
            depends on the elements of operands at its place.
        linear: names of operands in which the op is linear; those in which it is linear together, as a sum is, in one
            string: `"lhs rhs"`. Where the last operand is variadic, `"ts"` is all of these together, and `"ts[i]"` each
            by itself, as in a product.
    """

    subscripts: str | Callable[[Sequence[tuple[int, ...]], Mapping[str, Any]], str] = "...->..."
    linear: tuple[str, ...] = ()

    def check(self, kind: OpKind) -> None:
        names = (name.partition("[")[0] for group in self.linear for name in group.split())
        kind.check_operands(names, "is linear in")

    def written(
        self,
        kind: OpKind,
        operands: Sequence[str] | None,
        shapes: Sequence[tuple[int, ...]],
        attributes: Mapping[str, Any],
    ) -> tuple[list[str], list[str]]:
        """Subscripts of each operand and result; `operands` names tensor operands beside plain values."""
        text = self.subscripts if isinstance(self.subscripts, str) else self.subscripts(shapes, attributes)
        operand_texts, result_texts = (texts.split(",") for texts in text.split("->"))
        if len(operand_texts) == 1:
            return operand_texts * len(shapes), result_texts
        if operands is not None:
            text_of = dict(zip(kind.operand_names(len(operand_texts)), operand_texts, strict=True))
            operand_texts = [text_of[name] for name in operands]
        return operand_texts[: len(shapes)], result_texts

    def linear_positions(self, names: Sequence[str]) -> tuple[frozenset[int], ...]:
        """Positions of operands in which the op is linear together, for input names."""
        positions: list[frozenset[int]] = []
        for entry in self.linear:
            if entry.endswith("[i]"):
                positions += (frozenset({k}) for k, name in enumerate(names) if name.startswith(entry[:-2]))
            else:
                group = {*entry.split()}
                group_positions = (
                    k for k, name in enumerate(names) if not group.isdisjoint((name, name.partition("[")[0]))
                )
                positions.append(frozenset(group_positions))
        return tuple(positions)


@dataclass(frozen=True, init=False)
class Colocated(Trait):
    """Operands required on one device and tile set, unless all are; no names mean no requirement."""

    operands: tuple[str, ...]

    def __init__(self, *operands: str) -> None:
        object.__setattr__(self, "operands", operands)

    def check(self, kind: OpKind) -> None:
        kind.check_operands(self.operands, "has together")


@dataclass(frozen=True)
class OnIpus(Trait):
    """Results on several IPUs, one each. As many operands are on the IPUs of the results at their positions."""

    attribute: str

    def check(self, kind: OpKind) -> None:
        kind.check_attribute(self.attribute, "has results on")


@dataclass(frozen=True)
class Placed(Trait):
    """Results placed apart from the op.

    Attributes:
        place: location of the results: `(inputs, attributes, location of the op) -> location`.
    """

    place: Callable[[tuple[Tensor, ...], Mapping[str, Any], Location], Location]


@dataclass(frozen=True)
class RealOnly(Trait):
    """The op refuses complex numbers: it asks which of two is larger, rounds them, or means something else by them."""


@dataclass(frozen=True)
class Composite(Trait):
    """A composite of several ops, which are lowered together; operands may be anywhere.

    Attributes:
        parts: function that returns these ops.
    """

    parts: Callable[[Op], tuple[Op, ...]]


@dataclass(frozen=True)
class Runs(Trait):
    """The op runs graphs. Operands may be anywhere.

    An op that runs one graph is a *call*, or a *loop* if `iterations` is given. An op that runs several *chooses* one:
    the graphs are a true and a false one, the first operand is the condition, followed by the inputs of each graph.

    Attributes:
        graphs: names of the attributes that hold the graphs.
        returns: outputs of a graph that matter if these tensors of the op's own graph do.
        gains: if given, the op gains a result for each output that its graph gains later: the function computes the
            spec of the result from the output's spec and the op's attributes.
        iterations: name of the attribute with the number of iterations.
        backwards: name of the attribute, if any, that says whether the iteration counter counts down.
        overlap: name of the attribute, if any, that says whether iterations may overlap on several devices.
        carried: name of the attribute with the number of outputs that become inputs of the next iteration.
        sought: tensors of a graph whose gradients the gradient of the op computes; by default, its inputs.
        own_inputs, own_outputs: number of leading inputs and outputs of the graph that are between the op and the
            graph, without bindings in the caller.
    """

    graphs: tuple[str, ...]
    returns: Callable[[Op, Graph, AbstractSet[Tensor]], Iterable[Tensor]]
    gains: Callable[[TensorSpec, Mapping[str, Any]], TensorSpec] | None = None
    iterations: str = ""
    backwards: str = ""
    overlap: str = ""
    carried: str = ""
    sought: Callable[[Graph], Sequence[Tensor]] = lambda graph: graph.inputs
    own_inputs: int = 0
    own_outputs: int = 0

    def check(self, kind: OpKind) -> None:
        if len(self.graphs) not in (1, 2) or (self.iterations and len(self.graphs) != 1):
            raise TypeError(f"OpKind: {kind.name} runs one graph, or chooses among two; got {self.graphs}.")
        for name in (*self.graphs, *filter(None, (self.iterations, self.carried))):
            kind.check_attribute(name, "runs graphs by")

    @property
    def chooses(self) -> bool:
        """Whether a condition says which of two graphs runs."""
        return len(self.graphs) == 2

    @property
    def is_loop(self) -> bool:
        """Whether the graph is a loop body."""
        return bool(self.iterations)

    @property
    def is_call(self) -> bool:
        """Whether one graph runs, once."""
        return not self.chooses and not self.is_loop

    def of(self, op: Op) -> tuple[Run, ...]:
        """The op's called graphs with their bindings."""
        runs = []
        first = int(self.chooses)
        for condition, name in zip((True, False), self.graphs, strict=False):
            graph: Graph = op.attributes[name]
            count = len(graph.inputs) - self.own_inputs
            runs.append(
                Run(op, graph, self, first, op.inputs[first : first + count], condition if self.chooses else None)
            )
            first += count
        return tuple(runs)


@dataclass(frozen=True, eq=False)
class Run:
    """Called graph of an op, with its bindings.

    Attributes:
        op: the op.
        graph: the graph.
        trait: trait of the op.
        first: position of `operands` among the inputs of the op.
        operands: tensors of the caller that are bound to `inputs`, in order; fewer than these, if the graph has gained
            inputs since.
        condition: value of the condition for which the graph runs; `None` if it always does.
    """

    op: Op
    graph: Graph
    trait: Runs
    first: int
    operands: tuple[Tensor, ...]
    condition: bool | None

    @property
    def op_inputs(self) -> tuple[Tensor, ...]:
        """The inputs of the graph that the op itself gives values."""
        return self.graph.inputs[: self.trait.own_inputs]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Graph inputs bound to caller tensors."""
        return self.graph.inputs[self.trait.own_inputs :]

    @property
    def bindings(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Graph inputs, each with the caller tensor that is bound to it."""
        return zip(self.inputs, self.operands, strict=False)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Graph outputs for the caller, possibly including unreturned new ones."""
        return self.graph.outputs[self.trait.own_outputs :]

    @property
    def iterations(self) -> int:
        """Number of executions of the graph."""
        return self.op.attributes[self.trait.iterations] if self.trait.iterations else 1

    @property
    def numbers(self) -> range:
        """Iteration numbers, in running order."""
        in_order = range(self.iterations)
        return in_order[::-1] if self.op.attributes.get(self.trait.backwards) else in_order

    @property
    def overlaps(self) -> bool:
        """Whether an iteration may begin before the previous one has ended, on several devices."""
        return bool(self.op.attributes.get(self.trait.overlap))

    @property
    def carried(self) -> int:
        """Number of leading `outputs` that become `inputs` of the next iteration."""
        return self.op.attributes[self.trait.carried] if self.trait.carried else 0

    @property
    def results(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Map op results to last-iteration outputs, excluding stacked results."""
        pairs = zip(self.op.outputs, self.outputs, strict=False)
        return tuple(pairs)[: self.carried] if self.trait.is_loop else tuple(pairs)

    @property
    def is_bound(self) -> bool:
        """Whether every input has a binding: the graph may have gained inputs."""
        return len(self.operands) == len(self.inputs)


# Queries of traits --------------------------------------------------------------------------------------------------


def is_call(op: Op) -> bool:
    """Whether an op runs one graph, once."""
    return op.kind.runs is not None and op.kind.runs.is_call


def is_loop(op: Op) -> bool:
    """Whether an op is a loop over one graph."""
    return op.kind.runs is not None and op.kind.runs.is_loop


def chooses(op: Op) -> bool:
    """Whether an op runs one of two graphs."""
    return op.kind.runs is not None and op.kind.runs.chooses
